"""The check of all configurations of a sweep before any run starts, in a forked process.

Loading a configuration imports the user's modules, which may import jax or take a device. The sweep itself must not: it
waits for hours while its runs use the devices.
"""

import json
import os
import sys
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jaxft.errors import ComponentError, ConfigError, JaxftError
from jaxft.harness.checkpointing import changes_of
from jaxft.harness.config import Config, resolved_yaml, secrets_of
from jaxft.harness.config_merge import OUTPUT_DIR
from jaxft.harness.strict_yaml import parse_yaml
from jaxft.redaction import hiding
from jaxft.report.sweep_grid import GridRun, Overrides
from jaxft.runs.environment import secrets_of_environment
from jaxft.runs.files import CONFIG_FILE

Load = Callable[[Overrides], Config]
"""Loads the configuration of the command line with further overrides."""

MAX_NAMES = 3


class CheckedRun(NamedTuple):
    """The part of a valid configuration that a sweep works with.

    Attributes:
        output_dir: its run directory.
        num_epochs: epochs that it trains for.
        changes: differences to the configuration that the run in that directory was made with, as texts.
    """

    output_dir: str
    num_epochs: int
    changes: tuple[str, ...]


def check_runs(runs: Sequence[GridRun], load: Load) -> list[CheckedRun]:
    """Load the configuration of every run in another process.

    Raises:
        ConfigError: lists every fault of every run, and runs that have the same configuration or directory.
    """
    found = _in_fork(lambda: _check(runs, load))
    if found["faults"]:
        raise ConfigError(found["faults"], "the sweep")
    return [CheckedRun(path, epochs, tuple(changes)) for path, epochs, changes in found["runs"]]


def _check(runs: Sequence[GridRun], load: Load) -> dict[str, Any]:
    by_fault: dict[str, list[str]] = {}
    configs: dict[str, Config] = {}
    for run in runs:
        try:
            configs[run.name] = load(run.overrides)
        except ConfigError as error:
            for fault in error.faults:
                by_fault.setdefault(fault, []).append(run.name)
        except JaxftError as error:
            by_fault.setdefault(str(error), []).append(run.name)
    faults = grouped(by_fault, len(runs))
    faults += _twins(configs)
    directories: dict[str, list[str]] = {}
    for name, config in configs.items():
        directories.setdefault(os.path.realpath(config.finetuning.output_dir), []).append(name)
    faults += [
        f"{OUTPUT_DIR}: {len(names)} runs have the directory '{configs[names[0]].finetuning.output_dir}' "
        f"({listed(names)}): add fields of what differs, or leave all fields out"
        for names in directories.values()
        if len(names) > 1
    ]
    if faults:
        return {"faults": faults, "runs": []}
    checked = []
    for config in configs.values():
        finetuning = config.finetuning
        checked.append((str(finetuning.output_dir), finetuning.num_epochs, _changes(config)))
    return {"faults": [], "runs": checked}


def _twins(configs: dict[str, Config]) -> list[str]:
    """Return a fault for every run whose configuration, directory apart, an earlier run has as well."""
    faults: list[str] = []
    seen: dict[str, list[tuple[str, Config]]] = {}
    for name, config in configs.items():
        finetuning = config.finetuning.model_copy(update={"output_dir": Path()})
        alike = config.model_copy(update={"finetuning": finetuning})
        # The text is fast to find, but secrets are masked in it.
        like_it = seen.setdefault(resolved_yaml(alike), [])
        same = [other for other, before in like_it if before == alike]
        faults += [f"'{name}' has the same configuration as '{same[0]}': remove one of them"] if same else []
        like_it.append((name, alike))
    return faults


def _changes(config: Config) -> list[str]:
    recorded = config.finetuning.output_dir / CONFIG_FILE
    if not recorded.is_file():
        return []
    with hiding(secrets_of(config) | secrets_of_environment()):
        now = parse_yaml(resolved_yaml(config), "the configuration")
    try:
        changes = changes_of(parse_yaml(recorded.read_text("utf-8"), str(recorded)), now)
    except (OSError, ValueError) as error:
        return [f"{CONFIG_FILE} cannot be read: {error}"]
    changes.pop(OUTPUT_DIR, None)  # the same directory by another name
    return [f"{path} {_shown(old)} -> {_shown(new)}" for path, (old, new) in changes.items()]


def _shown(value: Any) -> str:
    return "not set" if value is None else repr(value)[:60]


def grouped(by_fault: Mapping[str, Sequence[str]], total: int) -> list[str]:
    """Return each fault once, with the runs that have it unless all of them do.

    >>> grouped({"too small": ["a", "b"], "too large": ["b"]}, 2)
    ['too small', 'too large (b)']
    """
    return [fault if len(names) == total else f"{fault} ({listed(names)})" for fault, names in by_fault.items()]


def listed(names: Sequence[str]) -> str:
    """Return the first names of a list, and how many more there are.

    >>> listed(["a", "b"]), listed(["a", "b", "c", "d", "e"])
    ('a; b', 'a; b; c; and 2 more')
    """
    more = [f"and {len(names) - MAX_NAMES} more"] if len(names) > MAX_NAMES else []
    return "; ".join([*names[:MAX_NAMES], *more])


def _in_fork(function: Callable[[], Any]) -> Any:
    """Return what a function returns in a forked process, as JSON reads it back.

    Raises:
        ComponentError: that process ended without a result; it has shown why on standard error.
    """
    reader, writer = os.pipe()
    sys.stdout.flush()
    sys.stderr.flush()
    with warnings.catch_warnings():
        # A script may have imported jax, which warns of forks; nothing computes in this one.
        warnings.simplefilter("ignore")
        pid = os.fork()
    if pid == 0:
        code = 1
        try:
            os.close(reader)
            with os.fdopen(writer, "w", encoding="utf-8") as stream:
                json.dump(function(), stream)
            code = 0
        except KeyboardInterrupt:
            code = 130
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
    os.close(writer)
    with os.fdopen(reader, encoding="utf-8") as stream:
        content = stream.read()
    _, status = os.waitpid(pid, 0)
    if status != 0:
        ending = os.waitstatus_to_exitcode(status)
        raise ComponentError(f"the process that checks the configurations ended with code {ending}: see above")
    return json.loads(content)
