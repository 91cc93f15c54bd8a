"""A mesh of eight CPU devices beside one device, in a process of its own: the number of devices is settled there once.

One mesh with all three axes by default; every kind of mesh among the slow tests.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def agreement(out, *meshes):
    command = [sys.executable, "benchmarks/scaling.py", "--out", str(out), "--mesh", *meshes]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return json.loads(out.read_text())["found"]


def judge(figures):
    for name in ("loss", "gradients", "parameters after a step"):
        assert figures[name] <= 1e-5, name
    for who in ("log-probabilities", "log-probabilities of generate", "log-probabilities of the engine"):
        assert figures[who] <= 1e-5, who
    assert figures["restored on another mesh"] == 0
    assert {"  rows of generate that diverge", "  rows of the engine that diverge"} <= figures.keys()


def test_a_mesh_of_all_axes(tmp_path):
    judge(agreement(tmp_path / "found.json", "2x2x2")["2x2x2"])


@pytest.mark.slow
def test_every_kind_of_mesh(tmp_path):
    found = agreement(tmp_path / "found.json", "8x1x1", "1x8x1", "1x1x4", "1x1x1")
    assert list(found) == ["8x1x1", "1x8x1", "1x1x4", "1x1x1"]
    for figures in found.values():
        judge(figures)
    assert not any(value for name, value in found["1x1x1"].items()), "of one device a mesh changes no bit"
