import asyncio
import contextvars
import math
import random
import threading
from dataclasses import replace

import numpy as np
import pytest

from jaxft.errors import ConfigError
from jaxft.harness.data_models import EvalInput, EvalInputItem, EvalOutput, EvalOutputItem
from jaxft.harness.evaluation import Evaluation
from jaxft.harness.evaluators import BaseEvaluator, BoundEvaluator, EvaluatorInfo, WeightedSum, as_evaluator
from jaxft.harness.registry import GroupEvaluatorConfig
from jaxft.rollout.current import episode
from jaxft.rollout.recorder import TRAINING

ITEMS = [EvalInputItem(id=f"e{i}", full_dataset_entry={"n": i}) for i in range(3)]
SOON = 0.02
"""A deadline, in seconds, that what does not await cannot miss."""


def start(evaluation, items=ITEMS, num_generations=4):
    return evaluation.start(items, stream=TRAINING, rollout_index=0, num_generations=num_generations)


def run(evaluation, items=ITEMS, num_generations=4):
    return asyncio.run(
        asyncio.wait_for(
            evaluation.run(items, stream=TRAINING, rollout_index=0, num_generations=num_generations), timeout=20
        )
    )


async def generation(example):
    return episode().generation


def evaluation_of(workflow=generation, reward=None, max_concurrency=64, timeout_seconds=None, **evaluators):
    name = reward or next(iter(evaluators))
    return Evaluation(workflow, evaluators, name, max_concurrency, seed=3, timeout_seconds=timeout_seconds)


def rank(items):
    """The share of the others that gave less."""
    return [sum(other.output_obj < item.output_obj for other in items) / max(len(items) - 1, 1) for item in items]


async def slow_rank(items):
    await asyncio.sleep(0.001)
    return tuple(rank(items))


def without_clock(outcomes):
    return [replace(outcome, seconds={}, traceback=None) for outcome in outcomes]


# Groups


@pytest.mark.parametrize("function", [rank, slow_rank])
@pytest.mark.parametrize("max_concurrency", [1, 64])
def test_a_group_is_scored_once_in_the_order_of_generation(function, max_concurrency):
    seen = []

    def watched(items):
        seen.append([(item.id, item.output_obj) for item in items])
        return function(items)

    evaluation = evaluation_of(rank=BoundEvaluator(watched, is_group=True), max_concurrency=max_concurrency)
    outcomes = run(evaluation)
    assert sorted(seen) == [[(f"e{i}", g) for g in range(4)] for i in range(3)]
    assert [(o.item.id, o.generation) for o in outcomes] == [(f"e{i}", g) for i in range(3) for g in range(4)]
    assert [o.reward for o in outcomes] == pytest.approx([0, 1 / 3, 2 / 3, 1] * 3)
    assert all(o.seconds["reward"] > 0 for o in outcomes)
    output = evaluation.summarize(outcomes)
    assert output.average_reward == output.evaluation_results[0][1].average_score == pytest.approx(0.5)
    assert output.workflow_interrupted is False
    assert (output.num_episodes, output.num_failed, output.num_unscorable) == (12, 0, 0)


def test_the_order_of_finishing_changes_nothing():
    def of(seed):
        draws = random.Random(seed)

        async def hurried(example):
            await asyncio.sleep(draws.random() / 100 if seed else 0)
            if (example["n"], episode().generation) == (1, 2):
                raise ValueError("broken")
            return episode().generation

        return without_clock(
            run(evaluation_of(hurried, rank=BoundEvaluator(slow_rank, is_group=True), max_concurrency=5))
        )

    assert of(0) == of(1) == of(2)


def test_a_group_evaluator_sees_only_what_did_not_fail():
    seen = []

    async def fragile(example):
        if example["n"] == 1 or episode().generation == example["n"]:
            raise ValueError("broken")
        return episode().generation

    def watched(items):
        seen.append((items[0].id, [item.output_obj for item in items]))
        return rank(items)

    def picky(item):
        if item.output_obj == 3:
            raise ValueError("not three")
        return 1.0

    outcomes = run(evaluation_of(fragile, rank=BoundEvaluator(watched, is_group=True), picky=picky))
    assert sorted(seen) == [("e0", [1, 2]), ("e2", [0, 1])]
    assert [o.reward for o in outcomes] == [None, 0.0, 1.0, None, None, None, None, None, 0.0, 1.0, None, None]
    assert [o.error is None for o in outcomes] == [o.reward is not None for o in outcomes]
    assert "rank" not in outcomes[3].scores and outcomes[3].error == "evaluator 'picky': ValueError: not three"


