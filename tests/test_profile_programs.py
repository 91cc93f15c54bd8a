"""`benchmarks/profile_programs.py` as a user runs it."""

import subprocess
import sys

import pytest


@pytest.mark.slow
@pytest.mark.parametrize("program", ["decode", "gradient"])
def test_operations_are_listed_with_their_shares(program):
    command = [sys.executable, "benchmarks/profile_programs.py", program, "--model", "qwen3-50k", "--lines", "5"]
    ended = subprocess.run(command, capture_output=True, text=True, check=True)
    head, *lines, last = ended.stdout.splitlines()
    assert head.split() == ["ms", "share", "times", "operation"] and len(lines) == 5
    shares = [float(line.split()[1].rstrip("%")) for line in lines]
    assert shares == sorted(shares, reverse=True) and 0 < sum(shares) <= 100
    assert any("dot_general" in line for line in lines)
    assert last.endswith("ms passed")
