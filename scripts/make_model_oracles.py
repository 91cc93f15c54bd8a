"""Make tiny random checkpoints of every family of models, with what transformers computes from them.

    python scripts/make_model_oracles.py                    # all cases, into tests/data/hf
    python scripts/make_model_oracles.py gemma2 phi3        # only these

It needs torch 2.13.0 and transformers 5.23.0, takes about three minutes on two cores, and uses no downloaded weights. A
case is a folder with `config.json`, the weights, and `expected.npz`:

    input_ids, attention_mask [B T]    rows of random tokens, the last one right-padded
    logits [B T V]                     float32, of the weights cast to float32, with eager attention
    prompt_ids, greedy_ids             a prompt, and the 64 tokens that `generate(do_sample=False)` adds to it
    min_margin                         smallest difference between the two largest logits before any of these tokens

Weights are written by `save_pretrained`. A case in the format of an older version is rewritten, and all that is
expected is computed from the files as they are stored. The weights of a case are the first random ones whose
`min_margin` is above 0.01. For each case the script checks that every kind of parameter has a gradient, and that every
setting which the case is about changes the logits.
"""

import argparse
import json
import re
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PreTrainedConfig,
    PreTrainedModel,
)

DATA = Path(__file__).parents[1] / "tests" / "data" / "hf"
ROWS, LENGTH, PADDED = 2, 40, 13
PROMPT_TOKENS, NEW_TOKENS = 11, 64
WINDOW = 8
SEEDS, MIN_MARGIN = 100, 1e-2
"""Random weights to choose from, and the margin that all tokens of the continuation must have."""

SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 24,
    "intermediate_size": 32,
    "num_hidden_layers": 5,
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
    "max_position_embeddings": 256,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
SIGLIP = {
    "model_type": "siglip_vision_model",
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "image_size": 8,
    "patch_size": 4,
}
PIXTRAL = {
    "model_type": "pixtral",
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "head_dim": 8,
    "image_size": 8,
    "patch_size": 4,
}
IN_AN_IMAGE = {"image_token_index": 63, "boi_token_index": 61, "eoi_token_index": 62, "mm_tokens_per_image": 1}
YARN = {
    "rope_type": "yarn",
    "factor": 8.0,
    "original_max_position_embeddings": 32,
    "beta_fast": 4.0,
    "beta_slow": 1.0,
}
LLAMA4_YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 16.0,
    "original_max_position_embeddings": 16,
    "max_position_embeddings": 256,
    "beta_fast": 2.0,
    "beta_slow": 0.5,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.5,
}
SHORT, LONG = [1.0, 1.05, 1.1, 1.3, 1.7, 2.5], [1.0, 1.3, 2.1, 4.0, 9.0, 16.0]


EAGER = {"attn_implementation": "eager", "experts_implementation": "eager"}
"""Implementations of transformers that take every size; its grouped products want widths of four numbers."""


class Case(NamedTuple):
    """A checkpoint.

    Attributes:
        config: keys of the config, `model_type` among them, which win over `SIZES`; of a model of text and images the
            keys of its text are in `text_config`.
        dtype: dtype of the file.
        shard_bytes: maximum bytes of a file of weights.
        config_edits: keys of `config.json` to set after it is written (None: to remove), by the path to their object.
        prefixes: prefixes of tensors to replace after the file is written.
        distinct: how many tokens of the continuation differ at least.
        changes: for each setting that the case is about, other values; each must change the logits.
    """

    config: dict[str, Any]
    dtype: torch.dtype = torch.float32
    shard_bytes: int | None = None
    config_edits: Mapping[str, dict[str, Any]] = {}
    prefixes: Mapping[str, str] = {}
    distinct: int = 12
    changes: tuple[dict[str, Any], ...] = ()


def rope(kind: str = "default", theta: float = 1e4, **keys: Any) -> dict[str, Any]:
    """Return rotary parameters in the format of version 5."""
    return {"rope_type": kind, "rope_theta": theta, **keys}


ABSENT = "absent"
"""Value of `config_edits` that removes a key."""

