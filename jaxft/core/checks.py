"""Checks of arguments: shapes and types of arrays, and batches that can be trained on."""

from functools import partial
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jaxft.core.types import Batch, Model, Params


def namespace(*arrays: Any) -> ModuleType:
    """Return `jax.numpy` if one of the arrays is a JAX array (traced or not), otherwise `numpy`.

    >>> namespace([1.0], np.ones(2)).__name__, namespace([1.0], jnp.ones(2)).__name__
    ('numpy', 'jax.numpy')
    """
    return jnp if any(isinstance(x, jax.Array) for x in arrays) else np


def as_floats(xp: ModuleType, *arrays: Any) -> list[Any]:
    """Convert arrays to one floating type: float64 for `numpy`; for `jax.numpy` float32, or float64 if one has it.

    >>> [x.dtype.name for x in as_floats(np, [1, 2], np.float32(3))]
    ['float64', 'float64']
    >>> [x.dtype.name for x in as_floats(jnp, jnp.array([1, 2]), jnp.ones(2, jnp.bfloat16))]
    ['float32', 'float32']
    """
    if xp is np:
        return [np.asarray(x, np.float64) for x in arrays]
    wide = [jnp.asarray(x) for x in arrays]
    return [x.astype(jnp.result_type(jnp.float32, *wide)) for x in wide]


def check_shapes(axes: str, **arrays: Any) -> None:
    """Raise unless all arrays that are given share one shape of rank `len(axes.split())`.

    Raises:
        ValueError: names the first array that does not fit, its shape, and what was wanted.

    >>> check_shapes("B T", logprobs=np.ones((2, 3)), old_logprobs=None, completion_mask=np.ones((2, 1)))
    Traceback (most recent call last):
    ValueError: completion_mask has shape (2, 1); wanted that of logprobs, (2, 3)
    """
    (first, wanted), *others = [(name, np.shape(x)) for name, x in arrays.items() if x is not None]
    if len(wanted) != len(axes.split()):
        raise ValueError(f"{first} has shape {wanted}; wanted [{axes}]")
    for name, shape in others:
        if shape != wanted:
            raise ValueError(f"{name} has shape {shape}; wanted that of {first}, {wanted}")


def as_array(name: str, x: Any) -> Any:
    """Convert nested lists of numbers to a JAX array; return anything else as it is.

    Raises:
        ValueError: an entry is neither a number nor a bool, or the lists have different lengths.

    >>> as_array("tokens", [[1, 2], [3, 4]]).shape
    (2, 2)
    """
    if not isinstance(x, list | tuple):
        return x
    try:
        return jnp.asarray(x)
    except (OverflowError, TypeError, ValueError) as error:
        raise ValueError(f"{name} is no table of numbers, with rows of one length: {error}") from error


def check_mask(name: str, mask: Any) -> None:
    """Raise unless the dtype of a mask is bool.

    Raises:
        ValueError: the dtype is another one; the message names mask and dtype.

    >>> check_mask("completion_mask", np.array([[0, 1]]))
    Traceback (most recent call last):
    ValueError: completion_mask holds int64; wanted bools, such as np.array([[False, True]])
    """
    if mask.dtype != bool:
        raise ValueError(f"{name} holds {mask.dtype}; wanted bools, such as np.array([[False, True]])")


def as_batch(batch: Batch) -> Batch:
    """Convert the nested lists of a batch to arrays.

    Raises:
        ValueError: a field has another shape than the tokens, tokens are not integers, or the mask is not bool.

    >>> as_batch(Batch([[5, 6]], [[False, True]])).tokens.shape
    (1, 2)
    """
    batch = Batch(**{name: as_array(f"batch.{name}", x) for name, x in batch._asdict().items()})  # Branches stay
    check_batch_shapes(batch)
    check_mask("batch.completion_mask", batch.completion_mask)
    if batch.observation_mask is not None:
        check_mask("batch.observation_mask", batch.observation_mask)
    if not jnp.issubdtype(batch.tokens.dtype, jnp.integer):
        raise ValueError(f"batch.tokens holds {batch.tokens.dtype}; wanted integers, the token ids")
    return batch


DEEPER = ("supports", "teacher_hidden", "experts")
"""Fields of a batch with more axes than its tokens."""


def check_batch_shapes(batch: Batch) -> None:
    """Raise unless every field has the shape of `batch.tokens`.

    `batch.advantages` may also be one per row; `DEEPER` fields have further axes behind.

    Raises:
        ValueError: a shape differs; the message names the field.

    >>> check_batch_shapes(Batch(np.ones((2, 3), int), np.ones((2, 3), bool), advantages=np.ones(3)))
    Traceback (most recent call last):
    ValueError: batch.advantages has shape (3,); wanted that of tokens, (2, 3)
    """
    wanted = np.shape(batch.tokens)
    if len(wanted) != 2:
        raise ValueError(f"batch.tokens has shape {wanted}; wanted [B T]")
    for name, x in batch._replace(branches=None)._asdict().items():
        is_per_row = name == "advantages" and x is not None and np.shape(x) == wanted[:1]
        shape = np.shape(x)[:2] if name in DEEPER else np.shape(x)
        if x is not None and shape != wanted and not is_per_row:
            raise ValueError(f"batch.{name} has shape {shape}; wanted that of tokens, {wanted}")
    if (branches := batch.branches) is not None:
        rest = wanted[1] - branches.prefix_tokens
        if batch.segment_ids is None or batch.positions is None or min(branches.prefix_tokens, rest) < 1:
            raise ValueError(f"{branches} needs batch.segment_ids, batch.positions and more than its prefix's columns")
        if rest % branches.count:
            raise ValueError(f"batch.tokens has {rest} columns behind the prefix; wanted a multiple of {branches}")


