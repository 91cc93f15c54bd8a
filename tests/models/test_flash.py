"""Fused attention: kernels in interpret mode give the values and gradients of the reference, wherever one is chosen."""

import os
import subprocess
import sys
from dataclasses import dataclass, replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, Mesh

import jaxft.models.attention as attention_module
import jaxft.models.block as block_module
import jaxft.models.decoder as decoder_module
import jaxft.models.flash as flash_module
from jaxft.core.logprobs import token_logprobs
from jaxft.core.sharding import AXES, compute_devices
from jaxft.models.attention import HeadRows, Scores, attend, attend_in_chunks, query_chunk, visible_keys
from jaxft.models.config import PRESETS, LayerKind
from jaxft.models.decoder import decoder
from jaxft.models.decoder_sharding import sharding_for
from jaxft.models.flash import (
    MOST_SEGMENTS,
    Choice,
    announce,
    choose_kernel,
    find_spans,
    layer_kernels,
    row_attention,
    saves_kernels,
    triton_tiles,
)
from tests.models.weights import narrowed, random_params

SMALL = PRESETS["qwen3-50k"]


# --- The choice.


@dataclass(frozen=True, eq=False)
class Device:
    """The attributes of a device that tell its abilities; only GPUs have a `compute_capability`."""

    platform: str
    device_kind: str
    compute_capability: str | None = None


H100, A100 = Device("gpu", "NVIDIA H100", "9.0"), Device("gpu", "NVIDIA A100", "8.0")
B200 = Device("gpu", "NVIDIA B200", "10.0")
T4, MI300 = Device("gpu", "Tesla T4", "7.5"), Device("gpu", "AMD Instinct MI300X", "gfx942")
V5E = Device("tpu", "TPU v5 lite")
PLAIN, WINDOW, CAPPED = Scores(0.25), Scores(0.25, window=30), Scores(0.4, soft_cap=2.0)
SINKS = WINDOW._replace(has_sinks=True)
"""The scale of heads of 16, within a window, scores of another scale that a cap of 2 changes, and sinks."""


BEFORE, SINCE = (0, 11, 1), (0, 11, 2)
"""The last version of jax without packed rows by cuDNN, and the first with them."""


@pytest.mark.parametrize(
    ("dtype", "head_dim", "scores", "devices", "alone", "packed"),
    [
        (jnp.bfloat16, 64, PLAIN, [H100], "cudnn", "pallas"),
        (jnp.bfloat16, 80, PLAIN, [H100], "cudnn", "pallas"),
        (jnp.bfloat16, 96, PLAIN, [A100], "cudnn", "pallas"),
        (jnp.bfloat16, 64, WINDOW, [H100], "cudnn", "xla"),
        (jnp.bfloat16, 64, CAPPED, [H100], "xla", "xla"),
        (jnp.bfloat16, 64, SINKS, [H100], "cudnn", "xla"),
        (jnp.bfloat16, 64, SINKS, [V5E], "splash", "splash"),
        (jnp.float16, 256, PLAIN, [H100], "cudnn", "pallas"),
        (jnp.bfloat16, 128, PLAIN, [A100, A100], "cudnn", "pallas"),
        (jnp.bfloat16, 256, PLAIN, [A100], "xla", "pallas"),
        (jnp.bfloat16, 256, PLAIN, [H100, A100], "xla", "pallas"),
        (jnp.bfloat16, 264, PLAIN, [H100], "xla", "xla"),
        (jnp.bfloat16, 64, PLAIN, [H100, T4], "xla", "xla"),
        (jnp.bfloat16, 64, PLAIN, [MI300], "xla", "xla"),
        (jnp.float32, 64, PLAIN, [H100], "xla", "xla"),
        (jnp.bfloat16, 60, PLAIN, [H100], "xla", "xla"),
        (jnp.bfloat16, 64, WINDOW, [V5E], "splash", "splash"),
        (jnp.bfloat16, 256, Scores(0.4, 30, 2.0), [V5E], "splash", "splash"),
        (jnp.float32, 128, PLAIN, [V5E], "splash", "splash"),
        (jnp.float16, 128, PLAIN, [V5E], "xla", "xla"),
        (jnp.bfloat16, 64, PLAIN, jax.devices("cpu"), "xla", "xla"),
        (jnp.bfloat16, 64, PLAIN, [], "xla", "xla"),
    ],
)
def test_a_kernel_is_chosen_where_its_conditions_hold(dtype, head_dim, scores, devices, alone, packed, monkeypatch):
    monkeypatch.setattr(jax, "__version_info__", BEFORE)
    for has_segments, expected in ((False, alone), (True, packed)):
        choice = choose_kernel(dtype, head_dim, scores, devices, has_segments=has_segments)
        assert choice.kernel == expected


