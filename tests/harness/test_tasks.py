"""Several tasks in one run: their rows, evaluators and curricula, datasets and workflows put together, bad input."""

import asyncio
import io

import pytest

from jaxft.errors import ConfigError, DatasetError
from jaxft.harness.builder import Builder
from jaxft.harness.config import config_from_mapping, resolved_yaml
from jaxft.harness.curriculum import GroupReward, choose_groups, choose_groups_per_task, initial_state
from jaxft.harness.data_models import CurriculumLearningConfig, EvalInputItem, FinetuneConfig, TaskConfig, Trajectory
from jaxft.harness.evaluation import Evaluation
from jaxft.harness.evaluators import BoundEvaluator, WeightedSum
from jaxft.harness.registry import DatasetConfig, WorkflowConfig, register_dataset_loader, register_workflow
from jaxft.harness.strict_yaml import parse_yaml
from jaxft.harness.tasks import Tasks, tasks_of
from jaxft.rollout.recorder import TRAINING
from jaxft.runs.console import Console
from jaxft.runs.directory import RunDirectory


class PlainAgentConfig(WorkflowConfig, name="toy_plain_agent"):
    pass


@register_workflow(config_type=PlainAgentConfig)
async def plain_agent(config, builder):
    data = builder.config.eval.general.dataset.type_name
    yield lambda example: f"{data} {example['question']}"  # runs in a thread


class LevelsConfig(DatasetConfig, name="toy_levels"):
    pass


@register_dataset_loader(config_type=LevelsConfig)
async def levels(config, builder):
    row = {"task_name": 3, "agent": builder.config.workflow.type_name}
    yield [EvalInputItem(id="0", full_dataset_entry=row)]


def rows(*tasks):
    return [EvalInputItem(id=f"{n}", full_dataset_entry={"n": n, "kind": task}) for n, task in enumerate(tasks)]


def evaluated(evaluators, configs, items, num_generations=1):
    """Outcomes and summary of an agent that returns the number of its row."""

    async def answer(example):
        return example["n"]

    async def main():
        tasks = Tasks("kind", {name: TaskConfig(**config) for name, config in configs.items()})
        evaluation = Evaluation(answer, evaluators, "first", 4, 0, tasks=tasks)
        outcomes = await evaluation.run(items, stream=TRAINING, rollout_index=0, num_generations=num_generations)
        return outcomes, evaluation.summarize(outcomes)

    return asyncio.run(main())


def refuse(item):
    raise AssertionError("an evaluator of another task")


def test_each_task_has_its_evaluator_and_others_score_all_rows():
    def only_b(item):
        return refuse(item) if item.full_dataset_entry["kind"] != "b" else 10.0 + item.output_obj

    def first(item):
        return refuse(item) if item.full_dataset_entry["kind"] != "a" else float(item.output_obj)

    evaluators = {"first": first, "part": only_b, "second": WeightedSum({"part": 2.0}), "length": lambda item: 1.0}
    outcomes, summary = evaluated(evaluators, {"a": {}, "b": {"evaluator": "second"}}, rows("a", "b", "a"))
    assert [outcome.error for outcome in outcomes] == [None] * 3
    assert [outcome.reward for outcome in outcomes] == [0.0, 22.0, 2.0] == summary.rewards
    own = ["first", "length"]
    assert [sorted(outcome.scores) for outcome in outcomes] == [own, ["length", "part", "second"], own]
    assert summary.num_unscorable == 0 and summary.average_reward == 8.0
    assert {name: result.average_score for name, result in summary.evaluation_results} == {
        "first": 1.0,
        "part": 11.0,
        "second": 22.0,
        "length": 1.0,
    }
    assert dict(summary.evaluation_results)["first"].eval_output_items[1].reasoning is None
    assert dict(summary.evaluation_results)["second"].eval_output_items[1].evaluator == "second"
    by_task = {"kind=a/reward": 1.0, "kind=a/episodes": 2, "kind=b/reward": 22.0, "kind=b/episodes": 1}
    assert summary.scores == by_task


def test_evaluators_of_groups_score_those_of_their_task_only():
    def ranks(items):
        assert {item.full_dataset_entry["kind"] for item in items} == {"b"} and len(items) == 2
        return [0.0, 1.0]

    evaluators = {"first": lambda item: 5.0, "ranks": BoundEvaluator(ranks, is_group=True)}
    outcomes, _ = evaluated(evaluators, {"a": {}, "b": {"evaluator": "ranks"}}, rows("a", "b"), num_generations=2)
    assert [outcome.reward for outcome in outcomes] == [5.0, 5.0, 0.0, 1.0]


