"""Attention over pages: as a plain softmax in numpy, and nothing but the tokens of a row changes its bits."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxft.models.attention import Scores
from jaxft.models.paged import (
    LayerPages,
    PagedRows,
    attend_reference,
    choose_paged_kernel,
    init_pages,
    write_and_attend,
    write_token,
    write_tokens,
)
from tests.models.weights import narrowed

HEADS, KV_HEADS, WIDTH = 4, 2, 16
COLUMNS = 4
PLAIN = Scores(WIDTH**-0.5)
GARBAGE = 10**6
"""A page number behind the last page of a row, of a page that does not exist."""

both_layouts = pytest.mark.parametrize("axis", [0, 1], ids=["pages first", "heads first"])
attend = jax.jit(lambda q, *given: attend_reference(jnp.asarray(q), *given), static_argnums=(3, 4))
write_one = jax.jit(write_token, static_argnums=4)
write_many = jax.jit(write_tokens, static_argnums=4)


def draw(seed, *shape):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def keys_and_values(lengths):
    """Keys and values `[n K h]` of each row; those of a row depend on its number alone."""
    return [draw(100 + row, 2, length, KV_HEADS, WIDTH) for row, length in enumerate(lengths)]


def shuffled_tables(lengths, seed=0, columns=COLUMNS):
    """Tables whose pages lie anywhere among more than there are rows for."""
    tables = np.random.default_rng(seed).permutation(len(lengths) * columns + 3)[: len(lengths) * columns]
    tables = tables.reshape(len(lengths), columns).astype(np.int32)
    for row, length in enumerate(lengths):
        tables[row, -(-length // 64) :] = GARBAGE
    return tables


def filled_pages(rows, tables, axis, unused=np.nan):
    """Pages that hold the keys and values of each row, written without jax; everything else is `unused`."""
    pages = len(tables) * COLUMNS + 3
    keys, values = (np.full((pages, KV_HEADS, 64, WIDTH), unused, np.float32) for _ in range(2))
    for (row_keys, row_values), table in zip(rows, tables, strict=True):
        for place in range(len(row_keys)):
            keys[table[place // 64], :, place % 64] = row_keys[place]
            values[table[place // 64], :, place % 64] = row_values[place]
    return in_layout(keys, values, axis)


def in_layout(keys, values, axis):
    """Pages `[N K P h]` as `LayerPages` has them."""
    if axis == 0:
        return jax.device_put(LayerPages(keys.swapaxes(2, 3), values))
    return jax.device_put(LayerPages(keys.swapaxes(0, 1), values.swapaxes(0, 1)))


def plain_softmax(q, keys, values, position, scores):
    """Attention of one token `[H h]` to the tokens of its row up to its position, in float64."""
    first = 0 if scores.window is None else max(0, position + 1 - scores.window)
    keys, values = (np.repeat(x[first : position + 1].astype(np.float64), HEADS // KV_HEADS, 1) for x in (keys, values))
    scored = np.einsum("hd,shd->hs", q.astype(np.float64), keys) * scores.scale
    if scores.soft_cap is not None:
        scored = scores.soft_cap * np.tanh(scored / scores.soft_cap)
    weights = np.exp(scored - scored.max(axis=-1, keepdims=True))
    return np.einsum("hs,shd->hd", weights / weights.sum(axis=-1, keepdims=True), values)


def ragged(lengths, tokens):
    """Rows whose last tokens, `tokens` or fewer from the first place of a page on, are those of a call."""
    lengths = np.array(lengths)
    starts = lengths - 1 if tokens == 1 else np.maximum(lengths - 1, 0) // 64 * 64
    return np.maximum(starts, 0).astype(np.int32), (lengths - np.maximum(starts, 0)).astype(np.int32)


RAGGED = [200, 1, 0, 64, 65, 128, 256]
"""Tokens of each row; the third is idle, and the last fills its table."""


CAPPED = Scores(0.4, 100, 2.0)


@pytest.mark.parametrize(
    ("axis", "scores", "tokens"),
    [
        *((0, scores, 1) for scores in (PLAIN, *(Scores(PLAIN.scale, window) for window in (1, 40, 100)), CAPPED)),
        (0, PLAIN, 64),
        (0, Scores(0.4, 40, 2.0), 64),
        (1, PLAIN, 1),
        (1, CAPPED, 1),
        (1, CAPPED, 64),
    ],
    ids=str,
)
def test_attention_is_a_plain_softmax_over_the_tokens_of_the_row(axis, scores, tokens):
    """Unused pages, and places behind a row's last token, hold NaN."""
    rows, tables = keys_and_values(RAGGED), shuffled_tables(RAGGED)
    q = draw(1, len(RAGGED), tokens, HEADS, WIDTH)
    starts, counts = ragged(RAGGED, tokens)
    mixed = attend(q, filled_pages(rows, tables, axis), PagedRows(tables, starts, counts), scores, axis)
    mixed = np.asarray(mixed)
    assert mixed.dtype == np.float32 and np.isfinite(mixed).all()
    compared = 0
    for row, (start, count) in enumerate(zip(starts.tolist(), counts.tolist(), strict=True)):
        for token in range(count):
            expected = plain_softmax(q[row, token], *rows[row], start + token, scores)
            np.testing.assert_allclose(mixed[row, token], expected, rtol=0, atol=2e-6)
            compared += 1
    assert compared == sum(counts.tolist()) and compared >= len(RAGGED) - 1
    np.testing.assert_array_equal(mixed[2], 0)  # of the idle row


