"""Attention of whole rows by a fused kernel: the choice of the kernel, and its call on one device or on a mesh.

A fused kernel (arXiv 2205.14135) never writes the scores to memory, so its memory is linear in tokens. All kernels are
JAX's own: cuDNN and, before jax 0.11.2, a Triton kernel for NVIDIA's GPUs, splash attention for TPUs. What no kernel
takes goes to the reference, `jaxft.models.attention.attend`, with which `jaxft.models.segment_probe` compares the
kernels of packed rows.
Letters: `B` rows, `T` tokens, `S` spans, `H` query heads, `K` key/value heads, `h` head width.
"""

import inspect
import logging
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Bool, Float, Int

from jaxft.core.sharding import Sharding, compute_devices
from jaxft.models.attention import Scores
from jaxft.models.config import DecoderConfig
from jaxft.models.shared_prefix import IS_KNOWN, sink_attention

try:  # Private, as no public function of JAX gives cuDNN the segments of packed rows.
    from jax._src.cudnn import fused_attention_stablehlo as cudnn
except ImportError:
    cudnn = None  # type: ignore[assignment]

logger = logging.getLogger(__name__)

Kernel = Literal["xla", "cudnn", "pallas", "splash"]
"""`xla` is the reference; `cudnn` and `pallas` run on NVIDIA's GPUs, `splash` on TPUs."""


class Choice(NamedTuple):
    """A kernel, and in words why it is the reference, if it is."""

    kernel: Kernel
    reason: str = ""


AMPERE, HOPPER = (8, 0), (9, 0)
"""Compute capabilities of NVIDIA's GPUs."""

PACKED_SINCE = (0, 11, 2)
"""Version of jax from which on cuDNN takes packed rows: before, those with grouped heads read other keys (jax#39521).
JAX's Triton kernel is deprecated since 0.11."""

MOST_SEGMENTS = 8
"""Most segments of a row that cuDNN is given, padding included. It has room for as many whole rows in its normalisers,
which layers keep, and in a layer's sums of gradients: 2.1 GiB for 16,384 tokens of 16 heads of 128."""


def compute_capability(device: Any) -> tuple[int, ...]:
    """Return the compute capability of a CUDA GPU, such as (9, 0); (0, 0) for any other device, also AMD's GPUs.

    >>> compute_capability(jax.devices("cpu")[0])
    (0, 0)
    """
    if device.platform != "gpu":
        return 0, 0
    parts = str(device.compute_capability).split(".")  # "9.0" of an H100, "gfx942" of an MI300
    return tuple(map(int, parts)) if all(part.isdecimal() for part in parts) else (0, 0)


def choose_kernel(dtype: Any, head_dim: int, scores: Scores, devices: Sequence[Any], *, has_segments: bool) -> Choice:
    """Return the kernel that takes attention of this kind on all of these devices; the reference if none does.

    cuDNN's limits are those of `jax.nn.dot_product_attention`: NVIDIA's GPUs from Ampere on take heads of up to 128,
    those from Hopper on of up to 256, and packed rows by jax from 0.11.2 on. With jax before that, packed rows without
    a window go to JAX's Triton kernel, of heads of up to 256. Neither takes a soft cap, nor packed rows with sinks.
    Splash attention takes packed rows, windows, soft caps, sinks and any head width. All take any scale.

    Args:
        dtype: dtype of queries, keys and values.
        head_dim: head width.
        scores: scale, window and soft cap.
        devices: devices that compute; those of a compile-only topology do too.
        has_segments: True for packed rows.

    >>> choose_kernel(jnp.bfloat16, 128, Scores(128**-0.5), jax.devices("cpu"), has_segments=True).kernel
    'xla'
    """
    platforms = {device.platform for device in devices}
    dtype = jnp.dtype(dtype)
    if platforms == {"gpu"}:
        return _choose_for_gpu(dtype, head_dim, scores, min(map(compute_capability, devices)), has_segments)
    if platforms == {"tpu"}:
        if dtype not in (jnp.bfloat16, jnp.float32):
            return Choice("xla", f"the splash kernel takes bfloat16 and float32, not {dtype.name}")
        return Choice("splash")
    return Choice("xla", "there is no kernel for this platform")


