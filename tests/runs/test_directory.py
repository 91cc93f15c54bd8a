"""The run directory: one writer, whole files, no way out; real files and a second process."""

import contextlib
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
from types import SimpleNamespace

import pytest

from jaxft.errors import RunDirectoryError
from jaxft.runs.directory import RunDirectory
from jaxft.runs.files import RUN_FILES


@pytest.fixture
def directory(tmp_path):
    with RunDirectory.create(tmp_path / "run") as made:
        yield made


def test_a_second_writer_in_the_same_process_is_refused(directory):
    with pytest.raises(RunDirectoryError, match=f"in use by process {os.getpid()} "):
        RunDirectory.create(directory.path)


def test_no_lock_is_taken_through_a_link(tmp_path):
    (tmp_path / "theirs").write_text("theirs")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "LOCK").symlink_to(tmp_path / "theirs")
    with pytest.raises(RunDirectoryError, match=re.escape(f"'{tmp_path / 'run' / 'LOCK'}' is a symbolic link")):
        RunDirectory.create(tmp_path / "run")
    assert (tmp_path / "theirs").read_text() == "theirs"


def test_an_unusable_path_is_named_at_once(tmp_path):
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file", tmp_path / "file" / "run"):
        with pytest.raises(RunDirectoryError, match=re.escape(f"'{path}' cannot be written")):
            RunDirectory.create(path)


@pytest.mark.skipif(os.name != "posix" or os.geteuid() == 0, reason="nothing is unwritable for root")
def test_a_read_only_directory_is_found_at_once(tmp_path):
    (tmp_path / "run").mkdir(mode=0o500)
    with pytest.raises(RunDirectoryError, match="cannot be written"):
        RunDirectory.create(tmp_path / "run")


def test_a_run_that_was_cut_off_is_first_of_all_resumed(tmp_path):
    command = "jaxft resume runs/cut"
    with RunDirectory.create(tmp_path) as run:
        run.append_jsonl("training_metrics.jsonl", {"step": 0})
        run.write_json("environment.json", {"resume_command": command})
    with pytest.raises(RunDirectoryError, match=rf"`{command}`.* --overwrite"):
        RunDirectory.create(tmp_path)
    (tmp_path / "result.json").write_text("{}")  # it has ended
    with pytest.raises(RunDirectoryError) as caught:
        RunDirectory.create(tmp_path)
    assert command not in str(caught.value) and "--overwrite" in str(caught.value)


def test_a_run_is_not_overwritten_unasked(tmp_path):
    with RunDirectory.create(tmp_path) as first:
        first.write_text("config.yml", "seed: 0")
        first.append_jsonl("training_metrics.jsonl", {"step": 0})
    with pytest.raises(RunDirectoryError, match=r"already holds a run \(config.yml, training_metrics.jsonl\)"):
        RunDirectory.create(tmp_path)
    assert (tmp_path / "config.yml").read_text() == "seed: 0"
    with RunDirectory.open(tmp_path) as again:  # the refusal gave the lock back
        again.write_text("config.yml", "seed: 1")


def test_overwriting_removes_what_a_run_writes_and_nothing_else(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "weights").write_text("mine")
    with RunDirectory.create(tmp_path) as first:
        for name in RUN_FILES:
            first.write_text(name if "." in name else f"{name}/inner", "old")
    (tmp_path / "checkpoints" / "inner").unlink()
    (tmp_path / "checkpoints").rmdir()
    (tmp_path / "checkpoints").symlink_to(tmp_path / "elsewhere")
    with RunDirectory.create(tmp_path, overwrite=True) as second:
        assert (tmp_path / "result.json").exists()  # until the first write
        second.write_text("config.yml", "new")
    assert {path.name for path in tmp_path.iterdir()} == {"notes.txt", "elsewhere", "LOCK", "LOCK.holder", "config.yml"}
    assert (tmp_path / "elsewhere" / "weights").read_text() == "mine"


def test_overwriting_spares_what_no_run_made(tmp_path):
    (tmp_path / "checkpoints").mkdir()
    for _ in range(2):  # the refusal leaves no mark that would let the second try through
        with pytest.raises(RunDirectoryError, match="no run made it"):
            RunDirectory.create(tmp_path, overwrite=True)
    assert (tmp_path / "checkpoints").is_dir()


