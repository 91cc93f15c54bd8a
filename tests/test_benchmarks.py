"""Benchmarks run at small shapes; what they find is not judged here."""

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_log_probabilities(tmp_path):
    out = tmp_path / "logprobs.json"
    shapes = ["--vocabulary", "500", "--hidden_size", "8", "--rows", "2", "--tokens", "16", "--rounds", "1"]
    command = [sys.executable, str(ROOT / "benchmarks" / "logprobs.py"), *shapes, "--out", str(out)]
    shown = subprocess.run(command, check=True, capture_output=True, text=True, cwd=ROOT).stdout
    figures = json.loads(out.read_text())
    forms = ["take - logsumexp", "log_softmax", "log_softmax, entropy", "chunks", "chunks x 0.5", "chunks x 2"]
    assert [line[:21].strip() for line in shown.splitlines()[1:7]] == forms
    assert list(figures["temporary_bytes"]) == list(figures["median_seconds"]) == forms
    assert max(figures["relative_difference"].values()) < 1e-5


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
"""What `compare.py` writes, less what the report does not read."""


def test_report_refuses_other_files(tmp_path):
    other = tmp_path / "other.json"
    other.write_text("{}")
    command = [sys.executable, str(ROOT / "benchmarks" / "report.py"), str(other)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 2 and "is no result of run.py or compare.py" in done.stderr


def report(*arguments):
    command = [sys.executable, str(ROOT / "benchmarks" / "report.py"), *map(str, arguments[:-1])]
    done = subprocess.run([*command, "--out", str(arguments[-1])], check=True, capture_output=True, text=True, cwd=ROOT)
    assert (arguments[-1] / "report.md").read_text() in done.stdout
    return done.stdout
