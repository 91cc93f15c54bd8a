"""Rollouts that overlap updates: schedules without a model, and one run of a tiny agent for each schedule."""

import asyncio
import io
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
from jaxft.components.configs import (
    GRPOTrainerConfig,
    GRPOTrajectoryBuilderConfig,
    LocalPolicyConfig,
    LocalTrainerAdapterConfig,
)
from jaxft.components.grpo import GRPOTrainer, GRPOTrajectoryBuilder
from jaxft.components.local_adapter import LocalTrainerAdapter
from jaxft.components.local_policy import make_meshes, process_share
from jaxft.components.schedule import GroupStream
from jaxft.errors import ConfigError
from jaxft.harness.contracts import TrainerAdapter
from jaxft.harness.data_models import (
    FinetuneConfig,
    RewardFunctionConfig,
    TrainingJobRef,
    TrainingJobStatus,
    TrainingStatusEnum,
    Trajectory,
    TrajectoryCollection,
)
from jaxft.harness.evaluation import Evaluation, Validation
from jaxft.harness.registry import TrainerAdapterConfig
from jaxft.harness.strict_yaml import dump_yaml
from jaxft.rollout.current import episode
from jaxft.runs.console import Console
from jaxft.runs.directory import RunDirectory
from tests.faults.compare import differences

ROOT = Path(__file__).parents[2]
SLOW = "0"
OWN = "tests.own_functions:"
EXAMPLES = 4


class OverlapAgentConfig(jaxft.WorkflowConfig, name="overlap_agent"):
    llm: jaxft.LLMRef
    tool_seconds: float = 0.0
    slow_seconds: float = 0.0
    slow_until_version: int = 0
    together: int = 0


@jaxft.register_workflow(config_type=OverlapAgentConfig)
async def overlap_agent(config: OverlapAgentConfig, builder: Any) -> Any:
    """Two turns with a tool between them, which takes longest in example 0, or waits for others, or for a version."""
    llm = await builder.get_llm(config.llm)
    waiting: list[int] = []
    versions = {0}

    async def play(example: dict) -> float:
        messages, scores = [], []
        for turn in range(2):
            messages.append({"role": "user", "content": f"{example['number']} {turn}"})
            reply = await llm.chat(messages, max_tokens=5)
            messages.append({"role": "assistant", "content": reply.content})
            scores.append(sum(token % 2 for token in reply.token_ids) / len(reply.token_ids))
            if not jaxft.episode().is_training:
                continue
            await asyncio.sleep(config.slow_seconds if str(example["number"]) == SLOW else config.tool_seconds)
            versions.add(reply.policy_version)
            if jaxft.episode().rollout_index == 0 and str(example["number"]) == SLOW:
                while max(versions) < config.slow_until_version:
                    await asyncio.sleep(0.001)
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


class NoModelConfig(TrainerAdapterConfig, name="no_model"):
    pass


class NoModel(TrainerAdapter):
    """A policy that is only the number of its version: jobs raise it inside `submit`, and episodes read it."""

    overlaps = True

    def __init__(self) -> None:
        super().__init__(NoModelConfig())
        self.version, self.held, self.events, self.submitted = 0, None, [], []
        self.metrics = {"applied_updates": 1.0}

    @property
    def sampling_version(self) -> int:
        return self.version if self.held is None else self.held

    def allow_staleness(self, max_staleness: int) -> None:
        if not self.overlaps:
            super().allow_staleness(max_staleness)

    async def pin_weights(self, *, finishes_requests: bool = True) -> None:
        self.held = self.version
        self.events.append(f"hold {finishes_requests}")

    async def release_weights(self) -> None:
        self.held = None
        self.events.append("release")

    async def is_healthy(self) -> bool:
        return True

    async def submit(self, trajectories: TrajectoryCollection) -> TrainingJobRef:
        self.submitted.append([(t.example_id, t.reward) for group in trajectories.trajectories for t in group])
        await asyncio.sleep(0.02)
        self.version += 1
        return TrainingJobRef(run_id=trajectories.run_id, backend="no_model")

    async def status(self, ref: TrainingJobRef) -> TrainingJobStatus:
        status, metadata = TrainingStatusEnum.COMPLETED, {"metrics": self.metrics}
        return TrainingJobStatus(run_id=ref.run_id, backend=ref.backend, status=status, metadata=metadata)

    async def wait_until_complete(self, ref: TrainingJobRef, poll_interval: float = 10.0) -> TrainingJobStatus:
        return await self.status(ref)

    def log_progress(self, ref: TrainingJobRef, metrics: dict, output_dir: str | None = None) -> None:
        pass


