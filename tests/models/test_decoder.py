"""The decoder: neither padding, order, packing nor pages change the distribution of a token."""

from dataclasses import replace
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AbstractMesh

from jaxft.core.cache import init_cache
from jaxft.core.generate import generate
from jaxft.core.logprobs import token_logprobs
from jaxft.core.objectives import grpo_loss
from jaxft.core.sharding import AXES, device_bytes, path_text
from jaxft.core.types import Batch
from jaxft.core.update import init_train_state, make_update
from jaxft.models.attention import HeadRows, Scores, attend
from jaxft.models.block import make_context
from jaxft.models.config import PRESETS, LayerKind, LoraSpec, model_preset
from jaxft.models.decoder import SAVEABLE, decoder, layer_runs, scan_layers
from jaxft.models.decoder_sharding import parameters_table, rules_table, sharding_for
from jaxft.models.load import init_model
from jaxft.models.lora import put_beside

SMALL = PRESETS["qwen3-50k"]
FEW_IDS = replace(SMALL, vocab_size=48)


@cache
def peaked(name="qwen3-50k"):
    """Random weights whose logits have a standard deviation of about 1, where fresh ones have 0.1."""
    model, params = init_model(name, jax.random.key(0))
    embedding = params["embed"]
    params["embed"] = embedding / jnp.std(embedding) * model.config.hidden_size**-0.5
    return model, params


def with_window(size):
    """The same weights in a model that sees `size` tokens."""
    return decoder(replace(SMALL, pattern=(LayerKind(window=size),))), peaked()[1]


def random_tokens(rows, length, config=SMALL):
    return jax.random.randint(jax.random.key(1), (rows, length), 0, config.vocab_size)


@partial(jax.jit, static_argnums=0)
def logits_of(model, params, tokens, segment_ids=None, positions=None):
    if positions is None:
        positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    hidden, _ = model.apply(params, tokens, positions, segment_ids=segment_ids)
    return model.unembed(params, hidden)


score = jax.jit(token_logprobs, static_argnums=0)


def test_equal_configs_are_one_model():
    assert decoder(replace(SMALL)) is decoder(model_preset("qwen3-50k")) is decoder(SMALL, "dots")
    assert decoder(replace(SMALL, vocab_size=263)) is not decoder(SMALL)
    assert decoder(SMALL, compute_dtype="bfloat16") is decoder(SMALL, compute_dtype=jnp.bfloat16) is not decoder(SMALL)


@pytest.mark.slow
def test_remat_saves_memory_and_changes_no_gradient():
    _, params = peaked()
    tokens = random_tokens(8, 64)

    def loss(model, params):
        return logits_of(model, params, tokens).var()

    gradients, memory = {}, {}
    for name in ("none", "dots", "full"):
        compiled = jax.jit(jax.grad(loss, argnums=1), static_argnums=0).lower(decoder(SMALL, name), params).compile()
        gradients[name] = compiled(params)
        memory[name] = compiled.memory_analysis().temp_size_in_bytes
    assert memory["none"] > memory["dots"] > memory["full"]
    for name in ("none", "full"):
        jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-7), gradients[name], gradients["dots"])


def test_padding_and_row_order_change_nothing():
    model, params = peaked()
    tokens = random_tokens(4, 24)
    logits = logits_of(model, params, tokens)
    padded = logits_of(model, params, jnp.pad(tokens, ((0, 0), (0, 8)), constant_values=7))[:, :24]
    np.testing.assert_allclose(padded, logits, rtol=0, atol=1e-5)
    order = jnp.array([2, 0, 3, 1])
    np.testing.assert_allclose(logits_of(model, params, tokens[order]), logits[order], rtol=0, atol=1e-5)


def test_packed_segments_are_separate_rows():
    model, params = with_window(5)
    tokens, lengths = random_tokens(4, 24), [10, 5, 2, 7]
    pieces = [row[:length] for row, length in zip(tokens, lengths, strict=True)]
    segment_ids = jnp.array(np.repeat(np.arange(4), lengths))[None]
    positions = jnp.array(np.concatenate([np.arange(length) for length in lengths]))[None]
    packed = logits_of(model, params, jnp.concatenate(pieces)[None], segment_ids, positions)[0]
    separate = logits_of(model, params, tokens)
    expected = jnp.concatenate([row[:length] for row, length in zip(separate, lengths, strict=True)])
    np.testing.assert_allclose(packed, expected, rtol=0, atol=1e-5)


