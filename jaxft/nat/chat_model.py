"""LangChain's chat model of a live policy, in this process: it calls the policy without HTTP and without threads."""

import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import fields
from typing import Any

from langchain_core.callbacks import AsyncCallbackManagerForLLMRun, CallbackManagerForLLMRun
from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage, BaseMessage, convert_to_openai_messages
from langchain_core.outputs import ChatGeneration, ChatResult
from langchain_core.runnables import Runnable
from langchain_core.utils.function_calling import convert_to_openai_tool
from pydantic import Field

from jaxft import ChatClient, ChatRequest, Episode, Reply, named_function
from jaxft.errors import PolicyError
from jaxft.nat.live import find_or_begin_episode, function_path, live_policy
from jaxft.rollout import find_episode, logprobs_with_record, openai_logprobs, recording

ARGUMENTS = {each.name for each in fields(ChatRequest)} | {"max_completion_tokens"}
ARGUMENTS -= {"messages", "n", "stop", "include_stop", "top_logprobs"}
"""Arguments that a call, or `bind`, may give; they are those of `ChatClient.chat`."""


class Logprobs(dict[str, Any]):
    """Log-probabilities of an answer, which nobody changes.

    The toolkit copies the whole history at every call; a deep copy of this dict is the dict itself.
    """

    def __deepcopy__(self, memo: dict[int, Any]) -> "Logprobs":
        return self


class PolicyChatModel(BaseChatModel):
    """A chat model whose answers a live policy samples. A stream of it has one chunk.

    Attributes:
        model_name: name of the policy.
        find_policy: returns the policy, made if none is live.
        defaults: arguments of calls that do not give them.
    """

    model_name: str
    find_policy: Callable[[], Awaitable[Any]] = Field(exclude=True)
    defaults: dict[str, Any] = Field(default={})

    @property
    def _llm_type(self) -> str:
        return "jaxft"

    @property
    def _identifying_params(self) -> dict[str, Any]:
        return {"model_name": self.model_name, **self.defaults}

    def bind_tools(
        self,
        tools: Sequence[Any],
        *,
        tool_choice: str | bool | dict[str, Any] | None = None,
        strict: bool | None = None,
        **kwargs: Any,
    ) -> Runnable[Any, AIMessage]:
        """Return the model with tools, as LangChain's other chat models do."""
        schemas = [convert_to_openai_tool(tool, strict=strict) for tool in tools]
        given = {**kwargs, "tools": schemas}
        choice = _tool_choice(tool_choice, [schema["function"]["name"] for schema in schemas])
        return self.bind(**(given if choice is None else {**given, "tool_choice": choice}))

    async def _agenerate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        llm: ChatClient = await self.find_policy()
        with _in_episode() as episode:
            reply = await llm.chat(_openai_messages(messages), stop=stop, **self._arguments(kwargs))
        return self._result(reply, episode, llm)

    def _generate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        llm = live_policy(self.model_name)
        if llm is None:
            raise RuntimeError(f"the policy '{self.model_name}' is not live yet: make its first call with ainvoke")
        with _in_episode() as episode:
            reply = llm.chat_sync(_openai_messages(messages), stop=stop, **self._arguments(kwargs))
        return self._result(reply, episode, llm)

    def _arguments(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Return the arguments of `ChatClient.chat` for those of a call.

        Raises:
            TypeError: there is no such argument.
        """
        unknown = [name for name in given if name not in ARGUMENTS]
        if unknown:
            raise TypeError(f"the policy '{self.model_name}' takes no {', '.join(unknown)}")
        arguments = self.defaults | dict(given)
        names = [tool["function"]["name"] for tool in arguments.get("tools") or ()]
        return arguments | {"tool_choice": _tool_choice(arguments.get("tool_choice"), names)}

    def _result(self, reply: Reply, episode: Episode | None, llm: ChatClient) -> ChatResult:
        usage = {"input_tokens": len(reply.prompt_ids), "output_tokens": len(reply.token_ids)}
        text_of_token = llm.token_text
        if episode is None:
            logprobs = openai_logprobs(reply.token_ids, reply.logprobs, text_of_token)
        else:
            call = next(call for call in reversed(episode.calls) if call.index == reply.call_index)
            logprobs = logprobs_with_record(call, text_of_token)
        metadata = {"model_name": self.model_name, "finish_reason": reply.finish_reason, "logprobs": Logprobs(logprobs)}
        message = AIMessage(
            content=reply.content,
            additional_kwargs={} if reply.reasoning_content is None else {"reasoning_content": reply.reasoning_content},
            tool_calls=[
                {"name": call.name, "args": json.loads(call.arguments), "id": call.id, "type": "tool_call"}
                for call in reply.tool_calls
            ],
            usage_metadata={**usage, "total_tokens": sum(usage.values())},
            response_metadata=metadata,
        )
        return ChatResult(
            generations=[ChatGeneration(message=message, generation_info={"finish_reason": reply.finish_reason})],
            llm_output={"model_name": self.model_name},
        )


@contextmanager
def _in_episode() -> Any:
    """Run the block in the present episode, under the names of the toolkit's functions."""
    episode = find_or_begin_episode()
    with ExitStack() as stack:
        if episode is not find_episode():
            stack.enter_context(recording(episode))
        for name in function_path():
            stack.enter_context(named_function(name))
        try:
            yield episode
        except PolicyError as error:  # an agent may take it for the failure of a tool
            if episode is not None:
                episode.policy_error = error
            raise


def _openai_messages(messages: Sequence[BaseMessage]) -> list[dict[str, Any]]:
    converted = convert_to_openai_messages(list(messages))
    return converted if isinstance(converted, list) else [converted]


def _tool_choice(choice: Any, names: Sequence[str]) -> Any:
    """Return OpenAI's `tool_choice` for one of LangChain's, which may also be `any`, a bool or a tool's name."""
    if choice in ("any", True):
        return "required"
    if choice is False:
        return "none"
    return {"type": "function", "function": {"name": choice}} if choice in names else choice
