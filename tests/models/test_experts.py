"""Mixtures of experts: routers, the sum of experts, chosen experts in place of the router's, and adapters of experts.

The families are compared with transformers in `test_families.py`.
"""

import os
import subprocess
import sys
from dataclasses import replace
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh

from jaxft.core.cache import compute_dtype, init_cache
from jaxft.core.objectives import router_metrics
from jaxft.core.reductions import count_tokens
from jaxft.models.config import LayerKind, LoraSpec, model_preset
from jaxft.models.decoder import decoder
from jaxft.models.decoder_sharding import sharding_for
from jaxft.models.experts import Routing, route, router_scores
from jaxft.models.load import init_model
from jaxft.rollout.weights import copy_trained
from tests.models.weights import random_params

TINY = replace(
    model_preset("qwen3-50k"),
    vocab_size=40,
    num_layers=3,
    pattern=(LayerKind(has_experts=True), LayerKind(), LayerKind(window=3, has_experts=True)),
    num_experts=5,
    num_experts_per_tok=2,
    moe_intermediate_size=12,
    router="sigmoid",
    norm_topk_prob=True,
    routed_scaling_factor=1.5,
    selection_bias=True,
    expert_bias=True,
    num_shared_experts=1,
    shared_expert_gate=True,
)
"""Two of three layers are mixtures, which have all that a mixture may have."""

LORA = LoraSpec(2, 3.0)
TOKENS = np.random.default_rng(0).integers(0, 40, (2, 9)).astype(np.int32)
PLACES = np.tile(np.arange(9, dtype=np.int32), (2, 1))


def test_routers_choose_and_weigh_experts():
    draw = np.random.default_rng(1)
    logits, bias = draw.normal(size=(7, 5)).astype(np.float32), 3 * draw.normal(size=5).astype(np.float32)
    given = np.stack([draw.permutation(5)[:2] for _ in range(7)])
    kinds = {
        (router, norm): replace(TINY, router=router, norm_topk_prob=norm)
        for router in ("softmax", "topk_softmax", "sigmoid")
        for norm in (False, True)
    }

    @jax.jit
    def all_kinds(logits, bias, given):
        return {
            kind: [route(logits, config), route(logits, config, None, bias), route(logits, config, given)]
            for kind, config in kinds.items()
        }

    def wanted(kind, chosen, bias):
        router, norm = kind
        scores = {"softmax": np.exp(logits) / np.exp(logits).sum(-1, keepdims=True), "topk_softmax": logits}
        scores = scores.get(router, 1 / (1 + np.exp(-logits)))
        chosen = np.argsort(-(scores + bias), axis=-1)[:, :2] if chosen is None else chosen
        weights = np.take_along_axis(scores, chosen, -1)
        weights = np.exp(weights) if router == "topk_softmax" else weights
        return chosen, 1.5 * (weights / weights.sum(-1, keepdims=True) if norm or router == "topk_softmax" else weights)

    for kind, found in all_kinds(logits, bias, given).items():
        for (experts, weights), of_kind in zip(found, [(None, 0), (None, bias), (given, 0)], strict=True):
            chosen, by = wanted(kind, *of_kind)
            np.testing.assert_array_equal(experts, chosen)
            np.testing.assert_allclose(weights, by, rtol=1e-6)


BALANCE = 2.033337116241455
LOGITS = [
    [[[-8, -13, -2], [4, 11, 1], [-6, -8, 7], [16, 3, -12]], [[-10, 16, 2], [-17, -1, -12], [-6, -5, -7], [6, -1, -6]]],
    [
        [[4, 8, -16], [-3, -10, -2], [-13, 0, 0], [-3, -10, -4]],
        [[-11, -14, 2], [-11, 12, 7], [-20, 3, -11], [0, 0, -20]],
    ],
]
GRADIENT = [
    [-0.0061978, 0.0015478, 0.00465],
    [-0.0058621, 0.0042856, 0.0015766],
    [-0.0044704, 0.0008155, 0.0036549],
    [-0.0034273, 0.0025714, 0.0008559],
    [-0.0066555, 0.0036594, 0.0029961],
    [-0.0070726, 0.0064843, 0.0005882],
    [-0.0070988, 0.0022008, 0.004898],
    [-0.0031663, 0.0015831, 0.0015831],
    [-0.0016587, 0.0010325, 0.0006262],
    [-0.0020669, 0.0016581, 0.0004089],
]
"""transformers' `load_balancing_loss_func` of these logits, times 10, and its gradient for the tokens of the mask."""