def test_segments_with_a_cache_are_refused():
    model, params = peaked()
    tokens = random_tokens(1, 4)
    cache, tables = init_cache(model, 1, 4, jnp.float32)
    with pytest.raises(ValueError, match="packed rows can be scored but not decoded"):
        model.apply(params, tokens, tokens, cache=cache, tables=tables, segment_ids=tokens)


def assert_sampler_agrees(model, params, temperature):
    prompts = [[5], [1, 2, 3], list(range(7, 20)), [0, 0, 4, 0]]
    rollout = generate(
        model,
        params,
        prompts,
        jax.random.key(2),
        num_generations=3,
        max_new_tokens=24,
        temperature=temperature,
        stop_ids=(1,),
    )
    mask = np.asarray(rollout.completion_mask)
    again = score(model, params, rollout.tokens, temperature=jnp.float32(temperature)).logprobs
    np.testing.assert_allclose(rollout.sampler_logprobs[mask], again[mask], rtol=0, atol=1e-5)
    np.testing.assert_array_equal(rollout.sampler_logprobs[~mask], 0)
    np.testing.assert_array_equal(rollout.lengths, [len(p) for p in prompts for _ in range(3)] + mask.sum(axis=1))
    return rollout


@pytest.mark.parametrize("name", ["qwen3-50k", pytest.param("qwen3-1m", marks=pytest.mark.slow)])
def test_sampler_and_trainer_agree(name):
    model, params = peaked(name)
    for temperature in (0.5, 1.0, 1.3):
        rollout = assert_sampler_agrees(model, params, temperature)
        assert rollout.sampler_logprobs.min() < -2


def test_sampler_and_trainer_agree_on_the_padding_id_and_within_a_window():
    # With so few ids, 0, which also pads, is certain to be sampled, and stopping is common.
    model = decoder(replace(SMALL, vocab_size=20, pattern=(LayerKind(window=6),)))
    params = peaked()[1]
    params = {**params, "embed": params["embed"][:20]}
    rollout = assert_sampler_agrees(model, params, 1.3)
    mask = np.asarray(rollout.completion_mask)
    assert (np.asarray(rollout.tokens)[mask] == 0).any()
    assert len(set(mask.sum(axis=1).tolist())) > 1


def test_window_hides_what_is_further_back():
    config = replace(SMALL, pattern=(LayerKind(window=2),))
    positions = jnp.array([[0, 1, 2, 3]])
    expected = np.array([[1, 0, 0, 0], [1, 1, 0, 0], [0, 1, 1, 0], [0, 0, 1, 1]], bool)
    np.testing.assert_array_equal(make_context(config, positions, None, None).visible[2][0], expected)


def test_with_pages_negative_positions_are_padding():
    positions = jnp.array([[64, 65, 66, -1], [0, 1, -1, -1], [-1, -1, -1, -1]])
    context = make_context(SMALL, positions, np.zeros((3, 2), np.int32), None)
    assert context.visible == {None: None}
    assert (context.paged.starts.tolist(), context.paged.counts.tolist()) == ([64, 0, 0], [3, 2, 0])


@partial(jax.jit, static_argnums=0)
def through_pages(model, params, tokens, positions, cache, tables):
    return model.apply(model.decode_layout(params), tokens, positions, cache=cache, tables=tables)


@pytest.mark.parametrize("window", [None, 5], ids="window {}".format)
def test_what_padding_holds_changes_no_bit_of_the_tokens(window):
    """Neither in what is returned for them nor in what a later token reads."""
    model, params = with_window(window)
    counts, tokens = jnp.array([[24], [7], [1], [0]]), random_tokens(4, 24)
    positions = jnp.where(jnp.arange(24) < counts, jnp.arange(24), -1)
    found = []
    for padding in (0, 9):
        cache, tables = init_cache(model, 4, 64, jnp.float32)
        given = jnp.where(positions >= 0, tokens, padding)
        hidden, cache = through_pages(model, params, given, positions, cache, tables)
        found.append((hidden[positions >= 0], through_pages(model, params, tokens[:, :1], counts, cache, tables)[0]))
    jax.tree.map(np.testing.assert_array_equal, *found)
    assert all(np.isfinite(leaf).all() for leaf in found[0])


