"""Logged conversations and preferences as training rows, in the forms of OpenAI, TRL and ShareGPT.

| form | columns of a row |
|---|---|
| `messages` | `messages`, maybe `tools`; a message of the assistant with `weight` 0 is not trained |
| `conversations` | ShareGPT's messages, `from` and `value`, maybe after a `system` |
| `completion` | `prompt` and `completion`, both texts or both messages |
| `text` | `text`, all of which is trained |
| `preference` | `chosen` and `rejected`, texts or messages, after `prompt` or with what they begin alike |
| `preferred` | OpenAI's `input` (`messages`, maybe `tools`), `preferred_output` and `non_preferred_output` |

A row of the first four may have a `reward`.
"""

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from jaxft.errors import RequestError, did_you_mean
from jaxft.harness.evaluators import is_number
from jaxft.rollout.chat import ChatTemplate
from jaxft.rollout.messages import canonical_messages, check_tools
from jaxft.rollout.sequences import TokenSequence

FORMS: Mapping[str, tuple[str, ...]] = {
    "preferred": ("input", "preferred_output", "non_preferred_output"),
    "preference": ("chosen", "rejected"),
    "messages": ("messages",),
    "conversations": ("conversations",),
    "completion": ("prompt", "completion"),
    "text": ("text",),
}
"""Columns that each form has, in the order in which they are looked for."""

