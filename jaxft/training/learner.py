"""The learner: runs training jobs (scores, advantages, updates), and owns the state that passes from job to job."""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from jaxft.core.logprobs import init_value_head
from jaxft.core.packing import unpack
from jaxft.core.partition import POLICY, TEACHER, combine, partition, trainable
from jaxft.core.sharding import commit_like, constrain, device_bytes, devices_of
from jaxft.core.types import Batch, Model, Params
from jaxft.core.update import TrainState, init_train_state
from jaxft.models.attention import Scores
from jaxft.models.config import DecoderConfig
from jaxft.models.decoder import AUTO_REMATS, Remat
from jaxft.models.flash import choose_kernel
from jaxft.rollout.device import is_out_of_memory
from jaxft.training.bad_batches import BadUpdate
from jaxft.training.batch import (
    BatchPlanner,
    CollectedRewards,
    Row,
    Scorer,
    TrainingBatch,
    before_scoring,
    compute_advantages,
    divide,
    empty_batch,
    make_batch,
    score_tokens,
    select_sequences,
    with_scores,
    with_signal,
)
from jaxft.training.config import LossConfig, OptimizerConfig
from jaxft.training.token_scores import TokenScores
from jaxft.training.update import rate_at, scored, update_of


def hidden_state(model: Model, params: Params) -> jax.ShapeDtypeStruct:
    """Shape and type of the hidden state of a single token, `[1 1 D]`."""
    tokens = jax.ShapeDtypeStruct((1, 1), jnp.int32)
    return jax.eval_shape(model.apply, params, tokens, tokens)[0]


def choose_packing(model: Model, params: Params, wanted: bool | None) -> bool:
    """Return whether to pack rows: `wanted`, or for None True unless that costs a kernel; False if the model cannot."""
    if wanted is None and isinstance(model.config, DecoderConfig):
        dtype = hidden_state(model, params).dtype
        wanted = not loses_kernel(model.config, dtype, devices_of(model.sharding))
    return wanted is not False and can_pack(model, params)


def loses_kernel(config: DecoderConfig, dtype: Any, devices: Sequence[Any]) -> bool:
    """True if a fused kernel takes some layers' attention in rows of one sequence, but none does in packed rows."""
    longest = config.max_position_embeddings
    windows = {None if kind.window is None or kind.window >= longest else kind.window for kind in config.pattern}
    for window in windows:
        kind = dtype, config.head_dim, Scores(config.score_scale, window, config.attention_soft_cap), devices
        padded, packed = (choose_kernel(*kind, has_segments=has_segments).kernel for has_segments in (False, True))
        if padded != "xla" and packed == "xla":
            return True
    return False


def can_pack(model: Model, params: Params) -> bool:
    """True if the model keeps the segments of a row apart; a bridged network does not."""
    tokens = jax.ShapeDtypeStruct((1, 1), jnp.int32)
    try:
        jax.eval_shape(lambda params, ids: model.apply(params, ids, ids, segment_ids=ids), params, tokens)
    except ValueError:
        return False
    return True


COUNTED = ("applied_updates", "nonfinite_updates", "nothing_to_learn", "refused_updates")
"""Metrics summed over the updates of a job; all others are averaged, or maximised if the name ends in `_max`."""

AVERAGED_OVER = {
    "sampler_disagreement_fraction": "sequences",
    **dict.fromkeys(
        ("preference_accuracy", "reward_margin", "chosen_reward", "rejected_reward", "chosen_nll"), "pairs"
    ),
    **dict.fromkeys(("grad_norm", "batch_rows"), "updates"),
}
"""The count of `TrainingBatch.counts` that weights a metric in the mean over updates; `LossConfig.averaged_over` for
the loss, `tokens` for all other metrics."""

GoesOn = Callable[[int, int], bool]


Pause = Callable[[Any], object]


class TeacherModel(NamedTuple):
    """The teacher of a distillation, which is never trained; its parameters may be shapes."""

    model: Model
    params: Params


