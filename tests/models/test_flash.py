"""Fused attention: kernels in interpret mode give the values and gradients of the reference, wherever one is chosen."""

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, Mesh

from jaxft.core.sharding import AXES, devices_of
from jaxft.models.attention import LayerCache, attend, attend_in_chunks, visible_keys
from jaxft.models.config import PRESETS
from jaxft.models.decoder import sharding_for
from jaxft.models.flash import Choice, announce, choose_kernel, row_attention

SMALL = PRESETS["qwen3-50k"]


# --- The choice.


@dataclass(frozen=True, eq=False)
class Device:
    """The attributes of a device that tell its abilities; only GPUs have a `compute_capability`."""

    platform: str
    device_kind: str
    compute_capability: str | None = None


H100, A100 = Device("gpu", "NVIDIA H100", "9.0"), Device("gpu", "NVIDIA A100", "8.0")
T4, MI300 = Device("gpu", "Tesla T4", "7.5"), Device("gpu", "AMD Instinct MI300X", "gfx942")
V5E = Device("tpu", "TPU v5 lite")


@pytest.mark.parametrize(
    ("dtype", "head_dim", "window", "devices", "alone", "packed"),
    [
        (jnp.bfloat16, 64, None, [H100], "cudnn", "pallas"),
        (jnp.bfloat16, 64, 32, [H100], "cudnn", "xla"),
        (jnp.float16, 256, None, [H100], "cudnn", "xla"),
        (jnp.bfloat16, 128, None, [A100, A100], "cudnn", "pallas"),
        (jnp.bfloat16, 256, None, [A100], "xla", "xla"),
        (jnp.bfloat16, 256, None, [H100, A100], "xla", "xla"),
        (jnp.bfloat16, 64, None, [H100, T4], "xla", "xla"),
        (jnp.bfloat16, 64, None, [MI300], "xla", "xla"),
        (jnp.float32, 64, None, [H100], "xla", "xla"),
        (jnp.bfloat16, 60, None, [H100], "xla", "xla"),
        (jnp.bfloat16, 64, 32, [V5E], "splash", "splash"),
        (jnp.float32, 128, None, [V5E], "splash", "splash"),
        (jnp.float16, 128, None, [V5E], "xla", "xla"),
        (jnp.bfloat16, 64, None, jax.devices("cpu"), "xla", "xla"),
        (jnp.bfloat16, 64, None, [], "xla", "xla"),
    ],
)
def test_a_kernel_is_chosen_where_its_conditions_hold(dtype, head_dim, window, devices, alone, packed):
    for has_segments, expected in ((False, alone), (True, packed)):
        assert choose_kernel(jnp.dtype(dtype), head_dim, window, devices, has_segments=has_segments).kernel == expected


def test_the_devices_of_the_mesh_decide():
    one = jax.devices()[:1]
    mesh = Mesh(np.array([H100, A100]).reshape(2, 1, 1), AXES)
    assert devices_of(sharding_for(SMALL, mesh)) == [H100, A100]
    assert devices_of(None) == one
    assert devices_of(sharding_for(SMALL, AbstractMesh((8, 1, 1), AXES))) == one  # a plan, whose devices are elsewhere


def test_a_choice_is_logged_once(caplog):
    caplog.set_level("INFO")
    for _ in range(2):
        announce(Choice("splash", ""), jnp.bfloat16, 72, None, V5E, has_segments=True)
        announce(Choice("xla", "too wide"), jnp.bfloat16, 520, 8, H100, has_segments=False)
        announce(Choice("xla", ""), jnp.bfloat16, 72, None, jax.devices("cpu")[0], has_segments=False)
    assert [(record.levelname, record.message) for record in caplog.records] == [
        ("INFO", "attention: splash kernel (TPU v5 lite, bfloat16, head width 72, packed rows)"),
        (
            "WARNING",
            "attention: reference implementation (NVIDIA H100, bfloat16, head width 520, rows of one sequence, "
            "window 8): too wide",
        ),
    ]


# --- Values and gradients.


def draws(dtype=jnp.float32, length=150, heads=4, kv_heads=2, head_dim=16):
    """Queries, keys, values and the gradient of the result, of 2 rows."""
    key = jax.random.key(0)
    shapes = [(2, length, count, head_dim) for count in (heads, kv_heads, kv_heads, heads)]
    return [jax.random.normal(jax.random.fold_in(key, i), shape, dtype) for i, shape in enumerate(shapes)]


SEGMENTS = jnp.array([np.repeat([1, 2, 3, 0], [50, 70, 10, 20]), np.repeat([1, 2], [20, 130])])
"""Sequences of 2 rows of 150 tokens; 0 is padding."""


def reference(window, segment_ids, q, k, v):
    places = jnp.arange(q.shape[1])
    visible = visible_keys(places[None], places, window, segment_ids, segment_ids)
    visible = jnp.broadcast_to(visible, (len(q), *visible.shape[1:]))
    return attend(q, [LayerCache(k.transpose(0, 2, 3, 1), v.transpose(0, 2, 1, 3))], visible)


def in_chunks(window, segment_ids, q, k, v):
    places = jnp.arange(q.shape[1])[None]
    block = LayerCache(k.transpose(0, 2, 3, 1), v.transpose(0, 2, 1, 3))
    return attend_in_chunks(q, [block], places, window, segment_ids, chunk=48)


@partial(jax.jit, static_argnums=(0, 1))
def with_gradients(attention, window, segment_ids, q, k, v, gradient):
    mixed, pull = jax.vjp(partial(attention, window, segment_ids), q, k, v)
    return (mixed, *pull(gradient))


def by_kernel(kernel):
    return lambda window, ids, q, k, v: row_attention(q, k, v, kernel=kernel, window=window, segment_ids=ids)


@pytest.mark.parametrize(
    ("attention", "window", "segment_ids"),
    [
        pytest.param(by_kernel("cudnn"), None, None, id="cudnn"),
        pytest.param(by_kernel("cudnn"), 30, None, id="cudnn, window"),
        pytest.param(by_kernel("pallas"), None, SEGMENTS, id="pallas, packed"),
        pytest.param(by_kernel("splash"), None, None, id="splash"),
        pytest.param(by_kernel("splash"), None, SEGMENTS, id="splash, packed"),
        pytest.param(by_kernel("splash"), 30, SEGMENTS, id="splash, packed, window"),
        pytest.param(in_chunks, None, SEGMENTS, id="reference in chunks, packed"),
        pytest.param(in_chunks, 30, None, id="reference in chunks, window"),
    ],
)
def test_values_and_gradients_are_those_of_the_reference(attention, window, segment_ids):
    arrays = draws()
    expected = with_gradients(reference, window, segment_ids, *arrays)
    found = with_gradients(attention, window, segment_ids, *arrays)
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)
