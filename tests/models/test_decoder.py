"""The decoder: neither padding, order, packing nor pages change the distribution of a token."""

from dataclasses import replace
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.traverse_util import unflatten_dict
from jax.sharding import AbstractMesh

import jaxft.models.attention as attention_module
import jaxft.models.decoder as decoder_module
import jaxft.models.layers as layers_module
from jaxft.core.cache import init_cache
from jaxft.core.generate import generate
from jaxft.core.logprobs import token_logprobs
from jaxft.core.objectives import grpo_loss, score_batch
from jaxft.core.packing import Branches, find_families, pack, plan_branches, plan_padding, segments, token_index
from jaxft.core.sharding import AXES, device_bytes, path_text
from jaxft.core.types import Batch
from jaxft.core.update import init_train_state, make_update
from jaxft.models.attention import HeadRows, Scores, attend
from jaxft.models.block import make_context
from jaxft.models.config import PRESETS, LayerKind, LoraSpec, layers_with, model_preset
from jaxft.models.decoder import decoder
from jaxft.models.decoder_sharding import parameters_table, rules_table, sharding_for
from jaxft.models.layer_stack import apply_layers, cut_layer, layer_runs
from jaxft.models.quantized import with_quantized_kernels
from tests.models.weights import narrowed, random_params

SMALL = PRESETS["qwen3-50k"]
FEW_IDS = replace(SMALL, vocab_size=20)
WINDOWED = decoder(replace(SMALL, pattern=(LayerKind(window=5),)))
PARAMS = random_params(SMALL)
TOKENS = np.random.default_rng(1).integers(0, SMALL.vocab_size, (4, 24), np.int32)
ALONE = np.zeros((4, 24), np.int32)
"""Segments of rows that hold one sequence each."""
PLACES = np.tile(np.arange(24, dtype=np.int32), (4, 1))


@partial(jax.jit, static_argnums=0)
def logits_of(model, params, tokens, segment_ids=None, positions=PLACES):
    hidden, _ = model.apply(params, jnp.asarray(tokens), jnp.asarray(positions), segment_ids=segment_ids)
    return model.unembed(params, hidden)


score = jax.jit(token_logprobs, static_argnums=0)


def test_equal_configs_are_one_model():
    assert decoder(replace(SMALL)) is decoder(model_preset("qwen3-50k")) is decoder(SMALL, "dots")
    assert decoder(replace(SMALL, vocab_size=263)) is not decoder(SMALL)
    assert decoder(SMALL, compute_dtype="bfloat16") is decoder(SMALL, compute_dtype=jnp.bfloat16) is not decoder(SMALL)


@pytest.mark.slow
def test_remat_saves_memory_and_changes_no_gradient():
    tokens = np.random.default_rng(1).integers(0, SMALL.vocab_size, (8, 64), np.int32)

    def loss(model, params):
        return logits_of(model, params, tokens, positions=np.tile(np.arange(64, dtype=np.int32), (8, 1))).var()

    gradients, memory = {}, {}
    for name in ("none", "dots", "full"):
        compiled = jax.jit(jax.grad(loss, argnums=1), static_argnums=0).lower(decoder(SMALL, name), PARAMS).compile()
        gradients[name] = compiled(PARAMS)
        memory[name] = compiled.memory_analysis().temp_size_in_bytes
    assert memory["none"] > memory["dots"] > memory["full"]
    for name in ("none", "full"):
        jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-7), gradients[name], gradients["dots"])


def test_padding_and_row_order_change_nothing():
    logits = logits_of(decoder(SMALL), PARAMS, TOKENS)
    order, padded = [2, 0, 3, 1], TOKENS.copy()
    padded[:, 16:] = 7
    again = logits_of(decoder(SMALL), PARAMS, padded[order])
    np.testing.assert_allclose(again[:, :16], np.asarray(logits)[order, :16], rtol=0, atol=1e-5)


