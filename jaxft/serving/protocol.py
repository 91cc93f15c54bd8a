"""OpenAI's chat completions: from the JSON of a request to a `ChatRequest`, and from a `Reply` to JSON.

`FIELDS` says of every field of OpenAI's and vLLM's API how it is treated; a field that is not in it is refused. So no
field is without effect unless the table says why that does no harm.
"""

import itertools
import json
import math
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal, NamedTuple

from jaxft.errors import RequestError
from jaxft.rollout.chat_request import ChatRequest, Delta, Reply

MAX_BODY_BYTES = 2**24
"""Largest body of a request."""

MAX_DEPTH = 100
"""Most levels of lists and objects in a body."""

MAX_INTEGER = 2**31 - 1
"""Largest integer of a field; arrays on the device hold no larger one."""

LOWEST_LOGPROB = -9999.0
"""The log-probability that stands for minus infinity, which JSON cannot hold."""


class Field(NamedTuple):
    """A field of a request.

    Attributes:
        name: its name.
        api: whose API has it.
        treatment: `taken`: it has an effect; `refused`: an error unless the value is null or in `unused`; `ignored`: it
            has no effect, and that does no harm.
        note: its effect, what to do in the place of a refused one, or why ignoring it does no harm.
        kind: the kind of JSON that a taken field wants (a key of `KINDS`).
        unused: values of a refused field that ask for nothing.
    """

    name: str
    api: Literal["OpenAI", "vLLM"]
    treatment: Literal["taken", "refused", "ignored"]
    note: str
    kind: str = ""
    unused: tuple[Any, ...] = ()


