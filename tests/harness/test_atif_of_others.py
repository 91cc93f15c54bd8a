"""Trajectories that others write: NeMo Relay's exporter, with tokens as requests ask for them; Harbor; the toolkit.

Their packages are in environments of `.ci/more`, so that each test imports its own.
"""

import json

import pytest

from jaxft.harness.atif import read_atif
from jaxft.rollout.client import ChatClient
from jaxft.rollout.frameworks import framework_client
from jaxft.rollout.sequences import token_sequences
from tests.serving.conftest import make_episode, run

pytestmark = pytest.mark.usefixtures("no_sockets")

MORE = {"extra_body": {"return_token_ids": True}}
TOOL = {"type": "function", "function": {"name": "look_up", "parameters": {"properties": {"city": {}}}}}
CALLED = '<call:look_up>{"city":"Oslo"}</call><|end|>'
TEXT = (
    "<|system|>tools: look_up(city)<|end|><|user|>x?<|end|><|assistant|>"
    + CALLED
    + "<|tool|>3<|end|><|assistant|>3!<|end|>"
)


async def ask(client, messages, **options):
    """The message of an answer, by a client that Relay watches."""
    import nemo_relay

    async def complete(request):
        return (await client.chat.completions.create(**request.content, **MORE)).model_dump(mode="json")

    asked = nemo_relay.LLMRequest({}, {"model": "player", "messages": messages, **options})
    codec = nemo_relay.codecs.OpenAIChatCodec()
    answer = await nemo_relay.llm.execute("openai", asked, complete, model_name="player", response_codec=codec)
    return answer["choices"][0]["message"]


async def ask_streamed(client, messages, **options):
    """The text of an answer that comes in chunks, of which Relay keeps what the agent puts together."""
    import nemo_relay

    seen = []

    async def chunks(request):
        async for chunk in await client.chat.completions.create(**request.content, **MORE):
            yield chunk.model_dump(mode="json")

    def text():
        return "".join(each["delta"].get("content") or "" for chunk in seen for each in chunk["choices"])

    def finish():
        return {"choices": [{"message": {"role": "assistant", "content": text()}}], "usage": seen[-1]["usage"]}

    streamed = {"stream": True, "stream_options": {"include_usage": True}}
    asked = nemo_relay.LLMRequest({}, {"model": "player", "messages": messages, **streamed, **options})
    stream = await nemo_relay.llm.stream_execute("openai", asked, chunks, seen.append, finish, model_name="player")
    async for _ in stream:
        pass
    return text()


def exported(policy, agent, path):
    """The episode of an agent, and the rows of the file that Relay has written of it."""
    import nemo_relay

    episode, client = make_episode(), framework_client(ChatClient(policy, "player"), "openai")
    exporter = nemo_relay.AtifExporter("session", "agent", "1")

    async def main():
        with nemo_relay.scope.scope("agent", nemo_relay.ScopeType.Agent):
            await agent(client)
        await nemo_relay.subscribers.flush_async()

    exporter.register("atif")
    try:
        run(main(), episode)
    finally:
        exporter.deregister("atif")
    path.write_text(exporter.export_json())
    (row,) = read_atif(path)
    return episode, row.fields


def exact(rows):
    known = ("tokens", "completion_mask", "sampler_logprobs", "turns")
    return [{name: row[name] for name in known} for row in json.loads(json.dumps(rows))]


@pytest.mark.atif
def test_ids_and_logprobs_of_an_agent_and_its_subagent_are_those_that_were_sampled(policy, tmp_path):
    """Random weights write bytes that are no UTF-8."""
    import nemo_relay

    options = {"max_tokens": 12, "temperature": 0.9}

    async def agent(client):
        messages = [{"role": "user", "content": "x?"}]
        messages += [await ask(client, messages, **options), {"role": "user", "content": "y?"}]
        messages += [{"role": "assistant", "content": await ask_streamed(client, messages, **options)}]
        with nemo_relay.scope.scope("helper", nemo_relay.ScopeType.Agent):
            await ask(client, [{"role": "user", "content": "z?"}], **options)

    episode, row = exported(policy, agent, tmp_path / "relay.json")
    wanted = [sequence.model_dump() for sequence in token_sequences(episode.calls)]
    assert exact(row["token_sequences"]) == exact(wanted) and len(episode.calls) == 3
    assert any("\ufffd" in call.content for call in episode.calls)


