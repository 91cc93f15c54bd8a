"""Runs the model for an engine on the device thread: `admit` prefills prompts into slots, `advance` decodes tokens.

Compiled shapes follow from the sizes of the runner and from each request alone; `warm_up` compiles them all. On a CPU,
slots that need few blocks of the cache are decoded apart from slots that need many, in sub-batches of few rows; each
kind of sub-batch is first checked to give the bits of the program of all slots.
"""

from collections.abc import Callable, Container, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Float, Int

from jaxft.core.cache import block_capacities, compute_dtype, init_cache, num_blocks_for
from jaxft.core.sampling import LogitBias, SamplingParams
from jaxft.core.sharding import device_bytes, platform_of
from jaxft.core.types import Cache, Model, Params
from jaxft.rollout.decode_batch import (
    LIKELY_TOKENS,
    MAX_BIASED_IDS,
    MAX_STOP_IDS,
    Admission,
    DecodeBatch,
    PrefillChunks,
    admit,
    advance,
    advance_sub_batch,
    cache_shapes,
    copy_rows,
    empty_cache,
    empty_slots,
    most_likely,
    prefill,
    slot_shapes,
    trial_slots,
)
from jaxft.rollout.prefix_cache import (
    MAX_CHUNK_TOKENS,
    MIN_CHUNK_TOKENS,
    Copy,
    PrefillChunk,
    PrefillPlan,
    PrefixCache,
    chunk_width,
)
from jaxft.rollout.requests import Request, TopLogprobs

T = TypeVar("T")

DISPATCH_TOKENS = 8
"""Number of tokens that a slot decodes before new requests are admitted."""

ADMISSION_ROWS = 8
"""Rows of the programs that copy prompts, within the prefix cache or into slots."""

PREFILL_TOKENS = {"cpu": 256}
"""Rows times width of a prefill program, by platform: few on a CPU, which is as efficient on few tokens as on many."""
PREFILL_TOKENS_ELSEWHERE = 2048

PREFILL_POSITIONS = 8192
"""Limit of rows times cache positions of a prefill program, except on a CPU: the program gathers whole rows of the
cache. 8,192 positions of a model of 0.6 billion parameters are 0.9 GiB."""

SUB_BATCH_ROWS = {"cpu": 8}
"""Rows of a sub-batch, by platform; other platforms decode all slots in one program."""

STEP_COST, ROW_COST = 10_000, 400
"""Costs of a decoding step and of each of its rows, in positions of the cache that are read in the same time. Measured
on two CPU cores with models of 2 and 58 million parameters (7,500 and 12,100 positions a step, 280 and 500 a row)."""


class Decoded(NamedTuple):
    """Tokens sampled by one `advance`, on the host; the first `counts` of each slot are real."""

    tokens: Int[np.ndarray, "R N"]
    sampler_logprobs: Float[np.ndarray, "R N"]
    behavior_logprobs: Float[np.ndarray, "R N"]
    counts: Int[np.ndarray, "R"]
    active: Bool[np.ndarray, "R"]


@dataclass
class Counts:
    """Numbers of tokens so far: prompt tokens prefilled and reused from the prefix cache, and tokens sampled."""

    prefilled_tokens: int = 0
    reused_tokens: int = 0
    decoded_tokens: int = 0


class SubBatch(NamedTuple):
    """Slots that one program decodes with the first `num_blocks` of the cache.

    The program computes rows of these slots only if `is_compact`, else rows of all slots.
    """

    slots: tuple[int, ...]
    num_blocks: int
    is_compact: bool


@dataclass
class _Arrays:
    slots: DecodeBatch
    prefix_cache: Cache


