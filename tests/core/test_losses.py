"""Policy losses: published values and gradients, numbers by hand where those are silent, and what changes nothing."""

import inspect
import json
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxft.core.advantages import reward_to_go
from jaxft.core.losses import PRESETS, k1_penalty, kl_penalty, policy_loss, preference_loss, value_loss
from jaxft.core.objectives import dpo_loss, score_batch
from jaxft.core.reductions import aggregate, count_tokens
from jaxft.core.types import Batch

VECTORS = json.loads((Path(__file__).parents[1] / "data" / "oracles" / "policy_losses.json").read_text())
ARRAYS = ("logprobs", "old_logprobs", "advantages", "completion_mask")


QUICKLY = {"xla_backend_optimization_level": 0}
"""Compiles in half the time, for programs that run once."""

SHAPE = (8, 12)
"""Every example is padded to this, or most of the time would go into compiling each operation for each shape."""


def value_and_gradient(logprobs, old_logprobs, advantages, mask, *, ref_logprobs=None, **knobs):
    """Loss, gradient with respect to `logprobs`, and metrics; computed at `SHAPE`."""

    def padded(x):
        widths = [(0, want - have) for want, have in zip(SHAPE, np.shape(x), strict=False)]
        return None if x is None else jnp.array(np.pad(x, widths))

    old, advantages, masks, ref = map(padded, (old_logprobs, advantages, mask, ref_logprobs))
    value, gradient, metrics = at_own_shape(padded(logprobs), old, advantages, masks, ref_logprobs=ref, **knobs)
    gradient = np.asarray(gradient)
    assert np.all(gradient[~np.asarray(masks)] == 0)
    return value, gradient[: mask.shape[0], : mask.shape[1]], metrics


def at_own_shape(logprobs, old_logprobs, advantages, mask, **knobs):
    """The same without the padding."""

    def loss_of(logprobs):
        return policy_loss(logprobs, old_logprobs, advantages, mask, **knobs)

    (value, metrics), gradient = jax.value_and_grad(loss_of, has_aux=True)(logprobs)
    return value, gradient, metrics


def knobs_of(case, batch):
    return dict(
        loss=case["loss_type"],
        importance_level=case["importance_sampling_level"],
        clip_low=case["epsilon_low"],
        clip_high=case["epsilon_high"],
        delta=case["delta"],
        beta=case["beta"],
        kl="k3_trl" if case["kl_bias_correction"] else "k3_unweighted",
        max_completion_tokens=batch["max_completion_tokens"] if case["loss_type"] == "dr_grpo" else None,
    )


def check_vectors(dtype, rtol, atol):
    def of_all_cases(batches):
        """One program: 84 would take longer to compile than all other tests here take."""
        results = []
        for case in VECTORS["cases"]:
            arrays, knobs = batches[case["batch"]], knobs_of(case, VECTORS["batches"][case["batch"]])
            results.append(
                at_own_shape(*(arrays[name] for name in ARRAYS), ref_logprobs=arrays["ref_logprobs"], **knobs)[:2]
            )
        return results

    batches = [
        {
            name: jnp.array(batch[name], bool if name == "completion_mask" else dtype)
            for name in (*ARRAYS, "ref_logprobs")
        }
        for batch in VECTORS["batches"]
    ]
    wrong = []
    results = jax.jit(of_all_cases, compiler_options=QUICKLY)(batches)
    for case, (value, gradient) in zip(VECTORS["cases"], results, strict=True):
        assert value.dtype == gradient.dtype == dtype
        if not (np.allclose(value, case["loss"], rtol, atol) and np.allclose(gradient, case["grad"], rtol, atol)):
            wrong.append({name: case[name] for name in case if name not in ("loss", "grad")})
    assert len(VECTORS["cases"]) == 84
    assert not wrong, f"{len(wrong)} of 84 cases disagree: {wrong[:3]}"


def test_published_values_and_gradients_in_float64():
    with jax.enable_x64(True):
        check_vectors(jnp.float64, rtol=0, atol=1e-10)


def test_published_values_and_gradients_in_float32():
    check_vectors(jnp.float32, rtol=1e-5, atol=1e-6)


# --- Numbers by hand. Log-probabilities of 0 stand for "only the ratio matters".


def rows(*values):
    return jnp.array(values, jnp.float32)


def log_rows(*ratios):
    """`(logprobs, old_logprobs)` with these ratios between them."""
    return jnp.zeros_like(rows(*ratios)), -jnp.log(rows(*ratios))


def all_trained(like):
    return jnp.ones(like.shape, bool)


def close(got, expected):
    np.testing.assert_allclose(got, expected, rtol=2e-6, atol=1e-7)


def test_cispo_cap_bites_and_keeps_the_gradient():
    logprobs = rows([-1.0, -2.0])
    old = logprobs - jnp.log(rows([8.0, 2.0]))
    value, gradient, metrics = value_and_gradient(logprobs, old, jnp.array([3.0]), all_trained(old), loss="cispo")
    close(value, -3 * (5 * -1.0 + 2 * -2.0) / 2)
    close(gradient, [[-3 * 5 / 2, -3 * 2 / 2]])
    close(metrics["clip_high_fraction"], 0.5)
    close(metrics["clip_low_fraction"], 0.0)


def test_cispo_has_no_lower_bound():
    logprobs, old = log_rows([0.001, 1.0])
    _, gradient, _ = value_and_gradient(logprobs, old, jnp.array([1.0]), all_trained(old), loss="cispo")
    close(gradient, [[-0.001 / 2, -1 / 2]])


def test_cispo_cap_at_sequence_level():
    logprobs = rows([-1.0, -3.0])
    old = logprobs - jnp.log(rows([64.0, 1.0]))  # geometric mean 8, capped at 5
    value, gradient, _ = value_and_gradient(
        logprobs, old, jnp.array([1.0]), all_trained(old), loss="cispo", importance_level="sequence"
    )
    close(value, 5 * 4 / 2)
    close(gradient, [[-5 / 2, -5 / 2]])


