"""Training rows made of recorded calls.

The recorded token ids are the training data: a turn that extends an earlier turn joins its row, and sampled text is
never tokenised again.
"""

from collections.abc import Callable, Mapping, Sequence
from itertools import zip_longest
from typing import Any

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, field_validator, model_serializer
from pydantic.functional_serializers import SerializerFunctionWrapHandler
from pydantic_core.core_schema import SerializationInfo

from jaxft.rollout.calls import Call
from jaxft.rollout.messages import comparison_key
from jaxft.rollout.recorder import WORKFLOW


def is_targeted(call: Call, functions: Sequence[str] = (WORKFLOW,), model: str | None = None) -> bool:
    """Return True if a call was made in one of `functions`, to the language model `model` (None: to any)."""
    is_inside = WORKFLOW in functions or any(name in functions for name in call.functions)
    return is_inside and model in (None, call.llm)


class TokenSequence(BaseModel):
    """One training row: token ids, and for each token whether it is trained and how it was sampled.

    Tokens of prompts, and of calls that are not targeted, are context: their mask is False, their log-probabilities are
    0, and their `policy_versions` and `turns` are -1.

    Attributes:
        tokens: token ids, prompts and answers.
        completion_mask: True where the policy chose the token and it is trained.
        sampler_logprobs: log-probability of each token over the whole vocabulary, at its temperature.
        behavior_logprobs: log-probability of each token under the distribution that it was drawn from.
        temperatures: sampling temperature of each token's call.
        policy_versions: version of the parameters that sampled each token.
        turns: index of the answer that a token belongs to, by the order of the calls in the episode; empty if unknown.
        truncated: True if a length limit cut an answer of the row.
        episode_truncated: True if a length limit cut the last answer of the episode, and the row ends with it.
        llm: name of the language model that sampled; None if unknown.
        supports: tokens that each token could be drawn from (`Completion.supports`), empty for the whole vocabulary, or
            if that holds for the whole row. In JSON each support is written once.
        experts: experts that each token was routed to while sampling (`Completion.experts`), by the first call that was
            fed it; empty for tokens, and rows, without any.
        observations: True for tokens of the results of tools that an answer of the row led to, in the first of the
            rows that have these and all tokens before; empty without any.
        is_logged: True for text of a log, of which no log-probabilities are known. In JSON only if True.
        begun_by: the call whose prompt the row begins with; None if unknown, as in what was read from JSON.
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
    episode_truncated: bool = False
    llm: str | None = None
    supports: list[str] = []
    experts: list[str] = []
    observations: list[bool] = []
    is_logged: bool = False
    begun_by: Any = Field(default=None, exclude=True, repr=False)

    @model_serializer(mode="wrap")
    def _shorten(self, dump: SerializerFunctionWrapHandler, info: SerializationInfo) -> dict[str, Any]:
        """Leave out what is not set; in JSON write each support once, with its index for each token."""
        written: dict[str, Any] = dump(self)
        for name in ("is_logged", "observations", "experts", "supports"):
            if not written.get(name):
                written.pop(name, None)
        if self.supports and info.mode == "json":
            each = list(dict.fromkeys(self.supports))
            index = {support: number for number, support in enumerate(each)}
            written["supports"] = {"each": each, "of_tokens": [index[support] for support in self.supports]}
        return written

    @field_validator("supports", mode="before")
    @classmethod
    def _lengthen(cls, supports: Any) -> Any:
        if not isinstance(supports, Mapping):
            return supports
        return [supports["each"][number] for number in supports["of_tokens"]]


def token_sequences(calls: Sequence[Call], is_target: Callable[[Call], bool] = is_targeted) -> list[TokenSequence]:
    """Return the training rows of an episode's calls, in an order that depends on their tokens only, never on timing.

    A call whose prompt starts with all tokens of another call of the same language model continues that call's row; any
    other call begins a row. Each token of a targeted call is trained exactly once. Other calls are context only, and a
    row without a targeted call is left out.
    """
    sequences: list[TokenSequence] = []
    turns = {index: turn for turn, index in enumerate(sorted(call.index for call in calls))}
    # A prefix sorts before its extensions.
    for call in sorted(calls, key=lambda call: (call.llm, call.prompt_ids, call.token_ids)):
        own = (each for each in sequences if each.llm == call.llm)
        extended = (each for each in own if list(call.prompt_ids[: len(each.tokens)]) == each.tokens)
        longest = max(extended, key=lambda each: len(each.tokens), default=None)
        if longest is None:
            lists: Any = {name: [] for name, field in TokenSequence.model_fields.items() if field.is_required()}
            longest = TokenSequence(**lists, llm=call.llm, begun_by=call)
            sequences.append(longest)
        _extend(longest, call, turns[call.index], is_target(call))
        if is_target(call):  # what others add behind it is cut off
            is_last = turns[call.index] == len(calls) - 1
            longest.episode_truncated = is_last and call.reply.completion.finish_reason == "length"
    rows = [_without_tail(sequence) for sequence in sequences if any(sequence.completion_mask)]
    begun: list[tuple[str | None, np.ndarray]] = []
    for row in rows:
        tokens = np.array(row.tokens)
        if row.observations:
            known = max((_shared_tokens(tokens, other) for llm, other in begun if llm == row.llm), default=0)
            left = [False] * known + row.observations[known:]
            row.observations = left if any(left) else []
        begun.append((row.llm, tokens))
    return rows


def _extend(sequence: TokenSequence, call: Call, turn: int, is_target: bool) -> None:
    completion = call.reply.completion
    sampled = len(completion.token_ids) if is_target else 0
    known = len(sequence.tokens)
    context = len(call.context_ids) - known - sampled
    sequence.tokens += call.context_ids[known:]
    sequence.completion_mask += [False] * context + [True] * sampled
    sequence.sampler_logprobs += [0.0] * context + completion.sampler_logprobs[:sampled]
    sequence.behavior_logprobs += [0.0] * context + completion.behavior_logprobs[:sampled]
    sequence.temperatures += [call.temperature] * (context + sampled)
    sequence.policy_versions += [-1] * context + completion.policy_versions[:sampled]
    sequence.turns += [-1] * context + [turn] * sampled
    seen = set(call.prompt.observations)
    sequence.observations += [place in seen for place in range(known, known + context)] + [False] * sampled
    sequence.supports += [""] * context + (completion.supports or [""] * sampled)[:sampled]
    fed = completion.experts if is_target else []
    fed = [*fed, *[""] * (len(sequence.tokens) - len(fed))]
    sequence.experts = [first or own for first, own in zip_longest(sequence.experts, fed, fillvalue="")]
    sequence.truncated |= is_target and completion.finish_reason == "length"


def _shared_tokens(row: np.ndarray, other: np.ndarray) -> int:
    """Return the number of tokens that two rows begin with in common."""
    most = min(len(row), len(other))
    return int(np.append(row[:most] == other[:most], False).argmin())


def _without_tail(sequence: TokenSequence) -> TokenSequence:
    """Cut a row after its last trained token; later tokens have no effect on training."""
    end = len(sequence.tokens) - sequence.completion_mask[::-1].index(True)
    cut = {name: values[:end] for name, values in sequence if isinstance(values, list)}
    nothing: dict[str, list[Any]] = {name: [] for name in ("supports", "experts", "observations") if not any(cut[name])}
    return sequence.model_copy(update=cut | nothing)


def episode_messages(calls: Sequence[Call]) -> list[dict[str, Any]]:
    """Return the messages of all calls, for people to read; a call that a later one continues is not repeated."""
    return [message for conversation in conversations(calls) for message in conversation]


def conversations(calls: Sequence[Call]) -> list[list[dict[str, Any]]]:
    """Return the messages of `episode_messages`, conversation by conversation."""
    found: list[list[dict[str, Any]]] = []
    for index, call in enumerate(calls):
        answered = [*call.messages, call.answer_message]
        later = calls[index + 1].messages if index + 1 < len(calls) else ()
        if list(map(comparison_key, later[: len(answered)])) != list(map(comparison_key, answered)):
            found.append(answered)
    return found
