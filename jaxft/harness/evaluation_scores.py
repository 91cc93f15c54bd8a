"""Scores over several generations of each example, pass@k, best@k and maj@n, and the difference of two evaluations.

Of n generations of an example, every subset of k has the same chance. pass@k and best@k are exact means over all of
them, which are unbiased for k new generations (Chen et al. 2021, https://arxiv.org/abs/2107.03374, of pass@k), and then
means over examples.
"""

import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from statistics import fmean, stdev
from typing import NamedTuple

import scipy
from pydantic_core import to_jsonable_python

from jaxft.harness.data_models import EvalInputItem
from jaxft.runs.metrics import NAMED_REWARD


class ScoredEpisode(NamedTuple):
    """An episode with its reward, which is None if it failed or could not be scored, and its named rewards."""

    item: EvalInputItem
    reward: float | None
    named_rewards: Mapping[str, float | None] | None = None


class PairedDifference(NamedTuple):
    """Mean difference of the rewards of two evaluations over examples, with its 95 % interval.

    Attributes:
        mean: mean over examples.
        low, high: ends of the interval; None for a single example.
        num_examples: number of examples with a pair of rewards.
        num_higher: number of examples on which the first evaluation has the higher mean reward.
        num_lower: number of examples on which it has the lower one.
    """

    mean: float
    low: float | None
    high: float | None
    num_examples: int
    num_higher: int
    num_lower: int


def pass_at_k(num_generations: int, num_passed: int, k: int) -> float:
    """Return the chance that at least one of k generations passes, of which `num_passed` of `num_generations` did.

    1 - C(n - c, k) / C(n, k), equation 1 of Chen et al. 2021.

    >>> pass_at_k(4, 1, 1), pass_at_k(4, 1, 2), pass_at_k(4, 1, 4)
    (0.25, 0.5, 1.0)
    """
    subsets = math.comb(num_generations, k)
    return (subsets - math.comb(num_generations - num_passed, k)) / subsets


def best_at_k(rewards: Sequence[float], k: int) -> float:
    """Return the expected maximum of k of the rewards.

    The reward with r lower ones before it in ascending order is the maximum of C(r, k - 1) subsets.

    >>> best_at_k([3.0, 0.0, 6.0], 2)  # the maxima of the three pairs are 3, 6 and 6
    5.0
    """
    subsets = math.comb(len(rewards), k)
    return math.fsum(reward * (math.comb(rank, k - 1) / subsets) for rank, reward in enumerate(sorted(rewards)))


def majority(answers: Sequence[str | None], passed: Sequence[bool]) -> float:
    """Return the chance that the most frequent answer passes; of equally frequent ones each has the same chance.

    An answer passes as often as its episodes did. None has no vote; without any vote nothing passes.

    >>> majority(["7", "8", "7"], [True, False, True]), majority(["7", "8"], [True, False])
    (1.0, 0.5)
    """
    votes = Counter(answer for answer in answers if answer is not None)
    passing = Counter(answer for answer, passes in zip(answers, passed, strict=True) if passes)
    most = max(votes.values(), default=0)
    return fmean([passing[answer] / most for answer, count in votes.items() if count == most] or [0.0])


def evaluation_scores(
    episodes: Sequence[ScoredEpisode], *, pass_threshold: float = 1.0, breakdown_by: str | None = None
) -> dict[str, float]:
    """Return scores by name, such as `pass@4`, `reward/style` and `level=hard/pass@4`.

    With several generations of each example there are `pass@k` and `best@k` for the powers of 2 up to their number, and
    for that number, for which alone there is `maj@k`.

    Args:
        episodes: all generations of some examples.
        pass_threshold: the least reward of an episode that passes; one without a reward does not. `best@k` is over the
            rewards that there are, and over the examples with at least k of them.
        breakdown_by: a column of the dataset, for each of whose values there are `reward`, `episodes` and all scores.
    """
    scores = _named_rewards(episodes) | _scores_at_k(episodes, pass_threshold)
    if breakdown_by is None:
        return scores
    parts: dict[str, list[ScoredEpisode]] = {}
    for each in episodes:
        parts.setdefault(str(each.item.full_dataset_entry.get(breakdown_by)), []).append(each)
    for value, part in sorted(parts.items()):
        rewards = [each.reward for each in part if each.reward is not None]
        own = {"reward": fmean(rewards)} if rewards else {}
        own |= {"episodes": len(part)} | evaluation_scores(part, pass_threshold=pass_threshold)
        scores |= {f"{breakdown_by}={value}/{name}": score for name, score in own.items()}
    return scores


