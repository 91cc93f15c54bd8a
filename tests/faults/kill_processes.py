"""Kills one of the two processes of small runs, resumes them with two or another number, and compares the runs.

    python tests/faults/kill_processes.py               # 20 kills: half an hour
    python tests/faults/kill_processes.py --kills 1 --runs everything

Half of the kills of each run are at a named point (`tests/faults/injection.py`), half at any moment, and of these every
third is a SIGTERM, which stops and saves both. A kill that comes after the run's end, or at a point that its process
never reaches, is drawn again. Every second run goes on with another number of processes: one or four. Exit code 1 when
a run that goes on with two processes differs by a bit from one that nothing happened to, when the first gradient of
another differs by more than 1e-5, when a process is left, or when the end of one was noticed late.
"""

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.budget import report_programs
from tests.faults.compare import differences
from tests.faults.injection import KILL_POINTS, ROOT
from tests.faults.kill_and_resume import OFTEN

HERE = Path(__file__).parent
RUNS = ("everything", "overlap", "lora", "dpo")
SLOWEST_END = 10.0
"""Seconds within which all have to end after one was killed; the launcher then gives them 30 more."""
PATIENCE = 600
"""Seconds after which a run hangs."""
ELSEWHERE = {1: 2, 2: 2, 4: 4}
"""Devices in all, by number of processes."""


def start(arguments: list[str], processes: int, log: Path, at: str | None = None) -> "subprocess.Popen[bytes]":
    """Starts `jaxft ARGUMENTS` in so many processes, one of which dies at a point such as `1/update:2`."""
    program = ["-m", "jaxft.cli", *arguments]
    inside = program if at is None else [str(HERE / "injection.py"), at, *program]
    launched = ["-m", "jaxft.cli", "launch", "-n", str(processes), sys.executable, *inside]
    devices = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={ELSEWHERE[processes]}"
    command = [sys.executable, *(launched if processes > 1 else inside)]
    with log.open("ab") as output:
        return subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, cwd=ROOT, env={**os.environ, "XLA_FLAGS": devices}
        )


def finetune(name: str, folder: Path) -> list[str]:
    """The arguments of a run into a folder."""
    mesh, output = ["-o", "llms.policy.mesh", "{data: -1}"], ["-o", "finetuning.output_dir", str(folder)]
    return ["finetune", "--config-file", str(HERE / f"{name}.yml"), *mesh, *output]


