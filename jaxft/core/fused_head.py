"""Log-probability of given tokens by an output head that keeps the softmax's exponentials for its gradient.

`jaxft.core.logprobs` computes logits by chunks of tokens, in float32 and twice: the gradient needs them again. Here
logits are computed once, by slices of the vocabulary, and `u = exp((z - z_chosen) / T)` of all other tokens is kept in
the dtype of the hidden state. With `S` the sum of `u`, the log-probability is `-log(1 + S)`, which keeps its digits
where the token is almost certain, and the gradient is two products with `u`: no other pass over the vocabulary, and no
float32 table larger than a slice. The chosen token's own part of the gradient is never rounded to bfloat16.
Letters: `N` tokens, `D` width of the hidden state, `V` vocabulary.
"""

import math
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxft.core.checks import check_token_ids
from jaxft.core.divergence import MIN_LOGPROB
from jaxft.core.softmax import scaling_temperature

KEPT_BYTES: Mapping[str, int] = {"gpu": 8 * 2**30, "tpu": 5 * 2**29}
"""Most bytes of exponentials on a device, by platform, for which `token_logprobs` takes this head.

Qwen3's vocabulary of 151,936 has them for 28,000 tokens on a GPU, and for 8,192, the default microbatch, on a TPU of 16
GiB. CPUs gain nothing: there products take the time, and not memory.
"""

SLICE_LOGITS = 2**28
"""Default number of logits per slice: 1 GiB of float32."""

LANES = 128
"""Multiple of which the width of a slice is: that of a tile of TPUs and of tensor cores."""

CAPACITIES = 4
"""Number of capacities of a head that leaves masked tokens out: quarters of the tokens."""

LARGEST_SUM = math.exp(64)
"""Largest sum of exponentials relative to the chosen token. Those of likelier sums are taken relative to the largest.

Float32 and bfloat16 end at `e^88`; the gradient divides by the sum, and needs the rest.
"""


class FusedScores(NamedTuple):
    """Scores of tokens by `fused_token_logprobs`, in nats.

    Attributes:
        logprobs: log-probability of each token.
        entropy: entropy of its distribution; without a gradient.
        log_normalizers: `log(sum(exp(z / T)))` over the vocabulary.
        overflows: True for tokens less likely than about `e^-64`, on whose account the logits were computed twice.
    """

    logprobs: Float[Array, "N"]
    entropy: Float[Array, "N"]
    log_normalizers: Float[Array, "N"]
    overflows: Bool[Array, "N"]


def takes_fused_head(platform: str, tokens: int, vocabulary: int, dtype: Any, logit_scale: float | None) -> bool:
    """Return whether `token_logprobs` computes so many tokens on a device with `fused_token_logprobs`.

    Args:
        platform: platform of the device.
        tokens: tokens of the device.
        vocabulary: logits per token.
        dtype: dtype of products.
        logit_scale: that of the `Model`.

    >>> [takes_fused_head(platform, 8192, 151_936, jnp.bfloat16, 1.0) for platform in ("cpu", "gpu", "tpu")]
    [False, True, True]
    """
    kept = tokens * vocabulary * jnp.dtype(dtype).itemsize
    return logit_scale is not None and dtype == jnp.bfloat16 and kept <= KEPT_BYTES.get(platform, 0)


