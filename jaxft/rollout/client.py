"""The chat client of a policy in this process: it samples the reply, and records the call in the episode."""

import asyncio
import hashlib
import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Literal

from jaxft.errors import PromptTooLongError, RequestError
from jaxft.rollout.adapters import Adapter
from jaxft.rollout.calls import CARRIED, Call, Completion, Prompt, Reply
from jaxft.rollout.chat_request import ChatRequest, CompletionRequest, Delta
from jaxft.rollout.current import current_functions, find_episode, note_outside_call
from jaxft.rollout.grammar import Constraint, LateEnd, call_grammar
from jaxft.rollout.language_model import LanguageModel
from jaxft.rollout.messages import canonical_messages
from jaxft.rollout.policy import Policy, Snapshot
from jaxft.rollout.recorder import Episode
from jaxft.rollout.requests import Request, SamplingOptions
from jaxft.rollout.responses import ParsedAnswer, number_tool_calls
from jaxft.rollout.streaming import StopFinder, Streamer, Thoughts, find_stop, find_thoughts

INTERACTIVE, SEEDED = 2, 4
"""Streams of random numbers for calls outside of episodes, without and with a seed."""

LongPrompts = Literal["fail", "drop", "truncate_left"]
"""Treatments of a prompt that is too long: raise an error; raise it and drop the episode; or cut off first tokens."""


