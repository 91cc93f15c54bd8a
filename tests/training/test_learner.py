"""Jobs of learning: several updates, minibatches, references, values, and what packing must not change.

The network is a small causal one whose updates compile fast; it keeps the segments of a row apart, as decoders do.
"""

import warnings
from contextlib import closing
from dataclasses import dataclass
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxft.models.flash as flash_module
import jaxft.training.learner as learner_module
from jaxft.core.advantages import group_advantages, optimal_token_advantages
from jaxft.core.packing import pack, unpack
from jaxft.core.types import Model
from jaxft.harness.data_models import Trajectory
from jaxft.models.bridge import from_function
from jaxft.models.config import model_preset
from jaxft.models.decoder import decoder
from jaxft.models.flash import Choice
from jaxft.models.layer_stack import auto_remats
from jaxft.rollout.device import CompileCounter
from jaxft.rollout.weights import Weights
from jaxft.training import memory as memory_module
from jaxft.training.advantages import collect_rewards, compute_advantages
from jaxft.training.batch import Row, make_batch, score_tokens, with_scores
from jaxft.training.config import LossConfig
from jaxft.training.learner import Learner, choose_packing
from jaxft.training.memory import first_fitting_remat, training_memory
from jaxft.training.optimizer_config import OptimizerConfig
from jaxft.training.update import merge_metrics

SGD = OptimizerConfig(name="sgd", learning_rate=0.5, max_grad_norm=None)
VOCABULARY, SIZE = 64, 8


@dataclass(frozen=True)
class Recall:
    """Config of a network whose hidden state is the sum of the embeddings of its segment so far, later ones larger."""

    remat: str = "full"


def apply(params, tokens, positions, cache=None, tables=None, segment_ids=None):
    is_seen = jnp.tril(jnp.ones((tokens.shape[1],) * 2, bool))
    if segment_ids is not None:
        is_seen &= segment_ids[:, :, None] == segment_ids[:, None, :]
    embedded = params["embed"][tokens] * (1 + positions[:, :, None])
    return jnp.tanh(is_seen.astype(jnp.float32) @ embedded), None


@cache
def model_with(remat):
    return Model(
        Recall(remat), None, apply, lambda params, hidden: hidden @ params["head"], None, with_remat=model_with
    )


MODEL = model_with("full")
CHOICES = auto_remats("cpu")


@pytest.fixture(scope="module")
def start():
    rng = np.random.default_rng(0)
    shapes = {"embed": (VOCABULARY, SIZE), "head": (SIZE, VOCABULARY)}
    return {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}


def on_device(params):
    """Return copies that an update may take."""
    return jax.tree.map(lambda leaf: jax.device_put(np.array(leaf)), params)


@pytest.fixture(scope="module")
def job(make_sequence):
    """Rows and credit of four trajectories of two examples."""

    def make(loss):
        groups = [
            [
                Trajectory(episode=[], reward=float(place), sequences=[make_sequence(2 * group + place)])
                for place in range(2)
            ]
            for group in range(2)
        ]
        rows = [Row(t.sequences[0], i) for i, t in enumerate(t for group in groups for t in group)]
        return rows, collect_rewards(groups, loss)

    return make


def hidden_by_hand(params, tokens):
    embedded = params["embed"][tokens] * np.arange(1, len(tokens) + 1)[:, None]
    return np.tanh(np.cumsum(embedded, axis=0))


HEAD = {"kernel": np.linspace(-1.0, 2.0, SIZE, dtype=np.float32), "bias": np.float32(0.5)}


def learn(job, start, knobs, jobs=1, **options):
    """A learner after `jobs` jobs, the parameters, and the metrics of each job."""
    loss = LossConfig(**knobs)
    learner = Learner(MODEL, loss, **{"optimizer": SGD, "microbatch_tokens": 128, **options})
    params, history = on_device(start), []
    for _ in range(jobs):
        params, metrics = learner.learn(*job(loss), params)
        history.append(metrics)
    return learner, params, history


def difference(first, second):
    return max(
        float(np.abs(np.asarray(a) - b).max()) for a, b in zip(*map(jax.tree.leaves, (first, second)), strict=True)
    )


@pytest.fixture(scope="module")
def plain(job, start):
    """Parameters and metrics of one job of dapo, and of one of several updates."""
    _, params, (metrics,) = learn(job, start, {"name": "dapo"}, packing=False)
    return params, metrics


