import asyncio
import gc
import io
import json
import logging
import os
import signal
import threading
import time
import weakref

import pytest

from jaxft.errors import ConfigError, JobFailed, NoLearningSignal, Stopped, TooManyFailures, TrajectoryError
from jaxft.harness import runtime
from jaxft.harness.builder import Builder
from jaxft.harness.commands import finetune
from jaxft.harness.config import config_from_mapping, load_config
from jaxft.harness.opening import open_session
from jaxft.harness.runtime import run_main, run_script
from jaxft.harness.strict_yaml import dump_yaml
from jaxft.harness.verbs import run_arguments
from jaxft.runs.console import Console


def run(mapping, tmp_path, use, **options):
    async def main():
        config = config_from_mapping(mapping, base_dir=tmp_path)
        async with open_session(config, **options) as session:
            return await use(session)

    return asyncio.run(main())


def test_what_an_earlier_run_has_left_is_freed_before_models_are_made(toy_run, tmp_path, monkeypatch):
    """The arrays of a run that has ended are part of cycles, and would be on the device beside the new ones."""

    class Cycle:
        def __init__(self):
            self.itself = self

    left, opened = weakref.ref(Cycle()), Builder.open

    async def open_builder(builder):
        assert left() is None
        await opened(builder)

    async def use(session):
        return True

    monkeypatch.setattr(Builder, "open", open_builder)
    gc.disable()
    try:
        assert run(toy_run, tmp_path, use)
    finally:
        gc.enable()


def test_a_session_trains_and_leaves_its_files(toy_run, tmp_path, toy_events):
    shown = io.StringIO()

    async def use(session):
        before = await session.evaluate()
        statuses = await session.train()
        session.write_result({"before": before.average_reward, "jobs": len(statuses)})
        return session.config

    config = run(toy_run, tmp_path, use, console=Console(shown))
    files = tmp_path / "run"
    result = json.loads((files / "result.json").read_text())
    assert (result["before"], result["jobs"], result["seed"]) == (1.0, 2, 0)
    assert result["seconds"] > 0 and "jax" in result["versions"]
    assert "before  " in shown.getvalue() and str(files / "result.json") in shown.getvalue()
    assert json.loads((files / "environment.json").read_text())["versions"]["python"]
    assert load_config(files / "config.yml").finetuning == config.finetuning
    assert toy_events.index("trainer cleaned up") < toy_events.index("llm closed")


class Terminal(io.StringIO):
    """A stream that says that it is a terminal."""

    def isatty(self):
        return True


