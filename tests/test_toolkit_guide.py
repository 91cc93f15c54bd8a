"""Components written as the toolkit's guide teaches it (data/toolkit_guide) train, alone and among jaxft's own."""

import asyncio
import json
import sys
from pathlib import Path
from unittest.mock import AsyncMock, MagicMock

import pytest

import jaxft

sys.path.insert(0, str(Path(__file__).parent / "data"))
from toolkit_guide.traj_builder import MyTrajectoryBuilder, MyTrajectoryBuilderConfig


class AskOnceConfig(jaxft.WorkflowConfig, name="guide_ask_once"):
    llm: jaxft.LLMRef
    function: str | None = None


@jaxft.register_workflow(config_type=AskOnceConfig)
async def ask_once(config, builder):
    llm = await builder.get_llm(config.llm)

    async def answer(example: dict) -> str:
        reply = await llm.chat([{"role": "user", "content": example["question"]}], max_tokens=8)
        return reply.content

    yield answer if config.function is None else jaxft.named_function(config.function)(answer)


class AskTwiceConfig(jaxft.WorkflowConfig, name="guide_ask_twice"):
    llm: jaxft.LLMRef


@jaxft.register_workflow(config_type=AskTwiceConfig)
async def ask_twice(config, builder):
    llm = await builder.get_llm(config.llm)

    @jaxft.named_function("dpo_candidate_move")
    async def answer(example: dict) -> str:
        reply = await llm.chat([{"role": "user", "content": example["question"]}], max_tokens=8, n=2)
        jaxft.episode().record_candidates(reply.choices, [1.0, 0.0])
        return reply.content

    yield answer


class TwoQuestionsConfig(jaxft.DatasetConfig, name="guide_two_questions"):
    pass


@jaxft.register_dataset_loader(config_type=TwoQuestionsConfig)
async def two_questions(config, builder):
    yield [
        jaxft.EvalInputItem(id=text, input_obj=text, full_dataset_entry={"question": text}) for text in ("one", "two")
    ]


PARTS = {
    "builder": {
        "user": {"_type": "guide_traj_builder", "num_generations": 4},
        "own": {"_type": "grpo_trajectory_builder", "num_generations": 4},
    },
    "adapter": {
        "user": {"_type": "guide_trainer_adapter", "backend": {"endpoint": "http://server", "api_key": "any"}},
        "own": {"_type": "local_trainer_adapter", "llm": "policy"},
    },
    "trainer": {"user": {"_type": "guide_trainer"}, "own": {"_type": "grpo_trainer"}},
}


def configuration(folder, builder="user", adapter="user", trainer="user", **finetuning):
    return jaxft.config_from_mapping(
        {
            "llms": {"policy": {"_type": "local_policy", "preset": "qwen3-50k", "max_context_tokens": 96, "slots": 8}},
            "workflow": {"_type": "guide_ask_once", "llm": "policy"},
            "eval": {
                "general": {"max_concurrency": 8, "dataset": {"_type": "guide_two_questions"}},
                "validation": {"dataset": {"_type": "guide_two_questions"}, "interval": 2},
                "evaluators": {"my_reward": {"_type": "letters"}},
            },
            "trajectory_builders": {"my_builder": PARTS["builder"][builder]},
            "trainer_adapters": {"my_adapter": PARTS["adapter"][adapter]},
            "trainers": {"my_trainer": PARTS["trainer"][trainer]},
            "finetuning": {
                "enabled": True,
                "trainer": "my_trainer",
                "trajectory_builder": "my_builder",
                "trainer_adapter": "my_adapter",
                "reward_function": {"name": "my_reward"},
                "num_epochs": 2,
                "output_dir": str(folder / "run"),
                **finetuning,
            },
        },
        base_dir=folder,
    )


def train(config, use=None, **options):
    """Train, and return the statuses with what `use(session)` makes of the parts."""

    async def main():
        async with jaxft.open_session(config, **options) as session:
            statuses = await session.train()
            return statuses, None if use is None else await use(session)

    return asyncio.run(main())


async def trained(session):
    """The adapter, and an evaluation of the builder."""
    builder = await session.builder.get_trajectory_builder("my_builder")
    return await session.adapter(), await builder.run_eval()


