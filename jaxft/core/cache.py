"""The key-value cache of a decoder: a pool of pages, and tables that say which pages hold the tokens of a row.

A page holds the keys and values of 64 consecutive tokens in every layer. Row `r` has its tokens 64 c to 64 c + 63 in
page `tables[r, c]`; entries behind the last token of a row are never read. Several rows may read the same page, but a
page is written for one row only. On a mesh the pages divide over the row shards, and those of a row are in its shard.
Letters: `B` rows, `C` columns of a table, `N` pages, `S` sets of rows that share pages, `M` the most rows of one.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from jaxft.core.sharding import path_text
from jaxft.core.types import Cache, Model, Params

PAGE_TOKENS = 64
"""Tokens of a page."""


def pages_for(tokens: int) -> int:
    """Return the number of pages that hold so many tokens of a row.

    >>> pages_for(0), pages_for(64), pages_for(65)
    (0, 1, 2)
    """
    return -(-tokens // PAGE_TOKENS)


def own_tables(rows: int, columns: int, row_shards: int = 1) -> Int[np.ndarray, "B C"]:
    """Return tables in which every row has `columns` pages of its own, in the part of its row shard.

    >>> own_tables(4, 2, row_shards=2).tolist()
    [[0, 2], [1, 3], [4, 6], [5, 7]]
    """
    numbers = np.arange(rows * columns, dtype=np.int32).reshape(row_shards, columns, rows // row_shards)
    return numbers.swapaxes(1, 2).reshape(rows, columns)


SHARING_ROWS = 16
"""Most rows of a set that shares pages: with two heads for a key they are 32 rows of a product."""

LEAST_SAVED = 8
"""Pages are loaded once for all that share them where that saves this part of all pages, as it takes a call more."""


class SharedPages(NamedTuple):
    """Sets of rows that begin with the same pages, to be read once for all of them.

    Attributes:
        rows: rows of each set, numbered within their row shard; padding has a number beyond the last.
        columns: number of pages that a set shares; 0 for padding.
        own: first column of each row that it does not share; 0 for a row of no set.
    """

    rows: Int[Any, "S M"]
    columns: Int[Any, "S"]
    own: Int[Any, "B"]


class SharedTables(NamedTuple):
    """Page tables of rows, and the pages that these share."""

    tables: Int[Any, "B C"]
    shared: SharedPages


class AdaptedTables(NamedTuple):
    """Page tables of rows, and the adapters that these have.

    Attributes:
        tables: the tables.
        places: the place of each row's adapter; -1 for a row without one.
        layers: of each layer, the adapters of all places, stacked, by their paths in the weights to decode with.
    """

    tables: "Int[Any, 'B C'] | SharedTables"
    places: Int[Any, "B"]
    layers: Any


def no_shared_pages(rows: int, row_shards: int = 1) -> SharedPages:
    """Return the sets of rows of which none shares a page; half as many sets as rows are enough for any."""
    sets = max(1, rows // row_shards // 2) * row_shards
    beyond = np.full((sets, SHARING_ROWS), rows // row_shards, np.int32)
    return SharedPages(beyond, np.zeros(sets, np.int32), np.zeros(rows, np.int32))


def find_shared_pages(
    tables: Int[np.ndarray, "B C"], whole: Int[np.ndarray, "B"], row_shards: int = 1
) -> SharedPages | None:
    """Return which rows begin with the same pages; None where reading those once saves little.

    Args:
        tables: pages of each row.
        whole: number of pages of each row that are full, and so not written any more.
        row_shards: number of row shards, which share no page.

    >>> found = find_shared_pages(np.array([[5, 7, 1], [3, 4, 0], [5, 7, 2]]), np.array([2, 1, 3]))
    >>> found.rows[:, :3].tolist(), found.columns.tolist(), found.own.tolist()
    ([[0, 2, 3]], [2], [2, 0, 2])
    """
    (rows, columns), found = tables.shape, no_shared_pages(len(tables), row_shards)
    is_whole = np.arange(columns) < whole[:, None]
    holders = np.bincount(tables[is_whole], minlength=tables.max() + 1)
    lengths = np.cumprod(is_whole & (holders[tables] > 1), axis=1).sum(axis=1)
    by_page: dict[int, list[int]] = {}  # rows that share a page share all before it
    for row in np.flatnonzero(lengths).tolist():
        by_page.setdefault(int(tables[row, lengths[row] - 1]), []).append(row)
    each, used, saved = rows // row_shards, [0] * row_shards, 0
    for alike in by_page.values():
        for start in range(0, len(alike) - 1, SHARING_ROWS):  # one row alone reads its own
            members, shard = alike[start : start + SHARING_ROWS], alike[0] // each
            number = shard * (len(found.columns) // row_shards) + used[shard]
            used[shard] += 1
            found.rows[number, : len(members)] = np.array(members) - shard * each
            found.columns[number] = found.own[members] = lengths[alike[0]]
            saved += (len(members) - 1) * int(lengths[alike[0]])
    return found if LEAST_SAVED * saved >= max(1, whole.sum()) else None


def init_cache(model: Model, rows: int, length: int, dtype: Any) -> tuple[Cache, Int[np.ndarray, "B C"]]:
    """Make an empty cache with room for `length` tokens in each of `rows` rows, and its tables.

    >>> import jaxft
    >>> model = jaxft.from_function(lambda params, tokens, positions: jax.nn.one_hot(tokens, 4))
    >>> cache, tables = init_cache(model, 2, 150, jnp.float32)
    >>> cache.shape, tables.shape  # this model caches the tokens themselves
    ((6, 64), (2, 3))
    """
    columns, shards = pages_for(length), row_shards(model)
    return model.init_cache(rows * columns, dtype), own_tables(rows, columns, shards)


def row_shards(model: Model) -> int:
    """Return the number of shards of the rows: 1 on a single device."""
    return 1 if model.sharding is None else model.sharding.row_shards


def copy_pages(model: Model, cache: Cache, sources: Int[Any, "S P"], targets: Int[Any, "S P"]) -> Cache:
    """Copy pages of each of `S` row shards to other pages of it; a target beyond the last page is dropped.

    Sources and targets are numbered within their row shard.

    >>> import jaxft
    >>> model = jaxft.from_function(lambda params, tokens, positions: jax.nn.one_hot(tokens, 4))
    >>> cache = jnp.arange(3)[:, None]  # this model caches the tokens themselves
    >>> copy_pages(model, cache, jnp.array([[0, 1]]), jnp.array([[2, 9]]))[:, 0].tolist()
    [0, 1, 0]
    """

    def copy(cache: Cache, sources: Int[Any, "1 P"], targets: Int[Any, "1 P"]) -> Cache:
        def copy_leaf(leaf: Array, axis: int) -> Array:
            before = (slice(None),) * axis
            return leaf.at[*before, targets[0]].set(leaf.at[*before, sources[0]].get(mode="clip"), mode="drop")

        return jax.tree.map(copy_leaf, cache, axes)

    axes = page_axes(model)
    if model.sharding is None:
        return copy(cache, sources, targets)
    return model.sharding.map_pages(copy, cache, axes, sources, targets)


def page_axes(model: Model) -> Any:
    """Return the page axis of each array of a model's cache, found by its shapes with one and with two pages.

    Raises:
        ValueError: an array of the cache has no page axis.
    """
    one, two = (jax.eval_shape(lambda pages=n: model.init_cache(pages, jnp.float32)) for n in (1, 2))
    return jax.tree.map(_growing_axis, one, two)


def _growing_axis(one: jax.ShapeDtypeStruct, two: jax.ShapeDtypeStruct) -> int:
    for axis, sizes in enumerate(zip(one.shape, two.shape, strict=True)):
        if sizes == (1, 2):
            return axis
    raise ValueError(
        f"init_cache makes an array {list(one.shape)} for one page and {list(two.shape)} for two; wanted arrays with "
        "an axis whose length is the number of pages"
    )


def compute_dtype(params: Params) -> Any:
    """Return the dtype of activations and cache with these parameters.

    >>> print(compute_dtype({"a": jnp.ones(1, jnp.bfloat16), "b": jnp.ones(1, jnp.bfloat16)}))
    bfloat16
    """
    dtypes = [
        leaf.dtype
        for path, leaf in jax.tree_util.tree_leaves_with_path(params)
        if leaf.dtype.itemsize > 1 and leaf_dtype(path_text(path), jnp.bfloat16) == jnp.bfloat16
    ]
    return jnp.result_type(*dtypes)


def leaf_dtype(path: str, dtype: Any) -> Any:
    """Return the dtype of a parameter where the others have `dtype`.

    The bias that a mixture's experts are chosen by has at least 32 bits: rounded it would choose others.

    >>> print(leaf_dtype("layers/mlp/selection_bias", jnp.bfloat16), leaf_dtype("embed", jnp.bfloat16))
    float32 bfloat16
    """
    return jnp.promote_types(dtype, jnp.float32) if path.endswith("selection_bias") else jnp.dtype(dtype)


def cast_params(params: Params, dtype: Any) -> Params:
    """Return parameters in a dtype, by `leaf_dtype`; integers and numbers of eight bits, which have a scale, stay.

    >>> print(cast_params({"a": jnp.ones(1), "b": jnp.ones(1, jnp.int8)}, jnp.bfloat16)["a"].dtype)
    bfloat16
    """

    def cast(path: Any, leaf: Array) -> Array:
        is_cast = leaf.dtype.itemsize > 1 and jnp.issubdtype(leaf.dtype, jnp.floating)
        return leaf.astype(leaf_dtype(path_text(path), dtype)) if is_cast else leaf

    return jax.tree_util.tree_map_with_path(cast, params)
