"""The verb `compare`, from the command line to its files and its exit codes."""

import json

import pytest

from jaxft.cli import main
from tests.report.compared import write_run

LOSS = "trainer_adapters.local.loss.name"


@pytest.fixture
def sweep(tmp_path, monkeypatch):
    """Two losses with two seeds each, in `runs/sweep` below the working directory."""
    monkeypatch.chdir(tmp_path)
    for loss in ("dapo", "grpo"):
        for seed in (0, 1):
            path = tmp_path / "runs" / "sweep" / f"{loss}-{seed}"
            write_run(path, [0.1 * epoch for epoch in range(6)], seed=seed, settings={LOSS: loss})
    return tmp_path


def test_a_glob_gives_tables_and_files(sweep, capsys):
    assert main(["compare", "runs/sweep/*", "--last-epochs", "2"]) == 0
    shown = capsys.readouterr().out
    assert "4 runs in 2 groups" in shown and "loss.name=grpo" in shown and "0.45" in shown
    names = {"compare.json", "compare.html"}
    assert {file.name for file in (sweep / "runs/sweep/compare").iterdir()} == names
    content = json.loads((sweep / "runs/sweep/compare/compare.json").read_bytes())
    assert content["curves"]["loss.name=dapo"]["x"] == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["runs/sweep"], "runs/sweep/*"),
        (["runs/sweep/*", "--output", "runs/sweep/dapo-0"], "holds a run"),
        (["runs/sweep/*", "--output", "file/out"], "--output"),
        (["runs/sweep/*", "--output", "/proc/out"], "/proc/out"),
    ],
)
def test_bad_input_is_an_error_of_exit_code_2(sweep, capsys, arguments, words):
    (sweep / "file").write_text("mine")
    assert main(["compare", *arguments]) == 2
    assert words in capsys.readouterr().err
    assert (sweep / "file").read_text() == "mine"
