"""The episodes that a run has kept: found, chosen and read one at a time, as their files may be large.

`find_episodes` keeps the place of each, `spread` chooses among them, and `read_episodes` reads the chosen lines.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from jaxft.runs import (
    PAIRS_FILE,
    SAMPLES_FILE,
    TOKEN_SCORES_FILE,
    Row,
    episode_key,
    numbered_rows,
    parse_row,
    unreadable,
)

_SCORES_NAME = Path(TOKEN_SCORES_FILE).name

Span = tuple[int, int]
"""Position of a line's first byte in its file, and its number of bytes."""


class EpisodePlace(NamedTuple):
    """Position of an episode's row in its file, and the values that the row is chosen by.

    Attributes:
        file: the file.
        line: number of the line, from 1.
        span: position and size of the line.
        epoch: its epoch; None for a preference pair, which belongs to no epoch.
        reward: its reward; None for the report of a failed episode.
        example_id: its example; None if unknown.
        is_failure: True for the report of a failed episode.
        scores: the line with the advantages and entropies of its tokens; None without any.
    """

    file: Path
    line: int
    span: Span
    epoch: int | None
    reward: float | None
    example_id: str | None = None
    is_failure: bool = False
    scores: Span | None = None


def find_episodes(run: Path) -> list[EpisodePlace]:
    """Return the places of all episodes and pairs of a run, in the order of the files.

    A last line without its line feed is being written, and is left out.

    Raises:
        RunDirectoryError: a line cannot be read; the message names file and line.
    """
    scores = {episode_key(row): span for _, span, row in numbered_rows(run / TOKEN_SCORES_FILE)}
    return [
        EpisodePlace(
            file=run / name,
            line=number,
            span=span,
            epoch=row.get("epoch"),
            reward=row.get("reward"),
            example_id=row.get("example_id"),
            is_failure="failure" in row,
            scores=scores.get(episode_key(row)),
        )
        for name in (SAMPLES_FILE, PAIRS_FILE)
        for number, span, row in numbered_rows(run / name)
    ]


def read_episodes(places: Iterable[EpisodePlace]) -> Iterator[Row]:
    """Yield the rows at the given places, with `token_texts`, `advantages` and `entropies`, which may be None.

    Raises:
        RunDirectoryError: a line cannot be read, or is another by now; the message names file and line.
    """
    for place in places:
        row, scores = _read(place.file, place.span, place.line), Row()
        if place.scores is not None:
            scores = _read(place.file.with_name(_SCORES_NAME), place.scores)
        yield {"token_texts": None, **row, **{name: scores.get(name) for name in ("advantages", "entropies")}}


def _read(file: Path, span: Span, line: int | None = None) -> Row:
    try:
        with file.open("rb") as stream:
            stream.seek(span[0])
            return parse_row(file, line, stream.read(span[1]))
    except OSError as error:
        raise unreadable(file, error) from error


def questions(places: Sequence[EpisodePlace], examples: Iterable[str]) -> dict[str, str]:
    """Return the first message of a user for each of the examples that has one, from an episode that was kept."""
    wanted = set(examples)
    first = {place.example_id: place for place in reversed(places) if place.example_id in wanted}
    found = {}
    for example, row in zip(first, read_episodes(first.values()), strict=True):
        if question := first_question(row.get("episode") or ()):
            found[str(example)] = question
    return found


def first_question(episode: Iterable[Row]) -> str:
    """Return the first message of a user in one line; empty without any."""
    return " ".join(next((str(item.get("content")) for item in episode if item.get("role") == "user"), "").split())


def spread(places: Sequence[EpisodePlace], count: int) -> list[EpisodePlace]:
    """Return at most `count` of the places, in their order: alike many of each epoch, and over all rewards of it.

    >>> places = [EpisodePlace(Path("f"), i, (0, 0), epoch=i // 4, reward=float(i % 4)) for i in range(12)]
    >>> [(place.epoch, place.reward) for place in spread(places, 6)]
    [(0, 0.0), (0, 3.0), (1, 0.0), (1, 3.0), (2, 0.0), (2, 3.0)]
    """
    if len(places) <= count:
        return list(places)
    epochs: dict[int | None, list[EpisodePlace]] = defaultdict(list)
    for place in places:
        epochs[place.epoch].append(place)
    if count < len(epochs):
        names = list(epochs)
        epochs = {names[index]: epochs[names[index]] for index in _even(len(names), count)}
    left, kept = count, []
    for position, inner in enumerate(sorted(epochs.values(), key=len)):
        share = min(len(inner), left // (len(epochs) - position))
        left -= share
        ordered = sorted(inner, key=lambda place: (place.reward is None, place.reward or 0.0))
        kept += [ordered[index] for index in _even(len(ordered), share)]
    return sorted(kept, key=lambda place: (place.file.name != Path(SAMPLES_FILE).name, place.line))


def _even(length: int, count: int) -> list[int]:
    """Return `count` indices below `length` at even distances, both ends included."""
    if count == 1:
        return [length - 1]
    return [index * (length - 1) // (count - 1) for index in range(count)]
