"""Speed and host memory of loading a sharded model onto a mesh of eight devices.

    python benchmarks/loading.py                       # 1 GB in four shards, made at random; a minute or two
    python benchmarks/loading.py --rounds 5 --out loading.json

Three sides run in turn, each in a fresh process: read and copy the files and nothing else; `load_model` onto data 1 x
fsdp 8 x tensor 1 from a folder without a manifest, as from the hub; and from a folder with one, whose checksums are
tested first. CPU devices keep their arrays in the host's memory, so the model itself counts. Exit code 1 when the peak
is more than 1.3 times the model, or loading has less than 0.6 of the bytes per second of reading and copying.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from timing import peak_resident_bytes, resident_bytes

DEVICES = 8
MOST_MEMORY, LEAST_SPEED = 1.3, 0.6
SIDES = ("read and copied", "loaded", "loaded, with a manifest")


def main() -> int:
    """Make the model files, measure each side in turn and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3, help="processes of each side (default %(default)s)")
    parser.add_argument(
        "--layers", type=int, default=12, help="layers of the model, about 67 MB each (default %(default)s)"
    )
    parser.add_argument("--out", type=Path, metavar="FILE.json", help="file for all results")
    parser.add_argument("--side", choices=(*SIDES, "make"), help=argparse.SUPPRESS)  # of a process of its own
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.side is not None:
        print(json.dumps(measured(arguments.side, arguments.folder, arguments.layers)))
        return 0
    with tempfile.TemporaryDirectory() as folder:
        place = ["--folder", str(Path(folder) / "model"), "--layers", str(arguments.layers)]
        alone("make", place)
        found = [{side: alone(side, place) for side in SIDES} for _ in range(arguments.rounds)]
    rates = {side: [each[side]["bytes"] / each[side]["seconds"] for each in found] for side in SIDES}
    shares = {
        side: statistics.median(a / b for a, b in zip(rates[side], rates[SIDES[0]], strict=True)) for side in SIDES
    }
    memory = {side: max(each[side].get("peak_bytes", 0) / each[side]["bytes"] for each in found) for side in SIDES}
    print(f"{'':<26} {'GB/s':>6} {'of reading and copying':>24} {'peak / model':>14}")
    for side in SIDES:
        rate = f"{statistics.median(rates[side]) / 1e9:.2f}"
        print(f"{side:<26} {rate:>6} {shares[side]:>23.0%} {f'{memory[side]:.2f}' if memory[side] else '':>14}")
    if arguments.out is not None:
        arguments.out.write_text(json.dumps({"rounds": found, "shares": shares, "memory": memory}, indent=2) + "\n")
    return int(shares["loaded"] < LEAST_SPEED or max(memory.values()) > MOST_MEMORY)


def alone(side: str, place: list[str]) -> dict[str, Any]:
    """Measure one side in a fresh process."""
    flags = {"XLA_FLAGS": f"--xla_force_host_platform_device_count={DEVICES}", "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, __file__, "--side", side, *place]
    ended = subprocess.run(command, check=True, capture_output=True, text=True, env={**os.environ, **flags})
    return json.loads(ended.stdout.splitlines()[-1])


def measured(side: str, folder: Path, layers: int) -> dict[str, Any]:
    """Bytes, seconds, and the peak of memory above that before loading."""
    if side == SIDES[0]:
        return read_and_copied(folder)

    import jax  # the process that only reads and copies must not hold it

    import jaxft

    if side == "make":
        config = replace(jaxft.model_preset("qwen3-58m"), hidden_size=1024, intermediate_size=4096, num_layers=layers)
        config = replace(config, num_heads=16, num_kv_heads=16)
        model, params = jaxft.init_model(config, jax.random.key(0))
        jaxft.save_model(folder, model, params, max_shard_bytes=3e8)
        without = folder.with_name("without")
        without.mkdir()
        for file in folder.iterdir():
            if file.name != "manifest.json":
                (without / file.name).symlink_to(file)
        return {}
    mesh = jaxft.make_mesh(1, DEVICES, 1)
    jaxft.init_model("qwen3-50k", jax.random.key(0), mesh=mesh)  # whatever is needed once
    before, started = resident_bytes(), time.perf_counter()
    _, params = jaxft.load_model(folder if "manifest" in side else folder.with_name("without"), mesh=mesh)
    seconds = time.perf_counter() - started
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(params))
    return {"bytes": size, "seconds": seconds, "peak_bytes": peak_resident_bytes() - before}


def read_and_copied(folder: Path) -> dict[str, Any]:
    """Read every byte and copy it, the least that any loader does."""
    started, copies = time.perf_counter(), []
    for file in sorted(folder.glob("*.safetensors")):
        copies.append(np.fromfile(file, np.uint8).copy())
    return {"bytes": sum(each.nbytes for each in copies), "seconds": time.perf_counter() - started}


if __name__ == "__main__":
    sys.exit(main())
