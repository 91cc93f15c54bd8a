"""Memory and decoding time of LoRA adapters, beside full finetuning: gradients, optimiser and a whole update.

    python benchmarks/lora.py                          # m60, rank 8: a few minutes on two CPU cores
    python benchmarks/lora.py --model m2 --rank 4 --out lora.json

The bytes are those of the compiled update, with microbatches of one row of 192 tokens. Rollouts are measured in turn
with merged weights (merging counted) and with adapters applied beside the kernels; logits of both are compared. Exit
code 1 when gradients and optimiser take more than a tenth, the whole update more than 0.4, or logits differ by more
than 1e-5.
"""

import argparse
import json
import statistics
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxft
from jaxft.core.cache import init_cache
from jaxft.core.decode import decode
from jaxft.core.partition import trainable
from jaxft.core.sharding import device_bytes
from lockstep import row_params, state_at
from shapes import MODELS
from timing import in_turn
from workload import make_batch

ROWS, WIDTH, PROMPT, STEPS = 64, 192, 64, 32
MOST = {"gradients and optimiser": 0.1, "whole update": 0.4, "logits": 1e-5}


def main() -> int:
    """Print the bytes, the seconds and the difference."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="m60", help="m2, m60 or the name of a preset (default %(default)s)")
    parser.add_argument("--rank", type=int, default=8, help="rank of the adapters (default %(default)s)")
    parser.add_argument("--rounds", type=int, default=5, help="timed runs of the decoding loop (default %(default)s)")
    parser.add_argument("--out", type=Path, metavar="FILE.json")
    arguments = parser.parse_args()
    config = jaxft.model_preset(MODELS.get(arguments.model, arguments.model))
    spec = jaxft.LoraSpec(arguments.rank, 2.0 * arguments.rank)
    model, params = jaxft.init_model(config, jax.random.key(0), lora=spec)
    params["adapter"] = jax.tree.map(lambda x: x + 0.01, params["adapter"])
    plain = jaxft.base_model(model)

    whole, own = update_bytes(plain, params["base"], config.vocab_size), update_bytes(model, params, config.vocab_size)
    print(f"{'MiB':<26} {'full':>9} {'LoRA':>9} {'share':>7}")
    for name in whole:
        print(f"{name:<26} {whole[name] / 2**20:>9.1f} {own[name] / 2**20:>9.1f} {own[name] / whole[name]:>7.1%}")
    difference = logits_difference(plain, model, params, spec, config.vocab_size)
    print(f"largest difference of logits, merged to beside: {difference:.2e}")
    seconds = decoding_seconds(model, params, arguments.rounds)
    merged = statistics.median(seconds["merged"])
    for name, times in seconds.items():
        middle = statistics.median(times)
        print(f"{STEPS} tokens of {ROWS} rows, {name:<24} {middle:>7.3f} s ({middle / merged:.2f})")
    found = {"full": whole, "lora": own, "logits": difference, "seconds": seconds}
    if arguments.out is not None:
        arguments.out.write_text(json.dumps(found, indent=2) + "\n")
    shares = {name: own[name] / whole[name] for name in whole} | {"logits": difference}
    return int(any(shares[name] > most for name, most in MOST.items()))


def update_bytes(model: jaxft.Model, params: Any, vocab_size: int) -> dict[str, int]:
    """Bytes of an update with microbatches of one row: parameters, gradients with optimiser, and the whole."""
    optimizer = optax.adamw(1e-3)
    state = jax.eval_shape(lambda p: jaxft.init_train_state(p, optimizer, model), params)
    tokens = np.random.default_rng(0).integers(0, vocab_size, (2, WIDTH))
    batch = make_batch(tokens, PROMPT)
    update = jaxft.make_update(model, jaxft.grpo_loss, optimizer, microbatch_rows=1)
    sizes = {
        "parameters": device_bytes(None, state.params),
        "gradients and optimiser": device_bytes(None, trainable(model, state.params))
        + device_bytes(None, state.opt_state),
    }
    compiled = (
        update.programs(state, jax.tree.map(lambda table: table[:1], batch))["gradient"]().compile().memory_analysis()
    )
    temporary = compiled.temp_size_in_bytes + compiled.output_size_in_bytes  # with the sums of the gradients
    return sizes | {"whole update": sizes["parameters"] + device_bytes(None, state.opt_state) + temporary}


def logits_difference(
    plain: jaxft.Model, model: jaxft.Model, params: Any, spec: jaxft.LoraSpec, vocab_size: int
) -> float:
    """Largest difference of logits between merged weights and adapters, on 2 x 64 random tokens."""
    tokens = jax.random.randint(jax.random.key(2), (2, 64), 0, vocab_size)
    positions = jnp.broadcast_to(jnp.arange(64), tokens.shape)

    def logits(model: jaxft.Model, params: Any) -> jax.Array:
        return jax.jit(lambda p: model.unembed(p, model.apply(p, tokens, positions)[0]))(params)

    merged = jaxft.merge_lora(spec, params)
    return float(jnp.abs(logits(plain, merged) - logits(model, params)).max())


def decoding_seconds(model: jaxft.Model, params: Any, rounds: int) -> dict[str, list[float]]:
    """Seconds of a decoding loop with weights that are merged anew each time, and with adapters beside the kernels."""
    merge = jax.jit(model.decode_layout)
    cache, tables = init_cache(model, ROWS, WIDTH, jnp.float32)
    state, rows = state_at(np.zeros(ROWS), WIDTH // 2), row_params(np.full(ROWS, WIDTH), seed=3)

    @jax.jit
    def sample(params: Any, cache: Any) -> Any:
        return decode(model, params, cache, tables, state, rows, STEPS, is_filtered=False)[2]

    return in_turn(
        {
            "merged": lambda number: jax.block_until_ready(sample(merge(params), cache)),
            "adapters beside kernels": lambda number: jax.block_until_ready(sample(params, cache)),
        },
        rounds,
    )


if __name__ == "__main__":
    sys.exit(main())
