"""The trainer adapter that trains a `local_policy` in the process that samples from it.

A job goes through `submit`, which lays out its rows, and `_run`, which calls `Learner.learn` on the device thread.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from functools import cached_property, partial
from pathlib import Path
from typing import Any, TypeVar

from huggingface_hub import ModelCard

from jaxft.components.configs import LocalPolicyConfig, LocalTrainerAdapterConfig
from jaxft.components.frozen_weights import load_reference, load_teacher
from jaxft.components.run_card import run_card
from jaxft.components.speed import Speed
from jaxft.components.training_job import Job, JobInput, is_too_stale, make_learner, outcome, why_refused
from jaxft.core.partition import BASE
from jaxft.core.sharding import compute_platform
from jaxft.errors import (
    CheckFailed,
    ComponentError,
    ConfigError,
    DeviceMemoryError,
    RestoreError,
    TrajectoryError,
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
    TrajectoryCollection,
)
from jaxft.hosts.group import process_group
from jaxft.models.layer_stack import REMATS
from jaxft.models.peft import base_fingerprint
from jaxft.rollout.client import ChatClient
from jaxft.rollout.device import warm_up_rounds
from jaxft.rollout.policy import Policy
from jaxft.rollout.weights import Weights
from jaxft.training.advantages import gather, group_rewards, with_usable_rewards
from jaxft.training.config import SELF_TEACHERS
from jaxft.training.job_records import BadBatches, KeptTokens
from jaxft.training.learner import Learner
from jaxft.training.memory import choose_remat, disk_bytes, memory_advice, memory_errors, peak, peak_bytes, run_memory
from jaxft.training.rows import job_digests
from jaxft.training.self_distillation import with_teacher_rows

BACKEND = "local"

T = TypeVar("T")


class LocalTrainerAdapter(TrainerAdapter):
    """Owns the learner, with the state of the optimizer; the parameters are the policy's.

    Attributes:
        policy: samples, and is trained in place.
        max_staleness: number of versions that episodes may be behind.
        samples_beside: True if jobs and sampling share the device, with weights of their own.
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
        weights: Mapping[str, Weights] | None = None,
    ) -> None:
        """Make the adapter, without its learner.

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
            weights: the `reference`, if it is of another checkpoint, and the `teacher`, as far as the loss has them.
        """
        adapter_config = adapter_config.for_context(policy.engine.max_context_tokens)
        super().__init__(adapter_config)
        self.policy = policy
        self.max_staleness, self.samples_beside = 0, False
        self._make_learner = partial(make_learner, adapter_config, policy.model, seed, weights or {})
        self._chooses_remat, self._note_remat = chooses_remat, note_remat
        self._warn = warn
        if policy.model.sampling_dtype is not None and adapter_config.loss.is_policy_loss:
            self._check_correction("sampling_dtype", policy.model.sampling_dtype, "other weights'")
        self._model_card = model_card
        self._has_warned = False
        self._jobs: dict[str, Job] = {}
        self._bad_batches = bad_batches
        self._reported_compiles = 0
        self._speed = Speed(policy)

    @cached_property
    def learner(self) -> Learner:
        """Optimizer, reference and value head; made at the first access, as `allow_staleness` decides the correction.

        Raises:
            ConfigError: settings of the loss exclude each other.
        """
        try:
            return self._make_learner(max_staleness=self.max_staleness)
        except ValueError as error:
            raise ConfigError(f"finetuning.trainer_adapter: {error}") from error

    async def initialize(self, run_config: FinetuneConfig) -> None:
        """Store the run's configuration, make the learner, and choose the checkpoint policy if it is left open.

        Raises:
            ConfigError: `finetuning.target_model` is another language model than the adapter's, or settings of the loss
                exclude each other.
        """
        await super().initialize(run_config)
        if run_config.target_model not in (None, self.adapter_config.llm):
            raise ConfigError(
                f"finetuning.target_model: is '{run_config.target_model}', but the adapter trains "
                f"'{self.adapter_config.llm}'"
            )
        learner = self.learner
        if self._chooses_remat:
            pins = self.samples_beside
            remat = await self.policy.read(partial(choose_remat, learner, self.policy, are_pinned=pins))
            choices = await process_group().gather("remat", remat)  # which devices and compilers may make differ
            most_frugal = max(choices, key=REMATS.index)
            if most_frugal != remat:
                learner.use_remat(most_frugal)
            self._note_remat(most_frugal)

    def allow_staleness(self, max_staleness: int) -> None:
        """Take episodes of up to `max_staleness` versions before, with a correction of the loss, and share the device.

        Raises:
            ConfigError: nothing corrects the loss for staleness (dpo, sft, and functions that take neither
                `old_logprobs` nor `policy_weights`), or several processes are to be more than one version behind.
        """
        loss = self.adapter_config.loss
        if not loss.is_policy_loss:
            raise ConfigError(
                f"max_staleness: is {max_staleness}, but loss {loss.name!r} has no correction: set it to 0"
            )
        if max_staleness > 1 and not process_group().is_alone:
            raise ConfigError(
                f"max_staleness: is {max_staleness}, but which episodes end first differs between processes: "
                "set it to 1 or 0"
            )
        self.max_staleness, self.samples_beside = max_staleness, True
        self._check_correction("max_staleness", max_staleness, "earlier weights'")

    def _check_correction(self, field: str, value: Any, whose: str) -> None:
        """Raise unless something corrects the loss for samples that differ by a field, and warn if nothing is to.

        Raises:
            ConfigError: the loss is a function that takes neither `old_logprobs` nor `policy_weights`.
        """
        loss = self.adapter_config.loss
        function, is_uncorrected = loss.function, loss.correction is None and not loss.has_ratio
        if function is not None and is_uncorrected and not function.takes("policy_weights"):
            raise ConfigError(
                f"{field}: is {value}, but {function.place} takes neither old_logprobs nor policy_weights, by "
                "which a loss is corrected: take one, or set loss.correction to {name: none}"
            )
        if loss.correction is not None and loss.correction.name == "none":
            self._warn(
                f"warning: loss.correction is none with {field} {value}: the gradient is that of {whose} samples, and "
                "biased"
            )

    async def pin_weights(self, *, finishes_requests: bool = True) -> None:
        """Sample with the present weights, of which a copy is kept, beside the jobs that follow."""
        with self._memory_errors():
            await self.policy.pin_weights(finishes_requests=finishes_requests)

    async def release_weights(self) -> None:
        """Sample with the newest weights again."""
        await self.policy.release_weights()

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
            if self.samples_beside:
                await self.policy.pin_weights()
            await self.policy.update(
                lambda params: (self.learner.warm_up(params, longest, self.policy.pause), None),
                has_changed=lambda result: False,
            )
            if warm_up_rounds(compute_platform(self.policy.model.sharding)) > 1:
                await self.policy.warm_up()  # again, as the learner's programs were compiled since
            await self.policy.release_weights()

    def group_rewards(self, trajectories: TrajectoryCollection) -> list[GroupReward]:
        """Return mean and difference of the rewards that the loss compares in each group: weighted, or of steps.

        Raises:
            TrajectoryError: a reward that `reward_weights` names is missing.
        """
        loss = self.adapter_config.loss
        if not loss.is_policy_loss:
            return super().group_rewards(trajectories)
        groups = with_usable_rewards(trajectories.trajectories, loss, self._unusable)
        return group_rewards(groups, loss, self.adapter_config.llm)

    @property
    def _unusable(self) -> str:
        return "unscorable" if self.adapter_config.reward is None else self.adapter_config.reward.unusable

    async def submit(self, trajectories: TrajectoryCollection) -> TrainingJobRef:
        """Queue a job on these trajectories, and return at once.

        Raises:
            ValueError: a job of that name has not ended.
            NothingToTrain: no row has a token to train.
            TrajectoryError: a row is greedy or malformed, or has penalties that the loss does not correct for.
        """
        run_id = trajectories.run_id
        if run_id in self._jobs and not self._jobs[run_id].has_ended:
            raise ValueError(f"job '{run_id}' has not ended; wait for it, or give this one another id")
        llm, template = self.adapter_config.llm, self.policy.template
        data, rewards = gather(trajectories, self.adapter_config.loss, llm, template, self._unusable)
        distillation = self.adapter_config.loss.distillation
        if distillation is not None and distillation.templates:
            data = with_teacher_rows(data, distillation, llm, template, self.policy.engine.max_context_tokens)
        correction = self.learner.loss.correction
        if data.sampled.is_penalized.any() and (
            correction is None or correction.name in ("none", "sequence_geometric_mask")
        ):
            raise TrajectoryError(
                f"{data.sampled.is_penalized.mean():.1%} of tokens were drawn with presence_penalty, frequency_penalty "
                f"or repetition_penalty, and loss.correction is {correction and correction.name}, which does not weigh "
                "them: set loss.correction.name to token_truncate, or sample without"
            )
        if not self._has_warned and data.sampled.is_biased.any():
            self._has_warned = True
            self._warn(
                f"warning: {data.sampled.is_biased.mean():.1%} of tokens were drawn from a distribution that the loss "
                "does not know: by a finite logit_bias, or by filters whose supports are not recorded; sample without"
            )
        status = TrainingJobStatus(run_id=run_id, backend=BACKEND, status=TrainingStatusEnum.PENDING, progress=0.0)
        job = self._jobs[run_id] = Job(status)
        given = JobInput(data, rewards, KeptTokens(data, trajectories.kept_episodes), [])
        job.task = asyncio.create_task(self._run(job, given), name=f"job {run_id}")
        return TrainingJobRef(run_id=run_id, backend=BACKEND, metadata={"job_id": run_id})

    async def measure(self, trajectories: TrajectoryCollection) -> dict[str, float]:
        """Return the loss of logged trajectories under the present weights, without an update; see `Learner.measure`.

        Nothing is returned for policy losses, whose value says nothing.
        """
        loss = self.adapter_config.loss
        if loss.is_policy_loss:
            return {}
        loss = loss.model_copy(update={"min_reward": None})
        data, _ = gather(trajectories, loss, self.adapter_config.llm, self.policy.template, self._unusable)
        with self._memory_errors():
            return await self.policy.read(lambda params: self.learner.measure(data.rows, params, self.policy.pause))

    async def _run(self, job: Job, given: JobInput) -> None:
        started, run_id, device = time.perf_counter(), job.status.run_id, self.policy.device_seconds()
        files: list[str] = []
        try:
            with user_code(), self._memory_errors():  # whatever stops the job becomes its status
                async with _together(run_id, given):
                    metrics = await self.policy.update(
                        partial(self._learn, job, given), has_changed=lambda metrics: metrics["applied_updates"] > 0
                    )
                if self._bad_batches is not None:
                    files = self._bad_batches.keep(run_id, given.bad_updates, given.data.groups)
        except UserCodeError as failure:
            is_memory = isinstance(failure.error, DeviceMemoryError)
            message, traceback = str(failure.error) if is_memory else failure.summary, failure.traceback
            job.report(status=TrainingStatusEnum.FAILED, message=message, metadata={"traceback": traceback})
            return
        metrics |= given.data.metrics
        compiles = self.policy.compiles
        timings = {"seconds_update": time.perf_counter() - started, "compiles": compiles.count}
        trained = self.learner.trained_spans if metrics["updates"] else []
        timings |= peak_bytes(self.policy.model.sharding) | self._speed.of_job(trained, device)
        compiled, self._reported_compiles = compiles.names(self._reported_compiles), compiles.count
        metadata: dict[str, Any] = {"metrics": metrics, "timings": timings, "compiled": compiled}
        metadata |= {"token_scores": given.scores.rows()} if given.scores.indices else {}
        refusal = why_refused(metrics)
        message = (refusal or outcome(metrics)) + (f"; the batch of each is kept: {', '.join(files)}" if files else "")
        if refusal is not None:
            job.report(status=TrainingStatusEnum.FAILED, message=message, metadata=metadata)
        else:
            job.report(status=TrainingStatusEnum.COMPLETED, progress=100.0, message=message, metadata=metadata)

    def _learn(self, job: Job, given: JobInput, params: Any) -> tuple[Any, dict[str, float]]:
        """Run a job on the device thread: return the parameters and its metrics."""
        stale = given.data.staleness(self.policy.version, self.max_staleness)
        metrics = {"applied_updates": 0.0, "updates": 0, **stale, "policy_version": self.policy.version}
        if is_too_stale(stale):
            return params, metrics
        job.report(status=TrainingStatusEnum.RUNNING)
        self.policy.keep_snapshots(params)
        params, learned = self.learner.learn(
            given.data.rows,
            given.rewards,
            params,
            on_update=lambda done, total: job.report(progress=100.0 * done / total),
            keep_bad=given.bad_updates.append,
            kept_rows=given.scores.indices,
            keep_scores=given.scores.keep,
            pause=self.policy.pause,
        )
        version = self.policy.version + (learned["applied_updates"] > 0)
        return params, {**metrics, **learned, "policy_version": version}

    async def status(self, ref: TrainingJobRef) -> TrainingJobStatus:
        """Return the status of a job, also after it has ended.

        Its `metadata` holds the `metrics` and `timings` of a job that completed, with the `token_scores` of
        `kept_episodes`, which a trainer that has written them takes out, and the `traceback` of one that failed.
        """
        return self._job(ref).status

    async def wait_until_complete(self, ref: TrainingJobRef, poll_interval: float = 10.0) -> TrainingJobStatus:
        """Return the last status of a job, as soon as there is one; `poll_interval` is ignored."""
        job = self._job(ref)
        assert job.task is not None
        await asyncio.shield(job.task)
        return job.status

    def is_busy(self) -> bool:
        """True if a job has not ended."""
        return not all(job.has_ended for job in self._jobs.values())

    def log_progress(self, ref: TrainingJobRef, metrics: dict[str, Any], output_dir: str | None = None) -> None:
        """Do nothing: the trainer logs the metrics."""

    def _job(self, ref: TrainingJobRef) -> Job:
        if ref.run_id not in self._jobs:
            raise ValueError(f"no job '{ref.run_id}' was submitted; jobs: {', '.join(self._jobs) or 'none'}")
        return self._jobs[ref.run_id]

    async def memory(self) -> dict[str, float]:
        """Return the MiB that each device needs, by purpose: see `run_memory`, which compiles the largest programs."""
        pins = self.samples_beside
        with self._memory_errors():
            return await self.policy.read(partial(run_memory, self.learner, self.policy, are_pinned=pins))

    def peak_memory(self, memory: dict[str, float]) -> float:
        """Return the MiB of the larger phase, as update and rollout take turns."""
        return peak(memory)

    def memory_advice(self, memory: dict[str, float]) -> str | None:
        """Return the settings to change if a device has less than `memory`; None if it fits, or if that is unknown."""
        return memory_advice(memory, self.policy, self.adapter_config.llm, self.learner.microbatch_tokens)

    def _memory_errors(self) -> AbstractContextManager[None]:
        return memory_errors(self.policy.engine, self.adapter_config.llm, self.learner.microbatch_tokens)

    async def disk_bytes(self) -> dict[str, int]:
        """Return the bytes of weights in files; see `jaxft.training.memory.disk_bytes`."""
        num_copies = len(self.policy.weights.every) + (self.samples_beside and self.max_staleness == 1)
        has_base = self.policy.base is None
        return await self.policy.read(partial(disk_bytes, self.learner, num_copies=num_copies, has_base=has_base))

    async def save_state(self, save: Callable[[dict[str, Any], Any], T]) -> T:
        """Return `save(values, arrays)`, called on the device thread.

        The values are counters; the arrays are those of optimizer and value head, and all weights. A frozen base is
        included only if it differs from its checkpoint, other weights as `SamplingWeights.saved` has them.
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
                values |= {"base": base_fingerprint(params[BASE]), "holds_base": holds_base}
            # With a staleness of 1 a resumed run repeats what was sampled last, with the pinned weights.
            states, beside = self.policy.weights.saved(with_pinned=self.max_staleness == 1)
            return save(values | states, self.learner.arrays(params, with_base=holds_base) | beside)

        with self._memory_errors():
            return await self.policy.read(saved)

    async def restore_state(self, values: dict[str, Any], read: Callable[[Any], Any]) -> None:
        """Restore the state of a checkpoint.

        Raises:
            RestoreError: the checkpoint has another model, another optimizer, another dtype or other snapshots.
        """
        llm, weights, has_adapters = self.adapter_config.llm, self.policy.weights, "base" in values
        if has_adapters != (self.policy.model.lora is not None):
            found = f"adapters, but llms.{llm} has none" if has_adapters else f"no adapters, but llms.{llm} has some"
            raise RestoreError(f"the checkpoint holds {found}: continue it with its own configuration")
        holds_base = values.get("holds_base", False)
        saved = values.get("snapshots", {})
        if saved.keys() != weights.every.keys():
            raise RestoreError(
                f"the checkpoint holds {_list_snapshots(saved)} of llms.{llm}, and the configuration has "
                f"{_list_snapshots(weights.every)}: continue it with the llms that it was begun with"
            )

        def restored(params: Any) -> Any:
            if has_adapters and not holds_base and values["base"] != base_fingerprint(params[BASE]):
                raise RestoreError(
                    f"the checkpoint holds adapters of another base than that of llms.{llm}: continue it with the "
                    "base it was made with"
                )
            arrays = read(self.learner.arrays(params, with_base=holds_base) | weights.like(values, params))
            restored = self.learner.restore(values, arrays, params)
            if not weights.restore(values, arrays, restored):
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


def _together(run_id: str, given: JobInput) -> AbstractAsyncContextManager[None]:
    """Return a block in which all processes compute a job, whose input they compare first."""
    return process_group().agree(f"job {run_id}", partial(job_digests, given.data, given.rewards))


def _list_snapshots(snapshots: Iterable[str]) -> str:
    names = sorted(snapshots)
    return f"the snapshots {', '.join(names)}" if names else "no snapshots"


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
    weights = {}
    if config.has_own_reference:
        weights["reference"] = load_reference(config, llm.policy)
    if config.loss.distillation is not None and config.loss.distillation.teacher not in SELF_TEACHERS:
        weights["teacher"] = await load_teacher(config.loss.distillation.teacher, llm.policy, builder)
    yield LocalTrainerAdapter(
        config,
        llm.policy,
        log,
        builder.config.finetuning.seed,
        bad_batches,
        chooses_remat=builder.config.llms[config.llm].remat == "auto",
        note_remat=lambda remat: builder.add_choices(f"llms.{config.llm}", {"remat": remat}),
        model_card=partial(run_card, builder.config, builder.directory, config),
        weights=weights,
    )