class ChatClient(LanguageModel):
    """Chats with a live policy, or a snapshot of one. Concurrent calls share one batch.

    Attributes:
        policy: the policy or snapshot that answers.
        long_prompts: treatment of prompts that leave no room for an answer.
        adapter: adapter that answers beside the policy's weights; None for these alone.
    """

    def __init__(
        self,
        policy: Policy | Snapshot,
        name: str = "policy",
        long_prompts: LongPrompts = "fail",
        adapter: Adapter | None = None,
    ) -> None:
        self.policy = policy
        self.adapter = adapter
        self.name = name
        self.long_prompts = long_prompts
        self.max_context_tokens = policy.engine.max_context_tokens
        self._interactive_calls = itertools.count()

    async def answer(
        self, request: ChatRequest | CompletionRequest, on_delta: Callable[[Delta], None] | None = None
    ) -> Reply:
        """Answer a request like `chat`, and give `on_delta` the pieces of the answers as they are sampled."""
        episode = find_episode()
        if episode is None:
            note_outside_call()
        else:
            await episode.check_open()
            if episode.temperature is not None:
                request = replace(request, temperature=episode.temperature)
        forced = "" if isinstance(request, CompletionRequest) else self._forced_call(request)
        matcher = await self._matcher(request)
        prompt = self._prompt(request, forced, episode)
        prefill = self.policy.template.forced_start(forced, prompt.text)
        begun = [self._begin_call(prompt, request, episode, choice) for choice in range(request.n)]

        async def sample(choices: Sequence[int]) -> list[Reply]:
            """Sample these answers at once."""
            answering = [
                self._answer(request, prompt, prefill, matcher, each, *begun[each], on_delta) for each in choices
            ]
            if len(answering) == 1:
                return [await answering[0]]
            tasks = [asyncio.create_task(each) for each in answering]
            try:
                return await asyncio.gather(*tasks)
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)

        replies = dict(enumerate(await sample(range(request.n))))
        # An update between them: those of the earlier policy are sampled again, unless they were streamed or go on.
        while on_delta is None and (episode is None or episode.answers is None):
            newest = max(reply.policy_version for reply in replies.values())
            earlier = [choice for choice, reply in replies.items() if reply.policy_version < newest]
            if not earlier:
                break
            replies |= zip(earlier, await sample(earlier), strict=True)
        if episode is not None:
            episode.texts_of_tokens[self.name] = self.token_text
            messages, functions = self._messages(request, prompt), current_functions()
            rendering: dict[str, Any] = {"prefill": forced}
            if isinstance(request, ChatRequest):
                rendering |= {"tools": request.tools, "template_kwargs": request.chat_template_kwargs}
            for reply in replies.values():
                assert reply.call_index is not None
                said = (reply.call_index, self.name, messages, prompt, reply)
                episode.record(Call(*said, request.temperature, functions, request.n, rendering))
        first, *others = replies.values()
        return replace(first, others=tuple(others))

    async def count_tokens(self, request: ChatRequest) -> int:
        """Return the number of tokens of a request's prompt, which may be too long for an answer."""
        prompt = self._render(request, self._forced_call(request), find_episode())
        return len(prompt.ids) + prompt.truncated_tokens

    def token_text(self, token_id: int) -> str:
        """Return the text of one token, control tokens included; see `TokenTexts.decoded_text`."""
        return self.policy.template.tokens.decoded_text(token_id)

    async def check(self) -> None:
        """Raise a `PolicyError` if the parameters or the device thread are lost."""
        await self.policy.read(lambda params: None)

    def _forced_call(self, request: ChatRequest) -> str:
        """Return the beginning of the call that `tool_choice` forces; empty if it forces none.

        Raises:
            ToolsUnsupportedError: the tokenizer's model calls no tools.
            RequestError: it calls none that can be forced.
        """
        if not request.may_call_tools:
            return ""
        responses = self.policy.template.responses
        responses.template(has_tools=True)
        return "" if request.tool_choice == "auto" else responses.forced_call(request.forced_function)

    async def _matcher(self, request: ChatRequest | CompletionRequest) -> Any:
        """Return llguidance's matcher of the grammar of a request; None without one."""
        grammar, template = request.grammar, self.policy.template
        if isinstance(request, ChatRequest) and request.forced_tools:
            if template.responses.call_ends is None:
                raise RequestError("strict arguments need a model that writes them in JSON", param="tools")
            behind, end = template.responses.call_ends
            has_name = request.forced_function is not None
            grammar = call_grammar(request.forced_tools, has_name=has_name, behind=behind, end=end)
        if grammar is None:
            return None
        if request.min_tokens or request.ignore_eos:
            name = "min_tokens" if request.min_tokens else "ignore_eos"
            raise RequestError(f"{name} is given beside a grammar, which says where the answer ends", param=name)
        template.grammars.read_tokenizer()  # not in the thread, as a tokenizer is changed while it encodes
        return await asyncio.to_thread(template.grammars.compile, grammar)

    def _prompt(self, request: ChatRequest | CompletionRequest, forced: str, episode: Episode | None) -> Prompt:
        """Return the prompt of a request, truncated if it is too long and `long_prompts` is `truncate_left`."""
        if isinstance(request, CompletionRequest):
            return self._fit_prompt(Prompt("", tuple(request.prompt_ids)), request.max_tokens, episode)
        try:
            prompt = self._render(request, forced, episode)
        except PromptTooLongError:
            self._drop(episode)
            raise
        return self._fit_prompt(prompt, request.max_tokens, episode)

    def _render(self, request: ChatRequest, forced: str, episode: Episode | None) -> Prompt:
        """Return the prompt of a conversation."""
        # Calls of another language model may be in token ids of another tokenizer; those to token ids have no messages
        # that a conversation could go on from.
        known = () if episode is None else tuple(episode.calls)
        return self.policy.template.prompt(
            request.messages,
            [call for call in known if call.llm == self.name and call.prompt.text],
            tools=request.tools,
            template_kwargs=request.chat_template_kwargs,
            prefill=forced,
            max_tokens=self.max_context_tokens,
            truncate_left=self.long_prompts == "truncate_left",
        )

    def _messages(self, request: ChatRequest | CompletionRequest, prompt: Prompt) -> tuple[dict[str, Any], ...]:
        """Return the messages that are recorded; token ids are one message of the user, for people to read."""
        if isinstance(request, CompletionRequest):
            return ({"role": "user", "content": self.policy.template.text(prompt.ids)},)
        return canonical_messages(request.messages)

    def _begin_call(
        self, prompt: Prompt, request: ChatRequest | CompletionRequest, episode: Episode | None, choice: int
    ) -> tuple[int | None, tuple[int, ...]]:
        """Return the index of a new call in its episode, and the numbers that seed its sampling."""
        if episode is not None:
            index, call_id = episode.begin_call(prompt.ids, request.seed, llm=self.name)
            return index, (*episode.key_ids, call_id)
        if request.seed is not None:
            digest = hashlib.sha256(repr((request.seed, prompt.ids)).encode()).digest()
            numbers = [int.from_bytes(digest[start : start + 4], "big") for start in (0, 4, 8, 12)]
            return None, (SEEDED, choice, *numbers)
        return None, (INTERACTIVE, 0, 0, 0, 0, next(self._interactive_calls))

    async def _answer(
        self,
        request: ChatRequest | CompletionRequest,
        prompt: Prompt,
        prefill: str,
        matcher: Any,
        choice: int,
        index: int | None,
        key_ids: tuple[int, ...],
        on_delta: Callable[[Delta], None] | None,
    ) -> Reply:
        """Sample and parse one answer."""
        template = self.policy.template
        parser = None
        if not isinstance(request, CompletionRequest):
            parser = template.responses.template(has_tools=request.may_call_tools)
        # The text of an answer is without control tokens, so that one is found by its id.
        ids = template.tokenizer.added_tokens_encoder
        control_stops = {ids[stop]: stop for stop in request.stops if ids.get(stop) in template.tokens.control_ids}
        ends = () if request.ignore_eos else template.stop_ids
        custom_stops = {*request.stop_token_ids, *control_stops}.difference(ends)
        thoughts = find_thoughts(parser, prompt.text + prefill)

        def decoded_text(token_ids: Sequence[int]) -> str:
            kept = token_ids[:-1] if token_ids and token_ids[-1] in custom_stops else token_ids
            return template.answer_text(kept) if parser is None else template.responses.text(kept)

        streamer = None
        if on_delta is not None:
            streamer = Streamer(
                choice,
                on_delta,
                decoded_text,
                stops=request.stops,
                template=parser,
                prompt_text=prompt.text,
                prefill=prefill,
                is_byte=template.tokens.is_byte,
                thoughts=thoughts,
            )
        completion = await self._sample(
            self._request(request, prompt, key_ids, (*ends, *sorted(custom_stops)), decoded_text, thoughts, matcher),
            None if streamer is None or request.top_logprobs else streamer.feed,
        )
        sampled = decoded_text(completion.token_ids)
        end, stop = find_stop(sampled, request.stops, thoughts) or (len(sampled), "")
        text, with_stop = sampled[: end + len(stop) * request.include_stop], sampled[: end + len(stop)]
        stop_reason: str | int | None = stop or None
        if not stop and (last_id := completion.token_ids[-1]) in custom_stops:
            stop_reason = control_stops.get(last_id, last_id)
        parsed = ParsedAnswer(text)
        if not isinstance(request, CompletionRequest):
            parsed = self._parse(request, prompt, prefill + text, prefill + with_stop)
        if streamer is not None:
            if request.top_logprobs:
                streamer.feed(completion.token_ids, completion.sampler_logprobs)
            streamer.finish(parsed)
        return Reply(
            parsed.content,
            completion,
            prompt.ids,
            index,
            number_tool_calls(parsed, key_ids[-1]),
            parsed.reasoning_content,
            parsed.is_malformed,
            prefill + text if prefill + text != parsed.content else None,
            stop_reason,
        )

    async def _sample(self, request: Request, on_tokens: Callable[[list[int], list[float]], None] | None) -> Completion:
        """Sample an answer, or go on with what an earlier collection has sampled of it.

        Raises:
            CancelledError: it had its tokens of this collection, or the episode has ended.
        """
        episode, submit = find_episode(), self.policy.engine.submit
        if episode is None or episode.answers is None:
            return await submit(request, on_tokens)
        begun = episode.answers.get(key := f"{self.name} {request.key_ids[-1]}")
        whole = min(request.max_tokens, self.max_context_tokens - len(request.prompt_ids))
        if begun is not None and begun.finish_reason != CARRIED:
            if on_tokens is not None:
                on_tokens(begun.token_ids, begun.sampler_logprobs)
            return begun
        most = min(whole, (len(begun.token_ids) if begun else 0) + (episode.answer_tokens or whole))
        with episode.sampling():
            completion = await submit(replace(request, max_tokens=most, begun=begun), on_tokens)
        episode.answers[key] = completion
        if completion.finish_reason == "stop" or most == whole:
            return completion
        completion.finish_reason = CARRIED
        while not episode.carry():
            await asyncio.sleep(0.01)  # some agents ask in several threads and event loops
        raise episode.closed()

    def _parse(self, request: ChatRequest, prompt: Prompt, text: str, with_stop: str) -> ParsedAnswer:
        """Return the parts of an answer, given without the stop string at its end and with it."""
        parse = partial(
            self.policy.template.responses.parse,
            prompt_text=prompt.text,
            has_tools=request.may_call_tools,
            tools=request.tools,
        )
        parsed = parse(text)
        if parsed.is_malformed and (whole := parse(with_stop)).tool_calls:
            parsed = whole  # the stop string is the end of the call
        return parsed if request.parallel_tool_calls else parsed._replace(tool_calls=parsed.tool_calls[:1])

    def _request(
        self,
        request: ChatRequest | CompletionRequest,
        prompt: Prompt,
        key_ids: tuple[int, ...],
        stop_ids: tuple[int, ...],
        decoded_text: Callable[[Sequence[int]], str],
        thoughts: Thoughts | None,
        matcher: Any,
    ) -> Request:
        """Return the engine's request for one answer."""
        begin_constraint: Callable[[], Constraint | LateEnd] | None = None
        if matcher is not None:
            ends_reasoning = None
            if thoughts is not None and thoughts.is_begun:
                close = thoughts.close
                ends_reasoning = lambda ids: close.search(decoded_text(ids)) is not None  # noqa: E731
            begin_constraint = lambda: Constraint(matcher.deep_copy(), ends_reasoning)  # noqa: E731
        elif request.min_tokens:
            begin_constraint = partial(LateEnd, request.min_tokens, stop_ids)
        room = self.max_context_tokens - len(prompt.ids)
        return Request(
            prompt_ids=prompt.ids,
            key_ids=key_ids if self.adapter is None else (key_ids[0] ^ self.adapter.seed, *key_ids[1:]),
            adapter=self.adapter,
            max_tokens=max(room, 1) if request.max_tokens is None else request.max_tokens,
            stop_ids=stop_ids,
            logit_bias=tuple((request.logit_bias or {}).items()),
            find_stop=(
                StopFinder(decoded_text, request.stops, self.policy.template.tokens.is_byte, thoughts)
                if request.stops
                else None
            ),
            begin_constraint=begin_constraint,
            **{name: vars(request)[name] for name in SamplingOptions.__dataclass_fields__},
        )

    def _fit_prompt(self, prompt: Prompt, max_tokens: int | None, episode: Episode | None) -> Prompt:
        """Return the prompt, truncated if it is too long and `long_prompts` is `truncate_left`.

        A truncated prompt leaves room for `max_tokens`, but takes at least half of the context.
        """
        limit = self.max_context_tokens
        if len(prompt.ids) < limit:
            return prompt
        if self.long_prompts != "truncate_left":  # the engine will refuse it
            self._drop(episode)
            return prompt
        room = limit // 2 if max_tokens is None else min(max(max_tokens, 1), limit // 2)
        first = len(prompt.ids) - (limit - room)
        return Prompt(prompt.text, prompt.ids[first:], truncated_tokens=prompt.truncated_tokens + first)

    def _drop(self, episode: Episode | None) -> None:
        """Mark an episode whose prompt is too long as dropped if `long_prompts` is `drop`."""
        if episode is not None and self.long_prompts == "drop":
            episode.is_dropped = True
