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


def test_harness(tmp_path):
    out = tmp_path / "harness.json"
    command = [sys.executable, str(ROOT / "benchmarks" / "harness.py"), "--episodes", "64", "--repeats", "1"]
    shown = subprocess.run([*command, "--out", str(out)], check=True, capture_output=True, text=True, cwd=ROOT).stdout
    figures = json.loads(out.read_text())["milliseconds_per_episode"]
    assert list(figures) == ["trivial", "recorded", "group", "time-outs", "validated rows"]
    assert "ms per episode" in shown and all(milliseconds > 0 for milliseconds in figures.values())
