"""`_type: local_trainer_adapter`: trains the policy that sampled, in the same process, one update per job."""

import asyncio
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import Field

from jaxft.components.losses import LossConfig, make_loss
from jaxft.components.optimizers import OptimizerConfig, make_optimizer
from jaxft.harness.data_models import (
    TrainingJobRef,
    TrainingJobStatus,
    TrainingStatusEnum,
    Trajectory,
    TrajectoryCollection,
)
from jaxft.harness.errors import ComponentError, NothingToTrain, TrajectoryError, UserCodeError, user_code
from jaxft.harness.fields import LLMRef
from jaxft.harness.interfaces import TrainerAdapter
from jaxft.harness.registry import TrainerAdapterConfig, register_trainer_adapter
from jaxft.policy.recorder import TokenSequence

if TYPE_CHECKING:
    from jaxft.core.types import Batch, Params
    from jaxft.policy.policy import Policy

BACKEND = "local"

EQUAL_REWARDS = 1e-6


class LocalTrainerAdapterConfig(TrainerAdapterConfig, name="local_trainer_adapter"):
    """Updates the policy in place."""

    llm: LLMRef = Field(description="The policy to train: an entry of llms of type local_policy.")
    loss: LossConfig = Field(default=LossConfig(), description="What is minimised.")
    optimizer: OptimizerConfig = Field(default=OptimizerConfig(), description="How.")
    microbatch_tokens: int = Field(default=8192, ge=1, description="Tokens of one forward and backward pass, at most.")


@dataclass
class _Job:
    status: TrainingJobStatus
    task: "asyncio.Task[None] | None" = None
    history: list[dict[str, Any]] = field(default_factory=list)