def test_packed_segments_are_separate_rows():
    lengths, segment_ids, positions, packed = [10, 5, 2, 7], ALONE.copy(), PLACES.copy(), TOKENS.copy()
    segment_ids[0] = np.repeat(np.arange(4), lengths)
    positions[0] = np.concatenate([np.arange(length) for length in lengths])
    packed[0] = np.concatenate([row[:length] for row, length in zip(TOKENS, lengths, strict=True)])
    found = logits_of(WINDOWED, PARAMS, packed, segment_ids, positions)[0]
    separate = np.asarray(logits_of(WINDOWED, PARAMS, TOKENS, ALONE, PLACES))
    expected = np.concatenate([row[:length] for row, length in zip(separate, lengths, strict=True)])
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5)


def branched_rows():
    """Batches of eight sequences of two prompts, plain and with each prompt once, and a weight of each token's score.

    One sequence has a trained token in its prompt, which is in the others' as context.
    """
    draw, prompts = np.random.default_rng(3), ([9] * 4 + [3] * 9, [5] * 11)
    sequences = [[*prompts[i % 2], *draw.integers(10, 20, 3 + i).tolist()] for i in range(8)]
    trained = [np.arange(len(each)) >= len(prompts[i % 2]) for i, each in enumerate(sequences)]
    trained[2][7] = True
    untrained = [int(mask.argmax()) for mask in trained]
    families = find_families(sequences, untrained)
    lengths = [len(each) for each in sequences]
    shared = plan_branches(families, lengths, Branches(16, 4), 16)
    scales = [draw.normal(size=length) for length in lengths]
    batches = []
    for packing in (plan_padding(lengths, 32), shared):
        ids, positions = segments(packing)
        mask, tokens = pack(packing, trained, bool), pack(packing, sequences, np.int32)
        temperatures = pack(packing, np.linspace(0.7, 1.3, 8), np.float32, fill=1.0)
        recorded = {"temperatures": temperatures, "positions": positions, "segment_ids": ids}
        batch = Batch(tokens, mask, branches=packing.branches, **recorded)
        batches.append((batch, pack(packing, scales, np.float32), token_index(packing)))
    return batches


def check_branches(model, params, tolerance):
    """Raise unless scores and gradients of rows with shared prompts are those of plain rows."""

    @jax.jit
    def scores(params, batch, scales):
        def loss(params):
            scored = score_batch(model, params, batch)
            return (scored.logprobs * scales).sum(), scored

        return jax.grad(loss, has_aux=True)(params)

    (plain, plain_scores), (found, found_scores) = (scores(params, *rows[:2]) for rows in branched_rows())
    (*_, plain_index), (batch, _, index) = branched_rows()
    for one, other in ((plain_scores.logprobs, found_scores.logprobs), (plain_scores.entropy, found_scores.entropy)):
        expected = np.asarray(one)[plain_index.tokens][index.is_own]
        got = np.asarray(other)[index.tokens][index.is_own]
        assert np.linalg.norm(got - expected) <= tolerance * np.linalg.norm(expected)
    one, other = (
        np.concatenate([np.ravel(x) for x in jax.tree.leaves(jax.device_get(each))]) for each in (plain, found)
    )
    assert np.linalg.norm(other - one) <= tolerance * np.linalg.norm(one)
    return batch


def test_prompts_that_are_computed_once_have_the_scores_and_gradients_of_plain_rows():
    model = decoder(replace(FEW_IDS, pattern=(LayerKind(window=6), LayerKind())))
    batch = check_branches(model, random_params(FEW_IDS), 1e-6)
    assert batch.tokens.shape == (2, 16 + 4 * 16)


