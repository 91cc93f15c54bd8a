"""`benchmarks/overlap.py` compares whole runs with and without overlap, on the same episodes."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.long
def test_both_sides_are_run_and_compared(tmp_path):
    options = ["--repeats", "1", "--epochs", "2", "--examples", "1", "--preset", "qwen3-50k"]
    command = [
        sys.executable,
        "benchmarks/overlap.py",
        "never waiting",
        *options,
        "--out",
        str(tmp_path / "found.json"),
    ]
    shown = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    assert shown.count("never waiting") == 3 and "ratio" in shown
    (result,) = json.loads((tmp_path / "found.json").read_text())["results"]
    sides = [result[f"max_staleness_{staleness}"] for staleness in (0, 1)]
    assert result["ratio"] == pytest.approx(sides[1]["seconds"] / sides[0]["seconds"])
    assert all(side["training"] > 0 and side["sampling"] > 0 for side in sides)
