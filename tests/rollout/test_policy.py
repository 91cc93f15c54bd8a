import asyncio
from contextlib import closing

import jax
import numpy as np
import pytest

from jaxft.core.partition import combine, partition, trainable
from jaxft.errors import PolicyLostError
from jaxft.models.config import LoraSpec
from jaxft.models.load import init_model, load_model
from jaxft.rollout.client import ChatClient
from jaxft.rollout.device import CompileCounter
from jaxft.rollout.policy import Policy
from jaxft.rollout.requests import Request
from jaxft.rollout.tokenizer import load_tokenizer
from jaxft.training.memory import policy_bytes

REQUEST = Request(prompt_ids=(5, 6), key_ids=(0,), max_tokens=2)
LORA = LoraSpec(2, 4.0, ("q_proj", "mlp/*"), False)


def embedding_sum(params):
    return float(np.asarray(params["embed"]).sum(dtype=np.float64))


def copied(params):
    return jax.tree.map(lambda leaf: jax.device_put(np.array(leaf)), params)


def double(params):
    return copied(jax.tree.map(lambda leaf: 2 * np.asarray(leaf), params)), "doubled"


def test_a_policy_whose_context_has_no_room_for_a_chat_is_healthy(make_scripted_policy):
    policy = make_scripted_policy([5, 6])
    assert len(policy.template.prompt([{"role": "user", "content": "?"}]).ids) > policy.engine.max_context_tokens == 2
    assert asyncio.run(policy.is_healthy())


def test_an_update_replaces_the_parameters(make_policy):
    policy = make_policy()

    async def main():
        before = await policy.read(embedding_sum)
        results = [await policy.update(double), await policy.update(double)]
        return results, await policy.read(embedding_sum) / before

    assert asyncio.run(main()) == (["doubled", "doubled"], 4.0)
    assert policy.version == 2


def test_an_update_without_change_keeps_the_version(make_policy):
    policy = make_policy()

    async def main():
        await policy.update(lambda params: (params, None))
        # New arrays with the old values, as an update that was refused gives them back.
        await policy.update(lambda params: (copied(params), 0.0), has_changed=lambda applied: applied > 0)
        return await policy.read(embedding_sum)

    asyncio.run(main())
    assert policy.version == 0


def test_after_a_failed_update_all_work_is_refused(make_policy, tmp_path):
    policy = make_policy()

    def breaks(params):
        raise MemoryError("out of memory")

    async def main():
        with pytest.raises(MemoryError):
            await policy.update(breaks)
        for attempt in (policy.update(double), policy.read(embedding_sum), policy.save(tmp_path / "model")):
            with pytest.raises(PolicyLostError) as caught:
                await attempt
            assert "MemoryError: out of memory" in str(caught.value)

    asyncio.run(main())
    assert policy.version == 0 and not (tmp_path / "model").exists()


