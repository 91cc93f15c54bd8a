"""Completions of token ids, by OpenAI's and vLLM's `/v1/completions`, for environments that render and tokenise.

The prompt is a list of token ids, and the answer has those that were sampled. Text is refused: chat completions apply
the chat template of the model.
"""

from collections.abc import Callable
from typing import Annotated, Any

from pydantic import BeforeValidator, Field
from pydantic_core import PydanticCustomError

from jaxft import CompletionRequest, Delta, Reply
from jaxft.rollout import MAX_TOP_LOGPROBS, split_token_text
from jaxft.serving.chat_completions import LOWEST_LOGPROB, ChunkWriter, whole_completion
from jaxft.serving.schemas import CompletionFields, Dialect, Ignored, Many, Natural, Refused


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
        raise PydanticCustomError(
            "unsupported_parameter", "wanted the token ids of one prompt: send one request for each"
        )
    return prompt


class TokenCompletionRequest(CompletionFields):
    """A request of completions of token ids."""

    prompt_ids: Annotated[Many[Natural], Field(min_length=1), BeforeValidator(_check_prompt)] = Field(
        alias="prompt", description="Token ids of one prompt."
    )
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = Field(
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
    add_special_tokens: Ignored = Field(None, description="They are for text; token ids are taken as they are.")
    best_of: Annotated[Any, Refused("ask for n choices, and choose", 1)] = None
    echo: Annotated[Any, Refused("the reply has prompt_token_ids", False)] = None
    suffix: Annotated[Any, Refused("the policy writes from left to right", "")] = None
    prompt_embeds: Annotated[Any, Refused("give the token ids in prompt")] = None

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
        {"index": index, "text": choice.content, **_ending(asked, choice, text_of_token)}
        for index, choice in enumerate(reply.choices)
    ]
    return whole_completion(asked, "cmpl-", "text_completion", reply, choices)


def _ending(asked: TokenCompletionRequest, choice: Reply, text_of_token: Callable[[int], str]) -> dict[str, Any]:
    """Return the fields of a choice that are known at its end."""
    token_ids = {"token_ids": choice.token_ids, "prompt_token_ids": choice.prompt_ids}
    return {
        "logprobs": None if asked.top_logprobs is None else _logprobs(asked, choice, text_of_token),
        "finish_reason": choice.finish_reason,
        "stop_reason": choice.stop_reason,
        **({} if asked.return_token_ids is False else token_ids),
    }


def _logprobs(asked: TokenCompletionRequest, choice: Reply, text_of_token: Callable[[int], str]) -> dict[str, Any]:
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
        return [{"index": index, "text": "", **_ending(asked, answer, text_of_token)}]

    return ChunkWriter(asked, "cmpl-", "text_completion", delta_choices, end_choices)


COMPLETIONS = Dialect("/v1/completions", TokenCompletionRequest, text_completion, make_text_writer)