@pytest.mark.parametrize(
    ("head_dim", "scores", "devices", "version", "expected"),
    [
        (128, PLAIN, [H100], (0, 10, 2), "pallas"),
        (128, PLAIN, [H100], BEFORE, "pallas"),
        (128, PLAIN, [H100], SINCE, "cudnn"),
        (128, PLAIN, [B200, H100], (0, 12, 0, 1), "cudnn"),
        (128, PLAIN, [H100, A100], SINCE, "9.0"),
        (128, PLAIN, [A100], BEFORE, "pallas"),
        (128, PLAIN, [A100], SINCE, "9.0"),
        (256, PLAIN, [H100], SINCE, "cudnn"),
        (264, PLAIN, [H100], SINCE, "264"),
        (64, WINDOW, [H100], BEFORE, "0.11.2"),
        (64, WINDOW, [H100], SINCE, "cudnn"),
        (64, CAPPED, [H100], SINCE, "soft cap"),
        (64, PLAIN, [MI300], SINCE, "8.0"),
        (128, WINDOW, [V5E], SINCE, "splash"),
    ],
)
def test_the_version_of_jax_and_the_weakest_device_decide_about_packed_rows(
    head_dim, scores, devices, version, expected, monkeypatch
):
    monkeypatch.setattr(jax, "__version_info__", version)
    choice = choose_kernel(jnp.bfloat16, head_dim, scores, devices, has_segments=True)
    assert expected in (choice.reason or choice.kernel)


def test_packed_rows_do_not_go_to_a_cudnn_that_jax_calls_in_another_way(monkeypatch):
    def dot_product_attention(query, key, value, *, scale): ...

    monkeypatch.setattr(flash_module.cudnn, "dot_product_attention", dot_product_attention)
    monkeypatch.setattr(jax, "__version_info__", SINCE)
    given = jnp.bfloat16, 128, PLAIN, [H100]
    choice = choose_kernel(*given, has_segments=True)
    assert choice.kernel == "xla" and jax.__version__ in choice.reason
    assert choose_kernel(*given, has_segments=False).kernel == "cudnn"


def test_windows_of_layers_count_only_where_they_are_shorter_than_the_rows():
    config = replace(SMALL, pattern=(LayerKind(window=512), LayerKind()))
    kernels = [layer_kernels(config, jnp.bfloat16, [V5E], has_segments=True, length=each) for each in (512, 513)]
    assert [[scores.window for scores in each] for each in kernels] == [[None], [512, None]]


def test_the_devices_of_the_mesh_decide():
    one = jax.devices()[:1]
    mesh = Mesh(np.array([H100, A100]).reshape(2, 1, 1), AXES)
    assert compute_devices(sharding_for(SMALL, mesh)) == [H100, A100]
    assert compute_devices(None) == one
    assert (
        compute_devices(sharding_for(SMALL, AbstractMesh((8, 1, 1), AXES))) == one
    )  # a plan, whose devices are elsewhere


