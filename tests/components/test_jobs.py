"""The life of a job: validated, queued, running, refused, cancelled; and jobs of dpo and sft."""

import asyncio

import jax
import jax.numpy as jnp
import pytest

from jaxft.components.local_adapter import LocalTrainerAdapter, LocalTrainerAdapterConfig
from jaxft.harness.data_models import (
    DPOItem,
    EpisodeItem,
    FinetuneConfig,
    OpenAIMessage,
    TrainingStatusEnum,
    Trajectory,
    TrajectoryCollection,
)
from jaxft.harness.errors import ConfigError, NothingToTrain, TrajectoryError
from jaxft.policy.faults import DeviceMemoryError

FOREIGN = {"max_stale_share": 1.0, "max_disagreeing_share": 1.0}


def make_adapter(policy, loss=None, warn=print, **options):
    fields = {"llm": "policy", "loss": loss or {}, "optimizer": {"learning_rate": 1e-2}, "microbatch_tokens": 64}
    return LocalTrainerAdapter(LocalTrainerAdapterConfig(**(fields | options)), policy, warn)


def run(adapter, *collections):
    async def main():
        async with asyncio.timeout(120):
            return [await adapter.wait_until_complete(await adapter.submit(each)) for each in collections]

    return asyncio.run(main())


def flat(policy):
    return asyncio.run(policy.read(lambda params: jnp.concatenate([leaf.ravel() for leaf in jax.tree.leaves(params)])))


async def sampled_rows(policy, make_sequence, count):
    """Rows that the policy really sampled, by their log-probabilities."""
    from jaxft.core.logprobs import token_logprobs

    rows = [make_sequence(number) for number in range(count)]
    tokens = jnp.array([row.tokens for row in rows])
    scored = await policy.read(lambda params: token_logprobs(policy.model, params, tokens).logprobs)
    return [
        row.model_copy(
            update={
                "sampler_logprobs": own,
                "behavior_logprobs": own,
                "policy_versions": [-1 if version < 0 else policy.version for version in row.policy_versions],
            }
        )
        for row, own in zip(rows, scored.tolist(), strict=True)
    ]


def group(rows, run_id, rewards=(1.0, 0.0, 1.0, 0.0)):
    trajectories = [
        Trajectory(episode=[], reward=reward, example_id=f"{place // 2}", generation=place % 2, sequences=[row])
        for place, (row, reward) in enumerate(zip(rows, rewards, strict=True))
    ]
    return TrajectoryCollection(trajectories=[trajectories[:2], trajectories[2:]], run_id=run_id)


@pytest.fixture(scope="module")
def strict(make_policy):
    """An adapter with the thresholds it has by itself."""
    return make_adapter(make_policy())


def test_own_trajectories_are_trained(strict, make_sequence):
    rows = asyncio.run(sampled_rows(strict.policy, make_sequence, 4))
    (status,) = run(strict, group(rows, "own"))
    assert (status.status, status.message) == (TrainingStatusEnum.COMPLETED, "updated")
    metrics = status.metadata["metrics"]
    assert metrics["sampler_disagreement_share"] == metrics["stale_trajectory_share"] == metrics["refused_updates"] == 0


def test_foreign_log_probabilities_are_refused(strict, make_sequence):
    before, version = flat(strict.policy), strict.policy.version
    rows = asyncio.run(sampled_rows(strict.policy, make_sequence, 4))
    rows[2] = rows[2].model_copy(update={"sampler_logprobs": [x - 0.2 for x in rows[2].sampler_logprobs]})
    (status,) = run(strict, group(rows, "foreign"))
    assert status.status is TrainingStatusEnum.FAILED
    assert "refused: the log-probabilities recorded with 25% of the sequences are more than 0.1 nats" in status.message
    assert status.metadata["metrics"]["refused_updates"] == 1
    assert strict.policy.version == version and bool((flat(strict.policy) == before).all())


def test_stale_trajectories_are_refused(strict, make_sequence):
    before = flat(strict.policy)
    rows = asyncio.run(sampled_rows(strict.policy, make_sequence, 4))
    rows[1] = rows[1].model_copy(update={"policy_versions": [-1, -1, 99, 99, 99, 99]})
    collection = group(rows, "stale")
    assert strict.validate_trajectories(collection)["stale_trajectory_share"] == 0.25
    (status,) = run(strict, collection)
    assert status.status is TrainingStatusEnum.FAILED
    assert "refused: another version of the policy sampled 25% of the trajectories" in status.message
    assert bool((flat(strict.policy) == before).all())


def test_the_second_of_two_queued_jobs_is_stale(strict, make_sequence):
    async def main():
        rows = await sampled_rows(strict.policy, make_sequence, 4)
        refs = [await strict.submit(group(rows, name)) for name in ("queued first", "queued second")]
        return [await strict.wait_until_complete(ref) for ref in refs]

    version = strict.policy.version
    first, second = asyncio.run(main())
    assert (first.status, second.status) == (TrainingStatusEnum.COMPLETED, TrainingStatusEnum.FAILED)
    assert first.metadata["metrics"]["policy_version"] == version + 1 == second.metadata["metrics"]["policy_version"]


