"""Steady decoding through the core: every row goes on from a given context, and none ends before the others."""

import jax
import numpy as np

from jaxft.bench import work
from jaxft.bench.plain import cache_bytes, decoded, rows_of, state_of
from jaxft.bench.results import CaseResult, Check, Line
from jaxft.bench.setting import Setting
from jaxft.bench.timing import in_turn
from jaxft.core.cache import compute_dtype, init_cache


def run(setting: Setting) -> CaseResult:
    """Tokens per second at several numbers of rows, and whether the cache is written in place."""
    result = setting.result()
    params = jax.jit(setting.model.decode_layout)(setting.params)
    for rows in setting.shapes.decode_batches:
        line, is_donated = _decode(setting, params, rows)
        result.lines.append(line)
    result.checks.append(Check(name="cache donated", value=is_donated, relation="exactly", wanted=True))
    return result


def _decode(setting: Setting, params: dict, rows: int) -> tuple[Line, bool]:
    context, new = setting.shapes.decode_prompt_tokens, setting.shapes.decode_new_tokens
    last = np.array(setting.prompts(1, rows, rows)[0], np.int32)
    row_params = rows_of(np.full(rows, context + new), seed=0)
    caches = [init_cache(setting.model, rows, context + new, compute_dtype(params))]
    size = cache_bytes(caches[0])
    is_donated = []

    def advance(number: int) -> object:
        """Decodes with the cache of the round before: what it holds changes no time."""
        cache = caches.pop()
        state = state_of(cache, last, context - 1)
        state, counts = decoded(setting.model, params, state, row_params, context - 1, context + new)
        if (counts != new).any():
            raise RuntimeError(f"rows were to get {new} tokens each, and got {counts.tolist()}")
        is_donated.append(all(leaf.is_deleted() for leaf in jax.tree.leaves(cache)))
        caches.append(state.cache)
        return state.tokens

    seconds = in_turn({"decode": advance}, setting.repeats)["decode"]
    line = Line(
        name="1 row" if rows == 1 else f"{rows} rows",
        amount=rows * new,
        seconds=seconds,
        phases=[work.decode(setting.config, context, [new] * rows, rows, setting.itemsize)],
        shape={"rows": rows, "prompt_tokens": context, "new_tokens": new},
        figures={"cache_bytes": size},
    )
    return line, all(is_donated)
