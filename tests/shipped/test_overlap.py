"""Rollouts that overlap updates: runs of a tiny agent, and what such a run refuses, waits for and carries over."""

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import pytest

import jaxft
from jaxft.cli import main
from jaxft.errors import ConfigError
from jaxft.harness.contracts import TrainerAdapter
from jaxft.harness.data_models import (
    TrainingJobRef,
    TrainingJobStatus,
    TrainingStatusEnum,
    Trajectory,
    TrajectoryCollection,
)
from jaxft.harness.registry import TrainerAdapterConfig, register_trainer_adapter
from jaxft.harness.strict_yaml import dump_yaml
from jaxft.shipped.configs import LocalPolicyConfig
from jaxft.shipped.local_policy import meshes_of, share_of
from jaxft.shipped.schedule import GroupStream
from tests.faults.compare import differences

ROOT = Path(__file__).parents[2]
SLOW = "0"
EXAMPLES = 4


class OverlapAgentConfig(jaxft.WorkflowConfig, name="overlap_agent"):
    llm: jaxft.LLMRef
    tool_seconds: float = 0.0
    slow_seconds: float = 0.0
    together: int = 0


@jaxft.register_workflow(config_type=OverlapAgentConfig)
async def overlap_agent(config: OverlapAgentConfig, builder: Any) -> Any:
    """Two turns with a tool between them, which takes longest in example 0; or waits until so many wait together."""
    llm = await builder.get_llm(config.llm)
    waiting: list[int] = []

    async def play(example: dict) -> float:
        messages, scores = [], []
        for turn in range(2):
            messages.append({"role": "user", "content": f"{example['number']} {turn}"})
            reply = await llm.chat(messages, max_tokens=5)
            messages.append({"role": "assistant", "content": reply.content})
            scores.append(sum(token % 2 for token in reply.token_ids) / len(reply.token_ids))
            is_slow = str(example["number"]) == SLOW and jaxft.episode().is_training
            await asyncio.sleep(config.slow_seconds if is_slow else config.tool_seconds)
            waiting.append(turn)
            while len(waiting) < config.together:
                await asyncio.sleep(0.001)
        return sum(scores) / 2

    yield play


class OverlapRewardConfig(jaxft.EvaluatorConfig, name="overlap_reward"):
    pass


@jaxft.register_evaluator(config_type=OverlapRewardConfig)
async def overlap_reward(config: OverlapRewardConfig, builder: Any) -> Any:
    yield lambda item: item.output_obj


class OverlapExamplesConfig(jaxft.DatasetConfig, name="overlap_examples"):
    pass


@jaxft.register_dataset_loader(config_type=OverlapExamplesConfig)
async def overlap_examples(config: OverlapExamplesConfig, builder: Any) -> Any:
    yield [jaxft.EvalInputItem(id=str(i), full_dataset_entry={"number": i}) for i in range(EXAMPLES)]


class WaitingAdapterConfig(TrainerAdapterConfig, name="waiting_adapter"):
    overlaps: bool = False


class WaitingAdapter(TrainerAdapter):
    """An adapter of a user, which trains inside `submit`."""

    def __init__(self, config: WaitingAdapterConfig) -> None:
        super().__init__(config)
        self.held: list[str] = []

    def allow_staleness(self, max_staleness: int) -> None:
        if not self.adapter_config.overlaps:
            super().allow_staleness(max_staleness)

    async def hold_sampler(self, *, finishes_requests: bool = True) -> None:
        self.held.append(f"hold {finishes_requests}")

    async def release_sampler(self) -> None:
        self.held.append("release")

    async def is_healthy(self) -> bool:
        return True

    async def submit(self, trajectories: TrajectoryCollection) -> TrainingJobRef:
        await asyncio.sleep(0.05)
        return TrainingJobRef(run_id=trajectories.run_id, backend="waiting")

    async def status(self, ref: TrainingJobRef) -> TrainingJobStatus:
        return TrainingJobStatus(run_id=ref.run_id, backend=ref.backend, status=TrainingStatusEnum.COMPLETED)

    async def wait_until_complete(self, ref: TrainingJobRef, poll_interval: float = 10.0) -> TrainingJobStatus:
        return await self.status(ref)

    def log_progress(self, ref: TrainingJobRef, metrics: dict, output_dir: str | None = None) -> None:
        print(f"adapter: {' '.join(self.held)}")


@register_trainer_adapter(config_type=WaitingAdapterConfig)
async def waiting_adapter(config: WaitingAdapterConfig, builder: Any) -> Any:
    yield WaitingAdapter(config)


