"""`_type: local_policy`: a model that samples and is trained in this process, or a snapshot of one."""

import asyncio
import hashlib
import math
from collections.abc import AsyncIterator, Mapping
from functools import partial
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh

from jaxft.components.configs import LocalPolicyConfig, LocalTrainerAdapterConfig, LoraConfig, MeshConfig
from jaxft.core.cache import cast_params
from jaxft.core.partition import BASE
from jaxft.core.sharding import (
    Sharding,
    compute_devices,
    compute_platform,
    connect,
    make_mesh,
    mesh_axes,
    spans_processes,
)
from jaxft.core.types import Params
from jaxft.errors import ComponentError, ConfigError, HostsError, one_line
from jaxft.files import home_path
from jaxft.harness.config import Config
from jaxft.harness.registry import LLMConfig
from jaxft.hosts.group import process_group
from jaxft.models.config import DecoderConfig, LoraSpec, model_preset
from jaxft.models.decoder import parameter_shapes
from jaxft.models.decoder_sharding import parameters_table, sharding_for
from jaxft.models.flash import compute_capability
from jaxft.models.gguf import config_file
from jaxft.models.hf_config import load_config
from jaxft.models.hf_files import local_folder
from jaxft.models.load import Lora, init_model, load_model, lora_spec, on_mesh
from jaxft.models.peft import load_adapter, load_lora_config
from jaxft.models.quantized import with_quantized_kernels
from jaxft.rollout.chat import find_stop_ids
from jaxft.rollout.client import ChatClient
from jaxft.rollout.policy import Policy
from jaxft.rollout.tokenizer import load_tokenizer, num_token_ids
from jaxft.rollout.weights import sampling_mesh
from jaxft.training.function_checks import check_values
from jaxft.training.update import make_loss


async def local_policy(config: LocalPolicyConfig, builder: Any) -> AsyncIterator[ChatClient]:
    """Yield a chat client of a new policy or snapshot; `path` overrides `preset`: one option selects a checkpoint."""
    name = next(name for name, llm in builder.config.llms.items() if llm is config)
    if config.snapshot_of is not None:
        yield await snapshot_client(name, config, builder)
        return
    async with _one_after_another:
        policy = await _make_policy(name, config, builder)
    builder.add_devices(policy.devices())
    yield ChatClient(policy, name, config.long_prompts)
    policy.close()


_one_after_another = asyncio.Lock()
"""Held while a policy is made: in all processes the programs on all devices have to come in one order."""


async def _make_policy(name: str, config: LocalPolicyConfig, builder: Any) -> Policy:
    """Make the policy `llms.<name>`, whose weights are there to decode with if there are several processes.

    Raises:
        HostsError: the devices of the processes do not reach each other.
    """
    seed = builder.config.finetuning.seed
    key = jax.random.key(seed, impl="threefry2x32")
    folder = None if config.path is None else local_folder(config.path)
    tokenizer = load_tokenizer(config.tokenizer if config.tokenizer is not None else config.path)
    shape = read_decoder_config(config)
    check_vocabulary(tokenizer, shape)  # before weights are read, and so is the next
    check_loss(name, config, builder.config)
    mesh, sampler_mesh = await _connected_meshes(name, config)
    device = compute_devices(None if mesh is None else Sharding(mesh))[0]
    dtype, compute_dtype = resolve_dtypes(config, device.platform)
    check_sampling_dtype(config, device)
    options: dict[str, Any] = {
        "dtype": dtype,
        "compute_dtype": compute_dtype,
        "sampling_dtype": config.sampling_dtype,
        "quantize_head": config.quantize_head,
        "kv_cache_dtype": config.kv_cache_dtype,
        "remat": "dots" if config.remat == "auto" else config.remat,  # the adapter chooses
        "lora": lora_option(config.lora),
    }
    if mesh is not None:
        options["mesh"] = mesh
    if folder is not None:
        options |= {"context_tokens": config.max_context_tokens, "ignored_keys": config.ignored_keys}
        model, params = load_model(folder, key=key, **options)
    else:
        model, params = init_model(shape, key, **options)
        if mesh is None:  # bound to their device, as a checkpoint's are: what is computed with both compiles once
            params = jax.device_put(params, compute_devices(None)[0])
    sampler = None
    if sampler_mesh is not None and config.sampler_mesh is not None:
        sampler = on_mesh(model, sampler_mesh, compute_dtype=compute_dtype)
    elif mesh is not None and spans_processes(model.sharding):
        sampler = on_mesh(model, sampling_mesh(mesh), compute_dtype=compute_dtype)
    policy = Policy(
        model,
        params,
        tokenizer,
        stop_ids=find_stop_ids(tokenizer, folder),
        seed=sampling_seed(seed, name, builder.config.llms),
        slots=process_share("slots", config.slots),
        max_context_tokens=config.max_context_tokens,
        cache_tokens=None if config.cache_tokens is None else process_share("cache_tokens", config.cache_tokens),
        base=None if config.path is None else base_name(config.path),
        sampler=sampler,
    )
    policy.template.now = builder.now
    policy.compiles.show = builder.console.compiling
    if spans_processes(model.sharding):  # it has weights to decode with before all devices compute anything else
        await policy.ready()
    builder.add_choices(f"llms.{name}", {"dtype": dtype, "compute_dtype": compute_dtype or dtype})
    return policy


