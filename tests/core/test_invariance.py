"""How a batch is laid out changes neither loss nor gradients: order, padding, packing, microbatches, ragged groups."""

from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxft.core.advantages import group_advantages
from jaxft.core.correction import sampler_correction
from jaxft.core.losses import policy_loss
from jaxft.core.objectives import dpo_loss, grpo_loss, ppo_loss, sft_loss
from jaxft.core.packing import pack, plan_packing, plan_padding, segments
from jaxft.core.types import Batch
from jaxft.core.update import TrainState, make_update, split_rows

HEIGHT, WIDTH = 8, 12
"""Every batch below has this shape, so the losses are compiled once for rows and once for segments."""


def grpo(name, correction=None, entropy_coef=0.0, observation_coef=0.0, max_sampler_diff=None, **knobs):
    """`grpo_loss` of a published loss with some of its knobs changed."""
    bound = partial(policy_loss, loss=name, **knobs)
    options = {"correction": correction, "entropy_coef": entropy_coef, "max_sampler_diff": max_sampler_diff}
    options["observation_coef"] = observation_coef
    return partial(grpo_loss, loss=bound, **options)


LOSSES = {
    "grpo": grpo("grpo", beta=0.1),
    "dapo": grpo("dapo", delta=3.0),
    "dr_grpo": grpo("dr_grpo", max_completion_tokens=20, entropy_coef=0.1),
    "gspo": grpo("gspo", beta=0.1, kl="k2", clip_low=0.1, clip_high=0.1),
    "k3_trl": grpo("gspo", beta=0.1, kl="k3_trl", max_sampler_diff=0.15),
    "cispo": grpo("cispo", correction=partial(sampler_correction, kind="sequence_truncate", high=1.2)),
    "gmpo": grpo("gmpo", beta=0.1, clip_low=0.1, clip_high=0.1),
    "sapo": grpo("sapo", correction=partial(sampler_correction, kind="token_truncate", high=1.2)),
    "dppo_tv": grpo("dppo_tv", clip_low=1e-3, clip_high=1e-3),
    "dppo_kl": grpo("dppo_kl", clip_low=1e-3, clip_high=1e-3),
    "kl_cov": grpo("kl_cov", cov_kl_coef=2.0),
    "clip_cov": grpo("clip_cov", clip_low=0.1, clip_high=0.1),
    "echo": grpo("dapo", observation_coef=0.3),
    "reinforce": grpo("reinforce", correction=partial(sampler_correction, kind="sequence_geometric_mask")),
    "ppo": partial(ppo_loss, value_coef=0.3),
    "sft": sft_loss,
    "gspo, on policy": grpo("gspo", beta=0.1, kl="k2"),
    "dr_grpo, on policy": grpo("dr_grpo", max_completion_tokens=20),
    "dpo sigmoid": partial(dpo_loss, kind="sigmoid", beta=0.3, sft_coef=0.2),
    "dpo ipo": partial(dpo_loss, kind="ipo", beta=0.3, sft_coef=0.2),
}
FULL = {name: loss for name, loss in LOSSES.items() if not name.startswith("dpo") and "on policy" not in name}
"""Losses of batches that have everything; the others have tests of their own."""
DIFFERENT = ("dr_grpo", "k3_trl", "cispo", "gmpo", "dppo_kl", "kl_cov", "echo", "reinforce", "ppo", "sft")
"""Losses that differ in how they reduce rows and segments."""

keep_gradients = optax.GradientTransformation(
    lambda params: jax.tree.map(jnp.zeros_like, params), lambda grads, state, params: (state, grads)
)
"""An optimizer that moves nothing: its state are the last gradients."""
RECORDED = ("sampler_logprobs", "behavior_logprobs", "old_logprobs", "ref_logprobs")


