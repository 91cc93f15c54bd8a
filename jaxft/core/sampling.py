"""Sampling of one token per row, with its log-probability under the full and under the filtered distribution.

All parameters are arrays with one entry per row, so that new values compile nothing. Each row has its own key, so
that its token depends on its own logits, parameters and key only. Nothing is sorted, and no loop or branch depends on
values: sampling asks the host for nothing. Letters: `R` rows, `V` vocabulary, `N` biased tokens, `B` blocks of the
vocabulary, `K` tokens of one block, `W` words of 32 bits that hold `V` bits, `D` distinct tokens.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, SupportsIndex

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Shaped, UInt, UInt32

from jaxft.core import LARGEST_FLOAT32
from jaxft.core.logprobs import pack_bits, unpack_support
from jaxft.core.reductions import invariant_sum, rounded, rounded_exp
from jaxft.core.softmax import scaling_temperature

COLDEST = 1e-6
"""The lowest temperature above 0; divided by a lower one, logits are too large for float32 to distinguish."""

SMALLEST_FRACTION = 1e-30
"""The smallest `top_p`; smaller values round to 0 on the device and keep no token."""


BLOCK_TOKENS = 128
"""Tokens of a block of the vocabulary: the lanes of a TPU's register."""

DIGITS = 3
"""Binary digits of a threshold that one sweep over the vocabulary finds, except on CPUs, which do best with 1."""


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


class Penalties(NamedTuple):
    """Penalties on the tokens that each row has, which `penalize` takes off.

    Attributes:
        ids: distinct tokens of the row, prompt included; the id -1 stands for no token.
        counts: number of times that the answer has each of them; 0 for those of the prompt alone.
        repetition, frequency, presence: the penalties of the row; 1, 0 and 0 for none.
    """

    ids: Int[Any, "R D"]
    counts: Int[Any, "R D"]
    repetition: Float[Any, "R"]
    frequency: Float[Any, "R"]
    presence: Float[Any, "R"]

    @property
    def are_given(self) -> Bool[Any, "R"]:
        """True for rows with a penalty."""
        return (self.repetition != 1) | (self.frequency != 0) | (self.presence != 0)


class Sampled(NamedTuple):
    """One token per row, with its log-probability under two distributions.

    `sampler_logprobs` are over the whole vocabulary at the row's temperature (at 1 when greedy); of rows with penalties
    over the tokens that could be drawn, without the penalties. `behavior_logprobs` are under the distribution that the
    token was drawn from, which filters, logit bias, a grammar and penalties change. `supports` are the tokens that have
    a probability there (`pack_bits`), 0 for rows that nothing changes; None unless asked for.
    """

    tokens: Int[Array, "R"]
    sampler_logprobs: Float[Array, "R"]
    behavior_logprobs: Float[Array, "R"]
    supports: UInt32[Array, "R W"] | None = None


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


def check_penalties(presence_penalty: float, frequency_penalty: float, repetition_penalty: float) -> None:
    """Raise unless presence and frequency penalty are from -2 to 2, and the repetition penalty from 1e-6 to 1e6.

    Raises:
        ValueError: a value is outside its range; the message names the parameter, the value and the range.

    >>> check_penalties(0.5, 3.0, 1.0)
    Traceback (most recent call last):
    ValueError: frequency_penalty is 3.0; wanted a number from -2 to 2
    """
    for name, value in (("presence_penalty", presence_penalty), ("frequency_penalty", frequency_penalty)):
        if not -2 <= value <= 2:
            raise ValueError(f"{name} is {value}; wanted a number from -2 to 2")
    if not COLDEST <= repetition_penalty <= 1 / COLDEST:
        raise ValueError(f"repetition_penalty is {repetition_penalty}; wanted 1 (none) or a number from 1e-06 to 1e+06")