def _choose_for_gpu(dtype: Any, head_dim: int, scores: Scores, weakest: tuple[int, ...], has_segments: bool) -> Choice:
    if weakest < AMPERE:
        return Choice("xla", "kernels need NVIDIA's GPUs from Ampere on (compute capability 8.0)")
    if dtype not in (jnp.bfloat16, jnp.float16):
        return Choice("xla", f"kernels of GPUs take bfloat16 and float16, not {dtype.name}")
    if scores.soft_cap is not None:
        return Choice("xla", "no kernel of GPUs takes a soft cap of scores")
    if scores.has_sinks and (has_segments or not IS_KNOWN):
        return Choice("xla", "no kernel of GPUs takes packed rows with attention sinks")
    is_triton = has_segments and jax.__version_info__ < PACKED_SINCE
    if is_triton and scores.window is not None:
        return Choice("xla", "no kernel of GPUs takes packed rows with a sliding window before jax 0.11.2")
    if has_segments and not is_triton and (reason := _missing_in_cudnn(weakest)):
        return Choice("xla", reason)
    widest = 256 if is_triton or weakest >= HOPPER else 128
    if not 16 <= head_dim <= widest or head_dim % 8:
        name = "JAX's Triton kernel" if is_triton else "cuDNN"
        return Choice("xla", f"{name} takes head widths of 16 to {widest} on this GPU, in steps of 8, not {head_dim}")
    return Choice("pallas" if is_triton else "cudnn")


PACKED_ARGUMENTS = "q_seqlen", "kv_seqlen", "q_offsets", "kv_offsets", "scale", "mask_type", "sliding_window_length"


def _missing_in_cudnn(weakest: tuple[int, ...]) -> str:
    """Return why cuDNN does not take packed rows, in words; empty if it does."""
    if weakest < HOPPER:
        return "cuDNN takes packed rows on NVIDIA's GPUs from Hopper on (compute capability 9.0)"
    if cudnn is None or not set(PACKED_ARGUMENTS) <= set(inspect.signature(cudnn.dot_product_attention).parameters):
        return f"jaxft does not know how jax {jax.__version__} gives packed rows to cuDNN"
    return ""


def layer_kernels(
    config: DecoderConfig, dtype: Any, devices: Sequence[Any], *, has_segments: bool, length: int | None = None
) -> dict[Scores, Choice]:
    """Return the kernel of each kind of attention that a model's layers have in rows of this many tokens.

    Args:
        config: the model.
        dtype: dtype of queries, keys and values.
        devices: devices that compute.
        has_segments: True for packed rows.
        length: tokens of a row; None for the longest that the model takes.
    """
    length = config.max_position_embeddings if length is None else length
    windows = (None if (kind.window or length) >= length else kind.window for kind in config.pattern)
    kinds = [
        Scores(config.score_scale, window, config.attention_soft_cap, config.attention_sinks) for window in windows
    ]
    return {
        scores: choose_kernel(dtype, config.head_dim, scores, devices, has_segments=has_segments) for scores in kinds
    }


def reason_not_to_pack(config: DecoderConfig, dtype: Any, devices: Sequence[Any]) -> str:
    """Return why no kernel takes packed rows of some layers, where one takes rows of one sequence; else nothing."""
    alone, packed = (layer_kernels(config, dtype, devices, has_segments=each) for each in (False, True))
    lost = (scores for scores in alone if alone[scores].kernel != "xla" and packed[scores].kernel == "xla")
    return next((packed[scores].reason for scores in lost), "")


def most_sequences(devices: Sequence[Any]) -> int | None:
    """Return the most sequences that kernels of devices take in a packed row; None for any number."""
    is_limited = {device.platform for device in devices} == {"gpu"} and jax.__version_info__ >= PACKED_SINCE
    return MOST_SEGMENTS - 1 if is_limited else None  # and the padding


def announce(choice: Choice, dtype: Any, head_dim: int, scores: Scores, device: Any, has_segments: bool) -> None:
    """Log a choice, once a process: a kernel as information, the reference as a warning. Nothing on CPUs."""
    if device.platform == "cpu":
        return
    rows = "packed rows" if has_segments else "rows of one sequence"
    window = "" if scores.window is None else f", window {scores.window}"
    soft_cap = "" if scores.soft_cap is None else f", soft cap {scores.soft_cap:g}"
    shape = f"{device.device_kind}, {jnp.dtype(dtype).name}, head width {head_dim}, {rows}{window}{soft_cap}"
    if choice.kernel == "xla":
        _log_once(logging.WARNING, f"attention: reference implementation ({shape}): {choice.reason}")
    else:
        _log_once(logging.INFO, f"attention: {choice.kernel} kernel ({shape})")


