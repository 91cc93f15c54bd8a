"""Steady decoding in the core: every row continues from a given context, and all rows end together."""

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
    measured, is_donated = Measured(), []
    params = workload.decode_params()
    for rows in workload.shapes.decode_batches:
        line, donated = _decode(workload, params, rows)
        measured.lines.append(line)
        is_donated.append(donated)
    measured.checks.append(Check(name="cache donated", value=all(is_donated), relation="exactly", wanted=True))
    return measured


def _decode(workload: Workload, params: dict, rows: int) -> tuple[Line, bool]:
    context, new = workload.shapes.decode_prompt_tokens, workload.shapes.decode_new_tokens
    last = np.array(workload.prompts(1, rows, rows)[0], np.int32)
    limits = row_params(np.full(rows, context + new), seed=0)
    caches = [init_cache(workload.model, rows, context + new, compute_dtype(params))]
    cache_bytes = tree_bytes(caches[0])
    is_donated = []

    def advance(number: int) -> None:
        """Decode with the cache of the round before, whose content changes no time."""
        cache = caches.pop()
        state = state_at(cache, last, context - 1)
        state, counts = decoded(workload.model, params, state, limits, context - 1, context + new)
        if (counts != new).any():
            raise RuntimeError(f"each row has to get {new} tokens; they got {counts.tolist()}")
        is_donated.append(all(leaf.is_deleted() for leaf in jax.tree.leaves(cache)))
        caches.append(jax.block_until_ready(state).cache)

    seconds = in_turn({"decode": advance}, workload.repeats)["decode"]
    line = Line(
        name="1 row" if rows == 1 else f"{rows} rows",
        amount=rows * new,
        seconds=seconds,
        phases=[roofline.decode(workload.config, context, [new] * rows, rows, workload.itemsize)],
        shape={"rows": rows, "prompt_tokens": context, "new_tokens": new},
        figures={"cache_bytes": cache_bytes},
    )
    return line, all(is_donated)
