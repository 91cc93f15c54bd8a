"""Tests of the app without a socket: order of requests, repeated ones, errors, and bodies of nonsense."""

import asyncio
import gc
import random
import weakref
from collections import Counter

import numpy as np
import pytest
from pydantic import ValidationError

from jaxft.rollout.transport import async_transport, http_library
from jaxft.tinker import app as served
from jaxft.tinker.app import endpoints, make_app
from jaxft.tinker.data import Datum, Output, TensorData, fields_of
from jaxft.tinker.service import Service
from jaxft.tinker.wire import CLASSES, PROTOBUF, read_forward_backward, write_forward_backward

ROW = {"chunks": [{"tokens": [1, 2, 3]}]}
TENSOR = {"data": [1, 1, 0], "dtype": "float32", "shape": [3]}
JSON = {"target_tokens": [2, 3, 4], "weights": TENSOR}
"""Arrays of a datum, as JSON has them."""


def passes(inputs, row=ROW):
    """A request for a forward pass as JSON."""
    return {"model_id": "a", "loss_fn": "cross_entropy", "data": [{"model_input": row, "loss_fn_inputs": inputs}]}


IMAGE = {"type": "image", "tokens": []}
"""A chunk that is not served."""

SAMPLE = {"sampling_session_id": "a", "prompt": {"chunks": []}, "sampling_params": {}}
LORA = {"session_id": "a", "model_seq_id": 0, "base_model": "a", "lora_config": {}}

MANY = [pytest.param(600, marks=pytest.mark.slow), pytest.param(5000, marks=pytest.mark.tinker)]
"""Numbers of requests of nonsense."""


@pytest.fixture
def service(policy, tmp_path):
    return Service(policy, "Qwen/Qwen3-50k", tmp_path, seconds=60.0)


def ask(service, asking):
    """The result of a coroutine function that is given a function to ask the app with."""
    http = http_library()

    async def main():
        transport = async_transport(http, make_app(service))
        async with http.AsyncClient(transport=transport, base_url="http://jaxft", timeout=None) as client:

            async def post(path, body=None, method="POST"):
                is_proto = isinstance(body, bytes) and path == "forward_backward"
                content = {"content": body} if isinstance(body, bytes) else {"json": body}
                headers = {"content-type": PROTOBUF} if is_proto else {}
                answer = await client.request(method, f"/api/v1/{path}", headers=headers, **content)
                is_json = answer.headers.get("content-type") == "application/json"
                return answer.status_code, answer.json() if is_json else answer.content

            async with asyncio.timeout(1800):
                return await asking(post)

    return asyncio.run(main())


def encode(message, values):
    return CLASSES[message](**values).SerializeToString()


def test_a_session_lives_by_its_heartbeats_and_ends(service):
    async def asking(post):
        _, session = await post("create_session", {"tags": [], "user_metadata": {}, "sdk_version": "0.38.0"})
        alive = await post("session_heartbeat", {"session_id": session["session_id"], "type": "session_heartbeat"})
        service.sessions[session["session_id"]].heard -= 61
        await post("create_session", {})  # whose client looks after the others
        return alive[0], await post("session_heartbeat", {"session_id": session["session_id"]})

    alive, (status, told) = ask(service, asking)
    assert (alive, status) == (200, 410) and "has ended" in told["detail"]