GEMMA3_ROPE = {"full_attention": rope("linear", 1e6, factor=8.0), "sliding_attention": rope()}
GEMMA3_LAYERS = [("full" if layer % 3 == 2 else "sliding") + "_attention" for layer in range(7)]
OF_VERSION_4 = {"transformers_version": "4.50.0", "dtype": ABSENT, "torch_dtype": "float32", "rope_parameters": ABSENT}
GEMMA3_OF_VERSION_4 = OF_VERSION_4 | {
    "layer_types": ABSENT,
    "_sliding_window_pattern": ABSENT,
    "rope_theta": 1e6,
    "rope_local_base_freq": 1e4,
    "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
}

CASES: dict[str, Case] = {
    "llama-biases": Case(
        {"model_type": "llama", "head_dim": 10, "attention_bias": True, "mlp_bias": True, "rope_parameters": rope()},
        changes=({"rope_parameters": rope(theta=500.0)},),
    ),
    "mistral-tied": Case(
        {"model_type": "mistral", "head_dim": 6, "sliding_window": WINDOW, "tie_word_embeddings": True},
        changes=({"sliding_window": None}, {"sliding_window": WINDOW + 1}),
    ),
    "ministral": Case(
        {
            "model_type": "ministral",
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 6,
            "sliding_window": WINDOW,
            "layer_types": ["full_attention", *["sliding_attention"] * 2, "full_attention", "sliding_attention"],
        },
        changes=({"sliding_window": WINDOW + 1}, {"layer_types": ["full_attention"] * 5}),
    ),
    "qwen2-mixed": Case(
        {
            "model_type": "qwen2",
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "use_sliding_window": True,
            "sliding_window": WINDOW,
            "max_window_layers": 2,
            "tie_word_embeddings": False,
        },
        dtype=torch.bfloat16,
        config_edits={"": {"layer_types": ABSENT}},
        changes=({"max_window_layers": 3}, {"max_window_layers": 1}, {"sliding_window": WINDOW + 1}),
    ),
    "qwen3-mixed": Case(
        {
            "model_type": "qwen3",
            "head_dim": 10,
            "attention_bias": True,
            "use_sliding_window": True,
            "sliding_window": WINDOW,
            "max_window_layers": 3,
            "tie_word_embeddings": True,
        },
        changes=({"layer_types": None, "max_window_layers": 2}, {"sliding_window": WINDOW - 1}),
    ),
    "qwen3_moe": Case(
        {
            "model_type": "qwen3_moe",
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 8,
            "use_sliding_window": True,
            "sliding_window": WINDOW,
            "num_experts": 6,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 12,
            "norm_topk_prob": True,
            "mlp_only_layers": [1],
            "tie_word_embeddings": False,
        },
        changes=(
            {"norm_topk_prob": False},
            {"num_experts_per_tok": 2},
            {"sliding_window": WINDOW + 1},
        ),
    ),
    "qwen2_moe": Case(
        {
            "model_type": "qwen2_moe",
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "use_sliding_window": True,
            "sliding_window": WINDOW,
            "num_experts": 5,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 10,
            "shared_expert_intermediate_size": 14,
            "mlp_only_layers": [0, 2],
            "tie_word_embeddings": False,
        },
        dtype=torch.bfloat16,
        changes=({"norm_topk_prob": True}, {"sliding_window": WINDOW + 1}),
    ),
    "mixtral": Case(
        {
            "model_type": "mixtral",
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 6,
            "intermediate_size": 12,
            "sliding_window": WINDOW,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "tie_word_embeddings": False,
        },
        dtype=torch.bfloat16,
        changes=({"num_experts_per_tok": 1}, {"sliding_window": WINDOW + 1}),
    ),
    "granitemoe": Case(
        {
            "model_type": "granitemoe",
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "intermediate_size": 12,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "attention_bias": True,
            "embedding_multiplier": 3.0,
            "residual_multiplier": 0.6,
            "attention_multiplier": 0.5,
            "logits_scaling": 0.8,
            "tie_word_embeddings": False,
        },
        dtype=torch.bfloat16,
        changes=({"num_experts_per_tok": 1}, {"residual_multiplier": 1.0}),
    ),
    "gpt_oss": Case(
        {
            "model_type": "gpt_oss",
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 8,
            "intermediate_size": 12,
            "sliding_window": WINDOW,
            "num_local_experts": 5,
            "num_experts_per_tok": 2,
            "swiglu_limit": 0.6,
            "swiglu_alpha": 1.3,
            "tie_word_embeddings": False,
            "rope_parameters": YARN | {"rope_theta": 1e4, "truncate": False},
        },
        changes=(
            {"swiglu_limit": 1.0},
            {"swiglu_alpha": 1.702},
            {"num_experts_per_tok": 3},
            {"sliding_window": WINDOW + 1},
        ),
    ),
    "olmoe": Case(
        {
            "model_type": "olmoe",
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "intermediate_size": 12,
            "num_experts": 5,
            "num_experts_per_tok": 3,
            "tie_word_embeddings": False,
        },
        dtype=torch.bfloat16,
        changes=({"norm_topk_prob": True}, {"num_experts_per_tok": 2}),
    ),
    "glm4_moe": Case(
        {
            "model_type": "glm4_moe",
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 8,
            "attention_bias": True,
            "use_qk_norm": True,
            "n_routed_experts": 5,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 10,
            "n_shared_experts": 2,
            "routed_scaling_factor": 1.7,
            "tie_word_embeddings": False,
            "rope_parameters": rope(partial_rotary_factor=0.5),
        },
        changes=(
            {"norm_topk_prob": False},
            {"routed_scaling_factor": 1.0},
            {"rope_parameters": rope(partial_rotary_factor=1.0)},
        ),
    ),
    "gemma2": Case(
        {
            "model_type": "gemma2",
            "head_dim": 10,
            "query_pre_attn_scalar": 7,
            "sliding_window": WINDOW,
            "attn_logit_softcapping": 3.0,
            "final_logit_softcapping": 6.0,
        },
        changes=(
            {"attn_logit_softcapping": None},
            {"final_logit_softcapping": None},
            {"query_pre_attn_scalar": 10},
            {"sliding_window": WINDOW + 1},
            {"layer_types": ["full_attention", "sliding_attention"] * 2 + ["full_attention"]},
            {"hidden_activation": "gelu"},
        ),
    ),
    "gemma2-untied": Case(
        {
            "model_type": "gemma2",
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 8,
            "attention_bias": True,
            "query_pre_attn_scalar": 8,
            "sliding_window": WINDOW,
            "attn_logit_softcapping": None,
            "final_logit_softcapping": None,
            "tie_word_embeddings": False,
        },
        config_edits={"": OF_VERSION_4 | {"rope_theta": 1e4, "layer_types": ABSENT, "torch_dtype": "bfloat16"}},
        dtype=torch.bfloat16,
        changes=({"rope_theta": 100.0},),
    ),
    "gemma3_text": Case(
        {
            "model_type": "gemma3_text",
            "num_hidden_layers": 7,
            "intermediate_size": 20,
            "head_dim": 10,
            "query_pre_attn_scalar": 13,
            "sliding_window": WINDOW,
            "layer_types": GEMMA3_LAYERS,
            "rope_parameters": GEMMA3_ROPE,
            "final_logit_softcapping": 7.0,
        },
        changes=(
            {"final_logit_softcapping": None},
            {"rope_parameters": GEMMA3_ROPE | {"full_attention": rope("default", 1e6)}},
            {"rope_parameters": GEMMA3_ROPE | {"sliding_attention": rope(theta=1e6)}},
            {"layer_types": GEMMA3_LAYERS[1:] + GEMMA3_LAYERS[:1]},
        ),
    ),
    "gemma3_text-v4": Case(
        {
            "model_type": "gemma3_text",
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 8,
            "query_pre_attn_scalar": 8,
            "sliding_window": WINDOW,
            "layer_types": GEMMA3_LAYERS[:4],
            "rope_parameters": GEMMA3_ROPE,
        },
        config_edits={"": GEMMA3_OF_VERSION_4 | {"sliding_window_pattern": 3}},
        changes=({"sliding_window_pattern": 2}, {"rope_scaling": None}, {"rope_local_base_freq": 100.0}),
    ),
    "gemma3": Case(
        {
            "model_type": "gemma3",
            **IN_AN_IMAGE,
            "vision_config": SIGLIP,
            "text_config": {
                "model_type": "gemma3_text",
                "num_hidden_layers": 7,
                "head_dim": 8,
                "sliding_window": WINDOW,
                "rope_parameters": GEMMA3_ROPE,
            },
        },
        # Published files of 2025: the text's config holds few keys, and rotary parameters without bases.
        config_edits={
            "": OF_VERSION_4 | {"torch_dtype": "bfloat16"},
            "text_config": GEMMA3_OF_VERSION_4
            | {
                "rope_theta": ABSENT,
                "rope_local_base_freq": ABSENT,
                "torch_dtype": ABSENT,
                "query_pre_attn_scalar": ABSENT,
                "rms_norm_eps": ABSENT,
                "hidden_activation": ABSENT,
                "attention_bias": ABSENT,
                "tie_word_embeddings": ABSENT,
                "max_position_embeddings": ABSENT,
            },
        },
        dtype=torch.bfloat16,
        prefixes={
            "model.language_model.": "language_model.model.",
            "model.vision_tower.": "vision_tower.",
            "model.multi_modal_projector.": "multi_modal_projector.",
        },
        changes=({"text_config": {"sliding_window": WINDOW + 1}}, {"text_config": {"sliding_window_pattern": 5}}),
    ),
    "gemma3-v5": Case(
        {
            "model_type": "gemma3",
            **IN_AN_IMAGE,
            "vision_config": SIGLIP,
            "text_config": {
                "model_type": "gemma3_text",
                "head_dim": 8,
                "query_pre_attn_scalar": 8,
                "sliding_window": WINDOW,
                "layer_types": GEMMA3_LAYERS[:5],
                "rope_parameters": GEMMA3_ROPE,
            },
        },
        dtype=torch.float16,
        prefixes={
            "language_model.model.": "model.language_model.",
            "vision_tower.": "model.vision_tower.",
            "multi_modal_projector.": "model.multi_modal_projector.",
        },
    ),
    "olmo2": Case(
        {
            "model_type": "olmo2",
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "rope_parameters": rope(theta=5e5),
        },
        changes=({"rope_parameters": rope()},),
    ),
    "olmo2-tied": Case(
        {"model_type": "olmo2", "num_key_value_heads": 3, "attention_bias": True, "tie_word_embeddings": True},
        dtype=torch.bfloat16,
        distinct=10,
        config_edits={"": OF_VERSION_4 | {"rope_theta": 5e5, "rope_scaling": None, "torch_dtype": "bfloat16"}},
    ),
    "olmo3": Case(
        {
            "model_type": "olmo3",
            "num_hidden_layers": 6,
            "intermediate_size": 20,
            "sliding_window": WINDOW,
            "rope_parameters": {"full_attention": YARN | {"rope_theta": 1e4}, "sliding_attention": rope()},
        },
        changes=(
            {"rope_parameters": {"full_attention": rope(), "sliding_attention": rope()}},
            {"sliding_window": WINDOW + 1},
        ),
    ),
    "olmo3-v4": Case(
        {
            "model_type": "olmo3",
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "attention_bias": True,
            "tie_word_embeddings": True,
            "sliding_window": WINDOW,
        },
        config_edits={
            "": OF_VERSION_4
            | {
                "transformers_version": "4.57.0",
                "rope_theta": 500000,
                "rope_scaling": YARN | {"attention_factor": 1.2079441541679836},
            }
        },
        changes=({"rope_scaling": None}, {"rope_scaling": YARN | {"attention_factor": 1.5}}),
    ),
    "smollm3": Case(
        {
            "model_type": "smollm3",
            "num_hidden_layers": 6,
            "intermediate_size": 20,
            "no_rope_layer_interval": 4,
            "tie_word_embeddings": True,
            "rope_parameters": rope(theta=2e6),
        },
        config_edits={
            "": OF_VERSION_4
            | {"rope_theta": 2000000.0, "rope_scaling": None, "no_rope_layers": ABSENT, "layer_types": ABSENT}
        },
        changes=({"no_rope_layer_interval": 3}, {"no_rope_layers": [1] * 6}),
    ),
    "smollm3-window": Case(
        {
            "model_type": "smollm3",
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "no_rope_layers": [1, 0, 1, 1, 0],
            "attention_bias": True,
            "mlp_bias": True,
            "use_sliding_window": True,
            "sliding_window": WINDOW,
            "tie_word_embeddings": False,
            "rope_parameters": rope(theta=2e6),
        },
        changes=({"sliding_window": WINDOW + 1}, {"no_rope_layers": [1] * 5}, {"layer_types": ["full_attention"] * 5}),
    ),
    "phi3": Case(
        {
            "model_type": "phi3",
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "sliding_window": WINDOW,
            "tie_word_embeddings": False,
        },
        dtype=torch.float16,
        changes=({"sliding_window": None},),
    ),
    "phi3-longrope": Case(
        {
            "model_type": "phi3",
            "num_hidden_layers": 2,
            "hidden_size": 48,
            "intermediate_size": 28,
            "original_max_position_embeddings": 8,
            "tie_word_embeddings": True,
            "rope_parameters": rope(
                "longrope", short_factor=SHORT, long_factor=LONG, partial_rotary_factor=0.75, factor=32.0
            ),
        },
        # As published for Phi-4-mini. Rows and prompt are longer than the original context: the long factors.
        config_edits={
            "": OF_VERSION_4
            | {
                "rope_theta": 10000.0,
                "partial_rotary_factor": 0.75,
                "rope_scaling": {"type": "longrope", "short_factor": SHORT, "long_factor": LONG},
            }
        },
        changes=(
            {"rope_scaling": {"type": "longrope", "short_factor": SHORT, "long_factor": SHORT}},
            {"original_max_position_embeddings": 9},
        ),
    ),
    "phi3-longrope-v5": Case(
        {
            "model_type": "phi3",
            "num_hidden_layers": 3,
            "hidden_size": 48,
            "intermediate_size": 32,
            "max_position_embeddings": 1024,
            "original_max_position_embeddings": 128,
            "rope_parameters": rope("longrope", short_factor=SHORT, long_factor=LONG, partial_rotary_factor=0.75),
        },
        dtype=torch.bfloat16,
        changes=({"max_position_embeddings": 128},),
    ),
    "granite": Case(
        {
            "model_type": "granite",
            "attention_bias": True,
            "mlp_bias": True,
            "embedding_multiplier": 3.0,
            "residual_multiplier": 0.6,
            "attention_multiplier": 0.5,
            "logits_scaling": 0.8,
            "rope_parameters": rope(),
        },
        changes=(
            {"embedding_multiplier": 1.0},
            {"residual_multiplier": 1.0},
            {"attention_multiplier": 8**-0.5},
            {"logits_scaling": 1.0},
            {"rope_parameters": rope(theta=500.0)},
        ),
    ),
    "granite-tied": Case(
        {
            "model_type": "granite",
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "embedding_multiplier": 0.8,
            "residual_multiplier": 1.5,
            "attention_multiplier": 0.25,
            "logits_scaling": 0.7,
            "tie_word_embeddings": True,
        },
        dtype=torch.bfloat16,
        config_edits={"": OF_VERSION_4 | {"rope_theta": 1e4, "rope_scaling": None, "torch_dtype": "bfloat16"}},
        changes=({"logits_scaling": 1.0}, {"rope_theta": 100.0}),
    ),
    "ministral3": Case(
        {"model_type": "ministral3", "head_dim": 10, "rope_parameters": LLAMA4_YARN},
        changes=(
            {"rope_parameters": LLAMA4_YARN | {"llama_4_scaling_beta": 0.4}},
            {"rope_parameters": LLAMA4_YARN | {"factor": 4.0}},
            {"rope_parameters": LLAMA4_YARN | {"mscale": 2.0}},
        ),
    ),
    "ministral3-window": Case(
        {
            "model_type": "ministral3",
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 8,
            "sliding_window": WINDOW,
            "tie_word_embeddings": True,
            # With an `mscale_all_dim` of 0 the factor of cosines and sines is above 1, as without either.
            "rope_parameters": LLAMA4_YARN | {"original_max_position_embeddings": 8, "mscale_all_dim": 0.0},
        },
        changes=({"sliding_window": None}, {"rope_parameters": LLAMA4_YARN | {"original_max_position_embeddings": 8}}),
    ),
    "mistral3": Case(
        {
            "model_type": "mistral3",
            "image_token_index": 63,
            "spatial_merge_size": 1,
            "tie_word_embeddings": True,
            "vision_config": PIXTRAL,
            "text_config": {
                "model_type": "ministral3",
                "num_hidden_layers": 4,
                "head_dim": 8,
                "rope_parameters": LLAMA4_YARN,
                "tie_word_embeddings": True,
            },
        },
        dtype=torch.bfloat16,
        prefixes={
            "language_model.model.": "model.language_model.",
            "vision_tower.": "model.vision_tower.",
            "multi_modal_projector.": "model.multi_modal_projector.",
        },
    ),
    "mistral3-mistral": Case(
        {
            "model_type": "mistral3",
            "image_token_index": 63,
            "spatial_merge_size": 1,
            "tie_word_embeddings": False,
            "vision_config": PIXTRAL,
            "text_config": {
                "model_type": "mistral",
                "num_hidden_layers": 4,
                "head_dim": 8,
                "sliding_window": None,
                "rope_parameters": rope(theta=1e9),
            },
        },
        shard_bytes=30_000,
        # As published for Mistral Small 3.1, which has a head of its own and no key `tie_word_embeddings`.
        config_edits={
            "": OF_VERSION_4 | {"tie_word_embeddings": ABSENT},
            "text_config": OF_VERSION_4 | {"tie_word_embeddings": ABSENT, "rope_theta": 1e9, "torch_dtype": ABSENT},
        },
        prefixes={
            "model.language_model.": "language_model.model.",
            "model.vision_tower.": "vision_tower.",
            "model.multi_modal_projector.": "multi_modal_projector.",
            "lm_head.": "language_model.lm_head.",
        },
    ),
}