@pytest.mark.slow
@pytest.mark.parametrize("remat", ["none", "dots", "least"])
def test_so_they_do_with_adapters_in_chunks_and_in_bfloat16(remat, monkeypatch):
    lora = LoraSpec(4, 8.0)
    config = replace(FEW_IDS, attention_soft_cap=20.0, pattern=(LayerKind(window=6), LayerKind()))
    params = random_params(config, lora)
    monkeypatch.setattr(attention_module, "MOST_SCORES", 2000)
    check_branches(decoder(config, remat, lora=lora), params, 1e-6)
    check_branches(decoder(config, remat, lora=lora, compute_dtype=jnp.bfloat16), params, 0.02)


def test_segments_with_a_cache_are_refused():
    def apply(params, tokens):
        cache, tables = init_cache(decoder(SMALL), 4, 24, jnp.float32)
        return decoder(SMALL).apply(params, tokens, tokens, cache=cache, tables=tables, segment_ids=tokens)

    with pytest.raises(ValueError, match="packed rows can be scored but not decoded"):
        jax.eval_shape(apply, PARAMS, TOKENS)


PROMPTS = [[5], [1, 2, 3], list(range(7, 20)), [0, 0, 4, 0]]


@cache
def sampled(model, temperature, config=FEW_IDS):
    """Twelve rows, and which of their tokens were sampled; with few ids, 0, which also pads, is certain to be."""
    sampling = {"num_generations": 3, "max_new_tokens": 16, "temperature": temperature, "stop_ids": (1,)}
    rollout = generate(model, random_params(config), PROMPTS, jax.random.key(2), **sampling)
    return rollout, np.asarray(rollout.completion_mask)


@pytest.fixture(scope="module")
def windowed_rollouts():
    model = decoder(replace(FEW_IDS, pattern=(LayerKind(window=6),)))
    return [(model, temperature, *sampled(model, temperature)) for temperature in (0.5, 1.3)]


def test_sampler_and_trainer_agree_on_the_padding_id_and_within_a_window(windowed_rollouts):
    params = random_params(FEW_IDS)
    for model, temperature, rollout, mask in windowed_rollouts:
        again = np.asarray(score(model, params, rollout.tokens, temperature=np.float32(temperature)).logprobs)
        np.testing.assert_allclose(np.asarray(rollout.sampler_logprobs)[mask], again[mask], rtol=0, atol=1e-5)
        np.testing.assert_array_equal(np.asarray(rollout.sampler_logprobs)[~mask], 0)
        np.testing.assert_array_equal(rollout.lengths, [len(p) for p in PROMPTS for _ in range(3)] + mask.sum(axis=1))
        assert (np.asarray(rollout.tokens)[mask] == 0).any()
        assert len(set(mask.sum(axis=1).tolist())) > 1
        assert again.min() < -2


def test_window_hides_what_is_further_back():
    config = replace(SMALL, pattern=(LayerKind(window=2),))
    positions = np.array([[0, 1, 2, 3]])
    expected = np.array([[1, 0, 0, 0], [1, 1, 0, 0], [0, 1, 1, 0], [0, 0, 1, 1]], bool)
    visible = jax.jit(lambda positions: make_context(config, positions, None, None).rows.visible[2])(positions)
    np.testing.assert_array_equal(visible[0], expected)


def test_with_pages_negative_positions_are_padding():
    positions = np.array([[64, 65, 66, -1], [0, 1, -1, -1], [-1, -1, -1, -1]])

    @jax.jit
    def paged(positions):
        context = make_context(SMALL, positions, np.zeros((3, 2), np.int32), None)
        assert context.rows is None
        return context.paged.starts, context.paged.counts

    assert [found.tolist() for found in paged(positions)] == [[64, 0, 0], [3, 2, 0]]


@partial(jax.jit, static_argnums=(0, 1))
def two_calls(model, dtype, params, tokens, positions, then, at):
    """Logits of rows through pages, and of a further token of each."""
    cache, tables = init_cache(model, 4, 64, dtype)
    params = model.decode_layout(params)
    hidden, cache = model.apply(params, tokens, positions, cache=cache, tables=tables)
    more, _ = model.apply(params, then, at, cache=cache, tables=tables)
    return model.unembed(params, hidden), model.unembed(params, more)


