"""What an engine keeps on the device, and the two programs that change it: admitting requests, and decoding a little.

Letters: `R` slots, `P` rows of a prefill, `L` padded prompt length, `N` key ids, `S` stop ids.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int, UInt32

from jaxft.core.generate import DecodeState, Emitted, RowParams, decode
from jaxft.core.sampling import SamplingParams, fold_ids
from jaxft.core.types import Model, Params

MAX_STOP_IDS = 8


class Slots(NamedTuple):
    """All that the engine keeps on the device; every leaf has slots on axis 0."""

    state: DecodeState
    rows: RowParams


class Admission(NamedTuple):
    """Requests about to be prefilled. Filling rows have a slot beyond the last one, and are dropped."""

    prompts: Int[Any, "P L"]
    lengths: Int[Any, "P"]
    slots: Int[Any, "P"]
    sampling: SamplingParams
    key_ids: UInt32[Any, "P N"]
    stop_ids: Int[Any, "P S"]
    limits: Int[Any, "P"]


def compute_dtype(params: Params) -> Any:
    """The dtype that activations have with these parameters."""
    return jnp.result_type(*[leaf.dtype for leaf in jax.tree.leaves(params)])


@partial(jax.jit, static_argnums=(0, 1, 2, 3))
def empty_slots(model: Model, slots: int, cache_length: int, dtype: Any) -> Slots:
    """Slots that nobody uses, with room for `cache_length` tokens each."""
    zeros = jnp.zeros(slots, jnp.int32)
    state = DecodeState(model.init_cache(slots, cache_length, dtype), zeros, zeros, jnp.zeros(slots, bool))
    sampling = SamplingParams(jnp.ones(slots), zeros, jnp.ones(slots), jnp.zeros(slots))
    keys = jax.random.split(jax.random.key(0, impl="threefry2x32"), slots)
    return Slots(state, RowParams(sampling, keys, jnp.full((slots, MAX_STOP_IDS), -1, jnp.int32), zeros))


@partial(jax.jit, static_argnums=0, donate_argnums=2)
def admit(model: Model, params: Params, slots: Slots, seed: UInt32[Array, "2"], admission: Admission) -> Slots:
    """Prefills the admitted prompts in the rows of their slots and sets the slots' parameters."""
    # A slot out of range reads the last row.
    cache = jax.tree.map(lambda leaf: leaf[admission.slots], slots.state.cache)
    prompts, last = admission.prompts, admission.lengths - 1
    positions = jnp.broadcast_to(jnp.arange(prompts.shape[1], dtype=jnp.int32), prompts.shape)
    _, cache = model.apply(params, prompts, positions, cache=cache)

    key = jax.random.wrap_key_data(seed, impl="threefry2x32")
    admitted = Slots(
        DecodeState(cache, jnp.take_along_axis(prompts, last[:, None], axis=1)[:, 0], last, jnp.ones_like(last, bool)),
        RowParams(
            admission.sampling,
            jax.vmap(partial(fold_ids, key))(admission.key_ids),
            admission.stop_ids,
            admission.limits,
        ),
    )
    return jax.tree.map(lambda old, new: old.at[admission.slots].set(new, mode="drop"), slots, admitted)


@partial(jax.jit, static_argnums=(0, 4), donate_argnums=2)
def advance(model: Model, params: Params, slots: Slots, kept: Bool[Any, "R"], max_steps: int) -> tuple[Slots, Emitted]:
    """Decodes up to `max_steps` tokens of every slot that is `kept`; the others are put to rest."""
    state = slots.state._replace(active=slots.state.active & kept)
    state, emitted = decode(model, params, state, slots.rows, max_steps)
    return slots._replace(state=state), emitted