@pytest.mark.parametrize(
    ("items", "message"),
    [
        (rows("a", "c", "b"), r"per_task: has no 'c', of which row '1' of data is.*\{\}"),
        (rows("a", 1), r"has no '1', of which row '1'"),
        ([EvalInputItem(id="x", full_dataset_entry={"knd": "a"})], r"task_key: is 'kind'.*row 'x' of data.*'knd'"),
    ],
)
def test_rows_of_no_task_are_refused(items, message):
    tasks = Tasks("kind", {"a": TaskConfig(), "b": TaskConfig()})
    tasks.check(rows("a", "b"), "data")
    with pytest.raises(ConfigError, match=message):
        tasks.check(items, "data")


def test_without_tasks_nothing_is_checked():
    none = tasks_of(FinetuneConfig())
    none.check([EvalInputItem(id="x", full_dataset_entry={})], "data")
    assert none.of(rows("a")[0]) is None and none.evaluators("first") == {None: "first"}


def test_a_validation_by_rows_of_no_task_is_refused():
    evaluation = Evaluation(str, {"first": refuse}, "first", 4, 0, tasks=Tasks("kind", {"a": TaskConfig()}))
    with pytest.raises(ConfigError, match=r"has no 'b', of which row '1'"):
        asyncio.run(evaluation.validate(rows("a", "b")))
    with pytest.raises(ValueError, match=r"'second'; the evaluators are first"):
        Evaluation(str, {"first": refuse}, "first", 4, 0, tasks=Tasks("kind", {"a": TaskConfig(evaluator="second")}))


def test_the_datasets_of_a_run_have_rows_of_its_tasks(toy_run, tmp_path):
    """Rows of the toys are of the questions a, b and c."""

    async def examples(changes):
        config = config_from_mapping(toy_run, base_dir=tmp_path, overrides=changes)
        with RunDirectory.create(tmp_path / "run", overwrite=True) as directory:
            async with Builder(config, directory, Console(io.StringIO())) as builder:
                return await builder.get_dataset(), await builder.get_validation()

    toy_run["finetuning"] |= {"task_key": "question", "per_task": {name: {} for name in "abc"}}
    toy_run["eval"]["validation"] = {"dataset": {"_type": "toy_rows"}}
    items, validation = asyncio.run(examples([]))
    assert len(items) == len(validation.examples) == 3 and validation.evaluation.tasks.key == "question"
    for section, path in (("validation", "eval.validation.dataset"), ("general", "eval.general.dataset")):
        with pytest.raises(ConfigError, match=rf"has no 'd', of which row '1' of {path} is"):
            asyncio.run(examples([(f"eval.{section}.dataset.questions", "[a, d]")]))


def made(mapping, tmp_path, make):
    """Return the result of a function that gets a builder with this configuration."""

    async def main():
        config = config_from_mapping(mapping, base_dir=tmp_path)
        with RunDirectory.create(tmp_path / "run", overwrite=True) as directory:
            async with Builder(config, directory, Console(io.StringIO())) as builder:
                return await make(builder)

    return asyncio.run(main())


@pytest.fixture
def mixed_run(toy_run):
    toy_run["eval"]["general"]["dataset"] = {
        "_type": "mixture",
        "datasets": {"loud": {"_type": "toy_rows"}, "plain": {"_type": "toy_rows", "questions": ["x"]}},
    }
    toy_run["workflow"] = {
        "_type": "per_task",
        "workflows": {"loud": {"_type": "toy_agent"}, "plain": {"_type": "toy_plain_agent"}},
    }
    toy_run["finetuning"]["per_task"] = {"loud": {}, "plain": {"weight": 2}}
    return toy_run


def test_a_mixture_of_datasets_and_workflows(mixed_run, tmp_path):
    async def evaluate(builder):
        evaluation, items = await builder.get_evaluation(), await builder.get_dataset()
        return items, await evaluation.run(items, stream=TRAINING, rollout_index=0)

    items, outcomes = made(mixed_run, tmp_path, evaluate)
    assert [item.id for item in items] == ["loud/0", "loud/1", "loud/2", "plain/0"]
    assert items[3].full_dataset_entry == {"question": "x", "answer": "X", "task_name": "plain"}
    assert [outcome.item.output_obj for outcome in outcomes] == ["A", "B", "C", "toy_rows x"]
    saved = parse_yaml(resolved_yaml(config_from_mapping(mixed_run, base_dir=tmp_path)), "config.yml")
    assert made(saved, tmp_path, lambda builder: builder.get_dataset()) == items


