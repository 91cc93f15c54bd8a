import asyncio
import io
import json
import math
import re

import pytest

from jaxft.components.configs import GRPOTrainerConfig, GRPOTrajectoryBuilderConfig, LocalTrainerAdapterConfig
from jaxft.components.grpo import GRPOTrainer, GRPOTrajectoryBuilder
from jaxft.components.local_adapter import LocalTrainerAdapter
from jaxft.errors import (
    ComponentError,
    JobFailed,
    NoLearningSignal,
    NothingToTrain,
    RequestError,
    TooManyFailures,
    TrajectoryError,
)
from jaxft.harness.contracts import TrainerAdapter
from jaxft.harness.data_models import (
    EpisodeItemRole,
    FinetuneConfig,
    RewardFunctionConfig,
    TrainingJobRef,
    TrainingJobStatus,
    TrainingStatusEnum,
    TrajectoryCollection,
)
from jaxft.harness.evaluation import Evaluation, Validation
from jaxft.harness.functions import Function
from jaxft.harness.registry import TrainerAdapterConfig
from jaxft.redaction import hiding
from jaxft.rollout.calls import RemoteCall
from jaxft.rollout.current import episode
from jaxft.runs.console import Console
from jaxft.runs.directory import RunDirectory


async def bound(workflow, reward, items, num_generations=3, max_concurrency=4, failed_reward=None):
    """A builder with an evaluation of this workflow."""
    config = GRPOTrajectoryBuilderConfig(num_generations=num_generations, failed_reward=failed_reward)
    builder = GRPOTrajectoryBuilder(config)
    await builder.bind_evaluation(Evaluation(workflow, {"reward": reward}, "reward", max_concurrency, 0), items)
    return builder


def collect(workflow, reward, items, meta=None, **options):
    async def main():
        builder = await bound(workflow, reward, items, **options)
        await builder.start_run("run", meta)
        return await builder.finalize("run")

    return asyncio.run(main())


async def name_of(example):
    return f"{example['name']}{episode().generation}"


def test_a_group_per_example_in_the_order_of_the_dataset(make_items):
    async def slow_first(example):
        await asyncio.sleep(0.02 if example["name"] == "c" else 0.0)
        return await name_of(example)

    rewards = {"c0": 1.0, "c1": 2.0, "a0": 3.0, "a1": 4.0}
    collection = collect(slow_first, lambda item: rewards[item.output_obj], make_items("ca"), num_generations=2)
    assert [[(t.example_id, t.generation, t.reward) for t in group] for group in collection.trajectories] == [
        [("c", 0, 1.0), ("c", 1, 2.0)],
        [("a", 0, 3.0), ("a", 1, 4.0)],
    ]
    assert collection.metrics["episodes"] == 4 and collection.metrics["failed_episodes"] == 0
    assert collection.failures == []
    assert collection.timings["seconds_rollout"] >= 0.02


def test_examples_whose_answers_differ_are_counted(make_items, record_call):
    async def answer(example):
        record_call([1, 2], [3, 4 + episode().generation * (example["name"] == "a")])
        return 0.0

    collection = collect(answer, lambda item: 1.0, make_items("abc"))
    assert collection.metrics["varied_groups"] == 1


def test_a_failing_generation_loses_no_other(make_items):
    async def brittle(example):
        name = await name_of(example)
        if name in ("a1", "b0", "b1", "b2"):
            raise ValueError(f"{name} went wrong")
        return name

    collection = collect(brittle, lambda item: 1 / (item.output_obj != "c2"), make_items("abc"))
    kept = [[f"{t.example_id}{t.generation}" for t in group] for group in collection.trajectories]
    assert kept == [["a0", "a2"], ["c0", "c1"]]
    assert collection.metrics.items() >= {"episodes": 9, "failed_episodes": 5}.items()
    assert [report.splitlines()[0] for report in collection.failures] == [
        "example 'a', generation 1: ValueError: a1 went wrong",
        "example 'b', generation 0: ValueError: b0 went wrong",
        "example 'b', generation 1: ValueError: b1 went wrong",
        "example 'b', generation 2: ValueError: b2 went wrong",
        "example 'c', generation 2: evaluator 'reward': ZeroDivisionError: division by zero",
    ]
    assert "in brittle" in collection.failures[0]  # with its traceback


def test_an_agent_that_fails_after_an_answer_may_have_a_reward(make_items, record_call):
    async def brittle(example):
        number = episode().generation
        if number:
            record_call([1, 2], [3, 4])
        if number == 1:
            raise ValueError("an answer that nobody can read")
        if number == 2:
            raise TimeoutError("too slow")
        if number == 0:
            raise OSError("before any answer")
        return "fine"

    collection = collect(brittle, lambda item: 1.0, make_items("a"), num_generations=4, failed_reward=-0.5)
    (group,) = collection.trajectories
    assert [(each.generation, each.reward, each.scorable) for each in group] == [(1, -0.5, True), (3, 1.0, True)]
    assert "nobody can read" in group[0].metadata["error"] and group[0].sequences
    metrics = collection.metrics
    counts = {"episodes": 4, "failed_episodes": 3, "penalized_episodes": 1, "priced_trajectories": 0, "calls": 2}
    assert metrics.items() >= counts.items() and len(collection.failures) == 2


