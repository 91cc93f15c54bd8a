"""An ASGI app that serves language models by OpenAI's and Anthropic's APIs.

A call is recorded in the episode of its caller: the current one where the app runs in the caller's context
(`jaxft.rollout.transport`), else the one that its base URL (`/e/<token>/v1`) or key names; see `Episode.base_url`.
A client that goes away cancels its call, whose slot is free at the next step of the engine.
"""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from typing import Any, TypeVar

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from jaxft import ChatRequest, CompletionRequest, Episode, LanguageModel, Reply
from jaxft.errors import PolicyError, PromptTooLongError, RequestError, did_you_mean, one_line
from jaxft.rollout import episode_of_token, find_episode, is_episode_token, recording
from jaxft.serving.completions import CHAT_COMPLETIONS, COMPLETIONS
from jaxft.serving.messages_api import COUNT_TOKENS, MESSAGES, CountTokensRequest
from jaxft.serving.responses_api import RESPONSES
from jaxft.serving.schemas import Dialect, as_refusal, read_request
from jaxft.serving.wire import SERVED, APIError, EventWriter, encode, note_reply, openai_error, parse_body

logger = logging.getLogger(__name__)

T = TypeVar("T")

DIALECTS = (CHAT_COMPLETIONS, COMPLETIONS, MESSAGES, RESPONSES)
"""The APIs that are served."""

POSTS = (*(dialect.path for dialect in DIALECTS), COUNT_TOKENS)
"""Paths that take requests; the others are `GET /v1/models`, one model below it, and `GET /health`."""


def make_app(llms: Mapping[str, LanguageModel]) -> ASGIApp:
    """Return the app that serves these language models, by their names.

    It serves a POST to each of `POSTS`, `GET /v1/models` and `GET /health`, all also under `/e/<token>`.
    """

    def answers(dialect: Dialect) -> Route:
        async def answer(request: Request) -> Response:
            asked: Any = read_request(dialect.request, parse_body(await request.body()))
            wanted = asked.to_request()
            llm = _find(llms, asked.model)
            if asked.stream:
                writer = dialect.make_writer(asked, llm.token_text)
                events = _events(llm, wanted, writer)
                # Before the response begins, so that a request that cannot be answered gets the status of its error.
                first = await _while_connected(request, _next(events))
                return StreamingResponse(_join_events(first, events, dialect, writer), media_type="text/event-stream")
            reply = await _while_connected(request, llm.answer(wanted))
            note_reply(llm.name, reply)
            return _json(dialect.reply(asked, reply, llm.token_text))

        return Route(dialect.path, _answering(answer, dialect), methods=["POST"])

    async def count_tokens(request: Request) -> Response:
        asked = read_request(CountTokensRequest, parse_body(await request.body()))
        return _json({"input_tokens": await _find(llms, asked.model).count_tokens(asked.to_request())})

    async def models(request: Request) -> Response:
        return _json({"object": "list", "data": [_card(llm) for llm in llms.values()]})

    async def model(request: Request) -> Response:
        return _json(_card(_find(llms, request.path_params["model"])))

    async def health(request: Request) -> Response:
        for llm in llms.values():
            await _while_connected(request, llm.check())
        return _json({"status": "ok"})

    app = Starlette(
        routes=[
            *map(answers, DIALECTS),
            Route(COUNT_TOKENS, _answering(count_tokens, MESSAGES), methods=["POST"]),
            Route("/v1/models", _answering(models)),
            Route("/v1/models/{model:path}", _answering(model)),
            Route("/health", _answering(health)),
        ],
        exception_handlers={HTTPException: _no_such_path},
    )
    app.router.redirect_slashes = False  # to a path without the token of the episode
    return _in_episode(app)


