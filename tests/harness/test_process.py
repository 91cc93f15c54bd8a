import os
import subprocess
import sys

import jax
import pytest

from jaxft.harness import process

DIVIDED = "--xla_force_host_platform_device_count=3"


@pytest.fixture
def environ(monkeypatch):
    """The environment variables, of which this test may change its own copy, and jax's settings, put back after it."""
    monkeypatch.setattr(os, "environ", dict(os.environ))
    before = dict(jax.config.values)
    yield os.environ
    for name, value in before.items():
        if jax.config.values[name] != value:
            jax.config.update(name, value)


@pytest.mark.parametrize(
    ("given", "is_asynchronous", "threads"),
    [
        ({"XLA_FLAGS": DIVIDED}, False, "32"),
        ({"XLA_FLAGS": DIVIDED, "NPROC": "5"}, False, "5"),
        ({"XLA_FLAGS": ""}, True, None),
    ],
)
def test_divided_cpus_have_threads_enough_and_one_program_at_once(environ, given, is_asynchronous, threads):
    environ.pop("NPROC", None)
    environ |= given
    process.prepare_process(computes=False)
    assert environ.get("NPROC") == given.get("NPROC")
    process.prepare_process()
    assert jax.config.values["jax_cpu_enable_async_dispatch"] == is_asynchronous
    assert environ.get("NPROC") == threads


def test_the_compile_cache_is_the_users_unless_the_user_sets_another(environ, tmp_path):
    for name in [name for name in environ if name.startswith("JAX_")]:
        del environ[name]
    environ["XDG_CACHE_HOME"] = str(tmp_path)
    process.prepare_process(computes=False)
    assert environ["JAX_COMPILATION_CACHE_DIR"] == str(tmp_path / "jaxft" / "xla")
    assert jax.config.values["jax_compilation_cache_dir"] == str(tmp_path / "jaxft" / "xla")
    assert jax.config.values["jax_persistent_cache_min_compile_time_secs"] == 0
    assert jax.config.values["jax_persistent_cache_min_entry_size_bytes"] == -1

    environ |= {"JAX_COMPILATION_CACHE_DIR": "own", "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "2"}
    jax.config.update("jax_compilation_cache_dir", "own")
    process.prepare_process(computes=False)
    assert environ["JAX_COMPILATION_CACHE_DIR"] == "own" == jax.config.values["jax_compilation_cache_dir"]
    assert environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] == "2"


COMPILING_PROGRAM = """
from jaxft.harness.runtime import run_main

async def main():
    import jax
    jax.jit(lambda x: x * 2 + 1)(3.0)

run_main(main)
"""


def run_program(tmp_path):
    environment = {name: value for name, value in os.environ.items() if not name.startswith("JAX_")}
    environment |= {"XDG_CACHE_HOME": str(tmp_path / "user")}
    command = [sys.executable, "-c", COMPILING_PROGRAM]
    subprocess.run(command, check=True, env=environment, cwd=tmp_path, capture_output=True)


@pytest.mark.slow
def test_a_program_leaves_what_it_compiled_to_the_next(tmp_path):
    run_program(tmp_path)
    kept = sorted((tmp_path / "user" / "jaxft" / "xla").glob("jit*-cache"))
    assert kept
    times = [file.stat().st_mtime_ns for file in kept]
    run_program(tmp_path)
    assert [file.stat().st_mtime_ns for file in kept] == times  # it was found, not made again
