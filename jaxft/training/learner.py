"""The learner: runs training jobs (scores, advantages, updates), and owns the state that passes from job to job."""

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from jaxft.core.logprobs import init_value_head
from jaxft.core.losses import preference_loss
from jaxft.core.packing import unpack
from jaxft.core.partition import POLICY, TEACHER, combine, partition, trainable
from jaxft.core.sharding import commit_like, compute_devices, compute_platform
from jaxft.core.types import Batch, Model, Params, Scored
from jaxft.core.update import TrainState, init_train_state
from jaxft.models.config import DecoderConfig
from jaxft.models.flash import most_sequences, reason_not_to_pack
from jaxft.models.layer_stack import Remat
from jaxft.models.segment_probe import can_share_prefixes, check_segments
from jaxft.rollout.device import warm_up_rounds
from jaxft.rollout.weights import Weights
from jaxft.training.advantages import compute_advantages, with_selected
from jaxft.training.batch import (
    BatchPlanner,
    CollectedRewards,
    Row,
    Scorer,
    TrainingBatch,
    before_scoring,
    divide,
    empty_batch,
    make_batch,
    score_tokens,
    select_sequences,
    with_scores,
    with_signal,
)
from jaxft.training.config import LossConfig
from jaxft.training.job_records import BadUpdate, TokenScores
from jaxft.training.optimizer_config import OptimizerConfig
from jaxft.training.self_distillation import (
    copy_head,
    empty_states,
    hidden_states,
    with_teacher_logprobs,
    with_teacher_states,
)
from jaxft.training.update import AVERAGED_OVER, cached_update, merge_metrics, rate_at, scored, with_sample_size

logger = logging.getLogger(__name__)


def hidden_state(model: Model, params: Params) -> jax.ShapeDtypeStruct:
    """Shape and type of the hidden state of a single token, `[1 1 D]`."""
    tokens = jax.ShapeDtypeStruct((1, 1), jnp.int32)
    return jax.eval_shape(model.apply, params, tokens, tokens)[0]


def choose_packing(model: Model, params: Params, wanted: bool | None) -> bool:
    """Return whether to pack rows: `wanted`, or for None True unless that costs a kernel; False if the model cannot."""
    if wanted is None and isinstance(model.config, DecoderConfig):
        dtype = hidden_state(model, params).dtype
        reason = reason_not_to_pack(model.config, dtype, compute_devices(model.sharding))
        wanted = not reason
        if reason:
            logger.info("rows hold one sequence each: %s", reason)
    return wanted is not False and can_pack(model, params)


def can_pack(model: Model, params: Params) -> bool:
    """True if the model keeps the segments of a row apart; a bridged network does not."""
    tokens = jax.ShapeDtypeStruct((1, 1), jnp.int32)
    try:
        jax.eval_shape(lambda params, ids: model.apply(params, ids, ids, segment_ids=ids), params, tokens)
    except ValueError:
        return False
    return True


SHARED_TOKENS = 8192
"""Most tokens of a row whose sequences share a prefix, unless the settings say how many a microbatch may have."""

KEPT_TOKENS = 512
"""Most tokens of a microbatch of rows that are scored for their entropies alone: there are few of them."""


def choose_microbatch_tokens(wanted: int | None, platform: str) -> int:
    """Return `wanted`, or for None 8192 tokens, on CPUs 1024: there more of them need more memory, but no less time."""
    return wanted or (1024 if platform == "cpu" else 8192)


def check_balancing(model: Model, loss: LossConfig, *, has_replay: bool) -> None:
    """Raise ValueError if the loss balances the load of experts that the model lacks, or in a way that it cannot."""
    rate, config = loss.router_bias_update_rate, model.config
    if not has_replay and (rate or loss.router_aux_loss_coef):
        name = "router_bias_update_rate" if rate else "router_aux_loss_coef"
        raise ValueError(
            f"loss.{name} balances experts by the tokens that routing_replay gives them, and "
            f"{'routing_replay is false' if model.num_experts else 'the model has no experts'}: set it to 0"
        )
    if rate and model.lora is not None:
        raise ValueError("loss.router_bias_update_rate moves a bias that adapters leave frozen: set it to 0")
    if rate and isinstance(config, DecoderConfig) and not config.selection_bias:
        raise ValueError(
            f"loss.router_bias_update_rate moves a bias that the files of a {config.family} lack "
            "(e_score_correction_bias, as glm4_moe has it): set it to 0, or balance by router_aux_loss_coef"
        )


