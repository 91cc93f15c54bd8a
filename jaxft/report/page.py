"""The shell of a page: one HTML file that loads nothing, with its styles and scripts inside.

A Content-Security-Policy allows the page's own styles and scripts by their hashes, and nothing else: no request leaves
it, and no text of a model can run.
"""

import base64
import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib import resources

from jaxft.report.markup import Markup, tag

PAGE_CSS, PAGE_JS = "page.css", "page.js"


def page(
    title: str,
    *content: object,
    nav: Sequence[tuple[str, str]] = (),
    styles: Sequence[str] = (),
    scripts: Sequence[str] = (),
    refresh_seconds: float | None = None,
) -> str:
    """Return a whole page.

    Args:
        title: title of the window.
        content: the elements of the page: a header, then sections.
        nav: links at the top, from pairs of an element's id and the words of the link.
        styles: further style sheets, by their names in `assets`, beside that of all pages.
        scripts: further scripts, by their names in `assets`.
        refresh_seconds: seconds after which the page loads itself again, as the run goes on; None for never.
    """
    css = [asset(name) for name in (PAGE_CSS, *styles)]
    js = [asset(name) for name in (PAGE_JS, *scripts)]
    policy = (
        f"default-src 'none'; style-src {_hashes(css)}; script-src {_hashes(js)}; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )
    head = [
        tag("meta", {"charset": "utf-8"}),
        tag("meta", {"http-equiv": "Content-Security-Policy", "content": policy}),
        tag("meta", {"name": "viewport", "content": "width=device-width, initial-scale=1"}),
        tag("meta", {"name": "color-scheme", "content": "light dark"}),
        tag("meta", {"name": "referrer", "content": "no-referrer"}),
        *_refresh(refresh_seconds),
        tag("title", {}, title),
        *(tag("style", {}, Markup(style)) for style in css),
    ]
    links = [tag("a", {"href": f"#{target}"}, words) for target, words in nav]
    body = [
        tag("nav", {"aria-label": "Sections"}, *links) if links else None,
        tag("main", {}, *content),
        *(tag("script", {}, Markup(script)) for script in js),
    ]
    return "<!doctype html>\n" + tag("html", {"lang": "en"}, tag("head", {}, *head), tag("body", {}, *body)) + "\n"


def _refresh(seconds: float | None) -> Iterator[Markup]:
    if seconds is not None:
        yield tag("meta", {"name": "refresh-seconds", "content": seconds})  # for the script, which keeps the place
        yield tag("noscript", {}, tag("meta", {"http-equiv": "refresh", "content": seconds}))


def asset(name: str) -> str:
    """Return a style sheet or a script of the package."""
    return resources.files("jaxft.report").joinpath("assets", name).read_text("utf-8")


def _hashes(sources: Iterable[str]) -> str:
    digests = (hashlib.sha256(source.encode()).digest() for source in sources)
    return " ".join(f"'sha256-{base64.b64encode(digest).decode()}'" for digest in digests)


def section(key: str, title: str, *content: object, lead: object = None) -> Markup:
    """Return a section with a heading; `key` is its id, `lead` a sentence below the heading."""
    opening = None if lead is None else tag("p", {"class": "lead"}, lead)
    return tag(
        "section", {"id": key, "aria-labelledby": f"{key}-h"}, tag("h2", {"id": f"{key}-h"}, title), opening, *content
    )


def subheading(title: str) -> Markup:
    """Return a heading inside a section."""
    return tag("h3", {}, title)


def charts(*figures: object, is_wide: bool = False) -> Markup:
    """Return charts side by side, as many as there is room for; below each other with `is_wide`."""
    return tag("div", {"class": "charts wide" if is_wide else "charts"}, *figures)


def table(headers: Sequence[object], rows: Iterable[Sequence[object]], *, numbers: Sequence[int] = ()) -> Markup:
    """Return a table that scrolls sideways where it has no room.

    Args:
        headers: the names of the columns.
        rows: the cells of each row; the first is its name.
        numbers: indices of columns that are aligned to the right.
    """

    def attributes(column: int) -> dict[str, object]:
        return {"class": "number" if column in numbers else None}

    head = [tag("th", {"scope": "col", **attributes(column)}, name) for column, name in enumerate(headers)]
    body = []
    for first, *others in rows:
        cells = [tag("td", attributes(column), cell) for column, cell in enumerate(others, start=1)]
        body.append(tag("tr", {}, tag("th", {"scope": "row", **attributes(0)}, first), *cells))
    whole = tag("table", {}, tag("thead", {}, tag("tr", {}, *head)), tag("tbody", {}, *body))
    return tag("div", {"class": "scroll", "tabindex": 0, "role": "group", "aria-label": "Table"}, whole)


def facts(values: Mapping[str, object]) -> Markup:
    """Return names with their values, in columns."""
    items = [tag("div", {}, tag("dt", {}, name), tag("dd", {}, value)) for name, value in values.items()]
    return tag("dl", {"class": "facts"}, *items)


def tiles(values: Iterable[tuple[object, object, object]]) -> Markup:
    """Return the figures that matter most as large numbers, from triples of a name, a number and words below it."""
    made = []
    for name, figure, words in values:
        parts = (tag("dt", {}, name), tag("dd", {"class": "figure"}, figure), tag("dd", {"class": "words"}, words))
        made.append(tag("div", {}, *parts))
    return tag("dl", {"class": "tiles"}, *made)


def details(summary: object, *content: object, is_open: bool = False) -> Markup:
    """Return content that is folded away below a summary."""
    return tag("details", {"open": is_open}, tag("summary", {}, summary), *content)


def notice(words: object, *, kind: str = "info") -> Markup:
    """Return a sentence in a box; `kind` is `info`, `warning` or `error`."""
    return tag("p", {"class": f"notice {kind}"}, words)


def code(words: str) -> Markup:
    """Return a command or a text of a file, as it is written."""
    return tag("pre", {"class": "code", "tabindex": 0}, words)