def _json(body: dict[str, Any], status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    return Response(encode(body), status_code=status, headers=headers, media_type="application/json")


def error_response(error: APIError, path: str, headers: Mapping[str, str] | None = None) -> Response:
    """Return an error in the format of the API that a path belongs to."""
    known = (dialect.error for dialect in DIALECTS if path == dialect.path or path.startswith(f"{dialect.path}/"))
    status, body = next(known, openai_error)(error)
    return _json(body, status, headers)


def _in_episode(app: ASGIApp) -> ASGIApp:
    """Return the app; its requests run in the episode that their path or key names, if they name one."""

    async def in_episode(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await app(scope, receive, send)
            return
        with contextlib.ExitStack() as stack:
            try:
                token, scope = episode_token(scope)
                if token is not None:
                    stack.enter_context(recording(_episode(token)))
            except APIError as error:
                await error_response(error, scope["path"])(scope, receive, send)
                return
            if (episode := find_episode()) is not None:
                stack.enter_context(episode.cancelling())
            await app(scope, receive, send)

    return in_episode


def episode_token(scope: Scope) -> tuple[str | None, Scope]:
    """Return the token in the path or the key of a request, and the scope without it."""
    if scope["path"].startswith("/e/"):
        token, slash, path = scope["path"].removeprefix("/e/").partition("/")
        return token, {**scope, "path": slash + path, "root_path": f"{scope['root_path']}/e/{token}"}
    keys = (key.decode("latin-1") for key in request_keys(scope))
    return next(filter(is_episode_token, keys), None), scope


KEY_HEADERS = (b"authorization", b"x-api-key")
"""Headers that clients of OpenAI and of Anthropic send their key in."""


def request_keys(scope: Scope) -> list[bytes]:
    """Return the keys that a request has."""
    values = [value for name, value in scope["headers"] if name in KEY_HEADERS]
    return [(value[7:] if value[:7].lower() == b"bearer " else value).strip() for value in values]


def _episode(token: str) -> Episode:
    episode = episode_of_token(token)
    if episode is None:
        told = (
            "the base URL or key is that of no episode that runs here: take base_url or api_key of jaxft.episode() "
            "inside the workflow"
        )
        raise APIError(told, status=401, code="invalid_api_key")
    return episode


def _answering(
    endpoint: Callable[[Request], Coroutine[Any, Any, Response]], dialect: Dialect = CHAT_COMPLETIONS
) -> Callable[[Request], Coroutine[Any, Any, Response]]:
    """Return the endpoint, which answers every error in the format of a dialect."""

    async def answering(request: Request) -> Response:
        try:
            return await endpoint(request)
        except ClientDisconnect:  # nobody reads this
            return Response(status_code=499)
        except Exception as error:
            status, body = dialect.error(_refuse(error, dialect))
            return _json(body, status)

    return answering


def _refuse(error: Exception, dialect: Dialect) -> APIError:
    """Return an error for clients; the episode keeps one of the policy, after which no call can succeed."""
    if isinstance(error, PolicyError) and (episode := find_episode()) is not None:
        episode.policy_error = error
    if isinstance(error, APIError):
        return error
    if isinstance(error, PromptTooLongError):
        argument = "messages" if "messages" in dialect.request.model_fields else "prompt_ids"
        return as_refusal(dialect.request, RequestError(str(error), argument), "context_length_exceeded")
    if isinstance(error, RequestError):
        return as_refusal(dialect.request, error)
    if isinstance(error, ValueError):
        return APIError(str(error))
    if isinstance(error, PolicyError):
        return APIError(one_line(error), status=503, kind="service_unavailable_error")
    if (served := SERVED.get()) is not None:
        logger.error("request %s failed", served.id, exc_info=error)
    return APIError(one_line(error), status=500, kind="server_error")


async def _no_such_path(request: Request, error: Exception) -> Response:  # else Starlette calls it in a thread
    assert isinstance(error, HTTPException)
    path = request.scope["path"]
    posts = ", ".join(f"POST {each}" for each in POSTS)
    told = f"{request.method} {path[:100]}: served are {posts}, GET /v1/models and GET /health"
    refused = APIError(told, status=error.status_code, code="not_found")
    return error_response(refused, path, error.headers)


def _find(llms: Mapping[str, LanguageModel], name: str) -> LanguageModel:
    if name not in llms:
        told = f"there is no model {name[:100]!r}{did_you_mean(name, llms, what='models')}"
        raise APIError(told, status=404, param="model", code="model_not_found")
    return llms[name]


def _card(llm: LanguageModel) -> dict[str, Any]:
    length = llm.max_context_tokens
    return {"id": llm.name, "object": "model", "created": 0, "owned_by": "jaxft", "max_model_len": length}


async def _while_connected(request: Request, answering: Coroutine[Any, Any, T]) -> T:
    """Return the result of a coroutine, which is cancelled when the client goes away."""
    task, gone = asyncio.current_task(), asyncio.create_task(_wait_for_end(request))
    assert task is not None

    def cancel(gone: "asyncio.Task[None]") -> None:
        if not gone.cancelled():
            task.cancel()

    gone.add_done_callback(cancel)
    try:
        return await answering
    except asyncio.CancelledError:
        if gone.done() and not gone.cancelled():
            task.uncancel()
            raise ClientDisconnect from None
        raise
    finally:
        gone.remove_done_callback(cancel)
        gone.cancel()


async def _wait_for_end(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _events(
    llm: LanguageModel, wanted: ChatRequest | CompletionRequest, writer: EventWriter
) -> AsyncIterator[bytes]:
    """Yield the server-sent events of an answer."""
    async with contextlib.aclosing(llm.stream(wanted)) as pieces:
        async for piece in pieces:
            if isinstance(piece, Reply):
                note_reply(llm.name, piece)
            for event in writer.events(piece):
                yield event


async def _next(events: AsyncIterator[bytes]) -> bytes:
    return await anext(events)


async def _join_events(
    first: bytes, rest: AsyncIterator[bytes], dialect: Dialect, writer: EventWriter
) -> AsyncIterator[bytes]:
    """Yield the events; an error between them becomes the last one."""
    yield first
    try:
        async for each in rest:
            yield each
    except Exception as error:
        yield writer.error(_refuse(error, dialect))