@pytest.mark.parametrize(
    ("path", "body", "status", "told"),
    [
        ("create_model", {"session_id": "a"}, 422, "model_seq_id is "),
        ("create_session", {"shape": 3}, 422, "shape is 3: Extra inputs are not permitted"),
        ("create_session", [], 400, "the body is a JSON list; wanted an object"),
        ("create_session", b"{", 400, "EOF"),
        ("optim_step", {"model_id": "a", "adam_params": {}, "seq_id": 2**70}, 422, "seq_id is 11805"),
        ("get_info", {"model_id": "a:train:0"}, 410, "there is no session 'a'"),
        ("optim_step", {"model_id": "a:train:0", "seq_id": 1, "adam_params": {}}, 410, "no session 'a'"),
        ("optim_step", {"model_id": "a", "adam_params": {"beta1": 1}}, 422, "adam_params.beta1 is 1"),
        ("asample", {"sampling_session_id": "a", "prompt": {"chunks": [{}]}}, 422, "chunks.0.tokens is {}"),
        ("asample", {"sampling_session_id": "a", "prompt": {"chunks": 3}}, 422, "prompt.chunks is 3"),
        ("asample", {"sampling_session_id": "a", "prompt": {"chunks": [IMAGE]}}, 422, "should be 'encoded_text'"),
        ("forward_backward", b"\x0a\xff", 400, "no ForwardBackwardRequest"),
        ("forward_backward", passes(JSON), 410, "no session 'a'"),
        ("forward_backward", passes({"weights": ["a"]}), 422, "weights is ['a']: "),
        ("forward_backward", passes({"weights": {**TENSOR, "dtype": "text"}}), 422, "weights is {'data'"),
        ("forward_backward", passes({"weights": {**TENSOR, "shape": [2**70]}}), 422, "weights is {'data'"),
        ("forward_backward", passes({"weights": None}), 422, "weights is None: "),
        ("forward_backward", passes(JSON, {"chunks": [IMAGE]}), 422, "should be 'encoded_text'"),
        ("forward_backward", passes(JSON, {"chunks": 3}), 422, "chunks is 3"),
        ("forward_backward", passes(JSON, [0.5]), 422, "model_input is [0.5]: "),
        ("asample", {**SAMPLE, "num_samples": 0}, 422, "num_samples is 0"),
        ("create_model", {**LORA, "lora_config": {"rank": 257}}, 422, "lora_config.rank is 257: "),
        ("create_model", {**LORA, "optimizer_config": {"type": "dimuon"}}, 422, "optimizer_config.type is 'dimuon'"),
        ("retrieve_future", {"request_id": "a"}, 410, "there is no session 'a'"),
        ("weights_info", {"tinker_path": "tinker://../weights/a"}, 400, "'..' is no name"),
        ("telemetrie", {}, 404, "served are POST /api/v1/retrieve_future, POST /api/v1/asample, GET"),
    ],
)  # fmt: skip
def test_bad_requests_are_refused_with_their_reason(service, path, body, status, told):
    found, answer = ask(service, lambda post: post(path, body))
    assert found == status and told in answer["detail"]


@pytest.mark.parametrize(
    "wrong",
    [
        {"prompt": {"chunks": [0] * 1000}},
        {"prompt": {"chunks": [{"tokens": ["a"] * 1000}]}},
        {"sampling_params": {"stop": [{}] * 1000}},
        {"sampling_params": {"stop": ["a"] * 1025}},
        {f"field {number}": 1 for number in range(1000)},
    ],
)
def test_many_faults_of_a_request_cost_no_more_than_a_few(service, wrong):
    with pytest.raises(ValidationError) as caught:
        fields_of(service.sample).model_validate(SAMPLE | wrong)
    assert caught.value.error_count() <= 3


def test_fields_of_a_verb_do_not_keep_its_service():
    class Some:
        def verb(self, number: int):
            """A verb."""

    some = Some()
    assert [*fields_of(some.verb).model_fields] == ["number"]
    kept = weakref.ref(some)
    del some
    gc.collect()
    assert kept() is None


def test_unknown_fields_at_their_defaults_are_those_of_a_newer_client(service):
    status, _ = ask(service, lambda post: post("create_session", {"novel": None, "none": 0, "empty": "", "off": False}))
    assert status == 200


