"""The engine: decodes concurrent requests as one batch, each with the same bits as if it ran alone.

Every compiled shape is fixed for the life of the engine (slots, cache length, rows of a program) or follows from the
request alone (the chunks of its prompt), and noise comes from the request's own key. The blocks of the cache that are
read, and the slots that decode together, do depend on the other requests, but change no bit (`jaxft.core.cache`,
`jaxft.rollout.model_runner`). So neither other requests nor the slot nor the order changes a token or log-probability.

This file is the scheduler: it admits waiting requests and delivers completions. `ModelRunner` has the arrays.
"""

import asyncio
import contextlib
import math
import threading
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from jaxft.core.checks import vocabulary_size
from jaxft.core.types import Model, Params
from jaxft.errors import DeviceMemoryError, DeviceThreadError, NonFiniteError
from jaxft.rollout.device import DeviceThread, first_line, is_out_of_memory, presentable
from jaxft.rollout.model_runner import Counts, Decoded, ModelRunner
from jaxft.rollout.requests import MAX_TOP_LOGPROBS, Completion, Request, check_request

MIN_PREFIX_CACHE_ROWS = 8


def default_prefix_cache_rows(slots: int) -> int:
    """Return the rows of the prefix cache by default: a multiple of the slots, which divides over a mesh as they do.

    >>> default_prefix_cache_rows(64), default_prefix_cache_rows(3)
    (64, 9)
    """
    return slots * -(-MIN_PREFIX_CACHE_ROWS // slots)


OnTokens = Callable[[list[int], list[float]], None]
"""Function of new token ids and their log-probabilities, called in the event loop of the request."""


@dataclass
class _Running:
    request: Request
    future: "asyncio.Future[Completion]"
    completion: Completion
    on_tokens: OnTokens | None = None
    num_streamed: int = 0  # tokens that `on_tokens` was given
    error: Exception | None = None  # an error of this request alone


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
        prefix_cache_rows: int | None = None,
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
            prefix_cache_rows: number of prompts whose keys and values are cached for further generations and turns;
                None for as many as slots, and at least 8.

        Raises:
            ValueError: `prefix_cache_rows` is below 8.
        """
        if prefix_cache_rows is not None and prefix_cache_rows < MIN_PREFIX_CACHE_ROWS:
            raise ValueError(f"prefix_cache_rows is {prefix_cache_rows}; wanted at least {MIN_PREFIX_CACHE_ROWS}")
        self.slots = slots
        self.max_context_tokens = max_context_tokens
        rows = default_prefix_cache_rows(slots) if prefix_cache_rows is None else prefix_cache_rows
        self.prefix_cache_rows = rows
        self._model, self._shapes = model, shapes
        self._device = device
        self._get_params = get_params
        self._runner = ModelRunner(
            model,
            seed=seed,
            slots=slots,
            length=max_context_tokens,
            prefix_cache_rows=self.prefix_cache_rows,
        )
        self._running: dict[int, _Running] = {}
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
    def sizes(self) -> str:
        """Settings that determine the memory of sampling, with their values, for messages."""
        return (
            f"slots (now {self.slots}), prefix_cache_rows (now {self.prefix_cache_rows}) or max_context_tokens (now "
            f"{self.max_context_tokens})"
        )

    def cache_bytes(self, dtype: Any) -> int:
        """Bytes on each device of the keys and values of slots and prefix cache."""
        return self._runner.cache_bytes(dtype)

    def programs(self, params: Params) -> dict[str, Callable[[], Any]]:
        """Return functions that lower the largest programs of sampling, by name; see `ModelRunner.programs`."""
        return self._runner.programs(params)

    def clear_prefix_cache(self) -> None:
        """Clear the prefix cache, as the parameters change; call it on the device thread."""
        self._runner.clear_prefix_cache()

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
        with self._lock:
            self._waiting.append(_Running(request, future, Completion(), on_tokens))
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
        """Admit requests, decode a few tokens, deliver completions, and submit the next step if work is left."""
        finished: list[_Running] = []
        try:
            self._admit()
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
        self._runner.reset()
        _deliver(failed, presentable(error))

    def drain(self) -> None:
        """Decode the running requests to their ends without admitting others, so that the weights may change then."""
        try:
            while self._running:
                _deliver(self._advance())
        except BaseException as error:
            self._fail(error)
            raise

    def _admit(self) -> None:
        is_idle = not self._running
        free = [slot for slot in range(self.slots) if slot not in self._running]
        params, version = self._get_params()
        admitted = []
        while self._waiting and free:
            running = self._waiting.popleft()
            if _is_abandoned(running):
                continue
            running.completion.policy_version = version
            slot = free.pop(0)
            self._running[slot] = running
            admitted.append((slot, running.request))
        if admitted:
            self._runner.admit(params, admitted, is_idle=is_idle)

    def _advance(self) -> list[_Running]:
        """Decode a few tokens of every running request; return the requests that ended, and free their slots."""
        for slot in [slot for slot, running in self._running.items() if _is_abandoned(running)]:
            del self._running[slot]
        if not self._running:
            return []
        params, _ = self._get_params()
        num_tokens = {
            slot: len(running.request.prompt_ids) + len(running.completion.token_ids)
            for slot, running in self._running.items()
        }
        decoded = self._runner.advance(params, num_tokens)
        finished = {slot: running for slot, running in self._running.items() if _take_tokens(running, slot, decoded)}
        for running in finished.values():
            if running.request.top_logprobs and running.error is None:
                self._add_top_logprobs(params, running)
        _deliver_tokens(self._running.values())
        for slot in finished:
            del self._running[slot]
        if any(isinstance(running.error, NonFiniteError) for running in finished.values()):
            self._runner.clear_prefix_cache()  # its rows may hold the non-finite numbers
        return list(finished.values())

    def _add_top_logprobs(self, params: Params, running: _Running) -> None:
        """Compute the most likely tokens of a completion; an error is that of its request alone."""
        completion, count = running.completion, min(MAX_TOP_LOGPROBS, self.vocabulary)
        try:
            completion.top_logprobs = self._runner.top_logprobs(params, running.request, completion.token_ids, count)
        except Exception as error:  # such as too little memory
            running.error = error


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
