import asyncio

import pytest

from jaxft.harness.config import config_from_mapping
from jaxft.harness.errors import ComponentError, ConfigError, DatasetError
from jaxft.harness.registry import (
    DatasetConfig,
    LLMConfig,
    TrainerConfig,
    WorkflowConfig,
    register_dataset_loader,
    register_llm,
    register_trainer,
    register_workflow,
)
from jaxft.harness.workflow import ComponentBuilder
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


def build(mapping, tmp_path, use):
    """What `use(builder)` gives, inside an open builder."""

    async def main():
        config = config_from_mapping(mapping, base_dir=tmp_path)
        with RunDirectory.create(tmp_path / "run") as directory:
            async with ComponentBuilder(config, directory, Console()) as builder:
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
        ("nothing", r"llms\.bad \(toy_bad\): its factory yielded nothing"),
        ("twice", r"llms\.bad \(toy_bad\): its factory yielded twice"),
        ("close", r"(?s)llms\.bad \(toy_bad\): closing it failed:.*RuntimeError: cannot close"),
    ],
)
def test_a_broken_factory_is_named(toy_run, tmp_path, how, message):
    toy_run["llms"]["bad"] = {"_type": "toy_bad", "how": how}
    toy_run["llms"]["user"] = {"_type": "toy_needs", "others": ["bad"]}
    for name in ("bad", "user"):
        with pytest.raises(ComponentError, match=message):
            build(toy_run, tmp_path, lambda builder, name=name: builder.get_llm(name))


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
