"""Verbs of the command line, in this process; tests/test_fresh_process.py has one of its own."""

import json
import os
import subprocess
import sys
from argparse import _SubParsersAction
from pathlib import Path

import pytest

from jaxft.cli import main, make_parser

ROOT = Path(__file__).parents[1]
RUN = f"""
imports: [{ROOT}/tests/data/cli_parts.py]
workflow: {{_type: cli_agent}}
eval:
  general: {{dataset: {{_type: jsonl, file_path: rows.jsonl}}}}
  evaluators: {{length: {{_type: cli_length}}}}
trajectory_builders: {{rollouts: {{_type: cli_builder}}}}
trainer_adapters: {{local: {{_type: cli_adapter}}}}
trainers: {{loop: {{_type: cli_trainer}}}}
finetuning: {{enabled: true, trainer: loop, trajectory_builder: rollouts, trainer_adapter: local,
  reward_function: {{name: length}}, num_epochs: 1, output_dir: out}}
"""


@pytest.fixture
def project(tmp_path, monkeypatch):
    """A user's folder, which is the working directory, with the files of a run inside `conf`."""
    folder = tmp_path / "conf"
    folder.mkdir()
    (folder / "run.yml").write_text(RUN)
    (folder / "rows.jsonl").write_text('{"question": "q", "answer": "a"}\n')
    monkeypatch.chdir(tmp_path)
    return tmp_path


def options(parser):
    """The long options of a parser and of the verbs below it."""
    below = [
        each for action in parser._actions if isinstance(action, _SubParsersAction) for each in action.choices.values()
    ]
    own = {option for action in parser._actions for option in action.option_strings if option.startswith("--")}
    return own.union(*map(options, below))


def test_options_have_one_spelling_and_take_that_of_the_toolkit():
    parser = make_parser()
    assert not [option for option in options(parser) if "_" in option] and "--config-file" in options(parser)
    line = [
        "finetune",
        "--config_file",
        "run_1.yml",
        "--validation_interval=3",
        "--set",
        "a_b.c_d=e_f",
        "--strict_compile",
    ]
    hyphens = ["finetune", "--config-file", "run_1.yml", "--validation-interval=3", *line[4:6], "--strict-compile"]
    parsed = parser.parse_args(line)
    assert parsed == parser.parse_args(hyphens)
    assert (parsed.config_file.name, parsed.validation_interval, parsed.strict_compile) == ("run_1.yml", 3, True)
    with pytest.raises(SystemExit):
        parser.parse_args(["finetune", "--config_files", "run.yml"])
    command = parser.parse_args(["launch", "-n", "2", "python", "mine.py", "--my_own", "--config_file=x"]).command
    assert command == ["python", "mine.py", "--my_own", "--config_file=x"]  # it is another program's


@pytest.mark.slow
def test_the_shell_gets_completions(tmp_path):
    asked = {"_ARGCOMPLETE": "1", "_ARGCOMPLETE_IFS": "\n", "COMP_LINE": "jaxft finetune --conf", "COMP_POINT": "21"}
    found = tmp_path / "found"
    program = "from jaxft.cli import main; main()"
    asked |= {"_ARGCOMPLETE_STDOUT_FILENAME": str(found)}
    subprocess.run([sys.executable, "-c", program], env=os.environ | asked, timeout=60)
    assert found.read_text().strip() == "--config-file"


def test_finetune_from_a_file(project, capsys):
    assert main(["finetune", "--config-file", "conf/run.yml", "--set", "finetuning.num_epochs=3"]) == 0
    result = json.loads((project / "out" / "result.json").read_text())
    assert (result["num_epochs"], result["jobs_completed"], result["model"]) == (3, 3, "model")
    shown = capsys.readouterr()
    assert "jobs_completed  3" in shown.out and shown.err == ""
    assert main(["finetune", "--config-file", "out/config.yml", "-o", "finetuning.output_dir", "out2"]) == 0


LIBRARY = """
import logging
log = logging.getLogger(__name__)

def work():
    log.info("working")
    log.warning("worn out")
"""


def test_log_lines_of_the_agent_are_shown_and_kept(project, monkeypatch, capsys):
    library = project / "site-packages" / "quiet_library.py"
    library.parent.mkdir()
    library.write_text(LIBRARY)
    monkeypatch.syspath_prepend(str(library.parent))
    monkeypatch.setenv("JUDGE_API_KEY", "sk-3141592653")
    command = ["finetune", "--config-file", "conf/run.yml", "--set", "workflow._type=cli_talkative", "--overwrite"]
    assert main(command) == 0
    lines = capsys.readouterr().out.splitlines()
    first = next(line for line in lines if line.startswith("jaxft ") and line.endswith(": conf/run.yml"))
    logged = ["WARNING quiet_library: worn out", "INFO cli_parts: the key is ***"]
    of_agent = [line for line in lines if "cli_parts: " in line or "quiet_library: " in line]
    assert [line for line in of_agent if "imported" not in line] == logged
    kept = (project / "out" / "run.log").read_text().splitlines()
    assert [line[len("2026-01-31 23:59:59 ") :] for line in kept] == lines[lines.index(first) :]

    assert main([*command, "--log-level", "debug"]) == 0
    assert "DEBUG cli_parts: asked q" in capsys.readouterr().out
    assert "DEBUG cli_parts: asked q" in (project / "out" / "run.log").read_text()
    assert main([*command, "--log-level", "error"]) == 0
    shown = capsys.readouterr().out
    assert "cli_parts" not in shown and "worn out" not in shown


def test_the_commit_of_a_run_is_that_of_its_configuration(project, monkeypatch):
    def git(*arguments):
        identity = ["-c", "user.name=t", "-c", "user.email=t@example.com"]
        command = ["git", "-C", str(project / "conf"), *identity, *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    git("init", "--quiet")
    git("add", ".")
    git("commit", "--quiet", "--message", "one")
    file, out = str(project / "conf" / "run.yml"), f"finetuning.output_dir={project / 'out'}"
    monkeypatch.chdir(ROOT)  # a checkout of something else
    assert main(["finetune", "--config-file", file, "--set", out]) == 0
    about = json.loads((project / "out" / "environment.json").read_text())
    assert about["git_commit"] == git("rev-parse", "HEAD")


def test_faults_of_a_file_are_all_shown(project, capsys):
    (project / "conf" / "run.yml").write_text(RUN.replace("num_epochs", "num_epoch").replace("cli_agent", "cli_agnet"))
    assert main(["finetune", "--config-file", "conf/run.yml"]) == 2
    first, second, third = capsys.readouterr().err.splitlines()
    assert first == "jaxft: error: conf/run.yml has 2 faults:"
    assert second.startswith("  workflow: no workflow is named 'cli_agnet'; did you mean 'cli_agent'?; registered: ")
    assert third == "  finetuning.num_epoch: no such field; did you mean 'num_epochs'?"


def test_help_lists_the_fields(capsys):
    with pytest.raises(SystemExit):
        main(["finetune", "--help"])
    shown = capsys.readouterr().out
    assert "finetuning.num_epochs (int, default 1)" in shown and "--config-file" in shown


@pytest.mark.parametrize("arguments", [[], ["finetune"], ["no-such-verb"]])
def test_a_verb_and_a_configuration_are_needed(arguments, capsys):
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2 and ("VERB" in capsys.readouterr().err) == (arguments != ["finetune"])
