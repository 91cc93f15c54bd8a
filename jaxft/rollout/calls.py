"""Records of the calls of language models: prompt, sampled completion, and the reply that the agent gets."""

import base64
import functools
import math
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, NamedTuple

import numpy as np
from jaxtyping import UInt, UInt32
from pydantic import Field

from jaxft.models.config import ExpertTable
from jaxft.rollout.messages import ToolCall, comparison_key, read_arguments

TopLogprobs = tuple[tuple[int, float], ...]
"""Pairs of a token id and its log-probability, the most likely first."""


class Prompt(NamedTuple):
    """A rendered and tokenised conversation that asks for an answer.

    Attributes:
        text: the rendered conversation, with control tokens in messages marked; empty for a prompt of token ids.
        ids: its token ids, as the policy is fed them.
        truncated_tokens: the number of tokens left out before `ids`, here or in the call that it continues. For text
            that was left out before it was tokenised the number is estimated from the bytes per token of the rest.
        is_retokenized: True if the conversation begins with the messages of an earlier call, but the chat template or
            the agent changed what followed, so that all text was tokenised again.
        observations: places in `ids` of the results of tools behind the call that it continues.
    """

    text: str
    ids: tuple[int, ...]
    truncated_tokens: int = 0
    is_retokenized: bool = False
    observations: tuple[int, ...] = ()


SUPPORTS = 256
"""Number of supports whose text is remembered: inside a string of JSON, a grammar allows the same tokens again."""


PENALIZED = "~"
"""Beginning of the text of a support in which penalties changed the probabilities."""


def encode_support(words: UInt32[np.ndarray, "W"]) -> str:
    """Return a packed support as text; empty for the whole vocabulary, whose words are 0.

    >>> decode_support(encode_support(np.array([5, 0], np.uint32))).tolist(), encode_support(np.zeros(2, np.uint32))
    ([5, 0], '')
    """
    return _encoded(words.astype("<u4").tobytes()) if words.any() else ""


@functools.lru_cache(SUPPORTS)
def _encoded(words: bytes) -> str:
    return base64.b64encode(zlib.compress(words, 1)).decode()


def decode_support(text: str) -> UInt32[np.ndarray, "W"]:
    """Return the words of a support that is not the whole vocabulary."""
    return np.frombuffer(zlib.decompress(base64.b64decode(text)), "<u4").astype(np.uint32)


def encode_experts(experts: UInt[np.ndarray, "T L k"]) -> list[str]:
    """Return the experts of each token as text; they are counted from 1, and the text of all zeros is empty.

    >>> encode_experts(np.array([[[3, 1]], [[0, 0]]], np.uint8))
    ['AwE=', '']
    """
    return [base64.b64encode(each.tobytes()).decode() if each.any() else "" for each in experts]


def decode_experts(texts: Sequence[str], routing: ExpertTable) -> UInt[np.ndarray, "T L k"]:
    """Return the experts of each token, 0 where none are recorded.

    Raises:
        ValueError: they are those of another model; the message names the first such token.

    >>> decode_experts(["AwE=", ""], ExpertTable(layers=1, chosen=2, experts=4)).tolist()
    [[[3, 1]], [[0, 0]]]
    """
    shape = routing.layers, routing.chosen
    size, found = math.prod(shape) * routing.dtype.itemsize, None
    decoded = [base64.b64decode(text) if text else bytes(size) for text in texts]
    are_wrong = np.array([len(each) != size for each in decoded])
    if not are_wrong.any():
        found = np.frombuffer(b"".join(decoded), routing.dtype).reshape(-1, *shape)
        are_wrong = ((found > routing.experts) | (found == 0) & found.any(axis=(1, 2), keepdims=True)).any(axis=(1, 2))
        if not are_wrong.any():
            return found
    first = int(are_wrong.argmax())
    holds = f"{len(decoded[first])} bytes, wanted {size}" if found is None else f"expert {found[first].max()}"
    raise ValueError(
        f"experts of token {first} are of another model ({holds}): the policy has {routing.layers} layers with "
        f"{routing.chosen} of {routing.experts} experts; sample with it, or set routing_replay: false"
    )


CARRIED = "carried"
"""`finish_reason` of an answer that goes on in the next collection; no agent sees it."""


