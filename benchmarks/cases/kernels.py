"""Milliseconds of an update by kind of kernel, as the profiler sees them; on CPUs there is nothing to see.

The profiler switches CUDA graphs off, so that gaps between kernels are wider than they are in a run.
"""

import re
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import Any

import jax

import jaxft
from cases.update import OPTIMIZER, grpo_update, microbatch_rows
from records import Measured
from workload import Workload

KINDS = {
    "products": r"gemm|nvjet|cutlass|xmma|sm90_|dot",
    "attention": r"fmha|flash|mha|sdpa|attention",
    "copies": r"dynamic_(update_)?slice|emcpy|emset|copy|broadcast|concatenate",
    "reductions": r"reduce",
}
"""Kinds by words of a kernel's name, the first that fits; others are elementwise."""

DEAREST = 12
"""Kernels that are listed by name."""


def run(workload: Workload) -> Measured:
    """Milliseconds of kernels in an update, by kind and for the dearest ones."""
    shapes = workload.shapes
    update = grpo_update(workload.model, microbatch_rows(shapes.rows, shapes.row_tokens, shapes.microbatch_tokens))
    batch = workload.training_batch()
    state = jaxft.init_train_state(workload.fresh_params(), OPTIMIZER, workload.model)
    for _ in range(2):  # compiles, and records its graph
        state, _ = jax.block_until_ready(update(state, batch))
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            jax.block_until_ready(update(state, batch)[1])
        (path,) = Path(folder).rglob("*.xplane.pb")
        kinds, names = by_kind(jax.profiler.ProfileData.from_file(str(path)).planes)
    dearest = sorted(names, key=lambda name: -names[name])[:DEAREST]
    return Measured(
        figures={f"{kind}_milliseconds": spent for kind, spent in kinds.items()}
        | {f"{name}, milliseconds": names[name] for name in dearest}
    )


def kind_of(name: str) -> str:
    """Return the kind of a kernel.

    >>> [kind_of(name) for name in ("nvjet_hsh_128x256", "cudnn_sdpa_fprop", "input_add_reduce_fusion_7", "loop_add")]
    ['products', 'attention', 'reductions', 'elementwise']
    """
    return next((kind for kind, words in KINDS.items() if re.search(words, name)), "elementwise")


def by_kind(planes: Any) -> tuple[dict[str, float], dict[str, float]]:
    """Return the milliseconds on a GPU's streams by kind, and by name without numbers."""
    kinds: defaultdict[str, float] = defaultdict(float)
    names: defaultdict[str, float] = defaultdict(float)
    for plane in planes:
        for line in plane.lines if "GPU" in plane.name else ():
            for event in line.events if line.name.startswith("Stream") else ():
                kinds[kind_of(event.name)] += event.duration_ns / 1e6
                names[re.sub(r"[_.]\d+", "", event.name)[:60]] += event.duration_ns / 1e6
    return kinds, names
