"""The reference shape as a torch model, and a tokenizer of whole words for it: shared by the Hugging Face sides.

Nothing is downloaded. The ids that pad and end a text lie beyond the vocabulary of the model. They are never sampled,
so no completion ends early, and no logits processor has to forbid them.
"""

import os

os.environ["HF_HUB_OFFLINE"] = "1"

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from protocol import Work


def make_model(work: Work) -> Qwen3ForCausalLM:
    """A Qwen3 of random weights, float32, that uses all threads and torch's fused attention."""
    torch.set_num_threads(work["threads"])
    torch.manual_seed(work["seed"])
    shape = work["shape"]
    config = Qwen3Config(
        vocab_size=shape["vocab_size"],
        hidden_size=shape["hidden_size"],
        intermediate_size=shape["intermediate_size"],
        num_hidden_layers=shape["num_layers"],
        num_attention_heads=shape["num_heads"],
        num_key_value_heads=shape["num_kv_heads"],
        head_dim=shape["head_dim"],
        tie_word_embeddings=shape["tie_word_embeddings"],
        max_position_embeddings=32768,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
        attn_implementation="sdpa",
        dtype="float32",
    )
    model = Qwen3ForCausalLM(config)
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    return model


def as_text(ids: list[int]) -> str:
    """A prompt in the words of `make_tokenizer`."""
    return " ".join(f"t{token}" for token in ids)


def make_tokenizer(work: Work) -> PreTrainedTokenizerFast:
    """One word per id, `t0`, `t1`, ...; the two ids after those of the model pad and end."""
    size = work["shape"]["vocab_size"]
    words = {f"t{token}": token for token in range(size)} | {"<pad>": size, "<end>": size + 1}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<end>")