COUNTS = np.array([[23], [7], [1], [0]], np.int32)


@cache
def paged(window, dtype):
    """A model, and logits of `two_calls` with two contents of the padding; the further token is the row's next."""
    config = replace(SMALL, pattern=(LayerKind(window=window),))
    model, positions = decoder(config, compute_dtype=dtype), np.where(PLACES < COUNTS, PLACES, -1).astype(np.int32)
    given = [np.where(positions >= 0, TOKENS, padding).astype(np.int32) for padding in (0, 9)]
    then = np.take_along_axis(TOKENS, COUNTS, axis=1)
    return model, [jax.device_get(two_calls(model, dtype, PARAMS, each, positions, then, COUNTS)) for each in given]


@pytest.mark.parametrize(
    ("window", "dtype"), [pytest.param(None, jnp.float32, marks=pytest.mark.slow), (5, jnp.bfloat16)]
)
def test_what_padding_holds_changes_no_bit_of_the_tokens(window, dtype):
    """Neither in what is returned for them nor in what a later token reads."""
    found = [(rows[PLACES < COUNTS], more) for rows, more in paged(window, dtype)[1]]
    jax.tree.map(np.testing.assert_array_equal, *found)
    assert all(np.isfinite(leaf).all() for leaf in found[0])


def test_pages_in_bfloat16_have_the_logprobs_of_one_pass():
    """Bounds of the mean difference to one pass in bfloat16 and in float32."""
    model, [(rows, more), _] = paged(5, jnp.bfloat16)
    sampled = np.concatenate([rows[PLACES < COUNTS], more[:, 0]])
    for scored_by, most in ((model, 0.01), (WINDOWED, 0.05)):
        logits = np.asarray(logits_of(scored_by, PARAMS, TOKENS, ALONE, PLACES))
        assert logits.dtype == sampled.dtype == np.float32
        scored = np.concatenate([logits[PLACES < COUNTS], logits[np.arange(4), COUNTS[:, 0]]])
        logprobs = [each - np.log(np.exp(each).sum(axis=-1, keepdims=True)) for each in (sampled, scored)]
        assert np.abs(logprobs[0] - logprobs[1]).mean() < most


def test_a_token_reaches_as_far_as_the_windows_of_the_layers_add_up():
    other = TOKENS.copy()
    other[:, 1] += 1
    logits = [np.asarray(logits_of(WINDOWED, PARAMS, tokens, ALONE, PLACES)) for tokens in (other, TOKENS)]
    # Two layers, each four tokens back: token 1 is seen by tokens 1 to 9.
    assert (logits[0] != logits[1]).any(axis=-1)[0].tolist() == [False] + [True] * 9 + [False] * 14


def test_bfloat16_weights_give_float32_logits():
    logits = logits_of(decoder(SMALL), narrowed(PARAMS, jnp.bfloat16), TOKENS)
    assert logits.dtype == jnp.float32
    # A bfloat16 has 8 bits: the bound is a few roundings of logits with a standard deviation of about 1.
    assert np.abs(np.asarray(logits) - np.asarray(logits_of(decoder(SMALL), PARAMS, TOKENS))).max() < 0.1


NARROW = decoder(FEW_IDS, compute_dtype=jnp.bfloat16)


@pytest.fixture(scope="module")
def updated():
    """Weights that bfloat16 has exactly, before and after three tiny steps, and the last metrics."""
    params = narrowed(narrowed(random_params(FEW_IDS), jnp.bfloat16), np.float32)
    rng = np.random.default_rng(0)
    mask = rng.random((4, 12)) < 0.7
    mask[:, 0] = False
    batch = Batch(rng.integers(0, 20, (4, 12), np.int32), mask, rng.normal(size=4).astype(np.float32))
    optimizer = optax.sgd(1e-6)
    update = make_update(NARROW, grpo_loss, optimizer, microbatch_rows=2)
    state = init_train_state(jax.device_put(params, jax.devices()[0]), optimizer)
    for _ in range(3):
        state, metrics = update(state, batch)
    return params, state.params, metrics


