"""What shapes cannot tell: values that make a batch meaningless. Runs on the host, before an update.

Under `jit` values are not known, so `make_update` cannot ask; a loop that assembles batches by hand calls this once per
batch, or while it is being written. Letters: `B` rows, `T` tokens.
"""

import numpy as np

from jaxft.core.arrays import as_batch
from jaxft.core.types import Batch

NEAR_WHOLE = 1e-3
"""How far a number of trajectories, a sum of rounded shares, may lie from a whole one."""


def check_batch(batch: Batch, vocabulary: int | None = None) -> None:
    """Nothing, if the batch can be trained on.

    Args:
        vocabulary: tokens are to be below it, when given.

    Raises:
        ValueError: shapes that differ; no trained token; a trained first token, which nothing predicts; tokens outside
            the vocabulary; and, on trained tokens, a temperature that is not above 0 (greedy rows have nothing to learn
            from), a trajectory of no trained tokens, or numbers that are not finite: the message names the field, the
            row and the token. Also `trajectory_tokens` that count other tokens than the trained ones of the batch.

    >>> check_batch(Batch(np.array([[5, 6]]), np.array([[False, True]]), np.array([1.0])))
    >>> check_batch(Batch(np.array([[5, 6]]), np.array([[False, False]])))
    Traceback (most recent call last):
    ValueError: completion_mask is False everywhere: there is no token to train
    """
    batch = as_batch(batch)
    tokens, mask = np.asarray(batch.tokens), np.asarray(batch.completion_mask)
    given = {name: np.asarray(x) for name, x in batch._asdict().items() if x is not None}
    if not mask.any():
        raise ValueError("completion_mask is False everywhere: there is no token to train")
    starts = np.zeros(mask.shape, bool)
    starts[:, :1] = True
    if batch.segment_ids is not None:
        segment_ids = np.asarray(batch.segment_ids)
        starts[:, 1:] = segment_ids[:, 1:] != segment_ids[:, :-1]
    _refuse(mask & starts, "completion_mask", "is True on the first token of a sequence, which nothing predicts")
    limit = np.inf if vocabulary is None else vocabulary
    _refuse((tokens < 0) | (tokens >= limit), "tokens", f"is outside the vocabulary of {limit}")
    if "temperatures" in given:
        _refuse(mask & ~(given["temperatures"] > 0), "temperatures", "is not above 0: greedy rows cannot be trained on")
    if "trajectory_tokens" in given:
        few = ~(given["trajectory_tokens"] >= 1)
        _refuse(mask & few, "trajectory_tokens", "is not at least 1: the token itself is one of its trajectory")
    for name, x in given.items():
        if np.issubdtype(x.dtype, np.floating):
            per_token = x if x.ndim == 2 else x[:, None]
            _refuse(mask & ~np.isfinite(per_token), name, "is not finite on a trained token")
    if "trajectory_tokens" in given:
        trajectories = (1.0 / given["trajectory_tokens"][mask].astype(np.float64)).sum()
        if abs(trajectories - round(trajectories)) > NEAR_WHOLE:
            raise ValueError(
                f"batch.trajectory_tokens makes {trajectories:.6g} trajectories of {int(mask.sum())} trained tokens; "
                "wanted a whole number: of each token, how many trained tokens of this batch its trajectory has"
            )


def _refuse(wrong: np.ndarray, name: str, what: str) -> None:
    if wrong.any():
        row, token = np.argwhere(wrong)[0]
        raise ValueError(f"batch.{name} {what} (row {row}, token {token}; {int(wrong.sum())} in all)")
