"""A run that was ended goes on: what is refused, what is cut off, what a signal leaves behind."""

import asyncio
import json
import os
import shutil
import signal
import time
from pathlib import Path

import numpy as np
import pytest

from jaxft.cli import main
from jaxft.errors import ConfigError
from jaxft.files import OWN_KEYS, read_manifest, write_manifest
from jaxft.harness.checkpointing import find_changes
from jaxft.harness.contracts import TrainerAdapter
from jaxft.harness.data_models import TrainingJobRef, TrainingJobStatus, TrainingStatusEnum
from jaxft.harness.opening import open_session
from jaxft.harness.registry import TrainerAdapterConfig, TrainerConfig, register_trainer, register_trainer_adapter
from jaxft.harness.runtime import command_to_resume, run_script
from jaxft.harness.strict_yaml import dump_yaml
from jaxft.harness.verbs import run_arguments
from jaxft.runs.directory import RunDirectory
from tests.faults.injection import KILL_POINTS, limited_file_size, owner_of
from tests.harness.conftest import ToyTrainer, toy_events  # noqa: F401  (a fixture, used by name)


class SteadyTrainerConfig(TrainerConfig, name="steady_trainer"):
    stop_in: int | None = None
    stop_in_validation: int | None = None
    ending_seconds: float = 0.0
    scores: tuple[float, ...] = ()
    signal: int = signal.SIGTERM
    seconds: float = 60.0


class SteadyTrainer(ToyTrainer):
    """Logs a line per epoch and saves between them; sends itself a signal in the middle of one, when told to."""

    def __init__(self, config, directory):
        super().__init__(config)
        self.directory, self.epoch, self.validated = directory, 0, None

    def state(self):
        return {"epoch": self.epoch, "validated": self.validated}

    def restore_state(self, state):
        self.epoch, self.validated = state["epoch"], state["validated"]

    async def validate(self):
        """Return the score of this epoch, unless it is known, or the run stops."""
        scores = self.trainer_config.scores
        if self.is_stopping or not scores or self.validated == self.epoch:
            return None
        await self.checkpoint(self.epoch, is_written=False)
        if self.epoch == self.trainer_config.stop_in_validation:
            os.kill(os.getpid(), self.trainer_config.signal)
            await asyncio.sleep(self.trainer_config.seconds)
        self.validated = self.epoch
        return scores[self.epoch]

    async def run(self, num_epochs):
        statuses = []
        if self.epoch > num_epochs:
            raise ConfigError([f"finetuning.num_epochs: is {num_epochs}, but {self.epoch} epochs are trained already"])
        while True:
            score = await self.validate()
            await self.checkpoint(self.epoch, score=score, is_last=self.epoch == num_epochs)
            if self.epoch == num_epochs or self.is_stopping:
                return statuses
            if self.epoch == self.trainer_config.stop_in:
                os.kill(os.getpid(), self.trainer_config.signal)
                await asyncio.sleep(self.trainer_config.seconds)
            ref = await self.run_epoch(self.epoch, f"epoch-{self.epoch}")
            statuses.append(await self.trainer_adapter.wait_until_complete(ref))
            if self.trainer_config.ending_seconds and self.epoch == 1:
                self.is_ending_epoch = True
                os.kill(os.getpid(), self.trainer_config.signal)
                await asyncio.sleep(self.trainer_config.ending_seconds)
            self.directory.append_jsonl("training_metrics.jsonl", {"epoch": self.epoch})
            self.epoch += 1


@register_trainer(config_type=SteadyTrainerConfig)
async def steady_trainer(config, builder):
    yield SteadyTrainer(config, builder.directory)


class SteadyAdapterConfig(TrainerAdapterConfig, name="steady_adapter"):
    busy_seconds: float | None = None
    wants_arrays: bool = False
    save_seconds: float = 0.0
    is_well: bool = True
    signal_in_save: int | None = None
    large_from: int | None = None


