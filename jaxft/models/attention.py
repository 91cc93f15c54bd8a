"""The reference of attention within whole rows, and which keys a query sees.

Letters: `B` rows, `T` tokens, `S` tokens attended to, `H` query heads, `K` key/value heads, `G = H / K`, `h` head
width.
"""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int


class Scores(NamedTuple):
    """How attention scores a key: `soft_cap * tanh(scale * q.k / soft_cap)`, within the window.

    Attributes:
        scale: factor of the product of a query and a key, in most models `h**-0.5`.
        window: number of positions that a token sees, itself included; None for all before it.
        soft_cap: bound that scores approach but do not exceed, as in Gemma 2 (arXiv 2408.00118, section 2); None for
            scores without a bound, `scale * q.k`.
        has_sinks: each head has a score more, of nothing (arXiv 2309.17453).
    """

    scale: float
    window: int | None = None
    soft_cap: float | None = None
    has_sinks: bool = False

    def of(self, products: Float[Array, "*N"]) -> Float[Array, "*N"]:
        """Return the scores of these products of queries and keys.

        >>> products = jnp.array([-1e6, 0.0, 200.0])
        >>> print(Scores(0.5).of(products)[2], Scores(0.5, soft_cap=50.0).of(products).round(1))
        100.0 [-50.    0.   48.2]
        """
        if self.soft_cap is None:
            return products * self.scale
        return self.soft_cap * jnp.tanh(products * (self.scale / self.soft_cap))


MASK_VALUE = -1e30
"""Score of a masked key: finite, so that a row whose keys are all masked does not give NaN."""


class HeadRows(NamedTuple):
    """Keys and values of whole rows, heads first; keys are transposed, as products want them."""

    keys: Float[Array, "B K h S"]
    values: Float[Array, "B K S h"]


def visible_keys(
    places: Int[Array, "#B T"],
    keys: Int[Array, "S"],
    window: int | None,
    query_segments: Int[Array, "B T"] | None = None,
    key_segments: Int[Array, "B S"] | None = None,
) -> Bool[Array, "#B T S"]:
    """Return which keys each query sees: its own place and earlier ones of its segment, within the window.

    >>> visible_keys(jnp.array([[1, 2]]), jnp.arange(3), 2).astype(int).tolist()
    [[[1, 1, 0], [0, 1, 1]]]
    """
    distance = places[:, :, None] - keys[None, None, :]  # [B T S]
    visible = distance >= 0
    if window is not None:
        visible &= distance < window
    if query_segments is not None and key_segments is not None:
        visible &= query_segments[:, :, None] == key_segments[:, None, :]
    return visible


class Span(NamedTuple):
    """The keys that a block of consecutive queries sees.

    Attributes:
        first: first column of the row's table.
        end: column after the last; `first` where the block has no real query.
        earliest: first position.
        latest: last position, that of the last real query.
    """

    first: Array
    end: Array
    earliest: Array
    latest: Array


def span_of_block(
    start: Int[Array, "..."],
    count: Int[Array, "..."],
    offset: Int[Array, "..."],
    size: int,
    page_size: int,
    window: int | None,
) -> Span:
    """Return what queries `offset` to `offset + size - 1` of a row see, of which it has `count` from `start` on.

    >>> span = span_of_block(jnp.array(100), jnp.array(20), jnp.array(16), 16, page_size=64, window=50)
    >>> [int(x) for x in span]  # queries at positions 116 to 119
    [1, 2, 67, 119]
    """
    latest = start + jnp.minimum(count, offset + size) - 1
    earliest = jnp.zeros_like(latest) if window is None else jnp.maximum(start + offset - window + 1, 0)
    first = jax.lax.div(earliest, page_size)
    end = jnp.where(count > offset, jax.lax.div(latest, page_size) + 1, first)
    return Span(first, end, earliest, latest)


def visible_slots(queries: Int[Array, "..."], slots: Int[Array, "..."], window: int | None) -> Bool[Array, "..."]:
    """Return True where a query at a position sees a key at a position, both broadcast."""
    visible = slots <= queries
    return visible if window is None else visible & (slots > queries - window)


MOST_SCORES = 2**28
"""Number of scores, on each device, from which on attention goes over its queries in chunks; 1 GiB in float32."""


