"""`_type: local_trainer_adapter`: trains the policy that sampled, in the same process, one update per job."""

import asyncio
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field

from jaxft.components.optimizers import OptimizerConfig, make_optimizer
from jaxft.harness.data_models import (
    TrainingJobRef,
    TrainingJobStatus,
    TrainingStatusEnum,
    Trajectory,
    TrajectoryCollection,
)
from jaxft.harness.errors import ComponentError, UserCodeError, user_code
from jaxft.harness.fields import ConfigModel, LLMRef
from jaxft.harness.interfaces import TrainerAdapter
from jaxft.harness.registry import TrainerAdapterConfig, register_trainer_adapter

from jaxft.policy.recorder import TokenSequence

if TYPE_CHECKING:
    from jaxft.core.types import Batch, Params
    from jaxft.policy.policy import Policy

BACKEND = "local"

EQUAL_REWARDS = 1e-6

AdvantageName = Literal["group", "group_mean", "leave_one_out", "batch"]


class LossConfig(ConfigModel):
    """The policy loss: a published one by name, and what to change of it."""

    name: Literal["grpo", "dapo", "bnpo", "dr_grpo", "gspo", "cispo", "reinforce"] = Field(
        default="grpo", description="The row of presets that the other fields of the loss override."
    )
    advantages: AdvantageName | None = Field(
        default=None, description="The baseline: null for group_mean with dr_grpo, group with all others."
    )
    importance_level: Literal["token", "sequence"] | None = Field(default=None, description="One ratio per token or row.")
    clip_low: float | None = Field(default=None, gt=0.0, le=1.0, description="The ratio stays above 1 - clip_low.")
    clip_high: float | None = Field(default=None, gt=0.0, description="It stays below 1 + clip_high; cispo's cap.")
    delta: float | None = Field(default=None, gt=1.0, description="Dual clip: bounds the loss of bad rows.")
    beta: float = Field(default=0.0, ge=0.0, description="Weight of the KL to the starting parameters; 0 keeps none.")
    kl: Literal["k2", "k3", "k3_ratio", "k3_unweighted", "k3_trl"] = Field(default="k3_ratio", description="Its estimator.")
    max_completion_tokens: int | None = Field(
        default=None, ge=1, description="Token budget of a whole trajectory: the constant that dr_grpo divides by."
    )
    mask_truncated: bool = Field(default=False, description="Rows cut by their length budget train nothing.")


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
        """`warn` is called with a sentence the first time something deserves one."""
        super().__init__(adapter_config)
        self.policy = policy
        self._warn = warn
        self._has_warned = False
        self._optimizer = make_optimizer(adapter_config.optimizer)
        self._opt_state: Any = None
        self._step: Any = None
        self._ref_params: Params | None = None
        self._updates: dict[int, Any] = {}
        self._jobs: dict[str, _Job] = {}

    async def is_healthy(self) -> bool:
        """Whether every parameter is finite."""
        import jax
        import jax.numpy as jnp

        finite = await self.policy.read(
            lambda params: all(bool(jnp.isfinite(leaf).all()) for leaf in jax.tree.leaves(params))
        )
        return finite

    async def submit(self, trajectories: TrajectoryCollection) -> TrainingJobRef:
        """Queues one update on these trajectories and returns at once.

        Raises:
            ValueError: the job's name is taken, nothing is there to train on, or greedy or foreign rows are among them.
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

        trajectories = sort_trajectories(collection.trajectories)
        rows, truncated, versions, log_mass = [], 0, [], []
        for trajectory, advantage in zip(trajectories, self._advantages(trajectories), strict=True):
            for sequence in trajectory.sequences if trajectory.scorable else ():
                truncated += sequence.truncated
                if sequence.truncated and self.adapter_config.loss.mask_truncated:
                    continue
                check_sequence(trajectory, sequence)
                rows.append(Row(sequence, advantage))
                mask = np.array(sequence.completion_mask)
                versions.append(np.array(sequence.policy_versions)[mask])
                log_mass.append((np.array(sequence.sampler_logprobs) - np.array(sequence.behavior_logprobs))[mask])
        unscorable = sum(not trajectory.scorable for trajectory in trajectories)
        trained_versions = np.concatenate(versions) if versions else np.zeros(0)
        if trained_versions.size == 0:
            raise ValueError(
                f"job '{collection.run_id}' has no token to train on: {len(trajectories)} trajectories, {unscorable} of "
                f"them without a usable reward, {truncated} sequences truncated"
            )
        self._warn_of_filters(np.concatenate(log_mass))
        metrics = {
            "groups": len(collection.trajectories),
            "no_signal_groups": sum(not has_signal(group) for group in collection.trajectories),
            "unscorable_trajectories": unscorable,
            "sequences_per_trajectory": sum(len(t.sequences) for t in trajectories) / len(trajectories),
            "trained_tokens": trained_versions.size,
            "truncated_share": truncated / sum(len(t.sequences) for t in trajectories),
            "stale_token_share": float((trained_versions != self.policy.version).mean()),
        }
        return rows, metrics

    def _advantages(self, trajectories: list[Trajectory]) -> list[float]:
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
        rewards = np.array([t.reward if t.scorable else np.nan for t in trajectories], np.float64)
        _, group_ids = np.unique([t.example_id for t in trajectories], return_inverse=True)
        return np.asarray(estimators[name](rewards, group_ids)).tolist()

    def _warn_of_filters(self, log_mass: Any) -> None:
        """Says, once, that truncated sampling was used; `log_mass` holds the log of the kept mass, negated, per token."""
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
                update_metrics = await self.policy.update(partial(self._update, rows))
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
        from jaxft.core.objectives import grpo_loss
        from jaxft.core.update import make_update

        if microbatch_rows not in self._updates:
            loss = self.adapter_config.loss
            loss_fn = partial(
                grpo_loss,
                loss=loss.name,
                importance_level=loss.importance_level,
                clip_low=loss.clip_low,
                clip_high=loss.clip_high,
                delta=loss.delta,
                beta=loss.beta,
                kl=loss.kl,
                max_completion_tokens=loss.max_completion_tokens,
            )
            self._updates[microbatch_rows] = make_update(
                self.policy.model,
                loss_fn,
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
    """Refuses, with a `ValueError` that names the episode, rows that a policy gradient has no meaning for."""
    name = f"example '{trajectory.example_id}', generation {trajectory.generation}"
    trained = [t for chosen, t in zip(sequence.completion_mask, sequence.temperatures, strict=True) if chosen]
    if 0 in trained:
        raise ValueError(f"{name} was sampled greedily; there is nothing to learn from it: sample at a temperature above 0")
    if sequence.completion_mask[0]:
        raise ValueError(f"{name}: the first token of a sequence has no context and cannot be trained")


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