def test_a_builder_may_price_what_has_no_score(make_items):
    class Strict(GRPOTrajectoryBuilder):
        async def compute_reward(self, output_item, meta=None):
            return -2.0 if output_item.score is None else output_item.score

    async def main():
        builder = Strict(GRPOTrajectoryBuilderConfig(num_generations=2))
        given = {"a0": 1.0, "a1": math.nan}
        evaluation = Evaluation(name_of, {"reward": lambda item: given[item.output_obj]}, "reward", 4, 0)
        await builder.bind_evaluation(evaluation, make_items("a"))
        await builder.start_run("run")
        return await builder.finalize("run")

    collection = asyncio.run(main())
    (group,) = collection.trajectories
    assert [(t.reward, t.scorable) for t in group] == [(1.0, True), (-2.0, True)]
    assert (collection.metrics["priced_trajectories"], collection.metrics["unscorable_trajectories"]) == (1, 0)
    assert [t.metadata for t in group] == [
        {"id": "a", "generation": 0, "run_id": "run", "score": 1.0, "reasoning": None, "finish_reasons": []},
        {
            "id": "a",
            "generation": 1,
            "run_id": "run",
            "score": None,
            "reasoning": None,  # which a teacher may read
            "fault": "not usable: nan",
            "finish_reasons": [],
        },
    ]


def test_calls_become_rows_and_messages(make_items, record_call):
    async def agent(example):
        shown = [{"role": "user", "content": "few"}, {"role": "assistant", "content": "shot"}]
        question = {"role": "user", "content": "asked"}
        record_call([3, 4], [5, 1], [*shown, question], content="first")
        answer = {"role": "assistant", "content": "first"}
        record_call([3, 4, 5, 1, 6], [7], [*shown, question, answer, question], content="second")
        return "done"

    collection = collect(agent, lambda item: 1.0, make_items("a"), num_generations=1)
    ((trajectory,),) = collection.trajectories
    assert [row.tokens for row in trajectory.sequences] == [[3, 4, 5, 1, 6, 7]]
    assert [(item.role, item.content, item.logprobs) for item in trajectory.episode] == [
        (EpisodeItemRole.USER, "few", None),
        (EpisodeItemRole.ASSISTANT, "shot", []),  # written by the agent: it has no log-probabilities
        (EpisodeItemRole.USER, "asked", None),
        (EpisodeItemRole.ASSISTANT, "first", [-1.0, -1.0]),
        (EpisodeItemRole.USER, "asked", None),
        (EpisodeItemRole.ASSISTANT, "second", [-1.0]),
    ]


def test_calls_of_remote_models_are_counted_and_shown_but_not_trained(make_items, record_call):
    asked = ({"role": "user", "content": "is it right?"},)

    async def agent(example):
        record_call([3, 4], [5, 1])
        current = episode()
        current.record_remote(RemoteCall(*current.begin_remote_call(), "helper", asked, "yes", finish_reason="stop"))
        record_call([3, 4, 5, 1, 6], [7])
        if example["name"] == "b":
            raise ValueError("no answer")

    collection = collect(agent, lambda item: 1.0, make_items("ab"), num_generations=1)
    ((trajectory,),) = collection.trajectories
    assert (collection.metrics["calls"], collection.metrics["remote_calls"]) == (2, 1)
    assert [row.tokens for row in trajectory.sequences] == [[3, 4, 5, 1, 6, 7]]
    written = json.loads(trajectory.model_dump_json())  # as in trajectories/samples.jsonl
    assert written["metadata"]["remote_calls"] == [
        {
            "index": 0, "calls_before": 1, "llm": "helper", "messages": list(asked), "content": "yes", "tool_calls": [],
            "finish_reason": "stop", "prompt_tokens": None, "completion_tokens": None,
        }
    ]  # fmt: skip


def test_everyone_keeps_their_role(make_items, record_call):
    roles = ["system", "user", "tool", "environment", "function", "narrator"]

    async def agent(example):
        record_call([3], [5], [{"role": role, "content": role} for role in roles], content="said")

    ((trajectory,),) = collect(agent, lambda item: 1.0, make_items("a"), num_generations=1).trajectories
    assert [item.role.value for item in trajectory.episode] == [*roles[:-1], "other", "assistant"]


def test_collections_go_by_their_names(make_items):
    async def main():
        builder = await bound(name_of, lambda item: 1.0, make_items("a"))
        with pytest.raises(ValueError, match=r"'x' .*: none"):
            await builder.finalize("x")
        await builder.start_run("x")
        with pytest.raises(ValueError, match="'x' is already"):
            await builder.start_run("x")
        with pytest.raises(ValueError, match=r"'y' .*: x$"):
            await builder.finalize("y")
        await builder.start_run("y")
        assert len(builder.evaluation_runs["y"]) == 3
        await builder.finalize("y")
        await builder.finalize("x")
        assert builder.evaluation_runs == {}

    asyncio.run(main())


