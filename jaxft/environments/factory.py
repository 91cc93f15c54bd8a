"""Environments in the form of TRL's `environment_factory`: a class whose public methods are tools. TRL is not needed.

An object of the class plays one episode. `reset(**row)` prepares it and may return a text, which is added to the last
message of the row's `prompt`. The policy then calls the tools until it answers without a call. `get_reward()` gives the
reward. All of them may be async; a plain one runs in a thread, so that it does not hold up other episodes.
"""

import asyncio
import inspect
import json
import pkgutil
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any, NamedTuple

from transformers.utils import get_json_schema

from jaxft import ChatRequest, ConfigError, EvalInputItem, LanguageModel, ToolCall
from jaxft.environments import EnvironmentFactoryConfig, EnvironmentRewardConfig
from jaxft.errors import did_you_mean, one_line

NOT_TOOLS = ("reset", "get_reward")
"""Public methods that the policy does not call."""

ANY_TOOLS = [{"type": "function", "function": {"name": "wait", "parameters": {"type": "object", "properties": {}}}}]
"""A tool in the place of those that are not known before an episode."""


async def workflow(config: EnvironmentFactoryConfig, builder: Any) -> AsyncIterator[Callable[[dict[str, Any]], Any]]:
    """Yield the workflow: an episode in a new environment. It returns messages and reward.

    Raises:
        ToolsUnsupportedError: the chat template of the policy takes no tools.
    """
    llm = await builder.get_llm(config.llm)
    named = config.factory if isinstance(config.factory, dict) else {"": config.factory}
    kinds = {name: environment_kind(find_factory(path)) for name, path in named.items()}
    for kind in kinds.values():
        await check_tools(llm, kind.tools)

    async def play(row: dict[str, Any]) -> dict[str, Any]:
        name = "" if isinstance(config.factory, str) else row.pop("environment", None)
        if name not in kinds:
            raise ValueError(f"the row's environment is {name!r}{did_you_mean(str(name), kinds, what='there are')}")
        make, tools, has_reward = kinds[name]
        environment = make()
        messages = opening(row.get("prompt", ""), await _call_safely(environment.reset, **row))
        rounds = 0
        while True:
            reply = await llm.chat(messages, tools=tools, max_tokens=config.max_tokens)
            messages.append(reply.message)
            if not reply.tool_calls or rounds == config.max_tool_calling_iterations:
                break
            rounds += 1
            for call in reply.tool_calls:  # in order, as each may change the environment for the next
                result = await tool_result(call, environment, tools)
                messages.append({"role": "tool", "tool_call_id": call.id, "name": call.name, "content": result})
        return {"messages": messages, "reward": await _call_safely(environment.get_reward) if has_reward else None}

    yield play


async def reward(config: EnvironmentRewardConfig, builder: Any) -> AsyncIterator[Callable[[EvalInputItem], float]]:
    """Yield the evaluator, which gives the reward of the environment.

    Raises:
        ValueError: the environment has no `get_reward`.
    """

    def score(item: EvalInputItem) -> float:
        if item.output_obj["reward"] is None:
            raise ValueError("the environment has no reward: give its class a method get_reward, or score otherwise")
        return float(item.output_obj["reward"])

    yield score


async def check_tools(llm: Any, tools: Sequence[dict[str, Any]] = ANY_TOOLS) -> None:
    """Raise a ToolsUnsupportedError now, not in the first episode, if a template of this process takes no tools."""
    if isinstance(llm, LanguageModel):
        await llm.count_tokens(ChatRequest([{"role": "user", "content": "?"}], tools=tools))


def find_factory(path: str) -> Callable[[], Any]:
    """Return the class or function `module:name`.

    Raises:
        ConfigError: there is no such object.
    """
    try:
        return pkgutil.resolve_name(path)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(
            f"workflow.factory: '{path}' cannot be found ({one_line(error)}): write module:Class"
        ) from error


class EnvironmentKind(NamedTuple):
    """A class of environments: its maker, its tools in OpenAI's format, and whether it gives a reward."""

    make: Callable[[], Any]
    tools: list[dict[str, Any]]
    has_reward: bool


def environment_kind(make: Callable[[], Any]) -> EnvironmentKind:
    """Return what an environment's class offers: its public methods are tools, with their types and docstrings.

    Raises:
        ConfigError: there is no method `reset`, or a tool lacks a type or a description.
    """
    environment = make()
    kind = type(environment)
    methods = [name for name, _ in inspect.getmembers(kind, inspect.isfunction) if not name.startswith("_")]
    if "reset" not in methods:
        raise ConfigError(f"workflow.factory: {kind.__name__} has no method reset, which each episode begins with")
    try:
        tools = [get_json_schema(getattr(environment, name)) for name in methods if name not in NOT_TOOLS]
    except Exception as error:
        wanted = "a tool needs a type for each argument and a docstring in Google style that describes each"
        raise ConfigError(f"workflow.factory: {kind.__name__}: {one_line(error)}: {wanted}") from error
    return EnvironmentKind(make, tools, "get_reward" in methods)


def opening(prompt: Any, observation: Any) -> list[dict[str, Any]]:
    """Return the first messages of an episode: the prompt, with the observation of `reset` at its end.

    >>> opening([{"role": "user", "content": "Play. "}], "Board: 1 2 3")
    [{'role': 'user', 'content': 'Play. Board: 1 2 3'}]

    Raises:
        TypeError: the observation is no text, as that of an environment with images.
    """
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else [*prompt]
    if observation is None:
        return messages
    if not isinstance(observation, str):
        raise TypeError(f"reset returned {type(observation).__name__}; the policy reads text: return a str or None")
    return [*messages[:-1], {**messages[-1], "content": messages[-1]["content"] + observation}]


async def tool_result(call: ToolCall, environment: Any, tools: Sequence[dict[str, Any]]) -> str:
    """Return the result of a call as the policy reads it; an error is told as `{"error": ...}`."""
    try:
        if call.name not in [tool["function"]["name"] for tool in tools]:
            raise ValueError(f"there is no tool {call.name}")
        return str(await _call_safely(getattr(environment, call.name), **json.loads(call.arguments)))
    except Exception as error:
        return json.dumps({"error": str(error)})


async def _call_safely(function: Callable[..., Any], **arguments: Any) -> Any:
    if inspect.iscoroutinefunction(function):
        return await function(**arguments)
    return await asyncio.to_thread(function, **arguments)
