"""What an episode did with its language model: every call with its token ids, kept where they were sampled.

The current episode is a context variable, so concurrent episodes never see each other's calls; so are the functions
that an agent says it is in. A thread that an agent starts by itself has neither: `in_episode` carries them there.
"""

import asyncio
import bisect
import concurrent.futures
import contextlib
import contextvars
import functools
import hashlib
import inspect
import random
import threading
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, NamedTuple, ParamSpec, Protocol, TypeVar, cast, runtime_checkable

from jaxft.core import LARGEST_FLOAT32

P = ParamSpec("P")
T = TypeVar("T")

TRAINING, VALIDATION = 0, 1
"""The streams of random numbers that episodes draw from."""

WORKFLOW = "<workflow>"
"""The target function that means the whole workflow: every call."""

# Episodes are asked from threads as well; each time for a few microseconds.
_lock = threading.Lock()


@dataclass(frozen=True)
class Call:
    """One call of a language model, as it was answered.

    Attributes:
        index: how many calls of the episode began before it.
        llm: the name of the language model in the configuration.
        messages: the conversation as the agent sent it.
        content: the text of the answer, as the agent got it (a stop string may be cut from it, not from the ids).
        prompt_text: the conversation as the chat template renders it.
        prompt_ids: what the policy was fed.
        token_ids: what it sampled, stop token included.
        sampler_logprobs: one per sampled token, under the full temperature-scaled vocabulary.
        behavior_logprobs: one per sampled token, under the distribution it was drawn from.
        temperature: of the sampling.
        finish_reason: `stop` or `length`.
        policy_version: of the parameters that sampled.
        functions: those of the agent that the call was made in, outermost first (`named_function`).
        prompt_boundaries: where in the prompt those of earlier turns ended.
        truncated_tokens: how many tokens of the conversation were left out before `prompt_ids`, as it was too long, or
            as they were left out of the call that it goes on from; see `Prompt`.
    """

    index: int
    llm: str
    messages: tuple[dict[str, str], ...]
    content: str
    prompt_text: str
    prompt_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    sampler_logprobs: tuple[float, ...]
    behavior_logprobs: tuple[float, ...]
    temperature: float
    finish_reason: str
    policy_version: int
    functions: tuple[str, ...] = ()
    prompt_boundaries: tuple[int, ...] = ()
    truncated_tokens: int = 0

    @property
    def context_ids(self) -> tuple[int, ...]:
        """Prompt and answer: what a next turn may extend."""
        return self.prompt_ids + self.token_ids


@runtime_checkable
class Answer(Protocol):
    """What a language model's client gives: a `Reply`, that is. `call_index` is None outside an episode."""

    @property
    def call_index(self) -> int | None: ...


class Candidates(NamedTuple):
    """Several answers to one prompt, and what each is worth."""

    calls: tuple[Call, ...]
    scores: tuple[float, ...]


