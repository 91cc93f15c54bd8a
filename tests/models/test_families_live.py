"""Every family of models against transformers and PEFT, over configs that are drawn at random.

`.ci/more models` installs torch, transformers and peft and runs these tests; they need no downloaded weights. For each
drawn config transformers makes a checkpoint with random weights, and both sides compute. At the end the largest
differences per family are printed. The names and shapes of the tensors that jaxft exports are those that transformers
writes, which vLLM reads.
"""

import asyncio
import os
import random
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors import safe_open

import jaxft
from jaxft.core.logprobs import token_logprobs
from jaxft.models import families
from jaxft.models.config import LoraSpec
from jaxft.models.hf import save_model
from jaxft.models.peft import save_adapter
from jaxft.rollout.device import DeviceThread
from jaxft.rollout.engine import Engine
from jaxft.rollout.requests import Request
from tests.conftest import forget_programs

pytestmark = pytest.mark.models

torch = pytest.importorskip("torch")
peft = pytest.importorskip("peft")
conversion = pytest.importorskip("peft.utils.transformers_weight_conversion")
oracles = pytest.importorskip("scripts.make_model_oracles")

DRAWS = int(os.environ.get("JAXFT_MODEL_DRAWS", "6"))
"""Number of configs of each family."""

LENGTH, PROMPT_TOKENS, NEW_TOKENS = 40, 11, 64
load_model = partial(jaxft.load_model, context_tokens=PROMPT_TOKENS + NEW_TOKENS)
HEADS = ((3, 1), (3, 3), (4, 2), (5, 1), (6, 2), (4, 4))
LORA_RANK, LORA_ALPHA = 4, 12


@pytest.fixture(autouse=True)
def many_programs():
    """The tests of this module compile more than a process may map."""
    yield
    forget_programs()


def window_of(draw):
    return draw.choice([5, 8, 12])


def layers_of(draw, count, kinds=("full_attention", "sliding_attention")):
    return [draw.choice(kinds) for _ in range(count)]


