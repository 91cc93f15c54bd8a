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
from jaxft.core.logprobs import token_logprobs
from jaxft.core.sharding import AXES, compute_devices
from jaxft.models.attention import HeadRows, Scores, attend, attend_in_chunks, query_chunk, visible_keys
from jaxft.models.config import PRESETS, LayerKind
from jaxft.models.decoder import decoder
from jaxft.models.decoder_sharding import sharding_for
from jaxft.models.flash import Choice, announce, choose_kernel, row_attention, saves_kernels, triton_tiles
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
T4, MI300 = Device("gpu", "Tesla T4", "7.5"), Device("gpu", "AMD Instinct MI300X", "gfx942")
V5E = Device("tpu", "TPU v5 lite")
PLAIN, WINDOW, CAPPED = Scores(0.25), Scores(0.25, window=30), Scores(0.4, soft_cap=2.0)
"""The scale of heads of 16, within a window, and scores of another scale that a cap of 2 changes."""


@pytest.mark.parametrize(
    ("dtype", "head_dim", "scores", "devices", "alone", "packed"),
    [
        (jnp.bfloat16, 64, PLAIN, [H100], "cudnn", "pallas"),
        (jnp.bfloat16, 80, PLAIN, [H100], "cudnn", "pallas"),
        (jnp.bfloat16, 96, PLAIN, [A100], "cudnn", "pallas"),
        (jnp.bfloat16, 64, WINDOW, [H100], "cudnn", "xla"),
        (jnp.bfloat16, 64, CAPPED, [H100], "xla", "xla"),
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
def test_a_kernel_is_chosen_where_its_conditions_hold(dtype, head_dim, scores, devices, alone, packed):
    for has_segments, expected in ((False, alone), (True, packed)):
        assert choose_kernel(jnp.dtype(dtype), head_dim, scores, devices, has_segments=has_segments).kernel == expected


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


def by_kernel(kernel):
    return lambda scores, ids, q, k, v: row_attention(q, k, v, kernel=kernel, scores=scores, segment_ids=ids)


@pytest.mark.parametrize(
    ("attention", "scores", "segment_ids"),
    [
        pytest.param(reference, Scores(0.4, 30, 2.0), SEGMENTS, id="reference, packed, window, cap"),
        pytest.param(by_kernel("cudnn"), PLAIN, None, marks=pytest.mark.slow, id="cudnn"),
        pytest.param(by_kernel("cudnn"), Scores(0.4, 30), None, id="cudnn, window, scale"),
        pytest.param(by_kernel("pallas"), PLAIN, SEGMENTS, id="pallas, packed"),
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
from jaxft.models.flash import row_attention

def with_gradients(kernel, sharding, ids, q, k, v, gradient):
    call = lambda *x: row_attention(*x, kernel=kernel, scores=Scores(0.25), segment_ids=ids, sharding=sharding)
    mixed, pull = jax.vjp(call, q, k, v)
    return mixed, *pull(gradient)

key, ids = jax.random.key(0), np.arange(130)[None] // np.arange(20, 28)[:, None]
arrays = [jax.random.normal(jax.random.fold_in(key, i), (8, 130, n, 16)) for i, n in enumerate((4, 2, 2, 4))]
for rows, sizes in ((8, (2, 2, 2)), (8, (2, 4, 1)), (3, (1, 4, 2))):
    sharding, few = Sharding(make_mesh(*sizes)), (ids[:rows], *(x[:rows] for x in arrays))
    placed = [jax.device_put(x, sharding.cut(x.shape, ROW_AXES, None, "tensor")) for x in few[1:]]
    for kernel in ("pallas", "splash"):
        alone = jax.jit(with_gradients, static_argnums=(0, 1))(kernel, None, *few)
        spread = jax.jit(with_gradients, static_argnums=(0, 1))(kernel, sharding, few[0], *placed)
        jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=0, atol=1e-5), alone, spread)
"""


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
        monkeypatch.setattr(decoder_module, "_model", NOT_CACHED)  # its functions may be traced with another kernel
        return decoder(**{"config": SMALL} | options)

    return make


LENGTHS = [50, 70, 10, 20], [20, 130]
"""Tokens of the sequences of `SEGMENTS`, padding included."""


def packed_rows():
    """Tokens and positions of rows as `SEGMENTS` has them; half of the tokens are one id, as words in a text are."""
    positions = np.stack([np.concatenate([np.arange(length, dtype=np.int32) for length in row]) for row in LENGTHS])
    return np.where(positions % 2 == 0, 7, 10 + positions % 50).astype(np.int32), positions


@pytest.mark.parametrize(("kernel", "window"), [pytest.param("pallas", None, marks=pytest.mark.slow), ("splash", 40)])
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


@pytest.mark.slow
@pytest.mark.parametrize(("kernel", "window"), [("pallas", None), ("splash", 40)])
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
    found = with_gradients(by_kernel(choice.kernel), scores, segment_ids, *narrow)
    for one, other in zip(narrowed(found, np.float32), narrowed(expected, np.float32), strict=True):
        for row, exact in zip(one, other, strict=True):
            assert np.linalg.norm(row - exact) < 0.02 * np.linalg.norm(exact)


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
