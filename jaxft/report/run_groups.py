"""Groups of runs that differ in nothing but their seeds, named by what tells them apart.

Two runs are of one group if their configurations agree in every setting that has an effect on training. If a group so
made has a seed twice, its runs are told apart by version, commit and machine, or else each is a group of its own: two
runs of one seed are one observation, and no interval may count them as two.
"""

import json
import os
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial
from itertools import takewhile
from typing import Any

from jaxft.redaction import map_texts
from jaxft.report.compared_runs import ComparedRun
from jaxft.runs import flat

SEED = "finetuning.seed"

WITHOUT_EFFECT = (
    "imports",
    "finetuning.output_dir",
    "finetuning.checkpoints.*",
    "finetuning.grace_seconds",
    "finetuning.strict_compile",
    "finetuning.loggers*",
    "eval.general.output_dir",
    "trainers.*.save_episodes",
    "trainers.*.show_episodes_every",
    "llms.*.serve*",
)
"""Patterns of settings that change nothing that is trained; runs that differ only in them are of one group."""

UNSAID = (SEED, "finetuning.output_dir")
"""Settings that differ from run to run by intent; they are in no table."""

ABSENT = "absent"
"""The word for a setting that a configuration does not have, as versions of jaxft differ in their fields."""

FOLDER = "run directory"

MAX_VALUE = 28
"""Longest text of a value in a name."""


@dataclass(frozen=True)
class RunGroup:
    """Runs that differ in their seeds only, by ascending seed."""

    name: str
    runs: tuple[ComparedRun, ...]

    @property
    def finished(self) -> tuple[ComparedRun, ...]:
        """The runs that figures are made of."""
        return tuple(run for run in self.runs if run.status == "finished")


@dataclass(frozen=True)
class Difference:
    """A setting whose value differs.

    Attributes:
        path: its dotted path; for `environment.json` it begins with `environment.`.
        values: for each group its value as text; several if the runs of the group differ in it.
        has_effect: False if it changes nothing that is trained.
    """

    path: str
    values: tuple[str, ...]
    has_effect: bool = True


def group_runs(runs: Sequence[ComparedRun]) -> tuple[tuple[RunGroup, ...], tuple[Difference, ...]]:
    """Return the groups of some runs, in the order of their first runs, and the settings that differ between runs."""
    runs = sorted(runs, key=lambda run: str(run.records.path))
    settings = comparable_settings([run.settings for run in runs])
    surroundings = [_surroundings(run) for run in runs]
    differing = [
        path
        for path in _differing(settings)
        if not is_newer_default(path, settings, [run.records.environment for run in runs])
    ]
    effective = [path for path in differing if has_effect(path)]
    groups = _split([list(range(len(runs)))], settings, effective)
    told_apart = [{path: each.get(path, ABSENT) for path in effective} for each in settings]
    folders: list[dict[str, Any]] = [{FOLDER: run.records.name} for run in runs]
    paths: list[dict[str, Any]] = [{FOLDER: str(run.records.path)} for run in runs]
    for facts in (surroundings, folders, paths):
        repeated = [group for group in groups if len(group) > len({runs[at].seed for at in group})]
        if repeated:
            kept = [group for group in groups if group not in repeated]
            groups = kept + _split(repeated, facts, _differing(facts))
            told_apart = [known | {path: each.get(path, ABSENT) for path in _differing(facts)}
                          for known, each in zip(told_apart, facts, strict=True)]  # fmt: skip
    groups.sort()

    every_path = sorted({path for each in settings for path in each})
    names = _names([told_apart[group[0]] for group in groups], every_path)
    if len(groups) == 1:
        names = [_common_name([run.records.name for run in runs])]
    made = tuple(
        RunGroup(name, tuple(sorted((runs[at] for at in group), key=_by_seed)))
        for name, group in zip(names, groups, strict=True)
    )
    said = [(path, settings, has_effect(path)) for path in differing if path not in UNSAID]
    said += [(path, surroundings, False) for path in _differing(surroundings)]
    differences = tuple(
        Difference(path, tuple(_values(facts, group, path) for group in groups), effect) for path, facts, effect in said
    )
    return made, differences


def has_effect(path: str) -> bool:
    """Return True if a setting may change what is trained."""
    return path != SEED and not any(fnmatchcase(path, pattern) for pattern in WITHOUT_EFFECT)


def is_newer_default(path: str, settings: Sequence[dict[str, Any]], environments: Sequence[dict[str, Any]]) -> bool:
    """Return True if a setting differs only as some configurations are of a version that did not have the field yet.

    All others then have its default, as the `differences` of their `environment.json` say.
    """
    for config, about in zip(settings, environments, strict=True):
        if path in config:
            beyond_defaults = about.get("differences")
            if not isinstance(beyond_defaults, dict) or path in beyond_defaults:
                return False
        elif any(known.startswith(f"{path}.") or path.startswith(f"{known}.") for known in config):
            return False  # a mapping in the place of a value
    return len({_key(config, [path]) for config in settings if path in config}) == 1


