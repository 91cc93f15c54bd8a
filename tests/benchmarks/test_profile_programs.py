"""`benchmarks/profile_programs.py` lists operations by their share of the time."""

import subprocess
import sys

import pytest


@pytest.mark.slow
@pytest.mark.parametrize("program", ["decode", "gradient"])
def test_operations_are_listed_with_their_shares(program):
    command = [sys.executable, "benchmarks/profile_programs.py", program, "--model", "qwen3-50k", "--lines", "500"]
    ended = subprocess.run(command, capture_output=True, text=True, check=True)
    head, *lines, last = ended.stdout.splitlines()
    assert head.split() == ["ms", "share", "times", "operation"] and 5 < len(lines) < 500
    shares = [float(line.split()[1].rstrip("%")) for line in lines]
    assert shares == sorted(shares, reverse=True)
    assert abs(sum(shares) - 100) <= 0.05 * len(lines) + 1e-6, "each share is rounded to a tenth of a percent"
    assert any("dot_general" in line for line in lines)
    assert last.endswith("ms passed")
