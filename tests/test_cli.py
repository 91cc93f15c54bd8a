import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

COMPONENTS = """
from jaxft.harness.data_models import *
from jaxft.harness.contracts import *
from jaxft.harness.registry import *

class AgentConfig(WorkflowConfig, name="cli_agent"):
    pass

@register_workflow(config_type=AgentConfig)
async def agent(config, builder):
    async def answer(example):
        return example["question"]
    yield answer

class BuilderConfig(TrajectoryBuilderConfig, name="cli_builder"):
    pass

class Builder(TrajectoryBuilder):
    async def start_run(self, run_id, meta=None):
        self.output = await self.run_eval()
    async def finalize(self, run_id, meta=None):
        return TrajectoryCollection(trajectories=[], run_id=run_id)
    def log_progress(self, run_id, metrics, output_dir=None):
        pass

@register_trajectory_builder(config_type=BuilderConfig)
async def builder(config, builder):
    yield Builder(config)

class AdapterConfig(TrainerAdapterConfig, name="cli_adapter"):
    pass

class Adapter(TrainerAdapter):
    async def is_healthy(self):
        return True
    async def submit(self, trajectories):
        return TrainingJobRef(run_id=trajectories.run_id, backend="cli")
    async def status(self, ref):
        return TrainingJobStatus(run_id=ref.run_id, backend="cli", status="completed")
    async def wait_until_complete(self, ref, poll_interval=10.0):
        return await self.status(ref)
    def log_progress(self, ref, metrics, output_dir=None):
        pass
    async def export_model(self, folder):
        folder.mkdir()
        return folder

@register_trainer_adapter(config_type=AdapterConfig)
async def adapter(config, builder):
    yield Adapter(config)

class LoopConfig(TrainerConfig, name="cli_trainer"):
    pass

class Loop(Trainer):
    async def run_epoch(self, epoch, run_id):
        await self.trajectory_builder.start_run(run_id)
        return await self.trainer_adapter.submit(await self.trajectory_builder.finalize(run_id))
    async def run(self, num_epochs):
        return [
            await self.trainer_adapter.wait_until_complete(await self.run_epoch(epoch, f"e{epoch}"))
            for epoch in range(num_epochs)
        ]
    async def get_metrics(self, run_id):
        return {}
    async def cleanup(self):
        pass
    def log_progress(self, epoch, metrics, output_dir=None):
        pass

@register_trainer(config_type=LoopConfig)
async def loop(config, builder):
    yield Loop(config)

class LengthConfig(EvaluatorConfig, name="cli_length"):
    pass

@register_evaluator(config_type=LengthConfig)
async def length(config, builder):
    yield lambda item: len(item.output_obj)
"""

RUN = """
imports: [cli_parts]
workflow: {_type: cli_agent}
eval:
  general: {dataset: {_type: jsonl, file_path: rows.jsonl}}
  evaluators: {length: {_type: cli_length}}
trajectory_builders: {rollouts: {_type: cli_builder}}
trainer_adapters: {local: {_type: cli_adapter}}
trainers: {loop: {_type: cli_trainer}}
finetuning: {enabled: true, trainer: loop, trajectory_builder: rollouts, trainer_adapter: local,
  reward_function: {name: length}, num_epochs: 1, output_dir: out}
"""


def jaxft(*arguments, cwd=ROOT, **variables):
    program = f"import sys; sys.path.insert(0, {str(ROOT)!r}); from jaxft.cli import main; sys.exit(main())"
    command = [sys.executable, "-c", program, *arguments]
    return subprocess.run(command, cwd=cwd, env=os.environ | variables, capture_output=True, text=True)


@pytest.fixture
def project(tmp_path):
    """A user's folder, with the files of a run inside `runs`."""
    folder = tmp_path / "conf"
    folder.mkdir()
    (folder / "cli_parts.py").write_text(COMPONENTS)
    (folder / "run.yml").write_text(RUN)
    (folder / "rows.jsonl").write_text('{"question": "q", "answer": "a"}\n')
    return tmp_path


def test_finetune_from_a_file(project):
    done = jaxft("finetune", "--config_file", "conf/run.yml", "--set", "finetuning.num_epochs=3", cwd=project)
    assert (done.returncode, done.stderr) == (0, "")
    result = json.loads((project / "out" / "result.json").read_text())
    assert (result["num_epochs"], result["jobs_completed"], result["model"]) == (3, 3, "model")
    assert "jobs_completed  3" in done.stdout

    again = jaxft("finetune", "--config_file", "out/config.yml", "-o", "finetuning.output_dir", "out2", cwd=project)
    assert (again.returncode, again.stderr) == (0, "")


