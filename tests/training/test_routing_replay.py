"""Routing replay: what a mixture's sampler chose reaches scores and updates, however the tokens came to their pages."""

import asyncio
from dataclasses import replace

import jax
import numpy as np
import pytest

import jaxft.training.batch as batch_module
from jaxft.harness.data_models import Trajectory
from jaxft.models.config import LoraSpec, model_preset
from jaxft.models.decoder import decoder
from jaxft.models.load import init_model
from jaxft.rollout.calls import Call, Prompt, Reply, decode_experts
from jaxft.rollout.requests import Request
from jaxft.rollout.sequences import token_sequences
from jaxft.training.advantages import collect_rewards
from jaxft.training.batch import BatchPlanner, Row, make_batch, score_tokens
from jaxft.training.config import LossConfig
from jaxft.training.learner import Learner
from jaxft.training.optimizer_config import OptimizerConfig
from jaxft.training.update import scored

TIE = 1e-7
"""Difference of the router's logits for two experts, in units of the hidden state."""


@pytest.fixture(scope="module")
def mixture():
    """A dense layer before two with experts, whose routers cannot tell two experts apart; and what its twin prefers."""
    shape = model_preset("qwen3-50k")
    dense, experts = shape.kinds[0], shape.kinds[0]._replace(has_experts=True)
    sizes = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": True}
    model, params = init_model(
        replace(shape, num_layers=3, pattern=(dense, experts, experts), **sizes), jax.random.key(3)
    )
    params = jax.tree.map(np.array, params)
    kernel = params["layers"]["mlp"]["router"]["kernel"]
    turned = kernel.copy()
    kernel[..., 1], turned[..., 1] = kernel[..., 0] * (1 + TIE), kernel[..., 0] * (1 - TIE)
    kernel[..., 3], turned[..., 3] = kernel[..., 2] * (1 + TIE), kernel[..., 2] * (1 - TIE)
    router = {**params["layers"]["mlp"]["router"], "kernel": turned}
    layers = {**params["layers"], "mlp": {**params["layers"]["mlp"], "router": router}}
    return model, params, {**params, "layers": layers}


@pytest.fixture(scope="module")
def requests():
    """Three groups of three answers to prompts that fill a page and a half, half a page, and less."""
    return [
        Request(
            prompt_ids=tuple((7 * group + 13 * place) % 200 + 6 for place in range(length)),
            key_ids=(0, 0, 1, 2, group, each),
            max_tokens=100 + 20 * each,
        )
        for group, length in enumerate((70, 32, 5))
        for each in range(3)
    ]


@pytest.fixture(scope="module")
def answers(mixture, requests, make_policy):
    """Completions one by one, and at once with so few pages that requests lose theirs, and keep their tokens or not."""
    model, params, _ = mixture
    policy = make_policy(
        model=model, params=jax.tree.map(jax.device_put, params), max_context_tokens=256, slots=4, cache_tokens=448
    )

    async def main(*requests):
        return await asyncio.gather(*(policy.engine.submit(each) for each in requests))

    found = {"alone": [each for request in requests for each in asyncio.run(main(request))]}
    fed = sum(len(each.prompt_ids) - 1 for each in requests)
    for name in ("again", "kept"):
        policy.engine._scheduler.clear_prefix_cache()
        policy.engine._scheduler.keeps_tokens = name == "kept"
        before = replace(policy.engine.counts)
        found[name] = asyncio.run(main(*requests))
        after = policy.engine.counts
        taken = after.prefilled_tokens + after.reused_tokens - before.prefilled_tokens - before.reused_tokens
        assert taken > fed  # some got their pages twice
    return found


def sequences_of(requests, completions):
    calls = [
        Call(0, "policy", (), Prompt("", request.prompt_ids), Reply("", completion))
        for request, completion in zip(requests, completions, strict=True)
    ]
    return [token_sequences([call])[0] for call in calls]


def test_every_token_that_was_fed_has_its_experts(mixture, requests, answers):
    table = mixture[0].config.expert_table
    assert (table.layers, table.chosen, table.experts) == (2, 2, 6)
    for request, first, *others in zip(requests, *(answers[name] for name in ("alone", "again", "kept")), strict=True):
        experts = decode_experts(first.experts, table)
        assert len(experts) == len(request.prompt_ids) + len(first.token_ids) - 1 and experts.all()
        assert (np.diff(np.sort(experts), axis=-1) > 0).all()
        for other in others:
            assert other.token_ids == first.token_ids and len(other.experts) == len(first.experts)
        assert (others[0].experts, others[0].sampler_logprobs) == (
            first.experts,
            first.sampler_logprobs,
        )  # the same bits


@pytest.mark.parametrize("how", ["alone", "kept"])
@pytest.mark.parametrize("options", [{}, {"packed": True, "shared_tokens": 2048}])
def test_a_router_that_turns_on_a_tie_is_healed(mixture, requests, answers, how, options, monkeypatch):
    for name, value in {"LEAST_SAVED": -4096, "MOST_OF_TOKENS": 4.0}.items():  # share prefixes even so
        monkeypatch.setattr(batch_module, name, value)
    model, params, turned = mixture
    rows = [Row(each, n) for n, each in enumerate(sequences_of(requests, answers[how]))]
    job = make_batch(rows, BatchPlanner(8192, **options), routing=model.config.expert_table)
    alone = job._replace(batch=job.batch._replace(experts=0 * job.batch.experts))
    mask = job.per_token(job.batch.completion_mask)

    def difference(job, params):
        logprobs = score_tokens(job, lambda batch: scored(model, params, batch)).logprobs
        return np.abs(job.per_token(logprobs) - job.per_token(job.batch.sampler_logprobs))[mask].max()

    assert (job.packing.branches is not None) == ("shared_tokens" in options)
    for each in (params, turned):
        assert difference(job, each) <= 1e-5
    assert difference(alone, turned) > 1e-2


