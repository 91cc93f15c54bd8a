"""A policy with low-rank adapters in the harness: trained, checkpointed, restored and exported."""

import asyncio
import json
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxft
from jaxft.core.partition import combine
from jaxft.errors import ComponentError, RestoreError
from jaxft.harness.data_models import TrainingStatusEnum
from jaxft.models.load import base_model
from jaxft.models.lora import merge_lora
from jaxft.rollout.policy import Policy
from jaxft.shipped.configs import LocalPolicyConfig, LocalTrainerAdapterConfig
from jaxft.shipped.local_adapter import LocalTrainerAdapter
from jaxft.shipped.local_policy import lora_of

LORA = {"rank": 2, "alpha": 4.0, "targets": ["q_proj", "mlp/*"]}


@pytest.fixture
def make_lora_policy(tokenizer):
    """Makes a policy with adapters; equal seeds give equal weights."""
    made = []

    def make(seed=1, **lora):
        config = LocalPolicyConfig(preset="qwen3-50k", lora={**LORA, **lora})
        model, params = jaxft.init_model("qwen3-50k", jax.random.key(seed), lora=lora_of(config.lora))
        made.append(Policy(model, params, tokenizer, stop_ids=(), slots=8, max_context_tokens=96))
        return made[-1]

    yield make
    for policy in made:
        policy.close()


def make_adapter(policy, **loss):
    fields = {"llm": "policy", "loss": loss, "optimizer": {"learning_rate": 1e-2}, "microbatch_tokens": 64}
    return LocalTrainerAdapter(
        LocalTrainerAdapterConfig(**fields, max_stale_fraction=1.0, max_disagreeing_fraction=1.0), policy
    )


def run(adapter, *collections):
    async def main():
        async with asyncio.timeout(120):
            return [await adapter.wait_until_complete(await adapter.submit(each)) for each in collections]

    return asyncio.run(main())


def host(policy):
    return asyncio.run(policy.read(jax.device_get))


def equal(a, b):
    jax.tree.map(np.testing.assert_array_equal, a, b)


def test_jobs_move_the_adapters_and_share_the_base_as_reference(make_lora_policy, make_collection):
    policy = make_lora_policy()
    before = host(policy)
    adapter = make_adapter(policy, beta=0.1)
    first, second = run(adapter, make_collection("first"), make_collection("second"))
    assert first.status == second.status == TrainingStatusEnum.COMPLETED and policy.version == 2
    after = host(policy)
    equal(before["base"], after["base"])
    assert any(
        (a != b).any() for a, b in zip(*map(jax.tree.leaves, (before["adapter"], after["adapter"])), strict=True)
    )
    reference = adapter.learner.ref_params
    assert jax.tree.leaves(reference["base"]) == []  # no second base
    equal(jax.device_get(reference["adapter"]), before["adapter"])
    assert first.metadata["metrics"]["kl"] == 0 and second.metadata["metrics"]["kl"] > 0


def test_a_moving_reference_follows_the_adapters(make_lora_policy, make_collection):
    policy = make_lora_policy()
    adapter = make_adapter(policy, beta=0.1, reference={"update_every": 1, "mixing": 1.0})
    run(adapter, make_collection("first"))
    equal(jax.device_get(adapter.learner.ref_params["adapter"]), host(policy)["adapter"])


def test_checkpoints_hold_the_adapters_and_know_their_base(make_lora_policy, make_collection):
    policy = make_lora_policy()
    adapter = make_adapter(policy)
    run(adapter, make_collection("first"))
    values, arrays = asyncio.run(adapter.save_state(lambda values, arrays: (values, jax.device_get(arrays))))
    assert jax.tree.leaves(arrays["params"]["base"]) == []
    base_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(host(policy)["base"]))
    assert sum(leaf.nbytes for leaf in jax.tree.leaves(arrays)) < base_bytes

    fresh = make_adapter(make_lora_policy())
    asyncio.run(fresh.restore_state(json.loads(json.dumps(values)), lambda like: jax.tree.map(jnp.asarray, arrays)))
    equal(host(fresh.policy), host(policy))
    assert fresh.policy.version == 1
    run(adapter, make_collection("second"))
    run(fresh, make_collection("second"))
    equal(host(fresh.policy), host(policy))

    foreign = make_adapter(make_lora_policy(seed=7))
    with pytest.raises(RestoreError, match=r"adapters of another base than that of llms\.policy"):
        asyncio.run(foreign.restore_state(values, lambda like: arrays))


