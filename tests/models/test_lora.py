"""Adapters: fresh ones change nothing, only they are trained, and merged kernels give the same logits."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxft
from jaxft.core.cache import compute_dtype, init_cache
from jaxft.core.partition import trainable
from jaxft.models.config import PROJECTIONS, LoraSpec, model_preset
from jaxft.models.decoder import decoder
from jaxft.models.load import base_model, init_adapter
from jaxft.models.lora import merge_lora
from tests.models.weights import narrowed, random_params

CONFIG = model_preset("qwen3-50k")
LORA = LoraSpec(4, 8.0)
MODEL, PLAIN = decoder(CONFIG, lora=LORA), decoder(CONFIG)
PARAMS = random_params(CONFIG, LORA)
"""Adapters that change the logits a lot."""
TOKENS = np.random.default_rng(9).integers(0, CONFIG.vocab_size, (4, 16), np.int32)
POSITIONS = np.tile(np.arange(16, dtype=np.int32), (4, 1))
BATCH = jaxft.Batch(TOKENS, POSITIONS >= 8, np.array([1, -1, 0.5, -2], np.float32))


def logits(model, params):
    return model.unembed(params, model.apply(params, jnp.asarray(TOKENS), jnp.asarray(POSITIONS))[0])


def through_pages(params):
    """Logits with parameters that are not laid out for decoding."""
    cache, tables = init_cache(MODEL, *TOKENS.shape, compute_dtype(params["base"]))
    tokens, positions = jnp.asarray(TOKENS), jnp.asarray(POSITIONS)
    return MODEL.unembed(params, MODEL.apply(params, tokens, positions, cache=cache, tables=tables)[0])


@pytest.fixture(scope="module")
def computed():
    """Logits and merged kernels of one set of parameters, by one program."""

    @jax.jit
    def compute(params):
        merged = merge_lora(LORA, params)
        fresh = jax.tree_util.tree_map_with_path(
            lambda path, leaf: leaf * (path[-1].key != "lora_b"), params["adapter"]
        )
        return {
            "beside": logits(MODEL, params),
            "plain": logits(PLAIN, params["base"]),
            "merged": logits(PLAIN, merged),
            "fresh": logits(MODEL, {**params, "adapter": fresh}),
            "paged": through_pages(params),
            "up_proj": merged["layers"]["mlp"]["up_proj"]["kernel"],
        }

    return jax.device_get(compute(PARAMS))


def test_adapters_are_drawn_beside_the_base_that_the_key_gives_without_them():
    key = jax.random.wrap_key_data(np.array([0, 3], np.uint32))
    model, params = jaxft.init_model(CONFIG, key, lora=LORA, dtype=jnp.bfloat16)
    plain, base = jaxft.init_model(CONFIG, key, dtype=jnp.bfloat16)
    assert model is MODEL and base_model(model) is plain
    jax.tree.map(np.testing.assert_array_equal, params["base"], base)
    again = init_adapter(model, jax.random.fold_in(key, 4))
    jax.tree.map(np.testing.assert_array_equal, params["adapter"], again)
    drawn = {path[-1].key: leaf for path, leaf in jax.tree_util.tree_leaves_with_path(params["adapter"])}
    assert {leaf.dtype for leaf in drawn.values()} == {jnp.dtype("float32")}
    assert np.asarray(drawn["lora_a"]).all() and not np.asarray(drawn["lora_b"]).any()  # fresh ones change nothing


def test_fresh_adapters_change_nothing(computed):
    np.testing.assert_array_equal(computed["fresh"], computed["plain"])


def test_merged_and_beside_are_the_same(computed):
    assert np.abs(computed["beside"] - computed["plain"]).max() > 0.1
    np.testing.assert_allclose(computed["merged"], computed["beside"], atol=1e-5)


def test_a_cache_takes_parameters_that_were_not_laid_out(computed):
    np.testing.assert_allclose(computed["paged"], computed["beside"], rtol=0, atol=1e-5)


def test_a_layer_by_hand(computed):
    """`x (W + alpha / r A B)`, in numpy."""
    kernel = PARAMS["base"]["layers"]["mlp"]["up_proj"]["kernel"][1].astype(np.float64)
    a, b = (PARAMS["adapter"]["layers"]["mlp"]["up_proj"][f"lora_{k}"][1].astype(np.float64) for k in "ab")
    np.testing.assert_allclose(computed["up_proj"][1], kernel + 8.0 / 4 * a @ b, atol=1e-6)


@pytest.fixture(scope="module", params=[pytest.param(None, marks=pytest.mark.slow), 2])
def updated(request):
    optimizer = optax.adamw(1e-2, weight_decay=0.1)
    state = jaxft.init_train_state(jax.device_put(PARAMS, jax.devices()[0]), optimizer, MODEL)
    size = sum(leaf.size for leaf in jax.tree.leaves(state.opt_state))
    update = jaxft.make_update(MODEL, jaxft.grpo_loss, optimizer, microbatch_rows=request.param)
    state, metrics = update(state, BATCH)
    return size, jax.device_get(state.params), metrics


def test_an_update_moves_adapters_alone(updated):
    size, params, metrics = updated
    assert metrics["applied_updates"] == 1
    jax.tree.map(np.testing.assert_array_equal, PARAMS["base"], params["base"])
    moved = jax.tree.map(lambda a, b: float(np.abs(a - b).min()), PARAMS["adapter"], params["adapter"])
    assert min(jax.tree.leaves(moved)) > 0, "every number of every adapter has a gradient"
    # The base has no optimizer state.
    assert size == 2 * sum(leaf.size for leaf in jax.tree.leaves(PARAMS["adapter"])) + 1


def test_only_adapters_are_trainable():
    assert jax.tree.structure(trainable(MODEL, PARAMS)["adapter"]) == jax.tree.structure(PARAMS["adapter"])
    assert jax.tree.leaves(trainable(MODEL, PARAMS)["base"]) == []


def test_gradients_are_those_of_the_merged_kernels():
    """By the chain rule: `dA = scale x dW B'`, `dB = scale A' dW`, dW the gradient of the whole model's kernel."""

    def loss(model, params):
        batch = jax.tree.map(jnp.asarray, BATCH)
        return jaxft.grpo_loss(model, params, batch, jaxft.count_tokens(batch.completion_mask))[0]

    @jax.jit
    def gradients(params):
        adapted = jax.grad(lambda adapter: loss(MODEL, {**params, "adapter": adapter}))(params["adapter"])
        return jax.grad(lambda merged: loss(PLAIN, merged))(merge_lora(LORA, params)), adapted

    whole, found = gradients(PARAMS)
    for path in (path for path in PROJECTIONS if path.count("/") == 1):  # those outside of experts
        group, name = path.split("/")
        dw = np.asarray(whole["layers"][group][name]["kernel"], np.float64)
        adapter = PARAMS["adapter"]["layers"][group][name]
        a, b = (np.asarray(adapter[f"lora_{k}"], np.float64) for k in "ab")
        for kind, wanted in (("lora_a", 2 * dw @ b.swapaxes(1, 2)), ("lora_b", 2 * a.swapaxes(1, 2) @ dw)):
            np.testing.assert_allclose(
                found["layers"][group][name][kind], wanted, atol=2e-5 * np.abs(wanted).max(), err_msg=path
            )


