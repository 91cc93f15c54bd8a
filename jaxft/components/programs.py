"""The programs of a run for a mesh of any devices, also of devices that are not here, and the memory held beside them.

They are those of `Learner` and `ModelRunner`, made from shapes alone: nothing is allocated.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh
from pydantic import TypeAdapter

from jaxft.components.configs import GRPOTrainerConfig, LocalPolicyConfig, LocalTrainerAdapterConfig, MeshConfig
from jaxft.components.local_policy import (
    check_sampling_dtype,
    lora_option,
    read_decoder_config,
    resolve_dtypes,
    stored_shapes,
)
from jaxft.components.training_job import make_learner
from jaxft.core.partition import trainable
from jaxft.core.sharding import Sharding, device_bytes, make_mesh, mesh_axes, mesh_sizes
from jaxft.core.types import Model, Params
from jaxft.errors import ConfigError
from jaxft.harness.config import Config
from jaxft.harness.registry import ComponentConfig
from jaxft.models.config import DecoderConfig, LoraSpec
from jaxft.models.decoder import Remat, decoder
from jaxft.models.decoder_sharding import sharding_for
from jaxft.models.flash import Choice, layer_kernels, reason_not_to_pack
from jaxft.models.load import lora_spec
from jaxft.models.quantized import map_kernels
from jaxft.rollout.model_runner import ModelRunner
from jaxft.rollout.weights import Weights, WeightTransfer
from jaxft.training.config import SELF_TEACHERS
from jaxft.training.learner import Learner, choose_microbatch_tokens
from jaxft.training.memory import disk_bytes, sampling_bytes, training_bytes


class PlannedRun(NamedTuple):
    """The settings that the programs of a run follow from: policy, trainer adapter, and the shape of the model.

    `snapshots` are those of the policy, with the sizes that they have; they add memory, but no program. `teacher` has
    policy and shape of the teacher of a distillation. `samples_beside` is true if the sampler holds weights of its own.
    """

    policy: LocalPolicyConfig
    adapter: LocalTrainerAdapterConfig
    model: DecoderConfig
    snapshots: tuple[LocalPolicyConfig, ...] = ()
    max_staleness: int = 0
    samples_beside: bool = False
    teacher: "PlannedRun | None" = None

    @property
    def lora(self) -> LoraSpec | None:
        """Settings of the adapters; None without any."""
        return lora_spec(lora_option(self.policy.lora))

    @property
    def remat(self) -> Remat:
        """Checkpoint policy; where the configuration leaves it open, `with_remat` sets it."""
        assert self.policy.remat != "auto"
        return self.policy.remat

    def with_remat(self, remat: Remat) -> "PlannedRun":
        """Return the run with this checkpoint policy."""
        teacher = None if self.teacher is None else self.teacher.with_remat(remat)
        return self._replace(policy=self.policy.model_copy(update={"remat": remat}), teacher=teacher)

    def to_json(self) -> dict[str, Any]:
        """Return what the programs follow from, as JSON's types."""
        model = TypeAdapter(DecoderConfig).dump_python(self.model, mode="json")
        described = {"policy": plain(self.policy), "adapter": plain(self.adapter), "model": model}
        return described | {"teacher": None if self.teacher is None else self.teacher.to_json()}


def run_from_json(values: Mapping[str, Any]) -> PlannedRun:
    """Invert `Run.to_json`."""
    return PlannedRun(
        LocalPolicyConfig.model_validate(values["policy"]),
        LocalTrainerAdapterConfig.model_validate(values["adapter"]),
        TypeAdapter(DecoderConfig).validate_python(values["model"]),
        teacher=None if values["teacher"] is None else run_from_json(values["teacher"]),
    )


def plain(config: ComponentConfig) -> dict[str, Any]:
    """Return the fields of a configuration as JSON's types, without its type."""
    return {name: value for name, value in config.model_dump(mode="json").items() if name != "_type"}


