"""What a run needs of each device's memory, and what to change where that is too much."""

import contextlib
import os
from collections.abc import Iterator

import jax

from jaxft.core.types import Params
from jaxft.errors import DeviceMemoryError
from jaxft.rollout.device import first_line, is_out_of_memory
from jaxft.rollout.engine import Engine
from jaxft.rollout.policy import Policy
from jaxft.shipped.configs import LocalTrainerAdapterConfig
from jaxft.training.learner import Learner


def memory_needs(learner: Learner, policy: Policy, params: Params) -> dict[str, float]:
    """MiB of each device by purpose; compiles the largest update."""
    weights, cache = policy.sampling_bytes(params)
    training = learner.memory(params, policy.engine.max_context_tokens)
    return {**training, "sampling weights": weights / 2**20, "sampling": cache / 2**20}


def advice(config: LocalTrainerAdapterConfig, policy: Policy, memory: dict[str, float]) -> str | None:
    """What to change where a device has less than all that together; None where it fits, or nobody knows."""
    has, needs = device_mebibytes(), sum(memory.values())
    if has is None or needs <= has:
        return None
    engine, largest = policy.engine, max(memory, key=lambda purpose: memory[purpose])
    remedies = {
        "update": f"lower trainer_adapters.<name>.microbatch_tokens (now {config.microbatch_tokens}), or set "
        f"llms.{config.llm}.remat to full",
        "sampling": f"lower llms.{config.llm}.slots (now {engine.slots}), prefix_cache_rows (now "
        f"{engine.prefix_cache_rows}) or max_context_tokens (now {engine.max_context_tokens})",
    }
    of_weights = (
        f"train adapters (llms.{config.llm}.lora), divide the model over more devices (llms.{config.llm}.mesh, fsdp or "
        "tensor), or keep its parameters in bfloat16 (dtype)"
    )
    return (
        f"this does not fit: a device has {has:.0f} MiB and {needs:.0f} MiB are needed, most of it for {largest}: "
        f"{remedies.get(largest, of_weights)}"
    )


def device_mebibytes() -> float | None:
    """The memory of one device: what jax may use of an accelerator's, or the machine's divided by its CPU devices."""
    device = jax.local_devices()[0]
    limit = (device.memory_stats() or {}).get("bytes_limit")
    if limit is None and device.platform == "cpu":
        limit = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // jax.local_device_count()
    return None if limit is None else limit / 2**20


@contextlib.contextmanager
def memory_errors(config: LocalTrainerAdapterConfig, engine: Engine) -> Iterator[None]:
    """Turns what says that the device has too little memory into a `DeviceMemoryError` that says what to lower."""

    try:
        yield
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        raise DeviceMemoryError(what_to_lower(config, engine, error)) from error


def what_to_lower(config: LocalTrainerAdapterConfig, engine: Engine, error: BaseException) -> str:
    """A sentence for a device that has too little memory."""

    return (
        "the device has too little memory for the job: lower trainer_adapters.<name>.microbatch_tokens (now "
        f"{config.microbatch_tokens}), or of llms.{config.llm} slots (now {engine.slots}), prefix_cache_rows (now "
        f"{engine.prefix_cache_rows}) or max_context_tokens (now {engine.max_context_tokens}); it said: "
        f"{first_line(error)}"
    )
