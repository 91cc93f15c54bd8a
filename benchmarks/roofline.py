"""Least operations and bytes of prefill, decode, scoring and update, and the least time that a device needs for them.

The counts are lower bounds for any implementation: only matrix products count, weights are read once per step,
activations are free, and nothing is computed twice. Recomputed activations, padding and the logits of prompts therefore
lower the share of the limit that is reached.
Letters: `D` hidden, `F` feed-forward, `H` query heads, `K` key/value heads, `h` head width, `L` layers, `V` vocabulary.
"""

from collections.abc import Sequence
from typing import NamedTuple

import jax

from jaxft.models.ceilings import attention_flops, block_weights, head_weights, kv_bytes, matmul_weights, tokens_seen
from jaxft.models.config import DecoderConfig
from jaxft.models.decoder import parameter_shapes

ADAMW_PASSES = 8
"""Tensors as large as the parameters that a clipped AdamW step moves: the norm reads the gradient; then parameters,
gradient and both moments are read, and parameters and moments written."""


class Phase(NamedTuple):
    """A phase of the work: floating-point operations of its matrix products, and bytes that memory must move."""

    name: str
    flops: float
    moved_bytes: float


class Rates(NamedTuple):
    """Limits of a device, per second."""

    bytes_per_second: float
    flops_per_second: float


def limit_seconds(phases: Sequence[Phase], rates: Rates) -> float:
    """Least time of the phases one after the other; a phase takes the longer of its arithmetic and its traffic.

    >>> limit_seconds([Phase("a", 100.0, 10.0), Phase("b", 0.0, 30.0)], Rates(10.0, 50.0))  # max(2, 1) + max(0, 3)
    5.0
    """
    return sum(
        max(phase.flops / rates.flops_per_second, phase.moved_bytes / rates.bytes_per_second) for phase in phases
    )


def parameter_count(config: DecoderConfig) -> int:
    """Return the number of all parameters, those of all experts included.

    >>> from jaxft.models.config import model_preset
    >>> parameter_count(model_preset("qwen3-58m"))  # 41549824 + 32000 512 + 8 (2 512 + 2 64) + 512
    57943552
    """
    return sum(leaf.size for leaf in jax.tree.leaves(parameter_shapes(config)))


def prefill(config: DecoderConfig, prompt_tokens: Sequence[int], itemsize: int) -> Phase:
    """Fill the cache with prompts of these lengths, except the last token of each, which `decode` takes.

    The last block computes only keys and values. Weights are read once, and the cache is written once.

    >>> from jaxft.models.config import model_preset
    >>> m60 = model_preset("qwen3-58m")
    >>> phase = prefill(m60, [3], itemsize=4)  # two tokens
    >>> phase.flops == 2 * 2 * (7 * 3145728 + 2 * 512 * 256) + 7 * 4 * 512 * (1 + 2)
    True
    >>> phase.moved_bytes == 4 * (7 * 3145728 + 2 * 512 * 256) + 2 * 16384
    True
    """
    kv_weights = 2 * config.hidden_size * config.num_kv_heads * config.head_dim
    weights = sum(block_weights(config, has_experts=kind.has_experts) for kind in config.kinds[:-1]) + kv_weights
    tokens = sum(count - 1 for count in prompt_tokens)
    seen = sum(tokens_seen(config.kinds[:-1], 1, count - 1) for count in prompt_tokens)
    flops = 2 * weights * tokens + attention_flops(config, seen)
    return Phase("prefill", flops, itemsize * weights + kv_bytes(config, itemsize) * tokens)


def decode(config: DecoderConfig, prompt_tokens: int, answer_tokens: Sequence[int], slots: int, itemsize: int) -> Phase:
    """Sample answers of these lengths after prompts of one length, at most `slots` at a time.

    Weights are read once per step, and there are as few steps as the longest answer and the slots allow. A step reads
    the keys and values that its tokens see; those of a shared prompt count for every row.

    >>> from jaxft.models.config import model_preset
    >>> phase = decode(model_preset("qwen3-58m"), 3, [2, 2], slots=2, itemsize=4)  # two steps: 3 and 4 tokens are seen
    >>> phase.flops == 4 * 2 * 41549824 + 8 * 4 * 512 * 2 * (3 + 4)
    True
    >>> phase.moved_bytes == 2 * 4 * 41549824 + 2 * (3 + 4) * 16384
    True
    """
    tokens = sum(answer_tokens)
    steps = max(*answer_tokens, -(-tokens // slots), 1)
    seen = sum(tokens_seen(config.kinds, prompt_tokens, prompt_tokens + count - 1) for count in answer_tokens)
    flops = 2 * matmul_weights(config) * tokens + attention_flops(config, seen)
    of_layer = kv_bytes(config, itemsize) // config.num_layers
    return Phase("decode", flops, itemsize * matmul_weights(config) * steps + of_layer * seen)


def score(config: DecoderConfig, rows: int, tokens: int, scored_tokens: int, itemsize: int) -> Phase:
    """Run forward over rows of `tokens` tokens, with the logits of `scored_tokens` of each row.

    >>> from jaxft.models.config import model_preset
    >>> phase = score(model_preset("qwen3-58m"), rows=2, tokens=3, scored_tokens=1, itemsize=4)
    >>> phase.flops == 2 * (3 * 2 * 8 * 3145728 + 1 * 2 * 16384000 + 8 * 4 * 512 * (1 + 2 + 3))
    True
    """
    blocks = matmul_weights(config) - head_weights(config)
    products = 2 * blocks * tokens + 2 * head_weights(config) * scored_tokens
    attention = attention_flops(config, tokens_seen(config.kinds, 1, tokens))
    return Phase("forward", rows * (products + attention), itemsize * matmul_weights(config))


def update(
    config: DecoderConfig, rows: int, tokens: int, scored_tokens: int, itemsize: int, master_itemsize: int = 4
) -> list[Phase]:
    """Compute one gradient over rows of `tokens` tokens and make a clipped AdamW step.

    The gradient takes three times the operations of the forward pass, and reads weights of `itemsize` bytes forwards
    and backwards. Gradients, parameters and optimiser state have `master_itemsize` bytes; gradients are written once.

    >>> from jaxft.models.config import model_preset
    >>> m60 = model_preset("qwen3-58m")
    >>> gradient, step = update(m60, rows=64, tokens=192, scored_tokens=128, itemsize=2)
    >>> gradient.flops == 3 * score(m60, 64, 192, 128, 2).flops, gradient.moved_bytes == (2 + 2 + 4) * 41549824
    (True, True)
    >>> step.moved_bytes == 8 * 4 * 57943552
    True
    """
    forward = score(config, rows, tokens, scored_tokens, itemsize)
    gradient_bytes = (2 * itemsize + master_itemsize) * matmul_weights(config)
    optimizer = Phase("optimizer", 0.0, ADAMW_PASSES * master_itemsize * parameter_count(config))
    return [Phase("gradient", 3 * forward.flops, gradient_bytes), optimizer]