@pytest.fixture
def finetune(tmp_path):
    """Runs `jaxft finetune` into a folder and gives its exit code; `changes` maps dotted paths to values."""
    file = tmp_path / "run.yml"
    file.write_text(
        dump_yaml(
            {
                "llms": {
                    "policy": {"_type": "local_policy", "preset": "qwen3-50k", "slots": 8, "max_context_tokens": 64}
                },
                "workflow": {"_type": "overlap_agent", "llm": "policy"},
                "eval": {
                    "general": {"dataset": {"_type": "overlap_examples"}},
                    "evaluators": {"points": {"_type": "overlap_reward"}},
                },
                "trajectory_builders": {"rollouts": {"_type": "grpo_trajectory_builder", "num_generations": 4}},
                "trainer_adapters": {
                    "local": {
                        "_type": "local_trainer_adapter",
                        "llm": "policy",
                        "optimizer": {"learning_rate": 3e-3},
                        "microbatch_tokens": 512,
                    },
                    "waiting": {"_type": "waiting_adapter"},
                },
                "trainers": {"loop": {"_type": "grpo_trainer", "max_staleness": 1}},
                "finetuning": {
                    "enabled": True,
                    "trainer": "loop",
                    "trajectory_builder": "rollouts",
                    "trainer_adapter": "local",
                    "reward_function": {"name": "points"},
                    "num_epochs": 4,
                },
            }
        )
    )

    def finetune(name, **changes):
        changes = {"finetuning.output_dir": str(tmp_path / name)} | {
            path.replace("__", "."): value for path, value in changes.items()
        }
        options = [word for path, value in changes.items() for word in ("--set", f"{path}={json.dumps(value)}")]
        return main(["finetune", "--config_file", str(file), *options])

    return finetune


def rows_of(folder, file="training_metrics.jsonl"):
    return [json.loads(line) for line in (folder / file).read_text().splitlines()]


def test_each_collection_is_sampled_by_the_weights_before_the_last_job(finetune, tmp_path):
    """Two runs are equal, however many episodes run at once and however long their tools take."""
    assert finetune("one", eval__general__max_concurrency=1) == 0
    slow = {"workflow__tool_seconds": 0.02, "workflow__slow_seconds": 0.2}
    assert finetune("other", eval__general__max_concurrency=64, **slow) == 0
    assert differences(tmp_path / "one", tmp_path / "other") == ["config.yml: bytes differ"]
    rows = rows_of(tmp_path / "one")
    assert [row["policy_version"] for row in rows] == [1, 2, 3, 4]
    assert [row["staleness/1"] for row in rows] == [0.0, 1.0, 1.0, 1.0]
    assert [row["too_stale_fraction"] + row["groups_of_several_versions"] for row in rows] == [0.0] * 4
    assert rows[0]["effective_sample_fraction"] == pytest.approx(1.0, abs=1e-5)
    assert all(0.5 < row["effective_sample_fraction"] < 1.0 for row in rows[1:])
    versions = {
        (row["epoch"], version)
        for row in rows_of(tmp_path / "one" / "trajectories", "samples.jsonl")
        for sequence in row["sequences"]
        for version in sequence["policy_versions"]
        if version >= 0
    }
    assert versions == {(0, 0), (1, 0), (2, 1), (3, 2)}
    timings = rows_of(tmp_path / "other", "timings.jsonl")
    spent = {name for name in timings[0] if name.startswith("seconds_device_")}
    assert spent == {f"seconds_device_{kind}" for kind in ("sampling", "training", "other", "idle")}
    # Beside the second job agents waited for their tools, of which the slowest took twice 0.2 s.
    assert timings[1]["seconds_episode_max"] >= 0.4 > timings[1]["seconds_update"] - timings[1]["seconds"]


def test_a_prolonged_run_is_the_longer_one(finetune, tmp_path):
    assert finetune("long") == 0
    assert finetune("short", finetuning__num_epochs=2) == 0
    assert main(["resume", str(tmp_path / "short"), "--set", "finetuning.num_epochs=4"]) == 0
    assert differences(tmp_path / "short", tmp_path / "long") == []


def test_a_validation_is_that_of_the_newest_weights(finetune, tmp_path):
    """The greedy validation after each epoch is that of the run that was told to end there."""
    held_out = {"dataset": {"_type": "overlap_examples"}, "interval": 1}
    validation = {"eval__validation": held_out, "workflow__tool_seconds": 0.02}
    assert finetune("whole", finetuning__num_epochs=3, **validation) == 0
    assert finetune("part", finetuning__num_epochs=2, **validation) == 0
    whole, part = (json.loads((tmp_path / name / "validation_history.json").read_text()) for name in ("whole", "part"))
    assert [row["epoch"] for row in whole] == [0, 1, 2, 3]
    assert whole[:3] == part
    assert len({row["avg_reward"] for row in whole}) > 1


