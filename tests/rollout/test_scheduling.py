"""The engine's pages and its order of work: who shares pages, who waits for them, and that none of it changes a bit."""

import asyncio
import math
import os
import random
import subprocess
import sys
import threading
from collections import Counter
from typing import NamedTuple

import jax
import numpy as np
import pytest

from jaxft.core.cache import PAGE_TOKENS, pages_for
from jaxft.rollout.model_runner import ModelRunner
from jaxft.rollout.requests import Request
from jaxft.rollout.streaming import StopFinder

SLOTS, CONTEXT = 8, 384  # as many tokens as six pages hold
FEW_TOKENS = 1024  # sixteen pages: two requests of the longest, or a little more
UNEVEN = 14  # requests of the fixture `uneven`
TIMEOUT_SECONDS = 60
PROMPT_PROGRAMS = math.ceil(SLOTS / (SLOTS - 1))  # prefill programs between two dispatches of all slots but one


def prompt(seed, tokens):
    return tuple(np.random.default_rng(seed).integers(6, 262, tokens).tolist())


def request(number, prompt_tokens=100, **changes):
    """A request with noise and a prompt of its own, which only its budget ends."""
    fields = {"prompt_ids": prompt(number, prompt_tokens), "key_ids": (0, 0, 0, 0, 0, number), "max_tokens": 20}
    return Request(**(fields | changes))


def record_of(completion):
    return completion.token_ids, completion.sampler_logprobs, completion.behavior_logprobs, completion.finish_reason


def records_of(completions):
    return [record_of(completion) for completion in completions]


def run(main):
    async def limited():
        async with asyncio.timeout(TIMEOUT_SECONDS):
            return await main()

    return asyncio.run(limited())


def clear(policy):
    run(lambda: policy.update(lambda params: (params, None)))


def counted(policy, serve, *requests):
    """The completions, and the numbers of prompt tokens prefilled and reused."""
    counts = policy.engine.counts
    before = counts.prefilled_tokens, counts.reused_tokens
    completions = records_of(serve(policy, *requests))
    return completions, counts.prefilled_tokens - before[0], counts.reused_tokens - before[1]


class Event(NamedTuple):
    """A call of the runner, with the pages that requests held then."""

    name: str
    arguments: tuple
    held_pages: int


@pytest.fixture
def record_calls(monkeypatch):
    """Records what an engine has its runner do, in order."""

    def begin(policy, on_call=lambda event: None):
        events, runner = [], policy.engine._runner

        def recorded(name):
            method = getattr(runner, name)

            def call(*arguments, **options):
                events.append(Event(name, arguments, policy.engine.held_pages))
                on_call(events[-1])
                return method(*arguments, **options)

            monkeypatch.setattr(runner, name, call)

        for name in ("prefill", "copy", "admit", "advance"):
            recorded(name)
        return events

    return begin


def admissions(events):
    """The requests in the order in which they got a slot; one that was preempted comes again."""
    return [request for event in events if event.name == "admit" for _, request in event.arguments[1]]


def assert_idle(policy):
    engine = policy.engine
    run(lambda: policy.read(lambda params: None))  # behind the last step
    assert engine.held_pages == 0 and not any(pool.pending for pool in engine._scheduler.pools)
    assert not engine._scheduler.running and not engine._scheduler.waiting and not engine._in_flight


def warm(policy, serve):
    """Compile the programs of requests without filters, and return the policy."""
    group = [request(number, prompt_ids=prompt(0, 70), max_tokens=1 + number) for number in range(10)]
    serve(policy, *group)
    return policy


@pytest.fixture(scope="module")
def large(make_policy, serve):
    """A policy with pages for all slots, and whose programs are compiled."""
    return warm(make_policy(max_context_tokens=CONTEXT), serve)


@pytest.fixture(scope="module")
def small(make_policy, serve):
    """A policy with pages for fewer requests than it has slots, and whose programs are compiled."""
    return warm(make_policy(max_context_tokens=CONTEXT, cache_tokens=FEW_TOKENS), serve)


