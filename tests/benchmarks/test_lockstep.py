"""`benchmarks/lockstep.py` samples what it is compared with: all tokens of every row, from the policy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import lockstep
from jaxft.core.cache import init_cache
from jaxft.core.decode import decode
from jaxft.core.logprobs import token_logprobs
from jaxft.models.bridge import from_function
from jaxft.models.config import model_preset
from jaxft.models.load import init_model
from machine import live_device_bytes, tree_bytes

pytestmark = pytest.mark.slow
PROMPT, GENERATIONS = 70, 3


@pytest.fixture(scope="module")
def tiny():
    model, params = init_model(model_preset("qwen3-50k"), jax.random.key(0))
    prompts = np.random.default_rng(0).integers(0, model.config.vocab_size, (2, PROMPT), np.int32)
    return model, params, jax.jit(model.decode_layout)(params), prompts


def test_generations_of_a_prompt_sample_from_the_policy(tiny):
    """Each has a copy of the prompt, whose pages are neither shared nor full."""
    model, params, decode_params, prompts = tiny
    cache, tables = lockstep.prefilled(model, decode_params, prompts, PROMPT + 9, GENERATIONS)
    assert np.unique(tables).size == tables.size
    rows = lockstep.row_params(np.full(6, PROMPT + 9), seed=0)
    state = lockstep.state_at(np.repeat(prompts[:, -1], GENERATIONS), PROMPT - 1)
    emitted = jax.jit(decode, static_argnums=(0, 6))(model, decode_params, cache, tables, state, rows, 9)[2]
    assert emitted.counts.tolist() == [9] * 6
    tokens = np.concatenate([np.repeat(prompts, GENERATIONS, axis=0), emitted.tokens], axis=1)
    scored = token_logprobs(model, params, jnp.asarray(tokens)).logprobs[:, PROMPT:]
    np.testing.assert_allclose(emitted.sampler_logprobs, scored, rtol=0, atol=1e-5)
    assert len({tuple(row) for row in np.asarray(emitted.tokens).tolist()}) == 6


@pytest.mark.parametrize(("longest", "calls"), [(1, 1), (16, 1), (17, 2), (40, 3)])
def test_a_batch_ends_with_its_longest_row_and_writes_in_place(longest, calls):
    steps = []

    def network(params, tokens, positions):
        jax.debug.callback(lambda: steps.append(None))
        return params["scale"] * jax.nn.one_hot(tokens, 9)

    model, params, answers = from_function(network), {"scale": jnp.array(1.0)}, np.array([1, longest])
    cache, tables = init_cache(model, 2, 110, jnp.float32)
    state, rows = lockstep.state_at(np.array([3, 4]), 9), lockstep.row_params(10 + answers, seed=0)
    after, counts = lockstep.decoded(model, params, cache, tables, state, rows, most_tokens=100)
    jax.block_until_ready(after)
    jax.effects_barrier()
    np.testing.assert_array_equal(counts, answers)
    assert len(steps) == 16 * calls
    assert cache.is_deleted()


@pytest.mark.parametrize(("batch_rows", "batches"), [(6, 1), (3, 2)])
def test_every_row_gets_its_tokens_in_batches_of_any_size(tiny, batch_rows, batches):
    model, _, params, prompts = tiny
    answers = np.array([1, 40, 3, 16, 17, 2])
    assert lockstep.sample_batches(model, params, prompts, GENERATIONS, answers, batch_rows, 40, seed=batches) == 79


def test_each_batch_begins_when_the_pages_of_the_one_before_are_free(tiny, monkeypatch):
    model, _, params, prompts = tiny
    live, prefilled = [], lockstep.prefilled

    def watched(*arguments):
        live.append(live_device_bytes())
        return prefilled(*arguments)

    monkeypatch.setattr(lockstep, "prefilled", watched)
    lockstep.sample_batches(model, params, prompts, GENERATIONS, np.full(6, 2), GENERATIONS, 40, seed=0)
    cache_bytes = tree_bytes(jax.eval_shape(lambda: prefilled(model, params, prompts[:1], PROMPT + 40, GENERATIONS))[0])
    assert len(live) == 2
    assert live[1] - live[0] < cache_bytes / 2
