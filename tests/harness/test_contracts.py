import asyncio

import pytest

from jaxft.errors import TrajectoryError
from jaxft.harness.config import config_from_mapping
from jaxft.harness.data_models import (
    CurriculumLearningConfig,
    EpisodeItem,
    EvalOutputItem,
    FinetuneConfig,
    Trajectory,
    TrajectoryCollection,
)
from jaxft.harness.session import open_session


def with_session(mapping, tmp_path, use):
    async def main():
        async with open_session(config_from_mapping(mapping, base_dir=tmp_path)) as session:
            return await use(session)

    return asyncio.run(main())


def test_initialize_stores_the_run_and_the_reward(toy_run, tmp_path):
    async def use(session):
        trainer = await session.builder.get_trainer("loop")
        assert (trainer.run_config, trainer.reward, trainer.curriculum_config) == (None, None, None)
        assert trainer.get_curriculum_state() == {}
        with pytest.raises(RuntimeError, match="call bind_components first"):
            await trainer.initialize(session.config.finetuning)
        builder = await session.builder.get_trajectory_builder("rollouts")
        adapter = await session.builder.get_trainer_adapter("local")
        await trainer.bind_components(builder, adapter)
        await trainer.initialize(session.config.finetuning)
        finetuning = session.config.finetuning
        assert all(part.run_config is finetuning for part in (trainer, builder, adapter))
        configs = (trainer.trainer_config, builder.trajectory_builder_config, adapter.adapter_config)
        assert all(config.reward.name == "match" for config in configs)
        assert trainer.curriculum_config == CurriculumLearningConfig()
        assert trainer.get_curriculum_state()["current_percentile"] == 0.3
        collection = TrajectoryCollection(trajectories=[], run_id="r")
        assert trainer.apply_curriculum_learning(collection, 0) is collection
        assert await adapter.export_model(tmp_path) is None

    with_session(toy_run, tmp_path, use)


def test_the_default_validation_counts_what_failed(toy_run, tmp_path):
    toy_run["workflow"]["fail_on"] = ["b"]

    async def use(session):
        trainer = await session.builder.get_trainer("loop")
        with pytest.raises(RuntimeError, match="call bind_components first"):
            await trainer.run_validation_evaluation(0, "r")
        builder = await session.builder.get_trajectory_builder("rollouts")
        await trainer.bind_components(builder, await session.builder.get_trainer_adapter("local"))
        await trainer.initialize(session.config.finetuning)
        return await trainer.run_validation_evaluation(4, "r")

    found = with_session(toy_run, tmp_path, use)
    assert found.pop("first_error").startswith("example '1', generation 0: ValueError: cannot answer b\nTraceback")
    assert found == {
        "epoch": 4,
        "dataset_type": "validation",
        "avg_reward": 1.0,
        "min_reward": 1.0,
        "max_reward": 1.0,
        "num_examples": 2,
        "num_failed": 1,
        "num_unscorable": 0,
    }


@pytest.mark.parametrize(("unusable", "reward"), [(None, None), ("unscorable", None), ("zero", 0.0)])
def test_compute_reward_is_the_score_or_what_stands_for_none(toy_run, tmp_path, unusable, reward):
    toy_run["finetuning"]["reward_function"] |= {} if unusable is None else {"unusable": unusable}

    async def use(session):
        builder = await session.builder.get_trajectory_builder("rollouts")
        await builder.initialize(session.config.finetuning)
        return [await builder.compute_reward(EvalOutputItem(id="a", score=score)) for score in (0.25, None)]

    assert with_session(toy_run, tmp_path, use) == [0.25, reward]


def test_a_missing_score_may_end_the_run(toy_run, tmp_path):
    toy_run["finetuning"]["reward_function"]["unusable"] = "error"

    async def use(session):
        builder = await session.builder.get_trajectory_builder("rollouts")
        await builder.initialize(session.config.finetuning)
        await builder.compute_reward(EvalOutputItem(id="a", score=None, generation=3, reasoning="not usable: nan"))

    with pytest.raises(TrajectoryError, match=r"example 'a', generation 3: 'match' gave .*not usable: nan"):
        with_session(toy_run, tmp_path, use)


def test_a_trajectory_without_a_reward_is_not_scorable():
    trajectory = Trajectory(episode=[], reward=None)
    assert (trajectory.reward, trajectory.scorable) == (0.0, False)


def test_models_refuse_what_json_has_no_word_for():
    with pytest.raises(ValueError, match="finite number"):
        Trajectory(episode=[], reward=float("nan"))
    with pytest.raises(ValueError, match="finite number"):
        EvalOutputItem(id="a", score=float("inf"))
    with pytest.raises(ValueError, match="needs logprobs"):
        EpisodeItem(role="assistant", content="hi")
    again = TrajectoryCollection(trajectories=[[Trajectory(episode=[], reward=1.0, example_id="e")]], run_id="r")
    assert TrajectoryCollection.model_validate_json(again.model_dump_json()) == again


def test_the_configuration_of_a_run_cannot_be_changed():
    with pytest.raises(ValueError, match="frozen"):
        FinetuneConfig().num_epochs = 3
