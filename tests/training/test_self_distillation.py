"""Teachers that read more than the policy: their texts, their sequences, and where their scores go.

The network is that of test_learner.py in small: its hidden state is the sum of the embeddings of its segment so far.
"""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxft
from jaxft.core.divergence import Teacher
from jaxft.core.objectives import grpo_loss
from jaxft.core.types import Batch, Model
from jaxft.harness.data_models import EpisodeItem, EpisodeItemRole, Trajectory
from jaxft.rollout.calls import Prompt, encode_support
from jaxft.rollout.chat import ChatTemplate
from jaxft.rollout.sequences import token_sequences
from jaxft.rollout.weights import Weights
from jaxft.training.batch import BatchPlanner, Row, make_batch
from jaxft.training.config import DistillationConfig
from jaxft.training.rows import NOTHING_SAMPLED, JobRows
from jaxft.training.self_distillation import (
    teacher_sequence,
    teacher_texts,
    with_teacher_logprobs,
    with_teacher_rows,
    with_teacher_states,
)
from jaxft.training.update import scored

SELF = DistillationConfig(teacher="self", feedback_template=" ({feedback})", solution_template=" [{solution}]")
TOOL = {"type": "function", "function": {"name": "look_up", "parameters": {"type": "object", "properties": {}}}}


@pytest.fixture(scope="module")
def template(tokenizer):
    return ChatTemplate(tokenizer, (tokenizer.eos_token_id,))


@pytest.fixture
def make_row(template, make_call):
    """Makes the row of an episode of two turns."""

    def make(**fields):
        asked = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "2+2"}]
        prompt = fields.get("prompt") or template.prompt(asked)
        first = make_call(0, prompt.ids, [7, 8], messages=tuple(asked), **(fields | {"prompt": prompt}))
        second = make_call(1, (*first.context_ids, 9, 9), [10], messages=(*asked, first.answer_message))
        (row,) = token_sequences([first, second])
        return row

    return make


def said(content, reward, reasoning=None, **fields):
    answer = EpisodeItem(role=EpisodeItemRole.ASSISTANT, content=content, logprobs=[-0.5])
    return Trajectory(episode=[answer], reward=reward, metadata={"reasoning": reasoning}, **fields)


def test_a_teacher_reads_the_reasoning_and_the_best_other_answer():
    best = said("4", 2.0, {"off": 0})
    group = [said("5", 0.0, " too high "), said("3", 0.0), said("four", 1.0), best, said("9", 3.0, scorable=False)]
    assert teacher_texts(group, SELF, "policy") == [" [4] (too high)", " [4]", " [4]", ' [four] ({"off": 0})', " [4]"]
    assert teacher_texts(group[:2], SELF, "policy") == [" (too high)", ""]  # nobody reached the threshold
    told = SELF.model_copy(update={"solution_template": ""})
    assert teacher_texts(group, told, "policy") == [" (too high)", "", "", ' ({"off": 0})', ""]
    best.episode[0].metadata = {"llm": "opponent"}  # whose words are no answer of the policy
    group[2].metadata = {"reasoning": "no Unicode: \ud800"}
    assert teacher_texts(group[:4], SELF, "policy") == [
        " [four] (too high)",
        " [four]",
        " (no Unicode: ?)",
        ' [four] ({"off": 0})',
    ]


def test_a_teachers_sequence_has_another_first_prompt_and_the_same_rest(make_row, template):
    row = make_row()
    teacher, known = teacher_sequence(row, " (braces {x} <|im_end|>)", template, 512), len(row.begun_by.prompt_ids)
    added = len(teacher.tokens) - len(row.tokens)
    assert added > 0 and teacher.tokens[known + added :] == row.tokens[known:]
    for name in ("completion_mask", "temperatures", "sampler_logprobs", "turns"):
        values, moved = getattr(row, name), getattr(teacher, name)
        assert moved[known + added :] == values[known:] and len(moved) == len(teacher.tokens)
    assert not any(teacher.completion_mask[: known + added])
    text = template.text(teacher.tokens)
    assert "2+2 (braces {x} " in text and text.index("be brief") < text.index("2+2 (braces")
    controls = [list(each).count(template.stop_ids[0]) for each in (teacher.tokens, row.tokens)]
    assert controls[0] == controls[1]  # text is never a control token
    assert teacher_sequence(row, "", template, 512) == row


