"""The engine: decodes concurrent requests as one batch, each with the tokens that it would have alone.

Noise comes from a request's own key, and its row depends on its own tokens only. On a CPU neither the other requests
nor slots, pages, order or eviction change a bit: all programs compute a row alike, and prompts are computed page by
page, whatever is cached. On accelerators the sizes of programs follow from what is cached and what else waits, so that
log-probabilities may differ by rounding; tokens then differ where two are almost equally likely.

A `Scheduler` gives slots and pages to requests, a `ModelRunner` has the arrays. The engine makes the runner compute
what the scheduler chose, prompts chunk by chunk between dispatches of decoding, and delivers completions.
"""

import asyncio
import contextlib
import math
import time
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from jaxft.core.cache import PAGE_TOKENS
from jaxft.core.checks import vocabulary_size
from jaxft.core.decode import SampledTokens
from jaxft.core.sharding import compute_platform
from jaxft.core.types import Model, Params
from jaxft.errors import DeviceMemoryError, DeviceThreadError, NonFiniteError
from jaxft.rollout.calls import PENALIZED, Completion, encode_support
from jaxft.rollout.device import DeviceThread, first_line, is_out_of_memory, presentable
from jaxft.rollout.model_runner import Counts, Dispatch, ModelRunner
from jaxft.rollout.requests import MAX_TOP_LOGPROBS, Request, check_request
from jaxft.rollout.scheduler import OnTokens, Running, Scheduler

QUEUED_AHEAD = {"cpu": 0}
QUEUED_AHEAD_ELSEWHERE = 1
"""Dispatches that are queued, by platform, before the one before them is read, so that the device never waits for
Python. A CPU computes both, and would only decode rows that have ended."""

PROMPT_SHARE = {"cpu": 4}
PROMPT_SHARE_ELSEWHERE = 1
"""Programs that prefill between two dispatches of all slots, by platform. They take less time than a dispatch, so that
a long prompt delays no token of another request by more than that. Fewer decoding slots allow more of them."""

PROMPT_TOKENS = 512
"""Number of earlier tokens to which a chunk of a prompt attends on a CPU in about the time of all else."""

PROGRAM_TOKENS = 2048
"""Tokens up to which a program that prefills counts as one; a larger one counts as several."""


@dataclass
class _InFlight:
    """A dispatch that was queued, with the requests of its slots, the attempt that each was in, and the version."""

    dispatch: Dispatch
    rows: list[tuple[Running, int, int]]
    version: int

    @property
    def current(self) -> list[tuple[Running, int]]:
        """The requests, with their slots, that have not ended or lost their slots since."""
        return [
            (running, slot)
            for running, slot, attempt in self.rows
            if (running.slot, running.attempt) == (slot, attempt)
        ]