def make_config(keys: Mapping[str, Any]) -> PreTrainedConfig:
    """Return the config of these keys, with `SIZES` for what they leave out."""
    keys = dict(keys)
    kind = keys.pop("model_type")
    if "text_config" in keys:
        text = SIZES | keys["text_config"]
        return AutoConfig.for_model(kind, **(keys | {"text_config": text}))
    return AutoConfig.for_model(kind, **(SIZES | keys))


def class_for(config: PreTrainedConfig) -> Any:
    """Return the class of transformers that has a `generate` for models of this config."""
    return AutoModelForCausalLM if config.get_text_config() is config else AutoModelForImageTextToText


def make_model(config: PreTrainedConfig) -> PreTrainedModel:
    """Return the model of a config, in float32 and with eager attention."""
    return class_for(config).from_config(config, dtype=torch.float32, **EAGER).eval()


def load(folder: Path) -> PreTrainedModel:
    """Load a checkpoint in float32 and with eager attention; raise unless its tensors are those of the model."""
    model, told = class_for(AutoConfig.from_pretrained(folder, local_files_only=True)).from_pretrained(
        folder, dtype=torch.float32, **EAGER, output_loading_info=True, local_files_only=True
    )
    wrong = {kind: sorted(names) for kind, names in told.items() if names}
    if wrong:
        raise ValueError(f"{folder}: transformers finds that {wrong}")
    return model.eval()


