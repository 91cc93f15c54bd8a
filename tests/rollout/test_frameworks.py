"""Clients of frameworks: an agent of each, as its own guide writes one, calls a tool of a scripted policy."""

import asyncio
import enum
import importlib.util
import json
import sys

import openai
import pytest

from jaxft.errors import ComponentError
from jaxft.rollout.client import ChatClient
from jaxft.rollout.current import recording
from jaxft.rollout.frameworks import framework_client
from jaxft.rollout.recorder import Episode
from jaxft.rollout.remote import RemoteClient
from jaxft.rollout.sequences import token_sequences

pytestmark = pytest.mark.usefixtures("no_sockets")

CALLED = '<call:look_up>{"city":"Oslo"}</call><|end|>'
TEXT = (
    "<|system|>tools: look_up(city)<|end|><|user|>x?<|end|><|assistant|>"
    + CALLED
    + "<|tool|>3<|end|><|assistant|>3!<|end|>"
)


def make_episode():
    return Episode(run_seed=0, stream=0, rollout_index=0, example_id="a", generation=0)


def test_unknown_frameworks_and_models_are_refused_with_the_known_ones(policy):
    llm = ChatClient(policy, "player")
    with pytest.raises(ComponentError, match="langchain"):
        framework_client(llm, "langchian")
    with pytest.raises(ComponentError, match="llama_index, openai"):
        framework_client(llm, "x")
    with pytest.raises(ComponentError, match="dict"):
        framework_client({}, "openai")


def test_a_missing_package_is_told_with_its_extra(policy, monkeypatch):
    for wrapper_type, package in (("openai", "openai"), ("langchain", "langchain_openai"), ("openai_agents", "agents")):
        extra = wrapper_type.replace("_", "-")
        with monkeypatch.context() as patch:
            patch.setitem(sys.modules, package, None)
            with pytest.raises(ComponentError, match=rf'pip install "jaxft\[{extra}\]"') as caught:
                framework_client(ChatClient(policy, "player"), wrapper_type)
        assert "\n" not in str(caught.value)


def test_a_toolkits_enumeration_names_a_framework(policy):
    kind = enum.Enum("LLMFrameworkEnum", {"OPENAI": "openai"})
    client = framework_client(ChatClient(policy, "player"), kind.OPENAI)
    assert isinstance(client, openai.AsyncOpenAI) and (client.max_retries, client.timeout) == (0, None)


def test_a_remote_model_keeps_its_settings():
    llm = RemoteClient("m", base_url="http://remote.invalid/v1", api_key="key", max_retries=4, timeout_seconds=9.0)
    for wrapper_type in ("openai", "openai_sync"):
        client = framework_client(llm, wrapper_type)
        assert (str(client.base_url), client.api_key) == ("http://remote.invalid/v1/", "key")
        assert (client.max_retries, client.timeout) == (4, 9.0)


def look_up(city: str) -> str:
    """Look up a city."""
    assert city == "Oslo"
    return "3"


async def openai_agent(client):
    tool = {"type": "function", "function": {"name": "look_up", "parameters": {"properties": {"city": {}}}}}
    messages = [{"role": "user", "content": "x?"}]
    while True:
        completion = await client.chat.completions.create(model="player", messages=messages, tools=[tool])
        message = completion.choices[0].message
        messages.append(message)
        if not message.tool_calls:
            return message.content
        for call in message.tool_calls:
            content = look_up(**json.loads(call.function.arguments))
            messages.append({"role": "tool", "tool_call_id": call.id, "content": content})


async def langchain_agent(model):
    from langchain.agents import create_agent

    result = await create_agent(model, [look_up]).ainvoke({"messages": [{"role": "user", "content": "x?"}]})
    return result["messages"][-1].content


async def langchain_agent_in_thread(model):
    from langchain.agents import create_agent

    agent = create_agent(model, [look_up])
    result = await asyncio.to_thread(agent.invoke, {"messages": [{"role": "user", "content": "x?"}]})
    return result["messages"][-1].content


async def langchain_streaming_agent(model):
    from langchain.agents import create_agent

    messages = {"messages": [{"role": "user", "content": "x?"}]}
    parts = [part async for part, _ in create_agent(model, [look_up]).astream(messages, stream_mode="messages")]
    return "".join(part.content for part in parts if part.type == "AIMessageChunk")


async def pydantic_ai_agent(model):
    from pydantic_ai import Agent

    return (await Agent(model, tools=[look_up]).run("x?")).output


