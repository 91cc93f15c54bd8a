import asyncio
import math

import pytest

from jaxft.components.grpo_builder import GRPOTrajectoryBuilder, GRPOTrajectoryBuilderConfig
from jaxft.harness.data_models import EpisodeItemRole
from jaxft.harness.evaluation import Evaluation
from jaxft.policy.recorder import episode


async def bound(workflow, reward, items, num_generations=3, max_concurrency=4):
    """A builder with an evaluation of this workflow."""
    builder = GRPOTrajectoryBuilder(GRPOTrajectoryBuilderConfig(num_generations=num_generations))
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


def test_single_generations_make_groups_of_one(make_items):
    collection = collect(name_of, lambda item: 1.0, make_items("ab"), num_generations=1)
    assert [len(group) for group in collection.trajectories] == [1, 1]


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


def test_the_calls_of_failed_episodes_are_not_counted(make_items, record_call):
    async def brittle(example):
        record_call([1, 2], [3, 4])
        if episode().generation:
            raise ValueError("it went wrong")
        return ""

    metrics = collect(brittle, lambda item: 1.0, make_items("a")).metrics
    assert (metrics["calls"], metrics["failed_episodes"], metrics["untargeted_calls"]) == (1, 2, 0)


def test_rewards_that_are_none_are_kept_and_marked(make_items):
    given = {"a0": 1.0, "a1": None, "a2": math.nan}
    collection = collect(name_of, lambda item: given[item.output_obj], make_items("a"))
    assert [(t.reward, t.scorable) for t in collection.trajectories[0]] == [(1.0, True), (0.0, False), (0.0, False)]


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
        {"example_id": "a", "generation": 0, "score": 1.0},
        {"example_id": "a", "generation": 1, "score": None},
    ]


def test_named_rewards_are_summed_and_kept(make_items):
    collection = collect(name_of, lambda item: {"win": 1.0, "short": 0.5}, make_items("a"), num_generations=1)
    ((trajectory,),) = collection.trajectories
    assert (trajectory.reward, trajectory.named_rewards) == (1.5, {"win": 1.0, "short": 0.5})


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


def test_everyone_keeps_their_role(make_items, record_call):
    roles = ["system", "user", "tool", "environment", "function", "narrator"]

    async def agent(example):
        record_call([3], [5], [{"role": role, "content": role} for role in roles], content="said")

    ((trajectory,),) = collect(agent, lambda item: 1.0, make_items("a"), num_generations=1).trajectories
    assert [item.role.value for item in trajectory.episode] == [*roles[:-1], "other", "assistant"]


def test_collections_go_by_their_names(make_items):
    async def main():
        builder = await bound(name_of, lambda item: 1.0, make_items("a"))
        with pytest.raises(ValueError, match="run 'x' is not in progress; in progress: none"):
            await builder.finalize("x")
        await builder.start_run("x")
        with pytest.raises(ValueError, match="run 'x' is already in progress"):
            await builder.start_run("x")
        with pytest.raises(ValueError, match="run 'y' is not in progress; in progress: x"):
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
    with pytest.raises(ValueError, match="no examples have the ids z; the dataset has 3 others"):
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


def test_without_an_evaluation_nothing_starts():
    builder = GRPOTrajectoryBuilder(GRPOTrajectoryBuilderConfig())
    with pytest.raises(RuntimeError, match="call bind_evaluation first"):
        asyncio.run(builder.start_run("x"))


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
