"""The verbs `jaxft report` and `jaxft compare`."""

import argparse
from collections.abc import Callable

from jaxft.files import home_path
from jaxft.harness import Verb, exit_code_of, whole_number
from jaxft.report.report import MAX_EPISODES, WATCH_SECONDS, summary, watch, write_report
from jaxft.runs.console import Console


def report_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `jaxft report`."""
    parser.add_argument("folder", type=home_path, help="the run directory")
    parser.add_argument(
        "--output", type=home_path, metavar="FILE", help="the file to write (default: report.html of the run)"
    )
    parser.add_argument(
        "--max-episodes",
        type=whole_number,
        default=MAX_EPISODES,
        metavar="N",
        help="episodes to show; of more, alike many of each epoch and over all rewards (default %(default)s)",
    )
    parser.add_argument(
        "--watch",
        type=whole_number,
        nargs="?",
        const=WATCH_SECONDS,
        metavar="SECONDS",
        help=f"write it again and again until the run ends (default: every {WATCH_SECONDS} seconds)",
    )


async def report(parsed: argparse.Namespace, show: Callable[[str], None]) -> None:
    """Write the report that the command line asks for, and show where it is."""
    if parsed.watch is None:
        written = write_report(parsed.folder, parsed.output, max_episodes=parsed.max_episodes)
    else:
        written = await watch(
            parsed.folder,
            parsed.output,
            show,
            seconds=parsed.watch,
            max_episodes=parsed.max_episodes,
        )
    show(summary(written))


def compare_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `jaxft compare`."""
    parser.add_argument("runs", nargs="+", metavar="RUN", help="run directories, or quoted globs as in 'runs/sweep/*'")
    parser.add_argument("--output", type=home_path, metavar="DIR", help="folder of the files (default: as above)")
    parser.add_argument("--json", type=home_path, metavar="FILE", help="a file that gets the JSON as well")
    parser.add_argument(
        "--x", choices=("epochs", "episodes", "seconds", "tokens"), default="epochs",
        help="what curves are drawn over (default %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--last-epochs",
        type=whole_number,
        metavar="K",
        help="the final reward is the mean of the last K epochs (default: a tenth of the shortest run, 3 to 25)",
    )


REPORT = Verb(
    help="write a page about a run",
    description="""Writes the report of a run as one HTML file: curves, rewards, episodes, timings, settings and faults.

The file needs no network. The run may be going on: nothing is locked, and --watch follows it to its end.""",
    add_arguments=report_arguments,
    run=lambda parsed, given: exit_code_of(lambda: report(parsed, Console().message), title="report"),
)

COMPARE = Verb(
    help="compare runs",
    description="""Compares runs, folded over seeds: settings that differ, metrics with 95 % intervals, and curves.

Writes compare.html, compare.png and compare.json to a folder `compare` beside the runs, or to runs/compare if they lie
in different folders.""",
    add_arguments=compare_arguments,
    run="jaxft.report.compare:run",  # imports matplotlib
)
