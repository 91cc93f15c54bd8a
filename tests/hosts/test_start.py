"""Processes of one run find their place, join each other and JAX, and hear of a process that was killed."""

import contextlib
import io
import json
import os
import sys

import pytest
from jax._src import clusters

from jaxft.errors import HostsError
from jaxft.hosts import launch as launching
from jaxft.hosts import start
from jaxft.hosts.start import ProcessPlace, find_place

PROGRAM = """
import os, signal, sys, time
from jaxft.hosts.start import find_place, join, leave

def lost(index):
    os.write(2, f"process {index} has gone\\n".encode())
    os._exit(7)

place, ending = find_place({}), sys.argv[1]
store = join(place, {"program": "the same"}, lost)
import jax
ids = store.share("id", place.process_id)
cores = sorted(os.sched_getaffinity(0))
print("joined", jax.process_count(), len(jax.devices()), len(jax.local_devices()), ids, cores, flush=True)
lines = [line.split() for file in ("tcp", "tcp6") for line in open(f"/proc/net/{file}").readlines()[1:]]
port = f"{int(place.coordinator.rpartition(':')[2]):04X}"
listening = {line[1] for line in lines if line[3] == "0A" and line[1].endswith(":" + port)}
sys.stdout.write(" ".join(["coordinator", *listening]) + "\\n")  # at once, as another thread writes its own line
sys.stdout.flush()
number, _, index = ending.partition(" ")
if index == str(place.process_id):
    os.kill(os.getpid(), getattr(signal, number))
if ending != "leave":
    time.sleep(60)
leave(store)
if place.process_id == 1:
    sys.exit(3)
time.sleep(60)
"""


@pytest.fixture(scope="module")
def launched():
    """Exit code and lines, by first word, of two processes that join and leave, the second of which then fails."""
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(io.StringIO()) as shown:
        patch.setattr(launching, "GRACE_SECONDS", 0.2)
        code = launching.launch([sys.executable, "-c", PROGRAM, "leave"], 2)
    lines = sorted(shown.getvalue().splitlines())
    assert all(line.startswith(("[0] ", "[1] ")) for line in lines), lines
    return code, *([line for line in lines if f"] {word} " in line] for word in ("joined", "coordinator"))


def test_two_processes_join_and_leave_and_lines_begin_with_their_number(launched):
    _, lines, _ = launched
    assert [line.partition("] [")[0] for line in lines] == ["[0] joined 2 2 1 [0, 1", "[1] joined 2 2 1 [0, 1"]


def test_jax_listens_on_loopback_only(launched):
    for line in launched[2]:
        assert line.partition(" coordinator ")[2].partition(":")[0].endswith("0100007F"), line


