"""Operations of attention's kernels, and messages between chips of a decoder, by arithmetic from shapes and the mesh.

Parameters are gathered along `fsdp` and gradients summed as by ZeRO-3 (arXiv 1910.02054), activations along `tensor` as
by Megatron-LM (arXiv 1909.08053). Of `n` chips a ring brings a chip `(n - 1) / n` of what is gathered or scattered, and
twice that of a sum.
"""

from typing import NamedTuple

from jaxft import DecoderConfig
from jaxft.models import Remat, attention_flops, tokens_seen


def kernel_flops(config: DecoderConfig, rows: int, tokens: int, remat: Remat) -> int:
    """Operations of the attention kernels of one gradient, which no reader of compiled programs sees.

    The forward pass has two products, the backward pass five: scores and gradient of weights, queries, keys and values.
    Segments of packed rows count as one, since most kernels skip only tiles that are above the diagonal; cuDNN computes
    each segment alone, and has fewer. With remat `full` or `least` the forward pass runs twice.

    >>> from jaxft.models.config import model_preset
    >>> m60 = model_preset("qwen3-58m")
    >>> kernel_flops(m60, rows=1, tokens=1, remat="dots") == 8 * 7 * 2 * 8 * 64
    True
    """
    products = (2 + 2 + 5) if remat in ("full", "least") else (2 + 5)
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
