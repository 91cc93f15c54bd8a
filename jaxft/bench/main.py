"""From parsed arguments to an exit code; jax is imported once they are known to make sense."""

import argparse
import sys
from collections.abc import Sequence

from jaxft.bench.arguments import add_arguments, jobs_of
from jaxft.harness.devices import use_compile_cache


def bench(arguments: argparse.Namespace) -> int:
    """Runs the benchmarks that the arguments name; 0, 1 when a case failed, 2 when the arguments make no sense."""
    try:
        jobs = jobs_of(arguments.cases, arguments.suite, arguments.model, arguments.dtype, shrink=arguments.shrink)
    except ValueError as error:
        print(f"jaxft: error: {error}", file=sys.stderr)
        return 2
    use_compile_cache()
    from jaxft.bench.runner import run_jobs

    return run_jobs(jobs, arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """The same from a command line; by default that of the process."""
    return bench(add_arguments(argparse.ArgumentParser()).parse_args(arguments))
