"""The probe of packed rows: right kernels pass it, kernels that mix segments are refused before anything is trained."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxft.models.flash as flash_module
import jaxft.models.segment_probe as probe_module
from jaxft.core.sharding import make_mesh
from jaxft.errors import CheckFailed
from jaxft.models.attention import HeadRows, Scores, attend, visible_keys
from jaxft.models.config import PRESETS
from jaxft.models.decoder import decoder
from jaxft.models.decoder_sharding import sharding_for
from jaxft.models.flash import Choice
from jaxft.models.segment_probe import LARGEST_LEAK, check_segments, segment_leak
from jaxft.training.config import LossConfig
from jaxft.training.learner import Learner
from jaxft.training.optimizer_config import OptimizerConfig

SMALL = PRESETS["qwen3-50k"]
SCORES = Scores(0.25, window=40)


def right(scores, ids, q, k, v):
    """Attention within segments, by the reference."""
    places = jnp.arange(q.shape[1])
    visible = visible_keys(places[None], places, scores.window, ids, ids)
    return attend(q, HeadRows(k.transpose(0, 2, 3, 1), v.transpose(0, 2, 1, 3)), visible, scores)


def one_key_of_another_segment(scores, ids, q, k, v):
    return right(scores, jnp.pad(ids, ((0, 0), (0, 1)), mode="edge")[:, 1:], q, k, v)


def other_heads(scores, ids, q, k, v):
    """As JAX 0.10.2 reads keys: a segment's own in the first head, others' in the second."""
    return right(scores, ids, q, jnp.roll(k, 70, axis=1), v)


def wrong_gradient(scores, ids, q, k, v):
    mixed = right(scores, ids, q, k, v)
    leak = jnp.zeros_like(mixed).at[:, 100].set(jnp.repeat(v, 2, axis=2)[:, 10])
    return mixed + leak - jax.lax.stop_gradient(leak)


LEAKS = {
    "all segments": lambda scores, ids, *qkv: right(scores, jnp.ones_like(ids), *qkv),
    "one key": one_key_of_another_segment,
    "keys": other_heads,
    "gradient alone": wrong_gradient,
    "not a number": lambda scores, ids, *qkv: right(scores, ids, *qkv) * jnp.nan,
}


@pytest.fixture(scope="module")
def leaks():
    """Leak of each attention in bfloat16, by one program."""
    attentions = {"none": right, **LEAKS}

    @jax.jit
    def all_of_them():
        return {
            name: segment_leak(partial(each, SCORES), SCORES, (1, 2, 1, 16), jnp.bfloat16)
            for name, each in attentions.items()
        }

    return jax.device_get(all_of_them())


def test_rounding_is_no_leak(leaks):
    assert 0 < leaks["none"] < 0.3 * LARGEST_LEAK


@pytest.mark.parametrize("name", LEAKS)
def test_a_leak_is_far_beyond_rounding(leaks, name):
    assert np.isnan(leaks[name]) if name == "not a number" else leaks[name] > 5 * LARGEST_LEAK


@pytest.fixture
def kernel(monkeypatch):
    """Makes an attention that of packed rows on this CPU, as the splash kernel."""

    def use(attention):
        probe_module._leak_on_devices.cache_clear()
        monkeypatch.setattr(flash_module, "choose_kernel", lambda *_, has_segments: Choice("splash"))
        run = lambda scores, devices, ids, sinks, q, k, v: attention(scores, ids, q, k, v)  # noqa: E731
        monkeypatch.setitem(flash_module.KERNELS, "splash", run)

    yield use
    probe_module._leak_on_devices.cache_clear()


def test_a_learner_refuses_a_kernel_that_leaks(kernel):
    kernel(other_heads)
    model = decoder(SMALL)
    params = jax.eval_shape(model.init, jax.random.key(0))
    optimizer = OptimizerConfig(name="sgd", learning_rate=0.5)
    with pytest.raises(CheckFailed) as raised:
        Learner(model, LossConfig(name="dapo"), optimizer, packing=True).arrays(params)
    text = str(raised.value)
    for part in ("splash kernel", "float32", f"jax {jax.__version__}", "cuDNN", "0.11.2", "packing", "4 query heads"):
        assert part in text
    assert "\n" not in text
    Learner(model, LossConfig(name="dapo"), optimizer, packing=False).packs_rows(params)


def test_a_right_kernel_is_run_once_on_every_device_of_the_mesh(kernel):
    kernel(right)
    sharding = sharding_for(SMALL, make_mesh(devices=jax.devices()[:1]))
    for _ in range(2):
        check_segments(SMALL, jnp.float32, sharding)
    assert probe_module._leak_on_devices.cache_info()[:2] == (1, 1)  # hits and misses


def test_the_reference_is_not_run():
    before = probe_module._leak_on_devices.cache_info()
    check_segments(SMALL, jnp.float32, None)
    assert probe_module._leak_on_devices.cache_info() == before


@pytest.mark.gpu
@pytest.mark.parametrize("preset", ["qwen3-0.6b", "qwen3-58m"])
def test_the_kernels_of_this_device_do_not_leak(preset):
    check_segments(PRESETS[preset], jnp.bfloat16, None)
