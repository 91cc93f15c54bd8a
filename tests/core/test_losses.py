"""Policy losses: published values and gradients, numbers by hand where those are silent, and what changes nothing."""

import inspect
import json
import random
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxft.core.advantages import reward_to_go
from jaxft.core.losses import PRESETS, k1_penalty, kl_penalty, policy_loss, preference_loss, value_loss
from jaxft.core.objectives import dpo_loss, score_batch
from jaxft.core.surrogates import COVARIANCE_BOUNDS, select_tokens, token_covariances
from jaxft.core.types import Batch, Denominators

ORACLES = Path(__file__).parents[1] / "data" / "oracles"
VECTORS = json.loads((ORACLES / "policy_losses.json").read_text())
VECTORS_2026 = json.loads((ORACLES / "policy_losses_2026.json").read_text())
ARRAYS = ("logprobs", "old_logprobs", "advantages", "completion_mask", "ref_logprobs")
SHAPE = (8, 12)
"""Every example is padded to this, or most of the time would go into compiling each loss for each shape."""


def padded(x):
    return None if x is None else np.pad(x, [(0, want - have) for want, have in zip(SHAPE, np.shape(x), strict=False)])


def value_and_gradient(logprobs, old_logprobs, advantages, mask, *, ref_logprobs=None, policy_weights=None, **knobs):
    """Loss, gradient with respect to `logprobs`, and metrics; computed at `SHAPE`."""
    arrays = map(padded, (logprobs, old_logprobs, advantages, mask))
    value, gradient, metrics = jitted_loss(
        *arrays, ref_logprobs=padded(ref_logprobs), policy_weights=padded(policy_weights), **knobs
    )
    assert np.all(np.asarray(gradient)[~padded(mask)] == 0)
    return value, own_part(gradient, mask), metrics


def own_part(gradient, mask):
    """The gradient without the padding."""
    return np.asarray(gradient)[: mask.shape[0], : mask.shape[1]]


def at_own_shape(logprobs, old_logprobs, advantages, mask, **knobs):
    """The same without the padding; nothing is selected if `selected` does not say it."""
    if knobs.get("loss") in SELECTING:
        knobs = {"selected": jnp.zeros(mask.shape, bool)} | knobs

    def loss_of(logprobs):
        return policy_loss(logprobs, old_logprobs, advantages, mask, **knobs)

    (value, metrics), gradient = jax.value_and_grad(loss_of, has_aux=True)(logprobs)
    return value, gradient, metrics


SELECTING = ("clip_cov", "kl_cov")
NAMES = ("loss", "importance_level", "aggregation", "kl")
NUMBERS = ("clip_low", "clip_high", "delta", "beta", "max_completion_tokens")
jitted_loss = jax.jit(at_own_shape, static_argnames=NAMES + NUMBERS)


def knobs_of(case):
    if "by" in case:  # those of 2026
        return dict(
            loss=case["name"],
            **({} if case["name"] == "sapo" else dict(zip(("clip_low", "clip_high"), case["clips"], strict=True))),
            beta=case["beta"],
            kl="k3_unweighted" if case["name"] == "gmpo" else "k3_trl",  # TRL's default is its own in GMPO
        )
    batch = VECTORS["batches"][case["batch"]]
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


def check_vectors(vectors, count, dtype, rtol, atol):
    """One program, of each loss once: 84 would take longer to compile than all other tests here take."""
    losses = {str(knobs_of(case)): knobs_of(case) for case in vectors["cases"]}

    @jax.jit
    def of_all_losses(*arrays, ref_logprobs, selected):
        tables = {name: {"selected": selected.get(knobs["loss"])} for name, knobs in losses.items()}
        return {
            name: at_own_shape(*arrays, ref_logprobs=ref_logprobs, **losses[name], **tables[name])[:2]
            for name in losses
        }

    results = []
    for batch in vectors["batches"]:
        *arrays, ref = (padded(np.array(batch[name], bool if name == "completion_mask" else dtype)) for name in ARRAYS)
        nothing = np.zeros_like(batch["completion_mask"])
        selected = {name: padded(np.array(batch.get(f"selected_{name}", nothing), bool)) for name in SELECTING}
        results.append(of_all_losses(*arrays, ref_logprobs=ref, selected=selected))
    wrong = []
    for case in vectors["cases"]:
        value, gradient = results[case["batch"]][str(knobs_of(case))]
        assert value.dtype == gradient.dtype == dtype
        expected = padded(case["grad"])
        if not (np.allclose(value, case["loss"], rtol, atol) and np.allclose(gradient, expected, rtol, atol)):
            wrong.append({name: case[name] for name in case if name not in ("loss", "grad")})
    assert len(vectors["cases"]) == count
    assert not wrong, f"{len(wrong)} of {count} cases disagree: {wrong[:3]}"


YEARS = ["before_2026", "2026"]


# verl adds 1e-8 to what it divides by.
@pytest.mark.parametrize(("vectors", "count", "tolerance"), [(VECTORS, 84, 1e-10), (VECTORS_2026, 20, 1e-8)], ids=YEARS)
def test_published_values_and_gradients_in_float64(vectors, count, tolerance):
    with jax.enable_x64(True):
        check_vectors(vectors, count, np.float64, rtol=0, atol=tolerance)


