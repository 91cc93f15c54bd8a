"""Tells whether a run of an experiment is what one should see, by the rewards of other seeds.

    python experiments/expected.py tic_tac_toe runs/tic_tac_toe

prints a sentence for each run, such as "runs/tic_tac_toe is as expected: 5 of 70 epochs lie outside the band, 3.5 by
chance", in a second. The exit code is 0 if every run is as expected, 1 if one is not, 2 for bad input.

    python experiments/expected.py my_agent.json 'runs/my_agent-*' --make

makes such a reference from finished runs of several seeds, of equal settings and length, and never resumed.

At each epoch the band is Student's prediction interval for a new observation, `m ± t(n - 1) s sqrt(1 + 1/n)`: the range
of five seeds would leave a sixth outside one time in three. So a run that differs by its seed alone lies outside in
five of 100 epochs on average. Neighbouring epochs are outside together, so the count itself scatters: a run is
unexpected when more than `MAX_OUTSIDE` of its epochs are outside, or when a final figure is outside of an interval that
is widened for the number of figures (Bonferroni).
"""

import argparse
import json
import math
import os
import shlex
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from scipy import stats

from jaxft.errors import ConfigError, JaxftError, RunDirectoryError, did_you_mean
from jaxft.files import json_bytes, replace_file
from jaxft.redaction import map_texts
from jaxft.report.compared_runs import ComparedRun, default_last_epochs, find_runs
from jaxft.report.comparison import no_runs_message
from jaxft.report.comparison_text import aligned, seeds
from jaxft.report.intervals import LEVEL, Interval
from jaxft.report.pages import number
from jaxft.report.run_groups import (
    ABSENT,
    SEED,
    comparable_settings,
    group_runs,
    has_effect,
    is_newer_default,
    shown,
)

REFERENCES = Path(__file__).parent / "references"
"""Folder of the references, `<experiment>.json`."""
MAX_DIFFERENCES = 20
"""Number of differing settings that are listed."""
FIGURE_HEADERS = ["", "this run", "seeds of the reference", "expected", ""]
REFERENCE_KIND = "jaxft reference"
MAX_OUTSIDE = 0.25
"""Largest fraction of epochs outside of the band in a run that is as expected."""
MIN_HALF_WIDTH = 0.01
"""Smallest half of a band or an interval, as a fraction of the span of the rewards, or of the largest figure: where all
seeds agree, a difference in the last digits is none."""
MIN_STRETCH = 3
"""Smallest number of epochs at the end of a run that a verdict speaks of."""
NOT_JUDGED = ("epochs", "best_validation_epoch")
"""Figures that are shown and not judged."""
WORKFLOW, DATASET = "workflow._type", "eval.general.dataset"
"""Settings of which a run must share one with a reference to be of its experiment: one agent may be written anew."""
TIMES = ("seconds", "tokens_per_second")
"""Figures of the machine, which no reference keeps."""


@dataclass(frozen=True)
class ReferenceRun:
    """One seed of a reference: its mean reward at each epoch, and its figures by name."""

    seed: int
    rewards: tuple[float, ...]
    figures: dict[str, float]


@dataclass(frozen=True)
class Reference:
    """The recorded runs of an experiment.

    Attributes:
        experiment: its name.
        command: the command that makes a run of it, with `{seed}`.
        machine: versions, platform, processors and devices of the runs.
        settings: the settings that have an effect, by dotted path.
        runs: a run per seed.
    """

    experiment: str
    command: str
    machine: dict[str, Any]
    settings: dict[str, Any]
    runs: tuple[ReferenceRun, ...]

    @property
    def num_epochs(self) -> int:
        """Number of epochs that all runs have."""
        return min(len(run.rewards) for run in self.runs)


@dataclass(frozen=True)
class JudgedFigure:
    """A final figure of a run, and the interval in which that of a further seed is expected; None if not judged."""

    name: str
    value: float
    references: tuple[float, ...]
    interval: Interval | None

    @property
    def place(self) -> str:
        """The words `inside`, `below` or `above`, or none for a figure that is not judged."""
        return "" if self.interval is None else _place(self.value, self.interval)


