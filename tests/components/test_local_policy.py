"""A policy with low-rank adapters in the harness: trained, checkpointed, restored and exported; and snapshots."""

import asyncio
import io
import json
from dataclasses import replace
from datetime import datetime
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxft
from jaxft.cli import main
from jaxft.components.configs import SNAPSHOT_EVERY, LocalPolicyConfig, LocalTrainerAdapterConfig
from jaxft.components.frozen_weights import load_reference
from jaxft.components.local_adapter import LocalTrainerAdapter
from jaxft.components.local_policy import (
    check_sampling_dtype,
    lora_option,
    read_decoder_config,
    sharding_table,
)
from jaxft.core.partition import combine
from jaxft.errors import ComponentError, ConfigError, ModelFileError, RestoreError
from jaxft.harness.builder import Builder
from jaxft.harness.config import load_config, resolved_yaml
from jaxft.harness.data_models import TrainingStatusEnum
from jaxft.models.decoder import decoder
from jaxft.models.hf_config import config_json
from jaxft.models.load import base_model
from jaxft.models.lora import merge_lora
from jaxft.models.model_card import SavedWeights, card_text, make_card
from jaxft.planning.targets import find_target
from jaxft.rollout.policy import Policy
from jaxft.rollout.tokenizer import load_tokenizer
from jaxft.runs.console import Console
from jaxft.runs.directory import RunDirectory
from jaxft.training.memory import policy_bytes, training_bytes

pytestmark = pytest.mark.usefixtures("foreign_trajectories")

QWEN3 = Path(__file__).parents[1] / "data" / "hf" / "qwen3"
LORA = {"rank": 2, "alpha": 4.0, "targets": ["q_proj", "mlp/*"]}


@pytest.fixture(scope="module")
def make_lora_policy(tokenizer):
    """Makes a policy with adapters; equal seeds give equal weights."""
    made = []

    def make(seed=1, params=None, **lora):
        config = LocalPolicyConfig(preset="qwen3-50k", lora={**LORA, **lora})
        model, own = jaxft.init_model("qwen3-50k", jax.random.key(seed), lora=lora_option(config.lora))
        params = own if params is None else jax.tree.map(jnp.asarray, params)
        made.append(Policy(model, params, tokenizer, stop_ids=(), slots=8, max_context_tokens=96))
        return made[-1]

    yield make
    for policy in made:
        policy.close()


def make_adapter(policy, **loss):
    fields = {"llm": "policy", "loss": loss, "optimizer": {"learning_rate": 1e-2}, "microbatch_tokens": 64}
    config = LocalTrainerAdapterConfig(**fields)
    weights = {"reference": load_reference(config, policy)} if config.has_own_reference else {}
    return LocalTrainerAdapter(config, policy, weights=weights)


def run(adapter, *collections):
    async def main():
        async with asyncio.timeout(120):
            return [await adapter.wait_until_complete(await adapter.submit(each)) for each in collections]

    return asyncio.run(main())


def host(policy):
    return asyncio.run(policy.read(jax.device_get))


def on_device(arrays, like):
    """The `read` of a checkpoint that has these arrays."""
    assert jax.tree.structure(like) == jax.tree.structure(arrays)
    return jax.tree.map(jnp.asarray, arrays)


def equal(a, b):
    jax.tree.map(np.testing.assert_array_equal, a, b)


class Trained(NamedTuple):
    """Two jobs of an adapter; parameters, in `params`, before the first and after each, and the state between them."""

    adapter: Any
    statuses: list
    params: list
    values: dict
    arrays: dict


@pytest.fixture(scope="module")
def trained(make_lora_policy, make_collection):
    """A policy with adapters and a KL to its first ones."""
    adapter = make_adapter(make_lora_policy(), beta=0.1)
    params = [host(adapter.policy)]
    statuses = run(adapter, make_collection("first"))
    params.append(host(adapter.policy))
    values, arrays = saved(adapter)
    statuses += run(adapter, make_collection("second"))
    return Trained(adapter, statuses, [*params, host(adapter.policy)], values, arrays)


def test_the_bytes_of_a_checkpoint_are_those_of_its_arrays(trained):
    sizes, (_, _, last) = asyncio.run(trained.adapter.disk_bytes()), trained.params
    adapters, base = (sum(x.nbytes for x in jax.tree.leaves(last[part])) for part in ("adapter", "base"))
    saved = sum(leaf.nbytes for leaf in jax.tree.leaves(trained.arrays))
    assert sizes == {"checkpoint": saved, "export": adapters + base, "merged": base}


