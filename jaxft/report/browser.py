"""The browser of episodes: blocks of compressed HTML, an index to filter and sort by, and a first page without script.

Fifty episodes are one block: their HTML, compressed and in base64, which the page's script unpacks when one of them is
shown or searched. So ten thousand episodes take a few megabytes, and are rendered and escaped in one place, here.
"""

import base64
import json
import multiprocessing
import re
import signal
import zlib
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from typing import NamedTuple

from jaxft.report.charts import scale as scale_key
from jaxft.report.episodes import Fragment, Scale, fragment, scale_of
from jaxft.report.markup import Markup, tag
from jaxft.report.page import section
from jaxft.report.samples import Place, read_episodes, spread
from jaxft.runs.files import PAIRS_FILE
from jaxft.runs.records import unreadable

BLOCK = 50
"""Episodes of a block."""
PAGE = 20
"""Episodes of a page."""
MAX_BYTES = 18_000_000
"""Largest size of all blocks together, so that a browser opens the page in a moment."""
MAX_STATIC = 400_000
"""Characters of HTML after which the page that needs no script ends."""
SCALE_EPISODES = 200
"""Episodes whose tokens the shades are made for."""
SEPARATOR = "\x1e"

_HAS_ADVANTAGE = re.compile(r" data-a=-?(?!0[ >])")

SHADES = (("a", "advantage"), ("l", "log-probability"), ("e", "entropy"))


class Block(NamedTuple):
    """Some episodes as compressed HTML in base64, and an entry of the index for each, whose `html` is empty."""

    data: str
    entries: list[Fragment]


class Archive(NamedTuple):
    """The episodes of a report.

    Attributes:
        blocks: their HTML.
        first_page: HTML of the episodes that are shown first, as many as there is room for.
        scale: the values of the shades.
        num_found: number of the episodes and pairs in the run's files.
        num_pairs: number of the preference pairs among those.
    """

    blocks: list[Block]
    first_page: Markup
    scale: Scale
    num_found: int
    num_pairs: int

    @property
    def entries(self) -> list[Fragment]:
        """The index of all episodes."""
        return [entry for block in self.blocks for entry in block.entries]


def make_archive(
    places: Sequence[Place], *, max_episodes: int, max_bytes: int = MAX_BYTES, processes: int = 1
) -> Archive:
    """Read episodes and return them as an archive.

    Args:
        places: all episodes of the run.
        max_episodes: the number of episodes to keep; more are thinned alike over epochs and rewards.
        max_bytes: the size of the blocks; a larger archive keeps fewer episodes.
        processes: processes that make blocks; above 1 only where forking is safe, so never beside a running jax.

    Raises:
        RunDirectoryError: a line cannot be read; the message names it.
    """
    scale = scale_of(read_episodes(spread(places, SCALE_EPISODES)))
    count = min(max_episodes, len(places))
    while True:
        kept = spread(places, count)
        blocks, size = [], 0
        for block in _blocks(kept, scale, processes):
            blocks.append(block)
            size += len(block.data)
            if size > max_bytes and len(kept) > 1:
                break
        else:
            break
        done = sum(len(block.entries) for block in blocks)
        count = max(1, int(0.9 * done * max_bytes / size)) if done > 1 else 1
    first: list[str] = []
    room = MAX_STATIC
    newest_first = sorted(kept, key=lambda place: -1 if place.epoch is None else place.epoch, reverse=True)
    for made in _fragments(newest_first[:PAGE], scale):
        room -= len(made.html)
        if first and room < 0:
            break
        first.append(made.html)
    # One is open, so that shades are seen at once; tokens whose advantage is 0 have none.
    opened = next((place for place, html in enumerate(first) if _HAS_ADVANTAGE.search(html)), 0)
    first[opened : opened + 1] = [html.replace("<details ", "<details open ", 1) for html in first[opened : opened + 1]]
    num_pairs = sum(place.epoch is None for place in places)
    return Archive(blocks, Markup("".join(first)), scale, len(places), num_pairs)


def _blocks(places: Sequence[Place], scale: Scale, processes: int) -> Iterator[Block]:
    batches = [places[at : at + BLOCK] for at in range(0, len(places), BLOCK)]
    if processes < 2 or len(batches) < 2 * processes:
        yield from map(partial(_block, scale=scale), batches)
        return
    context = multiprocessing.get_context("fork")
    with ProcessPoolExecutor(processes, context, initializer=_leave_signals) as pool:
        yield from pool.map(partial(_block, scale=scale), batches, chunksize=4)


def _leave_signals() -> None:
    """Leave Ctrl-C to the parent process, which ends the pool."""
    signal.set_wakeup_fd(-1)  # the parent's
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _block(places: Sequence[Place], scale: Scale) -> Block:
    made = list(_fragments(places, scale))
    html = SEPARATOR.join(each.html for each in made)
    return Block(_packed(html), [each._replace(html="") for each in made])


def _fragments(places: Sequence[Place], scale: Scale) -> Iterator[Fragment]:
    for place, row in zip(places, read_episodes(places), strict=True):
        kind = "p" if place.file.match(f"*/{PAIRS_FILE}") else "e"
        try:
            yield fragment(row, f"{kind}{place.line}", scale)
        except (LookupError, TypeError, AttributeError) as error:  # JSON, but no episode
            raise unreadable(place.file, error, place.line) from error


def _packed(text: str) -> str:
    return base64.b64encode(zlib.compress(text.encode("utf-8"), 6)).decode("ascii")


