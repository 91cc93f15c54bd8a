"""bfloat16 where it computes, float32 where it is kept."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxft.core.generate import generate
from jaxft.core.logprobs import token_logprobs
from jaxft.core.objectives import grpo_loss
from jaxft.core.precision import compute_in
from jaxft.core.types import Batch
from jaxft.core.update import init_train_state, make_update


def test_equal_arguments_give_the_same_model(tiny):
    model, _ = tiny
    assert compute_in(model, jnp.bfloat16) is compute_in(model, jnp.bfloat16)
    assert compute_in(model, jnp.bfloat16) == compute_in(model, jnp.bfloat16) != model


def test_sampler_and_trainer_agree_in_bfloat16(tiny):
    model, params = tiny
    narrow = compute_in(model, jnp.bfloat16)
    prompts = [[7 * place % 48 for place in range(count)] for count in (3, 20)]
    rollout = generate(narrow, params, prompts, jax.random.key(0), num_generations=8, max_new_tokens=30)
    for scored_by, most in ((narrow, 0.01), (model, 0.05)):
        scored = token_logprobs(scored_by, params, rollout.tokens)
        assert scored.logprobs.dtype == jnp.float32
        difference = jnp.abs(scored.logprobs - rollout.sampler_logprobs)[rollout.completion_mask]
        assert float(difference.mean()) < most


def test_steps_too_small_for_bfloat16_add_up_in_the_master_weights(tiny):
    model, params = tiny
    params = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16).astype(jnp.float32), params)
    rng = np.random.default_rng(0)
    batch = Batch(
        jnp.asarray(rng.integers(0, 48, (4, 12)), jnp.int32),
        jnp.asarray(rng.random((4, 12)) < 0.7).at[:, 0].set(False),
        jnp.asarray(rng.normal(size=4), jnp.float32),
    )
    optimizer = optax.sgd(1e-6)
    update = make_update(compute_in(model, jnp.bfloat16), partial(grpo_loss), optimizer, microbatch_rows=2)
    state = init_train_state(jax.tree.map(jnp.copy, params), optimizer)
    for _ in range(3):
        state, metrics = update(state, batch)
    assert metrics["applied_updates"] == 1 and metrics["loss"].dtype == jnp.float32
    moved = [after - before for after, before in zip(*map(jax.tree.leaves, (state.params, params)), strict=True)]
    assert all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(state.params))
    lost = [
        np.mean(after.astype(jnp.bfloat16) == before.astype(jnp.bfloat16))
        for after, before in zip(*map(jax.tree.leaves, (state.params, params)), strict=True)
    ]
    assert np.mean([np.mean(leaf != 0) for leaf in moved]) > 0.5  # in bfloat16 nearly none of it would be there
    assert min(lost) > 0.98
