"""The trainer adapter that trains a `local_policy` in the process that samples from it.

A job goes through `submit`, which lays out its rows, and `_run`, which calls `Learner.learn` on the device thread.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from huggingface_hub import ModelCard

from jaxft.core.sharding import platform_of
from jaxft.core.types import Model, Params
from jaxft.errors import (
    CheckFailed,
    ComponentError,
    ConfigError,
    DeviceMemoryError,
    RestoreError,
    UserCodeError,
    user_code,
)
from jaxft.harness.contracts import TrainerAdapter
from jaxft.harness.curriculum import GroupReward
from jaxft.harness.data_models import (
    FinetuneConfig,
    TrainingJobRef,
    TrainingJobStatus,
    TrainingStatusEnum,
    Trajectory,
    TrajectoryCollection,
)
from jaxft.hosts.group import process_group
from jaxft.models.config import DecoderConfig
from jaxft.models.decoder import AUTO_REMATS
from jaxft.models.hf_config import accepted_keys
from jaxft.models.load import load_model
from jaxft.rollout.client import ChatClient
from jaxft.rollout.policy import Policy
from jaxft.shipped import job_outcome
from jaxft.shipped.configs import LocalPolicyConfig, LocalTrainerAdapterConfig
from jaxft.shipped.job_outcome import is_too_stale, outcome, why_refused
from jaxft.shipped.memory_advice import memory_advice, memory_errors
from jaxft.shipped.run_card import run_card
from jaxft.shipped.teacher import load_teacher
from jaxft.training.bad_batches import BadBatches, BadUpdate
from jaxft.training.batch import CollectedRewards
from jaxft.training.learner import Learner, TeacherModel
from jaxft.training.memory import SAMPLER, device_mebibytes, peak, peak_bytes
from jaxft.training.rows import (
    Gathered,
    collect_rewards,
    digests_of,
    gather_examples,
    gather_pairs,
    gather_rows,
    group_rewards,
    with_usable_rewards,
)
from jaxft.training.token_scores import KeptTokens

BACKEND = "local"

T = TypeVar("T")


@dataclass
class _Job:
    status: TrainingJobStatus
    task: "asyncio.Task[None] | None" = None
    is_cancelled: bool = False
    canceled_after: str | None = None
    history: list[dict[str, Any]] = field(default_factory=list)

    def report(self, **changes: Any) -> None:
        """Replace the status by a changed copy, as others may hold the old one."""
        self.status = self.status.model_copy(update=changes)


class LocalTrainerAdapter(TrainerAdapter):
    """Owns the learner, with the state of the optimizer; the parameters are the policy's.

    Attributes:
        policy: samples, and is trained in place.
        learner: optimizer, reference and value head.
        max_staleness: number of versions that episodes may be behind; jobs and sampling share the device if above 0.
    """

    adapter_config: LocalTrainerAdapterConfig
    joins_processes = True

    def __init__(
        self,
        adapter_config: LocalTrainerAdapterConfig,
        policy: Policy,
        warn: Callable[[str], object] = print,
        seed: int = 0,
        bad_batches: BadBatches | None = None,
        *,
        chooses_remat: bool = False,
        note_remat: Callable[[str], object] = lambda remat: None,
        model_card: Callable[[int], ModelCard] | None = None,
        teacher: TeacherModel | None = None,
    ) -> None:
        """Make the learner, and load the reference if it is another checkpoint.

        Args:
            adapter_config: settings of the adapter.
            policy: the policy to train.
            warn: shows a warning.
            seed: seed that shuffles minibatches.
            bad_batches: writes the batches of non-finite updates; None: they are not written.
            chooses_remat: True to take the fastest checkpoint policy that fits an accelerator's memory, instead of the
                model's own.
            note_remat: called with the checkpoint policy that was chosen.
            model_card: returns the card of an exported model from the policy's version; None: exports have none.
            teacher: the teacher of a loss with `distillation`; None without one.

        Raises:
            ValueError: settings of the loss exclude each other.
            ComponentError: the checkpoint of the reference is of another model.
        """
        adapter_config = adapter_config.for_context(policy.engine.max_context_tokens)
        super().__init__(adapter_config)
        self.policy = policy
        ref_params = load_reference(adapter_config, policy) if adapter_config.has_own_reference else None
        self.max_staleness = 0
        self._make_learner = partial(make_learner, adapter_config, policy.model, seed=seed, teacher=teacher)
        self.learner = self._make_learner(ref_params=ref_params)
        self._chooses_remat, self._note_remat = chooses_remat, note_remat
        self._warn = warn
        self._model_card = model_card
        self._has_warned = False
        self._jobs: dict[str, _Job] = {}
        self._bad_batches = bad_batches
        self._reported_compiles = 0

    async def initialize(self, run_config: FinetuneConfig) -> None:
        """Store the run's configuration, and choose the checkpoint policy if that is left to the adapter.

        Raises:
            ConfigError: `finetuning.target_model` is another language model than the adapter's.
        """
        await super().initialize(run_config)
        if run_config.target_model not in (None, self.adapter_config.llm):
            raise ConfigError(
                [
                    f"finetuning.target_model: is '{run_config.target_model}', but the adapter trains "
                    f"'{self.adapter_config.llm}'"
                ]
            )
        if self._chooses_remat:
            remat = await self.policy.read(self._choose_remat)
            choices = await process_group().gather("remat", remat)  # which devices and compilers may make differ
            most_frugal = max(choices, key=list(AUTO_REMATS).index)
            if most_frugal != remat:
                self.learner.use_remat(most_frugal)
            self._note_remat(most_frugal)

    def _choose_remat(self, params: Any) -> str:
        """Choose the checkpoint policy, on the device thread, and return its name."""
        limit = device_mebibytes(self.policy.model.sharding)
        if platform_of(self.policy.model.sharding) == "cpu" or limit is None:
            return "dots"  # that of the model
        held: dict[str, float] = {}
        if not self.policy.has_own_sampler:
            held = {purpose: size / 2**20 for purpose, size in self.policy.sampling_bytes(params).items()}
            del held["sampling weights"]  # an update does not have them
            if self.max_staleness:
                held["held sampling weights"] = self.policy.held_bytes(params) / 2**20
        longest = self.policy.engine.max_context_tokens
        return self.learner.choose_remat(params, longest, lambda memory: peak(memory | held) <= limit)

    def allow_staleness(self, max_staleness: int) -> None:
        """Take episodes of up to `max_staleness` versions before, with a correction of the loss, and share the device.

        Raises:
            ConfigError: the loss is dpo or sft, which nothing corrects for staleness, or several processes are to be
                more than one version behind.
        """
        loss = self.adapter_config.loss
        if not loss.is_policy_loss:
            raise ConfigError(
                [f"max_staleness: is {max_staleness}, but loss {loss.name!r} has no correction: set it to 0"]
            )
        if max_staleness > 1 and not process_group().is_alone:
            raise ConfigError(
                [
                    f"max_staleness: is {max_staleness}, but which episodes end first differs between processes: "
                    "set it to 1 or 0"
                ]
            )
        self.max_staleness = max_staleness
        self.learner = self._make_learner(ref_params=self.learner.ref_params, max_staleness=max_staleness)
        if loss.correction is not None and loss.correction.name == "none":
            self._warn(
                f"warning: loss.correction is none with max_staleness {max_staleness}: the gradient is that of earlier "
                "weights' samples, and biased"
            )

    async def hold_sampler(self, *, finishes_requests: bool = True) -> None:
        """Sample with the present weights, of which a copy is kept, beside the jobs that follow."""
        with self._memory_errors():
            await self.policy.hold_sampler(finishes_requests=finishes_requests)

    async def release_sampler(self) -> None:
        """Sample with the newest weights again."""
        await self.policy.release_sampler()

    def device_seconds(self) -> dict[str, float]:
        """Return the seconds that the device thread has spent so far: `sampling`, `training`, `other` and `idle`."""
        return self.policy.device_seconds()

    async def is_healthy(self) -> bool:
        """Return True if all parameters are finite and a token can be sampled.

        Raises:
            DeviceMemoryError: the device has too little memory to sample.
            CheckFailed: sampling raises another error, which the message has.
        """
        try:
            with user_code():  # whatever stops it is the answer
                return await self.policy.is_healthy()
        except UserCodeError as failure:
            if isinstance(failure.error, DeviceMemoryError):
                raise failure.error from None
            raise CheckFailed(f"the trainer adapter is not healthy: {failure.summary}") from failure.error

    async def warm_up(self) -> None:
        """Compile all programs of requests and jobs; parameters, optimizer state and policy version do not change."""
        longest = self.policy.engine.max_context_tokens
        with self._memory_errors():
            await self.policy.warm_up()
            if self.max_staleness:
                await self.policy.hold_sampler()
            await self.policy.update(
                lambda params: (self.learner.warm_up(params, longest, self.policy.pause), None),
                has_changed=lambda result: False,
            )
            await self.policy.release_sampler()

    def validate_trajectories(self, trajectories: TrajectoryCollection) -> dict[str, float]:
        """Return the metrics that a job on these trajectories would begin with, without queueing it.

        Raises:
            NothingToTrain: no row has a token to train.
            TrajectoryError: a row is greedy or malformed.
        """
        data, _ = self._lay_out(trajectories)
        return data.metrics | data.staleness(self.policy.version, self.max_staleness)

    def group_rewards(self, trajectories: TrajectoryCollection) -> list[GroupReward]:
        """Return mean and difference of the rewards that the loss compares in each group: weighted, or of steps.

        Raises:
            TrajectoryError: a reward that `reward_weights` names is missing.
        """
        loss = self.adapter_config.loss
        if not loss.is_policy_loss:
            return super().group_rewards(trajectories)
        return group_rewards(self._with_usable_rewards(trajectories), loss, self.adapter_config.llm)

    async def submit(self, trajectories: TrajectoryCollection) -> TrainingJobRef:
        """Queue a job on these trajectories, and return at once.

        Raises:
            ValueError: a job of that name has not ended.
            NothingToTrain: no row has a token to train.
            TrajectoryError: a row is greedy or malformed.
        """
        run_id = trajectories.run_id
        if run_id in self.training_jobs:
            raise ValueError(f"job '{run_id}' has not ended; wait for it, or give this one another id")
        data, rewards = self._lay_out(trajectories)
        self._warn_of_filters(data.sampled.log_kept_mass)
        job = _Job(TrainingJobStatus(run_id=run_id, backend=BACKEND, status=TrainingStatusEnum.PENDING, progress=0.0))
        self._jobs[run_id] = job
        kept = KeptTokens(data, trajectories.kept_episodes)
        job.task = asyncio.create_task(self._run(job, data, rewards, kept), name=f"job {run_id}")
        return TrainingJobRef(run_id=run_id, backend=BACKEND, metadata={"job_id": run_id})

    def _lay_out(self, trajectories: TrajectoryCollection) -> tuple[Gathered, CollectedRewards | None]:
        """Return the rows that the loss trains and, for a policy loss, the rewards of their trajectories."""
        llm, loss, template = self.adapter_config.llm, self.adapter_config.loss, self.policy.template
        if loss.name == "dpo":
            return gather_pairs(trajectories, template, llm), None
        if loss.name == "sft":
            return gather_examples(trajectories, template, loss.min_reward, llm), None
        usable = trajectories.model_copy(update={"trajectories": self._with_usable_rewards(trajectories)})
        data = gather_rows(usable, llm=llm, mask_truncated=loss.mask_truncated)
        rewards = collect_rewards(data.groups, loss, llm)
        return data._replace(metrics=data.metrics | rewards.metrics), rewards

    def _with_usable_rewards(self, trajectories: TrajectoryCollection) -> list[list[Trajectory]]:
        reward = self.adapter_config.reward
        unusable = "unscorable" if reward is None else reward.unusable
        return with_usable_rewards(trajectories.trajectories, self.adapter_config.loss, unusable)

    def _warn_of_filters(self, log_kept_mass: np.ndarray) -> None:
        """Warn, once, if truncated sampling was used; the array has the log of the kept mass of each trained token."""
        if self._has_warned or not log_kept_mass.any():
            return
        self._has_warned = True
        kept = np.exp(log_kept_mass).mean()
        self._warn(
            f"warning: tokens were drawn with top-k, top-p or min-p, which kept {kept:.1%} of the mass on average; "
            "what cannot be sampled cannot be unlearned: train without filters"
        )

    async def _run(self, job: _Job, data: Gathered, rewards: CollectedRewards | None, kept_tokens: KeptTokens) -> None:
        started = time.perf_counter()
        bad_updates: list[BadUpdate] = []
        kept: list[str] = []
        try:
            with user_code(), self._memory_errors():  # whatever stops the job becomes its status
                async with _together(job.status.run_id, data, rewards):
                    metrics = await self.policy.update(
                        partial(self._learn, job, data, rewards, bad_updates, kept_tokens),
                        has_changed=lambda metrics: metrics["applied_updates"] > 0,
                    )
                if self._bad_batches is not None:
                    kept = self._bad_batches.keep(job.status.run_id, bad_updates, data.groups)
        except UserCodeError as failure:
            is_memory = isinstance(failure.error, DeviceMemoryError)
            message, traceback = str(failure.error) if is_memory else failure.summary, failure.traceback
            job.report(status=TrainingStatusEnum.FAILED, message=message, metadata={"traceback": traceback})
            return
        metrics |= data.metrics
        compiles = self.policy.compiles
        timings = {"seconds_update": time.perf_counter() - started, "compiles": compiles.count}
        timings |= peak_bytes(self.policy.model.sharding)
        compiled, self._reported_compiles = compiles.names(self._reported_compiles), compiles.count
        metadata: dict[str, Any] = {"metrics": metrics, "timings": timings, "compiled": compiled}
        metadata |= {"token_scores": kept_tokens.rows()} if kept_tokens.indices else {}
        if job.canceled_after is not None:
            job.report(status=TrainingStatusEnum.CANCELED, message=job.canceled_after, metadata=metadata)
            return
        refusal = why_refused(metrics)
        message = (refusal or outcome(metrics)) + (f"; the batch of each is kept: {', '.join(kept)}" if kept else "")
        if refusal is not None:
            job.report(status=TrainingStatusEnum.FAILED, message=message, metadata=metadata)
        else:
            job.report(status=TrainingStatusEnum.COMPLETED, progress=100.0, message=message, metadata=metadata)

    def _learn(
        self,
        job: _Job,
        data: Gathered,
        rewards: CollectedRewards | None,
        bad_updates: list[BadUpdate],
        kept_tokens: KeptTokens,
        params: Any,
    ) -> tuple[Any, dict[str, float]]:
        """Run a job on the device thread: return the parameters and its metrics."""
        stale = data.staleness(self.policy.version, self.max_staleness)
        metrics = {"applied_updates": 0.0, "updates": 0, **stale, "policy_version": self.policy.version}
        if job.is_cancelled:
            job.canceled_after = "canceled before it began"
            return params, metrics
        if is_too_stale(stale):
            return params, metrics

        def goes_on(done: int, total: int) -> bool:
            job.report(progress=100.0 * done / total)
            if job.is_cancelled:
                job.canceled_after = f"canceled after {done} of {total} updates"
            return not job.is_cancelled

        job.report(status=TrainingStatusEnum.RUNNING)
        self.policy.keep_snapshots(params)
        params, learned = self.learner.learn(
            data.rows,
            rewards,
            params,
            goes_on,
            bad_updates.append,
            kept_tokens.indices,
            kept_tokens.keep,
            self.policy.pause,
        )
        version = self.policy.version + (learned["applied_updates"] > 0)
        return params, {**metrics, **learned, "policy_version": version}

    async def status(self, ref: TrainingJobRef) -> TrainingJobStatus:
        """Return the status of a job, also after it has ended.

        Its `metadata` holds the `metrics` and `timings` of a job that completed, with the `token_scores` of
        `kept_episodes`, and the `traceback` of one that failed.
        """
        return self._job(ref).status

    async def wait_until_complete(self, ref: TrainingJobRef, poll_interval: float = 10.0) -> TrainingJobStatus:
        """Return the last status of a job, as soon as there is one; `poll_interval` is ignored."""
        job = self._job(ref)
        assert job.task is not None
        await asyncio.shield(job.task)
        return job.status

    async def cancel(self, ref: TrainingJobRef) -> TrainingJobStatus:
        """End a job before its next update, and return its last status; a job that has ended stays as it is.

        Updates that have been made stay made; the status says how many.

        Raises:
            RuntimeError: several processes compute the job, which may be at different updates.
        """
        if not process_group().is_alone:
            raise RuntimeError("a job of several processes cannot be canceled")
        self._job(ref).is_cancelled = True
        return await self.wait_until_complete(ref)

    @property
    def training_jobs(self) -> dict[str, "asyncio.Task[None]"]:
        """Tasks of the jobs that have not ended, by name."""
        return {name: job.task for name, job in self._jobs.items() if job.task is not None and not job.task.done()}

    def is_busy(self) -> bool:
        """True if a job has not ended."""
        return bool(self.training_jobs)

    def log_progress(self, ref: TrainingJobRef, metrics: dict[str, Any], output_dir: str | None = None) -> None:
        """Add metrics to the `history` in the metadata of a job."""
        job = self._job(ref)
        job.history.append(dict(metrics))
        job.report(metadata={**(job.status.metadata or {}), "history": job.history})

    def _job(self, ref: TrainingJobRef) -> _Job:
        if ref.run_id not in self._jobs:
            raise ValueError(f"no job '{ref.run_id}' was submitted; jobs: {', '.join(self._jobs) or 'none'}")
        return self._jobs[ref.run_id]

    async def memory(self) -> dict[str, float]:
        """Return the MiB that each device needs, by purpose; compiles the largest update.

        The purposes are those of `Learner.memory` and of `Policy.sampling_bytes`, and the temporaries of sampling. An
        update and a rollout take turns, so what only one of them needs is not added.
        """

        def needs(params: Any) -> dict[str, float]:
            training = self.learner.memory(params, self.policy.engine.max_context_tokens)
            sizes = self.policy.sampling_bytes(params)
            sizes |= {"sampling temporaries": self.policy.sampling_temporary_bytes(params)}
            sizes |= {"held sampling weights": self.policy.held_bytes(params)} if self.max_staleness else {}
            if self.policy.has_own_sampler:
                sizes = {f"{SAMPLER}{purpose}": size for purpose, size in sizes.items()}
            return training | {purpose: size / 2**20 for purpose, size in sizes.items()}

        with self._memory_errors():
            return await self.policy.read(needs)

    def peak_memory(self, memory: dict[str, float]) -> float:
        """Return the MiB of the larger phase, as update and rollout take turns."""
        return peak(memory)

    def memory_advice(self, memory: dict[str, float]) -> str | None:
        """Return the settings to change if a device has less than `memory`; None if it fits, or if that is unknown."""
        return memory_advice(self.adapter_config, self.policy, memory)

    def _memory_errors(self) -> AbstractContextManager[None]:
        return memory_errors(self.adapter_config, self.policy.engine)

    async def save_state(self, save: Callable[[dict[str, Any], Any], T]) -> T:
        """Return `save(values, arrays)`, called on the device thread.

        The values are counters; the arrays are those of policy, snapshots, optimizer, reference and value head. A
        frozen base is included only if it differs from its checkpoint, a snapshot only while it is not the policy.
        """

        def saved(params: Any) -> T:
            values: dict[str, Any] = {
                "policy_version": self.policy.version,
                "has_warned": self._has_warned,
                **self.learner.state(),
            }
            holds_base = False
            if self.policy.model.lora is not None:
                holds_base = not self.policy.has_own_base(params)
                values |= {"base": self.policy.base_of(params), "holds_base": holds_base}
            arrays, snapshots = self.learner.arrays(params, with_base=holds_base), self.policy.snapshots
            is_repeated = self.policy.held is not None and self.max_staleness == 1  # what the sampler sampled last
            if is_repeated:
                values["held"], arrays["held"] = self.policy.held_state(), self.policy.held_arrays()
            if snapshots:
                saved_of = {name: snapshot.saved(beside_held=is_repeated) for name, snapshot in snapshots.items()}
                values["snapshots"] = {name: state for name, (state, _) in saved_of.items()}
                arrays["snapshots"] = {name: params for name, (_, params) in saved_of.items()}
            return save(values, arrays)

        with self._memory_errors():
            return await self.policy.read(saved)

    async def restore_state(self, values: dict[str, Any], read: Callable[[Any], Any]) -> None:
        """Restore the state of a checkpoint.

        Raises:
            RestoreError: the checkpoint has another model, another optimizer, another dtype or other snapshots.
        """
        llm, has_adapters = self.adapter_config.llm, "base" in values
        if has_adapters != (self.policy.model.lora is not None):
            held = f"adapters, but llms.{llm} has none" if has_adapters else f"no adapters, but llms.{llm} has some"
            raise RestoreError(f"the checkpoint holds {held}: continue it with its own configuration")
        holds_base = values.get("holds_base", False)
        states, snapshots = values.get("snapshots", {}), self.policy.snapshots
        if states.keys() != snapshots.keys():
            raise RestoreError(
                f"the checkpoint holds {_listed(states)} of llms.{llm}, and the configuration has "
                f"{_listed(snapshots)}: continue it with the llms that it was begun with"
            )

        def restored(params: Any) -> Any:
            if has_adapters and not holds_base and values["base"] != self.policy.base_of(params):
                raise RestoreError(
                    f"the checkpoint holds adapters of another base than that of llms.{llm}: continue it with the "
                    "base it was made with"
                )
            like = self.learner.arrays(params, with_base=holds_base)
            if "held" in values:
                like["held"] = self.policy.held_like(values["held"], params)
            if states:
                like["snapshots"] = {
                    name: None if state is None else snapshots[name].arrays_like(state, params)
                    for name, state in states.items()
                }
            arrays = read(like)
            for name, state in states.items():
                snapshots[name].restore(state, arrays["snapshots"][name])
            restored = self.learner.restore(values, arrays, params)
            if "held" in values and not self.policy.restore_held(values["held"], arrays["held"], restored):
                self._warn(
                    "warning: the sampler's weights in the checkpoint are for another mesh or compute_dtype: the next "
                    "episodes are sampled with the newest ones"
                )
            return restored

        self._has_warned = values["has_warned"]
        with self._memory_errors():
            await self.policy.restore(restored, values["policy_version"])

    async def export_model(self, folder: Path) -> Path:
        """Write model, tokenizer and model card in Hugging Face's file format, and return the folder."""
        card = None if self._model_card is None else self._model_card(self.policy.version)
        return await self.policy.save(folder, card)