def test_a_narrow_base_keeps_what_small_adapters_say():
    """Merging in bfloat16 rounds changes of up to half a step of the base away; beside it, they change the logits."""
    tiny = jax.tree.map(lambda leaf: (1e-2 * leaf).astype(np.float32), PARAMS["adapter"])
    small = {"base": narrowed(PARAMS["base"], jnp.bfloat16), "adapter": tiny}

    @jax.jit
    def compute(params):
        merged = merge_lora(LORA, params)["layers"]["mlp"]["up_proj"]["kernel"]
        joined = MODEL.decode_layout(params)["decoding_layers"][1]["mlp"]["gate_up_proj"]
        return merged, joined, jax.nn.log_softmax(logits(MODEL, params)), jax.nn.log_softmax(through_pages(params))

    merged, joined, trained, sampled = map(jax.device_get, compute(small))
    assert (merged == small["base"]["layers"]["mlp"]["up_proj"]["kernel"]).mean() > 0.5
    assert joined["lora_a"].dtype == jnp.bfloat16 and joined["kernel"].shape == (2 * 96, 32)
    chosen = TOKENS[:, 1:, None]
    trained, sampled = (np.take_along_axis(each[:, :-1], chosen, axis=-1) for each in (trained, sampled))
    assert np.abs(trained - sampled).mean() < 0.02


def test_what_cannot_be_an_adapter():
    with pytest.raises(ValueError, match="rank is 0; wanted at least 1"):
        LoraSpec(0, 8.0)
    with pytest.raises(ValueError, match="target 'k_prj' matches no projection; there are self_attn/q_proj"):
        LoraSpec(8, 8.0, ("q_proj", "k_prj"))
    with pytest.raises(ValueError, match="target '' matches no projection"):
        LoraSpec(8, 8.0, ())
    with pytest.raises(ValueError, match="alpha is nan"):
        LoraSpec(8, float("nan"))
