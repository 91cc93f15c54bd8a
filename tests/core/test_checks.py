"""Every public function refuses shapes that disagree, and takes or refuses numbers of other types."""

import inspect
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxft.core.advantages import (
    estimate_advantages,
    gae,
    outcome_rewards,
    reward_to_go,
    step_advantages,
    weighted_sum,
    whiten,
)
from jaxft.core.checks import check_batch, check_batch_shapes, check_token_ids, vocabulary_size
from jaxft.core.correction import sampler_agreement, sampler_correction
from jaxft.core.losses import k1_penalty, kl_penalty, policy_loss, preference_loss, value_loss
from jaxft.core.objectives import grpo_loss, score_batch, sft_loss
from jaxft.core.packing import Branches
from jaxft.core.types import Batch, Denominators
from jaxft.core.update import init_train_state, loss_and_gradients, make_update

X, WIDE, COLUMN = np.zeros((2, 3), np.float32), np.zeros((2, 4), np.float32), np.zeros((2, 1), np.float32)
MASK = np.ones((2, 3), bool)
ONE = Denominators(1.0, 1.0)
PARAMS = {
    "embedding": np.random.default_rng(0).normal(size=(5, 3)).astype(np.float32),
    "head": np.random.default_rng(1).normal(size=(3, 5)).astype(np.float32),
}
"""Parameters of the bigram."""


def as_users_call(function, *arguments, **knobs):
    """Without the checks of annotations that a test session adds."""
    return inspect.unwrap(function)(*arguments, **knobs)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (partial(as_users_call, kl_penalty, "k3", X, COLUMN, X), r"log_ratio has shape \(2, 1\); wanted that of rho"),
        (partial(as_users_call, kl_penalty, "k3", X, X, WIDE), r"importance_ratio has shape \(2, 4\); wanted"),
        (partial(as_users_call, k1_penalty, X, COLUMN, MASK), r"ref_logprobs has shape \(2, 1\); wanted that of"),
        (partial(as_users_call, gae, X, COLUMN, MASK), r"values has shape \(2, 1\); wanted that of token_rewards"),
        (partial(as_users_call, reward_to_go, X, MASK[:1]), r"completion_mask has shape \(1, 3\); wanted that of"),
        (partial(as_users_call, whiten, X, MASK[:, :1]), r"completion_mask has shape \(2, 1\); wanted that of x"),
        (partial(as_users_call, outcome_rewards, X[0], MASK), r"rewards have shape \(3,\); wanted \(2,\), one per row"),
        (partial(as_users_call, value_loss, X, X, WIDE, MASK), r"returns has shape \(2, 4\); wanted that of values"),
        (
            partial(as_users_call, preference_loss, X[0], X[0], X[0], X[0, :1]),
            r"ref_rejected_logprobs has shape \(1,\); wanted that of chosen_logprobs, \(3,\)",
        ),
        (
            partial(as_users_call, sampler_correction, X, COLUMN, MASK, ONE, kind="token_mask"),
            r"behavior_logprobs has shape \(2, 1\); wanted that of old_logprobs",
        ),
        (partial(as_users_call, sampler_agreement, X, COLUMN, MASK, ONE), r"sampler_logprobs has shape \(2, 1\)"),
    ],
)
def test_shapes_that_disagree_are_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize(
    ("branches", "fields", "message"),
    [
        (Branches(1, 2), ("segment_ids",), "needs batch.segment_ids, batch.positions"),
        (Branches(3, 1), ("segment_ids", "positions"), "more than its prefix's columns"),
        (Branches(1, 3), ("segment_ids", "positions"), r"2 columns behind the prefix; .*count=3"),
    ],
)
def test_branches_that_do_not_divide_the_columns_are_refused(branches, fields, message):
    batch = Batch(np.zeros((2, 3), np.int32), MASK, branches=branches)
    with pytest.raises(ValueError, match=message):
        check_batch_shapes(batch._replace(**dict.fromkeys(fields, batch.tokens)))


