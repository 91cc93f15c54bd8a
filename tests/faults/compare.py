"""Whether two runs are one and the same: arrays, and every file that a repetition would write again, to the byte."""

import json
import logging
import re
from pathlib import Path
from typing import Any

import numpy as np

BY_THE_CLOCK = (
    "timings.jsonl",
    "reward_plot.png",
    "tensorboard",
    "environment.json",
    "resumes.jsonl",
    "run.log",
    "LOCK",
    "LOCK.holder",
)
"""What no two runs have in common."""


def differences(run: Path, other: Path) -> list[str]:
    """Every difference in words; none is what is hoped for."""
    mine, theirs = _files(run), _files(other)
    found = [f"{name}: only one run has it" for name in sorted(mine.keys() ^ theirs.keys())]
    found += [f"{name}: bytes differ" for name in sorted(mine.keys() & theirs.keys()) if mine[name] != theirs[name]]
    steps, other_steps = _steps(run), _steps(other)
    if steps[-1:] != other_steps[-1:]:
        return [*found, f"the last checkpoints are {steps[-1:]} and {other_steps[-1:]}"]
    (arrays, state), (other_arrays, other_state) = (_checkpoint(folder, steps[-1]) for folder in (run, other))
    found += [f"checkpoint state: {path} differs" for path in _unequal(state, other_state, "")]
    for name in sorted(arrays.keys() | other_arrays.keys()):
        a, b = arrays.get(name), other_arrays.get(name)
        if a is None or b is None or a.dtype != b.dtype or a.tobytes() != b.tobytes():
            found.append(f"array {name} differs")
    return found


def _files(run: Path) -> dict[str, bytes]:
    found = {}
    for path in sorted(run.rglob("*")):
        name = path.relative_to(run).as_posix()
        if path.is_file() and name.split("/")[0] not in (*BY_THE_CLOCK, "checkpoints"):
            found[name] = path.read_bytes()
    if "config.yml" in found:
        found["config.yml"] = re.sub(rb"(?m)^  output_dir: .*$", b"", found["config.yml"])
    if "result.json" in found:
        found["result.json"] = re.sub(rb'(?m)^  "seconds": .*$', b"", found["result.json"])
    return found


def _steps(run: Path) -> list[int]:
    return sorted(int(path.name) for path in (run / "checkpoints").iterdir() if path.name.isdecimal())


def _checkpoint(run: Path, step: int) -> tuple[dict[str, Any], Any]:
    import jax
    import orbax.checkpoint as ocp

    logging.getLogger("absl").setLevel(logging.ERROR)
    with ocp.CheckpointManager(run / "checkpoints", options=ocp.CheckpointManagerOptions(read_only=True)) as manager:
        here = jax.sharding.SingleDeviceSharding(jax.devices()[0])  # several processes may have written it
        args = ocp.args.Composite(arrays=ocp.args.StandardRestore(fallback_sharding=here), state=ocp.args.JsonRestore())
        restored = manager.restore(step, args=args)
    leaves = jax.tree_util.tree_leaves_with_path(restored.arrays)
    arrays = {jax.tree_util.keystr(path): np.asarray(leaf) for path, leaf in leaves}
    state = json.loads(json.dumps(restored.state))
    state["logs"].pop("timings.jsonl", None)
    return arrays, state


def _unequal(a: Any, b: Any, path: str) -> list[str]:
    if isinstance(a, dict) and isinstance(b, dict):
        return [found for name in a.keys() | b.keys() for found in _unequal(a.get(name), b.get(name), f"{path}.{name}")]
    return [] if a == b else [f"{path} ({a!r:.60} and {b!r:.60})"]