async def _connected_meshes(name: str, config: LocalPolicyConfig) -> tuple[Mesh | None, Mesh | None]:
    """Make the meshes of the policy `llms.<name>`, as `make_meshes`, and let the processes on the first one connect.

    Raises:
        HostsError: the devices of the processes do not reach each other, or no options say where the processes are.
    """
    group = process_group()
    if group.is_alone and jax.process_count() > 1:
        raise HostsError("these devices belong to several machines: give --coordinator, --num-processes, --process-id")
    mesh, sampler_mesh = make_meshes(config)
    names = await group.gather("next policy", name)
    if {*names} != {name}:
        raise HostsError(f"the processes make policies in different orders: now {', '.join(names)}")
    if mesh is not None and not group.is_alone:
        try:
            connect(mesh)
        except jax.errors.JaxRuntimeError as error:
            raise HostsError(
                f"the devices of the processes do not reach each other ({one_line(error)}): on CPUs a process is "
                "reached at the address of its machine's name, as in /etc/hosts, on GPUs as NCCL_SOCKET_IFNAME says"
            ) from None
    return mesh, sampler_mesh


def check_vocabulary(tokenizer: Any, shape: DecoderConfig) -> None:
    """Raise unless a model has an embedding for every token of a tokenizer, added tokens included.

    Rows that no token has are usual: the text of their ids is empty.

    Raises:
        ValueError: the tokenizer has more tokens.
    """
    needed, rows = num_token_ids(tokenizer), shape.vocab_size
    if needed > rows:
        raise ValueError(
            f"the tokenizer in {tokenizer.name_or_path!r} has ids up to {needed - 1}, added tokens included, but the "
            f"model's embedding has {rows} rows; give the tokenizer that belongs to the model, remove added tokens, or "
            "add rows with `resize_token_embeddings` of transformers"
        )


def check_loss(name: str, policy: LocalPolicyConfig, config: Config) -> None:
    """Raise a ConfigError if the loss that a run trains the policy `llms.<name>` with cannot be computed.

    Its settings exclude each other, or a function of one's own gives values that nothing can be trained with. The
    adapter is made later: after a warm start, in many scripts.
    """
    chosen = config.finetuning.trainer_adapter
    adapter = config.trainer_adapters.get(chosen or "")
    if config.finetuning.enabled and isinstance(adapter, LocalTrainerAdapterConfig) and adapter.llm == name:
        try:
            make_loss(adapter.loss.for_context(policy.max_context_tokens))
        except ValueError as error:
            raise ConfigError(f"trainer_adapters.{chosen}.loss: {error}") from error
        if faults := check_values(adapter.loss):
            raise ConfigError([f"trainer_adapters.{chosen}.{field}: {message}" for field, message in faults])


async def snapshot_client(name: str, config: LocalPolicyConfig, builder: Any) -> ChatClient:
    """Add a snapshot to the policy that `snapshot_of` names, or adapters beside it, and return its chat client.

    Raises:
        ComponentError: that language model is no local policy, or is a snapshot, too; or it has adapters, or a mesh.
        ModelFileError: the adapters are damaged, or belong to another base.
    """
    assert config.snapshot_of is not None
    llm, llms = await builder.get_llm(config.snapshot_of), builder.config.llms
    if not isinstance(llm, ChatClient) or not isinstance(policy := llm.policy, Policy):
        raise ComponentError(f"llms.{name}.snapshot_of: '{config.snapshot_of}' is no local_policy, or a snapshot, too")
    own = config.with_sampling_settings(llms[config.snapshot_of])
    seed = sampling_seed(builder.config.finetuning.seed, name, llms)
    if config.adapter is not None:
        model, folder = policy.model, local_folder(config.adapter)
        assert isinstance(model.config, DecoderConfig)
        params = await policy.read(partial(load_adapter, folder, model.config))
        try:
            adapter = await policy.add_adapter(load_lora_config(folder), params, seed=seed)
        except ValueError as error:
            raise ComponentError(f"llms.{name}.adapter: {error}") from None
        return ChatClient(policy, name, own.long_prompts, adapter)
    snapshot = policy.add_snapshot(
        name,
        every=own.snapshot_every,
        seed=seed,
        slots=process_share("slots", own.slots),
        max_context_tokens=own.max_context_tokens,
        cache_tokens=None if own.cache_tokens is None else process_share("cache_tokens", own.cache_tokens),
    )
    return ChatClient(snapshot, name, own.long_prompts)


