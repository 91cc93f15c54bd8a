"""Logged conversations and preferences as training rows, in the forms of OpenAI, TRL and ShareGPT.

| form | columns of a row |
|---|---|
| `messages` | `messages`, maybe `tools`; a message of the assistant with `weight` 0 is not trained |
| `conversations` | ShareGPT's messages, `from` and `value`, maybe after a `system` |
| `completion` | `prompt` and `completion`, both texts or both messages |
| `text` | `text`, all of which is trained |
| `preference` | `chosen` and `rejected`: texts after `prompt`, or messages, which without it begin alike |
| `preferred` | OpenAI's `input` (`messages`, maybe `tools`), `preferred_output` and `non_preferred_output` |

A row of the first four may have a `reward`.
"""

import functools
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

KINDS = {"text": str, "messages": list, "conversations": list}
"""Type of the answers of forms that are not both texts and messages."""


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
        raise ValueError(_no_form(row))
    source, asked, names, untrained = row, None, FORMS[form], tuple[int, ...]()
    if form == "preferred":
        source, names = row["input"], names[1:]
        if not isinstance(source, Mapping) or source.get("messages") is None:
            raise ValueError("'input' has no 'messages'")
        asked = _parse("input.messages", source["messages"], list)
    elif row.get("prompt") is not None and form in ("preference", "completion"):
        asked, names = _parse("prompt", row["prompt"]), tuple(name for name in names if name != "prompt")
    given = {name: row[name] for name in names}
    if form == "conversations":
        given[form] = _from_sharegpt(row)
    elif form == "messages":
        given[form], untrained = _without_weights(row[form])
    answers = [_parse(name, each, KINDS.get(form)) for name, each in given.items()]
    for name, answer in zip(names, answers, strict=True):
        if isinstance(answer, str) and not answer.strip():
            raise ValueError(f"'{name}' is empty")
    if isinstance(asked, list):  # a text that answers messages is a message
        answers = [[{"role": "assistant", "content": each}] if isinstance(each, str) else each for each in answers]
    if len({isinstance(each, str) for each in (*answers, *([] if asked is None else [asked]))}) == 2:
        columns = ", ".join(f"'{name}'" for name in ("prompt", *names) if name in row)
        raise ValueError(f"{columns} are texts and messages; wanted all as one of the two")
    if len(answers) == 2:
        asked, answers = _answer_alike(asked, *answers)
    without: Any = "" if isinstance(answers[0], str) else []
    conversations = [Conversation(without if asked is None else asked, each, untrained) for each in answers]
    for conversation in conversations:
        _check(conversation)
    tools, reward = source.get("tools") or [], row.get("reward")
    try:
        check_tools(tools)
    except RequestError as error:
        raise ValueError(f"tools: {error}") from None
    if reward is not None and not (is_number(reward) and math.isfinite(reward)):
        raise ValueError(f"'reward' is {reward!r:.50}; wanted a finite number, or null")
    return Logged(tuple(conversations), list(tools), None if reward is None else float(reward))


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
    # Neither checked nor copied, which takes as long as the tokens.
    return TokenSequence.model_construct(tokens=ids, completion_mask=mask, is_logged=True, **_unknown(len(ids)))


@functools.lru_cache(1024)
def _unknown(length: int) -> dict[str, Any]:
    """Return the columns that a log knows nothing of, which all rows of one length share."""
    zeros = [0.0] * length
    same = {"temperatures": [1.0] * length, "policy_versions": [-1] * length}
    return {"sampler_logprobs": zeros, "behavior_logprobs": zeros, **same}


def _no_form(row: Mapping[str, Any]) -> str:
    """Return what keeps a row from being of a form, with the nearest column, or the nearest form."""
    known = sorted({column for columns in FORMS.values() for column in columns})
    hints = [did_you_mean(str(name), known, what="columns") for name in row if name not in known]
    near = next((hint for hint in hints if "mean" in hint), "")
    for form, columns in FORMS.items():
        missing = [name for name in columns if row.get(name) is None]
        if not near and len(missing) < len(columns):
            near = f"; for the form {form} it lacks {', '.join(map(repr, missing))}"
    wanted = "; ".join(f"{name}: {', '.join(columns)}" for name, columns in FORMS.items())
    return f"has the columns {', '.join(map(str, row)) or 'none'}, of no form{near}; forms are {wanted}"