@pytest.mark.parametrize(("vectors", "count"), [(VECTORS, 84), (VECTORS_2026, 20)], ids=YEARS)
def test_published_values_and_gradients_in_float32(vectors, count):
    check_vectors(vectors, count, np.float32, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("case", VECTORS_2026["selections"], ids=lambda case: f"{case['name']} {case['fraction']}")
def test_tokens_are_selected_as_by_verl(case):
    """Which tokens `clip_cov` draws is chance; how many of which is not."""
    batch = VECTORS_2026["batches"][case["batch"]]
    mask, expected = np.array(batch["completion_mask"], bool), np.array(case["selected"], bool)
    logprobs = np.array(batch["logprobs"])[mask]
    covariances = token_covariances(logprobs, np.broadcast_to(np.array(batch["advantages"])[:, None], mask.shape)[mask])
    options = {"loss": case["name"], "fraction": case["fraction"]}
    found = select_tokens(covariances, draw=random.Random(1), **options)
    assert found.sum() == expected.sum() > 0
    if case["name"] == "kl_cov" or case["fraction"] == 1.0:
        np.testing.assert_array_equal(found, expected[mask])
    else:
        low, high = COVARIANCE_BOUNDS
        assert np.all((low < covariances[found]) & (covariances[found] < high))
        assert (select_tokens(covariances, draw=random.Random(1), **options) == found).all()


@pytest.mark.parametrize("loss", SELECTING)
@pytest.mark.parametrize("advantages", [np.zeros(0), np.ones(4), np.array([1.0])], ids=["nothing", "no spread", "one"])
def test_tokens_without_a_covariance_are_not_selected(loss, advantages):
    covariances = token_covariances(-np.arange(1.0, 1 + len(advantages)), advantages)
    assert not select_tokens(covariances, loss=loss, fraction=0.5, draw=random.Random(0)).any()


# --- Numbers by hand. Log-probabilities of 0 stand for "only the ratio matters".


def rows(*values):
    return np.array(values, np.float32)


def log_rows(*ratios):
    """`(logprobs, old_logprobs)` with these ratios between them."""
    return np.zeros_like(rows(*ratios)), -np.log(rows(*ratios))


def all_trained(like):
    return np.ones(like.shape, bool)


def close(got, expected):
    np.testing.assert_allclose(got, expected, rtol=2e-6, atol=1e-7)


def test_cispo_cap_bites_and_keeps_the_gradient():
    logprobs = rows([-1.0, -2.0])
    old = logprobs - np.log(rows([8.0, 2.0]))
    value, gradient, metrics = value_and_gradient(logprobs, old, rows(3.0), all_trained(old), loss="cispo")
    close(value, -3 * (5 * -1.0 + 2 * -2.0) / 2)
    close(gradient, [[-3 * 5 / 2, -3 * 2 / 2]])
    close(metrics["clip_high_fraction"], 0.5)
    close(metrics["clip_low_fraction"], 0.0)


def test_cispo_cap_at_sequence_level():
    logprobs = rows([-1.0, -3.0])
    old = logprobs - np.log(rows([64.0, 1.0]))  # geometric mean 8, capped at 5
    value, gradient, _ = value_and_gradient(
        logprobs, old, rows(1.0), all_trained(old), loss="cispo", importance_level="sequence"
    )
    close(value, 5 * 4 / 2)
    close(gradient, [[-5 / 2, -5 / 2]])


def test_sequence_clip_at_a_positive_advantage():
    logprobs, old = log_rows([3.0, 0.75], [1.0, 1.21])  # geometric means 1.5, clipped to 1.2, and 1.1
    knobs = dict(loss="grpo", importance_level="sequence")
    value, gradient, metrics = value_and_gradient(logprobs, old, rows(1.0, 1.0), all_trained(old), **knobs)
    close(value, -(1.2 + 1.1) / 2)
    close(gradient, [[0, 0], [-1.1 / 2 / 2, -1.1 / 2 / 2]])
    close(metrics["clip_high_fraction"], 0.5)


def test_gspo_clips_are_narrow():
    logprobs, old = log_rows([1.0005, 1.0005], [0.9995, 0.9995])
    value, gradient, _ = value_and_gradient(logprobs, old, rows(1.0, -1.0), all_trained(old), loss="gspo")
    close(value, (-(1 + 4e-4) + (1 - 3e-4)) / 2)
    close(gradient, np.zeros((2, 2)))


def test_dual_clip_with_dr_grpo():
    logprobs, old = log_rows([3.0, 1.25])
    knobs = dict(loss="dr_grpo", delta=1.5, max_completion_tokens=4)
    value, gradient, _ = value_and_gradient(logprobs, old, rows(-2.0), all_trained(old), **knobs)
    close(value, (1.5 * 2 + 1.25 * 2) / 4)
    close(gradient, [[0, 1.25 * 2 / 4]])
    # A positive advantage knows nothing of delta.
    value, _, _ = value_and_gradient(logprobs, old, rows(2.0), all_trained(old), **knobs)
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
    mask = np.array([[True, False, True], [False, True, False], [False, False, False]])
    advantages = rows([-1.0, 9.0, -2.0], [9.0, 1.0, 9.0], [9.0, 9.0, 9.0])
    knobs = dict(loss=loss, max_completion_tokens=10)
    got, gradient, metrics = value_and_gradient(logprobs, old, advantages, mask, **knobs)
    close(got, value)
    close(gradient, [first, [0, second, 0], [0, 0, 0]])
    close(metrics["policy_loss"], value)
    close(metrics["log_ratio_abs_max"], -np.log(0.9))


def test_reinforce_is_advantage_times_score():
    logprobs = rows([-1.0, -2.0], [-3.0, -9.0])
    mask = np.array([[True, True], [True, False]])
    advantages = rows(2.0, -1.0)
    value, gradient, _ = value_and_gradient(logprobs, None, advantages, mask, loss="reinforce")
    close(value, -(2 * -1 + 2 * -2 - 1 * -3) / 3)
    close(gradient, [[-2 / 3, -2 / 3], [1 / 3, 0]])
    knobs = dict(loss="reinforce", aggregation="seq_mean_token_mean")
    close(value_and_gradient(logprobs, None, advantages, mask, **knobs)[1], [[-2 / 4, -2 / 4], [1 / 2, 0]])


def test_on_policy_gradient_is_that_of_reinforce():
    @jax.jit
    def gradients(logprobs, mask, advantages):
        def gradient(old, loss):
            return at_own_shape(logprobs, old, advantages, mask, loss=loss, aggregation="token_mean")[1]

        return [gradient(None, loss) for loss in PRESETS] + [
            gradient(logprobs, loss) for loss in PRESETS if loss != "reinforce"
        ]

    found = gradients(rows([-1.0, -2.0]), np.ones((1, 2), bool), rows(3.0))
    close(found, [[[-3 / 2, -3 / 2]]] * (2 * len(PRESETS) - 1))


# --- Terms of KL.

KINDS = ("k2", "k3", "k3_unweighted", "k3_ratio", "k3_trl")


@jax.jit
def kl_terms(logprobs, old_logprobs, ref_logprobs):
    """Losses of each kind with `beta` 0.5, without advantages."""
    given = logprobs, old_logprobs, jnp.zeros(1), jnp.ones((1, 1), bool)
    return {kl: at_own_shape(*given, beta=0.5, kl=kl, ref_logprobs=ref_logprobs) for kl in KINDS}


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
    got = kl_terms(*log_rows([2.0]), np.log(rows([3.0])))[kl]
    close(got[0], 0.5 * value)
    close(got[1], [[0.5 * gradient]])
    close(got[2]["kl"], 2 - np.log(3))


@pytest.mark.parametrize("kl", KINDS)
@pytest.mark.parametrize("rho", [100.0, 25.0, -25.0, -100.0])
def test_far_references_do_not_push_the_policy_away(kl, rho):
    logprobs = rows([-0.5])
    value, gradient, _ = kl_terms(logprobs, logprobs, logprobs + np.float32(rho))[kl]
    assert np.isfinite(value)
    assert value > 0
    assert np.isfinite(gradient).all()
    # The ratio's own gradient is the score function's, whose mean alone has a direction.
    if kl in ("k2", "k3", "k3_unweighted"):
        assert np.asarray(gradient)[0, 0] * rho <= 0


# --- What a KL term pulls at: expectations over all tokens of a vocabulary, nothing sampled.


def test_k1_is_refused_in_the_loss():
    x = np.zeros((1, 1), np.float32)
    with pytest.raises(ValueError, match=r"kl='k1'.*'k3_ratio'"):
        refused(x, x, x[0], x == 0, beta=0.1, kl="k1", ref_logprobs=x)


def refused(*arrays, **knobs):
    """Ask for a loss that is refused; nothing is compiled. As users call it, without this session's checks of types."""
    given = {name: knob for name, knob in knobs.items() if isinstance(knob, np.ndarray)}
    fixed = {name: knob for name, knob in knobs.items() if name not in given}
    jax.eval_shape(partial(inspect.unwrap(policy_loss), **fixed), *arrays, **given)


# --- Nothing that is masked, and no size of a number, makes a gradient that is not finite.

LEVELS = [(loss, "token") for loss in PRESETS] + [(loss, "sequence") for loss in PRESETS if loss != "reinforce"]
DRAW = np.random.default_rng(5)
LOGPROBS = -np.abs(DRAW.normal(size=(5, 6))).astype(np.float32)
TRAINED = (DRAW.random((5, 6)) < 0.7) & (np.arange(5) != 3)[:, None]
"""Five rows, one of them empty, with holes."""
OLD_LOGPROBS, REF_LOGPROBS = (LOGPROBS + 0.3 * DRAW.normal(size=(2, 5, 6))).astype(np.float32)
ADVANTAGES = DRAW.normal(size=5).astype(np.float32)


@jax.jit
def of_levels(logprobs, old, ref, mask, denominators, advantages, token_advantages):
    """Values, gradients and metrics of every loss at every level, with advantages per row and per token."""

    def of_level(loss, level, advantages):
        knobs = dict(loss=loss, importance_level=level, beta=0.1, max_completion_tokens=9, denominators=denominators)
        old_logprobs = None if loss == "reinforce" else old
        return at_own_shape(logprobs, old_logprobs, advantages, mask, ref_logprobs=ref, **knobs)

    return {level: (of_level(*level, advantages), of_level(*level, token_advantages)[:2]) for level in LEVELS}


def all_levels(logprobs, old, ref, mask, advantages, token_advantages=None, denominators_of=TRAINED):
    counts = denominators_of.any(axis=1).sum(), denominators_of.sum()
    denominators = Denominators(*(np.float32(count) for count in (*counts, 0, counts[0])))
    token_advantages = np.where(mask, advantages[:, None], 0) if token_advantages is None else token_advantages
    arrays = map(padded, (logprobs, old, ref, mask))
    found = jax.device_get(of_levels(*arrays, denominators, *map(padded, (advantages, token_advantages))))
    for gradient in (each[1] for results in found.values() for each in results):
        assert np.all(gradient[~padded(mask)] == 0)
    return found


def close_trees(got, expected):
    jax.tree.map(close, got, expected)


@pytest.fixture(scope="module")
def clean():
    """Results of all levels on the example."""
    return all_levels(LOGPROBS, OLD_LOGPROBS, REF_LOGPROBS, TRAINED, ADVANTAGES)


def test_equal_token_advantages_are_those_of_the_row(clean):
    for level, (per_row, per_token) in clean.items():
        close(per_token[0], per_row[0])
        close_trees(per_token[1], per_row[1])
        assert np.abs(per_row[1]).max() > 0.01, level


@pytest.mark.parametrize("rubbish", [np.nan, -np.inf, 1e9])
def test_padding_may_hold_anything(clean, rubbish):
    spoilt = [np.where(TRAINED, x, np.float32(rubbish)) for x in (LOGPROBS, OLD_LOGPROBS, REF_LOGPROBS)]
    advantages = np.where(np.arange(5) == 3, rubbish, ADVANTAGES)  # an unscorable trajectory
    per_token = np.where(TRAINED, ADVANTAGES[:, None], rubbish)
    got = all_levels(*spoilt, TRAINED, advantages.astype(np.float32), per_token.astype(np.float32))
    jax.tree.map(np.testing.assert_array_equal, got, clean)


def test_nothing_trained_is_a_loss_of_zero():
    nothing = np.zeros_like(TRAINED)
    got = all_levels(LOGPROBS, OLD_LOGPROBS, REF_LOGPROBS, nothing, ADVANTAGES, denominators_of=nothing)
    for leaf in jax.tree.leaves(got):
        assert np.array_equal(leaf, np.zeros_like(leaf))


def test_log_ratio_of_100_is_clamped():
    logprobs = rows([-0.5, -0.5], [-0.5, -0.5])
    old = logprobs - rows([100.0, 100.0], [-100.0, -100.0])

    @jax.jit
    def losses(advantages):
        given = jnp.array(logprobs), jnp.array(old), advantages, jnp.ones((2, 2), bool)
        of_all = {loss: at_own_shape(*given, loss=loss) for loss in ("grpo", "dapo", "gspo", "cispo")}
        return of_all | {"delta": at_own_shape(*given, delta=2.0)}

    for sign in (1.0, -1.0):
        found = jax.device_get(losses(rows(sign, sign)))
        for value, gradient, metrics in found.values():
            assert np.isfinite(value) and np.isfinite(gradient).all()
            close(metrics["log_ratio_abs_max"], 100.0)
            close(metrics["log_ratio_clamped_fraction"], 1.0)
    np.testing.assert_allclose(found["grpo"][0], (np.exp(20.0) + np.exp(-20.0)) / 2, rtol=1e-5)
    close(found["delta"][0], (2.0 + 0.8) / 2)
    close(found["delta"][1], np.zeros((2, 2)))


# --- What must change nothing.


def test_order_and_microbatches_change_nothing(clean):
    def take(index):
        arrays = LOGPROBS, OLD_LOGPROBS, REF_LOGPROBS, TRAINED, ADVANTAGES
        found = all_levels(*(array[index] for array in arrays))
        return {level: results[0] for level, results in found.items()}

    order = np.array([3, 0, 4, 2, 1])
    permuted, parts = take(order), [take(index) for index in ([0, 3], [1], [2, 4])]
    for level, ((value, gradient, metrics), _) in clean.items():
        close(permuted[level][0], value)
        close(permuted[level][1][:5], gradient[order])
        of_parts = [part[level] for part in parts]
        close(sum(part[0] for part in of_parts), value)
        joined = np.concatenate([part[1][:size] for part, size in zip(of_parts, (2, 1, 2), strict=True)])
        close(joined, gradient[[0, 3, 1, 2, 4]])
        for name, whole in metrics.items():
            found = [part[2][name] for part in of_parts]
            close(max(found) if name.endswith("_max") else sum(found), whole)


def test_neither_padding_nor_counts_of_its_own_change_anything(clean):
    levels = [("grpo", "token"), ("dr_grpo", "sequence"), ("cispo", "sequence")]

    @jax.jit
    def at_their_shape(*arrays):
        knobs = dict(beta=0.1, max_completion_tokens=9, ref_logprobs=jnp.array(REF_LOGPROBS))
        return [at_own_shape(*arrays, loss=loss, importance_level=level, **knobs) for loss, level in levels]

    found = at_their_shape(LOGPROBS, OLD_LOGPROBS, ADVANTAGES, TRAINED)
    for level, (value, gradient, metrics) in zip(levels, found, strict=True):
        expected = clean[level][0]
        close_trees((value, gradient, metrics), (expected[0], own_part(expected[1], TRAINED), expected[2]))


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
        (dict(loss="clip_cov"), "selected is None; clip_cov and kl_cov need it"),
        (dict(loss="kl_cov", selected=np.zeros((2, 3))), "selected holds float32; wanted bools"),
        (dict(beta=-0.1), "beta is -0.1; wanted at least 0"),
        (
            dict(beta=0.1, kl="k4", ref_logprobs=np.zeros((2, 3), np.float32)),
            "kl is 'k4'; wanted one of k2, k3, k3_ratio",
        ),
    ],
)
def test_refusals(knobs, message):
    x = np.zeros((2, 3), np.float32)
    with pytest.raises(ValueError, match=message):
        refused(x, x, x[:, 0], x == 0, **knobs)


