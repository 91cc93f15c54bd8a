import asyncio

import pytest

from jaxft.errors import ComponentError, ConfigError
from jaxft.harness.config import config_from_mapping, load_config
from jaxft.harness.config_builder import ConfigBuilder
from jaxft.harness.data_models import FinetuneConfig
from jaxft.harness.opening import open_session


async def collected(config):
    """A builder that was told all parts of a configuration, one by one."""
    builder = ConfigBuilder()
    await builder.add_llm("policy", config.llms["policy"])
    await builder.set_workflow(config.workflow)
    await builder.set_dataset(config.eval.general.dataset)
    await builder.add_evaluator("match", config.eval.evaluators["match"])
    await builder.add_trajectory_builder("rollouts", config.trajectory_builders["rollouts"])
    await builder.add_trainer_adapter("local", config.trainer_adapters["local"])
    await builder.add_trainer("loop", config.trainers["loop"])
    return builder


def test_what_is_added_is_the_configuration_of_a_file(toy_run, tmp_path):
    config = config_from_mapping(toy_run, base_dir=tmp_path)

    async def main():
        builder = await collected(config)
        assert builder.get_llm_config("policy") is config.llms["policy"]
        assert builder.get_workflow_config() is config.workflow
        assert builder.get_dataset_config() is config.eval.general.dataset
        assert builder.get_evaluator_config("match") is config.eval.evaluators["match"]
        assert await builder.get_trajectory_builder_config("rollouts") is config.trajectory_builders["rollouts"]
        assert await builder.get_trainer_adapter_config("local") is config.trainer_adapters["local"]
        assert await builder.get_trainer_config("loop") is config.trainers["loop"]
        return builder.complete_config(config.finetuning, [("eval.general.max_concurrency", "2")])

    assert asyncio.run(main()) == config


def test_a_run_without_a_file_trains_and_leaves_one(toy_run, tmp_path):
    config = config_from_mapping(toy_run, base_dir=tmp_path)

    async def main():
        builder = await collected(config)
        async with open_session(builder.complete_config(config.finetuning)) as session:
            trainer = await session.trainer()
            again = await session.builder.get_trainer("loop", trainer.trajectory_builder, trainer.trainer_adapter)
            assert again is trainer
            with pytest.raises(ComponentError, match=r"eval\.evaluators\.other"):
                await session.builder.add_evaluator("other", config.eval.evaluators["match"])
            return await session.train()

    assert len(asyncio.run(main())) == 2
    assert load_config(tmp_path / "run" / "config.yml").finetuning == config.finetuning


def test_what_is_missing_or_misspelt_is_an_error(toy_run, tmp_path):
    config = config_from_mapping(toy_run, base_dir=tmp_path)

    async def main():
        builder = ConfigBuilder()
        await builder.add_trainer("loop", config.trainers["loop"])
        with pytest.raises(ConfigError, match="'loop' is in 'trainers' already"):
            await builder.add_trainer("loop", config.trainers["loop"])
        with pytest.raises(TypeError, match="ToyTrainerConfig; wanted is one of a llm"):
            await builder.add_llm("policy", config.trainers["loop"])
        with pytest.raises(ConfigError, match="'lop' is not in 'trainers'"):
            await builder.get_trainer_config("lop")
        builder.complete_config(FinetuneConfig(**{**dict(config.finetuning), "trainer": "lop"}))

    with pytest.raises(ConfigError) as caught:
        asyncio.run(main())
    shown = str(caught.value)
    for fault in ("workflow: is required", "eval.general.dataset: is required", "'lop' is not in 'trainers'"):
        assert fault in shown
