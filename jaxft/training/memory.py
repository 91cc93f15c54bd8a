"""Memory of a run per device by purpose: its needs, their peak over its phases, and what to lower if it is too much."""

import contextlib
import os
import resource
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

import jax
import jax.numpy as jnp

from jaxft.core.partition import BASE, TEACHER, trainable
from jaxft.core.sharding import Sharding, compute_devices, compute_platform, device_bytes
from jaxft.core.types import Model, Params
from jaxft.errors import DeviceMemoryError
from jaxft.models.layer_stack import auto_remats
from jaxft.rollout.device import first_line, is_out_of_memory
from jaxft.rollout.engine import Engine
from jaxft.rollout.policy import Policy
from jaxft.rollout.weights import Weights, WeightTransfer, copy_trained
from jaxft.training.learner import Learner

PHASES = {"update": ("gradients", "update"), "rollout": ("sampling weights", "sampling temporaries")}
"""Purposes whose memory only one phase of a run has; that of all other purposes is held throughout."""

SAMPLER = "sampler's "
"""Beginning of the purposes of devices that sample alone, which are a phase of their own."""

MEBIBYTE = 2**20


def training_bytes(learner: Learner, params: Params) -> dict[str, int]:
    """Return the bytes per device of parameters, optimizer state, reference, sums of gradients, and a teacher."""
    model, state = learner.model, learner.state_shapes(params)
    size, moved = partial(device_bytes, model.sharding), trainable(model, state.params)
    reference = trainable(model, params) if learner.reference is None else learner.reference.params
    sizes = {
        "parameters": size({name: leaf for name, leaf in state.params.items() if name != TEACHER}),
        "optimizer": size(state.opt_state),
        "reference": size(reference) if learner.loss.needs_reference else 0,
        "gradients": size(jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, jnp.float32), moved)),
    }
    teacher = size(state.params.get(TEACHER, {})) if learner.teacher is None else learner.teacher.num_bytes()
    return sizes | ({"teacher": teacher} if teacher else {})


def training_memory(learner: Learner, params: Params, longest: int) -> dict[str, float]:
    """Return the MiB per device, by purpose, that a job on rows of `longest` tokens needs.

    This compiles the job's programs, and changes no state. The purposes are those of `training_bytes`, and `update`:
    temporary memory, which is activations, a chunk of logits, and gradients that are not added in place.
    """
    compiled = [lower().compile().memory_analysis() for lower in learner.programs(params, longest).values()]
    sizes = training_bytes(learner, params) | {"update": max(each.temp_size_in_bytes for each in compiled)}
    return {purpose: size / MEBIBYTE for purpose, size in sizes.items()}


def sampling_bytes(
    model: Model,
    transfer: WeightTransfer,
    params: Params,
    caches: Sequence[int],
    *,
    are_pinned: bool,
    has_processes: bool,
) -> dict[str, int]:
    """Return the bytes per device, by purpose, of arrays that only sampling uses.

    The purposes are `sampling` (keys and values), `sampling weights` and, if there are any, `snapshots` (the parameters
    that they keep), `gathered base` (the frozen base, which each of several processes keeps whole) and `held sampling
    weights` (those that are pinned, and what they are made again from).

    Args:
        model: the model.
        transfer: makes the weights to decode with.
        params: the parameters, or their shapes.
        caches: bytes per device of the keys and values of the policy and of each snapshot.
        are_pinned: True if weights are pinned while jobs train.
        has_processes: True if the devices are those of several processes.
    """
    dtype, num_snapshots = str(transfer.dtype(params)), len(caches) - 1
    copied = jax.eval_shape(lambda params: Weights.copied(model, params, dtype=dtype).params, params)
    copy = Weights(model, copied)
    sizes = {"sampling": sum(caches), "sampling weights": transfer.extra_bytes(params)}
    if has_processes and model.lora is not None:
        sizes["gathered base"] = transfer.base_bytes(params)
    if num_snapshots:
        sizes["snapshots"] = num_snapshots * copy.num_bytes()
        sizes["sampling weights"] += num_snapshots * transfer.extra_bytes(copy.whole(params))
    if are_pinned:
        made_from = copy.num_bytes() if has_processes else 0
        sizes["held sampling weights"] = transfer.extra_bytes(params, is_shared=False) + made_from
    return sizes


