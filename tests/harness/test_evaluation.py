import asyncio
import json
import math
from decimal import Decimal
from fractions import Fraction

import jax.numpy as jnp
import numpy as np
import pytest

from jaxft.errors import PolicyLostError, ToolsUnsupportedError
from jaxft.harness.data_models import EvalInputItem, EvalOutput, EvalOutputItem
from jaxft.harness.evaluation import Evaluation
from jaxft.harness.evaluators import BoundEvaluator, WeightedSum
from jaxft.rollout.current import episode
from jaxft.rollout.recorder import TRAINING

ITEMS = [EvalInputItem(id=f"e{i}", full_dataset_entry={"n": i, "list": []}) for i in range(5)]


def run(evaluation, items=ITEMS, **options):
    options = {"stream": TRAINING, "rollout_index": 0} | options
    return asyncio.run(evaluation.run(items, **options))


def evaluation_of(workflow, max_concurrency=2, **evaluators):
    return Evaluation(workflow, evaluators, next(iter(evaluators), None), max_concurrency, seed=3)


async def echo(example):
    return example["n"]


def test_the_same_seeds_whatever_the_concurrency():
    async def draw(example):
        await asyncio.sleep(0)
        return episode().seed

    seeds = [[o.item.output_obj for o in run(evaluation_of(draw, limit), num_generations=2)] for limit in (1, 64)]
    assert seeds[0] == seeds[1] and len(set(seeds[0])) == 10


def test_an_episode_knows_where_it_belongs():
    """Validations have a stream and a counter of their own, and are greedy."""

    async def look(example):
        return episode()

    async def thrice(evaluation):
        options = {"stream": TRAINING, "rollout_index": 4, "temperature": 0.5}
        return [await evaluation.run(ITEMS[:1], **options), *[await evaluation.validate(ITEMS[:1]) for _ in range(2)]]

    outcomes = [outcome for (outcome,) in asyncio.run(thrice(evaluation_of(look)))]
    found = [outcome.episode for outcome in outcomes]
    assert all(outcome.item.output_obj is outcome.episode for outcome in outcomes)
    assert {(each.run_seed, each.example_id) for each in found} == {(3, "e0")}
    assert [(each.stream, each.rollout_index, each.temperature) for each in found] == [
        (0, 4, 0.5),
        (1, 0, 0.0),
        (1, 1, 0.0),
    ]


def test_a_failing_workflow_fails_alone():
    async def fragile(example):
        if example["n"] == 1:
            raise KeyError("gone\nwith two lines")
        return 1

    evaluation = evaluation_of(fragile, score=lambda item: 1.0)
    outcomes = run(evaluation)
    assert [o.error is None for o in outcomes] == [True, False, True, True, True]
    assert outcomes[1].error == "KeyError: 'gone\\nwith two lines'" and outcomes[1].reward is None
    assert "in fragile" in outcomes[1].traceback and "in user_code" not in outcomes[1].traceback
    output = evaluation.summarize(outcomes)
    assert (output.num_episodes, output.num_failed, output.num_unscorable, output.average_reward) == (5, 1, 0, 1.0)
    assert output.first_error.startswith("example 'e1', generation 0: KeyError")
    assert output.evaluation_results[0][1].eval_output_items[1].error == outcomes[1].error


