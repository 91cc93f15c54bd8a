"""The runner: which programs decode which slots, and that pages, rows and programs change no bit."""

from contextlib import closing
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import jaxft
from jaxft.core.cache import SharedTables
from jaxft.core.logprobs import token_logprobs
from jaxft.rollout import model_runner
from jaxft.rollout.decode_batch import PREFILL_PROGRAMS, PREFILL_PROGRAMS_ELSEWHERE, prefill_programs, split_batch
from jaxft.rollout.device import CompileCounter
from jaxft.rollout.model_runner import (
    ADMISSION_ROWS,
    ModelRunner,
    PageCopy,
    PrefillChunk,
    PrefillRow,
)
from jaxft.rollout.requests import Request

SLOTS, CONTEXT, PAGES = 16, 192, 40
MAX_DIFFERENCE = 1e-5  # nats, between sampler and trainer in float32


# --- Programs of a dispatch.


@given(
    columns=st.dictionaries(st.integers(0, 63), st.integers(1, 64), min_size=1),
    few_rows=st.sampled_from([None, 8]),
)
def test_every_slot_is_decoded_once(columns, few_rows):
    programs = split_batch(columns, 64, few_rows)
    assert sorted(slot for slots, _ in programs for slot in slots) == sorted(columns)
    assert all(len(slots) <= 8 for slots, is_few in programs if is_few)
    assert sum(not is_few for _, is_few in programs) <= 1
    assert few_rows is not None or len(programs) == 1
    lengths = [columns[slot] for slots, _ in programs for slot in slots]
    assert lengths == sorted(lengths, reverse=True)  # the long ones apart from the short ones


def test_a_long_request_does_not_make_all_rows_as_long():
    (long, is_few), *others = split_batch(dict.fromkeys(range(64), 2) | {5: 64}, 64, 8)
    assert long[0] == 5 and is_few
    assert [(len(slots), is_few) for slots, is_few in others] == [(56, False)]


def test_alike_requests_are_decoded_together():
    assert split_batch(dict.fromkeys(range(64), 4), 64, 8) == [(tuple(range(64)), False)]


@pytest.mark.parametrize("count", [1, 8])
def test_few_requests_are_decoded_without_the_other_slots(count):
    assert split_batch(dict.fromkeys(range(count), 3), 64, 8) == [(tuple(range(count)), True)]


# --- Sizes.


@pytest.fixture(scope="module")
def model_and_params():
    return jaxft.init_model("qwen3-50k", jax.random.key(1, impl="threefry2x32"))


@pytest.mark.parametrize(("cache_tokens", "pages"), [(None, 16 * 3), (192, 3), (1000, 16)])
def test_pages_hold_the_tokens_of_the_cache(model_and_params, cache_tokens, pages):
    model, _ = model_and_params
    runner = ModelRunner(model, seed=0, slots=SLOTS, length=CONTEXT, cache_tokens=cache_tokens)
    assert runner.num_pages == pages
    layers, heads, size = 2, 2, 16
    assert runner.cache_bytes(jnp.float32) == 2 * 4 * layers * heads * size * 64 * pages


def test_pages_that_hold_no_request_are_refused(model_and_params):
    said = r"cache_tokens is 128: 2 pages of 64 tokens .* at least 192, which hold a request of 150 tokens"
    with pytest.raises(ValueError, match=said):
        ModelRunner(model_and_params[0], seed=0, slots=SLOTS, length=150, cache_tokens=128)


def test_sixteen_slots_have_programs_of_few_rows(model_and_params):
    model, params = model_and_params
    names = {"prefill_2x64", "copy", "admit", "decode_2", "decode_8", "decode_filtered_2", "decode_filtered_8"}
    few = {name.replace("decode", "decode_few") for name in names if name.startswith("decode")}
    small, large = (ModelRunner(model, seed=0, slots=slots, length=CONTEXT) for slots in (15, 16))
    assert small.warm_up_programs(params).keys() == names
    assert large.warm_up_programs(params).keys() == names | few
    assert large.programs(params).keys() == {"prefill", "decode", "decode_filtered"}


@pytest.mark.parametrize(("slots", "few_rows"), [(16, 4), (64, 8), (256, 32)])
def test_few_are_an_eighth_of_the_slots_or_four(model_and_params, slots, few_rows):
    runner = ModelRunner(model_and_params[0], seed=0, slots=slots, length=CONTEXT)
    assert {len(chosen) for *_, chosen in runner._decoding()} == {slots, few_rows}


