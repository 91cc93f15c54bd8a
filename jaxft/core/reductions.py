"""Sums and means over rows, trajectories and batches; all are 0 on an empty mask.

A *row* is one sequence. A packed batch has several in one physical row: adjacent tokens with equal `segment_ids` are
one sequence, and reductions over rows are reductions over these segments. A *trajectory* is one row or several;
`trajectory_tokens` holds, at each token, the number of trained tokens of its whole trajectory.
Letters: `B` physical rows, `T` tokens, `L` layers with `E` experts, of which a token has `k`.
"""

from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, UInt

from jaxft.core.types import Denominators


def row_sums(x: Float[Array, "B T"], segment_ids: Int[Array, "B T"] | None = None) -> Float[Array, "B #T"]:
    """Return the sum over each row, `[B 1]`, or with `segment_ids` the sum over each token's segment, `[B T]`.

    >>> print(row_sums(jnp.array([[1.0, 2.0, 4.0]]), jnp.array([[0, 0, 1]])))
    [[3. 3. 4.]]
    """
    if segment_ids is None:
        return x.sum(axis=1, keepdims=True)
    ids = _segment_numbers(segment_ids)
    return jax.vmap(lambda row, ids: jax.ops.segment_sum(row, ids, num_segments=len(ids))[ids])(x, ids)


def count_tokens(
    completion_mask: Bool[Array, "B T"],
    segment_ids: Int[Array, "B T"] | None = None,
    trajectory_tokens: Float[Array, "B T"] | None = None,
    observation_mask: Bool[Array, "B T"] | None = None,
    experts: UInt[Array, "B T L k"] | None = None,
    *,
    num_experts: int = 0,
) -> Denominators:
    """Count rows (segments) with a trained token, trained tokens, pairs of rows that both have one, and trajectories.

    Tokens of the results of tools are counted, too, where there is a mask of them, and those of each of `num_experts`
    experts, where these are replayed.

    Counts of microbatches add up to those of the batch. A microbatch with some rows of a trajectory counts the
    fraction of its trained tokens in them; without `trajectory_tokens` every row is a trajectory.

    >>> print(*count_tokens(jnp.array([[True, True], [False, False], [True, False], [True, False]])))
    3.0 4.0 1.0 3.0 None None None
    >>> rows = jnp.array([[True, True], [True, False]])  # of one trajectory
    >>> print(*count_tokens(rows, trajectory_tokens=jnp.full((2, 2), 3.0)))
    2.0 3.0 1.0 1.0 None None None
    """
    trained = completion_mask.any(axis=1)
    of_rows = _reduced_rows(completion_mask.astype(jnp.float32), segment_ids, "sum")
    rows = trajectories = (of_rows > 0).sum()
    if trajectory_tokens is not None:
        of_trajectories = _reduced_rows(jnp.where(completion_mask, trajectory_tokens, 0.0), segment_ids, "max")
        trajectories = (of_rows / jnp.maximum(of_trajectories, 1.0)).sum()
    halves = len(trained) // 2 * 2
    pairs = (trained[:halves:2] & trained[1:halves:2]).sum()
    seen = None if observation_mask is None else observation_mask.sum()
    counts = Denominators(rows, completion_mask.sum(), pairs, trajectories, seen)
    if experts is not None:
        scored = completion_mask if observation_mask is None else completion_mask | observation_mask
        is_of_expert = (experts[..., None] == 1 + jnp.arange(num_experts)) & scored[..., None, None, None]
        routed = scored & (experts[:, :, 0, 0] > 0)
        counts = counts._replace(routed=routed.sum(), expert_tokens=is_of_expert.sum((0, 1, 3)))
    return jax.tree.map(lambda count: count.astype(jnp.float32), counts)


def _reduced_rows(
    x: Float[Array, "B T"], segment_ids: Int[Array, "B T"] | None, reduction: Literal["sum", "max"]
) -> Float[Array, "B *T"]:
    """Reduce rows to `[B]`, or segments to `[B T]`, by sum or maximum; entries without a segment are at most 0."""
    if segment_ids is None:
        return x.sum(axis=1) if reduction == "sum" else x.max(axis=1, initial=0.0)
    reduce = jax.ops.segment_sum if reduction == "sum" else jax.ops.segment_max
    return jax.vmap(lambda row, ids: reduce(row, ids, num_segments=len(ids)))(x, _segment_numbers(segment_ids))


def _segment_numbers(segment_ids: Int[Array, "B T"]) -> Int[Array, "B T"]:
    """Renumber the segments of each row from 0; the ids may be any integers, also larger than `T`."""
    changes = segment_ids[:, 1:] != segment_ids[:, :-1]
    return jnp.pad(jnp.cumsum(changes, axis=1, dtype=jnp.int32), ((0, 0), (1, 0)))


