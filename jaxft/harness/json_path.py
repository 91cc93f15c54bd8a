"""JSON paths: the part of a workflow's output that evaluators see."""

import functools
from typing import Any


@functools.cache
def jsonpath_of(text: str) -> Any:
    """The parsed path (jsonpath-ng, which takes long to import and to parse)."""
    from jsonpath_ng import parse

    return parse(text)


def at_json_path(value: Any, text: str) -> Any:
    """What stands at the path: one value, or a list when the path names several.

    Raises:
        ValueError: nothing stands there.

    >>> at_json_path({"answer": {"text": "four"}}, "$.answer.text")
    'four'
    >>> at_json_path({"steps": [{"n": 1}, {"n": 2}]}, "$.steps[*].n")
    [1, 2]
    """
    found = [match.value for match in jsonpath_of(text).find(value)]
    if not found:
        raise ValueError(f"nothing stands at '{text}' in the output, which is {repr(value)[:100]}")
    return found[0] if len(found) == 1 else found
