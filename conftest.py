"""Settings of every test run, whatever part of the tree it collects.

It stands at the root, so that the hook is also on when only doctests under `jaxft/` are run.
"""

import os
from importlib.metadata import version

from beartype import BeartypeConf
from beartype.claw import beartype_package
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

# Types of every annotated function are checked from here on, and shapes of arrays too, so nothing of jaxft may be
# imported above. Checks of shapes take long: modules without arrays have beartype's own hook, but for those that import
# a type later than they name it, and the server, which uvicorn calls without arguments to see it refuse.
# The tower: an int may stand where a float is annotated, as everywhere else in Python.
WITH_ARRAYS = (
    "jaxft.core",
    "jaxft.models",
    "jaxft.training",
    "jaxft.rollout.decode_batch",
    "jaxft.rollout.model_runner",
)
OTHERS = (
    "jaxft.harness.checkpointing",
    "jaxft.report.comparison_plots",
    "jaxft.serving.frameworks",
    "jaxft.serving.server",
)
BY_JAXTYPING = WITH_ARRAYS + OTHERS
beartype_package(
    "jaxft", conf=BeartypeConf(is_pep484_tower=True, claw_is_pep526=False, claw_skip_package_names=BY_JAXTYPING)
)
install_import_hook(BY_JAXTYPING, "beartype.beartype(conf=beartype.BeartypeConf(is_pep484_tower=True))")
