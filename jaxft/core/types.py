"""Types shared by the pure functions: the model contract, a batch, and the results of scoring and sampling.

Letters: `B` rows, `T` tokens, `V` vocabulary, `W` words of 32 bits that hold `V` bits, `D` width of the hidden state.
"""

import enum
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Array, Bool, Float, Int, UInt, UInt32

from jaxft.core.packing import Branches
from jaxft.core.sharding import Sharding

Params = dict[str, Any]
"""Policy weights: a plain nested dict of arrays."""

Cache = Any
"""Keys and values of earlier tokens, in pages (`jaxft.core.cache`): a tree of arrays, each with an axis of pages."""


def same_params(params: Params) -> Params:
    """Return the parameters unchanged: the default `decode_layout`.

    >>> same_params({"w": 1})
    {'w': 1}
    """
    return params


class Model(NamedTuple):
    """A language model as a tuple of pure functions, like an optax optimizer.

    Equal configs must give the same function objects (`functools.cache` from config to Model), or every call retraces.

    Attributes:
        config: the shape and name of the model; hashable.
        init: `key -> params`.
        apply: `(params, tokens [B T], positions [B T], cache=None, tables=None, segment_ids=None) -> (hidden [B T D],
            cache)`. With a cache and the page tables of the rows, tokens are written to their pages, and see the tokens
            of their row up to their own position. Tables number the pages of the whole cache, also on a mesh; a decoder
            on GPUs takes them with the pages that rows share (`jaxft.core.cache.SharedTables`). The positions of a row
            are consecutive and, where there are several, begin at the first place of a page; from the first negative
            one on, tokens are padding that no token sees and whose results mean nothing. Decoders also take `branches`,
            the columns of rows whose sequences share their first tokens, and mixtures `chosen`, the experts of
            `Batch.experts` with the layer on axis 0, and `counted`, the tokens of the `RouterScores` that are then the
            second result.
        unembed: `(params, hidden [... D]) -> logits [... V]` in float32; apart from `apply` so that it can be chunked.
            It also takes `head(params)`, gathered on every device, in place of `params`.
        init_cache: `(pages, dtype) -> cache` of so many empty pages.
        decode_layout: `params -> params`, the re-layout under which decoding is fast; run once per policy version.
        sharding: the partition over a mesh of devices; None on a single device.
        lora: rank, scale and targets of adapters, when parameters are `{"base": ..., "adapter": ...}` and only the
            adapters are trained (`jaxft.core.partition`); None when all parameters are.
        head: `params -> params`, the parameters that `unembed` reads, in the dtype of products.
        logit_scale: factor of the logits where `unembed` is `logit_scale * hidden @ kernel.T` with the only array of
            `head(params)`, `[V D]`; None where it is anything else, as with a soft cap.
        num_experts: number of experts of each mixture; 0 for a dense model.
        sampling_dtype: kind of number of kernels in eight bits that `decode_layout` makes, so that the sampler's
            probabilities differ from the trainer's; None where it computes with the same weights.
        quantize_head: the head of `decode_layout` is in eight bits, too.
        kv_cache_dtype: kind of number of keys and values in eight bits; None where they are those of products.
        with_remat: `name -> Model`, the same model with another checkpoint policy, which decides the activations that
            the backward pass recomputes; None if there is only one.
    """

    config: Hashable
    init: Callable[..., Params]
    apply: Callable[..., tuple[Array, Any]]
    unembed: Callable[[Params, Array], Array]
    init_cache: Callable[..., Any]
    decode_layout: Callable[[Params], Params] = same_params
    sharding: Sharding | None = None
    lora: Hashable = None
    head: Callable[[Params], Params] = same_params
    logit_scale: float | None = None
    num_experts: int = 0
    sampling_dtype: str | None = None
    quantize_head: bool = False
    kv_cache_dtype: str | None = None
    with_remat: Callable[[Any], "Model"] | None = None


class RouterScores(NamedTuple):
    """Sums over the tokens of a batch, for the router of each of `L` layers with experts.

    Attributes:
        entropy: entropies of the probabilities of the experts, in nats.
        rerouted: number of tokens whose replayed experts are others than those that the router would choose.
        mass: probability of each expert.
    """

    entropy: Float[Array, "*L"]
    rerouted: Float[Array, "*L"]
    mass: Float[Array, "*L E"]


class Scored(NamedTuple):
    """Log-probability and entropy of each token of a batch, aligned to the token that they describe.

    With a value head, `values[b, t]` is the value of `tokens[b, :t]`, before token t was chosen, and
    `next_values[b, t]` is the value of `tokens[b, :t + 1]`, also for the last token of a row or segment.
    `divergence` is that of the token's whole distribution from a teacher's; None without a teacher.
    `overflows` is 1 for tokens on whose account the head's logits were computed twice; None unless the scores are those
    of `fused_token_logprobs`. `sum_pi_squared` is the sum of the squared probabilities of the vocabulary, if asked for.
    `routers` are sums over the scored tokens that have replayed experts; None where none are replayed.
    """

    logprobs: Float[Array, "B T"]
    entropy: Float[Array, "B T"]
    values: Float[Array, "B T"] | None = None
    next_values: Float[Array, "B T"] | None = None
    divergence: Float[Array, "B T"] | None = None
    overflows: Float[Array, "B T"] | None = None
    sum_pi_squared: Float[Array, "B T"] | None = None
    routers: RouterScores | None = None


