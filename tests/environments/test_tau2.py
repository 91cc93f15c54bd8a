"""Tasks of tau2 are played by language models that say what a script holds."""

import asyncio
import json
import sys
from types import SimpleNamespace

import pytest
from pydantic import ValidationError

from jaxft.environments import Tau2DatasetConfig, Tau2WorkflowConfig
from jaxft.environments.tau2 import dataset, workflow
from jaxft.errors import ComponentError, ConfigError
from jaxft.rollout.calls import Completion, Reply
from jaxft.rollout.messages import ToolCall


class Speaker:
    """A language model that says what it was given, a text or calls, and keeps what it was asked."""

    def __init__(self, *said):
        self.said, self.asked, self.tools = list(said), [], []

    def chat_sync(self, messages, *, tools, temperature=1.0, max_tokens=None):
        self.asked.append(json.loads(json.dumps(messages)))
        self.tools = [tool["function"]["name"] for tool in tools]
        said = self.said.pop(0)
        if isinstance(said, str):
            return Reply(said, Completion(finish_reason="stop"))
        call = ToolCall(f"call{len(self.asked)}", said[0], json.dumps(said[1]))
        return Reply("", Completion(finish_reason="tool_calls"), tool_calls=(call,))


def load(**options):
    return asyncio.run(anext(dataset(Tau2DatasetConfig(**options), None)))


def play(row, policy, customer, **options):
    async def main():
        async def get_llm(name):
            return {"policy": policy, "customer": customer}[name]

        config = Tau2WorkflowConfig(llm="policy", user="customer", **options)
        return await anext(workflow(config, SimpleNamespace(get_llm=get_llm)))

    return asyncio.run(main())(row)


def test_the_policy_is_not_its_own_user():
    with pytest.raises(ValidationError, match=r"user\n.*'policy'"):
        Tau2WorkflowConfig(llm="policy", user="policy")


def test_without_the_package_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "tau2", None)
    with pytest.raises(ComponentError, match=r"tau2: .*jaxft\[tau2\]"):
        load(domain="mock")


@pytest.mark.envs
def test_an_episode_has_the_reward_of_tau2():
    (row,) = [item.full_dataset_entry for item in load(domain="mock") if item.id == "mock-create_task_1"]
    arguments = row["task"]["evaluation_criteria"]["actions"][0]["arguments"]
    policy = Speaker(("create_task", arguments), "It is there.")
    user = Speaker("Create a task for me.", "###STOP###")
    played = play(row, policy, user)
    assert played["reward"] == 1.0 and played["stop"] == "user_stop"
    assert "create_task" in policy.tools and "policy" in policy.asked[0][0]["content"]
    assert [message["role"] for message in policy.asked[1]][-3:] == ["user", "assistant", "tool"]
    assert "###STOP###" in user.asked[0][0]["content"]
    idle = play(row, Speaker("No."), Speaker("Create a task for me.", "###STOP###"))
    assert idle["reward"] == 0.0


@pytest.mark.envs
def test_an_episode_ends_after_its_steps_without_a_reward():
    row = load(domain="mock")[0].full_dataset_entry
    played = play(row, Speaker(*["Yes?"] * 5), Speaker(*["Please."] * 5), max_steps=4)
    assert played["reward"] == 0.0 and played["stop"] == "max_steps"


@pytest.mark.envs
@pytest.mark.parametrize(
    ("options", "told"), [({"domain": "mok"}, "mock"), ({"domain": "mock", "split": "test"}, "test")]
)
def test_a_wrong_domain_or_split_is_named(options, told):
    with pytest.raises(ConfigError, match=told):
        load(**options)
