"""TRL's side of `compare.py learning`: its GRPOTrainer on the given checkpoint.

PYTHONPATH=benchmarks python benchmarks/peers/learning_trl.py work.json result.json
"""

import logging
import tempfile
import time
import warnings
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from alphabet import NEW_TOKENS, WARMUP, read_questions, reward
from protocol import Work, main

STARTED = time.perf_counter()
MICROBATCH_ROWS = 64


def rewards(prompts: list[Any], completions: list[Any], **unused: Any) -> list[float]:
    """The reward of each answer."""
    asked = [messages[-1]["content"] for messages in prompts]
    return [reward(each, messages[0]["content"]) for each, messages in zip(asked, completions, strict=True)]


def chats(path: str) -> list[dict[str, Any]]:
    """The questions of a file, as chats."""
    return [{"prompt": [{"role": "user", "content": asked}]} for asked in read_questions(path)]


class Curve(TrainerCallback):
    """Scores greedy answers to held-out questions, stops the clock meanwhile, and ends the run at the target."""

    def __init__(self, work: Work, model: Any, tokenizer: Any) -> None:
        self.work, self.model, self.tokenizer = work, model, tokenizer
        self.held_out, self.rows = chats(work["held_out"]), []
        self.paused = 0.0

    def on_train_begin(self, args: Any, state: Any, control: Any, **unused: Any) -> None:
        self._add(0)

    def on_step_end(self, args: Any, state: Any, control: Any, **unused: Any) -> None:
        if state.global_step % self.work["evaluate_every"] == 0:
            self._add(state.global_step)
            control.should_training_stop = self.rows[-1]["score"] >= self.work["target"]

    def _add(self, step: int) -> None:
        began = time.perf_counter()
        row = {"step": step, "episodes": step * self.work["prompts"] * self.work["generations"]}
        row["seconds"] = began - STARTED - self.paused
        self.rows.append(row | {"score": self._score()})
        self.paused += time.perf_counter() - began

    @torch.no_grad()
    def _score(self) -> float:
        asked = [row["prompt"] for row in self.held_out]
        texts = self.tokenizer.apply_chat_template(asked, add_generation_prompt=True, tokenize=False)
        inputs = self.tokenizer(texts, return_tensors="pt", padding=True, padding_side="left", add_special_tokens=False)
        inputs = {name: inputs[name] for name in ("input_ids", "attention_mask")}
        was_training = self.model.training
        self.model.eval()
        rows = self.model.generate(**inputs, do_sample=False, max_new_tokens=NEW_TOKENS)
        self.model.train(was_training)
        ends = self.tokenizer.eos_token_id
        scores = []
        for ids, messages in zip(rows[:, inputs["input_ids"].shape[1] :].tolist(), asked, strict=True):
            said = self.tokenizer.decode(ids[: ids.index(ends)] if ends in ids else ids)
            scores.append(reward(messages[0]["content"], said))
        return sum(scores) / len(scores)


def learning(work: Work) -> dict[str, Any]:
    """Train to the target; seconds count from the start of the process, without the looks."""
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
            max_completion_length=NEW_TOKENS,
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
            lr_scheduler_type="constant_with_warmup",
            warmup_steps=WARMUP,
            seed=work["seed"],
            report_to="none",
            save_strategy="no",
            logging_steps=100,
            disable_tqdm=True,
        )
        curve = Curve(work, model, tokenizer)
        trainer = GRPOTrainer(
            model=model,
            reward_funcs=rewards,
            args=config,
            train_dataset=Dataset.from_list(chats(work["train"])),
            processing_class=tokenizer,
            callbacks=[curve],
        )
        trainer.train()
    return {"curve": curve.rows, "seconds": curve.rows[-1]["seconds"], "notes": [f"{MICROBATCH_ROWS} rows at a time"]}


if __name__ == "__main__":
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    main("trl", ("trl", "torch", "transformers", "accelerate", "numpy"), {"learning": learning})
