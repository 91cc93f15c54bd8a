"""TRL's side of `compare.py learning`: its GRPOTrainer on the given checkpoint.

PYTHONPATH=benchmarks python benchmarks/peers/learning_trl.py work.json result.json
"""

import json
import logging
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from protocol import Work, main

STARTED = time.perf_counter()
MICROBATCH_ROWS = 64


def reward(completions: list[Any], answer: list[str], **unused: Any) -> list[float]:
    """1 for the right answer, and 0.1 for a number, as in arithmetic.py."""
    return [score(messages[0]["content"], expected) for messages, expected in zip(completions, answer, strict=True)]


def score(said: str, expected: str) -> float:
    """The reward of one answer."""
    return float(said == expected) + 0.1 * (said.isascii() and said.isdigit())


def read(path: str) -> list[dict[str, Any]]:
    """The rows of a data file, as chats."""
    rows = map(json.loads, Path(path).read_text().splitlines())
    return [{"prompt": [{"role": "user", "content": row["question"]}], "answer": row["answer"]} for row in rows]


class Curve(TrainerCallback):
    """Scores greedy answers to held-out questions, and stops the clock meanwhile."""

    def __init__(self, work: Work, model: Any, tokenizer: Any) -> None:
        self.work, self.model, self.tokenizer = work, model, tokenizer
        self.held_out, self.rows = read(work["held_out"]), []
        self.paused = 0.0

    def on_train_begin(self, args: Any, state: Any, control: Any, **unused: Any) -> None:
        self._add(0)

    def on_step_end(self, args: Any, state: Any, control: Any, **unused: Any) -> None:
        if state.global_step % self.work["evaluate_every"] == 0:
            self._add(state.global_step)

    def _add(self, step: int) -> None:
        began = time.perf_counter()
        row = {"step": step, "episodes": step * self.work["prompts"] * self.work["generations"]}
        row["seconds"] = began - STARTED - self.paused
        self.rows.append(row | {"score": self._score()})
        self.paused += time.perf_counter() - began

    @torch.no_grad()
    def _score(self) -> float:
        chats = [row["prompt"] for row in self.held_out]
        texts = self.tokenizer.apply_chat_template(chats, add_generation_prompt=True, tokenize=False)
        inputs = self.tokenizer(texts, return_tensors="pt", padding=True, padding_side="left", add_special_tokens=False)
        inputs = {name: inputs[name] for name in ("input_ids", "attention_mask")}
        was_training = self.model.training
        self.model.eval()
        rows = self.model.generate(**inputs, do_sample=False, max_new_tokens=self.work["new_tokens"])
        self.model.train(was_training)
        ends = self.tokenizer.eos_token_id
        scores = []
        for ids, row in zip(rows[:, inputs["input_ids"].shape[1] :].tolist(), self.held_out, strict=True):
            said = self.tokenizer.decode(ids[: ids.index(ends)]) if ends in ids else ""
            scores.append(score(said, row["answer"]))
        return sum(scores) / len(scores)


def learning(work: Work) -> dict[str, Any]:
    """Train; seconds count from the start of the process, without the evaluations."""
    torch.set_num_threads(work["threads"])
    tokenizer = AutoTokenizer.from_pretrained(work["checkpoint"])
    model = AutoModelForCausalLM.from_pretrained(work["checkpoint"], dtype=torch.float32)
    rows = work["prompts"] * work["generations"]
    with tempfile.TemporaryDirectory() as folder:
        config = GRPOConfig(
            output_dir=folder,
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            per_device_train_batch_size=MICROBATCH_ROWS,
            gradient_accumulation_steps=rows // MICROBATCH_ROWS,
            num_generations=work["generations"],
            max_completion_length=work["new_tokens"],
            max_steps=work["steps"],
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            beta=0.0,
            loss_type="dapo",
            epsilon_high=0.28,
            learning_rate=work["learning_rate"],
            weight_decay=0.0,
            max_grad_norm=1.0,
            lr_scheduler_type="constant",
            seed=work["seed"],
            report_to="none",
            save_strategy="no",
            logging_steps=100,
            disable_tqdm=True,
        )
        curve = Curve(work, model, tokenizer)
        trainer = GRPOTrainer(
            model=model,
            reward_funcs=reward,
            args=config,
            train_dataset=Dataset.from_list(read(work["train"])),
            processing_class=tokenizer,
            callbacks=[curve],
        )
        trainer.train()
    return {"curve": curve.rows, "seconds": curve.rows[-1]["seconds"], "notes": [f"{MICROBATCH_ROWS} rows at a time"]}


if __name__ == "__main__":
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    main("trl", ("trl", "torch", "transformers", "accelerate", "numpy"), {"learning": learning})