def _together(run_id: str, data: Gathered, rewards: CollectedRewards | None) -> AbstractAsyncContextManager[None]:
    """Return a block in which all processes compute a job, whose input they compare first."""
    return process_group().agree(f"job {run_id}", partial(digests_of, data, rewards))


def _listed(snapshots: Iterable[str]) -> str:
    names = sorted(snapshots)
    return f"the snapshots {', '.join(names)}" if names else "no snapshots"


def make_learner(
    config: LocalTrainerAdapterConfig,
    model: Model,
    *,
    seed: int = 0,
    ref_params: Params | None = None,
    max_staleness: int = 0,
    teacher: TeacherModel | None = None,
) -> Learner:
    """Make the learner of an adapter; arguments and errors are those of `Learner`."""
    return Learner(
        model,
        config.loss,
        config.optimizer,
        max_staleness=max_staleness,
        microbatch_tokens=config.microbatch_tokens,
        num_minibatches=config.num_minibatches,
        num_iterations=config.num_iterations,
        packing=config.packing,
        max_sampler_diff=job_outcome.MAX_LOGPROB_DIFF,
        max_disagreeing_fraction=job_outcome.MAX_DISAGREEING_FRACTION,
        seed=seed,
        ref_params=ref_params,
        teacher=teacher,
    )


