import asyncio
import contextlib
import math
import random
import re
from contextlib import closing
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from jaxft.core.decode import SampledTokens
from jaxft.errors import DeviceThreadError, NonFiniteError, PolicyError, PolicyLostError, RequestError
from jaxft.rollout.calls import Completion
from jaxft.rollout.client import ChatClient
from jaxft.rollout.current import recording
from jaxft.rollout.decode_batch import MAX_BIASED_IDS, MAX_STOP_IDS, PREFILL_PROGRAMS, PREFILL_PROGRAMS_ELSEWHERE
from jaxft.rollout.device import CompileCounter
from jaxft.rollout.engine import Engine, _take_tokens
from jaxft.rollout.recorder import Episode
from jaxft.rollout.requests import Request
from jaxft.rollout.scheduler import Running
from jaxft.rollout.sequences import token_sequences
from jaxft.rollout.streaming import StopFinder

TIMEOUT_SECONDS = 60
MAX_DIFFERENCE = 1e-5  # nats, between sampler and trainer in float32


def request(number, prompt_tokens=5, **changes):
    """A request with noise and a prompt of its own, which only its budget ends."""
    prompt = tuple((7 * number + 13 * place) % 200 + 6 for place in range(prompt_tokens))
    fields = {"prompt_ids": prompt, "key_ids": (0, 0, 1, 2, 0, number), "max_tokens": 11}
    return Request(**(fields | changes))


def varied_requests(count):
    """Requests of different sampling parameters, prompt lengths and budgets."""
    kinds = [{}, {"temperature": 0.0}, {"temperature": 1.3}, {"top_k": 3}, {"top_p": 0.5}, {"min_p": 0.1}]
    return [
        request(number, prompt_tokens=1 + 3 * number % 40, max_tokens=1 + number % 13, **kinds[number % len(kinds)])
        for number in range(count)
    ]


def record_of(completion):
    return completion.token_ids, completion.sampler_logprobs, completion.behavior_logprobs, completion.finish_reason


def run(main):
    async def limited():
        async with asyncio.timeout(TIMEOUT_SECONDS):
            return await main()

    return asyncio.run(limited())


def test_neighbours_order_and_slots_change_no_bit(policy, serve):
    requests = varied_requests(21)
    alone = [record_of(serve(policy, each)[0]) for each in requests]
    for seed in range(3):
        order = random.Random(seed).sample(range(21), 21)
        together = serve(policy, *(requests[index] for index in order))
        assert [record_of(completion) for completion in together] == [alone[index] for index in order]


@pytest.mark.parametrize("slot", range(1, 8))
def test_every_slot_gives_the_same_bits(policy, serve, slot):
    probe = request(100, top_p=0.9)
    others = [request(number, max_tokens=20) for number in range(slot)]
    assert record_of(serve(policy, *others, probe)[-1]) == record_of(serve(policy, probe)[0])


def test_every_row_has_its_own_parameters(policy, serve):
    greedy, top_one, hot = serve(
        policy, request(0, temperature=0.0), request(0, top_k=1, key_ids=(9,) * 6), request(0, temperature=1.3)
    )
    assert greedy.token_ids == top_one.token_ids != hot.token_ids
    assert top_one.behavior_logprobs == [0.0] * 11  # only one token could be drawn
    assert greedy.sampler_logprobs == top_one.sampler_logprobs == greedy.behavior_logprobs
    assert hot.sampler_logprobs == hot.behavior_logprobs


def test_sampler_and_trainer_agree(policy, tokenizer, score):
    """Mixed lengths and temperatures, several turns, and the pad token among the sampled ones."""
    client = ChatClient(policy)

    async def converse(generation):
        episode = Episode(0, 0, 0, "agree", generation)
        with recording(episode):
            messages = []
            for turn in range(1 + generation % 3):
                messages.append({"role": "user", "content": "x" * (1 + (5 * generation + turn) % 9)})
                temperature = (0.5, 1.0, 1.3)[(generation + turn) % 3]
                reply = await client.chat(messages, temperature=temperature, max_tokens=4 + generation % 12)
                messages.append({"role": "assistant", "content": reply.content})
        return episode

    async def main():
        return await asyncio.gather(*(converse(generation) for generation in range(60)))

    episodes = run(main)
    rows = [row for episode in episodes for row in token_sequences(episode.calls)]
    assert len(rows) == 60 and sum(len(episode.calls) for episode in episodes) == 120
    sampled = [
        (token, temperature)
        for row in rows
        for token, temperature, chosen in zip(row.tokens, row.temperatures, row.completion_mask, strict=True)
        if chosen
    ]
    assert tokenizer.pad_token_id in {token for token, _ in sampled}
    assert {temperature for _, temperature in sampled} == {0.5, 1.0, 1.3}
    found = score([row.tokens for row in rows], [row.temperatures for row in rows])
    for row, logprobs in zip(rows, found, strict=True):
        assert row.sampler_logprobs == row.behavior_logprobs
        difference = logprobs[: len(row.tokens)] - row.sampler_logprobs
        assert np.abs(difference[np.array(row.completion_mask)]).max() <= MAX_DIFFERENCE