class LocalTrainerAdapter(TrainerAdapter):
    """Owns the optimiser's state; the parameters are the policy's."""

    adapter_config: LocalTrainerAdapterConfig

    def __init__(self, adapter_config: LocalTrainerAdapterConfig, policy: "Policy", warn: Any = print) -> None:
        """`warn` is called with a sentence the first time something deserves one.

        Raises:
            ValueError: the loss cannot be made of its knobs.
        """
        super().__init__(adapter_config)
        self.policy = policy
        self._warn = warn
        self._has_warned = False
        self._loss = make_loss(adapter_config.loss)
        self._optimizer = make_optimizer(adapter_config.optimizer)
        self._opt_state: Any = None
        self._step: Any = None
        self._ref_params: Params | None = None
        self._updates: dict[int, Any] = {}
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
        rows, metrics = self._rows(trajectories)
        ref = TrainingJobRef(run_id=run_id, backend=BACKEND)
        job = _Job(TrainingJobStatus(run_id=run_id, backend=BACKEND, status=TrainingStatusEnum.PENDING, progress=0.0))
        self._jobs[run_id] = job
        job.task = asyncio.create_task(self._run(job, rows, metrics), name=f"job {run_id}")
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

    def _rows(self, collection: TrajectoryCollection) -> tuple[list[Any], dict[str, float]]:
        """Training rows with their advantages, and what was counted on the way."""
        import numpy as np

        from jaxft.components.batching import Row, sort_trajectories

        groups = [sort_trajectories([group]) for group in collection.trajectories]
        trajectories = [trajectory for group in groups for trajectory in group]
        rows, foreign, versions, log_mass = [], 0, [], []
        for trajectory, advantage in zip(trajectories, self._advantages(groups), strict=True):
            for sequence in trajectory.sequences if trajectory.scorable else ():
                if sequence.llm not in (None, self.adapter_config.llm):
                    foreign += 1
                    continue
                if sequence.truncated and self.adapter_config.loss.mask_truncated:
                    continue
                check_sequence(trajectory, sequence)
                rows.append(Row(sequence, advantage))
                mask = np.array(sequence.completion_mask)
                versions.append(np.array(sequence.policy_versions)[mask])
                log_mass.append((np.array(sequence.sampler_logprobs) - np.array(sequence.behavior_logprobs))[mask])
        unscorable = sum(not trajectory.scorable for trajectory in trajectories)
        sequences = [sequence for trajectory in trajectories for sequence in trajectory.sequences]
        truncated = sum(sequence.truncated for sequence in sequences)
        trained_versions = np.concatenate(versions) if versions else np.zeros(0)
        if trained_versions.size == 0:
            raise NothingToTrain(
                f"job '{collection.run_id}' has no token to train on: {len(trajectories)} trajectories, {unscorable} "
                f"of them without a usable reward; {len(sequences)} sequences, {truncated} of them truncated, "
                f"{foreign} of other language models"
            )
        self._warn_of_filters(np.concatenate(log_mass))
        metrics = {
            "groups": len(groups),
            "no_signal_groups": sum(not has_signal(group) for group in groups),
            "unscorable_trajectories": unscorable,
            "sequences_per_trajectory": len(sequences) / len(trajectories),
            "foreign_sequences": foreign,
            "trained_tokens": trained_versions.size,
            "truncated_share": truncated / len(sequences),
            "stale_token_share": float((trained_versions != self.policy.version).mean()),
        }
        return rows, metrics

    def _advantages(self, groups: list[list[Trajectory]]) -> list[float]:
        import numpy as np

        from jaxft.core import advantages

        loss = self.adapter_config.loss
        name = loss.advantages or ("group_mean" if loss.name == "dr_grpo" else "group")
        estimators = {
            "group": advantages.group_advantages,
            "group_mean": advantages.group_mean_advantages,
            "leave_one_out": advantages.leave_one_out_advantages,
            "batch": advantages.batch_advantages,
        }
        rewards = np.array([t.reward if t.scorable else np.nan for group in groups for t in group], np.float64)
        group_ids = np.repeat(np.arange(len(groups)), [len(group) for group in groups])
        return np.asarray(estimators[name](rewards, group_ids)).tolist()

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

    async def _run(self, job: _Job, rows: list[Any], metrics: dict[str, float]) -> None:
        job.status = job.status.model_copy(update={"status": TrainingStatusEnum.RUNNING})
        started = time.perf_counter()
        try:
            with user_code():  # whatever stops the job becomes its status
                update_metrics = await self.policy.update(
                    partial(self._update, rows), has_changed=lambda figures: figures["applied_updates"] > 0
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

    def _update(self, rows: list[Any], params: "Params") -> "tuple[Params, dict[str, float]]":
        """On the device thread: one update of the parameters with these rows."""
        import jax

        from jaxft.components.batching import make_batch
        from jaxft.core.update import TrainState, init_train_state

        batch, microbatch_rows = make_batch(rows, microbatch_tokens=self.adapter_config.microbatch_tokens)
        if self._opt_state is None:
            fresh = init_train_state(params, self._optimizer)
            self._opt_state, self._step = fresh.opt_state, fresh.step
        if self.adapter_config.loss.beta:
            batch = self._with_reference(batch, microbatch_rows, params)
        state = TrainState(params, self._opt_state, self._step)
        state, metrics = self._jitted_update(microbatch_rows)(state, batch)
        self._opt_state, self._step = state.opt_state, state.step
        figures = {name: float(value) for name, value in jax.device_get(metrics).items()}
        return state.params, figures

    def _jitted_update(self, microbatch_rows: int) -> Any:
        from jaxft.core.update import make_update

        if microbatch_rows not in self._updates:
            self._updates[microbatch_rows] = make_update(
                self.policy.model,
                self._loss,
                self._optimizer,
                microbatch_rows=microbatch_rows,
                max_grad_norm=self.adapter_config.optimizer.max_grad_norm,
            )
        return self._updates[microbatch_rows]

    def _with_reference(self, batch: "Batch", microbatch_rows: int, params: "Params") -> "Batch":
        import jax
        import jax.numpy as jnp

        from jaxft.core.objectives import score_in_microbatches

        if self._ref_params is None:  # the parameters before the first update; those are about to be donated
            self._ref_params = jax.tree.map(jnp.copy, params)
        scored = score_in_microbatches(self.policy.model, self._ref_params, batch, microbatch_rows)
        return batch._replace(ref_logprobs=scored.logprobs)


def check_sequence(trajectory: Trajectory, sequence: TokenSequence) -> None:
    """Refuses, with a `TrajectoryError` that names the episode, rows that a policy gradient has no meaning for."""
    name = f"example '{trajectory.example_id}', generation {trajectory.generation}"
    lengths = {field: len(values) for field, values in sequence if isinstance(values, list)}
    if len(set(lengths.values())) > 1:
        raise TrajectoryError(f"{name}: the lists of a sequence differ in length: {lengths}")
    trained = [t for chosen, t in zip(sequence.completion_mask, sequence.temperatures, strict=True) if chosen]
    if 0 in trained:
        raise TrajectoryError(
            f"{name} was sampled greedily; there is nothing to learn from it: sample at a temperature above 0"
        )
    if sequence.completion_mask[:1] == [True]:
        raise TrajectoryError(f"{name}: the first token of a sequence has no context and cannot be trained")


def has_signal(group: list[Trajectory]) -> bool:
    """Whether the scorable rewards of a group differ, by the rule of `jaxft.core.advantages`."""
    rewards = [trajectory.reward for trajectory in group if trajectory.scorable]
    scale = max([1.0, *(abs(reward) for reward in rewards)])
    return len(rewards) > 1 and max(rewards) - min(rewards) > EQUAL_REWARDS * scale


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
    yield LocalTrainerAdapter(config, llm.policy, builder.console.message)
