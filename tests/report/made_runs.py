"""Run directories made without training: every file that a run writes, from a seed, for the tests of reports."""

import json
import random
from pathlib import Path
from typing import Any

import yaml

WORDS = ("The", " sum", " of", " two", " and", " three", " is", " five", ".", "\n", " so", " I", " add", "\t", "é")
STOP = "<|im_end|>"

CONFIG: dict[str, Any] = {
    "llms": {"policy": {"_type": "local_policy", "path": None, "preset": "qwen3-1m"}},
    "trainer_adapters": {"local": {"_type": "local_trainer_adapter", "llm": "policy", "loss": {"name": "grpo"}}},
    "trainers": {"loop": {"_type": "grpo_trainer", "save_episodes": "all"}},
    "finetuning": {
        "trainer": "loop",
        "trainer_adapter": "local",
        "num_epochs": 40,
        "seed": 3,
        "curriculum_learning": {"enabled": True},
    },
}


def make_run(
    path: Path,
    *,
    epochs: int = 6,
    examples: int = 3,
    generations: int = 2,
    tokens: int = 8,
    has_ended: bool = True,
    seed: int = 0,
) -> Path:
    """Write a run directory whose files have every field, and return it; equal arguments write equal files."""
    draw = random.Random(seed)
    (path / "trajectories").mkdir(parents=True, exist_ok=True)
    config = json.loads(json.dumps(CONFIG)) | {}
    config["finetuning"]["num_epochs"] = epochs
    (path / "config.yml").write_text(yaml.safe_dump(config))
    write_json(path / "environment.json", ENVIRONMENT)
    metrics, timings, history, rewards, samples, scores = [], [], [], [], [], []
    for epoch in range(epochs):
        of_epoch: dict[str, list[float | None]] = {}
        for number in range(examples):
            example = f"example-{number}"
            for generation in range(generations):
                row, score = episode(draw, epoch, example, generation, tokens, level=epoch / epochs - number / examples)
                samples.append(row)
                scores.append(score)
                of_epoch.setdefault(example, []).append(row["reward"] if row["scorable"] else None)
        if epoch == 2:
            report = "example 'example-1', generation 9: ValueError: <b>no</b>\nTraceback: line 1"
            samples.append({"epoch": epoch, "failure": report})
        flat = [value for values in of_epoch.values() for value in values if value is not None]
        shares = {"curriculum_percentile": min(1.0, 0.3 + 0.2 * (epoch // 2)), "reward_mean_chosen": max(flat) / 2}
        bounds = {"reward_min": min(flat), "reward_max": max(flat)}
        quartiles = {"group_reward_q25": 0.1 + epoch / epochs / 2, "group_reward_q75": 0.4 + epoch / epochs / 2}
        means = {"reward_mean": sum(flat) / len(flat), **bounds, **quartiles, **shares}
        history.append({"epoch": epoch, **means})
        more = {
            "reward/correct": means["reward_mean"],
            "reward/brief": 0.25 + epoch / 8,
            "trained_reward_mean": 2 * means["reward_mean"],
        }
        metrics.append({"epoch": epoch, **means, **more, **_metrics(draw, epoch, epochs, len(flat))})
        timings.append({"epoch": epoch, **_timings(draw, epoch)})
        rewards.append({"epoch": epoch, "rewards": of_epoch})
    write_lines(path / "training_metrics.jsonl", metrics)
    write_lines(path / "timings.jsonl", timings)
    write_json(path / "reward_history.json", history)
    write_lines(path / "trajectories/rewards.jsonl", rewards)
    write_lines(path / "trajectories/samples.jsonl", samples)
    write_lines(path / "trajectories/token_scores.jsonl", scores)
    write_json(path / "validation_history.json", [_validation(epoch, epochs) for epoch in range(0, epochs + 1, 2)])
    of_examples = {f"example-{n}": {"reward_mean": n / 3, "reward_diff": 0.5, "epochs_included": n} for n in range(3)}
    write_json(path / "curriculum_state.json", {"current_percentile": 0.7, "examples": of_examples})
    resume = {"checkpoint": 2, "changes": {"finetuning.num_epochs": [4, epochs]}, "devices": ["cpu"]}
    write_lines(path / "resumes.jsonl", [resume])
    log = ["2026-01-02 03:04:05 jaxft 0.1.0: run.yml", "2026-01-02 03:04:06 WARNING jaxft: <i>careful</i>"]
    (path / "run.log").write_text("\n".join([*log, f"2026-01-02 03:04:07 {epochs}/{epochs} epochs  reward 0.5", ""]))
    if has_ended:
        result = {"win_rate": 0.75, "reward/brief_first": 0.25, "seed": 3, "seconds": 61.5, "versions": {}}
        write_json(path / "result.json", result)
    return path


ENVIRONMENT = {
    "versions": {"python": "3.11.7", "jaxft": "0.1.0", "jax": "0.10.2"},
    "devices": ["cpu (cpu 0)"],
    "command": ["jaxft", "finetune", "--config-file", "run.yml", "--set", "finetuning.seed=3"],
    "git_commit": "c2067cf0f84aeb5fbd8b5ac3df76f2c7410ba232",
    "chosen": {"llms.policy.dtype": "float32"},
    "resume_command": "jaxft resume runs/x",
    "differences": {"finetuning.seed": {"value": 3, "default": 0}, "workflow._type": {"value": "my_agent"}},
}


def episode(
    draw: random.Random, epoch: int, example: str, generation: int, tokens: int, level: float = 0.0
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return a row of samples.jsonl, an agent that calls a tool and then answers, and its row of token_scores.jsonl."""
    prompt = f"What is {draw.randrange(90)} + {draw.randrange(90)}?"
    half = max(tokens // 2, 2)
    call = ["look_up", "(", '"sum"', ")", STOP]
    answers = [
        [*(draw.choice(WORDS) for _ in range(max(half - len(call), 0))), *call],
        [*(draw.choice(WORDS) for _ in range(max(tokens - half - 1, 1))), STOP],
    ]
    texts: list[str] = []
    mask: list[bool] = []
    logprobs: list[float] = []
    turns: list[int] = []
    messages: list[dict[str, Any]] = [message("system", "You add numbers."), message("user", prompt)]
    for turn, answer in enumerate(answers):
        context = ["<|im_start|>", prompt if turn == 0 else "<tool result>", "\n"]
        sampled = [-round(draw.expovariate(1.2), 6) for _ in answer]
        texts += [*context, *answer]
        mask += [False] * len(context) + [True] * len(answer)
        logprobs += [0.0] * len(context) + sampled
        turns += [-1] * len(context) + [turn] * len(answer)
        messages.append(message("assistant", "".join(answer[:-1]), sampled))
        if turn == 0:
            messages.append(message("tool", '{"sum": 42}'))
    reward = round(min(1.0, max(0.0, draw.gauss(0.5 + level / 2, 0.3))), 2)
    is_cut, is_scorable = draw.random() < 0.2, draw.random() > 0.05
    sequence = {
        "tokens": list(range(len(texts))),
        "completion_mask": mask,
        "sampler_logprobs": logprobs,
        "behavior_logprobs": logprobs,
        "temperatures": [1.0] * len(texts),
        "policy_versions": [epoch if sampled else -1 for sampled in mask],
        "turns": turns,
        "truncated": is_cut,
        "episode_truncated": is_cut,
        "llm": "policy",
    }
    metadata = {"id": example, "generation": generation, "score": reward, "reasoning": f"expected {prompt}"}
    metadata["finish_reasons"] = ["stop", "length" if is_cut else "stop"]
    row = {
        "epoch": epoch,
        "episode": messages,
        "reward": reward if is_scorable else 0.0,
        "shaped_rewards": None,
        "metadata": metadata,
        "scorable": is_scorable,
        "named_rewards": {"correct": reward},
        "example_id": example,
        "generation": generation,
        "sequences": [sequence],
        "token_texts": [texts],
    }
    advantage = round(draw.gauss(0.0, 1.0), 5)
    score = {
        "epoch": epoch,
        "example_id": example,
        "generation": generation,
        "advantages": [[advantage if sampled else 0.0 for sampled in mask]],
        "entropies": [[round(draw.uniform(0.0, 3.0), 5) if sampled else 0.0 for sampled in mask]],
    }
    return row, score


def message(role: str, content: str, logprobs: list[float] | None = None) -> dict[str, Any]:
    """Return an item of an episode."""
    return {"role": role, "content": content, "logprobs": logprobs, "metadata": None}


def make_dpo_run(path: Path, *, pairs: int = 5) -> Path:
    """Write the directory of a run that trains on preference pairs, which has no epochs of episodes."""
    make_run(path, epochs=3)
    for name in ("samples.jsonl", "token_scores.jsonl", "rewards.jsonl"):
        (path / "trajectories" / name).unlink()
    rows = []
    for number in range(pairs):
        prompt = [{"role": "user", "content": "Which?"}]
        item = {"prompt": prompt, "chosen_response": "this", "rejected_response": "that"}
        rows.append(
            {
                "episode": [item],
                "reward": 0.5 + number,
                "shaped_rewards": None,
                "metadata": {"dpo_type": "preference_pair", "chosen_score": 1.5 + number, "rejected_score": 1.0},
                "scorable": True,
                "named_rewards": None,
                "example_id": f"question-{number}",
                "generation": 0,
                "sequences": None,
            }
        )
    write_lines(path / "trajectories/pairs.jsonl", rows)
    return path


def _metrics(draw: random.Random, epoch: int, epochs: int, episodes: int) -> dict[str, Any]:
    share = epoch / epochs
    return {
        "episodes": float(episodes),
        "failed_episodes": float(epoch == 2),
        "nonfinite_updates": 0.0,
        "curriculum_groups": 2,
        "curriculum_dropped_groups": epoch % 2,
        "loss": 0.1 * draw.random() - 0.05,
        "policy_loss": 0.1 * draw.random(),
        "entropy": 1.5 - share,
        "kl": 0.4 * share,
        "approx_kl": 0.001 * draw.random(),
        "clip_high_fraction": 0.01 * draw.random(),
        "clip_low_fraction": 0.0,
        "grad_norm": 0.3 + 0.1 * draw.random(),
        "completion_tokens_mean": 8.0 + draw.random(),
        "completion_tokens_max": 12,
        "sampler_logprob_diff_mean": 1e-7 * draw.random(),
        "sampler_logprob_diff_max": 2e-6 * draw.random(),
        "learning_rate": 1e-4 * (1 - share),
        "policy_version": epoch,
        "own/<metric>": draw.random(),
    }


def _timings(draw: random.Random, epoch: int) -> dict[str, Any]:
    rollout, update = 2 + draw.random(), (12.0 if epoch == 0 else 1.5) + draw.random()
    return {
        "seconds_rollout": rollout,
        "seconds_reward": 0.4,
        "tokens_per_second": 500 + 50 * draw.random(),
        "seconds_update": update,
        "compiles": 60 + 5 * (epoch > 0),
        "host_peak_bytes": 2**30 + epoch * 2**20,
        "seconds_checkpoint": 0.05,
        "seconds": rollout + update + 0.2,
    }


def _validation(epoch: int, epochs: int) -> dict[str, Any]:
    return {
        "epoch": epoch,
        "avg_reward": 0.3 + epoch / epochs / 2,
        "num_examples": 8,
        "num_failed": 0,
        "num_unscorable": 0,
        "first_error": None,
        "pass@1": 0.25,
        "pass@4": 0.5 + epoch / epochs / 4,
        "maj@4": 0.25 + epoch / epochs / 4,
        "reward/brief": 0.125,
        "level=hard/reward": 0.1875,
    }


def write_json(file: Path, value: Any) -> None:
    """Write a JSON file."""
    file.write_text(json.dumps(value, indent=2))


def write_lines(file: Path, rows: list[dict[str, Any]]) -> None:
    """Write a row of JSON per line, as `RunDirectory.append_jsonl` does."""
    text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    file.write_bytes(text.encode("utf-8", "backslashreplace"))