def test_a_stop_id_ends_the_answer_and_belongs_to_it(policy, serve):
    (free,) = serve(policy, request(3))
    stop = free.token_ids[6]
    length = free.token_ids.index(stop) + 1
    (stopped,) = serve(policy, request(3, stop_ids=(stop, 999)))
    assert stopped.token_ids == free.token_ids[:length] and stopped.finish_reason == "stop"
    assert stopped.sampler_logprobs == free.sampler_logprobs[:length]
    # On the very limit it is still a stop.
    (at_limit,) = serve(policy, request(3, stop_ids=(stop,), max_tokens=length))
    assert record_of(at_limit) == record_of(stopped)


@pytest.mark.parametrize("length", [1, 3, 8, 10])
def test_the_token_that_completes_a_stop_string_is_the_last(policy, serve, length):
    (free,) = serve(policy, request(4))
    completes = tuple(free.token_ids[:length])

    def find_stop(ids, checked):
        return length if tuple(ids[:length]) == completes else None

    neighbour, stopped = serve(policy, request(5, max_tokens=30), request(4, find_stop=find_stop))
    assert record_of(stopped) == (
        free.token_ids[:length],
        free.sampler_logprobs[:length],
        free.behavior_logprobs[:length],
        "stop",
    )
    assert len(neighbour.token_ids) == 30


def test_a_request_that_lost_its_tokens_may_stop_at_an_earlier_one(tokenizer):
    """New weights may sample other tokens than those that a preempted request had, and searched for stop strings."""
    stopping = request(0, find_stop=StopFinder(tokenizer.decode, ["."]))
    with contextlib.closing(asyncio.new_event_loop()) as loop:
        running = Running(stopping, loop.create_future(), Completion())

    def has_ended(text):
        ids = np.array([tokenizer.encode(text)])
        logprobs = np.zeros(ids.shape, np.float32)
        sampled = SampledTokens(ids, logprobs, logprobs, np.array([len(text)]))
        return _take_tokens(running, 0, sampled, 0, is_active=True)

    assert not has_ended("abcd") and not has_ended("efgh")
    running.completion = Completion()
    assert has_ended("a.cd") and tokenizer.decode(running.completion.token_ids) == "a."


