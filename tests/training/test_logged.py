"""Forms of logged rows, what is refused of them, and the tokens that are trained."""

import numpy as np
import pytest

from jaxft.core.advantages import exponential_advantages
from jaxft.rollout.chat import ChatTemplate
from jaxft.rollout.tokenizer import load_tokenizer
from jaxft.training.logged import logged_sequences, read_logged

USER, ANSWER, OTHER = (
    {"role": role, "content": text} for role, text in (("user", "q"), ("assistant", "a"), ("assistant", "b"))
)
TURNS = [USER, ANSWER, {"role": "user", "content": "r"}, OTHER]


@pytest.fixture(scope="module")
def template():
    tokenizer = load_tokenizer()
    return ChatTemplate(tokenizer, (tokenizer.eos_token_id,))


def trained(template, row, **options):
    """Return the text of each conversation's trained tokens."""
    rows = logged_sequences(read_logged(row), template, **options)
    assert all(row.is_logged and len(row.tokens) == len(row.completion_mask) for row in rows)
    return [template.text(np.array(row.tokens)[row.completion_mask].tolist()) for row in rows]


BOTH = ["a<|end|>", "b<|end|>"]
SHAREGPT = [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]


@pytest.mark.parametrize(
    "row, learned",
    [
        ({"messages": TURNS}, ["a<|end|>b<|end|>"]),
        ({"messages": [USER, ANSWER | {"weight": 0}, *TURNS[2:]]}, ["b<|end|>"]),
        ({"messages": [USER | {"weight": None}, ANSWER | {"weight": None}]}, ["a<|end|>"]),
        (
            {"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}], "system": "s"},
            ["a<|end|>"],
        ),
        ({"prompt": [USER], "completion": [ANSWER]}, ["a<|end|>"]),
        ({"prompt": "q", "completion": "a"}, ["a<|end|>"]),
        ({"text": "qa"}, ["a<|end|>"]),  # the first token has no context
        ({"prompt": [USER], "chosen": [ANSWER], "rejected": [OTHER]}, BOTH),
        ({"chosen": [USER, ANSWER], "rejected": [USER, OTHER]}, BOTH),
        ({"prompt": [USER], "chosen": "a", "rejected": "b"}, BOTH),
        ({"prompt": "q", "chosen": "a", "rejected": "b"}, BOTH),
        (
            {"input": {"messages": [USER]}, "preferred_output": [ANSWER], "non_preferred_output": [OTHER]},
            BOTH,
        ),
        ({"prompt": TURNS[:3], "completion": [OTHER]}, ["b<|end|>"]),  # an answer in the prompt is context
    ],
)
def test_answers_with_their_ends_are_trained_in_every_form(template, row, learned):
    assert trained(template, row) == learned


def test_the_last_answer_alone(template):
    assert trained(template, {"messages": TURNS}, only_last=True)[0] == "b<|end|>"


@pytest.mark.parametrize(
    "row, message",
    [
        ({"mesages": []}, "did you mean 'messages'?"),
        ({}, "has the columns none, of no form"),
        ({"messages": []}, "messages is empty"),
        ({"messages": [USER]}, "no message of the assistant"),
        ({"messages": [ANSWER, USER, OTHER]}, "has the roles assistant, user, assistant"),
        ({"messages": [USER, ANSWER, USER]}, "a last of the assistant"),
        ({"messages": [USER, USER, ANSWER]}, "message 1 is of the user, after one of the user"),
        ({"messages": [USER, {"role": "assistant", "content": " "}]}, "message 1, of the assistant, is empty"),
        (
            {"messages": [USER, {"role": "tool", "content": "3"}, ANSWER]},
            "message 1 is of the tool, after one of the user",
        ),
        ({"messages": [USER | {"role": "human"}, ANSWER]}, "message 0 has the role 'human'; wanted 'user'"),
        ({"messages": [USER, ANSWER | {"weight": 2}]}, "messages[1] has the weight 2; wanted 0 or 1"),
        ({"messages": "q a"}, "'messages' is 'q a'; wanted a list of messages"),
        ({"messages": ["q"]}, "wanted a list of messages"),
        ({"conversations": "q"}, "'conversations' is 'q'; wanted a list"),
        ({"messages": [USER, ANSWER], "reward": float("nan")}, "wanted a finite number"),
        ({"messages": [USER, ANSWER], "tools": [{}]}, "tools: "),
        ({"messages": [USER, ANSWER], "reward": "good"}, "'reward' is 'good'; wanted a finite number"),
        ({"conversations": [{"from": "robot", "value": "a"}]}, "'from', one of human, user, gpt"),
        ({"conversations": [{"from": ["human"], "value": "a"}]}, "'from', one of human, user, gpt"),
        ({1: 2, "prompt": "x"}, "has the columns 1, prompt, of no form"),
        ({"conversations": [{"from": "human"}]}, "conversations[0] is {'from': 'human'}; wanted 'value'"),
        ({"prompt": "q", "completion": [ANSWER]}, "'prompt', 'completion' are texts and messages"),
        ({"prompt": "q", "completion": " "}, "'completion' is empty"),
        ({"prompt": "q", "completion": 3}, "'completion' is 3; wanted a text or a list of messages"),
        ({"prompt": "q", "completion": None}, "for the form completion it lacks 'completion'"),
        ({"prompt": "q", "choosen": "a", "rejected": "b"}, "did you mean 'chosen'?"),
        ({"text": 5}, "'text' is 5; wanted a text"),
        ({"chosen": [USER, ANSWER], "rejected": [USER | {"content": "r"}, OTHER]}, "wanted two answers to one prompt"),
        ({"prompt": "q", "chosen": "a", "rejected": "a"}, "has the same answer as chosen and as rejected"),
        ({"chosen": "a", "rejected": "b"}, "has no 'prompt'"),
        ({"prompt": "q", "chosen": [ANSWER], "rejected": [OTHER]}, "wanted all as one of the two"),
        ({"input": {}, "preferred_output": [ANSWER], "non_preferred_output": [OTHER]}, "'input' has no 'messages'"),
    ],
)
def test_rows_that_nothing_can_be_learned_from_are_refused(row, message):
    with pytest.raises(ValueError) as error:
        read_logged(row)
    assert message in str(error.value)


def test_exponential_weights_have_a_mean_of_1_and_no_overflow():
    found = np.asarray(exponential_advantages([1000.0, 1000.0 + np.log(3.0), np.nan], [0, 0, 1]))
    np.testing.assert_allclose(found, [0.5, 1.5, 0.0], rtol=1e-9)
