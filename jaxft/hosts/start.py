"""Start of a process of several: it learns of the others by its options or from its cluster, and joins them.

The processes first meet by themselves (`jaxft.hosts.meeting`), where a fault is one sentence, and then through JAX.
"""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxft.errors import HostsError, one_line
from jaxft.hosts.group import ProcessGroup, use_group
from jaxft.hosts.meeting import interface, meet, parse_address
from jaxft.hosts.store import HEARTBEAT_SECONDS, Store

VARIABLES = {
    "coordinator": "JAXFT_COORDINATOR",
    "num_processes": "JAXFT_NUM_PROCESSES",
    "process_id": "JAXFT_PROCESS_ID",
}
"""Environment variables that stand for the options of the same names."""

CLUSTERS = {
    "SLURM_STEP_NUM_TASKS": "SLURM",
    "OMPI_COMM_WORLD_SIZE": "Open MPI",
    "TPU_WORKER_HOSTNAMES": "a TPU slice",
    "TPU_PROCESS_ADDRESSES": "a TPU slice",
}
"""Clusters by the environment variables that say how many processes they have started, or where these are."""

KUBERNETES, TPU_MACHINE = "Kubernetes", "a TPU machine"
"""Clusters that have to be asked: that of an indexed job, and the one that a machine with TPUs may be a part of."""

TPUS = ("/dev/accel0", "/dev/vfio/0")
"""Files of a machine with TPUs."""

QUIET = "TF_CPP_MIN_LOG_LEVEL"
"""Environment variable of XLA's logs; at 4 there are none, also no trace of C++ beside the sentence about a loss."""

LAUNCHER = "JAXFT_LAUNCHER"
"""Environment variable with the beginning of the command line that started this process as one of several."""

MEETING_SECONDS = 300.0
"""Time that the other processes have to come."""


@dataclass(frozen=True)
class ProcessPlace:
    """The place of this process among several.

    Attributes:
        coordinator: host and port of process 0.
        num_processes: number of processes.
        process_id: number of this one, from 0.
        local_device_ids: the devices of its machine that it uses; None for all.
    """

    coordinator: str
    num_processes: int
    process_id: int
    local_device_ids: tuple[int, ...] | None = None


def find_place(
    options: Mapping[str, str | int | None], environment: Mapping[str, str] = os.environ
) -> ProcessPlace | None:
    """Return the place of this process; None if it is the only one.

    Args:
        options: `coordinator`, `num_processes` and `process_id`, each None if it was not given. `num_processes` alone
            may be 1, where a cluster has started several processes that are runs of their own.
        environment: the environment variables.

    Raises:
        HostsError: some of the three are missing, or no numbers; or the cluster does not say where process 0 is.

    >>> find_place({"coordinator": "10.0.0.1:1234", "num_processes": 4, "process_id": 3}, {})
    ProcessPlace(coordinator='10.0.0.1:1234', num_processes=4, process_id=3, local_device_ids=None)
    >>> find_place({}, {"SLURM_STEP_NUM_TASKS": "1"}) is None
    True
    """
    given = {
        name: environment.get(variable) if (option := options.get(name)) is None else option
        for name, variable in VARIABLES.items()
    }
    missing = [f"--{name.replace('_', '-')}" for name, value in given.items() if value is None]
    if len(missing) == 2 and str(given["num_processes"]) == "1":  # tasks of a cluster that are runs of their own
        return None
    if len(missing) < len(given):
        if missing:
            raise HostsError(f"{' and '.join(missing)} {'is' if len(missing) == 1 else 'are'} missing: give all three")
        if _number(given, "num_processes") == 1:
            return None
        return ProcessPlace(str(given["coordinator"]), _number(given, "num_processes"), _number(given, "process_id"))
    cluster = _cluster(environment)
    return None if cluster is None else _place_in(cluster, environment)


def _cluster(environment: Mapping[str, str]) -> str | None:
    """Return the cluster that has started this process as one of several, as far as is known without asking it."""
    for variable, name in CLUSTERS.items():
        if _has_several(environment.get(variable, "")):
            return name
    if not environment.keys().isdisjoint(CLUSTERS):
        return None  # one that says it is one
    if {"KUBERNETES_SERVICE_HOST", "JOB_COMPLETION_INDEX"} <= environment.keys():
        return KUBERNETES
    return TPU_MACHINE if any(Path(file).exists() for file in TPUS) else None


