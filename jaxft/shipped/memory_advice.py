"""Names the settings to change where a device has too little memory, before a run and after a failed allocation."""

import contextlib
from collections.abc import Iterator

from jaxft.errors import DeviceMemoryError
from jaxft.rollout.device import first_line, is_out_of_memory
from jaxft.rollout.engine import Engine
from jaxft.rollout.policy import Policy
from jaxft.shipped.configs import LocalTrainerAdapterConfig
from jaxft.training.memory import SAMPLER, device_mebibytes, peak, phases


def memory_advice(config: LocalTrainerAdapterConfig, policy: Policy, memory: dict[str, float]) -> str | None:
    """Return the settings to change if a device has less than the peak of `memory`; None if it fits or is unknown.

    Args:
        config: settings of the adapter.
        policy: the policy.
        memory: MiB per device by purpose, as returned by `LocalTrainerAdapter.memory`.
    """
    has, needs = device_mebibytes(policy.model.sharding), peak(memory)
    if has is None or needs <= has:
        return None
    sizes = phases(memory)
    worst = max(sizes, key=lambda phase: sum(sizes[phase].values()))
    largest = max(sizes[worst], key=lambda purpose: sizes[worst][purpose])
    return (
        f"this does not fit: a device has {has:.0f} MiB and {needs:.0f} MiB are needed, most of it for {largest}: "
        f"{remedy(config, policy.engine, largest)}"
    )


@contextlib.contextmanager
def memory_errors(config: LocalTrainerAdapterConfig, engine: Engine) -> Iterator[None]:
    """Turn an out-of-memory error of the device into a `DeviceMemoryError` that names the settings to lower."""
    try:
        yield
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        raise DeviceMemoryError(
            f"the device has too little memory for the job: {remedy(config, engine)}; it said: {first_line(error)}"
        ) from error


def remedy(config: LocalTrainerAdapterConfig, engine: Engine, purpose: str | None = None) -> str:
    """Return the settings to lower, with their current values.

    Args:
        config: settings of the adapter.
        engine: engine of the policy.
        purpose: the key of `LocalTrainerAdapter.memory` with most of the memory; None if unknown.
    """
    microbatch = f"lower trainer_adapters.<name>.microbatch_tokens (now {config.microbatch_tokens})"
    llm = f"llms.{config.llm}"
    if purpose is None:
        return f"{microbatch}, or {llm}.{engine.sizes}"
    if purpose == "update":
        return f"{microbatch}, or set {llm}.remat to full"
    if purpose.removeprefix(SAMPLER).startswith("sampling"):
        return f"lower {llm}.{engine.sizes}"
    return (
        f"train adapters ({llm}.lora), divide the model over more devices ({llm}.mesh, fsdp or tensor), or keep its "
        "parameters in bfloat16 (dtype)"
    )