def raises(items):
    raise RuntimeError("no winner")


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (raises, "RuntimeError: no winner"),
        (lambda items: [1.0] * 3, "ValueError: it gave 3 scores for the 4 episodes of example 'e1'"),
        (lambda items: "4444", "TypeError: it gave '4444' (str) for example 'e1': wanted is a list"),
        (lambda items: 1.0, "TypeError: it gave 1.0 (float) for example 'e1': wanted is a list"),
        (lambda items: np.zeros(4), "TypeError: it gave array([0., 0., 0., 0.]) (ndarray) for example 'e1': wanted is"),
        (lambda items: (1.0 for _ in items), "(generator) for example 'e1': wanted is a list with a score for each"),
    ],
)
def test_a_group_evaluator_that_fails_fails_the_episodes_of_its_example(function, message):
    def sometimes(items):
        return function(items) if items[0].id == "e1" else rank(items)

    evaluation = evaluation_of(single=lambda item: 1.0, win=BoundEvaluator(sometimes, is_group=True))
    outcomes = run(evaluation)
    assert [o.error is None for o in outcomes] == [True] * 4 + [False] * 4 + [True] * 4
    for outcome in outcomes[4:8]:
        assert outcome.error.startswith("evaluator 'win': ") and message in outcome.error
        assert outcome.reward is None and outcome.scores == {"single": 1.0}
        assert "evaluators.py" in outcome.traceback and "example 'e1', generation" in outcome.failure_report
    output = evaluation.summarize(outcomes)
    assert (output.num_episodes, output.num_failed, output.num_unscorable) == (12, 4, 0)
    output.model_dump_json()


class Picky(BaseEvaluator):
    async def evaluate_item(self, item):
        if item.output_obj == 2:
            raise ValueError("not two")
        return EvalOutputItem(id=item.id, score=item.output_obj, reasoning=None)


@pytest.mark.parametrize(
    ("win", "message"),
    [
        (lambda items: [0.0, 1.0, "3", 3.0], "TypeError: it gave '3' (str) for example 'e0': wanted is a number"),
        (lambda items: [0.0, 1.0, ValueError("not two"), 3.0], "ValueError: not two"),
        (lambda items: [0.0, 1.0, EvalOutputItem(id="e0", score=2.0, reasoning=None, error="not two"), 3.0], "not two"),
        (as_evaluator(Picky(), is_group=True), "ValueError: not two"),
    ],
)
def test_an_error_in_a_group_is_of_one_episode_alone(win, message):
    """The others are scored, also by the evaluators that follow."""
    seen = []

    def after(items):
        seen.append([item.output_obj for item in items])
        return [0.5] * len(items)

    both = {"win": BoundEvaluator(win, is_group=True), "after": BoundEvaluator(after, is_group=True)}
    outcomes = run(evaluation_of(**both), ITEMS[:1])
    assert [o.scores.get("win") for o in outcomes] == [0.0, 1.0, None, 3.0] and seen == [[0, 1, 3]]
    assert [o.error is None for o in outcomes] == [True, True, False, True]
    assert outcomes[2].error.startswith("evaluator 'win': ") and message in outcomes[2].error


def test_an_example_that_comes_twice_is_two_groups():
    sizes = []

    def watched(items):
        sizes.append(len(items))
        return rank(items)

    run(evaluation_of(rank=BoundEvaluator(watched, is_group=True)), [ITEMS[0], ITEMS[0]], num_generations=3)
    assert sizes == [3, 3]


def test_at_most_max_concurrency_episodes_and_groups_run_at_once_and_that_many_do():
    running, most = {}, {}

    async def count(what, seconds):
        running[what] = running.get(what, 0) + 1
        most[what] = max(most.get(what, 0), running[what])
        await asyncio.sleep(seconds)
        running[what] -= 1
        return 0

    async def counted(items):
        await count("groups", 0.05)
        return rank(items)

    groups = BoundEvaluator(counted, is_group=True)
    run(
        evaluation_of(lambda example: count("episodes", 0.0), rank=groups, max_concurrency=2),
        ITEMS * 3,
        num_generations=2,
    )
    assert most == {"groups": 2, "episodes": 2}


# Cancellation


async def turns(count):
    """So many turns of the event loop."""
    for _ in range(count):
        await asyncio.sleep(0)


