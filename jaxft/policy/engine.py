"""Concurrent requests, one batch: fixed decode slots over one cache, and nothing a request gets depends on the others.

Every compiled shape is fixed for the life of the engine (slots, cache length, rows of a prefill) or follows from the
request alone (its prompt's length bucket), and noise comes from the request's own key. So tokens and log-probabilities
of a request are the same bits whatever runs beside it, in whichever slot, in whatever order requests came.
What happens on the device is in `jaxft.policy.slots`.
"""

import asyncio
import contextlib
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np

from jaxft.core.sampling import SamplingParams
from jaxft.core.types import Model, Params
from jaxft.policy.device import DeviceThread, first_line, is_out_of_memory, presentable
from jaxft.policy.faults import DeviceMemoryError, DeviceThreadError
from jaxft.policy.slots import MAX_STOP_IDS, Admission, Slots, admit, advance, compute_dtype, empty_slots

PREFILL_ROWS = 8
"""Rows of every prefill: a request is prefilled at a shape that does not depend on how many came with it."""
DISPATCH_TOKENS = 8
"""Tokens decoded between two looks at the queue."""
SMALLEST_BUCKET = 32


class RequestError(ValueError):
    """A request that can never be served: too long for the context, or impossible parameters."""


@dataclass(frozen=True)
class Request:
    """What to sample.

    Attributes:
        prompt_ids: the context, at least one token.
        key_ids: uint32 numbers folded into the run's key, in order; unique to the request.
        max_tokens: the most tokens to sample.
        temperature, top_k, top_p, min_p: see `SamplingParams`.
        stop_ids: a sampled one ends the answer.
        find_stop: given the sampled ids, how many of them complete a stop string, or None.
    """

    prompt_ids: tuple[int, ...]
    key_ids: tuple[int, ...]
    max_tokens: int
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    stop_ids: tuple[int, ...] = ()
    find_stop: Callable[[list[int]], int | None] | None = None


@dataclass
class Completion:
    """What was sampled; `finish_reason` is `stop` or `length`."""

    token_ids: list[int] = field(default_factory=list)
    sampler_logprobs: list[float] = field(default_factory=list)
    behavior_logprobs: list[float] = field(default_factory=list)
    finish_reason: str = "length"
    policy_version: int = 0


@dataclass
class _Running:
    request: Request
    future: "asyncio.Future[Completion]"
    completion: Completion