# --- Sharing.


def test_the_generations_of_a_prompt_share_its_keys_and_values(large, serve):
    clear(large)
    group = [request(number, prompt_ids=prompt(0, 50)) for number in range(16)]
    together, computed, reused = counted(large, serve, *group)
    assert (computed, reused) == (49, 15 * 49)
    assert len({tuple(tokens) for tokens, *_ in together}) == 16
    for index in (15, 6, 0):
        clear(large)
        assert records_of(serve(large, group[index])) == [together[index]]


def test_whole_pages_of_a_prompt_are_held_once_by_all_its_generations(large, serve, record_calls):
    clear(large)
    events = record_calls(large)
    # 200 tokens are prefilled: three whole pages, and 8 tokens in a page that the answer goes on in.
    group = [request(number, prompt_ids=prompt(1, 201), max_tokens=50) for number in range(SLOTS)]
    _, computed, reused = counted(large, serve, *group)
    assert (computed, reused) == (200, (SLOTS - 1) * 200)
    held = [event.held_pages for event in events if event.name == "advance"]
    assert max(held) == held[0] == 3 + SLOTS
    assert sum(len(event.arguments[1]) for event in events if event.name == "copy") == SLOTS - 1
    assert_idle(large)


def test_a_system_prompt_is_held_and_prefilled_once(large, serve, record_calls):
    clear(large)
    system = prompt(2, 130)  # two whole pages and two tokens
    requests = [request(number, prompt_ids=system + prompt(100 + number, 40)) for number in range(SLOTS)]
    alone = [counted(large, serve, each)[0][0] for each in requests]
    clear(large)
    events = record_calls(large)
    together, computed, reused = counted(large, serve, *requests)
    assert (computed, reused) == (128 + SLOTS * 41, (SLOTS - 1) * 128)
    assert max(event.held_pages for event in events if event.name == "advance") == 2 + SLOTS
    assert together == alone


def in_turns(number, turns, turn_tokens=90):
    """The requests of an episode: each prompt is the prompt before, a possible answer to it, and new tokens."""
    ends = [turn_tokens * turn for turn in range(1, turns + 1)]
    whole = prompt(1000 + number, ends[-1])
    return [request(number, prompt_ids=whole[:end], key_ids=(number, end)) for end in ends]


def test_a_turn_goes_on_from_the_whole_pages_of_the_one_before(large, serve):
    clear(large)
    turns = in_turns(0, 4)
    kept = [counted(large, serve, turn) for turn in turns]
    # Of 89, 179, 269 and 359 tokens the turns before left 0, 1, 2 and 4 whole pages.
    assert [counts for _, *counts in kept] == [[89, 0], [115, 64], [141, 128], [103, 256]]
    anew = []
    for turn in turns:
        clear(large)
        anew.append(counted(large, serve, turn))
    assert [counts for _, *counts in anew] == [[89, 0], [179, 0], [269, 0], [359, 0]]
    assert [records for records, *_ in anew] == [records for records, *_ in kept]


def test_an_update_drops_the_cache(make_policy, large, serve):
    policy = make_policy(max_context_tokens=CONTEXT)
    double = jax.jit(lambda params: jax.tree.map(lambda leaf: 2 * leaf, params))
    (old,), *counts = counted(policy, serve, request(3, 150))
    assert counts == [149, 0] and counted(policy, serve, request(3, 150))[1:] == (0, 149)
    run(lambda: policy.update(lambda params: (double(params), None)))
    (new,), *counts = counted(policy, serve, request(3, 150))
    assert counts == [149, 0] and new != old == records_of(serve(large, request(3, 150)))[0]