@pytest.mark.parametrize("count", MANY)
def test_nothing_that_is_sent_makes_the_server_fail(service, count):
    draw = random.Random(0)
    table = [each for each in endpoints(service) if each.path != "sessions/{session_id}/finish"]
    known = {each: {*fields_of(each.verb).model_fields} | ({"seq_id"} if each.is_long else set()) for each in table}
    names = sorted({name for fields in known.values() for name in fields})
    chunk = {"encoded_text": {"tokens": np.arange(3, dtype="<i4").tobytes()}}
    arrays = {"target_tokens": np.arange(3, dtype="<i8"), "weights": np.ones(3, "<f4")}
    inputs = [
        {"key": name, "value": {"dense": each.tobytes(), "dtype": 2 if each.itemsize == 8 else 1, "shape": [3]}}
        for name, each in arrays.items()
    ]

    async def asking(post):
        _, session = await post("create_session", {})
        session_id, found, failed = session["session_id"], Counter(), []
        lora = {"session_id": session_id, "model_seq_id": 0, "base_model": service.name, "lora_config": {"rank": 2}}
        await post("create_model", lora)
        await post("retrieve_future", {"request_id": f"{session_id}:train:0:0"})
        await post("create_sampling_session", {"session_id": session_id, "sampling_session_seq_id": 0})
        likely = {"session_id": session_id, "model_id": f"{session_id}:train:0", "base_model": service.name}
        likely |= {"sampling_session_id": f"{session_id}:sample:0", "sampling_params": {"max_tokens": 2}}
        likely |= {"prompt": {"chunks": [{"type": "encoded_text", "tokens": [1, 2]}]}, "num_samples": 1}
        likely |= {"model_seq_id": 1, "seq_id": None, "adam_params": {}, "optimizer": True}
        odd = [
            None,
            0,
            -1,
            2**70,
            1e308,
            "",
            "a",
            "tinker://a/weights/b",
            [],
            [1],
            {},
            {"chunks": [{}]},
            {"rank": 1},
            True,
        ]
        for _ in range(count):
            endpoint = draw.choice(table)
            likely["seq_id"] = service.model(likely["model_id"]).next_number
            given = likely | {name: draw.choice(odd) for name in draw.sample(names, draw.choice((0, 1, 1, 2)))}
            path = endpoint.path.format_map({name: str(given.get(name) or "a").replace("/", "") for name in names})
            body = {name: given[name] for name in known[endpoint] if name in given}
            if endpoint.path == "forward_backward" and draw.random() < 0.5:
                own = {draw.choice([*JSON]): draw.choice(odd)} if draw.random() < 0.5 else {}
                row = draw.choice(odd) if draw.random() < 0.2 else ROW
                body |= {**passes(JSON | own, row), "model_id": likely["model_id"]}
            elif endpoint.path == "forward_backward":
                data = [{"model_input": [chunk], "loss_fn_inputs": inputs}]
                message = {
                    "model_id": likely["model_id"],
                    "seq_id": likely["seq_id"],
                    "data": data,
                    "loss_fn": "cross_entropy",
                }
                whole = encode("ForwardBackwardRequest", message)
                rate = draw.choice((0.0, 0.01, 0.2))
                body = bytes(draw.randrange(256) if draw.random() < rate else byte for byte in whole)
            status, answer = await post(path, body, endpoint.method)
            if status == 200 and endpoint.is_long:
                request_id = answer["request_id"]
                status, answer = await post("retrieve_future", {"request_id": request_id})
                if status == 200 and isinstance(answer, dict) and answer.get("category") == "server":
                    failed.append((endpoint.path, body, answer))
            found[status] += 1
            if status >= 500:
                failed.append((endpoint.path, body, answer))
        await post(f"sessions/{session_id}/finish", {})
        return found, failed

    found, failed = ask(service, asking)
    assert not failed and found[200] > count // 4, (failed[:3], found)


@pytest.mark.slow
def test_requests_of_a_model_begin_as_they_come_and_only_once(service, monkeypatch):
    monkeypatch.setattr(served, "WAIT_SECONDS", 0.05)

    async def asking(post):
        _, session = await post("create_session", {})
        lora = {"session_id": session["session_id"], "model_seq_id": 0, "base_model": service.name}
        _, made = await post("create_model", {**lora, "lora_config": {"rank": 2}})
        while (found := await post("retrieve_future", {"request_id": made["request_id"]}))[0] == 408:
            pass
        step = {"model_id": found[1]["model_id"], "adam_params": {}}
        refused = await post("optim_step", {**step, "seq_id": 1, "adam_params": {"beta1": 1}})
        lock = service.model(step["model_id"]).lock
        async with lock:
            ids = [(await post("optim_step", {**step, "seq_id": number}))[1]["request_id"] for number in (2, 2, 3)]
            waiting = await post("retrieve_future", {"request_id": ids[0]})
        while (done := await post("retrieve_future", {"request_id": ids[2]}))[0] == 408:
            pass
        first, again = [await post("retrieve_future", {"request_id": ids[each]}) for each in (0, 1)]
        session = service.session(session["session_id"])
        session.requests.clear()
        late = await post("optim_step", {**step, "seq_id": 3})
        polled_late = await post("retrieve_future", {"request_id": ids[0]})
        async with lock:
            await post("optim_step", {**step, "seq_id": 9})
            (task,) = session.requests.values()
            await post(f"sessions/{session.id}/finish", {})
            await asyncio.wait([task])
        return refused, ids, waiting, done, first, again, late, polled_late, task.cancelled()

    refused, ids, waiting, done, first, again, late, polled_late, is_cancelled = ask(service, asking)
    assert refused[0] == 422 and len(set(ids)) == 2 and waiting[0] == 408 and waiting[1]["queue_state"] == "active"
    assert first == again and done[1]["metrics"]["nothing_to_learn"] == 1
    assert (late[0], polled_late[0]) == (400, 410) and "request 4" in late[1]["detail"]
    assert is_cancelled and not service.sessions


