"""Sweeps: their runs, how each of them is left and taken up, and what is refused before any run starts."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from filelock import FileLock

from jaxft.cli import main
from jaxft.harness.config import load_config, resolved_yaml
from jaxft.harness.runtime import run_script
from jaxft.harness.verbs import run_arguments
from jaxft.report.sweep_runs import SweepRun, divide_machine
from jaxft.runs.directory import RunDirectory
from tests.faults.compare import differences

ROOT = Path(__file__).parents[2]

SCRIPT = '''
"""Trains nothing."""
import asyncio, sys
from pathlib import Path
import jaxft

class ToyConfig(jaxft.WorkflowConfig, name="sweep_toy"):
    pass

@jaxft.register_workflow(config_type=ToyConfig)
async def toy(config, builder):
    yield lambda example: ""

async def main(config, arguments):
    async with jaxft.open_session(config, overwrite=arguments.overwrite, resume=arguments.resume) as session:
        seed = config.finetuning.seed
        if Path("hang").exists():
            Path(f"here-{seed}").touch()
            await asyncio.sleep(600)
        session.write_result({"games": arguments.games})

if __name__ == "__main__":
    parser = jaxft.run_arguments(__doc__, Path(__file__).with_name("run.yml"))
    parser.add_argument("--games", type=int, default=1)
    sys.exit(jaxft.run_script(main, parser))
'''

CONFIG = """
imports: [toy]
workflow: {_type: sweep_toy}
eval: {general: {dataset: {_type: jsonl, file_path: rows.jsonl}}}
finetuning: {seed: 4, output_dir: runs/toy}
"""


@pytest.fixture
def toy(tmp_path, monkeypatch):
    """A folder with a script that trains nothing, its configuration and its data: the working directory."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "toy.py").write_text(SCRIPT)
    (tmp_path / "run.yml").write_text(CONFIG)
    (tmp_path / "rows.jsonl").write_text('{"question": "a", "answer": "b"}\n')
    return tmp_path


def are_done(folder="runs/toy_sweep"):
    """The runs that have a directory, and whether they have a result."""
    return {file.parent.name: (file.parent / "result.json").exists() for file in Path(folder).glob("*/config.yml")}


def until(condition, seconds=300.0):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not come to pass"
        time.sleep(0.05)


