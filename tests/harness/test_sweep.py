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
from jaxft.report.sweep_jobs import last_lines
from jaxft.runs.directory import RunDirectory

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


def states(folder="runs/toy_sweep"):
    runs = json.loads(Path(folder, "sweep.json").read_text())["runs"]
    return {name: run["state"] for name, run in runs.items()}


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
    assert states() == {"seed=4": "interrupted", "seed=5": "interrupted", "seed=6": "waiting"}
    assert "jaxft: terminated; continue with:" in last_lines(toy / "runs" / "toy_sweep" / "logs" / "seed=4.log")

    # A killed sweep leaves no run behind, and is taken up all the same.
    for number in (4, 5):
        (toy / f"here-{number}").unlink()
    with subprocess.Popen(command) as sweep:
        until(lambda: (toy / "here-4").exists() and (toy / "here-5").exists())
        sweep.kill()
    assert set(states().values()) == {"running", "waiting"}
    for number in (4, 5):  # whoever gets the locks knows that the runs have ended
        FileLock(toy / "runs" / "toy_sweep" / f"seed={number}" / "LOCK", timeout=60).acquire().lock.release()
    (toy / "hang").unlink()
    subprocess.run([*command, "--games", "7"], check=True, capture_output=True, timeout=300)
    assert states() == {"seed=4": "done", "seed=5": "done", "seed=6": "done"}
    result = json.loads((toy / "runs" / "toy_sweep" / "seed=6" / "result.json").read_text())
    assert (result["games"], result["seed"]) == (7, 6)


@pytest.fixture
def sweep(toy_run, tmp_path, monkeypatch, capfd):
    """Runs `jaxft sweep --dry-run` over the toys, and returns its exit code, output and errors."""
    from jaxft.harness.strict_yaml import dump_yaml

    monkeypatch.chdir(tmp_path)
    toy_run["finetuning"]["output_dir"] = "runs/toy"
    (tmp_path / "run.yml").write_text(dump_yaml(toy_run))

    def run(*arguments, dry=("--dry-run",)):
        try:
            code = main(["sweep", "--config-file", "run.yml", *arguments, *dry])
        except SystemExit as error:
            code = error.code
        return code, *capfd.readouterr()

    return run


def test_a_dry_run_lists_runs_and_commands_and_writes_nothing(sweep, tmp_path):
    code, shown, _ = sweep(
        "--seeds", "2", "--set", "eval.general.max_concurrency=1,2", "--jobs", "2", "--log-level", "error"
    )
    assert code == 0 and "4 runs, 4 to do, 2 at once" in shown
    command = "jaxft finetune --config-file run.yml --log-level error --set eval.general.max_concurrency=2"
    assert (
        f"  {command} --set finetuning.seed=1 --set 'finetuning.output_dir=\"runs/toy_sweep/max_concurrency=2,seed=1\"'"
        in shown
    )
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run.yml"]


def test_fields_of_the_output_directory_name_the_runs(sweep):
    code, shown, _ = sweep("--seeds", "2", "--set", "finetuning.output_dir=runs/{finetuning.trainer}/{seed}")
    assert code == 0 and "seed=1: waiting, in runs/loop/1" in shown
    code, _, error = sweep("--seeds", "2", "--set", "finetuning.output_dir=runs/{finetuning.trainer}")
    assert code == 2 and "2 runs have the directory 'runs/loop' (seed=0; seed=1)" in error


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
        (["--set", "finetuning.num_epochs=3"], ["nothing is varied"]),
        (["--seeds", "0"], ["--seeds: is 0"]),
        (["--seeds", "a"], ["--seeds: wants"]),
        (["--seeds", "2", "--jobs", "0"], ["--jobs: wants a whole number"]),
        (["--seed", "2"], ["unrecognized arguments: --seed 2"]),
        (["--set", "finetuning.num_epochs=1,"], ["alternative 2 of 2 is empty"]),
        (["--set", "finetuning.num_epochs=1,@"], ["alternative 2 of 2 is not YAML"]),
        (["--seeds", "2", "--set", "finetuning.sed=3"], ["1 fault:", "finetuning.sed: no such field", "'seed'?"]),
        (
            ["--set", "finetuning.num_epochs=0,1,x", "--set", "workflow.lm=a,b"],
            ["num_epochs=0,lm=a; num_epochs=0,lm=b", "(num_epochs=x,", "workflow.lm: no such field"],
        ),
        (["--list", "nowhere.yml"], ["nowhere.yml: cannot be read"]),
        (
            ["--set", "eval.general.dataset={_type: toy_rows},{_type: toy_rows, questions: [a, b, c]}"],
            ["has the same configuration as"],
        ),
        (["--config-file", "nowhere.yml", "--seeds", "2"], ["nowhere.yml: cannot be read"]),
        (["--seeds", "2", "--set", "finetuning.output_dir=runs/{sed}"], ["finetuning.output_dir: '{sed}' is no field"]),
    ],
)  # fmt: skip
def test_bad_input_is_refused_before_anything_starts(sweep, tmp_path, arguments, messages):
    code, _, error = sweep(*arguments, dry=())
    assert code == 2 and all(message in error for message in messages), error
    assert "Traceback" not in error and sorted(path.name for path in tmp_path.iterdir()) == ["run.yml"]


