"""Log-probabilities with gradient, in chunks and all at once: memory of the compiled programs, and time in turn.

    python benchmarks/logprobs.py --out benchmarks/results/logprobs.json

The script runs the output head alone, because chunking changes no layer below it: 4 rows of 1,024 tokens, a vocabulary
of 151,936, hidden width 256, float32. It takes about six minutes and 12 GiB on two CPU cores. Expect a seventh of the
memory of the leanest other form, `take - logsumexp` without the entropy, in about its time. `fused head` is the form of
GPUs and TPUs (`jaxft.fused_token_logprobs`); on a CPU it is there to be compared, and `--dtype bfloat16` is for a GPU.
"""

import argparse
import json
import os
import platform
import statistics
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

import jaxft
from jaxft.core.logprobs import CHUNK_LOGITS
from jaxft.models.layers import project_to_vocabulary
from timing import in_turn


def head_only(hidden_size: int, vocabulary: int, rows: int, tokens: int, dtype: str) -> jaxft.Model:
    """Model whose hidden states are parameters."""

    def init(key: Any) -> dict:
        hidden_key, head_key = jax.random.split(key)
        return {
            "hidden": jax.random.normal(hidden_key, (rows, tokens, hidden_size)).astype(dtype),
            "head": (jax.random.normal(head_key, (vocabulary, hidden_size)) * hidden_size**-0.5).astype(dtype),
        }

    def apply(
        params: dict, tokens: Any, positions: Any, cache: Any = None, tables: Any = None, segment_ids: Any = None
    ) -> Any:
        return params["hidden"], cache

    def unembed(params: dict, hidden: jax.Array) -> jax.Array:
        return project_to_vocabulary(hidden, params["head"])

    return jaxft.Model("head only", init, apply, unembed, lambda pages, dtype: {})


