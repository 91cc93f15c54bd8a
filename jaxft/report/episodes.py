"""One episode as HTML: its messages with roles, tool calls and stop reasons, and each sampled token with its numbers.

A token is a `<span class="t">` with a class per kind of shade (`a0` to `a8` for the advantage, `l` for the
log-probability, `e` for the entropy), so that a switch of the page chooses among them, and the numbers themselves in
`data-` attributes. The tokens of the prompt are not shaded; they are part of the messages.
"""

import functools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from jaxft.report.charts import bucket, shortened
from jaxft.report.markup import escaped, number, visible
from jaxft.report.samples import question_of
from jaxft.runs.records import Row

MAX_SHADED_TOKENS = 4000
"""Largest number of tokens of an answer that are shaded; the others are shown as text."""
MAX_CHARACTERS = 20_000
"""Largest number of characters of a text; the file of the run has the others."""
PREVIEW = 110

FAILED, CUT, TOOLS, UNSCORABLE = 1, 2, 4, 8
"""Bits of `Fragment.flags`: it failed, a length limit cut it, it calls tools, its reward is not usable."""

_TOOL_ROLES = ("tool", "function")


class Scale(NamedTuple):
    """The values of the first and the last shade of each kind."""

    advantage: tuple[float, float]
    logprob: tuple[float, float]
    entropy: tuple[float, float]


class Turn(NamedTuple):
    """The sampled tokens of one answer; what is not known of them is None.

    Attributes:
        number: position of the answer among those of the episode.
        logprobs: a log-probability per token.
        texts, advantages, entropies: a value per token.
        is_cut: True if the episode ends with it, at a length limit.
    """

    number: int
    logprobs: list[float]
    texts: list[str] | None
    advantages: list[float] | None
    entropies: list[float] | None
    is_cut: bool


class Fragment(NamedTuple):
    """An episode as HTML, with what the page filters and sorts by."""

    html: str
    epoch: int | None
    example: str
    reward: float | None
    num_tokens: int
    flags: int


def turns_of(row: Row) -> list[Turn]:
    """Return the answers that a row has tokens of, in the order of its sequences."""
    turns: list[Turn] = []
    for place, sequence in enumerate(row.get("sequences") or ()):
        mask, order = sequence["completion_mask"], sequence.get("turns")
        known = (_of_sequence(row, name, place) for name in ("token_texts", "advantages", "entropies"))
        texts, advantages, entropies = known
        start = 0
        while True in mask[start:]:
            start = mask.index(True, start)
            end = start + 1
            while end < len(mask) and mask[end] and (not order or order[end] == order[start]):
                end += 1
            turns.append(
                Turn(
                    order[start] if order else len(turns),
                    sequence["sampler_logprobs"][start:end],
                    None if texts is None else [str(text or "") for text in texts[start:end]],
                    None if advantages is None else advantages[start:end],
                    None if entropies is None else entropies[start:end],
                    bool(sequence.get("episode_truncated")) and end == len(mask),
                )
            )
            start = end
    return turns


def _of_sequence(row: Row, name: str, place: int) -> list[Any] | None:
    values = row.get(name)
    return None if values is None else values[place]


def fragment(row: Row, key: str, scale: Scale) -> Fragment:
    """Return a row of `samples.jsonl` or `pairs.jsonl` as HTML.

    Args:
        row: an episode, a preference pair, or the report of a failed episode.
        key: a name for the row that stays the same when the page is written again.
        scale: the values of the shades.
    """
    if "failure" in row:
        return _failure(row, key)
    turns = turns_of(row)
    metadata = row.get("metadata") or {}
    items = row["episode"]
    reasons = metadata.get("finish_reasons") or []
    is_pair = bool(items) and "chosen_response" in items[0]
    messages = _pair(items[0], turns, scale) if is_pair else _messages(items, turns, reasons, scale)
    is_cut = "length" in reasons or any(each.get("truncated") for each in row.get("sequences") or ())
    roles = [item.get("role") for item in items]
    num_tool_results = sum(role in _TOOL_ROLES for role in roles)
    error, is_scorable = metadata.get("error"), row.get("scorable", True)
    flags = FAILED * bool(error) | CUT * is_cut | TOOLS * bool(num_tool_results) | UNSCORABLE * (not is_scorable)
    example = str(row.get("example_id") or metadata.get("id") or "–")
    reward = row["reward"] if is_scorable else None
    num_tokens = sum(len(turn.logprobs) for turn in turns)
    last = items[0]["chosen_response"] if is_pair else next((i["content"] for i in reversed(items) if i["content"]), "")
    marks = [
        _mark("error", "error") if error else "",
        _mark("cut by length", "warning") if is_cut else "",
        _mark("reward not usable", "warning") if not is_scorable else "",
        _mark(f"{num_tool_results} tool result{'s' * (num_tool_results > 1)}", "info") if num_tool_results else "",
    ]
    where = f"generation {row['generation']}" if row.get("generation") is not None else ""
    head = _summary(row.get("epoch"), example, where, reward, marks, num_tokens, str(last), question_of(items))
    body = f"{_about(row, metadata)}<ol class=messages>{''.join(messages)}</ol>"
    html = f'<details class="episode" id="{escaped(key)}">{head}<div class=body>{body}</div></details>'
    return Fragment(html, row.get("epoch"), example, reward, num_tokens, flags)


