"""Outcomes of episodes are in another process what they are in their own; two processes are two groups here."""

import asyncio
import json
import threading

import numpy as np
import pytest

from jaxft.errors import HostsError, PolicyError
from jaxft.harness.data_models import EvalInputItem
from jaxft.harness.outcomes import EpisodeOutcome, SharedOutcomes
from jaxft.harness.steps import EpisodeSteps
from jaxft.hosts.group import ProcessGroup
from jaxft.rollout.calls import RemoteCall
from jaxft.rollout.recorder import Candidates, Episode

ITEM = EvalInputItem(id="a", input_obj={"question": "1+1"}, full_dataset_entry={"question": "1+1"})


def received(ended):
    """What process 1 makes of an outcome, or of an error in its place, of process 0; the counts that it gets."""
    given, meeting = {}, threading.Barrier(2)

    def share_of(process_id):
        def share(name, value):
            given[process_id] = json.dumps(value)
            meeting.wait(10.0)
            return [json.loads(given[index]) for index in range(2)]

        return share

    async def both():
        first, second = (SharedOutcomes(ProcessGroup(index, 2, share_of(index))) for index in range(2))
        assert [first.is_own(number) for number in range(3)] == [True, False, True]
        _, counts = await asyncio.gather(
            first.share("episodes 0", {(0, 3): ended}, [4, 2]), second.share("episodes 0", {}, [0, 0])
        )
        return await second.outcome(0, ITEM, Episode(0, 0, 0, "a", 3)), counts

    return asyncio.run(both())


def test_an_outcome_is_the_same_in_another_process(make_call):
    episode = Episode(0, 0, 0, "a", 3, input_obj=ITEM.input_obj)
    logprobs = [float(np.float32(-0.1)), float("-inf")]
    calls = [make_call(0, (1,), (5, 6), logprobs=logprobs), make_call(2, (1,), (7,), content="\ud800")]
    for call in calls:
        call.message_keys  # noqa: B018 - which are kept beside the fields
        episode.record(call)
    episode.record_remote(RemoteCall(0, 1, "judge", ({"role": "user", "content": "no Unicode: \ud800"},), "yes"))
    episode.candidates.append(Candidates(tuple(calls), (0.5, -0.5)))
    episode.step_rewards[2] = 0.1
    episode.texts_of_tokens["policy"] = "<{}>".format
    episode.end()
    item = ITEM.model_copy(update={"output_obj": {"answer": [2]}, "trajectory": EpisodeSteps(episode, {"answer": [2]})})
    seconds, scores = {"rollout": 1.5, "reward": 0.25}, {"points": {"a": 1.0, "b": None}, "judge": 0.1}
    mine = EpisodeOutcome(item, episode, scores, {"points": "\ud800"}, 1.1, {"a": 1.0, "b": None}, seconds=seconds)

    theirs, counts = received(mine)
    assert theirs == mine and counts == [[4, 2]]
    assert theirs.episode.candidates[0].calls[0] is theirs.episode.calls[0]
    assert list(theirs.item.trajectory) == list(mine.item.trajectory)  # with the texts of tokens
    assert theirs.episode.is_over


@pytest.mark.parametrize("output", [np.float32(0.5), np.arange(2.0)])
def test_values_of_numpy_are_sent_as_plain_ones(output):
    episode = Episode(0, 0, 0, "a", 3)
    theirs, _ = received(EpisodeOutcome(ITEM.model_copy(update={"output_obj": output}), episode))
    assert theirs.item.output_obj == output.tolist()


def test_the_error_of_a_policy_ends_the_episode_everywhere():
    with pytest.raises(PolicyError, match="it is lost"):
        received(PolicyError("it is lost"))


def test_an_output_that_json_does_not_have_is_named():
    async def share():
        shared = SharedOutcomes(ProcessGroup(0, 2))
        outcome = EpisodeOutcome(ITEM.model_copy(update={"output_obj": object()}), Episode(0, 0, 0, "a", 3))
        assert await shared.share("episodes 0", {(0, 3): outcome}, [0, 0]) == []
        await shared.outcome(1, ITEM, Episode(0, 0, 0, "b", 0))

    with pytest.raises(HostsError, match="the outcome of an episode cannot be sent to the other processes"):
        asyncio.run(share())
