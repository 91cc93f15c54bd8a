"""Classes in the form of TRL's `environment_factory` play episodes with a language model that says what it is told."""

import asyncio
import copy
import importlib.util
import json
import random
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from jaxft.environments import EnvironmentFactoryConfig, EnvironmentRewardConfig
from jaxft.environments.factory import environment_kind, find_factory, opening, reward, workflow
from jaxft.errors import ConfigError, ToolsUnsupportedError
from jaxft.harness.data_models import EvalInputItem
from jaxft.rollout.calls import Completion, Reply
from jaxft.rollout.chat import ChatTemplate
from jaxft.rollout.client import ChatClient
from jaxft.rollout.messages import ToolCall

HERE = f"{__name__}:"


class Box:
    """An environment with a plain and an async tool; each object keeps its own content."""

    made = 0

    def __init__(self):
        type(self).made += 1

    def reset(self, prompt, content, **row):
        self.content, self.row = [content], row
        return f" Box: {content}"

    def put(self, thing: str) -> int:
        """
        Put a thing into the box.

        Args:
            thing: Its name.
        """
        self.content.append(thing)
        return len(self.content)

    async def look(self, place: int) -> str:
        """
        Look into the box.

        Args:
            place: Number of the thing.
        """
        await asyncio.sleep(0)
        return self.content[place]

    def get_reward(self):
        return len(self.content) / 2

    def _hidden(self):
        raise AssertionError("is no tool")


class AsyncBox(Box):
    async def reset(self, **row):
        super().reset(**row)

    async def get_reward(self):
        return -1.0


class NoReward:
    def reset(self, **row):
        pass


class NoReset:
    pass


class Untold:
    def reset(self):
        pass

    def act(self, what):
        pass


class Speaker:
    """A language model that says what it was given, and keeps what it was asked."""

    def __init__(self, *said):
        self.said, self.asked, self.tools = list(said), [], None

    async def chat(self, messages, *, tools, max_tokens):
        self.asked.append(json.loads(json.dumps(messages)))
        self.tools = tools
        calls = self.said.pop(0)
        text = calls if isinstance(calls, str) else ""
        named = () if isinstance(calls, str) else calls
        tool_calls = tuple(ToolCall(f"call{n}", name, json.dumps(args)) for n, (name, args) in enumerate(named))
        return Reply(text, Completion(finish_reason="stop"), tool_calls=tool_calls)


def play(llm, factory, row, **options):
    async def main():
        async def get_llm(name):
            return llm

        config = EnvironmentFactoryConfig(llm="policy", factory=factory, **options)
        return await (await anext(workflow(config, SimpleNamespace(get_llm=get_llm))))(row)

    return asyncio.run(main())


@pytest.fixture(autouse=True)
def findable(monkeypatch):
    """This module under its own name, whatever pytest imported it by."""
    monkeypatch.setitem(sys.modules, __name__, SimpleNamespace(**globals()))


ROW = {"prompt": [{"role": "user", "content": "Play."}], "content": "ball", "level": 3}


def test_an_episode_calls_tools_until_the_policy_answers_in_text():
    llm = Speaker([("put", {"thing": "cup"})], [("put", {"thing": "pen"}), ("look", {"place": 2})], "done")
    played = play(llm, f"{HERE}Box", dict(ROW))
    assert llm.asked[0] == [{"role": "user", "content": "Play. Box: ball"}]
    roles = ["user", "assistant", "tool", "assistant", "tool", "tool", "assistant"]
    assert [message["role"] for message in played["messages"]] == roles
    assert [message["content"] for message in played["messages"] if message["role"] == "tool"] == ["2", "3", "pen"]
    assert played["messages"][-1]["content"] == "done" and played["reward"] == 1.5
    assert {tool["function"]["name"] for tool in llm.tools} == {"put", "look"}
    assert ROW["prompt"] == [{"role": "user", "content": "Play."}]


def test_each_episode_has_an_object_of_its_own():
    before = Box.made
    llm = Speaker([("put", {"thing": "cup"})], "done", [("put", {"thing": "pen"})], "done")
    assert [play(llm, f"{HERE}Box", dict(ROW))["reward"] for _ in range(2)] == [1.0, 1.0]
    assert Box.made - before >= 2


def test_async_reset_and_reward_are_awaited():
    played = play(Speaker("done"), f"{HERE}AsyncBox", dict(ROW))
    assert played["reward"] == -1.0 and played["messages"][0]["content"] == "Play."