def fold_ids(key: Any, ids: UInt[Array, "N"]) -> Any:
    """Fold each of `ids` (uint32) into `key`, in order.

    >>> key = jax.random.key(0)
    >>> bool(fold_ids(key, jnp.array([3, 5], jnp.uint32)) == jax.random.fold_in(jax.random.fold_in(key, 3), 5))
    True
    """
    return jax.lax.fori_loop(0, ids.shape[0], lambda i, k: jax.random.fold_in(k, ids[i]), key)


def has_filters(params: SamplingParams) -> Bool[Array, "R"]:
    """Return True for rows with top-k, top-p, min-p or a logit bias, whose tokens need `sample(..., is_filtered=True)`.

    >>> print(has_filters(sampling_params(1, top_k=5)), has_filters(sampling_params(1, temperature=0.5)))
    [ True] [False]
    """
    filters = (params.top_k > 0) | (params.top_p < 1) | (params.min_p > 0)
    return filters if params.logit_bias is None else filters | (params.logit_bias.ids >= 0).any(axis=-1)


def sample(
    logits: Float[Array, "R V"],
    keys: Any,
    params: SamplingParams,
    *,
    is_filtered: bool = True,
    in_halves: bool = True,
    shards: int = 1,
    axis: str | None = None,
    allowed: UInt32[Array, "R W"] | None = None,
    has_supports: bool = False,
    drawn: Sampled | None = None,
    penalties: Penalties | None = None,
) -> Sampled:
    """Draw a token for each row from its filtered distribution, with its own key (`[R]` PRNG keys).

    The cumulative distribution is inverted on two levels, blocks and then tokens of one block, with an independent
    uniform number for each: short cumulative sums cost less than one over the vocabulary, or a Gumbel variate per
    token. A greedy row takes the first block that has the largest logit, and the first such token of the block.

    Args:
        logits: one row for each token to draw.
        keys: a PRNG key per row.
        params: sampling parameters per row.
        is_filtered: False promises that no row `has_filters`, and saves the sweeps over the logits; the bits of such
            rows are those of True.
        in_halves: as for `invariant_sum`: True on CPUs, where the bits of a row then do not depend on the number of
            rows. False is faster elsewhere.
        shards: number of equal parts of the vocabulary, each of which begins with a block of its own. With other blocks
            the same key draws another token; parts that are multiples of 128 tokens have those of the whole.
        axis: mesh axis that has these parts, inside `jax.shard_map`, where `logits` are the part of the device; results
            are the same on all. Only without filters.
        allowed: tokens that each row may draw from (`pack_bits`), before any filter; greedy rows have log-probabilities
            of both distributions then. None: all tokens.
        has_supports: True to return `supports`, if rows are filtered or `allowed`.
        drawn: with `allowed`, tokens that were drawn from the same logits without it; they save the sums over the whole
            vocabulary.
        penalties: with `allowed`, what is taken off the logits before all else; None: no row has any.

    >>> logits = jnp.log(jnp.array([[0.5, 0.3, 0.2]]))
    >>> drawn = jax.jit(sample)(logits, jax.random.split(jax.random.key(0), 1), sampling_params(1, top_k=1))
    >>> print(drawn.tokens[0], f"{drawn.sampler_logprobs[0]:.4f} {drawn.behavior_logprobs[0]:.4f}")  # log(0.5); log(1)
    0 -0.6931 0.0000
    """
    temperature, greedy = scaling_temperature(params.temperature)[:, None], params.temperature == 0
    scaled = logits.astype(jnp.float32) / temperature  # [R V]
    block_softmax = partial(_block_softmax, in_halves=in_halves, shards=1 if axis else shards, axis=axis)
    full = drawn_from = block_softmax(scaled) if drawn is None else None
    candidates, supports = scaled, None
    is_changed = is_filtered or allowed is not None
    if is_changed:
        filtering = (has_filters(params) if allowed is None else jnp.ones_like(greedy))[:, None]
        wanted = scaled if penalties is None else penalize(logits, penalties) / temperature
        if allowed is not None:
            wanted = jnp.where(unpack_support(allowed, scaled.shape[1]), wanted, -jnp.inf)
        filtered = _filtered_logits(wanted, params, in_halves=in_halves) if is_filtered else wanted
        candidates = jnp.where(filtering, filtered, scaled)
        # Rows that filter nothing take the sums of the other variant, in whatever order the compiler adds here.
        changed = block_softmax(candidates)
        drawn_from = changed if full is None else jax.tree.map(partial(jnp.where, filtering), changed, full)
        if has_supports:
            supports = jnp.where(filtering, pack_bits(candidates > -jnp.inf), jnp.uint32(0))

    assert drawn_from is not None  # `drawn` comes with `allowed`
    uniforms = jax.vmap(lambda key: jax.random.uniform(key, (2,)))(keys)  # [R 2]
    block = jnp.where(greedy, first_largest(drawn_from.peaks), _inverse_cdf(drawn_from.masses, uniforms[:, 0]))
    if axis is None:
        drawable, ids = _block_tokens(candidates if is_changed else logits, block, shards)  # [R K]
    else:
        drawable, ids = _tokens_of_axis(logits, block, axis)
    inside = drawable if is_changed else drawable.astype(jnp.float32) / temperature
    weights = rounded_exp(inside - drawn_from.peak)
    index = jnp.where(greedy, first_largest(inside), _inverse_cdf(weights, uniforms[:, 1]))
    tokens = _at(ids, index)

    # Divided once more, as XLA for CPU may round the quotients of a block in another way.
    logit = _at(logits, tokens) if is_changed else _at(drawable, index)
    chosen = logit.astype(jnp.float32) / temperature[:, 0]
    if full is None:
        assert drawn is not None
        sampler_logprobs = drawn.sampler_logprobs + (chosen - _at(scaled, drawn.tokens))
    else:
        sampler_logprobs = full.logprobs(chosen)
    if penalties is not None:
        among_drawable = block_softmax(jnp.where(candidates > -jnp.inf, scaled, -jnp.inf)).logprobs(chosen)
        sampler_logprobs = jnp.where(penalties.are_given, among_drawable, sampler_logprobs)
    behavior_logprobs = drawn_from.logprobs(_at(inside, index))
    if allowed is None:
        behavior_logprobs = jnp.where(greedy | ~has_filters(params), sampler_logprobs, behavior_logprobs)
    return Sampled(tokens, sampler_logprobs, behavior_logprobs, supports)