@pytest.mark.parametrize("field", [name for name in Batch._fields if name not in ("tokens", "branches")])
def test_batches_with_a_field_of_another_shape_are_refused(bigram, field):
    batch = Batch(np.zeros((2, 3), np.int32), MASK, advantages=np.zeros(2, np.float32))

    def ask(function, *arguments):
        return jax.eval_shape(lambda batch: as_users_call(function, bigram, *arguments, PARAMS, batch), batch)

    if field == "advantages":  # once, what is no mistake
        for loss_fn in (grpo_loss, sft_loss):
            ask(loss_and_gradients, loss_fn)
    batch = batch._replace(**{field: np.zeros((2, 1), bool if field == "completion_mask" else np.int32)})
    message = rf"batch\.{field} has shape \(2, 1\); wanted that of tokens, \(2, 3\)"
    with pytest.raises(ValueError, match=message):
        ask(loss_and_gradients, grpo_loss)
    with pytest.raises(ValueError, match=message):
        ask(score_batch)


def test_a_batch_of_plain_lists_is_one_of_arrays(bigram):
    optimizer = optax.sgd(0.5)
    update = make_update(bigram, grpo_loss, optimizer)
    lists = Batch([[0, 1, 1], [1, 0, 0]], [[False, True, True], [False, True, False]], [1.0, -2.0])
    arrays = Batch(np.array(lists[0]), np.array(lists[1]), np.array(lists[2], np.float32))
    states = [
        update(init_train_state(jax.device_put(jax.tree.map(np.array, PARAMS)), optimizer), each)[0]
        for each in (lists, arrays)
    ]
    jax.tree.map(np.testing.assert_array_equal, *states)
    check_batch(lists)
    for field, wrong, part in [
        ("tokens", [[0, 1], [1]], "batch.tokens"),
        ("tokens", [[0.0] * 3] * 2, "float32"),
        ("completion_mask", [[0, 1, 1]] * 2, "int32"),
        ("advantages", ["good", "bad"], "batch.advantages is no table"),
        ("advantages", [1.0, None], "batch.advantages is no table"),
        ("tokens", [[0, 1, 1], [1, 2**70, 0]], "batch.tokens is no table"),
    ]:
        for call in (
            partial(check_batch, lists._replace(**{field: wrong})),
            partial(update, states[0], lists._replace(**{field: wrong})),
        ):
            with pytest.raises(ValueError, match=rf"batch\.{field}.*") as caught:
                as_users_call(call)
            assert part in str(caught.value)


def test_policy_loss_takes_plain_lists():
    knobs = {"logprobs": [[-1.0, -0.5]], "old_logprobs": [[-1.2, -0.5]], "advantages": [1.0], "loss": "dapo"}
    loss, _ = jax.jit(lambda: as_users_call(policy_loss, **knobs, completion_mask=[[True, True]]))()
    assert float(loss) == pytest.approx(-1.1107, abs=1e-4)  # TRL's number, of README
    for wrong, part in (([[1, 1]], "int32"), ([[True], [True, True]], "rows of one length")):
        with pytest.raises(ValueError, match=f"completion_mask.*{part}"):
            jax.eval_shape(lambda wrong=wrong: as_users_call(policy_loss, **knobs, completion_mask=wrong))


ESTIMATORS = ("group", "group_mean", "leave_one_out", "batch")


def of_whole_numbers(rewards, table, ids, mask):
    return (
        [estimate_advantages(rewards, ids, estimator) for estimator in ESTIMATORS],
        weighted_sum(table, [1.0, 0.5]),
        step_advantages(table, ids, gamma=0.5),
        reward_to_go(table, mask, gamma=0.5)[:, 0],
    )


@pytest.mark.parametrize(
    ("call", "dtype"),
    [(of_whole_numbers, np.int32), (of_whole_numbers, np.uint8), (jax.jit(of_whole_numbers), np.uint8)],
    ids=["int32", "uint8", "uint8 with jax"],
)
def test_whole_numbers_are_rewards_too(call, dtype):
    """In the type of their own, means would be cut off and unsigned differences wrap around."""
    rewards, ids = np.array([1, 2, 7, 4], dtype), np.array([0, 0, 1, 1])
    table, mask = np.stack([rewards, rewards[::-1]], axis=1), np.ones((4, 2), bool)
    got = call(rewards, table, ids, mask)
    expected = of_whole_numbers(rewards.astype(np.float64), table.astype(np.float64), ids, mask)
    jax.tree.map(lambda mine, theirs: np.testing.assert_allclose(mine, theirs, rtol=1e-5), got, expected)
    for sums in (got[1], got[3]):
        np.testing.assert_allclose(sums, table @ [1.0, 0.5], rtol=1e-6)


