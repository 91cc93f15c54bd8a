import asyncio
import io
import json
import math
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxft.components import training_job
from jaxft.components.configs import GRPOTrainerConfig, LocalTrainerAdapterConfig
from jaxft.components.frozen_weights import load_reference
from jaxft.components.grpo import GRPOTrainer
from jaxft.components.local_adapter import LocalTrainerAdapter
from jaxft.core.logprobs import token_logprobs
from jaxft.errors import (
    CheckFailed,
    ComponentError,
    ConfigError,
    DeviceMemoryError,
    NothingToTrain,
    PolicyLostError,
    TrajectoryError,
)
from jaxft.harness.data_models import (
    DPOItem,
    EpisodeItem,
    FinetuneConfig,
    OpenAIMessage,
    TrainingJobRef,
    TrainingStatusEnum,
    Trajectory,
    TrajectoryCollection,
)
from jaxft.hosts.group import ProcessGroup
from jaxft.models.hf import save_model
from jaxft.runs.console import Console
from jaxft.runs.directory import RunDirectory
from jaxft.training.advantages import gather
from jaxft.training.config import LossConfig
from jaxft.training.memory import policy_bytes, training_bytes

pytestmark = pytest.mark.usefixtures("foreign_trajectories")


def make_adapter(policy, loss=None, warn=print, **options):
    """An adapter whose microbatch is four rows of 16 tokens, so that all jobs on four rows share a compiled update."""
    fields = {"llm": "policy", "loss": loss or {}, "optimizer": {"learning_rate": 1e-2}, "microbatch_tokens": 64}
    config = LocalTrainerAdapterConfig(**(fields | options))
    weights = {"reference": load_reference(config, policy)} if config.has_own_reference else {}
    return LocalTrainerAdapter(config, policy, warn, weights=weights)


def train(adapter, *collections):
    """The last status of a job for each collection, one after the other."""

    async def main():
        async with asyncio.timeout(120):
            return [
                await adapter.wait_until_complete(await adapter.submit(each), poll_interval=1e9) for each in collections
            ]

    return asyncio.run(main())


def flat_params(policy):
    params = asyncio.run(policy.read(jax.device_get))
    return np.concatenate([leaf.ravel() for leaf in jax.tree.leaves(params)])


@pytest.fixture(scope="module")
def adapter(make_policy):
    """Jobs of this module that need no policy of their own go to this one, in the order of the tests."""
    return make_adapter(make_policy())


def test_a_job_updates_the_policy_and_says_how(adapter, make_collection):
    policy = adapter.policy
    before, version = flat_params(policy), policy.version

    async def main():
        ref = await adapter.submit(make_collection("first"))
        states = [(await adapter.status(ref)).status]
        last = await adapter.wait_until_complete(ref)
        return ref, states, last

    ref, states, last = asyncio.run(main())
    assert (ref.run_id, ref.backend, states) == ("first", "local", [TrainingStatusEnum.PENDING])
    assert (last.status, last.progress, last.message) == (TrainingStatusEnum.COMPLETED, 100.0, "updated")
    assert policy.version == version + 1 and not np.array_equal(flat_params(policy), before)
    metrics, timings = last.metadata["metrics"], last.metadata["timings"]
    assert timings.keys() == {"seconds_update", "compiles", "host_peak_bytes"} and timings["compiles"] > 0
    expected = {
        "groups": 2,
        "no_signal_groups": 0,
        "unscorable_trajectories": 0,
        "foreign_sequences": 0,
        "sequences_per_trajectory": 1.0,
        "trained_tokens": 16,
        "truncated_fraction": 0.0,
        "stale_token_fraction": 0.0,
        "applied_updates": 1.0,
        "nonfinite_updates": 0.0,
        "nothing_to_learn": 0.0,
        "policy_version": version + 1,
    }
    assert {name: metrics[name] for name in expected} == expected
    assert metrics["grad_norm"] > 0 and metrics["entropy"] > 0 and metrics["sampler_logprob_diff_max"] > 0
    assert "kl" not in metrics  # without beta there is no reference


