"""The chat client of a workflow: takes messages, returns a reply, and records the call in the episode."""

import asyncio
import functools
import hashlib
import itertools
import numbers
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Concatenate, Literal, NamedTuple, ParamSpec

from jaxft.core.sampling import check_sampling
from jaxft.errors import PromptTooLongError, RequestError
from jaxft.rollout.chat import Prompt
from jaxft.rollout.messages import Message, Tool, ToolCall, canonical_messages, check_json, check_text, check_tools
from jaxft.rollout.policy import Policy
from jaxft.rollout.recorder import Call, Episode, current_functions, find_episode, note_outside_call
from jaxft.rollout.requests import MAX_TOP_LOGPROBS, Completion, Request, TopLogprobs
from jaxft.rollout.responses import ParsedAnswer, number_tool_calls
from jaxft.rollout.streaming import Delta, StopFinder, Streamer, cut_at_stop

P = ParamSpec("P")

INTERACTIVE, SEEDED = 2, 4
"""Streams of random numbers for calls outside of episodes, without and with a seed."""

MAX_CHOICES = 128
"""Largest `n` of a request."""

LongPrompts = Literal["fail", "drop", "truncate_left"]
"""Treatments of a prompt that is too long: raise an error; raise it and drop the episode; or cut off first tokens."""


