"""Partition of parameters into trained and frozen ones.

A model with adapters (`Model.lora`) has parameters `{"base": ..., "adapter": ...}`. The base gets no gradient and no
optimiser state; an update passes it on unchanged, and so it does the teacher of a distillation, which stands beside the
policy in `{"policy": ..., "teacher": ...}`. Every other parameter is trained.
"""

from typing import Any

import jax

from jaxft.core.sharding import path_text
from jaxft.core.types import Model, Params

BASE, ADAPTER, POLICY, TEACHER = "base", "adapter", "policy", "teacher"


def partition(model: Model, params: Params) -> tuple[Params, Params]:
    """Split parameters into a trained and a frozen tree of the same keys, each with None for the arrays of the other.

    >>> import jaxft
    >>> model = jaxft.from_function(lambda params, tokens, positions: tokens)._replace(lora="rank 8")
    >>> partition(model, {"policy": {"base": 1, "adapter": 2}, "head": 3})
    ({'head': 3, 'policy': {'adapter': 2, 'base': None}}, {'head': None, 'policy': {'adapter': None, 'base': 1}})
    >>> partition(model, {"policy": {"adapter": 1}, "teacher": {"adapter": 2}})[0]
    {'policy': {'adapter': 1}, 'teacher': {'adapter': None}}
    """

    def is_frozen(path: Any) -> bool:
        names = path_text(path).split("/")
        return names[0] == TEACHER or (model.lora is not None and BASE in names)

    def only(wanted: bool) -> Any:
        return jax.tree_util.tree_map_with_path(lambda path, x: x if is_frozen(path) == wanted else None, params)

    return only(False), only(True)


def trainable(model: Model, params: Params) -> Params:
    """Return the tree of trained parameters, with None in place of frozen ones."""
    return partition(model, params)[0]


def combine(first: Params, second: Params) -> Params:
    """Invert `partition`: return the leaves of `first`, and those of `second` where `first` has None.

    >>> combine({"base": None, "adapter": 2}, {"base": 1, "adapter": 7})
    {'adapter': 2, 'base': 1}
    """
    return jax.tree.map(lambda a, b: b if a is None else a, first, second, is_leaf=lambda x: x is None)
