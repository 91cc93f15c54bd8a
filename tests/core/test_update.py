"""The update step: how a batch is split changes nothing, and what must not be learned from moves nothing."""

from contextlib import closing
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxft.core.losses import policy_loss
from jaxft.core.objectives import grpo_loss, sft_loss
from jaxft.core.types import Batch, HostStates
from jaxft.core.update import TrainState, init_train_state, make_update
from jaxft.models.config import model_preset
from jaxft.models.decoder import decoder
from jaxft.rollout.device import CompileCounter

DAPO = partial(grpo_loss, loss=partial(policy_loss, loss="dapo"))

FIGURES = ("applied_updates", "nonfinite_updates", "nothing_to_learn")


def figures(metrics):
    return tuple(int(metrics[name]) for name in FIGURES)


def assert_same_bits(got, expected):
    jax.tree.map(np.testing.assert_array_equal, got, expected)


def copies(tree):
    """On the host, safe from donation."""
    return jax.tree.map(lambda leaf: np.array(leaf), tree)


# --- Splitting.


keep_gradients = optax.GradientTransformation(
    lambda params: jax.tree.map(jnp.zeros_like, params), lambda grads, state, params: (state, grads)
)
"""An optimizer that moves nothing: its state are the last gradients."""


def bigram_params():
    rng = np.random.default_rng(3)
    return {
        "embedding": np.array(rng.normal(size=(48, 4)), np.float32),
        "head": np.array(rng.normal(size=(4, 48)), np.float32),
    }


def fresh_state(params, optimizer):
    """A state of copies, which an update may donate."""
    return init_train_state(jax.device_put(copies(params)), optimizer)


def test_maxima_are_combined_by_maximum(bigram):
    def loss_fn(model, params, batch, denominators):
        biggest = batch.tokens.max().astype(jnp.float32)
        return params["x"] * biggest, {"biggest_max": biggest, "biggest_sum": biggest}

    batch = Batch(np.array([[3], [8], [5]]), np.ones((3, 1), bool))
    update = make_update(bigram, loss_fn, keep_gradients, microbatch_rows=1)
    x = {"x": np.float32(2.0)}
    state, metrics = jax.device_get(update(jax.device_put(TrainState(x, x, np.int32(0))), batch))
    assert (metrics["loss"], metrics["biggest_max"], metrics["biggest_sum"], state.opt_state["x"]) == (32, 8, 16, 16)


# --- One step by hand: two tokens, so that the gradient of the first logit is p - 1 or p.


def toy_params():
    """The embedding is the identity, all logits are 0: both tokens have probability 1/2 after either."""
    return jax.device_put({"embedding": np.eye(2, dtype=np.float32), "head": np.zeros((2, 2), np.float32)})


def toy_batch(advantages, **fields):
    return Batch(
        tokens=np.array([[0, 1, 1], [1, 0, 0]]),
        completion_mask=np.array([[False, True, True], [False, True, False]]),
        advantages=np.array(advantages, np.float32),
        **fields,
    )


@pytest.fixture(scope="module")
def sgd(bigram):
    return optax.sgd(0.5), make_update(bigram, DAPO, optax.sgd(0.5))


def test_one_sgd_step_by_hand(bigram, sgd):
    optimizer, update = sgd
    state, metrics = update(init_train_state(toy_params(), optimizer), toy_batch([1.0, -2.0]))
    # Mean over three tokens of -A log p: 1 after 0 (A = 1), 1 after 1 (A = 1), 0 after 1 (A = -2).
    # d(-A log p_y)/dz = A (p - onehot_y), so rows of the head get 1/3 [1/2, -1/2], and 1/3 ([1/2, -1/2] + [1, -1]).
    np.testing.assert_allclose(state.params["head"], -0.5 / 3 * np.array([[0.5, -0.5], [1.5, -1.5]]), rtol=1e-6)
    np.testing.assert_allclose(metrics["loss"], np.log(2) * (1 + 1 - 2) / 3, atol=1e-7)
    np.testing.assert_allclose(metrics["grad_norm"], np.sqrt(2 * (0.5**2 + 1.5**2)) / 3, rtol=1e-6)
    np.testing.assert_allclose(metrics["entropy"], np.log(2), rtol=1e-6)
    assert figures(metrics) == (1, 0, 0)
    assert state.step == 1
    # The head was 0, so the embedding has no gradient.
    assert_same_bits(state.params["embedding"], np.eye(2))


