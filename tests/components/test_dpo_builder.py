import asyncio

import pytest

from jaxft.components.dpo_builder import DPOTrajectoryBuilder, DPOTrajectoryBuilderConfig, pairs_of
from jaxft.harness.data_models import FinetuneConfig
from jaxft.harness.evaluation import Evaluation
from jaxft.policy.client import Reply
from jaxft.policy.recorder import episode, function


@pytest.fixture
def ask(record_call):
    """Answers a prompt in the current episode, as a language model would."""

    def ask(prompt_ids, token_ids, content="said"):
        record_call(prompt_ids, token_ids, content=content)
        return Reply(content, "stop", tuple(token_ids), (-1.0,), 0, episode().calls[-1].index)

    return ask


@pytest.fixture
def collect(make_items):
    def collect(workflow, names="a", reward=lambda item: 1.0, targets=None, **config):
        async def main():
            builder = DPOTrajectoryBuilder(DPOTrajectoryBuilderConfig(**config))
            await builder.bind_evaluation(Evaluation(workflow, {"r": reward}, "r", 4, 0), make_items(names))
            await builder.initialize(FinetuneConfig(**(targets or {})))
            await builder.start_run("run")
            return await builder.finalize("run")

        return asyncio.run(main())

    return collect


@pytest.fixture
def two_turns(ask):
    """Four candidates of the scores 0.1, 0.9, 0.5, 0.5 for the first turn, and two equal ones for the second."""

    async def agent(example):
        first = [ask([1, 2], [10 + number], f"first {number}") for number in range(4)]
        episode().record_candidates(first, [0.1, 0.9, 0.5, 0.5])
        second = [ask([1, 2, 11, 3], [20 + number], f"second {number}") for number in range(2)]
        episode().record_candidates(second, [0.3, 0.3])
        return "done"

    return agent


def answers(collection):
    """(chosen, rejected, reward) of every pair."""
    return [
        (pair.episode[0].chosen_response, pair.episode[0].rejected_response, pytest.approx(pair.reward))
        for group in collection.trajectories
        for pair in group
    ]


def test_all_pairs_that_differ_those_that_differ_most_first(collect, two_turns):
    collection = collect(two_turns)
    assert answers(collection) == [
        ("first 1", "first 0", 0.8),
        ("first 1", "first 2", 0.4),
        ("first 1", "first 3", 0.4),
        ("first 2", "first 0", 0.4),
        ("first 3", "first 0", 0.4),
    ]  # equal scores are no pair
    expected = {"decisions": 2, "lone_candidates": 0, "pairs": 5, "reward_mean": 1.0, "episodes": 1}
    assert collection.metrics.items() >= expected.items()


def test_a_pair_shares_its_prompt_and_keeps_its_tokens(collect, two_turns):
    pair = collect(two_turns).trajectories[0][0]
    chosen, rejected = pair.sequences
    assert (chosen.tokens, rejected.tokens) == ([1, 2, 11], [1, 2, 10])
    assert chosen.completion_mask == rejected.completion_mask == [False, False, True]
    assert chosen.sampler_logprobs == [0.0, 0.0, -1.0]
    assert [message.model_dump() for message in pair.episode[0].prompt] == [{"role": "user", "content": "asked"}]
    assert pair.metadata == {"turn": 0, "chosen_score": 0.9, "rejected_score": 0.1}
    assert (pair.example_id, pair.generation) == ("a", 0)


@pytest.mark.parametrize(
    "config, expected",
    [
        ({"exhaustive_pairs": False}, [("first 1", "first 0", 0.8)]),
        ({"min_score_diff": 0.5}, [("first 1", "first 0", 0.8)]),
        ({"min_score_diff": 0.8}, [("first 1", "first 0", 0.8)]),  # 0.9 - 0.1, whatever floats make of it
        ({"max_pairs_per_turn": 2}, [("first 1", "first 0", 0.8), ("first 1", "first 2", 0.4)]),
        ({"max_pairs_per_turn": 1, "reward_from_score_diff": False}, [("first 1", "first 0", 0.9)]),
        ({"min_score_diff": 0.81}, []),
    ],
)
def test_the_knobs(collect, two_turns, config, expected):
    assert answers(collect(two_turns, **config)) == expected


def test_lone_candidates_make_no_pair_unless_they_may_meet(collect, ask):
    async def single(example):
        number = episode().generation
        episode().record_candidates([ask([1, 2], [10 + number], f"try {number}")], [float(number)])

    apart = collect(single, num_generations=2)
    assert apart.trajectories == [] and apart.metrics["lone_candidates"] == 2
    joined = collect(single, num_generations=2, require_multiple_candidates=False)
    assert answers(joined) == [("try 1", "try 0", 1.0)]


def test_pairs_are_grouped_by_example_and_failed_episodes_left_out(collect, ask):
    async def agent(example):
        episode().record_candidates([ask([1], [2], "good"), ask([1], [3], "bad")], [1.0, 0.0])
        if example["name"] == "b":
            raise ValueError("lost")

    collection = collect(agent, "abc")
    assert [group[0].example_id for group in collection.trajectories] == ["a", "c"]
    assert len(collection.failures) == 1 and collection.metrics["failed_episodes"] == 1


def test_only_targeted_decisions_make_pairs(collect, ask):
    async def agent(example):
        with function("planner"):
            episode().record_candidates([ask([1], [2], "plan"), ask([1], [3], "worse")], [1.0, 0.0])
        episode().record_candidates([ask([4], [2], "text"), ask([4], [3], "worse")], [1.0, 0.0])

    assert answers(collect(agent, targets={"target_functions": ["planner"]})) == [("plan", "worse", 1.0)]


def test_equal_answers_are_no_pair_whatever_their_scores(collect, ask):
    async def agent(example):
        episode().record_candidates([ask([1], [2]), ask([1], [2])], [1.0, 0.0])

    assert answers(collect(agent)) == []
    assert pairs_of([]) == [] and pairs_of([], exhaustive=False) == []


def test_candidates_that_make_no_sense_are_refused(collect, ask):
    refused = []

    async def agent(example):
        first, second, other = ask([1], [2]), ask([1], [3]), ask([9], [4])
        strange = [
            ([first], [1.0, 2.0], "there are 1 answers and 2 scores"),
            ([], [], "there are 0 answers"),
            ([first], [float("nan")], "the score of a candidate is nan"),
            ([first], [True], "the score of a candidate is True"),
            ([first], [1e308], r"the score of a candidate is 1e\+308"),
            ([first, first], [1.0, 2.0], "an answer is a candidate already"),
            ([first, other], [1.0, 2.0], "the answers are to different prompts"),
            ([Reply("x", "stop", (1,), (0.0,), 0, None)], [1.0], "not given in this episode"),
        ]
        for replies, scores, message in strange:
            with pytest.raises(ValueError, match=message):
                episode().record_candidates(replies, scores)
            refused.append(message)
        episode().record_candidates([first, second], [1.0, 0.0])
        with pytest.raises(ValueError, match="an answer is a candidate already"):
            episode().record_candidates([second], [1.0])

    assert len(collect(agent).trajectories[0]) == 1 and len(refused) == 8


def test_ties_keep_the_order_of_the_candidates(ask, collect):
    async def agent(example):
        episode().record_candidates([ask([1], [10 + n], f"{n}") for n in range(3)], [1.0, 1.0, 0.0])

    assert [pair[:2] for pair in answers(collect(agent))] == [("0", "2"), ("1", "2")]
