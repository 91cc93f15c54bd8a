"""`_type: local_policy`: a model that lives, samples and is trained in this process."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field, model_validator

from jaxft.harness.fields import ConfigModel, PathOrName, fault
from jaxft.harness.registry import LLMConfig, register_llm

if TYPE_CHECKING:
    from jax.sharding import AbstractMesh, Mesh

    from jaxft.core.types import Model, Params
    from jaxft.models.config import DecoderConfig, Lora
    from jaxft.models.decoder import Remat
    from jaxft.policy.client import ChatClient


ADAPTER_STREAM = 4
"""Of random numbers: what fresh adapters are drawn with."""


class MeshConfig(ConfigModel):
    """Devices as a mesh. The sizes multiply to the number of devices; one of them may be -1: what is left."""

    data: int = Field(default=-1, description="Parts of the rows; each has all parameters, but for fsdp and tensor.")
    fsdp: int = Field(
        default=1, description="Parts of the rows, and of parameters and optimiser state, gathered layer by layer."
    )
    tensor: int = Field(default=1, description="Parts of the heads and of the feed-forward's width; for all rows.")
    strict: bool = Field(
        default=False,
        description="Whether a parameter that does not divide is an error; else every device holds the whole of it, "
        "and a warning names it.",
    )

    def make(self) -> "Mesh":
        """The mesh of all devices there are.

        Raises:
            ValueError: the sizes do not multiply to their number.
        """
        from jaxft.core.mesh import make_mesh

        return make_mesh(self.data, self.fsdp, self.tensor)

    def planned(self) -> "Mesh | AbstractMesh":
        """The mesh; where all sizes are given, of devices that need not be here."""
        from jax.sharding import AbstractMesh

        from jaxft.core.mesh import AXES

        sizes = self.data, self.fsdp, self.tensor
        return self.make() if min(sizes) < 1 else AbstractMesh(sizes, AXES)


class LoraConfig(ConfigModel):
    """Low-rank adapters (arXiv 2106.09685) beside the kernels of a model that itself stays as it is."""

    rank: int = Field(default=8, ge=1, description="Of each adapter.")
    alpha: float = Field(default=16.0, gt=0.0, allow_inf_nan=False, description="Adapters count alpha / rank times.")
    targets: tuple[str, ...] = Field(
        default=("*_proj",), description="Projections that have one, by name or path: q_proj, self_attn/*, mlp/up_proj."
    )
    use_rslora: bool = Field(default=False, description="alpha / sqrt(rank) instead (arXiv 2312.03732).")
    path: PathOrName | None = Field(
        default=None,
        description="A folder of adapters in PEFT's format to go on from; its rank, alpha and targets count.",
    )

    @model_validator(mode="after")
    def _has_targets(self) -> "LoraConfig":
        try:
            self.numbers()
        except ValueError as error:
            raise fault(f"{error}") from None
        return self

    def numbers(self) -> "Lora":
        """What the model has to know of them."""
        from jaxft.models.config import Lora

        return Lora(self.rank, self.alpha, self.targets, self.use_rslora)


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
    mesh: MeshConfig | None = Field(
        default=None, description="Devices that share model, rows and requests; null for the first device alone."
    )
    lora: LoraConfig | None = Field(
        default=None, description="Adapters, which alone are trained; null: all parameters are."
    )
    max_context_tokens: int = Field(default=512, ge=2, description="Tokens of a conversation, answers included.")
    slots: int = Field(default=64, ge=1, description="Requests that are decoded together.")
    stored_prompts: int | None = Field(
        default=None,
        ge=8,
        description="Prompts whose keys and values are kept for their other generations and next turns, each with room "
        "for max_context_tokens; null for as many as slots.",
    )
    long_prompts: Literal["fail", "drop", "truncate_left"] = Field(
        default="fail",
        description="The treatment of a prompt that leaves no room in max_context_tokens for an answer. fail: the call "
        "raises an error, and an agent that does not catch it has failed. drop: likewise, but a training episode that "
        "ends so counts as dropped (dropped_episodes) and not as failed. truncate_left: the first tokens are left out, "
        "and what is left, which is trained as it was fed, leaves room for max_tokens, or for half of the context "
        "where that is less (truncated_prompts counts the calls whose prompt lacks its beginning).",
    )

    @model_validator(mode="after")
    def _has_a_model(self) -> "LocalPolicyConfig":
        if self.path is None and self.preset is None:
            raise fault("needs 'path' (a checkpoint) or 'preset' (the shape of a model of random weights)")
        return self

    def sharding_table(self) -> str | None:
        """As every language model's; nothing without a mesh."""
        import jax
        import jax.numpy as jnp

        from jaxft.core.frozen import ADAPTER, BASE
        from jaxft.models.decoder import decoder
        from jaxft.models.lora import lora_decoder
        from jaxft.models.peft import adapter_numbers
        from jaxft.models.sharding import layout_of, parameters_table

        if self.mesh is None:
            return None
        shape, dtype = self.shape(), jnp.dtype(self.dtype)
        layout = layout_of(shape, self.mesh.planned(), strict=self.mesh.strict)
        of_base = jax.eval_shape(decoder(shape).init, jax.random.key(0))
        params = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, dtype), of_base)
        if self.lora is not None:
            lora = self.lora.numbers() if self.lora.path is None else adapter_numbers(self.lora.path)
            adapted = jax.eval_shape(lora_decoder(shape, lora).init, jax.random.key(0))
            params = {BASE: params, ADAPTER: adapted[ADAPTER]}
        return parameters_table(params, layout)

    def shape(self) -> "DecoderConfig":
        """The shape of the model, for which no weights are read."""
        from jaxft.models.config import preset
        from jaxft.models.hf_config import load_config
        from jaxft.models.hf_files import local_folder
        from jaxft.policy.chat import load_tokenizer

        if self.path is not None:
            return load_config(local_folder(self.path) / "config.json")
        assert self.preset is not None
        return preset(self.preset, vocab_size=len(load_tokenizer(self.tokenizer)))


