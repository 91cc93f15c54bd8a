"""Five troubles of RL finetuning, each provoked by a small run, and the same run mended by one setting.

    python experiments/trouble.py                      # all of them: about four minutes on two CPU cores
    python experiments/trouble.py entropy_collapse     # one

A tiny model of random weights answers to eight prompts. Both runs of a trouble have the same reward, seed and epochs;
their health lines and the metric that shows the trouble are printed side by side. At the end: entropy 0.001 nats and
reward 0.5, mended 1.0; and so on, as in the table of docs/trouble.md.
"""

import argparse
import re
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jaxft
from jaxft.components.health import TROUBLES

HEALTH = re.compile(f": ({'|'.join(TROUBLES)}): ")
LOSS, RATE = "trainer_adapters.local.loss", "trainer_adapters.local.optimizer.learning_rate"
PROMPTS = [f"number {i}?" for i in range(8)]


def trap(completion: str) -> float:
    """Up to 0.5 for a first character that is a digit, most for 7, which is often met; 1 for a q, which is not."""
    first = completion[:1]
    return 1.0 if first == "q" else 0.5 - 0.04 * abs(int(first) - 7) if first in "0123456789" and first else 0.0


def brief(completion: str) -> float:
    """1 for two characters or fewer."""
    return float(len(completion) <= 2)


def digits(completion: str) -> float:
    """The number of digits, of which four are enough."""
    return min(sum(character.isdigit() for character in completion), 4) / 4


def right(completion: str) -> float:
    """1 for a 7 with nothing before or after it."""
    return float(completion == "7")


def right_at_first(completion: str) -> float:
    """Half for an answer that begins with 7, half for one of one character."""
    return (completion[:1] == "7") / 2 + (len(completion) == 1) / 2


def long_winded(completion: str) -> float:
    """A tenth for every character."""
    return len(completion) / 10


def seven(completion: str) -> float:
    """1 for an answer that begins with 7."""
    return float(completion[:1] == "7")


class Scenario(NamedTuple):
    """A run that goes wrong.

    Attributes:
        reward: the reward, or several.
        arguments: arguments of `jaxft.train`.
        metric: the metric that shows the trouble.
        mended: fields of the configuration that mend it.
        provoked: fields that provoke it.
        before: reward that the model is trained with first, and the number of epochs.
    """

    reward: Any
    arguments: Mapping[str, Any]
    metric: str
    mended: Mapping[str, Any]
    provoked: Mapping[str, Any] = {}
    before: tuple[Any, int] | None = None


SCENARIOS: Mapping[str, Scenario] = {
    "entropy_collapse": Scenario(
        trap,
        {"num_epochs": 120, "learning_rate": 6e-2, "max_completion_length": 1},
        "entropy",
        {RATE: 1e-2},
    ),
    "length_growth": Scenario(
        digits,
        {"num_epochs": 60, "learning_rate": 1e-2, "max_completion_length": 32},
        "truncated_fraction",
        {f"{LOSS}.max_completion_tokens": 32, f"{LOSS}.overlong_buffer_tokens": 28},
        before=(brief, 60),
    ),
    "reward_hacking": Scenario(
        [right, long_winded],
        {"num_epochs": 60, "learning_rate": 1e-2, "max_completion_length": 16},
        "reward/right",
        {f"{LOSS}.reward_weights": {"right": 1, "long_winded": 0}},
        before=(right_at_first, 25),
    ),
    "stale_data": Scenario(
        digits,
        {"num_epochs": 40, "learning_rate": 1e-1, "max_completion_length": 32, "examples_per_update": 2},
        "effective_sample_fraction",
        {RATE: 2e-2},
        {"trainers.loop.max_staleness": 8},
    ),
    "no_signal": Scenario(
        seven,
        {"num_epochs": 40, "learning_rate": 3e-3, "max_completion_length": 1, "num_generations": 2},
        "no_signal_groups",
        {"trajectory_builders.rollouts.num_generations": 64},
    ),
}


def run(scenario: Scenario, fields: Mapping[str, Any], folder: Path) -> tuple[jaxft.TrainResult, list[str]]:
    """Train with these fields of the configuration; return the run and its health lines."""
    model: Any = "qwen3-50k"
    if scenario.before is not None:
        first = folder.parent / "before"
        if not first.exists():
            reward, epochs = scenario.before
            jaxft.train(model, reward, PROMPTS, output_dir=first, **{**scenario.arguments, "num_epochs": epochs})
        model = first / "model"
    try:
        jaxft.train(model, scenario.reward, PROMPTS, output_dir=folder, overrides=fields, **scenario.arguments)
    except jaxft.NoLearningSignal as error:
        print(error)
    lines = (folder / "run.log").read_text().splitlines()
    return jaxft.TrainResult(folder), [line.partition(" epoch_")[2] for line in lines if HEALTH.search(line)]


def main() -> int:
    """Provoke and mend the chosen troubles, and print what was seen."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("troubles", nargs="*", metavar="NAME", help=f"some of {', '.join(SCENARIOS)} (default: all)")
    parser.add_argument("--num-epochs", type=int, help="of every run, to try the script (default: each its own)")
    parser.add_argument("--output-dir", type=Path, default=Path("runs/trouble"), help="default %(default)s")
    arguments = parser.parse_args()
    seen: list[str] = []
    for name in arguments.troubles or SCENARIOS:
        scenario = SCENARIOS[name]
        if arguments.num_epochs is not None:
            scenario = scenario._replace(arguments={**scenario.arguments, "num_epochs": arguments.num_epochs})
        shutil.rmtree(arguments.output_dir / name, ignore_errors=True)
        for state, mended in (("provoked", {}), ("mended", scenario.mended)):
            result, lines = run(scenario, {**scenario.provoked, **mended}, arguments.output_dir / name / state)
            last = result.history[-1]
            seen.append(
                f"{name} {state}: {scenario.metric} {last[scenario.metric]:.3g}, reward {last['reward_mean']:.3f}"
            )
            seen += [f"    epoch {line}" for line in lines]
    print("\n".join(["", *seen]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