def test_every_collection_has_noise_of_its_own(make_items):
    async def main():
        builder = await bound(seed_of, lambda item: 1.0, make_items("a"), num_generations=2)
        collections = []
        for name in ("first", "second"):
            await builder.start_run(name)
            collections.append(await builder.finalize(name))

    seeds = []

    async def seed_of(example):
        seeds.append(episode().seed)

    asyncio.run(main())
    assert len(set(seeds)) == 4


def test_examples_can_be_chosen(make_items):
    chosen = {"example_ids": ["c", "a"]}
    collection = collect(name_of, lambda item: 1.0, make_items("abc"), chosen, num_generations=1)
    assert [group[0].example_id for group in collection.trajectories] == ["c", "a"]
    with pytest.raises(ValueError, match=r"ids z; .* 3 others"):
        collect(name_of, lambda item: 1.0, make_items("abc"), {"example_ids": ["a", "z"]})


def test_a_cancelled_finalize_cancels_the_episodes(make_items):
    async def endless(example):
        await asyncio.sleep(60)

    async def main():
        builder = await bound(endless, lambda item: 1.0, make_items("a"))
        await builder.start_run("x")
        tasks = list(builder.evaluation_runs["x"])
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.02):
                await builder.finalize("x")
        await asyncio.wait(tasks)
        return [task.cancelled() for task in tasks], builder.evaluation_runs

    assert asyncio.run(main()) == ([True] * 3, {})


def test_rewards_of_steps_reach_the_trajectory(make_items, record_call):
    async def two_turns(example):
        record_call([1, 2], [3])
        episode().reward_step(0.25)
        record_call([1, 2, 3, 4], [5])
        return "done"

    collection = collect(two_turns, lambda item: 1.0, make_items("a"), num_generations=1)
    ((trajectory,),) = collection.trajectories
    assert trajectory.shaped_rewards == [0.25, 0.0]
    assert [sequence.turns for sequence in trajectory.sequences] == [[-1, -1, 0, -1, 1]]


class NotingAdapterConfig(TrainerAdapterConfig, name="noting_adapter"):
    pass


class NotingAdapter(TrainerAdapter):
    """A backend that trains nothing; it keeps what is submitted and answers with `metrics`."""

    def __init__(self, status=TrainingStatusEnum.COMPLETED, **metrics):
        super().__init__(NotingAdapterConfig())
        self.answer, self.metrics = status, metrics
        self.submitted = []

    async def is_healthy(self) -> bool:
        return True

    async def submit(self, trajectories: TrajectoryCollection) -> TrainingJobRef:
        self.submitted.append(trajectories)
        return TrainingJobRef(run_id=trajectories.run_id, backend="noting")

    async def status(self, ref: TrainingJobRef) -> TrainingJobStatus:
        return TrainingJobStatus(
            run_id=ref.run_id,
            backend="noting",
            status=self.answer,
            message="so it went",
            metadata={"metrics": self.metrics, "timings": {"seconds_update": 0.1}, "token_scores": [{"entropies": []}]},
        )

    async def wait_until_complete(self, ref: TrainingJobRef, poll_interval: float = 10.0) -> TrainingJobStatus:
        return await self.status(ref)

    def log_progress(self, ref: TrainingJobRef, metrics: dict, output_dir: str | None = None) -> None:
        pass


@pytest.fixture
def train(tmp_path, make_items):
    """Runs a trainer; gives its statuses, the rows of its metrics, what it showed, and the trainer."""

    def train(
        workflow,
        adapter,
        *,
        reward=lambda item: item.output_obj,
        names="ab",
        epochs=2,
        generations=2,
        validation=None,
        finetuning=None,
        timeout_seconds=None,
        carry_over=None,
        **config,
    ):
        async def main(directory, shown):
            builder = GRPOTrajectoryBuilder(GRPOTrajectoryBuilderConfig(num_generations=generations))
            builder.carry_over = carry_over
            evaluation = Evaluation(workflow, {"reward": reward}, "reward", 4, 0, timeout_seconds=timeout_seconds)
            await builder.bind_evaluation(evaluation, make_items(names))
            trainer = GRPOTrainer(GRPOTrainerConfig(**config), directory=directory, console=Console(shown))
            await trainer.bind_components(builder, adapter)
            if validation is not None:
                evaluation = Evaluation(validation.pop("workflow", workflow), {"reward": reward}, "reward", 4, 0)
                await builder.bind_validation(Validation(evaluation, make_items("xyz"), **validation))
            run_config = {"reward_function": RewardFunctionConfig(name="reward"), **(finetuning or {})}
            await trainer.initialize(FinetuneConfig(**run_config))
            try:
                return await trainer.run(epochs), trainer
            finally:
                await trainer.cleanup()

        shown = io.StringIO()
        train.shown = shown
        with RunDirectory.create(tmp_path / "run", overwrite=True) as directory:
            statuses, trainer = asyncio.run(main(directory, shown))
        log = tmp_path / "run" / "training_metrics.jsonl"
        rows = [json.loads(row) for row in log.read_text().splitlines()] if log.exists() else []
        return statuses, rows, shown.getvalue(), trainer

    return train


