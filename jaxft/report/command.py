"""The verbs `jaxft report` and `jaxft compare`, without what they import."""

import argparse

from jaxft.files import home_path
from jaxft.harness import Verb, whole_number

MAX_EPISODES = 10_000
WATCH_SECONDS = 10


def report_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `jaxft report`."""
    parser.add_argument("folder", type=home_path, help="the run directory")
    output = "the file to write (default: report.html of the run)"
    parser.add_argument("--output", type=home_path, metavar="FILE", help=output)
    shown = "episodes to show; of more, alike many of each epoch and over all rewards (default %(default)s)"
    parser.add_argument("--max-episodes", type=whole_number, default=MAX_EPISODES, metavar="N", help=shown)
    watch = f"write it again and again until the run ends (default: every {WATCH_SECONDS} seconds)"
    parser.add_argument("--watch", type=whole_number, nargs="?", const=WATCH_SECONDS, metavar="SECONDS", help=watch)


def compare_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `jaxft compare`."""
    parser.add_argument("runs", nargs="+", metavar="RUN", help="run directories, or quoted globs as in 'runs/sweep/*'")
    parser.add_argument("--output", type=home_path, metavar="DIR", help="folder of the files (default: as above)")
    parser.add_argument("--x", help=argparse.SUPPRESS)  # of version 0.9.0
    final = "the final reward is the mean of the last K epochs (default: a tenth of the shortest run, 3 to 25)"
    parser.add_argument("--last-epochs", type=whole_number, metavar="K", help=final)


REPORT = Verb(
    help="write a page about a run",
    description="""Writes the report of a run as one HTML file: curves, rewards, episodes, timings, settings and faults.

The file needs no network. The run may be going on: nothing is locked, and --watch follows it to its end.""",
    add_arguments=report_arguments,
    run="jaxft.report.report:run",
)

COMPARE = Verb(
    help="compare runs",
    description="""Compares runs, folded over seeds: settings that differ, metrics with 95 % intervals, and curves.

Writes compare.html and compare.json to a folder `compare` beside the runs, or to runs/compare if they lie in different
folders.""",
    add_arguments=compare_arguments,
    run="jaxft.report.compare:run",
)
