"""Divergences from a teacher against enumeration, in chunks, and as a loss of an update."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxft
from jaxft.core.divergence import Teacher, divergence
from jaxft.core.logprobs import token_logprobs
from jaxft.core.objectives import grpo_loss
from jaxft.core.types import Batch
from jaxft.core.update import init_train_state, make_update

KINDS = ("reverse", "forward", "jensen_shannon")
V, W = 11, 13


def enumerated(student, teacher, temperature, kind, mixing=0.5):
    """The divergence and its gradient with respect to the student's logits, term by term in float64."""
    values, gradients = [], []
    for z, x, t in zip(np.float64(student), np.float64(teacher), np.float64(temperature), strict=True):
        p, q = (np.exp(each / t - np.max(each / t)) for each in (z, x))
        p, q = p / p.sum(), q / q.sum()
        m = mixing * q + (1 - mixing) * p

        def kl(a, b):
            return sum(ai * (np.log(ai) - np.log(bi)) for ai, bi in zip(a, b, strict=True) if ai > 0)

        if kind == "reverse":
            values.append(kl(p, q))
            by_p = np.log(p) - np.log(q)
        elif kind == "forward":
            values.append(kl(q, p))
            by_p = -q / p
        else:
            values.append(mixing * kl(q, m) + (1 - mixing) * kl(p, m))
            by_p = (1 - mixing) * (np.log(p) - np.log(m))
        gradients.append(p * (by_p - (p * by_p).sum()) / t)
    return np.array(values), np.array(gradients)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("mixing", [0.1, 0.5])