def test_a_choice_is_logged_once(caplog):
    caplog.set_level("INFO")
    for _ in range(2):
        announce(Choice("splash"), jnp.bfloat16, 72, PLAIN, V5E, has_segments=True)
        announce(Choice("xla", "too wide"), jnp.bfloat16, 520, Scores(1.0, 8, 50.0), H100, has_segments=False)
        announce(Choice("xla", ""), jnp.bfloat16, 72, PLAIN, jax.devices("cpu")[0], has_segments=False)
    assert [(record.levelname, record.message) for record in caplog.records] == [
        ("INFO", "attention: splash kernel (TPU v5 lite, bfloat16, head width 72, packed rows)"),
        (
            "WARNING",
            "attention: reference implementation (NVIDIA H100, bfloat16, head width 520, rows of one sequence, "
            "window 8, soft cap 50): too wide",
        ),
    ]


# --- Spans of packed rows.


def ids_of(*lengths, width, first=1):
    """A row with segments of these lengths, numbered from `first`, and padding."""
    ids = np.repeat(np.arange(first, first + len(lengths)), lengths)
    return np.pad(ids, (0, width - len(ids)))


def test_spans_are_those_of_the_segments_and_of_the_padding():
    width, most = 40, MOST_SEGMENTS
    cases = {
        "one": (np.ones(width), [0], [width]),
        "several, unequal": (ids_of(3, 1, 36, width=width), [0, 3, 4], [3, 1, 36]),
        "padded": (ids_of(5, 7, width=width), [0, 5, 12], [5, 7, 28]),
        "any ids, padded at both ends": (
            np.roll(ids_of(9, 2, width=width, first=70), 4),
            [0, 4, 13, 15],
            [4, 9, 2, 25],
        ),
        "padding alone": (np.zeros(width), [0], [width]),
        "as many as fit": (
            ids_of(*[2] * (most - 1), width=width),
            range(0, 2 * most, 2),
            [2] * (most - 1) + [width - 2 * (most - 1)],
        ),
    }
    refused = {
        "too many": ids_of(*[2] * most, width=width),
        "too many and no padding": ids_of(*[2] * most, width - 2 * most, width=width),
        "one id in two places": np.roll(ids_of(30, 10, width=width), 8),
    }
    table = np.stack([*(ids for ids, *_ in cases.values()), *refused.values()]).astype(np.int32)
    spans = jax.jit(find_spans)(table)
    assert dict(zip([*cases, *refused], spans.is_refused.tolist(), strict=True)) == dict.fromkeys(
        cases, False
    ) | dict.fromkeys(refused, True)
    assert spans.starts.shape == (len(table), most + 1) and spans.lengths.shape == (len(table), most)
    for (name, (_, starts, lengths)), found, sizes in zip(cases.items(), *spans[:2], strict=False):
        assert found.tolist() == [*starts, *[-1] * (most + 1 - len(starts))], name
        assert sizes.tolist() == [*lengths, *[-1] * (most - len(lengths))], name


def test_a_row_of_one_token_has_one_span():
    spans = jax.jit(find_spans)(np.ones((1, 1), np.int32))
    assert (spans.starts[0, :2].tolist(), spans.lengths[0, :2].tolist()) == ([0, -1], [1, -1])


# --- Values and gradients.


def draws(dtype=jnp.float32, length=150, heads=4, kv_heads=2, head_dim=16):
    """Queries, keys, values and the gradient of the result, of 2 rows."""
    rng = np.random.default_rng(0)
    shapes = [(2, length, count, head_dim) for count in (heads, kv_heads, kv_heads, heads)]
    return [rng.normal(size=shape).astype(jnp.dtype(dtype)) for shape in shapes]


SEGMENTS = np.array([np.repeat([1, 2, 3, 0], [50, 70, 10, 20]), np.repeat([1, 2], [20, 130])], np.int32)
"""Sequences of 2 rows of 150 tokens; 0 is padding."""


