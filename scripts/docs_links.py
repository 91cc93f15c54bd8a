"""Links of the pages, as the documentation site needs them (a hook of MkDocs).

The Markdown files are written for the repository, where a link may lead to any file and is often called by its name.
In the site a link to a file that has a page leads to the page, and is called by its title. A link to any other file
leads to `repo_url`, and is plain text where there is none.
"""

import posixpath
import re
from pathlib import Path

from docs_pages import REPOSITORY_PAGES
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
SOURCES = {page: name for name, page in REPOSITORY_PAGES.items()}
LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(((?!\w+:)[^)#\s]+)(#[^)\s]*)?\)")
FENCE = re.compile(r"^( *)```.*?^\1```", re.MULTILINE | re.DOTALL)


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, **_: object) -> str:
    """Rewrite the links of a page, outside of its blocks of code."""
    source = SOURCES.get(page.file.src_uri, f"docs/{page.file.src_uri}")

    def rewritten(match: re.Match[str]) -> str:
        mark, text, path, anchor = match[1], match[2], match[3], match[4] or ""
        target = posixpath.normpath(posixpath.join(posixpath.dirname(source), path))
        inside = REPOSITORY_PAGES.get(target, target.removeprefix("docs/") if target.startswith("docs/") else None)
        if inside is not None:
            inside = re.sub(r"\.ipynb$", ".md", inside)
            text = _title(target, text) if text.endswith(posixpath.basename(path)) else text
            start = posixpath.dirname(page.file.src_uri) or "."
            return f"{mark}[{text}]({posixpath.relpath(inside, start)}{anchor})"
        if config.repo_url:
            return f"[{text}]({config.repo_url.rstrip('/')}/blob/main/{target}{anchor})"
        return text if target in text else f"{text} (`{target}`)"

    parts, at = [], 0
    for fence in FENCE.finditer(markdown):
        parts += [LINK.sub(rewritten, markdown[at : fence.start()]), fence[0]]
        at = fence.end()
    return "".join([*parts, LINK.sub(rewritten, markdown[at:])])


def _title(name: str, default: str) -> str:
    """Return the first heading of a file of the repository, or the default, as tables that programs write have none."""
    heading = re.search(r"^# (.*)", (ROOT / name).read_text(), re.MULTILINE)
    return default if heading is None else heading[1]
