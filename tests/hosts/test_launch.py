"""`launch` starts processes on one machine, divides its devices, and ends all when one fails (see test_start.py)."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from jaxft.errors import HostsError
from jaxft.hosts import launch as launching
from jaxft.hosts.launch import launch, process_environments


def test_each_process_is_told_its_place():
    first, second = process_environments(2, {"HOME": "/h"})
    assert first["JAXFT_COORDINATOR"] == second["JAXFT_COORDINATOR"]
    assert [each["JAXFT_PROCESS_ID"] for each in (first, second)] == ["0", "1"]
    assert first["JAXFT_NUM_PROCESSES"] == "2" and first["HOME"] == "/h"


def test_devices_are_divided():
    environment = {"XLA_FLAGS": "--a=1 --xla_force_host_platform_device_count=4 --b", "CUDA_VISIBLE_DEVICES": "0,3,5,6"}
    first, second = process_environments(2, environment)
    assert first["XLA_FLAGS"] == second["XLA_FLAGS"] == "--a=1 --xla_force_host_platform_device_count=2 --b"
    assert (first["CUDA_VISIBLE_DEVICES"], second["CUDA_VISIBLE_DEVICES"]) == ("0,3", "5,6")


def test_what_goes_on_is_said_with_the_launcher():
    assert process_environments(3, {})[2]["JAXFT_LAUNCHER"] == "jaxft launch -n 3 "


@pytest.mark.parametrize(
    ("environment", "said"),
    [
        ({"XLA_FLAGS": "--xla_force_host_platform_device_count=4"}, "4 CPU devices of XLA_FLAGS do not divide over 3"),
        ({"CUDA_VISIBLE_DEVICES": "0,1"}, "2 GPUs do not divide over 3 processes"),
    ],
)
def test_devices_that_do_not_divide_are_refused(environment, said):
    with pytest.raises(HostsError, match=said):
        process_environments(3, environment)


@pytest.mark.slow
def test_one_that_is_killed_ends_the_others(monkeypatch):
    monkeypatch.setattr(launching, "GRACE_SECONDS", 0.2)
    program = "import os, time\nif os.environ['JAXFT_PROCESS_ID'] == '1': os.kill(os.getpid(), 9)\ntime.sleep(60)"
    assert launch([sys.executable, "-c", program], 2) == 137


@pytest.mark.parametrize(
    ("command", "count", "said"),
    [
        ([], 2, "there is no command"),
        (["no-such-program"], 2, "'no-such-program' is no command"),
        (["true"], 0, "-n is 0"),
    ],
)
def test_what_cannot_be_started_is_refused(command, count, said):
    with pytest.raises(HostsError, match=said):
        launch(command, count)


@pytest.mark.slow
def test_what_a_process_has_started_does_not_hold_the_launcher(tmp_path):
    """A tool server of an agent, which has the output of its process and outlives it."""
    program = f"import subprocess; open({str(tmp_path)!r} + '/' + str(subprocess.Popen(['sleep', '60']).pid), 'w')"
    assert launch([sys.executable, "-c", program], 1) == 0
    (server,) = tmp_path.iterdir()
    os.kill(int(server.name), signal.SIGKILL)  # it is still there


@pytest.mark.slow
def test_processes_do_not_outlive_the_launcher(tmp_path):
    program = f"import os, time; open({str(tmp_path)!r} + '/' + str(os.getpid()), 'w'); time.sleep(60)"
    command = [sys.executable, "-m", "jaxft.cli", "launch", "-n", "2", sys.executable, "-c", program]
    launcher = subprocess.Popen(command)
    while len(started := list(tmp_path.iterdir())) < 2:
        assert launcher.poll() is None
        time.sleep(0.05)
    launcher.kill()
    launcher.wait()
    deadline = time.monotonic() + 30.0
    while any(Path("/proc", each.name).exists() for each in started) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(Path("/proc", each.name).exists() for each in started)
