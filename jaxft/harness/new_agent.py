"""The verb `init`: writes a folder with an agent, its reward, data, configuration and test, to be changed.

The files are templates in which `my_agent` and `MyAgent` stand for the name of the agent.
"""

import keyword
import re
import sys
from pathlib import Path

from jaxft.errors import ConfigError
from jaxft.files import disk_errors

TEMPLATES = Path(__file__).parent / "templates"
SUFFIX, NAME = ".template", "my_agent"


def write_agent(folder: Path) -> list[Path]:
    """Write the files of an agent that is named like the folder, and return their paths.

    Raises:
        ConfigError: the name is not one for a Python module, or one of the files is there already.
    """
    name = folder.absolute().name
    check_name(name)
    written = {
        _fill_template(file.name.removesuffix(SUFFIX), name): file for file in sorted(TEMPLATES.glob(f"*{SUFFIX}"))
    }
    taken = [each for each in written if (folder / each).exists()]
    if taken or (folder.exists() and not folder.is_dir()):
        there = f"has {', '.join(taken)} already" if taken else "is a file"
        raise ConfigError(f"{folder}: {there}, and nothing is overwritten: move it away, or take another name")
    with disk_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
        for path, template in written.items():
            with (folder / path).open("x", encoding="utf-8") as stream:  # never over a file of this very moment
                stream.write(_fill_template(template.read_text("utf-8"), name))
    return [folder / each for each in written]


def check_name(name: str) -> None:
    """Raise a ConfigError, with a suggestion, unless an agent's module may have this name.

    >>> check_name("my-agent")
    Traceback (most recent call last):
    ...
    jaxft.errors.ConfigError: 'my-agent' is no name of a Python module: take 'my_agent'
    """
    taken = keyword.iskeyword(name) or name in sys.stdlib_module_names or name in ("jaxft", "test", f"test_{name}")
    if name.isidentifier() and name.isascii() and not taken:
        return
    suggestion = f"{name}_agent" if taken else re.sub(r"\W+", "_", name, flags=re.ASCII).strip("_").lower()
    if not suggestion or suggestion[0].isdigit():
        suggestion = f"agent_{suggestion}".strip("_")
    what = "a name that Python has itself" if taken else "no name of a Python module"
    raise ConfigError(f"'{name}' is {what}: take '{suggestion}'")


def _fill_template(text: str, name: str) -> str:
    """Return a template with the name of the agent.

    >>> _fill_template("class MyAgentConfig: ...  # my_agent", "word_game")
    'class WordGameConfig: ...  # word_game'
    """
    camel = "".join(part[:1].upper() + part[1:] for part in name.split("_"))
    return text.replace(NAME, name).replace("MyAgent", camel)
