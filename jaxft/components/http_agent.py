"""`_type: http_agent`: an agent at an address, in any language, which the run asks for one episode after the other.

The agent gets the example and a base URL of the episode's own. It asks the language models there, and its calls are
recorded as those of an agent in process; its response is the output of the episode.
"""

import json
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

from pydantic import SecretStr

from jaxft.errors import ConfigError
from jaxft.harness.addresses import HTTPAddress
from jaxft.harness.config_types import LLMRef
from jaxft.harness.registry import WorkflowConfig
from jaxft.rollout.current import episode
from jaxft.rollout.transport import http_library

MAX_RESPONSE_BYTES = 2**24
"""Largest size of a response."""

CONNECT_SECONDS = 10.0
"""Time that connecting to the agent may take."""


class HTTPAgentConfig(WorkflowConfig, name="http_agent", factory="jaxft.components.http_agent:http_agent"):
    """An agent at an address, which is posted each example with a base URL of its episode, and answers with its output.

    The body of the request is JSON: `example` (the row of the dataset), `base_url`, `api_key` and `model` for its calls
    of the language model, `episode` (a name) and `seed` (a number that is the same when the episode is repeated).
    """

    url: HTTPAddress
    """Address of the agent, as in http://localhost:9000/episode."""
    llm: LLMRef | None = None
    """Entry of llms that the agent is told as its model; null: the only one."""
    api_key: SecretStr | None = None
    """Key that is sent to the agent, as Authorization: Bearer KEY; null: none."""


async def http_agent(
    config: HTTPAgentConfig, builder: Any
) -> AsyncIterator[Callable[[dict[str, Any]], Awaitable[Any]]]:
    """Yield a workflow that posts an example to the agent, and returns its response.

    Raises:
        ConfigError: `llm` is null, and there is not exactly one entry of `llms`.
        ComponentError: the packages of the server are not installed.
    """
    llms = list(builder.config.llms)
    if config.llm is None and len(llms) != 1:
        raise ConfigError(f"workflow.llm: is null: name one of the {len(llms)} entries of llms: {', '.join(llms)}")
    model = llms[0] if config.llm is None else config.llm
    await builder.get_server_url()
    http: Any = http_library()
    key = None if config.api_key is None else config.api_key.get_secret_value()
    # Each episode has a connection of its own: servers close one after an error, or when it was idle, without a word.
    limits = http.Limits(max_connections=None, max_keepalive_connections=0)
    async with http.AsyncClient(
        headers={"Accept-Encoding": "identity"} | ({} if key is None else {"Authorization": f"Bearer {key}"}),
        timeout=http.Timeout(None, connect=CONNECT_SECONDS),
        limits=limits,
        trust_env=False,  # a proxy would be asked for addresses of this machine
    ) as client:

        async def ask(example: dict[str, Any]) -> Any:
            current = episode()
            body = {
                "example": example,
                "base_url": current.base_url,
                "api_key": current.api_key,
                "model": model,
                "episode": current.id,
                "seed": current.seed,
            }
            try:
                async with client.stream("POST", config.url, json=body) as response:
                    given = await _read(response)
            except http.HTTPError as error:
                reason = str(error) or type(error).__name__
                raise ConnectionError(f"POST {config.url}: the agent cannot be asked: {reason}") from None
            return _output(config.url, response, given)

        yield ask


async def _read(response: Any) -> bytes:
    """Return the body of a response.

    Raises:
        ValueError: it is too large, or compressed: a few kilobytes may hold more than memory, and minutes of decoding.
    """
    encoding = response.headers.get("content-encoding", "identity")
    if encoding.strip().lower() != "identity":
        raise ValueError(f"the response of the agent has the Content-Encoding {encoding[:100]!r}: send it as it is")
    body = bytearray()
    async for part in response.aiter_raw():
        body += part
        if len(body) > MAX_RESPONSE_BYTES:
            raise ValueError(f"the response of the agent is larger than {MAX_RESPONSE_BYTES} bytes")
    return bytes(body)


def _output(url: str, response: Any, body: bytes) -> Any:
    """Return what an agent answered: the value of JSON, or a plain text.

    Raises:
        RuntimeError: the status is not that of success.
        ValueError: the body is neither JSON nor text.
    """
    text = body.decode(errors="replace")
    if not response.is_success:
        raise RuntimeError(f"POST {url}: the agent answered with the status {response.status_code}: {text[:500]}")
    kind = response.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind.startswith("text/"):
        return text
    try:
        return json.loads(body)
    except ValueError as error:
        raise ValueError(
            f"POST {url}: the agent answered {text[:100]!r}, which is no JSON ({error}); send JSON, or text with the "
            "content type text/plain"
        ) from None