def disk_bytes(learner: Learner, params: Params, *, num_copies: int, has_base: bool) -> dict[str, int]:
    """Return the bytes of weights in files: of a `checkpoint`, of the model or adapters in an `export`, and `merged`.

    Args:
        learner: the learner; it and its optimizer may have made no arrays yet.
        params: the parameters, or their shapes.
        num_copies: number of copies of weights that a checkpoint has, of snapshots and of pinned ones.
        has_base: True if adapters are exported with their base; `merged` is the model of both, in float32.
    """
    model, state, size = learner.model, learner.state_shapes(params), partial(device_bytes, None)
    trained, whole = trainable(model, params), size(params.get(BASE, params))
    head = state.params["value_head"] if learner.loss.name == "ppo" else None
    reference = trained if learner.reference is None else learner.reference.params
    dtype = str(WeightTransfer(model).dtype(params))
    copied = jax.eval_shape(partial(copy_trained, model, dtype), params)
    arrays = trained, state.opt_state, state.step, head, reference if learner.loss.needs_reference else None
    sizes = {"checkpoint": size(arrays) + num_copies * size(copied)}
    if model.lora is None:
        return sizes | {"export": whole}
    merged = 4 * sum(leaf.size for leaf in jax.tree.leaves(params[BASE]))  # `jaxft export` writes float32
    return sizes | {"export": size(trained) + has_base * whole, "merged": merged}


def policy_bytes(policy: Policy, params: Params, *, are_pinned: bool) -> dict[str, int]:
    """Return `sampling_bytes` of a policy with its snapshots."""
    transfer = policy.weights.transfer
    caches = [engine.cache_bytes(transfer.dtype(params)) for engine in policy.engines]
    has_processes = policy.weights.spans_processes
    return sampling_bytes(policy.model, transfer, params, caches, are_pinned=are_pinned, has_processes=has_processes)


def sampling_temporary_bytes(policy: Policy, params: Params) -> int:
    """Return the bytes per device of temporaries of the largest programs of sampling, which are compiled."""
    distinct = {engine.sizes: engine for engine in policy.engines}
    shapes = policy.weights.transfer.shapes(params)
    programs = [lower for engine in distinct.values() for lower in engine.programs(shapes).values()]
    return max(lower().compile().memory_analysis().temp_size_in_bytes for lower in programs)


def run_memory(learner: Learner, policy: Policy, params: Params, *, are_pinned: bool) -> dict[str, float]:
    """Return the MiB per device, by purpose, of a run; this compiles the largest programs of training and sampling.

    The purposes are those of `training_memory` and `sampling_bytes`, and the temporaries of sampling.
    """
    sizes = policy_bytes(policy, params, are_pinned=are_pinned)
    sizes |= {"sampling temporaries": sampling_temporary_bytes(policy, params)}
    prefix = SAMPLER if policy.has_own_sampler else ""
    training = training_memory(learner, params, policy.engine.max_context_tokens)
    return training | {f"{prefix}{purpose}": size / MEBIBYTE for purpose, size in sizes.items()}


def choose_remat(learner: Learner, policy: Policy, params: Params, *, are_pinned: bool) -> str:
    """Train from now on with the fastest checkpoint policy whose compiled programs fit the device; return its name.

    If nothing fits, the policy that needs least is taken. On a CPU, and where the memory is unknown, that of the model
    stays.
    """
    limit = device_mebibytes(policy.model.sharding)
    if compute_platform(policy.model.sharding) == "cpu" or limit is None:
        return "dots"
    beside: dict[str, float] = {}
    if not policy.has_own_sampler:
        sizes = policy_bytes(policy, params, are_pinned=are_pinned)
        beside = {purpose: size / MEBIBYTE for purpose, size in sizes.items() if purpose != "sampling weights"}
    longest = policy.engine.max_context_tokens
    return first_fitting_remat(learner, params, longest, lambda memory: peak(memory | beside) <= limit)


def first_fitting_remat(
    learner: Learner, params: Params, longest: int, fits: Callable[[dict[str, float]], bool]
) -> str:
    """Train with the first of `auto_remats` whose `training_memory` fits, or the last one; return its name.

    An out-of-memory error of the compiler counts as one that does not fit.
    """
    for remat in auto_remats(compute_platform(learner.model.sharding)):
        learner.use_remat(remat)
        try:
            if fits(training_memory(learner, params, longest)):
                break
        except jax.errors.JaxRuntimeError as error:
            if not is_out_of_memory(error):
                raise
    return remat