def test_sequence_clip_at_a_positive_advantage():
    logprobs, old = log_rows([3.0, 0.75], [1.0, 1.21])  # geometric means 1.5, clipped to 1.2, and 1.1
    knobs = dict(loss="grpo", importance_level="sequence")
    value, gradient, metrics = value_and_gradient(logprobs, old, jnp.array([1.0, 1.0]), all_trained(old), **knobs)
    close(value, -(1.2 + 1.1) / 2)
    close(gradient, [[0, 0], [-1.1 / 2 / 2, -1.1 / 2 / 2]])
    close(metrics["clip_high_fraction"], 0.5)


def test_gspo_clips_are_narrow():
    logprobs, old = log_rows([1.0005, 1.0005], [0.9995, 0.9995])
    value, gradient, _ = value_and_gradient(logprobs, old, jnp.array([1.0, -1.0]), all_trained(old), loss="gspo")
    close(value, (-(1 + 4e-4) + (1 - 3e-4)) / 2)
    close(gradient, jnp.zeros((2, 2)))


def test_dual_clip_with_dr_grpo():
    logprobs, old = log_rows([3.0, 1.25])
    knobs = dict(loss="dr_grpo", delta=1.5, max_completion_tokens=4)
    value, gradient, _ = value_and_gradient(logprobs, old, jnp.array([-2.0]), all_trained(old), **knobs)
    close(value, (1.5 * 2 + 1.25 * 2) / 4)
    close(gradient, [[0, 1.25 * 2 / 4]])
    # A positive advantage knows nothing of delta.
    value, _, _ = value_and_gradient(logprobs, old, jnp.array([2.0]), all_trained(old), **knobs)
    close(value, -(1.2 * 2 + 1.2 * 2) / 4)


@pytest.mark.parametrize(
    ("loss", "value", "first", "second"),
    [
        ("grpo", (1.1 + 0.9 * 2) / 2 / 2 - 1 / 2, [1.1 / 4, 0, 1.8 / 4], -1 / 2),
        ("dapo", (1.1 + 0.9 * 2 - 1) / 3, [1.1 / 3, 0, 1.8 / 3], -1 / 3),
        ("dr_grpo", (1.1 + 0.9 * 2 - 1) / (2 * 10), [1.1 / 20, 0, 1.8 / 20], -1 / 20),
    ],
)
def test_empty_rows_and_holes_with_token_advantages(loss, value, first, second):
    logprobs, old = log_rows([1.1, 7.0, 0.9], [2.0, 1.0, 2.0], [5.0, 5.0, 5.0])
    mask = jnp.array([[True, False, True], [False, True, False], [False, False, False]])
    advantages = rows([-1.0, 9.0, -2.0], [9.0, 1.0, 9.0], [9.0, 9.0, 9.0])
    knobs = dict(loss=loss, max_completion_tokens=10)
    got, gradient, metrics = value_and_gradient(logprobs, old, advantages, mask, **knobs)
    close(got, value)
    close(gradient, [first, [0, second, 0], [0, 0, 0]])
    close(metrics["policy_loss"], value)
    close(metrics["log_ratio_abs_max"], -np.log(0.9))


@pytest.mark.parametrize("loss", PRESETS)
def test_equal_token_advantages_are_the_value_of_row_advantages(loss):
    logprobs, old = log_rows([1.1, 0.7, 0.9], [2.0, 1.0, 0.5])
    old = None if loss == "reinforce" else old
    mask = jnp.array([[True, True, True], [True, True, False]])
    per_row = jnp.array([1.5, -0.5])
    per_token = jnp.broadcast_to(per_row[:, None], (2, 3))
    knobs = dict(loss=loss, max_completion_tokens=5)
    close(
        value_and_gradient(logprobs, old, per_token, mask, **knobs)[0],
        value_and_gradient(logprobs, old, per_row, mask, **knobs)[0],
    )


def test_gspo_token_keeps_credit_at_its_token():
    logprobs, old = log_rows([1.21, 1.0])  # s = 1.1
    advantages = rows([3.0, 0.0])
    knobs = dict(loss="gspo", clip_low=0.2, clip_high=0.2)
    value, gradient, _ = value_and_gradient(logprobs, old, advantages, all_trained(old), **knobs)
    close(value, -1.1 * 3 / 2)
    close(gradient, [[-1.1 * 3 / 2, 0]])
    # One advantage for the row: the gradient goes through all of its tokens.
    _, gradient, _ = value_and_gradient(logprobs, old, jnp.array([3.0]), all_trained(old), **knobs)
    close(gradient, [[-1.1 * 3 / 2, -1.1 * 3 / 2]])


def test_reinforce_is_advantage_times_score():
    logprobs = rows([-1.0, -2.0], [-3.0, -9.0])
    mask = jnp.array([[True, True], [True, False]])
    advantages = jnp.array([2.0, -1.0])
    value, gradient, _ = value_and_gradient(logprobs, None, advantages, mask, loss="reinforce")
    close(value, -(2 * -1 + 2 * -2 - 1 * -3) / 3)
    close(gradient, [[-2 / 3, -2 / 3], [1 / 3, 0]])
    knobs = dict(loss="reinforce", aggregation="seq_mean_token_mean")
    close(value_and_gradient(logprobs, None, advantages, mask, **knobs)[1], [[-2 / 4, -2 / 4], [1 / 2, 0]])


@pytest.mark.parametrize("loss", PRESETS)
def test_on_policy_gradient_is_that_of_reinforce(loss):
    logprobs, mask, advantages = rows([-1.0, -2.0]), jnp.ones((1, 2), bool), jnp.array([3.0])
    knobs = dict(loss=loss, aggregation="token_mean")
    close(value_and_gradient(logprobs, None, advantages, mask, **knobs)[1], [[-3 / 2, -3 / 2]])
    if loss != "reinforce":
        close(value_and_gradient(logprobs, logprobs, advantages, mask, **knobs)[1], [[-3 / 2, -3 / 2]])