def test_shapes_that_disagree_are_refused():
    x, other, mask = np.zeros((2, 3), np.float32), np.zeros((2, 4), np.float32), np.ones((2, 3), bool)
    one = x[:, 0]
    with pytest.raises(ValueError, match=r"old_logprobs has shape \(2, 4\); wanted that of logprobs, \(2, 3\)"):
        refused(x, other, one, mask)
    with pytest.raises(ValueError, match=r"completion_mask has shape \(2, 4\); wanted that of logprobs"):
        refused(x, x, one, np.ones((2, 4), bool))
    with pytest.raises(ValueError, match=r"ref_logprobs has shape \(2, 4\); wanted that of logprobs"):
        refused(x, x, one, mask, beta=0.1, ref_logprobs=other)
    with pytest.raises(ValueError, match=r"advantages have shape \(3,\); wanted \(2,\) or \(2, 3\)"):
        refused(x, x, np.zeros(3, np.float32), mask)
    with pytest.raises(ValueError, match=r"policy_weights has shape \(2, 4\); wanted that of logprobs"):
        refused(x, x, one, mask, policy_weights=other)
    with pytest.raises(ValueError, match=r"advantages have shape \(2,\); wanted \(2, 3\)"):
        refused(x, x, one, mask, segment_ids=np.zeros((2, 3), np.int32))


