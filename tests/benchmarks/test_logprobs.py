"""`benchmarks/logprobs.py`: all forms agree and are compared in memory and time."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.long
def test_log_probabilities(tmp_path):
    out = tmp_path / "logprobs.json"
    shapes = ["--vocabulary", "500", "--hidden-size", "8", "--rows", "2", "--tokens", "16", "--rounds", "1"]
    command = [sys.executable, str(ROOT / "benchmarks" / "logprobs.py"), *shapes, "--out", str(out)]
    shown = subprocess.run(command, check=True, capture_output=True, text=True, cwd=ROOT).stdout
    results = json.loads(out.read_text())
    forms = ["take - logsumexp", "log_softmax", "log_softmax, entropy", "chunks", "chunks x 0.5", "chunks x 2"]
    assert [line[:21].strip() for line in shown.splitlines()[1:7]] == forms
    assert list(results["temporary_bytes"]) == list(results["median_seconds"]) == forms
    assert max(results["relative_difference"].values()) < 1e-5
