"""Pages of the documentation site that have no Markdown file in docs/, made anew by each build (a hook of MkDocs).

They are the reference of the configuration, from the config classes; the reference of the public names, from the tables
of docs/api.md; the notebooks, as Markdown with their stored outputs; and the pages of the repository's root.
"""

import html
import inspect
import re
from collections.abc import Iterator
from pathlib import Path

import latex2mathml.converter
import nbconvert
from docs_doctests import fenced
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

import jaxft
from jaxft.harness.config import Config
from jaxft.harness.config_help import FieldHelp, field_help
from jaxft.harness.registry import KINDS, REGISTRY, import_installed

ROOT = Path(__file__).parents[1]

REPOSITORY_PAGES = {
    "README.md": "readme.md",
    "CONTRIBUTING.md": "contributing.md",
    "AGENTS.md": "for-coding-agents.md",
    "CHANGELOG.md": "changelog.md",
    "SECURITY.md": "security.md",
    "CITATION.cff": "citation.md",
    "examples/nat/README.md": "examples/nat.md",
    "examples/custom_components/README.md": "examples/custom_components.md",
}
"""Page of each file of the repository outside of docs/ that the site shows."""


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the generated pages to those of docs/; a notebook gives way to its Markdown."""
    for name, page in REPOSITORY_PAGES.items():
        if (ROOT / name).exists():
            files.append(File.generated(config, page, content=_repository_page(name)))
    generated = [*configuration_pages(), *((page, text) for page, text, _ in api_pages())]
    for page, text in generated:
        files.append(File.generated(config, page, content=text))
    for notebook in [file for file in files if file.src_uri.endswith(".ipynb")]:
        files.remove(notebook)
        for path, content in _notebook(notebook):
            files.append(File.generated(config, path, content=content))
    return files


def on_page_content(content: str, **_: object) -> str:
    """Write the formulas of a page as MathML, which browsers draw without a script or a font of the site."""
    return re.sub(r'<(span|div) class="arithmatex">\\[(\[](.*?)\\[)\]]</\1>', _as_mathml, content, flags=re.DOTALL)


def _as_mathml(formula: re.Match[str]) -> str:
    display = "block" if formula[1] == "div" else "inline"
    return latex2mathml.converter.convert(html.unescape(formula[2]).strip(), display=display)


def on_page_markdown(markdown: str, page: Page, **_: object) -> str:
    """Link each name in the tables of docs/api.md to its entry in the reference."""
    if page.file.src_uri != "api.md":
        return markdown
    lines, space = [], "jaxft"
    for line in markdown.splitlines():
        if line.startswith("## "):
            space = f"jaxft.{match[1]}" if (match := re.match(r"## `jaxft\.(\w+)`", line)) else "jaxft"
        first, bar, rest = line[1:].partition("|") if line.startswith("| `") else ("", "", line)
        lines.append(("|" if bar else "") + re.sub(r"`(\w+)`", rf"[`\1`][{space}.\1]", first) + bar + rest)
    return "\n".join(lines)


def _repository_page(name: str) -> str:
    text = (ROOT / name).read_text()
    return text if name.endswith(".md") else f"# {name}\n\n```yaml\n{text}```\n"


def _notebook(notebook: File) -> Iterator[tuple[str, str | bytes]]:
    """Yield path and content of the page of a notebook, and of each picture in it."""
    stem = Path(notebook.src_uri).stem
    resources = {"unique_key": stem, "output_files_dir": f"{stem}_files"}
    text, resources = nbconvert.MarkdownExporter().from_filename(str(notebook.abs_src_path), resources)
    yield str(Path(notebook.src_uri).with_suffix(".md")), text
    for path, content in resources["outputs"].items():
        yield str(Path(notebook.src_uri).parent / path), content


def configuration_pages() -> Iterator[tuple[str, str]]:
    """Yield path and text of the pages on the configuration: the whole tree, then a page per kind of component."""
    import_installed()
    tree = list(field_help(Config))
    text = CONFIGURATION + "".join(f"* [`{KINDS[base].section}`]({_kind_page(base)})\n" for base in KINDS)
    for section in ("", "eval", "finetuning"):
        fields = [field for field in tree if (field.path.partition(".")[0] if "." in field.path else "") == section]
        text += f"\n## {f'`{section}`' if section else 'The sections'}\n\n{_fields(fields, '')}"
    yield "configuration/index.md", text
    for base in KINDS:
        path = KINDS[base].section
        text = f"# `{path}`\n\n{inspect.cleandoc(base.__doc__ or '')}\n"
        for name in REGISTRY.names(base):
            component = REGISTRY.find(base, name)
            if component.package == "jaxft":  # not what happens to be installed beside it
                anchor = f"{path.removesuffix('.<name>').removesuffix('.<n>')}.{name}"
                text += f"\n## `_type: {name}` {{ #{anchor} }}\n\n{inspect.getdoc(component.config_type)}\n\n"
                text += _fields(list(field_help(component.config_type)), f"{anchor}.")
        yield f"configuration/{_kind_page(base)}", text


CONFIGURATION = """\
# Configuration