@pytest.mark.parametrize("when", ["before it starts", "while it runs", "while it waits"])
def test_a_cancelled_episode_does_not_hold_up_its_group(when):
    async def main():
        go = asyncio.Event()

        async def workflow(example):
            is_waiting = when == "while it waits" and episode().generation == 1
            if not is_waiting:
                await go.wait()
            return episode().generation

        evaluation = evaluation_of(
            workflow, count=BoundEvaluator(lambda items: [len(items)] * len(items), is_group=True)
        )
        tasks = start(evaluation, ITEMS[:1])
        if when != "before it starts":
            await turns(10)
        tasks[1].cancel()
        await turns(10)
        go.set()
        outcomes = await asyncio.gather(*tasks, return_exceptions=True)
        assert isinstance(outcomes[1], asyncio.CancelledError)
        # What had ended before it was cancelled is judged with the others.
        count = 4.0 if when == "while it waits" else 3.0
        assert [outcomes[i].reward for i in (0, 2, 3)] == [count] * 3
        await turns(10)
        assert len(asyncio.all_tasks()) == 1

    asyncio.run(main())


@pytest.mark.parametrize("how", ["tasks", "run", "close"])
@pytest.mark.parametrize("phase", ["created", "rollout", "some wait", "judging"])
def test_cancelling_all_leaves_nothing(how, phase):
    cleaned = []

    async def workflow(example):
        if phase == "rollout" or (phase == "some wait" and episode().generation == 0):
            await asyncio.sleep(100)
        return 0

    async def endless(items):
        try:
            await asyncio.sleep(100)
        finally:
            await turns(10)
            cleaned.append(items[0].id)

    async def wait():
        if phase != "created":
            await turns(20)

    async def main():
        evaluation = evaluation_of(workflow, never=BoundEvaluator(endless, is_group=True), max_concurrency=8)
        if how == "run":
            whole = asyncio.create_task(
                evaluation.run(ITEMS, stream=TRAINING, rollout_index=0, num_generations=2), name="whole"
            )
            await wait()
            whole.cancel()
            await asyncio.gather(whole, return_exceptions=True)
        else:
            tasks = start(evaluation, num_generations=2)
            await wait()
            if how == "tasks":
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
                await turns(20)
            else:
                await evaluation.close()
            assert all(task.cancelled() for task in tasks)
        assert len(asyncio.all_tasks()) == 1
        assert sorted(cleaned) == (["e0", "e1", "e2"] if phase == "judging" else [])

    asyncio.run(main())


# Weighted sums


def test_a_weighted_sum_is_made_of_scores_that_were_given_once():
    calls = []

    def win(item):
        calls.append(item.id)
        return float(item.output_obj)

    evaluation = evaluation_of(
        total=WeightedSum({"win": 2.0, "rank": -1.0, "style": 0.5}),
        win=win,
        rank=BoundEvaluator(rank, is_group=True),
        style=lambda item: {"short": 1.0, "kind": 3.0},
    )
    outcomes = run(evaluation, ITEMS[:1], num_generations=3)
    assert calls == ["e0"] * 3
    assert [o.named_rewards for o in outcomes] == [
        {"win": 0.0, "rank": 0.0, "style": 2.0},
        {"win": 2.0, "rank": -0.5, "style": 2.0},
        {"win": 4.0, "rank": -1.0, "style": 2.0},
    ]
    assert [o.reward for o in outcomes] == [2.0, 3.5, 5.0]
    name, verdicts = evaluation.summarize(outcomes).evaluation_results[0]
    assert name == "total" and verdicts.average_score == 3.5
    assert verdicts.eval_output_items[1].named_scores == outcomes[1].named_rewards


@pytest.mark.parametrize("part", [None, math.nan, math.inf, {"a": 1.0, "b": math.nan}, {"a": None}])
@pytest.mark.parametrize("weight", [0.0, 1.0])
def test_a_weighted_sum_with_an_unusable_part_is_not_usable(part, weight):
    evaluation = evaluation_of(
        total=WeightedSum({"good": 1.0, "bad": weight}), good=lambda item: 1.0, bad=lambda item: part
    )
    outcomes = run(evaluation, ITEMS[:1])
    assert all((o.reward, o.named_rewards, o.error) == (None, None, None) for o in outcomes)
    output = evaluation.summarize(outcomes)
    assert (output.num_failed, output.num_unscorable, output.average_reward) == (0, 4, None)
    output.model_dump_json()


def test_a_weighted_sum_need_not_be_the_reward_and_fails_with_its_parts():
    def fails_on_two(item):
        if item.output_obj == 2:
            raise ValueError("two")
        return 1.0

    evaluation = evaluation_of(win=fails_on_two, total=WeightedSum({"win": 3.0}))
    outcomes = run(evaluation, ITEMS[:1])
    assert [o.reward for o in outcomes] == [1.0, 1.0, None, 1.0]
    assert [o.scores.get("total") for o in outcomes] == [{"win": 3.0}, {"win": 3.0}, None, {"win": 3.0}]
    assert evaluation.summarize(outcomes).evaluation_results[1][1].average_score == 3.0