def visible_to(scores, segment_ids, length):
    """Which keys each query of the 2 rows sees."""
    places = jnp.arange(length)
    visible = visible_keys(places[None], places, scores.window, segment_ids, segment_ids)
    return jnp.broadcast_to(visible, (2, length, length))


def reference(scores, segment_ids, q, k, v):
    seen = HeadRows(k.transpose(0, 2, 3, 1), v.transpose(0, 2, 1, 3))
    return attend(q, seen, visible_to(scores, segment_ids, q.shape[1]), scores)


def in_chunks(scores, segment_ids, q, k, v):
    places = jnp.arange(q.shape[1])[None]
    seen = HeadRows(k.transpose(0, 2, 3, 1), v.transpose(0, 2, 1, 3))
    return attend_in_chunks(q, seen, places, scores, segment_ids, chunk=48)


def formula(scores, segment_ids, q, k, v):
    """Attention as papers write it, with keys and values repeated for the heads of a group."""
    k, v = (jnp.repeat(x, q.shape[2] // k.shape[2], axis=2) for x in (k, v))
    scored = scores.scale * jnp.einsum("bthd,bshd->bhts", q, k)
    if scores.soft_cap is not None:
        scored = scores.soft_cap * jnp.tanh(scored / scores.soft_cap)
    visible = visible_to(scores, segment_ids, q.shape[1])[:, None]
    return jnp.einsum("bhts,bshd->bthd", jax.nn.softmax(jnp.where(visible, scored, -jnp.inf)), v)


@partial(jax.jit, static_argnums=(0, 1))
def with_gradients(attention, scores, segment_ids, q, k, v, gradient):
    mixed, pull = jax.vjp(partial(attention, scores, segment_ids), q, k, v)
    return (mixed, *pull(gradient))


TRITON = pytest.mark.skipif(jax.__version_info__ >= SINCE, reason="JAX's Triton kernel is deprecated, and not used")


def by_kernel(kernel):
    def attention(scores, ids, q, k, v):
        segments = find_spans(ids) if kernel == "cudnn" and ids is not None else ids
        return row_attention(q, k, v, kernel=kernel, scores=scores, segments=segments)

    return attention


@pytest.mark.parametrize(
    ("attention", "scores", "segment_ids"),
    [
        pytest.param(reference, Scores(0.4, 30, 2.0), SEGMENTS, id="reference, packed, window, cap"),
        pytest.param(by_kernel("cudnn"), PLAIN, None, marks=pytest.mark.slow, id="cudnn"),
        pytest.param(by_kernel("cudnn"), Scores(0.4, 30), None, id="cudnn, window, scale"),
        pytest.param(by_kernel("cudnn"), Scores(0.4, 30), SEGMENTS, id="cudnn, packed, window, scale"),
        pytest.param(by_kernel("pallas"), PLAIN, SEGMENTS, marks=TRITON, id="pallas, packed"),
        pytest.param(by_kernel("splash"), PLAIN, None, marks=pytest.mark.slow, id="splash"),
        pytest.param(by_kernel("splash"), PLAIN, SEGMENTS, marks=pytest.mark.slow, id="splash, packed"),
        pytest.param(by_kernel("splash"), WINDOW, SEGMENTS, marks=pytest.mark.slow, id="splash, packed, window"),
        pytest.param(by_kernel("splash"), Scores(0.4, 30, 2.0), SEGMENTS, id="splash, packed, window, cap"),
        pytest.param(in_chunks, PLAIN, SEGMENTS, marks=pytest.mark.slow, id="reference in chunks, packed"),
        pytest.param(in_chunks, WINDOW, None, id="reference in chunks, window"),
        pytest.param(in_chunks, CAPPED, SEGMENTS, id="reference in chunks, packed, cap"),
    ],
)
def test_values_and_gradients_are_those_of_the_formula(attention, scores, segment_ids):
    arrays = draws()
    expected = with_gradients(formula, scores, segment_ids, *arrays)
    found = with_gradients(attention, scores, segment_ids, *arrays)
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)


@TRITON
@pytest.mark.parametrize("head_dim", [24, pytest.param(256, marks=pytest.mark.slow)])
def test_the_triton_kernel_takes_wide_heads_and_widths_that_are_no_power_of_two(head_dim):
    arrays, scores = draws(heads=3, kv_heads=1, head_dim=head_dim), Scores(1.5 * head_dim**-0.5)
    expected = with_gradients(formula, scores, SEGMENTS, *arrays)
    found = with_gradients(by_kernel("pallas"), scores, SEGMENTS, *arrays)
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "attention", [by_kernel("cudnn"), by_kernel("splash"), in_chunks], ids=["cudnn", "splash", "chunks"]
)
def test_windows_may_be_one_token_or_longer_than_the_rows(attention):
    q, k, v, _ = draws()
    results = jax.jit(lambda *arrays: [attention(Scores(0.25, window), None, *arrays) for window in (1, 1000)])
    one, whole = results(q, k, v)
    np.testing.assert_allclose(one, np.repeat(v, 2, axis=2), rtol=1e-5, atol=1e-5)
    expected = jax.jit(formula, static_argnums=0)(PLAIN, None, q, k, v)
    np.testing.assert_allclose(whole, expected, rtol=1e-5, atol=1e-5)


