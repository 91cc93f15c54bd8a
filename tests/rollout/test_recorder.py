import asyncio
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxft.errors import DeviceMemoryError, ToolsUnsupportedError
from jaxft.rollout.calls import RemoteCall
from jaxft.rollout.current import episode, find_episode, recording
from jaxft.rollout.recorder import TRAINING, VALIDATION, Episode


def make_episode(**changes):
    fields = {"run_seed": 0, "stream": TRAINING, "rollout_index": 0, "example_id": "a", "generation": 0}
    return Episode(**(fields | changes))


VARIED = [
    {},
    {"stream": VALIDATION},
    {"rollout_index": 1},
    {"example_id": "b"},
    {"generation": 1},
]


def test_different_episodes_have_different_ids_and_seeds():
    episodes = [make_episode(**changes) for changes in VARIED]
    assert len({each.id for each in episodes}) == len(VARIED)
    assert len({each.key_ids for each in episodes}) == len(VARIED)
    assert len({each.seed for each in episodes}) == len(VARIED)
    assert make_episode(run_seed=1).seed != make_episode().seed
    assert make_episode(run_seed=1).key_ids == make_episode().key_ids  # the run's own key holds the seed


def test_an_episode_is_the_same_in_every_process():
    repeated = make_episode(example_id="exämple", generation=3)
    assert repeated.id == "training/0/exämple/3"
    assert repeated.key_ids == (0, 0, 0x8E44B798, 0x2ECCE4A8, 3)  # sha256 of the example's id
    assert repeated.seed == 14931658745446604120
    assert repeated.group_random.random() == 0.44159456262424934
    assert repeated.random.random() == repeated.random.random()


def test_the_generations_of_an_example_share_chances_that_no_other_group_has():
    drawn = make_episode().group_random.random()
    assert make_episode(generation=1).group_random.random() == drawn
    others = [{"run_seed": 1}, {"stream": VALIDATION}, {"rollout_index": 1}, {"example_id": "b"}]
    assert len({drawn, *(make_episode(**changes).group_random.random() for changes in others)}) == 5


@given(st.text(), st.integers(0, 2**32 - 1))
def test_key_ids_are_uint32(example_id, index):
    key_ids = make_episode(example_id=example_id, rollout_index=index, generation=index).key_ids
    assert len(key_ids) == 5 and all(0 <= number < 2**32 for number in key_ids)


def test_call_ids_count_repeats_of_a_prompt_and_nothing_else():
    first, other = make_episode(), make_episode()
    a, b, again = (first.begin_call(prompt) for prompt in ((1, 2), (3,), (1, 2)))
    assert [call[0] for call in (a, b, again)] == [0, 1, 2]
    assert len({a[1], b[1], again[1]}) == 3 and all(0 <= call[1] < 2**32 for call in (a, b, again))
    # In another order, as when concurrent calls are scheduled otherwise.
    assert [other.begin_call(prompt)[1] for prompt in ((3,), (1, 2), (1, 2))] == [b[1], a[1], again[1]]


def test_call_ids_of_a_model_do_not_depend_on_other_models():
    first, other = make_episode(), make_episode()
    order = ("policy", "opponent", "policy")
    ids = [first.begin_call((1, 2), llm=llm)[1] for llm in order]
    assert [other.begin_call((1, 2), llm=llm)[1] for llm in reversed(order)] == [ids[0], ids[1], ids[2]]


def test_calls_are_kept_in_the_order_in_which_they_began(make_call):
    current = make_episode()
    for index in (1, 2, 0):
        current.record(make_call(index, [1], [2]))
    assert [call.index for call in current.calls] == [0, 1, 2]


def test_the_experts_of_a_prompt_are_kept_once_for_all_calls_that_have_it(make_call):
    current = make_episode()
    for index in (0, 1):
        call = make_call(index, [1], [2])
        call.reply.completion.experts.extend(["".join(("A", "gE=")), ""])
        current.record(call)
    first, second = (call.reply.completion.experts for call in current.calls)
    assert first == second == ["AgE=", ""] and first[0] is second[0]


def test_a_call_that_is_answered_after_the_end_of_its_episode_is_not_recorded(make_call):
    current = make_episode()
    current.record(make_call(0, [1], [2]))
    current.end()
    with pytest.raises(asyncio.CancelledError, match="training/0/a/0 has ended"):
        current.record(make_call(1, [1], [2]))
    assert len(current.calls) == 1


def test_an_answer_leaves_a_lost_policy_lost(make_call):
    lost, toolless = DeviceMemoryError("full"), ToolsUnsupportedError("no tools", param="tools")
    for error, kept in ((lost, lost), (toolless, None)):
        one = make_episode()
        one.policy_error = error
        one.record(make_call(0, [1], [2]))
        assert one.policy_error is kept


def test_calls_of_remote_models_are_kept_apart_in_the_order_of_their_requests(make_call):
    current, messages = make_episode(), ({"role": "user", "content": "asked"},)
    begun = [current.begin_remote_call()]
    for index in range(2):
        current.begin_call((1,))
        current.record(make_call(index, [1], [2]))
        begun.append(current.begin_remote_call())
    current.reward_step(1.0)
    assert begun == [(0, 0), (1, 1), (2, 2)]
    for index, calls_before in reversed(begun):
        current.record_remote(RemoteCall(index, calls_before, "helper", messages, f"{index}"))
    assert [call.content for call in current.remote_calls] == ["0", "1", "2"]
    assert [call.index for call in current.calls] == [0, 1] and current.shaped_rewards == [0.0, 1.0]


def test_concurrent_tasks_have_episodes_of_their_own():
    async def agent(generation, started):
        with recording(make_episode(generation=generation)):
            started.append(generation)
            while len(started) < 3:
                await asyncio.sleep(0)
            assert await asyncio.gather(child(), child()) == [generation, generation]
            return episode().generation

    async def child():
        await asyncio.sleep(0)
        return episode().generation

    async def main():
        started = []
        return await asyncio.gather(*(agent(generation, started) for generation in range(3))), find_episode()

    assert asyncio.run(main()) == ([0, 1, 2], None)


def test_outside_an_episode_there_is_none():
    assert find_episode() is None
    with pytest.raises(RuntimeError, match=r"jaxft\.in_episode"):
        episode()


def test_rewards_of_single_answers(make_call):
    current = make_episode()
    with pytest.raises(RuntimeError, match=r"reward_step .*none"):
        current.reward_step(1.0)
    current.record(make_call(0, [1], [2]))
    assert current.shaped_rewards is None
    current.record(make_call(3, [1], [2]))
    current.reward_step(1.0)
    current.reward_step(0.5)
    current.record(make_call(5, [1], [2]))
    assert current.shaped_rewards == [0.0, 1.5, 0.0]
    for wrong in (True, float("nan"), float("inf"), 1e308):
        with pytest.raises(ValueError, match=re.escape(repr(wrong))):
            current.reward_step(wrong)
