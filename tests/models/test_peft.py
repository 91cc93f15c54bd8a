"""Adapters in PEFT's format: logits as PEFT's own, adapters saved and loaded again, and damaged files.

`tests/data/peft` was recorded by `scripts/peft_oracle.py` with peft 0.21.2, transformers 5.23.0 and torch 2.13.0.
"""

import json
import re
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import jaxft
from jaxft.errors import ModelFileError
from jaxft.files import MANIFEST
from jaxft.models import lora
from jaxft.models.config import LoraSpec
from jaxft.models.decoder import decoder
from jaxft.models.lora import merge_lora
from jaxft.models.peft import (
    ABOUT_BASE,
    CONFIG,
    WEIGHTS,
    base_fingerprint,
    load_adapter,
    load_lora_config,
    save_adapter,
)
from tests.models.weights import narrowed, random_params

DATA = Path(__file__).parents[1] / "data"
BASES = {"by_jaxft": "qwen2", "by_peft": "llama", "fused_by_jaxft": "phi3", "fused_by_peft": "phi3"}


def load(name, base=None):
    model, params = jaxft.load_model(DATA / "hf" / (base or BASES[name]), lora=DATA / "peft" / name)
    return jaxft.base_model(model), model, params


@pytest.fixture(scope="module")
def loaded():
    """Loads adapters with their base, once; parameters are on the host."""
    found = {name: (*models, jax.device_get(params)) for name in BASES for *models, params in [load(name)]}
    return found.__getitem__


@pytest.fixture(scope="module")
def adapter(loaded, tmp_path_factory):
    """A folder of adapters, and what is loaded from it in bfloat16."""
    folder = tmp_path_factory.mktemp("saved") / "adapter"
    save_adapter(folder, *loaded("by_jaxft")[1:])
    return folder, jaxft.load_merged(folder, dtype=jnp.bfloat16)[1]


@pytest.mark.parametrize("name", BASES)
def test_logits_are_those_of_peft(name, loaded):
    plain, model, params = loaded(name)
    recorded = json.loads((DATA / "peft" / name / "logits.json").read_text())
    tokens = np.array(recorded["tokens"], np.int32)
    positions = np.tile(np.arange(tokens.shape[1], dtype=np.int32), (len(tokens), 1))

    @jax.jit
    def beside_and_merged(params, tokens, positions):
        pairs = (model, params), (plain, merge_lora(model.lora, params))
        return [each.unembed(weights, each.apply(weights, tokens, positions)[0]) for each, weights in pairs]

    for logits in beside_and_merged(params, tokens, positions):
        np.testing.assert_allclose(logits, recorded["logits"], atol=1e-4)


merge = jax.jit(merge_lora, static_argnums=0)


@pytest.mark.parametrize(
    "lora", [DATA / "peft" / "by_jaxft", LoraSpec(2, 4.0, ("q_proj",), False)], ids=["read", "fresh"]
)
def test_adapters_are_committed_where_their_base_is(lora):
    """Otherwise the first update, whose results are committed, would have all programs compiled again."""
    _, params = jaxft.load_model(DATA / "hf" / BASES["by_jaxft"], lora=lora)
    assert {leaf.committed for leaf in jax.tree.leaves(params)} == {True}


@pytest.mark.parametrize("name", ["by_jaxft", "fused_by_jaxft"])
def test_saved_and_loaded_again(name, loaded, tmp_path):
    _, model, params = loaded(name)
    params = params | {"base": narrowed(params["base"], jnp.bfloat16)}
    save_adapter(tmp_path / "again", model, params)
    assert (tmp_path / "again" / WEIGHTS).read_bytes() == (DATA / "peft" / name / WEIGHTS).read_bytes()
    assert (tmp_path / "again" / WEIGHTS).stat().st_mode == (tmp_path / "again" / CONFIG).stat().st_mode
    assert load_lora_config(tmp_path / "again") == model.lora
    same = load_adapter(tmp_path / "again", model.config, params["base"])
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(same), params["adapter"])
    with pytest.raises(ModelFileError, match="exists and is not an empty folder"):
        save_adapter(tmp_path / "again", model, params)
    with pytest.raises(ModelFileError, match="no adapters to save"):
        save_adapter(tmp_path / "other", jaxft.load_model(DATA / "hf" / BASES[name])[0], params["base"])


def test_a_fused_adapter_of_peft_is_one_of_each_projection(loaded):
    _, model, params = loaded("fused_by_peft")
    assert model.lora.targets == (*(f"self_attn/{name}_proj" for name in "qkvo"), "mlp/gate_proj", "mlp/up_proj")
    attention = params["adapter"]["layers"]["self_attn"]
    assert np.array_equal(attention["q_proj"]["lora_a"], attention["v_proj"]["lora_a"])
    assert not np.array_equal(attention["k_proj"]["lora_b"], attention["v_proj"]["lora_b"])


