"""Episodes in ATIF, the Agent Trajectory Interchange Format of Harbor (its RFC 0001): version 1.7 is written, as NeMo
Agent Toolkit knows no later one, and any up to 1.8 is read.

A document is an episode. Its steps are the conversation; an answer that a policy sampled has the token ids of prompt
and answer and the log-probabilities in its `metrics`, of which the training rows are made again, token for token. What
ATIF has no field for is in `extra`: rewards, temperatures, versions of the policy.
"""

import functools
import itertools
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field, ValidationError

import jaxft
from jaxft.errors import ConfigError, DatasetError
from jaxft.files import json_bytes
from jaxft.harness.data_models import EvalInputItem
from jaxft.harness.datasets import (
    DatasetRow,
    DatasetStructureConfig,
    FileDatasetConfig,
    read_jsonl,
    read_object,
    row_items,
)
from jaxft.harness.registry import register_dataset_loader
from jaxft.rollout.calls import Call, Completion, Prompt, Reply
from jaxft.rollout.messages import read_arguments
from jaxft.rollout.sequences import TokenSequence, token_sequences
from jaxft.runs.records import read_run

VERSION = "ATIF-v1.7"
SOURCES = {"system": "system", "user": "user", "agent": "assistant"}

Json = dict[str, Any]


def export_episodes(run: Path, folder: Path) -> None:
    """Write the kept episodes of a run to an empty or new folder, a file each.

    Raises:
        ConfigError: the folder is not empty, or the run keeps no episodes.
        RunDirectoryError: there is no run.
    """
    if folder.exists() and not (folder.is_dir() and not any(folder.iterdir())):
        raise ConfigError(f"{folder}: is not an empty folder: choose another one")
    rows = [row for row in read_run(run).episodes() if "failure" not in row]
    talks = [row for row in rows if row["episode"]]
    if not talks:
        raise ConfigError(f"{run}: keeps no episodes that ended well and asked a model, so there is nothing to write")
    if not all("role" in item for row in talks for item in row["episode"]):
        raise ConfigError(f"{run}: its episodes are preference pairs, for which ATIF has no form")
    folder.mkdir(parents=True, exist_ok=True)
    for number, row in enumerate(talks):
        (folder / f"{number:06d}.json").write_bytes(json_bytes(to_atif(row, run.resolve().name)))
    without = sum(not row.get("sequences") for row in talks)
    note = f"; {without} without token ids, as their texts hold a secret" if without else ""
    note += f"; {len(rows) - len(talks)} left out, as they asked no model" if len(rows) > len(talks) else ""
    print(f"{len(talks)} episodes written to {folder}{note}")


def to_atif(row: Mapping[str, Any], session: str) -> Json:
    """Return an episode of `trajectories/samples.jsonl` as a document of ATIF.

    An episode of several conversations, as of agents that work side by side, has the others as `subagent_trajectories`.

    Args:
        row: the episode.
        session: name of the run.
    """
    sequences = [TokenSequence.model_validate(each) for each in row.get("sequences") or ()]
    reasons = (row.get("metadata") or {}).get("finish_reasons", ())
    sampled: dict[tuple[float, ...], list[Json]] = {}
    for place, sequence in enumerate(sequences):
        for start, end in _answers(sequence):
            found = _metrics(sequence, start, end, reasons)
            found["extra"]["row"] = place
            sampled.setdefault(tuple(found["logprobs"]), []).append(found)
    conversations: dict[int, list[Json]] = {}
    for item in row["episode"]:
        number = (item.get("metadata") or {}).get("conversation", 0)
        _add_step(conversations.setdefault(number, []), item, sampled)
    for found in (found for alike in sampled.values() for found in alike):  # answers that no message shows
        step = {"step_id": len(conversations[0]) + 1, "source": "agent", "message": "", "metrics": found}
        conversations[0].append(step)
    steps, *others = conversations.values()
    name = f"{row['example_id']}/{row['generation']}"
    agent = {"name": "jaxft", "version": jaxft.__version__}
    if sequences and sequences[0].llm is not None:
        agent["model_name"] = sequences[0].llm
    identity = ("epoch", "rollout_index", "example_id", "generation")
    known = {
        each: row[each] for each in ("reward", "scorable", "named_rewards", *identity) if row.get(each) is not None
    }
    document = {
        "schema_version": VERSION,
        "session_id": session,
        "trajectory_id": "/".join(str(known[each]) for each in identity if each in known),
        "agent": agent,
        "steps": steps,
        "extra": known,
    }
    if others:
        parts = enumerate(others, start=1)
        document["subagent_trajectories"] = [
            {"schema_version": VERSION, "trajectory_id": f"{name}/{index}", "agent": agent, "steps": part}
            for index, part in parts
        ]
    return document