def vocabulary_size(model: Model, params: Params) -> int:
    """Return the size of the model's vocabulary, from the shape of its logits; nothing is computed.

    >>> import jaxft
    >>> model = jaxft.from_function(lambda params, tokens, positions: jax.nn.one_hot(tokens, 4) * params["scale"])
    >>> vocabulary_size(model, {"scale": jnp.ones(())})
    4
    """
    start = jax.ShapeDtypeStruct((1, 1), jnp.int32)
    return jax.eval_shape(partial(_logits, model), params, start).shape[-1]


@partial(jax.jit, static_argnums=0)
def _logits(model: Model, params: Params, start: Int[Array, "1 1"]) -> Float[Array, "1 1 V"]:
    """Return the logits after a token; traced once per model, for the shape, and never run."""
    return model.unembed(params, model.apply(params, start, start)[0])


def check_token_ids(name: str, ids: Any, vocabulary: int) -> None:
    """Raise unless all ids are integers from 0 to `vocabulary - 1`.

    Raises:
        ValueError: an id is invalid; the message names the first one, its index, and the size of the vocabulary, or the
            type that is none of integers.

    >>> check_token_ids("tokens", [[3, 0], [4, 1]], vocabulary=4)
    Traceback (most recent call last):
    ValueError: tokens[1, 0] is 4; wanted an id of the vocabulary, which has 4 tokens: 0 to 3
    """
    table = np.asarray(ids)
    if table.size and table.dtype.kind not in "iu":
        raise ValueError(f"{name} holds {table.dtype}; wanted integers, token ids")
    for place in np.argwhere((table < 0) | (table >= vocabulary)).tolist()[:1]:
        raise ValueError(
            f"{name}[{', '.join(map(str, place))}] is {table[tuple(place)]}; wanted an id of the vocabulary, which has "
            f"{vocabulary} tokens: 0 to {vocabulary - 1}"
        )


def check_batch(batch: Batch, vocabulary: int | None = None) -> None:
    """Raise unless the batch can be trained on.

    Args:
        vocabulary: size of the vocabulary; None skips the check of token ids.

    Raises:
        ValueError: shapes differ; no token is trained; the first token of a sequence is trained, which nothing
            predicts; a token is outside the vocabulary; a trained token has a temperature that is not above 0 (greedy
            rows have nothing to learn from), a `trajectory_tokens` below 1, or a non-finite value. The message names
            field, row and token.

    >>> check_batch(Batch(np.array([[5, 6]]), np.array([[False, True]]), np.array([1.0])))
    >>> check_batch(Batch(np.array([[5, 6]]), np.array([[False, False]])))
    Traceback (most recent call last):
    ValueError: completion_mask is False everywhere: there is no token to train
    """
    batch = as_batch(batch)
    tokens, mask = np.asarray(batch.tokens), np.asarray(batch.completion_mask)
    tables = batch._replace(branches=None)._asdict()
    given = {name: np.asarray(x) for name, x in tables.items() if x is not None}
    if not mask.any():
        raise ValueError("completion_mask is False everywhere: there is no token to train")
    starts = np.zeros(mask.shape, bool)
    starts[:, :1] = True
    if batch.segment_ids is not None:
        segment_ids = np.asarray(batch.segment_ids)
        starts[:, 1:] = segment_ids[:, 1:] != segment_ids[:, :-1]
        if batch.branches is not None:  # whose first tokens the last one of the prefix predicts, if there is any
            first, width = batch.branches.prefix_tokens, mask.shape[1]
            step = (width - first) // batch.branches.count
            starts[:, first::step] = segment_ids[:, first - 1 : first] == 0
    _refuse(mask & starts, "completion_mask", "is True on the first token of a sequence, which nothing predicts")
    limit = np.inf if vocabulary is None else vocabulary
    _refuse((tokens < 0) | (tokens >= limit), "tokens", f"is outside the vocabulary of {limit}")
    if "temperatures" in given:
        _refuse(mask & ~(given["temperatures"] > 0), "temperatures", "is not above 0: greedy rows cannot be trained on")
    if "trajectory_tokens" in given:
        few = ~(given["trajectory_tokens"] >= 1)
        _refuse(mask & few, "trajectory_tokens", "is below 1, but the trajectory has at least this trained token")
    for name, x in given.items():
        if np.issubdtype(x.dtype, np.floating):
            per_token = x if x.ndim == 2 else x[:, None]
            _refuse(mask & ~np.isfinite(per_token), name, "is not finite on a trained token")


def _refuse(wrong: np.ndarray, name: str, what: str) -> None:
    if wrong.any():
        row, token = np.argwhere(wrong)[0]
        raise ValueError(f"batch.{name} {what} (row {row}, token {token}; {int(wrong.sum())} in all)")
