"""Where the time of a decoding step or of a gradient goes, operation by operation, as text.

    python benchmarks/profile_programs.py decode --model m60
    python benchmarks/profile_programs.py gradient --model m2 --remat full

`decode`: 64 rows with room for 192 tokens, per sampled token of all of them. `gradient`: forward and backward pass of
the GRPO loss on 8 rows of 192 tokens. A line is all operations of the compiled program that give the same shape and
come from the same place. Milliseconds are added over threads and include what the profiler costs: it is the shares that
count.
"""

import argparse
import re
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jaxft
from jaxft.bench.arguments import ALIASES
from jaxft.core.cache import init_cache
from jaxft.core.generate import DecodeState, RowParams, decode
from jaxft.core.sampling import sampling_params
from jaxft.core.update import loss_and_gradients
from jaxft.models.decoder import decoder

ROWS, ROOM, STEPS = 64, 192, 16
GRADIENT_ROWS, PROMPT = 8, 64
INSTRUCTION = re.compile(r"^\s*(?:ROOT )?%?([\w.\-]+) = (\([^)]*\)|\S+) ([\w-]+)\((.*)$", re.MULTILINE)
CONTAINERS = ("while", "call", "conditional")
"""Operations whose time is that of the operations in them."""


def main() -> None:
    """Prints the longest lines."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("program", choices=("decode", "gradient"))
    parser.add_argument("--model", default="m60", help="m2, m60 or the name of a preset (default %(default)s)")
    parser.add_argument("--remat", choices=("none", "dots", "full"), default="dots", help="of the gradient")
    parser.add_argument("--lines", type=int, default=20, help="default %(default)s")
    arguments = parser.parse_args()
    config = jaxft.model_preset(ALIASES.get(arguments.model, arguments.model))
    model, params = decoder(config, arguments.remat), jaxft.init_model(config, jax.random.key(0))[1]
    if arguments.program == "decode":
        function, inputs, steps = decoding(model), decoding_inputs(model, params), STEPS
    else:
        function, inputs, steps = gradient(model), (params, training_batch(config.vocab_size)), 1

    spent, counts, passed = profiled(function, inputs)
    total = spent.total()
    print(f"{'ms':>8} {'share':>6} {'times':>6}  operation")
    for kind, nanoseconds in spent.most_common(arguments.lines):
        times = counts[kind] / steps
        print(f"{nanoseconds / steps / 1e6:>8.3f} {nanoseconds / total:>6.1%} {times:>6.0f}  {kind[0]} {kind[1]}")
    print(f"{total / steps / 1e6:>8.3f} ms in all operations, {passed / steps * 1e3:.3f} ms passed")


def decoding(model: jaxft.Model) -> Callable[..., Any]:
    """Samples `STEPS` tokens of every row."""
    return jax.jit(lambda params, state, rows: decode(model, params, state, rows, STEPS)[1])


def decoding_inputs(model: jaxft.Model, params: dict) -> tuple[Any, ...]:
    """Rows in the middle of their caches."""
    places = jnp.full(ROWS, ROOM // 2, jnp.int32)
    cache = init_cache(model, ROWS, ROOM, jnp.float32)
    state = DecodeState(cache, jnp.zeros_like(places), places, jnp.ones(ROWS, bool))
    keys = jax.random.split(jax.random.key(1), ROWS)
    rows = RowParams(sampling_params(ROWS), keys, jnp.full((ROWS, 1), -1), jnp.full(ROWS, ROOM))
    return jax.jit(model.decode_layout)(params), state, rows


def gradient(model: jaxft.Model) -> Callable[..., Any]:
    """Loss, metrics and gradients."""
    return jax.jit(lambda params, batch: loss_and_gradients(model, jaxft.grpo_loss, params, batch, None))


def training_batch(vocab_size: int) -> jaxft.Batch:
    """Rows of random tokens."""
    rng = np.random.default_rng(0)
    tokens = jnp.asarray(rng.integers(0, vocab_size, (GRADIENT_ROWS, ROOM)), jnp.int32)
    is_completion = jnp.broadcast_to(jnp.arange(ROOM) >= PROMPT, tokens.shape)
    return jaxft.Batch(tokens, is_completion, jnp.asarray(rng.normal(size=GRADIENT_ROWS), jnp.float32))


def profiled(function: Callable[..., Any], inputs: tuple[Any, ...]) -> tuple[Counter, Counter, float]:
    """Nanoseconds and calls by kind of operation, and the seconds that passed."""
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
    """Of every operation of a compiled program its name, its shape and where it comes from."""
    for name, shape, operation, rest in INSTRUCTION.findall(text):
        if operation not in CONTAINERS:
            place = re.search(r'op_name="([^"]*)"', rest)
            yield name, (re.sub(r"\{[^}]*\}", "", shape), operation if place is None else place[1][-60:])


if __name__ == "__main__":
    main()
