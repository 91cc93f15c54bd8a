"""Clients of agent frameworks for the language models of a configuration: each is what its framework calls a model.

Those of the policy reach it in this process (`jaxft.rollout.transport`), wait for it without a time-out, and never
repeat a request. Those of a remote model have its retries and time-out, and their calls are recorded like its own.
Frameworks are imported when they are asked for; each is an extra of jaxft.
"""

import abc
import pkgutil
from collections.abc import Callable
from enum import Enum
from functools import partial
from typing import Any, NamedTuple

from jaxft.errors import ComponentError, did_you_mean
from jaxft.plugins import plugin
from jaxft.rollout.language_model import LanguageModel
from jaxft.rollout.recorder import ENDPOINT
from jaxft.rollout.transport import async_transport, http_library, sync_transport


class Connection(NamedTuple):
    """The way to a language model, for the client of a framework.

    Attributes:
        model: name of the model in requests.
        settings: keywords of openai's clients: `base_url`, `api_key`, `max_retries` and `timeout`.
        http_client, http_client_sync: clients of openai's HTTP library, asynchronous and synchronous.
        max_context_tokens: maximum number of tokens of a prompt with its answer; None if it is not known.
    """

    model: str
    settings: dict[str, Any]
    http_client: Any
    http_client_sync: Any
    max_context_tokens: int | None = None


class RemoteModel(abc.ABC):
    """A language model on a server that speaks OpenAI's API."""

    @abc.abstractmethod
    def connection(self) -> Connection:
        """Return the way to the model, with new HTTP clients."""


def framework_client(llm: LanguageModel | RemoteModel, wrapper_type: str | Enum) -> Any:
    """Return a client of a framework for a language model.

    Args:
        llm: the language model.
        wrapper_type: name of the framework, a key of `WRAPPERS`, or an enumeration's member with such a value.

    Raises:
        ComponentError: the framework is unknown or not installed, or has no client for such a model.
    """
    name = wrapper_type.value if isinstance(wrapper_type, Enum) else wrapper_type
    if name not in WRAPPERS:
        raise ComponentError(f"wrapper_type {name!r} is unknown{did_you_mean(str(name), WRAPPERS, what='known are')}")
    wrap, extra = WRAPPERS[name]
    try:
        return wrap(llm.connection() if isinstance(llm, RemoteModel) else _connection_in_process(llm))
    except ImportError as error:
        reason = str(error).partition("\n")[0]
        raise ComponentError(f'wrapper_type {name!r}: {reason}; install it by: pip install "jaxft[{extra}]"') from error


def _connection_in_process(llm: LanguageModel) -> Connection:
    if not isinstance(llm, LanguageModel):
        raise ComponentError(f"a language model of type {type(llm).__name__} has no clients of frameworks")
    app = plugin("jaxft.endpoint", "app")({llm.name: llm})
    http: Any = http_library()
    # The key is not looked at, but clients want one.
    settings = {"base_url": f"{ENDPOINT}/v1", "api_key": "jaxft", "max_retries": 0, "timeout": None}
    client = http.AsyncClient(transport=async_transport(http, app), timeout=None)
    client_sync = http.Client(transport=sync_transport(http, app), timeout=None)
    return Connection(llm.name, settings, client, client_sync, llm.max_context_tokens)


def _openai(connection: Connection, *, is_sync: bool = False) -> Any:
    client = connection.http_client_sync if is_sync else connection.http_client
    make = pkgutil.resolve_name("openai:OpenAI" if is_sync else "openai:AsyncOpenAI")
    return make(**connection.settings, http_client=client)


def _langchain(connection: Connection) -> Any:
    return pkgutil.resolve_name("langchain_openai:ChatOpenAI")(
        **connection.settings,
        model=connection.model,
        http_async_client=connection.http_client,
        http_client=connection.http_client_sync,
        use_responses_api=False,
    )


def _pydantic_ai(connection: Connection) -> Any:
    model = pkgutil.resolve_name("pydantic_ai.models.openai:OpenAIChatModel")
    provider = pkgutil.resolve_name("pydantic_ai.providers.openai:OpenAIProvider")
    return model(connection.model, provider=provider(openai_client=_openai(connection)))


def _openai_agents(connection: Connection) -> Any:
    # Tracing, for the whole process, would send every episode to OpenAI.
    pkgutil.resolve_name("agents:set_tracing_disabled")(True)
    model = pkgutil.resolve_name("agents:OpenAIChatCompletionsModel")
    return model(model=connection.model, openai_client=_openai(connection))


def _llama_index(connection: Connection) -> Any:
    context, seconds = connection.max_context_tokens, connection.settings["timeout"]
    return pkgutil.resolve_name("llama_index.llms.openai_like:OpenAILike")(
        model=connection.model,
        api_base=connection.settings["base_url"],
        api_key=connection.settings["api_key"],
        max_retries=connection.settings["max_retries"],
        timeout=1e6 if seconds is None else seconds,  # it takes numbers only
        async_http_client=connection.http_client,
        http_client=connection.http_client_sync,
        is_chat_model=True,
        is_function_calling_model=True,
        temperature=1.0,  # its own default is 0.1, from which a policy would hardly learn
        **({} if context is None else {"context_window": context}),
    )


WRAPPERS: dict[str, tuple[Callable[[Connection], Any], str]] = {
    "openai": (_openai, "openai"),
    "openai_sync": (partial(_openai, is_sync=True), "openai"),
    "langchain": (_langchain, "langchain"),
    "pydantic_ai": (_pydantic_ai, "pydantic-ai"),
    "openai_agents": (_openai_agents, "openai-agents"),
    "llama_index": (_llama_index, "llama-index"),
}
"""Functions that make clients, and the extras that they need, by `wrapper_type`."""
