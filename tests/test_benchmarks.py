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
    assert "memory ratio" in shown and figures["relative_difference"] < 1e-5
    assert figures["temporary_bytes"].keys() == {"at once", "in chunks"}
