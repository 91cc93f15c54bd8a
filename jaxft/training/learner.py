"""One job of learning on the device thread, and what lives on from job to job beside the policy's parameters."""

import random
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from jaxft.core.logprobs import init_value_head
from jaxft.core.packing import unpack
from jaxft.core.partition import combine, partition, trainable
from jaxft.core.sharding import device_bytes, devices_of
from jaxft.core.types import Batch, Model, Params, Scored
from jaxft.core.update import TrainState, init_train_state
from jaxft.models.attention import can_use_flash
from jaxft.models.config import DecoderConfig
from jaxft.training.advantages import CollectedRewards, compute_advantages
from jaxft.training.bad_batches import BadUpdate
from jaxft.training.batch import RECORDED, EmptyBatches, PlacedBatch, Row, make_batch
from jaxft.training.config import LossConfig, OptimizerConfig
from jaxft.training.update import make_schedule, scored, update_of


def hidden_state(model: Model, params: Params) -> jax.ShapeDtypeStruct:
    """Shape and type of the hidden state of a single token, `[1 1 D]`."""
    tokens = jnp.zeros((1, 1), jnp.int32)
    return jax.eval_shape(model.apply, params, tokens, tokens)[0]


def choose_packing(model: Model, params: Params, wanted: bool | None) -> bool:
    """What is wanted, where the model can do it; with None whatever is faster: fused attention, or else packed rows."""
    if wanted is None:
        wanted = not takes_fused_attention(model, params)
    return wanted and can_pack(model, params)


def takes_fused_attention(model: Model, params: Params) -> bool:
    """Whether rows that are not packed go through cuDNN's fused attention, which takes a row as one sequence."""
    config = model.config
    if not isinstance(config, DecoderConfig):
        return False
    return can_use_flash(hidden_state(model, params).dtype, config.head_dim, devices_of(model.sharding))


def can_pack(model: Model, params: Params) -> bool:
    """Whether the model keeps the segments of a row apart; a bridged network does not."""
    tokens = jnp.zeros((1, 2), jnp.int32)
    try:
        jax.eval_shape(lambda: model.apply(params, tokens, tokens, segment_ids=tokens))
    except ValueError:
        return False
    return True


COUNTED = ("applied_updates", "nonfinite_updates", "nothing_to_learn", "refused_updates")
"""Metrics that add up over the updates of a job; the others are means, or maxima where the name ends in `_max`."""

AVERAGED_OVER = {
    "sampler_disagreement_fraction": "sequences",
    **dict.fromkeys(
        ("preference_accuracy", "reward_margin", "chosen_reward", "rejected_reward", "chosen_nll"), "pairs"
    ),
    **dict.fromkeys(("grad_norm", "batch_rows"), "updates"),
}
"""Metrics and what each is a mean of. The loss follows `LossConfig.averaged_over`, all others are means of tokens."""

BEFORE_SCORING = (*RECORDED, "positions", "segment_ids")
"""The fields of a batch that is scored before there are advantages."""

GoesOn = Callable[[int, int], bool]


def always(done: int, total: int) -> bool:
    """Nothing ends the job before its time."""
    return True