@pytest.fixture(scope="module")
def restored(make_lora_policy, make_collection, trained):
    """Parameters and version of a fresh policy that was restored from that state, and parameters after its next job."""
    adapter = make_adapter(make_lora_policy(), beta=0.1)
    values = json.loads(json.dumps(trained.values))
    asyncio.run(adapter.restore_state(values, partial(on_device, trained.arrays)))
    params, version = host(adapter.policy), adapter.policy.version
    run(adapter, make_collection("second"))
    return params, version, host(adapter.policy)


def saved(adapter):
    """The values and arrays of a checkpoint."""
    return asyncio.run(adapter.save_state(lambda values, arrays: (values, jax.device_get(arrays))))


def bytes_of_arrays(adapter, params):
    """The bytes of all arrays that outlive a program, by purpose."""
    policy = adapter.policy
    return training_bytes(adapter.learner, params) | policy_bytes(policy, params, are_pinned=False)


def held_bytes(adapter):
    return asyncio.run(adapter.policy.read(partial(bytes_of_arrays, adapter)))


def merged(policy):
    """The parameters of the model without adapters, in numpy."""
    spec, params = policy.model.lora, host(policy)
    return _merge(spec)(params)


@cache
def _merge(spec):
    return jax.jit(partial(merge_lora, spec))


def test_jobs_move_the_adapters_and_share_the_base_as_reference(trained):
    first, second = trained.statuses
    assert first.status == second.status == TrainingStatusEnum.COMPLETED and trained.adapter.policy.version == 2
    before, _, after = trained.params
    equal(before["base"], after["base"])
    assert any(
        (a != b).any() for a, b in zip(*map(jax.tree.leaves, (before["adapter"], after["adapter"])), strict=True)
    )
    reference = trained.adapter.learner.reference.params
    assert jax.tree.leaves(reference["base"]) == []  # no second base
    equal(jax.device_get(reference["adapter"]), before["adapter"])
    assert first.metadata["metrics"]["kl"] == 0 and second.metadata["metrics"]["kl"] > 0


def test_a_moving_reference_follows_the_adapters(make_lora_policy, make_collection):
    policy = make_lora_policy()
    adapter = make_adapter(policy, beta=0.1, reference={"update_every": 1, "mixing": 1.0})
    run(adapter, make_collection("first"))
    equal(jax.device_get(adapter.learner.reference.params["adapter"]), host(policy)["adapter"])


def test_checkpoints_hold_the_adapters_and_know_their_base(trained, restored, make_lora_policy):
    arrays = trained.arrays
    assert jax.tree.leaves(arrays["params"]["base"]) == []
    base_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(trained.params[0]["base"]))
    assert sum(leaf.nbytes for leaf in jax.tree.leaves(arrays)) < base_bytes
    params, version, continued = restored
    assert version == 1
    equal(params, trained.params[1])
    equal(continued, trained.params[2])

    foreign = make_adapter(make_lora_policy(seed=7), beta=0.1)
    with pytest.raises(RestoreError, match=r"adapters of another base than that of llms\.policy"):
        asyncio.run(foreign.restore_state(trained.values, lambda like: arrays))