def browser_section(archive: Archive, kept_by: str) -> Markup:
    """Return the section with the episodes of a report; `kept_by` says which episodes the run keeps."""
    entries = archive.entries
    if not entries:
        words = f"This run has kept no episodes yet ({kept_by})."
        return section("episodes", "Episodes", tag("p", {"class": "empty"}, words))
    noun = "preference pairs" if archive.num_pairs == archive.num_found else "episodes"
    shown = (
        f"{len(entries):,} {noun}"
        if len(entries) == archive.num_found
        else (
            f"{len(entries):,} of {archive.num_found:,} {noun}, alike many of each epoch and over all rewards "
            "(more with --max-episodes)"
        )
    )
    lead = f"{shown}, of {kept_by}. Sampled tokens are shaded; point at one, or focus it, to read its numbers."
    listed = tag("div", {"id": "episode-list", "aria-live": "polite"}, archive.first_page)
    return section(
        "episodes",
        "Episodes",
        tag("noscript", {}, tag("p", {"class": "notice"}, "Filters and further pages need JavaScript.")),
        _filters(),
        *_switch(archive),
        listed,
        _pager(),
        _data("episode-index", _index(archive)),
        *(_data(f"block-{number}", block.data) for number, block in enumerate(archive.blocks)),
        lead=lead,
    )


def _data(key: str, packed: str) -> Markup:
    return tag("script", {"type": "application/octet-stream", "id": key}, Markup(packed))


def _index(archive: Archive) -> str:
    """Return the columns of the index as compressed JSON in base64."""
    entries = archive.entries
    names = {name: number for number, name in enumerate(dict.fromkeys(entry.example for entry in entries))}
    columns = {
        "page": PAGE,
        "blocks": [len(block.entries) for block in archive.blocks],
        "names": list(names),
        "examples": [names[entry.example] for entry in entries],
        "epochs": [entry.epoch for entry in entries],
        "rewards": [entry.reward for entry in entries],
        "tokens": [entry.num_tokens for entry in entries],
        "flags": [entry.flags for entry in entries],
    }
    return _packed(json.dumps(columns, separators=(",", ":")))


def _switch(archive: Archive) -> Iterator[Markup]:
    """Yield the radio buttons that choose what tokens are shaded by, with a key for each.

    They stand before the list of episodes, so that style sheets alone change the shades.
    """
    html = archive.first_page
    known = [letter for letter, _ in SHADES if f" data-{letter}=" in html]
    scales = dict(zip("ale", archive.scale, strict=True))
    if not known:
        yield tag("p", {"class": "note"}, "Tokens are not shaded: the run has not kept their texts.")
        return
    yield tag("span", {"class": "switch-name", "id": "shade-by"}, "Shade by")
    for letter, name in SHADES:
        attributes = {
            "type": "radio",
            "name": "shade",
            "id": f"shade-{letter}",
            "checked": letter == known[0],
            "disabled": letter not in known,
            "aria-describedby": "shade-by",
        }
        yield tag("input", attributes)
        yield tag("label", {"for": f"shade-{letter}"}, name)
    yield tag("input", {"type": "radio", "name": "shade", "id": "shade-0"})
    yield tag("label", {"for": "shade-0"}, "nothing")
    for letter in known:
        key = scale_key(scales[letter], "diverging" if letter == "a" else "sequential")
        yield tag("div", {"class": f"shade-key key-{letter}"}, key)


def _filters() -> Markup:
    def field(label: str, control: Markup) -> Markup:
        return tag("label", {}, tag("span", {}, label), control)

    def box(key: str, placeholder: str) -> Markup:
        return tag("input", {"id": key, "type": "number", "step": "any", "placeholder": placeholder})

    sorts = (
        ("newest", "newest epoch"),
        ("oldest", "oldest epoch"),
        ("best", "highest reward"),
        ("worst", "lowest reward"),
        ("longest", "most tokens"),
    )
    outcomes = (
        ("all", "all"),
        ("failed", "failed or with an error"),
        ("cut", "cut by length"),
        ("tools", "with tool calls"),
        ("unscorable", "reward not usable"),
    )
    select = {
        key: tag("select", {"id": key}, *(tag("option", {"value": value}, words) for value, words in options))
        for key, options in (("f-sort", sorts), ("f-outcome", outcomes))
    }
    pair = {"class": "pair"}
    return tag(
        "form",
        {"id": "filters", "class": "needs-js", "role": "search", "aria-label": "Filter episodes"},
        field("Sort by", select["f-sort"]),
        field("Outcome", select["f-outcome"]),
        field("Epoch", tag("span", pair, box("f-epoch-low", "from"), box("f-epoch-high", "to"))),
        field("Reward", tag("span", pair, box("f-reward-low", "from"), box("f-reward-high", "to"))),
        field(
            "Example", tag("input", {"id": "f-example", "type": "search", "list": "f-examples", "placeholder": "any"})
        ),
        tag("datalist", {"id": "f-examples"}),
        field("Text", tag("input", {"id": "f-text", "type": "search", "placeholder": "in messages"})),
        tag("button", {"type": "reset"}, "Clear"),
    )


def _pager() -> Markup:
    return tag(
        "div",
        {"class": "pager needs-js"},
        tag("button", {"id": "page-back", "type": "button"}, "← Previous"),
        tag("span", {"id": "page-state", "role": "status"}),
        tag("button", {"id": "page-on", "type": "button"}, "Next →"),
    )
