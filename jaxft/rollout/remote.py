"""Models on remote servers that speak OpenAI's API, beside the policy: judges, simulated users, helpers.

Their calls are recorded in the current episode (`Episode.remote_calls`) and never trained. Hooks of the HTTP client
record them, so that a call is recorded once whether `RemoteClient.chat` or the client of a framework makes it. Whole
chat completions are recorded; streams and all other requests pass unrecorded. Retries are openai's own.
"""

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import openai

from jaxft.errors import ComponentError, RemoteModelError, one_line
from jaxft.rollout.calls import RemoteCall
from jaxft.rollout.current import find_episode
from jaxft.rollout.frameworks import Connection, RemoteModel
from jaxft.rollout.language_model import blocking
from jaxft.rollout.messages import ToolCall
from jaxft.rollout.recorder import Episode

_RECORDING = "jaxft_recording"
"""Extension of an HTTP request: the function that records the completion of its response."""


@dataclass(frozen=True)
class RemoteReply:
    """The answer of a remote model.

    Attributes:
        content: text of the answer; empty if the server gave none, as beside tool calls.
        finish_reason: `stop`, `length`, `tool_calls`, or another word of the server's.
        tool_calls: calls of tools in the answer.
        reasoning_content: reasoning before the answer, of servers that give it apart.
        prompt_tokens, completion_tokens: usage as the server counts it; None if it does not say.
    """

    content: str
    finish_reason: str | None
    tool_calls: tuple[ToolCall, ...] = ()
    reasoning_content: str | None = None
    prompt_tokens: int | None = None
    completion_tokens: int | None = None

    @property
    def message(self) -> dict[str, Any]:
        """The answer as a message of the history, in OpenAI's format; servers take no reasoning back."""
        if not self.tool_calls:
            return {"role": "assistant", "content": self.content}
        calls = [call.as_message() for call in self.tool_calls]
        return {"role": "assistant", "content": self.content or None, "tool_calls": calls}