# --- Trajectories of several rows, weights and counts.


@pytest.mark.parametrize(
    ("loss", "of_trajectories", "of_rows"), [("grpo", 0.0, 0.5), ("gspo", 0.0, 0.5), ("dr_grpo", 0.0, 0.0)]
)
def test_a_trajectory_in_three_rows_counts_once(loss, of_trajectories, of_rows):
    """One of advantage +1 in a row, one of -1 in three; of six trained tokens each."""
    mask = np.arange(6) < np.array([[6], [3], [2], [1]])
    given = dict(advantages=rows(1.0, -1, -1, -1), loss=loss, max_completion_tokens=6)
    x, six = np.full((4, 6), -1.0, np.float32), np.full(SHAPE, 6.0, np.float32)
    value, gradient, _ = value_and_gradient(x, x, mask=mask, trajectory_tokens=six, **given)
    close(value, of_trajectories)
    close(gradient, np.where(mask, np.array([[-1], [1], [1], [1]]) / 12, 0))
    value, gradient, _ = value_and_gradient(x, x, mask=mask, **given)
    close(value, of_rows)
    close(np.abs(gradient).sum(), 1.0 if loss != "dr_grpo" else 0.5)  # divided by the rows


def test_ratios_at_sequence_level_are_those_of_a_row_of_a_trajectory():
    logprobs, old = log_rows([1.5, 1.0], [0.5, 0.5])
    knobs = dict(loss="gspo", clip_low=0.9, clip_high=0.9, trajectory_tokens=np.full(SHAPE, 4.0, np.float32))
    close(value_and_gradient(logprobs, old, rows(1, 1), all_trained(old), **knobs)[0], -(2 * 1.5**0.5 + 2 * 0.5) / 4)


