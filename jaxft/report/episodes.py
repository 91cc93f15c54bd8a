"""The browser of episodes: blocks of compressed HTML, an index to filter and sort by, and a first page without script.

Fifty episodes are one block: their HTML, compressed and in base64, which the page's script unpacks when one of them is
shown or searched. So ten thousand episodes take a few megabytes.

A sampled token is a `<span class="t">` with a class per kind of shade (`a0` to `a8` for the advantage, `l` for the
log-probability, `e` for the entropy), so that a switch of the page chooses among them, and the numbers themselves in
`data-` attributes. The tokens of the prompt are not shaded; they are part of the messages.
"""

import base64
import json
import re
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import groupby
from typing import Any, NamedTuple

from markupsafe import Markup

from jaxft.report.charts import bucket
from jaxft.report.pages import render, visible
from jaxft.report.samples import EpisodePlace, first_question, read_episodes, spread
from jaxft.runs import PAIRS_FILE, Row, unreadable

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
MAX_SHADED_TOKENS = 4000
"""Largest number of tokens of an answer that are shaded; the others are shown as text."""
PREVIEW = 110

FAILED, CUT, TOOLS, UNSCORABLE = 1, 2, 4, 8
"""Bits of `Entry.flags`: it failed, a length limit cut it, it calls tools, its reward is not usable."""

_TOOL_ROLES = ("tool", "function")
_HAS_ADVANTAGE = re.compile(r" data-a=-?(?!0[ >])")

Scales = Mapping[str, tuple[float, float]]
"""Values of the first and the last shade, by the letter of their kind: advantage, log-probability, entropy."""


class Turn(NamedTuple):
    """The sampled tokens of one answer; what is not known of them is None.

    Attributes:
        number: position of the answer among those of the episode.
        texts: a text per token.
        values: advantages (`a`), log-probabilities (`l`) and entropies (`e`) per token.
        is_cut: True if the episode ends with it, at a length limit.
    """

    number: int
    texts: list[str] | None
    values: dict[str, list[float] | None]
    is_cut: bool


class Entry(NamedTuple):
    """The values that the page filters and sorts an episode by."""

    epoch: int | None
    example: str
    reward: float | None
    num_tokens: int
    flags: int


class Archive(NamedTuple):
    """The episodes of a report.

    Attributes:
        blocks: their HTML, compressed and in base64.
        entries: the index: lists of the entries of each block.
        first_page: HTML of the episodes that are shown first, as many as there is room for.
        scales: the values of the shades.
        num_found: number of the episodes and pairs in the run's files.
        num_pairs: number of the preference pairs among those.
    """

    blocks: list[str]
    entries: list[list[Entry]]
    first_page: Markup
    scales: Scales
    num_found: int
    num_pairs: int

    @property
    def num_shown(self) -> int:
        """Number of the episodes in the report."""
        return sum(map(len, self.entries))


def make_archive(places: Sequence[EpisodePlace], *, max_episodes: int, max_bytes: int = MAX_BYTES) -> Archive:
    """Read episodes and return them as an archive.

    Args:
        places: all episodes of the run.
        max_episodes: the number of episodes to keep; more are thinned alike over epochs and rewards.
        max_bytes: the size of the blocks; a larger archive keeps fewer episodes.

    Raises:
        RunDirectoryError: a line cannot be read; the message names it.
    """
    scales = shade_scales(read_episodes(spread(places, SCALE_EPISODES)))
    count = min(max_episodes, len(places))
    while True:
        kept = spread(places, count)
        blocks: list[str] = []
        entries: list[list[Entry]] = []
        for at in range(0, len(kept), BLOCK):
            made = list(_episodes(kept[at : at + BLOCK], scales))
            blocks.append(_pack_text(SEPARATOR.join(html for html, _ in made)))
            entries.append([entry for _, entry in made])
            size = sum(map(len, blocks))
            if size > max_bytes and len(kept) > 1:
                done = sum(map(len, entries))
                count = max(1, int(0.9 * done * max_bytes / size)) if done > 1 else 1
                break
        else:
            break
    first: list[str] = []
    room = MAX_STATIC
    newest_first = sorted(kept, key=lambda place: -1 if place.epoch is None else place.epoch, reverse=True)
    for html, _ in _episodes(newest_first[:PAGE], scales):
        room -= len(html)
        if first and room < 0:
            break
        first.append(html)
    # One is open, so that shades are seen at once; tokens whose advantage is 0 have none.
    opened = next((place for place, html in enumerate(first) if _HAS_ADVANTAGE.search(html)), 0)
    first[opened : opened + 1] = [html.replace("<details ", "<details open ", 1) for html in first[opened : opened + 1]]
    num_pairs = sum(place.epoch is None for place in places)
    return Archive(blocks, entries, Markup("".join(first)), scales, len(places), num_pairs)