@dataclass(frozen=True)
class ChatRequest:
    """The arguments of a chat; names and meanings are those of OpenAI's and vLLM's chat completions.

    Attributes:
        messages: the conversation, in OpenAI's format: `role`, `content` (text, parts of text, or null beside tool
            calls), `tool_calls`, `tool_call_id`.
        tools: functions that the model may call, in OpenAI's format.
        tool_choice: `auto`, `none` (an answer is never parsed for calls), `required`, or
            `{"type": "function", "function": {"name": ...}}`. The last two force the beginning of a call.
        parallel_tool_calls: False if only the first tool call of an answer counts; the others stay in the sampled ids.
        temperature: divisor of the logits; 0 takes the most likely token every time.
        max_tokens: maximum number of tokens to sample; None for as many as the context has room for.
        n: number of answers. All of them are recorded and trained.
        seed: picks other random numbers; outside of episodes, equal seeds and prompts give equal answers.
        stop: strings that end the answer; they are not part of `content`.
        include_stop: True to include the stop string in `content`, for an agent that wants it in its history: a
            history with another text than `content` is tokenised again and begins a new training row.
        stop_token_ids: more token ids that end the answer.
        top_k, top_p, min_p: truncate the distribution; see `jaxft.sampling.SamplingParams`.
        logit_bias: values added to the logits of single tokens, by id; -inf forbids a token.
        top_logprobs: number of most likely tokens to return for each sampled one. They are computed when the answer is
            complete, so that a stream comes at once, too.
        chat_template_kwargs: variables of the chat template, such as `enable_thinking`.
    """

    messages: Sequence[Message]
    tools: Sequence[Tool] = ()
    tool_choice: str | Mapping[str, Any] = "auto"
    parallel_tool_calls: bool = True
    temperature: float = 1.0
    max_tokens: int | None = None
    n: int = 1
    seed: int | None = None
    stop: str | Sequence[str] = ()
    include_stop: bool = False
    stop_token_ids: Sequence[int] = ()
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    logit_bias: Mapping[int, float] | None = None
    top_logprobs: int = 0
    chat_template_kwargs: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        """Raise a `RequestError` that names the field unless all fields are possible, whatever policy answers."""
        check_tools(self.tools)
        self._check_tool_choice()
        for name, number in vars(self).items():
            is_number = isinstance(number, numbers.Real) and not isinstance(number, bool)
            if name in ("temperature", "top_k", "top_p", "min_p") and not is_number:
                raise RequestError(f"{name} is {number!r}; wanted a number", param=name)
        try:
            check_sampling(temperature=self.temperature, top_k=self.top_k, top_p=self.top_p, min_p=self.min_p)
        except ValueError as error:
            raise RequestError(str(error), param=str(error).partition(" ")[0]) from None
        for name, value, low, high in (
            ("n", self.n, 1, MAX_CHOICES),
            ("max_tokens", self.max_tokens, 1, None),
            ("seed", self.seed, -(2**63), 2**63 - 1),
            ("top_logprobs", self.top_logprobs, 0, MAX_TOP_LOGPROBS),
        ):
            if value is None and name in ("max_tokens", "seed"):
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < low or (high and value > high):
                wanted = f"an integer of at least {low}" + (f" and at most {high}" if high else "")
                raise RequestError(f"{name} is {value!r}; wanted {wanted}", param=name)
        bias = self.logit_bias or {}
        if not isinstance(bias, Mapping) or not all(isinstance(value, numbers.Real) for value in bias.values()):
            raise RequestError("logit_bias must give a number for each token id", param="logit_bias")
        for name, ids in (("stop_token_ids", self.stop_token_ids), ("logit_bias", bias)):
            if not isinstance(ids, list | tuple | Mapping) or not all(
                isinstance(token, int) and 0 <= token < 2**31 for token in ids
            ):
                raise RequestError(f"{name} is {str(ids)[:100]}; wanted token ids", param=name)
        if not isinstance(self.stop, str | list | tuple):
            raise RequestError(f"stop is {self.stop!r}; wanted a string or a list of strings", param="stop")
        for stop in self.stops:
            if not isinstance(stop, str):
                raise RequestError(f"stop contains {stop!r}; wanted strings", param="stop")
            check_text(stop, "stop")
            if not stop:
                raise RequestError("stop contains an empty string, which every text ends with", param="stop")
        if not isinstance(self.chat_template_kwargs, Mapping | None):
            raise RequestError("chat_template_kwargs must be an object", param="chat_template_kwargs")
        check_json(self.chat_template_kwargs or {}, "chat_template_kwargs")

    @property
    def stops(self) -> tuple[str, ...]:
        """The stop strings."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    @property
    def may_call_tools(self) -> bool:
        """True if the answer is parsed for tool calls."""
        return bool(self.tools) and self.tool_choice != "none"

    @property
    def forced_function(self) -> str | None:
        """Name of the function that the answer must call; None if there is no such."""
        return self.tool_choice["function"]["name"] if isinstance(self.tool_choice, Mapping) else None

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
class Reply:
    """The answer to a chat.

    Attributes:
        content: text of the answer up to a stop string, which is included only with `include_stop`. Reasoning and tool
            calls are not part of it.
        finish_reason: `stop`, `tool_calls`, or `length` when `max_tokens` or the context was used up.
        token_ids: sampled token ids, the stop token included.
        logprobs: log-probability of each sampled token in nats, over the whole vocabulary at the call's temperature.
        policy_version: version of the parameters that sampled.
        call_index: index of the call in its episode; None outside one.
        prompt_ids: token ids of the prompt as the policy was fed it.
        tool_calls: the tools that the model calls, with arguments that are a JSON object.
        reasoning_content: reasoning before the answer; None without any.
        top_logprobs: for each sampled token, pairs of a token id and its log-probability, the most likely first; empty
            unless the request asked for them.
        others: the other answers if the request asked for several.
    """

    content: str
    finish_reason: str
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    policy_version: int
    call_index: int | None = None
    prompt_ids: tuple[int, ...] = ()
    tool_calls: tuple[ToolCall, ...] = ()
    reasoning_content: str | None = None
    top_logprobs: tuple[TopLogprobs, ...] = ()
    others: tuple["Reply", ...] = ()

    @property
    def choices(self) -> tuple["Reply", ...]:
        """All answers to the request: this one and the others."""
        return (self, *self.others)

    @property
    def message(self) -> dict[str, Any]:
        """The answer as a message of the history, in OpenAI's format."""
        message: dict[str, Any] = {"role": "assistant", "content": self.content}
        if self.reasoning_content is not None:
            message["reasoning_content"] = self.reasoning_content
        if self.tool_calls:
            message |= {"content": self.content or None, "tool_calls": [call.as_message() for call in self.tool_calls]}
        return message


class Answered(NamedTuple):
    """One sampled and parsed answer; `text` includes reasoning, tool calls and what `tool_choice` forced."""

    call_index: int | None
    completion: Completion
    text: str
    parsed: ParsedAnswer
    tool_calls: tuple[ToolCall, ...]

    def reply(self, prompt_ids: tuple[int, ...]) -> Reply:
        """Return the answer as the agent gets it."""
        completion, finish_reason = self.completion, self.completion.finish_reason
        return Reply(
            content=self.parsed.content,
            finish_reason="tool_calls" if self.tool_calls and finish_reason == "stop" else finish_reason,
            token_ids=tuple(completion.token_ids),
            logprobs=tuple(completion.sampler_logprobs),
            policy_version=completion.policy_version,
            call_index=self.call_index,
            prompt_ids=prompt_ids,
            tool_calls=self.tool_calls,
            reasoning_content=self.parsed.reasoning_content,
            top_logprobs=tuple(completion.top_logprobs),
        )


