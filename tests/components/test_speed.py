"""`jaxft/components/speed.py`: the shares of ceilings, on devices that are made up."""

from typing import NamedTuple

import jax
import pytest

import jaxft
from jaxft.components import speed as speed_module
from jaxft.components.health import Health
from jaxft.components.speed import Speed
from jaxft.models.ceilings import decode_bytes, model_flops

CONFIG = jaxft.model_preset("qwen3-50k")


class Device(NamedTuple):
    """The attributes of a jax device that are looked at."""

    device_kind: str
    platform: str = "gpu"


@pytest.fixture
def policy():
    model, params = jaxft.init_model(CONFIG, jax.random.key(0))
    policy = jaxft.Policy(model, params, jaxft.load_tokenizer(), stop_ids=(), seed=0, slots=2, max_context_tokens=64)
    yield policy
    policy.close()


def measured(policy, monkeypatch, *devices):
    """The speed of a job of two seconds with three sequences, after sixteen seconds of sampling, on these devices."""
    monkeypatch.setattr(speed_module, "compute_devices", lambda sharding: list(devices))
    speed = Speed(policy)
    speed._sampled = policy.device_seconds()["sampling"] - 16.0, 0, 0
    policy.engine.counts.decode_steps, policy.engine.counts.seen_tokens = 100, 5000
    return speed.of_job([(8, 0), (8, 6), (16, 0)], {"training": policy.device_seconds()["training"] - 2.0})


def test_shares_of_a_known_chip(policy, monkeypatch):
    found = measured(policy, monkeypatch, Device("NVIDIA H200"), Device("NVIDIA H200"))
    flops = model_flops(CONFIG, 2, 8) - model_flops(CONFIG, 1, 6) + model_flops(CONFIG, 1, 16)
    read = decode_bytes(CONFIG, 100, 5000, itemsize=4)
    assert found == pytest.approx(
        {
            "train_tokens_per_second": 16.0,
            "train_mfu": flops / 2 / (2 * 989e12),
            "decode_bandwidth_share": read / 16 / 4800e9,
        }
    )


def test_a_made_up_card_has_tokens_alone_and_a_cpu_nothing(policy, monkeypatch):
    assert measured(policy, monkeypatch, Device("a card of tomorrow")) == {"train_tokens_per_second": 16.0}
    assert measured(policy, monkeypatch, Device("cpu", "cpu")) == {}
    monkeypatch.undo()
    assert Speed(policy).of_job([(8, 0)], {}) == {}


def test_without_a_ceiling_nothing_is_slow():
    assert Health().lines({"train_tokens_per_second": 1.0}) == []
