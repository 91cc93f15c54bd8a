"""Products by expert against a product of each row, in numpy."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxft.models.grouped import grouped_dot


@pytest.mark.parametrize(("dtype", "tolerance"), [(np.float32, 1e-5), (jnp.bfloat16, 2e-2)])
def test_values_and_gradients_are_those_of_each_row(dtype, tolerance):
    """Experts with no row, with one, and with several blocks; rows beyond the sizes have neither value nor gradient."""
    sizes = np.array([0, 1, 70, 0, 33, 0])
    draw = np.random.default_rng(0)
    rows, weights, cotangent = (draw.normal(size=shape).astype(dtype) for shape in ((110, 8), (6, 8, 5), (110, 5)))

    def gradients(rows, weights, cotangent, sizes):
        made, pull = jax.vjp(partial(grouped_dot, sizes=sizes), rows, weights)
        return made, *pull(cotangent)

    found = jax.jit(gradients)(rows, weights, cotangent, sizes)
    rows, weights, cotangent = (each.astype(np.float32) for each in (rows, weights, cotangent))
    experts = np.repeat(np.arange(6), sizes)
    wanted = np.zeros((110, 5)), np.zeros((110, 8)), np.zeros((6, 8, 5))
    for i, expert in enumerate(experts):
        wanted[0][i] = rows[i] @ weights[expert]
        wanted[1][i] = weights[expert] @ cotangent[i]
        wanted[2][expert] += np.outer(rows[i], cotangent[i])
    for got, exact in zip(found, wanted, strict=True):
        assert got.dtype == dtype
        np.testing.assert_allclose(got.astype(np.float32), exact, rtol=tolerance, atol=tolerance * np.abs(exact).max())