def test_programs_that_prefill_are_no_larger_than_requests_fill():
    assert prefill_programs("gpu", slots=128, length=4096) == [(64, 8), (64, 32), (64, 128)]
    assert prefill_programs("gpu", slots=2, length=2048) == [(64, 8), (64, 32), (64, 64)]
    assert prefill_programs("gpu", slots=2, length=2048, num_pages=40) == [(64, 8), (64, 32), (64, 40)]
    assert prefill_programs("gpu", slots=4, length=64) == [(64, 4)]
    assert prefill_programs("tpu", slots=128, length=4096) == [(64, 32), (256, 8)]
    assert prefill_programs("tpu", slots=2, length=320) == [(64, 10), (256, 4)]
    assert prefill_programs("cpu", slots=64, length=4096) == [(64, 2)]


def test_a_warm_up_on_gpus_runs_all_programs_twice_after_all_are_compiled(model_and_params, monkeypatch):
    model, params = model_and_params
    calls = []

    def recording(name):
        function = getattr(model_runner, name)

        def call(*arguments):
            result = function(*arguments)
            calls.append((name, compiles.count))
            return result

        return call

    with closing(CompileCounter()) as compiles:
        for name in ("prefill", "copy", "admit", "advance"):
            monkeypatch.setattr(model_runner, name, recording(name))
        for rounds in (1, 3):
            monkeypatch.setattr(model_runner, "warm_up_rounds", lambda platform, rounds=rounds: rounds)
            calls.append(rounds)
            ModelRunner(model, seed=0, slots=8, length=CONTEXT).warm_up(params)
    once, thrice = calls[1 : calls.index(3)], calls[calls.index(3) + 1 :]
    names = [name for name, _ in once]
    assert names == ["prefill", "copy", "admit", *["advance"] * 4]
    assert [name for name, _ in thrice] == 3 * names
    assert thrice[len(names) - 1][1] == thrice[-1][1] == compiles.count


# --- Bits.


class Served:
    """Runs requests on a runner in pages and slots that the test chooses."""

    def __init__(self, model, params):
        self.runner = ModelRunner(model, seed=0, slots=SLOTS, length=CONTEXT, cache_tokens=64 * PAGES)
        self.params = params

    def prefill(self, prompts, pages, starts=None):
        """Prefill a page of each prompt at a time, together, from its start on."""
        reached = list(starts or [0] * len(prompts))
        while any(start < len(prompt) - 1 for start, prompt in zip(reached, prompts, strict=True)):
            chunks = []
            for index, (prompt, numbers) in enumerate(zip(prompts, pages, strict=True)):
                tokens = prompt[reached[index] : min(reached[index] + 64, len(prompt) - 1)]
                if tokens:
                    chunks.append(PrefillChunk(0, reached[index], tokens, numbers))
                    reached[index] += len(tokens)
            for start in range(0, len(chunks), self.runner.chunk_rows(64)):
                self.runner.prefill(self.params, chunks[start : start + self.runner.chunk_rows(64)], 64)

    def decode(self, rows, num_steps, **options):
        """Decode rows, each with its slot, pages and request; return tokens and log-probabilities of each."""
        self.runner.admit(self.params, [(slot, request) for slot, _, request in rows])
        states = [PrefillRow(slot, pages, len(request.prompt_ids)) for slot, pages, request in rows]
        options = {"is_filtered": False} | options
        decoded, active = self.runner.read(self.runner.advance(self.params, states, num_steps, **options))
        return [
            (decoded.tokens[slot].tolist(), decoded.sampler_logprobs[slot].tolist(), bool(active[slot]))
            for slot, _, _ in rows
        ]


@pytest.fixture(scope="module")
def served(model_and_params):
    return Served(*model_and_params)


def requested(number, prompt_tokens, **changes):
    prompt = tuple(np.random.default_rng(number).integers(6, 262, prompt_tokens).tolist())
    return replace(Request(prompt, (0, 0, 0, 0, 0, number), max_tokens=100), **changes)


@pytest.fixture(scope="module")
def alone(served):
    """Rows of 5 to 180 tokens, each decoded alone in the same slot and pages."""
    found = []
    for number in range(SLOTS):
        request = requested(number, 5 + 35 * (number % 6))
        served.prefill([request.prompt_ids], [[0, 1, 2]])
        found.append((request, served.decode([(0, [0, 1, 2], request)], 8)[0]))
    return found