def test_without_signal_nothing_moves(adapter, make_collection):
    policy = adapter.policy
    before, version = flat_params(policy), policy.version
    (status,) = train(adapter, make_collection("equal", rewards=(1.0, 1.0, 0.0, 0.0)))
    assert status.status is TrainingStatusEnum.COMPLETED and "nothing to learn" in status.message
    metrics = status.metadata["metrics"]
    assert (metrics["no_signal_groups"], metrics["nothing_to_learn"], metrics["applied_updates"]) == (2, 1.0, 0.0)
    assert (metrics["policy_version"], policy.version) == (version, version)
    assert np.array_equal(flat_params(policy), before)


def test_a_trajectory_of_three_sequences_counts_once(adapter, make_collection, make_sequence):
    collection = make_collection("in pieces")
    good, bad = collection.trajectories[0]
    bad = bad.model_copy(update={"sequences": [make_sequence(place) for place in range(3)]})
    (status,) = train(adapter, collection.model_copy(update={"trajectories": [[good, bad]]}))
    metrics = status.metadata["metrics"]
    assert metrics["sequences_per_trajectory"] == 2.0 and metrics["applied_updates"] == 1.0
    assert metrics["loss"] == pytest.approx(0.0, abs=1e-6)  # counted by sequences it would be half the advantage


def test_tokens_of_other_versions_are_counted(adapter, make_collection):
    def sampled_by(version):
        return {"policy_versions": [-1, -1, version, version, version, version]}

    version = adapter.policy.version
    versions = dict(enumerate(map(sampled_by, (version, version, version + 1, version))))
    (status,) = train(adapter, make_collection("stale", changes=versions))
    assert status.metadata["metrics"]["stale_token_fraction"] == 0.25


def test_groups_need_no_example_ids(adapter, make_collection):
    def anonymous(run_id):
        collection = make_collection(run_id, rewards=(1.0, 0.0, 5.0, 5.0))
        unnamed = [[t.model_copy(update={"example_id": None}) for t in group] for group in collection.trajectories]
        return collection.model_copy(update={"trajectories": unnamed})

    (status,) = train(adapter, anonymous("anonymous"))
    assert status.metadata["metrics"]["no_signal_groups"] == 1


def test_a_job_has_its_name_until_it_ends(adapter, make_collection):
    async def main():
        ref = await adapter.submit(make_collection("twice"))
        with pytest.raises(ValueError, match="job 'twice' has not ended"):
            await adapter.submit(make_collection("twice"))
        await adapter.wait_until_complete(ref)

    asyncio.run(main())
    (again,) = train(adapter, make_collection("twice"))  # trainers for the toolkit have one name for all epochs
    assert again.status is TrainingStatusEnum.COMPLETED
    with pytest.raises(ValueError, match=r"no job 'unknown' was submitted; jobs: .*twice"):
        asyncio.run(adapter.status(TrainingJobRef(run_id="unknown", backend="local")))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"temperatures": [1.0, 1.0, 0.0, 0.0, 0.0, 0.0]}, "example 'example-1', generation 0 was sampled greedily"),
        ({"completion_mask": [True] * 6}, "generation 0: the first token of a sequence has no context"),
        ({"sampler_logprobs": [0.0]}, "lists of a sequence differ in length: .*'tokens': 6, .*'sampler_logprobs': 1"),
        ({"sampler_logprobs": [float("nan")] * 6}, "a recorded log-probability of a trained token is not finite"),
        ({"supports": ["~"] * 6}, "25.0% of tokens were drawn with .*_penalty, and loss.correction is None"),
    ],
)
def test_rows_that_mean_nothing_are_refused(adapter, make_collection, changes, message):
    with pytest.raises(TrajectoryError, match=message):
        train(adapter, make_collection("refused", changes={2: changes}))
    assert not adapter.is_busy()