FIELDS = (
    Field("messages", "OpenAI", "taken", "The conversation, of text only.", "list of objects"),
    Field("model", "OpenAI", "taken", "Name of the language model in the configuration.", "text"),
    Field("tools", "OpenAI", "taken", "Functions that the model may call.", "list of objects"),
    Field("tool_choice", "OpenAI", "taken", "`auto`, `none`, `required` or a function.", "text or object"),
    Field("parallel_tool_calls", "OpenAI", "taken", "False: the first call of an answer counts.", "boolean"),
    Field("temperature", "OpenAI", "taken", "An episode may set its own, as evaluations do.", "number"),
    Field("top_p", "OpenAI", "taken", "Nucleus sampling.", "number"),
    Field("max_completion_tokens", "OpenAI", "taken", "Limit of sampled tokens.", "integer"),
    Field("max_tokens", "OpenAI", "taken", "Older name of `max_completion_tokens`.", "integer"),
    Field("n", "OpenAI", "taken", "Number of choices.", "integer"),
    Field("seed", "OpenAI", "taken", "Varies the random numbers, which an episode fixes anyway.", "seed"),
    Field("stop", "OpenAI", "taken", "Strings that end the answer, any number of them.", "text or list of texts"),
    Field("logit_bias", "OpenAI", "taken", "Numbers added to the logits of token ids.", "object of numbers"),
    Field("logprobs", "OpenAI", "taken", "Log-probabilities over the whole vocabulary.", "boolean"),
    Field("top_logprobs", "OpenAI", "taken", "With `logprobs`: the most likely tokens, up to 20.", "integer"),
    Field("stream", "OpenAI", "taken", "Server-sent events; tool calls come whole, at the end.", "boolean"),
    Field("stream_options", "OpenAI", "taken", "`include_usage`; `include_obfuscation` is ignored.", "object"),
    Field("metadata", "OpenAI", "ignored", "Labels of stored completions; the run records every call."),
    Field("store", "OpenAI", "ignored", "The run records every call."),
    Field("user", "OpenAI", "ignored", "Names the end user, for OpenAI's monitoring."),
    Field("safety_identifier", "OpenAI", "ignored", "Names the end user, for OpenAI's monitoring."),
    Field("prompt_cache_key", "OpenAI", "ignored", "The prefix cache needs no key and changes no answer."),
    Field("prompt_cache_options", "OpenAI", "ignored", "The prefix cache needs no options and changes no answer."),
    Field("prompt_cache_retention", "OpenAI", "ignored", "The prefix cache lives until the next update."),
    Field("service_tier", "OpenAI", "ignored", "There is one tier."),
    Field("prediction", "OpenAI", "ignored", "Speeds up sampling at OpenAI and changes no answer."),
    Field("frequency_penalty", "OpenAI", "refused", "sampling has no penalties", unused=(0,)),
    Field("presence_penalty", "OpenAI", "refused", "sampling has no penalties", unused=(0,)),
    Field(
        "response_format",
        "OpenAI",
        "refused",
        "sampling is not constrained: ask for the format in the prompt, or give a tool with tool_choice",
        unused=({"type": "text"},),
    ),
    Field("modalities", "OpenAI", "refused", "the policy writes text only", unused=(["text"],)),
    Field("audio", "OpenAI", "refused", "the policy writes text only"),
    Field("functions", "OpenAI", "refused", "use tools, which replace functions", unused=([],)),
    Field("function_call", "OpenAI", "refused", "use tool_choice, which replaces function_call"),
    Field(
        "reasoning_effort",
        "OpenAI",
        "refused",
        "give the chat template its own variable, as in chat_template_kwargs={'enable_thinking': false}",
    ),
    Field("verbosity", "OpenAI", "refused", "ask for it in the prompt", unused=("medium",)),
    Field("web_search_options", "OpenAI", "refused", "give the agent a tool that searches"),
    Field("moderation", "OpenAI", "refused", "nothing is moderated here"),
    Field("top_k", "vLLM", "taken", "Number of most likely tokens to draw from; 0 or -1 for all.", "integer"),
    Field("min_p", "vLLM", "taken", "Least probability relative to that of the most likely token.", "number"),
    Field("stop_token_ids", "vLLM", "taken", "Token ids that end the answer, too.", "list of integers"),
    Field("include_stop_str_in_output", "vLLM", "taken", "The content ends with the stop string.", "boolean"),
    Field("chat_template_kwargs", "vLLM", "taken", "Variables of the chat template.", "object"),
    Field(
        "return_token_ids",
        "vLLM",
        "taken",
        "The reply has `prompt_token_ids` and, in each choice, `token_ids`; the choice's message has "
        "`prompt_token_ids`, `generation_token_ids` and `generation_log_probs`; with `logprobs`, its entries have "
        "`token_id`, and the first one `prompt_token_ids`.",
        "boolean",
    ),
    Field(
        "return_tokens_as_token_ids",
        "vLLM",
        "taken",
        "As `return_token_ids`, and tokens in `logprobs` are written as `token_id:17`.",
        "boolean",
    ),
    Field("request_id", "vLLM", "ignored", "A name for logs."),
    Field("priority", "vLLM", "ignored", "Requests are served in the order in which they come, without priority."),
    Field("cache_salt", "vLLM", "ignored", "The prefix cache changes no answer."),
    Field("repetition_penalty", "vLLM", "refused", "sampling has no penalties", unused=(1,)),
    Field("length_penalty", "vLLM", "refused", "there is no beam search", unused=(1,)),
    Field("use_beam_search", "vLLM", "refused", "there is no beam search: ask for n answers", unused=(False,)),
    Field("ignore_eos", "vLLM", "refused", "forbid the end token by logit_bias", unused=(False,)),
    Field("min_tokens", "vLLM", "refused", "forbid the end token by logit_bias", unused=(0,)),
    Field("bad_words", "vLLM", "refused", "forbid tokens by logit_bias", unused=([],)),
    Field("allowed_token_ids", "vLLM", "refused", "favour tokens by logit_bias", unused=([],)),
    Field("logits_processors", "vLLM", "refused", "use logit_bias", unused=([],)),
    Field("prompt_logprobs", "vLLM", "refused", "only sampled tokens have log-probabilities", unused=(0,)),
    Field("truncate_prompt_tokens", "vLLM", "refused", "set llms.<name>.long_prompts in the configuration"),
    Field("skip_special_tokens", "vLLM", "refused", "content never has control tokens", unused=(True,)),
    Field("spaces_between_special_tokens", "vLLM", "refused", "content never has control tokens", unused=(True,)),
    Field("echo", "vLLM", "refused", "the conversation is not repeated", unused=(False,)),
    Field("add_generation_prompt", "vLLM", "refused", "every reply is a new message", unused=(True,)),
    Field("continue_final_message", "vLLM", "refused", "every reply is a new message", unused=(False,)),
    Field("add_special_tokens", "vLLM", "refused", "the chat template writes them", unused=(False,)),
    Field("chat_template", "vLLM", "refused", "the template is that of the tokenizer; chat_template_kwargs vary it"),
    Field("documents", "vLLM", "refused", "put them into a message, or into chat_template_kwargs", unused=([],)),
    Field("include_reasoning", "vLLM", "refused", "reasoning is always in reasoning_content", unused=(True,)),
    Field("thinking_token_budget", "vLLM", "refused", "use max_completion_tokens"),
    Field("structured_outputs", "vLLM", "refused", "sampling is not constrained"),
    Field("guided_json", "vLLM", "refused", "sampling is not constrained"),
    Field("guided_regex", "vLLM", "refused", "sampling is not constrained"),
    Field("guided_choice", "vLLM", "refused", "sampling is not constrained"),
    Field("guided_grammar", "vLLM", "refused", "sampling is not constrained"),
    Field("mm_processor_kwargs", "vLLM", "refused", "the policy reads text only", unused=({},)),
    Field("kv_transfer_params", "vLLM", "refused", "there is one engine", unused=({},)),
    Field("vllm_xargs", "vLLM", "refused", "extensions of vLLM do not run here", unused=({},)),
)
"""Every field of a request of chat completions."""