def _named_rewards(episodes: Sequence[ScoredEpisode]) -> dict[str, float]:
    """Return the mean of each named reward, without one that is the whole reward."""
    named = [(each.reward, each.named_rewards) for each in episodes if each.named_rewards is not None]
    means = {}
    for name in dict.fromkeys(name for _, rewards in named for name in rewards):
        values = [(reward, value) for reward, rewards in named if (value := rewards.get(name)) is not None]
        if any(reward != value for reward, value in values):
            means[f"{NAMED_REWARD}{name}"] = fmean(value for _, value in values)
    return means


def _scores_at_k(episodes: Sequence[ScoredEpisode], pass_threshold: float) -> dict[str, float]:
    examples: dict[str, list[ScoredEpisode]] = {}
    for each in episodes:
        examples.setdefault(each.item.id, []).append(each)
    count = min(map(len, examples.values()), default=1)
    if count == 1:
        return {}
    answers = [[_answer(each) for each in group] for group in examples.values()]
    rewards = [[each.reward for each in group] for group in examples.values()]
    passed = [[reward is not None and reward >= pass_threshold for reward in group] for group in rewards]
    usable = [[reward for reward in group if reward is not None] for group in rewards]
    scores: dict[str, float] = {}
    for k in sorted({2**power for power in range(count.bit_length())} | {count}):
        scores[f"pass@{k}"] = fmean(pass_at_k(len(group), sum(group), k) for group in passed)
        if best := [best_at_k(group, k) for group in usable if len(group) >= k]:
            scores[f"best@{k}"] = fmean(best)
    return scores | {f"maj@{count}": fmean(map(majority, answers, passed))}


def _answer(episode: ScoredEpisode) -> str | None:
    """Return the output of an episode as a text that equal outputs share; None if it has neither output nor reward."""
    output = episode.item.output_obj
    if output is None and episode.reward is None:
        return None
    if isinstance(output, str):
        return output.strip()
    return json.dumps(to_jsonable_python(output, inf_nan_mode="constants", fallback=repr), sort_keys=True)


def paired_difference(
    examples: Sequence[str], first: Sequence[float | None], second: Sequence[float | None]
) -> PairedDifference | None:
    """Return the mean of `first` - `second` over examples; None if no pair has both rewards.

    Student's interval of the examples' mean differences: generations of one example are not independent (Miller 2024,
    https://arxiv.org/abs/2411.00640, sections 2.2 and 4.2).

    Args:
        examples: the example of each pair.
        first: rewards of one evaluation.
        second: rewards of the other one, in the same order; a pair in which one is None is left out.

    >>> paired_difference(["a", "a", "b"], [1.0, 0.0, 1.0], [0.0, 0.0, 1.0])[::3]
    (0.25, 2)
    """
    pairs: dict[str, list[float]] = {}
    for example, one, other in zip(examples, first, second, strict=True):
        if one is not None and other is not None:
            pairs.setdefault(example, []).append(one - other)
    if not pairs:
        return None
    differences = [fmean(group) for group in pairs.values()]
    mean, low, high = fmean(differences), None, None
    if len(differences) > 1:
        count = len(differences)
        margin = float(scipy.special.stdtrit(count - 1, 0.975)) * stdev(differences) / math.sqrt(count)
        low, high = mean - margin, mean + margin
    higher, lower = sum(each > 0 for each in differences), sum(each < 0 for each in differences)
    return PairedDifference(mean, low, high, len(differences), higher, lower)
