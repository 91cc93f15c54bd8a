"""The persistent cache of compiled programs, in processes of their own: JAX reads its settings once."""

import os
import subprocess
import sys

import pytest

PROGRAM = """
{first}
from jaxft.harness.runtime import exit_code_of

async def main():
    import jax
    jax.jit(lambda x: x * 2 + 1)(3.0)

exit_code_of(main)
"""


def run(tmp_path, first="", **variables):
    environment = {name: value for name, value in os.environ.items() if not name.startswith("JAX_")}
    environment |= {"XDG_CACHE_HOME": str(tmp_path / "user"), **variables}
    program = PROGRAM.format(first=first)
    subprocess.run([sys.executable, "-c", program], check=True, env=environment, cwd=tmp_path, capture_output=True)


@pytest.mark.parametrize("first", ["", "import jax"])
def test_a_program_leaves_what_it_compiled_to_the_next(tmp_path, first):
    run(tmp_path, first)
    kept = sorted((tmp_path / "user" / "jaxft" / "xla").glob("jit*-cache"))
    assert kept
    times = [file.stat().st_mtime_ns for file in kept]
    run(tmp_path, first)
    assert [file.stat().st_mtime_ns for file in kept] == times  # it was found, not made again


def test_what_the_user_sets_holds(tmp_path):
    run(tmp_path, JAX_COMPILATION_CACHE_DIR=str(tmp_path / "own"))
    run(tmp_path, JAX_ENABLE_COMPILATION_CACHE="0", XDG_CACHE_HOME=str(tmp_path / "off"))
    assert not (tmp_path / "user").exists() and not (tmp_path / "off").exists()
    assert list((tmp_path / "own").glob("jit*"))