class SteadyAdapter(TrainerAdapter):
    """Counts jobs, which complete at once; may be busy when a signal comes, and slow to save."""

    def __init__(self, config):
        super().__init__(config)
        self.jobs = self.saves = 0

    async def is_healthy(self):
        return self.adapter_config.is_well

    async def submit(self, trajectories):
        self.jobs += 1
        return TrainingJobRef(run_id=trajectories.run_id, backend="steady")

    async def status(self, ref):
        return TrainingJobStatus(run_id=ref.run_id, backend="steady", status=TrainingStatusEnum.COMPLETED)

    async def wait_until_complete(self, ref, poll_interval=10.0):
        return await self.status(ref)

    def log_progress(self, ref, metrics, output_dir=None):
        pass

    def is_busy(self):
        return self.adapter_config.busy_seconds is not None

    async def save_state(self, save):
        """In a thread, as the device has one: whoever waits may be cancelled, and the save goes on."""
        return await asyncio.to_thread(self._save, save)

    def _save(self, save):
        config = self.adapter_config
        is_large = config.large_from is not None and config.large_from <= self.jobs
        arrays = {"x": np.random.default_rng(0).normal(size=100_000)} if is_large else {}
        result = save({"jobs": self.jobs}, arrays)
        if result is True:  # and not the values that a boundary asks for
            self.saves += 1
            if self.saves - 1 == self.adapter_config.signal_in_save:
                os.kill(os.getpid(), signal.SIGTERM)
                time.sleep(self.adapter_config.save_seconds)
        return result

    async def restore_state(self, values, read):
        import jax.numpy as jnp

        like = {"x": jnp.zeros(2)} if self.adapter_config.wants_arrays else {}
        assert read(like) == {}
        self.jobs = values["jobs"]


@register_trainer_adapter(config_type=SteadyAdapterConfig)
async def steady_adapter(config, builder):
    yield SteadyAdapter(config)


@pytest.fixture
def run_file(toy_run, tmp_path, monkeypatch):
    """Writes a run of the steady trainer; fields of the trainer and of finetuning may be given."""
    monkeypatch.chdir(tmp_path)
    toy_run["trainers"]["loop"] = {"_type": "steady_trainer"}
    toy_run["trainer_adapters"]["local"] = {"_type": "steady_adapter"}
    toy_run["finetuning"] |= {"output_dir": "run", "num_epochs": 4, "grace_seconds": 1.0}

    def write(**finetuning):
        toy_run["finetuning"] |= finetuning
        (tmp_path / "run.yml").write_text(dump_yaml(toy_run))
        return ["finetune", "--config-file", "run.yml"]

    return write


def epochs_logged(folder=Path("run")):
    return [json.loads(line)["epoch"] for line in (folder / "training_metrics.jsonl").read_text().splitlines()]


def stopped(run_file, capsys, epoch=2, number=signal.SIGTERM, **finetuning):
    """A run that a signal ended in the middle of an epoch; what it said."""
    command = [*run_file(**finetuning), "--set", f"trainers.loop.stop_in={epoch}"]
    assert main([*command, "--set", f"trainers.loop.signal={int(number)}"]) == 128 + number
    return capsys.readouterr()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_saves_and_says_how_to_go_on(run_file, capsys, number):
    shown = stopped(run_file, capsys, number=number, checkpoints={"every": 100}).err
    assert f"jaxft: {number.name}: stopping; a second signal ends at once" in shown
    word = {signal.SIGINT: "interrupted", signal.SIGTERM: "terminated"}[number]
    assert shown.endswith(f"jaxft: saved as checkpoint 2\njaxft: {word}; continue with:\n  jaxft resume run\n")
    assert main(["resume", "run", "--set", "trainers.loop.stop_in=null"]) == 0
    assert "checkpoint 2" in capsys.readouterr().out
    assert epochs_logged() == [0, 1, 2, 3]
    result = json.loads(Path("run/result.json").read_text())
    assert (result["num_epochs"], result["jobs_completed"]) == (4, 2)


def test_an_update_that_runs_is_finished_within_the_grace_time(run_file, capsys):
    command = [*run_file(), "--set", "trainer_adapters.local.busy_seconds=0.3", "--set", "trainers.loop.stop_in=1"]
    assert main([*command, "--set", "trainers.loop.seconds=0.3"]) == 143
    shown = capsys.readouterr()
    assert "finishing the update, in at most 1 seconds" in shown.out and "saved as checkpoint 2" in shown.err
    assert epochs_logged() == [0, 1]


