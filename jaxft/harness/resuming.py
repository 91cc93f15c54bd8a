"""Going on with a run: may it, with this configuration, and what is said of it."""

from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Any

from jaxft.harness.config import Config, resolved_yaml
from jaxft.harness.errors import ConfigError
from jaxft.harness.strict_yaml import parse_yaml
from jaxft.runs.directory import RESUMES_FILE, RunDirectory
from jaxft.runs.redaction import redacted

IMMUTABLE = (
    "finetuning.seed",
    "finetuning.trainer",
    "finetuning.trajectory_builder",
    "finetuning.trainer_adapter",
    "llms.*._type",
    "llms.*.path",
    "llms.*.preset",
    "llms.*.tokenizer",
    "llms.*.dtype",
    "llms.*.lora",
    "llms.*.lora.*",
    "trainers.*._type",
    "trajectory_builders.*._type",
    "trainer_adapters.*._type",
    "trainer_adapters.*.llm",
    "trainer_adapters.*.optimizer.name",
)
"""What a run is: with another model, optimiser or seed it would be another run."""

Changes = dict[str, tuple[Any, Any]]
"""Values before and now, by dotted path."""


def changes_of(before: Mapping[str, Any], now: Mapping[str, Any]) -> Changes:
    """Where two trees of plain values differ; None stands for what is not there.

    >>> changes_of({"a": {"x": 1, "y": 2}}, {"a": {"x": 1, "y": 3}, "b": [1]})
    {'a.y': (2, 3), 'b': (None, [1])}
    """
    changes: Changes = {}
    for name in [*before, *(name for name in now if name not in before)]:
        old, new = before.get(name), now.get(name)
        if isinstance(old, Mapping) and isinstance(new, Mapping):
            changes |= {f"{name}.{path}": values for path, values in changes_of(old, new).items()}
        elif old != new:
            changes[name] = (old, new)
    return changes


def check_changes(directory: RunDirectory, config: Config, config_file: str) -> Changes:
    """What was changed since the run was begun.

    Raises:
        ConfigError: something that must not be, or a secret that the run did not keep is missing.
    """
    recorded = directory.path / config_file
    try:
        before = parse_yaml(recorded.read_text("utf-8"), str(recorded))
    except OSError as error:
        raise ConfigError([f"{recorded}: cannot be read ({error.strerror}): without it a run cannot go on"]) from None
    now = parse_yaml(resolved_yaml(config), "the configuration")
    changes = changes_of(before, now)
    changes.pop("finetuning.output_dir", None)  # the same directory by another name, or moved
    faults = [
        f"{path}: was {_shown(old)} and is {_shown(new)}: a run goes on with what it was begun with"
        for path, (old, new) in changes.items()
        if any(fnmatchcase(path, pattern) for pattern in IMMUTABLE)
    ]
    if faults:
        raise ConfigError(faults, f"the resumed run '{directory.path}'")
    return changes


def masked_paths(config: Config) -> list[str]:
    """Where a configuration holds secrets, alone or in a longer text, which a run does not keep."""

    def search(value: Any, path: str) -> list[str]:
        if isinstance(value, Mapping):
            return [found for name, inner in value.items() for found in search(inner, f"{path}.{name}".strip("."))]
        if isinstance(value, list):
            return [found for index, inner in enumerate(value) for found in search(inner, f"{path}.{index}")]
        is_secret = isinstance(value, str) and value and (not value.strip("*") or redacted(value) != value)
        return [path] if is_secret else []

    return search(config.model_dump(mode="json"), "")


def record(directory: RunDirectory, checkpoint: int | None, changes: Changes, now: Mapping[str, Any]) -> list[str]:
    """Writes down that the run goes on, from which checkpoint and with what, and gives what in its surroundings is not
    as it was, in words; `now` is its `environment`."""
    try:
        before = directory.read_json("environment.json").get("versions", {})
    except (OSError, ValueError):
        before = {}
    row = {"checkpoint": checkpoint, "changes": {path: list(values) for path, values in changes.items()}, **now}
    directory.append_jsonl(RESUMES_FILE, row)
    return [
        f"{name} was {before[name]} when the run was begun and is {version}: figures may differ in the last digits"
        for name, version in now["versions"].items()
        if name in before and before[name] != version
    ]


def _shown(value: Any) -> str:
    return "not set" if value is None else repr(value)
