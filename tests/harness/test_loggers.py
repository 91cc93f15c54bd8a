"""Loggers of a configuration, in sessions with a backend that trains nothing: what they are told, and what they cannot
do to the run."""

import asyncio
import io
import json
import sys
import threading

import pytest

import jaxft
from jaxft.errors import ComponentError, ConfigError, TooManyFailures
from jaxft.runs.console import Console

KEY = "sk-0123456789"
heard, broken_examples = [], set()


class AgentConfig(jaxft.WorkflowConfig, name="logged_agent"):
    api_key: str = KEY


class ScoreConfig(jaxft.EvaluatorConfig, name="logged_score"):
    pass


class ExamplesConfig(jaxft.DatasetConfig, name="logged_examples"):
    pass


class BackendConfig(jaxft.TrainerAdapterConfig, name="logged_backend"):
    pass


class OwnLoggerConfig(jaxft.LoggerConfig, name="own_logger"):
    does: str = "notes"


class Backend(jaxft.TrainerAdapter):
    """A backend that trains nothing."""

    async def is_healthy(self):
        return True

    async def submit(self, trajectories):
        return jaxft.TrainingJobRef(run_id=trajectories.run_id, backend="none")

    async def status(self, ref):
        return jaxft.TrainingJobStatus(run_id=ref.run_id, backend="none", status="completed")

    async def wait_until_complete(self, ref, poll_interval=10.0):
        return await self.status(ref)

    def log_progress(self, ref, metrics, output_dir=None):
        pass

    async def export_model(self, folder):
        folder.mkdir()
        return folder


class Own(jaxft.RunLogger):
    def __init__(self, does):
        self.does = does

    def begin(self, run):
        heard.append(("begin", run))

    def metrics(self, epoch, metrics, timings):
        heard.append(("metrics", epoch, metrics, timings))
        if self.does == "fails":
            raise ValueError("no such metric")
        if self.does == "hangs":
            threading.Event().wait(60)

    def samples(self, episodes):
        heard.append(("samples", *episodes))

    def artifact(self, name, path):
        heard.append(("artifact", name, path))

    def end(self, status, result):
        heard.append(("end", status, result))


@jaxft.register_logger(config_type=OwnLoggerConfig)
async def own_logger(config, builder):
    if config.does == "is not made":
        raise OSError("no such server")
    yield "no logger" if config.does == "is none" else Own(config.does)
    if config.does == "fails to close":
        raise OSError("gone away")


@jaxft.register_dataset_loader(config_type=ExamplesConfig)
async def examples(config, builder):
    yield [jaxft.EvalInputItem(id=name, full_dataset_entry={"name": name}) for name in "ab"]


@jaxft.register_trainer_adapter(config_type=BackendConfig)
async def backend(config, builder):
    yield Backend(config)


@pytest.fixture(scope="module", autouse=True)
def components(record_call):
    @jaxft.register_workflow(config_type=AgentConfig)
    async def agent(config, builder):
        async def play(example):
            if example["name"] in broken_examples:
                raise ValueError("broken")
            record_call([1, 2], [3, 4], messages=[{"role": "user", "content": f"my key is {config.api_key}"}])
            return example["name"] + str(jaxft.episode().generation)

        yield play

    @jaxft.register_evaluator(config_type=ScoreConfig)
    async def score(config, builder):
        yield lambda item: {"a0": 1.0, "b1": 0.5}.get(item.output_obj, 0.0)


@pytest.fixture(autouse=True)
def nothing_heard():
    heard.clear()
    broken_examples.clear()


def run_config(folder, loggers, **finetuning):
    mapping = {
        "workflow": {"_type": "logged_agent"},
        "eval": {
            "general": {"dataset": {"_type": "logged_examples"}},
            "validation": {"dataset": {"_type": "logged_examples"}, "interval": 2},
            "evaluators": {"score": {"_type": "logged_score"}},
        },
        "trajectory_builders": {"rollouts": {"_type": "grpo_trajectory_builder", "num_generations": 2}},
        "trainer_adapters": {"none": {"_type": "logged_backend"}},
        "trainers": {"loop": {"_type": "grpo_trainer", "save_episodes": "all", "max_failed_fraction": 0.4}},
        "finetuning": {
            "enabled": True,
            "trainer": "loop",
            "trajectory_builder": "rollouts",
            "trainer_adapter": "none",
            "reward_function": {"name": "score"},
            "num_epochs": 4,
            "output_dir": str(folder),
            "loggers": loggers,
            **finetuning,
        },
    }
    return jaxft.config_from_mapping(mapping, base_dir=folder.parent)