Pause = Callable[[Any], object]


def no_pause(ready: Any) -> None:
    """Do nothing: the default `pause` of `Learner.learn`, which leaves no work of others in between."""


class Learner:
    """Trains one policy job by job; owns the optimizer state, the reference policy and the value head.

    Attributes:
        opt_state: optimizer state; None before the first job.
        step: number of optimizer steps taken.
        model: the model of the policy.
        loss: settings of the loss.
        microbatch_tokens: most tokens of a microbatch, also where the settings leave it open.
        reference: weights of the KL's reference policy; None without one, or before the first job.
        teacher: weights of the teacher; None without one, or if it is the policy.
        value_head: value head of ppo; None for other losses.
        jobs: number of jobs run.
        trained_spans: tokens of each sequence of the last job, prompts included, and how many of them were computed
            with another sequence, once for each of its updates.
        bad_updates: number of non-finite updates since the last finite one.
    """

    def __init__(
        self,
        model: Model,
        loss: LossConfig,
        optimizer: OptimizerConfig,
        *,
        max_staleness: int = 0,
        microbatch_tokens: int | None = None,
        num_minibatches: int = 1,
        num_iterations: int = 1,
        packing: bool | None = None,
        routing_replay: bool = True,
        max_sampler_diff: float = 0.1,
        max_disagreeing_fraction: float = 1.0,
        seed: int = 0,
        reference: Weights | None = None,
        teacher: Weights | None = None,
    ) -> None:
        """Make the update; options not listed here are described in `LocalTrainerAdapterConfig`.

        Args:
            model: the model of the policy.
            loss: settings of the loss.
            optimizer: settings of the optimizer.
            max_staleness: number of versions that episodes may be behind, which decides the correction of the loss
                (`LossConfig.for_sampler`). Above 0 no update is refused because log-probabilities differ.
            seed: seed that shuffles minibatches.
            reference: reference policy from another checkpoint; None uses the parameters before the first job.
            teacher: the teacher of a loss with `distillation`, on the mesh of the policy; None without one, or if it is
                the policy.

        Raises:
            ValueError: settings of the loss exclude each other.
        """
        self.loss = loss = loss.for_sampler(max_staleness, is_quantized=model.sampling_dtype is not None)
        # Log-probabilities of earlier weights may differ; the correction weighs them, and versions tell foreign ones.
        largest_fraction = math.inf if max_staleness else max_disagreeing_fraction
        limits = (max_sampler_diff, largest_fraction) if loss.is_policy_loss else None
        dicts = dict.fromkeys(("reward_weights", "per_task"))  # which are not the update's, and cannot be hashed
        unweighted = loss.model_copy(update=dicts)
        self.teacher = teacher
        self._has_teacher_rows = loss.distillation is not None and bool(loss.distillation.templates)
        is_sampled = loss.distillation is not None and loss.distillation.is_sampled
        is_taught = loss.distillation is not None and (teacher is not None or self._has_teacher_rows)
        self._scores_teacher, self._learns_distribution = is_taught and is_sampled, is_taught and not is_sampled
        taught_by = None if not self._learns_distribution else model if teacher is None else teacher.model
        self._update_of = partial(cached_update, loss=unweighted, optimizer=optimizer, limits=limits, teacher=taught_by)
        self._use(model)
        self._rate_at = partial(rate_at, optimizer)
        self.microbatch_tokens = choose_microbatch_tokens(microbatch_tokens, compute_platform(model.sharding))
        configs = model.config, model.config if teacher is None else teacher.model.config
        takes_branches = all(isinstance(each, DecoderConfig) for each in configs)
        self._shared_tokens = (microbatch_tokens or SHARED_TOKENS) if takes_branches else 0
        self._num_minibatches, self._num_iterations = num_minibatches, num_iterations
        self._packing, self._seed = packing, seed
        config, self._routing = model.config, None
        if routing_replay and loss.is_policy_loss and isinstance(config, DecoderConfig):
            self._routing = config.expert_table
        check_balancing(model, loss, has_replay=self._routing is not None)
        in_reward = loss.kl_weight > 0 and loss.kl == "k1_in_reward"
        self._has_several_updates = num_iterations * num_minibatches > 1
        self._divides_by_sampler = loss.correction is not None and loss.correction.name == "ratio"
        if loss.name == "kl_cov" and not (self._has_several_updates or self._divides_by_sampler):
            raise ValueError(
                "loss 'kl_cov' makes one update of each job, where its penalty has no gradient: set num_minibatches or "
                "num_iterations above 1, or take 'clip_cov'"
            )
        reads_scores = in_reward or loss.estimator in ("gae", "optimal_token")
        self._needs_old = loss.is_policy_loss and (self._has_several_updates or reads_scores)
        self.opt_state: Any = None
        self.step: Any = None
        self.reference = reference
        self.value_head: Params | None = None
        self.jobs = self.bad_updates = 0
        self.trained_spans: list[tuple[int, int]] = []
        self._applied_jobs = 0

    def _use(self, model: Model) -> None:
        """Train this model from now on; it must have the parameters of the last one."""
        self.model, self._scored = model, partial(scored, model)
        self._optimizer, self._update = self._update_of(model)

    def use_remat(self, remat: Remat) -> None:
        """Train from now on with this checkpoint policy."""
        assert self.model.with_remat is not None
        self._use(self.model.with_remat(remat))

    def learn(
        self,
        rows: list[Row],
        credit: CollectedRewards | None,
        params: Params,
        *,
        on_update: Callable[[int, int], object] = lambda done, total: None,
        keep_bad: Callable[[BadUpdate], object] = lambda update: None,
        kept_rows: Sequence[int] = (),
        keep_scores: Callable[[int, TokenScores], object] = lambda row, scores: None,
        pause: Pause = no_pause,
    ) -> tuple[Params, dict[str, float]]:
        """Run the updates of a job, and return the new parameters and the job's metrics.

        Args:
            rows: rows to train; for dpo, chosen and rejected rows alternate.
            credit: rewards of the trajectories; None for dpo and sft.
            params: parameters of the policy; the first update donates them.
            on_update: called before each update with the numbers of updates made and planned.
            keep_bad: called with each non-finite update, after it.
            kept_rows: indices of rows, ascending, whose tokens' advantages and entropies are wanted; none without
                `credit`.
            keep_scores: called with each of these indices and its scores, before the first update.
            pause: called after each microbatch is queued, with an array that is ready when it has been computed.
        """
        self._prepare(params)
        planner, metrics = self._planner(), dict[str, float]()
        loss, scorers = self.loss, self._scorers(params, pause)
        has_observations = loss.observation_coef > 0
        options = {"has_supports": loss.is_policy_loss, "has_observations": has_observations}
        laid_out = make_batch(rows, planner, **options, routing=self._routing)
        if credit is not None and any(row.sequence.is_logged for row in rows):
            laid_out = with_own_logprobs(laid_out, pausing(self._policy_scorer(params), pause))
        job = laid_out if loss.skip_zero_advantages else with_scores(laid_out, loss, *scorers)
        if (experts := laid_out.batch.experts) is not None:  # the last token of a sequence is never fed
            fed = max(1, int(laid_out.is_own.sum()) - len(rows))
            metrics["replayed_token_fraction"] = min(1.0, float(np.any(experts, axis=(2, 3)).sum()) / fed)
        job = self._taught(job, rows, params, pause)
        if credit is not None:
            job, of_credit = compute_advantages(job, credit, loss)
            metrics |= of_credit
            if kept_rows:
                self._score_kept(laid_out, job, kept_rows, params, keep_scores, pause)
        if loss.skip_zero_advantages:  # before the scores, which are not computed for what is skipped
            job, metrics["skipped_trajectories"] = with_signal(job, planner)
            job = with_scores(job, loss, *scorers)
        if has_observations:
            metrics["observation_tokens"] = job.counts()["observations"]
        if loss.selects_tokens:
            job, of_selection = with_selected(job, loss, f"selected {self._seed} {self.jobs}")
            metrics |= of_selection
        if not self._has_several_updates:  # old and present policy are one
            job = job._replace(batch=job.batch._replace(old_logprobs=None))
        seed = f"minibatches {self._seed} {self.jobs}"
        minibatches = divide(job, planner, self._num_minibatches, self._num_iterations, seed)
        if loss.name == "kl_cov" and not self._divides_by_sampler:
            # The first update's ratios are 1 up to rounding, which would set the sign of the penalty's gradient.
            nothing: Any = np.zeros(minibatches[0].turns.shape, np.bool_)
            minibatches[0] = minibatches[0]._replace(batch=minibatches[0].batch._replace(selected=nothing))

        state, rate = self._train_state(params), float(self._rate_at(self.step))
        history: list[dict[str, Any]] = []
        for done, minibatch in enumerate(minibatches):
            on_update(done, len(minibatches))
            state, of_update = self._update(state, minibatch.microbatches(), pause)
            history.append(of_update | {"batch_rows": minibatch.packing.height})
        params = self._keep(state)
        self.trained_spans = [(own + shared, shared) for each in minibatches for *_, own, shared in each.packing.own]
        self.jobs += 1
        history = [with_sample_size(of_update) for of_update in jax.device_get(history)]
        metrics |= self._merge(history, minibatches, keep_bad)
        if metrics["applied_updates"]:
            self._applied_jobs += 1
            self._follow(params)
        metrics |= {"updates": len(history), "nonfinite_updates_in_a_row": self.bad_updates}
        return params, metrics | ({} if np.isnan(rate) else {"learning_rate": rate})

    def _merge(
        self,
        history: list[dict[str, Any]],
        minibatches: Sequence[TrainingBatch],
        keep_bad: Callable[[BadUpdate], object],
    ) -> dict[str, float]:
        """Return the metrics of a job from those of its updates; count and keep the non-finite ones."""
        for number, (of_update, minibatch) in enumerate(zip(history, minibatches, strict=True), 1):
            self.bad_updates = self.bad_updates + 1 if of_update["nonfinite_updates"] else 0
            if of_update["nonfinite_updates"]:
                keep_bad(BadUpdate(number, of_update, minibatch))
        counts = [minibatch.counts() for minibatch in minibatches]
        of_loss = dict.fromkeys(("loss", "policy_loss"), self.loss.averaged_over)
        return merge_metrics(history, counts, AVERAGED_OVER | of_loss)

    def measure(self, rows: list[Row], params: Params, pause: Pause = no_pause) -> dict[str, float]:
        """Return metrics of rows for sft, or of pairs for dpo, without an update.

        These are `loss`, for dpo without its supervised part, and `preference_accuracy` of pairs.
        """
        self._prepare(params)
        _, reference = self._scorers(params, pause)
        policy = pausing(self._policy_scorer(params), pause)
        job = with_scores(make_batch(rows, self._planner()), self.loss, policy, reference)
        mask = job.per_token(job.batch.completion_mask)
        owners = job.places[0][mask]

        def sums(table: Any) -> np.ndarray:
            return np.bincount(owners, job.per_token(table, dtype=np.float64)[mask], minlength=len(rows))

        logprobs, lengths = sums(job.batch.old_logprobs), np.bincount(owners, minlength=len(rows))
        if self.loss.name != "dpo":
            return {"loss": float(-logprobs.sum() / lengths.sum())}
        scale = lengths if self.loss.preference.length_normalized else 1
        per_answer = [sums(table) / scale for table in (job.batch.old_logprobs, job.batch.ref_logprobs)]
        halves = [jnp.asarray(each[half::2], jnp.float32) for each in per_answer for half in (0, 1)]
        beta = 0.1 if self.loss.beta is None else self.loss.beta
        kind, smoothing = self.loss.preference.kind, self.loss.preference.label_smoothing
        found = preference_loss(*halves, beta=beta, kind=kind, label_smoothing=smoothing)
        return {"loss": float(found.losses.mean()), "preference_accuracy": float((found.margins > 0).mean())}

    def _score_kept(
        self,
        laid_out: TrainingBatch,
        job: TrainingBatch,
        kept_rows: Sequence[int],
        params: Params,
        keep_scores: Callable[[int, TokenScores], object],
        pause: Pause,
    ) -> None:
        """Call `keep_scores` with each kept row; `laid_out` is the job before its scores and advantages."""
        chosen = select_sequences(laid_out, np.array(kept_rows), self._kept_planner())
        scored = score_tokens(chosen, pausing(partial(self._scored, params, value_head=None), pause))
        trained = job.per_token(job.batch.advantages) * job.per_token(job.batch.completion_mask)
        advantages = np.split(trained, np.cumsum(job.packing.lengths)[:-1])
        entropies = unpack(chosen.packing, scored.entropy)
        for row, of_row in zip(kept_rows, entropies, strict=True):
            keep_scores(row, TokenScores(advantages[row], of_row))

    def state(self) -> dict[str, int]:
        """Return the counters that the next jobs depend on, for JSON."""
        return {"jobs": self.jobs, "applied_jobs": self._applied_jobs, "bad_updates": self.bad_updates}

    def arrays(self, params: Params, *, with_base: bool = False) -> dict[str, Any]:
        """Return all arrays that the next jobs depend on, the policy's included; `with_base` adds a frozen base."""
        self._prepare(params)
        return {
            "params": params if with_base else trainable(self.model, params),
            "opt_state": self.opt_state,
            "step": self.step,
            "ref_params": None if self.reference is None else self.reference.params,
            "value_head": self.value_head,
        }

    def restore(self, state: dict[str, int], arrays: dict[str, Any], params: Params) -> Params:
        """Restore a `state` and its `arrays`, and return the policy's parameters, with the frozen base of `params`."""
        self.jobs, self._applied_jobs, self.bad_updates = state["jobs"], state["applied_jobs"], state["bad_updates"]
        self.opt_state, self.step = arrays["opt_state"], arrays["step"]
        self.value_head, reference = arrays["value_head"], arrays["ref_params"]
        self.reference = None if reference is None else Weights(self.model, reference)
        return combine(arrays["params"], partition(self.model, params)[1])

    def programs(self, params: Params, longest: int) -> dict[str, Callable[[], Any]]:
        """Return functions that lower the programs of a job on rows of `longest` tokens, by name; see `Update`.

        Args:
            params: parameters of the policy, or their shapes with shardings.
            longest: tokens of the longest row.
        """
        rows, width = self.largest_microbatch(params, longest)
        batch = jax.eval_shape(lambda: self._empty_batch(params, rows, width))
        return self._update.programs(self.state_shapes(params), batch)

    def packs_rows(self, params: Params) -> bool:
        """Return True if rows hold several sequences; pairs of dpo are never packed."""
        self._packing = choose_packing(self.model, params, self._packing)
        return self._planner().packed

    def largest_microbatch(self, params: Params, longest: int) -> tuple[int, int]:
        """Return rows, over the whole mesh, and width of the largest microbatch of sequences of `longest` tokens."""
        self._packing = choose_packing(self.model, params, self._packing)
        shapes = [(self._planner().row_buckets(width)[0], width) for width in self._planner().widths(longest)]
        return max(shapes, key=math.prod)

    def row_buckets(self, params: Params, width: int) -> list[int]:
        """Return the numbers of rows, over the whole mesh, that microbatches of this width may have, largest first."""
        self._packing = choose_packing(self.model, params, self._packing)
        return self._planner().row_buckets(width)

    def state_shapes(self, params: Params) -> TrainState:
        """Return the shapes of the state that an update replaces."""
        trained: Any = jax.eval_shape(lambda p: p, params)
        head = None
        if self.loss.name == "ppo":
            head = jax.eval_shape(lambda p: init_value_head(hidden_state(self.model, p).shape[-1]), params)
        trained = self._beside(trained, head)
        return jax.eval_shape(lambda p: init_train_state(p, self._optimizer, self.model), trained)

    def warm_up(self, params: Params, longest: int, pause: Pause = no_pause) -> Params:
        """Compile all scores and updates, by running them on empty microbatches for rows of up to `longest` tokens.

        On GPUs they run twice more once all are compiled; see `warm_up_rounds`. The given parameters are donated; the
        returned ones hold the same bits. `pause` is that of `learn`. What scores logged rows for a policy loss is
        compiled by their first job. From now on no rows share a prefix, as the layouts of later jobs are not known.
        """
        self._prepare(params)
        self._shared_tokens = 0
        state = self._train_state(params)
        for _ in range(warm_up_rounds(compute_platform(self.model.sharding))):
            state = self._run_all_shapes(state, longest, pause)
        return self._keep(state)

    def _run_all_shapes(self, state: TrainState, longest: int, pause: Pause) -> TrainState:
        """Run all scores and updates of `warm_up` on a state, which is donated; return the same state."""
        self._rate_at(state.step)
        shapes = self._planner().all_shapes(longest)
        kept_widths = {width for _, width in shapes} if self.loss.is_policy_loss else set()
        policy = state.params[POLICY] if self._is_nested else state.params
        for width in sorted(kept_widths):
            for rows in self._kept_planner().row_buckets(width):
                self._scored(policy, before_scoring(self._empty_batch(policy, rows, width)), value_head=None)
        for rows, width in shapes:
            policy = state.params[POLICY] if self._is_nested else state.params
            batch = self._empty_batch(policy, rows, width)
            head = None if self.value_head is None else state.params["value_head"]
            recorded = before_scoring(batch)
            if self._needs_old:
                self._policy_scorer(policy)(recorded, value_head=head)
            if self.loss.scores_reference:
                self._scored(policy, recorded, value_head=None)
            teacher = self._teacher_weights(policy)
            if self._scores_teacher:
                scored(teacher.model, teacher.params, recorded._replace(experts=None), value_head=None)
            elif self._has_teacher_rows:
                hidden_states(teacher.model, teacher.params, recorded._replace(experts=None))
            for parts in (batch, [batch, batch]):  # alone, and as one of several
                state, _ = self._update(state, parts, pause)
        if self.reference is not None and self.loss.reference.update_every is not None:
            moving = trainable(self.model, self.reference.params)
            mix(moving, moving, self.loss.reference.mixing)
        return state

    def _planner(self) -> BatchPlanner:
        """Return the planner of a job's batch; `_packing` must have been chosen."""
        pairs, sharding = self.loss.name == "dpo", self.model.sharding
        row_shards = 1 if sharding is None else sharding.row_shards
        packed, most = bool(self._packing) and not pairs, most_sequences(compute_devices(sharding))
        return BatchPlanner(
            self.microbatch_tokens, packed, pairs, row_shards, most, self._shared_tokens if packed else 0
        )

    def _kept_planner(self) -> BatchPlanner:
        """Return the planner of rows that are scored for their entropies alone."""
        most = min(KEPT_TOKENS, self.microbatch_tokens)
        return replace(self._planner(), microbatch_tokens=most, shared_tokens=0)

    def _empty_batch(self, params: Params, rows: int, width: int) -> Batch:
        packed, has_old = self._planner().packed, self._has_several_updates
        batch = empty_batch(self.loss, rows, width, packed=packed, has_old=has_old, routing=self._routing)
        if not (self._has_teacher_rows and self._learns_distribution):
            return batch
        return batch._replace(teacher_hidden=empty_states(self._teacher_weights(params), rows, width))

    def _prepare(self, params: Params) -> None:
        """Before the first job, make optimizer state, value head and reference from the starting parameters."""
        if self.opt_state is not None:
            return
        self._packing = choose_packing(self.model, params, self._packing)
        for each in (Weights(self.model, params), self.teacher) if self._planner().packed else ():
            if each is not None and isinstance(each.model.config, DecoderConfig):
                dtype = hidden_state(each.model, each.params).dtype
                check_segments(each.model.config, dtype, each.model.sharding)
                if self._shared_tokens and not can_share_prefixes(each.model.config, dtype, each.model.sharding):
                    self._shared_tokens = 0
        if self.loss.name == "ppo":
            self.value_head = commit_like(params, init_value_head(hidden_state(self.model, params).shape[-1]))
        self._keep(init_train_state(self._train_state(params).params, self._optimizer, self.model))
        if self.loss.needs_reference and self.reference is None:  # the originals are about to be donated
            self.reference = Weights.copied(self.model, params)

    def _train_state(self, params: Params) -> TrainState:
        """Return the state that an update replaces: parameters, with value head or teacher, and optimizer state."""
        return TrainState(self._beside(params, self.value_head), self.opt_state, self.step)

    def _beside(self, params: Params, value_head: Params | None) -> Params:
        """Return the parameters that the loss reads: the policy's alone, or beside a value head or a teacher."""
        if value_head is not None:
            return {POLICY: params, "value_head": value_head}
        if self._learns_distribution:
            teacher = self._teacher_weights(params)
            return {POLICY: params, TEACHER: copy_head(teacher) if self._has_teacher_rows else teacher.params}
        return params

    @property
    def _is_nested(self) -> bool:
        return self.value_head is not None or self._learns_distribution

    def _keep(self, state: TrainState) -> Params:
        """Store the state after an update, and return the policy's parameters."""
        self.opt_state, self.step = state.opt_state, state.step
        if self.value_head is not None:
            self.value_head = state.params["value_head"]
        return state.params[POLICY] if self._is_nested else state.params

    def _scorers(self, params: Params, pause: Pause = no_pause) -> tuple[Scorer | None, Scorer | None]:
        """Return scorers of a microbatch by policy and reference; None if the loss reads no such scores."""
        policy = None
        if self._needs_old:
            policy = pausing(self._policy_scorer(params), pause)
        if not self.loss.scores_reference:
            return policy, None
        assert self.reference is not None
        reference = partial(self._scored, self.reference.whole(params), value_head=None)
        return policy, pausing(reference, pause)

    def _policy_scorer(self, params: Params) -> Callable[..., Scored]:
        options = {"with_sum_pi_squared": True} if self.loss.estimator == "optimal_token" else {}
        return partial(self._scored, params, value_head=self.value_head, **options)

    def _teacher_weights(self, params: Params) -> Weights:
        """Return the weights of the teacher: another model's, the reference's, or the policy's."""
        if self.teacher is not None:
            return self.teacher
        is_reference = self.loss.distillation is not None and self.loss.distillation.teacher == "reference"
        reference = self.reference if is_reference else None  # which is not there before the first job
        return Weights(self.model, params if reference is None else reference.whole(params))

    def _taught(self, job: TrainingBatch, rows: Sequence[Row], params: Params, pause: Pause) -> TrainingBatch:
        """Return the job with log-probabilities of its teacher, or the hidden states of one that reads more."""
        weights = self._teacher_weights(params)
        if self._scores_teacher:
            score = pausing(partial(scored, weights.model, weights.params, value_head=None), pause)
            if self._has_teacher_rows:
                return with_teacher_logprobs(job, rows, self._planner(), score)
            own = job._replace(batch=job.batch._replace(experts=None))  # it routes by itself
            return job._replace(teacher_logprobs=score_tokens(own, score).logprobs)
        return with_teacher_states(job, rows, self._planner(), weights, pause) if self._has_teacher_rows else job

    def _follow(self, params: Params) -> None:
        """Move the reference towards the policy after every `update_every`-th job that made an update."""
        every, mixing = self.loss.reference.update_every, self.loss.reference.mixing
        if self.reference is not None and every is not None and self._applied_jobs % every == 0:
            old = self.reference.params
            mixed = mix(*(trainable(self.model, each) for each in (params, old)), mixing)
            self.reference = Weights(self.model, combine(mixed, old))


def pausing(score: Scorer, pause: Pause) -> Scorer:
    """Return `score` with a pause after each microbatch."""

    def scored(microbatch: Any) -> Any:
        scores = score(microbatch)
        pause(scores.logprobs)
        return scores

    return scored


def with_own_logprobs(job: TrainingBatch, score: Scorer) -> TrainingBatch:
    """Return a job of logged rows, whose recorded log-probabilities are unknown, with those of the policy instead."""
    logprobs = score_tokens(job, score).logprobs
    return job._replace(batch=job.batch._replace(sampler_logprobs=logprobs, behavior_logprobs=logprobs))


@jax.jit
def mix(params: Params, ref_params: Params, share: Float[Array, ""] | float) -> Params:
    """Return `share * params + (1 - share) * ref_params`, in the dtypes of the reference."""
    return jax.tree.map(lambda new, old: (share * new + (1 - share) * old).astype(old.dtype), params, ref_params)