def test_packed_and_padded_rows_make_the_same_update(job, start, plain):
    padded, one = plain
    _, packed, (other,) = learn(job, start, {"name": "dapo"}, packing=True, microbatch_tokens=16)
    assert (one["batch_rows"], other["batch_rows"]) == (4, 2)
    moved = difference(padded, start)
    assert difference(padded, packed) <= 1e-5 * moved
    assert one["entropy"] == pytest.approx(other["entropy"], rel=1e-5)


def test_rows_are_not_packed_where_only_rows_of_one_sequence_have_a_kernel(monkeypatch):
    network = decoder(model_preset("qwen3-50k"))
    params = jax.eval_shape(lambda: network.init(jax.random.key(0)))
    assert choose_packing(network, params, None) and not choose_packing(network, params, False)
    for packed, is_packed in ((Choice("xla", "no kernel"), False), (Choice("pallas"), True)):
        choices = {False: Choice("cudnn"), True: packed}
        choose = lambda *kind, has_segments, choices=choices: choices[has_segments]  # noqa: E731
        monkeypatch.setattr(flash_module, "choose_kernel", choose)
        assert (choose_packing(network, params, None), choose_packing(network, params, True)) == (is_packed, True)


def test_several_updates_divide_by_the_policy_before_the_first(job, start, plain):
    _, params, (metrics,) = learn(job, start, {"name": "dapo"}, num_iterations=3, packing=False)
    assert (metrics["updates"], metrics["applied_updates"]) == (3, 3.0)
    assert metrics["log_ratio_abs_max"] > 1e-3  # of the later updates
    once, single = plain
    assert single["log_ratio_abs_max"] == 0.0 and difference(params, once) > 0


def test_selected_tokens_go_with_their_rows_into_minibatches(job, start):
    knobs = {"name": "kl_cov", "cov_fraction": 0.5, "cov_kl_coef": 1e4, "observation_coef": 0.1}
    _, _, (metrics,) = learn(job, start, knobs, num_minibatches=2, packing=False)
    assert metrics["selected_tokens"] > 0 and metrics["applied_updates"] == 2.0
    assert metrics["loss"] > 10  # the penalty of the second update
    # The first update is without it: ratios are 1 up to rounding, which would set the sign of its gradient.
    learner, selected = Learner(MODEL, LossConfig(**knobs), SGD, num_minibatches=2, microbatch_tokens=128), []
    update = learner._update

    def spied(state, parts, pause):
        selected.append(any(part.selected.any() for part in parts))
        return update(state, parts, pause)

    learner._update = spied
    learner.learn(*job(learner.loss), on_device(start))
    assert selected == [False, True]
    assert metrics["observation_tokens"] == metrics["observation_loss"] == 0  # no tool was called
    with pytest.raises(ValueError, match="'kl_cov' makes one update of each job"):
        learn(job, start, knobs | {"correction": {"name": "token_mask"}})


def test_a_job_makes_an_update_for_each_minibatch(job, start):
    _, _, (metrics,) = learn(job, start, {"name": "dapo"}, num_minibatches=2, packing=False)
    assert (metrics["updates"], metrics["applied_updates"]) == (2, 2.0)
    assert metrics["log_ratio_abs_max"] > 1e-3  # the second divides by the policy before the first


def test_what_is_not_finite_stays_so_without_a_warning():
    updates = [{"loss": value, "kl": value} for value in (np.inf, -np.inf, 1.0)]
    counts = [{"tokens": tokens, "updates": 1} for tokens in (0, 2, 2)]
    with warnings.catch_warnings(action="error"):
        merged = merge_metrics(updates, counts, {"loss": "updates"})
    assert np.isnan(merged["loss"]) and merged["kl"] == -np.inf
    assert merge_metrics([{"kl": 0.0}], [{"tokens": 0}], {}) == {"kl": 0.0}


