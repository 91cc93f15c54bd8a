"""Requests to an engine."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxft.core import LARGEST_FLOAT32
from jaxft.core.checks import check_token_ids
from jaxft.core.sampling import check_penalties, check_sampling
from jaxft.errors import PromptTooLongError, RequestError
from jaxft.rollout.adapters import Adapter
from jaxft.rollout.calls import Completion
from jaxft.rollout.decode_batch import MAX_BIASED_IDS, MAX_STOP_IDS
from jaxft.rollout.grammar import Constraint, LateEnd

MAX_TOP_LOGPROBS = 20
"""Largest `top_logprobs` of a request, as in OpenAI's API."""


@dataclass(frozen=True, kw_only=True)
class SamplingOptions:
    """The sampling parameters that agents and engines name alike.

    Attributes:
        temperature: divisor of the logits; 0 takes the most likely token every time.
        top_k, top_p, min_p: truncate the distribution; see `jaxft.sampling.SamplingParams`.
        presence_penalty: subtracted from the logits of tokens that the answer has, from -2 to 2.
        frequency_penalty: subtracted for each time that the answer has the token, from -2 to 2.
        repetition_penalty: divides positive and multiplies negative logits of tokens of prompt and answer; above 0.
        top_logprobs: number of most likely tokens to return for each sampled one. They are computed when the answer is
            complete, so that a stream comes at once, too.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    top_logprobs: int = 0


@dataclass(frozen=True)
class Request(SamplingOptions):
    """A prompt with its sampling parameters, which become arrays on the device, so that new values compile nothing.

    Attributes:
        prompt_ids: token ids of the prompt, at least one.
        key_ids: seed of the request: uint32 numbers, folded into the run's key in order.
        max_tokens: maximum number of tokens to sample.
        stop_ids: token ids that end the completion, which includes the sampled one.
        logit_bias: pairs of a token id and the value added to its logit, after the temperature; -inf forbids it.
        find_stop: returns how many of the sampled ids complete a stop string, or None; it also gets the number of ids
            that it was called with before, 0 where sampling began again.
        begin_constraint: begins to follow what the answer must match: a grammar, or a least length; None if it is free.
        adapter: adapter beside the weights of the policy; None for these alone.
        begun: beginning of the answer, which an earlier request sampled; it counts in `max_tokens`.
    """

    prompt_ids: tuple[int, ...]
    key_ids: tuple[int, ...]
    max_tokens: int
    stop_ids: tuple[int, ...] = ()
    logit_bias: tuple[tuple[int, float], ...] = ()
    find_stop: Callable[[list[int], int], int | None] | None = None
    begin_constraint: Callable[[], Constraint | LateEnd] | None = None
    begun: Completion | None = None
    adapter: Adapter | None = None

    @property
    def is_filtered(self) -> bool:
        """True if its tokens are drawn from a filtered distribution."""
        return bool(self.top_k > 0 or self.top_p < 1 or self.min_p > 0 or self.logit_bias)

    @property
    def is_limited(self) -> bool:
        """True if a filter or grammar limits the tokens that it is drawn from."""
        return self.is_filtered or self.begin_constraint is not None

    @property
    def penalties(self) -> tuple[float, float, float]:
        """Its repetition, frequency and presence penalty."""
        return self.repetition_penalty, self.frequency_penalty, self.presence_penalty

    @property
    def is_penalized(self) -> bool:
        """True if it has a penalty."""
        return self.penalties != (1, 0, 0)

    @property
    def has_supports(self) -> bool:
        """True if its tokens' supports are recorded: they are limited or penalized, and no bias shifts them."""
        is_shifted = any(value not in (0, -math.inf) for _, value in self.logit_bias)
        return (self.is_limited or self.is_penalized) and not is_shifted


def check_request(request: Request, max_context_tokens: int, vocabulary: int) -> None:
    """Raise unless the request can be served and arrays on the device can hold all of its numbers.

    Raises:
        PromptTooLongError: the prompt leaves no room for an answer in the context.
        RequestError: the prompt is empty or holds an id outside the vocabulary, or a parameter is impossible.

    >>> request = Request(prompt_ids=(1, 2, 3), key_ids=(0,), max_tokens=1, top_p=0.0)
    >>> check_request(request, max_context_tokens=8, vocabulary=4)
    Traceback (most recent call last):
    jaxft.errors.RequestError: top_p is 0.0; wanted a probability mass in (0, 1], at least 1e-30
    """
    length = len(request.prompt_ids)
    if length == 0:
        raise RequestError("the prompt has no tokens")
    if length >= max_context_tokens:
        raise PromptTooLongError.of(f"{length} tokens", max_context_tokens)
    if not _is_integer(request.max_tokens) or request.max_tokens < 1:
        raise RequestError(f"max_tokens is {request.max_tokens}; wanted at least 1")
    if not all(_is_integer(number) and 0 <= number < 2**32 for number in request.key_ids):
        raise RequestError(f"key_ids are {request.key_ids}; wanted numbers that fit uint32")
    if len(request.stop_ids) > MAX_STOP_IDS:
        raise RequestError(f"{len(request.stop_ids)} stop ids were given; at most {MAX_STOP_IDS} are supported")
    # A stop id beyond the vocabulary is never sampled and does no harm; some checkpoints name one.
    if not all(_is_integer(token) and 0 <= token < 2**31 for token in request.stop_ids):
        raise RequestError(f"stop_ids are {request.stop_ids}; wanted token ids, which fit int32")
    if len(request.logit_bias) > MAX_BIASED_IDS:
        raise RequestError(f"logit_bias names {len(request.logit_bias)} tokens; at most {MAX_BIASED_IDS} are supported")
    for token, value in request.logit_bias:
        if not (value == -math.inf or -LARGEST_FLOAT32 <= value <= LARGEST_FLOAT32):
            raise RequestError(
                f"logit_bias adds {value} to token {token}; wanted -inf, or a number that float32 holds, up to "
                f"{LARGEST_FLOAT32:.1e}"
            )
    if not _is_integer(request.top_logprobs) or not 0 <= request.top_logprobs <= MAX_TOP_LOGPROBS:
        raise RequestError(f"top_logprobs is {request.top_logprobs}; wanted an integer from 0 to {MAX_TOP_LOGPROBS}")
    try:
        check_token_ids("prompt_ids", request.prompt_ids, vocabulary)
        check_token_ids("logit_bias", [token for token, _ in request.logit_bias], vocabulary)
        check_sampling(temperature=request.temperature, top_k=request.top_k, top_p=request.top_p, min_p=request.min_p)
        check_penalties(request.presence_penalty, request.frequency_penalty, request.repetition_penalty)
    except ValueError as error:
        raise RequestError(str(error)) from None


def _is_integer(value: Any) -> bool:
    return isinstance(value, int | np.integer)
