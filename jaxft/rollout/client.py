"""The chat client of a workflow: takes messages, returns a reply, and records the call in the episode."""

import asyncio
import functools
import itertools
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Concatenate, Literal, ParamSpec

from jaxft.core.sampling import check_sampling
from jaxft.errors import PromptTooLongError
from jaxft.rollout.chat import Message, Prompt
from jaxft.rollout.policy import Policy
from jaxft.rollout.recorder import Call, Episode, current_functions, find_episode, note_outside_call
from jaxft.rollout.requests import Request

P = ParamSpec("P")

INTERACTIVE = 2
"""Stream of random numbers for calls outside of episodes."""

LongPrompts = Literal["fail", "drop", "truncate_left"]
"""Treatments of a prompt that is too long: raise an error; raise it and drop the episode; or cut off first tokens."""


@dataclass(frozen=True)
class Reply:
    """The answer to a chat.

    Attributes:
        content: text of the answer up to a stop string, which is included only with `include_stop`.
        finish_reason: `stop`, or `length` when `max_tokens` or the context was used up.
        token_ids: sampled token ids, the stop token included.
        logprobs: log-probability of each sampled token in nats, over the whole vocabulary at the call's temperature.
        policy_version: version of the parameters that sampled.
        call_index: index of the call in its episode; None outside one.
    """

    content: str
    finish_reason: str
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    policy_version: int
    call_index: int | None = None


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
        temperature: float = 1.0,
        max_tokens: int | None = None,
        stop: str | Sequence[str] = (),
        include_stop: bool = False,
        top_k: int = 0,
        top_p: float = 1.0,
        min_p: float = 0.0,
        logit_bias: Mapping[int, float] | None = None,
    ) -> Reply:
        """Sample the assistant's next message.

        Inside an episode the call is recorded for training, its random numbers depend on episode and prompt only, and
        the episode's temperature, if set, replaces `temperature`.

        Args:
            messages: the conversation, with a `{"role": ..., "content": ...}` for each message.
            temperature: divisor of the logits; 0 takes the most likely token every time.
            max_tokens: maximum number of tokens to sample; None for as many as the context has room for.
            stop: strings that end the answer; they are not part of `content`.
            include_stop: True to include the stop string in `content`, for an agent that wants it in its history: a
                history with another text than `content` is tokenised again and begins a new training row.
            top_k, top_p, min_p: truncate the distribution; see `jaxft.sampling.SamplingParams`.
            logit_bias: values added to the logits of single tokens, by id; -inf forbids a token.

        Raises:
            PromptTooLongError: the prompt leaves no room for an answer in the context.
            ValueError: the template refuses the messages, or a parameter is impossible.
            CancelledError: the episode has ended already: it took longer than `eval.general.timeout_seconds`, or the
                run is ending.
        """
        episode = find_episode()
        if episode is None:
            note_outside_call()
        else:
            await episode.check_open()
        if episode is not None and episode.temperature is not None:
            temperature = episode.temperature
        check_sampling(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
        stops = (stop,) if isinstance(stop, str) else tuple(stop)
        if "" in stops:
            raise ValueError("stop contains an empty string, which every text ends with")

        template, engine = self.policy.template, self.policy.engine
        # Calls of another language model may be in token ids of another tokenizer.
        earlier = [] if episode is None else [call for call in tuple(episode.calls) if call.llm == self.name]
        truncate_left = self.long_prompts == "truncate_left"
        try:
            prompt = template.prompt(
                messages, earlier, max_tokens=engine.max_context_tokens, truncate_left=truncate_left
            )
        except PromptTooLongError:
            self._drop(episode)
            raise
        prompt = self._fitted(prompt, max_tokens, episode)
        if episode is not None:
            index, call_id = episode.begin_call(prompt.ids)
            key_ids = (*episode.key_ids, call_id)
        else:
            key_ids = (INTERACTIVE, 0, 0, 0, 0, next(self._interactive_calls))
        room = engine.max_context_tokens - len(prompt.ids)
        completion = await engine.submit(
            Request(
                prompt_ids=prompt.ids,
                key_ids=key_ids,
                max_tokens=max(room, 1) if max_tokens is None else max_tokens,
                temperature=temperature,
                top_k=top_k,
                top_p=top_p,
                min_p=min_p,
                stop_ids=template.stop_ids,
                logit_bias=tuple((logit_bias or {}).items()),
                find_stop=StopFinder(template.answer_text, stops) if stops else None,
                prefix_boundaries=prompt.prefix_boundaries,
            )
        )
        token_ids, logprobs = tuple(completion.token_ids), tuple(completion.sampler_logprobs)
        content = cut_at_stop(template.answer_text(token_ids), stops, include_stop=include_stop)
        if episode is not None:
            call = Call(
                index=index,
                llm=self.name,
                messages=tuple(dict(message) for message in messages),
                content=content,
                prompt_text=prompt.text,
                prompt_ids=prompt.ids,
                prompt_boundaries=prompt.prefix_boundaries,
                token_ids=token_ids,
                sampler_logprobs=logprobs,
                behavior_logprobs=tuple(completion.behavior_logprobs),
                temperature=temperature,
                finish_reason=completion.finish_reason,
                policy_version=completion.policy_version,
                functions=current_functions(),
                truncated_tokens=prompt.truncated_tokens,
            )
            episode.record(call)
        call_index = None if episode is None else index
        return Reply(content, completion.finish_reason, token_ids, logprobs, completion.policy_version, call_index)

    chat_sync = _blocking(chat)

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


SLACK = 8
"""Characters searched back beyond the longest stop string: the first ones may be decoded differently without earlier
tokens."""


class StopFinder:
    """Finds the token that completes a stop string; called repeatedly with all tokens sampled so far.

    Each call searches only the new tokens, and the tokens before them in which a stop string may begin.
    """

    def __init__(self, text_of: Callable[[list[int]], str], stops: Sequence[str]) -> None:
        """`text_of` decodes tokens; `stops` holds at least one string, and no empty one."""
        self._text_of = text_of
        self._stops = tuple(stops)
        self._reach = max(map(len, stops)) + SLACK
        self._checked = 0

    def __call__(self, token_ids: list[int]) -> int | None:
        """Return the fewest tokens whose text contains a stop string; None if the text of all tokens contains none."""
        checked, self._checked = self._checked, len(token_ids)
        if not self._is_in(token_ids[self._begin(token_ids, checked) :]):
            return None
        counts = range(checked + 1, len(token_ids) + 1)
        return next((count for count in counts if self._is_in(token_ids[:count])), None)

    def _begin(self, token_ids: list[int], checked: int) -> int:
        """Return the index to search from; no stop string that ends in the unchecked tokens can begin before it."""
        tokens = self._reach
        while tokens < checked and len(self._text_of(token_ids[checked - tokens : checked])) < self._reach:
            tokens *= 2  # control tokens have no text, and some characters take several tokens
        return max(0, checked - tokens)

    def _is_in(self, token_ids: list[int]) -> bool:
        text = self._text_of(token_ids)
        return any(stop in text for stop in self._stops)


def cut_at_stop(text: str, stops: Sequence[str], *, include_stop: bool = False) -> str:
    """Return the text before its first stop string; with `include_stop`, up to the end of that string.

    >>> cut_at_stop("yes. No.", [".", "No"]), cut_at_stop("yes. No.", [".", "No"], include_stop=True)
    ('yes', 'yes.')
    """
    # If two begin at one index, the shorter one ended the answer.
    found = [(start, len(stop)) for start, stop in ((text.find(stop), stop) for stop in stops) if start >= 0]
    if not found:
        return text
    start, length = min(found)
    return text[: start + length] if include_stop else text[:start]