async def right_or_wrong(example):
    """a fails, b is right every second time, c always."""
    if example["name"] == "a" and episode().generation == 1:
        raise OSError("the tool is down")
    return {"a": 0.0, "b": float(episode().generation % 2), "c": 1.0}[example["name"]]


def test_all_episodes_are_kept_on_request(train, tmp_path):
    adapter = NotingAdapter(applied_updates=1.0)
    _, _, shown, _ = train(right_or_wrong, adapter, names="abc", save_episodes="all", show_episodes_every=0)
    rows = [json.loads(row) for row in (tmp_path / "run" / "trajectories" / "samples.jsonl").read_text().splitlines()]
    assert [(row["epoch"], row["example_id"], row["generation"]) for row in rows if "failure" not in row] == [
        (epoch, *kept) for epoch in (0, 1) for kept in (("a", 0), ("b", 0), ("b", 1), ("c", 0), ("c", 1))
    ]
    failures = [row for row in rows if "failure" in row]
    assert [row["epoch"] for row in failures] == [0, 1] and "the tool is down" in failures[0]["failure"]
    assert "---" not in shown


async def generation(example):
    """Rewards that differ within every group."""
    return float(episode().generation)


@pytest.mark.parametrize(
    ("field", "name"),
    [
        ("on_trajectories", "loss"),
        ("on_trajectories", "seconds_checkpoint"),
        ("on_epoch_end", "logger_failures"),
        ("on_epoch_end", "epoch"),
    ],
)
def test_a_function_may_not_return_what_the_epoch_has(train, tmp_path, field, name):
    """Also what its job, or the log, gives it later."""
    function = Function(lambda epoch: {"own": 1.0, name: 5.0}, "count", "in-memory")
    with pytest.raises(ComponentError, match=f"returned '{name}': 5.0, which the epoch has already$"):
        train(generation, NotingAdapter(applied_updates=1.0, loss=0.1), **{field: function})
    assert not (tmp_path / "run" / "training_metrics.jsonl").exists()


def test_an_epoch_is_collected_trained_and_logged(train, tmp_path):
    adapter = NotingAdapter(applied_updates=1.0, nonfinite_updates=0.0, entropy=2.0)
    statuses, rows, shown, trainer = train(generation, adapter, show_episodes_every=2)
    assert [status.run_id for status in statuses] == ["epoch_00000", "epoch_00001"]
    scores = (tmp_path / "run" / "trajectories" / "token_scores.jsonl").read_text().splitlines()
    assert len(scores) == 2 and all("token_scores" not in status.metadata for status in statuses)  # it would add up
    assert [[len(group) for group in collection.trajectories] for collection in adapter.submitted] == [[2, 2]] * 2
    expected = {"reward_mean": 0.5, "reward_min": 0.0, "reward_max": 1.0, "episodes": 4, "failed_episodes": 0}
    assert [row["epoch"] for row in rows] == [0, 1] and rows[0].items() >= expected.items()
    assert rows[0]["unscorable_trajectories"] == 0 and rows[0]["entropy"] == 2.0
    assert "1/2 epochs  reward 0.5     entropy 2 " in shown and "2/2 epochs" in shown and "failed" not in shown
    assert shown.count("--- after 0 epochs, example a, reward 0") == 1 and "--- after 1" not in shown

    history = json.loads((tmp_path / "run" / "reward_history.json").read_text())
    assert history[1] == {
        "epoch": 1,
        "reward_mean": 0.5,
        "reward_min": 0.0,
        "reward_max": 1.0,
        "group_reward_q25": 0.5,
        "group_reward_q75": 0.5,
    }
    samples = (tmp_path / "run" / "trajectories" / "samples.jsonl").read_text().splitlines()
    assert [(row["epoch"], row["example_id"], row["reward"]) for row in map(json.loads, samples)] == [
        (epoch, *episode) for epoch in (0, 1) for episode in [("a", 0.0), ("a", 1.0), ("b", 1.0)]
    ]
    rewards = (tmp_path / "run" / "trajectories" / "rewards.jsonl").read_text().splitlines()
    assert json.loads(rewards[1]) == {"epoch": 1, "rewards": {"a": [0.0, 1.0], "b": [0.0, 1.0]}}
    assert (tmp_path / "run" / "reward_plot.png").stat().st_size > 1000
    timings = json.loads((tmp_path / "run" / "timings.jsonl").read_text().splitlines()[0])
    assert {"seconds", "seconds_rollout", "seconds_reward", "seconds_update"} <= timings.keys()

    metrics = asyncio.run(trainer.get_metrics("epoch_00001"))
    assert metrics["reward_mean"] == 0.5 and metrics["seconds_update"] == 0.1
    with pytest.raises(ValueError, match=r"'epoch_00002' .*: epoch_00000, epoch_00001$"):
        asyncio.run(trainer.get_metrics("epoch_00002"))