@pytest.fixture
def overlap(tmp_path, make_items):
    """Trains a `NoModel` and returns its adapter, and `shown` and the checkpoints, by epochs, in attributes of it."""

    def overlap(adapter=None, *, checkpoint=None, epochs=4, slow=0.0, interval=None, finetuning=None, **config):
        adapter, shown = adapter or NoModel(), io.StringIO()
        adapter.checkpoints, adapter.unvalidated, adapter.ending = {}, {}, []

        async def play(example):
            """The reward is the version that sampled the last turn, and a fraction by number and generation."""
            current = episode()
            if current.is_training:
                await asyncio.sleep(slow if example["name"] == SLOW else 0.0)
            offset = int(example["name"]) / 16 + current.generation / 2 if current.is_training else 0
            return adapter.sampling_version + offset + (current.seed % 97) / 2**20 * current.is_training

        async def save(trainer, step, *, is_written, **about):
            state = {"trainer": trainer.state(), **trainer.collection_state()}
            saved = adapter.checkpoints if is_written else adapter.unvalidated
            saved[step] = json.dumps(state), adapter.version, adapter.held
            adapter.ending.append(trainer.is_ending_epoch)

        async def main(directory):
            builder = GRPOTrajectoryBuilder(GRPOTrajectoryBuilderConfig(num_generations=2))
            evaluation = Evaluation(play, {"points": lambda item: item.output_obj}, "points", 64, 0)
            await builder.bind_evaluation(evaluation, make_items("0123"))
            if interval is not None:
                held_out = Evaluation(play, {"points": lambda item: item.output_obj}, "points", 64, 0)
                await builder.bind_validation(Validation(held_out, make_items("01"), interval=interval))
            settings = GRPOTrainerConfig(**{"max_staleness": 1, **config})
            trainer = GRPOTrainer(settings, directory=directory, console=Console(shown))
            await trainer.bind_components(builder, adapter)
            trainer.save_checkpoint = save
            points = RewardFunctionConfig(name="points")
            await trainer.initialize(FinetuneConfig(reward_function=points, **(finetuning or {})))
            if checkpoint is not None:
                saved, adapter.version, adapter.held = checkpoint
                state = json.loads(saved)
                builder.restore_state(state["builder"])
                builder.evaluation.num_rollouts = state["num_rollouts"]
                trainer.restore_state(state["trainer"])
            try:
                await trainer.run(epochs)
            finally:
                await trainer.cleanup()

        with RunDirectory.create(tmp_path / "run", overwrite=True) as directory:
            asyncio.run(main(directory))
        adapter.shown = shown.getvalue()
        return adapter

    return overlap


def versions_of(adapter):
    """The versions that sampled what each job trained."""
    return [sorted({int(reward) for _, reward in job}) for job in adapter.submitted]


