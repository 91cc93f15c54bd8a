"""Attention to a paged cache: both kernels, interpreted, give the values of attention computed in numpy's float64."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxft.core.cache import find_shared_pages, own_tables
from jaxft.models.attention import Scores
from jaxft.models.paged import (
    PagedRows,
    attend_reference,
    choose_paged_kernel,
    init_pages,
    write_and_attend,
    write_token,
    write_tokens,
)
from jaxft.models.paged_kernels import attend_gpu, write_and_attend_gpu
from jaxft.models.paged_kernels_tpu import attend_tpu, plan_steps

KERNELS = {name: jax.jit(partial(f, interpret=True), static_argnames="scores") for name, f in
           {"gpu": attend_gpu, "tpu": attend_tpu}.items()}  # fmt: skip
write_and_attend_in_one = jax.jit(partial(write_and_attend_gpu, interpret=True), static_argnames="scores")
PAGE, COLUMNS, PAGES = 64, 4, 18
PLAIN = Scores(64**-0.5)
EPSILON = {"bfloat16": 2**-8, "float32": 2**-20}
"""Relative error of a product: weights and results are rounded to bfloat16; float32 rounds sums of 256 terms."""


def draw(length, groups, dtype, kv_heads=2, head_dim=64, seed=0):
    """Arguments of a kernel: rows of ragged lengths, the third one idle, on shuffled pages.

    All that no row holds is NaN, and columns after a row's last page name a page that is NaN.
    """
    draws = np.random.default_rng(seed)
    starts = np.array([100, 0, 70, 255 - length], np.int32)
    counts = np.array([max(1, length - 3), length, 0, length], np.int32)
    keys, values = (np.full((kv_heads, PAGES, PAGE, head_dim), np.nan, np.float32) for _ in range(2))
    tables = np.zeros((4, COLUMNS), np.int32)
    numbers = iter(draws.permutation(np.arange(1, PAGES)))
    for row, (start, count) in enumerate(zip(starts, counts, strict=True)):
        end = start + count if count else 0
        for column in range(-(-end // PAGE)):
            tables[row, column] = next(numbers)
            real = min(PAGE, end - column * PAGE)
            for pool in (keys, values):
                pool[:, tables[row, column], :real] = draws.normal(size=(kv_heads, real, head_dim))
    q = draws.normal(size=(4, length, kv_heads * groups, head_dim))
    return [x.astype(jnp.dtype(dtype)) for x in (q, keys, values)] + [tables, starts, counts]


def sinks_of(scores, heads):
    """A score of nothing for each head, if there are such, from far below the scores of keys to far above."""
    return np.linspace(-9, 9, heads, dtype=np.float32) if scores.has_sinks else None


def attend_in_float64(q, keys, values, tables, starts, counts, scores):
    """Attention query by query; NaN for queries that a row does not have."""
    sinks = sinks_of(scores, q.shape[2])
    q, keys, values = (np.asarray(x, np.float64) for x in (q, keys, values))
    heads, kv_heads, head_dim = q.shape[2], keys.shape[0], q.shape[3]
    mixed = np.full(q.shape, np.nan)
    for row, head in np.ndindex(q.shape[0], heads):
        k, v = (x[head // (heads // kv_heads), tables[row]].reshape(-1, head_dim) for x in (keys, values))
        for t in range(int(counts[row])):
            end = int(starts[row]) + t + 1
            seen = slice(0 if scores.window is None else max(0, end - scores.window), end)
            scored = k[seen] @ q[row, t, head] * scores.scale
            if scores.soft_cap is not None:
                scored = scores.soft_cap * np.tanh(scored / scores.soft_cap)
            weights = np.exp(scored - scored.max())
            nothing = 0 if sinks is None else np.exp(sinks[head] - scored.max())
            mixed[row, t, head] = weights @ v[seen] / (weights.sum() + nothing)
    return mixed


CASES = [
    # queries, key/value heads, heads of a group, scores, dtype, head width; the TPU kernel loads 4 pages a step of 2
    # heads, and 2 of 8
    (1, 2, 2, Scores(64**-0.5), "bfloat16", 64),
    (1, 8, 1, Scores(128**-0.5), "float32", 128),
    (1, 8, 4, Scores(64**-0.5, 70), "float32", 64),
    (1, 2, 7, Scores(0.2, 70, 2.0), "float32", 80),
    (16, 8, 2, Scores(64**-0.5), "float32", 64),
    (16, 2, 4, Scores(128**-0.5, 20), "bfloat16", 128),
    (16, 8, 1, Scores(64**-0.5, 70), "float32", 64),
    (16, 1, 5, Scores(0.1, 20, 2.0, True), "float32", 256),
]


DEFAULT = {"gpu": (2, 5, 7), "tpu": (2, 3, 4, 7)}
"""Numbers of the cases in the default tests, which have every length, option, dtype and number of heads."""
ONE_QUERY = CASES[2]
"""A case that other tests share, so that its programs are compiled once."""


@pytest.mark.parametrize(
    ("name", "length", "kv_heads", "groups", "scores", "dtype", "head_dim"),
    [
        pytest.param(name, *case, marks=[] if number in DEFAULT[name] else [pytest.mark.slow])
        for name in KERNELS
        for number, case in enumerate(CASES)
    ],
)
def test_kernels_give_the_values_of_plain_attention(name, length, kv_heads, groups, scores, dtype, head_dim):
    arguments = draw(length, groups, dtype, kv_heads, head_dim)
    mixed = np.asarray(KERNELS[name](*arguments, sinks_of(scores, kv_heads * groups), scores=scores), np.float32)
    wanted = attend_in_float64(*arguments, scores)
    is_real = ~np.isnan(wanted)
    np.testing.assert_allclose(mixed[is_real], wanted[is_real], rtol=0, atol=4 * EPSILON[dtype])
    assert np.isfinite(mixed).all()  # queries that pad a row too
    assert not mixed[2].any()  # the idle row


@pytest.mark.parametrize("name", KERNELS)
def test_a_pool_in_fp8_is_widened(name):
    length, kv_heads, groups, scores, dtype, head_dim = CASES[0]
    q, *pool, tables, starts, counts = draw(length, groups, dtype, kv_heads, head_dim)
    pool = [x.astype(jnp.float8_e4m3fn) for x in pool]
    mixed = np.asarray(KERNELS[name](q, *pool, tables, starts, counts, scores=scores), np.float32)
    wanted = attend_in_float64(q, *pool, tables, starts, counts, scores)
    is_real = ~np.isnan(wanted)
    np.testing.assert_allclose(mixed[is_real], wanted[is_real], rtol=0, atol=4 * EPSILON[dtype])


@pytest.mark.parametrize(("kv_heads", "groups", "scores", "dtype", "head_dim"), [
    (2, 2, Scores(64**-0.5), "bfloat16", 64), (1, 3, Scores(0.2, 70, 2.0, True), "float32", 96),
    pytest.param(2, 1, Scores(64**-0.5, 1), "float32", 64, marks=pytest.mark.slow),
])  # fmt: skip
def test_the_gpu_kernel_writes_the_key_that_it_attends_to(kv_heads, groups, scores, dtype, head_dim):
    """The first row begins a page, the second its sequence; the third is idle."""
    q, keys, values, tables, _, counts = draw(1, groups, dtype, kv_heads, head_dim)
    starts = np.array([64, 0, 70, 254], np.int32)
    for pool in (keys, values):
        pool[:, tables[:1, 1]] = pool[:, tables[:1, 0]]
    real, places = np.flatnonzero(counts), (tables[np.arange(4), starts // PAGE], starts % PAGE)
    at = slice(None), *(x[real] for x in places)
    k, v = (np.full((4, 1, kv_heads, head_dim), np.nan, q.dtype) for _ in range(2))
    unwritten = [keys.copy(), values.copy()]
    for x, pool, without in zip((k, v), (keys, values), unwritten, strict=True):
        x[real, 0] = pool[at].swapaxes(0, 1)
        without[at] = np.nan
    sinks = sinks_of(scores, kv_heads * groups)
    mixed, *written = write_and_attend_in_one(q, k, v, *unwritten, tables, starts, counts, sinks=sinks, scores=scores)
    wanted = attend_in_float64(q, keys, values, tables, starts, counts, scores)
    mixed = np.asarray(mixed, np.float32)
    np.testing.assert_allclose(mixed[real], wanted[real], rtol=0, atol=4 * EPSILON[dtype])
    assert not mixed[2].any()
    for pool, expected in zip(written, (keys, values), strict=True):
        np.testing.assert_array_equal(np.asarray(pool, np.float32), expected.astype(np.float32))


SIZES = (16, 1, 2, 7, 3)
"""Rows that begin with the same pages; the rows after them begin with pages of their own."""


def draw_shared(groups, dtype, seed, kv_heads=2, head_dim=64, rows=32, columns=6):
    """Arguments of `write_and_attend_gpu` for rows in any order that share 1 to 3 pages, idle ones among them.

    All that no row holds is NaN, and so is the key that each row is about to write. Also the pool that has it.
    """
    draws = np.random.default_rng(seed)
    numbers = iter(draws.permutation(rows * columns))
    tables, starts = np.full((rows, columns), rows * columns - 1, np.int32), np.zeros(rows, np.int32)
    keys, values = (np.full((kv_heads, rows * columns, PAGE, head_dim), np.nan, np.float32) for _ in range(2))
    order, begin = draws.permutation(rows), 0
    for size in (*SIZES, *[1] * (rows - sum(SIZES))):
        beginning = [next(numbers) for _ in range(draws.integers(0 if size == 1 else 1, 4))]
        for row in order[begin : begin + size]:
            starts[row] = len(beginning) * PAGE + draws.integers(0, 2 * PAGE + 1)
            own = [next(numbers) for _ in range(starts[row] // PAGE + 1 - len(beginning))]
            tables[row, : len(beginning) + len(own)] = beginning + own
        begin += size
    counts = (draws.random(rows) > 0.2).astype(np.int32)
    for row, start in enumerate(starts):
        for column in range(start // PAGE + 1):
            at = slice(None), tables[row, column], slice(0, min(PAGE, start + 1 - column * PAGE))
            for pool in (keys, values):
                if np.isnan(pool[at][:, -1]).any():
                    pool[at] = draws.normal(size=pool[at].shape)
    q = draws.normal(size=(rows, 1, kv_heads * groups, head_dim))
    places = tables[np.arange(rows), starts // PAGE], starts % PAGE
    k, v = (pool[:, *places].swapaxes(0, 1)[:, None].copy() for pool in (keys, values))
    unwritten = [pool.copy() for pool in (keys, values)]
    for pool in unwritten:
        pool[:, *places] = np.nan
    q, k, v, keys, values, *unwritten = (x.astype(jnp.dtype(dtype)) for x in (q, k, v, keys, values, *unwritten))
    return (q, k, v, *unwritten, tables, starts, counts), (keys, values)


@pytest.mark.parametrize(("groups", "scores", "head_dim", "seed"), [
    (2, Scores(64**-0.5), 64, 0), (5, Scores(0.2, None, 2.0, True), 80, 1),
    pytest.param(8, Scores(128**-0.5), 128, 2, marks=pytest.mark.slow),
    pytest.param(16, Scores(64**-0.5), 64, 3, marks=pytest.mark.slow),
    pytest.param(2, Scores(64**-0.5, 70), 64, 4, marks=pytest.mark.slow),
])  # fmt: skip
def test_shared_pages_are_attended_to_once_for_all_rows(groups, scores, head_dim, seed):
    """In groups of 1 to 16 rows; with a window each row reads its own."""
    (q, k, v, *unwritten, tables, starts, counts), pool = draw_shared(groups, "bfloat16", seed, head_dim=head_dim)
    shared = find_shared_pages(tables, starts // PAGE)
    sizes = sorted((shared.rows < len(q)).sum(axis=1)[shared.columns > 0].tolist())
    assert sizes == [2, 3, 7, 16] and (shared.own > 0).sum() == sum(sizes)
    given = {"scores": scores, "shared": shared, "sinks": sinks_of(scores, 2 * groups)}
    mixed, *written = write_and_attend_in_one(q, k, v, *unwritten, tables, starts, counts, **given)
    wanted = attend_in_float64(q, *pool, tables, starts, counts, scores)
    mixed, real = np.asarray(mixed, np.float32), np.flatnonzero(counts)
    np.testing.assert_allclose(mixed[real], wanted[real], rtol=0, atol=4 * EPSILON["bfloat16"])
    assert not mixed[counts == 0].any()
    places = tables[real, starts[real] // PAGE], starts[real] % PAGE
    for found, expected in zip(written, pool, strict=True):
        np.testing.assert_array_equal(*(np.asarray(x, np.float32)[:, *places] for x in (found, expected)))


def test_rows_that_share_no_page_have_the_bits_that_they_have_without_sets():
    (*arguments, tables, starts, counts), _ = draw_shared(2, "bfloat16", 0)
    given = *arguments, tables, starts, counts
    plain, *_ = write_and_attend_in_one(*given, scores=Scores(64**-0.5))
    shared = find_shared_pages(tables, starts // PAGE)
    mixed, *_ = write_and_attend_in_one(*given, scores=Scores(64**-0.5), shared=shared)
    alone = shared.own == 0
    np.testing.assert_array_equal(np.asarray(mixed)[alone], np.asarray(plain)[alone])


@pytest.mark.gpu
@pytest.mark.parametrize("scores", [Scores(0.1), Scores(0.1, 70), Scores(0.1, 70, 2.0)], ids=str)
@pytest.mark.parametrize("head_dim", [64, 80, 128, 256])
def test_kernels_on_the_device_decode_as_the_reference_does(head_dim, scores):
    """Seventy tokens of four rows, one after another in a loop whose pages are donated; the third row is idle."""
    tokens, dtype = 70, jnp.bfloat16
    drawn = np.random.default_rng(0).normal(size=(3, tokens, 4, 1, 8, head_dim))
    q, k, v = (jnp.asarray(x, dtype) for x in drawn)
    k, v = k[:, :, :, :2], v[:, :, :, :2]
    tables, begins, counts = (jnp.asarray(x, jnp.int32) for x in (own_tables(4, 3), [0, 60, 0, 100], [1, 1, 0, 1]))

    def decode(write_and_attend, pages):
        def step(pages, at):
            token, *here = at
            mixed, pages = write_and_attend(*here, pages, PagedRows(tables, begins + token, counts))
            return pages, mixed

        return jax.lax.scan(step, pages, (jnp.arange(tokens), q, k, v))

    def by_reference(q, k, v, pages, rows):
        pages = write_token(pages, k, v, rows, 1)
        return attend_reference(q, pages, rows, scores, 1), pages

    by_kernel = partial(write_and_attend, scores=scores, sharding=None)
    assert choose_paged_kernel(dtype, jax.devices()[:1]) != "reference"
    results = []
    for function in (by_kernel, by_reference):
        empty = init_pages(12, 2, head_dim, dtype, jax.default_backend())
        pages, mixed = jax.jit(partial(decode, function), donate_argnums=0)(empty)
        results.append((np.asarray(mixed, np.float32)[:, [0, 1, 3]], *(np.asarray(x, np.float32) for x in pages)))
    (mixed, *pages), (expected, *written) = results
    np.testing.assert_allclose(mixed, expected, rtol=0, atol=4 * EPSILON["bfloat16"])
    for one, other in zip(pages, written, strict=True):
        np.testing.assert_array_equal(one, other)


def test_the_gpu_kernel_takes_any_width_and_group():
    arguments = draw(2, 3, "float32", kv_heads=1, head_dim=96)
    mixed, wanted = KERNELS["gpu"](*arguments, scores=PLAIN), attend_in_float64(*arguments, PLAIN)
    is_real = ~np.isnan(wanted)
    np.testing.assert_allclose(np.asarray(mixed)[is_real], wanted[is_real], rtol=0, atol=4 * EPSILON["float32"])


@pytest.mark.parametrize("name", [pytest.param("gpu", marks=pytest.mark.slow), "tpu"])
def test_a_pool_may_be_wider_than_heads(name):
    q, keys, values, *rows = draw(1, 2, "float32")
    wide = [np.pad(x, [(0, 0), (0, 0), (0, 0), (0, 64)]) for x in (keys, values)]
    mixed, wanted = KERNELS[name](q, *wide, *rows, scores=PLAIN), attend_in_float64(q, keys, values, *rows, PLAIN)
    is_real = ~np.isnan(wanted)
    np.testing.assert_allclose(np.asarray(mixed)[is_real], wanted[is_real], rtol=0, atol=4 * EPSILON["float32"])


@pytest.mark.parametrize("name", KERNELS)
def test_blocks_of_queries_do_not_differ_from_single_ones(name):
    """512 rows of a tile are two blocks on TPUs and four on GPUs; the second row has queries in the first only."""
    arguments = draw(128, 4, "float32", kv_heads=1)
    q, *pool, starts, counts = arguments
    counts, scores = np.where(np.arange(4) == 1, 5, counts).astype(np.int32), PLAIN._replace(window=70)
    mixed, wanted = KERNELS[name](q, *pool, starts, counts, scores=scores), attend_in_float64(*arguments, scores)
    is_real = (np.arange(128) < np.asarray(counts)[:, None]) & ~np.isnan(wanted[:, :, 0, 0])
    np.testing.assert_allclose(np.asarray(mixed)[is_real], wanted[is_real], rtol=0, atol=4 * EPSILON["float32"])


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("case", [ONE_QUERY, pytest.param(CASES[4], marks=pytest.mark.slow)], ids=["1", "16"])
def test_a_row_has_the_same_bits_alone_and_among_others(name, case):
    length, kv_heads, groups, scores, dtype, head_dim = case
    q, keys, values, *rows = draw(length, groups, dtype, kv_heads, head_dim)
    together = np.asarray(KERNELS[name](q, keys, values, *rows, scores=scores))
    for row in range(4):
        alone = KERNELS[name](q[row : row + 1], keys, values, *(x[row : row + 1] for x in rows), scores=scores)
        np.testing.assert_array_equal(np.asarray(alone)[0], together[row])


@pytest.mark.parametrize("name", [*KERNELS, "reference"])
def test_chunks_of_a_prompt_see_each_other_in_one_program(name):
    """Three rows of one table, whose keys are written at once, are one prompt; the last row is another."""
    draws, length, end = np.random.default_rng(3), PAGE, 2 * PAGE + 10
    q, k, v = draws.normal(size=(3, 4, length, 4, 64)).astype(np.float32)
    k, v = k[:, :, :2], v[:, :, :2]
    tables = np.array([[7, 2, 5]] * 3 + [[4, 0, 0]], np.int32)
    rows = PagedRows(tables, np.array([0, 64, 128, 0], np.int32), np.array([64, 64, 10, 30], np.int32))

    @jax.jit
    def write_and_see(q, k, v, pages, rows):
        pages = write_tokens(pages, k, v, rows, 1)
        if name == "reference":
            return attend_reference(q, pages, rows, PLAIN, 1)
        return KERNELS[name](q, pages.keys, pages.values, *rows[:3], scores=PLAIN)

    empty = jax.tree.map(lambda x: jnp.full_like(x, jnp.nan), init_pages(8, 2, 64, jnp.float32, "gpu"))
    mixed = np.asarray(write_and_see(q, k, v, empty, rows))
    joined = [x[:3].reshape(1, -1, *x.shape[2:])[:, :end] for x in (q, k, v)]
    pool = [np.pad(x[0], ((0, -end % PAGE), (0, 0), (0, 0))).reshape(3, PAGE, 2, 64).transpose(2, 0, 1, 3) for x in
            joined[1:]]  # fmt: skip
    wanted = attend_in_float64(joined[0], *pool, np.arange(3)[None], [0], [end], PLAIN)[0]
    found = mixed[:3].reshape(-1, *mixed.shape[2:])[:end]
    np.testing.assert_allclose(found, wanted, rtol=0, atol=4 * EPSILON["float32"])
    assert np.isfinite(mixed[3, :30]).all()


def test_steps_load_each_page_that_is_seen_once():
    *_, tables, starts, counts = draw(16, 1, "float32")
    for window, step_pages in [(None, 1), (None, 3), (40, 2)]:
        plan = jax.jit(plan_steps, static_argnums=range(3, 8))  # compiled once, not operation by operation
        steps, number = plan(tables, starts, counts, 16, 8, step_pages, PAGE, window)
        loaded = []
        pages = np.asarray(steps.pages).reshape(-1, step_pages)
        for place in range(step_pages):
            column = pages[: int(number), place]
            changes = np.append(True, column[1:] != column[:-1])
            loaded += column[changes].tolist()
            if loaded[-changes.sum()] == 0:  # no row's page: one is loaded where the first step has none in this place
                del loaded[-changes.sum()]
        seen = []
        for row, offset in np.ndindex(4, 2):
            start, first, count = int(starts[row]), offset * 8, int(counts[row])
            if count > first:
                low = 0 if window is None else max(0, start + first - window + 1)
                seen += tables[row, low // PAGE : (start + min(count, first + 8) - 1) // PAGE + 1].tolist()
        assert sorted(set(loaded)) == sorted(set(seen))
        assert len(loaded) <= len(seen)  # the second block of a row finds pages of the first in place


def test_arguments_that_no_kernel_takes_are_refused():
    q, *rest = draw(2, 2, "float32")
    for name, given, said in (("gpu", np.pad(q, [(0, 0), (0, 1), (0, 0), (0, 0)]), "3 queries"),
                              ("tpu", q[:, :, :3], "3 query heads")):  # fmt: skip
        with pytest.raises(ValueError, match=said):
            jax.eval_shape(partial(KERNELS[name], scores=PLAIN), given, *rest)