def test_an_evicted_prompt_is_computed_again_to_the_same_bits(small, serve):
    clear(small)
    first, *others = [request(number, 310) for number in range(10, 14)]
    expected, *counts = counted(small, serve, first)
    assert counts == [309, 0] and counted(small, serve, first) == (expected, 0, 309)
    serve(small, *others)  # fifteen pages of the sixteen
    found, computed, reused = counted(small, serve, first)
    assert found == expected and computed + reused == 309 and computed >= 4 * PAGE_TOKENS


@pytest.mark.parametrize(
    "cache_tokens",
    [pytest.param(CONTEXT, marks=pytest.mark.slow), FEW_TOKENS, pytest.param(None, marks=pytest.mark.slow)],
)
def test_cached_prompts_change_no_bit(make_policy, large, serve, cache_tokens):
    """Fifteen episodes, of which three each share a first prompt, take their turns in any order, at any cache size."""
    episodes = [in_turns(number, 1 + number % 4, 70) for number in range(5) for _ in range(3)]
    for index, turns in enumerate(episodes):
        own = prompt(2000 + index, 280)
        for place, turn in enumerate(turns):
            mixed = turn.prompt_ids[:70] + own[: len(turn.prompt_ids) - 70]
            turns[place] = request(0, prompt_ids=mixed, key_ids=(index, place), max_tokens=11)
    policy = make_policy(max_context_tokens=CONTEXT, cache_tokens=cache_tokens)
    rng = random.Random(cache_tokens)

    async def converse(index):
        found = []
        for turn in episodes[index]:
            await asyncio.sleep(rng.random() * 0.05)
            found.append(record_of(await policy.engine.submit(turn)))
        return found

    async def main():
        order = rng.sample(range(15), 15)
        return dict(zip(order, await asyncio.gather(*(converse(index) for index in order)), strict=True))

    answers = run(main)
    for index, turns in enumerate(episodes):
        assert answers[index] == records_of(serve(large, *turns))
    clear(large)
    assert answers[7] == records_of(serve(large, *episodes[7]))
    assert policy.engine.counts.reused_tokens > 0
    assert_idle(policy)


# --- Too few pages for all.


def test_a_cache_that_holds_no_request_is_refused(make_policy):
    said = rf"cache_tokens is 320: 5 pages of 64 tokens .* at least 384, which hold a request of {CONTEXT} tokens"
    with pytest.raises(ValueError, match=said):
        make_policy(max_context_tokens=CONTEXT, cache_tokens=320)


async def streamed(policy, each):
    """The completion of a request, which was given its tokens once each and in order before it ended."""
    chunks = []
    completion = await policy.engine.submit(each, on_tokens=lambda *chunk: chunks.append(chunk))
    assert all(len(tokens) == len(logprobs) > 0 for tokens, logprobs in chunks)
    assert [token for tokens, _ in chunks for token in tokens] == completion.token_ids
    assert [value for _, logprobs in chunks for value in logprobs] == completion.sampler_logprobs
    return completion


@pytest.fixture(scope="module")
def uneven(tokenizer, large, serve):
    """Requests of uneven prompts and answers, of which some end at a stop string or a stop id; and their answers.

    Stops come late in the answers that the requests have without them, as all are served by a large pool.
    """
    rng = random.Random(0)
    free = [
        request(number, rng.randint(1, 90), max_tokens=rng.randint(*((8, 60), (150, 200))[number % 2]))
        for number in range(UNEVEN)
    ]
    expected = records_of(serve(large, *free))
    stop_ids, stop_strings = {}, {}
    for number in (number for number in range(UNEVEN) if number % 3 < 2):
        tokens, logprobs, _, _ = expected[number]
        if number % 3:
            lengths = {token: tokens.index(token) + 1 for token in tokens}
            stop_ids[number] = (max(lengths, key=lengths.get),)
        else:
            texts = [tokenizer.decode(tokens[: length + 1]) for length in range(len(tokens))]
            letters = set(filter(str.isalnum, texts[-1]))
            lengths = {letter: 1 + [letter in text for text in texts].index(True) for letter in letters}
            stop_strings[number] = [max(lengths, key=lengths.get)]
        length = max(lengths.values())
        expected[number] = tokens[:length], logprobs[:length], logprobs[:length], "stop"

    def make():
        """The requests, with finders that have seen no tokens yet."""
        return [
            Request(
                **vars(each)
                | {"stop_ids": stop_ids.get(number, ())}
                | {"find_stop": StopFinder(tokenizer.decode, stop_strings[number]) if number in stop_strings else None}
            )
            for number, each in enumerate(free)
        ]

    assert Counter(reason for *_, reason in expected) == {"stop": 10, "length": 4}
    return make, expected