class Learner:
    """Optimiser state, reference and value head; `learn` is a job.

    Attributes:
        opt_state: of the optimiser; None before the first job.
        step: optimiser steps taken.
        ref_params: what the KL is measured from; None without one, or before the first job.
        value_head: of ppo; None without one.
        jobs: how many there were.
        bad_updates: non-finite ones since the last that was finite.
    """

    def __init__(
        self,
        model: Model,
        loss: LossConfig,
        optimizer: OptimizerConfig,
        *,
        microbatch_tokens: int = 8192,
        num_minibatches: int = 1,
        num_iterations: int = 1,
        packing: bool | None = None,
        max_sampler_diff: float = 0.1,
        max_disagreeing_fraction: float = 1.0,
        seed: int = 0,
        ref_params: Params | None = None,
    ) -> None:
        """Beside what `LocalTrainerAdapterConfig` explains:

        Args:
            model: the contract's tuple.
            loss: what is minimised.
            optimizer: how.
            seed: shuffles minibatches.
            ref_params: of another checkpoint; the parameters before the first job when None.

        Raises:
            ValueError: the loss cannot be made of its knobs.
        """
        self._model = model
        self._loss_config = loss
        limits = (max_sampler_diff, max_disagreeing_fraction) if loss.is_policy_loss else None
        self._optimizer, self._update = update_of(model, loss, optimizer, limits)
        self._schedule = make_schedule(optimizer)
        self._microbatch_tokens = microbatch_tokens
        self._num_minibatches, self._updates_per_batch = num_minibatches, num_iterations
        self._packing, self._seed = packing, seed
        in_reward = loss.kl_weight > 0 and loss.kl == "k1_in_reward"
        has_several = num_iterations * num_minibatches > 1
        self._needs_old = loss.is_policy_loss and (has_several or in_reward or loss.name == "ppo")
        self._scored = partial(scored, model)
        self._row_shards = 1 if model.sharding is None else model.sharding.row_shards
        self.opt_state: Any = None
        self.step: Any = None
        self.ref_params = ref_params
        self.value_head: Params | None = None
        self.jobs = self.bad_updates = 0
        self._applied_jobs = 0

    def learn(
        self,
        rows: list[Row],
        credit: CollectedRewards | None,
        params: Params,
        goes_on: GoesOn = always,
        keep_bad: Callable[[BadUpdate], object] = lambda update: None,
    ) -> tuple[Params, dict[str, float]]:
        """The parameters after this job's updates, and its metrics; `params` are donated once there is an update.

        Args:
            rows: of pairs the chosen and the rejected one by turns.
            credit: what the trajectories earned; None for losses that are no policy losses.
            params: the policy's.
            goes_on: told before each update how many have been made, and of how many; when it says no, the job ends.
            keep_bad: told afterwards of each update that was not finite.
        """
        self._prepare(params)
        self._score(rows, params)
        figures = compute_advantages(rows, credit, self._loss_config) if credit is not None else {}
        if self._updates_per_batch * self._num_minibatches == 1:
            for row in rows:  # the only update: old and present policy are one
                row.signals.pop("old_logprobs", None)

        trained = params if self.value_head is None else {"policy": params, "value_head": self.value_head}
        state = TrainState(trained, self.opt_state, self.step)
        history: list[dict[str, Any]] = []
        rate = float(self._schedule(int(self.step)))
        parts = self._parts(rows)
        for done, part in enumerate(parts):
            if not goes_on(done, len(parts)):
                break
            placed = self._batch(part)
            state, metrics = self._update(state, placed.microbatches())
            history.append(metrics | {"batch_rows": placed.batch.tokens.shape[0]})
        self.opt_state, self.step = state.opt_state, state.step
        params = state.params if self.value_head is None else state.params["policy"]
        if self.value_head is not None:
            self.value_head = state.params["value_head"]
        self.jobs += 1
        history = jax.device_get(history)
        of_loss = dict.fromkeys(("loss", "policy_loss"), self._loss_config.averaged_over)
        counts = [count_rows(part) for part, _ in zip(parts, history, strict=False)]
        figures |= merge_metrics(history, counts, AVERAGED_OVER | of_loss) if history else {"applied_updates": 0.0}
        for number, (metrics, part) in enumerate(zip(history, parts, strict=False), 1):
            self.bad_updates = self.bad_updates + 1 if metrics["nonfinite_updates"] else 0
            if metrics["nonfinite_updates"]:
                keep_bad(BadUpdate(number, metrics, part, partial(self._batch, part)))
        if figures["applied_updates"]:
            self._applied_jobs += 1
            self._follow(params)
        figures |= {"updates": len(history), "nonfinite_updates_in_a_row": self.bad_updates}
        return params, {**figures, "learning_rate": rate}

    def state(self) -> dict[str, int]:
        """The counters that decide the next jobs, for JSON."""
        return {"jobs": self.jobs, "applied_jobs": self._applied_jobs, "bad_updates": self.bad_updates}

    def arrays(self, params: Params, *, with_base: bool = False) -> dict[str, Any]:
        """All arrays that decide the next jobs, those of the policy among them; a frozen base only if asked for."""
        self._prepare(params)
        return {
            "params": params if with_base else trainable(self._model, params),
            "opt_state": self.opt_state,
            "step": self.step,
            "ref_params": self.ref_params,
            "value_head": self.value_head,
        }

    def restore(self, state: dict[str, int], arrays: dict[str, Any], params: Params) -> Params:
        """Goes on from a `state` and its `arrays`; the policy's parameters, whose frozen base is that of `params`."""
        self.jobs, self._applied_jobs, self.bad_updates = state["jobs"], state["applied_jobs"], state["bad_updates"]
        self.opt_state, self.step = arrays["opt_state"], arrays["step"]
        self.ref_params, self.value_head = arrays["ref_params"], arrays["value_head"]
        return combine(arrays["params"], partition(self._model, params)[1])

    def memory(self, params: Params, longest: int) -> dict[str, float]:
        """What a job on rows of `longest` tokens needs, in MiB by purpose; compiles its update and changes nothing.

        On a mesh that is what each device needs.

        `update` is what the compiled program needs beside the gradients: activations, and logits chunk by chunk.
        """
        trained: Any = jax.eval_shape(lambda p: p, params)
        if self._loss_config.name == "ppo":
            head = jax.eval_shape(lambda p: init_value_head(hidden_state(self._model, p).shape[-1]), params)
            trained = {"policy": trained, "value_head": head}
        state = jax.eval_shape(lambda p: init_train_state(p, self._optimizer, self._model), trained)
        self._packing = choose_packing(self._model, params, self._packing)
        batch = jax.eval_shape(lambda: self._empty_batches().largest(longest))

        def size(tree: Any) -> float:
            return device_bytes(self._model.sharding, tree) / 2**20

        moved = trainable(self._model, trained)
        reference = trainable(self._model, params) if self.ref_params is None else self.ref_params
        gradients = size(jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, jnp.float32), moved))
        return {
            "parameters": size(state.params),
            "optimizer": size(state.opt_state),
            "reference": size(reference) if self._loss_config.needs_reference else 0.0,
            "gradients": gradients,
            "update": max(0.0, self._update.temporary_bytes(state, batch) / 2**20 - gradients),
        }

    def warm_up(self, params: Params, longest: int) -> Params:
        """Runs the update on empty batches of every shape that rows of up to `longest` tokens can have.

        The parameters that come back are those given, bit for bit; these have been donated.
        """
        self._prepare(params)
        trained = params if self.value_head is None else {"policy": params, "value_head": self.value_head}
        state = TrainState(trained, self.opt_state, self.step)
        for batch in self._empty_batches().all(longest):
            policy = state.params if self.value_head is None else state.params["policy"]
            recorded = Batch(**{name: value for name, value in batch._asdict().items() if name in BEFORE_SCORING})
            head = None if self.value_head is None else state.params["value_head"]
            if self._needs_old:
                self._scored(policy, recorded, value_head=head)
            if self._loss_config.needs_reference:
                self._scored(policy, recorded, value_head=None)
            for parts in (batch, [batch, batch]):  # alone, and as one of several
                state, _ = self._update(state, parts)
        self.opt_state, self.step = state.opt_state, state.step
        if self.ref_params is not None and self._loss_config.reference.update_every is not None:
            moving = trainable(self._model, self.ref_params)
            mix(moving, moving, self._loss_config.reference.mixing)
        if self.value_head is None:
            return state.params
        self.value_head = state.params["value_head"]
        return state.params["policy"]

    def _empty_batches(self) -> EmptyBatches:
        is_packed = bool(self._packing) and self._loss_config.name != "dpo"
        has_old = self._updates_per_batch * self._num_minibatches > 1
        return EmptyBatches(self._loss_config, self._microbatch_tokens, is_packed, has_old, self._row_shards)

    def _prepare(self, params: Params) -> None:
        """Before the first job: all that is made from the starting parameters."""
        if self.opt_state is not None:
            return
        self._packing = choose_packing(self._model, params, self._packing)
        trained = params
        if self._loss_config.name == "ppo":
            self.value_head = init_value_head(hidden_state(self._model, params).shape[-1])
            trained = {"policy": params, "value_head": self.value_head}
        fresh = init_train_state(trained, self._optimizer, self._model)
        self.opt_state, self.step = fresh.opt_state, fresh.step
        if self.value_head is not None:
            self.value_head = fresh.params["value_head"]
        if self._loss_config.needs_reference and self.ref_params is None:
            # Copied, as the originals are about to be donated; a frozen base is shared.
            self.ref_params = jax.tree.map(jnp.copy, trainable(self._model, params))

    def _score(self, rows: list[Row], params: Params) -> None:
        """Adds what advantages and losses need of the policy before the first update, and of the reference."""
        loss = self._loss_config
        if not (self._needs_old or loss.needs_reference):
            return
        placed = self._batch(rows)
        wanted: dict[str, Any] = {}
        if self._needs_old:
            scored = self._score_parts(placed, params, self.value_head)
            wanted["old_logprobs"] = scored.logprobs
            if scored.next_values is not None:
                wanted["old_values"] = scored.values
                for row, numbers in zip(rows, unpack(placed.packing, scored.next_values), strict=True):
                    is_cut = row.sequence.episode_truncated and loss.bootstrap == "value"
                    row.bootstrap_value = float(numbers[-1]) if is_cut else 0.0
        if loss.needs_reference:
            assert self.ref_params is not None
            reference = combine(self.ref_params, partition(self._model, params)[1])
            wanted["ref_logprobs"] = self._score_parts(placed, reference, None).logprobs
        for name, table in wanted.items():
            for row, numbers in zip(rows, unpack(placed.packing, table), strict=True):
                row.signals[name] = numbers

    def _score_parts(self, placed: PlacedBatch, params: Params, value_head: Params | None) -> Scored:
        parts = [self._scored(params, part, value_head=value_head) for part in placed.microbatches()]
        width = placed.packing.width

        def joined(*tables: np.ndarray) -> np.ndarray:
            return np.concatenate([np.pad(table, ((0, 0), (0, width - table.shape[1]))) for table in tables])

        return jax.tree.map(joined, *jax.device_get(parts))

    def _parts(self, rows: list[Row]) -> list[list[Row]]:
        """The rows of each update: the whole job, or minibatches of trajectories, shuffled anew in each pass."""
        if self._num_minibatches == 1:
            return [rows] * self._updates_per_batch
        parts = []
        for number in range(self._updates_per_batch):
            order = sorted({row.trajectory for row in rows})
            random.Random(f"minibatches {self._seed} {self.jobs} {number}").shuffle(order)
            for chosen in np.array_split(np.array(order), min(self._num_minibatches, len(order))):
                members = set(chosen.tolist())
                parts.append([row for row in rows if row.trajectory in members])
        return parts

    def _batch(self, rows: list[Row]) -> PlacedBatch:
        pairs = self._loss_config.name == "dpo"
        packed = bool(self._packing) and not pairs
        tokens, shares = self._microbatch_tokens, self._row_shards
        return make_batch(rows, microbatch_tokens=tokens, packed=packed, pairs=pairs, row_shards=shares)

    def _follow(self, params: Params) -> None:
        """Moves the reference towards the policy when it is its time."""
        every, mixing = self._loss_config.reference.update_every, self._loss_config.reference.mixing
        if self.ref_params is not None and every is not None and self._applied_jobs % every == 0:
            moving = (trainable(self._model, each) for each in (params, self.ref_params))
            self.ref_params = combine(mix(*moving, mixing), self.ref_params)


