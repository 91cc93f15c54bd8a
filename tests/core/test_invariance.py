"""How a batch is laid out changes neither loss nor gradients: order, padding, packing, microbatches, ragged groups."""

from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxft.core.advantages import group_advantages
from jaxft.core.correction import sampler_correction
from jaxft.core.losses import policy_loss
from jaxft.core.objectives import dpo_loss, grpo_loss, ppo_loss, sft_loss
from jaxft.core.packing import pack, plan_packing, plan_padding, segments
from jaxft.core.types import Batch
from jaxft.core.update import init_train_state, make_update, split_rows

HEIGHT, WIDTH = 8, 12
"""Every batch below has this shape, so each loss is compiled once for rows and once for segments."""


def slow(name):
    """A case for the slow tests."""
    return pytest.param(name, marks=pytest.mark.slow)


def grpo(name, correction=None, entropy_coef=0.0, max_sampler_diff=None, **knobs):
    """`grpo_loss` of a published loss with some of its knobs changed."""
    bound = partial(policy_loss, loss=name, **knobs)
    options = {"correction": correction, "entropy_coef": entropy_coef, "max_sampler_diff": max_sampler_diff}
    return partial(grpo_loss, loss=bound, **options)


LOSSES = {
    "grpo": grpo("grpo", beta=0.1),
    "dapo": grpo("dapo", delta=3.0),
    "dr_grpo": grpo("dr_grpo", max_completion_tokens=20, entropy_coef=0.1),
    "gspo": grpo("gspo", beta=0.1, kl="k2", clip_low=0.1, clip_high=0.1),
    "k3_trl": grpo("gspo", beta=0.1, kl="k3_trl", max_sampler_diff=0.15),
    "cispo": grpo("cispo", correction=partial(sampler_correction, kind="sequence_truncate", high=1.2)),
    "reinforce": grpo("reinforce", correction=partial(sampler_correction, kind="sequence_geometric_mask")),
    "ppo": partial(ppo_loss, value_coef=0.3),
    "sft": sft_loss,
    "grpo, on policy": grpo("grpo", beta=0.1),
    "gspo, on policy": grpo("gspo", beta=0.1, kl="k2"),
    "dr_grpo, on policy": grpo("dr_grpo", max_completion_tokens=20),
    "dpo sigmoid": partial(dpo_loss, kind="sigmoid", beta=0.3, sft_coef=0.2),
    "dpo ipo": partial(dpo_loss, kind="ipo", beta=0.3, sft_coef=0.2),
}
OF_ROWS = [name for name in LOSSES if not name.startswith("dpo") and "on policy" not in name]
"""Losses of batches that have everything; the others have tests of their own."""

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
            }
        )
    return examples


def make_batch(examples, packing, dtype=np.float32):
    """Their batch in this packing, filled up to `HEIGHT` rows."""
    packing = packing._replace(height=HEIGHT)
    types = {"tokens": np.int32, "completion_mask": np.bool_}
    fields = {
        name: jnp.array(pack(packing, [example[name] for example in examples], types.get(name, dtype)))
        for name in examples[0]
    }
    segment_ids, positions = segments(packing)
    return Batch(**fields, segment_ids=jnp.array(segment_ids), positions=jnp.array(positions))


def as_rows(batch):
    return batch._replace(segment_ids=None, positions=None)


@cache
def make_gradients(name, model, is_float64):
    """The update that users make, whose new optimizer state are the gradients."""
    return make_update(model, LOSSES[name], keep_gradients)


def gradients(name, model, params, batch, microbatch_rows=None):
    """Loss, metrics and gradients of the batch by one update, in microbatches of so many rows."""
    if name == "reinforce":  # has no ratio, and refuses what one is made of
        batch = batch._replace(old_logprobs=None)
    if name == "ppo":
        hidden_size = jax.eval_shape(model.apply, params, batch.tokens, batch.tokens)[0].shape[-1]
        dtype = jnp.float64 if jax.config.jax_enable_x64 else jnp.float32
        head = {"kernel": jnp.ones(hidden_size, dtype), "bias": jnp.ones((), dtype)}
        params = {"policy": params, "value_head": head}
    update = make_gradients(name, model, jax.config.jax_enable_x64)
    state = init_train_state(jax.tree.map(jnp.copy, params), keep_gradients)
    state, metrics = update(state, split_rows(batch, microbatch_rows))
    assert metrics["nonfinite_updates"] == 0
    return metrics["loss"], metrics, state.opt_state


