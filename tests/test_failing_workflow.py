"""An agent that fails now and then still learns; one that always fails ends the run with its last traceback."""

import asyncio
import json
import re
from typing import Any

import pytest

import jaxft
from jaxft.cli import main
from jaxft.harness.strict_yaml import dump_yaml
from jaxft.shipped.configs import GRPOTrajectoryBuilderConfig
from jaxft.shipped.grpo import GRPOTrajectoryBuilder


class BrittleConfig(jaxft.WorkflowConfig, name="brittle_agent"):
    llm: jaxft.LLMRef
    failing_fraction: float = 0.3


class EvenConfig(jaxft.EvaluatorConfig, name="even_tokens"):
    largest: float = 1.0


@jaxft.register_workflow(config_type=BrittleConfig)
async def brittle_agent(config: BrittleConfig, builder: Any) -> Any:
    """Answers in a few tokens; in a share of its episodes a tool of its is down."""
    llm = await builder.get_llm(config.llm)

    async def answer(example: dict) -> tuple[int, ...]:
        reply = await llm.chat([{"role": "user", "content": example["question"]}], max_tokens=4)
        if jaxft.episode().random.random() < config.failing_fraction:
            raise ConnectionError("the tool is down")
        return reply.token_ids

    yield answer


@jaxft.register_evaluator(config_type=EvenConfig)
async def even_tokens(config: EvenConfig, builder: Any) -> Any:
    yield lambda item: config.largest * (sum(token % 2 == 0 for token in item.output_obj) / len(item.output_obj))


class CarelessConfig(GRPOTrajectoryBuilderConfig, name="careless_builder"):
    factor: float = 1.0


class CarelessBuilder(GRPOTrajectoryBuilder):
    """Leaves out what was sampled, or gives rewards that are too large."""

    async def finalize(self, run_id: str, meta: dict | None = None) -> jaxft.TrajectoryCollection:
        collection, factor = await super().finalize(run_id, meta), self.trajectory_builder_config.factor
        for trajectory in (each for group in collection.trajectories for each in group):
            trajectory.reward = (0.5 + trajectory.generation / 16) * factor
            trajectory.sequences = None if factor == 1.0 else trajectory.sequences
        return collection


@jaxft.register_trajectory_builder(config_type=CarelessConfig)
async def careless_builder(config: CarelessConfig, builder: Any) -> Any:
    yield CarelessBuilder(config)


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


