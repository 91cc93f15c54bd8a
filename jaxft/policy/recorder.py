"""What an episode did with its language model: every call with its token ids, kept where they were sampled.

The current episode is a context variable, so concurrent episodes never see each other's calls. Recorded ids are
training data as they are: a turn that extends the turn before becomes one sequence with it, and nothing that was
sampled is ever tokenised again.
"""

import bisect
import contextlib
import hashlib
import math
import random
from collections import Counter
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field

from pydantic import BaseModel, ConfigDict

TRAINING, VALIDATION = 0, 1
"""The streams of random numbers that episodes draw from."""


@dataclass(frozen=True)
class Call:
    """One call of a language model, as it was answered.

    Attributes:
        index: how many calls of the episode began before it.
        llm: the name of the language model in the configuration.
        messages: the conversation as the agent sent it.
        content: the text of the answer (a stop string is cut from it, not from the ids).
        prompt_text: the conversation as the chat template renders it.
        prompt_ids: what the policy was fed.
        token_ids: what it sampled, stop token included.
        sampler_logprobs: one per sampled token, under the full temperature-scaled vocabulary.
        behavior_logprobs: one per sampled token, under the distribution it was drawn from.
        temperature: of the sampling.
        finish_reason: `stop` or `length`.
        policy_version: of the parameters that sampled.
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

    @property
    def context_ids(self) -> tuple[int, ...]:
        """Prompt and answer: what a next turn may extend."""
        return self.prompt_ids + self.token_ids


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
    """

    run_seed: int
    stream: int
    rollout_index: int
    example_id: str
    generation: int
    temperature: float | None = None
    calls: list[Call] = field(default_factory=list)
    step_rewards: dict[int, float] = field(default_factory=dict)
    _begun: int = field(default=0, repr=False)
    _asked: Counter[tuple[int, ...]] = field(default_factory=Counter, repr=False)

    def begin_call(self, prompt_ids: tuple[int, ...]) -> tuple[int, int]:
        """The index of a new call, and the call id (uint32) that is folded into its key.

        The id is made of the prompt and of how often the episode has asked it before, never of the order in which
        concurrent calls happen to be answered.
        """
        index, repeats = self._begun, self._asked[prompt_ids]
        self._begun += 1
        self._asked[prompt_ids] += 1
        digest = hashlib.sha256(repr((prompt_ids, repeats)).encode()).digest()
        return index, int.from_bytes(digest[:4], "big")

    def record(self, call: Call) -> None:
        """Keeps an answered call."""
        bisect.insort(self.calls, call, key=lambda known: known.index)

    def reward_step(self, reward: float) -> None:
        """Rewards the latest answer by itself; an episode that does so is trained on its steps, not on its outcome.

        Answers that get no reward of their own have 0, rewards of one answer add up.

        Raises:
            RuntimeError: nothing has been answered yet.
            ValueError: the reward is not a finite number.
        """
        if not self.calls:
            raise RuntimeError("reward_step rewards the latest answer, and the episode has none yet")
        if isinstance(reward, bool) or not math.isfinite(reward):
            raise ValueError(f"the reward of a step is {reward!r}; wanted a finite number")
        index = self.calls[-1].index
        self.step_rewards[index] = self.step_rewards.get(index, 0.0) + float(reward)

    @property
    def shaped_rewards(self) -> list[float] | None:
        """One reward per answer when `reward_step` was used, else None."""
        return [self.step_rewards.get(call.index, 0.0) for call in self.calls] if self.step_rewards else None

    @property
    def id(self) -> str:
        """A name for messages and logs, unique within a run."""
        return f"{('training', 'validation')[self.stream]}/{self.rollout_index}/{self.example_id}/{self.generation}"

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


_current: ContextVar[Episode] = ContextVar("jaxft_episode")


def episode() -> Episode:
    """The episode that the calling code runs in.

    Raises:
        RuntimeError: called outside an episode.
    """
    try:
        return _current.get()
    except LookupError:
        raise RuntimeError(
            "there is no current episode: jaxft.episode() works inside a workflow that jaxft runs"
        ) from None


def find_episode() -> Episode | None:
    """The current episode, or None outside one: a bare `llm.chat` records nothing."""
    return _current.get(None)


@contextlib.contextmanager
def recording(current: Episode) -> Iterator[Episode]:
    """Makes `current` the episode of this task and of the tasks it starts."""
    token = _current.set(current)
    try:
        yield current
    finally:
        _current.reset(token)


class TokenSequence(BaseModel):
    """One training row: token ids with, aligned to each, who chose it and with which log-probability.

    Prompt tokens have mask False and zeros elsewhere; `policy_versions` and `turns` are -1 there. `turns` counts the
    answers of the episode in the order in which they were asked for; empty when it is not known. `llm` names the
    language model that sampled, when it is known.
    """

    model_config = ConfigDict(extra="forbid")

    tokens: list[int]
    completion_mask: list[bool]
    sampler_logprobs: list[float]
    behavior_logprobs: list[float]
    temperatures: list[float]
    policy_versions: list[int]
    turns: list[int] = []
    truncated: bool = False
    llm: str | None = None


def token_sequences(calls: Sequence[Call]) -> list[TokenSequence]:
    """The calls of an episode as training rows, in an order that depends on their tokens alone and never on timing.

    A call whose prompt starts with all tokens of another call of the same language model continues that call's row; any
    other begins a new one. No sampled token is lost, and none appears twice as a trained token.
    """
    sequences: list[TokenSequence] = []
    turns = {index: turn for turn, index in enumerate(sorted(call.index for call in calls))}
    # A prefix sorts before what extends it.
    for call in sorted(calls, key=lambda call: (call.llm, call.prompt_ids, call.token_ids)):
        longest = None
        for sequence in sequences:
            known = len(sequence.tokens)
            extends = sequence.llm == call.llm and list(call.prompt_ids[:known]) == sequence.tokens
            if extends and (longest is None or known > len(longest.tokens)):
                longest = sequence
        if longest is None:
            longest = TokenSequence(
                tokens=[],
                completion_mask=[],
                sampler_logprobs=[],
                behavior_logprobs=[],
                temperatures=[],
                policy_versions=[],
                llm=call.llm,
            )
            sequences.append(longest)
        _extend(longest, call, turns[call.index])
    return sequences


def _extend(sequence: TokenSequence, call: Call, turn: int) -> None:
    context = call.prompt_ids[len(sequence.tokens) :]
    sampled = len(call.token_ids)
    sequence.tokens += [*context, *call.token_ids]
    sequence.completion_mask += [False] * len(context) + [True] * sampled
    sequence.sampler_logprobs += [0.0] * len(context) + list(call.sampler_logprobs)
    sequence.behavior_logprobs += [0.0] * len(context) + list(call.behavior_logprobs)
    sequence.temperatures += [call.temperature] * (len(context) + sampled)
    sequence.policy_versions += [-1] * len(context) + [call.policy_version] * sampled
    sequence.turns += [-1] * len(context) + [turn] * sampled
    sequence.truncated |= call.finish_reason == "length"


def episode_messages(calls: Sequence[Call]) -> list[dict[str, str]]:
    """The conversation for people to read: the last call with its answer, and before it what that does not contain."""
    messages: list[dict[str, str]] = []
    for index, call in enumerate(calls):
        said = [*call.messages, {"role": "assistant", "content": call.content}]
        later = calls[index + 1].messages if index + 1 < len(calls) else ()
        if list(later[: len(said)]) != said:
            messages += said
    return messages
