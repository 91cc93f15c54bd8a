"""The arrays that an engine decodes with, in the hands of the device thread: slots, and a store of prefilled prompts.

Requests come in by `admit`, tokens come out of `advance`. Which shapes are compiled follows from the sizes given here
and from each request alone; `warm_up` compiles them all.
"""

from collections.abc import Callable, Container, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Float, Int

from jaxft.core.cache import compute_dtype, init_cache, num_blocks_for, reaches
from jaxft.core.sampling import LogitBias, SamplingParams
from jaxft.core.sharding import device_bytes
from jaxft.core.types import Cache, Model, Params
from jaxft.rollout.decode_batch import (
    MAX_BIASED_IDS,
    MAX_STOP_IDS,
    Admission,
    DecodeBatch,
    PrefillChunks,
    admit,
    advance,
    advance_part,
    copy_rows,
    empty_cache,
    empty_slots,
    prefill,
    trial_slots,
)
from jaxft.rollout.prefix_cache import (
    LARGEST_PIECE,
    SMALLEST_PIECE,
    Copy,
    PrefillChunk,
    PrefillPlan,
    PrefixCache,
    chunk_width,
)
from jaxft.rollout.requests import Request

PART_ROWS = {"cpu": 8}
"""Rows of a part, by backend; parts are not used on the others."""

FIXED_COST, ROW_COST = 10_000, 400
"""What a step costs, and each row of it, in places of a row's cache that are read meanwhile. Measured on two CPU cores
with models of 2 and 58 million parameters (7,500 and 12,100 places a step, 280 and 500 a row)."""


class SubBatch(NamedTuple):
    """Slots that one program decodes, with so many blocks of the cache; as a part of its own, or among all slots."""

    slots: tuple[int, ...]
    num_blocks: int
    is_part: bool


def part_rows(slots: int) -> int | None:
    """Rows of a part where parts can be of use: with two of them or more in the slots.

    >>> part_rows(15) is None
    True
    """
    rows = PART_ROWS.get(jax.default_backend())
    return rows if rows is not None and slots >= 2 * rows else None


def divide(
    num_blocks: Mapping[int, int], places: Mapping[int, int], all_rows: int, rows: int | None, allowed: Container[int]
) -> list[SubBatch]:
    """The cheapest way to decode slots that need different numbers of blocks.

    Args:
        near: blocks that each slot needs.
        places: of the cache, in so many blocks.
        all_rows: of the program that decodes all slots.
        rows: of a part; None: no parts.
        allowed: numbers of blocks with which there may be parts.

    >>> places = {2: 128, 5: 1024}
    >>> divide({0: 2, 1: 5}, places, all_rows=64, rows=8, allowed=places)
    [Group(slots=(1, 0), near=5, is_part=True)]
    >>> divide({slot: 5 if slot == 7 else 2 for slot in range(64)}, places, all_rows=64, rows=8, allowed=places)[0]
    Group(slots=(7, 0, 1, 2, 3, 4, 5, 6), near=5, is_part=True)
    """
    longest_first = sorted(num_blocks, key=lambda slot: -num_blocks[slot])

    def group(start: int, end: int | None, is_part: bool) -> SubBatch:
        return SubBatch(tuple(longest_first[start:end]), num_blocks[longest_first[start]], is_part)

    ways: list[list[SubBatch]] = [[group(0, None, is_part=False)]]
    if rows is None:
        return ways[0]
    parts: list[SubBatch] = []
    for start in range(0, len(longest_first), rows):
        parts.append(group(start, start + rows, is_part=True))
        if parts[-1].num_blocks not in allowed:
            break
        rest = start + rows
        ways.append([*parts, group(rest, None, is_part=False)] if rest < len(longest_first) else [*parts])

    def cost(groups: Sequence[SubBatch]) -> int:
        each = ((rows if group.is_part else all_rows, places[group.num_blocks]) for group in groups)
        return sum(FIXED_COST + count * (ROW_COST + reach) for count, reach in each)

    return min(ways, key=cost)


DISPATCH_TOKENS = 8
"""Tokens decoded between two looks at the queue."""
COPIED_ROWS = 8
"""Rows of a program that copies prompts."""
PREFILL_TOKENS = {"cpu": 256}
"""Tokens of a program that prefills, rows times width: few on a CPU, which works as well on few as on many."""
PREFILL_TOKENS_ELSEWHERE = 2048

T = TypeVar("T")


class Decoded(NamedTuple):
    """What a dispatch sampled, on the host; `counts` says how many tokens of each slot are real."""

    tokens: Int[np.ndarray, "R N"]
    sampler_logprobs: Float[np.ndarray, "R N"]
    behavior_logprobs: Float[np.ndarray, "R N"]
    counts: Int[np.ndarray, "R"]
    active: Bool[np.ndarray, "R"]


