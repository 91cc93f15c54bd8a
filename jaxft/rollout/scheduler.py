"""The scheduler of an engine: which requests have slots and pages, and what is prefilled and decoded next.

Requests are served in the order in which they came. One that needs pages when none is left takes them from the
youngest. A scheduler touches no device: `Engine` hands its choices to a `ModelRunner`. Only the experts of a request
are read before it loses its pages.

Equal beginnings of prompts are held once, whoever holds them. Cached pages that nobody holds are the first to be
evicted, the least recently held before others.
"""

import asyncio
import copy
import hashlib
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np

from jaxft.core.cache import PAGE_TOKENS, pages_for
from jaxft.rollout.calls import Completion
from jaxft.rollout.grammar import Constraint, LateEnd, Penalized
from jaxft.rollout.model_runner import DISPATCH_TOKENS, ModelRunner, PageCopy, PrefillChunk, PrefillRow
from jaxft.rollout.requests import Request

OnTokens = Callable[[list[int], list[float]], None]
"""Function of new token ids and their log-probabilities, called in the event loop of the request."""


def page_keys(tokens: Sequence[int], adapter: int = 0) -> list[bytes]:
    """Return a key for each page that holds these tokens: a digest of all tokens up to the end of the page.

    Args:
        tokens: the tokens.
        adapter: number of the adapter that the tokens are read with; 0 for none.

    >>> a, b = page_keys(range(100)), page_keys([*range(99), 7])
    >>> len(a), a[0] == b[0], a[1] == b[1], a[0] == page_keys(range(100), adapter=1)[0]
    (2, True, False, False)
    """
    data, size = np.asarray(tokens, np.int32).tobytes(), 4 * PAGE_TOKENS
    keys, last = [], hashlib.sha256(b"%d" % adapter).digest() if adapter else b""
    for start in range(0, len(data), size):
        last = hashlib.sha256(last + data[start : start + size]).digest()
        keys.append(last)
    return keys


class PagePool:
    """The allocator of one row shard.

    Attributes:
        num_pages: number of pages.
        pending: keys of pages that a request is computing now. A request that needs one of them waits for it.
    """

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self.pending: set[bytes] = set()
        self._num_used = 0  # pages from here on have never been taken
        self._free: list[int] = []  # the last one freed, whose bytes are the nearest, is the next taken
        self._holders: dict[int, int] = {}
        self._pages: dict[bytes, int] = {}
        self._keys: dict[int, bytes] = {}
        self._cached: dict[int, None] = {}  # pages with a key that nobody holds, the least recently held first

    @property
    def num_available(self) -> int:
        """Number of pages that can be taken: free ones, and cached ones that nobody holds."""
        return self.num_pages - self._num_used + len(self._free) + len(self._cached)

    @property
    def num_held(self) -> int:
        """Number of pages that requests hold."""
        return self.num_pages - self.num_available

    def find(self, keys: Sequence[bytes]) -> list[int]:
        """Return the cached pages of the longest beginning of a prompt, by the keys of its pages.

        >>> pool, keys = PagePool(4), page_keys(range(150))
        >>> pages = [pool.take() for _ in keys]
        >>> pool.record(keys[0], pages[0]), pool.record(keys[1], pages[1])
        (None, None)
        >>> pool.find(keys) == pages[:2], pool.find(page_keys(range(1, 150)))
        (True, [])
        """
        pages = []
        for key in keys:
            if key not in self._pages:
                break
            pages.append(self._pages[key])
        return pages

    def is_held(self, page: int) -> bool:
        """True if a request holds the page."""
        return self._holders.get(page, 0) > 0

    def hold(self, page: int) -> None:
        """Hold a page once more."""
        self._holders[page] = self._holders.get(page, 0) + 1
        self._cached.pop(page, None)

    def take(self) -> int:
        """Return a page that is held now and holds nothing; a cached one is evicted if no page is free.

        Raises:
            IndexError: no page is available.
        """
        if self._free:
            page = self._free.pop()
        elif self._num_used < self.num_pages:
            page, self._num_used = self._num_used, self._num_used + 1
        elif self._cached:
            page = next(iter(self._cached))
            self._forget(page)
        else:
            raise IndexError(f"all {self.num_pages} pages are held")
        self._holders[page] = 1
        return page

    def record(self, key: bytes, page: int) -> None:
        """Record that a page has been computed, under the key of its tokens."""
        self.pending.discard(key)
        if key not in self._pages and page not in self._keys:
            self._pages[key], self._keys[page] = page, key

    def release(self, pages: Sequence[int]) -> None:
        """Release pages of a row, in the order of its tokens: its beginning is the last to be evicted."""
        for page in reversed(pages):
            self._holders[page] -= 1
            if self._holders[page]:
                continue
            if page in self._keys:
                self._cached[page] = None
            else:
                self._free.append(page)

    def clear(self) -> None:
        """Forget what cached pages hold, as the weights change."""
        for page in list(self._keys):
            self._forget(page)
            if not self.is_held(page):
                self._free.append(page)

    def _forget(self, page: int) -> None:
        del self._pages[self._keys.pop(page)]
        self._cached.pop(page, None)