def rope(draw, kinds=("default",)):
    """Rotary parameters of one of these kinds, whose contexts before stretching are shorter than the text."""
    keys = {"rope_type": draw.choice(kinds), "rope_theta": draw.choice([1e3, 1e4, 5e5])}
    if keys["rope_type"] == "linear":
        keys |= {"factor": draw.choice([2.0, 8.0])}
    if keys["rope_type"] == "llama3":
        keys |= {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
    if keys["rope_type"] == "yarn":
        keys |= {"factor": draw.choice([4.0, 16.0]), "original_max_position_embeddings": draw.choice([16, 32])}
        keys |= {"beta_fast": 4.0, "beta_slow": 1.0} if draw.random() < 0.5 else {}
        keys |= {"attention_factor": 1.2} if draw.random() < 0.3 else {}
    return keys


def sizes(draw, has_head_dim):
    heads, kv_heads = draw.choice(HEADS)
    keys = {
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "hidden_size": heads * draw.choice([6, 8]),
        "intermediate_size": draw.choice([18, 28]),
        "num_hidden_layers": draw.randint(2, 6),
        "vocab_size": draw.choice([64, 97]),
        "rms_norm_eps": draw.choice([1e-6, 1e-5]),
        "tie_word_embeddings": draw.random() < 0.5,
    }
    return keys | ({"head_dim": draw.choice([6, 8, 12])} if has_head_dim else {})


def draw_llama(draw):
    biases = {"attention_bias": draw.random() < 0.5, "mlp_bias": draw.random() < 0.5}
    return sizes(draw, True) | biases | {"rope_parameters": rope(draw, ("default", "llama3"))}


def draw_mistral(draw):
    window = draw.choice([None, window_of(draw)])
    return sizes(draw, True) | {"sliding_window": window, "rope_parameters": rope(draw)}


def draw_ministral(draw):
    keys = sizes(draw, True)
    types = {"layer_types": layers_of(draw, keys["num_hidden_layers"])}
    return keys | types | {"sliding_window": window_of(draw), "rope_parameters": rope(draw)}


def draw_qwen2(draw):
    keys = sizes(draw, False)
    window = {"use_sliding_window": draw.random() < 0.8, "sliding_window": window_of(draw)}
    first_sliding = draw.randint(0, keys["num_hidden_layers"])
    return keys | window | {"max_window_layers": first_sliding, "rope_parameters": rope(draw)}


def draw_qwen3(draw):
    return draw_qwen2(draw) | {"head_dim": draw.choice([6, 8, 12]), "attention_bias": draw.random() < 0.5}


def draw_gemma2(draw):
    return sizes(draw, True) | {
        "attention_bias": draw.random() < 0.3,
        "query_pre_attn_scalar": draw.choice([5, 8, 13]),
        "sliding_window": window_of(draw),
        "attn_logit_softcapping": draw.choice([None, 2.0]),
        "final_logit_softcapping": draw.choice([None, 2.5]),
        "rope_parameters": rope(draw),
    }


def draw_gemma3_text(draw):
    keys = sizes(draw, True)
    if draw.random() < 0.5:
        keys["layer_types"] = layers_of(draw, keys["num_hidden_layers"])
    return keys | {
        "attention_bias": draw.random() < 0.3,
        "query_pre_attn_scalar": draw.choice([5, 8, 13]),
        "sliding_window": window_of(draw),
        "final_logit_softcapping": draw.choice([None, 2.5]),
        "rope_parameters": {"full_attention": rope(draw, ("default", "linear")), "sliding_attention": rope(draw)},
    }


def draw_gemma3(draw):
    # The cap of logits is transformers' only for a model of text: it computes those of text and images without it.
    text = draw_gemma3_text(draw) | {"model_type": "gemma3_text", "final_logit_softcapping": None}
    text["tie_word_embeddings"] = True
    return oracles.IN_AN_IMAGE | {"vision_config": oracles.SIGLIP, "text_config": text}


def draw_olmo2(draw):
    return sizes(draw, False) | {"attention_bias": draw.random() < 0.3, "rope_parameters": rope(draw)}


def draw_olmo3(draw):
    keys = draw_olmo2(draw)
    if draw.random() < 0.5:
        keys["layer_types"] = layers_of(draw, keys["num_hidden_layers"])
    ropes = {"full_attention": rope(draw, ("default", "yarn")), "sliding_attention": rope(draw)}
    return keys | {"sliding_window": window_of(draw), "rope_parameters": ropes}


def draw_smollm3(draw):
    keys = sizes(draw, False)
    if draw.random() < 0.5:
        keys["no_rope_layers"] = layers_of(draw, keys["num_hidden_layers"], (0, 1))
    else:
        keys["no_rope_layer_interval"] = draw.choice([2, 3, 4])
    biases = {"attention_bias": draw.random() < 0.5, "mlp_bias": draw.random() < 0.5}
    window = {"use_sliding_window": draw.random() < 0.5, "sliding_window": window_of(draw)}
    return keys | biases | window | {"rope_parameters": rope(draw)}


def draw_phi3(draw):
    """Contexts before stretching are shorter than the prompt, or longer than all text: transformers changes factors."""
    keys = sizes(draw, False) | {"sliding_window": draw.choice([None, window_of(draw)])}
    if draw.random() < 0.7:
        part = draw.choice([0.5, 0.75, 1.0])
        keys["hidden_size"] = keys["num_attention_heads"] * 8
        pairs = int(8 * part) // 2
        factors = {name: [draw.uniform(1, 4) for _ in range(pairs)] for name in ("short_factor", "long_factor")}
        keys["rope_parameters"] = {
            "rope_type": "longrope",
            "rope_theta": 1e4,
            "partial_rotary_factor": part,
        } | factors
        keys["original_max_position_embeddings"] = draw.choice([8, 128])
        keys["max_position_embeddings"] = 512
    return keys


def draw_granite(draw):
    """Embeddings are not larger than in other families: tied ones would predict themselves."""
    return draw_llama(draw) | {
        "embedding_multiplier": draw.choice([0.5, 0.8, 1.0]),
        "residual_multiplier": draw.choice([0.7, 1.0, 1.5]),
        "attention_multiplier": draw.choice([0.2, 0.5, 1.0]),
        "logits_scaling": draw.choice([0.5, 0.8, 3.0]),
    }


def draw_ministral3(draw):
    yarn = oracles.LLAMA4_YARN | {
        "factor": draw.choice([4.0, 16.0]),
        "original_max_position_embeddings": draw.choice([8, 16, 32]),
        "llama_4_scaling_beta": draw.choice([0.1, 0.5]),
        "mscale_all_dim": draw.choice([0.0, 1.0]),
    }
    return sizes(draw, True) | {"sliding_window": draw.choice([None, window_of(draw)]), "rope_parameters": yarn}


def draw_mistral3(draw):
    kind = draw.choice(["mistral", "ministral3"])
    text = (draw_mistral if kind == "mistral" else draw_ministral3)(draw) | {"model_type": kind}
    whole = {"image_token_index": 63, "spatial_merge_size": 1, "tie_word_embeddings": text["tie_word_embeddings"]}
    return whole | {"vision_config": oracles.PIXTRAL, "text_config": text}


def experts(draw, count="num_experts", width="moe_intermediate_size"):
    """Keys of a mixture; the width of experts may be that of all feed-forward layers."""
    number = draw.choice([3, 5, 8])
    return {count: number, "num_experts_per_tok": draw.randint(1, min(number, 3)), width: draw.choice([10, 16])}


def draw_qwen3_moe(draw):
    keys = sizes(draw, True) | experts(draw)
    layers = keys["num_hidden_layers"]
    if draw.random() < 0.5:
        keys["mlp_only_layers"] = sorted(draw.sample(range(layers), draw.randint(0, layers - 1)))
    else:
        keys["decoder_sparse_step"] = draw.choice([1, 2])
    window = {"use_sliding_window": draw.random() < 0.5, "sliding_window": window_of(draw)}
    return keys | window | {"norm_topk_prob": draw.random() < 0.5, "rope_parameters": rope(draw, ("default", "yarn"))}


def draw_qwen2_moe(draw):
    keys = draw_qwen3_moe(draw) | {"max_window_layers": draw.choice([1, 2, 9]), "qkv_bias": draw.random() < 0.7}
    del keys["head_dim"]
    return keys | {"shared_expert_intermediate_size": draw.choice([9, 14])}


def draw_mixtral(draw):
    keys = sizes(draw, True) | experts(draw, "num_local_experts", "intermediate_size")
    return keys | {"sliding_window": draw.choice([None, window_of(draw)]), "rope_parameters": rope(draw)}


def draw_olmoe(draw):
    keys = sizes(draw, False) | experts(draw, "num_experts", "intermediate_size")
    return keys | {"attention_bias": draw.random() < 0.3, "norm_topk_prob": draw.random() < 0.5}


def draw_granitemoe(draw):
    keys = draw_granite(draw) | experts(draw, "num_local_experts", "intermediate_size")
    del keys["mlp_bias"]
    return keys


def draw_gpt_oss(draw):
    keys = sizes(draw, True) | experts(draw, "num_local_experts", "intermediate_size")
    if draw.random() < 0.5:
        keys["layer_types"] = layers_of(draw, keys["num_hidden_layers"])
    keys["attention_bias"] = draw.random() < 0.7
    clamped = {"swiglu_limit": draw.choice([0.5, 7.0]), "swiglu_alpha": draw.choice([1.0, 1.702])}
    yarn = rope(draw, ("yarn",)) | {"truncate": draw.random() < 0.5}
    return keys | clamped | {"sliding_window": window_of(draw), "rope_parameters": yarn}


def draw_glm4_moe(draw):
    keys = sizes(draw, True) | experts(draw, "n_routed_experts") | {"head_dim": draw.choice([8, 12])}
    keys["first_k_dense_replace"] = draw.randint(0, keys["num_hidden_layers"] - 1)
    switches = {"use_qk_norm": draw.random() < 0.5, "attention_bias": draw.random() < 0.5}
    shared = {"n_shared_experts": draw.choice([1, 2]), "routed_scaling_factor": draw.choice([1.0, 2.5])}
    position = rope(draw) | {"partial_rotary_factor": draw.choice([0.5, 1.0])}
    return keys | switches | shared | {"norm_topk_prob": draw.random() < 0.7, "rope_parameters": position}


FAMILIES = {
    "qwen3_moe": draw_qwen3_moe,
    "qwen2_moe": draw_qwen2_moe,
    "mixtral": draw_mixtral,
    "granitemoe": draw_granitemoe,
    "olmoe": draw_olmoe,
    "glm4_moe": draw_glm4_moe,
    "gpt_oss": draw_gpt_oss,
    "llama": draw_llama,
    "mistral": draw_mistral,
    "ministral": draw_ministral,
    "qwen2": draw_qwen2,
    "qwen3": draw_qwen3,
    "gemma2": draw_gemma2,
    "gemma3_text": draw_gemma3_text,
    "gemma3": draw_gemma3,
    "olmo2": draw_olmo2,
    "olmo3": draw_olmo3,
    "smollm3": draw_smollm3,
    "phi3": draw_phi3,
    "granite": draw_granite,
    "ministral3": draw_ministral3,
    "mistral3": draw_mistral3,
}


def test_every_family_is_drawn():
    assert set(FAMILIES) == {*families.FAMILIES, *families.WRAPPERS}


def close(found, wanted, family, check, limit):
    """Assert that two arrays are equal but for `limit`, and note the difference."""
    difference = float(np.abs(np.asarray(found, np.float64) - np.asarray(wanted, np.float64)).max())
    noted = LARGEST.setdefault(family, {})
    noted[check] = max(noted.get(check, 0.0), difference)
    assert difference <= limit, f"{check}: {difference}"


LARGEST: dict[str, dict[str, float]] = {}
"""Largest differences, by family and check."""


@pytest.fixture(scope="module", autouse=True)
def table(request):
    """Prints the largest differences when all tests have run."""
    yield
    checks = sorted({check for noted in LARGEST.values() for check in noted})
    lines = ["", "largest differences".ljust(20) + "".join(check.rjust(18) for check in checks)]
    for family, noted in LARGEST.items():
        numbers = (f"{noted[check]:.1e}" if check in noted else "-" for check in checks)
        lines.append(family.ljust(20) + "".join(number.rjust(18) for number in numbers))
    with request.config.pluginmanager.getplugin("capturemanager").global_and_fixture_disabled():
        print("\n".join(lines))


@partial(jax.jit, static_argnums=0)
def our_logits(model, params, tokens):
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    return model.unembed(params, model.apply(params, tokens, positions)[0])


@partial(jax.jit, static_argnums=0)
def our_logprobs(model, params, tokens):
    return token_logprobs(model, params, tokens, temperature=jnp.ones(tokens.shape)).logprobs


@torch.no_grad()
def their_logits(model, tokens):
    return model(torch.from_numpy(tokens), use_cache=False).logits.float().numpy()


def completions(model, params, requests):
    """The completions of an engine, all at once."""
    layout, device = model.decode_layout(params), DeviceThread()
    length = max(len(request.prompt_ids) + request.max_tokens for request in requests)
    engine = Engine(
        model,
        device,
        lambda: (layout, 0),
        seed=0,
        slots=len(requests),
        max_context_tokens=length,
        shapes=params,
    )

    async def submit():
        async with asyncio.timeout(120):
            return await asyncio.gather(*(engine.submit(request) for request in requests))

    try:
        return asyncio.run(submit())
    finally:
        device.close()


def tensors(folder):
    """Names, dtypes and shapes of the tensors of a folder."""
    found = {}
    for file in folder.glob("*.safetensors"):
        with safe_open(file, "np") as opened:
            for name in opened.keys():  # noqa: SIM118
                cut = opened.get_slice(name)
                found[name] = cut.get_dtype(), tuple(cut.get_shape())
    return found


def make_checkpoint(family, number, folder):
    """Write a drawn checkpoint by transformers, and return its model, tokens, a prompt, and its greedy continuation."""
    draw = random.Random(f"{family} {number}")
    model = oracles.make_model(oracles.make_config(FAMILIES[family](draw) | {"model_type": family}))
    prompt = oracles.text_tokens(model, number, (1, PROMPT_TOKENS))
    for seed in range(30):
        oracles.randomise(model, 100 * number + seed)
        text, margin = oracles.greedy(model, prompt, NEW_TOKENS)
        if margin > 2e-3 and len(set(text.tolist())) >= 6:
            break
    assert margin > 1e-3
    model.save_pretrained(folder)
    tokens = oracles.text_tokens(model, number + 1, (2, LENGTH)).numpy().astype(np.int64)
    return model, tokens, prompt[0].tolist(), text.tolist()


@pytest.mark.parametrize("number", range(DRAWS))
@pytest.mark.parametrize("family", FAMILIES)
def test_both_sides_compute_the_same(family, number, tmp_path):
    theirs, tokens, prompt, text = make_checkpoint(family, number, tmp_path / "theirs")
    wanted = their_logits(theirs, tokens)
    model, params = load_model(tmp_path / "theirs")
    close(our_logits(model, params, tokens), wanted, family, "logits", 1e-4)

    greedy = Request(tuple(prompt), (0,) * 6, NEW_TOKENS, temperature=0.0)
    sampled = Request(tuple(prompt), (1,) * 6, NEW_TOKENS)
    first, second = completions(model, params, [greedy, sampled])
    assert first.token_ids == text
    for each in (first, second):
        scored = our_logprobs(model, params, jnp.array([prompt + each.token_ids]))[0, len(prompt) :]
        close(each.sampler_logprobs, scored, family, "sampler, trainer", 2e-5)

    save_model(tmp_path / "ours", model, params)
    again = oracles.load(tmp_path / "ours")  # raises if a tensor is missing or not expected
    close(their_logits(again, tokens), wanted, family, "exported", 1e-6)
    again.save_pretrained(tmp_path / "again")
    assert tensors(tmp_path / "ours") == tensors(tmp_path / "again")
    if "vision_config" not in theirs.config.to_dict():
        assert tensors(tmp_path / "ours") == tensors(tmp_path / "theirs")


# PEFT 0.21 reads names by expert of the families that are like Qwen2-MoE, but leaves that one itself out of its table.
conversion._MODEL_TO_CONVERSION_PATTERN.setdefault("qwen2_moe", "qwen2_moe")

PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
FUSED = ["qkv_proj", "o_proj", "gate_up_proj", "down_proj"]
"""Projections of jaxft, and those of Phi-3 in transformers."""


def expert_parameters(theirs):
    """Names of the parameters that hold a layer's experts; none without."""
    names = {name.split("layers.")[1].split(".", 1)[1] for name, _ in theirs.named_parameters() if ".experts." in name}
    return sorted(name for name in names if name.endswith(("gate_up_proj", "down_proj"))) or None


def make_theirs(base, targets, folder, parameters=None):
    """Save random adapters of PEFT's for a folder, and return the logits with them as a function of tokens."""
    keys = {"target_modules": targets, "target_parameters": parameters, "task_type": "CAUSAL_LM"}
    config = peft.LoraConfig(r=LORA_RANK, lora_alpha=LORA_ALPHA, **keys)
    made = peft.get_peft_model(oracles.load(base), config).eval()
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            if "lora_" in name:
                parameter.normal_(std=0.15)
    made.save_pretrained(folder)
    return partial(their_logits, made)


@pytest.mark.parametrize("number", range(min(DRAWS, 2)))
@pytest.mark.parametrize("family", FAMILIES)
def test_adapters_go_both_ways(family, number, tmp_path):
    """Adapters on a model of text, as jaxft exports it."""
    theirs, tokens, _, _ = make_checkpoint(family, number, tmp_path / "theirs")
    plain = their_logits(theirs, tokens)
    save_model(tmp_path / "base", *load_model(tmp_path / "theirs"))
    targets = FUSED if family == "phi3" else [*PROJECTIONS]
    if parameters := expert_parameters(theirs):
        targets = [*PROJECTIONS[:4]]
    with_adapters = make_theirs(tmp_path / "base", targets, tmp_path / "of_peft", parameters)(tokens)
    assert np.abs(with_adapters - plain).max() > 0.01
    model, params = load_model(tmp_path / "base", lora=tmp_path / "of_peft")
    close(our_logits(model, params, tokens), with_adapters, family, "adapter of PEFT", 1e-4)

    # PEFT 0.21 drops adapters of the feed-forward layers beside experts, whose modules have the same names.
    spec = LoraSpec(LORA_RANK, LORA_ALPHA, ("self_attn/*", "experts/*") if parameters else PROJECTIONS)
    model, params = load_model(tmp_path / "base", lora=spec, key=jax.random.key(number))
    noise = np.random.default_rng(number)
    fresh = jax.tree.map(lambda leaf: jnp.float32(0.15 * noise.standard_normal(leaf.shape)), params["adapter"])
    params = params | {"adapter": fresh}
    save_adapter(tmp_path / "of_jaxft", model, params, base=str(tmp_path / "base"))
    loaded = peft.PeftModel.from_pretrained(oracles.load(tmp_path / "base"), tmp_path / "of_jaxft").eval()
    close(our_logits(model, params, tokens), their_logits(loaded, tokens), family, "adapter of jaxft", 1e-4)


@pytest.mark.parametrize("targets", [["qkv_proj"], ["gate_up_proj"]])
def test_adapters_of_fused_projections(targets, tmp_path):
    """PEFT has one adapter for `qkv_proj`: queries, keys and values share `lora_A`, and each has rows of `lora_B`."""
    _, tokens, _, _ = make_checkpoint("phi3", 0, tmp_path / "theirs")
    wanted = make_theirs(tmp_path / "theirs", targets, tmp_path / "of_peft")(tokens)
    model, params = load_model(tmp_path / "theirs", lora=tmp_path / "of_peft")
    close(our_logits(model, params, tokens), wanted, "phi3", "fused adapter", 1e-4)


@pytest.mark.parametrize("family", ["gemma3", "mistral3"])
def test_adapters_of_models_of_text_and_images(family, tmp_path):
    """PEFT's names hold the path of the model of text: `base_model.model.model.language_model.layers`."""
    _, tokens, _, _ = make_checkpoint(family, 0, tmp_path / "theirs")
    pattern = r".*language_model\..*\.(q|k|v|o|gate|up|down)_proj"
    wanted = make_theirs(tmp_path / "theirs", pattern, tmp_path / "of_peft")(tokens)
    model, params = load_model(tmp_path / "theirs", lora=tmp_path / "of_peft")
    close(our_logits(model, params, tokens), wanted, family, "adapter of PEFT", 1e-4)
