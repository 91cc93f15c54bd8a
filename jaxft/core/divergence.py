"""Divergences between the distributions of a student and a teacher over the whole vocabulary, for distillation.

Letters: `N` tokens of one chunk, `V` vocabulary of the student, `W` vocabulary of the teacher.
"""

from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxft.core.types import Model

DivergenceName = Literal["reverse", "forward", "jensen_shannon"]

MIN_LOGPROB = -1e30
"""Replacement for a log-probability of -inf: its product with probability 0 is 0, not NaN."""


class Teacher(NamedTuple):
    """A model whose distributions the policy learns, and how the distance from them is measured.

    Attributes:
        model: the model of the teacher, with the token ids of the policy.
        kind: name of the divergence, see `divergence`.
        mixing: share of the teacher in the mixture of `jensen_shannon`.
    """

    model: Model
    kind: DivergenceName = "reverse"
    mixing: float = 0.5


def divergence(
    logits: Float[Array, "N V"],
    teacher_logits: Float[Array, "N W"],
    temperature: Float[Array, "N"],
    kind: DivergenceName = "reverse",
    mixing: float = 0.5,
) -> Float[Array, "N"]:
    """Return the divergence of each token's distribution from the teacher's, in nats; no gradient flows to the teacher.

    With the student's distribution `p` and the teacher's `q`, both at `temperature`: `reverse` is `KL(p || q)`, which
    seeks a mode; `forward` is `KL(q || p)`, which covers all; `jensen_shannon` is `b KL(q || m) + (1 - b) KL(p || m)`
    with the mixture `m = b q + (1 - b) p` and `b = mixing` (arXiv 2306.13649, section 2). Vocabularies may differ in
    size, as padding makes them; the tokens that both have are compared.

    Raises:
        ValueError: `kind` is unknown, or `mixing` is not between 0 and 1.

    >>> student, teacher = jnp.log(jnp.array([[0.5, 0.5]])), jnp.log(jnp.array([[0.9, 0.1]]))
    >>> for kind in ("reverse", "forward", "jensen_shannon"):
    ...     print(f"{divergence(student, teacher, jnp.ones(1), kind)[0]:.4f}")
    0.5108
    0.3681
    0.1017
    """
    if kind not in ("reverse", "forward", "jensen_shannon"):
        raise ValueError(f"kind is {kind!r}; wanted reverse, forward or jensen_shannon")
    if not 0.0 < mixing < 1.0:
        raise ValueError(f"mixing is {mixing}; wanted a number between 0 and 1")
    size = min(logits.shape[-1], teacher_logits.shape[-1])

    def log_softmax(logits: Float[Array, "N X"]) -> Float[Array, "N M"]:
        wide = logits[:, :size].astype(jnp.promote_types(logits.dtype, jnp.float32))
        return jnp.maximum(jax.nn.log_softmax(wide / temperature[:, None]), MIN_LOGPROB)

    log_p, log_q = log_softmax(logits), log_softmax(jax.lax.stop_gradient(teacher_logits))
    if kind == "reverse":
        return _kl(log_p, log_q)
    if kind == "forward":
        return _kl(log_q, log_p)
    log_m = jnp.logaddexp(log_q + jnp.log(mixing), log_p + jnp.log1p(-mixing))
    return mixing * _kl(log_q, log_m) + (1.0 - mixing) * _kl(log_p, log_m)


def _kl(log_p: Float[Array, "N M"], log_q: Float[Array, "N M"]) -> Float[Array, "N"]:
    return jnp.sum(jnp.exp(log_p) * (log_p - log_q), axis=-1)