def test_a_base_that_was_changed_is_kept_and_exported(make_lora_policy, make_collection, tmp_path):
    """A warm start changes the base, which then exists nowhere else."""
    policy = make_lora_policy()

    def change(params):
        return {**params, "base": jax.tree.map(lambda leaf: leaf * 1.01, params["base"])}, None

    asyncio.run(policy.update(change))
    adapter = make_adapter(policy)
    run(adapter, make_collection("first"))
    values, arrays = asyncio.run(adapter.save_state(lambda values, arrays: (values, jax.device_get(arrays))))
    equal(arrays["params"]["base"], host(policy)["base"])
    fresh = make_adapter(make_lora_policy())
    asyncio.run(fresh.restore_state(values, lambda like: jax.tree.map(jnp.asarray, arrays)))
    equal(host(fresh.policy), host(policy))
    policy._base = "somewhere"  # where the unchanged one came from
    asyncio.run(policy.save(tmp_path / "model"))
    _, merged = jaxft.load_merged(tmp_path / "model")
    wanted = merge_lora(policy.model.lora, host(policy))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-7), merged, wanted)


def test_a_checkpoint_without_adapters_is_told_apart(make_lora_policy, policy):
    with_adapters, without = make_adapter(make_lora_policy()), make_adapter(policy)
    for one, other, said in (
        (with_adapters, without, r"holds adapters, but llms\.policy has none"),
        (without, with_adapters, r"holds no adapters, but llms\.policy has some"),
    ):
        values = asyncio.run(one.save_state(lambda values, arrays: values))
        with pytest.raises(RestoreError, match=said):
            asyncio.run(other.restore_state(values, lambda like: like))


def test_a_reference_of_its_own_cannot_follow_adapters(make_lora_policy, tmp_path):
    policy = make_lora_policy()
    jaxft.save_model(tmp_path / "reference", base_model(policy.model), host(policy)["base"])
    own = {"path": str(tmp_path / "reference")}
    memory = asyncio.run(make_adapter(policy, beta=0.1, reference=own).memory())
    assert memory["reference"] == pytest.approx(memory["parameters"])
    with pytest.raises(ComponentError, match="cannot follow the policy"):
        make_adapter(policy, beta=0.1, reference={**own, "update_every": 1})


def test_memory_of_adapters_is_small(make_lora_policy, policy):
    with_lora = asyncio.run(make_adapter(make_lora_policy(), beta=0.1).memory())
    whole = asyncio.run(make_adapter(policy, beta=0.1).memory())
    for purpose in ("gradients", "optimizer", "reference"):
        assert with_lora[purpose] < 0.15 * whole[purpose], purpose
    assert with_lora["sampling weights"] == whole["sampling weights"] > 0  # merged kernels; the ends are shared


def test_exported_adapters_are_merged_by_the_command_line(make_lora_policy, make_collection, tmp_path, capsys):
    from jaxft.cli import main

    policy = make_lora_policy()
    run(make_adapter(policy), make_collection("first"))
    asyncio.run(policy.save(tmp_path / "run" / "model"))
    assert (tmp_path / "run" / "model" / "adapter_model.safetensors").is_file()
    assert main(["export", str(tmp_path / "run"), str(tmp_path / "merged")]) == 2
    assert "holds adapters" in capsys.readouterr().err
    assert main(["export", "--merge", str(tmp_path / "run"), str(tmp_path / "merged")]) == 0
    _, params = jaxft.load_model(tmp_path / "merged")
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, atol=1e-7), params, merge_lora(policy.model.lora, host(policy))
    )
    assert main(["export", "--merge", str(tmp_path / "merged"), str(tmp_path / "again")]) == 2
    assert "holds no adapters to merge" in capsys.readouterr().err


def test_adapters_of_a_folder_go_on(make_lora_policy, make_collection, tmp_path):
    policy = make_lora_policy()
    run(make_adapter(policy), make_collection("first"))
    asyncio.run(policy.save(tmp_path / "model"))
    again = make_lora_policy(path=str(tmp_path / "model"), rank=5)  # its own rank counts
    equal(host(again)["adapter"], host(policy)["adapter"])
    assert again.model.lora == replace(policy.model.lora, targets=again.model.lora.targets)
    assert combine(host(again), host(policy)).keys() == {"base", "adapter"}


@pytest.mark.parametrize(
    ("lora", "said"),
    [
        ({"rank": 0}, "rank"),
        ({"alpha": 0.0}, "alpha"),
        ({"targets": ["k_prj"]}, "target 'k_prj' matches no projection; there are self_attn/q_proj"),
        ({"targets": []}, "matches no projection"),
    ],
)
def test_numbers_that_cannot_be(lora, said):
    with pytest.raises(ValueError, match=said):
        LocalPolicyConfig(preset="qwen3-50k", lora=lora)
