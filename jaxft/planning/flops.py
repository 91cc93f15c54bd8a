"""Operations of a gradient, and messages between chips of a decoder, by arithmetic from shapes and the mesh.

Parameters are gathered along `fsdp` and gradients summed as by ZeRO-3 (arXiv 1910.02054), activations along `tensor` as
by Megatron-LM (arXiv 1909.08053). Of `n` chips a ring brings a chip `(n - 1) / n` of what is gathered or scattered, and
twice that of a sum.
"""

import math
from collections.abc import Mapping
from itertools import accumulate
from operator import mul
from typing import NamedTuple

from jaxft import DecoderConfig, LoraSpec
from jaxft.core import default_chunk_tokens
from jaxft.models import Chip, Remat, attention_flops, head_weights, projection_shapes, tokens_seen


def gradient_flops(
    config: DecoderConfig,
    rows: int,
    tokens: int,
    remat: Remat,
    *,
    lora: LoraSpec | None = None,
    is_fused: bool = False,
    platform: str = "gpu",
) -> int:
    """Operations of the gradient of `rows` rows, attention kernels included.

    A trained weight takes six operations a token, a frozen one four (no gradient), and one whose product the backward
    pass recomputes two more: `projections` recomputes the products of the feed-forward but its last, `attention`,
    `full` and `least` those of attention as well. The gradient of a norm of outputs, or of weights of experts, needs
    the result of the last, which all but `none` recompute, as they do a mixture's routers; no other does. The logits
    are computed twice, but by a fused head once, with which layers of GPUs are unrolled: then nothing computes the
    gradient of a frozen embedding.

    Args:
        config: the model.
        rows: rows of a microbatch.
        tokens: tokens of a row.
        remat: checkpoint policy.
        lora: adapters, if only they are trained.
        is_fused: True if the head computes its logits once.
        platform: platform of the devices, on which the size of chunks of logits depends.

    >>> from jaxft.models.config import model_preset
    >>> m06, update = model_preset("qwen3-0.6b"), {"rows": 8, "tokens": 2048, "is_fused": True}
    >>> [f"{gradient_flops(m06, remat=remat, **update) / 1e12:.1f} TFLOP" for remat in ("dots", "full")]
    ['72.1 TFLOP', '87.5 TFLOP']
    """
    head = 2 * ((3 if lora is not None else 4) - is_fused) * head_weights(config)
    scored = rows * (tokens - 1)
    if remat == "least":  # whole chunks
        chunks = math.ceil(scored / default_chunk_tokens(config.vocab_size, scored, platform, is_partial=False))
        scored = chunks * 64 * math.ceil(scored / chunks / 64)
    of_layers = (_block_flops(config, kind.has_experts, remat, lora) for kind in config.kinds)
    products = rows * tokens * sum(of_layers) + scored * head
    if lora is not None and is_fused:
        shapes, first = projection_shapes(config), ("self_attn/q_proj", "self_attn/k_proj", "self_attn/v_proj")
        products -= rows * tokens * sum(2 * math.prod(shapes[path]) for path in first)
    return products + kernel_flops(config, rows, tokens, remat)


def _block_flops(config: DecoderConfig, has_experts: bool, remat: Remat, lora: LoraSpec | None) -> int:
    """Return the operations of a token in the projections of one block, as of `gradient_flops`."""
    kept = {"dots": ("self_attn/", "/gate_proj", "/up_proj"), "projections": ("self_attn/",)}.get(remat, ())
    unread = {"mlp/down_proj"} | (set() if config.shared_expert_gate else {"mlp/shared_expert/down_proj"})
    unread = unread if config.norm_places == "before" else set()
    of_token = 0
    for path, (inputs, outputs, number) in projection_shapes(config, has_experts=has_experts).items():
        is_again = remat != "none" and path not in unread and not any(part in path for part in kept)
        of_token += 2 * number * (2 + (lora is None) + is_again) * inputs * outputs
        if lora is not None and lora.is_target(path):
            again = inputs if remat != "none" else 0  # the inner product is read by a gradient
            again += outputs if is_again else 0
            of_token += 2 * number * lora.rank * (3 * (inputs + outputs) + again)
    return of_token


def kernel_flops(config: DecoderConfig, rows: int, tokens: int, remat: Remat) -> int:
    """Operations of the attention kernels of one gradient.

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

    def least_seconds(self, chip: Chip) -> float:
        """Return the time that the bytes take by the rate of the chip's links, or between hosts of its network."""
        return self.size / (chip.network_bytes_per_second if self.crosses_hosts else chip.link_bytes_per_second)


def messages(
    model: DecoderConfig,
    mesh: Mapping[str, int],
    *,
    parameters: int,
    trained: int,
    of_experts: tuple[int, int] = (0, 0),
    tokens: int,
    compute_bytes: int,
    chips_per_host: int,
) -> list[Message]:
    """Return what a chip receives; purposes that need nothing are left out.

    Args:
        model: shape of the model.
        mesh: sizes of the mesh's axes, those of neighbours last.
        parameters: number of all parameters.
        trained: number of those that are trained.
        of_experts: numbers of those, of all and of trained ones, that belong to one expert.
        tokens: tokens of a microbatch on a row shard.
        compute_bytes: bytes of a number in products, in which weights are gathered, and gradients and activations sent.
        chips_per_host: chips of a host that the mesh uses.

    >>> from jaxft.models.config import model_preset
    >>> sizes = {"parameters": 8000, "trained": 8000, "tokens": 1, "compute_bytes": 2, "chips_per_host": 8}
    >>> [(each.what, each.size) for each in messages(model_preset("qwen3-50k"), {"data": 2}, **sizes)]
    [('sums of gradients', 16000.0)]
    """
    sizes = {"data": 1, "fsdp": 1, "expert": 1, "tensor": 1, **mesh}
    experts, (of_data, of_fsdp, of_expert, of_tensor) = sizes["expert"], ((n - 1) / n for n in sizes.values())
    # Experts of others are neither gathered nor summed.
    whole = (number - of_expert * others for number, others in zip((parameters, trained), of_experts, strict=True))
    own, moved = (number / sizes["tensor"] * compute_bytes for number in whole)
    shared = (trained - of_experts[1]) / sizes["tensor"] * compute_bytes
    stream = 4 * tokens * model.hidden_size * compute_bytes  # two sums a layer, forward and backward
    mixtures = sum(kind.has_experts for kind in model.kinds)
    spans = dict(zip(reversed(sizes), accumulate(reversed(sizes.values()), mul), strict=True))
    found = [
        ("weights, forward and backward", "fsdp", 2 * of_fsdp * own, False),
        ("parts of gradients", "fsdp", of_fsdp * moved, False),
        ("sums of gradients", "data", 2 * of_data * moved / sizes["fsdp"], False),
        ("sums of gradients", "expert", 2 * of_expert * shared / sizes["fsdp"], False),
        ("tokens for experts, and their sums", "expert", mixtures * (experts - 1) * stream, False),
        ("sums of activations", "tensor", model.num_layers * 2 * of_tensor * stream, False),
        ("weights to sample with", "fsdp", of_fsdp * moved, True),
    ]
    return [Message(*each, crosses_hosts=spans[each[1]] > chips_per_host) for each in found if each[2]]
