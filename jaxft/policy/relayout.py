"""From the weights as they are trained to the weights that are decoded with, on the device."""

from typing import Any

import jax

from jaxft.core.mesh import device_bytes
from jaxft.core.types import Model, Params


class Relayout:
    """`Model.decode_layout`, jitted; what it leaves as it is, embeddings mostly, is shared and not copied."""

    def __init__(self, model: Model) -> None:
        self._model = model
        self._made = jax.jit(lambda params: self._split(params)[0])

    def __call__(self, params: Params) -> Params:
        """The weights to decode with; they hold arrays of `params`, which must not be donated meanwhile."""
        shared, structure = self._shared(params)
        given, made = jax.tree.leaves(params), self._made(params)
        leaves = [given[place] if place is not None else made[index] for index, place in enumerate(shared)]
        return jax.tree.unflatten(structure, leaves)

    def extra_bytes(self, params: Params) -> int:
        """What they take on each device beside the weights that are trained."""
        shared, structure = self._shared(params)
        shapes = jax.tree.leaves(jax.eval_shape(self._model.decode_layout, params))
        made = [shape if place is None else None for shape, place in zip(shapes, shared, strict=True)]
        layout = None if self._model.layout is None else self._model.layout.gathered()
        return device_bytes(layout, jax.tree.unflatten(structure, made))

    def dtype(self, params: Params) -> Any:
        """Of activations, and of keys and values."""
        from jaxft.core.cache import compute_dtype

        return compute_dtype(jax.eval_shape(self._model.decode_layout, params))

    def _split(self, params: Params) -> tuple[list[Any], Any]:
        """The decoded weights with None in the place of those that are given, and which these are."""
        shared, _ = self._shared(params)
        leaves = jax.tree.leaves(self._model.decode_layout(params))
        return [leaf if place is None else None for leaf, place in zip(leaves, shared, strict=True)], shared

    def _shared(self, params: Params) -> tuple[list[int | None], Any]:
        """Of each decoded leaf, which leaf of `params` it is; and the structure of all."""
        shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), params)
        traced, decoded = jax.make_jaxpr(self._model.decode_layout, return_shape=True)(shapes)
        places = {id(variable): place for place, variable in enumerate(traced.jaxpr.invars)}
        return [places.get(id(variable)) for variable in traced.jaxpr.outvars], jax.tree.structure(decoded)