@pytest.fixture(scope="module")
def by_table():
    """Losses and gradients with two options each, with a table of the first, and with one of both, half and half."""
    names = ("dapo", "gspo", "cispo", "dppo_tv", "gmpo")
    rng = np.random.default_rng(3)
    lp, old, ref = (jnp.asarray(-rng.exponential(1.0, SHAPE), jnp.float32) for _ in range(3))
    mask = jnp.asarray(rng.random(SHAPE) < 0.8)
    adv = jnp.asarray(rng.normal(size=SHAPE[0]), jnp.float32)
    upper = np.arange(SHAPE[0])[:, None] < SHAPE[0] // 2

    @jax.jit
    def run():
        def of(name, first, second=None):
            def option(index):
                if second is None:
                    return first[index]
                return jnp.asarray(np.broadcast_to(np.where(upper, first[index], second[index]), SHAPE), jnp.float32)

            knobs = {"loss": name, "clip_low": option(0), "clip_high": option(1), "beta": option(2)}
            value, gradient, _ = at_own_shape(lp, old, adv, mask, ref_logprobs=ref, kl="k3_unweighted", **knobs)
            return value, gradient

        a, b = (0.1, 0.3, 0.05), (0.3, 0.1, 0.2)
        return {name: (of(name, a), of(name, b), of(name, a, a), of(name, a, b)) for name in names}

    return run(), upper


def test_clips_and_beta_may_be_tables(by_table):
    results, upper = by_table
    for name, ((_, first), (_, second), same, (_, mixed)) in results.items():
        np.testing.assert_allclose(same[1], first, rtol=1e-6, atol=1e-7, err_msg=name)
        np.testing.assert_allclose(mixed, np.where(upper, first, second), rtol=1e-6, atol=1e-7, err_msg=name)
        assert np.abs(np.asarray(first) - second).max() > 1e-3