def planned_run(config: Config) -> PlannedRun:
    """Return the settings that the programs of a configuration's training follow from.

    Raises:
        ConfigError: nothing is trained in this process, or the shape of the model is not known.
    """
    name = config.finetuning.trainer_adapter
    adapter = config.trainer_adapters.get(name or "")
    if not isinstance(adapter, LocalTrainerAdapterConfig):
        raise ConfigError(f"finetuning.trainer_adapter: is {name!r}; only a local_trainer_adapter can be planned")
    policy = config.llms[adapter.llm]
    if not isinstance(policy, LocalPolicyConfig):
        raise ConfigError(f"llms.{adapter.llm}: only a local_policy can be planned")
    if policy.sampler_mesh is not None:
        raise ConfigError(f"llms.{adapter.llm}.sampler_mesh: only a mesh that trains and samples can be planned")
    adapter = adapter.for_context(policy.max_context_tokens)
    trainer = config.trainers.get(config.finetuning.trainer or "")
    max_staleness = trainer.max_staleness if isinstance(trainer, GRPOTrainerConfig) else 0
    takes_turns = isinstance(trainer, GRPOTrainerConfig) and trainer.partial_rollout_tokens is not None
    staleness = max_staleness, max_staleness > 0 and not takes_turns
    snapshots = tuple(
        llm.with_sampling_settings(policy)
        for llm in config.llms.values()
        if isinstance(llm, LocalPolicyConfig) and llm.snapshot_of == adapter.llm
    )
    distillation = adapter.loss.distillation
    is_itself = distillation is None or distillation.teacher in SELF_TEACHERS
    named = None if distillation is None or is_itself else config.llms[distillation.teacher]
    if named is not None and not isinstance(named, LocalPolicyConfig):
        raise ConfigError("loss.distillation.teacher: only a local_policy can teach")
    try:
        teacher = None if named is None else PlannedRun(named, adapter, read_decoder_config(named))
        return PlannedRun(policy, adapter, read_decoder_config(policy), snapshots, *staleness, teacher)
    except (ValueError, OSError) as error:
        raise ConfigError(f"llms.{adapter.llm}: {error}") from error


def mesh_shape(mesh: MeshConfig | None, devices: int) -> dict[str, int]:
    """Return the sizes of the axes of a configured mesh on a number of devices; no mesh is one device.

    Raises:
        ValueError: the sizes do not multiply to the number of devices.

    >>> mesh_shape(MeshConfig(data=1, fsdp=-1), 8), mesh_shape(None, 8)
    ({'data': 1, 'fsdp': 8, 'tensor': 1}, {'data': 1, 'fsdp': 1, 'tensor': 1})
    """
    if mesh is None:
        return mesh_axes((1, 1, 1), 1)
    return mesh_axes(mesh_sizes(mesh.data, mesh.fsdp, mesh.tensor, devices, mesh.expert), mesh.expert)


def mesh_of_devices(run: PlannedRun, devices: Sequence[Any]) -> Mesh:
    """Return the mesh of a run on these devices, of which it may leave some unused."""
    sizes = mesh_shape(run.policy.mesh, len(devices))
    return make_mesh(**sizes, devices=list(devices)[: math.prod(sizes.values())])