def all_logits(model: jaxft.Model, params: dict, tokens: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Logits `[N V]` and the ids of the next tokens `[N 1]`."""
    hidden, _ = model.apply(params, tokens, None)
    return model.unembed(params, hidden[:, :-1].reshape(-1, hidden.shape[-1])), tokens[:, 1:].reshape(-1, 1)


def plain(model: jaxft.Model, params: dict, tokens: jax.Array) -> jax.Array:
    """Sum of log-probabilities in the leanest form without chunks; no entropy."""
    logits, chosen = all_logits(model, params, tokens)
    return (jnp.take_along_axis(logits, chosen, axis=-1)[:, 0] - jax.nn.logsumexp(logits, axis=-1)).sum()


def log_softmax(model: jaxft.Model, params: dict, tokens: jax.Array) -> jax.Array:
    """Sum of log-probabilities in the most common form; no entropy."""
    logits, chosen = all_logits(model, params, tokens)
    return jnp.take_along_axis(jax.nn.log_softmax(logits), chosen, axis=-1).sum()


def with_entropy(model: jaxft.Model, params: dict, tokens: jax.Array) -> jax.Array:
    """Log-probability and entropy of all tokens at once."""
    logits, chosen = all_logits(model, params, tokens)
    logprobs = jax.nn.log_softmax(logits)
    entropy = jax.lax.stop_gradient(-jnp.sum(jnp.exp(logprobs) * logprobs, axis=-1))
    return jnp.take_along_axis(logprobs, chosen, axis=-1).sum() + 0.0 * entropy.sum()


def in_chunks(model: jaxft.Model, params: dict, tokens: jax.Array, chunk_tokens: int | None = None) -> jax.Array:
    """Log-probability and entropy in chunks, as jaxft computes them; None lets it choose the chunk."""
    scored = jaxft.token_logprobs(model, params, tokens, chunk_tokens=chunk_tokens)
    return scored.logprobs.sum() + 0.0 * scored.entropy.sum()


def fused(model: jaxft.Model, params: dict, tokens: jax.Array) -> jax.Array:
    """Log-probability and entropy by slices of the vocabulary, whose exponentials are kept for the gradient."""
    hidden = params["hidden"][:, :-1].reshape(-1, params["hidden"].shape[-1])
    scored = jaxft.fused_token_logprobs(hidden, params["head"], tokens[:, 1:].reshape(-1))
    return scored.logprobs.sum() + 0.0 * scored.entropy.sum()


def main() -> None:
    """Compile all forms, run them in turn and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vocabulary", type=int, default=151_936, help="entries (default %(default)s)")
    parser.add_argument("--hidden-size", type=int, default=256, help="width of hidden states (default %(default)s)")
    parser.add_argument("--rows", type=int, default=4, help="rows of the batch (default %(default)s)")
    parser.add_argument("--tokens", type=int, default=1024, help="tokens of a row (default %(default)s)")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32", help="default %(default)s")
    parser.add_argument("--rounds", type=int, default=5, help="timed runs of each form (default %(default)s)")
    parser.add_argument("--out", type=Path, help="file for all results, with versions and shapes")
    arguments = parser.parse_args()
    shape = (arguments.rows, arguments.tokens)
    model = head_only(arguments.hidden_size, arguments.vocabulary, *shape, arguments.dtype)
    params = jax.jit(model.init)(jax.random.key(0))
    tokens = jax.random.randint(jax.random.key(1), shape, 0, arguments.vocabulary)

    forms: dict[str, Callable[..., jax.Array]] = {
        "take - logsumexp": plain,
        "log_softmax": log_softmax,
        "log_softmax, entropy": with_entropy,
        "chunks": in_chunks,
        "fused head": fused,
    }
    for factor in (0.5, 2):
        chunk_tokens = max(1, int(factor * CHUNK_LOGITS) // arguments.vocabulary)
        forms[f"chunks x {factor}"] = partial(in_chunks, chunk_tokens=chunk_tokens)
    programs: dict[str, Any] = {
        name: jax.jit(jax.value_and_grad(partial(form, model))).lower(params, tokens).compile()
        for name, form in forms.items()
    }
    temporary = {name: program.memory_analysis().temp_size_in_bytes for name, program in programs.items()}
    difference, reference = {}, jax.tree.map(jax.device_get, programs["take - logsumexp"](params, tokens))
    for name, program in programs.items():
        pairs = zip(jax.tree.leaves(program(params, tokens)), jax.tree.leaves(reference), strict=True)
        difference[name] = max(float(abs(a - b).max() / abs(b).max()) for a, b in pairs)
    jobs = {
        name: lambda number, program=program: jax.block_until_ready(program(params, tokens))
        for name, program in programs.items()
    }
    seconds = in_turn(jobs, arguments.rounds)
    medians = {name: statistics.median(times) for name, times in seconds.items()}

    print(
        f"{'':<21} {'MiB':>6} {'chunks are':>11} {'median s':>9} {'min':>6} {'max':>6} {'chunks take':>12} {'diff':>8}"
    )
    for name, times in seconds.items():
        memory, duration = temporary[name] / temporary["chunks"], medians["chunks"] / medians[name]
        print(
            f"{name:<21} {temporary[name] / 2**20:>6.0f} {'1/' + format(memory, '.1f'):>11} {medians[name]:>9.2f} "
            f"{min(times):>6.2f} {max(times):>6.2f} {format(duration, '.2f') + ' times':>12} {difference[name]:>8.0e}"
        )
    print(f"`chunks` holds {CHUNK_LOGITS:,} logits at once; diff: of loss and gradients, relative to the largest")
    if arguments.out is not None:
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        results = {
            "shape": {"rows": shape[0], "tokens": shape[1], "vocabulary": arguments.vocabulary},
            "hidden_size": arguments.hidden_size,
            "dtype": arguments.dtype,
            "chunk_logits": CHUNK_LOGITS,
            "temporary_bytes": temporary,
            "seconds": seconds,
            "median_seconds": medians,
            "memory_of_chunks_relative_to": {name: temporary["chunks"] / size for name, size in temporary.items()},
            "time_of_chunks_relative_to": {name: medians["chunks"] / median for name, median in medians.items()},
            "relative_difference": difference,
            "device": jax.devices()[0].device_kind,
            "cpu_cores": os.cpu_count(),
            "versions": {"jax": jax.__version__, "jaxft": jaxft.__version__, "python": platform.python_version()},
        }
        arguments.out.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
