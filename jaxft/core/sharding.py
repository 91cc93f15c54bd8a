"""Device meshes, and sharding rules that map the dimensions of each parameter to mesh axes.

A mesh has three axes. `data` shards rows and replicates parameters. `fsdp` shards rows and parameters, which are
gathered where they are used (arXiv 1910.02054). `tensor` shards heads and the feed-forward's width, and replicates
rows (arXiv 1909.08053). A fourth one, `expert`, shards rows, and the experts of a mixture (arXiv 2006.16668); a mesh
has it where it is larger than 1. A `Sharding` maps paths of parameters to mesh axes by a short table; the compiler
adds the communication.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import partial
from itertools import combinations
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

AXES = ("data", "fsdp", "tensor")
EXPERT = "expert"
ROW_AXES = ("data", "fsdp")
"""Mesh axes that the rows of a batch and of a cache are sharded over, and `expert` where a mesh has it."""

Axes = tuple[str | None, ...]
Rules = tuple[tuple[str, Axes], ...]
"""Pairs of a path pattern (`*` matches anything) and the mesh axes of the *last* dimensions; the first match counts."""


def make_mesh(
    data: int = -1, fsdp: int = 1, tensor: int = 1, devices: Sequence[Any] | None = None, expert: int = 1
) -> Mesh:
    """Make a mesh of these devices, by default all; one size may be -1, which takes the remaining devices.

    All devices are those of all processes (`jax.distributed`), those of the first one first.

    Raises:
        ValueError: a size is neither positive nor -1, two are -1, or the sizes do not multiply to the devices.

    >>> dict(make_mesh(devices=jax.devices()[:1]).shape)
    {'data': 1, 'fsdp': 1, 'tensor': 1}
    """
    if devices is None:
        devices = sorted(jax.devices(), key=lambda device: (device.process_index, device.id))
    shape = mesh_axes(mesh_sizes(data, fsdp, tensor, len(devices), expert), expert)
    types = (AxisType.Auto,) * len(shape)
    return Mesh(np.array(list(devices)).reshape(*shape.values()), tuple(shape), axis_types=types)


def mesh_axes(sizes: tuple[int, int, int], expert: int) -> dict[str, int]:
    """Return the axes of a mesh in their order, with their sizes.

    >>> mesh_axes((1, 2, 4), 1), mesh_axes((1, 2, 4), 8)
    ({'data': 1, 'fsdp': 2, 'tensor': 4}, {'data': 1, 'fsdp': 2, 'expert': 8, 'tensor': 4})
    """
    data, fsdp, tensor = sizes
    return {"data": data, "fsdp": fsdp} | ({EXPERT: expert} if expert > 1 else {}) | {"tensor": tensor}


def mesh_sizes(data: int, fsdp: int, tensor: int, devices: int, expert: int = 1) -> tuple[int, int, int]:
    """Return the sizes of `AXES` in a mesh of so many devices; one may be given as -1, for the remaining devices.

    Raises:
        ValueError: a size is neither positive nor -1, two are -1, or the sizes do not multiply to the devices.

    >>> mesh_sizes(1, -1, 2, 8)
    (1, 4, 2)
    """
    sizes = dict(zip(AXES, (data, fsdp, tensor), strict=True))
    given = " x ".join(f"{name} {size}" for name, size in mesh_axes((data, fsdp, tensor), expert).items())
    if any(size < 1 and size != -1 for size in sizes.values()) or list(sizes.values()).count(-1) > 1:
        raise ValueError(f"mesh is {given}; wanted sizes of at least 1, or -1 once, for all remaining devices")
    known = expert * math.prod(size for size in sizes.values() if size != -1)
    full = [devices // known if size == -1 else size for size in sizes.values()]
    if expert * math.prod(full) != devices:
        raise ValueError(
            f"mesh is {given}, which does not multiply to {devices} devices: change a size, or set one to -1 "
            "for all remaining devices"
        )
    return full[0], full[1], full[2]


@dataclass(frozen=True)
class Sharding:
    """The sharding of parameters, and of trees with the same paths, over a mesh; hashable, so a model can hold it.

    Attributes:
        mesh: the devices; an abstract mesh suffices to plan.
        rules: mesh axes by path; an array that matches no rule is replicated.
    """

    mesh: Mesh | AbstractMesh
    rules: Rules = ()

    @property
    def devices(self) -> int:
        """Number of devices."""
        return self.mesh.size

    @property
    def row_axes(self) -> tuple[str, ...]:
        """Mesh axes that rows are sharded over."""
        return (*ROW_AXES, EXPERT) if EXPERT in self.mesh.shape else ROW_AXES

    @property
    def row_shards(self) -> int:
        """Number of shards of the rows."""
        return math.prod(self.mesh.shape[name] for name in self.row_axes)

    def gathered(self) -> "Sharding":
        """Return the sharding that parameters have where they are used: gathered along `fsdp`.

        >>> Sharding(make_mesh(devices=jax.devices()[:1]), (("kernel", ("fsdp", "tensor")),)).gathered().rules
        (('kernel', (None, 'tensor')),)
        """
        rules = tuple((path, tuple(None if axis == "fsdp" else axis for axis in axes)) for path, axes in self.rules)
        return replace(self, rules=rules)

    def axes(self, path: str) -> Axes:
        """Return the mesh axes of the last dimensions of the array at a path; rules match the end of the path.

        >>> sharding = Sharding(make_mesh(devices=jax.devices()[:1]), (("mlp/*/kernel", ("fsdp", "tensor")),))
        >>> sharding.axes("0/mu/layers/mlp/up/kernel"), sharding.axes("layers/mlp/up/bias")
        (('fsdp', 'tensor'), ())
        """
        found = next((axes for pattern, axes in self.rules if fnmatchcase(f"/{path}", f"*/{pattern}")), ())
        return tuple(None if axis == EXPERT and axis not in self.mesh.shape else axis for axis in found)

    def spec(self, path: str, shape: Sequence[int]) -> PartitionSpec:
        """Return the partition spec of an array; a dimension that does not divide over its axis is replicated."""
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
        """Return JAX's sharding of the array at a path."""
        return NamedSharding(self.mesh, self.spec(path, shape))

    def shardings(self, tree: Any) -> Any:
        """Return JAX's sharding of each array (or shape) of a tree, by its path."""
        return jax.tree_util.tree_map_with_path(
            lambda path, leaf: self.leaf_sharding(path_text(path), leaf.shape), tree
        )

    def place(self, tree: Any) -> Any:
        """Copy the arrays of a tree to their devices; a tree of shapes gets shardings instead."""
        return _place_tree(tree, self.shardings(tree))

    def constrain(self, tree: Any) -> Any:
        """Constrain the arrays of a tree to the sharding of their paths, inside a jitted function."""
        return jax.lax.with_sharding_constraint(tree, self.shardings(tree))

    def cut(self, shape: Sequence[int], *axes: str | tuple[str, ...] | None) -> NamedSharding:
        """Return JAX's sharding of the first dimensions over these mesh axes, as far as they divide."""
        spec = []
        for size, names in zip(shape, axes, strict=False):
            parts = 1 if names is None else math.prod(self.mesh.shape[name] for name in np.atleast_1d(names))
            spec.append(names if size % parts == 0 else None)
        return NamedSharding(self.mesh, PartitionSpec(*spec))

    def constrain_axes(self, tree: Any, *axes: str | tuple[str, ...] | None) -> Any:
        """Constrain each array of a tree to `cut` along these axes, inside a jitted function."""
        return jax.tree.map(lambda x: jax.lax.with_sharding_constraint(x, self.cut(x.shape, *axes)), tree)

    def constrain_spread(self, x: Any) -> Any:
        """Shard the first axis over all devices if it divides over them, else over the row axes of the mesh."""
        return self.constrain_axes(x, self.mesh.axis_names if x.shape[0] % self.devices == 0 else self.row_axes)

    def place_rows(self, tree: Any) -> Any:
        """Copy arrays with rows on axis 0 to the devices of their rows.

        Raises:
            ValueError: the rows do not divide over the row shards.
        """
        for leaf in jax.tree.leaves(tree):
            self.check_rows(leaf.shape[0], "rows")
        return _place_tree(tree, jax.tree.map(lambda leaf: self.cut(leaf.shape, self.row_axes), tree))

    def page_spec(self, axis: int) -> PartitionSpec:
        """Return the partition of keys or values with pages on this axis, 0 or 1, and heads on the other of the two.

        What has pages on axis 2 has no heads.

        >>> print(*Sharding(make_mesh(devices=jax.devices()[:1])).page_spec(1))
        tensor ('data', 'fsdp')
        """
        rows = self.row_axes
        specs = (rows, "tensor"), ("tensor", rows), (None, None, rows)
        return PartitionSpec(*specs[axis])

    def page_shardings(self, axes: Any) -> Any:
        """Return JAX's sharding of each array of a cache, of whose page axes `axes` is the tree."""
        return jax.tree.map(lambda axis: NamedSharding(self.mesh, self.page_spec(axis)), axes)

    def place_pages(self, cache: Any, axes: Any) -> Any:
        """Copy a cache to its devices; a tree of shapes gets shardings instead."""
        return _place_tree(cache, self.page_shardings(axes))

    def map_pages(self, function: Callable[..., Any], cache: Any, axes: Any, *rows: Any) -> Any:
        """Return `function(cache, *rows)`, a cache, in which each device has its own pages, heads and rows.

        Args:
            function: function of a cache and of arrays with rows on axis 0, which knows no mesh.
            cache: tree of keys and values.
            axes: tree of their page axes.
            rows: arrays with rows on axis 0, which divide over the row shards.
        """
        specs = jax.tree.map(self.page_spec, axes)
        of_rows = (PartitionSpec(self.row_axes),) * len(rows)
        return jax.shard_map(function, mesh=self.mesh, in_specs=(specs, *of_rows), out_specs=specs, check_vma=False)(
            cache, *rows
        )

    def map_shards(
        self, function: Callable[..., Any], params: Any, rows: Sequence[Any], *axes: str | tuple[str, ...] | None
    ) -> Any:
        """Return `function(params, *rows)`, in which each device computes its own part of the rows.

        The parameters are gathered once, and their gradients, summed over the part of each device, are exchanged once:
        loops inside the function communicate nothing.

        Args:
            function: function of the whole parameters and of a part of the rows, which knows no mesh. Its results have
                the first axes of the rows.
            params: tree of parameters, sharded by the rules.
            rows: arrays that are divided alike, the last one like the results; others may be None.
            axes: mesh axes that the first dimensions of the rows are divided over, as far as they divide.
        """
        specs = jax.tree_util.tree_map_with_path(lambda path, leaf: self.spec(path_text(path), leaf.shape), params)
        cuts = tuple(PartitionSpec() if x is None else self.cut(x.shape, *axes).spec for x in rows)

        def gather(leaf: Any, spec: PartitionSpec) -> Any:
            for dimension, name in enumerate(spec):
                if name is not None:
                    leaf = jax.lax.all_gather(leaf, name, axis=dimension, tiled=True)
            return leaf

        def compute(params: Any, *rows: Any) -> Any:
            return function(jax.tree.map(gather, params, specs), *rows)

        return jax.shard_map(compute, mesh=self.mesh, in_specs=(specs, *cuts), out_specs=cuts[-1], check_vma=False)(
            params, *rows
        )

    def check_rows(self, count: int, what: str) -> None:
        """Raise unless this many rows divide over the row shards.

        Raises:
            ValueError: they do not; `what` is the word for rows in the message.
        """
        if count % self.row_shards:
            sizes = " x ".join(f"{name} {self.mesh.shape[name]}" for name in self.row_axes)
            raise ValueError(
                f"{count} {what} do not divide over the {self.row_shards} row shards of the mesh ({sizes}); wanted a "
                f"multiple of {self.row_shards}"
            )

    def uneven(self, tree: Any) -> list[str]:
        """Return a line for each dimension that is replicated because it does not divide over the axis of its rule."""
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


