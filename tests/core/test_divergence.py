"""Divergences from a teacher against enumeration, in chunks, and as a loss of an update."""

import json
from functools import partial
from pathlib import Path

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


MIXINGS = (0.1, 0.5)


@pytest.fixture(scope="module")
def found():
    """Divergences of every kind with their gradients, in one program, by `(kind, mixing)`."""

    @jax.jit
    def of_all(student, teacher, temperature):
        def total(student, kind, mixing):
            each = divergence(student, teacher, temperature, kind, mixing)
            return jnp.sum(jnp.where(jnp.isfinite(each), each, 0.0)), each

        by = jax.grad(total, has_aux=True)
        return [by(student, kind, mixing) for kind in KINDS for mixing in MIXINGS]

    def by_name(*arrays):
        results = jax.device_get(of_all(*(np.asarray(array, np.float32) for array in arrays)))
        names = [(kind, mixing) for kind in KINDS for mixing in MIXINGS]
        return {name: (values, gradient) for name, (gradient, values) in zip(names, results, strict=True)}

    return by_name


VECTORS = json.loads((Path(__file__).parents[1] / "data" / "oracles" / "self_distillation.json").read_text())
OF_ALPHA = {0.0: ("forward", 0.5), 0.1: ("jensen_shannon", 0.1), 0.5: ("jensen_shannon", 0.5), 1.0: ("reverse", 0.5)}