def test_a_weighted_sum_of_what_is_not_there_or_of_sums_is_refused():
    with pytest.raises(ConfigError) as caught:
        evaluation_of(
            win=lambda item: 1.0,
            own=WeightedSum({"own": 1.0}),
            nested=WeightedSum({"win": 1.0, "own": 1.0}),
            wrong=WeightedSum({"wni": 1.0}),
        )
    assert caught.value.faults == (
        "eval.evaluators.own.weights: 'own' is this weighted sum itself: name the evaluators that it is made of",
        "eval.evaluators.nested.weights: 'own' is a weighted sum, too: name the evaluators that it is made of",
        "eval.evaluators.wrong.weights: 'wni' is not in 'eval.evaluators'; did you mean 'win'?",
    )


# Time-outs


async def sleeps(argument):
    await asyncio.sleep(100)


async def stubborn(argument):
    try:
        await asyncio.sleep(100)
    except asyncio.CancelledError:
        return 1.0


async def bitter(argument):
    try:
        await asyncio.sleep(100)
    except asyncio.CancelledError:
        raise ValueError("who woke me?") from None


def blocks(argument):
    threading.Event().wait(10)
    return 1.0


@pytest.mark.parametrize("is_group", [False, True])
@pytest.mark.parametrize("function", [sleeps, stubborn, bitter, blocks, lambda argument: sleeps(argument)])
def test_an_evaluator_that_takes_too_long_fails_the_episode(function, is_group):
    evaluation = evaluation_of(
        fine=lambda item: 1.0, slow=BoundEvaluator(function, is_group, timeout_seconds=SOON), max_concurrency=1
    )
    outcomes = run(evaluation, ITEMS[:1], num_generations=2)
    for outcome in outcomes:
        assert outcome.error == "evaluator 'slow': TimeoutError: no score within 0.02 s"
        assert outcome.scores == {"fine": 1.0} and outcome.reward is None
        assert "example 'e0', generation" in outcome.failure_report
    assert evaluation.summarize(outcomes).num_failed == 2


@pytest.mark.parametrize("is_async", [False, True])
def test_an_evaluator_within_its_time_is_like_any_other(is_async):
    label = contextvars.ContextVar("label")
    threads = set()

    def score(item):
        threads.add(threading.current_thread())
        assert label.get() == "mine"
        if item.output_obj == 1:
            raise KeyError("one")
        if item.output_obj == 2:
            next(iter(()))
        if item.output_obj == 3:
            raise TimeoutError("the judge's server is slow")
        return np.float32(0.5)

    async def score_async(item):
        return score(item)

    label.set("mine")
    outcomes = run(evaluation_of(win=BoundEvaluator(score_async if is_async else score, timeout_seconds=20)), ITEMS[:1])
    assert [o.reward for o in outcomes] == [0.5, None, None, None]
    assert outcomes[1].error == "evaluator 'win': KeyError: 'one'" and "in score" in outcomes[1].traceback
    assert "StopIteration" in outcomes[2].error
    assert outcomes[3].error == "evaluator 'win': TimeoutError: the judge's server is slow"
    assert (threading.main_thread() in threads) == is_async
    assert is_async or all(thread.daemon for thread in threads)


def test_sync_evaluators_without_a_time_limit_stay_on_the_event_loop():
    def score(item):
        asyncio.get_running_loop()
        return float(threading.current_thread() is threading.main_thread())

    assert {o.reward for o in run(evaluation_of(win=score))} == {1.0}


@pytest.mark.filterwarnings("error")
def test_what_comes_too_late_is_dropped():
    released, ended = threading.Event(), threading.Event()

    def late(item):
        if item.output_obj == 0:
            released.wait(10)
            ended.set()
            return sleeps(item)
        return 1.0

    async def main():
        unhandled = []
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: unhandled.append(context))
        tasks = start(evaluation_of(win=BoundEvaluator(late, timeout_seconds=0.5)), ITEMS[:1], num_generations=2)
        outcomes = await asyncio.gather(*tasks)
        released.set()
        await asyncio.to_thread(ended.wait, 10)
        await asyncio.sleep(0.01)
        return outcomes, unhandled

    outcomes, unhandled = asyncio.run(main())
    assert [o.reward for o in outcomes] == [None, 1.0] and unhandled == []


