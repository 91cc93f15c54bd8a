"""Recording of episodes: every call of their language models, with the token ids of prompt and answer.

Calls of remote models have no token ids and are kept apart: they are never trained.
"""

import asyncio
import bisect
import concurrent.futures
import contextlib
import hashlib
import random
import secrets
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, TypeVar, runtime_checkable

from jaxft.core import LARGEST_FLOAT32
from jaxft.errors import PolicyError, ToolsUnsupportedError
from jaxft.rollout.calls import Call, Completion, RemoteCall

T = TypeVar("T")

TRAINING, VALIDATION = 0, 1
"""Streams of random numbers that episodes draw from."""

WORKFLOW = "<workflow>"
"""Name of the target function that stands for the whole workflow, so for every call."""

ENDPOINT = "http://jaxft.invalid"
"""Address of the policy in clients that reach it in process; no host has such a name."""

# Threads use episodes, too; each holds the lock for a few microseconds.
_lock = threading.Lock()


@runtime_checkable
class Answer(Protocol):
    """The answer of a chat client, such as `Reply`; `call_index` is None outside an episode."""

    @property
    def call_index(self) -> int | None: ...


class Candidates(NamedTuple):
    """Several answers to one prompt, with a score for each."""

    calls: tuple[Call, ...]
    scores: tuple[float, ...]


