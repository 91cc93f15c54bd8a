"""Examples of docstrings as blocks of code (an extension of griffe, which reads the docstrings for mkdocstrings).

A docstring of jaxft ends with its doctest, without a heading. Markdown would take its `>>>` for a quotation.
"""

import re

import griffe

DOCTEST = re.compile(r"^( *)>>> .*(?:\n(?! *$).*)*", re.MULTILINE)


class FencedDoctests(griffe.Extension):
    """Puts a fence around each doctest."""

    def on_instance(self, *, obj: griffe.Object, **_: object) -> None:
        """Change the docstring of an object that griffe has read."""
        if obj.docstring is not None:
            obj.docstring.value = fenced(obj.docstring.value)


def fenced(docstring: str) -> str:
    """Return the docstring with its doctests, which end at an empty line, as blocks of code.

    >>> fenced("It counts.")
    'It counts.'
    """
    return DOCTEST.sub(lambda found: f"{found[1]}```pycon\n{found[0]}\n{found[1]}```", docstring)