@dataclass(frozen=True)
class Verdict:
    """A run held against a reference.

    Attributes:
        run: the run.
        band: interval of each epoch that both have.
        places: for each of these epochs `inside`, `below`, `above`, or `missing` without a finite reward.
        figures: final figures that both have.
        differences: settings with an effect that differ: path, value of the reference, value of the run.
        is_expected: True if the rewards and the judged figures are as expected.
        sentence: the verdict in words.
    """

    run: ComparedRun
    reference: Reference
    band: tuple[Interval, ...]
    places: tuple[str, ...]
    figures: tuple[JudgedFigure, ...]
    differences: tuple[tuple[str, str, str], ...]
    is_expected: bool
    sentence: str


def load_reference(name: str) -> Reference:
    """Read a reference of `REFERENCES`, or one of your own from a path that ends in `.json`.

    Raises:
        ConfigError: there is none of that name; the message lists the names.
        RunDirectoryError: the file is no reference.
    """
    source = Path(name) if name.endswith(".json") else REFERENCES / f"{name}.json"
    if not name.endswith(".json") and not source.is_file():
        known = sorted(file.stem for file in REFERENCES.glob("*.json"))
        raise ConfigError([f"no reference '{name}'{did_you_mean(name, known, what='references')}"])
    try:
        values = json.loads(source.read_text("utf-8"))
        if values["kind"] != REFERENCE_KIND or values["format_version"] != 1 or not values["runs"]:
            raise ValueError(f"it is no {REFERENCE_KIND} of format_version 1 with runs")
        runs = [
            ReferenceRun(
                seed=run["seed"],
                rewards=tuple(math.nan if reward is None else float(reward) for reward in run["reward_mean"]),
                figures={key: float(figure) for key, figure in run["figures"].items()},
            )
            for run in values["runs"]
        ]
        return Reference(values["experiment"], values["command"], values["machine"], values["settings"], tuple(runs))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise RunDirectoryError(
            f"'{name}' cannot be read as a reference ({type(error).__name__}: {error}): make one with --make"
        ) from error


def judge(run: ComparedRun, reference: Reference) -> Verdict:
    """Hold a run against a reference, over the epochs that both have."""
    rewards = run.rewards[: reference.num_epochs]
    histories = [each.rewards[: len(rewards)] for each in reference.runs]
    band = expected_band(histories)
    places = tuple(_place(reward, interval) for reward, interval in zip(rewards, band, strict=True))
    figures = tuple(_judged_figures(run, reference, rewards))
    differences = tuple(_differences(run, reference))
    is_expected, words = _words(run, places, figures)
    if _is_another_experiment(differences):
        is_expected = False
        words = f"of another experiment than {reference.experiment}: it differs in {WORKFLOW} and in {DATASET}"
    elif differences:
        unlike = "; ".join(f"{path} {ours} instead of {theirs}" for path, theirs, ours in differences[:3])
        more = f"; and {len(differences) - 3} more" if len(differences) > 3 else ""
        words = f"{words}; but its configuration is another one: {unlike}{more}"
    return Verdict(run, reference, band, places, figures, differences, is_expected, words)


def expected_band(histories: Sequence[Sequence[float]]) -> tuple[Interval, ...]:
    """Return the prediction interval of each epoch, from histories of one length.

    An epoch at which fewer than two seeds have a finite reward has an infinite interval.
    """
    finite = [reward for history in histories for reward in history if math.isfinite(reward)]
    least = MIN_HALF_WIDTH * (max(finite) - min(finite)) if finite else 0.0
    return tuple(_interval(rewards, LEVEL, least) for rewards in zip(*histories, strict=True))


def _interval(values: Sequence[float], level: float, least: float) -> Interval:
    """Return the interval in which one more observation lies with probability `level`, at least `least` to each side.

    It is exact if all are drawn from one normal distribution; of fewer than two finite values it is infinite.
    """
    known = [value for value in values if math.isfinite(value)]
    if len(known) < 2:
        return Interval(-math.inf, math.inf)
    mean, count = _mean(known), len(known)
    spread = float(np.std(known, ddof=1)) * math.sqrt(1 + 1 / count)
    half = max(float(stats.t.ppf((1 + level) / 2, count - 1)) * spread, least)
    return Interval(mean - half, mean + half)


def _place(value: float, interval: Interval) -> str:
    if not math.isfinite(value):
        return "missing"
    return "below" if value < interval.low else "above" if value > interval.high else "inside"