_FIELDS = {field.name: field for field in FIELDS}


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= 1e300


def _is_integer(value: Any, largest: int = MAX_INTEGER) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and abs(value) <= largest


def _is_list_of(is_one: Callable[[Any], bool], value: Any) -> bool:
    return isinstance(value, list) and all(map(is_one, value))


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_object(value: Any) -> bool:
    return isinstance(value, dict)


KINDS: dict[str, Callable[[Any], bool]] = {
    "text": _is_text,
    "boolean": lambda value: isinstance(value, bool),
    "number": _is_number,
    "integer": _is_integer,
    "seed": lambda value: _is_integer(value, 2**63 - 1),
    "object": _is_object,
    "text or object": lambda value: _is_text(value) or _is_object(value),
    "list of objects": lambda value: _is_list_of(_is_object, value),
    "list of integers": lambda value: _is_list_of(_is_integer, value),
    "text or list of texts": lambda value: _is_text(value) or _is_list_of(_is_text, value),
    "object of numbers": lambda value: _is_object(value) and all(map(_is_number, value.values())),
}
"""Tests of values, by the words that messages name them with."""


class APIError(Exception):
    """A refusal, as OpenAI's API words it.

    Attributes:
        status: HTTP status.
        body: JSON of the response.
    """

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        kind: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.body = {"error": {"message": message, "type": kind, "param": param, "code": code}}


class ChatCall(NamedTuple):
    """A request of chat completions.

    Attributes:
        model: name of the language model.
        request: what to sample.
        stream: True for server-sent events.
        include_usage: True if the events end with the counts of tokens.
        logprobs: True if the reply has log-probabilities.
        token_ids: True if the reply has token ids.
        tokens_as_ids: True if tokens beside log-probabilities are written as ids.
    """

    model: str
    request: ChatRequest
    stream: bool
    include_usage: bool
    logprobs: bool
    token_ids: bool
    tokens_as_ids: bool


def parse_body(body: bytes) -> dict[str, Any]:
    """Return the JSON object of a request.

    Raises:
        APIError: the body is no such object, or one that cannot be worked with: NaN, half characters, deep nesting.

    >>> parse_body(b'{"n": 2}')
    {'n': 2}
    """
    try:
        text = body.decode()
        value = _DECODER.decode(text)
        if "\\ud" in text.lower():
            json.dumps(value, ensure_ascii=False).encode()  # raises on half of a character
    except (ValueError, RecursionError) as error:
        raise APIError(f"the body is not JSON that can be read: {str(error)[:200]}", code="invalid_json") from None
    if not isinstance(value, dict):
        raise APIError(f"the body is a JSON {type(value).__name__}; wanted an object")
    level: list[Any] = [value]
    depth = 0
    while level := [child for node in level if isinstance(node, dict | list) for child in _children(node)]:
        depth += 1
        if depth == MAX_DEPTH:
            raise APIError(f"the body is nested deeper than {MAX_DEPTH} levels")
    return value


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"it holds {name}, which is no number of JSON")


def _finite(text: str) -> float:
    if not math.isfinite(value := float(text)):
        raise ValueError(f"it holds {text[:30]}, which is too large")
    return value


_DECODER = json.JSONDecoder(parse_constant=_refuse_constant, parse_float=_finite)
_ENCODER = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":"))


def _children(node: Any) -> Any:
    return node.values() if isinstance(node, dict) else node


