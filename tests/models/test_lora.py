"""Adapters: fresh ones change nothing, only they are trained, and merged kernels give the same logits."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxft
from jaxft.core.cache import init_cache
from jaxft.core.partition import trainable
from jaxft.models.config import PROJECTIONS, LoraSpec, model_preset
from jaxft.models.decoder import decoder
from jaxft.models.load import base_model, init_adapter
from jaxft.models.lora import merge_lora

CONFIG = model_preset("qwen3-50k")
LORA = LoraSpec(4, 8.0)
MODEL, PLAIN = decoder(CONFIG, lora=LORA), decoder(CONFIG)
TOKENS = jax.random.randint(jax.random.key(9), (4, 16), 0, CONFIG.vocab_size)
POSITIONS = jnp.broadcast_to(jnp.arange(16), TOKENS.shape)
BATCH = jaxft.Batch(TOKENS, POSITIONS >= 8, jnp.array([1, -1, 0.5, -2]))


@jax.jit
def fresh():
    return MODEL.init(jax.random.key(0))


@pytest.fixture
def params():
    return fresh()


def test_adapters_are_drawn_beside_the_base_that_the_key_gives_without_them():
    key = jax.random.key(3)
    model, params = jaxft.init_model(CONFIG, key, lora=LORA, dtype=jnp.bfloat16)
    plain, base = jaxft.init_model(CONFIG, key, dtype=jnp.bfloat16)
    assert model is MODEL and base_model(model) is plain
    jax.tree.map(np.testing.assert_array_equal, params["base"], base)
    again = init_adapter(model, jax.random.fold_in(key, 4))
    jax.tree.map(np.testing.assert_array_equal, params["adapter"], again)
    assert {leaf.dtype for leaf in jax.tree.leaves(params["adapter"])} == {jnp.dtype("float32")}


def filled(params):
    """The same parameters with adapters that change the logits a lot."""
    leaves, structure = jax.tree.flatten(params["adapter"])
    keys = jax.random.split(jax.random.key(1), len(leaves))
    noisy = [leaf + 0.1 * jax.random.normal(key, leaf.shape) for key, leaf in zip(keys, leaves, strict=True)]
    return {**params, "adapter": jax.tree.unflatten(structure, noisy)}


def logits(model, params):
    return jax.jit(lambda p: model.unembed(p, model.apply(p, TOKENS, POSITIONS)[0]))(params)


def test_fresh_adapters_change_nothing(params):
    np.testing.assert_array_equal(logits(MODEL, params), logits(PLAIN, params["base"]))
    same = init_adapter(MODEL, jax.random.key(0))
    jax.tree.map(np.testing.assert_array_equal, same, params["adapter"])


def test_merged_and_beside_are_the_same(params):
    params = filled(params)
    beside, merged = logits(MODEL, params), logits(PLAIN, merge_lora(LORA, params))
    assert jnp.abs(beside - logits(PLAIN, params["base"])).max() > 0.1
    np.testing.assert_allclose(merged, beside, atol=1e-5)


def test_a_layer_by_hand(params):
    """`x (W + alpha / r A B)`, in numpy."""
    params = filled(params)
    kernel = np.asarray(params["base"]["layers"]["mlp"]["up_proj"]["kernel"][1], np.float64)
    a, b = (np.asarray(params["adapter"]["layers"]["mlp"]["up_proj"][f"lora_{k}"][1], np.float64) for k in "ab")
    merged = merge_lora(LORA, params)["layers"]["mlp"]["up_proj"]["kernel"][1]
    np.testing.assert_allclose(merged, kernel + 8.0 / 4 * a @ b, atol=1e-6)


@pytest.mark.parametrize("microbatch_rows", [None, 2])
def test_an_update_moves_adapters_alone(params, microbatch_rows):
    optimizer = optax.adamw(1e-2, weight_decay=0.1)
    params = filled(params)
    before = jax.device_get(params)
    state = jaxft.init_train_state(params, optimizer, MODEL)
    update = jaxft.make_update(MODEL, jaxft.grpo_loss, optimizer, microbatch_rows=microbatch_rows)
    state, metrics = update(state, BATCH)
    assert metrics["applied_updates"] == 1
    jax.tree.map(np.testing.assert_array_equal, before["base"], state.params["base"])
    moved = jax.tree.map(lambda a, b: float(np.abs(a - b).min()), before["adapter"], state.params["adapter"])
    assert min(jax.tree.leaves(moved)) > 0, "every number of every adapter has a gradient"


def test_gradients_are_those_of_the_merged_kernels(params):
    """By the chain rule: `dA = scale x dW B'`, `dB = scale A' dW`, dW the gradient of the whole model's kernel."""
    params = filled(params)

    def loss(model):
        return lambda p: jaxft.grpo_loss(model, p, BATCH, jaxft.count_tokens(BATCH.completion_mask))[0]

    whole = jax.jit(jax.grad(loss(PLAIN)))(merge_lora(LORA, params))
    found = jax.jit(jax.grad(lambda adapter: loss(MODEL)({**params, "adapter": adapter})))(params["adapter"])
    for path in PROJECTIONS:
        group, name = path.split("/")
        dw = np.asarray(whole["layers"][group][name]["kernel"], np.float64)
        adapter = params["adapter"]["layers"][group][name]
        a, b = (np.asarray(adapter[f"lora_{k}"], np.float64) for k in "ab")
        for kind, wanted in (("lora_a", 2 * dw @ b.swapaxes(1, 2)), ("lora_b", 2 * a.swapaxes(1, 2) @ dw)):
            np.testing.assert_allclose(
                found["layers"][group][name][kind], wanted, atol=2e-5 * np.abs(wanted).max(), err_msg=path
            )