def test_max_grad_norm_scales_the_gradient_and_reports_it_unscaled(bigram):
    norm = np.sqrt(5.0) / 3  # of the step above
    optimizer = optax.sgd(1.0)
    for limit, expected in ((0.1, 0.1), (10.0, norm)):
        update = make_update(bigram, DAPO, optimizer, max_grad_norm=limit)
        state, metrics = update(init_train_state(toy_params(), optimizer), toy_batch([1.0, -2.0]))
        np.testing.assert_allclose(np.linalg.norm(state.params["head"]), expected, rtol=1e-5)
        np.testing.assert_allclose(metrics["grad_norm"], norm, rtol=1e-6)


def test_the_state_that_goes_in_is_donated(sgd):
    optimizer, update = sgd
    before = init_train_state(toy_params(), optimizer)
    after, _ = update(before, toy_batch([1.0, -2.0]))
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(before.params))
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(after))


# --- What must move nothing: an optimiser with momentum and weight decay, which moves whatever it is given.


@pytest.fixture(scope="module")
def warm(bigram):
    """`(update, fresh)`: `fresh()` is a state after one step, with momentum in it."""
    optimizer = optax.adamw(0.1, weight_decay=0.1)
    update = make_update(bigram, grpo_loss, optimizer, microbatch_rows=1, max_grad_norm=1.0)
    state, metrics = update(init_train_state(toy_params(), optimizer), toy_batch([1.0, -2.0]))
    assert figures(metrics) == (1, 0, 0)
    state = copies(state)
    assert any(np.any(leaf != 0) for leaf in jax.tree.leaves(state.opt_state[0].mu))
    return update, lambda: jax.device_put(copies(state))


def test_the_optimiser_moves_what_it_is_given(warm):
    update, fresh = warm
    state, metrics = update(fresh(), toy_batch([1e-6, 0.0]))
    assert figures(metrics) == (1, 0, 0)
    assert state.step == 2
    assert np.any(np.asarray(state.params["head"]) != np.asarray(fresh().params["head"]))


@pytest.mark.parametrize("rubbish", [np.nan, np.inf, -np.inf])
def test_a_batch_that_is_not_finite_keeps_every_bit(warm, rubbish):
    update, fresh = warm
    state, metrics = update(fresh(), toy_batch([1.0, rubbish]))
    assert_same_bits(state, fresh())
    assert state.step == 1
    assert figures(metrics) == (0, 1, 0)
    assert not np.isfinite(metrics["loss"])
    # And the next good batch goes on from there.
    again, metrics = update(state, toy_batch([1.0, -1.0]))
    undisturbed, _ = update(fresh(), toy_batch([1.0, -1.0]))
    assert_same_bits(again, undisturbed)
    assert figures(metrics) == (1, 0, 0)


@pytest.mark.parametrize(
    "batch",
    [
        toy_batch([0.0, 0.0]),
        toy_batch([1.0, -2.0])._replace(completion_mask=np.zeros((2, 3), bool)),
        toy_batch([np.nan, 0.0])._replace(completion_mask=np.array([[False] * 3, [False, True, False]])),
    ],
    ids=["zero advantages", "no trained token", "an unscorable row and a zero"],
)
def test_nothing_to_learn_moves_nothing(warm, batch):
    update, fresh = warm
    state, metrics = update(fresh(), batch)
    assert_same_bits(state, fresh())
    assert figures(metrics) == (0, 0, 1)
    assert metrics["loss"] == 0


def test_a_finite_loss_with_a_gradient_that_is_not_is_refused(bigram):
    def loss_fn(model, params, batch, denominators):
        return jnp.sqrt(jnp.abs(params["x"])), {}

    optimizer = optax.sgd(0.1)
    update = make_update(bigram, loss_fn, optimizer)
    state, metrics = update(init_train_state({"x": jax.device_put(np.float32(0.0))}, optimizer), toy_batch([1.0, 1.0]))
    assert metrics["loss"] == 0
    assert state.params["x"] == 0
    assert figures(metrics) == (0, 1, 0)


def test_new_parameters_that_are_not_finite_are_refused(bigram):
    """Loss and gradient are finite; the step is not."""
    rate = optax.scale_by_schedule(lambda step: jnp.where(step == 1, -jnp.inf, -0.5))
    optimizer = optax.chain(optax.trace(0.9), rate)
    update = make_update(bigram, grpo_loss, optimizer, max_grad_norm=1.0)
    state, metrics = update(init_train_state(toy_params(), optimizer), toy_batch([1.0, -2.0]))
    assert figures(metrics) == (1, 0, 0)
    before = copies(state)
    for parts in (toy_batch([1.0, -2.0]), [toy_batch([1.0, -2.0])] * 2):
        state, metrics = update(state, parts)
        assert np.isfinite(metrics["loss"]) and np.isfinite(metrics["grad_norm"])
        assert figures(metrics) == (0, 1, 0)
        assert_same_bits(state, before)


