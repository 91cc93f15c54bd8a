"""Training rows of recorded calls: no sampled token is lost or trained twice, whatever the order of calls."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxft.rollout.calls import Prompt
from jaxft.rollout.sequences import TokenSequence, episode_messages, token_sequences


def test_a_conversation_becomes_one_row(make_call):
    first = make_call(0, [1, 2], [3, 4], temperature=0.5)
    second = make_call(1, [1, 2, 3, 4, 5, 6], [7], finish_reason="length")
    (row,) = token_sequences([first, second])
    assert row.tokens == [1, 2, 3, 4, 5, 6, 7]
    assert row.completion_mask == [False, False, True, True, False, False, True]
    assert row.sampler_logprobs == row.behavior_logprobs == [0.0, 0.0, -1.0, -2.0, 0.0, 0.0, -101.0]
    assert row.temperatures == [0.5, 0.5, 0.5, 0.5, 1.0, 1.0, 1.0]
    assert row.policy_versions == [-1, -1, 0, 0, -1, -1, 1]
    assert row.truncated and row.llm == "policy"


def test_a_row_has_the_experts_of_the_first_call_that_was_fed_each_token(make_call):
    first, second = make_call(0, [1, 2], [3, 4]), make_call(1, [1, 2, 3, 4, 5, 6], [7, 8])
    first.reply.completion.experts, second.reply.completion.experts = ["a", "b", "c"], [*"tuvwxyz"]
    other = make_call(2, [1, 2, 3], [9])
    other.reply.completion.experts = [*"TUV"]
    (row,) = token_sequences([first, second])
    assert row.experts == [*"abcwxyz", ""]  # the last token was never fed
    assert row.model_dump(mode="json")["experts"] == row.experts
    assert TokenSequence.model_validate_json(row.model_dump_json()).experts == row.experts
    (row,) = token_sequences([first, second], lambda call: call.index == 1)  # the other is context
    assert row.experts == [*"tuvwxyz", ""]
    assert [row.experts for row in token_sequences([first, other])] == [["a", "b", "c", ""], ["T", "U", "V", ""]]
    (row,) = token_sequences([make_call(0, [1], [2])])
    assert row.experts == [] and "experts" not in row.model_dump()


def test_an_episode_is_truncated_where_its_last_answer_was_cut(make_call):
    def truncated(*calls, is_target=lambda call: True):
        rows = token_sequences(list(calls), is_target)
        return [(row.tokens, row.episode_truncated) for row in rows]

    first, cut = make_call(0, [1], [2]), make_call(1, [1, 2, 3], [4], finish_reason="length")
    assert truncated(first, cut) == truncated(cut, first) == [([1, 2, 3, 4], True)]
    # In the middle of an episode, in its row or in another, it is no truncation; nor is somebody else's answer.
    assert truncated(first, cut, make_call(2, [1, 2, 3, 4, 5], [6])) == [([1, 2, 3, 4, 5, 6], False)]
    assert truncated(first, cut, make_call(2, [8], [9])) == [([1, 2, 3, 4], False), ([8, 9], False)]
    assert truncated(first, cut, is_target=lambda call: call.index == 0) == [([1, 2], False)]
    # An earlier call that nobody trains may extend it; the row still ends with it.
    earlier, last = make_call(0, [1, 2, 3], [4]), make_call(1, [1], [2], finish_reason="length")
    assert truncated(earlier, last, is_target=lambda call: call.index == 1) == [([1, 2], True)]
    assert truncated(earlier, last) == [([1, 2, 3, 4], False)]
    # Of several rows it is the one with the last answer.
    last = make_call(2, [8], [9], finish_reason="length")
    assert truncated(first, cut, last) == [([1, 2, 3, 4], False), ([8, 9], True)]


def test_a_call_that_extends_no_row_begins_another(make_call):
    first, branch = make_call(0, [1], [2]), make_call(2, [1, 2, 8], [9])
    extends, edited = make_call(1, [1, 2, 3], [4]), make_call(3, [1, 7, 3], [4])
    rows = token_sequences([first, extends, branch, edited])
    assert [row.tokens for row in rows] == [[1, 2, 3, 4], [1, 2, 8, 9], [1, 7, 3, 4]]
    # The first answer is trained once; in the branch it is context.
    assert [sum(row.completion_mask) for row in rows] == [2, 1, 1]


def test_parallel_calls_with_one_prompt_are_rows_of_their_own(make_call):
    rows = token_sequences([make_call(index, [1, 2], [3 + index]) for index in range(3)])
    assert [row.tokens for row in rows] == [[1, 2, 3], [1, 2, 4], [1, 2, 5]]


def test_language_models_do_not_share_rows(make_call):
    rows = token_sequences([make_call(0, [1], [2], llm="a"), make_call(1, [1, 2], [3], llm="b")])
    assert [(row.llm, row.tokens) for row in rows] == [("a", [1, 2]), ("b", [1, 2, 3])]


def test_results_of_tools_are_known_in_the_row_that_they_extend(make_call):
    first = make_call(0, [1, 2], [3])
    second = make_call(1, [], [7], prompt=Prompt("", (1, 2, 3, 4, 5, 6), observations=(4,)))
    last = make_call(2, [], [9], prompt=Prompt("", (1, 2, 3, 4, 5, 6, 7, 8), observations=(7,)))
    (row,) = token_sequences([first, second, last])
    assert row.observations == [place in (4, 7) for place in range(9)]
    assert TokenSequence.model_validate_json(row.model_dump_json()).model_dump() == row.model_dump()
    cut, alone = token_sequences([first, second, last], lambda call: call.index < 2), token_sequences([first])
    assert cut[0].observations == [place == 4 for place in range(7)]  # what no answer follows is cut off
    assert alone[0].observations == [] and "observations" not in alone[0].model_dump()


def test_a_result_counts_once_however_many_answers_follow_it(make_call):
    seen, ids = (4, 6), (1, 2, 3, 4, 5, 6, 7)
    answers = [make_call(1 + n, [], [7 + n], prompt=Prompt("", ids, observations=seen)) for n in range(2)]
    other = make_call(3, [], [9], prompt=Prompt("", (*ids[:6], 8), observations=seen))
    rows = token_sequences([make_call(0, [1, 2], [3]), *answers, other])
    assert [np.flatnonzero(row.observations).tolist() for row in rows] == [[4, 6], [], [6]]


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
def test_no_sampled_token_is_lost_or_trained_twice(make_call, asked, data):
    calls = [make_call(index, prompt, answer) for index, (prompt, answer) in enumerate(asked)]
    rows = token_sequences(calls)
    for row in rows:
        lengths = {len(values) for _, values in row if isinstance(values, list)}
        assert lengths - {0} == {len(row.tokens)}
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


def dialog(*contents):
    roles = ("user", "assistant")
    return tuple({"role": roles[place % 2], "content": content} for place, content in enumerate(contents))


def test_messages_for_people_hold_every_answer_once(make_call):
    first = make_call(0, [1], [2], messages=dialog("q0"), content="a0")
    second = make_call(1, [1, 2, 3], [4], messages=dialog("q0", "a0", "q1"), content="a1")
    apart = make_call(2, [9], [8], messages=dialog("other"), content="a2")
    assert tuple(episode_messages([first, second])) == dialog("q0", "a0", "q1", "a1")
    assert tuple(episode_messages([first, second, apart])) == (
        *dialog("q0", "a0", "q1", "a1"),
        *dialog("other", "a2"),
    )
    assert episode_messages([]) == []


def test_tokens_know_the_turn_that_sampled_them(make_call):
    calls = [make_call(0, [1, 2], [3]), make_call(4, [1, 2, 3, 9], [5, 6]), make_call(2, [7], [8])]
    turns = {tuple(sequence.tokens): sequence.turns for sequence in token_sequences(calls)}
    assert turns == {(1, 2, 3, 9, 5, 6): [-1, -1, 0, -1, 2, 2], (7, 8): [-1, 1]}
