"""Steady decoding in the core: every row continues from a given context, and all rows end together."""

from typing import Any

import jax
import numpy as np

import roofline
from jaxft.core.cache import compute_dtype, init_cache
from lockstep import decoded, row_params, state_at
from machine import tree_bytes
from records import Check, Line, Measured
from timing import in_turn
from workload import Workload


def run(workload: Workload) -> Measured:
    """Tokens per second at several numbers of rows. The cache must be written in place."""
    measured, is_in_place = Measured(), []
    params = workload.decode_params()
    for rows in workload.shapes.decode_batches:
        line, in_place = _decode(workload, params, rows)
        measured.lines.append(line)
        is_in_place.append(in_place)
    measured.checks.append(Check(name="cache donated", value=all(is_in_place), relation="exactly", wanted=True))
    return measured


def _decode(workload: Workload, params: dict, rows: int) -> tuple[Line, bool]:
    context, new = workload.shapes.decode_prompt_tokens, workload.shapes.decode_new_tokens
    last = np.array(workload.prompts(1, rows, rows)[0], np.int32)
    limits = row_params(np.full(rows, context + new), seed=0)
    cache, tables = init_cache(workload.model, rows, context + new, compute_dtype(params))
    places, cache_bytes = buffers(cache), tree_bytes(cache)
    is_in_place = []

    def advance(number: int) -> None:
        """Decode with the cache of the round before, whose content changes no time."""
        nonlocal cache
        state = state_at(last, context - 1)
        cache, counts = decoded(workload.model, params, cache, tables, state, limits, new)
        if (counts != new).any():
            raise RuntimeError(f"each row has to get {new} tokens; they got {counts.tolist()}")
        is_in_place.append(buffers(jax.block_until_ready(cache)) == places)

    seconds = in_turn({"decode": advance}, workload.repeats)["decode"]
    line = Line(
        name="1 row" if rows == 1 else f"{rows} rows",
        amount=rows * new,
        seconds=seconds,
        phases=[roofline.decode(workload.config, context, [new] * rows, rows, workload.itemsize)],
        shape={"rows": rows, "prompt_tokens": context, "new_tokens": new},
        figures={"cache_bytes": cache_bytes},
    )
    return line, all(is_in_place)


def buffers(tree: Any) -> list[int]:
    """Addresses of the arrays of a tree in the memory of their device."""
    return [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(tree)]
