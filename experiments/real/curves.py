"""`python experiments/real/curves.py` draws docs/recipes.png: the rewards of the seeds in experiments/references."""

import json
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np

ROOT = Path(__file__).parents[2]
TASKS = {
    "short_answers": "sums, the number alone",
    "shop": "a price, by a tool",
    "constraints": "two instructions",
}


def main() -> None:
    """Write the picture."""
    figure, panels = plt.subplots(1, len(TASKS), figsize=(10, 3), layout="constrained")
    for panel, (name, title) in zip(panels, TASKS.items(), strict=True):
        runs = json.loads((ROOT / "experiments" / "references" / f"{name}.json").read_text())["runs"]
        rewards = np.array([run["reward_mean"] for run in runs])
        epochs = np.arange(1, rewards.shape[1] + 1)
        panel.plot(epochs, rewards.T, color="tab:blue", alpha=0.35, linewidth=1)
        panel.plot(epochs, rewards.mean(0), color="tab:blue", linewidth=2)
        panel.set(title=f"{title}: {len(runs)} seeds", xlabel="epoch", ylabel="reward")
        panel.grid(alpha=0.3)
    figure.savefig(ROOT / "docs" / "recipes.png", dpi=110)


if __name__ == "__main__":
    main()