def test_a_token_reaches_as_far_as_the_windows_of_the_layers_add_up():
    model, params = with_window(5)
    tokens = random_tokens(4, 24)
    changed = logits_of(model, params, tokens.at[:, 1].add(1)) != logits_of(model, params, tokens)
    # Two layers, each four tokens back: token 1 is seen by tokens 1 to 9.
    assert changed.any(axis=-1)[0].tolist() == [False] + [True] * 9 + [False] * 14


def test_bfloat16_weights_give_float32_logits():
    model, params = peaked()
    narrow = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), params)
    tokens = random_tokens(4, 24)
    logits = logits_of(model, narrow, tokens)
    assert logits.dtype == jnp.float32
    # A bfloat16 has 8 bits: the bound is a few roundings of logits with a standard deviation of about 1.
    assert float(jnp.abs(logits - logits_of(model, params, tokens)).max()) < 0.1


def test_sampler_and_trainer_agree_in_bfloat16():
    model, params = peaked(FEW_IDS)
    narrow = decoder(FEW_IDS, compute_dtype=jnp.bfloat16)
    prompts = [[7 * place % 48 for place in range(count)] for count in (3, 20)]
    rollout = generate(narrow, params, prompts, jax.random.key(0), num_generations=8, max_new_tokens=30)
    for scored_by, most in ((narrow, 0.01), (model, 0.05)):
        scored = token_logprobs(scored_by, params, rollout.tokens)
        assert scored.logprobs.dtype == jnp.float32
        difference = jnp.abs(scored.logprobs - rollout.sampler_logprobs)[rollout.completion_mask]
        assert float(difference.mean()) < most


def test_steps_too_small_for_bfloat16_add_up_in_the_master_weights():
    _, params = peaked(FEW_IDS)
    params = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16).astype(jnp.float32), params)
    rng = np.random.default_rng(0)
    batch = Batch(
        jnp.asarray(rng.integers(0, 48, (4, 12)), jnp.int32),
        jnp.asarray(rng.random((4, 12)) < 0.7).at[:, 0].set(False),
        jnp.asarray(rng.normal(size=4), jnp.float32),
    )
    optimizer = optax.sgd(1e-6)
    update = make_update(decoder(FEW_IDS, compute_dtype=jnp.bfloat16), grpo_loss, optimizer, microbatch_rows=2)
    state = init_train_state(jax.tree.map(jnp.copy, params), optimizer)
    for _ in range(3):
        state, metrics = update(state, batch)
    assert metrics["applied_updates"] == 1 and metrics["loss"].dtype == jnp.float32
    moved = [after - before for after, before in zip(*map(jax.tree.leaves, (state.params, params)), strict=True)]
    assert all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(state.params))
    lost = [
        np.mean(after.astype(jnp.bfloat16) == before.astype(jnp.bfloat16))
        for after, before in zip(*map(jax.tree.leaves, (state.params, params)), strict=True)
    ]
    assert np.mean([np.mean(leaf != 0) for leaf in moved]) > 0.5  # in bfloat16 nearly none of it would be there
    assert min(lost) > 0.98


@pytest.mark.parametrize("is_tied", [True, False], ids=["tied", "untied"])
def test_gradients_of_embedding_and_head_are_summed_in_float32(is_tied):
    """One token stands at half of 2,048 positions, and the logits are made for 16 tokens at a time."""
    model, params = init_model(replace(SMALL, num_layers=1, tie_word_embeddings=is_tied), jax.random.key(0))
    narrow = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), params)
    wide = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), narrow)
    tokens = np.full((16, 128), 7)
    tokens[:, ::2] = np.random.default_rng(0).permutation(16 * 64).reshape(16, 64) % SMALL.vocab_size
    tokens = jnp.asarray(tokens)

    @partial(jax.jit, static_argnums=0)
    def gradients(model, params):
        return jax.grad(lambda params: token_logprobs(model, params, tokens, chunk_tokens=16).logprobs.mean())(params)

    expected = gradients(model, wide)
    computing = decoder(model.config, compute_dtype=jnp.bfloat16)
    for computed, given in [(model, narrow)] if is_tied else [(model, narrow), (computing, wide)]:
        found = gradients(computed, given)
        for name in ("embed",) if is_tied else ("embed", "lm_head"):
            rows = np.asarray(expected[name])
            errors = np.linalg.norm(np.asarray(found[name], np.float32) - rows, axis=1) / np.linalg.norm(rows, axis=1)
            assert errors.max() < 0.02, name


