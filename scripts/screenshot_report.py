"""Takes the screenshots of docs/report.md: the head of a report with its curves, and its browser of episodes.

    pip install playwright
    python scripts/screenshot_report.py runs/tic_tac_toe --episodes runs/tool_use

Writes docs/report_curves.png and docs/report_episodes.png, each below 300 kB, with the Chromium on the PATH. The runs
are those of experiments/tic_tac_toe.py and of experiments/tool_use/tool_use.py; any other will do.
"""

import argparse
import shutil
import tempfile
from pathlib import Path

from playwright.sync_api import Page, sync_playwright

from jaxft.report.report import write_report

MAX_BYTES = 300_000
HEIGHTS = {"curves": 1060, "episodes": 960}


def main() -> None:
    """Write both screenshots."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="the run whose head and curves are shown")
    parser.add_argument("--episodes", type=Path, help="the run whose episodes are shown (default: the same)")
    parser.add_argument("--folder", type=Path, default=Path("docs"), help="where the pictures go (default %(default)s)")
    parsed = parser.parse_args()
    with sync_playwright() as playwright, tempfile.TemporaryDirectory() as folder:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        for name, run in (("curves", parsed.run), ("episodes", parsed.episodes or parsed.run)):
            written = write_report(run, Path(folder, "report.html"))
            page = browser.new_page(viewport={"width": 1280, "height": HEIGHTS[name]})
            page.goto(written.path.as_uri())
            if name == "episodes":
                show_episodes(page)
            picture = parsed.folder / f"report_{name}.png"
            page.screenshot(path=picture)
            size = picture.stat().st_size
            print(f"{picture}: {size} bytes")
            if size >= MAX_BYTES:
                raise SystemExit(f"{picture} has {size} bytes; at most {MAX_BYTES} are wanted: take another run")
        browser.close()


def show_episodes(page: Page) -> None:
    """Shade tokens by their log-probability, open the longest with tool calls and a reward, and read a token."""
    page.get_by_text("log-probability", exact=True).first.click()
    page.locator("#page-on:enabled, #page-on:disabled").wait_for()
    page.select_option("#f-sort", "longest")
    page.select_option("#f-outcome", "tools")
    page.fill("#f-reward-low", "0.5")
    page.wait_for_timeout(1500)
    page.locator(".episode summary").first.click()
    tokens = page.locator(".episode[open] .t")
    logprobs = tokens.evaluate_all("all => all.map(token => Number(token.dataset.l))")
    lowest = logprobs.index(min(logprobs))
    page.evaluate("document.getElementById('episodes').scrollIntoView()")
    tokens.nth(lowest).click()
    page.mouse.move(0, 0)


if __name__ == "__main__":
    main()