def _judged_figures(run: ComparedRun, reference: Reference, rewards: Sequence[float]) -> list[JudgedFigure]:
    count = default_last_epochs(len(rewards))
    ours = run.figures(count) if run.status == "finished" else {}
    theirs = [dict(each.figures) for each in reference.runs]
    ours.pop("final_reward", None)
    # Of a shorter run the same epochs of the reference; its own final figures are those of another length.
    is_whole = len(run.rewards) == reference.num_epochs
    if not is_whole:
        ours = {name: value for name, value in ours.items() if name in NOT_JUDGED}
    if rewards:
        ours = {"final_reward": _mean(rewards[-count:]), **ours}
        for known, each in zip(theirs, reference.runs, strict=True):
            known["final_reward"] = _mean(each.rewards[len(rewards) - count : len(rewards)])
    shared = [name for name in ours if sum(name in each for each in theirs) >= 2]
    num_judged = sum(name not in NOT_JUDGED for name in shared)
    made = []
    for name in shared:
        values = tuple(each[name] for each in theirs if name in each)
        interval = None
        if name not in NOT_JUDGED:
            least = MIN_HALF_WIDTH * max(map(abs, values))
            interval = _interval(values, 1 - (1 - LEVEL) / num_judged, least)
        made.append(JudgedFigure(name, ours[name], values, interval))
    return made


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


def with_absolute_paths(configs: Sequence[dict[str, Any]]) -> Sequence[dict[str, Any]]:
    """Return flat configurations in which a relative path is the absolute one that ends with it, if another has it."""
    for path in {path for each in configs for path in each}:
        texts = {text for each in configs for text in setting_texts(each.get(path)) if "/" in text or "." in text}
        absolute = {text for text in texts if os.path.isabs(text)}
        for each in configs:
            if absolute and absolute != texts and path in each:
                each[path] = map_texts(each[path], partial(_absolute, known=absolute))
    return configs


def setting_texts(value: Any) -> list[str]:
    """Return the texts of a setting: itself, or those of its list."""
    return [text for text in (value if isinstance(value, list) else [value]) if isinstance(text, str)]


def _absolute(text: str, known: Iterable[str]) -> str:
    """Return the only known absolute path that ends with a relative one; any other text unchanged."""
    if os.path.isabs(text):
        return text
    parts = Path(os.path.normpath(text)).parts
    ending = [each for each in known if Path(each).parts[-len(parts) :] == parts]
    return ending[0] if len(ending) == 1 else text


def _differences(run: ComparedRun, reference: Reference) -> list[tuple[str, str, str]]:
    ours, theirs = with_absolute_paths(comparable_settings([run.settings, reference.settings]))
    about = [run.records.environment, {"differences": {}}]
    found = []
    for path in {**theirs, **ours}:
        # A reference has no default that it does not say, but it may be older than a field.
        is_newer = path not in theirs and is_newer_default(path, [ours, theirs], about)
        if has_effect(path) and not is_newer and ours.get(path, ABSENT) != theirs.get(path, ABSENT):
            found.append((path, shown(theirs.get(path, ABSENT)), shown(ours.get(path, ABSENT))))
    return found


def _is_another_experiment(differences: Sequence[tuple[str, str, str]]) -> bool:
    paths = [path for path, _, _ in differences]
    return WORKFLOW in paths and any(path.startswith(DATASET) for path in paths)


def _words(run: ComparedRun, places: Sequence[str], figures: Sequence[JudgedFigure]) -> tuple[bool, str]:
    """Return whether a run is as expected, and the verdict in words."""
    if not places:
        return False, "without an epoch, so that there is nothing to judge"
    outside = sum(place != "inside" for place in places)
    by_chance = f"{outside} of {len(places)} epochs lie outside the band, {(1 - LEVEL) * len(places):.1f} by chance"
    if run.status == "failed":
        return False, f"failed after {len(run.rewards)} epochs: {run.ending}; {by_chance}"
    so_far = " so far" if run.status == "unfinished" else ""
    if outside > MAX_OUTSIDE * len(places):
        counts = {place: places.count(place) for place in ("below", "above", "missing")}
        word = max(counts, key=counts.__getitem__)
        name = "without a finite reward" if word == "missing" else word
        return False, f"{name} {_stretch(places, word)}{so_far}: {by_chance}"
    odd = [each for each in figures if each.place not in ("", "inside")]
    if odd:
        said = ", ".join(f"{each.name} {number(each.value)} is {each.place} {_brackets(each.interval)}" for each in odd)
        return False, f"as expected in its rewards, but not in its final figures{so_far}: {said}"
    final = next((each for each in figures if each.name == "final_reward"), None)
    end = "" if final is None else f"; final reward {number(final.value)} in {_brackets(final.interval)}"
    return True, f"as expected{so_far}: {by_chance}{end}"