async def pydantic_ai_streaming_agent(model):
    from pydantic_ai import Agent

    async with Agent(model, tools=[look_up]).run_stream("x?") as result:
        return await result.get_output()


async def openai_agents_agent(model):
    from agents import Agent, Runner, function_tool

    agent = Agent(name="agent", model=model, tools=[function_tool(look_up)])
    return (await Runner.run(agent, "x?")).final_output


async def openai_agents_streaming_agent(model):
    from agents import Agent, Runner, function_tool

    result = Runner.run_streamed(Agent(name="agent", model=model, tools=[function_tool(look_up)]), "x?")
    assert [event async for event in result.stream_events()]
    return result.final_output


async def llama_index_agent(model):
    from llama_index.core.agent.workflow import FunctionAgent

    return str(await FunctionAgent(llm=model, tools=[look_up], streaming=False).run("x?"))


async def llama_index_streaming_agent(model):
    from llama_index.core.agent.workflow import FunctionAgent

    return str(await FunctionAgent(llm=model, tools=[look_up]).run("x?"))


AGENTS = [
    ("openai", "openai", openai_agent),
    ("langchain", "langchain_openai", langchain_agent),
    ("langchain", "langchain_openai", langchain_agent_in_thread),
    ("langchain", "langchain_openai", langchain_streaming_agent),
    ("pydantic_ai", "pydantic_ai", pydantic_ai_agent),
    ("pydantic_ai", "pydantic_ai", pydantic_ai_streaming_agent),
    ("openai_agents", "agents", openai_agents_agent),
    ("openai_agents", "agents", openai_agents_streaming_agent),
    ("llama_index", "llama_index", llama_index_agent),
    ("llama_index", "llama_index", llama_index_streaming_agent),
]


def installed(package):
    return importlib.util.find_spec(package) is not None


def cases():
    """Agents of the frameworks that are installed: not all of them can be in one environment."""
    for wrapper_type, package, agent in AGENTS:
        if installed(package):
            marks = [] if wrapper_type == "openai" else [pytest.mark.agents]
            yield pytest.param(wrapper_type, agent, marks=marks, id=agent.__name__)


def run_agent(policy, wrapper_type, agent):
    """The episode of an agent."""
    episode = make_episode()

    async def main():
        with recording(episode):
            return await agent(framework_client(ChatClient(policy, "player"), wrapper_type))

    assert asyncio.run(main()) == "3!"
    return episode


@pytest.mark.parametrize(("wrapper_type", "agent"), list(cases()))
def test_an_agent_of_each_framework_makes_the_same_calls_and_one_sequence(
    make_scripted_policy, tokenizer, wrapper_type, agent
):
    policy = make_scripted_policy((tokenizer.encode(TEXT) + [1] * 256)[:256])
    episode = run_agent(policy, wrapper_type, agent)
    (sequence,) = token_sequences(episode.calls)
    assert tokenizer.decode(sequence.tokens) == TEXT
    assert {call.temperature for call in episode.calls} == {1.0}  # no framework's own default
    assert episode.calls == run_agent(policy, "openai", openai_agent).calls


@pytest.mark.agents
@pytest.mark.skipif(not installed("langchain_openai"), reason="LangChain is not installed")
def test_token_ids_reach_a_harness_through_langchain(policy):
    """LangChain drops unknown fields of choices and messages, but none beside log-probabilities."""
    model = framework_client(ChatClient(policy, "player"), "langchain")
    asking = model.bind(logprobs=True, max_tokens=5, extra_body={"return_token_ids": True})
    episode, expected = make_episode(), make_episode()

    async def main():
        with recording(episode):
            reply = await asking.ainvoke("x?")
        with recording(expected):
            await ChatClient(policy, "player").chat([{"role": "user", "content": "x?"}], max_tokens=5)
        return reply

    entries = asyncio.run(main()).response_metadata["logprobs"]["content"]
    (call,) = episode.calls
    assert episode.calls == expected.calls
    assert tuple(entries[0]["prompt_token_ids"]) == call.prompt_ids
    assert tuple(entry["token_id"] for entry in entries) == call.token_ids
    assert tuple(entry["logprob"] for entry in entries) == call.sampler_logprobs


@pytest.mark.agents
def test_a_framework_is_installed():
    assert any(installed(package) for wrapper_type, package, _ in AGENTS if wrapper_type != "openai")