@dataclass
class Counts:
    """Tokens so far: of prompts computed, of prompts that needed no computing, and sampled."""

    prefilled_tokens: int = 0
    reused_tokens: int = 0
    decoded_tokens: int = 0


@dataclass
class _Arrays:
    slots: DecodeBatch
    store: Cache


class ModelRunner:
    """Slots and store, made when they are first needed.

    Attributes:
        slots: how many requests are decoded together.
        length: tokens that each has room for.
        prefix_cache_rows: rows of the store.
        tried: whether parts give the bits of a program of all slots, by the number of blocks they have been tried with.
        counts: what has been done.
    """

    def __init__(self, model: Model, *, seed: int, slots: int, length: int, prefix_cache_rows: int) -> None:
        self.slots, self.length, self.prefix_cache_rows = slots, length, prefix_cache_rows
        self.counts = Counts()
        self._model = model
        self._prefixes = PrefixCache(prefix_cache_rows)
        self._seed = np.asarray(jax.random.key_data(jax.random.key(seed, impl="threefry2x32")))
        self._prefill_tokens = PREFILL_TOKENS.get(jax.default_backend(), PREFILL_TOKENS_ELSEWHERE)
        self._arrays: _Arrays | None = None
        self._shares, self._part_rows = 1, part_rows(slots)
        if model.sharding is not None:  # whose parts of a mesh each have slots and stored prompts of their own
            model.sharding.check_rows(slots, "slots")
            model.sharding.check_rows(prefix_cache_rows, "stored prompts")
            self._shares, self._part_rows = model.sharding.row_shards, None
        self._touched = [0] * slots  # blocks of each slot that may hold something; behind them are zeros
        self.tried: dict[int, bool] = {}
        self._wanted: set[int] = set()

    def cache_bytes(self, dtype: Any) -> int:
        """Bytes of the keys and values of slots and store, on each device, whether they have been made yet or not."""
        rows = self.slots + self.prefix_cache_rows
        cache = jax.eval_shape(lambda: init_cache(self._model, rows, self.length, dtype))
        devices = 1 if self._model.sharding is None else self._model.sharding.devices  # rows and heads divide over all
        return device_bytes(None, cache) // devices

    def clear_prefix_cache(self) -> None:
        """What the store holds belongs to other weights from now on."""
        self._prefixes.clear()

    def reset(self) -> None:
        """Gives up all arrays: they may have been donated to a call that failed."""
        self._arrays = None
        self._touched = [0] * self.slots
        self._prefixes.clear()

    def admit(self, params: Params, requests: Sequence[tuple[int, Request]], *, is_idle: bool) -> None:
        """Makes slots ready to decode requests; each comes with the number of its slot, which must be free.

        Args:
            is_idle: no slot is in use; the time to try the parts that would have been of use.
        """
        if is_idle and self._wanted:
            wanted, self._wanted = sorted(self._wanted), set()
            self._try_parts(params, wanted)
        planned: list[tuple[int, Request, PrefillPlan]] = []
        for slot, request in requests:
            plan = self._prefixes.plan(request.prompt_ids, request.prefix_boundaries)
            if plan is None:  # it stands on what has only been planned, or the store has no row left
                self._carry_out(params, planned)
                planned = []
                plan = self._prefixes.plan(request.prompt_ids, request.prefix_boundaries)
                assert plan is not None
            planned.append((slot, request, plan))
        self._carry_out(params, planned)

    def advance(self, params: Params, tokens: dict[int, int]) -> Decoded:
        """Decodes a few tokens of the slots named, and none of the others.

        Args:
            tokens: how many each of these slots holds so far, prompt included.
        """
        num_blocks = {slot: num_blocks_for(held + DISPATCH_TOKENS - 1, self.length) for slot, held in tokens.items()}
        for slot, held in tokens.items():  # a slot that has ended still writes the place of its last token
            self._touched[slot] = max(self._touched[slot], num_blocks_for(held + DISPATCH_TOKENS, self.length))
        places = reaches(self.length)
        best = divide(num_blocks, places, self.slots, self._part_rows, allowed=places)
        self._wanted |= {group.num_blocks for group in best if group.is_part} - self.tried.keys()
        agreeing = {count for count, agrees in self.tried.items() if agrees}
        decoded = self._decode(params, divide(num_blocks, places, self.slots, self._part_rows, allowed=agreeing))
        self.counts.decoded_tokens += int(decoded.counts.sum())
        return decoded

    def _decode(self, params: Params, groups: Sequence[SubBatch]) -> Decoded:
        """What every group's program has sampled, in one table of all slots."""
        arrays, sampled = self._made(params), []
        for group in groups:  # each is queued behind the one before; nothing is waited for yet
            if group.is_part:
                assert self._part_rows is not None
                chosen, program = column(group.slots, self._part_rows, self.slots, np.int32), advance_part
            else:
                chosen, program = np.isin(np.arange(self.slots), group.slots), advance
            arrays.slots, *part = program(self._model, group.num_blocks, params, arrays.slots, chosen, DISPATCH_TOKENS)
            sampled.append(part)
        table = Decoded(
            *(np.zeros((self.slots, DISPATCH_TOKENS), dtype) for dtype in (np.int32, np.float32, np.float32)),
            *(np.zeros(self.slots, dtype) for dtype in (np.int32, bool)),
        )
        for group, (emitted, active) in zip(groups, jax.device_get(sampled), strict=True):
            slots, own = list(group.slots), slice(len(group.slots)) if group.is_part else list(group.slots)
            for whole, part in zip(table, (*emitted, active), strict=True):
                whole[slots] = part[own]
        return table

    def warm_up(self, params: Params) -> None:
        """Runs every program that requests can lead to, and tries all parts."""
        arrays = self._made(params)
        blocks = list(reaches(self.length))
        nobody = Request((0,), (0,) * 6, 1)
        for num_blocks in blocks:
            arrays.store = copy_rows(self._model, num_blocks, arrays.store, *self._copies([]))
            arrays.slots = admit(
                self._model, num_blocks, arrays.slots, arrays.store, self._seed, self._admission([], nobody)
            )
            chosen = np.zeros(self.slots, bool)
            arrays.slots, *_ = advance(self._model, num_blocks, params, arrays.slots, chosen, DISPATCH_TOKENS)
        width = SMALLEST_PIECE
        while width <= min(LARGEST_PIECE, chunk_width(self.length)):
            for num_blocks in blocks[blocks.index(num_blocks_for(width // 2 + 1, self.length)) :]:
                arrays.store = prefill(self._model, num_blocks, params, arrays.store, self._pieces([], width))
            width *= 2
        if self._part_rows is not None:
            self._try_parts(params, blocks)
        jax.block_until_ready((arrays.store, arrays.slots))

    def _try_parts(self, params: Params, counts: Sequence[int]) -> None:
        """Finds out whether a part samples the same bits as a program of all slots, which must be idle."""
        assert self._part_rows is not None
        arrays, everyone = self._made(params), tuple(range(self.slots))
        few = everyone[-1 :: -self.slots // self._part_rows][: self._part_rows]
        rows = list(few)
        for num_blocks in counts:
            position = np.int32(max(1, reaches(self.length)[num_blocks] - DISPATCH_TOKENS - 1))
            self.tried[num_blocks] = True
            for filtering in (np.bool_(False), np.bool_(True)):
                decoded = []
                for group in (SubBatch(everyone, num_blocks, is_part=False), SubBatch(few, num_blocks, is_part=True)):
                    arrays.slots = trial_slots(arrays.slots, position, filtering)
                    decoded.append(self._decode(params, [group]))
                self.tried[num_blocks] &= all((a[rows] == b[rows]).all() for a, b in zip(*decoded, strict=True))
        self._touched = [len(arrays.store)] * self.slots
        state = arrays.slots.state  # what the caches hold now, nobody reads
        arrays.slots = arrays.slots._replace(state=state._replace(active=jnp.zeros_like(state.active)))

    def _made(self, params: Params) -> _Arrays:
        if self._arrays is None:
            dtype = compute_dtype(params)
            self._arrays = _Arrays(
                empty_slots(self._model, self.slots, self.length, dtype),
                empty_cache(self._model, self.prefix_cache_rows, self.length, dtype),
            )
        return self._arrays

    def _carry_out(self, params: Params, planned: Sequence[tuple[int, Request, PrefillPlan]]) -> None:
        """Copies within the store, then the pieces of all prompts side by side, then copies into slots."""
        arrays, plans = self._made(params), [plan for _, _, plan in planned]
        copies = [plan.copy for plan in plans if plan.copy is not None]
        for num_blocks, some in batches(
            copies, lambda copy: num_blocks_for(copy.tokens, self.length), lambda num_blocks: COPIED_ROWS
        ):
            arrays.store = copy_rows(self._model, num_blocks, arrays.store, *self._copies(some))
        for depth in range(max((len(plan.pieces) for plan in plans), default=0)):
            pieces = [plan.pieces[depth] for plan in plans if len(plan.pieces) > depth]
            for (width, num_blocks), part in batches(pieces, self._shape, lambda shape: self._rows(shape[0])):
                arrays.store = prefill(self._model, num_blocks, params, arrays.store, self._pieces(part, width))
        for (num_blocks, _), group in batches(planned, self._admission_shape, lambda shape: COPIED_ROWS):
            admission = self._admission(group, group[0][1])
            arrays.slots = admit(self._model, num_blocks, arrays.slots, arrays.store, self._seed, admission)
            for slot, request, _ in group:
                self._touched[slot] = num_blocks_for(len(request.prompt_ids), self.length)
        self._prefixes.commit()
        self.counts.prefilled_tokens += sum(len(piece.tokens) for plan in plans for piece in plan.pieces)
        self.counts.reused_tokens += sum(plan.reused_tokens for plan in plans)

    def _admission_shape(self, seat: tuple[int, Request, PrefillPlan]) -> tuple[int, int]:
        """The number of cache blocks that an admission writes, and the number of the request's key ids.

        The blocks are those of the prompt, or those that the slot's last request left, where these are more: they are
        cleared.
        """
        slot, request, _ = seat
        return max(num_blocks_for(len(request.prompt_ids) - 1, self.length), self._touched[slot]), len(request.key_ids)

    def _shape(self, piece: PrefillChunk) -> tuple[int, int]:
        return piece.width, num_blocks_for(piece.start + len(piece.tokens), self.length)

    def _rows(self, width: int) -> int:
        return self._shares * max(1, self._prefill_tokens // width)

    def _pieces(self, pieces: Sequence[PrefillChunk], width: int) -> PrefillChunks:
        rows = self._rows(width)
        tokens = np.zeros((rows, width), np.int32)
        for row, piece in zip(tokens, pieces, strict=False):
            row[: len(piece.tokens)] = piece.tokens
        starts = column([piece.start for piece in pieces], rows, 0, np.int32)
        return PrefillChunks(
            tokens, starts, column([piece.row for piece in pieces], rows, self.prefix_cache_rows, np.int32)
        )

    def _copies(self, copies: Sequence[Copy]) -> tuple[Int[np.ndarray, "P"], Int[np.ndarray, "P"]]:
        beyond = self.prefix_cache_rows
        return (
            column([copy.source for copy in copies], COPIED_ROWS, beyond, np.int32),
            column([copy.target for copy in copies], COPIED_ROWS, beyond, np.int32),
        )

    def _admission(self, seats: Sequence[tuple[int, Request, PrefillPlan]], filler: Request) -> Admission:
        requests = [request for _, request, _ in seats]
        requests += [filler] * (COPIED_ROWS - len(seats))
        lengths = [len(request.prompt_ids) for request in requests]
        stops = np.full((COPIED_ROWS, MAX_STOP_IDS), -1, np.int32)
        biased: Any = np.full((COPIED_ROWS, MAX_BIASED_IDS), -1, np.int32)
        biases: Any = np.zeros((COPIED_ROWS, MAX_BIASED_IDS), np.float32)
        for row, request in enumerate(requests):
            stops[row, : len(request.stop_ids)] = request.stop_ids
            for place, (token, value) in enumerate(request.logit_bias):
                biased[row, place], biases[row, place] = token, value

        def of_each(name: str, dtype: Any) -> Any:
            return np.array([vars(request)[name] for request in requests], dtype)

        return Admission(
            stored=column([plan.row for _, _, plan in seats], COPIED_ROWS, self.prefix_cache_rows, np.int32),
            slots=column([slot for slot, _, _ in seats], COPIED_ROWS, self.slots, np.int32),
            tokens=np.array([request.prompt_ids[-1] for request in requests], np.int32),
            positions=np.array(lengths, np.int32) - 1,
            sampling=SamplingParams(
                of_each("temperature", np.float32),
                of_each("top_k", np.int32),
                of_each("top_p", np.float32),
                of_each("min_p", np.float32),
                LogitBias(biased, biases),
            ),
            key_ids=of_each("key_ids", np.uint32),
            stop_ids=stops,
            limits=np.array(
                [min(n + request.max_tokens, self.length) for n, request in zip(lengths, requests, strict=True)],
                np.int32,
            ),
        )


def column(values: Sequence[int], rows: int, filler: int, dtype: Any) -> Any:
    """The values as an array of `rows`, filled up.

    >>> column([3, 1], 4, 9, np.int32).tolist()
    [3, 1, 9, 9]
    """
    return np.array([*values, *[filler] * (rows - len(values))], dtype)


def batches(
    items: Iterable[T], shape_of: Callable[[T], Any], rows_of: Callable[[Any], int]
) -> Iterator[tuple[Any, list[T]]]:
    """Items of the same shape together, in the order in which they came, as many at once as the shape allows.

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