def test_policy_weights_scale_the_policy_term_alone():
    logprobs, old = log_rows([1.1, 0.9])
    given = logprobs, old, rows(1.0), all_trained(old)
    knobs = dict(loss="dapo", beta=0.5, kl="k3_unweighted", ref_logprobs=logprobs + np.log(2.0, dtype=np.float32))
    plain = value_and_gradient(*given, **knobs)
    weighted = value_and_gradient(*given, policy_weights=rows([2.0, 0.0]), **knobs)
    close(plain[0] - weighted[0], -(1.1 + 0.9) / 2 + 2 * 1.1 / 2)
    close(plain[1] - weighted[1], [[-1.1 / 2 + 2 * 1.1 / 2, -0.9 / 2]])


def test_weights_on_untrained_tokens_are_free():
    logprobs, old = log_rows([1.1, 0.9])
    given = logprobs, old, rows(1.0), np.array([[True, False]])
    plain, rubbish = (
        value_and_gradient(*given, policy_weights=rows([1.0, weight]), loss="dapo") for weight in (1.0, np.nan)
    )
    close(rubbish[0], plain[0])
    close(rubbish[1], plain[1])


def test_dual_clip_counts_its_bites():
    logprobs, old = log_rows([9.0, 9.0, 2.0, 9.0])
    advantages = rows([-1.0, 1.0, -1.0, -1.0])
    mask = np.array([[True, True, True, False]])
    _, _, metrics = value_and_gradient(logprobs, old, advantages, mask, delta=3.0)
    close(metrics["delta_fraction"], 1 / 3)


def test_clamped_references_are_counted():
    logprobs = rows([0.0, 0.0, -50.0, 0.0])
    ref = rows([-21.0, -1.0, 0.0, 99.0])
    mask = np.array([[True, True, True, False]])
    _, gradient, metrics = value_and_gradient(logprobs, None, rows(1.0), mask, beta=0.1, ref_logprobs=ref)
    close(metrics["kl_clamped_fraction"], 2 / 3)
    assert np.isfinite(gradient).all()


def test_value_loss_by_hand():
    values, old, returns = rows([2.0, 0.1, 1.0, 9.0]), rows([0.0, 0.0, 2.0, 0.0]), rows([3.0, 1.0, 0.0, 0.0])
    mask = np.array([[True, True, True, False]])
    # Clipped to 0.2 of 0: (0.2 - 3)^2 > 1. Not clipped: 0.9^2. Clipped to 1.8: 1.8^2 > 1.
    (value, metrics), gradient = jax.jit(jax.value_and_grad(value_loss, has_aux=True))(values, old, returns, mask)
    close(value, (2.8**2 + 0.9**2 + 1.8**2) / 6)
    close(gradient, [[0.0, -0.9 / 3, 0.0, 0.0]])
    close(metrics["value_clip_fraction"], 2 / 3)
    unclipped, _ = jax.jit(partial(value_loss, value_clip=None))(values, old, returns, mask)
    close(unclipped, (1.0 + 0.9**2 + 1.0) / 6)


def test_the_clip_of_values_is_counted_only_where_it_takes_the_gradient_away():
    """Within the clip both errors are one number; that they round differently is no bite."""
    draw = np.random.default_rng(0)
    old = np.array(draw.normal(size=(8, 64)) * 3, np.float32)
    values = old + np.array(draw.uniform(-0.19, 0.19, size=old.shape), np.float32)
    returns = np.array(draw.normal(size=old.shape) * 3, np.float32)
    assert jax.jit(value_loss)(values, old, returns, all_trained(old))[1]["value_clip_fraction"] == 0


def test_at_sequence_level_a_token_keeps_its_own_credit():
    """GSPO-token: the value is the ratio s of the row, the gradient `s A_t` of each token; also with weights."""
    logprobs, old = log_rows([4.0, 1.0])  # s = 2
    mask, knobs = all_trained(old), dict(loss="grpo", importance_level="sequence", clip_high=10.0)
    of_credit = value_and_gradient(logprobs, old, rows([1.0, 3.0]), mask, **knobs)
    of_weights = value_and_gradient(logprobs, old, rows(1.0), mask, policy_weights=rows([1.0, 3.0]), **knobs)
    for value, gradient, _ in (of_credit, of_weights):
        close(value, -(2 * 1 + 2 * 3) / 2)
        close(gradient, [[-2 * 1 / 2, -2 * 3 / 2]])


# --- Gradients of KL over sequences of two tokens, all enumerated.

V = 3
FIRST, SECOND = np.divmod(np.arange(V * V), V)
"""All sequences, a row each."""
LOGITS = np.random.default_rng(11)


def make_logits():
    """Return logits of the first token `[V]`, and of the second token after each first one `[V V]`."""
    return {"first": LOGITS.normal(size=V), "second": LOGITS.normal(size=(V, V))}


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
        assert theirs.dtype == np.float64
        assert np.abs(mine - theirs).max() <= 1e-6 * scale
    assert scale > 0.01


