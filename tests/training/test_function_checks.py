"""Losses, estimators and optimizers of one's own: what is refused, and equality with those that come with jaxft."""

import jax
import numpy as np
import optax
import pytest
from pydantic import ValidationError

from jaxft.core.advantages import step_advantages
from jaxft.core.update import init_train_state
from jaxft.training.config import LossConfig
from jaxft.training.function_checks import _tables, check_signatures, check_values
from jaxft.training.optimizer_config import OptimizerConfig, ParameterGroupConfig
from jaxft.training.update import group_labels, make_optimizer, make_policy_loss, make_schedule
from tests.training.test_advantages import found

OWN = "tests.own_functions:"


def faults(loss=None, optimizer=None):
    """Return the faults of functions, by field."""
    configs = LossConfig(**loss or {}), OptimizerConfig(**optimizer or {}).with_rate(1e-3)
    return dict(check_signatures(*configs))


@pytest.mark.parametrize(
    "loss, message",
    [
        ({"function": "per_token"}, "returned a loss of shape (2, 4), float32; wanted a scalar"),
        ({"function": "alone"}, "wanted (loss, metrics), metrics a dict"),
        ({"function": "taken_metric"}, "returned the metric 'grad_norm', whose name is taken"),
        ({"function": "broken"}, "raised NameError: name 'nothing' is not defined, at "),
        ({"function": "misspelt"}, "argument: 'mask'"),
        ({"function": "pull", "options": {"strenght": 2.0}}, "got an unexpected keyword argument 'strenght'"),
        ({"function": "with_reference"}, "takes 'ref_logprobs', which is None: set loss.beta above 0"),
        ({"function": "pull", "correction": {"name": "token_mask"}}, "takes no 'policy_weights', but there are some"),
        (
            {"function": "of_one_clip", "clip_high": 0.3, "per_task": {"a": {"clip_high": 0.4}}},
            "raised ValueError: The truth value of an array",
        ),
    ],
)
def test_a_loss_that_cannot_be_used_is_refused_on_shapes(loss, message):
    (refusal,) = faults(loss | {"function": OWN + loss["function"]}).items()
    assert refusal[0] == "loss.function" and message in refusal[1]
    assert "own_functions.py:" in refusal[1]


@pytest.mark.parametrize(
    "loss, message",
    [
        ({"function": "unmasked"}, "has a gradient that is not finite on two rows of log-probabilities whose padding"),
        ({"function": "undefined"}, "has a loss of nan on two rows of log-probabilities"),
        ({"function": "detached"}, "has no gradient in logprobs"),
    ],
)
def test_values_that_train_nothing_are_refused(loss, message):
    named = {name: OWN + value for name, value in loss.items()}
    assert faults(named) == {}
    ((field, refusal),) = check_values(LossConfig(**named))
    assert field == f"loss.{next(iter(loss))}" and message in refusal


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("name", ["grpo", "dapo", "gspo", "cispo", "dr_grpo"])
def test_the_shipped_loss_as_a_function_is_the_same_program(name, packed):
    fields = {"beta": 0.1, "max_completion_tokens": 9}
    shipped, own = (
        LossConfig(name=name, **fields),
        LossConfig(function="jaxft:policy_loss", options={"loss": name}, **fields),
    )
    assert not check_signatures(own, OptimizerConfig(learning_rate=1e-3))
    tables = _tables(own, is_packed=packed)

    def text(config):
        loss = make_policy_loss(config)
        return jax.jit(lambda given: loss(**given)).lower(tables).as_text()

    assert text(shipped) == text(own)


@pytest.mark.parametrize(
    "estimator, shipped",
    [
        ("jaxft:group_advantages", "group"),
        (OWN + "above_mean", "group_mean"),
        (OWN + "rewards_to_go", "reinforce_pp"),
    ],
)
@pytest.mark.parametrize("steps", [False, True])
def test_an_estimator_of_ones_own_equals_the_shipped_one(make_group, estimator, shipped, steps):
    shaped = {"shaped_rewards": [[1.0, 0.0], [0.0, 3.0]]} if steps else {}
    groups = [make_group(1.0, 3.0, **shaped), make_group(0.0, 2.5), make_group(4.0, None)]
    fields = {"name": "reinforce", "gamma": 0.5}
    own, theirs = (found(groups, advantages=each, **fields) for each in (estimator, shipped))
    for one, other in zip(own.advantages, theirs.advantages, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-6, atol=1e-7)
    assert not faults({"advantages": estimator})


