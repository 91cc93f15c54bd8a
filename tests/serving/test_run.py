"""Runs whose agents ask through clients of openai: the same numbers as by `llm.chat`, bit for bit."""

import asyncio
import io
from typing import Any

import openai
import pytest

import jaxft
from jaxft.errors import PolicyError
from jaxft.runs.console import Console

pytestmark = pytest.mark.usefixtures("no_sockets")


class AskingConfig(jaxft.WorkflowConfig, name="serving_asking"):
    llm: jaxft.LLMRef
    how: str


@jaxft.register_workflow(config_type=AskingConfig)
async def asking(config: AskingConfig, builder: Any) -> Any:
    """Two turns, each asked for in the way that `how` says."""
    llm = await builder.get_llm(config.llm)
    client = await builder.get_llm(config.llm, wrapper_type="openai")
    sync_client = await builder.get_llm(config.llm, wrapper_type="openai_sync")

    async def by_chat(messages: list) -> str:
        return (await llm.chat(messages, max_tokens=5)).content

    async def by_client(messages: list) -> str:
        completion = await client.chat.completions.create(model=config.llm, messages=messages, max_tokens=5)
        return completion.choices[0].message.content

    async def by_stream(messages: list) -> str:
        chunks = await client.chat.completions.create(model=config.llm, messages=messages, max_tokens=5, stream=True)
        return "".join([chunk.choices[0].delta.content or "" async for chunk in chunks])

    def ask(messages: list, client: openai.OpenAI = sync_client) -> str:
        completion = client.chat.completions.create(model=config.llm, messages=messages, max_tokens=5)
        return completion.choices[0].message.content

    async def by_thread(messages: list) -> str:
        """A thread that takes no context along, as one of an executor does."""
        keyed = sync_client.with_options(api_key=jaxft.episode().api_key)
        return await asyncio.get_running_loop().run_in_executor(None, ask, messages, keyed)

    async def by_lost_policy(messages: list) -> str:
        def fail(params: Any) -> Any:
            raise ZeroDivisionError("in an update")

        with pytest.raises(ZeroDivisionError):
            await llm.policy.update(fail)
        return await by_client(messages)

    ways = {
        "chat": by_chat,
        "client": by_client,
        "stream": by_stream,
        "thread": by_thread,
        "lost": by_lost_policy,
    }

    async def play(example: dict) -> float:
        messages = [{"role": "user", "content": example["question"]}]
        said = await ways[config.how](messages)
        messages += [{"role": "assistant", "content": said}, {"role": "user", "content": "again"}]
        return float(len(said) + len(await ways[config.how](messages)))

    def play_sync(example: dict) -> float:
        messages = [{"role": "user", "content": example["question"]}]
        said = ask(messages)
        messages += [{"role": "assistant", "content": said}, {"role": "user", "content": "again"}]
        return float(len(said) + len(ask(messages)))

    yield play_sync if config.how == "sync" else play


class SizeConfig(jaxft.EvaluatorConfig, name="serving_size"):
    pass


@jaxft.register_evaluator(config_type=SizeConfig)
async def size(config: SizeConfig, builder: Any) -> Any:
    yield lambda item: item.output_obj % 4


class QuestionsConfig(jaxft.DatasetConfig, name="serving_questions"):
    pass


@jaxft.register_dataset_loader(config_type=QuestionsConfig)
async def questions(config: QuestionsConfig, builder: Any) -> Any:
    yield [jaxft.EvalInputItem(id=text, full_dataset_entry={"question": text}) for text in ("a?", "bb?")]


def train(folder, how):
    """The deterministic files of a run of one epoch."""
    mapping = {
        "llms": {"policy": {"_type": "local_policy", "preset": "qwen3-50k", "slots": 8, "max_context_tokens": 96}},
        "workflow": {"_type": "serving_asking", "llm": "policy", "how": how},
        "eval": {
            "general": {"max_concurrency": 4, "dataset": {"_type": "serving_questions"}},
            "evaluators": {"size": {"_type": "serving_size"}},
        },
        "trajectory_builders": {"rollouts": {"_type": "grpo_trajectory_builder", "num_generations": 4}},
        "trainer_adapters": {"local": {"_type": "local_trainer_adapter", "llm": "policy"}},
        "trainers": {"loop": {"_type": "grpo_trainer", "show_episodes_every": 1}},
        "finetuning": {
            "enabled": True,
            "trainer": "loop",
            "trajectory_builder": "rollouts",
            "trainer_adapter": "local",
            "reward_function": {"name": "size"},
            "num_epochs": 1,
            "output_dir": str(folder),
        },
    }

    async def main():
        config = jaxft.config_from_mapping(mapping, base_dir=folder.parent)
        async with jaxft.open_session(config, console=Console(io.StringIO())) as session:
            await session.train()

    asyncio.run(main())
    paths = [folder / "training_metrics.jsonl", *sorted((folder / "trajectories").iterdir())]
    return {path.name: path.read_bytes() for path in paths}


@pytest.fixture(scope="module")
def by_chat(tmp_path_factory):
    return train(tmp_path_factory.mktemp("serving") / "chat", "chat")


@pytest.mark.slow
@pytest.mark.parametrize("how", ["client", "stream", "sync", "thread"])
def test_a_run_is_the_same_however_its_agent_asks(tmp_path, by_chat, how):
    assert train(tmp_path / how, how) == by_chat


def test_a_lost_policy_ends_the_run_though_the_agent_sees_a_server_error(tmp_path):
    with pytest.raises(PolicyError, match="in an update"):
        train(tmp_path / "run", "lost")