def parse_call(body: Mapping[str, Any]) -> ChatCall:
    """Return the call that the JSON of a request asks for.

    Raises:
        APIError: a field is missing, unknown, refused, or has an impossible value.

    >>> call = parse_call({"model": "policy", "messages": [{"role": "user", "content": "?"}], "max_tokens": 5})
    >>> call.model, call.request.max_tokens, call.stream
    ('policy', 5, False)
    >>> parse_call({"model": "policy", "messages": [], "presence_penalty": 0.5})
    Traceback (most recent call last):
    jaxft.serving.protocol.APIError: presence_penalty is 0.5: sampling has no penalties
    """
    given = {name: value for name, value in body.items() if value is not None}
    for name, value in given.items():
        _check_field(name, value)
    for name in ("messages", "model"):
        if name not in given:
            raise APIError(f"{name} is missing", param=name)
    options = given.get("stream_options", {})
    _check_stream_options(options, is_stream=given.get("stream", False))
    if "top_logprobs" in given and not given.get("logprobs", False):
        raise APIError("top_logprobs is given; it needs logprobs to be true", param="top_logprobs")
    tokens_as_ids = given.get("return_tokens_as_token_ids", False)
    return ChatCall(
        model=given["model"],
        request=_chat_request(given),
        stream=given.get("stream", False),
        include_usage=options.get("include_usage") or False,
        logprobs=given.get("logprobs", False),
        token_ids=given.get("return_token_ids", False) or tokens_as_ids,
        tokens_as_ids=tokens_as_ids,
    )


def _check_field(name: str, value: Any) -> None:
    """Raise an `APIError` unless a field may have this value, which is not null."""
    field = _FIELDS.get(name)
    if field is None:
        raise APIError(f"{name[:100]} is no known parameter: leave it out", param=name[:100], code="unknown_parameter")
    if field.treatment == "taken" and not KINDS[field.kind](value):
        raise APIError(f"{name} is {_short(value)}; wanted {field.kind}", param=name, code="invalid_type")
    # True equals 1, but is another value.
    is_unused = any(value == unused and isinstance(value, bool) == isinstance(unused, bool) for unused in field.unused)
    if field.treatment == "refused" and not is_unused:
        raise APIError(f"{name} is {_short(value)}: {field.note}", param=name, code="unsupported_parameter")


def _check_stream_options(options: Mapping[str, Any], *, is_stream: bool) -> None:
    if options and not is_stream:
        raise APIError("stream_options is given; it needs stream to be true", param="stream_options")
    for name, value in options.items():
        place = f"stream_options.{name[:100]}"
        if name not in ("include_usage", "include_obfuscation"):
            raise APIError(f"{place} is no known parameter: leave it out", param=place, code="unknown_parameter")
        if not isinstance(value, bool | None):
            raise APIError(f"{place} is {_short(value)}; wanted boolean", param=place, code="invalid_type")


def _short(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 60 else f"{text[:60]}..."


ECHOED = ("prompt_token_ids", "generation_token_ids", "generation_log_probs")
"""Fields of a reply's message that a client may send back; the policy has the token ids already."""

ARGUMENTS = {
    **{field.name: field.name for field in FIELDS if field.name in ChatRequest.__dataclass_fields__},
    "max_completion_tokens": "max_tokens",
    "include_stop_str_in_output": "include_stop",
}
"""Names of the arguments of `ChatRequest`, by the fields that give them."""


def _chat_request(given: Mapping[str, Any]) -> ChatRequest:
    limits = {given[name] for name in ("max_tokens", "max_completion_tokens") if name in given}
    if len(limits) > 1:
        raise APIError(
            f"max_tokens is {given['max_tokens']} and max_completion_tokens {given['max_completion_tokens']}; give one",
            param="max_tokens",
        )
    arguments = {ARGUMENTS[name]: value for name, value in given.items() if name in ARGUMENTS}
    if arguments.get("top_k") == -1:
        arguments["top_k"] = 0
    if "logit_bias" in arguments:
        arguments["logit_bias"] = {_token_id(key): value for key, value in arguments["logit_bias"].items()}
    arguments["messages"] = [
        {name: value for name, value in each.items() if name not in ECHOED} for each in given["messages"]
    ]
    try:
        return ChatRequest(**arguments)
    except RequestError as error:
        raise APIError(str(error), param=error.param) from None


def _token_id(key: str) -> int:
    if not (key.isascii() and key.isdecimal() and len(key) <= 10):
        raise APIError(f"logit_bias has the key {_short(key)}; wanted a token id", param="logit_bias")
    return int(key)


_PREFIX, _numbers = uuid.uuid4().hex[:16], itertools.count()


def _id() -> str:
    return f"chatcmpl-{_PREFIX}{next(_numbers):016x}"  # random bits for each would cost a tenth of a millisecond


def _usage(reply: Reply) -> dict[str, int]:
    prompt_tokens = len(reply.prompt_ids)
    completion_tokens = sum(len(choice.token_ids) for choice in reply.choices)
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
    }


def fingerprint(*choices: Reply) -> str:
    """Return the `system_fingerprint` of choices: the versions of the parameters that sampled them.

    It is one version, unless an update came between the choices of one reply.
    """
    versions = sorted({choice.policy_version for choice in choices})
    return f"policy_version_{'_'.join(map(str, versions))}"


