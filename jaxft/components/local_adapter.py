"""`_type: local_trainer_adapter`: trains the policy that sampled, in the same process."""

import asyncio
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import Field, model_validator

from jaxft.components.losses import LossConfig
from jaxft.components.optimizers import OptimizerConfig
from jaxft.harness.data_models import (
    TrainingJobRef,
    TrainingJobStatus,
    TrainingStatusEnum,
    TrajectoryCollection,
)
from jaxft.harness.errors import ComponentError, UserCodeError, user_code
from jaxft.harness.fields import LLMRef, fault
from jaxft.harness.interfaces import TrainerAdapter
from jaxft.harness.registry import TrainerAdapterConfig, register_trainer_adapter

if TYPE_CHECKING:
    from jaxft.components.learner import Learner
    from jaxft.policy.policy import Policy

BACKEND = "local"


class LocalTrainerAdapterConfig(TrainerAdapterConfig, name="local_trainer_adapter"):
    """Updates the policy in place."""

    llm: LLMRef = Field(description="The policy to train: an entry of llms of type local_policy.")
    loss: LossConfig = Field(default=LossConfig(), description="What is minimised.")
    optimizer: OptimizerConfig = Field(default=OptimizerConfig(), description="How.")
    microbatch_tokens: int = Field(default=8192, ge=1, description="Tokens of one forward and backward pass, at most.")
    packing: bool = Field(default=True, description="Several short sequences share a row where that saves work.")
    minibatches: int = Field(default=1, ge=1, description="Optimiser steps of one pass over a job's trajectories.")
    updates_per_batch: int = Field(default=1, ge=1, description="Passes over a job's trajectories.")

    @model_validator(mode="after")
    def _reinforce_updates_once(self) -> "LocalTrainerAdapterConfig":
        if self.loss.name == "reinforce" and self.minibatches * self.updates_per_batch > 1:
            raise fault("loss 'reinforce' has no ratio: it allows minibatches 1 and updates_per_batch 1 only")
        return self


@dataclass
class _Job:
    status: TrainingJobStatus
    task: "asyncio.Task[None] | None" = None
    history: list[dict[str, Any]] = field(default_factory=list)


