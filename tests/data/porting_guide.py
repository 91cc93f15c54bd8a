"""The snippets of docs/from-nemo-agent-toolkit.md, by section, row and side."""

import re
import textwrap
from pathlib import Path
from typing import NamedTuple

PAGE = Path(__file__).parents[2] / "docs" / "from-nemo-agent-toolkit.md"
TOOLKIT, HERE = "in the toolkit", "here"
SIDES = re.compile(r"^# (in the toolkit, and here .*|in the toolkit.*|here.*|in both)$\n", re.MULTILINE)


class Snippet(NamedTuple):
    """A block of code, or the part of one that belongs to one side.

    Attributes:
        section: the heading above it.
        row: the words in bold type that begin the row; empty outside of rows.
        language: python, yaml or bash.
        side: the comment that begins it; empty for whole files and for commands.
        text: the code.
    """

    section: str
    row: str
    language: str
    side: str
    text: str

    def belongs_to(self, side: str) -> bool:
        """Return True if the code is written for this side."""
        return side in self.side or self.side == "in both"


def snippets() -> list[Snippet]:
    """Return the snippets of the page."""
    found, section, row = [], "", ""
    pattern = r"^## (?P<section>[^\n]*)$|^\*\*(?P<row>[^*]+)\.\*\*|^```(?P<language>\w*)\n(?P<text>.*?)^```$"
    for match in re.finditer(pattern, PAGE.read_text(), re.MULTILINE | re.DOTALL):
        if match["section"]:
            section, row = match["section"], ""
        elif match["row"]:
            row = match["row"]
        elif match["language"]:
            first, *parts = SIDES.split(match["text"])
            sides = list(zip(parts[::2], parts[1::2], strict=True)) or [("", first)]
            found += [Snippet(section, row, match["language"], side, text) for side, text in sides]
    return found


def walk(section: str) -> tuple[dict[str, str], list[str]]:
    """Return the files that a section has its reader write, by name, and the commands, without the installation."""
    files, commands = {}, []
    for snippet in snippets():
        name = re.match(r"# ([\w.]+)\n", snippet.text)
        if snippet.section == section and snippet.language == "bash":
            commands += [line for line in snippet.text.splitlines() if "pip install" not in line]
        elif snippet.section == section and name:
            files[name[1]] = snippet.text
    return files, commands


def code(row: str, language: str, side: str) -> str:
    """Return the code of a row for one side."""
    given = [each for each in snippets() if each.row == row and each.language == language and each.belongs_to(side)]
    return "\n".join(each.text for each in given)


def in_a_factory(name: str, text: str) -> str:
    """Return the module of a workflow whose factory holds the code of a row."""
    return (
        "import jaxft\n\n\n"
        f'class GuideConfig(jaxft.WorkflowConfig, name="{name}"):\n    llm_name: jaxft.LLMRef\n\n\n'
        "@jaxft.register_workflow(config_type=GuideConfig)\nasync def factory(config, builder):\n"
        + textwrap.indent(text, "    ")
    )


def imports() -> dict[str, list[str]]:
    """Return the names that a port imports from jaxft, by the toolkit's module."""
    rows = re.findall(r"^\| `(nat\.[\w.]+)` \| (.*) \|$", PAGE.read_text(), re.MULTILINE)
    return {module: re.findall(r"`(\w+)`", names) for module, names in rows}


def ported(text: str) -> str:
    """Return the toolkit's code with the imports that the page's table names changed, and nothing else.

    Raises:
        KeyError: it imports a name that is not in the table.
    """
    table = imports()

    def own(match: re.Match[str]) -> str:
        names = [name.strip() for name in (match[2] or match[3]).split(",") if name.strip()]
        unknown = [name for name in names if name not in table[match[1]]]
        if unknown:
            raise KeyError(f"{match[1]}.{unknown[0]} is not in the table of imports")
        renamed = {"EvaluatorBaseConfig": "EvaluatorConfig as EvaluatorBaseConfig"}
        return "from jaxft import " + ", ".join(renamed.get(name, name) for name in names)

    return re.sub(r"^from (nat\.\S+) import (?:\(([^)]*)\)|(.*))$", own, text, flags=re.MULTILINE)
