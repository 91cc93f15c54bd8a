"""The engine: decodes concurrent requests as one batch, each with the tokens that it would have alone.

Noise comes from a request's own key, and its row depends on its own tokens only. On a CPU neither the other requests
nor slots, pages, order or eviction change a bit: all programs compute a row alike, and prompts are computed page by
page, whatever is cached. On accelerators the width of a prompt's pieces follows from what is cached, so that
log-probabilities may differ by rounding; tokens then differ where two are almost equally likely.

This file is the scheduler: it gives slots and pages to waiting requests, prefills their prompts piece by piece between
dispatches of decoding, and delivers completions. `ModelRunner` has the arrays, a `PagePool` the free pages.
"""

import asyncio
import contextlib
import math
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from jaxft.core.cache import PAGE_TOKENS, pages_for
from jaxft.core.checks import vocabulary_size
from jaxft.core.sharding import platform_of
from jaxft.core.types import Model, Params
from jaxft.errors import DeviceMemoryError, DeviceThreadError, NonFiniteError
from jaxft.rollout.device import DeviceThread, first_line, is_out_of_memory, presentable
from jaxft.rollout.model_runner import DISPATCH_TOKENS, Counts, Decoded, Dispatch, ModelRunner, PageCopy, Piece, Row
from jaxft.rollout.page_pool import PagePool, page_keys
from jaxft.rollout.requests import MAX_TOP_LOGPROBS, Completion, Request, check_request

QUEUED_AHEAD = {"cpu": 0}
QUEUED_AHEAD_ELSEWHERE = 1
"""Dispatches that are queued, by platform, before the one before them is read, so that the device never waits for
Python. A CPU computes both, and would only decode rows that have ended."""

PROMPT_SHARE = {"cpu": 2}
PROMPT_SHARE_ELSEWHERE = 1
"""Programs that prefill between two dispatches of all slots, by platform. They take less time than a dispatch, so that
a long prompt delays no token of another request by more than that. Fewer decoding slots allow more of them."""

OnTokens = Callable[[list[int], list[float]], None]
"""Function of new token ids and their log-probabilities, called in the event loop of the request."""


@dataclass(eq=False)
class _Running:
    """A request from its submission to its end.

    Attributes:
        keys: keys of the pages of its prompt without the last token, which the first decoding step takes.
        slot: slot and, with `pages`, what it holds; None while it waits.
        shard: row shard of slot and pages.
        pages: its pages, in the order of its tokens.
        prefilled: number of prompt tokens in its pages.
        reach: number of its tokens after all dispatches that were queued.
        attempt: number of times that it got a slot: results of an earlier attempt are dropped.
    """

    request: Request
    future: "asyncio.Future[Completion]"
    completion: Completion
    on_tokens: OnTokens | None = None
    num_streamed: int = 0  # tokens that `on_tokens` was given
    error: Exception | None = None  # an error of this request alone
    keys: list[bytes] = field(default_factory=list)
    slot: int | None = None
    shard: int = 0
    pages: list[int] = field(default_factory=list)
    prefilled: int = 0
    reach: int = 0
    attempt: int = 0

    @property
    def num_fed(self) -> int:
        """Number of prompt tokens to prefill: all but the last."""
        return len(self.request.prompt_ids) - 1

    @property
    def is_filtered(self) -> bool:
        """True if its tokens are drawn from a filtered distribution."""
        request = self.request
        return bool(request.top_k > 0 or request.top_p < 1 or request.min_p > 0 or request.logit_bias)


@dataclass
class _InFlight:
    """A dispatch that was queued, with the requests of its slots and the attempt that each was in."""

    dispatch: Dispatch
    rows: list[tuple[_Running, int, int]]