@cache
def _log_once(level: int, text: str) -> None:
    logger.log(level, "%s", text)


class Spans(NamedTuple):
    """Spans of adjacent tokens with one id, in the order of a row, as cuDNN takes them.

    Attributes:
        starts: column of the first token of each span; -1 where the row has no more.
        lengths: number of its tokens; -1 likewise.
        is_refused: True for rows with more spans than there is room for, or with two spans of one id other than that of
            padding, 0. Their attention means nothing.
    """

    starts: Int[Array, "B S+1"]
    lengths: Int[Array, "B S"]
    is_refused: Bool[Array, "B"]


def find_spans(segment_ids: Int[Array, "B T"], most: int = MOST_SEGMENTS) -> Spans:
    """Return the spans of packed rows, at most so many in each.

    Padding is a span, too, as cuDNN writes nothing for tokens outside of spans.

    >>> spans = find_spans(jnp.array([[1, 1, 1, 2, 0, 0], [1, 1, 2, 2, 1, 1]]))
    >>> print(spans.starts[0, :4], spans.lengths[0, :4], spans.is_refused)
    [ 0  3  4 -1] [ 3  1  2 -1] [False  True]
    """
    length = segment_ids.shape[1]
    is_first = jnp.pad(segment_ids[:, 1:] != segment_ids[:, :-1], ((0, 0), (1, 0)), constant_values=True)
    edges = jnp.sort(jnp.where(is_first, jnp.arange(length, dtype=jnp.int32), length), axis=1)
    edges = jnp.pad(edges, ((0, 0), (0, most)), constant_values=length)[:, : most + 1]
    firsts, ends = edges[:, :-1], edges[:, 1:]
    ids = jnp.take_along_axis(segment_ids, jnp.minimum(firsts, length - 1), axis=1)
    ids = jnp.where(firsts < length, ids, 0)
    is_repeated = (ids[:, :, None] == ids[:, None, :]) & (ids != 0)[:, None, :]
    is_refused = (edges[:, -1] < length) | jnp.tril(is_repeated, -1).any(axis=(1, 2))
    starts, lengths = (jnp.where(firsts < length, x, -1) for x in (firsts, ends - firsts))
    return Spans(jnp.pad(starts, ((0, 0), (0, 1)), constant_values=-1), lengths, is_refused)


def row_attention(
    q: Float[Array, "B Q H h"],
    k: Float[Array, "B T K h"],
    v: Float[Array, "B T K h"],
    *,
    kernel: Kernel,
    scores: Scores,
    segments: Int[Array, "B T"] | Spans | None = None,
    sharding: Sharding | None = None,
    sinks: Float[Array, "H"] | None = None,
) -> Float[Array, "B Q H h"]:
    """Return causal softmax attention within rows, or of the last tokens of each, by a fused kernel.

    On a mesh each device computes its own rows and heads, without communication; rows that do not divide are computed
    on every device. On CPUs kernels are interpreted, which is slow and shows their values.

    Args:
        q: queries; `H` is a multiple of `K`.
        k: keys.
        v: values.
        kernel: kernel that takes the arguments, by `choose_kernel`.
        scores: scale, window and soft cap.
        segments: sequence of each token in packed rows, for cuDNN `find_spans` of them; tokens see their own sequence.
            None where rows hold one sequence: right padding needs no mask, as no real token sees later positions.
        sharding: sharding of the model, or None for one device.
        sinks: score of nothing in each head.
    """
    missing = k.shape[1] - q.shape[1]
    if missing and kernel != "splash":  # kernels of GPUs take square masks only
        whole = jnp.pad(q, ((0, 0), (missing, 0), (0, 0), (0, 0)))
        given: dict[str, Any] = {"kernel": kernel, "scores": scores, "segments": segments, "sinks": sinks}
        return row_attention(whole, k, v, sharding=sharding, **given)[:, missing:]
    compute = partial(KERNELS[kernel], scores, compute_devices(sharding))
    if sharding is None:
        return compute(segments, sinks, q, k, v)
    # Query heads divide where key/value heads do; both are cut alike, so that groups stay together.
    spec = sharding.cut(k.shape, sharding.row_axes, None, "tensor").spec
    return jax.shard_map(
        compute,
        mesh=sharding.mesh,
        in_specs=(PartitionSpec(spec[0]), PartitionSpec(spec[2]), spec, spec, spec),
        out_specs=spec,
        check_vma=False,
    )(segments, sinks, q, k, v)


