"""The metrics log: reproducible metrics apart from measured times, all of them in TensorBoard too."""

import json
import math

import pytest
from tensorboardX.proto.event_pb2 import Event

from jaxft.runs.directory import RunDirectory
from jaxft.runs.metrics import MetricsLog


def read_events(folder):
    """The scalars and texts of TensorBoard's record files: length (8 bytes), crc (4), content, crc (4)."""
    found = []
    for path in folder.iterdir():
        data = path.read_bytes()
        while data:
            length = int.from_bytes(data[:8], "little")
            event = Event.FromString(data[12 : 12 + length])
            found += [(event.step, value.tag, value.simple_value) for value in event.summary.value]
            data = data[16 + length :]
    return found


def test_figures_go_to_their_files(tmp_path):
    with RunDirectory.create(tmp_path / "run") as directory:
        log = MetricsLog(directory)
        log.log(1, {"reward/mean": 0.5, "rows": 8, "loss": math.nan}, {"seconds": 0.25})
        log.log(2, {"reward/mean": 0.75, "rows": 8, "stop": "length"}, {"seconds": 0.5})
        log.close()

    rows = [json.loads(line) for line in (directory.path / "training_metrics.jsonl").read_text().splitlines()]
    assert rows == [
        {"epoch": 1, "reward/mean": 0.5, "rows": 8, "loss": None, "non_finite": {"loss": "nan"}},
        {"epoch": 2, "reward/mean": 0.75, "rows": 8, "stop": "length"},
    ]
    assert next(iter(rows[0])) == "epoch"
    timings = [json.loads(line) for line in (directory.path / "timings.jsonl").read_text().splitlines()]
    assert timings == [{"epoch": 1, "seconds": 0.25}, {"epoch": 2, "seconds": 0.5}]

    events = read_events(directory.path / "tensorboard")
    assert {(1, "reward/mean", 0.5), (2, "reward/mean", 0.75), (1, "rows", 8.0), (2, "seconds", 0.5)} <= set(events)
    assert [step for step, tag, _ in events if tag.startswith("stop")] == [2]


@pytest.mark.parametrize(
    ("metrics", "timings", "complaint"),
    [
        ({"seconds": 1.0}, {"seconds": 1.0}, "more than one metric called seconds"),
        ({"epoch": 1}, {}, "more than one metric called epoch"),
    ],
)
def test_an_ambiguous_row_is_refused_before_anything_is_written(tmp_path, metrics, timings, complaint):
    with RunDirectory.create(tmp_path / "run") as directory:
        log = MetricsLog(directory)
        with pytest.raises(ValueError, match=complaint):
            log.log(3, metrics, timings)
        log.close()
        assert not (directory.path / "training_metrics.jsonl").exists()
