"""OpenAI's completions, of chats and of token ids: from a request's JSON to what is sampled, from a `Reply` to JSON.

A prompt of token ids is for environments that render and tokenise themselves. A prompt of text is refused.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import BeforeValidator, Field
from pydantic_core import PydanticCustomError

from jaxft import ChatRequest, CompletionRequest, Delta, Reply
from jaxft.errors import RequestError
from jaxft.rollout import MAX_TOP_LOGPROBS, split_token_text
from jaxft.serving.schemas import (
    VARIABLES,
    ChatFields,
    CompletionFields,
    Count,
    Dialect,
    Many,
    Natural,
    Refused,
    TextOr,
    needs,
)
from jaxft.serving.wire import APIError, count_tokens, event, make_id, openai_error

LOWEST_LOGPROB = -9999.0
"""The log-probability that stands for minus infinity, which JSON cannot hold."""

TOKEN_IDS = ("prompt_token_ids", "generation_token_ids", "generation_log_probs")
"""Fields of a reply's message with `return_token_ids`."""

ECHOED = frozenset({*TOKEN_IDS, "parsed"})
"""Fields of a message that a client may send back, and the policy does not read; openai's `parse` adds the last."""


TopLogprobs = Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)]


class ChatCompletionRequest(CompletionFields, ChatFields):
    """A request of chat completions."""

    ignored = CompletionFields.ignored | ChatFields.ignored | {"prediction"}

    messages: Many[dict[str, Any]] = Field(description="The conversation, of text only.")
    tools: Many[dict[str, Any]] | None = Field(None, description="Functions that the model may call.")
    tool_choice: TextOr[dict[str, Any]] | None = Field(None, description="`auto`, `none`, `required` or a function.")
    max_completion_tokens: Count | None = Field(None, description="Newer name of `max_tokens`.")
    logprobs: bool | None = Field(None, description="Log-probabilities over the whole vocabulary.")
    top_logprobs: Annotated[TopLogprobs, needs("logprobs")] | None = Field(
        None, description="With `logprobs`: the most likely tokens, up to 20."
    )
    return_token_ids: bool | None = Field(
        None,
        description="The reply has `prompt_token_ids`, each choice `token_ids`, and its message both beside "
        "`generation_log_probs`; with `logprobs`, entries have `token_id`, and the first one `prompt_token_ids`; with "
        "one choice, `usage` has `prompt_token_ids`, `completion_token_ids` and `logprobs`.",
    )
    return_tokens_as_token_ids: bool | None = Field(
        None, description="As `return_token_ids`, and tokens in `logprobs` are written as `token_id:17`."
    )
    modalities: Annotated[Any, Refused("the policy writes text only", ["text"])] = None
    audio: Annotated[Any, Refused("the policy writes text only")] = None
    functions: Annotated[Any, Refused("use tools, which replace functions", [])] = None
    function_call: Annotated[Any, Refused("use tool_choice, which replaces function_call")] = None
    reasoning_effort: Annotated[Any, Refused(VARIABLES)] = None
    verbosity: Annotated[Any, Refused("ask for it in the prompt", "medium")] = None
    web_search_options: Annotated[Any, Refused("give the agent a tool that searches")] = None
    add_generation_prompt: Annotated[Any, Refused("every reply is a new message", True)] = None
    continue_final_message: Annotated[Any, Refused("every reply is a new message", False)] = None

    def to_request(self) -> ChatRequest:
        """Return what to sample.

        >>> request = {"model": "policy", "messages": [{"role": "user", "content": "?"}], "max_completion_tokens": 5}
        >>> ChatCompletionRequest.model_validate(request).to_request().max_tokens
        5
        """
        arguments = self.arguments(ChatRequest)
        limit = self.max_completion_tokens
        if limit is not None and arguments.setdefault("max_tokens", limit) != limit:
            raise RequestError(
                f"max_tokens is {self.max_tokens} and max_completion_tokens {limit}; give one", param="max_tokens"
            )
        arguments["messages"] = [
            {name: value for name, value in each.items() if name not in ECHOED} for each in self.messages
        ]
        return ChatRequest(**arguments)

    @property
    def has_token_ids(self) -> bool:
        """True if the reply has token ids."""
        return bool(self.return_token_ids or self.return_tokens_as_token_ids)


