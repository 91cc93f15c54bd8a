"""The built site in site/ holds what it should: `mkdocs build --strict` comes first, as in .ci/run."""

import json
import posixpath
import re
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

import jaxft
from jaxft.harness.config import Config
from jaxft.harness.config_help import field_help
from tests.test_public_names import FROZEN, NAMESPACES

pytestmark = pytest.mark.docs
SITE = Path(__file__).parents[1] / "site"


class Parsed(HTMLParser):
    """The ids of a page, its links, and what it loads."""

    def __init__(self, text):
        super().__init__()
        self.ids, self.links, self.loaded = set(), [], []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        values = dict(attrs)
        self.ids |= {values[name] for name in ("id", "name") if values.get(name)}
        if tag == "a" and values.get("href"):
            self.links.append(values["href"])
        elif tag == "link" and values.get("rel") not in ("canonical", "alternate", "next", "prev"):
            self.loaded.append(values["href"])
        elif values.get("src"):
            self.loaded.append(values["src"])


@pytest.fixture(scope="module")
def pages():
    """Every page by its address, which begins with a slash."""
    assert (SITE / "index.html").exists(), "build the site first: mkdocs build --strict"
    found = SITE.rglob("*.html")
    return {f"/{path.relative_to(SITE).as_posix()}": Parsed(path.read_text()) for path in found}


def target(page, link):
    """The address of a page or file that a link leads to."""
    path = posixpath.normpath(posixpath.join(posixpath.dirname(page), unquote(urlsplit(link).path)))
    return posixpath.join(path, "index.html") if (SITE / path.lstrip("/")).is_dir() else path


def test_nothing_is_loaded_from_other_hosts(pages):
    loaded = {each for page in pages.values() for each in page.loaded}
    assert loaded and [each for each in loaded if urlsplit(each).netloc] == []
    styles = [path.read_text() for path in SITE.rglob("*.css")]
    assert styles and not any(re.search(r"@import|url\(\s*[\"']?(?:https?:)?//", each) for each in styles)


def test_formulas_are_drawn_by_the_browser():
    text = (SITE / "algorithms" / "index.html").read_text()
    blocks = (SITE.parent / "docs" / "algorithms.md").read_text().count("$$") // 2
    assert text.count("<math ") > 40 and text.count('display="block"') == blocks > 0
    assert "arithmatex" not in text and "merror" not in text and not re.search(r"\\(frac|operatorname|text)\b", text)


def test_links_and_anchors_lead_somewhere(pages):
    broken = []
    for page, parsed in pages.items():
        if page == "/404.html":  # its links begin at the root of the host
            continue
        for link in [*parsed.links, *parsed.loaded]:
            url = urlsplit(link)
            if url.scheme or url.netloc or link == "#":
                continue
            at = target(page, link) if url.path else page
            is_there = at in pages or (SITE / at.lstrip("/")).is_file()
            if not is_there or (url.fragment and at in pages and unquote(url.fragment) not in pages[at].ids):
                broken.append((page, link))
    assert len(pages) > 50 and broken == []


def test_every_public_name_is_described(pages):
    names = set(FROZEN.read_text().split()) - {f"jaxft.{name}" for name in (*NAMESPACES, *jaxft.MOVED)}
    ids = {each for page, parsed in pages.items() if page.startswith("/api/") for each in parsed.ids}
    assert sorted(names - ids) == []


def test_every_field_has_an_anchor_of_its_path(pages):
    ids = {each for page, parsed in pages.items() if page.startswith("/configuration/") for each in parsed.ids}
    assert [field.path for field in field_help(Config) if field.path not in ids] == []
    assert {"trainer_adapters.local_trainer_adapter.loss.clip_low", "llms.local_policy.slots"} <= ids


def test_each_page_lies_there_as_markdown_and_in_llms_txt(pages):
    text = (SITE / "llms.txt").read_text()
    assert re.match(r"# jaxft\n\n> .+\n\n## ", text)
    listed = re.findall(r"^- \[.+\]\((.+\.md)\)", text, re.MULTILINE)
    whole = (SITE / "llms-full.txt").read_text()
    for path in listed:
        page = (SITE / path).read_text()
        assert page.strip() in whole and not re.search(r"^::: ", page, re.MULTILINE), path
    html = {page.removesuffix("index.html").strip("/") for page in pages} - {"404.html"}
    assert {re.sub(r"(^|/)index$", "", path.removesuffix(".md")) for path in listed} == html


def test_the_search_finds_fields_names_and_errors():
    places = {each["location"] for each in json.loads((SITE / "search" / "search_index.json").read_text())["docs"]}
    for wanted in ("#finetuning.num_epochs", "#jaxft.policy_loss", "#nolearningsignal"):
        assert any(place.endswith(wanted) for place in places), wanted