class _BlockSoftmax(NamedTuple):
    """The largest logit of each block, the sum of `e^(logit - peak)` of each block, and both of the whole row."""

    peaks: Float[Array, "R B"]
    masses: Float[Array, "R B"]
    peak: Float[Array, "R 1"]
    log_mass: Float[Array, "R 1"]

    def logprobs(self, logits: Float[Array, "R"]) -> Float[Array, "R"]:
        return logits - self.peak[:, 0] - self.log_mass[:, 0]


def _block_softmax(logits: Float[Array, "R V"], *, in_halves: bool, shards: int, axis: str | None) -> _BlockSoftmax:
    blocks = _in_blocks(logits, -jnp.inf, shards)  # [R B K]
    # Each block is summed relative to its own largest logit, so that one pass over the logits does both. Without the
    # barrier, XLA also reduces the logits to rows directly, and reads them once more for each result.
    if in_halves:
        peaks = blocks.max(axis=-1)
        sums = invariant_sum(rounded_exp(blocks - _finite(peaks)[:, :, None]), in_halves=True)[..., 0]
    else:
        peaks, sums = jax.lax.reduce((blocks, jnp.ones_like(blocks)), (-jnp.inf, 0.0), _add_softmax, (2,))
    peaks, sums = jax.lax.optimization_barrier((peaks, sums))
    if axis is not None:
        peaks, sums = jax.lax.all_gather(jnp.stack([peaks, sums]), axis, axis=2, tiled=True)
    peak = peaks.max(axis=-1, keepdims=True)
    masses = rounded(sums * rounded_exp(_finite(peaks) - peak))
    return _BlockSoftmax(peaks, masses, peak, rounded(jnp.log(rounded(invariant_sum(masses, in_halves=in_halves)))))


