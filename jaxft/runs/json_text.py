"""JSON as a run writes it: no NaN, no infinity, no secret, and text of any kind."""

import json
import math
from collections.abc import Mapping
from typing import Any

from jaxft.runs.redaction import redacted_values


def json_bytes(value: Any, *, indent: int | None = None) -> bytes:
    """A value in UTF-8, with a line feed at its end; secrets are masked.

    Raises:
        TypeError, ValueError: JSON has no word for it, as for NaN and infinities.
    """
    text = json.dumps(redacted_values(value), indent=indent, allow_nan=False, ensure_ascii=False)
    # A lone surrogate has no UTF-8; its backslash form is what JSON itself would write.
    return (text + "\n").encode("utf-8", "backslashreplace")


def with_non_finite_named(row: Mapping[str, Any]) -> dict[str, Any]:
    """The row with None for every NaN and infinity, and what each of them was under `non_finite`, by its path.

    >>> with_non_finite_named({"loss": float("nan"), "losses": [1.0, float("inf")]})
    {'loss': None, 'losses': [1.0, None], 'non_finite': {'loss': 'nan', 'losses.1': 'inf'}}

    Raises:
        ValueError: the row has a key `non_finite` of its own.
    """
    if "non_finite" in row:
        raise ValueError("it has the key 'non_finite', which marks NaN and infinities: rename it")
    found: dict[str, str] = {}
    finite = _without_non_finite(dict(row), "", found)
    return finite | ({"non_finite": found} if found else {})


def _without_non_finite(value: Any, path: str, found: dict[str, str]) -> Any:
    """`value` with None for every NaN and infinity, each recorded in `found` under its path."""
    if isinstance(value, float) and not math.isfinite(value):
        found[path] = str(value)
        return None
    prefix = f"{path}." if path else ""
    if isinstance(value, Mapping):
        return {key: _without_non_finite(inner, f"{prefix}{key}", found) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_without_non_finite(inner, f"{prefix}{i}", found) for i, inner in enumerate(value)]
    return value