def compute_devices(sharding: Sharding | None) -> list[Any]:
    """Return the devices that compute: those of the mesh, or jax's default device if there is none or it is abstract.

    >>> compute_devices(None) == jax.devices()[:1]
    True
    """
    if sharding is not None and isinstance(sharding.mesh, Mesh):
        return list(sharding.mesh.devices.flat)
    config: Any = jax.config  # whose attributes are made at run time
    default = config.jax_default_device
    return [default] if isinstance(default, jax.Device) else jax.local_devices()[:1]


def compute_platform(sharding: Sharding | None) -> str:
    """Return the platform of the devices that compute, `compute_devices(sharding)`: "cpu", "gpu" or "tpu".

    Programs are chosen by it and not by `jax.default_backend()`, the platform of the process, which may also hold a
    policy on a CPU beside one on a GPU, or compile for devices that it does not have.

    >>> compute_platform(Sharding(make_mesh(devices=jax.devices("cpu")[:1])))
    'cpu'
    """
    return str(compute_devices(sharding)[0].platform)


def constrain(sharding: Sharding | None, tree: Any) -> Any:
    """Return `sharding.constrain(tree)`, or the tree itself without a sharding."""
    return tree if sharding is None else sharding.constrain(tree)


def by_rows(sharding: Sharding | None, tree: Any) -> Any:
    """Constrain arrays with rows on axis 0, each device to its own rows; without a sharding return the tree itself."""
    return tree if sharding is None else sharding.constrain_axes(tree, sharding.row_axes)


