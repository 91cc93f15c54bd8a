"""The weights to decode with: the trained parameters, laid out for decoding, and sent to the devices that sample."""

import math
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding

from jaxft.core.cache import compute_dtype
from jaxft.core.partition import combine, partition, trainable
from jaxft.core.sharding import AXES, Sharding, constrain, device_bytes, make_mesh, path_text
from jaxft.core.types import Model, Params


@partial(jax.jit, static_argnums=(0, 1))
def copy_trained(model: Model, dtype: str, params: Params) -> Params:
    """Return copies of the trained parameters in a dtype, or adapters in their own, and None for a frozen base."""

    def copy(leaf: Any) -> Any:
        is_cast = model.lora is None and jnp.issubdtype(leaf.dtype, jnp.floating)
        return jnp.copy(leaf).astype(dtype if is_cast else leaf.dtype)

    return constrain(model.sharding, jax.tree.map(copy, trainable(model, params)))


class Relayout:
    """`Model.decode_layout`, jitted; arrays that it leaves as they are, mostly embeddings, are shared, not copied."""

    def __init__(self, model: Model) -> None:
        self._model = model
        self._new_leaves = jax.jit(self._make_new_leaves, static_argnums=1)

    def __call__(self, params: Params, *, is_shared: bool = True) -> Params:
        """Return the weights to decode with.

        Args:
            params: the trained parameters.
            is_shared: True to share arrays with `params`, which then must not be donated meanwhile; False to share only
                those of a frozen base, which never are.
        """
        shared, structure = self._shared(params, is_shared)
        given, new = jax.tree.leaves(params), self._new_leaves(params, is_shared)
        leaves = [new[index] if source is None else given[source] for index, source in enumerate(shared)]
        return jax.tree.unflatten(structure, leaves)

    def extra_bytes(self, params: Params, *, is_shared: bool = True) -> int:
        """Return the bytes per device of the decoding weights that are not shared with the trained ones."""
        shared, structure = self._shared(params, is_shared)
        shapes = jax.tree.leaves(jax.eval_shape(self._model.decode_layout, params))
        new = [shape if source is None else None for shape, source in zip(shapes, shared, strict=True)]
        sharding = None if self._model.sharding is None else self._model.sharding.gathered()
        return device_bytes(sharding, jax.tree.unflatten(structure, new))

    def snapshot_bytes(self, params: Params) -> tuple[int, int]:
        """Return the bytes per device that a snapshot keeps, and of its decoding weights that are not shared."""
        kept = jax.eval_shape(partial(copy_trained, self._model, str(self.dtype(params))), params)
        whole = combine(kept, partition(self._model, params)[1])
        return device_bytes(self._model.sharding, kept), self.extra_bytes(whole)

    def shapes(self, params: Params) -> Params:
        """Return the shapes, with shardings, of the weights to decode with."""
        shapes = jax.eval_shape(self._model.decode_layout, params)
        return shapes if self._model.sharding is None else self._model.sharding.gathered().place(shapes)

    def dtype(self, params: Params) -> Any:
        """The dtype of activations, keys and values."""
        return compute_dtype(jax.eval_shape(self._model.decode_layout, params))

    def _make_new_leaves(self, params: Params, is_shared: bool) -> list[Any]:
        """Make the leaves of the decoding weights, with None for shared ones."""
        shared, _ = self._shared(params, is_shared)
        leaves = jax.tree.leaves(self._model.decode_layout(params))
        # An output that is an input would be the same array; a copy is not.
        same = self._shared(params)[0]
        leaves = [leaf if source is None else jnp.copy(leaf) for leaf, source in zip(leaves, same, strict=True)]
        return [leaf if source is None else None for leaf, source in zip(leaves, shared, strict=True)]

    def _shared(self, params: Params, is_shared: bool = True) -> tuple[list[int | None], Any]:
        """Return, for each decoding leaf, the index of the same leaf in `params` or None; and the tree structure."""
        shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), params)
        traced, decoded = jax.make_jaxpr(self._model.decode_layout, return_shape=True)(shapes)
        trained = jax.tree.leaves(trainable(self._model, params), is_leaf=lambda leaf: leaf is None)
        sources = {
            id(variable): index
            for index, (variable, leaf) in enumerate(zip(traced.jaxpr.invars, trained, strict=True))
            if is_shared or leaf is None
        }
        return [sources.get(id(variable)) for variable in traced.jaxpr.outvars], jax.tree.structure(decoded)


