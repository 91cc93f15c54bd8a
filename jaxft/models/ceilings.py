"""Ceilings of accelerators, and the operations and bytes that a decoder needs at least: together, its least times.

A multiplication and an addition are two operations. Only products of matrices count, those of attention included.
Letters: `D` hidden, `F` feed-forward, `H` query heads, `K` key/value heads, `h` head width, `L` layers, `V` vocabulary.
"""

import math
from collections.abc import Sequence
from typing import Literal, NamedTuple

from jaxft.models.config import EXPERTS, SHARED_EXPERT, DecoderConfig, LayerKind, is_quantizable

GIB = 2**30


class Chip(NamedTuple):
    """An accelerator, as one jax device.

    Attributes:
        name: name in messages.
        platform: platform of jax: "gpu" or "tpu".
        memory_bytes: bytes that programs and their arrays can have; of a GPU, all that it has.
        bytes_per_second: bandwidth of its memory.
        flops_per_second: dense bfloat16 operations.
        link_bytes_per_second: bytes that it sends to other chips of its host or pod, all links together.
        network_bytes_per_second: bytes that it sends to chips of other hosts: of a pod the same, of GPUs its part of a
            usual network (an adapter of 200 Gbit/s for each A100, of 400 for each H100 and H200).
    """

    name: str
    platform: Literal["gpu", "tpu"]
    memory_bytes: int
    bytes_per_second: float
    flops_per_second: float
    link_bytes_per_second: float
    network_bytes_per_second: float


CHIPS = {
    "a100": Chip("NVIDIA A100-SXM4-80GB", "gpu", 85_094_825_984, 2_039e9, 312e12, 300e9, 25e9),
    "h100": Chip("NVIDIA H100 80GB HBM3", "gpu", 84_929_347_584, 3_350e9, 989e12, 450e9, 50e9),
    "h200": Chip("NVIDIA H200", "gpu", 150_754_820_096, 4_800e9, 989e12, 450e9, 50e9),
    "v5e": Chip("TPU v5e", "tpu", int(15.75 * GIB), 819e9, 197e12, 200e9, 200e9),
    "v6e": Chip("TPU v6e", "tpu", int(31.25 * GIB), 1_640e9, 918e12, 448e9, 448e9),
    "v5p": Chip("TPU v5p", "tpu", int(95.74 * GIB), 2_765e9, 459e12, 600e9, 600e9),
}
"""Chips by the first part of a target's name."""

NAMES_OF_JAX = {"TPU v5 lite": "v5e", "TPU v6 lite": "v6e", "TPU v5": "v5p"}
"""Keys of `CHIPS` by the names of TPUs in jax, where these differ from the makers'."""


def find_chip(device_kind: str) -> Chip | None:
    """Return the chip of a jax device; None if its ceilings are not known.

    >>> find_chip("TPU v5 lite") == CHIPS["v5e"], find_chip("NVIDIA H200") == CHIPS["h200"], find_chip("cpu")
    (True, True, None)
    """
    names = {chip.name: name for name, chip in CHIPS.items()} | NAMES_OF_JAX
    return CHIPS[names[device_kind]] if device_kind in names else None


def block_weights(config: DecoderConfig, *, has_experts: bool = False) -> int:
    """Weights of one block that a token is multiplied with: `2 D H h + 2 D K h + 3 D F`, or those of its experts.

    >>> from jaxft.models.config import model_preset
    >>> block_weights(model_preset("qwen3-58m"))  # 2 (512 512) + 2 (512 256) + 3 (512 1536)
    3145728
    """
    return sum(map(math.prod, projection_shapes(config, has_experts=has_experts).values()))


def projection_shapes(config: DecoderConfig, *, has_experts: bool = False) -> dict[str, tuple[int, int, int]]:
    """Inputs, outputs and number, for a token, of a block's projections, by path; of a mixture also its routers.

    >>> from jaxft.models.config import model_preset
    >>> projection_shapes(model_preset("qwen3-58m"))["self_attn/k_proj"]
    (512, 256, 1)
    >>> projection_shapes(model_preset("qwen3-30b-a3b"), has_experts=True)["mlp/experts/up_proj"]
    (2048, 768, 8)
    """
    hidden, dense, shared = config.hidden_size, config.intermediate_size, config.shared_width
    queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    feed_forwards, routers = {"mlp": (dense, 1)}, {}
    if has_experts:
        feed_forwards = {EXPERTS: (config.moe_intermediate_size, config.num_experts_per_tok)}
        feed_forwards |= {SHARED_EXPERT: (shared, 1)} if shared else {}
        routers = {"mlp/router": (hidden, config.num_experts, 1)}
        routers |= {"mlp/shared_expert_gate": (hidden, 1, 1)} if config.shared_expert_gate else {}
    return {
        "self_attn/q_proj": (hidden, queries, 1),
        "self_attn/k_proj": (hidden, keys, 1),
        "self_attn/v_proj": (hidden, keys, 1),
        "self_attn/o_proj": (queries, hidden, 1),
        **{f"{place}/{name}_proj": (hidden, *wide) for place, wide in feed_forwards.items() for name in ("gate", "up")},
        **{f"{place}/down_proj": (wide, hidden, number) for place, (wide, number) in feed_forwards.items()},
        **routers,
    }