def by_heads(sharding: Sharding | None, tree: Any) -> Any:
    """Constrain activations `[rows, tokens, heads, ...]` or `[rows, tokens, width]` to each device's rows and heads."""
    return tree if sharding is None else sharding.constrain_axes(tree, sharding.row_axes, None, "tensor")


def committed_device(params: Any) -> jax.Device | None:
    """Return the device that parameters are committed to; None if they are not, or lie on a mesh."""
    arrays = [leaf for leaf in jax.tree.leaves(params) if isinstance(leaf, jax.Array)]
    placed = [each for each in arrays if not isinstance(each, jax.core.Tracer) and each.committed]
    if not placed or not all(isinstance(each.sharding, SingleDeviceSharding) for each in placed):
        return None
    devices = {device for each in placed for device in each.devices()}
    return devices.pop() if len(devices) == 1 else None


def commit_like(params: Any, tree: Any) -> Any:
    """Commit arrays to the device of `params`; return them unchanged if these are committed to none, or on a mesh.

    The results of a program are committed if one of its arguments is. So the first arrays that it is called with are
    committed, too: its second call, with results of the first, would compile it again.

    >>> device = jax.devices()[0]
    >>> params = jax.device_put(jax.numpy.ones(2), device)
    >>> [commit_like(each, jax.numpy.zeros(3)).committed for each in (params, jax.numpy.ones(2))]
    [True, False]
    """
    device = committed_device(params)
    return tree if device is None else jax.device_put(tree, device)


