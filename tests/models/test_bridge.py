"""A network of the user's own behind the model contract: sampled, scored and trained like the built-in decoder."""

import json
import os
import subprocess
import sys
from functools import cache, partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx

from jaxft.core.generate import generate
from jaxft.core.logprobs import token_logprobs
from jaxft.core.objectives import sft_loss
from jaxft.core.sharding import Sharding, make_mesh
from jaxft.core.types import Batch
from jaxft.core.update import init_train_state, make_update
from jaxft.models.bridge import from_function, from_linen, from_nnx
from jaxft.rollout.model_runner import ModelRunner, PrefillChunk, PrefillRow
from jaxft.rollout.requests import Request

VOCAB, WIDTH, PLACES = 11, 8, 64


def causal_mean(x):
    """The mean of a token and all tokens before it."""
    return jnp.cumsum(x, axis=1) / jnp.arange(1, x.shape[1] + 1)[None, :, None]


class NnxNetwork(nnx.Module):
    def __init__(self, rngs):
        self.embed = nnx.Embed(VOCAB, WIDTH, rngs=rngs)
        self.place = nnx.Embed(PLACES, WIDTH, rngs=rngs)
        self.layers = nnx.List([nnx.Linear(WIDTH, WIDTH, rngs=rngs) for _ in range(2)])
        self.head = nnx.Linear(WIDTH, VOCAB, rngs=rngs)

    def __call__(self, tokens, positions):
        x = self.embed(tokens) * 3 + self.place(positions)
        for layer in self.layers:
            x = x + nnx.gelu(layer(causal_mean(x)))
        return self.head(x)


class LinenNetwork(linen.Module):
    widths: tuple = (WIDTH, WIDTH)

    @linen.compact
    def __call__(self, tokens, positions):
        x = linen.Embed(VOCAB, WIDTH)(tokens) * 3 + linen.Embed(PLACES, WIDTH)(positions)
        for width in self.widths:
            x = x + linen.gelu(linen.Dense(width)(causal_mean(x)))
        return linen.Dense(VOCAB)(x)


def bigram(params, tokens, positions):
    return params["table"][tokens] + params["place"][positions]


def nnx_network():
    return nnx.jit(lambda: NnxNetwork(nnx.Rngs(0)))()


@cache
def nnx_model():
    return from_nnx(nnx_network())


@cache
def linen_model():
    start = np.zeros((1, 1), np.int32)
    init = jax.jit(LinenNetwork().init)
    return from_linen(LinenNetwork(), init(jax.random.key(0), start, start)["params"])


def function_model(dtype=np.float32):
    table, place = (np.random.default_rng(n).normal(size=(n, VOCAB)).astype(dtype) for n in (VOCAB, PLACES))
    return from_function(bigram), {"table": table, "place": place}


score = jax.jit(token_logprobs, static_argnums=0)


@pytest.fixture(scope="module", params=[nnx_model, pytest.param(linen_model, marks=pytest.mark.slow)])
def rollout(request):
    prompts, sampling = [[3], [1, 2, 3, 4, 5], [0, 0]], {"num_generations": 4, "max_new_tokens": 12}
    return request.param(), generate(
        *request.param(), prompts, jax.random.key(5), **sampling, temperature=1.3, stop_ids=(9,)
    )


def test_sampler_and_trainer_agree(rollout):
    made, rollout = rollout
    again = np.asarray(score(*made, rollout.tokens, temperature=np.float32(1.3)).logprobs)
    rollout = jax.device_get(rollout)
    mask = rollout.completion_mask
    np.testing.assert_allclose(rollout.sampler_logprobs[mask], again[mask], rtol=0, atol=1e-5)
    assert (rollout.tokens[mask] == 0).any()
    assert rollout.sampler_logprobs.min() < -2


RULES = ("kernel", ("fsdp", "tensor")), ("embedding", (None, "fsdp")), ("table", ("fsdp", None))