@pytest.mark.parametrize("is_group", [False, True])
@pytest.mark.parametrize("kind", [PolicyLostError, ToolsUnsupportedError])
def test_a_policy_that_cannot_go_on_is_no_fault_of_an_episode(kind, is_group):
    """It ends the run, as one error and not as one for each episode."""
    error = kind("the parameters were lost")

    async def ask(example):
        await asyncio.sleep(0.001 * example["n"])
        if example["n"] == 2:
            raise error
        await asyncio.sleep(example["n"] // 3 * 60)  # the later ones are given up
        return 1

    async def main():
        run_evaluators = BoundEvaluator(
            (lambda items: [1.0] * len(items)) if is_group else (lambda item: 1.0), is_group
        )
        evaluation = evaluation_of(ask, max_concurrency=100, score=run_evaluators)
        options = {"stream": TRAINING, "rollout_index": 0, "num_generations": 2}
        with pytest.raises(kind) as caught:
            await asyncio.wait_for(evaluation.run(ITEMS, **options), timeout=20)
        assert caught.value is error
        with pytest.raises(kind):
            await asyncio.wait_for(asyncio.gather(*evaluation.start(ITEMS, **options)), timeout=20)
        await asyncio.wait_for(evaluation.close(), timeout=20)

    asyncio.run(main())


def test_an_episode_cannot_spoil_the_row_of_another():
    async def spoil(example):
        example["list"].append(1)
        return len(example["list"])

    assert {o.item.output_obj for o in run(evaluation_of(spoil), num_generations=3)} == {1}


@pytest.mark.parametrize(
    ("given", "reward", "named"),
    [
        (1, 1.0, None),
        (np.float32(0.5), 0.5, None),
        (np.float64("nan"), None, None),
        (Fraction(1, 4), 0.25, None),
        ({"win": 1, "speed": 0.5}, 1.5, {"win": 1.0, "speed": 0.5}),
        (None, None, None),
        (math.nan, None, None),
        (math.inf, None, None),
        ({"win": np.float32(1), "speed": np.uint8(1)}, 2.0, {"win": 1.0, "speed": 1.0}),
        (True, 1.0, None),
        (np.bool_(False), 0.0, None),
        (np.array(0.5), 0.5, None),
        (jnp.bfloat16(0.25), 0.25, None),
        (jnp.array(True), 1.0, None),
        (jnp.array(jnp.nan), None, None),
        ({"win": True, "speed": jnp.float32(0.5)}, 1.5, {"win": 1.0, "speed": 0.5}),
        ({"score": 1, "reasoning": 0.5}, 1.5, {"score": 1.0, "reasoning": 0.5}),
        ({"win": 1, "speed": None}, 1.0, {"win": 1.0, "speed": None}),
        ({"win": None, "speed": None}, None, None),
        ({"win": 1, "speed": math.nan}, None, None),
    ],
)
def test_rewards(given, reward, named):
    async def score(item):
        return given

    evaluation = evaluation_of(echo, score=score)
    outcomes = run(evaluation)
    assert all((o.reward, o.named_rewards, o.error) == (reward, named, None) for o in outcomes)
    output = evaluation.summarize(outcomes)
    assert output.num_unscorable == (5 if reward is None else 0)
    assert output.average_reward == reward
    assert output.evaluation_results[0][1].average_score == reward
    output.model_dump_json()


@pytest.mark.parametrize(
    "given",
    [
        "1.0",
        np.complex64(1),
        1j,
        Decimal(1),
        np.zeros(2),
        jnp.zeros(1),
        {},
        {"a": 1.0, "b": "2"},
        {"a": {"b": 1.0}},
        {1: 2.0},
        (number for number in [1.0]),
        echo,
    ],
)
@pytest.mark.parametrize("options", [{}, {"timeout_seconds": 20}], ids=["unlimited", "limited"])
def test_what_is_no_reward_is_an_error(given, options):
    async def give(item):
        return given

    for function in (give, lambda item: given, lambda item: give(item)):
        evaluation = evaluation_of(echo, win=BoundEvaluator(function, **options))
        outcomes = run(evaluation)
        assert outcomes[2].reward is None and outcomes[2].error.startswith("evaluator 'win': TypeError: it gave ")
        assert f"({type(given).__name__}) for example 'e2': wanted is a number" in outcomes[2].error
        assert evaluation.summarize(outcomes).num_failed == 5


@pytest.mark.parametrize("is_group", [False, True])
@pytest.mark.parametrize(
    ("given", "reward", "reasoning"),
    [
        (EvalOutputItem(id=7, score=0.5, reasoning="half of it"), 0.5, "half of it"),
        (EvalOutputItem(id="?", score=jnp.float32(0.5), reasoning={"steps": [1]}), 0.5, {"steps": [1]}),
        (EvalOutputItem(id="?", score=True), 1.0, None),
        (EvalOutputItem(id="?", score=None, reasoning="unreadable"), None, "unreadable"),
        (EvalOutputItem(id="?", score=3.0, named_scores={"win": 1.0, "speed": 2.0}, reasoning="won"), 3.0, "won"),
        (EvalOutputItem(id="?", score=1.0, reasoning={"nan": math.nan}), 1.0, "{'nan': nan}"),
        ({"id": 7, "score": True, "reasoning": "as a dict"}, 1.0, "as a dict"),
        ({"score": 0, "reasoning": None}, 0.0, None),
    ],
)
def test_a_score_may_come_with_its_reasoning(given, reward, reasoning, is_group):
    function = (lambda items: [given] * len(items)) if is_group else (lambda item: given)
    evaluation = evaluation_of(echo, win=BoundEvaluator(function, is_group), total=WeightedSum({"win": 2.0}))
    outcomes = run(evaluation)
    assert {outcome.reward for outcome in outcomes} == {reward}
    (_, verdicts), (_, sums) = evaluation.summarize(outcomes).evaluation_results
    item = EvalOutput.model_validate_json(verdicts.model_dump_json()).eval_output_items[3]
    assert (item.id, item.score, item.error) == ("e3", reward, None)
    assert item.reasoning == (reasoning if reward is not None or reasoning is not None else "not usable: None")
    assert sums.average_score == (None if reward is None else 2.0 * reward)
    said = sums.eval_output_items[3].reasoning  # of what is added up
    text = reasoning if reasoning is None or isinstance(reasoning, str) else json.dumps(reasoning)
    assert said == (text if reward is not None else "not usable: {'win': nan}")


def test_the_part_that_is_no_number_is_pointed_at():
    given = {f"criterion {i}": np.float64(1 / 3) for i in range(20)} | {"last": "good"}
    outcome = run(evaluation_of(echo, win=lambda item: given))[0]
    assert outcome.error.endswith("; what is wrong: 'last': 'good' (str)")


def test_an_evaluator_that_cannot_be_called_or_that_cancels_fails_the_episode_and_not_the_run():
    def cancelled(item):
        raise asyncio.CancelledError

    def exhausted(item):
        return next(iter(()))

    class NotShowable:
        def __repr__(self):
            raise RuntimeError("no text")

    def failures(function):
        evaluation = evaluation_of(echo, win=function)
        outcomes = run(evaluation)
        assert outcomes[4].failure_report.startswith("example 'e4', generation 0: evaluator 'win': ")
        assert evaluation.summarize(outcomes).num_failed == 5
        return outcomes[4].error

    assert failures(lambda: 1.0).startswith("evaluator 'win': TypeError: ")
    assert failures(cancelled) == "evaluator 'win': RuntimeError: it let the cancellation of a task of its own escape"
    assert "StopIteration" in failures(exhausted)
    assert failures(lambda item: NotShowable()) == "evaluator 'win': RuntimeError: no text"


def test_a_reward_too_large_for_a_float_is_an_error():
    outcome = run(evaluation_of(echo, win=lambda item: 10**400))[0]
    assert outcome.error == "evaluator 'win': OverflowError: int too large to convert to float"


def test_the_reward_is_one_of_several_evaluators():
    evaluation = Evaluation(echo, {"a": lambda item: 1.0, "b": lambda item: 2.0}, "b", 1, 0)
    assert {o.reward for o in run(evaluation)} == {2.0}
    with pytest.raises(ValueError, match="reward_name is 'c'; the evaluators are a"):
        Evaluation(echo, {"a": lambda item: 1.0}, "c", 1, 0)


def test_a_cancellation_from_within_fails_one_episode_and_not_the_run():
    async def careless(example):
        if example["n"] == 1:
            inner = asyncio.create_task(asyncio.sleep(10))
            inner.cancel()
            await inner
        return "done"

    outcomes = run(evaluation_of(careless))
    assert [outcome.item.output_obj for outcome in outcomes] == ["done", None, "done", "done", "done"]
    assert "cancellation" in outcomes[1].error
