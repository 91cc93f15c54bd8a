"""Concurrent requests, one batch: fixed decode slots over one cache, and nothing a request gets depends on the others.

Every compiled shape is fixed for the life of the engine (slots, cache length, rows of a program) or follows from the
request alone (the pieces of its prompt), and noise comes from the request's own key. How much of the cache is read,
and which slots are decoded apart, does follow from what runs, but changes no bit of any request (`jaxft.core.cache`,
`jaxft.rollout.model_runner`). So its tokens and log-probabilities are the same bits whatever runs beside it, in
whichever slot, in whatever order.

Here is the queue: who waits, who runs, who hears of what. The arrays are those of `jaxft.rollout.model_runner`.
"""

import asyncio
import contextlib
import math
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from jaxft.core.checks import vocabulary_size
from jaxft.core.types import Model, Params
from jaxft.errors import DeviceMemoryError, DeviceThreadError, NonFiniteError
from jaxft.rollout.device import DeviceThread, first_line, is_out_of_memory, presentable
from jaxft.rollout.model_runner import Counts, Decoded, ModelRunner
from jaxft.rollout.requests import Completion, Request, check_request


@dataclass
class _Running:
    request: Request
    future: "asyncio.Future[Completion]"
    completion: Completion
    error: Exception | None = None  # its own, which concerns nobody else


FEWEST_PREFIX_CACHE_ROWS = 8