SHAREGPT_ROLES = {"human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "system": "system"}
SHAREGPT_ROLES |= {"tool": "tool", "function": "tool", "observation": "tool"}


class Conversation(NamedTuple):
    """Messages or text, of which the answers are trained.

    Attributes:
        prompt: messages or a text, which is not trained; empty for none.
        answer: messages, of which those of the assistant are trained, or a text.
        untrained: indices of the assistant's messages in `answer` that are not trained.
    """

    prompt: list[dict[str, Any]] | str
    answer: list[dict[str, Any]] | str
    untrained: tuple[int, ...] = ()


class Logged(NamedTuple):
    """A row of a log: one conversation, or a chosen and a rejected one."""

    conversations: tuple[Conversation, ...]
    tools: list[dict[str, Any]]
    reward: float | None

    @property
    def is_pair(self) -> bool:
        """True for a preference."""
        return len(self.conversations) == 2


def read_logged(row: Mapping[str, Any]) -> Logged:
    """Return a row in the form that its columns show.

    Raises:
        ValueError: the columns are those of no form, or a value is not as the form has it; the message names it.
    """
    form = next((name for name, columns in FORMS.items() if all(row.get(each) is not None for each in columns)), None)
    if form is None:
        wanted = "; ".join(f"{name}: {', '.join(columns)}" for name, columns in FORMS.items())
        known = sorted({column for columns in FORMS.values() for column in columns})
        near = next((hint for name in row if "mean" in (hint := did_you_mean(name, known, what="columns"))), "")
        raise ValueError(f"has the columns {', '.join(map(str, row)) or 'none'}, of no form{near}; forms are {wanted}")
    tools, source = row.get("tools"), row
    if form == "preferred":
        source = row["input"]
        if not isinstance(source, Mapping) or "messages" not in source:
            raise ValueError("'input' has no 'messages'")
        tools = source.get("tools")
        pair = row["preferred_output"], row["non_preferred_output"]
        conversations = [
            Conversation(_messages("input.messages", source["messages"]), _answer(*each))
            for each in zip(("preferred_output", "non_preferred_output"), pair, strict=True)
        ]
    elif form == "preference":
        conversations = _preference(row)
    elif form == "completion":
        prompt, completion = row["prompt"], row["completion"]
        if isinstance(prompt, str) != isinstance(completion, str):
            raise ValueError("'prompt' and 'completion' are a text and messages: both are one of the two")
        asked = prompt if isinstance(prompt, str) else _messages("prompt", prompt)
        conversations = [Conversation(asked, _answer("completion", completion))]
    elif form == "text":
        conversations = [Conversation("", _answer("text", row["text"]))]
    elif form == "conversations":
        conversations = [Conversation([], _sharegpt(row))]
    else:
        given = row["messages"]
        if not (isinstance(given, list | tuple) and all(isinstance(each, Mapping) for each in given)):
            raise ValueError(f"'messages' is {given!r:.50}; wanted a list of messages")
        weights = [1 if each.get("weight") is None else each["weight"] for each in given]
        for weight in weights:
            if weight not in (0, 1):
                raise ValueError(f"a message has the weight {weight!r:.50}; wanted 0 or 1")
        untrained = tuple(index for index, weight in enumerate(weights) if not weight)
        plain = [{name: value for name, value in each.items() if name != "weight"} for each in given]
        conversations = [Conversation([], _messages("messages", plain), untrained)]
    for each in conversations:
        _check(each)
    if len(conversations) == 2 and conversations[0].answer == conversations[1].answer:
        raise ValueError("chosen and rejected are the same answer, which says nothing")
    try:
        check_tools(tools or [])
    except RequestError as error:
        raise ValueError(f"tools: {error}") from None
    reward = row.get("reward")
    if reward is not None and not (is_number(reward) and math.isfinite(reward)):
        raise ValueError(f"'reward' is {reward!r:.50}; wanted a finite number, or null")
    return Logged(tuple(conversations), list(tools or ()), None if reward is None else float(reward))


def logged_sequences(row: Logged, template: ChatTemplate, *, only_last: bool = False) -> list[TokenSequence]:
    """Return the conversations of a row as token sequences, in which the answers and their end tokens are trained.

    Args:
        row: the row.
        template: chat template and tokenizer of the model.
        only_last: True to train the last answer of a conversation alone.

    Raises:
        ValueError: the chat template cannot write it, or nothing in it is trained.
    """
    return [_sequence(each, row.tools, template, only_last) for each in row.conversations]


def _sequence(given: Conversation, tools: Sequence[Any], template: ChatTemplate, only_last: bool) -> TokenSequence:
    if isinstance(given.answer, str):
        assert isinstance(given.prompt, str)
        ids, mask = template.completion(given.prompt, given.answer)
    else:
        messages = [*given.prompt, *given.answer]
        answers = [index for index, each in enumerate(messages) if each["role"] == "assistant"]
        skipped = {len(given.prompt) + index for index in given.untrained}
        first = len(given.prompt)
        trained = [index for index in answers if index >= first and index not in skipped]
        ids, mask = template.conversation(messages, tools, trained[-1:] if only_last else trained)
    if not any(mask):
        raise ValueError("nothing in it is trained")
    zeros = [0.0] * len(ids)
    return TokenSequence(
        tokens=ids,
        completion_mask=mask,
        sampler_logprobs=zeros,
        behavior_logprobs=zeros,
        temperatures=[1.0] * len(ids),
        policy_versions=[-1] * len(ids),
        is_logged=True,
    )


def _preference(row: Mapping[str, Any]) -> list[Conversation]:
    chosen, rejected, prompt = row["chosen"], row["rejected"], row.get("prompt")
    if isinstance(chosen, str) and isinstance(rejected, str) and isinstance(prompt, list):
        chosen, rejected = ([{"role": "assistant", "content": each}] for each in (chosen, rejected))
    kinds = {isinstance(each, str) for each in (chosen, rejected, *([] if prompt is None else [prompt]))}
    if len(kinds) == 2:
        raise ValueError("'prompt', 'chosen' and 'rejected' are texts and messages: all are one of the two")
    if prompt is None and kinds == {True}:
        raise ValueError("has no 'prompt' that its texts 'chosen' and 'rejected' answer")
    if prompt is None:  # both begin with the prompt
        chosen, rejected = _messages("chosen", chosen), _messages("rejected", rejected)
        same = [one == other for one, other in zip(chosen, rejected, strict=False)]
        length = next((index for index, is_same in enumerate(same) if not is_same), len(same))
        length = min(length, len(chosen) - 1, len(rejected) - 1)
        prompt, chosen, rejected = chosen[:length], chosen[length:], rejected[length:]
    elif not isinstance(prompt, str):
        prompt = _messages("prompt", prompt)
    return [Conversation(prompt, _answer(name, each)) for name, each in (("chosen", chosen), ("rejected", rejected))]


def _messages(name: str, given: Any) -> list[dict[str, Any]]:
    try:
        return list(canonical_messages(given))
    except RequestError as error:
        raise ValueError(f"'{name}': {error}") from None


def _answer(name: str, given: Any) -> list[dict[str, Any]] | str:
    if isinstance(given, str):
        if not given:
            raise ValueError(f"'{name}' is empty")
        return given
    return _messages(name, given)


def _sharegpt(row: Mapping[str, Any]) -> list[dict[str, Any]]:
    messages = [{"role": "system", "content": row["system"]}] if row.get("system") else []
    if not isinstance(row["conversations"], list):
        raise ValueError(f"'conversations' is {row['conversations']!r:.50}; wanted a list")
    for index, each in enumerate(row["conversations"]):
        role = SHAREGPT_ROLES.get(str(each.get("from"))) if isinstance(each, Mapping) else None
        if role is None:
            roles = ", ".join(SHAREGPT_ROLES)
            raise ValueError(f"'conversations'[{index}] is {each!r:.80}; wanted 'value' and 'from', one of {roles}")
        messages.append({"role": role, "content": each.get("value")})
    return _messages("conversations", messages)


def _check(given: Conversation) -> None:
    """Raise a ValueError unless a conversation asks before it answers, and ends with an answer that is not empty."""
    if isinstance(given.answer, str):
        return
    messages = [*given.prompt, *given.answer]
    roles = [each["role"] for each in messages]
    if "assistant" not in roles[len(given.prompt) :]:
        raise ValueError("has no message of the assistant, and so nothing to train")
    if roles[-1] != "assistant" or roles[0] == "assistant":
        raise ValueError(
            f"has the roles {', '.join(roles)}; wanted a first message of another, and a last of the assistant"
        )
    for index, (one, next_one) in enumerate(itertools.pairwise(roles)):
        if next_one == "system" or (one == next_one and one in ("user", "assistant")):
            raise ValueError(f"message {index + 1} is of the {next_one}, after one of the {one}: roles take turns")
    for index, each in enumerate(messages):
        if each["role"] == "assistant" and not (each["content"].strip() or each.get("tool_calls")):
            raise ValueError(f"message {index}, of the assistant, is empty")