def test_what_is_validated_is_not_trained(strict, make_sequence):
    rows = asyncio.run(sampled_rows(strict.policy, make_sequence, 4))
    figures = strict.validate_trajectories(group(rows, "looked at"))
    assert figures["trained_tokens"] == 16 and figures["groups"] == 2
    broken = rows[0].model_copy(update={"sampler_logprobs": [float("nan")] * 6})
    with pytest.raises(TrajectoryError, match="a recorded log-probability of a trained token is not finite"):
        strict.validate_trajectories(group([broken, *rows[1:]], "broken"))
    with pytest.raises(NothingToTrain):
        strict.validate_trajectories(TrajectoryCollection(trajectories=[], run_id="none"))


def test_a_job_can_be_cancelled_before_and_while_it_runs(make_policy, make_collection):
    adapter = make_adapter(make_policy(), minibatches=2, updates_per_batch=100, **FOREIGN)  # time to cancel it

    async def main():
        first, second = [await adapter.submit(make_collection(name)) for name in ("first", "second")]
        never = await adapter.cancel(second)
        whole = await adapter.wait_until_complete(first)
        third = await adapter.submit(make_collection("third"))
        while (await adapter.status(third)).status is TrainingStatusEnum.PENDING:
            await asyncio.sleep(0)
        part = await adapter.cancel(third)
        return never, whole, part, await adapter.cancel(first), await adapter.status(second)

    never, whole, part, again, later = asyncio.run(main())
    assert (never.status, never.message) == (TrainingStatusEnum.CANCELED, "canceled before it began") and later == never
    assert (whole.status, whole.progress) == (TrainingStatusEnum.COMPLETED, 100.0) and again == whole
    assert part.status is TrainingStatusEnum.CANCELED and part.progress < 100
    updates = part.metadata["metrics"]["updates"]
    assert part.message == f"canceled after {updates} of 200 updates"
    assert adapter.policy.version == 1 + (updates > 0)


def hungry(policy):
    """A model that wants more memory than any address space has: the allocation really fails."""

    def apply(params, tokens, positions, cache=None, segment_ids=None):
        hidden, cache = policy.model.apply(params, tokens, positions, cache, segment_ids)
        return hidden + jnp.cumsum(jnp.ones((2**16, 2**30)), axis=0)[tokens, :1], cache

    return policy.model._replace(apply=apply)


def test_a_job_that_needs_too_much_memory_says_what_to_lower(make_policy, policy, make_collection):
    adapter = make_adapter(make_policy(model=hungry(policy)), **FOREIGN)
    (status,) = run(adapter, make_collection("large"))
    assert status.status is TrainingStatusEnum.FAILED
    assert status.message.startswith(
        "the device has too little memory for the job: lower trainer_adapters.<name>.microbatch_tokens (now 64), "
        "or of llms.policy slots (now 8), stored_prompts (now 8) or max_context_tokens (now 96); it said: "
    )
    assert "Out of memory allocating" in status.message
    assert "\n" not in status.message and "JaxRuntimeError" in status.metadata["traceback"]


def test_health_says_what_to_lower_where_nothing_can_be_sampled(make_policy):
    with pytest.raises(
        DeviceMemoryError, match=r"lower llms\.<name>\.slots \(now 8\), stored_prompts \(now 8\) or max_context_tokens"
    ):
        asyncio.run(make_adapter(make_policy(max_context_tokens=2**40)).is_healthy())


@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt(), asyncio.CancelledError()], ids=repr)
def test_a_job_that_is_ended_in_the_middle_has_failed(make_policy, policy, make_collection, error):
    """A model may call `sys.exit`: the job is over, the process is not."""

    def apply(params, tokens, positions, cache=None, segment_ids=None):
        raise error

    adapter = make_adapter(make_policy(model=policy.model._replace(apply=apply)), **FOREIGN)
    first, second = run(adapter, make_collection("first"), make_collection("second"))
    assert first.status is second.status is TrainingStatusEnum.FAILED
    assert f"DeviceThreadError: work on the device thread was ended by {type(error).__name__}" in first.message
    assert "PolicyLostError: the policy's parameters were lost" in second.message


def test_training_is_aimed_at_the_model_of_the_adapter(policy):
    adapter = make_adapter(policy)
    asyncio.run(adapter.initialize(FinetuneConfig(target_model="policy")))
    with pytest.raises(ConfigError, match="target_model: is 'judge', but the adapter trains 'policy'"):
        asyncio.run(adapter.initialize(FinetuneConfig(target_model="judge")))


def pair(number, chosen="7", rejected="8", **changes):
    prompt = [OpenAIMessage(role="user", content=f"{number}")]
    item = DPOItem(prompt=prompt, chosen_response=chosen, rejected_response=rejected)
    return Trajectory(episode=[item], reward=1.0, example_id=f"{number}", generation=0, **changes)


