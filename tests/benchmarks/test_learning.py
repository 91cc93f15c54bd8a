"""`benchmarks/compare.py learning`: what its table is made of, and five steps of jaxft. No test judges the speed."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from learning import best_rate, ratios_of, reached, summary

ROOT = Path(__file__).parents[2]


def curve(*scores):
    """A look every 10 episodes and 2 seconds."""
    return [{"episodes": 10 * i, "seconds": 2.0 * i, "score": score} for i, score in enumerate(scores)]


def test_the_first_look_at_the_target_counts():
    assert reached({"curve": curve(0.1, 0.8, 0.7, 0.9)}, 0.8) == {"episodes": 10, "seconds": 2.0}
    assert reached({"curve": curve(0.1, 0.7)}, 0.8) == {"episodes": None, "seconds": None}


def test_the_best_rate_has_the_target_on_most_seeds_and_first_or_is_the_lowest_or_ends_highest():
    never, late, early = curve(0.1, 0.2, 0.3), curve(0.1, 0.2, 0.8), curve(0.1, 0.8, 0.2)
    assert best_rate({1e-3: [late], 2e-3: [early], 4e-3: [never]}, 0.8) == 2e-3
    assert best_rate({1e-3: [late, late], 2e-3: [early, never]}, 0.8) == 1e-3
    assert best_rate({1e-3: [early, late], 2e-3: [early, early]}, 0.8) == 2e-3
    assert best_rate({2e-3: [curve(0.1, 0.9)], 1e-3: [early]}, 0.8) == 1e-3
    assert best_rate({1e-3: [curve(0.1, 0.5)], 2e-3: [curve(0.1, 0.6)]}, 0.8) == 2e-3


def test_a_seed_that_never_gets_there_leaves_no_interval():
    found = summary([{"curve": curve(0.1, 0.8)}, {"curve": curve(0.1, 0.2, 0.9)}], 0.8)
    assert found["episodes"]["mean"] == 15 and found["episodes"]["interval"] == (10, 20)
    found = summary([{"curve": curve(0.1, 0.8)}, {"curve": curve(0.1, 0.2)}], 0.8)
    assert found["episodes"]["mean"] is None and found["episodes"]["interval"] is None
    assert found["episodes"]["values"] == [10, None] and found["episodes"]["median"] is None
    json.dumps(found, allow_nan=False)


def test_a_seed_that_never_gets_there_is_the_last_for_the_median():
    seeds = [curve(0.1, 0.2), curve(0.1, 0.9), curve(0.1, 0.2, 0.9)]
    found = summary([{"curve": each} for each in seeds], 0.8)
    assert found["episodes"]["median"] == 20 and found["seconds"]["median"] == 4.0


def test_a_peer_is_compared_with_jaxft_where_both_get_there():
    slow, never = ([{"curve": each}] for each in (curve(0.1, 0.1, 0.9), curve(0.1, 0.1)))
    of_sides = {"jaxft": [{"curve": curve(0.1, 0.9)}], "trl": slow, "tunix": never}
    summaries = {side: summary(results, 0.8) for side, results in of_sides.items()}
    assert ratios_of(summaries) == {"trl": {"episodes": 2.0, "seconds": 2.0}}
    assert ratios_of({"trl": summaries["trl"]}) == {}
    assert ratios_of(summaries | {"jaxft": summary(never, 0.8)}) == {}


@pytest.mark.long
def test_jaxft_learns_from_the_checkpoint_that_it_made(tmp_path):
    out = tmp_path / "found.json"
    command = [sys.executable, "benchmarks/compare.py", "learning", "--sides", "jaxft", "--out", str(out)]
    command += ["--preset", "qwen3-200k", "--steps", "5", "--evaluate-every", "5", "--warm-start-steps", "20"]
    command += ["--learning-rates", "1e-3", "--tuning-seeds", "100", "--seeds", "0", "1"]
    shown = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    assert "jaxft  seed 1: " in shown and "over jaxft" not in shown
    found = json.loads(out.read_text())
    for each in found["sides"]["jaxft"]["curves"]:
        assert [row["episodes"] for row in each] == [0, 5 * 256]
        assert 0 < each[0]["seconds"] < each[1]["seconds"] and 0 <= each[1]["score"] <= 1
    first, second = found["sides"]["jaxft"]["curves"]
    assert first[0]["score"] == second[0]["score"]  # of one checkpoint