@pytest.mark.parametrize(
    ("kl", "value", "gradient"),
    [  # ratio 2 against old, rho = log 3: k3 = 2 - log 3, its derivative by logprobs 1 - 3
        ("k2", 2 * np.log(3) ** 2 / 2, -2 * np.log(3)),
        ("k3", 2 * (2 - np.log(3)), 2 * -2),
        ("k3_unweighted", 2 - np.log(3), -2),
        ("k3_ratio", 2 * (2 - np.log(3)), 2 * (2 - np.log(3)) - 2 * 2),
        ("k3_trl", 2 * (2 - np.log(3)), 2 * (2 - np.log(3)) - 2 * 2),
    ],
)
def test_kl_terms_by_hand(kl, value, gradient):
    logprobs, old = log_rows([2.0])
    got = value_and_gradient(
        logprobs, old, jnp.zeros(1), all_trained(old), beta=0.5, kl=kl, ref_logprobs=jnp.log(rows([3.0]))
    )
    close(got[0], 0.5 * value)
    close(got[1], [[0.5 * gradient]])
    close(got[2]["kl"], 2 - np.log(3))


def test_k3_trl_takes_the_ratio_of_the_row_and_k3_ratio_that_of_the_token():
    logprobs, old = log_rows([4.0, 1.0])  # s = 2
    ref = jnp.log(rows([3.0, 1.0]))  # the second token has no divergence
    knobs = dict(importance_level="sequence", beta=1.0, ref_logprobs=ref)
    loss = partial(policy_loss, logprobs, old, jnp.zeros(1), all_trained(old), **knobs)
    close(loss(kl="k3_trl")[0], 2 * (2 - np.log(3)) / 2)
    close(loss(kl="k3_ratio")[0], 4 * (2 - np.log(3)) / 2)


# --- What a KL term pulls at: expectations over all tokens of a vocabulary, nothing sampled.

POLICY, REFERENCE, OLD = [0.3, -0.7, 1.1, 0.0], [-0.2, 0.4, 0.9, -1.3], [0.5, -0.1, 0.2, 0.6]


def expected_gradient(kl, policy, old):
    """Mean over tokens drawn from `old` of the gradient, with respect to the policy's logits, of the KL term."""
    logprobs, to_logits = jax.vjp(jax.nn.log_softmax, policy)
    old_logprobs, ref_logprobs = jax.nn.log_softmax(old), jax.nn.log_softmax(jnp.array(REFERENCE))
    size = len(policy)
    _, per_token, _ = at_own_shape(  # a row per token of the vocabulary
        logprobs[:, None],
        old_logprobs[:, None],
        jnp.zeros(size),
        jnp.ones((size, 1), bool),
        beta=1.0,
        kl=kl,
        ref_logprobs=ref_logprobs[:, None],
    )
    return to_logits(jnp.exp(old_logprobs) * size * per_token[:, 0])[0]


def kl_gradients(policy):
    """Exact gradients of KL(policy || ref) and of KL(ref || policy)."""
    ref = jax.nn.log_softmax(jnp.array(REFERENCE))

    def reverse(logits):
        logprobs = jax.nn.log_softmax(logits)
        return jnp.sum(jnp.exp(logprobs) * (logprobs - ref))

    def forward(logits):
        return jnp.sum(jnp.exp(ref) * (ref - jax.nn.log_softmax(logits)))

    return jax.grad(reverse)(policy), jax.grad(forward)(policy)


def test_kl_directions_by_exact_enumeration():
    def expectations(policy, old):
        kinds = ("k2", "k3", "k3_ratio", "k3_unweighted")
        return {kl: expected_gradient(kl, policy, old) for kl in kinds}, *kl_gradients(policy)

    with jax.enable_x64(True):
        policy, old = jnp.array(POLICY), jnp.array(OLD)
        jitted = jax.jit(expectations, compiler_options=QUICKLY)
        exact = partial(np.testing.assert_allclose, rtol=0, atol=1e-13)
        for tokens_from in (policy, old):
            expected, reverse, forward = jitted(policy, tokens_from)
            assert reverse.dtype == jnp.float64
            assert np.abs(reverse - forward).max() > 0.05  # the two directions can be told apart
            exact(expected["k3_ratio"], reverse)
            exact(expected["k2"], reverse)
            exact(expected["k3"], forward)
            is_forward = np.allclose(expected["k3_unweighted"], forward, rtol=0, atol=1e-13)
            assert is_forward == (tokens_from is policy)  # biased after the first update


def test_k1_has_no_gradient_and_is_refused():
    with jax.enable_x64(True):
        logprobs, to_logits = jax.vjp(jax.nn.log_softmax, jnp.array(POLICY))
        # The derivative of -rho by logprobs is 1 for every token.
        np.testing.assert_allclose(to_logits(jnp.exp(logprobs))[0], np.zeros(4), atol=1e-15)
    x = jnp.zeros((1, 1))
    with pytest.raises(ValueError, match=r"kl='k1' in the loss has gradient 0 in expectation.*use 'k3_ratio'"):
        policy_loss(x, x, jnp.zeros(1), jnp.ones((1, 1), bool), beta=0.1, kl="k1", ref_logprobs=x)


# --- Nothing that is masked, and no size of a number, makes a gradient that is not finite.

LEVELS = [(loss, "token") for loss in PRESETS] + [(loss, "sequence") for loss in PRESETS if loss != "reinforce"]