def test_an_estimator_gets_named_rewards_lengths_and_steps(make_group):
    groups = [make_group(1.0, 3.0, named_rewards=[{"right": 2.0, "short": 1.0}, {"right": 4.0, "short": 1.0}])]
    lengths = [sum(sum(row.completion_mask) for row in each.sequences) for each in groups[0]]
    got = found(groups, advantages=OWN + "by_name").advantages
    assert [set(each) for each in got] == [{np.float32(2.0 / lengths[0])}, {np.float32(4.0 / lengths[1])}]
    groups = [make_group(1.0, 3.0, shaped_rewards=[[1.0, 5.0], [2.0, 6.0]])]
    got = found(groups, advantages=OWN + "by_step").advantages
    assert [sorted(set(each) - {0.0}) for each in got] == [[1.0, 5.0], [2.0, 6.0]]  # 0 on the prompt


def test_an_estimator_of_steps_gets_a_table_with_outcomes_at_step_0(make_group):
    groups = [make_group(1.0, 3.0, shaped_rewards=[[1.0, 5.0], [2.0, 6.0]]), make_group(7.0, 9.0)]
    got = found(groups, advantages=OWN + "running_sum").advantages
    assert [sorted(set(each) - {0.0}) for each in got] == [[5.0, 6.0], [6.0, 8.0], [7.0], [9.0]]


def test_an_estimator_may_take_any_keyword(make_group):
    assert not faults({"advantages": OWN + "any_keyword"})
    assert [set(each) for each in found([make_group(1.0, 3.0)], advantages=OWN + "any_keyword").advantages] == [
        {-1},
        {1},
    ]


def test_token_rewards_are_for_estimators_of_tokens():
    assert "argument: 'token_rewards'" in faults({"advantages": OWN + "of_tokens_alone"})["loss.advantages"]


def test_penalties_and_references_go_with_a_loss_of_ones_own():
    own = {"function": OWN + "pull", "overlong_buffer_tokens": 4, "max_completion_tokens": 8}
    assert LossConfig(**own).max_completion_tokens == 8
    assert faults({"function": OWN + "with_reference", "beta": 0.1}) == {}


def test_steps_take_any_function_of_rewards_and_groups():
    table, groups = [[1.0, 2.0], [3.0, 0.0]], [0, 0]
    first = step_advantages(table, groups, "group_mean")
    assert np.array_equal(first, step_advantages(table, groups, lambda rewards, ids: rewards - rewards.mean()))


@pytest.mark.parametrize(
    "optimizer, field, message",
    [
        ({"function": OWN + "no_transformation"}, "optimizer.function", "returned 3; wanted an optax transformation"),
        (
            {"function": OWN + "sign_descent", "options": {"stength": 1}},
            "optimizer.function",
            "keyword argument 'stength'",
        ),
        ({"options": {"epsilon": 1e-6}}, "optimizer", "cannot be used with these options"),
        ({"schedule": OWN + "halving"}, "optimizer.schedule", "argument: 'every'"),
    ],
)
def test_an_optimizer_that_cannot_be_used_is_refused(optimizer, field, message):
    (refusal,) = faults(optimizer=optimizer).items()
    assert refusal[0] == field and message in refusal[1]


@pytest.mark.parametrize(
    "optimizer, message",
    [
        ({"name": "sgd", "weight_decay": 0.1}, "optimizer 'sgd' takes no 'weight_decay'"),
        ({"name": "sgd", "b1": 0.8, "b2": 0.5}, "takes no 'b1', 'b2'"),
        ({"function": OWN + "sign_descent", "weight_decay": 0.1}, "takes no 'weight_decay'"),
        ({"name": "sgd", "groups": [{"pattern": "a", "weight_decay": 0.1}]}, "takes no 'weight_decay'"),
        ({"groups": [{"pattern": "a", "weight_decay": 0.1, "rate_factor": 0}]}, "'a' has a rate_factor of 0"),
        ({"function": OWN + "no_transformation", "learning_rate": 0.1}, "takes no 'learning_rate'"),
        ({"function": OWN + "no_transformation", "warmup_updates": 2}, "takes no 'warmup_updates'"),
        ({"function": OWN + "no_transformation", "groups": [{"pattern": "a", "rate_factor": 2}]}, "'rate_factor'"),
        ({"schedule": "optax:exponential_decay", "learning_rate": 0.1}, "takes no 'learning_rate'"),
        ({"schedule": OWN + "halving", "warmup_updates": 2}, "takes no 'warmup_updates'"),
        ({"end_fraction": 0.5}, "schedule 'constant' takes no 'end_fraction'"),
        ({"schedule_options": {"every": 2}}, "takes no 'schedule_options'"),
    ],
)
def test_a_setting_that_nothing_reads_is_refused(optimizer, message):
    with pytest.raises(ValidationError) as error:
        OptimizerConfig(**optimizer)
    assert message in str(error.value)


