"""The files of TensorBoard: scalars and texts by epoch, and the epochs that a resumed run hides."""

from tensorboardX.proto.event_pb2 import Event

from jaxft.runs.directory import RunDirectory
from jaxft.runs.loggers import LoggedRun
from jaxft.runs.tensorboard import TensorBoardLogger


def read_events(folder):
    """The events of TensorBoard's record files: length (8 bytes), crc (4), content, crc (4)."""
    found = []
    for path in sorted(folder.iterdir()):
        data = path.read_bytes()
        while data:
            length = int.from_bytes(data[:8], "little")
            found.append(Event.FromString(data[12 : 12 + length]))
            data = data[16 + length :]
    return found


def log(directory, first_epoch, epochs):
    logger = TensorBoardLogger(directory)
    logger.begin(LoggedRun("run", directory.path, first_epoch=first_epoch))
    for epoch in epochs:
        texts = {"stop": "length"} if epoch == 2 else {}
        logger.metrics(
            epoch, {"reward/mean": 0.25 * epoch, "rows": 8, **texts}, {"seconds": 0.5, "host_peak_bytes": 64}
        )
    logger.end("completed", {})


def test_metrics_and_timings_are_scalars_and_texts_by_epoch(tmp_path):
    with RunDirectory.create(tmp_path / "run") as directory:
        log(directory, 0, [1, 2])
    values = [
        (event.step, value.tag, value.simple_value)
        for event in read_events(directory.path / "tensorboard")
        for value in event.summary.value
    ]
    assert {(1, "reward/mean", 0.25), (2, "reward/mean", 0.5), (1, "training/rows", 8.0)} <= set(values)
    assert {(1, "time/seconds", 0.5), (2, "time/seconds", 0.5), (1, "memory/host_peak_bytes", 64.0)} <= set(values)
    assert [step for step, tag, _ in values if tag.startswith("training/stop")] == [2]


def test_a_resumed_run_hides_the_epochs_that_it_repeats(tmp_path):
    with RunDirectory.create(tmp_path / "run") as directory:
        log(directory, 0, [0, 1, 2])
        log(directory, 1, [1, 2])
    starts = [event.step for event in read_events(directory.path / "tensorboard") if event.HasField("session_log")]
    assert starts == [1]