@pytest.mark.atif
def test_calls_of_tools_and_their_results_are_messages(make_scripted_policy, tokenizer, tmp_path):
    import nemo_relay

    async def look_up(arguments):
        return nemo_relay.ToolExecutionResult("3")

    async def agent(client):
        messages = [{"role": "user", "content": "x?"}]
        while (answer := await ask(client, messages, tools=[TOOL]))["tool_calls"]:
            (call,) = answer["tool_calls"]
            name, arguments = call["function"]["name"], json.loads(call["function"]["arguments"])
            result = await nemo_relay.tools.execute(name, arguments, look_up, tool_call_id=call["id"])
            messages += [answer, {"role": "tool", "tool_call_id": call["id"], "content": result.result}]

    policy = make_scripted_policy((tokenizer.encode(TEXT) + [1] * 256)[:256])
    episode, row = exported(policy, agent, tmp_path / "relay.json")
    (sequence,) = row["token_sequences"]
    assert tokenizer.decode(sequence["tokens"]) == TEXT and len(episode.calls) == 2
    roles = [(each["role"], each["content"]) for each in row["messages"]]
    assert roles == [("user", "x?"), ("assistant", ""), ("tool", "3"), ("assistant", "3!")]


def read_messages(document, path):
    path.write_text(document)
    (row,) = read_atif(path)
    assert "token_sequences" not in row.fields and row.fields["reward"] is None
    return [(each["role"], each["content"], each.get("weight")) for each in row.fields["messages"]]


@pytest.mark.atif
def test_what_harbor_converts_is_read(tmp_path):
    from harbor.agents.installed.strands_trajectory import convert_strands_to_atif

    use = {"toolUseId": "a", "name": "look_up", "input": {"city": "Oslo"}}
    usage = {"metadata": {"usage": {"inputTokens": 3, "outputTokens": 2}}}
    said = [
        {"role": "user", "content": [{"text": "x?"}]},
        {"role": "assistant", "content": [{"text": "Looking."}, {"toolUse": use}], **usage},
        {"role": "user", "content": [{"toolResult": {"toolUseId": "a", "content": [{"text": "3"}]}}]},
        {"role": "assistant", "content": [{"text": "3!"}], **usage},
    ]
    names = {"agent_name": "strands", "agent_version": "1", "session_id": "s"}
    events = [{"kind": "message", "message": message} for message in said]
    trajectory = convert_strands_to_atif(instruction="x?", result={}, events=events, **names)
    assert read_messages(json.dumps(trajectory.to_json_dict()), tmp_path / "harbor.json") == [
        ("user", "x?", None),
        ("assistant", "Looking.", None),
        ("tool", "3", None),
        ("assistant", "3!", None),
    ]


@pytest.mark.nat
def test_what_the_toolkit_converts_is_read(tmp_path):
    from nat.data_models.intermediate_step import IntermediateStep, IntermediateStepPayload
    from nat.data_models.invocation_node import InvocationNode
    from nat.utils.atif_converter import IntermediateStepToATIFConverter

    def step(time, event_type, name, **data):
        began = None if event_type.endswith("START") else time - 1
        payload = IntermediateStepPayload(
            event_type=event_type, name=name, data=data, event_timestamp=time, span_event_timestamp=began, UUID=name
        )
        node = InvocationNode(function_id="f", function_name="agent")
        return IntermediateStep(parent_id="root", function_ancestry=node, payload=payload)

    steps = [
        step(1.0, "WORKFLOW_START", "agent", input="x?"),
        step(3.0, "LLM_END", "player", input="x?", output="Looking."),
        step(5.0, "TOOL_END", "look_up", input={"city": "Oslo"}, output="3"),
        step(7.0, "LLM_END", "player", input="x?", output="3!"),
        step(9.0, "WORKFLOW_END", "agent", output="3!"),
    ]
    trajectory = IntermediateStepToATIFConverter().convert(steps, session_id="s")
    read = read_messages(json.dumps(trajectory.to_json_dict()), tmp_path / "toolkit.json")
    assert read == [
        ("user", "x?", None),
        ("assistant", "Looking.", None),
        ("tool", "3", None),
        ("assistant", "3!", None),
    ]
