"""The programs of a run for a mesh of any devices, also of devices that are not here, and the memory held beside them.

They are those of `Learner` and `ModelRunner`, made from shapes alone: nothing is allocated.
"""

import math
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh

from jaxft.core.partition import BASE, trainable
from jaxft.core.sharding import Sharding, device_bytes, make_mesh, mesh_sizes
from jaxft.core.types import Model, Params
from jaxft.models.attention import Scores
from jaxft.models.config import DecoderConfig, LoraSpec
from jaxft.models.decoder import Remat, decoder, parameter_shapes
from jaxft.models.decoder_sharding import sharding_for
from jaxft.models.flash import Choice, choose_kernel
from jaxft.models.load import lora_spec
from jaxft.planning.targets import Target
from jaxft.rollout.model_runner import ModelRunner
from jaxft.rollout.relayout import Relayout
from jaxft.shipped.configs import LocalPolicyConfig, LocalTrainerAdapterConfig, MeshConfig
from jaxft.shipped.local_adapter import make_learner
from jaxft.shipped.local_policy import dtypes_of, lora_of
from jaxft.training.learner import Learner, TeacherModel, loses_kernel


class Run(NamedTuple):
    """The settings that the programs of a run follow from: policy, trainer adapter, and the shape of the model.

    `snapshots` are those of the policy, with the sizes that they have; they add memory, but no program. `teacher` has
    policy and shape of the teacher of a distillation.
    """

    policy: LocalPolicyConfig
    adapter: LocalTrainerAdapterConfig
    model: DecoderConfig
    snapshots: tuple[LocalPolicyConfig, ...] = ()
    max_staleness: int = 0
    teacher: "Run | None" = None

    @property
    def lora(self) -> LoraSpec | None:
        """Settings of the adapters; None without any."""
        return lora_spec(lora_of(self.policy.lora))


def mesh_shape(mesh: MeshConfig | None, devices: int) -> tuple[int, int, int]:
    """Return the sizes of the axes of a configured mesh on a number of devices; no mesh is one device.

    Raises:
        ValueError: the sizes do not multiply to the number of devices.

    >>> mesh_shape(MeshConfig(data=1, fsdp=-1), 8), mesh_shape(None, 8)
    ((1, 8, 1), (1, 1, 1))
    """
    return (1, 1, 1) if mesh is None else mesh_sizes(mesh.data, mesh.fsdp, mesh.tensor, devices)


def mesh_of_devices(run: Run, devices: Sequence[Any]) -> Mesh:
    """Return the mesh of a run on these devices, of which it may leave some unused."""
    sizes = mesh_shape(run.policy.mesh, len(devices))
    return make_mesh(*sizes, devices=list(devices)[: math.prod(sizes)])