class Denominators(NamedTuple):
    """Counts of the *whole* batch that losses and metrics divide by, however the batch is split.

    Attributes:
        rows: rows with at least one trained token.
        tokens: trained tokens.
        pairs: pairs of rows `2 i` and `2 i + 1` that both have a trained token; for losses on pairs.
        trajectories: trajectories with at least one trained token; None where every row is a trajectory.
        observations: tokens of the results of tools; None for batches that do not tell these apart.
        routed: scored tokens that have replayed experts; None where none are replayed.
        expert_tokens: number of these that each expert has, in each of `L` layers with experts.
    """

    rows: Float[Array, ""]
    tokens: Float[Array, ""]
    pairs: Float[Array, ""] | None = None
    trajectories: Float[Array, ""] | None = None
    observations: Float[Array, ""] | None = None
    routed: Float[Array, ""] | None = None
    expert_tokens: Float[Array, "L E"] | None = None


@dataclass(frozen=True, eq=False)
class HostStates:
    """Hidden states by index into those of a whole job: numpy makes the array, `[B T E]`, when it is asked for one.

    Attributes:
        states: `[U E]` all states.
        ids: `[B T]` index of each token's.
    """

    states: np.ndarray
    ids: np.ndarray

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the array."""
        return *self.ids.shape, self.states.shape[1]

    @property
    def dtype(self) -> Any:
        """Dtype of the array."""
        return self.states.dtype

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        """Return the array, which is a copy."""
        return self.states[self.ids].astype(dtype or self.dtype, copy=False)


class Batch(NamedTuple):
    """Padded arrays, or nested lists, for one update. `completion_mask` is True where the policy chose the token.

    A field is None when the loss does not need it; `advantages` may be one per row or one per token.
    With `segment_ids` (and positions that restart) a row packs several sequences: the tokens of a sequence are adjacent
    and have one id, which no other sequence of the row has.
    `trajectory_tokens` is, for each token, the number of trained tokens that its trajectory has in the whole update, so
    that a trajectory counts once however many sequences it has. None: each sequence is a trajectory.
    `observation_mask` is True for tokens of the results of tools, none of which the policy chose.
    `selected` is True for the tokens that clip_cov and kl_cov treat in another way (`select_tokens`).
    `clip_low`, `clip_high` and `beta` are options of the loss by token, in the place of those that are bound to it.
    `supports` are the tokens that each token could be drawn from, over which probabilities are taken (`pack_bits`).
    With `branches` the sequences of a row share their first tokens, which are in the row once.
    `teacher_hidden` is the hidden state of a teacher that reads another prompt, before it is given the token, of which
    its head makes the logits; 0 for tokens that it does not teach. None: a teacher reads the same tokens. An update
    also takes `HostStates`, which it makes when it comes to the microbatch.
    `targets` are the tokens that are scored in the place of `tokens`, which are read. None: the same.
    `experts` are the `k` experts that a token was routed to while sampling in each of `L` layers with experts, counted
    from 1; 0 for tokens that the policy routes by itself.
    """

    tokens: Int[Array, "B T"]
    completion_mask: Bool[Array, "B T"]
    advantages: Float[Array, "B"] | Float[Array, "B T"] | None = None
    temperatures: Float[Array, "B T"] | None = None
    sampler_logprobs: Float[Array, "B T"] | None = None
    behavior_logprobs: Float[Array, "B T"] | None = None
    old_logprobs: Float[Array, "B T"] | None = None
    ref_logprobs: Float[Array, "B T"] | None = None
    old_values: Float[Array, "B T"] | None = None
    returns: Float[Array, "B T"] | None = None
    positions: Int[Array, "B T"] | None = None
    segment_ids: Int[Array, "B T"] | None = None
    trajectory_tokens: Float[Array, "B T"] | None = None
    selected: Bool[Array, "B T"] | None = None
    observation_mask: Bool[Array, "B T"] | None = None
    clip_low: Float[Array, "B T"] | None = None
    clip_high: Float[Array, "B T"] | None = None
    beta: Float[Array, "B T"] | None = None
    supports: UInt32[Array, "B T W"] | None = None
    branches: Branches | None = None
    teacher_hidden: Float[Array, "B T E"] | None = None
    targets: Int[Array, "B T"] | None = None
    experts: UInt[Array, "B T L k"] | None = None

    @property
    def counted(self) -> tuple[Any, ...]:
        """Arguments of `count_tokens`."""
        return self.completion_mask, self.segment_ids, self.trajectory_tokens, self.observation_mask, self.experts


class FinishReason(enum.IntEnum):
    """Reason why a completion ended: a stop token was sampled, or the token limit was reached."""

    STOP = 0
    LENGTH = 1


class Rollout(NamedTuple):
    """The result of `generate`, rows prompt-major; arrays over time are aligned to the token that they describe.

    Attributes:
        tokens: prompt and completion, right-padded with 0.
        completion_mask: True on sampled tokens, the stop token included.
        sampler_logprobs: log-probabilities over the full vocabulary at the temperature, as a trainer recomputes them.
        behavior_logprobs: log-probabilities under the distribution that the token was drawn from, after top-k, top-p
            and min-p.
        lengths: number of tokens of each row, prompt included.
        finish_reason: a `FinishReason` per row.
    """

    tokens: Int[Array, "B T"]
    completion_mask: Bool[Array, "B T"]
    sampler_logprobs: Float[Array, "B T"]
    behavior_logprobs: Float[Array, "B T"]
    lengths: Int[Array, "B"]
    finish_reason: Int[Array, "B"]
