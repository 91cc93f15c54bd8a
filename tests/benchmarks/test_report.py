"""`benchmarks/report.py` on results of `run.py` and `compare.py`."""

import json
import subprocess
import sys
from pathlib import Path

from records import Results
from report import results_text

ROOT = Path(__file__).parents[2]


def test_harness_and_its_report(tmp_path):
    out = tmp_path / "harness.json"
    command = [sys.executable, str(ROOT / "benchmarks" / "run.py"), "harness", "--shrink", "--repeats", "1"]
    shown = subprocess.run([*command, "--out", str(out)], check=True, capture_output=True, text=True, cwd=ROOT).stdout
    (case,) = json.loads(out.read_text())["cases"]
    milliseconds = {line["name"]: line["figures"]["milliseconds_per_episode"] for line in case["lines"]}
    assert list(milliseconds) == ["trivial", "recorded", "group", "time-outs", "validated rows"]
    assert "milliseconds_per_episode" in shown and all(value > 0 for value in milliseconds.values())
    compared = tmp_path / "compared.json"
    compared.write_text(json.dumps(COMPARED))
    shown = report(out, compared, tmp_path / "report")
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


def test_report_refuses_other_files(tmp_path):
    other = tmp_path / "other.json"
    other.write_text("{}")
    command = [sys.executable, str(ROOT / "benchmarks" / "report.py"), str(other)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 2 and str(other) in done.stderr


def report(*arguments):
    command = [sys.executable, str(ROOT / "benchmarks" / "report.py"), *map(str, arguments[:-1])]
    done = subprocess.run([*command, "--out", str(arguments[-1])], check=True, capture_output=True, text=True, cwd=ROOT)
    assert (arguments[-1] / "report.md").read_text() in done.stdout
    return done.stdout


def test_stored_results_give_the_committed_report():
    names = ("cpu_m2", "cpu_m60", "cpu_m2_compile", "cpu_m60_compile")
    stored = {name: (ROOT / "benchmarks" / "results" / f"{name}.json").read_text() for name in names}
    texts = [results_text(name, Results.model_validate_json(text)) for name, text in stored.items()]
    assert "\n\n".join(texts) + "\n" == (ROOT / "docs" / "performance" / "report.md").read_text()
