"""What is set where a CPU is divided into devices, in a process of its own: jax counts its devices once."""

import os
import subprocess
import sys

import pytest

PROGRAM = """
from jaxft.harness.cpu_devices import order_cpu_devices
order_cpu_devices()
import os, jax
print(jax.device_count(), jax.config.values["jax_cpu_enable_async_dispatch"], os.environ.get("NPROC"))
"""


@pytest.mark.parametrize(
    ("given", "found"),
    [
        ({"XLA_FLAGS": "--xla_force_host_platform_device_count=3"}, "3 False 32"),
        ({"XLA_FLAGS": "--xla_force_host_platform_device_count=3", "NPROC": "5"}, "3 False 5"),
        ({"XLA_FLAGS": ""}, "1 True None"),
    ],
)
def test_divided_cpus_have_threads_enough_and_one_program_at_once(given, found):
    environment = {name: value for name, value in os.environ.items() if name != "NPROC"} | given
    done = subprocess.run([sys.executable, "-c", PROGRAM], env=environment, check=True, capture_output=True, text=True)
    assert done.stdout.strip() == found