@pytest.mark.parametrize("call", [("drop", {}), ("look", {"place": 7}), ("put", {}), ("_hidden", {}), ("reset", {})])
def test_an_error_of_a_tool_is_told_to_the_policy(call):
    llm = Speaker([call], "sorry")
    play(llm, f"{HERE}Box", dict(ROW))
    assert list(json.loads(llm.asked[1][-1]["content"])) == ["error"]


def test_rounds_of_tools_are_limited():
    llm = Speaker(*[[("put", {"thing": "cup"})]] * 3)
    played = play(llm, f"{HERE}Box", dict(ROW), max_tool_calling_iterations=2)
    assert len(llm.asked) == 3 and played["reward"] == 1.5


def test_tools_that_the_template_cannot_take_are_refused_before_an_episode(make_policy, tokenizer):
    policy, plain = make_policy(), copy.deepcopy(tokenizer)
    plain.chat_template = "{{ messages[-1].content }}"
    policy.template = ChatTemplate(plain, policy.template.stop_ids)
    before = Box.made
    with pytest.raises(ToolsUnsupportedError, match="response_template"):
        play(ChatClient(policy), f"{HERE}Box", dict(ROW))
    assert Box.made - before == 1  # the one that tells its tools


def test_a_row_names_one_of_several_environments():
    factories = {"box": f"{HERE}Box", "async": f"{HERE}AsyncBox"}
    assert play(Speaker("done"), factories, {**ROW, "environment": "async"})["reward"] == -1.0
    with pytest.raises(ValueError, match=r"'boxx'.*'box'"):
        play(Speaker(), factories, {**ROW, "environment": "boxx"})


def test_a_class_without_a_reward_is_scored_by_others():
    assert play(Speaker("done"), f"{HERE}NoReward", {"prompt": "Play."})["reward"] is None
    item = EvalInputItem(id="a", full_dataset_entry={}, output_obj={"reward": None})
    score = asyncio.run(anext(reward(EnvironmentRewardConfig(), None)))
    with pytest.raises(ValueError, match="get_reward"):
        score(item)
    assert score(item.model_copy(update={"output_obj": {"reward": 1}})) == 1.0


@pytest.mark.parametrize(("kind", "told"), [(NoReset, r"NoReset.*reset"), (Untold, r"Untold.*docstring")])
def test_a_class_that_cannot_play_is_refused(kind, told):
    with pytest.raises(ConfigError, match=told):
        environment_kind(kind)


@pytest.mark.parametrize("path", ["no_such_module:Box", f"{HERE}Bx"])
def test_a_class_that_is_not_there_is_named(path):
    with pytest.raises(ConfigError, match=path.partition(":")[0]):
        find_factory(path)


def test_observations_other_than_text_are_refused():
    with pytest.raises(TypeError, match="list"):
        opening("Play.", [{"type": "image"}])


def test_the_class_of_the_example_is_that_of_the_page_and_plays_its_rows():
    folder = Path(__file__).parents[2] / "experiments" / "environments"
    spec = importlib.util.spec_from_file_location("counter_environment", folder / "counter_environment.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    page = (folder.parents[1] / "docs" / "environments.md").read_text()
    assert (folder / "counter_environment.py").read_text().partition("\n\n\n")[2] in page
    (tool,) = environment_kind(module.CounterEnvironment).tools
    assert tool["function"]["parameters"]["properties"]["step"]["type"] == "integer"
    row = json.loads(random.Random(0).choice((folder / "counter.jsonl").read_text().splitlines()))
    environment = module.CounterEnvironment()
    assert row["prompt"] + environment.reset(**row) == f"Count to {row['target']}."
    environment.increment(row["target"])
    assert environment.get_reward() == 1.0


@pytest.mark.slow
def test_the_example_trains(tmp_path):
    script = Path(__file__).parents[2] / "experiments" / "environments" / "environments.py"
    values = {"finetuning.num_epochs": 1, "finetuning.output_dir": tmp_path / "run", "llms.policy.slots": 16}
    values |= {"trainers.loop.examples_per_update": 4, "trainer_adapters.local.loss.entropy_coef": 0.01}
    options = [option for path, value in values.items() for option in ("--set", f"{path}={value}")]
    command = [sys.executable, str(script), "--example", "counter", "--warm-start-steps", "20", *options]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert {"reward_warm_start", "reward_after"} <= json.loads((tmp_path / "run" / "result.json").read_text()).keys()
