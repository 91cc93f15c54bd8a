"""The steps of an episode as the toolkit has them, for builders and evaluators that read `EvalInputItem.trajectory`.

Names and fields are the toolkit's. The steps are made from the recorded calls of the policy: of calls of remote models,
and of the time that a step took, there are none.
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from enum import StrEnum
from typing import Any, overload

from pydantic import BaseModel, ConfigDict, SerializeAsAny, field_validator

from jaxft.rollout.calls import Call, logprobs_with_record
from jaxft.rollout.messages import canonical_messages, comparison_key, readable_text
from jaxft.rollout.recorder import WORKFLOW, Episode


class IntermediateStepCategory(StrEnum):
    """Kind of a step."""

    LLM = "LLM"
    TOOL = "TOOL"
    WORKFLOW = "WORKFLOW"
    TASK = "TASK"
    FUNCTION = "FUNCTION"
    CUSTOM = "CUSTOM"
    SPAN = "SPAN"
    TTC = "TTC"


class IntermediateStepState(StrEnum):
    """Part of what a step reports: its start, a piece of it, or its end."""

    START = "START"
    CHUNK = "CHUNK"
    END = "END"


class IntermediateStepType(StrEnum):
    """Kind and state of a step; episodes have WORKFLOW_START, LLM_START, LLM_END, TOOL_END, TTC_END, WORKFLOW_END."""

    LLM_START = "LLM_START"
    LLM_END = "LLM_END"
    LLM_NEW_TOKEN = "LLM_NEW_TOKEN"
    TOOL_START = "TOOL_START"
    TOOL_END = "TOOL_END"
    WORKFLOW_START = "WORKFLOW_START"
    WORKFLOW_END = "WORKFLOW_END"
    TASK_START = "TASK_START"
    TASK_END = "TASK_END"
    TTC_START = "TTC_START"
    TTC_END = "TTC_END"
    FUNCTION_START = "FUNCTION_START"
    FUNCTION_END = "FUNCTION_END"
    CUSTOM_START = "CUSTOM_START"
    CUSTOM_END = "CUSTOM_END"
    SPAN_START = "SPAN_START"
    SPAN_CHUNK = "SPAN_CHUNK"
    SPAN_END = "SPAN_END"


class StreamEventData(BaseModel):
    """Input and output of a step.

    A call of a language model has its messages as `input`, the text of the answer as `output`, and as `payload` the
    answer as a message of OpenAI's API with `logprobs`, which record the call (`jaxft.rollout.calls`).
    """

    model_config = ConfigDict(extra="allow")

    input: Any = None
    output: Any = None
    chunk: Any = None
    payload: Any = None


class TTCEventData(StreamEventData):
    """One candidate of `Episode.record_candidates`: `input` is the prompt's messages, `output` the answer's text."""

    turn_id: str | None = None
    turn_index: int | None = None
    candidate_index: int | None = None
    score: float | None = None


class InvocationNode(BaseModel):
    """The function that a step was made in (`jaxft.named_function`), and the one around it."""

    function_id: str
    function_name: str
    parent_id: str | None = None
    parent_name: str | None = None


class IntermediateStepPayload(BaseModel):
    """Content of a step; `name` is that of the language model, of the tool or, for candidates, of the function."""

    model_config = ConfigDict(extra="allow")

    event_type: IntermediateStepType
    name: str | None = None
    metadata: dict[str, Any] | None = None
    data: SerializeAsAny[StreamEventData] | None = None
    UUID: str = ""

    @field_validator("data", mode="before")
    @classmethod
    def _has_its_class(cls, given: Any) -> Any:
        return TTCEventData(**given) if isinstance(given, dict) and "candidate_index" in given else given


class IntermediateStep(BaseModel):
    """One step of an episode.

    >>> payload = IntermediateStepPayload(event_type="LLM_NEW_TOKEN", name="policy")
    >>> ancestry = InvocationNode(function_id="1", function_name="planner")
    >>> step = IntermediateStep(parent_id="root", function_ancestry=ancestry, payload=payload)
    >>> step.name, step.event_category.value, step.event_state.value
    ('policy', 'LLM', 'CHUNK')
    """

    model_config = ConfigDict(extra="forbid")

    parent_id: str
    function_ancestry: InvocationNode
    payload: IntermediateStepPayload

    @property
    def event_type(self) -> IntermediateStepType:
        """Kind and state of the step."""
        return self.payload.event_type

    @property
    def event_category(self) -> IntermediateStepCategory:
        """Kind of the step."""
        return IntermediateStepCategory(self.event_type.partition("_")[0])

    @property
    def event_state(self) -> IntermediateStepState:
        """Part of what the step reports."""
        state = self.event_type.rpartition("_")[2]
        return IntermediateStepState("CHUNK" if state == "TOKEN" else state)

    @property
    def name(self) -> str | None:
        """Name of the language model, of the tool or, for candidates, of the function."""
        return self.payload.name

    @property
    def metadata(self) -> dict[str, Any] | None:
        """`tool_call_id` of a tool's result, and whatever else the step carries."""
        return self.payload.metadata

    @property
    def data(self) -> StreamEventData | None:
        """Input and output."""
        return self.payload.data

    @property
    def UUID(self) -> str:
        """Name of the call: its start and its end have the same, and so has a repeated run."""
        return self.payload.UUID