class RemoteClient(RemoteModel):
    """Chats with a model on a server, and makes recording clients of it for frameworks.

    Its attributes are its arguments; `base_url` and `api_key` are those that openai found.
    """

    def __init__(
        self,
        model: str,
        name: str = "remote",
        *,
        base_url: str | None = None,
        api_key: str | None = None,
        max_retries: int = 2,
        timeout_seconds: float = 600.0,
    ) -> None:
        """Make a client; nothing is sent yet.

        Args:
            model: the model's name on the server.
            name: name that calls are recorded under, that of the language model in the configuration.
            base_url: address that `/chat/completions` is added to; None: the environment variable OPENAI_BASE_URL, or
                else OpenAI's own.
            api_key: the server's key; None: the environment variable OPENAI_API_KEY.
            max_retries: times that openai repeats a request that could not be sent, timed out, or had the status 408,
                409, 429 or 5xx.
            timeout_seconds: time limit of connecting, and of each wait for the server to send something.

        Raises:
            OpenAIError: there is no key.
        """
        self.model, self.name = model, name
        self.max_retries, self.timeout_seconds = max_retries, timeout_seconds
        resolved = openai.OpenAI(base_url=base_url, api_key=api_key)
        self.base_url, self.api_key = str(resolved.base_url), resolved.api_key
        resolved.close()
        server = {"base_url": self.base_url, "api_key": self.api_key}
        self._settings: dict[str, Any] = {**server, "max_retries": max_retries, "timeout": timeout_seconds}
        # A connection belongs to the event loop that opened it, and agents may run loops of their own.
        self._clients: dict[asyncio.AbstractEventLoop, openai.AsyncOpenAI] = {}
        self._lock = threading.Lock()

    async def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        temperature: float | None = None,
        top_p: float | None = None,
        max_tokens: int | None = None,
        max_completion_tokens: int | None = None,
        stop: str | Sequence[str] = (),
        seed: int | None = None,
        tools: Sequence[Mapping[str, Any]] = (),
        tool_choice: str | Mapping[str, Any] | None = None,
        parallel_tool_calls: bool | None = None,
    ) -> RemoteReply:
        """Ask for the assistant's next message; a parameter that is None or empty is not sent.

        Inside an episode the call is recorded. The temperature that an evaluation sets does not apply to it.

        Args:
            messages: the conversation, in OpenAI's format.
            temperature, top_p, seed, tool_choice, parallel_tool_calls: as in OpenAI's API.
            max_tokens: maximum number of tokens of the answer.
            max_completion_tokens: the same, reasoning included; OpenAI's reasoning models take this one only.
            stop: strings that end the answer.
            tools: functions that the model may call.

        Raises:
            RemoteModelError: the server refused the request, was not reached, or gave no chat completion.
            CancelledError: the episode has ended.
        """
        given = {name: value for name, value in locals().items() if name not in ("self", "messages")}
        parameters = {name: list(value) if isinstance(value, tuple) else value for name, value in given.items()}
        request: dict[str, Any] = {"model": self.model, "messages": list(messages)}
        request |= {name: value for name, value in parameters.items() if value not in (None, "", [])}
        try:
            response = await self._client().chat.completions.with_raw_response.create(**request)
        except openai.OpenAIError as error:
            raise RemoteModelError(f"llms.{self.name}: {self._reason(error)}") from error
        answers = _answers(response.content)
        if not answers:
            raise RemoteModelError(
                f"llms.{self.name}: the server gave {response.text[:100]!r}; wanted a chat completion with an answer; "
                "base_url must be the part before /chat/completions, which often ends with /v1"
            )
        return _reply(answers[0])

    def openai_client(self) -> openai.AsyncOpenAI:
        """Return a new `AsyncOpenAI` whose chat completions are recorded; the caller closes it."""
        return openai.AsyncOpenAI(**self._settings, http_client=self.http_client())

    def openai_client_sync(self) -> openai.OpenAI:
        """Return a new `OpenAI` whose chat completions are recorded; the caller closes it."""
        return openai.OpenAI(**self._settings, http_client=self.http_client_sync())

    def connection(self) -> Connection:
        """Return the way to the model, for the client of a framework."""
        return Connection(self.model, self._settings, self.http_client(), self.http_client_sync())

    def http_client(self) -> Any:
        """Return a new `AsyncClient` of openai's HTTP library that records chat completions and changes nothing."""

        async def begin(request: Any) -> None:
            if (episode := find_episode()) is not None:
                await episode.check_open()
                self._begin(request, episode)

        async def end(response: Any) -> None:
            if _is_recorded(response):
                await response.aread()
                _record(response)

        return openai.DefaultAsyncHttpxClient(event_hooks={"request": [begin], "response": [end]})

    def http_client_sync(self) -> Any:
        """Return a new `Client` of openai's HTTP library that records chat completions and changes nothing."""

        def begin(request: Any) -> None:
            if (episode := find_episode()) is not None:
                episode.check_open_sync()
                self._begin(request, episode)

        def end(response: Any) -> None:
            if _is_recorded(response):
                response.read()
                _record(response)

        return openai.DefaultHttpxClient(event_hooks={"request": [begin], "response": [end]})

    async def close(self) -> None:
        """Close the connections that `chat` opened in this event loop."""
        with self._lock:
            client = self._clients.pop(asyncio.get_running_loop(), None)
        if client is not None:
            await client.close()

    chat_sync = blocking(chat, close)

    def _client(self) -> openai.AsyncOpenAI:
        """Return the client of the running event loop."""
        loop = asyncio.get_running_loop()
        with self._lock:
            if loop not in self._clients:
                self._clients = {known: client for known, client in self._clients.items() if not known.is_closed()}
                self._clients[loop] = self.openai_client()
            return self._clients[loop]

    def _reason(self, error: openai.OpenAIError) -> str:
        """Return the reason of an error, with what can be done about it."""
        if isinstance(error, openai.APITimeoutError):
            return (
                f"no answer within {self.timeout_seconds:g} s, in {self.max_retries + 1} attempts; raise "
                f"llms.{self.name}.timeout_seconds, or see whether the server is overloaded"
            )
        if isinstance(error, openai.APIConnectionError) and error.__cause__ is not None:
            return f"the server at base_url cannot be reached: {one_line(error.__cause__)}"
        return one_line(error)

    def _begin(self, request: Any, episode: Episode) -> None:
        """Prepare the recording of a request in an episode if it asks for a chat completion."""
        if request.method != "POST" or not request.url.path.endswith("/chat/completions"):
            return
        try:
            messages = tuple(json.loads(request.content)["messages"])
        except (KeyError, TypeError, ValueError):  # not of openai's making; the server will say so
            return
        index, calls_before = episode.begin_remote_call()

        def record(answers: Sequence[Mapping[str, Any]]) -> None:
            for answer in answers:
                own = {name: value for name, value in answer.items() if name != "reasoning_content"}
                episode.record_remote(RemoteCall(index, calls_before, self.name, messages, **own))

        request.extensions = {**request.extensions, _RECORDING: record}


