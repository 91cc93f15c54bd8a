"""Log-probability and entropy of given tokens, computed in chunks, so that all logits never exist at once.

The one-step shift between logits and tokens happens here, in `token_logprobs`, and nowhere else.
Letters: `B` rows, `T` tokens, `N` tokens of one chunk, `V` vocabulary, `W` words of 32 bits that hold `V` bits.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Shaped, UInt, UInt32

from jaxft.core.checks import check_shapes, check_token_ids, vocabulary_size
from jaxft.core.divergence import Teacher, divergence
from jaxft.core.fused_head import fused_token_logprobs, takes_fused_head
from jaxft.core.packing import Branches
from jaxft.core.sharding import compute_platform
from jaxft.core.softmax import Statistics, logprobs_by, scaling_temperature, softmax_statistics
from jaxft.core.types import Model, Params, Scored, same_params

CHUNK_LOGITS = 2**27
"""Default number of logits per chunk: 512 MiB of float32."""

CHUNK_LOGITS_ON_GPUS = 2**29
"""The same on GPUs, which have more memory, and add the head's gradient of each chunk to a sum in memory."""

SKIPPED_LOGITS = 2**23
"""Least number of logits per chunk where chunks without a trained token are skipped: 32 MiB of float32."""


def pack_bits(support: Bool[Array, "*N V"]) -> UInt32[Array, "*N W"]:
    """Pack one bit for each token of the vocabulary into words; token `i` is bit `i % 32` of word `i // 32`.

    >>> print(pack_bits(jnp.array([True, False, True])), unpack_support(pack_bits(jnp.array([True, False, True])), 3))
    [5] [ True False  True]
    """
    spread = jnp.pad(support, [(0, 0)] * (support.ndim - 1) + [(0, -support.shape[-1] % 32)])
    words = spread.reshape(*support.shape[:-1], -1, 32).astype(jnp.uint32)
    return (words << jnp.arange(32, dtype=jnp.uint32)).sum(axis=-1, dtype=jnp.uint32)


def unpack_support(words: UInt32[Array, "*N W"], vocabulary: int) -> Bool[Array, "*N V"]:
    """Return True for the tokens of each packed support; words that are all 0 stand for the whole vocabulary."""
    bits = (words[..., None] >> jnp.arange(32, dtype=jnp.uint32)) & 1
    is_whole = (words == 0).all(axis=-1, keepdims=True)
    return (bits.reshape(*words.shape[:-1], -1)[..., :vocabulary] == 1) | is_whole


