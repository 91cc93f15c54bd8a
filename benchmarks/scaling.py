"""Agreement of a mesh of devices with a single device.

    python benchmarks/scaling.py                             # meshes of eight CPU devices: a minute or two
    python benchmarks/scaling.py --mesh 2x2x2 --out agreement.json

For every mesh (data x fsdp x tensor) the script compares with one device: the loss, each gradient (of adapters, and of
a distillation, too), the parameters after a step of SGD, the log-probabilities of the same tokens, and the samples of
`generate` and the engine. It also restores training states, with adapters and without, on another mesh than they were
saved on, and reads model files onto the mesh that wrote them. Without an accelerator the CPU is divided into eight
devices. Exit code 1 when something differs by more than it may.
"""

import argparse
import asyncio
import json
import os
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

if "device_count" not in (flags := os.environ.get("XLA_FLAGS", "")):  # before jax is imported
    os.environ["XLA_FLAGS"] = f"{flags} --xla_force_host_platform_device_count=8"

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxft
from jaxft.core.divergence import Teacher
from jaxft.core.update import TrainState, loss_and_gradients
from jaxft.harness.process import order_cpu_devices
from jaxft.rollout.requests import Request
from jaxft.runs.checkpoint import Checkpoints
from jaxft.runs.directory import RunDirectory

order_cpu_devices()

MESHES = ((8, 1, 1), (1, 8, 1), (1, 1, 4), (2, 2, 2))
ROWS, WIDTH, PROMPT, NEW = 16, 48, 16, 24
TRAJECTORIES = (1, 3, 7, 5)
"""Rows of each trajectory; some trajectories lie on several devices."""

ALLOWED = {
    "loss": 1e-5,
    "gradients": 1e-5,
    "shares of trajectories": 1e-6,
    "parameters after a step": 1e-5,
    "log-probabilities": 1e-5,
    "log-probabilities of generate": 1e-5,
    "log-probabilities of the engine": 1e-5,
    "gradients of adapters": 1e-5,
    "gradients of a distillation": 1e-5,
    "parameters read and moved": 1e-5,
    "bits of files, written and read": 0.0,
    "restored on another mesh": 0.0,
}
"""Largest differences; those of gradients and parameters are per leaf, relative to its largest number."""


