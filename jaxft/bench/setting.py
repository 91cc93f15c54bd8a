"""What a case works with: a model with random weights, prompts of random tokens, and a policy when it wants one."""

import asyncio
import contextlib
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from jaxft.bench.arguments import ALIASES, Job
from jaxft.bench.results import CaseResult
from jaxft.bench.shapes import Shapes
from jaxft.core.types import Batch, Model, Params
from jaxft.models.config import DecoderConfig, model_preset
from jaxft.models.load import init_model
from jaxft.rollout.chat import load_tokenizer
from jaxft.rollout.policy import Policy
from jaxft.rollout.requests import Completion, Request

FIRST_ID = 1
"""Prompts are drawn from here to the end of the vocabulary."""


@dataclass(frozen=True)
class Setting:
    """A model that computes in one dtype, the counts of the work, and how often it is repeated.

    Attributes:
        params: float32, whatever the model computes in. Nobody may donate them; see `fresh_params`.
    """

    job: Job
    config: DecoderConfig
    model: Model
    params: Params
    repeats: int

    @property
    def shapes(self) -> Shapes:
        """Counts of the work."""
        return self.job.shapes

    @property
    def itemsize(self) -> int:
        """Bytes of a weight that is computed with."""
        return jnp.dtype(self.job.dtype).itemsize

    def fresh_params(self) -> Params:
        """A copy to donate."""
        return jax.tree.map(jnp.copy, self.params)

    def prompts(self, count: int, tokens: int, seed: object = 0) -> list[list[int]]:
        """So many different prompts of this length; others for every seed."""
        rng = random.Random(f"prompts {seed}")
        return [[rng.randrange(FIRST_ID, self.config.vocab_size) for _ in range(tokens)] for _ in range(count)]

    def result(self) -> CaseResult:
        """An empty result of this job."""
        return CaseResult(case=self.job.case, model=self.job.model, dtype=self.job.dtype)

    @contextlib.contextmanager
    def policy(self, *, slots: int, max_context_tokens: int) -> Iterator[Policy]:
        """A live policy with a copy of the parameters, closed at the end."""
        policy = Policy(
            self.model,
            self.fresh_params(),
            load_tokenizer(),
            stop_ids=(),
            seed=0,
            slots=slots,
            max_context_tokens=max_context_tokens,
        )
        try:
            yield policy
        finally:
            policy.close()


def make_setting(job: Job, repeats: int) -> Setting:
    """The setting of a job on a model."""
    assert job.model is not None
    config = model_preset(ALIASES.get(job.model, job.model))
    compute_dtype = None if job.dtype == "float32" else job.dtype
    model, params = init_model(config, jax.random.key(0), compute_dtype=compute_dtype)
    return Setting(job, config, model, jax.block_until_ready(params), repeats)


def requests_of(
    prompts: Sequence[Sequence[int]], answer_tokens: Sequence[int], number: int = 0, **sampling: Any
) -> list[Request]:
    """A request per prompt that nothing but its length ends; `number` gives them noise of their own."""
    return [
        Request(prompt_ids=tuple(prompt), key_ids=(0, 0, 0, 0, number, index), max_tokens=tokens, **sampling)
        for index, (prompt, tokens) in enumerate(zip(prompts, answer_tokens, strict=True))
    ]


def serve(policy: Policy, requests: Sequence[Request]) -> list[Completion]:
    """The completions of requests that are all asked at once, of the lengths that were asked for.

    Raises:
        RuntimeError: an answer has another length; then tokens per second would not be those that are reported.
    """

    async def ask() -> list[Completion]:
        return await asyncio.gather(*(policy.engine.submit(request) for request in requests))

    completions = asyncio.run(ask())
    for request, completion in zip(requests, completions, strict=True):
        if len(completion.token_ids) != request.max_tokens:
            raise RuntimeError(f"an answer of {request.max_tokens} tokens has {len(completion.token_ids)}")
    return completions


def training_batch(setting: Setting) -> Batch:
    """Rows of random tokens as a rollout leaves them: prompts of one length, completions to the end, advantages ±1."""
    shapes = setting.shapes
    tokens = np.array(setting.prompts(shapes.rows, shapes.row_tokens, "rows"), np.int32)
    is_completion = np.arange(shapes.row_tokens) >= shapes.row_prompt_tokens
    return Batch(
        tokens=jnp.asarray(tokens),
        completion_mask=jnp.asarray(np.broadcast_to(is_completion, tokens.shape)),
        advantages=signs(shapes.rows),
    )


def signs(rows: int) -> Float[Array, "B"]:
    """Advantages of 1 and -1 by turns.

    >>> print(signs(3))
    [ 1. -1.  1.]
    """
    return jnp.asarray(1.0 - 2.0 * (np.arange(rows) % 2), jnp.float32)