def choice_biases(model: PreTrainedModel) -> list[tuple[str, torch.Tensor]]:
    """Return the biases that experts are chosen by, which are no parameters in transformers."""
    return [(name, buffer) for name, buffer in model.named_buffers() if name.endswith("correction_bias")]


@torch.no_grad()
def randomise(model: PreTrainedModel, seed: int, dtype: torch.dtype = torch.float32) -> None:
    """Give all parameters random values that a dtype holds, norms and biases too; attention and logits are decided.

    Tied embeddings are small, and the norm before them large: otherwise every token would predict itself.
    """
    generator = torch.Generator().manual_seed(seed)
    config = model.config.get_text_config()
    is_gemma = config.model_type.startswith("gemma")
    is_tied = model.get_output_embeddings().weight is model.get_input_embeddings().weight
    for name, parameter in [*model.named_parameters(), *choice_biases(model)]:
        noise = torch.randn(parameter.shape, generator=generator)
        if name.endswith((".bias", "correction_bias")):
            values = (0.1 if is_tied else 0.3) * noise
        elif "embed_tokens" in name:
            # Gemma multiplies embeddings by sqrt(hidden_size) on their way in.
            values = noise * ((0.12 if is_gemma else 0.25) if is_tied else 1.0)
        elif parameter.ndim == 1:
            is_last = re.search(r"(model|language_model)\.norm\.weight$", name) is not None
            size = 1.5 if is_last and is_tied and is_gemma else 1.0
            values = size * (1 + 0.3 * noise) - (1.0 if is_gemma else 0.0)
        elif "lm_head" in name:
            values = 1.2 * noise / parameter.shape[-1] ** 0.5
        elif re.search(r"\.(q|k|qkv)_proj\.", name):
            values = noise / parameter.shape[-1] ** 0.5
        elif parameter.ndim == 3:  # experts; their router, below, decides by much
            values = 1.5 * noise / config.hidden_size**0.5
        elif re.search(r"\.(gate|router)\.weight", name):
            values = 2 * noise / parameter.shape[-1] ** 0.5
        else:
            values = 0.9 * noise / parameter[0].numel() ** 0.5
        parameter.copy_(values.to(dtype))


