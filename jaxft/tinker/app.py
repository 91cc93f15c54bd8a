"""An ASGI app that serves the verbs to Tinker's own client.

Verbs that take long answer with the id of a request at once; `retrieve_future` then waits for its result. A client
sends the next request of a model when it has the id of the last one, or a refusal; so they begin as they come, and a
number that is missing was refused. A request that is sent again, as after a connection that broke, has the same id and
is answered by the same result.
"""

import asyncio
import inspect
import logging
from collections.abc import Callable, Mapping
from typing import Annotated, Any, NamedTuple

from pydantic import Field, ValidationError, create_model
from pydantic_core import from_json, to_json
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from jaxft import Policy
from jaxft.errors import ConfigError
from jaxft.rollout import ChatClient
from jaxft.tinker.data import fields_of
from jaxft.tinker.service import Gone, Service
from jaxft.tinker.wire import PROTOBUF, read_forward_backward, write_forward_backward, write_sample

logger = logging.getLogger(__name__)

WAIT_SECONDS = 20.0
"""Time that a client waits for a result before it is told to ask again; it gives up after 45."""

RESULT_SECONDS = 180.0
"""Time that a result is kept, as clients may ask for one again."""

CLIENT_CONFIG = {
    "parallel_fwdbwd_chunks": False,  # so that a model's requests come one after the other
    "proto_compress_fwdbwd": False,
    "sample_max_concurrent_requests": 100,  # each of which has a connection, as long as it waits
    "sample_use_retrieve_futures": False,
    "custom_loss_server_side": False,
}
"""Choices of the client that the server makes: it reads no compressed bodies, and runs no custom losses itself."""


class Endpoint(NamedTuple):
    """A method and path below `/api/v1`, and the verb that answers a request's fields.

    A verb that `is_long` runs as a request of its own. `write` makes the body of a result that is not JSON.
    """

    method: str
    path: str
    verb: Callable[..., Any]
    is_long: bool = False
    write: Callable[[Any], bytes] | None = None


def endpoints(service: Service) -> list[Endpoint]:
    """Return what is served: the verbs, and those about requests and the server."""

    async def retrieve_future(request_id: str) -> Response:
        task = service.session(request_id.partition(":")[0]).requests.get(request_id)
        if task is not None:
            await asyncio.wait([task], timeout=WAIT_SECONDS)
            if not task.done():
                return _json({"type": "try_again", "request_id": request_id, "queue_state": "active"}, 408)
            if not task.cancelled():
                return task.result()
        raise Gone(f"there is no request {request_id!r:.100}, or it was cancelled, or answered too long ago")

    def cancel_future(request_id: str) -> None:
        requests = service.session(request_id.partition(":")[0]).requests
        if ":sample:" in request_id and (task := requests.pop(request_id, None)) is not None:
            task.cancel()  # as is no request of a model, whose gradients would be half added

    return [  # those that are asked for most come first, as the routes are tried one after the other
        Endpoint("POST", "retrieve_future", retrieve_future),
        Endpoint("POST", "asample", service.sample, True, write_sample),
        Endpoint("GET", "healthz", lambda: {"status": "ok"}),
        Endpoint("POST", "client/config", lambda: CLIENT_CONFIG),
        Endpoint("POST", "client/dynamic_config", lambda: {"sample_cancel_enabled": True}),
        Endpoint("POST", "telemetry", lambda: {"status": "accepted"}),  # which nobody reads
        Endpoint("GET", "get_server_capabilities", service.get_server_capabilities),
        Endpoint("POST", "create_session", service.create_session),
        Endpoint("POST", "session_heartbeat", service.session_heartbeat),
        Endpoint("POST", "sessions/{session_id}/finish", service.finish_session),
        Endpoint("POST", "cancel_future", cancel_future),
        Endpoint("POST", "create_model", service.create_model, True),
        Endpoint("POST", "get_info", service.get_info),
        Endpoint("POST", "forward_backward", service.forward_backward, True, write_forward_backward),
        Endpoint("POST", "optim_step", service.optim_step, True),
        Endpoint("POST", "save_weights", service.save_weights, True),
        Endpoint("POST", "save_weights_for_sampler", service.save_weights_for_sampler, True),
        Endpoint("POST", "load_weights", service.load_weights, True),
        Endpoint("POST", "create_sampling_session", service.create_sampling_session),
        Endpoint("GET", "samplers/{sampler_id}", service.get_sampler),
        Endpoint("GET", "checkpoints", service.list_checkpoints),
        Endpoint("GET", "training_runs/{model_id}", service.get_training_run),
        Endpoint("GET", "training_runs/{model_id}/checkpoints", service.list_checkpoints),
        Endpoint("DELETE", "training_runs/{model_id}/checkpoints/{kind}/{name}", service.delete_checkpoint),
        Endpoint("POST", "weights_info", service.weights_info),
    ]


