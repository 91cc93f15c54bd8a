import asyncio
import threading
from pathlib import Path

import pytest

from jaxft.errors import ComponentError, ConfigError, DatasetError, DiskFull, ToolsUnsupportedError
from jaxft.harness.builder import Builder
from jaxft.harness.config import config_from_mapping
from jaxft.harness.data_models import EvalOutputItem
from jaxft.harness.evaluators import BaseEvaluator, EvaluatorInfo
from jaxft.harness.registry import (
    DatasetConfig,
    EvaluatorConfig,
    GroupEvaluatorConfig,
    LLMConfig,
    TrainerConfig,
    WorkflowConfig,
    register_dataset_loader,
    register_evaluator,
    register_llm,
    register_trainer,
    register_workflow,
)
from jaxft.runs.console import Console
from jaxft.runs.directory import RunDirectory


class NeedsConfig(LLMConfig, name="toy_needs"):
    others: tuple[str, ...] = ()


@register_llm(config_type=NeedsConfig)
async def needs(config, builder):
    await asyncio.gather(*(builder.get_llm(name) for name in config.others))
    yield config.others


class BadConfig(LLMConfig, name="toy_bad"):
    how: str


@register_llm(config_type=BadConfig)
async def bad(config, builder):
    if config.how == "missing file":
        open("/nowhere/weights")  # noqa: SIM115
    if config.how == "full disk":
        raise DiskFull(Path("weights"), "no space left", 7)
    if config.how == "no tools":
        raise ToolsUnsupportedError("no tools", param="tools")
    if config.how == "bug":
        raise KeyError("bug")
    if config.how != "nothing":
        yield 1
    if config.how == "twice":
        yield 2
    if config.how == "close":
        raise RuntimeError("cannot close")


class NotCallableConfig(WorkflowConfig, name="toy_not_callable"):
    pass


@register_workflow(config_type=NotCallableConfig)
async def not_callable(config, builder):
    yield 3


class NoTrainerConfig(TrainerConfig, name="toy_no_trainer"):
    pass


@register_trainer(config_type=NoTrainerConfig)
async def no_trainer(config, builder):
    yield 3


class NoItemsConfig(DatasetConfig, name="toy_no_items"):
    pass


@register_dataset_loader(config_type=NoItemsConfig)
async def no_items(config, builder):
    yield []


class LongestConfig(GroupEvaluatorConfig, name="toy_longest"):
    pass


@register_evaluator(config_type=LongestConfig)
async def longest(config, builder):
    yield lambda items: [len(items)] * len(items)


class HangingConfig(EvaluatorConfig, name="toy_hanging"):
    pass


@register_evaluator(config_type=HangingConfig)
async def hanging(config, builder):
    yield lambda item: threading.Event().wait(1)


class ShoutingConfig(EvaluatorConfig, name="toy_shouting"):
    pass


class Shouting(BaseEvaluator):
    async def evaluate_item(self, item):
        return EvalOutputItem(id=item.id, score=item.output_obj.isupper(), reasoning=f"it said {item.output_obj}")


@register_evaluator(config_type=ShoutingConfig)
async def shouting(config, builder):
    evaluator = Shouting(builder.get_max_concurrency())
    yield EvaluatorInfo(config=config, evaluate_fn=evaluator.evaluate, description="Does it shout?")


class NoEvaluatorConfig(EvaluatorConfig, name="toy_no_evaluator"):
    pass


@register_evaluator(config_type=NoEvaluatorConfig)
async def no_evaluator(config, builder):
    yield 3


class SlowAgentConfig(WorkflowConfig, name="toy_slow_agent"):
    pass


@register_workflow(config_type=SlowAgentConfig)
async def slow_agent(config, builder):
    async def answer(example):
        if example["question"] != "a":
            await asyncio.sleep(100)

    yield answer


def build(mapping, tmp_path, use):
    """What `use(builder)` gives, inside an open builder."""

    async def main():
        config = config_from_mapping(mapping, base_dir=tmp_path)
        with RunDirectory.create(tmp_path / "run") as directory:
            async with Builder(config, directory, Console()) as builder:
                return await use(builder)

    return asyncio.run(main())


