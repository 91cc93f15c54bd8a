"""An agent that fails now and then, in any way, is trained on the rest (what ends runs: components/test_grpo.py)."""

import asyncio
import contextlib
import io
import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

import jaxft
from jaxft.cli import main
from jaxft.harness.strict_yaml import dump_yaml


class EvenConfig(jaxft.EvaluatorConfig, name="even_tokens"):
    pass


@jaxft.register_evaluator(config_type=EvenConfig)
async def even_tokens(config: EvenConfig, builder: Any) -> Any:
    def score(item: jaxft.EvalInputItem) -> float:
        output = item.output_obj
        return 1e308 if output == ("huge",) else sum(token % 2 == 0 for token in output) / len(output)

    yield score


class PlainConfig(jaxft.TrainerConfig, name="plain_trainer"):
    pass


class PlainTrainer(jaxft.Trainer):
    """A loop of the user's own, which counts its epochs and nothing else."""

    epoch = 0

    async def run(self, num_epochs: int) -> list[jaxft.TrainingJobStatus]:
        statuses = []
        while self.epoch < num_epochs:
            await self.checkpoint(self.epoch)
            ref = await self.run_epoch(self.epoch, f"epoch_{self.epoch}")
            statuses.append(await self.trainer_adapter.wait_until_complete(ref))
            self.epoch += 1
        await self.checkpoint(self.epoch, is_last=True)
        return statuses

    async def run_epoch(self, epoch: int, run_id: str) -> jaxft.TrainingJobRef:
        await self.trajectory_builder.start_run(run_id)
        return await self.trainer_adapter.submit(await self.trajectory_builder.finalize(run_id))

    async def get_metrics(self, run_id: str) -> dict:
        return {}

    async def cleanup(self) -> None:
        pass

    def log_progress(self, epoch: int, metrics: dict, output_dir: str | None = None) -> None:
        pass

    def state(self) -> dict:
        return {"epoch": self.epoch}

    def restore_state(self, state: dict) -> None:
        self.epoch = state["epoch"]


@jaxft.register_trainer(config_type=PlainConfig)
async def plain_trainer(config: PlainConfig, builder: Any) -> Any:
    yield PlainTrainer(config)


class PlainAdapterConfig(jaxft.TrainerAdapterConfig, name="plain_adapter"):
    updates: int = 1


class PlainAdapter(jaxft.TrainerAdapter):
    """A backend of the user's own, whose jobs say how many updates they made."""

    version = 0

    async def is_healthy(self) -> bool:
        return True

    async def submit(self, trajectories: jaxft.TrajectoryCollection) -> jaxft.TrainingJobRef:
        self.version += self.adapter_config.updates
        return jaxft.TrainingJobRef(run_id=trajectories.run_id, backend="plain")

    async def status(self, ref: jaxft.TrainingJobRef) -> jaxft.TrainingJobStatus:
        metrics = {"metrics": {"applied_updates": self.adapter_config.updates}}
        return jaxft.TrainingJobStatus(run_id=ref.run_id, backend="plain", status="completed", metadata=metrics)

    async def wait_until_complete(self, ref: jaxft.TrainingJobRef, poll_interval: float = 10.0) -> Any:
        return await self.status(ref)

    def log_progress(self, ref: jaxft.TrainingJobRef, metrics: dict, output_dir: str | None = None) -> None:
        pass

    async def save_state(self, save: Any) -> Any:
        return save({"policy_version": self.version}, {})

    async def restore_state(self, values: dict, read: Any) -> None:
        self.version = values["policy_version"]


@jaxft.register_trainer_adapter(config_type=PlainAdapterConfig)
async def plain_adapter(config: PlainAdapterConfig, builder: Any) -> Any:
    yield PlainAdapter(config)


