"""The probe of packed rows: before they are trained, their kernels show on the devices that segments do not mix.

Kernels have mixed them: cuDNN's, as JAX before 0.11.2 called it, read the keys of other sequences where query heads
share a key, without an error. So each kernel of packed rows is compared with sequences in rows of their own.
Letters: `B` rows, `T` tokens, `H` query heads, `K` key/value heads, `h` head width.
"""

import logging
from collections.abc import Callable
from functools import cache, partial
from importlib.metadata import distributions
from itertools import accumulate, pairwise
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Float

from jaxft.core.packing import Branches
from jaxft.core.sharding import Sharding, compute_devices
from jaxft.errors import CheckFailed
from jaxft.models.attention import HeadRows, Scores, attend, visible_keys
from jaxft.models.config import DecoderConfig
from jaxft.models.flash import Kernel, find_spans, layer_kernels, row_attention
from jaxft.models.shared_prefix import prefix_attention, takes_prefix

logger = logging.getLogger(__name__)

PROBED_TOKENS = 70, 150, 45, 55
"""Tokens of the segments of a probed row, no multiples of a kernel's blocks; the last are padding."""

LARGEST_LEAK = 0.1
"""Bound of `segment_leak`. Rounding to bfloat16 stays below 0.03, and one foreign key among fifty is above it."""

CUDNN_PACKAGES = "nvidia-cudnn-cu13", "nvidia-cudnn-cu12"


def check_segments(config: DecoderConfig, dtype: Any, sharding: Sharding | None) -> None:
    """Raise unless the devices keep the segments of packed rows apart, by each kernel that the model's layers have.

    A kernel is compiled and run once in a process, with its gradient; the reference is not.

    Args:
        config: the model.
        dtype: dtype of queries, keys and values.
        sharding: sharding of the model, or None for one device.

    Raises:
        CheckFailed: the results of a segment in a row are not those of the segment alone.
    """
    devices, heads = compute_devices(sharding), (config.num_heads, config.num_kv_heads, config.head_dim)
    for scores, (kernel, _) in layer_kernels(config, dtype, devices, has_segments=True).items():
        if kernel == "xla":
            continue
        probed = scores if scores.window is None else scores._replace(window=min(scores.window, min(PROBED_TOKENS)))
        leak = _leak_on_devices(kernel, probed, heads, jnp.dtype(dtype), sharding)
        if not leak <= LARGEST_LEAK:
            found = [each.version for name in CUDNN_PACKAGES for each in distributions(name=name)]
            raise CheckFailed(
                f"the {kernel} kernel of attention mixes the sequences of packed rows on {devices[0].device_kind} "
                f"({jnp.dtype(dtype).name}, {heads[0]} query heads and {heads[1]} key heads of {heads[2]}, window "
                f"{scores.window}): a token differs by {leak:.2g} of its size from that of the sequence alone, and "
                f"rounding by at most {LARGEST_LEAK}. This is jax {jax.__version__} with cuDNN "
                f"{' and '.join(found) or 'of no package'}; jax 0.11.2 with cuDNN 9.28 is right. Install these, or set "
                "packing of the trainer adapter to false"
            )


def can_share_prefixes(config: DecoderConfig, dtype: Any, sharding: Sharding | None) -> bool:
    """Return True unless attention to a shared prefix, joined from two calls of a kernel, is not the reference's.

    It is computed once in a process, with its gradient, where the layers have it. A difference is logged.
    """
    devices, heads = compute_devices(sharding), (config.num_heads, config.num_kv_heads, config.head_dim)
    for windowed, (kernel, _) in layer_kernels(config, dtype, devices, has_segments=False).items():
        scores = windowed._replace(window=None)  # which rows may be shorter than
        if takes_prefix(kernel, scores):
            leak = float(jax.jit(partial(prefix_leak, scores, heads, dtype))())
            if not leak <= LARGEST_LEAK:
                logger.warning(
                    "prompts are computed for each of their answers: attention to a shared prefix differs by %.2g of "
                    "its size on %s, with jax %s",
                    *(leak, devices[0].device_kind, jax.__version__),
                )
                return False
    return True


