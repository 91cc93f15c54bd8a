"""Joined projections compute what their parts compute, sharded or not, with biases and with adapters."""

import jax
import numpy as np
import pytest

from jaxft.models.layers import join_projections, split_outputs

SIZES = (8, 4, 4)


def draw_projection(draws, size, has_bias, rank):
    shapes = (
        {"kernel": (6, size)}
        | ({"bias": (size,)} if has_bias else {})
        | ({"lora_a": (6, rank), "lora_b": (rank, size)} if rank else {})
    )
    return {name: draws.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}


def apply(projection, x):
    y = x @ projection["kernel"]
    if "lora_a" in projection:
        y += 0.5 * (x @ projection["lora_a"] @ projection["lora_b"])
    return y + projection.get("bias", 0)


@pytest.mark.parametrize("shards", [1, 2, 4])
@pytest.mark.parametrize(("has_bias", "ranks"), [(False, (0, 0, 0)), (True, (2, 0, 2)), (False, (0, 3, 0))])
def test_joined_projections_compute_what_their_parts_do(shards, has_bias, ranks):
    draws = np.random.default_rng(0)
    x = draws.normal(size=(5, 6)).astype(np.float32)
    parts = [draw_projection(draws, size, has_bias, rank) for size, rank in zip(SIZES, ranks, strict=True)]

    @jax.jit
    def both_ways(parts, x):
        joined = join_projections(parts, shards)
        return joined, split_outputs(apply(joined, x), shards, SIZES)

    joined, found = both_ways(parts, x)
    assert joined.keys() == {name for part in parts for name in part}
    for part, y in zip(parts, found, strict=True):
        np.testing.assert_allclose(y, apply(part, x), rtol=0, atol=1e-5)


def test_a_shard_has_its_part_of_every_projection():
    parts = [{"kernel": np.arange(size, dtype=np.float32)[None] + 100 * size} for size in SIZES]
    joined = jax.jit(join_projections, static_argnums=1)(parts, 2)
    first, second = joined["kernel"].reshape(2, -1).tolist()
    assert first == [800, 801, 802, 803, 400, 401, 400, 401]
    assert second == [804, 805, 806, 807, 402, 403, 402, 403]