def test_budget_and_context_end_an_answer_as_length(policy, serve):
    budget, context, last_place = serve(
        policy,
        request(0, max_tokens=9),
        request(1, prompt_tokens=90, max_tokens=1000),
        request(2, prompt_tokens=95, max_tokens=1000),
    )
    assert [len(each.token_ids) for each in (budget, context, last_place)] == [9, 6, 1]
    assert {each.finish_reason for each in (budget, context, last_place)} == {"length"}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"prompt_ids": (7,) * 96}, "96 tokens, .*max_context_tokens is 96"),
        ({"prompt_ids": ()}, "prompt .*no tokens"),
        ({"max_tokens": 0}, "max_tokens is 0; .* 1"),
        ({"stop_ids": tuple(range(9))}, f"9 stop ids .* {MAX_STOP_IDS}"),
        ({"key_ids": (0, -1, 0, 0, 0, 0)}, r"key_ids .*\(0, -1, 0.* uint32"),
        ({"key_ids": (0, 2**32, 0, 0, 0, 0)}, rf"key_ids .*\(0, {2**32}, 0.* uint32"),
        ({"prompt_ids": (7, 262, 8)}, r"prompt_ids\[1\] is 262; .* 262 tokens"),
        ({"prompt_ids": (-1, 7)}, r"prompt_ids\[0\] is -1; .* 262 tokens"),
        ({"prompt_ids": (7, 8, 2**70)}, "prompt_ids holds object; wanted integers"),
        ({"stop_ids": (2**40,)}, f"stop_ids are \\({2**40},"),
        ({"temperature": 1e39}, r"temperature is 1e\+39"),
        ({"temperature": 1e-40}, "temperature is 1e-40"),
        ({"top_k": 2**40}, f"top_k is {2**40}"),
        ({"top_p": 1e-50}, "top_p is 1e-50"),
        ({"logit_bias": ((5, 1e300),)}, r"logit_bias adds 1e\+300 to token 5"),
        ({"logit_bias": ((5, float("inf")),)}, "logit_bias adds inf to token 5"),
        ({"logit_bias": ((5, 1.0), (262, 1.0))}, r"logit_bias\[1\] is 262; .* 262 tokens"),
        ({"temperature": -1.0}, "temperature is -1.0; .* 0"),
        ({"temperature": float("nan")}, "temperature is nan; .* 0"),
        ({"top_k": -1}, "top_k is -1; .* 0"),
        ({"top_p": 0.0}, r"top_p is 0.0; .*\(0, 1\]"),
        ({"min_p": 1.0}, r"min_p is 1.0; .*\[0, 1\)"),
        ({"logit_bias": ((5, float("nan")),)}, "logit_bias adds nan to token 5"),
        ({"logit_bias": ((-1, 1.0),)}, r"logit_bias\[0\] is -1"),
        ({"logit_bias": ((1, 1.0),) * 33}, f"logit_bias .*33 tokens; .* {MAX_BIASED_IDS}"),
    ],
)
def test_impossible_requests_are_refused_and_others_are_served(policy, changes, message):
    async def main():
        requests = [request(1), request(0, **changes), request(2)]
        return await asyncio.gather(*map(policy.engine.submit, requests), return_exceptions=True)

    first, refused, last = run(main)
    assert isinstance(refused, RequestError) and re.search(message, str(refused))
    assert [len(first.token_ids), len(last.token_ids)] == [11, 11]


def test_the_largest_numbers_that_arrays_hold_are_served(policy, serve):
    extremes = (
        {"temperature": 1e-6},
        {"temperature": 3.4e38},
        {"top_k": 2**31 - 1},
        {"top_p": 1e-30},
        {"min_p": 1 - 1e-12},
        {"logit_bias": ((7, 3.4e38), (8, -3.4e38), (9, -math.inf))},
        {"max_tokens": 2**80},
    )
    for completion in serve(policy, *(request(n, **changes) for n, changes in enumerate(extremes))):
        assert np.isfinite(completion.sampler_logprobs + completion.behavior_logprobs).all()


@pytest.mark.parametrize(("vocabulary", "asked"), [(5, 5), (262, 20)])
def test_no_more_likely_tokens_are_computed_than_there_are(vocabulary, asked):
    running = SimpleNamespace(completion=SimpleNamespace(token_ids=[1]), request=None, error=None)
    runner = SimpleNamespace(top_logprobs=lambda params, request, token_ids, count: count)
    Engine._add_top_logprobs(SimpleNamespace(vocabulary=vocabulary, _runner=runner), None, running)
    assert (running.completion.top_logprobs, running.error) == (asked, None)


def test_requests_of_keys_of_different_lengths_share_a_batch(policy, serve):
    expected = [record_of(serve(policy, request(n, key_ids=(3,) * (n + 1)))[0]) for n in range(3)]
    together = serve(policy, *(request(n, key_ids=(3,) * (n + 1)) for n in range(3)))
    assert [record_of(completion) for completion in together] == expected


def test_a_cancelled_request_frees_its_slot(policy, serve):
    long = [request(number, max_tokens=80) for number in range(8)]
    waiting = request(50)

    async def main():
        tasks = [asyncio.create_task(policy.engine.submit(each)) for each in (*long, waiting)]
        decoded = policy.engine.counts.decoded_tokens
        while policy.engine.counts.decoded_tokens == decoded:
            await asyncio.sleep(0.001)
        for task in (tasks[2], tasks[5]):
            task.cancel()
        first_done = (await asyncio.wait(tasks[:2] + tasks[8:], return_when="FIRST_COMPLETED"))[0]
        assert first_done == {tasks[8]}  # it did not have to wait for the others
        return await asyncio.gather(*tasks, return_exceptions=True)

    answers = run(main)
    assert [index for index, each in enumerate(answers) if isinstance(each, asyncio.CancelledError)] == [2, 5]
    assert record_of(answers[8]) == record_of(serve(policy, waiting)[0])
    assert record_of(answers[7]) == record_of(serve(policy, long[7])[0])