def test_memory_of_the_reference_in_chunks_is_linear_in_tokens():
    def temporary_bytes(length):
        arrays = draws(length=length)
        chunk = 2**18 // (2 * 4 * length)
        attention = partial(attend_in_chunks, scores=CAPPED, chunk=chunk)

        def gradients(q, k, v, gradient):
            places, seen = jnp.arange(length)[None], lambda k, v: HeadRows(k.transpose(0, 2, 3, 1), v.swapaxes(1, 2))
            call = lambda q, k, v: attention(q, seen(k, v), places, segment_ids=None)  # noqa: E731
            return jax.vjp(call, q, k, v)[1](gradient)

        return jax.jit(gradients).lower(*arrays).compile().memory_analysis().temp_size_in_bytes

    assert temporary_bytes(4096) < 2.2 * temporary_bytes(2048)


ON_A_MESH = """
import jax
import numpy as np
from jaxft.core.sharding import ROW_AXES, Sharding, make_mesh
from jaxft.models.attention import Scores
from jaxft.models.flash import PACKED_SINCE, find_spans, row_attention

def with_gradients(kernel, sharding, ids, q, k, v, gradient):
    ids = find_spans(ids) if kernel == "cudnn" else ids
    call = lambda *x: row_attention(*x, kernel=kernel, scores=Scores(0.25), segments=ids, sharding=sharding)
    mixed, pull = jax.vjp(call, q, k, v)
    return mixed, *pull(gradient)

key, ids = jax.random.key(0), np.arange(130)[None] // np.arange(20, 28)[:, None]
arrays = [jax.random.normal(jax.random.fold_in(key, i), (8, 130, n, 16)) for i, n in enumerate((4, 2, 2, 4))]
for rows, sizes in ((8, (2, 2, 2)), (8, (2, 4, 1)), (3, (1, 4, 2))):
    sharding, few = Sharding(make_mesh(*sizes)), (ids[:rows], *(x[:rows] for x in arrays))
    placed = [jax.device_put(x, sharding.cut(x.shape, ROW_AXES, None, "tensor")) for x in few[1:]]
    for kernel in ("cudnn", "splash", "pallas")[: 2 if jax.__version_info__ >= PACKED_SINCE else 3]:
        alone = jax.jit(with_gradients, static_argnums=(0, 1))(kernel, None, *few)
        spread = jax.jit(with_gradients, static_argnums=(0, 1))(kernel, sharding, few[0], *placed)
        jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=0, atol=1e-5), alone, spread)
"""


