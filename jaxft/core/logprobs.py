"""Log-probability and entropy of given tokens, without ever holding logits for all of them at once.

The one-step shift between logits and tokens happens here, in `token_logprobs`, and nowhere else.
Letters: `B` rows, `T` tokens, `N` tokens of one chunk, `V` vocabulary.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxft.core.types import Model, Params, Scored

CHUNK_LOGITS = 2**26
"""Logits held at once when no chunk size is given: 256 MiB of float32."""


def scaling_temperature(temperature: Float[Array, "..."]) -> Float[Array, "..."]:
    """The divisor of the logits: the temperature itself, or 1 for greedy rows (temperature 0), scored as they stand."""
    return jnp.where(temperature == 0, 1.0, temperature)


def logits_logprobs(
    logits: Float[Array, "N V"], tokens: Int[Array, "N"], temperature: Float[Array, "N"]
) -> tuple[Float[Array, "N"], Float[Array, "N"]]:
    """Log-probability of each token and entropy of its distribution, in nats, under `softmax(logits / temperature)`.

    Computed in float32 or wider, whatever the logits are: in bfloat16 the result would be off by up to 0.02 nats.

    >>> lp, entropy = logits_logprobs(jnp.log(jnp.array([[1.0, 3.0]])), jnp.array([1]), jnp.array([1.0]))
    >>> print(f"{lp[0]:.4f} {entropy[0]:.4f}")  # log(3/4); -(1/4 log 1/4 + 3/4 log 3/4)
    -0.2877 0.5623
    """
    logits = logits.astype(jnp.promote_types(logits.dtype, jnp.float32))
    scaled = logits / scaling_temperature(temperature)[:, None]  # [N V]
    normaliser = jax.nn.logsumexp(scaled, axis=-1)
    logprobs = scaled - normaliser[:, None]
    chosen = jnp.take_along_axis(logprobs, tokens[:, None], axis=-1)[:, 0]
    probs = jnp.exp(logprobs)
    # A logit of -inf has probability 0 and adds 0, not 0 * -inf. The terms are of one sign: logsumexp(z) - sum(p z)
    # is the same number, but loses the digits of large logits.
    entropy = -jnp.sum(probs * jnp.where(probs > 0, logprobs, 0.0), axis=-1)
    return chosen, entropy


def token_logprobs(
    model: Model,
    params: Params,
    tokens: Int[Array, "B T"],
    *,
    temperature: Float[Array, ""] | Float[Array, "B"] | Float[Array, "B T"] | float = 1.0,
    positions: Int[Array, "B T"] | None = None,
    segment_ids: Int[Array, "B T"] | None = None,
    value_head: Params | None = None,
    entropy_gradient: bool = False,
    chunk_tokens: int | None = None,
) -> Scored:
    """Log-probability of `tokens[b, t]` given `tokens[b, :t]`, and the entropy of that distribution, `[B T]` each.

    The logits exist for `chunk_tokens` tokens at a time, in the forward and in the backward pass; the result does
    not depend on the chunking beyond rounding. The first token of a row, and of each packed segment, gets 0 and no
    gradient.

    Args:
        tokens: right-padded rows; what stands behind the last real token changes nothing before it.
        temperature: the one that the tokens were sampled with: a scalar, one per row, or one per token.
        positions: of the tokens; `0 .. T-1` when None.
        segment_ids: which of several packed sequences a token belongs to; tokens attend within their own only.
        value_head: `{"kernel": [D], "bias": []}` (`init_value_head`); with it the values are computed too.
        entropy_gradient: let gradients flow into the entropy (an entropy bonus needs it); costs nothing when off.
        chunk_tokens: tokens per chunk; by default as many as hold 2**26 logits.

    Raises:
        ValueError: `temperature` has a shape that fits neither rows nor tokens, or `chunk_tokens` is below 1.

    >>> import jaxft
    >>> def coin(params, tokens, positions):  # two tokens, of the same logits everywhere
    ...     return jnp.broadcast_to(params["logits"], (*tokens.shape, 2))
    >>> model, params = jaxft.from_function(coin), {"logits": jnp.zeros(2)}
    >>> print(token_logprobs(model, params, jnp.array([[0, 1, 1]])).logprobs.round(4))  # log(1/2)
    [[ 0.     -0.6931 -0.6931]]
    """
    rows, length = tokens.shape
    temperature = jnp.asarray(temperature, jnp.float32)
    if temperature.shape not in ((), (rows,), (rows, length)):
        raise ValueError(f"temperature has shape {temperature.shape}; wanted (), ({rows},) or ({rows}, {length})")
    if temperature.ndim == 1:
        temperature = temperature[:, None]
    temperature = jnp.broadcast_to(temperature, (rows, length))
    if positions is None:
        positions = jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32), (rows, length))

    hidden, _ = model.apply(params, tokens, positions, segment_ids=segment_ids)  # [B T D]
    logprobs, entropy = _score_in_chunks(
        model,
        params,
        hidden[:, :-1].reshape(-1, hidden.shape[-1]),
        tokens[:, 1:].reshape(-1),
        temperature[:, 1:].reshape(-1),
        entropy_gradient,
        chunk_tokens,
    )
    values = None
    if value_head is not None:
        wide = hidden[:, :-1].astype(jnp.promote_types(hidden.dtype, jnp.float32))
        values = wide @ value_head["kernel"] + value_head["bias"]  # [B T-1]
    continues = None
    if segment_ids is not None:
        continues = jnp.pad(segment_ids[:, 1:] == segment_ids[:, :-1], ((0, 0), (1, 0)))

    def shifted(x: Array) -> Array:
        """Behind the first token of the row, which nothing predicts; so for the first of each segment."""
        aligned = jnp.pad(x.reshape(rows, -1), ((0, 0), (1, 0)))  # [B T]
        return aligned if continues is None else jnp.where(continues, aligned, 0.0)

    return Scored(shifted(logprobs), shifted(entropy), None if values is None else shifted(values))


def init_value_head(hidden_size: int) -> Params:
    """A linear value function of the hidden state that says 0 everywhere: `{"kernel": [hidden_size], "bias": []}`.

    >>> jax.tree.map(jnp.shape, init_value_head(4))
    {'bias': (), 'kernel': (4,)}
    """
    return {"kernel": jnp.zeros(hidden_size, jnp.float32), "bias": jnp.zeros((), jnp.float32)}


def _score_in_chunks(
    model: Model,
    params: Params,
    hidden: Float[Array, "N D"],
    tokens: Int[Array, "N"],
    temperature: Float[Array, "N"],
    entropy_gradient: bool,
    chunk_tokens: int | None,
) -> tuple[Float[Array, "N"], Float[Array, "N"]]:
    def score(
        params: Params, hidden: Float[Array, "C D"], tokens: Int[Array, "C"], temperature: Float[Array, "C"]
    ) -> tuple[Float[Array, "C"], Float[Array, "C"]]:
        logprobs, entropy = logits_logprobs(model.unembed(params, hidden), tokens, temperature)
        return logprobs, entropy if entropy_gradient else jax.lax.stop_gradient(entropy)

    total = hidden.shape[0]
    if chunk_tokens is None:
        vocabulary = jax.eval_shape(model.unembed, params, hidden).shape[-1]
        chunk_tokens = max(16, CHUNK_LOGITS // vocabulary)
    if chunk_tokens < 1:
        raise ValueError(f"chunk_tokens is {chunk_tokens}; wanted at least 1")
    rechecked = jax.checkpoint(score)
    if total <= chunk_tokens:
        return rechecked(params, hidden, tokens, temperature)

    chunks = -(-total // chunk_tokens)
    padding = chunks * chunk_tokens - total

    def split(x: Array) -> Array:
        padded = jnp.pad(x, ((0, padding),) + ((0, 0),) * (x.ndim - 1), mode="edge")
        return padded.reshape(chunks, chunk_tokens, *x.shape[1:])

    logprobs, entropy = jax.lax.map(
        lambda chunk: rechecked(params, *chunk), (split(hidden), split(tokens), split(temperature))
    )
    return logprobs.reshape(-1)[:total], entropy.reshape(-1)[:total]
