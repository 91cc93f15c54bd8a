"""The report in headless Chromium: shades, numbers, filters, pages, and its look at two widths and in the dark.

`.ci/more browser` runs these. Screenshots of every section go to `$JAXFT_SCREENSHOTS`, if that is set, for people.
"""

import json
import os
import re
import shutil
from pathlib import Path

import pytest

from jaxft.report.report import write_report
from jaxft.runs.directory import RunDirectory
from tests.report.made_runs import make_run, write_json

pytestmark = pytest.mark.browser

WIDTHS = (390, 1280)
SECTIONS = ("top", "curves", "rewards", "validation", "episodes", "timings", "configuration", "faults")


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    run = make_run(tmp_path_factory.mktemp("runs") / "a_run", epochs=12, examples=5, generations=3, tokens=20)
    write_report(run)
    return run


@pytest.fixture(scope="module")
def chromium():
    from playwright.sync_api import sync_playwright  # a package of this test alone

    path = shutil.which("chromium") or "/usr/bin/chromium"
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def open_page(chromium, run):
    """A function that opens the report, and at the end checks that nothing was loaded and no script failed."""
    contexts, faults = [], []

    def opened(width=1280, scheme="light", has_scripts=True, path=run / "report.html"):
        context = chromium.new_context(
            viewport={"width": width, "height": 900}, color_scheme=scheme, java_script_enabled=has_scripts
        )
        contexts.append(context)
        page = context.new_page()
        page.on("request", lambda request: request.url.startswith("file:") or faults.append(request.url))
        page.on("pageerror", lambda error: faults.append(str(error)))
        page.on("console", lambda message: message.type in ("error", "warning") and faults.append(message.text))
        page.goto(path.as_uri())
        if has_scripts:
            expect_state(page, "Page")
        return page

    yield opened
    for context in contexts:
        context.close()
    assert faults == []


def expect_state(page, words):
    """Wait for words in the line between the buttons that turn pages; the page's policy forbids `wait_for_function`."""
    from playwright.sync_api import expect

    expect(page.locator("#page-state")).to_contain_text(words, timeout=20_000)


def token_rows(run: Path) -> dict[tuple[int, str, int], dict]:
    """Episodes with the scores of their tokens, by epoch, example and generation."""
    found: dict[tuple[int, str, int], dict] = {}
    for name in ("samples", "token_scores"):
        for line in (run / f"trajectories/{name}.jsonl").read_text().splitlines():
            row = json.loads(line)
            if "failure" not in row:
                found.setdefault((row["epoch"], row["example_id"], row["generation"]), {}).update(row)
    return found


def row_of(page, episode, run):
    """The row of the run's files that an element of the list shows."""
    summary = episode.locator("summary").first.inner_text()
    epoch, generation = (int(re.search(rf"{word} (\d+)", summary)[1]) for word in ("epoch", "generation"))
    return token_rows(run)[epoch, re.search(r"example-\d+", summary)[0], generation]


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", WIDTHS)
def test_nothing_is_wider_than_the_window(open_page, width, scheme):
    page = open_page(width, scheme)
    for fold in page.locator("main details").all():
        fold.evaluate("each => each.open = true")
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    background = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (max(map(int, re.findall(r"\d+", background))) < 60) == (scheme == "dark")
    folder = os.environ.get("JAXFT_SCREENSHOTS")
    if folder:
        for name in SECTIONS:
            page.locator(f"#{name}").screenshot(path=f"{folder}/report-{name}-{width}-{scheme}.png")


def test_a_token_says_its_numbers(open_page, run):
    page = open_page()
    episode = page.locator(".episode").nth(3)
    episode.locator("summary").first.click()
    row = row_of(page, episode, run)
    at = row["sequences"][0]["completion_mask"].index(True) + 1  # the second token that was sampled
    numbers = (row["advantages"][0][at], row["sequences"][0]["sampler_logprobs"][at], row["entropies"][0][at])
    wanted = [
        f"{name} {value:.4g}" for name, value in zip(("advantage", "log-probability", "entropy"), numbers, strict=True)
    ]

    token = episode.locator(".t").nth(1)
    token.hover()
    assert all(words in page.locator("#tooltip").inner_text() for words in wanted)
    token.click()
    shown = page.locator("#readout").inner_text()
    assert all(words in " ".join(shown.split()) for words in wanted)
    assert json.dumps(row["token_texts"][0][at], ensure_ascii=False) in shown
    page.keyboard.press("ArrowRight")  # the keyboard reads the next one
    logprob = row["sequences"][0]["sampler_logprobs"][at + 1]
    assert f"log-probability {logprob:.4g}" in " ".join(page.locator("#readout").inner_text().split())