def assert_same(got, expected, tolerance):
    """Per leaf, the largest difference against the largest gradient of the leaf; the loss and the metrics too."""
    np.testing.assert_allclose(got[0], expected[0], rtol=tolerance, atol=tolerance)
    assert got[1].keys() == expected[1].keys()
    for name, value in expected[1].items():
        np.testing.assert_allclose(got[1][name], value, rtol=10 * tolerance, atol=10 * tolerance, err_msg=name)
    leaves = jax.tree.leaves(expected[2])
    largest = max(np.abs(leaf).max() for leaf in leaves)
    for mine, theirs in zip(jax.tree.leaves(got[2]), leaves, strict=True):
        # A leaf of one number, the bias of the values, may cancel to almost nothing: it is measured by all gradients.
        scale = largest if theirs.size == 1 else np.abs(theirs).max()
        assert np.abs(mine - theirs).max() <= tolerance * scale + 1e-30


def check_layouts(name, model, params, draw, dtype, tolerance):
    """The shuffled, the packed, and the padded with segments, against rows; a second program for the segments."""
    examples = make_examples(draw)
    lengths = [len(example["tokens"]) for example in examples]
    padded = make_batch(examples, plan_padding(lengths, WIDTH), dtype)
    expected = gradients(name, model, params, as_rows(padded))
    order = draw.permutation(HEIGHT)
    shuffled = make_batch([examples[i] for i in order], plan_padding([lengths[i] for i in order], WIDTH), dtype)
    packed = make_batch(examples, plan_packing(lengths, WIDTH), dtype)
    assert_same(gradients(name, model, params, as_rows(shuffled)), expected, tolerance)
    numbered = packed.segment_ids + 1000 * jnp.arange(HEIGHT)[:, None]  # unique in the whole batch
    for batch in (packed, padded, shuffled, packed._replace(segment_ids=numbered)):
        assert_same(gradients(name, model, params, batch), expected, tolerance)
    return packed, expected


@pytest.fixture(scope="module")
def small(bigram):
    draw = np.random.default_rng(3)
    return bigram, {"embedding": draw.normal(size=(48, 4)) * 0.5, "head": draw.normal(size=(4, 48)) * 0.5}


def of_type(params, dtype):
    return jax.tree.map(lambda x: jnp.array(np.asarray(x), dtype), params)


@pytest.mark.parametrize("name", OF_ROWS)
@settings(max_examples=8, deadline=None)
@given(seed=st.integers(0, 2**32 - 1))
def test_order_packing_and_microbatches_change_nothing(small, name, seed):
    model, params = small[0], of_type(small[1], jnp.float32)
    packed, expected = check_layouts(name, model, params, np.random.default_rng(seed), np.float32, 1e-5)
    for microbatch_rows in (1, 2, 4):
        assert_same(gradients(name, model, params, packed, microbatch_rows), expected, 1e-5)


@pytest.mark.parametrize("name", [name if name in ("grpo", "ppo") else slow(name) for name in OF_ROWS])
@settings(max_examples=3, deadline=None)
@given(seed=st.integers(0, 2**32 - 1))
def test_nor_in_float64(small, name, seed):
    with jax.enable_x64(True):
        model, params = small[0], of_type(small[1], jnp.float64)
        packed, expected = check_layouts(name, model, params, np.random.default_rng(seed), np.float64, 1e-10)
        assert_same(gradients(name, model, params, packed, 2), expected, 1e-10)


@pytest.mark.parametrize("name", ["k3_trl", slow("ppo")])
@settings(max_examples=4, deadline=None)
@given(seed=st.integers(0, 2**32 - 1))
def test_a_model_with_attention_sees_no_neighbour(tiny, name, seed):
    packed, expected = check_layouts(name, *tiny, np.random.default_rng(seed), np.float32, 1e-5)
    assert_same(gradients(name, *tiny, packed, 4), expected, 1e-5)


