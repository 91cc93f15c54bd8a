"""Only the calls that training is aimed at are trained; the rest of an episode is context."""

import asyncio
import json
import random

import pytest

from jaxft.components.configs import GRPOTrajectoryBuilderConfig
from jaxft.components.grpo import GRPOTrajectoryBuilder
from jaxft.components.schedule import GroupStream
from jaxft.errors import ConfigError
from jaxft.harness.data_models import FinetuneConfig
from jaxft.harness.evaluation import Evaluation
from jaxft.rollout.client import ChatClient
from jaxft.rollout.current import current_functions, episode, named_function, note_outside_call


@pytest.fixture
def collect(make_items):
    def collect(workflow, num_generations=1, failed_reward=None, **finetuning):
        async def main():
            config = GRPOTrajectoryBuilderConfig(num_generations=num_generations, failed_reward=failed_reward)
            builder = GRPOTrajectoryBuilder(config)
            await builder.bind_evaluation(Evaluation(workflow, {"r": lambda item: 1.0}, "r", 4, 0), make_items("a"))
            await builder.initialize(FinetuneConfig(**finetuning))
            await builder.start_run("run")
            return await builder.finalize("run")

        return asyncio.run(main())

    return collect


def trained(collection):
    """The trained tokens of each row of the first trajectory."""
    rows = collection.trajectories[0][0].sequences
    return [[t for t, chosen in zip(row.tokens, row.completion_mask, strict=True) if chosen] for row in rows]


@pytest.fixture
def plan_and_write(record_call):
    """A conversation in which the planner answers first and third, the writer second; the writer also asks alone."""

    @named_function("planner")
    async def plan(prompt, answer):
        await asyncio.sleep(0)
        record_call(prompt, answer)

    async def agent(example):
        await plan([1, 2], [10])
        with named_function("writer"):
            record_call([1, 2, 10, 3], [20])
            await asyncio.gather(plan([1, 2, 10, 3, 20, 4], [11]), asyncio.sleep(0))
            record_call([9], [21])
        return "done"

    return agent


def test_the_whole_workflow_is_aimed_at_by_default(collect, plan_and_write):
    assert trained(collect(plan_and_write)) == [[10, 20, 11], [21]]


def test_a_function_with_those_it_calls(collect, plan_and_write):
    assert trained(collect(plan_and_write, target_functions=["planner"])) == [[10, 11]]
    assert trained(collect(plan_and_write, target_functions=["writer"])) == [[20, 11], [21]]
    assert trained(collect(plan_and_write, target_functions=["writer", "planner"])) == [[10, 20, 11], [21]]
    assert trained(collect(plan_and_write, target_functions=["<workflow>", "planner"])) == [[10, 20, 11], [21]]


def test_what_is_not_aimed_at_stays_as_context(collect, plan_and_write):
    collection = collect(plan_and_write, target_functions=["planner"])
    (row,) = collection.trajectories[0][0].sequences
    assert row.tokens == [1, 2, 10, 3, 20, 4, 11]
    assert row.completion_mask == [False, False, True, False, False, False, True]
    assert row.sampler_logprobs == [0.0, 0.0, -1.0, 0.0, 0.0, 0.0, -1.0] == row.behavior_logprobs
    assert row.policy_versions == [-1, -1, 0, -1, -1, -1, 0] and row.turns == [-1, -1, 0, -1, -1, -1, 2]
    assert collection.metrics["untargeted_calls"] == 2


def test_a_row_ends_with_its_last_trained_token(collect, record_call):
    async def agent(example):
        with named_function("planner"):
            record_call([1, 2], [10])
        record_call([1, 2, 10, 3], [20, 20, 20])

    (row,) = collect(agent, target_functions=["planner"]).trajectories[0][0].sequences
    assert row.tokens == [1, 2, 10]


def test_one_of_several_models(collect, record_call):
    async def agent(example):
        record_call([1, 2], [10], llm="policy")
        record_call([1, 2, 10, 3], [30], llm="judge")
        record_call([1, 2, 10, 3, 30, 4], [11], llm="policy")

    assert trained(collect(agent)) == [[30], [10, 11]]
    assert trained(collect(agent, target_model="policy")) == [[10, 11]]
    assert trained(collect(agent, target_model="judge")) == [[30]]
    with pytest.raises(ConfigError, match=r"target_model: 'x' was not asked .*; asked: judge, policy"):
        collect(agent, target_model="x")


def test_a_failed_episode_has_a_reward_only_after_an_answer_that_is_trained(collect, record_call):
    async def agent(example):
        record_call([1, 2], [30], llm="opponent")
        if episode().generation:
            record_call([1, 2], [10], llm="policy")
        raise ValueError("an answer that nobody can read")

    collection = collect(agent, num_generations=2, failed_reward=-1.0, target_model="policy")
    ((trajectory,),) = collection.trajectories
    assert (trajectory.generation, trajectory.reward) == (1, -1.0)
    assert {item.metadata["llm"] for item in trajectory.episode if item.logprobs} == {"opponent", "policy"}
    assert collection.metrics.items() >= {"failed_episodes": 2, "penalized_episodes": 1}.items()


