"""A mesh of eight CPU devices gives the numbers of one device; a process of its own fixes the number of devices.

The gradients on a mesh with all three axes are in tests/test_fresh_process.py; here is everything, on every kind.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def agreement(out, *options):
    command = [sys.executable, "benchmarks/scaling.py", "--out", str(out), *options]
    # With the emitters of fused loops, as for users: without them a mesh of one device changes the last bits.
    environment = {**os.environ, "XLA_FLAGS": "--xla_backend_optimization_level=0"}
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=environment)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return json.loads(out.read_text())["found"]


CLOSE = {
    "gradients": (
        "loss",
        "gradients",
        "gradients of a distillation",
        "log-probabilities",
        "gradients of log-probabilities",
    ),
    "sampling": ("log-probabilities of generate", "log-probabilities of the engine"),
    "updates": ("parameters after a step", "gradients of adapters"),
    "files": ("parameters read and moved",),
}


def judge(numbers, *parts):
    for name in (name for part in parts for name in CLOSE[part]):
        assert numbers[name] <= 1e-5, name


@pytest.mark.long
def test_every_kind_of_mesh(tmp_path):
    meshes = ["8x1x1", "1x8x1", "1x1x4", "2x2x2", "1x1x1"]
    found = agreement(tmp_path / "found.json", "--mesh", *meshes)
    assert list(found) == meshes
    for numbers in found.values():
        judge(numbers, *CLOSE)
        assert numbers["restored on another mesh"] == numbers["bits of files, written and read"] == 0
        for name in ("generate", "the engine"):
            assert numbers[f"  rows of {name} that diverge"] <= 0.1
    alone = found["1x1x1"]
    assert alone.pop("shares of trajectories") < 1e-6  # from a number by hand, and not from that of one device
    assert not any(alone.values()), "of one device a mesh changes no bit"