@dataclass
class Completion:
    """Tokens sampled for a request, each with its log-probabilities; the engine appends to it until it has ended.

    Attributes:
        token_ids: sampled token ids, the stop token included.
        sampler_logprobs: log-probability of each sampled token over the whole vocabulary, or with penalties over its
            support, at the request's temperature and without penalties.
        behavior_logprobs: log-probability of each sampled token under the distribution that it was drawn from.
        policy_versions: version of the parameters that sampled each token.
        finish_reason: `stop` or `length`, or `CARRIED` in `Episode.answers`.
        top_logprobs: for each token, pairs of a token id and its log-probability, if the request asks for them.
        supports: tokens that each token could be drawn from (`encode_support`), behind `PENALIZED` if the request has
            penalties; empty if it neither filters nor has penalties or a grammar.
        experts: experts that each token of prompt and answer, up to the last one that the model was fed, was routed to
            (`encode_experts`); empty without any.
        first_read, last_read: `time.perf_counter()` when the first and the last tokens were read from the device, and
            the number of tokens by then.
    """

    token_ids: list[int] = field(default_factory=list)
    sampler_logprobs: list[float] = field(default_factory=list)
    behavior_logprobs: list[float] = field(default_factory=list)
    policy_versions: list[int] = field(default_factory=list)
    finish_reason: str = "length"
    top_logprobs: list[TopLogprobs] = field(default_factory=list)
    supports: list[str] = field(default_factory=list)
    experts: list[str] = field(default_factory=list)
    first_read: Annotated[tuple[float, int], Field(exclude=True)] = field(default=(0.0, 0), compare=False)
    last_read: Annotated[tuple[float, int], Field(exclude=True)] = field(default=(0.0, 0), compare=False)

    @property
    def policy_version(self) -> int:
        """Version of the parameters that sampled the first token; later ones differ if the weights were changed."""
        return next(iter(self.policy_versions), 0)

    @property
    def per_token(self) -> tuple[list[Any], ...]:
        """The lists with one value per sampled token."""
        return self.token_ids, self.sampler_logprobs, self.behavior_logprobs, self.policy_versions, self.supports


@dataclass(frozen=True)
class Reply:
    """The answer to a chat, or to a completion.

    Attributes:
        content: text of the answer up to a stop string, which is included only with `include_stop`. Reasoning and tool
            calls are not part of it.
        completion: the sampled tokens, with their log-probabilities.
        prompt_ids: token ids of the prompt as the policy was fed it.
        call_index: index of the call in its episode; None outside one.
        tool_calls: the tools that the model calls, with arguments that are a JSON object.
        reasoning_content: reasoning before the answer; None without any.
        has_malformed_tool_call: True if the answer begins a tool call that could not be parsed.
        response_text: all text of the answer, reasoning and tool calls included; None if it is `content`.
        stop_reason: the stop string or the token id of `stop_token_ids` that ended the answer; None if another end did.
        others: the other answers if the request asked for several.
    """

    content: str
    completion: Completion
    prompt_ids: tuple[int, ...] = ()
    call_index: int | None = None
    tool_calls: tuple[ToolCall, ...] = ()
    reasoning_content: str | None = None
    has_malformed_tool_call: bool = False
    response_text: str | None = None
    stop_reason: str | int | None = None
    others: tuple["Reply", ...] = ()

    @property
    def finish_reason(self) -> str:
        """`stop`, `tool_calls`, or `length` when `max_tokens` or the context was used up."""
        reason = self.completion.finish_reason
        return "tool_calls" if self.tool_calls and reason == "stop" else reason

    @property
    def token_ids(self) -> tuple[int, ...]:
        """Sampled token ids, the stop token included."""
        return tuple(self.completion.token_ids)

    @property
    def logprobs(self) -> tuple[float, ...]:
        """Log-probability of each sampled token in nats; see `Completion.sampler_logprobs`."""
        return tuple(self.completion.sampler_logprobs)

    @property
    def top_logprobs(self) -> tuple[TopLogprobs, ...]:
        """For each sampled token, the most likely tokens; empty unless the request asked for them."""
        return tuple(self.completion.top_logprobs)

    @property
    def policy_version(self) -> int:
        """Version of the parameters that sampled."""
        return self.completion.policy_version

    @property
    def choices(self) -> tuple["Reply", ...]:
        """All answers to the request: this one and the others."""
        return (self, *self.others)

    @property
    def message(self) -> dict[str, Any]:
        """The answer as a message of the history, in OpenAI's format."""
        message: dict[str, Any] = {"role": "assistant", "content": self.content}
        if self.reasoning_content is not None:
            message["reasoning_content"] = self.reasoning_content
        if self.tool_calls:
            message |= {"content": self.content or None, "tool_calls": [call.as_message() for call in self.tool_calls]}
        return message


