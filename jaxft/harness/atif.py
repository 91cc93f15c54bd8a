"""Episodes in ATIF, the Agent Trajectory Interchange Format of Harbor (its RFC 0001, version 1.8): written and read.

A document is an episode. Its steps are the conversation; an answer that a policy sampled has the token ids of prompt
and answer and the log-probabilities in its `metrics`, of which the training rows are made again, token for token. What
ATIF has no field for is in `extra`: rewards, temperatures, versions of the policy.
"""

import itertools
import re
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import Field

import jaxft
from jaxft.errors import ConfigError, DatasetError, RequestError
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

VERSION = "ATIF-v1.8"
VERSIONS = re.compile(r"ATIF-v1\.[0-8]")
SOURCES = {"system": "system", "user": "user", "agent": "assistant"}

Json = dict[str, Any]


def export_episodes(run: Path, folder: Path) -> None:
    """Write the kept episodes of a run to an empty or new folder, a file each.

    Raises:
        ConfigError: the folder is not empty, or the run keeps no episodes.
        RunDirectoryError: there is no run.
    """
    if folder.exists() and not (folder.is_dir() and not any(folder.iterdir())):
        raise ConfigError([f"{folder}: is not an empty folder: choose another one"])
    rows = [row for row in read_run(run).episodes() if "failure" not in row]
    if not rows:
        raise ConfigError([f"{run}: keeps no episodes that ended well, so there is nothing to write"])
    if not all("role" in item for row in rows for item in row["episode"]):
        raise ConfigError([f"{run}: its episodes are preference pairs, for which ATIF has no form"])
    folder.mkdir(parents=True, exist_ok=True)
    for number, row in enumerate(rows):
        (folder / f"{number:06d}.json").write_bytes(json_bytes(to_atif(row, run.resolve().name)))
    without = sum(not row.get("sequences") for row in rows)
    note = f"; {without} without token ids, as their texts hold a secret" if without else ""
    print(f"{len(rows)} episodes written to {folder}{note}")


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
    known = ("epoch", "reward", "scorable", "named_rewards", "example_id", "generation")
    document = {
        "schema_version": VERSION,
        "session_id": session,
        "trajectory_id": f"{row.get('epoch')}/{name}",
        "agent": agent,
        "steps": steps,
        "extra": {each: row[each] for each in known if row.get(each) is not None},
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

    structure: DatasetStructureConfig = Field(
        default=DatasetStructureConfig(question_key=None, answer_key=None), description="Not used: a row is an episode."
    )


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
                rows = _rows(document)
            except (ValueError, RequestError) as error:
                raise DatasetError(f"{place}: {error}") from None
            yield from (DatasetRow(place, row) for row in rows)


def _rows(document: Json) -> list[Json]:
    """Return a trajectory as one row with token ids, or each of its parts as a row without."""
    version = document.get("schema_version")
    if not (isinstance(version, str) and VERSIONS.fullmatch(version)):
        raise ValueError(f"schema_version is {version!r:.50}; wanted ATIF-v1.0 to {VERSION}")
    parts = list(_parts(document))
    answers = [answer for part in parts for answer in _own_answers(part)]
    extra = document.get("extra") or {}
    reward = extra.get("reward") if extra.get("scorable", True) else None
    if known := [(index, *answer) for index, answer in enumerate(answers) if has_ids(answer[0])]:
        by_row: dict[int, list[Call]] = {}  # a row may have more than a prefix in common: calls that nobody trains
        for index, step, model in known:
            by_row.setdefault(_extra(step).get("row", 0), []).append(_call(step, model, index))
        sequences = [sequence for _, calls in sorted(by_row.items()) for sequence in _sequences(calls)]
        return [{"messages": _messages(document), "reward": reward, "token_sequences": sequences}]
    rows = []
    for part in parts:
        messages, tools = _messages(part), (part.get("agent") or {}).get("tool_definitions") or []
        if any(message["role"] == "assistant" and message.get("weight", 1) for message in messages):
            rows.append({"messages": messages, "tools": tools, "reward": reward})
    return rows


def _sequences(calls: Sequence[Call]) -> list[Json]:
    """Return the training rows of calls, whose indices are the numbers of their turns."""
    turns = sorted(call.index for call in calls)
    rows = token_sequences(calls)
    numbered = [[turns[turn] if turn >= 0 else -1 for turn in row.turns] for row in rows]
    own = ({"turns": each, "is_logged": True, "llm": None} for each in numbered)
    return [row.model_copy(update=known).model_dump() for row, known in zip(rows, own, strict=True)]


def _parts(document: Json) -> Iterator[Json]:
    """Yield a trajectory and those of its subagents."""
    if not isinstance(document.get("steps"), list):
        raise ValueError(f"steps is {document.get('steps')!r:.50}; wanted a list")
    yield document
    for part in document.get("subagent_trajectories") or ():
        yield from _parts(part)


def _own_answers(part: Json) -> Iterator[tuple[Json, str | None]]:
    """Yield the steps that a model answered, and the names of the models."""
    for number, step in enumerate(part["steps"]):
        if not isinstance(step, dict) or step.get("source") not in ("system", "user", "agent"):
            raise ValueError(f"steps[{number}] is {step!r:.80}; wanted an object whose source is system, user or agent")
        if step["source"] == "agent" and not _is_context(step):
            yield step, step.get("model_name") or (part.get("agent") or {}).get("model_name")


def _is_context(step: Json) -> bool:
    return bool(step.get("is_copied_context")) or step.get("llm_call_count") == 0


def has_ids(step: Json) -> bool:
    """Return True if a step has the token ids of its prompt and of its answer."""
    metrics = step.get("metrics") or {}
    return bool(metrics.get("prompt_token_ids") and metrics.get("completion_token_ids"))


def _extra(step: Json) -> Json:
    return step["metrics"].get("extra") or {}


def _call(step: Json, model: str | None, index: int) -> Call:
    """Return the call that a step with token ids records."""
    metrics, extra = step["metrics"], _extra(step)
    answer = list(metrics["completion_token_ids"])
    logprobs = metrics.get("logprobs") or [0.0] * len(answer)
    completion = Completion(
        token_ids=answer,
        sampler_logprobs=list(logprobs),
        behavior_logprobs=list(extra.get("behavior_logprobs", logprobs)),
        policy_versions=list(extra.get("policy_versions", [-1] * len(answer))),
        finish_reason=extra.get("finish_reason", "stop"),
        supports=list(extra.get("supports", ())),
    )
    for name, values in (("logprobs", logprobs), ("extra", completion.policy_versions), ("extra", completion.supports)):
        if len(values) not in (0, len(answer)):
            raise ValueError(
                f"step {step.get('step_id')} has {len(answer)} completion_token_ids, but {len(values)} values in {name}"
            )
    prompt, temperature = Prompt("", tuple(metrics["prompt_token_ids"])), extra.get("temperature", 1.0)
    return Call(
        extra.get("turn", index), extra.get("llm") or model or "", (), prompt, Reply("", completion), temperature
    )


def _messages(part: Json) -> list[Json]:
    """Return the steps as messages up to the last answer; an answer of no model has the weight 0."""
    messages: list[Json] = []
    for number, step in enumerate(part["steps"]):
        place = f"steps[{number}]"
        message: Json = {"role": SOURCES[step["source"]], "content": _text(step.get("message"), place)}
        if step["source"] == "agent":
            calls = step.get("tool_calls") or ()
            message |= {"weight": 0} if _is_context(step) else {}
            message |= {"tool_calls": [_as_call(call) for call in calls]} if calls else {}
        messages.append(message)
        for result in (step.get("observation") or {}).get("results", ()):
            text, call = _text(result.get("content") or "", place), result.get("source_call_id")
            if call is not None:
                messages.append({"role": "tool", "tool_call_id": call, "content": text})
            elif text:
                messages.append({"role": "user", "content": text})
    joined: list[Json] = []
    for message in messages:
        if joined and message["role"] == joined[-1]["role"] == "user":
            joined[-1] = {"role": "user", "content": f"{joined[-1]['content']}\n\n{message['content']}"}
        else:
            joined.append(message)
    while joined and joined[-1]["role"] != "assistant":
        joined.pop()
    return joined


def _as_call(call: Json) -> Json:
    arguments = (call.get("extra") or {}).get("arguments", call["arguments"])
    function = {"name": call["function_name"], "arguments": arguments}
    return {"id": call["tool_call_id"], "type": "function", "function": function}


def _text(message: Any, place: str) -> str:
    """Return the text of a message, of which each part must be one."""
    if isinstance(message, str):
        return message
    if not isinstance(message, list) or not all(isinstance(each, dict) and "text" in each for each in message):
        raise ValueError(f"{place} has a message that is no text: images and sounds cannot be trained on")
    return "".join(each["text"] for each in message)