def _is_recorded(response: Any) -> bool:
    is_stream = response.headers.get("content-type", "").startswith("text/event-stream")
    return _RECORDING in response.request.extensions and response.is_success and not is_stream


def _record(response: Any) -> None:
    response.request.extensions[_RECORDING](_answers(response.content))


def _answers(body: bytes) -> list[dict[str, Any]]:
    """Return the answers of a chat completion, as keywords of `RemoteReply`; none if the body of a response holds none.

    >>> _answers(b'{"choices": [{"finish_reason": "stop", "message": {"content": "4"}}]}')
    [{'content': '4', 'finish_reason': 'stop', 'tool_calls': (), 'reasoning_content': None, 'prompt_tokens': None,
      'completion_tokens': None}]
    """
    try:
        given = json.loads(body)
        usage = dict(given.get("usage") or {})
        return [
            {
                "content": choice["message"].get("content") or "",
                "finish_reason": choice.get("finish_reason"),
                "tool_calls": tuple(choice["message"].get("tool_calls") or ()),
                "reasoning_content": choice["message"].get("reasoning_content"),
                **{name: usage.get(name) for name in ("prompt_tokens", "completion_tokens")},
            }
            for choice in given["choices"]
        ]
    except (AttributeError, IndexError, KeyError, TypeError, ValueError):  # a server may send anything
        return []


def _reply(answer: dict[str, Any]) -> RemoteReply:
    """Return an answer as a reply."""
    calls = (call for call in answer["tool_calls"] if "function" in call)  # the other kind needs other tools
    functions = [(call.get("id") or "", call["function"]["name"], call["function"]["arguments"]) for call in calls]
    return RemoteReply(**answer | {"tool_calls": tuple(ToolCall(*each) for each in functions)})


async def openai_llm(config: Any, builder: Any) -> AsyncIterator["RemoteClient"]:
    """Yield the client of a model of `_type: openai`.

    Raises:
        ComponentError: there is no key.
    """
    name = next(name for name, llm in builder.config.llms.items() if llm is config)
    try:
        client = RemoteClient(
            config.model,
            name,
            base_url=config.base_url,
            api_key=None if config.api_key is None else config.api_key.get_secret_value(),
            max_retries=config.max_retries,
            timeout_seconds=config.timeout_seconds,
        )
    except openai.OpenAIError:
        raise ComponentError(
            f"llms.{name} (openai): there is no key: set llms.{name}.api_key or the environment variable "
            "OPENAI_API_KEY; a server without keys takes any text"
        ) from None
    yield client
    await client.close()