def make_examples(draw):
    """Sequences with everything that a loss can want of them; only the first of them may have nothing trained."""
    examples = []
    for i in range(HEIGHT):
        length = int(draw.integers(3, WIDTH // 2 + 1))
        mask = draw.random(length) < 0.7
        mask[0], mask[-1] = False, i > 0
        near = draw.normal(size=(4, length)) * 0.2 - 3.9
        # Every other row has a credit of its own for each token, as step rewards make it.
        credit = draw.normal(size=length) if i % 2 else np.full(length, draw.normal())
        examples.append(
            {
                "tokens": draw.integers(48, size=length),
                "completion_mask": mask,
                "temperatures": draw.uniform(0.7, 1.3, size=length),
                "advantages": credit,
                **dict(zip(RECORDED, near, strict=True)),
                "old_values": draw.normal(size=length),
                "returns": draw.normal(size=length),
                "observation_mask": ~mask & (np.arange(length) > 0),
                "selected": np.arange(length) % 2 == i % 2,
            }
        )
    return examples


def make_batch(examples, packing, dtype=np.float32):
    """Their batch in this packing, filled up to `HEIGHT` rows."""
    packing = packing._replace(height=HEIGHT)
    types = {"tokens": np.int32, "completion_mask": np.bool_, "selected": np.bool_, "observation_mask": np.bool_}
    fields = {
        name: pack(packing, [example[name] for example in examples], types.get(name, dtype)) for name in examples[0]
    }
    segment_ids, positions = segments(packing)
    return Batch(**fields, segment_ids=segment_ids, positions=positions)


def as_rows(batch):
    return batch._replace(segment_ids=None, positions=None)


@cache
def make_gradients(names, model, is_float64):
    """The update that users make, whose new optimizer state are the gradients: of several losses in one program."""

    def loss_fn(model, params, batch, denominators):
        total, metrics = 0.0, {}
        for name in names:
            # reinforce has no ratio, and refuses what one is made of.
            given = batch._replace(old_logprobs=None) if name == "reinforce" else batch
            given = given if name in ("kl_cov", "clip_cov") else given._replace(selected=None)
            given = given if name == "echo" else given._replace(observation_mask=None)
            loss, own = LOSSES[name](model, params[name], given, denominators)
            total = total + loss
            metrics |= {f"{name}/{metric}": value for metric, value in (own | {"loss": loss}).items()}
        return total, metrics

    return make_update(model, loss_fn, keep_gradients)


def gradients(names, model, params, batch, microbatch_rows=None):
    """Loss, metrics and gradients of each loss by one update, in microbatches of so many rows."""
    names = tuple(names)
    copies = {name: jax.tree.map(np.array, params) for name in names}
    if "ppo" in names:
        hidden_size = jax.eval_shape(model.apply, params, batch.tokens, batch.tokens)[0].shape[-1]
        dtype = np.float64 if jax.config.jax_enable_x64 else np.float32
        head = {"kernel": np.ones(hidden_size, dtype), "bias": np.ones((), dtype)}
        copies["ppo"] = {"policy": copies["ppo"], "value_head": head}
    update = make_gradients(names, model, jax.config.jax_enable_x64)
    zeros = jax.tree.map(np.zeros_like, copies)
    state = jax.device_put(TrainState(copies, zeros, np.zeros((), np.int32)))
    state, metrics = jax.device_get(update(state, split_rows(batch, microbatch_rows)))
    assert metrics["nonfinite_updates"] == 0
    results = {}
    for name in names:
        own = {key.removeprefix(f"{name}/"): value for key, value in metrics.items() if key.startswith(f"{name}/")}
        results[name] = own["loss"], own, state.opt_state[name]
    return results


def assert_same(got, expected, tolerance):
    """Per leaf, the largest difference against the largest gradient of the leaf; the loss and the metrics too."""
    for name, (loss, metrics, grads) in expected.items():
        np.testing.assert_allclose(got[name][0], loss, rtol=tolerance, atol=tolerance, err_msg=name)
        assert got[name][1].keys() == metrics.keys()
        for metric, value in metrics.items():
            found = got[name][1][metric]
            np.testing.assert_allclose(
                found, value, rtol=10 * tolerance, atol=10 * tolerance, err_msg=f"{name} {metric}"
            )
        leaves = jax.tree.leaves(grads)
        largest = max(np.abs(leaf).max() for leaf in leaves)
        for mine, theirs in zip(jax.tree.leaves(got[name][2]), leaves, strict=True):
            # A leaf of one number, the bias of the values, may cancel to almost nothing: all gradients measure it.
            scale = largest if theirs.size == 1 else np.abs(theirs).max()
            assert np.abs(mine - theirs).max() <= tolerance * scale + 1e-30, name


def check_layouts(names, model, params, draw, dtype, tolerance):
    """The shuffled, the packed, and the padded with segments, against rows; a second program for the segments."""
    examples = make_examples(draw)
    lengths = [len(example["tokens"]) for example in examples]
    padded = make_batch(examples, plan_padding(lengths, WIDTH), dtype)
    expected = gradients(names, model, params, as_rows(padded))
    order = draw.permutation(HEIGHT)
    shuffled = make_batch([examples[i] for i in order], plan_padding([lengths[i] for i in order], WIDTH), dtype)
    packed = make_batch(examples, plan_packing(lengths, WIDTH), dtype)
    assert_same(gradients(names, model, params, as_rows(shuffled)), expected, tolerance)
    numbered = packed.segment_ids + 1000 * np.arange(HEIGHT, dtype=np.int32)[:, None]  # unique in the whole batch
    for batch in (packed, padded, shuffled, packed._replace(segment_ids=numbered)):
        assert_same(gradients(names, model, params, batch), expected, tolerance)
    return packed, expected


@pytest.fixture(scope="module")
def small(bigram):
    draw = np.random.default_rng(3)
    return bigram, {"embedding": draw.normal(size=(48, 4)) * 0.5, "head": draw.normal(size=(4, 48)) * 0.5}


def of_type(params, dtype):
    return jax.tree.map(lambda x: np.asarray(x, dtype), params)


def test_order_packing_and_microbatches_change_nothing(small):
    model, params = small[0], of_type(small[1], np.float32)
    for seed in range(4):
        packed, expected = check_layouts(DIFFERENT, model, params, np.random.default_rng(seed), np.float32, 1e-5)
        assert_same(gradients(DIFFERENT, model, params, packed, 2), expected, 1e-5)


@pytest.mark.slow
def test_nor_do_other_microbatches(small):
    model, params = small[0], of_type(small[1], np.float32)
    packed, expected = check_layouts(DIFFERENT, model, params, np.random.default_rng(9), np.float32, 1e-5)
    for microbatch_rows in (1, 4):
        assert_same(gradients(DIFFERENT, model, params, packed, microbatch_rows), expected, 1e-5)


@pytest.mark.slow
def test_nor_in_float64(small):
    with jax.enable_x64(True):
        model, params = small[0], of_type(small[1], np.float64)
        for seed in range(8):
            packed, expected = check_layouts(FULL, model, params, np.random.default_rng(seed), np.float64, 1e-10)
            assert_same(gradients(FULL, model, params, packed, 2), expected, 1e-10)


@pytest.mark.parametrize("name", ["k3_trl", pytest.param("ppo", marks=pytest.mark.slow)])
def test_a_model_with_attention_sees_no_neighbour(tiny, name):
    for seed in range(3):
        check_layouts([name], *tiny, np.random.default_rng(seed), np.float32, 1e-5)


@pytest.mark.slow
def test_the_width_changes_nothing(tiny):
    examples = make_examples(np.random.default_rng(8))
    lengths = [len(example["tokens"]) for example in examples]
    narrow, wide = (as_rows(make_batch(examples, plan_padding(lengths, width))) for width in (WIDTH, 2 * WIDTH))
    assert_same(gradients(["k3_trl"], *tiny, wide), gradients(["k3_trl"], *tiny, narrow), 1e-5)


@pytest.mark.parametrize("sizes", [(1, 3), (3, 1), (2, 3), (3, 2), (1, 2), (2, 2)], ids=str)
def test_ragged_groups_are_equal_ones_with_members_that_do_not_count(small, sizes):
    draw = np.random.default_rng(sizes)
    model, params = small[0], of_type(small[1], np.float32)
    examples = make_examples(draw)
    everyone = [(group, member) for group in range(len(sizes)) for member in range(max(sizes))]
    rewards = np.array([draw.normal() if member < sizes[group] else np.nan for group, member in everyone])
    members = [i for i, reward in enumerate(rewards) if np.isfinite(reward)]

    def gradients_of(chosen):
        advantages = group_advantages(rewards[chosen], np.array([everyone[i][0] for i in chosen]))
        rows = []
        for i, advantage in zip(chosen, advantages, strict=True):
            length = len(examples[i]["tokens"])
            mask = examples[i]["completion_mask"] & np.isfinite(rewards[i])
            seen = examples[i]["observation_mask"] & np.isfinite(rewards[i])
            changed = {"advantages": np.full(length, advantage), "completion_mask": mask, "observation_mask": seen}
            rows.append(examples[i] | changed)
        batch = make_batch(rows, plan_padding([len(row["tokens"]) for row in rows], WIDTH))
        return gradients(DIFFERENT, model, params, as_rows(batch))

    assert_same(gradients_of(list(range(len(everyone)))), gradients_of(members), 1e-5)


def test_pairs_may_stand_in_any_order_and_be_split_between_pairs(small):
    model, params = small[0], of_type(small[1], np.float32)
    examples = make_examples(np.random.default_rng(4))

    def gradients_of(order, microbatch_rows=None):
        rows = [examples[i] for i in order]
        batch = as_rows(make_batch(rows, plan_padding([len(row["tokens"]) for row in rows], WIDTH)))
        return gradients(["dpo sigmoid", "dpo ipo"], model, params, batch, microbatch_rows)

    expected = gradients_of(range(HEIGHT))
    assert_same(gradients_of([4, 5, 0, 1, 6, 7, 2, 3]), expected, 1e-5)
    assert_same(gradients_of(range(HEIGHT), 2), expected, 1e-5)
    # One without an answer is no pair, wherever it is cut off.
    examples[0] = examples[0] | {"completion_mask": np.zeros_like(examples[0]["completion_mask"])}
    fewer, found = gradients_of(range(2, HEIGHT)), gradients_of(range(HEIGHT), 2)
    for name, (loss, metrics, grads) in fewer.items():
        np.testing.assert_allclose(found[name][0], loss, rtol=1e-5)
        np.testing.assert_allclose(found[name][1]["reward_margin"], metrics["reward_margin"], rtol=1e-5)
        jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-6), found[name][2], grads)


