"""File names for foreign text, such as the ids of runs and examples."""

import hashlib
import re

MAX_NAME_CHARACTERS = 100
_PLAIN = re.compile(r"[a-z0-9_](?:[a-z0-9._-]*[a-z0-9_-])?")
_SUFFIX = re.compile(r"-[0-9a-f]{12}$")
_DEVICE = re.compile(r"(?:con|prn|aux|nul|com[0-9]|lpt[0-9])(?:\.|$)", re.IGNORECASE)


def safe_name(text: str) -> str:
    """A file name for any text: ASCII letters, digits, `_`, `-` and `.`, at most `MAX_NAME_CHARACTERS` long.

    A text that is such a name already, in small letters, is kept. Any other gets a suffix made from the sha256 of the
    text, so that two texts never share a file, not even where capitals do not count or a dot at the end is dropped; so
    does one that looks as if it had been given a suffix. The names of Windows's devices begin with `_`.

    >>> safe_name("game-7")
    'game-7'
    >>> safe_name("games/7")
    'games_7-19063539c513'
    >>> safe_name("NUL")
    '_NUL-ae6de1827cfc'
    """
    is_like_one_of_ours = _SUFFIX.search(text) or _DEVICE.match(text)
    if len(text) <= MAX_NAME_CHARACTERS and _PLAIN.fullmatch(text) and not is_like_one_of_ours:
        return text
    name = re.sub(r"[^A-Za-z0-9._-]", "_", text).lstrip(".-")
    if _DEVICE.match(name):
        name = "_" + name
    suffix = "-" + hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:12]
    return name[: MAX_NAME_CHARACTERS - len(suffix)] + suffix