def _answers(sequence: TokenSequence) -> Iterator[tuple[int, int]]:
    """Yield the first place and the end of each answer in a row."""
    turns = sequence.turns or [0 if is_own else -1 for is_own in sequence.completion_mask]
    edges = [0, *(i for i in range(1, len(turns)) if turns[i] != turns[i - 1]), len(turns)]
    yield from ((start, end) for start, end in itertools.pairwise(edges) if turns[start] >= 0)


def _metrics(sequence: TokenSequence, start: int, end: int, reasons: Sequence[str]) -> Json:
    """Return the `metrics` of an answer: its tokens, and in `extra` what its training row has beside them."""
    turn = sequence.turns[start] if sequence.turns else None
    extra: Json = {"temperature": sequence.temperatures[start], "policy_versions": sequence.policy_versions[start:end]}
    if turn is not None:
        extra |= {"turn": turn} | ({"finish_reason": reasons[turn]} if turn < len(reasons) else {})
    drawn, logprobs = sequence.behavior_logprobs[start:end], sequence.sampler_logprobs[start:end]
    if drawn != logprobs:
        extra["behavior_logprobs"] = drawn
    if any(sequence.supports[start:end]):
        extra["supports"] = sequence.supports[start:end]
    if sequence.llm is not None:
        extra["llm"] = sequence.llm
    return {
        "prompt_tokens": start,
        "completion_tokens": end - start,
        "prompt_token_ids": sequence.tokens[:start],
        "completion_token_ids": sequence.tokens[start:end],
        "logprobs": logprobs,
        "extra": extra,
    }


def _add_step(steps: list[Json], item: Mapping[str, Any], sampled: Mapping[tuple[float, ...], list[Json]]) -> None:
    """Add a message of an episode to the steps; results of tools go to the step of the answer that asked for them."""
    role, known = item["role"], item.get("metadata") or {}
    if role in ("tool", "function", "environment") and steps and steps[-1]["source"] == "agent":
        calls = {call["tool_call_id"] for call in steps[-1].get("tool_calls", ())}
        name = known.get("tool_call_id")
        result = {"source_call_id": name} if name in calls else {}
        steps[-1].setdefault("observation", {"results": []})["results"].append(result | {"content": item["content"]})
        return
    step: Json = {"step_id": len(steps) + 1, "source": "user", "message": known.get("content", item["content"])}
    if role == "system":
        step["source"] = role
    elif role == "assistant":
        step["source"] = "agent"
        if asked := known.get("tool_calls"):
            step["tool_calls"] = [_tool_call(call) for call in asked]
        alike = sampled.get(tuple(item.get("logprobs") or ()))
        if alike:
            step |= {"llm_call_count": 1, "metrics": alike.pop(0)}
        elif not item.get("logprobs"):  # the agent wrote it, or an earlier conversation has it
            step["is_copied_context"] = True
    elif role != "user":
        step["extra"] = {"role": role}
    steps.append(step)


def _tool_call(call: Mapping[str, Any]) -> Json:
    function = call["function"]
    arguments = read_arguments(function["arguments"])
    is_object = isinstance(arguments, Mapping)
    written = {"tool_call_id": call["id"], "function_name": function["name"]}
    # ATIF wants an object, and a model may write anything.
    return written | ({"arguments": arguments} if is_object else {"arguments": {}, "extra": {"arguments": arguments}})


class AtifDatasetConfig(FileDatasetConfig, name="atif"):
    """Trajectories in ATIF, for `logged_trajectory_builder`: those with token ids are trained token for token.

    The file is a JSONL file, a JSON file with one trajectory, or a folder of these. Trajectories without token ids are
    tokenised by the chat template, those of subagents as rows of their own.
    """

    structure: DatasetStructureConfig = DatasetStructureConfig(question_key=None, answer_key=None)
    """Not used: a row is an episode."""


@register_dataset_loader(config_type=AtifDatasetConfig)
async def atif(config: AtifDatasetConfig, builder: Any) -> AsyncIterator[list[EvalInputItem]]:
    """Yield the trajectories of a file or folder, and say how many have to be tokenised."""
    rows = list(read_atif(config.file_path))
    if tokenised := sum("token_sequences" not in row.fields for row in rows):
        builder.console.message(
            f"{config.file_path}: {tokenised} of {len(rows)} rows have no token ids; the chat template tokenises them"
        )
    yield row_items(config, rows, str(config.file_path))


