"""Environments of verifiers v1: its taskset as a dataset, its episodes as the workflow, its rubric as the evaluator.

An environment plays its episodes as it does anywhere else: verifiers sets the task up, records the conversation in a
trace, and scores the trace. The seat of the policy is played by `chat_harness`, a loop in this process that answers
with the policy and calls the tools of the task. verifiers' interception server, which keeps the trace, catches each
call of a model. Its client is `policy_client`, which calls the policy in this process, in the episode of the trace.
"""

import contextlib
import json
import sys
import types
import weakref
from collections.abc import AsyncIterator, Callable, Iterator
from importlib.machinery import ModuleSpec
from typing import Any

from jaxft import ChatClient, ComponentError, ConfigError, DatasetError, Episode, EvalInputItem, EvalOutputItem, episode
from jaxft.environments import VerifiersDatasetConfig, VerifiersRewardConfig, VerifiersWorkflowConfig, installed
from jaxft.errors import one_line
from jaxft.plugins import plugin
from jaxft.rollout import ENDPOINT, async_transport

HARNESS = "jaxft"
"""Id, for verifiers, of the harness that plays in this process."""


async def dataset(config: VerifiersDatasetConfig, builder: Any) -> AsyncIterator[list[EvalInputItem]]:
    """Yield the tasks of a taskset."""
    vf = installed("verifiers.v1")
    name = _taskset_id(config.taskset)
    with _set_up(f"taskset '{name}'"):
        taskset = _load_taskset(config.taskset)
        selected = taskset.select(vf.SelectConfig.model_validate(config.select))
        if not selected.bounded:
            raise DatasetError(f"taskset '{name}' never ends: set select, as in `select: {{limit: 100}}`")
        tasks = [task.data for task in selected]
    yield [
        EvalInputItem(
            id=f"{name}-{data.idx}",
            input_obj=data.prompt_text,
            full_dataset_entry={"task": data.model_dump(mode="json")},
        )
        for data in tasks
    ]


async def workflow(config: VerifiersWorkflowConfig, builder: Any) -> AsyncIterator[Callable[[dict[str, Any]], Any]]:
    """Yield the workflow, which plays an episode of the environment and returns its reply, rewards and metrics."""
    vf = installed("verifiers.v1")
    general = builder.config.eval.general.dataset
    tasks = config.env.get("taskset") or (general.taskset if isinstance(general, VerifiersDatasetConfig) else {})
    name = _taskset_id(tasks)
    llm = await builder.get_llm(config.llm)
    async with contextlib.AsyncExitStack() as stack:
        with _set_up(f"environment '{config.env.get('id') or name}'"):
            loaders = installed("verifiers.v1.utils.loaders")
            # A request that is repeated, after a lost connection, gets the reply that verifiers has for it already.
            client = installed("openai").AsyncOpenAI(base_url=ENDPOINT, api_key="none", timeout=None, max_retries=2)
            add_harness(vf, await stack.enter_async_context(client))
            if (served := config.env.get("interception", {}).get("type", "server")) != "server":
                raise ConfigError(f"workflow.env.interception.type: '{served}'; the policy answers at one: server")
            server = {"type": "server", **config.env.get("interception", {})}
            given, seat = with_policy_seat(vf, loaders, {**config.env, "taskset": tasks, "interception": server})
            env = loaders.load_environment(loaders.resolve_env_config(given))
            await stack.enter_async_context(env.serving())
            episodes: weakref.WeakValueDictionary[str, Episode] = weakref.WeakValueDictionary()
            endpoint = vf.EvalClientConfig(base_url=ENDPOINT, api_key_var="JAXFT_NO_KEY")
            policy = policy_client(llm, episodes, installed("verifiers.v1.clients").EvalClient(endpoint))
            stack.push_async_callback(policy.close)
            # The server has a client for each endpoint; the policy's is there before one that connects is made.
            env._interception.clients[endpoint.model_dump_json()] = policy
        task_type = type(env.taskset).task_type()
        context = vf.ModelContext(
            model=llm.name,
            client=endpoint,
            sampling=installed("verifiers.v1.types").SamplingConfig(max_tokens=config.max_tokens),
        )

        async def play(row: dict[str, Any]) -> dict[str, Any]:
            task = task_type(task_type.data_type().model_validate(row["task"]), env.taskset.config.task)
            current = episode()
            played = await env.run_episode(
                task, context, on_trace=lambda trace: episodes.__setitem__(trace.id, current)
            )
            if not played.ok:
                raise EpisodeFailed(_report(played))
            traces = [trace for trace in played.traces if trace.agent.name in (seat, None)]
            if len(traces) != 1:
                raise EpisodeFailed(f"'{seat}' played {len(traces)} times: one reward wants one conversation")
            (trace,) = traces
            return {
                "reply": trace.last_reply,
                "rewards": {name: None if reward is None else reward.value for name, reward in trace.rewards.items()},
                "metrics": dict(trace.metrics),
                "stop": trace.stop_condition,
            }

        yield play