async def change_weights_beneath_a_request(engine):
    before = engine.counts.decoded_tokens
    running = asyncio.create_task(engine.submit(request(60, 100, max_tokens=150)))
    while engine.counts.decoded_tokens == before:
        await asyncio.sleep(0.001)
    await engine._device.run(engine.change_weights)
    assert not running.done()
    await running


def test_requests_that_wait_for_pages_or_lose_them_get_the_same_bits(small, large, serve, uneven, record_calls):
    """Also after weights have changed beneath an earlier request, which alone would keep its tokens."""
    make, expected = uneven
    run(lambda: change_weights_beneath_a_request(small.engine))
    events = record_calls(small)

    async def main():
        return await asyncio.gather(*(streamed(small, each) for each in make()))

    decoded = small.engine.counts.decoded_tokens
    assert records_of(run(main)) == expected
    attempts = Counter(each.key_ids for each in admissions(events))
    assert len(attempts) == UNEVEN and max(attempts.values()) > 1
    assert len({each.prompt_ids for each in admissions(events)}) == UNEVEN  # none goes on from tokens that it has
    assert small.engine.counts.decoded_tokens - decoded > sum(len(tokens) for tokens, *_ in expected)
    assert_idle(small)
    for number in (0, 1, 13):
        clear(large)
        assert records_of(serve(large, make()[number])) == [expected[number]]


def test_older_requests_are_served_before_younger_ones(small, record_calls):
    events, ended = record_calls(small), []

    async def serve(number):
        await small.engine.submit(request(number, 100, max_tokens=130))
        ended.append(number)

    async def main():
        await asyncio.gather(*(serve(number) for number in range(20, 29)))

    run(main)
    assert ended == list(range(20, 29))
    numbers = [each.key_ids[-1] for each in admissions(events)]
    assert list(dict.fromkeys(numbers)) == ended
    assert len(numbers) > 9 and numbers.count(20) == 1  # the oldest that runs never loses its pages


@pytest.mark.slow
def test_cancelled_requests_leave_nothing_behind(small, large, serve, record_calls):
    """Half of 400 requests are cancelled: before they get a slot, during their prefill or while they decode."""
    rng, shared = random.Random(0), prompt(5, 140)
    requests = []
    for number in range(400):
        own = prompt(3000 + number, rng.randint(1, 25))
        ids = shared[: rng.choice((70, 140))] + own if number % 10 == 0 else own
        requests.append(request(number, prompt_ids=ids, max_tokens=rng.randint(1, 40)))
        if number % 25 == 7:
            requests[-1] = request(number, 350)
    doomed = {number: rng.choice(("waiting", "prefilling", "decoding")) for number in rng.sample(range(400), 200)}
    tasks, cancelled = {}, Counter()

    def cancel(number, moment):
        if doomed.get(number) == moment and tasks[number].cancel():
            cancelled[moment] += 1

    def on_call(event):
        if event.name == "prefill":
            pages = [piece.pages for piece in event.arguments[1]]
            for running in list(small.engine._scheduler.running.values()):
                if running.pages in pages:
                    number = running.request.key_ids[-1]
                    running.future.get_loop().call_soon_threadsafe(cancel, number, "prefilling")

    async def submit(number):
        return await small.engine.submit(requests[number], lambda *chunk: cancel(number, "decoding"))

    async def main():
        waiting = [number for number, moment in doomed.items() if moment == "waiting"]
        for number in range(400):
            tasks[number] = asyncio.create_task(submit(number))
        await asyncio.sleep(0)
        while waiting:
            for number in waiting[:20]:
                cancel(number, "waiting")
            del waiting[:20]
            await asyncio.sleep(0.005)
        return await asyncio.gather(*tasks.values(), return_exceptions=True)

    record_calls(small, on_call)
    answers = run(main)
    assert_idle(small)
    assert sum(cancelled.values()) > 180 and min(cancelled[moment] for moment in doomed.values()) > 50
    served = [number for number in range(400) if not isinstance(answers[number], asyncio.CancelledError)]
    assert set(range(400)) - doomed.keys() <= set(served) and len(served) < 220
    assert [len(answers[number].token_ids) for number in served] == [requests[number].max_tokens for number in served]
    sample = [number for number in served if len(requests[number].prompt_ids) > 60][:10] + served[::20]
    for number in sample:
        clear(large)
        assert records_of(serve(large, requests[number])) == [record_of(answers[number])]


