"""Redaction: the secrets of a run are masked in everything that it writes, shows or raises.

The secret texts are a context variable. A session sets them once, and all its output, from any task, passes through
`redacted`.
"""

import bisect
import contextlib
import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextvars import ContextVar, copy_context
from typing import Any

MASK = "***"
EPISODE_KEY = re.compile(r"jaxft-episode-[\w-]+")
"""Keys of episodes, which their base URLs hold; `jaxft.rollout.recorder` makes them."""
SHORTEST = 8
"""Minimum number of characters of a text that is masked; shorter ones ("none", "dummy") occur by chance."""

_secrets: ContextVar[tuple[str, ...]] = ContextVar("jaxft_secrets", default=())


@contextlib.contextmanager
def hiding(secrets: Iterable[str]) -> Iterator[None]:
    """Mask these texts, and all that are masked already, in the results of `redacted` inside the block.

    >>> with hiding(["sk-12345"]):
    ...     redacted("key sk-12345 is refused"), redacted("sk-123")
    ('key *** is refused', 'sk-123')
    """
    # As they are, and as JSON and `repr` escape them.
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
    """Return the text with `***` for every secret."""
    for secret in _secrets.get():
        text = text.replace(secret, MASK)
    return text


def redactor() -> Callable[[str], str]:
    """Return `redacted` bound to the current secrets, for threads, which have their own context.

    >>> with hiding(["sk-12345"]):
    ...     mask = redactor()
    >>> mask("key sk-12345 is refused")
    'key *** is refused'
    """
    context = copy_context()
    return lambda text: context.copy().run(redacted, text)  # a context cannot be entered twice at a time


def redacted_tokens(tokens: Sequence[int], decode: Callable[[Sequence[int]], str]) -> list[int]:
    """Return the token ids with -1 for those that spell a secret.

    >>> with hiding(["sk-12345"]):
    ...     redacted_tokens([*b"my sk-12345!"], lambda ids: bytes(ids).decode())
    [109, 121, 32, -1, -1, -1, -1, -1, -1, -1, -1, 33]
    """

    def holds_secret(start: int, end: int) -> bool:
        text = decode(tokens[start:end])
        return redacted(text) != text

    masked, place, count = list(tokens), 0, len(tokens)
    while holds_secret(place, count):
        # The shortest prefix that contains a secret, and the shortest suffix of it that still does.
        starts, ends = range(place, count), range(place, count + 1)
        end = ends[bisect.bisect_left(ends, True, key=lambda end: holds_secret(place, end))]
        start = starts[bisect.bisect_left(starts, True, key=lambda start: not holds_secret(start, end)) - 1]
        masked[start:end] = [-1] * (end - start)
        place = end
    return masked


def redacted_values(value: Any) -> Any:
    """Return the value with every text in it redacted; numbers and keys, which the program chose, stay unchanged."""
    return map_texts(value, redacted)


def map_texts(value: Any, change: Callable[[str], str]) -> Any:
    """Apply `change` to every text in dicts, lists and tuples; keys stay unchanged, tuples become lists.

    >>> map_texts({"a": ["b", 1]}, str.upper)
    {'a': ['B', 1]}
    """
    if isinstance(value, str):
        return change(value)
    if isinstance(value, dict):
        return {key: map_texts(inner, change) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [map_texts(inner, change) for inner in value]
    return value