A run is described by one YAML file, or by objects ([extending.md](../extending.md#a-run-without-yaml)).
`--set PATH=VALUE` sets any field by the dotted path below. A field that is misspelt, missing or out of bounds is an
error that names its path ([errors.md](../errors.md)). `jaxft finetune --help` shows the same text, with the components
that are installed on your machine.

Components are chosen by their `_type`, and each kind has a page with the fields of every type:

"""


def _kind_page(base: type) -> str:
    return f"{KINDS[base].name.replace(' ', '_')}.md"


def _fields(fields: list[FieldHelp], anchor: str) -> str:
    return "".join(
        f"### `{field.path}` {{ #{anchor}{field.path} .field }}\n\n{field.type} · {_default(field.default)}\n\n"
        f"{field.description}\n\n"
        for field in fields
    )


def _default(text: str) -> str:
    """Return the default as code, and the long ones as texts that wrap."""
    word, _, value = text.partition(" ")
    return f"{word} `{value}`" if value else f"**{word}**"


def api_pages() -> Iterator[tuple[str, str, str]]:
    """Yield path and text of a page per section of docs/api.md, which mkdocstrings fills, and its text without that."""
    first_space: dict[int, str] = {}  # where an object that stands in two namespaces is described
    for heading, section in api_sections():
        space = heading if heading.startswith("jaxft.") else "jaxft"
        text = plain = f"# {f'`{heading}`' if heading == space else heading}\n\n"
        namespace = jaxft if space == "jaxft" else getattr(jaxft, space.removeprefix("jaxft."))
        for name in section:
            value = getattr(namespace, name)
            path = f"{space}.{name}"
            if isinstance(value, int | str):  # a constant, which has no docstring
                text += f"## `{path}` {{ #{path} }}\n\n`{value!r}`\n\n"
                plain += f"## `{path}`\n\n`{value!r}`\n\n"
            elif callable(value) and first_space.setdefault(id(value), space) != space:
                text += f"## `{path}` {{ #{path} }}\n\nThe same as [`jaxft.{name}`][jaxft.{name}].\n\n"
            else:
                text += f"::: {path}\n\n"
                plain += f"## `{path}{_signature(value)}`\n\n{fenced(inspect.getdoc(value) or '')}\n\n"
        yield f"api/{re.sub('[^a-z]+', '-', heading.removeprefix('jaxft.').lower())}.md", text, plain


def api_sections() -> Iterator[tuple[str, list[str]]]:
    """Yield each section of docs/api.md that lists names: its heading, and the names."""
    for section in re.split(r"^## ", (ROOT / "docs" / "api.md").read_text(), flags=re.MULTILINE)[1:]:
        heading = section.partition("\n")[0].strip("`")
        cells = re.findall(r"^\| (`.*?) \|", section, re.MULTILINE)
        yield heading, [name for cell in cells for name in re.findall(r"`(\w+)`", cell)]


def _signature(value: object) -> str:
    return str(inspect.signature(value)) if inspect.isfunction(value) else ""