@pytest.mark.parametrize("soft_cap", [None, 30.0])
def test_scores_in_bfloat16_are_scaled_and_capped_in_float32(soft_cap):
    """Scores are about 40; rounding the queries once more changes them by 0.1, and weights by a tenth."""
    draw = lambda i, *shape: jax.random.randint(jax.random.key(i), shape, -8, 9).astype(jnp.float32)  # noqa: E731
    q, keys, values = draw(0, 1, 8, 1, 32) * 1.25, draw(1, 1, 1, 32, 8), jnp.eye(8, 32)[None, None]
    visible, scores = jnp.ones((1, 8, 8), bool), Scores(32**-0.5, soft_cap=soft_cap)
    wide = attend(q, HeadRows(keys, values), visible, scores)
    narrow = attend(*jax.tree.map(lambda x: x.astype(jnp.bfloat16), (q, HeadRows(keys, values))), visible, scores)
    np.testing.assert_allclose(narrow.astype(jnp.float32), wide, rtol=0.01, atol=1e-6)


CONFIG = replace(model_preset("qwen3-50k"), num_kv_heads=4, vocab_size=264, qkv_bias=True, mlp_bias=True)


def mesh(data=1, fsdp=1, tensor=1):
    return AbstractMesh((data, fsdp, tensor), AXES)


def shapes(config):
    return jax.eval_shape(decoder(config).init, jax.random.key(0))


@pytest.mark.parametrize(("qk_norm", "places"), [(None, "before"), ("heads", "both"), ("projections", "after")])
def test_all_but_norms_are_cut(qk_norm, places):
    """Each of eight devices holds an eighth of everything, and norms and output biases whole."""
    config = replace(CONFIG, qk_norm=qk_norm, norm_places=places, tie_word_embeddings=False)
    sharding = sharding_for(config, mesh(fsdp=4, tensor=2), strict=True)
    kernels = {k: v for k, v in shapes(config)["layers"].items() if k in ("self_attn", "mlp")}
    for module in kernels.values():
        for name, leaves in module.items():
            if "kernel" in leaves:
                leaf = leaves["kernel"]
                shard = sharding.leaf_sharding(f"layers/{name}/kernel", leaf.shape).shard_shape(leaf.shape)
                assert leaf.size == 8 * shard[0] * shard[1] * shard[2], name
    paths = jax.tree_util.tree_leaves_with_path(shapes(config))
    norms = sum(leaf.size * leaf.dtype.itemsize for path, leaf in paths if "norm" in path_text(path))
    cut, each = device_bytes(None, shapes(config)) - norms, device_bytes(sharding, shapes(config)) - norms
    assert cut / 8 < each < 1.1 * cut / 8


def test_decoding_has_kernels_the_other_way_round_and_whole_along_fsdp():
    sharding = sharding_for(CONFIG, mesh(fsdp=2, tensor=2)).gathered()
    trained, decoded = shapes(CONFIG), jax.eval_shape(decoder(CONFIG).decode_layout, shapes(CONFIG))
    stacked = trained["layers"]["self_attn"]["o_proj"]["kernel"].shape
    single = decoded["decoding_layers"][1]["self_attn"]["o_proj"]["kernel"].shape
    assert single == stacked[:0:-1]
    assert tuple(sharding.spec("layers/self_attn/o_proj/kernel", stacked)) == (None, "tensor", None)
    assert tuple(sharding.spec("decoding_layers/1/self_attn/o_proj/kernel", single)) == (None, "tensor")
    for part, name in (("self_attn", "qkv_proj"), ("mlp", "gate_up_proj")):
        for leaf, spec in (("kernel", ("tensor", None)), ("bias", ("tensor",))):
            shape = decoded["decoding_layers"][1][part][name][leaf].shape
            assert tuple(sharding.spec(f"decoding_layers/1/{part}/{name}/{leaf}", shape)) == spec