def completion(call: ChatCall, reply: Reply, text_of_token: Callable[[int], str]) -> dict[str, Any]:
    """Return the JSON of a reply.

    Args:
        call: the call.
        reply: its reply.
        text_of_token: text of a token id, for log-probabilities.
    """
    choices = []
    for index, choice in enumerate(reply.choices):
        message = dict(choice.message)
        if call.token_ids:
            message |= _token_ids(choice)
        choices.append({"index": index, "message": message, **_ending(call, choice, text_of_token)})
    return {
        "id": _id(),
        "object": "chat.completion",
        "created": int(time.time()),
        "model": call.model,
        "system_fingerprint": fingerprint(*reply.choices),
        **({"prompt_token_ids": reply.prompt_ids} if call.token_ids else {}),
        "choices": choices,
        "usage": _usage(reply),
    }


def _token_ids(choice: Reply) -> dict[str, Any]:
    return {
        "prompt_token_ids": choice.prompt_ids,
        "generation_token_ids": choice.token_ids,
        "generation_log_probs": choice.logprobs,
    }


def _ending(call: ChatCall, choice: Reply, text_of_token: Callable[[int], str]) -> dict[str, Any]:
    """Return the fields of a choice that are known at its end."""
    return {
        "logprobs": _logprobs(call, choice, text_of_token) if call.logprobs else None,
        "finish_reason": choice.finish_reason,
        **({"token_ids": choice.token_ids} if call.token_ids else {}),
    }


def _logprobs(call: ChatCall, choice: Reply, text_of_token: Callable[[int], str]) -> dict[str, Any]:
    def entry(token_id: int, logprob: float) -> dict[str, Any]:
        text = text_of_token(token_id)
        return {
            "token": f"token_id:{token_id}" if call.tokens_as_ids else text,
            "logprob": max(logprob, LOWEST_LOGPROB),
            "bytes": list(text.encode()),
            **({"token_id": token_id} if call.token_ids else {}),
        }

    most_likely = choice.top_logprobs or ((),) * len(choice.token_ids)
    content = [
        {**entry(token, logprob), "top_logprobs": [entry(*each) for each in most]}
        for token, logprob, most in zip(choice.token_ids, choice.logprobs, most_likely, strict=True)
    ]
    if call.token_ids and content:
        # Frameworks that drop unknown fields of a choice keep those of its log-probabilities.
        content[0]["prompt_token_ids"] = choice.prompt_ids
    return {"content": content, "refusal": None}


class ChunkWriter:
    """Writes the chunks of one streamed reply, which share their id and time."""

    def __init__(self, call: ChatCall, text_of_token: Callable[[int], str]) -> None:
        self._call = call
        self._text_of_token = text_of_token
        self._begun: set[int] = set()
        self._head = {"id": _id(), "object": "chat.completion.chunk", "created": int(time.time()), "model": call.model}

    def delta(self, delta: Delta) -> Iterator[dict[str, Any]]:
        """Yield the chunks of a delta: none if it has no text."""
        parts = {"content": delta.content, "reasoning_content": delta.reasoning_content}
        text = {name: part for name, part in parts.items() if part}
        if text:
            yield self._chunk(delta.index, text)

    def reply(self, reply: Reply) -> Iterator[dict[str, Any]]:
        """Yield the last chunks: for each choice its tool calls, then its end with log-probabilities and token ids."""
        for index, choice in enumerate(reply.choices):
            calls = [{"index": place, **call.as_message()} for place, call in enumerate(choice.tool_calls)]
            if calls or index not in self._begun:
                yield self._chunk(index, {"tool_calls": calls} if calls else {"content": ""})
            end = self._chunk(index, _token_ids(choice) if self._call.token_ids else {})
            end["choices"][0] |= _ending(self._call, choice, self._text_of_token)
            yield {**end, "system_fingerprint": fingerprint(choice)}
        if self._call.include_usage:
            yield {**self._head, "choices": [], "usage": _usage(reply)}

    def _chunk(self, index: int, delta: dict[str, Any]) -> dict[str, Any]:
        if index not in self._begun:
            self._begun.add(index)
            delta = {"role": "assistant", **delta}
        choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
        return {**self._head, "choices": [choice], **({"usage": None} if self._call.include_usage else {})}


def event(chunk: dict[str, Any]) -> bytes:
    """Return a server-sent event."""
    return b"data: " + encode(chunk) + b"\n\n"


LAST_EVENT = b"data: [DONE]\n\n"


def encode(value: dict[str, Any]) -> bytes:
    """Return a value as JSON."""
    return _ENCODER.encode(value).encode()