def load_reference(config: LocalTrainerAdapterConfig, policy: Policy) -> Any:
    """Load the parameters of the reference policy of the KL from its checkpoint.

    If the policy has adapters, the reference gets fresh ones, which have no effect.

    Raises:
        ComponentError: the checkpoint has another model than the policy, or should follow a policy with adapters.
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
    tokens, own = policy.engine.max_context_tokens, policy.model.config
    if not isinstance(own, DecoderConfig):
        raise ComponentError(f"loss.reference.path: {path} holds a decoder; the policy is {own}")
    options: dict[str, Any] = {"context_tokens": tokens, "ignored_keys": accepted_keys(own)}
    reference, params = load_model(path, dtype=policy.dtype, lora=lora, mesh=mesh, **options)
    other = reference.config
    assert isinstance(other, DecoderConfig)
    if own.architecture != other.architecture:
        raise ComponentError(f"loss.reference.path: {path} holds {other}; the policy is {own}")
    return params


async def local_trainer_adapter(config: LocalTrainerAdapterConfig, builder: Any) -> AsyncIterator[LocalTrainerAdapter]:
    """Yield an adapter for the policy of `llm`."""
    llm = await builder.get_llm(config.llm)
    if not isinstance(llm, ChatClient):
        raise ComponentError(f"llm '{config.llm}' is a {type(llm).__name__}; only a local_policy can be trained here")
    if not isinstance(llm.policy, Policy):
        raise ComponentError(f"llm '{config.llm}' is a snapshot, which is never trained: name the policy that it is of")
    for name, other in builder.config.llms.items():  # checkpoints have all snapshots, also those not asked for yet
        if isinstance(other, LocalPolicyConfig) and other.snapshot_of == config.llm:
            await builder.get_llm(name)
    log = builder.console.message
    bad_batches = BadBatches(builder.directory, log, llm.policy.tokenizer.decode)
    distillation = config.loss.distillation
    teacher = None if distillation is None else await load_teacher(distillation.teacher, llm.policy, builder)
    yield LocalTrainerAdapter(
        config,
        llm.policy,
        log,
        builder.config.finetuning.seed,
        bad_batches,
        chooses_remat=builder.config.llms[config.llm].remat == "auto",
        note_remat=lambda remat: builder.add_choices(f"llms.{config.llm}", {"remat": remat}),
        model_card=partial(run_card, builder.config, builder.directory, config),
        teacher=teacher,
    )
