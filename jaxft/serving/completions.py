"""Completions of token ids, by OpenAI's and vLLM's `/v1/completions`, for environments that render and tokenise.

The prompt is a list of token ids, and the answer has those that were sampled. Text is refused: chat completions apply
the chat template of the model.
"""

import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from jaxft.rollout.calls import Reply
from jaxft.rollout.chat_request import CompletionRequest, Delta
from jaxft.rollout.requests import MAX_TOP_LOGPROBS
from jaxft.rollout.token_text import split_token_text
from jaxft.serving.fields import (
    AT_LEAST_0,
    STREAM_OPTIONS,
    Field,
    list_of,
    make_table,
    object_schema,
    read_fields,
    read_logit_bias,
    read_stream_options,
    short,
)
from jaxft.serving.wire import (
    LAST_EVENT,
    LOWEST_LOGPROB,
    APIError,
    Dialect,
    event,
    fingerprint,
    make_id,
    openai_error,
    openai_usage,
)

TOKEN_IDS = list_of(AT_LEAST_0)

FIELDS = (
    Field("model", "OpenAI", "taken", "Name of the language model in the configuration.", "text", required=True),
    Field(
        "prompt",
        "OpenAI",
        "taken",
        "Token ids of one prompt.",
        "list of integers",
        required=True,
        schema=TOKEN_IDS | {"minItems": 1},
    ),
    Field("temperature", "OpenAI", "taken", "An episode may set its own, as evaluations do.", "number"),
    Field("top_p", "OpenAI", "taken", "Nucleus sampling.", "number"),
    Field(
        "max_tokens",
        "OpenAI",
        "taken",
        "Limit of sampled tokens; without it, as many as the context has room for.",
        "integer",
    ),
    Field("n", "OpenAI", "taken", "Number of choices.", "integer"),
    Field("seed", "OpenAI", "taken", "Varies the random numbers, which an episode fixes anyway.", "seed"),
    Field("stop", "OpenAI", "taken", "Strings that end the answer, any number of them.", "text or list of texts"),
    Field("logit_bias", "OpenAI", "taken", "Numbers added to the logits of token ids.", "object of numbers"),
    Field(
        "logprobs",
        "OpenAI",
        "taken",
        "Number of most likely tokens beside the log-probability of each sampled one, up to 20; 0 for that one only.",
        "integer",
        schema={"type": "integer", "minimum": 0, "maximum": MAX_TOP_LOGPROBS},
    ),
    Field("stream", "OpenAI", "taken", "Server-sent events; token ids come at the end.", "boolean"),
    Field(
        "stream_options",
        "OpenAI",
        "taken",
        "`include_usage`; `include_obfuscation` is ignored.",
        "object",
        schema=object_schema(STREAM_OPTIONS),
    ),
    Field("user", "OpenAI", "ignored", "Names the end user, for OpenAI's monitoring."),
    Field("best_of", "OpenAI", "refused", "ask for n choices, and choose", unused=(1,)),
    Field("echo", "OpenAI", "refused", "the reply has prompt_token_ids", unused=(False,)),
    Field("suffix", "OpenAI", "refused", "the policy writes from left to right", unused=("",)),
    Field("frequency_penalty", "OpenAI", "refused", "sampling has no penalties", unused=(0,)),
    Field("presence_penalty", "OpenAI", "refused", "sampling has no penalties", unused=(0,)),
    Field("top_k", "vLLM", "taken", "Number of most likely tokens to draw from; 0 or -1 for all.", "integer"),
    Field("min_p", "vLLM", "taken", "Least probability relative to that of the most likely token.", "number"),
    Field("stop_token_ids", "vLLM", "taken", "Token ids that end the answer, too.", "list of integers"),
    Field("include_stop_str_in_output", "vLLM", "taken", "The text ends with the stop string.", "boolean"),
    Field(
        "return_token_ids",
        "vLLM",
        "taken",
        "False: choices have neither `token_ids` nor `prompt_token_ids`, which they have else.",
        "boolean",
    ),
    Field(
        "return_tokens_as_token_ids", "vLLM", "taken", "Tokens in `logprobs` are written as `token_id:17`.", "boolean"
    ),
    Field("request_id", "vLLM", "ignored", "A name for logs."),
    Field("priority", "vLLM", "ignored", "Requests are served in the order in which they come, without priority."),
    Field("cache_salt", "vLLM", "ignored", "The prefix cache changes no answer."),
    Field("add_special_tokens", "vLLM", "ignored", "They would be added to text; token ids are taken as they are."),
    Field("repetition_penalty", "vLLM", "refused", "sampling has no penalties", unused=(1,)),
    Field("length_penalty", "vLLM", "refused", "there is no beam search", unused=(1,)),
    Field("use_beam_search", "vLLM", "refused", "there is no beam search: ask for n choices", unused=(False,)),
    Field("ignore_eos", "vLLM", "refused", "forbid the end token by logit_bias", unused=(False,)),
    Field("min_tokens", "vLLM", "refused", "forbid the end token by logit_bias", unused=(0,)),
    Field("allowed_token_ids", "vLLM", "refused", "favour tokens by logit_bias", unused=([],)),
    Field("logits_processors", "vLLM", "refused", "use logit_bias", unused=([],)),
    Field("prompt_logprobs", "vLLM", "refused", "only sampled tokens have log-probabilities", unused=(0,)),
    Field("prompt_embeds", "vLLM", "refused", "give the token ids in prompt"),
    Field("truncate_prompt_tokens", "vLLM", "refused", "set llms.<name>.long_prompts in the configuration"),
    Field("skip_special_tokens", "vLLM", "refused", "text never has control tokens, token_ids do", unused=(True,)),
    Field(
        "spaces_between_special_tokens",
        "vLLM",
        "refused",
        "text never has control tokens, token_ids do",
        unused=(True,),
    ),
    Field("response_format", "vLLM", "refused", "sampling is not constrained", unused=({"type": "text"},)),
    Field("structured_outputs", "vLLM", "refused", "sampling is not constrained"),
    Field("guided_json", "vLLM", "refused", "sampling is not constrained"),
    Field("guided_regex", "vLLM", "refused", "sampling is not constrained"),
    Field("guided_choice", "vLLM", "refused", "sampling is not constrained"),
    Field("guided_grammar", "vLLM", "refused", "sampling is not constrained"),
    Field("kv_transfer_params", "vLLM", "refused", "there is one engine", unused=({},)),
    Field("vllm_xargs", "vLLM", "refused", "extensions of vLLM do not run here", unused=({},)),
)
"""Every field of a request of completions."""

