"""`config.json` in the formats of transformers 4 and 5: defaults, unsupported values, and the export."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from transformers import AutoConfig

from jaxft.errors import ModelFileError
from jaxft.models.config import PRESETS, LayerKind
from jaxft.models.families import FAMILIES
from jaxft.models.hf_config import accepted_keys, config_json, decoder_config, load_config, source_files
from jaxft.models.rope import LinearScaling, Llama3Scaling, LongRopeScaling, Rope, YarnScaling

DATA = Path(__file__).parents[1] / "data" / "hf"
SIZES = {
    "vocab_size": 128,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
LLAMA31 = Llama3Scaling(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=64)
LLAMA31_V4 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}

tiny = {
    family: decoder_config({"model_type": family, **SIZES} | ({"sliding_window": None} if "stral" in family else {}))
    for family in FAMILIES
}


def sliding(family, window, *kinds):
    """A tiny config whose layers have the window where a letter is s."""
    pattern = [LayerKind(window if letter == "s" else None, tiny[family].pattern[0].rope) for letter in kinds or "s"]
    return replace(tiny[family], pattern=tuple(pattern))


def turning(family, *ropes):
    """A tiny config whose layers have these rotary positions in turn."""
    return replace(tiny[family], pattern=tuple(LayerKind(None, rope) for rope in ropes))


def turning_experts(family, window, *kinds):
    """A tiny config whose layers are mixtures where a letter is e, all with the window."""
    pattern = [LayerKind(window, tiny[family].pattern[0].rope, letter == "e") for letter in kinds]
    return replace(tiny[family], pattern=tuple(pattern))


LOCAL, GLOBAL = LayerKind(8, Rope(1e4)), LayerKind(None, Rope(1e6, LinearScaling(8.0)))
YARN = LayerKind(None, Rope(5e5, YarnScaling(8.0, 64)))
LONG = LongRopeScaling((1.0, 1.5, 2.0), (2.0, 3.0, 4.0), 64, 4.0)
FEATURES = {
    "llama biases": replace(tiny["llama"], qkv_bias=True, output_bias=True, mlp_bias=True, head_dim=16),
    "llama 3.1": replace(turning("llama", Rope(5e5, LLAMA31)), tie_word_embeddings=True),
    "mistral": tiny["mistral"],
    "mistral window": replace(sliding("mistral", 16), max_position_embeddings=99),
    "qwen2": replace(tiny["qwen2"], rms_norm_eps=1e-5),
    "qwen2 window": sliding("qwen2", 5),
    "qwen2 some windows": sliding("qwen2", 5, *"fss"),
    "qwen3": tiny["qwen3"],
    "qwen3 biases, window": replace(sliding("qwen3", 5), qkv_bias=True, output_bias=True),
    "qwen3_moe": replace(tiny["qwen3_moe"], num_experts=6, num_experts_per_tok=3, norm_topk_prob=True),
    "qwen2_moe": replace(tiny["qwen2_moe"], shared_expert_intermediate_size=40, qkv_bias=False),
    "mixtral": tiny["mixtral"],
    "granitemoe": replace(tiny["granitemoe"], residual_scale=0.22, moe_intermediate_size=64),
    "gpt_oss": replace(tiny["gpt_oss"], swiglu_limit=5.0),
    "olmoe": replace(tiny["olmoe"], norm_topk_prob=True),
    "glm4_moe": replace(tiny["glm4_moe"], num_shared_experts=2, qk_norm="heads"),
    "qwen3_moe some layers": turning_experts("qwen3_moe", 5, *"dee"),
    "llama linear": turning("llama", Rope(1e4, LinearScaling(4.0))),
    "llama yarn": turning("llama", Rope(1e4, YarnScaling(4.0, 64, 16.0, 2.0, 1.5))),
    "ministral": sliding("ministral", 5, *"sfs"),
    "ministral3": turning("ministral3", Rope(1e6, YarnScaling(16.0, 64, mscale=1.0, mscale_all_dim=1.0), 1.0, 0.1)),
    "gemma2": replace(sliding("gemma2", 5, *"sf"), attention_scale=0.5, attention_soft_cap=9.0, logit_soft_cap=None),
    "gemma3 no windows": turning("gemma3_text", Rope(1e6)),
    "gemma3": replace(tiny["gemma3_text"], pattern=(LOCAL, LOCAL, GLOBAL), activation="silu"),
    "olmo2": replace(tiny["olmo2"], qkv_bias=True, output_bias=True),
    "olmo3": replace(tiny["olmo3"], pattern=(LayerKind(8, Rope(5e5)), YARN)),
    "smollm3": replace(turning("smollm3", Rope(2e6), None), mlp_bias=True),
    "smollm3 window": replace(tiny["smollm3"], pattern=(LayerKind(5, None), LayerKind(None, Rope(2e6)))),
    "phi3": sliding("phi3", 5),
    "phi4-mini": replace(turning("phi3", Rope(1e4, LONG, 0.75)), max_position_embeddings=256),
    "granite": replace(
        tiny["granite"], embedding_scale=12.0, residual_scale=0.22, attention_scale=0.5, logit_scale=1 / 6
    ),
}


def read(family="llama", **keys):
    return decoder_config({"model_type": family, **SIZES, **keys})


def windows(config):
    return [kind.window for kind in config.kinds]


def test_versions_4_and_5_describe_the_same_model():
    config, older = (load_config(DATA / name / "config.json") for name in ("llama31-rope", "llama31-rope-v4"))
    assert config.architecture == older.architecture
    assert config.pattern[0].rope.scaling == LLAMA31


@pytest.mark.parametrize("config", [*PRESETS.values(), *FEATURES.values()], ids=[*PRESETS, *FEATURES])
def test_config_survives_the_file(config):
    written = json.loads(json.dumps(config_json(config, "bfloat16")))
    assert decoder_config(written) == config
    version_4 = {key: value for key, value in written.items() if key not in ("rope_parameters", "dtype")}
    assert decoder_config(version_4) == config
    version_5 = {key: value for key, value in written.items() if key not in ("rope_scaling", "rope_theta")}
    assert decoder_config(version_5) == config


@pytest.mark.oracle
@pytest.mark.parametrize("config", FEATURES.values(), ids=FEATURES)
def test_transformers_reads_what_we_write(config, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(config_json(config, "float32")))
    theirs = AutoConfig.from_pretrained(tmp_path)
    assert theirs.architectures == [type(theirs).__name__.removesuffix("Config").removesuffix("Text") + "ForCausalLM"]
    assert (theirs.num_key_value_heads, theirs.head_dim) == (config.num_kv_heads, config.head_dim)
    assert (theirs.hidden_size, theirs.intermediate_size) == (config.hidden_size, config.intermediate_size)
    assert (theirs.rms_norm_eps, theirs.tie_word_embeddings) == (config.rms_norm_eps, config.tie_word_embeddings)
    if FAMILIES[config.family].lists_types:
        assert theirs.layer_types == ["sliding_attention" if window else "full_attention" for window in windows(config)]
    # The file that transformers writes in turn, with its defaults filled in, describes the same model.
    assert decoder_config(theirs.to_dict()) == config


@pytest.mark.oracle
@pytest.mark.parametrize("family", FAMILIES)
def test_absent_keys_mean_what_they_mean_to_transformers(family):
    theirs = AutoConfig.for_model(family).to_dict()
    sizes = {key: theirs[key] for key in SIZES if key != "num_key_value_heads"}
    assert decoder_config({"model_type": family, **sizes}) == decoder_config(theirs)


def test_defaults_that_depend_on_other_keys():
    assert read("llama").head_dim == 8
    assert read("llama", num_key_value_heads=None).num_kv_heads == 4
    assert read("qwen3").head_dim == 128
    assert windows(read("mistral")) == [4096] * 3
    assert windows(read("mistral", sliding_window=None)) == [None] * 3
    assert windows(read("qwen2", use_sliding_window=True, sliding_window=7, max_window_layers=0)) == [7] * 3
    assert windows(read("qwen2", use_sliding_window=True, sliding_window=7, max_window_layers=1)) == [None, 7, 7]
    assert windows(read("qwen2", use_sliding_window=True, sliding_window=7, max_window_layers=3)) == [None] * 3
    assert windows(read("qwen2", sliding_window=7, max_window_layers=0)) == [None] * 3
    assert windows(read("gemma2")) == [4096, None, 4096]
    assert windows(read("gemma3_text", sliding_window_pattern=3)) == [4096, 4096, None]
    for family in ("gemma2", "gemma3_text"):
        types = [f"{kind}_attention" for kind in ("full", "full", "sliding")]
        assert windows(read(family, layer_types=types)) == [None, None, 4096]
    assert read("gemma2", hidden_size=36).embedding_scale == 6
    assert read("llama", rope_scaling={"type": "llama3", **LLAMA31_V4}).pattern[0].rope.scaling == LLAMA31
    old = {"type" if key == "rope_type" else key: value for key, value in LLAMA31_V4.items()}
    assert read("llama", rope_scaling=old, rope_theta=5e5).pattern[0].rope == Rope(5e5, LLAMA31)


def without(key):
    return {name: value for name, value in LLAMA31_V4.items() if name != key}


@pytest.mark.parametrize(
    ("family", "keys", "message"),
    [
        ("gpt2", {}, "config.json: model_type is 'gpt2'; supported are llama, mistral, ministral, ministral3, qwen2"),
        (None, {}, "model_type is None; supported are llama"),
        ("llama", {"hidden_act": "relu"}, "hidden_act is 'relu'; wanted one of 'silu', 'gelu', 'gelu_pytorch_tanh'"),
        ("llama", {"vocab_size": None}, "vocab_size is None; wanted a whole number of at least 1"),
        ("llama", {"hidden_size": "64"}, "hidden_size is '64'; wanted a whole number"),
        ("llama", {"num_hidden_layers": 0}, "num_hidden_layers is 0; wanted a whole number of at least 1"),
        ("llama", {"num_hidden_layers": True}, "num_hidden_layers is True"),
        ("llama", {"num_attention_heads": 5}, "hidden_size 32 does not divide over 5 heads, and there is no head_dim"),
        ("llama", {"num_key_value_heads": 3}, "config.json: num_heads 4 is not a multiple of num_kv_heads 3"),
        ("llama", {"attention_bias": None}, "attention_bias is None; wanted true or false"),
        ("llama", {"rms_norm_eps": -1}, "rms_norm_eps is -1; wanted a number above 0"),
        (
            "llama",
            {"quantization_config": {"quant_method": "awq"}},
            "quant_method 'awq'; wanted 'mxfp4' or unquantised",
        ),
        ("mixtral", {"hidden_act": "relu"}, "hidden_act is 'relu'; wanted one of 'silu', 'gelu', 'gelu_pytorch_tanh'"),
        ("mixtral", {"num_experts_per_tok": 9}, "num_experts_per_tok is 9; wanted 1 to 8, the num_experts"),
        ("qwen3_moe", {"mlp_only_layers": [3]}, r"mlp_only_layers is \[3\]; wanted a list of layers, each below 3"),
        (
            "llama",
            {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}},
            "rope_type is 'dynamic'; supported are 'default', 'llama3', 'linear', 'yarn', 'longrope'",
        ),
        ("llama", {"rope_scaling": {"type": "linear"}}, "factor is absent; wanted a number above 0"),
        ("llama", {"rope_scaling": "llama3"}, "rope_scaling is 'llama3'; wanted an object or null"),
        ("llama", {"rope_scaling": without("factor")}, "factor is absent; wanted a number above 0"),
        (
            "llama",
            {"rope_scaling": without("original_max_position_embeddings")},
            "original_max_position_embeddings is absent; wanted a whole number",
        ),
        ("llama", {"rope_parameters": {"mrope_section": [1]}}, r"rotary parameters hold \['mrope_section'\]"),
        ("llama", {"rope_theta": 1e4, "rope_parameters": {"rope_theta": 1e6}}, "rope_theta has several values"),
        ("llama", {"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5; wanted 1"),
        ("mistral", {"sliding_window": 0}, "sliding_window is 0; wanted a whole number of at least 1"),
        ("mistral", {"layer_types": ["full_attention"] * 3}, "wanted only 'sliding_attention'"),
        (
            "llama",
            {"sliding_window": 8},
            "the meaning of sliding_window = 8 is not known for a llama; if it changes no",
        ),
        (
            "llama",
            {"rope_interleaved": True, "a": 1, "b": None},
            r'rope_interleaved = true, a = 1 is.*_interleaved", "a"',
        ),
        ("llama", {"is_causal": False}, "is_causal is False; wanted true, the only value supported"),
        ("llama", {"embedding_multiplier": 12.0}, "embedding_multiplier = 12.0 is not known for a llama"),
        ("llama", {"rope_parameters": {"llama_4_scaling_beta": 0.1}}, r"parameters hold \['llama_4_scaling_beta'\]"),
        ("qwen2", {"use_mrope": True}, "use_mrope is True; wanted false, the only value supported"),
        ("gemma3_text", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping is 50.0; wanted null, the only"),
        ("gemma2", {"use_bidirectional_attention": True}, "use_bidirectional_attention is True; wanted false"),
        ("olmo3", {"rope_parameters": {"rope_theta": 1e4}}, "wanted an object with 'full_attention' and"),
        ("smollm3", {"no_rope_layers": [1, 0]}, r"no_rope_layers is \[1, 0\]; wanted a list of 3, each 0 or 1"),
        ("phi3", {"attention_bias": True}, "attention_bias is True; wanted false, the only value supported"),
        ("phi3", {"rope_scaling": {"type": "longrope", "long_factor": [1.0]}}, "short_factor is absent; wanted a list"),
        (
            "phi3",
            {"rope_scaling": {"type": "su", "long_factor": [1.0] * 4, "short_factor": [1.0]}},
            "config.json: short_factor has 1 numbers; wanted 4",
        ),
        ("gemma3", {}, "model_type is 'gemma3', and there is no text_config"),
        ("qwen3", {"layer_types": ["sliding_attention"] * 3}, "'full_attention' only, as there is no sliding_window"),
        ("qwen3", {"layer_types": ["full_attention"] * 2}, "wanted a list of 3, each 'full_attention' or"),
        ("qwen3", {"layer_types": ["linear_attention"] * 3}, "wanted a list of 3, each 'full_attention' or"),
    ],
)
def test_what_the_decoder_is_not_is_refused(family, keys, message):
    with pytest.raises(ModelFileError, match=message):
        read(family, **keys)


@pytest.mark.parametrize("key", [key for key in SIZES if key != "num_key_value_heads"])
def test_sizes_have_no_default(key):
    sizes = {name: value for name, value in SIZES.items() if name != key}
    with pytest.raises(ModelFileError, match=f"config.json: {key} is absent; wanted a whole number"):
        decoder_config({"model_type": "llama", **sizes})


def test_a_family_that_cannot_say_it_is_refused():
    with pytest.raises(ModelFileError, match=r"mistral .*qkv_bias=True, mlp_bias=True"):
        config_json(replace(tiny["mistral"], qkv_bias=True, mlp_bias=True), "float32")
    with pytest.raises(ModelFileError, match=r"llama .*LayerKind\(window=4"):
        config_json(sliding("llama", 4), "float32")


def test_unreadable_files_are_named(tmp_path):
    file = tmp_path / "config.json"
    with pytest.raises(ModelFileError, match=r"config.json does not exist; a model folder needs one"):
        load_config(file)
    file.write_text("{")
    with pytest.raises(ModelFileError, match=r"config.json is not valid JSON"):
        load_config(file)
    file.write_bytes(b"\xff\xfe")
    with pytest.raises(ModelFileError, match=r"config.json is not valid JSON"):
        load_config(file)
    file.write_text("[]")
    with pytest.raises(ModelFileError, match=r"config.json holds a list; wanted a JSON object"):
        load_config(file)


@pytest.mark.parametrize(
    ("family", "keys", "longest"),
    [
        ("llama", {}, 4096),
        ("llama", {"rope_scaling": {"rope_type": "linear", "factor": 4.0}}, 4 * 4096),
        (
            "qwen2",
            {"rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096}},
            4 * 4096,
        ),
        ("qwen2", {"rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}}, 4096),
        ("llama", {"rope_scaling": LLAMA31_V4}, 4096),
        ("smollm3", {}, 4096),  # some of whose layers have no positions
        ("gemma3_text", {"rope_scaling": {"rope_type": "linear", "factor": 8.0}}, 4096),  # positions of two kinds
        ("mistral", {"sliding_window": 8}, 4096),
    ],
)
def test_contexts_beyond_those_of_the_positions_are_refused(family, keys, longest):
    config = read(family, max_position_embeddings=4096, **keys)
    assert config.for_context(longest) == config
    with pytest.raises(ValueError, match=f"is {longest + 1}, .* at most {longest} tokens"):
        config.for_context(longest + 1)


PUBLISHED = [json.loads(line) for line in (DATA.parent / "published_configs.jsonl").read_text().splitlines()]
"""Keys and values of `config.json` files of public models, as far as they tell their kind: without parts for images,
and with made-up factors of LongRoPE."""

REFUSED = {
    "Alibaba-NLP/gte-Qwen2-7B-instruct": "is_causal",
    "google/embeddinggemma-300m": "use_bidirectional_attention",
    "Qwen/Qwen2.5-7B-Instruct-1M": "dual_chunk_attention_config",
    "Qwen/Qwen3-8B-FP8": "quantization_config",
    "Qwen/Qwen3-32B-FP8": "quantization_config",
    "meta-llama/Llama-3.1-405B-Instruct-FP8": "quantization_config",
    "mistralai/Devstral-2-123B-Instruct": "quantization_config",
    "mistralai/Devstral-Small-2-24B-Instruct": "quantization_config",
}
"""The key for which a published config is refused; all others are read."""


@pytest.mark.parametrize("published", PUBLISHED, ids=lambda published: published["name"])
def test_published_files_are_read_or_refused_by_name(published):
    values = {key: value for key, value in published.items() if key != "name"}
    if (key := REFUSED.get(published["name"])) is not None:
        with pytest.raises(ModelFileError, match=key):
            decoder_config(values)
        return
    config, text = decoder_config(values), values.get("text_config", values)
    assert config.hidden_size == text["hidden_size"] and config.num_layers == text["num_hidden_layers"]
    assert config.pattern[0].rope.theta == text.get("rope_local_base_freq", text.get("rope_theta", 1e4))
    assert decoder_config(config_json(config, "bfloat16")) == config


def test_published_files_leave_much_to_defaults():
    read = {each["name"]: decoder_config({**each, "name": None}) for each in PUBLISHED if each["name"] not in REFUSED}
    gemma, phi = read["google/gemma-3-4b-it"], read["microsoft/Phi-4-mini-instruct"]
    assert (gemma.num_heads, gemma.num_kv_heads, gemma.head_dim, gemma.vocab_size) == (8, 4, 256, 262208)
    assert windows(gemma)[:6] == [1024] * 5 + [None]
    assert gemma.pattern[5].rope == Rope(1e6, LinearScaling(8.0))
    assert phi.head_dim == 128 and len(phi.pattern[0].rope.scaling.short_factor) == 48
    assert phi != phi.for_context(8192)


def test_there_are_published_files_of_every_family():
    assert len(PUBLISHED) >= 60
    read = {each["model_type"] for each in PUBLISHED if each["name"] not in REFUSED}
    assert read == FAMILIES.keys() - {"ministral", "ministral3"} | {"gemma3"}  # public ones of these two are quantised


def test_keys_that_are_not_known_can_be_accepted_by_name(tmp_path):
    """An export has none of them, as it would be refused in turn."""
    file, keys = tmp_path / "config.json", {"trained_by": "us", "revision_of_ours": 3}
    file.write_text(json.dumps({"model_type": "llama", **SIZES, **keys, "eos_token_id": 7}))
    with pytest.raises(ModelFileError, match='trained_by = "us", revision_of_ours = 3 is not known'):
        load_config(file)
    with pytest.raises(ModelFileError, match="revision_of_ours = 3 is not known"):
        load_config(file, ["trained_by"])
    config = load_config(file, [*keys, "not_there", "hidden_size"])
    assert config.architecture == tiny["llama"].architecture
    assert accepted_keys(config) == (
        "hidden_size",
        "revision_of_ours",
        "trained_by",
    )  # a known key is read all the same
    assert accepted_keys(tiny["llama"]) == ()
    assert source_files(config)["config.json"] == {"eos_token_id": 7}
