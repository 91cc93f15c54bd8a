"""`benchmarks/compare.py` at a tiny shape and without the peers. No test judges the speed."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def run(tmp_path, *arguments):
    """Standard output and the results that a call writes."""
    out = tmp_path / "out" / "results.json"
    command = [sys.executable, "benchmarks/compare.py", *arguments, "--model", "tiny", "--out", str(out)]
    # An empty place for the peers, whatever is installed here; compiled in a hurry, as no time is looked at.
    variables = os.environ | {"JAXFT_PEERS": str(tmp_path), "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}
    ended = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=variables)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout, json.loads(out.read_text())


@pytest.mark.long
def test_jaxft_does_every_case_and_peers_that_are_not_installed_are_named(tmp_path):
    cases = ["rollout", "heavy_tailed", "update", "epoch"]
    sides = ["jaxft", "jaxft-lockstep", "huggingface", "tunix"]
    options = ["--rounds", "1", "--repeats", "2", "--environment", "EXAMPLE=1"]
    shown, found = run(tmp_path, *cases, "--sides", *sides, *options)
    assert "EXAMPLE=1" in shown and found["environment_variables"]["EXAMPLE"] == "1"
    assert found["processor"] is not None and found["threads"] >= 1 and found["environment"]["versions"]["jaxft"]
    assert list(found["cases"]) == cases
    for case in cases:
        summaries, work = found["cases"][case]["sides"], found["cases"][case]["work"]
        for peer in [each for each in ("huggingface", "tunix") if each in summaries]:
            assert "make_environments.sh" in summaries.pop(peer)["error"]
            assert f"{peer:<22} cannot run: no environment" in shown
        assert summaries["jaxft"]["ratio"] == 1.0 and summaries["jaxft"]["tokens_per_second"] > 0
        assert list(summaries) == (["jaxft", "jaxft-lockstep"] if case == "heavy_tailed" else ["jaxft"])
        for side in summaries.values():
            assert len(side["rounds"]) == 1 and len(side["rounds"][0]["seconds"]) == 2
            assert side["min_seconds"] <= side["median_seconds"] <= side["max_seconds"]
            assert side["rounds"][0]["peak_bytes"] >= side["rounds"][0]["peak_bytes_before"] > 0
        rows = work["prompts"] * work["generations"]
        wanted = {"update": rows * (work["prompt_tokens"] + work["new_tokens"]), "epoch": rows * work["new_tokens"]}
        wanted["rollout"] = wanted["epoch"]
        assert summaries["jaxft"]["rounds"][0]["tokens"] == wanted.get(case, sum(work["answer_tokens"] or []))
    assert "entropy" in found["cases"]["update"]["sides"]["jaxft"]["metrics"]
    assert "heavy_tailed tiny: 8 answers" in shown


@pytest.mark.slow
def test_a_side_that_fails_ends_nothing(tmp_path):
    shown, found = run(tmp_path, "update", "--sides", "jaxft", "--rounds", "2", "--environment", "JAX_PLATFORMS=none")
    side = found["cases"]["update"]["sides"]["jaxft"]
    assert "none" in side["error"] and side["rounds"] == [] and "cannot run" in shown