async def reward(
    config: VerifiersRewardConfig, builder: Any
) -> AsyncIterator[Callable[[EvalInputItem], EvalOutputItem]]:
    """Yield the evaluator, which gives the rewards that the environment recorded, and its metrics as reasoning."""

    def score(item: EvalInputItem) -> EvalOutputItem:
        rewards = item.output_obj["rewards"]
        is_scored = None not in rewards.values()
        return EvalOutputItem(
            id=item.id,
            score=sum(rewards.values()) if is_scored else None,
            named_scores=rewards if rewards and is_scored else None,
            reasoning={"metrics": item.output_obj["metrics"], "stop": item.output_obj["stop"]},
        )

    yield score


def _load_taskset(taskset: dict[str, Any]) -> Any:
    loaders = installed("verifiers.v1.utils.loaders")
    return loaders.load_taskset(loaders.taskset_config_type(taskset["id"]).model_validate(taskset))


class EpisodeFailed(RuntimeError):
    """An episode that verifiers could not finish; the message has verifiers' own error and its traceback."""


def with_policy_seat(vf: Any, loaders: Any, env: dict[str, Any]) -> tuple[dict[str, Any], str]:
    """Return the configuration of an environment with the policy in its seat, and the name of that seat.

    A seat that pins no harness, or verifiers' chat loop `null`, is played by `chat_harness`. A seat that pins a client
    is played by that client's model.

    Raises:
        ConfigError: the policy would have several seats, or none.
    """
    taskset = env["taskset"]["id"]
    own = loaders.default_harness_id(taskset)
    fields = loaders.env_config_type(taskset, env.get("id", "")).model_fields
    defaults = {name: field.default for name, field in fields.items() if isinstance(field.default, vf.AgentConfig)}
    seats = {
        name: {**default.model_dump(exclude_unset=True), **env.get(name, {})} for name, default in defaults.items()
    }
    for seat in seats.values():
        harness = (seat.get("harness") or {}).get("id", own)
        if harness in ("null", HARNESS) or (harness == own == "bash" and "harness" not in seat):
            seat["harness"] = {"id": HARNESS}
        program = loaders.harness_class((seat.get("harness") or {}).get("id", own))
        if not program.NEEDS_CONTAINER and not program.EXECUTES_CODE:  # else verifiers' default holds, a remote sandbox
            seat.setdefault("runtime", {"type": "subprocess"})
    played = [name for name, seat in seats.items() if not seat.get("client")]
    if len(played) != 1:
        raise ConfigError(
            f"workflow.env: the policy would play {len(played)} of the seats {', '.join(seats)}; it learns one, by "
            "one reward: give each other seat a client and a model, as in `env: {user: {model: NAME, client: "
            "{base_url: URL}}}`"
        )
    return {**env, **seats}, played[0]


def policy_client(llm: ChatClient, episodes: "weakref.WeakValueDictionary[str, Episode]", client: Any) -> Any:
    """Return a client of verifiers that calls a language model of this process, without a connection.

    verifiers names in each request the trace that it belongs to. A request that names none of `episodes` is refused.

    Args:
        llm: the policy.
        episodes: the episode of each trace that is being played.
        client: an `EvalClient` of verifiers, whose connections are replaced.
    """
    httpx, make_app = installed("httpx"), plugin("jaxft.endpoint", "app")

    async def name_episode(request: Any) -> None:
        current = episodes.get(request.headers.get("X-Session-ID", ""))
        if current is None:
            raise httpx.RequestError("this request belongs to no episode", request=request)
        request.url = httpx.URL(f"{current.base_url}{request.url.path.removeprefix('/v1')}")

    transport = async_transport(httpx, make_app({llm.name: llm}))
    client.client = httpx.AsyncClient(transport=transport, timeout=None, event_hooks={"request": [name_episode]})
    return client