def test_penalized_tokens_weigh_as_much_more_as_they_were_less_likely(make_policy, make_collection):
    """Penalties that halved each probability double each weight, and the sampler agrees as it did."""
    found = []
    for shift in (0.0, math.log(2)):
        adapter = make_adapter(make_policy(), {"correction": {"name": "token_truncate", "high": 1e3}})
        collection = make_collection("penalized")
        for trajectory in (each for group in collection.trajectories for each in group):
            for sequence in trajectory.sequences:
                sequence.supports = ["~"] * 6
                sequence.behavior_logprobs = [logprob - shift for logprob in sequence.sampler_logprobs]
        (status,) = train(adapter, collection)
        found.append(status.metadata["metrics"])
    whole, halved = found
    assert halved["correction_weight_mean"] == pytest.approx(2 * whole["correction_weight_mean"], rel=1e-5)
    for name in ("sampler_logprob_diff_mean", "sampler_kl"):
        assert halved[name] == pytest.approx(whole[name], rel=1e-6)
    assert "allowed_mass_mean" not in halved


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("reward", 1e200, r"generation 1 has the reward 1e\+200"),
        ("named_rewards", {"right": 1e200}, r"generation 1 has the named_rewards\['right'\] 1e\+200"),
        ("shaped_rewards", [0.0, -1e200], r"generation 1 has the shaped_rewards\[1\] -1e\+200"),
    ],
)
def test_rewards_beyond_float32_are_refused(adapter, make_collection, field, value, message):
    collection = make_collection("huge")
    collection.trajectories[0][1] = collection.trajectories[0][1].model_copy(update={field: value})
    with pytest.raises(TrajectoryError, match=message):
        train(adapter, collection)


def test_nothing_to_train_on_is_an_error_that_says_why(adapter, make_collection):
    with pytest.raises(NothingToTrain, match="job 'none' has no token to train on: 4 trajectories, 4 of them without"):
        train(adapter, make_collection("none", rewards=(None,) * 4))
    with pytest.raises(NothingToTrain, match="0 sequences, 0 of them truncated"):
        train(adapter, make_collection("none", sequences=[]))
    foreign = {place: {"llm": "opponent"} for place in range(4)}
    with pytest.raises(ValueError, match="0 sequences, 0 of them truncated, 4 of other language models"):
        train(adapter, make_collection("none", changes=foreign))
    with pytest.raises(NothingToTrain):
        train(adapter, TrajectoryCollection(trajectories=[], run_id="none"))


def test_a_reference_is_kept_when_beta_asks_for_it(make_policy, make_collection):
    """Here also: what mask_truncated and another model's rows leave out, and one warning about filters."""
    warnings = []
    adapter = make_adapter(make_policy(), {"beta": 0.1, "mask_truncated": True}, warnings.append)
    filtered = {"behavior_logprobs": [0.0, 0.0, -4.5, -4.5, -4.5, -4.5]}

    def collection(run_id):
        made = make_collection(run_id, changes={1: filtered})
        rows = made.trajectories[0][0].sequences
        rows += [rows[0].model_copy(update={"truncated": True}), rows[0].model_copy(update={"llm": "opponent"})]
        return made

    first, second = train(adapter, collection("first"), collection("second"))
    assert (first.status, second.status) == (TrainingStatusEnum.COMPLETED,) * 2
    metrics = first.metadata["metrics"]
    assert metrics["kl"] == pytest.approx(0.0, abs=1e-9)
    assert second.metadata["metrics"]["kl"] > 1e-7
    assert (metrics["trained_tokens"], metrics["foreign_sequences"]) == (16, 1)
    assert metrics["sequences_per_trajectory"] == 5 / 4  # of this language model, the truncated one among them
    assert metrics["truncated_fraction"] == pytest.approx(1 / 5)
    assert len(warnings) == 1 and "25.0% of tokens" in warnings[0]