def comparable_settings(configs: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return flat configurations in which values that mean the same are equal.

    The output directory stands as `<output_dir>` wherever a value begins with it. A toolkit's configuration is left out
    where the run's own has the same: its output directories, and the seed of the policy.
    """

    def is_repeated(path: str, config: dict[str, Any]) -> bool:
        if not path.startswith("workflow.described."):
            return False
        if path.endswith(".seed"):
            return config.get(path.removesuffix("seed") + "_type") == "jaxft_policy"
        return path.endswith("finetuning.output_dir") or path.startswith("workflow.described.eval.general.output")

    made = []
    for config in configs:
        folder = config.get("finetuning.output_dir")
        own = {path: value for path, value in config.items() if not is_repeated(path, config)}
        made.append({path: map_texts(value, partial(_below, folder=folder)) for path, value in own.items()})
    return made


def shown(value: Any) -> str:
    """Return a value as YAML has it on one line; the middle of a long one is left out.

    >>> [shown(value) for value in (None, True, "dapo", 0.001, [1, 2])]
    ['null', 'true', 'dapo', '0.001', '[1, 2]']
    """
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
    return text or '""'


def short_paths(paths: Iterable[str], every_path: Iterable[str]) -> dict[str, str]:
    """Return for each dotted path its shortest end that no other path has.

    >>> short_paths(["loss.name", "loss.beta"], ["loss.name", "loss.beta", "optimizer.name"])
    {'loss.name': 'loss.name', 'loss.beta': 'beta'}
    """
    ends = Counter(end for path in {*every_path, *paths} for end in _ends(path))
    return {path: next((end for end in _ends(path) if ends[end] == 1), path) for path in paths}


def _ends(path: str) -> list[str]:
    parts = path.split(".")
    return [".".join(parts[-count:]) for count in range(1, len(parts) + 1)]


def _common_name(folders: Sequence[str]) -> str:
    """Return the name of the only group: that of its run, or what the names of its runs begin with.

    >>> _common_name(["game-0", "game-1"]), _common_name(["seed=0", "seed=1"]), _common_name(["alone-0"])
    ('game', 'all runs', 'alone-0')
    """
    if len(folders) == 1:
        return folders[0]
    columns = takewhile(lambda column: len(set(column)) == 1, zip(*folders, strict=False))
    shared = "".join(column[0] for column in columns)
    return shared.rstrip("0123456789").removesuffix("seed=").rstrip("-_.,= ") or "all runs"


def _names(facts: Sequence[dict[str, Any]], every_path: Sequence[str]) -> list[str]:
    """Return a name for each group from the fewest settings that tell all groups apart, chosen one after the other."""
    chosen: list[str] = []

    def distinct(paths: Sequence[str]) -> int:
        return len({_key(each, paths) for each in facts})

    while distinct(chosen) < len(facts):
        left = [path for path in facts[0] if path not in chosen]
        chosen.append(max(left, key=lambda path: distinct([*chosen, path])))
    short = short_paths(chosen, every_path)
    for limit in (MAX_VALUE, 10**6):
        names = [", ".join(_setting_label(short[path], each[path], limit) for path in chosen) for each in facts]
        if len(set(names)) == len(names):
            break
    return names


def _setting_label(path: str, value: Any, limit: int) -> str:
    return _short(value, limit) if path == FOLDER else f"{path}={_short(value, limit)}"


def _short(value: Any, limit: int) -> str:
    text = " ".join(shown(value).split())
    if "/" in text and limit == MAX_VALUE:
        text = text.rsplit("/", 1)[-1] or text
    return text if len(text) <= limit else f"{text[: limit // 2]}…{text[-limit // 2 + 1 :]}"


def _differing(facts: Sequence[dict[str, Any]]) -> list[str]:
    paths = list(dict.fromkeys(path for each in facts for path in each))
    return [path for path in paths if len({_key(each, [path]) for each in facts}) > 1]


def _key(facts: dict[str, Any], paths: Iterable[str]) -> str:
    return json.dumps([facts.get(path, ABSENT) for path in paths], default=str, sort_keys=True)


def _split(groups: Iterable[Sequence[int]], facts: Sequence[dict[str, Any]], paths: Sequence[str]) -> list[list[int]]:
    """Divide groups of indices into those whose facts agree at some paths."""
    found: dict[tuple[int, str], list[int]] = {}
    for place, group in enumerate(groups):
        for at in group:
            found.setdefault((place, _key(facts[at], paths)), []).append(at)
    return list(found.values())


def _by_seed(run: ComparedRun) -> tuple[float, str]:
    return (float("inf") if run.seed is None else run.seed, str(run.records.path))


def _surroundings(run: ComparedRun) -> dict[str, Any]:
    """Return versions, machine, commit, and the values of settings that were left to jaxft, by dotted path."""
    about = run.records.environment
    chosen = ("versions", "git_commit", "platform", "cpu_count", "devices", "chosen")
    return flat({"environment": {name: about[name] for name in chosen if about.get(name)}})


def _values(facts: Sequence[dict[str, Any]], group: Sequence[int], path: str) -> str:
    return " | ".join(dict.fromkeys(shown(facts[at].get(path, ABSENT)) for at in group))


def _below(text: str, folder: Any) -> str:
    if not isinstance(folder, str) or not folder:
        return text
    for known in (folder, os.path.abspath(folder)):
        if text == known or text.startswith(known.rstrip("/") + "/"):
            return "<output_dir>" + text[len(known.rstrip("/")) :]
    return text