@pytest.mark.parametrize("knobs", [{"name": "grpo"}, {"name": "dapo"}])
def test_metrics_of_several_updates_are_weighted_by_what_they_are_means_of(make_sequence, start, knobs):
    """Three trajectories, of four, one and eight trained tokens in two sequences, in updates of two and of one."""
    last = {"completion_mask": [False] * 5 + [True]}
    pieces = [[make_sequence(0)], [make_sequence(1, **last)], [make_sequence(2), make_sequence(3)]]
    group = [Trajectory(episode=[], reward=float(place**2), sequences=each) for place, each in enumerate(pieces)]
    loss, slowly = LossConfig(**knobs), SGD.model_copy(update={"learning_rate": 1e-12})

    def metrics(num_minibatches):
        rows = [Row(sequence, i) for i, each in enumerate(pieces) for sequence in each]
        learner = Learner(MODEL, loss, slowly, num_minibatches=num_minibatches, packing=False, microbatch_tokens=64)
        return learner.learn(rows, collect_rewards([group], loss), on_device(start))[1]

    whole, parts = metrics(1), metrics(2)
    assert (parts["updates"], parts["applied_updates"]) == (2, 2.0)
    for name in ("loss", "policy_loss", "entropy", "sampler_logprob_diff_mean", "sampler_disagreement_fraction"):
        assert parts[name] == pytest.approx(whole[name], rel=1e-5, abs=1e-6), name


@pytest.mark.parametrize("packing", [False, True])
def test_kept_rows_report_the_advantages_and_entropies_of_their_tokens(job, start, packing):
    loss, kept = LossConfig(name="dapo"), {}
    rows, rewards = job(loss)
    parts = [
        Learner(MODEL, loss, SGD, microbatch_tokens=128, packing=packing).learn(
            rows, rewards, on_device(start), kept_rows=wanted, keep_scores=kept.__setitem__
        )
        for wanted in ((), (1, 2))
    ]
    assert difference(parts[0][0], parts[1][0]) == 0.0 and parts[0][1] == parts[1][1]
    assert list(kept) == [1, 2]
    advantages = group_advantages(rewards.rewards, rewards.group_ids)
    for row, (of_tokens, entropies) in kept.items():
        logits = hidden_by_hand(start, rows[row].sequence.tokens) @ start["head"]
        logprobs = logits - np.logaddexp.reduce(logits, axis=-1, keepdims=True)
        expected = -(np.exp(logprobs) * logprobs).sum(-1)  # of the token after each
        mask = rows[row].sequence.completion_mask
        assert entropies[1:] == pytest.approx(np.where(mask[1:], expected[:-1], 0), abs=1e-5)
        assert of_tokens[mask] == pytest.approx([advantages[row]] * sum(mask)) and len(of_tokens) == len(mask)


@pytest.mark.parametrize(("num_minibatches", "loss"), [(1, {"name": "dapo"}), (2, {"name": "grpo", "beta": 0.1})])
def test_trajectories_whose_advantages_are_0_can_be_skipped(make_sequence, start, loss, num_minibatches):
    """The job is then that of the other trajectories, and what is skipped is still reported to who wants its scores."""

    def job(groups):
        groups = [
            [Trajectory(episode=[], reward=each, sequences=[make_sequence(number)]) for number, each in group]
            for group in groups
        ]
        rows = [Row(t.sequences[0], i) for i, t in enumerate(t for group in groups for t in group)]
        return rows, collect_rewards(groups, LossConfig(**knobs))

    knobs = loss | {"advantages": "group_mean"}
    silent, mixed = [(0, 1.0), (1, 1.0)], [(2, 0.0), (3, 1.0), (4, 0.5)]  # the last one's advantage is 0
    skipping, kept = knobs | {"skip_zero_advantages": True}, {}
    options = {"num_minibatches": num_minibatches, "microbatch_tokens": 128, "packing": False}
    learner = Learner(MODEL, LossConfig(**skipping), SGD, **options)
    all_of_them = job([silent, mixed])
    params, metrics = learner.learn(*all_of_them, on_device(start), kept_rows=(0, 2), keep_scores=kept.__setitem__)
    _, expected, (wanted,) = learn(lambda loss: job([mixed[:2]]), start, knobs, **options)
    assert difference(params, expected) == 0.0 < difference(params, start)
    assert metrics == wanted | {"skipped_trajectories": 3, "no_signal_groups": 1}
    assert [scores.advantages.any() for scores in kept.values()] == [False, True]


