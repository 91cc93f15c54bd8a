"""Tinker's losses, which are sums over tokens: rows of `LOSSES`, all of them compositions of `jaxft.policy_loss`.

A mean whose denominator is 1 is a sum. A datum's token `i` scores `target_tokens[i]` after the model has read the
tokens 0 to `i` of its input. Letters: `B` rows, `T` tokens.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from jaxft import Batch, Denominators, Model, policy_loss, score_batch
from jaxft.tinker.data import Datum

LEAST_TOKENS = 32
"""Least width of a table of tokens; wider ones are powers of 2, so that few programs are compiled."""

Keywords = tuple[tuple[str, Any], ...]
"""Keywords of `policy_loss` with their values."""


class Loss(NamedTuple):
    """A loss: the arrays that a datum needs, the defaults of `loss_fn_config`, and keywords of `policy_loss` for it.

    `fields` are names of a `Batch`, each with the name of the array that it takes; `keywords` is called with the
    options in their order.
    """

    fields: Mapping[str, str]
    options: Mapping[str, float]
    keywords: Callable[..., dict[str, Any]]


SAMPLED = {"advantages": "advantages", "old_logprobs": "logprobs"}
CLIPS = {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}

LOSSES: Mapping[str, Loss] = {
    "cross_entropy": Loss({"advantages": "weights"}, {}, lambda: {"loss": "reinforce"}),
    # A ratio is above 0, so that these bounds clip none.
    "importance_sampling": Loss(SAMPLED, {}, lambda: {"loss": "ppo", "clip_low": 1.0, "clip_high": math.inf}),
    "ppo": Loss(SAMPLED, CLIPS, lambda low, high: {"loss": "ppo", "clip_low": 1 - low, "clip_high": high - 1}),
    "cispo": Loss(SAMPLED, CLIPS, lambda low, high: {"loss": "cispo", "clip_low": low, "clip_high": high}),
    "dro": Loss(
        {"advantages": "advantages", "ref_logprobs": "logprobs"},
        {"beta": 0.05},
        lambda beta: {"loss": "reinforce", "beta": beta, "kl": "k2"},
    ),
}
"""The losses by name, as Tinker's documentation defines them; `policy_loss` clamps log-ratios to 20 in all of them."""


def find_loss(name: str, config: Mapping[str, float] | None = None) -> tuple[Loss, Keywords]:
    """Return a loss, and its keywords of `policy_loss` under a `loss_fn_config`.

    Raises:
        ValueError: there is no such loss, or an option is unknown or impossible.

    >>> dict(find_loss("dro", {"beta": 0.5})[1])
    {'loss': 'reinforce', 'beta': 0.5, 'kl': 'k2'}
    """
    if name not in LOSSES:
        raise ValueError(f"loss_fn is {name!r:.50}; served are {', '.join(LOSSES)}")
    loss = LOSSES[name]
    if unknown := [*(config or {}).keys() - loss.options.keys()]:
        raise ValueError(f"loss_fn_config: {unknown[0]!r:.50} is no option of {name}; it has {[*loss.options]}")
    options = {**loss.options, **(config or {})}
    if loss.options is CLIPS and not options["clip_low_threshold"] <= 1 <= options["clip_high_threshold"]:
        raise ValueError(f"loss_fn_config: the ratio is clipped to {options}; wanted 1 between the thresholds")
    return loss, tuple(loss.keywords(*options.values()).items())


def summed_loss(
    model: Model, params: Any, batch: Batch, denominators: Denominators, *, keywords: Keywords
) -> tuple[Float[Array, ""], dict[str, Array]]:
    """Return the loss of a batch and, as metrics, the log-probabilities of its targets and the sum of entropies."""
    scored = score_batch(model, params, batch)
    assert batch.advantages is not None
    value, _ = policy_loss(
        scored.logprobs,
        batch.old_logprobs,
        batch.advantages,
        batch.completion_mask,
        ref_logprobs=batch.ref_logprobs,
        aggregation="token_mean",
        denominators=denominators,
        **dict(keywords),
    )
    entropy = jnp.sum(jnp.where(batch.completion_mask, scored.entropy, 0.0))
    return value, jax.lax.stop_gradient({"logprobs": scored.logprobs, "entropy": entropy})


def check_datum(place: str, datum: Datum, loss: Loss, vocabulary: int, most_tokens: int) -> None:
    """Raise a ValueError unless a datum has what a loss reads; `place` names it."""
    if datum.model_input.ndim != 1:
        raise ValueError(f"{place}.model_input has shape {list(datum.model_input.shape)}; wanted a list of token ids")
    length, inputs = len(datum.model_input), datum.loss_fn_inputs
    if not 1 <= length < most_tokens:
        raise ValueError(f"{place} has {length} tokens; wanted 1 to {most_tokens - 1}")
    for name in ("target_tokens", *loss.fields.values()):
        if name not in inputs:
            raise ValueError(f"{place}.loss_fn_inputs lacks {name!r}; it has {', '.join(inputs) or 'nothing'}")
        if (shape := inputs[name].shape) != (length,):
            raise ValueError(
                f"{place}.loss_fn_inputs.{name} has shape {list(shape)}; wanted [{length}], one number per token"
            )
        if not np.isfinite(inputs[name]).all():
            raise ValueError(f"{place}.loss_fn_inputs.{name} holds a number that is not finite")
    for name, ids in (("model_input", datum.model_input), ("loss_fn_inputs.target_tokens", inputs["target_tokens"])):
        check_tokens(f"{place}.{name}", ids, vocabulary)


def check_tokens(place: str, ids: np.ndarray, vocabulary: int) -> None:
    """Raise a ValueError unless all ids are below `vocabulary`; `place` names them."""
    if (wrong := (ids < 0) | (ids >= vocabulary)).any():
        first = int(np.argmax(wrong))
        raise ValueError(f"{place}[{first}] is {ids[first]}; wanted a token below {vocabulary}")


def make_parts(data: Sequence[Datum], loss: Loss, most_tokens: int) -> list[tuple[list[int], Batch]]:
    """Return microbatches of at most `most_tokens` tokens, or of one row, and the numbers of the data in their rows."""
    by_width: dict[int, list[int]] = {}
    for number, datum in enumerate(data):
        by_width.setdefault(max(LEAST_TOKENS, _power_of_2(len(datum.model_input) + 1)), []).append(number)
    parts = []
    for width, numbers in sorted(by_width.items()):
        rows = max(1, most_tokens // width)
        chunks = [numbers[first : first + rows] for first in range(0, len(numbers), rows)]
        parts += [(chunk, _table([data[number] for number in chunk], loss, width)) for chunk in chunks]
    return parts


def _table(data: Sequence[Datum], loss: Loss, width: int) -> Batch:
    """Return the batch of some data; rows are a power of 2, and the further ones train nothing."""
    shape = _power_of_2(len(data)), width
    names = {"targets": "target_tokens", **loss.fields}
    tables: dict[str, Any] = {name: np.zeros(shape, np.float32) for name in loss.fields}
    tables |= {"tokens": np.zeros(shape, np.int32), "targets": np.zeros(shape, np.int32)}
    mask: Any = np.zeros(shape, bool)
    for row, datum in enumerate(data):
        length = len(datum.model_input)
        tables["tokens"][row, :length] = datum.model_input
        mask[row, 1 : length + 1] = True
        for name, source in names.items():
            tables[name][row, 1 : length + 1] = datum.loss_fn_inputs[source]
    return Batch(completion_mask=mask, **tables)


def _power_of_2(number: int) -> int:
    return 1 << (number - 1).bit_length()
