"""The verb `jaxft plan`."""

import argparse

from jaxft.files import home_path
from jaxft.harness import Verb, override_arguments


def plan_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `jaxft plan`."""
    parser.add_argument("--config-file", type=home_path, required=True, help="the YAML file of the run")
    parser.add_argument("--target", required=True, help="accelerators: h200x1, h100x8, v5e-8, v6e-8, v5p-16 and others")
    parser.add_argument(
        "--compiler",
        type=home_path,
        metavar="PATH",
        help="Python of the environment with the compilers (default: that of scripts/make_compilers.sh)",
    )
    override_arguments(parser)


PLAN = Verb(
    help="say what a run needs of accelerators that are not here",
    description="""Says what a run needs of accelerators that are not here: memory, work, messages and least times.

The compilers for GPUs and TPUs compile the run's programs for them, without a device; scripts/make_compilers.sh gets
them. Without compilers, memory follows from shapes and sharding rules, and is marked as estimated.""",
    add_arguments=plan_arguments,
    run="jaxft.planning.plan:run",  # imports jax
)
