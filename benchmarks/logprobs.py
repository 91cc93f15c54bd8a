"""Log-probabilities with gradient, in chunks against all at once: memory of the compiled programs, and time in turn.

    python benchmarks/logprobs.py --out benchmarks/results/logprobs.json

4 rows of 1,024 tokens, a vocabulary of 151,936, hidden width 256, float32: the head alone, as no layer below it changes
with the chunking. About two minutes and 12 GiB on two CPU cores. Expect at most a sixth of the memory.
"""

import argparse
import json
import platform
import statistics
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

import jaxft
from jaxft.core.logprobs import logits_logprobs


def head_only(hidden_size: int, vocabulary: int) -> jaxft.Model:
    """A model whose hidden states are given as parameters."""

    def init(key: Any) -> dict:
        hidden_key, head_key = jax.random.split(key)
        return {
            "hidden": jax.random.normal(hidden_key, (4, 1024, hidden_size)),
            "head": jax.random.normal(head_key, (vocabulary, hidden_size)) * hidden_size**-0.5,
        }

    def apply(params: dict, tokens: jax.Array, positions: jax.Array, cache: Any = None, segment_ids: Any = None) -> Any:
        return params["hidden"][: tokens.shape[0], : tokens.shape[1]], cache

    def unembed(params: dict, hidden: jax.Array) -> jax.Array:
        return hidden @ params["head"].T

    return jaxft.Model("head only", init, apply, unembed, lambda rows, length, dtype: {})


def at_once(model: jaxft.Model, params: dict, tokens: jax.Array) -> jax.Array:
    """What one writes first: all logits, their log-softmax, the chosen entries and the entropy."""
    hidden, _ = model.apply(params, tokens, None)
    logits = model.unembed(params, hidden[:, :-1].reshape(-1, hidden.shape[-1]))
    logprobs, entropy = logits_logprobs(logits, tokens[:, 1:].reshape(-1), jnp.ones(logits.shape[0]))
    return logprobs.sum() + 0.0 * jax.lax.stop_gradient(entropy).sum()


def in_chunks(model: jaxft.Model, params: dict, tokens: jax.Array) -> jax.Array:
    """jaxft's form, with its own choice of the chunk."""
    scored = jaxft.token_logprobs(model, params, tokens)
    return scored.logprobs.sum() + 0.0 * scored.entropy.sum()


def main() -> None:
    """Compiles both, runs them in turn, prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vocabulary", type=int, default=151_936)
    parser.add_argument("--hidden_size", type=int, default=256)
    parser.add_argument("--rows", type=int, default=4, help="at most 4")
    parser.add_argument("--tokens", type=int, default=1024, help="of a row, at most 1024")
    parser.add_argument("--rounds", type=int, default=5, help="timed runs of each (default %(default)s)")
    parser.add_argument("--out", type=Path, help="where to write the figures as JSON")
    arguments = parser.parse_args()
    model = head_only(arguments.hidden_size, arguments.vocabulary)
    params = jax.jit(model.init)(jax.random.key(0))
    shape = (arguments.rows, arguments.tokens)
    tokens = jax.random.randint(jax.random.key(1), shape, 0, arguments.vocabulary)

    forms = {"at once": at_once, "in chunks": in_chunks}
    programs = {
        name: jax.jit(jax.value_and_grad(lambda params, tokens, form=form: form(model, params, tokens)))
        .lower(params, tokens)
        .compile()
        for name, form in forms.items()
    }
    temporary = {name: program.memory_analysis().temp_size_in_bytes for name, program in programs.items()}
    seconds: dict[str, list[float]] = {name: [] for name in forms}
    values = {name: program(params, tokens) for name, program in programs.items()}  # the first run is not timed
    difference = max(
        float(jnp.abs(a - b).max() / jnp.abs(a).max())
        for a, b in zip(*(jax.tree.leaves(value) for value in values.values()), strict=True)
    )
    del values
    for _ in range(arguments.rounds):
        for name, program in programs.items():
            started = time.perf_counter()
            jax.block_until_ready(program(params, tokens))
            seconds[name].append(time.perf_counter() - started)
    medians = {name: statistics.median(times) for name, times in seconds.items()}

    print(f"{'':<10} {'temporary MiB':>14} {'median s':>9} {'min s':>7} {'max s':>7}")
    for name, times in seconds.items():
        row = (temporary[name] / 2**20, medians[name], min(times), max(times))
        print("{:<10} {:>14.0f} {:>9.2f} {:>7.2f} {:>7.2f}".format(name, *row))
    memory_ratio = temporary["in chunks"] / temporary["at once"]
    time_ratio = medians["in chunks"] / medians["at once"]
    print(f"memory ratio 1/{1 / memory_ratio:.1f}, time ratio {time_ratio:.2f}, relative difference {difference:.1e}")
    if arguments.out is not None:
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        figures = {
            "shape": {"rows": shape[0], "tokens": shape[1], "vocabulary": arguments.vocabulary},
            "hidden_size": arguments.hidden_size,
            "temporary_bytes": temporary,
            "seconds": seconds,
            "memory_ratio": memory_ratio,
            "time_ratio": time_ratio,
            "relative_difference": difference,
            "device": jax.devices()[0].device_kind,
            "versions": {"jax": jax.__version__, "jaxft": jaxft.__version__, "python": platform.python_version()},
        }
        arguments.out.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
