"""Records of the calls of language models."""

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jaxft.rollout.messages import ToolCall, comparison_key, read_arguments
from jaxft.rollout.token_text import split_token_text


@dataclass(frozen=True)
class Call:
    """One answered call of a language model.

    Attributes:
        index: the number of calls that the episode began before this one.
        llm: name of the language model in the configuration.
        messages: the conversation as the agent sent it; for a prompt of token ids, one message of the user with their
            text.
        content: text of the answer as the agent got it; a stop string may be cut from it, but not from the ids.
            Reasoning and tool calls that were parsed are not in it.
        prompt_text: the conversation as the chat template renders it; empty for a prompt of token ids.
        prompt_ids: token ids of the prompt as the policy was fed it.
        token_ids: sampled token ids, the stop token included.
        sampler_logprobs: log-probability of each sampled token over the whole vocabulary, at `temperature`.
        behavior_logprobs: log-probability of each sampled token under the distribution that it was drawn from.
        temperature: sampling temperature.
        finish_reason: `stop` or `length`.
        policy_version: version of the parameters that sampled.
        policy_versions: version that sampled each token, if they differ; empty if all are `policy_version`.
        functions: names of the agent's functions that the call was made in, outermost first (`named_function`).
        truncated_tokens: the number of tokens left out at the beginning of a conversation that was too long.
        response_text: all text of the answer, reasoning and tool calls included; None if it is `content`.
        tool_calls: tool calls of the answer.
        reasoning_content: reasoning before the answer; None without any.
        has_malformed_tool_call: True if the answer begins a tool call that could not be parsed.
        is_retokenized: True if the prompt goes on from an earlier call whose ids could not be kept
            (`Prompt.is_retokenized`).
        num_choices: number of answers to the request.
    """

    index: int
    llm: str
    messages: tuple[dict[str, Any], ...]
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
    truncated_tokens: int = 0
    response_text: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()
    reasoning_content: str | None = None
    has_malformed_tool_call: bool = False
    is_retokenized: bool = False
    num_choices: int = 1
    policy_versions: tuple[int, ...] = ()

    @functools.cached_property
    def message_keys(self) -> list[Any]:
        """Keys of the messages, which are equal for other spellings of them."""
        return [comparison_key(message) for message in self.messages]

    @property
    def answer_message(self) -> dict[str, Any]:
        """The answer as a canonical message, without its reasoning."""
        message: dict[str, Any] = {"role": "assistant", "content": self.content}
        if self.tool_calls:
            message["tool_calls"] = [
                {**call.as_message(), "function": {"name": call.name, "arguments": read_arguments(call.arguments)}}
                for call in self.tool_calls
            ]
        return message

    @property
    def full_text(self) -> str:
        """All text of the answer, reasoning and tool calls included."""
        return self.content if self.response_text is None else self.response_text

    @property
    def context_ids(self) -> tuple[int, ...]:
        """Token ids of prompt and answer, which a next turn may extend."""
        return self.prompt_ids + self.token_ids


@dataclass(frozen=True)
class RemoteCall:
    """One answer of a remote model, which is not trained. A request for several answers makes one of each.

    Attributes:
        index: the number of requests to remote models that the episode began before this one.
        calls_before: the number of calls in `Episode.calls`, or still to come there, that began before this one.
        llm: name of the language model in the configuration.
        messages: the conversation as it was sent.
        content: text of the answer; empty if the server gave none, as beside tool calls.
        tool_calls: tool calls of the answer, each as in OpenAI's API.
        finish_reason: `stop`, `length`, `tool_calls`, or another word of the server's.
        prompt_tokens, completion_tokens: usage of the whole request as the server counts it; None if it does not say.
    """

    index: int
    calls_before: int
    llm: str
    messages: tuple[dict[str, Any], ...]
    content: str
    tool_calls: tuple[dict[str, Any], ...] = ()
    finish_reason: str | None = None
    prompt_tokens: int | None = None
    completion_tokens: int | None = None


RECORD = "call"
"""Key of the record of a call in the log-probabilities of its answer."""

RECORDED = (
    "index",
    "llm",
    "content",
    "prompt_ids",
    "token_ids",
    "sampler_logprobs",
    "behavior_logprobs",
    "temperature",
    "finish_reason",
    "policy_version",
    "policy_versions",
    "functions",
)
"""Fields of a `Call` in its record: all that a training row needs."""


def logprobs_with_record(call: Call, text_of_token: Callable[[int], str]) -> dict[str, Any]:
    """Return the log-probabilities of an answer as OpenAI's API has them, with the record of its call in the first.

    The record goes wherever a framework takes the log-probabilities, so that the exact tokens arrive with them.

    >>> call = Call(0, "policy", (), "hi", "", (5,), (7,), (-0.5,), (-0.5,), 1.0, "stop", 3)
    >>> given = logprobs_with_record(call, lambda token_id: "hi")
    >>> given["content"][0]["token"], given["content"][0]["logprob"], call_of(given).prompt_ids
    ('hi', -0.5, (5,))
    """
    given = openai_logprobs(call.token_ids, call.sampler_logprobs, text_of_token)
    if given["content"]:
        values = vars(call)
        given["content"][0][RECORD] = {
            name: list(values[name]) if isinstance(values[name], tuple) else values[name] for name in RECORDED
        }
    return given


def openai_logprobs(
    token_ids: Sequence[int], logprobs: Sequence[float], text_of_token: Callable[[int], str]
) -> dict[str, Any]:
    """Return the log-probabilities of an answer as OpenAI's API has them."""
    texts = [split_token_text(text_of_token(token_id)) for token_id in token_ids]
    content = [
        {"token": text, "logprob": logprob, "bytes": list(raw), "top_logprobs": []}
        for (text, raw), logprob in zip(texts, logprobs, strict=True)
    ]
    return {"content": content, "refusal": None}


def call_of(logprobs: Any) -> Call | None:
    """Return the call that `logprobs_with_record` recorded, without messages and prompt text; None without a record."""
    content = logprobs.get("content") if isinstance(logprobs, Mapping) else None
    first = content[0] if isinstance(content, list) and content else None
    record = first.get(RECORD) if isinstance(first, Mapping) else None
    if record is None:
        return None
    fields: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value for name, value in record.items()
    }
    return Call(messages=(), prompt_text="", **fields)