def aggregate(
    per_token: Float[Array, "B #T"],
    completion_mask: Bool[Array, "B T"],
    denominators: Denominators,
    aggregation: str,
    max_completion_tokens: int | None = None,
    segment_ids: Int[Array, "B T"] | None = None,
    trajectory_tokens: Float[Array, "B T"] | None = None,
) -> Float[Array, ""]:
    """Reduce a loss per token to a scalar, 0 when nothing is trained; results of microbatches add up to the batch's.

    `seq_mean_token_mean`: mean over trajectories of the trajectory's mean over trained tokens; `token_mean`: mean over
    all trained tokens; `constant`: sum divided by `trajectories x max_completion_tokens`. Every row is a trajectory if
    `trajectory_tokens` is None.

    Raises:
        ValueError: the name is unknown, `constant` lacks a `max_completion_tokens` of at least 1, or `denominators`
            lack a count of trajectories.

    >>> x, mask = jnp.array([[4.0, 2.0], [6.0, 9.0]]), jnp.array([[True, True], [True, False]])
    >>> print(*[aggregate(x, mask, count_tokens(mask), name) for name in ("seq_mean_token_mean", "token_mean")])
    4.5 4.0
    """
    if aggregation == "token_mean":
        return token_mean(per_token, completion_mask, denominators)
    if trajectory_tokens is not None and denominators.trajectories is None:
        raise ValueError("denominators.trajectories is None; count the whole batch with count_tokens")
    # Microbatches count fractions of trajectories, which add up to a whole number up to rounding.
    trajectories = denominators.rows if denominators.trajectories is None else jnp.round(denominators.trajectories)
    masked = jnp.where(completion_mask, per_token, 0.0)
    if aggregation == "seq_mean_token_mean":
        lengths = trajectory_tokens
        if lengths is None:
            lengths = row_sums(completion_mask.astype(masked.dtype), segment_ids)
        return jnp.sum(masked / jnp.maximum(lengths, 1)) / jnp.maximum(trajectories, 1.0)
    if aggregation == "constant":
        if max_completion_tokens is None:
            raise ValueError(
                "max_completion_tokens is None; this loss divides by it: give the token budget of one trajectory"
            )
        if max_completion_tokens < 1:
            raise ValueError(
                f"max_completion_tokens is {max_completion_tokens}; wanted at least 1, the loss divides by it"
            )
        return masked.sum() / (jnp.maximum(trajectories, 1.0) * max_completion_tokens)
    raise ValueError(f"aggregation is {aggregation!r}; wanted seq_mean_token_mean, token_mean or constant")


def token_mean(
    x: Float[Array, "B #T"] | Bool[Array, "B #T"], completion_mask: Bool[Array, "B T"], denominators: Denominators
) -> Float[Array, ""]:
    """Return the sum over trained tokens, divided by the trained tokens of the whole batch; 0 when there is none.

    >>> mask = jnp.array([[True, True, False]])
    >>> print(token_mean(jnp.array([[1.0, 2.0, 9.0]]), mask, count_tokens(mask)))
    1.5
    """
    return jnp.sum(jnp.where(completion_mask, x, 0.0)) / jnp.maximum(denominators.tokens, 1.0)


def invariant_sum(x: Float[Array, "*N S"], *, in_halves: bool) -> Float[Array, "*N 1"]:
    """Return the sum over the last axis, with `keepdims`; added in halves, its bits do not depend on the other axes.

    XLA for CPU chooses the order of a reduction by the size of the whole array, so that the last bits of a row depend
    on the number of rows. Decoding on CPUs, where that number changes, adds halves repeatedly instead, at the same cost
    or less.

    >>> invariant_sum(jnp.array([[1.0, 2.0, 3.0, 4.0, 5.0]]), in_halves=True).tolist()
    [[15.0]]
    """
    if not in_halves:
        return x.sum(axis=-1, keepdims=True)
    while (size := x.shape[-1]) > 1:
        half = size // 2
        added = x[..., :half] + x[..., half : 2 * half]
        x = jnp.concatenate([added, x[..., 2 * half :]], axis=-1) if size % 2 else added
    return x


def rounded(x: Float[Array, "*N"]) -> Float[Array, "*N"]:
    """Return `x`, which the compiler now has to round: it may not contract the operations before and after it.

    XLA for CPU makes one fused operation of a product and a sum, but only where both are in one loop, so that the last
    bits would depend on the shapes.

    >>> print(rounded(jnp.array([0.5])))
    [0.5]
    """
    info = jnp.finfo(x.dtype)
    return jax.lax.reduce_precision(x, info.nexp, info.nmant)


def rounded_exp(x: Float[Array, "*N"]) -> Float[Array, "*N"]:
    """Return `e^x`, `rounded` before and after, so that its bits depend on those of `x` only.

    >>> print(rounded_exp(jnp.array([0.0])))
    [1.]
    """
    return rounded(jnp.exp(rounded(x)))
