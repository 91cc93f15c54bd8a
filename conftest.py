"""Settings of every test run, whatever part of the tree it collects.

It stands at the root, so that the hook is also on when only doctests under `jaxft/` are run.
"""

import atexit
import gc
import os
import shutil
import tempfile
from importlib.metadata import version
from importlib.util import cache_from_source
from pathlib import Path

import pytest
from jaxtyping import _import_hook, install_import_hook

PACKAGE = Path(__file__).parent / "jaxft"
pytest_plugins = ["tests.budget"]

os.environ["TRANSFORMERS_VERBOSITY"] = "error"
os.environ["TRANSFORMERS_NO_ADVISORY_WARNINGS"] = "1"
os.environ["HF_HUB_OFFLINE"] = "1"
# Most of the time of a cold suite would be XLA's, which here leaves out the passes of LLVM and, where it can, the
# emitters of fused loops, and compiles each of these small programs in one piece. An experiment and a kill of
# `.ci/run`, and `.ci/more optimized`, compile what users get. `XLA_FLAGS= pytest -m gpu -n 0` is for an accelerator.
FLAGS = "--xla_backend_optimization_level=0 --xla_cpu_parallel_codegen_split_count=1"
if version("jaxlib").startswith("0.10."):  # jaxlib 0.12 has no other emitters, and ends at a flag that it does not know
    FLAGS += " --xla_cpu_use_fusion_emitters=false"
os.environ.setdefault("XLA_FLAGS", FLAGS)

# One compilation cache for all processes of one run of the tests, which its first process makes and removes: a program
# is compiled once, however fast the machine is, and nothing of an earlier run can hide in it.
if "PYTEST_XDIST_WORKER" not in os.environ:
    folder = tempfile.mkdtemp(prefix="jaxft-tests-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    os.environ |= {
        "JAX_ENABLE_COMPILATION_CACHE": "1",
        "JAX_COMPILATION_CACHE_DIR": folder,
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }

_name_with_hook = _import_hook._optimized_cache_from_source


def _bytecode_file(typechecker: str, path: str, debug_override: bool | None = None) -> str:
    """Return the bytecode's file of a source file: under the hook's name for modules of jaxft alone.

    While it imports one of them, jaxtyping looks for all bytecode under that name, and would so compile jax,
    transformers and whatever else it imports from their sources: ten seconds in each process.
    """
    is_ours = Path(path).is_relative_to(PACKAGE)
    return _name_with_hook(typechecker, path, debug_override) if is_ours else cache_from_source(path, debug_override)


_import_hook._optimized_cache_from_source = _bytecode_file

# Shapes and types of annotated functions are checked from here on, where there are arrays, so nothing of jaxft may be
# imported above. The tower: an int may stand where a float is annotated, as everywhere else in Python.
WITH_ARRAYS = ("core", "models", "training.learner", "training.update")
WITH_ARRAYS += ("rollout.decode_batch", "rollout.model_runner", "rollout.policy")
install_import_hook(
    [f"jaxft.{name}" for name in WITH_ARRAYS],
    "beartype.beartype(conf=beartype.BeartypeConf(is_pep484_tower=True))",
)


@pytest.hookimpl(trylast=True)
def pytest_collection_finish() -> None:
    """Keep modules and tests out of garbage collections: a run begins with some, and each would take a second."""
    gc.collect()
    gc.freeze()