@dataclass
class Episode:
    """One run of the agent on one example, and all that makes it repeatable.

    Attributes:
        run_seed: the seed of the whole run.
        stream: `TRAINING` or `VALIDATION`.
        rollout_index: which collection of its stream the episode belongs to.
        example_id: of the example it works on.
        generation: which of the attempts at that example it is.
        temperature: replaces what calls ask for when set (0.0: greedy evaluation).
        calls: what its language models answered, in the order in which the calls began.
        step_rewards: what `reward_step` gave, by the index of the call.
        candidates: what `record_candidates` was given, a decision each.
        is_dropped: a prompt was too long, and `long_prompts` of its language model is `drop`.
        input_obj: the example's input, which `structure.question_key` chooses in a row of a file.
    """

    run_seed: int
    stream: int
    rollout_index: int
    example_id: str
    generation: int
    temperature: float | None = None
    calls: list[Call] = field(default_factory=list)
    step_rewards: dict[int, float] = field(default_factory=dict)
    candidates: list[Candidates] = field(default_factory=list)
    is_dropped: bool = False
    input_obj: Any = None
    _begun: int = field(default=0, repr=False)
    _asked: Counter[tuple[int, ...]] = field(default_factory=Counter, repr=False)
    _loop: asyncio.AbstractEventLoop | None = field(default=None, repr=False, compare=False)
    _waiting: "set[concurrent.futures.Future[Any]]" = field(default_factory=set, repr=False, compare=False)
    _is_over: bool = field(default=False, repr=False, compare=False)
    _refusals: int = field(default=0, repr=False, compare=False)

    def end(self) -> bool:
        """Cancels the calls that threads wait for, and refuses all later ones; whether a thread waited for one."""
        with _lock:
            self._is_over, waiting = True, list(self._waiting)
        for call in waiting:
            call.cancel()
        return bool(waiting)

    async def check_open(self) -> None:
        """Raises `CancelledError` in an episode that has ended: the agent goes on, but nobody waits for it."""
        if not self._is_over:
            return
        self._refusals += 1
        if self._refusals > 1:  # An agent that catches even this and asks again must not take all of the processor.
            await asyncio.sleep(1.0)
        raise asyncio.CancelledError(f"episode {self.id} has ended; its calls are not answered any more")

    def wait_for(self, call: Coroutine[Any, Any, T]) -> T:
        """The result of a call that a thread makes in the episode's event loop, which another thread runs."""
        if self._loop is None or self._loop.is_closed():
            call.close()
            raise asyncio.CancelledError(f"episode {self.id} has ended, and its event loop with it")
        with _lock:
            answer = asyncio.run_coroutine_threadsafe(call, self._loop)
            self._waiting.add(answer)
        try:
            return answer.result()
        except concurrent.futures.CancelledError:
            raise asyncio.CancelledError(f"episode {self.id} has ended; its calls are not answered any more") from None
        finally:
            with _lock:
                self._waiting.discard(answer)

    def begin_call(self, prompt_ids: tuple[int, ...]) -> tuple[int, int]:
        """The index of a new call, and the call id (uint32) that is folded into its key.

        The id is made of the prompt and of how often the episode has asked it before, never of the order in which
        concurrent calls happen to be answered.
        """
        with _lock:
            index, repeats = self._begun, self._asked[prompt_ids]
            self._begun += 1
            self._asked[prompt_ids] += 1
        digest = hashlib.sha256(repr((prompt_ids, repeats)).encode()).digest()
        return index, int.from_bytes(digest[:4], "big")

    def record(self, call: Call) -> None:
        """Keeps an answered call."""
        with _lock:
            bisect.insort(self.calls, call, key=lambda known: known.index)

    def reward_step(self, reward: float) -> None:
        """Rewards the latest answer by itself; an episode that does so is trained on its steps, not on its outcome.

        Answers that get no reward of their own have 0, rewards of one answer add up.

        Raises:
            RuntimeError: nothing has been answered yet.
            ValueError: the reward is not a finite number, or too large for float32.
        """
        if not self.calls:
            raise RuntimeError("reward_step rewards the latest answer, and the episode has none yet")
        if isinstance(reward, bool) or not abs(reward) <= LARGEST_FLOAT32:
            raise ValueError(f"the reward of a step is {reward!r}; wanted a number that fits float32")
        index = self.calls[-1].index
        self.step_rewards[index] = self.step_rewards.get(index, 0.0) + float(reward)

    def record_candidates(self, answers: Sequence[Answer], scores: Sequence[float]) -> None:
        """Says that these answers were alternatives, and what each is worth: the data of preference training.

        Raises:
            ValueError: not one finite score per answer, an answer of another episode, one that is a candidate already,
                or answers to different prompts.
        """
        if len(answers) != len(scores) or not answers:
            raise ValueError(f"there are {len(answers)} answers and {len(scores)} scores; wanted one score for each")
        for score in scores:
            if isinstance(score, bool) or not abs(score) <= LARGEST_FLOAT32:
                raise ValueError(f"the score of a candidate is {score!r}; wanted a number that fits float32")
        known = {call.index: call for call in self.calls}
        taken = {call.index for decision in self.candidates for call in decision.calls}
        indices = [answer.call_index for answer in answers]
        if any(index not in known for index in indices):
            raise ValueError("an answer was not given in this episode")
        if len(set(indices)) < len(indices) or not taken.isdisjoint(indices):
            raise ValueError("an answer is a candidate already")
        calls = tuple(known[index] for index in indices if index is not None)
        if len({(call.llm, call.prompt_ids) for call in calls}) > 1:
            raise ValueError("the answers are to different prompts; candidates of one decision share theirs")
        self.candidates.append(Candidates(calls, tuple(map(float, scores))))

    @property
    def shaped_rewards(self) -> list[float] | None:
        """One reward per answer when `reward_step` was used, else None."""
        return [self.step_rewards.get(call.index, 0.0) for call in self.calls] if self.step_rewards else None

    @property
    def id(self) -> str:
        """A name for messages and logs, unique within a run."""
        return f"{('training', 'validation')[self.stream]}/{self.rollout_index}/{self.example_id}/{self.generation}"

    @property
    def is_training(self) -> bool:
        """Whether what is sampled may be trained on; False in evaluations."""
        return self.stream == TRAINING

    @property
    def key_ids(self) -> tuple[int, ...]:
        """The uint32 numbers, in order, that are folded into the run's key for everything this episode samples."""
        digest = hashlib.sha256(self.example_id.encode()).digest()
        halves = int.from_bytes(digest[:4], "big"), int.from_bytes(digest[4:8], "big")
        return self.stream, self.rollout_index, *halves, self.generation

    @property
    def seed(self) -> int:
        """A 64-bit seed for the agent's own randomness (opponents, tools): the same when the episode is repeated."""
        text = repr((self.run_seed, *self.key_ids))
        return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")

    @property
    def random(self) -> random.Random:
        """A fresh generator seeded with `seed`."""
        return random.Random(self.seed)


