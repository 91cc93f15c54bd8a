"""What the pure functions pass to each other: the model contract, a batch, and what scoring and sampling return.

Letters: `B` rows, `T` tokens, `V` vocabulary, `D` width of the hidden state.
"""

import enum
from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

from jaxtyping import Array, Bool, Float, Int

from jaxft.core.sharding import Sharding

Params = dict[str, Any]
"""Policy weights: a plain nested dict of arrays."""

Cache = tuple[Any, ...]
"""Keys and values of the tokens seen so far: blocks of places (`jaxft.core.cache`), one behind the other. Every leaf of
a block has rows on axis 0 and places on an axis of the model's choice; the rest is the model's own affair."""


def same_params(params: Params) -> Params:
    """The layout of a model that decodes from the arrays as they are trained.

    >>> same_params({"w": 1})
    {'w': 1}
    """
    return params


class Model(NamedTuple):
    """A language model as a tuple of pure functions, the way an optax optimiser is one.

    Equal configs must give the same function objects (`functools.cache` from config to Model), or every call retraces.

    Attributes:
        config: numbers, strings and tuples; hashable.
        init: `key -> params`.
        apply: `(params, tokens [B T], positions [B T], cache=None, segment_ids=None) -> (hidden [B T D], cache)`.
            With a cache, the positions of a row are consecutive and are also the places that are written; what has no
            place in it is dropped. A token sees the places up to its own.
        unembed: `(params, hidden [... D]) -> logits [... V]` in float32, apart from `apply` so that it can be chunked.
        init_cache: `(rows, places, dtype) -> block` of a cache, empty, with room for `places` tokens a row.
        decode_layout: `params -> params`, the re-layout under which decoding is fast; run once per policy version.
        layout: where everything lies on a mesh of devices; None on a single one.
        lora: numbers of the adapters, when parameters are `{"base": ..., "adapter": ...}` and only the latter are
            trained (`jaxft.core.partition`); None when everything is.
    """

    config: Hashable
    init: Callable[..., Params]
    apply: Callable[..., tuple[Array, Any]]
    unembed: Callable[[Params, Array], Array]
    init_cache: Callable[..., Any]
    decode_layout: Callable[[Params], Params] = same_params
    sharding: Sharding | None = None
    lora: Hashable = None


class Scored(NamedTuple):
    """Log-probability and entropy of each token of a batch, aligned to the token that they describe.

    `values[b, t]`, with a value head, is the value of what token t was chosen after: `tokens[b, :t]`;
    `next_values[b, t]` is that of `tokens[b, :t + 1]`, known also behind the last token of a row or packed segment.
    """

    logprobs: Float[Array, "B T"]
    entropy: Float[Array, "B T"]
    values: Float[Array, "B T"] | None = None
    next_values: Float[Array, "B T"] | None = None


class Denominators(NamedTuple):
    """What losses and metrics are averaged over: counts of the *whole* batch, however it is split.

    Attributes:
        rows: rows with at least one trained token.
        tokens: trained tokens.
        pairs: of rows `2 i` and `2 i + 1` that both have a trained token; for losses on pairs.
        trajectories: those with at least one trained token; None where every row is one.
    """

    rows: Float[Array, ""]
    tokens: Float[Array, ""]
    pairs: Float[Array, ""] | None = None
    trajectories: Float[Array, ""] | None = None


class Batch(NamedTuple):
    """Padded arrays, or nested lists, for one update. `completion_mask` is True where the policy chose the token.

    The optional fields are None when the loss does not need them; `advantages` may be one per row or one per token.
    With `segment_ids` (and positions that restart) several sequences are packed into a row: a sequence's tokens stand
    next to each other and share an id, which no other sequence of the row has.
    `trajectory_tokens` says of each token how many trained tokens its whole trajectory has, in all sequences of it that
    are in the update: then a trajectory counts once, however many sequences it is. None: each sequence is a trajectory.
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


class FinishReason(enum.IntEnum):
    """Why a completion ended: a stop token was sampled, or its budget of tokens was used up."""

    STOP = 0
    LENGTH = 1


class Rollout(NamedTuple):
    """What `generate` returns, rows prompt-major; everything over time is aligned to the token that it describes.

    Attributes:
        tokens: prompt and completion, right-padded with 0.
        completion_mask: True on sampled tokens, the stop token included.
        sampler_logprobs: under the temperature-scaled full vocabulary: what a trainer recomputes.
        behavior_logprobs: under the distribution that the token was drawn from (top-k, top-p and min-p applied).
        lengths: tokens of the row, prompt included.
        finish_reason: a `FinishReason` per row.
    """

    tokens: Int[Array, "B T"]
    completion_mask: Bool[Array, "B T"]
    sampler_logprobs: Float[Array, "B T"]
    behavior_logprobs: Float[Array, "B T"]
    lengths: Int[Array, "B"]
    finish_reason: Int[Array, "B"]