def _number(given: Mapping[str, Any], name: str) -> int:
    try:
        return int(given[name])
    except ValueError:
        raise HostsError(f"{name} is {given[name]!r}; wanted a whole number") from None


def _has_several(said: str) -> bool:
    return "," in said or (said.isdecimal() and int(said) > 1)


def is_alone(environment: Mapping[str, str]) -> bool:
    """Return True if a cluster has started one process on each machine, which then uses all devices of it.

    >>> is_alone({"SLURM_STEP_NUM_TASKS": "4", "SLURM_STEP_NUM_NODES": "4"})
    True
    >>> is_alone({"SLURM_STEP_NUM_TASKS": "16", "SLURM_STEP_NUM_NODES": "4"})
    False
    """
    tasks = environment.get("SLURM_STEP_NUM_TASKS")
    if "OMPI_COMM_WORLD_LOCAL_SIZE" in environment:  # within SLURM, whose tasks then are daemons of Open MPI
        return environment["OMPI_COMM_WORLD_LOCAL_SIZE"] == "1"
    return tasks is not None and tasks == environment.get("SLURM_STEP_NUM_NODES")


def _place_in(cluster: str, environment: Mapping[str, str]) -> ProcessPlace | None:
    """Ask JAX, which knows these clusters, for the place of this process."""
    from jax._src.clusters import ClusterEnv  # there is no public name; `jax.distributed.initialize` asks it, too

    try:
        found = ClusterEnv.auto_detect_unset_distributed_params(None, None, None, None, None, int(MEETING_SECONDS))
        reason = ""
    except Exception as error:  # of the network, of Kubernetes' API, of what a cluster has left out
        found, reason = (None, None, None, None), f" ({one_line(error)})"
    coordinator, num_processes, process_id, local = found
    if coordinator is None or num_processes is None or process_id is None:
        if cluster == TPU_MACHINE:  # of no cluster that JAX knows; `local_policy` notices if it is a part of one
            return None
        raise HostsError(
            f"{cluster} does not say where the processes of this run are{reason}: give --coordinator, --num-processes "
            "and --process-id; or --num-processes 1 for a run of its own"
        )
    if num_processes == 1:
        return None
    # JAX takes a device for each process of a machine.
    own = None if local is None or is_alone(environment) else tuple(local)
    return ProcessPlace(coordinator, num_processes, process_id, own)


def join(place: ProcessPlace, about: Mapping[str, str], on_loss: Callable[[int], object]) -> Store:
    """Meet the other processes, make JAX know their devices, and return what connects all; `process_group` uses it.

    Call it before JAX counts its devices.

    Args:
        place: the place of this process.
        about: facts that have to be the same in all processes, by name.
        on_loss: called once, in a thread, with the number of a process that is lost later; it ends this process.

    Raises:
        HostsError: a process is missing, or the processes differ.
    """
    meet(place.coordinator, place.process_id, place.num_processes, about, within_seconds=MEETING_SECONDS)
    store = Store(place.process_id, place.num_processes, parse_address(place.coordinator), on_loss)
    os.environ.setdefault(QUIET, "4")
    import jax  # after the meeting: a process that waits for others needs no devices
    from jax._src.distributed import global_state  # there is no public name of the client; orbax takes it from here

    # By itself JAX would end every process when one is lost, and take SIGTERM for a notice that nobody reads.
    jax.config.update("jax_enable_recoverability", True)
    jax.config.update("jax_enable_preemption_service", False)
    jax.distributed.initialize(
        place.coordinator,
        place.num_processes,
        place.process_id,
        None if place.local_device_ids is None else list(place.local_device_ids),
        initialization_timeout=int(MEETING_SECONDS),
        heartbeat_timeout_seconds=HEARTBEAT_SECONDS,
        coordinator_bind_address=place.coordinator if interface(parse_address(place.coordinator)[0]) else None,
    )
    store.connect(global_state.client)
    use_group(ProcessGroup(store.process_id, store.num_processes, store.share, store.expect_end))
    return store


def leave(store: Store, within_seconds: float | None = None, *, has_failed: bool = False) -> None:
    """Let go of the other processes; process 0, the coordinator, waits until all end, or so long.

    `has_failed` is that of `Store.close`.
    """
    import jax  # as in `join`

    use_group(ProcessGroup())
    store.close(within_seconds, has_failed=has_failed)
    jax.distributed.shutdown()