class Programs:
    """The programs of a run on a mesh.

    Attributes:
        model: the model, with the sharding of the mesh.
        params: shapes of the parameters, with their shardings.
        learner: makes the programs of training.
        runner: makes those of sampling.
    """

    def __init__(self, run: PlannedRun, mesh: Mesh | AbstractMesh, device: Any, has_processes: bool = False) -> None:
        """Make model and learner.

        Args:
            run: the run, with a checkpoint policy of its own.
            mesh: mesh of devices to compile for, or an abstract one, which cannot be compiled for.
            device: one of them, or the attributes that decide about dtypes and kernels.
            has_processes: True if the devices are those of several processes.

        Raises:
            ValueError: the model does not divide over the mesh.
        """
        dtype, compute_dtype = resolve_dtypes(run.policy, device.platform)
        check_sampling_dtype(run.policy, device)
        self.run, self.device, self._has_processes = run, device, has_processes
        self.compute_dtype = jnp.dtype(compute_dtype or dtype)
        self.dtype = self.compute_dtype if dtype == "int8" else jnp.dtype(dtype)  # of all that is not in eight bits
        self.sharding, self.model, self.params = _model(run, mesh, device.platform)
        tokens, packing = choose_microbatch_tokens(run.adapter.microbatch_tokens, device.platform), run.adapter.packing
        if packing is None:
            packing = not reason_not_to_pack(run.model, self.compute_dtype, [device])
        adapter = run.adapter.model_copy(update={"packing": packing, "microbatch_tokens": tokens})
        weights = {"reference": Weights(self.model, self.params)} if adapter.has_own_reference else {}
        if run.teacher is not None:
            weights["teacher"] = Weights(*_model(run.teacher, mesh, device.platform)[1:])
        self.learner: Learner = make_learner(adapter, self.model, 0, weights, max_staleness=run.max_staleness)

    @cached_property
    def runner(self) -> ModelRunner:
        """The runner of the sampler's programs."""
        return self._abstract_runner(self.run.policy)

    def _abstract_runner(self, policy: LocalPolicyConfig) -> ModelRunner:
        return ModelRunner(
            self.model,
            seed=0,
            slots=policy.slots,
            length=policy.max_context_tokens,
            cache_tokens=policy.cache_tokens,
            platform=self.device.platform,
        )

    def by_name(self) -> dict[str, Callable[[], Any]]:
        """Return functions that lower the programs, by name: `gradient`, `step`, `prefill`, `decode`."""
        training = self.learner.programs(self.params, self.run.policy.max_context_tokens)
        return training | self.runner.programs(WeightTransfer(self.model).shapes(self.params))

    def warm_up(self) -> dict[str, Callable[[], Any]]:
        """Return functions that lower the programs which `ModelRunner.warm_up` runs, by name."""
        return self.runner.warm_up_programs(WeightTransfer(self.model).shapes(self.params))

    def held(self) -> dict[str, int]:
        """Return the bytes per device, by purpose, of all arrays that outlive a program.

        The purposes are those of `LocalTrainerAdapter.memory`; temporaries are not among them.
        """
        transfer, policies = WeightTransfer(self.model), (self.run.policy, *self.run.snapshots)
        caches = [self._abstract_runner(policy).cache_bytes(transfer.dtype(self.params)) for policy in policies]
        options = {"are_pinned": self.run.samples_beside, "has_processes": self._has_processes}
        sampling = sampling_bytes(self.model, transfer, self.params, caches, **options)
        return training_bytes(self.learner, self.params) | sampling

    def disk_bytes(self) -> dict[str, int]:
        """Return the bytes of weights in files; see `jaxft.training.memory.disk_bytes`."""
        num_copies = len(self.run.snapshots) + (self.run.samples_beside and self.run.max_staleness == 1)
        has_base = self.run.policy.path is None
        return disk_bytes(self.learner, self.params, num_copies=num_copies, has_base=has_base)

    def rows_and_width(self) -> tuple[int, int]:
        """Return rows and tokens per row of the largest microbatch, over the whole mesh."""
        return self.learner.largest_microbatch(self.params, self.run.policy.max_context_tokens)

    def is_packed(self) -> bool:
        """True if rows of a microbatch hold several sequences."""
        return self.learner.packs_rows(self.params)

    def is_smallest(self) -> bool:
        """True if a microbatch cannot have fewer rows."""
        rows, width = self.rows_and_width()
        return self.learner.row_buckets(self.params, width)[-1] == rows

    def kernel(self) -> Choice:
        """Return the kernel of attention in the largest microbatch; the reference if some layers have no kernel."""
        given = self.run.model, self.compute_dtype, [self.device]
        kernels = layer_kernels(*given, has_segments=self.is_packed(), length=self.rows_and_width()[1])
        choices = list(kernels.values())
        return next((choice for choice in choices if choice.kernel == "xla"), choices[0])

    def trained_parameters(self) -> int:
        """Return the number of parameters that are trained."""
        return sum(leaf.size for leaf in jax.tree.leaves(trainable(self.model, self.params)))

    def parameters(self) -> int:
        """Return the number of all parameters."""
        return device_bytes(None, map_kernels(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, "int8"), self.params))


def _model(run: PlannedRun, mesh: Mesh | AbstractMesh, platform: str) -> tuple[Sharding, Model, Params]:
    """Return sharding and model of a run's policy on a mesh, and the shapes of its parameters with their shardings."""
    options: dict[str, Any] = {
        "compute_dtype": resolve_dtypes(run.policy, platform)[1],
        "sampling_dtype": run.policy.sampling_dtype,
        "quantize_head": run.policy.quantize_head,
        "kv_cache_dtype": run.policy.kv_cache_dtype,
    }
    sharding = sharding_for(run.model, mesh)
    model = decoder(run.model, run.remat, **options, lora=run.lora, sharding=sharding)
    return sharding, model, sharding.place(stored_shapes(run.model, run.lora, run.policy, platform))
