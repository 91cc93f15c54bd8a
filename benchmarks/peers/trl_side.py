"""TRL's side of a comparison: the steps of its GRPO trainer, `GRPOTrainer.train()`.

    PYTHONPATH=benchmarks python benchmarks/peers/trl_side.py work.json result.json

A step is timed from the trainer's own `on_step_begin` to `on_step_end`: microbatches, clipping and AdamW, and for
`epoch` generation and rewards before them. For `update` the trainer is handed a batch where it would generate one.
"""

import logging
import tempfile
import time
import warnings
from typing import Any

import torch
from datasets import Dataset
from transformers import TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from protocol import (
    LEARNING_RATE,
    MAX_GRAD_NORM,
    WEIGHT_DECAY,
    Work,
    check_counts,
    count_rows,
    even_share,
    main,
    make_prompts,
    make_training_rows,
)
from qwen3_torch import as_text, make_model, make_tokenizer
from timing import peak_resident_bytes

MICROBATCH_ROWS = 8
"""As fast as 16 on two CPU cores, faster than 64, of the least memory; `compare.py --microbatch-rows` sets it."""


class Stopwatch(TrainerCallback):
    """Seconds of each optimiser step."""

    def __init__(self) -> None:
        self.seconds: list[float] = []

    def on_step_begin(self, args: Any, state: Any, control: Any, **unused: Any) -> None:
        self.started = time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, **unused: Any) -> None:
        self.seconds.append(time.perf_counter() - self.started)


class GivenBatch(GRPOTrainer):
    """The trainer on a given batch, which it does not generate and score."""

    given: dict[str, torch.Tensor]

    def _generate_and_score_completions(self, inputs: Any) -> dict[str, torch.Tensor]:
        return dict(self.given)


def reward(completion_ids: list[list[int]], **unused: Any) -> list[float]:
    """The reward of `epoch`, from the ids."""
    return even_share(completion_ids)


def make_trainer(work: Work, kind: type[GRPOTrainer], folder: str) -> GRPOTrainer:
    """A trainer whose every optimiser step is one pass over all generations of all prompts."""
    rows = min(work["microbatch_rows"] or MICROBATCH_ROWS, count_rows(work))
    config = GRPOConfig(
        output_dir=folder,
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        per_device_train_batch_size=rows,
        gradient_accumulation_steps=count_rows(work) // rows,
        num_generations=work["generations"],
        max_completion_length=work["new_tokens"],
        max_steps=work["repeats"] + 1,
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        beta=0.0,
        loss_type="grpo",
        learning_rate=LEARNING_RATE,
        weight_decay=WEIGHT_DECAY,
        max_grad_norm=MAX_GRAD_NORM,
        lr_scheduler_type="constant",
        report_to="none",
        save_strategy="no",
        logging_steps=1,
        disable_tqdm=True,
    )
    return kind(
        model=make_model(work),
        reward_funcs=reward,
        args=config,
        train_dataset=Dataset.from_dict({"prompt": [as_text(prompt) for prompt in make_prompts(work)]}),
        processing_class=make_tokenizer(work),
    )


def train(work: Work, trainer: GRPOTrainer) -> dict[str, Any]:
    """Train; the first step is the warm-up.

    Raises:
        RuntimeError: a loss is not finite, a parameter was left as it was, or rows are shorter than asked for.
    """
    stopwatch, before = Stopwatch(), peak_resident_bytes()
    initial = [parameter.detach().clone() for parameter in trainer.model.parameters()]
    trainer.add_callback(stopwatch)
    trainer.train()
    if torch.get_num_threads() != work["threads"]:
        raise RuntimeError(f"torch used {torch.get_num_threads()} threads, not {work['threads']}")
    steps = [entry for entry in trainer.state.log_history if "loss" in entry]
    if not all(torch.isfinite(torch.tensor([entry["loss"], entry["grad_norm"]])).all() for entry in steps):
        raise RuntimeError(f"a loss is not finite: {steps}")
    if any(torch.equal(old, new) for old, new in zip(initial, trainer.model.parameters(), strict=True)):
        raise RuntimeError("parameters did not change")
    if "completions/min_length" in steps[0]:
        check_counts([round(entry["completions/min_length"]) for entry in steps], [work["new_tokens"]] * len(steps))
    rows = trainer.args.per_device_train_batch_size
    return {
        "peak_bytes_before": before,
        "warm_up_seconds": stopwatch.seconds[0],
        "seconds": stopwatch.seconds[1:],
        "metrics": sorted(steps[-1]),
        "notes": [f"{rows} rows at a time, without gradient checkpointing"],
    }


def update(work: Work) -> dict[str, Any]:
    """Run the trainer's step on a given batch."""
    with tempfile.TemporaryDirectory() as folder:
        trainer = make_trainer(work, GivenBatch, folder)
        tokens, advantages = make_training_rows(work)
        prompts, completions = torch.tensor(tokens).split([work["prompt_tokens"], work["new_tokens"]], dim=1)
        trainer.given = {
            "prompt_ids": prompts,
            "prompt_mask": torch.ones_like(prompts),
            "completion_ids": completions,
            "completion_mask": torch.ones_like(completions),
            "advantages": torch.tensor(advantages),
            "num_items_in_batch": torch.tensor(completions.numel()),
        }
        return train(work, trainer)


def epoch(work: Work) -> dict[str, Any]:
    """Run the trainer's whole step: generation with `generate`, rewards, update."""
    with tempfile.TemporaryDirectory() as folder:
        measured = train(work, make_trainer(work, GRPOTrainer, folder))
    return measured | {"notes": [*measured["notes"], "decodes the texts too", "samples with transformers' generate"]}


if __name__ == "__main__":
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    main("trl", ("trl", "torch", "transformers", "accelerate", "numpy"), {"update": update, "epoch": epoch})