def test_a_preempted_request_finishes_on_the_version_that_it_began_with(make_policy, large, serve, record_calls):
    policy = make_policy(max_context_tokens=CONTEXT, cache_tokens=FEW_TOKENS)
    double = jax.jit(lambda params: jax.tree.map(lambda leaf: 2 * leaf, params))
    early = [request(number, 100, max_tokens=150) for number in range(40, 45)]
    late = request(45, 100)
    is_preempted, has_update = threading.Event(), threading.Event()

    def on_call(event):
        """Hold the device thread, once a request was preempted, until the update is queued."""
        if any(waiting.attempt for waiting in policy.engine._scheduler.waiting) and not is_preempted.is_set():
            is_preempted.set()
            has_update.wait(TIMEOUT_SECONDS)

    record_calls(policy, on_call)

    async def main():
        running = [asyncio.create_task(policy.engine.submit(each)) for each in early]
        await asyncio.to_thread(is_preempted.wait)
        update = asyncio.create_task(policy.update(lambda params: (double(params), "done")))
        await asyncio.sleep(0)
        later = asyncio.create_task(policy.engine.submit(late))
        await asyncio.sleep(0)
        has_update.set()
        return await asyncio.gather(*running), await update, await later

    before, result, after = run(main)
    assert result == "done" and [each.policy_version for each in before] == [0] * 5 and after.policy_version == 1
    assert records_of(before) == records_of(serve(large, *early))
    assert record_of(after) == records_of(serve(policy, late))[0] != records_of(serve(large, late))[0]
    assert_idle(policy)


@pytest.mark.parametrize("least", [0, 1], ids=["waiting", "running"])
def test_streamed_tokens_stay_though_pages_were_lost_and_weights_change(make_policy, uneven, monkeypatch, least):
    """The weights change while a request has no tokens, or at `least` one, of those that it has streamed."""
    policy, (make, expected) = make_policy(max_context_tokens=CONTEXT, cache_tokens=FEW_TOKENS), uneven
    scheduler, advance, lost = policy.engine._scheduler, policy.engine._advance, {}

    def change_and_advance(**options):
        for each in [*scheduler.waiting, *scheduler.running.values()]:
            if not lost and least <= len(each.completion.token_ids) < each.num_streamed:
                lost[each.request.key_ids[-1]] = each.num_streamed
                policy._stop_sampling(finishes_requests=False)
                doubled = jax.tree.map(lambda leaf: jax.device_put(2 * np.asarray(leaf)), policy.weights.trained)
                policy.weights.replace_trained(doubled, has_changed=True)
        return advance(**options)

    async def main():
        return await asyncio.gather(*(streamed(policy, each) for each in make()))

    monkeypatch.setattr(policy.engine, "_advance", change_and_advance)
    answers = run(main)
    ((number, count),) = lost.items()
    assert answers[number].token_ids[:count] == expected[number][0][:count]
    assert answers[number].policy_versions == [0] * count + [1] * (len(answers[number].token_ids) - count)
    assert len(answers[number].token_ids) > count
    assert_idle(policy)