def test_a_request_cancelled_while_it_waits_is_never_decoded(policy):
    async def main():
        running = asyncio.create_task(policy.engine.submit(request(0)))
        cancelled = asyncio.create_task(policy.engine.submit(request(1, max_tokens=80)))
        await asyncio.sleep(0)
        cancelled.cancel()
        decoded = policy.engine.counts.decoded_tokens
        await running
        return policy.engine.counts.decoded_tokens - decoded

    assert run(main) == 11


def test_an_error_of_one_request_is_its_own(policy, serve):
    expected = [record_of(serve(policy, request(number))[0]) for number in range(20)]

    def breaks(ids, checked):
        raise ZeroDivisionError("on the device thread")

    async def main():
        requests = [request(number, find_stop=breaks if number == 4 else None) for number in range(20)]
        return await asyncio.gather(*(policy.engine.submit(each) for each in requests), return_exceptions=True)

    answers = run(main)
    assert isinstance(answers.pop(4), ZeroDivisionError)
    expected.pop(4)
    assert [record_of(answer) for answer in answers] == expected


def test_an_error_on_the_device_thread_reaches_all_who_wait(make_policy, serve):
    policy, good = make_policy(), []

    def lose(params):
        good.append(params)
        return {}, None

    async def main():
        await policy.update(lose)  # parameters that nothing can be computed from
        requests = [policy.engine.submit(request(number)) for number in range(20)]
        return await asyncio.gather(*requests, return_exceptions=True)

    answers = run(main)
    assert all(isinstance(answer, KeyError) for answer in answers) and len(answers) == 20
    run(lambda: policy.restore(lambda params: good.pop(), 0))
    assert len(serve(policy, request(0))[0].token_ids) == 11


def test_a_lost_policy_fails_its_waiting_requests(make_policy):
    policy = make_policy()

    def breaks(params):
        raise ZeroDivisionError("in the update")

    async def main():
        running = asyncio.create_task(policy.engine.submit(request(0, max_tokens=80)))
        while not policy.engine.counts.decoded_tokens:
            await asyncio.sleep(0.001)
        update = asyncio.create_task(policy.update(breaks))
        await asyncio.sleep(0)
        later = asyncio.create_task(policy.engine.submit(request(1)))
        return await asyncio.gather(running, update, later, return_exceptions=True)

    ran, updated, refused = run(main)
    assert len(ran.token_ids) == 80  # it was served before the update began
    assert isinstance(updated, ZeroDivisionError)
    assert isinstance(refused, PolicyLostError)


def test_event_loops_come_and_go(policy, serve):
    expected = record_of(serve(policy, request(0))[0])

    async def leave_early():
        async with asyncio.timeout(0.002):
            await policy.engine.submit(request(1, max_tokens=80))

    for _ in range(3):
        with pytest.raises(TimeoutError):
            asyncio.run(leave_early())
        # The device thread still decodes for a loop that is closed by now.
        assert record_of(serve(policy, request(0))[0]) == expected


def test_a_closed_event_loop_leaves_other_requests_alone(policy, serve):
    loop = asyncio.new_event_loop()
    task = loop.create_task(policy.engine.submit(request(1, max_tokens=80)))
    loop.run_until_complete(asyncio.sleep(0.002))
    loop.close()
    assert len(serve(policy, request(0))[0].token_ids) == 11
    task._log_destroy_pending = False


def test_a_loop_closed_before_its_request_was_scheduled_leaves_others_alone(policy, serve):
    """Its task has submitted a request, but the callback that schedules a step never runs."""
    loop = asyncio.new_event_loop()
    task = loop.create_task(policy.engine.submit(request(1, max_tokens=80)))
    loop.call_soon(loop.stop)
    loop.run_forever()
    decoded = policy.engine.counts.decoded_tokens
    loop.close()
    assert len(serve(policy, request(0))[0].token_ids) == 11
    assert policy.engine.counts.decoded_tokens - decoded == 11  # nothing is decoded for whom nobody waits
    task._log_destroy_pending = False


def test_a_closed_policy_refuses(make_policy, serve):
    policy = make_policy()
    policy.close()
    with pytest.raises(RuntimeError, match="closed"):
        serve(policy, request(0))