def test_a_teachers_prompt_is_rendered_with_tools_and_prefill(make_row, template):
    asked = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "2+2"}]
    rendering = {"tools": [], "template_kwargs": {}, "prefill": "It is"}
    row = make_row(prompt=template.prompt(asked, **rendering), rendering=rendering)
    assert template.text(teacher_sequence(row, " (no)", template, 512).tokens).count("It is") == 1
    assert teacher_sequence(row, "", template, 512).tokens == row.tokens


@pytest.mark.parametrize("long", ["x" * 99, "x" * 2**21], ids=["tokens", "bytes"])  # which are never tokenised
def test_rows_without_a_teacher_are_counted(make_row, make_sequence, template, long):
    groups = [[said("5", 0.0, "too high"), said("5", 0.0)], [said("5", 0.0, long), said("5", 0.0, "too high")]]
    rows = [Row(make_row(), 0), Row(make_row(), 1), Row(make_row(), 2), Row(make_sequence(), 3)]
    ids = make_row(prompt=Prompt("", (3, 4)))  # a prompt of token ids
    data = JobRows([*rows, Row(ids, 3)], groups, {"trained_tokens": 16}, NOTHING_SAMPLED)
    found = with_teacher_rows(data, SELF, "policy", template, max_context_tokens=len(rows[0].sequence.tokens) + 20)
    assert [row.teacher is not None for row in found.rows] == [True, False, False, False, False]
    assert found.metrics == {
        "trained_tokens": 16,
        "taught_fraction": 3 / 16,
        "untaught_without_feedback": 1,
        "untaught_without_messages": 2,
        "untaught_too_long": 1,
    }


V, E, TRACED = 64, 5, []


def apply(params, tokens, positions, cache=None, tables=None, segment_ids=None):
    TRACED.append(tokens.shape)
    is_seen = jnp.tril(jnp.ones((tokens.shape[1],) * 2, bool))
    if segment_ids is not None:
        is_seen &= segment_ids[:, :, None] == segment_ids[:, None, :]
    return jnp.tanh(is_seen.astype(jnp.float32) @ params["embed"][tokens]), None


MODEL = Model("sum", None, apply, lambda params, hidden: hidden @ params["head"], None)


@pytest.fixture(scope="module")
def params():
    rng = np.random.default_rng(0)
    return {"embed": rng.normal(size=(V, E)).astype(np.float32), "head": rng.normal(size=(E, V)).astype(np.float32)}


@pytest.fixture(scope="module")
def job(make_sequence, params):
    """Rows of four sequences, three of which a teacher reads behind other prompts, in tables of two sequences a row."""
    rows = [Row(make_sequence(number), number) for number in range(4)]
    for number, prompt in enumerate([[50], [51, 52, 53], [54, 55]]):
        sequence = rows[number].sequence
        moved = {name: [values[0]] * len(prompt) + values[2:] for name, values in sequence if values and name != "turns"
                 and isinstance(values, list)}  # fmt: skip
        rows[number] = Row(
            sequence, number, sequence.model_copy(update=moved | {"tokens": prompt + sequence.tokens[2:]})
        )
    planner = BatchPlanner(256, packed=True)
    return rows, planner, make_batch(rows, planner)


def log_distributions(params, tokens):
    """Log-probabilities of the next token at the trained places of a sequence, in float64: all but the last four."""
    embed, head = (np.asarray(params[name], np.float64) for name in ("embed", "head"))
    logits = np.tanh(np.cumsum(embed[tokens], axis=0)) @ head
    logits -= logits.max(axis=1, keepdims=True)
    return (logits - np.log(np.exp(logits).sum(axis=1, keepdims=True)))[-5:-1]


def test_log_probabilities_of_other_sequences_go_to_the_tokens_of_the_policy(job, params):
    rows, planner, laid_out = job
    found = with_teacher_logprobs(laid_out, rows, planner, partial(scored, MODEL, params, value_head=None))
    table = np.asarray(found.teacher_logprobs)
    for row, start, number in zip(*laid_out.packing[:2], range(4), strict=True):
        teacher = rows[number].teacher
        expected = np.full(4, -5.0)  # as sampled, where nothing is taught
        if teacher is not None:
            expected = log_distributions(params, teacher.tokens)[np.arange(4), teacher.tokens[-4:]]
        np.testing.assert_allclose(table[row, start + 2 : start + 6], expected, rtol=1e-5)


