"""Tunix's side of a comparison: its sampler and the train step of its GRPO, with its own Qwen3.

    PYTHONPATH=benchmarks python benchmarks/peers/tunix_side.py work.json result.json

Float32, everything compiled in the warm-up, the cache no longer than the work. Its sampler returns log-probabilities
when asked to; its GRPO learner does not ask unless told, and neither does this.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from tunix.generate.sampler import CacheConfig, Sampler
from tunix.models.qwen3.model import ModelConfig, Qwen3, RematConfig
from tunix.rl import (
    algo_core,  # noqa: F401  registers the loss
    function_registry,
)
from tunix.rl.grpo.grpo_learner import GRPOConfig, TrainExample
from tunix.rl.trainer import Trainer
from tunix.sft.peft_trainer import TrainingConfig

from protocol import (
    LEARNING_RATE,
    MAX_GRAD_NORM,
    WEIGHT_DECAY,
    Work,
    batches_of_slots,
    check_counts,
    count_rows,
    main,
    make_prompts,
    make_training_rows,
    measure,
)

MICROBATCH_ROWS = 8
"""As fast as 16 on two CPU cores, twice as fast as 64, of the least memory; `compare.py --microbatch-rows` sets it."""
NO_LOGPROBS = "returns tokens only, as its learner asks by default"


class Words:
    """Tokenizer for the sampler: a text is ids with spaces between them.

    The ids that pad and end lie beyond the vocabulary, so that neither is ever sampled.
    """

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size

    def encode(self, text: str) -> list[int]:
        return [int(word) for word in text.split()]

    def decode(self, ids: list[int]) -> str:
        return " ".join(map(str, ids))

    def bos_id(self) -> int:
        return 0  # none: the sampler adds only what is not 0

    def pad_id(self) -> int:
        return self.vocab_size

    def eos_id(self) -> int:
        return self.vocab_size + 1


def make_model(work: Work) -> Qwen3:
    """A Qwen3 of random weights."""
    shape = work["shape"]
    config = ModelConfig(
        num_layers=shape["num_layers"],
        vocab_size=shape["vocab_size"],
        embed_dim=shape["hidden_size"],
        hidden_dim=shape["intermediate_size"],
        num_heads=shape["num_heads"],
        head_dim=shape["head_dim"],
        num_kv_heads=shape["num_kv_heads"],
        rope_theta=1_000_000,
        norm_eps=1e-6,
        use_tied_embedding=shape["tie_word_embeddings"],
        remat_config=RematConfig.NONE,
        dtype=jnp.float32,
        param_dtype=jnp.float32,
    )
    model = Qwen3(config, rngs=nnx.Rngs(work["seed"]))
    # The feed-forward layers are made as zeros, which would leave them without a gradient.
    projections = [p for layer in model.layers for p in (layer.mlp.gate_proj, layer.mlp.up_proj, layer.mlp.down_proj)]
    for projection, key in zip(projections, jax.random.split(jax.random.key(1), len(projections)), strict=True):
        projection.kernel.set_value(0.02 * jax.random.normal(key, projection.kernel.get_value().shape))
    return model


def make_sampler(work: Work, new_tokens: int) -> Sampler:
    """A sampler whose cache holds a prompt and `new_tokens`."""
    shape, length = work["shape"], work["prompt_tokens"] + new_tokens
    cache = CacheConfig(length, shape["num_layers"], shape["num_kv_heads"], shape["head_dim"])
    return Sampler(make_model(work), Words(shape["vocab_size"]), cache)


def sample(work: Work, sampler: Sampler, texts: list[str], new_tokens: int, seed: int) -> list[int]:
    """Sample, and return the number of tokens of each row."""
    output = sampler(
        texts,
        max_generation_steps=new_tokens,
        max_prompt_length=work["prompt_tokens"],
        temperature=1.0,
        top_p=1.0,
        top_k=None,
        return_logprobs=False,
        seed=seed,
    )
    return [len(row) for row in output.tokens]


def rollout(work: Work) -> dict[str, Any]:
    """Sample every prompt once per generation."""
    sampler = make_sampler(work, work["new_tokens"])
    texts = [" ".join(map(str, prompt)) for prompt in make_prompts(work) for _ in range(work["generations"])]

    def run(repeat: int) -> None:
        counts = sample(work, sampler, texts, work["new_tokens"], repeat)
        check_counts(counts, [work["new_tokens"]] * count_rows(work))

    notes = [NO_LOGPROBS, "prefills each generation's prompt anew"]
    return measure(work, run) | {"notes": notes}


def heavy_tailed(work: Work) -> dict[str, Any]:
    """Sample batches in order, each to its longest answer."""
    sampler = make_sampler(work, max(work["answer_tokens"]))
    texts = [" ".join(map(str, prompt)) for prompt in make_prompts(work)]

    def run(repeat: int) -> None:
        for batch in batches_of_slots(work):
            steps = max(work["answer_tokens"][n] for n in batch)
            counts = sample(work, sampler, [texts[n] for n in batch], steps, repeat)
            check_counts(counts, [steps] * len(batch))

    notes = [
        "batches in order, each given its longest answer (compiled in the warm-up): no row has a limit of its own",
        "the cache has room for the longest",
        NO_LOGPROBS,
    ]
    return measure(work, run) | {"notes": notes}


def make_trainer(work: Work, rows: int) -> Trainer:
    """The trainer as the GRPO learner makes it, for a given batch."""
    algorithm = GRPOConfig(num_generations=work["generations"], beta=0.0)
    algorithm.temperature = 1.0
    loss = function_registry.get_policy_loss_fn(algorithm.policy_loss_fn)
    words = Words(work["shape"]["vocab_size"])
    optimizer = optax.chain(
        optax.clip_by_global_norm(MAX_GRAD_NORM), optax.adamw(LEARNING_RATE, weight_decay=WEIGHT_DECAY)
    )
    parts = count_rows(work) // rows
    config = TrainingConfig(eval_every_n_steps=1, gradient_accumulation_steps=parts if parts > 1 else None)
    trainer = Trainer(make_model(work), optimizer, config, custom_checkpoint_metadata_fn=dict)
    trainer.with_loss_fn(
        lambda model, train_example, algo_config: loss(
            model, train_example, algo_config=algorithm, pad_id=words.pad_id(), eos_id=words.eos_id()
        ),
        has_aux=True,
    )
    trainer.with_gen_model_input_fn(lambda example: {"train_example": example, "algo_config": algorithm})
    trainer.with_rl_metrics_to_log({"kl": np.mean, "pg_clipfrac": np.mean, "entropy": np.mean})
    trainer.is_managed_externally = True  # as under a learner: `train` may be called again
    return trainer


def update(work: Work) -> dict[str, Any]:
    """Run the trainer's `train` on the microbatches of one optimiser step."""
    rows = min(work["microbatch_rows"] or MICROBATCH_ROWS, count_rows(work))
    trainer = make_trainer(work, rows)
    initial = jax.tree.map(np.array, jax.device_get(nnx.state(trainer.model, nnx.Param)))
    tokens, advantages = make_training_rows(work)
    prompts, completions = np.split(tokens.astype(np.int32), [work["prompt_tokens"]], axis=1)
    parts = [
        TrainExample(
            prompt_ids=jnp.array(prompts[start : start + rows]),
            prompt_mask=jnp.ones((rows, prompts.shape[1]), bool),
            completion_ids=jnp.array(completions[start : start + rows]),
            completion_mask=jnp.ones((rows, completions.shape[1]), bool),
            advantages=jnp.array(advantages[start : start + rows]),
            ref_per_token_logps=None,
            old_per_token_logps=None,
        )
        for start in range(0, count_rows(work), rows)
    ]

    def run(repeat: int) -> None:
        trainer.train(parts)
        jax.block_until_ready(nnx.state(trainer.model, nnx.Param))

    measured = measure(work, run)
    final = jax.device_get(nnx.state(trainer.model, nnx.Param))
    same = jax.tree.leaves(jax.tree.map(lambda old, new: bool((old == np.asarray(new)).all()), initial, final))
    if trainer.train_steps != work["repeats"] + 1 or any(same):
        raise RuntimeError(f"after {trainer.train_steps} steps {sum(same)} of {len(same)} parameters are as they were")
    notes = [f"{rows} rows at a time, nothing recomputed", "logits of prompts are computed too"]
    return measured | {"metrics": ["entropy", "grad_norm", "kl", "loss", "pg_clipfrac"], "notes": notes}


if __name__ == "__main__":
    cases = {"rollout": rollout, "heavy_tailed": heavy_tailed, "update": update}
    main("tunix", ("google-tunix", "jax", "jaxlib", "flax", "optax", "numpy"), cases)
