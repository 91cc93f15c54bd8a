"""Loggers of a configuration, in sessions with a backend that trains nothing: what they are told, and what they cannot
do to the run."""

import asyncio
import csv
import io
import json
import re
import sys
import threading
import time
from pathlib import Path

import pytest

import jaxft
from jaxft.errors import ComponentError, ConfigError, Stopped, TooManyFailures
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


def run_config(folder, loggers, imports=(), **finetuning):
    mapping = {
        "imports": list(imports),
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
    train(run_config(folder, ["own_logger", "tensorboard"]))
    (events,) = (folder / "tensorboard").iterdir()
    assert b"validation/avg_reward" in events.read_bytes() and b"reward_mean" in events.read_bytes()
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


def test_loggers_change_no_byte_of_the_metrics_and_what_fails_is_counted_in_the_timings(tmp_path, monkeypatch):
    monkeypatch.setattr("jaxft.runs.loggers.CALL_SECONDS", 0.2)
    hanging = {"_type": "own_logger", "does": "hangs"}
    closing = {"_type": "own_logger", "does": "fails to close"}
    shown = train(run_config(tmp_path / "with", [{"_type": "own_logger", "does": "fails"}, hanging, closing]))
    assert "OSError: gone away" in shown and (tmp_path / "with" / "result.json").exists()
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
    assert counted == sorted(counted) and counted[-1] > 0
    assert [row["logger_failures"] for row in rows(tmp_path / "without" / "timings.jsonl")] == [0] * 4


def test_tensorboard_is_the_default(tmp_path):
    config = run_config(tmp_path / "run", [])
    kept = {name: value for name, value in config.finetuning.model_dump().items() if name != "loggers"}
    assert [each.type_name for each in jaxft.FinetuneConfig(**kept).loggers] == ["tensorboard"]


def train_until_epoch_3_fails(config, monkeypatch):
    """Trains with a checkpoint before epoch 2, so that a resumed run repeats epoch 2, which is logged already."""
    collect = jaxft.GRPOTrainer.run_epoch

    async def fail_in_epoch_3(self, epoch, run_id):
        if epoch == 3:
            broken_examples.update("ab")
        return await collect(self, epoch, run_id)

    with monkeypatch.context() as patched, pytest.raises(TooManyFailures):
        patched.setattr(jaxft.GRPOTrainer, "run_epoch", fail_in_epoch_3)
        train(config)
    broken_examples.clear()


def test_a_resumed_run_says_from_which_epoch_it_repeats(tmp_path, monkeypatch):
    config = run_config(tmp_path / "run", ["own_logger"], checkpoints={"every": 2})
    train_until_epoch_3_fails(config, monkeypatch)
    ((status, result),) = calls("end")
    assert status == "failed" and "TooManyFailures" in result["error"]
    first = {(epoch, *sorted(metrics)): metrics for epoch, metrics, _ in calls("metrics")}

    heard.clear()
    train(config, resume=True)
    ((run,),) = calls("begin")
    assert (run.is_resumed, run.first_epoch) == (True, 2)
    told = [(epoch, "reward_mean" in metrics) for epoch, metrics, _ in calls("metrics")]
    assert told == [(2, False), (2, True), (3, True), (4, False)]  # the validation before epoch 2 once more
    for epoch, metrics, _ in calls("metrics")[:2]:
        assert first[epoch, *sorted(metrics)] == metrics
    assert calls("end")[0][0] == "completed"


def test_the_logger_of_the_page_writes_a_row_per_value_once(tmp_path, monkeypatch):
    page = (Path(__file__).parents[2] / "docs" / "loggers.md").read_text()
    (block,) = re.findall(r"```python\n(# csv_logger\.py\n.*?)```", page, re.DOTALL)
    (tmp_path / "csv_logger.py").write_text(block)
    monkeypatch.syspath_prepend(str(tmp_path))
    options = {"checkpoints": {"every": 2}, "imports": ["csv_logger"]}
    config = run_config(tmp_path / "run", [{"_type": "csv", "file_name": "all.csv"}], **options)
    train_until_epoch_3_fails(config, monkeypatch)
    assert "switched off" not in train(config, resume=True)
    with (tmp_path / "run" / "loggers" / "all.csv").open() as file:
        written = list(csv.reader(file))
    assert [int(epoch) for epoch, name, _ in written if name == "reward_mean"] == [0, 1, 2, 3]
    assert [int(epoch) for epoch, name, _ in written if name == "validation/avg_reward"] == [0, 2, 4]
    assert all(len(row) == 3 for row in written)


def test_a_signal_ends_a_run_as_stopped(tmp_path, monkeypatch):
    config = run_config(tmp_path / "run", ["own_logger"])

    async def cancel(self, epoch, run_id):
        raise Stopped("by the test")

    monkeypatch.setattr(jaxft.GRPOTrainer, "run_epoch", cancel)
    with pytest.raises(Stopped):
        train(config)
    assert calls("end")[0][0] == "stopped"


def test_a_logger_that_cannot_be_made_ends_the_run_before_it_begins(tmp_path):
    with pytest.raises(ComponentError, match=r"finetuning.loggers.0 \(own_logger\): OSError: no such server"):
        train(run_config(tmp_path / "run", [{"_type": "own_logger", "does": "is not made"}]))
    with pytest.raises(ComponentError, match=r"finetuning.loggers.0: .* a RunLogger, not str"):
        train(run_config(tmp_path / "run", [{"_type": "own_logger", "does": "is none"}]))
    assert not (tmp_path / "run" / "config.yml").exists()


def test_without_its_package_wandb_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)  # as if it were not installed
    monkeypatch.delitem(sys.modules, "jaxft.runs.weights_and_biases", raising=False)
    with pytest.raises(ComponentError, match=r'finetuning.loggers.0 \(wandb\): .* pip install "jaxft\[wandb\]"'):
        train(run_config(tmp_path / "run", ["wandb"]))
    assert not (tmp_path / "run" / "config.yml").exists()