def always(done: int, total: int) -> bool:
    """Return True: the default `goes_on` of `Learner.learn`, which runs every update."""
    return True


def no_pause(ready: Any) -> None:
    """Do nothing: the default `pause` of `Learner.learn`, which leaves no work of others in between."""


class Learner:
    """Trains one policy job by job; owns the optimizer state, the reference policy and the value head.

    Attributes:
        opt_state: optimizer state; None before the first job.
        step: number of optimizer steps taken.
        ref_params: parameters of the KL's reference policy; None without one, or before the first job.
        value_head: value head of ppo; None for other losses.
        jobs: number of jobs run.
        bad_updates: number of non-finite updates since the last finite one.
    """

    def __init__(
        self,
        model: Model,
        loss: LossConfig,
        optimizer: OptimizerConfig,
        *,
        max_staleness: int = 0,
        microbatch_tokens: int = 8192,
        num_minibatches: int = 1,
        num_iterations: int = 1,
        packing: bool | None = None,
        max_sampler_diff: float = 0.1,
        max_disagreeing_fraction: float = 1.0,
        seed: int = 0,
        ref_params: Params | None = None,
        teacher: TeacherModel | None = None,
    ) -> None:
        """Make the update; options not listed here are described in `LocalTrainerAdapterConfig`.

        Args:
            model: the model of the policy.
            loss: settings of the loss.
            optimizer: settings of the optimizer.
            max_staleness: number of versions that episodes may be behind, which decides the correction of the loss
                (`LossConfig.for_staleness`). Above 0 no update is refused because log-probabilities differ.
            seed: seed that shuffles minibatches.
            ref_params: reference policy from another checkpoint; None uses the parameters before the first job.
            teacher: the teacher of a loss with `distillation`, on the mesh of the policy; None without one.

        Raises:
            ValueError: settings of the loss exclude each other.
        """
        self._loss_config = loss = loss.for_staleness(max_staleness)
        # Log-probabilities of earlier weights may differ; the correction weighs them, and versions tell foreign ones.
        largest_fraction = math.inf if max_staleness else max_disagreeing_fraction
        limits = (max_sampler_diff, largest_fraction) if loss.is_policy_loss else None
        unweighted = loss.model_copy(update={"reward_weights": None})  # not the update's, and no dict can be hashed
        self._teacher = teacher
        in_loss = teacher is not None and loss.distillation is not None and not loss.distillation.is_sampled
        self._teacher_of_loss = teacher if in_loss else None
        taught_by = None if self._teacher_of_loss is None else self._teacher_of_loss.model
        self._update_of = partial(update_of, loss=unweighted, optimizer=optimizer, limits=limits, teacher=taught_by)
        self._use(model)
        self._rate_at = partial(rate_at, optimizer)
        self._microbatch_tokens = microbatch_tokens
        self._num_minibatches, self._num_iterations = num_minibatches, num_iterations
        self._packing, self._seed = packing, seed
        in_reward = loss.kl_weight > 0 and loss.kl == "k1_in_reward"
        self._has_several_updates = num_iterations * num_minibatches > 1
        self._needs_old = loss.is_policy_loss and (self._has_several_updates or in_reward or loss.name == "ppo")
        self.opt_state: Any = None
        self.step: Any = None
        self.ref_params = ref_params
        self.value_head: Params | None = None
        self.jobs = self.bad_updates = 0
        self._applied_jobs = 0

    def _use(self, model: Model) -> None:
        """Train this model from now on; it must have the parameters of the last one."""
        self._model, self._scored = model, partial(scored, model)
        self._optimizer, self._update = self._update_of(model)

    def choose_remat(self, params: Params, longest: int, fits: Callable[[dict[str, float]], bool]) -> str:
        """Train from now on with the fastest checkpoint policy whose compiled programs fit; return its name.

        Args:
            params: parameters of the policy, or their shapes.
            longest: tokens of the longest row.
            fits: called with the result of `memory`; True if a device has so much. An out-of-memory error of the
                compiler counts as False. If nothing fits, the policy that needs least is taken.
        """
        for remat in AUTO_REMATS:
            self.use_remat(remat)
            try:
                if fits(self.memory(params, longest)):
                    break
            except jax.errors.JaxRuntimeError as error:
                if not is_out_of_memory(error):
                    raise
        return remat

    def use_remat(self, remat: Remat) -> None:
        """Train from now on with this checkpoint policy."""
        assert self._model.with_remat is not None
        self._use(self._model.with_remat(remat))

    def learn(
        self,
        rows: list[Row],
        credit: CollectedRewards | None,
        params: Params,
        goes_on: GoesOn = always,
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
            goes_on: called before each update with the numbers of updates made and planned; False ends the job.
            keep_bad: called with each non-finite update, after it.
            kept_rows: indices of rows, ascending, whose tokens' advantages and entropies are wanted; none without
                `credit`.
            keep_scores: called with each of these indices and its scores, before the first update.
            pause: called after each microbatch is queued, with an array that is ready when it has been computed.
        """
        self._prepare(params)
        planner, metrics = self._planner(), dict[str, float]()
        laid_out = make_batch(rows, planner)
        loss, scorers = self._loss_config, self._scorers(params, pause)
        job = laid_out if loss.skip_zero_advantages else with_scores(laid_out, loss, *scorers)
        if credit is not None:
            job, metrics = compute_advantages(job, credit, loss)
            if kept_rows:
                self._score_kept(laid_out, job, kept_rows, params, keep_scores, pause)
        if loss.skip_zero_advantages:  # before the scores, which are not computed for what is skipped
            job, metrics["skipped_trajectories"] = with_signal(job, planner)
            job = with_scores(job, loss, *scorers)
        if not self._has_several_updates:  # old and present policy are one
            job = job._replace(batch=job.batch._replace(old_logprobs=None))
        seed = f"minibatches {self._seed} {self.jobs}"
        minibatches = divide(job, planner, self._num_minibatches, self._num_iterations, seed)

        state, rate = self._train_state(params), float(self._rate_at(self.step))
        history: list[dict[str, Any]] = []
        for done, minibatch in enumerate(minibatches):
            if not goes_on(done, len(minibatches)):
                break
            state, of_update = self._update(state, minibatch.microbatches(), pause)
            history.append(of_update | {"batch_rows": minibatch.packing.height})
        params = self._keep(state)
        self.jobs += 1
        history = [with_sample_size(of_update) for of_update in jax.device_get(history)]
        counts = [minibatch.counts() for minibatch in minibatches[: len(history)]]
        of_loss = dict.fromkeys(("loss", "policy_loss"), loss.averaged_over)
        metrics |= merge_metrics(history, counts, AVERAGED_OVER | of_loss) if history else {"applied_updates": 0.0}
        for number, (of_update, minibatch) in enumerate(zip(history, minibatches, strict=False), 1):
            self.bad_updates = self.bad_updates + 1 if of_update["nonfinite_updates"] else 0
            if of_update["nonfinite_updates"]:
                keep_bad(BadUpdate(number, of_update, minibatch))
        if metrics["applied_updates"]:
            self._applied_jobs += 1
            self._follow(params)
        metrics |= {"updates": len(history), "nonfinite_updates_in_a_row": self.bad_updates, "learning_rate": rate}
        return params, metrics

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
        chosen = select_sequences(laid_out, np.array(kept_rows), self._planner())
        # The value head changes no entropy, but shares the program that scores a job for ppo.
        scored = score_tokens(chosen, pausing(partial(self._scored, params, value_head=self.value_head), pause))
        entropies, advantages = unpack(chosen.packing, scored.entropy), unpack(job.packing, job.batch.advantages)
        for row, of_row in zip(kept_rows, entropies, strict=True):
            keep_scores(row, TokenScores(advantages[row], of_row))

    def state(self) -> dict[str, int]:
        """Return the counters that the next jobs depend on, for JSON."""
        return {"jobs": self.jobs, "applied_jobs": self._applied_jobs, "bad_updates": self.bad_updates}

    def arrays(self, params: Params, *, with_base: bool = False) -> dict[str, Any]:
        """Return all arrays that the next jobs depend on, the policy's included; `with_base` adds a frozen base."""
        self._prepare(params)
        return {
            "params": params if with_base else trainable(self._model, params),
            "opt_state": self.opt_state,
            "step": self.step,
            "ref_params": self.ref_params,
            "value_head": self.value_head,
        }

    def restore(self, state: dict[str, int], arrays: dict[str, Any], params: Params) -> Params:
        """Restore a `state` and its `arrays`, and return the policy's parameters, with the frozen base of `params`."""
        self.jobs, self._applied_jobs, self.bad_updates = state["jobs"], state["applied_jobs"], state["bad_updates"]
        self.opt_state, self.step = arrays["opt_state"], arrays["step"]
        self.ref_params, self.value_head = arrays["ref_params"], arrays["value_head"]
        return combine(arrays["params"], partition(self._model, params)[1])

    def memory(self, params: Params, longest: int) -> dict[str, float]:
        """Return the MiB per device, by purpose, that a job on rows of `longest` tokens needs.

        This compiles the job's programs, and changes no state. The purposes are those of `held_bytes`, and `update`:
        temporary memory, which is activations, a chunk of logits, and the gradients of a microbatch.
        """
        compiled = [lower().compile().memory_analysis() for lower in self.programs(params, longest).values()]
        sizes = self.held_bytes(params) | {"update": max(each.temp_size_in_bytes for each in compiled)}
        return {purpose: size / 2**20 for purpose, size in sizes.items()}

    def held_bytes(self, params: Params) -> dict[str, int]:
        """Return the bytes per device of parameters, optimizer state, reference, sums of gradients, and a teacher."""
        state, size = self._state_shapes(params), partial(device_bytes, self._model.sharding)
        reference = trainable(self._model, params) if self.ref_params is None else self.ref_params
        moved = trainable(self._model, state.params)
        sizes = {
            "parameters": size({name: leaf for name, leaf in state.params.items() if name != TEACHER}),
            "optimizer": size(state.opt_state),
            "reference": size(reference) if self._loss_config.needs_reference else 0,
            "gradients": size(jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, jnp.float32), moved)),
        }
        if self._teacher is not None:
            sizes["teacher"] = device_bytes(self._teacher.model.sharding, self._teacher.params)
        return sizes

    def programs(self, params: Params, longest: int) -> dict[str, Callable[[], Any]]:
        """Return functions that lower the programs of a job on rows of `longest` tokens, by name; see `Update`.

        Args:
            params: parameters of the policy, or their shapes with shardings.
            longest: tokens of the longest row.
        """
        rows, width = self.largest_microbatch(params, longest)
        batch = jax.eval_shape(lambda: self._empty_batch(rows, width))
        return self._update.programs(self._state_shapes(params), batch)

    def packs_rows(self, params: Params) -> bool:
        """Return True if rows hold several sequences; pairs of dpo are never packed."""
        self._packing = choose_packing(self._model, params, self._packing)
        return self._planner().packed

    def largest_microbatch(self, params: Params, longest: int) -> tuple[int, int]:
        """Return rows, over the whole mesh, and width of the largest microbatch of sequences of `longest` tokens."""
        self._packing = choose_packing(self._model, params, self._packing)
        shapes = [(self._planner().heights(width)[0], width) for width in self._planner().widths(longest)]
        return max(shapes, key=math.prod)

    def heights(self, params: Params, width: int) -> list[int]:
        """Return the numbers of rows, over the whole mesh, that microbatches of this width may have, largest first."""
        self._packing = choose_packing(self._model, params, self._packing)
        return self._planner().heights(width)

    def _state_shapes(self, params: Params) -> TrainState:
        """Return the shapes of the state that an update replaces."""
        trained: Any = jax.eval_shape(lambda p: p, params)
        head = None
        if self._loss_config.name == "ppo":
            head = jax.eval_shape(lambda p: init_value_head(hidden_state(self._model, p).shape[-1]), params)
        trained = self._beside(trained, head)
        return jax.eval_shape(lambda p: init_train_state(p, self._optimizer, self._model), trained)

    def warm_up(self, params: Params, longest: int, pause: Pause = no_pause) -> Params:
        """Compile all scores and updates, by running them on empty microbatches for rows of up to `longest` tokens.

        The given parameters are donated; the returned ones hold the same bits. `pause` is that of `learn`.
        """
        self._prepare(params)
        state = self._train_state(params)
        for rows, width in self._planner().all_shapes(longest):
            batch = self._empty_batch(rows, width)
            policy = state.params[POLICY] if self._is_nested else state.params
            head = None if self.value_head is None else state.params["value_head"]
            recorded = before_scoring(batch)
            if self._loss_config.is_policy_loss:  # for old log-probabilities, and for the entropies of kept rows
                self._scored(policy, recorded, value_head=head)
            if self._loss_config.needs_reference:
                self._scored(policy, recorded, value_head=None)
            if (teacher := self._teacher_scorer()) is not None:
                teacher(recorded)
            for parts in (batch, [batch, batch]):  # alone, and as one of several
                state, _ = self._update(state, parts, pause)
        if self.ref_params is not None and self._loss_config.reference.update_every is not None:
            moving = trainable(self._model, self.ref_params)
            mix(moving, moving, self._loss_config.reference.mixing)
        return self._keep(state)

    def _planner(self) -> BatchPlanner:
        """Return the planner of a job's batch; `_packing` must have been chosen."""
        pairs, sharding = self._loss_config.name == "dpo", self._model.sharding
        row_shards = 1 if sharding is None else sharding.row_shards
        return BatchPlanner(self._microbatch_tokens, bool(self._packing) and not pairs, pairs, row_shards)

    def _empty_batch(self, rows: int, width: int) -> Batch:
        packed, has_old = self._planner().packed, self._has_several_updates
        return empty_batch(self._loss_config, rows, width, packed=packed, has_old=has_old)

    def _prepare(self, params: Params) -> None:
        """Before the first job, make optimizer state, value head and reference from the starting parameters."""
        if self.opt_state is not None:
            return
        self._packing = choose_packing(self._model, params, self._packing)
        if self._loss_config.name == "ppo":
            self.value_head = commit_like(params, init_value_head(hidden_state(self._model, params).shape[-1]))
        self._keep(init_train_state(self._train_state(params).params, self._optimizer, self._model))
        if self._loss_config.needs_reference and self.ref_params is None:
            # Copied, as the originals are about to be donated; a frozen base is shared.
            self.ref_params = copied(self._model, trainable(self._model, params))

    def _train_state(self, params: Params) -> TrainState:
        """Return the state that an update replaces: parameters, with value head or teacher, and optimizer state."""
        return TrainState(self._beside(params, self.value_head), self.opt_state, self.step)

    def _beside(self, params: Params, value_head: Params | None) -> Params:
        """Return the parameters that the loss reads: the policy's alone, or beside a value head or a teacher."""
        if value_head is not None:
            return {POLICY: params, "value_head": value_head}
        if self._teacher_of_loss is not None:
            return {POLICY: params, TEACHER: self._teacher_of_loss.params}
        return params

    @property
    def _is_nested(self) -> bool:
        return self.value_head is not None or self._teacher_of_loss is not None

    def _keep(self, state: TrainState) -> Params:
        """Store the state after an update, and return the policy's parameters."""
        self.opt_state, self.step = state.opt_state, state.step
        if self.value_head is not None:
            self.value_head = state.params["value_head"]
        return state.params[POLICY] if self._is_nested else state.params

    def _scorers(self, params: Params, pause: Pause = no_pause) -> tuple[Scorer | None, Scorer | None, Scorer | None]:
        """Return scorers of a microbatch by policy, reference and teacher; None if the loss reads no such scores."""
        policy, teacher = None, self._teacher_scorer()
        teacher = None if teacher is None else pausing(teacher, pause)
        if self._needs_old:
            policy = pausing(partial(self._scored, params, value_head=self.value_head), pause)
        if not self._loss_config.needs_reference:
            return policy, None, teacher
        assert self.ref_params is not None
        reference = combine(self.ref_params, partition(self._model, params)[1])
        return policy, pausing(partial(self._scored, reference, value_head=None), pause), teacher

    def _teacher_scorer(self) -> Scorer | None:
        """Return the scorer of a distillation by sampled tokens."""
        if self._teacher is None or self._teacher_of_loss is not None:
            return None
        return partial(scored, self._teacher.model, self._teacher.params, value_head=None)

    def _follow(self, params: Params) -> None:
        """Move the reference towards the policy after every `update_every`-th job that made an update."""
        every, mixing = self._loss_config.reference.update_every, self._loss_config.reference.mixing
        if self.ref_params is not None and every is not None and self._applied_jobs % every == 0:
            moving = (trainable(self._model, each) for each in (params, self.ref_params))
            self.ref_params = combine(mix(*moving, mixing), self.ref_params)