class Programs:
    """The programs of a run on a mesh.

    Attributes:
        model: the model, with the sharding of the mesh.
        params: shapes of the parameters, with their shardings.
        learner: makes the programs of training.
        runner: makes those of sampling.
    """

    def __init__(self, run: Run, mesh: Mesh | AbstractMesh, target: Target, remat: Remat) -> None:
        """Make model and learner.

        Args:
            run: the run.
            mesh: mesh of the target's devices, or an abstract one, which cannot be compiled for.
            target: the accelerators, which decide dtypes and kernels.
            remat: checkpoint policy.

        Raises:
            ValueError: the model does not divide over the mesh.
        """
        dtype, compute_dtype = dtypes_of(run.policy, target.chip.platform)
        self.run, self.target, self.remat = run, target, remat
        self.compute_dtype = jnp.dtype(compute_dtype or dtype)
        self.sharding, self.model, self.params = _model(run, mesh, target, remat)
        adapter = run.adapter
        if adapter.packing is None:
            packing = not loses_kernel(run.model, self.compute_dtype, [target.device])
            adapter = adapter.model_copy(update={"packing": packing})
        ref_params = self.params if adapter.has_own_reference else None
        teacher = None if run.teacher is None else TeacherModel(*_model(run.teacher, mesh, target, remat)[1:])
        self.learner: Learner = make_learner(
            adapter, self.model, ref_params=ref_params, max_staleness=run.max_staleness, teacher=teacher
        )

    @cached_property
    def runner(self) -> ModelRunner:
        """The runner of the sampler's programs."""
        return self._runner_of(self.run.policy)

    def _runner_of(self, policy: LocalPolicyConfig) -> ModelRunner:
        return ModelRunner(
            self.model,
            seed=0,
            slots=policy.slots,
            length=policy.max_context_tokens,
            cache_tokens=policy.cache_tokens,
        )

    def by_name(self) -> dict[str, Callable[[], Any]]:
        """Return functions that lower the programs, by name: `gradient`, `step`, `prefill`, `decode`."""
        training = self.learner.programs(self.params, self.run.policy.max_context_tokens)
        return training | self.runner.programs(Relayout(self.model).shapes(self.params))

    def warm_up(self) -> dict[str, Callable[[], Any]]:
        """Return functions that lower the programs which `ModelRunner.warm_up` runs, by name."""
        return self.runner.warm_up_programs(Relayout(self.model).shapes(self.params))

    def held(self) -> dict[str, int]:
        """Return the bytes per device, by purpose, of all arrays that outlive a program.

        The purposes are those of `LocalTrainerAdapter.memory`; temporaries are not among them.
        """
        sizes, relayout = self.learner.held_bytes(self.params), Relayout(self.model)
        dtype, snapshots = relayout.dtype(self.params), self.run.snapshots
        caches = [self._runner_of(policy).cache_bytes(dtype) for policy in (self.run.policy, *snapshots)]
        sizes |= {"sampling": sum(caches), "sampling weights": relayout.extra_bytes(self.params)}
        if snapshots:
            kept, weights = relayout.snapshot_bytes(self.params)
            sizes["snapshots"] = len(snapshots) * kept
            sizes["sampling weights"] += len(snapshots) * weights
        if self.run.max_staleness:
            sizes["held sampling weights"] = relayout.extra_bytes(self.params, is_shared=False)
        return sizes

    def rows_and_width(self) -> tuple[int, int]:
        """Return rows and tokens per row of the largest microbatch, over the whole mesh."""
        return self.learner.largest_microbatch(self.params, self.run.policy.max_context_tokens)

    def is_packed(self) -> bool:
        """True if rows of a microbatch hold several sequences."""
        return self.learner.packs_rows(self.params)

    def is_smallest(self) -> bool:
        """True if a microbatch cannot have fewer rows."""
        rows, width = self.rows_and_width()
        return self.learner.heights(self.params, width)[-1] == rows

    def kernel(self) -> Choice:
        """Return the kernel of attention in the largest microbatch; the reference if some layers have no kernel."""
        config, (_, width) = self.run.model, self.rows_and_width()
        windows = {kind.window if (kind.window or width) < width else None for kind in config.pattern}
        choices = [
            choose_kernel(
                self.compute_dtype,
                config.head_dim,
                Scores(config.score_scale, window, config.attention_soft_cap),
                [self.target.device],
                has_segments=self.is_packed(),
            )
            for window in windows
        ]
        return next((choice for choice in choices if choice.kernel == "xla"), choices[0])

    def trained_parameters(self) -> int:
        """Return the number of parameters that are trained."""
        return sum(leaf.size for leaf in jax.tree.leaves(trainable(self.model, self.params)))

    def parameters(self) -> int:
        """Return the number of all parameters."""
        return device_bytes(None, jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, "int8"), self.params))


def _model(run: Run, mesh: Mesh | AbstractMesh, target: Target, remat: Remat) -> tuple[Sharding, Model, Params]:
    """Return sharding and model of a run's policy on a mesh, and the shapes of its parameters with their shardings."""
    dtype, compute_dtype = dtypes_of(run.policy, target.chip.platform)
    sharding = sharding_for(run.model, mesh)
    model = decoder(run.model, remat, compute_dtype=compute_dtype, lora=run.lora, sharding=sharding)
    return sharding, model, sharding.place(_shapes(run, jnp.dtype(dtype)))


def _shapes(run: Run, dtype: Any) -> Params:
    """Return the shapes of the parameters; adapters are float32."""
    params = parameter_shapes(run.model, run.lora)
    base = params.get(BASE, params)
    base = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, dtype), base)
    return {**params, BASE: base} if BASE in params else base