def _failure(row: Row, key: str) -> Fragment:
    report = str(row["failure"])
    first = report.splitlines()[0] if report else ""
    example = first.split("'")[1] if first.startswith("example '") and first.count("'") > 1 else "–"
    head = _summary(row.get("epoch"), example, "", None, [_mark("failed", "error")], None, first)
    body = f"<pre class=code tabindex=0>{visible(report[:MAX_CHARACTERS])}</pre>"
    html = f'<details class="episode" id="{escaped(key)}">{head}<div class=body>{body}</div></details>'
    return Fragment(html, row.get("epoch"), example, None, 0, FAILED)


def _summary(
    epoch: int | None,
    example: str,
    where: str,
    reward: float | None,
    marks: Iterable[str],
    num_tokens: int | None,
    preview: str,
    question: str = "",
) -> str:
    when = "pair" if epoch is None else f"epoch {epoch}"
    size = "" if num_tokens is None else f"{num_tokens:,} tokens"
    asked = f"<bdi class=question>{escaped(question[:PREVIEW])}</bdi> → " if question else ""
    shown = escaped(" ".join(preview[: 4 * PREVIEW].split())[:PREVIEW])
    return (
        f"<summary><span class=reward>{escaped(number(reward))}</span><span class=when>{when}</span>"
        f"<b>{escaped(shortened(example, 40))}</b><span class=quiet>{where}</span><span class=quiet>{size}</span>"
        f"{''.join(marks)}<span class=preview>{asked}<bdi>{shown}</bdi></span></summary>"
    )


def _mark(words: str, kind: str) -> str:
    return f'<span class="badge {kind}">{escaped(words)}</span>'


def _about(row: Row, metadata: Row) -> str:
    """Return what is known of an episode beside its messages: named rewards, the evaluator's words, an error."""
    facts: list[tuple[str, str]] = []
    named = row.get("named_rewards") or {}
    facts += [(name, number(value)) for name, value in named.items()]
    if metadata.get("score") is not None and metadata["score"] != row.get("reward"):
        facts.append(("score", number(metadata["score"])))
    if row.get("shaped_rewards"):
        facts.append(("shaped rewards", ", ".join(map(number, row["shaped_rewards"][:50]))))
    for name in ("chosen_score", "rejected_score", "turn_id"):
        if metadata.get(name) is not None:
            facts.append((name.replace("_", " "), number(metadata[name])))
    if metadata.get("reasoning") not in (None, ""):
        facts.append(("evaluator", str(metadata["reasoning"])[:MAX_CHARACTERS]))
    listed = "".join(f"<div><dt>{escaped(name)}</dt><dd>{visible(value)}</dd></div>" for name, value in facts)
    error = metadata.get("error")
    return (f'<dl class="facts">{listed}</dl>' if listed else "") + (
        f'<p class="notice error">{visible(str(error)[:MAX_CHARACTERS])}</p>' if error else ""
    )


