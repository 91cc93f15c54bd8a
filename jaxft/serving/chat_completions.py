"""OpenAI's chat completions: from the JSON of a request to a `ChatRequest`, and from a `Reply` to JSON."""

import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from jaxft.errors import RequestError
from jaxft.rollout.calls import Reply
from jaxft.rollout.chat_request import ChatRequest, Delta
from jaxft.rollout.messages import MAX_TOOLS
from jaxft.rollout.token_text import split_token_text
from jaxft.serving.fields import (
    NAME,
    STREAM_OPTIONS,
    Field,
    any_of,
    list_of,
    make_table,
    object_schema,
    read_fields,
    read_logit_bias,
    read_stream_options,
)
from jaxft.serving.wire import (
    LAST_EVENT,
    LOWEST_LOGPROB,
    APIError,
    Dialect,
    event,
    fingerprint,
    in_words_of,
    make_id,
    openai_error,
    openai_usage,
)

ECHOED = ("prompt_token_ids", "generation_token_ids", "generation_log_probs")
"""Fields of a reply's message that a client may send back; the policy has the token ids already."""

TEXT = {"type": "string"}
EMPTY: dict[str, Any] = {"enum": [None, "", [], {}]}

TOOL = {
    "type": "object",
    "properties": {
        "type": {"const": "function"},
        "function": {
            "type": "object",
            "properties": {
                "name": NAME,
                "description": {"type": ["string", "null"]},
                "parameters": {"type": ["object", "null"]},
            },
            "required": ["name"],
        },
    },
    "required": ["type", "function"],
}

TOOL_CALL = {
    "type": "object",
    "properties": {
        "id": {"type": ["string", "null"]},
        "type": {"const": "function"},
        "function": {
            "type": "object",
            "properties": {"name": NAME, "arguments": {"type": ["string", "object", "null"]}},
            "required": ["name"],
        },
    },
    "required": ["function"],
}

PART = any_of(
    *(
        {"type": "object", "properties": {"type": {"const": kind}, kind: TEXT}, "required": ["type", kind]}
        for kind in ("text", "refusal")
    )
)


def _message_schema(role: Mapping[str, Any], required: tuple[str, ...], **properties: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": {"role": role, **properties, "function_call": EMPTY, **{name: {} for name in ECHOED}},
        "required": ["role", *required],
        "additionalProperties": any_of(TEXT, EMPTY),
    }


CONTENT, NULL = any_of(TEXT, list_of(PART)), {"type": "null"}
ASSISTANT, CALLS = {"const": "assistant"}, list_of(TOOL_CALL)

MESSAGE = any_of(
    # A chat template decides which roles it knows.
    _message_schema(
        any_of({"enum": ["system", "user", "tool"]}, TEXT),
        ("content",),
        content=CONTENT,
        tool_calls=any_of(NULL, {"type": "array", "maxItems": 0}),
    ),
    _message_schema(ASSISTANT, ("content",), content=any_of(CONTENT, NULL), tool_calls=any_of(CALLS, NULL)),
    _message_schema(ASSISTANT, ("tool_calls",), content=NULL, tool_calls=CALLS | {"minItems": 1}),
    _message_schema(ASSISTANT, ("refusal",), refusal=any_of(TEXT, EMPTY), content=NULL, tool_calls=any_of(CALLS, NULL)),
)

