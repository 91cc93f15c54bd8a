"""Advice about memory: none where it fits, else the settings that make the largest part of the largest phase."""

from types import SimpleNamespace

import jax
import pytest

from jaxft.errors import DeviceMemoryError
from jaxft.shipped.configs import LocalTrainerAdapterConfig
from jaxft.shipped.memory_advice import memory_advice, memory_errors

MEMORY = {"parameters": 4.0, "gradients": 4.0, "update": 9.0, "sampling weights": 2.0, "sampling": 8.0}
ENGINE = SimpleNamespace(sizes="slots (now 8)")
CONFIG = LocalTrainerAdapterConfig(llm="policy", microbatch_tokens=384)


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
    monkeypatch.setattr("jaxft.shipped.memory_advice.device_mebibytes", lambda sharding: has)
    policy = SimpleNamespace(model=SimpleNamespace(sharding=None), engine=ENGINE)
    advice = memory_advice(CONFIG, policy, memory)
    assert (advice is None) == (named is None) and all(words in advice for words in named or ())


def test_an_error_of_memory_names_the_settings_and_others_stay():
    named = r"384.*slots \(now 8\).*RESOURCE_EXHAUSTED"
    with pytest.raises(DeviceMemoryError, match=named), memory_errors(CONFIG, ENGINE):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory\nwhile allocating")
    with pytest.raises(RuntimeError, match="another"), memory_errors(CONFIG, ENGINE):
        raise RuntimeError("another")