def main() -> int:
    """Print a table with a column per mesh."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--mesh", type=mesh_sizes, nargs="+", default=MESHES, metavar="DATAxFSDPxTENSOR", help="meshes to compare"
    )
    parser.add_argument(
        "--only",
        choices=tuple(COMPARISONS),
        nargs="+",
        default=tuple(COMPARISONS),
        help="comparisons to run (default: all)",
    )
    parser.add_argument("--out", type=Path, metavar="FILE.json", help="file for all differences")
    arguments = parser.parse_args()
    alone = measured(None, arguments.only)
    found = {"x".join(map(str, sizes)): compared(alone, sizes, arguments.only) for sizes in arguments.mesh}
    width = max(map(len, ALLOWED)) + 2
    print(f"{'largest difference to one device':<{width + 4}}" + "".join(f"{name:>10}" for name in found))
    for name in next(iter(found.values())):
        print(f"{name:<{width + 4}}" + "".join(f"{each[name]:>10.2g}" for each in found.values()))
    if arguments.out is not None:
        arguments.out.write_text(json.dumps({"allowed": ALLOWED, "found": found}, indent=2) + "\n")
    return int(any(not each.get(name, 0) <= most for each in found.values() for name, most in ALLOWED.items()))


def mesh_sizes(text: str) -> tuple[int, ...]:
    """The three sizes in `2x2x2`."""
    sizes = text.split("x")
    if len(sizes) != 3 or not all(size.isdecimal() and int(size) for size in sizes):
        raise argparse.ArgumentTypeError(f"{text!r} is no mesh; wanted three sizes, such as 2x2x2")
    return tuple(map(int, sizes))


def compared(alone: dict[str, Any], sizes: Sequence[int], names: Sequence[str]) -> dict[str, float]:
    """The largest differences between a mesh and one device."""
    mesh = jaxft.make_mesh(*sizes, devices=jax.devices()[: int(np.prod(sizes))])
    on_mesh = measured(mesh, names)
    differences = {}
    for name, found in on_mesh.items():
        if name in ("generate", "the engine"):
            is_same = np.cumprod(found[0] == alone[name][0], axis=1, dtype=bool)  # up to where a row begins to differ
            difference = np.where(is_same, found[1] - alone[name][1], 0)
            differences[f"log-probabilities of {name}"] = float(np.abs(difference).max())
            differences[f"  rows of {name} that diverge"] = float((~is_same).any(axis=1).mean())
        elif name == "shares of trajectories":
            differences[name] = abs(float(found))
        elif name == "log-probabilities":
            differences[name] = float(np.abs(found - alone[name]).max())
        elif name == "files":
            pairs = zip(*map(jax.tree.leaves, (found, alone[name])), strict=True)
            differences["bits of files, written and read"] = float(np.mean([(a != b).any() for a, b in pairs]))
        elif name == "states":
            differences["restored on another mesh"] = max(restored(mesh, state) for state in found)
        else:
            differences[name] = relative(found, alone[name])
    return differences


def measured(mesh: Any, names: Sequence[str]) -> dict[str, Any]:
    """All compared arrays, on the host; computed on one device without a mesh."""
    model, params = jaxft.init_model(config(), jax.random.key(0), mesh=mesh)
    rng, vocabulary = np.random.default_rng(0), config().vocab_size
    batch = jaxft.Batch(
        tokens=rng.integers(0, vocabulary, (ROWS, WIDTH)).astype(np.int32),
        completion_mask=np.broadcast_to(np.arange(WIDTH) >= PROMPT, (ROWS, WIDTH)),
        advantages=rng.normal(size=ROWS).astype(np.float32),
        trajectory_tokens=np.broadcast_to(np.repeat(TRAJECTORIES, TRAJECTORIES)[:, None], (ROWS, WIDTH))
        * np.float32(WIDTH - PROMPT),
    )
    found: dict[str, Any] = {}
    for name in names:
        found |= COMPARISONS[name](model, params, batch)
    return found


def gradients(model: jaxft.Model, params: Any, batch: jaxft.Batch) -> dict[str, Any]:
    """Loss and gradients of GRPO, the distance to a loss by hand, and log-probabilities in chunks with gradients."""
    loss, _, found = jax.jit(partial(loss_and_gradients, model, jaxft.grpo_loss))(params, batch)
    # The first update of a batch: every ratio is 1, and a trajectory's loss is the mean advantage of its rows.
    by_hand = -np.mean([each.mean() for each in np.split(np.asarray(batch.advantages), np.cumsum(TRAJECTORIES[:-1]))])
    uneven = np.array(batch.completion_mask)
    uneven[::3] = False  # so that some devices have more chunks to score than others

    def score(params: Any) -> tuple[jax.Array, jax.Array]:
        scored = jaxft.token_logprobs(model, params, batch.tokens, completion_mask=uneven, chunk_tokens=16)
        return scored.logprobs.sum(), scored.logprobs

    (_, logprobs), of_sum = jax.jit(jax.value_and_grad(score, has_aux=True))(params)
    taught = partial(jaxft.grpo_loss, teacher=Teacher(model, "jensen_shannon"))
    both = {"policy": params, "teacher": jax.tree.map(lambda leaf: leaf * 1.5, params)}
    _, metrics, of_distillation = jax.jit(partial(loss_and_gradients, model, taught))(both, batch)
    return {
        "gradients of a distillation": (jax.device_get(of_distillation), np.asarray(metrics["teacher_divergence"])),
        "loss": np.asarray(loss),
        "gradients": jax.device_get(found),
        "shares of trajectories": loss - by_hand,
        "log-probabilities": np.asarray(logprobs),
        "gradients of log-probabilities": jax.device_get(of_sum),
    }


def sampling(model: jaxft.Model, params: Any, batch: jaxft.Batch) -> dict[str, Any]:
    """Tokens and log-probabilities of `generate` and of the engine."""
    prompts = batch.tokens[:4, :PROMPT].tolist()
    rollout = jaxft.generate(model, params, prompts, jax.random.key(1), num_generations=4, max_new_tokens=NEW)
    return {
        "generate": (np.asarray(rollout.tokens), np.asarray(rollout.sampler_logprobs)),
        "the engine": served(model, jax.tree.map(jnp.copy, params), prompts),
    }


def updates(model: jaxft.Model, params: Any, batch: jaxft.Batch) -> dict[str, Any]:
    """Parameters after a step of SGD in two microbatches, the gradients of adapters, and states to be restored."""
    descend = optax.sgd(0.1)
    update = jaxft.make_update(model, jaxft.grpo_loss, descend, microbatch_rows=ROWS // 2)
    stepped, _ = update(jaxft.init_train_state(jax.tree.map(jnp.copy, params), descend, model), batch)
    mesh = None if model.sharding is None else model.sharding.mesh
    lora = jaxft.LoraSpec(4, 8.0)
    adapted, with_adapters = jaxft.init_model(config(), jax.random.key(0), lora=lora, mesh=mesh)
    with_adapters["adapter"] = jax.tree.map(lambda leaf: leaf + 0.02, with_adapters["adapter"])
    _, _, of_adapters = jax.jit(partial(loss_and_gradients, adapted, jaxft.grpo_loss))(with_adapters, batch)
    return {
        "parameters after a step": jax.device_get(stepped.params),
        "gradients of adapters": jax.device_get(of_adapters),
        "states": [trained(model, params, batch), trained(adapted, with_adapters, batch)],
    }


def files(model: jaxft.Model, params: Any, batch: jaxft.Batch) -> dict[str, Any]:
    """Parameters written and read, those after a step that may reuse their memory, and the bytes of the file."""
    with tempfile.TemporaryDirectory() as folder:
        jaxft.save_model(Path(folder) / "model", model, params)
        written = np.frombuffer((Path(folder) / "model" / "model.safetensors").read_bytes(), np.uint8)
        mesh = None if model.sharding is None else model.sharding.mesh
        _, read = jaxft.load_model(Path(folder) / "model", mesh=mesh)
    same = jax.device_get(read)
    descend = optax.sgd(0.1)
    stepped, _ = jaxft.make_update(model, jaxft.grpo_loss, descend)(jaxft.init_train_state(read, descend, model), batch)
    return {"files": (same, written), "parameters read and moved": jax.device_get(stepped.params)}


COMPARISONS = {"gradients": gradients, "sampling": sampling, "files": files, "updates": updates}
"""Comparisons in the order in which they run; the last one donates the parameters."""


def trained(model: jaxft.Model, params: Any, batch: jaxft.Batch) -> TrainState:
    """Training state after a step of AdamW."""
    adam = optax.adamw(1e-3)
    update = jaxft.make_update(model, jaxft.grpo_loss, adam)
    return update(jaxft.init_train_state(params, adam, model), batch)[0]


def served(model: jaxft.Model, params: Any, prompts: list[list[int]]) -> tuple[np.ndarray, np.ndarray]:
    """Tokens and log-probabilities of the engine's answers."""
    policy = jaxft.Policy(model, params, jaxft.load_tokenizer(), stop_ids=(), slots=8, max_context_tokens=PROMPT + NEW)
    requests = [
        Request(tuple(prompt), (0, 0, 0, 0, index, number), NEW)
        for index, prompt in enumerate(prompts)
        for number in range(4)
    ]

    async def ask() -> list[Any]:
        return await asyncio.gather(*(policy.engine.submit(request) for request in requests))

    answers = asyncio.run(ask())
    policy.close()
    return np.array([x.token_ids for x in answers]), np.array([x.sampler_logprobs for x in answers])


