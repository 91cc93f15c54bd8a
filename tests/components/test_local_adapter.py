import asyncio

import jax
import jax.numpy as jnp
import pytest

from jaxft.components.local_adapter import LocalTrainerAdapter, LocalTrainerAdapterConfig
from jaxft.components.rows import has_signal
from jaxft.harness.data_models import TrainingJobRef, TrainingStatusEnum, Trajectory
from jaxft.harness.errors import ComponentError, NothingToTrain, TrajectoryError
from jaxft.models.config import preset
from jaxft.models.hf import init_model, save_model
from jaxft.policy.policy import PolicyLostError

# A row of the collections is 16 wide: one microbatch of four rows, one compiled update for all jobs of an adapter.
MICROBATCH_TOKENS = 64


def make_adapter(policy, warn=print, loss=None, **options):
    fields = {"llm": "policy", "loss": loss or {}, "optimizer": {"learning_rate": 1e-3}}
    # The collections of these tests were sampled by nobody.
    fields |= {"max_stale_share": 1.0, "max_disagreeing_share": 1.0, "microbatch_tokens": MICROBATCH_TOKENS}
    config = LocalTrainerAdapterConfig(**(fields | options))
    return LocalTrainerAdapter(config, policy, warn)


def train(adapter, *collections):
    """The last status of a job for each collection, one after the other."""

    async def main():
        async with asyncio.timeout(120):
            return [
                await adapter.wait_until_complete(await adapter.submit(collection), poll_interval=1e9)
                for collection in collections
            ]

    return asyncio.run(main())


def flat_params(policy):
    return asyncio.run(policy.read(lambda params: jnp.concatenate([leaf.ravel() for leaf in jax.tree.leaves(params)])))


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
        adapter.log_progress(ref, {"epoch": 0})
        return ref, states, last, await adapter.status(ref)

    ref, states, last, after = asyncio.run(main())
    assert (ref.run_id, ref.backend, states) == ("first", "local", [TrainingStatusEnum.PENDING])
    assert (last.status, last.progress, last.message) == (TrainingStatusEnum.COMPLETED, 100.0, "updated")
    assert policy.version == version + 1 and not bool((flat_params(policy) == before).all())
    metrics, timings = last.metadata["metrics"], last.metadata["timings"]
    assert timings.keys() == {"seconds_update", "compiles"} and timings["compiles"] > 0
    expected = {
        "groups": 2,
        "no_signal_groups": 0,
        "unscorable_trajectories": 0,
        "foreign_sequences": 0,
        "sequences_per_trajectory": 1.0,
        "trained_tokens": 16,
        "truncated_share": 0.0,
        "stale_token_share": 0.0,
        "applied_updates": 1.0,
        "nonfinite_updates": 0.0,
        "nothing_to_learn": 0.0,
        "policy_version": version + 1,
    }
    assert {name: metrics[name] for name in expected} == expected
    assert metrics["grad_norm"] > 0 and metrics["entropy"] > 0 and metrics["sampler_logprob_diff_max"] > 0
    assert "kl" not in metrics  # without beta there is no reference
    assert after.metadata["history"] == [{"epoch": 0}]


def test_without_signal_nothing_moves(adapter, make_collection):
    policy = adapter.policy
    before, version = flat_params(policy), policy.version
    (status,) = train(adapter, make_collection("equal", rewards=(1.0, 1.0, 0.0, 0.0)))
    assert status.status is TrainingStatusEnum.COMPLETED and "nothing to learn" in status.message
    metrics = status.metadata["metrics"]
    assert (metrics["no_signal_groups"], metrics["nothing_to_learn"], metrics["applied_updates"]) == (2, 1.0, 0.0)
    assert (metrics["policy_version"], policy.version) == (version, version)
    assert bool((flat_params(policy) == before).all())


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
    assert status.metadata["metrics"]["stale_token_share"] == 0.25


def test_groups_need_no_example_ids(adapter, make_collection):
    def anonymous(run_id):
        collection = make_collection(run_id, rewards=(1.0, 0.0, 5.0, 5.0))
        unnamed = [[t.model_copy(update={"example_id": None}) for t in group] for group in collection.trajectories]
        return collection.model_copy(update={"trajectories": unnamed})

    (status,) = train(adapter, anonymous("anonymous"))
    assert status.metadata["metrics"]["no_signal_groups"] == 1


def test_jobs_have_names_of_their_own(adapter, make_collection):
    train(adapter, make_collection("twice"))
    with pytest.raises(ValueError, match="job 'twice' has been submitted before"):
        train(adapter, make_collection("twice"))
    with pytest.raises(ValueError, match=r"no job 'unknown' was submitted; jobs: .*twice"):
        asyncio.run(adapter.status(TrainingJobRef(run_id="unknown", backend="local")))


GREEDY = {"temperatures": [1.0, 1.0, 0.0, 0.0, 0.0, 0.0]}
FIRST = {"completion_mask": [True] * 6}
UNEVEN = {"sampler_logprobs": [0.0]}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (GREEDY, "example 'example-1', generation 0 was sampled greedily"),
        (FIRST, "example 'example-1', generation 0: the first token of a sequence has no context"),
        (UNEVEN, "the lists of a sequence differ in length: .*'tokens': 6, .*'sampler_logprobs': 1"),
    ],
)
def test_rows_that_mean_nothing_are_refused(adapter, make_collection, changes, message):
    with pytest.raises(TrajectoryError, match=message):
        train(adapter, make_collection("refused", changes={2: changes}))


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
    good, bad = collection.trajectories[0]
    groups = [[good, bad.model_copy(update={field: value})]]
    with pytest.raises(TrajectoryError, match=message):
        train(adapter, collection.model_copy(update={"trajectories": groups}))


