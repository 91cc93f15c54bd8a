"""Runs the model for an engine on the device thread: prefills chunks of prompts, copies pages, and decodes tokens.

The runner has the arrays and calls the programs on them; which requests, pages and slots take part is the scheduler's
choice. Compiled shapes follow from the sizes of the runner; `warm_up` compiles all programs. On a CPU, few requests
are decoded by a program of few rows, so that a long request does not make all rows as long.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Bool, Int

from jaxft.core.cache import (
    PAGE_TOKENS,
    SharedTables,
    compute_dtype,
    find_shared_pages,
    no_shared_pages,
    pages_for,
    row_shards,
)
from jaxft.core.decode import Masks, SampledTokens
from jaxft.core.sampling import LogitBias, Penalties, SamplingParams
from jaxft.core.sharding import commit_like, compute_platform, device_bytes
from jaxft.core.types import Cache, Model, Params
from jaxft.models.config import DecoderConfig
from jaxft.models.paged import gather_experts
from jaxft.rollout.adapters import Adapter, AdapterStack
from jaxft.rollout.calls import TopLogprobs, encode_experts
from jaxft.rollout.decode_batch import (
    MAX_BIASED_IDS,
    MAX_STOP_IDS,
    Admission,
    DecodeBatch,
    PrefillChunks,
    admit,
    advance,
    advance_masked,
    compute_logits,
    copy,
    empty_arrays,
    most_likely,
    page_shapes,
    prefill,
    prefill_programs,
    slot_shapes,
    split_batch,
)
from jaxft.rollout.device import warm_up_rounds
from jaxft.rollout.grammar import Constraint, LateEnd, Penalized
from jaxft.rollout.requests import Request

DISPATCH_TOKENS = (2, 8)
"""Numbers of tokens that a program decodes: few, to end with a request that others wait for, or many."""

ADMISSION_ROWS = 8
"""Rows of the programs that put requests into slots or copy pages."""

LEAST_COUNTS = 1024
"""Least number of distinct tokens of a row that a program with penalties has room for; larger ones are powers of 2."""

FEW_ROWS, FEW_SHARE = {"cpu": 4}, 8
"""Least rows of the program for few requests, by platform, and the share of the slots that it has where that is more;
other platforms decode all slots in one program."""


class PrefillChunk(NamedTuple):
    """Tokens of a prompt to prefill, from the beginning of a page on; `pages` are those of the whole prompt."""

    shard: int
    start: int
    tokens: Sequence[int]
    pages: Sequence[int]
    adapter: Adapter | None = None


class PageCopy(NamedTuple):
    """A page of a row shard to be copied to another page of it."""

    shard: int
    source: int
    target: int


class PrefillRow(NamedTuple):
    """A slot to decode: its pages, the number of its tokens so far, prompt included, and its adapter."""

    slot: int
    pages: Sequence[int]
    num_tokens: int
    adapter: Adapter | None = None


@dataclass
class Counts:
    """Numbers of tokens so far: prompt tokens prefilled and reused from the prefix cache, and tokens sampled.

    `decode_steps` are those of programs that decode, each of which reads the weights, and `seen_tokens` the tokens
    whose keys and values all rows read in them.
    """

    prefilled_tokens: int = 0
    reused_tokens: int = 0
    decoded_tokens: int = 0
    decode_steps: int = 0
    seen_tokens: int = 0


@dataclass
class _Arrays:
    """The arrays of a runner."""

    cache: Cache
    slots: DecodeBatch


Dispatch = list[tuple[tuple[int, ...], bool, Any]]
"""Programs that decode: their slots, whether they have a row for these only, and their results on the device."""


class ModelRunner:
    """Owns pages and slots, and runs the programs on them; the arrays are allocated on first use.

    Attributes:
        slots: number of requests that decode together.
        length: maximum number of tokens of a request.
        row_shards: number of shards of slots and pages.
        num_pages: number of pages of each row shard.
        counts: the numbers of tokens so far.
    """

    def __init__(
        self,
        model: Model,
        *,
        seed: int,
        slots: int,
        length: int,
        cache_tokens: int | None = None,
        platform: str | None = None,
    ) -> None:
        """Make a runner.

        Args:
            model: the model to run.
            seed: seed of the run's key.
            slots: number of requests that decode together.
            length: maximum number of tokens of a request.
            cache_tokens: tokens that the pages hold in all; None for as many as all slots can need.
            platform: platform of an abstract mesh; None for that of the model's devices.

        Raises:
            ValueError: slots do not divide over the row shards, or the pages of a shard do not hold one request.
        """
        self.slots, self.length, self.row_shards = slots, length, row_shards(model)
        if model.sharding is not None:
            model.sharding.check_rows(slots, "slots")
        self.columns = pages_for(length)
        in_all = slots * self.columns if cache_tokens is None else pages_for(cache_tokens)
        self.num_pages = in_all // self.row_shards
        if self.num_pages < self.columns:
            raise ValueError(
                f"cache_tokens is {cache_tokens}: {self.num_pages} pages of {PAGE_TOKENS} tokens on each of "
                f"{self.row_shards} row shards; wanted at least {self.columns * PAGE_TOKENS * self.row_shards}, which "
                f"hold a request of {length} tokens on each"
            )
        self.counts = Counts()
        self._model = model
        self._seed = np.asarray(jax.random.key_data(jax.random.key(seed, impl="threefry2x32")))
        platform = platform or compute_platform(model.sharding)
        self._programs = prefill_programs(platform, slots // self.row_shards, length, self.num_pages)
        self._warm_up_rounds = warm_up_rounds(platform)
        self._shares_pages = platform == "gpu" and isinstance(model.config, DecoderConfig)
        self._has_experts = isinstance(model.config, DecoderConfig) and model.config.expert_table is not None
        least, self._few_rows = FEW_ROWS.get(platform), None
        if least is not None and model.sharding is None and slots >= 4 * least:
            self._few_rows = max(least, slots // FEW_SHARE)
        self._arrays: _Arrays | None = None
        self._adapters = AdapterStack()

    def cache_bytes(self, dtype: Any) -> int:
        """Return the bytes per device of the pages, allocated yet or not."""
        cache = jax.eval_shape(lambda: self._model.init_cache(self.num_pages * self.row_shards, dtype))
        devices = 1 if self._model.sharding is None else self._model.sharding.devices  # pages and heads divide over all
        return device_bytes(None, cache) // devices

    def reset(self) -> None:
        """Drop all arrays, which may have been donated to a call that failed."""
        self._arrays, self._adapters = None, AdapterStack()

    def chunk_width(self, tokens: int) -> int:
        """Return the width of the programs that prefill the next chunk of so many tokens."""
        return min((width for width, _ in self._programs if width >= tokens), default=self._programs[-1][0])

    def chunk_rows(self, width: int) -> int:
        """Return the rows on each row shard of the largest program that prefills chunks of this width."""
        return max(rows for each, rows in self._programs if each == width)

    def prefill(self, params: Params, chunks: Sequence[PrefillChunk], width: int) -> None:
        """Prefill chunks of one width, at most `chunk_rows` on each row shard, by the smallest program for them."""
        arrays, by_shard = self._make_programs(params), _by_shard(chunks, self.row_shards)
        rows = min(rows for each, rows in self._programs if each == width and rows >= max(map(len, by_shard)))
        arrays.cache = prefill(self._model, params, arrays.cache, self._chunks(by_shard, width, rows))
        self.counts.prefilled_tokens += sum(len(chunk.tokens) for chunk in chunks)

    def copy(self, params: Params, copies: Sequence[PageCopy]) -> None:
        """Copy pages, all of them at once."""
        arrays, by_shard = self._make_programs(params), _by_shard(copies, self.row_shards)
        for start in range(0, max(map(len, by_shard)), ADMISSION_ROWS):
            chosen = [of_shard[start : start + ADMISSION_ROWS] for of_shard in by_shard]
            arrays.cache = copy(self._model, arrays.cache, *self._copies(chosen))

    def admit(self, params: Params, requests: Sequence[tuple[int, Request]]) -> None:
        """Put requests into slots; each comes with its slot."""
        arrays = self._make_programs(params)
        by_keys: dict[int, list[tuple[int, Request]]] = {}
        for slot, request in requests:
            by_keys.setdefault(len(request.key_ids), []).append((slot, request))
        for alike in by_keys.values():
            for start in range(0, len(alike), ADMISSION_ROWS):
                admission = self._admission(alike[start : start + ADMISSION_ROWS], filler=alike[0][1])
                arrays.slots = admit(self._model, arrays.slots, self._seed, admission)

    def advance(self, params: Params, rows: Sequence[PrefillRow], num_steps: int, *, is_filtered: bool) -> Dispatch:
        """Queue programs that decode `num_steps` tokens of each row, and return their results, to be read later."""
        arrays, dispatch = self._make_programs(params), []
        for slots, is_few, tables, chosen in self._split(rows, num_steps):
            arrays.cache, arrays.slots, *results = advance(
                self._model, num_steps, is_filtered, params, arrays.cache, arrays.slots, tables, chosen
            )
            dispatch.append((slots, is_few, results))
        return dispatch

    def advance_masked(
        self,
        params: Params,
        rows: Sequence[PrefillRow],
        constraints: Mapping[int, Constraint | LateEnd | Penalized],
        vocabulary: int,
        *,
        is_filtered: bool,
    ) -> Dispatch:
        """Queue programs that decode one token of each row, while the host makes the masks of some; see `advance`.

        Args:
            params: weights to decode with.
            rows: rows to decode.
            constraints: what limits the next token of a slot, by slot.
            vocabulary: number of tokens of a mask.
            is_filtered: as for `advance`.
        """
        model, arrays, dispatch = self._model, self._make_programs(params), []
        for slots, is_few, tables, chosen in self._split(rows, 1):
            arrays.cache, logits = compute_logits(model, params, arrays.cache, arrays.slots, tables, chosen)
            masked = [(row if is_few else slot, slot) for row, slot in enumerate(slots) if slot in constraints]
            size = len(chosen) if self._few_rows is None or len(masked) > self._few_rows else self._few_rows
            numbers: Any = np.full(size, len(chosen), np.int32)
            numbers[: len(masked)] = [row for row, _ in masked]
            allowed = np.zeros((size, -(-vocabulary // 32)), np.uint32)
            for words, (_, slot) in zip(allowed, masked, strict=False):
                constraints[slot].write_mask(words)
            masks = Masks(numbers, allowed, _penalties(size, [constraints[slot] for _, slot in masked]))
            arrays.slots, *results = advance_masked(model, is_filtered, arrays.slots, chosen, masks, logits)
            dispatch.append((slots, is_few, results))
        return dispatch

    def _split(self, rows: Sequence[PrefillRow], num_steps: int) -> Iterator[tuple[tuple[int, ...], bool, Any, Any]]:
        """Yield slots of each program, whether it has few rows, its page tables, and the choice of its slots."""
        pages, adapters = {row.slot: row.pages for row in rows}, {row.slot: row.adapter for row in rows}
        columns = {row.slot: pages_for(row.num_tokens + num_steps - 1) for row in rows}
        self.counts.seen_tokens += num_steps * sum(row.num_tokens for row in rows)
        for slots, is_few in split_batch(columns, self.slots, self._few_rows):
            if is_few:
                assert self._few_rows is not None
                chosen: Any = np.full(self._few_rows, self.slots, np.int32)
                chosen[: len(slots)] = slots
                few: Any = self._tables([pages[slot] for slot in slots], self._few_rows)
                few = self._adapters.beside(few, [adapters[slot] for slot in slots], self._few_rows)
                yield slots, True, few, chosen
            else:
                tables: Any = self._tables([pages.get(slot, ()) for slot in range(self.slots)], self.slots)
                if self._shares_pages and num_steps == max(DISPATCH_TOKENS):
                    whole = np.zeros(self.slots, np.int32)
                    whole[list(pages)] = [(row.num_tokens - 1) // PAGE_TOKENS for row in rows]
                    shared = find_shared_pages(tables, whole, self.row_shards)
                    tables = tables if shared is None else SharedTables(tables, shared)
                is_chosen = np.isin(np.arange(self.slots), slots)
                own = [adapters[slot] if is_chosen[slot] else None for slot in range(self.slots)]
                yield slots, False, self._adapters.beside(tables, own, self.slots), is_chosen
            self.counts.decode_steps += num_steps

    def read(self, dispatch: Dispatch) -> tuple[SampledTokens, Bool[np.ndarray, "R"]]:
        """Wait for a dispatch, and return its tokens in one table of all slots, and which slots go on."""
        read = jax.device_get([results for _, _, results in dispatch])
        width = max(sampled.tokens.shape[1] for sampled, _ in read)
        supports = read[0][0].supports
        tables: list[Any] = [np.zeros((self.slots, width), dtype) for dtype in (np.int32, np.float32, np.float32)]
        tables += [np.zeros(self.slots, dtype) for dtype in (np.int32, bool)]
        if supports is not None:
            tables.append(np.zeros((self.slots, width, supports.shape[2]), np.uint32))
        for (slots, is_few, _), (sampled, active) in zip(dispatch, read, strict=True):
            chosen, rows = list(slots), slice(len(slots)) if is_few else list(slots)
            parts = [*sampled[:4], active, *([] if supports is None else [sampled.supports])]
            for whole, part in zip(tables, parts, strict=True):
                whole[chosen] = part[rows]
        self.counts.decoded_tokens += int(tables[3].sum())
        return SampledTokens(*tables[:4], *tables[5:]), tables[4]

    def read_experts(self, shard: int, pages: Sequence[int], start: int, end: int) -> list[str]:
        """Return the experts (`encode_experts`) of the tokens `start` to `end` of a row; empty for a dense model."""
        if not self._has_experts or self._arrays is None:
            return []
        found = gather_experts(self._model.sharding, self._arrays.cache, self._page_numbers(shard, pages))
        return encode_experts(jax.device_get(found)[start:end])

    def _page_numbers(self, shard: int, pages: Sequence[int]) -> Int[np.ndarray, "C"]:
        return self.num_pages * shard + np.pad(np.array(pages, np.int32), (0, self.columns - len(pages)))

    def top_logprobs(self, params: Params, request: Request, token_ids: Sequence[int], count: int) -> list[TopLogprobs]:
        """Return the most likely tokens, at most `count`, at the position of each sampled token of a completion.

        The whole row is computed again after the completion has ended, so that requests without `top_logprobs` cost
        nothing; values differ from those of the sampler by rounding. One program serves all requests.
        """
        fed = [*request.prompt_ids, *token_ids][:-1]
        rows = np.zeros((self.row_shards, self.columns * PAGE_TOKENS), np.int32)
        rows[:, : len(fed)] = fed
        adapted = None if request.adapter is None else self._adapters.beside(rows, [request.adapter], len(rows))
        values, ids = jax.device_get(
            most_likely(self._model, params, rows, np.int32(len(fed)), np.float32(request.temperature), count, adapted)
        )
        positions, chosen = range(len(request.prompt_ids) - 1, len(fed)), slice(request.top_logprobs)
        return [tuple(zip(ids[i, chosen].tolist(), values[i, chosen].tolist(), strict=True)) for i in positions]

    def warm_up(self, params: Params) -> None:
        """Run every program that requests can need, and on GPUs all of them twice more; see `warm_up_rounds`."""
        model, arrays = self._model, self._make_programs(params)
        for _ in range(self._warm_up_rounds):
            for chunks in self._no_chunks().values():
                arrays.cache = prefill(model, params, arrays.cache, chunks)
            arrays.cache = copy(model, arrays.cache, *self._copies([[]] * self.row_shards))
            arrays.slots = admit(model, arrays.slots, self._seed, self._admission([], Request((0,), (0,) * 6, 1)))
            for num_steps, is_filtered, *rows in self._decoding():
                arrays.cache, arrays.slots, *_ = advance(
                    model, num_steps, is_filtered, params, arrays.cache, arrays.slots, *rows
                )
            self.read_experts(0, [], 0, 0)
            jax.block_until_ready((arrays.cache, arrays.slots))

    def warm_up_programs(self, params: Params) -> dict[str, Callable[[], Any]]:
        """Return functions that lower the programs of `warm_up`, by name.

        Args:
            params: the weights to decode with, or their shapes with shardings.
        """
        model = self._model
        cache = page_shapes(model, self.num_pages * self.row_shards, compute_dtype(params))
        slots = slot_shapes(model, self.slots)
        programs: dict[str, Callable[[], Any]] = {
            name: partial(prefill.lower, model, params, cache, chunks) for name, chunks in self._no_chunks().items()
        }
        if self._has_experts:
            programs["experts"] = partial(gather_experts.lower, model.sharding, cache, self._page_numbers(0, []))
        programs["copy"] = partial(copy.lower, model, cache, *self._copies([[]] * self.row_shards))
        filler = Request((0,), (0,) * 6, 1)
        programs["admit"] = partial(admit.lower, model, slots, self._seed, self._admission([], filler))
        for num_steps, is_filtered, tables, chosen in self._decoding():
            kind = ["few"] * (len(chosen) < self.slots) + ["filtered"] * is_filtered
            kind += ["shared"] * isinstance(tables, SharedTables)
            lower = partial(advance.lower, model, num_steps, is_filtered, params, cache, slots, tables, chosen)
            programs["_".join(["decode", *kind, str(num_steps)])] = lower
        return programs

    def programs(self, params: Params) -> dict[str, Callable[[], Any]]:
        """Return functions that lower the largest programs of sampling: `prefill`, `decode` and `decode_filtered`.

        Args:
            params: the weights to decode with, or their shapes with shardings.
        """
        programs, most = self.warm_up_programs(params), max(DISPATCH_TOKENS)
        prefills = self._no_chunks()
        return {
            "prefill": programs[max(prefills, key=lambda name: prefills[name].tokens.size)],
            "decode": programs[f"decode_{most}"],
            "decode_filtered": programs[f"decode_filtered_{most}"],
        }

    def _decoding(self) -> list[tuple[int, bool, Any, Any]]:
        """Return the arguments of each program that decodes: steps, filters, tables, and a choice of no slot."""
        rows: list[tuple[Any, Any]] = [(self._tables([], self.slots), np.zeros(self.slots, bool))]
        if (few := self._few_rows) is not None:
            rows.append((self._tables([], few), np.full(few, self.slots, np.int32)))
        decoding = [
            (num_steps, is_filtered, tables, chosen)
            for (tables, chosen), num_steps, is_filtered in product(rows, DISPATCH_TOKENS, (False, True))
        ]
        if self._shares_pages:
            tables, chosen = rows[0]
            tables = SharedTables(tables, no_shared_pages(self.slots, self.row_shards))
            decoding += [(max(DISPATCH_TOKENS), is_filtered, tables, chosen) for is_filtered in (False, True)]
        return decoding

    def _make_programs(self, params: Params) -> _Arrays:
        if self._arrays is None:
            pages = self.num_pages * self.row_shards
            made = empty_arrays(self._model, pages, compute_dtype(params), self.slots)
            self._arrays = _Arrays(*commit_like(params, made))
        return self._arrays

    def _tables(self, pages: Sequence[Sequence[int]], rows: int) -> Int[np.ndarray, "B C"]:
        """Return the page tables of rows, whose pages are numbered within their row shards."""
        tables = np.zeros((rows, self.columns), np.int32)
        for row, numbers in zip(tables, pages, strict=False):
            row[: len(numbers)] = numbers
        shards = np.arange(rows, dtype=np.int32) // (rows // self.row_shards)
        return tables + self.num_pages * shards[:, None]

    def _no_chunks(self) -> dict[str, PrefillChunks]:
        """Return the arguments of each program that prefills, without a chunk, by the name of the program."""
        empty: list[list[PrefillChunk]] = [[]] * self.row_shards
        return {f"prefill_{rows}x{width}": self._chunks(empty, width, rows) for width, rows in self._programs}

    def _chunks(self, by_shard: Sequence[Sequence[PrefillChunk]], width: int, each: int) -> PrefillChunks:
        """Return chunks of a width for a program of `each` rows on each row shard."""
        rows = each * self.row_shards
        tokens = np.zeros((rows, width), np.int32)
        pages: list[Sequence[int]] = [()] * rows
        adapters: list[Adapter | None] = [None] * rows
        starts, counts = np.zeros((2, rows), np.int32)
        for shard, of_shard in enumerate(by_shard):
            for row, chunk in enumerate(of_shard, shard * each):
                tokens[row, : len(chunk.tokens)] = chunk.tokens
                starts[row], counts[row], pages[row] = chunk.start, len(chunk.tokens), chunk.pages
                adapters[row] = chunk.adapter
        return PrefillChunks(tokens, starts, counts, self._adapters.beside(self._tables(pages, rows), adapters, rows))

    def _copies(self, by_shard: Sequence[Sequence[PageCopy]]) -> tuple[Int[np.ndarray, "D P"], Int[np.ndarray, "D P"]]:
        sources = np.full((self.row_shards, ADMISSION_ROWS), self.num_pages, np.int32)
        targets = sources.copy()
        for shard, copies in enumerate(by_shard):
            for index, each in enumerate(copies):
                sources[shard, index], targets[shard, index] = each.source, each.target
        return sources, targets

    def _admission(self, admitted: Sequence[tuple[int, Request]], filler: Request) -> Admission:
        requests = [request for _, request in admitted]
        requests += [filler] * (ADMISSION_ROWS - len(admitted))
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

        slots = np.full(ADMISSION_ROWS, self.slots, np.int32)
        slots[: len(admitted)] = [slot for slot, _ in admitted]
        return Admission(
            slots=slots,
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


def _penalties(rows: int, constraints: Sequence[Constraint | LateEnd | Penalized]) -> Penalties | None:
    """Return the penalties of the first rows of a program, which have these constraints; None if there is none."""
    counts = {row: each for row, each in enumerate(constraints) if isinstance(each, Penalized)}
    if not counts:
        return None
    most = max(len(each.counts) for each in counts.values())
    table = np.zeros((2, rows, max(LEAST_COUNTS, 1 << (most - 1).bit_length())), np.int32)
    table[0] = -1
    weights = np.repeat(np.array([[1], [0], [0]], np.float32), rows, axis=1)
    for row, each in counts.items():
        table[:, row, : len(each.counts)] = list(each.counts), list(each.counts.values())
        weights[:, row] = each.penalties
    return Penalties(*table, *weights)


def _by_shard(items: Sequence[Any], shards: int) -> list[list[Any]]:
    by_shard: list[list[Any]] = [[] for _ in range(shards)]
    for item in items:
        by_shard[item.shard].append(item)
    return by_shard