def _place_tree(tree: Any, shardings: Any) -> Any:
    if any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(tree)):
        return jax.tree.map(lambda x, to: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=to), tree, shardings)
    meshes = {to.mesh for to in jax.tree.leaves(shardings)}
    if any(isinstance(mesh, Mesh) and mesh.is_multi_process for mesh in meshes):
        return jax.tree.map(_placed_in_parts, tree, shardings)
    return jax.device_put(tree, shardings)


def _placed_in_parts(array: Any, to: NamedSharding) -> jax.Array:
    """Copy an array that each process has as a whole to the devices of several: each copies the parts of its own."""
    if isinstance(array, jax.core.Tracer) or (isinstance(array, jax.Array) and not array.is_fully_addressable):
        return jax.device_put(array, to)
    whole = np.asarray(array)  # `device_put` would compare it with those of the other processes
    return jax.make_array_from_callback(whole.shape, to, lambda part: whole[part])


def spans_processes(sharding: Sharding | None) -> bool:
    """Return True if a mesh has devices of several processes.

    >>> spans_processes(Sharding(make_mesh(devices=jax.devices()[:1])))
    False
    """
    return sharding is not None and isinstance(sharding.mesh, Mesh) and sharding.mesh.is_multi_process


def connect(mesh: Mesh) -> None:
    """Let the processes of a mesh connect now, when all of them are here, by a sum along every choice of its axes.

    They would do so in the first program that sends along these axes. On CPUs a process then waits 30 seconds for one
    that still compiles, and gives up.
    """
    axes = [axis for axis in mesh.axis_names if mesh.shape[axis] > 1]
    groups = [group for count in range(1, len(axes) + 1) for group in combinations(axes, count)]

    def sums(x: Any) -> list[Any]:
        return [jax.lax.psum(x, group) for group in groups]

    one = jax.make_array_from_callback((), NamedSharding(mesh, PartitionSpec()), lambda part: np.ones((), np.float32))
    specs = [PartitionSpec()] * len(groups)
    jax.block_until_ready(jax.jit(jax.shard_map(sums, mesh=mesh, in_specs=PartitionSpec(), out_specs=specs))(one))