@pytest.fixture(
    scope="module",
    params=[
        ("user", "own", "user"),
        ("user", "user", "own"),
        pytest.param(("user", "user", "user"), marks=pytest.mark.slow),
    ],
    ids="-".join,
)
def run(request, tmp_path_factory):
    """Whose builder, adapter and trainer it is, the folder of a run of them, and what came of it."""
    folder = tmp_path_factory.mktemp("run")
    return request.param, folder, train(configuration(folder, *request.param), trained)


def test_parts_of_the_guide_and_jaxfts_train_together(run):
    (_, adapter, trainer), folder, (statuses, (made, output)) = run
    assert [status.status for status in statuses] == [jaxft.TrainingStatusEnum.COMPLETED] * 2
    if adapter == "own":
        metrics = [status.metadata["metrics"] for status in statuses]
        assert [each["applied_updates"] for each in metrics] == [1, 1]
        assert all(each["groups"] == 2 and each["trained_tokens"] >= 8 for each in metrics)
        # The recorded tokens are those that the policy scores: none was tokenised again.
        assert all(each["sampler_disagreement_fraction"] == 0 for each in metrics)
        assert made.policy.version == 2
    else:
        assert made.server.num_tokens >= 16 and any(worth > 0 for worth in made.server.worth.values())
    if trainer == "user":
        rows = [json.loads(row) for row in (folder / "run" / "guide_trainer.jsonl").read_text().splitlines()]
        assert [(row["num_trajectories"], row["filtered_groups"], row["validations"]) for row in rows] == [
            (8, 2, 1)
        ] * 2
    ((_, verdicts),) = output.evaluation_results
    assert [item.reasoning["question"] for item in verdicts.eval_output_items] == ["one", "two"]
    assert [item.reasoning["num_steps"] for item in verdicts.eval_output_items] == [4, 4]


@pytest.mark.slow
def test_a_resumed_run_of_the_guides_builder_samples_the_same(tmp_path):
    whole, parted = tmp_path / "whole", tmp_path / "parted"
    train(configuration(whole, "user", "own", "own", num_epochs=3))
    train(configuration(parted, "user", "own", "own", num_epochs=1))
    train(configuration(parted, "user", "own", "own", num_epochs=3), resume=True)
    rows = [(folder / "run" / "training_metrics.jsonl").read_bytes() for folder in (whole, parted)]
    assert rows[0] == rows[1] and len(rows[0].splitlines()) == 3


@pytest.mark.slow
def test_the_guides_builder_trains_the_target_functions(tmp_path):
    config = configuration(tmp_path, "user", "own", "user", target_functions=["asking"], num_epochs=1)
    named = config.workflow.model_copy(update={"function": "asking"})
    (status,), _ = train(config.model_copy(update={"workflow": named}))
    assert status.metadata["metrics"]["applied_updates"] == 1
    elsewhere = config.workflow.model_copy(update={"function": "elsewhere"})
    with pytest.raises(jaxft.NoLearningSignal, match="no job was submitted"):
        train(config.model_copy(update={"workflow": elsewhere}), overwrite=True)


@pytest.mark.slow
def test_candidates_are_collected_by_their_steps_and_trained(tmp_path):
    config = configuration(tmp_path, num_epochs=1).model_dump()
    config["workflow"] = {"_type": "guide_ask_twice", "llm": "policy"}
    config["trajectory_builders"]["my_builder"] = {"_type": "guide_dpo_traj_builder"}
    config["trainer_adapters"]["my_adapter"] = {**PARTS["adapter"]["own"], "loss": {"name": "dpo"}}
    config["trainers"]["my_trainer"] = {"_type": "dpo_trainer", "num_runs": 2}
    (status,), _ = train(jaxft.config_from_mapping(config, base_dir=tmp_path))
    assert status.status is jaxft.TrainingStatusEnum.COMPLETED
    assert status.metadata["metrics"]["pairs_trained"] == 4 and status.metadata["metrics"]["applied_updates"] == 1


def test_the_guides_own_test_of_a_builder_passes():
    async def test_trajectory_builder():
        config = MyTrajectoryBuilderConfig(num_generations=2)
        builder = MyTrajectoryBuilder(trajectory_builder_config=config)

        # Mock the run_eval method
        mock_eval_output = MagicMock()
        builder.run_eval = AsyncMock(return_value=mock_eval_output)

        # Test start_run
        await builder.start_run("test-run")
        assert "test-run" in builder.evaluation_runs

        # Test finalize
        result = await builder.finalize("test-run")
        assert isinstance(result, jaxft.TrajectoryCollection)
        assert builder.run_eval.await_count == 2

    asyncio.run(test_trajectory_builder())
