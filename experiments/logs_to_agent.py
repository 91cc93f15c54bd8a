"""One agent from its logs to preferences to rewards: supervised finetuning, then DPO, then GRPO, each on the last.

    python experiments/logs_to_agent.py

The agent adds two numbers. Its logs are careless: right one time in four, otherwise ten or one too high. A reviewer
has compared two answers to 400 of the questions. At last a reward says which answers are right. Four to eight minutes
on two CPU cores, by what else they do. The greedy answers to 500 held-out questions are right more often after each
step; seed 0: 0.242 after the logs, 0.762 after the preferences, 0.906 after the rewards.

    python experiments/logs_to_agent.py --out runs/logs --seed 1
"""

import argparse
import json
import random
import sys
from pathlib import Path

import jax
import numpy as np
from arithmetic import HELD_OUT, careless_answer

import jaxft

TRAIN = HELD_OUT.with_name("arithmetic_train.jsonl")
MAX_TOKENS = 5
"""Three digits, the end, and one to spare."""


def asked(question: str) -> list[dict[str, str]]:
    """Return the messages that ask a question."""
    return [{"role": "user", "content": question}]


def answered(number: int) -> list[dict[str, str]]:
    """Return the messages of an answer."""
    return [{"role": "assistant", "content": str(number)}]


def exact(completions, answer, **kwargs):
    """Reward 1 for the right answer, and 0.1 for any number."""
    said = [each[0]["content"] for each in completions]
    return [float(each == right) + 0.1 * each.isdigit() for each, right in zip(said, answer, strict=True)]


def share_right(folder: Path) -> float:
    """Return the share of greedy answers to the held-out questions that are right."""
    model, params = jaxft.load_model(folder)
    tokenizer = jaxft.load_tokenizer(folder)
    items = jaxft.load_jsonl(HELD_OUT)
    chats = [asked(item.input_obj) for item in items]
    prompts = [tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False) for chat in chats]
    stop = tokenizer.eos_token_id
    made = jaxft.generate(
        model, params, prompts, jax.random.key(0), max_new_tokens=MAX_TOKENS, temperature=0.0, stop_ids=(stop,)
    )
    ids, masks = np.asarray(made.tokens), np.asarray(made.completion_mask)
    said = [
        tokenizer.decode([token for token in row[mask] if token != stop]) for row, mask in zip(ids, masks, strict=True)
    ]
    return sum(text == item.expected_output_obj for text, item in zip(said, items, strict=True)) / len(items)


def main() -> int:
    """Train three times, and write the shares of right answers."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/logs_to_agent"), help="folder of the three runs")
    parser.add_argument("--seed", type=int, default=0, help="seed of data and training (default %(default)s)")
    parser.add_argument("--shrink", type=int, default=1, help="divides the number of updates, for a test")
    arguments = parser.parse_args()
    draw, seed, folder = random.Random(arguments.seed), arguments.seed, arguments.out
    sums = [(item.input_obj, int(item.expected_output_obj)) for item in jaxft.load_jsonl(TRAIN)]
    draw.shuffle(sums)

    logs = [
        {"messages": asked(question) + answered(careless_answer(draw, right))}
        for question, right in sums
        for _ in range(8)
    ]
    options = {"seed": seed, "rows_per_update": 128}
    first = jaxft.sft(
        "qwen3-1m",
        logs,
        num_updates=max(1, 300 // arguments.shrink),
        learning_rate=2e-3,
        output_dir=folder / "sft",
        **options,
    )
    shares = {"after_logs": share_right(first.model)}

    preferences = [
        {"prompt": asked(question), "chosen": answered(right), "rejected": answered(right + draw.choice((1, 10)))}
        for question, right in sums[:400]
    ]
    second = jaxft.dpo(
        first.model,
        preferences,
        num_updates=max(1, 12 // arguments.shrink),
        learning_rate=1e-4,
        output_dir=folder / "dpo",
        # Without a supervised part both answers get less likely, the chosen one, too.
        overrides={"trainer_adapters.local.loss.preference.sft_coef": 1.0},
        **options | {"rows_per_update": 64},
    )
    shares["after_preferences"] = share_right(second.model)

    third = jaxft.train(
        second.model,
        exact,
        [asked(question) for question, _ in sums],
        answer=[str(right) for _, right in sums],
        num_epochs=max(1, 40 // arguments.shrink),
        examples_per_update=64,
        learning_rate=1e-3,
        max_completion_length=MAX_TOKENS,
        seed=seed,
        output_dir=folder / "grpo",
    )
    shares["after_rewards"] = share_right(third.model)
    (folder / "result.json").write_text(json.dumps(shares, indent=2) + "\n")
    print(json.dumps(shares, indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