def _episodes(places: Sequence[EpisodePlace], scales: Scales) -> Iterator[tuple[str, Entry]]:
    for place, row in zip(places, read_episodes(places), strict=True):
        kind = "p" if place.file.match(f"*/{PAIRS_FILE}") else "e"
        try:
            yield episode_html(row, f"{kind}{place.line}", scales)
        except (LookupError, TypeError, AttributeError) as error:  # JSON, but no episode
            raise unreadable(place.file, error, place.line) from error


def _pack_text(text: str) -> str:
    return base64.b64encode(zlib.compress(text.encode("utf-8"), 6)).decode("ascii")


def browser(archive: Archive, kept_by: str) -> dict[str, Any]:
    """Return the values of the template `episodes.html`; `kept_by` says which episodes the run keeps."""
    entries = [entry for block in archive.entries for entry in block]
    epochs, examples, rewards, tokens, flags = zip(*entries, strict=True) if entries else ((),) * len(Entry._fields)
    names = {name: at for at, name in enumerate(dict.fromkeys(examples))}
    index = {"page": PAGE, "blocks": [len(block) for block in archive.entries], "names": list(names)}
    index |= {"examples": [names[each] for each in examples], "epochs": epochs, "rewards": rewards}
    index |= {"tokens": tokens, "flags": flags}
    known = (letter for letter in archive.scales if f" data-{letter}=" in archive.first_page)
    return {
        "archive": archive,
        "kept_by": kept_by,
        "scales": {letter: archive.scales[letter] for letter in known},
        "index": _pack_text(json.dumps(index, separators=(",", ":"))),
    }


def sampled_turns(row: Row) -> list[Turn]:
    """Return the answers that a row has tokens of, in the order of its sequences."""
    turns: list[Turn] = []
    for place, sequence in enumerate(row.get("sequences") or ()):
        mask = sequence["completion_mask"]
        order = sequence.get("turns") or [None] * len(mask)
        texts, advantages, entropies = (
            None if row.get(name) is None else row[name][place] for name in ("token_texts", "advantages", "entropies")
        )
        columns = {"a": advantages, "l": sequence["sampler_logprobs"], "e": entropies}
        for (is_sampled, turn), span in groupby(range(len(mask)), key=lambda at: (mask[at], order[at])):
            positions = list(span)
            part = slice(positions[0], positions[-1] + 1)
            if is_sampled:
                turns.append(
                    Turn(
                        number=len(turns) if turn is None else turn,
                        texts=None if texts is None else [str(text or "") for text in texts[part]],
                        values={name: None if column is None else column[part] for name, column in columns.items()},
                        is_cut=bool(sequence.get("episode_truncated")) and part.stop == len(mask),
                    )
                )
    return turns


def episode_html(row: Row, key: str, scales: Scales) -> tuple[str, Entry]:
    """Return a row of `samples.jsonl` or `pairs.jsonl` as HTML, and its entry in the index.

    Args:
        row: an episode, a preference pair, or the report of a failed episode.
        key: a name for the row that stays the same when the page is written again.
        scales: the values of the shades.
    """
    if "failure" in row:
        report = str(row["failure"])
        first = report.splitlines()[0] if report else ""
        example = first.split("'")[1] if first.startswith("example '") and first.count("'") > 1 else "–"
        entry, marks, preview = Entry(row.get("epoch"), example, None, 0, FAILED), [("failed", "error")], first
        about: dict[str, Any] = {"failure": report, "question": ""}
    else:
        entry, marks, preview, about = _episode(row, scales)
    html = render(
        "episode.html",
        key=key,
        entry=entry,
        row=row,
        marks=marks,
        preview=" ".join(preview[: 4 * PREVIEW].split())[:PREVIEW],
        **about,
    )
    return html, entry


def _episode(row: Row, scales: Scales) -> tuple[Entry, list[tuple[str, str]], str, dict[str, Any]]:
    turns, metadata, items = sampled_turns(row), row.get("metadata") or {}, row["episode"]
    reasons, error, is_scorable = metadata.get("finish_reasons") or [], metadata.get("error"), row.get("scorable", True)
    is_pair = bool(items) and "chosen_response" in items[0]
    is_cut = "length" in reasons or any(each.get("truncated") for each in row.get("sequences") or ())
    results = sum(item.get("role") in _TOOL_ROLES for item in items)
    entry = Entry(
        epoch=row.get("epoch"),
        example=str(row.get("example_id") or metadata.get("id") or "–"),
        reward=row["reward"] if is_scorable else None,
        num_tokens=sum(len(turn.values["l"] or ()) for turn in turns),
        flags=FAILED * bool(error) | CUT * is_cut | TOOLS * bool(results) | UNSCORABLE * (not is_scorable),
    )
    marks = [
        *[("error", "error")] * bool(error),
        *[("cut by length", "warning")] * is_cut,
        *[("reward not usable", "warning")] * (not is_scorable),
        *[(f"{results} tool result{'s' * (results > 1)}", "info")] * bool(results),
    ]
    last = items[0]["chosen_response"] if is_pair else next((i["content"] for i in reversed(items) if i["content"]), "")
    about = {
        "failure": None,
        "question": first_question(items)[:PREVIEW],
        "messages": list(_pair(items[0], turns, scales) if is_pair else _messages(items, turns, reasons, scales)),
    }
    return entry, marks, str(last), about


