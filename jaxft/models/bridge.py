"""Adapters from your own network, a causal `f(params, tokens, positions) -> logits` or a flax module, to a `Model`.

Sampling is slow: without keys and values to cache, each new token runs the network over the whole row again. The cache
of such a model holds the earlier tokens. Scoring and training cost as much as the network itself.
On a mesh the model is `model._replace(sharding=...)`, and its parameters are `sharding.place(params)`.
Letters: `B` rows, `T` tokens, `C` columns of a page table, `N` pages, `P` tokens of a page, `S` tokens of a row's
history, `V` vocabulary.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen, nnx
from flax.core import unfreeze
from jaxtyping import Array, Float, Int

from jaxft.core.cache import PAGE_TOKENS
from jaxft.core.types import Model, Params

Network = Callable[[Params, Int[Array, "B T"], Int[Array, "B T"]], Float[Array, "B T V"]]
"""`(params, tokens, positions) -> logits`, causal: later tokens never change the logits of a token."""


@dataclass(frozen=True)
class NetworkConfig:
    """Config of a bridged network, of which only the name is known."""

    name: str


def no_init(key: Any) -> Params:
    """Raise in place of the `init` of a network that has none.

    Raises:
        ValueError: always.
    """
    raise ValueError("this model has no init; make its parameters where the network was made, or pass init")


@cache
def from_function(network: Network, init: Callable[[Any], Params] = no_init, name: str = "network") -> Model:
    """Make a `Model` from a causal network; the same function gives the same `Model`, so nothing is traced twice.

    Define the function once, at module level: a lambda created for each call is a new model each time.

    Args:
        network: `(params, tokens [B T], positions [B T]) -> logits [B T V]`, `params` a plain nested dict of arrays.
        init: `key -> params`, needed only to call `model.init`.
        name: name of the network, for the model's config.

    >>> def echo(params, tokens, positions):  # prefers to repeat the last token
    ...     return jax.nn.one_hot(tokens, 3) * params["scale"]
    >>> model = from_function(echo)
    >>> params, tokens = {"scale": jnp.array(2.0)}, jnp.array([[1, 0]])
    >>> hidden, _ = model.apply(params, tokens, jnp.array([[0, 1]]))
    >>> model.unembed(params, hidden)[0].tolist()
    [[0.0, 2.0, 0.0], [2.0, 0.0, 0.0]]
    """

    def apply(
        params: Params,
        tokens: Int[Array, "B T"],
        positions: Int[Array, "B T"],
        cache: Int[Array, "N P"] | None = None,
        tables: Int[Any, "B C"] | None = None,
        segment_ids: Int[Array, "B T"] | None = None,
    ) -> tuple[Float[Array, "B T V"], Int[Array, "N P"] | None]:
        if segment_ids is not None:
            raise ValueError(
                "segment_ids were given; a bridged network cannot keep packed sequences apart, so give each a row"
            )
        if cache is None or tables is None:
            return network(params, tokens, positions), None
        columns = jnp.maximum(positions, 0) // PAGE_TOKENS
        pages = jnp.take_along_axis(jnp.asarray(tables), columns, axis=1, mode="clip")  # [B T]
        pages = jnp.where(positions >= 0, pages, cache.shape[0])  # padding is dropped
        cache = cache.at[pages, positions % PAGE_TOKENS].set(tokens.astype(cache.dtype), mode="drop")
        history = cache.at[tables].get(mode="clip").reshape(len(tables), -1)  # [B S]
        places = jnp.broadcast_to(jnp.arange(history.shape[1], dtype=positions.dtype), history.shape)
        # Places behind the row's tokens hold what the page held before, which may be no token of this vocabulary.
        history = jnp.where(places <= positions.max(axis=1, keepdims=True), history, 0)
        logits = network(params, history, places)  # [B S V]
        return jnp.take_along_axis(logits, jnp.maximum(positions, 0)[:, :, None], axis=1), cache

    return Model(NetworkConfig(name), init, apply, _as_logits, _empty_history)


def _as_logits(params: Params, hidden: Float[Array, "*N V"]) -> Float[Array, "*N V"]:
    return hidden.astype(jnp.promote_types(hidden.dtype, jnp.float32))


def _empty_history(pages: int, dtype: Any) -> Int[Array, "N P"]:
    return jnp.zeros((pages, PAGE_TOKENS), jnp.int32)


def from_nnx(module: nnx.Module) -> tuple[Model, Params]:
    """Make a `Model` and parameters from an nnx module, called as `module(tokens, positions) -> logits`.

    Modules of equal structure give the same `Model`. The parameters are copies: training does not change the module,
    and `nnx.replace_by_pure_dict(state, params)` and `nnx.update(module, state)` write trained ones back.

    Raises:
        ValueError: the module has state other than `nnx.Param` (dropout keys, running statistics).
    """
    graph, state, rest = nnx.split(module, nnx.Param, ...)
    held = sorted(".".join(map(str, path)) for path, _ in nnx.to_flat_state(rest))
    if held:
        raise ValueError(f"module holds state besides nnx.Param: {', '.join(held)}; a policy is parameters only")
    # Copies: an update donates its parameters, and the module would be left with deleted arrays.
    params = jax.tree.map(jnp.copy, nnx.to_pure_dict(state))
    return _nnx_model(graph, jax.tree.structure(state), type(module).__name__), params


@cache
def _nnx_model(graph: Any, structure: Any, name: str) -> Model:
    def run(params: Params, tokens: Int[Array, "B T"], positions: Int[Array, "B T"]) -> Float[Array, "B T V"]:
        state = jax.tree.unflatten(structure, [None] * structure.num_leaves)
        nnx.replace_by_pure_dict(state, params)
        return nnx.merge(graph, state)(tokens, positions)

    return from_function(run, name=name)


def from_linen(module: linen.Module, params: Params) -> tuple[Model, Params]:
    """Make a `Model` from a linen module, called as `module(tokens, positions) -> logits`, and return its parameters.

    Equal modules give the same `Model`. `params` is returned as a plain dict of the same arrays.

    Args:
        module: a linen module.
        params: the collection `module.init(...)["params"]`.

    Raises:
        ValueError: `params` is a whole set of variables, or the module has a field that cannot be hashed.
    """
    if set(params) == {"params"}:
        raise ValueError("params holds a collection named 'params'; pass variables['params'] itself")
    try:
        hash(module)
    except TypeError as error:
        raise ValueError(
            f"the {type(module).__name__} has a field that cannot be hashed; make lists and arrays tuples"
        ) from error
    return _linen_model(module), unfreeze(params)


@cache
def _linen_model(module: linen.Module) -> Model:
    def run(params: Params, tokens: Int[Array, "B T"], positions: Int[Array, "B T"]) -> Float[Array, "B T V"]:
        return module.apply({"params": params}, tokens, positions)

    def init(key: Any) -> Params:
        start = jnp.zeros((1, 1), jnp.int32)
        return module.init(key, start, start)["params"]

    return from_function(run, init, name=type(module).__name__)
