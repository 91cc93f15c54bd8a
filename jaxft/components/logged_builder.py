"""The trajectory builder of logged data: rows of the data set are the trajectories, and no episode runs.

Each collection has the rows that the trainer asks for. Rows with rewards and the same prompt are one group, so that
offline losses can compare them; the others are groups of one.
"""

import asyncio
import itertools
import json
import time
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jaxft.components.configs import LoggedTrajectoryBuilderConfig
from jaxft.errors import ComponentError, DatasetError
from jaxft.harness.contracts import TrajectoryBuilder
from jaxft.harness.data_models import (
    DPOItem,
    EpisodeItem,
    EpisodeItemRole,
    EvalInputItem,
    OpenAIMessage,
    Trajectory,
    TrajectoryCollection,
)
from jaxft.harness.evaluation import Evaluation, Validation
from jaxft.rollout.chat import ChatTemplate
from jaxft.rollout.client import ChatClient
from jaxft.rollout.messages import readable_text
from jaxft.rollout.sequences import TokenSequence
from jaxft.training.logged import Conversation, Logged, logged_sequences, read_logged

ROLES = {role.value: role for role in EpisodeItemRole}
LISTED = 5
"""Rows that a message names."""


@dataclass(frozen=True)
class ReadRow:
    """A row, and its conversations as tokens. No model of pydantic, as millions of tokens are not to be checked."""

    row: Logged
    sequences: Sequence[TokenSequence]


def read_item(item: EvalInputItem, template: ChatTemplate, config: LoggedTrajectoryBuilderConfig) -> ReadRow:
    """Return the row of an example.

    Raises:
        ValueError: the row is of no form, or the chat template cannot write it.
    """
    given = item.full_dataset_entry
    if "token_sequences" in given:  # as they were sampled
        own = Logged((Conversation([], given["messages"]),), [], given.get("reward"))
        return ReadRow(own, [TokenSequence.model_validate(each) for each in given["token_sequences"]])
    row = read_logged(given)
    return ReadRow(row, logged_sequences(row, template, only_last=config.trained == "last_answer"))


def read_items(source: str, items: Iterable[EvalInputItem], read: Callable[[EvalInputItem], ReadRow]) -> list[ReadRow]:
    """Return the rows of examples, each as a function reads it.

    Raises:
        DatasetError: it raised ValueErrors; the message has the source, and those of the first rows.
    """
    rows, faults = list[ReadRow](), list[str]()
    for item in items:
        try:
            rows.append(read(item))
        except ValueError as error:
            faults.append(f"row '{item.id}' {error}")
    if faults:
        more = f"; {len(faults) - LISTED} rows more have faults" if len(faults) > LISTED else ""
        raise DatasetError(f"{source}: {'; '.join(faults[:LISTED])}{more}")
    return rows


