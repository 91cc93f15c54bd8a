"""Sampler-to-trainer correction: each kind by hand, its bounds, and that long rows do not overflow."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxft.core.correction import sampler_correction
from jaxft.core.reductions import count_tokens

MASK = jnp.array([[True, True, True, False], [True, True, False, False]])
D = jnp.log(jnp.array([[3.0, 0.25, 1.0, 9.0], [1.5, 1.2, 9.0, 9.0]]))
"""Ratios of the trained tokens: 3, 0.25, 1 (product 0.75, geometric mean 0.909) and 1.5, 1.2 (1.8, 1.342)."""

EXPECTED = {
    "token_truncate": ([[2, 0.25, 1], [1.5, 1.2, 0]], 1 / 5),
    "token_mask": ([[0, 0, 1], [1.5, 1.2, 0]], 2 / 5),
    "sequence_truncate": ([[0.75] * 3, [1.8] * 3], 0),
    "sequence_mask": ([[0.75] * 3, [1.8] * 3], 0),
    "sequence_geometric_mask": ([[1] * 3, [1] * 3], 0),
}


def correct(d, mask, kind, **knobs):
    fixed = partial(sampler_correction, kind=kind, **knobs)
    return jax.jit(lambda d, mask: fixed(d - 1.0, jnp.full_like(d, -1.0), mask, count_tokens(mask)))(d, mask)


@pytest.mark.parametrize("kind", EXPECTED)
def test_by_hand(kind):
    weights, share = correct(D, MASK, kind)
    trained = np.asarray(MASK)[:, :3]
    np.testing.assert_allclose(weights[:, :3][trained], np.array(EXPECTED[kind][0])[trained], rtol=1e-5)
    np.testing.assert_allclose(share, EXPECTED[kind][1], rtol=1e-6)


def test_bounds_of_sequences():
    assert correct(D, MASK, "sequence_truncate", high=1.5).weights[:, 0].tolist() == pytest.approx([0.75, 1.5])
    weights, share = correct(D, MASK, "sequence_mask", high=1.5)
    assert weights[:, 0].tolist() == pytest.approx([0.75, 0.0])
    assert float(share) == pytest.approx(2 / 5)
    assert correct(D, MASK, "sequence_geometric_mask", high=1.3).weights[:, 0].tolist() == [1.0, 0.0]


@pytest.mark.parametrize("kind", EXPECTED)
def test_long_rows_neither_overflow_nor_have_a_gradient(kind):
    d = jnp.full((1, 4000), 1.0)
    mask = jnp.ones(d.shape, bool)
    weights, gradient = jax.value_and_grad(lambda d: correct(d, mask, kind).weights.sum())(d)
    assert np.isfinite(weights) and not gradient.any()


def test_segments_are_rows():
    packed = jnp.concatenate([D[:1, :3], D[1:, :2]], axis=1)
    segments = jnp.array([[1, 1, 1, 2, 2]])
    mask = jnp.ones((1, 5), bool)
    got = sampler_correction(packed, jnp.zeros_like(packed), mask, kind="sequence_mask", segment_ids=segments)
    np.testing.assert_allclose(got.weights, [[0.75] * 3 + [1.8] * 2], rtol=1e-5)


@pytest.mark.parametrize(
    ("kind", "knobs", "message"),
    [
        ("token", {}, "correction is 'token'; wanted one of token_truncate"),
        ("token_mask", {"low": 0.0}, "the bounds of the correction are 0.0 and 2.0"),
        ("token_mask", {"high": 0.9}, "the bounds of the correction are 0.5 and 0.9"),
    ],
)
def test_refusals(kind, knobs, message):
    with pytest.raises(ValueError, match=message):
        sampler_correction(D, D, MASK, kind=kind, **knobs)
