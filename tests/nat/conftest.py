"""Runs of NeMo Agent Toolkit with jaxft's components, in this process and by its command."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

try:
    import nat.plugins.eval
except ImportError:
    collect_ignore_glob = ["test_*.py", "others.py", "workflows.py"]
else:
    from nat.builder.workflow_builder import WorkflowBuilder
    from nat.data_models.finetuning import FinetuneRunConfig
    from nat.finetuning.finetuning_runtime import run_finetuning_sync
    from nat.runtime.loader import load_config

    collect_ignore = ["others.py", "workflows.py"]
    sys.path.insert(0, str(Path(__file__).parent))
    import others  # noqa: F401, registers its components
    import workflows  # noqa: F401

QUESTIONS = [{"id": number, "question": f"number {number}?", "answer": str(number)} for number in range(4)]

LIMIT = "MAX_LOGPROB_DIFF"
"""Environment variable that replaces the constant of `jaxft.components.training_job`: with 1e-12 every job fails."""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A working directory with two datasets and `config.yml`."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.json").write_text(json.dumps(QUESTIONS))
    (tmp_path / "held_out.json").write_text(json.dumps([{**row, "id": row["id"] + 10} for row in QUESTIONS[:2]]))
    (tmp_path / "config.yml").write_text(yaml.safe_dump(configuration()))
    return tmp_path


def configuration():
    """The configuration of a stock workflow that asks once, trained by jaxft's parts."""
    return {
        "llms": {
            "policy": {
                "_type": "jaxft_policy",
                "preset": "qwen3-50k",
                "max_context_tokens": 64,
                "slots": 16,
                "max_tokens": 12,
                "seed": 3,
            }
        },
        "workflow": {"_type": "chat_completion", "llm_name": "policy", "system_prompt": "a"},
        "eval": {
            "general": {"max_concurrency": 8, "dataset": {"_type": "json", "file_path": "train.json"}},
            "evaluators": {"reward": {"_type": "digits"}},
        },
        "trajectory_builders": {
            "own": {"_type": "jaxft_trajectory_builder", "num_generations": 4},
            "user": {"_type": "user_traj_builder", "num_generations": 4},
        },
        "trainer_adapters": {
            "own": {"_type": "jaxft_trainer_adapter", "llm": "policy", "optimizer": {"learning_rate": 3e-3}},
            "user": {"_type": "user_trainer_adapter", "file": "submitted.jsonl"},
        },
        "trainers": {"own": {"_type": "jaxft_trainer"}, "user": {"_type": "user_trainer", "file": "statuses.json"}},
        "finetuning": {
            "enabled": True,
            "trainer": "own",
            "trajectory_builder": "own",
            "trainer_adapter": "own",
            "reward_function": {"name": "reward"},
            "num_epochs": 2,
            "output_dir": "out",
        },
    }


@pytest.fixture
def finetune(folder):
    """A function that runs finetuning in this process; its arguments change the configuration, with `__` for dots."""

    def run(validation_dataset=None, validation_config_file=None, override=(), **changes):
        config = configuration()
        for path, value in changes.items():
            *parents, name = path.split("__")
            section = config
            for parent in parents:
                section = section.setdefault(parent, {})
            section[name] = value
        (folder / "config.yml").write_text(yaml.safe_dump(config))
        options = FinetuneRunConfig(
            config_file=folder / "config.yml",
            override=override,
            validation_dataset=validation_dataset,
            validation_config_file=validation_config_file,
            validation_interval=1,
        )
        run_finetuning_sync(options)

    return run


@pytest.fixture
def make_trainer(folder):
    """A function that makes jaxft's trainer as `nat finetune` does, and returns it with its adapter."""

    async def make():
        config = load_config(folder / "config.yml")
        finetuning = config.finetuning
        finetuning.run_configuration = FinetuneRunConfig(
            config_file=folder / "config.yml", validation_dataset="held_out.json"
        )
        async with WorkflowBuilder.from_config(config=config) as builder:
            adapter = await builder.get_trainer_adapter("own")
            trainer = await builder.get_trainer("own", await builder.get_trajectory_builder("own"), adapter)
            await trainer.initialize(finetuning)
        return trainer, adapter

    return make


@pytest.fixture
def start_nat(folder):
    """A function that starts a `nat` command in a new process."""

    def start(*arguments):
        limit = "from jaxft.components import training_job; training_job.MAX_LOGPROB_DIFF = float(os.environ[LIMIT])"
        limited = f"LIMIT = {LIMIT!r}; {limit}; " if LIMIT in os.environ else ""
        program = f"import os, others, sys; {limited}from nat.cli.main import run_cli; sys.exit(run_cli())"
        return subprocess.Popen(
            [sys.executable, "-c", program, *map(str, arguments)],
            env={**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path])},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    return start


@pytest.fixture
def nat(start_nat):
    """A function that runs a `nat` command in a new process, and returns its result."""

    def run(*arguments):
        with start_nat(*arguments) as process:
            stdout, stderr = process.communicate(timeout=600)
        return subprocess.CompletedProcess(arguments, process.returncode, stdout, stderr)

    return run


@pytest.fixture
def run_jaxft(folder):
    """A function that runs the `jaxft` command in a new process."""

    def run(*arguments):
        command = [sys.executable, "-m", "jaxft.cli", *map(str, arguments)]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
        subprocess.run(command, env=environment, check=True, capture_output=True, timeout=600)

    return run