def test_what_does_not_fit_in_a_mixture_is_refused(mixed_run, tmp_path):
    workflows = mixed_run["workflow"]["workflows"]
    del workflows["plain"]
    with pytest.raises(ConfigError, match=r"workflow\.workflows: has no 'plain'"):
        made(mixed_run, tmp_path, lambda builder: builder.get_workflow())
    mixed_run["finetuning"]["task_key"] = "answer"
    with pytest.raises(DatasetError, match=r"datasets\.loud: row '0' has a column 'answer'"):
        made(mixed_run, tmp_path, lambda builder: builder.get_dataset())


def test_tasks_may_be_numbers_and_a_row_of_none_is_told(toy_run, tmp_path):
    toy_run["eval"]["general"]["dataset"] = {"_type": "mixture", "datasets": {"3": {"_type": "toy_levels"}}}
    toy_run["workflow"] = {"_type": "per_task", "workflows": {"3": {"_type": "toy_plain_agent"}}}
    (item,) = made(toy_run, tmp_path, lambda builder: builder.get_dataset())
    assert item.id == "3/0" and item.full_dataset_entry == {"task_name": "3", "agent": "toy_plain_agent"}
    workflow = made(toy_run, tmp_path, lambda builder: builder.get_workflow())
    assert workflow({"task_name": 3, "question": "x"}) == "toy_levels x"
    with pytest.raises(ConfigError, match=r"has no 'None', which the row's column 'task_name' names; there are: 3"):
        workflow({"n": 1})


@pytest.mark.parametrize(
    ("task", "message"),
    [
        ({"weight": 0}, "weight: must be greater than 0"),
        ({"weight": -2.5}, "weight: must be greater than 0"),
        ({"evaluator": "matsch"}, "evaluator: 'matsch' is not in 'eval.evaluators'"),
        ({"wieght": 2}, "did you mean 'weight'"),
    ],
)
def test_bad_settings_of_a_task_are_refused_in_a_sentence(toy_run, tmp_path, task, message):
    toy_run["finetuning"]["per_task"] = {"sums": task}
    with pytest.raises(ConfigError) as caught:
        config_from_mapping(toy_run, base_dir=tmp_path)
    (fault,) = caught.value.faults
    assert fault.startswith("finetuning.per_task.sums") and message in fault


def groups_of(task, rewards):
    return [
        [Trajectory(episode=[], reward=reward, example_id=f"{task}{number}", task=task) for reward in (low, low + 0.5)]
        for number, low in enumerate(rewards)
    ]


def test_groups_are_chosen_within_their_task():
    easy, hard = groups_of("easy", [0.5, 0.4, 0.3, 0.2]), groups_of("hard", [0.0, 0.1])
    groups = [easy[0], hard[0], easy[1], easy[2], hard[1], easy[3]]
    rewards = [GroupReward(sum(t.reward for t in group) / 2, 0.5) for group in groups]
    shared = CurriculumLearningConfig(enabled=True, initial_percentile=0.5)

    def chosen(configs):
        found, state = choose_groups_per_task(groups, configs, initial_state(shared), epoch=0, seed=0, rewards=rewards)
        return [group[0].example_id for group in found], state

    ids, state = chosen({None: shared})
    assert ids == ["easy0", "easy1", "hard1"]  # the easiest of all four would be those of one task
    assert state["included_groups"] == ids and state["total_groups"] == 6 and state["current_percentile"] == 0.5
    assert set(state["examples"]) == {group[0].example_id for group in groups}
    ids, state = chosen({None: shared, "hard": shared.model_copy(update={"enabled": False})})
    assert ids == ["easy0", "easy1", "hard1", "hard0"] and state["current_percentile"] == pytest.approx(4 / 6)

    only, few = groups_of("only", [0.5])[0], shared.model_copy(update={"initial_percentile": 1.0})
    groups, rewards = [*easy, only], [*(GroupReward(0.5, 0.5) for _ in easy), GroupReward(0.5, 0.05)]
    assert "only0" not in (found := chosen({None: few}))[0] and found[1]["dropped_groups"] == ["only0"]
    groups, rewards = [only], rewards[-1:]  # the epoch has no other
    assert chosen({None: few})[0] == ["only0"]
    groups = [group for task in ("x", "y", "z") for group in groups_of(task, [0.1 * n for n in range(9)])]
    rewards = [GroupReward(0.5, 0.5)] * 27
    drawn = chosen({None: few.model_copy(update={"random_subsample": 0.5})})[0]
    assert len(drawn) == 15 and len({tuple(n[1:] for n in drawn if n[0] == task) for task in "xyz"}) == 3

    without = [[t.model_copy(update={"task": None}) for t in group] for group in groups]
    options = {"epoch": 3, "seed": 1, "rewards": rewards}
    alone = choose_groups(without, shared, initial_state(shared), **options)
    assert choose_groups_per_task(without, {None: shared}, initial_state(shared), **options) == alone