@both_layouts
def test_a_call_may_begin_after_earlier_pages_and_span_several(axis):
    """Two pages of tokens after one or none, some rows with fewer."""
    lengths, starts = [192, 150, 128, 65, 64], np.array([64, 64, 0, 64, 64], np.int32)
    rows, tables = keys_and_values(lengths), shuffled_tables(lengths)
    counts = np.array(lengths, np.int32) - starts  # none in the last row
    q = draw(1, len(lengths), 128, HEADS, WIDTH)
    mixed = attend(q, filled_pages(rows, tables, axis), PagedRows(tables, starts, counts), PLAIN, axis)
    mixed = np.asarray(mixed)
    for row, (start, count) in enumerate(zip(starts, counts, strict=True)):
        for token in {0, 1, 63, 64, count - 1} & set(range(count)):
            expected = plain_softmax(q[row, token], *rows[row], start + token, PLAIN)
            np.testing.assert_allclose(mixed[row, token], expected, rtol=0, atol=2e-6)
    np.testing.assert_array_equal(mixed[4], 0)


@both_layouts
def test_bfloat16_is_rounded_after_sums_in_float32(axis):
    rows, tables = keys_and_values(RAGGED), shuffled_tables(RAGGED)
    q = draw(1, len(RAGGED), 1, HEADS, WIDTH)
    pages = filled_pages(rows, tables, axis)
    q, pages = narrowed((q, pages), jnp.bfloat16)
    q64, rows = q.astype(np.float64), narrowed(narrowed(rows, jnp.bfloat16), np.float64)
    mixed = np.asarray(attend(q, jax.device_put(pages), PagedRows(tables, *ragged(RAGGED, 1)), PLAIN, axis))
    assert mixed.dtype == jnp.bfloat16
    for row in (0, 1, 3, 4, 5, 6):
        expected = plain_softmax(q64[row, 0], *rows[row], RAGGED[row] - 1, PLAIN)
        # Weights and result have 8 bits each.
        np.testing.assert_allclose(np.asarray(mixed[row, 0], np.float64), expected, rtol=0.01, atol=0.01)


# --- What changes no bit of a row.


def test_the_lanes_that_pad_heads_change_no_bit():
    """Pages on TPUs have 128 lanes; those behind the width of a head are never read."""
    rows, tables = keys_and_values(RAGGED), shuffled_tables(RAGGED)
    pages, q = filled_pages(rows, tables, axis=1), draw(1, len(RAGGED), 1, HEADS, WIDTH)
    number = len(RAGGED) * COLUMNS + 3
    empty = jax.eval_shape(lambda: init_pages(number, KV_HEADS, WIDTH, jnp.float32, "tpu"))

    def pad(page, lanes):
        return jax.device_put(np.pad(page, [(0, 0)] * 3 + [(0, lanes.shape[-1] - WIDTH)], constant_values=np.nan))

    padded = jax.tree.map(pad, pages, empty)
    of_call = PagedRows(tables, *ragged(RAGGED, 1))
    np.testing.assert_array_equal(attend(q, padded, of_call, PLAIN, 1), attend(q, pages, of_call, PLAIN, 1))


