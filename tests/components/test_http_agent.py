"""Agents at an address: a run with one is the same as with an agent in process, and its faults cost their episodes."""

import asyncio
import contextlib
import gc
import gzip
import io
import os
import threading
import time
from dataclasses import replace

import openai
import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

import jaxft
from jaxft.rollout import recorder
from jaxft.rollout.recorder import episode_of_token
from jaxft.runs.console import Console


class InProcessConfig(jaxft.WorkflowConfig, name="http_in_process"):
    pass


@jaxft.register_workflow(config_type=InProcessConfig)
async def in_process(config, builder):
    client = await builder.get_llm("policy", wrapper_type="openai")

    async def run(example):
        return await two_turns(client, example["question"])

    yield run


async def two_turns(client, question):
    messages = [{"role": "user", "content": question}]
    said = []
    for follow_up in ("again", "and again"):
        completion = await client.chat.completions.create(model="policy", messages=messages, max_tokens=5)
        said.append(completion.choices[0].message.content)
        messages += [{"role": "assistant", "content": said[-1]}, {"role": "user", "content": follow_up}]
    return {"answer": "".join(said)}


class LengthConfig(jaxft.EvaluatorConfig, name="http_length"):
    pass


@jaxft.register_evaluator(config_type=LengthConfig)
async def length(config, builder):
    yield lambda item: len(item.output_obj.encode()) % 4


class QuestionsConfig(jaxft.DatasetConfig, name="http_questions"):
    questions: tuple[str, ...] = ("a?", "bb?")


@jaxft.register_dataset_loader(config_type=QuestionsConfig)
async def questions(config, builder):
    rows = [{"question": text} for text in config.questions]
    yield [jaxft.EvalInputItem(id=row["question"], full_dataset_entry=row) for row in rows]


class Agent:
    """An agent in another thread, as it could be on another machine.

    Attributes:
        url: its address.
        asked: the bodies of requests so far.
        ports: the ports that they came from.
        num_open: requests that are being answered.
    """

    def __init__(self, answer=None):
        self.asked, self.ports, self.num_open = [], [], 0
        self._answer = answer or self.play
        app = Starlette(routes=[Route("/episode", self._episode, methods=["POST"])])
        config = uvicorn.Config(app, port=0, log_level="critical", timeout_keep_alive=600)
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._server.run, daemon=True)
        self._thread.start()
        while not self._server.started:
            time.sleep(0.001)
        self.url = f"http://127.0.0.1:{self._server.servers[0].sockets[0].getsockname()[1]}/episode"

    async def _episode(self, request):
        body = await request.json()
        headers = {name: request.headers.get(name) for name in ("authorization", "accept-encoding")}
        self.asked.append(body | headers)
        self.ports.append(request.client.port)
        self.num_open += 1
        try:
            return await self._answer(body)
        finally:
            self.num_open -= 1

    async def play(self, body):
        async with openai.AsyncOpenAI(base_url=body["base_url"], api_key="any", max_retries=0) as client:
            return JSONResponse(await two_turns(client, body["example"]["question"]))

    def close(self):
        self._server.should_exit = True
        self._thread.join()


@pytest.fixture
def make_agent():
    made = []

    def make(answer=None):
        made.append(Agent(answer))
        return made[-1]

    yield make
    for agent in made:
        agent.close()


def config_of(
    folder, workflow, *, num_generations=4, general=None, questions=("a?", "bb?"), serve=None, preset="qwen3-50k"
):
    policy = {"_type": "local_policy", "preset": preset, "slots": 8, "max_context_tokens": 96, "serve": serve}
    mapping = {
        "llms": {"policy": policy},
        "workflow": workflow,
        "eval": {
            "general": {
                "max_concurrency": 4,
                "dataset": {"_type": "http_questions", "questions": list(questions)},
                "result_json_path": "$.answer",
                **(general or {}),
            },
            "evaluators": {"length": {"_type": "http_length"}},
        },
        "trajectory_builders": {"rollouts": {"_type": "grpo_trajectory_builder", "num_generations": num_generations}},
        "trainer_adapters": {"local": {"_type": "local_trainer_adapter", "llm": "policy"}},
        "trainers": {"loop": {"_type": "grpo_trainer", "show_episodes_every": 1, "save_episodes": "all"}},
        "finetuning": {
            "enabled": True,
            "trainer": "loop",
            "trajectory_builder": "rollouts",
            "trainer_adapter": "local",
            "reward_function": {"name": "length"},
            "num_epochs": 1,
            "output_dir": str(folder / "run"),
        },
    }
    return jaxft.config_from_mapping(mapping, base_dir=folder)


def train(folder, workflow, **options):
    async def main():
        config = config_of(folder, workflow, **options)
        async with jaxft.open_session(config, console=Console(io.StringIO())) as session:
            await session.train()

    asyncio.run(main())
    run = folder / "run"
    paths = [run / "training_metrics.jsonl", *sorted((run / "trajectories").iterdir())]
    return {path.name: path.read_bytes() for path in paths}