def example(loss):
    """Five rows, one of them empty, with holes; reinforce goes without `old_logprobs`."""
    rng = np.random.default_rng(5)
    draw = lambda *shape: jnp.array(rng.normal(size=shape), jnp.float32)  # noqa: E731
    logprobs = -jnp.abs(draw(5, 6))
    mask = jnp.array(rng.random((5, 6)) < 0.7).at[3].set(False)
    knobs = dict(loss=loss, beta=0.1, max_completion_tokens=9)
    old = None if loss == "reinforce" else logprobs + 0.3 * draw(5, 6)
    return logprobs, old, draw(5), mask, logprobs + 0.3 * draw(5, 6), knobs


@pytest.mark.parametrize(("loss", "level"), LEVELS)
def test_padding_may_hold_anything(loss, level):
    logprobs, old, advantages, mask, ref, knobs = example(loss)
    knobs["importance_level"] = level
    clean = value_and_gradient(logprobs, old, advantages, mask, ref_logprobs=ref, **knobs)
    for rubbish in (jnp.nan, -jnp.inf, 1e9):
        spoil = lambda x: None if x is None else jnp.where(mask, x, rubbish)  # noqa: B023, E731
        spoilt = value_and_gradient(
            spoil(logprobs),
            spoil(old),
            advantages.at[3].set(rubbish),  # an unscorable trajectory
            mask,
            ref_logprobs=spoil(ref),
            **knobs,
        )
        jax.tree.map(np.testing.assert_array_equal, spoilt, clean)
    per_token = jnp.where(mask, advantages[:, None], jnp.nan)
    assert jnp.isfinite(value_and_gradient(logprobs, old, per_token, mask, ref_logprobs=ref, **knobs)[1]).all()


@pytest.mark.parametrize("loss", PRESETS)
def test_nothing_trained_is_a_loss_of_zero(loss):
    logprobs, old, advantages, mask, ref, knobs = example(loss)
    got = value_and_gradient(logprobs, old, advantages, jnp.zeros_like(mask), ref_logprobs=ref, **knobs)
    for leaf in jax.tree.leaves(got):
        assert np.array_equal(leaf, np.zeros_like(leaf))


@pytest.mark.parametrize("loss", ["grpo", "dapo", "gspo", "cispo"])
def test_log_ratio_of_100_is_clamped(loss):
    logprobs = rows([-0.5, -0.5], [-0.5, -0.5])
    old = logprobs - rows([100.0, 100.0], [-100.0, -100.0])
    for sign in (1.0, -1.0):
        advantages = jnp.array([sign, sign])
        value, gradient, metrics = value_and_gradient(logprobs, old, advantages, all_trained(old), loss=loss)
        assert jnp.isfinite(value)
        assert jnp.isfinite(gradient).all()
        close(metrics["log_ratio_abs_max"], 100.0)
        close(metrics["log_ratio_clamped_fraction"], 1.0)
    if loss == "grpo":
        np.testing.assert_allclose(value, (np.exp(20.0) + np.exp(-20.0)) / 2, rtol=1e-5)
        value, gradient, _ = value_and_gradient(logprobs, old, advantages, all_trained(old), delta=2.0)
        close(value, (2.0 + 0.8) / 2)
        close(gradient, jnp.zeros((2, 2)))


@pytest.mark.parametrize("kl", ["k2", "k3", "k3_unweighted", "k3_ratio", "k3_trl"])
@pytest.mark.parametrize("rho", [100.0, 25.0, -25.0, -100.0])
def test_far_references_do_not_push_the_policy_away(kl, rho):
    logprobs = rows([-0.5])
    value, gradient, _ = value_and_gradient(
        logprobs, logprobs, jnp.zeros(1), jnp.ones((1, 1), bool), beta=1.0, kl=kl, ref_logprobs=logprobs + rho
    )
    assert jnp.isfinite(value)
    assert value > 0
    assert jnp.isfinite(gradient).all()
    # The ratio's own gradient is the score function's, whose mean alone has a direction.
    if kl in ("k2", "k3", "k3_unweighted"):
        assert gradient[0, 0] * rho <= 0


# --- What must change nothing.


@pytest.mark.parametrize("loss", PRESETS)
def test_order_and_microbatches_change_nothing(loss):
    logprobs, old, advantages, mask, ref, knobs = example(loss)

    def take(index):
        return value_and_gradient(
            logprobs[index],
            None if old is None else old[index],
            advantages[index],
            mask[index],
            ref_logprobs=ref[index],
            denominators=count_tokens(mask),
            **knobs,
        )

    value, gradient, metrics = take(jnp.arange(5))
    order = jnp.array([3, 0, 4, 2, 1])
    permuted = take(order)
    close(permuted[0], value)
    close(permuted[1], gradient[order])

    parts = [take(jnp.array(index)) for index in ([0, 3], [1], [2, 4])]
    close(sum(part[0] for part in parts), value)
    close(jnp.concatenate([part[1] for part in parts])[jnp.array([0, 2, 3, 1, 4])], gradient)
    for name, whole in metrics.items():
        of_parts = [part[2][name] for part in parts]
        close(max(of_parts) if name.endswith("_max") else sum(of_parts), whole)


@pytest.mark.parametrize(("loss", "level"), [("grpo", "token"), ("dr_grpo", "sequence"), ("cispo", "sequence")])
def test_neither_padding_nor_jit_changes_anything(loss, level):
    logprobs, old, advantages, mask, ref, knobs = example(loss)
    knobs["importance_level"] = level
    jitted = jax.jit(partial(at_own_shape, **knobs))
    got = jitted(logprobs, old, advantages, mask, ref_logprobs=ref)
    jax.tree.map(close, got, value_and_gradient(logprobs, old, advantages, mask, ref_logprobs=ref, **knobs))


# --- Refusals.


