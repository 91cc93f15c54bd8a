"""The peak over the phases of a run."""

from types import SimpleNamespace

import pytest

from jaxft.training import memory as memory_module
from jaxft.training.memory import peak, peak_bytes, phases

HELD = {"parameters": 4.0, "optimizer": 8.0, "reference": 0.0, "sampling": 3.0}


@pytest.mark.parametrize(
    ("update", "temporaries", "wanted"), [(9.0, 1.0, 15.0 + 4.0 + 9.0), (1.0, 9.0, 15.0 + 2.0 + 9.0)]
)
def test_update_and_rollout_take_turns(update, temporaries, wanted):
    memory = HELD | {"gradients": 4.0, "update": update, "sampling weights": 2.0, "sampling temporaries": temporaries}
    assert peak(memory) == wanted
    both = [size for sizes in phases(memory).values() for size in sizes.values()]
    assert sum(both) == sum(memory.values()) + sum(HELD.values())


def test_devices_that_sample_alone_are_a_phase_of_their_own():
    memory = HELD | {"update": 9.0, "sampler's sampling": 30.0, "sampler's sampling weights": 2.0}
    assert peak(memory) == 32.0
    assert set(phases(memory)) == {"update", "rollout", "sampler"}
    assert phases(memory)["update"] == HELD | {"update": 9.0}


def test_the_fullest_device_is_told_if_any_says(monkeypatch):
    said = [None, {"peak_bytes_in_use": 5}, {"peak_bytes_in_use": 7}, {}]
    devices = [SimpleNamespace(memory_stats=lambda stats=stats: stats) for stats in said]
    monkeypatch.setattr(memory_module, "_own_devices", lambda sharding: devices)
    assert peak_bytes(None)["device_peak_bytes"] == 7
    devices[:] = devices[:1]
    assert peak_bytes(None).keys() == {"host_peak_bytes"}
