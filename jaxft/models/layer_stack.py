"""The layers of a decoder, one after the other: their parameters are stacked on axis 0, and read from there in turn.

A stack holds the layers that have its array (`layers_with`): those of experts have no rows for layers without. GPUs go
through the layers one by one; elsewhere they are scanned, several at a time where layers of several kinds repeat.
Letters: `B` rows, `T` tokens, `D` hidden.
"""

from collections.abc import Callable, Sequence
from functools import cache, partial
from itertools import accumulate
from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict
from jaxtyping import Array, Float

from jaxft.core.types import Params
from jaxft.models.block import PROJECTED
from jaxft.models.config import DecoderConfig, LayerKind, layers_with
from jaxft.models.flash import saves_kernels
from jaxft.models.layers import WIDENED
from jaxft.models.lora import LORA_NAMES, has_adapters

Remat = Literal["none", "dots", "projections", "attention", "full", "least"]
"""Checkpoint policies (arXiv 1604.06174), the fastest first: recompute nothing, all but products with weights and
attention kernels, all but attention kernels and their projections, all but attention kernels, or whole layers. From
`dots` on, attention of the reference is recomputed. `least` is `full` without what takes memory to be fast: layers are
scanned on GPUs too, and no head is fused."""

REMATS: tuple[Remat, ...] = get_args(Remat)


def auto_remats(platform: str) -> tuple[Remat, ...]:
    """Return the policies to choose from on devices of a platform, the fastest first.

    `none` is among them on GPUs only, whose layers are unrolled with all but `least`. A scan writes and reads all that
    it saves.
    """
    return REMATS if platform == "gpu" else REMATS[1:]


def _saves(*names: str) -> Callable[..., Any]:
    """Return the policy that saves the arrays of these names, and the results of attention kernels."""
    policies = jax.checkpoint_policies
    return policies.save_from_both_policies(policies.save_only_these_names(*names), saves_kernels)


SAVEABLE = {
    "none": jax.checkpoint_policies.everything_saveable,
    "dots": _saves(PROJECTED, WIDENED),
    "projections": _saves(PROJECTED),
    "attention": saves_kernels,
    "full": jax.checkpoint_policies.nothing_saveable,
    "least": jax.checkpoint_policies.nothing_saveable,
}


def cut_layer(config: DecoderConfig, layers: Params, layer: int) -> Params:
    """Return the parameters of one layer."""
    flat = flatten_dict(layers)
    held = [path for path in sorted(flat) if config.kinds[layer].holds(path)]
    return unflatten_dict({path: flat[path][layers_with(config.kinds, path).index(layer)] for path in held})


Compute = Callable[[LayerKind, Array, Params], tuple[Array, Any]]
"""Computation of a layer from its kind, the residual stream and its parameters."""

CHOSEN = "chosen"
"""Name, beside the parameters of a mixture, of the experts that take the place of those that its router chooses."""


class LayerRun(NamedTuple):
    """Consecutive layers that have some kinds in turn, several times."""

    kinds: tuple[LayerKind, ...]
    repeats: int


@cache
def layer_runs(kinds: tuple[LayerKind, ...]) -> list[LayerRun]:
    """Divide layers into runs so that as few layers as possible are compiled, one for each kind of each run.

    >>> full, sliding = LayerKind(), LayerKind(window=8)
    >>> [(len(run.kinds), run.repeats) for run in layer_runs((sliding, sliding, full) * 5 + (sliding, sliding))]
    [(1, 2), (3, 5)]
    """
    fewest: list[list[LayerRun]] = [[]]  # runs of the last 0, 1, 2, ... layers
    for start in reversed(range(len(kinds))):
        ways = []
        for length in range(1, len(kinds) - start + 1):
            turn, repeats = kinds[start : start + length], 1
            while kinds[start + length * repeats :][:length] == turn:
                repeats += 1
            ways.append([LayerRun(turn, repeats), *fewest[len(kinds) - start - length * repeats]])
        fewest.append(min(ways, key=lambda runs: (sum(len(run.kinds) for run in runs), len(runs))))
    return fewest[-1]


