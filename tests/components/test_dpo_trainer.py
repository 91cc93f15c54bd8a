import asyncio
import io
import json

import pytest

from jaxft.components.dpo_trainer import DPOTrainer, DPOTrainerConfig
from jaxft.components.supervised_rows import gather_pairs
from jaxft.harness.data_models import (
    DPOItem,
    FinetuneConfig,
    TrainingJobRef,
    TrainingJobStatus,
    TrainingStatusEnum,
    Trajectory,
    TrajectoryCollection,
)
from jaxft.harness.errors import ConfigError, JobFailed, NoLearningSignal, TooManyFailures
from jaxft.harness.interfaces import TrainerAdapter, TrajectoryBuilder
from jaxft.harness.registry import TrainerAdapterConfig, TrajectoryBuilderConfig
from jaxft.policy.chat import ChatTemplate
from jaxft.policy.faults import PolicyLostError
from jaxft.runs.console import Console
from jaxft.runs.directory import RunDirectory


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
        figures = {"episodes": 10, "failed_episodes": len(failures), "pairs": len(given), **rewards}
        return TrajectoryCollection(trajectories=[given], run_id=run_id, metrics=figures, failures=failures)

    def log_progress(self, run_id: str, metrics: dict, output_dir: str | None = None) -> None:
        pass


class NotedConfig(TrainerAdapterConfig, name="noted_pairs"):
    pass


class Noted(TrainerAdapter):
    def __init__(self, status=TrainingStatusEnum.COMPLETED, **figures):
        super().__init__(NotedConfig())
        self.answer, self.figures, self.submitted = status, figures, []

    async def is_healthy(self) -> bool:
        return True

    async def submit(self, trajectories: TrajectoryCollection) -> TrainingJobRef:
        self.submitted.append(trajectories)
        return TrainingJobRef(run_id=trajectories.run_id, backend="noted")

    async def status(self, ref: TrainingJobRef) -> TrainingJobStatus:
        metadata = {"metrics": self.figures}
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


def test_collections_then_a_job_per_epoch(train, tmp_path):
    builder = Listed([pair(c) for c in "abcdefg"], [pair(c) for c in "cdefghij"])
    adapter = Noted(preference_accuracy=0.75)
    statuses, rows, shown = train(builder, adapter, num_runs=2)
    assert builder.runs == ["collection_00000", "collection_00001"]
    assert [status.run_id for status in statuses] == ["epoch_00000", "epoch_00001"]
    assert [prompts(collection) for collection in adapter.submitted] == ["abcdefghij"] * 2  # once each
    assert [len(group) for group in adapter.submitted[0].trajectories] == [1] * 10
    expected = {"episodes": 20, "failed_episodes": 5, "reward_mean": 7.5, "reward_max": 8, "pairs_trained": 10}
    assert rows[0].items() >= expected.items() and "episodes" not in rows[1]
    assert "10 pairs from 20 episodes" in shown and "collection_00000: 3 of 10 episodes failed" in shown
    assert "2/2 epochs  preferred 0.75" in shown
    assert json.loads((tmp_path / "run" / "reward_history.json").read_text())[0]["reward_mean"] == 7.5
    assert (tmp_path / "run" / "reward_plot.png").stat().st_size > 1000


def test_pairs_collected_and_pairs_trained_are_two_figures(train, tokenizer):
    class Counting(Noted):
        async def status(self, ref: TrainingJobRef) -> TrainingJobStatus:
            template = ChatTemplate(tokenizer, (tokenizer.eos_token_id,))
            self.figures = gather_pairs(self.submitted[-1], template).metrics  # what the local adapter says of a job
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
    assert "collection_00001 failed and is left out: OSError: the tool is down" in shown
    with pytest.raises(TooManyFailures, match="every collection failed; the last:\n") as caught:
        train(Listed(OSError("gone")), Noted(), continue_on_collection_error=True)
    assert "OSError: gone" in str(caught.value) and caught.value.exit_code == 3
    with pytest.raises(PolicyLostError):  # the next collection would fail likewise
        train(Listed(PolicyLostError("gone")), Noted(), num_runs=3, continue_on_collection_error=True)
    with pytest.raises(TooManyFailures, match="8 of 10 episodes failed"):
        train(Listed([pair("a")] * 2), Noted())


def test_no_pairs_are_no_learning_signal(train):
    with pytest.raises(NoLearningSignal, match=r"no pairs were found: every episode failed .*: 10 failed, 0 were"):
        train(Listed([]), Noted(), max_failed_share=1.0)


@pytest.mark.parametrize(("dropped", "why"), [(3, "record at least two candidates"), (10, "every episode was dropped")])
def test_dropped_episodes_are_told(train, dropped, why):
    class Dropping(Listed):
        async def finalize(self, run_id: str, meta: dict | None = None) -> TrajectoryCollection:
            figures = {"episodes": 10, "dropped_episodes": dropped, "calls": 0 if dropped == 10 else 7}
            return TrajectoryCollection(trajectories=[], run_id=run_id, metrics=figures)

    with pytest.raises(NoLearningSignal, match=f"no pairs were found: {why}"):
        train(Dropping(), Noted())
    assert f"collection_00000: {dropped} episodes were dropped" in train.shown.getvalue()


def test_a_failed_job_and_bad_updates_end_the_run(train):
    adapter = Noted(status=TrainingStatusEnum.FAILED)
    statuses, *_ = train(Listed([pair("a")] * 9), adapter, epochs=5)
    assert len(statuses) == 1
    with pytest.raises(JobFailed, match="not finite in 2 updates in a row, the last in epoch_00001"):
        train(Listed([pair("a")] * 9), Noted(nonfinite_updates=1.0), epochs=5, max_bad_updates=2)


def test_the_curriculum_is_refused(train):
    with pytest.raises(ConfigError, match="dpo_trainer collects before its epochs"):
        train(Listed([pair("a")]), Noted(), finetuning={"curriculum_learning": {"enabled": True}})
