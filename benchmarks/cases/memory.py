"""Bytes by purpose: parameters, optimiser state, cache, temporaries of an update, and the peak in a rollout."""

import jax
import jax.numpy as jnp

import jaxft
import roofline
from cases.rollout import generate
from cases.update import OPTIMIZER, gradient_program
from machine import live_device_bytes, measuring_peak, tree_bytes
from records import Measured
from workload import Workload


def run(workload: Workload) -> Measured:
    """Sizes of arrays and programs, and the peak of the process; times nothing."""
    shapes = workload.shapes
    state = jax.eval_shape(lambda params: jaxft.init_train_state(params, OPTIMIZER), workload.params)
    context = shapes.prompt_tokens + shapes.most_tokens
    with workload.policy(slots=shapes.slots, max_context_tokens=context) as policy:
        cache_bytes = policy.engine.cache_bytes(jnp.dtype(workload.dtype))
    prompts = workload.prompts(shapes.prompts, shapes.prompt_tokens)
    generate(workload, workload.params, prompts, 0)  # compiles
    with measuring_peak() as peak:
        generate(workload, workload.params, prompts, 0)
    gradient = gradient_program(workload, workload.training_batch())
    return Measured(
        figures={
            "parameters_bytes": tree_bytes(state.params),
            "optimizer_bytes": tree_bytes(state.opt_state),
            "update_temporary_bytes": gradient.memory_analysis().temp_size_in_bytes,
            "key_and_value_bytes_per_token": roofline.kv_bytes(workload.config, workload.itemsize),
            f"engine_cache_bytes, {shapes.slots} slots of {context} tokens and prefix cache": cache_bytes,
            "live_device_bytes": live_device_bytes(),
            **{f"rollout_{name}": value for name, value in peak.items()},
        }
    )