def test_directories_of_others_are_left_alone(sweep, tmp_path):
    run = tmp_path / "runs" / "toy_sweep" / "seed=1"
    with RunDirectory.create(run) as directory:
        directory.write_json("result.json", {})
        code, _, error = sweep("--seeds", "2", dry=())
        assert code == 2 and f"'runs/toy_sweep/seed=1': is in use by process {os.getpid()}" in error
    code, _, error = sweep("--seeds", "2", dry=())
    assert code == 2 and "'runs/toy_sweep/seed=1': holds a run that is not of this sweep" in error
    code, shown, _ = sweep("--seeds", "2", "--overwrite")
    assert code == 0 and "seed=1\"' --overwrite" in shown


def record(folder, config_file="run.yml", **entry):
    """A record of a sweep with one run, whose directory is there."""
    folder.mkdir(parents=True, exist_ok=True)
    name = {"directory": "runs/toy_sweep/seed=0", "state": "done", "exit_code": 0, "seconds": 1.0, "num_cpus": 1}
    runs = {"seed=0": {**name, "command": "c", **entry}}
    content = {"format_version": 1, "config_file": config_file, "program": "jaxft finetune", "runs": runs}
    (folder / "sweep.json").write_text(json.dumps(content))


def test_a_run_of_another_configuration_is_no_run_of_this_sweep(sweep, tmp_path):
    folder = tmp_path / "runs" / "toy_sweep"
    (folder / "seed=0").mkdir(parents=True)
    (folder / "seed=0" / "config.yml").write_text(resolved_yaml(load_config("run.yml")))
    record(folder)
    code, shown, _ = sweep("--seeds", "2")
    assert code == 0 and "seed=0: done" in shown and "1 to do" in shown

    longer = ("--seeds", "2", "--set", "finetuning.num_epochs=9")
    code, _, error = sweep(*longer)
    assert code == 2 and "was made with another configuration (finetuning.num_epochs 2 -> 9)" in error
    code, shown, _ = sweep(*longer, "--resume")
    assert code == 0 and "seed=0: interrupted" in shown
    record(folder, state="failed")  # it is repeated, whatever the configuration is now
    assert sweep(*longer)[0] == 0


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "cannot be read"),
        ("[]", "no record of a sweep"),
        ('{"runs": {}, "format_version": 2}', "no record of a sweep"),
    ],
)
def test_a_record_that_cannot_be_read_is_not_replaced(sweep, tmp_path, content, message):
    file = tmp_path / "runs" / "toy_sweep" / "sweep.json"
    file.parent.mkdir(parents=True)
    file.write_text(content)
    code, _, error = sweep("--seeds", "2", dry=())
    assert code == 2 and message in error and file.read_text() == content


def test_a_folder_has_one_sweep_and_one_process(sweep, tmp_path):
    folder = tmp_path / "runs" / "toy_sweep"
    record(folder, config_file="other.yml")
    code, _, error = sweep("--seeds", "2", dry=())
    assert code == 2 and "a sweep of jaxft finetune with other.yml" in error
    record(folder)
    with FileLock(folder / "sweep.lock"):
        code, _, error = sweep("--seeds", "2", dry=())
    assert code == 2 and "running in another process" in error


async def main_of_script(config, arguments):
    raise AssertionError("a sweep calls it in other processes only")


def test_a_script_sweeps_itself_with_its_own_arguments(sweep, monkeypatch, capfd):
    monkeypatch.setattr("sys.orig_argv", ["python3", "-O", "toy.py", "--games", "7"])
    monkeypatch.setattr("sys.argv", ["toy.py", "--games", "7"])
    parser = run_arguments("A script.", "run.yml")
    parser.add_argument("--games", type=int)
    assert run_script(main_of_script, parser, ["--games", "7", "--seeds", "2", "--dry-run"]) == 0
    shown = capfd.readouterr().out
    assert "2 runs" in shown
    assert "  python -O toy.py --games 7 --set finetuning.seed=1 --set 'finetuning.output_dir" in shown
    assert run_script(main_of_script, run_arguments("A script.", "run.yml"), ["--dry-run"]) == 2
    assert "--dry-run: is for several runs" in capfd.readouterr().err