def test_the_end_of_an_epoch_is_waited_for_as_an_update_is(run_file, capsys):
    """Its functions may take long, and its update is in no checkpoint yet."""
    command = run_file(checkpoints={"every": 10})
    assert main([*command, "--set", "trainers.loop.ending_seconds=0.3"]) == 143
    assert "saved as checkpoint 2" in capsys.readouterr().err
    assert epochs_logged() == [0, 1]


@pytest.mark.parametrize("every", [1, 10])
def test_a_signal_in_a_validation_loses_no_epoch_and_no_score(run_file, capsys, every):
    """Checkpoint 3, the best, is saved without its score, and again with it."""
    scores = ["--set", "trainers.loop.scores=[0.1, 0.1, 0.1, 0.9, 0.2, 0.2, 0.2]"]
    command = [*run_file(checkpoints={"every": every}, num_epochs=6), *scores]
    assert main([*command, "--set", "trainers.loop.stop_in_validation=3"]) == 143
    assert "saved as checkpoint 3\n" in capsys.readouterr().err
    assert read_manifest(Path("run/checkpoints/3"))["score"] is None
    options = [] if every == 1 else ["--set", "trainers.loop.stop_in=3"]
    resume = ["resume", "run", "--set", "trainers.loop.stop_in_validation=null"]
    assert main([*resume, *options]) == (143 if options else 0)
    assert read_manifest(Path("run/checkpoints/3"))["score"] == 0.9
    assert main([*resume, "--set", "trainers.loop.stop_in=null"]) == 0
    kept = {step.name for step in Path("run/checkpoints").iterdir()}
    assert kept == {"3", "6"} | ({"5"} if every == 1 else set()) and epochs_logged() == [0, 1, 2, 3, 4, 5]


def test_one_that_takes_longer_is_given_up(run_file, capsys):
    command = [*run_file(grace_seconds=0.2), "--set", "trainer_adapters.local.busy_seconds=9"]
    assert main([*command, "--set", "trainers.loop.stop_in=1"]) == 143
    assert "saved as checkpoint 1" in capsys.readouterr().err  # no job was begun: the boundary is as it was
    assert epochs_logged() == [0]


def test_a_run_that_is_done_may_be_resumed_and_prolonged(run_file, capsys):
    assert main(run_file()) == 0
    result = json.loads(Path("run/result.json").read_text())
    assert main(["resume", "run"]) == 0
    assert json.loads(Path("run/result.json").read_text()).keys() == result.keys()
    assert epochs_logged() == [0, 1, 2, 3]
    assert main(["resume", "run", "--set", "finetuning.num_epochs=6"]) == 0
    assert epochs_logged() == [0, 1, 2, 3, 4, 5]
    assert "changed: finetuning.num_epochs: 4 -> 6" in capsys.readouterr().out
    resumes = [json.loads(line) for line in Path("run/resumes.jsonl").read_text().splitlines()]
    assert [(row["checkpoint"], row["changes"]) for row in resumes] == [(4, {}), (4, {"finetuning.num_epochs": [4, 6]})]
    assert "num_epochs: 6" in Path("run/config.yml").read_text()