@pytest.mark.parametrize("has_adapters", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_checkpoints_hold_the_snapshots(make_lora_policy, make_policy, make_collection, has_adapters):
    def make(snapshots=("old",)):
        policy = make_lora_policy() if has_adapters else make_policy()
        for name in snapshots:
            policy.add_snapshot(name, every=2, seed=5, slots=8, max_context_tokens=96)
        return make_adapter(policy, **({"beta": 0.1} if has_adapters else {}))

    adapter, parameters = make(), []
    for jobs in range(4):  # versions 0 and 2 are those of the policy, and are not saved twice
        parameters.append(host(adapter.policy))
        values, arrays = saved(adapter)
        kept = None if jobs % 2 == 0 else {"version": jobs - 1, "dtype": "float32"}
        assert values["snapshots"] == {"old": kept} and (arrays["snapshots"]["old"] is None) == (kept is None)
        fresh, old = make(), adapter.policy.snapshots["old"]
        asyncio.run(fresh.restore_state(json.loads(json.dumps(values)), partial(on_device, arrays)))
        restored = fresh.policy.snapshots["old"]
        assert restored.version == old.version == jobs // 2 * 2
        equal(asyncio.run(restored.read(jax.device_get)), parameters[old.version])
        assert saved(fresh)[0] == values
        run(adapter, make_collection(f"job {jobs}"))
    if has_adapters:
        assert jax.tree.leaves(arrays["snapshots"]["old"]["base"]) == []

    without = make(snapshots=())
    values, arrays = saved(without)
    assert "snapshots" not in values and "snapshots" not in arrays  # as in every earlier checkpoint
    for one, other, said in ((adapter, without, "the snapshots old"), (without, adapter, "no snapshots")):
        with pytest.raises(RestoreError, match=rf"the checkpoint holds {said} of llms\.policy"):
            asyncio.run(other.restore_state(saved(one)[0], lambda like: like))


@pytest.fixture(scope="module")
def warm_started(make_lora_policy, trained, tmp_path_factory):
    """A policy whose base was changed, and what its export holds, merged."""
    policy, folder = make_lora_policy(params=trained.params[2]), tmp_path_factory.mktemp("warm") / "model"

    def change(params):
        return {**params, "base": jax.tree.map(lambda leaf: jnp.asarray(np.asarray(leaf) * 1.01), params["base"])}, None

    asyncio.run(policy.update(change))
    policy.base = "somewhere"  # where the unchanged one came from
    asyncio.run(policy.save(folder))
    return policy, jaxft.load_merged(folder)[1]


def test_a_base_that_was_changed_is_kept_and_exported(make_lora_policy, warm_started):
    """A warm start changes the base, which then exists nowhere else."""
    policy, loaded = warm_started
    values, arrays = saved(make_adapter(policy, beta=0.1))
    equal(arrays["params"]["base"], host(policy)["base"])
    fresh = make_adapter(make_lora_policy(), beta=0.1)
    asyncio.run(fresh.restore_state(values, partial(on_device, arrays)))
    equal(host(fresh.policy), host(policy))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-7), loaded, merged(policy))


def test_a_checkpoint_without_adapters_is_told_apart(make_lora_policy, policy):
    with_adapters, without = make_adapter(make_lora_policy()), make_adapter(policy)
    for one, other, said in (
        (with_adapters, without, r"holds adapters, but llms\.policy has none"),
        (without, with_adapters, r"holds no adapters, but llms\.policy has some"),
    ):
        values = asyncio.run(one.save_state(lambda values, arrays: values))
        with pytest.raises(RestoreError, match=said):
            asyncio.run(other.restore_state(values, lambda like: like))


def test_a_reference_of_its_own_cannot_follow_adapters(trained, tmp_path):
    policy, base = trained.adapter.policy, trained.params[2]["base"]
    jaxft.save_model(tmp_path / "reference", base_model(policy.model), jax.tree.map(lambda leaf: 2 * leaf, base))
    own = {"path": str(tmp_path / "reference")}
    adapter = make_adapter(policy, beta=0.1, reference=own)
    equal(jax.device_get(adapter.learner.reference.params["base"]), jax.tree.map(lambda leaf: 2 * leaf, base))
    sizes = held_bytes(adapter)
    assert sizes["reference"] == pytest.approx(sizes["parameters"])
    with pytest.raises(ComponentError, match="cannot follow the policy"):
        make_adapter(policy, beta=0.1, reference={**own, "update_every": 1})


@pytest.mark.slow
def test_a_reference_of_its_own_is_in_eight_bits_if_the_base_is(make_policy, tmp_path):
    model, params = jaxft.init_model("qwen3-50k", jax.random.key(0), dtype="int8", lora=jaxft.LoraSpec(2, 2.0))
    jaxft.save_model(tmp_path / "reference", base_model(model), params["base"])
    policy = make_policy(model=model, params=params)
    reference = make_adapter(policy, beta=0.1, reference={"path": str(tmp_path / "reference")}).learner.reference
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-6), reference.params["base"], params["base"])


def test_memory_of_adapters_is_small(trained, policy):
    with_lora, whole = (held_bytes(make_adapter(each, beta=0.1)) for each in (trained.adapter.policy, policy))
    for purpose in ("gradients", "optimizer", "reference"):
        assert with_lora[purpose] < 0.15 * whole[purpose], purpose
    assert with_lora["sampling weights"] == whole["sampling weights"] > 0  # merged kernels; the ends are shared