def query_chunk(shape: Sequence[int], keys: int, devices: int) -> int:
    """Return how many queries of a row may be computed at once, for queries `[B T H ...]` that see this many keys.

    >>> query_chunk((8, 1024, 16), 1024, devices=1), query_chunk((8, 3072, 16), 3072, devices=1)
    (1024, 615)
    """
    rows, length, heads = shape[:3]
    most = max(1, MOST_SCORES * devices // (rows * heads * keys))
    chunks = -(-length // most)
    return -(-length // chunks)


def attend_in_chunks(
    q: Float[Array, "B T H h"],
    seen: HeadRows,
    places: Int[Array, "#B T"],
    scores: Scores,
    segment_ids: Int[Array, "B S"] | None,
    chunk: int,
    sinks: Float[Array, "H"] | None = None,
) -> Float[Array, "B T H h"]:
    """Return `attend` of `chunk` queries at a time, so that its memory, gradients included, is linear in tokens.

    Args:
        q: queries.
        seen: keys and values of the rows that the queries end.
        places: position of each query among the keys.
        scores: scale, window and soft cap.
        segment_ids: sequence of each key in packed rows.
        chunk: queries of a row that are computed at once. Gradients of keys and values are summed over chunks in
            float32, as their own dtype, if bfloat16, rounds each time.
        sinks: score of nothing in each head, for scores that have it.
    """
    length = q.shape[1]
    keys = jnp.arange(seen.keys.shape[-1])
    wide = jax.tree.map(lambda x: x.astype(jnp.promote_types(x.dtype, jnp.float32)), seen)

    def cut(x: Array) -> Array:  # [B T ...] to [T/chunk B chunk ...]
        x = jnp.pad(x, [(0, -length % chunk if i == 1 else 0) for i in range(x.ndim)])
        return jnp.moveaxis(x.reshape(x.shape[0], -1, chunk, *x.shape[2:]), 1, 0)

    @jax.checkpoint
    def attend_chunk(part: tuple[Array, Array, Array | None]) -> Array:
        q, places, segments = part
        narrow = jax.tree.map(lambda x, like: x.astype(like.dtype), wide, seen)
        return attend(q, narrow, visible_keys(places, keys, scores.window, segments, segment_ids), scores, sinks)

    parts = cut(q), cut(places), None if segment_ids is None else cut(segment_ids[:, -length:])
    mixed = jnp.moveaxis(jax.lax.map(attend_chunk, parts), 0, 1)  # [B T/chunk chunk H h]
    return mixed.reshape(q.shape[0], -1, *q.shape[2:])[:, :length]


def attend(
    q: Float[Array, "B T H h"],
    seen: HeadRows,
    visible: Bool[Array, "#B T S"],
    scores: Scores,
    sinks: Float[Array, "H"] | None = None,
) -> Float[Array, "B T H h"]:
    """Return softmax attention of each token to the visible ones; `visible` has the window of `scores` already.

    Query heads of a group share one matrix product instead of repeating their keys and values.
    """
    rows, length, heads, head_dim = q.shape
    kv_heads = seen.keys.shape[1]
    grouped = q.reshape(rows, length, kv_heads, -1, head_dim).transpose(0, 2, 3, 1, 4)  # [B K G T h]
    flat = grouped.reshape(rows, kv_heads, -1, head_dim)  # [B K GT h]
    wide = jnp.promote_types(flat.dtype, jnp.float32)
    products = jnp.matmul(flat, seen.keys, preferred_element_type=wide)  # [B K GT S]
    # The float32 products are scaled, not the queries, which bfloat16 would round once more.
    scored = scores.of(products.reshape(*grouped.shape[:-1], -1))  # [B K G T S]
    scored = jnp.where(visible[:, None, None], scored, MASK_VALUE)
    highest = scored.max(axis=-1, keepdims=True)
    if sinks is not None:
        sinks = sinks.reshape(kv_heads, -1, 1, 1).astype(wide)  # [K G 1 1]
        highest = jnp.maximum(highest, sinks)
    highest = jax.lax.stop_gradient(highest)
    weights = jnp.exp(scored - highest)
    mass = weights.sum(axis=-1, keepdims=True)  # [B K G T 1]
    if sinks is not None:
        mass += jnp.exp(sinks - highest)
    weights = weights.reshape(*flat.shape[:-1], -1).astype(q.dtype)
    mixed = jnp.matmul(weights, seen.values, preferred_element_type=wide)
    # A product with the inverse: XLA compiles a quotient to either form, and the two round differently.
    mixed = (mixed.reshape(grouped.shape) * (1.0 / mass)).astype(q.dtype)  # [B K G T h]
    return mixed.transpose(0, 3, 1, 2, 4).reshape(rows, length, heads, head_dim)
