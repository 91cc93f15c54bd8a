"""The reward plot: a picture for any history, and numbers of the moving average by hand."""

import math

import pytest

from jaxft.runs.directory import RunDirectory
from jaxft.runs.plots import moving_average, plot_rewards


def history(epochs):
    return [
        {"epoch": e, "reward_mean": e / epochs, "group_reward_q25": 0.0, "group_reward_q75": 1.0}
        for e in range(1, epochs + 1)
    ]


def size(png):
    assert png[:8] == b"\x89PNG\r\n\x1a\n"
    return int.from_bytes(png[16:20]), int.from_bytes(png[20:24])


@pytest.mark.parametrize("epochs", [0, 1, 500])
def test_every_length_gives_a_picture(tmp_path, epochs):
    with RunDirectory.create(tmp_path / "lr=$1 and $2_") as directory:
        plain = plot_rewards(directory, history(epochs)).read_bytes()
        assert size(plain) == (1200, 675)
        validated = plot_rewards(directory, history(epochs), [{"epoch": 1, "avg_reward": 0.5}]).read_bytes()
    assert validated != plain
    assert (directory.path / "reward_plot.png").read_bytes() == validated


def test_epochs_without_a_reward_leave_gaps(tmp_path):
    rows = history(20)
    rows[3] = {"epoch": 4, "reward_mean": None, "group_reward_q25": math.nan, "group_reward_q75": math.inf}
    with RunDirectory.create(tmp_path / "run") as directory:
        assert size(plot_rewards(directory, rows, [{"epoch": 4, "avg_reward": None}]).read_bytes())


def test_the_band_is_between_the_quartiles(tmp_path):
    rows = history(20)
    with RunDirectory.create(tmp_path / "run") as directory:
        picture = plot_rewards(directory, rows).read_bytes()
        extremes = [row | {"reward_min": -9.0, "reward_max": 9.0} for row in rows]
        assert plot_rewards(directory, extremes).read_bytes() == picture
        narrow = [row | {"group_reward_q25": 0.25, "group_reward_q75": 0.75} for row in rows]
        assert plot_rewards(directory, narrow).read_bytes() != picture


def test_the_moving_average_is_centred():
    assert moving_average([3.0, 1.0, 2.0, 6.0], 3) == [2.0, 2.0, 3.0, 4.0]
    line = [float(epoch) for epoch in range(40)]
    assert moving_average(line, 11)[5:-5] == line[5:-5]  # it neither leads nor lags
    averages = moving_average([math.nan, 1.0], 1)
    assert math.isnan(averages[0]) and averages[1] == 1.0
