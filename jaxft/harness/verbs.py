"""Verbs of the command line: the name, the options and the function of each.

A package brings its own by an entry point of the group `jaxft.verbs`, whose object is a `Verb`.
"""

import argparse
import pkgutil
from collections.abc import Callable, Sequence
from typing import NamedTuple

from jaxft.plugins import plugins


class Verb(NamedTuple):
    """A verb of the command line.

    Attributes:
        help: one line, in the list of verbs.
        description: shown above the options.
        add_arguments: adds the options to a parser.
        run: called with the parsed arguments and those given, without the verb; returns the exit code. It may be
            written as `module:function`, which is imported when the verb is called.
        reads_configuration: True if the verb also has the options of every run; its help then ends with every field.
        takes_over: True for the arguments of a script that ask for this verb in the place of a run; None if scripts
            do not have its options.
    """

    help: str
    description: str
    add_arguments: Callable[[argparse.ArgumentParser], object]
    run: Callable[[argparse.Namespace, Sequence[str]], int] | str
    reads_configuration: bool = False
    takes_over: Callable[[argparse.Namespace], bool] | None = None

    def __call__(self, parsed: argparse.Namespace, given: Sequence[str]) -> int:
        """Run the verb, and return its exit code."""
        run = pkgutil.resolve_name(self.run) if isinstance(self.run, str) else self.run
        return run(parsed, given)


def installed_verbs() -> dict[str, Verb]:
    """Return the verbs that installed packages bring, by name."""
    return plugins("jaxft.verbs")


def whole_number(text: str) -> int:
    """Return an option's value: a whole number, at least 1."""
    if text.isdecimal() and int(text) >= 1:
        return int(text)
    raise argparse.ArgumentTypeError("wants a whole number, at least 1")