def prefix_leak(scores: Scores, heads: tuple[int, int, int], dtype: Any) -> Float[Array, ""]:
    """Return how far attention to a shared prefix is from the reference in float32, as `segment_leak` measures it.

    Args:
        scores: scale; there is no window.
        heads: `H`, `K` and `h`.
        dtype: dtype of queries, keys and values.
    """
    branches, lengths = Branches(128, count=2), jnp.array([77, 128, 0], jnp.int32)
    width, (query_heads, kv_heads, head_dim) = branches.width(64), heads
    keys = jax.random.split(jax.random.key(0), 4)
    *qkv, gradient = (
        jax.random.normal(key, (3, width, count, head_dim), dtype)
        for key, count in zip(keys, (query_heads, kv_heads, kv_heads, query_heads), strict=True)
    )
    is_real = jnp.arange(width) >= branches.prefix_tokens - lengths[:, None]
    gradient = jnp.where(is_real[:, :, None, None], gradient, 0)
    mixed, pull = jax.vjp(partial(prefix_attention, scale=scores.scale, branches=branches, lengths=lengths), *qkv)
    ids, places = is_real.astype(jnp.int32), jnp.arange(width)
    branch = jnp.maximum(places - branches.prefix_tokens, -1) // 64  # -1 in the prefix
    visible = visible_keys(places[None], places, None, ids, ids) & ((branch == -1) | (branch[:, None] == branch))

    @jax.default_matmul_precision("highest")
    def exact(q: Array, k: Array, v: Array) -> Array:
        return attend(q, HeadRows(k.transpose(0, 2, 3, 1), v.transpose(0, 2, 1, 3)), visible, scores)

    expected, pull_exact = jax.vjp(exact, *(x.astype(jnp.float32) for x in qkv))
    found, right = (mixed, *pull(gradient)), (expected, *pull_exact(gradient.astype(jnp.float32)))
    sizes = (jnp.sqrt((x**2).sum(axis=-1).mean(axis=1, keepdims=True)) for x in right)
    off = (jnp.linalg.norm(x.astype(jnp.float32) - y, axis=-1) for x, y in zip(found, right, strict=True))
    real = is_real[:, :, None]
    padded = jnp.stack([jnp.where(real, 0, jnp.abs(x).max(axis=-1)).max() for x in found[1:]]).max()
    leaks = [jnp.where(real, x / size, 0).max() for x, size in zip(off, sizes, strict=True)]
    return jnp.stack([*leaks, padded]).max()  # padding gets no gradient


@cache
def _leak_on_devices(
    kernel: Kernel, scores: Scores, heads: tuple[int, int, int], dtype: Any, sharding: Sharding | None
) -> float:
    def attention(segment_ids: Array, *qkv: Array) -> Array:
        segments = find_spans(segment_ids) if kernel == "cudnn" else segment_ids
        return row_attention(*qkv, kernel=kernel, scores=scores, segments=segments, sharding=sharding)

    rows = 1 if sharding is None else sharding.row_shards
    everywhere = None if sharding is None else NamedSharding(sharding.mesh, PartitionSpec())
    probe = partial(segment_leak, attention, scores, (rows, *heads), dtype)
    return float(jax.jit(probe, out_shardings=everywhere)())


def segment_leak(
    attention: Callable[..., Array], scores: Scores, sizes: tuple[int, int, int, int], dtype: Any
) -> Float[Array, ""]:
    """Return how far packed segments are from rows of one segment, which the reference computes in float32.

    It is the largest difference of a token's value or gradient in a head, relative to the root mean square over the
    tokens of the segment.

    Args:
        attention: `(segment_ids [B T], q [B T H h], k [B T K h], v [B T K h]) -> [B T H h]`.
        scores: scale, window and soft cap.
        sizes: `B`, `H`, `K` and `h`.
        dtype: dtype of queries, keys and values.
    """
    rows, heads, kv_heads, head_dim = sizes
    ids = jnp.tile(np.repeat([1, 2, 3, 0], PROBED_TOKENS).astype(np.int32), (rows, 1))
    keys = jax.random.split(jax.random.key(0), 4)
    q, k, v, gradient = (
        jax.random.normal(key, (*ids.shape, count, head_dim), dtype)
        for key, count in zip(keys, (heads, kv_heads, kv_heads, heads), strict=True)
    )
    mixed, pull = jax.vjp(partial(attention, ids), q, k, v)
    found = mixed, *pull(jnp.where(ids[:, :, None, None] > 0, gradient, 0))

    @jax.default_matmul_precision("highest")
    def alone(q: Array, k: Array, v: Array) -> Array:
        places = jnp.arange(q.shape[1])
        seen = HeadRows(k.transpose(0, 2, 3, 1), v.transpose(0, 2, 1, 3))
        return attend(q, seen, visible_keys(places[None], places, scores.window), scores)

    worst = jnp.zeros(())
    for start, end in pairwise(accumulate(PROBED_TOKENS[:-1], initial=0)):
        *row, row_gradient = (x[:, start:end].astype(jnp.float32) for x in (q, k, v, gradient))
        mixed, pull = jax.vjp(alone, *row)
        for packed, exact in zip(found, (mixed, *pull(row_gradient)), strict=True):
            off = jnp.linalg.norm(packed[:, start:end].astype(jnp.float32) - exact, axis=-1)  # [B T heads]
            size = jnp.sqrt((exact**2).sum(axis=-1).mean(axis=1, keepdims=True))
            worst = jnp.maximum(worst, (off / size).max())
    return worst
