"""Runs arithmetic.py with seven losses, as one sweep, and compares them.

    python experiments/compare_algorithms.py                      # all; about 20 minutes on two CPU cores
    python experiments/compare_algorithms.py gspo ppo             # some
    python experiments/compare_algorithms.py --seeds 3 --jobs 2   # other options are those of arithmetic.py

Every run starts from the same warm start (exact match 0.236 with seed 0) and ends above 0.8 on 500 held-out sums. With
one update per rollout the ratio is 1: dapo and cispo then have the same gradient, and so have grpo and gspo.
Writes result.json, compare.html and compare.png to runs/compare_algorithms. The same command goes on where it was
stopped; --overwrite begins anew.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path

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


def main() -> int:
    """Trains with the chosen algorithms, prints a table and writes it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("algorithms", nargs="*", metavar="NAME", help=f"some of {', '.join(ALGORITHMS)} (default: all)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the first run of each (default %(default)s)")
    parser.add_argument("--output_dir", type=Path, default=Path("runs/compare_algorithms"), help="default %(default)s")
    arguments, others = parser.parse_known_args()
    unknown = [name for name in arguments.algorithms if name not in ALGORITHMS]
    if unknown:
        parser.error(f"no algorithm {unknown[0]!r}; wanted some of {', '.join(ALGORITHMS)}")
    names, folder = arguments.algorithms or list(ALGORITHMS), arguments.output_dir
    runs = [
        {f"trainer_adapters.local.loss.{field}": value for field, value in ALGORITHMS[name].items()}
        | {"finetuning.output_dir": f"{folder}/{name}/{{seed}}"}
        for name in names
    ]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "algorithms.yml").write_text(json.dumps(runs, indent=2) + "\n")
    sweep = [sys.executable, str(HERE / "arithmetic.py"), "--list", str(folder / "algorithms.yml")]
    sweep += ["--sweep_dir", str(folder), "--set", f"finetuning.seed={arguments.seed}", *others]
    code = subprocess.run(sweep).returncode
    results = {
        name: {file.parent.name: json.loads(file.read_text()) for file in sorted(folder.glob(f"{name}/*/result.json"))}
        for name in names
    }
    (folder / "result.json").write_text(json.dumps(results, indent=2) + "\n")
    print(f"\n{'algorithm':<10} {'seed':>10} {'warm start':>10} {'after':>8} {'seconds':>8}")
    for name, by_seed in results.items():
        for seed, result in by_seed.items():
            figures = (result["exact_match_warm_start"], result["exact_match_after"], result["seconds"])
            print("{:<10} {:>10} {:>10.3f} {:>8.3f} {:>8.0f}".format(name, seed, *figures))
    return code


if __name__ == "__main__":
    sys.exit(main())
