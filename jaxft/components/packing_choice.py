"""Whether a model's rows may hold several sequences, and whether they had better."""

import jax
import jax.numpy as jnp

from jaxft.core.mesh import devices_of
from jaxft.core.types import Model, Params
from jaxft.models.attention import can_use_flash
from jaxft.models.config import DecoderConfig


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
    return can_use_flash(hidden_state(model, params).dtype, config.head_dim, devices_of(model.layout))


def can_pack(model: Model, params: Params) -> bool:
    """Whether the model keeps the segments of a row apart; a bridged network does not."""
    tokens = jnp.zeros((1, 2), jnp.int32)
    try:
        jax.eval_shape(lambda: model.apply(params, tokens, tokens, segment_ids=tokens))
    except ValueError:
        return False
    return True