class Engine:
    """Serves requests from any event loop on the device thread.

    `submit` belongs to event loops, `finish_running` and what it stands on to the device thread; the lock guards what
    both sides change, `_waiting` and `_is_scheduled`.
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
    ) -> None:
        """`get_params` gives the parameters in their decoding layout, and the policy version, whenever work begins."""
        self.model = model
        self.slots = slots
        self.max_context_tokens = max_context_tokens
        self.decoded_tokens = 0
        self._device = device
        self._get_params = get_params
        self._seed = seed
        self._device_slots: Slots | None = None
        self._running: dict[int, _Running] = {}
        self._waiting: deque[_Running] = deque()
        self._is_scheduled = False
        self._lock = threading.Lock()

    def cache_bytes(self) -> int:
        """Bytes of the key-value cache."""
        params = jax.eval_shape(self.model.init, jax.random.key(0))
        cache = jax.eval_shape(
            lambda: self.model.init_cache(self.slots, self.max_context_tokens, compute_dtype(params))
        )
        return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(cache))

    async def submit(self, request: Request) -> Completion:
        """Waits for the completion of a request; a cancelled wait frees the slot.

        Raises:
            RequestError: the prompt leaves no room in the context, or has no tokens, or parameters are impossible.
            PolicyError: the policy is lost, its device has too little memory, or its device thread has ended.
            Exception: whatever else stopped the device work that the request was part of.
        """
        self._check(request)
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Completion] = loop.create_future()
        with self._lock:
            self._waiting.append(_Running(request, future, Completion()))
            is_first, self._is_scheduled = not self._is_scheduled, True
        if is_first:
            # After the callbacks that are ready now: requests of one wave are admitted together.
            loop.call_soon(self._schedule)
        return await future

    def _check(self, request: Request) -> None:
        length = len(request.prompt_ids)
        if length == 0:
            raise RequestError("the prompt has no tokens")
        if length >= self.max_context_tokens:
            raise RequestError(
                f"the prompt has {length} tokens, but max_context_tokens is {self.max_context_tokens} with the answer "
                "included; shorten the conversation or raise llms.<name>.max_context_tokens"
            )
        if request.max_tokens < 1:
            raise RequestError(f"max_tokens is {request.max_tokens}; wanted at least 1")
        if not all(0 <= number < 2**32 for number in request.key_ids):
            raise RequestError(f"key_ids are {request.key_ids}; wanted numbers that fit uint32")
        if len(request.stop_ids) > MAX_STOP_IDS:
            raise RequestError(f"{len(request.stop_ids)} stop ids were given; at most {MAX_STOP_IDS} are supported")

    def _schedule(self) -> None:
        try:
            self._device.submit(self._pump).add_done_callback(self._check_pumped)
        except DeviceThreadError as error:
            self._stop(error)

    def _check_pumped(self, pumped: "Future[None]") -> None:
        error = pumped.exception()
        if error is not None:  # the thread ended before the round, or in the middle of it
            self._stop(error)

    def _stop(self, error: BaseException) -> None:
        with self._lock:
            self._is_scheduled = False
        self._fail(error)

    def _pump(self) -> None:
        """One round: admit, decode a little, deliver; then queues itself behind other device jobs if work is left."""
        finished: list[_Running] = []
        try:
            self._admit()
            finished = self._advance()
        except BaseException as error:  # whatever it is, those who wait must hear of it
            self._fail(error)
        with self._lock:
            self._is_scheduled = is_needed = bool(self._running or self._waiting)
        if is_needed:
            self._schedule()
        _deliver(finished)

    def _fail(self, error: BaseException) -> None:
        if is_out_of_memory(error):
            error = DeviceMemoryError(
                f"the device has too little memory to sample: lower llms.<name>.slots (now {self.slots}) or "
                f"llms.<name>.max_context_tokens (now {self.max_context_tokens}); it said: {first_line(error)}"
            )
        with self._lock:
            failed = [*self._running.values(), *self._waiting]
            self._running.clear()
            self._waiting.clear()
        self._device_slots = None  # it may have been donated to the call that failed
        _deliver(failed, presentable(error))

    def finish_running(self) -> None:
        """Decodes what has been admitted to its end, admitting nothing: afterwards the weights may change."""
        try:
            while self._running:
                _deliver(self._advance())
        except BaseException as error:
            self._fail(error)
            raise

    def _admit(self) -> None:
        free = [slot for slot in range(self.slots) if slot not in self._running]
        by_bucket: dict[int, list[tuple[int, _Running]]] = {}
        params, version = self._get_params()
        while self._waiting and free:
            running = self._waiting.popleft()
            if running.future.cancelled():
                continue
            running.completion.policy_version = version
            slot = free.pop(0)
            self._running[slot] = running
            length = min(bucket(len(running.request.prompt_ids)), self.max_context_tokens)
            by_bucket.setdefault(length, []).append((slot, running))
        if by_bucket and self._device_slots is None:
            self._device_slots = empty_slots(self.model, self.slots, self.max_context_tokens, compute_dtype(params))
        for length, admitted in by_bucket.items():
            for start in range(0, len(admitted), PREFILL_ROWS):
                admission = self._admission(length, admitted[start : start + PREFILL_ROWS])
                seed = jax.random.key_data(jax.random.key(self._seed, impl="threefry2x32"))
                self._device_slots = admit(self.model, params, self._device_slots, seed, admission)

    def _admission(self, length: int, admitted: list[tuple[int, _Running]]) -> Admission:
        requests = [running.request for _, running in admitted]
        spare = PREFILL_ROWS - len(requests)
        prompts = np.zeros((PREFILL_ROWS, length), np.int32)
        stops = np.full((PREFILL_ROWS, MAX_STOP_IDS), -1, np.int32)
        for row, request in enumerate(requests):
            prompts[row, : len(request.prompt_ids)] = request.prompt_ids
            stops[row, : len(request.stop_ids)] = request.stop_ids

        def column(values: list[Any], filler: Any, dtype: Any) -> Any:
            return np.array(values + [filler] * spare, dtype)

        lengths = [len(request.prompt_ids) for request in requests]
        limits = [min(n + r.max_tokens, self.max_context_tokens) for n, r in zip(lengths, requests, strict=True)]
        return Admission(
            prompts,
            column(lengths, 1, np.int32),
            column([slot for slot, _ in admitted], self.slots, np.int32),
            SamplingParams(
                column([r.temperature for r in requests], 1.0, np.float32),
                column([r.top_k for r in requests], 0, np.int32),
                column([r.top_p for r in requests], 1.0, np.float32),
                column([r.min_p for r in requests], 0.0, np.float32),
            ),
            column([list(r.key_ids) for r in requests], list(requests[0].key_ids), np.uint32),
            stops,
            column(limits, 2, np.int32),
        )

    def _advance(self) -> list[_Running]:
        """Decodes a few tokens of every running request; returns those that ended, their slots free again."""
        abandoned = [slot for slot, running in self._running.items() if running.future.cancelled()]
        for slot in abandoned:
            del self._running[slot]
        if not self._running:
            return []
        kept = np.zeros(self.slots, bool)
        kept[list(self._running)] = True
        params, _ = self._get_params()
        assert self._device_slots is not None
        self._device_slots, emitted = advance(self.model, params, self._device_slots, kept, DISPATCH_TOKENS)
        tokens, sampler_logprobs, behavior_logprobs, counts = (np.asarray(x) for x in emitted)
        active = np.asarray(self._device_slots.state.active)
        self.decoded_tokens += int(counts.sum())

        finished = {}
        for slot, running in self._running.items():
            count, completion = int(counts[slot]), running.completion
            completion.token_ids += tokens[slot, :count].tolist()
            completion.sampler_logprobs += sampler_logprobs[slot, :count].tolist()
            completion.behavior_logprobs += behavior_logprobs[slot, :count].tolist()
            if _is_finished(running.request, completion, bool(active[slot])):
                finished[slot] = running
        for slot in finished:
            del self._running[slot]
        return list(finished.values())


def _is_finished(request: Request, completion: Completion, is_active: bool) -> bool:
    cut = request.find_stop(completion.token_ids) if request.find_stop is not None else None
    if cut is not None:
        # Tokens decoded beyond the one that completed the stop string were never asked for.
        for values in (completion.token_ids, completion.sampler_logprobs, completion.behavior_logprobs):
            del values[cut:]
        completion.finish_reason = "stop"
        return True
    if not is_active:
        completion.finish_reason = "stop" if completion.token_ids[-1] in request.stop_ids else "length"
    return not is_active


def _deliver(answered: list[_Running], error: Exception | None = None) -> None:
    """Gives each its completion, or all of them the error, in the event loops that wait for them."""
    by_loop: dict[asyncio.AbstractEventLoop, list[_Running]] = {}
    for running in answered:
        by_loop.setdefault(running.future.get_loop(), []).append(running)
    for loop, waiting in by_loop.items():
        with contextlib.suppress(RuntimeError):  # of a closed loop, in which nobody waits any more
            loop.call_soon_threadsafe(_settle, waiting, error)


def _settle(answered: list[_Running], error: Exception | None) -> None:
    for running in answered:
        if running.future.done():
            continue
        if error is None:
            running.future.set_result(running.completion)
        else:
            running.future.set_exception(error)


def bucket(tokens: int) -> int:
    """The padded length of a prompt: the next of 32, 48, 64, 96, 128, 192, ... so that at most a third is padding.

    >>> [bucket(n) for n in (1, 33, 64, 65, 130)]
    [32, 48, 64, 96, 192]
    """
    power = SMALLEST_BUCKET
    while power < tokens:
        if tokens <= power * 3 // 2:
            return power * 3 // 2
        power *= 2
    return power