def files(path):
    found = {str(file.relative_to(path)): file.read_bytes() for file in path.rglob("*") if file.is_file()}
    return {name: content for name, content in found.items() if not name.startswith("LOCK")}


@pytest.mark.parametrize("left", ["config.yml", "checkpoints/0/arrays"])
def test_what_a_failed_start_left_is_no_run(tmp_path, left):
    with RunDirectory.create(tmp_path) as directory:
        directory.write_text(left, "old")
    with RunDirectory.create(tmp_path) as directory:
        directory.write_text("environment.json", "{}")
    assert files(tmp_path) == {"environment.json": b"{}"}
    (tmp_path / "LOCK.holder").unlink()
    with pytest.raises(RunDirectoryError, match="already holds a run"):  # or somebody's own files
        RunDirectory.create(tmp_path)


PROCESS = """
import os, sys, time
from jaxft.runs import console, directory, environment, metrics, plots
from jaxft.runs.directory import RunDirectory

print("jax" in sys.modules)
directory = RunDirectory.create(sys.argv[1])
directory.write_text("config.yml", "seed: 0")
child = os.fork()
if child == 0:
    directory.close()  # gives back nothing that is the parent's
    print(os.getpid(), flush=True)
    os.close(1)
time.sleep(600)
"""


@pytest.fixture(scope="module")
def process(tmp_path_factory):
    """One process that holds a directory beside a fork, and is killed."""
    found = SimpleNamespace(held=tmp_path_factory.mktemp("process") / "held")
    command = [sys.executable, "-c", PROCESS, found.held]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as holder:
        has_jax, orphan = (holder.stdout.readline() for _ in range(2))
        found.has_jax, orphan = has_jax == "True\n", int(orphan)
        try:
            found.refusals, found.pid = [], holder.pid
            for take in (RunDirectory.create, RunDirectory.open):
                with pytest.raises(RunDirectoryError) as caught:
                    take(found.held)
                found.refusals.append(str(caught.value))
            holder.send_signal(signal.SIGKILL)
            holder.wait()
            os.kill(orphan, 0)  # it lives on
            with RunDirectory.open(found.held) as reopened:
                found.holder = reopened.read_json("LOCK.holder")["pid"]
        finally:
            os.kill(orphan, signal.SIGKILL)
    return found


def test_a_second_process_is_told_who_holds_it_until_that_one_is_killed(process):
    assert len(process.refusals) == 2
    assert all(f"in use by process {process.pid} on host " in refusal for refusal in process.refusals)
    assert (process.held / "config.yml").read_text() == "seed: 0"


def test_a_forked_process_neither_frees_the_lock_nor_keeps_it(process):
    assert process.holder == os.getpid()


def test_runs_needs_no_jax(process):
    assert not process.has_jax