class EpisodeSteps(Sequence[IntermediateStep]):
    """The steps of an episode, made when they are first read: most trajectories are built without them."""

    def __init__(self, episode: Episode, output: Any) -> None:
        """Take the record of an episode that has ended, and the output of its workflow; None if it failed."""
        self._episode, self._output = episode, output

    @functools.cached_property
    def _steps(self) -> list[IntermediateStep]:
        return list(_make_steps(self._episode, self._output))

    def __len__(self) -> int:
        return len(self._steps)

    @overload
    def __getitem__(self, index: int) -> IntermediateStep: ...
    @overload
    def __getitem__(self, index: slice) -> list[IntermediateStep]: ...
    def __getitem__(self, index: int | slice) -> IntermediateStep | list[IntermediateStep]:
        return self._steps[index]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and self._steps == list(other)

    def __deepcopy__(self, memo: dict[int, Any]) -> "EpisodeSteps":
        return self  # nothing changes them

    def __reduce__(self) -> tuple[Any, ...]:
        return list, (self._steps,)


def parse_to_openai_messages(steps: Sequence[IntermediateStep]) -> list[dict[str, Any]]:
    """Return the conversation of an episode's steps as messages of OpenAI's API.

    An answer of the policy has `logprobs`, which record its call: a trajectory that passes them on trains the very
    tokens that were sampled. The messages of a call that goes on from an earlier one are not repeated.

    >>> episode = Episode(0, 0, 0, "example", 0)
    >>> said = {"role": "user", "content": "hi"}
    >>> from jaxft.rollout.calls import Completion, Prompt, Reply
    >>> reply = Reply("ho", Completion([7], [-0.5], [-0.5], [3], "stop"))
    >>> episode.record(Call(0, "policy", (said,), Prompt("", (5,)), reply))
    >>> [(message["role"], message["content"]) for message in parse_to_openai_messages(EpisodeSteps(episode, None))]
    [('user', 'hi'), ('assistant', 'ho')]
    """
    messages: list[dict[str, Any]] = []
    conversations: list[list[Any]] = []  # the keys of all messages up to each answer
    asked: list[Any] = []
    results: list[Any] = []  # roles and texts of tools' results that no call has shown yet
    for step in steps:
        data = StreamEventData() if step.data is None else step.data
        if step.event_type is IntermediateStepType.LLM_START:
            given = [{"role": "user", "content": data.input}] if isinstance(data.input, str) else data.input or []
            asked = _keys(given)
            for message, key in list(zip(given, asked, strict=True))[_num_known(asked, conversations) :]:
                if key[:2] in results:
                    results.remove(key[:2])
                else:
                    messages.append(dict(message))
        elif step.event_type is IntermediateStepType.LLM_END:
            answer = dict(data.payload or {"role": "assistant", "content": str(data.output or ""), "logprobs": {}})
            messages.append(answer)
            known = {name: answer[name] for name in ("role", "content", "tool_calls") if name in answer}
            conversations.append([*asked, *_keys([known])])
        elif step.event_type is IntermediateStepType.TOOL_END:
            call_id = (step.metadata or {}).get("tool_call_id", "")
            messages.append({"role": "tool", "content": str(data.output or ""), "tool_call_id": call_id})
            results.append(_keys(messages[-1:])[0][:2])
    return messages