class SentRelayout(Relayout):
    """The same for a sampler on other devices: the trained parameters are sent there, and laid out where they arrive.

    They are sent in the dtype of products. The frozen base of adapters is sent once.
    """

    def __init__(self, model: Model, sampler: Model) -> None:
        super().__init__(sampler)
        self._trained = model
        self._base: Params | None = None
        self._base_leaves: list[Any] = []

    def __call__(self, params: Params, *, is_shared: bool = True) -> Params:
        """Return the weights to decode with, which share no array with `params`."""
        sent = self._send(copy_trained(self._trained, str(self.dtype(params)), params))
        frozen = partition(self._trained, params)[1]
        leaves = jax.tree.leaves(frozen)
        if self._base is None or [*map(id, leaves)] != [*map(id, self._base_leaves)]:
            self._base, self._base_leaves = self._send(frozen), leaves
        return super().__call__(combine(sent, self._base))

    def extra_bytes(self, params: Params, *, is_shared: bool = True) -> int:
        """Return the bytes per device of the sampler of the weights to decode with."""
        return super().extra_bytes(params, is_shared=False)

    def _send(self, params: Params) -> Params:
        assert self._model.sharding is not None
        return self._model.sharding.place(params)


class GatheredRelayout(SentRelayout):
    """The same for parameters on the devices of several processes, of which each samples on its own ones.

    One program gathers them, in the dtype of products, so that each process has them whole on its devices, cut along
    `tensor` only. All processes call it alike, and nothing passes through the memory of the hosts.
    """

    def __init__(self, model: Model, sampler: Model) -> None:
        """Take the trained model, and the same on devices of this process, the mesh of `sampling_mesh`."""
        super().__init__(model, sampler)
        mesh = _whole_mesh(model)
        self._gathered = replace(_sharding(model), mesh=mesh).gathered()
        self._gather = jax.jit(self._gathered.constrain)

    def base_bytes(self, params: Params) -> int:
        """Return the bytes per device of the frozen base, which is kept gathered."""
        return device_bytes(self._gathered, partition(self._trained, params)[1])

    def of_this_process(self, gathered: Any) -> Any:
        """Return the arrays of this process, of a tree of arrays that each process has whole, without a copy."""

        def own(leaf: jax.Array) -> jax.Array:
            parts = [shard.data for shard in leaf.addressable_shards]
            if self._model.sharding is None:
                return parts[0]
            assert isinstance(leaf.sharding, NamedSharding)
            to = NamedSharding(_mesh(self._model), leaf.sharding.spec)
            return jax.make_array_from_single_device_arrays(leaf.shape, to, parts)

        return jax.tree.map(own, gathered)

    def whole_like(self, own: Any) -> Any:
        """Return arrays that each process has whole, of those of this process; the inverse of `of_this_process`."""

        def whole(path: Any, leaf: jax.Array) -> jax.Array:
            to = self._gathered.leaf_sharding(path_text(path), leaf.shape)
            parts = [shard.data for shard in leaf.addressable_shards]
            return jax.make_array_from_single_device_arrays(leaf.shape, to, parts)

        return jax.tree_util.tree_map_with_path(whole, own)

    def _send(self, params: Params) -> Params:
        return self.of_this_process(self._gather(params))


def sampling_mesh(trained: Mesh) -> Mesh | None:
    """Return the mesh of this process's devices to sample on; None for a single one.

    It has the axis `tensor` of the mesh that is trained on, as far as it lies within a process.

    Raises:
        ValueError: the processes have different numbers of devices, or the axis does not divide over those of one.
    """
    own = [device for device in trained.devices.flat if device.process_index == jax.process_index()]
    processes = {device.process_index for device in trained.devices.flat}
    if len(own) * len(processes) != trained.size:
        raise ValueError(f"process {jax.process_index()} has {len(own)} of {trained.size} devices; wanted equal parts")
    tensor = trained.shape["tensor"]
    if math.gcd(tensor, len(own)) != min(tensor, len(own)):
        raise ValueError(
            f"mesh axis tensor has {tensor} devices, and a process {len(own)}; wanted one number that divides the other"
        )
    return None if len(own) == 1 else make_mesh(tensor=min(tensor, len(own)), devices=own)


def _whole_mesh(model: Model) -> Mesh:
    """Return the mesh of all devices on which arrays that are cut along `tensor` are whole in each process."""
    mesh = _mesh(model)
    each = sum(device.process_index == jax.process_index() for device in mesh.devices.flat)
    sizes = -1, 1, min(mesh.shape["tensor"], each)
    return Mesh(mesh.devices.reshape(*sizes), AXES, axis_types=mesh.axis_types)


def _sharding(model: Model) -> Sharding:
    assert model.sharding is not None
    return model.sharding


def _mesh(model: Model) -> Mesh:
    mesh = _sharding(model).mesh
    assert isinstance(mesh, Mesh)
    return mesh
