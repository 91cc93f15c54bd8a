"""Environments of verifiers play their episodes with a policy that says what a script holds."""

import asyncio
import contextlib
import importlib.util
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from jaxft.environments import VerifiersDatasetConfig, VerifiersRewardConfig, VerifiersWorkflowConfig
from jaxft.environments.verifiers import dataset, reward, workflow
from jaxft.errors import ComponentError, ConfigError, DatasetError
from jaxft.harness.evaluation import Evaluation
from jaxft.rollout.client import ChatClient
from jaxft.rollout.recorder import TRAINING

TASKSETS = Path(__file__).parents[1] / "data" / "verifiers"


@pytest.fixture(autouse=True)
def tasksets(monkeypatch):
    monkeypatch.syspath_prepend(str(TASKSETS))
    monkeypatch.setenv("PYTHONPATH", str(TASKSETS))


@pytest.fixture
def speaker(make_scripted_policy, policy):
    """Makes a language model that takes its part in a conversation as it is written."""

    def make(messages, tools=()):
        ids, _ = policy.template.conversation(messages, tools)
        return ChatClient(make_scripted_policy(list(ids)))

    return make


def load(**options):
    return asyncio.run(anext(dataset(VerifiersDatasetConfig(**options), None)))


def play(llm, given, num_generations=1, **options):
    """Play all tasks of a dataset; return the outcomes."""

    async def main():
        async def get_llm(name):
            return llm

        general = SimpleNamespace(dataset=given)
        builder = SimpleNamespace(get_llm=get_llm, config=SimpleNamespace(eval=SimpleNamespace(general=general)))
        async with contextlib.AsyncExitStack() as stack:
            items = await anext(dataset(given, builder))
            episodes = workflow(VerifiersWorkflowConfig(llm="policy", **options), builder)
            run = await anext(episodes)
            stack.push_async_callback(anext, episodes, None)
            score = await anext(reward(VerifiersRewardConfig(), builder))
            evaluation = Evaluation(run, {"reward": score}, "reward", 8, 0)
            return await evaluation.run(items, stream=TRAINING, rollout_index=0, num_generations=num_generations)

    return asyncio.run(main())


@pytest.mark.envs
def test_tasks_are_examples():
    items = load(taskset={"id": "toy-words"}, select={"skip": 1})
    assert [item.id for item in items] == ["toy-words-1", "toy-words-2"]
    assert items[0].input_obj == "Say dog" and items[0].full_dataset_entry["task"]["word"] == "dog"


@pytest.mark.envs
def test_rewards_have_their_weights_and_calls_their_tokens(speaker):
    said = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Say cat"}]
    said.append({"role": "assistant", "content": "cat"})
    given = VerifiersDatasetConfig(taskset={"id": "toy-words"}, select={"limit": 1})
    outcomes = play(speaker(said), given, num_generations=3)
    for outcome in outcomes:
        assert outcome.error is None, outcome.traceback
        assert outcome.reward == pytest.approx(2.7) and outcome.named_rewards == pytest.approx(
            {"exact": 2, "brief": 0.7}
        )
        assert outcome.item.output_obj["reply"] == "cat"
        assert outcome.reasonings["reward"]["metrics"] == {"letters": 3.0}
        (call,) = outcome.episode.calls
        assert call.content == "cat" and len(call.token_ids) == 4


@pytest.mark.envs
def test_the_same_episodes_twice_have_the_same_tokens(policy):
    given = VerifiersDatasetConfig(taskset={"id": "toy-words"})
    runs = [play(ChatClient(policy), given, num_generations=4, max_tokens=6) for _ in range(2)]
    tokens = [[call.token_ids for outcome in run for call in outcome.episode.calls] for run in runs]
    assert tokens[0] == tokens[1] and len(set(tokens[0])) == len(tokens[0]) == 12