def test_exported_adapters_are_merged_by_the_command_line(trained, tmp_path, capsys):
    policy, card = trained.adapter.policy, make_card("Adapters", "How they were trained.", None)
    asyncio.run(policy.save(tmp_path / "run" / "model", card))
    assert (tmp_path / "run" / "model" / "adapter_model.safetensors").is_file()
    weights = SavedWeights("float32", policy.model.lora, has_base=True)
    assert (tmp_path / "run" / "model" / "README.md").read_text() == card_text(card, weights)
    assert main(["export", str(tmp_path / "run"), str(tmp_path / "merged")]) == 2
    assert "holds adapters" in capsys.readouterr().err
    assert main(["export", "--merge", str(tmp_path / "run"), str(tmp_path / "merged")]) == 0
    text = card_text(card, SavedWeights("float32", is_merged=True))
    assert (tmp_path / "merged" / "README.md").read_text() == text
    _, params = jaxft.load_model(tmp_path / "merged")
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-7), params, merged(policy))
    assert main(["export", "--merge", str(tmp_path / "merged"), str(tmp_path / "again")]) == 2
    assert "holds no adapters to merge" in capsys.readouterr().err


def test_adapters_of_a_folder_go_on(make_lora_policy, trained, tmp_path):
    policy = trained.adapter.policy
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


# --- Snapshots.


def test_keys_of_a_checkpoint_are_accepted_by_name(tmp_path):
    config = jaxft.model_preset("qwen3-50k")
    (tmp_path / "config.json").write_text(json.dumps(config_json(config, "float32") | {"made_with": 2}))
    with pytest.raises(ModelFileError, match=r'ignored_keys: \["made_with"\]'):
        read_decoder_config(LocalPolicyConfig(path=str(tmp_path)))
    shape = read_decoder_config(LocalPolicyConfig(path=str(tmp_path), ignored_keys=["made_with"]))
    assert shape.architecture == config.architecture


def test_contexts_that_a_checkpoint_does_not_know_are_refused(tmp_path, make_policy):
    config = replace(jaxft.model_preset("qwen3-50k"), max_position_embeddings=64)
    (tmp_path / "config.json").write_text(json.dumps(config_json(config, "float32")))
    assert (
        read_decoder_config(LocalPolicyConfig(path=str(tmp_path), max_context_tokens=64)).max_position_embeddings == 64
    )
    with pytest.raises(ValueError, match=r"max_context_tokens is 65, .* at most 64 tokens"):
        read_decoder_config(LocalPolicyConfig(path=str(tmp_path), max_context_tokens=65))
    with pytest.raises(ValueError, match=r"max_context_tokens is 65, .* at most 64 tokens"):
        make_policy(model=decoder(config), max_context_tokens=65)


def sections(**llms):
    """The sections of a run that trains `policy`, with further language models."""
    policy = {"_type": "local_policy", "preset": "qwen3-50k", "slots": 8, "max_context_tokens": 96}
    return {
        "llms": {"policy": policy, **llms},
        "workflow": {"_type": "snapshot_agent"},
        "eval": {
            "general": {"dataset": {"_type": "snapshot_rows"}},
            "evaluators": {"points": {"_type": "snapshot_points"}},
        },
        "trajectory_builders": {"rollouts": {"_type": "grpo_trajectory_builder"}},
        "trainer_adapters": {"local": {"_type": "local_trainer_adapter", "llm": "policy"}},
        "trainers": {"loop": {"_type": "grpo_trainer"}},
        "finetuning": {
            "enabled": True,
            "trainer": "loop",
            "trajectory_builder": "rollouts",
            "trainer_adapter": "local",
            "reward_function": {"name": "points"},
        },
    }


class AgentConfig(jaxft.WorkflowConfig, name="snapshot_agent"):
    pass


class RowsConfig(jaxft.DatasetConfig, name="snapshot_rows"):
    pass


class PointsConfig(jaxft.EvaluatorConfig, name="snapshot_points"):
    pass


@jaxft.register_workflow(config_type=AgentConfig)
async def snapshot_agent(config, builder):
    yield lambda example: None


@jaxft.register_dataset_loader(config_type=RowsConfig)
async def snapshot_rows(config, builder):
    yield [jaxft.EvalInputItem(id="a")]


@jaxft.register_evaluator(config_type=PointsConfig)
async def snapshot_points(config, builder):
    yield lambda item: 0.0


def snapshot(of="policy", **fields):
    return {"_type": "local_policy", "snapshot_of": of, **fields}


