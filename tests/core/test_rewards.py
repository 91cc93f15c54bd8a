"""What is added to a reward before any baseline."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxft.core.rewards import soft_length_penalty

LENGTHS, PENALTIES = [0, 80, 81, 95, 100, 400], [0.0, 0.0, -0.05, -0.75, -1.0, -1.0]


@pytest.mark.parametrize("dtype", [np.int32, np.uint8, np.uint32, np.float32])
def test_by_hand(dtype):
    """Over the last 20 of 100; differences of unsigned lengths must not wrap around."""
    lengths = np.minimum(LENGTHS, 255).astype(dtype)
    got = soft_length_penalty(lengths, 100, 20)
    assert got.dtype == np.float64
    np.testing.assert_allclose(got, PENALTIES, rtol=1e-12)
    jitted = jax.jit(soft_length_penalty, static_argnums=(1, 2))(jnp.asarray(lengths), 100, 20)
    assert jitted.dtype == jnp.float32
    np.testing.assert_allclose(jitted, PENALTIES, rtol=1e-6)


def test_the_penalty_may_begin_with_the_first_token():
    np.testing.assert_allclose(soft_length_penalty(np.array([0, 1, 4]), 4, 4), [0.0, -0.25, -1.0])


@pytest.mark.parametrize("penalty_tokens", [0, -1, 101])
def test_refusals(penalty_tokens):
    with pytest.raises(ValueError, match=f"penalty_tokens is {penalty_tokens}; wanted 1 to max_completion_tokens, 100"):
        soft_length_penalty(np.array([1]), 100, penalty_tokens)
