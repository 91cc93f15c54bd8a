"""A sum whose order is written down, for rows whose bits must not depend on how many rows there are."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


def row_sum(x: Float[Array, "*N S"], *, decoding: bool) -> Float[Array, "*N 1"]:
    """Sums over the last axis, which is kept.

    XLA for CPU chooses the order of a reduction by the size of the whole array, so that a row alone and the same row
    among others end in different last bits. While decoding, where rows come and go, halves are added instead, again and
    again; it costs as much, or less.

    >>> row_sum(jnp.array([[1.0, 2.0, 3.0, 4.0, 5.0]]), decoding=True).tolist()
    [[15.0]]
    """
    if not decoding or jax.default_backend() != "cpu":
        return x.sum(axis=-1, keepdims=True)
    while (size := x.shape[-1]) > 1:
        half = size // 2
        added = x[..., :half] + x[..., half : 2 * half]
        x = jnp.concatenate([added, x[..., 2 * half :]], axis=-1) if size % 2 else added
    return x