def configured(tmp_path, overrides=(), **llms):
    return jaxft.config_from_mapping(sections(**llms), base_dir=tmp_path, overrides=overrides)


@pytest.mark.parametrize(
    ("llms", "overrides", "fault"),
    [
        ({"old": snapshot("polcy")}, (), "llms.old.snapshot_of: 'polcy' is not in 'llms'; did you mean 'policy'?"),
        ({"old": snapshot("old")}, (), "llms.old.snapshot_of: 'old' is this snapshot itself; policies: policy"),
        (
            {"old": snapshot("older"), "older": snapshot()},
            (),
            "llms.old.snapshot_of: 'older' is a snapshot, too: name the policy that it is of, 'policy'",
        ),
        (
            {"old": snapshot("judge"), "judge": {"_type": "openai", "model": "m"}},
            (),
            "llms.old.snapshot_of: 'judge' is a model of type openai, not local_policy; policies: policy",
        ),
        (
            {"old": snapshot()},
            [("trainer_adapters.local.llm", "old")],
            "trainer_adapters.local.llm: 'old' is a snapshot, which is never trained: name the policy that it is of, "
            "'policy'",
        ),
        (
            {"old": snapshot()},
            [("finetuning.target_model", "old")],
            "finetuning.target_model: 'old' is a snapshot, which is never trained: name the policy that it is of, "
            "'policy'",
        ),
        ({}, [("llms.policy.every", "3")], "llms.policy: has 'every', but no 'snapshot_of': name the policy that "),
        ({"old": snapshot(every=0)}, (), "llms.old.every: must be greater than or equal to 1"),
        ({}, [("llms.policy.dtype", "int8")], "llms.policy: has dtype int8, in which nothing can be trained: set lora"),
        (
            {},
            [("llms.policy.lora", "{}"), ("llms.policy.dtype", "int8"), ("llms.policy.sampling_dtype", "int8")],
            "llms.policy: has sampling_dtype, but with dtype int8 the base is in eight bits: leave it out",
        ),
        (
            {},
            [("llms.policy.lora", "{}"), ("llms.policy.dtype", "int8"), ("llms.policy.kv_cache_dtype", "fp8")],
            "llms.policy: has kv_cache_dtype, but with dtype int8 the base is in eight bits: leave it out",
        ),
        (
            {},
            [("llms.policy.quantize_head", "true")],
            "llms.policy: has quantize_head, but no sampling_dtype: set that",
        ),
    ]
    + [
        (
            {"old": snapshot(**{field: value})},
            (),
            f"llms.old: has '{field}' beside 'snapshot_of', but a snapshot has that of 'policy': leave it out",
        )
        for field, value in (
            ("path", "somewhere"),
            ("preset", "qwen3-50k"),
            ("tokenizer", "somewhere"),
            ("dtype", "bfloat16"),
            ("compute_dtype", None),
            ("sampling_dtype", "int8"),
            ("quantize_head", True),
            ("kv_cache_dtype", "fp8"),
            ("remat", "full"),
            ("mesh", {"data": 1}),
            ("lora", LORA),
        )
    ],
)
def test_a_snapshot_that_cannot_be_is_refused_with_the_way_out(tmp_path, llms, overrides, fault):
    with pytest.raises(ConfigError) as caught:
        configured(tmp_path, overrides, **llms)
    (said,) = caught.value.faults
    assert said.startswith(fault)


@pytest.mark.parametrize(("target", "name"), [(None, "cpu"), ("a100x1", "A100"), ("h100x1", None), ("v5e-1", None)])
def test_fp8_is_refused_where_a_device_has_none(target, name):
    config = LocalPolicyConfig(preset="qwen3-50k", sampling_dtype="fp8")
    device = jax.devices("cpu")[0] if target is None else find_target(target).device
    if name is None:
        check_sampling_dtype(config, device)
        return
    with pytest.raises(ValueError, match=f"sampling_dtype is fp8, which .*{name}.* does not have; wanted int8"):
        check_sampling_dtype(config, device)
    config = config.model_copy(update={"sampling_dtype": "int8"})
    check_sampling_dtype(config, device)
    with pytest.raises(ValueError, match=f"kv_cache_dtype is fp8, which .*{name}.* does not have; leave it out"):
        check_sampling_dtype(config.model_copy(update={"kv_cache_dtype": "fp8"}), device)