FIELDS = (
    Field(
        "messages",
        "OpenAI",
        "taken",
        "The conversation, of text only.",
        "list of objects",
        required=True,
        schema=list_of(MESSAGE, minItems=1),
    ),
    Field("model", "OpenAI", "taken", "Name of the language model in the configuration.", "text", required=True),
    Field(
        "tools",
        "OpenAI",
        "taken",
        "Functions that the model may call.",
        "list of objects",
        schema=list_of(TOOL, maxItems=MAX_TOOLS),
    ),
    Field(
        "tool_choice",
        "OpenAI",
        "taken",
        "`auto`, `none`, `required` or a function.",
        "text or object",
        schema=any_of(
            {"enum": ["auto", "none", "required"]},
            {
                "type": "object",
                "properties": {
                    "type": {"const": "function"},
                    "function": {"type": "object", "properties": {"name": NAME}, "required": ["name"]},
                },
                "required": ["type", "function"],
            },
        ),
    ),
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
    Field(
        "stream_options",
        "OpenAI",
        "taken",
        "`include_usage`; `include_obfuscation` is ignored.",
        "object",
        schema=object_schema(STREAM_OPTIONS),
    ),
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

_FIELDS = make_table(FIELDS)


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


def parse_call(body: Mapping[str, Any]) -> ChatCall:
    """Return the call that the JSON of a request asks for.

    Raises:
        APIError: a field is missing, unknown, refused, or has an impossible value.

    >>> call = parse_call({"model": "policy", "messages": [{"role": "user", "content": "?"}], "max_tokens": 5})
    >>> call.model, call.request.max_tokens, call.stream
    ('policy', 5, False)
    >>> parse_call({"model": "policy", "messages": [], "presence_penalty": 0.5})
    Traceback (most recent call last):
    jaxft.serving.wire.APIError: presence_penalty is 0.5: sampling has no penalties
    """
    given = read_fields(_FIELDS, body)
    options = read_stream_options(given)
    if "top_logprobs" in given and not given.get("logprobs", False):
        raise APIError("top_logprobs is given; it needs logprobs to be true", param="top_logprobs")
    tokens_as_ids = given.get("return_tokens_as_token_ids", False)
    return ChatCall(
        model=given["model"],
        request=_chat_request(given),
        stream=given.get("stream", False),
        include_usage=options.get("include_usage", False),
        logprobs=given.get("logprobs", False),
        token_ids=given.get("return_token_ids", False) or tokens_as_ids,
        tokens_as_ids=tokens_as_ids,
    )


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
        arguments["logit_bias"] = read_logit_bias(arguments["logit_bias"])
    arguments["messages"] = [
        {name: value for name, value in each.items() if name not in ECHOED} for each in given["messages"]
    ]
    try:
        return ChatRequest(**arguments)
    except RequestError as error:
        raise in_words_of({}, error) from None


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
        "id": make_id("chatcmpl-"),
        "object": "chat.completion",
        "created": int(time.time()),
        "model": call.model,
        "system_fingerprint": fingerprint(*reply.choices),
        **({"prompt_token_ids": reply.prompt_ids} if call.token_ids else {}),
        "choices": choices,
        "usage": openai_usage(reply),
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
        text, raw = split_token_text(text_of_token(token_id))
        return {
            "token": f"token_id:{token_id}" if call.tokens_as_ids else text,
            "logprob": max(logprob, LOWEST_LOGPROB),
            "bytes": list(raw),
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
        self._head = {
            "id": make_id("chatcmpl-"),
            "object": "chat.completion.chunk",
            "created": int(time.time()),
            "model": call.model,
        }

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
            yield {**self._head, "choices": [], "usage": openai_usage(reply)}

    def _chunk(self, index: int, delta: dict[str, Any]) -> dict[str, Any]:
        if index not in self._begun:
            self._begun.add(index)
            delta = {"role": "assistant", **delta}
        choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
        return {**self._head, "choices": [choice], **({"usage": None} if self._call.include_usage else {})}

    def events(self, piece: Delta | Reply) -> Iterator[bytes]:
        """Yield the server-sent events of a delta, or of the reply, which ends the stream."""
        if isinstance(piece, Delta):
            yield from map(event, self.delta(piece))
        else:
            yield from map(event, self.reply(piece))
            yield LAST_EVENT

    def error(self, error: APIError) -> bytes:
        """Return the event of an error that ends the stream."""
        return event(openai_error(error)[1])


CHAT_COMPLETIONS = Dialect("/v1/chat/completions", object_schema(FIELDS), parse_call, completion, ChunkWriter)