@pytest.fixture
def finetune(tmp_path):
    """Runs the command on a configuration; gives its exit code."""

    def finetune(*options, **agent):
        rows = [json.dumps({"question": str(n), "answer": ""}) for n in range(8)]
        (tmp_path / "rows.jsonl").write_text("\n".join(rows))
        run = {
            "llms": {"policy": {"_type": "local_policy", "preset": "qwen3-50k", "slots": 32, "max_context_tokens": 96}},
            "workflow": {"_type": "other_agent" if "how" in agent else "brittle_agent", "llm": "policy", **agent},
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
        return main(["finetune", "--config_file", str(tmp_path / "run.yml"), *options])

    return finetune


def test_an_agent_that_fails_in_a_third_of_its_episodes_learns(finetune, tmp_path, capsys):
    assert finetune() == 0
    rows = [json.loads(row) for row in (tmp_path / "run" / "training_metrics.jsonl").read_text().splitlines()]
    failed = sum(row["failed_episodes"] for row in rows) / sum(row["episodes"] for row in rows)
    assert 0.2 < failed < 0.4
    rewards = [row["reward_mean"] for row in rows]
    assert sum(rewards[:2]) / 2 < 0.6 and sum(rewards[-2:]) / 2 > 0.75
    assert "episodes failed and are left out; example '" in capsys.readouterr().out


def test_an_agent_that_always_fails_ends_the_run(finetune, capsys):
    assert finetune(failing_fraction=1.0) == 3
    error = capsys.readouterr().err
    assert "64 of 64 episodes failed; the last: example '7', generation 7: ConnectionError: the tool is down" in error
    assert 'raise ConnectionError("the tool is down")' in error


def test_a_device_that_is_too_small_ends_the_run_in_one_line(finetune, capsys):
    """No address space holds the cache: the allocation really fails."""
    assert finetune("--set", "llms.policy.slots=8", "--set", f"llms.policy.max_context_tokens={2**40}") == 1
    error = capsys.readouterr().err
    assert error.startswith(
        "jaxft: error: the device has too little memory to sample: lower llms.<name>.slots (now 8), "
        f"cache_tokens (now {2**43}) or max_context_tokens (now {2**40}); it said: RESOURCE_EXHAUSTED: Out of memory "
        "allocating "
    )
    assert error.count("\n") == 1


class OtherConfig(jaxft.WorkflowConfig, name="other_agent"):
    llm: jaxft.LLMRef
    how: str


class TextOfItsOwn(BaseException):
    """Neither an `Exception` nor shown."""

    def __str__(self):
        raise RuntimeError("no text")


@jaxft.register_workflow(config_type=OtherConfig)
async def other_agent(config: OtherConfig, builder: Any) -> Any:
    """Asks in the way that `how` says, or does not ask."""
    llm = await builder.get_llm(config.llm)

    def ask(example: dict) -> tuple[int, ...]:
        return llm.chat_sync([{"role": "user", "content": example["question"]}], max_tokens=4).token_ids

    async def in_task(example: dict) -> tuple[int, ...]:
        return (await llm.chat([{"role": "user", "content": example["question"]}], max_tokens=4)).token_ids

    async def run_in_thread(example: dict) -> tuple[int, ...]:
        """A thread that takes no context along, as one of an executor does."""
        function = ask if config.how == "lost" else jaxft.in_episode(ask)
        return await asyncio.get_running_loop().run_in_executor(None, function, example)

    async def silent(example: dict) -> tuple[int, ...]:
        return (jaxft.episode().generation,)

    async def raising(example: dict) -> tuple[int, ...]:
        if jaxft.episode().generation == 0:
            raise TextOfItsOwn
        return await in_task(example)

    ways = {
        "sync": ask,
        "async": in_task,
        "lost": run_in_thread,
        "carried": run_in_thread,
        "silent": silent,
        "raise": raising,
    }
    yield ways[config.how]


ONE_EPOCH = ("--overwrite", "--set", "finetuning.num_epochs=1")


def metrics(tmp_path):
    return json.loads((tmp_path / "run" / "training_metrics.jsonl").read_text().splitlines()[0])


def test_threads_are_trained_and_repeated_as_tasks_are(finetune, tmp_path):
    """A workflow that is a plain function, and one that asks in threads of its own: the same numbers, bit for bit."""
    rows = {}
    for how in ("async", "sync", "carried"):
        assert finetune(*ONE_EPOCH, how=how) == 0
        rows[how] = metrics(tmp_path)
    assert rows["sync"] == rows["async"] == rows["carried"]
    assert rows["sync"]["calls"] == 64 and rows["sync"]["outside_calls"] == 0


def test_calls_of_threads_that_know_no_episode_are_counted_and_said(finetune, tmp_path, capsys):
    assert finetune(*ONE_EPOCH, how="lost") == 3
    assert metrics(tmp_path)["outside_calls"] == 64 and metrics(tmp_path)["calls"] == 0
    shown = capsys.readouterr()
    assert "64 calls" in shown.out and "jaxft.in_episode(function)" in shown.out
    assert "all 64 calls" in shown.err and "jaxft.in_episode(function)" in shown.err
    assert "num_generations" not in shown.err


def test_an_agent_that_never_asks_is_told_so(finetune, capsys):
    for options in ((), ("--set", "finetuning.curriculum_learning.enabled=true")):
        assert finetune(*ONE_EPOCH, *options, how="silent") == 3
        error = capsys.readouterr().err
        assert "builder.get_llm" in error and "num_generations" not in error


def test_whatever_an_agent_raises_is_one_failed_episode(finetune, tmp_path, capsys):
    assert finetune(*ONE_EPOCH, how="raise") == 0
    assert (metrics(tmp_path)["failed_episodes"], metrics(tmp_path)["episodes"]) == (8, 64)
    assert "TextOfItsOwn: its text cannot be shown, as that raises RuntimeError" in capsys.readouterr().out


def test_a_reward_beyond_float32_is_an_error_that_names_it(finetune, capsys):
    assert finetune(*ONE_EPOCH, "--set", "eval.evaluators.even.largest=1e308", how="async") == 3
    error = capsys.readouterr().err
    assert re.search(r"evaluator 'even': ValueError: it gave [\d.]+e\+30[78] for example '\d'", error)


@pytest.mark.parametrize(
    ("factor", "code", "said"),
    [(1.0, 3, "their `sequences` are None"), (1e308, 2, r"example '0', generation \d has the reward \d\.?\d*e\+307")],
)
def test_mistakes_of_a_builder_are_named(finetune, capsys, factor, code, said):
    builder = ("--set", "trajectory_builders.rollouts._type=careless_builder")
    factor = ("--set", f"trajectory_builders.rollouts.factor={factor}")
    assert finetune(*ONE_EPOCH, *builder, *factor, how="async") == code
    error = capsys.readouterr().err
    assert re.search(said, error) and "num_generations" not in error


@pytest.mark.parametrize(("largest", "code"), [(1.0, 0), (0.0, 3)], ids=["trained", "nothing trained"])
def test_a_finished_run_that_is_resumed_ends_as_it_ended_before(finetune, capsys, largest, code):
    """With a trainer that does not judge itself what it has learned."""
    plain = ("--set", "trainers.loop={_type: plain_trainer}", "--set", "finetuning.checkpoints.every=1")
    options = (*plain, "--set", "finetuning.num_epochs=1", "--set", f"eval.evaluators.even.largest={largest}")
    assert [finetune(*options, how="async"), finetune(*options, "--resume", how="async")] == [code, code]
    assert capsys.readouterr().err.count("PlainTrainer trained nothing") == (2 if code else 0)