def evaluate(folder, workflow, **options):
    """The outcomes of all episodes."""

    async def main():
        config = config_of(folder, workflow, **options)
        async with jaxft.open_session(config, console=Console(io.StringIO())) as session:
            evaluation = await session.builder.get_evaluation()
            return await evaluation.validate(await session.builder.get_dataset())

    return asyncio.run(main())


async def _fail(body):
    raise ValueError("in the agent")


async def _no_json(body):
    return Response(b"{", media_type="application/json")


async def _too_much(body):
    return PlainTextResponse("x" * (2**24 + 1))


async def _compressed(body):
    return Response(
        gzip.compress(b'{"answer": "a"}'), media_type="application/json", headers={"Content-Encoding": "gzip"}
    )


async def _teapot(body):
    return PlainTextResponse("short and stout", status_code=418)


FAULTS = {
    "fail": (_fail, "the agent answered with the status 500"),
    "teapot": (_teapot, "the agent answered with the status 418: short and stout"),
    "no json": (_no_json, "the agent answered '{', which is no JSON"),
    "too much": (_too_much, "the response of the agent is larger than 16777216 bytes"),
    "compressed": (_compressed, "the response of the agent has the Content-Encoding 'gzip'"),
}
GOOD = ("a?", "bb?")


@pytest.fixture(scope="module")
def far(tmp_path_factory):
    """An agent that answers some examples with faults, its outcomes by example, and the folder of the run."""

    async def answer(body):
        question = body["example"]["question"]
        return await (FAULTS[question][0](body) if question in FAULTS else agent.play(body))

    folder, agent = tmp_path_factory.mktemp("far"), Agent()
    agent._answer = answer
    workflow = {"_type": "http_agent", "url": agent.url, "api_key": "the-key-of-the-agent"}
    outcomes = evaluate(folder, workflow, questions=(*GOOD, *FAULTS))
    yield agent, {outcome.item.id: outcome for outcome in outcomes}, folder
    agent.close()


def test_no_episode_takes_the_connection_of_another(far):
    """The agent's server may close it, as Starlette's and uvicorn do after an error."""
    agent, _, _ = far
    assert len({*agent.ports}) == len(agent.ports) == len(GOOD) + len(FAULTS)


def test_an_agent_at_an_address_plays_as_one_in_process(far, tmp_path):
    _, outcomes, _ = far
    for here in evaluate(tmp_path, {"_type": "http_in_process"}):
        there = outcomes[here.item.id]
        assert there.error is None and there.reward == here.reward and len(there.episode.calls) == 2
        calls = [[replace(call, functions=()) for call in each.episode.calls] for each in (here, there)]
        assert calls[0] == calls[1]


@pytest.mark.parametrize("question", FAULTS)
def test_a_fault_of_the_agent_costs_its_episode(far, question):
    _, outcomes, _ = far
    assert FAULTS[question][1] in outcomes[question].error


def test_each_episode_has_a_key_of_its_own_that_is_written_nowhere(far):
    agent, outcomes, folder = far
    first = agent.asked[0]
    assert len(agent.asked) == len(outcomes) == 7 and first["model"] == "policy"
    assert first["authorization"] == "Bearer the-key-of-the-agent" and first["accept-encoding"] == "identity"
    assert first["base_url"].endswith(f"/e/{first['api_key']}/v1")
    assert len({body["api_key"] for body in agent.asked}) == len({body["seed"] for body in agent.asked}) == 7
    written = b"".join(path.read_bytes() for path in folder.rglob("*") if path.is_file())
    assert b"http_agent" in written
    assert not any(key.encode() in written for key in ("the-key-of-the-agent", *(b["api_key"] for b in agent.asked)))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("preset", "general"), [("qwen3-50k", {}), ("qwen3-176k-a47k", {"isolation": "process"})], ids=["dense", "mixture"]
)
def test_a_run_is_the_same_with_an_agent_at_an_address(tmp_path, make_agent, preset, general):
    agent = make_agent()
    (tmp_path / "here").mkdir()
    of_agent = {"_type": "http_agent", "url": agent.url, "api_key": "the-key-of-the-agent"}
    far = train(tmp_path, of_agent, general=general, preset=preset)
    assert far == train(tmp_path / "here", {"_type": "http_in_process"}, preset=preset)
    assert len({body["api_key"] for body in agent.asked}) == len({body["seed"] for body in agent.asked}) == 8
    written = b"".join(far.values()) + (tmp_path / "run" / "run.log").read_bytes()
    assert not any(body["api_key"].encode() in written for body in agent.asked)


def test_an_agent_calls_the_address_that_it_is_told(tmp_path, make_agent):
    agent = make_agent()
    serve = {"port": 0, "url": "http://trainer.example:8000"}
    outcomes = evaluate(tmp_path, {"_type": "http_agent", "url": agent.url}, serve=serve)
    assert all(body["base_url"].startswith("http://trainer.example:8000/e/") for body in agent.asked)
    assert all("status 500" in outcome.error for outcome in outcomes)  # there is no such machine
    del outcomes
    gc.collect()
    assert all(episode_of_token(body["api_key"]) is None for body in agent.asked)


