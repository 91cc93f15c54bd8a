import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxft.rollout.recorder import TRAINING, VALIDATION, Call, Episode, episode, find_episode, recording
from jaxft.rollout.sequences import episode_messages, token_sequences


def make_episode(**changes):
    fields = {"run_seed": 0, "stream": TRAINING, "rollout_index": 0, "example_id": "a", "generation": 0}
    return Episode(**(fields | changes))


def make_call(index, prompt_ids, token_ids, **changes):
    """A call whose log-probabilities tell its tokens from those of all other calls."""
    logprobs = tuple(-float(100 * index + place + 1) for place in range(len(token_ids)))
    fields = {
        "index": index,
        "llm": "policy",
        "messages": ({"role": "user", "content": f"question {index}"},),
        "content": f"answer {index}",
        "prompt_text": "",
        "prompt_ids": tuple(prompt_ids),
        "token_ids": tuple(token_ids),
        "sampler_logprobs": logprobs,
        "behavior_logprobs": logprobs,
        "temperature": 1.0,
        "finish_reason": "stop",
        "policy_version": index,
    }
    return Call(**(fields | changes))


VARIED = [
    {},
    {"stream": VALIDATION},
    {"rollout_index": 1},
    {"example_id": "b"},
    {"generation": 1},
]


def test_episodes_differ_in_all_that_makes_them_repeatable():
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
    assert repeated.random.random() == repeated.random.random()


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


def test_calls_are_kept_in_the_order_in_which_they_began():
    current = make_episode()
    for index in (1, 2, 0):
        current.record(make_call(index, [1], [2]))
    assert [call.index for call in current.calls] == [0, 1, 2]


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
    with pytest.raises(RuntimeError, match="works inside a workflow that jaxft runs"):
        episode()


def test_a_conversation_becomes_one_row():
    first = make_call(0, [1, 2], [3, 4], temperature=0.5)
    second = make_call(1, [1, 2, 3, 4, 5, 6], [7], finish_reason="length")
    (row,) = token_sequences([first, second])
    assert row.tokens == [1, 2, 3, 4, 5, 6, 7]
    assert row.completion_mask == [False, False, True, True, False, False, True]
    assert row.sampler_logprobs == row.behavior_logprobs == [0.0, 0.0, -1.0, -2.0, 0.0, 0.0, -101.0]
    assert row.temperatures == [0.5, 0.5, 0.5, 0.5, 1.0, 1.0, 1.0]
    assert row.policy_versions == [-1, -1, 0, 0, -1, -1, 1]
    assert row.truncated and row.llm == "policy"


def test_an_episode_is_truncated_where_its_last_answer_was_cut():
    def truncated(*calls, is_target=lambda call: True):
        rows = token_sequences(list(calls), is_target)
        return [(row.tokens, row.episode_truncated) for row in rows]

    first, cut = make_call(0, [1], [2]), make_call(1, [1, 2, 3], [4], finish_reason="length")
    assert truncated(first, cut) == truncated(cut, first) == [([1, 2, 3, 4], True)]
    # In the middle of an episode, in its row or in another, it is no truncation; nor is somebody else's answer.
    assert truncated(first, cut, make_call(2, [1, 2, 3, 4, 5], [6])) == [([1, 2, 3, 4, 5, 6], False)]
    assert truncated(first, cut, make_call(2, [8], [9])) == [([1, 2, 3, 4], False), ([8, 9], False)]
    assert truncated(first, cut, is_target=lambda call: call.index == 0) == [([1, 2], False)]
    # Of several rows it is the one with the last answer.
    last = make_call(2, [8], [9], finish_reason="length")
    assert truncated(first, cut, last) == [([1, 2, 3, 4], False), ([8, 9], True)]


def test_what_does_not_extend_a_row_begins_another():
    first, branch = make_call(0, [1], [2]), make_call(2, [1, 2, 8], [9])
    extends, edited = make_call(1, [1, 2, 3], [4]), make_call(3, [1, 7, 3], [4])
    rows = token_sequences([first, extends, branch, edited])
    assert [row.tokens for row in rows] == [[1, 2, 3, 4], [1, 2, 8, 9], [1, 7, 3, 4]]
    # The first answer is trained once; in the branch it is context.
    assert [sum(row.completion_mask) for row in rows] == [2, 1, 1]