def _blocking(
    chat: Callable[Concatenate["ChatClient", P], Coroutine[Any, Any, Reply]],
) -> Callable[Concatenate["ChatClient", P], Reply]:
    @functools.wraps(chat, assigned=())
    def chat_sync(self: "ChatClient", /, *args: P.args, **kwargs: P.kwargs) -> Reply:
        """`chat` for code that cannot await, such as a workflow that is a plain function: blocks until the reply.

        Raises:
            RuntimeError: an event loop runs in this thread, and would wait for itself.
            CancelledError: the episode has ended.
        """
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            pass
        else:
            raise RuntimeError(
                "chat_sync waits for its reply, and this thread runs an event loop, which could not answer meanwhile: "
                "write `await llm.chat(...)` here, or make the workflow a plain function (def), which runs in a thread"
            )
        call: Coroutine[Any, Any, Reply] = getattr(self, chat.__name__)(*args, **kwargs)  # a subclass may have its own
        episode = find_episode()
        return asyncio.run(call) if episode is None else episode.wait_for(call)

    return chat_sync


class ChatClient:
    """Chats with a live policy. Concurrent calls share one batch.

    Attributes:
        policy: the policy that answers.
        name: name that calls are recorded under, that of the language model in the configuration.
        long_prompts: treatment of prompts that leave no room for an answer.
    """

    def __init__(self, policy: Policy, name: str = "policy", long_prompts: LongPrompts = "fail") -> None:
        self.policy = policy
        self.name = name
        self.long_prompts = long_prompts
        self._interactive_calls = itertools.count()

    async def chat(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Tool] | None = None,
        tool_choice: str | Mapping[str, Any] | None = None,
        parallel_tool_calls: bool = True,
        temperature: float = 1.0,
        max_tokens: int | None = None,
        max_completion_tokens: int | None = None,
        n: int = 1,
        seed: int | None = None,
        stop: str | Sequence[str] | None = None,
        include_stop: bool = False,
        stop_token_ids: Sequence[int] | None = None,
        top_k: int = 0,
        top_p: float = 1.0,
        min_p: float = 0.0,
        logit_bias: Mapping[int, float] | None = None,
        top_logprobs: int = 0,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> Reply:
        """Sample the assistant's next message; `ChatRequest` describes the arguments.

        Inside an episode the call is recorded for training, its random numbers depend on episode, prompt and seed only,
        and the episode's temperature, if set, replaces `temperature`. A tool call that cannot be parsed is content.

        `max_completion_tokens` is OpenAI's newer name of `max_tokens`.

        Raises:
            PromptTooLongError: the prompt leaves no room for an answer in the context.
            RequestError: the template refuses the messages, or a parameter is impossible.
            CancelledError: the episode has ended already: it took longer than `eval.general.timeout_seconds`, or the
                run is ending.
        """
        if max_tokens is not None and max_completion_tokens is not None and max_tokens != max_completion_tokens:
            raise RequestError(
                f"max_tokens is {max_tokens} and max_completion_tokens {max_completion_tokens}; give one of them",
                param="max_completion_tokens",
            )
        request = ChatRequest(
            messages=messages,
            tools=() if tools is None else tools,
            tool_choice="auto" if tool_choice is None else tool_choice,
            parallel_tool_calls=parallel_tool_calls,
            temperature=temperature,
            max_tokens=max_tokens if max_completion_tokens is None else max_completion_tokens,
            n=n,
            seed=seed,
            stop=() if stop is None else stop,
            include_stop=include_stop,
            stop_token_ids=() if stop_token_ids is None else stop_token_ids,
            top_k=top_k,
            top_p=top_p,
            min_p=min_p,
            logit_bias=logit_bias,
            top_logprobs=top_logprobs,
            chat_template_kwargs=chat_template_kwargs,
        )
        return await self.answer(request)

    chat_sync = _blocking(chat)

    async def stream(self, request: ChatRequest) -> AsyncGenerator[Delta | Reply, None]:
        """Yield the pieces of the answers as they are sampled, and at the end the reply.

        The pieces of an answer, joined, are its `content` and `reasoning_content`; tool calls come with the reply. If
        the iteration is left early and closed, sampling ends. Errors are those of `chat`.
        """
        pieces: asyncio.Queue[Delta | None] = asyncio.Queue()
        reply = asyncio.create_task(self.answer(request, pieces.put_nowait))
        reply.add_done_callback(lambda _: pieces.put_nowait(None))
        try:
            while (piece := await pieces.get()) is not None:
                yield piece
            yield await reply
        finally:
            reply.cancel()
            await asyncio.gather(reply, return_exceptions=True)

    async def answer(self, request: ChatRequest, on_delta: Callable[[Delta], None] | None = None) -> Reply:
        """Answer a request like `chat`, and give `on_delta` the pieces of the answers as they are sampled."""
        episode = find_episode()
        if episode is None:
            note_outside_call()
        else:
            await episode.check_open()
            if episode.temperature is not None:
                request = replace(request, temperature=episode.temperature)
        prefill = ""
        if request.may_call_tools:
            self.policy.template.responses.template(has_tools=True)
            if request.tool_choice != "auto":
                prefill = self.policy.template.responses.forced_call(request.forced_function)
        prompt = self._prompt(request, prefill, episode)
        begun = [self._begin_call(prompt, request, episode, choice) for choice in range(request.n)]

        async def sample(choices: Sequence[int]) -> list[Answered]:
            """Sample these answers at once."""
            answering = [self._answer(request, prompt, prefill, each, *begun[each], on_delta) for each in choices]
            if len(answering) == 1:
                return [await answering[0]]
            tasks = [asyncio.create_task(each) for each in answering]
            try:
                return await asyncio.gather(*tasks)
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)

        answered = dict(enumerate(await sample(range(request.n))))
        # An update between them: those of the earlier policy are sampled again, unless they were streamed.
        while on_delta is None:
            newest = max(each.completion.policy_version for each in answered.values())
            stale = [choice for choice, each in answered.items() if each.completion.policy_version < newest]
            if not stale:
                break
            answered |= zip(stale, await sample(stale), strict=True)
        if episode is not None:
            for each in answered.values():
                episode.record(self._call(request, prompt, each))
        first, *others = (each.reply(prompt.ids) for each in answered.values())
        return replace(first, others=tuple(others))

    def _prompt(self, request: ChatRequest, prefill: str, episode: Episode | None) -> Prompt:
        """Return the prompt of a request, truncated if it is too long and `long_prompts` is `truncate_left`."""
        # Calls of another language model may be in token ids of another tokenizer.
        earlier = [] if episode is None else [call for call in tuple(episode.calls) if call.llm == self.name]
        try:
            prompt = self.policy.template.prompt(
                request.messages,
                earlier,
                tools=request.tools,
                template_kwargs=request.chat_template_kwargs,
                prefill=prefill,
                max_tokens=self.policy.engine.max_context_tokens,
                truncate_left=self.long_prompts == "truncate_left",
            )
        except PromptTooLongError:
            self._drop(episode)
            raise
        return self._fitted(prompt, request.max_tokens, episode)

    def _begin_call(
        self, prompt: Prompt, request: ChatRequest, episode: Episode | None, choice: int
    ) -> tuple[int | None, tuple[int, ...]]:
        """Return the index of a new call in its episode, and the numbers that seed its sampling."""
        if episode is not None:
            index, call_id = episode.begin_call(prompt.ids, request.seed)
            return index, (*episode.key_ids, call_id)
        if request.seed is not None:
            digest = hashlib.sha256(repr((request.seed, prompt.ids)).encode()).digest()
            numbers = [int.from_bytes(digest[start : start + 4], "big") for start in (0, 4, 8, 12)]
            return None, (SEEDED, choice, *numbers)
        return None, (INTERACTIVE, 0, 0, 0, 0, next(self._interactive_calls))

    async def _answer(
        self,
        request: ChatRequest,
        prompt: Prompt,
        prefill: str,
        choice: int,
        index: int | None,
        key_ids: tuple[int, ...],
        on_delta: Callable[[Delta], None] | None,
    ) -> "Answered":
        """Sample and parse one answer."""
        template, engine = self.policy.template, self.policy.engine
        parser = template.responses.template(has_tools=request.may_call_tools)
        custom_stops = set(request.stop_token_ids) - set(template.stop_ids)

        def text_of(token_ids: Sequence[int]) -> str:
            kept = token_ids[:-1] if token_ids and token_ids[-1] in custom_stops else token_ids
            return template.answer_text(kept) if parser is None else template.responses.text(kept)

        streamer = None
        if on_delta is not None:
            streamer = Streamer(
                choice,
                on_delta,
                text_of,
                stops=request.stops,
                template=parser,
                prompt_text=prompt.text,
                prefill=prefill,
            )
        completion = await engine.submit(
            self._request(request, prompt, key_ids, text_of),
            None if streamer is None or request.top_logprobs else streamer.feed,
        )
        text = cut_at_stop(text_of(completion.token_ids), request.stops, include_stop=request.include_stop)
        parsed = template.responses.parse(prefill + text, prompt.text, has_tools=request.may_call_tools)
        if not request.parallel_tool_calls:
            parsed = parsed._replace(tool_calls=parsed.tool_calls[:1])
        if streamer is not None:
            if request.top_logprobs:
                streamer.feed(completion.token_ids, completion.sampler_logprobs)
            streamer.finish(parsed)
        return Answered(index, completion, prefill + text, parsed, number_tool_calls(parsed, key_ids[-1]))

    def _call(self, request: ChatRequest, prompt: Prompt, answered: "Answered") -> Call:
        """Return the record of one answer."""
        completion, parsed = answered.completion, answered.parsed
        assert answered.call_index is not None
        return Call(
            index=answered.call_index,
            llm=self.name,
            messages=canonical_messages(request.messages),
            content=parsed.content,
            prompt_text=prompt.text,
            prompt_ids=prompt.ids,
            prompt_boundaries=prompt.prefix_boundaries,
            token_ids=tuple(completion.token_ids),
            sampler_logprobs=tuple(completion.sampler_logprobs),
            behavior_logprobs=tuple(completion.behavior_logprobs),
            temperature=request.temperature,
            finish_reason=completion.finish_reason,
            policy_version=completion.policy_version,
            functions=current_functions(),
            truncated_tokens=prompt.truncated_tokens,
            response_text=answered.text if answered.text != parsed.content else None,
            tool_calls=answered.tool_calls,
            reasoning_content=parsed.reasoning_content,
            has_malformed_tool_call=parsed.is_malformed,
            is_retokenized=prompt.is_retokenized,
            num_choices=request.n,
        )

    def _request(
        self, request: ChatRequest, prompt: Prompt, key_ids: tuple[int, ...], text_of: Callable[[Sequence[int]], str]
    ) -> Request:
        """Return the engine's request for one answer."""
        room = self.policy.engine.max_context_tokens - len(prompt.ids)
        return Request(
            prompt_ids=prompt.ids,
            key_ids=key_ids,
            max_tokens=max(room, 1) if request.max_tokens is None else request.max_tokens,
            temperature=request.temperature,
            top_k=request.top_k,
            top_p=request.top_p,
            min_p=request.min_p,
            stop_ids=tuple(dict.fromkeys((*self.policy.template.stop_ids, *request.stop_token_ids))),
            logit_bias=tuple((request.logit_bias or {}).items()),
            find_stop=StopFinder(text_of, request.stops) if request.stops else None,
            prefix_boundaries=prompt.prefix_boundaries,
            top_logprobs=request.top_logprobs,
        )

    def _fitted(self, prompt: Prompt, max_tokens: int | None, episode: Episode | None) -> Prompt:
        """Return the prompt, truncated if it is too long and `long_prompts` is `truncate_left`.

        A truncated prompt leaves room for `max_tokens`, but takes at least half of the context.
        """
        limit = self.policy.engine.max_context_tokens
        if len(prompt.ids) < limit:
            return prompt
        if self.long_prompts != "truncate_left":  # the engine will refuse it
            self._drop(episode)
            return prompt
        room = limit // 2 if max_tokens is None else min(max(max_tokens, 1), limit // 2)
        first = len(prompt.ids) - (limit - room)
        # It begins elsewhere, so the prefix boundaries of earlier turns no longer apply.
        return Prompt(prompt.text, prompt.ids[first:], truncated_tokens=prompt.truncated_tokens + first)

    def _drop(self, episode: Episode | None) -> None:
        """Mark an episode whose prompt is too long as dropped if `long_prompts` is `drop`."""
        if episode is not None and self.long_prompts == "drop":
            episode.is_dropped = True
