"""Products by expert against a product of each row, in numpy; kernels are interpreted."""

from contextlib import nullcontext
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from jaxft.models import grouped
from jaxft.models.grouped_kernels import multiply_gpu, sum_outer_gpu


def by_formula(rows, weights, cotangent, sizes):
    """Values, gradients of the rows and of the weights."""
    rows, weights, cotangent = (each.astype(np.float32) for each in (rows, weights, cotangent))
    made = np.zeros(cotangent.shape), np.zeros(rows.shape), np.zeros(weights.shape)
    for i, expert in enumerate(np.repeat(np.arange(len(sizes)), sizes)):
        made[0][i] = rows[i] @ weights[expert]
        made[1][i] = weights[expert] @ cotangent[i]
        made[2][expert] += np.outer(rows[i], cotangent[i])
    return made


@pytest.mark.parametrize(
    ("platform", "dtype", "narrow"),
    [("cpu", np.float32, None), ("gpu", np.float32, None), ("gpu", jnp.bfloat16, None), ("tpu", jnp.bfloat16, None)]
    + [("gpu", jnp.bfloat16, np.int8), ("tpu", jnp.bfloat16, np.int8)]
    + [pytest.param(*each, None, marks=pytest.mark.slow) for each in (("cpu", jnp.bfloat16), ("tpu", np.float32))]
    + [pytest.param("cpu", np.float32, np.int8, marks=pytest.mark.slow)],
)
def test_values_and_gradients_are_those_of_each_row(platform, dtype, narrow, monkeypatch):
    """Experts with no row, with one, and with several blocks; rows beyond the sizes have neither value nor gradient.

    Weights in eight bits have no gradient.
    """
    monkeypatch.setattr("jaxft.models.grouped_kernels.multiply_gpu", partial(multiply_gpu, interpret=True))
    monkeypatch.setattr("jaxft.models.grouped_kernels.sum_outer_gpu", partial(sum_outer_gpu, interpret=True))
    sizes = np.array([0, 1, 160, 0, 33, 0])
    draw = np.random.default_rng(0)
    rows, weights, cotangent = (draw.normal(size=shape).astype(dtype) for shape in ((210, 24), (6, 24, 40), (210, 40)))

    if narrow:
        weights = (20 * weights).astype(narrow)

    def gradients(rows, weights, cotangent, sizes):
        made, pull = jax.vjp(lambda *given: grouped.grouped_dot(*given, sizes, platform), rows, weights)
        return made, *pull(cotangent)[: 1 if narrow else 2]

    with pltpu.force_tpu_interpret_mode() if platform == "tpu" else nullcontext():
        found = jax.jit(gradients)(rows, weights, cotangent, sizes)
    tolerance = 1e-5 if dtype == np.float32 else 1e-2
    exact_values = by_formula(rows, weights, cotangent, sizes)[: len(found)]
    for got, exact in zip(found, exact_values, strict=True):
        assert got.dtype == dtype
        np.testing.assert_allclose(got.astype(np.float32), exact, rtol=tolerance, atol=tolerance * np.abs(exact).max())
