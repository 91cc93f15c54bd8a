"""`_type: local_policy`: a model that lives, samples and is trained in this process."""

from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field, model_validator

from jaxft.harness.fields import PathOrName, fault
from jaxft.harness.registry import LLMConfig, register_llm

if TYPE_CHECKING:
    from jaxft.policy.client import ChatClient


class LocalPolicyConfig(LLMConfig, name="local_policy"):
    """A Hugging Face checkpoint, or a model of random weights by the name of its shape."""

    path: PathOrName | None = Field(
        default=None, description="Folder or hub id of a checkpoint; null for random weights."
    )
    preset: str | None = Field(default=None, description="Shape of a model of random weights, such as qwen3-1m.")
    tokenizer: PathOrName | None = Field(
        default=None, description="Folder or hub id of a tokenizer; null for the checkpoint's, or the embedded one."
    )
    dtype: Literal["float32", "bfloat16"] = Field(default="float32", description="Of the parameters.")
    compute_dtype: Literal["float32", "bfloat16"] | None = Field(
        default=None,
        description="Of matrix products and activations, with parameters, gradients and optimiser state left in dtype; "
        "null for dtype.",
    )
    remat: Literal["none", "dots", "full"] = Field(
        default="dots",
        description="What the backward pass computes again to save memory: nothing, all but products with weights, or "
        "whole layers.",
    )
    max_context_tokens: int = Field(default=512, ge=2, description="Tokens of a conversation, answers included.")
    slots: int = Field(default=64, ge=1, description="Requests that are decoded together.")
    stored_prompts: int | None = Field(
        default=None,
        ge=8,
        description="Prompts whose keys and values are kept for their other generations and next turns, each with room "
        "for max_context_tokens; null for as many as slots.",
    )

    @model_validator(mode="after")
    def _has_a_model(self) -> "LocalPolicyConfig":
        if self.path is None and self.preset is None:
            raise fault("needs 'path' (a checkpoint) or 'preset' (the shape of a model of random weights)")
        return self


@register_llm(config_type=LocalPolicyConfig)
async def local_policy(config: LocalPolicyConfig, builder: Any) -> "AsyncIterator[ChatClient]":
    """A chat client of a fresh policy. A `path` wins over a `preset`: one override puts a checkpoint in its place."""
    import jax
    import jax.numpy as jnp

    from jaxft.core.precision import compute_in
    from jaxft.models.config import DecoderConfig, preset
    from jaxft.models.decoder import decoder
    from jaxft.models.hf import init_model, load_model
    from jaxft.models.hf_files import local_folder
    from jaxft.policy.chat import find_stop_ids, load_tokenizer
    from jaxft.policy.client import ChatClient
    from jaxft.policy.policy import Policy

    seed = builder.config.finetuning.seed
    dtype = jnp.dtype(config.dtype)
    folder = None if config.path is None else local_folder(config.path)
    tokenizer = load_tokenizer(config.tokenizer if config.tokenizer is not None else config.path)
    if folder is not None:
        model, params = load_model(folder, dtype=dtype)
    else:
        assert config.preset is not None
        shape = preset(config.preset, vocab_size=len(tokenizer))
        model, params = init_model(shape, jax.random.key(seed, impl="threefry2x32"), dtype=dtype)
    assert isinstance(model.config, DecoderConfig)
    vocabulary = model.config.vocab_size
    if len(tokenizer) > vocabulary:
        raise ValueError(f"the tokenizer has {len(tokenizer)} tokens, but the model's embedding only {vocabulary} rows")
    model = decoder(model.config, config.remat)
    if config.compute_dtype is not None:
        model = compute_in(model, jnp.dtype(config.compute_dtype))
    policy = Policy(
        model,
        params,
        tokenizer,
        stop_ids=find_stop_ids(tokenizer, folder),
        seed=seed,
        slots=config.slots,
        max_context_tokens=config.max_context_tokens,
        stored_prompts=config.stored_prompts,
    )
    name = next(name for name, llm in builder.config.llms.items() if llm is config)
    yield ChatClient(policy, name)
    policy.close()
