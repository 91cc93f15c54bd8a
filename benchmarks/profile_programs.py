"""Profile of a decoding step or of a gradient, operation by operation, as text.

    python benchmarks/profile_programs.py decode --model m60
    python benchmarks/profile_programs.py gradient --model m2 --remat full

`decode` samples a token for each of 64 rows with room for 192 tokens; `gradient` is the forward and backward pass of
the GRPO loss on 8 rows of 192 tokens. A line stands for all operations of the compiled program with one result shape
and one origin. Milliseconds are added over threads and include the cost of the profiler; compare the shares only.
"""

import argparse
import re
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jaxft
from jaxft.core.cache import init_cache
from jaxft.core.decode import decode
from jaxft.core.update import loss_and_gradients
from jaxft.models.decoder import decoder
from lockstep import row_params, state_at
from shapes import MODELS
from workload import make_batch

ROWS, ROOM, STEPS = 64, 192, 16
GRADIENT_ROWS, PROMPT = 8, 64
INSTRUCTION = re.compile(r"^\s*(?:ROOT )?%?([\w.\-]+) = (\([^)]*\)|\S+) ([\w-]+)\((.*)$", re.MULTILINE)
CONTAINERS = ("while", "call", "conditional")
"""Operations whose time is counted by the operations inside them."""


def main() -> None:
    """Print the operations that take longest."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("program", choices=("decode", "gradient"))
    parser.add_argument("--model", default="m60", help="m2, m60 or the name of a preset (default %(default)s)")
    parser.add_argument(
        "--remat", choices=("none", "dots", "full"), default="dots", help="rematerialisation of the gradient"
    )
    parser.add_argument("--lines", type=int, default=20, help="lines to print (default %(default)s)")
    arguments = parser.parse_args()
    config = jaxft.model_preset(MODELS.get(arguments.model, arguments.model))
    model, params = decoder(config, arguments.remat), jaxft.init_model(config, jax.random.key(0))[1]
    if arguments.program == "decode":
        function, inputs, steps = decoding(model), decoding_inputs(model, params), STEPS
    else:
        tokens = np.random.default_rng(0).integers(0, config.vocab_size, (GRADIENT_ROWS, ROOM))
        function, inputs, steps = gradient(model), (params, make_batch(tokens, PROMPT)), 1

    spent, counts, passed = profiled(function, inputs)
    total = spent.total()
    print(f"{'ms':>8} {'share':>6} {'times':>6}  operation")
    for kind, nanoseconds in spent.most_common(arguments.lines):
        times = counts[kind] / steps
        print(f"{nanoseconds / steps / 1e6:>8.3f} {nanoseconds / total:>6.1%} {times:>6.0f}  {kind[0]} {kind[1]}")
    print(f"{total / steps / 1e6:>8.3f} ms in all operations, {passed / steps * 1e3:.3f} ms passed")


def decoding(model: jaxft.Model) -> Any:
    """Program that samples `STEPS` tokens of every row."""

    @jax.jit
    def sample(params: Any, cache: Any, tables: Any, state: Any, rows: Any) -> Any:
        return decode(model, params, cache, tables, state, rows, STEPS, is_filtered=False)[2]

    return sample


def decoding_inputs(model: jaxft.Model, params: dict) -> tuple[Any, ...]:
    """Inputs of `decoding`: rows that have half of their room."""
    cache, tables = init_cache(model, ROWS, ROOM, jnp.float32)
    state, rows = state_at(np.zeros(ROWS), ROOM // 2), row_params(np.full(ROWS, ROOM), seed=1)
    return jax.jit(model.decode_layout)(params), cache, tables, state, rows


def gradient(model: jaxft.Model) -> Any:
    """Program that computes loss, metrics and gradients."""
    return jax.jit(lambda params, batch: loss_and_gradients(model, jaxft.grpo_loss, params, batch, None))


def profiled(function: Any, inputs: tuple[Any, ...]) -> tuple[Counter, Counter, float]:
    """Nanoseconds and calls of a jitted function by kind of operation, and the seconds of the whole run."""
    kinds = dict(instructions(function.lower(*inputs).compile().as_text()))
    jax.block_until_ready(function(*inputs))
    spent: Counter[tuple[str, str]] = Counter()
    counts: Counter[tuple[str, str]] = Counter()
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            start = time.perf_counter()
            jax.block_until_ready(function(*inputs))
            passed = time.perf_counter() - start
        (path,) = Path(folder).rglob("*.xplane.pb")
        planes = jax.profiler.ProfileData.from_file(str(path)).planes
        for event in (event for plane in planes for line in plane.lines for event in line.events):
            kind = kinds.get(dict(event.stats).get("hlo_op", ""))
            if kind is not None:
                spent[kind] += event.duration_ns
                counts[kind] += 1
    return spent, counts, passed


def instructions(text: str) -> Iterator[tuple[str, tuple[str, str]]]:
    """Name, shape and origin of every operation of a compiled program."""
    for name, shape, operation, rest in INSTRUCTION.findall(text):
        if operation not in CONTAINERS:
            place = re.search(r'op_name="([^"]*)"', rest)
            yield name, (re.sub(r"\{[^}]*\}", "", shape), operation if place is None else place[1][-60:])


if __name__ == "__main__":
    main()
