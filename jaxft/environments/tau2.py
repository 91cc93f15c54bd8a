"""Domains of tau2: its tasks as a dataset, and the workflow that plays a task with the policy as tau2's agent.

tau2 plays an episode as it does anywhere else: its orchestrator passes messages between agent, simulated user and the
tools of both, and its evaluator gives the reward. Its agent and its user ask the language models of the configuration.
"""

import json
import os
from collections.abc import AsyncIterator, Callable
from typing import Any

from jaxft import ConfigError, EvalInputItem
from jaxft.environments import Tau2DatasetConfig, Tau2WorkflowConfig, installed
from jaxft.environments.factory import check_tools
from jaxft.errors import one_line


async def dataset(config: Tau2DatasetConfig, builder: Any) -> AsyncIterator[list[EvalInputItem]]:
    """Yield the tasks of a domain.

    Raises:
        ConfigError: there is no such domain or split.
    """
    run = quiet_import("tau2.run")
    try:
        tasks = run.get_tasks(config.domain, config.split)
    except (KeyError, ValueError) as error:
        told = f"{one_line(error)}; domains: {', '.join(run.get_options().domains)}"
        raise ConfigError(f"tau2: domain '{config.domain}' and split '{config.split}': {told}") from error
    rows = [{"domain": config.domain, "task": task.model_dump(mode="json")} for task in tasks]
    yield [EvalInputItem(id=f"{config.domain}-{row['task']['id']}", full_dataset_entry=row) for row in rows]


async def workflow(config: Tau2WorkflowConfig, builder: Any) -> AsyncIterator[Callable[[dict[str, Any]], Any]]:
    """Yield the workflow: an episode of a task. It returns tau2's reward, the reason of its end, and its checks."""
    agent, user = await builder.get_llm(config.llm), await builder.get_llm(config.user)
    await check_tools(agent)
    run, utils = quiet_import("tau2.run"), quiet_import("tau2.utils.llm_utils")

    def generate(model: Any, messages: Any, tools: Any = None, **arguments: Any) -> Any:
        """Ask a language model of the configuration in the place of litellm."""
        schemas = [tool.openai_schema for tool in tools or ()]
        reply = model.chat_sync(utils.to_litellm_messages(messages), tools=schemas, **arguments)
        made = [
            {"id": call.id, "name": call.name, "arguments": json.loads(call.arguments)} for call in reply.tool_calls
        ]
        return utils.AssistantMessage(role="assistant", content=reply.content or None, tool_calls=made or None)

    for module in ("tau2.agent.llm_agent", "tau2.user.user_simulator"):
        quiet_import(module).generate = generate
    limit = {"max_tokens": config.max_tokens}
    policy = {"agent": "llm_agent", "llm_agent": agent, "llm_args_agent": limit}
    customer = {"user": "user_simulator", "llm_user": user, "llm_args_user": {"temperature": 0.0, **limit}}

    def play(row: dict[str, Any]) -> dict[str, Any]:
        task = run.Task.model_validate(row["task"])
        played = run.run_task(domain=row["domain"], task=task, **policy, **customer, max_steps=config.max_steps)
        checks = played.reward_info.model_dump(mode="json", exclude_none=True)
        return {"reward": checks["reward"], "stop": played.termination_reason.value, "checks": checks}

    yield play


def quiet_import(name: str) -> Any:
    """Return a module of tau2, without its log, and without a download by litellm, which it imports."""
    os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")
    package = installed("tau2", "tau2")  # first, so that an error names it
    installed("loguru", "tau2").logger.disable(package.__name__)
    return installed(name, "tau2")