@both_layouts
def test_rows_may_read_the_same_pages(axis):
    rows = keys_and_values([130])
    tables = shuffled_tables([130])
    pages, q = filled_pages(rows, tables, axis), draw(1, 1, 1, HEADS, WIDTH)
    starts, counts = np.array([63, 127, 129, 129], np.int32), np.ones(4, np.int32)
    shared = PagedRows(np.repeat(tables, 4, axis=0), starts, counts)
    mixed = np.asarray(attend(np.repeat(q, 4, axis=0), pages, shared, PLAIN, axis))
    np.testing.assert_array_equal(mixed[2], mixed[3])
    for row in range(3):
        expected = plain_softmax(q[0, 0], *rows[0], int(starts[row]), PLAIN)
        np.testing.assert_allclose(mixed[row, 0], expected, rtol=0, atol=2e-6)


# --- Writing.


@both_layouts
def test_a_token_is_written_to_its_place_and_nowhere_else(axis):
    rows = keys_and_values(RAGGED)
    tables = shuffled_tables(RAGGED)
    tables[2] = tables[0]  # what the idle row wrote would stand in the pages of another
    starts, counts = ragged(RAGGED, 1)
    without_last = [(keys[:-1], values[:-1]) for keys, values in rows]
    k, v = (np.stack([row[i][-1:] if row[i].size else draw(9, 1, KV_HEADS, WIDTH) for row in rows]) for i in (0, 1))
    written = write_one(
        filled_pages(without_last, tables, axis, unused=7.0), k, v, PagedRows(tables, starts, counts), axis
    )
    jax.tree.map(np.testing.assert_array_equal, written, filled_pages(rows, tables, axis, unused=7.0))


@both_layouts
def test_tokens_are_written_page_by_page_and_pages_without_one_stay(axis):
    lengths, starts = [192, 150, 128, 65, 64, 0], np.array([64, 64, 0, 64, 64, 0], np.int32)
    counts = np.array(lengths, np.int32) - starts
    rows, tables = keys_and_values(lengths), shuffled_tables(lengths)
    before = [(keys[:start], values[:start]) for (keys, values), start in zip(rows, starts, strict=True)]
    k, v = draw(8, 2, len(lengths), 128, KV_HEADS, WIDTH)  # also of padding
    for row, (keys, values) in enumerate(rows):
        k[row, : counts[row]], v[row, : counts[row]] = keys[starts[row] :], values[starts[row] :]
    written = write_many(filled_pages(before, tables, axis, unused=7.0), k, v, PagedRows(tables, starts, counts), axis)
    expected = filled_pages(rows, tables, axis, unused=7.0)
    for found, wanted in zip(written[:2], expected[:2], strict=True):
        found, wanted = (np.moveaxis(np.asarray(x), axis, 0) for x in (found, wanted))
        touched = [(1, 2), (3, 1)]  # rows whose last page is not full, and its column
        kept = np.setdiff1d(np.arange(len(found)), [tables[place] for place in touched])
        np.testing.assert_array_equal(found[kept], wanted[kept])
        assert np.isfinite(found).all()
    # Of the touched ones every place up to the last token.
    mixed = attend(draw(1, 6, 1, HEADS, WIDTH), written, PagedRows(tables, *ragged(lengths, 1)), PLAIN, axis)
    again = attend(draw(1, 6, 1, HEADS, WIDTH), expected, PagedRows(tables, *ragged(lengths, 1)), PLAIN, axis)
    np.testing.assert_array_equal(mixed, again)