class Engine:
    """Serves requests from any event loop on the device thread.

    Event loops call `submit` and `warm_up`; `drain` and `change_weights` belong to the device thread. The lock of
    the scheduler guards what both sides change: its `waiting` requests and `_is_scheduled`.
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
        platform = compute_platform(model.sharding)
        self._ahead = QUEUED_AHEAD.get(platform, QUEUED_AHEAD_ELSEWHERE)
        self._prompt_share = PROMPT_SHARE.get(platform, PROMPT_SHARE_ELSEWHERE)
        # A CPU computes tokens of an answer to other last bits than those of a prompt, but samples them alike again.
        self._scheduler = Scheduler(self._runner, max_context_tokens, keeps_tokens=platform != "cpu")
        self._in_flight: deque[_InFlight] = deque()
        self._is_scheduled = False

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
        return self.num_pages * PAGE_TOKENS

    @property
    def num_pages(self) -> int:
        """Number of pages of the cache."""
        return self._runner.num_pages * self._runner.row_shards

    @property
    def num_running(self) -> int:
        """Number of requests that have slots now."""
        return len(self._scheduler.running)

    @property
    def num_waiting(self) -> int:
        """Number of requests that wait for a slot now."""
        return len(self._scheduler.waiting)

    @property
    def held_pages(self) -> int:
        """Number of pages that requests hold now."""
        return sum(pool.num_held for pool in self._scheduler.pools)

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

    def change_weights(self) -> None:
        """Forget what the old weights have computed of prompts; call it on the device thread.

        Running requests go on with the new weights, from the keys and values that they have. What was streamed stays.
        """
        self._scheduler.change_weights()

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
        running = Running(request, future, on_tokens)
        with self._scheduler.lock:
            self._scheduler.waiting.append(running)
        # Scheduled after the callbacks that are ready now, so that requests of one wave are admitted together. Every
        # request schedules a step: a loop that is closed before its callbacks run takes only its own request with it.
        loop.call_soon(self._schedule_step)
        return await future

    def _schedule_step(self) -> None:
        with self._scheduler.lock:
            if self._is_scheduled or not self._scheduler.waiting:
                return
            self._is_scheduled = True
        self._submit_step()

    def _submit_step(self) -> None:
        try:
            self._device.submit(self._step, "sampling").add_done_callback(self._check_step)
        except DeviceThreadError as error:
            self._stop(error)

    def _check_step(self, step: "Future[None]") -> None:
        error = step.exception()
        if error is not None:  # the thread ended before the step, or in the middle of it
            self._stop(error)

    def _stop(self, error: BaseException) -> None:
        with self._scheduler.lock:
            self._is_scheduled = False
        self._fail(error)

    def _step(self) -> None:
        """Prefill and decode a little, deliver completions, and submit the next step if work is left."""
        finished: list[Running] = []
        try:
            finished = self._advance()
        except BaseException as error:  # the waiters must hear of any error
            self._fail(error)
        with self._scheduler.lock:
            self._is_scheduled = is_needed = bool(self._scheduler.running or self._scheduler.waiting)
        if is_needed:  # behind the jobs that other code has submitted meanwhile
            self._submit_step()
        _deliver(finished)

    def _fail(self, error: BaseException) -> None:
        if is_out_of_memory(error):
            error = DeviceMemoryError(
                f"the device has too little memory to sample: lower llms.<name>.{self.sizes}; it said: "
                f"{first_line(error)}"
            )
        failed = self._scheduler.reset()
        self._in_flight.clear()
        self._runner.reset()
        _deliver(failed, presentable(error))

    def close(self) -> None:
        """Free the keys and values, which would live until the garbage collector comes; the device thread has ended."""
        self._in_flight.clear()
        self._runner.reset()

    def drain(self) -> None:
        """Decode the running requests to their ends without admitting others, so that the weights may change then."""
        try:
            while self._scheduler.has_begun:
                _deliver(self._advance(is_draining=True))
        except BaseException as error:
            self._fail(error)
            raise

    def _advance(self, *, is_draining: bool = False) -> list[Running]:
        """Prefill and decode a little of every running request; return the requests that ended."""
        for running in [running for running in self._scheduler.running.values() if running.is_abandoned]:
            self._scheduler.release(running)
        params, version = self._get_params()
        self._prefill(params, is_draining=is_draining)
        most = self._ahead if self._dispatch(params, version) else 0  # without a new one, all queued ones are read
        if any(running.constraint is not None for running in self._scheduler.running.values()):
            most = 0  # the next masks depend on these tokens
        finished: list[Running] = []
        try:
            while len(self._in_flight) > (most if self._scheduler.running else 0):
                finished += self._read(params, self._in_flight.popleft())
        except BaseException:
            _deliver(finished)  # they have ended, whatever became of the others
            raise
        return finished

    def _prefill(self, params: Params, *, is_draining: bool) -> None:
        """Admit waiting requests, and prefill chunks of prompts, not too many while others decode."""
        decoding, spent = self._scheduler.num_decoding, 0.0  # in programs at the beginning of a prompt
        while True:
            requests, copies = self._scheduler.admit(is_draining=is_draining)
            if copies:
                self._runner.copy(params, copies)
            if requests:
                self._runner.admit(params, requests)
            if decoding and spent * decoding >= self._prompt_share * self.slots:
                return
            chunks, width = self._scheduler.next_chunks()
            if not chunks:
                return
            self._runner.prefill(params, chunks, width)
            spent += max(1, len(chunks) * width / (PROGRAM_TOKENS * self._runner.row_shards))
            spent += max(chunk.start for chunk in chunks) / PROMPT_TOKENS

    def _dispatch(self, params: Params, version: int) -> bool:
        """Queue the decoding of a few tokens of every request whose prompt is in its pages; False if there is none."""
        chosen, num_steps = self._scheduler.next_rows()
        if not chosen:
            return False
        is_filtered = any(running.request.is_filtered for running, _ in chosen)
        decoded = [row for _, row in chosen]
        masks = {row.slot: each.constraint for each, row in chosen if each.constraint is not None}
        if masks:
            dispatch = self._runner.advance_masked(params, decoded, masks, self.vocabulary, is_filtered=is_filtered)
        else:
            dispatch = self._runner.advance(params, decoded, num_steps, is_filtered=is_filtered)
        rows = [(running, row.slot, running.attempt) for running, row in chosen]
        self._in_flight.append(_InFlight(dispatch, rows, version))
        return True

    def _read(self, params: Params, queued: _InFlight) -> list[Running]:
        """Read the tokens of a dispatch; return the requests that ended, and free their slots and pages."""
        sampled, active = self._runner.read(queued.dispatch)
        current = queued.current
        finished = [
            running
            for running, slot in current
            if _take_tokens(running, slot, sampled, queued.version, is_active=bool(active[slot]))
        ]
        for running in finished:
            if running.request.top_logprobs and running.error is None:
                self._add_top_logprobs(params, running)
        _deliver_tokens(running for running, _ in current)
        for running in finished:
            if running.error is None:
                self._scheduler.record_experts(running)
            self._scheduler.release(running)
        if any(isinstance(running.error, NonFiniteError) for running in finished):
            self._scheduler.clear_prefix_cache()  # its pages may hold the non-finite numbers
        return finished

    def _add_top_logprobs(self, params: Params, running: Running) -> None:
        """Compute the most likely tokens of a completion; an error is that of its request alone."""
        completion, count = running.completion, min(MAX_TOP_LOGPROBS, self.vocabulary)
        try:
            completion.top_logprobs = self._runner.top_logprobs(params, running.request, completion.token_ids, count)
        except Exception as error:  # such as too little memory
            running.error = error


def _take_tokens(running: Running, slot: int, sampled: SampledTokens, version: int, *, is_active: bool) -> bool:
    """Add the sampled tokens of a slot to its completion; return True if the completion has ended."""
    count, completion = int(sampled.counts[slot]), running.completion
    known = len(completion.token_ids)
    completion.token_ids += sampled.tokens[slot, :count].tolist()
    completion.sampler_logprobs += sampled.sampler_logprobs[slot, :count].tolist()
    completion.behavior_logprobs += sampled.behavior_logprobs[slot, :count].tolist()
    completion.policy_versions += [version] * count
    completion.last_read = (time.perf_counter(), known + count)
    completion.first_read = completion.first_read if known else completion.last_read
    request = running.request
    if request.has_supports or request.is_penalized:
        texts, supports = [""] * count, sampled.supports
        if supports is not None and request.has_supports and request.is_limited:
            texts = [encode_support(support) for support in supports[slot, :count]]
        completion.supports += [PENALIZED * request.is_penalized + text for text in texts]
    try:
        if running.constraint is not None:
            running.constraint.feed(completion.token_ids[known:])
            if running.constraint.is_over:
                running.constraint = None
        has_ended = _cut_at_end(running.request, completion, known, is_active)
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


def _cut_at_end(request: Request, completion: Completion, known: int, is_active: bool) -> bool:
    """Cut a completion after a stop string and set the finish reason; return True if the completion has ended."""
    cut = request.find_stop(completion.token_ids, known) if request.find_stop is not None else None
    if cut is not None:
        # Tokens after the one that completed the stop string were decoded in vain.
        for values in completion.per_token:
            del values[cut:]
        completion.finish_reason = "stop"
        return True
    if not is_active:
        completion.finish_reason = "stop" if completion.token_ids[-1] in request.stop_ids else "length"
    return not is_active


def _deliver_tokens(advanced: Iterable[Running]) -> None:
    """Give the new tokens of the requests that stream them to their event loops."""
    for running in advanced:
        completion, known = running.completion, running.num_streamed
        if running.on_tokens is None or running.error is not None or len(completion.token_ids) <= known:
            continue
        running.num_streamed = len(completion.token_ids)
        tokens, logprobs = completion.token_ids[known:], completion.sampler_logprobs[known:]
        with contextlib.suppress(RuntimeError):  # the loop is closed, and nobody waits in it
            running.future.get_loop().call_soon_threadsafe(running.on_tokens, tokens, logprobs)


def _deliver(ended: list[Running], error: Exception | None = None) -> None:
    """Give every request its completion or its own error, or all of them `error`, in their event loops."""
    by_loop: dict[asyncio.AbstractEventLoop, list[Running]] = {}
    for running in ended:
        by_loop.setdefault(running.future.get_loop(), []).append(running)
    for loop, waiting in by_loop.items():
        with contextlib.suppress(RuntimeError):  # the loop is closed, and nobody waits in it
            loop.call_soon_threadsafe(_set_results, waiting, error)


def _set_results(ended: list[Running], error: Exception | None) -> None:
    for running in ended:
        if running.future.done():
            continue
        own = error if running.error is None else presentable(running.error)
        if own is None:
            running.future.set_result(running.completion)
        else:
            running.future.set_exception(own)
