"""Whether a run fits into the memory of its devices, and which settings to lower where it does not."""

import contextlib
import os
from collections.abc import Iterator

import jax

from jaxft.errors import DeviceMemoryError
from jaxft.rollout.device import first_line, is_out_of_memory
from jaxft.rollout.engine import Engine
from jaxft.shipped.configs import LocalTrainerAdapterConfig


def memory_advice(config: LocalTrainerAdapterConfig, engine: Engine, memory: dict[str, float]) -> str | None:
    """Return what to change if a device has less than all of `memory`; None if it fits, or if nobody knows.

    Args:
        config: of the adapter.
        engine: of its policy.
        memory: MiB of each device by purpose, as `LocalTrainerAdapter.memory` returns them.
    """
    has, needs = device_mebibytes(), sum(memory.values())
    if has is None or needs <= has:
        return None
    largest = max(memory, key=lambda purpose: memory[purpose])
    return (
        f"this does not fit: a device has {has:.0f} MiB and {needs:.0f} MiB are needed, most of it for {largest}: "
        f"{remedy(config, engine, largest)}"
    )


def device_mebibytes() -> float | None:
    """Return the memory of one device: an accelerator's, or the machine's divided by its number of CPU devices."""
    device = jax.local_devices()[0]
    limit = (device.memory_stats() or {}).get("bytes_limit")
    if limit is None and device.platform == "cpu":
        limit = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // jax.local_device_count()
    return None if limit is None else limit / 2**20


@contextlib.contextmanager
def memory_errors(config: LocalTrainerAdapterConfig, engine: Engine) -> Iterator[None]:
    """Turn an out-of-memory error of the device into a `DeviceMemoryError` that says what to lower."""
    try:
        yield
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        raise DeviceMemoryError(
            f"the device has too little memory for the job: {remedy(config, engine)}; it said: {first_line(error)}"
        ) from error


def remedy(config: LocalTrainerAdapterConfig, engine: Engine, purpose: str | None = None) -> str:
    """Return which settings to lower, with their present values.

    Args:
        config: of the adapter.
        engine: of its policy.
        purpose: what takes most of the memory, as `LocalTrainerAdapter.memory` names it; None if that is not known.
    """
    microbatch = f"lower trainer_adapters.<name>.microbatch_tokens (now {config.microbatch_tokens})"
    llm = f"llms.{config.llm}"
    if purpose is None:
        return f"{microbatch}, or {llm}.{engine.sizes}"
    if purpose == "update":
        return f"{microbatch}, or set {llm}.remat to full"
    if purpose == "sampling":
        return f"lower {llm}.{engine.sizes}"
    return (
        f"train adapters ({llm}.lora), divide the model over more devices ({llm}.mesh, fsdp or tensor), or keep its "
        "parameters in bfloat16 (dtype)"
    )