def _messages(items: Sequence[Row], turns: Sequence[Turn], reasons: Sequence[str], scales: Scales) -> Iterator[Row]:
    """Yield the messages of an episode; an answer whose log-probabilities are those of a turn shows its tokens."""
    unmatched = list(turns)
    for item, following in zip(items, [*items[1:], {}], strict=True):
        role, content, logprobs = str(item.get("role")), str(item.get("content") or ""), item.get("logprobs")
        is_answer, marks = role == "assistant", []
        turn = next((each for each in unmatched if logprobs and each.values["l"] == logprobs), None)
        if turn is not None:
            unmatched.remove(turn)
            reason = reasons[turn.number] if 0 <= turn.number < len(reasons) else "length" if turn.is_cut else None
            if reason is not None:
                marks.append((f"finish: {reason}", "warning" if reason == "length" else "plain"))
        marks += [("calls a tool", "info")] * (is_answer and following.get("role") in _TOOL_ROLES)
        marks += [("not sampled", "plain")] * (is_answer and not logprobs)
        yield _message(role, "tool result" if role in _TOOL_ROLES else role, content, turn, scales, marks)
    for turn in unmatched:
        if turn.texts is not None:
            yield _message("assistant", "sampled tokens of no message", "", turn, scales)


def _pair(item: Row, turns: Sequence[Turn], scales: Scales) -> Iterator[Row]:
    prompt = item["prompt"]
    for message in [{"role": "prompt", "content": prompt}] if isinstance(prompt, str) else prompt:
        yield _message(str(message["role"]), str(message["role"]), str(message["content"]), None, scales)
    for place, name in enumerate(("chosen", "rejected")):
        turn = turns[place] if len(turns) == 2 else None
        yield _message(f"assistant {name}", name, str(item[f"{name}_response"]), turn, scales)


def _message(
    role: str, name: str, content: str, turn: Turn | None, scales: Scales, marks: Sequence[tuple[str, str]] = ()
) -> Row:
    """Return the values of a message: its tokens where their texts are known, and otherwise its text."""
    if turn is None or turn.texts is None:
        return {"role": role, "name": name, "marks": marks, "tokens": None, "content": content}
    return {
        "role": role,
        "name": name,
        "marks": marks,
        "tokens": _tokens(turn.texts[:MAX_SHADED_TOKENS], turn.values, scales),
        "rest": "".join(turn.texts[MAX_SHADED_TOKENS:]),
        "content": "" if content.strip() in "".join(turn.texts) else content,
    }


def _tokens(texts: Sequence[str], values: Mapping[str, list[float] | None], scales: Scales) -> Markup:
    """Return tokens as HTML, here and not in the template, which would take twice the time for a million of them."""
    columns = [(letter, column, scales[letter]) for letter, column in values.items() if column is not None]
    spans = []
    for at, text in enumerate(texts):
        classes = data = ""
        for letter, column, scale in columns:
            if (value := column[at]) is not None:
                classes += f" {letter}{bucket(value, scale)}"
                data += f" data-{letter}={value:.4g}"
        spans.append(f'<span class="t{classes}" tabindex=0{data}>{_visible_token(text)}</span>')
    return Markup("".join(spans))


_visible_token = lru_cache(4096)(visible)
"""`visible`, for texts that come again and again."""


def shade_scales(rows: Iterable[Row]) -> dict[str, tuple[float, float]]:
    """Return the values of the shades that suit some episodes.

    The middle shade of the advantage is 0, and the outermost fiftieth of the values share the outermost shades.
    """
    turns = [turn for row in rows if "failure" not in row for turn in sampled_turns(row)]
    found = {
        letter: [value for turn in turns for value in turn.values[letter] or () if value is not None]
        for letter in "ale"
    }
    advantage = _high([abs(value) for value in found["a"]], 0.1)
    surprise = _high([-value for value in found["l"]], 1.0)
    return {"a": (-advantage, advantage), "l": (0.0, -surprise), "e": (0.0, _high(found["e"], 0.5))}


def _high(values: list[float], least: float) -> float:
    """Return a round number that nearly all values lie below."""
    if not values:
        return least
    values.sort()
    high = max(values[int(0.98 * (len(values) - 1))], least)
    return float(f"{high:.2g}")
