"""A disk that is full, for real: a limit on the size of files in a process of its own, and a file system of no room."""

import errno
import json
import os
import shutil
import subprocess
import sys

import pytest

from jaxft.runs.directory import RunDirectory
from jaxft.runs.disk import DiskFull, disk_errors

LIMITED = """
import asyncio, json, resource, signal, sys
from jaxft.harness.runtime import exit_code_of
from jaxft.runs.directory import RunDirectory
from jaxft.runs.disk import DiskFull, disk_errors
from jaxft.runs.metrics import MetricsLog

def limit(size):
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))

signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
directory = RunDirectory.create(sys.argv[1])
"""


def limited(tmp_path, program):
    """How a program ends that may not write files longer than its `limit`."""
    return subprocess.run(
        [sys.executable, "-c", LIMITED + program, tmp_path / "run"], capture_output=True, text=True, timeout=120
    )


def test_a_row_that_does_not_fit_leaves_no_half_line_and_one_that_fits_follows(tmp_path):
    run = limited(
        tmp_path,
        """
for step in range(3):
    directory.append_jsonl("training_metrics.jsonl", {"step": step})
limit(50)
try:
    directory.append_jsonl("training_metrics.jsonl", {"step": 3, "text": "x" * 100})
except DiskFull as error:
    print(error)
limit(resource.RLIM_INFINITY)
directory.append_jsonl("training_metrics.jsonl", {"step": 4})
""",
    )
    path = tmp_path / "run" / "training_metrics.jsonl"
    said = run.stdout
    assert said.startswith(f"'{path}' cannot be written: File too large; ") and said.count("\n") == 1, run.stderr
    assert int(said.split("; ")[1].split()[0]) > 0  # bytes that are free
    assert said.endswith("file-size limit (ulimit -f)\n")
    assert [json.loads(row)["step"] for row in path.read_text().splitlines()] == [0, 1, 2, 4]


def test_a_file_that_does_not_fit_leaves_the_old_one(tmp_path):
    run = limited(
        tmp_path,
        """
directory.write_json("result.json", {"old": 1})
limit(50)
try:
    directory.write_json("result.json", {"new": "x" * 100})
except DiskFull:
    print("refused")
""",
    )
    files = {path.name for path in (tmp_path / "run").iterdir()}
    assert run.stdout == "refused\n" and files == {"LOCK", "LOCK.holder", "result.json"}
    assert json.loads((tmp_path / "run" / "result.json").read_text()) == {"old": 1}


def test_a_run_ends_in_one_line_and_code_1(tmp_path):
    """Also what tensorboard had not written: neither it, nor closing it, hangs or complains a second time."""
    run = limited(
        tmp_path,
        """
async def main():
    log = MetricsLog(directory)
    limit(3000)
    try:
        for step in range(1000):
            log.log(step, {"loss": 0.5, "reward": 1.0}, {"seconds": 0.1})
    finally:
        log.close()

sys.exit(exit_code_of(main))
""",
    )
    assert (run.returncode, run.stdout) == (1, "")
    assert run.stderr.startswith("jaxft: error: '") and run.stderr.count("\n") == 1
    assert "cannot be written: File too large; " in run.stderr
    rows = (tmp_path / "run" / "training_metrics.jsonl").read_text().splitlines()
    assert [json.loads(row)["epoch"] for row in rows] == list(range(len(rows)))


def test_writers_that_are_not_pythons_own_are_understood(tmp_path):
    """Weights and checkpoints are written by code in Rust and C++, which has exceptions of its own."""
    run = limited(
        tmp_path,
        """
import numpy as np
from safetensors.numpy import save_file
limit(5000)
try:
    with disk_errors(directory.path / "model"):
        save_file({"weights": np.zeros(10000)}, directory.path / "model.safetensors")
except DiskFull as error:
    print(type(error.__cause__).__name__, error)
""",
    )
    assert run.stdout.startswith(f"SafetensorError '{tmp_path / 'run' / 'model'}' cannot be written: File too large")


UNTIL_FULL = """
import os, sys
from pathlib import Path
from jaxft.runs.directory import RunDirectory
from jaxft.runs.disk import DiskFull

directory = RunDirectory.create(sys.argv[1])
path = directory.write_bytes("extra/weights", bytes(20000))
try:
    for step in range(10000):
        directory.append_jsonl("rows.jsonl", {"step": step})
except DiskFull as error:
    print(error)
try:
    directory.write_bytes("extra/weights", bytes(20001))
except DiskFull as error:
    print(error)
rows = (directory.path / "rows.jsonl").read_bytes()
last = b'{"step": %d}\\n' % (step - 1)
print(len(path.read_bytes()), sorted(os.listdir(path.parent)), rows.endswith(last))
path.unlink()
directory.append_jsonl("rows.jsonl", {"step": step})
"""


def test_a_file_system_without_room(tmp_path):
    """A small one, in memory and in a name space of its own, where the machine lets us have one."""
    place = tmp_path / "small"
    place.mkdir()
    alone = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c"]
    mount = 'mount -t tmpfs -o size=64k none "$1"'
    if shutil.which("unshare") is None or subprocess.run([*alone, mount, "sh", place], capture_output=True).returncode:
        pytest.skip("no file system can be mounted here")
    command = [*alone, f'{mount} && exec "$2" -c "$3" "$1/run"', "sh", place, sys.executable, UNTIL_FULL]
    run = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    appended, written, left = run.stdout.splitlines()
    said = "cannot be written: No space left on device; "
    assert appended.startswith(f"'{place / 'run' / 'rows.jsonl'}' {said}0 bytes are free")
    assert written.startswith(f"'{place / 'run' / 'extra' / 'weights'}' {said}")
    assert left == "20000 ['weights'] True"


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG])
def test_a_cause_is_looked_for(number, tmp_path):
    with pytest.raises(DiskFull) as caught, disk_errors(tmp_path / "not" / "there"):
        raise RuntimeError("the writer failed") from OSError(number, os.strerror(number))
    assert os.strerror(number) in str(caught.value) and caught.value.exit_code == 1
    with pytest.raises(DiskFull) as again, disk_errors(tmp_path):
        raise caught.value
    assert again.value is caught.value


def test_other_errors_pass(tmp_path):
    for error in (PermissionError(errno.EACCES, "no"), ValueError("no"), KeyboardInterrupt()):
        with pytest.raises(type(error)) as caught, disk_errors(tmp_path):
            raise error
        assert caught.value is error


def test_a_directory_on_a_full_disk_is_no_bad_input(tmp_path):
    """It is a failed run, which can be repeated as it is when there is room."""
    run = limited(
        tmp_path,
        """
directory.close()
limit(1)

async def main():
    RunDirectory.create(sys.argv[1])

sys.exit(exit_code_of(main))
""",
    )
    assert run.returncode == 1 and "LOCK.holder' cannot be written: File too large" in run.stderr
    with RunDirectory.open(tmp_path / "run"):
        pass