def test_parallel_calls_retries_and_system_prompts_of_their_own_make_rows(collect, record_call):
    async def branch(prompt, answer):
        await asyncio.sleep(0)
        record_call(prompt, answer, [{"role": "system", "content": f"you are {prompt}"}])

    async def agent(example):
        await asyncio.gather(*(branch([7, number], [10 + number]) for number in range(3)))
        record_call([5, 5], [40])
        record_call([5, 5], [41])  # the same prompt again: a retry
        record_call([5, 5], [41])  # and the same answer

    assert trained(collect(agent)) == [[40], [41], [41], [10], [11], [12]]


def test_an_unknown_function_is_said_at_once(collect, plan_and_write):
    with pytest.raises(ConfigError, match=r"no call was made in 'planer'; did you mean 'planner'\?"):
        collect(plan_and_write, target_functions=["planer"])
    with pytest.raises(ConfigError, match=r"in 'x'; functions that made calls: planner, writer"):
        collect(plan_and_write, target_functions=["x"])


def test_one_misspelt_among_several_is_said_too(collect, plan_and_write):
    """But one that is just not called in a collection may be called in the next."""
    with pytest.raises(ConfigError, match=r"no call was made in 'wirter'; did you mean 'writer'\?"):
        collect(plan_and_write, target_functions=["planner", "wirter"])
    assert trained(collect(plan_and_write, target_functions=["planner", "summary"])) == [[10, 11]]
    assert trained(collect(plan_and_write, target_functions=["planner", "planner_2"])) == [[10, 11]]


def test_overlapping_collections_are_joined_as_one(make_items):
    """One call outside of episodes and one that was abandoned, while eight groups were open."""
    said = []

    class NoWeights:
        async def hold(self):
            pass

        release = hold

    async def agent(row):
        await asyncio.sleep(0.1)
        return episode().generation

    def reward(item):
        """The name `right` judges one episode of `a`, both of `b`, and no others."""
        is_judged = item.id == "b" or (item.id == "a" and item.output_obj == 0)
        return {"other": 1.0, "right": float(item.id == "a") if is_judged else None}

    async def main():
        evaluation = Evaluation(agent, {"r": reward}, "r", 64, 0, log=said.append)
        builder = GRPOTrajectoryBuilder(GRPOTrajectoryBuilderConfig(num_generations=2))
        await builder.bind_evaluation(evaluation, make_items("abcdefgh"))

        async def collect(number):
            await builder.start_run(str(number), {"example_ids": ["abcdefgh"[number]]})
            return await builder.finalize(str(number))

        stream = GroupStream(collect, NoWeights(), size=8, total=8, max_staleness=2)
        note_outside_call()  # before the episodes
        await stream.begin(0)
        await asyncio.sleep(0.02)
        note_outside_call()
        evaluation.supervisor.num_abandoned += 1
        return evaluation, (await stream.take(0, "epoch 0")).metrics

    evaluation, metrics = asyncio.run(main())
    assert [metrics[name] for name in ("episodes", "outside_calls", "abandoned_episodes")] == [16, 1, 1]
    assert evaluation.num_outside_calls == len(said) == 1
    assert metrics["reward/right"] == pytest.approx(1 / 3) and metrics["reward/other"] == 1.0


def test_workflows_without_calls_are_left_alone(collect):
    async def silent(example):
        return "done"

    assert collect(silent, target_functions=["planner"]).trajectories[0][0].sequences == []


def test_one_object_may_name_several_tasks_at_once():
    named, seen = named_function("f"), []

    async def task(delay):
        with named:
            await asyncio.sleep(delay)
            seen.append(current_functions())

    async def main():
        await asyncio.gather(task(0.02), task(0.0), task(0.01))

    asyncio.run(main())
    assert seen == [("f",)] * 3


def test_names_are_of_your_own():
    for name in ("", "<workflow>"):
        with pytest.raises(ValueError, match="wanted one of your own"):
            named_function(name)
    with pytest.raises(TypeError, match="is a generator"):

        @named_function("f")
        def generator():
            yield 1


# --- Answers that are carried over to the next collection.

ANSWER_TOKENS = 3


@pytest.fixture
def collect_until_all_have_ended(make_items):
    """Collects once with new groups, then goes on with those that were carried over; returns the collections.

    Each collection is of a builder of its own, which has only the state of the one before, as JSON.
    """

    def collect(workflow, names="ab", *, answer_tokens=ANSWER_TOKENS, max_staleness=9):
        async def main():
            state, collections, wanted = {}, [], list(names)
            while wanted or state:
                builder = GRPOTrajectoryBuilder(GRPOTrajectoryBuilderConfig(num_generations=2))
                evaluation = Evaluation(workflow, {"r": lambda item: 1.0}, "r", 1, 0)
                await builder.bind_evaluation(evaluation, make_items(names))
                await builder.initialize(FinetuneConfig())
                if answer_tokens is not None:
                    builder.carry_over = answer_tokens, max_staleness
                builder.restore_state(json.loads(json.dumps(state)))
                evaluation.num_rollouts = len(collections)
                await builder.start_run("run", {"example_ids": wanted})
                collections.append(await builder.finalize("run"))
                state, wanted = builder.state(), []
            return collections

        return asyncio.run(asyncio.wait_for(main(), 60))

    return collect


