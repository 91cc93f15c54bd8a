"""Secrets of a run, kept out of everything that it writes or shows.

Which texts are secret is a context variable: a session names them once, and all that is written, shown or raised inside
it, in whatever task, passes through `redacted`.
"""

import bisect
import contextlib
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextvars import ContextVar, copy_context
from typing import Any

MASK = "***"
SHORTEST = 8
"""Characters of the shortest text that is masked: a shorter one ("none", "dummy") would be found in anything."""

_secrets: ContextVar[tuple[str, ...]] = ContextVar("jaxft_secrets", default=())


@contextlib.contextmanager
def hiding(secrets: Iterable[str]) -> Iterator[None]:
    """Masks these texts, and those that are hidden already, in everything that passes through `redacted`.

    >>> with hiding(["sk-12345"]):
    ...     redacted("key sk-12345 is refused"), redacted("sk-123")
    ('key *** is refused', 'sk-123')
    """
    # As they are, and as they look inside JSON and in a `repr`.
    forms = {
        form
        for text in secrets
        for form in (
            text,
            text.strip(),
            json.dumps(text)[1:-1],
            json.dumps(text, ensure_ascii=False)[1:-1],
            repr(text)[1:-1],
        )
    }
    known = {*_secrets.get(), *(form for form in forms if len(form) >= SHORTEST)}
    # The longest first: a secret may be part of another.
    token = _secrets.set(tuple(sorted(known, key=lambda text: (-len(text), text))))
    try:
        yield
    finally:
        _secrets.reset(token)


def redacted(text: str) -> str:
    """The text with a mask in the place of every secret."""
    for secret in _secrets.get():
        text = text.replace(secret, MASK)
    return text


def redactor() -> Callable[[str], str]:
    """`redacted` with the secrets that are hidden now, wherever it is called: a thread has a context of its own.

    >>> with hiding(["sk-12345"]):
    ...     mask = redactor()
    >>> mask("key sk-12345 is refused")
    'key *** is refused'
    """
    context = copy_context()
    return lambda text: context.copy().run(redacted, text)  # a context can be entered once at a time


def redacted_tokens(tokens: Sequence[int], decode: Callable[[Sequence[int]], str]) -> list[int]:
    """The token ids with -1 in the place of those that spell a secret.

    >>> with hiding(["sk-12345"]):
    ...     redacted_tokens([*b"my sk-12345!"], lambda ids: bytes(ids).decode())
    [109, 121, 32, -1, -1, -1, -1, -1, -1, -1, -1, 33]
    """

    def holds_secret(start: int, end: int) -> bool:
        text = decode(tokens[start:end])
        return redacted(text) != text

    masked, place, count = list(tokens), 0, len(tokens)
    while holds_secret(place, count):
        # The shortest beginning that holds a secret, and the shortest end of that.
        starts, ends = range(place, count), range(place, count + 1)
        end = ends[bisect.bisect_left(ends, True, key=lambda end: holds_secret(place, end))]
        start = starts[bisect.bisect_left(starts, True, key=lambda start: not holds_secret(start, end)) - 1]
        masked[start:end] = [-1] * (end - start)
        place = end
    return masked


def redacted_values(value: Any) -> Any:
    """The value with every text in it redacted; keys, which the program chose, and numbers stay."""
    if isinstance(value, str):
        return redacted(value)
    if isinstance(value, dict):
        return {key: redacted_values(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [redacted_values(inner) for inner in value]
    return value
