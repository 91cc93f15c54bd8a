import asyncio
import io
import json
import re

import pytest

from jaxft.components.configs import DPOTrainerConfig, DPOTrajectoryBuilderConfig
from jaxft.components.dpo import DPOTrainer, DPOTrajectoryBuilder, ranked_pairs
from jaxft.errors import ConfigError, JobFailed, NoLearningSignal, PolicyLostError, TooManyFailures
from jaxft.harness.contracts import TrainerAdapter, TrajectoryBuilder
from jaxft.harness.data_models import (
    DPOItem,
    FinetuneConfig,
    TrainingJobRef,
    TrainingJobStatus,
    TrainingStatusEnum,
    Trajectory,
    TrajectoryCollection,
)
from jaxft.harness.evaluation import Evaluation
from jaxft.harness.registry import TrainerAdapterConfig, TrajectoryBuilderConfig
from jaxft.rollout.calls import Completion, Reply
from jaxft.rollout.chat import ChatTemplate
from jaxft.rollout.current import episode, named_function
from jaxft.runs.console import Console
from jaxft.runs.directory import RunDirectory
from jaxft.training.rows import gather_pairs


@pytest.fixture
def ask(record_call):
    """Answers a prompt in the current episode, as a language model would."""

    def ask(prompt_ids, token_ids, content="said"):
        record_call(prompt_ids, token_ids, content=content)
        return Reply(content, Completion(list(token_ids)), call_index=episode().calls[-1].index)

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
    assert pair.metadata == {
        "dpo_type": "preference_pair",
        "example_id": "a",
        "turn_id": "0",
        "chosen_score": 0.9,
        "rejected_score": 0.1,
        "score_diff": 0.9 - 0.1,
        "chosen_index": 1,
        "rejected_index": 0,
    }
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
        with named_function("planner"):
            episode().record_candidates([ask([1], [2], "plan"), ask([1], [3], "worse")], [1.0, 0.0])
        episode().record_candidates([ask([4], [2], "text"), ask([4], [3], "worse")], [1.0, 0.0])

    assert answers(collect(agent, targets={"target_functions": ["planner"]})) == [("plan", "worse", 1.0)]


def test_equal_answers_are_no_pair_whatever_their_scores(collect, ask):
    async def agent(example):
        episode().record_candidates([ask([1], [2]), ask([1], [2])], [1.0, 0.0])

    assert answers(collect(agent)) == []
    assert ranked_pairs([]) == [] and ranked_pairs([], exhaustive=False) == []


