"""Sub-batches: long requests decode apart from short ones, the last few without empty slots, to the same bits."""

import asyncio
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import jaxft
from jaxft.models.config import model_preset
from jaxft.rollout.model_runner import ModelRunner, SubBatch, split_batch
from jaxft.rollout.requests import Request

SLOTS, CONTEXT = 16, 160
CAPACITIES = {2: 128, 3: 256, 4: 512}


@given(
    num_blocks=st.dictionaries(st.integers(0, 63), st.sampled_from(list(CAPACITIES)), min_size=1),
    rows=st.sampled_from([None, 8]),
    allowed=st.sets(st.sampled_from(list(CAPACITIES))),
)
def test_every_slot_is_decoded_once_and_with_blocks_enough(num_blocks, rows, allowed):
    batches = split_batch(num_blocks, CAPACITIES, 64, rows, allowed)
    assert sorted(slot for batch in batches for slot in batch.slots) == sorted(num_blocks)
    for batch in batches:
        assert batch.num_blocks == max(num_blocks[slot] for slot in batch.slots)
        assert not batch.is_compact or (len(batch.slots) <= 8 and batch.num_blocks in allowed)
    assert sum(not batch.is_compact for batch in batches) <= 1
    assert rows is not None or len(batches) == 1


def test_a_long_request_does_not_slow_down_the_others():
    num_blocks = dict.fromkeys(range(64), 2) | {5: 4}
    long, others = split_batch(num_blocks, CAPACITIES, 64, 8, CAPACITIES)
    assert 5 in long.slots and (long.num_blocks, long.is_compact) == (4, True)
    assert others == SubBatch(
        tuple(slot for slot in range(64) if slot not in long.slots), num_blocks=2, is_compact=False
    )


def test_alike_requests_are_decoded_together():
    assert split_batch(dict.fromkeys(range(64), 4), CAPACITIES, 64, 8, CAPACITIES) == [
        SubBatch(tuple(range(64)), num_blocks=4, is_compact=False)
    ]


@pytest.fixture(scope="module")
def served():
    """Requests of all lengths, served twice by an engine that tries sub-batches in between, and by a warmed-up one."""
    config = replace(model_preset("qwen3-50k"), vocab_size=512)
    model, params = jaxft.init_model(config, jax.random.key(0))
    rng = np.random.default_rng(0)
    requests = [
        Request(
            tuple(rng.integers(0, 512, prompt_tokens).tolist()),
            key_ids=(0, 0, 0, 0, 0, number),
            max_tokens=max_tokens,
            top_p=0.9 if number % 3 == 0 else 1.0,
            min_p=0.01 if number % 5 == 0 else 0.0,
        )
        for number, (prompt_tokens, max_tokens) in enumerate([(9, 5), (110, 45), (20, 130)] + [(30, 7)] * 15)
    ]

    async def serve(is_warm, times):
        policy = jaxft.Policy(
            model, params, jaxft.load_tokenizer(), stop_ids=(), slots=SLOTS, max_context_tokens=CONTEXT
        )
        served = []
        try:
            if is_warm:
                await policy.engine.warm_up()
            runner = policy.engine._runner
            decode, advance = runner._decode, runner.advance
            for _ in range(times):
                batches = []

                def recorded(params, num_tokens, batches=batches):
                    """Notes the sub-batches of `advance` only, as trials decode, too."""
                    runner._decode = lambda params, some: batches.extend(some) or decode(params, some)
                    decoded = advance(params, num_tokens)
                    runner._decode = decode
                    return decoded

                runner.advance = recorded
                served.append((await asyncio.gather(*map(policy.engine.submit, requests)), batches, runner.tried))
                policy.engine.clear_prefix_cache()
        finally:
            policy.close()
        return served

    first, second = asyncio.run(serve(is_warm=False, times=2))
    return first, second, *asyncio.run(serve(is_warm=True, times=1))


@pytest.mark.slow
def test_sub_batches_are_used_once_they_have_been_tried(served):
    first, second, warm = ({(batch.num_blocks, batch.is_compact) for batch in batches} for _, batches, _ in served)
    assert first == {(2, False), (3, False)}
    assert second >= {(3, True), (2, False)} and warm >= {(3, True), (2, False)}
    assert served[2][2] == {2: True, 3: True}


@pytest.mark.slow
def test_sub_batches_change_no_bit(served):
    (plain, _, _), *others = served
    assert len(plain) == 18 and max(len(completion.token_ids) for completion in plain) == 130
    for completions, _, _ in others:
        assert completions == plain


def test_sub_batches_are_not_used_where_they_change_a_bit():
    def network(params, tokens, positions):
        return jax.nn.one_hot(tokens, 16) * (params["w"] + 1e-6 * tokens.shape[0])

    model = jaxft.from_function(network)
    runner = ModelRunner(model, seed=0, slots=SLOTS, length=32, prefix_cache_rows=8)
    runner.warm_up({"w": jnp.ones(())})
    assert runner.tried == {1: False}