def test_the_width_changes_nothing(tiny):
    examples = make_examples(np.random.default_rng(8))
    lengths = [len(example["tokens"]) for example in examples]
    narrow, wide = (as_rows(make_batch(examples, plan_padding(lengths, width))) for width in (WIDTH, 2 * WIDTH))
    assert_same(gradients("gspo", *tiny, wide), gradients("gspo", *tiny, narrow), 1e-5)


@settings(max_examples=8, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), sizes=st.lists(st.integers(1, 3), min_size=1, max_size=2))
def test_ragged_groups_are_equal_ones_with_members_that_do_not_count(small, seed, sizes):
    draw = np.random.default_rng(seed)
    model, params = small[0], of_type(small[1], jnp.float32)
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
            rows.append(examples[i] | {"advantages": np.full(length, advantage), "completion_mask": mask})
        batch = make_batch(rows, plan_padding([len(row["tokens"]) for row in rows], WIDTH))
        return gradients("grpo", model, params, batch)

    assert_same(gradients_of(list(range(len(everyone)))), gradients_of(members), 1e-5)


@pytest.mark.parametrize("kind", ["sigmoid", "ipo"])
def test_pairs_may_stand_in_any_order_and_be_split_between_pairs(small, kind):
    model, params = small[0], of_type(small[1], jnp.float32)
    examples = make_examples(np.random.default_rng(4))

    def gradients_of(order, microbatch_rows=None):
        rows = [examples[i] for i in order]
        batch = as_rows(make_batch(rows, plan_padding([len(row["tokens"]) for row in rows], WIDTH)))
        return gradients(f"dpo {kind}", model, params, batch, microbatch_rows)

    expected = gradients_of(range(HEIGHT))
    assert_same(gradients_of([4, 5, 0, 1, 6, 7, 2, 3]), expected, 1e-5)
    for microbatch_rows in (2, 4):
        assert_same(gradients_of(range(HEIGHT), microbatch_rows), expected, 1e-5)
    # One without an answer is no pair, wherever it is cut off.
    examples[0] = examples[0] | {"completion_mask": np.zeros_like(examples[0]["completion_mask"])}
    fewer = gradients_of(range(2, HEIGHT))
    loss, metrics, grads = gradients_of(range(HEIGHT), 2)
    np.testing.assert_allclose(loss, fewer[0], rtol=1e-5)
    np.testing.assert_allclose(metrics["reward_margin"], fewer[1]["reward_margin"], rtol=1e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), grads, fewer[2])


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


@pytest.mark.parametrize("name", ["grpo, on policy", "gspo, on policy", "dr_grpo, on policy"])
def test_a_trajectory_counts_once_however_it_is_cut(small, name):
    model, params = small[0], of_type(small[1], jnp.float32)
    trajectories = make_trajectories(np.random.default_rng(4))

    def check(found, wanted):
        assert abs(found[0] - wanted[0]) < 1e-6
        largest = max(jnp.abs(leaf).max() for leaf in jax.tree.leaves(wanted[2]))
        for mine, theirs in zip(*map(jax.tree.leaves, (found[2], wanted[2])), strict=True):
            assert jnp.abs(mine - theirs).max() < 1e-6 * largest

    def batch_of(sequences, packing):
        return make_batch(sequences, packing([len(each["tokens"]) for each in sequences], WIDTH))

    whole = as_rows(batch_of(trajectories, plan_padding))
    wanted = gradients(name, model, params, whole)
    # Each trajectory a row is what a batch that says nothing of trajectories means.
    alone = gradients(name, model, params, whole._replace(trajectory_tokens=None))
    check(alone, wanted)
    for cuts in (((), (), (2,)), ((3, 4, 6), (), ()), ((6,), (2, 3), (3,))):
        pieces = [piece for each, ends in zip(trajectories, cuts, strict=True) for piece in cut(each, ends)]
        rows, packed = batch_of(pieces, plan_padding), batch_of(pieces, plan_packing)
        for batch, microbatch_rows in ((as_rows(rows), None), (packed, 2)):
            check(gradients(name, model, params, batch, microbatch_rows), wanted)
        counted_apart = gradients(name, model, params, as_rows(rows)._replace(trajectory_tokens=None))
        assert abs(counted_apart[0] - wanted[0]) > 1e-3
