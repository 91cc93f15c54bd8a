"""A mixture of experts, sampled in bfloat16 and trained in float32, with routing replay (arXiv 2510.11370) and without.

    python experiments/routing_replay.py

Where two experts are almost equally likely, rounding decides between them: a token then has other experts in the update
than it was sampled with, and its log-probability is that of another network. Replay takes the sampler's experts. A
policy of 16 experts in each of 3 layers, of which a token has 2, begins with random weights; the reward is the share of
digits in an answer of 12 tokens. Each collection of 64 answers is trained in 4 updates, in plain loops.

The table has means over 3 seeds: the difference of the log-probabilities of sampler and trainer in nats, mean and
largest, the share of the pairs of a token and a layer whose experts replay changes, and the reward of the last ten
epochs with that of each seed. Some five minutes on two CPU cores. Writes result.json to runs/routing_replay.
"""

import asyncio
import json
from contextlib import closing
from pathlib import Path

import jax
import numpy as np

import jaxft
from jaxft.harness.data_models import Trajectory
from jaxft.rollout.calls import Call, Prompt, Reply
from jaxft.rollout.policy import Policy
from jaxft.rollout.requests import Request
from jaxft.rollout.sequences import token_sequences
from jaxft.training.advantages import collect_rewards
from jaxft.training.batch import Row
from jaxft.training.config import LossConfig
from jaxft.training.learner import Learner
from jaxft.training.optimizer_config import OptimizerConfig

SEEDS, EPOCHS, PROMPTS, GENERATIONS, MAX_TOKENS = 3, 40, 8, 8, 12
FOLDER, LOSS = Path("runs/routing_replay"), LossConfig(name="dapo")
COLUMNS = ("sampler_logprob_diff_mean", "sampler_logprob_diff_max", "rerouted_fraction")
SHAPE = jaxft.model_preset("qwen3-176k-a47k")


async def collect(policy: Policy, epoch: int) -> list[list[Trajectory]]:
    """Sample a group of answers to each prompt, and score them."""

    async def answer(prompt: int, generation: int) -> Trajectory:
        ids = tuple(policy.tokenizer(f"number {prompt}?", add_special_tokens=False)["input_ids"])
        request = Request(ids, (epoch, prompt, generation, 0, 0, 0), MAX_TOKENS)
        completion = await policy.engine.submit(request)
        text = policy.tokenizer.decode(completion.token_ids)
        call = Call(0, "policy", (), Prompt("", ids), Reply(text, completion))
        reward = sum(character.isdigit() for character in text) / len(text) if text else 0.0
        return Trajectory(episode=[], reward=reward, sequences=token_sequences([call]), generation=generation)

    group = range(GENERATIONS)
    return [await asyncio.gather(*(answer(prompt, each) for each in group)) for prompt in range(PROMPTS)]


async def train(replays: bool, seed: int) -> dict[str, float]:
    """Return the mean metrics of a run, and its reward in the last ten epochs."""
    tokenizer, key = jaxft.load_tokenizer(), jax.random.key(seed)
    sampler, params = jaxft.init_model(SHAPE, key, compute_dtype="bfloat16")
    trainer, _ = jaxft.init_model(SHAPE, key)
    optimizer = OptimizerConfig(learning_rate=3e-3, b2=0.99)
    learner = Learner(
        trainer, LOSS, optimizer, num_minibatches=4, routing_replay=replays, max_disagreeing_fraction=1.0, seed=seed
    )
    stop, rewards, history = tokenizer.eos_token_id, [], []
    with closing(Policy(sampler, params, tokenizer, stop_ids=(stop,), seed=seed, max_context_tokens=64)) as policy:
        for epoch in range(EPOCHS):
            groups = await collect(policy, epoch)
            rows = [Row(each.sequences[0], i) for i, each in enumerate(t for group in groups for t in group)]
            credit = collect_rewards(groups, LOSS)
            history.append(await policy.update(lambda now, of=(rows, credit): learner.learn(*of, now)))
            rewards.append(np.mean([each.reward for group in groups for each in group]))
    metrics = {name: [each.get(name, 0.0) for each in history] for name in COLUMNS}
    means = {name: float(np.max(x) if name.endswith("_max") else np.mean(x)) for name, x in metrics.items()}
    return means | {"reward": float(np.mean(rewards[-10:]))}


def main() -> None:
    """Run both, and print a table."""
    results = {
        name: [asyncio.run(train(replays, seed)) for seed in range(SEEDS)]
        for name, replays in {"replay": True, "no replay": False}.items()
    }
    FOLDER.mkdir(parents=True, exist_ok=True)
    (FOLDER / "result.json").write_text(json.dumps(results, indent=2) + "\n")
    print(f"{'':<10}" + "".join(f"{each:>28}" for each in (*COLUMNS, "reward")))
    for name, runs in results.items():
        means = "".join(f"{np.mean([run[each] for run in runs]):>28.5f}" for each in (*COLUMNS, "reward"))
        print(f"{name:<10}{means}  {[round(run['reward'], 3) for run in runs]}")


if __name__ == "__main__":
    main()
