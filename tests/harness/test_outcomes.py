"""Outcomes of episodes are in another process what they are in their own; two processes are two groups here."""

import asyncio
import json
import threading
from dataclasses import replace

import numpy as np
import pytest

from jaxft.errors import PolicyError
from jaxft.harness.data_models import EvalInputItem
from jaxft.harness.evaluation import Evaluation
from jaxft.harness.outcomes import EpisodeOutcome, SharedOutcomes
from jaxft.harness.steps import EpisodeSteps
from jaxft.hosts.group import ProcessGroup
from jaxft.rollout.calls import RemoteCall
from jaxft.rollout.recorder import Candidates, Episode

ITEM = EvalInputItem(id="a", input_obj={"question": "1+1"}, full_dataset_entry={"question": "1+1"})


def received(ended):
    """An outcome, or an error in its place, in process 0; what process 1 makes of it; the counts that it gets."""
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
        mine = first.encode(0, ended) if isinstance(ended, EpisodeOutcome) else ended
        _, counts = await asyncio.gather(
            first.share("episodes 0", {(0, 3): mine}, [4, 2]), second.share("episodes 0", {}, [0, 0])
        )
        return mine, await second.outcome(0, ITEM, Episode(0, 0, 0, "a", 3)), counts

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

    same, theirs, counts = received(mine)
    assert theirs == mine and same is mine and counts == [[4, 2]]
    assert theirs.episode.candidates[0].calls[0] is theirs.episode.calls[0]
    assert list(theirs.item.trajectory) == list(mine.item.trajectory)  # with the texts of tokens
    assert theirs.episode.is_over


@pytest.mark.parametrize("output", [np.float32(0.5), np.arange(2.0)])
def test_values_of_numpy_are_sent_as_plain_ones(output):
    episode = Episode(0, 0, 0, "a", 3)
    _, theirs, _ = received(EpisodeOutcome(ITEM.model_copy(update={"output_obj": output}), episode))
    assert theirs.item.output_obj == output.tolist()


def test_the_error_of_a_policy_ends_the_episode_everywhere():
    with pytest.raises(PolicyError, match="it is lost"):
        received(PolicyError("it is lost"))


@pytest.mark.parametrize(
    ("output", "key"),
    [(object(), ""), (json.loads("[" * 300 + "]" * 300), ""), ({"\ud83d": 1}, ""), (10**5000, ""), (None, "\ud83d")],
    ids=["an object", "deep", "a key that is no Unicode", "a large integer", "a message with such a key"],
)
def test_an_outcome_that_json_does_not_have_fails_its_episode_in_all_processes(make_call, output, key):
    episode = Episode(0, 0, 0, "a", 3, input_obj=ITEM.input_obj)
    call = make_call(0, (1,), (5,))
    episode.record(replace(call, messages=({"role": "user", "content": "1+1", key: ""},)))
    episode.end()
    given = EpisodeOutcome(ITEM.model_copy(update={"output_obj": output}), episode, {"judge": 1.0}, reward=1.0)
    mine, theirs, _ = received(given)
    assert theirs == mine and mine.reward is mine.item.output_obj is None and not mine.has_agent_failed
    assert "the outcome cannot be sent to the other processes: " in mine.error and "Error" in mine.traceback


def test_a_process_that_waits_for_no_other_fails_an_outcome_that_cannot_be_sent(monkeypatch):
    """Validation of fewer examples than processes."""

    async def workflow(row):
        return object()

    async def validate():
        return await Evaluation(workflow, {}, None, 1, 0).validate([ITEM])

    monkeypatch.setattr("jaxft.hosts.group._current", ProcessGroup(0, 2, lambda name, value: [value, [[], [0, 0]]]))
    (outcome,) = asyncio.run(validate())
    assert "the outcome cannot be sent to the other processes: " in outcome.error