def pausing(score: Scorer, pause: Pause) -> Scorer:
    """Return `score` with a pause after each microbatch."""

    def scored(microbatch: Any) -> Any:
        scores = score(microbatch)
        pause(scores.logprobs)
        return scores

    return scored


def with_sample_size(metrics: dict[str, Any]) -> dict[str, Any]:
    """Replace the means of the correction's ratio and of its square by `effective_sample_fraction`, if there are any.

    That is the effective sample size of the importance weights as a fraction of the trained tokens (Kong 1992): 1 if
    the sampler is the policy.

    >>> with_sample_size({"loss": 1.0, "sampler_ratio_mean": 1.0, "sampler_ratio_square_mean": 2.0})
    {'loss': 1.0, 'effective_sample_fraction': 0.5}
    """
    left = dict(metrics)
    mean, square = left.pop("sampler_ratio_mean", None), left.pop("sampler_ratio_square_mean", None)
    if mean is None or square is None:
        return left
    return left | {"effective_sample_fraction": float(mean) ** 2 / float(square) if square else 0.0}


@partial(jax.jit, static_argnums=0)
def copied(model: Model, params: Params) -> Params:
    """Return a copy of each array, where it is."""
    return constrain(model.sharding, jax.tree.map(jnp.copy, params))


@jax.jit
def mix(params: Params, ref_params: Params, share: Float[Array, ""] | float) -> Params:
    """Return `share * params + (1 - share) * ref_params`, in the dtypes of the reference."""
    return jax.tree.map(lambda new, old: (share * new + (1 - share) * old).astype(old.dtype), params, ref_params)


