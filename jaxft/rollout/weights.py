"""Weights beside those that are trained: references, teachers, snapshots, and those pinned for sampling.

`WeightTransfer` makes the weights to decode with: the trained parameters, laid out for decoding, and sent to the
devices that sample. `SamplingWeights` has all weights that requests to a policy and its snapshots are answered with.
"""

import math
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding

from jaxft.core.cache import cast_params, compute_dtype
from jaxft.core.partition import combine, partition, trainable
from jaxft.core.sharding import AXES, constrain, device_bytes, make_mesh, path_text, spans_processes
from jaxft.core.types import Model, Params
from jaxft.errors import PolicyLostError

POLICY = ""
"""Name of the policy among its snapshots."""


@partial(jax.jit, static_argnums=(0, 1))
def copy_trained(model: Model, dtype: str | None, params: Params) -> Params:
    """Return copies of the trained parameters, and None for a frozen base.

    Args:
        model: the model.
        dtype: dtype of the copies; None, and for adapters: their own.
        params: all parameters.
    """

    copies = jax.tree.map(jnp.copy, trainable(model, params))
    is_cast = dtype is not None and model.lora is None
    return constrain(model.sharding, cast_params(copies, dtype) if is_cast else copies)


@dataclass(frozen=True)
class Weights:
    """Parameters of one version that share no array with those that are trained.

    Attributes:
        model: the model of the parameters.
        params: the parameters, or their shapes, with None in place of a frozen base that is the policy's.
        version: version of the policy that they are; 0 for those of another checkpoint.
        is_laid_out: True if they are laid out for decoding, False if they are as they were trained.
    """

    model: Model
    params: Params
    version: int = 0
    is_laid_out: bool = False

    @classmethod
    def copied(cls, model: Model, params: Params, version: int = 0, dtype: Any = None) -> "Weights":
        """Return a copy of the trained parameters, in a dtype or in their own; a frozen base is shared."""
        return cls(model, copy_trained(model, None if dtype is None else str(dtype), params), version)

    @property
    def dtype(self) -> str:
        """Dtype of the parameters; in a checkpoint it tells how they were kept."""
        return str(compute_dtype(self.params))

    def whole(self, params: Params) -> Params:
        """Return all parameters, with the frozen base of `params`, the policy's."""
        return combine(self.params, partition(self.model, params)[1])

    def num_bytes(self) -> int:
        """Return the bytes per device."""
        return device_bytes(self.model.sharding, self.params)


class WeightTransfer:
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
        shared, structure = self._shared_leaves(params, is_shared)
        given, new = jax.tree.leaves(params), self._new_leaves(params, is_shared)
        leaves = [new[index] if source is None else given[source] for index, source in enumerate(shared)]
        return jax.tree.unflatten(structure, leaves)

    def extra_bytes(self, params: Params, *, is_shared: bool = True) -> int:
        """Return the bytes per device of the decoding weights that are not shared with the trained ones."""
        shared, structure = self._shared_leaves(params, is_shared)
        shapes = jax.tree.leaves(jax.eval_shape(self._model.decode_layout, params))
        new = [shape if source is None else None for shape, source in zip(shapes, shared, strict=True)]
        sharding = None if self._model.sharding is None else self._model.sharding.gathered()
        return device_bytes(sharding, jax.tree.unflatten(structure, new))

    def base_bytes(self, params: Params) -> int:
        """Return the bytes per device of the frozen base as each of several processes keeps it, gathered."""
        assert self._model.sharding is not None
        return device_bytes(self._model.sharding.gathered(), partition(self._model, params)[1])

    def shapes(self, params: Params) -> Params:
        """Return the shapes, with shardings, of the weights to decode with."""
        shapes = jax.eval_shape(self._model.decode_layout, params)
        return shapes if self._model.sharding is None else self._model.sharding.gathered().place(shapes)

    def dtype(self, params: Params) -> Any:
        """The dtype of activations, keys and values."""
        return compute_dtype(jax.eval_shape(self._model.decode_layout, params))

    def whole_like(self, own: Any) -> Any:
        """Return arrays that each process has whole, of those of this process."""
        return own

    @property
    def tensor_shards(self) -> int:
        """Number of devices that share the weights to decode with."""
        return 1 if self._model.sharding is None else self._model.sharding.mesh.shape["tensor"]

    def _make_new_leaves(self, params: Params, is_shared: bool) -> list[Any]:
        """Make the leaves of the decoding weights, with None for shared ones."""
        shared, _ = self._shared_leaves(params, is_shared)
        leaves = jax.tree.leaves(self._model.decode_layout(params))
        # An output that is an input would be the same array; a copy is not.
        same = self._shared_leaves(params)[0]
        leaves = [leaf if source is None else jnp.copy(leaf) for leaf, source in zip(leaves, same, strict=True)]
        return [leaf if source is None else None for leaf, source in zip(leaves, shared, strict=True)]

    def _shared_leaves(self, params: Params, is_shared: bool = True) -> tuple[list[int | None], Any]:
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