@pytest.mark.parametrize(
    ("knobs", "message"),
    [
        (dict(loss="grop"), "loss is 'grop'; wanted one of grpo, dapo, bnpo, dr_grpo, gspo, cispo, ppo, reinforce"),
        (dict(importance_level="row"), "importance_level is 'row'; wanted token or sequence"),
        (dict(aggregation="sum"), "aggregation is 'sum'; wanted seq_mean_token_mean, token_mean or constant"),
        (dict(loss="dr_grpo"), "max_completion_tokens is None; this loss divides by it"),
        (dict(loss="cispo", delta=9.0), "delta is 9.0, but 'cispo' has no clipped surrogate"),
        (dict(loss="reinforce", delta=9.0), "delta is 9.0, but 'reinforce' has no clipped surrogate"),
        (dict(delta=1.2), r"delta is 1.2; wanted more than 1 \+ clip_high = 1.2"),
        (dict(beta=0.1), "beta is 0.1, but ref_logprobs is None; give the reference's log-probabilities"),
        (
            dict(loss="reinforce"),
            "'reinforce' has no ratio and so allows one update per rollout; pass old_logprobs=None",
        ),
        (dict(loss="reinforce", importance_level="sequence"), "importance_level is 'sequence', but 'reinforce' has no"),
        (dict(kl="k4"), "kl is 'k4'"),
        (dict(beta=-0.1), "beta is -0.1; wanted at least 0"),
        (dict(beta=0.1, kl="k4", ref_logprobs=jnp.zeros((2, 3))), "kl is 'k4'; wanted one of k2, k3, k3_ratio"),
    ],
)
def test_refusals(knobs, message):
    x = jnp.zeros((2, 3))
    with pytest.raises(ValueError, match=message):
        policy_loss(x, x, jnp.zeros(2), jnp.ones((2, 3), bool), **knobs)


def test_shapes_that_disagree_are_refused():
    # As users call it: without the checks of annotations that this test session adds.
    loss = inspect.unwrap(policy_loss)
    x, other, mask = jnp.zeros((2, 3)), jnp.zeros((2, 4)), jnp.ones((2, 3), bool)
    with pytest.raises(ValueError, match=r"old_logprobs has shape \(2, 4\); wanted that of logprobs, \(2, 3\)"):
        loss(x, other, jnp.zeros(2), mask)
    with pytest.raises(ValueError, match=r"completion_mask has shape \(2, 4\); wanted that of logprobs"):
        loss(x, x, jnp.zeros(2), jnp.ones((2, 4), bool))
    with pytest.raises(ValueError, match=r"ref_logprobs has shape \(2, 4\); wanted that of logprobs"):
        loss(x, x, jnp.zeros(2), mask, beta=0.1, ref_logprobs=other)
    with pytest.raises(ValueError, match=r"advantages have shape \(3,\); wanted \(2,\) or \(2, 3\)"):
        loss(x, x, jnp.zeros(3), mask)
    with pytest.raises(ValueError, match=r"policy_weights has shape \(2, 4\); wanted that of logprobs"):
        loss(x, x, jnp.zeros(2), mask, policy_weights=other)
    segments = jnp.zeros((2, 3), jnp.int32)
    with pytest.raises(ValueError, match=r"advantages have shape \(2,\); wanted \(2, 3\)"):
        loss(x, x, jnp.zeros(2), mask, segment_ids=segments)


@pytest.mark.parametrize(
    ("loss", "of_trajectories", "of_rows"), [("grpo", 0.0, 0.5), ("gspo", 0.0, 0.5), ("dr_grpo", 0.0, 0.0)]
)
def test_a_trajectory_in_three_rows_counts_once(loss, of_trajectories, of_rows):
    """One of advantage +1 in a row, one of -1 in three; of six trained tokens each."""
    mask = jnp.arange(6) < jnp.array([[6], [3], [2], [1]])
    given = dict(advantages=jnp.array([1.0, -1, -1, -1]), loss=loss, max_completion_tokens=6)
    x, six = jnp.full((4, 6), -1.0), jnp.full(SHAPE, 6.0)
    value, gradient, _ = value_and_gradient(x, x, mask=mask, trajectory_tokens=six, **given)
    close(value, of_trajectories)
    close(gradient, np.where(mask, np.array([[-1], [1], [1], [1]]) / 12, 0))
    value, gradient, _ = value_and_gradient(x, x, mask=mask, **given)
    close(value, of_rows)
    close(jnp.abs(gradient).sum(), 1.0 if loss != "dr_grpo" else 0.5)  # divided by the rows


def test_ratios_at_sequence_level_are_those_of_a_row_of_a_trajectory():
    logprobs, old = log_rows([1.5, 1.0], [0.5, 0.5])
    one, four = jnp.ones(2), jnp.full(SHAPE, 4.0)
    close(
        value_and_gradient(
            logprobs, old, one, all_trained(old), loss="gspo", clip_low=0.9, clip_high=0.9, trajectory_tokens=four
        )[0],
        -(2 * 1.5**0.5 + 2 * 0.5) / 4,
    )


def test_pieces_refuse_unknown_names_too():
    x, mask = jnp.zeros((1, 2)), jnp.ones((1, 2), bool)
    with pytest.raises(ValueError, match="kl is 'k9'"):
        kl_penalty("k9", x, x, x)
    with pytest.raises(ValueError, match="aggregation is 'mean'"):
        aggregate(x, mask, count_tokens(mask), "mean")


def test_policy_weights_scale_the_policy_term_alone():
    logprobs, old = log_rows([1.1, 0.9])
    ref, weights = logprobs + jnp.log(2.0), jnp.array([[2.0, 0.0]])
    knobs = dict(loss="dapo", beta=0.5, kl="k3_unweighted", ref_logprobs=ref)
    plain = at_own_shape(logprobs, old, jnp.array([1.0]), all_trained(old), **knobs)
    weighted = at_own_shape(logprobs, old, jnp.array([1.0]), all_trained(old), policy_weights=weights, **knobs)
    close(plain[0] - weighted[0], -(1.1 + 0.9) / 2 + 2 * 1.1 / 2)
    close(plain[1] - weighted[1], [[-1.1 / 2 + 2 * 1.1 / 2, -0.9 / 2]])