def test_the_balance_of_routers_is_that_of_transformers_however_tokens_are_split():
    config = replace(TINY, router="softmax", num_experts=3)
    logits, mask = np.float32(LOGITS) / 10, np.array([[1, 1, 1, 0], [0, 1, 1, 0]], bool)
    chosen = np.argsort(-logits, axis=-1, kind="stable")[..., :2]
    recorded = np.moveaxis(chosen, 0, 2).astype(np.uint8) + 1  # [B T L k]

    def metrics(logits, rows):
        counted = count_tokens(jnp.asarray(mask), experts=jnp.asarray(recorded), num_experts=3)
        routing = [Routing(logits[layer], jnp.asarray(chosen[layer]), jnp.asarray(chosen[layer])) for layer in (0, 1)]
        found = [router_scores(Routing(*(x[rows] for x in each)), config, jnp.asarray(mask[rows])) for each in routing]
        return router_metrics(jax.tree.map(lambda *each: jnp.stack(each), *found), counted)

    @jax.jit
    def results(logits):
        value, gradient = jax.value_and_grad(lambda x: metrics(x, slice(None))["router_balance"])(logits)
        return value, gradient, metrics(logits, slice(0, 1)), metrics(logits, slice(1, 2)), metrics(logits, slice(None))

    value, gradient, first, second, both = jax.device_get(results(logits))
    np.testing.assert_allclose(value, BALANCE, rtol=1e-6)
    np.testing.assert_allclose(gradient[:, mask].reshape(-1, 3), GRADIENT, rtol=0, atol=1e-7)
    assert not gradient[:, ~mask].any() and both["rerouted_fraction"] == 0
    loads = [np.bincount(each[mask].ravel(), minlength=3) for each in chosen]
    np.testing.assert_allclose(
        both["expert_imbalance"], np.mean([load.max() / load.mean() for load in loads]), rtol=1e-6
    )
    for name in both:
        np.testing.assert_allclose(first[name] + second[name], both[name], rtol=1e-6)


def test_the_bias_of_the_choice_keeps_32_bits_in_any_dtype():
    """Files have biases of some 8, and an update moves them by 0.001: bfloat16 has nothing between 8 and 8.0625."""
    order = np.array([3, 1, 4, 0, 2])
    mlp = {"router": {"kernel": np.zeros((2, 32, 5))}, "selection_bias": np.tile(8 - 0.001 * np.argsort(order), (2, 1))}
    params = random_params(TINY)
    params["layers"]["mlp"] |= jax.tree.map(np.float32, mlp)
    model = decoder(TINY, compute_dtype=jnp.bfloat16)
    given = jnp.asarray(TOKENS), jnp.asarray(PLACES)
    routing = jax.jit(lambda params: model.apply(params, *given, returns_routing=True)[2])(params)
    np.testing.assert_array_equal(routing.experts, np.broadcast_to(order[:2], routing.experts.shape))

    def shapes():
        _, params = init_model(TINY, jax.random.key(0), dtype=jnp.bfloat16, compute_dtype=jnp.bfloat16)
        return params, model.decode_layout(params), copy_trained(model, "bfloat16", params)

    for each in jax.eval_shape(shapes):
        dtypes = {path[-1]: leaf.dtype for path, leaf in jax.tree_util.tree_leaves_with_path(each)}
        assert dtypes.pop(jax.tree_util.DictKey("selection_bias")) == jnp.float32
        assert {*dtypes.values()} == {jnp.dtype(jnp.bfloat16)} and compute_dtype(each) == jnp.bfloat16


@cache
def forward():
    """Outputs of the model with adapters for its own choice of experts, for that choice given, and for another one."""
    model, params = decoder(TINY, lora=LORA), random_params(TINY, LORA)
    other = np.random.default_rng(2).permuted(np.broadcast_to(np.arange(5), (2, 2, 9, 5)), axis=-1)[..., :2]

    @jax.jit
    def passes(params, other):
        def logits(params, chosen):
            hidden, _, routing = model.apply(
                params, jnp.asarray(TOKENS), jnp.asarray(PLACES), chosen=chosen, returns_routing=True
            )
            return model.unembed(params, hidden), routing

        plain, routing = logits(params, None)
        gradient = jax.grad(lambda params: (logits(params, None)[0] ** 2).sum())(params)
        return plain, routing, logits(params, routing.experts + 1), logits(params, other + 1), gradient

    return params, other, jax.device_get(passes(params, other))


def test_experts_that_are_given_take_the_place_of_those_chosen():
    _, other, (plain, routing, again, others, _) = forward()
    assert routing.experts.shape == (2, 2, 9, 2) and routing.logits.shape == (2, 2, 9, 5)
    np.testing.assert_array_equal(again[0], plain)
    np.testing.assert_array_equal(others[1].experts, other)
    assert np.abs(others[0] - plain).max() > 0.1


def test_every_parameter_of_a_mixture_is_trained_but_the_bias_of_the_choice():
    params, _, (*_, gradient) = forward()
    for path, leaf in jax.tree_util.tree_leaves_with_path(gradient):
        name = jax.tree_util.keystr(path)
        assert np.isfinite(leaf).all() and leaf.any() == ("selection_bias" not in name), name
    experts = params["adapter"]["layers"]["mlp"]["experts"]["down_proj"]
    assert experts["lora_a"].shape == (2, 5, 12, 2) and experts["lora_b"].shape == (2, 5, 2, 32)


