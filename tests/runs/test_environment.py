"""The environment record: versions, machine, command and commit, without secrets."""

import json
import platform
import subprocess
from importlib import metadata
from pathlib import Path

from jaxft.redaction import hiding, redacted
from jaxft.runs.environment import environment, masked_command, script, secrets_of_environment

REPOSITORY = Path(__file__).parents[2]


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


def test_commit_is_that_of_the_first_source_in_a_repository(tmp_path, monkeypatch):
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path))
    monkeypatch.chdir(REPOSITORY)
    outside, repository = tmp_path / "outside", tmp_path / "repository"
    outside.mkdir()
    repository.mkdir()
    script = repository / "experiment.py"
    sources = [outside / "run.yml", script]

    def commit_found():
        return environment(sources=sources)["git_commit"]

    assert commit_found() is None
    git(repository, "init", "--quiet")
    assert commit_found() is None
    script.write_text("1")
    git(repository, "add", ".")
    git(repository, "commit", "--quiet", "--message", "one")
    commit = git(repository, "rev-parse", "HEAD")
    assert commit_found() == commit
    script.write_text("2")
    assert commit_found() == f"{commit}-dirty"


def test_only_programs_outside_of_the_package_are_scripts(monkeypatch):
    for program, is_script in (("experiments/arithmetic.py", True), ("jaxft/cli.py", False), ("README.md", False)):
        monkeypatch.setattr("sys.argv", [str(REPOSITORY / program)])
        assert script() == (REPOSITORY / program if is_script else None)


def test_secrets_on_the_command_line_are_masked():
    command = ["--set", "judge.api_key=sk-1", "--api-key", "sk-2", "-o", "a.hub_token", "hf_3", "b.PASSWORD=p=q"]
    assert "".join(masked_command(command)).replace("***", "") == "--setjudge.api_key=--api-key-oa.hub_tokenb.PASSWORD="
    harmless = ["--set", "a.microbatch_tokens=8", "--set", "llms.policy.tokenizer=x", "--config-file", "run.yml"]
    assert masked_command(harmless) == harmless


def test_names_in_urls_are_no_secrets_and_short_passwords_are(monkeypatch):
    monkeypatch.setenv("MIRROR", "svn+ssh://reviewer@host/x and https://me:admin@host/y?key=abc")
    with hiding(secrets_of_environment()):
        assert redacted("runs/reviewer/out, abc, admin") == "runs/reviewer/out, abc, admin"
        shown = redacted("svn+ssh://reviewer@host and https://me:admin@host or https://me:admin@host/y?key=abc")
    assert (
        shown.startswith("svn+ssh://reviewer@host and ***host or ***") and "admin" not in shown and "abc" not in shown
    )
    assert masked_command(["--set", "workflow.url=http://me:ad@min@host/x"]) == ["--set", "workflow.url=***host/x"]
