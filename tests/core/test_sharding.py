"""Meshes and shardings without devices; tests/test_scaling.py computes on a mesh."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AbstractMesh, PartitionSpec

import jaxft
from jaxft.core.sharding import AXES, Sharding, device_bytes, make_mesh
from jaxft.models.decoder import decoder
from jaxft.rollout.model_runner import ModelRunner

RULES = (("q_proj/kernel", ("fsdp", "tensor")), ("*_proj/bias", ("tensor",)), ("embedding", ("tensor", "fsdp")))


def sharding(data, fsdp, tensor):
    return Sharding(AbstractMesh((data, fsdp, tensor), AXES), RULES)


@pytest.mark.parametrize(
    ("sizes", "said"),
    [
        ((3, 1, 1), r"data 3 x fsdp 1 x tensor 1, which does not multiply to 1 devices"),
        ((-1, 2, 1), r"data -1 x fsdp 2 x tensor 1, which does not multiply to 1 devices"),
        ((-1, -1, 1), r"mesh is .*-1.*-1"),
        ((0, 1, 1), r"wanted sizes of at least 1"),
        ((1, 1, -2), r"wanted sizes of at least 1"),
    ],
)
def test_sizes_that_make_no_mesh(sizes, said):
    with pytest.raises(ValueError, match=said):
        make_mesh(*sizes, devices=jax.devices()[:1])


def test_the_rest_of_the_devices():
    assert dict(make_mesh(1, -1, 1, devices=jax.devices()[:1]).shape) == {"data": 1, "fsdp": 1, "tensor": 1}


@pytest.mark.parametrize(
    ("path", "shape", "wanted"),
    [
        ("layers/self_attn/q_proj/kernel", (4, 8, 16), PartitionSpec(None, "fsdp", "tensor")),  # stacked
        ("self_attn/q_proj/kernel", (8, 16), PartitionSpec("fsdp", "tensor")),  # of one layer
        ("opt_state/0/mu/layers/self_attn/q_proj/kernel", (4, 8, 16), PartitionSpec(None, "fsdp", "tensor")),
        ("layers/self_attn/q_proj/bias", (4, 16), PartitionSpec(None, "tensor")),
        ("layers/self_attn/q_proj/kernel", (4, 7, 16), PartitionSpec(None, None, "tensor")),  # 7 over 4
        ("layers/self_attn/q_norm/scale", (4, 16), PartitionSpec(None, None)),
        ("step", (), PartitionSpec()),
        ("q_proj/kernel", (16,), PartitionSpec()),  # something made of it, with fewer axes
        ("not_q_proj/kernel", (8, 16), PartitionSpec(None, None)),  # names fit whole or not at all
    ],
)
def test_paths_and_their_partitions(path, shape, wanted):
    assert sharding(2, 4, 2).spec(path, shape) == wanted


def test_what_is_used_is_whole_along_fsdp():
    used = sharding(1, 4, 2).gathered()
    assert used.spec("q_proj/kernel", (8, 16)) == PartitionSpec(None, "tensor")


def test_what_does_not_divide_is_named():
    tree = {"embedding": jax.ShapeDtypeStruct((9, 8), jnp.float32), "q_proj": {"kernel": jnp.zeros((8, 16))}}
    (line,) = sharding(1, 4, 2).uneven(tree)
    assert line == "embedding: dimension 0 of 9 does not divide over the 2 devices of mesh axis 'tensor'"
    assert sharding(1, 4, 1).uneven(tree) == []


def test_rows_that_do_not_divide():
    sharding(2, 4, 2).check_rows(16, "rows")
    with pytest.raises(ValueError, match=r"13 rows do not divide over the 8 .* \(data 2 x fsdp 4\)"):
        sharding(2, 4, 2).check_rows(13, "rows")


def test_a_batch_that_does_not_divide():
    """The error comes before anything is compiled or placed."""
    config = replace(jaxft.model_preset("qwen3-50k"), num_kv_heads=4)
    model = decoder(config, sharding=sharding(2, 2, 2))
    batch = jaxft.Batch(np.zeros((6, 8), np.int32), np.ones((6, 8), bool), np.ones(6, np.float32))
    update = jaxft.make_update(model, jaxft.grpo_loss, optax.sgd(1.0))
    with pytest.raises(ValueError, match=r"6 rows of a microbatch do not divide over the 4 "):
        update.microbatches(batch)
    assert len(jaxft.make_update(model, jaxft.grpo_loss, optax.sgd(1.0), microbatch_rows=4).microbatches(batch)) == 2


def test_slots_and_pages_of_row_shards():
    model = decoder(replace(jaxft.model_preset("qwen3-50k"), num_kv_heads=4), sharding=sharding(2, 2, 2))
    with pytest.raises(ValueError, match=r"6 slots do not divide over the 4 "):
        ModelRunner(model, seed=0, slots=6, length=64)
    with pytest.raises(ValueError, match=r"cache_tokens is 192: 0 pages .* 4 row shards; wanted at least 256"):
        ModelRunner(model, seed=0, slots=8, length=64, cache_tokens=192)
    assert ModelRunner(model, seed=0, slots=8, length=64, cache_tokens=600).num_pages == 2  # of each of the 4


def test_bytes_of_each_device():
    tree = {"q_proj": {"kernel": jax.ShapeDtypeStruct((8, 16), jnp.float32)}, "scale": jnp.zeros(16, jnp.bfloat16)}
    assert device_bytes(sharding(2, 4, 2), tree) == 4 * 8 * 16 // 8 + 2 * 16
    assert device_bytes(None, tree) == 4 * 8 * 16 + 2 * 16


def test_spread_rows_are_cut_along_all_axes():
    cut = sharding(2, 2, 2).cut
    assert cut((16, 3), AXES).spec == PartitionSpec(AXES)
    assert cut((12, 3), AXES).spec == PartitionSpec(None)
    assert cut((4, 5, 6), ("data", "fsdp"), None, "tensor").spec == PartitionSpec(("data", "fsdp"), None, "tensor")


def test_what_is_mapped_over_shards_has_values_and_gradients_of_the_whole():
    one = Sharding(make_mesh(devices=jax.devices()[:1]), RULES)
    params = {"embedding": np.arange(6, dtype=np.float32).reshape(3, 2)}
    rows = np.array([[0, 2], [1, 2]])

    def look_up(params, rows):
        return params["embedding"][rows]

    def loss(params, mapped):
        found = one.map_shards(look_up, params, [rows], ("data", "fsdp"), "tensor") if mapped else look_up(params, rows)
        return (found**2).sum()

    for mapped in (False, True):
        value, gradient = jax.jit(jax.value_and_grad(loss), static_argnums=1)(params, mapped)
        assert value == 0 + 1 + 2 * (16 + 25) + 4 + 9
        np.testing.assert_array_equal(gradient["embedding"], [[0, 2], [4, 6], [16, 20]])
