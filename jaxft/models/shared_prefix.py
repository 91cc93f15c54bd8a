"""Attention that is joined by log-sum-exp: of rows whose sequences share a prefix, and with sinks.

The keys of a prefix are computed once, and seen by each branch.

Rows are laid out by `Branches`. A branch attends to a row of its own, the prefix and itself. That is one call of any
attention that takes fewer queries than keys. cuDNN takes none with a causal mask: there, the softmax over both parts is
joined from two calls by their log-sum-exp, as in ring attention (arXiv 2310.01889, section 3).
Letters: `B` rows, `T` tokens, `n` branches, `P` tokens of a prefix, `S` tokens of a branch, `H` query heads, `K`
key/value heads, `h` head width.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int, Shaped

from jaxft.core.packing import Branches
from jaxft.core.sharding import Sharding
from jaxft.models.attention import Scores

try:  # Private, as no public function of JAX differentiates with another log-sum-exp than that of its own call.
    from jax._src.cudnn.fused_attention_stablehlo import (
        AttentionLayout,
        MaskType,
        _dot_product_attention_bwd_p_wrapper,
        _dot_product_attention_fwd_p_wrapper,
    )
except ImportError:
    IS_KNOWN = False
else:
    IS_KNOWN = True


def with_prefix(x: Shaped[Array, "B T *N"], branches: Branches) -> Shaped[Array, "R U *N"]:
    """Return a row of each branch, with the prefix before it.

    >>> with_prefix(jnp.arange(7)[None], Branches(3, count=2)).tolist()
    [[0, 1, 2, 3, 4], [0, 1, 2, 5, 6]]
    """
    end, of_branches = branches.prefix_tokens, branch_rows(x, branches)
    prefix = jnp.repeat(x[:, :end], branches.count, axis=0)
    return jnp.concatenate([prefix, of_branches], axis=1)


def branch_rows(x: Shaped[Array, "B T *N"], branches: Branches) -> Shaped[Array, "R S *N"]:
    """Return a row of each branch, without the prefix."""
    return x[:, branches.prefix_tokens :].reshape(len(x) * branches.count, -1, *x.shape[2:])


def takes_prefix(choice: str, scores: Scores) -> bool:
    """Return True if attention to a prefix and a branch is joined, for the kernel of rows of one sequence."""
    return choice == "cudnn" and IS_KNOWN and scores.window is None and not scores.has_sinks


def prefix_attention(
    q: Float[Array, "B T H h"],
    k: Float[Array, "B T K h"],
    v: Float[Array, "B T K h"],
    *,
    scale: float,
    branches: Branches,
    lengths: Int[Array, "B"],
    sharding: Sharding | None = None,
) -> Float[Array, "B T H h"]:
    """Return `joined_attention`; on a mesh each device computes its own rows and heads, as in `row_attention`."""
    compute = partial(joined_attention, scale, branches)
    if sharding is None:
        return compute(lengths, q, k, v)
    spec = sharding.cut(k.shape, sharding.row_axes, None, "tensor").spec
    specs = PartitionSpec(spec[0]), spec, spec, spec
    return jax.shard_map(compute, mesh=sharding.mesh, in_specs=specs, out_specs=spec, check_vma=False)(lengths, q, k, v)


class Part(NamedTuple):
    """Attention over the keys of one kernel call, and the log-sum-exp that joins it with another.

    Attributes:
        mixed: attention over the keys of the call, `[B T H h]`.
        log_sums: log-sum-exp of the scores of each query, `[B H T]`.
    """

    mixed: Array
    log_sums: Array


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def joined_attention(
    scale: float,
    branches: Branches,
    lengths: Int[Array, "B"],
    q: Float[Array, "B T H h"],
    k: Float[Array, "B T K h"],
    v: Float[Array, "B T K h"],
) -> Float[Array, "B T H h"]:
    """Return causal softmax attention of prefixes and branches by cuDNN, without a window.

    Args:
        scale: factor of the products of queries and keys.
        branches: columns of the rows.
        lengths: tokens of each prefix, which end at its last column.
        q: queries.
        k: keys.
        v: values.
    """
    return _forward(scale, branches, lengths, q, k, v)[0]


def _forward(scale: float, branches: Branches, lengths: Array, q: Array, k: Array, v: Array) -> tuple[Array, Any]:
    prefix, own, across = _calls(branches, lengths, q, k, v)
    of_prefix, of_own, of_across = (_kernel_forward(scale, *call) for call in (prefix, own, across))
    rows, tokens, (heads, width) = len(q), own[0].shape[1], q.shape[2:]
    log_own = of_own.log_sums.reshape(rows, branches.count, heads, tokens).swapaxes(1, 2).reshape(rows, heads, -1)
    is_seen = (lengths > 0)[:, None, None]
    log_across = jnp.where(is_seen, of_across.log_sums, -jnp.inf)
    log_sums = jnp.logaddexp(log_own, log_across)  # [B H nS]

    def weighed(mixed: Array, log_part: Array) -> Array:
        weight = jnp.exp(log_part - log_sums).swapaxes(1, 2)[..., None]  # [B nS H 1]
        return jnp.where(weight > 0, mixed.reshape(rows, -1, heads, width).astype(jnp.float32) * weight, 0.0)

    joined = (weighed(of_own.mixed, log_own) + weighed(of_across.mixed, log_across)).astype(q.dtype)
    mixed = jnp.concatenate([_rolled(of_prefix.mixed, -lengths), joined], axis=1)
    return mixed, (lengths, q, k, v, of_prefix, Part(joined, log_sums))


def _backward(scale: float, branches: Branches, saved: Any, gradient: Array) -> tuple[None, Array, Array, Array]:
    lengths, q, k, v, of_prefix, joined = saved
    prefix, own, across = _calls(branches, lengths, q, k, v)
    end, (rows, heads), tokens = branches.prefix_tokens, joined.log_sums.shape[:2], own[0].shape[1]
    by_branch = joined.log_sums.reshape(rows, heads, branches.count, tokens).swapaxes(1, 2)
    of_own = Part(joined.mixed.reshape(own[0].shape), by_branch.reshape(-1, heads, tokens))
    d_prefix, d_joined = _rolled(gradient[:, :end], lengths), gradient[:, end:]
    # Probabilities are exp(score - log-sum-exp), and those of a query add up to 1 over both calls: with the joined
    # result and log-sum-exp each call gives its part of the gradient.
    by_prefix = _kernel_backward(scale, *prefix, of_prefix, d_prefix)
    by_own = _kernel_backward(scale, *own, of_own, d_joined.reshape(own[0].shape))
    by_across = _kernel_backward(scale, *across, joined, d_joined)
    # What the kernel writes for keys that no query sees, or for queries that see none, is not said anywhere.
    is_seen = (jnp.arange(end) < lengths[:, None])[:, :, None, None]
    dq_across = jnp.where(is_seen[:, :1], by_across[0], 0)
    dk_across, dv_across = (jnp.where(is_seen, each, 0) for each in by_across[1:])
    of_branches = [each.reshape(rows, -1, *each.shape[2:]) for each in by_own]
    of_prefixes = [by_prefix[0], by_prefix[1] + dk_across, by_prefix[2] + dv_across]
    of_branches[0] += dq_across
    parts = zip(of_prefixes, of_branches, strict=True)
    dq, dk, dv = (jnp.concatenate([_rolled(first, -lengths), rest], axis=1) for first, rest in parts)
    return None, dq, dk, dv


joined_attention.defvjp(_forward, _backward)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def sink_attention(
    scores: Scores,
    sinks: Float[Array, "H"],
    q: Float[Array, "B T H h"],
    k: Float[Array, "B T K h"],
    v: Float[Array, "B T K h"],
) -> Float[Array, "B T H h"]:
    """Return causal softmax attention with a score of nothing in each head, by cuDNN."""
    return _sink_forward(scores, sinks, q, k, v)[0]


def _sink_forward(scores: Scores, sinks: Array, q: Array, k: Array, v: Array) -> tuple[Array, Any]:
    own = _kernel_forward(scores.scale, q, k, v, None, scores.window)
    log_sums = jnp.logaddexp(own.log_sums, sinks[:, None])  # [B H T]
    weights = jnp.exp(own.log_sums - log_sums).swapaxes(1, 2)[..., None]
    mixed = (own.mixed.astype(jnp.float32) * weights).astype(q.dtype)
    return mixed, (sinks, q, k, v, Part(mixed, log_sums))


def _sink_backward(scores: Scores, saved: Any, gradient: Array) -> tuple[Array, Array, Array, Array]:
    sinks, q, k, v, joined = saved
    of_kernel = _kernel_backward(scores.scale, q, k, v, None, joined, gradient, scores.window)
    products = (gradient.astype(jnp.float32) * joined.mixed).sum(axis=-1).swapaxes(1, 2)  # [B H T]
    d_sinks = -(jnp.exp(sinks[:, None] - joined.log_sums) * products).sum(axis=(0, 2))
    return d_sinks.astype(sinks.dtype), *of_kernel


sink_attention.defvjp(_sink_forward, _sink_backward)

Call = tuple[Array, Array, Array, Array | None]
"""Queries, keys, values, and the number of keys that all queries of a row see; None for a causal mask."""


def _calls(branches: Branches, lengths: Array, q: Array, k: Array, v: Array) -> tuple[Call, Call, Call]:
    """Return the calls within prefixes, which begin at their first column then, within branches, and across."""
    end = branches.prefix_tokens
    qp, kp, vp = (_rolled(x[:, :end], lengths) for x in (q, k, v))
    own = (branch_rows(x, branches) for x in (q, k, v))
    return (qp, kp, vp, None), (*own, None), (q[:, end:], kp, vp, lengths)  # type: ignore[return-value]


def _rolled(x: Shaped[Array, "B P *N"], lengths: Int[Array, "B"]) -> Shaped[Array, "B P *N"]:
    """Return rows moved by their lengths, so that what ends at the last column begins at the first, or the reverse."""
    places = (jnp.arange(x.shape[1]) - lengths[:, None]) % x.shape[1]
    return jnp.take_along_axis(x, places[:, :, None, None], axis=1, mode="promise_in_bounds")


def _kernel_arguments(q: Array, lengths: Array | None, window: int | None) -> tuple[list[Array], dict[str, Any]]:
    """Return what cuDNN's primitives take behind queries, keys and values, by position and by name."""
    nothing, is_causal = jnp.zeros(0, q.dtype), lengths is None
    counts = [nothing, nothing] if lengths is None else [jnp.full(len(q), q.shape[1], jnp.int32), lengths]
    mask = MaskType.CAUSAL if is_causal else MaskType.PADDING
    options = {"seed": 42, "dropout_rate": 0.0, "variadic_args": (False, False), "mask_type": mask}
    layout = AttentionLayout.BTNH.value
    given = [nothing, *counts, *[nothing] * 4]  # no bias, offsets or pages
    return given, {**options, "layout": layout, "sliding_window_length": window}


def _kernel_forward(
    scale: float, q: Array, k: Array, v: Array, lengths: Array | None, window: int | None = None
) -> Part:
    given, options = _kernel_arguments(q, lengths, window)
    return Part(*_dot_product_attention_fwd_p_wrapper.bind(q, k, v, *given, scale=scale, is_training=True, **options))


def _kernel_backward(
    scale: float,
    q: Array,
    k: Array,
    v: Array,
    lengths: Array | None,
    result: Part,
    gradient: Array,
    window: int | None = None,
) -> tuple[Array, Array, Array]:
    given, options = _kernel_arguments(q, lengths, window)
    bind = _dot_product_attention_bwd_p_wrapper.bind
    dq, dk, dv = bind(q, k, v, *given, result.log_sums, result.mixed, gradient, scale=scale, **options)
    return dq, dk, dv