def test_parallel_calls_with_one_prompt_are_rows_of_their_own():
    rows = token_sequences([make_call(index, [1, 2], [3 + index]) for index in range(3)])
    assert [row.tokens for row in rows] == [[1, 2, 3], [1, 2, 4], [1, 2, 5]]


def test_language_models_do_not_share_rows():
    rows = token_sequences([make_call(0, [1], [2], llm="a"), make_call(1, [1, 2], [3], llm="b")])
    assert [(row.llm, row.tokens) for row in rows] == [("a", [1, 2]), ("b", [1, 2, 3])]


@st.composite
def prompts_and_answers(draw):
    """Calls that extend earlier ones, repeat their prompts, or have nothing to do with them."""
    ids = st.lists(st.integers(0, 2), min_size=1, max_size=3)
    calls = []
    for _ in range(draw(st.integers(1, 7))):
        prompt = draw(ids)
        if calls and draw(st.booleans()):
            known_prompt, known_answer = draw(st.sampled_from(calls))
            prompt = known_prompt + known_answer + prompt if draw(st.booleans()) else known_prompt
        calls.append((prompt, draw(ids)))
    return calls


@settings(deadline=None)
@given(prompts_and_answers(), st.data())
def test_no_sampled_token_is_lost_or_trained_twice(asked, data):
    calls = [make_call(index, prompt, answer) for index, (prompt, answer) in enumerate(asked)]
    rows = token_sequences(calls)
    for row in rows:
        lengths = {len(values) for _, values in row if isinstance(values, list)}
        assert lengths == {len(row.tokens)}
        assert not row.completion_mask[0]
    trained = [
        (logprob, token)
        for row in rows
        for logprob, token, chosen in zip(row.sampler_logprobs, row.tokens, row.completion_mask, strict=True)
        if chosen
    ]
    sampled = [pair for call in calls for pair in zip(call.sampler_logprobs, call.token_ids, strict=True)]
    assert sorted(trained) == sorted(sampled)
    # The order in which calls happened to begin leaves no trace in the tokens of the rows.
    shuffled = token_sequences(data.draw(st.permutations(calls)))
    assert [row.tokens for row in shuffled] == [row.tokens for row in rows]


def said(*contents):
    roles = ("user", "assistant")
    return tuple({"role": roles[place % 2], "content": content} for place, content in enumerate(contents))


def test_messages_for_people_hold_every_answer_once():
    first = make_call(0, [1], [2], messages=said("q0"), content="a0")
    second = make_call(1, [1, 2, 3], [4], messages=said("q0", "a0", "q1"), content="a1")
    apart = make_call(2, [9], [8], messages=said("other"), content="a2")
    assert tuple(episode_messages([first, second])) == said("q0", "a0", "q1", "a1")
    assert tuple(episode_messages([first, second, apart])) == (*said("q0", "a0", "q1", "a1"), *said("other", "a2"))
    assert episode_messages([]) == []


def test_tokens_know_the_turn_that_sampled_them():
    calls = [make_call(0, [1, 2], [3]), make_call(4, [1, 2, 3, 9], [5, 6]), make_call(2, [7], [8])]
    turns = {tuple(sequence.tokens): sequence.turns for sequence in token_sequences(calls)}
    assert turns == {(1, 2, 3, 9, 5, 6): [-1, -1, 0, -1, 2, 2], (7, 8): [-1, 1]}


def test_rewards_of_single_answers():
    current = make_episode()
    with pytest.raises(RuntimeError, match="the episode has none yet"):
        current.reward_step(1.0)
    current.record(make_call(0, [1], [2]))
    assert current.shaped_rewards is None
    current.record(make_call(3, [1], [2]))
    current.reward_step(1.0)
    current.reward_step(0.5)
    current.record(make_call(5, [1], [2]))
    assert current.shaped_rewards == [0.0, 1.5, 0.0]
    for wrong in (True, float("nan"), float("inf"), 1e308):
        with pytest.raises(ValueError, match="the reward of a step is"):
            current.reward_step(wrong)
