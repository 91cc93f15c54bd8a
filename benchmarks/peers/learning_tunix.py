"""Tunix's side of `compare.py learning`: its GRPOLearner on the given checkpoint, with its own Qwen3 and sampler.

PYTHONPATH=benchmarks python benchmarks/peers/learning_tunix.py work.json result.json

Its sampler begins with the same random key at every call unless it is told another; here each step has its own. Its
loss is the mean over the tokens of a microbatch, here one group, and that of the other sides over the tokens of a step.
"""

import logging
import random
import time
import warnings
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from transformers import AutoConfig, AutoTokenizer
from tunix.models.qwen3.model import ModelConfig, Qwen3, RematConfig
from tunix.models.qwen3.params import create_model_from_safe_tensors
from tunix.rl.grpo.grpo_learner import GRPOConfig, GRPOLearner
from tunix.rl.rl_cluster import ClusterConfig, Mode, RLCluster, RLTrainingConfig, Role
from tunix.rl.rollout.base_rollout import RolloutConfig

from alphabet import NEW_TOKENS, WARMUP, read_questions, reward
from protocol import Work, main

STARTED = time.perf_counter()
MICROBATCH_PROMPTS, PROMPT_TOKENS = 1, 8
"""Questions whose answers are trained at a time, as many rows as `tunix_side.py` has, and room for a question."""


def load_model(path: str, mesh: jax.sharding.Mesh) -> Qwen3:
    """The policy of a checkpoint folder."""
    shape = AutoConfig.from_pretrained(path)
    config = ModelConfig(
        num_layers=shape.num_hidden_layers,
        vocab_size=shape.vocab_size,
        embed_dim=shape.hidden_size,
        hidden_dim=shape.intermediate_size,
        num_heads=shape.num_attention_heads,
        head_dim=shape.head_dim,
        num_kv_heads=shape.num_key_value_heads,
        rope_theta=1_000_000,
        norm_eps=shape.rms_norm_eps,
        use_tied_embedding=True,
        remat_config=RematConfig.NONE,
        dtype=jnp.float32,
        param_dtype=jnp.float32,
    )
    return create_model_from_safe_tensors(path, config, mesh, dtype=jnp.float32)


class Curve:
    """Feeds the questions, and between steps scores greedy answers to held-out ones with the clock stopped.

    The learner asks for the questions of a step when it has made the update before.
    """

    def __init__(self, work: Work, tokenizer: Any, rollouts: dict[Mode, RolloutConfig], cluster: RLCluster) -> None:
        self.work, self.tokenizer, self.rollouts, self.cluster = work, tokenizer, rollouts, cluster
        self.held_out, self.train = read_questions(work["held_out"]), read_questions(work["train"])
        self.rows: list[dict[str, Any]] = []
        self.paused = 0.0

    def prompts(self, asked: list[str]) -> list[str]:
        """Questions as text in the chat template."""
        chats = [[{"role": "user", "content": each}] for each in asked]
        return self.tokenizer.apply_chat_template(chats, add_generation_prompt=True, tokenize=False)

    def batches(self) -> Iterator[dict[str, Any]]:
        """The questions of each step, until the target is reached."""
        draw, keys = random.Random(self.work["seed"]), jax.random.key(self.work["seed"])
        for step in range(self.work["steps"] + 1):
            if step % self.work["evaluate_every"] == 0:
                self._add(step)
                if self.rows[-1]["score"] >= self.work["target"]:
                    return
            if step == self.work["steps"]:
                return
            count = self.work["prompts"]
            if step * count % len(self.train) < count:
                draw.shuffle(self.train)
            asked = [self.train[(step * count + place) % len(self.train)] for place in range(count)]
            self.rollouts[Mode.TRAIN].seed = jax.random.key_data(jax.random.fold_in(keys, step))
            yield {"prompts": self.prompts(asked), "asked": asked}

    def rewards(self, prompts: list[str], completions: list[str], asked: list[str], **unused: Any) -> list[float]:
        """The reward of each answer."""
        return [reward(each, self.said(text)) for each, text in zip(asked, completions, strict=True)]

    def said(self, text: str) -> str:
        """An answer without what ends it."""
        return text.partition(self.tokenizer.eos_token)[0]

    def _add(self, step: int) -> None:
        began = time.perf_counter()
        row = {"step": step, "episodes": step * self.work["prompts"] * self.work["generations"]}
        row["seconds"] = began - STARTED - self.paused
        answers = self.cluster.generate(self.prompts(self.held_out), mode=Mode.EVAL).text
        row["score"] = float(np.mean(self.rewards([], answers, self.held_out)))
        self.rows.append(row)
        self.paused += time.perf_counter() - began


def learning(work: Work) -> dict[str, Any]:
    """Train to the target; seconds count from the start of the process, without the looks."""
    tokenizer = AutoTokenizer.from_pretrained(work["checkpoint"])
    mesh = jax.sharding.Mesh(np.array(jax.devices()).reshape(-1, 1), ("fsdp", "tp"))
    room = dict(
        max_tokens_to_generate=NEW_TOKENS,
        max_prompt_length=PROMPT_TOKENS,
        kv_cache_size=PROMPT_TOKENS + NEW_TOKENS,
    )
    rollouts = {  # without `top_p` its sampler is greedy
        Mode.TRAIN: RolloutConfig(temperature=1.0, top_p=1.0, **room),
        Mode.EVAL: RolloutConfig(top_p=None, **room),
    }
    rate = optax.join_schedules(
        [optax.linear_schedule(0.0, work["learning_rate"], WARMUP), optax.constant_schedule(work["learning_rate"])],
        [WARMUP],
    )
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(rate, weight_decay=0.0))
    training = RLTrainingConfig(
        actor_optimizer=optimizer,
        max_steps=work["steps"] + 1,  # the questions end before
        eval_every_n_steps=work["steps"] + 1,
        mini_batch_size=work["prompts"],
        train_micro_batch_size=MICROBATCH_PROMPTS,
        rollout_micro_batch_size=work["prompts"],
    )
    cluster = RLCluster(
        actor=load_model(work["checkpoint"], mesh),
        tokenizer=tokenizer,
        cluster_config=ClusterConfig(
            role_to_mesh=dict.fromkeys((Role.ACTOR, Role.ROLLOUT, Role.REFERENCE), mesh),
            training_config=training,
            rollout_config=rollouts,
        ),
    )
    curve = Curve(work, tokenizer, rollouts, cluster)
    algorithm = GRPOConfig(num_generations=work["generations"], beta=0.0, loss_agg_mode="token-mean")
    GRPOLearner(cluster, algorithm, reward_fns=curve.rewards).train(curve.batches())
    rows = MICROBATCH_PROMPTS * work["generations"]
    return {"curve": curve.rows, "seconds": curve.rows[-1]["seconds"], "notes": [f"{rows} rows at a time"]}


if __name__ == "__main__":
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    main("tunix", ("google-tunix", "jax", "jaxlib", "flax", "optax", "numpy"), {"learning": learning})