# --- Dispatches ahead.


@pytest.fixture(scope="module")
def ahead(make_policy):
    """Policies that queue a dispatch before the one before it was read, as on accelerators; with few and many pages."""
    policies = [make_policy(max_context_tokens=CONTEXT, cache_tokens=tokens) for tokens in (FEW_TOKENS, None)]
    for policy in policies:
        policy.engine._ahead = 1
    return policies


@pytest.mark.parametrize("index", [0, pytest.param(1, marks=pytest.mark.slow)], ids=["few pages", "many pages"])
def test_dispatches_ahead_change_no_bit(ahead, serve, uneven, record_calls, index):
    policy, (make, expected) = ahead[index], uneven
    events = record_calls(policy)

    async def main():
        return await asyncio.gather(*(streamed(policy, each) for each in make()))

    assert records_of(run(main)) == expected
    assert (len(admissions(events)) > UNEVEN) == (policy is ahead[0])
    assert_idle(policy)
    for number in range(3):  # nobody runs behind these whose dispatches would have their tokens read
        assert records_of(serve(policy, make()[number])) == [expected[number]]
        assert_idle(policy)


def test_a_request_that_lost_its_pages_goes_on_with_the_tokens_that_it_streamed(
    ahead, uneven, record_calls, monkeypatch
):
    """As on accelerators: tokens of an answer are prefilled again, to a few other last bits, and not sampled again."""
    policy, (make, expected) = ahead[0], uneven
    monkeypatch.setattr(policy.engine._scheduler, "keeps_tokens", True)
    events, requests = record_calls(policy), make()

    async def main():
        return await asyncio.gather(*(streamed(policy, each) for each in requests))

    answers = run(main)
    lengths = {each.key_ids: len(each.prompt_ids) for each in requests}
    grown = [each for each in admissions(events) if len(each.prompt_ids) > lengths[each.key_ids]]
    assert grown
    for answer, (tokens, logprobs, _, reason) in zip(answers, expected, strict=True):
        assert (answer.token_ids, answer.finish_reason) == (tokens, reason)
        np.testing.assert_allclose(answer.sampler_logprobs, logprobs, rtol=0, atol=1e-5)
    for each in grown:
        (tokens,) = (
            answer.token_ids for answer, own in zip(answers, requests, strict=True) if own.key_ids == each.key_ids
        )
        length = lengths[each.key_ids]
        assert each.prompt_ids[length:] == tuple(tokens[: len(each.prompt_ids) - length])
    assert_idle(policy)


def test_requests_cancelled_with_a_dispatch_ahead_leave_nothing_behind(ahead, uneven):
    policy, (make, expected) = ahead[0], uneven

    async def main():
        tasks = []
        for number, each in enumerate(make()):
            on_tokens = (lambda *chunk, number=number: tasks[number].cancel()) if number % 4 == 0 else None
            tasks.append(asyncio.create_task(policy.engine.submit(each, on_tokens)))
        return await asyncio.gather(*tasks, return_exceptions=True)

    answers = run(main)
    for number, (answer, wanted) in enumerate(zip(answers, expected, strict=True)):
        assert isinstance(answer, asyncio.CancelledError) if number % 4 == 0 else record_of(answer) == wanted
    assert_idle(policy)


def test_an_update_waits_for_the_dispatches_ahead(make_policy, large, serve):
    policy = make_policy(max_context_tokens=CONTEXT)
    policy.engine._ahead = 1
    early = [request(number, 30, max_tokens=90 + number) for number in range(5)]

    async def main():
        running = [asyncio.create_task(policy.engine.submit(each)) for each in early]
        while not policy.engine.counts.decoded_tokens:
            await asyncio.sleep(0.001)
        version = await policy.update(lambda params: (params, len(policy.engine._in_flight)))
        return version, await asyncio.gather(*running)

    in_flight, answers = run(main)
    assert in_flight == 0 and records_of(answers) == records_of(serve(large, *early))