def test_values_and_gradients_are_those_of_enumeration(kind, mixing):
    draw = np.random.default_rng(0)
    student, teacher = (jnp.asarray(draw.normal(scale=3.0, size=(6, V)), jnp.float32) for _ in range(2))
    temperature = jnp.array([1.0, 0.5, 2.0, 1.0, 0.7, 1.3])

    def total(student):
        found = divergence(student, teacher, temperature, kind, mixing)
        return found.sum(), found

    (_, found), gradient = jax.value_and_grad(total, has_aux=True)(student)
    values, gradients = enumerated(student, teacher, temperature, kind, mixing)
    np.testing.assert_allclose(found, values, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(gradient, gradients, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_tokens_that_are_impossible_for_one_of_both(kind):
    """A token without probability in both distributions adds nothing; a large finite number stands for infinity."""
    student = jnp.array([[0.0, 1.0, -jnp.inf]])
    both = jnp.array([[1.0, 0.0, -jnp.inf]])
    without = divergence(student[:, :2], both[:, :2], jnp.ones(1), kind)
    found, gradient = jax.value_and_grad(lambda z: divergence(z, both, jnp.ones(1), kind)[0])(student)
    np.testing.assert_allclose(found, without[0], rtol=1e-6)
    assert np.isfinite(gradient).all()
    only_student = divergence(jnp.zeros((1, 3)), both, jnp.ones(1), kind)[0]
    assert np.isfinite(only_student) and (only_student > 1e20) == (kind == "reverse")


def test_vocabularies_of_two_sizes_are_compared_where_both_have_tokens():
    draw = np.random.default_rng(1)
    student, teacher = draw.normal(size=(2, V)), draw.normal(size=(2, W))
    values, _ = enumerated(student, teacher[:, :V], np.ones(2), "reverse")
    np.testing.assert_allclose(divergence(jnp.asarray(student), jnp.asarray(teacher), jnp.ones(2)), values, rtol=1e-5)


def test_mixtures_outside_of_the_unit_interval_are_refused():
    with pytest.raises(ValueError, match="mixing is 1"):
        divergence(jnp.zeros((1, 2)), jnp.zeros((1, 2)), jnp.ones(1), "jensen_shannon", 1.0)


def test_the_expected_sampled_form_is_the_gradient_of_the_reverse_divergence():
    """`sum over tokens of p (log q - log p) grad log p`, all tokens enumerated, is minus the gradient of KL(p || q)."""
    draw = np.random.default_rng(2)
    student, teacher = (jnp.asarray(draw.normal(size=(1, V))) for _ in range(2))
    logprobs = jax.nn.log_softmax(student)[0]
    gain = jax.nn.log_softmax(teacher)[0] - logprobs  # the advantage of each token

    def surrogate(student):
        return jnp.sum(jax.lax.stop_gradient(jnp.exp(logprobs) * gain) * jax.nn.log_softmax(student)[0])

    expected = jax.grad(lambda z: divergence(z, teacher, jnp.ones(1))[0])(student)
    np.testing.assert_allclose(jax.grad(surrogate)(student), -expected, atol=1e-6)


@pytest.fixture(scope="module")
def models():
    """A student and a wider teacher with one vocabulary: tables of logits by the token before."""

    def network(params, tokens, positions):
        return jnp.tanh(params["embedding"][tokens]) @ params["kernel"]

    draw = np.random.default_rng(3)

    def params(width):
        return {
            "embedding": jnp.asarray(draw.normal(size=(V, width)), jnp.float32),
            "kernel": jnp.asarray(draw.normal(size=(width, V)), jnp.float32),
        }

    return jaxft.from_function(network), params(4), jaxft.from_function(network), params(9)


@pytest.fixture(scope="module")
def batch():
    draw = np.random.default_rng(4)
    tokens = draw.integers(0, V, (3, 6)).astype(np.int32)
    mask = np.arange(6) >= np.array([[2], [1], [4]])
    temperatures = np.where(mask, 0.8, 1.0).astype(np.float32)
    return Batch(tokens, mask, np.zeros(3, np.float32), temperatures)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("chunk_tokens", [1, 4, None])
def test_chunks_give_the_scores_of_whole_tables(models, batch, kind, chunk_tokens):
    model, params, other, teacher_params = models
    tokens = jnp.asarray(batch.tokens)
    scored = token_logprobs(
        model,
        params,
        tokens,
        temperature=jnp.asarray(batch.temperatures),
        chunk_tokens=chunk_tokens,
        teacher=Teacher(other, kind),
        teacher_params=teacher_params,
    )
    plain = token_logprobs(model, params, tokens, temperature=jnp.asarray(batch.temperatures))
    np.testing.assert_allclose(scored.logprobs, plain.logprobs, rtol=1e-6)
    student, teacher = (
        np.asarray(each.apply(own, tokens, tokens)[0])[:, :-1].reshape(-1, V)
        for each, own in ((model, params), (other, teacher_params))
    )
    values, _ = enumerated(student, teacher, batch.temperatures[:, 1:].reshape(-1), kind)
    np.testing.assert_allclose(scored.divergence[:, 1:].reshape(-1), values, rtol=1e-5, atol=1e-6)
    assert not scored.divergence[:, 0].any()


def test_an_update_moves_the_student_to_the_teacher_and_leaves_the_teacher(models, batch):
    model, params, other, teacher_params = models
    loss = partial(grpo_loss, teacher=Teacher(other, "forward"), teacher_coef=2.0)
    optimizer = optax.adam(0.05)
    update = make_update(model, loss, optimizer)
    both = {"policy": jax.tree.map(jnp.copy, params), "teacher": teacher_params}
    state = init_train_state(both, optimizer, model)
    assert len(jax.tree.leaves(state.opt_state)) == 1 + 2 * len(jax.tree.leaves(params))
    distances = []
    for _ in range(40):
        state, metrics = update(state, batch)
        distances.append(float(metrics["teacher_divergence"]))
        assert metrics["loss"] == pytest.approx(2.0 * distances[-1], rel=1e-6)
    assert distances[-1] < 0.1 * distances[0]
    same = jax.tree.map(lambda kept, given: kept is given, state.params["teacher"], teacher_params)
    assert all(jax.tree.leaves(same))


def test_microbatches_add_up_to_the_batch(models, batch):
    model, params, other, teacher_params = models
    loss = partial(grpo_loss, teacher=Teacher(other))
    found = []
    for rows in (None, 1, 2):
        optimizer = optax.sgd(0.1)
        update = make_update(model, loss, optimizer, microbatch_rows=rows)
        both = {"policy": jax.tree.map(jnp.copy, params), "teacher": teacher_params}
        state, metrics = update(init_train_state(both, optimizer, model), batch)
        found.append((state.params["policy"]["kernel"], metrics["teacher_divergence"]))
    for kernel, distance in found[1:]:
        np.testing.assert_allclose(kernel, found[0][0], atol=1e-6)
        np.testing.assert_allclose(distance, found[0][1], rtol=1e-6)