def test_the_clock_of_a_run_is_that_of_all_its_sessions(run_file, capsys):
    """Its seconds are added up, and chat templates write the date of its first start."""
    stopped(run_file, capsys)
    folder = Path("run/checkpoints/2")
    about = {name: value for name, value in read_manifest(folder).items() if name not in OWN_KEYS}
    assert about["seconds"] > 0
    assert json.loads(Path("run/environment.json").read_text())["now"] == about["now"].split(".")[0]
    write_manifest(folder, about | {"seconds": 1000.0, "now": "2020-02-29T12:00:00.5"})
    assert main(["resume", "run", "--set", "trainers.loop.stop_in=null"]) == 0
    assert json.loads(Path("run/result.json").read_text())["seconds"] > 1000
    last = read_manifest(Path("run/checkpoints/4"))
    assert last["seconds"] > 1000 and last["now"] == "2020-02-29T12:00:00.500000"
    assert json.loads(Path("run/resumes.jsonl").read_text())["now"] == "2020-02-29T12:00:00"

    del about["seconds"], about["now"]  # as versions before wrote it
    write_manifest(Path("run/checkpoints/4"), about | {"step": 4})
    assert main(["resume", "run"]) == 0
    assert 0 < json.loads(Path("run/result.json").read_text())["seconds"] < 1000


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("finetuning.seed", "5", "finetuning.seed: was 0 and is 5"),
        ("trainers.loop._type", "toy_trainer", "trainers.loop._type: was 'steady_trainer' and is 'toy_trainer'"),
        ("finetuning.trainer_adapter", "other", "finetuning.trainer_adapter: was 'local' and is 'other'"),
    ],
)
def test_what_makes_another_run_is_refused(run_file, toy_run, capsys, field, value, message):
    toy_run["trainer_adapters"]["other"] = {"_type": "toy_adapter"}
    stopped(run_file, capsys)
    options = ["--set", "trainers.loop.stop_in=null"] if field != "trainers.loop._type" else []
    before = Path("run/config.yml").read_bytes()
    code = main(["finetune", "--config-file", "run.yml", "--resume", *options, "--set", f"{field}={value}"])
    assert code == 2
    shown = capsys.readouterr().err
    assert "the resumed run" in shown and message in shown
    assert Path("run/config.yml").read_bytes() == before and epochs_logged() == [0, 1]


def test_a_data_set_that_changed_is_refused(run_file, toy_run, toy_events, capsys):  # noqa: F811
    rows = ['{"question": "a", "answer": "A"}\n', '{"question": "b", "answer": "B"}\n']
    data = Path("rows.jsonl")
    data.write_text("".join(rows))
    toy_run["eval"]["general"]["dataset"] = {"_type": "jsonl", "file_path": "rows.jsonl"}
    stopped(run_file, capsys)
    before = contents(Path("run"))
    toy_events.clear()
    resume = ["resume", "run", "--set", "trainers.loop.stop_in=null"]
    for other in ("".join(reversed(rows)), rows[0], "".join(rows).replace("B", "C")):
        data.write_text(other)
        assert main(resume) == 2
        assert "eval.general.dataset: the examples are not those of checkpoint 2" in capsys.readouterr().err
        assert contents(Path("run")) == before and toy_events == []
    data.write_text("\n".join(rows))  # in other lines, or in another place
    assert main([*resume, "--set", f"eval.general.dataset.file_path={data.rename('moved.jsonl')}"]) == 0
    assert epochs_logged() == [0, 1, 2, 3]


@pytest.mark.parametrize(
    "field",
    [
        *(f"llms.policy.{name}" for name in ("path", "preset", "tokenizer", "dtype")),
        "trainer_adapters.local.loss.reference.path",
    ],
)
def test_a_model_is_what_a_run_is(field):
    from fnmatch import fnmatchcase

    from jaxft.harness.checkpointing import IMMUTABLE

    assert any(fnmatchcase(field, pattern) for pattern in IMMUTABLE)
    assert not any(fnmatchcase("trainer_adapters.local.optimizer.learning_rate", pattern) for pattern in IMMUTABLE)


def test_what_was_logged_after_the_checkpoint_is_cut_off(run_file, capsys):
    stopped(run_file, capsys)
    folder = Path("run")
    log, late = folder / "training_metrics.jsonl", folder / "extra" / "late.jsonl"
    with log.open("a") as stream:
        stream.write('{"epoch": 2}\n{"epo')
    late.parent.mkdir()
    late.write_text("{}\n")
    (folder / "mine.jsonl").write_text("{}\n")
    assert main(["resume", "run", "--set", "trainers.loop.stop_in=null"]) == 0
    assert epochs_logged() == [0, 1, 2, 3] and not late.exists() and (folder / "mine.jsonl").exists()


def test_a_log_that_lost_lines_is_said(run_file, capsys):
    stopped(run_file, capsys)
    os.truncate("run/training_metrics.jsonl", 13)
    assert main(["resume", "run", "--set", "trainers.loop.stop_in=null"]) == 0
    shown = capsys.readouterr().out
    assert "warning: " in shown and "training_metrics.jsonl has 13 bytes, but had 26 when the checkpoint was" in shown
    assert epochs_logged() == [0, 2, 3]


