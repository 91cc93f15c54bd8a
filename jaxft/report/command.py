"""The verb `jaxft report`."""

import argparse
import os
import sys
from collections.abc import Callable

from jaxft.files import home_path
from jaxft.report.report import MAX_EPISODES, WATCH_SECONDS, summary, watch, write_report

MAX_PROCESSES = 4


def report_arguments(parser: argparse.ArgumentParser, description: str) -> None:
    """Add the arguments of the verb to its parser."""
    parser.description, parser.formatter_class = description, argparse.RawDescriptionHelpFormatter
    parser.add_argument("folder", type=home_path, help="the run directory")
    parser.add_argument(
        "--output", type=home_path, metavar="FILE", help="the file to write (default: report.html of the run)"
    )
    parser.add_argument(
        "--max-episodes",
        type=_count,
        default=MAX_EPISODES,
        metavar="N",
        help="episodes to show; of more, alike many of each epoch and over all rewards (default %(default)s)",
    )
    parser.add_argument(
        "--watch",
        type=_count,
        nargs="?",
        const=WATCH_SECONDS,
        metavar="SECONDS",
        help=f"write it again and again until the run ends (default: every {WATCH_SECONDS} seconds)",
    )


async def report(parsed: argparse.Namespace, show: Callable[[str], None]) -> None:
    """Write the report that the command line asks for, and show where it is."""
    # This process has not started jax, so that it may fork.
    processes = min(os.cpu_count() or 1, MAX_PROCESSES) if sys.platform == "linux" else 1
    if parsed.watch is None:
        written = write_report(parsed.folder, parsed.output, max_episodes=parsed.max_episodes, processes=processes)
    else:
        written = await watch(
            parsed.folder,
            parsed.output,
            show,
            seconds=parsed.watch,
            max_episodes=parsed.max_episodes,
            processes=processes,
        )
    show(summary(written))


def _count(text: str) -> int:
    if text.isdecimal() and int(text) >= 1:
        return int(text)
    raise argparse.ArgumentTypeError("wants a whole number, at least 1")
