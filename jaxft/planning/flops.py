"""Weights, operations and messages between chips of a decoder, by arithmetic from shapes and the mesh alone.

A multiplication and an addition are two operations. Only products of matrices count, those of attention included.
Parameters are gathered along `fsdp` and gradients summed as by ZeRO-3 (arXiv 1910.02054), activations along `tensor` as
by Megatron-LM (arXiv 1909.08053). Of `n` chips a ring brings a chip `(n - 1) / n` of what is gathered or scattered, and
twice that of a sum.
Letters: `D` hidden, `F` feed-forward, `H` query heads, `K` key/value heads, `h` head width, `L` layers, `V` vocabulary.
"""

from collections.abc import Sequence
from typing import NamedTuple

from jaxft import DecoderConfig, LayerKind
from jaxft.models import Remat


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


Mesh = tuple[int, int, int]
"""Sizes of the axes `data`, `fsdp` and `tensor`; chips along `tensor` are neighbours, then those along `fsdp`."""


class Message(NamedTuple):
    """The bytes that a chip receives for one purpose.

    Attributes:
        what: the purpose.
        axis: the mesh axis that it goes along.
        size: bytes, for each microbatch or for each update.
        is_per_update: True if it is sent once for an update, whatever the microbatches.
        crosses_hosts: True if chips along the axis are of several hosts.
    """

    what: str
    axis: str
    size: float
    is_per_update: bool
    crosses_hosts: bool


def messages(
    model: DecoderConfig,
    mesh: Mesh,
    *,
    parameters: int,
    trained: int,
    tokens: int,
    compute_bytes: int,
    chips_per_host: int,
) -> list[Message]:
    """Return what a chip receives; purposes that need nothing are left out.

    Args:
        model: shape of the model.
        mesh: sizes of the mesh's axes.
        parameters: number of all parameters.
        trained: number of those that are trained.
        tokens: tokens of a microbatch on a row shard.
        compute_bytes: bytes of a number in products, in which weights are gathered, and gradients and activations sent.
        chips_per_host: chips of a host that the mesh uses.

    >>> from jaxft.models.config import model_preset
    >>> sizes = {"parameters": 8000, "trained": 8000, "tokens": 1, "compute_bytes": 2, "chips_per_host": 8}
    >>> [(each.what, each.size) for each in messages(model_preset("qwen3-50k"), (2, 1, 1), **sizes)]
    [('sums of gradients', 16000.0)]
    """
    data, fsdp, tensor = mesh
    of_fsdp, of_data, of_tensor = ((size - 1) / size for size in (fsdp, data, tensor))
    own, moved = parameters / tensor * compute_bytes, trained / tensor * compute_bytes
    activations = 4 * model.num_layers * 2 * of_tensor * tokens * model.hidden_size * compute_bytes
    spans = {"tensor": tensor, "fsdp": tensor * fsdp, "data": tensor * fsdp * data}
    found = [
        ("weights, forward and backward", "fsdp", 2 * of_fsdp * own, False),
        ("parts of gradients", "fsdp", of_fsdp * moved, False),
        ("sums of gradients", "data", 2 * of_data * moved / fsdp, False),
        ("sums of activations", "tensor", activations, False),
        ("weights to sample with", "fsdp", of_fsdp * moved, True),
    ]
    return [Message(*each, crosses_hosts=spans[each[1]] > chips_per_host) for each in found if each[2]]