@jax.jit
def mix(params: Params, ref_params: Params, share: Float[Array, ""] | float) -> Params:
    """`share` of the parameters and the rest of the reference."""
    return jax.tree.map(lambda new, old: (share * new + (1 - share) * old).astype(old.dtype), params, ref_params)


def count_rows(rows: list[Row]) -> dict[str, int]:
    """Counts of these rows by the names of `AVERAGED_OVER`: the weights of an update's metrics."""
    tokens = [sum(row.sequence.completion_mask) for row in rows]
    return {
        "tokens": sum(tokens),
        "sequences": sum(count > 0 for count in tokens),
        "trajectories": len({row.trajectory for row, count in zip(rows, tokens, strict=True) if count}),
        "pairs": len(rows) // 2,
        "updates": 1,
    }


def merge_metrics(
    history: list[dict[str, Any]], counts: list[dict[str, int]], averaged_over: dict[str, str]
) -> dict[str, float]:
    """The metrics of a job from those of its updates. Each mean is weighted by the number of items that it averages.

    Args:
        history: the metrics of each update.
        counts: of each update, as `count_rows` gives them.
        averaged_over: which of the counts a metric is a mean of; `tokens` where it is not named.

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
            # Not numpy's average, which warns of an update that was not finite.
            total = sum(value * weight for value, weight in zip(values, weights, strict=True) if weight)
            merged[name] = total / max(sum(weights), 1)
    return merged
