"""The metrics files: reproducible metrics apart from measured times."""

import json
import math

import pytest

from jaxft.runs.directory import RunDirectory
from jaxft.runs.metrics import log_metrics, reward_figures


def test_figures_go_to_their_files(tmp_path):
    with RunDirectory.create(tmp_path / "run") as directory:
        log_metrics(directory, 1, {"reward/mean": 0.5, "rows": 8, "loss": math.nan}, {"seconds": 0.25})
        log_metrics(directory, 2, {"reward/mean": 0.75, "rows": 8, "stop": "length"}, {"seconds": 0.5})

    rows = [json.loads(line) for line in (directory.path / "training_metrics.jsonl").read_text().splitlines()]
    assert rows == [
        {"epoch": 1, "reward/mean": 0.5, "rows": 8, "loss": None, "non_finite": {"loss": "nan"}},
        {"epoch": 2, "reward/mean": 0.75, "rows": 8, "stop": "length"},
    ]
    assert next(iter(rows[0])) == "epoch"
    timings = [json.loads(line) for line in (directory.path / "timings.jsonl").read_text().splitlines()]
    assert timings == [{"epoch": 1, "seconds": 0.25}, {"epoch": 2, "seconds": 0.5}]


def test_a_run_has_the_first_last_and_best_of_every_reward():
    rows = [
        {"epoch": 0, "reward_mean": None, "reward/short": 0.5, "reward_min": 0.0},
        {"epoch": 1, "reward_mean": -0.25, "reward/short": 0.75, "reward/a": 2.0},
        {"epoch": 2, "reward_mean": -0.5, "reward/short": None},
        {"epoch": 3, "loss": 1.0},
    ]
    assert reward_figures(rows) == {
        **{"reward_first": -0.25, "reward_last": -0.5, "reward_best": -0.25},
        **{"reward/a_first": 2.0, "reward/a_last": 2.0, "reward/a_best": 2.0},
        **{"reward/short_first": 0.5, "reward/short_last": 0.75, "reward/short_best": 0.75},
    }
    assert reward_figures([]) == reward_figures(rows[3:]) == {}


@pytest.mark.parametrize(
    ("metrics", "timings", "complaint"),
    [
        ({"seconds": 1.0}, {"seconds": 1.0}, "more than one metric called seconds"),
        ({"epoch": 1}, {}, "more than one metric called epoch"),
    ],
)
def test_an_ambiguous_row_is_refused_before_anything_is_written(tmp_path, metrics, timings, complaint):
    with RunDirectory.create(tmp_path / "run") as directory:
        with pytest.raises(ValueError, match=complaint):
            log_metrics(directory, 3, metrics, timings)
        assert not (directory.path / "training_metrics.jsonl").exists()