def to_host(tree: Any) -> Any:
    """Return the arrays of a tree as numpy arrays.

    An array on the devices of several processes is gathered first: they all call this alike.
    """

    def whole(leaf: Any) -> Any:
        if not isinstance(leaf, jax.Array) or leaf.is_fully_addressable or leaf.is_fully_replicated:
            return leaf
        assert isinstance(leaf.sharding, NamedSharding)
        return _replicate(leaf, NamedSharding(leaf.sharding.mesh, PartitionSpec()))

    return jax.device_get(jax.tree.map(whole, tree))


@partial(jax.jit, static_argnums=1)
def _replicate(array: Any, sharding: NamedSharding) -> Any:
    return jax.lax.with_sharding_constraint(array, sharding)


def path_text(path: Any) -> str:
    """Return the path of a leaf as text, its keys joined by `/`.

    >>> [path_text(path) for path, _ in jax.tree_util.tree_leaves_with_path({"a": [1, 2]})]
    ['a/0', 'a/1']
    """
    return jax.tree_util.keystr(path, simple=True, separator="/")


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def gather_params(stored: Sharding, used: Sharding, params: Any) -> Any:
    """Constrain parameters to the sharding `used`, and their gradients to the sharding `stored`."""
    return used.constrain(params)


def _gather_forward(stored: Sharding, used: Sharding, params: Any) -> tuple[Any, None]:
    return used.constrain(params), None


def _gather_backward(stored: Sharding, used: Sharding, saved: None, cotangent: Any) -> tuple[Any]:
    # With both constraints the compiler fuses the sum over devices and the slicing into one reduce-scatter.
    return (stored.constrain(used.constrain(cotangent)),)


gather_params.defvjp(_gather_forward, _gather_backward)


def device_bytes(sharding: Sharding | None, tree: Any) -> int:
    """Return the bytes of a tree of arrays (or shapes) on each device; all bytes without a sharding.

    >>> device_bytes(None, {"kernel": jax.ShapeDtypeStruct((4, 8), "float32")})
    128
    """
    if sharding is None:
        return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))
    shares = jax.tree.map(lambda leaf, to: math.prod(to.shard_shape(leaf.shape)), tree, sharding.shardings(tree))
    sizes = jax.tree.map(lambda leaf, share: share * leaf.dtype.itemsize, tree, shares)
    return sum(jax.tree.leaves(sizes))
