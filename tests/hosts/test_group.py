"""Processes begin a job together or not at all, and hear of a difference between its inputs; here each is a thread."""

import asyncio
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from jaxft.errors import HostsError
from jaxft.hosts.group import ProcessGroup
from jaxft.rollout.sequences import TokenSequence
from jaxft.training.batch import CollectedRewards, Row
from jaxft.training.rows import NOTHING_SAMPLED, JobRows, job_digests


def each(stores, work):
    """The result of `work(group, index)` in each process, or the fault as text."""

    def one(store):
        try:
            return asyncio.run(work(ProcessGroup(store.process_id, 3, store.share), store.process_id))
        except HostsError as error:
            return str(error)

    with ThreadPoolExecutor(len(stores)) as pool:
        return list(pool.map(one, stores))


async def jobs(group, *names):
    """Begins jobs until one is not allowed; the names of those that were computed."""
    done = []

    async def compute():
        for name in names:
            async with group.agree(name):
                assert group.is_busy
                done.append(name)

    computing = asyncio.create_task(compute())
    while not computing.done() and not group.is_over:
        await asyncio.sleep(0.01)
    computing.cancel()
    await asyncio.wait({computing})
    return done


def test_all_compute_the_same_jobs(stores):
    async def work(group, index):
        return await jobs(group, "first", "second"), group.is_busy, group.is_stopping

    assert each(stores, work) == [(["first", "second"], False, False)] * 3


def test_one_that_stops_keeps_all_from_the_next_job(stores):
    async def work(group, index):
        said = []
        group.on_stopping = lambda: said.append("stopping")
        if index == 1:
            done = await jobs(group, "first")
            await group.stop()
        else:
            done = await jobs(group, "first", "second")
        await group.stop()  # decided already
        return done, group.is_over, said

    assert each(stores, work) == [(["first"], True, ["stopping"])] * 3


def test_a_wish_to_stop_is_heard_at_the_next_decision_and_checkpoints_are_still_made(stores):
    async def work(group, index):
        group.wants_stop = index == 2
        allowed = await group.allows("validation")
        async with group.agree("checkpoint", is_last=True):
            saved = True
        return allowed, saved, group.is_stopping, await jobs(group, "job"), group.is_over

    assert each(stores, work) == [(False, True, True, [], True)] * 3


def test_a_decision_counts_although_who_asked_is_cancelled(stores):
    async def work(group, index):
        if index > 0:
            await asyncio.sleep(0.2)
        asking = asyncio.create_task(jobs(group, "job"))
        await asyncio.sleep(0.05)
        if index == 0:
            asking.cancel()  # it has said that it begins
            await asyncio.wait({asking})
        else:
            assert await asking == ["job"]
        await group.stop()
        return group.is_over

    assert each(stores, work) == [True] * 3


@pytest.mark.parametrize(
    ("input_of", "said"),
    [
        (lambda index: ("job", {"row": ["a", "b", "c" if index == 2 else "b"]}),
         "job: row 2 differs between process 2 and process 0"),
        (lambda index: ("job", {"row": ["a"] * (1 + index)}), "job has 2 rows in process 1, and 1 in process 0"),
        (lambda index: (f"job {index // 2}", {}), "process 2 begins job 1, and process 0 job 0: they have diverged"),
    ],
)  # fmt: skip
def test_a_difference_is_named_in_all_processes(stores, input_of, said):
    async def work(group, index):
        name, digests = input_of(index)
        async with group.agree(name, lambda: digests):
            return "computed"

    assert each(stores, work) == [said] * 3


def test_one_process_agrees_with_itself_at_once():
    async def work():
        group = ProcessGroup()
        done = await jobs(group, "first", "second")
        await group.stop()
        return done, await group.gather("value", 1), await group.allows("validation"), group.is_first, group.is_alone

    assert asyncio.run(work()) == (["first", "second"], [1], True, True, True)


def sequence(*tokens, logprob=-1.0):
    numbers = {name: [0] * len(tokens) for name in ("policy_versions", "temperatures", "behavior_logprobs")}
    mask, logprobs = [True] * len(tokens), [logprob] * len(tokens)
    return TokenSequence(tokens=list(tokens), completion_mask=mask, sampler_logprobs=logprobs, **numbers)


def gathered(*sequences):
    return JobRows([Row(each, index) for index, each in enumerate(sequences)], [], {}, NOTHING_SAMPLED)


def test_digests_tell_which_row_or_reward_differs():
    rewards = CollectedRewards(np.array([0.0, 1.0]), np.array([0, 0]), None, None, {})
    mine = job_digests(gathered(sequence(1, 2), sequence(3)), rewards)
    assert mine == job_digests(gathered(sequence(1, 2), sequence(3)), rewards)
    by_a_bit = sequence(3, logprob=float(np.nextafter(np.float32(-1.0), 0)))
    theirs = job_digests(gathered(sequence(1, 2), by_a_bit), rewards._replace(rewards=np.array([0.0, 1.5])))
    assert [mine[name][0] == theirs[name][0] for name in mine] == [True, True]
    assert [mine[name][1] == theirs[name][1] for name in mine] == [False, False]
    assert job_digests(gathered(sequence(1)), None).keys() == {"row"}
