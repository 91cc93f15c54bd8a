import asyncio

import pytest

from jaxft.errors import ConfigError, TrajectoryError
from jaxft.harness.config import config_from_mapping
from jaxft.harness.data_models import (
    CurriculumLearningConfig,
    EpisodeItem,
    EvalOutputItem,
    FinetuneConfig,
    FinetuneRunConfig,
    Trajectory,
    TrajectoryCollection,
)
from jaxft.harness.opening import open_session
from jaxft.harness.registry import WorkflowConfig, register_workflow
from jaxft.rollout.current import episode
from jaxft.rollout.recorder import TRAINING, VALIDATION


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


def test_a_validation_of_several_generations_has_scores(toy_run, tmp_path):

    toy_run["workflow"]["fail_on"] = ["b"]
    toy_run["eval"]["general"] |= {"pass_threshold": 0.5, "breakdown_by": "answer"}
    toy_run["eval"]["validation"] = {"dataset": {"_type": "toy_rows"}, "num_generations": 2}

    async def use(session):
        trainer = await session.trainer()
        await trainer.initialize(session.config.finetuning)
        return await trainer.run_validation_evaluation(4, "r")

    row = with_session(toy_run, tmp_path, use)
    assert row["pass@1"] == row["pass@2"] == row["maj@2"] == pytest.approx(2 / 3)
    assert (row["best@2"], row["answer=B/pass@2"], row["answer=C/reward"]) == (1.0, 0.0, 1.0)


class DrawingConfig(WorkflowConfig, name="drawing_agent"):
    pass


@register_workflow(config_type=DrawingConfig)
async def drawing_agent(config, builder):
    """Answers with the place of its episode in the random stream, and with the temperature that is forced on it."""

    async def answer(example: dict) -> tuple:
        current = episode()
        return current.stream, current.rollout_index, current.generation, current.temperature

    yield answer


def outputs(result):
    return [item.output_obj for item in result.eval_input.eval_input_items]


def test_every_run_eval_takes_its_own_place_in_the_training_stream(toy_run, tmp_path):
    toy_run["workflow"] = {"_type": "drawing_agent"}
    toy_run["eval"]["general"]["dataset"]["questions"] = ["a"]

    async def use(session):
        builder = await session.builder.get_trajectory_builder("rollouts")
        runs = await asyncio.gather(*(asyncio.create_task(builder.run_eval()) for _ in range(2)))
        runs += [await builder.run_eval(num_generations=2), await builder.run_eval(stream=VALIDATION)]
        counted = builder.evaluation
        # An index that was given counts, too.
        await counted.run(builder.examples, stream=TRAINING, rollout_index=7)
        assert (counted.num_rollouts, counted.num_validations) == (8, 1)
        return [outputs(run) for run in runs]

    assert with_session(toy_run, tmp_path, use) == [
        [(TRAINING, 0, 0, None)],
        [(TRAINING, 1, 0, None)],
        [(TRAINING, 2, 0, None), (TRAINING, 2, 1, None)],
        [(VALIDATION, 0, 0, 0.0)],
    ]


def test_validation_is_its_own_stream_and_set_also_for_a_builder_whose_run_eval_takes_no_arguments(toy_run, tmp_path):
    toy_run["workflow"] = {"_type": "drawing_agent"}
    toy_run["eval"]["general"]["dataset"]["questions"] = ["a"]
    held_out = {"_type": "toy_rows", "questions": ["x", "y"]}
    toy_run["eval"]["validation"] = {"dataset": held_out, "temperature": 0.5}
    results = []

    async def use(session):
        trainer = await session.trainer()
        builder = trainer.trajectory_builder
        inherited = builder.run_eval

        async def run_eval():
            results.append(await inherited())
            return results[-1]

        builder.run_eval = run_eval
        await trainer.initialize(session.config.finetuning)
        before = asyncio.create_task(builder.run_eval())  # of a collection that goes on during the validation
        row = await trainer.run_validation_evaluation(0, "r")
        await before
        await builder.run_eval()
        return row

    row = with_session(toy_run, tmp_path, use)
    assert (row["num_examples"], row["num_failed"]) == (2, 0)
    assert sorted(map(outputs, results)) == [
        [(TRAINING, 0, 0, None)],
        [(TRAINING, 1, 0, None)],
        [(VALIDATION, 0, 0, 0.5)] * 2,
    ]