def test_the_base_has_no_optimiser_state(params):
    state = jaxft.init_train_state(params, optax.adamw(1e-3), MODEL)
    adapters = sum(leaf.size for leaf in jax.tree.leaves(params["adapter"]))
    assert sum(leaf.size for leaf in jax.tree.leaves(state.opt_state)) == 2 * adapters + 1
    assert jax.tree.structure(trainable(MODEL, params)["adapter"]) == jax.tree.structure(params["adapter"])
    assert jax.tree.leaves(trainable(MODEL, params)["base"]) == []


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_sampler_and_trainer_agree(params, dtype):
    model = decoder(CONFIG, lora=LORA, compute_dtype=dtype)
    params = filled(params)
    rollout = jaxft.generate(model, params, [[5, 6, 7], [9]], jax.random.key(2), num_generations=2, max_new_tokens=12)
    scored = jaxft.token_logprobs(model, params, rollout.tokens)
    difference = np.abs(np.where(rollout.completion_mask, scored.logprobs - rollout.sampler_logprobs, 0))
    assert difference.max() <= (1e-5 if dtype == "float32" else 0.3)
    assert difference.mean() <= (1e-5 if dtype == "float32" else 0.02)


def test_a_narrow_base_keeps_what_small_adapters_say(params):
    """Merging in bfloat16 rounds changes of up to half a step of the base away."""
    base = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), params["base"])
    small = {"base": base, "adapter": jax.tree.map(lambda leaf: leaf + 1e-3, params["adapter"])}
    merged = merge_lora(LORA, small)["layers"]["mlp"]["up_proj"]["kernel"]
    assert (merged == base["layers"]["mlp"]["up_proj"]["kernel"]).mean() > 0.5
    decoded = jax.jit(MODEL.decode_layout)(small)["decoding_layers"][1]["mlp"]["gate_up_proj"]
    assert decoded["lora_a"].dtype == jnp.bfloat16 and decoded["kernel"].shape == (2 * 96, 32)
    rollout = jaxft.generate(MODEL, small, [[5, 6, 7], [9]], jax.random.key(2), num_generations=2, max_new_tokens=12)
    scored = jaxft.token_logprobs(MODEL, small, rollout.tokens)
    assert np.abs(np.where(rollout.completion_mask, scored.logprobs - rollout.sampler_logprobs, 0)).mean() < 0.02


def test_a_cache_takes_parameters_that_were_not_laid_out(params):
    cache, tables = init_cache(MODEL, *TOKENS.shape, jnp.float32)

    def through_pages(params):
        return MODEL.unembed(params, MODEL.apply(params, TOKENS, POSITIONS, cache=cache, tables=tables)[0])

    np.testing.assert_allclose(jax.jit(through_pages)(filled(params)), logits(MODEL, filled(params)), rtol=0, atol=1e-5)


def test_what_cannot_be_an_adapter():
    with pytest.raises(ValueError, match="rank is 0; wanted at least 1"):
        LoraSpec(0, 8.0)
    with pytest.raises(ValueError, match="target 'k_prj' matches no projection; there are self_attn/q_proj"):
        LoraSpec(8, 8.0, ("q_proj", "k_prj"))
    with pytest.raises(ValueError, match="target '' matches no projection"):
        LoraSpec(8, 8.0, ())
    with pytest.raises(ValueError, match="alpha is nan"):
        LoraSpec(8, float("nan"))
