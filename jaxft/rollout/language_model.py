"""A language model that a workflow chats with: messages or token ids go in, a reply comes out, the call is recorded.

`ChatClient` answers with a policy of this process, `WorkerClient` asks the process that has the policy.
"""

import asyncio
import functools
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping, Sequence
from typing import Any, Concatenate, ParamSpec, TypeVar

from jaxft.errors import RequestError
from jaxft.rollout.calls import Reply
from jaxft.rollout.chat_request import ChatRequest, CompletionRequest, Delta
from jaxft.rollout.current import find_episode
from jaxft.rollout.messages import Message, Tool

M = TypeVar("M")
P = ParamSpec("P")
R = TypeVar("R")


UNSET = ("tools", "tool_choice", "stop", "stop_token_ids")
"""Arguments of `chat` that are left out of the request where they are None."""


def blocking(
    chat: Callable[Concatenate[M, P], Coroutine[Any, Any, R]],
    close: Callable[[M], Coroutine[Any, Any, None]] | None = None,
) -> Callable[Concatenate[M, P], R]:
    """Return a method that blocks until the reply of `chat`; outside of episodes, `close` is awaited after it."""

    @functools.wraps(chat, assigned=())
    def chat_sync(self: M, /, *args: P.args, **kwargs: P.kwargs) -> R:
        """`chat` for code that cannot await, such as a workflow that is a plain function: blocks until the reply.

        Raises:
            RuntimeError: an event loop runs in this thread, and would wait for itself.
            CancelledError: the episode has ended.
        """
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            pass
        else:
            raise RuntimeError(
                "chat_sync waits for its reply, and this thread runs an event loop, which could not answer meanwhile: "
                "write `await llm.chat(...)` here, or make the workflow a plain function (def), which runs in a thread"
            )
        call: Coroutine[Any, Any, R] = getattr(self, chat.__name__)(*args, **kwargs)  # a subclass may have its own
        episode = find_episode()
        if episode is not None:
            return episode.wait_for(call)

        async def alone() -> R:
            try:
                return await call
            finally:
                if close is not None:
                    await close(self)

        return asyncio.run(alone())

    return chat_sync


class LanguageModel(ABC):
    """Answers chats; a subclass says how.

    Attributes:
        name: name that calls are recorded under, that of the language model in the configuration.
        max_context_tokens: maximum number of tokens of a prompt with its answer.
    """

    name: str
    max_context_tokens: int

    async def chat(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Tool] | None = None,
        tool_choice: str | Mapping[str, Any] | None = None,
        parallel_tool_calls: bool = True,
        temperature: float = 1.0,
        max_tokens: int | None = None,
        max_completion_tokens: int | None = None,
        n: int = 1,
        seed: int | None = None,
        stop: str | Sequence[str] | None = None,
        include_stop: bool = False,
        stop_token_ids: Sequence[int] | None = None,
        top_k: int = 0,
        top_p: float = 1.0,
        min_p: float = 0.0,
        logit_bias: Mapping[int, float] | None = None,
        presence_penalty: float = 0.0,
        frequency_penalty: float = 0.0,
        repetition_penalty: float = 1.0,
        top_logprobs: int = 0,
        response_format: Mapping[str, Any] | None = None,
        guided_regex: str | None = None,
        guided_grammar: str | None = None,
        min_tokens: int = 0,
        ignore_eos: bool = False,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> Reply:
        """Sample the assistant's next message; `ChatRequest` describes the arguments.

        Inside an episode the call is recorded for training, its random numbers depend on episode, prompt and seed only,
        and the episode's temperature, if set, replaces `temperature`. A tool call that cannot be parsed is content.

        `max_completion_tokens` is OpenAI's newer name of `max_tokens`.

        Raises:
            PromptTooLongError: the prompt leaves no room for an answer in the context.
            RequestError: the template refuses the messages, or a parameter is impossible.
            CancelledError: the episode has ended already: it took longer than `eval.general.timeout_seconds`, or the
                run is ending.
        """
        given = {name: value for name, value in locals().items() if name in ChatRequest.__dataclass_fields__}
        if max_tokens is not None and max_completion_tokens is not None and max_tokens != max_completion_tokens:
            raise RequestError(
                f"max_tokens is {max_tokens} and max_completion_tokens {max_completion_tokens}; give one of them",
                param="max_completion_tokens",
            )
        given["max_tokens"] = max_tokens if max_completion_tokens is None else max_completion_tokens
        arguments = {name: value for name, value in given.items() if value is not None or name not in UNSET}
        return await self.answer(ChatRequest(**arguments))

    chat_sync = blocking(chat)

    async def stream(self, request: ChatRequest | CompletionRequest) -> AsyncGenerator[Delta | Reply, None]:
        """Yield the pieces of the answers as they are sampled, and at the end the reply.

        The pieces of an answer, joined, are its `content` and `reasoning_content`; tool calls come with the reply. If
        the iteration is left early and closed, sampling ends. Errors are those of `chat`.
        """
        pieces: asyncio.Queue[Delta | None] = asyncio.Queue()
        reply = asyncio.create_task(self.answer(request, pieces.put_nowait))
        reply.add_done_callback(lambda _: pieces.put_nowait(None))
        try:
            while (piece := await pieces.get()) is not None:
                yield piece
            yield await reply
        finally:
            reply.cancel()
            await asyncio.gather(reply, return_exceptions=True)

    @abstractmethod
    async def answer(
        self, request: ChatRequest | CompletionRequest, on_delta: Callable[[Delta], None] | None = None
    ) -> Reply:
        """Answer a request like `chat`, and give `on_delta` the pieces of the answers as they are sampled.

        A completion of token ids is recorded, seeded and refused as a chat that is rendered to the same ids.
        """

    @abstractmethod
    async def count_tokens(self, request: ChatRequest) -> int:
        """Return the number of tokens of a request's prompt, which nothing answers; errors are those of `chat`."""

    @abstractmethod
    def token_text(self, token_id: int) -> str:
        """Return the text that one token adds, control tokens included; parts of characters are lone surrogates."""

    @abstractmethod
    async def check(self) -> None:
        """Raise a `PolicyError` if the model can answer nothing any more."""