@pytest.mark.parametrize("workflow", [sleeps, stubborn])
def test_a_workflow_that_takes_too_long_fails_its_episode(workflow):
    async def sometimes(example):
        return await workflow(example) if episode().generation == 1 else 1.0

    evaluation = evaluation_of(
        sometimes, count=BoundEvaluator(lambda items: [len(items)] * len(items), is_group=True), timeout_seconds=0.5
    )
    outcomes = run(evaluation, num_generations=3)
    assert [o.reward for o in outcomes] == [2.0, None, 2.0] * 3
    assert outcomes[1].error == "TimeoutError: the workflow gave no output within 0.5 s"
    assert "in sleeps" in outcomes[1].traceback or workflow is stubborn
    assert outcomes[1].item.output_obj is None and outcomes[1].seconds["rollout"] >= 0.5
    assert evaluation.summarize(outcomes).num_failed == 3


def test_a_time_out_of_the_workflows_own_keeps_its_message():
    async def impatient(example):
        if example["n"] == 0:
            async with asyncio.timeout(0.001):
                await asyncio.sleep(1)
        raise TimeoutError("the tool is slow")

    outcomes = run(evaluation_of(impatient, win=lambda item: 1.0, timeout_seconds=20), ITEMS[:2], num_generations=1)
    assert [o.error for o in outcomes] == ["TimeoutError", "TimeoutError: the tool is slow"]


# The toolkit's form


class ShareConfig(GroupEvaluatorConfig, name="share_of_the_sum"):
    pass


class Share(BaseEvaluator):
    """The output of an episode, as a share of a number."""

    def __init__(self, of: float) -> None:
        super().__init__(max_concurrency=2, tqdm_desc="sharing")
        self.of = of
        self.running, self.most = 0, 0

    async def evaluate_item(self, item: EvalInputItem) -> EvalOutputItem:
        self.running += 1
        self.most = max(self.most, self.running)
        await asyncio.sleep(0)
        self.running -= 1
        if item.output_obj == 9:
            raise LookupError("nine")
        return EvalOutputItem(id=item.id, score=item.output_obj / self.of, reasoning={"of": self.of})


async def share_of_the_sum(eval_input: EvalInput) -> EvalOutput:
    return await Share(sum(item.output_obj for item in eval_input.eval_input_items)).evaluate(eval_input)


SHARE_OF_THE_SUM = EvaluatorInfo(config=ShareConfig(), evaluate_fn=share_of_the_sum, description="its share")


def test_an_evaluator_in_the_toolkits_form_scores_with_its_reasoning():
    share = Share(4.0)
    info = EvaluatorInfo(config=ShareConfig(), evaluate_fn=share.evaluate, description="a quarter of it")
    outcomes = run(evaluation_of(share=share, same=info, reward="same"), ITEMS[:1])
    assert [outcome.reward for outcome in outcomes] == [0.0, 0.25, 0.5, 0.75]
    assert all(outcome.reasonings == {"share": {"of": 4.0}, "same": {"of": 4.0}} for outcome in outcomes)
    assert share.most == 2


def test_a_group_evaluator_in_the_toolkits_form_gets_all_episodes_of_an_example():
    share = BoundEvaluator(as_evaluator(SHARE_OF_THE_SUM, is_group=True), is_group=True)
    outcomes = run(evaluation_of(share=share), ITEMS[:2])
    assert [outcome.reward for outcome in outcomes] == [0.0, 1 / 6, 2 / 6, 3 / 6] * 2
    assert outcomes[0].reasonings == {"share": {"of": 6}}


def test_one_in_the_toolkits_form_that_raises_or_gives_too_few_items_fails_its_episode():
    async def none_of_them(eval_input):
        return EvalOutput(average_score=None, eval_output_items=[])

    async def nine(example):
        return 9

    forgetful = EvaluatorInfo(config=ShareConfig(), evaluate_fn=none_of_them, description="")
    (raised,) = run(evaluation_of(nine, share=Share(1.0)), ITEMS[:1], 1)
    (short,) = run(evaluation_of(nine, forgetful=forgetful), ITEMS[:1], 1)
    assert (raised.error, raised.reward) == ("evaluator 'share': LookupError: nine", None)
    assert "with 1 items" in short.error and "'e0'" in short.error


def test_evaluate_gives_the_mean_and_the_items_in_order():
    items = [EvalInputItem(id=f"{n}", output_obj=n, full_dataset_entry={}) for n in (1, 3)]
    output = asyncio.run(Share(4.0).evaluate(EvalInput(eval_input_items=items)))
    assert (output.average_score, [item.id for item in output.eval_output_items]) == (0.5, ["1", "3"])