def sampling_seed(seed: int, name: str, llms: Mapping[str, LLMConfig]) -> int:
    """Return the seed of a policy's noise: the run's for the first policy of `llms`, others depend on their names, too.

    Two policies that are asked the same then draw different answers, even if they have the same weights.

    >>> llms = {"policy": LocalPolicyConfig(preset="qwen3-1m"), "opponent": LocalPolicyConfig(snapshot_of="policy")}
    >>> sampling_seed(3, "policy", llms), sampling_seed(3, "opponent", llms)
    (3, 795890958)
    """
    policies = (each for each, llm in llms.items() if isinstance(llm, LocalPolicyConfig) and llm.snapshot_of is None)
    if name == next(policies, name):
        return seed
    return int.from_bytes(hashlib.sha256(repr((seed, name)).encode()).digest()[:4], "big")


def resolve_dtypes(config: LocalPolicyConfig, platform: str) -> tuple[str, str | None]:
    """Return the dtypes of parameters and of products, in which `auto` stands for the best ones on a platform.

    On GPUs and TPUs products are bfloat16, as float32 ones take 8 times as long or more, and the parameters that are
    trained stay float32, in which small updates are not lost.

    Args:
        config: configuration of the policy.
        platform: "cpu", "gpu" or "tpu".

    >>> config = LocalPolicyConfig(preset="qwen3-1m")
    >>> resolve_dtypes(config, "tpu"), resolve_dtypes(config, "cpu")
    (('float32', 'bfloat16'), ('float32', None))
    >>> resolve_dtypes(LocalPolicyConfig(preset="qwen3-1m", lora=LoraConfig()), "gpu")
    ('bfloat16', 'bfloat16')
    """
    is_fast, has_adapters = platform != "cpu", config.lora is not None
    dtype = config.dtype if config.dtype != "auto" else "bfloat16" if is_fast and has_adapters else "float32"
    compute_dtype = config.compute_dtype if config.compute_dtype != "auto" else "bfloat16" if is_fast else None
    return dtype, compute_dtype or ("float32" if dtype == "int8" else None)


FP8_SINCE = (8, 9)
"""Compute capability of the first of NVIDIA's GPUs with fp8. For others XLA writes the kernels in bfloat16 first."""


def check_sampling_dtype(config: LocalPolicyConfig, device: Any) -> None:
    """Raise unless a device, of jax or planned for, has products with kernels of `sampling_dtype`, keys and values.

    Raises:
        ValueError: they are fp8, and the device has none.
    """
    has_none = device.platform != "tpu" and compute_capability(device) < FP8_SINCE
    if config.kv_cache_dtype == "fp8" and has_none:
        raise ValueError(
            f"kv_cache_dtype is fp8, which {device.device_kind} does not have; leave it out, or take one of NVIDIA's "
            "GPUs from Ada and Hopper on, or a TPU"
        )
    if config.sampling_dtype == "fp8" and has_none:
        raise ValueError(
            f"sampling_dtype is fp8, which {device.device_kind} does not have; wanted int8, or one of NVIDIA's GPUs "
            "from Ada and Hopper on, or a TPU"
        )


def base_name(path: str) -> str:
    """Return the name of a checkpoint for other programs: the absolute path of a folder or file, or the hub id."""
    folder = home_path(path)
    return str(folder.absolute()) if folder.exists() else path


def lora_option(config: LoraConfig | None) -> Lora | None:
    """Return the `lora` of `init_model` and `load_model`; a folder of adapters overrides the settings of fresh ones."""
    return None if config is None else config.path or config.lora()