def read_atif(path: Path) -> Iterator[DatasetRow]:
    """Read trajectories as rows of logged data: `messages`, a `reward` if there is one, and `token_sequences`.

    Raises:
        DatasetError: a file cannot be read, or is no trajectory of ATIF; the message names the step.
    """
    files = sorted(each for each in path.iterdir() if each.suffix in (".json", ".jsonl")) if path.is_dir() else [path]
    for file in files:
        documents = read_jsonl(file) if file.suffix in (".jsonl", ".ndjson") else read_object(file)
        for place, document in documents:
            try:
                rows = _rows(_Document.model_validate(document))
            except ValidationError as error:
                fault = error.errors(include_url=False)[0]
                where = ".".join(map(str, fault["loc"]))
                raise DatasetError(f"{place}: {where}: {fault['msg']}; holds {fault['input']!r:.80}") from None
            except ValueError as error:
                raise DatasetError(f"{place}: {error}") from None
            yield from (DatasetRow(place, row) for row in rows)


TokenIds = list[Annotated[int, Field(strict=True, ge=0)]]
LogProbs = list[Annotated[float, Field(strict=True, le=1e-3, allow_inf_nan=False)]]  # rounding may exceed 0
Message = str | list[Json]


class _MetricsExtra(BaseModel):
    policy_versions: list[int] | None = None
    behavior_logprobs: LogProbs | None = None
    supports: list[str] | None = None
    turn: int | None = Field(default=None, ge=0)
    row: int | None = Field(default=None, ge=0)
    temperature: float | None = Field(default=None, ge=0, allow_inf_nan=False)
    finish_reason: str | None = None
    llm: str | None = None


class _Metrics(BaseModel):
    prompt_token_ids: TokenIds | None = None
    completion_token_ids: TokenIds | None = None
    logprobs: LogProbs | None = None
    extra: _MetricsExtra | None = None


class _ToolCall(BaseModel):
    tool_call_id: str
    function_name: str
    arguments: Json
    extra: Json | None = None


class _Result(BaseModel):
    source_call_id: str | None = None
    content: Message | None = None


class _Observation(BaseModel):
    results: list[_Result] | None = None


class _Step(BaseModel):
    source: Literal["system", "user", "agent"]
    message: Message
    reasoning_content: str | None = None
    model_name: str | None = None
    tool_calls: list[_ToolCall] | None = None
    observation: _Observation | None = None
    metrics: _Metrics | None = None
    llm_call_count: int | None = None
    is_copied_context: bool | None = None


class _Agent(BaseModel):
    model_name: str | None = None
    tool_definitions: list[Json] | None = None


class _Document(BaseModel):
    """The fields of a trajectory that are read; a document may have any others."""

    schema_version: str = Field(pattern=r"^ATIF-v1\.[0-8]$")
    agent: _Agent = _Agent()
    steps: list[_Step] = Field(min_length=1)
    subagent_trajectories: list["_Part"] | None = None
    extra: Json | None = None

    @functools.cached_property
    def names_models(self) -> bool:
        """Return True if the writer names the model of every answer, so that a step without a name has no model.

        So it is where a step repeats the name of the agent's own model, as NeMo Agent Toolkit's do: its steps without a
        name are a tool's, or what its workflow returned. Else a step without a name is of the agent's model.
        """
        return any(
            step.model_name and step.model_name == (self.agent.model_name or step.model_name) for step in self.steps
        )

    def is_answer(self, step: _Step) -> bool:
        """Return whether a step is an answer of a model that no earlier trajectory has."""
        has_model = step.model_name or step.metrics or step.llm_call_count or not self.names_models
        return bool(step.source == "agent" and not step.is_copied_context and step.llm_call_count != 0 and has_model)

    def parts(self) -> "Iterator[_Document]":
        """Yield this trajectory and those of its subagents."""
        yield self
        for part in self.subagent_trajectories or ():
            yield from part.parts()


class _Part(_Document):
    schema_version: str = VERSION


