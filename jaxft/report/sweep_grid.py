"""The grid of a sweep: the runs that `--set` with commas, `--list` and `--seeds` make, and a short name for each.

A comma between values of `--set` separates alternatives; one inside of quotes, brackets or braces belongs to a value:

    --set finetuning.num_epochs=5,10           two alternatives
    --set imports=[a,b]                        one value, a list
    --set 'imports=[a,b],[a]'                  two alternatives, both lists
    --set 'llms.judge.model="a,b"'             one text with a comma
"""

import hashlib
import json
import re
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

from jaxft.errors import ConfigError
from jaxft.harness.strict_yaml import parse_yaml
from jaxft.runs.environment import is_secret_name, secrets_in_urls

SEED = "finetuning.seed"

Overrides = tuple[tuple[str, str], ...]
"""`(dotted path, YAML text)` pairs."""

VAGUE = ("name", "_type", "path", "type")
"""Fields that say nothing alone: a name has the part of the path before them as well."""

MAX_SEEDS = 10_000
MAX_VALUE_CHARACTERS = 40
MAX_NAME_CHARACTERS = 150
_PLAIN = re.compile(r"[A-Za-z0-9_+-](?:[A-Za-z0-9._+-]*[A-Za-z0-9_+-])?")
_VARIABLE = re.compile(r"\$\{\w+\}")
_LIKE_A_SUFFIX = re.compile(r"-[0-9a-f]{12}$")


class Seeds(NamedTuple):
    """Seeds of a sweep: `number` of them from the configuration's seed on, or else these `values`."""

    number: int
    values: tuple[int, ...] = ()


class GridRun(NamedTuple):
    """A run of a sweep: its name, and its settings beside those that all runs have."""

    name: str
    overrides: Overrides


class Grid(NamedTuple):
    """All runs of a sweep, the settings that they share, and the varied settings with the texts of their values."""

    shared: Overrides
    runs: tuple[GridRun, ...]
    varied: dict[str, tuple[str, ...]]


def parse_seeds(text: str) -> Seeds:
    """Return the seeds that `--seeds` names: `3` is a number of seeds, `0,5,7` a list of them.

    Raises:
        ValueError: the message says what is wanted.

    >>> parse_seeds("3"), parse_seeds("0,5,7")
    (Seeds(number=3, values=()), Seeds(number=3, values=(0, 5, 7)))
    """
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isascii() and part.isdecimal() and len(part) <= 10 and int(part) < 2**32 for part in parts):
        raise ValueError("wants a number of seeds, as in 3, or seeds from 0 to 4294967295, as in 0,5,7")
    numbers = tuple(map(int, parts))
    if len(numbers) > 1:
        twice = [number for at, number in enumerate(numbers) if number in numbers[:at]]
        if twice:
            raise ValueError(f"has the seed {twice[0]} twice: give each once")
        return Seeds(len(numbers), numbers)
    if not 1 <= numbers[0] <= MAX_SEEDS:
        raise ValueError(
            f"is {numbers[0]}, but wants a number of seeds from 1 to {MAX_SEEDS}; --set {SEED}=N sets a single one"
        )
    return Seeds(numbers[0])


def split_alternatives(text: str) -> list[str]:
    """Divide the value of a `--set` at its commas, except those inside of quotes, brackets or braces.

    >>> split_alternatives("grpo, dapo"), split_alternatives("[1,2],{a: b,c: d}"), split_alternatives('"a,b"')
    (['grpo', 'dapo'], ['[1,2]', '{a: b,c: d}'], ['"a,b"'])
    >>> split_alternatives("it's,${DIR:-a,b}")
    ["it's", '${DIR:-a,b}']

    Raises:
        ValueError: an alternative is empty, or a quote or a bracket is not closed.
    """
    parts, start, closing, quote, at = [], 0, "", "", 0
    while at < len(text):
        character = text[at]
        if quote:
            if character == "\\" and quote == '"':
                at += 1
            quote = "" if character == quote else quote
        # A quote within a word, as in it's, is a letter.
        elif character in "\"'" and text[start:at].rstrip()[-1:] in ("", ",", "[", "{", ":"):
            quote = character
        elif character in "[{":
            closing += "]" if character == "[" else "}"
        elif closing and character == closing[-1]:
            closing = closing[:-1]
        elif character == "," and not closing:
            parts.append(text[start:at].strip())
            start = at + 1
        at += 1
    if quote or closing:
        raise ValueError(f"wants a closing {quote or closing[-1]}: quote the value")
    parts.append(text[start:].strip())
    if len(parts) > 1 and "" in parts:
        raise ValueError(
            f"alternative {parts.index('') + 1} of {len(parts)} is empty: write null or '\"\"', or remove the comma"
        )
    return parts