def _messages(items: Sequence[Row], turns: Sequence[Turn], reasons: Sequence[str], scale: Scale) -> Iterator[str]:
    """Yield the messages of an episode; an answer whose log-probabilities are those of a turn shows its tokens."""
    unmatched = list(turns)
    for place, item in enumerate(items):
        role, content, logprobs = str(item.get("role")), str(item.get("content") or ""), item.get("logprobs")
        turn = None
        if isinstance(logprobs, list) and logprobs:
            turn = next((each for each in unmatched if each.logprobs == logprobs), None)
        marks = []
        if turn is not None:
            unmatched.remove(turn)
            reason = reasons[turn.number] if 0 <= turn.number < len(reasons) else "length" if turn.is_cut else None
            if reason is not None:
                marks.append(_mark(f"finish: {reason}", "warning" if reason == "length" else "plain"))
        if role == "assistant" and place + 1 < len(items) and items[place + 1].get("role") in _TOOL_ROLES:
            marks.append(_mark("calls a tool", "info"))
        if role == "assistant" and not logprobs:
            marks.append(_mark("not sampled", "plain"))
        name = "tool result" if role in _TOOL_ROLES else role
        yield _message(role, name, _answer(turn, content, scale), marks)
    for turn in unmatched:
        if turn.texts is not None:
            yield _message("assistant", "sampled tokens of no message", _answer(turn, "", scale), [])


def _pair(item: Row, turns: Sequence[Turn], scale: Scale) -> Iterator[str]:
    prompt = item["prompt"]
    said = [{"role": "prompt", "content": prompt}] if isinstance(prompt, str) else prompt
    for message in said:
        yield _message(str(message["role"]), str(message["role"]), _text(str(message["content"])), [])
    pairs = (("chosen", item["chosen_response"], 0), ("rejected", item["rejected_response"], 1))
    for name, content, place in pairs:
        turn = turns[place] if len(turns) == 2 else None
        yield _message(f"assistant {name}", name, _answer(turn, str(content), scale), [])


def _message(role: str, name: str, content: str, marks: Sequence[str]) -> str:
    return (
        f'<li class="message {escaped(role)}"><div class=role>{escaped(name)}{"".join(marks)}</div>'
        f"<div class=content>{content}</div></li>"
    )


def _text(words: str) -> str:
    if not words:
        return "<span class=quiet>(empty)</span>"
    shown = str(visible(words[:MAX_CHARACTERS]) if len(words) > 200 else _visible(words))
    left = len(words) - MAX_CHARACTERS
    return shown + (f'<p class="note">{left:,} more characters are in the run\'s file</p>' if left > 0 else "")


def _answer(turn: Turn | None, content: str, scale: Scale) -> str:
    """Return an answer as its tokens, where their texts are known, and otherwise as its text."""
    if turn is None or turn.texts is None:
        return _text(content)
    shaded = _tokens(turn, scale)
    rest = "".join(turn.texts[MAX_SHADED_TOKENS:])
    if rest:
        shaded += f'<p class="note">The tokens after the first {MAX_SHADED_TOKENS:,} are not shaded:</p>{_text(rest)}'
    if content and content.strip() not in "".join(turn.texts):
        shaded += f'<details class="other"><summary>as the agent got it</summary>{_text(content)}</details>'
    return shaded


def _tokens(turn: Turn, scale: Scale) -> str:
    assert turn.texts is not None
    parts = []
    for at, text in enumerate(turn.texts[:MAX_SHADED_TOKENS]):
        classes, data = "t", ""
        for letter, values, value_range in (
            ("a", turn.advantages, scale.advantage),
            ("l", turn.logprobs, scale.logprob),
            ("e", turn.entropies, scale.entropy),
        ):
            if values is not None and (value := values[at]) is not None:
                classes += f" {letter}{bucket(value, value_range)}"
                data += f" data-{letter}={value:.4g}"
        parts.append(f'<span class="{classes}" tabindex=0{data}>{_visible(text)}</span>')
    return "".join(parts)


_visible = functools.lru_cache(4096)(visible)
"""`visible`, for texts that come again and again, such as those of tokens."""


def scale_of(rows: Iterable[Row]) -> Scale:
    """Return the values of the shades that suit some episodes.

    The middle shade of the advantage is 0, and the outermost fiftieth of the values share the outermost shades.
    """
    turns = [turn for row in rows if "failure" not in row for turn in turns_of(row)]
    advantage = _high([abs(value) for turn in turns for value in turn.advantages or () if value is not None], 0.1)
    surprise = _high([-value for turn in turns for value in turn.logprobs if value is not None], 1.0)
    entropy = _high([value for turn in turns for value in turn.entropies or () if value is not None], 0.5)
    return Scale((-advantage, advantage), (0.0, -surprise), (0.0, entropy))


def _high(values: list[float], least: float) -> float:
    """Return a round number that nearly all values lie below."""
    if not values:
        return least
    values.sort()
    high = max(values[int(0.98 * (len(values) - 1))], least)
    return float(f"{high:.2g}")
