"""Norm of heads and rotation in one kernel, interpreted, against the formula."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxft.models.layers import Angles, RMSNorm, rotate
from jaxft.models.rope_kernel import norm_and_rotate


def by_formula(x, scale, cos, sin, eps):
    norm = RMSNorm(scale.shape[0], eps)
    norm.scale[...] = scale
    return rotate(norm(x[None], in_halves=False), Angles(cos[None], sin[None]), "cpu")[0]


@pytest.mark.parametrize(("tokens", "heads", "width"), [(96, 4, 32), (5, 3, 128), (64, 40, 64)])
def test_values_and_gradients_are_those_of_norm_and_rotation(tokens, heads, width):
    """Also of tokens and heads that are no powers of two, in several blocks of both."""
    draw = np.random.default_rng(0)
    x, weights = (draw.normal(size=(tokens, heads, width)).astype(np.float32) for _ in range(2))
    scale, angles = (draw.normal(size=size).astype(np.float32) for size in (width, (tokens, width // 2)))

    def loss(function, x, scale):
        y = function(x, scale, jnp.cos(angles), jnp.sin(angles), 1e-3)
        return (y * weights).sum(), y

    found, wanted = (
        jax.jit(jax.value_and_grad(partial(loss, function), argnums=(0, 1), has_aux=True))(x, scale)
        for function in (partial(norm_and_rotate, interpret=True), by_formula)
    )
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-4, atol=2e-5), found, wanted)


def test_bfloat16_is_rounded_once():
    draw = np.random.default_rng(0)
    x, scale = (draw.normal(size=size).astype(jnp.bfloat16) for size in ((8, 2, 16), 16))
    angles = draw.normal(size=(8, 8)).astype(np.float32)
    given = np.cos(angles), np.sin(angles), 1e-6
    found = jax.jit(norm_and_rotate, static_argnums=(4, 5))(x, scale, *given, True)
    wanted = jax.jit(by_formula, static_argnums=4)(x.astype(np.float32), scale.astype(np.float32), *given)
    assert found.dtype == jnp.bfloat16
    np.testing.assert_allclose(np.asarray(found, np.float32), wanted, rtol=2**-8, atol=1e-6)


@pytest.mark.gpu
@pytest.mark.parametrize(("heads", "width"), [(16, 128), (8, 128), (3, 64), (1, 256)])
def test_on_the_device_it_is_the_formula(heads, width):
    draw = np.random.default_rng(0)
    x, weights = (jnp.asarray(draw.normal(size=(1536, heads, width)), jnp.bfloat16) for _ in range(2))
    scale, angles = jnp.asarray(draw.normal(size=width), jnp.bfloat16), draw.normal(size=(1536, width // 2))
    cos, sin = (jnp.asarray(each, jnp.float32) for each in (np.cos(angles), np.sin(angles)))

    def gradients(function, x, scale):
        y, pull_back = jax.vjp(lambda x, scale: function(x, scale, cos, sin, 1e-6), x, scale)
        return y, *pull_back(weights.astype(y.dtype))

    found = jax.jit(partial(gradients, norm_and_rotate))(x, scale)
    wanted = jax.jit(partial(gradients, by_formula))(x.astype(jnp.float32), scale.astype(jnp.float32))
    for got, exact in zip(found, wanted, strict=True):
        assert np.linalg.norm(np.asarray(got, np.float32) - exact) <= 0.01 * np.linalg.norm(exact)
