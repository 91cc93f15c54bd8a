import asyncio

import jax
import jax.numpy as jnp
import pytest

from jaxft.errors import PolicyLostError
from jaxft.models.load import load_model
from jaxft.rollout.chat import load_tokenizer
from jaxft.rollout.policy import Policy


def embedding_sum(params):
    return float(jnp.sum(params["embed"]))


def double(params):
    return jax.tree.map(lambda leaf: 2 * leaf, params), "doubled"


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
        await policy.update(
            lambda params: (jax.tree.map(jnp.copy, params), 0.0), has_changed=lambda applied: applied > 0
        )
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
    kept = asyncio.run(policy.read(lambda params: jax.tree.map(jnp.copy, params)))
    assert model.config.architecture == policy.model.config.architecture
    assert jax.tree.all(jax.tree.map(lambda a, b: bool((a == b).all()), params, kept))
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