def test_a_backend_that_counts_no_updates_is_believed(train):
    assert len(train(generation, NotingAdapter())[0]) == 2


def test_no_signal_in_any_epoch_is_an_error(train):
    with pytest.raises(NoLearningSignal, match=r"2 epochs; .*: so it went$") as caught:
        train(generation, NotingAdapter(applied_updates=0.0))
    assert caught.value.exit_code == 3
    assert "epoch_00001: so it went" in train.shown.getvalue()  # the epoch says so, too


def test_no_usable_reward_at_all_is_an_error(train):
    adapter = NotingAdapter(applied_updates=1.0)
    with pytest.raises(NoLearningSignal):
        train(generation, adapter, reward=lambda item: math.nan)
    assert adapter.submitted == []
    assert "epoch_00000: 4 rewards were None, NaN or infinite" in train.shown.getvalue()
    assert "epoch_00000: no trajectory has a usable reward" in train.shown.getvalue()


def test_nothing_to_train_skips_the_epoch(train):
    class Refusing(NotingAdapter):
        async def submit(self, trajectories: TrajectoryCollection) -> TrainingJobRef:
            if trajectories.run_id == "epoch_00000":
                raise NothingToTrain("every row was truncated")
            return await super().submit(trajectories)

    statuses, rows, shown, _ = train(generation, Refusing(applied_updates=1.0))
    assert len(statuses) == 1 and len(rows) == 2
    assert "epoch_00000: every row was truncated" in shown


def test_nan_rewards_are_counted_and_shown(train):
    def reward(item):
        return math.nan if item.id == "a" and item.output_obj == 0.0 else item.output_obj

    _, rows, shown, _ = train(generation, NotingAdapter(applied_updates=1.0), reward=reward)
    assert [row["unscorable_trajectories"] for row in rows] == [1, 1]
    assert rows[0]["reward_mean"] == pytest.approx(2 / 3)
    assert "epoch_00000: 1 rewards were None, NaN or infinite" in shown


def test_rewards_that_are_no_numbers_may_be_zero_or_an_error(train, tmp_path):
    def reward(item):
        return None if item.output_obj == 1.0 else 3.0

    def finetuning(unusable):
        return {"reward_function": RewardFunctionConfig(name="reward", unusable=unusable)}

    adapter, validation = NotingAdapter(applied_updates=1.0), {"workflow": held_out, "interval": 1}
    _, rows, _, _ = train(generation, adapter, reward=reward, finetuning=finetuning("zero"), validation=validation)
    assert (rows[0]["unscorable_trajectories"], rows[0]["priced_trajectories"], rows[0]["reward_mean"]) == (0, 2, 1.5)
    assert [t.reward for t in adapter.submitted[0].trajectories[0]] == [3.0, 0.0]
    assert read(tmp_path, "validation_history.json")[0]["num_unscorable"] == 0
    with pytest.raises(TrajectoryError, match=r"example 'a', generation 1: 'reward' gave .*None") as caught:
        train(generation, adapter, reward=reward, finetuning=finetuning("error"))
    assert caught.value.exit_code == 2


def test_all_episodes_failing_ends_the_run(train):
    async def broken(example):
        raise KeyError(f"{example['name']}{episode().generation}")

    with pytest.raises(TooManyFailures) as caught:
        train(broken, NotingAdapter())
    first, _, traceback = str(caught.value).partition("\n")
    assert first.startswith("4 of 4 episodes") and first.endswith("example 'b', generation 1: KeyError: 'b1'")
    assert "Traceback" in traceback and "in broken" in traceback
    assert caught.value.exit_code == 3


def brittle(example):
    if example["name"] == "a" and episode().generation == 0:
        raise ValueError("one of four")
    return generation(example)


def test_some_episodes_failing_are_counted_and_shown(train):
    adapter = NotingAdapter(applied_updates=1.0)
    statuses, rows, shown, _ = train(brittle, adapter)
    assert len(statuses) == 2 and [row["failed_episodes"] for row in rows] == [1, 1]
    assert re.search("epoch_00000: 1 of 4 episodes .*; example 'a', generation 0: ValueError: one of four", shown)
    assert [len(group) for group in adapter.submitted[0].trajectories] == [1, 2]


async def sometimes_hanging(example):
    """Never returns in the first episode of example `a`."""
    if example["name"] == "a" and episode().generation == 0:
        await asyncio.Event().wait()
    return float(episode().generation)


def test_a_workflow_that_never_returns_costs_its_episodes_and_not_the_run(train):
    statuses, rows, shown, _ = train(sometimes_hanging, NotingAdapter(applied_updates=1.0), timeout_seconds=0.05)
    assert len(statuses) == 2 and [row["failed_episodes"] for row in rows] == [1, 1]
    for epoch in ("epoch_00000", "epoch_00001"):
        assert re.search(rf"{epoch}: 1 of 4 episodes .*; example 'a', generation 0: TimeoutError: .* 0\.05 s", shown)
    with pytest.raises(TooManyFailures, match=r"1 of 4 episodes .* 0\.05 s"):
        train(sometimes_hanging, NotingAdapter(), timeout_seconds=0.05, max_failed_fraction=0.2)