def fused_token_logprobs(
    hidden: Float[Array, "N D"],
    head: Float[Array, "V D"],
    tokens: Int[Array, "N"],
    temperature: Float[Array, "N"] | Float[Array, ""] | float = 1.0,
    *,
    completion_mask: Bool[Array, "N"] | None = None,
    leaves_out: bool = False,
    logit_scale: float = 1.0,
    slice_logits: int = SLICE_LOGITS,
) -> FusedScores:
    """Return the log-probability of each token by `softmax(logit_scale * hidden @ head.T / temperature)`.

    Gradients flow from log-probabilities and normalizers into `hidden` and `head`, not from the entropy, and not into
    temperatures. They hold `N V` numbers of the dtype of `hidden` in memory from the forward to the backward pass;
    products add up in float32, also the gradient of `head`, before it is rounded to its dtype. Without a gradient the
    function holds the logits of one slice of the vocabulary. There is no forward-mode derivative (`jax.jvp`).

    Relative to a token that is very unlikely, exponentials overflow. Then the logits are computed a second time, and
    the exponentials of these tokens taken relative to their largest logit; other tokens keep their bits.

    Args:
        hidden: hidden states, in bfloat16, float32 or wider.
        head: the output head in the same dtype; a tied one is the embedding.
        tokens: tokens to score, each under the hidden state before it.
        temperature: a number or one per token; 0 counts as 1, as greedy rows are scored unscaled. A token whose
            temperature is negative or not finite gets NaN and no gradient.
        completion_mask: True for the tokens to score; the others get 0 and no gradient, whatever they hold. None
            for all.
        leaves_out: True to leave masked tokens out of the products: the others come first, and the program has the head
            for each quarter of the tokens, of which it runs the smallest that holds them. That is four times the
            code; memory is that of all tokens.
        logit_scale: factor of the logits.
        slice_logits: number of logits that exist at a time.

    Raises:
        ValueError: `hidden` and `head` have different dtypes, or float16, whose exponentials end at `e^11`;
            `slice_logits` is below 1, or `logit_scale` not above 0; or a token is outside the vocabulary (not checked
            under `jit`).

    >>> scores = fused_token_logprobs(jnp.ones((1, 1)), jnp.log(jnp.array([[1.0], [3.0]])), jnp.array([1]))
    >>> print(f"{scores.logprobs[0]:.4f} {scores.entropy[0]:.4f} {scores.log_normalizers[0]:.4f}")  # log(3/4); log 4
    -0.2877 0.5623 1.3863
    """
    if hidden.dtype != head.dtype or hidden.dtype == jnp.float16:
        raise ValueError(f"hidden holds {hidden.dtype} and head {head.dtype}; wanted both in bfloat16 or in float32")
    if slice_logits < 1 or logit_scale <= 0:
        raise ValueError(f"slice_logits is {slice_logits} and logit_scale {logit_scale}; wanted 1 or more, and above 0")
    if not isinstance(tokens, jax.core.Tracer):
        check_token_ids("tokens", tokens, head.shape[0])
    wide = jnp.promote_types(hidden.dtype, jnp.float32)
    temperature = jnp.broadcast_to(jnp.asarray(temperature, wide), tokens.shape)
    is_scored = is_temperature = (temperature >= 0) & (temperature < jnp.inf)
    if completion_mask is not None:
        is_scored &= completion_mask
    # Zeros have equal logits: nothing overflows, and what a masked token holds, NaN too, spoils no sum.
    hidden = jnp.where(is_scored[:, None], hidden, 0)
    given = hidden, tokens, scaling_temperature(temperature) / logit_scale
    count, order = is_scored.sum(), None
    capacities: tuple[int, ...] = (tokens.size,)
    if leaves_out:
        order = jnp.argsort(~is_scored)  # stable
        given = jax.tree.map(lambda x: x.at[order].get(mode="promise_in_bounds", unique_indices=True), given)
        capacities = tuple(-(-tokens.size * part // CAPACITIES) for part in range(1, CAPACITIES + 1))
    slices = max(1, -(-tokens.size * head.shape[0] // slice_logits))
    width = -(-head.shape[0] // slices // LANES) * LANES
    found = _scores(width, capacities, head, count, *given)
    if order is not None:
        found = jax.tree.map(lambda x: jnp.zeros_like(x).at[order].set(x, unique_indices=True), found)
    others = jnp.nan if completion_mask is None else jnp.where(completion_mask & ~is_temperature, jnp.nan, 0.0)
    logprobs, entropy, log_normalizers = (jnp.where(is_scored, x, others) for x in found[:3])
    return FusedScores(logprobs, entropy, log_normalizers, found[3] & is_scored)


class _Pass(NamedTuple):
    """A pass over the logits.

    Attributes:
        is_unfinished: True if some of the sums are too large.
        base: logit of each token that the next pass is relative to.
        used: that of this pass.
        overflows: tokens whose sums were too large.
        kept: exponentials of all tokens but the chosen ones, slice by slice; none without a gradient.
        mass: their sums.
        moment: sums of exponential times exponent.
    """

    is_unfinished: Bool[Array, ""]
    base: Float[Array, "N"]
    used: Float[Array, "N"]
    overflows: Bool[Array, "N"]
    kept: tuple[Float[Array, "N _"], ...]
    mass: Float[Array, "N"]
    moment: Float[Array, "N"]


def _slices(head: Float[Array, "V D"], width: int) -> Iterator[tuple[int, Float[Array, "_ D"]]]:
    """Yield the first token and the rows of each slice of the vocabulary."""
    for first in range(0, head.shape[0], width):
        yield first, head[first : first + width]


def _product(x: Array, y: Array, axis_of_x: int, axis_of_y: int) -> Array:
    """Return the product over these axes, summed in float32 or wider."""
    wide = jnp.promote_types(x.dtype, jnp.float32)
    return jax.lax.dot_general(x, y, (((axis_of_x,), (axis_of_y,)), ((), ())), preferred_element_type=wide)


def _reduce_each(weights: Array, moments: Array, logits: Array) -> tuple[Array, ...]:
    """Return two sums and the maximum over the last axis; XLA for TPUs computes all three within the product."""
    return weights.sum(axis=-1), moments.sum(axis=-1), logits.max(axis=-1)


def _reduce_at_once(*terms: Array) -> tuple[Array, ...]:
    """Return the same by one reduction, or XLA for GPUs reads the logits again for the maximum."""

    def add(a: Any, b: Any) -> Any:
        return a[0] + b[0], a[1] + b[1], jnp.maximum(a[2], b[2])

    zero = jnp.zeros((), terms[0].dtype)
    return tuple(jax.lax.reduce(terms, (zero, zero, zero - jnp.inf), add, (1,)))


def _pass(
    width: int, capacity: int, head: Array, hidden: Array, tokens: Array, temperature: Array, last: _Pass
) -> _Pass:
    """Return the pass after another one, in which tokens beyond the capacity have logits of 0."""
    given, of_slices = hidden[:capacity], list[Any]()
    for first, rows in _slices(head, width):
        logits = jnp.pad(_product(given, rows, 1, 1), ((0, len(tokens) - capacity), (0, 0)))  # [N _]
        exponents = (logits - last.base[:, None]) / temperature[:, None]
        is_chosen = jnp.arange(first, first + len(rows)) == tokens[:, None]
        weights = jnp.where(is_chosen, 0.0, jnp.exp(exponents))
        terms = weights, weights * jnp.maximum(exponents, MIN_LOGPROB), logits
        sums = jax.lax.platform_dependent(*terms, cuda=_reduce_at_once, default=_reduce_each)  # [N] each
        # In turn: XLA would compute the logits of all slices before it reads any.
        given, found = jax.lax.optimization_barrier((given, (weights.astype(hidden.dtype), *sums)))
        of_slices.append(found)
    kept, masses, moments, largest = zip(*of_slices, strict=True)
    mass = sum(masses)
    is_large = mass > LARGEST_SUM
    base = jnp.where(is_large, jnp.stack(largest).max(axis=0), last.base)
    kept = kept if last.kept else ()
    return _Pass(is_large.any(), base, last.base, last.overflows | is_large, kept, mass, sum(moments))


def _compute(
    width: int, keeps: bool, capacity: int, head: Array, hidden: Array, tokens: Array, temperature: Array
) -> tuple[tuple[Array, ...], tuple[Any, ...]]:
    """Return the scores of the tokens within the capacity, and the arrays that the gradient needs."""
    wide = jnp.promote_types(hidden.dtype, jnp.float32)
    own_rows = head.at[tokens].get(mode="fill", fill_value=jnp.nan)  # which a token outside the vocabulary lacks
    chosen = (hidden.astype(wide) * own_rows.astype(wide)).sum(axis=-1)
    kept = [jax.lax.empty((len(tokens), len(rows)), hidden.dtype) for _, rows in _slices(head, width)] if keeps else []
    none, zeros = jnp.zeros(tokens.shape, bool), jnp.zeros(tokens.shape, wide)
    base = jnp.maximum(chosen, jnp.finfo(wide).min)  # -inf has no difference from another -inf
    begun = _Pass(jnp.ones((), bool), base, base, none, tuple(kept), zeros, zeros)
    turn = partial(_pass, width, capacity, head, hidden, tokens, temperature)
    with jax.named_scope("at_most_1"):  # which `benchmarks/hlo.py` reads: the second turn is an exception
        last = jax.lax.while_loop(lambda each: each.is_unfinished, turn, begun)
    exponent = (chosen - last.used) / temperature  # of the chosen token: 0 in a single pass
    own = jnp.exp(exponent)
    log_total = jnp.log1p(last.mass + jnp.expm1(exponent))
    moment = last.moment + own * jnp.maximum(exponent, MIN_LOGPROB)
    total = last.mass + own
    scores = exponent - log_total, log_total - moment / total, last.used / temperature + log_total, last.overflows
    return scores, (last.mass, own, 1 / (total * temperature), last.kept)


def _gradients(
    width: int,
    capacity: int,
    head: Array,
    tables: tuple[Array, ...],
    saved: tuple[Any, ...],
    cotangents: tuple[Array, Array],
) -> tuple[Array, Array]:
    """`T dz = d_logprob (1_chosen - p) + d_normalizer p`: products with the exponentials, and the chosen row apart."""
    first = jax.tree.map(lambda x: x[:capacity], (tables, saved, cotangents))
    (hidden, tokens, _), (mass, own, per_total, kept), (d_logprobs, d_normalizers) = first
    of_others = (d_normalizers - d_logprobs) * per_total
    of_chosen = (d_logprobs * mass + d_normalizers * own) * per_total
    scaled = (hidden * of_others[:, None]).astype(hidden.dtype)
    d_hiddens, d_rows = list[Any](), []
    for (_, rows), weights in zip(_slices(head, width), kept, strict=True):
        d_hiddens.append(_product(weights, rows, 1, 0))
        d_rows.append(_product(weights, scaled, 0, 0))
        if len(d_hiddens) == 3:  # one pass over memory adds all three
            d_hiddens = [sum(d_hiddens)]
        scaled, d_hiddens, d_rows[-1] = jax.lax.optimization_barrier((scaled, d_hiddens, d_rows[-1]))
    d_head = jnp.concatenate(d_rows).at[tokens].add(hidden * of_chosen[:, None])
    d_hidden = (of_chosen[:, None] * head[tokens] + of_others[:, None] * sum(d_hiddens)).astype(hidden.dtype)
    return d_head.astype(head.dtype), jnp.pad(d_hidden, ((0, len(tables[0]) - capacity), (0, 0)))


def _run_smallest(capacities: tuple[int, ...], count: Array, compute: Any, *given: Any) -> Any:
    """Return `compute(capacity, *given)` for the first capacity that holds so many tokens."""
    index = sum((count > capacity for capacity in capacities[:-1]), jnp.zeros((), jnp.int32))
    return jax.lax.switch(index, [partial(compute, capacity) for capacity in capacities], *given)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _scores(width: int, capacities: tuple[int, ...], head: Array, count: Array, *tables: Array) -> tuple[Array, ...]:
    """Return log-probability, entropy and normalizer of the first `count` tokens, and whether they overflow."""
    scores: tuple[Array, ...] = _run_smallest(capacities, count, partial(_compute, width, False), head, *tables)[0]
    return scores


def _scores_forward(width: int, capacities: tuple[int, ...], head: Array, count: Array, *tables: Array) -> Any:
    scores, saved = _run_smallest(capacities, count, partial(_compute, width, True), head, *tables)
    return scores, (head, count, tables, saved)


def _scores_backward(width: int, capacities: tuple[int, ...], residuals: Any, cotangents: Any) -> Any:
    head, count, tables, saved = residuals
    given = head, tables, saved, (cotangents[0], cotangents[2])
    d_head, d_hidden = _run_smallest(capacities, count, partial(_gradients, width), *given)
    return d_head, None, d_hidden, None, None


_scores.defvjp(_scores_forward, _scores_backward)