def read_list(file: Path) -> list[Overrides]:
    """Return the runs of a `--list` file: YAML with a list, and in it one mapping of overrides per run.

    Raises:
        ConfigError: the file cannot be read or is no such list, or an entry occurs twice; all faults are listed.
    """
    try:
        entries = parse_yaml(file.read_bytes().decode("utf-8-sig"), str(file))
    except OSError as error:
        raise ConfigError([f"--list {file}: cannot be read: {error.strerror}"]) from None
    except UnicodeDecodeError:
        raise ConfigError([f"--list {file}: not UTF-8"]) from None
    if not isinstance(entries, list) or not entries:
        raise ConfigError([f"--list {file}: wants a list with a mapping of overrides per run, as in - {SEED}: 1"])
    faults: list[str] = []
    found: list[Overrides] = []
    numbers: dict[frozenset[tuple[str, str]], int] = {}
    for number, entry in enumerate(entries, start=1):
        if not isinstance(entry, dict):
            faults.append(f"--list {file}: entry {number} is no mapping of dotted paths to values, as {SEED}: 1")
            continue
        try:
            found.append(tuple((path, yaml_text(value)) for path, value in entry.items()))
        except ValueError as error:
            faults.append(f"--list {file}: entry {number} {error}")
            continue
        first = numbers.setdefault(frozenset(found[-1]), number)
        if first != number:
            faults.append(f"--list {file}: entry {number} is the same as entry {first}: remove one")
    if faults:
        raise ConfigError(faults)
    return found


def yaml_text(value: Any) -> str:
    """Return a value as YAML on one line, as `--set` takes it; a text without quotes where it needs none.

    >>> yaml_text("grpo"), yaml_text("1"), yaml_text("a,b"), yaml_text({"rank": 8, "on": None})
    ('grpo', '"1"', '"a,b"', '{"rank": 8, "on": null}')

    Raises:
        ValueError: YAML on one line cannot hold it.
    """
    if isinstance(value, str) and _PLAIN.fullmatch(value) and parse_yaml(value, "") == value:
        return value
    text = json.dumps(value, ensure_ascii=False)
    try:
        is_same = parse_yaml(text, "") == value
    except ConfigError:
        is_same = False
    if not is_same:  # infinity, NaN or a control character
        raise ValueError("has a value that the command line cannot pass on: put it into the configuration file")
    return text