def text_tokens(model: PreTrainedModel, seed: int, shape: tuple[int, int]) -> torch.Tensor:
    """Return random tokens, none of which stands for an image."""
    size = model.config.get_text_config().vocab_size
    top = size - 3 if "vision_config" in model.config.to_dict() else size
    return torch.randint(0, top, shape, generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def greedy(model: PreTrainedModel, prompt: torch.Tensor, new_tokens: int = NEW_TOKENS) -> tuple[torch.Tensor, float]:
    """Return transformers' greedy continuation of a prompt `[1 T]`, and the smallest margin of its tokens."""
    out = model.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        max_new_tokens=new_tokens,
        min_new_tokens=new_tokens,
        do_sample=False,
        return_dict_in_generate=True,
        output_logits=True,
    )
    best = torch.stack(out.logits, 1)[0].float().topk(2).values
    return out.sequences[0, prompt.shape[1] :], float((best[:, 0] - best[:, 1]).min())


def choose_seed(model: PreTrainedModel, prompt: torch.Tensor, dtype: torch.dtype, distinct: int) -> int:
    """Return the first seed whose continuation has large margins, and tokens enough that differ."""
    found: list[tuple[int, float]] = []
    for seed in range(SEEDS):
        randomise(model, seed, dtype)
        tokens, margin = greedy(model, prompt)
        found.append((len(set(tokens.tolist())), margin))
        if found[-1][0] >= distinct and margin >= MIN_MARGIN:
            return seed
    raise ValueError(f"no seed has {distinct} tokens and a margin above {MIN_MARGIN}: {sorted(found)[-5:]}")