def default_chunk_tokens(vocabulary: int, tokens: int, platform: str, *, is_partial: bool) -> int:
    """Return the number of tokens per chunk on one device.

    Args:
        vocabulary: logits per token.
        tokens: tokens of the device.
        platform: platform of the device.
        is_partial: True to make chunks small enough that some may be without a trained token, and are skipped.

    >>> [default_chunk_tokens(2**17, 2**14, platform, is_partial=False) for platform in ("cpu", "gpu", "tpu")]
    [1024, 4096, 1024]
    >>> [default_chunk_tokens(2**15, 2**11, "cpu", is_partial=is_partial) for is_partial in (False, True)]
    [4096, 256]
    """
    fitting = max(16, (CHUNK_LOGITS_ON_GPUS if platform == "gpu" else CHUNK_LOGITS) // vocabulary)
    if not is_partial:
        return fitting
    least = max(SKIPPED_LOGITS // vocabulary, -(-tokens // 16))
    return min(fitting, -(-least // 64) * 64)  # numbers of tokens are often multiples of 64


def token_logprobs(
    model: Model,
    params: Params,
    tokens: Int[Array, "B T"],
    *,
    temperature: Float[Array, ""] | Float[Array, "B"] | Float[Array, "B T"] | float = 1.0,
    positions: Int[Array, "B T"] | None = None,
    segment_ids: Int[Array, "B T"] | None = None,
    value_head: Params | None = None,
    entropy_gradient: bool = False,
    chunk_tokens: int | None = None,
    teacher: Teacher | None = None,
    teacher_params: Params | None = None,
    teacher_hidden: Float[Array, "B T E"] | None = None,
    supports: UInt32[Array, "B T W"] | None = None,
    completion_mask: Bool[Array, "B T"] | None = None,
    with_sum_pi_squared: bool = False,
    branches: Branches | None = None,
    targets: Int[Array, "B T"] | None = None,
    experts: UInt[Array, "B T L k"] | None = None,
) -> Scored:
    """Return the log-probability of `tokens[b, t]` given `tokens[b, :t]`, and the distribution's entropy, each `[B T]`.

    Logits exist for `chunk_tokens` tokens at a time, in the forward and in the backward pass; chunking changes the
    result by rounding only. There is a gradient, but no forward-mode derivative (`jax.jvp`). The first token of a row,
    and of each packed segment, gets 0 and no gradient.

    Args:
        tokens: right-padded rows; padding changes nothing before it.
        temperature: sampling temperature: a scalar, one per row, or one per token. A token whose temperature is
            negative or not finite gets NaN and no gradient.
        positions: position of each token; `0 .. T-1` when None.
        segment_ids: packed sequence that a token belongs to; tokens attend to their own sequence only.
        value_head: `{"kernel": [D], "bias": []}` (`init_value_head`), to compute values as well; None for no values.
        entropy_gradient: True to let gradients flow into the entropy, as an entropy bonus needs.
        chunk_tokens: maximum tokens per chunk; by default as many as make 2**27 logits, the teacher's included.
        teacher: model and kind of a divergence from it, which is computed in the same chunks; None for none. Its
            distribution is taken at the same temperature, and gets no gradient.
        teacher_params: parameters of `teacher`, or with `teacher_hidden` of its head.
        teacher_hidden: see `Batch.teacher_hidden`; None for those of `tokens`.
        supports: tokens that each token could be drawn from (`pack_bits`; 0 for the whole vocabulary), over which
            probabilities and entropy are taken. The divergence from a teacher is over the whole vocabulary.
        completion_mask: True for the tokens to score, which come first into the chunks, so that chunks without any are
            skipped; the scores of others are 0, without a gradient. None for all.
        with_sum_pi_squared: True to compute the sum of squared probabilities, too, by a second pass of the head.
        branches: columns of rows whose sequences share a prefix; the first token of each branch is predicted by the
            last one of the prefix. None for others.
        targets: tokens to score in the place of `tokens`, each given `tokens[b, :t]`; None for `tokens`.
        experts: see `Batch.experts`; a teacher routes by itself.

    Raises:
        ValueError: `temperature` has a shape that fits neither rows nor tokens; `positions` or `segment_ids` have
            another shape than `tokens`; `chunk_tokens` is below 1; or a token is outside the vocabulary (not checked
            under `jit`).

    >>> import jaxft
    >>> def coin(params, tokens, positions):  # two tokens with equal logits everywhere
    ...     return jnp.broadcast_to(params["logits"], (*tokens.shape, 2))
    >>> model, params = jaxft.from_function(coin), {"logits": jnp.zeros(2)}
    >>> print(token_logprobs(model, params, jnp.array([[0, 1, 1]])).logprobs.round(4))  # log(1/2)
    [[ 0.     -0.6931 -0.6931]]
    """
    check_shapes("B T", tokens=tokens, positions=positions, segment_ids=segment_ids, targets=targets)
    rows, length = tokens.shape
    temperature = jnp.asarray(temperature, jnp.float32)
    if temperature.shape not in ((), (rows,), (rows, length)):
        raise ValueError(f"temperature has shape {temperature.shape}; wanted (), ({rows},) or ({rows}, {length})")
    if temperature.ndim == 1:
        temperature = temperature[:, None]
    temperature = jnp.broadcast_to(temperature, (rows, length))
    if positions is None:
        positions = jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32), (rows, length))

    def before(model: Model, params: Params | None, experts: Array | None = None) -> tuple[Array, Array, Any]:
        """Return the hidden states of all tokens, those that predict the second token and later ones, and routers."""
        apply = model.apply if branches is None else partial(model.apply, branches=branches)
        if experts is not None:
            apply = partial(apply, chosen=jnp.moveaxis(experts, 2, 0), counted=completion_mask)
        hidden, routers = apply(params, tokens, positions, segment_ids=segment_ids)
        return (hidden := jnp.asarray(hidden)), previous(hidden, branches), routers  # [B T D]

    hidden, predicting, routers = before(model, params, experts)
    if not isinstance(tokens, jax.core.Tracer):
        check_token_ids("tokens", tokens, vocabulary_size(model, params))
    scored = [predicting, (tokens if targets is None else targets)[:, 1:], temperature[:, 1:]]
    if teacher is not None:
        teacher_params = jax.lax.stop_gradient(teacher_params)
        its_hidden = before(teacher.model, teacher_params)[1] if teacher_hidden is None else teacher_hidden[:, 1:]
        scored.append(jax.lax.stop_gradient(its_hidden))
    options = [None if each is None else each[:, 1:] for each in (completion_mask, supports)]
    logprobs, entropy, *others = _score(
        model, teacher, entropy_gradient, chunk_tokens, params, teacher_params, *options, *scored
    )
    next_values = None
    if value_head is not None:
        wide = hidden.astype(jnp.promote_types(hidden.dtype, jnp.float32))
        next_values = wide @ value_head["kernel"] + value_head["bias"]  # [B T]
    continues = None
    if segment_ids is not None:
        # A first branch and a further one are other segments than padding, and continue any prefix.
        ids = segment_ids if branches is None else (segment_ids > 0).astype(jnp.int32)
        continues = jnp.pad(ids[:, 1:] == previous(ids, branches), ((0, 0), (1, 0)))

    def shifted(x: Array) -> Array:
        """Shift scores to the tokens that they describe; the first token of a row or segment gets 0."""
        aligned = jnp.pad(x, ((0, 0), (1, 0)))  # [B T]
        return aligned if continues is None else jnp.where(continues, aligned, 0.0)

    values = None if next_values is None else shifted(previous(next_values, branches))
    scores = Scored(shifted(logprobs), shifted(entropy), values, next_values, routers=routers)
    if with_sum_pi_squared:  # log sum(p^2) = 2 log p_y - log q_y for any y, as q is p^2, normalised
        scored[2] = scaling_temperature(temperature[:, 1:]) / 2
        of_half = _score(model, None, False, chunk_tokens, params, None, *options, *scored[:3])[0]
        squares = jax.lax.stop_gradient(jnp.exp(2.0 * logprobs - of_half))
        is_scored = True if completion_mask is None else completion_mask
        scores = scores._replace(sum_pi_squared=jnp.where(is_scored, shifted(squares), 0.0))
    found: dict[str, Any] = {"overflows" if teacher is None else "divergence": shifted(x) for x in others}
    return scores._replace(**found)


def previous(x: Shaped[Array, "B T *N"], branches: Branches | None = None) -> Shaped[Array, "B T-1 *N"]:
    """Return the entry before each one of a row, from the second on; before each branch is the last of the prefix.

    >>> print(previous(jnp.arange(7)[None], Branches(3, count=2)))  # columns of the prefix, and of two branches
    [[0 1 2 3 2 5]]
    """
    if branches is None:
        return x[:, :-1]
    end = branches.prefix_tokens
    of_branches = x[:, end:].reshape(len(x), branches.count, -1, *x.shape[2:])
    last = jnp.broadcast_to(x[:, None, end - 1 : end], (*of_branches.shape[:2], 1, *x.shape[2:]))
    before = jnp.concatenate([last, of_branches[:, :, :-1]], axis=2)
    return jnp.concatenate([x[:, : end - 1], before.reshape(len(x), -1, *x.shape[2:])], axis=1)


def init_value_head(hidden_size: int) -> Params:
    """Make a linear value function of the hidden state that is 0 everywhere: `{"kernel": [hidden_size], "bias": []}`.

    >>> jax.tree.map(jnp.shape, init_value_head(4))
    {'bias': (), 'kernel': (4,)}
    """
    return {"kernel": jnp.zeros(hidden_size, jnp.float32), "bias": jnp.zeros((), jnp.float32)}


def _is_narrow(leaf: Array) -> bool:
    return jnp.issubdtype(leaf.dtype, jnp.floating) and leaf.dtype.itemsize < 4


def _gradient_sum(leaf: Array) -> Array:
    """Return an array to accumulate a parameter's gradient in: float32 zeros for a narrower dtype, else the parameter.

    A float32 copy of the parameter would do the same, but XLA for GPUs keeps that copy and rounds it in every chunk.
    """
    return _zeros_for_gradient(leaf) if _is_narrow(leaf) else leaf


def _add_gradient_to(total: Array, leaf: Array) -> Array:
    """Return the parameter unchanged; its gradient is added to `total`, the array of `_gradient_sum`."""
    return _with_gradient(total, jax.lax.stop_gradient(leaf)) if _is_narrow(leaf) else total


@jax.custom_vjp
def _zeros_for_gradient(leaf: Array) -> Array:
    return jnp.zeros(leaf.shape, jnp.float32)


_zeros_for_gradient.defvjp(
    lambda leaf: (_zeros_for_gradient(leaf), leaf), lambda leaf, total: (total.astype(leaf.dtype),)
)


@jax.custom_vjp
def _with_gradient(total: Array, leaf: Array) -> Array:
    return leaf


_with_gradient.defvjp(lambda total, leaf: (leaf, None), lambda _, gradient: (gradient.astype(jnp.float32), None))


@jax.custom_vjp
def _exchange_together(head: Params, hidden: Float[Array, "B S D"]) -> tuple[Params, Float[Array, "B S D"]]:
    """Return the arguments; the gradient of the head is done before that of the hidden state goes on into the layers.

    Without that, XLA keeps the head's float32 gradient through the backward pass of all layers, before it is rounded
    and exchanged.
    """
    return head, hidden


_exchange_together.defvjp(
    lambda head, hidden: ((head, hidden), None), lambda _, gradients: jax.lax.optimization_barrier(gradients)
)


@partial(jax.jit, static_argnums=(0, 1, 2, 3), inline=True)
@jax.named_scope("head")  # which `benchmarks/cost.py` reads
def _score(
    model: Model,
    teacher: Teacher | None,
    entropy_gradient: bool,
    chunk_tokens: int | None,
    params: Params,
    teacher_params: Params | None,
    completion_mask: Bool[Array, "B S"] | None,
    supports: UInt32[Array, "B S W"] | None,
    hidden: Float[Array, "B S D"],
    tokens: Int[Array, "B S"],
    temperature: Float[Array, "B S"],
    *teacher_hidden: Float[Array, "B S E"],
) -> tuple[Float[Array, "B S"], ...]:
    """Return log-probabilities and entropies of the tokens and, with a teacher, divergences from it.

    On a mesh, each device scores tokens of its own, with the head gathered once for all chunks; its gradient crosses
    devices once, too. The function is jitted because outside of `jit` the gradient accumulators would be allocated, as
    large as a float32 model, even without a gradient.
    """
    sharding = model.sharding
    if sharding is not None and sharding.devices == 1:
        sharding = None  # which changes no bit
    devices, platform = sharding.devices if sharding else 1, compute_platform(model.sharding)
    vocabulary, of_device = vocabulary_size(model, params), tokens.size // devices
    is_plain = teacher is None and supports is None and not entropy_gradient and chunk_tokens is None
    is_fused = is_plain and takes_fused_head(platform, of_device, vocabulary, hidden.dtype, model.logit_scale)
    if chunk_tokens is None:
        tables = 1 if teacher is None else 2  # the teacher's logits are in memory beside the policy's
        # Small chunks cost more than they skip where adding up the head's gradient takes about as long as its product.
        is_partial = completion_mask is not None and platform == "cpu"
        chunk_tokens = default_chunk_tokens(tables * vocabulary, of_device, platform, is_partial=is_partial) * devices
    if chunk_tokens < 1:
        raise ValueError(f"chunk_tokens is {chunk_tokens}; wanted at least 1")
    head = params
    has_eight_bits = any(leaf.dtype.itemsize == 1 for leaf in jax.tree.leaves(params))  # which have no gradient
    if model.head is not same_params and (sharding is not None or hidden.dtype.itemsize < 4 or has_eight_bits):
        head, hidden = _exchange_together(model.head(params), hidden)
    heads = (head, None if teacher is None or teacher_params is None else teacher.model.head(teacher_params))
    given: tuple[Any, ...] = completion_mask, supports, hidden, tokens, temperature, *teacher_hidden
    compute: Callable[..., Any] = partial(
        _score_in_chunks, model, teacher, entropy_gradient, -(-chunk_tokens // devices)
    )
    if is_fused:
        # The compiler for TPUs takes a minute for each head, that for GPUs some seconds.
        compute = partial(_score_fused, model, platform == "gpu" and completion_mask is not None)
    if sharding is None:
        return compute(heads, *given)
    length = tokens.shape[1]
    added = -length % sharding.mesh.shape["tensor"]
    rows = jax.tree.map(lambda x: jnp.pad(x, [(0, added if i == 1 else 0) for i in range(x.ndim)]), list(given))
    scores = sharding.map_shards(compute, heads, rows, sharding.row_axes, "tensor")
    return jax.tree.map(lambda x: x[:, :length], scores)


def _score_fused(
    model: Model,
    leaves_out: bool,
    heads: tuple[Params, None],
    completion_mask: Bool[Array, "B S"] | None,
    supports: None,
    hidden: Float[Array, "B S D"],
    tokens: Int[Array, "B S"],
    temperature: Float[Array, "B S"],
) -> tuple[Float[Array, "B S"], ...]:
    """Return log-probabilities, entropies and overflows of the tokens by `fused_token_logprobs`, on one device."""
    assert model.logit_scale is not None
    (head,) = heads[0].values()
    mask = None if completion_mask is None else completion_mask.reshape(-1)
    flat = hidden.reshape(-1, hidden.shape[-1]), head, tokens.reshape(-1), temperature.reshape(-1)
    found = fused_token_logprobs(*flat, completion_mask=mask, leaves_out=leaves_out, logit_scale=model.logit_scale)
    scores = found.logprobs, found.entropy, found.overflows.astype(jnp.float32)
    return tuple(x.reshape(tokens.shape) for x in scores)


def _score_in_chunks(
    model: Model,
    teacher: Teacher | None,
    entropy_gradient: bool,
    chunk_tokens: int,
    heads: tuple[Params, Params | None],
    completion_mask: Bool[Array, "B S"] | None,
    supports: UInt32[Array, "B S W"] | None,
    hidden: Float[Array, "B S D"],
    tokens: Int[Array, "B S"],
    temperature: Float[Array, "B S"],
    *teacher_hidden: Float[Array, "B S E"],
) -> tuple[Float[Array, "B S"], ...]:
    """Return the same scores of the tokens, chunk by chunk, on one device."""
    total = tokens.size
    chunks = max(1, -(-total // chunk_tokens))
    width = -(-total // chunks)  # chunks of one size, or the last would be mostly padding
    order, count = None, None
    if completion_mask is not None and chunks > 1:
        order, count = jnp.argsort(~completion_mask.reshape(total)), completion_mask.sum()
        width = min(chunk_tokens, -(-width // 64) * 64)  # numbers of scored tokens are often multiples of 64

    def split(x: Array) -> Array:
        flat = x.reshape(total, *x.shape[2:])
        if order is not None:
            flat = flat.at[order].get(mode="promise_in_bounds", unique_indices=True)
        if missing := chunks * width - total:  # the gradient of jnp.pad adds four arrays of zeros
            flat = jnp.concatenate([flat, jnp.repeat(flat[-1:], missing, axis=0)])
        return flat.reshape(chunks, width, *flat.shape[1:])

    def join(x: Float[Array, "..."]) -> Float[Array, "B S"]:
        flat = x.reshape(-1)[:total]
        if order is not None:
            flat = jnp.zeros_like(flat).at[order].set(flat, mode="promise_in_bounds", unique_indices=True)
        scores = flat.reshape(tokens.shape)
        return scores if completion_mask is None else jnp.where(completion_mask, scores, 0.0)

    hidden, *rest = jax.tree.map(split, [hidden, supports, tokens, temperature, *teacher_hidden])
    sums = jax.tree.map(_gradient_sum, heads[0])
    options = model, teacher, entropy_gradient
    scores = _score_chunks(*options, (sums, hidden), (jax.lax.stop_gradient(heads), tuple(rest)), count)
    return tuple(map(join, scores))


def _unembed(model: Model, params: Params, moved: tuple[Params, Float[Array, "C D"]]) -> Float[Array, "C V"]:
    """Return the logits of a chunk; `moved` is the gradient's accumulators, or the head itself, and hidden states."""
    sums, hidden = moved
    return model.unembed(jax.tree.map(_add_gradient_to, sums, params), hidden)


def _score_logits(
    teacher: Teacher | None,
    entropy_gradient: bool,
    constant: tuple[tuple[Params, Params | None], tuple[Any, ...]],
    logits: Float[Array, "C V"],
    statistics: Statistics | None = None,
) -> tuple[tuple[Float[Array, "C"], ...], Statistics]:
    """Return scores of the tokens of a chunk, and their statistics, which are computed unless they are given.

    `constant` is the heads of policy and teacher, and supports, tokens, temperatures and the teacher's hidden states.
    """
    (_, teacher_head), (supports, tokens, temperature, *teacher_hidden) = constant
    within = logits if supports is None else jnp.where(unpack_support(supports, logits.shape[1]), logits, -jnp.inf)
    if statistics is None:
        statistics = softmax_statistics(within, tokens, temperature)
    logprobs, entropy = logprobs_by(statistics, within, tokens, temperature)
    scores = logprobs, entropy if entropy_gradient else jax.lax.stop_gradient(entropy)
    if teacher is None:
        return scores, statistics
    assert teacher_head is not None
    its_logits = teacher.model.unembed(teacher_head, *teacher_hidden)
    distance = divergence(logits, its_logits, scaling_temperature(temperature), teacher.kind, teacher.mixing)
    return (*scores, distance), statistics


@partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _score_chunks(
    model: Model, teacher: Teacher | None, entropy_gradient: bool, moved: Any, constant: Any, count: Any
) -> Any:
    """Return the scores of the chunks that hold the first `count` tokens, None for all, and 0 for the others.

    The backward pass visits the same chunks, and computes their logits again, but not the statistics.

    Args:
        moved: the head, or its gradient's accumulators, and hidden states `[M C D]`: gradients flow into these.
        constant: the heads of policy and teacher, and other tables `[M C ...]` of `_score_logits`.
        count: number of tokens to score.
    """
    return _score_chunks_forward(model, teacher, entropy_gradient, moved, constant, count)[0]


def _score_chunks_forward(
    model: Model, teacher: Teacher | None, entropy_gradient: bool, moved: Any, constant: Any, count: Any
) -> tuple[Any, Any]:
    (sums, hidden), (heads, rest) = moved, constant

    def compute(_: None, chunk: Any) -> tuple[None, Any]:
        logits = _unembed(model, heads[0], (sums, chunk[0]))
        return None, _score_logits(teacher, entropy_gradient, (heads, chunk[1]), logits)

    scores, statistics = _over_chunks(compute, None, (hidden, rest), count)[1]
    return scores, (moved, constant, statistics, count)


def _score_chunks_backward(
    model: Model, teacher: Teacher | None, entropy_gradient: bool, saved: Any, d_scores: Any
) -> tuple[Any, None, None]:
    (sums, hidden), (heads, rest), statistics, count = saved

    def compute(d_sums: Params, chunk: Any) -> tuple[Params, Array]:
        hidden, rest, statistics, d_scores = chunk

        def score(moved: Any) -> Any:
            logits = _unembed(model, heads[0], moved)
            return _score_logits(teacher, entropy_gradient, (heads, rest), logits, statistics)[0]

        ((added, d_hidden),) = jax.vjp(score, (sums, hidden))[1](d_scores)
        return jax.tree.map(jnp.add, d_sums, added), d_hidden

    zeros = jax.tree.map(jnp.zeros_like, sums)
    return _over_chunks(compute, zeros, (hidden, rest, statistics, d_scores), count), None, None


_score_chunks.defvjp(_score_chunks_forward, _score_chunks_backward)


def _over_chunks(compute: Callable[[Any, Any], tuple[Any, Any]], carry: Any, chunks: Any, count: Any) -> Any:
    """Loop over the chunks of the first `count` tokens, if given; a condition in a turn would copy carries on GPUs."""
    number, width = jax.tree.leaves(chunks)[0].shape[:2]
    if number == 1:
        carry, result = compute(carry, jax.tree.map(lambda x: x[0], chunks))
        return carry, jax.tree.map(lambda x: x[None], result)

    def turn(index: Any, state: tuple[Any, Any]) -> tuple[Any, Any]:
        carry, results = state
        chunk = jax.tree.map(partial(jax.lax.dynamic_index_in_dim, index=index, keepdims=False), chunks)
        carry, result = compute(carry, chunk)
        update = partial(jax.lax.dynamic_update_index_in_dim, index=index, axis=0)
        return carry, jax.tree.map(update, results, result)

    _, shapes = jax.eval_shape(compute, carry, jax.tree.map(lambda x: x[0], chunks))
    results = jax.tree.map(lambda x: jnp.zeros((number, *x.shape), x.dtype), shapes)
    with jax.named_scope(f"at_most_{number}"):  # which `benchmarks/hlo.py` reads
        return jax.lax.fori_loop(0, number if count is None else -(-count // width), turn, (carry, results))
