"""Arguments of a chat and of a completion of token ids, and the pieces in which the answer is streamed."""

import numbers
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jaxft.core.sampling import check_penalties, check_sampling
from jaxft.errors import RequestError
from jaxft.rollout.grammar import Grammar, json_grammar
from jaxft.rollout.messages import Message, Tool, check_json, check_text, check_tools
from jaxft.rollout.requests import MAX_TOP_LOGPROBS, SamplingOptions

MAX_CHOICES = 128
"""Largest `n` of a request."""


@dataclass(frozen=True, kw_only=True)
class SamplingRequest(SamplingOptions):
    """The arguments that a chat and a completion share; names and meanings are those of OpenAI's and vLLM's API.

    Attributes:
        max_tokens: maximum number of tokens to sample; None for as many as the context has room for.
        n: number of answers. All of them are recorded and trained.
        seed: picks other random numbers; outside of episodes, equal seeds and prompts give equal answers.
        stop: strings that end the answer; they are not part of `content`. They are looked for outside of reasoning,
            but for those that hold one of its tags. A control token is one more of `stop_token_ids`.
        include_stop: True to include the stop string in `content`, for an agent that wants it in its history: a
            history with another text than `content` is tokenised again and begins a new training row. Control tokens
            are never part of it.
        stop_token_ids: more token ids that end the answer.
        logit_bias: values added to the logits of single tokens, by id; -inf forbids a token.
        response_format: `{"type": "json_object"}` for an answer that is a JSON object, or `{"type": "json_schema",
            "json_schema": {"name": ..., "schema": {...}}}` for one of a schema; `{"type": "text"}` leaves it free.
        guided_regex: regular expression that the whole answer matches.
        guided_grammar: grammar of the whole answer, in the notation of Lark. All three need the extra `constrained`.
        min_tokens: number of tokens that are sampled before a token may end the answer; a stop string may.
        ignore_eos: True if the model's own end tokens do not end the answer, except for those that `stop` or
            `stop_token_ids` name.
    """

    max_tokens: int | None = None
    n: int = 1
    seed: int | None = None
    stop: str | Sequence[str] = ()
    include_stop: bool = False
    stop_token_ids: Sequence[int] = ()
    logit_bias: Mapping[int, float] | None = None
    response_format: Mapping[str, Any] | None = None
    guided_regex: str | None = None
    guided_grammar: str | None = None
    min_tokens: int = 0
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        """Raise a `RequestError` that names the field unless all fields are possible, whatever policy answers."""
        for name, number in vars(self).items():
            is_number = isinstance(number, numbers.Real) and not isinstance(number, bool)
            if (name in ("temperature", "top_k", "top_p", "min_p") or name.endswith("_penalty")) and not is_number:
                raise RequestError(f"{name} is {number!r}; wanted a number", param=name)
        try:
            check_sampling(temperature=self.temperature, top_k=self.top_k, top_p=self.top_p, min_p=self.min_p)
            check_penalties(self.presence_penalty, self.frequency_penalty, self.repetition_penalty)
        except ValueError as error:
            raise RequestError(str(error), param=str(error).partition(" ")[0]) from None
        for name, value, low, high in (
            ("n", self.n, 1, MAX_CHOICES),
            ("max_tokens", self.max_tokens, 1, None),
            ("min_tokens", self.min_tokens, 0, self.max_tokens),
            ("seed", self.seed, -(2**63), 2**63 - 1),
            ("top_logprobs", self.top_logprobs, 0, MAX_TOP_LOGPROBS),
        ):
            if value is None and name in ("max_tokens", "seed"):
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < low or (high and value > high):
                wanted = f"an integer of at least {low}" + (f" and at most {high}" if high else "")
                raise RequestError(f"{name} is {value!r}; wanted {wanted}", param=name)
        if not isinstance(self.ignore_eos, bool):
            raise RequestError(f"ignore_eos is {self.ignore_eos!r}; wanted a boolean", param="ignore_eos")
        bias = self.logit_bias or {}
        if not isinstance(bias, Mapping) or not all(isinstance(value, numbers.Real) for value in bias.values()):
            raise RequestError("logit_bias must give a number for each token id", param="logit_bias")
        check_ids("stop_token_ids", self.stop_token_ids)
        check_ids("logit_bias", bias)
        if not isinstance(self.stop, str | list | tuple):
            raise RequestError(f"stop is {self.stop!r}; wanted a string or a list of strings", param="stop")
        for stop in self.stops:
            if not isinstance(stop, str):
                raise RequestError(f"stop contains {stop!r}; wanted strings", param="stop")
            check_text(stop, "stop")
            if not stop:
                raise RequestError("stop contains an empty string, which every text ends with", param="stop")
        self._check_grammar()

    def _check_grammar(self) -> None:
        for name in ("guided_regex", "guided_grammar"):
            if not isinstance(vars(self)[name], str | None):
                raise RequestError(f"{name} is {vars(self)[name]!r}; wanted a string", param=name)
        given = (self.guided_regex, self.guided_grammar, self.response_schema)
        if sum(each is not None for each in given) > 1:
            raise RequestError(
                "more than one of guided_regex, guided_grammar and response_format is given", param="response_format"
            )

    @property
    def response_schema(self) -> Any:
        """The JSON schema of the answer; None if it has none.

        Raises:
            RequestError: `response_format` is none of OpenAI's.
        """
        given = self.response_format
        kind = given.get("type") if isinstance(given, Mapping) else None
        if given is None or kind == "text":
            return None
        if kind == "json_object":
            return {"type": "object"}
        inner = given.get("json_schema") if kind == "json_schema" else None
        schema = inner.get("schema") if isinstance(inner, Mapping) else None
        if not isinstance(schema, Mapping | bool):
            raise RequestError(
                f"response_format is {str(given)[:200]}; wanted {{'type': 'json_object'}}, or {{'type': 'json_schema', "
                "'json_schema': {'name': ..., 'schema': {...}}}",
                param="response_format",
            )
        check_json(schema, "response_format")
        return schema

    @property
    def grammar(self) -> Grammar | None:
        """The grammar of the whole answer; None if it is free."""
        if self.guided_regex is not None:
            return Grammar("regex", self.guided_regex, "guided_regex")
        if self.guided_grammar is not None:
            return Grammar("lark", self.guided_grammar, "guided_grammar")
        return None if self.response_schema is None else json_grammar(self.response_schema)

    @property
    def stops(self) -> tuple[str, ...]:
        """The stop strings."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)


def check_ids(name: str, ids: Any) -> None:
    """Raise a `RequestError` unless the argument `name` holds token ids, which fit int32."""
    if not isinstance(ids, list | tuple | Mapping) or not all(
        isinstance(token, int) and 0 <= token < 2**31 for token in ids
    ):
        raise RequestError(f"{name} is {str(ids)[:100]}; wanted token ids", param=name)


@dataclass(frozen=True)
class ChatRequest(SamplingRequest):
    """The arguments of a chat; names and meanings are those of OpenAI's and vLLM's chat completions.

    Attributes:
        messages: the conversation, in OpenAI's format: `role`, `content` (text, parts of text, or null beside tool
            calls), `tool_calls`, `tool_call_id`.
        tools: functions that the model may call, in OpenAI's format.
        tool_choice: `auto`, `none` (an answer is never parsed for calls), `required`, or
            `{"type": "function", "function": {"name": ...}}`. The last two force the beginning of a call, and for
            functions with `strict: true` arguments of their schema.
        parallel_tool_calls: False if only the first tool call of an answer counts; the others stay in the sampled ids.
        chat_template_kwargs: variables of the chat template, such as `enable_thinking`.
    """

    messages: Sequence[Message]
    tools: Sequence[Tool] = ()
    tool_choice: str | Mapping[str, Any] = "auto"
    parallel_tool_calls: bool = True
    chat_template_kwargs: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        """Raise a `RequestError` that names the field unless all fields are possible, whatever policy answers."""
        check_tools(self.tools)
        self._check_tool_choice()
        super().__post_init__()
        if not isinstance(self.chat_template_kwargs, Mapping | None):
            raise RequestError("chat_template_kwargs must be an object", param="chat_template_kwargs")
        check_json(self.chat_template_kwargs or {}, "chat_template_kwargs")
        if self.may_call_tools and self.grammar is not None:
            raise RequestError(
                "tools and a grammar of the answer are given; wanted one, or tool_choice 'none'", param="tools"
            )

    @property
    def may_call_tools(self) -> bool:
        """True if the answer is parsed for tool calls."""
        return bool(self.tools) and self.tool_choice != "none"

    @property
    def forced_function(self) -> str | None:
        """Name of the function that the answer must call; None if there is no such."""
        return self.tool_choice["function"]["name"] if isinstance(self.tool_choice, Mapping) else None

    @property
    def forced_tools(self) -> tuple[Tool, ...]:
        """The functions of which the answer must call one, if one of them is strict."""
        chosen = tuple(tool for tool in self.tools if self.forced_function in (None, tool["function"]["name"]))
        is_strict = any(tool["function"].get("strict") for tool in chosen)
        return chosen if is_strict and self.tool_choice not in ("auto", "none") else ()

    def _check_tool_choice(self) -> None:
        choice = self.tool_choice
        if isinstance(choice, str):
            if choice not in ("auto", "none", "required"):
                raise RequestError(
                    f"tool_choice is {choice!r}; wanted 'auto', 'none', 'required' or a function", param="tool_choice"
                )
            if choice == "required" and not self.tools:
                raise RequestError("tool_choice is 'required', and there are no tools", param="tool_choice")
            return
        names = [tool["function"]["name"] for tool in self.tools]
        is_function = isinstance(choice, Mapping) and choice.get("type") == "function"
        function = choice.get("function") if is_function else None
        name = function.get("name") if isinstance(function, Mapping) else None
        if name not in names:
            raise RequestError(f"tool_choice names {name!r}; the tools are {', '.join(names) or 'none'}", "tool_choice")


@dataclass(frozen=True)
class CompletionRequest(SamplingRequest):
    """The arguments of a completion of token ids, for an environment that renders its conversation itself.

    All text of the answer is `content`: it is not parsed for reasoning or tool calls.

    Attributes:
        prompt_ids: token ids of the prompt, at least one.
    """

    prompt_ids: Sequence[int]

    def __post_init__(self) -> None:
        """Raise a `RequestError` that names the field unless all fields are possible, whatever policy answers."""
        check_ids("prompt_ids", self.prompt_ids)
        if not self.prompt_ids:
            raise RequestError("prompt_ids is empty; wanted at least one token id", param="prompt_ids")
        super().__post_init__()


@dataclass(frozen=True)
class Delta:
    """A piece of an answer.

    Attributes:
        index: number of the answer, among the `n` answers to one request.
        content: text that follows the content so far.
        reasoning_content: text that follows the reasoning so far.
        token_ids: the sampled tokens since the piece before; their text may come with a later piece.
        logprobs: log-probability of each of these tokens, as in `Reply`.
    """

    index: int
    content: str = ""
    reasoning_content: str = ""
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