def _keys(messages: Sequence[Any]) -> list[Any]:
    return [comparison_key(message) for message in canonical_messages(messages)] if messages else []


def _num_known(keys: Sequence[Any], conversations: Sequence[Sequence[Any]]) -> int:
    """Return the length of the longest conversation that the messages of these keys begin with."""
    return max((len(known) for known in conversations if list(keys[: len(known)]) == list(known)), default=0)


def _make_steps(episode: Episode, output: Any) -> Iterator[IntermediateStep]:
    def step(
        event_type: IntermediateStepType, name: str, functions: Sequence[str], uuid: str, **fields: Any
    ) -> IntermediateStep:
        payload = IntermediateStepPayload(event_type=event_type, name=name, UUID=uuid, **fields)
        is_root = event_type is IntermediateStepType.WORKFLOW_START
        return IntermediateStep(
            parent_id="root" if is_root else episode.id, function_ancestry=_ancestry(functions), payload=payload
        )

    given = StreamEventData(input=episode.input_obj)
    yield step(IntermediateStepType.WORKFLOW_START, WORKFLOW, (), episode.id, data=given)
    conversations: list[list[Any]] = []
    for call in episode.calls:
        uuid, said = f"{episode.id}/llm/{call.index}", list(call.messages)
        for number, message in enumerate(call.messages[_num_known(call.message_keys, conversations) :]):
            if message["role"] in ("tool", "function"):
                name, arguments = _called_tool(message, said)
                yield step(
                    IntermediateStepType.TOOL_END,
                    name,
                    call.functions,
                    f"{uuid}/tool/{number}",
                    data=StreamEventData(input=arguments, output=message["content"]),
                    metadata={"tool_call_id": message.get("tool_call_id", "")},
                )
        conversations.append([*call.message_keys, comparison_key(call.answer_message)])
        asked = StreamEventData(input=said)
        yield step(IntermediateStepType.LLM_START, call.llm, call.functions, uuid, data=asked)
        answered = StreamEventData(input=said, output=call.content, payload=_answer(call, episode.texts_of_tokens))
        yield step(IntermediateStepType.LLM_END, call.llm, call.functions, uuid, data=answered)
    for turn, (calls, scores) in enumerate(episode.candidates):
        for place, (call, score) in enumerate(zip(calls, scores, strict=True)):
            candidate = TTCEventData(
                input=[{"role": said["role"], "content": readable_text(said)} for said in call.messages],
                output=call.full_text,
                turn_id=str(turn),
                turn_index=turn,
                candidate_index=place,
                score=score,
            )
            name, uuid = (WORKFLOW, *call.functions)[-1], f"{episode.id}/candidate/{turn}/{place}"
            yield step(IntermediateStepType.TTC_END, name, call.functions, uuid, data=candidate)
    yield step(IntermediateStepType.WORKFLOW_END, WORKFLOW, (), episode.id, data=StreamEventData(output=output))


def _ancestry(functions: Sequence[str]) -> InvocationNode:
    """Return the innermost function; names of functions do not tell its invocations apart, and so share an id."""
    path = [WORKFLOW, *functions]
    ids = ["/".join(path[: end + 1]) for end in range(len(path))]
    parent_id, parent_name = (ids[-2], path[-2]) if functions else (None, None)
    return InvocationNode(function_id=ids[-1], function_name=path[-1], parent_id=parent_id, parent_name=parent_name)


def _called_tool(result: dict[str, Any], messages: Sequence[dict[str, Any]]) -> tuple[str, Any]:
    """Return name and arguments of the tool that gave a result: those of the call of its id."""
    for message in messages:
        for call in message.get("tool_calls", ()):
            if call["id"] and call["id"] == result.get("tool_call_id"):
                return call["function"]["name"], call["function"]["arguments"]
    return result.get("name", ""), None


def _answer(call: Call, texts_of_tokens: dict[str, Callable[[int], str]]) -> dict[str, Any]:
    """Return an answer as a message with log-probabilities; tokens of a model without texts are named as in vLLM."""
    text_of_token = texts_of_tokens.get(call.llm, "token_id:{}".format)
    message: dict[str, Any] = {"role": "assistant", "content": call.content}
    if call.reply.tool_calls:
        message["tool_calls"] = [each.as_message() for each in call.reply.tool_calls]
    return message | {"logprobs": logprobs_with_record(call, text_of_token)}