def command(tmp_path):
    """Returns a function that runs the command on a configuration, and gives its exit code."""

    def finetune(*options, how):
        rows = [json.dumps({"question": str(n), "answer": ""}) for n in range(8)]
        (tmp_path / "rows.jsonl").write_text("\n".join(rows))
        run = {
            "llms": {"policy": {"_type": "local_policy", "preset": "qwen3-50k", "slots": 8, "max_context_tokens": 96}},
            "workflow": {"_type": "other_agent", "llm": "policy", "how": how},
            "eval": {
                "general": {"dataset": {"_type": "jsonl", "file_path": "rows.jsonl"}},
                "evaluators": {"even": {"_type": "even_tokens"}},
            },
            "trajectory_builders": {"rollouts": {"_type": "grpo_trajectory_builder", "num_generations": 8}},
            "trainer_adapters": {
                "local": {
                    "_type": "local_trainer_adapter",
                    "llm": "policy",
                    "loss": {"name": "dapo"},
                    "optimizer": {"learning_rate": 3e-2},
                }
            },
            "trainers": {"loop": {"_type": "grpo_trainer", "show_episodes_every": 0}},
            "finetuning": {
                "enabled": True,
                "trainer": "loop",
                "trajectory_builder": "rollouts",
                "trainer_adapter": "local",
                "reward_function": {"name": "even"},
                "num_epochs": 8,
                "checkpoints": {"every": None},
                "output_dir": str(tmp_path / "run"),
            },
        }
        (tmp_path / "run.yml").write_text(dump_yaml(run))
        return main(["finetune", "--config-file", str(tmp_path / "run.yml"), *options])

    return finetune


@pytest.fixture
def finetune(tmp_path):
    return command(tmp_path)


class OtherConfig(jaxft.WorkflowConfig, name="other_agent"):
    llm: jaxft.LLMRef
    how: str


class TextOfItsOwn(BaseException):
    """Neither an `Exception` nor shown."""

    def __str__(self):
        raise RuntimeError("no text")


WAYS = ("asks", "carried", "lost", "silent", "raises", "down", "huge", "asks")
"""Failures of an agent, by example."""


@jaxft.register_workflow(config_type=OtherConfig)
async def other_agent(config: OtherConfig, builder: Any) -> Any:
    """Asks in the way that `how` says; `mixed` is a plain function that fails in the ways of `WAYS`."""
    llm = await builder.get_llm(config.llm)

    def ask(example: dict) -> tuple[int, ...]:
        return llm.chat_sync([{"role": "user", "content": example["question"]}], max_tokens=4).token_ids

    async def in_task(example: dict) -> tuple[int, ...]:
        return (await llm.chat([{"role": "user", "content": example["question"]}], max_tokens=4)).token_ids

    async def carried(example: dict) -> tuple[int, ...]:
        """A thread that takes no context along, as one of an executor does."""
        return await asyncio.get_running_loop().run_in_executor(None, jaxft.in_episode(ask), example)

    def mixed(example: dict) -> tuple[int, ...]:
        way = WAYS[int(example["question"])]
        if way == "silent":
            return (jaxft.episode().generation,)
        if way in ("carried", "lost"):
            with ThreadPoolExecutor(1) as pool:
                return pool.submit(jaxft.in_episode(ask) if way == "carried" else ask, example).result()
        token_ids = ask(example)
        if way == "raises" and jaxft.episode().generation == 0:
            raise TextOfItsOwn
        if way == "down" and jaxft.episode().random.random() < 0.5:
            raise ConnectionError("the tool is down")
        return ("huge",) if way == "huge" else token_ids

    async def idle(example: dict) -> tuple[int, ...]:
        return (jaxft.episode().generation,)

    yield {"sync": ask, "async": in_task, "carried": carried, "mixed": mixed, "idle": idle}[config.how]