def test_ranks_in_sum_are_only_those_of_fused_projections(tmp_path):
    folder = Path(shutil.copytree(DATA / "peft" / "fused_by_jaxft", tmp_path / "adapter"))
    (folder / MANIFEST).unlink()
    values = json.loads((folder / CONFIG).read_text())
    assert values["rank_pattern"] == {"gate_up_proj": 4, "qkv_proj": 4}
    (folder / CONFIG).write_text(json.dumps(values | {"rank_pattern": {"qkv_proj": 8}}))
    with pytest.raises(ModelFileError, match=r"rank_pattern is {'qkv_proj': 8}; only {.*'gate_up_proj': 4"):
        load_lora_config(folder)


def test_adapters_of_a_base_with_other_modalities(tmp_path):
    """The base on its own, which is exported with the adapters, is the text model, and so has the names of one."""
    base, spec = DATA / "hf" / "gemma3", LoraSpec(2, 4.0, ("q_proj", "mlp/*"))
    model, params = jaxft.load_model(base)
    params = {"base": narrowed(params, jnp.bfloat16), "adapter": random_params(model.config, spec)["adapter"]}
    model = decoder(model.config, lora=spec)
    for folder, place, prefix in (("beside", str(base), "language_model."), ("with", None, "")):
        save_adapter(tmp_path / folder, model, params, base=place)
        names = load_file(tmp_path / folder / WEIGHTS)
        assert {name.split("layers")[0] for name in names} == {f"base_model.model.model.{prefix}"}
        again = load_adapter(tmp_path / folder, model.config, params["base"])
        jax.tree.map(np.testing.assert_array_equal, jax.device_get(again), params["adapter"])
    targets = json.loads((tmp_path / "beside" / CONFIG).read_text())["target_modules"]
    assert re.fullmatch(targets, "model.language_model.layers.12.mlp.up_proj")
    assert not re.fullmatch(targets, "model.vision_tower.encoder.layers.0.self_attn.q_proj")


def test_adapters_know_the_keys_that_their_base_was_read_without(tmp_path):
    base = Path(shutil.copytree(DATA / "hf" / "llama", tmp_path / "base"))
    (base / MANIFEST).unlink(missing_ok=True)
    values = json.loads((base / "config.json").read_text())
    (base / "config.json").write_text(json.dumps(values | {"made_with": 2}))
    spec = LoraSpec(2, 4.0, ("q_proj",))
    model, params = jaxft.load_model(base, lora=spec, ignored_keys=["made_with"])
    save_adapter(tmp_path / "adapter", model, params, base=str(base))
    jaxft.save_model(tmp_path / "whole", jaxft.base_model(model), params["base"])
    with pytest.raises(ModelFileError, match="made_with = 2 is not known"):
        jaxft.load_model(base)
    assert jaxft.load_merged(tmp_path / "adapter")[0].config == model.config
    assert "made_with" not in json.loads((tmp_path / "whole" / "config.json").read_text())


def test_a_merged_base_is_another_base(loaded):
    """Merging changes only kernels."""
    _, model, params = loaded("by_jaxft")
    merged = narrowed(merge(model.lora, params), jnp.bfloat16)  # a fingerprint is the same in any dtype
    assert base_fingerprint(merged) != base_fingerprint(narrowed(params["base"], jnp.bfloat16))
    with pytest.raises(ModelFileError, match="an adapter of another base"):
        load_adapter(DATA / "peft" / "by_jaxft", model.config, merged)


def test_merged_in_full_and_rounded_once(loaded, adapter):
    _, model, params = loaded("by_jaxft")
    wanted = narrowed(merge(model.lora, params), jnp.bfloat16)
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(adapter[1]), wanted)


def test_leaves_are_merged_one_at_a_time(loaded, adapter, monkeypatch):
    params = loaded("by_jaxft")[2]
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(params))
    before, live, merged = live_bytes(), [], lora._merge_leaf

    def watched(*arguments):
        live.append(live_bytes() - before)
        return merged(*arguments)

    monkeypatch.setattr(lora, "_merge_leaf", watched)
    jaxft.load_merged(adapter[0], dtype=jnp.bfloat16)
    assert size >= live[0] > live[-1] > size / 4  # the base in float32, then what it became


def live_bytes():
    return sum(array.nbytes for array in jax.live_arrays())


def test_an_adapter_of_another_base():
    with pytest.raises(ModelFileError, match=f"an adapter of another base: its {ABOUT_BASE} does not fit"):
        load("by_jaxft", base="llama")
    with pytest.raises(ModelFileError, match=r"lora_[AB] of .* the base (asks for|has)"):
        load("by_peft", base="qwen3")