def _parse(name: str, given: Any, kind: type | None = None) -> list[dict[str, Any]] | str:
    """Return a text as it is, and messages in their canonical form; of one kind if one is wanted."""
    if not isinstance(given, str | list | tuple) or kind not in (None, str if isinstance(given, str) else list):
        wanted = "a text" if kind is str else "a list of messages" if kind is list else "a text or a list of messages"
        raise ValueError(f"'{name}' is {given!r:.50}; wanted {wanted}")
    try:
        return given if isinstance(given, str) else list(canonical_messages(given))
    except RequestError as error:
        raise ValueError(str(error).replace("messages", name, 1)) from None


def _without_weights(given: Any) -> tuple[list[dict[str, Any]], tuple[int, ...]]:
    """Return messages without their weights, and the indices of those with a weight of 0."""
    if not (isinstance(given, list | tuple) and all(isinstance(each, Mapping) for each in given)):
        raise ValueError(f"'messages' is {given!r:.50}; wanted a list of messages")
    weights = [1 if each.get("weight") is None else each["weight"] for each in given]
    for index, weight in enumerate(weights):
        if weight not in (0, 1):
            raise ValueError(f"messages[{index}] has the weight {weight!r:.50}; wanted 0 or 1")
    plain = [{name: value for name, value in each.items() if name != "weight"} for each in given]
    return plain, tuple(index for index, weight in enumerate(weights) if not weight)


def _from_sharegpt(row: Mapping[str, Any]) -> list[dict[str, Any]]:
    messages = [{"role": "system", "content": row["system"]}] if row.get("system") else []
    if not isinstance(row["conversations"], list):
        raise ValueError(f"'conversations' is {row['conversations']!r:.50}; wanted a list")
    for index, each in enumerate(row["conversations"]):
        role = str(each.get("from")) if isinstance(each, Mapping) else ""
        if role not in SHAREGPT_ROLES or each.get("value") is None:
            roles = ", ".join(SHAREGPT_ROLES)
            raise ValueError(f"conversations[{index}] is {each!r:.80}; wanted 'value' and 'from', one of {roles}")
        messages.append({"role": SHAREGPT_ROLES[role], "content": each["value"]})
    return messages


def _answer_alike(asked: Any, chosen: Any, rejected: Any) -> tuple[Any, list[Any]]:
    """Return the prompt of a pair and its two answers, which may both begin with it."""
    if asked is None and isinstance(chosen, str):
        raise ValueError("has no 'prompt' that its texts 'chosen' and 'rejected' answer")
    if asked is None:
        same = itertools.takewhile(lambda both: both[0] == both[1], zip(chosen[:-1], rejected[:-1], strict=False))
        length = len(list(same))
        asked, chosen, rejected = chosen[:length], chosen[length:], rejected[length:]
    if chosen == rejected:
        raise ValueError("has the same answer as chosen and as rejected, which says nothing")
    if not isinstance(asked, str) and {chosen[0]["role"], rejected[0]["role"]} != {"assistant"}:
        raise ValueError(
            "has chosen and rejected messages that answer different ones; wanted two answers to one prompt"
        )
    return asked, [chosen, rejected]


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
    for index, role in enumerate(roles):
        if SHAREGPT_ROLES.get(role, role) not in (role, "tool"):
            raise ValueError(f"message {index} has the role '{role}'; wanted '{SHAREGPT_ROLES[role]}'")
    for index, (one, next_one) in enumerate(itertools.pairwise(roles)):
        is_repeated = one == next_one and one in ("user", "assistant")
        if next_one == "system" or is_repeated or (next_one in ("tool", "function") and one in ("user", "system")):
            raise ValueError(f"message {index + 1} is of the {next_one}, after one of the {one}: roles take turns")
    for index, each in enumerate(messages):
        if each["role"] == "assistant" and not (each["content"].strip() or each.get("tool_calls")):
            raise ValueError(f"message {index}, of the assistant, is empty")