def test_a_failing_update_is_a_failed_job_and_a_lost_policy(make_policy, policy, make_collection, tmp_path):
    def breaks(params, tokens, positions, cache=None, tables=None, segment_ids=None):
        raise MemoryError("too large")

    lost = make_adapter(make_policy(model=policy.model._replace(apply=breaks)))

    async def main():
        with pytest.raises(CheckFailed, match="MemoryError: too large") as unhealthy:  # nothing can be sampled from it
            await lost.is_healthy()
        assert isinstance(unhealthy.value.__cause__, MemoryError)
        status = await lost.wait_until_complete(await lost.submit(make_collection("broken")))
        with pytest.raises(PolicyLostError):
            await lost.export_model(tmp_path / "model")
        with pytest.raises(CheckFailed, match="PolicyLostError"):
            await lost.is_healthy()
        return status

    status = asyncio.run(main())
    assert (status.status, status.message) == (TrainingStatusEnum.FAILED, "MemoryError: too large")
    assert "in breaks" in status.metadata["traceback"]


def test_health_is_finite_parameters(make_policy):
    adapter = make_adapter(make_policy())

    def lost(leaf):
        return jnp.asarray(np.full(leaf.shape, np.nan, leaf.dtype))

    async def main():
        before = await adapter.is_healthy()
        await adapter.policy.update(lambda params: (jax.tree.map(lost, params), None))
        return before, await adapter.is_healthy()

    assert asyncio.run(main()) == (True, False)


def test_health_lines_know_the_dtype_of_products(adapter, tmp_path):
    with RunDirectory.create(tmp_path / "run") as directory:
        trainer = GRPOTrainer(GRPOTrainerConfig(), directory=directory, console=Console(io.StringIO()))
        trainer.trainer_adapter = adapter
        trainer.start(num_epochs=1)
        assert trainer._health.dtype == "float32"
        asyncio.run(trainer.cleanup())


def test_the_token_budget_of_a_loss_is_by_default_the_context(policy):
    for loss, budget in [({"name": "dr_grpo"}, policy.engine.max_context_tokens), ({"name": "grpo"}, None)]:
        assert make_adapter(policy, loss=loss).adapter_config.loss.max_completion_tokens == budget
    assert LossConfig(aggregation="constant", max_completion_tokens=7).for_context(512).max_completion_tokens == 7


def test_groups_are_weighed_as_the_loss_weighs_them(policy, make_collection):
    collection = make_collection("weighed", rewards=(3.0, 3.0, 1.0, 0.0))
    named = iter([{"right": 1.0, "short": 2.0}, {"right": 0.0, "short": 3.0}, {"right": None, "short": 1.0}, None])
    groups = [[t.model_copy(update={"named_rewards": next(named)}) for t in g] for g in collection.trajectories]
    collection = collection.model_copy(update={"trajectories": groups})
    weighed = make_adapter(policy, loss={"reward_weights": {"right": 2.0}})
    assert weighed.group_rewards(collection) == [(1.0, 2.0), (0.0, 0.0)]
    assert make_adapter(policy, loss={"name": "sft"}).group_rewards(collection) == [(3.0, 0.0), (0.5, 1.0)]


def test_ppo_in_minibatches_is_a_job_like_any_other(make_policy, make_collection):
    patient = make_adapter(make_policy(), {"name": "ppo"}, num_minibatches=2, num_iterations=10)
    first, second = train(patient, make_collection("first"), make_collection("second"))
    metrics = second.metadata["metrics"]
    assert (first.status, metrics["updates"], metrics["applied_updates"]) == (TrainingStatusEnum.COMPLETED, 20, 20.0)
    assert metrics["value_loss"] > 0 and metrics["policy_version"] == patient.policy.version == 2


def test_reinforce_takes_one_update(policy):
    for options in ({"num_minibatches": 2}, {"num_iterations": 2}):
        with pytest.raises(ValueError, match="'reinforce' has no ratio"):
            make_adapter(policy, loss={"name": "reinforce"}, **options)


def test_the_reference_may_be_another_checkpoint_of_the_same_model(policy, tmp_path):
    params = jax.tree.map(lambda leaf: 2 * leaf, asyncio.run(policy.read(jax.device_get)))
    save_model(tmp_path / "same", policy.model, params)
    (tmp_path / "same" / "generation_config.json").write_text('{"top_p": 0.5}')  # of another checkpoint, and no matter
    loss = {"beta": 0.1, "reference": {"path": str(tmp_path / "same")}}
    loaded = make_adapter(policy, loss=loss).learner.reference.params
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(loaded), params)
    (tmp_path / "same").rename(tmp_path / "other")
    (tmp_path / "other" / "manifest.json").unlink(missing_ok=True)
    config = tmp_path / "other" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"rms_norm_eps": 1e-3}))
    with pytest.raises(ComponentError, match=r"loss\.reference\.path: .*other holds .*=0\.001"):
        make_adapter(policy, loss=loss | {"reference": {"path": str(tmp_path / "other")}})