@register_llm(config_type=LocalPolicyConfig)
async def local_policy(config: LocalPolicyConfig, builder: Any) -> "AsyncIterator[ChatClient]":
    """A chat client of a fresh policy. A `path` wins over a `preset`: one override puts a checkpoint in its place."""
    import jax
    import jax.numpy as jnp

    from jaxft.core.precision import compute_in
    from jaxft.models.config import DecoderConfig
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
    on_mesh: dict[str, Any] = {}
    if config.mesh is not None:
        on_mesh = {"mesh": config.mesh.make(), "strict": config.mesh.strict}
    if folder is not None:
        model, params = load_model(folder, dtype=dtype, **on_mesh)
    else:
        model, params = init_model(config.shape(), jax.random.key(seed, impl="threefry2x32"), dtype=dtype, **on_mesh)
    assert isinstance(model.config, DecoderConfig)
    vocabulary = model.config.vocab_size
    if len(tokenizer) > vocabulary:
        raise ValueError(f"the tokenizer has {len(tokenizer)} tokens, but the model's embedding only {vocabulary} rows")
    if config.lora is None:
        model = decoder(model.config, config.remat, model.layout)
    else:
        key = jax.random.fold_in(jax.random.key(seed, impl="threefry2x32"), ADAPTER_STREAM)
        model, params = with_adapters(model, params, config.lora, config.remat, key)
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
        base=None if config.path is None else base_name(config.path),
    )
    policy.compiles.show = builder.console.compiling
    builder.add_devices(policy.devices())
    name = next(name for name, llm in builder.config.llms.items() if llm is config)
    yield ChatClient(policy, name, config.long_prompts)
    policy.close()


def base_name(path: str) -> str:
    """How others find a checkpoint: a folder by its whole path, the hub's by its id."""
    folder = Path(path).expanduser()
    return str(folder.absolute()) if folder.is_dir() else path


def with_adapters(
    model: "Model", params: "Params", config: LoraConfig, remat: "Remat", key: Any
) -> "tuple[Model, Params]":
    """A loaded model as the base of adapters: those of a folder, or fresh ones drawn with `key`."""
    from jaxft.core.frozen import ADAPTER, BASE
    from jaxft.models.lora import init_adapter, lora_decoder
    from jaxft.models.peft import adapter_numbers, load_adapter

    shape: Any = model.config
    lora = config.numbers() if config.path is None else adapter_numbers(config.path)
    adapted = lora_decoder(shape, lora, remat, model.layout)
    if config.path is None:
        adapter = init_adapter(adapted, key)
    else:
        adapter = load_adapter(config.path, shape, params, layout=model.layout)
    return adapted, {BASE: params, ADAPTER: adapter}