def is_interpreted(devices: Sequence[Any]) -> bool:
    """Return True for CPUs, where kernels are interpreted."""
    return all(device.platform == "cpu" for device in devices)


def _cudnn(
    scores: Scores, devices: Sequence[Any], spans: Spans | None, sinks: Array | None, q: Array, k: Array, v: Array
) -> Array:
    length = q.shape[1]
    q, k, v = (_pad_tokens(x, length % 2) for x in (q, k, v))  # an odd length with a window is refused
    if sinks is not None:
        return sink_attention(scores, sinks, q, k, v)[:, :length]
    mask = None
    if spans is not None:
        if not is_interpreted(devices):
            return _packed_cudnn(scores, spans, q, k, v)[:, :length]
        starts = jnp.where(spans.starts < 0, q.shape[1], spans.starts)
        numbers = (jnp.arange(q.shape[1])[:, None] >= starts[:, None, :]).sum(axis=-1)  # [B T] span of each token
        mask = (numbers[:, :, None] == numbers[:, None, :])[:, None]
    mixed: Array = jax.nn.dot_product_attention(
        q,
        k,
        v,
        mask=mask,
        scale=scores.scale,
        is_causal=True,
        local_window_size=None if scores.window is None else (scores.window - 1, 0),
        implementation="xla" if is_interpreted(devices) else "cudnn",
    )
    return mixed[:, :length]


def _packed_cudnn(scores: Scores, spans: Spans, q: Array, k: Array, v: Array) -> Array:
    if q.size >= 2**31:  # as offsets are int32
        raise ValueError(f"packed queries {q.shape} have 2**31 numbers or more on a device; lower microbatch_tokens")
    mixed: Array = cudnn.dot_product_attention(
        q,
        k,
        v,
        q_seqlen=spans.lengths,
        kv_seqlen=spans.lengths,
        q_offsets=spans.starts,
        kv_offsets=spans.starts,
        scale=scores.scale,
        mask_type=cudnn.MaskType.PADDING_CAUSAL,
        sliding_window_length=scores.window,
    )
    return mixed


class Tiles(NamedTuple):
    """Tokens of queries and of keys in a tile of the Triton kernel, forward and for both gradients, and warps.

    Lengths are padded to a multiple of each. A program has the queries' gradient of as many tokens as the keys' one.
    """

    block_q: int
    block_k: int
    block_q_dkv: int
    block_kv_dkv: int
    block_q_dq: int
    block_kv_dq: int
    warps: int


WIDEST = 128
"""Head width above which tiles are smaller. The kernel pads heads to a power of two: 80 and 96 take what 128 does."""

HOPPER_TILES, WIDE_HOPPER_TILES = Tiles(128, 64, 64, 64, 64, 64, warps=4), Tiles(64, 32, 64, 32, 32, 64, warps=4)
AMPERE_TILES, WIDE_AMPERE_TILES = Tiles(128, 64, 32, 64, 64, 32, warps=8), Tiles(64, 64, 16, 64, 64, 16, warps=8)
"""Tiles for Hopper are the fastest of a dozen that were timed on an H100, 8 rows of 2,048 tokens, forward and backward
(in brackets the tiles for Ampere): 2.5 ms (5.3) with 16 heads of 128, 1.7 (2.7) with 16 of 64, 2.8 (6.8) with 8 of 256,
although `ptxas` spills registers. On an A100 it would spill 1,324 bytes a thread, and 2,932 at 256; nothing was timed
there, and the tiles for Ampere are the largest that spill at most 16 bytes."""


def triton_tiles(head_dim: int, devices: Sequence[Any]) -> Tiles:
    """Return the tiles for heads of this width on the weakest of the devices.

    >>> triton_tiles(128, jax.devices("cpu")) == AMPERE_TILES
    True
    """
    is_wide = head_dim > WIDEST
    if min(map(compute_capability, devices)) >= HOPPER:
        return WIDE_HOPPER_TILES if is_wide else HOPPER_TILES
    return WIDE_AMPERE_TILES if is_wide else AMPERE_TILES