class LoggedTrajectoryBuilder(TrajectoryBuilder):
    """Gives the rows of the data set as trajectories.

    Attributes:
        groups: trajectories by the id of the example they are of.
        dropped: number of rows that were left out as too long.
    """

    trajectory_builder_config: LoggedTrajectoryBuilderConfig

    def __init__(
        self, config: LoggedTrajectoryBuilderConfig, template: ChatTemplate, max_tokens: int, vocabulary: int
    ) -> None:
        """Read no rows yet.

        Args:
            config: the configuration.
            template: chat template and tokenizer of the model.
            max_tokens: tokens of the context; rows of more are those that `long_rows` is about.
            vocabulary: number of token ids of the model.
        """
        super().__init__(config)
        self.groups: dict[str, list[Trajectory]] = {}
        self.dropped = 0
        self._template, self._max_tokens, self._vocabulary = template, max_tokens, vocabulary
        self._held_out: list[list[Trajectory]] = []
        self._asked: dict[str, tuple[list[str], float]] = {}

    async def bind_evaluation(self, evaluation: Evaluation, examples: list[EvalInputItem]) -> None:
        """Store the evaluation, and tokenise the rows, which become groups.

        Raises:
            DatasetError: rows are of no form, are longer than the context, or cannot be written by the chat template.
        """
        self.groups, self.dropped = await asyncio.to_thread(self._read, "eval.general.dataset", examples)
        by_id = {item.id: item for item in examples}
        await super().bind_evaluation(evaluation, [by_id[example_id] for example_id in self.groups])

    async def bind_validation(self, validation: Validation) -> None:
        """Store the validation set, and tokenise its rows."""
        groups, _ = await asyncio.to_thread(self._read, "eval.validation.dataset", validation.examples)
        if _are_pairs(groups) != _are_pairs(self.groups):
            raise DatasetError("eval.validation.dataset: preferences beside conversations: both are one of the two")
        self._held_out = list(groups.values())
        await super().bind_validation(validation)

    def held_out(self, run_id: str) -> TrajectoryCollection:
        """Return the rows of the validation set."""
        return TrajectoryCollection(trajectories=self._held_out, run_id=run_id)

    def _read(self, source: str, examples: Sequence[EvalInputItem]) -> tuple[dict[str, list[Trajectory]], int]:
        """Return the groups of these rows, and the number of rows that were left out."""
        template, config = self._template.of_thread, self.trajectory_builder_config
        read = read_items(
            source, examples, lambda item: self._fit(self._checked(item, read_item(item, template, config)))
        )
        fitting = [(item.id, row) for item, row in zip(examples, read, strict=True) if row.sequences]
        if len({row.row.is_pair for _, row in fitting}) == 2:
            raise DatasetError(f"{source}: some rows are preferences and some are not: give them in two runs")
        if not fitting:
            raise DatasetError(f"{source}: all {len(read)} rows are longer than {self._max_tokens} tokens")
        groups, owners = dict[str, list[Trajectory]](), dict[str, str]()
        for item_id, read_row in fitting:
            row = read_row.row
            has_reward = row.reward is not None and not row.is_pair
            group = owners.setdefault(_prompt_key(row), item_id) if has_reward else item_id
            members = groups.setdefault(group, [])
            members.append(_trajectory(group, len(members), row, read_row.sequences))
        return groups, len(read) - len(fitting)

    def _checked(self, item: EvalInputItem, read: ReadRow) -> ReadRow:
        """Return a row, whose token ids must be those of the model if they were recorded."""
        if "token_sequences" in item.full_dataset_entry:
            ids = [token for each in read.sequences for token in each.tokens]
            if wrong := [token for token in ids if not 0 <= token < self._vocabulary]:
                raise ValueError(
                    f"has the token id {wrong[0]}, and the model {self._vocabulary} ids: it is of another tokenizer; "
                    "without its ids the chat template tokenises it"
                )
        return read

    def _fit(self, read: ReadRow) -> ReadRow:
        """Return a row whose sequences fit the context, as `long_rows` says; one without any is left out."""
        most, policy = self._max_tokens, self.trajectory_builder_config.long_rows
        longest = max(len(each.tokens) for each in read.sequences)
        if longest <= most:
            return read
        if policy == "error":
            raise ValueError(
                f"has {longest} tokens, and the context {most}: raise max_context_tokens, or set long_rows to drop or "
                "truncate"
            )
        sequences = [] if policy == "drop" else [_cut(each, most) for each in read.sequences]
        return ReadRow(read.row, sequences if all(any(each.completion_mask) for each in sequences) else [])

    async def start_run(self, run_id: str, meta: dict[str, Any] | None = None) -> None:
        """Remember the rows that are asked for: `example_ids` of `meta`, or all."""
        if run_id in self._asked:
            raise ValueError(f"run '{run_id}' is already in progress; finalize it or choose another id")
        self._asked[run_id] = list((meta or {}).get("example_ids", self.groups)), time.perf_counter()

    async def finalize(self, run_id: str, meta: dict[str, Any] | None = None) -> TrajectoryCollection:
        """Return the rows that `start_run` was asked for, a group per example."""
        ids, started = self._asked.pop(run_id)
        groups = [self.groups[example_id] for example_id in ids]
        rows = [sequence for group in groups for each in group for sequence in each.sequences or ()]
        metrics = {
            "logged_rows": sum(map(len, groups)),
            "dropped_rows": self.dropped,
            "truncated_rows": sum(row.truncated for row in rows),
            "row_tokens_mean": sum(len(row.tokens) for row in rows) / len(rows),
            "row_tokens_max": max(len(row.tokens) for row in rows),
        }
        timings = {"seconds_rollout": time.perf_counter() - started}
        return TrajectoryCollection(trajectories=groups, run_id=run_id, metrics=metrics, timings=timings)

    def log_progress(self, run_id: str, metrics: dict[str, Any], output_dir: str | None = None) -> None:
        """Do nothing: the trainer logs the metrics."""