def relative(found: Any, wanted: Any) -> float:
    """Largest difference of a leaf, relative to its largest number."""
    pairs = zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True)
    return float(np.max([np.abs(a - b).max() / np.abs(b).max() for a, b in pairs]))  # NaN if any is


def restored(mesh: Any, state: Any) -> float:
    """Largest difference between a state saved on a mesh and its restored copy on a mesh with swapped axes."""
    devices, (data, fsdp, tensor) = mesh.devices.flatten(), mesh.shape.values()
    sharding = jaxft.sharding_for(config(), jaxft.make_mesh(fsdp, data * tensor, 1, devices=devices))
    with tempfile.TemporaryDirectory() as folder, RunDirectory.create(Path(folder) / "run") as directory:
        checkpoints = Checkpoints(directory)
        checkpoints.save(1, {}, state)
        checkpoints.wait()
        newest = checkpoints.newest(print)
        assert newest is not None
        again = checkpoints.arrays(newest, sharding.place(jax.tree.map(jnp.zeros_like, state)))
        checkpoints.close()
    assert all(leaf.sharding.mesh == sharding.mesh for leaf in jax.tree.leaves(again))
    pairs = zip(jax.tree.leaves(again), jax.tree.leaves(state), strict=True)
    return max(float(np.abs(np.asarray(a, np.float64) - np.asarray(b)).max()) for a, b in pairs)


def config() -> jaxft.DecoderConfig:
    """A small model whose heads divide over the meshes, and whose vocabulary does so in whole blocks of sampling."""
    return replace(jaxft.model_preset("qwen3-50k"), num_kv_heads=4, vocab_size=512)


if __name__ == "__main__":
    sys.exit(main())
