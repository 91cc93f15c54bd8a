"""Small GGUF files, written from folders in Hugging Face's format as the converter of llama.cpp writes them."""

import json

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Type
from safetensors.numpy import load_file
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel as SplitBytes

ARCHITECTURES = {"gemma3_text": "gemma3"}
"""Names of architectures in GGUF where they differ from the `model_type`."""

WHOLE = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
PARTS = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}
GEMMA = {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
NUMBERS = {
    "max_position_embeddings": "context_length",
    "num_hidden_layers": "block_count",
    "intermediate_size": "feed_forward_length",
    "hidden_size": "embedding_length",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "vocab_size": "vocab_size",
}
GEMMA_NUMBERS = {
    "sliding_window": "attention.sliding_window",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
}
MERGES = ("Ġ Ġ", "Ġ t", "h e", "Ġt he", "i n")
CONTROLS = ("<|end|>", "<|im_start|>", "<|im_end|>")
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def byte_tokens():
    """Tokens of bytes, of merges, and of control, in the order of their ids."""
    return [*sorted(SplitBytes.alphabet()), *(merge.replace(" ", "") for merge in MERGES), *CONTROLS]


def byte_tokenizer():
    """The tokenizer that the metadata of `write_gguf` describes, made by the package `tokenizers` alone."""
    ids = {token: index for index, token in enumerate(byte_tokens())}
    made = Tokenizer(BPE(ids, [tuple(merge.split(" ")) for merge in MERGES]))
    made.pre_tokenizer, made.decoder = SplitBytes(add_prefix_space=False), ByteLevel()
    made.add_special_tokens(list(CONTROLS))
    return made


def gguf_name(name, architecture):
    """Return the name that the converter of llama.cpp gives to a tensor."""
    stem, _, suffix = name.rpartition(".")
    if stem in WHOLE:
        return f"{WHOLE[stem]}.{suffix}"
    _, _, layer, part = stem.split(".", 3)
    parts = PARTS | (GEMMA if architecture.startswith("gemma") else {})
    return f"blk.{layer}.{parts[part]}.{suffix}"


def converted(name, values, config):
    """Return the values as a GGUF has them: Llama's pairs beside each other, and Gemma's norms with one more."""
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    part = name.split(".")[-2]
    if config["model_type"] == "llama" and part in heads:
        return values.reshape(heads[part], 2, -1, *values.shape[1:]).swapaxes(1, 2).reshape(values.shape)
    return values + np.float32(1) if config["model_type"].startswith("gemma") and "norm" in name else values


def write_gguf(file, folder, *, types=(), metadata=None, without=(), has_tokenizer=True, extra=None):
    """Write the model of a folder as a GGUF file, and return the values of its tensors, by their names in the folder.

    Args:
        types: pairs of a part of a tensor's name in GGUF and its type; the first that fits counts, else it is float32.
            Of a type that the package cannot quantise to, the blocks are random.
        metadata: keys that are added or replaced.
        without: keys and names of tensors to leave out.
        extra: further tensors.
    """
    config = json.loads((folder / "config.json").read_text())
    stored = load_file(folder / "model.safetensors")
    architecture = ARCHITECTURES.get(config["model_type"], config["model_type"])
    writer = gguf.GGUFWriter(file, architecture)
    keys = NUMBERS | (GEMMA_NUMBERS if architecture.startswith("gemma") else {})
    values = {f"{architecture}.{theirs}": config[ours] for ours, theirs in keys.items() if config.get(ours)}
    values[f"{architecture}.attention.layer_norm_rms_epsilon"] = config["rms_norm_eps"]
    theta = config.get("rope_theta") or config["rope_parameters"].get("rope_theta")
    values[f"{architecture}.rope.freq_base"] = theta or config["rope_parameters"]["full_attention"]["rope_theta"]
    if has_tokenizer:
        add_tokenizer(writer)
    for key, value in (values | (metadata or {})).items():  # the last of two counts
        if key not in without:
            add_value(writer, key, value)
    noise, read = np.random.default_rng(0), {}
    for name, tensor in stored.items():
        theirs = gguf_name(name, architecture)
        kind = next((kind for part, kind in types if part in theirs), Type.F32)
        data, read[name] = quantised(converted(name, tensor.astype(np.float32), config), kind, noise)
        if theirs not in without:
            writer.add_tensor(theirs, data, raw_dtype=None if kind in (Type.F32, Type.F16) else kind)
    for name, data in (extra or {}).items():
        writer.add_tensor(name, data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return read


def add_value(writer, key, value):
    """Add a key of metadata by the type of its value in Python."""
    add = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
    add.get(type(value), writer.add_array)(key, value)


def add_tokenizer(writer):
    """Add the tokenizer of bytes."""
    tokens = byte_tokens()
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([3 if token in CONTROLS else 1 for token in tokens])
    writer.add_token_merges(list(MERGES))
    writer.add_eos_token_id(tokens.index("<|im_end|>"))
    writer.add_bos_token_id(tokens.index("<|im_start|>"))
    writer.add_pad_token_id(tokens.index("<|end|>"))
    writer.add_chat_template(TEMPLATE)


def quantised(values, kind, noise):
    """Return the data of a type and its values in float32."""
    if kind in (Type.F32, Type.F16):
        data = values.astype(np.float32 if kind == Type.F32 else np.float16)
        return data, data.astype(np.float32)
    try:
        data = gguf.quants.quantize(values, kind)
    except NotImplementedError:  # blocks of bytes whose scales, 16 bits wide, are finite and small
        block, size = gguf.GGML_QUANT_SIZES[kind]
        data = noise.integers(0, 0x2C, (*values.shape[:-1], values.shape[-1] // block * size), np.uint8)
    return data, gguf.quants.dequantize(data, kind)