@pytest.mark.parametrize("case", VECTORS["cases"], ids=lambda case: f"alpha {case['alpha']}")
def test_values_and_gradients_are_those_of_trl(found, case):
    """The oracle is SDPO. The gradient of sampled tokens is that of constant advantages `log q - log p`."""
    student, teacher = np.array(VECTORS["student"]), np.array(VECTORS["teacher"])
    if case["alpha"] is not None:
        got, gradient = found(student, teacher, np.ones(6))[OF_ALPHA[case["alpha"]]]
        np.testing.assert_allclose(got, case["loss"], rtol=1e-5, atol=1e-6)
    else:
        log_p, log_q = (each - np.log(np.exp(each).sum(axis=1, keepdims=True)) for each in (student, teacher))
        advantages = (log_q - log_p)[np.arange(6), VECTORS["ids"]]
        np.testing.assert_allclose(-advantages * log_p[np.arange(6), VECTORS["ids"]], case["loss"], rtol=1e-12)
        gradient = -advantages[:, None] * (np.eye(11)[VECTORS["ids"]] - np.exp(log_p))
    np.testing.assert_allclose(gradient, case["grad"], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("mixing", MIXINGS)
def test_values_and_gradients_are_those_of_enumeration(found, kind, mixing):
    student, teacher = np.random.default_rng(0).normal(scale=3.0, size=(2, 6, V)).astype(np.float32)
    temperature = np.array([1.0, 0.5, 2.0, 1.0, 0.7, 1.3])
    got, gradient = found(student, teacher, temperature)[kind, mixing]
    values, gradients = enumerated(student, teacher, temperature, kind, mixing)
    np.testing.assert_allclose(got, values, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(gradient, gradients, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_tokens_that_are_impossible_for_one_of_both(found, kind):
    """A token without probability in both distributions adds nothing; a large finite number stands for infinity."""
    impossible = np.full((6, V), -np.inf)
    student, both = impossible.copy(), impossible.copy()
    student[:, :2], both[:, :2] = [0.0, 1.0], [1.0, 0.0]
    student[3:, 2] = 0.5
    values, gradient = found(student, both, np.ones(6))[kind, 0.5]
    without, _ = enumerated(student[:3, :2], both[:3, :2], np.ones(3), kind)
    np.testing.assert_allclose(values[:3], without, rtol=1e-6)
    assert np.isfinite(gradient[:3]).all()
    assert np.isfinite(values[3:]).all() and np.all((values[3:] > 1e20) == (kind == "reverse"))


def test_vocabularies_of_two_sizes_are_compared_where_both_have_tokens():
    draw = np.random.default_rng(1)
    student, teacher = draw.normal(size=(2, V)).astype(np.float32), draw.normal(size=(2, W)).astype(np.float32)
    values, _ = enumerated(student, teacher[:, :V], np.ones(2), "reverse")
    np.testing.assert_allclose(jax.jit(divergence)(student, teacher, np.ones(2, np.float32)), values, rtol=1e-5)


def test_mixtures_outside_of_the_unit_interval_are_refused():
    with pytest.raises(ValueError, match="mixing is 1"):
        jax.eval_shape(lambda x: divergence(x, x, x[:, 0], "jensen_shannon", 1.0), np.zeros((1, 2), np.float32))


def test_the_expected_sampled_form_is_the_gradient_of_the_reverse_divergence():
    """`sum over tokens of p (log q - log p) grad log p`, all tokens enumerated, is minus the gradient of KL(p || q)."""

    @jax.jit
    def both_ways(student, teacher):
        logprobs = jax.nn.log_softmax(student)[0]
        gain = jax.nn.log_softmax(teacher)[0] - logprobs  # the advantage of each token

        def surrogate(z):
            return jnp.sum(jax.lax.stop_gradient(jnp.exp(logprobs) * gain) * jax.nn.log_softmax(z)[0])

        expected = jax.grad(lambda z: divergence(z, teacher, jnp.ones(1))[0])(student)
        return jax.grad(surrogate)(student), -expected

    student, teacher = np.random.default_rng(2).normal(size=(2, 1, V)).astype(np.float32)
    np.testing.assert_allclose(*both_ways(student, teacher), atol=1e-6)


@pytest.fixture(scope="module")
def models():
    """A student and a wider teacher with one vocabulary: tables of logits by the token before."""

    def network(params, tokens, positions):
        return jnp.tanh(params["embedding"][tokens]) @ params["kernel"]

    draw = np.random.default_rng(3)

    def params(width):
        return {
            "embedding": draw.normal(size=(V, width)).astype(np.float32),
            "kernel": draw.normal(size=(width, V)).astype(np.float32),
        }

    return jaxft.from_function(network), params(4), jaxft.from_function(network), params(9)


@pytest.fixture(scope="module")
def batch():
    draw = np.random.default_rng(4)
    tokens = draw.integers(0, V, (3, 6)).astype(np.int32)
    mask = np.arange(6) >= np.array([[2], [1], [4]])
    temperatures = np.where(mask, 0.8, 1.0).astype(np.float32)
    return Batch(tokens, mask, np.zeros(3, np.float32), temperatures)


@pytest.mark.parametrize("chunk_tokens", [1, 4, None])
def test_chunks_give_the_scores_of_whole_tables(models, batch, chunk_tokens):
    model, params, other, teacher_params = models

    @jax.jit
    def scores(params, teacher_params, tokens, temperatures):
        def score(**knobs):
            return token_logprobs(model, params, tokens, temperature=temperatures, **knobs)

        of_kinds = [
            score(chunk_tokens=chunk_tokens, teacher=Teacher(other, kind), teacher_params=teacher_params)
            for kind in KINDS
        ]
        both = ((model, params), (other, teacher_params))
        return of_kinds, score(), [each.apply(own, tokens, tokens)[0] for each, own in both]

    scored, plain, logits = jax.device_get(scores(params, teacher_params, batch.tokens, batch.temperatures))
    student, teacher = (each[:, :-1].reshape(-1, V) for each in logits)
    for kind, found in zip(KINDS, scored, strict=True):
        np.testing.assert_allclose(found.logprobs, plain.logprobs, rtol=1e-6)
        values, _ = enumerated(student, teacher, batch.temperatures[:, 1:].reshape(-1), kind)
        np.testing.assert_allclose(found.divergence[:, 1:].reshape(-1), values, rtol=1e-5, atol=1e-6)
        assert not found.divergence[:, 0].any()


def test_an_update_moves_the_student_to_the_teacher_and_leaves_the_teacher(models, batch):
    model, params, other, teacher_params = models
    loss = partial(grpo_loss, teacher=Teacher(other, "forward"), teacher_coef=2.0)
    optimizer = optax.adam(0.05)
    update = make_update(model, loss, optimizer)
    teacher_params = jax.device_put(teacher_params)
    both = {"policy": jax.device_put(jax.tree.map(np.array, params)), "teacher": teacher_params}
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