class DeviceTransfer(WeightTransfer):
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


class ProcessTransfer(DeviceTransfer):
    """The same for parameters on the devices of several processes, of which each samples on its own ones.

    One program gathers them, in the dtype of products, so that each process has them whole on its devices, cut along
    `tensor` only. All processes call it alike, and nothing passes through the memory of the hosts.
    """

    def __init__(self, model: Model, sampler: Model) -> None:
        """Take the trained model, and the same on devices of this process, the mesh of `sampling_mesh`."""
        super().__init__(model, sampler)
        assert model.sharding is not None and isinstance(model.sharding.mesh, Mesh)
        self._gathered = replace(model.sharding, mesh=_whole_mesh(model.sharding.mesh)).gathered()
        self._gather = jax.jit(self._gathered.constrain)

    def base_bytes(self, params: Params) -> int:
        """Return the bytes per device of the frozen base as each of several processes keeps it, gathered."""
        return device_bytes(self._gathered, partition(self._trained, params)[1])

    def whole_like(self, own: Any) -> Any:
        """Return arrays that each process has whole, of those of this process."""

        def whole(path: Any, leaf: jax.Array) -> jax.Array:
            to = self._gathered.leaf_sharding(path_text(path), leaf.shape)
            parts = [shard.data for shard in leaf.addressable_shards]
            return jax.make_array_from_single_device_arrays(leaf.shape, to, parts)

        return jax.tree_util.tree_map_with_path(whole, own)

    def _send(self, params: Params) -> Params:
        """Return the arrays of this process, of those that each process has whole, without a copy."""

        def own(leaf: jax.Array) -> jax.Array:
            parts = [shard.data for shard in leaf.addressable_shards]
            if self._model.sharding is None:
                return parts[0]
            assert isinstance(leaf.sharding, NamedSharding)
            to = NamedSharding(self._model.sharding.mesh, leaf.sharding.spec)
            return jax.make_array_from_single_device_arrays(leaf.shape, to, parts)

        return jax.tree.map(own, self._gather(params))