@pytest.mark.tinker
def test_two_hundred_clients_that_vanish_in_the_middle_leave_nothing(service):
    engine, models = service._policy.engine, []

    async def vanish(post, number):
        """Train and sample, and be heard of no more."""
        session_id = (await post("create_session", {}))[1]["session_id"]
        lora = {"session_id": session_id, "model_seq_id": 0, "base_model": service.name, "lora_config": {"rank": 2}}
        made = (await post("create_model", lora))[1]["request_id"]
        model_id = (await post("retrieve_future", {"request_id": made}))[1]["model_id"]
        models.append(weakref.ref(service.model(model_id)))
        snapshot = {"model_id": model_id, "seq_id": 1, "sampling_session_seq_id": 0}
        await post("save_weights_for_sampler", snapshot)
        await post("retrieve_future", {"request_id": f"{model_id}:1"})
        tokens = np.arange(1, 17)
        inputs = {"target_tokens": tokens, "weights": np.ones(16)}
        data = [Datum(model_input=tokens.astype(np.int32), loss_fn_inputs=inputs)]
        service.session(session_id).requests["step"] = asyncio.create_task(
            service.forward_backward(model_id, data, "cross_entropy")
        )
        for seq_id in (2, 4):  # number 3 was refused
            await post("optim_step", {"model_id": model_id, "seq_id": seq_id, "adam_params": {}})
        sample = {"sampling_session_id": f"{session_id}:sample:0", "sampling_params": {"max_tokens": 40, "stop": []}}
        sample["prompt"] = {"chunks": [{"type": "encoded_text", "tokens": [1, 2, 3]}]}
        for seq_id in range(4):
            await post("asample", {**sample, "seq_id": seq_id})
        for _ in range(number % 7):
            await asyncio.sleep(0.002)
        service.session(session_id).heard -= 100

    async def asking(post):
        for number in range(200):
            await vanish(post, number)
        survivor = (await post("create_session", {}))[1]["session_id"]
        while engine.num_running or engine.num_waiting:
            await asyncio.sleep(0.01)
        await service._policy.read(lambda _: None)
        gc.collect()
        alive = [model() for model in models if model() is not None]
        assert [*service.sessions] == [survivor] and not alive and engine.held_pages == 0
        others = asyncio.all_tasks() - {asyncio.current_task()}
        assert not [task for task in others if task.get_coro().__name__ in ("_run", "forward_backward")]
        await post("create_sampling_session", {"session_id": survivor, "sampling_session_seq_id": 0})
        prompt = {"chunks": [{"type": "encoded_text", "tokens": [1, 2, 3]}]}
        sample = {"sampling_session_id": f"{survivor}:sample:0", "prompt": prompt, "sampling_params": {"max_tokens": 3}}
        asked = (await post("asample", sample))[1]["request_id"]
        return await post("retrieve_future", {"request_id": asked})

    status, _ = ask(service, asking)
    assert status == 200


def test_messages_are_read_as_they_were_written():
    tokens, weights = np.array([5, 6], "<i4"), np.array([0.5, 1.0], "<f4")
    tensor = {"dense": weights.tobytes(), "dtype": 1, "shape": [2]}
    datum = {"model_input": [{"encoded_text": {"tokens": tokens.tobytes()}}] * 2}
    datum["loss_fn_inputs"] = [{"key": "weights", "value": tensor}]
    entries = [{"key": "beta", "value": {"number": 0.25}}, {"key": "kind", "value": {"text": "x"}}]
    message = {"model_id": "m", "seq_id": 7, "data": [datum], "loss_fn": "dro", "forward_only": 1}
    message["loss_fn_config_v2"] = entries
    found = read_forward_backward(encode("ForwardBackwardRequest", message))
    (read,) = found.pop("data")
    assert found.pop("loss_fn_config") == {"beta": 0.25, "kind": "x"}
    assert found == {"model_id": "m", "seq_id": 7, "loss_fn": "dro", "forward_only": True}
    assert read.model_input.tolist() == [5, 6, 5, 6] and read.loss_fn_inputs["weights"].tolist() == [0.5, 1.0]
    logprobs = [np.array([-1.0], np.float32), np.array([-2.0, -3.0], np.float32)]
    output = Output({"loss:sum": 2.5}, [{"logprobs": TensorData(each)} for each in logprobs])
    written = CLASSES["ForwardBackwardOutput"].FromString(write_forward_backward(output))
    (record,), (entry,) = written.loss_fn_outputs, written.metrics
    assert (record.num_datums, entry.key, entry.value) == (2, "loss:sum", 2.5)
    values = record.fields[0].value
    assert np.frombuffer(values.offsets, "<i8").tolist() == [0, 4, 12]
    assert np.frombuffer(values.data, "<f4").tolist() == [-1.0, -2.0, -3.0]
