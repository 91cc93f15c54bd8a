"""Sampling of one token per row, with its log-probability under the full and under the filtered distribution.

All parameters are arrays with one entry per row, so that new values compile nothing. Each row has its own key, so
that its token depends on its own logits, parameters and key only. Letters: `R` rows, `V` vocabulary, `N` biased
tokens.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple, SupportsIndex

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, UInt

from jaxft.core import LARGEST_FLOAT32
from jaxft.core.logprobs import scaling_temperature

COLDEST = 1e-6
"""The lowest temperature above 0; divided by a lower one, logits are too large for float32 to distinguish."""

SMALLEST_FRACTION = 1e-30
"""The smallest `top_p`; smaller values round to 0 on the device and keep no token."""


class LogitBias(NamedTuple):
    """Values added to the logits of a few tokens of each row, after the temperature; the id -1 stands for no token."""

    ids: Int[Array, "R N"]
    values: Float[Array, "R N"]


class SamplingParams(NamedTuple):
    """Sampling parameters, one entry per row, applied in this order: temperature, logit bias, top-k, top-p, min-p.

    Attributes:
        temperature: divides the logits; 0 takes the most likely token (the lowest id on ties).
        top_k: keeps the k most likely tokens; 0 keeps all.
        top_p: keeps the smallest set of most likely tokens with at least this total probability; 1 keeps all.
        min_p: keeps tokens with at least this fraction of the most likely token's probability; 0 keeps all.
        logit_bias: values added to the logits of single tokens; None when no row has any.
    """

    temperature: Float[Array, "R"]
    top_k: Int[Array, "R"]
    top_p: Float[Array, "R"]
    min_p: Float[Array, "R"]
    logit_bias: LogitBias | None = None


class Sampled(NamedTuple):
    """One token per row, with its log-probability under two distributions.

    `sampler_logprobs` are over the whole vocabulary at the row's temperature (at 1 when greedy). `behavior_logprobs`
    are under the distribution that the token was drawn from, which top-k, top-p, min-p and logit bias change.
    """

    tokens: Int[Array, "R"]
    sampler_logprobs: Float[Array, "R"]
    behavior_logprobs: Float[Array, "R"]


def sampling_params(
    rows: int, *, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0
) -> SamplingParams:
    """Make sampling parameters that are the same for every row.

    Raises:
        ValueError: a value is outside its range (see `check_sampling`).

    >>> print(sampling_params(2, temperature=0.5).temperature)
    [0.5 0.5]
    """
    check_sampling(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    return SamplingParams(
        jnp.full(rows, temperature, jnp.float32),
        jnp.full(rows, top_k, jnp.int32),
        jnp.full(rows, top_p, jnp.float32),
        jnp.full(rows, min_p, jnp.float32),
    )


def check_sampling(*, temperature: float, top_k: int, top_p: float, min_p: float) -> None:
    """Raise unless every value is in its range and fits float32 or int32.

    The temperature is 0 or from 1e-6 to 3.4e38, top_k an integer from 0 to 2^31 - 1, top_p from 1e-30 to 1, and min_p
    in [0, 1).

    Raises:
        ValueError: a value is outside its range; the message names the parameter, the value and the range.

    >>> check_sampling(temperature=1.0, top_k=0, top_p=1.5, min_p=0.0)
    Traceback (most recent call last):
    ValueError: top_p is 1.5; wanted a probability mass in (0, 1], at least 1e-30
    """
    if not (temperature == 0.0 or COLDEST <= temperature <= LARGEST_FLOAT32):
        raise ValueError(
            f"temperature is {temperature}; wanted 0 (greedy) or a finite number above 0, from {COLDEST} to "
            f"{LARGEST_FLOAT32:.1e}"
        )
    if not isinstance(top_k, SupportsIndex) or not 0 <= top_k < 2**31:
        raise ValueError(f"top_k is {top_k}; wanted 0 (off) or the number of tokens to keep, an integer below 2^31")
    if not SMALLEST_FRACTION <= top_p <= 1.0:
        raise ValueError(f"top_p is {top_p}; wanted a probability mass in (0, 1], at least {SMALLEST_FRACTION}")
    if not 0.0 <= min_p < 1.0:
        raise ValueError(f"min_p is {min_p}; wanted a fraction of the largest probability in [0, 1)")


def fold_ids(key: Any, ids: UInt[Array, "N"]) -> Any:
    """Fold each of `ids` (uint32) into `key`, in order.

    >>> key = jax.random.key(0)
    >>> bool(fold_ids(key, jnp.array([3, 5], jnp.uint32)) == jax.random.fold_in(jax.random.fold_in(key, 3), 5))
    True
    """
    return jax.lax.fori_loop(0, ids.shape[0], lambda i, k: jax.random.fold_in(k, ids[i]), key)


def sample(logits: Float[Array, "R V"], keys: Any, params: SamplingParams) -> Sampled:
    """Draw a token for each row from its filtered distribution, with its own key (`[R]` PRNG keys).

    >>> logits = jnp.log(jnp.array([[0.5, 0.3, 0.2]]))
    >>> drawn = sample(logits, jax.random.split(jax.random.key(0), 1), sampling_params(1, top_k=1))
    >>> print(drawn.tokens[0], f"{drawn.sampler_logprobs[0]:.4f} {drawn.behavior_logprobs[0]:.4f}")  # log(0.5); log(1)
    0 -0.6931 0.0000
    """
    scaled = logits.astype(jnp.float32) / scaling_temperature(params.temperature)[:, None]  # [R V]
    normaliser = jax.nn.logsumexp(scaled, axis=-1)
    probs = jnp.exp(scaled - normaliser[:, None])

    greedy = params.temperature == 0
    biased = jnp.zeros_like(greedy) if params.logit_bias is None else (params.logit_bias.ids >= 0).any(axis=-1)
    filtered = ((params.top_k > 0) | (params.top_p < 1) | (params.min_p > 0) | biased) & ~greedy

    def filter_rows() -> tuple[Float[Array, "R V"], Float[Array, "R V"]]:
        shifted = add_bias(scaled, params.logit_bias)
        weights = jax.nn.softmax(shifted, axis=-1)
        kept = jnp.where(kept_tokens(weights, params), weights, 0.0)
        return shifted, jnp.where(filtered[:, None], kept, probs)

    # Most runs filter nothing, and skip this.
    shifted, weights = jax.lax.cond((filtered | (greedy & biased)).any(), filter_rows, lambda: (scaled, probs))
    tokens = jnp.where(greedy, first_largest(shifted), _draw_index(weights, keys)).astype(jnp.int32)

    def at_token(x: Float[Array, "R V"]) -> Float[Array, "R"]:
        return jnp.take_along_axis(x, tokens[:, None], axis=-1)[:, 0]

    sampler_logprobs = at_token(scaled) - normaliser
    behavior_logprobs = jnp.log(at_token(weights)) - jnp.log(weights.sum(axis=-1))
    return Sampled(tokens, sampler_logprobs, jnp.where(filtered, jnp.minimum(behavior_logprobs, 0.0), sampler_logprobs))


def add_bias(logits: Float[Array, "R V"], bias: LogitBias | None) -> Float[Array, "R V"]:
    """Add each row's bias to its logits; a token that is listed twice gets both values.

    >>> print(add_bias(jnp.zeros((1, 3)), LogitBias(jnp.array([[2, -1]]), jnp.array([[1.5, 9.0]]))))
    [[0.  0.  1.5]]
    """
    if bias is None:
        return logits
    rows = jnp.arange(logits.shape[0])[:, None]
    ids = jnp.where(bias.ids >= 0, bias.ids, logits.shape[-1])  # an id outside the vocabulary is dropped
    return logits.at[rows, ids].add(bias.values, mode="drop")


def first_largest(x: Float[Array, "R V"]) -> Int[Array, "R"]:
    """Return the `argmax` over the last axis, by two reductions that cost a tenth of `jnp.argmax` on a CPU.

    >>> print(first_largest(jnp.array([[1.0, 3.0, 3.0]])))
    [1]
    """
    size = x.shape[-1]
    is_largest = x == x.max(axis=-1, keepdims=True)
    # A row of NaN has no largest entry; the result is still a valid token.
    return jnp.minimum(jnp.where(is_largest, jnp.arange(size), size).min(axis=-1), size - 1)


def _draw_index(weights: Float[Array, "R V"], keys: Any) -> Int[Array, "R"]:
    """Draw an index per row in proportion to its weight; an index of weight 0 is never drawn.

    The cumulative distribution is inverted on two levels, blocks and then entries of a block, with an independent
    uniform number for each: two short cumulative sums cost less than one over the vocabulary, or a Gumbel variate per
    token.
    """
    rows, size = weights.shape
    width = _block_width(size)
    blocks = -(-size // width)
    table = jnp.pad(weights, ((0, 0), (0, blocks * width - size))).reshape(rows, blocks, width)
    uniforms = jax.vmap(lambda key: jax.random.uniform(key, (2,)))(keys)  # [R 2]
    block = _inverse_cdf(table.sum(axis=-1), uniforms[:, 0])
    inside = jnp.take_along_axis(table, block[:, None, None], axis=1)[:, 0]  # [R width]
    return block * width + _inverse_cdf(inside, uniforms[:, 1])


def _block_width(size: int) -> int:
    """Return about the square root of `size`; preferably a divisor of `size` close to it, which needs no padding."""
    root = max(1, math.isqrt(size))
    divisor = next(width for width in range(root, 0, -1) if size % width == 0)
    return divisor if 4 * divisor >= root else root


def _inverse_cdf(weights: Float[Array, "R N"], uniform: Float[Array, "R"]) -> Int[Array, "R"]:
    # A parallel prefix sum rounds each entry by a tree of its own, so it may rise by a unit in the last place where the
    # weight is 0. Such entries are skipped, or a filtered or forbidden token would be drawn once in some 10^7.
    cumulative = jnp.where(weights > 0, jnp.cumsum(weights, axis=-1), 0.0)
    # uniform <= 1 - 2^-23 keeps the product strictly below the total, so an entry above it exists.
    target = uniform * cumulative.max(axis=-1)
    return jnp.argmax(cumulative > target[:, None], axis=-1)


def kept_tokens(probs: Float[Array, "R V"], params: SamplingParams) -> Bool[Array, "R V"]:
    """Return True for tokens that top-k, top-p and min-p keep: exact, without sorting; ties keep the lowest ids.

    Bit patterns of non-negative floats are ordered like the floats, so 30 steps of bisection over bit patterns find
    the exact threshold probability.

    >>> params = sampling_params(1, top_p=0.7)
    >>> print(kept_tokens(jnp.array([[0.2, 0.5, 0.3]]), params))  # 0.5 alone is short of 0.7, 0.5 + 0.3 crosses it
    [[False  True  True]]
    """
    vocabulary = probs.shape[-1]
    ones = jnp.ones_like(probs)
    k = jnp.where(params.top_k > 0, jnp.minimum(params.top_k, vocabulary), vocabulary).astype(jnp.float32)
    kept = _most_likely(probs, ones, k)
    # Top-p counts the mass that top-k has left.
    mass = jnp.where(kept, probs, 0.0)
    wanted = params.top_p * mass.sum(axis=-1)
    kept &= (params.top_p >= 1)[:, None] | _most_likely(mass, mass, wanted)
    return kept & (probs >= (params.min_p * probs.max(axis=-1))[:, None])


def _most_likely(
    probs: Float[Array, "R V"], weights: Float[Array, "R V"], wanted: Float[Array, "R"]
) -> Bool[Array, "R V"]:
    """Return True for the fewest most likely tokens of each row whose weights sum to at least `wanted`."""
    bits = jax.lax.bitcast_convert_type(probs, jnp.int32)

    def is_enough(threshold: Int[Array, "R"]) -> Bool[Array, "R"]:
        return jnp.sum(jnp.where(bits >= threshold[:, None], weights, 0.0), axis=-1) >= wanted

    threshold = _largest_true(is_enough, rows=probs.shape[0])[:, None]
    above, tied = bits > threshold, bits == threshold
    missing = wanted - jnp.sum(jnp.where(above, weights, 0.0), axis=-1)
    each = jnp.max(jnp.where(tied, weights, 0.0), axis=-1)
    needed = jnp.maximum(jnp.ceil(missing / jnp.where(each > 0, each, 1.0)), 1.0)
    return above | (tied & (jnp.cumsum(tied, axis=-1) <= needed[:, None]))


def _largest_true(predicate: Callable[[Int[Array, "R"]], Bool[Array, "R"]], rows: int) -> Int[Array, "R"]:
    """Bisect, per row, for the largest of 0 .. 2^30 - 1 (bit patterns of [0, 2)) with a monotone predicate; else 0."""

    def halve(i: Int[Array, ""], found: Int[Array, "R"]) -> Int[Array, "R"]:
        candidate = found | (1 << (29 - i))
        return jnp.where(predicate(candidate), candidate, found)

    return jax.lax.fori_loop(0, 30, halve, jnp.zeros(rows, jnp.int32))