def test_nothing_to_train_on_is_an_error_that_says_why(adapter, make_collection):
    with pytest.raises(NothingToTrain, match="job 'none' has no token to train on: 4 trajectories, 4 of them without"):
        train(adapter, make_collection("none", rewards=(None,) * 4))
    with pytest.raises(NothingToTrain, match="0 sequences, 0 of them truncated"):
        train(adapter, make_collection("none", sequences=[]))
    foreign = {place: {"llm": "opponent"} for place in range(4)}
    with pytest.raises(ValueError, match="0 sequences, 0 of them truncated, 4 of other language models"):
        train(adapter, make_collection("none", changes=foreign))


def test_a_reference_is_kept_when_beta_asks_for_it(make_policy, make_collection):
    """Here also: what mask_truncated and another model's rows leave out, and one warning about filters."""
    warnings = []
    adapter = make_adapter(make_policy(), warnings.append, loss={"beta": 0.1, "mask_truncated": True})
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
    assert metrics["truncated_share"] == pytest.approx(1 / 5)
    assert len(warnings) == 1 and "kept 90.2% of the mass on average" in warnings[0]  # 3/4 + exp(-0.5) / 4


def test_a_failing_update_is_a_failed_job_and_a_lost_policy(make_policy, policy, make_collection, tmp_path):
    def breaks(params, tokens, positions, cache=None, segment_ids=None):
        raise MemoryError("too large")

    lost = make_adapter(make_policy(model=policy.model._replace(apply=breaks)))

    async def main():
        healthy = await lost.is_healthy()
        status = await lost.wait_until_complete(await lost.submit(make_collection("broken")))
        with pytest.raises(PolicyLostError):
            await lost.export_model(tmp_path / "model")
        return healthy, status, await lost.is_healthy()

    before, status, after = asyncio.run(main())
    assert (before, after) == (False, False)  # nothing can be sampled from it either
    assert (status.status, status.message) == (TrainingStatusEnum.FAILED, "MemoryError: too large")
    assert "in breaks" in status.metadata["traceback"]


def test_health_is_finite_parameters(make_policy):
    adapter = make_adapter(make_policy())

    async def main():
        before = await adapter.is_healthy()
        await adapter.policy.update(lambda params: (jax.tree.map(lambda leaf: leaf * jnp.nan, params), None))
        return before, await adapter.is_healthy()

    assert asyncio.run(main()) == (True, False)


def test_knobs_that_exclude_each_other_are_refused_at_once(policy):
    with pytest.raises(ValueError, match="max_completion_tokens is None"):
        make_adapter(policy, loss={"name": "dr_grpo"})


def test_signal_is_a_spread_of_usable_rewards():
    def group(*rewards):
        return [Trajectory(episode=[], reward=r or 0.0, scorable=r is not None) for r in rewards]

    assert has_signal(group(1.0, 0.0)) and has_signal(group(1.0, 1.1, None))
    assert not any(map(has_signal, [group(), group(1.0), group(1.0, None), group(1.0, 1.0), group(1e6, 1e6 + 0.5)]))


def test_ppo_in_minibatches_is_a_job_like_any_other(make_policy, make_collection):
    adapter = make_adapter(make_policy(), loss={"name": "ppo"}, minibatches=2, updates_per_batch=2)
    first, second = train(adapter, make_collection("first"), make_collection("second"))
    metrics = second.metadata["metrics"]
    assert (first.status, metrics["updates"], metrics["applied_updates"]) == (TrainingStatusEnum.COMPLETED, 4, 4.0)
    assert metrics["value_loss"] > 0 and metrics["policy_version"] == adapter.policy.version == 2


def test_reinforce_takes_one_update(policy):
    for options in ({"minibatches": 2}, {"updates_per_batch": 2}):
        with pytest.raises(ValueError, match="'reinforce' has no ratio"):
            make_adapter(policy, loss={"name": "reinforce"}, **options)


def test_the_reference_may_be_another_checkpoint_of_the_same_model(policy, tmp_path):
    model, params = init_model(preset("qwen3-50k"), jax.random.key(7))
    save_model(tmp_path / "same", model, params)
    (tmp_path / "same" / "generation_config.json").write_text('{"top_p": 0.5}')  # of another checkpoint, and no matter
    loss = {"beta": 0.1, "reference": {"path": str(tmp_path / "same")}}
    loaded = make_adapter(policy, loss=loss).learner.ref_params
    assert bool((loaded["ends"]["embedding"] == params["ends"]["embedding"]).all())
    other, params = init_model(preset("qwen3-50k", vocab_size=300), jax.random.key(7))
    save_model(tmp_path / "other", other, params)
    with pytest.raises(ComponentError, match=r"loss\.reference\.path: .*other holds .*vocab_size=300"):
        make_adapter(policy, loss=loss | {"reference": {"path": str(tmp_path / "other")}})