def test_dual_clip_counts_its_bites():
    logprobs, old = log_rows([9.0, 9.0, 2.0, 9.0])
    advantages = rows([-1.0, 1.0, -1.0, -1.0])
    mask = jnp.array([[True, True, True, False]])
    _, _, metrics = at_own_shape(logprobs, old, advantages, mask, delta=3.0)
    close(metrics["delta_fraction"], 1 / 3)


def test_clamped_references_are_counted():
    logprobs = rows([0.0, 0.0, -50.0, 0.0])
    ref = rows([-21.0, -1.0, 0.0, 99.0])
    mask = jnp.array([[True, True, True, False]])
    _, gradient, metrics = at_own_shape(logprobs, None, jnp.ones(1), mask, beta=0.1, ref_logprobs=ref)
    close(metrics["kl_clamped_fraction"], 2 / 3)
    assert np.isfinite(gradient).all()


def test_value_loss_by_hand():
    values, old, returns = rows([2.0, 0.1, 1.0, 9.0]), rows([0.0, 0.0, 2.0, 0.0]), rows([3.0, 1.0, 0.0, 0.0])
    mask = jnp.array([[True, True, True, False]])
    # Clipped to 0.2 of 0: (0.2 - 3)^2 > 1. Not clipped: 0.9^2. Clipped to 1.8: 1.8^2 > 1.
    (value, metrics), gradient = jax.value_and_grad(value_loss, has_aux=True)(values, old, returns, mask)
    close(value, (2.8**2 + 0.9**2 + 1.8**2) / 6)
    close(gradient, [[0.0, -0.9 / 3, 0.0, 0.0]])
    close(metrics["value_clip_fraction"], 2 / 3)
    unclipped, _ = value_loss(values, old, returns, mask, value_clip=None)
    close(unclipped, (1.0 + 0.9**2 + 1.0) / 6)


def test_the_clip_of_values_is_counted_only_where_it_takes_the_gradient_away():
    """Within the clip both errors are one number; that they round differently is no bite."""
    draw = np.random.default_rng(0)
    old = jnp.array(draw.normal(size=(8, 64)) * 3, jnp.float32)
    values = old + jnp.array(draw.uniform(-0.19, 0.19, size=old.shape), jnp.float32)
    returns = jnp.array(draw.normal(size=old.shape) * 3, jnp.float32)
    assert value_loss(values, old, returns, jnp.ones(old.shape, bool))[1]["value_clip_fraction"] == 0


def test_weights_on_untrained_tokens_are_free():
    logprobs, old = log_rows([1.1, 0.9])
    mask = jnp.array([[True, False]])
    knobs = dict(loss="dapo")
    plain = at_own_shape(logprobs, old, jnp.array([1.0]), mask, policy_weights=jnp.array([[1.0, 1.0]]), **knobs)
    rubbish = at_own_shape(logprobs, old, jnp.array([1.0]), mask, policy_weights=jnp.array([[1.0, jnp.nan]]), **knobs)
    close(rubbish[0], plain[0])
    close(rubbish[1], plain[1])


def test_at_sequence_level_a_token_keeps_its_own_credit():
    """GSPO-token: the value is the ratio s of the row, the gradient `s A_t` of each token; also with weights."""
    logprobs, old = log_rows([4.0, 1.0])  # s = 2
    mask, knobs = all_trained(old), dict(loss="grpo", importance_level="sequence", clip_high=10.0)
    value, gradient, _ = at_own_shape(logprobs, old, jnp.array([[1.0, 3.0]]), mask, **knobs)
    close(value, -(2 * 1 + 2 * 3) / 2)
    close(gradient, [[-2 * 1 / 2, -2 * 3 / 2]])
    weights = jnp.array([[1.0, 3.0]])
    value, gradient, _ = at_own_shape(logprobs, old, jnp.array([1.0]), mask, policy_weights=weights, **knobs)
    close(value, -(2 * 1 + 2 * 3) / 2)
    close(gradient, [[-2 * 1 / 2, -2 * 3 / 2]])


V = 3
DRAW = np.random.default_rng(11)
FIRST, SECOND = np.divmod(np.arange(V * V), V)
"""All sequences, a row each."""


def make_logits():
    """Return logits of the first token `[V]`, and of the second token after each first one `[V V]`."""
    return {"first": DRAW.normal(size=V), "second": DRAW.normal(size=(V, V))}


POLICY_LOGITS, OLD_LOGITS, REFERENCE_LOGITS = make_logits(), make_logits(), make_logits()


def sequence_logprobs(logits):
    """Log-probabilities of the two tokens of every sequence, `[V V, 2]`."""
    first, second = jax.nn.log_softmax(logits["first"]), jax.nn.log_softmax(logits["second"])
    return jnp.stack([first[FIRST], second[FIRST, SECOND]], axis=1)


def probabilities(logits):
    return jnp.exp(sequence_logprobs(logits).sum(axis=1))


def kl_at_fixed_prefixes(policy, old, ref, direction):
    """Per-state KLs, the states weighted as `old` visits them."""

    def kl(p, q):
        p, q = (p, q) if direction == "reverse" else (q, p)
        return jnp.sum(jnp.exp(p) * (p - q), axis=-1)

    normal = {name: [jax.nn.log_softmax(x[name]) for x in (policy, ref)] for name in policy}
    visits = jax.nn.softmax(old["first"])
    return kl(*normal["first"]) + jnp.sum(visits * kl(*normal["second"]))


def expected_loss(policy, old, per_token):
    """The mean over sequences drawn from `old` of the summed term."""
    return jnp.sum(jax.lax.stop_gradient(probabilities(old))[:, None] * per_token)


