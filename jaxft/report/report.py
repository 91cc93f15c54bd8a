"""The report of a run: one HTML file with its curves, episodes, timings, configuration and faults.

    runs/x/report.html    written whole and then renamed, so that a browser never finds half of it

Nothing is locked, so that a report may be made while the run goes on.
"""

import argparse
import asyncio
import os
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

from jaxft.errors import RunDirectoryError
from jaxft.files import replace_file
from jaxft.harness import run_main
from jaxft.report.command import MAX_EPISODES
from jaxft.report.curves import curves, timings, validation
from jaxft.report.episodes import browser, make_archive
from jaxft.report.overview import faults, find_component, hardest_examples, overview
from jaxft.report.pages import render_page
from jaxft.report.samples import find_episodes
from jaxft.runs import SAMPLES_FILE, Console, read_run

REPORT_FILE = "report.html"


class WrittenReport(NamedTuple):
    """A report that was written: its file, its size, and how many episodes it shows of those that the run has kept."""

    path: Path
    num_bytes: int
    num_episodes: int
    num_found: int
    state: str

    def __str__(self) -> str:
        of_all = f" of {self.num_found:,}" if self.num_episodes < self.num_found else ""
        size = f"{self.num_bytes / 1e6:.2f} MB"
        return f"written to {self.path} ({size}, {self.num_episodes:,}{of_all} episodes)"


def run(parsed: argparse.Namespace, given: Sequence[str]) -> int:
    """Write the report that the command line asks for, show where it is, and return the exit code."""
    show = Console().message
    write = partial(write_report, parsed.folder, parsed.output, max_episodes=parsed.max_episodes)

    async def report() -> None:
        if parsed.watch is None:
            show(str(write()))
        else:
            await watch(write, show, parsed.watch)

    return run_main(report, title="report")


def write_report(
    run: str | os.PathLike[str],
    output: str | os.PathLike[str] | None = None,
    *,
    max_episodes: int = MAX_EPISODES,
    refresh_seconds: float | None = None,
) -> WrittenReport:
    """Write the report of a run.

    Args:
        run: the run directory; the run may be going on.
        output: the file to write; by default `report.html` in the run directory.
        max_episodes: the number of episodes to show; of more, some of each epoch and reward are shown.
        refresh_seconds: seconds after which the page loads itself again, while the run goes on; None for never.

    Raises:
        RunDirectoryError: the folder holds no run, a file of it is damaged, or the report cannot be written.
        DiskFull: there is no room for it.
    """
    records = read_run(Path(run))
    places = find_episodes(records.path)
    archive = make_archive(places, max_episodes=max_episodes)
    setting = find_component(records.config, "trainers", "trainer").get("save_episodes")
    kept_by = f"those kept in {SAMPLES_FILE}" + ("" if setting is None else f" (save_episodes: {setting})")
    html = render_page(
        "report.html",
        styles=["episodes.css"],
        scripts=["episodes.js"],
        refresh_seconds=refresh_seconds if records.state in ("running", "unknown") else None,
        run=records,
        overview=overview(records),
        curves=curves(records),
        hardest=hardest_examples(records, places),
        validation=validation(records),
        episodes=browser(archive, kept_by),
        timings=timings(records),
        faults=faults(records, places),
        time=time.strftime("%Y-%m-%d %H:%M:%S"),
    )
    path = records.path / REPORT_FILE if output is None else Path(output)
    content = html.encode("utf-8")
    try:
        replace_file(path, content)
    except OSError as error:
        raise RunDirectoryError(f"'{path}' cannot be written ({error}): give another file with --output") from error
    return WrittenReport(path, len(content), archive.num_shown, archive.num_found, records.state)


async def watch(write: Callable[..., WrittenReport], show: Callable[[str], None], seconds: float) -> WrittenReport:
    """Write the report of a run again and again until the run ends; when it is cancelled, a last time.

    A file that cannot be read is an error at first. Later it is shown and tried again, as the run may be overwritten.

    Args:
        write: `write_report` with its run, file and number of episodes.
        show: shows a message.
        seconds: seconds between two reports.
    """
    shown = ""
    try:
        while True:
            try:
                written = write(refresh_seconds=seconds)
                words, has_ended = str(written), written.state in ("ended", "stopped")
            except RunDirectoryError as error:
                if not shown:
                    raise
                words, has_ended = f"{error}; trying again in {seconds} s", False
            if words != shown:
                show(words)
                shown = words
            if has_ended:
                return written
            await asyncio.sleep(seconds)
    except asyncio.CancelledError:
        write()  # the last page does not reload itself
        raise