def _cut(sequence: TokenSequence, most: int) -> TokenSequence:
    """Return a sequence without the tokens behind the first `most`."""
    if len(sequence.tokens) <= most:
        return sequence
    cut = {name: values[:most] for name, values in sequence if isinstance(values, list)}
    return sequence.model_copy(update=cut | {"truncated": True})


def _prompt_key(row: Logged) -> str:
    """Return what rows of one group have in common: the prompt, and without one all before the first answer."""
    (given,) = row.conversations
    asked: Any = given.prompt
    if not asked and isinstance(given.answer, list):
        asked = list(itertools.takewhile(lambda each: each["role"] != "assistant", given.answer))
    return json.dumps([asked, row.tools], sort_keys=True)


def _are_pairs(groups: Mapping[str, list[Trajectory]]) -> bool:
    return isinstance(next(iter(groups.values()))[0].episode[0], DPOItem)


def _trajectory(example_id: str, generation: int, row: Logged, sequences: Sequence[TokenSequence]) -> Trajectory:
    episode: list[Any]
    if row.is_pair:
        chosen, rejected = row.conversations
        prompt = (
            chosen.prompt
            if isinstance(chosen.prompt, str)
            else [OpenAIMessage(role=each["role"], content=readable_text(each)) for each in chosen.prompt]
        )
        episode = [DPOItem(prompt=prompt, chosen_response=_text(chosen), rejected_response=_text(rejected))]
    else:
        (given,) = row.conversations
        episode = _items(given)
    return Trajectory(
        episode=episode,
        reward=row.reward,  # type: ignore[arg-type]  # None: not scorable
        example_id=example_id,
        generation=generation,
        sequences=list(sequences),
    )


def _items(given: Conversation) -> list[EpisodeItem]:
    asked = [{"role": "user", "content": given.prompt}] if isinstance(given.prompt, str) else given.prompt
    said = [{"role": "assistant", "content": given.answer}] if isinstance(given.answer, str) else given.answer
    return [
        EpisodeItem(
            role=ROLES.get(each["role"], EpisodeItemRole.USER),
            content=readable_text(each),
            logprobs=[] if each["role"] == "assistant" else None,
        )
        for each in (*asked, *said)
    ]


def _text(given: Conversation) -> str:
    return given.answer if isinstance(given.answer, str) else "\n".join(map(readable_text, given.answer))


async def logged_trajectory_builder(
    config: LoggedTrajectoryBuilderConfig, builder: Any
) -> AsyncIterator[LoggedTrajectoryBuilder]:
    """Yield the builder, with the chat template of the policy that is trained."""
    llm = await builder.get_llm(config.llm)
    if not isinstance(llm, ChatClient):
        raise ComponentError(f"llm '{config.llm}' is a {type(llm).__name__}; wanted a local_policy, which is trained")
    engine = llm.policy.engine
    yield LoggedTrajectoryBuilder(config, llm.policy.template, engine.max_context_tokens, engine.vocabulary)