def test_a_job_without_any_advantage_is_not_cut_short(make_group, start):
    def job(loss, *groups):
        rows = [Row(t.sequences[0], i) for i, t in enumerate(t for group in groups for t in group)]
        return rows, collect_rewards(list(groups), loss)

    def learned(*groups):
        return learn(lambda loss: job(loss, *groups), start, {"name": "dapo", "skip_zero_advantages": True})[2][0]

    silent = learned(make_group(1.0, 1.0), make_group(0.0, 0.0))
    assert (silent["nothing_to_learn"], silent["skipped_trajectories"]) == (1.0, 0)
    # The same sum, in other turns.
    assert learned(make_group(1.0, 1.0, shaped_rewards=[[1.0, 0.0], [0.0, 1.0]]))["skipped_trajectories"] == 0


def test_references_stay_and_then_average(job, start):
    other = jax.tree.map(lambda x: x * np.float32(1.1), start)  # of another checkpoint
    knobs = {"beta": 0.1, "reference": {"update_every": 2, "mixing": 0.25}}
    learner, params, (metrics,) = learn(job, start, knobs, reference=Weights(MODEL, on_device(other)))
    assert difference(learner.reference.params, other) == 0.0 and metrics["kl"] > 0
    params, _ = learner.learn(*job(LossConfig(**knobs)), params)
    expected = jax.tree.map(lambda new, old: 0.25 * np.asarray(new) + 0.75 * old, params, other)
    assert difference(learner.reference.params, expected) < 1e-6


def test_ppo_trains_policy_and_values(job, start):
    slowly = SGD.model_copy(update={"learning_rate": 0.02})
    learner, params, history = learn(job, start, {"name": "ppo"}, jobs=3, num_iterations=2, optimizer=slowly)
    assert difference(params, start) > 0
    assert np.abs(learner.value_head["kernel"]).max() > 0
    assert history[-1]["value_loss"] < history[0]["value_loss"]
    assert learner.step == 6


def test_the_value_of_a_whole_row_stands_behind_an_episode_that_was_cut(job, start, make_sequence):
    def values_behind(packing, **knobs):
        loss = LossConfig(name="ppo", **knobs)
        rows, credit = job(loss)
        rows[1] = Row(make_sequence(1, episode_truncated=True), 1)
        rows[2] = Row(make_sequence(2, truncated=True), 2)  # an answer in the middle
        learner = Learner(MODEL, loss, SGD, packing=packing, microbatch_tokens=64)
        learner.arrays(start)  # makes what a first job starts from
        learner.value_head = HEAD
        batch, _ = compute_advantages(
            with_scores(make_batch(rows, learner._planner()), loss, *learner._scorers(start)), credit, loss
        )
        returns = [numbers[-1] for numbers in unpack(batch.packing, batch.batch.returns)]
        return batch.bootstrap_values.tolist(), returns

    behind, returns = values_behind(packing=False)
    assert values_behind(packing=True)[0] == pytest.approx(behind, rel=1e-4)
    by_hand = float(hidden_by_hand(start, make_sequence(1).tokens)[-1] @ HEAD["kernel"] + HEAD["bias"])
    assert behind == pytest.approx([0, by_hand, 0, 0], rel=1e-4)
    # With a discount of 1 the last return is the reward and the value behind it.
    assert returns == pytest.approx([0, 1 + by_hand, 0, 1], rel=1e-4)
    assert not any(values_behind(packing=False, bootstrap="none")[0])


def test_scores_before_and_after_advantages_are_of_one_program(job, start):
    rows, credit = job(LossConfig())
    learner = Learner(MODEL, LossConfig(), SGD, num_iterations=2, packing=False, microbatch_tokens=64)
    learner.arrays(start)
    laid_out, (scorer, *_) = make_batch(rows, learner._planner()), learner._scorers(start)
    expected = score_tokens(laid_out, scorer)
    with closing(CompileCounter()) as compiles:
        found = score_tokens(compute_advantages(laid_out, credit, LossConfig())[0], scorer)
    assert compiles.count == 0
    np.testing.assert_array_equal(found.logprobs, expected.logprobs)


def test_scores_are_the_same_in_any_microbatches(job, start):
    """Padded, packed, one row at a time or all at once; padding has none."""
    rows, _ = job(LossConfig())

    def scores(**options):
        learner = Learner(MODEL, LossConfig(beta=0.1), SGD, num_iterations=2, **options)
        learner.arrays(start)
        batch = with_scores(make_batch(rows, learner._planner()), LossConfig(), *learner._scorers(start))
        is_token = pack(batch.packing, [True] * len(rows), np.bool_)
        assert not batch.batch.old_logprobs[~is_token].any()
        np.testing.assert_array_equal(batch.batch.old_logprobs, batch.batch.ref_logprobs)  # the start itself
        return unpack(batch.packing, batch.batch.old_logprobs)

    whole = scores(packing=False)
    for options in ({"packing": False, "microbatch_tokens": 16}, {"packing": True, "microbatch_tokens": 64}):
        np.testing.assert_allclose(scores(**options), whole, rtol=1e-5, atol=1e-6)