@pytest.mark.slow
@pytest.mark.parametrize("window", [None, 40])
@pytest.mark.parametrize("kernel", ["cudnn", "splash", pytest.param("pallas", marks=TRITON)])
def test_fewer_queries_than_keys_are_the_last_ones_of_their_rows(kernel, window):
    scores, segments = Scores(0.25, window=None if kernel == "pallas" else window), jnp.asarray(SEGMENTS)
    given = find_spans(segments) if kernel == "cudnn" else segments
    q, k, v, gradient = (
        jax.random.normal(jax.random.key(i), (*segments.shape, heads, 16)) for i, heads in enumerate((4, 2, 2, 4))
    )

    def last(count):
        def attention(q, k, v):
            mixed = row_attention(q[:, -count:], k, v, kernel=kernel, scores=scores, segments=given)
            return mixed[:, -60:]

        mixed, pull = jax.vjp(attention, q, k, v)
        return mixed, *pull(gradient[:, -60:])

    whole, few = jax.jit(last, static_argnums=0)(q.shape[1]), jax.jit(last, static_argnums=0)(60)
    jax.tree.map(partial(np.testing.assert_allclose, rtol=0, atol=1e-5), few, whole)


@pytest.mark.slow
def test_devices_of_a_mesh_compute_what_one_device_does():
    """Rows and heads divide over 8 devices; 3 rows do not, and are computed by all."""
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8"
    subprocess.run([sys.executable, "-c", ON_A_MESH], env=os.environ | {"XLA_FLAGS": flags}, check=True)


# --- Through a whole decoder.

NOT_CACHED = decoder_module._model.__wrapped__
"""The function that makes decoders, which gives new ones each time."""


@pytest.fixture
def forced(monkeypatch):
    """Makes a decoder of 2 layers whose attention is computed by one kernel, on a CPU."""

    def make(kernel, **options):
        choose = lambda *_, has_segments: Choice(kernel if has_segments else "xla")  # noqa: E731
        monkeypatch.setattr(block_module, "choose_kernel", choose)
        monkeypatch.setattr(flash_module, "choose_kernel", choose)
        monkeypatch.setattr(decoder_module, "_model", NOT_CACHED)  # its functions may be traced with another kernel
        return decoder(**{"config": SMALL} | options)

    return make


LENGTHS = [50, 70, 10, 20], [20, 130]
"""Tokens of the sequences of `SEGMENTS`, padding included."""


def packed_rows():
    """Tokens and positions of rows as `SEGMENTS` has them; half of the tokens are one id, as words in a text are."""
    positions = np.stack([np.concatenate([np.arange(length, dtype=np.int32) for length in row]) for row in LENGTHS])
    return np.where(positions % 2 == 0, 7, 10 + positions % 50).astype(np.int32), positions


@pytest.mark.parametrize(
    ("kernel", "window"), [pytest.param("pallas", None, marks=[TRITON, pytest.mark.slow]), ("splash", 40)]
)
def test_packed_rows_in_bfloat16_are_within_two_percent(kernel, window, forced):
    """Hidden states, which have a norm of about 6; the kernel is called in the layers."""
    config = replace(SMALL, num_layers=1, pattern=(LayerKind(window=window),))
    params = narrowed(narrowed(random_params(config), jnp.bfloat16), np.float32)

    def hidden(model):
        apply = jax.jit(lambda *given: model.apply(*given[:3], segment_ids=given[3])[0])
        return np.asarray(apply(params, *packed_rows(), SEGMENTS), np.float32)

    exact = hidden(forced("xla", config=config))
    found = hidden(forced(kernel, config=config, compute_dtype=jnp.bfloat16))
    assert (found != exact).any()
    for row, right in zip(found, exact, strict=True):
        assert np.linalg.norm(row - right) < 0.02 * np.linalg.norm(right)