def test_steps_too_small_for_bfloat16_add_up_in_the_master_weights(updated):
    params, after, metrics = updated
    assert metrics["applied_updates"] == 1 and metrics["loss"].dtype == jnp.float32
    pairs = [*zip(*(map(np.asarray, jax.tree.leaves(tree)) for tree in (after, params)), strict=True)]
    assert all(leaf.dtype == np.float32 for leaf, _ in pairs)
    moved = [np.mean(leaf != before) for leaf, before in pairs]
    lost = [np.mean(leaf.astype(jnp.bfloat16) == before.astype(jnp.bfloat16)) for leaf, before in pairs]
    assert np.mean(moved) > 0.5  # in bfloat16 nearly none of it would be there
    assert min(lost) > 0.98


@pytest.mark.parametrize(
    ("is_tied", "dtype"),
    [
        (False, None),
        pytest.param(True, None, marks=pytest.mark.slow),
        pytest.param(False, jnp.bfloat16, marks=pytest.mark.slow),
    ],
)
def test_gradients_of_embedding_and_head_are_summed_in_float32(is_tied, dtype):
    """One token stands at half of 2,048 positions, and the logits are made for 16 tokens at a time."""
    config = replace(SMALL, num_layers=1, tie_word_embeddings=is_tied)
    narrow = narrowed(random_params(config), jnp.bfloat16)
    narrow |= {name: (narrow[name] * 0.1).astype(jnp.bfloat16) for name in narrow.keys() & {"embed", "lm_head"}}
    wide = narrowed(narrow, np.float32)
    tokens = np.full((16, 128), 7, np.int32)
    tokens[:, ::2] = np.random.default_rng(0).permutation(16 * 64).reshape(16, 64) % SMALL.vocab_size

    @partial(jax.jit, static_argnums=0)
    def gradients(model, params):
        score = partial(token_logprobs, model, tokens=jnp.asarray(tokens), chunk_tokens=16)
        return jax.grad(lambda params: score(params=params).logprobs.mean())(params)

    expected = gradients(decoder(config), wide)
    found = gradients(decoder(config, compute_dtype=dtype), narrow if dtype is None else wide)
    for name in ("embed",) if is_tied else ("embed", "lm_head"):
        rows = np.asarray(expected[name])
        errors = np.linalg.norm(np.asarray(found[name], np.float32) - rows, axis=1) / np.linalg.norm(rows, axis=1)
        assert errors.max() < 0.02, name


@pytest.mark.parametrize("soft_cap", [None, 30.0])
def test_scores_in_bfloat16_are_scaled_and_capped_in_float32(soft_cap):
    """Scores are about 40; rounding the queries once more changes them by 0.1, and weights by a tenth."""
    draw = lambda i, *shape: np.random.default_rng(i).integers(-8, 9, shape).astype(np.float32)  # noqa: E731
    q, keys, values = draw(0, 1, 8, 1, 32) * 1.25, draw(1, 1, 1, 32, 8), np.eye(8, 32, dtype=np.float32)[None, None]
    visible, scores = np.ones((1, 8, 8), bool), Scores(32**-0.5, soft_cap=soft_cap)
    compute = jax.jit(lambda q, seen: attend(q, seen, jnp.asarray(visible), scores))
    wide = compute(q, HeadRows(keys, values))
    narrow = compute(*narrowed((q, HeadRows(keys, values)), jnp.bfloat16))
    np.testing.assert_allclose(np.asarray(narrow, np.float32), wide, rtol=0.01, atol=1e-6)


CONFIG = replace(model_preset("qwen3-50k"), num_kv_heads=4, vocab_size=264, qkv_bias=True, mlp_bias=True)


def mesh(data=1, fsdp=1, tensor=1):
    return AbstractMesh((data, fsdp, tensor), AXES)