def assert_same(got, expected):
    scale = max(np.abs(leaf).max() for leaf in jax.tree.leaves(expected))
    for mine, theirs in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        assert theirs.dtype == jnp.float64
        assert np.abs(mine - theirs).max() <= 1e-6 * scale
    assert scale > 0.01


@pytest.mark.parametrize(("kind", "direction"), [("k2", "reverse"), ("k3_ratio", "reverse"), ("k3", "forward")])
@pytest.mark.parametrize("is_on_policy", [True, False])
def test_terms_in_the_loss_have_the_gradient_of_the_states_kl(kind, direction, is_on_policy):
    with jax.enable_x64(True):
        policy, old, ref = (
            jax.tree.map(jnp.array, x)
            for x in (POLICY_LOGITS, POLICY_LOGITS if is_on_policy else OLD_LOGITS, REFERENCE_LOGITS)
        )

        def of_terms(policy):
            logprobs = sequence_logprobs(policy)
            rho, log_ratio = sequence_logprobs(ref) - logprobs, logprobs - sequence_logprobs(old)
            return expected_loss(policy, old, kl_penalty(kind, rho, log_ratio, jnp.exp(log_ratio)))

        expected = jax.grad(kl_at_fixed_prefixes)(policy, old, ref, direction)
        assert_same(jax.jit(jax.grad(of_terms))(policy), expected)


@pytest.mark.parametrize("is_per_token", [True, False])
def test_k1_in_the_reward_has_the_gradient_of_the_sequences_kl(is_per_token):
    """As the loss of `reinforce` with no other reward; per token with rewards to go, or summed over the sequence."""
    with jax.enable_x64(True):
        policy, ref = (jax.tree.map(jnp.array, x) for x in (POLICY_LOGITS, REFERENCE_LOGITS))
        mask = jnp.ones((V * V, 2), bool)

        def of_reinforce(policy):
            logprobs = sequence_logprobs(policy)
            rewards = -k1_penalty(logprobs, sequence_logprobs(ref), mask)
            advantages = reward_to_go(rewards, mask) if is_per_token else rewards.sum(axis=1)
            # The mean over rows of a constant budget of 1, rows weighted by how likely they are.
            weights = jax.lax.stop_gradient(probabilities(policy) * V * V)
            weighted = advantages * (weights[:, None] if is_per_token else weights)
            knobs = dict(loss="reinforce", aggregation="constant", max_completion_tokens=1)
            return policy_loss(logprobs, None, weighted, mask, **knobs)[0]

        def kl_of_sequences(policy):
            return jnp.sum(probabilities(policy) * (sequence_logprobs(policy) - sequence_logprobs(ref)).sum(axis=1))

        assert_same(jax.jit(jax.grad(of_reinforce))(policy), jax.grad(kl_of_sequences)(policy))


def test_k1_in_the_loss_would_have_none():
    with jax.enable_x64(True):
        policy, ref = (jax.tree.map(jnp.array, x) for x in (POLICY_LOGITS, REFERENCE_LOGITS))

        def of_k1(policy):
            return expected_loss(policy, policy, sequence_logprobs(policy) - sequence_logprobs(ref))

        for leaf in jax.tree.leaves(jax.grad(of_k1)(policy)):
            np.testing.assert_allclose(leaf, np.zeros(leaf.shape), atol=1e-15)


def test_the_penalty_is_detached_and_masked():
    logprobs, mask = jnp.array([[-1.0, jnp.nan]]), jnp.array([[True, False]])
    value, gradient = jax.value_and_grad(lambda x: k1_penalty(x, jnp.full((1, 2), -3.0), mask).sum())(logprobs)
    assert (float(value), gradient.tolist()) == (2.0, [[0.0, 0.0]])


def plainly(chosen, rejected, ref_chosen, ref_rejected, beta, kind, label_smoothing):
    """The published formulas in float64."""
    h = (chosen - ref_chosen) - (rejected - ref_rejected)
    if kind == "ipo":
        return (h - 1 / (2 * beta)) ** 2
    agree, disagree = -np.log1p(np.exp(-beta * h)), -np.log1p(np.exp(beta * h))
    return -(1 - label_smoothing) * agree - label_smoothing * disagree


@pytest.mark.parametrize("beta", [0.1, 2.0])
@pytest.mark.parametrize(("kind", "label_smoothing"), [("sigmoid", 0.0), ("sigmoid", 0.2), ("ipo", 0.0)])
def test_formulas_in_float64(beta, kind, label_smoothing):
    sums = np.random.default_rng(0).normal(size=(4, 16)) * 5 - 20
    with jax.enable_x64(True):
        got = preference_loss(*map(jnp.array, sums), beta=beta, kind=kind, label_smoothing=label_smoothing)
        np.testing.assert_allclose(got.losses, plainly(*sums, beta, kind, label_smoothing), rtol=1e-12)
    in_f32 = preference_loss(
        *(jnp.array(x, jnp.float32) for x in sums), beta=beta, kind=kind, label_smoothing=label_smoothing
    )
    np.testing.assert_allclose(in_f32.losses, plainly(*sums, beta, kind, label_smoothing), rtol=1e-4, atol=1e-5)


def test_by_hand():
    # h = (-10 + 12) - (-11 + 10) = 3; beta h = 1.5; -log sigmoid(1.5) = 0.2014133.
    sums = [jnp.array([x]) for x in (-10.0, -11.0, -12.0, -10.0)]
    losses, margins = preference_loss(*sums, beta=0.5)
    assert (float(margins[0]), float(losses[0])) == pytest.approx((3.0, 0.2014133))
    assert float(preference_loss(*sums, beta=0.5, label_smoothing=0.1).losses[0]) == pytest.approx(0.2014133 + 0.15)
    assert float(preference_loss(*sums, beta=0.5, kind="ipo").losses[0]) == pytest.approx(4.0)