@pytest.fixture(scope="module")
def once(bigram):
    """As `warm`, with a step that is computed once; each advantage is the gradient of an array."""

    def loss_fn(model, params, batch, denominators):
        return jnp.sum(params["head"] * batch.advantages[0] + params["embedding"] * batch.advantages[1]), {}

    optimizer = optax.adamw(0.1, weight_decay=0.1)
    update = make_update(bigram, loss_fn, optimizer, max_grad_norm=1.0, keeps_finite=True)
    judging = make_update(bigram, loss_fn, optimizer, max_grad_norm=1.0)
    made = [each(init_train_state(toy_params(), optimizer), toy_batch([1.0, -2.0])) for each in (update, judging)]
    assert_same_bits(*made)
    state = copies(made[0][0])
    return update, judging, lambda: jax.device_put(copies(state))


@pytest.mark.parametrize("rubbish", [np.nan, np.inf, -np.inf])
def test_a_state_with_a_number_that_is_not_finite_keeps_every_bit(once, rubbish):
    """In each array of parameters and moments, with a step that is computed once and with one that is judged."""
    update, judging, fresh = once
    leaves, structure = jax.tree.flatten(fresh())
    places = [i for i, leaf in enumerate(leaves) if leaf.dtype == np.float32]
    assert len(places) == 6
    for place in places:
        spoilt = [np.array(leaf) for leaf in leaves]
        spoilt[place][0, 1] = rubbish
        wanted = jax.tree.unflatten(structure, spoilt)
        is_endless = any(np.isposinf(leaf).any() for leaf in wanted.opt_state[0].nu.values())
        for step in (update,) if is_endless else (update, judging):  # an infinite second moment stops a parameter
            state = jax.device_put(wanted)
            for parts in (toy_batch([1.0, -2.0]), [toy_batch([1.0, -2.0])] * 2):
                state, metrics = step(state, parts)
                assert figures(metrics) == (0, 1, 0)
                assert_same_bits(state, wanted)


def test_arrays_of_others_are_tested_again(once):
    update, _, fresh = once
    state, metrics = update(fresh(), toy_batch([1.0, -2.0]))
    assert figures(metrics) == (1, 0, 0)
    other = state._replace(params=state.params | {"head": jnp.full((2, 2), jnp.nan)})
    spoilt, metrics = update(other, toy_batch([1.0, -2.0]))
    assert figures(metrics) == (0, 1, 0)
    mended, metrics = update(spoilt._replace(params=toy_params()), toy_batch([1.0, -2.0]))
    assert figures(metrics) == (1, 0, 0) and mended.step == 3


@pytest.mark.parametrize(
    ("size", "found"), [(3e38, (0, 1, 0)), (-1e18, (1, 0, 0)), (np.inf, (0, 1, 0)), (np.nan, (0, 1, 0))]
)
def test_gradients_of_any_size_leave_finite_parameters_in_a_single_step(once, size, found):
    """The square of 3e38 is no float32; smaller gradients are clipped. The step is that which is judged."""
    update, judging, fresh = once
    for factors in ([size, 1.0], [1.0, size]):  # in either array
        once_made, metrics = update(fresh(), toy_batch(factors))
        assert figures(metrics) == found
        assert_same_bits(once_made, judging(fresh(), toy_batch(factors))[0])
        assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(once_made))


# --- And learning.


def test_rows_below_one_are_refused(bigram):
    with pytest.raises(ValueError, match="microbatch_rows is 0; wanted at least 1, or None for one pass"):
        make_update(bigram, grpo_loss, optax.sgd(0.1), microbatch_rows=0)


# --- Turned down by the caller's own rule.


def test_what_is_not_accepted_moves_nothing(bigram):
    optimizer = optax.adamw(0.1, weight_decay=0.1)
    update = make_update(bigram, grpo_loss, optimizer, accept=lambda metrics: metrics["entropy"] < 0.6)
    fresh = init_train_state(toy_params(), optimizer)
    kept = copies(fresh)
    state, metrics = update(fresh, toy_batch([1.0, -2.0]))  # two equal logits: log 2 = 0.69
    assert_same_bits(state, kept)
    assert (figures(metrics), int(metrics["refused_updates"])) == ((0, 0, 0), 1)
    sure = kept._replace(params=kept.params | {"head": 3 * np.eye(2, dtype=np.float32)})
    state, metrics = update(jax.device_put(sure), toy_batch([1.0, -2.0]))
    assert (figures(metrics), int(metrics["refused_updates"]), int(state.step)) == ((1, 0, 0), 0, 1)