def train(config, resume=False):
    """Trains, exports and writes the result; returns what was shown."""
    shown = io.StringIO()

    async def main():
        async with jaxft.open_session(config, console=Console(shown), resume=resume) as session:
            await session.train()
            await session.export_model()
            session.write_result({"num_epochs": config.finetuning.num_epochs})

    asyncio.run(main())
    return shown.getvalue()


def calls(name):
    return [call[1:] for call in heard if call[0] == name]


def rows(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_logger_is_told_of_the_whole_run(tmp_path):
    folder = tmp_path / "seed_1"
    train(run_config(folder, ["own_logger"]))
    assert [call[0] for call in heard][:2] == ["begin", "metrics"] and heard[-1][0] == "end"
    ((run,),) = calls("begin")
    assert (run.name, run.directory, run.is_resumed, run.first_epoch) == ("seed_1", folder, False, 0)
    assert run.config["finetuning"]["num_epochs"] == 4 and run.environment["versions"]["jaxft"]
    assert run.config["finetuning"]["loggers"][0]["_type"] == "own_logger"
    assert run.config["workflow"] == {"_type": "logged_agent", "api_key": "***"} and KEY not in str(heard)

    epochs = [call for call in calls("metrics") if "reward_mean" in call[1]]
    assert [(epoch, metrics) for epoch, metrics, _ in epochs] == [
        (row.pop("epoch"), row) for row in rows(folder / "training_metrics.jsonl")
    ]
    assert [timings for _, _, timings in epochs] == [
        {name: value for name, value in row.items() if name != "epoch"} for row in rows(folder / "timings.jsonl")
    ]
    validations = [call for call in calls("metrics") if "reward_mean" not in call[1]]
    assert [(epoch, metrics["validation/avg_reward"]) for epoch, metrics, _ in validations] == [
        (0, 0.5), (2, 0.5), (4, 0.5),
    ]  # fmt: skip
    assert [[(e.epoch, e.example, e.reward) for e in table] for table in calls("samples")] == [
        [(epoch, "a", 1.0), (epoch, "a", 0.0), (epoch, "b", 0.0), (epoch, "b", 0.5)] for epoch in range(4)
    ]
    assert calls("samples")[0][0].text == "user: my key is ***\n\nassistant: said"
    assert {name: path for name, path in calls("artifact")} == {
        "model": folder / "model",
        "reward_plot": folder / "reward_plot.png",
    }
    (ending,) = calls("end")
    assert ending == ("completed", json.loads((folder / "result.json").read_text()))


def test_loggers_change_no_byte_of_the_metrics_and_what_fails_is_counted_in_the_timings(tmp_path):
    loggers = [
        {"_type": "own_logger", "does": "fails"},
        {"_type": "own_logger", "does": "hangs", "timeout_seconds": 0.2},
    ]
    shown = train(run_config(tmp_path / "with", loggers))
    assert "no such metric" in shown and "0 (own_logger)" in shown and "1 (own_logger)" in shown
    train(run_config(tmp_path / "without", []))
    for name in (
        "training_metrics.jsonl",
        "reward_history.json",
        "validation_history.json",
        "trajectories/samples.jsonl",
    ):
        assert (tmp_path / "with" / name).read_bytes() == (tmp_path / "without" / name).read_bytes(), name
    assert not (tmp_path / "without" / "tensorboard").exists()
    counted = [row["logger_failures"] for row in rows(tmp_path / "with" / "timings.jsonl")]
    assert counted == sorted(counted) and counted[0] >= 0
    assert [row["logger_failures"] for row in rows(tmp_path / "without" / "timings.jsonl")] == [0] * 4


def test_tensorboard_is_the_default(tmp_path):
    config = run_config(tmp_path / "run", [])
    kept = {name: value for name, value in config.finetuning.model_dump().items() if name != "loggers"}
    assert [each.type_name for each in jaxft.FinetuneConfig(**kept).loggers] == ["tensorboard"]
    train(config.model_copy(update={"finetuning": jaxft.FinetuneConfig(**kept)}))
    (events,) = (tmp_path / "run" / "tensorboard").iterdir()
    assert b"validation/avg_reward" in events.read_bytes() and b"reward_mean" in events.read_bytes()


def test_a_resumed_run_says_from_which_epoch_it_repeats(tmp_path, monkeypatch):
    """It fails in epoch 3 and has a checkpoint before epoch 2, which is logged twice."""
    checkpoints = {"every": 2}
    config = run_config(tmp_path / "run", ["own_logger"], checkpoints=checkpoints)
    collect = jaxft.GRPOTrainer.run_epoch

    async def fail_in_epoch_3(self, epoch, run_id):
        if epoch == 3:
            broken_examples.update("ab")
        return await collect(self, epoch, run_id)

    monkeypatch.setattr(jaxft.GRPOTrainer, "run_epoch", fail_in_epoch_3)
    with pytest.raises(TooManyFailures):
        train(config)
    ((status, result),) = calls("end")
    assert status == "failed" and "TooManyFailures" in result["error"]
    first = {(epoch, *sorted(metrics)): metrics for epoch, metrics, _ in calls("metrics")}

    monkeypatch.undo()
    nothing = list(heard)
    heard.clear()
    broken_examples.clear()
    train(config, resume=True)
    ((run,),) = calls("begin")
    assert (run.is_resumed, run.first_epoch) == (True, 2)
    told = [(epoch, "reward_mean" in metrics) for epoch, metrics, _ in calls("metrics")]
    assert told == [(2, False), (2, True), (3, True), (4, False)]  # the validation before epoch 2 once more
    for epoch, metrics, _ in calls("metrics")[:2]:
        assert first[epoch, *sorted(metrics)] == metrics
    assert calls("end")[0][0] == "completed" and nothing


def test_a_signal_ends_a_run_as_stopped(tmp_path, monkeypatch):
    config = run_config(tmp_path / "run", ["own_logger"])

    async def cancel(self, epoch, run_id):
        raise jaxft.errors.Stopped("by the test")

    monkeypatch.setattr(jaxft.GRPOTrainer, "run_epoch", cancel)
    with pytest.raises(jaxft.errors.Stopped):
        train(config)
    assert calls("end")[0][0] == "stopped"


def test_a_logger_that_cannot_be_made_ends_the_run_before_it_begins(tmp_path):
    with pytest.raises(ComponentError, match=r"finetuning.loggers.0 \(own_logger\): OSError: no such server"):
        train(run_config(tmp_path / "run", [{"_type": "own_logger", "does": "is not made"}]))
    with pytest.raises(ComponentError, match=r"finetuning.loggers.0: .* a RunLogger, not str"):
        train(run_config(tmp_path / "run", [{"_type": "own_logger", "does": "is none"}]))
    assert not (tmp_path / "run" / "config.yml").exists()


def test_a_logger_that_fails_when_it_is_closed_ends_no_run(tmp_path):
    shown = train(run_config(tmp_path / "run", [{"_type": "own_logger", "does": "fails to close"}]))
    assert "OSError: gone away" in shown and (tmp_path / "run" / "result.json").exists()


def test_without_its_package_wandb_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)  # as if it were not installed
    with pytest.raises(ComponentError, match=r'finetuning.loggers: .* pip install "jaxft\[wandb\]"'):
        train(run_config(tmp_path / "run", ["wandb"]))
    assert not (tmp_path / "run" / "config.yml").exists()


@pytest.mark.parametrize(
    ("loggers", "path", "wanted"),
    [
        (["tensorbord"], "loggers.0", "did you mean 'tensorboard'?"),
        ([{"_type": "wandb", "projct": "x"}], "loggers.0.projct", "did you mean 'project'?"),
        ([{"_type": "wandb", "mode": "of"}], "loggers.0.mode", "'online' or 'offline'"),
        ([{"project": "x"}], "loggers.0", "needs '_type'"),
        ([3], "loggers.0", "holds a number"),
        (["tensorboard", {"_type": "tensorboard"}], "loggers", "'tensorboard' is there twice"),
        ([{"_type": "tensorboard", "timeout_seconds": 0}], "loggers.0.timeout_seconds", "greater than 0"),
        ("tensorboard", "loggers", "holds a text"),
    ],
)
def test_a_fault_is_named_with_its_path(tmp_path, loggers, path, wanted):
    with pytest.raises(ConfigError) as caught:
        run_config(tmp_path / "run", loggers)
    (fault,) = caught.value.faults
    assert fault.startswith(f"finetuning.{path}: ") and wanted in fault
