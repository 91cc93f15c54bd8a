"""Computing in fewer bits than parameters are kept in: bfloat16 products, float32 master weights."""

from functools import cache
from typing import Any

import jax
import jax.numpy as jnp

from jaxft.core.types import Model, Params


@cache
def compute_in(model: Model, dtype: Any) -> Model:
    """The model that casts its floating parameters to `dtype` wherever it computes; equal arguments give the same one.

    Parameters, their gradients and optimiser state stay as wide as they are. Logits are float32 all the same, and so is
    everything made of them; what is decoded with (`decode_layout`) is cast once per policy version.

    >>> import jaxft
    >>> dtypes = []
    >>> def network(params, tokens, positions):
    ...     dtypes.append(params["w"].dtype.name)
    ...     return jax.nn.one_hot(tokens, 4) * params["w"]
    >>> model = compute_in(jaxft.from_function(network), jnp.bfloat16)
    >>> zero = jnp.zeros((1, 1), jnp.int32)
    >>> gradient = jax.grad(lambda params: model.apply(params, zero, zero)[0].sum())({"w": jnp.ones(())})
    >>> print(*dtypes, gradient["w"].dtype)
    bfloat16 float32
    """

    def narrow(params: Params) -> Params:
        return jax.tree.map(
            lambda leaf: leaf.astype(dtype) if jnp.issubdtype(leaf.dtype, jnp.floating) else leaf, params
        )

    def apply(params: Params, *arguments: Any, **named: Any) -> Any:
        return model.apply(narrow(params), *arguments, **named)

    def unembed(params: Params, hidden: Any) -> Any:
        return model.unembed(narrow(params), hidden)

    def decode_layout(params: Params) -> Params:
        if model.lora is not None:  # merged in full before it is rounded once
            return narrow(model.decode_layout(params))
        return model.decode_layout(narrow(params))

    return model._replace(apply=apply, unembed=unembed, decode_layout=decode_layout)
