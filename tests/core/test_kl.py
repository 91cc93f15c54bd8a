"""What a KL term pulls at, over sequences of two tokens: every one of them, with its probability; nothing sampled."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxft.core.kl import k1_penalty, kl_penalty
from jaxft.core.losses import policy_loss
from jaxft.core.returns import reward_to_go

V = 3
DRAW = np.random.default_rng(11)
FIRST, SECOND = np.divmod(np.arange(V * V), V)
"""All sequences, a row each."""


def make_logits():
    """Of the first token `[V]`, and of the second after each first one `[V V]`."""
    return {"first": DRAW.normal(size=V), "second": DRAW.normal(size=(V, V))}


POLICY, OLD, REFERENCE = make_logits(), make_logits(), make_logits()


def sequence_logprobs(logits):
    """Log-probabilities of the two tokens of every sequence, `[V V, 2]`."""
    first, second = jax.nn.log_softmax(logits["first"]), jax.nn.log_softmax(logits["second"])
    return jnp.stack([first[FIRST], second[FIRST, SECOND]], axis=1)


def probabilities(logits):
    return jnp.exp(sequence_logprobs(logits).sum(axis=1))


def kl_at_fixed_prefixes(policy, old, ref, direction):
    """Per-state KLs, the states weighted as `old` visits them."""

    def kl(p, q):
        p, q = (p, q) if direction == "reverse" else (q, p)
        return jnp.sum(jnp.exp(p) * (p - q), axis=-1)

    normal = {name: [jax.nn.log_softmax(x[name]) for x in (policy, ref)] for name in policy}
    visits = jax.nn.softmax(old["first"])
    return kl(*normal["first"]) + jnp.sum(visits * kl(*normal["second"]))


def expected_loss(policy, old, per_token):
    """The mean over sequences drawn from `old` of the summed term."""
    return jnp.sum(jax.lax.stop_gradient(probabilities(old))[:, None] * per_token)


def assert_same(got, expected):
    scale = max(np.abs(leaf).max() for leaf in jax.tree.leaves(expected))
    for mine, theirs in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        assert theirs.dtype == jnp.float64
        assert np.abs(mine - theirs).max() <= 1e-6 * scale
    assert scale > 0.01


@pytest.mark.parametrize(("kind", "direction"), [("k2", "reverse"), ("k3_ratio", "reverse"), ("k3", "forward")])
@pytest.mark.parametrize("is_on_policy", [True, False])
def test_terms_in_the_loss_have_the_gradient_of_the_states_kl(kind, direction, is_on_policy):
    with jax.enable_x64(True):
        policy, old, ref = (jax.tree.map(jnp.array, x) for x in (POLICY, POLICY if is_on_policy else OLD, REFERENCE))

        def of_terms(policy):
            logprobs = sequence_logprobs(policy)
            rho, log_ratio = sequence_logprobs(ref) - logprobs, logprobs - sequence_logprobs(old)
            return expected_loss(policy, old, kl_penalty(kind, rho, log_ratio, jnp.exp(log_ratio)))

        expected = jax.grad(kl_at_fixed_prefixes)(policy, old, ref, direction)
        assert_same(jax.jit(jax.grad(of_terms))(policy), expected)


@pytest.mark.parametrize("is_per_token", [True, False])
def test_k1_in_the_reward_has_the_gradient_of_the_sequences_kl(is_per_token):
    """As the loss of `reinforce` with no other reward; per token with rewards to go, or summed over the sequence."""
    with jax.enable_x64(True):
        policy, ref = (jax.tree.map(jnp.array, x) for x in (POLICY, REFERENCE))
        mask = jnp.ones((V * V, 2), bool)

        def of_reinforce(policy):
            logprobs = sequence_logprobs(policy)
            rewards = -k1_penalty(logprobs, sequence_logprobs(ref), mask)
            advantages = reward_to_go(rewards, mask) if is_per_token else rewards.sum(axis=1)
            # The mean over rows of a constant budget of 1, rows weighted by how likely they are.
            weights = jax.lax.stop_gradient(probabilities(policy) * V * V)
            weighted = advantages * (weights[:, None] if is_per_token else weights)
            knobs = dict(loss="reinforce", aggregation="budget", max_completion_tokens=1)
            return policy_loss(logprobs, None, weighted, mask, **knobs)[0]

        def kl_of_sequences(policy):
            return jnp.sum(probabilities(policy) * (sequence_logprobs(policy) - sequence_logprobs(ref)).sum(axis=1))

        assert_same(jax.jit(jax.grad(of_reinforce))(policy), jax.grad(kl_of_sequences)(policy))


def test_k1_in_the_loss_would_have_none():
    with jax.enable_x64(True):
        policy, ref = (jax.tree.map(jnp.array, x) for x in (POLICY, REFERENCE))

        def of_k1(policy):
            return expected_loss(policy, policy, sequence_logprobs(policy) - sequence_logprobs(ref))

        for leaf in jax.tree.leaves(jax.grad(of_k1)(policy)):
            np.testing.assert_allclose(leaf, np.zeros(leaf.shape), atol=1e-15)


def test_the_penalty_is_detached_and_masked():
    logprobs, mask = jnp.array([[-1.0, jnp.nan]]), jnp.array([[True, False]])
    value, gradient = jax.value_and_grad(lambda x: k1_penalty(x, jnp.full((1, 2), -3.0), mask).sum())(logprobs)
    assert (float(value), gradient.tolist()) == (2.0, [[0.0, 0.0]])
