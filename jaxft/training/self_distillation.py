"""Teachers that read more than the policy does: the feedback of an evaluator, or the answer of a better episode.

The teacher's prompt is the first prompt of a row with a text behind its last message of the user; all tokens after it
are the same. So a teacher has sequences of its own, in tables of their own, from which its log-probabilities or hidden
states go to the places of the policy's tokens. Letters: `B` rows of a table, `T` tokens of a row, `E` width of a state.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from jaxft.core.sharding import constrain, to_host
from jaxft.core.types import Batch, Model, Params
from jaxft.errors import PromptTooLongError
from jaxft.harness.data_models import EpisodeItem, EpisodeItemRole, Trajectory
from jaxft.rollout.chat import ChatTemplate
from jaxft.rollout.sequences import TokenSequence
from jaxft.rollout.weights import Weights
from jaxft.training.batch import BatchPlanner, Row, Scorer, TrainingBatch, before_scoring, make_batch, score_tokens
from jaxft.training.config import DistillationConfig
from jaxft.training.rows import JobRows


def with_teacher_rows(
    data: JobRows, distillation: DistillationConfig, llm: str, template: ChatTemplate, max_context_tokens: int
) -> JobRows:
    """Return the rows of a job with the sequences that the teacher reads, and counts of rows that get none.

    Args:
        data: the rows, with the groups of their trajectories.
        distillation: texts that the teacher reads.
        llm: name of the policy in the configuration.
        template: renders its prompts.
        max_context_tokens: tokens of its longest sequence.
    """
    texts = [text for group in data.groups for text in teacher_texts(group, distillation, llm)]
    counts = dict.fromkeys(("untaught_without_feedback", "untaught_without_messages", "untaught_too_long"), 0)
    rows, taught = [], 0
    for row in data.rows:
        text = texts[row.trajectory]
        fault, teacher = "without_messages" if text else "without_feedback", None
        try:
            teacher = teacher_sequence(row.sequence, text, template, max_context_tokens) if text else None
        except PromptTooLongError:
            fault = "too_long"
        if teacher is None:
            counts[f"untaught_{fault}"] += 1
        else:
            taught += sum(teacher.completion_mask)
        rows.append(row._replace(teacher=teacher))
    metrics = {"taught_fraction": taught / data.metrics["trained_tokens"], **counts}
    return data._replace(rows=rows, metrics=data.metrics | metrics)


def teacher_texts(group: Sequence[Trajectory], distillation: DistillationConfig, llm: str) -> list[str]:
    """Return the text that the teacher of `llm` reads about each trajectory of a group; empty for nothing to say.

    It has the answer of the best other episode whose reward reaches the threshold, of several the first, and then the
    evaluator's reasoning about the episode itself (arXiv 2601.20802, section 3).

    >>> said = [EpisodeItem(role=EpisodeItemRole.ASSISTANT, content="5", logprobs=[-0.1])]
    >>> good, bad = Trajectory(episode=said, reward=1), Trajectory(episode=said, reward=0, metadata={"reasoning": "no"})
    >>> texts = {"feedback_template": " It was: {feedback}", "solution_template": " Right: {solution}"}
    >>> teacher_texts([good, bad], DistillationConfig(teacher="self", **texts), "policy")
    ['', ' Right: 5 It was: no']
    """
    templates, least = distillation.templates, distillation.success_reward_threshold
    solved = [each for each in group if each.scorable and each.reward >= least and _answer(each, llm)]
    texts = []
    for trajectory in group:
        others = [each for each in solved if each is not trajectory]
        best = max(others, key=lambda each: each.reward, default=None)
        words = {"solution": "" if best is None else _answer(best, llm), "feedback": _feedback(trajectory)}
        parts = [text.replace("{" + word + "}", words[word]) for word, text in templates.items() if words[word]]
        texts.append("".join(parts).encode(errors="replace").decode())  # a prompt takes no lone surrogates
    return texts


def _feedback(trajectory: Trajectory) -> str:
    """Return the reasoning of the evaluator as text, else the error that ended the agent; empty without both."""
    about = trajectory.metadata or {}
    reasoning = about.get("reasoning") or about.get("error") or ""
    return reasoning.strip() if isinstance(reasoning, str) else json.dumps(reasoning, ensure_ascii=False)


def _answer(trajectory: Trajectory, llm: str) -> str:
    """Return all that a language model said in an episode."""
    items = [item for item in trajectory.episode if isinstance(item, EpisodeItem) and item.logprobs]
    own = [item for item in items if (item.metadata or {}).get("llm", llm) == llm]  # which only one of several names
    return "\n".join(item.content for item in own if item.role is EpisodeItemRole.ASSISTANT).strip()


def teacher_sequence(
    sequence: TokenSequence, text: str, template: ChatTemplate, max_context_tokens: int
) -> TokenSequence | None:
    """Return a sequence whose first prompt has `text` behind its last message of the user; the rest is as it was.

    Returns:
        None if the prompt was no chat, or its messages are unknown.

    Raises:
        PromptTooLongError: it has more than `max_context_tokens` tokens.
    """
    call = sequence.begun_by
    if call is None or not call.prompt.text:
        return None
    messages = [dict(message) for message in call.messages]
    last = next((message for message in reversed(messages) if message["role"] == "user"), messages[-1])
    last["content"] += text
    prompt, known = template.prompt(messages, **call.rendering, max_tokens=max_context_tokens), len(call.prompt_ids)
    ids, num_tokens = prompt.ids, len(prompt.ids) + len(sequence.tokens) - known
    if num_tokens > max_context_tokens:
        raise PromptTooLongError.of(f"{num_tokens} tokens", max_context_tokens)
    lists = {name: values for name, values in sequence if isinstance(values, list) and values}
    # A prompt's first token stands for all: none of them is trained.
    moved: dict[str, Any] = {name: [values[0]] * len(ids) + values[known:] for name, values in lists.items()}
    return sequence.model_copy(update=moved | {"tokens": [*ids, *sequence.tokens[known:]], "experts": []})


def with_teacher_logprobs(
    job: TrainingBatch, rows: Sequence[Row], planner: BatchPlanner, score: Scorer
) -> TrainingBatch:
    """Return a job with the log-probabilities that the teacher has in sequences of its own.

    A token that it does not teach has the log-probability that it was sampled with, and so no gain.

    Args:
        job: result of `make_batch`.
        rows: rows of the job.
        planner: divides the teacher's sequences into microbatches.
        score: scores a microbatch with the teacher.
    """
    logprobs = np.array(job.batch.sampler_logprobs)
    if (own := _own_batch(rows, planner, has_supports=True)) is not None:
        logprobs[_taught_tokens(job, rows)] = score_tokens(own, score).logprobs[_trained_tokens(own)]
    return job._replace(teacher_logprobs=logprobs)


def with_teacher_states(
    job: TrainingBatch, rows: Sequence[Row], planner: BatchPlanner, teacher: Weights, pause: Callable[[Any], object]
) -> TrainingBatch:
    """Return a job with the hidden states that the teacher has before the tokens, in sequences of its own.

    Args:
        job: result of `make_batch`.
        rows: rows of the job.
        planner: divides the teacher's sequences into microbatches.
        teacher: weights of the teacher.
        pause: called after each microbatch is queued, with an array that is ready when it has been computed.
    """
    ids, own = np.zeros(job.turns.shape, np.int32), _own_batch(rows, planner, has_supports=False)
    places = _taught_tokens(job, rows)
    ids[places] = np.arange(1, len(places[0]) + 1)
    states = empty_states(teacher, 1, len(places[0]) + 1)[0]
    if own is not None:
        (at, columns), first = _trained_tokens(own), 0
        for part in own._replace(batch=before_scoring(own.batch)).microbatches():
            pause(computed := hidden_states(teacher.model, teacher.params, part))
            hidden = to_host(computed)
            inside = (at >= first) & (at < first + len(hidden))
            states[1:][inside] = hidden[at[inside] - first, columns[inside] - 1]
            first += len(hidden)
    return job._replace(teacher_ids=ids, teacher_states=states)


def empty_states(teacher: Weights, rows: int, width: int) -> Any:
    """Return hidden states of 0, `[rows width E]`."""
    ids: Any = np.zeros((1, 1), np.int32)
    state = jax.eval_shape(partial(hidden_states, teacher.model), teacher.params, Batch(ids, ids > 0))
    return np.zeros((rows, width, state.shape[-1]), state.dtype)


@partial(jax.jit, static_argnums=0)
def hidden_states(model: Model, params: Params, batch: Batch) -> Float[Array, "B T E"]:
    """Return the hidden states of a batch."""
    positions = batch.positions
    if positions is None:
        positions = jnp.broadcast_to(jnp.arange(batch.tokens.shape[1]), batch.tokens.shape)
    return model.apply(params, batch.tokens, positions, segment_ids=batch.segment_ids)[0]


def copy_head(teacher: Weights) -> Params:
    """Return a copy of the parameters of the output head, which no update donates; of shapes, their shapes."""
    copied = partial(_copied_head, teacher.model)
    is_planned = isinstance(jax.tree.leaves(teacher.params)[0], jax.ShapeDtypeStruct)
    return jax.eval_shape(copied, teacher.params) if is_planned else copied(teacher.params)


@partial(jax.jit, static_argnums=0)
def _copied_head(model: Model, params: Params) -> Params:
    return constrain(model.sharding, jax.tree.map(jnp.copy, model.head(params)))


def _own_batch(rows: Sequence[Row], planner: BatchPlanner, *, has_supports: bool) -> TrainingBatch | None:
    """Return the batch of the teacher's sequences; None if there are none."""
    taught = [Row(row.teacher, row.trajectory) for row in rows if row.teacher is not None]
    # A token's state stands in the column before it only where no tokens are shared.
    return make_batch(taught, replace(planner, shared_tokens=0), has_supports=has_supports) if taught else None


def _taught_tokens(job: TrainingBatch, rows: Sequence[Row]) -> tuple[np.ndarray, np.ndarray]:
    """Return row and column of the tokens of a job that have a teacher's, in the order of its sequences."""
    return _trained_tokens(job, np.array([row.teacher is not None for row in rows])[job.places[0]])


def _trained_tokens(job: TrainingBatch, chosen: np.ndarray | bool = True) -> tuple[np.ndarray, np.ndarray]:
    """Return row and column of the trained tokens of a job, or of those that are chosen."""
    wanted = job.per_token(job.batch.completion_mask) & chosen
    return job.tokens[0][wanted], job.tokens[1][wanted]