def test_requests_in_flight_finish_on_the_version_they_began_with(make_policy, policy, serve):
    updated = make_policy()
    early, late = request(0, max_tokens=80), request(1, max_tokens=20)
    double = jax.jit(lambda params: jax.tree.map(lambda leaf: 2 * leaf, params))

    async def main():
        running = asyncio.create_task(updated.engine.submit(early))
        while not updated.engine.counts.decoded_tokens:
            await asyncio.sleep(0.001)
        update = asyncio.create_task(updated.update(lambda params: (double(params), "done")))
        await asyncio.sleep(0)
        later = asyncio.create_task(updated.engine.submit(late))
        return await asyncio.gather(running, update, later)

    first, result, second = run(main)
    assert (first.policy_version, result, second.policy_version) == (0, "done", 1)
    assert record_of(first) == record_of(serve(policy, early)[0])
    assert record_of(second) == record_of(serve(updated, late)[0]) != record_of(serve(policy, late)[0])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("slots", "programs"), [(8, ((1, 2),)), (16, ((1, 2),)), (16, PREFILL_PROGRAMS_ELSEWHERE), (8, ((1, 3), (2, 2)))]
)
def test_nothing_is_compiled_after_the_warm_up(make_policy, serve, slots, programs, monkeypatch):
    """Sixteen slots have programs for few rows, too; the pages are too few for all, so that requests are preempted.

    Prompts are prefilled by the programs of CPUs, of GPUs, and by chunks of two widths, as on TPUs.
    """
    monkeypatch.setitem(PREFILL_PROGRAMS, "cpu", programs)
    policy = make_policy(slots=slots, max_context_tokens=200, cache_tokens=1200)
    policy.engine._runner._shares_pages = programs == PREFILL_PROGRAMS_ELSEWHERE
    run(policy.engine.warm_up)
    with closing(CompileCounter()) as compiles:
        serve(policy, *varied_requests(30))
        decoded = policy.engine.counts.decoded_tokens
        serve(policy, *(request(number, prompt_tokens=100, max_tokens=100) for number in range(20)))
        assert policy.engine.counts.decoded_tokens > decoded + 20 * 100  # some of them twice
        serve(policy, request(0, temperature=0.77, top_p=0.3, stop_ids=(3, 4), logit_bias=((7, 1.0),), max_tokens=17))
        conversation = request(1, prompt_tokens=180)
        serve(policy, request(2, prompt_tokens=90, max_tokens=100), conversation)
        generations = [request(number, prompt_ids=conversation.prompt_ids, top_k=number) for number in range(20)]
        serve(policy, *generations, request(3, prompt_ids=conversation.prompt_ids[:110] + (9,) * 20))
        run(lambda: policy.update(lambda params: (params, None)))
        serve(policy, request(0))
    assert compiles.count == 0


# --- Numbers that are not finite.


def spoil(policy):
    """Makes all parameters NaN; returns the good ones."""
    good = []

    def job(params):
        good.append(params)
        return jax.tree.map(lambda leaf: jax.device_put(np.full_like(leaf, np.nan)), params), None

    run(lambda: policy.update(job))
    return good[0]


AFTER_SPOILT = [request(number, prompt_tokens=(1, 30, 70)[number % 3], max_tokens=20) for number in range(8)]


@pytest.fixture(scope="module")
def unspoilt(policy, serve):
    return [record_of(answer) for answer in serve(policy, *AFTER_SPOILT)]


@pytest.mark.parametrize("is_restored", [True, False])
def test_spoilt_parameters_leave_nothing_in_the_caches_for_later_requests(make_policy, serve, unspoilt, is_restored):
    spoilt = make_policy()
    good = spoil(spoilt)

    async def fill():
        requests = [request(number, prompt_tokens=90) for number in range(8)]  # in all pages of all slots
        return await asyncio.gather(*map(spoilt.engine.submit, requests), return_exceptions=True)

    answers = run(fill)
    assert {type(answer) for answer in answers} == {NonFiniteError}
    assert all("token 0" in str(answer) and "version 1" in str(answer) for answer in answers)
    assert not run(spoilt.is_healthy)
    if is_restored:
        run(lambda: spoilt.restore(lambda params: good, 0))
    else:
        run(lambda: spoilt.update(lambda params: (good, None)))
    assert run(spoilt.is_healthy)
    assert [record_of(answer) for answer in serve(spoilt, *AFTER_SPOILT)] == unspoilt