# --- Prefill between dispatches.


def test_a_long_prompt_delays_others_by_a_few_programs_only(large, serve, record_calls, monkeypatch):
    """One program for all slots; a program takes two pieces, which here are of one prompt."""
    monkeypatch.setattr(large.engine, "_prompt_share", 1)
    clear(large)
    others = [request(number, 20, max_tokens=80) for number in range(50, 50 + SLOTS - 1)]
    long = request(60, 380, max_tokens=4)
    expected = [records_of(serve(large, each))[0] for each in (*others, long)]
    clear(large)
    events = record_calls(large)

    async def main():
        tasks = [asyncio.create_task(large.engine.submit(each)) for each in others]
        decoded = large.engine.counts.decoded_tokens
        while large.engine.counts.decoded_tokens == decoded:
            await asyncio.sleep(0.001)
        return await asyncio.gather(*tasks, large.engine.submit(long))

    assert records_of(run(main)) == expected
    names = [event.name for event in events]
    first, last = names.index("advance"), len(names) - names[::-1].index("prefill")
    between = "".join(name[0] for name in names[first:last] if name in ("prefill", "advance")).split("a")
    pieces = [len(event.arguments[1]) for event in events[first:last] if event.name == "prefill"]
    assert sum(map(len, between)) == len(pieces) and sum(pieces) == pages_for(379)
    assert max(map(len, between)) <= PROMPT_PROGRAMS < len(pieces) == pages_for(379) // 2
    rows = [len(event.arguments[1]) for event in events if event.name == "advance"]
    assert SLOTS - 1 in rows and SLOTS in rows  # the others went on without the long one, and then with it


# --- Programs of few rows and of all.


@pytest.mark.long
@pytest.mark.parametrize("slots", [20, 80])
def test_a_larger_model_gives_the_same_bits_alone_together_and_in_any_order(make_policy, serve, monkeypatch, slots):
    """Twenty slots have programs of 4 and 20 rows, eighty of 10 and 80."""
    if os.environ["XLA_FLAGS"]:
        # The tests' flags leave out passes of the compiler; the promise is about programs as users compile them.
        name = "test_a_larger_model_gives_the_same_bits_alone_together_and_in_any_order"
        command = [sys.executable, "-m", "pytest", "-n", "0", "-q", "-m", "long", f"{__file__}::{name}[{slots}]"]
        done = subprocess.run(command, env={**os.environ, "XLA_FLAGS": ""}, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout
        return
    import jaxft

    model, params = jaxft.init_model("qwen3-1m", jax.random.key(2, impl="threefry2x32"))
    policy = make_policy(model=model, params=params, slots=slots, max_context_tokens=CONTEXT)
    rng, few, count = random.Random(7), Counter(), 2 * slots if slots == 20 else slots
    requests = [
        request(
            number, rng.randint(1, 180), max_tokens=200 if number % 8 == 0 else rng.randint(1, 60), top_k=number % 3
        )
        for number in range(count)
    ]
    read = ModelRunner.read

    def reading(runner, dispatch):
        few.update(is_few for _, is_few, _ in dispatch)
        return read(runner, dispatch)

    monkeypatch.setattr(ModelRunner, "read", reading)
    alone = []
    for each in requests:
        alone += records_of(serve(policy, each))
        clear(policy)
    assert set(few) == {True} and max(len(tokens) for tokens, *_ in alone) == 200
    for seed in range(2):
        few.clear()
        order = random.Random(seed).sample(range(count), count) if seed else range(count)
        together = records_of(serve(policy, *(requests[index] for index in order)))
        assert few[True] > 5 and few[False] > 2
        assert [tokens for tokens, *_ in together] == [alone[index][0] for index in order]
        assert together == [alone[index] for index in order]
        clear(policy)
