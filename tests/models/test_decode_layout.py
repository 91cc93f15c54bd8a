"""Joined projections compute what their parts compute, sharded or not, with biases and with adapters."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxft.models.decode_layout import join_projections, split_outputs

SIZES = (8, 4, 4)


def draw_projection(key, size, has_bias, rank):
    keys = jax.random.split(key, 4)
    drawn = {"kernel": jax.random.normal(keys[0], (6, size))}
    if has_bias:
        drawn["bias"] = jax.random.normal(keys[1], (size,))
    if rank:
        drawn |= {"lora_a": jax.random.normal(keys[2], (6, rank)), "lora_b": jax.random.normal(keys[3], (rank, size))}
    return drawn


def apply(projection, x):
    y = x @ projection["kernel"]
    if "lora_a" in projection:
        y += 0.5 * (x @ projection["lora_a"] @ projection["lora_b"])
    return y + projection.get("bias", 0)


@pytest.mark.parametrize("shards", [1, 2, 4])
@pytest.mark.parametrize(("has_bias", "ranks"), [(False, (0, 0, 0)), (True, (2, 0, 2)), (False, (0, 3, 0))])
def test_joined_projections_compute_what_their_parts_do(shards, has_bias, ranks):
    keys, x = jax.random.split(jax.random.key(0), 3), jax.random.normal(jax.random.key(1), (5, 6))
    parts = [draw_projection(*each, has_bias, rank) for *each, rank in zip(keys, SIZES, ranks, strict=True)]
    joined = join_projections(parts, shards)
    assert joined.keys() == {name for part in parts for name in part}
    found = split_outputs(apply(joined, x), shards, SIZES)
    for part, y in zip(parts, found, strict=True):
        np.testing.assert_allclose(y, apply(part, x), rtol=0, atol=1e-5)


def test_a_shard_has_its_part_of_every_projection():
    joined = join_projections([{"kernel": jnp.arange(size)[None] + 100.0 * size} for size in SIZES], 2)
    first, second = joined["kernel"].reshape(2, -1).tolist()
    assert first == [800, 801, 802, 803, 400, 401, 400, 401]
    assert second == [804, 805, 806, 807, 402, 403, 402, 403]