def rows_of(collections):
    """The rows of all trajectories, by example and generation."""
    trajectories = [t for collection in collections for group in collection.trajectories for t in group]
    assert {t.rollout_index for t in trajectories} == {0}
    return {(t.example_id, t.generation): t.sequences for t in trajectories}


@pytest.fixture(params=[0.0, pytest.param(0.5, marks=pytest.mark.slow)], ids=["no penalty", "a penalty"])
def ask_at_once(request, policy):
    """An agent with two requests at once, one of them for two answers, and one behind them."""
    llm = ChatClient(policy)

    async def agent(example):
        name = [{"role": "user", "content": example["name"]}]
        first, second = await asyncio.gather(
            llm.chat(name, max_tokens=8, min_tokens=5, stop=["zzz"]),
            llm.chat([*name, *name], max_tokens=2 + 5 * (example["name"] == "a"), n=2),
        )
        asked = f"{first.content} {second.choices[1].content}"
        await llm.chat([{"role": "user", "content": asked}], max_tokens=7, top_k=20, presence_penalty=request.param)

    return agent


def test_carried_answers_are_those_of_one_collection(collect_until_all_have_ended, ask_at_once):
    """Tokens, supports and versions; log-probabilities to rounding, as a prompt has other last bits than an answer."""
    whole = collect_until_all_have_ended(ask_at_once, answer_tokens=None)
    carried = collect_until_all_have_ended(ask_at_once)
    assert len(whole) == 1 and [len(each.trajectories) for each in carried] == [0, 0, 0, 0, 2]
    assert whole[0].metrics.keys() - carried[-1].metrics.keys() == set()
    expected, found = rows_of(whole), rows_of(carried)
    assert expected.keys() == found.keys() and len(found) == 4
    for place, rows in expected.items():
        for row, other in zip(rows, found[place], strict=True):
            exact = {"sampler_logprobs", "behavior_logprobs"}
            assert row.model_dump(exclude=exact) == other.model_dump(exclude=exact)
            for name in exact:
                assert dict(other)[name] == pytest.approx(dict(row)[name], abs=1e-5)
    metrics = [each.metrics for each in carried]
    assert [each["carried_groups"] for each in metrics] == [2, 2, 2, 2, 0]
    assert [each["carried_collections_max"] for each in metrics] == [1, 2, 3, 4, 0]
    # The answers of two tokens have ended in the first collection.
    assert metrics[0]["carried_answers"] == 2 * (3 + 1) and metrics[0]["carried_tokens"] == 8 * ANSWER_TOKENS
    assert all(each["lost_answers"] == each["failed_episodes"] == 0 for each in metrics)


def test_a_group_ends_before_it_is_too_old(collect_until_all_have_ended, ask_at_once):
    collections = collect_until_all_have_ended(ask_at_once, max_staleness=1)
    assert [len(each.trajectories) for each in collections] == [0, 2]


@pytest.mark.parametrize("kind", ["catches", "stays", "in a thread", "at random"])
def test_agents_that_do_not_end_as_they_are_told(collect_until_all_have_ended, policy, kind, monkeypatch):
    """One that catches the error is carried over all the same, cancelled if it stays; other questions lose answers."""
    llm, asked = ChatClient(policy), random.Random(0)
    monkeypatch.setattr("jaxft.harness.evaluation.GRACE_SECONDS", 0.0 if kind == "stays" else 5.0)

    async def ask(example):
        content = str(asked.random()) if kind == "at random" else example["name"]
        try:
            return (await llm.chat([{"role": "user", "content": content}], max_tokens=5)).content
        except asyncio.CancelledError:
            if kind == "catches":
                return "nothing"
            if kind == "stays":
                await asyncio.Event().wait()
            raise

    def ask_in_thread(example):
        return llm.chat_sync([{"role": "user", "content": example["name"]}], max_tokens=5).content

    agent = ask_in_thread if kind == "in a thread" else ask
    collections = collect_until_all_have_ended(agent, "a", max_staleness=1)
    assert [each.metrics["carried_answers"] for each in collections] == [2, 0]
    assert collections[1].metrics["lost_answers"] == (2 if kind == "at random" else 0)
    assert [len(row.tokens) > 5 for rows in rows_of(collections).values() for row in rows] == [True, True]


def test_a_carried_group_of_another_dataset_is_refused(collect_until_all_have_ended, ask_at_once, make_items):
    builder = GRPOTrajectoryBuilder(GRPOTrajectoryBuilderConfig())
    builder.restore_state({"carried": [[3, "elsewhere", 1, []]]})

    async def main():
        await builder.bind_evaluation(Evaluation(ask_at_once, {}, None, 1, 0), make_items("a"))
        await builder.start_run("run")

    with pytest.raises(ValueError, match="elsewhere"):
        asyncio.run(main())
