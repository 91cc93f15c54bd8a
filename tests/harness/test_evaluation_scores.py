"""pass@k and best@k against enumeration of all subsets, votes, and their place in evaluations."""

import asyncio
from collections import Counter
from itertools import combinations
from statistics import fmean

import numpy as np
import pytest

from jaxft.errors import ConfigError
from jaxft.harness.data_models import EvalInputItem
from jaxft.harness.evaluation import Evaluation
from jaxft.harness.evaluation_scores import (
    ScoredEpisode,
    best_at_k,
    evaluation_scores,
    majority,
    pass_at_k,
)


def vote(drawn):
    """Chance that a draw's most frequent answer passes, by its definition; each answer has one judgement."""
    votes = Counter(answer for answer, _ in drawn if answer is not None)
    winners = [answer for answer, count in votes.items() if count == max(votes.values())]
    return fmean(dict(drawn)[winner] for winner in winners) if winners else 0.0


@pytest.mark.parametrize("seed", range(6))
def test_each_score_is_its_mean_over_all_subsets(seed):
    draw = np.random.default_rng(seed)
    n = int(draw.integers(1, 9))
    answers = [None if choice == 4 else str(choice) for choice in draw.integers(0, 5, n)]
    rewards = [float(draw.integers(0, 3)) if answer is None else float(int(answer) % 3) for answer in answers]
    passed = [reward >= 2.0 and answer is not None for reward, answer in zip(rewards, answers, strict=True)]
    for k in range(1, n + 1):
        subsets = list(combinations(range(n), k))
        assert pass_at_k(n, sum(passed), k) == pytest.approx(fmean(any(passed[i] for i in each) for each in subsets))
        assert best_at_k(rewards, k) == pytest.approx(fmean(max(rewards[i] for i in each) for each in subsets))
    assert majority(answers, passed) == pytest.approx(vote(list(zip(answers, passed, strict=True))))


def test_an_answer_of_several_judgements_passes_as_often_as_its_episodes():
    assert majority(["a", "a", "b"], [True, False, False]) == 0.5
    assert majority([None, None, "a"], [False, False, True]) == 1.0 and majority([None], [False]) == 0.0


def test_large_numbers_of_generations():
    assert pass_at_k(10_000, 1, 100) == pytest.approx(0.01)
    assert best_at_k([0.0] * 1999 + [1.0], 1000) == pytest.approx(0.5)


def example(name, *rewards, outputs=None, named=None, **row):
    outputs = outputs or [str(reward) for reward in rewards]
    items = [EvalInputItem(id=name, output_obj=output, full_dataset_entry=row) for output in outputs]
    return [ScoredEpisode(item, reward, named) for item, reward in zip(items, rewards, strict=True)]


def test_scores_of_examples_are_averaged_for_the_powers_of_two_and_the_number_of_generations():
    episodes = [*example("a", 1.0, 0.0, 0.0), *example("b", 0.5, 0.0, None)]
    scores = evaluation_scores(episodes)
    assert list(scores) == [*(f"{name}@{k}" for k in (1, 2, 3) for name in ("pass", "best")), "maj@3"]
    assert scores["pass@1"] == pytest.approx(1 / 6)
    assert scores["pass@2"] == pytest.approx(1 / 3) and scores["pass@3"] == 0.5
    assert scores["best@2"] == pytest.approx((2 / 3 + 0.5) / 2)
    assert scores["best@3"] == 1.0  # the other example has two rewards only
    assert scores["maj@3"] == 0.0
    assert evaluation_scores(episodes, pass_threshold=0.5)["pass@3"] == 1.0
    assert evaluation_scores(example("a", 1.0)) == evaluation_scores([]) == {}


def test_answers_are_outputs_that_are_equal_as_json():
    episodes = example("a", 1.0, 1.0, 0.0, outputs=[{"x": 1, "y": [2]}, {"y": [2], "x": 1}, " z"])
    assert evaluation_scores(episodes)["maj@3"] == 1.0
    episodes = example("a", 0.0, 0.0, 1.0, outputs=[" z\n", "z", "y"])
    assert evaluation_scores(episodes)["maj@3"] == 0.0
    # An agent may act and say nothing; an episode that failed has no reward either, and no vote.
    assert evaluation_scores(example("a", 1.0, 1.0, 0.0, outputs=[None] * 3))["maj@3"] == pytest.approx(2 / 3)
    assert evaluation_scores(example("a", None, None, 1.0, outputs=[None, None, "x"]))["maj@3"] == 1.0


def test_breakdowns_by_a_column_and_by_the_name_of_a_reward():
    named = {"style": 0.25, "none": None}
    episodes = [
        *example("a", 1.0, named=named, level="easy"),
        *example("b", 0.5, level=2),
        *example("c", None, level=2),
    ]
    assert evaluation_scores(episodes, breakdown_by="level") == {
        "reward/style": 0.25,
        "level=2/reward": 0.5,
        "level=2/episodes": 2,
        "level=easy/reward": 1.0,
        "level=easy/episodes": 1,
        "level=easy/reward/style": 0.25,
    }
    assert evaluation_scores(example("a", 0.25, named=named)) == {}  # it is the whole reward


def test_an_evaluation_has_the_scores_and_the_rewards_of_its_episodes():
    async def guess(row):
        return row["n"]

    items = [EvalInputItem(id=str(n), full_dataset_entry={"n": n, "level": n % 2}) for n in range(3)]

    def summary(**options):
        evaluation = Evaluation(guess, {"n": lambda item: float(item.output_obj)}, "n", 2, 0, **options)
        outcomes = asyncio.run(evaluation.validate(items, num_generations=2))
        return evaluation.summarize(outcomes)

    output = summary(pass_threshold=2.0, breakdown_by="level")
    assert output.rewards == [0.0, 0.0, 1.0, 1.0, 2.0, 2.0]
    assert (output.scores["pass@2"], output.scores["best@2"]) == (pytest.approx(1 / 3), 1.0)
    assert (output.scores["level=0/pass@1"], output.scores["level=1/reward"]) == (0.5, 1.0)
    with pytest.raises(ConfigError, match=r"breakdown_by: no example has 'levle'.*'level'"):
        summary(breakdown_by="levle")
