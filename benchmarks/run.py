"""What each part of jaxft does per second, against the limit of the device: `jaxft bench`, as a script.

    python benchmarks/run.py rollout update --model m60 --out results.json
    python benchmarks/run.py --suite cpu --out benchmarks/results/cpu.json     # two models; hours on two cores
    python benchmarks/run.py --suite gpu --out benchmarks/results/gpu.json     # one GPU with 80 GiB or more

Every case prints units per second (median, slowest, fastest), the limit and the share of it that is reached; then what
should hold and whether it does. Limits are measured in the same process, before and after everything else. `--shrink`
runs any of it in a minute at sizes that mean nothing. Exit code 1 when a case failed.
"""

import sys

from jaxft.bench.main import main

if __name__ == "__main__":
    sys.exit(main())