def test_a_row_gives_the_log_probabilities_of_the_trainer(served, alone):
    rows = np.zeros((SLOTS, CONTEXT), np.int32)
    for row, (request, (tokens, *_)) in zip(rows, alone, strict=True):
        row[: len(request.prompt_ids) + 8] = *request.prompt_ids, *tokens
    scored = jax.jit(partial(token_logprobs, served.runner._model))(served.params, rows).logprobs
    for values, (request, (_, logprobs, is_active)) in zip(np.asarray(scored), alone, strict=True):
        start = len(request.prompt_ids)
        assert np.abs(values[start : start + 8] - logprobs).max() <= MAX_DIFFERENCE and is_active


@pytest.mark.parametrize("count", [5, SLOTS])
def test_slots_pages_and_the_other_rows_change_no_bit(served, alone, count):
    """All slots are decoded by one program of all rows, five by one of few rows."""
    rng = np.random.default_rng(count)
    chosen, slots = rng.permutation(SLOTS)[:count], rng.permutation(SLOTS)[:count]
    numbers = iter(rng.permutation(PAGES).tolist())
    requests = [alone[index][0] for index in chosen]
    pages = [[next(numbers) for _ in range(-(-(len(request.prompt_ids) + 8) // 64))] for request in requests]
    served.prefill([request.prompt_ids for request in requests], pages)
    found = served.decode(list(zip(slots.tolist(), pages, requests, strict=True)), 8)
    assert found == [alone[index][1] for index in chosen]


def test_two_steps_at_a_time_and_the_program_with_filters_change_no_bit(served, alone):
    request, (tokens, logprobs, _) = alone[4]
    served.prefill([request.prompt_ids], [[7, 3, 5]])
    first, second = served.decode([(9, [7, 3, 5], request)], 2)[0], []
    for step in range(1, 4):
        row = PrefillRow(9, [7, 3, 5], len(request.prompt_ids) + 2 * step)
        decoded, _ = served.runner.read(served.runner.advance(served.params, [row], 2, is_filtered=True))
        second += zip(decoded.tokens[9].tolist(), decoded.sampler_logprobs[9].tolist(), strict=True)
    assert first[0] + [token for token, _ in second] == tokens
    assert first[1] + [value for _, value in second] == logprobs


def test_slots_that_are_not_chosen_stay_as_they_are(served, alone):
    rows = [(slot, [2 * slot, 2 * slot + 1], alone[6 * slot][0]) for slot in range(2)]  # 5 tokens each
    served.prefill([request.prompt_ids for *_, request in rows], [pages for _, pages, _ in rows])
    served.runner.admit(served.params, [(slot, request) for slot, _, request in rows])
    found = {}
    for slot, pages, _ in reversed(rows):
        dispatch = served.runner.advance(served.params, [PrefillRow(slot, pages, 5)], 8, is_filtered=False)
        decoded, _ = served.runner.read(dispatch)
        assert decoded.counts.tolist() == [8 * (slot == each) for each in range(SLOTS)]
        found[slot] = decoded.tokens[slot].tolist(), decoded.sampler_logprobs[slot].tolist(), True
    assert [found[slot] for slot in range(2)] == [alone[0][1], alone[6][1]]


def test_a_row_goes_on_from_shared_and_copied_pages(served, alone):
    """More copies at once than a program makes; each row has the page of its last tokens for itself."""
    request, expected = alone[3]  # 110 tokens: a whole page, and one that the answer goes on in
    count = ADMISSION_ROWS + 2
    served.prefill([request.prompt_ids], [[30, 31]])
    served.runner.copy(served.params, [PageCopy(0, 31, page) for page in range(count)])
    found = served.decode([(slot, [30, slot], request) for slot in range(count)], 8)
    assert found == [expected] * count
    # The source was not written: it serves a prompt that goes on after it.
    assert served.decode([(15, [30, 31], request)], 8) == [expected]


def test_pages_that_rows_share_come_with_their_tables_on_gpus(model_and_params, alone, monkeypatch):
    """The reference reads them row by row, with the same bits."""
    served, advance, found = Served(*model_and_params), model_runner.advance, []
    served.runner._shares_pages = True
    names = served.runner.warm_up_programs(served.params).keys()
    assert {name for name in names if "shared" in name} == {"decode_shared_8", "decode_filtered_shared_8"}

    def recording(*arguments):
        found.append(arguments[-2])
        return advance(*arguments)

    monkeypatch.setattr(model_runner, "advance", recording)
    request, expected = alone[3]  # 110 tokens: a whole page, and one that the answer goes on in
    served.prefill([request.prompt_ids], [[30, 31]])
    served.runner.copy(served.params, [PageCopy(0, 31, page) for page in range(SLOTS - 1)])
    rows = [(slot, [30, slot], request) for slot in range(SLOTS - 1)]
    assert served.decode(rows, 8) == [expected] * len(rows)
    served.prefill([request.prompt_ids], [[30, 31]])
    served.decode(rows[:9], 2)
    together, few = found
    assert isinstance(together, SharedTables) and isinstance(few, np.ndarray)
    assert together.shared.rows[0].tolist() == [*range(SLOTS - 1), SLOTS]
    assert together.shared.columns.tolist() == [1] + [0] * 7
    assert together.shared.own.tolist() == [1] * (SLOTS - 1) + [0]


def test_a_prompt_goes_on_after_its_cached_pages(served, alone):
    request, expected = alone[5]  # 180 tokens
    served.prefill([request.prompt_ids[:65]], [[11]])  # all but the last token
    served.prefill([request.prompt_ids], [[11, 20, 21]], starts=[64])
    assert served.decode([(2, [11, 20, 21], request)], 8) == [expected]


def test_chunks_are_prefilled_by_the_smallest_program_that_holds_them(model_and_params, alone, monkeypatch):
    """Programs as on GPUs; the chunks of a prompt follow each other in one program."""
    monkeypatch.setitem(PREFILL_PROGRAMS, "cpu", PREFILL_PROGRAMS_ELSEWHERE)
    served = Served(*model_and_params)
    runner, sizes, make = served.runner, [], model_runner.prefill

    def recording(model, params, cache, chunks):
        sizes.append((len(chunks.tokens), int((chunks.counts > 0).sum())))
        return make(model, params, cache, chunks)

    monkeypatch.setattr(model_runner, "prefill", recording)
    for number in (1, 4, 14):
        requests, pages = [alone[index][0] for index in range(number)], []
        chunks, numbers = [], iter(range(PAGES))
        for request in requests:
            fed = request.prompt_ids[:-1]
            pages.append([next(numbers) for _ in range(-(-(len(fed) + 9) // 64))])
            chunks += [PrefillChunk(0, at, fed[at : at + 64], pages[-1]) for at in range(0, len(fed), 64)]
        runner.prefill(served.params, chunks, 64)
        rows = [(slot, *each) for slot, each in enumerate(zip(pages, requests, strict=True))]
        for (tokens, logprobs, _), (_, expected) in zip(served.decode(rows, 8), alone, strict=False):
            assert tokens == expected[0]
            np.testing.assert_allclose(logprobs, expected[1], rtol=0, atol=MAX_DIFFERENCE)
    assert sizes == [(8, 1), (8, 6), (32, 26)]


def test_rows_end_at_stop_ids_and_limits(served, alone):
    request, (tokens, logprobs, _) = alone[0]
    stop, budget = tokens.index(tokens[4]) + 1, 3
    rows = [(4, [0], replace(request, stop_ids=(tokens[4],))), (1, [1], replace(request, max_tokens=budget))]
    served.prefill([request.prompt_ids] * 2, [[0], [1]])
    for (found, values, is_active), length in zip(served.decode(rows, 8), (stop, budget), strict=True):
        assert (found[:length], values[:length], is_active) == (tokens[:length], logprobs[:length], False)
        assert not any(found[length:])


def test_requests_keep_to_their_own_parameters_in_a_wave_of_many(served, alone):
    """More requests at once than a program admits, with key ids of two lengths."""
    rows = []
    for slot, (request, _) in enumerate(alone):
        pages = list(range(2 * slot, 2 * slot + 2))
        changes = {"prompt_ids": request.prompt_ids[:20], "temperature": float(slot % 2)}
        rows.append((slot, pages, replace(request, **changes, key_ids=(0,) * (2 + slot % 3) + (slot,))))
    served.prefill([request.prompt_ids for *_, request in rows], [pages for _, pages, _ in rows])
    together = served.decode(rows, 8)
    for slot, pages, request in rows:
        served.prefill([request.prompt_ids], [pages])
        assert served.decode([(slot, pages, request)], 8) == [together[slot]]