def _rows(document: _Document) -> list[Json]:
    """Return a trajectory as one row with token ids, or each of its parts as a row without."""
    extra = document.extra or {}
    reward = extra.get("reward") if extra.get("scorable", True) else None
    by_row: dict[int, list[Call]] = {}  # a row may have more than a prefix in common: calls that nobody trains
    answers = (
        (part, number) for part in document.parts() for number, step in enumerate(part.steps) if part.is_answer(step)
    )
    for index, (part, number) in enumerate(answers):
        step = part.steps[number]
        if step.metrics and step.metrics.prompt_token_ids and step.metrics.completion_token_ids:
            extras = step.metrics.extra or _MetricsExtra()
            call = _call(step.metrics, extras, step.model_name or part.agent.model_name, index, f"steps.{number}")
            by_row.setdefault(extras.row or 0, []).append(call)
    if by_row:
        sequences = [sequence for _, calls in sorted(by_row.items()) for sequence in _sequences(calls)]
        return [{"messages": _messages(document), "reward": reward, "token_sequences": sequences}]
    rows = []
    for part in document.parts():
        if any(map(part.is_answer, part.steps)):
            rows.append({"messages": _messages(part), "tools": part.agent.tool_definitions or [], "reward": reward})
    if not rows:
        raise ValueError("steps: no model has answered in any of them, so there is nothing to train on")
    return rows


def _sequences(calls: Sequence[Call]) -> list[Json]:
    """Return the training rows of calls, whose indices are the numbers of their turns."""
    turns = sorted(call.index for call in calls)
    rows = token_sequences(calls)
    numbered = [[turns[turn] if turn >= 0 else -1 for turn in row.turns] for row in rows]
    own = ({"turns": each, "is_logged": True, "llm": None} for each in numbered)
    return [row.model_copy(update=known).model_dump() for row, known in zip(rows, own, strict=True)]


def _call(metrics: _Metrics, extra: _MetricsExtra, model: str | None, index: int, place: str) -> Call:
    """Return the call that a step with token ids records."""
    answer = metrics.completion_token_ids or []
    logprobs = metrics.logprobs or [0.0] * len(answer)
    completion = Completion(
        token_ids=answer,
        sampler_logprobs=logprobs,
        behavior_logprobs=extra.behavior_logprobs or logprobs,
        policy_versions=extra.policy_versions or [-1] * len(answer),
        finish_reason=extra.finish_reason or "stop",
        supports=extra.supports or [],
    )
    lengths = {
        "logprobs": len(logprobs),
        "extra.behavior_logprobs": len(completion.behavior_logprobs),
        "extra.policy_versions": len(completion.policy_versions),
        "extra.supports": len(completion.supports) or len(answer),
    }
    for name, length in lengths.items():
        if length != len(answer):
            raise ValueError(
                f"{place}.metrics.{name}: {length} values for {len(answer)} completion_token_ids; wanted one each"
            )
    prompt, temperature = Prompt("", tuple(metrics.prompt_token_ids or ())), extra.temperature
    return Call(
        index if extra.turn is None else extra.turn,
        extra.llm or model or "",
        (),
        prompt,
        Reply("", completion),
        1.0 if temperature is None else temperature,
    )


def _messages(part: _Document) -> list[Json]:
    """Return the steps as messages up to the last answer of a model; an answer of none has the weight 0."""
    messages: list[Json] = []
    for number, step in enumerate(part.steps):
        place = f"steps.{number}"
        message: Json = {"role": SOURCES[step.source], "content": _text(step.message, f"{place}.message")}
        if step.source == "agent":
            message |= {} if part.is_answer(step) else {"weight": 0}
            message |= {"reasoning_content": step.reasoning_content} if step.reasoning_content else {}
            message |= {"tool_calls": [_as_call(call) for call in step.tool_calls]} if step.tool_calls else {}
        messages.append(message)
        for result in (step.observation and step.observation.results) or ():
            text = _text(result.content or "", f"{place}.observation")
            if result.source_call_id is not None:
                messages.append({"role": "tool", "tool_call_id": result.source_call_id, "content": text})
            elif text:
                messages.append({"role": "user", "content": text})
    joined: list[Json] = []
    for message in messages:
        if joined and message["role"] == joined[-1]["role"] == "user":
            joined[-1] = {"role": "user", "content": f"{joined[-1]['content']}\n\n{message['content']}"}
        else:
            joined.append(message)
    while joined and (joined[-1]["role"] != "assistant" or "weight" in joined[-1]):
        joined.pop()
    return joined


def _as_call(call: _ToolCall) -> Json:
    arguments = (call.extra or {}).get("arguments", call.arguments)
    function = {"name": call.function_name, "arguments": arguments}
    return {"id": call.tool_call_id, "type": "function", "function": function}


def _text(message: Message, place: str) -> str:
    """Return the text of a message, of which each part must be one."""
    if isinstance(message, str):
        return message
    for index, part in enumerate(message):
        if not isinstance(part.get("text"), str):
            raise ValueError(
                f"{place}.{index} is {part!r:.80}; wanted a text, as images and sounds cannot be trained on"
            )
    return "".join(part["text"] for part in message)