def test_rows_that_cudnn_would_compute_in_part_are_not_numbers(forced):
    """Where the kernel is another one, they are computed."""
    config = replace(SMALL, num_layers=1)
    params, (tokens, positions) = random_params(config), packed_rows()
    crowded = np.arange(150) // 150 + np.minimum(np.arange(150), MOST_SEGMENTS + 1)
    for kernel, is_number in (("cudnn", [True, False]), ("xla", [True, True])):
        apply = jax.jit(forced(kernel, config=config).apply)
        hidden, _ = apply(params, tokens, positions, segment_ids=np.stack([SEGMENTS[0], crowded]).astype(np.int32))
        assert np.isfinite(hidden).all(axis=(1, 2)).tolist() == is_number
        assert np.isnan(hidden[1]).all() != is_number[1]


@pytest.mark.slow
@pytest.mark.parametrize(("kernel", "window"), [pytest.param("pallas", None, marks=TRITON), ("splash", 40)])
def test_gradients_of_packed_rows_in_bfloat16_are_within_two_percent(kernel, window, forced):
    """The gradient of each row by itself, in each leaf."""
    config = replace(SMALL, pattern=(LayerKind(window=window),))
    params = jax.jit(decoder(config).init)(jax.random.key(0))
    params = narrowed(narrowed(params, jnp.bfloat16), np.float32)

    def gradients(model):
        def loss(params, tokens, positions, segment_ids):
            scores = token_logprobs(model, params, tokens, positions=positions, segment_ids=segment_ids)
            return jnp.where(segment_ids != 0, scores.logprobs, 0.0).mean()

        gradient = jax.jit(jax.grad(loss))
        return [
            jax.device_get(gradient(params, *(table[row][None] for table in (*packed_rows(), SEGMENTS))))
            for row in range(2)
        ]

    expected = gradients(forced("xla", config=config))
    found = gradients(forced(kernel, config=config, compute_dtype=jnp.bfloat16))
    for (path, exact), leaf in zip(jax.tree.leaves_with_path(expected), jax.tree.leaves(found), strict=True):
        assert np.linalg.norm(leaf - exact) < 0.02 * np.linalg.norm(exact), path


@TRITON
def test_the_forward_kernel_is_not_repeated_where_its_result_is_saved():
    q, k, v, _ = draws(jnp.bfloat16)

    def forward_kernels(policy):
        def summed(q, k, v, segment_ids):
            call = jax.checkpoint(partial(by_kernel("pallas"), PLAIN, segment_ids), policy=policy)
            return call(q, k, v).sum()

        gradients = jax.grad(summed, argnums=(0, 1, 2))
        return str(jax.make_jaxpr(gradients)(q, k, v, SEGMENTS)).count("name=mha_forward")

    assert (forward_kernels(jax.checkpoint_policies.nothing_saveable), forward_kernels(saves_kernels)) == (2, 1)


@pytest.mark.parametrize("window", [pytest.param(None, marks=pytest.mark.slow), 40])
def test_long_rows_are_computed_in_chunks(window, monkeypatch):
    config = replace(SMALL, num_layers=1, pattern=(LayerKind(window=window),))
    params, rows = random_params(config), packed_rows()

    def hidden():
        monkeypatch.setattr(decoder_module, "_model", NOT_CACHED)  # its functions may be traced with another limit
        model = decoder(config)

        @jax.jit
        def both(params, tokens, positions, segment_ids):
            places = jnp.broadcast_to(jnp.arange(150), tokens.shape)
            packed = model.apply(params, tokens, positions, segment_ids=segment_ids)[0]
            return packed, model.apply(params, tokens, places)[0]

        return both(params, *rows, SEGMENTS)

    expected = hidden()
    monkeypatch.setattr(attention_module, "MOST_SCORES", 2 * 4 * 150 * 64)
    assert query_chunk((2, 150, 4), 150, devices=1) == 50
    for found, exact in zip(hidden(), expected, strict=True):
        np.testing.assert_allclose(found, exact, rtol=1e-5, atol=1e-5)