def make_grid(
    settings: Sequence[tuple[str, str]], entries: Sequence[Overrides], seeds: Seeds | None, first_seed: int
) -> Grid:
    """Return every combination of alternatives, list entries and seeds, the last of these varied fastest.

    Args:
        settings: the `--set` of the command line.
        entries: those of `--list`; empty without one.
        seeds: those of `--seeds`.
        first_seed: the seed of the configuration, from which a number of seeds counts.

    Raises:
        ConfigError: all faults of the settings.
    """
    faults: list[str] = []
    axes: dict[str, list[str]] = {}
    for path, text in settings:
        try:
            alternatives = split_alternatives(text)
        except ValueError as error:
            faults.append(f"--set {path}: {error}")
            continue
        if path in axes and max(len(alternatives), len(axes[path])) > 1:
            faults.append(f"--set {path}: is given twice: put all alternatives into one --set")
        faults += _faults_of(path, alternatives)
        axes[path] = alternatives
    in_entries = {path for entry in entries for path, _ in entry}
    faults += [
        f"--set {path}: is in --list as well: leave one of them out"
        for path, alternatives in axes.items()
        if path in in_entries and len(alternatives) > 1
    ]
    if seeds is not None and (len(axes.get(SEED, [])) > 1 or SEED in in_entries):
        faults.append(f"--seeds: {SEED} is varied by --{'list' if SEED in in_entries else 'set'} as well: give one")
    if seeds is not None and not seeds.values and first_seed + seeds.number > 2**32:
        faults.append(f"--seeds {seeds.number}: from {SEED} {first_seed} on, they would pass 4294967295")
    if faults:
        raise ConfigError(faults)
    shared = tuple((path, texts[0]) for path, texts in axes.items() if len(texts) == 1)
    choices: list[list[Overrides]] = [[((path, text),) for text in texts] for path, texts in axes.items() if texts[1:]]
    choices += [list(entries)] if entries else []
    if seeds is not None:
        values = seeds.values or range(first_seed, first_seed + seeds.number)
        choices.append([((SEED, str(value)),) for value in values])
        shared = tuple(each for each in shared if each[0] != SEED)
    if not choices:
        raise ConfigError(
            ["nothing is varied: give --seeds 3, --set PATH=A,B with several values, or --list FILE"]
        )  # fmt: skip
    varied: dict[str, dict[str, None]] = {}
    combinations = [tuple(pair for choice in combination for pair in choice) for combination in product(*choices)]
    for path, text in (pair for overrides in combinations for pair in overrides):
        varied.setdefault(path, {})[text] = None
    for path, texts in varied.items():
        is_hidden = is_secret_name(path) and not all(_VARIABLE.fullmatch(text) for text in texts)
        if is_hidden or any(map(secrets_in_urls, texts)):
            faults.append(
                f"{path}: is a secret, which would name the run directories: vary ${{VARIABLES}} that hold it"
            )
    if faults:
        raise ConfigError(faults)
    keys = _short_names(list(varied))
    runs = tuple(GridRun(_name(overrides, keys), overrides) for overrides in combinations)
    return Grid(shared, runs, {path: tuple(texts) for path, texts in varied.items()})


def _faults_of(path: str, alternatives: Sequence[str]) -> list[str]:
    """Return the faults of the alternatives of a setting, without their texts, which may be secrets."""
    values: list[Any] = []
    for number, text in enumerate(alternatives, start=1):
        try:
            value = parse_yaml(text, path)
        except ConfigError:
            of_many = f"alternative {number} of {len(alternatives)}" if len(alternatives) > 1 else "the value"
            return [f"--set {path}: {of_many} is not YAML: quote it"]
        same = [at for at, other in enumerate(values, start=1) if type(other) is type(value) and other == value]
        if same:
            return [f"--set {path}: alternatives {same[0]} and {number} are the same: remove one"]
        values.append(value)
    return []


def _short_names(paths: Sequence[str]) -> dict[str, str]:
    """Return the shortest end of each dotted path that says what it is, and that no other path has.

    >>> _short_names(["finetuning.seed", "adapters.local.loss.name", "a.b.rank", "a.c.rank"]).values()
    dict_values(['seed', 'loss.name', 'b.rank', 'c.rank'])
    """
    names = {}
    for path in paths:
        parts = path.split(".")
        length = 2 if parts[-1] in VAGUE else 1
        others = [other for other in paths if other != path]
        while length < len(parts) and any(f".{other}".endswith("." + ".".join(parts[-length:])) for other in others):
            length += 1
        names[path] = ".".join(_safe(part) for part in parts[-length:])
    return names


def _name(overrides: Overrides, keys: dict[str, str]) -> str:
    """Return the name of a run: what differs, as in `loss.name=grpo,seed=0`; its length is bounded."""
    name = ",".join(f"{keys[path]}={_safe(text)}" for path, text in overrides) or "base"
    if len(name) <= MAX_NAME_CHARACTERS:
        return name
    digest = hashlib.sha256(name.encode()).hexdigest()[:12]
    return f"{name[: MAX_NAME_CHARACTERS - 13].rstrip('.,=')}-{digest}"


def _safe(text: str) -> str:
    """Return a part of a file name for any text; two texts never have the same one.

    >>> _safe("1e-3"), _safe("Qwen3"), _safe("a/b"), _safe("..")
    ('1e-3', 'Qwen3', 'a_b-c14cddc033f6', '-5ec1f7e700f3')
    """
    if len(text) <= MAX_VALUE_CHARACTERS and _PLAIN.fullmatch(text) and not _LIKE_A_SUFFIX.search(text):
        return text
    kept = re.sub(r"[^A-Za-z0-9._+-]+", "_", text).strip("_.")
    digest = hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:12]
    return f"{kept[: MAX_VALUE_CHARACTERS - 13]}-{digest}"
