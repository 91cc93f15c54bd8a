"""The shipped judge reads one number and guesses nothing; `tests/test_examples.py` runs it against a server."""

import asyncio
from types import SimpleNamespace

import pytest
from pydantic import ValidationError

from jaxft.components.evaluators import LLMJudgeConfig, llm_judge, parse_score
from jaxft.errors import ComponentError
from jaxft.harness.data_models import EvalInputItem
from jaxft.harness.evaluation import Evaluation
from jaxft.rollout.client import ChatClient
from jaxft.rollout.current import find_episode, outside_calls
from jaxft.rollout.recorder import TRAINING

ITEM = EvalInputItem(id="a", input_obj="2 + 2?", output_obj="{four}", expected_output_obj="4", full_dataset_entry={})


class Listener:
    """A language model of a user's own: replies in turn, and keeps what it was asked."""

    def __init__(self, *replies):
        self.replies = list(replies)
        self.asked = []

    async def chat(self, messages, **options):
        assert find_episode() is None
        self.asked.append((messages, options))
        return SimpleNamespace(content=self.replies.pop(0))


def make_judge(llm, **fields):
    async def main():
        async def get_llm(name):
            return llm

        factory = llm_judge(LLMJudgeConfig(llm="helper", **fields), SimpleNamespace(get_llm=get_llm))
        return await anext(factory)

    return asyncio.run(main())


@pytest.mark.parametrize(
    ("reply", "score"),
    [
        ("0", 0.0),
        (" 1.\n", 1.0),
        (".5", 0.5),
        ("score = 0.25", 0.25),
        ("Reasons.\n\n`0.75`", 0.75),
        ("<think>0.1</think>\n**Score: 0.9**", 0.9),
        ("1.5", None),
        ("-0.5", None),
        ("-0", 0.0),
        ("50%", None),
        ("0.7 of 1", None),
        ("about 0.7", None),
        ("0.7\nbecause", None),
        ("nan", None),
        ("1e0", None),
        (" \n", None),
    ],
)
def test_one_number_alone_on_the_last_line_is_the_score(reply, score):
    assert parse_score(reply) == score


def test_the_judge_is_asked_once_about_an_answer_and_gives_its_reason():
    llm = Listener("It is the same number.\n0.9", "I cannot say")
    judge = make_judge(llm, prompt="{question} {expected} {answer} {{}}")
    scored = asyncio.run(judge(ITEM))
    assert (scored.id, scored.score, scored.reasoning) == ("a", 0.9, "It is the same number.\n0.9")
    assert llm.asked == [([{"role": "user", "content": "2 + 2? 4 {four} {}"}], {"temperature": 0.0})]
    scored = asyncio.run(judge(ITEM))
    assert (scored.score, scored.reasoning, scored.error) == (None, "I cannot say", None)


def test_a_reply_without_a_number_is_not_usable_and_a_failing_judge_is_a_failure(make_items):
    async def agent(example):
        return example["name"]

    async def evaluate():
        evaluation = Evaluation(agent, {"judge": make}, "judge", 1, 0)
        return await evaluation.run(make_items("abc"), stream=TRAINING, rollout_index=0)

    make = make_judge(Listener("0.5", "hm"))  # the third episode finds no reply
    outcomes = asyncio.run(evaluate())
    assert [outcome.reward for outcome in outcomes] == [0.5, None, None]
    assert [outcome.error is None for outcome in outcomes] == [True, True, False]
    assert "evaluator 'judge': IndexError" in outcomes[2].error


def test_a_policy_can_be_the_judge(policy, make_items):
    judge = make_judge(ChatClient(policy, "helper"), prompt="{answer}?")
    before = outside_calls()

    async def agent(example):
        return "yes"

    async def evaluate():
        evaluation = Evaluation(agent, {"judge": judge}, "judge", 2, 0)
        return await evaluation.run(make_items("ab"), stream=TRAINING, rollout_index=0)

    outcomes = asyncio.run(evaluate())
    assert [outcome.error for outcome in outcomes] == [None, None]
    assert outcomes[0].reasonings == outcomes[1].reasonings  # greedy
    assert [outcome.episode.calls for outcome in outcomes] == [[], []] and outside_calls() == before


def test_what_cannot_chat_is_no_judge():
    with pytest.raises(ComponentError, match=r"llms\.helper is a dict"):
        make_judge({})


@pytest.mark.parametrize(
    ("fields", "fault"),
    [
        ({"prompt": "{answer"}, "is not a template"),
        ({"prompt": "{question}"}, "must contain {answer}"),
        ({"prompt": '{answer} {"score": 1}'}, '{"score"}'),
        ({"prompt": "{answer.__class__}{answer}"}, "{answer.__class__}"),
        ({"temperature": -1}, "temperature"),
    ],
)
def test_impossible_fields_are_refused(fields, fault):
    with pytest.raises(ValidationError) as caught:
        LLMJudgeConfig(llm="helper", **fields)
    assert fault in str(caught.value)