def test_failed_episodes_of_run_eval_are_shown_and_have_no_reward(toy_run, tmp_path):
    toy_run["workflow"]["fail_on"] = ["b"]
    shown = []

    async def use(session):
        builder = await session.builder.get_trajectory_builder("rollouts")
        builder.evaluation.log = shown.append
        output = await builder.run_eval(num_generations=2)
        ((_, verdicts),) = output.evaluation_results
        return [await builder.compute_reward(item) for item in verdicts.eval_output_items]

    assert with_session(toy_run, tmp_path, use) == [1.0, 1.0, None, None, 1.0, 1.0]
    (message,) = shown
    assert "2 of 6 episodes" in message and "example '1', generation 0: ValueError: cannot answer b" in message


@pytest.mark.parametrize(
    ("unusable", "task"), [(None, None), ("unscorable", None), ("zero", None), ("error", None), ("error", "of_task")]
)
def test_compute_reward_is_the_score_or_what_stands_for_none(toy_run, tmp_path, unusable, task):
    toy_run["finetuning"]["reward_function"] |= {} if unusable is None else {"unusable": unusable}

    async def use(session):
        builder = await session.builder.get_trajectory_builder("rollouts")
        await builder.initialize(session.config.finetuning)
        failed = EvalOutputItem(id="a", score=None, error="ValueError")
        assert [await builder.compute_reward(i) for i in (EvalOutputItem(id="a", score=0.25), failed)] == [0.25, None]
        return await builder.compute_reward(
            EvalOutputItem(id="a", score=None, generation=3, reasoning="is nan", evaluator=task)
        )

    if unusable == "error":
        with pytest.raises(TrajectoryError, match=rf"example 'a', generation 3: '{task or 'match'}' gave .*is nan"):
            with_session(toy_run, tmp_path, use)
    else:
        assert with_session(toy_run, tmp_path, use) == {"zero": 0.0}.get(unusable)


def test_models_refuse_what_json_has_no_word_for():
    trajectory = Trajectory(episode=[], reward=None)
    assert (trajectory.reward, trajectory.scorable) == (0.0, False)
    with pytest.raises(ValueError, match="finite number"):
        Trajectory(episode=[], reward=float("nan"))
    with pytest.raises(ValueError, match="finite number"):
        EvalOutputItem(id="a", score=float("inf"))
    with pytest.raises(ValueError, match="needs logprobs"):
        EpisodeItem(role="assistant", content="hi")
    again = TrajectoryCollection(trajectories=[[Trajectory(episode=[], reward=1.0, example_id="e")]], run_id="r")
    assert TrajectoryCollection.model_validate_json(again.model_dump_json()) == again


def test_options_of_the_command_line_are_no_field_of_a_file(toy_run, tmp_path):
    options = FinetuneRunConfig(config_file=tmp_path / "run.yml", validation_dataset=tmp_path / "rows.jsonl")
    assert FinetuneConfig(run_configuration=options).run_configuration is options
    assert FinetuneConfig(run_configuration=options).model_dump() == FinetuneConfig().model_dump()
    toy_run["finetuning"]["run_configuration"] = {"config_file": "run.yml"}
    with pytest.raises(ConfigError, match=r"finetuning\.run_configuration: is set by the run"):
        config_from_mapping(toy_run, base_dir=tmp_path)


def test_the_configuration_of_a_run_cannot_be_changed():
    with pytest.raises(ValueError, match="frozen"):
        FinetuneConfig().num_epochs = 3