def head_weights(config: DecoderConfig) -> int:
    """Weights of the output projection, `D V`, tied to the embedding or not; looking a token up is no product.

    >>> from jaxft.models.config import model_preset
    >>> head_weights(model_preset("qwen3-58m"))  # 512 32000
    16384000
    """
    return config.hidden_size * config.vocab_size


def matmul_weights(config: DecoderConfig) -> int:
    """Weights that a sampled token is multiplied with: of a mixture those of its experts.

    >>> from jaxft.models.config import model_preset
    >>> matmul_weights(model_preset("qwen3-58m"))  # 8 blocks and the head
    41549824
    """
    blocks = sum(block_weights(config, has_experts=kind.has_experts) for kind in config.kinds)
    return blocks + head_weights(config)


def tokens_seen(layers: Sequence[LayerKind], first: int, last: int) -> int:
    """Keys that queries at 1-based positions `first .. last` see in these layers: up to their own, within the window.

    >>> tokens_seen([LayerKind()], 3, 5)  # 3 + 4 + 5
    12
    >>> tokens_seen([LayerKind(), LayerKind(window=4)], 3, 5)  # 12, and 3 + 4 + 4
    23
    """
    if last < first:
        return 0
    seen = 0
    for kind in layers:
        window = last if kind.window is None else kind.window
        edge = min(max(window, first - 1), last)  # positions up to here see all that came before
        seen += (first + edge) * (edge - first + 1) // 2 + (last - edge) * window
    return seen


def attention_flops(config: DecoderConfig, seen: int) -> int:
    """Operations of the two attention products: `2 H h` each for every key that a query sees.

    >>> from jaxft.models.config import model_preset
    >>> attention_flops(model_preset("qwen3-58m"), seen=10)  # 10 2 (2 8 64)
    20480
    """
    return 4 * config.num_heads * config.head_dim * seen


def model_flops(config: DecoderConfig, sequences: int, tokens: int) -> int:
    """Operations that a gradient over sequences of this many tokens needs: three times those of the forward pass.

    That is `6 N` a token plus attention to all earlier tokens, and what model FLOPs utilization (MFU, arXiv 2204.02311)
    counts; recomputed activations are not among them. `N` are the `matmul_weights`.

    >>> from jaxft.models.config import model_preset
    >>> m60 = model_preset("qwen3-58m")
    >>> model_flops(m60, sequences=2, tokens=3) == 2 * 3 * (2 * 3 * 41549824 + 8 * attention_flops(m60, 1 + 2 + 3))
    True
    """
    attention = attention_flops(config, tokens_seen(config.kinds, 1, tokens))
    return 3 * sequences * (2 * matmul_weights(config) * tokens + attention)


def kv_bytes(config: DecoderConfig, itemsize: int) -> int:
    """Bytes of keys and values of one token: `2 L K h` numbers.

    >>> from jaxft.models.config import model_preset
    >>> kv_bytes(model_preset("qwen3-0.6b"), itemsize=2)  # 2 28 8 128 2: 112 KiB
    114688
    """
    return 2 * config.num_layers * config.num_kv_heads * config.head_dim * itemsize


def decode_bytes(
    config: DecoderConfig,
    steps: int,
    seen: int,
    itemsize: int,
    *,
    in_eight_bits: bool = False,
    narrow_head: bool = False,
    narrow_cache: bool = False,
) -> int:
    """Bytes that decoding reads at least: the weights in every step, and keys and values of the `seen` tokens of rows.

    Layers with a window, which see fewer, do not count; pages that rows share count for each row. Routers are never in
    eight bits, the head, keys and values are by options of their own, and rows are taken to ask for the same experts.

    >>> from jaxft.models.config import model_preset
    >>> decode_bytes(model_preset("qwen3-58m"), steps=2, seen=5, itemsize=4) == 4 * 2 * 41549824 + 5 * 16384
    True
    """
    whole = sum(kind.window is None for kind in config.kinds)
    narrow = head_weights(config) if narrow_head else 0
    for kind in config.kinds if in_eight_bits else ():
        shapes = projection_shapes(config, has_experts=kind.has_experts)
        narrow += sum(math.prod(shapes[path]) for path in shapes if is_quantizable((*path.split("/"), "kernel")))
    weights = matmul_weights(config) * itemsize - narrow * (itemsize - 1)
    of_token = kv_bytes(config, 1 if narrow_cache else itemsize)
    return weights * steps + seen * whole * of_token // config.num_layers