async def sampled_rows(policy, make_sequence, count):
    """Rows that the policy really sampled, by their log-probabilities."""
    rows = [make_sequence(number) for number in range(count)]
    tokens = np.array([row.tokens for row in rows])
    scored = await policy.read(lambda params: np.asarray(_score(policy.model)(params, tokens)))
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


@cache
def _score(model):
    return jax.jit(lambda params, tokens: token_logprobs(model, params, tokens).logprobs)


def group(rows, run_id, rewards=(1.0, 0.0, 1.0, 0.0)):
    trajectories = [
        Trajectory(episode=[], reward=reward, example_id=f"{place // 2}", generation=place % 2, sequences=[row])
        for place, (row, reward) in enumerate(zip(rows, rewards, strict=True))
    ]
    return TrajectoryCollection(trajectories=[trajectories[:2], trajectories[2:]], run_id=run_id)


@pytest.fixture(scope="module")
def strict_adapter(make_policy):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(training_job, "MAX_DISAGREEING_FRACTION", 0.1)
        adapter = make_adapter(make_policy())
        _ = adapter.learner  # made with that threshold
        return adapter


@pytest.fixture
def strict(strict_adapter, monkeypatch):
    """An adapter with the thresholds it has by itself."""
    monkeypatch.setattr(training_job, "MAX_STALE_FRACTION", 0.1)
    return strict_adapter


def test_own_trajectories_are_trained(strict, make_sequence):
    rows = asyncio.run(sampled_rows(strict.policy, make_sequence, 4))
    (status,) = train(strict, group(rows, "own"))
    assert (status.status, status.message) == (TrainingStatusEnum.COMPLETED, "updated")
    metrics = status.metadata["metrics"]
    names = ("sampler_disagreement_fraction", "stale_trajectory_fraction", "refused_updates")
    assert [metrics[name] for name in names] == [0, 0, 0]


def test_foreign_log_probabilities_are_refused(strict, make_sequence):
    before, version = flat_params(strict.policy), strict.policy.version
    rows = asyncio.run(sampled_rows(strict.policy, make_sequence, 4))
    rows[2] = rows[2].model_copy(update={"sampler_logprobs": [x - 0.2 for x in rows[2].sampler_logprobs]})
    (status,) = train(strict, group(rows, "foreign"))
    assert status.status is TrainingStatusEnum.FAILED
    assert "refused: the log-probabilities recorded with 25% of the sequences are more than 0.1 nats" in status.message
    assert status.metadata["metrics"]["refused_updates"] == 1
    assert strict.policy.version == version and np.array_equal(flat_params(strict.policy), before)


def test_stale_trajectories_are_refused(strict, make_sequence):
    before = flat_params(strict.policy)
    rows = asyncio.run(sampled_rows(strict.policy, make_sequence, 4))
    rows[1] = rows[1].model_copy(update={"policy_versions": [-1, -1, 99, 99, 99, 99]})
    collection = group(rows, "stale")
    (status,) = train(strict, collection)
    assert status.status is TrainingStatusEnum.FAILED
    assert "refused: another version of the policy sampled 25% of the trajectories" in status.message
    assert np.array_equal(flat_params(strict.policy), before)


def test_the_second_of_two_queued_jobs_is_stale(strict, make_sequence):
    async def main():
        rows = await sampled_rows(strict.policy, make_sequence, 4)
        refs = [await strict.submit(group(rows, name)) for name in ("queued first", "queued second")]
        return [await strict.wait_until_complete(ref) for ref in refs]

    version = strict.policy.version
    first, second = asyncio.run(main())
    assert (first.status, second.status) == (TrainingStatusEnum.COMPLETED, TrainingStatusEnum.FAILED)
    assert first.metadata["metrics"]["policy_version"] == version + 1 == second.metadata["metrics"]["policy_version"]


