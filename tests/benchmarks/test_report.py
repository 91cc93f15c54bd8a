"""`benchmarks/report.py` on results of `run.py` and `compare.py`."""

import contextlib
import io
import json
from pathlib import Path

import pytest

import run
from records import Results
from report import main, results_text

ROOT = Path(__file__).parents[2]


@pytest.fixture
def report(monkeypatch, capsys):
    """Call the program, and return its exit code with what it shows."""

    def report(*arguments):
        monkeypatch.setattr("sys.argv", ["report.py", *map(str, arguments)])
        return main(), capsys.readouterr()

    return report


@pytest.fixture(scope="module")
def harness(tmp_path_factory):
    """The file of a case of `run.py`, and what it showed."""
    out = tmp_path_factory.mktemp("harness") / "harness.json"
    with contextlib.redirect_stdout(io.StringIO()) as shown:
        assert run.main(["harness", "--shrink", "--repeats", "1", "--out", str(out)]) == 0
    return out, shown.getvalue()


def test_harness_and_its_report(tmp_path, report, harness):
    out, shown = harness
    (case,) = json.loads(out.read_text())["cases"]
    milliseconds = {line["name"]: line["figures"]["milliseconds_per_episode"] for line in case["lines"]}
    assert list(milliseconds) == ["trivial", "recorded", "group", "time-outs", "validated rows"]
    assert "milliseconds_per_episode" in shown and all(value > 0 for value in milliseconds.values())
    compared = tmp_path / "compared.json"
    compared.write_text(json.dumps(COMPARED))
    code, (shown, _) = report(out, compared, "--out", tmp_path / "report")
    assert code == 0 and (tmp_path / "report" / "report.md").read_text() in shown
    assert "### harness" in shown and "| trivial |" in shown
    assert "| tunix | 4.000 | 3.000 to 5.000 | 2,048 | 2,048 | 2.00 |" in shown
    assert "| trl: cannot run: no environment |" in shown


SIDE = {"median_seconds": 4.0, "min_seconds": 3.0, "max_seconds": 5.0, "tokens_per_second": 2048.0}
COMPARED = {
    "model": "m2",
    "rounds": 3,
    "processor": "a processor",
    "cases": {
        "rollout": {"sides": {"tunix": {**SIDE, "peak_bytes": 2**31, "ratio": 2.0}, "trl": {"error": "no environment"}}}
    },
}
"""Results of `compare.py`, without keys that the report does not read."""


def test_report_refuses_other_files(tmp_path, report):
    other = tmp_path / "other.json"
    other.write_text("{}")
    code, shown = report(other)
    assert code == 2 and str(other) in shown.err


def test_stored_results_give_the_committed_report():
    names = ("cpu_m2", "cpu_m60", "cpu_m2_compile", "cpu_m60_compile")
    stored = {name: (ROOT / "benchmarks" / "results" / f"{name}.json").read_text() for name in names}
    texts = [results_text(name, Results.model_validate_json(text)) for name, text in stored.items()]
    assert "\n\n".join(texts) + "\n" == (ROOT / "docs" / "performance" / "report.md").read_text()
