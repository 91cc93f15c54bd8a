"""Devices as a mesh, and which axis of an array lies along which axis of it.

A mesh has three axes. Along `data` every device has parameters and rows of its own; along `fsdp` rows of its own, too,
but only a share of the parameters, which are gathered where they are used (arXiv 1910.02054); along `tensor` a share of
the heads and of the feed-forward's width, for all rows (arXiv 1909.08053). A `Sharding` says by a short table of paths
which parameter is cut where; the compiler puts in what has to be sent.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

AXES = ("data", "fsdp", "tensor")
ROW_AXES = ("data", "fsdp")
"""What the rows of a batch and of a cache are divided over."""

Axes = tuple[str | None, ...]
Rules = tuple[tuple[str, Axes], ...]
"""Paths, with `*` for any part of them, and mesh axes of the *last* dimensions there; the first that fits counts."""


def make_mesh(data: int = -1, fsdp: int = 1, tensor: int = 1, devices: Sequence[Any] | None = None) -> Mesh:
    """A mesh of these devices (all there are, if None); one size may be -1: as many as are left.

    Raises:
        ValueError: a size is neither positive nor -1, two are -1, they do not multiply to the number of devices, or
            there are several processes.

    >>> dict(make_mesh(devices=jax.devices()[:1]).shape)
    {'data': 1, 'fsdp': 1, 'tensor': 1}
    """
    check_one_process()
    devices = jax.devices() if devices is None else list(devices)
    sizes = dict(zip(AXES, (data, fsdp, tensor), strict=True))
    given = " x ".join(f"{name} {size}" for name, size in sizes.items())
    if any(size < 1 and size != -1 for size in sizes.values()) or list(sizes.values()).count(-1) > 1:
        raise ValueError(f"mesh is {given}; wanted sizes of at least 1, one of which may be -1: the rest")
    known = math.prod(size for size in sizes.values() if size != -1)
    full = {name: len(devices) // known if size == -1 else size for name, size in sizes.items()}
    if math.prod(full.values()) != len(devices):
        raise ValueError(
            f"mesh is {given}, which does not multiply to {len(devices)} devices: change a size, or give -1 to one for "
            "what is left"
        )
    return Mesh(np.array(devices).reshape(*full.values()), AXES, axis_types=(AxisType.Auto,) * len(AXES))


def check_one_process() -> None:
    """Raise if jax runs in several processes.

    Raises:
        ValueError: says how many there are.
    """
    if jax.process_count() > 1:
        raise ValueError(
            f"jax.process_count() is {jax.process_count()}; jaxft runs in one process: start it once, with all devices "
            "of one host and without jax.distributed.initialize"
        )


@dataclass(frozen=True)
class Sharding:
    """Where parameters, and everything made like them, lie on a mesh. Hashable: a static part of a model.

    Attributes:
        mesh: the devices; an abstract one does to plan with.
        rules: which dimensions of a parameter are cut along which axes; what no rule names is whole on every device.
    """

    mesh: Mesh | AbstractMesh
    rules: Rules = ()

    @property
    def devices(self) -> int:
        """How many there are."""
        return self.mesh.size

    @property
    def row_shards(self) -> int:
        """How many parts rows are divided into."""
        return math.prod(self.mesh.shape[name] for name in ROW_AXES)

    def gathered(self) -> "Sharding":
        """The layout in which parameters are used: whole along `fsdp`.

        >>> Layout(make_mesh(devices=jax.devices()[:1]), (("kernel", ("fsdp", "tensor")),)).gathered().rules
        (('kernel', (None, 'tensor')),)
        """
        rules = tuple((path, tuple(None if axis == "fsdp" else axis for axis in axes)) for path, axes in self.rules)
        return replace(self, rules=rules)

    def whole(self) -> "Sharding":
        """The layout in which every device has everything."""
        return replace(self, rules=())

    def axes(self, path: str) -> Axes:
        """The mesh axes of the last dimensions of the array at a path, whatever stands before it.

        >>> layout = Layout(make_mesh(devices=jax.devices()[:1]), (("mlp/*/kernel", ("fsdp", "tensor")),))
        >>> layout.axes("0/mu/layers/mlp/up/kernel"), layout.axes("layers/mlp/up/bias")
        (('fsdp', 'tensor'), ())
        """
        return next((axes for pattern, axes in self.rules if fnmatchcase(f"/{path}", f"*/{pattern}")), ())

    def spec(self, path: str, shape: Sequence[int]) -> PartitionSpec:
        """The partition of an array; a dimension that does not divide is whole on every device."""
        axes = self.axes(path)
        if len(axes) > len(shape):
            return PartitionSpec()
        wanted = (None,) * (len(shape) - len(axes)) + axes
        return PartitionSpec(
            *(
                axis if axis is not None and size % self.mesh.shape[axis] == 0 else None
                for size, axis in zip(shape, wanted, strict=True)
            )
        )

    def leaf_sharding(self, path: str, shape: Sequence[int]) -> NamedSharding:
        """The sharding of the array at a path."""
        return NamedSharding(self.mesh, self.spec(path, shape))

    def shardings(self, tree: Any) -> Any:
        """The sharding of every array (or shape) of a tree, by its path."""
        return jax.tree_util.tree_map_with_path(
            lambda path, leaf: self.leaf_sharding(path_text(path), leaf.shape), tree
        )

    def place(self, tree: Any) -> Any:
        """The arrays of a tree put where they belong; of shapes, the same with their shardings."""
        return _placed(tree, self.shardings(tree))

    def constrain(self, tree: Any) -> Any:
        """Inside a jitted function: the arrays of a tree, which are to lie where they belong."""
        return jax.lax.with_sharding_constraint(tree, self.shardings(tree))

    def cut(self, shape: Sequence[int], *axes: str | tuple[str, ...] | None) -> NamedSharding:
        """An array whose first dimensions are cut along these mesh axes, as far as they divide."""
        spec = []
        for size, names in zip(shape, axes, strict=False):
            parts = 1 if names is None else math.prod(self.mesh.shape[name] for name in np.atleast_1d(names))
            spec.append(names if size % parts == 0 else None)
        return NamedSharding(self.mesh, PartitionSpec(*spec))

    def constrain_axes(self, tree: Any, *axes: str | tuple[str, ...] | None) -> Any:
        """Inside a jitted function: arrays that are to be `cut` so."""
        return jax.tree.map(lambda x: jax.lax.with_sharding_constraint(x, self.cut(x.shape, *axes)), tree)

    def constrain_rows(self, tree: Any) -> Any:
        """Arrays with rows on axis 0, of which each device is to have its own."""
        return self.constrain_axes(tree, ROW_AXES)

    def constrain_heads(self, tree: Any) -> Any:
        """Activations, `[rows, tokens, heads, ...]` or `[rows, tokens, width]`: rows and heads divided."""
        return self.constrain_axes(tree, ROW_AXES, None, "tensor")

    def constrain_cache(self, tree: Any) -> Any:
        """Keys and values, `[rows, heads, ...]`, or logits `[rows, vocabulary]`."""
        return self.constrain_axes(tree, ROW_AXES, "tensor")

    def constrain_spread(self, x: Any) -> Any:
        """An array whose first axis is divided over all devices if it can be, or else as rows are."""
        return self.constrain_axes(x, AXES if x.shape[0] % self.devices == 0 else ROW_AXES)

    def place_rows(self, tree: Any) -> Any:
        """Arrays with rows on axis 0, each device with its own.

        Raises:
            ValueError: they do not divide.
        """
        for leaf in jax.tree.leaves(tree):
            self.check_rows(leaf.shape[0], "rows")
        return _placed(tree, jax.tree.map(lambda leaf: self.cut(leaf.shape, ROW_AXES), tree))

    def check_rows(self, count: int, what: str) -> None:
        """Nothing, if so many rows divide over the devices that share them.

        Raises:
            ValueError: they do not.
        """
        if count % self.row_shards:
            sizes = " x ".join(f"{name} {self.mesh.shape[name]}" for name in ROW_AXES)
            raise ValueError(
                f"{count} {what} do not divide over the {self.row_shards} parts of the mesh ({sizes}); wanted a "
                f"multiple of {self.row_shards}"
            )

    def uneven(self, tree: Any) -> list[str]:
        """What stays whole against the rules, a line for each."""
        lines = []
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
            axes = self.axes(path_text(path))
            for offset, axis in enumerate(reversed(axes), 1):
                if axis is not None and offset <= leaf.ndim and leaf.shape[-offset] % self.mesh.shape[axis]:
                    lines.append(
                        f"{path_text(path)}: dimension {leaf.ndim - offset} of {leaf.shape[-offset]} does not divide "
                        f"over the {self.mesh.shape[axis]} devices of mesh axis {axis!r}"
                    )
        return lines


def devices_of(sharding: Sharding | None) -> list[Any]:
    """The devices that compute: those of the mesh, or else (also for an abstract mesh) the one that jax takes first.

    >>> devices_of(None) == jax.devices()[:1]
    True
    """
    if sharding is not None and isinstance(sharding.mesh, Mesh):
        return list(sharding.mesh.devices.flat)
    config: Any = jax.config  # whose attributes are made at run time
    default = config.jax_default_device
    return [default] if isinstance(default, jax.Device) else jax.devices()[:1]


def constrain(sharding: Sharding | None, tree: Any) -> Any:
    """Inside a jitted function: the arrays of a tree, where they belong if there is a layout."""
    return tree if sharding is None else sharding.constrain(tree)


def _placed(tree: Any, shardings: Any) -> Any:
    if any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(tree)):
        return jax.tree.map(lambda x, to: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=to), tree, shardings)
    return jax.device_put(tree, shardings)


def path_text(path: Any) -> str:
    """The path of a leaf as text.

    >>> [path_text(path) for path, _ in jax.tree_util.tree_leaves_with_path({"a": [1, 2]})]
    ['a/0', 'a/1']
    """
    return jax.tree_util.keystr(path, simple=True, separator="/")


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def gather_params(stored: Sharding, used: Sharding, params: Any) -> Any:
    """Parameters laid out as they are used; their gradients are laid out as they are stored, a share on each device."""
    return used.constrain(params)


def _gather_forward(stored: Sharding, used: Sharding, params: Any) -> tuple[Any, None]:
    return used.constrain(params), None


def _gather_backward(stored: Sharding, used: Sharding, saved: None, cotangent: Any) -> tuple[Any]:
    # Summed as they are used, then cut: the compiler joins the two.
    return (stored.constrain(used.constrain(cotangent)),)


gather_params.defvjp(_gather_forward, _gather_backward)


def device_bytes(sharding: Sharding | None, tree: Any) -> int:
    """Bytes that each device holds of the arrays (or shapes) of a tree; of a single device all of them.

    >>> device_bytes(None, {"kernel": jax.ShapeDtypeStruct((4, 8), "float32")})
    128
    """
    if sharding is None:
        return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))
    shares = jax.tree.map(lambda leaf, to: math.prod(to.shard_shape(leaf.shape)), tree, sharding.shardings(tree))
    sizes = jax.tree.map(lambda leaf, share: share * leaf.dtype.itemsize, tree, shares)
    return sum(jax.tree.leaves(sizes))