def test_numbers_that_are_not_finite_do_not_whiten_to_zero():
    mask = np.array([[True, True, True], [True, False, False]])
    x = np.array([[1.0, np.inf, 2.0], [3.0, np.nan, np.nan]])
    for call in (whiten, jax.jit(whiten)):
        got = np.asarray(call(x, mask))
        assert np.isnan(got[mask]).all() and not got[~mask].any()


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ((3, 9), r"ids\[1\] is 9; .* 9 tokens: 0 to 8"),
        ([[3, 4], [-1, 4]], r"ids\[1, 0\] is -1;"),
        ((3, 2**70), "ids holds object; wanted integers"),
        ((3, 8.5), "ids holds float64;"),
        (("3",), "ids holds <U1;"),
        (np.array([[False]]), "ids holds bool;"),
        ([1, [2]], "inhomogeneous shape"),
    ],
)
def test_what_is_no_token_id_is_refused(ids, message):
    with pytest.raises(ValueError, match=message):
        check_token_ids("ids", ids, 9)


def test_the_size_of_the_vocabulary_costs_no_array(bigram):
    """It is asked on the event loop, for models of every size."""
    params = jax.eval_shape(lambda: PARAMS)
    with jax.transfer_guard("disallow_explicit"):
        assert vocabulary_size(bigram, params) == 5


def test_ids_of_every_integer_type_are_taken():
    for ids in ((), (0, 8), np.array([0, 8], np.uint8), jnp.array([[0], [8]])):
        check_token_ids("ids", ids, 9)


GOOD = Batch(
    tokens=np.array([[3, 4, 5], [3, 4, 0]]),
    completion_mask=np.array([[False, True, True], [False, True, False]]),
    advantages=np.array([1.0, -1.0]),
    temperatures=np.array([[0.0, 1.0, 1.0], [0.0, 0.7, 0.0]]),
    old_logprobs=np.array([[np.nan, -1.0, -1.0], [0.0, -2.0, np.inf]]),
)


def test_what_stands_on_untrained_tokens_is_free():
    check_batch(GOOD, vocabulary=6)
    check_batch(Batch(*(None if x is None else jnp.array(x) for x in GOOD)))


def test_whole_trajectories_are_taken():
    for counts in ([[0, 2, 2], [0, 1, 0]], [[0, 3, 3], [0, 3, 0]]):
        check_batch(GOOD._replace(trajectory_tokens=np.array(counts, np.float32)))


TRUE = np.ones((2, 3), bool)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"completion_mask": ~TRUE}, "completion_mask is False everywhere"),
        ({"completion_mask": TRUE}, r"first token of a sequence, which nothing predicts \(row 0, token 0; 2 in all\)"),
        ({"segment_ids": np.array([[1, 1, 2], [1, 1, 1]])}, r"first token of a sequence.*\(row 0, token 2; 1 in all\)"),
        ({"temperatures": np.zeros((2, 3))}, "batch.temperatures is not above 0: greedy rows"),
        ({"temperatures": np.full((2, 3), np.nan)}, "batch.temperatures is not above 0"),
        ({"advantages": np.array([1.0, np.nan])}, r"batch.advantages is not finite .*\(row 1, token 1; 1 in all\)"),
        ({"trajectory_tokens": np.zeros((2, 3))}, r"batch.trajectory_tokens .*1.*\(row 0, token 1;"),
        ({"ref_logprobs": np.full((2, 3), -np.inf)}, "batch.ref_logprobs is not finite"),
        ({"tokens": np.full((2, 3), 6)}, "batch.tokens is outside the vocabulary of 6"),
        ({"tokens": np.full((2, 3), -1)}, "batch.tokens is outside the vocabulary of 6"),
        ({"advantages": np.zeros(3)}, r"batch.advantages has shape \(3,\); wanted that of tokens, \(2, 3\)"),
    ],
)
def test_values_that_mean_nothing_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        check_batch.__wrapped__(GOOD._replace(**changes), vocabulary=6)
