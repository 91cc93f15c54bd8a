"""An ASGI app that serves the verbs to Tinker's own client.

Verbs that take long answer with the id of a request at once; `retrieve_future` then waits for its result. Requests of
one model are numbered, and begin in that order however they come. A request that is sent again, as after a connection
that broke, has the same id and is answered by the same result.
"""

import asyncio
import inspect
import logging
from collections.abc import Callable, Coroutine, Mapping
from contextlib import suppress
from functools import cache
from typing import Any, NamedTuple

from pydantic import BaseModel, ConfigDict, ValidationError, create_model, model_validator
from pydantic_core import from_json, to_json
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from jaxft import Policy
from jaxft.errors import ConfigError
from jaxft.rollout import ChatClient
from jaxft.tinker.service import Gone, NotFound, Service
from jaxft.tinker.training import TrainedModel
from jaxft.tinker.wire import PROTOBUF, read_forward_backward, write_forward_backward, write_sample

logger = logging.getLogger(__name__)

WAIT_SECONDS = 20.0
"""Time that a client waits for a result before it is told to ask again; it gives up after 45."""

RESULT_SECONDS = 180.0
"""Time that a result is kept, as clients may ask for one again."""

TURN_SECONDS = 120.0
"""Time that a request waits for earlier ones of its model, some of which may have been refused, and never come."""

MOST_AHEAD = 1024
"""Most requests of a model that wait for an earlier one."""