def children(pid: int) -> list[int]:
    """The processes that a process has started."""
    return [int(each) for each in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def left_of(folder: Path) -> list[int]:
    """The processes with a folder in their command line."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal() and int(entry.name) != os.getpid():
            try:
                command = (entry / "cmdline").read_bytes()
            except OSError:
                continue
            found += [int(entry.name)] if str(folder).encode() in command else []
    return found


def ended(process: "subprocess.Popen[bytes]", log: Path) -> int:
    """The exit code of a run; one that hangs is ended with all its processes."""
    try:
        return process.wait(PATIENCE)
    except subprocess.TimeoutExpired:
        process.terminate()
        process.wait()
        raise SystemExit(f"it hangs\n{log.read_text()[-4000:]}") from None


def kill_once(
    name: str, folder: Path, is_at_point: bool, kind: int, draw: random.Random, seconds: float, log: Path
) -> tuple[str, float] | None:
    """Starts a run and kills one of its processes; how, in words, and the seconds until all had ended.

    None if it ended before that.
    """
    victim, late = draw.randrange(2), 0.0
    if is_at_point:
        points = list(KILL_POINTS)
        point = points[draw.randrange(len(points))]
        where = f"{victim}/{point}:{draw.randrange(OFTEN.get(point, 4))}"
        code = ended(start(finetune(name, folder), 2, log, at=where), log)
    else:
        moment = draw.uniform(0.2 * seconds, 0.8 * seconds)
        number_of_signal = signal.SIGTERM if kind == 2 else signal.SIGKILL
        where = f"{victim} after {moment:.1f} s, {number_of_signal.name}"
        process = start(finetune(name, folder), 2, log)
        time.sleep(moment)
        if process.poll() is None:
            os.kill(children(process.pid)[victim], number_of_signal)
        began = time.monotonic()
        code = ended(process, log)
        late = time.monotonic() - began if number_of_signal == signal.SIGKILL else 0.0  # or it finishes an update
    wanted = (1, 128 + signal.SIGKILL, 128 + signal.SIGTERM, 128 + signal.SIGABRT)
    if code == 0:
        return None
    if code not in wanted:
        raise SystemExit(f"{name} ({where}): it ended with {code}\n{log.read_text()[-4000:]}")
    return f"{where}, exit {code}", late


def rows_of(folder: Path) -> list[dict[str, Any]]:
    """The metrics of a run, by epoch."""
    return [json.loads(line) for line in (folder / "training_metrics.jsonl").read_text().splitlines()]


def largest_difference(folder: Path, whole: Path, first: int) -> float:
    """The relative difference of the first gradient norm after a resume."""
    mine, theirs = ([row for row in rows_of(each) if row["epoch"] >= first] for each in (folder, whole))
    pairs = [(a["grad_norm"], b["grad_norm"]) for a, b in zip(mine, theirs, strict=True) if "grad_norm" in b]
    return abs(pairs[0][0] - pairs[0][1]) / max(abs(pairs[0][1]), 1e-12) if pairs else 0.0


def main() -> int:
    """Prints a line per kill, and a summary."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=20, help="in all (default %(default)s)")
    parser.add_argument("--runs", nargs="+", choices=RUNS, default=RUNS)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    draw, spoiled, slowest, num_random = random.Random(arguments.seed), 0, 0.0, 0
    with tempfile.TemporaryDirectory() as name_of_folder:
        work = Path(name_of_folder)
        os.environ |= {"JAX_ENABLE_COMPILATION_CACHE": "1", "JAX_COMPILATION_CACHE_DIR": str(work / "cache")}
        os.environ |= {"JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0", "JAX_PLATFORMS": "cpu"}
        seconds: dict[str, float] = {}
        for number in range(arguments.kills):
            name = arguments.runs[number % len(arguments.runs)]
            whole, log = work / name, work / f"{name}.log"
            if name not in seconds:
                began = time.monotonic()
                assert start(finetune(name, whole), 2, log).wait() == 0, log.read_text()[-4000:]
                seconds[name] = time.monotonic() - began
                print(f"{name}: nothing happened, {seconds[name]:.1f} s", flush=True)
            folder = work / f"{name}-{number}"
            # Every second round of the runs begins with the other kind, so that each run meets both.
            is_at_point = (number + number // len(arguments.runs)) % 2 == 0
            num_random += not is_at_point
            while (killed := kill_once(name, folder, is_at_point, num_random % 3, draw, seconds[name], log)) is None:
                shutil.rmtree(folder)
            where, late = killed
            left = left_of(folder)
            processes = (2, 1, 2, 4)[number // len(arguments.runs) % 4 if len(arguments.runs) > 1 else number % 4]
            first = len(rows_of(folder)) if (folder / "training_metrics.jsonl").exists() else 0
            again = ["resume", str(folder)] if (folder / "config.yml").exists() else finetune(name, folder)
            code = ended(start(again, processes, log), log)
            if code != 0:
                print(f"{name}, kill {number} ({where}): resumed by {processes}, it ended with {code}")
                print(log.read_text()[-4000:])
                return 1
            found = [f"processes {left} are left"] if left else []
            found += [f"the end came after {late:.1f} s"] if late > SLOWEST_END else []
            resumed = (
                [json.loads(line) for line in (folder / "resumes.jsonl").read_text().splitlines()] if first else []
            )
            first = (resumed[-1]["checkpoint"] or 0) if resumed else 0
            difference = largest_difference(folder, whole, first)
            equal = differences(folder, whole)
            if processes == 2:
                found += equal
            elif difference > 1e-5:
                found += [f"the first gradient differs by {difference:.1e}"]
            spoiled, slowest = spoiled + bool(found), max(slowest, late)
            said = "; ".join(found) or ("equal" if not equal else f"first gradient within {difference:.1e}")
            print(f"{name} {number + 1:>2}  killed {where}; {processes} go on: {said}", flush=True)
        report_programs(len(list((work / "cache").glob("*-cache"))))  # all programs are cached
    print(
        f"{arguments.kills - spoiled} of {arguments.kills} went on as they should; ended at most {slowest:.1f} s late"
    )
    return 1 if spoiled else 0


if __name__ == "__main__":
    sys.exit(main())