def test_without_a_finished_checkpoint_a_run_begins_anew(run_file, capsys):
    stopped(run_file, capsys, epoch=1)
    for step in Path("run/checkpoints").iterdir():
        (step / "manifest.json").unlink()
    assert main(["resume", "run", "--set", "trainers.loop.stop_in=null"]) == 0
    shown = capsys.readouterr().out
    assert "checkpoint 1 is unfinished" in shown
    assert "no checkpoint was finished: the run starts from its beginning" in shown
    assert epochs_logged() == [0, 1, 2, 3]


@pytest.mark.parametrize("left", ["result.json", "model", "two epochs"])
def test_what_was_trained_is_never_taken_for_a_beginning(run_file, capsys, left):
    """Without its checkpoints: never made, or removed to free the disk."""
    if left == "two epochs":
        stopped(run_file, capsys)
    else:
        assert main(run_file(checkpoints={"every": None})) == 0
        assert "finetuning.checkpoints.every is null: this run cannot be continued" in capsys.readouterr().out
        if left == "model":
            Path("run/result.json").unlink()
            Path("run/model").mkdir()
    shutil.rmtree("run/checkpoints", ignore_errors=True)
    before = contents(Path("run"))
    assert main(["resume", "run", "--set", "finetuning.num_epochs=9"]) == 2
    error = capsys.readouterr().err
    assert "no finished checkpoint" in error and "--overwrite" in error
    assert contents(Path("run")) == before