def peak(memory: Mapping[str, float]) -> float:
    """Return the largest memory of a phase: what is held throughout, and what the phase has beside it.

    >>> peak({"parameters": 4.0, "gradients": 4.0, "update": 1.0, "sampling weights": 2.0, "sampling": 8.0})
    17.0
    """
    return max(sum(sizes.values()) for sizes in phases(memory).values())


def phases(memory: Mapping[str, float]) -> dict[str, dict[str, float]]:
    """Return the memory that each phase has, by purpose.

    >>> phases({"parameters": 4.0, "update": 1.0, "sampling weights": 2.0})["rollout"]
    {'parameters': 4.0, 'sampling weights': 2.0}
    """
    own = {purpose: size for purpose, size in memory.items() if purpose.startswith(SAMPLER)}
    found = {
        phase: {
            purpose: size
            for purpose, size in memory.items()
            if purpose not in own and not any(purpose in only for other, only in PHASES.items() if other != phase)
        }
        for phase in PHASES
    }
    return found | ({"sampler": own} if own else {})


def device_mebibytes(sharding: Sharding | None) -> float | None:
    """Return the memory of one of the devices that compute: an accelerator's, or a share of the machine's for a CPU.

    None where the device does not say.
    """
    device = _own_devices(sharding)[0]
    limit = (device.memory_stats() or {}).get("bytes_limit")
    if limit is None and device.platform == "cpu":
        limit = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // jax.local_device_count()
    return None if limit is None else limit / 2**20


def peak_bytes(sharding: Sharding | None) -> dict[str, int]:
    """Return the largest memory since the process began: `host_peak_bytes`, and `device_peak_bytes` of a device.

    The device is the fullest one. Devices that do not say, as CPUs, are left out.
    """
    found = {"host_peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024}
    peaks = [(device.memory_stats() or {}).get("peak_bytes_in_use") for device in _own_devices(sharding)]
    known = [size for size in peaks if size is not None]
    return found | ({"device_peak_bytes": max(known)} if known else {})


def _own_devices(sharding: Sharding | None) -> list[jax.Device]:
    """Return the devices that compute and are of this process; others do not say what they have."""
    return [device for device in compute_devices(sharding) if device.process_index == jax.process_index()]


def memory_advice(memory: Mapping[str, float], policy: Policy, llm: str, microbatch_tokens: int) -> str | None:
    """Return the settings to change if a device has less than the peak of `memory`; None if it fits or is unknown.

    Args:
        memory: MiB per device by purpose, the result of `run_memory`.
        policy: the policy.
        llm: name of the policy in the configuration.
        microbatch_tokens: that of the adapter.
    """
    has, needs = device_mebibytes(policy.model.sharding), peak(memory)
    if has is None or needs <= has:
        return None
    sizes = phases(memory)
    worst = max(sizes, key=lambda phase: sum(sizes[phase].values()))
    largest = max(sizes[worst], key=lambda purpose: sizes[worst][purpose])
    return (
        f"this does not fit: a device has {has:.0f} MiB and {needs:.0f} MiB are needed, most of it for {largest}: "
        f"{remedy(policy.engine, llm, microbatch_tokens, largest)}"
    )


@contextlib.contextmanager
def memory_errors(engine: Engine, llm: str, microbatch_tokens: int) -> Iterator[None]:
    """Turn an out-of-memory error of the device into a `DeviceMemoryError` that names the settings to lower."""
    try:
        yield
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        raise DeviceMemoryError(
            f"the device has too little memory for the job: {remedy(engine, llm, microbatch_tokens)}; it said: "
            f"{first_line(error)}"
        ) from error


def remedy(engine: Engine, llm: str, microbatch_tokens: int, purpose: str | None = None) -> str:
    """Return the settings to lower, with their current values; `purpose` is that of most memory, None if unknown."""
    microbatch = f"lower trainer_adapters.<name>.microbatch_tokens (now {microbatch_tokens})"
    if purpose is None:
        return f"{microbatch}, or llms.{llm}.{engine.sizes}"
    if purpose == "update":
        return f"{microbatch}, or set llms.{llm}.remat to least"
    if purpose.removeprefix(SAMPLER).startswith("sampling"):
        return f"lower llms.{llm}.{engine.sizes}"
    return (
        f"train adapters (llms.{llm}.lora), divide the model over more devices (llms.{llm}.mesh, fsdp or tensor), or "
        "keep its parameters in bfloat16 (dtype)"
    )
