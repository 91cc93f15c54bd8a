"""`benchmarks/roofline.py`: operations, bytes and least times against numbers computed by hand."""

from dataclasses import replace

import pytest

from jaxft.models.ceilings import decode_bytes
from jaxft.models.config import DecoderConfig, LayerKind, model_preset
from roofline import (
    Phase,
    Rates,
    block_weights,
    decode,
    head_weights,
    kv_bytes,
    limit_seconds,
    matmul_weights,
    parameter_count,
    prefill,
    score,
    tokens_seen,
    update,
)

SMALL = DecoderConfig("qwen3", 10, 4, 6, num_layers=2, num_heads=2, num_kv_heads=1, head_dim=2, qk_norm="heads")
"""A block: q 4x4, k 4x2, v 4x2, o 4x4 = 48, and three of 4x6 = 72. Attention: 4 * 4 operations per key seen."""

MIXTURE = replace(
    SMALL,
    pattern=(LayerKind(), LayerKind(has_experts=True)),
    num_experts=5,
    num_experts_per_tok=2,
    moe_intermediate_size=3,
)
"""Its second block has a router 4x5, and five experts of three 4x3 in the place of three 4x6."""


def test_weights_by_hand():
    assert block_weights(SMALL) == 120
    assert head_weights(SMALL) == 40
    assert matmul_weights(SMALL) == 280
    assert kv_bytes(SMALL, itemsize=2) == 2 * 2 * 1 * 2 * 2
    assert parameter_count(SMALL) == 280 + 2 * (4 + 4 + 2 + 2) + 4
    assert matmul_weights(MIXTURE) == 280 - 72 + 4 * 5 + 2 * 36
    assert parameter_count(MIXTURE) == parameter_count(SMALL) - 72 + 4 * 5 + 5 * 36


@pytest.mark.parametrize("window", [None, 1, 3, 100])
@pytest.mark.parametrize(("first", "last"), [(1, 1), (1, 7), (3, 5), (4, 4), (5, 4)])
def test_keys_that_are_seen(window, first, last):
    config = replace(SMALL, pattern=(LayerKind(window=window),))
    one = sum(min(place, window or place) for place in range(first, last + 1))
    assert tokens_seen(config.kinds, first, last) == config.num_layers * one


def test_prefill_by_hand():
    """Four tokens and one: the last of each prompt is not counted, nor is all but keys and values of the last block."""
    phase = prefill(SMALL, [5, 2], itemsize=4)
    assert phase.flops == 2 * (120 + 16) * (4 + 1) + 16 * ((1 + 2 + 3 + 4) + 1)
    assert phase.moved_bytes == 4 * (120 + 16) + 5 * kv_bytes(SMALL, 4)
    assert prefill(MIXTURE, [5, 2], itemsize=4) == phase  # its last block is the mixture


def test_decode_by_hand():
    """Answers of one and three tokens behind prompts of two: the first sees 2 keys, the second 2, 3 and 4."""
    phase = decode(SMALL, 2, [1, 3], slots=2, itemsize=4)
    assert phase.flops == 2 * 280 * 4 + 2 * 16 * (2 + 2 + 3 + 4)
    assert phase.moved_bytes == 3 * 4 * 280 + (2 + 2 + 3 + 4) * kv_bytes(SMALL, 4)
    # With one slot there are four steps, and the arithmetic is the same.
    alone = decode(SMALL, 2, [1, 3], slots=1, itemsize=4)
    assert (alone.flops, alone.moved_bytes - phase.moved_bytes) == (phase.flops, 4 * 280)
    # In eight bits: but for the router, and, unless it is asked for, the head.
    narrow, narrowest = (decode_bytes(MIXTURE, 1, 0, 2, in_eight_bits=True, narrow_head=head) for head in (False, True))
    assert (narrow, narrowest) == (120 + 48 + 2 * 36 + 2 * (40 + 4 * 5), 120 + 48 + 2 * 36 + 40 + 2 * 4 * 5)


def test_score_and_update_by_hand():
    forward = score(SMALL, rows=3, tokens=4, scored_tokens=2, itemsize=4)
    assert forward.flops == 3 * (2 * 240 * 4 + 2 * 40 * 2 + 2 * 16 * (1 + 2 + 3 + 4))
    gradient, step = update(SMALL, rows=3, tokens=4, scored_tokens=2, itemsize=4)
    assert gradient.flops == 3 * forward.flops
    assert gradient.moved_bytes == 3 * 4 * 280
    narrow, same_step = update(SMALL, rows=3, tokens=4, scored_tokens=2, itemsize=2)
    assert (narrow.flops, narrow.moved_bytes, same_step) == (gradient.flops, (2 + 2 + 4) * 280, step)
    assert (step.flops, step.moved_bytes) == (0, 8 * 4 * parameter_count(SMALL))


def test_the_limit_is_the_slower_of_arithmetic_and_traffic():
    rates = Rates(bytes_per_second=10.0, flops_per_second=100.0)
    busy, heavy = Phase("busy", 500.0, 10.0), Phase("heavy", 100.0, 30.0)
    assert limit_seconds([busy], rates) == 5.0
    assert limit_seconds([heavy], rates) == 3.0
    assert limit_seconds([busy, heavy], rates) == 8.0


def test_published_limits_of_one_accelerator():
    """0.6B in bfloat16 at 4.3 TB/s: a step of 64 rows at 1,024 tokens reads 1.19 GB of weights and 7.5 GB of cache."""
    config = model_preset("qwen3-0.6b")
    step = decode(config, 1024, [1] * 64, slots=64, itemsize=2)
    assert step.moved_bytes == 2 * matmul_weights(config) + 64 * 1024 * 112 * 1024
    tokens_per_second = 64 / limit_seconds([step], Rates(4.3e12, 790e12))
    assert tokens_per_second == pytest.approx(31_600, rel=0.01)
