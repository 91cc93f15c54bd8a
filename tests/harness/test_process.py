import os
import subprocess
import sys

import pytest

DIVIDED_CPU = """
from jaxft.harness.process import order_cpu_devices
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
    done = subprocess.run(
        [sys.executable, "-c", DIVIDED_CPU], env=environment, check=True, capture_output=True, text=True
    )
    assert done.stdout.strip() == found


COMPILING_PROGRAM = """
{first}
from jaxft.harness.runtime import exit_code_of

async def main():
    import jax
    jax.jit(lambda x: x * 2 + 1)(3.0)

exit_code_of(main)
"""


def run_program(tmp_path, first="", **variables):
    environment = {name: value for name, value in os.environ.items() if not name.startswith("JAX_")}
    environment |= {"XDG_CACHE_HOME": str(tmp_path / "user"), **variables}
    program = COMPILING_PROGRAM.format(first=first)
    subprocess.run([sys.executable, "-c", program], check=True, env=environment, cwd=tmp_path, capture_output=True)


@pytest.mark.parametrize("first", ["", "import jax"])
def test_a_program_leaves_what_it_compiled_to_the_next(tmp_path, first):
    run_program(tmp_path, first)
    kept = sorted((tmp_path / "user" / "jaxft" / "xla").glob("jit*-cache"))
    assert kept
    times = [file.stat().st_mtime_ns for file in kept]
    run_program(tmp_path, first)
    assert [file.stat().st_mtime_ns for file in kept] == times  # it was found, not made again


def test_what_the_user_sets_holds(tmp_path):
    run_program(tmp_path, JAX_COMPILATION_CACHE_DIR=str(tmp_path / "own"))
    run_program(tmp_path, JAX_ENABLE_COMPILATION_CACHE="0", XDG_CACHE_HOME=str(tmp_path / "off"))
    assert not (tmp_path / "user").exists() and not (tmp_path / "off").exists()
    assert list((tmp_path / "own").glob("jit*"))