def test_waiting_agents_hold_no_slot(finetune, tmp_path):
    """Sixteen episodes wait for each other between their turns, with two slots."""
    changes = {"llms__policy__slots": 2, "workflow__together": 16, "finetuning__num_epochs": 1}
    assert finetune("together", **changes) == 0
    assert rows_of(tmp_path / "together")[0]["calls"] == 32


def test_an_early_stop_leaves_the_collection_ahead(finetune, tmp_path, capsys):
    changes = {"trainers__loop__early_stop": {"target_reward": 0.0}, "workflow__slow_seconds": 0.1}
    assert finetune("stopped", **changes) == 0
    assert "stopped early after 1 epochs" in capsys.readouterr().out
    assert [row["epoch"] for row in rows_of(tmp_path / "stopped")] == [0]


def test_the_curriculum_is_a_function_of_the_epoch(finetune, tmp_path):
    curriculum = {"finetuning__curriculum_learning": {"enabled": True, "expansion_interval": 2}}
    assert finetune("one", **curriculum) == 0
    assert finetune("other", workflow__tool_seconds=0.03, **curriculum) == 0
    assert differences(tmp_path / "one", tmp_path / "other") == ["config.yml: bytes differ"]
    percents = [row["curriculum_percentile"] for row in rows_of(tmp_path / "one")]
    assert percents == sorted(percents) and percents[0] < percents[-1]


def test_slow_groups_are_carried_over_whole_and_none_is_lost(finetune, tmp_path, capsys):
    changes = {
        "trainers__loop__max_staleness": 3,
        "trainers__loop__in_flight": "continue",
        "workflow__slow_seconds": 0.4,
        "finetuning__num_epochs": 8,
    }
    assert finetune("carried", **changes) == 0
    assert "equal runs differ" in capsys.readouterr().out
    rows, rewards = rows_of(tmp_path / "carried"), rows_of(tmp_path / "carried" / "trajectories", "rewards.jsonl")
    assert max(row["staleness_max"] for row in rows) in (2, 3)
    assert sum(row["groups_of_several_versions"] for row in rows) > 0  # their second turns were sampled later
    assert all(row["too_stale_fraction"] == 0.0 and row["groups"] == EXAMPLES for row in rows)
    trained = [example for row in rewards for example, given in row["rewards"].items() for _ in range(len(given) // 4)]
    assert sorted(trained) == sorted([str(i) for i in range(EXAMPLES)] * 8)


class NoWeights:
    async def hold(self):
        pass

    release = hold


def test_a_stream_starts_its_open_groups_again():
    async def collect(number):
        await asyncio.sleep(0.3 if number == 0 else 0.0)
        group = [Trajectory(episode=[], reward=0.0, example_id=str(number))]
        return TrajectoryCollection(trajectories=[group], run_id=str(number), metrics={"episodes": 1})

    async def run():
        sizes = {"size": 4, "total": 12, "max_staleness": 2}
        stream = GroupStream(collect, NoWeights(), **sizes)
        await stream.begin(0)
        first = await stream.take(0, "epoch 0")
        await stream.begin(0)
        state = stream.state()
        await stream.close()
        other = GroupStream(collect, NoWeights(), **sizes, state=state["groups"])
        rest = []
        for epoch in (1, 2):
            await other.begin(epoch)
            rest.append(await other.take(epoch, "rest"))
        return first, state, rest

    first, state, rest = asyncio.run(run())
    trained = [[int(group[0].example_id) for group in collection.trajectories] for collection in (first, *rest)]
    assert trained[0] == [1, 2, 3, 4] and first.metrics == {"episodes": 4}
    assert state == {"groups": {"next": 9, "open": [0, 5, 6, 7, 8]}}
    assert sorted(number for numbers in trained for number in numbers) == list(range(12))


@pytest.mark.slow
def test_devices_that_sample_alone_give_the_same_run(finetune, tmp_path):
    """One device against four, of which two train and two sample: losses and rewards agree to rounding."""
    assert finetune("one", finetuning__num_epochs=3) == 0
    flags = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=4"
    command = [sys.executable, "-m", "jaxft.cli", "finetune", "--config_file", str(tmp_path / "run.yml")]
    changes = {
        "imports": [str(Path(__file__))],
        "llms.policy.mesh": {"data": 2, "fsdp": 1},
        "llms.policy.sampler_mesh": {"data": -1},
        "finetuning.num_epochs": 3,
        "finetuning.output_dir": str(tmp_path / "four"),
    }
    command += [word for path, value in changes.items() for word in ("--set", f"{path}={json.dumps(value)}")]
    subprocess.run(command, env=os.environ | {"XLA_FLAGS": flags}, check=True, cwd=ROOT)
    one, four = rows_of(tmp_path / "one"), rows_of(tmp_path / "four")
    for name in ("reward_mean", "staleness_mean", "effective_sample_fraction", "loss", "grad_norm"):
        assert [row[name] for row in four] == pytest.approx([row[name] for row in one], rel=1e-3, abs=1e-5)
    devices = json.loads((tmp_path / "four" / "environment.json").read_text())["devices"]
    assert len(devices) == 4


def test_meshes_take_what_the_other_leaves():
    devices = len(jax.devices())

    def meshes(mesh, sampler_mesh):
        config = LocalPolicyConfig(preset="qwen3-50k", mesh=mesh, sampler_mesh=sampler_mesh)
        return meshes_of(config)

    assert meshes(None, None) == (None, None)
    with pytest.raises(ValueError, match="both take all devices that are left"):
        meshes({"data": -1}, {"data": -1})
    with pytest.raises(ValueError, match=f"mesh has 0 of {devices} devices"):
        meshes({"data": -1}, {"data": devices})
    with pytest.raises(ValueError, match=f"mesh has {devices} of {devices} devices"):
        meshes({"data": devices}, {"data": -1})


def test_several_processes_share_slots_and_devices(monkeypatch):
    monkeypatch.setattr(jax, "process_count", lambda: 4)
    assert share_of("slots", 64) == 16
    with pytest.raises(ValueError, match="slots is 6, which 4 processes cannot share; wanted a multiple of 4"):
        share_of("slots", 6)
    with pytest.raises(ValueError, match="sampler_mesh is given, but each of several processes samples on its devices"):
        meshes_of(LocalPolicyConfig(preset="qwen3-50k", sampler_mesh={"data": 1}))


# --- What is refused, and what is said.


def test_an_adapter_that_waits_in_submit_is_refused_unless_it_says_that_it_overlaps(finetune, capsys, tmp_path):
    waiting = {"finetuning__trainer_adapter": "waiting", "workflow__tool_seconds": 0.02}
    assert finetune("refused", **waiting) == 2
    assert "max_staleness: is 1, but WaitingAdapter cannot sample beside a job" in capsys.readouterr().err
    assert finetune("allowed", trainer_adapters__waiting__overlaps=True, **waiting) == 0
    said = [line for line in capsys.readouterr().out.splitlines() if line.startswith("adapter: ")]
    assert said == [f"adapter: {' '.join(['hold True'] * held)}" for held in (1, 2, 3, 4)]
    assert len(rows_of(tmp_path / "allowed")) == 4


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"trainers__loop__in_flight": "continue"}, "in_flight 'continue' needs max_staleness 2 or more; with 1"),
        ({"trainers__loop__max_staleness": -1}, "trainers.loop.max_staleness"),
        ({"trainer_adapters__local__sampling_share": 1.0}, "trainer_adapters.local.sampling_share"),
        ({"trainer_adapters__local__loss": {"name": "sft"}}, "max_staleness: is 1, but loss 'sft' has no correction"),
        (
            {"trainer_adapters__local__loss": {"name": "reinforce", "correction": {"name": "ratio"}}},
            "reinforce has no ratio",
        ),
    ],
)
def test_settings_that_make_no_sense_are_refused(finetune, capsys, changes, said):
    assert finetune("refused", **changes) == 2
    assert said in capsys.readouterr().err


