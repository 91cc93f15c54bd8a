"""The peak over the phases of a run, and advice about it."""

from types import SimpleNamespace

import jax
import pytest

from jaxft.errors import DeviceMemoryError
from jaxft.training import memory as memory_module
from jaxft.training.memory import memory_advice, memory_errors, peak, peak_bytes, phases, sampling_temporary_bytes

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


def test_temporaries_of_sampling_are_those_of_the_largest_program():
    def engine(*sizes):
        compiled = [SimpleNamespace(memory_analysis=lambda n=n: SimpleNamespace(temp_size_in_bytes=n)) for n in sizes]
        lowered = {n: lambda each=each: SimpleNamespace(compile=lambda: each) for n, each in enumerate(compiled)}
        return SimpleNamespace(sizes=len(sizes), programs=lambda shapes: lowered)

    transfer = SimpleNamespace(shapes=lambda params: params)
    policy = SimpleNamespace(engines=[engine(3, 7), engine(5)], weights=SimpleNamespace(transfer=transfer))
    assert sampling_temporary_bytes(policy, {}) == 7


MEMORY = {"parameters": 4.0, "gradients": 4.0, "update": 9.0, "sampling weights": 2.0, "sampling": 8.0}
ENGINE = SimpleNamespace(sizes="slots (now 8)")


@pytest.mark.parametrize(
    ("memory", "has", "named"),
    [
        (MEMORY, 25.0, None),
        (MEMORY, None, None),
        (MEMORY, 24.9, ["25 MiB", "for update", "microbatch_tokens (now 384)", "llms.policy.remat"]),
        (MEMORY | {"sampling": 12.0}, 24.9, ["29 MiB", "for sampling", "llms.policy.slots (now 8)"]),
        (MEMORY | {"parameters": 30.0}, 24.9, ["51 MiB", "for parameters", "llms.policy.lora", "llms.policy.mesh"]),
    ],
)
def test_advice_names_what_to_change(monkeypatch, memory, has, named):
    monkeypatch.setattr(memory_module, "device_mebibytes", lambda sharding: has)
    policy = SimpleNamespace(model=SimpleNamespace(sharding=None), engine=ENGINE)
    advice = memory_advice(memory, policy, "policy", 384)
    assert (advice is None) == (named is None) and all(words in advice for words in named or ())


def test_an_error_of_memory_names_the_settings_and_others_stay():
    named = r"384.*slots \(now 8\).*RESOURCE_EXHAUSTED"
    with pytest.raises(DeviceMemoryError, match=named), memory_errors(ENGINE, "policy", 384):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory\nwhile allocating")
    with pytest.raises(RuntimeError, match="another"), memory_errors(ENGINE, "policy", 384):
        raise RuntimeError("another")