def test_weights_of_rewards_are_no_matter_of_the_update():
    first, second = (
        Learner(MODEL, LossConfig(reward_weights={"right": x}, per_task={"a": {"weight": x}}), SGD) for x in (1.0, 2.0)
    )
    assert first._update is second._update


@pytest.mark.parametrize("advantages", ["leave_one_out", "reinforce_pp"])
def test_kl_in_the_reward_trains(job, start, advantages):
    knobs = {"name": "reinforce", "advantages": advantages, "beta": 0.1, "kl": "k1_in_reward"}
    _, params, (metrics,) = learn(job, start, knobs)
    assert metrics["applied_updates"] == 1.0 and difference(params, start) > 0
    assert metrics["kl"] == metrics["kl_k1"] == 0.0  # the reference is the start itself
    other = Weights(MODEL, on_device(jax.tree.map(lambda x: x * np.float32(1.1), start)))
    _, held, (metrics,) = learn(job, start, knobs, reference=other)
    assert metrics["kl"] > 0 and difference(held, params) > 0


def test_the_correction_reaches_the_loss(job, start, plain):
    loss = LossConfig(name="dapo", correction={"name": "token_truncate", "high": 1.5})
    rows, credit = job(loss)
    unlikely = [{"behavior_logprobs": [-30.0] * len(row.sequence.tokens)} for row in rows]
    rows = [
        row._replace(sequence=row.sequence.model_copy(update=each)) for row, each in zip(rows, unlikely, strict=True)
    ]
    learner = Learner(MODEL, loss, SGD, packing=False, microbatch_tokens=128)
    params, metrics = learner.learn(rows, credit, on_device(start))
    assert metrics["correction_weight_mean"] == 1.5 and metrics["correction_fraction"] == 1.0
    expected = jax.tree.map(lambda old, new: old + 1.5 * (np.asarray(new) - old), start, plain[0])
    assert difference(params, expected) <= 1e-5 * difference(plain[0], start)


def echo(params, tokens, positions):
    return jax.nn.one_hot(tokens, 8) * params["scale"]


def test_networks_that_cannot_keep_segments_apart_are_not_packed(start):
    assert learner_module.can_pack(MODEL, start)
    assert not learner_module.can_pack(from_function(echo), {"scale": np.float32(1)})


@pytest.mark.slow
def test_baselines_of_tokens_are_those_of_the_policy(job, start):
    loss, kept = LossConfig(name="dapo", advantages="optimal_token"), {}
    rows, credit = job(loss)
    options = {"kept_rows": range(4), "keep_scores": kept.__setitem__}
    _, metrics = Learner(MODEL, loss, SGD, microbatch_tokens=128).learn(rows, credit, on_device(start), **options)
    tokens, mask = (np.array([getattr(row.sequence, name) for row in rows]) for name in ("tokens", "completion_mask"))
    logits = np.stack([hidden_by_hand(start, each) for each in tokens])[:, :-1] @ start["head"]
    logprobs = logits - np.logaddexp.reduce(logits, axis=-1, keepdims=True)
    chosen = np.take_along_axis(logprobs, tokens[:, 1:, None], axis=-1)[..., 0]
    returns = np.broadcast_to(credit.rewards[:, None], chosen.shape)
    squares = np.exp(2 * logprobs).sum(-1)
    expected = optimal_token_advantages(returns, chosen, squares, mask[:, 1:], credit.group_ids)
    assert metrics["applied_updates"] == 1 and np.ptp(expected[0]) > 0
    for row in range(4):
        np.testing.assert_allclose(kept[row].advantages[1:], expected[row], atol=1e-5)