def make_device_mesh(config: MeshConfig) -> Mesh:
    """Make the mesh of all devices, those of other processes included.

    Raises:
        ValueError: the sizes do not multiply to the number of devices.
    """
    return make_mesh(config.data, config.fsdp, config.tensor, expert=config.expert)


def make_meshes(config: LocalPolicyConfig) -> tuple[Mesh | None, Mesh | None]:
    """Make the mesh of the parameters and that of the sampler; None for a single device, or no sampler of its own.

    Several processes without `mesh` train on a device of each.

    Raises:
        ValueError: their sizes do not add up to the number of devices, or both are to take all that are left.
    """
    if config.sampler_mesh is None:
        if config.mesh is not None or jax.process_count() == 1:
            return None if config.mesh is None else make_device_mesh(config.mesh), None
        of_process = {device.process_index: device for device in reversed(jax.devices())}
        return make_mesh(devices=[of_process[index] for index in sorted(of_process)]), None
    if jax.process_count() > 1:
        raise ValueError("sampler_mesh is given, but each of several processes samples on its devices: leave it out")
    devices, trains, samples = jax.local_devices(), config.mesh or MeshConfig(data=1), config.sampler_mesh
    count = num_devices(trains)
    if count is None:
        own = num_devices(samples)
        if own is None:
            raise ValueError(
                "mesh and sampler_mesh both take all devices that are left; give one of them all its sizes"
            )
        count = len(devices) - own
    if not 0 < count < len(devices):
        raise ValueError(
            f"mesh has {max(count, 0)} of {len(devices)} devices; wanted at least one for it, and one for sampler_mesh"
        )
    split = (trains, devices[:count]), (samples, devices[count:])
    mesh, sampler_mesh = (make_mesh(each.data, each.fsdp, each.tensor, own, each.expert) for each, own in split)
    return None if config.mesh is None else mesh, sampler_mesh


def process_share(name: str, number: int) -> int:
    """Return the part of slots, or of tokens in caches, that each process has.

    Raises:
        ValueError: there are not as many for each.
    """
    count = jax.process_count()
    if number % count:
        raise ValueError(f"{name} is {number}, which {count} processes cannot share; wanted a multiple of {count}")
    return number // count


def num_devices(config: MeshConfig) -> int | None:
    """Return the number of devices of a mesh; None if it takes all that are left.

    >>> num_devices(MeshConfig(data=2, tensor=4)), num_devices(MeshConfig())
    (8, None)
    """
    sizes = config.data, config.fsdp, config.tensor, config.expert
    return None if -1 in sizes else math.prod(sizes)


def read_decoder_config(config: LocalPolicyConfig) -> DecoderConfig:
    """Return the config of the model, without reading weights.

    Raises:
        ValueError: the model knows no positions as high as `max_context_tokens`.
    """
    if config.path is not None:
        found = load_config(config_file(local_folder(config.path)), config.ignored_keys)
    else:
        assert config.preset is not None
        found = model_preset(config.preset, vocab_size=num_token_ids(load_tokenizer(config.tokenizer)))
    return found.for_context(config.max_context_tokens)


def sharding_table(config: LocalPolicyConfig) -> str | None:
    """Return the sharding of every parameter over the mesh of the configuration, as text; None without a mesh.

    A mesh whose sizes are all given can be planned without its devices.

    Raises:
        ValueError: the model does not divide over the mesh.
    """
    if config.mesh is None:
        return None
    shape = read_decoder_config(config)
    sizes = config.mesh.data, config.mesh.fsdp, config.mesh.tensor
    axes = mesh_axes(sizes, config.mesh.expert)
    mesh = make_meshes(config)[0] if min(sizes) < 1 else AbstractMesh(tuple(axes.values()), tuple(axes))
    assert mesh is not None
    params = stored_shapes(shape, lora_spec(lora_option(config.lora)), config, compute_platform(Sharding(mesh)))
    return parameters_table(params, sharding_for(shape, mesh))


def stored_shapes(shape: DecoderConfig, lora: LoraSpec | None, config: LocalPolicyConfig, platform: str) -> Params:
    """Return the shapes of a policy's parameters, in the dtypes that they have on a platform; adapters are float32."""
    params, (dtype, compute_dtype) = parameter_shapes(shape, lora), resolve_dtypes(config, platform)

    def stored(base: Params) -> Params:
        cast = cast_params(base, compute_dtype if dtype == "int8" else dtype)
        return with_quantized_kernels(cast, dtype) if dtype == "int8" else cast

    base = jax.eval_shape(stored, params.get(BASE, params))
    return {**params, BASE: base} if BASE in params else base
