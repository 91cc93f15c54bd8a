"""Kills small runs with SIGKILL, resumes them, and compares them with one that nothing happened to.

    python tests/faults/kill_and_resume.py                  # 20 kills of each of the eight runs: an hour
    python tests/faults/kill_and_resume.py --kills 3 --runs everything

Half of the kills are at a named point (`tests/faults/injection.py`), half at any moment, and of these every third is a
SIGTERM, which the run may answer. Every fourth run is killed while it is being resumed, too.
Exit code 1 when a file or an array of a resumed run differs by a bit.
"""

import argparse
import os
import random
import signal
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.budget import report_programs
from tests.faults.compare import differences
from tests.faults.injection import KILL_POINTS, kill_after, run, start

HERE = Path(__file__).parent
RUNS = ("grpo", "everything", "overlap", "int8", "partial", "mixture", "dpo", "lora")
KILLED = -9
OFTEN = {"rollout": 30, "evaluators": 50, "half of the logs": 10, "during the export": 1}
"""How often some points are reached in six epochs, about; the others four times."""


def command(name: str, folder: Path) -> list[str]:
    """The command line of a run into a folder."""
    return [
        "-m",
        "jaxft.cli",
        "finetune",
        "--config-file",
        str(HERE / f"{name}.yml"),
        "-o",
        "finetuning.output_dir",
        str(folder),
    ]


def resume(folder: Path) -> list[str]:
    """The command line that goes on with it."""
    return ["-m", "jaxft.cli", "resume", str(folder)]


def kill_once(name: str, folder: Path, number: int, draw: random.Random, seconds: float, log: Path) -> str:
    """Starts a run, kills it, resumes it to its end; how it was killed, in words."""
    arguments = command(name, folder)
    if number % 2 == 0:
        points = list(KILL_POINTS)
        point = points[number // 2 % len(points)]
        times = OFTEN.get(point, 4) * (2 if name in ("overlap", "int8") else 1)
        where = f"{point}:{draw.randrange(times)}"
        code = run(arguments, at=where, log=log)
    else:
        moment = draw.uniform(0.0, 0.8 * seconds)  # some are faster than the first
        where = f"after {moment:.1f} s"
        number_of_signal = signal.SIGTERM if number % 6 == 5 else signal.SIGKILL
        where += f", {number_of_signal.name}"
        code = kill_after(start(arguments, log=log), moment, number_of_signal)
    if code == 0:
        where += " (not reached)"
    elif code not in (KILLED, 128 + signal.SIGTERM, -signal.SIGTERM):
        raise SystemExit(f"{name}, kill {number} ({where}): it ended with {code}; see {log}\n{log.read_text()[-3000:]}")
    if number % 4 == 3:
        moment = draw.uniform(0.2 * seconds, seconds)
        again = resume(folder) if (folder / "config.yml").exists() else arguments
        kill_after(start(again, log=log), moment)
        where += f", and {moment:.1f} s after it was resumed"
    # A run that was killed before it wrote anything is started again; everything else is resumed.
    last = resume(folder) if (folder / "config.yml").exists() else arguments
    code = run(last, log=log)
    if code != 0:
        raise SystemExit(
            f"{name}, kill {number} ({where}): the resumed run ended with {code}; see {log}\n{log.read_text()[-3000:]}"
        )
    return where


def main() -> int:
    """Prints a line per kill, and a summary."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=20, help="of each run (default %(default)s)")
    parser.add_argument("--runs", nargs="+", choices=RUNS, default=RUNS)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    draw, spoiled, total = random.Random(arguments.seed), 0, 0
    with tempfile.TemporaryDirectory() as name_of_folder:
        work = Path(name_of_folder)
        # Compiled once: a kill then hits the run more often than the compiler.
        os.environ |= {"JAX_ENABLE_COMPILATION_CACHE": "1", "JAX_COMPILATION_CACHE_DIR": str(work / "cache")}
        os.environ |= {"JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0", "JAX_PLATFORMS": "cpu"}
        for name in arguments.runs:
            log = work / f"{name}.log"
            whole, again = work / name, work / f"{name} again"
            assert run(command(name, whole), log=log) == 0, log.read_text()
            seconds = 0.0
            if arguments.kills > 1:  # some of them are at a moment of a run that has nothing to compile
                started = time.monotonic()
                assert run(command(name, again), log=log) == 0, log.read_text()
                seconds = time.monotonic() - started
                print(f"{name}: nothing happened, {seconds:.1f} s: {differences(whole, again) or 'equal'}", flush=True)
            for number in range(arguments.kills):
                folder = work / f"{name}-{number}"
                where = kill_once(name, folder, number, draw, seconds, log)
                found = differences(folder, whole)
                spoiled, total = spoiled + bool(found), total + 1
                print(f"{name} {number + 1:>2}  killed at {where}: {'; '.join(found) or 'equal'}", flush=True)
        report_programs(len(list((work / "cache").glob("*-cache"))))  # all programs are cached
    print(f"{total - spoiled} of {total} resumed runs are the uninterrupted one, bit for bit")
    return 1 if spoiled else 0


if __name__ == "__main__":
    sys.exit(main())
