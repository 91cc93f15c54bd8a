"""Processes begin a job together or not at all, and hear of a difference between its inputs; here each is a thread."""

import asyncio
import socket
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from jaxft.errors import HostsError
from jaxft.hosts import ring as rings_module
from jaxft.hosts.accord import Accord
from jaxft.hosts.meeting import meet
from jaxft.rollout.sequences import TokenSequence
from jaxft.training.batch import CollectedRewards, Row
from jaxft.training.rows import NOTHING_SAMPLED, Gathered, digests_of


@pytest.fixture
def rings():
    with socket.create_server(("", 0)) as free:
        port = free.getsockname()[1]

    def one(index):
        return meet(f"127.0.0.1:{port}", index, 3, {}, within_seconds=10.0, on_loss=lambda index: None)

    with ThreadPoolExecutor(3) as pool:
        yield list(pool.map(one, range(3)))


def each(rings, work):
    """The result of `work(accord, index)` in each process, or the fault as text."""

    def one(ring):
        try:
            return asyncio.run(work(Accord(ring), ring.process_id))
        except HostsError as error:
            return str(error)

    with ThreadPoolExecutor(len(rings)) as pool:
        return list(pool.map(one, rings))


async def jobs(accord, *names):
    """Begins jobs until one is not allowed; the names of those that were computed."""
    done = []

    async def compute():
        for name in names:
            async with accord.job(name, {}):
                assert accord.is_busy
                done.append(name)

    computing = asyncio.create_task(compute())
    while not computing.done() and not accord.is_over:
        await asyncio.sleep(0.01)
    computing.cancel()
    await asyncio.wait({computing})
    return done


def test_all_compute_the_same_jobs(rings):
    async def work(accord, index):
        return await jobs(accord, "first", "second"), accord.is_busy, accord.is_stopping

    assert each(rings, work) == [(["first", "second"], False, False)] * 3


def test_one_that_stops_keeps_all_from_the_next_job(rings):
    async def work(accord, index):
        said = []
        accord.on_stopping = lambda: said.append("stopping")
        if index == 1:
            done = await jobs(accord, "first")
            await accord.stop()
        else:
            done = await jobs(accord, "first", "second")
        await accord.stop()  # decided already
        return done, accord.is_over, said

    assert each(rings, work) == [(["first"], True, ["stopping"])] * 3


def test_a_wish_to_stop_is_heard_at_the_next_decision_and_checkpoints_are_still_made(rings):
    async def work(accord, index):
        accord.wants_stop = index == 2
        allowed = await accord.allows("validation")
        async with accord.checkpoint("checkpoint"):
            saved = True
        return allowed, saved, accord.is_stopping, await jobs(accord, "job"), accord.is_over

    assert each(rings, work) == [(False, True, True, [], True)] * 3


def test_a_decision_counts_although_who_asked_is_cancelled(rings):
    async def work(accord, index):
        if index > 0:
            await asyncio.sleep(0.2)
        asking = asyncio.create_task(jobs(accord, "job"))
        await asyncio.sleep(0.05)
        if index == 0:
            asking.cancel()  # it has said that it begins
            await asyncio.wait({asking})
        else:
            assert await asking == ["job"]
        await accord.stop()
        return accord.is_over

    assert each(rings, work) == [True] * 3


@pytest.mark.parametrize(
    ("input_of", "said"),
    [
        (lambda index: ("job", {"row": ["a", "b", "c" if index == 2 else "b"]}),
         "job: row 2 differs between process 2 and process 0"),
        (lambda index: ("job", {"row": ["a"] * (1 + index)}), "job has 2 rows in process 1, and 1 in process 0"),
        (lambda index: (f"job {index // 2}", {}), "process 2 begins job 1, and process 0 job 0: they have diverged"),
    ],
)  # fmt: skip
def test_a_difference_is_named_in_all_processes(rings, input_of, said):
    async def work(accord, index):
        async with accord.job(*input_of(index)):
            return "computed"

    assert each(rings, work) == [said] * 3


def test_a_signal_is_passed_on_once(rings):
    heard = []
    for ring in rings:
        ring.on_stop = lambda number, mine=ring.process_id: heard.append((mine, number))
    rings[1].stop(15)
    with ThreadPoolExecutor(3) as pool:
        list(pool.map(lambda ring: ring.all_gather("after it", None), rings))
    assert sorted(heard) == [(0, 15), (2, 15)]


def test_one_that_waits_for_a_failed_process_hears_of_a_loss(rings, monkeypatch):
    monkeypatch.setattr(rings_module, "FAILED_SECONDS", 0.2)
    lost = []
    for ring in rings:
        ring._on_loss = lambda index, mine=ring.process_id: lost.append((mine, index))
    rings[2].close(0.0, has_failed=True)
    rings[1].close(0.0)  # ends by itself in time
    time.sleep(0.6)
    assert lost == [(0, 2)]


def test_one_that_ends_with_an_error_has_time_to_show_it(rings, monkeypatch):
    monkeypatch.setattr(rings_module, "FAILED_SECONDS", 0.4)
    lost = []
    for ring in rings:
        ring._on_loss = lambda index, mine=ring.process_id: lost.append((mine, index))
    rings[0].expect_end()
    rings[2]._after.close()  # process 2 is killed
    rings[2]._before.close()
    began = time.monotonic()
    while len(lost) < 2 and time.monotonic() < began + 10.0:
        time.sleep(0.01)
    assert lost == [(1, 2), (0, 2)]  # process 0 hangs, and so hears of it in the end


def sequence(*tokens, sampler_logprobs=None):
    count = len(tokens)
    return TokenSequence(
        tokens=list(tokens),
        completion_mask=[True] * count,
        sampler_logprobs=sampler_logprobs or [-1.0] * count,
        behavior_logprobs=[-1.0] * count,
        temperatures=[1.0] * count,
        policy_versions=[0] * count,
    )


def gathered(*sequences):
    return Gathered([Row(each, index) for index, each in enumerate(sequences)], [], {}, NOTHING_SAMPLED)


def test_digests_tell_which_row_or_reward_differs():
    rewards = CollectedRewards(np.array([0.0, 1.0]), np.array([0, 0]), None, None, {})
    mine = digests_of(gathered(sequence(1, 2), sequence(3)), rewards)
    assert mine == digests_of(gathered(sequence(1, 2), sequence(3)), rewards)
    by_a_bit = sequence(3, sampler_logprobs=[float(np.nextafter(np.float32(-1.0), 0))])
    theirs = digests_of(gathered(sequence(1, 2), by_a_bit), rewards._replace(rewards=np.array([0.0, 1.5])))
    assert [mine[name][0] == theirs[name][0] for name in mine] == [True, True]
    assert [mine[name][1] == theirs[name][1] for name in mine] == [False, False]
    assert digests_of(gathered(sequence(1)), None).keys() == {"row"}