def test_a_failed_read_costs_nothing(make_policy):
    policy = make_policy()

    async def main():
        with pytest.raises(ZeroDivisionError):
            await policy.read(lambda params: 1 // 0)
        return await policy.update(double)

    assert asyncio.run(main()) == "doubled"


def test_a_saved_policy_can_be_loaded(policy, tmp_path):
    folder = asyncio.run(policy.save(tmp_path / "model"))
    model, params = load_model(folder)
    kept = asyncio.run(policy.read(lambda params: params))
    assert model.config.architecture == policy.model.config.architecture
    jax.tree.map(np.testing.assert_array_equal, params, kept)
    assert load_tokenizer(folder).encode("<|user|>x") == policy.tokenizer.encode("<|user|>x")


@pytest.mark.parametrize("sizes", [{"slots": 0}, {"max_context_tokens": 1}])
def test_impossible_sizes_are_refused(policy, sizes):
    with pytest.raises(
        ValueError,
        match=f"slots is {sizes.get('slots', 64)} and max_context_tokens {sizes.get('max_context_tokens', 512)};",
    ):
        Policy(policy.model, {}, policy.tokenizer, stop_ids=(1,), **sizes)


def test_closing_twice_does_no_harm(make_policy):
    policy = make_policy()
    policy.close()
    policy.close()


def test_closing_frees_all_but_the_parameters(make_policy):
    """At once, as policies are part of cycles, and the next one may need the memory."""

    def live_bytes():
        return sum(array.nbytes for array in jax.live_arrays())

    async def main():
        params = await policy.read(lambda params: params)
        await policy.engine.submit(REQUEST)
        await policy.pin_weights()
        for _ in range(2):
            await policy.update(lambda params: (policy.keep_snapshots(params), grow(params))[::-1])
            for engine in (policy.engine, policy.snapshots["opponent"].engine):
                await engine.submit(REQUEST)
        return sum(leaf.nbytes for leaf in jax.tree.leaves(params))

    before = live_bytes()
    policy = make_policy()
    add_snapshot(policy, "opponent", every=2)
    size = asyncio.run(main())
    assert live_bytes() > before + 4 * size
    policy.close()
    assert live_bytes() - before < 1.1 * size


# --- Snapshots.


def start(compute_dtype, lora, **options):
    """Return a model and random parameters, made by numpy."""
    options["compute_dtype"] = compute_dtype
    models, rng = [], np.random.default_rng(1)

    def init():
        model, params = init_model("qwen3-50k", jax.random.key(1), **options, lora=lora)
        models.append(model)
        return params

    def draw(leaf):
        scale = 0.1 if leaf.dtype.itemsize > 1 else 40
        return jax.device_put(rng.normal(scale=scale, size=leaf.shape).astype(leaf.dtype))

    params = jax.tree.map(draw, jax.eval_shape(init))
    return models[0], params


@jax.jit
def grow(params):
    return jax.tree.map(lambda leaf: 1.5 * leaf, params)


def train(policy, times=1):
    """Runs training jobs, each of which donates the parameters as an update does."""

    def job(params):
        policy.keep_snapshots(params)
        grown = grow(params)
        jax.tree.map(lambda leaf: leaf.delete(), params)
        return grown, None

    async def main():
        for _ in range(times):
            await policy.update(job)

    asyncio.run(main())


def add_snapshot(policy, name="earlier", every=3, **sizes):
    return policy.add_snapshot(name, every=every, seed=5, **({"slots": 8, "max_context_tokens": 96} | sizes))


def test_a_snapshot_is_the_latest_version_that_is_a_multiple(make_policy):
    policy = make_policy()
    snapshots = [add_snapshot(policy, f"every {every}", every) for every in (1, 3, 100)]
    first, seen = asyncio.run(policy.read(embedding_sum)), []
    for _ in range(8):
        seen.append([snapshot.version for snapshot in snapshots])
        for version, snapshot in zip(seen[-1], snapshots, strict=True):
            assert asyncio.run(snapshot.read(embedding_sum)) == pytest.approx(first * 1.5**version, rel=1e-4)
        train(policy)
    assert seen == [[version, version // 3 * 3, 0] for version in range(8)]


def test_a_checkpoint_has_the_snapshots_that_the_pinned_weights_were_sampled_beside(make_policy):
    """A validation releases the sampler before the checkpoint, and the snapshot follows, whichever multiples meet."""
    policy = make_policy()
    snapshots = [add_snapshot(policy, f"every {every}", every) for every in (1, 2, 3)]
    first, replaced = embedding_sum(policy.weights.trained), 0
    for version in range(6):
        asyncio.run(policy.pin_weights())
        beside = [snapshot.version for snapshot in snapshots]
        assert beside == [version, version // 2 * 2, version // 3 * 3]
        train(policy)
        for is_validated in (False, True):
            if is_validated:
                asyncio.run(policy.release_weights())
            values, arrays = policy.weights.saved(with_pinned=True)
            newest, _ = policy.weights.saved(with_pinned=False)
            for snapshot, its_version in zip(snapshots, beside, strict=True):
                state = values["snapshots"][snapshot.name]
                assert (values["held"] if state is None else state)["version"] == its_version
                if state is not None:
                    params = arrays["snapshots"][snapshot.name]
                    assert embedding_sum(params) == pytest.approx(first * 1.5**its_version, rel=1e-4)
                replaced += newest["snapshots"][snapshot.name] != state
    assert replaced == 5  # of every 2: after versions 1, 3, 5; of every 3: after 2 and 5


def test_updates_before_training_are_those_of_the_snapshot(make_policy):
    """A script may warm up the policy by any number of updates before the first training job."""
    policy = make_policy()
    snapshot = add_snapshot(policy, every=100)
    for _ in range(2):
        asyncio.run(policy.update(lambda params: (grow(params), None)))
    started = asyncio.run(policy.read(embedding_sum))
    train(policy, 2)
    assert (snapshot.version, policy.version) == (2, 4)
    assert asyncio.run(snapshot.read(embedding_sum)) == started


def test_a_snapshot_answers_as_the_policy_of_its_version_did(make_policy):
    policy = make_policy(seed=5)
    snapshot = add_snapshot(policy)  # with the same seed
    one, other = ChatClient(policy, "policy"), ChatClient(snapshot, "earlier")

    def ask(client):
        message = [{"role": "user", "content": "x?"}]
        return asyncio.run(client.chat(message, max_tokens=8, seed=1))

    before = ask(one)
    with closing(CompileCounter()) as compiles:
        assert (ask(other).token_ids, ask(other).logprobs) == (before.token_ids, before.logprobs)
        train(policy)
        after = ask(other)
        assert (after.token_ids, after.logprobs, after.policy_version) == (before.token_ids, before.logprobs, 0)
        assert ask(one).logprobs != before.logprobs and ask(one).policy_version == 1
    assert set(compiles.names()) <= {"jit(copy_trained)", "jit(grow)"}  # both engines have one set of programs
    with pytest.raises(ValueError, match="slots is 0 and max_context_tokens 96"):
        add_snapshot(policy, slots=0)


def test_a_lost_policy_has_no_snapshots(make_policy):
    policy = make_policy()
    snapshot = add_snapshot(policy)
    train(policy)
    with pytest.raises(ZeroDivisionError):
        asyncio.run(policy.update(lambda params: 1 // 0))
    with pytest.raises(PolicyLostError):
        asyncio.run(ChatClient(snapshot, "earlier").chat([{"role": "user", "content": "x?"}]))


def assert_alike(like, arrays):
    jax.tree.map(lambda a, b: (a.shape, a.dtype) == (b.shape, b.dtype) or pytest.fail("another layout"), like, arrays)


@pytest.mark.parametrize(("compute_dtype", "lora"), [("bfloat16", None), ("bfloat16", LORA)])
def test_a_snapshot_keeps_little_and_comes_back_in_another_dtype(make_policy, compute_dtype, lora):
    def make(dtype):
        model, params = start(dtype, lora)
        policy = make_policy(model=model, params=params)
        return policy, add_snapshot(policy)

    policy, _ = make(compute_dtype)
    train(policy)
    values, arrays = policy.weights.saved(with_pinned=True)
    state, kept = values["snapshots"]["earlier"], arrays["snapshots"]["earlier"]
    assert jax.tree.structure(kept) == jax.tree.structure(trainable(policy.model, policy.weights.trained))
    dtype = "float32" if lora else compute_dtype
    assert {str(leaf.dtype) for leaf in jax.tree.leaves(kept)} == {dtype} and state == {"version": 0, "dtype": dtype}
    kept_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(kept))
    sizes = asyncio.run(policy.read(lambda params: policy_bytes(policy, params, are_pinned=False)))
    assert sizes["snapshots"] == kept_bytes

    other, restored = make(None)

    def restore(params):
        assert_alike(other.weights.like(values, params), arrays)
        assert other.weights.restore(values, arrays, params)
        return params

    asyncio.run(other.restore(restore, 1))
    again = other.weights.beside["earlier"].params
    assert restored.version == 0 and {str(leaf.dtype) for leaf in jax.tree.leaves(again)} == {"float32"}
    jax.tree.map(np.testing.assert_array_equal, again, kept)


def copied_arrays(values, arrays):
    return values, copied(arrays)


def ask(client, **options):
    return asyncio.run(client.chat([{"role": "user", "content": "x?"}], max_tokens=8, seed=1, **options))


INT8 = [(None, {"sampling_dtype": "int8"}), (LORA, {"sampling_dtype": "int8"}), (LORA, {"dtype": "int8"})]
INT8 = [pytest.param(*values, marks=pytest.mark.slow) for values in INT8]


@pytest.mark.parametrize(("lora", "options"), [(None, {}), (LORA, {}), *INT8])
def test_pinned_weights_answer_as_before_whatever_is_trained(make_policy, lora, options):
    model, params = start(None, lora, **options)
    policy = make_policy(model=model, params=params)
    snapshot = add_snapshot(policy, every=1)  # it would follow every job
    client, earlier = ChatClient(policy, "policy"), ChatClient(snapshot, "earlier")

    def job(params):
        moved, frozen = partition(model, params)
        grown = combine(copied(jax.tree.map(lambda leaf: 1.5 * np.asarray(leaf) + np.float32(0.1), moved)), frozen)
        jax.tree.map(lambda leaf: leaf.delete(), moved)  # as an update donates them
        return grown, None

    before, before_earlier = ask(client), ask(earlier)
    asyncio.run(policy.pin_weights())
    with closing(CompileCounter()) as compiles:
        for _ in range(2):
            asyncio.run(policy.update(job))
        held, held_earlier = ask(client), ask(earlier)
    assert (held.token_ids, held.logprobs, held.policy_version) == (before.token_ids, before.logprobs, 0)
    assert (held_earlier.logprobs, held_earlier.policy_version) == (before_earlier.logprobs, 0)
    assert not [name for name in compiles.names() if "advance" in name or "prefill" in name]
    assert (policy.version, snapshot.version, policy.weights.sampled_version()) == (2, 0, 0)

    pinned_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(policy.sampling_params()[0]))
    shared_bytes = 0 if lora is None else params["base"]["embed"].nbytes + params["base"]["final_norm"]["scale"].nbytes
    sizes = asyncio.run(policy.read(lambda params: policy_bytes(policy, params, are_pinned=True)))
    assert sizes["held sampling weights"] == pytest.approx(pinned_bytes - shared_bytes, rel=0.02)
    values, arrays = copied_arrays(*policy.weights.saved(with_pinned=True))
    asyncio.run(policy.release_weights())
    newest = ask(client)
    assert newest.policy_version == 2 and newest.logprobs != before.logprobs
    assert ask(earlier).policy_version == snapshot.version == 2

    # A checkpoint holds them again; those of another mesh or dtype are not held.
    def restore(params):
        assert_alike(policy.weights.like(values, params), arrays)
        elsewhere = {**values, "held": {**values["held"], "tensor_shards": 2}}
        assert lora is not None or not policy.weights.restore(elsewhere, arrays, params)
        assert policy.weights.restore(values, arrays, params)
        return params

    asyncio.run(policy.restore(restore, 2))
    again = ask(client)
    assert (again.token_ids, again.logprobs, again.policy_version) == (before.token_ids, before.logprobs, 0)


def test_requests_are_answered_while_a_job_pauses(make_policy):
    policy = make_policy()
    client = ChatClient(policy, "policy")
    asyncio.run(policy.pin_weights())
    before, during = ask(client), []

    async def main():
        def job(params):
            while not asking.done():  # it would never end without a pause
                policy.pause(params["embed"])
            return double(params)

        asking = asyncio.ensure_future(client.chat([{"role": "user", "content": "x?"}], max_tokens=8, seed=1))
        await asyncio.wait_for(policy.update(job), 60)
        during.append(await asking)
        return policy.device_seconds()

    spent = asyncio.run(main())
    assert during[0].logprobs == before.logprobs and during[0].policy_version == 0
    assert spent["training"] > 0 and spent["sampling"] > 0


def test_requests_go_on_with_new_weights_and_tell_the_version_of_each_token(make_policy):
    policy, versions = make_policy(stop_ids=()), []

    async def main():
        await policy.pin_weights()
        asking = asyncio.ensure_future(
            policy.engine.submit(
                Request(prompt_ids=(1, 2, 3), key_ids=(0,) * 6, max_tokens=64),
                lambda *_: versions.append(policy.version),
            )
        )
        while not versions:
            await asyncio.sleep(0)
        await policy.update(double)
        await policy.pin_weights(finishes_requests=False)
        return await asking

    completion = asyncio.run(main())
    assert completion.policy_version == 0 and sorted(set(completion.policy_versions)) == [0, 1]
    assert completion.policy_versions == sorted(completion.policy_versions)
    assert len(completion.policy_versions) == len(completion.token_ids) == 64
