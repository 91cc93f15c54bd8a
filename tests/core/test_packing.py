"""Layouts, and the invariances of the loss: packing, padding, order and microbatches change nothing."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxft.core.objectives import grpo_loss, ppo_loss
from jaxft.core.packing import packed_layout, padded_layout, place, segments, take
from jaxft.core.types import Batch
from jaxft.core.update import loss_and_gradients

lengths_in = st.lists(st.integers(1, 12), min_size=1, max_size=12)


@settings(max_examples=100, deadline=None)
@given(lengths=lengths_in, spare=st.integers(0, 6))
def test_packed_sequences_neither_overlap_nor_stick_out(lengths, spare):
    layout = packed_layout(lengths, max(lengths) + spare)
    numbers = [np.arange(length) + 100 * i + 1 for i, length in enumerate(lengths)]
    table = place(layout, numbers, int)
    assert np.count_nonzero(table) == sum(lengths)
    assert layout.height <= len(lengths)
    for got, put in zip(take(layout, table), numbers, strict=True):
        np.testing.assert_array_equal(got, put)
    ids, positions = segments(layout, layout.height + 1)
    assert ids.shape == positions.shape == (layout.height + 1, layout.width)
    for i, (row, start, length) in enumerate(zip(layout.rows, layout.starts, lengths, strict=True)):
        span = slice(start, start + length)
        assert len(set(ids[row, span])) == 1 and np.count_nonzero(ids[row] == ids[row, start]) == length
        np.testing.assert_array_equal(positions[row, span], np.arange(length), err_msg=str(i))
    assert np.all((ids[: layout.height] == 0) == (table == 0)) and not ids[-1].any()


def test_rows_that_are_too_short_are_refused():
    for make in (padded_layout, packed_layout):
        with pytest.raises(ValueError, match="a sequence has 5 tokens and rows have 4"):
            make([2, 5], 4)


HEIGHT, WIDTH = 6, 12
"""Every batch of the properties below has this shape, so each loss is compiled once for rows and once for segments."""

HIDDEN = 32

LOSSES = {
    "grpo": partial(grpo_loss, loss="grpo", beta=0.1),
    "dr_grpo": partial(grpo_loss, loss="dr_grpo", max_completion_tokens=20, entropy_coef=0.1),
    "gspo": partial(grpo_loss, loss="gspo", beta=0.1, kl="k2", clip_low=0.1, clip_high=0.1),
    "cispo": partial(grpo_loss, loss="cispo", correction="sequence_truncate", correction_high=1.2),
    "ppo": partial(ppo_loss, value_coef=0.3),
}


RECORDED = ("sampler_logprobs", "behavior_logprobs", "old_logprobs", "ref_logprobs")


def make_examples(draw, count):
    """Sequences with everything that a loss can want of them; only the first of them may have nothing trained."""
    examples = []
    for i in range(count):
        length = int(draw.integers(3, WIDTH // 2 + 1))
        mask = draw.random(length) < 0.7
        mask[0], mask[-1] = False, i > 0
        near = draw.normal(size=(4, length)) * 0.2 - 3.9
        examples.append(
            {
                "tokens": draw.integers(48, size=length),
                "completion_mask": mask,
                "temperatures": draw.uniform(0.7, 1.3, size=length),
                "advantages": np.full(length, draw.normal()),
                **dict(zip(RECORDED, near, strict=True)),
                "old_values": draw.normal(size=length),
                "returns": draw.normal(size=length),
            }
        )
    return examples


def make_batch(examples, layout, dtype=np.float32):
    """Their batch in this layout, filled up to `HEIGHT` rows."""
    types = {"tokens": np.int32, "completion_mask": np.bool_}
    fields = {
        name: jnp.array(place(layout, [example[name] for example in examples], types.get(name, dtype), HEIGHT))
        for name in examples[0]
    }
    segment_ids, positions = segments(layout, HEIGHT)
    return Batch(**fields, segment_ids=jnp.array(segment_ids), positions=jnp.array(positions))


@partial(jax.jit, static_argnums=(0, 1, 4), compiler_options={"xla_backend_optimization_level": 0})
def gradients(name, model, params, batch, microbatch_rows):
    trained = {"policy": params, "value_head": {"kernel": jnp.ones(HIDDEN), "bias": jnp.ones(())}}
    loss, metrics, grads = loss_and_gradients(
        model, LOSSES[name], trained if name == "ppo" else params, batch, microbatch_rows
    )
    return loss, metrics, grads


def assert_same(got, expected, tolerance):
    """Per leaf, the largest difference against the largest gradient of the leaf, and the loss and the metrics."""
    np.testing.assert_allclose(got[0], expected[0], rtol=tolerance, atol=tolerance)
    assert got[1].keys() == expected[1].keys()
    for name, value in expected[1].items():
        np.testing.assert_allclose(got[1][name], value, rtol=10 * tolerance, atol=10 * tolerance, err_msg=name)
    leaves = jax.tree.leaves(expected[2])
    largest = max(np.abs(leaf).max() for leaf in leaves)
    for mine, theirs in zip(jax.tree.leaves(got[2]), leaves, strict=True):
        # A leaf of one number, the bias of the values, may cancel to almost nothing: it is measured by all gradients.
        scale = largest if theirs.size == 1 else np.abs(theirs).max()
        assert np.abs(mine - theirs).max() <= tolerance * scale + 1e-30


def check_all_layouts(name, model, params, draw, dtype, tolerance):
    examples = make_examples(draw, HEIGHT)
    lengths = [len(example["tokens"]) for example in examples]
    padded = make_batch(examples, padded_layout(lengths, WIDTH), dtype)
    plain = padded._replace(segment_ids=None, positions=None)
    expected = gradients(name, model, params, plain, None)
    order = draw.permutation(HEIGHT)
    shuffled = make_batch([examples[i] for i in order], padded_layout([lengths[i] for i in order], WIDTH), dtype)
    packed = make_batch(examples, packed_layout(lengths, WIDTH), dtype)
    for batch in (packed, padded, shuffled):
        assert_same(gradients(name, model, params, batch, None), expected, tolerance)
    assert_same(gradients(name, model, params, plain, 3), expected, tolerance)


@pytest.mark.parametrize("name", LOSSES)
@settings(max_examples=8, deadline=None)
@given(seed=st.integers(0, 2**32 - 1))
def test_packing_order_and_segments_change_nothing(tiny, name, seed):
    check_all_layouts(name, *tiny, np.random.default_rng(seed), np.float32, 1e-5)


@pytest.mark.parametrize("name", ["gspo", "ppo"])
def test_nor_in_float64(tiny, name):
    model, params = tiny
    with jax.enable_x64(True):
        wide = jax.tree.map(lambda x: jnp.array(np.asarray(x), jnp.float64), params)
        check_all_layouts(name, model, wide, np.random.default_rng(5), np.float64, 1e-10)


def test_nor_does_the_width(tiny):
    examples = make_examples(np.random.default_rng(8), HEIGHT)
    lengths = [len(example["tokens"]) for example in examples]
    narrow, wide = (make_batch(examples, padded_layout(lengths, width)) for width in (WIDTH, 2 * WIDTH))
    assert_same(gradients("gspo", *tiny, wide, None), gradients("gspo", *tiny, narrow, None), 1e-5)


@pytest.mark.parametrize("microbatch_rows", [1, 2, 4])
def test_microbatches_of_packed_rows_change_nothing(tiny, microbatch_rows):
    draw = np.random.default_rng(microbatch_rows)
    examples = make_examples(draw, 8)
    batch = make_batch(examples, packed_layout([len(example["tokens"]) for example in examples], WIDTH))
    whole = gradients("gspo", *tiny, batch, None)
    assert_same(gradients("gspo", *tiny, batch, microbatch_rows), whole, 1e-5)