@pytest.mark.parametrize(("axis", "window"), [(0, None), (0, 50), (1, 50)])
def test_several_tokens_at_once_are_the_same_as_token_by_token(axis, window):
    counts = np.array([100, 0, 64, 1], np.int32)
    drawn = draw(1, 4, 100, HEADS, WIDTH), *draw(2, 2, 4, 100, KV_HEADS, WIDTH)
    tables, starts = shuffled_tables([100] * 4), np.zeros(4, np.int32)
    scores = Scores(PLAIN.scale, window)

    @jax.jit
    def both_ways(q, k, v):
        empty = init_pages(19, KV_HEADS, WIDTH, jnp.float32, ("cpu", "gpu")[axis])
        empty = jax.tree.map(lambda x: jnp.full_like(x, jnp.nan), empty)
        pages = write_tokens(empty, k, v, PagedRows(tables, starts, counts), axis)
        at_once = attend_reference(q, pages, PagedRows(tables, starts, counts), scores, axis)

        def step(pages, token):
            rows = PagedRows(tables, starts + token, (token < counts).astype(jnp.int32))
            here = [jax.lax.dynamic_slice_in_dim(x, token, 1, axis=1) for x in (q, k, v)]
            pages = write_token(pages, *here[1:], rows, axis)
            return pages, attend_reference(here[0], pages, rows, scores, axis)[:, 0]

        return at_once, jax.lax.scan(step, empty, jnp.arange(100))[1].swapaxes(0, 1)

    is_real = np.arange(100) < counts[:, None]
    at_once, one_by_one = (np.asarray(mixed)[is_real] for mixed in both_ways(*drawn))
    np.testing.assert_allclose(one_by_one, at_once, rtol=0, atol=1e-6)


@pytest.mark.parametrize("dtype", [np.float32, jnp.float8_e4m3fn])
def test_the_layer_writes_and_attends_in_the_layout_of_the_device(dtype):
    """In fp8, which has no infinity, the largest numbers are cut to 448."""
    counts, tables, starts = np.array([70, 128], np.int32), shuffled_tables([71, 129]), np.zeros(2, np.int32)
    q, k, v = draw(1, 2, 128, HEADS, WIDTH), *draw(2, 2, 2, 128, KV_HEADS, WIDTH)
    k[0, 3, 0, 0] = -500

    @jax.jit
    def two_calls(q, k, v, rows, row):
        pages = init_pages(11, KV_HEADS, WIDTH, dtype, "cpu")
        mixed, pages = write_and_attend(q, k, v, pages, rows, PLAIN, None)
        return mixed, write_and_attend(q[:, :1], k[:, :1], v[:, :1], pages, row, PLAIN, None)[0]

    row = PagedRows(tables, counts, np.ones(2, np.int32))  # one token more in each
    mixed, more = map(np.asarray, two_calls(q, k, v, PagedRows(tables, starts, counts), row))
    if dtype != np.float32:
        k, v = (np.clip(x, -448, 448).astype(dtype).astype(np.float32) for x in (k, v))
    for i, count in enumerate(counts):
        found = np.concatenate([mixed[i, :count], more[i]])
        queries, keys, values = (np.concatenate([x[i, :count], x[i, :1]]) for x in (q, k, v))
        for token in (0, 63, 64, count - 1, count):
            expected = plain_softmax(queries[token], keys, values, token, PLAIN)
            np.testing.assert_allclose(found[token], expected, rtol=0, atol=2e-6)


@dataclass(frozen=True, eq=False)
class Device:
    """The attributes of a device that tell its abilities; only GPUs have a `compute_capability`."""

    platform: str
    device_kind: str
    compute_capability: str | None = None


H100, T4 = Device("gpu", "NVIDIA H100", "9.0"), Device("gpu", "Tesla T4", "7.5")
MI300, V5E = Device("gpu", "AMD Instinct MI300X", "gfx942"), Device("tpu", "TPU v5 lite")


@pytest.mark.parametrize(
    ("dtype", "devices", "kernel"),
    [
        (jnp.bfloat16, [H100, H100], "triton"),
        (jnp.float32, [H100], "triton"),
        (jnp.float64, [H100], "reference"),
        (jnp.bfloat16, [H100, T4], "reference"),
        (jnp.bfloat16, [MI300], "reference"),
        (jnp.bfloat16, [V5E], "mosaic"),
        (jnp.float32, [V5E], "mosaic"),
        (jnp.float16, [V5E], "reference"),
        (jnp.bfloat16, jax.devices("cpu"), "reference"),
    ],
)
def test_a_kernel_is_chosen_where_all_devices_can_run_it(dtype, devices, kernel):
    assert choose_paged_kernel(dtype, devices) == kernel


# --- A decoder.
