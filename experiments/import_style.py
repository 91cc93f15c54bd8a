"""GRPO in one plain loop, without the harness: every line of reinforcement learning is in this file.

    python experiments/import_style.py

A small Qwen3 of random weights learns to answer with digits. The reward is a Python function: the fraction of an
answer's characters that are digits, and 0 for an answer that does not end by itself. About one minute on two CPU cores;
the mean reward climbs from below 0.1 to above 0.9.
"""

from functools import partial

import jax
import numpy as np
import optax

import jaxft

NUM_GENERATIONS, MAX_NEW_TOKENS, UPDATES = 16, 12, 100


def reward(text: str, has_ended: bool) -> float:
    """Fraction of digits in a text that ended by itself, 0 otherwise."""
    return sum(character.isdigit() for character in text) / len(text) if text and has_ended else 0.0


def main() -> float:
    """Trains and returns the mean reward of the last rollout."""
    tokenizer = jaxft.load_tokenizer()  # or jaxft.load_tokenizer("path-or-hub-id")
    model, params = jaxft.init_model(
        jaxft.model_preset("qwen3-50k"), jax.random.key(0)
    )  # or jaxft.load_model("path-or-hub-id")
    questions = [[{"role": "user", "content": f"number {i}?"}] for i in range(8)]
    chats = [tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True) for chat in questions]
    prompts = [tokenizer(chat, add_special_tokens=False)["input_ids"] for chat in chats]
    group_ids = np.repeat(np.arange(len(prompts)), NUM_GENERATIONS)

    optimizer = optax.adam(3e-3)
    state = jaxft.init_train_state(params, optimizer)
    update = jaxft.make_update(
        model, partial(jaxft.grpo_loss, loss=partial(jaxft.policy_loss, loss="dapo")), optimizer, max_grad_norm=1.0
    )
    mean_reward = 0.0
    for step, key in enumerate(jax.random.split(jax.random.key(1), UPDATES)):
        rollout = jaxft.generate(
            model,
            state.params,
            prompts,
            key,
            num_generations=NUM_GENERATIONS,
            max_new_tokens=MAX_NEW_TOKENS,
            stop_ids=(tokenizer.eos_token_id,),
        )
        texts = [
            tokenizer.decode(row[mask], skip_special_tokens=True)
            for row, mask in zip(np.asarray(rollout.tokens), np.asarray(rollout.completion_mask), strict=True)
        ]
        ended = np.asarray(rollout.finish_reason) == jaxft.FinishReason.STOP
        rewards = np.array([reward(text, bool(has_ended)) for text, has_ended in zip(texts, ended, strict=True)])
        advantages = jaxft.group_advantages(rewards, group_ids).astype(np.float32)
        batch = jaxft.Batch(
            rollout.tokens, rollout.completion_mask, advantages, sampler_logprobs=rollout.sampler_logprobs
        )
        state, metrics = update(state, batch)
        mean_reward = float(rewards.mean())
        if step % 5 == 4:
            print(f"update {step + 1}  reward {mean_reward:.3f}  entropy {metrics['entropy']:.3f}  {texts[0]!r}")
    return mean_reward


if __name__ == "__main__":
    main()
