"""Ids, log lines and metrics of the requests that a server answers, for the people who run it.

The metrics have vLLM's names with `jaxft:` in place of `vllm:`, so that its dashboards fit; those that vLLM does not
have are the pages of the cache. Each server has a registry of its own.
"""

import logging
import re
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from jaxft import ChatClient, LanguageModel
from jaxft.serving.app import POSTS, episode_token
from jaxft.serving.wire import METRICS, SERVED, Served, make_id

logger = logging.getLogger(__name__)

PREFIX = "jaxft:"

BUCKETS = tuple(2**power / 1024 for power in range(21))
"""Upper bounds of the times that the histograms count, in seconds: 1 ms to 17 minutes."""

ENGINE: dict[str, tuple[str, Callable[[Any], float]]] = {
    "num_requests_running": ("Requests that have slots.", lambda engine: engine.num_running),
    "num_requests_waiting": ("Requests that wait for a slot.", lambda engine: engine.num_waiting),
    "kv_cache_used_pages": ("Pages of the cache that requests hold.", lambda engine: engine.held_pages),
    "kv_cache_free_pages": ("Pages that can be taken.", lambda engine: engine.num_pages - engine.held_pages),
    "kv_cache_usage_perc": ("Used part of the pages.", lambda engine: engine.held_pages / engine.num_pages),
    "prompt_tokens": ("Prompt tokens.", lambda engine: engine.counts.prefilled_tokens + engine.counts.reused_tokens),
    "prefix_cache_hits": ("Prompt tokens that the prefix cache had.", lambda engine: engine.counts.reused_tokens),
    "generation_tokens": ("Sampled tokens.", lambda engine: engine.counts.decoded_tokens),
}
"""Metrics of an engine by name: description and value."""

PATHS = (*POSTS, "/v1/models", "/health", METRICS)
"""Paths whose requests are counted by name."""

COUNTERS = ("prompt_tokens", "prefix_cache_hits", "generation_tokens")
"""Metrics of an engine that only grow; the others are gauges."""

REQUEST_ID = re.compile(rb"[!-~]{1,128}")
"""An `x-request-id` that is taken from the client; others are replaced."""


class Metrics(Collector):
    """The metrics of one server.

    Attributes:
        registry: the registry of these metrics alone.
    """

    def __init__(self, llms: Mapping[str, LanguageModel]) -> None:
        """Make the metrics of a server of language models, those of policies in this process with their engines."""
        clients = {name: llm for name, llm in llms.items() if isinstance(llm, ChatClient)}
        self._engines = {name: llm.policy.engine for name, llm in clients.items() if llm.adapter is None}
        self.registry = CollectorRegistry()
        self.registry.register(self)
        self._requests = Counter(
            f"{PREFIX}http_requests",
            "Requests by path and status; one whose client goes away before the response begins has 499.",
            ["handler", "status"],
            registry=self.registry,
        )

        def times(name: str, description: str) -> Histogram:
            return Histogram(f"{PREFIX}{name}", description, ["model_name"], buckets=BUCKETS, registry=self.registry)

        self._first_token = times("time_to_first_token_seconds", "Time from the request to its first token.")
        self._per_token = times("request_time_per_output_token_seconds", "Mean time of each further token.")
        self._whole = times("e2e_request_latency_seconds", "Time from the request to the end of its answer.")

    def collect(self) -> Iterator[CounterMetricFamily | GaugeMetricFamily]:
        """Yield the load and the counts of tokens of every engine."""
        for name, (description, value) in ENGINE.items():
            family = CounterMetricFamily if name in COUNTERS else GaugeMetricFamily
            values = family(PREFIX + name, description, labels=["model_name"])
            for model, engine in self._engines.items():
                values.add_metric([model], value(engine))
            yield values

    def beside(self, app: ASGIApp) -> ASGIApp:
        """Return the app with a path for the metrics, which the address and key of an episode do not open."""

        async def answer(scope: Scope, receive: Receive, send: Send) -> None:
            is_asked = scope["path"] == METRICS and scope["method"] == "GET" and episode_token(scope)[0] is None
            text = Response(generate_latest(self.registry), media_type=CONTENT_TYPE_LATEST) if is_asked else app
            await text(scope, receive, send)

        return answer

    def of_requests(self, app: ASGIApp) -> ASGIApp:
        """Return the app, whose requests get ids, and are logged and counted."""

        async def answer(scope: Scope, receive: Receive, send: Send) -> None:
            begun, status = time.perf_counter(), 499
            given = next((value for name, value in scope["headers"] if name == b"x-request-id"), b"")
            served = Served(given.decode() if REQUEST_ID.fullmatch(given) else make_id("req_"))

            async def respond(message: Message) -> None:
                nonlocal status
                if message["type"] == "http.response.start":
                    status = message["status"]
                    # Clients of OpenAI read the first, that of Anthropic the second.
                    own = [(name, served.id.encode()) for name in (b"x-request-id", b"request-id")]
                    message = {**message, "headers": [*message.get("headers", ()), *own]}
                await send(message)

            token = SERVED.set(served)
            try:
                await app(scope, receive, respond)
            finally:
                SERVED.reset(token)
                self._observe(scope, served, status, begun)

        return answer

    def _observe(self, scope: Scope, served: Served, status: int, begun: float) -> None:
        path, seconds = episode_token(scope)[1]["path"], time.perf_counter() - begun
        self._requests.labels(path if path in PATHS else "other", status).inc()
        level = logging.WARNING if status >= 500 else logging.DEBUG
        line = "%s %r: status %d after %.3f s, request %s"
        logger.log(level, line, scope["method"], path[:100], status, seconds, served.id)
        if served.reply is None:
            return
        self._whole.labels(served.model).observe(seconds)
        for choice in served.reply.choices:
            (first, known), (last, count) = choice.completion.first_read, choice.completion.last_read
            self._first_token.labels(served.model).observe(max(0.0, first - begun))
            if count > known and first > begun:  # with those of the first dispatch there is nothing between tokens
                self._per_token.labels(served.model).observe((last - first) / (count - known))
