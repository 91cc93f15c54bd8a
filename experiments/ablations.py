"""Trains a very small model with and without two rules of jaxft, in plain loops.

    python experiments/ablations.py

1. *The stop token is an action.* The reward wants answers that end by themselves. With the stop token in the mask the
   policy learns to end them; without it nothing teaches that, and most answers are cut at the length limit.
2. *k1 does not belong in the loss.* The reward pulls the policy away from its start, a KL with beta 0.5 should hold it.
   k3_ratio does; k1 in the loss ends no nearer to the reference than beta 0. jaxft refuses it, so it is built here.

About three minutes on two CPU cores. Writes result.json to runs/ablations; what an earlier run left there is replaced.
"""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxft
from jaxft.core.reductions import token_mean

FOLDER = Path("runs/ablations")
NUM_GENERATIONS, MAX_NEW_TOKENS, UPDATES, BETA = 16, 12, 80, 0.5
DAPO = partial(jaxft.policy_loss, loss="dapo")


def share_of_digits(text: str, has_ended: bool) -> float:
    """Fraction of the characters of an answer that are digits."""
    return sum(character.isdigit() for character in text) / len(text) if text else 0.0


def ends_with_digits(text: str, has_ended: bool) -> float:
    """`share_of_digits` of an answer that ended, 0 for one that was cut."""
    return share_of_digits(text, has_ended) if has_ended else 0.0


def k1_in_the_loss(model: Any, params: Any, batch: Any, denominators: Any) -> Any:
    """dapo with `beta (logprobs - ref_logprobs)` per token: the mistake."""
    loss, metrics = jaxft.grpo_loss(model, params, batch, denominators, loss=DAPO)
    scored = jaxft.score_batch(model, params, batch)
    k1 = token_mean(scored.logprobs - batch.ref_logprobs, batch.completion_mask, denominators)
    return loss + BETA * k1, metrics


def train(reward: Callable[[str, bool], float], loss_fn: Any, *, is_stop_trained: bool = True) -> dict[str, float]:
    """Means of the last ten rollouts: reward, truncated fraction, and KL to the start in nats per token."""
    tokenizer = jaxft.load_tokenizer()
    model, params = jaxft.init_model(jaxft.model_preset("qwen3-50k"), jax.random.key(0))
    chats = [[{"role": "user", "content": f"number {i}?"}] for i in range(8)]
    texts = [tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True) for chat in chats]
    prompts = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]
    group_ids = np.repeat(np.arange(len(prompts)), NUM_GENERATIONS)
    stop = tokenizer.eos_token_id

    optimizer = optax.adam(3e-3)
    reference, state = jax.tree.map(jnp.copy, params), jaxft.init_train_state(params, optimizer)
    update = jaxft.make_update(model, loss_fn, optimizer, max_grad_norm=1.0)
    score = jax.jit(jaxft.score_batch, static_argnums=0)
    history = []
    for key in jax.random.split(jax.random.key(1), UPDATES):
        rollout = jaxft.generate(
            model,
            state.params,
            prompts,
            key,
            num_generations=NUM_GENERATIONS,
            max_new_tokens=MAX_NEW_TOKENS,
            stop_ids=(stop,),
        )
        tokens, mask = np.asarray(rollout.tokens), np.asarray(rollout.completion_mask)
        answers = [
            tokenizer.decode(row[chosen], skip_special_tokens=True) for row, chosen in zip(tokens, mask, strict=True)
        ]
        ended = np.asarray(rollout.finish_reason) == jaxft.FinishReason.STOP
        rewards = np.array([reward(text, bool(end)) for text, end in zip(answers, ended, strict=True)])
        trained = mask if is_stop_trained else mask & (tokens != stop)
        batch = jaxft.Batch(
            rollout.tokens, jnp.array(trained), jaxft.group_advantages(rewards, group_ids).astype(np.float32)
        )
        ref_logprobs = score(model, reference, batch).logprobs
        divergence = (np.asarray(rollout.sampler_logprobs) - np.asarray(ref_logprobs))[mask].mean()
        history.append((rewards.mean(), 1 - ended.mean(), divergence))
        state, _ = update(state, batch._replace(ref_logprobs=ref_logprobs))
    mean = np.mean(history[-10:], axis=0)
    return dict(zip(("reward", "truncated_fraction", "kl"), map(float, mean), strict=True))


def main() -> None:
    """Runs both, prints a table."""
    dapo = partial(jaxft.grpo_loss, loss=DAPO)
    held = partial(jaxft.grpo_loss, loss=partial(DAPO, beta=BETA))
    results = {
        "stop token trained": train(ends_with_digits, dapo),
        "stop token masked": train(ends_with_digits, dapo, is_stop_trained=False),
        "beta 0": train(share_of_digits, dapo),
        f"k1 in the loss, beta {BETA}": train(share_of_digits, k1_in_the_loss),
        f"k3_ratio, beta {BETA}": train(share_of_digits, held),
    }
    FOLDER.mkdir(parents=True, exist_ok=True)
    (FOLDER / "result.json").write_text(json.dumps(results, indent=2) + "\n")
    print(f"{'':<26} {'reward':>7} {'truncated':>10} {'KL to start':>12}")
    for name, result in results.items():
        print(f"{name:<26} {result['reward']:>7.3f} {result['truncated_fraction']:>10.3f} {result['kl']:>12.3f}")


if __name__ == "__main__":
    main()
