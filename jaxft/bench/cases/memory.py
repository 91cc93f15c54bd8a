"""Bytes by purpose: parameters, optimiser, cache, and what a rollout and an update need beside them."""

import jax
import jax.numpy as jnp

import jaxft
from jaxft.bench import work
from jaxft.bench.cases.update import gradient_program, state_shapes, tree_bytes
from jaxft.bench.results import CaseResult
from jaxft.bench.setting import Setting, training_batch
from jaxft.bench.timing import live_device_bytes, measuring_peak


def run(setting: Setting) -> CaseResult:
    """Nothing is timed: programs are asked, and the process is watched."""
    result, shapes = setting.result(), setting.shapes
    state, context = state_shapes(setting), shapes.prompt_tokens + shapes.most_tokens
    with setting.policy(slots=shapes.slots, max_context_tokens=context) as policy:
        cache_bytes = policy.engine.cache_bytes(jnp.dtype(setting.job.dtype))
    _rollout(setting)  # compiles
    with measuring_peak() as peak:
        _rollout(setting)
    gradient = gradient_program(setting, training_batch(setting))
    result.figures = {
        "parameters_bytes": tree_bytes(state.params),
        "optimizer_bytes": tree_bytes(state.opt_state),
        "update_temporary_bytes": gradient.memory_analysis().temp_size_in_bytes,
        "key_and_value_bytes_per_token": work.kv_bytes(setting.config, setting.itemsize),
        f"engine_cache_bytes, {shapes.slots} slots of {context} tokens and stored prompts": cache_bytes,
        "live_device_bytes": live_device_bytes(),
        **{f"rollout_{name}": value for name, value in peak.figures().items()},
    }
    return result


def _rollout(setting: Setting) -> jaxft.Rollout:
    shapes = setting.shapes
    rollout = jaxft.generate(
        setting.model,
        setting.params,
        setting.prompts(shapes.prompts, shapes.prompt_tokens),
        jax.random.key(0),
        num_generations=shapes.generations,
        max_new_tokens=shapes.new_tokens,
    )
    return jax.block_until_ready(rollout)