def _add_softmax(a: tuple[Array, Array], b: tuple[Array, Array]) -> tuple[Array, Array]:
    """Return the larger of two peaks, and both sums relative to it."""
    peak = jnp.maximum(a[0], b[0])
    return peak, a[1] * jnp.exp(a[0] - _finite(peak)) + b[1] * jnp.exp(b[0] - _finite(peak))


def _finite(peaks: Float[Array, "*N"]) -> Float[Array, "*N"]:
    """Return the peaks, with the lowest finite number in place of -inf, relative to which -inf has a weight of 0."""
    return jnp.maximum(peaks, jnp.finfo(peaks.dtype).min)


def _in_blocks(x: Shaped[Array, "R V"], padding: float, shards: int = 1) -> Shaped[Array, "R B K"]:
    x = x.reshape(len(x), shards, -1)
    width = min(x.shape[2], BLOCK_TOKENS)
    x = jnp.pad(x, ((0, 0), (0, 0), (0, -x.shape[2] % width)), constant_values=padding)
    return x.reshape(len(x), -1, width)


def _block_tokens(
    logits: Float[Array, "R V"], block: Int[Array, "R"], shards: int = 1
) -> tuple[Float[Array, "R K"], Int[Array, "R K"]]:
    """Return the logits of one block of each row and their ids; a shorter block begins with other tokens, at -inf."""
    size = logits.shape[-1] // shards
    width = min(size, BLOCK_TOKENS)
    shard, own = jnp.divmod(block, -(-size // width))
    first, start = own * width, jnp.minimum(own * width, size - width)
    ids = start[:, None] + jnp.arange(width)  # within the shard
    inside = jax.vmap(lambda row, at: jax.lax.dynamic_slice_in_dim(row, at, width))(logits, shard * size + start)
    return jnp.where(ids >= first[:, None], inside, -jnp.inf), (shard * size)[:, None] + ids


def _tokens_of_axis(
    logits: Float[Array, "R V"], block: Int[Array, "R"], axis: str
) -> tuple[Float[Array, "R K"], Int[Array, "R K"]]:
    """Return `_block_tokens` where each device of a mesh axis has a shard of the vocabulary."""
    size = logits.shape[-1]
    shard, own = jnp.divmod(block, -(-size // min(size, BLOCK_TOKENS)))
    inside, ids = _block_tokens(logits, own)
    inside = jnp.where((shard == jax.lax.axis_index(axis))[:, None], inside, 0)
    return jax.lax.psum(inside, axis), (shard * size)[:, None] + ids


def _at(x: Shaped[Array, "R N"], index: Int[Array, "R"]) -> Shaped[Array, "R"]:
    return jnp.take_along_axis(x, index[:, None], axis=-1)[:, 0]


def _inverse_cdf(weights: Float[Array, "R N"], uniform: Float[Array, "R"]) -> Int[Array, "R"]:
    """Draw an index per row in proportion to its weight, with a number from [0, 1); one of weight 0 is never drawn."""
    # A parallel prefix sum rounds each entry by a tree of its own, so it may rise by a unit in the last place where the
    # weight is 0. Such entries are skipped, or a filtered or forbidden token would be drawn once in some 10^7.
    cumulative = jnp.where(weights > 0, jnp.cumsum(weights, axis=-1), 0.0)
    # uniform <= 1 - 2^-23 keeps the product strictly below the total, so an entry above it exists.
    target = uniform * cumulative.max(axis=-1)
    return _first_true(cumulative > target[:, None])


def _first_true(x: Bool[Array, "R N"]) -> Int[Array, "R"]:
    """Return the first index with True, or the last index of all; `jnp.argmax` costs ten times as much on a CPU."""
    last = x.shape[-1] - 1
    return jnp.where(x, jnp.arange(last + 1), last).min(axis=-1)


def first_largest(x: Float[Array, "R N"]) -> Int[Array, "R"]:
    """Return the `argmax` over the last axis; of a row with NaN, which has no largest entry, the last index.

    >>> print(first_largest(jnp.array([[1.0, 3.0, 3.0]])))
    [1]
    """
    return _first_true(x == x.max(axis=-1, keepdims=True))


def _filtered_logits(scaled: Float[Array, "R V"], params: SamplingParams, *, in_halves: bool) -> Float[Array, "R V"]:
    """Return the logits with bias, at -inf where top-k, top-p or min-p drop a token of a row that is not greedy."""
    shifted = add_bias(scaled, params.logit_bias)
    weights = rounded_exp(shifted - shifted.max(axis=-1, keepdims=True))
    kept = kept_tokens(weights, params, in_halves=in_halves, digits=1 if in_halves else DIGITS)
    return jnp.where(kept | (params.temperature == 0)[:, None], shifted, -jnp.inf)


def add_bias(logits: Float[Array, "R V"], bias: LogitBias | None) -> Float[Array, "R V"]:
    """Add each row's bias to its logits; a token that is listed twice gets both values.

    >>> print(jax.jit(add_bias)(jnp.zeros((1, 3)), LogitBias(jnp.array([[2, -1]]), jnp.array([[1.5, 9.0]]))))
    [[0.  0.  1.5]]
    """
    if bias is None:
        return logits
    rows = jnp.arange(logits.shape[0])[:, None]
    ids = jnp.where(bias.ids >= 0, bias.ids, logits.shape[-1])  # an id outside the vocabulary is dropped
    return logits.at[rows, ids].add(bias.values, mode="drop")


def penalize(logits: Float[Array, "R V"], penalties: Penalties) -> Float[Array, "R V"]:
    """Return the logits in float32, lower for the tokens that a row has; vLLM's and OpenAI's penalties.

    The repetition penalty (arXiv 1909.05858) divides a positive logit and multiplies another. Then the frequency
    penalty is subtracted for each time that the answer has the token, and the presence penalty once.

    >>> given = Penalties(jnp.array([[0, 1, -1]]), jnp.array([[0, 3, 0]]), *jnp.array([[2.0], [0.25], [0.5]]))
    >>> print(jax.jit(penalize)(jnp.array([[-1.0, 4.0, 3.0]]), given))  # 4 / 2 - 3 * 0.25 - 0.5
    [[-2.    0.75  3.  ]]
    """
    rows = jnp.arange(logits.shape[0])[:, None]
    ids = jnp.where(penalties.ids >= 0, penalties.ids, logits.shape[-1])  # an id outside the vocabulary is dropped
    repetition, frequency, presence = (x[:, None] for x in penalties[2:])
    logits = logits.astype(jnp.float32)
    own = logits.at[rows, ids].get(mode="clip")
    lower = jnp.where(own > 0, own / repetition, own * repetition)
    lower -= frequency * penalties.counts + presence * (penalties.counts > 0)
    return logits.at[rows, ids].set(lower, mode="drop")


def kept_tokens(
    probs: Float[Array, "R V"], params: SamplingParams, *, in_halves: bool = True, digits: int = 1
) -> Bool[Array, "R V"]:
    """Return True for tokens that top-k, top-p and min-p keep: exact, without sorting; ties keep the lowest ids.

    Args:
        probs: probabilities of each row, all of them times any factor that leaves them at most 1.
        params: sampling parameters per row, of which the temperature and the logit bias are ignored.
        in_halves: as for `invariant_sum`.
        digits: binary digits of a threshold that each sweep finds, a divisor of 30; the result does not depend on it.

    >>> probs, params = jnp.array([[0.2, 0.5, 0.3]]), sampling_params(1, top_p=0.7)
    >>> print(jax.jit(kept_tokens)(probs, params))  # 0.5 alone is short of 0.7, 0.5 + 0.3 crosses it
    [[False  True  True]]
    """
    most_likely = partial(_most_likely, in_halves=in_halves, digits=digits)
    vocabulary = probs.shape[-1]
    k = jnp.where(params.top_k > 0, jnp.minimum(params.top_k, vocabulary), vocabulary).astype(jnp.float32)
    kept = most_likely(probs, jnp.ones_like(probs), k)
    # Top-p counts the mass that top-k has left.
    mass = jnp.where(kept, probs, 0.0)
    wanted = rounded(params.top_p * invariant_sum(mass, in_halves=in_halves)[:, 0])
    kept &= (params.top_p >= 1)[:, None] | most_likely(mass, mass, wanted)
    return kept & (probs >= (params.min_p * probs.max(axis=-1))[:, None])


def _most_likely(
    probs: Float[Array, "R V"], weights: Float[Array, "R V"], wanted: Float[Array, "R"], *, in_halves: bool, digits: int
) -> Bool[Array, "R V"]:
    """Return True for the fewest most likely tokens of each row whose weights sum to at least `wanted`.

    A search finds the smallest probability that is kept. Tokens of exactly this probability have one weight; the first
    of them are kept.
    """

    def mass(kept: Bool[Array, "R V"]) -> Float[Array, "R"]:
        return invariant_sum(jnp.where(kept, weights, 0.0), in_halves=in_halves)[:, 0]

    threshold = _largest_true(lambda bound: mass(probs >= bound[:, None]) >= wanted, len(probs), digits)[:, None]
    above, tied = probs > threshold, probs == threshold
    each = jnp.where(tied, weights, 0.0).max(axis=-1)
    needed = jnp.ceil((wanted - mass(above)) / jnp.where(each > 0, each, 1.0))

    # The last tied token that is kept lies in the first block that ends with as many ties as are needed.
    of_blocks = invariant_sum(_in_blocks(tied.astype(jnp.float32), 0.0), in_halves=in_halves)[..., 0]  # [R B]
    ends = jnp.cumsum(of_blocks, axis=-1)
    block = _first_true(ends >= needed[:, None])
    inside, ids = _block_tokens(probs, block)  # [R K]
    missing = needed - _at(ends - of_blocks, block)
    last = _at(ids, _first_true(jnp.cumsum(inside == threshold, axis=-1) >= missing[:, None]))
    return above | (tied & (jnp.arange(probs.shape[-1]) <= last[:, None]))


def _largest_true(
    predicate: Callable[[Float[Array, "R"]], Bool[Array, "R"]], rows: int, digits: int
) -> Float[Array, "R"]:
    """Search, per row, for the largest float of [0, 2) with a monotone predicate; 0 if there is none.

    Bit patterns of non-negative floats are ordered like the floats: the search finds 30 binary digits of the pattern.
    """

    def sweep(i: Int[Array, ""], found: Int[Array, "R"]) -> Int[Array, "R"]:
        step = 1 << (30 - digits * (i + 1))
        candidates = [found + step * multiple for multiple in range(1, 2**digits)]
        # The predicate is monotone: the number of candidates that pass is the next digit.
        return found + step * sum(predicate(as_float(each)).astype(jnp.int32) for each in candidates)

    def as_float(bits: Int[Array, "R"]) -> Float[Array, "R"]:
        return jax.lax.bitcast_convert_type(bits, jnp.float32)

    return as_float(jax.lax.fori_loop(0, 30 // digits, sweep, jnp.zeros(rows, jnp.int32)))