def test_cores_are_divided(launched):
    cores = sorted(os.sched_getaffinity(0))  # the launcher has all of them
    if len(cores) < 2:
        pytest.skip("one core cannot be divided")
    found = [json.loads("[" + line.partition("] [")[2]) for line in launched[1]]
    assert found == [cores[: len(cores) // 2], cores[len(cores) // 2 : len(cores) // 2 * 2]]


def test_one_that_fails_ends_the_others(launched):
    assert launched[0] == 3


@pytest.mark.slow
@pytest.mark.parametrize(("number", "grace_seconds"), [("SIGKILL", 20.0), ("SIGSTOP", 0.5)])
@pytest.mark.parametrize("ended", [0, 1])
def test_one_that_is_killed_or_stopped_ends_the_other_with_its_name(ended, number, grace_seconds, capfd, monkeypatch):
    monkeypatch.setattr(launching, "GRACE_SECONDS", grace_seconds)
    monkeypatch.delenv(start.QUIET, raising=False)  # which jax sets in this process
    assert launching.launch([sys.executable, "-c", PROGRAM, f"{number} {ended}"], 2) in (7, 137)
    said = [line for line in capfd.readouterr().out.splitlines() if line.startswith(f"[{1 - ended}] ")]
    # The survivor may report the loss before it has printed its own lines; a trace of C++ would be one more line.
    own = (f"[{1 - ended}] joined ", f"[{1 - ended}] coordinator ")
    assert [line for line in said if not line.startswith(own)] == [f"[{1 - ended}] process {ended} has gone"]


THREE = {"JAXFT_COORDINATOR": "a:1", "JAXFT_NUM_PROCESSES": "4", "JAXFT_PROCESS_ID": "3"}


@pytest.mark.parametrize(
    ("options", "environment", "place"),
    [
        ({}, THREE, ProcessPlace("a:1", 4, 3)),
        (
            {"coordinator": "b:2", "process_id": 0},
            THREE,
            ProcessPlace("b:2", 4, 0),
        ),  # options come before the environment
        ({"coordinator": None, "num_processes": None, "process_id": None}, {"SLURM_JOB_ID": "7"}, None),
        ({"coordinator": "a:1", "num_processes": "1", "process_id": "0"}, {}, None),
        ({"num_processes": "1"}, {"SLURM_STEP_NUM_TASKS": "4"}, None),  # tasks of a cluster that are runs of their own
        ({}, {"SLURM_STEP_NUM_TASKS": "4", "JAXFT_NUM_PROCESSES": "1"}, None),
    ],
)
def test_options_and_environment_say_which_process_this_is(options, environment, place):
    assert find_place(options, environment) == place


IN_KUBERNETES = {"KUBERNETES_SERVICE_HOST": "10.0.0.1", "JOB_COMPLETION_INDEX": "0"}


@pytest.mark.parametrize(
    ("environment", "cluster"),
    [
        ({"SLURM_STEP_NUM_TASKS": "2"}, "SLURM"),
        ({"OMPI_COMM_WORLD_SIZE": "2"}, "Open MPI"),
        ({"TPU_WORKER_HOSTNAMES": "a,b"}, "a TPU slice"),
        ({"TPU_PROCESS_ADDRESSES": "a:1,b:1"}, "a TPU slice"),
        (IN_KUBERNETES, "Kubernetes"),
        ({"OMPI_COMM_WORLD_SIZE": "1"}, None),
        ({"TPU_WORKER_HOSTNAMES": "localhost"} | IN_KUBERNETES, None),
        ({"KUBERNETES_SERVICE_HOST": "10.0.0.1"}, None),
        ({}, None),
    ],
)
def test_clusters_that_start_several_are_asked(environment, cluster, monkeypatch):
    asked = []

    def ask(*arguments):
        asked.append(arguments)
        return "10.0.0.1:1234", 2, 1, None

    monkeypatch.setattr(clusters.ClusterEnv, "auto_detect_unset_distributed_params", ask)
    monkeypatch.setattr(start, "TPUS", ())
    assert start._cluster(environment) == cluster
    assert find_place({}, environment) == (None if cluster is None else ProcessPlace("10.0.0.1:1234", 2, 1))
    assert len(asked) == (cluster is not None)


def test_a_cluster_without_an_answer_is_named_with_its_reason(monkeypatch):
    def ask(*arguments):
        raise RuntimeError("Kubernetes API Error: 403 - Forbidden")

    monkeypatch.setattr(clusters.ClusterEnv, "auto_detect_unset_distributed_params", ask)
    with pytest.raises(HostsError, match=r"Kubernetes does not say where .* \(RuntimeError: .* 403 - Forbidden\)"):
        find_place({}, IN_KUBERNETES)


def test_a_machine_with_tpus_may_be_one_of_several(monkeypatch, tmp_path):
    monkeypatch.setattr(start, "TPUS", (str(tmp_path),))
    for found, place in (
        (("t0:8482", 4, 2, None), ProcessPlace("t0:8482", 4, 2)),
        (("t0:8482", 1, 0, None), None),
        ((None, None, None, None), None),
    ):
        monkeypatch.setattr(clusters.ClusterEnv, "auto_detect_unset_distributed_params", lambda *_, found=found: found)
        assert find_place({}, {}) == place


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"coordinator": "a:1"}, "--num-processes and --process-id are missing: give all three"),
        ({"coordinator": "a:1", "process_id": 0}, "--num-processes is missing: give all three"),
        ({"num_processes": 2, "process_id": 0}, "--coordinator is missing: give all three"),
        ({"coordinator": "a:1", "num_processes": "two", "process_id": 0}, "num_processes is 'two'; wanted a whole"),
    ],
)
def test_options_that_are_missing_or_no_numbers_are_refused(options, said):
    with pytest.raises(HostsError, match=said):
        find_place(options, {})


def test_slurm_says_where_process_0_is(monkeypatch):
    slurm = {
        "SLURM_STEP_NUM_TASKS": "16",
        "SLURM_JOB_ID": "70001",
        "SLURM_STEP_NODELIST": "gpu[07-08]",
        "SLURM_NTASKS": "16",
        "SLURM_PROCID": "9",
        "SLURM_LOCALID": "1",
        "JAX_PLATFORMS": "cpu",
    }
    for name, value in slurm.items():
        monkeypatch.setenv(name, value)
    coordinator, count, index, local = vars(find_place({})).values()
    assert coordinator.startswith("gpu07:") and (count, index, local) == (16, 9, (1,))