def check_gradients(model: PreTrainedModel, tokens: torch.Tensor) -> None:
    """Raise unless every kind of parameter of the text has a gradient, in some layer."""
    logits = model(tokens).logits
    weights = torch.randn(logits.shape, generator=torch.Generator().manual_seed(1))
    (logits * weights).mean().backward()
    largest: dict[str, float] = {}
    for name, parameter in model.named_parameters():
        if "vision" in name or "multi_modal" in name:
            continue
        kind = re.sub(r"\.\d+\.", ".*.", name)
        size = 0.0 if parameter.grad is None else float(parameter.grad.abs().max())
        largest[kind] = max(largest.get(kind, 0.0), size)
    model.zero_grad()
    idle = {kind: size for kind, size in largest.items() if size < 1e-5}
    if idle:
        raise ValueError(f"these parameters change nothing: {idle}")


def edit(values: dict[str, Any], edits: Mapping[str, Any]) -> dict[str, Any]:
    """Return a config with some keys set, objects merged into the present ones, and those marked `ABSENT` removed."""
    values = dict(values)
    for key, value in edits.items():
        if isinstance(value, str) and value == ABSENT:
            values.pop(key, None)
        elif key == "text_config":
            values[key] = edit(values[key], value)
        else:
            values[key] = value
    return values


