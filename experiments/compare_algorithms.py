"""Runs arithmetic.py with seven losses in turn; prints a table and plots the reward of each.

    python experiments/compare_algorithms.py                # all; about 20 minutes on two CPU cores
    python experiments/compare_algorithms.py gspo ppo       # some

Every run starts from the same warm start (exact match 0.236 with seed 0) and ends above 0.8 on 500 held-out sums. With
one update per rollout the ratio is 1: dapo and cispo then have the same gradient, and so have grpo and gspo.
Writes result.json and reward_curves.png to runs/compare_algorithms, and replaces earlier results there.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

HERE = Path(__file__).parent

ALGORITHMS = {
    "grpo": {"name": "grpo"},
    "dapo": {"name": "dapo"},
    "dr_grpo": {"name": "dr_grpo", "max_completion_tokens": 5},
    "gspo": {"name": "gspo"},
    "cispo": {"name": "cispo"},
    "rloo": {"name": "reinforce", "advantages": "leave_one_out"},
    "ppo": {"name": "ppo"},
}
"""Fields of `loss` in arithmetic.yml that each algorithm sets."""


def run(name: str, folder: Path, seed: int) -> dict[str, float]:
    """Trains with one algorithm and returns its result."""
    command = [sys.executable, str(HERE / "arithmetic.py"), "--overwrite"]
    settings = {f"trainer_adapters.local.loss.{field}": value for field, value in ALGORITHMS[name].items()}
    settings |= {"finetuning.output_dir": folder / name, "finetuning.seed": seed}
    for field, value in settings.items():
        command += ["--set", f"{field}={value}"]
    subprocess.run(command, check=True)
    return json.loads((folder / name / "result.json").read_text())


def plot(folder: Path, names: list[str], width: int = 5) -> None:
    """Trailing means of the training reward over epochs; earlier lines lie on top, every second one is dashed."""
    figure, axes = plt.subplots(figsize=(8, 4.5), layout="constrained")
    for place, name in enumerate(names):
        history = json.loads((folder / name / "reward_history.json").read_text())
        rewards = [row["reward_mean"] for row in history]
        means = [sum(rewards[max(0, i + 1 - width) : i + 1]) / min(i + 1, width) for i in range(len(rewards))]
        axes.plot(range(1, len(means) + 1), means, ("-", "--")[place % 2], label=name, zorder=3 - place / 10)
    axes.set(xlabel="epoch", ylabel=f"training reward, mean of {width} epochs", title="arithmetic")
    axes.legend(ncols=2, frameon=False)
    axes.grid(alpha=0.3)
    figure.savefig(folder / "reward_curves.png", dpi=120)


def main() -> None:
    """Trains with the chosen algorithms, prints a table and writes it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("algorithms", nargs="*", metavar="NAME", help=f"some of {', '.join(ALGORITHMS)} (default: all)")
    parser.add_argument("--seed", type=int, default=0, help="seed of every run (default %(default)s)")
    parser.add_argument("--output_dir", type=Path, default=Path("runs/compare_algorithms"), help="default %(default)s")
    arguments = parser.parse_args()
    unknown = [name for name in arguments.algorithms if name not in ALGORITHMS]
    if unknown:
        parser.error(f"no algorithm {unknown[0]!r}; wanted some of {', '.join(ALGORITHMS)}")
    names = arguments.algorithms or list(ALGORITHMS)
    results = {name: run(name, arguments.output_dir, arguments.seed) for name in names}
    plot(arguments.output_dir, names)
    (arguments.output_dir / "result.json").write_text(json.dumps(results, indent=2) + "\n")
    print(f"\n{'algorithm':<10} {'warm start':>10} {'after':>8} {'seconds':>8}")
    for name, result in results.items():
        figures = (result["exact_match_warm_start"], result["exact_match_after"], result["seconds"])
        print("{:<10} {:>10.3f} {:>8.3f} {:>8.0f}".format(name, *figures))


if __name__ == "__main__":
    main()