class ModelRunner:
    """Owns slots and prefix cache, and runs the programs on them; their arrays are allocated on first use.

    Attributes:
        slots: number of requests that decode together.
        length: maximum number of tokens of a slot or a row of the prefix cache.
        prefix_cache_rows: number of rows of the prefix cache.
        tried: True for a number of blocks with which sub-batches give the bits of the program of all slots, False for
            one with which they do not; numbers that have not been tried are missing.
        counts: the numbers of tokens so far.
    """

    def __init__(self, model: Model, *, seed: int, slots: int, length: int, prefix_cache_rows: int) -> None:
        self.slots, self.length, self.prefix_cache_rows = slots, length, prefix_cache_rows
        self.counts = Counts()
        self._model = model
        self._prefix_index = PrefixCache(prefix_cache_rows)
        self._seed = np.asarray(jax.random.key_data(jax.random.key(seed, impl="threefry2x32")))
        platform = platform_of(model.sharding)
        self._prefill_tokens = PREFILL_TOKENS.get(platform, PREFILL_TOKENS_ELSEWHERE)
        self._prefill_positions = None if platform == "cpu" else PREFILL_POSITIONS
        self._arrays: _Arrays | None = None
        self._row_shards, self._sub_batch_rows = 1, sub_batch_rows(slots, platform)
        if model.sharding is not None:  # each shard of the mesh has slots and cached prompts of its own
            model.sharding.check_rows(slots, "slots")
            model.sharding.check_rows(prefix_cache_rows, "prefix_cache_rows")
            self._row_shards, self._sub_batch_rows = model.sharding.row_shards, None
        self._written_blocks = [0] * slots  # of each slot; later blocks hold zeros
        self.tried: dict[int, bool] = {}
        self._to_try: set[int] = set()

    def cache_bytes(self, dtype: Any) -> int:
        """Return the bytes per device of the keys and values of slots and prefix cache, allocated yet or not."""
        rows = self.slots + self.prefix_cache_rows
        cache = jax.eval_shape(lambda: init_cache(self._model, rows, self.length, dtype))
        devices = 1 if self._model.sharding is None else self._model.sharding.devices  # rows and heads divide over all
        return device_bytes(None, cache) // devices

    def clear_prefix_cache(self) -> None:
        """Clear the prefix cache, whose keys and values belong to other weights."""
        self._prefix_index.clear()

    def reset(self) -> None:
        """Drop all arrays, which may have been donated to a call that failed."""
        self._arrays = None
        self._written_blocks = [0] * self.slots
        self._prefix_index.clear()

    def admit(self, params: Params, requests: Sequence[tuple[int, Request]], *, is_idle: bool) -> None:
        """Prefill requests into slots, so that they are ready to decode; each request comes with a free slot's index.

        Args:
            is_idle: True if no slot is in use, so that sub-batches which could have been used can be tried.
        """
        if is_idle and self._to_try:
            to_try, self._to_try = sorted(self._to_try), set()
            self._try_sub_batches(params, to_try)
        planned: list[tuple[int, Request, PrefillPlan]] = []
        for slot, request in requests:
            plan = self._prefix_index.plan(request.prompt_ids, request.prefix_boundaries)
            if plan is None:  # it needs a row that is only planned yet, or no row is left
                self._carry_out(params, planned)
                planned = []
                plan = self._prefix_index.plan(request.prompt_ids, request.prefix_boundaries)
                assert plan is not None
            planned.append((slot, request, plan))
        self._carry_out(params, planned)

    def advance(self, params: Params, num_tokens: dict[int, int]) -> Decoded:
        """Decode up to `DISPATCH_TOKENS` tokens of some slots.

        Args:
            num_tokens: the number of tokens so far, prompt included, of each slot that is to decode.
        """
        num_blocks = {slot: self._blocks_for(n + DISPATCH_TOKENS - 1) for slot, n in num_tokens.items()}
        for slot, n in num_tokens.items():  # a slot that has ended still writes the position of its last token
            written = self._blocks_for(n + DISPATCH_TOKENS)
            self._written_blocks[slot] = max(self._written_blocks[slot], written)
        capacities = block_capacities(self.length)
        best = split_batch(num_blocks, capacities, self.slots, self._sub_batch_rows, allowed=capacities)
        self._to_try |= {batch.num_blocks for batch in best if batch.is_compact} - self.tried.keys()
        agreeing = {count for count, agrees in self.tried.items() if agrees}
        sub_batches = split_batch(num_blocks, capacities, self.slots, self._sub_batch_rows, allowed=agreeing)
        decoded = self._decode(params, sub_batches)
        self.counts.decoded_tokens += int(decoded.counts.sum())
        return decoded

    def top_logprobs(self, params: Params, request: Request, token_ids: Sequence[int], count: int) -> list[TopLogprobs]:
        """Return the most likely tokens, at most `count`, at the position of each sampled token of a completion.

        The whole row is computed again after the completion has ended, so that requests without `top_logprobs` cost
        nothing; values differ from those of the sampler by rounding. One program serves all requests.
        """
        fed = [*request.prompt_ids, *token_ids][:-1]
        rows = np.zeros((self._row_shards, -(-self.length // LIKELY_TOKENS) * LIKELY_TOKENS), np.int32)
        rows[:, : len(fed)] = fed
        values, ids = jax.device_get(
            most_likely(self._model, params, rows, np.int32(len(fed)), np.float32(request.temperature), count)
        )
        positions, chosen = range(len(request.prompt_ids) - 1, len(fed)), slice(request.top_logprobs)
        return [tuple(zip(ids[i, chosen].tolist(), values[i, chosen].tolist(), strict=True)) for i in positions]

    def _decode(self, params: Params, sub_batches: Sequence[SubBatch]) -> Decoded:
        """Decode all sub-batches, and return their tokens in one table of all slots."""
        arrays, sampled = self._made(params), []
        for batch in sub_batches:  # all programs are queued before any result is waited for
            if batch.is_compact:
                assert self._sub_batch_rows is not None
                chosen, program = padded(batch.slots, self._sub_batch_rows, self.slots, np.int32), advance_sub_batch
            else:
                chosen, program = np.isin(np.arange(self.slots), batch.slots), advance
            arrays.slots, *rest = program(self._model, batch.num_blocks, params, arrays.slots, chosen, DISPATCH_TOKENS)
            sampled.append(rest)
        table = Decoded(
            *(np.zeros((self.slots, DISPATCH_TOKENS), dtype) for dtype in (np.int32, np.float32, np.float32)),
            *(np.zeros(self.slots, dtype) for dtype in (np.int32, bool)),
        )
        for batch, (emitted, active) in zip(sub_batches, jax.device_get(sampled), strict=True):
            slots, rows = list(batch.slots), slice(len(batch.slots)) if batch.is_compact else list(batch.slots)
            for whole, part in zip(table, (*emitted, active), strict=True):
                whole[slots] = part[rows]
        return table

    def warm_up(self, params: Params) -> None:
        """Run every program that requests can need, and try all sub-batches."""
        model, arrays = self._model, self._made(params)
        blocks = list(block_capacities(self.length))
        filler = Request((0,), (0,) * 6, 1)
        for num_blocks in blocks:
            arrays.prefix_cache = copy_rows(model, num_blocks, arrays.prefix_cache, *self._copies([]))
            admission, chosen = self._admission([], filler), np.zeros(self.slots, bool)
            arrays.slots = admit(model, num_blocks, arrays.slots, arrays.prefix_cache, self._seed, admission)
            arrays.slots, *_ = advance(model, num_blocks, params, arrays.slots, chosen, DISPATCH_TOKENS)
        width = MIN_CHUNK_TOKENS
        while width <= min(MAX_CHUNK_TOKENS, chunk_width(self.length)):
            for num_blocks in blocks[blocks.index(self._blocks_for(width // 2 + 1)) :]:
                arrays.prefix_cache = prefill(
                    model, num_blocks, params, arrays.prefix_cache, self._chunks([], width, num_blocks)
                )
            width *= 2
        if self._sub_batch_rows is not None:
            self._try_sub_batches(params, blocks)
        jax.block_until_ready((arrays.prefix_cache, arrays.slots))

    def programs(self, params: Params) -> dict[str, Callable[[], Any]]:
        """Return functions that lower the largest programs of sampling, by name: `prefill` and `decode`.

        Args:
            params: the weights to decode with, or their shapes with shardings.
        """
        model, dtype = self._model, compute_dtype(params)
        num_blocks = max(block_capacities(self.length))
        _, width = largest_prefill(self.length, self._prefill_tokens, self._prefill_positions)
        slots = slot_shapes(model, self.slots, self.length, dtype)
        cache = cache_shapes(model, self.prefix_cache_rows, self.length, dtype)
        chosen = np.zeros(self.slots, bool)
        chunks = self._chunks([], width, num_blocks)
        return {
            "prefill": lambda: prefill.lower(model, num_blocks, params, cache, chunks),
            "decode": lambda: advance.lower(model, num_blocks, params, slots, chosen, DISPATCH_TOKENS),
        }

    def _try_sub_batches(self, params: Params, block_counts: Sequence[int]) -> None:
        """Record in `tried` if a sub-batch samples the bits of the program of all slots; all slots must be idle."""
        assert self._sub_batch_rows is not None
        arrays, all_slots = self._made(params), tuple(range(self.slots))
        few = all_slots[-1 :: -self.slots // self._sub_batch_rows][: self._sub_batch_rows]
        rows = list(few)
        for num_blocks in block_counts:
            position = np.int32(max(1, block_capacities(self.length)[num_blocks] - DISPATCH_TOKENS - 1))
            self.tried[num_blocks] = True
            for filtering in (np.bool_(False), np.bool_(True)):
                decoded = []
                for slots, is_compact in ((all_slots, False), (few, True)):
                    arrays.slots = trial_slots(arrays.slots, position, filtering)
                    decoded.append(self._decode(params, [SubBatch(slots, num_blocks, is_compact)]))
                self.tried[num_blocks] &= all((a[rows] == b[rows]).all() for a, b in zip(*decoded, strict=True))
        self._written_blocks = [len(arrays.prefix_cache)] * self.slots
        state = arrays.slots.state  # no request reads what the caches hold now
        arrays.slots = arrays.slots._replace(state=state._replace(active=jnp.zeros_like(state.active)))

    def _blocks_for(self, tokens: int) -> int:
        return num_blocks_for(tokens, self.length)

    def _made(self, params: Params) -> _Arrays:
        if self._arrays is None:
            dtype = compute_dtype(params)
            self._arrays = _Arrays(
                empty_slots(self._model, self.slots, self.length, dtype),
                empty_cache(self._model, self.prefix_cache_rows, self.length, dtype),
            )
        return self._arrays

    def _carry_out(self, params: Params, planned: Sequence[tuple[int, Request, PrefillPlan]]) -> None:
        """Copy rows of the prefix cache, then prefill the chunks of all prompts in parallel, then fill the slots."""
        model, arrays, plans = self._model, self._made(params), [plan for _, _, plan in planned]
        copies = [plan.copy for plan in plans if plan.copy is not None]
        for num_blocks, copied in batches(copies, lambda copy: self._blocks_for(copy.tokens), lambda _: ADMISSION_ROWS):
            arrays.prefix_cache = copy_rows(model, num_blocks, arrays.prefix_cache, *self._copies(copied))
        for depth in range(max((len(plan.chunks) for plan in plans), default=0)):
            chunks = [plan.chunks[depth] for plan in plans if len(plan.chunks) > depth]
            for (width, num_blocks), batch in batches(chunks, self._chunk_shape, lambda shape: self._rows(*shape)):
                padded_chunks = self._chunks(batch, width, num_blocks)
                arrays.prefix_cache = prefill(model, num_blocks, params, arrays.prefix_cache, padded_chunks)
        for (num_blocks, _), admitted in batches(planned, self._admission_shape, lambda _: ADMISSION_ROWS):
            admission = self._admission(admitted, filler=admitted[0][1])
            arrays.slots = admit(model, num_blocks, arrays.slots, arrays.prefix_cache, self._seed, admission)
            for slot, request, _ in admitted:
                self._written_blocks[slot] = self._blocks_for(len(request.prompt_ids))
        self._prefix_index.commit()
        self.counts.prefilled_tokens += sum(len(chunk.tokens) for plan in plans for chunk in plan.chunks)
        self.counts.reused_tokens += sum(plan.reused_tokens for plan in plans)

    def _admission_shape(self, planned: tuple[int, Request, PrefillPlan]) -> tuple[int, int]:
        """Return the number of cache blocks that an admission writes, and the number of the request's key ids.

        The blocks are those of the prompt and those that the slot's last request has written, which are cleared.
        """
        slot, request, _ = planned
        prompt_blocks = self._blocks_for(len(request.prompt_ids) - 1)
        return max(prompt_blocks, self._written_blocks[slot]), len(request.key_ids)

    def _chunk_shape(self, chunk: PrefillChunk) -> tuple[int, int]:
        return chunk.width, self._blocks_for(chunk.start + len(chunk.tokens))

    def _rows(self, width: int, num_blocks: int) -> int:
        """Return the rows of a prefill program of chunks of this width, which reads so many blocks of the cache."""
        capacity = block_capacities(self.length)[num_blocks]
        return self._row_shards * prefill_rows(width, capacity, self._prefill_tokens, self._prefill_positions)

    def _chunks(self, chunks: Sequence[PrefillChunk], width: int, num_blocks: int) -> PrefillChunks:
        rows = self._rows(width, num_blocks)
        tokens = np.zeros((rows, width), np.int32)
        for row, chunk in zip(tokens, chunks, strict=False):
            row[: len(chunk.tokens)] = chunk.tokens
        starts = padded([chunk.start for chunk in chunks], rows, 0, np.int32)
        return PrefillChunks(
            tokens, starts, padded([chunk.row for chunk in chunks], rows, self.prefix_cache_rows, np.int32)
        )

    def _copies(self, copies: Sequence[Copy]) -> tuple[Int[np.ndarray, "P"], Int[np.ndarray, "P"]]:
        beyond = self.prefix_cache_rows
        return (
            padded([copy.source for copy in copies], ADMISSION_ROWS, beyond, np.int32),
            padded([copy.target for copy in copies], ADMISSION_ROWS, beyond, np.int32),
        )

    def _admission(self, planned: Sequence[tuple[int, Request, PrefillPlan]], filler: Request) -> Admission:
        requests = [request for _, request, _ in planned]
        requests += [filler] * (ADMISSION_ROWS - len(planned))
        lengths = [len(request.prompt_ids) for request in requests]
        stops = np.full((ADMISSION_ROWS, MAX_STOP_IDS), -1, np.int32)
        bias_ids: Any = np.full((ADMISSION_ROWS, MAX_BIASED_IDS), -1, np.int32)
        bias_values: Any = np.zeros((ADMISSION_ROWS, MAX_BIASED_IDS), np.float32)
        for row, request in enumerate(requests):
            stops[row, : len(request.stop_ids)] = request.stop_ids
            for index, (token, value) in enumerate(request.logit_bias):
                bias_ids[row, index], bias_values[row, index] = token, value

        def column(name: str, dtype: Any) -> Any:
            return np.array([vars(request)[name] for request in requests], dtype)

        return Admission(
            prefix_rows=padded([plan.row for _, _, plan in planned], ADMISSION_ROWS, self.prefix_cache_rows, np.int32),
            slots=padded([slot for slot, _, _ in planned], ADMISSION_ROWS, self.slots, np.int32),
            tokens=np.array([request.prompt_ids[-1] for request in requests], np.int32),
            positions=np.array(lengths, np.int32) - 1,
            sampling=SamplingParams(
                column("temperature", np.float32),
                column("top_k", np.int32),
                column("top_p", np.float32),
                column("min_p", np.float32),
                LogitBias(bias_ids, bias_values),
            ),
            key_ids=column("key_ids", np.uint32),
            stop_ids=stops,
            limits=np.array(
                [min(n + request.max_tokens, self.length) for n, request in zip(lengths, requests, strict=True)],
                np.int32,
            ),
        )


def prefill_rows(width: int, capacity: int, tokens: int, positions: int | None) -> int:
    """Return the rows, on each row shard, of a prefill program.

    Args:
        width: tokens of a chunk.
        capacity: positions of a row of the cache that the program reads.
        tokens: limit of rows times width.
        positions: limit of rows times capacity; None for no limit.

    >>> prefill_rows(16, 256, 2048, 8192), prefill_rows(512, 256, 2048, 8192), prefill_rows(16, 256, 256, None)
    (32, 4, 16)
    """
    return max(1, min(tokens // width, tokens if positions is None else positions // capacity))


def largest_prefill(length: int, tokens: int, positions: int | None) -> tuple[int, int]:
    """Return rows and width of the prefill program that gathers most of a cache for `length` tokens a row.

    >>> largest_prefill(2048, 2048, 8192), largest_prefill(512, 2048, 8192)
    ((4, 512), (16, 128))
    """
    widths = [MIN_CHUNK_TOKENS << i for i in range(MAX_CHUNK_TOKENS.bit_length())]
    fitting = [width for width in widths if width <= min(MAX_CHUNK_TOKENS, chunk_width(length))]
    return max((prefill_rows(width, length, tokens, positions), width) for width in fitting)


def padded(values: Sequence[int], rows: int, filler: int, dtype: Any) -> Any:
    """Return the values as an array of length `rows`, padded with `filler`.

    >>> padded([3, 1], 4, 9, np.int32).tolist()
    [3, 1, 9, 9]
    """
    return np.array([*values, *[filler] * (rows - len(values))], dtype)


def batches(
    items: Iterable[T], shape_of: Callable[[T], Any], rows_of: Callable[[Any], int]
) -> Iterator[tuple[Any, list[T]]]:
    """Yield batches of items of one shape, each of at most `rows_of(shape)` items.

    >>> list(batches([1, 2, 11, 3, 4], lambda n: n // 10, lambda shape: 3))
    [(0, [1, 2, 3]), (0, [4]), (1, [11])]
    """
    by_shape: dict[Hashable, list[T]] = {}
    for item in items:
        by_shape.setdefault(shape_of(item), []).append(item)
    for shape, alike in by_shape.items():
        rows = rows_of(shape)
        for start in range(0, len(alike), rows):
            yield shape, alike[start : start + rows]


def sub_batch_rows(slots: int, platform: str) -> int | None:
    """Return the rows of a compact sub-batch; None if the platform has none, or there are too few slots for two.

    >>> sub_batch_rows(16, "cpu"), sub_batch_rows(15, "cpu"), sub_batch_rows(256, "gpu")
    (8, None, None)
    """
    rows = SUB_BATCH_ROWS.get(platform)
    return rows if rows is not None and slots >= 2 * rows else None


def split_batch(
    num_blocks: Mapping[int, int],
    capacities: Mapping[int, int],
    all_rows: int,
    rows: int | None,
    allowed: Container[int],
) -> list[SubBatch]:
    """Return the cheapest sub-batches for slots that need different numbers of blocks.

    Args:
        num_blocks: the number of blocks that each slot needs.
        capacities: the positions in that many blocks of the cache.
        all_rows: rows of the program that decodes all slots.
        rows: rows of a compact sub-batch; None allows none.
        allowed: numbers of blocks that a compact sub-batch may have.

    >>> capacities = {2: 128, 5: 1024}
    >>> split_batch({0: 2, 1: 5}, capacities, all_rows=64, rows=8, allowed=capacities)
    [SubBatch(slots=(1, 0), num_blocks=5, is_compact=True)]
    >>> uneven = {slot: 5 if slot == 7 else 2 for slot in range(64)}
    >>> split_batch(uneven, capacities, all_rows=64, rows=8, allowed=capacities)[0]
    SubBatch(slots=(7, 0, 1, 2, 3, 4, 5, 6), num_blocks=5, is_compact=True)
    """
    longest_first = sorted(num_blocks, key=lambda slot: -num_blocks[slot])

    def batch(start: int, end: int | None, is_compact: bool) -> SubBatch:
        return SubBatch(tuple(longest_first[start:end]), num_blocks[longest_first[start]], is_compact)

    ways: list[list[SubBatch]] = [[batch(0, None, is_compact=False)]]
    if rows is None:
        return ways[0]
    compact: list[SubBatch] = []
    for start in range(0, len(longest_first), rows):
        compact.append(batch(start, start + rows, is_compact=True))
        if compact[-1].num_blocks not in allowed:
            break
        end = start + rows
        ways.append([*compact, batch(end, None, is_compact=False)] if end < len(longest_first) else [*compact])

    def cost(sub_batches: Sequence[SubBatch]) -> int:
        sizes = ((rows if each.is_compact else all_rows, capacities[each.num_blocks]) for each in sub_batches)
        return sum(STEP_COST + count * (ROW_COST + capacity) for count, capacity in sizes)

    return min(ways, key=cost)