def add_harness(vf: Any, client: Any) -> None:
    """Make the harness `jaxft` known to verifiers, which looks for harnesses by the names of modules."""
    name = f"verifiers.v1.harnesses.{HARNESS}"
    module = types.ModuleType(name)
    module.__spec__ = ModuleSpec(name, None)
    module.ChatHarness, module.__all__ = chat_harness(vf, client), ["ChatHarness"]  # type: ignore[attr-defined]
    sys.modules[name] = module


def chat_harness(vf: Any, client: Any) -> type:
    """Return the harness that plays in this process: it asks the model, calls tools, and ends with the first text.

    Args:
        vf: the module `verifiers.v1`.
        client: an `openai.AsyncOpenAI` client, of which address and key are replaced.
    """
    chat, mcp = installed("verifiers.v1.dialects.chat"), installed("verifiers.v1.harnesses.utils.mcp")
    openai = installed("openai")

    class ChatHarness(vf.Harness[vf.HarnessConfig]):
        APPENDS_SYSTEM_PROMPT = True
        SUPPORTS_MCP = True
        SUPPORTS_RESUME = True
        EXECUTES_CODE = False
        NEEDS_CONTAINER = False

        async def launch(
            self, ctx: Any, trace: Any, runtime: Any, endpoint: str, secret: str, mcp_urls: dict[str, str], data: Any
        ) -> Any:
            """Play until the model answers in text, or the task stops the episode."""
            system, prompt = self.resolve_prompt(data)
            messages = [{"role": "system", "content": system}] if system else []
            if isinstance(prompt, str):
                messages.append({"role": "user", "content": prompt})
            else:
                messages += [chat.message_to_wire(message) for message in prompt]
            model = client.with_options(base_url=endpoint, api_key=secret)
            async with contextlib.AsyncExitStack() as stack:
                urls = {"mcpServers": {name: {"url": url} for name, url in mcp_urls.items()}}
                tools, dispatch, servers = await mcp.connect_mcp(urls, stack)

                async def tool_result(call: Any) -> Any:
                    try:
                        arguments = json.loads(call.function.arguments)
                    except ValueError as error:
                        return f"error: the arguments are no JSON: {error}"
                    if call.function.name not in dispatch:
                        return f"error: there is no tool {call.function.name!r}"
                    return await mcp.call_mcp(servers, dispatch, call.function.name, arguments)

                while True:
                    try:
                        completion = await model.chat.completions.create(
                            model=ctx.model, messages=messages, tools=tools or openai.omit
                        )
                    except openai.APIStatusError:
                        if trace.stop_condition is None:
                            raise
                        break  # the task, or a limit of turns or tokens, refused another turn
                    message = completion.choices[0].message
                    messages.append(message)
                    if not message.tool_calls:
                        break
                    for call in message.tool_calls:
                        messages.append({"role": "tool", "tool_call_id": call.id, "content": await tool_result(call)})
            return vf.ProgramResult(exit_code=0, stdout="", stderr="")

    return ChatHarness


@contextlib.contextmanager
def _set_up(what: str) -> Iterator[None]:
    """Raise an error of the environment's own code as a ComponentError that tells all its causes."""
    try:
        yield
    except (ComponentError, ConfigError, DatasetError):
        raise
    except Exception as error:
        raise ComponentError(f"verifiers: {what} cannot be set up: {_with_causes(error)}") from error


def _with_causes(error: BaseException) -> str:
    """Return an error and those that caused it, the last cause at the end."""
    if isinstance(error, BaseExceptionGroup):
        return "; ".join(_with_causes(each) for each in error.exceptions)
    cause = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    return one_line(error) if cause is None else f"{one_line(error)}; caused by {_with_causes(cause)}"


def _report(played: Any) -> str:
    """Return the errors of an episode that failed, each with verifiers' traceback if it has one."""
    errors = [*played.errors, *(error for trace in played.traces for error in trace.errors)]
    return "\n".join(f"{error.type}: {error.message}\n{error.traceback or ''}".rstrip() for error in errors)


def _taskset_id(taskset: dict[str, Any]) -> str:
    if not isinstance(taskset.get("id"), str):
        raise ConfigError(
            "verifiers: the taskset has no id: name it in the dataset, as in `taskset: {id: reverse-text}`"
        )
    return taskset["id"]
