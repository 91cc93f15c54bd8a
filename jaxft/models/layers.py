"""The layers of a decoder: embedding look-up, linear projections with adapters, and RMSNorm.

Letters: `B` rows, `T` tokens, `N` tokens of all rows, `D` input width, `F` output width, `r` rank, `V` vocabulary.
"""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from jaxft.core.reductions import invariant_sum
from jaxft.models.config import LoraSpec


@jax.custom_vjp
def look_up(embedding: Float[Array, "V D"], tokens: Int[Array, "B T"]) -> Float[Array, "B T D"]:
    """Return the embedding of each token; gradients of a token's occurrences are summed in float32 or wider.

    Automatic differentiation sums them in the dtype of the embedding. In bfloat16 a sum of ones stops at 256, so that
    a frequent token gets a fraction of its gradient.

    >>> gradient = jax.grad(lambda table: look_up(table, jnp.zeros((1, 1000), int)).sum())(jnp.ones((1, 1), "bfloat16"))
    >>> print(gradient)  # one for each position
    [[1000]]
    """
    return jnp.take(embedding, tokens, axis=0)


def _look_up_forward(embedding: Array, tokens: Array) -> tuple[Array, tuple[Array, Array]]:
    return look_up(embedding, tokens), (embedding, tokens)


def _look_up_backward(saved: tuple[Array, Array], cotangent: Array) -> tuple[Array, None]:
    embedding, tokens = saved
    wide = jnp.promote_types(embedding.dtype, jnp.float32)
    zero = jnp.zeros((), wide)
    if embedding.dtype.itemsize < 4:
        # Else XLA for GPUs makes the table of zeros long before, together with that of the head's gradient.
        cotangent, zero = jax.lax.optimization_barrier((cotangent, zero))
    sums = jnp.broadcast_to(zero, embedding.shape).at[tokens].add(cotangent.astype(wide))
    return sums.astype(embedding.dtype), None


look_up.defvjp(_look_up_forward, _look_up_backward)


@jax.custom_vjp
def matmul(x: Float[Array, "N D"], kernel: Float[Array, "D F"]) -> Float[Array, "N F"]:
    """Return `x @ kernel`, with the kernel's gradient as one product over tokens in the kernel's own layout.

    Automatic differentiation forms that gradient transposed, which makes a whole update on CPU 2 to 4 times slower.
    """
    return x @ kernel


def _matmul_forward(x: Array, kernel: Array) -> tuple[Array, tuple[Array, Array]]:
    return x @ kernel, (x, kernel)


def _matmul_backward(saved: tuple[Array, Array], cotangent: Array) -> tuple[Array, Array]:
    x, kernel = saved
    return cotangent @ kernel.T, jax.lax.dot_general(x, cotangent, (((0,), (0,)), ((), ()))).astype(kernel.dtype)


matmul.defvjp(_matmul_forward, _matmul_backward)


def project_to_vocabulary(hidden: Float[Array, "*N D"], head: Float[Array, "V D"]) -> Float[Array, "*N V"]:
    """Return the logits `hidden @ head.T`, in float32 or wider."""
    flat = hidden.reshape(-1, hidden.shape[-1])
    is_narrow = flat.dtype.itemsize < 4
    logits = _logits_of_narrow(flat, head) if is_narrow else _logits(flat, head)
    return logits.reshape(*hidden.shape[:-1], -1)


def _logits(flat: Float[Array, "N D"], head: Float[Array, "V D"]) -> Float[Array, "N V"]:
    wide = jnp.promote_types(flat.dtype, jnp.float32)
    return jax.lax.dot_general(flat, head, (((1,), (1,)), ((), ())), preferred_element_type=wide)


@jax.custom_vjp
def _logits_of_narrow(flat: Float[Array, "N D"], head: Float[Array, "V D"]) -> Float[Array, "N V"]:
    """Return `_logits`; its gradients are products of narrow numbers, as those of float32 take GPUs 8 times as long."""
    return _logits(flat, head)


def _logits_forward(flat: Array, head: Array) -> tuple[Array, tuple[Array, Array]]:
    return _logits(flat, head), (flat, head)


def _logits_backward(saved: tuple[Array, Array], cotangent: Array) -> tuple[Array, Array]:
    flat, head = saved
    cotangent = cotangent.astype(flat.dtype)
    of_flat = jax.lax.dot_general(cotangent, head, (((1,), (0,)), ((), ())), preferred_element_type=jnp.float32)
    of_head = jax.lax.dot_general(cotangent, flat, (((0,), (0,)), ((), ())), preferred_element_type=jnp.float32)
    return of_flat.astype(flat.dtype), of_head.astype(head.dtype)


_logits_of_narrow.defvjp(_logits_forward, _logits_backward)


class Linear(nnx.Module):
    """`x @ kernel + bias` on the last axis, plus `scale * x @ A @ B` with an adapter; the kernel may be transposed."""

    def __init__(
        self, inputs: int, outputs: int, use_bias: bool, rngs: nnx.Rngs, is_transposed: bool, lora: LoraSpec | None
    ) -> None:
        kernel = jax.random.normal(rngs.params(), (inputs, outputs)) * inputs**-0.5
        self.kernel = nnx.Param(kernel.T if is_transposed else kernel)
        self.bias = nnx.Param(jnp.zeros(outputs)) if use_bias else None
        self.is_transposed = is_transposed
        # As in the paper's code: A is uniform and B zero, so that training begins at the base.
        shape, bound = (inputs, 0 if lora is None else lora.rank), inputs**-0.5
        drawn = None if lora is None else jax.random.uniform(rngs.params(), shape, minval=-bound, maxval=bound)
        self.lora_a = None if drawn is None else nnx.Param(drawn)
        self.lora_b = None if lora is None else nnx.Param(jnp.zeros((lora.rank, outputs)))
        self.lora_scale = 0.0 if lora is None else lora.scale

    def __call__(self, x: Float[Array, "*N D"]) -> Float[Array, "*N F"]:
        # With a transposed kernel, XLA for CPU gives a row the same bits among 8 rows as among 64.
        kernel = self.kernel[...].T if self.is_transposed else self.kernel[...]
        flat = x.reshape(-1, x.shape[-1])
        y = matmul(flat, kernel)
        if self.lora_a is not None and self.lora_b is not None:
            a, b = (
                matrix[...].astype(flat.dtype) for matrix in (self.lora_a, self.lora_b)
            )  # in the dtype of activations
            y = y + self.lora_scale * matmul(matmul(flat, a), b)
        y = y.reshape(*x.shape[:-1], -1)
        return y if self.bias is None else y + self.bias[...]


class RMSNorm(nnx.Module):
    """`x / rms(x) * scale` over the last axis, computed in float32 or wider; the scale may be one for each head.

    With an offset it is `x / rms(x) * (1 + scale)`, all in float32, as `1 + scale` is no narrow number.
    """

    def __init__(self, shape: int | tuple[int, ...], eps: float, has_offset: bool = False) -> None:
        self.scale = nnx.Param(jnp.zeros(shape) if has_offset else jnp.ones(shape))
        self.eps, self.has_offset = eps, has_offset

    def __call__(self, x: Float[Array, "B T *N D"], *, in_halves: bool) -> Float[Array, "B T *N D"]:
        wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
        mean = invariant_sum(wide**2, in_halves=in_halves) / x.shape[-1]
        normed = wide * jax.lax.rsqrt(mean + self.eps)
        if self.has_offset:
            return (normed * (1 + self.scale[...].astype(wide.dtype))).astype(x.dtype)
        return normed.astype(x.dtype) * self.scale[...]