def test_heads_that_do_not_divide():
    with pytest.raises(ValueError, match=r"num_kv_heads is 4, which does not divide over the 3 devices .*'tensor'"):
        sharding_for(replace(CONFIG, num_heads=12, num_kv_heads=4), mesh(tensor=3))


def test_a_dimension_that_does_not_divide_is_whole_and_said_once():
    uneven = replace(CONFIG, vocab_size=262)
    with pytest.warns(UserWarning, match="embed: dimension 0 of 262 .* the 4 devices of mesh axis 'tensor'"):
        sharding = sharding_for(uneven, mesh(tensor=4))
    assert tuple(sharding.spec("embed", (262, 32))) == (None, "fsdp")
    with pytest.raises(ValueError, match="embed: dimension 0 of 262"):
        sharding_for(uneven, mesh(tensor=4), strict=True)


def test_tables():
    assert rules_table().startswith("embed ")
    lines = parameters_table(shapes(CONFIG), sharding_for(CONFIG, mesh(2, 2, 2))).splitlines()
    assert lines[0] == "mesh: data 2, fsdp 2, tensor 2"
    (kernel,) = [line.split() for line in lines if line.startswith("layers/self_attn/o_proj/kernel")]
    assert kernel[1:] == ["(2,", "64,", "32)", "-,", "tensor,", "fsdp", f"{2 * 64 * 32 / 2**20:.3f}"]


MIXED = replace(SMALL, num_layers=8, pattern=(LayerKind(window=2), LayerKind(window=3), LayerKind(rope=None)))


@pytest.mark.parametrize(("lora", "platform"), [(None, "gpu"), (LoraSpec(2, 4.0), "gpu"), (None, "cpu")])
def test_layers_in_turns_are_the_same_as_one_by_one(lora, platform):
    """Two layers, and two turns of three, scanned, against a loop over layers."""
    assert [(len(run.kinds), run.repeats) for run in layer_runs(MIXED.kinds)] == [(2, 1), (3, 2)]
    model = decoder(MIXED, lora=lora)
    params, tokens = model.init(jax.random.key(0)), random_tokens(2, 8)
    layers = put_beside(params)["layers"]
    x = jax.random.normal(jax.random.key(2), (2, 8, MIXED.hidden_size))

    def compute(kind, x, layer):
        y = sum(jnp.tanh(leaf.astype(x.dtype)).sum() for leaf in jax.tree.leaves(layer))
        return x * (1 + 1e-3 * y) + (kind.window or 7)

    def in_runs(x, layers):
        return scan_layers(compute, SAVEABLE["dots"], MIXED.kinds, x, layers, platform).sum()

    def one_by_one(x, layers):
        for i, kind in enumerate(MIXED.kinds):
            x = compute(kind, x, jax.tree.map(lambda leaf, i=i: leaf[i], layers))
        return x.sum()

    found, wanted = (jax.jit(jax.value_and_grad(each, argnums=(0, 1)))(x, layers) for each in (in_runs, one_by_one))
    for got, expected in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-5)
    assert jnp.isfinite(model.apply(params, tokens, tokens)[0]).all()


def test_the_backward_pass_keeps_no_copy_of_a_layer():
    model = decoder(MIXED)
    params, tokens = jax.eval_shape(model.init, jax.random.key(0)), random_tokens(2, 8)
    loss = jax.grad(lambda params: model.apply(params, tokens, tokens)[0].sum())
    scans = [each for each in jax.make_jaxpr(loss)(params).eqns if each.primitive.name == "scan"]
    kept = {variable.aval.shape for scan in scans for variable in scan.outvars}
    hidden, wide = MIXED.hidden_size, MIXED.intermediate_size
    assert (2, 3, hidden, wide) in kept  # the gradient of two turns
    assert (2, hidden, wide) not in kept
