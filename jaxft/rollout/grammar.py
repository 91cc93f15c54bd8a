"""Constrained decoding: which tokens an answer may go on with, so that it matches a JSON schema, a regex or a grammar.

llguidance (the extra `constrained`) follows the grammar and says at each token which others may come next. The host
asks it while the device computes the logits, for the answers that have a grammar only.
"""

import functools
import importlib
import json
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import UInt32

from jaxft.errors import RequestError

WHITESPACE = r"[ \n\t\r]{0,32}"
"""White space between the tokens of JSON, so much at most: a model must not fill its answer with it."""

TAG_TOKENS = 16
"""Last tokens of an answer in which the tag that ends its reasoning is looked for."""


class Grammar(NamedTuple):
    """A grammar that an answer must match.

    Attributes:
        kind: `json_schema`, `regex` or `lark`.
        text: the schema in JSON, the regular expression, or the grammar in the notation of Lark.
        param: the argument of the request that it is from, for messages.
    """

    kind: str
    text: str
    param: str


class Constraint:
    """The position of one answer in its grammar."""

    is_over = False  # a grammar holds to the end of the answer

    def __init__(self, matcher: Any, ends_reasoning: Callable[[Sequence[int]], bool] | None) -> None:
        """Begin an answer.

        Args:
            matcher: llguidance's matcher, of this answer alone.
            ends_reasoning: True for last tokens that hold the end of the reasoning that the prompt has begun, up to
                which the answer is free; None without any.
        """
        self._matcher = matcher
        self._ends_reasoning, self._last = ends_reasoning, list[int]()

    def write_mask(self, words: UInt32[np.ndarray, "W"]) -> None:
        """Set the bits of the tokens that may come next; none if any may, or an error has come (`feed`)."""
        if self._ends_reasoning is None and not self._matcher.is_error():
            bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint32)[: len(words)]
            words[: len(bits)] = bits

    def feed(self, token_ids: Sequence[int]) -> None:
        """Go on behind the sampled tokens.

        Raises:
            RequestError: the grammar cannot go on: it became too large, or no token of the vocabulary continues it.
        """
        for token in token_ids:
            if self._ends_reasoning is not None:
                self._last = [*self._last, token][-TAG_TOKENS:]
                if self._ends_reasoning(self._last):
                    self._ends_reasoning = None
            elif not self._matcher.consume_token(token):
                reason = next(filter(None, self._matcher.get_error().splitlines()), "no token continues it")
                raise RequestError(f"the answer cannot go on in its grammar: {reason}")