@partial(jax.jit, static_argnums=0)
def paged(model, params, tokens):
    layout = model.decode_layout(params)
    cache, tables = init_cache(model, 2, 9, jnp.float32)
    hidden, _, routing = model.apply(layout, tokens, jnp.asarray(PLACES), cache, tables, returns_routing=True)
    return model.unembed(layout, hidden), routing.experts


def test_decoding_with_merged_adapters_computes_and_chooses_the_same():
    params, _, (plain, routing, *_) = forward()
    logits, experts = paged(decoder(TINY, lora=LORA), params, TOKENS)
    np.testing.assert_allclose(logits, plain, rtol=0, atol=1e-5 * np.abs(plain).max())
    np.testing.assert_array_equal(experts, routing.experts)


def test_more_experts_a_token_than_there_are():
    with pytest.raises(ValueError, match=r"num_experts_per_tok is 6; wanted 1 to 5"):
        replace(TINY, num_experts_per_tok=6)


ON_A_MESH = """
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxft.core.cache import init_cache
from jaxft.core.objectives import grpo_loss
from jaxft.core.sharding import make_mesh
from jaxft.core.types import Batch
from jaxft.core.update import init_train_state, make_update
from jaxft.models.decoder import decoder
from jaxft.models.decoder_sharding import sharding_for
from tests.models.test_experts import LORA, TINY
from tests.models.weights import random_params

config = replace(TINY, num_experts=8, num_kv_heads=2, vocab_size=48)
tokens = np.random.default_rng(0).integers(0, 48, (8, 16)).astype(np.int32)
segments = np.where(np.arange(16) < 13, 1 + (np.arange(16) > 6), 0) * np.ones((8, 1), np.int32)
places, params = np.tile(np.arange(16, dtype=np.int32), (8, 1)), random_params(config, LORA)

def results(sharding):
    model, narrow = (decoder(config, lora=LORA, sampling_dtype=kind, sharding=sharding) for kind in (None, "int8"))

    def loss(params):
        hidden, _ = model.apply(params, tokens, places, segment_ids=segments)
        logits = model.unembed(params, hidden)
        return (jax.nn.log_softmax(logits)[..., 0] * (segments > 0)).sum(), logits[segments > 0]

    def decoded(params, model):
        layout = model.decode_layout(params)
        hidden, _ = model.apply(layout, tokens, places, *init_cache(model, 8, 16, jnp.float32))
        return model.unembed(layout, hidden)

    given = params if sharding is None else sharding.place(params)
    samplers = [jax.jit(decoded, static_argnums=1)(given, each) for each in (model, narrow)]
    found = jax.jit(jax.value_and_grad(loss, has_aux=True))(given), samplers, balanced(sharding)
    return jax.device_get(found)

def balanced(sharding):
    model, sgd = decoder(config, sharding=sharding), optax.sgd(1.0)
    loss = partial(grpo_loss, router_aux_loss_coef=0.5)
    update = make_update(model, loss, sgd, router_bias_update_rate=0.125)
    given = jax.tree.map(jnp.array, random_params(config))
    state = init_train_state(given if sharding is None else sharding.place(given), sgd, model)
    chosen = np.argsort(np.random.default_rng(1).random((8, 16, 2, 8)))[..., :2] + 1
    batch = Batch(tokens, segments > 0, np.ones((8, 16), np.float32), positions=places, segment_ids=segments)
    state, metrics = update(state, batch._replace(experts=chosen.astype(np.uint8)))
    return state.params, metrics["router_balance"], metrics["expert_imbalance"]

alone = results(None)
for sizes in [(1, 2, 2, 2), (1, 2, 1, 4), (2, 2, 2, 1)]:
    spread = results(sharding_for(config, make_mesh(*sizes[:3], expert=sizes[3])))
    for (path, one), other in zip(jax.tree_util.tree_leaves_with_path(alone), jax.tree.leaves(spread), strict=True):
        off = np.abs(other - one).max() / max(np.abs(one).max(), 1e-30)
        assert off <= 1e-5, (sizes, jax.tree_util.keystr(path), off)
"""


@pytest.mark.slow
def test_on_a_mesh_values_and_gradients_are_those_of_one_device():
    """Experts in 2 parts, 4 and one, with `fsdp` and `tensor`: adapters, biases, balance, decoding also in int8."""
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8"
    subprocess.run([sys.executable, "-c", ON_A_MESH], env=os.environ | {"XLA_FLAGS": flags}, check=True)


def test_experts_that_do_not_divide():
    mesh = AbstractMesh((1, 1, 4, 1), ("data", "fsdp", "expert", "tensor"))
    with pytest.raises(ValueError, match=r"num_experts is 5, .* the 4 devices of mesh axis 'expert'; .* of 5 there"):
        sharding_for(TINY, mesh)
    with pytest.raises(ValueError, match=r"num_experts is 0, .* wanted 1 there, as this model is no mixture"):
        sharding_for(model_preset("qwen3-50k"), mesh)
