"""The environment record: versions, machine, command and commit, without secrets."""

import json
import platform
import subprocess
import sys
from importlib import metadata
from pathlib import Path

from jaxft.runs.environment import environment, masked_command

REPOSITORY = Path(__file__).parents[2]


def run_in(folder, *arguments):
    program = "import json, jaxft.runs.environment as e; print(json.dumps(e.environment(['cpu:0'])))"
    command = [sys.executable, "-c", program, *arguments]
    return json.loads(subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True).stdout)


def git(folder, *arguments):
    identity = ["-c", "user.name=t", "-c", "user.email=t@example.com"]
    done = subprocess.run(["git", *identity, *arguments], cwd=folder, capture_output=True, text=True, check=True)
    return done.stdout.strip()


def test_versions_are_those_installed():
    found = environment(["cpu:0"])
    assert found["versions"]["python"] == platform.python_version()
    assert found["versions"]["jax"] == metadata.version("jax")
    assert found["devices"] == ["cpu:0"]
    assert json.loads(json.dumps(found, allow_nan=False)) == found


def test_commit_is_that_of_the_working_directory(tmp_path, monkeypatch):
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    monkeypatch.setenv("PYTHONPATH", str(REPOSITORY))
    assert run_in(tmp_path)["git_commit"] is None
    git(tmp_path, "init", "--quiet")
    assert run_in(tmp_path)["git_commit"] is None
    (tmp_path / "experiment.py").write_text("1")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "--quiet", "--message", "one")
    commit = git(tmp_path, "rev-parse", "HEAD")
    assert run_in(tmp_path)["git_commit"] == commit
    (tmp_path / "experiment.py").write_text("2")
    assert run_in(tmp_path)["git_commit"] == f"{commit}-dirty"


def test_secrets_on_the_command_line_are_masked():
    command = ["--set", "judge.api_key=sk-1", "--api-key", "sk-2", "-o", "a.hub_token", "hf_3", "b.PASSWORD=p=q"]
    assert "".join(masked_command(command)).replace("***", "") == "--setjudge.api_key=--api-key-oa.hub_tokenb.PASSWORD="
    harmless = ["--set", "a.microbatch_tokens=8", "--set", "llms.policy.tokenizer=x", "--config_file", "run.yml"]
    assert masked_command(harmless) == harmless