STRANGE_IDS = [
    "../../escaped",
    "/absolute",
    "a\0b",
    "x" * 300,
    "caf\u00e9",
    "cafe\u0301",
    "lone \ud800",
    "\N{GRINNING FACE}",
    "NUL",
]


def test_examples_of_any_id_are_trained_and_nothing_is_written_outside(train, tmp_path):
    adapter = NotingAdapter(applied_updates=1.0)
    train(
        generation,
        adapter,
        names=STRANGE_IDS,
        epochs=20,
        show_episodes_every=1,
        examples_per_update=1,
        finetuning={"curriculum_learning": {"enabled": True}},
    )
    assert {path.name for path in tmp_path.iterdir()} == {"run"} and len(adapter.submitted) == 20
    samples = (tmp_path / "run" / "trajectories" / "samples.jsonl").read_text().splitlines()
    assert {json.loads(sample)["example_id"] for sample in samples} == set(STRANGE_IDS)
    assert {group[0].example_id for job in adapter.submitted for group in job.trajectories} == set(STRANGE_IDS)


def test_samples_spell_no_secret_with_token_ids(train, tmp_path, tokenizer, record_call):
    """An episode whose messages hold one is kept without its ids; others keep theirs."""
    secret = "sk-TEST-SENTINEL"

    async def ask(example):
        said = f"the key is {secret}" if example["name"] == "a" else "no key"
        prompt = tokenizer.encode(said)
        record_call(prompt, [5, 6], messages=[{"role": "user", "content": said}])
        return float(episode().generation)

    adapter = NotingAdapter(applied_updates=1.0)
    with hiding([secret]):
        train(ask, adapter, epochs=4, examples_per_update=1, show_episodes_every=1)
    samples = [json.loads(row) for row in (tmp_path / "run/trajectories/samples.jsonl").read_text().splitlines()]
    kept = {row["example_id"]: row["sequences"] for row in samples}
    assert kept["a"] is None and tokenizer.decode(kept["b"][0]["tokens"]).startswith("no key")
    assert secret not in "".join(row["episode"][0]["content"] for row in samples)
    tokens = [t.sequences[0].tokens for job in adapter.submitted for t in job.trajectories[0] if t.example_id == "a"]
    assert secret in tokenizer.decode(tokens[0])  # what is trained is not masked


def test_a_secret_that_only_the_ids_spell_is_not_kept(train, tmp_path, tokenizer, policy, record_call):
    """As of a tool's message, which a builder leaves out of the conversation that it gives."""
    secret = "sk-TEST-SENTINEL"

    async def ask(example):
        record_call(tokenizer.encode(f"the key is {secret}" if example["name"] == "a" else "no key"), [5, 6])
        return None  # which is kept, and not trained

    config = LocalTrainerAdapterConfig(llm="policy", optimizer={"learning_rate": 1e-3})
    adapter = LocalTrainerAdapter(config, policy, print, seed=0)
    with hiding([secret]), pytest.raises(NoLearningSignal):
        train(ask, adapter, epochs=1, save_episodes="all")
    samples = [json.loads(row) for row in (tmp_path / "run/trajectories/samples.jsonl").read_text().splitlines()]
    kept = {row["example_id"]: row["sequences"] for row in samples}
    assert kept["a"] is None and tokenizer.decode(kept["b"][0]["tokens"]).startswith("no key")


@pytest.mark.parametrize("turns", [0, 1])
def test_a_run_whose_episodes_are_all_dropped_says_why(train, record_call, turns):
    async def too_long(example):
        for _ in range(turns):
            record_call([1, 2], [3, 4])
        episode().is_dropped = True
        raise RequestError("the prompt is too long")

    with pytest.raises(NoLearningSignal, match=r"every episode was dropped: .*max_context_tokens.*truncate_left$"):
        train(too_long, NotingAdapter(), epochs=1)
    assert "epoch_00000: 4 episodes were dropped" in train.shown.getvalue()


def test_a_run_whose_episodes_all_fail_does_not_say_that_they_asked_nobody(train, record_call):
    async def breaks(example):
        record_call([1, 2], [3, 4])
        raise OSError("the tool is down")

    with pytest.raises(NoLearningSignal, match="4 failed, 0 were dropped"):
        train(breaks, NotingAdapter(), epochs=1, max_failed_fraction=1.0)


def test_a_failed_job_ends_the_run(train):
    adapter = NotingAdapter(status=TrainingStatusEnum.FAILED)
    statuses, rows, *_ = train(generation, adapter, epochs=3)
    assert [status.status for status in statuses] == [TrainingStatusEnum.FAILED] and len(adapter.submitted) == 1
    assert len(rows) == 1 and rows[0]["reward_mean"] == 0.5  # what was collected is not forgotten


class Refusing(NotingAdapter):
    async def submit(self, trajectories: TrajectoryCollection) -> TrainingJobRef:
        raise TrajectoryError("the second row is malformed")


