"""Products of rows with the weights of their group, as a mixture of experts needs them.

Letters: `n` rows, `E` experts, `d` input width, `f` output width.
"""

import jax
from jaxtyping import Array, Float, Int


def grouped_dot(
    rows: Float[Array, "n d"], weights: Float[Array, "E d f"], sizes: Int[Array, " E"]
) -> Float[Array, "n f"]:
    """Return the product of each row with the weights of its expert.

    Rows stand in the order of their experts: the first `sizes[0]` belong to expert 0, the next `sizes[1]` to expert 1.
    An expert may have none. Rows beyond the sum of the sizes give 0.

    >>> import jax.numpy as jnp
    >>> grouped_dot(jnp.ones((3, 1)), jnp.array([[[2.0]], [[5.0]]]), jnp.array([1, 2])).tolist()
    [[2.0], [5.0], [5.0]]
    """
    return jax.lax.ragged_dot(rows, weights, sizes)
