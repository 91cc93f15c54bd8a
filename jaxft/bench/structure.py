"""What a program is made of, where timings are too noisy to tell: sorts, tables of logits, donated buffers."""

import math
import re
from collections.abc import Iterator
from typing import Any

from jax.extend import core

SORTING = ("sort", "top_k", "approx_top_k")
_SHAPE = re.compile(r"\b(?:f16|bf16|f32|f64)\[([\d,]+)\]")


def sorted_widths(jaxpr: core.Jaxpr) -> list[int]:
    """How many elements each sort of a traced function puts in order; those of functions it calls among them.

    >>> import jax
    >>> sorted_widths(jax.make_jaxpr(jax.jit(lambda x: jax.lax.top_k(x, 2)))(jax.numpy.ones((3, 7))).jaxpr)
    [7]
    """
    widths = []
    for equation in jaxpr.eqns:
        if equation.primitive.name in SORTING:
            axis = equation.params["dimension"] if equation.primitive.name == "sort" else -1
            operand: Any = equation.invars[0].aval
            widths.append(operand.shape[axis])
        for inner in _jaxprs_in(list(equation.params.values())):
            widths += sorted_widths(inner)
    return widths


def _jaxprs_in(values: Any) -> Iterator[core.Jaxpr]:
    if isinstance(values, list | tuple):
        for value in values:
            yield from _jaxprs_in(value)
    elif isinstance(values, core.ClosedJaxpr):
        yield values.jaxpr
    elif isinstance(values, core.Jaxpr):
        yield values


def most_logits(program_text: str, vocabulary: int) -> int:
    """Elements of the largest floating-point array of a compiled program that has an axis as long as the vocabulary.

    >>> most_logits("%a = f32[4,100]{1,0} add(f32[4,100] %b, f32[4,100] %c), %d = f32[9999]", vocabulary=100)
    400
    """
    sizes = [[int(size) for size in shape.split(",")] for shape in _SHAPE.findall(program_text)]
    return max((math.prod(shape) for shape in sizes if vocabulary in shape), default=0)