@jax.named_scope("layers")  # which `benchmarks/cost.py` reads
def apply_layers(
    compute: Compute,
    remat: Remat,
    kinds: tuple[LayerKind, ...],
    x: Float[Array, "B T D"],
    layers: Params,
    platform: str,
) -> tuple[Float[Array, "B T D"], Any]:
    """Return the residual stream after all layers, whose parameters are stacked on axis 0, and what else they return.

    GPUs have no loop over layers unless `remat` is `least`.

    Args:
        compute: computes a layer, and returns beside the residual stream None or a tree, which is stacked over layers.
        remat: checkpoint policy of each layer.
        kinds: kind of each layer.
        x: residual stream.
        layers: parameters of all layers.
        platform: platform of the devices.
    """
    flat = flatten_dict(layers)
    frozen = {path for path in flat if path[-1] not in LORA_NAMES} if has_adapters(layers) else set()
    if platform == "gpu" and remat != "least":
        return unroll_layers(compute, remat, kinds, x, flat, frozen)
    runs, whole, parts = layer_runs(kinds), dict[Any, Array](), [flat]
    if len(runs) > 1:
        whole = {path: flat[path] for path in frozen}
        ends = [0, *accumulate(len(run.kinds) * run.repeats for run in runs)]
        split = split_layers(kinds, flat, frozen, ends)
        parts = [{path: pieces[i] for path, pieces in split.items() if i in pieces} for i in range(len(runs))]

    # The layer is cut in here, as the backward pass would otherwise keep a copy of it.
    @partial(jax.checkpoint, policy=SAVEABLE[remat], static_argnums=(0, 1))
    def compute_layer(run: LayerRun, place: int, x: Array, turn: Any, start: Any, whole: Any) -> tuple[Array, Any]:
        kind = run.kinds[place]
        layer = {
            path: jax.tree.map(partial(take_row, row_of_layer(kinds, path, start + place)), leaf)
            for path, leaf in whole.items()
            if kind.holds(path)
        }
        for path, leaf in turn.items():
            if kind.holds(path):
                layer[path] = leaf if len(run.kinds) == 1 else leaf[layers_with(run.kinds, path).index(place)]
        return compute(kind, x, unflatten_dict(layer))

    first, others = 0, list[Any]()
    for run, part in zip(runs, parts, strict=True):
        count = len(run.kinds)

        def step(x: Array, turn: Any, run: LayerRun = run) -> tuple[Array, Any]:
            others = []
            for place in range(len(run.kinds)):
                x, other = compute_layer(run, place, x, *turn, whole)
                others.append(other)
            return x, stacked(others)

        if count > 1:
            part = jax.tree.map(lambda leaf, run=run: leaf.reshape(run.repeats, -1, *leaf.shape[1:]), part)
        starts = first + count * jnp.arange(run.repeats)
        x, other = jax.lax.scan(step, x, (part, starts))
        others += [] if other is None else [jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:]), other)]
        first += count * run.repeats
    return x, jax.tree.map(lambda *each: jnp.concatenate(each), *others) if others else None


def stacked(trees: Sequence[Any]) -> Any:
    """Return the trees that are not None as one, with an axis more; None without any."""
    trees = [tree for tree in trees if tree is not None]
    return jax.tree.map(lambda *each: jnp.stack(each), *trees) if trees else None


def row_of_layer(kinds: tuple[LayerKind, ...], path: tuple[str, ...], layer: Any) -> Any:
    """Return the row of a layer in the stack of the array at a path."""
    layers = layers_with(kinds, path)
    return layer if len(layers) == len(kinds) else jnp.searchsorted(jnp.array(layers), layer)


def take_row(row: Any, stack: Array) -> Array:
    """Return a row of a stack."""
    return jax.lax.dynamic_index_in_dim(stack, row, keepdims=False)


def split_layers(
    kinds: tuple[LayerKind, ...], flat: dict[Any, Array], frozen: set[Any], ends: Sequence[int]
) -> dict[Any, dict[int, Array]]:
    """Split parameters that are trained at these layers; of each the parts that have any layer, by their number.

    A split of parameters that were cast is part of the cast, and its gradient, a concatenation, part of the sum of
    gradients. The base of adapters would be copied: its layers are to be cut from the whole stack.
    """
    pieces = dict[Any, dict[int, Array]]()
    for path in (path for path in flat if path not in frozen):
        rows = np.searchsorted(layers_with(kinds, path), ends)
        sizes = {part: int(size) for part, size in enumerate(np.diff(rows)) if size}
        pieces[path] = dict(zip(sizes, jax.lax.split(flat[path], [*sizes.values()]), strict=True))
    return pieces


def unroll_layers(
    compute: Compute,
    remat: Remat,
    kinds: tuple[LayerKind, ...],
    x: Float[Array, "B T D"],
    flat: dict[Any, Array],
    frozen: set[Any],
) -> tuple[Float[Array, "B T D"], Any]:
    """Return what `apply_layers` does, without a loop, and for `none` without a checkpoint: XLA keeps what it reads.

    XLA for GPUs copies what a scan keeps into stacks of all layers, and begins with zeros there.
    """
    whole, split = {path: flat[path] for path in frozen}, split_layers(kinds, flat, frozen, range(len(kinds) + 1))

    def compute_layer(place: int, x: Array, own: Any, whole: Any) -> tuple[Array, Any]:
        rows = {path: layers_with(kinds, path).index(place) for path in whole if kinds[place].holds(path)}
        layer = {path: whole[path][row] for path, row in rows.items()} | {path: leaf[0] for path, leaf in own.items()}
        return compute(kinds[place], x, unflatten_dict(layer))

    if remat != "none":
        compute_layer = jax.checkpoint(compute_layer, policy=SAVEABLE[remat], static_argnums=0)
    others = []
    for place in range(len(kinds)):
        own = {path: pieces[place] for path, pieces in split.items() if place in pieces}
        x, other = compute_layer(place, x, own, whole)
        others.append(other)
    return x, stacked(others)