def contents(folder):
    found = {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    return {name: content for name, content in found.items() if "LOCK" not in name}


def test_a_resume_that_is_refused_changes_nothing(run_file, capsys):
    """The checkpoint does not fit: found out only when all parts have been made."""
    assert main(run_file()) == 0
    Path("run/model").mkdir()
    Path("run/model/weights").write_text("the only ones")
    before = contents(Path("run"))
    assert main(["resume", "run", "--set", "trainer_adapters.local.wants_arrays=true"]) == 2
    assert "checkpoint 4 does not fit this run (1 differences)" in capsys.readouterr().err
    assert contents(Path("run")) == before
    assert main(["resume", "run"]) == 0


def test_a_run_without_its_configuration_is_not_resumed(run_file, capsys):
    assert main(run_file()) == 0
    Path("run/config.yml").unlink()
    before = contents(Path("run"))
    assert main([*run_file(seed=7), "--resume"]) == 2
    assert "config.yml: cannot be read (No such file or directory), and no run can" in capsys.readouterr().err
    assert contents(Path("run")) == before
    assert main(["resume", "run"]) == 2


def test_fewer_epochs_than_are_trained_are_refused(run_file, capsys):
    assert main(run_file()) == 0
    assert main(["resume", "run", "--set", "finetuning.num_epochs=2"]) == 2
    assert "finetuning.num_epochs: is 2, but 4 epochs are trained already" in capsys.readouterr().err


def test_a_second_training_of_one_session_goes_on_from_the_first(run_file, tmp_path):
    run_file()
    epochs = []

    async def script(config, arguments):
        async with open_session(config, resume=arguments.resume) as session:
            for _ in range(2):
                await session.train()
                epochs.append((await session.trainer()).epoch)

    parser = run_arguments("A script.", tmp_path / "run.yml")
    assert run_script(script, parser, ["--set", "trainers.loop.stop_in=2"]) == 143
    assert run_script(script, parser, ["--resume"]) == 0
    assert epochs == [4, 4] and epochs_logged() == [0, 1, 2, 3]


def test_a_signal_in_the_middle_of_a_save_saves_once(run_file, capsys):
    command = [*run_file(checkpoints={"every": 1}), "--set", "trainer_adapters.local.save_seconds=0.5"]
    assert main([*command, "--set", "trainer_adapters.local.signal_in_save=2"]) == 143
    assert "saved as checkpoint 2\njaxft: terminated; continue with:\n  jaxft resume run\n" in capsys.readouterr().err
    options = ["--set", "trainer_adapters.local.signal_in_save=null"]
    assert main(["resume", "run", *options]) == 0
    assert epochs_logged() == [0, 1, 2, 3]


def test_a_run_that_makes_no_checkpoints_says_so_when_it_is_stopped(run_file, capsys):
    shown = stopped(run_file, capsys, checkpoints={"every": None}).err
    assert shown.endswith("jaxft: not saved: this run makes no checkpoints\njaxft: terminated\n")


def test_a_checkpoint_that_cannot_be_written_stops_the_run(run_file, capsys):
    for first, way_out in ((0, "then start the run again"), (2, "then continue the run with --resume")):
        options = [f"finetuning.output_dir=stop{first}", f"trainer_adapters.local.large_from={first}"]
        with limited_file_size(100_000):
            code = main([*run_file(), *(word for option in options for word in ("--set", option))])
        error = capsys.readouterr().err
        place = Path(f"stop{first}/checkpoints/{first}").absolute()
        assert code == 1 and f"{place}' cannot be written: File too large; " in error
        assert way_out in error and "Traceback" not in error and error.count("jaxft: ") == 1


def test_parts_that_save_nothing_are_named(run_file, toy_run, capsys):
    toy_run["trainer_adapters"]["local"] = {"_type": "toy_adapter"}
    stopped(run_file, capsys)
    assert main(["resume", "run", "--set", "trainers.loop.stop_in=null"]) == 0
    assert "warning: ToyAdapter saved no state" in capsys.readouterr().out


@pytest.mark.parametrize("options", [[], ["--resume"]])
def test_a_run_that_wrote_nothing_yet_is_begun(run_file, options):
    with RunDirectory.create("run") as directory:
        directory.write_json("environment.json", {})
    assert main([*run_file(), *options]) == 0
    assert epochs_logged() == [0, 1, 2, 3]


def test_the_configuration_of_a_resumed_run_keeps_its_bytes(run_file, capsys):
    stopped(run_file, capsys)
    before = Path("run/config.yml").read_text()
    assert main(["resume", "run", "--set", "trainers.loop.stop_in=null"]) == 0
    assert Path("run/config.yml").read_text().replace("stop_in: null", "stop_in: 2") == before.replace(
        "output_dir: run", f"output_dir: {Path('run').absolute()}"
    )


def test_folders_without_a_run_and_runs_of_scripts_are_told_apart(run_file, tmp_path, capsys):
    assert main(["resume", "nowhere"]) == 2
    assert "nowhere: holds no run to continue: it has no config.yml" in capsys.readouterr().err
    assert main([*run_file(), "--resume"]) == 2
    assert "no run to continue in 'run'" in capsys.readouterr().err

    async def script(config, arguments):
        async with open_session(config, resume=arguments.resume, overwrite=arguments.overwrite) as session:
            session.notes["before"] = 3
            await session.train()

    assert run_script(script, run_arguments("A script.", tmp_path / "run.yml"), []) == 0
    assert main(["resume", "run"]) == 2
    shown = capsys.readouterr().err
    assert "a script made this run" in shown and "\n  python " in shown
    assert "--resume" in shown


def test_notes_come_back(run_file, tmp_path, capsys):
    run_file()
    seen = []

    async def script(config, arguments):
        async with open_session(config, resume=arguments.resume) as session:
            seen.append(session.is_resumed)
            if not session.is_resumed:
                session.notes["before"] = {"wins": 3}
            seen.append(dict(session.notes))
            await session.train()

    parser = run_arguments("A script.", tmp_path / "run.yml")
    assert run_script(script, parser, ["--set", "trainers.loop.stop_in=1"]) == 143
    assert "continue with:\n  python" in capsys.readouterr().err
    assert run_script(script, parser, ["--resume"]) == 0
    assert seen == [False, {"before": {"wins": 3}}, True, {"before": {"wins": 3}}]


def test_fresh_starts_in_used_directories_are_refused(run_file, capsys):
    assert main(run_file()) == 0
    assert main(run_file()) == 2
    assert "already holds a run" in capsys.readouterr().err and epochs_logged() == [0, 1, 2, 3]
    with pytest.raises(SystemExit):
        main([*run_file(), "--resume", "--overwrite"])
    assert "not allowed with argument" in capsys.readouterr().err


def test_a_directory_that_is_taken_or_not_writable_is_found_before_any_model(run_file, toy_events, tmp_path, capsys):  # noqa: F811
    with RunDirectory.create("run"):
        assert main([*run_file(), "--overwrite"]) == 2
        assert f"is in use by process {os.getpid()} on host" in capsys.readouterr().err
    (tmp_path / "file").write_text("")
    assert main(run_file(output_dir="file/run")) == 2
    assert "cannot be written" in capsys.readouterr().err
    assert toy_events == []


MISSING = "{_type: jsonl, file_path: nope.jsonl}"


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (["--dataset", "nope.jsonl"], "nope.jsonl: cannot be read"),
        (["--set", f"eval.validation.dataset={MISSING}"], "nope.jsonl: cannot be read"),
        (["--set", "llms.policy={_type: local_policy, path: ./no_model}"], "no_model"),
        (["--set", "workflow.llm=nobody"], "nobody"),
    ],
)
def test_an_overwrite_that_cannot_begin_leaves_the_earlier_run(run_file, toy_events, capsys, options, named):  # noqa: F811
    assert main(run_file()) == 0
    Path("run/model").mkdir()
    Path("run/model/weights").write_text("the only ones")
    before = contents(Path("run"))
    toy_events.clear()
    assert main([*run_file(num_epochs=9), "--overwrite", *options]) in (1, 2)
    assert named in capsys.readouterr().err
    assert contents(Path("run")) == before
    if "nope" in named:  # datasets are read before models
        assert toy_events == []
    if named == "nobody":
        assert main(["resume", "run"]) == 0
        assert main([*run_file(num_epochs=2), "--overwrite"]) == 0
        assert epochs_logged() == [0, 1] and not Path("run/model").exists()


