"""Adapters of requests: each request may have its own beside the weights of the policy, in one batch with others.

The rows of a program find theirs by places in stacked arrays. The stack is as large as one program needs, so that each
program reads few adapters; it is filled as requests come, in the order of the device's work.
Letters: `B` rows.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from jaxft.core.cache import AdaptedTables, SharedTables
from jaxft.core.sharding import commit_like
from jaxft.models.lora import Leaves

LEAST_PLACES, RANK_MULTIPLE = 4, 16
"""Least places of a stack, and the number that its ranks are multiples of. XLA for CPU gives a product of 64 columns or
more the same bits, however many more there are, and whichever of them are zeros."""


@dataclass(frozen=True, eq=False)
class Adapter:
    """An adapter beside the weights of a policy, for any number of requests; it never changes.

    Attributes:
        layers: result of `lay_out_adapter`.
        seed: number that makes the noise of its requests differ from that of others.
        number: a number that no other adapter of this process has.
    """

    layers: list[Leaves]
    seed: int = 0
    number: int = field(default_factory=itertools.count(1).__next__)


class AdapterStack:
    """The adapters of the programs of an engine, stacked; it belongs to the device thread."""

    def __init__(self) -> None:
        self._layers: list[Leaves] = [{}]
        self._places: dict[int, int] = {}  # by number of the adapter, or of none if negative; the last used comes last

    def beside(
        self, tables: Int[np.ndarray, "B C"] | SharedTables, adapters: Sequence[Adapter | None], rows: int
    ) -> Int[np.ndarray, "B C"] | SharedTables | AdaptedTables:
        """Return the tables of the rows of a program with the adapters of the first ones; the others have none."""
        needed = {each.number: each for each in adapters if each is not None}
        if not needed:
            return tables
        self._make_room(list(needed.values()))
        for number in [number for number in needed if number in self._places]:
            self._places[number] = self._places.pop(number)
        for number in [number for number in needed if number not in self._places]:
            place = self._places.pop(next(iter(self._places)))
            self._layers = put_adapter(self._layers, np.int32(place), needed[number].layers)
            self._places[number] = place
        places = np.full(rows, -1, np.int32)
        places[: len(adapters)] = [-1 if each is None else self._places[each.number] for each in adapters]
        return AdaptedTables(tables, places, self._layers)

    def _make_room(self, adapters: Sequence[Adapter]) -> None:
        """Begin a larger stack, which is empty, unless the present one has room for these adapters."""
        old = {path: leaf.shape[1:] for path, leaf in self._layers[0].items()}
        shapes = dict(old)
        for path, leaf in (item for adapter in adapters for item in adapter.layers[0].items()):
            rank = -(-len(leaf) // RANK_MULTIPLE) * RANK_MULTIPLE
            shapes[path] = max(rank, shapes.get(path, (0,))[0]), leaf.shape[1]
        places = max(len(self._places), LEAST_PLACES, 1 << (len(adapters) - 1).bit_length())
        if shapes != old or places != len(self._places):
            like = adapters[0].layers
            dtype = jax.tree.leaves(like)[0].dtype
            empty = [{path: np.zeros((places, *shape), dtype) for path, shape in shapes.items()} for _ in like]
            self._layers, self._places = commit_like(like, empty), {-1 - place: place for place in range(places)}


@partial(jax.jit, donate_argnums=0)
def put_adapter(stacks: list[Leaves], place: Int[Any, ""], layers: list[Leaves]) -> list[Leaves]:
    """Put an adapter into its place of the stacks; its rows are NaN if it is not finite, and no others."""
    is_finite = jnp.all(jnp.stack([jnp.isfinite(leaf).all() for leaf in jax.tree.leaves(layers)]))

    def put(path: tuple[str, ...], stack: Array, leaf: Array | None) -> Array:
        leaf = jnp.zeros((0, stack.shape[2]), stack.dtype) if leaf is None else leaf
        # The products of other rows with `lora_a` are masked, and then multiplied with `lora_b`.
        sound = jnp.where(is_finite, leaf, jnp.nan if path[-1] == "lora_a" else 0)
        return stack.at[place].set(jnp.pad(sound, ((0, stack.shape[1] - len(leaf)), (0, 0))))

    return [
        {path: put(path, stack, layer.get(path)) for path, stack in own.items()}
        for own, layer in zip(stacks, layers, strict=True)
    ]