@pytest.mark.slow
def test_results_of_tools_are_learned_without_any_reward(start, make_sequence):
    seen = {"completion_mask": [False, False, True, False, False, True], "observations": [0, 0, 0, 1, 1, 0]}
    loss = LossConfig(name="dapo", observation_coef=0.1)
    group = [Trajectory(episode=[], reward=1.0, sequences=[make_sequence(place, **seen)]) for place in range(4)]
    rows, params, history = [Row(t.sequences[0], i) for i, t in enumerate(group)], on_device(start), []
    learner = Learner(MODEL, loss, SGD, microbatch_tokens=32, num_iterations=2)
    for _ in range(3):
        params, metrics = learner.learn(rows, collect_rewards([group], loss), params)
        history.append(metrics["observation_loss"])
    assert metrics["observation_tokens"] == 8 and metrics["policy_loss"] == 0.0
    assert history[0] > history[1] > history[2] > 0


@pytest.mark.slow
@pytest.mark.parametrize(
    "loss",
    [
        {"name": "ppo"},
        {"name": "clip_cov", "observation_coef": 0.1, "advantages": "optimal_token"},
        {"name": "grpo", "beta": 0.1},
        {"name": "grpo", "beta": 0.1, "reference": {"update_every": 1, "mixing": 0.5}},
        pytest.param(
            {"name": "dapo", "beta": 0.1, "clip_low": 0.2, "per_task": {"a": {"clip_low": 0.1, "beta": 0.0}}},
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_warm_up_changes_nothing_and_no_job_compiles_after_it(job, start, loss, monkeypatch):
    monkeypatch.setattr(learner_module, "warm_up_rounds", lambda platform: 3)  # as on GPUs
    if "reference" not in loss:  # nothing moves, so nothing is compiled for it
        monkeypatch.setattr(learner_module, "mix", None)
    learner = Learner(MODEL, LossConfig(**loss), SGD, microbatch_tokens=32, num_iterations=2)
    given, learner._shared_tokens = on_device(start), 64
    warm = learner.warm_up(given, 32)  # two widths and several heights: the state is donated from one to the next
    jax.tree.map(np.testing.assert_array_equal, warm, start)
    assert learner.step == 0 and learner.jobs == 0 and learner._planner().shared_tokens == 0
    assert (learner.value_head is not None) == (loss["name"] == "ppo")
    assert all(not leaf.is_deleted() for leaf in jax.tree.leaves(learner.arrays(warm)))
    with closing(CompileCounter()) as compiles:
        for _ in range(2):
            warm, metrics = learner.learn(*job(learner.loss), warm)
    assert compiles.names() == [] and metrics["applied_updates"] == 2


@pytest.mark.parametrize("remat", CHOICES)
def test_the_fastest_checkpoint_policy_that_fits_is_trained(job, start, remat, monkeypatch):
    learner, tried = Learner(MODEL, LossConfig(), SGD, microbatch_tokens=64), []

    def memory(learner, params, longest):
        tried.append(learner.model)
        if len(tried) == 1 and remat != CHOICES[0]:  # as compilers for TPUs end that find too little memory
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Ran out of memory in memory space hbm")
        return {"update": float(len(CHOICES) - len(tried))}

    monkeypatch.setattr(memory_module, "training_memory", memory)
    least = len(CHOICES) - 1 - CHOICES.index(remat)
    assert first_fitting_remat(learner, start, 32, lambda memory: memory["update"] <= least) == remat
    assert tried == [MODEL.with_remat(name) for name in CHOICES[: len(tried)]]
    assert learner.model == tried[-1]


def test_another_error_of_the_compiler_is_no_lack_of_memory(start, monkeypatch):
    learner = Learner(MODEL, LossConfig(), SGD, microbatch_tokens=64)

    def memory(learner, params, longest):
        raise jax.errors.JaxRuntimeError("INTERNAL: something else")

    monkeypatch.setattr(memory_module, "training_memory", memory)
    with pytest.raises(jax.errors.JaxRuntimeError, match="something else"):
        first_fitting_remat(learner, start, 32, lambda memory: True)


def test_memory_is_that_of_the_compiled_programs(start):
    learner = Learner(MODEL, LossConfig(), OptimizerConfig(learning_rate=1e-3), microbatch_tokens=64)
    shapes = jax.eval_shape(lambda params: params, start)
    memory = training_memory(learner, shapes, 32)
    parameters = sum(leaf.nbytes for leaf in jax.tree.leaves(start)) / 2**20
    assert memory["parameters"] == memory["gradients"] == parameters and memory["optimizer"] > 2 * parameters
    assert learner.largest_microbatch(shapes, 32) == (2, 32)
    assert memory["update"] > 0 and memory["reference"] == 0
