"""Weights and floating-point operations of a decoder by arithmetic: those it runs, and those it needs at least.

A multiplication and an addition are two operations. Only products of matrices count, those of attention included.
Letters: `D` hidden, `F` feed-forward, `H` query heads, `K` key/value heads, `h` head width, `L` layers, `V` vocabulary.
"""

from collections.abc import Sequence

from jaxft.models.config import DecoderConfig, LayerKind, LoraSpec
from jaxft.models.decoder import Remat


def block_weights(config: DecoderConfig) -> int:
    """Weights of one block's matrix products: `2 D H h + 2 D K h + 3 D F`.

    >>> from jaxft.models.config import model_preset
    >>> block_weights(model_preset("qwen3-58m"))  # 2 (512 512) + 2 (512 256) + 3 (512 1536)
    3145728
    """
    return sum(inputs * outputs for inputs, outputs in projection_shapes(config).values())


def projection_shapes(config: DecoderConfig) -> dict[str, tuple[int, int]]:
    """Inputs and outputs of a block's projections, by path.

    >>> from jaxft.models.config import model_preset
    >>> projection_shapes(model_preset("qwen3-58m"))["self_attn/k_proj"]
    (512, 256)
    """
    hidden, wide = config.hidden_size, config.intermediate_size
    queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    return {
        "self_attn/q_proj": (hidden, queries),
        "self_attn/k_proj": (hidden, keys),
        "self_attn/v_proj": (hidden, keys),
        "self_attn/o_proj": (queries, hidden),
        "mlp/gate_proj": (hidden, wide),
        "mlp/up_proj": (hidden, wide),
        "mlp/down_proj": (wide, hidden),
    }


def head_weights(config: DecoderConfig) -> int:
    """Weights of the output projection, `D V`, tied to the embedding or not; looking a token up is no product.

    >>> from jaxft.models.config import model_preset
    >>> head_weights(model_preset("qwen3-58m"))  # 512 32000
    16384000
    """
    return config.hidden_size * config.vocab_size


def matmul_weights(config: DecoderConfig) -> int:
    """Weights that a sampled token is multiplied with.

    >>> from jaxft.models.config import model_preset
    >>> matmul_weights(model_preset("qwen3-58m"))  # 8 blocks and the head
    41549824
    """
    return config.num_layers * block_weights(config) + head_weights(config)


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


def kernel_flops(config: DecoderConfig, rows: int, tokens: int, remat: Remat) -> int:
    """Operations of the attention kernels of one gradient, which no reader of compiled programs sees.

    The forward pass has two products, the backward pass five: scores and gradient of weights, queries, keys and values.
    Segments of packed rows count as one, since a kernel skips only tiles that are above the diagonal. With remat `full`
    the forward pass runs twice.

    >>> from jaxft.models.config import model_preset
    >>> m60 = model_preset("qwen3-58m")
    >>> kernel_flops(m60, rows=1, tokens=1, remat="dots") == 8 * 7 * 2 * 8 * 64
    True
    """
    products = (2 + 2 + 5) if remat == "full" else (2 + 5)
    return rows * products * attention_flops(config, tokens_seen(config.kinds, 1, tokens)) // 2


def update_flops(config: DecoderConfig, rows: int, tokens: int, remat: Remat, lora: LoraSpec | None = None) -> int:
    """Operations of the gradient of `rows` rows, attention kernels included; devices of a `tensor` axis share them.

    A trained weight takes six operations a token, a frozen one four (no gradient), and one whose product the backward
    pass recomputes two more: `projections` recomputes the products of the feed-forward but its last, `attention` and
    `full` those of attention as well. The gradient of a norm of outputs needs the result of the last, which all but
    `none` recompute; no other does. The logits are always computed twice.

    >>> from jaxft.models.config import model_preset
    >>> m60 = model_preset("qwen3-58m")
    >>> products = 6 * 2 * 8 * 3145728 + 8 * 1 * 16384000  # the last token of a row has no successor to score
    >>> update_flops(m60, 1, 2, "dots") == products + kernel_flops(m60, 1, 2, "dots")
    True
    """
    shapes = projection_shapes(config)
    kept = {"dots": tuple(shapes), "projections": tuple(path for path in shapes if path.startswith("self_attn"))}
    recomputed = set() if remat == "none" else set(shapes) - set(kept.get(remat, ())) - {"mlp/down_proj"}
    if remat != "none" and config.norm_places != "before":
        recomputed.add("mlp/down_proj")
    of_token = 0
    for path, (inputs, outputs) in shapes.items():
        passes = (2 if lora is not None else 3) + (path in recomputed)
        of_token += 2 * passes * inputs * outputs
        if lora is not None and lora.is_target(path):
            again = inputs if remat != "none" else 0  # the inner product is read by a gradient
            again += outputs if path in recomputed else 0
            of_token += 2 * lora.rank * (3 * (inputs + outputs) + again)
    head = 2 * (3 if lora is not None else 4) * head_weights(config)
    products = rows * tokens * config.num_layers * of_token + rows * (tokens - 1) * head
    return products + kernel_flops(config, rows, tokens, remat)
