"""The verb `jaxft sweep`: its options, and the grid of runs that they make, with a short name for each run.

    jaxft sweep --config-file run.yml --seeds 3 --set trainer_adapters.local.loss.name=grpo,dapo --jobs 2
    python experiments/arithmetic.py --seeds 3 --jobs 2

A comma between values of `--set` separates alternatives; one inside of quotes, brackets or braces belongs to a value:

    --set finetuning.num_epochs=5,10           two alternatives
    --set imports=[a,b]                        one value, a list
    --set 'imports=[a,b],[a]'                  two alternatives, both lists
    --set 'llms.judge.model="a,b"'             one text with a comma
"""

import argparse
import hashlib
import json
import re
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

from jaxft.errors import ConfigError
from jaxft.files import home_path, read_utf8, safe_name
from jaxft.harness import Verb, parse_yaml, whole_number
from jaxft.report.run_groups import short_paths
from jaxft.runs import is_secret_name, secrets_in_urls

SEED = "finetuning.seed"

Overrides = tuple[tuple[str, str], ...]
"""`(dotted path, YAML text)` pairs."""

VAGUE = ("name", "_type", "path", "type")
"""Fields that say nothing alone: a name has the part of the path before them as well."""

MAX_SEEDS = 10_000
MAX_NAME_CHARACTERS = 150
_PLAIN = re.compile(r"[A-Za-z0-9_+-](?:[A-Za-z0-9._+-]*[A-Za-z0-9_+-])?")
_VARIABLE = re.compile(r"\$\{\w+\}")
_PIECE = re.compile(r"""((?<![^,\[{:])\s*(?:"(?:\\.|[^"\\])*"|'[^']*'|(["']).*)|.)""", re.DOTALL)
"""A text in quotes, or any other character. A quote within a word, as in it's, is a letter."""


class GridRun(NamedTuple):
    """A run of a sweep: its name, and its settings beside those that all runs have."""

    name: str
    overrides: Overrides


def parse_seeds(text: str) -> tuple[int, ...]:
    """Return the numbers that `--seeds` names: `3` alone is a number of seeds, `0,5,7` a list of them.

    >>> parse_seeds("3"), parse_seeds("0,5,7")
    ((3,), (0, 5, 7))
    """
    parts = [part.strip() for part in text.split(",")]
    numbers = tuple(int(part) for part in parts if part.isascii() and part.isdecimal())
    if len(numbers) < len(parts) or (len(parts) == 1 and not 1 <= numbers[0] <= MAX_SEEDS):
        wanted = f"wants a number of seeds from 1 to {MAX_SEEDS}, as in 3, or a list of seeds, as in 0,5,7"
        raise argparse.ArgumentTypeError(f"is {text}, but {wanted}; --set {SEED}=N sets a single one")
    return numbers


def split_alternatives(text: str) -> list[str]:
    """Divide the value of a `--set` at its commas, except those inside of quotes, brackets or braces.

    >>> split_alternatives("grpo, dapo"), split_alternatives("[1,2],{a: b,c: d}"), split_alternatives('"a,b"')
    (['grpo', 'dapo'], ['[1,2]', '{a: b,c: d}'], ['"a,b"'])
    >>> split_alternatives("it's,${DIR:-a,b}")
    ["it's", '${DIR:-a,b}']

    Raises:
        ValueError: an alternative is empty, or a quote or a bracket is not closed.
    """
    parts, closing = [""], ""
    for piece, unclosed in _PIECE.findall(text):
        if piece in "[{":
            closing += "]" if piece == "[" else "}"
        elif closing and piece == closing[-1]:
            closing = closing[:-1]
        if unclosed:
            raise ValueError(f"wants a closing {unclosed}: quote the value")
        if piece == "," and not closing:
            parts.append("")
        else:
            parts[-1] += piece
    if closing:
        raise ValueError(f"wants a closing {closing[-1]}: quote the value")
    parts = [part.strip() for part in parts]
    if len(parts) > 1 and "" in parts:
        raise ValueError(
            f"alternative {parts.index('') + 1} of {len(parts)} is empty: write null or '\"\"', or remove the comma"
        )
    return parts


def read_list(file: Path) -> list[Overrides]:
    """Return the runs of a `--list` file: YAML with a list, and in it one mapping of overrides per run.

    Raises:
        ConfigError: the file cannot be read or is no such list; all faults are listed.
    """
    try:
        text = read_utf8(file)
    except ValueError as error:
        raise ConfigError(f"--list {error}") from None
    entries = parse_yaml(text, str(file))
    if not isinstance(entries, list) or not entries:
        raise ConfigError(f"--list {file}: wants a list with a mapping of overrides per run, as in - {SEED}: 1")
    faults: list[str] = []
    found: list[Overrides] = []
    for at, entry in enumerate(entries, start=1):
        if isinstance(entry, dict):
            try:
                found.append(tuple((path, yaml_text(value)) for path, value in entry.items()))
            except ValueError as error:
                faults.append(f"--list {file}: entry {at} has a value for the configuration file only ({error})")
        else:
            faults.append(f"--list {file}: entry {at} is no mapping of dotted paths to values, as {SEED}: 1")
    if faults:
        raise ConfigError(faults)
    return found


