"""`benchmarks/partial_rollouts.py` samples the same answers with and without partial rollouts, in fewer steps."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.long
def test_carried_answers_take_fewer_steps(tmp_path):
    options = ["--repeats", "1", "--warm-up", "4", "--collections", "4", "--out", str(tmp_path / "found.json")]
    command = [sys.executable, "benchmarks/partial_rollouts.py", *options]
    shown = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    (found,) = json.loads((tmp_path / "found.json").read_text())["rounds"]
    assert [shown.count(name) for name in found] == [1] * 4
    assert found["128 tokens, max_staleness 4"]["steps"] < 0.5 * found["whole"]["steps"]