def test_no_correction_has_to_be_asked_for_and_is_said(finetune, capsys, tmp_path):
    none = {"trainer_adapters__local__loss": {"name": "grpo", "correction": {"name": "none"}}}
    assert finetune("biased", finetuning__num_epochs=2, **none) == 0
    assert "loss.correction is none with max_staleness 1" in capsys.readouterr().out
    assert finetune("corrected", finetuning__num_epochs=2) == 0
    biased, corrected = (rows_of(tmp_path / name)[-1] for name in ("biased", "corrected"))
    fractions = [row["effective_sample_fraction"] for row in (biased, corrected)]
    assert fractions[0] == pytest.approx(fractions[1], abs=1e-4) and max(fractions) < 1.0
    assert biased["grad_norm"] != corrected["grad_norm"]


def test_a_run_that_goes_off_policy_says_so(finetune, capsys):
    rate = {"trainer_adapters__local__optimizer": {"learning_rate": 0.1}}
    assert finetune("wild", finetuning__num_epochs=5, **rate) in (0, 1)
    assert "off-policy: the importance weights leave" in capsys.readouterr().out


def test_a_contract_without_staleness_needs_nothing():
    class Bare(WaitingAdapter):
        allow_staleness = TrainerAdapter.allow_staleness

    with pytest.raises(ConfigError, match="Bare cannot sample beside a job"):
        Bare(WaitingAdapterConfig()).allow_staleness(2)
    assert TrainerAdapter.device_seconds(Bare(WaitingAdapterConfig())) == {}