def test_only_a_run_can_be_opened(tmp_path):
    with pytest.raises(RunDirectoryError, match="no run to continue"):
        RunDirectory.open(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_files_stay_inside(directory, tmp_path):
    assert directory.file("a/b/c.txt") == directory.path / "a" / "b" / "c.txt"
    assert (directory.path / "a" / "b").is_dir()
    (directory.path / "out").symlink_to(tmp_path)
    for name in ("", ".", "..", "../x", "a/../../x", "/etc/x", str(directory.path / "x"), "out/x"):
        with pytest.raises(ValueError, match="is not the name of a file under"):
            directory.file(name)
    assert not (tmp_path / "x").exists()


def test_json_is_replaced_whole_or_not_at_all(directory):
    directory.write_json("result.json", {"b": 1, "a": [0.5, None, "é\ud800"]})
    assert directory.file("result.json").read_bytes().startswith(b'{\n  "b": 1,\n  "a": [\n')
    for value in ({"loss": math.nan}, {"loss": object()}):
        with pytest.raises(ValueError, match=r"'result\.json' cannot be written as JSON"):
            directory.write_json("result.json", value)
    assert directory.read_json("result.json") == {"b": 1, "a": [0.5, None, "é\ud800"]}
    assert [path.name for path in directory.path.iterdir() if path.suffix == ".tmp"] == []


def test_a_file_that_is_not_json_is_named(directory):
    directory.write_text("result.json", "{")
    with pytest.raises(ValueError, match=re.escape(f"'{directory.path / 'result.json'}' is not JSON")):
        directory.read_json("result.json")


def test_a_non_finite_figure_becomes_null_and_is_named(directory):
    row = {"loss": math.nan, "per_turn": [1.0, -math.inf], "kl": {"max": math.inf}, "ok": 2.0}
    path = directory.append_jsonl("rows.jsonl", row)
    assert json.loads(path.read_text()) == {
        "loss": None,
        "per_turn": [1.0, None],
        "kl": {"max": None},
        "ok": 2.0,
        "non_finite": {"loss": "nan", "per_turn.1": "-inf", "kl.max": "inf"},
    }
    assert math.isnan(row["loss"])
    with pytest.raises(ValueError, match="'non_finite'"):
        directory.append_jsonl("rows.jsonl", {"non_finite": 1})


def test_a_closed_directory_writes_nothing(directory):
    directory.close()
    directory.close()
    for write in (directory.write_text, directory.write_json):
        with pytest.raises(RunDirectoryError, match="is closed"):
            write("result.json", "x")
    with pytest.raises(RunDirectoryError, match="is closed"):
        directory.append_jsonl("rows.jsonl", {})
    assert not (directory.path / "result.json").exists()


@pytest.mark.parametrize("is_taken", [False, True])
def test_a_directory_that_was_removed_is_not_made_anew(tmp_path, is_taken):
    """Not where another process has a run of the same name by now, either."""
    path = tmp_path / "run"
    with RunDirectory.create(path) as lost:
        lost.append_jsonl("training_metrics.jsonl", {"step": 0})
        shutil.rmtree(path)
        with contextlib.ExitStack() as stack:
            if is_taken:
                stack.enter_context(RunDirectory.create(path)).write_text("config.yml", "seed: 1")
            before = sorted(each.name for each in path.glob("*"))
            for write in (
                lambda: lost.append_jsonl("training_metrics.jsonl", {"step": 1}),
                lambda: lost.write_text("config.yml", "seed: 0"),
                lambda: lost.file("checkpoints/3/state"),
            ):
                with pytest.raises(RunDirectoryError, match=re.escape(f"'{path}'")):
                    write()
            assert sorted(each.name for each in path.glob("*")) == before and path.exists() == is_taken


@pytest.mark.parametrize("folder", ["trajectories", "checkpoints", "bad_batches", "tensorboard", "extra", "model"])
def test_nothing_is_written_where_a_link_leads_out(tmp_path, folder):
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "theirs.jsonl").write_text("theirs\n")
    with RunDirectory.create(tmp_path / "run") as directory:
        (directory.path / folder).symlink_to(outside)
        for write in (directory.write_json, directory.append_jsonl):
            with pytest.raises(
                RunDirectoryError, match=f"{folder}/theirs.jsonl' is not .* a symbolic link leads from there"
            ):
                write(f"{folder}/theirs.jsonl", {})
        assert directory.log_sizes() == {}
        directory.cut_logs({})  # as a resume does
    with RunDirectory.create(tmp_path / "run", overwrite=True) as directory:
        directory.write_json(f"{folder}/ours.json", {})
        assert not (directory.path / folder).is_symlink()
    assert [path.name for path in outside.iterdir()] == ["theirs.jsonl"]
    assert (outside / "theirs.jsonl").read_text() == "theirs\n"


def test_no_link_in_the_place_of_a_file_is_followed_out(directory, tmp_path):
    (tmp_path / "theirs").write_text("theirs")
    for name in ("result.json", "training_metrics.jsonl"):
        (directory.path / name).symlink_to(tmp_path / "theirs")
        for write in (directory.write_json, directory.append_jsonl):
            with pytest.raises(ValueError, match="is not the name of a file under"):
                write(name, {})
    (directory.path / ".config.yml.tmp").symlink_to(tmp_path / "theirs")  # where a file is before it is whole
    directory.write_text("config.yml", "ours")
    assert (tmp_path / "theirs").read_text() == "theirs"
    assert (directory.path / "config.yml").read_text() == "ours"


@pytest.mark.parametrize("name", ["a\0b", "lone \ud800", "loop/x"])
def test_a_name_that_no_file_can_have_is_refused(directory, name):
    (directory.path / "loop").symlink_to(directory.path / "loop")
    with pytest.raises(ValueError, match="is not the name of a file under"):
        directory.append_jsonl(name, {})
