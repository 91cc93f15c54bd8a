"""LangChain's chat model of a live policy."""

import asyncio
import copy
import json

import jax
import pytest
from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
from langchain_core.tools import tool

import jaxft
from jaxft.nat.chat_model import PolicyChatModel
from jaxft.nat.live import ToolkitEpisodes, published
from jaxft.rollout.calls import recorded_call
from jaxft.rollout.current import recording
from jaxft.rollout.recorder import Episode

pytestmark = pytest.mark.nat


@pytest.fixture(scope="module")
def llm():
    tokenizer = jaxft.load_tokenizer()
    model, params = jaxft.init_model(jaxft.model_preset("qwen3-50k"), jax.random.key(0))
    policy = jaxft.Policy(model, params, tokenizer, stop_ids=(tokenizer.eos_token_id,), slots=4, max_context_tokens=256)
    client = jaxft.ChatClient(policy)
    with published("policy", client):
        yield client
    policy.close()


@pytest.fixture
def model(llm):
    async def find():
        return llm

    return PolicyChatModel(model_name="policy", find_policy=find, defaults={"temperature": 1.0, "max_tokens": 8})


@tool
def get(key: str) -> str:
    """Look up a fact."""
    return key


def test_an_answer_carries_its_log_probabilities_with_the_record_of_its_call(model):
    episode = Episode(0, 0, 0, "example", 0)

    async def ask():
        with recording(episode):
            return await model.ainvoke("hello")

    answer = asyncio.run(ask())
    (call,) = episode.calls
    recorded = recorded_call(answer.response_metadata["logprobs"])
    assert (recorded.prompt_ids, recorded.token_ids) == (call.prompt_ids, call.token_ids)
    assert recorded.sampler_logprobs == call.sampler_logprobs
    assert answer.usage_metadata["output_tokens"] == len(call.token_ids) <= 8
    assert json.loads(json.dumps(answer.response_metadata)) == answer.response_metadata
    assert copy.deepcopy(answer).response_metadata["logprobs"] is answer.response_metadata["logprobs"]


def test_a_forced_tool_call_comes_back_and_its_result_goes_on(model):
    episode = Episode(0, 0, 0, "example", 0)
    bound = model.bind_tools([get], tool_choice="get")

    async def ask():
        with recording(episode):
            asked = [HumanMessage("which?")]
            await bound.ainvoke(asked, max_tokens=40)
            called = AIMessage("", tool_calls=[{"name": "get", "args": {"key": "a"}, "id": "1"}])
            result = ToolMessage("3", tool_call_id="1")
            await model.bind_tools([get]).ainvoke([*asked, called, result])

    asyncio.run(ask())
    first, second = episode.calls
    assert first.full_text.startswith("<call:get>")
    assert [message["role"] for message in second.messages] == ["user", "assistant", "tool"]
    assert second.messages[1]["tool_calls"][0]["function"]["arguments"] == {"key": "a"}


def test_an_argument_that_the_policy_does_not_take_is_an_error(model):
    with pytest.raises(TypeError, match="logit_processor"):
        asyncio.run(model.ainvoke("hello", logit_processor=3))


def test_code_that_cannot_await_is_answered_too(model):
    async def ask():
        with recording(Episode(0, 0, 0, "example", 0)) as episode:
            answer = await asyncio.to_thread(model.invoke, "hello")
        return answer, episode

    answer, episode = asyncio.run(ask())
    assert answer.content == episode.calls[0].content


def test_runs_of_the_toolkit_have_episodes_that_a_repeated_collection_repeats():
    async def keys(order):
        episodes = ToolkitEpisodes()
        with episodes.recording(1, [jaxft.EvalInputItem(id="7", input_obj="question", full_dataset_entry={})]):
            episodes.begin_collection(2)
            return {run: episodes.episode(run, "question").key_ids for run in order}

    first, second = asyncio.run(keys(["a", "b", "a"])), asyncio.run(keys(["b", "a"]))
    assert set(first.values()) == set(second.values()) and len(set(first.values())) == 2
    own = [Episode(1, 0, 2, "7", generation).key_ids for generation in range(2)]
    assert sorted(first.values()) == sorted(own)