@pytest.fixture
def folder(tmp_path):
    """A copy of a folder that PEFT wrote, to be damaged."""
    return Path(shutil.copytree(DATA / "peft" / "by_peft", tmp_path / "adapter"))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"peft_type": "LOHA"}, "peft_type is 'LOHA'; wanted 'LORA'"),
        ({"use_dora": True}, "use_dora is True; only False is supported"),
        ({"bias": "all"}, "bias is 'all'; only 'none' is supported"),
        ({"modules_to_save": ["lm_head"]}, r"modules_to_save is \['lm_head'\]; only None"),
        ({"rank_pattern": {"q_proj": 2}}, r"rank_pattern is .*; only {} is supported"),
        ({"use_rslora": "no"}, "use_rslora is 'no'"),
        ({"kasa_config": {"beta": 1e-4}, "magic": 2}, "kasa_config is {.*magic is 2"),  # all that is not known, at once
        ({"r": 0}, "r is 0; wanted a whole number of at least 1"),
        ({"r": True}, "r is True; wanted a whole number"),
        ({"lora_alpha": "high"}, "lora_alpha is 'high'; wanted a number"),
        ({"r": 3}, r"lora_A of self_attn/q_proj in layer 0 is F32\[4, 32\]; the base asks for \[3, 32\]"),
    ],
)
def test_numbers_that_cannot_be(folder, changes, said):
    values = json.loads((folder / CONFIG).read_text())
    (folder / CONFIG).write_text(json.dumps(values | changes))
    model, base = jaxft.load_model(DATA / "hf" / "llama")
    with pytest.raises(ModelFileError, match=said):
        load_adapter(folder, model.config, base)


INITS = ["pissa", "pissa_niter_16", "olora", "OLoRA", "corda", "loftq", "lora_ga", "what comes next"]


@pytest.mark.parametrize("init", INITS)
def test_adapters_that_changed_their_base_are_refused(folder, init):
    """PEFT takes the start of such adapters from the base; added to the plain base they are another model."""
    values = json.loads((folder / CONFIG).read_text())
    (folder / CONFIG).write_text(json.dumps(values | {"init_lora_weights": init, f"{init}_config": {}}))
    with pytest.raises(ModelFileError, match=f"init_lora_weights is '{init}'.*path_initial_model_for_weight_conver"):
        load_lora_config(folder)


@pytest.mark.parametrize("init", [True, False, None, "gaussian", "eva", "orthogonal", "mica"])
def test_adapters_that_leave_their_base_are_read(folder, init):
    about = {"eva_config": {"rho": 1.0}, "task_type": None, "auto_mapping": {"base_model_class": "LlamaForCausalLM"}}
    values = json.loads((folder / CONFIG).read_text())
    (folder / CONFIG).write_text(json.dumps(values | about | {"init_lora_weights": init}))
    assert load_lora_config(folder) == load_lora_config(DATA / "peft" / "by_peft")


def test_keys_are_refused_by_name_before_their_tensors(folder):
    """Adapters with DoRA have a tensor more."""
    values, tensors = json.loads((folder / CONFIG).read_text()), load_file(folder / WEIGHTS)
    (folder / CONFIG).write_text(json.dumps(values | {"use_dora": True}))
    name = "base_model.model.model.layers.0.self_attn.q_proj.lora_magnitude_vector"
    save_file(tensors | {name: np.ones(32, np.float32)}, folder / WEIGHTS)
    with pytest.raises(ModelFileError, match="use_dora is True"):
        load_lora_config(folder)


def test_tensors_that_cannot_be(folder):
    model, base = jaxft.load_model(DATA / "hf" / "llama")
    tensors = load_file(folder / WEIGHTS)
    name = next(name for name in tensors if "layers.1.self_attn.q_proj.lora_A" in name)
    save_file({key: value for key, value in tensors.items() if key != name}, folder / WEIGHTS)
    with pytest.raises(
        ModelFileError, match=r"lora_A of self_attn/q_proj is there for layers \[0, 2\]; the base has 3"
    ):
        load_adapter(folder, model.config, base)
    save_file(tensors | {"base_model.model.lm_head.lora_A.weight": np.zeros((4, 64), np.float32)}, folder / WEIGHTS)
    with pytest.raises(ModelFileError, match=r"tensor 'base_model.model.lm_head.lora_A.weight' is no adapter of"):
        load_adapter(folder, model.config, base)
    save_file(tensors | {name.replace("q_proj", "router"): tensors[name]}, folder / WEIGHTS)
    with pytest.raises(ModelFileError, match=r"router.lora_A.weight' is no adapter of"):
        load_adapter(folder, model.config, base)
    (folder / WEIGHTS).unlink()
    with pytest.raises(ModelFileError, match=f"holds no {WEIGHTS}"):
        load_adapter(folder, model.config, base)


def test_damage_is_found(tmp_path):
    folder = Path(shutil.copytree(DATA / "peft" / "by_jaxft", tmp_path / "adapter"))
    (folder / "logits.json").unlink()
    content = bytearray((folder / WEIGHTS).read_bytes())
    content[-9] ^= 1
    (folder / WEIGHTS).write_bytes(content)
    assert (folder / MANIFEST).exists()
    model, base = jaxft.load_model(DATA / "hf" / "qwen2")
    with pytest.raises(ModelFileError, match=f"{WEIGHTS}: other content"):
        load_adapter(folder, model.config, base)
