"""Metrics, request ids and log lines of a server."""

import asyncio
import logging
import re

import jax
import numpy as np
import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families

from jaxft.errors import NonFiniteError
from jaxft.harness.addresses import Limits
from jaxft.rollout.client import ChatClient
from tests.serving.conftest import make_episode
from tests.serving.test_server import BODY, KEY, read, request, send, serving

ASKED = {"messages": BODY["messages"], "model": "player", "max_tokens": 12, "logit_bias": {"1": -100}}


def scrape(server, *headers, path="/metrics"):
    """Status and text of the metrics."""
    host = f"Host: {server.url.removeprefix('http://')}"
    head, _, text = read(send(server, f"GET {path} HTTP/1.1", host, "Connection: close", *headers)).partition(
        b"\r\n\r\n"
    )
    return int(head.split()[1]), text.decode()


def samples(server, *headers):
    """Values by name and labels."""
    status, text = scrape(server, *headers)
    assert status == 200
    families = list(text_string_to_metric_families(text))
    return {(sample.name, *sample.labels.values()): sample.value for family in families for sample in family.samples}


@pytest.fixture
def server(llm):
    with serving_llm(llm) as serving:
        yield serving


def serving_llm(llm, **options):
    return serving(llm, llms={"player": llm}, **options)


def test_the_metrics_count_requests_tokens_and_times(llm, server):
    before = samples(server)
    usage = request(server, {**ASKED, "n": 2})[1]["usage"]
    assert request(server, ASKED | {"model": "other"})[0] == 404
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="any") as client:
        list(client.chat.completions.create(**ASKED, stream=True))
    assert request(server, {}, path="/v1/nowhere/7")[0] == 404
    after = samples(server)
    made = {name: value - before.get(name, 0) for name, value in after.items()}
    prompts, sampled = 3 * usage["prompt_tokens"], usage["completion_tokens"] + 12
    assert made["jaxft:http_requests_total", "/v1/chat/completions", "200"] == 2
    assert made["jaxft:http_requests_total", "/v1/chat/completions", "404"] == 1
    assert made["jaxft:http_requests_total", "other", "404"] == 1
    assert made["jaxft:generation_tokens_total", "player"] >= sampled
    # The last token of a prompt is decoded, not prefilled.
    assert made["jaxft:prompt_tokens_total", "player"] == prompts - 3
    for name, count in (("e2e_request_latency", 2), ("time_to_first_token", 3), ("request_time_per_output_token", 3)):
        assert made[f"jaxft:{name}_seconds_count", "player"] == count
        assert made[f"jaxft:{name}_seconds_sum", "player"] > 0
    whole = made["jaxft:e2e_request_latency_seconds_sum", "player"]
    assert made["jaxft:time_to_first_token_seconds_sum", "player"] < 2 * whole
    assert after["jaxft:num_requests_running", "player"] == after["jaxft:num_requests_waiting", "player"] == 0
    pages = llm.policy.engine.cache_tokens / 64
    assert after["jaxft:kv_cache_used_pages", "player"] == after["jaxft:kv_cache_usage_perc", "player"] == 0
    assert after["jaxft:kv_cache_free_pages", "player"] == pages


def test_two_servers_of_one_process_share_no_metrics(llm, server):
    request(server)
    with serving_llm(llm) as other:
        assert ("jaxft:http_requests_total", "/v1/chat/completions", "200") not in samples(other)


def test_the_key_opens_the_metrics_and_an_episode_does_not(llm):
    with serving_llm(llm, api_key=KEY) as server:
        assert scrape(server)[0] == 401
        episode = make_episode(server_url=server.url)
        own = episode.base_url.removeprefix(server.url).removesuffix("/v1")
        assert scrape(server, path=f"{own}/metrics")[0] == 404
        assert scrape(server, f"Authorization: Bearer {episode.api_key}")[0] == 404
        made = samples(server, f"Authorization: Bearer {KEY}")
        assert made["jaxft:http_requests_total", "/metrics", "401"] == 1
        assert episode.api_key not in str(made) and own not in str(made)


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages", "/v1/messages/count_tokens", "/v1/responses"])
def test_an_error_has_the_id_of_its_request(server, path):
    status, answer, head = request(server, {"model": "player", "what": 1}, path=path, X_Request_Id="mine-7")
    assert status == 400 and "\nx-request-id: mine-7\r" in head and "\nrequest-id: mine-7\r" in head
    assert {answer.get("request_id"), answer["error"].get("request_id")} == {"mine-7", None}


def test_an_id_is_made_where_none_is_given_or_a_wrong_one(server, caplog):
    caplog.set_level(logging.DEBUG, "jaxft")
    made = set()
    for given in (None, "", "two words", "é", "x" * 129):
        status, _, head = request(server, X_Request_Id=given)
        made.add(re.search(r"\nx-request-id: (req_[0-9a-f]{32})\r", head)[1])
        assert status == 200
    assert len(made) == 5
    lines = [each.getMessage() for each in caplog.records if each.name == "jaxft.serving.metrics"]
    assert made == {line.rpartition(" ")[2] for line in lines} and all("status 200" in line for line in lines)


def test_a_refusal_at_the_door_has_the_id(llm):
    with serving_llm(llm, api_key=KEY) as server:
        status, answer, head = request(server, X_Request_Id="a")
        assert (status, answer["error"]["request_id"]) == (401, "a") and "\nx-request-id: a\r" in head


def test_a_fault_leaves_a_traceback_with_the_id(make_policy, caplog):
    policy = make_policy()
    broken = jax.tree.map(lambda leaf: np.full_like(leaf, np.nan), policy.weights.trained)
    asyncio.run(policy.update(lambda params: (jax.device_put(broken), None)))
    llm = ChatClient(policy, "player")
    with serving_llm(llm) as server:
        status, answer, _ = request(server, X_Request_Id="b")
        assert (status, answer["error"]["request_id"]) == (500, "b")
    fault, line = (each for each in caplog.records if each.name.startswith("jaxft.serving"))
    assert fault.exc_info[0] is NonFiniteError and "request b" in fault.getMessage()
    assert "status 500" in line.getMessage() and "request b" in line.getMessage() and line.levelname == "WARNING"


def test_metrics_are_answered_while_too_many_requests_are(llm):
    with serving_llm(llm, limits=Limits(max_requests=0)) as server:
        assert request(server)[0] == 429
        assert samples(server)["jaxft:http_requests_total", "/v1/chat/completions", "429"] == 1