class LocalTrainerAdapter(TrainerAdapter):
    """Owns the optimiser's state; the parameters are the policy's."""

    adapter_config: LocalTrainerAdapterConfig

    def __init__(
        self, adapter_config: LocalTrainerAdapterConfig, policy: "Policy", warn: Any = print, seed: int = 0
    ) -> None:
        """`warn` is called with a sentence the first time something deserves one; `seed` shuffles minibatches.

        Raises:
            ValueError: the loss cannot be made of its knobs.
            ComponentError: the reference's checkpoint is of another model.
        """
        super().__init__(adapter_config)
        self.policy = policy
        self._warn = warn
        self._has_warned = False
        self.learner = make_learner(adapter_config, policy, seed)
        self._jobs: dict[str, _Job] = {}

    async def is_healthy(self) -> bool:
        """Whether there are parameters, all of them finite."""
        import jax
        import jax.numpy as jnp

        from jaxft.policy.policy import PolicyLostError

        try:
            return await self.policy.read(
                lambda params: all(bool(jnp.isfinite(leaf).all()) for leaf in jax.tree.leaves(params))
            )
        except PolicyLostError:
            return False

    async def submit(self, trajectories: TrajectoryCollection) -> TrainingJobRef:
        """Queues one update on these trajectories and returns at once.

        Raises:
            ValueError: the job's name is taken.
            NothingToTrain: no row has a token to train.
            TrajectoryError: greedy or malformed rows are among them.
        """
        run_id = trajectories.run_id
        if run_id in self._jobs:
            raise ValueError(f"job '{run_id}' has been submitted before; every job needs an id of its own")
        from jaxft.components.credit import gather_credit
        from jaxft.components.rows import gather_rows

        loss = self.adapter_config.loss
        gathered = gather_rows(
            trajectories,
            llm=self.adapter_config.llm,
            policy_version=self.policy.version,
            mask_truncated=loss.mask_truncated,
        )
        credit = gather_credit(gathered.groups, loss)
        self._warn_of_filters(gathered.log_kept_mass)
        learn = partial(self.learner.learn, gathered.rows, credit)
        ref = TrainingJobRef(run_id=run_id, backend=BACKEND)
        job = _Job(TrainingJobStatus(run_id=run_id, backend=BACKEND, status=TrainingStatusEnum.PENDING, progress=0.0))
        self._jobs[run_id] = job
        job.task = asyncio.create_task(self._run(job, learn, gathered.metrics | credit.metrics), name=f"job {run_id}")
        return ref

    async def status(self, ref: TrainingJobRef) -> TrainingJobStatus:
        """Where a job stands. Its `metadata` holds `metrics` and `timings` once it has completed."""
        return self._job(ref).status

    async def wait_until_complete(self, ref: TrainingJobRef, poll_interval: float = 10.0) -> TrainingJobStatus:
        """The last status of a job, as soon as there is one; `poll_interval` is not needed and ignored."""
        job = self._job(ref)
        assert job.task is not None
        await asyncio.shield(job.task)
        return job.status

    def log_progress(self, ref: TrainingJobRef, metrics: dict[str, Any], output_dir: str | None = None) -> None:
        """Keeps figures with the job; they are the `history` of its metadata."""
        job = self._job(ref)
        job.history.append(dict(metrics))
        job.status = job.status.model_copy(update={"metadata": {**(job.status.metadata or {}), "history": job.history}})

    async def export_model(self, folder: Path) -> Path:
        """Writes model and tokenizer in Hugging Face's file format."""
        return await self.policy.save(folder)

    def _job(self, ref: TrainingJobRef) -> _Job:
        if ref.run_id not in self._jobs:
            raise ValueError(f"no job '{ref.run_id}' was submitted; jobs: {', '.join(self._jobs) or 'none'}")
        return self._jobs[ref.run_id]

    def _warn_of_filters(self, log_mass: Any) -> None:
        """Says, once, that truncated sampling was used; `log_mass` holds the log of the mass kept, per token."""
        import numpy as np

        if self._has_warned or not log_mass.any():
            return
        self._has_warned = True
        kept = np.exp(log_mass).mean()
        self._warn(
            f"warning: tokens were drawn with top-k, top-p or min-p, which kept {kept:.1%} of the mass on average; "
            "what cannot be sampled cannot be unlearned: train without filters"
        )

    async def _run(self, job: _Job, learn: Any, metrics: dict[str, float]) -> None:
        job.status = job.status.model_copy(update={"status": TrainingStatusEnum.RUNNING})
        started = time.perf_counter()
        try:
            with user_code():  # whatever stops the job becomes its status
                update_metrics = await self.policy.update(
                    learn, has_changed=lambda figures: figures["applied_updates"] > 0
                )
        except UserCodeError as failure:
            job.status = job.status.model_copy(
                update={
                    "status": TrainingStatusEnum.FAILED,
                    "message": failure.summary,
                    "metadata": {"traceback": failure.traceback},
                }
            )
            return
        timings = {"seconds_update": time.perf_counter() - started, "compiles": self.policy.compiles.count}
        job.status = job.status.model_copy(
            update={
                "status": TrainingStatusEnum.COMPLETED,
                "progress": 100.0,
                "message": _outcome(update_metrics),
                "metadata": {
                    "metrics": {**metrics, **update_metrics, "policy_version": self.policy.version},
                    "timings": timings,
                },
            }
        )


def make_learner(config: LocalTrainerAdapterConfig, policy: "Policy", seed: int) -> "Learner":
    """The learner of an adapter; a reference of its own is loaded here, before anything is trained."""
    from jaxft.components.learner import Learner

    ref_params = None
    if config.loss.beta and config.loss.reference.path is not None:
        from jaxft.models.hf import load_model

        reference, ref_params = load_model(config.loss.reference.path)
        if reference.config != policy.model.config:
            raise ComponentError(
                f"loss.reference.path: {config.loss.reference.path} holds {reference.config}; "
                f"the policy is {policy.model.config}"
            )
    return Learner(
        policy.model,
        config.loss,
        config.optimizer,
        microbatch_tokens=config.microbatch_tokens,
        minibatches=config.minibatches,
        updates_per_batch=config.updates_per_batch,
        packing=config.packing,
        seed=seed,
        ref_params=ref_params,
    )


def _outcome(metrics: dict[str, float]) -> str:
    if metrics["nonfinite_updates"]:
        return "loss or gradient were not finite; parameters and optimiser state stay as they were"
    if metrics["nothing_to_learn"]:
        return "nothing to learn: the gradient is exactly zero; parameters and optimiser state stay as they were"
    return "updated"


@register_trainer_adapter(config_type=LocalTrainerAdapterConfig)
async def local_trainer_adapter(config: LocalTrainerAdapterConfig, builder: Any) -> AsyncIterator[LocalTrainerAdapter]:
    """An adapter for the policy behind `llm`."""
    from jaxft.policy.client import ChatClient

    llm = await builder.get_llm(config.llm)
    if not isinstance(llm, ChatClient):
        raise ComponentError(f"llm '{config.llm}' is a {type(llm).__name__}; only a local_policy can be trained here")
    yield LocalTrainerAdapter(config, llm.policy, builder.console.message, builder.config.finetuning.seed)