def test_a_request_whose_numbers_are_not_finite_fails_alone(policy, serve):
    expected = [record_of(serve(policy, request(number))[0]) for number in range(8)]
    overflowing = request(8, logit_bias=((7, 3.4e38), (7, 3.4e38)))  # together infinite in float32

    async def main():
        requests = [request(number) for number in range(8)]
        requests.insert(3, overflowing)
        return await asyncio.gather(*map(policy.engine.submit, requests), return_exceptions=True)

    answers = run(main)
    assert isinstance(answers.pop(3), NonFiniteError)
    assert [record_of(answer) for answer in answers] == expected


def test_long_prompts_are_prefilled_in_chunks_and_neighbours_change_no_bit(make_policy, serve):
    policy = make_policy()
    requests = [request(number, prompt_tokens=tokens) for number, tokens in enumerate((1, 30, 65, 66, 90))]
    together = [record_of(completion) for completion in serve(policy, *requests)]
    for each, expected in zip(requests, together, strict=True):
        run(lambda: policy.update(lambda params: (params, None)))  # it drops what is cached
        assert record_of(serve(policy, each)[0]) == expected


def raising(error):
    def job(*arguments):
        raise error

    return job


def test_an_error_that_a_future_would_not_take_is_presented(policy):
    async def main():
        answer = policy.engine.submit(request(0, find_stop=raising(StopIteration())))
        return await asyncio.gather(answer, return_exceptions=True)

    (answer,) = run(main)
    assert isinstance(answer, PolicyError) and "StopIteration" in str(answer)


@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt(), asyncio.CancelledError()])
def test_requests_get_the_error_of_their_step(policy, error):
    async def main():
        requests = [request(number, find_stop=raising(error) if number == 4 else None) for number in range(20)]
        answers = await asyncio.gather(*map(policy.engine.submit, requests), return_exceptions=True)
        return answers, await policy.engine.submit(request(0))

    answers, later = run(main)
    assert {str(answer) for answer in answers} == {str(answers[0])} and len(later.token_ids) == 11
    assert all(isinstance(answer, PolicyError) for answer in answers) and type(error).__name__ in str(answers[0])


def test_requests_get_an_error_when_the_thread_ends(make_policy):
    policy = make_policy()

    async def main():
        running = [asyncio.create_task(policy.engine.submit(request(number, max_tokens=90))) for number in range(20)]
        while not policy.engine.counts.decoded_tokens:
            await asyncio.sleep(0.001)
        policy._device.submit(lambda: None).add_done_callback(raising(SystemExit(3)))  # it ends the thread
        answers = await asyncio.gather(*running, return_exceptions=True)
        attempts = (policy.engine.submit(request(0)), policy.read(len), policy.update(lambda p: (p, None)))
        return answers, await asyncio.gather(*attempts, return_exceptions=True)

    answers, later = run(main)
    assert len(answers) == 20 and all(isinstance(answer, DeviceThreadError) for answer in answers[8:])  # had no slot
    assert all("SystemExit: 3" in str(answer) for answer in later)


def test_running_requests_get_an_error_when_the_policy_is_closed(make_policy):
    policy = make_policy()

    async def main():
        running = [asyncio.create_task(policy.engine.submit(request(number, max_tokens=90))) for number in range(20)]
        while not policy.engine.counts.decoded_tokens:
            await asyncio.sleep(0.001)
        await asyncio.to_thread(policy.close)
        return await asyncio.gather(*running, return_exceptions=True)

    answers = run(main)
    assert all(isinstance(answer, DeviceThreadError) and "closed" in str(answer) for answer in answers[8:])


def test_too_little_memory_is_one_error_that_says_what_to_lower(make_policy):
    """The cache asked for is larger than any address space: the allocation really fails."""
    policy = make_policy(cache_tokens=2**43)

    async def main():
        return await asyncio.gather(*(policy.engine.submit(request(n)) for n in range(20)), return_exceptions=True)

    answers = run(main)
    assert all(answer is answers[0] for answer in answers)
    assert isinstance(answers[0], PolicyError)
    names = rf"slots \(now 8\), cache_tokens \(now {2**43}\) .*max_context_tokens \(now 96\)"
    assert re.search(f"{names}.* RESOURCE_EXHAUSTED: Out of memory", str(answers[0]))
    assert answers[0].exit_code == 1 and "\n" not in str(answers[0])
