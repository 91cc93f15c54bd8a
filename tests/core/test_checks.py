import jax.numpy as jnp
import numpy as np
import pytest

from jaxft.core.checks import check_batch
from jaxft.core.types import Batch

GOOD = Batch(
    tokens=np.array([[3, 4, 5], [3, 4, 0]]),
    completion_mask=np.array([[False, True, True], [False, True, False]]),
    advantages=np.array([1.0, -1.0]),
    temperatures=np.array([[0.0, 1.0, 1.0], [0.0, 0.7, 0.0]]),
    old_logprobs=np.array([[np.nan, -1.0, -1.0], [0.0, -2.0, np.inf]]),
)


def test_what_stands_on_untrained_tokens_is_free():
    check_batch(GOOD, vocabulary=6)
    check_batch(Batch(*(None if x is None else jnp.array(x) for x in GOOD)))


def test_whole_trajectories_are_taken():
    for counts in ([[0, 2, 2], [0, 1, 0]], [[0, 3, 3], [0, 3, 0]]):
        check_batch(GOOD._replace(trajectory_tokens=np.array(counts, np.float32)))
    tokens, rows = 3 * 7 * 11, 3000
    mask = np.ones((rows, tokens + 1), bool)
    mask[:, 0] = False
    check_batch(Batch(np.ones(mask.shape, int), mask, trajectory_tokens=np.full(mask.shape, tokens, np.float32)))


TRUE = np.ones((2, 3), bool)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"completion_mask": ~TRUE}, "completion_mask is False everywhere"),
        ({"completion_mask": TRUE}, r"first token of a sequence, which nothing predicts \(row 0, token 0; 2 in all\)"),
        ({"segment_ids": np.array([[1, 1, 2], [1, 1, 1]])}, r"first token of a sequence.*\(row 0, token 2; 1 in all\)"),
        ({"temperatures": np.zeros((2, 3))}, "batch.temperatures is not above 0: greedy rows"),
        ({"temperatures": np.full((2, 3), np.nan)}, "batch.temperatures is not above 0"),
        ({"advantages": np.array([1.0, np.nan])}, r"batch.advantages is not finite .*\(row 1, token 1; 1 in all\)"),
        ({"trajectory_tokens": np.zeros((2, 3))}, r"batch.trajectory_tokens is not at least 1.*\(row 0, token 1;"),
        ({"trajectory_tokens": np.full((2, 3), 4.0)}, r"batch.trajectory_tokens makes 0.75 traj.*of 3 trained tokens"),
        ({"ref_logprobs": np.full((2, 3), -np.inf)}, "batch.ref_logprobs is not finite"),
        ({"tokens": np.full((2, 3), 6)}, "batch.tokens is outside the vocabulary of 6"),
        ({"tokens": np.full((2, 3), -1)}, "batch.tokens is outside the vocabulary of 6"),
        ({"advantages": np.zeros(3)}, r"batch.advantages has shape \(3,\); wanted that of tokens, \(2, 3\)"),
    ],
)
def test_values_that_mean_nothing_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        check_batch.__wrapped__(GOOD._replace(**changes), vocabulary=6)