def test_tokens_of_rows_that_share_a_prompt_have_their_teachers(job, params, make_sequence):
    taught, planner, _ = job
    prompt, answers = [2 + place % 60 for place in range(2000)], [row.sequence.tokens[2:] for row in taught]
    lists = {
        name: values[:1] * 2000 + values[2:] for name, values in make_sequence() if isinstance(values, list) and values
    }
    rows = [
        row._replace(sequence=make_sequence(number, **lists | {"tokens": prompt + answers[number]}))
        for number, row in enumerate(taught)
    ]
    laid_out = make_batch(rows, replace(planner, microbatch_tokens=4096, shared_tokens=4096))
    assert laid_out.packing.branches is not None
    found = with_teacher_logprobs(laid_out, rows, planner, partial(scored, MODEL, params, value_head=None))
    by_sequence = np.split(found.per_token(found.teacher_logprobs), np.cumsum(laid_out.packing.lengths)[:-1])
    for row, logprobs in zip(rows, by_sequence, strict=True):
        expected = np.full(4, -5.0)
        if row.teacher is not None:
            expected = log_distributions(params, row.teacher.tokens)[np.arange(4), row.teacher.tokens[-4:]]
        np.testing.assert_allclose(logprobs[-4:], expected, rtol=1e-5)


def test_the_loss_is_the_divergence_from_the_states_of_other_sequences(job, params):
    """And it and its gradient are 0 where the teacher reads what the policy does."""
    rows, planner, laid_out = job
    teacher = Weights(MODEL, params)
    both = {"policy": params, "teacher": params}
    loss = jax.jit(jax.value_and_grad(partial(grpo_loss, MODEL, teacher=Teacher(MODEL)), has_aux=True))

    def of_rows(rows):
        taught = with_teacher_states(laid_out, rows, planner, teacher, lambda ready: None)
        (part,) = taught.microbatches()
        zeros, states = np.zeros_like(part.sampler_logprobs), np.asarray(part.teacher_hidden)
        (_, metrics), gradient = loss(both, part._replace(advantages=zeros, teacher_hidden=states))
        return float(metrics["teacher_divergence"]), jax.device_get(gradient["policy"])

    kl = [
        (np.exp(p) * (p - log_distributions(params, row.teacher.tokens))).sum(axis=1)
        for row in rows[:3]
        for p in [log_distributions(params, row.sequence.tokens)]
    ]
    distance, gradient = of_rows(rows)
    assert distance == pytest.approx(np.sum(kl) / 16, rel=1e-5) and np.abs(gradient["head"]).max() > 1e-3
    filtered = {"supports": [encode_support(np.array([7], np.uint32))] * len(rows[0].teacher.tokens)}
    drawn, traced = rows[0]._replace(teacher=rows[0].teacher.model_copy(update=filtered)), len(TRACED)
    with_teacher_states(laid_out, [drawn, *rows[1:]], planner, teacher, lambda ready: None)
    assert len(TRACED) == traced  # hidden states know no supports
    same = [row._replace(teacher=None if row.teacher is None else row.sequence) for row in rows]
    distance, gradient = of_rows(same)
    assert abs(distance) < 1e-6 and max(np.abs(each).max() for each in gradient.values()) < 1e-6


def test_a_number_by_hand():
    """A policy that says both tokens alike, and a teacher that says one nine times in ten: 0.5108, for one of two."""
    states = np.log(np.array([[[1.0, 1.0], [0.9, 0.1], [1.0, 1.0]]], np.float32))  # 0: the third token is not taught
    model = jaxft.from_function(lambda params, tokens, positions: params["logits"][tokens])
    batch = Batch(np.array([[0, 1, 1]]), np.array([[False, True, True]]), np.zeros((1, 3)), teacher_hidden=states)
    params = {"logits": np.zeros((2, 2), np.float32)}
    _, metrics = jax.jit(partial(grpo_loss, model, teacher=Teacher(model)))(
        {"policy": params, "teacher": params}, batch
    )
    assert float(metrics["teacher_divergence"]) == pytest.approx(0.5108 / 2, abs=1e-4)