class Engine:
    """Serves requests from any event loop on the device thread.

    Event loops call `submit` and `warm_up`; `drain` and `clear_prefix_cache` belong to the device thread. The lock
    guards what both sides change: `_waiting` and `_is_scheduled`.
    """

    def __init__(
        self,
        model: Model,
        device: DeviceThread,
        get_params: Callable[[], tuple[Params, int]],
        *,
        seed: int,
        slots: int,
        max_context_tokens: int,
        shapes: Params,
        cache_tokens: int | None = None,
    ) -> None:
        """Make an engine; its arrays are allocated with the first request.

        Args:
            model: the model to decode with.
            device: the thread that runs all work on the device.
            get_params: returns the parameters in their decoding layout and the policy version, whenever work begins.
            seed: seed of the run's key, into which each request folds its `key_ids`.
            slots: number of requests that decode together.
            max_context_tokens: maximum number of tokens of a prompt with its answer.
            shapes: the trained parameters, or their shapes, which give the size of the vocabulary.
            cache_tokens: tokens whose keys and values fit in the cache, of all running requests and of prompts kept for
                further generations and turns; None for slots x max_context_tokens.

        Raises:
            ValueError: `cache_tokens` is too small for a request.
        """
        self.slots = slots
        self.max_context_tokens = max_context_tokens
        self._model, self._shapes = model, shapes
        self._device = device
        self._get_params = get_params
        self._runner = ModelRunner(model, seed=seed, slots=slots, length=max_context_tokens, cache_tokens=cache_tokens)
        platform = platform_of(model.sharding)
        self._ahead = QUEUED_AHEAD.get(platform, QUEUED_AHEAD_ELSEWHERE)
        self._prompt_share = PROMPT_SHARE.get(platform, PROMPT_SHARE_ELSEWHERE)
        self._pools = [PagePool(self._runner.num_pages) for _ in range(self._runner.row_shards)]
        self._running: dict[int, _Running] = {}  # by slot, in the order of admission
        self._in_flight: deque[_InFlight] = deque()
        self._waiting: deque[_Running] = deque()
        self._is_scheduled = False
        self._lock = threading.Lock()

    @cached_property
    def vocabulary(self) -> int:
        """Number of tokens that the model has logits for; ids of a request are below it."""
        return vocabulary_size(self._model, self._shapes)

    @property
    def counts(self) -> Counts:
        """Numbers of tokens prefilled, reused and sampled so far."""
        return self._runner.counts

    @property
    def cache_tokens(self) -> int:
        """Number of tokens whose keys and values fit in the cache."""
        return self._runner.num_pages * self._runner.row_shards * PAGE_TOKENS

    @property
    def held_pages(self) -> int:
        """Number of pages that requests hold now."""
        return sum(pool.num_held for pool in self._pools)

    @property
    def sizes(self) -> str:
        """Settings that determine the memory of sampling, with their values, for messages."""
        return (
            f"slots (now {self.slots}), cache_tokens (now {self.cache_tokens}) or max_context_tokens (now "
            f"{self.max_context_tokens})"
        )

    def cache_bytes(self, dtype: Any) -> int:
        """Bytes on each device of the keys and values."""
        return self._runner.cache_bytes(dtype)

    def programs(self, params: Params) -> dict[str, Callable[[], Any]]:
        """Return functions that lower the largest programs of sampling, by name; see `ModelRunner.programs`."""
        return self._runner.programs(params)

    def clear_prefix_cache(self) -> None:
        """Clear the prefix cache, as the parameters change; call it on the device thread."""
        for pool in self._pools:
            pool.clear()

    async def warm_up(self) -> None:
        """Compile every program that requests can need, whatever their lengths and parameters."""

        def run() -> None:
            params, _ = self._get_params()
            self.drain()
            self._runner.warm_up(params)

        await self._device.run(run)

    async def submit(self, request: Request, on_tokens: OnTokens | None = None) -> Completion:
        """Run a request and return its completion; cancelling the wait frees the slot.

        Args:
            request: the request.
            on_tokens: called whenever tokens were sampled, with the new ones; before the completion is returned it has
                been given all of its tokens.

        Raises:
            PromptTooLongError: the prompt leaves no room for an answer in the context.
            RequestError: the prompt is empty or holds an id outside the vocabulary, or a parameter is impossible.
            NonFiniteError: a sampled token has a log-probability that is not finite.
            PolicyError: the policy is lost, its device has too little memory, or its device thread has ended.
            Exception: any other error of the device work that the request took part in.
        """
        check_request(request, self.max_context_tokens, self.vocabulary)
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Completion] = loop.create_future()
        running = _Running(request, future, Completion(), on_tokens, keys=page_keys(request.prompt_ids[:-1]))
        with self._lock:
            self._waiting.append(running)
        # Scheduled after the callbacks that are ready now, so that requests of one wave are admitted together. Every
        # request schedules a step: a loop that is closed before its callbacks run takes only its own request with it.
        loop.call_soon(self._schedule_step)
        return await future

    def _schedule_step(self) -> None:
        with self._lock:
            if self._is_scheduled or not self._waiting:
                return
            self._is_scheduled = True
        self._submit_step()

    def _submit_step(self) -> None:
        try:
            self._device.submit(self._step).add_done_callback(self._check_step)
        except DeviceThreadError as error:
            self._stop(error)

    def _check_step(self, step: "Future[None]") -> None:
        error = step.exception()
        if error is not None:  # the thread ended before the step, or in the middle of it
            self._stop(error)

    def _stop(self, error: BaseException) -> None:
        with self._lock:
            self._is_scheduled = False
        self._fail(error)

    def _step(self) -> None:
        """Prefill and decode a little, deliver completions, and submit the next step if work is left."""
        finished: list[_Running] = []
        try:
            finished = self._advance()
        except BaseException as error:  # the waiters must hear of any error
            self._fail(error)
        with self._lock:
            self._is_scheduled = is_needed = bool(self._running or self._waiting)
        if is_needed:  # behind the jobs that other code has submitted meanwhile
            self._submit_step()
        _deliver(finished)

    def _fail(self, error: BaseException) -> None:
        if is_out_of_memory(error):
            error = DeviceMemoryError(
                f"the device has too little memory to sample: lower llms.<name>.{self.sizes}; it said: "
                f"{first_line(error)}"
            )
        with self._lock:
            failed = [*self._running.values(), *self._waiting]
            self._running.clear()
            self._waiting.clear()
        self._in_flight.clear()
        self._runner.reset()
        self._pools = [PagePool(self._runner.num_pages) for _ in self._pools]
        _deliver(failed, presentable(error))

    def drain(self) -> None:
        """Decode the running requests to their ends without admitting others, so that the weights may change then."""
        try:
            while self._running or self._are_begun_waiting():
                _deliver(self._advance(is_draining=True))
        except BaseException as error:
            self._fail(error)
            raise

    def _are_begun_waiting(self) -> bool:
        """True if a request that had begun waits for pages again."""
        with self._lock:
            return any(waiting.attempt for waiting in self._waiting)

    def _advance(self, *, is_draining: bool = False) -> list[_Running]:
        """Prefill and decode a little of every running request; return the requests that ended."""
        for running in [running for running in self._running.values() if _is_abandoned(running)]:
            self._release(running)
        params, version = self._get_params()
        self._prefill(params, version, is_draining=is_draining)
        most = self._ahead if self._dispatch(params) else 0  # without a new one, all that were queued are read
        finished: list[_Running] = []
        try:
            while len(self._in_flight) > (most if self._running else 0):
                finished += self._read(params, self._in_flight.popleft())
        except BaseException:
            _deliver(finished)  # they have ended, whatever became of the others
            raise
        return finished

    def _prefill(self, params: Params, version: int, *, is_draining: bool) -> None:
        """Give slots and pages to waiting requests, and prefill pieces of prompts, not too many while others decode."""
        decoding = sum(running.prefilled == running.num_fed for running in self._running.values())
        num_programs = 0
        while True:
            self._admit(params, version, is_draining=is_draining)
            unfinished = [running for running in self._running.values() if running.prefilled < running.num_fed]
            if not unfinished or (decoding and num_programs * decoding >= self._prompt_share * self.slots):
                return
            self._prefill_pieces(params, unfinished)
            num_programs += 1

    def _prefill_pieces(self, params: Params, unfinished: Sequence[_Running]) -> None:
        """Prefill the next pieces of as many of these requests as one program takes, beginning with the first."""
        width = self._runner.piece_width(unfinished[0].num_fed - unfinished[0].prefilled)
        pieces: list[tuple[_Running, Piece]] = []
        room = [self._runner.piece_rows(width)] * len(self._pools)
        for running in unfinished:
            left = running.num_fed - running.prefilled
            if room[running.shard] and self._runner.piece_width(left) == width:
                room[running.shard] -= 1
                start, end = running.prefilled, running.prefilled + min(left, width)
                tokens = running.request.prompt_ids[start:end]
                pieces.append((running, Piece(running.shard, start, tokens, running.pages)))
        self._runner.prefill(params, [piece for _, piece in pieces], width)
        for running, piece in pieces:
            running.prefilled += len(piece.tokens)
            for index in range(piece.start // PAGE_TOKENS, pages_for(running.prefilled)):
                self._pools[running.shard].record(running.keys[index], running.pages[index])

    def _admit(self, params: Params, version: int, *, is_draining: bool) -> None:
        """Give slots and pages to waiting requests, the oldest first, as long as there are both."""
        with self._lock:
            waiting = list(self._waiting)
        admitted, copies, gone = [], [], set()
        free = [slot for slot in range(self.slots) if slot not in self._running]
        for running in waiting:
            if _is_abandoned(running):
                gone.add(running)
                continue
            if not free:
                break
            if is_draining and not running.attempt:
                continue
            shard = self._choose_shard(running, free)
            if shard is None:
                break  # no pages: younger requests wait, too
            if self._is_pending(running, shard):
                continue  # another request computes pages that this one needs
            slot = next(slot for slot in free if self._shard_of(slot) == shard)
            free.remove(slot)
            copies += self._take_pages(running, shard)
            if not running.attempt:
                running.completion.policy_version = version
            running.slot, running.attempt = slot, running.attempt + 1
            self._running[slot] = running
            admitted.append((slot, running.request))
            gone.add(running)
        if gone:
            with self._lock:
                self._waiting = deque(running for running in self._waiting if running not in gone)
        if copies:
            self._runner.copy(params, copies)
        if admitted:
            self._runner.admit(params, admitted)

    def _shard_of(self, slot: int) -> int:
        return slot * len(self._pools) // self.slots

    def _choose_shard(self, running: _Running, free: Sequence[int]) -> int | None:
        """Return the row shard that holds most of the prompt, of those with a free slot and pages enough; or None."""
        slots = [self._shard_of(slot) for slot in free]
        best: tuple[int, int, int] | None = None
        for shard in set(slots):
            pool = self._pools[shard]
            found = pool.find(running.keys)
            shared = [page for page in found if not pool.is_held(page)]  # they are available, but not to be taken
            # A copy of the last page needs one more, and so may each running request soon.
            others = sum(other.shard == shard for other in self._running.values())
            needed = pages_for(running.num_fed + 1) - len(found) + 1 + others
            if pool.num_available - len(shared) >= needed or not others:
                known = len(found) + sum(key in pool.pending for key in running.keys)
                rank = known, slots.count(shard), -shard
                best = rank if best is None or rank > best else best
        return None if best is None else -best[2]

    def _is_pending(self, running: _Running, shard: int) -> bool:
        """True if a page that the request needs next is being computed for another."""
        pool = self._pools[shard]
        found = len(pool.find(running.keys))
        return found < len(running.keys) and running.keys[found] in pool.pending

    def _take_pages(self, running: _Running, shard: int) -> list[PageCopy]:
        """Give a request the pages of its prompt: cached ones, and new ones; return the copies to be made.

        Whole pages of the prompt are shared. The last one, which the answer goes on in, is its own.
        """
        pool, whole = self._pools[shard], running.num_fed // PAGE_TOKENS
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

    def _release(self, running: _Running) -> None:
        """Free the slot and the pages of a request."""
        assert running.slot is not None
        pool = self._pools[running.shard]
        pool.pending.difference_update(running.keys[running.prefilled // PAGE_TOKENS :])
        pool.release(running.pages)
        del self._running[running.slot]
        running.pages, running.slot = [], None

    def _dispatch(self, params: Params) -> bool:
        """Queue the decoding of a few tokens of every request whose prompt is in its pages; False if there is none."""
        ready = [running for running in self._running.values() if running.prefilled == running.num_fed]
        ready = [running for running in ready if running.reach < self._limit(running)]  # others end with what is queued
        if not ready:
            return False
        left = [self._limit(running) - running.reach for running in ready]
        num_steps = dispatch_tokens(left, have_waiting=bool(self._waiting))
        for running in ready:
            self._reserve(running, min(num_steps, self._limit(running) - running.reach))
        ready = [running for running in ready if running.slot is not None]  # others gave their pages to older ones
        if not ready:
            return False
        rows = [Row(running.slot, running.pages, running.reach) for running in ready if running.slot is not None]
        is_filtered = any(running.is_filtered for running in ready)
        dispatch = self._runner.advance(params, rows, num_steps, is_filtered=is_filtered)
        self._in_flight.append(
            _InFlight(
                dispatch, [(running, row.slot, running.attempt) for running, row in zip(ready, rows, strict=True)]
            )
        )
        for running in ready:
            running.reach = min(running.reach + num_steps, self._limit(running))
        return True

    def _limit(self, running: _Running) -> int:
        return min(len(running.request.prompt_ids) + running.request.max_tokens, self.max_context_tokens)

    def _reserve(self, running: _Running, num_steps: int) -> None:
        """Take the pages that a request needs for more tokens, from the youngest requests if none is left."""
        pool = self._pools[running.shard]
        while running.slot is not None and len(running.pages) < pages_for(running.reach + num_steps - 1):
            if pool.num_available:
                running.pages.append(pool.take())
                continue
            youngest = [other for other in self._running.values() if other.shard == running.shard][-1]
            self._preempt(youngest)

    def _preempt(self, running: _Running) -> None:
        """Put a request back to the front of those that wait; it will sample the same tokens again."""
        self._release(running)
        version = running.completion.policy_version
        running.completion = Completion(policy_version=version)
        with self._lock:
            self._waiting.appendleft(running)

    def _read(self, params: Params, queued: _InFlight) -> list[_Running]:
        """Read the tokens of a dispatch; return the requests that ended, and free their slots and pages."""
        decoded = self._runner.read(queued.dispatch)
        current = [(running, slot) for running, slot, attempt in queued.rows if _is_current(running, slot, attempt)]
        finished = [running for running, slot in current if _take_tokens(running, slot, decoded)]
        for running in finished:
            if running.request.top_logprobs and running.error is None:
                self._add_top_logprobs(params, running)
        _deliver_tokens(running for running, _ in current)
        for running in finished:
            self._release(running)
        if any(isinstance(running.error, NonFiniteError) for running in finished):
            self.clear_prefix_cache()  # its pages may hold the non-finite numbers
        return finished

    def _add_top_logprobs(self, params: Params, running: _Running) -> None:
        """Compute the most likely tokens of a completion; an error is that of its request alone."""
        completion, count = running.completion, min(MAX_TOP_LOGPROBS, self.vocabulary)
        try:
            completion.top_logprobs = self._runner.top_logprobs(params, running.request, completion.token_ids, count)
        except Exception as error:  # such as too little memory
            running.error = error


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


def _is_current(running: _Running, slot: int, attempt: int) -> bool:
    """True if the request has not ended or lost its slot since."""
    return running.slot == slot and running.attempt == attempt


def _is_abandoned(running: _Running) -> bool:
    """Return True if nothing waits for the request any more."""
    return running.future.cancelled() or running.future.get_loop().is_closed()


def _take_tokens(running: _Running, slot: int, decoded: Decoded) -> bool:
    """Add the decoded tokens of a slot to its completion; return True if the completion has ended."""
    count, completion = int(decoded.counts[slot]), running.completion
    known = len(completion.token_ids)
    completion.token_ids += decoded.tokens[slot, :count].tolist()
    completion.sampler_logprobs += decoded.sampler_logprobs[slot, :count].tolist()
    completion.behavior_logprobs += decoded.behavior_logprobs[slot, :count].tolist()
    try:
        has_ended = _cut_at_end(running.request, completion, bool(decoded.active[slot]))
        _check_finite(running.request, completion, known)
        return has_ended
    except Exception as error:  # of this request or its `find_stop`; the other requests go on
        running.error = error
        return True


def _check_finite(request: Request, completion: Completion, known: int) -> None:
    """Raise a `NonFiniteError` unless all log-probabilities from number `known` on are finite."""
    pairs = zip(completion.sampler_logprobs[known:], completion.behavior_logprobs[known:], strict=True)
    for index, pair in enumerate(pairs, known):
        if not all(map(math.isfinite, pair)):
            raise NonFiniteError(
                f"the log-probability of token {index} of the answer to a prompt of {len(request.prompt_ids)} tokens "
                f"is {pair[0]} (as drawn: {pair[1]}): the parameters of version {completion.policy_version} are not "
                "finite or too large for their dtype (restore a checkpoint), or logit_bias leaves no token"
            )


def _cut_at_end(request: Request, completion: Completion, is_active: bool) -> bool:
    """Cut a completion after a stop string and set the finish reason; return True if the completion has ended."""
    cut = request.find_stop(completion.token_ids) if request.find_stop is not None else None
    if cut is not None:
        # Tokens after the one that completed the stop string were decoded in vain.
        for values in (completion.token_ids, completion.sampler_logprobs, completion.behavior_logprobs):
            del values[cut:]
        completion.finish_reason = "stop"
        return True
    if not is_active:
        completion.finish_reason = "stop" if completion.token_ids[-1] in request.stop_ids else "length"
    return not is_active


def _deliver_tokens(advanced: Iterable[_Running]) -> None:
    """Give the new tokens of the requests that stream them to their event loops."""
    for running in advanced:
        completion, known = running.completion, running.num_streamed
        if running.on_tokens is None or running.error is not None or len(completion.token_ids) <= known:
            continue
        running.num_streamed = len(completion.token_ids)
        tokens, logprobs = completion.token_ids[known:], completion.sampler_logprobs[known:]
        with contextlib.suppress(RuntimeError):  # the loop is closed, and nobody waits in it
            running.future.get_loop().call_soon_threadsafe(running.on_tokens, tokens, logprobs)


def _deliver(ended: list[_Running], error: Exception | None = None) -> None:
    """Give every request its completion or its own error, or all of them `error`, in their event loops."""
    by_loop: dict[asyncio.AbstractEventLoop, list[_Running]] = {}
    for running in ended:
        by_loop.setdefault(running.future.get_loop(), []).append(running)
    for loop, waiting in by_loop.items():
        with contextlib.suppress(RuntimeError):  # the loop is closed, and nobody waits in it
            loop.call_soon_threadsafe(_set_results, waiting, error)


def _set_results(ended: list[_Running], error: Exception | None) -> None:
    for running in ended:
        if running.future.done():
            continue
        own = error if running.error is None else presentable(running.error)
        if own is None:
            running.future.set_result(running.completion)
        else:
            running.future.set_exception(own)