def write_case(folder: Path, case: Case, model: PreTrainedModel) -> None:
    """Write the files of a model as a case has them."""
    options = {} if case.shard_bytes is None else {"max_shard_size": case.shard_bytes}
    model.to(case.dtype).save_pretrained(folder, **options)
    model.to(torch.float32)
    (folder / "generation_config.json").unlink(missing_ok=True)
    file = folder / "config.json"
    values = json.loads(file.read_text())
    for place, edits in case.config_edits.items():
        values = edit(values, {place: edits} if place else edits)
    file.write_text(json.dumps(values, indent=2, sort_keys=True) + "\n")
    if case.prefixes:
        for shard in folder.glob("*.safetensors"):
            save_file(
                {renamed(name, case.prefixes): x for name, x in load_file(shard).items()}, shard, {"format": "pt"}
            )
        index = folder / "model.safetensors.index.json"
        if index.is_file():
            told = json.loads(index.read_text())
            told["weight_map"] = {renamed(name, case.prefixes): x for name, x in told["weight_map"].items()}
            index.write_text(json.dumps(told, indent=2, sort_keys=True) + "\n")


def renamed(name: str, prefixes: Mapping[str, str]) -> str:
    """Return a tensor's name with its prefix replaced."""
    for prefix, other in prefixes.items():
        if name.startswith(prefix):
            return other + name.removeprefix(prefix)
    return name


