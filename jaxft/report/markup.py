"""HTML and SVG elements as text. Every text and attribute of a page is escaped here, and nowhere else.

`tag` makes an element of its children: a `Markup` is taken as it is, any other value is escaped as text. Text from
models is hostile by assumption: characters that HTML cannot hold are replaced by visible signs.
"""

import html
import math
import re
from collections.abc import Iterable, Mapping


class Markup(str):
    """A string of HTML that is complete and escaped already."""

    __slots__ = ()


VOID = frozenset({"br", "hr", "img", "input", "link", "meta", "path", "rect", "circle", "line", "polyline", "use"})
"""Elements that are written without children and without an end tag; in SVG they are closed by a slash."""

# C0 and C1 controls but tab and line feed, lone surrogates, and the noncharacters of the BMP.
_UNPRINTABLE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff\ufdd0-\ufdef\ufffe\uffff]")


def escaped(text: str) -> Markup:
    """Return a text as HTML, for elements and for quoted attributes; characters that HTML cannot hold become signs.

    >>> escaped('<b a="1">')
    '&lt;b a=&quot;1&quot;&gt;'
    >>> escaped("a\\x00b\\ud800")
    'a\u2400b\\\\ud800'
    """
    if text.isalnum():
        return Markup(text)
    return Markup(html.escape(_UNPRINTABLE.sub(_sign, text)))


def _sign(match: re.Match[str]) -> str:
    code = ord(match[0])
    if code < 0x20:
        return chr(0x2400 + code)  # Unicode's control pictures
    return "\u2421" if code == 0x7F else f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}"


# Characters that show nothing or mislead: spaces of other kinds, zero-width and bidirectional signs, line separators,
# tags; and spaces that would not be noticed, as there are several or a line ends with them.
_UNSEEN = re.compile(
    "[\xa0\xad\u061c\u115f\u1160\u180e\u2000-\u200f\u2028-\u202f\u205f-\u206f\u3000\u3164\ufeff\uffa0"
    "\ufff9-\ufffc\U000e0000-\U000e007f]|\t|\n|  +| (?=\n|$)"
)


def visible(words: str) -> Markup:
    """Return a text as HTML in which white space and characters that show nothing are seen, and copied as they are.

    Such a character stands in an `<i>`, before which a sign is drawn that is not part of the text. Bidirectional
    signs have no effect outside of it.

    >>> visible("a\\n<b>\u202e")
    'a<i class="nl">\\n</i>&lt;b&gt;<i class="cc" data-c="U+202E">\u202e</i>'
    """
    parts, end = [], 0
    for match in _UNSEEN.finditer(words):
        parts += [escaped(words[end : match.start()]), _shown(match[0])]
        end = match.end()
    return Markup("".join([*parts, escaped(words[end:])]))


def _shown(unseen: str) -> str:
    if unseen in "\n\t":
        return f'<i class="{"nl" if unseen == chr(10) else "tab"}">{unseen}</i>'
    if unseen[0] == " ":
        return f'<i class="sp">{unseen}</i>'
    return f'<i class="cc" data-c="U+{ord(unseen):04X}">{unseen}</i>'


def tag(name: str, attributes: Mapping[str, object] = {}, *children: object) -> Markup:
    """Return an element.

    >>> tag("p", {"class": "note", "hidden": True, "id": None}, "1 < 2", tag("br"))
    '<p class="note" hidden>1 &lt; 2<br/></p>'

    Args:
        name: the element's name.
        attributes: values by name; None and False leave the attribute out, True writes its name alone.
        children: elements and texts; None is left out.
    """
    parts = [f"<{name}"]
    for key, value in attributes.items():
        if value is True:
            parts.append(f" {key}")
        elif value is not None and value is not False:
            parts.append(f' {key}="{escaped(str(value))}"')
    if name in VOID:
        return Markup("".join(parts) + "/>")
    return Markup("".join(parts) + ">" + joined(children) + f"</{name}>")


def joined(children: Iterable[object]) -> Markup:
    """Return elements and texts one after the other; None is left out."""
    return Markup("".join(text(child) for child in children if child is not None))


def text(value: object) -> Markup:
    """Return a value as HTML: a `Markup` unchanged, anything else escaped."""
    return value if isinstance(value, Markup) else escaped(str(value))


def number(value: object, digits: int = 4) -> str:
    """Return a number as people read it: a few significant digits, thousands with commas; "–" for none.

    >>> [number(value) for value in (0.123456, 12345.678, 3.0, 1e-7, None, float("nan"), True, "text")]
    ['0.1235', '12,346', '3', '1e-07', '–', 'nan', 'true', 'text']
    """
    if value is None:
        return "–"
    if isinstance(value, bool):
        return str(value).lower()
    if not isinstance(value, int | float):
        return str(value)
    if not math.isfinite(value):
        return str(value)
    if value == int(value) and abs(value) < 1e15:
        return f"{int(value):,}"
    if abs(value) >= 10**digits:
        return f"{value:,.0f}" if abs(value) < 1e15 else f"{value:.3g}"
    return f"{value:.{digits}g}"


def duration(seconds: float) -> str:
    """Return a time as people read it.

    >>> [duration(seconds) for seconds in (0.25, 59.9, 600, 5400, 200000)]
    ['0.25 s', '59.9 s', '10 min', '1 h 30 min', '2 d 7 h']
    """
    if seconds < 60:
        return f"{seconds:.3g} s"
    minutes = round(seconds / 60)
    if minutes < 60:
        return f"{minutes} min"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours < 24 else f"{hours // 24} d {hours % 24} h"


def byte_count(count: float) -> str:
    """Return a number of bytes as people read it.

    >>> [byte_count(count) for count in (900, 1_500_000, 80 * 2**30)]
    ['900 B', '1.43 MiB', '80 GiB']
    """
    units = ("B", "KiB", "MiB", "GiB", "TiB")
    power = 0 if count < 1 else min(int(math.log(count, 1024)), len(units) - 1)
    return f"{count / 1024**power:.3g} {units[power]}"