def differences_on_mesh(make, sizes):
    """Of tokens that a mesh samples, by `generate` and by the engine's programs, the largest differences between their
    log-probabilities and those that one device gives them."""
    alone, params = make()
    sharding = Sharding(make_mesh(*sizes, devices=jax.devices()[: np.prod(sizes)]), RULES)
    model, placed = alone._replace(sharding=sharding), sharding.place(jax.device_get(params))
    prompts = [[3], [1, 2, 3, 4, 5], [0, 0], [7, 7, 7]]
    rollout = jax.device_get(generate(model, placed, prompts, jax.random.key(5), num_generations=4, max_new_tokens=12))
    found = [(rollout.tokens, rollout.sampler_logprobs, rollout.completion_mask)]

    runner = ModelRunner(model, seed=0, slots=8, length=PLACES)
    pages = [slot % (8 // runner.row_shards) for slot in range(8)]
    requests = [Request((1 + slot, 2, 3), (0, 0, 0, 0, 0, slot), 9) for slot in range(8)]
    for slot, request in enumerate(requests):
        chunk = PrefillChunk(slot * runner.row_shards // 8, 0, request.prompt_ids[:-1], [pages[slot]])
        runner.prefill(placed, [chunk], runner.chunk_width(2))
    runner.admit(placed, list(enumerate(requests)))
    rows = [PrefillRow(slot, [pages[slot]], 3) for slot in range(8)]
    decoded, _ = runner.read(runner.advance(placed, rows, 8, is_filtered=False))
    tokens = np.hstack([[request.prompt_ids for request in requests], decoded.tokens])
    found.append((tokens, np.pad(decoded.sampler_logprobs, ((0, 0), (3, 0))), np.arange(11) >= 3 + np.zeros((8, 1))))
    scored = [np.asarray(score(alone, params, tokens).logprobs) for tokens, _, _ in found]
    return [
        float(np.abs(logprobs - again)[mask].max()) for (_, logprobs, mask), again in zip(found, scored, strict=True)
    ]


MESHES = (2, 1, 1), (1, 4, 1), (2, 2, 2), (4, 2, 1)
ON_MESHES = """
import json, sys
from jaxft.harness.process import order_cpu_devices
order_cpu_devices()
from tests.models.test_bridge import MESHES, differences_on_mesh, function_model, linen_model, nnx_model
found = [differences_on_mesh(make, sizes) for make in (function_model, linen_model, nnx_model) for sizes in MESHES]
print(json.dumps(found))
"""


@pytest.mark.slow
def test_meshes_sample_what_one_device_scores():
    """On a mesh of all axes also tests/test_fresh_process.py."""
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8"
    ended = subprocess.run(
        [sys.executable, "-c", ON_MESHES], cwd=Path(__file__).parents[2], env=os.environ | {"XLA_FLAGS": flags},
        check=True, stdout=subprocess.PIPE,
    )  # fmt: skip
    found = np.array(json.loads(ended.stdout))
    assert found.shape == (12, 2) and found.max() < 1e-5, found


@pytest.mark.parametrize("make", [nnx_model, linen_model])
def test_updates_lower_the_loss_and_leave_the_module_alone(make):
    model, params = make()
    update = make_update(model, sft_loss, optax.sgd(0.1))
    mask = np.ones((4, 10), bool)
    mask[:, 0] = False
    batch = Batch(np.random.default_rng(1).integers(0, VOCAB, (4, 10), np.int32), mask)
    params = jax.device_put(jax.device_get(params), jax.devices()[0])
    state, before = update(init_train_state(params, optax.sgd(0.1)), batch)
    _, after = update(state, batch)
    assert after["loss"] < before["loss"]


def test_the_same_network_is_the_same_model():
    assert from_function(bigram) is from_function(bigram)
    assert nnx_model()[0] == nnx_model()[0]
    assert linen_model()[0] == linen_model()[0]
    assert from_linen(LinenNetwork(widths=(WIDTH,)), {})[0] != linen_model()[0]
    assert hash(nnx_model()[0]) == hash(nnx_model()[0])
    assert (nnx_model()[0].config.name, linen_model()[0].config.name) == ("NnxNetwork", "LinenNetwork")


def test_the_network_sees_the_module_it_came_from():
    module = nnx_network()
    model, params = from_nnx(module)
    tokens, positions = np.array([[1, 2, 3]], np.int32), np.array([[0, 1, 2]], np.int32)
    call = nnx.jit(lambda module, tokens, positions: module(tokens, positions))
    bridged = jax.jit(lambda params, *given: model.unembed(params, model.apply(params, *given)[0]))
    np.testing.assert_allclose(bridged(params, tokens, positions), call(module, tokens, positions), rtol=0, atol=1e-6)
    # What is given back when training ends: the arrays go, the module stays.
    jax.tree.map(lambda leaf: leaf.delete(), params)
    assert np.isfinite(call(module, tokens, positions)).all()

    trained = jax.tree.map(lambda leaf: jax.device_put(np.zeros(leaf.shape, leaf.dtype)), from_nnx(module)[1])
    state = nnx.state(module, nnx.Param)
    nnx.replace_by_pure_dict(state, trained)
    nnx.update(module, state)
    assert not np.asarray(call(module, tokens, positions)).any()


def test_the_cache_holds_the_tokens():
    """Two rows: two tokens at the start of the first, one on the second page of the other, between garbage."""
    model, params = function_model()
    tables = np.array([[3, 99], [1, 2]])
    tokens = np.array([[4, 5, 9], [6, 9, 9]], np.int32)
    positions = np.array([[0, 1, -1], [40, -1, -1]], np.int32)

    @jax.jit
    def two_calls(params, tokens, positions, then):
        garbage = model.init_cache(5, jnp.bfloat16) - 7
        hidden, cache = model.apply(params, tokens, positions, cache=garbage, tables=tables)
        return hidden, cache, model.apply(params, tokens[:, :1], then, cache=cache, tables=tables)[1]

    hidden, cache, again = jax.device_get(two_calls(params, tokens, positions, np.array([[2], [-1]], np.int32)))
    expected = np.full((5, 64), -7, np.int32)
    expected[3, :2], expected[1, 40] = (4, 5), 6
    assert cache.dtype == np.int32
    np.testing.assert_array_equal(cache, expected)
    wanted = bigram(params, tokens, positions)
    np.testing.assert_allclose(hidden[positions >= 0], wanted[positions >= 0], rtol=0, atol=1e-6)
    expected[3, 2] = 4  # an idle row writes nothing
    np.testing.assert_array_equal(again, expected)


def test_a_network_sees_zeros_behind_the_last_token_of_a_row():
    """The contents of reused pages change no logits, and several tokens at once give those of one at a time."""

    def network(params, tokens, positions):
        """At every token, all tokens and positions that the network sees."""
        seen = jnp.concatenate([tokens, positions], axis=1).astype(jnp.float32)
        return jnp.broadcast_to(seen[:, None], (*tokens.shape, seen.shape[1]))

    model = from_function(network)

    @jax.jit
    def two_calls(tokens):
        places, then = jnp.arange(8)[None], jnp.array([[8]])
        given = {"cache": jnp.full((3, 64), 77), "tables": np.array([[2, 0]])}
        first, given["cache"] = model.apply({}, tokens, places, **given)
        return first[0, -1], model.apply({}, tokens[:, :1], then, **given)[0][0, -1]

    calls = two_calls(np.arange(1, 9, dtype=np.int32)[None])
    for seen, held in zip(calls, ([*range(1, 9)], [*range(1, 9), 1]), strict=True):
        assert seen.tolist() == held + [0] * (128 - len(held)) + [*range(128)]


def test_logits_of_a_narrow_network_are_widened():
    model, params = function_model(jnp.bfloat16)

    def call(params, tokens):
        hidden = model.apply(params, tokens, tokens)[0]
        return hidden, model.unembed(params, hidden)

    hidden, logits = jax.eval_shape(call, params, np.zeros((1, 2), np.int32))
    assert (hidden.dtype, logits.dtype) == (jnp.bfloat16, jnp.float32)


def test_linen_can_initialise_and_others_say_that_they_cannot():
    model, params = linen_model()
    fresh = jax.device_get(jax.jit(model.init)(jax.random.key(0)))
    assert jax.tree.all(jax.tree.map(np.array_equal, fresh, jax.device_get(params)))
    with pytest.raises(ValueError, match="this model has no init; make its parameters where the network was made"):
        nnx_model()[0].init(jax.random.key(0))


def test_what_cannot_be_bridged_is_refused():
    model, params = function_model()
    tokens = jax.device_put(np.zeros((1, 2), np.int32))
    with pytest.raises(ValueError, match="segment_ids were given; a bridged network cannot keep packed"):
        model.apply(params, tokens, tokens, segment_ids=tokens)

    class Dropping(nnx.Module):
        def __init__(self, rngs):
            self.inner = nnx.Dropout(0.1, rngs=rngs)

    with pytest.raises(ValueError, match=r"module holds state besides nnx.Param: inner.rngs.count, inner.rngs.key"):
        from_nnx(Dropping(nnx.Rngs(0)))
    with pytest.raises(ValueError, match=r"pass variables\['params'\] itself"):
        from_linen(LinenNetwork(), {"params": {}})
    with pytest.raises(ValueError, match=r"the LinenNetwork has a field that cannot be hashed; make lists"):
        from_linen(LinenNetwork(widths=partial(np.array, [])()), {})