@pytest.mark.envs
def test_an_environment_of_several_turns_is_one_episode(speaker):
    said = [{"role": "user", "content": "A?"}, {"role": "assistant", "content": "b"}]
    said += [{"role": "user", "content": "b?"}, {"role": "assistant", "content": "c"}]
    given = VerifiersDatasetConfig(taskset={"id": "toy-dialog"}, select={"limit": 2})
    for outcome in play(speaker(said), given):
        assert outcome.error is None, outcome.traceback
        assert outcome.named_rewards == {"turns": 2.0, "played": 0.5}
        assert [call.content for call in outcome.episode.calls] == ["b", "c"]
        assert not any(call.prompt.is_retokenized for call in outcome.episode.calls)


@pytest.mark.envs
def test_tools_of_a_task_are_called(speaker):
    call = {"id": "c", "type": "function", "function": {"name": "facts_lookup", "arguments": '{"name": "ada"}'}}
    said = [{"role": "user", "content": "ada"}, {"role": "assistant", "content": None, "tool_calls": [call]}]
    said += [{"role": "tool", "content": "maths", "tool_call_id": "c"}, {"role": "assistant", "content": "maths"}]
    tool = {"type": "function", "function": {"name": "facts_lookup", "parameters": {"properties": {"name": {}}}}}
    (outcome,) = play(speaker(said, [tool]), VerifiersDatasetConfig(taskset={"id": "toy-lookup"}))
    assert outcome.error is None, outcome.traceback
    assert outcome.reward == 1.0
    assert [len(each.reply.tool_calls) for each in outcome.episode.calls] == [1, 0]


@pytest.mark.envs
def test_a_program_of_the_taskset_asks_the_policy_by_a_stream(speaker):
    said = [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "four"}]
    given = VerifiersDatasetConfig(taskset={"id": "toy-program", "question": "2+2?"})
    for outcome in play(speaker(said), given, num_generations=2):
        assert outcome.error is None, outcome.traceback
        assert outcome.reward == 1.0
        assert [call.content for call in outcome.episode.calls] == ["four"]


@pytest.mark.envs
def test_the_policy_answers_at_one_server(speaker):
    llm = speaker([{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}])
    given = VerifiersDatasetConfig(taskset={"id": "toy-words"}, select={"limit": 1})
    with pytest.raises(ConfigError, match="static"):
        play(llm, given, env={"interception": {"type": "static"}})


@pytest.mark.envs
def test_a_task_that_cannot_be_set_up_fails_its_episode_with_the_cause(speaker):
    given = VerifiersDatasetConfig(taskset={"id": "toy-words", "fails": "setup", "words": ["cat"]})
    (outcome,) = play(speaker([{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]), given)
    assert "no word can be had" in outcome.error and "the box is empty" in outcome.error


@pytest.mark.envs
@pytest.mark.parametrize(
    ("options", "error", "told"),
    [
        ({"taskset": {"id": "toy-words", "fails": "load"}}, ComponentError, ["words cannot be read", "/no/such/list"]),
        ({"taskset": {"id": "toy-words", "wrods": []}}, ComponentError, ["wrods"]),
        ({"taskset": {"id": "toy-nothing"}}, ComponentError, ["toy-nothing", "toy_nothing"]),
        ({"taskset": {}}, ConfigError, ["id"]),
        ({"taskset": {"id": "toy-dialog"}}, DatasetError, ["limit"]),
    ],
)
def test_a_taskset_that_cannot_be_set_up_is_told_with_its_cause(options, error, told):
    with pytest.raises(error) as raised:
        load(**options)
    assert all(text in str(raised.value) for text in told)


@pytest.mark.envs
def test_the_policy_needs_one_seat(speaker):
    given = VerifiersDatasetConfig(taskset={"id": "toy-words"}, select={"limit": 1})
    llm = speaker([{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}])
    with pytest.raises(ConfigError, match="assistant, user"):
        play(llm, given, env={"id": "user-sim"})


@pytest.mark.skipif(importlib.util.find_spec("verifiers") is not None, reason="verifiers is installed")
def test_without_the_package_the_extra_is_named():
    with pytest.raises(ComponentError, match=r"jaxft\[envs\]"):
        load(taskset={"id": "toy-words"})


@pytest.mark.envs
def test_the_harness_is_known_by_its_name():
    assert "verifiers.v1.harnesses.jaxft" in sys.modules