def _stretch(places: Sequence[str], word: str) -> str:
    """Return since which epoch most epochs are of a kind, or how many are if they are spread."""
    first, last = places.index(word), len(places) - 1 - list(reversed(places)).index(word)
    for epoch in range(first, len(places) - MIN_STRETCH + 1):
        if places[epoch] == word and list(places[epoch:]).count(word) * 2 > len(places) - epoch:
            return f"since epoch {epoch}"
    return f"in {places.count(word)} epochs from {first} to {last}"


def _brackets(interval: Interval | None) -> str:
    return "" if interval is None else f"[{number(interval.low)}, {number(interval.high)}]"


def make_reference(experiment: str, runs: Sequence[ComparedRun], root: Path) -> dict[str, Any]:
    """Return the content of a reference file, made from runs that differ in their seeds only.

    Args:
        experiment: name of the experiment.
        runs: finished runs, at least two.
        root: the folder to which absolute paths of settings and of the command are made relative.

    Raises:
        RunDirectoryError: the runs are no reference, or name a path outside of `root`; the message names the run.
    """
    groups, differences = group_runs(runs)
    faults = [f"{run.records.path} is {run.status}" for run in runs if run.status != "finished"]
    faults += [f"{run.records.path} was resumed" for run in runs if run.resumes]
    faults += [f"{each.path} differs: {', '.join(each.values)}" for each in differences if each.has_effect]
    lengths = sorted({len(run.rewards) for run in runs})
    faults += [f"runs have {lengths} epochs"] * (len(lengths) > 1)
    faults += [f"{len(runs)} runs in {len(groups)} groups"] * (len(groups) > 1 or len(runs) < 2)
    if faults:
        raise RunDirectoryError(f"no reference can be made: {'; '.join(faults)}: give finished runs of several seeds")
    runs = groups[0].runs
    first = runs[0]
    about, prefix = first.records.environment, f"{root.resolve()}/"
    settings = {path: value for path, value in comparable_settings([first.settings])[0].items() if has_effect(path)}
    settings = {path: map_texts(value, lambda text: text.removeprefix(prefix)) for path, value in settings.items()}
    command = _command(about.get("command") or [], prefix)
    outside = [f"{path}: {value}" for path, value in {**settings, "command": command.split()}.items()
               if any(Path(text).is_absolute() for text in setting_texts(value))]  # fmt: skip
    if outside:
        raise RunDirectoryError(f"paths lie outside of '{root}': {'; '.join(outside)}: give the runs' own --root")
    count = default_last_epochs(len(first.rewards))
    return {
        "kind": REFERENCE_KIND,
        "format_version": 1,
        "experiment": experiment,
        "command": command,
        "machine": {name: about.get(name) for name in ("versions", "platform", "cpu_count", "devices")},
        "settings": settings,
        "runs": [
            {
                "seed": run.seed,
                "reward_mean": [round(reward, 6) if math.isfinite(reward) else None for reward in run.rewards],
                "figures": {name: round(value, 6) for name, value in run.figures(count).items() if name not in TIMES},
            }
            for run in runs
        ],
    }


def _command(arguments: Sequence[str], prefix: str) -> str:
    """Return the command of a run without options that have no effect, and with `{seed}`."""
    kept, left = ["python"], [argument.removeprefix(prefix) for argument in arguments]
    if left and Path(left[0]).name == "jaxft":  # which stands in an environment, not under the prefix
        kept = [Path(left.pop(0)).name]
    while left:
        argument = left.pop(0)
        if argument == "--set" and left:
            path, _, value = left.pop(0).partition("=")
            if has_effect(path):
                kept += ["--set", f"{path}={value}"]
        elif argument not in ("--overwrite", "--resume"):
            kept.append(argument)
    return shlex.join(kept) + f" --set {SEED}={{seed}}"