def shapes(config):
    return jax.eval_shape(decoder(config).init, jax.random.key(0))


@pytest.mark.parametrize(("qk_norm", "places"), [(None, "before"), ("heads", "both"), ("projections", "after")])
def test_all_but_norms_are_cut(qk_norm, places):
    """Each of eight devices holds an eighth of everything, and norms and output biases whole."""
    config = replace(CONFIG, qk_norm=qk_norm, norm_places=places, tie_word_embeddings=False)
    sharding = sharding_for(config, mesh(fsdp=4, tensor=2))
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


def test_kernels_in_eight_bits_and_their_scales_are_cut_alike():
    """A scale lies with the output channels that it belongs to, and is whole where the inputs are cut."""
    sharding = sharding_for(CONFIG, mesh(fsdp=2, tensor=2))
    decoded = jax.eval_shape(decoder(CONFIG, sampling_dtype="int8").decode_layout, shapes(CONFIG))
    layer = sharding.gathered().shardings(decoded)["decoding_layers"][1]
    specs = {name: layer[part][name]["kernel"] for part, name in (("self_attn", "qkv_proj"), ("mlp", "down_proj"))}
    assert tuple(specs["qkv_proj"].values.spec) == tuple(specs["qkv_proj"].scale.spec) == ("tensor", None)
    assert tuple(specs["down_proj"].values.spec) == (None, "tensor")
    assert tuple(specs["down_proj"].scale.spec) == (None, None)
    stored = jax.eval_shape(lambda params: with_quantized_kernels(params, "int8"), shapes(CONFIG))
    kernel = sharding.shardings(stored)["layers"]["mlp"]["up_proj"]["kernel"]
    assert tuple(kernel.values.spec) == (None, "fsdp", "tensor") and tuple(kernel.scale.spec) == (None, None, "tensor")


def test_heads_that_do_not_divide():
    with pytest.raises(ValueError, match=r"num_kv_heads is 4, which does not divide over the 3 devices .*'tensor'"):
        sharding_for(replace(CONFIG, num_heads=12, num_kv_heads=4), mesh(tensor=3))


def test_a_dimension_that_does_not_divide_is_whole_and_said_once():
    uneven = replace(CONFIG, vocab_size=262)
    with pytest.warns(UserWarning, match="embed: dimension 0 of 262 .* the 4 devices of mesh axis 'tensor'"):
        sharding = sharding_for(uneven, mesh(tensor=4))
    assert tuple(sharding.spec("embed", (262, 32))) == (None, "fsdp")


def test_tables():
    assert rules_table().startswith("embed ")
    lines = parameters_table(shapes(CONFIG), sharding_for(CONFIG, mesh(2, 2, 2))).splitlines()
    assert lines[0] == "mesh: data 2, fsdp 2, tensor 2"
    (kernel,) = [line.split() for line in lines if line.startswith("layers/self_attn/o_proj/kernel")]
    assert kernel[1:] == ["(2,", "64,", "32)", "-,", "tensor,", "fsdp", f"{2 * 64 * 32 / 2**20:.3f}"]


MIXED = replace(SMALL, num_layers=8, pattern=(LayerKind(window=2), LayerKind(window=3), LayerKind(rope=None)))
PLACES_OF_WEIGHTS = [("self_attn", "q_proj"), ("mlp", "up_proj"), ("mlp", "experts", "up_proj")]
SPARSE = replace(
    MIXED,
    num_experts=4,
    num_experts_per_tok=2,
    pattern=tuple(LayerKind(kind.window, kind.rope, i != 1) for i, kind in enumerate(MIXED.pattern)),
)