def hungry(policy):
    """A model that wants more memory than any address space has: the allocation really fails."""

    def apply(params, tokens, positions, cache=None, tables=None, segment_ids=None):
        hidden, cache = policy.model.apply(params, tokens, positions, cache, tables, segment_ids)
        return hidden + jnp.cumsum(jnp.ones((2**16, 2**30)), axis=0)[tokens, :1], cache

    return policy.model._replace(apply=apply)


def test_a_job_that_needs_too_much_memory_says_what_to_lower(make_policy, policy, make_collection):
    adapter = make_adapter(make_policy(model=hungry(policy)))
    (status,) = train(adapter, make_collection("large"))
    assert status.status is TrainingStatusEnum.FAILED
    sizes = "slots (now 8)", "cache_tokens (now 1024)", "max_context_tokens (now 96)"
    for lower in ("trainer_adapters.<name>.microbatch_tokens (now 64)", "llms.policy.", *sizes):
        assert lower in status.message
    assert "Out of memory allocating" in status.message
    assert "\n" not in status.message and "JaxRuntimeError" in status.metadata["traceback"]


def test_health_says_what_to_lower_where_nothing_can_be_sampled(make_policy):
    with pytest.raises(
        DeviceMemoryError,
        match=rf"llms\.<name>\.slots \(now 8\), cache_tokens \(now {2**43}\) or max_context_tokens \(now 96\)",
    ):
        asyncio.run(make_adapter(make_policy(cache_tokens=2**43)).is_healthy())


@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt(), asyncio.CancelledError()], ids=repr)
def test_a_job_that_is_ended_in_the_middle_has_failed(make_policy, policy, make_collection, error):
    """A model may call `sys.exit`: the job is over, the process is not."""

    def apply(params, tokens, positions, cache=None, tables=None, segment_ids=None):
        raise error

    adapter = make_adapter(make_policy(model=policy.model._replace(apply=apply)))
    first, second = train(adapter, make_collection("first"), make_collection("second"))
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


def gathered(adapter, collection):
    """The metrics that a job on these trajectories begins with."""
    loss, template = adapter.adapter_config.loss, adapter.policy.template
    return gather(collection, loss, "policy", template, "unscorable")[0].metrics


def test_pairs_of_texts_are_learned(make_policy):
    adapter = make_adapter(make_policy(), {"name": "dpo", "beta": 0.5}, num_minibatches=3, num_iterations=5)
    first, second = train(adapter, *(pairs(name, *map(pair, range(6))) for name in ("one", "two")))
    assert (first.status, first.message) == (TrainingStatusEnum.COMPLETED, "updated")
    metrics = second.metadata["metrics"]
    assert metrics["preference_accuracy"] == 1.0 and metrics["reward_margin"] > 0.5
    # Each answer is a token and its end.
    assert (metrics["pairs_trained"], metrics["trained_tokens"], metrics["updates"]) == (6, 24, 15)
    assert metrics["pair_reward_mean"] == 1.0 and adapter.policy.version == 2


def test_recorded_pairs_keep_their_tokens(policy, make_sequence):
    adapter = make_adapter(policy, {"name": "dpo"})
    chosen, rejected = make_sequence(0), make_sequence(0, tokens=[3, 10, 30, 31, 32, 1])
    metrics = gathered(adapter, pairs("recorded", pair(0, sequences=[chosen, rejected])))
    assert (metrics["pairs_trained"], metrics["trained_tokens"]) == (1, 8)


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
            gathered(adapter, pairs("strange", trajectory))
    with pytest.raises(NothingToTrain, match="has no pair to train on"):
        gathered(adapter, pairs("none"))