def merge_metrics(
    history: list[dict[str, Any]], counts: list[dict[str, int]], averaged_over: dict[str, str]
) -> dict[str, float]:
    """Merge the metrics of a job's updates; each mean is weighted by the number of items that it averages.

    Args:
        history: metrics of each update.
        counts: `TrainingBatch.counts` of each update.
        averaged_over: name of the count that weights a metric, by metric; `tokens` for metrics that it lacks.

    >>> first = {"kl": 1.0, "kl_max": 2.0, "applied_updates": 1.0}
    >>> second = {"kl": 4.0, "kl_max": 1.0, "applied_updates": 1.0}
    >>> merge_metrics([first, second], [{"tokens": 2}, {"tokens": 1}], {})
    {'kl': 2.0, 'kl_max': 2.0, 'applied_updates': 2.0}
    """
    merged = {}
    for name in history[0]:
        values = [float(metrics[name]) for metrics in history]
        if name in COUNTED:
            merged[name] = sum(values)
        elif name.endswith("_max"):
            merged[name] = max(values)
        else:
            weights = [count[averaged_over.get(name, "tokens")] for count in counts]
            # numpy's average would warn of a non-finite update.
            total = sum(value * weight for value, weight in zip(values, weights, strict=True) if weight)
            merged[name] = total / max(sum(weights), 1)
    return merged