def test_secrets_that_a_run_did_not_keep_are_asked_for(run_file, toy_run, capsys):
    toy_run["llms"]["policy"]["api_key"] = "sk-0123456789"
    stopped(run_file, capsys)
    assert main(["resume", "run", "--set", "trainers.loop.stop_in=null"]) == 2
    assert "llms.policy.api_key: holds a secret" in capsys.readouterr().err
    options = ["--set", "llms.policy.api_key=sk-0123456789", "--set", "trainers.loop.stop_in=null"]
    assert main(["resume", "run", *options]) == 0
    assert "sk-0123456789" not in "".join(p.read_text() for p in Path("run").glob("*.json*"))


def test_secrets_inside_of_texts_are_asked_for_too(run_file, toy_run, monkeypatch, capsys):
    monkeypatch.setenv("JUDGE_API_KEY", "sk-0123456789")
    toy_run["workflow"]["fail_on"] = ["Bearer ${JUDGE_API_KEY}"]
    stopped(run_file, capsys)
    assert main(["resume", "run", "--set", "trainers.loop.stop_in=null"]) == 2
    assert "workflow.fail_on.0: holds a secret" in capsys.readouterr().err
    options = ["--set", "workflow.fail_on.0='Bearer ${JUDGE_API_KEY}'", "--set", "trainers.loop.stop_in=null"]
    assert main(["resume", "run", *options]) == 0


def test_other_versions_are_said(run_file, capsys):
    stopped(run_file, capsys)
    about = json.loads(Path("run/environment.json").read_text())
    about["versions"]["optax"] = "0.0.1"
    Path("run/environment.json").write_text(json.dumps(about))
    assert main(["resume", "run", "--set", "trainers.loop.stop_in=null"]) == 0
    assert "warning: optax was 0.0.1 when the run was begun and is" in capsys.readouterr().out


def test_every_point_to_kill_a_run_at_is_a_function():
    assert all(callable(getattr(*owner_of(point))) for point in KILL_POINTS.values())


def test_changes_in_words():
    assert find_changes({"a": 1, "b": {"c": [1]}}, {"a": 1, "b": {"c": [2], "d": None}}) == {"b.c": ([1], [2])}
    assert command_to_resume(["run.py", "--resume", "--set", "judge.api_key=sk-1"]) == (
        "python run.py --set 'judge.api_key=***' --resume"
    )