@dataclass
class Episode:
    """One run of the agent on one example. The first five attributes determine all of its random numbers.

    Attributes:
        run_seed: seed of the whole run.
        stream: `TRAINING` or `VALIDATION`.
        rollout_index: number of the collection within its stream.
        example_id: id of the example.
        generation: number of the attempt at that example, from 0.
        temperature: replaces the temperature that calls ask for; None leaves it (evaluation sets 0.0).
        calls: the answered calls, in the order in which they began.
        remote_calls: the answers of remote models, in the order of their requests.
        step_rewards: sum of the `reward_step` rewards of each call, by its index.
        candidates: the answers and scores of each `record_candidates`.
        is_dropped: a prompt was too long for a language model whose `long_prompts` is `drop`.
        input_obj: input of the example, the value under `structure.question_key` in a dataset row.
        policy_error: the error of a policy that can do no further work; a client over HTTP raises another one for it.
        server_url: address of the server that reaches the episode's language models; without one, that of clients in
            process.
        texts_of_tokens: functions from a token id to its text, by the name of the language model that answered.
        answers: what was sampled in this episode, here or in an earlier collection that carried it over, by the name of
            the language model and the call id; None for an episode that cannot be carried over.
        answer_tokens: tokens that each answer may get before the episode is carried over; None: any number.
        is_carried: True once an answer had them, and all others had theirs or an end: the next collection runs the
            agent again, with the same `answers`.
        is_over: True once the episode has ended; its further calls are refused.
        on_carried: called when it is, in any thread.
    """

    run_seed: int
    stream: int
    rollout_index: int
    example_id: str
    generation: int
    temperature: float | None = None
    calls: list[Call] = field(default_factory=list)
    remote_calls: list[RemoteCall] = field(default_factory=list)
    step_rewards: dict[int, float] = field(default_factory=dict)
    candidates: list[Candidates] = field(default_factory=list)
    is_dropped: bool = False
    input_obj: Any = None
    policy_error: PolicyError | None = None
    server_url: str = field(default=ENDPOINT, repr=False, compare=False)
    texts_of_tokens: dict[str, Callable[[int], str]] = field(default_factory=dict, repr=False, compare=False)
    answers: dict[str, Completion] | None = field(default=None, repr=False, compare=False)
    answer_tokens: int | None = field(default=None, repr=False, compare=False)
    is_carried: bool = False
    is_over: bool = field(default=False, repr=False, compare=False)
    on_carried: Callable[[], object] | None = field(default=None, repr=False, compare=False)
    _sampling: int = field(default=0, repr=False, compare=False)
    _begun: int = field(default=0, repr=False)
    _remote_begun: int = field(default=0, repr=False)
    _asked: Counter[tuple[str, tuple[int, ...]]] = field(default_factory=Counter, repr=False)
    _experts: dict[str, str] = field(default_factory=dict, repr=False, compare=False)
    _loop: asyncio.AbstractEventLoop | None = field(default=None, repr=False, compare=False)
    _waiting: "set[concurrent.futures.Future[Any]]" = field(default_factory=set, repr=False, compare=False)
    _refusals: int = field(default=0, repr=False, compare=False)
    _token: str | None = field(default=None, repr=False, compare=False)

    def end(self) -> bool:
        """Cancel the calls that threads wait for and refuse all later ones; return True if a thread was waiting."""
        with _lock:
            self.is_over, waiting = True, list(self._waiting)
        for call in waiting:
            call.cancel()
        return bool(waiting)

    @contextlib.contextmanager
    def sampling(self) -> Iterator[None]:
        """Keep `carry` from ending the episode in the block, which samples an answer.

        Raises:
            CancelledError: the episode has ended.
        """
        with _lock:
            if self.is_over:
                raise self.closed()
            self._sampling += 1
        try:
            yield
        finally:
            with _lock:
                self._sampling -= 1

    def carry(self) -> bool:
        """End the episode, which the next collection goes on with, unless an answer is being sampled; True at its end.

        An answer that were cut off because another one is long would be sampled again, and short ones would not: that
        chooses by length, and biases.
        """
        with _lock:
            if self._sampling or self.is_over:
                return self.is_over
            self.is_over = self.is_carried = True
        if self.on_carried is not None:
            self.on_carried()
        return True

    async def check_open(self) -> None:
        """Raise `CancelledError` if the episode has ended: its agent still runs, but nobody waits for it."""
        if self.is_over:
            await asyncio.sleep(self._refused_seconds())
            raise self.closed()

    def check_open_sync(self) -> None:
        """`check_open` for code that cannot await."""
        if self.is_over:
            time.sleep(self._refused_seconds())
            raise self.closed()

    def _refused_seconds(self) -> float:
        """Return how long a refused call waits: an agent that catches the error and asks again must not busy-loop."""
        self._refusals += 1
        return min(self._refusals - 1.0, 1.0)

    def closed(self) -> asyncio.CancelledError:
        """Return the error of a call after the episode's end."""
        return asyncio.CancelledError(f"episode {self.id} has ended; its calls are not answered any more")

    def wait_for(self, call: Coroutine[Any, Any, T]) -> T:
        """Run a call in the episode's event loop, and block the calling thread, another one, until it returns."""
        if self._loop is None or self._loop.is_closed():
            call.close()
            raise asyncio.CancelledError(f"episode {self.id} has ended, and its event loop with it")
        with _lock:
            answer = asyncio.run_coroutine_threadsafe(call, self._loop)
            self._waiting.add(answer)
        try:
            return answer.result()
        except concurrent.futures.CancelledError:
            raise self.closed() from None
        finally:
            with _lock:
                self._waiting.discard(answer)

    @contextlib.contextmanager
    def cancelling(self) -> Iterator[None]:
        """Cancel the running task when the episode ends; in the episode's own event loop its owner cancels it."""
        task, loop = asyncio.current_task(), asyncio.get_running_loop()
        if task is None or loop is self._loop:
            yield
            return

        def cancel(_: object) -> None:
            with contextlib.suppress(RuntimeError):  # the loop has been closed, and the task with it
                loop.call_soon_threadsafe(task.cancel)

        running: concurrent.futures.Future[Any] = concurrent.futures.Future()
        running.add_done_callback(cancel)
        with _lock:
            self._waiting.add(running)
        try:
            yield
        finally:
            with _lock:
                self._waiting.discard(running)

    def use_loop(self) -> None:
        """Let threads of this episode wait for calls in the running event loop, unless it has a loop that runs."""
        if self._loop is None or self._loop.is_closed():
            with contextlib.suppress(RuntimeError):  # without a running event loop no thread will need it
                self._loop = asyncio.get_running_loop()

    @property
    def api_key(self) -> str:
        """Key that records the calls of a client in this episode, for threads and processes that inherit no context.

        It is random, valid until the episode ends, and never written anywhere.
        """
        with _lock:
            if self._token is None:
                self._token = TOKEN_PREFIX + secrets.token_urlsafe(24)
                _episodes[_digest(self._token)] = self
            return self._token

    @property
    def base_url(self) -> str:
        """Base URL that does what `api_key` does: for any client if the run has a server, else for those in process."""
        return f"{self.server_url}/e/{self.api_key}/v1"

    @property
    def is_served(self) -> bool:
        """True if a server reaches the language models of the episode."""
        return self.server_url != ENDPOINT

    def adopt_token(self, token: str) -> None:
        """Take the `api_key` of the same episode in another process, the one that has the server."""
        with _lock:
            self._token = token
            _episodes[_digest(token)] = self

    def count_begun(self, count: int) -> None:
        """Count calls that another process begins for this episode; a negative number takes back what it refused."""
        with _lock:
            self._begun += count

    def begin_call(self, prompt_ids: tuple[int, ...], seed: int | None = None, *, llm: str = "") -> tuple[int, int]:
        """Begin a call of a language model: return its index, and the call id (uint32) that is folded into its key.

        The id depends on the prompt, on the number of earlier calls of the same model with it and on the seed, if there
        is one, never on other models or on the order in which concurrent calls are answered.
        """
        with _lock:
            index, repeats = self._begun, self._asked[llm, prompt_ids]
            self._begun += 1
            self._asked[llm, prompt_ids] += 1
        origin = (prompt_ids, repeats) if seed is None else (prompt_ids, repeats, seed)
        digest = hashlib.sha256(repr(origin).encode()).digest()
        return index, int.from_bytes(digest[:4], "big")

    def record(self, call: Call) -> None:
        """Add an answered call.

        Raises:
            CancelledError: the episode has ended meanwhile, and its calls are being read.
        """
        with _lock:
            if self.is_over:
                raise self.closed()
            if isinstance(self.policy_error, ToolsUnsupportedError):
                self.policy_error = None  # the agent went on without tools
            experts = call.reply.completion.experts  # each later prompt has those of this one again: one object for all
            experts[:] = [self._experts.setdefault(each, each) for each in experts]
            bisect.insort(self.calls, call, key=lambda known: known.index)

    def begin_remote_call(self) -> tuple[int, int]:
        """Begin a request to a remote model: return `index` and `calls_before` of its `RemoteCall`."""
        with _lock:
            self._remote_begun += 1
            return self._remote_begun - 1, self._begun

    def record_remote(self, call: RemoteCall) -> None:
        """Add an answer of a remote model."""
        with _lock:
            bisect.insort(self.remote_calls, call, key=lambda known: known.index)

    def reward_step(self, reward: float, answer: Answer | None = None) -> None:
        """Add a reward to an answer; an episode with such rewards is trained on them instead of its outcome.

        Rewards of one answer are summed; an answer without any has 0. An episode without such rewards, in a group where
        others have some, counts its outcome at its last answer.

        Args:
            reward: the reward.
            answer: the answer, such as a `Reply`; None: the latest one.

        Raises:
            RuntimeError: no call has been answered yet, or the latest request had several answers.
            ValueError: the reward is not a finite number or too large for float32, or the answer is of another episode.
        """
        if not self.calls:
            raise RuntimeError("reward_step rewards the latest answer, and the episode has none yet")
        if answer is None and self.calls[-1].num_choices > 1:
            raise RuntimeError(
                f"the latest request had {self.calls[-1].num_choices} answers: name one, as in reward_step(1.0, reply)"
            )
        if answer is not None and answer.call_index not in {call.index for call in self.calls}:
            raise ValueError("the answer was not given in this episode")
        if isinstance(reward, bool) or not abs(reward) <= LARGEST_FLOAT32:
            raise ValueError(f"the reward of a step is {reward!r}; wanted a number that fits float32")
        index = self.calls[-1].index if answer is None or answer.call_index is None else answer.call_index
        self.step_rewards[index] = self.step_rewards.get(index, 0.0) + float(reward)

    def record_candidates(self, answers: Sequence[Answer], scores: Sequence[float]) -> None:
        """Record alternative answers to one prompt with their scores, for preference training.

        Raises:
            ValueError: there is not one finite score per answer, an answer is from another episode or is already a
                candidate, or the answers are to different prompts.
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
        """Return one reward per answer if `reward_step` was used, else None."""
        return [self.step_rewards.get(call.index, 0.0) for call in self.calls] if self.step_rewards else None

    @property
    def id(self) -> str:
        """Name for messages and logs, unique within a run."""
        return f"{('training', 'validation')[self.stream]}/{self.rollout_index}/{self.example_id}/{self.generation}"

    @property
    def is_training(self) -> bool:
        """True if the episode's calls may be trained on; False in evaluations."""
        return self.stream == TRAINING

    @property
    def key_ids(self) -> tuple[int, ...]:
        """The uint32 numbers that are folded, in order, into the run's key for all sampling of this episode."""
        digest = hashlib.sha256(self.example_id.encode()).digest()
        halves = int.from_bytes(digest[:4], "big"), int.from_bytes(digest[4:8], "big")
        return self.stream, self.rollout_index, *halves, self.generation

    @property
    def seed(self) -> int:
        """64-bit seed for the agent's own randomness (opponents, tools), the same when the episode is repeated."""
        return _seed(self.run_seed, *self.key_ids)

    @property
    def group_random(self) -> random.Random:
        """Return a new generator that is the same for all generations of the example in this rollout.

        Members of a group that meet the same chances differ in reward by what the policy did, not by luck.
        """
        return random.Random(_seed(self.run_seed, *self.key_ids[:-1]))

    @property
    def random(self) -> random.Random:
        """Return a new generator seeded with `seed`."""
        return random.Random(self.seed)


def _seed(*numbers: int) -> int:
    return int.from_bytes(hashlib.sha256(repr(numbers).encode()).digest()[:8], "big")


TOKEN_PREFIX = "jaxft-episode-"

_episodes: "weakref.WeakValueDictionary[bytes, Episode]" = weakref.WeakValueDictionary()
"""Episodes by hashes of their tokens: the time of a search tells nothing about a token."""


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode(errors="replace")).digest()


def episode_of_token(token: str) -> Episode | None:
    """Return the episode whose `api_key` this is; None if there is none any more."""
    return _episodes.get(_digest(token))


def is_episode_token(text: str) -> bool:
    """True if a key names an episode, which may have ended."""
    return text.startswith(TOKEN_PREFIX)