def test_a_session_shows_what_goes_on(toy_run, tmp_path, monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    terminal = Terminal()
    run(toy_run, tmp_path, lambda session: session.train(), console=Console(terminal))
    shown = terminal.getvalue()
    assert "making workflow (toy_agent) (" in shown and "making trainer_adapters.local (toy_adapter) (" in shown
    assert "0 of 6 episodes, 0 tokens/s (" in shown


@pytest.mark.parametrize("status", ["failed", "canceled"])
def test_a_failed_job_is_an_error(toy_run, tmp_path, status, toy_events):
    toy_run["trainer_adapters"]["local"]["status"] = status
    with pytest.raises(JobFailed, match=f"job 'epoch-0' {status}: the toy said so"):
        run(toy_run, tmp_path, lambda session: session.train())
    assert "trainer cleaned up" in toy_events


@pytest.mark.parametrize("trainer", ["toy_trainer", "grpo_trainer"])
def test_a_job_that_cannot_be_submitted_ends_the_run_with_its_error(toy_run, tmp_path, capsys, trainer):
    toy_run["trainer_adapters"]["local"]["refuses"] = True
    toy_run["trainers"]["loop"]["_type"] = trainer
    assert script(tmp_path, toy_run, finetune) == TrajectoryError("").exit_code == 2
    assert capsys.readouterr().err.endswith("error: the toy refuses them\n")


@pytest.mark.parametrize(("metrics", "code"), [({"applied_updates": 0.0}, 3), ({"applied_updates": 1.0}, 0), ({}, 0)])
def test_a_run_of_another_trainer_that_trained_nothing_has_failed(toy_run, tmp_path, capsys, metrics, code):
    toy_run["trainer_adapters"]["local"]["metrics"] = metrics
    assert script(tmp_path, toy_run, finetune) == code
    shown = capsys.readouterr().err
    assert ("ToyTrainer trained nothing: the last of 2 jobs said: the toy said so" in shown) == (code == 3)


def test_so_has_one_that_submitted_nothing(toy_run, tmp_path, capsys):
    toy_run["trainers"]["loop"]["_type"] = "idle_trainer"
    assert script(tmp_path, toy_run, finetune) == 3
    assert "IdleTrainer trained nothing: no job was submitted" in capsys.readouterr().err


def test_training_must_be_enabled(toy_run, tmp_path):
    toy_run["finetuning"]["enabled"] = False
    with pytest.raises(ConfigError, match=r"finetuning\.enabled: is false"):
        run(toy_run, tmp_path, lambda session: session.train())


def test_an_evaluation_in_which_everything_fails_is_an_error(toy_run, tmp_path):
    toy_run["workflow"]["fail_on"] = ["a", "b", "c"]
    with pytest.raises(TooManyFailures, match=r"all 3 episodes failed; the first: example '0'.*cannot answer a"):
        run(toy_run, tmp_path, lambda session: session.evaluate())


def script(tmp_path, toy_run, main, *arguments):
    (tmp_path / "run.yml").write_text(dump_yaml(toy_run))
    parser = run_arguments("A script.", tmp_path / "run.yml")
    parser.add_argument("--smoke", action="store_true")
    return run_script(main, parser, arguments)


def test_a_script_takes_its_own_arguments_and_overrides(toy_run, tmp_path):
    seen = []

    async def main(config, arguments):
        seen.append((arguments.smoke, config.finetuning.num_epochs, config.finetuning.seed))

    options = [
        "--smoke",
        "--set",
        "finetuning.seed=1",
        "-o",
        "finetuning.num_epochs",
        "5",
        "--set",
        "finetuning.seed=2",
    ]
    assert script(tmp_path, toy_run, main, *options) == 0
    assert seen == [(True, 5, 2)]


def test_finetune_ends_with_a_result(toy_run, tmp_path, capsys):
    assert script(tmp_path, toy_run, finetune) == 0
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert (result["num_epochs"], result["jobs_completed"], result["model"]) == (2, 2, None)
    assert "jobs_completed  2" in capsys.readouterr().out

    assert script(tmp_path, toy_run, finetune) == 2
    assert "already holds a run" in capsys.readouterr().err
    assert script(tmp_path, toy_run, finetune, "--overwrite") == 0


@pytest.mark.parametrize(
    ("options", "code", "message"),
    [
        (["--set", "finetuning.sed=1"], 2, "finetuning.sed: no such field; did you mean 'seed'?"),
        (["--config-file", "nowhere.yml"], 2, "nowhere.yml: cannot be read"),
        (["--set", "eval.general.dataset={_type: jsonl, file_path: /nowhere/x}"], 2, "/nowhere/x: cannot be read"),
        (["--set", "trainer_adapters.local.status=failed"], 1, "job 'epoch-0' failed"),
    ],
)
def test_errors_become_one_message_and_a_code(toy_run, tmp_path, capsys, options, code, message):
    assert script(tmp_path, toy_run, finetune, *options) == code
    shown = capsys.readouterr().err
    assert shown.startswith("jaxft: error: ") and message in shown and "Traceback" not in shown


@pytest.mark.parametrize(
    ("error", "code"),
    [(NoLearningSignal("n"), 3), (TooManyFailures("t"), 3), (JobFailed("j"), 1), (KeyboardInterrupt(), 130)],
)
def test_exit_codes(error, code, capsys):
    async def main():
        raise error

    assert run_main(main) == code
    assert capsys.readouterr().err.startswith("jaxft: ")


def test_an_unforeseen_error_keeps_its_traceback():
    async def main():
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        run_main(main)


@pytest.mark.parametrize("arguments", [["--set", "a"], ["--set", "=1"], ["--nonsense"], ["-o", "a"]])
def test_a_wrong_command_line_is_code_2(arguments):
    with pytest.raises(SystemExit) as caught:
        run_script(finetune, run_arguments("x", "run.yml"), arguments)
    assert caught.value.code == 2


def test_handlers_of_a_program_take_the_records_that_they_took_before():
    root, own, taken = logging.getLogger(), logging.getLogger("a_programs_own"), []
    handler = logging.Handler()
    handler.emit = lambda record: taken.append(record.getMessage())
    root.addHandler(handler)
    own.setLevel(logging.DEBUG)

    async def main():
        for logger in (own, logging.getLogger("another")):
            logger.debug(f"debug of {logger.name}")
            logger.warning(f"warning of {logger.name}")

    try:
        assert root.level == logging.WARNING and run_main(main) == 0
    finally:
        root.removeHandler(handler)
        own.setLevel(logging.NOTSET)
    assert taken == ["debug of a_programs_own", "warning of a_programs_own", "warning of another"]


def test_a_trainer_is_told_dataset_and_validation_as_options(toy_run, tmp_path):
    (tmp_path / "rows.jsonl").write_text('{"question": "a", "answer": "A"}\n')
    toy_run["eval"]["validation"] = {"dataset": {"_type": "jsonl", "file_path": "rows.jsonl"}, "interval": 3}

    async def use(session):
        await session.train()
        return (await session.trainer()).run_config, session.config.finetuning

    told, own = run(toy_run, tmp_path, use)
    options = told.run_configuration
    assert (str(options.dataset), options.validation_dataset) == ("toy_rows", tmp_path / "rows.jsonl")
    assert (options.validation_interval, options.config_file) == (3, tmp_path / "run" / "config.yml")
    assert own.run_configuration is None and told.model_dump() == own.model_dump()


def test_a_notebook_gets_its_cell_back_although_a_function_blocks_the_run():
    began, released, ended = threading.Event(), threading.Event(), threading.Event()

    async def blocked():
        began.set()
        released.wait(60)
        try:
            await asyncio.sleep(0)
        finally:
            ended.set()

    def press():
        began.wait(60)
        for _ in range(3):
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.2)

    async def cell():
        runtime.run_to_result(blocked)

    pressing = threading.Thread(target=press)
    pressing.start()
    with pytest.raises(Stopped, match=r"blocks the run.*interrupted"):
        asyncio.run(cell())
    pressing.join()
    assert not ended.is_set()
    released.set()
    assert ended.wait(60)