def chat_completion(asked: ChatCompletionRequest, reply: Reply, text_of_token: Callable[[int], str]) -> dict[str, Any]:
    """Return the JSON of a reply.

    Args:
        asked: the request.
        reply: its reply.
        text_of_token: text of a token id, for log-probabilities.
    """
    choices = [
        {"index": index, "message": choice.message | _token_ids(asked, choice), **_ending(asked, choice, text_of_token)}
        for index, choice in enumerate(reply.choices)
    ]
    prompt = {"prompt_token_ids": reply.prompt_ids} if asked.has_token_ids else {}
    return {**_completion(asked, "chatcmpl-", "chat.completion", reply, choices), **prompt}


def _completion(
    asked: CompletionFields, prefix: str, kind: str, reply: Reply, choices: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """Return the JSON of a reply with these choices, of a chat or of token ids."""
    return {
        **_head(asked, prefix, kind),
        "system_fingerprint": _fingerprint(*reply.choices),
        "choices": choices,
        "usage": _usage(asked, reply),
    }


def _head(asked: CompletionFields, prefix: str, kind: str) -> dict[str, Any]:
    return {"id": make_id(prefix), "object": kind, "created": int(time.time()), "model": asked.model}


def _fingerprint(*choices: Reply) -> str:
    """Return the versions of the parameters that sampled: one, unless an update came between choices or tokens."""
    versions = sorted({version for choice in choices for version in choice.completion.policy_versions})
    return f"policy_version_{'_'.join(map(str, versions))}"


def _usage(asked: CompletionFields, reply: Reply) -> dict[str, Any]:
    """Return the counts of tokens, and in a chat with token ids and one choice the tokens, as `metrics` of ATIF."""
    prompt, sampled = count_tokens(reply)
    counts = {"prompt_tokens": prompt, "completion_tokens": sampled, "total_tokens": prompt + sampled}
    if not (isinstance(asked, ChatCompletionRequest) and asked.has_token_ids and len(reply.choices) == 1):
        return counts
    tokens = {"prompt_token_ids": reply.prompt_ids, "completion_token_ids": reply.token_ids, "logprobs": reply.logprobs}
    return counts | tokens


def _token_ids(asked: ChatCompletionRequest, choice: Reply) -> dict[str, Any]:
    values = (choice.prompt_ids, choice.token_ids, choice.logprobs)
    return dict(zip(TOKEN_IDS, values, strict=True)) if asked.has_token_ids else {}


def _ending(asked: ChatCompletionRequest, choice: Reply, text_of_token: Callable[[int], str]) -> dict[str, Any]:
    """Return the fields of a choice that are known at its end."""
    return {
        "logprobs": _logprobs(asked, choice, text_of_token) if asked.logprobs else None,
        "finish_reason": choice.finish_reason,
        **({"token_ids": choice.token_ids} if asked.has_token_ids else {}),
    }


def _logprobs(asked: ChatCompletionRequest, choice: Reply, text_of_token: Callable[[int], str]) -> dict[str, Any]:
    def entry(token_id: int, logprob: float) -> dict[str, Any]:
        text, raw = split_token_text(text_of_token(token_id))
        return {
            "token": f"token_id:{token_id}" if asked.return_tokens_as_token_ids else text,
            "logprob": max(logprob, LOWEST_LOGPROB),
            "bytes": list(raw),
            **({"token_id": token_id} if asked.has_token_ids else {}),
        }

    most_likely = choice.top_logprobs or ((),) * len(choice.token_ids)
    content = [
        {**entry(token, logprob), "top_logprobs": [entry(*each) for each in most]}
        for token, logprob, most in zip(choice.token_ids, choice.logprobs, most_likely, strict=True)
    ]
    if asked.has_token_ids and content:
        # Frameworks that drop unknown fields of a choice keep those of its log-probabilities.
        content[0]["prompt_token_ids"] = choice.prompt_ids
    return {"content": content, "refusal": None}


@dataclass(frozen=True)
class ChunkWriter:
    """Writes the chunks of one streamed reply, of a chat or of token ids.

    Attributes:
        asked: the request.
        head: fields that all chunks share.
        delta_choices: returns the choices of a delta's chunks: none if it has no text.
        end_choices: returns the choices of the last chunks of an answer, from its index and itself.
    """

    asked: CompletionFields
    head: Mapping[str, Any]
    delta_choices: Callable[[Delta], Sequence[Mapping[str, Any]]]
    end_choices: Callable[[int, Reply], Sequence[Mapping[str, Any]]]

    def events(self, piece: Delta | Reply) -> Iterator[bytes]:
        """Yield the server-sent events of a delta, or of the reply, which ends the stream."""
        usage = {"usage": None} if self.asked.include_usage else {}
        if isinstance(piece, Delta):
            for choice in self.delta_choices(piece):
                yield event({**self.head, "choices": [choice], **usage})
            return
        for index, answer in enumerate(piece.choices):
            for choice in self.end_choices(index, answer):
                version = {"system_fingerprint": _fingerprint(answer)} if choice["finish_reason"] else {}
                yield event({**self.head, "choices": [choice], **usage, **version})
        if self.asked.include_usage:
            yield event({**self.head, "choices": [], "usage": _usage(self.asked, piece)})
        yield b"data: [DONE]\n\n"

    def error(self, error: APIError) -> bytes:
        """Return the event of an error that ends the stream."""
        return event(openai_error(error)[1])


def make_chat_writer(asked: ChatCompletionRequest, text_of_token: Callable[[int], str]) -> ChunkWriter:
    """Return the writer of a streamed chat completion: each choice ends with its tool calls, then its token ids."""
    begun: set[int] = set()

    def chunk(index: int, delta: Mapping[str, Any], **ending: Any) -> dict[str, Any]:
        role = {} if index in begun else {"role": "assistant"}
        begun.add(index)
        return {"index": index, "delta": {**role, **delta}, "logprobs": None, "finish_reason": None, **ending}

    def delta_choices(delta: Delta) -> list[dict[str, Any]]:
        parts = {"content": delta.content, "reasoning_content": delta.reasoning_content}
        text = {name: part for name, part in parts.items() if part}
        return [chunk(delta.index, text)] if text else []

    def end_choices(index: int, answer: Reply) -> list[dict[str, Any]]:
        calls = [{"index": place, **call.as_message()} for place, call in enumerate(answer.tool_calls)]
        chunks = []
        if calls or index not in begun:
            chunks.append(chunk(index, {"tool_calls": calls} if calls else {"content": ""}))
        return [*chunks, chunk(index, _token_ids(asked, answer), **_ending(asked, answer, text_of_token))]

    return ChunkWriter(asked, _head(asked, "chatcmpl-", "chat.completion.chunk"), delta_choices, end_choices)


CHAT_COMPLETIONS = Dialect("/v1/chat/completions", ChatCompletionRequest, chat_completion, make_chat_writer)


def _check_prompt(prompt: Any) -> Any:
    """Refuse a prompt of text, and a list of several prompts."""
    first = next(iter(prompt), None) if isinstance(prompt, list) else None
    if isinstance(prompt, str) or isinstance(first, str):
        raise PydanticCustomError(
            "unsupported_parameter",
            "wanted token ids; text is answered by chat completions, POST /v1/chat/completions, which apply the chat "
            "template (with openai, client.chat.completions.create; with llama-index give OpenAILike "
            "is_chat_model=True)",
        )
    if isinstance(first, list):
        raise PydanticCustomError("unsupported_parameter", "wanted the ids of one prompt: send one request for each")
    return prompt


class TokenCompletionRequest(CompletionFields):
    """A request of completions of token ids."""

    ignored = CompletionFields.ignored | {"add_special_tokens"}

    prompt_ids: Annotated[Many[Natural], Field(min_length=1), BeforeValidator(_check_prompt)] = Field(
        alias="prompt", description="Token ids of one prompt."
    )
    top_logprobs: TopLogprobs | None = Field(
        None,
        alias="logprobs",
        description="Number of most likely tokens beside the log-probability of each sampled one, up to 20; 0 for that "
        "one only.",
    )
    return_token_ids: bool | None = Field(
        None, description="False: choices have neither `token_ids` nor `prompt_token_ids`, which they have else."
    )
    return_tokens_as_token_ids: bool | None = Field(
        None, description="Tokens in `logprobs` are written as `token_id:17`."
    )
    best_of: Annotated[Any, Refused("ask for n choices, and choose", 1)] = None
    echo: Annotated[Any, Refused("the reply has prompt_token_ids", False)] = None
    suffix: Annotated[Any, Refused("the policy writes from left to right", "")] = None

    def to_request(self) -> CompletionRequest:
        """Return what to sample.

        >>> asked = TokenCompletionRequest.model_validate({"model": "policy", "prompt": [5, 6], "top_k": -1})
        >>> asked.to_request().prompt_ids, asked.to_request().top_k
        ([5, 6], 0)
        """
        return CompletionRequest(**self.arguments(CompletionRequest))


def text_completion(asked: TokenCompletionRequest, reply: Reply, text_of_token: Callable[[int], str]) -> dict[str, Any]:
    """Return the JSON of a reply.

    Args:
        asked: the request.
        reply: its reply.
        text_of_token: text of a token id, for log-probabilities.
    """
    choices = [
        {"index": index, "text": choice.content, **_text_ending(asked, choice, text_of_token)}
        for index, choice in enumerate(reply.choices)
    ]
    return _completion(asked, "cmpl-", "text_completion", reply, choices)


def _text_ending(asked: TokenCompletionRequest, choice: Reply, text_of_token: Callable[[int], str]) -> dict[str, Any]:
    """Return the fields of a choice that are known at its end."""
    token_ids = {"token_ids": choice.token_ids, "prompt_token_ids": choice.prompt_ids}
    return {
        "logprobs": None if asked.top_logprobs is None else _text_logprobs(asked, choice, text_of_token),
        "finish_reason": choice.finish_reason,
        "stop_reason": choice.stop_reason,
        **({} if asked.return_token_ids is False else token_ids),
    }


def _text_logprobs(asked: TokenCompletionRequest, choice: Reply, text_of_token: Callable[[int], str]) -> dict[str, Any]:
    def name(token_id: int) -> str:
        as_id = asked.return_tokens_as_token_ids
        return f"token_id:{token_id}" if as_id else split_token_text(text_of_token(token_id))[0]

    starts = [0]
    for token_id in choice.token_ids:
        starts.append(starts[-1] + len(split_token_text(text_of_token(token_id))[0]))
    # Tokens of one text, such as halves of a character, share a key: the most likely one keeps it.
    most_likely = [
        {name(token_id): max(logprob, LOWEST_LOGPROB) for token_id, logprob in reversed(most)}
        for most in choice.top_logprobs
    ]
    return {
        "tokens": [name(token_id) for token_id in choice.token_ids],
        "token_logprobs": [max(logprob, LOWEST_LOGPROB) for logprob in choice.logprobs],
        "top_logprobs": most_likely or None,
        "text_offset": starts[:-1],
    }


def make_text_writer(asked: TokenCompletionRequest, text_of_token: Callable[[int], str]) -> ChunkWriter:
    """Return the writer of a streamed completion: text as it comes, and each choice ends with its token ids."""

    def delta_choices(delta: Delta) -> list[dict[str, Any]]:
        ending = {"logprobs": None, "finish_reason": None, "stop_reason": None}
        return [{"index": delta.index, "text": delta.content, **ending}] if delta.content else []

    def end_choices(index: int, answer: Reply) -> list[dict[str, Any]]:
        return [{"index": index, "text": "", **_text_ending(asked, answer, text_of_token)}]

    return ChunkWriter(asked, _head(asked, "cmpl-", "text_completion"), delta_choices, end_choices)


COMPLETIONS = Dialect("/v1/completions", TokenCompletionRequest, text_completion, make_text_writer)