def test_examples_are_imitated_when_they_are_good_enough(make_policy, make_collection):
    adapter = make_adapter(make_policy(), {"name": "sft", "min_reward": 0.5}, num_iterations=5)
    first, second = train(adapter, make_collection("one"), make_collection("two"))
    metrics = first.metadata["metrics"], second.metadata["metrics"]
    assert metrics[0]["imitated_trajectories"] == 2 and metrics[0]["trained_tokens"] == 8
    assert metrics[1]["loss"] < metrics[0]["loss"]
    with pytest.raises(NothingToTrain, match="0 of 4 trajectories are good enough"):
        gathered(adapter, make_collection("bad", rewards=(0.0,) * 4))


def test_several_processes_are_one_version_behind_at_most(policy, monkeypatch):
    adapter = make_adapter(policy)
    monkeypatch.setattr("jaxft.hosts.group._current", ProcessGroup(0, 2))
    with pytest.raises(ConfigError, match="max_staleness: is 2, but which episodes end first differs between"):
        adapter.allow_staleness(2)
    assert adapter.max_staleness == 0


def test_conversations_without_tokens_are_imitated(policy):
    said = [("user", "1+1"), ("assistant", "2"), ("tool", "ok"), ("assistant", "done")]
    episode = [EpisodeItem(role=role, content=text, logprobs=[]) for role, text in said]
    texts = TrajectoryCollection(trajectories=[[Trajectory(episode=episode, reward=1.0)]], run_id="texts")
    adapter = make_adapter(policy, {"name": "sft"})
    metrics = gathered(adapter, texts)
    assert metrics["trained_tokens"] == len("2") + len("done") + 2  # the ends of both answers, too
    bad = Trajectory(episode=episode[:1], reward=1.0)
    with pytest.raises(TrajectoryError, match="cannot be imitated: a conversation to be learned must end"):
        gathered(adapter, TrajectoryCollection(trajectories=[[bad]], run_id="bad"))


@pytest.mark.slow
@pytest.mark.parametrize("loss", ["grpo", "ppo", "dpo"])
def test_memory_is_told_without_training(policy, loss):
    before = flat_params(policy)
    memory = asyncio.run(make_adapter(policy, {"name": loss}).memory())
    learner = make_adapter(policy, {"name": loss}).learner
    held = asyncio.run(policy.read(partial(training_bytes, learner)))
    assert {name: memory[name] for name in held} == {name: size / 2**20 for name, size in held.items()}
    assert set(memory) == {*held, "update", "sampling", "sampling weights", "sampling temporaries"}
    assert memory["sampling temporaries"] > 0 and memory["update"] > 0
    assert np.array_equal(flat_params(policy), before)


@pytest.mark.parametrize("loss", ["grpo", "ppo", "dpo"])
def test_the_bytes_of_a_checkpoint_are_those_of_its_arrays(policy, loss):
    adapter = make_adapter(policy, {"name": loss})
    sizes = asyncio.run(adapter.disk_bytes())
    saved = asyncio.run(adapter.save_state(lambda values, arrays: sum(x.nbytes for x in jax.tree.leaves(arrays))))
    assert sizes == {"checkpoint": saved, "export": 4 * flat_params(policy).size}


@pytest.mark.parametrize("loss", ["grpo", "ppo", "dpo"])
def test_arrays_that_are_held_are_told(policy, loss):
    learner = make_adapter(policy, {"name": loss}).learner

    def held(params):
        return training_bytes(learner, params) | policy_bytes(policy, params, are_pinned=False)

    sizes = asyncio.run(policy.read(held))
    assert sizes["gradients"] == pytest.approx(sizes["parameters"], rel=1e-3)  # of a value head, too
    assert sizes["optimizer"] == pytest.approx(2 * sizes["parameters"], rel=1e-3)
    assert (sizes["reference"] > 0) == (loss == "dpo")
    layers = asyncio.run(policy.read(lambda params: sum(leaf.nbytes for leaf in jax.tree.leaves(params["layers"]))))
    config = policy.model.config
    scales = config.num_layers * (config.num_heads + config.num_kv_heads - 2) * config.head_dim * 4  # for each head
    assert sizes["sampling weights"] == layers + scales  # the ends are shared
    assert sizes["sampling"] == policy.engine.cache_bytes("float32")