def _pallas(
    scores: Scores, devices: Sequence[Any], segment_ids: Array, sinks: None, q: Array, k: Array, v: Array
) -> Array:
    # Importing Pallas takes half a second, which users of CPUs are spared.
    from jax.experimental.pallas.ops.gpu import attention as triton

    length, groups = q.shape[1], q.shape[2] // k.shape[2]
    *blocks, warps = triton_tiles(q.shape[3], devices)
    k, v = (jnp.repeat(x, groups, axis=2) for x in (k, v))  # the kernel has no grouped heads
    added = -length % max(blocks)
    q, k, v, segment_ids = (_pad_tokens(x, added) for x in (q, k, v, segment_ids))
    mixed: Array = triton.mha(
        q,
        k,
        v,
        segment_ids,
        sm_scale=scores.scale,
        causal=True,
        block_sizes=triton.BlockSizes(*blocks),
        num_warps=warps,
        interpret=is_interpreted(devices),
    )
    return mixed[:, :length]


LANES, LARGEST_SPLASH_BLOCK = 128, 512
"""Blocks of the splash kernels are multiples of the lanes of a vector register."""


def splash_block(length: int) -> int:
    """Return the tokens of a block: those of equal blocks, rounded up to a multiple of 128 that is at most 512.

    On v5e, v5p and v6e blocks of 512 compile at head widths up to 256, also in float32; 1,024 does too, but computes
    75 % of the scores of 2,048 tokens, of which a causal mask needs 50 %, and 512 computes 62 %; 2,048 exceeds the
    16 MiB of VMEM that the compiler gives to a kernel. No block was timed.

    >>> [splash_block(length) for length in (16, 512, 768, 1024, 1536)]
    [128, 512, 384, 512, 512]
    """
    blocks = -(-length // LARGEST_SPLASH_BLOCK)
    return -(-length // (blocks * LANES)) * LANES


SAVED = "attention"
"""Name of splash attention's output and normalisers, the residuals of its backward pass."""


def _splash(
    scores: Scores, devices: Sequence[Any], segment_ids: Array | None, sinks: Array | None, q: Array, k: Array, v: Array
) -> Array:
    # Imported here for the reason of `_pallas`.
    from jax.experimental.pallas.ops.tpu import splash_attention as splash

    (queries, heads), length, window = q.shape[1:3], k.shape[1], scores.window
    block, block_q = splash_block(length), splash_block(queries)
    added, added_q = -length % block, -queries % block_q
    shape, offset = (queries + added_q, length + added), length - queries
    mask = splash.CausalMask(shape, offset) if window is None else splash.LocalMask(shape, (window - 1, 0), offset)
    # The backward pass in one kernel writes a gradient of the queries per block of keys, which is quadratic in tokens.
    sizes = splash.BlockSizes(
        block_q=block_q, block_kv=block, block_q_dkv=block_q, block_kv_dkv=block, block_q_dq=block_q, block_kv_dq=block
    )
    kernel = splash.make_splash_mha_single_device(
        splash.MultiHeadMask([mask] * heads),
        block_sizes=sizes,
        attn_logits_soft_cap=scores.soft_cap,
        residual_checkpoint_name=SAVED,
        interpret=is_interpreted(devices),
    )
    # The kernel does not scale. In float32, so that XLA can drop the rounding of the queries before it.
    q = (q.astype(jnp.float32) * scores.scale).astype(q.dtype)
    k, v = (_pad_tokens(x, added).swapaxes(1, 2) for x in (k, v))  # [B K T h]
    ids = None
    if segment_ids is not None:
        asking = _pad_tokens(segment_ids[:, -queries:], added_q)
        ids = splash.SegmentIds(asking, _pad_tokens(segment_ids, added))
    by_row = jax.vmap(kernel, in_axes=(0, 0, 0, 0, None))
    mixed = by_row(_pad_tokens(q, added_q).swapaxes(1, 2), k, v, ids, sinks)
    return mixed.swapaxes(1, 2)[:, :queries]


KERNELS: dict[Kernel, Callable[..., Array]] = {"cudnn": _cudnn, "pallas": _pallas, "splash": _splash}


def saves_kernels(primitive: Any, *_: Any, **params: Any) -> bool:
    """Return True for what the backward pass of a kernel needs of the forward pass, as a policy of `jax.checkpoint`.

    With it, the backward pass does not call the forward kernel a second time.
    """
    if primitive.name == "name":  # splash
        return bool(params["name"] == SAVED)
    if primitive.name == "custom_vjp_call":  # Triton: the forward pass of `mha` calls `mha`
        return any(call.params.get("name") == "mha" for call in params["call_jaxpr"].eqns)
    return primitive.name.startswith("dot_product_attention_fwd")  # cuDNN


def _pad_tokens(x: Array, added: int) -> Array:
    return jnp.pad(x, [(0, added if i == 1 else 0) for i in range(x.ndim)]) if added else x