def test_terms_in_the_loss_have_the_gradient_of_the_states_kl():
    kinds = {"k2": "reverse", "k3_ratio": "reverse", "k3": "forward"}

    @jax.jit
    def gradients(policy, old, ref):
        def of_term(policy, kind):
            logprobs = sequence_logprobs(policy)
            rho, log_ratio = sequence_logprobs(ref) - logprobs, logprobs - sequence_logprobs(old)
            return expected_loss(policy, old, kl_penalty(kind, rho, log_ratio, jnp.exp(log_ratio)))

        return [
            (jax.grad(of_term)(policy, kind), jax.grad(kl_at_fixed_prefixes)(policy, old, ref, direction))
            for kind, direction in kinds.items()
        ]

    with jax.enable_x64(True):
        for old in (POLICY_LOGITS, OLD_LOGITS):
            for got, expected in jax.device_get(gradients(POLICY_LOGITS, old, REFERENCE_LOGITS)):
                assert_same(got, expected)


def test_k1_has_the_gradient_of_the_sequences_kl_in_the_reward_and_none_in_the_loss():
    """As the loss of `reinforce` with no other reward; per token with rewards to go, or summed over the sequence."""

    @jax.jit
    def gradients(policy, ref):
        mask = jnp.ones((V * V, 2), bool)

        def of_reinforce(policy, is_per_token):
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

        def in_the_loss(policy):
            return expected_loss(policy, policy, sequence_logprobs(policy) - sequence_logprobs(ref))

        in_the_reward = [jax.grad(of_reinforce)(policy, is_per_token) for is_per_token in (True, False)]
        return *in_the_reward, jax.grad(kl_of_sequences)(policy), jax.grad(in_the_loss)(policy)

    with jax.enable_x64(True):
        per_token, summed, expected, none = jax.device_get(gradients(POLICY_LOGITS, REFERENCE_LOGITS))
    assert_same(per_token, expected)
    assert_same(summed, expected)
    for leaf in jax.tree.leaves(none):
        np.testing.assert_allclose(leaf, np.zeros(leaf.shape), atol=1e-15)


def test_the_penalty_is_detached_and_masked():
    logprobs, mask = rows([-1.0, np.nan]), np.array([[True, False]])

    def total(logprobs):
        return k1_penalty(logprobs, jnp.array([[-3.0, -3.0]]), jnp.array(mask)).sum()

    value, gradient = jax.jit(jax.value_and_grad(total))(logprobs)
    assert (float(value), gradient.tolist()) == (2.0, [[0.0, 0.0]])


# --- Preferences.


def plainly(chosen, rejected, ref_chosen, ref_rejected, beta, kind, label_smoothing):
    """The published formulas in float64."""
    h = (chosen - ref_chosen) - (rejected - ref_rejected)
    if kind == "ipo":
        return (h - 1 / (2 * beta)) ** 2
    agree, disagree = -np.log1p(np.exp(-beta * h)), -np.log1p(np.exp(beta * h))
    return -(1 - label_smoothing) * agree - label_smoothing * disagree


FORMULAS = [
    (beta, kind, smoothing)
    for beta in (0.1, 0.5, 2.0)
    for kind, smoothing in (("sigmoid", 0.0), ("sigmoid", 0.2), ("ipo", 0.0))
]


@jax.jit
def preferences(sums):
    """Losses, margins and the gradient by the first sums of every formula."""

    def total(chosen, beta, kind, label_smoothing):
        found = preference_loss(chosen, *sums[1:], beta=beta, kind=kind, label_smoothing=label_smoothing)
        return found.losses.sum(), found

    results = (jax.value_and_grad(total, has_aux=True)(sums[0], *formula) for formula in FORMULAS)
    return [(*found, gradient) for (_, found), gradient in results]


def test_formulas_in_float64():
    sums = np.random.default_rng(0).normal(size=(4, 16)) * 5 - 20
    with jax.enable_x64(True):
        exact = preferences(sums)
    for formula, (losses, _, _), (in_f32, _, _) in zip(
        FORMULAS, exact, preferences(sums.astype(np.float32)), strict=True
    ):
        np.testing.assert_allclose(losses, plainly(*sums, *formula), rtol=1e-12)
        np.testing.assert_allclose(in_f32, plainly(*sums, *formula), rtol=1e-4, atol=1e-5)


def test_by_hand():
    # h = (-10 + 12) - (-11 + 10) = 3; beta h = 1.5; -log sigmoid(1.5) = 0.2014133. And a far margin, of -2e4.
    sums = np.tile(rows([-10.0, -1e4], [-11.0, 0.0], [-12.0, 0.0], [-10.0, -1e4]), 8)
    found = dict(zip(FORMULAS, jax.device_get(preferences(sums)), strict=True))
    losses, margins, _ = found[0.5, "sigmoid", 0.0]
    assert (margins[0], losses[0]) == pytest.approx((3.0, 0.2014133))
    assert found[0.5, "sigmoid", 0.2][0][0] == pytest.approx(0.2014133 + 0.3)
    assert found[0.5, "ipo", 0.0][0][0] == pytest.approx(4.0)
    losses, _, gradient = found[0.1, "sigmoid", 0.0]
    assert losses[1] == pytest.approx(2e3) and gradient[1] == pytest.approx(-0.1)


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
        preference_loss(*[jnp.array([0.5])] * 4, **knobs)