@pytest.mark.slow
def test_an_update_is_of_the_policy_that_sampled(mixture, requests, answers):
    model, _, turned = mixture
    loss, metrics = LossConfig(name="grpo"), {}
    groups = [
        [Trajectory(episode=[], reward=float(place), sequences=[each]) for place, each in enumerate(group)]
        for group in np.array_split(np.array(sequences_of(requests, answers["alone"]), object), 3)
    ]
    for replays in (True, False):
        if not replays:
            for trajectory in (each for group in groups for each in group):
                trajectory.sequences[0].experts = []
        rows = [Row(t.sequences[0], i) for i, t in enumerate(t for group in groups for t in group)]
        learner = Learner(model, loss, OptimizerConfig(name="sgd", learning_rate=1e-3), max_disagreeing_fraction=1.0)
        given = jax.tree.map(lambda leaf: jax.device_put(np.array(leaf)), turned)
        metrics[replays] = learner.learn(rows, collect_rewards(groups, loss), given)[1]
    assert metrics[True]["replayed_token_fraction"] == 1.0 and metrics[False]["replayed_token_fraction"] == 0.0
    assert metrics[True]["sampler_logprob_diff_max"] <= 1e-5 < 1e-2 < metrics[False]["sampler_logprob_diff_max"]
    assert metrics[True]["rerouted_fraction"] > 0.01 and metrics[False]["rerouted_fraction"] == 0.0
    assert 1 <= metrics[True]["expert_imbalance"] <= 3 and 0 < metrics[True]["router_entropy"] < np.log(6)
    assert metrics[True]["router_balance"] >= 1 and metrics[True]["applied_updates"] == 1.0


@pytest.mark.slow
def test_balance_depends_on_no_layout_and_biases_follow_the_load(mixture, requests, answers):
    model, params, _ = mixture
    rate, loss = 0.125, LossConfig(name="dapo", router_aux_loss_coef=0.5, router_bias_update_rate=0.125)
    biased = decoder(replace(model.config, selection_bias=True))
    layers = {**params["layers"], "mlp": {**params["layers"]["mlp"], "selection_bias": np.zeros((2, 6), np.float32)}}
    sequences = sequences_of(requests, answers["alone"])
    groups = [
        [Trajectory(episode=[], reward=float(place), sequences=[each]) for place, each in enumerate(group)]
        for group in np.array_split(np.array(sequences, object), 3)
    ]
    rows, found = [Row(each, i) for i, each in enumerate(sequences)], []
    for coef, options in [(0.5, {}), (0.5, {"microbatch_tokens": 256, "packing": False}), (0.0, {})]:
        own = loss.model_copy(update={"router_aux_loss_coef": coef})
        sgd = OptimizerConfig(name="sgd", learning_rate=0.1, max_grad_norm=None)
        given = jax.tree.map(jax.device_put, {**params, "layers": layers})
        found.append(
            jax.device_get(Learner(biased, own, sgd, **options).learn(rows, collect_rewards(groups, own), given))
        )
    (packed, metrics), (alone, others), (free, of_free) = found
    for name in ("router_balance", "expert_imbalance", "router_entropy", "loss"):
        np.testing.assert_allclose(metrics[name], others[name], rtol=1e-5, err_msg=name)
    jax.tree.map(lambda one, other: np.testing.assert_allclose(one, other, rtol=0, atol=2e-6), packed, alone)
    np.testing.assert_allclose(metrics["loss"], of_free["loss"] + 0.5 * of_free["router_balance"], rtol=1e-5)
    moved = [
        each["layers"]["mlp"]["router"]["kernel"] - params["layers"]["mlp"]["router"]["kernel"]
        for each in (packed, free)
    ]
    assert np.abs(moved[0] - moved[1]).max() > 1e-4
    table = model.config.expert_table
    chosen = np.concatenate([decode_experts(each.experts, table)[each.completion_mask] for each in sequences])
    load = np.array([np.bincount(chosen[:, layer].ravel(), minlength=7)[1:] for layer in range(2)])
    wanted = rate * np.sign(load.mean(axis=1, keepdims=True) - load)
    np.testing.assert_array_equal(packed["layers"]["mlp"]["selection_bias"], wanted)


@pytest.mark.parametrize(
    ("knobs", "options", "lora", "message"),
    [
        ({"router_bias_update_rate": 1e-3}, {}, None, "of a qwen3 lack"),
        ({"router_bias_update_rate": 1e-3}, {}, LoraSpec(2, 2), "adapters leave frozen"),
        ({"router_aux_loss_coef": 1e-3}, {"routing_replay": False}, None, "router_aux_loss_coef .*replay is false"),
    ],
)
def test_a_balance_that_is_not_to_be_had(mixture, knobs, options, lora, message):
    model = decoder(mixture[0].config, lora=lora)
    with pytest.raises(ValueError, match=message):
        Learner(model, LossConfig(**knobs), OptimizerConfig(learning_rate=1e-3), **options)