def test_components_are_made_once_and_closed_in_reverse_order(toy_run, tmp_path, toy_events):
    async def use(builder):
        first, second = await asyncio.gather(builder.get_workflow(), builder.get_workflow())
        assert first is second
        assert await builder.get_llm("policy") is await builder.get_llm("policy")
        assert [item.id for item in await builder.get_dataset()] == ["0", "1", "2"]
        assert await builder.get_evaluation() is await builder.get_evaluation()
        trajectory_builder = await builder.get_trajectory_builder("rollouts")
        assert trajectory_builder.evaluation is await builder.get_evaluation()
        assert len(trajectory_builder.examples) == 3
        toy_events.append("used")

    build(toy_run, tmp_path, use)
    assert toy_events == ["llm opened", "agent opened", "used", "agent closed", "llm closed"]


def test_what_is_made_is_closed_when_the_body_fails(toy_run, tmp_path, toy_events):
    async def use(builder):
        await builder.get_llm("policy")
        raise LookupError("body")

    with pytest.raises(LookupError):
        build(toy_run, tmp_path, use)
    assert toy_events == ["llm opened", "llm closed"]


def test_a_circle_is_shown_and_a_diamond_is_none(toy_run, tmp_path):
    needs = {"a": ["b", "c"], "b": ["d"], "c": ["d"], "d": [], "x": ["y"], "y": ["z"], "z": ["x"]}
    toy_run["llms"] |= {name: {"_type": "toy_needs", "others": others} for name, others in needs.items()}
    assert build(toy_run, tmp_path, lambda builder: builder.get_llm("a")) == ("b", "c")
    with pytest.raises(ComponentError, match=r"circle: llms\.x -> llms\.y -> llms\.z -> llms\.x"):
        build(toy_run, tmp_path, lambda builder: builder.get_llm("x"))


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("missing file", r"llms\.bad \(toy_bad\): FileNotFoundError: .*'/nowhere/weights'$"),
        ("bug", r"(?s)llms\.bad \(toy_bad\): \n.*in bad.*KeyError: 'bug'"),
        ("nothing", r"(?s)llms\.bad \(toy_bad\): .*generator didn't yield"),
        ("twice", r"(?s)llms\.bad \(toy_bad\): closing it failed:.*generator didn't stop"),
        ("close", r"(?s)llms\.bad \(toy_bad\): closing it failed:.*RuntimeError: cannot close"),
    ],
)
def test_a_broken_factory_is_named(toy_run, tmp_path, how, message):
    toy_run["llms"]["bad"] = {"_type": "toy_bad", "how": how}
    toy_run["llms"]["user"] = {"_type": "toy_needs", "others": ["bad"]}
    for name in ("bad", "user"):
        with pytest.raises(ComponentError, match=message):
            build(toy_run, tmp_path, lambda builder, name=name: builder.get_llm(name))


@pytest.mark.parametrize(
    ("how", "kind", "told"),
    [("full disk", DiskFull, "7 bytes are free"), ("no tools", ToolsUnsupportedError, "^no tools$")],
)
def test_an_error_of_a_factory_keeps_its_class(toy_run, tmp_path, how, kind, told):
    toy_run["llms"]["bad"] = {"_type": "toy_bad", "how": how}
    with pytest.raises(kind, match=told):
        build(toy_run, tmp_path, lambda builder: builder.get_llm("bad"))


def test_what_breaks_its_contract_is_named(toy_run, tmp_path):
    toy_run["workflow"] = {"_type": "toy_not_callable"}
    toy_run["trainers"]["loop"] = {"_type": "toy_no_trainer"}
    toy_run["eval"]["general"]["dataset"] = {"_type": "toy_no_items"}
    with pytest.raises(ComponentError, match="workflow: its factory must yield a function, not int"):
        build(toy_run, tmp_path, lambda builder: builder.get_workflow())
    with pytest.raises(ComponentError, match=r"trainers\.loop: its factory must yield a Trainer, not int"):
        build(toy_run, tmp_path, lambda builder: builder.get_trainer("loop"))
    with pytest.raises(DatasetError, match=r"eval\.general\.dataset: the dataset is empty"):
        build(toy_run, tmp_path, lambda builder: builder.get_dataset())


def test_an_unknown_name_gets_a_near_one(toy_run, tmp_path):
    with pytest.raises(ConfigError, match=r"'polcy' is not in 'llms'; did you mean 'policy'\?"):
        build(toy_run, tmp_path, lambda builder: builder.get_llm("polcy"))


async def outcomes_of(builder):
    evaluation = await builder.get_evaluation()
    outcomes = await evaluation.validate(await builder.get_dataset(), num_generations=2)
    return outcomes, evaluation.summarize(outcomes)