@pytest.mark.parametrize(
    "optimizer",
    [
        {"function": OWN + "sign_descent", "options": {"strength": 2.0}},
        {"name": "lion", "options": {"mu_dtype": "bfloat16"}},
        {"name": "muon", "options": {"consistent_rms": 0.2}, "weight_decay": 0.1},
        {"name": "muon", "b1": 0.8, "b2": 0.9},
        {"name": "schedule_free", "warmup_updates": 3},
        {
            "schedule": "optax:exponential_decay",
            "schedule_options": {"init_value": 1.0, "transition_steps": 2, "decay_rate": 0.5},
            "groups": [{"pattern": "*", "rate_factor": 0.1}],
        },
    ],
)
def test_optimizers_by_name_and_function_are_taken(optimizer):
    assert faults(optimizer=optimizer) == {}


def test_the_shipped_optimizer_as_a_function_is_the_same_program():
    params = {"layers": {"kernel": np.ones((2, 3, 3), np.float32), "scale": np.ones((2, 3), np.float32)}}

    def text(**fields):
        made = make_optimizer(OptimizerConfig(learning_rate=1e-3, warmup_updates=2, **fields))
        return str(jax.make_jaxpr(lambda p: made.update(p, made.init(p), p))(params))

    decay = {"weight_decay": 0.1}
    assert text(**decay) == text(function="optax:adamw", **decay) != text(function="optax:adam")


def test_groups_have_a_rate_and_a_decay_of_their_own():
    params = {
        "embed": np.ones((2, 2), np.float32),
        "layers": {"kernel": np.full((1, 2, 2), 2.0, np.float32), "scale": np.ones((1, 2), np.float32)},
    }
    groups = (
        {"pattern": "embed", "rate_factor": 0.0},
        {"pattern": "layers/kernel", "rate_factor": 2.0, "weight_decay": 0.5},
    )
    config = OptimizerConfig(name="function", function="optax:adamw", learning_rate=0.1, groups=groups)
    optimizer = make_optimizer(config)

    @jax.jit
    def step(params):
        grads = jax.tree.map(jax.numpy.zeros_like, params)
        updates, _ = optimizer.update(grads, optimizer.init(params), params)
        return optax.apply_updates(params, updates)

    after = step(params)  # without a gradient only the weight decay moves them
    np.testing.assert_array_equal(after["embed"], params["embed"])
    np.testing.assert_array_equal(after["layers"]["scale"], params["layers"]["scale"])
    np.testing.assert_allclose(after["layers"]["kernel"], 2.0 - 0.1 * 2.0 * 0.5 * 2.0, rtol=1e-6)


def test_groups_of_a_policy_beside_a_value_head_have_its_paths():
    groups = (ParameterGroupConfig(pattern="embed"),)
    labels = group_labels(groups, {"policy": {"embed": 1.0, "head": 1.0}, "value_head": {"kernel": 1.0}})
    assert labels == {"policy": {"embed": "0", "head": "1"}, "value_head": {"kernel": "1"}}


def test_a_group_without_parameters_is_refused():
    optimizer = make_optimizer(OptimizerConfig(learning_rate=1e-3, groups=({"pattern": "layer/*"},)))
    with pytest.raises(ValueError, match=r"no parameter is left for the pattern 'layer/\*'"):
        jax.eval_shape(optimizer.init, {"layers": {"kernel": np.ones((1, 2, 2))}})


def test_muon_takes_the_matrices_of_layers_and_adamw_the_others():
    params = {
        "embed": jax.ShapeDtypeStruct((5, 4), np.float32),
        "layers": {
            "kernel": jax.ShapeDtypeStruct((2, 4, 3), np.float32),
            "scale": jax.ShapeDtypeStruct((2, 4), np.float32),
        },
    }
    optimizer = make_optimizer(OptimizerConfig(name="muon", learning_rate=1e-3))
    state = jax.eval_shape(lambda p: init_train_state(p, optimizer), params).opt_state
    muon, adam = ({x.shape for x in jax.tree.leaves(state.inner_states[name])} for name in ("muon", "adam"))
    assert (2, 4, 3) in muon and {(2, 4), (5, 4)} <= adam and not adam & muon - {()}


def test_a_schedule_of_ones_own_gives_the_rate():
    config = OptimizerConfig(learning_rate=0.8, schedule=OWN + "halving", schedule_options={"every": 2})
    assert [float(make_schedule(config)(step)) for step in range(4)] == [0.8, 0.8, 0.4, 0.4]