def test_a_job_that_cannot_be_submitted_ends_the_run(train):
    with pytest.raises(TrajectoryError, match="the second row is malformed"):
        train(generation, Refusing(), epochs=3)


def test_updates_that_are_not_finite_end_the_run(train):
    adapter = NotingAdapter(applied_updates=0.0, nonfinite_updates=1.0)
    with pytest.raises(JobFailed, match=r"2 updates .*epoch_00001"):
        train(generation, adapter, epochs=5, max_bad_updates=2)


def test_named_rewards_are_logged(train):
    def reward(item):
        return {"win": item.output_obj, "short": 0.5, "kind": None if item.id == "a" else 3.0}

    adapter = NotingAdapter(applied_updates=1.0)
    _, rows, *_ = train(generation, adapter, reward=reward)
    assert (rows[0]["reward/win"], rows[0]["reward/short"], rows[0]["reward/kind"]) == (0.5, 0.5, 3.0)
    assert (rows[0]["reward_mean"], rows[0]["unscorable_trajectories"]) == (2.5, 0)
    kinds = [[t.named_rewards["kind"] for t in group] for group in adapter.submitted[0].trajectories]
    assert kinds == [[None, None], [3.0, 3.0]]  # the name is known where it does not judge, and so not misspelt


def test_an_epoch_may_take_a_part_of_the_examples(train):
    adapter = NotingAdapter(applied_updates=1.0)
    train(generation, adapter, names="abcdef", epochs=6, examples_per_update=2)
    taken = [[group[0].example_id for group in collection.trajectories] for collection in adapter.submitted]
    assert all(len(epoch) == 2 for epoch in taken)
    for start in (0, 3):  # every pass meets each example once, in an order of its own
        assert sorted(name for epoch in taken[start : start + 3] for name in epoch) == list("abcdef")
    assert taken[:3] != taken[3:]


def test_tasks_have_their_shares_and_metrics(train):
    async def play(example):
        return float(episode().generation) if example["name"] in "abc" else 0.5

    finetuning = {
        "task_key": "name",
        "per_task": {name: {"weight": 2.0 if name in "ab" else 1.0} for name in "abcd"},
        "curriculum_learning": {"enabled": True, "initial_percentile": 1.0},
    }
    adapter = NotingAdapter(applied_updates=1.0)
    _, rows, *_ = train(play, adapter, names="abcd", epochs=3, examples_per_update=2, finetuning=finetuning)
    taken = [[(group[0].example_id, group[0].task) for group in each.trajectories] for each in adapter.submitted]
    assert all(name == task for epoch in taken for name, task in epoch)
    assert sorted(name for epoch in taken for name, _ in epoch) == list("aabbc")  # rewards of d are equal
    metrics = {name: [row[f"name=a/{name}"] for row in rows] for name in ("episodes", "curriculum_groups")}
    assert metrics == {"episodes": [2, 0, 2], "curriculum_groups": [1, 0, 1]}
    assert sorted(row["name=d/episodes"] for row in rows) == [0, 0, 2]
    assert [row["name=a/equal_reward_groups"] for row in rows] == [0, 0, 0]
    assert [row.get("name=a/completion_tokens_mean") for row in rows] == [0.0, None, 0.0]
    assert [row.get("name=a/reward_mean") for row in rows] == [0.5, None, 0.5]
    assert [row.get("name=a/solved_fraction") for row in rows] == [0.5, None, 0.5]


def read(tmp_path, name):
    return json.loads((tmp_path / "run" / name).read_text())


async def held_out(example):
    """The validation reward rises by 1/8 with every pass."""
    current = episode()
    assert not current.is_training and current.temperature == 0.0
    return current.rollout_index / 8


def test_validation_before_every_interval_and_after_the_last(train, tmp_path):
    adapter = NotingAdapter(applied_updates=1.0)
    _, rows, shown, _ = train(generation, adapter, epochs=5, validation={"workflow": held_out, "interval": 2})
    history = read(tmp_path, "validation_history.json")
    assert [(row["epoch"], row["avg_reward"], row["num_examples"]) for row in history] == [
        (0, 0.0, 3), (2, 0.125, 3), (4, 0.25, 3), (5, 0.375, 3),
    ]  # fmt: skip
    assert shown.index("validation after 0 epochs: reward 0, 3 episodes") < shown.index("1/5 epochs")
    assert shown.index("5/5 epochs") < shown.index("validation after 5 epochs: reward 0.375")
    assert len(rows) == 5 and len(adapter.submitted) == 5


def test_a_validation_that_fails_is_a_failure_and_no_reward(train, tmp_path):
    async def broken(example):
        raise OSError("the tool is down")

    async def brittle(example):
        return await (broken(example) if example["name"] == "y" else held_out(example))

    _, _, shown, _ = train(
        generation, NotingAdapter(applied_updates=1.0), epochs=1, validation={"workflow": broken, "interval": 1}
    )
    assert [(row["avg_reward"], row["num_failed"]) for row in read(tmp_path, "validation_history.json")] == [
        (None, 3)
    ] * 2
    assert re.search("after 0 epochs: failed; 3 episodes .*: example 'x', generation 0: OSError", shown)
    train(generation, NotingAdapter(applied_updates=1.0), epochs=1, validation={"workflow": brittle, "interval": 1})
    last = read(tmp_path, "validation_history.json")[-1]
    assert (last["avg_reward"], last["num_examples"], last["num_failed"]) == (0.125, 2, 1)