def test_far_margins_stay_finite():
    far = [jnp.array([x]) for x in (-1e4, 0.0, 0.0, -1e4)]
    value, gradient = jax.value_and_grad(lambda x: preference_loss(x, *far[1:]).losses[0])(far[0])
    assert float(value) == pytest.approx(2e3) and float(gradient[0]) == pytest.approx(-0.1)


@pytest.mark.parametrize(
    ("knobs", "message"),
    [
        ({"beta": 0.0}, "beta is 0.0; a preference loss needs it above 0"),
        ({"label_smoothing": 0.5}, "label_smoothing is 0.5; wanted at least 0 and below 0.5"),
        ({"kind": "ipo", "label_smoothing": 0.1}, "label_smoothing is for kind='sigmoid'"),
        ({"kind": "hinge"}, "kind is 'hinge'; wanted sigmoid or ipo"),
    ],
)
def test_pairs_are_refused(knobs, message):
    with pytest.raises(ValueError, match=message):
        preference_loss(*[jnp.zeros(1)] * 4, **knobs)


TOKENS = jnp.array(np.random.default_rng(3).integers(5, size=(4, 6)), jnp.int32)
MASK = jnp.array([[0, 1, 1, 0, 1, 0], [0, 1, 1, 1, 1, 1], [0, 0, 1, 1, 0, 0], [0, 0, 1, 0, 0, 0]], bool)


@pytest.fixture(scope="module")
def pairs(bigram):
    """Parameters, and a batch of two pairs scored by a reference."""
    params, ref = bigram.init(jax.random.key(0)), bigram.init(jax.random.key(1))
    batch = Batch(TOKENS, MASK)
    return params, batch._replace(ref_logprobs=score_batch(bigram, ref, batch).logprobs)


def run(model, params, batch, **knobs):
    return jax.jit(partial(dpo_loss, model, **knobs))(params, batch)


@pytest.mark.parametrize("is_normalized", [False, True])
def test_the_loss_of_a_model_is_the_mean_over_pairs(bigram, pairs, is_normalized):
    params, batch = pairs
    lengths = np.array([3, 5, 2, 1]) if is_normalized else 1
    sums = np.where(MASK, score_batch(bigram, params, batch).logprobs, 0).sum(1) / lengths
    refs = np.where(MASK, batch.ref_logprobs, 0).sum(1) / lengths
    expected = plainly(sums[::2], sums[1::2], refs[::2], refs[1::2], 0.3, "sigmoid", 0.1)
    loss, metrics = run(bigram, params, batch, beta=0.3, label_smoothing=0.1, length_normalized=is_normalized)
    np.testing.assert_allclose(loss, expected.mean(), rtol=1e-5)
    h = (sums[::2] - refs[::2]) - (sums[1::2] - refs[1::2])
    np.testing.assert_allclose(metrics["reward_margin"], 0.3 * h.mean(), rtol=1e-4)
    np.testing.assert_allclose(metrics["preference_accuracy"], (h > 0).mean())
    np.testing.assert_allclose(
        metrics["chosen_reward"] - metrics["rejected_reward"], metrics["reward_margin"], rtol=1e-4
    )


def test_empty_pairs_are_out_of_the_mean(bigram, pairs):
    params, batch = pairs
    alone = jax.tree.map(lambda x: x[:2], batch)
    masked = batch._replace(completion_mask=MASK.at[2:].set(False))
    np.testing.assert_allclose(run(bigram, params, masked)[0], run(bigram, params, alone)[0], rtol=1e-6)


def test_a_pair_without_one_of_its_answers_is_no_pair(bigram, pairs):
    """Its other answer neither counts in the denominator nor has a gradient."""
    params, batch = pairs
    alone = jax.tree.map(lambda x: x[:2], batch)
    halved = batch._replace(completion_mask=MASK.at[3].set(False))
    loss, metrics = run(bigram, params, halved, sft_coef=0.5)
    expected, of_alone = run(bigram, params, alone, sft_coef=0.5)
    np.testing.assert_allclose(loss, expected, rtol=1e-6)
    for name in ("reward_margin", "chosen_reward", "chosen_nll", "preference_accuracy"):
        np.testing.assert_allclose(metrics[name], of_alone[name], rtol=1e-5, err_msg=name)


@pytest.mark.parametrize("is_normalized", [False, True])
def test_the_imitation_term_is_the_mean_of_the_chosen_answers(bigram, pairs, is_normalized):
    params, batch = pairs
    logprobs = np.where(MASK, score_batch(bigram, params, batch).logprobs, 0)
    nll = -np.mean([logprobs[0].sum() / 3, logprobs[2].sum() / 2])
    plain, metrics = run(bigram, params, batch, length_normalized=is_normalized)
    np.testing.assert_allclose(metrics["chosen_nll"], nll, rtol=1e-5)
    both, _ = run(bigram, params, batch, length_normalized=is_normalized, sft_coef=0.7)
    np.testing.assert_allclose(both - plain, 0.7 * nll, rtol=1e-4)


def test_batches_that_are_no_pairs_are_refused(bigram, pairs):
    params, batch = pairs
    with pytest.raises(ValueError, match="there are 3 rows; chosen and rejected answers alternate"):
        run(bigram, params, jax.tree.map(lambda x: x[:3], batch))
    with pytest.raises(ValueError, match=r"batch\.ref_logprobs is None"):
        run(bigram, params, batch._replace(ref_logprobs=None))
    uncounted = count_tokens(MASK)._replace(pairs=None)
    with pytest.raises(ValueError, match=r"denominators\.pairs is None; count the whole batch with count_tokens"):
        dpo_loss(bigram, params, batch, uncounted)
    with pytest.raises(ValueError, match=r"batch\.segment_ids is given; pairs are rows of their own, not packed"):
        run(bigram, params, batch._replace(segment_ids=jnp.zeros((4, 6), jnp.int32)))
