"""What is added to a reward before any baseline. Letters: `B` trajectories."""

import jax
import numpy as np
from jaxtyping import Float, Num

from jaxft.core.arrays import as_floats, namespace

Lengths = Num[jax.Array, "B"] | Num[np.ndarray, "B"]


def soft_length_penalty(
    completion_tokens: Lengths, max_completion_tokens: int, penalty_tokens: int
) -> Float[jax.Array, "B"] | Float[np.ndarray, "B"]:
    """DAPO's soft overlong punishment (arXiv 2503.14476 eq. 13): 0, then falling to -1 over the last tokens.

    Args:
        completion_tokens: trained tokens of each trajectory.
        max_completion_tokens: where the penalty reaches -1.
        penalty_tokens: over how many tokens before that it falls.

    Raises:
        ValueError: `penalty_tokens` is not between 1 and `max_completion_tokens`.

    >>> print(soft_length_penalty(np.array([60, 80, 90, 100, 120]), 100, 20))
    [ 0.   0.  -0.5 -1.  -1. ]
    """
    if not 1 <= penalty_tokens <= max_completion_tokens:
        raise ValueError(
            f"penalty_tokens is {penalty_tokens}; wanted 1 to max_completion_tokens, {max_completion_tokens}"
        )
    xp = namespace(completion_tokens)
    (lengths,) = as_floats(xp, completion_tokens)  # differences of unsigned integers wrap around
    over = lengths - (max_completion_tokens - penalty_tokens)
    return 0.0 - xp.clip(over / penalty_tokens, 0.0, 1.0)
