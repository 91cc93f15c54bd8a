"""Pages on the templates of this package: one HTML file that loads nothing, with its styles and scripts inside.

Templates escape every text and attribute. Text from models is hostile by assumption: characters that HTML cannot hold
are replaced by visible signs, and a Content-Security-Policy allows the page's own styles and scripts by their hashes
and nothing else, so that no request leaves the page and no text of a model can run.
"""

import base64
import hashlib
import json
import math
import re
from collections.abc import Iterable, Sequence
from importlib import resources
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape

# C0 and C1 controls but tab and line feed, lone surrogates, and the noncharacters of the BMP.
_UNPRINTABLE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff\ufdd0-\ufdef\ufffe\uffff]")

# Characters that show nothing or mislead: spaces of other kinds, zero-width and bidirectional signs, line separators,
# tags; and spaces that would not be noticed, as there are several or a line ends with them.
_UNSEEN = re.compile(
    "[\xa0\xad\u061c\u115f\u1160\u180e\u2000-\u200f\u2028-\u202f\u205f-\u206f\u3000\u3164\ufeff\uffa0"
    "\ufff9-\ufffc\U000e0000-\U000e007f]|\t|\n|  +| (?=\n|$)"
)


def render(template: str, **values: Any) -> str:
    """Return a template with its values, without characters that HTML cannot hold.

    >>> render("macros.html").strip(), printable("a\\x00b\\ud800")
    ('', 'a\u2400b\\\\ud800')
    """
    return printable(ENVIRONMENT.get_template(template).render(values))


def render_page(
    template: str, *, styles: Sequence[str] = (), scripts: Sequence[str] = (), refresh_seconds: float | None = None,
    **values: Any,
) -> str:  # fmt: skip
    """Return a whole page.

    Args:
        template: a template that extends `page.html`.
        styles: style sheets of `assets`, beside that of all pages.
        scripts: scripts of `assets`, beside that of all pages.
        refresh_seconds: seconds after which the page loads itself again, as the run goes on; None for never.
        values: values of the template.
    """
    css, js = ([_asset(name) for name in names] for names in (("page.css", *styles), ("page.js", *scripts)))
    policy = f"style-src {_hashes(css)}; script-src {_hashes(js)}"
    return render(template, css=css, js=js, policy=policy, refresh_seconds=refresh_seconds, **values)


def _asset(name: str) -> Markup:
    return Markup(resources.files("jaxft.report").joinpath("assets", name).read_text("utf-8"))


def _hashes(sources: Iterable[str]) -> str:
    digests = (hashlib.sha256(source.encode()).digest() for source in sources)
    return " ".join(f"'sha256-{base64.b64encode(digest).decode()}'" for digest in digests)


def printable(html: str) -> str:
    """Return a text in which characters that HTML cannot hold are signs."""
    return _UNPRINTABLE.sub(_sign, html)


def _sign(match: re.Match[str]) -> str:
    code = ord(match[0])
    if code < 0x20:
        return chr(0x2400 + code)  # Unicode's control pictures
    return "\u2421" if code == 0x7F else f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}"


def visible(words: object) -> Markup:
    """Return a text as HTML in which white space and characters that show nothing are seen, and copied as they are.

    Such a character stands in an `<i>`, before which a sign is drawn that is not part of the text. Bidirectional
    signs have no effect outside of it.

    >>> visible("a\\n<b>\u202e")
    Markup('a<i class="nl">\\n</i>&lt;b&gt;<i class="cc" data-c="U+202E">\u202e</i>')
    """
    return Markup(_UNSEEN.sub(_show_match, str(escape(words))))


def _show_match(match: re.Match[str]) -> str:
    unseen = match[0]
    kind = {"\n": "nl", "\t": "tab", " ": "sp"}.get(unseen[0])
    return f'<i class="{kind}">{unseen}</i>' if kind else f'<i class="cc" data-c="U+{ord(unseen):04X}">{unseen}</i>'


def number(value: object, digits: int = 4) -> str:
    """Return a number as people read it: a few significant digits, thousands with commas; "–" for none.

    >>> [number(value) for value in (0.123456, 12345.678, 3.0, 1e-7, None, float("nan"), True, "text")]
    ['0.1235', '12,346', '3', '1e-07', '–', 'nan', 'true', 'text']
    """
    if value is None:
        return "–"
    if isinstance(value, bool):
        return str(value).lower()
    if not isinstance(value, int | float) or not math.isfinite(value):
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


def shortened(words: str, length: int) -> str:
    """Return a text of at most `length` characters, its middle left out if it is longer.

    >>> shortened("addition-of-three-numbers", 12)
    'additi…mbers'
    """
    if len(words) <= length:
        return words
    kept = max(length - 1, 2)
    return f"{words[: kept - kept // 2]}…{words[len(words) - kept // 2 :]}"


def setting(value: Any) -> str:
    """Return a value of a configuration nearly as YAML has it."""
    return value if isinstance(value, str) and value else json.dumps(value, ensure_ascii=False)


ENVIRONMENT = Environment(
    loader=PackageLoader("jaxft.report"),
    autoescape=True,
    trim_blocks=True,
    lstrip_blocks=True,
    undefined=StrictUndefined,
    cache_size=-1,
)
ENVIRONMENT.filters |= {each.__name__: each for each in (number, visible, setting, shortened, duration)}
ENVIRONMENT.filters["px"] = "{:.1f}".format
