"""docs/errors.md is true: every class has its section under its exit code, and every message is one of the code's."""

import ast
import re
from pathlib import Path

import jaxft.errors
from jaxft.errors import JaxftError

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "errors.md").read_text()


def said(source: str) -> list[str]:
    """Return all texts of a module, with `…` for each value that is filled in."""
    texts = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.JoinedStr):
            texts.append("".join(part.value if isinstance(part, ast.Constant) else "…" for part in node.values))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            texts.append(node.value)
    return texts


def holds(text: str, parts: list[str]) -> bool:
    """Return whether a text has the parts, one after the other. A regular expression would take a minute for all."""
    end = 0
    for part in parts:
        begin = text.find(part, end)
        if begin < 0:
            return False
        end = begin + len(part)
    return True


def test_every_class_has_its_section_under_its_exit_code():
    classes = {
        name: value.exit_code
        for name, value in vars(jaxft.errors).items()
        if isinstance(value, type) and issubclass(value, JaxftError) and value is not JaxftError
    }
    sections = {}
    for part in re.split(r"^## Exit code ", PAGE, flags=re.MULTILINE)[1:]:
        sections |= dict.fromkeys(re.findall(r"^### `(\w+)`$", part, re.MULTILINE), int(part[0]))
    assert sections == classes


def test_every_message_is_one_of_the_code():
    messages = re.findall(r"^\| `(.*?)` \|", PAGE, re.MULTILINE)
    texts = {text for path in (ROOT / "jaxft").rglob("*.py") for text in said(path.read_text())}
    assert len(messages) > 60
    wanted = {message: message.split("…") for message in messages}
    assert [message for message, parts in wanted.items() if not any(holds(text, parts) for text in texts)] == []