def test_figures_that_are_not_finite_are_not_accepted(bigram):
    optimizer = optax.sgd(0.1)
    update = make_update(bigram, grpo_loss, optimizer, accept=lambda metrics: metrics["sampler_kl"] < 1.0)
    batch = toy_batch([1.0, -2.0], sampler_logprobs=np.full((2, 3), np.nan, np.float32))
    _, metrics = update(init_train_state(toy_params(), optimizer), batch)
    assert (figures(metrics), int(metrics["refused_updates"])) == ((0, 0, 0), 1)


# --- Preferences.


# --- Several microbatches.


def test_more_microbatches_compile_nothing(bigram):
    optimizer = optax.sgd(0.1)
    update = make_update(bigram, sft_loss, optimizer, microbatch_rows=2)
    rows = np.arange(40).reshape(20, 2) % 5
    state = fresh_state(bigram_params(), optimizer)

    def batch(height):
        return Batch(rows[:height].astype(np.int32), np.array([[False, True]] * height))

    state, _ = update(state, batch(3))
    with closing(CompileCounter()) as compiles:
        for height in (4, 5, 9, 20):
            state, metrics = update(state, batch(height))
            assert metrics["applied_updates"] == 1
    assert compiles.count == 0


@pytest.mark.parametrize("num_microbatches", [1, 2])
def test_committed_parameters_compile_an_update_once(bigram, num_microbatches):
    """And hidden states are made when their microbatch is placed, not before."""
    events = []

    class States(HostStates):
        def __array__(self, dtype=None, copy=None):
            events.append("made")
            return super().__array__(dtype, copy)

    optimizer = optax.adam(0.1)
    update = make_update(bigram, sft_loss, optimizer, microbatch_rows=2)
    rows, states = np.zeros((2, 2), np.int32), States(np.ones((1, 3), np.float32), np.zeros((2, 2), np.int32))
    batch = [Batch(rows, np.array([[False, True]] * 2), teacher_hidden=states)] * num_microbatches
    state = init_train_state(jax.device_put(bigram_params(), jax.devices()[0]), optimizer)
    with closing(CompileCounter()) as compiles:
        state, _ = update(state, batch, lambda ready: events.append("queued"))
        first = compiles.count
        update(state, batch)
    assert events[: 2 * num_microbatches] == ["made", "queued"] * num_microbatches
    assert first == len(set(compiles.names(0))) == compiles.count


def test_nothing_is_no_batch(bigram):
    update = make_update(bigram, sft_loss, optax.sgd(0.1))
    with pytest.raises(ValueError, match="the sequence of microbatches is empty; wanted at least one batch"):
        update(init_train_state(bigram_params(), optax.sgd(0.1)), [])


def test_memory_is_known_before_anything_is_allocated(bigram):
    update = make_update(bigram, sft_loss, optax.sgd(0.1), microbatch_rows=2)
    state = jax.eval_shape(lambda: init_train_state(bigram_params(), optax.sgd(0.1)))
    batch = Batch(np.zeros((2, 4), np.int32), np.zeros((2, 4), bool))
    compiled = {name: lower().compile() for name, lower in update.programs(state, batch).items()}
    assert compiled["gradient"].memory_analysis().temp_size_in_bytes > 0
    assert set(compiled) == {"gradient", "step"}


def test_gradients_of_a_microbatch_are_never_beside_their_sums():
    config = replace(model_preset("qwen3-200k"), num_layers=16)
    model, optimizer = decoder(config), optax.sgd(0.1)
    state = jax.eval_shape(lambda: init_train_state(model.init(jax.random.key(0)), optimizer, model))
    batch = Batch(np.zeros((1, 8), np.int32), np.ones((1, 8), bool))
    lower = make_update(model, sft_loss, optimizer).programs(state, batch)["gradient"]
    trained = sum(leaf.size * 4 for leaf in jax.tree.leaves(state.params["layers"]))
    assert lower().compile().memory_analysis().temp_size_in_bytes < trained / 2


@pytest.mark.parametrize("is_bound", [True, False])
def test_the_state_is_bound_to_a_device_if_the_parameters_are(is_bound):
    params = {"kernel": np.ones((2, 3), np.float32), "bias": np.ones(3, np.float32)}
    params = jax.device_put(params, jax.devices()[0] if is_bound else None)
    state = init_train_state(params, optax.adamw(1e-3))
    assert {leaf.committed for leaf in jax.tree.leaves(state)} == {is_bound}