@dataclass(frozen=True)
class Call:
    """One answered call of a language model.

    Attributes:
        index: the number of calls that the episode began before this one.
        llm: name of the language model in the configuration.
        messages: the conversation as the agent sent it; for a prompt of token ids, one message of the user with their
            text.
        prompt: the conversation as the policy was fed it.
        reply: the answer as the agent got it; a stop string may be cut from its content, but not from the ids.
        temperature: sampling temperature.
        functions: names of the agent's functions that the call was made in, outermost first (`named_function`).
        num_choices: number of answers to the request.
        rendering: arguments of `ChatTemplate.prompt` beside the messages: `tools`, `template_kwargs` and `prefill`.
    """

    index: int
    llm: str
    messages: tuple[dict[str, Any], ...]
    prompt: Prompt
    reply: Reply
    temperature: float = 1.0
    functions: tuple[str, ...] = ()
    num_choices: int = 1
    rendering: Mapping[str, Any] = field(default_factory=dict)

    @functools.cached_property
    def message_keys(self) -> list[Any]:
        """Keys of the messages, which are equal for other spellings of them."""
        return [comparison_key(message) for message in self.messages]

    @property
    def content(self) -> str:
        """Text of the answer, without reasoning and tool calls."""
        return self.reply.content

    @property
    def full_text(self) -> str:
        """All text of the answer, reasoning and tool calls included."""
        return self.reply.content if self.reply.response_text is None else self.reply.response_text

    @property
    def answer_message(self) -> dict[str, Any]:
        """The answer as a canonical message, without its reasoning."""
        message: dict[str, Any] = {"role": "assistant", "content": self.content}
        if self.reply.tool_calls:
            message["tool_calls"] = [
                {**call.as_message(), "function": {"name": call.name, "arguments": read_arguments(call.arguments)}}
                for call in self.reply.tool_calls
            ]
        return message

    @property
    def prompt_ids(self) -> tuple[int, ...]:
        """Token ids of the prompt."""
        return self.prompt.ids

    @property
    def token_ids(self) -> tuple[int, ...]:
        """Sampled token ids, the stop token included."""
        return self.reply.token_ids

    @property
    def sampler_logprobs(self) -> tuple[float, ...]:
        """Log-probability of each sampled token; see `Completion.sampler_logprobs`."""
        return self.reply.logprobs

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

PER_TOKEN = ("token_ids", "sampler_logprobs", "behavior_logprobs", "policy_versions", "supports")
"""Names of the lists of `Completion.per_token`, in its order."""


def logprobs_with_record(call: Call, text_of_token: Callable[[int], str]) -> dict[str, Any]:
    """Return the log-probabilities of an answer as OpenAI's API has them, with the record of its call in the first.

    The record goes wherever a framework takes the log-probabilities, so that the exact tokens arrive with them.

    >>> completion = Completion([7], [-0.5], [-0.5], [3], "stop")
    >>> call = Call(0, "policy", (), Prompt("", (5,)), Reply("hi", completion))
    >>> given = logprobs_with_record(call, lambda token_id: "hi")
    >>> given["content"][0]["token"], given["content"][0]["logprob"], recorded_call(given).prompt_ids
    ('hi', -0.5, (5,))
    """
    given = openai_logprobs(call.token_ids, call.sampler_logprobs, text_of_token)
    if given["content"]:
        completion = call.reply.completion
        lists = [*zip(PER_TOKEN, completion.per_token, strict=True), ("experts", completion.experts)]
        record = {name: list(values) for name, values in lists if values}
        given["content"][0][RECORD] = record | {
            "finish_reason": completion.finish_reason,
            "content": call.content,
            "prompt_ids": list(call.prompt_ids),
            "observations": list(call.prompt.observations),
            "index": call.index,
            "llm": call.llm,
            "temperature": call.temperature,
            "functions": list(call.functions),
        }
    return given


def split_token_text(text: str) -> tuple[str, bytes]:
    """Return a token's text as JSON can hold it, and its bytes.

    >>> split_token_text(b" \\xc3".decode(errors="surrogateescape"))
    (' �', b' \\xc3')
    """
    raw = text.encode(errors="surrogateescape")
    return raw.decode(errors="replace"), raw


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


def recorded_call(logprobs: Any) -> Call | None:
    """Return the call that `logprobs_with_record` recorded, without messages and prompt text; None without a record."""
    content = logprobs.get("content") if isinstance(logprobs, Mapping) else None
    first = content[0] if isinstance(content, list) and content else None
    record = first.get(RECORD) if isinstance(first, Mapping) else None
    if record is None:
        return None
    per_token: dict[str, Any] = {name: list(record.get(name, ())) for name in (*PER_TOKEN, "experts")}
    completion = Completion(**per_token, finish_reason=record["finish_reason"])
    prompt = Prompt("", tuple(record["prompt_ids"]), observations=tuple(record.get("observations", ())))
    reply = Reply(record["content"], completion, prompt.ids, record["index"])
    return Call(record["index"], record["llm"], (), prompt, reply, record["temperature"], tuple(record["functions"]))