def make_app(service: Service) -> Starlette:
    """Return the app that serves a service."""
    table = endpoints(service)

    def route(endpoint: Endpoint) -> Route:
        fields = fields_of(endpoint.verb)
        if endpoint.is_long:
            fields = create_model("Fields", __base__=fields, seq_id=(Annotated[int, Field(lt=2**62)], 0))

        async def answer(request: Request) -> Response:
            try:
                asked = dict(fields.model_validate(await _read(request)))
                return await (_begin(service, endpoint, asked) if endpoint.is_long else _respond(endpoint, asked))
            except Exception as error:
                status, told = explain(error)
                return _json({"detail": told}, status)

        return Route(f"/api/v1/{endpoint.path}", answer, methods=[endpoint.method])

    async def no_such_path(request: Request, error: Exception) -> Response:  # else Starlette calls it in a thread
        assert isinstance(error, HTTPException)
        served = ", ".join(f"{each.method} /api/v1/{each.path}" for each in table)
        return _json({"detail": f"{request.method} {request.url.path[:100]}: served are {served}"}, error.status_code)

    return Starlette(routes=[*map(route, table)], exception_handlers={404: no_such_path, 405: no_such_path})


def serve_models(llms: Mapping[str, Any], *, name: str | None) -> Starlette:
    """Return the app for the policy of a configuration, which `jaxft serve --tinker` serves.

    Args:
        llms: the language models by their names.
        name: name that clients ask for; None for that of the configuration.

    Raises:
        ConfigError: there is no policy, or there are several, or it cannot be the base of adapters.
    """
    own = {
        key: llm.policy for key, llm in llms.items() if isinstance(llm, ChatClient) and isinstance(llm.policy, Policy)
    }
    if len(own) != 1:
        raise ConfigError(f"llms: {', '.join(own) or 'none'} is of type local_policy; --tinker wants one")
    ((key, policy),) = own.items()
    try:
        return make_app(Service(policy, name or key))
    except ValueError as error:
        raise ConfigError(f"llms.{key}: {error}") from error


async def _read(request: Request) -> dict[str, Any]:
    """Return the fields of a request, from its body, query and path."""
    body = await request.body()
    if request.headers.get("content-type") == PROTOBUF:
        return await asyncio.to_thread(read_forward_backward, body)
    found = from_json(body or b"{}", allow_inf_nan=False)
    if not isinstance(found, dict):
        raise ValueError(f"the body is a JSON {type(found).__name__}; wanted an object")
    return found | dict(request.query_params) | request.path_params


async def _begin(service: Service, endpoint: Endpoint, asked: dict[str, Any]) -> Response:
    """Begin a verb unless the request has come before, and answer with the id of its result."""
    number, model_id = asked["seq_id"], asked.get("model_id")
    made = f"{asked.get('session_id')}:train:{asked.get('model_seq_id')}"
    request_id = f"{model_id or asked.get('sampling_session_id') or made}:{number}"
    requests = service.session(request_id.partition(":")[0]).requests
    if request_id not in requests:
        if model_id is not None:
            service.model(model_id).take(number)
        if "seq_id" not in fields_of(endpoint.verb).model_fields:
            del asked["seq_id"]
        task = requests[request_id] = asyncio.create_task(_run(endpoint, asked))
        loop = asyncio.get_running_loop()
        task.add_done_callback(lambda _: loop.call_later(RESULT_SECONDS, requests.pop, request_id, None))
    ids = [f"{request_id}:{each}" for each in range(asked.get("num_samples", 0))]
    return _json({"request_id": request_id, "model_id": model_id, "sample_sequence_ids": ids})


async def _run(endpoint: Endpoint, asked: Mapping[str, Any]) -> Response:
    """Return the result of a verb, or the reason why there is none."""
    try:
        return await _respond(endpoint, asked)
    except Exception as error:
        status, told = explain(error)
        return _json({"error": told, "category": "user" if status < 500 else "server"})


async def _respond(endpoint: Endpoint, asked: Mapping[str, Any]) -> Response:
    found = endpoint.verb(**asked)
    found = await found if inspect.isawaitable(found) else found
    if endpoint.write is not None:
        return Response(endpoint.write(found), media_type=PROTOBUF)
    return found if isinstance(found, Response) else _json(found)


def explain(error: Exception) -> tuple[int, str]:
    """Return the status and the reason of an error."""
    if isinstance(error, ValidationError):
        first = error.errors(include_url=False)[0]
        if isinstance(inner := first.get("ctx", {}).get("error"), ValidationError):
            return explain(inner)
        place = ".".join(map(str, first["loc"])) or "the body"
        return 422, f"{place} is {first['input']!r:.100}: {first['msg']}"
    if isinstance(error, ValueError):
        return 410 if isinstance(error, Gone) else 400, str(error)
    logger.error("a request failed", exc_info=error)
    return 500, f"{type(error).__name__}: {error}"


def _json(value: Any, status: int = 200) -> Response:
    return Response(to_json(value, inf_nan_mode="null"), status_code=status, media_type="application/json")