@dataclass(eq=False)
class Running:
    """A request from its submission to its end.

    Attributes:
        num_streamed: number of tokens that `on_tokens` was given.
        streamed: the completion with these tokens, after a preemption without them; None before one.
        error: an error of this request alone.
        current: the request to decode. After a preemption that kept its tokens, they belong to the prompt.
        keys: keys of the pages of that prompt without the last token, which the first decoding step takes.
        slot: slot and, with `pages`, what it holds; None while it waits.
        shard: row shard of slot and pages.
        pages: its pages, in the order of its tokens.
        prefilled: number of prompt tokens in its pages.
        reach: number of its tokens after all dispatches that were queued.
        attempt: number of times that it got a slot: results of an earlier attempt are dropped.
        keeps_tokens: True if the weights have changed since it began: sampled again, its tokens would be others.
        constraint: the position of its answer in its grammar, and counts for penalties; None without them, or once the
            constraint is over.
    """

    request: Request
    future: "asyncio.Future[Completion]"
    on_tokens: OnTokens | None = None
    completion: Completion = field(init=False)
    num_streamed: int = 0
    streamed: Completion | None = None
    error: Exception | None = None
    current: Request = field(init=False)
    keys: list[bytes] = field(init=False)
    slot: int | None = None
    shard: int = 0
    pages: list[int] = field(default_factory=list)
    prefilled: int = 0
    reach: int = 0
    attempt: int = 0
    keeps_tokens: bool = False
    constraint: Constraint | LateEnd | Penalized | None = None

    def __post_init__(self) -> None:
        self.begin()

    def begin(self, begun: Completion | None = None) -> None:
        """Begin the answer, or begin it again, behind `begun` or else what an earlier request sampled of it."""
        self.completion = copy.deepcopy(begun or self.request.begun or Completion())
        begin = self.request.begin_constraint
        self.constraint = None if begin is None else begin()
        if self.request.is_penalized:
            self.constraint = Penalized(self.constraint, self.request.prompt_ids, self.request.penalties)
        if self.constraint is not None:
            self.constraint.feed(self.completion.token_ids)
            self.constraint = None if self.constraint.is_over else self.constraint
        if self.request.find_stop is not None and self.completion.token_ids:
            self.request.find_stop(self.completion.token_ids, 0)  # it goes on from where it has searched
        self.decode_from(self.completion.token_ids)

    def decode_from(self, sampled: Sequence[int]) -> None:
        """Begin to decode after these tokens of the answer."""
        left = self.request.max_tokens - len(sampled)
        self.current = replace(self.request, prompt_ids=(*self.request.prompt_ids, *sampled), max_tokens=left)
        adapter = 0 if self.request.adapter is None else self.request.adapter.number
        self.keys = page_keys(self.current.prompt_ids[:-1], adapter)

    @property
    def num_fed(self) -> int:
        """Number of prompt tokens to prefill: all but the last."""
        return len(self.current.prompt_ids) - 1

    @property
    def is_behind(self) -> bool:
        """True if it has not sampled again all tokens that it has streamed."""
        return len(self.completion.token_ids) < self.num_streamed

    @property
    def is_prefilled(self) -> bool:
        """True if its prompt is in its pages."""
        return self.prefilled == self.num_fed

    @property
    def is_abandoned(self) -> bool:
        """True if nothing waits for it any more."""
        return self.future.cancelled() or self.future.get_loop().is_closed()


