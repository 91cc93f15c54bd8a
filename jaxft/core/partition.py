"""Parameters that are trained, and those that are not: the base of a model with adapters.

Of a model with adapters (`Model.lora`) parameters are `{"base": ..., "adapter": ...}`. The base gets no gradient and no
optimiser state; an update passes it on as it is.
"""

from typing import Any

import jax

from jaxft.core.sharding import path_text
from jaxft.core.types import Model, Params

BASE, ADAPTER = "base", "adapter"


def partition(model: Model, params: Params) -> tuple[Params, Params]:
    """The trained parameters and the others, each a whole tree with None in the place of the other's arrays.

    >>> import jaxft
    >>> model = jaxft.from_function(lambda params, tokens, positions: tokens)._replace(lora="rank 8")
    >>> partition(model, {"policy": {"base": 1, "adapter": 2}, "head": 3})
    ({'head': 3, 'policy': {'adapter': 2, 'base': None}}, {'head': None, 'policy': {'adapter': None, 'base': 1}})
    """

    def is_frozen(path: Any) -> bool:
        return model.lora is not None and BASE in path_text(path).split("/")

    def only(wanted: bool) -> Any:
        return jax.tree_util.tree_map_with_path(lambda path, x: x if is_frozen(path) == wanted else None, params)

    return only(False), only(True)


def trainable(model: Model, params: Params) -> Params:
    """The trained parameters alone."""
    return partition(model, params)[0]


def combine(first: Params, second: Params) -> Params:
    """The inverse of `partition`; where both have something, what the first has.

    >>> combine({"base": None, "adapter": 2}, {"base": 1, "adapter": 7})
    {'adapter': 2, 'base': 1}
    """
    return jax.tree.map(lambda a, b: b if a is None else a, first, second, is_leaf=lambda x: x is None)