LOGGING = """
import logging, sys, threading
from pathlib import Path
sys.path.append(str(Path(__file__).parent / "site-packages"))
import quiet_library

log = logging.getLogger(__name__)
log.info("imported, jax: %s", "jax" in sys.modules)

class TalkativeConfig(WorkflowConfig, name="cli_talkative"):
    pass

@register_workflow(config_type=TalkativeConfig)
async def talkative(config, builder):
    async def answer(example):
        log.debug("asked %s", example["question"])
        quiet_library.work()
        thread = threading.Thread(target=log.info, args=("the key is sk-3141592653",))
        thread.start()
        thread.join()
        return "a"
    yield answer
"""

LIBRARY = """
import logging
log = logging.getLogger(__name__)

def work():
    log.info("working")
    log.warning("worn out")
"""


def test_log_lines_of_the_agent_are_shown_and_kept(project):
    library = project / "conf" / "site-packages" / "quiet_library.py"
    library.parent.mkdir()
    library.write_text(LIBRARY)
    (project / "conf" / "cli_parts.py").write_text(COMPONENTS + LOGGING)
    command = ["finetune", "--config_file", "conf/run.yml", "--set", "workflow._type=cli_talkative"]
    done = jaxft(*command, cwd=project, JUDGE_API_KEY="sk-3141592653")
    assert (done.returncode, done.stderr) == (0, "")
    first, *lines = done.stdout.splitlines()
    assert first.startswith("jaxft ") and first.endswith(": conf/run.yml")
    logged = [
        "INFO cli_parts: imported, jax: False",
        "WARNING quiet_library: worn out",
        "INFO cli_parts: the key is ***",
    ]
    assert [line for line in lines if "cli_parts: " in line or "quiet_library: " in line] == logged
    kept = (project / "out" / "run.log").read_text().splitlines()
    assert [line[len("2026-01-31 23:59:59 ") :] for line in kept] == [first, *lines]

    done = jaxft(*command, "--overwrite", "--log-level", "debug", cwd=project)
    assert done.returncode == 0 and "DEBUG cli_parts: asked q" in done.stdout
    assert "DEBUG cli_parts: asked q" in (project / "out" / "run.log").read_text()
    done = jaxft(*command, "--overwrite", "--log-level", "error", cwd=project)
    assert done.returncode == 0 and "cli_parts" not in done.stdout and "worn out" not in done.stdout


def test_the_commit_of_a_run_is_that_of_its_configuration(project):
    def git(*arguments):
        identity = ["-c", "user.name=t", "-c", "user.email=t@example.com"]
        command = ["git", "-C", str(project / "conf"), *identity, *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    git("init", "--quiet")
    git("add", ".")
    git("commit", "--quiet", "--message", "one")
    file, out = str(project / "conf" / "run.yml"), f"finetuning.output_dir={project / 'out'}"
    done = jaxft("finetune", "--config_file", file, "--set", out)  # in the checkout of jaxft
    assert (done.returncode, done.stderr) == (0, "")
    about = json.loads((project / "out" / "environment.json").read_text())
    assert about["git_commit"] == git("rev-parse", "HEAD")


def test_faults_of_a_file_are_all_shown(project):
    (project / "conf" / "run.yml").write_text(RUN.replace("num_epochs", "num_epoch").replace("cli_agent", "cli_agnet"))
    done = jaxft("finetune", "--config_file", "conf/run.yml", cwd=project)
    assert done.returncode == 2
    first, second, third = done.stderr.splitlines()
    assert first == "jaxft: error: conf/run.yml has 2 faults:"
    assert second.startswith("  workflow: no workflow is named 'cli_agnet'; did you mean 'cli_agent'?; registered: ")
    assert third == "  finetuning.num_epoch: no such field; did you mean 'num_epochs'?"


def test_help_is_quick_because_jax_is_not_imported():
    program = (
        f"import sys; sys.path.insert(0, {str(ROOT)!r}); from jaxft.cli import main\n"
        "for arguments in [{arguments}]:\n"
        "    try: main(arguments)\n"
        "    except SystemExit: pass\n"
        "slow = {'jax', 'flax', 'optax', 'transformers', 'orbax', 'matplotlib', 'tensorboardX'} & sys.modules.keys()\n"
        "sys.exit(f'imported {slow}' if slow else 0)"
    )
    verbs = (
        "'export', '--help'",
        "'chat', '--help'",
        "'doctor', '--help'",
        "'eval', '--help'",
        "'finetune', '--help'",
    )
    each = ", ".join(f"[{arguments}]" for arguments in ("'--help'", "'--version'", *verbs))
    command = [sys.executable, "-c", program.replace("{arguments}", each)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert "finetuning.num_epochs (int, default 1)" in done.stdout
    assert "--config_file" in done.stdout


def test_a_verb_is_needed():
    done = jaxft()
    assert done.returncode == 2 and "VERB" in done.stderr