@pytest.mark.parametrize(
    ("loggers", "path", "wanted"),
    [
        (["tensorbord"], "loggers.0", "did you mean 'tensorboard'?"),
        ([{"_type": "wandb", "projct": "x"}], "loggers.0.projct", "did you mean 'project'?"),
        ([{"project": "x"}], "loggers.0", "needs '_type'"),
        ([3], "loggers.0", "holds a number"),
        (["tensorboard", {"_type": "tensorboard"}], "loggers", "'tensorboard' is there twice"),
        ("tensorboard", "loggers", "holds a text"),
    ],
)
def test_a_fault_is_named_with_its_path(tmp_path, loggers, path, wanted):
    with pytest.raises(ConfigError) as caught:
        run_config(tmp_path / "run", loggers)
    (fault,) = caught.value.faults
    assert fault.startswith(f"finetuning.{path}: ") and wanted in fault


def wandb_records(path):
    """The records of a `.wandb` file: after 7 bytes, pieces with a crc (4 bytes), a length (2) and a kind (1).

    A record is one piece (kind 1) or several (2, 3, 4). No piece crosses a border of 32 KiB.
    """
    from wandb.proto.wandb_internal_pb2 import Record  # here, as only the tests of the mark have it

    data, found, record, at = path.read_bytes(), [], b"", 7
    while at + 7 <= len(data):
        if 32768 - at % 32768 < 7:
            at += 32768 - at % 32768
            continue
        length, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
        piece = data[at + 7 : at + 7 + length]
        record = piece if kind in (1, 2) else record + piece
        if kind in (1, 4):
            found.append(Record.FromString(record))
        at += 7 + length
    return found


class WandbRun:
    """The records in an offline folder of W&B."""

    def __init__(self, folder):
        records = wandb_records(next(folder.glob("*.wandb")))
        while not any(record.HasField("exit") for record in records):  # the package's process closes the file by itself
            time.sleep(0.05)
            records = wandb_records(next(folder.glob("*.wandb")))
        kinds = {
            kind: [record for record in records if record.HasField(kind)] for kind in ("run", "history", "artifact")
        }
        run = kinds["run"][0].run
        self.id, self.name, self.project, self.tags = run.run_id, run.display_name, run.project, list(run.tags)
        self.config = {item.key: json.loads(item.value_json) for item in run.config.update}
        self.history = []
        for record in kinds["history"]:
            values = {
                tuple(item.nested_key) or (item.key,): json.loads(item.value_json) for item in record.history.item
            }
            self.history.append({path[0]: value for path, value in values.items() if path[0][0] != "_"})
        self.tables = [json.loads(path.read_text())["data"] for path in sorted(folder.glob("files/media/table/*.json"))]
        self.artifacts = {each.artifact.type: each.artifact for each in kinds["artifact"]}
        summary = [item for record in records if record.HasField("summary") for item in record.summary.update]
        self.summary = {item.key: json.loads(item.value_json) for item in summary if item.key}
        self.bytes = b"".join(path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file())

    def epochs(self, metric):
        return [(row["epoch"], row[metric]) for row in self.history if metric in row]