@pytest.mark.slow
def test_a_signal_stops_all_runs_and_none_is_left_behind(toy):
    (toy / "hang").touch()
    command = [sys.executable, "toy.py", "--seeds", "3", "--jobs", "2"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as sweep:
        until(lambda: (toy / "here-4").exists() and (toy / "here-5").exists())
        sweep.send_signal(signal.SIGTERM)
        _, shown = sweep.communicate(timeout=300)
    assert sweep.returncode == 128 + signal.SIGTERM
    assert "continue with:\n  python toy.py --seeds 3 --jobs 2" in shown
    assert "3 runs: 2 interrupted, 1 waiting" in shown and are_done() == {"seed=4": False, "seed=5": False}
    log = (toy / "runs" / "toy_sweep" / "logs" / "seed=4.log").read_text()
    assert "jaxft: terminated; continue with:" in log and "=== " in log

    # A killed sweep leaves no run behind, and is taken up all the same.
    for number in (4, 5):
        (toy / f"here-{number}").unlink()
    with subprocess.Popen(command) as sweep:
        until(lambda: (toy / "here-4").exists() and (toy / "here-5").exists())
        sweep.kill()
    for number in (4, 5):  # whoever gets the locks knows that the runs have ended
        FileLock(toy / "runs" / "toy_sweep" / f"seed={number}" / "LOCK", timeout=60).acquire().lock.release()
    (toy / "hang").unlink()
    subprocess.run([*command, "--games", "7"], check=True, capture_output=True, timeout=300)
    assert are_done() == {"seed=4": True, "seed=5": True, "seed=6": True}
    result = json.loads((toy / "runs" / "toy_sweep" / "seed=6" / "result.json").read_text())
    assert (result["games"], result["seed"]) == (7, 6)


OWN = """
- {finetuning.output_dir: shipped}
- finetuning.output_dir: own
  trainer_adapters.local.loss.function: "jaxft:policy_loss"
  trainer_adapters.local.loss.name: function
  trainer_adapters.local.loss.options: {loss: grpo}
  trainer_adapters.local.loss.advantages: "jaxft:group_advantages"
  trainer_adapters.local.optimizer: {function: "optax:adamw", learning_rate: 1e-3}
"""
ON_A_MESH = {
    "llms.policy.mesh": {"data": 2},
    "trainer_adapters.local.num_minibatches": 2,
    "trainer_adapters.local.packing": True,
    "trainers.loop.max_staleness": 1,
    "finetuning.num_epochs": 3,
}


@pytest.mark.slow
def test_functions_that_are_the_shipped_ones_train_the_same_bytes(tmp_path):
    """Two runs of a sweep: adapters, packed, on two devices, four updates for each of three overlapped jobs."""
    (tmp_path / "runs.yml").write_text(OWN)
    command = [sys.executable, "-m", "jaxft.cli", "sweep", "--list", "runs.yml", "--config-file"]
    command += [ROOT / "tests" / "faults" / "lora.yml"]
    command += [word for name, value in ON_A_MESH.items() for word in ("--set", f"{name}={json.dumps(value)}")]
    flags = f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count=2"
    subprocess.run(command, cwd=tmp_path, env=os.environ | {"XLA_FLAGS": flags}, check=True)
    found = differences(tmp_path / "own", tmp_path / "shipped")
    assert found == ["config.yml: bytes differ", "model/README.md: bytes differ"]  # which name the functions
    rows = [json.loads(line) for line in (tmp_path / "own" / "training_metrics.jsonl").read_text().splitlines()]
    assert [(row["updates"], row["staleness_max"]) for row in rows] == [(4, 0), (4, 1), (4, 1)]


class Process:
    """A coroutine in the place of a process."""

    def __init__(self, working):
        self.working, self.returncode = asyncio.create_task(working), None

    async def wait(self):
        await asyncio.wait({self.working})
        self.returncode = -signal.SIGTERM if self.working.cancelled() else self.working.result()
        return self.returncode

    def terminate(self):
        self.working.cancel()


@pytest.fixture
def sweep(tmp_path, monkeypatch, capfd):
    """Runs `jaxft sweep` over runs of an agent elsewhere, and returns its exit code, output and errors."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    agent = "{_type: http_agent, url: 'http://127.0.0.1:1'}"
    (tmp_path / "run.yml").write_text(CONFIG.replace("{_type: sweep_toy}", agent).replace("imports: [toy]", ""))
    (tmp_path / "rows.jsonl").write_text('{"question": "a", "answer": "b"}\n')

    def run(*arguments, work=None):
        async def start(*command, stdout, **options):
            log = os.fdopen(os.dup(stdout.fileno()), "a", buffering=1)
            settings = dict(each.split("=", 1) for at, each in enumerate(command) if command[at - 1] == "--set")
            folder = Path(settings["finetuning.output_dir"].strip('"'))
            return Process(work(command, folder, log))

        monkeypatch.setattr(asyncio, "create_subprocess_exec", start)
        try:
            code = main(["sweep", "--config-file", "run.yml", *arguments, *["--dry-run"] * (work is None)])
        except SystemExit as error:
            code = error.code
        return code, *capfd.readouterr()

    return run


def make_run(folder, seed, *, has_result=False, has_checkpoint=False, last_words=None, **settings):
    """A run directory, as `jaxft finetune` leaves it."""
    (folder / "checkpoints" / "1").mkdir(parents=True, exist_ok=True)
    overrides = [("finetuning.seed", str(seed)), ("finetuning.output_dir", str(folder)), *settings.items()]
    (folder / "config.yml").write_text(resolved_yaml(load_config("run.yml", overrides)))
    (folder / "LOCK.holder").write_text("{}")
    if has_result:
        (folder / "result.json").write_text("{}")
    if has_checkpoint:
        (folder / "checkpoints" / "1" / "manifest.json").write_text("{}")
    if last_words:
        (folder / "run.log").write_text(f"2026-01-01 00:00:00 ended: {last_words}\n")


RUNS = Path("runs/toy_sweep")


def test_a_dry_run_lists_runs_and_commands_and_writes_nothing(sweep, tmp_path):
    code, shown, _ = sweep(
        "--seeds", "2", "--set", "eval.general.max_concurrency=1,2", "--jobs", "2", "--log-level", "error"
    )
    assert code == 0 and "4 runs, 4 to do, 2 at once" in shown
    command = "jaxft finetune --config-file run.yml --log-level error --set eval.general.max_concurrency=2"
    directory = "'finetuning.output_dir=\"runs/toy_sweep/max_concurrency=2,seed=5\"'"
    assert f"  {command} --set finetuning.seed=5 --set {directory}" in shown
    assert sorted(path.name for path in tmp_path.iterdir()) == ["rows.jsonl", "run.yml"]


def test_fields_of_the_output_directory_name_the_runs(sweep):
    code, shown, _ = sweep("--seeds", "2", "--set", "finetuning.output_dir=runs/{workflow._type}/{seed}")
    assert code == 0 and "seed=5: waiting, in runs/http_agent/5" in shown
    code, _, error = sweep("--seeds", "2", "--set", "finetuning.output_dir=runs/{workflow._type}")
    assert code == 2 and "several runs have the directory 'runs/http_agent'" in error


def test_runs_of_a_list_may_name_their_directories(sweep, tmp_path):
    (tmp_path / "runs.yml").write_text(
        "- {finetuning.seed: 1, finetuning.output_dir: runs/one}\n- finetuning.seed: 2\n"
    )
    code, shown, _ = sweep("--list", "runs.yml", "--sweep-dir", "elsewhere")
    assert code == 0 and "waiting, in runs/one\n" in shown and "waiting, in elsewhere/seed=2\n" in shown


@pytest.mark.parametrize(
    ("arguments", "messages"),
    [
        ([], ["nothing is varied"]),
        (["--seeds", "0"], ["--seeds: is 0"]),
        (["--seeds", "2", "--jobs", "0"], ["--jobs: wants a whole number"]),
        (["--seed", "2"], ["unrecognized arguments: --seed 2"]),
        (["--set", "finetuning.num_epochs=1,"], ["alternative 2 of 2 is empty"]),
        (["--set", "finetuning.num_epochs=1,@"], ["finetuning.num_epochs: ", "not YAML", "(num_epochs=_-"]),
        (["--seeds", "2", "--set", "finetuning.sed=3"], ["1 fault:", "finetuning.sed: no such field", "'seed'?"]),
        (
            ["--set", "finetuning.num_epochs=0,1,x", "--set", "workflow.lm=a,b"],
            ["num_epochs=0,lm=a; num_epochs=0,lm=b", "(num_epochs=x,", "workflow.lm: no such field"],
        ),
        (["--list", "nowhere.yml"], ["nowhere.yml: cannot be read"]),
        (["--config-file", "nowhere.yml", "--seeds", "2"], ["nowhere.yml: cannot be read"]),
        (["--seeds", "2", "--set", "finetuning.output_dir=runs/{sed}"], ["finetuning.output_dir: '{sed}' is no field"]),
    ],
)  # fmt: skip
def test_bad_input_is_refused_before_anything_starts(sweep, tmp_path, arguments, messages):
    code, _, error = sweep(*arguments, work=None if "--seed" in arguments else print)
    assert code == 2 and all(message in error for message in messages), error
    assert "Traceback" not in error and sorted(path.name for path in tmp_path.iterdir()) == ["rows.jsonl", "run.yml"]


def test_a_run_that_is_going_on_is_left_alone(sweep, tmp_path):
    with RunDirectory.create(tmp_path / RUNS / "seed=5"):
        code, _, error = sweep("--seeds", "2")
    assert code == 2 and f"'{RUNS / 'seed=5'}': is in use by process {os.getpid()}" in error


def test_the_directories_say_what_is_left_to_do(sweep):
    make_run(RUNS / "seed=4", 4, has_result=True)
    make_run(RUNS / "seed=5", 5, has_checkpoint=True)
    make_run(RUNS / "seed=6", 6, last_words="ValueError: no")
    code, shown, _ = sweep("--seeds", "4")
    assert code == 0 and "4 runs, 3 to do" in shown
    lines = shown.splitlines()
    states = {"seed=4: done": "'", "seed=5: interrupted": "--resume", "seed=6: failed": "'", "seed=7: waiting": "'"}
    for state, ending in states.items():
        at = next(at for at, line in enumerate(lines) if line.startswith(state))
        assert lines[at + 1].endswith(ending)
    assert "--overwrite" in sweep("--seeds", "1", "--overwrite")[1].splitlines()[-2]


def test_a_run_of_another_configuration_is_continued_only_if_that_is_said(sweep):
    make_run(RUNS / "seed=4", 4, has_result=True, has_checkpoint=True)
    longer = ("--seeds", "1", "--set", "finetuning.num_epochs=9")
    code, _, error = sweep(*longer)
    assert code == 2 and "was made with another configuration (finetuning.num_epochs 1 -> 9)" in error
    code, shown, _ = sweep(*longer, "--resume")
    assert code == 0 and "seed=4: interrupted" in shown and "--resume" in shown
    (RUNS / "seed=4" / "result.json").unlink()
    make_run(RUNS / "seed=4", 4, has_checkpoint=True, last_words="ValueError: no")
    code, shown, _ = sweep(*longer)  # what failed begins anew, whatever the configuration is now
    assert code == 0 and "--overwrite" in shown


def test_a_script_sweeps_itself_with_its_own_arguments(sweep, monkeypatch, capfd):
    monkeypatch.setattr("sys.orig_argv", ["python3", "-O", "toy.py", "--games", "7"])
    monkeypatch.setattr("sys.argv", ["toy.py", "--games", "7"])
    parser = run_arguments("A script.", "run.yml")
    parser.add_argument("--games", type=int)
    assert run_script(print, parser, ["--games", "7", "--seeds", "2", "--dry-run"]) == 0
    shown = capfd.readouterr().out
    assert "2 runs" in shown
    assert "  python -O toy.py --games 7 --set finetuning.seed=5 --set 'finetuning.output_dir" in shown
    assert run_script(print, run_arguments("A script.", "run.yml"), ["--dry-run"]) == 2
    assert "nothing is varied" in capfd.readouterr().err


def test_a_sweep_keeps_failures_and_goes_on_with_what_is_left(sweep):
    started, is_mended = [], False

    async def work(command, folder, log):
        started.append(folder.name)
        make_run(folder, folder.name[-1], has_result=folder.name != "seed=5" or is_mended)
        if folder.name == "seed=5" and not is_mended:
            log.write("jaxft: error: the toy is broken\n")
            return 2
        return 0

    code, shown, error = sweep("--seeds", "2", work=work)
    assert code == 1 and are_done() == {"seed=4": True, "seed=5": False} and started == ["seed=4", "seed=5"]
    assert "1 of 2 runs failed" in error and "exit code 2" in error and "the toy is broken" in error
    (repeat,) = (line for line in error.splitlines() if line.strip().startswith("jaxft finetune"))
    assert "finetuning.seed=5" in repeat and "toy_sweep/seed=5" in repeat
    assert (RUNS / "compare.html").is_file()
    assert "\x1b" not in shown and "[1/2] seed=4: done" in shown

    # With another seed, and the fault gone: what is done is left alone.
    is_mended = True
    code, _, _ = sweep("--seeds", "3", work=work)
    assert code == 0 and set(are_done().values()) == {True} and started[2:] == ["seed=5", "seed=6"]


def test_no_more_run_at_once_than_there_are_jobs(sweep):
    running, most = set(), []

    async def work(command, folder, log):
        running.add(folder)
        most.append(len(running))
        await asyncio.sleep(0.01)
        running.discard(folder)
        return 0

    assert sweep("--seeds", "5", "--jobs", "2", work=work)[0] == 0
    assert max(most) == 2 and len(most) == 5


@pytest.mark.parametrize(
    ("jobs", "gpus", "cpus", "shares"),
    [
        (1, "", [0, 1], [("0,1", {})]),
        (1, "0,1", [0, 1], [("0,1", {"CUDA_VISIBLE_DEVICES": "0,1"})]),
        (2, "", [4, 5, 6, 7], [("4,5", {}), ("6,7", {})]),
        (3, "", [0, 1], [("0", {}), ("1", {}), ("0", {})]),
        (2, "2,5", [0, 1], [("0", {"CUDA_VISIBLE_DEVICES": "2"}), ("1", {"CUDA_VISIBLE_DEVICES": "5"})]),
    ],
)
def test_the_machine_is_divided(monkeypatch, jobs, gpus, cpus, shares):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", gpus)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: cpus)
    assert divide_machine(jobs) == shares


def test_progress_is_that_of_the_last_whole_row(tmp_path):
    run = SweepRun("a", tmp_path, tmp_path / "a.log", 5, [], "", "running")
    assert run.progress() == ""
    log = tmp_path / "training_metrics.jsonl"
    log.write_text('{"epoch": 0, "reward_mean": 0.25}\n{"epoch": 1, "reward_mean": 0.5}\n{"epoch": 2, "rew')
    assert run.progress() == "epoch 2/5, reward 0.5"
    run.began_at = time.time() + 60
    assert run.progress() == ""


@pytest.mark.slow
def test_the_sweep_imports_no_jax_though_the_agent_does(toy):
    (toy / "toy.py").write_text(f"import jax\n{SCRIPT}")
    program = (
        "import sys; from jaxft.cli import main; code = main(['sweep', '--config-file', 'run.yml', '--seeds', '2', "
        "'--dry-run']); sys.exit(code or 'jax' in sys.modules)"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert ended.returncode == 0 and "2 runs" in ended.stdout, ended.stderr
