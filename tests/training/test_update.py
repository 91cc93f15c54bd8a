import jax
import numpy as np
import pytest
from pydantic import ValidationError

from jaxft.core import LARGEST_FLOAT32
from jaxft.models.config import model_preset
from jaxft.models.decoder import decoder
from jaxft.training.optimizer_config import OptimizerConfig
from jaxft.training.update import make_optimizer, make_schedule


def paths(tree):
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return [jax.tree_util.keystr(path, simple=True, separator="/") for path, _ in leaves]


def test_weight_decay_leaves_out_norms_and_biases():
    optimizer = make_optimizer(OptimizerConfig(learning_rate=0.5, weight_decay=0.5))
    shapes = jax.eval_shape(decoder(model_preset("qwen3-50k")).init, jax.random.key(0))
    params = jax.tree.map(lambda leaf: np.ones(leaf.shape, np.float32), shapes)
    params["biased"] = {"kernel": np.ones((2, 2), np.float32), "bias": np.ones(2, np.float32)}
    still = jax.tree.map(np.zeros_like, params)
    updates = jax.jit(lambda still, params: optimizer.update(still, optimizer.init(params), params)[0])(still, params)
    updates = jax.tree.map(np.asarray, updates)
    decayed = {path for path, leaf in zip(paths(updates), jax.tree.leaves(updates), strict=True) if leaf.any()}
    kept = set(paths(updates)) - decayed
    assert {path.rsplit("/", 1)[1] for path in kept} == {"scale", "bias"}
    assert {path.rsplit("/", 1)[-1] for path in decayed} == {"kernel", "embed"}
    # With no gradient what is left is the decay alone: -learning_rate * weight_decay * 1.
    assert {float(leaf.min()) for leaf in jax.tree.leaves(updates)} == {0.0, -0.25}


def test_sgd_is_plain():
    optimizer = make_optimizer(OptimizerConfig(name="sgd", learning_rate=0.5))
    params = {"kernel": np.ones(1, np.float32)}
    update = jax.jit(lambda gradient, params: optimizer.update(gradient, optimizer.init(params), params))
    updates, _ = update({"kernel": np.full(1, 2.0, np.float32)}, params)
    assert updates["kernel"].tolist() == [-1.0]


@pytest.mark.parametrize(
    "wrong",
    [
        {"learning_rate": 0.0},
        {"learning_rate": float("inf")},
        {"learning_rate": 1e39},  # float32 has no such number but infinity
        {"weight_decay": float("inf")},
        {"b1": 1.0},
        {"max_grad_norm": 0.0},
        {"name": "adagrad"},
        {"schedule": "cosine"},
        {"decay_updates": 5},
    ],
)
def test_impossible_values_are_refused(wrong):
    with pytest.raises(ValidationError):
        OptimizerConfig(**wrong)


def test_the_learning_rate_rises_and_falls():
    config = OptimizerConfig(name="sgd", learning_rate=0.4, warmup_updates=3, schedule="linear", decay_updates=2)
    optimizer = make_optimizer(config)
    params = {"kernel": np.float32(0)}
    state, steps, update = jax.jit(optimizer.init)(params), [], jax.jit(optimizer.update)
    for _ in range(7):
        updates, state = update({"kernel": np.float32(1)}, state, params)
        steps.append(round(-float(updates["kernel"]), 6))
    assert steps == [0.1, 0.2, 0.3, 0.4, 0.22, 0.04, 0.04]


def test_the_cosine_ends_at_its_share():
    schedule = make_schedule(
        OptimizerConfig(learning_rate=0.4, schedule="cosine", decay_updates=4, warmup_updates=1, end_fraction=0.5)
    )
    # One step of warm-up from half the rate, then 0.4 (1 + (1 - 0.5) (cos(pi t / 4) - 1) / 2).
    got = jax.jit(jax.vmap(schedule))(np.arange(7)).tolist()
    assert got == pytest.approx([0.2, 0.4, 0.3707107, 0.3, 0.2292893, 0.2, 0.2], rel=1e-5)


def test_every_number_of_float32_is_a_learning_rate():
    largest = float(np.finfo(np.float32).max)
    assert largest == LARGEST_FLOAT32
    assert OptimizerConfig(learning_rate=largest).learning_rate == largest
    with pytest.raises(ValidationError):
        OptimizerConfig(learning_rate=np.nextafter(largest, np.inf))