def test_a_loss_that_cannot_be_is_refused_before_weights_are_read(tmp_path):
    """A script may warm the policy up for minutes before it asks for the adapter; this checkpoint has no weights."""
    shape = json.loads((QWEN3 / "config.json").read_text()) | {"vocab_size": 262, "max_position_embeddings": 512}
    (tmp_path / "config.json").write_text(json.dumps(shape))
    load_tokenizer().save_pretrained(tmp_path)
    weights = [("llms.policy", json.dumps({"_type": "local_policy", "path": str(tmp_path)}))]
    faults = {
        '{"name": "cispo", "delta": 5.0}': r"trainer_adapters.local.loss: .*'cispo'",
        '{"function": "tests.own_functions:undefined"}': r"loss.function: 'undefined' .* has a loss of nan",
        '{"function": "tests.own_functions:detached"}': r"loss.function: 'detached' .* has no gradient",
    }

    async def make(config):
        with RunDirectory.create(tmp_path / "run") as directory:
            async with Builder(config, directory, Console(io.StringIO())) as builder:
                await builder.get_llm("policy")

    for loss, message in faults.items():
        with pytest.raises(ConfigError, match=message):
            asyncio.run(make(configured(tmp_path, [*weights, ("trainer_adapters.local.loss", loss)])))
    with pytest.raises(ComponentError, match="safetensors"):
        asyncio.run(make(configured(tmp_path, [*weights, ("trainer_adapters.local.loss.name", "dr_grpo")])))


def test_the_configuration_of_a_snapshot_is_what_was_given(tmp_path):
    config = configured(tmp_path, old=snapshot(slots=4), older=snapshot(every=50))
    (tmp_path / "config.yml").write_text(resolved_yaml(config))
    again = load_config(tmp_path / "config.yml", [("llms.policy.slots", "16")])  # as a resumed run may
    for name, slots, every in (("old", 4, SNAPSHOT_EVERY), ("older", 16, 50)):
        own = again.llms[name].with_sampling_settings(again.llms["policy"])
        assert (own.slots, own.max_context_tokens, own.snapshot_every) == (slots, 96, every)
        assert sharding_table(again.llms[name]) is None
    assert "older:\n    _type: local_policy\n    snapshot_of: policy\n    every: 50\n" in resolved_yaml(again)


def test_snapshots_are_made_with_the_adapter_and_share_the_policy(tmp_path):
    other = sections()["llms"]["policy"]
    config = configured(tmp_path, old=snapshot(long_prompts="drop"), wide=snapshot(slots=16), other=other)

    async def main():
        with RunDirectory.create(tmp_path / "run") as directory:
            async with Builder(config, directory, Console(io.StringIO())) as builder:
                builder.now = datetime(2020, 2, 29)
                adapter = await builder.get_trainer_adapter("local")
                assert list(adapter.policy.snapshots) == ["old", "wide"]  # though nothing has asked for them
                old, other = await builder.get_llm("old"), await builder.get_llm("other")
                assert (old.name, old.long_prompts, old.policy.engine.slots) == ("old", "drop", 8)
                assert adapter.policy.snapshots["wide"].engine.slots == 16
                assert old.max_context_tokens == 96 and old.policy.template is adapter.policy.template
                assert other.policy is not adapter.policy
                assert adapter.policy.template.now == other.policy.template.now == builder.now
                sizes = await adapter.policy.read(partial(bytes_of_arrays, adapter))
                assert sizes["snapshots"] == 2 * sizes["parameters"]
                assert sizes["sampling"] == 4 * adapter.policy.engine.cache_bytes("float32")
                # The three draw different answers to one request, though all have the same weights.
                message, asked = [{"role": "user", "content": "x?"}], ("policy", "old", "other")
                replies = [await (await builder.get_llm(name)).chat(message, max_tokens=8, seed=1) for name in asked]
                assert len({reply.token_ids for reply in replies}) == 3
                builder.config.llms["older"] = LocalPolicyConfig(snapshot_of="old")
                with pytest.raises(
                    ComponentError, match=r"llms\.older\.snapshot_of: 'old' is no local_policy, or a sn"
                ):
                    await builder.get_llm("older")
                builder.config.trainer_adapters["wrong"] = LocalTrainerAdapterConfig(llm="old")
                with pytest.raises(ComponentError, match="'old' is a snapshot, which is never trained"):
                    await builder.get_trainer_adapter("wrong")
            return dict(builder.chosen)

    assert {path.split(".")[1] for path in asyncio.run(main())} == {"policy", "other"}
