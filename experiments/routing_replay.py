"""A mixture of experts learns sums, sampled in bfloat16: with routing replay (arXiv 2510.11370), and without.

    python experiments/routing_replay.py --seeds 3

The sampler decodes token by token and the trainer scores whole rows, so that their logits differ by rounding. Where two
experts are almost equally likely, a token then has other experts in the update than it was sampled with, and its
log-probability differs far more. Replay takes the sampler's experts. The task is that of arithmetic.py, with a policy
of 16 experts in each of 4 layers, of which a token has 2; each collection is trained in 4 updates.

The table has, for each setting, the mean difference of the log-probabilities of sampler and trainer in nats, the share
of (token, layer) pairs whose experts replay changes, the largest difference of a token, and the share of held-out sums
that are right: means over the seeds, and each seed's own of the last. Other options are those of arithmetic.py, as
`--jobs 2`. Some ten minutes for each run on two CPU cores. Writes result.json to runs/routing_replay.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np

import jaxft

HERE, FOLDER = Path(__file__).parent, Path("runs/routing_replay")
SETTINGS = {"replay": True, "no replay": False}
METRICS = ("sampler_logprob_diff_mean", "sampler_logprob_diff_max", "rerouted_fraction")


def make_start(folder: Path) -> None:
    """Write a checkpoint of random weights, with the embedded tokenizer."""
    tokenizer = jaxft.load_tokenizer()
    attention = jaxft.model_preset("qwen3-300k", vocab_size=len(tokenizer))
    (kind,) = attention.pattern
    experts = {"num_experts": 16, "num_experts_per_tok": 2, "moe_intermediate_size": 128, "norm_topk_prob": True}
    shape = {"family": "qwen3_moe", "num_layers": 4, "pattern": (kind._replace(has_experts=True),)}
    model, params = jaxft.init_model(attention.replace(**shape, **experts), jax.random.key(0))
    jaxft.save_model(folder, model, params)
    tokenizer.save_pretrained(folder)


def means(file: Path) -> dict[str, float]:
    """Return the means of a run's metrics over its epochs; the largest difference of a token over all of them."""
    epochs = [json.loads(line) for line in file.read_text().splitlines()]
    found: dict[str, list[float]] = {name: [each[name] for each in epochs if name in each] for name in METRICS}
    return {name: float(np.max(x) if name.endswith("_max") else np.mean(x)) for name, x in found.items() if x}


def main() -> int:
    """Trains with both settings and prints a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3, help="runs of each setting (default %(default)s)")
    arguments, others = parser.parse_known_args()
    start = FOLDER / "start"
    if not start.exists():
        make_start(start)
    runs: list[dict[str, Any]] = [
        {
            "llms.policy.preset": None,
            "llms.policy.path": str(start),
            "llms.policy.compute_dtype": "bfloat16",
            "trainer_adapters.local.routing_replay": replays,
            "trainer_adapters.local.num_minibatches": 4,
            "finetuning.num_epochs": 20,
            "finetuning.output_dir": f"{FOLDER}/{name}/{{seed}}",
        }
        for name, replays in SETTINGS.items()
    ]
    (FOLDER / "settings.yml").write_text(json.dumps(runs, indent=2) + "\n")
    sweep = [sys.executable, str(HERE / "arithmetic.py"), "--list", str(FOLDER / "settings.yml")]
    code = subprocess.run([*sweep, "--sweep-dir", str(FOLDER), "--seeds", str(arguments.seeds), *others]).returncode
    results = {}
    for name in SETTINGS:
        folders = sorted(file.parent for file in FOLDER.glob(f"{name}/*/result.json"))
        scores = [json.loads((each / "result.json").read_text())["exact_match_after"] for each in folders]
        metrics = [means(each / "metrics.jsonl") for each in folders]
        results[name] = {"right": scores} | {each: [m.get(each) for m in metrics] for each in METRICS}
    (FOLDER / "result.json").write_text(json.dumps(results, indent=2) + "\n")
    for name, result in results.items():
        averages = " ".join(f"{np.mean([x or 0.0 for x in result[each]]):12.5f}" for each in METRICS)
        print(f"{name:<10} {averages}  {np.mean(result['right']):.3f} {result['right']}")
    return code


if __name__ == "__main__":
    sys.exit(main())