def test_a_run_ends_when_the_target_is_reached(train):
    early = {"early_stop": {"target_reward": 0.25}}
    adapter = NotingAdapter(applied_updates=1.0)
    validation = {"workflow": held_out, "interval": 2}
    statuses, _, shown, _ = train(generation, adapter, epochs=9, validation=validation, **early)
    assert len(statuses) == 4 and "after 4 epochs: the mean reward 0.25 has reached 0.25" in shown
    statuses, _, shown, _ = train(generation, NotingAdapter(applied_updates=1.0), epochs=9, **early)
    assert len(statuses) == 1 and "after 1 epochs: the mean reward 0.5 has reached 0.25" in shown
    statuses, *_ = train(  # nothing to do at all is no failure
        generation, NotingAdapter(applied_updates=1.0), epochs=9, validation={"interval": 2, "workflow": held_out},
        early_stop={"target_reward": 0.0},
    )  # fmt: skip
    assert statuses == []


def test_a_run_ends_on_a_plateau(train):
    adapter = NotingAdapter(applied_updates=1.0)
    statuses, _, shown, _ = train(generation, adapter, epochs=9, early_stop={"patience": 3})
    assert len(statuses) == 4  # the first reward, and three without a gain
    assert re.search(r"after 4 epochs: .* not risen above 0\.5 for 3 times", shown)


def test_epochs_whose_groups_all_go_on_are_no_plateau(train):
    async def slow(example):
        episode().is_carried = episode().answer_tokens is not None  # which it is in two collections
        return 0.5

    adapter = NotingAdapter(applied_updates=1.0)
    early = {"early_stop": {"patience": 2}}
    statuses, rows, shown, _ = train(slow, adapter, epochs=9, carry_over=(1, 2), **early)
    assert [row["episodes"] for row in rows] == [0, 0, 4, 4, 4] and len(statuses) == 3
    assert re.search(r"after 5 epochs: .* not risen above 0\.5 for 2 times", shown)


def test_a_plateau_of_nothing_learned_is_still_an_error(train):
    """Only a reached target ends a run well that has made no update."""
    early_stop = {"patience": 2, "target_reward": 0.9}
    with pytest.raises(NoLearningSignal, match=r"3 epochs; .*: so it went"):
        train(generation, NotingAdapter(applied_updates=0.0), epochs=9, early_stop=early_stop)
    statuses, *_ = train(
        generation, NotingAdapter(applied_updates=0.0), epochs=9, early_stop={"patience": 2, "target_reward": 0.5}
    )
    assert len(statuses) == 1


def test_the_curriculum_chooses_what_is_submitted(train, tmp_path):
    async def easy_or_hard(example):
        return float(episode().generation) + "dcba".index(example["name"])

    adapter = NotingAdapter(applied_updates=1.0)
    curriculum = {"enabled": True, "initial_percentile": 0.25, "increment_percentile": 0.25, "expansion_interval": 2}
    _, rows, shown, _ = train(
        easy_or_hard, adapter, names="abcd", epochs=5, finetuning={"curriculum_learning": curriculum}
    )
    taken = ["".join(group[0].example_id for group in collection.trajectories) for collection in adapter.submitted]
    assert taken == ["a", "a", "ab", "ab", "abc"]
    assert [row["curriculum_percentile"] for row in rows] == [0.25, 0.25, 0.5, 0.5, 0.75]
    assert [(row["reward_mean"], row["reward_mean_chosen"]) for row in rows[1:3]] == [(2.0, 3.5), (2.0, 3.0)]
    state = read(tmp_path, "curriculum_state.json")
    assert state["included_groups"] == ["a", "b", "c"] and state["examples"]["d"]["epochs_included"] == 0
    assert read(tmp_path, "reward_history.json")[-1].items() >= {"curriculum_percentile": 0.75}.items()
    assert "curriculum 0.75" in shown


def test_a_collection_without_signal_trains_nothing_and_says_why(train):
    async def same(example):
        return 1.0

    adapter = NotingAdapter(applied_updates=1.0)
    with pytest.raises(NoLearningSignal):
        train(same, adapter, finetuning={"curriculum_learning": {"enabled": True}})
    assert adapter.submitted == []
    assert "epoch_00000: no group's rewards differ by min_reward_diff" in train.shown.getvalue()


def test_bad_updates_in_a_row_are_counted_as_the_backend_says(train):
    adapter = NotingAdapter(applied_updates=3.0, nonfinite_updates=1.0, nonfinite_updates_in_a_row=0.0)
    assert len(train(generation, adapter, epochs=5, max_bad_updates=2)[0]) == 5  # one of four, never two in a row