def test_candidates_that_make_no_sense_are_refused(collect, ask):
    refused = []

    async def agent(example):
        first, second, other = ask([1], [2]), ask([1], [3]), ask([9], [4])
        strange = [
            ([first], [1.0, 2.0], "1 answers and 2 scores"),
            ([], [], "0 answers"),
            ([first], [float("nan")], "is nan"),
            ([first], [True], "is True"),
            ([first], [1e308], r"is 1e\+308"),
            ([first, first], [1.0, 2.0], "an answer is a candidate already"),
            ([first, other], [1.0, 2.0], "the answers are to different prompts"),
            ([Reply("x", Completion([1]))], [1.0], "not given in this episode"),
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


def pair(name, reward=1.0):
    item = DPOItem(prompt=name, chosen_response="good", rejected_response="bad")
    return Trajectory(episode=[item], reward=reward)


class ListedConfig(TrajectoryBuilderConfig, name="listed_pairs"):
    pass


class Listed(TrajectoryBuilder):
    """Gives the collections that it was made with; an exception is raised."""

    def __init__(self, *collections):
        super().__init__(ListedConfig())
        self.collections = list(collections)
        self.runs = []

    async def start_run(self, run_id: str, meta: dict | None = None) -> None:
        self.runs.append(run_id)

    async def finalize(self, run_id: str, meta: dict | None = None) -> TrajectoryCollection:
        given = self.collections.pop(0)
        if isinstance(given, Exception):
            raise given
        failures = [f"example '{n}', generation 0: ValueError: x\ntraceback" for n in range(10 - len(given))]
        rewards = {"reward_mean": len(given), "reward_max": len(given)}
        metrics = {"episodes": 10, "failed_episodes": len(failures), "pairs": len(given), **rewards}
        return TrajectoryCollection(trajectories=[given], run_id=run_id, metrics=metrics, failures=failures)

    def log_progress(self, run_id: str, metrics: dict, output_dir: str | None = None) -> None:
        pass


class NotedConfig(TrainerAdapterConfig, name="noted_pairs"):
    pass


class Noted(TrainerAdapter):
    def __init__(self, status=TrainingStatusEnum.COMPLETED, **metrics):
        super().__init__(NotedConfig())
        self.answer, self.metrics, self.submitted = status, metrics, []

    async def is_healthy(self) -> bool:
        return True

    async def submit(self, trajectories: TrajectoryCollection) -> TrainingJobRef:
        self.submitted.append(trajectories)
        return TrainingJobRef(run_id=trajectories.run_id, backend="noted")

    async def status(self, ref: TrainingJobRef) -> TrainingJobStatus:
        metadata = {"metrics": self.metrics}
        return TrainingJobStatus(run_id=ref.run_id, backend="noted", status=self.answer, metadata=metadata)

    async def wait_until_complete(self, ref: TrainingJobRef, poll_interval: float = 10.0) -> TrainingJobStatus:
        return await self.status(ref)

    def log_progress(self, ref: TrainingJobRef, metrics: dict, output_dir: str | None = None) -> None:
        pass


@pytest.fixture
def train(tmp_path):
    def train(builder, adapter, epochs=2, finetuning=None, **config):
        async def main(directory, shown):
            trainer = DPOTrainer(DPOTrainerConfig(**config), directory=directory, console=Console(shown))
            await trainer.bind_components(builder, adapter)
            await trainer.initialize(FinetuneConfig(**(finetuning or {})))
            try:
                return await trainer.run(epochs)
            finally:
                await trainer.cleanup()

        shown = train.shown = io.StringIO()
        with RunDirectory.create(tmp_path / "run", overwrite=True) as directory:
            statuses = asyncio.run(main(directory, shown))
        log = tmp_path / "run" / "training_metrics.jsonl"
        return statuses, [json.loads(row) for row in log.read_text().splitlines()], shown.getvalue()

    return train


def prompts(collection):
    return "".join(one.episode[0].prompt for group in collection.trajectories for one in group)


class Refusing(Noted):
    async def submit(self, trajectories: TrajectoryCollection) -> TrainingJobRef:
        raise ConnectionError("nobody is there")


def test_a_job_that_cannot_be_submitted_ends_the_run(train):
    with pytest.raises(ConnectionError, match="nobody is there"):
        train(Listed([pair(c) for c in "abcdefg"]), Refusing(), num_runs=1)


def test_collections_then_a_job_per_epoch(train, tmp_path):
    builder = Listed([pair(c) for c in "abcdefg"], [pair(c) for c in "cdefghij"])
    adapter = Noted(preference_accuracy=0.75)
    statuses, rows, shown = train(builder, adapter, num_runs=2)
    assert builder.runs == ["collection_00000", "collection_00001"]
    assert [status.run_id for status in statuses] == ["epoch_00000", "epoch_00001"]
    assert [prompts(collection) for collection in adapter.submitted] == ["abcdefghij"] * 2  # once each
    assert [len(group) for group in adapter.submitted[0].trajectories] == [1] * 10
    reward_mean = pytest.approx((7 * 7 + 8 * 8) / 15)  # weighted by the episodes that ended well
    expected = {"episodes": 20, "failed_episodes": 5, "reward_max": 8, "pairs_trained": 10}
    assert rows[0].items() >= expected.items() and rows[0]["reward_mean"] == reward_mean
    assert "episodes" not in rows[1]
    assert "10 pairs from 20 episodes" in shown and "collection_00000: 3 of 10 episodes failed" in shown
    assert re.search(r"2/2 epochs  reward - +preferred 0\.75", shown)
    assert json.loads((tmp_path / "run" / "reward_history.json").read_text())[0]["reward_mean"] == reward_mean
    assert (tmp_path / "run" / "reward_plot.png").stat().st_size > 1000


def test_pairs_collected_and_pairs_trained_are_two_metrics(train, tokenizer):
    class Counting(Noted):
        async def status(self, ref: TrainingJobRef) -> TrainingJobStatus:
            template = ChatTemplate(tokenizer, (tokenizer.eos_token_id,))
            self.metrics = gather_pairs(self.submitted[-1], template).metrics  # what the local adapter says of a job
            return await super().status(ref)

    _, rows, _ = train(Listed([pair(c) for c in "aaabbbccca"]), Counting())
    assert (rows[0]["pairs"], rows[0]["pairs_trained"], rows[1]["pairs_trained"]) == (10, 3, 3)


def test_double_pairs_may_stay_and_pairs_may_be_limited(train):
    many = [pair("a", 0.5), pair("b", 2.0), pair("c", 1.0), pair("b", 2.0), pair("d", 0.1)]
    for config, expected in (
        ({}, "abcd"),
        ({"deduplicate_pairs": False}, "abcbd"),
        ({"max_pairs": 2}, "bc"),
        ({"deduplicate_pairs": False, "max_pairs": 3}, "bbc"),
    ):
        adapter = Noted()
        train(Listed(many), adapter, epochs=1, **config)
        assert prompts(adapter.submitted[0]) == expected


def test_a_collection_that_fails_ends_the_run_unless_it_may(train):
    def broken():
        return Listed([pair("a")] * 9, OSError("the tool is down"), [pair("b")] * 9)

    with pytest.raises(OSError, match="the tool is down"):
        train(broken(), Noted(), num_runs=3)
    adapter = Noted()
    *_, shown = train(broken(), adapter, num_runs=3, continue_on_collection_error=True)
    assert prompts(adapter.submitted[0]) == "ab"
    assert "collection_00001 failed" in shown and "OSError: the tool is down" in shown
    with pytest.raises(TooManyFailures, match="every collection failed") as caught:
        train(Listed(OSError("gone")), Noted(), continue_on_collection_error=True)
    assert "OSError: gone" in str(caught.value) and caught.value.exit_code == 3
    with pytest.raises(PolicyLostError):  # the next collection would fail likewise
        train(Listed(PolicyLostError("gone")), Noted(), num_runs=3, continue_on_collection_error=True)
    with pytest.raises(TooManyFailures, match="8 of 10 episodes"):
        train(Listed([pair("a")] * 2), Noted())


def test_no_pairs_are_no_learning_signal(train):
    with pytest.raises(NoLearningSignal, match="10 failed, 0 were dropped"):
        train(Listed([]), Noted(), max_failed_fraction=1.0)


@pytest.mark.parametrize(("dropped", "why"), [(3, "record at least two candidates"), (10, "every episode was dropped")])
def test_dropped_episodes_are_told(train, dropped, why):
    class Dropping(Listed):
        async def finalize(self, run_id: str, meta: dict | None = None) -> TrajectoryCollection:
            metrics = {"episodes": 10, "dropped_episodes": dropped, "calls": 0 if dropped == 10 else 7}
            return TrajectoryCollection(trajectories=[], run_id=run_id, metrics=metrics)

    with pytest.raises(NoLearningSignal, match=why):
        train(Dropping(), Noted())
    assert f"collection_00000: {dropped} episodes were dropped" in train.shown.getvalue()


def test_a_failed_job_and_bad_updates_end_the_run(train):
    adapter = Noted(status=TrainingStatusEnum.FAILED)
    statuses, *_ = train(Listed([pair("a")] * 9), adapter, epochs=5)
    assert len(statuses) == 1
    with pytest.raises(JobFailed, match=r"2 updates .*epoch_00001"):
        train(Listed([pair("a")] * 9), Noted(nonfinite_updates=1.0), epochs=5, max_bad_updates=2)


def test_the_curriculum_is_refused(train):
    with pytest.raises(ConfigError, match=r"curriculum_learning.enabled"):
        train(Listed([pair("a")]), Noted(), finetuning={"curriculum_learning": {"enabled": True}})