def finetune(folder, **changes):
    """Run `jaxft finetune` into a folder, and return its exit code; `changes` maps dotted paths to values."""
    file = folder.parent / "run.yml"
    file.write_text(
        dump_yaml(
            {
                "llms": {
                    "policy": {"_type": "local_policy", "preset": "qwen3-50k", "slots": 8, "max_context_tokens": 96}
                },
                "workflow": {"_type": "overlap_agent", "llm": "policy"},
                "eval": {
                    "general": {"dataset": {"_type": "overlap_examples"}, "max_concurrency": 64},
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
    changes = {"finetuning.output_dir": str(folder)} | {
        path.replace("__", "."): value for path, value in changes.items()
    }
    options = [word for path, value in changes.items() for word in ("--set", f"{path}={json.dumps(value)}")]
    return main(["finetune", "--config-file", str(file), *options])


VALIDATED = {"eval__validation": {"dataset": {"_type": "overlap_examples"}, "interval": 1}}
SLOWLY = {"workflow__tool_seconds": 0.02, "workflow__slow_seconds": 0.2, "workflow__together": 16}


@pytest.fixture(scope="module")
def overlapped(tmp_path_factory):
    """A run of four epochs, with eight slots, tools that take time, and sixteen agents that wait for each other."""
    folder = tmp_path_factory.mktemp("overlap") / "run"
    assert finetune(folder, **SLOWLY, **VALIDATED) == 0
    return folder


def rows_of(folder, file="training_metrics.jsonl"):
    return [json.loads(line) for line in (folder / file).read_text().splitlines()]


def test_each_collection_is_sampled_by_the_weights_before_the_last_job(overlapped):
    rows = rows_of(overlapped)
    assert [row["policy_version"] for row in rows] == [1, 2, 3, 4]
    assert [row["staleness/1"] for row in rows] == [0.0, 1.0, 1.0, 1.0]
    assert [row["too_stale_fraction"] + row["groups_of_several_versions"] for row in rows] == [0.0] * 4
    assert rows[0]["effective_sample_fraction"] == pytest.approx(1.0, abs=1e-5)
    assert all(0.5 < row["effective_sample_fraction"] < 1.0 for row in rows[1:])
    versions = {
        (row["epoch"], version)
        for row in rows_of(overlapped / "trajectories", "samples.jsonl")
        for sequence in row["sequences"]
        for version in sequence["policy_versions"]
        if version >= 0
    }
    assert versions == {(0, 0), (1, 0), (2, 1), (3, 2)}


def test_waiting_agents_hold_no_slot(overlapped):
    """Sixteen episodes waited for each other between their turns, with eight slots."""
    assert rows_of(overlapped)[0]["calls"] == 32


def test_jobs_run_beside_the_tools_of_agents(overlapped):
    timings = rows_of(overlapped, "timings.jsonl")
    spent = {name for name in timings[0] if name.startswith("seconds_device_")}
    assert spent == {f"seconds_device_{kind}" for kind in ("sampling", "training", "other", "idle")}
    # One after the other, job and collection would take at least the sum: the slowest tools wait twice 0.2 s.
    assert timings[1]["seconds_episode_max"] >= 0.4
    assert timings[1]["seconds"] < timings[1]["seconds_update"] + timings[1]["seconds_episode_max"]


def test_validations_follow_the_weights(overlapped):
    history = json.loads((overlapped / "validation_history.json").read_text())
    assert [row["epoch"] for row in history] == [0, 1, 2, 3, 4]
    assert len({row["avg_reward"] for row in history}) > 2


@pytest.mark.slow
def test_runs_are_equal_however_fast_their_agents_are(overlapped, tmp_path):
    """However many episodes run at once, and however long their tools take."""
    assert finetune(tmp_path / "run", eval__general__max_concurrency=1, **VALIDATED) == 0
    assert differences(overlapped, tmp_path / "run") == ["config.yml: bytes differ"]


@pytest.mark.slow
def test_a_prolonged_run_is_the_longer_one(overlapped, tmp_path):
    assert finetune(tmp_path / "run", finetuning__num_epochs=2, **SLOWLY, **VALIDATED) == 0
    assert main(["resume", str(tmp_path / "run"), "--set", "finetuning.num_epochs=4"]) == 0
    assert differences(tmp_path / "run", overlapped) == []


def test_slow_groups_are_carried_over_whole_and_none_is_lost(tmp_path, capsys):
    changes = {"max_staleness": 3, "in_flight": "continue"}
    trainer = {f"trainers__loop__{name}": value for name, value in changes.items()}
    assert finetune(tmp_path / "run", workflow__slow_until_version=2, finetuning__num_epochs=5, **trainer) == 0
    assert "equal runs differ" in capsys.readouterr().out
    rows, rewards = rows_of(tmp_path / "run"), rows_of(tmp_path / "run" / "trajectories", "rewards.jsonl")
    assert max(row["staleness_max"] for row in rows) in (2, 3)
    assert sum(row["groups_of_several_versions"] for row in rows) > 0  # their second turns were sampled later
    assert all(row["too_stale_fraction"] == 0.0 and row["groups"] == EXAMPLES for row in rows)
    trained = [example for row in rewards for example, given in row["rewards"].items() for _ in range(len(given) // 4)]
    assert sorted(trained) == sorted([str(i) for i in range(EXAMPLES)] * 5)


PARTIAL = {"trainers__loop__partial_rollout_tokens": 2, "trainers__loop__max_staleness": 2}


@pytest.mark.slow
def test_answers_go_on_in_the_next_collection_and_after_a_resume(tmp_path):
    """Groups end in the third collection, with tokens of up to three versions; a checkpoint has what they have."""
    assert finetune(tmp_path / "whole", finetuning__num_epochs=6, **PARTIAL) == 0
    rows = rows_of(tmp_path / "whole")
    assert [row["carried_groups"] for row in rows] == [4] + 5 * [8]
    assert [row["episodes"] for row in rows] == [0, 0] + 4 * [16]
    assert [row.get("staleness_max") for row in rows] == [None, None, 0, 1, 2, 2]
    assert all(row["too_stale_fraction"] == 0.0 and row["effective_sample_fraction"] > 0.9 for row in rows[2:])
    assert finetune(tmp_path / "short", finetuning__num_epochs=4, **PARTIAL) == 0
    assert main(["resume", str(tmp_path / "short"), "--set", "finetuning.num_epochs=6"]) == 0
    assert differences(tmp_path / "short", tmp_path / "whole") == []


# --- Schedules, without a model.

CURRICULUM = {"curriculum_learning": {"enabled": True, "initial_percentile": 0.5, "expansion_interval": 2}}


@pytest.mark.parametrize("finetuning", [{}, CURRICULUM])
def test_jobs_train_the_same_however_long_tools_take(overlap, finetuning):
    fast, slow = overlap(finetuning=finetuning), overlap(finetuning=finetuning, slow=0.05)
    assert fast.submitted == slow.submitted and versions_of(fast) == [[0], [0], [1], [2]]
    examples = [len({example for example, _ in job}) for job in fast.submitted]
    assert examples == [4] * 4 if not finetuning else examples[0] == 2 < examples[-1]
    assert fast.events == ["hold True"] * 4 + ["release"]


def test_a_resumed_run_repeats_the_collection_that_was_sampled_ahead(overlap):
    whole, short = overlap(), overlap(epochs=2)
    for checkpoint in (*map(whole.checkpoints.get, range(4)), short.checkpoints[2]):  # and a prolonged run
        step = checkpoint[1]
        assert overlap(checkpoint=checkpoint).submitted == whole.submitted[step:]


@pytest.mark.parametrize("max_staleness", [0, 1])
def test_so_does_a_run_that_was_stopped_before_a_validation(overlap, tmp_path, max_staleness):
    whole = overlap(interval=1, max_staleness=max_staleness, slow=0.05)
    history = (tmp_path / "run" / "validation_history.json").read_bytes()
    assert whole.ending == [False, False, *[True, False] * 4]  # a signal waits for what follows a job
    for step in range(4):
        again = overlap(interval=1, max_staleness=max_staleness, checkpoint=whole.unvalidated[step])
        assert again.submitted == whole.submitted[step:] and again.checkpoints[4] == whole.checkpoints[4]
        assert (tmp_path / "run" / "validation_history.json").read_bytes() == history


def test_validations_are_of_the_newest_weights_and_jobs_are_not(overlap, tmp_path):
    assert versions_of(overlap(interval=1, slow=0.05)) == [[0], [0], [1], [2]]
    history = json.loads((tmp_path / "run" / "validation_history.json").read_text())
    assert [(row["epoch"], row["avg_reward"]) for row in history] == [(step, step) for step in range(5)]


def test_an_early_stop_leaves_the_collection_ahead(overlap):
    adapter = overlap(early_stop={"target_reward": 0.0}, slow=0.05)
    assert len(adapter.submitted) == 1 and adapter.events == ["hold True", "release"]
    assert "stopped early after 1 epochs" in adapter.shown


@pytest.mark.parametrize(("in_flight", "finishes"), [("continue", False), ("finish", True)])
def test_a_stream_hands_over_what_has_ended(overlap, in_flight, finishes):
    adapter = overlap(max_staleness=3, in_flight=in_flight, epochs=8, slow=0.05)
    assert f"hold {finishes}" in adapter.events and f"hold {not finishes}" not in adapter.events
    assert sorted(example for job in adapter.submitted for example, _ in job) == sorted("0123" * 16)
    assert all(len(job) == 8 for job in adapter.submitted)
    assert "equal runs differ" in adapter.shown


def test_a_run_that_goes_off_policy_says_so(overlap):
    adapter = NoModel()
    adapter.metrics |= {"effective_sample_fraction": 0.4, "staleness_mean": 1.0}
    assert "off-policy: " in overlap(adapter).shown


def test_an_adapter_that_cannot_sample_beside_a_job_is_refused(overlap):
    adapter = NoModel()
    adapter.overlaps = False
    with pytest.raises(ConfigError, match="max_staleness: is 1, but NoModel cannot sample beside a job"):
        overlap(adapter)
    assert overlap(adapter, max_staleness=0).events == ["release", "release"]
    with pytest.raises(
        ConfigError, match="partial_rollout_tokens: is 7, but GRPOTrajectoryBuilder with NoModel cannot"
    ):
        overlap(partial_rollout_tokens=7)
    assert TrainerAdapter.device_seconds(adapter) == {}


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
    assert state == {"groups": {"next": 9, "open": [0, 5, 6, 7, 8], "size": 4}}
    resized = GroupStream(collect, NoWeights(), size=2, total=6, max_staleness=2, epoch=1, state=state["groups"])
    assert resized.state() == {"groups": {"next": 2, "open": [], "size": 2}}
    assert sorted(number for numbers in trained for number in numbers) == list(range(12))


@pytest.mark.slow
def test_devices_that_sample_alone_give_the_same_run(tmp_path):
    """One device against four, of which two train and two sample: losses and rewards agree to rounding."""
    assert finetune(tmp_path / "one", finetuning__num_epochs=3) == 0
    flags = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=4"
    command = [sys.executable, "-m", "jaxft.cli", "finetune", "--config-file", str(tmp_path / "run.yml")]
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
        return make_meshes(config)

    assert meshes(None, None) == (None, None)
    with pytest.raises(ValueError, match="both take all devices that are left"):
        meshes({"data": -1}, {"data": -1})
    with pytest.raises(ValueError, match=f"mesh has 0 of {devices} devices"):
        meshes({"data": -1}, {"data": devices})
    with pytest.raises(ValueError, match=f"mesh has {devices} of {devices} devices"):
        meshes({"data": devices}, {"data": -1})


def test_several_processes_share_slots_and_devices(monkeypatch):
    monkeypatch.setattr(jax, "process_count", lambda: 4)
    assert process_share("slots", 64) == 16
    with pytest.raises(ValueError, match="slots is 6, which 4 processes cannot share; wanted a multiple of 4"):
        process_share("slots", 6)
    with pytest.raises(ValueError, match="sampler_mesh is given, but each of several processes samples on its devices"):
        make_meshes(LocalPolicyConfig(preset="qwen3-50k", sampler_mesh={"data": 1}))


# --- What is refused, and what is said.


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"trainers__loop__in_flight": "continue"}, "in_flight 'continue' needs max_staleness 2 or more; with 1"),
        ({"trainers__loop__max_staleness": -1}, "trainers.loop.max_staleness"),
        (PARTIAL | {"trainers__loop__max_staleness": 0}, "max_staleness above 0 and in_flight 'finish', not 0 and"),
        (PARTIAL | {"trainers__loop__in_flight": "continue"}, "not 2 and 'continue'"),
        (
            PARTIAL | {"trainers__loop__partial_rollout_tokens": 96},
            "partial_rollout_tokens: is 96, but no answer is longer than max_context_tokens, 96",
        ),
        (
            {"trainer_adapters__local__loss": {"name": "reinforce", "correction": {"name": "ratio"}}},
            "reinforce has no ratio",
        ),
        (
            {"trainer_adapters__local__loss": {"function": f"{OWN}pull", "correction": {"name": "ratio"}}},
            ") has no ratio",
        ),
        (
            {"trainers__loop__max_staleness": 0, "trainer_adapters__local__loss": {"name": "kl_cov"}},
            "finetuning.trainer_adapter: loss 'kl_cov' makes one update of each job",
        ),
    ],
)
def test_settings_that_make_no_sense_are_refused(tmp_path, capsys, changes, said):
    assert finetune(tmp_path / "refused", **changes) == 2
    assert said in capsys.readouterr().err


def test_staleness_is_corrected_unless_the_loss_says_otherwise(policy):
    """Losses without a correction are refused; an adapter shares its device, and says when it corrects nothing."""
    warnings = []

    def allow(loss):
        config = LocalTrainerAdapterConfig(llm="policy", loss=loss, optimizer={"learning_rate": 1e-3})
        adapter = LocalTrainerAdapter(config, policy, warnings.append)
        adapter.allow_staleness(1)
        assert adapter.max_staleness == 1
        return adapter.learner.loss.correction.name

    losses = {"name": "grpo"}, {"name": "reinforce"}, {"function": "jaxft:policy_loss"}, {"function": f"{OWN}weighted"}
    assert [allow(loss) for loss in losses] == ["ratio", "token_truncate"] * 2 and not warnings
    assert allow({"name": "kl_cov"}) == "ratio"  # which is refused without: its jobs have one update
    with pytest.raises(ConfigError, match=r"max_staleness: is 1, but .pull. .* takes neither old_logprobs"):
        allow({"function": f"{OWN}pull"})
    assert allow({"name": "grpo", "correction": {"name": "none"}}) == "none"
    assert len(warnings) == 1 and "loss.correction is none with max_staleness 1" in warnings[0]
    with pytest.raises(ConfigError, match="max_staleness: is 1, but loss 'sft' has no correction"):
        allow({"name": "sft"})


def test_a_sampler_in_eight_bits_is_corrected_unless_the_loss_says_otherwise(policy, monkeypatch):
    """By weights, also in a function that takes them; one that takes neither weights nor a record is refused."""
    monkeypatch.setattr(policy, "model", policy.model._replace(sampling_dtype="int8"))
    warnings = []

    def correction(loss):
        config = LocalTrainerAdapterConfig(llm="policy", loss=loss, optimizer={"learning_rate": 1e-3})
        adapter = LocalTrainerAdapter(config, policy, warnings.append)
        return adapter.learner.loss.correction

    losses = {"name": "grpo"}, {"name": "reinforce"}, {"function": "jaxft:policy_loss"}, {"function": f"{OWN}weighted"}
    assert [correction(loss).name for loss in losses] == ["token_truncate"] * 4 and not warnings
    assert correction({"name": "sft"}) is None
    with pytest.raises(ConfigError, match=r"sampling_dtype: is int8, but .pull. .* takes neither old_logprobs"):
        correction({"function": f"{OWN}pull"})
    assert correction({"name": "grpo", "correction": {"name": "none"}}).name == "none"
    assert len(warnings) == 1 and "loss.correction is none with sampling_dtype int8" in warnings[0]