def pairs(run_id, *trajectories):
    return TrajectoryCollection(trajectories=[[one] for one in trajectories], run_id=run_id)


def test_pairs_of_texts_are_learned(make_policy):
    adapter = make_adapter(make_policy(), {"name": "dpo", "beta": 0.5}, minibatches=3, updates_per_batch=10)
    first, second = run(adapter, *(pairs(name, *map(pair, range(6))) for name in ("one", "two")))
    assert (first.status, first.message) == (TrainingStatusEnum.COMPLETED, "updated")
    metrics = second.metadata["metrics"]
    assert metrics["preference_accuracy"] == 1.0 and metrics["reward_margin"] > 0.5
    # Each answer is a token and its end.
    assert (metrics["pairs_trained"], metrics["trained_tokens"], metrics["updates"]) == (6, 24, 30)
    assert metrics["pair_reward_mean"] == 1.0 and adapter.policy.version == 2


def test_recorded_pairs_keep_their_tokens(make_policy, make_sequence):
    adapter = make_adapter(make_policy(), {"name": "dpo"})
    chosen, rejected = make_sequence(0), make_sequence(0, tokens=[3, 10, 30, 31, 32, 1])
    (status,) = run(adapter, pairs("recorded", pair(0, sequences=[chosen, rejected])))
    assert status.metadata["metrics"]["trained_tokens"] == 8
    assert status.metadata["metrics"]["loss"] == pytest.approx(0.693147, abs=1e-6)  # the policy is its reference


def test_pairs_that_make_no_sense_are_refused(policy, make_sequence):
    adapter = make_adapter(policy, {"name": "dpo"})
    other, empty = make_sequence(0, tokens=[3, 11, 20, 21, 22, 1]), make_sequence(0, completion_mask=[False] * 6)
    strange = {
        "is no preference": Trajectory(episode=[], reward=0.0, sequences=[make_sequence(0)]),
        "has 1 sequences for 1 pairs": pair(0, sequences=[make_sequence(0)]),
        "to different prompts": pair(0, sequences=[make_sequence(0), other]),
        "has no token to train": pair(0, sequences=[make_sequence(0), empty]),
    }
    for message, trajectory in strange.items():
        with pytest.raises(TrajectoryError, match=message):
            adapter.validate_trajectories(pairs("strange", trajectory))
    with pytest.raises(NothingToTrain, match="has no pair to train on"):
        adapter.validate_trajectories(pairs("none"))


def test_examples_are_imitated_when_they_are_good_enough(make_policy, make_collection):
    adapter = make_adapter(make_policy(), {"name": "sft", "min_reward": 0.5}, updates_per_batch=5)
    first, second = run(adapter, make_collection("one"), make_collection("two"))
    metrics = first.metadata["metrics"], second.metadata["metrics"]
    assert metrics[0]["imitated_trajectories"] == 2 and metrics[0]["trained_tokens"] == 8
    assert metrics[1]["loss"] < metrics[0]["loss"]
    with pytest.raises(NothingToTrain, match="0 of 4 trajectories are good enough"):
        adapter.validate_trajectories(make_collection("bad", rewards=(0.0,) * 4))


def test_conversations_without_tokens_are_imitated(policy):
    said = [("user", "1+1"), ("assistant", "2"), ("tool", "ok"), ("assistant", "done")]
    episode = [EpisodeItem(role=role, content=text, logprobs=[]) for role, text in said]
    texts = TrajectoryCollection(trajectories=[[Trajectory(episode=episode, reward=1.0)]], run_id="texts")
    figures = make_adapter(policy, {"name": "sft"}).validate_trajectories(texts)
    assert figures["trained_tokens"] == len("2") + len("done") + 2  # the ends of both answers, too
    bad = Trajectory(episode=episode[:1], reward=1.0)
    with pytest.raises(TrajectoryError, match="cannot be imitated: a conversation to be learned must end"):
        make_adapter(policy, {"name": "sft"}).validate_trajectories(
            TrajectoryCollection(trajectories=[[bad]], run_id="bad")
        )


SLOW = pytest.mark.slow


@pytest.mark.parametrize("loss", [{"name": "grpo"}, *(pytest.param({"name": n}, marks=SLOW) for n in ("ppo", "dpo"))])
def test_memory_is_told_without_training(policy, loss):
    before = flat(policy)
    memory = asyncio.run(make_adapter(policy, loss).memory())
    parts = {"parameters", "optimizer", "reference", "gradients", "update", "sampling weights", "sampling"}
    assert set(memory) == parts
    assert memory["gradients"] == pytest.approx(memory["parameters"], rel=1e-3)  # of a value head, too
    layers = asyncio.run(policy.read(lambda params: sum(leaf.nbytes for leaf in jax.tree.leaves(params["layers"]))))
    assert memory["sampling weights"] == layers / 2**20  # the ends are shared
    assert memory["optimizer"] == pytest.approx(2 * memory["parameters"], rel=1e-3) and memory["update"] > 0
    assert (memory["reference"] > 0) == (loss["name"] == "dpo")
    assert bool((flat(policy) == before).all())
