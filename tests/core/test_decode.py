"""The loop that samples: where rows end, what they write, and that a row depends on nothing but itself."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxft.core.cache import own_tables
from jaxft.core.decode import DecodeState, RowParams, decode
from jaxft.core.logprobs import token_logprobs
from jaxft.core.sampling import SamplingParams
from jaxft.core.types import Model

STEPS = 8


@partial(jax.jit, static_argnums=(0, 6), static_argnames="is_filtered")
def jitted_decode(model, params, cache, tables, state, rows, num_steps, is_filtered=True):
    rows = rows._replace(keys=jax.vmap(jax.random.fold_in, in_axes=(None, 0))(jax.random.key(3), rows.keys))
    return decode(model, params, cache, tables, state, rows, num_steps, is_filtered=is_filtered)


def equal_rows(keys, stops, limits, top_k=0):
    """Parameters of rows that draw with the keys of these numbers."""
    count = len(keys)
    ones, zeros = np.ones(count, np.float32), np.zeros(count, np.float32)
    sampling = SamplingParams(ones, np.full(count, top_k, np.int32), ones, zeros)
    return RowParams(sampling, np.array(keys), np.array(stops), np.array(limits))


# --- The ends of rows, with a model that counts.


def make_counter() -> Model:
    """A model that predicts token `positions + 1` with certainty; its cache keeps the tokens of the last call."""

    def apply(params, tokens, positions, cache=None, tables=None, segment_ids=None):
        pages = jnp.where(positions[:, 0] < 0, len(cache), tables[:, 0])
        return jax.nn.one_hot(positions + 1, 20) * 1e3, cache.at[pages].set(positions[:, :1], mode="drop")

    return Model(
        "counter", lambda key: {}, apply, lambda params, hidden: hidden, lambda pages, dtype: jnp.zeros((pages, 1))
    )


COUNTER = make_counter()


def count_from(positions, stops, limits, active=(True, True)):
    """Decode two rows that have pages 0 and 1, of three."""
    state = DecodeState(np.array([7, 8]), np.array(positions), np.array(active))
    stops = np.pad(np.array(stops), ((0, 0), (0, 2 - len(stops[0]))), constant_values=-1)
    rows = equal_rows([0, 1], stops, limits)
    cache = np.full((3, 1), -1)
    return jax.device_get(jitted_decode(COUNTER, {}, cache, np.array([[0], [1]]), state, rows, STEPS))


@pytest.mark.parametrize(
    ("stops", "limits", "counts"),
    [
        ([[-1, -1], [-1, -1]], [99, 99], [8, 8]),
        ([[3, -1], [3, -1]], [99, 99], [3, 2]),  # rows start at positions 0 and 1
        ([[9, 3], [-1, 3]], [99, 99], [3, 2]),
        ([[3, -1], [-1, -1]], [99, 6], [3, 4]),  # the tokens at positions 0 to 5 are six
        ([[1, -1], [2, -1]], [99, 99], [1, 1]),
        ([[3, -1], [-1, -1]], [4, 2], [3, 1]),  # on the stop id and the limit at once; at once on the limit
        ([[8, -1], [9, -1]], [99, 99], [8, 8]),  # in the last step
    ],
)
def test_a_row_ends_with_a_stop_id_or_at_its_limit(stops, limits, counts):
    cache, state, emitted = count_from([0, 1], stops, limits)
    np.testing.assert_array_equal(emitted.counts, counts)
    for row, count in enumerate(counts):
        np.testing.assert_array_equal(emitted.tokens[row, :count], row + 1 + np.arange(count))
        for emptied in emitted[:3]:
            assert not emptied[row, count:].any()
        has_stopped = row + count in stops[row] or row + count + 1 >= limits[row]
        assert bool(state.active[row]) != has_stopped
        assert (state.tokens[row], state.positions[row]) == (row + count, row + count)
        assert cache[row, 0] == row + count - 1, "the last token that was read; the sampled one is not in the cache yet"
    assert cache[2, 0] == -1


def test_a_call_continues_where_the_last_one_ended():
    _, once, first = count_from([0, 1], [[-1], [4]], [99, 99])
    assert first.counts.tolist() == [8, 3]
    _, twice, second = count_from(once.positions, [[-1], [4]], [99, 99], once.active)
    assert second.counts.tolist() == [8, 0] and second.tokens[0].tolist() == [*range(9, 17)]
    assert not second.tokens[1].any() and twice.positions.tolist() == [16, 4]


def test_inactive_rows_sample_and_write_nothing():
    cache, state, emitted = count_from([5, 6], [[-1], [-1]], [99, 99], active=(False, False))
    assert not any(leaf.any() for leaf in emitted[:4])
    assert cache.tolist() == [[-1]] * 3
    assert (state.tokens.tolist(), state.positions.tolist(), state.active.tolist()) == ([7, 8], [5, 6], [False] * 2)


# --- A decoder.

PROMPTS = [np.random.default_rng(row).integers(0, 48, size) for row, size in enumerate((60, 5, 130, 1, 127, 90))]
LIMIT = 140


def page_room(rows):
    """Number of pages that are never all used."""
    return 3 * rows + 4


class Batch:
    """Rows of `PROMPTS`, by their numbers, in pages of a cache; everything that is no token of theirs is garbage."""

    def __init__(self, tiny, numbers, tables=None, garbage=np.nan, extra_columns=0):
        self.model, self.params = tiny
        self.numbers = list(numbers)
        rows = len(self.numbers)
        self.tables = own_tables(rows, 3) if tables is None else tables
        room = page_room(rows)
        shapes = jax.eval_shape(lambda: self.model.init_cache(room, jnp.float32))
        self.cache = jax.tree.map(lambda leaf: np.full(leaf.shape, garbage, leaf.dtype), shapes)
        width = 192
        tokens, positions = np.zeros((rows, width), np.int32), np.full((rows, width), -1, np.int32)
        for row, number in enumerate(self.numbers):
            count = len(PROMPTS[number]) - 1
            tokens[row, :count], positions[row, :count] = PROMPTS[number][:-1], np.arange(count)
        self.params = jitted_layout(self.model, self.params)
        for first in range(0, width, 64):
            piece = slice(first, first + 64)
            self.cache = jitted_prefill(
                self.model, self.params, self.cache, tokens[:, piece], positions[:, piece], self.tables
            )
        self.tables = np.pad(self.tables, ((0, 0), (0, extra_columns)), constant_values=10**6)
        lengths = [len(PROMPTS[number]) for number in self.numbers]
        self.state = DecodeState(
            np.array([PROMPTS[number][-1] for number in self.numbers]),
            np.array(lengths) - 1,
            np.array([length < LIMIT for length in lengths]),
        )

    def decode(self, num_steps=STEPS, is_filtered=True, top_k=0):
        """Decode these rows; each has the key of its number."""
        count = len(self.numbers)
        params = equal_rows(self.numbers, np.full((count, 1), -1), np.full(count, LIMIT), top_k)
        arguments = self.params, self.cache, self.tables, self.state, params
        return jax.device_get(jitted_decode(self.model, *arguments, num_steps, is_filtered=is_filtered))


jitted_layout = jax.jit(lambda model, params: model.decode_layout(params), static_argnums=0)


@jax.jit(static_argnums=0)
def jitted_prefill(model, params, cache, tokens, positions, tables):
    return model.apply(params, tokens, positions, cache=cache, tables=tables)[1]


ALL = range(len(PROMPTS))


@pytest.fixture(scope="module")
def together(tiny):
    """The tokens of all prompts."""
    return Batch(tiny, ALL).decode(12)


def assert_same_rows(found, expected, rows):
    """Rows of one result have the bits of the same prompts in another."""
    for name, one, other in zip(found._fields[:4], found, expected, strict=False):
        np.testing.assert_array_equal(one, np.asarray(other)[np.array(rows)], err_msg=name)


def test_rows_agree_with_the_trainer_across_pages(tiny, together):
    _, state, emitted = together
    counts = emitted.counts.tolist()
    assert counts == [12, 12, 10, 12, 12, 12] and not state.active[2]  # 130 and 10 tokens are the limit
    width = LIMIT
    tokens = np.zeros((len(PROMPTS), width), np.int32)
    for row, prompt in enumerate(PROMPTS):
        tokens[row, : len(prompt)] = prompt
        tokens[row, len(prompt) : len(prompt) + counts[row]] = emitted.tokens[row, : counts[row]]
    model, params = tiny
    scored = np.asarray(jax.jit(token_logprobs, static_argnums=0)(model, params, tokens).logprobs)
    for row, prompt in enumerate(PROMPTS):
        own = scored[row, len(prompt) : len(prompt) + counts[row]]
        np.testing.assert_allclose(emitted.sampler_logprobs[row, : counts[row]], own, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    "numbers",
    [[5, 4, 3, 2, 1, 0], [0, 0, 0, 0, 0, 1], [2, 4, 2, 4, 2, 4]],
    ids=["another order", "shorter neighbours", "longer neighbours"],
)
def test_other_neighbours_change_no_bit(tiny, together, numbers):
    assert_same_rows(Batch(tiny, numbers).decode(12)[2], together[2], numbers)


@pytest.mark.parametrize(
    ("garbage", "extra_columns"), [(np.nan, 0), (5.0, 0), pytest.param(5.0, 4, marks=pytest.mark.slow)]
)
def test_page_numbers_garbage_and_the_width_of_tables_change_no_bit(tiny, together, garbage, extra_columns):
    order = np.random.default_rng(0).permutation(page_room(len(PROMPTS)))
    tables = order[: 3 * len(PROMPTS)].reshape(-1, 3).astype(np.int32)
    batch = Batch(tiny, ALL, tables, garbage, extra_columns)
    assert_same_rows(batch.decode(12)[2], together[2], ALL)


def test_the_number_of_steps_changes_no_bit(tiny, together):
    batch, parts = Batch(tiny, ALL), []
    for _ in range(3):
        batch.cache, batch.state, emitted = batch.decode(4)
        parts.append(emitted)
    joined = [np.concatenate(calls, axis=1) for calls in zip(*(part[:3] for part in parts), strict=True)]
    for mine, theirs in zip(joined, together[2][:3], strict=True):
        np.testing.assert_array_equal(mine, theirs)
    np.testing.assert_array_equal(sum(part.counts for part in parts), together[2].counts)


def test_rows_that_filter_nothing_have_the_same_bits_without_filters(tiny, together):
    assert_same_rows(Batch(tiny, ALL).decode(12, is_filtered=False)[2], together[2], ALL)
    _, _, one_choice = Batch(tiny, ALL).decode(12, top_k=1)
    assert not one_choice.behavior_logprobs.any() and one_choice.sampler_logprobs.any()


@pytest.mark.parametrize("is_filtered", [True, False])
def test_without_filters_no_threshold_is_looked_for(is_filtered):
    """The program then has one loop, that over the steps; top-k and top-p are bisections, loops of their own."""
    state = DecodeState(np.array([7]), np.array([0]), np.array([True]))
    rows, cache = equal_rows([0], [[-1]], [99]), np.full((1, 1), -1)
    arguments = {}, cache, np.array([[0]]), state, rows
    traced = jitted_decode.trace(COUNTER, *arguments, STEPS, is_filtered=is_filtered)
    loops = str(traced.jaxpr).count("scan[")
    assert loops > 1 if is_filtered else loops == 1


def test_ended_rows_leave_the_bytes_of_their_pages(tiny):
    """Decoding writes only the places behind the last token of each active row."""
    batch = Batch(tiny, ALL)
    batch.state = batch.state._replace(active=np.arange(6) % 2 == 0)
    before = jax.device_get(batch.cache)
    cache, state, emitted = jax.device_get(batch.decode(12))
    assert emitted.counts.tolist() == [12, 0, 10, 0, 12, 0]
    np.testing.assert_array_equal(state.positions[1::2], [4, 0, 89])
    written = [(row, place) for row in (0, 2, 4) for place in range(len(PROMPTS[row]) - 1, state.positions[row])]
    for layer, old in zip(cache, before, strict=True):
        keys, old_keys = layer.keys.swapaxes(2, 3).copy(), old.keys.swapaxes(2, 3).copy()  # [N K P h], as values are
        values, old_values = layer.values.copy(), old.values.copy()
        for row, place in written:
            page = batch.tables[row, place // 64]
            for new in (keys, values):
                assert np.isfinite(new[page, :, place % 64]).all()
            for leaf in (keys, old_keys, values, old_values):
                leaf[page, :, place % 64] = 0
        assert keys.tobytes() == old_keys.tobytes() and values.tobytes() == old_values.tobytes()