def test_evaluators_of_every_kind_are_chosen_in_the_configuration(toy_run, tmp_path):
    toy_run["eval"]["evaluators"] |= {
        "total": {"_type": "weighted_sum", "weights": {"match": 1, "count": "0.25"}},
        "count": {"_type": "toy_longest"},
    }
    toy_run["finetuning"]["reward_function"] = {"name": "total"}
    toy_run["workflow"]["fail_on"] = ["b"]
    outcomes, output = build(toy_run, tmp_path, outcomes_of)
    assert [outcome.reward for outcome in outcomes] == [1.5, 1.5, None, None, 1.5, 1.5]
    assert outcomes[0].named_rewards == {"match": 1.0, "count": 0.5}
    assert (output.num_failed, output.average_reward) == (2, 1.5)
    assert {name: result.average_score for name, result in output.evaluation_results} == {
        "match": 1.0,
        "total": 1.5,
        "count": 2.0,
    }


def test_time_limits_are_chosen_in_the_configuration(toy_run, tmp_path):
    toy_run["workflow"] = {"_type": "toy_slow_agent"}
    toy_run["eval"]["general"] |= {"timeout_seconds": 0.02, "max_concurrency": 8}
    toy_run["eval"]["evaluators"]["slow"] = {"_type": "toy_hanging", "timeout_seconds": 0.03}
    outcomes, output = build(toy_run, tmp_path, outcomes_of)
    assert [outcome.error for outcome in outcomes[::2]] == [
        "evaluator 'slow': TimeoutError: no score within 0.03 s",
        "TimeoutError: the workflow gave no output within 0.02 s",
        "TimeoutError: the workflow gave no output within 0.02 s",
    ]
    assert output.num_failed == 6


def test_an_evaluator_that_is_no_function_is_named(toy_run, tmp_path):
    toy_run["eval"]["evaluators"]["wrong"] = {"_type": "toy_no_evaluator"}
    with pytest.raises(ComponentError, match=r"eval\.evaluators\.wrong: its factory must yield a function, not int"):
        build(toy_run, tmp_path, lambda builder: builder.get_evaluation())


@pytest.mark.parametrize(
    ("fields", "fault"),
    [
        ({}, "weights: is required, but not there"),
        ({"weights": {}}, "weights: "),
        ({"weights": {"mtach": 1}}, "weights: 'mtach' is not in 'eval.evaluators'; did you mean 'match'?"),
        ({"weights": {"match": True}}, "weights.match: must be a number (holds a bool)"),
        ({"weights": {"match": "much"}}, "weights.match: must be a valid number"),
        ({"weights": {"match": float("nan")}}, "weights.match: must be a finite number"),
        ({"weights": {"match": float("-inf")}}, "weights.match: must be a finite number"),
        ({"weights": ["match"]}, "weights: must be a mapping (holds a list)"),
        ({"weights": {"match": 1}, "timeout_seconds": 1}, "timeout_seconds: a weighted sum only adds up"),
        ({"weights": {"match": 1}, "timeout_seconds": 0}, "timeout_seconds: must be greater than 0"),
    ],
)
def test_what_is_no_weighted_sum_is_refused(toy_run, tmp_path, fields, fault):
    toy_run["eval"]["evaluators"]["total"] = {"_type": "weighted_sum"} | fields
    with pytest.raises(ConfigError) as caught:
        config_from_mapping(toy_run, base_dir=tmp_path)
    (found,) = caught.value.faults
    assert found.startswith(f"eval.evaluators.total.{fault}")


def test_a_weighted_sum_of_weighted_sums_is_refused(toy_run, tmp_path):
    toy_run["eval"]["evaluators"] |= {
        "own": {"_type": "weighted_sum", "weights": {"own": 1.0}},
        "nested": {"_type": "weighted_sum", "weights": {"match": 1.0, "own": 1.0}},
    }
    with pytest.raises(ConfigError) as caught:
        build(toy_run, tmp_path, lambda builder: builder.get_workflow())
    assert len(caught.value.faults) == 2
    assert "eval.evaluators.nested.weights: 'own' is a weighted sum, too" in str(caught.value)


def test_a_factory_may_yield_an_evaluator_in_the_toolkits_form(toy_run, tmp_path):
    toy_run["eval"]["evaluators"]["match"] = {"_type": "toy_shouting"}

    async def use(builder):
        evaluation = await builder.get_evaluation()
        return await evaluation.validate(await builder.get_dataset())

    outcomes = build(toy_run, tmp_path, use)
    assert [(each.reward, each.reasonings) for each in outcomes] == [
        (1.0, {"match": f"it said {said}"}) for said in ("A", "B", "C")
    ]
