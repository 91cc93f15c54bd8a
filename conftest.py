"""Settings of every test run, whatever part of the tree it collects.

It stands at the root, so that the hook is also on when only doctests under `jaxft/` are run.
"""

import os
from importlib.metadata import version

from jaxtyping import install_import_hook

os.environ["TRANSFORMERS_VERBOSITY"] = "error"
os.environ["TRANSFORMERS_NO_ADVISORY_WARNINGS"] = "1"
os.environ["HF_HUB_OFFLINE"] = "1"
# Two thirds of the time of a cold suite would be XLA's, which here leaves out the passes of LLVM and, where it can, the
# emitters of fused loops. The experiments and the kills of `.ci/run`, and `.ci/more optimized`, compile what users get.
# `XLA_FLAGS= pytest -m gpu -n 0` is for an accelerator.
FLAGS = "--xla_backend_optimization_level=0"
if version("jaxlib").startswith("0.10."):  # jaxlib 0.12 has no other emitters, and ends at a flag that it does not know
    FLAGS += " --xla_cpu_use_fusion_emitters=false"
os.environ.setdefault("XLA_FLAGS", FLAGS)
# Suites are timed cold, and a cache that outlives a run could hide a change of compiler.
os.environ["JAX_ENABLE_COMPILATION_CACHE"] = "0"

# Shapes and types of every annotated function are checked from here on, so nothing of jaxft may be imported above.
# The tower: an int may stand where a float is annotated, as everywhere else in Python.
install_import_hook("jaxft", "beartype.beartype(conf=beartype.BeartypeConf(is_pep484_tower=True))")