class SamplingWeights:
    """The weights that requests to a policy and its snapshots are answered with, by name; `POLICY` is the policy.

    Requests to the policy are answered with the trained parameters, or with pinned ones, a copy that stays while jobs
    train. A snapshot is the version that training began with, and from then on the policy's latest one that is a
    multiple of its `every`. Nothing is copied while the policy itself has that version; a training job, which donates
    the parameters, copies them first: in the dtype of products, or adapters as they are.

    Attributes:
        transfer: makes the weights to decode with.
        trained: the trained parameters.
        version: version of the trained parameters.
        beside: the copies by name: those of snapshots that are another version than the policy, and the pinned ones.
        is_pinned: True while requests to the policy are answered with pinned weights; released ones stay in `beside`.
        every: number of versions after which a snapshot is replaced, by its name.
    """

    def __init__(self, model: Model, params: Params, sampler: Model | None) -> None:
        """Take the first parameters, and the model on the devices that sample; None: those of the parameters."""
        self._model, self.trained, self.version = model, params, 0
        self.spans_processes = spans_processes(model.sharding)
        kind = ProcessTransfer if self.spans_processes else DeviceTransfer
        self.transfer = WeightTransfer(model) if sampler is None else kind(model, sampler)
        self.beside: dict[str, Weights] = {}
        self.is_pinned = False
        self.every: dict[str, int] = {}
        self._replaced: dict[str, Weights] = {}  # snapshots as they were before the pinned weights were released
        self._laid_out: dict[str, Params] = {}

    def sampled_version(self, name: str = POLICY) -> int:
        """Return the version of the weights that requests are answered with."""
        if name == POLICY:
            return self.beside[POLICY].version if self.is_pinned else self.version
        return self.beside[name].version if name in self.beside else self.sampled_version()

    def snapshot_params(self, name: str) -> Params:
        """Return the parameters of a snapshot, as they were trained."""
        return self.beside[name].whole(self.trained) if name in self.beside else self.trained

    def decode_params(self, name: str = POLICY, *, is_alone: bool = True) -> tuple[Params, int]:
        """Return the weights that requests are answered with, and their version.

        Args:
            name: name of the snapshot, or `POLICY`.
            is_alone: False if all processes call this, which they do after each change.

        Raises:
            PolicyLostError: they have to be made, which one of several processes cannot.
        """
        if self.sampled_version(name) == self.sampled_version():
            name = POLICY
        if name not in self._laid_out:
            if self.spans_processes and is_alone:
                raise PolicyLostError("the weights to decode with could not be made, and one process alone cannot")
            self._laid_out[name] = self.transfer(self.trained if name == POLICY else self.snapshot_params(name))
        return self._laid_out[name], self.sampled_version(name)

    def lay_out(self) -> None:
        """Make all weights to decode with, in which several processes take part; a single one does so on demand."""
        for name in (POLICY, *self.every) if self.spans_processes else ():
            self.decode_params(name, is_alone=False)

    def drop_layouts(self) -> None:
        """Drop the weights to decode with, which may share arrays with the trained parameters."""
        self._laid_out.clear()

    def pin(self) -> None:
        """Answer requests with a copy of the trained parameters; a copy before it is dropped."""
        self.unpin()
        self._follow()
        laid_out = self.transfer(self.trained, is_shared=False)
        if self._model.lora is None and not self.spans_processes:
            weights = Weights(self._model, laid_out, self.version, is_laid_out=True)
        else:  # from which a checkpoint makes them again
            weights = self._copy(self.trained)
        self.beside[POLICY], self._laid_out[POLICY], self.is_pinned = weights, laid_out, True

    def release(self) -> None:
        """Answer requests with the trained parameters again; the pinned ones stay for a checkpoint."""
        self.is_pinned = False
        self._replaced = self._follow()

    def unpin(self) -> None:
        """Drop the pinned weights."""
        self.beside.pop(POLICY, None)
        self.is_pinned = False

    def replace_trained(self, params: Params, *, has_changed: bool) -> None:
        """Take the parameters of a job, which are a new version if they have changed."""
        self.trained = params
        if has_changed:
            self.version += 1
            if not self.is_pinned:
                self._follow()

    def keep_snapshots(self, params: Params) -> None:
        """Copy the policy's parameters for each snapshot that is the policy, and will not be at the next version."""
        for name, every in self.every.items():
            if name not in self.beside and (self.version + 1) % every:
                self.beside[name] = self._copy(params)

    def warm_up(self, params: Params) -> None:
        """Compile the programs that copy a snapshot and lay it out."""
        jax.block_until_ready(self.transfer(self._copy(params).whole(params)))

    def _follow(self) -> dict[str, Weights]:
        """Make snapshots the policy if its version is a multiple of theirs; return what they were."""
        self._replaced = {}
        names = [name for name, every in self.every.items() if self.version % every == 0]
        return {name: self.beside.pop(name) for name in names if name in self.beside}

    def _copy(self, params: Params) -> Weights:
        return Weights.copied(self._model, params, self.version, self.transfer.dtype(params))

    def saved(self, *, with_pinned: bool) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return what a checkpoint has of the copies: versions and dtypes, for JSON, and arrays.

        Args:
            with_pinned: True for the pinned weights, with the snapshots as they were while the policy sampled with
                them.
        """
        values: dict[str, Any] = {}
        arrays: dict[str, Any] = {}
        pinned = self.beside.get(POLICY) if with_pinned else None
        if pinned is not None:
            values["held"] = _state(pinned) | {
                "tensor_shards": self.transfer.tensor_shards,
                "is_as_trained": not pinned.is_laid_out,
            }
            arrays["held"] = pinned.params
        if self.every:
            beside = ({} if pinned is None else self._replaced) | self.beside
            values["snapshots"] = {name: _state(beside[name]) if name in beside else None for name in self.every}
            arrays["snapshots"] = {name: beside[name].params if name in beside else None for name in self.every}
        return values, arrays

    def like(self, values: dict[str, Any], params: Params) -> dict[str, Any]:
        """Return new arrays of the shapes, dtypes and shardings of those that were `saved` with these values."""
        arrays: dict[str, Any] = {}
        if "held" in values:
            if self._is_as_trained(values["held"]):
                arrays["held"] = copy_trained(self._model, values["held"]["dtype"], params)
            else:
                laid_out = self.transfer.whole_like(self.transfer(params, is_shared=False))
                arrays["held"] = cast_params(laid_out, values["held"]["dtype"])
        if self.every:
            arrays["snapshots"] = {
                name: None if state is None else copy_trained(self._model, state["dtype"], params)
                for name, state in values["snapshots"].items()
            }
        return arrays

    def restore(self, values: dict[str, Any], arrays: dict[str, Any], params: Params) -> bool:
        """Restore what was `saved`, beside the restored parameters.

        Where products have another dtype now, snapshots are cast to it.

        Returns:
            False if the pinned weights are laid out for another mesh, or in another dtype of products: then none are.
        """
        dtype = str(self.transfer.dtype(params))
        self.beside, self._replaced, self.is_pinned = {}, {}, False
        for name in self.every:
            if (state := values["snapshots"][name]) is not None:
                kept = Weights(self._model, arrays["snapshots"][name], state["version"])
                is_cast = self._model.lora is None and kept.dtype != dtype
                self.beside[name] = Weights.copied(self._model, kept.params, kept.version, dtype) if is_cast else kept
        if "held" not in values:
            return True
        state, is_as_trained = values["held"], self._is_as_trained(values["held"])
        is_same_layout = not self.spans_processes and state["tensor_shards"] == self.transfer.tensor_shards
        is_same_dtype = state["dtype"] == dtype or self._model.lora is not None
        if not (is_same_dtype and (is_as_trained or is_same_layout)):
            return False
        pinned = Weights(self._model, arrays["held"], state["version"], is_laid_out=not is_as_trained)
        laid_out = self.transfer(pinned.whole(params), is_shared=False) if is_as_trained else pinned.params
        self.beside[POLICY], self._laid_out[POLICY], self.is_pinned = pinned, laid_out, True
        return True

    def _is_as_trained(self, state: dict[str, Any]) -> bool:
        """Return True if pinned weights were saved as they were trained; earlier versions do not say so."""
        return bool(state.get("is_as_trained", self._model.lora is not None))


def _state(weights: Weights) -> dict[str, Any]:
    return {"version": weights.version, "dtype": weights.dtype}


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


def _whole_mesh(mesh: Mesh) -> Mesh:
    """Return the mesh of all devices on which arrays that are cut along `tensor` are whole in each process."""
    each = sum(device.process_index == jax.process_index() for device in mesh.devices.flat)
    sizes = -1, 1, min(mesh.shape["tensor"], each)
    return Mesh(mesh.devices.reshape(*sizes), AXES, axis_types=mesh.axis_types[: len(sizes)])