@torch.no_grad()
def logits_of(model: PreTrainedModel, tokens: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Return the logits of padded rows."""
    return model(tokens, attention_mask=mask, use_cache=False).logits.float()


def check_changes(folder: Path, case: Case, tokens: torch.Tensor, mask: torch.Tensor, logits: torch.Tensor) -> float:
    """Return by how much the logits change at least, over the settings that the case is about; raise if hardly."""
    least = float("inf")
    for change in case.changes:
        with tempfile.TemporaryDirectory() as name:
            other = Path(name) / "other"
            shutil.copytree(folder, other)
            file = other / "config.json"
            file.write_text(json.dumps(edit(json.loads(file.read_text()), change)))
            difference = float((logits_of(load(other), tokens, mask) - logits)[mask == 1].abs().max())
        if difference < 2e-3:
            raise ValueError(f"{folder.name}: {change} changes the logits by {difference} only")
        least = min(least, difference)
    return least


def make_case(folder: Path, case: Case) -> str:
    """Make the folder of a case, and return a line about it."""
    model = make_model(make_config(case.config))
    tokens = text_tokens(model, 5, (ROWS, LENGTH))
    mask = torch.ones_like(tokens)
    mask[-1, -PADDED:] = 0
    prompt = text_tokens(model, 7, (1, PROMPT_TOKENS))
    with tempfile.TemporaryDirectory() as name:
        made = Path(name) / folder.name
        write_case(made, case, model)
        seed = choose_seed(load(made), prompt, case.dtype, case.distinct)  # of a model with the config that is stored
        randomise(model, seed, case.dtype)
        shutil.rmtree(made)
        write_case(made, case, model)
        model = load(made)
        logits = logits_of(model, tokens, mask)
        continuation, margin = greedy(model, prompt)
        check_gradients(model, tokens)
        least = check_changes(made, case, tokens, mask, logits)
        np.savez_compressed(
            made / "expected.npz",
            input_ids=tokens.numpy().astype(np.int32),
            attention_mask=mask.numpy().astype(np.int32),
            logits=logits.numpy(),
            prompt_ids=prompt[0].numpy().astype(np.int32),
            greedy_ids=continuation.numpy().astype(np.int32),
            min_margin=np.float32(margin),
        )
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(made, folder)
    size = sum(file.stat().st_size for file in folder.iterdir())
    return (
        f"{folder.name:20} seed {seed:2}  {size / 1000:6.1f} kB  margin {margin:.4f}  "
        f"{len(set(continuation.tolist())):2} tokens  logits to {float(logits.abs().max()):5.1f}  "
        f"least change {least:.3g}"
    )


def main() -> None:
    """Make the cases that are named, or all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", help=f"of {', '.join(CASES)}; by default all")
    parser.add_argument("--folder", type=Path, default=DATA, help="where the folders of the cases are")
    arguments = parser.parse_args()
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    torch.set_num_threads(1)
    for name in arguments.cases or CASES:
        print(make_case(arguments.folder / name, CASES[name]), flush=True)


if __name__ == "__main__":
    main()