def make_trajectories(draw):
    """Three of different lengths, trained wherever something stands before a token, save for some holes."""
    trajectories = []
    for length in (11, 8, 5):
        mask = draw.random(length) < 0.8
        mask[0], mask[1], mask[-1] = False, True, True
        trajectories.append(
            {
                "tokens": draw.integers(48, size=length),
                "completion_mask": mask,
                "advantages": np.full(length, draw.normal()),
                "ref_logprobs": draw.normal(size=length) * 0.2 - 3.9,
                "trajectory_tokens": np.full(length, mask.sum()),
            }
        )
    return trajectories


def cut(trajectory, ends):
    """A trajectory as sequences that end before these places; each begins with the token that stood before it.

    A model that sees one token back gives the tokens the same log-probabilities, wherever the cuts are.
    """
    pieces = []
    for start, end in zip((0, *ends), (*ends, len(trajectory["tokens"])), strict=True):
        piece = {name: values[max(start - 1, 0) : end].copy() for name, values in trajectory.items()}
        piece["completion_mask"][0] = False
        pieces.append(piece)
    return pieces


def test_a_trajectory_counts_once_however_it_is_cut(small):
    model, params = small[0], of_type(small[1], np.float32)
    trajectories = make_trajectories(np.random.default_rng(4))
    names = [name for name in LOSSES if "on policy" in name]

    def check(found, wanted):
        for name, (loss, _, grads) in wanted.items():
            assert abs(found[name][0] - loss) < 1e-6
            largest = max(np.abs(leaf).max() for leaf in jax.tree.leaves(grads))
            for mine, theirs in zip(*map(jax.tree.leaves, (found[name][2], grads)), strict=True):
                assert np.abs(mine - theirs).max() < 1e-6 * largest

    def batch_of(sequences, packing):
        return make_batch(sequences, packing([len(each["tokens"]) for each in sequences], WIDTH))

    whole = as_rows(batch_of(trajectories, plan_padding))
    wanted = gradients(names, model, params, whole)
    # Each trajectory a row is what a batch that says nothing of trajectories means.
    check(gradients(names, model, params, whole._replace(trajectory_tokens=None)), wanted)
    for cuts in (((), (), (2,)), ((3, 4, 6), (), ()), ((6,), (2, 3), (3,))):
        pieces = [piece for each, ends in zip(trajectories, cuts, strict=True) for piece in cut(each, ends)]
        rows, packed = batch_of(pieces, plan_padding), batch_of(pieces, plan_packing)
        for batch, microbatch_rows in ((as_rows(rows), None), (packed, 2)):
            check(gradients(names, model, params, batch, microbatch_rows), wanted)
        counted_apart = gradients(names, model, params, as_rows(rows)._replace(trajectory_tokens=None))
        for name in names:
            assert abs(counted_apart[name][0] - wanted[name][0]) > 1e-3