def verdict_text(verdicts: Sequence[Verdict], width: int = 120) -> str:
    """Return the verdicts as text for a terminal: a sentence for each run, then its figures and its differences."""
    parts = [reference_text(verdicts[0].reference)]
    for verdict in verdicts:
        parts.append(f"{verdict.run.records.path} is {verdict.sentence}")
        if verdict.figures:
            parts.append(aligned([FIGURE_HEADERS, *figure_rows(verdict)], width))
        lines = [f"- {words}" for words in qualifications(verdict)]
        if lines:
            parts.append("\n".join(lines))
    return "\n\n".join(parts)


def reference_text(reference: Reference) -> str:
    """Return what the reference is, in one line."""
    return (
        f"Reference {reference.experiment}: seeds {seeds(run.seed for run in reference.runs)}, "
        f"{reference.num_epochs} epochs, made by: {reference.command}"
    )


def figure_rows(verdict: Verdict) -> list[list[str]]:
    """Return a row for each final figure: name, value, values of the reference, interval, and the place in it."""
    return [
        [
            each.name,
            number(each.value),
            f"{number(min(each.references))} to {number(max(each.references))}",
            _range(each.interval),
            each.place or "not judged",
        ]
        for each in verdict.figures
    ]


def qualifications(verdict: Verdict) -> list[str]:
    """Return what qualifies a verdict: other settings, the length of the run, its seed, and the machine."""
    reference, run = verdict.reference, verdict.run
    found = [f"{path}: {ours} here, {theirs} in the reference" for path, theirs, ours in verdict.differences]
    if len(found) > MAX_DIFFERENCES:
        found = [*found[:MAX_DIFFERENCES], f"and {len(found) - MAX_DIFFERENCES} more settings"]
    if len(run.rewards) != reference.num_epochs:
        found.append(
            f"{len(run.rewards)} epochs here, {reference.num_epochs} in the reference: the first {len(verdict.places)} "
            "are compared, and figures of result.json are not judged"
        )
    if run.seed in {each.seed for each in reference.runs}:
        found.append(f"seed {run.seed} is one of the reference's: on an equal machine the run repeats it")
    about = run.records.environment
    ours, theirs = about.get("versions"), reference.machine.get("versions")
    if isinstance(ours, dict) and isinstance(theirs, dict):
        other = [f"{name} {ours.get(name)} ({theirs[name]})" for name in theirs if ours.get(name) != theirs[name]]
        if other:
            found.append(f"other versions than the reference's, which are in brackets: {', '.join(other)}")
    if about.get("devices") != reference.machine.get("devices"):
        found.append(f"devices {about.get('devices')} here, {reference.machine.get('devices')} in the reference")
    elif about.get("cpu_count") != reference.machine.get("cpu_count"):
        found.append(f"{about.get('cpu_count')} cores here, {reference.machine.get('cpu_count')} in the reference")
    return found


def _range(interval: Interval | None) -> str:
    return "–" if interval is None else f"{number(interval.low)} to {number(interval.high)}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Hold runs against a reference, or make one of them, and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("reference", help="its name, as in tic_tac_toe, or its .json file")
    parser.add_argument("runs", nargs="+", help="run directories, or globs")
    parser.add_argument("--make", action="store_true", help="make the .json file of these runs")
    parser.add_argument("--root", type=Path, default=Path(), help="with --make: the folder that paths are relative to")
    given = parser.parse_args(arguments)
    try:
        runs, left_out = find_runs(given.runs)
        if not runs or (given.make and left_out):
            raise RunDirectoryError(no_runs_message(left_out))
        if given.make:
            file = Path(given.reference)
            replace_file(file, json_bytes(make_reference(file.stem, runs, given.root)))
            print(f"written to {file}: {seeds(run.seed for run in runs)}")
            return 0
        reference = load_reference(given.reference)
    except JaxftError as error:
        print(f"expected.py: error: {error}", file=sys.stderr)
        return error.exit_code
    verdicts = [judge(run, reference) for run in runs]
    print(verdict_text(verdicts))
    for each in left_out:
        print(f"left out: '{each.path}' {each.reason}")
    return 0 if all(verdict.is_expected for verdict in verdicts) else 1


if __name__ == "__main__":
    sys.exit(main())