def yaml_text(value: Any) -> str:
    """Return a value as YAML on one line, as `--set` takes it; a text without quotes where it needs none.

    >>> yaml_text("grpo"), yaml_text("1"), yaml_text("a,b"), yaml_text({"rank": 8, "on": None})
    ('grpo', '"1"', '"a,b"', '{"rank": 8, "on": null}')

    Raises:
        ValueError: it holds an infinity or NaN.
    """
    if isinstance(value, str) and _PLAIN.fullmatch(value) and parse_yaml(value, "") == value:
        return value
    return json.dumps(value, ensure_ascii=False, allow_nan=False)


def make_grid(
    settings: Sequence[tuple[str, str]], entries: Sequence[Overrides], seeds: Sequence[int], first_seed: int
) -> tuple[Overrides, list[GridRun]]:
    """Return the settings that all runs share, and every combination of the others, seeds varied fastest.

    Args:
        settings: the `--set` of the command line.
        entries: those of `--list`; empty without one.
        seeds: those of `--seeds`; a single one is a number of seeds.
        first_seed: the seed of the configuration, from which a number of seeds counts.

    Raises:
        ConfigError: all faults of the settings.
    """
    faults: list[str] = []
    axes: dict[str, list[str]] = {}
    elsewhere = {path for entry in entries for path, _ in entry} | ({SEED} if seeds else set())
    for path, text in settings:
        try:
            alternatives = split_alternatives(text)
        except ValueError as error:
            faults.append(f"--set {path}: {error}")
            continue
        if max(len(alternatives), len(axes.get(path, ()))) > 1 and (path in axes or path in elsewhere):
            faults.append(f"--set {path}: is given twice: put all alternatives into one option")
        axes[path] = alternatives
    shared = tuple((path, texts[0]) for path, texts in axes.items() if len(texts) == 1 and path not in elsewhere)
    choices: list[list[Overrides]] = [[((path, text),) for text in texts] for path, texts in axes.items() if texts[1:]]
    choices += [list(entries)] if entries else []
    if seeds:
        values = seeds if len(seeds) > 1 else range(first_seed, first_seed + seeds[0])
        choices.append([((SEED, str(value)),) for value in values])
    if not choices:
        faults.append("nothing is varied: give --seeds 3, --set PATH=A,B with several values, or --list FILE")
    combinations = [tuple(pair for choice in combination for pair in choice) for combination in product(*choices)]
    varied = dict.fromkeys(pair for overrides in combinations for pair in overrides)
    faults += [
        f"{path}: is a secret, which would name the run directories: vary ${{VARIABLES}} that hold it"
        for path in dict.fromkeys(
            path
            for path, text in varied
            if (is_secret_name(path) and not _VARIABLE.fullmatch(text)) or secrets_in_urls(text)
        )
    ]
    if faults:
        raise ConfigError(faults)
    keys = short_paths(dict.fromkeys(path for path, _ in varied), VAGUE)
    return shared, [GridRun(_name(overrides, keys), overrides) for overrides in combinations]


def _name(overrides: Overrides, keys: dict[str, str]) -> str:
    """Return the name of a run: what differs, as in `loss.name=grpo,seed=0`; its length is bounded."""
    settings = [(".".join(map(safe_name, keys[path].split("."))), safe_name(text)) for path, text in overrides]
    name = ",".join(f"{path}={text}" for path, text in settings) or "base"
    if len(name) <= MAX_NAME_CHARACTERS:
        return name
    digest = hashlib.sha256(name.encode()).hexdigest()[:12]
    return f"{name[: MAX_NAME_CHARACTERS - 13].rstrip('.,=')}-{digest}"


def sweep_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of a sweep."""
    description = "Make one run for each combination of seeds and of values that are separated by commas in --set."
    add = parser.add_argument_group("several runs", description).add_argument
    seeds = "this many seeds from finetuning.seed on; or a list, as in 0,5,7"
    add("--seeds", type=parse_seeds, default=(), metavar="N", help=seeds)
    add("--jobs", type=whole_number, metavar="N", help="runs at once, which divide the machine (default 1)")
    add("--list", type=home_path, metavar="FILE", help="YAML: a list with overrides for each run")
    folder = "folder of the runs and their comparison (default: finetuning.output_dir with _sweep at its end)"
    add("--sweep-dir", type=home_path, metavar="FOLDER", help=folder)
    add("--dry-run", action="store_true", help="check all configurations and list the runs; run none")


def is_sweep(parsed: argparse.Namespace) -> bool:
    """Return True if the arguments of a script ask for several runs."""
    options = vars(parsed)  # `jaxft finetune` has a --dry-run of another kind
    names = ("seeds", "list", "jobs", "sweep_dir", "dry_run")
    return "seeds" in options and any(options[name] not in (None, (), False) for name in names)


SWEEP = Verb(
    help="train a grid of configurations, and compare the runs",
    description="""Trains a grid of configurations, each run in a process of its own, and compares them.

    jaxft sweep --config-file run.yml --seeds 3 --set trainer_adapters.local.loss.name=grpo,dapo --jobs 2

In --set a comma separates alternatives; one inside of quotes, brackets or braces belongs to the value. The same command
goes on with a sweep that was stopped: it skips finished runs, continues interrupted ones and repeats failed ones. With
--resume it also continues runs whose configuration has changed since.""",
    add_arguments=sweep_arguments,
    run="jaxft.report.sweep_runs:run",
    reads_configuration=True,
    takes_over=is_sweep,
)