@pytest.fixture
def wandb_folder(tmp_path, monkeypatch):
    """The folder of a run whose W&B package writes nowhere else."""
    for name in ("WANDB_DATA_DIR", "WANDB_CACHE_DIR", "WANDB_CONFIG_DIR", "HOME"):
        monkeypatch.setenv(name, str(tmp_path / "home"))
    for name in ("WANDB_API_KEY", "WANDB_MODE", "WANDB_PROJECT"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path / "seed_1"


def offline_runs(folder):
    return [WandbRun(each) for each in sorted((folder / "wandb").glob("offline-run-*"))]


@pytest.mark.loggers
def test_an_offline_run_of_wandb_holds_config_metrics_samples_and_artifacts(wandb_folder, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["jaxft", "--set", f"workflow.api_key={KEY}"])
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_TAGS", "x,y")
    monkeypatch.setattr("jaxft.runs.weights_and_biases.SAMPLES_PER_EPOCH", 3)
    shown = train(run_config(wandb_folder, [{"_type": "wandb", "project": "agents"}]))
    (run,) = offline_runs(wandb_folder)
    assert (run.name, run.project, run.tags) == ("seed_1", "agents", ["x", "y"])
    assert run.id in shown and "wandb sync" in shown and "switched off" not in shown
    assert run.config["finetuning"]["num_epochs"] == 4 and run.config["environment"]["versions"]["jaxft"]
    assert run.config["workflow"]["api_key"] == "***"
    for row in rows(wandb_folder / "training_metrics.jsonl"):
        epoch = row.pop("epoch")
        for name, value in row.items():
            assert (epoch, value) in run.epochs(name) and len(run.epochs(name)) == 4
    assert [epoch for epoch, _ in run.epochs("seconds")] == [0, 1, 2, 3]
    assert run.epochs("validation/avg_reward") == [(0, 0.5), (2, 0.5), (4, 0.5)]
    text = "user: my key is ***\n\nassistant: said"
    assert sorted(run.tables) == [
        [[epoch, "a", 1.0, text], [epoch, "a", 0.0, text], [epoch, "b", 0.0, text]] for epoch in range(4)
    ]
    assert "reward_plot" in run.artifacts and "model" not in run.artifacts
    assert run.artifacts["reward_plot"].manifest.contents[0].path == "reward_plot.png"
    assert run.summary["status"] == "completed" and run.summary["result"]["num_epochs"] == 4
    assert KEY.encode() not in run.bytes


@pytest.mark.loggers
def test_a_resumed_run_goes_on_with_its_wandb_run_and_doubles_nothing(wandb_folder, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    config = run_config(wandb_folder, ["wandb"], checkpoints={"every": 2})
    train_until_epoch_3_fails(config, monkeypatch)
    (before,) = offline_runs(wandb_folder)
    assert [epoch for epoch, _ in before.epochs("reward_mean")] == [0, 1, 2]
    assert before.summary["status"] == "failed" and "TooManyFailures" in before.summary["result"]["error"]
    shown = train(config, resume=True)
    assert "it keeps what it has of epochs 2 to 2" in shown
    same, after = offline_runs(wandb_folder)
    assert same.id == before.id == after.id
    assert [epoch for epoch, _ in after.epochs("reward_mean")] == [3]
    assert [epoch for epoch, _ in after.epochs("validation/avg_reward")] == [4]
    assert [{row[0] for row in table} for table in after.tables] == [{3}]


@pytest.mark.loggers
def test_wandb_is_asked_for_a_key_before_the_run_and_nobody_for_an_answer(wandb_folder):
    with pytest.raises(ComponentError, match=r"finetuning\.loggers: .*WANDB_API_KEY"):
        train(run_config(wandb_folder, ["wandb"]))
    assert not (wandb_folder / "config.yml").exists()


@pytest.mark.loggers
def test_a_server_that_does_not_answer_ends_no_run(wandb_folder, monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")  # where nothing listens
    for module in ("loggers", "weights_and_biases"):
        monkeypatch.setattr(f"jaxft.runs.{module}.CALL_SECONDS", 5.0)
    shown = train(run_config(wandb_folder, ["wandb"]))
    assert "0 (wandb): " in shown and "switched off" in shown and len(rows(wandb_folder / "timings.jsonl")) == 4
