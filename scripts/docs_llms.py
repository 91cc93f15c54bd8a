"""The documentation site for readers of text (a hook of MkDocs): the Markdown of each page beside it, and `llms.txt`.

`agents.md` lies beside `agents/`, so that its links lead to other Markdown files. `llms.txt` is the navigation in the
form of llmstxt.org, and `llms-full.txt` holds all pages one after the other.
"""

import re
from pathlib import Path

from docs_pages import api_pages
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.nav import Navigation, Section
from mkdocs.structure.pages import Page

TEXTS: dict[str, str] = {}
"""Markdown of each page by its path, its links as in the site."""
PLAIN = {page: plain for page, _, plain in api_pages()}
"""The pages that mkdocstrings fills, without its directives."""
NAVIGATION: list[Navigation] = []


def on_nav(nav: Navigation, **_: object) -> None:
    """Keep the navigation for the end of the build."""
    NAVIGATION[:] = [nav]


def on_page_markdown(markdown: str, page: Page, **_: object) -> None:
    """Keep the Markdown of a page, without what only the site understands."""
    text = PLAIN.get(page.file.src_uri, markdown)
    TEXTS[page.file.src_uri] = re.sub(r" \{ #\S+(?: \.\w+)? \}$", "", text, flags=re.MULTILINE)


def on_post_build(config: MkDocsConfig) -> None:
    """Write the Markdown files, `llms.txt` and `llms-full.txt`."""
    site = Path(config.site_dir)
    for path, text in TEXTS.items():
        (site / path).parent.mkdir(parents=True, exist_ok=True)
        (site / path).write_text(text)
    lines = [f"# {config.site_name}", "", f"> {config.site_description}"]
    listed: list[str] = []
    for entry in NAVIGATION[0].items:
        pages = _pages(entry)
        lines += ["", f"## {entry.title}", ""]
        lines += [f"- [{page.title}]({config.site_url or ''}{page.file.src_uri})" for page in pages]
        listed += [page.file.src_uri for page in pages]
    (site / "llms.txt").write_text("\n".join([*lines, ""]))
    (site / "llms-full.txt").write_text("\n\n".join(TEXTS[path].strip() for path in listed) + "\n")


def _pages(entry: object) -> list[Page]:
    if isinstance(entry, Page):
        return [entry]
    return [page for child in entry.children for page in _pages(child)] if isinstance(entry, Section) else []