class Engine:
    """Serves requests from any event loop on the device thread.

    `submit` belongs to event loops, `drain` and what it stands on to the device thread; the lock guards what
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
        shapes: Params,
        prefix_cache_rows: int | None = None,
    ) -> None:
        """`get_params` gives the parameters in their decoding layout, and the policy version, whenever work begins.

        `shapes` are those of the parameters as they are trained: they tell the size of the vocabulary.
        `prefix_cache_rows` is how many prompts are kept for their other generations and next turns; by default as
        many as there are slots, and at least 8.

        Raises:
            ValueError: `prefix_cache_rows` is below 8.
        """
        if prefix_cache_rows is not None and prefix_cache_rows < FEWEST_PREFIX_CACHE_ROWS:
            raise ValueError(f"prefix_cache_rows is {prefix_cache_rows}; wanted at least {FEWEST_PREFIX_CACHE_ROWS}")
        self.slots = slots
        self.max_context_tokens = max_context_tokens
        fewest = slots * -(-FEWEST_PREFIX_CACHE_ROWS // slots)  # a multiple: divides over a mesh where slots do
        self.prefix_cache_rows = fewest if prefix_cache_rows is None else prefix_cache_rows
        self._model, self._shapes = model, shapes
        self._device = device
        self._get_params = get_params
        self._workspace = ModelRunner(
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
        """The number of tokens that the model gives logits for; ids of a request are below it."""
        return vocabulary_size(self._model, self._shapes)

    @property
    def counts(self) -> Counts:
        """Tokens prefilled, reused and sampled so far."""
        return self._workspace.counts

    @property
    def sizes(self) -> str:
        """The settings that decide the memory of sampling, with their values, for messages."""
        return (
            f"slots (now {self.slots}), prefix_cache_rows (now {self.prefix_cache_rows}) or max_context_tokens (now "
            f"{self.max_context_tokens})"
        )

    def cache_bytes(self, dtype: Any) -> int:
        """Bytes of all keys and values, of slots and stored prompts."""
        return self._workspace.cache_bytes(dtype)

    def clear_prefix_cache(self) -> None:
        """On the device thread: the parameters are about to change, and what is stored with them."""
        self._workspace.clear_prefix_cache()

    async def warm_up(self) -> None:
        """Compiles all that requests can lead to, whatever their lengths and parameters."""

        def run() -> None:
            params, _ = self._get_params()
            self.drain()
            self._workspace.warm_up(params)

        await self._device.run(run)

    async def submit(self, request: Request) -> Completion:
        """Waits for the completion of a request; a cancelled wait frees the slot.

        Raises:
            PromptTooLongError: the prompt leaves no room in the context.
            RequestError: the prompt has no tokens, or holds an id that is not of the vocabulary; or parameters are
                impossible.
            NonFiniteError: a log-probability of what was sampled is not finite.
            PolicyError: the policy is lost, its device has too little memory, or its device thread has ended.
            Exception: whatever else stopped the device work that the request was part of.
        """
        check_request(request, self.max_context_tokens, self.vocabulary)
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Completion] = loop.create_future()
        with self._lock:
            self._waiting.append(_Running(request, future, Completion()))
        # After the callbacks that are ready now: requests of one wave are admitted together. Each of them asks for a
        # round, as a loop that is closed before its callbacks run takes only its own request with it.
        loop.call_soon(self._ask_for_round)
        return await future

    def _ask_for_round(self) -> None:
        with self._lock:
            if self._is_scheduled or not self._waiting:
                return
            self._is_scheduled = True
        self._schedule()

    def _schedule(self) -> None:
        try:
            self._device.submit(self._step).add_done_callback(self._check_step)
        except DeviceThreadError as error:
            self._stop(error)

    def _check_step(self, pumped: "Future[None]") -> None:
        error = pumped.exception()
        if error is not None:  # the thread ended before the round, or in the middle of it
            self._stop(error)

    def _stop(self, error: BaseException) -> None:
        with self._lock:
            self._is_scheduled = False
        self._fail(error)

    def _step(self) -> None:
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
                f"the device has too little memory to sample: lower llms.<name>.{self.sizes}; it said: "
                f"{first_line(error)}"
            )
        with self._lock:
            failed = [*self._running.values(), *self._waiting]
            self._running.clear()
            self._waiting.clear()
        self._workspace.reset()
        _deliver(failed, presentable(error))

    def drain(self) -> None:
        """Decodes what has been admitted to its end, admitting nothing: afterwards the weights may change."""
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
            self._workspace.admit(params, admitted, is_idle=is_idle)

    def _advance(self) -> list[_Running]:
        """Decodes a few tokens of every running request; returns those that ended, their slots free again."""
        for slot in [slot for slot, running in self._running.items() if _is_abandoned(running)]:
            del self._running[slot]
        if not self._running:
            return []
        params, _ = self._get_params()
        held = {
            slot: len(running.request.prompt_ids) + len(running.completion.token_ids)
            for slot, running in self._running.items()
        }
        decoded = self._workspace.advance(params, held)
        finished = {slot: running for slot, running in self._running.items() if _has_ended(running, slot, decoded)}
        for slot in finished:
            del self._running[slot]
        if any(isinstance(running.error, NonFiniteError) for running in finished.values()):
            self._workspace.clear_prefix_cache()  # one of them may be where the number stands
        return list(finished.values())


def _is_abandoned(running: _Running) -> bool:
    """Whether nobody waits for it any more."""
    return running.future.cancelled() or running.future.get_loop().is_closed()


def _has_ended(running: _Running, slot: int, decoded: Decoded) -> bool:
    """Adds what was decoded to the completion, and says whether there is no more to come."""
    count, completion = int(decoded.counts[slot]), running.completion
    known = len(completion.token_ids)
    completion.token_ids += decoded.tokens[slot, :count].tolist()
    completion.sampler_logprobs += decoded.sampler_logprobs[slot, :count].tolist()
    completion.behavior_logprobs += decoded.behavior_logprobs[slot, :count].tolist()
    try:
        has_ended = _is_finished(running.request, completion, bool(decoded.active[slot]))
        _check_finite(running.request, completion, known)
        return has_ended
    except Exception as error:  # its own, or of its stop strings: the others go on
        running.error = error
        return True


def _check_finite(request: Request, completion: Completion, known: int) -> None:
    """Raise a `NonFiniteError` unless all log-probabilities are finite; the first `known` have been looked at."""
    pairs = zip(completion.sampler_logprobs[known:], completion.behavior_logprobs[known:], strict=True)
    for place, pair in enumerate(pairs, known):
        if not all(map(math.isfinite, pair)):
            raise NonFiniteError(
                f"the log-probability of token {place} of the answer to a prompt of {len(request.prompt_ids)} tokens "
                f"is {pair[0]} (as drawn: {pair[1]}): the parameters of version {completion.policy_version} are not "
                "finite or too large for their dtype (restore a checkpoint), or logit_bias leaves no token"
            )


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
    """Gives each its completion or its error, or all of them the same error, in the event loops that wait for them."""
    by_loop: dict[asyncio.AbstractEventLoop, list[_Running]] = {}
    for running in answered:
        by_loop.setdefault(running.future.get_loop(), []).append(running)
    for loop, waiting in by_loop.items():
        with contextlib.suppress(RuntimeError):  # of a closed loop, in which nobody waits any more
            loop.call_soon_threadsafe(_commit, waiting, error)


def _commit(answered: list[_Running], error: Exception | None) -> None:
    for running in answered:
        if running.future.done():
            continue
        own = error if running.error is None else presentable(running.error)
        if own is None:
            running.future.set_result(running.completion)
        else:
            running.future.set_exception(own)