def test_tiles_of_the_triton_kernel_fit_the_weakest_device_and_the_heads():
    narrow, wide = (triton_tiles(width, [H100]) for width in (128, 136))
    assert narrow != wide and triton_tiles(128, [A100, H100]) == triton_tiles(64, [A100]) != narrow
    for tiles in (narrow, wide, triton_tiles(64, [A100]), triton_tiles(256, [A100])):
        *blocks, _ = tiles
        assert tiles.block_q_dq == tiles.block_kv_dkv and not any(max(blocks) % block for block in blocks)


def assert_near(found, expected):
    """Each row of each array is within two percent."""
    for one, other in zip(narrowed(found, np.float32), narrowed(expected, np.float32), strict=True):
        for row, exact in zip(one, other, strict=True):
            assert np.linalg.norm(row - exact) < 0.02 * np.linalg.norm(exact)


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [64, 80, 128, 256])
@pytest.mark.parametrize(("window", "segment_ids"), [(None, None), (30, None), (None, SEGMENTS), (30, SEGMENTS)])
def test_kernels_on_the_device_give_the_values_and_gradients_of_the_reference(window, segment_ids, head_dim):
    packed, scores = segment_ids is not None, Scores(head_dim**-0.5, window)
    choice = choose_kernel(jnp.bfloat16, head_dim, scores, jax.devices(), has_segments=packed)
    if choice.kernel == "xla":
        pytest.skip(choice.reason)
    narrow = draws(jnp.bfloat16, head_dim=head_dim)
    with jax.default_matmul_precision("highest"):
        expected = with_gradients(reference, scores, segment_ids, *narrowed(narrow, np.float32))
    assert_near(with_gradients(by_kernel(choice.kernel), scores, segment_ids, *narrow), expected)


@pytest.mark.gpu
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(16, 8, 128), (8, 8, 64), (16, 2, 64)])
@pytest.mark.parametrize("window", [None, 200])
def test_unequal_segments_of_grouped_heads_on_the_device(window, heads, kv_heads, head_dim):
    """Three segments and padding in one row, a token and the rest in another; padding has no gradient."""
    scores, real = Scores(head_dim**-0.5, window), 500 + 130 + 300
    ids = np.stack([np.repeat([1, 2, 3, 0], [500, 130, 300, 94]), np.repeat([1, 2], [1, 1023])]).astype(np.int32)
    choice = choose_kernel(jnp.bfloat16, head_dim, scores, jax.devices(), has_segments=True)
    if choice.kernel == "xla":
        pytest.skip(choice.reason)
    narrow = draws(jnp.bfloat16, length=1024, heads=heads, kv_heads=kv_heads, head_dim=head_dim)
    narrow[3][0, real:] = 0
    with jax.default_matmul_precision("highest"):
        expected = with_gradients(reference, scores, ids, *narrowed(narrow, np.float32))
    found = with_gradients(by_kernel(choice.kernel), scores, ids, *narrow)
    assert_near(found, expected)
    assert all(np.isfinite(np.asarray(each, np.float32)).all() for each in found)
    assert not any(np.asarray(each[0, real:], np.float32).any() for each in found[1:])


@pytest.mark.gpu
@pytest.mark.parametrize(("window", "packed"), [(None, False), (5, False), (None, True)])
def test_kernels_of_gpus_give_the_logprobs_of_the_reference(window, packed, forced):
    config = replace(SMALL, pattern=(LayerKind(window=window),))
    params = jax.jit(decoder(config).init)(jax.random.key(0))
    tokens = jax.random.randint(jax.random.key(1), (4, 64), 0, config.vocab_size)
    segment_ids = jnp.ones_like(tokens) if packed else None
    scores = token_logprobs(decoder(config, compute_dtype=jnp.bfloat16), params, tokens, segment_ids=segment_ids)
    exact = token_logprobs(forced("xla", config=config), params, tokens)
    assert float(jnp.abs(scores.logprobs - exact.logprobs).mean()) < 0.01