def test_the_switch_changes_the_shades(open_page):
    page = open_page()

    def shades():
        page.mouse.move(0, 0)
        return page.locator(".episode[open] .t").evaluate_all(
            "all => all.map(e => getComputedStyle(e).backgroundColor)"
        )

    seen = {"advantage": shades()}
    for name in ("log-probability", "entropy", "nothing"):
        page.get_by_text(name, exact=True).first.click()
        seen[name] = shades()
    assert len(set(seen["advantage"])) == 1  # one advantage for all tokens of an episode
    assert len(set(seen["log-probability"])) > 2 and len(set(seen["entropy"])) > 2
    assert set(seen["nothing"]) == {"rgba(0, 0, 0, 0)"}
    assert seen["log-probability"] != seen["entropy"]


def test_filters_order_and_pages(open_page, run):
    page = open_page()
    state, rewards = page.locator("#page-state"), page.locator(".episode .reward")

    def settle(words):
        expect_state(page, words)

    assert state.inner_text() == "Page 1 of 10 · 181 episodes"
    page.locator("#page-on").click()
    settle("Page 2 of 10")
    assert page.locator(".episode").count() == 20

    page.select_option("#f-sort", "best")
    settle("Page 1 of 10")
    shown = [float(text) for text in rewards.all_inner_texts()]
    everything = sorted((row["reward"] for row in token_rows(run).values() if row["scorable"]), reverse=True)
    assert shown == everything[:20]

    page.fill("#f-epoch-low", "2")
    page.fill("#f-epoch-high", "2")
    settle("16 of 181")
    page.select_option("#f-outcome", "failed")
    settle("1 of 181")
    assert "ValueError: <b>no</b>" in page.locator("#episode-list").inner_text()
    page.locator("button[type=reset]").click()
    settle("Page 1 of 10 · 181 episodes")

    page.fill("#f-example", "example-3")
    settle("36 of 181")
    page.fill("#f-text", row_text := next(iter(token_rows(run).values()))["episode"][1]["content"])
    page.fill("#f-example", "")
    matching = sum(row["episode"][1]["content"] == row_text for row in token_rows(run).values())
    settle(f"{matching} of 181" if matching != 181 else "181")
    page.fill("#f-text", "<b>no</b>")  # is text, not an element
    settle("1 of 181")
    page.fill("#f-text", "is nowhere")
    settle("0 of 181")
    assert "No episode passes these filters." in page.locator("#episode-list").inner_text()


@pytest.mark.parametrize("width", WIDTHS)
def test_without_scripts_the_page_is_readable(open_page, run, width):
    page = open_page(width, has_scripts=False)
    assert page.locator(".episode").count() == 20 and page.locator("#filters").is_hidden()
    episode = page.locator(".episode[open]")
    assert episode.locator(".message").count() == 5
    token = episode.locator(".t").first
    token.focus()
    row = row_of(page, episode, run)
    at = row["sequences"][0]["completion_mask"].index(True)
    words = token.evaluate("e => getComputedStyle(e, '::after').content")
    assert f"log-probability {row['sequences'][0]['sampler_logprobs'][at]:.4g} " in words
    page.get_by_text("entropy", exact=True).first.click()
    assert (
        len(
            set(
                page.locator(".episode[open] .t").evaluate_all(
                    "all => all.map(e => getComputedStyle(e).backgroundColor)"
                )
            )
        )
        > 2
    )
    assert page.locator("#curves svg title").count() > 20  # the values on hover
    assert page.evaluate("document.documentElement.scrollWidth") <= width


def test_a_chart_shows_its_values(open_page, run):
    page = open_page()
    column = page.locator("#curves .columns g").nth(4)
    column.hover()
    mean = json.loads((run / "reward_history.json").read_text())[4]["reward_mean"]
    assert f"mean {mean:.4g}" in page.locator("#tooltip").inner_text()


def test_a_live_page_keeps_its_place(open_page, tmp_path):
    run = make_run(tmp_path / "x", epochs=12, examples=5, generations=3, has_ended=False)
    (run / "LOCK.holder").write_text("{}")
    with RunDirectory.open(run):
        write_report(run, refresh_seconds=1)
        page = open_page(path=run / "report.html")
        page.select_option("#f-sort", "worst")
        page.fill("#f-epoch-low", "3")
        expect_state(page, "of 181")
        page.get_by_text("entropy", exact=True).first.click()
        page.locator(".episode summary").nth(2).click()
        opened = page.locator(".episode[open]").first.get_attribute("id")
        page.evaluate("scrollTo(0, 900)")
        write_json(run / "result.json", {"seconds": 1.0})
        write_report(run)
        page.locator("#top .badge.good").wait_for(timeout=30_000)  # it says that the run has ended
        expect_state(page, "of 181")
    page.locator(f"#{opened}[open]").wait_for()
    assert page.input_value("#f-sort") == "worst" and page.input_value("#f-epoch-low") == "3"
    assert page.locator("#shade-e").is_checked()
    assert page.evaluate("scrollY") == 900