TOKENS = np.random.default_rng(3).integers(5, size=(4, 6)).astype(np.int32)
MASK = np.array([[0, 1, 1, 0, 1, 0], [0, 1, 1, 1, 1, 1], [0, 0, 1, 1, 0, 0], [0, 0, 1, 0, 0, 0]], bool)
LENGTHS = np.array([3, 5, 2, 1])


@pytest.fixture(scope="module")
def pairs(bigram):
    """Parameters, their log-probabilities, and a batch of two pairs scored by a reference."""
    draw = np.random.default_rng(6)
    params, ref = (
        {"embedding": draw.normal(size=(5, 3)).astype(np.float32), "head": draw.normal(size=(3, 5)).astype(np.float32)}
        for _ in range(2)
    )
    score, batch = jax.jit(score_batch, static_argnums=0), Batch(TOKENS, MASK)
    own, of_reference = (np.asarray(score(bigram, each, batch).logprobs) for each in (params, ref))
    return params, own, batch._replace(ref_logprobs=of_reference)


@pytest.fixture(scope="module")
def losses_of_pairs(bigram):
    """Losses and metrics of a batch by `(length_normalized, sft_coef)`."""
    options = [(is_normalized, coefficient) for is_normalized in (False, True) for coefficient in (0.0, 0.7)]
    knobs = {"beta": 0.3, "label_smoothing": 0.1}
    normalized = {False: {}, True: {"length_normalized": True}}

    @jax.jit
    def of_all(params, batch):
        return [
            dpo_loss(bigram, params, batch, sft_coef=coefficient, **knobs, **normalized[is_normalized])
            for is_normalized, coefficient in options
        ]

    return lambda params, batch: dict(zip(options, jax.device_get(of_all(params, batch)), strict=True))


@pytest.mark.parametrize("is_normalized", [False, True])
def test_the_loss_of_a_model_is_the_mean_over_pairs(pairs, losses_of_pairs, is_normalized):
    params, logprobs, batch = pairs
    lengths = LENGTHS if is_normalized else 1
    sums = np.where(MASK, logprobs, 0).sum(1) / lengths
    refs = np.where(MASK, batch.ref_logprobs, 0).sum(1) / lengths
    expected = plainly(sums[::2], sums[1::2], refs[::2], refs[1::2], 0.3, "sigmoid", 0.1)
    loss, metrics = losses_of_pairs(params, batch)[is_normalized, 0.0]
    np.testing.assert_allclose(loss, expected.mean(), rtol=1e-5)
    h = (sums[::2] - refs[::2]) - (sums[1::2] - refs[1::2])
    np.testing.assert_allclose(metrics["reward_margin"], 0.3 * h.mean(), rtol=1e-4)
    np.testing.assert_allclose(metrics["preference_accuracy"], (h > 0).mean())
    np.testing.assert_allclose(
        metrics["chosen_reward"] - metrics["rejected_reward"], metrics["reward_margin"], rtol=1e-4
    )


@pytest.mark.parametrize("is_normalized", [False, True])
def test_the_imitation_term_is_the_mean_of_the_chosen_answers(pairs, losses_of_pairs, is_normalized):
    params, logprobs, batch = pairs
    means = np.where(MASK, logprobs, 0).sum(1) / LENGTHS
    nll = -(means[0] + means[2]) / 2
    found = losses_of_pairs(params, batch)
    np.testing.assert_allclose(found[is_normalized, 0.0][1]["chosen_nll"], nll, rtol=1e-5)
    np.testing.assert_allclose(found[is_normalized, 0.7][0] - found[is_normalized, 0.0][0], 0.7 * nll, rtol=1e-4)


@pytest.mark.parametrize("without", [[2, 3], [3]], ids=["both", "one"])
def test_a_pair_without_one_of_its_answers_is_no_pair(pairs, losses_of_pairs, without):
    """Its other answer neither counts in the denominator nor has a gradient."""
    params, _, batch = pairs
    alone = losses_of_pairs(params, jax.tree.map(lambda x: x[:2], batch))
    mask = MASK & ~np.isin(np.arange(4), without)[:, None]
    found = losses_of_pairs(params, batch._replace(completion_mask=mask))
    for options, (loss, metrics) in found.items():
        expected, of_alone = alone[options]
        np.testing.assert_allclose(loss, expected, rtol=1e-6)
        for name in ("reward_margin", "chosen_reward", "chosen_nll", "preference_accuracy"):
            np.testing.assert_allclose(metrics[name], of_alone[name], rtol=1e-5, err_msg=name)


def test_batches_that_are_no_pairs_are_refused(bigram, pairs):
    params, _, batch = pairs

    def ask(batch, denominators=None):
        jax.eval_shape(partial(dpo_loss, bigram), params, batch, denominators)

    with pytest.raises(ValueError, match="there are 3 rows; chosen and rejected answers alternate"):
        ask(jax.tree.map(lambda x: x[:3], batch))
    with pytest.raises(ValueError, match=r"batch\.ref_logprobs is None"):
        ask(batch._replace(ref_logprobs=None))
    with pytest.raises(ValueError, match=r"denominators\.pairs is None; count the whole batch with count_tokens"):
        ask(batch, Denominators(np.float32(4), np.float32(11)))
    with pytest.raises(ValueError, match=r"batch\.segment_ids is given; pairs are rows of their own, not packed"):
        ask(batch._replace(segment_ids=np.zeros((4, 6), np.int32)))
