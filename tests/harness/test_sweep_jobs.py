import asyncio
import os
import sys
import time

import pytest

from jaxft.errors import ConfigError
from jaxft.report.sweep_jobs import Share, divide_machine, last_lines, progress_of, run_jobs, visible_gpus
from jaxft.report.sweep_state import SweepRun


def make_run(tmp_path, name, program, **state):
    return SweepRun(
        name=name,
        directory=tmp_path / name,
        log=tmp_path / "logs" / f"{name}.log",
        overrides=(),
        command=(sys.executable, "-S", "-c", program),
        shown_program=(("program",), 4),
        num_epochs=5,
        **state,
    )


def run_all(runs, shares, **options):
    changes = []
    asyncio.run(run_jobs(runs, shares, lambda jobs: None, lambda run: changes.append((run.name, run.state)), **options))
    return changes


def test_runs_start_in_order_and_one_that_fails_leaves_the_others_alone(tmp_path, take_place_of_processes):
    async def work(command, log):
        log.write(f"here is {command[-1]}\n")
        return {"a": 0, "b": 3, "c": 0}.get(command[-1], 0)

    take_place_of_processes(work)
    runs = [make_run(tmp_path, each, each) for each in "abc"]
    changes = run_all(runs, [Share((), {})])
    assert changes == [
        ("a", "running"), ("a", "done"), ("b", "running"), ("b", "failed"), ("c", "running"), ("c", "done")
    ]  # fmt: skip
    assert [run.exit_code for run in runs] == [0, 3, 0] and all(run.seconds > 0 for run in runs)
    assert last_lines(runs[1].log) == ["here is b"]
    run_all([make_run(tmp_path, "b", "once more")], [Share((), {})])
    assert last_lines(runs[1].log) == ["here is once more"] and "here is b\n" in runs[1].log.read_text()


def test_with_fail_fast_nothing_starts_after_a_failure_and_others_are_stopped(tmp_path, take_place_of_processes):
    async def work(command, log):
        if command[-1] == "b":
            return 2
        await asyncio.sleep(60)

    take_place_of_processes(work)
    runs = [make_run(tmp_path, name, name) for name in "abc"]
    run_all(runs, [Share((), {})] * 2, fail_fast=True)
    assert [run.state for run in runs] == ["interrupted", "failed", "waiting"]


def test_no_more_run_at_once_than_there_are_shares(tmp_path, take_place_of_processes):
    running, most = set(), []

    async def work(command, log):
        running.add(command[-1])
        most.append(len(running))
        await asyncio.sleep(0.01)
        running.discard(command[-1])
        return 0

    take_place_of_processes(work)
    run_all([make_run(tmp_path, name, name) for name in "abcde"], [Share((), {})] * 2)
    assert max(most) == 2 and len(most) == 5


@pytest.fixture(scope="module")
def shown(tmp_path_factory):
    """The words that a run in a process of its own, on the last CPU, says about itself."""
    program = (
        "import os, sys; print(*os.sched_getaffinity(0), os.environ['CUDA_VISIBLE_DEVICES'], sys.stdin.read() == '', "
        "os.getsid(0) == os.getpid())"
    )
    run = make_run(tmp_path_factory.mktemp("one"), "a", program)
    run_all([run], [Share((sorted(os.sched_getaffinity(0))[-1],), {"CUDA_VISIBLE_DEVICES": "3"})])
    assert run.num_cpus == 1
    return last_lines(run.log)[-1].split()


def test_a_run_has_its_share_of_the_machine(shown):
    assert shown[:2] == [str(sorted(os.sched_getaffinity(0))[-1]), "3"]


def test_a_run_gets_no_standard_input_and_a_session_of_its_own(shown):
    assert shown[2:] == ["True", "True"]


@pytest.mark.parametrize(
    ("jobs", "gpus", "cpus", "shares"),
    [
        (1, [], [0, 1], [((0, 1), {})]),
        (1, ["0", "1"], [0, 1], [((), {})]),
        (2, [], [0, 1], [((0,), {}), ((1,), {})]),
        (2, [], [4, 5, 6, 7], [((4, 5), {}), ((6, 7), {})]),
        (3, [], [0, 1], [((), {"NPROC": "1", "OMP_NUM_THREADS": "1"})] * 3),
        (2, ["2", "5"], [0, 1], [((), {"CUDA_VISIBLE_DEVICES": "2"}), ((), {"CUDA_VISIBLE_DEVICES": "5"})]),
    ],
)
def test_the_machine_is_divided(jobs, gpus, cpus, shares):
    assert divide_machine(jobs, gpus, cpus) == [Share(*share) for share in shares]


def test_a_gpu_is_for_one_run_unless_the_user_has_divided_its_memory(monkeypatch):
    for name in ("XLA_PYTHON_CLIENT_PREALLOCATE", "XLA_PYTHON_CLIENT_MEM_FRACTION"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(ConfigError, match=r"--jobs 3: there is 1 GPU.*--jobs 1"):
        divide_machine(3, ["0"], [0])
    monkeypatch.setenv("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.3")
    assert [share.variables["CUDA_VISIBLE_DEVICES"] for share in divide_machine(3, ["0"], [0])] == ["0"] * 3


def test_without_the_plugin_no_gpu_is_seen(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    monkeypatch.setattr("jaxft.report.sweep_jobs.PLUGINS", ("no-such-plugin",))
    assert visible_gpus() == []
    monkeypatch.setattr("jaxft.report.sweep_jobs.PLUGINS", ("pytest",))
    monkeypatch.delenv("JAX_PLATFORMS", raising=False)
    assert visible_gpus() == ["0", "1"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert visible_gpus() == []
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    assert visible_gpus() == []


def test_progress_is_that_of_the_last_whole_row(tmp_path):
    run = make_run(tmp_path, "a", "")
    assert progress_of(run) == ""
    run.directory.mkdir()
    log = run.directory / "training_metrics.jsonl"
    log.write_text('{"epoch": 0, "reward_mean": 0.25}\n{"epoch": 1, "reward_mean": 0.5}\n{"epoch": 2, "rew')
    assert progress_of(run) == "epoch 2/5, reward 0.5"
    assert progress_of(run, since=time.time() + 60) == ""
    log.write_text('{"epoch": 0, "reward_mean": null}\n')
    assert progress_of(run) == "epoch 1/5"
    log.write_text("[]\n")
    assert progress_of(run) == ""


def test_a_run_continues_from_a_checkpoint_and_else_begins_anew(tmp_path):
    run = make_run(tmp_path, "a", "")
    assert run.arguments() == list(run.command)
    (run.directory / "checkpoints" / "1").mkdir(parents=True)
    (run.directory / "result.json").write_text("{}")
    assert run.arguments()[-1] == "--overwrite"
    (run.directory / "checkpoints" / "1" / "manifest.json").write_text("{}")
    assert run.arguments()[-1] == "--resume" and run.shown() == "program --resume"
    run.begins_anew = True
    assert run.arguments()[-1] == "--overwrite"