_current: ContextVar[Episode | None] = ContextVar("jaxft_episode")
"""None where code runs on purpose outside of any episode, as evaluators do; no value where nobody said so."""


def episode() -> Episode:
    """The episode that the calling code runs in.

    Raises:
        RuntimeError: called outside an episode.
    """
    current = find_episode()
    if current is None:
        raise RuntimeError(
            "there is no current episode: jaxft.episode() works inside a workflow that jaxft runs, and in threads of "
            "it that run what jaxft.in_episode(function) gave"
        )
    return current


def find_episode() -> Episode | None:
    """The current episode, or None outside one: a bare `llm.chat` records nothing."""
    return _current.get(None)


def episode_of(context: contextvars.Context) -> Episode | None:
    """The current episode of code that runs in another context."""
    return context.get(_current)


def in_episode(wrapped: Callable[P, T]) -> Callable[P, T]:
    """The function, made to run in the episode that calls `in_episode`, whatever thread or task it is called in.

    A thread that an agent starts knows nothing of the episode: what it asks a language model would not be trained, and
    its noise would depend on the order of threads. `executor.submit(jaxft.in_episode(search), query)` carries the
    episode there, with the names of its functions.

    Raises:
        RuntimeError: called outside an episode, as a decorator of a module's function would be.
    """
    episode()
    context = contextvars.copy_context()
    if inspect.iscoroutinefunction(wrapped):

        @functools.wraps(wrapped)
        async def carried_async(*args: P.args, **kwargs: P.kwargs) -> Any:
            return await asyncio.get_running_loop().create_task(wrapped(*args, **kwargs), context=context.copy())

        return cast("Callable[P, T]", carried_async)

    @functools.wraps(wrapped)
    def carried(*args: P.args, **kwargs: P.kwargs) -> T:
        return context.copy().run(wrapped, *args, **kwargs)  # a context is entered by one thread at a time

    return carried


@contextlib.contextmanager
def recording(current: Episode | None) -> Iterator[Episode | None]:
    """Makes `current` the episode of this task and of the tasks it starts; None: they are in no episode, and calls
    that they make are no mistake."""
    if current is not None:
        with contextlib.suppress(RuntimeError):  # no event loop runs: there will be no threads that need it
            current._loop = asyncio.get_running_loop()
    token = _current.set(current)
    try:
        yield current
    finally:
        _current.reset(token)


_NOWHERE: Any = object()
_outside_calls = 0


def note_outside_call() -> None:
    """Counts a call of a language model that was made outside of any episode, unless that was on purpose."""
    global _outside_calls
    if _NOWHERE is _current.get(_NOWHERE):
        with _lock:
            _outside_calls += 1


def outside_calls() -> int:
    """The number of language-model calls that this process made outside of any episode.

    It is per process, because such a call cannot be assigned to a run.
    """
    return _outside_calls


_functions: ContextVar[tuple[str, ...]] = ContextVar("jaxft_functions", default=())


class named_function:
    """Names the part of an agent that runs, as a context or as a decorator of a function, async or not.

    Training can be aimed at the calls made under a name (`finetuning.target_functions`). Names nest: a call under
    "search" under "planner" belongs to both.

    >>> with named_function("planner"):
    ...     with named_function("search"):
    ...         current_functions()
    ('planner', 'search')
    >>> @named_function("writer")
    ... def write():
    ...     return current_functions()
    >>> write()
    ('writer',)
    """

    def __init__(self, name: str) -> None:
        if not name or name == WORKFLOW:
            raise ValueError(f"a function's name is {name!r}; wanted one of your own, and not empty")
        self.name = name

    def __enter__(self) -> None:
        _functions.set((*_functions.get(), self.name))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # No token is kept: one object may be entered by several tasks at once, each with a context of its own.
        _functions.set(_functions.get()[:-1])

    def __call__(self, wrapped: Callable[..., Any]) -> Callable[..., Any]:
        if inspect.isasyncgenfunction(wrapped) or inspect.isgeneratorfunction(wrapped):
            raise TypeError(f"{wrapped} is a generator, which runs in its caller's context: name the code inside it")
        if inspect.iscoroutinefunction(wrapped):

            @functools.wraps(wrapped)
            async def named_async(*args: Any, **kwargs: Any) -> Any:
                with self:
                    return await wrapped(*args, **kwargs)

            return named_async

        @functools.wraps(wrapped)
        def named(*args: Any, **kwargs: Any) -> Any:
            with self:
                return wrapped(*args, **kwargs)

        return named


def current_functions() -> tuple[str, ...]:
    """The names that the calling code runs under, outermost first."""
    return _functions.get()