CLIENT_CONFIG = {
    "parallel_fwdbwd_chunks": True,
    "proto_compress_fwdbwd": False,
    "use_pyqwest_transport": False,
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
    verb: Callable[..., Coroutine[Any, Any, Any]]
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

    async def cancel_future(request_id: str) -> Response:
        requests = service.session(request_id.partition(":")[0]).requests
        if ":sample:" in request_id and (task := requests.pop(request_id, None)) is not None:
            task.cancel()  # as is no request of a model, whose gradients would be half added
        return Response(status_code=204)

    async def finish(session_id: str) -> Response:
        await service.finish_session(session_id)
        return Response(status_code=204)

    def says(value: dict[str, Any]) -> Callable[[], Coroutine[Any, Any, dict[str, Any]]]:
        async def say() -> dict[str, Any]:
            return value

        return say

    return [
        Endpoint("GET", "healthz", says({"status": "ok"})),
        Endpoint("POST", "client/config", says(CLIENT_CONFIG)),
        Endpoint("POST", "client/dynamic_config", says({"sample_cancel_enabled": True})),
        Endpoint("POST", "telemetry", says({"status": "accepted"})),  # which nobody reads
        Endpoint("GET", "get_server_capabilities", service.get_server_capabilities),
        Endpoint("POST", "create_session", service.create_session),
        Endpoint("POST", "session_heartbeat", service.session_heartbeat),
        Endpoint("POST", "sessions/{session_id}/finish", finish),
        Endpoint("POST", "retrieve_future", retrieve_future),
        Endpoint("POST", "cancel_future", cancel_future),
        Endpoint("POST", "create_model", service.create_model, True),
        Endpoint("POST", "get_info", service.get_info),
        Endpoint("POST", "forward_backward", service.forward_backward, True, write_forward_backward),
        Endpoint("POST", "optim_step", service.optim_step, True),
        Endpoint("POST", "save_weights", service.save_weights, True),
        Endpoint("POST", "save_weights_for_sampler", service.save_weights_for_sampler, True),
        Endpoint("POST", "load_weights", service.load_weights, True),
        Endpoint("POST", "create_sampling_session", service.create_sampling_session),
        Endpoint("POST", "asample", service.sample, True, write_sample),
        Endpoint("GET", "samplers/{sampler_id}", service.get_sampler),
        Endpoint("GET", "checkpoints", service.list_checkpoints),
        Endpoint("GET", "training_runs/{model_id}", service.get_training_run),
        Endpoint("GET", "training_runs/{model_id}/checkpoints", service.list_checkpoints),
        Endpoint("DELETE", "training_runs/{model_id}/checkpoints/{kind}/{name}", service.delete_checkpoint),
        Endpoint("POST", "weights_info", service.weights_info),
    ]


IGNORED = (
    *("type", "sdk_version", "tags", "project_id", "display_name", "ttl_seconds", "kind", "access_scope"),
    *("allow_metadata_only", "events", "platform", "process_uuid", "session_id", "reason", "detail"),
    *("base_model", "user_metadata"),
)
"""Fields that change nothing where a verb does not take them: there are no projects, nobody reads telemetry, states are
kept until they are deleted, with base and metadata of their model, and a sampler that may follow later weights keeps
its own."""


class Fields(BaseModel):
    """Fields of a request: those of a verb, `IGNORED`, and unknown ones that are null, 0 or empty.

    A newer client sends its defaults; what asks for more than is served is refused.
    """

    model_config = ConfigDict(extra="forbid", protected_namespaces=(), arbitrary_types_allowed=True)

    @model_validator(mode="before")
    @classmethod
    def _without_empty(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        known = cls.model_fields
        return {name: value for name, value in values.items() if name in known or (value and name not in IGNORED)}


@cache
def fields_of(verb: Callable[..., Any], *, is_long: bool) -> type[Fields]:
    """Return the model of a verb's arguments; `seq_id` is one of every verb that takes long."""
    parameters = inspect.signature(verb).parameters.values()
    given: dict[str, Any] = {
        each.name: (each.annotation, ... if each.default is each.empty else each.default) for each in parameters
    }
    number: dict[str, Any] = {"seq_id": (int, 0)} if is_long else {}
    return create_model("Fields", __base__=Fields, **number | given)


def make_app(service: Service) -> Starlette:
    """Return the app that serves a service."""
    table = endpoints(service)

    def route(endpoint: Endpoint) -> Route:
        fields = fields_of(endpoint.verb, is_long=endpoint.is_long)

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
        raise ConfigError([f"llms: {', '.join(own) or 'none'} is of type local_policy; --tinker wants one"])
    ((key, policy),) = own.items()
    try:
        return make_app(Service(policy, name or key))
    except ValueError as error:
        raise ConfigError([f"llms.{key}: {error}"]) from error


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
    number = asked["seq_id"]
    if "seq_id" not in inspect.signature(endpoint.verb).parameters:
        del asked["seq_id"]
    model = None
    if (model_id := asked.get("model_id")) is not None:
        model, request_id = service.model(model_id), f"{model_id}:{number}"
    elif "sampling_session_id" in asked:
        request_id = f"{asked['sampling_session_id']}:{number}"
    else:
        request_id = f"{asked['session_id']}:train:{asked['model_seq_id']}:0"
    requests = service.session(request_id.partition(":")[0]).requests
    if request_id not in requests:
        if model is not None and not 0 <= number - model.next_number <= MOST_AHEAD:
            raise Gone(f"seq_id is {number}: request {model.next_number} of {model_id} comes next")
        task = requests[request_id] = asyncio.create_task(_run(endpoint, asked, model, number))
        loop = asyncio.get_running_loop()
        task.add_done_callback(lambda _: loop.call_later(RESULT_SECONDS, requests.pop, request_id, None))
    promised = {"request_id": request_id, "model_id": model_id}
    if "num_samples" in asked:
        promised["sample_sequence_ids"] = [f"{request_id}:{each}" for each in range(asked["num_samples"])]
    return _json(promised)


async def _run(endpoint: Endpoint, asked: Mapping[str, Any], model: TrainedModel | None, number: int) -> Response:
    """Return the result of a verb, or the reason why there is none, once the earlier ones of its model have begun."""
    if model is not None:
        async with model.changed:
            with suppress(TimeoutError):
                async with asyncio.timeout(TURN_SECONDS):
                    await model.changed.wait_for(lambda: model.next_number >= number)
            is_next, model.next_number = model.next_number == number, max(model.next_number, number + 1)
            model.changed.notify_all()  # of which the next begins behind the lock that this one takes first
        if not is_next:
            told = f"request {number} of {model.id} was not run, as an earlier one was refused or has not come"
            return _json({"error": told, "category": "user"})
    try:
        return await _respond(endpoint, asked)
    except Exception as error:
        status, told = explain(error)
        return _json({"error": told, "category": "user" if status < 500 else "server"})


async def _respond(endpoint: Endpoint, asked: Mapping[str, Any]) -> Response:
    found = await endpoint.verb(**asked)
    if endpoint.write is not None:
        return Response(endpoint.write(found), media_type=PROTOBUF)
    return found if isinstance(found, Response) else _json(found)


def explain(error: Exception) -> tuple[int, str]:
    """Return the status and the reason of an error."""
    if isinstance(error, ValidationError):
        first = error.errors(include_url=False)[0]
        place = ".".join(map(str, first["loc"])) or "the body"
        return 422, f"{place} is {first['input']!r:.100}: {first['msg']}"
    if isinstance(error, ValueError):
        return 410 if isinstance(error, Gone) else 404 if isinstance(error, NotFound) else 400, str(error)
    logger.error("a request failed", exc_info=error)
    return 500, f"{type(error).__name__}: {error}"


def _json(value: Any, status: int = 200) -> Response:
    return Response(to_json(value, inf_nan_mode="null"), status_code=status, media_type="application/json")