_FIELDS = make_table(FIELDS)

ARGUMENTS = {
    **{field.name: field.name for field in FIELDS if field.name in CompletionRequest.__dataclass_fields__},
    "prompt": "prompt_ids",
    "include_stop_str_in_output": "include_stop",
    "logprobs": "top_logprobs",
}
"""Names of the arguments of `CompletionRequest`, by the fields that give them."""


class CompletionCall(NamedTuple):
    """A request of completions.

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
    request: CompletionRequest
    stream: bool
    include_usage: bool
    logprobs: bool
    token_ids: bool
    tokens_as_ids: bool


def parse_completion(body: Mapping[str, Any]) -> CompletionCall:
    """Return the call that the JSON of a request asks for.

    Raises:
        APIError: a field is missing, unknown, refused, or of another kind.
        RequestError: a field has an impossible value.

    >>> call = parse_completion({"model": "policy", "prompt": [5, 6], "top_k": -1, "logprobs": 2})
    >>> call.request.prompt_ids, call.request.top_k, call.request.top_logprobs, call.token_ids
    ([5, 6], 0, 2, True)
    """
    _check_prompt(body.get("prompt"))
    given = read_fields(_FIELDS, body)
    options = read_stream_options(given)
    arguments = {ARGUMENTS[name]: value for name, value in given.items() if name in ARGUMENTS}
    if arguments.get("top_k") == -1:
        arguments["top_k"] = 0
    if "logit_bias" in arguments:
        arguments["logit_bias"] = read_logit_bias(arguments["logit_bias"])
    return CompletionCall(
        model=given["model"],
        request=CompletionRequest(**arguments),
        stream=given.get("stream", False),
        include_usage=options.get("include_usage", False),
        logprobs="logprobs" in given,
        token_ids=given.get("return_token_ids", True),
        tokens_as_ids=given.get("return_tokens_as_token_ids", False),
    )


def _check_prompt(prompt: Any) -> None:
    """Raise an `APIError` if a prompt is text, or a list of several prompts."""
    first = next(iter(prompt), None) if isinstance(prompt, list) else None
    if isinstance(prompt, str) or isinstance(first, str):
        raise APIError(
            f"prompt is {short(prompt)}; wanted token ids: text is answered by chat completions, "
            "POST /v1/chat/completions, which apply the chat template (with openai, client.chat.completions.create; "
            "with llama-index give OpenAILike is_chat_model=True)",
            param="prompt",
            code="unsupported_parameter",
        )
    if isinstance(first, list):
        raise APIError(
            f"prompt is {short(prompt)}; wanted the token ids of one prompt: send one request for each",
            param="prompt",
            code="unsupported_parameter",
        )


def text_completion(call: CompletionCall, reply: Reply, text_of_token: Callable[[int], str]) -> dict[str, Any]:
    """Return the JSON of a reply.

    Args:
        call: the call.
        reply: its reply.
        text_of_token: text of a token id, for log-probabilities.
    """
    return {
        "id": make_id("cmpl-"),
        "object": "text_completion",
        "created": int(time.time()),
        "model": call.model,
        "system_fingerprint": fingerprint(*reply.choices),
        "choices": [
            {"index": index, "text": choice.content, **_ending(call, choice, text_of_token)}
            for index, choice in enumerate(reply.choices)
        ],
        "usage": openai_usage(reply),
    }


def _ending(call: CompletionCall, choice: Reply, text_of_token: Callable[[int], str]) -> dict[str, Any]:
    """Return the fields of a choice that are known at its end."""
    return {
        "logprobs": _logprobs(call, choice, text_of_token) if call.logprobs else None,
        "finish_reason": choice.finish_reason,
        "stop_reason": choice.stop_reason,
        **({"token_ids": choice.token_ids, "prompt_token_ids": choice.prompt_ids} if call.token_ids else {}),
    }


def _logprobs(call: CompletionCall, choice: Reply, text_of_token: Callable[[int], str]) -> dict[str, Any]:
    def readable(token_id: int) -> str:
        return split_token_text(text_of_token(token_id))[0]

    texts = [readable(token_id) for token_id in choice.token_ids]
    starts = [0]
    for text in texts:
        starts.append(starts[-1] + len(text))

    def name(token_id: int) -> str:
        return f"token_id:{token_id}" if call.tokens_as_ids else readable(token_id)

    # Tokens of one text, such as halves of a character, share a key: the most likely one keeps it.
    most_likely = [
        {name(token_id): max(logprob, LOWEST_LOGPROB) for token_id, logprob in reversed(most)}
        for most in choice.top_logprobs
    ]
    return {
        "tokens": [f"token_id:{token_id}" for token_id in choice.token_ids] if call.tokens_as_ids else texts,
        "token_logprobs": [max(logprob, LOWEST_LOGPROB) for logprob in choice.logprobs],
        "top_logprobs": most_likely or None,
        "text_offset": starts[:-1],
    }


class TextChunkWriter:
    """Writes the chunks of one streamed reply, which share their id and time."""

    def __init__(self, call: CompletionCall, text_of_token: Callable[[int], str]) -> None:
        self._call = call
        self._text_of_token = text_of_token
        self._head = {
            "id": make_id("cmpl-"),
            "object": "text_completion",
            "created": int(time.time()),
            "model": call.model,
        }

    def events(self, piece: Delta | Reply) -> Iterator[bytes]:
        """Yield the events of a delta, which has none without text, or of the reply, which ends the stream."""
        if isinstance(piece, Delta):
            if piece.content:
                ending = {"logprobs": None, "finish_reason": None, "stop_reason": None}
                yield self._chunk({"index": piece.index, "text": piece.content, **ending})
            return
        for index, choice in enumerate(piece.choices):
            ending = _ending(self._call, choice, self._text_of_token)
            yield self._chunk({"index": index, "text": "", **ending}, system_fingerprint=fingerprint(choice))
        if self._call.include_usage:
            yield event({**self._head, "choices": [], "usage": openai_usage(piece)})
        yield LAST_EVENT

    def error(self, error: APIError) -> bytes:
        """Return the event of an error that ends the stream."""
        return event(openai_error(error)[1])

    def _chunk(self, choice: Mapping[str, Any], **more: Any) -> bytes:
        usage = {"usage": None} if self._call.include_usage else {}
        return event({**self._head, "choices": [choice], **usage, **more})


COMPLETIONS = Dialect(
    "/v1/completions",
    object_schema(FIELDS),
    parse_completion,
    text_completion,
    TextChunkWriter,
    names={"prompt_ids": "prompt", "messages": "prompt", "top_logprobs": "logprobs"},
)
