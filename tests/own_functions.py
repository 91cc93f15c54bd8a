"""Losses, estimators, optimizers and callbacks as users write them, for tests that name them as `own_functions:...`."""

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxft.advantages import reward_to_go, whiten
from jaxft.losses import token_mean


def pull(logprobs, advantages, completion_mask, denominators, strength=1.0):
    """The loss of REINFORCE."""
    kept = jnp.where(completion_mask, logprobs, 0.0)
    return token_mean(-strength * advantages * kept, completion_mask, denominators), {"strength": strength}


def weighted(logprobs, advantages, completion_mask, denominators, policy_weights):
    """The loss of REINFORCE on tokens of another sampler."""
    weights = 1.0 if policy_weights is None else policy_weights
    return pull(logprobs, weights * advantages, completion_mask, denominators)


def with_reference(logprobs, ref_logprobs, completion_mask, denominators, beta):
    """The square of the distance to the reference."""
    away = jnp.where(completion_mask, logprobs - ref_logprobs, 0.0) ** 2
    return token_mean(beta * away, completion_mask, denominators), {}


def without_weight(logprobs, ref_logprobs, completion_mask, denominators):
    """The same without a weight."""
    return with_reference(logprobs, ref_logprobs, completion_mask, denominators, 1.0)


def of_one_clip(logprobs, clip_high):
    """A clip that is a number, and so the same for all tasks."""
    return logprobs.sum() * (1.0 if clip_high > 0.2 else 2.0), {}


def unmasked(logprobs, old_logprobs, advantages, completion_mask, denominators):
    """A ratio of -inf to -inf in padding."""
    return token_mean(-advantages * jnp.exp(logprobs - old_logprobs), completion_mask, denominators), {}


def detached(logprobs, completion_mask, denominators):
    """A loss without a gradient."""
    return token_mean(
        jax.lax.stop_gradient(jnp.where(completion_mask, logprobs, 0.0)), completion_mask, denominators
    ), {}


def undefined(logprobs):
    """No number, wherever it is computed."""
    return 0.0 * jnp.log(-jnp.ones(())) * logprobs.sum(), {}


def per_token(logprobs):
    """A table in the place of a scalar."""
    return logprobs, {}


def alone(logprobs):
    """A loss without metrics."""
    return logprobs.sum()


def taken_metric(logprobs):
    """A metric that every update has."""
    return logprobs.sum(), {"grad_norm": 1.0}


def broken(logprobs):
    """An error of its own."""
    return logprobs.sum() / nothing, {}


def misspelt(logprobs, mask):
    """A parameter that there is not."""
    return logprobs.sum(), {}


nameless = lambda logprobs: (logprobs.sum(), {})  # noqa: E731


def _made(factor):
    def inner(logprobs):
        return factor * logprobs.sum(), {}

    return inner


closure = _made(2.0)


def above_mean(rewards, group_ids):
    """Rewards above the mean of their group."""
    found = np.zeros(len(rewards))
    for group in set(group_ids[~np.isnan(rewards)]):
        members = (group_ids == group) & ~np.isnan(rewards)
        found[members] = rewards[members] - rewards[members].mean()
    return found


def rewards_to_go(token_rewards, completion_mask, gamma):
    """REINFORCE++, per token."""
    return whiten(reward_to_go(token_rewards, completion_mask, gamma=gamma), completion_mask)


def by_name(named_rewards, lengths):
    """A named reward, of short answers more."""
    return named_rewards["right"] / lengths


def by_step(rewards, step_rewards):
    """Rewards as they are."""
    return rewards if step_rewards is None else np.nan_to_num(step_rewards)


def running_sum(step_rewards):
    """Sums of later step rewards, which has to be there."""
    return np.nancumsum(step_rewards[:, ::-1], axis=1)[:, ::-1]


def any_keyword(rewards, **others):
    """Rewards that their mean is taken from."""
    return rewards - np.nanmean(rewards)


def of_tokens_alone(token_rewards):
    """Rewards of tokens, without a mask."""
    return token_rewards


def sign_descent(learning_rate, strength=1.0):
    """Steps along the sign of the gradient."""
    return optax.chain(optax.scale_by_sign(), optax.scale(strength), optax.scale_by_learning_rate(learning_rate))


def no_transformation():
    """A number."""
    return 3


def halving(learning_rate, every):
    """A rate that halves."""
    return lambda step: learning_rate * 0.5 ** (step // every)


def count_groups(trajectories, epoch):
    """The number of groups."""
    return {"own_groups": len(trajectories), "own_epoch": epoch}


async def count_metrics(metrics):
    """The number of metrics."""
    return {"own_metrics": len(metrics)}