def test_a_sweep_keeps_failures_and_goes_on_with_what_is_left(sweep, tmp_path, take_place_of_processes):
    """Its runs, in threads of this process, are those of `jaxft finetune`."""
    started, is_mended = [], False

    async def work(command, log):
        started.append(command[-1].partition("sweep/")[2])
        if "num_epochs=2" in " ".join(command) and not is_mended:
            log.write("jaxft: error: the toy is broken\n")
            return 2
        return await asyncio.to_thread(main, [*command[command.index("finetune") :]])

    take_place_of_processes(work)
    code, shown, error = sweep("--set", "finetuning.num_epochs=1,2", dry=())
    folder = tmp_path / "runs" / "toy_sweep"
    assert code == 1 and states() == {"num_epochs=1": "done", "num_epochs=2": "failed"}
    assert json.loads((folder / "num_epochs=1" / "result.json").read_text())["num_epochs"] == 1
    assert "1 run of 2 failed" in error and "the toy is broken" in error
    (repeat,) = (line for line in error.splitlines() if line.strip().startswith("jaxft finetune"))
    assert "finetuning.num_epochs=2" in repeat and "toy_sweep/num_epochs=2" in repeat
    assert (folder / "compare.html").is_file() and (folder / "compare.png").is_file()
    assert "\x1b" not in shown and "[1/2] num_epochs=1: done" in shown

    # With another alternative, and the fault gone: what is done is left alone.
    is_mended = True
    written = (folder / "num_epochs=1" / "result.json").stat().st_mtime_ns
    code, _, _ = sweep("--set", "finetuning.num_epochs=1,2,3", dry=())
    assert code == 0 and set(states().values()) == {"done"} and len(started) == 4
    assert (folder / "num_epochs=1" / "result.json").stat().st_mtime_ns == written


def test_what_was_interrupted_goes_on_from_its_checkpoint(sweep, tmp_path, take_place_of_processes):
    started = []

    async def work(command, log):
        started.append(command[-1])
        return 0

    take_place_of_processes(work)
    folder = tmp_path / "runs" / "toy_sweep"
    record(folder, state="running", exit_code=None)  # the sweep was killed
    (folder / "seed=0" / "checkpoints" / "1").mkdir(parents=True)
    (folder / "seed=0" / "checkpoints" / "1" / "manifest.json").write_text("{}")
    (folder / "seed=0" / "config.yml").write_text(resolved_yaml(load_config("run.yml")))
    sweep("--seeds", "2", dry=())
    assert states() == {"seed=0": "done", "seed=1": "done"}
    assert started[0] == "--resume" and len(started) == 2


@pytest.mark.slow
def test_the_sweep_imports_no_jax_though_the_agent_does(toy):
    (toy / "toy.py").write_text(f"import jax\n{SCRIPT}")
    program = (
        "import sys; from jaxft.cli import main; code = main(['sweep', '--config-file', 'run.yml', '--seeds', '2', "
        "'--dry-run']); sys.exit(code or 'jax' in sys.modules)"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert ended.returncode == 0 and "2 runs" in ended.stdout, ended.stderr


@pytest.mark.slow
def test_a_sweep_that_was_stopped_ends_with_the_bytes_of_one_that_was_not(tmp_path, monkeypatch):
    """A run of real training in a process of its own, beside the same run in this one."""
    settings = {
        "llms.policy.preset": "qwen3-50k", "llms.policy.slots": "16", "trainers.loop.examples_per_update": "4",
        "trajectory_builders.rollouts.num_generations": "2", "trainer_adapters.local.loss.entropy_coef": "0.01",
        "finetuning.num_epochs": "3",
    }  # fmt: skip
    config_file = str(ROOT / "experiments" / "arithmetic.yml")
    arguments = ["--config-file", config_file]
    arguments += [part for path, text in settings.items() for part in ("--set", f"{path}={text}")]
    monkeypatch.chdir(tmp_path)
    assert main(["finetune", *arguments, "--set", "finetuning.output_dir=whole"]) == 0
    command = [sys.executable, "-m", "jaxft.cli", "sweep", *arguments, "--seeds", "1", "--sweep-dir"]
    environment = os.environ | {"JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0", "PYTHONPATH": str(ROOT)}
    options = {"cwd": tmp_path, "env": environment, "stdout": subprocess.DEVNULL}
    metrics = tmp_path / "stopped" / "seed=0" / "training_metrics.jsonl"
    with subprocess.Popen([*command, "stopped"], **options) as sweep:
        until(lambda: metrics.exists() and metrics.stat().st_size)
        sweep.send_signal(signal.SIGINT)
    assert sweep.returncode == 128 + signal.SIGINT
    assert states(tmp_path / "stopped") == {"seed=0": "interrupted"}
    subprocess.run([*command, "stopped"], check=True, **options)
    whole, stopped = tmp_path / "whole", tmp_path / "stopped" / "seed=0"
    assert (stopped / "resumes.jsonl").exists()
    for name in ("training_metrics.jsonl", "model/model.safetensors", "trajectories/samples.jsonl"):
        assert (whole / name).read_bytes() == (stopped / name).read_bytes(), name
