"""The chat client that a workflow is given: messages in, a reply out, the call recorded under its episode."""

import asyncio
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from jaxft.core.sampling import check_sampling
from jaxft.errors import PromptTooLongError
from jaxft.rollout.chat import Message, Prompt
from jaxft.rollout.policy import Policy
from jaxft.rollout.recorder import Call, Episode, current_functions, find_episode, note_outside_call
from jaxft.rollout.requests import Completion, Request

SLACK = 8
"""Characters looked at beyond the longest stop string: the first of a part of a text may be rendered otherwise."""


class StopFinder:
    """Called with the tokens sampled so far, again and again: how many of them complete a stop string, or None.

    What was looked at before is looked at again only as far back as a stop string may have begun there.
    """

    def __init__(self, text_of: Callable[[list[int]], str], stops: Sequence[str]) -> None:
        """`text_of` says what tokens say; `stops` holds at least one string, none empty."""
        self._text_of = text_of
        self._stops = tuple(stops)
        self._reach = max(map(len, stops)) + SLACK
        self._checked = 0

    def __call__(self, token_ids: list[int]) -> int | None:
        """The smallest number of tokens whose text contains a stop string; None if all of them do not."""
        checked, self._checked = self._checked, len(token_ids)
        if not self._is_in(token_ids[self._begin(token_ids, checked) :]):
            return None
        counts = range(checked + 1, len(token_ids) + 1)
        return next((count for count in counts if self._is_in(token_ids[:count])), None)

    def _begin(self, token_ids: list[int], checked: int) -> int:
        """A place so far before the unchecked tokens that the text between would hold any stop string but its end."""
        tokens = self._reach
        while tokens < checked and len(self._text_of(token_ids[checked - tokens : checked])) < self._reach:
            tokens *= 2  # control tokens have no text, and some characters several tokens
        return max(0, checked - tokens)

    def _is_in(self, token_ids: list[int]) -> bool:
        text = self._text_of(token_ids)
        return any(stop in text for stop in self._stops)


def cut_at_stop(text: str, stops: Sequence[str], *, include_stop: bool = False) -> str:
    """The text before the first stop string in it; with `include_stop` up to the end of that string.

    >>> cut_at_stop("yes. No.", [".", "No"]), cut_at_stop("yes. No.", [".", "No"], include_stop=True)
    ('yes', 'yes.')
    """
    # Of two that begin at one place the shorter is the one that ended the answer.
    found = [(place, len(stop)) for place, stop in ((text.find(stop), stop) for stop in stops) if place >= 0]
    if not found:
        return text
    place, length = min(found)
    return text[: place + length] if include_stop else text[:place]


INTERACTIVE = 2
"""Stream of random numbers of calls made outside an episode."""


LongPrompts = Literal["fail", "drop", "truncate_left"]
"""A prompt that is too long raises an error; or does so and marks its episode as dropped; or loses its first tokens."""


@dataclass(frozen=True)
class Reply:
    """An answer.

    Attributes:
        content: its text, up to a stop string, which is a part of it with `include_stop` only.
        finish_reason: `stop`, or `length` when its budget or the context was used up.
        token_ids: what was sampled, the stop token included.
        logprobs: of these tokens, in nats, under the temperature-scaled full vocabulary.
        policy_version: of the parameters that answered.
        call_index: of the call in its episode; None outside one.
    """

    content: str
    finish_reason: str
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    policy_version: int
    call_index: int | None = None


class ChatClient:
    """Asks a live policy. Concurrent calls share one batch.

    Attributes:
        policy: who answers.
        name: what its calls are recorded under.
        long_prompts: what becomes of a prompt that leaves no room for an answer.
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
        """Samples the assistant's next message.

        Inside an episode the call is recorded for training, its noise is fixed by the episode and its prompt, and the
        episode's temperature, when it has one, replaces `temperature`.

        Args:
            messages: `{"role": ..., "content": ...}` each.
            temperature: 0 takes the most likely token every time.
            max_tokens: the most tokens to sample; None for what the context has room for.
            stop: strings that end the answer; they are not part of `content`.
            include_stop: the stop string is a part of `content`, for an agent that wants it in its history: a history
                that holds another text than `content` is tokenised afresh, and begins a training row of its own.
            top_k, top_p, min_p: truncate the distribution; see `jaxft.core.sampling.SamplingParams`.
            logit_bias: what is added to the logits of single tokens, by id; -inf forbids one.

        Raises:
            PromptTooLongError: the prompt is longer than the context; an error of value, too.
            ValueError: messages that the template refuses, or impossible parameters.
            CancelledError: the episode has ended already: it took longer than `eval.general.timeout_seconds`, or the
                run ends.
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
        # Another model's calls are in other token ids.
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
        content = cut_at_stop(template.answer_text(completion.token_ids), stops, include_stop=include_stop)
        if episode is not None:
            episode.record(self._call(index, messages, content, prompt, temperature, completion))
        return Reply(
            content,
            completion.finish_reason,
            tuple(completion.token_ids),
            tuple(completion.sampler_logprobs),
            completion.policy_version,
            None if episode is None else index,
        )

    def chat_sync(
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
        """`chat` for code that cannot await, as that of a workflow which is a plain function: waits for the reply.

        Raises:
            RuntimeError: an event loop runs in this thread: it would wait for itself.
            CancelledError: the episode has ended already.
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
        call = self.chat(
            messages,
            temperature=temperature,
            max_tokens=max_tokens,
            stop=stop,
            include_stop=include_stop,
            top_k=top_k,
            top_p=top_p,
            min_p=min_p,
            logit_bias=logit_bias,
        )
        episode = find_episode()
        return asyncio.run(call) if episode is None else episode.wait_for(call)

    def _fitted(self, prompt: Prompt, max_tokens: int | None, episode: Episode | None) -> Prompt:
        """The prompt as it is fed.

        A truncated prompt leaves room for `max_tokens`, but at least half of the context is prompt.
        """
        limit = self.policy.engine.max_context_tokens
        if len(prompt.ids) < limit:
            return prompt
        if self.long_prompts != "truncate_left":  # the engine refuses it
            self._drop(episode)
            return prompt
        room = limit // 2 if max_tokens is None else min(max(max_tokens, 1), limit // 2)
        first = len(prompt.ids) - (limit - room)
        # Its beginning is another: no cut of earlier turns holds.
        return Prompt(prompt.text, prompt.ids[first:], truncated_tokens=prompt.truncated_tokens + first)

    def _drop(self, episode: Episode | None) -> None:
        """Marks an episode whose prompt is too long as dropped, if that is what is to become of it."""
        if episode is not None and self.long_prompts == "drop":
            episode.is_dropped = True

    def _call(
        self,
        index: int,
        messages: Sequence[Message],
        content: str,
        prompt: Prompt,
        temperature: float,
        completion: Completion,
    ) -> Call:
        return Call(
            index=index,
            llm=self.name,
            messages=tuple(dict(message) for message in messages),
            content=content,
            prompt_text=prompt.text,
            prompt_ids=prompt.ids,
            prompt_boundaries=prompt.prefix_boundaries,
            token_ids=tuple(completion.token_ids),
            sampler_logprobs=tuple(completion.sampler_logprobs),
            behavior_logprobs=tuple(completion.behavior_logprobs),
            temperature=temperature,
            finish_reason=completion.finish_reason,
            policy_version=completion.policy_version,
            functions=current_functions(),
            truncated_tokens=prompt.truncated_tokens,
        )
