"""Batched generation: each prompt is prefilled once for all its generations, and rows decode until all have ended.

Letters: `P` prompts, `G` generations of each, `R = P G` rows and padding, `L` padded prompt length, `N` new tokens,
`S` stop ids, `D` row shards, `C` columns of a page table, `c` those of a prompt's, `Q` prompts of all shards.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from jaxft.core.cache import PAGE_TOKENS, compute_dtype, copy_pages, pages_for, row_shards
from jaxft.core.checks import check_token_ids, vocabulary_size
from jaxft.core.decode import DecodeState, RowParams, SampledTokens, decode
from jaxft.core.sampling import SamplingParams, sampling_params
from jaxft.core.sharding import compute_platform
from jaxft.core.types import Cache, FinishReason, Model, Params, Rollout

PROMPT_BUCKET = 32
"""Prompts are padded to a multiple of this many tokens, so that batches of similar length share a compiled program."""

DISPATCH_TOKENS = 16
"""Largest number of tokens that a row decodes before the host looks whether all rows have ended."""


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
    is_filtered = top_k > 0 or top_p < 1 or min_p > 0
    stops = jnp.array([*stop_ids] or [-1], jnp.int32)

    params = _relayout(model, params)
    num_dispatches = -(-max_new_tokens // DISPATCH_TOKENS)
    num_steps = -(-max_new_tokens // num_dispatches)
    places = _places(lengths, num_generations, padded.shape[1], num_dispatches * num_steps, row_shards(model))
    sampling = sampling_params(len(places.tables), temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    cache, state, rows = _start(
        model, places.num_pages, num_generations, max_new_tokens, params, padded, lengths, key, sampling, stops, places
    )
    sampled: list[SampledTokens] = []
    are_active = [state.active.any()]
    for number in range(num_dispatches):
        # A call is queued before the one before it is waited for, so that the device does not wait for the host.
        if number > 1 and not are_active[number - 1]:
            break
        cache, state, new = _advance(model, num_steps, is_filtered, params, cache, places.tables, state, rows)
        sampled.append(new)
        are_active.append(state.active.any())
    ended = sampled[-1]._replace(counts=jnp.zeros_like(sampled[-1].counts))
    sampled += [ended] * (num_dispatches - len(sampled))  # so that one program joins any number of calls
    return _join(num_generations, max_new_tokens, padded, lengths, sampled, stops)


class Places(NamedTuple):
    """Pages of prompts and rows. Each row shard has rows, prompts and pages of its own; padding rows are at its end.

    Attributes:
        num_pages: number of pages in all.
        prompts: prompt of each row of the prefill.
        prompt_tables: its pages.
        tables: pages of each row to decode. The rows of a prompt share its whole pages.
        sources, targets: pages to copy, numbered within their shard: the last page of a prompt, which only its first
            row keeps.
        row_prompts: prompt of each row to decode, -1 for padding.
    """

    num_pages: int
    prompts: Int[np.ndarray, "Q"]
    prompt_tables: Int[np.ndarray, "Q c"]
    tables: Int[np.ndarray, "R C"]
    sources: Int[np.ndarray, "D p"]
    targets: Int[np.ndarray, "D p"]
    row_prompts: Int[np.ndarray, "R"]


def _places(lengths: Int[np.ndarray, "P"], num_generations: int, width: int, new_tokens: int, shards: int) -> Places:
    """Lay out the pages of `num_generations` rows for each prompt, padded to `width`, and `new_tokens` tokens more.

    >>> _places(np.array([65, 70]), 2, width=96, new_tokens=32, shards=1).tables.tolist()  # 64 tokens each are shared
    [[0, 1], [0, 5], [2, 3], [2, 7]]
    """
    rows = len(lengths) * num_generations
    each = -(-rows // shards)
    row_prompts = np.pad(
        np.repeat(np.arange(len(lengths)), num_generations), (0, each * shards - rows), constant_values=-1
    )
    parts = row_prompts.reshape(shards, each)
    by_shard = [list(dict.fromkeys(part[part >= 0].tolist())) for part in parts]
    most = max(map(len, by_shard))
    prompt_columns, columns = pages_for(width), pages_for(width + new_tokens)
    shared = (lengths - 1) // PAGE_TOKENS  # whole pages of the tokens before the last, which the first step takes
    first = int(shared.min())
    prompts = np.zeros((shards, most), np.int32)
    tables = np.zeros((shards, each, columns), np.int32)
    copies: list[list[tuple[int, int]]] = [[] for _ in range(shards)]
    for shard, its_prompts in enumerate(by_shard):
        prompts[shard, : len(its_prompts)] = its_prompts
        own = most * prompt_columns + np.arange(each * (columns - first)).reshape(each, -1)
        keepers: set[int] = set()
        for row, prompt in enumerate(row_prompts[shard * each : (shard + 1) * each].tolist()):
            if prompt < 0:
                continue
            pages = its_prompts.index(prompt) * prompt_columns + np.arange(prompt_columns)
            tables[shard, row, first:] = own[row]
            tables[shard, row, : shared[prompt]] = pages[: shared[prompt]]
            if prompt not in keepers:
                keepers.add(prompt)
                tables[shard, row, :prompt_columns] = pages
            elif (lengths[prompt] - 1) % PAGE_TOKENS:
                copies[shard].append((int(pages[shared[prompt]]), int(tables[shard, row, shared[prompt]])))
    num_pages = most * prompt_columns + each * (columns - first)
    # As many as prompts of any lengths need, so that other lengths compile nothing.
    most_copies = max(int((part >= 0).sum()) - len(its) for part, its in zip(parts, by_shard, strict=True))
    padded = np.full((shards, max(1, most_copies), 2), num_pages, np.int32)
    for shard, pairs in enumerate(copies):
        padded[shard, : len(pairs)] = np.reshape(pairs, (-1, 2))
    prompt_tables = np.arange(most * prompt_columns, dtype=np.int32).reshape(most, prompt_columns)
    first_pages = num_pages * np.arange(shards, dtype=np.int32)[:, None, None]
    return Places(
        num_pages * shards,
        prompts.reshape(-1),
        (prompt_tables + first_pages).reshape(-1, prompt_columns),
        (tables + first_pages).reshape(-1, columns),
        padded[..., 0],
        padded[..., 1],
        row_prompts,
    )


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
        checked.append(np.asarray(prompt))
        if checked[-1].ndim != 1 or not checked[-1].size:
            raise ValueError(f"{name} is {prompt!r:.100}; wanted a row of token ids, at least one")
        check_token_ids(name, checked[-1], vocabulary)
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


PREFILL_TOKENS = {"cpu": 64}
"""Tokens of a prompt that are prefilled at a time, by platform; a multiple of a page."""
PREFILL_TOKENS_ELSEWHERE = 1024


@partial(jax.jit, static_argnums=(0, 1, 2, 3))
def _start(
    model: Model,
    num_pages: int,
    num_generations: int,
    max_new_tokens: int,
    params: Params,
    prompts: Int[Any, "P L"],
    lengths: Int[Any, "P"],
    key: Any,
    sampling: SamplingParams,
    stop_ids: Int[Array, "S"],
    places: Places,
) -> tuple[Cache, DecodeState, RowParams]:
    """Prefill each prompt once, copy the last page of each for its generations, and make the rows ready to decode."""
    cache = model.init_cache(num_pages, compute_dtype(params))
    taken = jnp.asarray(prompts)[places.prompts]
    cache = _prefill(model, params, cache, taken, jnp.asarray(lengths)[places.prompts] - 1, places.prompt_tables)
    cache = copy_pages(model, cache, places.sources, places.targets)

    fold = jax.vmap(jax.random.fold_in, in_axes=(None, 0))
    prompt_keys = fold(key, jnp.arange(prompts.shape[0]))
    keys = jax.vmap(fold, in_axes=(0, None))(prompt_keys, jnp.arange(num_generations)).reshape(-1)
    rows = jnp.minimum(jnp.arange(len(places.tables)), keys.shape[0] - 1)
    prompt = jnp.maximum(places.row_prompts, 0)
    last = jnp.asarray(lengths)[prompt] - 1
    tokens = jnp.take_along_axis(jnp.asarray(prompts)[prompt], last[:, None], axis=1)[:, 0]
    # A row may sample `max_new_tokens` after its own prompt, which may be shorter than the padded ones.
    state = DecodeState(tokens, last, jnp.asarray(places.row_prompts) >= 0)
    stops = jnp.broadcast_to(stop_ids, (rows.shape[0], stop_ids.shape[0]))
    return cache, state, RowParams(sampling, keys[rows], stops, last + 1 + max_new_tokens)


def _prefill(
    model: Model,
    params: Params,
    cache: Cache,
    tokens: Int[Array, "Q L"],
    counts: Int[Array, "Q"],
    tables: Int[Any, "Q c"],
) -> Cache:
    """Write the keys and values of the first `counts` tokens of each row to its pages."""
    most = PREFILL_TOKENS.get(compute_platform(model.sharding), PREFILL_TOKENS_ELSEWHERE)
    width = min(most, 1 << (PAGE_TOKENS * tables.shape[1] - 1).bit_length())  # kernels want a power of two
    tokens = jnp.pad(tokens, ((0, 0), (0, -tokens.shape[1] % width)))

    def prefill_piece(piece: Int[Array, ""], cache: Cache) -> Cache:
        positions = piece * width + jnp.arange(width, dtype=jnp.int32)
        positions = jnp.where(positions < counts[:, None], positions, -1)
        taken = jax.lax.dynamic_slice_in_dim(tokens, piece * width, width, axis=1)
        return model.apply(params, taken, positions, cache=cache, tables=tables)[1]

    return jax.lax.fori_loop(0, tokens.shape[1] // width, prefill_piece, cache)


@partial(jax.jit, static_argnums=(0, 1, 2), donate_argnames=("cache", "state"))
def _advance(
    model: Model,
    num_steps: int,
    is_filtered: bool,
    params: Params,
    cache: Cache,
    tables: Int[Any, "R C"],
    state: DecodeState,
    rows: RowParams,
) -> tuple[Cache, DecodeState, SampledTokens]:
    return decode(model, params, cache, tables, state, rows, num_steps, is_filtered=is_filtered)


@partial(jax.jit, static_argnums=(0, 1))
def _join(
    num_generations: int,
    max_new_tokens: int,
    prompts: Int[Any, "P L"],
    lengths: Int[Any, "P"],
    calls: list[SampledTokens],
    stop_ids: Int[Array, "S"],
) -> Rollout:
    """Make the rollout of all calls, with each completion directly after its own prompt."""
    prompts, lengths = (jnp.repeat(x, num_generations, axis=0) for x in (prompts, lengths))
    rows = len(lengths)

    def joined(*parts: Array) -> Array:
        whole = jnp.concatenate(parts, axis=1)[:rows, :max_new_tokens]
        return jnp.pad(whole, ((0, 0), (0, max_new_tokens - whole.shape[1])))

    sampled = SampledTokens(
        joined(*(call.tokens for call in calls)),
        joined(*(call.sampler_logprobs for call in calls)),
        joined(*(call.behavior_logprobs for call in calls)),
        sum((call.counts[:rows] for call in calls), jnp.zeros(rows, jnp.int32)),
    )
    column = jnp.arange(prompts.shape[1] + max_new_tokens)[None, :]  # [1 T]
    offset = column - lengths[:, None]  # [R T], position within the completion
    is_completion = (offset >= 0) & (offset < sampled.counts[:, None])
    source = jnp.clip(offset, 0, max_new_tokens - 1)

    def shifted(x: Array) -> Array:
        return jnp.where(is_completion, jnp.take_along_axis(x, source, axis=1), 0)

    padded = jnp.pad(prompts, ((0, 0), (0, max_new_tokens)))
    last = jnp.take_along_axis(sampled.tokens, sampled.counts[:, None] - 1, axis=1)  # [R 1]
    stopped = (last == stop_ids).any(axis=-1)
    return Rollout(
        tokens=jnp.where(offset < 0, padded, shifted(sampled.tokens)),
        completion_mask=is_completion,
        sampler_logprobs=shifted(sampled.sampler_logprobs),
        behavior_logprobs=shifted(sampled.behavior_logprobs),
        lengths=lengths + sampled.counts,
        finish_reason=jnp.where(stopped, FinishReason.STOP, FinishReason.LENGTH).astype(jnp.int8),
    )