class LateEnd:
    """Keeps an answer from ending within its first tokens."""

    def __init__(self, min_tokens: int, stop_ids: Sequence[int]) -> None:
        self._left, self._stop_ids = min_tokens, stop_ids

    @property
    def is_over(self) -> bool:
        """True once the answer may end."""
        return self._left <= 0

    def write_mask(self, words: UInt32[np.ndarray, "W"]) -> None:
        """Set the bits of all tokens but those that end the answer."""
        words[:] = np.iinfo(np.uint32).max
        for token in self._stop_ids:
            if token < 32 * len(words):
                words[token // 32] ^= np.uint32(1 << token % 32)

    def feed(self, token_ids: Sequence[int]) -> None:
        """Count the sampled tokens."""
        self._left -= len(token_ids)


class Penalized:
    """Counts the tokens that an answer has, for its penalties, beside the constraint that it may have."""

    is_over = False  # penalties hold to the end of the answer

    def __init__(
        self, constraint: Constraint | LateEnd | None, prompt_ids: Sequence[int], penalties: tuple[float, float, float]
    ) -> None:
        """Begin an answer.

        Args:
            constraint: the constraint of the answer; None if it is free.
            prompt_ids: token ids of the prompt.
            penalties: repetition, frequency and presence penalty.
        """
        self._constraint, self.penalties = constraint, penalties
        self.counts = dict.fromkeys(prompt_ids, 0)
        """The number of times that the answer has each token of it and of the prompt."""

    def write_mask(self, words: UInt32[np.ndarray, "W"]) -> None:
        """Set the bits of the tokens that the constraint lets come next, or none if all may."""
        if self._constraint is not None and not self._constraint.is_over:
            self._constraint.write_mask(words)

    def feed(self, token_ids: Sequence[int]) -> None:
        """Count the sampled tokens, and go on behind them; errors are those of the constraint."""
        for token in token_ids:
            self.counts[token] = self.counts.get(token, 0) + 1
        if self._constraint is not None:
            self._constraint.feed(token_ids)


def json_grammar(schema: Any) -> Grammar:
    """Return the grammar of JSON of a schema."""
    return Grammar("json_schema", json.dumps(_spaced(schema)), "response_format")


def call_grammar(tools: Sequence[Mapping[str, Any]], *, has_name: bool, behind: str, end: str) -> Grammar:
    """Return the grammar of the rest of a call of one of these functions, whose beginning is forced.

    Args:
        tools: functions in OpenAI's format; arguments of those that are not `strict` are any object.
        has_name: True if the name belongs to the beginning.
        behind: text between name and arguments.
        end: text behind the arguments.
    """
    rules = [f"start: {' | '.join(f'call{index}' for index in range(len(tools)))}"]
    for index, tool in enumerate(tools):
        function = tool["function"]
        parameters = (function.get("parameters") if function.get("strict") else None) or {"type": "object"}
        name = "" if has_name else json.dumps(function["name"] + behind)
        rules.append(f"call{index}: {name} arguments{index} {json.dumps(end) if end else ''}")
        rules.append(f"arguments{index}: %json {json.dumps(_spaced(parameters))}")
    return Grammar("lark", "\n".join(rules), "tools")


def _spaced(schema: Any) -> Any:
    return {**schema, "x-guidance": {"whitespace_pattern": WHITESPACE}} if isinstance(schema, Mapping) else schema


class Compiler:
    """Compiles grammars for one tokenizer, each once.

    The first one takes about a second, in which llguidance reads the tokenizer.
    """

    def __init__(self, tokenizer: Any, stop_ids: Sequence[int]) -> None:
        """Make a compiler; `stop_ids` are the token ids that end an answer."""
        self._source, self._stop_ids = tokenizer, list(stop_ids)
        self._lock = threading.Lock()
        self._compiled = functools.lru_cache(64)(self._compile)

    def read_tokenizer(self) -> Any:
        """Return the tokenizer as llguidance has it, which is read once.

        Raises:
            RequestError: llguidance is not installed, or cannot read the tokenizer.
        """
        return self._tokenizer

    @functools.cached_property
    def _tokenizer(self) -> Any:
        try:
            return llguidance_package().hf.from_tokenizer(self._source, eos_token=self._stop_ids)
        except (ValueError, AttributeError) as error:
            raise RequestError(f"answers of this tokenizer cannot be constrained: {error}") from None

    def compile(self, grammar: Grammar) -> Any:
        """Return a matcher at the beginning of the grammar, to be copied for each answer.

        Raises:
            RequestError: llguidance is not installed; or the grammar is malformed, has a keyword that is not supported,
                or nothing satisfies it.
        """
        with self._lock:
            return self._compiled(grammar)

    def _compile(self, grammar: Grammar) -> Any:
        matcher = llguidance_package().LLMatcher
        make = {
            "json_schema": matcher.grammar_from_json_schema,
            "regex": matcher.grammar_from_regex,
            "lark": matcher.grammar_from_lark,
        }
        text = make[grammar.kind](grammar.text)
        _, faults = matcher.validate_grammar_with_warnings(text, self._tokenizer)
        if faults:
            reason = "; ".join(line.strip() for line in faults[0].splitlines() if line.strip())
            raise RequestError(f"{grammar.param} cannot be followed: {reason}", param=grammar.param)
        return matcher(self._tokenizer, text, log_level=0)


def llguidance_package() -> Any:
    """Return the package llguidance, which an extra installs."""
    try:
        importlib.import_module("llguidance.hf")
        return importlib.import_module("llguidance")
    except ImportError:
        raise RequestError(
            "constrained answers need the package llguidance: pip install 'jaxft[constrained]'"
        ) from None