class Admitted(NamedTuple):
    """Requests that got slots, and the pages to be copied before they decode."""

    requests: list[tuple[int, Request]]
    copies: list[PageCopy]


class Scheduler:
    """The slots and pages of an engine.

    Everything but `waiting` belongs to the device thread.

    Attributes:
        running: requests by slot, in the order of admission.
        waiting: requests without a slot, the next one first; guarded by `lock`.
        pools: the pages of each row shard.
        keeps_tokens: True if a request that loses its pages goes on from the tokens that it has, False if it samples
            them again.
    """

    def __init__(self, runner: ModelRunner, max_context_tokens: int, *, keeps_tokens: bool) -> None:
        self._runner = runner
        self._max_context_tokens = max_context_tokens
        self.keeps_tokens = keeps_tokens
        self.lock = threading.Lock()
        self.running: dict[int, Running] = {}
        self.waiting: deque[Running] = deque()
        self.pools = self._new_pools()

    @property
    def has_begun(self) -> bool:
        """True if a request runs, or has begun and waits for pages again."""
        with self.lock:
            return bool(self.running) or any(waiting.attempt for waiting in self.waiting)

    @property
    def num_decoding(self) -> int:
        """Number of requests whose prompts are in their pages."""
        return sum(running.is_prefilled for running in self.running.values())

    def reset(self) -> list[Running]:
        """Drop all requests and pages; return the requests."""
        with self.lock:
            dropped = [*self.running.values(), *self.waiting]
            self.running.clear()
            self.waiting.clear()
        self.pools = self._new_pools()
        return dropped

    def clear_prefix_cache(self) -> None:
        """Forget which prompts pages hold."""
        for pool in self.pools:
            pool.clear()

    def change_weights(self) -> None:
        """Let all requests go on from their tokens, and forget which prompts pages hold.

        Those whose prompts are not in their pages yet wait for slots and pages again. So do those that have lost
        streamed tokens, which they get back.
        """
        for running in reversed([each for each in self.running.values() if not each.is_prefilled or each.is_behind]):
            self._preempt(running)
        with self.lock:
            behind = [waiting for waiting in self.waiting if waiting.is_behind]
        for waiting in behind:
            waiting.begin(waiting.streamed)
        for running in (*self.running.values(), *behind):
            running.keeps_tokens = True
        self.clear_prefix_cache()

    def admit(self, *, is_draining: bool) -> Admitted:
        """Give slots and pages to waiting requests, the oldest first, as long as there are both.

        Args:
            is_draining: True to admit only those that have begun before.
        """
        with self.lock:
            waiting = list(self.waiting)
        admitted, gone = Admitted([], []), set()
        free = self._free_slots()
        for running in waiting:
            if running.is_abandoned:
                gone.add(running)
                continue
            if not any(free):
                break
            if is_draining and not running.attempt:
                continue
            shard = self._choose_shard(running, free)
            if shard is None:
                break  # no pages: younger requests wait, too
            if self._is_pending(running, shard):
                continue  # another request computes pages that this one needs
            slot = free[shard].popleft()
            admitted.copies.extend(self._take_pages(running, shard))
            running.slot, running.attempt = slot, running.attempt + 1
            self.running[slot] = running
            admitted.requests.append((slot, running.current))
            gone.add(running)
        if gone:
            with self.lock:
                self.waiting = deque(running for running in self.waiting if running not in gone)
        return admitted

    def next_chunks(self) -> tuple[list[PrefillChunk], int]:
        """Return as many chunks of prompts as one program takes, marked as prefilled, and their width.

        Those of one prompt may follow each other: in each layer a program writes all keys before it attends to any.
        """
        unfinished = [running for running in self.running.values() if not running.is_prefilled]
        if not unfinished:
            return [], 0
        width = self._runner.chunk_width(unfinished[0].num_fed - unfinished[0].prefilled)
        chunks, room = [], [self._runner.chunk_rows(width)] * len(self.pools)
        for running in unfinished:
            begun = running.prefilled
            while room[running.shard] and (left := running.num_fed - running.prefilled):
                if self._runner.chunk_width(left) != width:
                    break
                room[running.shard] -= 1
                start, end = running.prefilled, running.prefilled + min(left, width)
                tokens, adapter = running.current.prompt_ids[start:end], running.request.adapter
                chunks.append(PrefillChunk(running.shard, start, tokens, running.pages, adapter))
                running.prefilled = end
            for index in range(begun // PAGE_TOKENS, pages_for(running.prefilled)):
                self.pools[running.shard].record(running.keys[index], running.pages[index])
        return chunks, width

    def next_rows(self) -> tuple[list[tuple[Running, PrefillRow]], int]:
        """Return the rows to decode next and the number of tokens; reserve their pages and raise their `reach`."""
        # Requests that reach their limit end with what is queued.
        ready = [each for each in self.running.values() if each.is_prefilled and each.reach < self._limit(each)]
        if not ready:
            return [], 0
        left = [self._limit(running) - running.reach for running in ready]
        num_steps = dispatch_tokens(left, have_waiting=bool(self.waiting))
        if any(running.constraint is not None for running in ready):
            num_steps = 1  # the mask and the penalties of the next token depend on this one
        for running in ready:
            self._reserve(running, min(num_steps, self._limit(running) - running.reach))
        rows = [  # others gave their pages to older ones
            (running, PrefillRow(running.slot, running.pages, running.reach, running.request.adapter))
            for running in ready
            if running.slot is not None
        ]
        for running, _ in rows:
            running.reach = min(running.reach + num_steps, self._limit(running))
        return rows, num_steps

    def release(self, running: Running) -> None:
        """Free the slot and the pages of a request."""
        assert running.slot is not None
        pool = self.pools[running.shard]
        pool.pending.difference_update(running.keys[running.prefilled // PAGE_TOKENS :])
        pool.release(running.pages)
        del self.running[running.slot]
        running.pages, running.slot = [], None

    def record_experts(self, running: Running) -> None:
        """Read the experts of a request's tokens from its pages, as far as they are not known and all have been fed."""
        completion = running.completion
        known, end = len(completion.experts), len(running.request.prompt_ids) + len(completion.token_ids) - 1
        if completion.token_ids and running.is_prefilled and known < end:
            completion.experts += self._runner.read_experts(running.shard, running.pages, known, end)

    def _new_pools(self) -> list[PagePool]:
        return [PagePool(self._runner.num_pages) for _ in range(self._runner.row_shards)]

    def _free_slots(self) -> list[deque[int]]:
        """Return the free slots of each row shard, the lowest first."""
        free = [deque[int]() for _ in self.pools]
        for slot in range(self._runner.slots):
            if slot not in self.running:
                free[slot * len(self.pools) // self._runner.slots].append(slot)
        return free

    def _limit(self, running: Running) -> int:
        return min(len(running.request.prompt_ids) + running.request.max_tokens, self._max_context_tokens)

    def _choose_shard(self, running: Running, free: Sequence[Sequence[int]]) -> int | None:
        """Return the row shard that holds most of the prompt, of those with a free slot and pages enough; or None."""
        best: tuple[int, int, int] | None = None
        for shard, pool in enumerate(self.pools):
            if not free[shard]:
                continue
            found = pool.find(running.keys)
            shared = [page for page in found if not pool.is_held(page)]  # they are available, but not to be taken
            # A copy of the last page needs one more, and so may each running request soon.
            others = self._runner.slots // len(self.pools) - len(free[shard])
            needed = pages_for(running.num_fed + 1) - len(found) + 1 + others
            if pool.num_available - len(shared) >= needed or not others:
                known = len(found) + sum(key in pool.pending for key in running.keys)
                rank = known, len(free[shard]), -shard
                best = rank if best is None or rank > best else best
        return None if best is None else -best[2]

    def _is_pending(self, running: Running, shard: int) -> bool:
        """True if a page that the request needs next is being computed for another."""
        pool = self.pools[shard]
        found = len(pool.find(running.keys))
        return found < len(running.keys) and running.keys[found] in pool.pending

    def _take_pages(self, running: Running, shard: int) -> list[PageCopy]:
        """Give a request the pages of its prompt: cached ones, and new ones; return the copies to be made.

        Whole pages of the prompt are shared. The last one, which the answer goes on in, is its own.
        """
        pool, whole = self.pools[shard], running.num_fed // PAGE_TOKENS
        pages, copies = pool.find(running.keys), []
        for page in pages[:whole]:
            pool.hold(page)
        if len(pages) > whole:
            source = pages[whole]
            if pool.is_held(source):
                pages[whole] = pool.take()
                copies = [PageCopy(shard, source, pages[whole])]
            else:
                pool.hold(source)
        running.prefilled = min(len(pages) * PAGE_TOKENS, running.num_fed)
        self._runner.counts.reused_tokens += running.prefilled
        missing = running.keys[len(pages) :]
        pool.pending.update(missing)
        running.pages = pages + [pool.take() for _ in missing]
        running.shard, running.reach = shard, running.num_fed + 1
        return copies

    def _reserve(self, running: Running, num_steps: int) -> None:
        """Take the pages that a request needs for more tokens, from the youngest requests if none is left."""
        pool = self.pools[running.shard]
        while running.slot is not None and len(running.pages) < pages_for(running.reach + num_steps - 1):
            if pool.num_available:
                running.pages.append(pool.take())
                continue
            youngest = [other for other in self.running.values() if other.shard == running.shard][-1]
            self._preempt(youngest)

    def _preempt(self, running: Running) -> None:
        """Put a request back to the front of those that wait, with its tokens, or else to sample the same again."""
        keeps_tokens = self.keeps_tokens or running.keeps_tokens
        if keeps_tokens or running.num_streamed:
            self.record_experts(running)
        self.release(running)
        if keeps_tokens:
            running.decode_from(running.completion.token_ids)
        else:
            running.streamed = running.streamed if running.is_behind else running.completion
            running.begin()
        with self.lock:
            self.waiting.appendleft(running)


def dispatch_tokens(left: Sequence[int], *, have_waiting: bool) -> int:
    """Return the number of tokens to decode, by the number that each request has left at most.

    A request that ends keeps its slot to the end of the dispatch. While others wait for slots, a dispatch is so short
    that at most an eighth of its rows times steps are lost so; else it ends with the last request.

    >>> dispatch_tokens([1, 2, 2], have_waiting=True), dispatch_tokens([1] + 63 * [9], have_waiting=True)
    (2, 8)
    >>> dispatch_tokens([1, 2, 9], have_waiting=False), dispatch_tokens([1, 2, 2], have_waiting=False)
    (8, 2)
    """
    if not have_waiting:
        return min((count for count in DISPATCH_TOKENS if count >= max(left)), default=max(DISPATCH_TOKENS))
    lost = {count: sum(max(count - tokens, 0) for tokens in left) for count in DISPATCH_TOKENS}
    fitting = [count for count in DISPATCH_TOKENS if 8 * lost[count] <= count * len(left)]
    return max(fitting, default=min(DISPATCH_TOKENS))
