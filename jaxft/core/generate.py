"""Batched generation: each prompt is prefilled once for all its generations, and rows decode until all have ended.

`_decode_until` is the one loop that samples: under `generate`, and under `decode`, which the engine calls.
Letters: `P` prompts, `G` generations of each, `R = P G` rows, `L` padded prompt length, `N` new tokens, `S` stop ids.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from jaxft.core.cache import block_capacities, compute_dtype, init_cache, num_blocks_for
from jaxft.core.checks import check_token_ids, vocabulary_size
from jaxft.core.sampling import SamplingParams, sample, sampling_params
from jaxft.core.types import Cache, FinishReason, Model, Params, Rollout

PROMPT_BUCKET = 32
"""Prompts are padded to a multiple of this many tokens, so that batches of similar length share a compiled program."""


class DecodeState(NamedTuple):
    """The state of rows that are being decoded; every leaf has rows on axis 0.

    Attributes:
        cache: keys and values of the tokens before `tokens`.
        tokens: the last token of each row, not yet in the cache.
        positions: the position of that token in its row.
        active: False once the row has ended.
    """

    cache: Cache
    tokens: Int[Array, "R"]
    positions: Int[Array, "R"]
    active: Bool[Array, "R"]


class RowParams(NamedTuple):
    """The parameters that a row is sampled with, the same from its first token to its last.

    Attributes:
        sampling: how tokens are drawn.
        keys: a PRNG key per row; the key of a token is this folded with the token's position.
        stop_ids: token ids that end the row, padded with -1.
        limits: maximum number of tokens of the row, prompt included.
    """

    sampling: SamplingParams
    keys: Any
    stop_ids: Int[Array, "R S"]
    limits: Int[Array, "R"]


class Emitted(NamedTuple):
    """Tokens sampled by one `decode`, left-aligned; the first `counts` of each row are real."""

    tokens: Int[Array, "R N"]
    sampler_logprobs: Float[Array, "R N"]
    behavior_logprobs: Float[Array, "R N"]
    counts: Int[Array, "R"]


def decode(
    model: Model, params: Params, state: DecodeState, rows: RowParams, max_steps: int
) -> tuple[DecodeState, Emitted]:
    """Sample up to `max_steps` tokens for every active row; stop early when no row is active.

    A row depends on its own tokens, parameters and key only: at equal shapes its tokens and log-probabilities have the
    same bits whatever the other rows are.

    >>> import jaxft
    >>> def count(params, tokens, positions):  # gives the next number a probability of almost 1
    ...     return params["scale"] * jax.nn.one_hot(tokens + 1, 6)
    >>> model, params = jaxft.from_function(count), {"scale": jnp.array(50.0)}
    >>> cache, tokens, positions = _prefill(model, params, jnp.array([[1]]), jnp.array([1]), cache_length=4)
    >>> state = DecodeState(cache, tokens, positions, active=jnp.array([True]))
    >>> rows = RowParams(sampling_params(1), jax.random.split(jax.random.key(0), 1), jnp.array([[3]]), jnp.array([4]))
    >>> state, emitted = decode(model, params, state, rows, max_steps=3)
    >>> print(emitted.tokens, emitted.counts, state.active)  # 3 is a stop id
    [[2 3 0]] [2] [False]
    """
    _, state, emitted = _decode_until(
        model, params, jnp.int32(0), state, rows, nothing_emitted(state.tokens.shape[0], max_steps), max_steps
    )
    return state, emitted


def decode_blocks(
    model: Model, params: Params, state: DecodeState, rows: RowParams, max_steps: int, num_blocks: int
) -> tuple[DecodeState, Emitted]:
    """Run `decode` on the first `num_blocks` blocks of the cache only; no active row may outgrow them.

    The result is that of `decode`, bit for bit, in the time of a shorter cache.

    >>> import jaxft
    >>> model, params = jaxft.from_function(lambda p, t, x: p["scale"] * jax.nn.one_hot(t, 6)), {"scale": jnp.ones(())}
    >>> state = DecodeState(init_cache(model, 1, 300, jnp.float32), *jnp.zeros((2, 1), jnp.int32), jnp.array([True]))
    >>> keys = jax.random.split(jax.random.key(0), 1)
    >>> rows = RowParams(sampling_params(1), keys, stop_ids=jnp.array([[-1]]), limits=jnp.array([300]))
    >>> decode_blocks(model, params, state, rows, max_steps=2, num_blocks=2)[1].counts.tolist()  # 128 of 300 positions
    [2]
    """
    shortened = state._replace(cache=state.cache[:num_blocks])
    shortened, emitted = decode(model, params, shortened, rows, max_steps)
    return shortened._replace(cache=(*shortened.cache, *state.cache[num_blocks:])), emitted


def nothing_emitted(rows: int, width: int) -> Emitted:
    """Make an empty `Emitted` with room for `width` tokens per row.

    >>> nothing_emitted(2, 8).tokens.shape
    (2, 8)
    """
    shape = rows, width
    return Emitted(jnp.zeros(shape, jnp.int32), jnp.zeros(shape), jnp.zeros(shape), jnp.zeros(rows, jnp.int32))


def _decode_until(
    model: Model,
    params: Params,
    step: Int[Array, ""],
    state: DecodeState,
    rows: RowParams,
    emitted: Emitted,
    until: Int[Array, ""] | int,
) -> tuple[Int[Array, ""], DecodeState, Emitted]:
    """Decode from `step` to `until`, or until no row is active."""

    def is_unfinished(carry: tuple[Int[Array, ""], DecodeState, Emitted]) -> Bool[Array, ""]:
        step, state, _ = carry
        return (step < until) & state.active.any()

    def advance(carry: tuple[Int[Array, ""], DecodeState, Emitted]) -> tuple[Int[Array, ""], DecodeState, Emitted]:
        step, state, emitted = carry
        hidden, cache = model.apply(params, state.tokens[:, None], state.positions[:, None], cache=state.cache)
        following = state.positions + 1
        keys = jax.vmap(jax.random.fold_in)(rows.keys, following)
        drawn = sample(model.unembed(params, hidden[:, 0]), keys, rows.sampling)

        active = state.active
        ended = (drawn.tokens[:, None] == rows.stop_ids).any(axis=-1) | (following + 1 >= rows.limits)
        emitted = Emitted(
            emitted.tokens.at[:, step].set(jnp.where(active, drawn.tokens, 0)),
            emitted.sampler_logprobs.at[:, step].set(jnp.where(active, drawn.sampler_logprobs, 0.0)),
            emitted.behavior_logprobs.at[:, step].set(jnp.where(active, drawn.behavior_logprobs, 0.0)),
            emitted.counts + active,
        )
        state = DecodeState(
            cache,
            jnp.where(active, drawn.tokens, state.tokens),
            jnp.where(active, following, state.positions),
            active & ~ended,
        )
        return step + 1, state, emitted

    return jax.lax.while_loop(is_unfinished, advance, (step, state, emitted))


def _prefill(
    model: Model, params: Params, prompts: Int[Array, "P L"], lengths: Int[Array, "P"], cache_length: int
) -> tuple[Cache, Int[Array, "P"], Int[Array, "P"]]:
    """Return the cache of right-padded prompts, their last tokens, and the positions of these.

    The first decoding step takes the last prompt token, and overwrites its keys and values.
    """
    positions = jnp.broadcast_to(jnp.arange(prompts.shape[1], dtype=jnp.int32), prompts.shape)
    cache = init_cache(model, prompts.shape[0], cache_length, compute_dtype(params))
    num_blocks = num_blocks_for(prompts.shape[1], cache_length)
    _, written = model.apply(params, prompts, positions, cache=cache[:num_blocks])
    last = lengths - 1
    return (*written, *cache[num_blocks:]), jnp.take_along_axis(prompts, last[:, None], axis=1)[:, 0], last


def generate(
    model: Model,
    params: Params,
    prompts: Sequence[Any] | Int[Any, "P T"] | Int[Any, "T"],
    key: Any,
    *,
    num_generations: int = 1,
    max_new_tokens: int,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    stop_ids: Sequence[int] = (),
) -> Rollout:
    """Sample `num_generations` completions of each prompt: `[P G]` rows, prompt-major.

    A prompt's keys and values are computed once and shared. The key of a token is `key` folded with the indices of
    prompt and generation and the position, so that additional prompts or generations do not change the others.

    Args:
        prompts: lists or arrays of at least one token id each; or an array `[P T]` whose rows are prompts without
            padding; or a single prompt.
        key: one PRNG key, such as `jax.random.key(0)`.
        max_new_tokens: maximum number of tokens sampled per row; decoding stops early when every row has a stop id.
        temperature, top_k, top_p, min_p: see `SamplingParams`.
        stop_ids: token ids that end a row; the completion includes the sampled one.

    Returns:
        A `Rollout` of width `L + max_new_tokens`, where `L` is the longest prompt rounded up to a multiple of 32.

    Raises:
        ValueError: there are no prompts; a prompt is empty, is text, or has an id outside the vocabulary; `key` is not
            a PRNG key; or a parameter is out of range.

    >>> import jaxft
    >>> def count(params, tokens, positions):  # gives the next number a probability of almost 1
    ...     return params["scale"] * jax.nn.one_hot(tokens + 1, 6)
    >>> model, params = jaxft.from_function(count), {"scale": jnp.array(50.0)}
    >>> rollout = generate(model, params, [[1]], jax.random.key(0), max_new_tokens=4, stop_ids=(3,))
    >>> print(rollout.tokens[0, :5], rollout.completion_mask[0, :5])  # the stop token belongs to it
    [1 2 3 0 0] [False  True  True False False]
    """
    prompts = prompt_ids(prompts, vocabulary_size(model, params))
    if num_generations < 1 or max_new_tokens < 1:
        raise ValueError(
            f"num_generations is {num_generations}, max_new_tokens {max_new_tokens}; wanted at least 1 of each"
        )
    key = one_key(key)
    lengths = np.array([len(prompt) for prompt in prompts], np.int32)
    padded = np.zeros((len(prompts), -(-int(lengths.max()) // PROMPT_BUCKET) * PROMPT_BUCKET), np.int32)
    for row, prompt in zip(padded, prompts, strict=True):
        row[: len(prompt)] = prompt
    rows = len(prompts) * num_generations
    sampling = sampling_params(rows, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    stops = jnp.array([*stop_ids] or [-1], jnp.int32)

    params = _relayout(model, params)
    total = padded.shape[1] + max_new_tokens
    state, row_params = _start(model, num_generations, total, params, padded, lengths, key, sampling, stops)
    step, emitted = jnp.int32(0), nothing_emitted(rows, max_new_tokens)
    for num_blocks, capacity in block_capacities(total).items():
        if capacity >= lengths.max():
            # The row with the longest prompt is the first to need the next block.
            until = jnp.int32(min(capacity - lengths.max() + 1, max_new_tokens))
            step, state, emitted = _continue(model, num_blocks, params, step, state, row_params, emitted, until)
    return _join(padded, lengths, num_generations, emitted, stops)


def prompt_ids(prompts: Any, vocabulary: int) -> list[Int[np.ndarray, "_"]]:
    """Convert prompts to arrays of token ids on the host, one per prompt.

    Raises:
        ValueError: there are no prompts; or a prompt is empty, is text, is not one-dimensional, or has an entry that is
            not a token id of the vocabulary.

    >>> [prompt.tolist() for prompt in prompt_ids([[1, 2], np.array([3])], vocabulary=4)]
    [[1, 2], [3]]
    >>> [prompt.tolist() for prompt in prompt_ids([1, 2], vocabulary=4)]  # a single one
    [[1, 2]]
    """
    if not _is_row(prompts):
        raise ValueError(f"prompts is {prompts!r}; wanted lists or arrays of token ids")
    prompts = jax.device_get(prompts)  # all at once: each read of an array on a device waits for the device
    if len(prompts) == 0:
        raise ValueError("prompts is empty; wanted at least one list of token ids")
    checked = []
    for index, prompt in enumerate(prompts if any(map(_is_row, prompts)) else [prompts]):
        name = f"prompts[{index}]"
        if not _is_row(prompt):
            raise ValueError(f"{name} is {prompt!r}; wanted a row of token ids, as the others are")
        if any(isinstance(text, str | bytes) for text in (prompt, *prompt)):
            raise ValueError(f"{name} is text; wanted token ids, such as those of tokenizer.encode")
        if len(prompt) == 0:
            raise ValueError(f"{name} has no tokens; a model needs at least one to continue")
        check_token_ids(name, prompt, vocabulary)
        checked.append(np.asarray(prompt))
        if checked[-1].ndim != 1:
            raise ValueError(f"{name} has shape {checked[-1].shape}; wanted a row of token ids")
    return checked


def _is_row(x: Any) -> bool:
    return isinstance(x, Sequence) or np.ndim(x) > 0


def one_key(key: Any) -> Any:
    """Return a PRNG key as a typed key; raw uint32 keys are converted.

    Raises:
        ValueError: `key` is not a PRNG key, or holds several.

    >>> one_key(jax.random.PRNGKey(3)) == jax.random.key(3)
    Array(True, dtype=bool)
    """
    wanted = "wanted one PRNG key, such as jax.random.key(0)"
    if not isinstance(key, jax.Array | np.ndarray):
        raise ValueError(f"key is {key!r}; {wanted}")
    if not jnp.issubdtype(key.dtype, jax.dtypes.prng_key):
        if key.dtype != np.uint32 or key.ndim == 0:
            raise ValueError(f"key is an array {key.dtype}{list(key.shape)}; {wanted}")
        key = jax.random.wrap_key_data(jnp.asarray(key))
    if key.shape:
        raise ValueError(f"key holds {key.size} keys, of shape {key.shape}; {wanted}")
    return key


@partial(jax.jit, static_argnums=0)
def _relayout(model: Model, params: Params) -> Params:
    return model.decode_layout(params)


@partial(jax.jit, static_argnums=(0, 1, 2))
def _start(
    model: Model,
    num_generations: int,
    cache_length: int,
    params: Params,
    prompts: Int[Any, "P L"],
    lengths: Int[Any, "P"],
    key: Any,
    sampling: SamplingParams,
    stop_ids: Int[Array, "S"],
) -> tuple[DecodeState, RowParams]:
    """Prefill each prompt once, and copy it into a row for each of its generations."""
    cache, tokens, positions = _prefill(model, params, prompts, lengths, cache_length)
    fold = jax.vmap(jax.random.fold_in, in_axes=(None, 0))
    prompt_keys = fold(key, jnp.arange(prompts.shape[0]))
    keys = jax.vmap(fold, in_axes=(0, None))(prompt_keys, jnp.arange(num_generations)).reshape(-1)  # [R]
    state = DecodeState(cache, tokens, positions, jnp.ones_like(tokens, bool))
    state = jax.tree.map(lambda leaf: jnp.repeat(leaf, num_generations, axis=0), state)
    # A row may sample `max_new_tokens` after its own prompt, which may be shorter than the padded ones.
    limits = state.positions + 1 + cache_length - prompts.shape[1]
    stops = jnp.broadcast_to(stop_ids, (limits.shape[0], stop_ids.shape[0]))
    return state, RowParams(sampling, keys, stops, limits)


@partial(jax.jit, static_argnums=(0, 1), donate_argnames=("state", "emitted"))
def _continue(
    model: Model,
    num_blocks: int,
    params: Params,
    step: Int[Array, ""],
    state: DecodeState,
    rows: RowParams,
    emitted: Emitted,
    until: Int[Array, ""],
) -> tuple[Int[Array, ""], DecodeState, Emitted]:
    """Decode from `step` to `until` in the first `num_blocks` of the cache."""
    shortened = state._replace(cache=state.cache[:num_blocks])
    step, shortened, emitted = _decode_until(model, params, step, shortened, rows, emitted, until)
    return step, shortened._replace(cache=(*shortened.cache, *state.cache[num_blocks:])), emitted


@partial(jax.jit, static_argnums=2)
def _join(
    prompts: Int[Any, "P L"],
    lengths: Int[Any, "P"],
    num_generations: int,
    emitted: Emitted,
    stop_ids: Int[Array, "S"],
) -> Rollout:
    """Make the rollout, with each completion directly after its own prompt."""
    prompts, lengths = (jnp.repeat(x, num_generations, axis=0) for x in (prompts, lengths))
    width = prompts.shape[1] + emitted.tokens.shape[1]
    column = jnp.arange(width)[None, :]  # [1 T]
    offset = column - lengths[:, None]  # [R T], position within the completion
    is_completion = (offset >= 0) & (offset < emitted.counts[:, None])
    source = jnp.clip(offset, 0, emitted.tokens.shape[1] - 1)

    def shifted(x: Array) -> Array:
        return jnp.where(is_completion, jnp.take_along_axis(x, source, axis=1), 0)

    padded = jnp.pad(prompts, ((0, 0), (0, emitted.tokens.shape[1])))
    last = jnp.take_along_axis(emitted.tokens, emitted.counts[:, None] - 1, axis=1)  # [R 1]
    stopped = (last == stop_ids).any(axis=-1)
    return Rollout(
        tokens=jnp.where(offset < 0, padded, shifted(emitted.tokens)),
        completion_mask=is_completion,
        sampler_logprobs=shifted(emitted.sampler_logprobs),
        behavior_logprobs=shifted(emitted.behavior_logprobs),
        lengths=lengths + emitted.counts,
        finish_reason=jnp.where(stopped, FinishReason.STOP, FinishReason.LENGTH).astype(jnp.int8),
    )