@pytest.mark.parametrize(
    ("config", "has_adapters", "platform", "remat"),
    [
        (MIXED, False, "gpu", "none"),
        (MIXED, True, "gpu", "none"),
        (SPARSE, True, "gpu", "dots"),
        (SPARSE, True, "tpu", "dots"),
        (SPARSE, False, "cpu", "dots"),
    ],
)
def test_layers_in_turns_are_the_same_as_one_by_one(config, has_adapters, platform, remat):
    """Two layers, and two turns of three, scanned or not, against a loop over layers with weights of their own.

    Mixtures of experts have arrays that the others lack, and return something.
    """
    assert [(len(run.kinds), run.repeats) for run in layer_runs(config.kinds)] == [(2, 1), (3, 2)]
    draw, names = np.random.default_rng(0), ("kernel", "lora_a", "lora_b") if has_adapters else ("kernel", "bias")
    paths = [(*place, name) for place in PLACES_OF_WEIGHTS for name in names]
    rows = {path: len(layers_with(config.kinds, path)) for path in paths}
    layers = unflatten_dict({path: draw.normal(size=(rows[path], 3, 4)).astype("f4") for path in paths if rows[path]})
    x = draw.normal(size=(2, 1, 5)).astype(np.float32)

    def compute(kind, x, layer):
        y = sum(jnp.tanh(leaf).sum() for leaf in jax.tree.leaves(layer))
        return x * (1 + 0.1 * y) + (kind.window or 7), y if kind.has_experts else None

    def in_runs(x, layers):
        x, others = apply_layers(compute, remat, config.kinds, x, layers, platform)
        return x.sum(), others

    def one_by_one(x, layers):
        others = []
        for i, kind in enumerate(config.kinds):
            x, other = compute(kind, x, cut_layer(config, layers, i))
            others += [] if other is None else [other]
        return x.sum(), jnp.stack(others) if others else None

    gradients = (jax.value_and_grad(each, argnums=(0, 1), has_aux=True) for each in (in_runs, one_by_one))
    found, wanted = (jax.jit(each)(x, layers) for each in gradients)
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5), found, wanted)


def test_on_gpus_layers_are_unrolled_and_gate_and_up_one_product_with_the_same_gradients(monkeypatch):
    config = replace(SMALL, num_layers=3, pattern=(LayerKind(window=3), LayerKind()))
    params, tokens = random_params(config), jnp.asarray(TOKENS[:2, :8])

    def gradients(remat):
        def loss(params):
            return (decoder(config, remat).apply(params, tokens, jnp.asarray(PLACES[:2, :8]))[0] ** 2).sum()

        traced = jax.jit(jax.grad(loss)).trace(params)
        return traced, jax.device_get(traced.lower().compile()(params))

    scanned, wanted = gradients("dots")
    for module in (decoder_module, layers_module):
        monkeypatch.setattr(module, "compute_platform", lambda sharding: "gpu")
    for remat in ("none", "dots"):
        unrolled, found = gradients(remat)
        assert " scan[" in str(scanned.jaxpr) and " scan[" not in str(unrolled.jaxpr)
        assert ("prevent_cse" in str(unrolled.jaxpr)) == (remat == "dots")
        for path, leaf in jax.tree_util.tree_leaves_with_path(wanted):
            (same,) = [each for at, each in jax.tree_util.tree_leaves_with_path(found) if at == path]
            np.testing.assert_allclose(same, leaf, rtol=0, atol=1e-6 * np.abs(leaf).max(), err_msg=str(path))


def test_the_backward_pass_keeps_no_copy_of_a_layer():
    model = decoder(MIXED)
    params, tokens = jax.eval_shape(model.init, jax.random.key(0)), jnp.asarray(TOKENS[:2, :8])
    loss = jax.grad(lambda params: model.apply(params, tokens, tokens)[0].sum())
    scans = [each for each in jax.make_jaxpr(loss)(params).eqns if each.primitive.name == "scan"]
    kept = {variable.aval.shape for scan in scans for variable in scan.outvars}
    hidden, wide = MIXED.hidden_size, MIXED.intermediate_size
    assert (2, 3, hidden, wide) in kept  # the gradient of two turns
    assert (2, hidden, wide) not in kept
