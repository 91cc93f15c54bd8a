"""`_type: local_trainer_adapter`: trains the policy that sampled, in the same process."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from jaxft.errors import ComponentError, ConfigError, DeviceMemoryError, RestoreError, UserCodeError, user_code
from jaxft.harness.contracts import TrainerAdapter
from jaxft.harness.data_models import (
    FinetuneConfig,
    TrainingJobRef,
    TrainingJobStatus,
    TrainingStatusEnum,
    TrajectoryCollection,
)
from jaxft.models.config import DecoderConfig
from jaxft.models.load import load_model
from jaxft.rollout.client import ChatClient
from jaxft.rollout.device import is_out_of_memory
from jaxft.rollout.engine import Engine
from jaxft.rollout.policy import Policy
from jaxft.shipped.configs import LocalTrainerAdapterConfig
from jaxft.shipped.memory import advice, memory_errors, memory_needs, what_to_lower
from jaxft.training.advantages import CollectedRewards, collect_rewards, with_usable_rewards
from jaxft.training.bad_batches import BadBatches, BadUpdate
from jaxft.training.learner import Learner
from jaxft.training.rows import Gathered, gather_examples, gather_pairs, gather_rows

STAY = "parameters and optimiser state stay as they were"


def ending(config: LocalTrainerAdapterConfig, metrics: dict[str, float], kept: list[str]) -> dict[str, Any]:
    """Status and message of a job that raised nothing; `kept` are the files with its bad batches."""
    where = f"; the batch of each is kept: {', '.join(kept)}" if kept else ""
    refusal = _refusal(config, metrics)
    if refusal is not None:
        return {"status": TrainingStatusEnum.FAILED, "message": refusal + where}
    return {"status": TrainingStatusEnum.COMPLETED, "progress": 100.0, "message": _outcome(metrics) + where}


def why_failed(config: LocalTrainerAdapterConfig, engine: Engine, failure: UserCodeError) -> str:
    """What stopped a job, in one line, and what to lower when the device was too small for it."""

    return what_to_lower(config, engine, failure.error) if is_out_of_memory(failure.error) else failure.summary


def _refusal(config: LocalTrainerAdapterConfig, metrics: dict[str, float]) -> str | None:
    stale, disagreeing = (
        metrics.get("stale_trajectory_fraction", 0.0),
        metrics.get("sampler_disagreement_fraction", 0.0),
    )
    if stale > config.max_stale_fraction:
        return f"refused: another version of the policy sampled {stale:.0%} of the trajectories; {STAY}"
    if metrics.get("refused_updates"):
        return (
            f"refused: the log-probabilities recorded with {disagreeing:.0%} of the sequences are more than "
            f"{config.max_logprob_diff:g} nats (on average) from the policy's own: another policy sampled them, or "
            f"they were recorded wrongly; {metrics['refused_updates']:.0f} updates were not made"
        )
    return None


def _outcome(metrics: dict[str, float]) -> str:
    if metrics["nonfinite_updates"]:
        count, applied = metrics["nonfinite_updates"], metrics["applied_updates"]
        what = STAY if not applied else f"these {count:.0f} updates were not made, {applied:.0f} others were"
        return f"loss, gradient or new parameters were not finite; {what}"
    if metrics["nothing_to_learn"] and not metrics["applied_updates"]:
        is_without_signal = metrics.get("groups") == metrics.get("no_signal_groups", -1)
        why = ", as the rewards of every group are equal" if is_without_signal else ""
        return f"nothing to learn: the gradient is exactly zero{why}; {STAY}"
    return "updated"


def make_learner(config: LocalTrainerAdapterConfig, policy: Policy, seed: int) -> Learner:
    """The learner; a reference of its own is loaded here, before anything is trained.

    Raises:
        ComponentError: the reference is of another model than the policy.
    """

    own_reference = config.loss.needs_reference and config.loss.reference.path is not None
    return Learner(
        policy.model,
        config.loss,
        config.optimizer,
        microbatch_tokens=config.microbatch_tokens,
        num_minibatches=config.num_minibatches,
        num_iterations=config.num_iterations,
        packing=config.packing,
        max_sampler_diff=config.max_logprob_diff,
        max_disagreeing_fraction=config.max_disagreeing_fraction,
        seed=seed,
        ref_params=load_reference(config, policy) if own_reference else None,
    )


def load_reference(config: LocalTrainerAdapterConfig, policy: Policy) -> Any:
    """The parameters of the checkpoint that the KL is measured from. Adapters of a policy that has some are fresh
    ones in the reference, which change nothing.

    Raises:
        ComponentError: the checkpoint is of another model than the policy, or should follow a policy with adapters.
    """
    path, sharding = config.loss.reference.path, policy.model.sharding
    lora: Any = policy.model.lora
    assert path is not None
    if lora is not None and config.loss.reference.update_every is not None:
        raise ComponentError(
            "loss.reference: with adapters, a reference of its own (path) has another base and cannot follow the "
            "policy; leave out update_every or path"
        )
    mesh: Any = None if sharding is None else sharding.mesh
    reference, params = load_model(path, lora=lora, mesh=mesh)
    own, other = policy.model.config, reference.config
    assert isinstance(other, DecoderConfig)
    if not isinstance(own, DecoderConfig) or own.architecture != other.architecture:
        raise ComponentError(f"loss.reference.path: {path} holds {other}; the policy is {own}")
    return params


BACKEND = "local"

T = TypeVar("T")


@dataclass
class _Job:
    status: TrainingJobStatus
    task: "asyncio.Task[None] | None" = None
    is_cancelled: bool = False
    canceled_after: str | None = None
    history: list[dict[str, Any]] = field(default_factory=list)
    bad_updates: list[BadUpdate] = field(default_factory=list)

    def report(self, **changes: Any) -> None:
        """Replaces fields of the status, which is never changed itself: others may hold it."""
        self.status = self.status.model_copy(update=changes)


class LocalTrainerAdapter(TrainerAdapter):
    """Owns the optimiser's state; the parameters are the policy's."""

    adapter_config: LocalTrainerAdapterConfig

    def __init__(
        self,
        adapter_config: LocalTrainerAdapterConfig,
        policy: Policy,
        warn: Any = print,
        seed: int = 0,
        bad_batches: BadBatches | None = None,
    ) -> None:
        """`warn` is called with a sentence the first time something deserves one; `seed` shuffles minibatches;
        `bad_batches` keeps those of updates that were not finite.

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
        self._bad_batches = bad_batches
        self._reported_compiles = 0

    async def initialize(self, run_config: FinetuneConfig) -> None:
        """As every adapter's.

        Raises:
            ConfigError: training is aimed at another language model than the adapter's.
        """
        await super().initialize(run_config)
        if run_config.target_model not in (None, self.adapter_config.llm):
            raise ConfigError(
                [
                    f"finetuning.target_model: is '{run_config.target_model}', but the adapter trains "
                    f"'{self.adapter_config.llm}'"
                ]
            )

    async def is_healthy(self) -> bool:
        """Whether there are parameters, all finite, and a token can be sampled from them; a warning says why not.

        Raises:
            DeviceMemoryError: the device is too small to sample as it was configured.
        """
        try:
            with user_code():  # whatever stops it is the answer
                return await self.policy.is_healthy()
        except UserCodeError as failure:
            if isinstance(failure.error, DeviceMemoryError):
                raise failure.error from None
            self._warn(f"warning: the policy is not healthy: {failure.summary}")
            return False

    def validate_trajectories(self, trajectories: TrajectoryCollection) -> dict[str, float]:
        """What a job on these trajectories would be made of, in numbers; nothing is queued.

        Raises:
            NothingToTrain: no row has a token to train.
            TrajectoryError: greedy or malformed rows are among them.
        """
        gathered, credit = self._gather(trajectories)
        return {
            **gathered.metrics,
            **({} if credit is None else credit.metrics),
            **self._stale_fractions(gathered),
        }

    async def submit(self, trajectories: TrajectoryCollection) -> TrainingJobRef:
        """Queues a job on these trajectories and returns at once.

        Raises:
            ValueError: the job's name is taken.
            NothingToTrain: no row has a token to train.
            TrajectoryError: greedy or malformed rows are among them.
        """
        run_id = trajectories.run_id
        if run_id in self._jobs:
            raise ValueError(f"job '{run_id}' has been submitted before; every job needs an id of its own")
        gathered, credit = self._gather(trajectories)
        self._warn_of_filters(gathered.sampled.log_kept_mass)
        job = _Job(TrainingJobStatus(run_id=run_id, backend=BACKEND, status=TrainingStatusEnum.PENDING, progress=0.0))
        self._jobs[run_id] = job
        job.task = asyncio.create_task(self._run(job, gathered, credit), name=f"job {run_id}")
        return TrainingJobRef(run_id=run_id, backend=BACKEND)

    async def status(self, ref: TrainingJobRef) -> TrainingJobStatus:
        """Where a job stands, also after it has ended. Its `metadata` holds `metrics` and `timings` once it has
        completed, and the `traceback` of one that failed."""
        return self._job(ref).status

    async def wait_until_complete(self, ref: TrainingJobRef, poll_interval: float = 10.0) -> TrainingJobStatus:
        """The last status of a job, as soon as there is one; `poll_interval` is not needed and ignored."""
        job = self._job(ref)
        assert job.task is not None
        await asyncio.shield(job.task)
        return job.status

    async def cancel(self, ref: TrainingJobRef) -> TrainingJobStatus:
        """Ends a job before its next update, and gives its last status; one that has ended stays as it is.

        Updates that have been made stay made; the status says how many.
        """
        self._job(ref).is_cancelled = True
        return await self.wait_until_complete(ref)

    def log_progress(self, ref: TrainingJobRef, metrics: dict[str, Any], output_dir: str | None = None) -> None:
        """Keeps figures with the job; they are the `history` of its metadata."""
        job = self._job(ref)
        job.history.append(dict(metrics))
        job.report(metadata={**(job.status.metadata or {}), "history": job.history})

    async def warm_up(self) -> None:
        """Compiles whatever requests and jobs can lead to; parameters, optimiser and version stay as they are."""
        longest = self.policy.engine.max_context_tokens
        with memory_errors(self.adapter_config, self.policy.engine):
            await self.policy.engine.warm_up()
            await self.policy.update(
                lambda params: (self.learner.warm_up(params, longest), None), has_changed=lambda result: False
            )

    async def memory(self) -> dict[str, float]:
        """Parameters, optimiser and reference, the largest update's own needs, the sampler's weights and its cache."""
        return await self.policy.read(partial(memory_needs, self.learner, self.policy))

    def memory_advice(self, memory: dict[str, float]) -> str | None:
        """What to change where the device is too small for it."""
        return advice(self.adapter_config, self.policy, memory)

    async def save_state(self, save: Callable[[dict[str, Any], Any], T]) -> T:
        """Counters, and the arrays of policy, optimiser, reference and value head, on the device thread."""
        with memory_errors(self.adapter_config, self.policy.engine):
            return await self.policy.read(lambda params: self._saved(save, params))

    def _saved(self, save: Callable[[dict[str, Any], Any], T], params: Any) -> T:
        values = {"policy_version": self.policy.version, "has_warned": self._has_warned, **self.learner.state()}
        if self.policy.model.lora is None:
            return save(values, self.learner.arrays(params))
        base, holds_base = self.policy.base_of(params), not self.policy.has_own_base(params)
        return save(
            {**values, "base": base, "holds_base": holds_base}, self.learner.arrays(params, with_base=holds_base)
        )

    async def restore_state(self, values: dict[str, Any], read: Callable[[Any], Any]) -> None:
        """Goes on from a checkpoint.

        Raises:
            RestoreError: it is of another model, another optimiser, another dtype.
        """
        llm, has_adapters = self.adapter_config.llm, "base" in values
        if has_adapters != (self.policy.model.lora is not None):
            held = f"adapters, but llms.{llm} has none" if has_adapters else f"no adapters, but llms.{llm} has some"
            raise RestoreError(f"the checkpoint holds {held}: continue it with its own configuration")
        self._has_warned = values["has_warned"]
        with memory_errors(self.adapter_config, self.policy.engine):
            await self.policy.restore(partial(self._restored, values, read), values["policy_version"])

    def _restored(self, values: dict[str, Any], read: Callable[[Any], Any], params: Any) -> Any:
        holds_base = values.get("holds_base", False)
        if "base" in values and not holds_base and values["base"] != self.policy.base_of(params):
            raise RestoreError(
                f"the checkpoint holds adapters of another base than that of llms.{self.adapter_config.llm}: continue "
                "it with the base it was made with"
            )
        return self.learner.restore(values, read(self.learner.arrays(params, with_base=holds_base)), params)

    def is_busy(self) -> bool:
        """Whether a job has not ended."""
        return any(job.task is not None and not job.task.done() for job in self._jobs.values())

    async def export_model(self, folder: Path) -> Path:
        """Writes model and tokenizer in Hugging Face's file format."""
        return await self.policy.save(folder)

    def _job(self, ref: TrainingJobRef) -> _Job:
        if ref.run_id not in self._jobs:
            raise ValueError(f"no job '{ref.run_id}' was submitted; jobs: {', '.join(self._jobs) or 'none'}")
        return self._jobs[ref.run_id]

    def _gather(self, trajectories: TrajectoryCollection) -> tuple[Gathered, CollectedRewards | None]:
        loss = self.adapter_config.loss
        if loss.name == "dpo":
            return gather_pairs(trajectories, self.policy.template, self.adapter_config.llm), None
        if loss.name == "sft":
            return gather_examples(trajectories, self.policy.template, loss.min_reward, self.adapter_config.llm), None
        llm, reward = self.adapter_config.llm, self.adapter_config.reward
        unusable = "unscorable" if reward is None else reward.unusable
        groups = with_usable_rewards(trajectories.trajectories, loss, unusable)
        usable = trajectories.model_copy(update={"trajectories": groups})
        gathered = gather_rows(usable, llm=llm, mask_truncated=loss.mask_truncated)
        return gathered, collect_rewards(gathered.groups, loss, llm)

    def _stale_fractions(self, gathered: Gathered) -> dict[str, float]:
        is_sampled = gathered.sampled.versions.size > 0
        return gathered.sampled.stale_fractions(self.policy.version) if is_sampled else {}

    def _warn_of_filters(self, log_mass: Any) -> None:
        """Says, once, that truncated sampling was used; `log_mass` holds the log of the mass kept, per token."""
        if self._has_warned or not log_mass.any():
            return
        self._has_warned = True
        kept = np.exp(log_mass).mean()
        self._warn(
            f"warning: tokens were drawn with top-k, top-p or min-p, which kept {kept:.1%} of the mass on average; "
            "what cannot be sampled cannot be unlearned: train without filters"
        )

    async def _run(self, job: _Job, gathered: Gathered, credit: CollectedRewards | None) -> None:
        started = time.perf_counter()
        try:
            with user_code():  # whatever stops the job becomes its status
                metrics = await self.policy.update(
                    partial(self._learn, job, gathered, credit),
                    has_changed=lambda figures: figures["applied_updates"] > 0,
                )
                kept = self._keep_bad(job, gathered)
        except UserCodeError as failure:
            traceback = {"traceback": failure.traceback}
            message = why_failed(self.adapter_config, self.policy.engine, failure)
            job.report(status=TrainingStatusEnum.FAILED, message=message, metadata=traceback)
            return
        metrics |= gathered.metrics | ({} if credit is None else credit.metrics)
        compiles = self.policy.compiles
        timings = {"seconds_update": time.perf_counter() - started, "compiles": compiles.count}
        compiled, self._reported_compiles = compiles.names(self._reported_compiles), compiles.count
        end: dict[str, Any] = {"status": TrainingStatusEnum.CANCELED, "message": job.canceled_after}
        if job.canceled_after is None:
            end = ending(self.adapter_config, metrics, kept)
        job.report(**end, metadata={"metrics": metrics, "timings": timings, "compiled": compiled})

    def _keep_bad(self, job: _Job, gathered: Gathered) -> list[str]:
        updates, job.bad_updates = job.bad_updates, []
        if self._bad_batches is None:
            return []
        return self._bad_batches.keep(job.status.run_id, updates, gathered.groups)

    def _learn(
        self, job: _Job, gathered: Gathered, credit: CollectedRewards | None, params: Any
    ) -> tuple[Any, dict[str, float]]:
        """The job itself, on the device thread."""
        stale = self._stale_fractions(gathered)
        figures = {"applied_updates": 0.0, "updates": 0, **stale, "policy_version": self.policy.version}
        if job.is_cancelled:
            job.canceled_after = "canceled before it began"
            return params, figures
        if stale.get("stale_trajectory_fraction", 0.0) > self.adapter_config.max_stale_fraction:
            return params, figures

        def goes_on(done: int, total: int) -> bool:
            job.report(progress=100.0 * done / total)
            if job.is_cancelled:
                job.canceled_after = f"canceled after {done} of {total} updates"
            return not job.is_cancelled

        job.report(status=TrainingStatusEnum.RUNNING)
        params, learned = self.learner.learn(gathered.rows, credit, params, goes_on, job.bad_updates.append)
        version = self.policy.version + (learned["applied_updates"] > 0)
        return params, {**figures, **learned, "policy_version": version}


async def local_trainer_adapter(config: LocalTrainerAdapterConfig, builder: Any) -> AsyncIterator[LocalTrainerAdapter]:
    """An adapter for the policy behind `llm`."""

    llm = await builder.get_llm(config.llm)
    if not isinstance(llm, ChatClient):
        raise ComponentError(f"llm '{config.llm}' is a {type(llm).__name__}; only a local_policy can be trained here")
    log = builder.console.message
    bad_batches = BadBatches(builder.directory, log, llm.policy.tokenizer.decode)
    yield LocalTrainerAdapter(config, llm.policy, log, builder.config.finetuning.seed, bad_batches)