@pytest.fixture(scope="module")
def mixed(tmp_path_factory):
    """Metrics of each epoch, kept episodes and console of a run whose agent fails in many ways, and goes on."""
    folder, epochs = tmp_path_factory.mktemp("mixed"), ("--set", "finetuning.num_epochs=2")
    kept = ("--set", "trainers.loop.save_episodes=all", "--set", "trainers.loop.max_failed_fraction=0.5")
    with contextlib.redirect_stdout(io.StringIO()) as shown:
        assert command(folder)(*epochs, *kept, how="mixed") == 0
    files = [folder / "run" / name for name in ("training_metrics.jsonl", "trajectories/samples.jsonl")]
    return [*([json.loads(row) for row in file.read_text().splitlines()] for file in files), shown.getvalue()]


def failures(episodes, word):
    return [each["failure"] for each in episodes if word in each.get("failure", "")]


def test_an_agent_that_fails_now_and_then_is_trained_with_the_rest(mixed):
    metrics, episodes, shown = mixed
    assert [row["applied_updates"] for row in metrics] == [1, 1]
    down = [
        sum("is down" in each["failure"] for each in episodes if "failure" in each and each["epoch"] == n)
        for n in (0, 1)
    ]
    assert [row["failed_episodes"] for row in metrics] == [1 + 8 + count for count in down] and 0 < sum(down) < 16
    assert 'raise ConnectionError("the tool is down")' in failures(episodes, "is down")[0]
    assert shown.count("of 64 episodes failed and are left out; example '") == 2


def test_whatever_an_agent_raises_is_one_failed_episode(mixed):
    found = failures(mixed[1], "TextOfItsOwn: its text cannot be shown, as that raises RuntimeError")
    assert len(found) == 2 and all("example '4', generation 0" in each for each in found)


def test_a_reward_beyond_float32_is_an_error_that_names_it(mixed):
    found = failures(mixed[1], "evaluator 'even': ValueError: it gave 1e+308 for example '6'")
    assert len(found) == 16


def test_threads_are_trained_if_they_know_their_episode_and_else_counted(mixed):
    metrics, _, shown = mixed
    for row in metrics:  # the calls of episodes that failed do not count
        assert (row["calls"] + row["failed_episodes"], row["outside_calls"]) == (6 * 8, 8)
    assert "8 calls" in shown and "jaxft.in_episode(function)" in shown


ONE_EPOCH = ("--overwrite", "--set", "finetuning.num_epochs=1")


@pytest.mark.slow
def test_threads_are_trained_and_repeated_as_tasks_are(finetune, tmp_path):
    """A workflow that is a plain function, and one that asks in threads of its own: the same numbers, bit for bit."""
    rows = {}
    for how in ("async", "sync", "carried"):
        assert finetune(*ONE_EPOCH, how=how) == 0
        rows[how] = json.loads((tmp_path / "run" / "training_metrics.jsonl").read_text().splitlines()[0])
    assert rows["sync"] == rows["async"] == rows["carried"]
    assert rows["sync"]["calls"] == 64 and rows["sync"]["outside_calls"] == 0


def test_an_agent_that_never_asks_is_told_so(finetune, capsys):
    for options in ((), ("--set", "finetuning.curriculum_learning.enabled=true")):
        assert finetune(*ONE_EPOCH, *options, how="idle") == 3
        error = capsys.readouterr().err
        assert "builder.get_llm" in error and "num_generations" not in error


@pytest.mark.parametrize(("updates", "code"), [(1, 0), (0, 3)], ids=["trained", "nothing trained"])
def test_a_finished_run_that_is_resumed_ends_as_it_ended_before(finetune, capsys, updates, code):
    """With a trainer that does not judge itself what it has learned."""
    adapter = f"trainer_adapters.local={{_type: plain_adapter, updates: {updates}}}"
    plain = ("--set", "trainers.loop={_type: plain_trainer}", "--set", "finetuning.checkpoints.every=1")
    options = (*plain, "--set", adapter, "--set", "finetuning.num_epochs=1")
    assert [finetune(*options, how="idle"), finetune(*options, "--resume", how="idle")] == [code, code]
    assert capsys.readouterr().err.count("PlainTrainer trained nothing") == (2 if code else 0)