@pytest.mark.parametrize(
    ("serve", "reason"),
    [
        ({"api_key": " key"}, "serve.api_key: must be printable ASCII"),
        ({"api_key": "key\n"}, "serve.api_key: must be printable ASCII"),
        ({"api_key": "schlüssel"}, "serve.api_key: must be printable ASCII"),
        ({"api_key": "jaxft-episode-1"}, "serve.api_key: begins as the keys of episodes do"),
        ({"host": "0.0.0.0"}, "host 0.0.0.0 can be reached from other machines"),
        *(
            ({"url": url}, "serve.url: must begin with http")
            for url in ("http://", "http://[", "ftp://a", "http://a:b")
        ),
    ],
)
def test_keys_and_addresses_that_no_client_can_use_are_refused(tmp_path, serve, reason):
    with pytest.raises(jaxft.ConfigError, match=reason):
        config_of(tmp_path, {"_type": "http_agent", "url": "http://127.0.0.1:9/"}, serve=serve)


@pytest.mark.parametrize("url", ["127.0.0.1:9", "http:///episode", "http://a b/", "http://[::1/", "http://a:99999"])
def test_an_agent_has_an_address(tmp_path, url):
    with pytest.raises(jaxft.ConfigError, match=r"workflow\.url: must begin with http"):
        config_of(tmp_path, {"_type": "http_agent", "url": url})


@pytest.mark.parametrize("host", ["192.0.2.1", "a..b"])
def test_an_address_that_cannot_be_listened_on_is_named(tmp_path, host):
    workflow = {"_type": "http_agent", "url": "http://127.0.0.1:9/"}
    with pytest.raises(jaxft.ConfigError, match=rf"llms\.policy\.serve: cannot listen on {host}:0: ."):
        evaluate(tmp_path, workflow, serve={"host": host, "port": 0, "api_key": "key"})


def test_an_agent_that_is_not_there_is_named(tmp_path):
    outcomes = evaluate(tmp_path, {"_type": "http_agent", "url": "http://127.0.0.1:9/episode"})
    assert all("POST http://127.0.0.1:9/episode: the agent cannot be asked: " in each.error for each in outcomes)


def test_an_agent_that_never_answers_is_left_and_its_later_calls_are_refused(tmp_path, make_agent):
    refused = []

    async def answer(body):
        try:
            await asyncio.sleep(100)
        finally:  # the run has gone; an agent that goes on is told so
            async with openai.AsyncOpenAI(base_url=body["base_url"], api_key="any", max_retries=0) as client:
                with contextlib.suppress(openai.APIConnectionError):
                    with pytest.raises(openai.AuthenticationError):
                        await two_turns(client, "?")
                    refused.append(body)

    async def after(body):
        task = asyncio.create_task(answer(body))
        await asyncio.wait({task}, timeout=1.5)
        task.cancel()
        await asyncio.wait({task})
        return PlainTextResponse("late")

    agent = make_agent(after)
    general = {"timeout_seconds": 1, "max_concurrency": 1}
    outcomes = evaluate(tmp_path, {"_type": "http_agent", "url": agent.url}, general=general)
    assert all("TimeoutError: the workflow gave no output within 1 s" in each.error for each in outcomes)
    assert refused  # at least while the second episode went on


def test_the_model_must_be_named_where_there_are_several(tmp_path):
    config = config_of(tmp_path, {"_type": "http_agent", "url": "http://127.0.0.1:9/"})
    llms = config.llms | {"other": config.llms["policy"]}

    async def main():
        async with jaxft.open_session(config.model_copy(update={"llms": llms}), console=Console(io.StringIO())):
            pass

    with pytest.raises(jaxft.ConfigError, match=r"workflow\.llm: .* 2 entries of llms: policy, other"):
        asyncio.run(main())


@pytest.mark.long
def test_nothing_grows_in_a_thousand_episodes(tmp_path, make_agent):
    """File descriptors, threads, episodes and tasks after 100 and after 1,000 episodes."""
    agent = make_agent()
    counts = []

    async def main():
        config = config_of(tmp_path, {"_type": "http_agent", "url": agent.url}, general={"max_concurrency": 16})
        async with jaxft.open_session(config, console=Console(io.StringIO())) as session:
            evaluation = await session.builder.get_evaluation()
            items = await session.builder.get_dataset()
            for _ in range(10):
                outcomes = await evaluation.validate(items * 50)
                assert all(outcome.error is None for outcome in outcomes)
                agent.asked.clear()
                del outcomes
                gc.collect()
                files, episodes = len(os.listdir("/proc/self/fd")), len(recorder._episodes)
                tasks, threads = len(asyncio.all_tasks()), threading.active_count()
                counts.append((files, episodes, tasks, threads, len(gc.get_objects())))

    asyncio.run(main())
    (*same, threads, objects), last = counts[1], counts[-1]
    assert list(last[:3]) == same, counts
    assert last[3] <= threads + 1, counts  # one of an executor may be ending
    assert last[4] <= objects + 100, counts
