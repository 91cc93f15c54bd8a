"""Work that cases share: a model with random weights, random prompts and training rows, and a live policy."""

import asyncio
import contextlib
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jaxft
from jaxft.core.partition import combine, partition
from jaxft.core.types import Params
from jaxft.models.layer_stack import Remat
from jaxft.rollout.calls import Completion
from jaxft.rollout.requests import Request
from shapes import Shapes

REMATS_ON_GPU: dict[str, Remat] = {"qwen3-1.7b": "dots", "qwen3-8b": "projections"}
"""Checkpoint policies that `remat: auto` takes on a GPU with 80 GiB, by preset; none of smaller ones."""

FIRST_ID = 1
"""Prompts are drawn from here to the end of the vocabulary."""


@dataclass(frozen=True)
class Workload:
    """A model that computes in one dtype, the counts of the work, and the number of timed repeats.

    Attributes:
        params: float32, whatever the model computes in, but for a frozen base. They must not be donated; see
            `fresh_params`.
    """

    preset: str
    config: jaxft.DecoderConfig
    model: jaxft.Model
    params: Params
    shapes: Shapes
    dtype: str
    repeats: int

    @property
    def itemsize(self) -> int:
        """Bytes of a weight in the dtype of products."""
        return jnp.dtype(self.dtype).itemsize

    def fresh_params(self) -> Params:
        """The parameters with a copy of those that are trained, to donate."""
        trained, frozen = partition(self.model, self.params)
        return combine(jax.tree.map(jnp.copy, trained), frozen)

    def decode_params(self) -> Params:
        """The parameters as decoding reads them."""
        return jax.jit(self.model.decode_layout)(self.params)

    def prompts(self, count: int, tokens: int, seed: object = 0) -> list[list[int]]:
        """Random prompts of one length, others for every seed."""
        rng = random.Random(f"prompts {seed}")
        return [[rng.randrange(FIRST_ID, self.config.vocab_size) for _ in range(tokens)] for _ in range(count)]

    def training_batch(self) -> jaxft.Batch:
        """Random rows in the shape of a rollout."""
        shapes = self.shapes
        tokens = self.prompts(shapes.rows, shapes.row_tokens, "rows")
        return make_batch(np.array(tokens, np.int32), shapes.row_prompt_tokens)

    @contextlib.contextmanager
    def policy(self, *, slots: int, max_context_tokens: int, cache_tokens: int | None = None) -> Iterator[jaxft.Policy]:
        """A live policy with a copy of the parameters, closed at the end of the block."""
        policy = jaxft.Policy(
            self.model,
            self.fresh_params(),
            jaxft.load_tokenizer(),
            stop_ids=(),
            seed=0,
            slots=slots,
            max_context_tokens=max_context_tokens,
            cache_tokens=cache_tokens,
        )
        try:
            yield policy
        finally:
            policy.close()


@lru_cache(maxsize=1)
def _initialized(preset: str, dtype: str, has_adapters: bool) -> tuple[jaxft.Model, Params]:
    compute_dtype, lora = None if dtype == "float32" else dtype, jaxft.LoraSpec(16, 32.0) if has_adapters else None
    of_base = dtype if has_adapters else "float32"
    remat: Remat = REMATS_ON_GPU.get(preset, "none") if jax.default_backend() == "gpu" else "dots"
    model, params = jaxft.init_model(
        preset, jax.random.key(0), dtype=of_base, compute_dtype=compute_dtype, remat=remat, lora=lora
    )
    return model, jax.block_until_ready(params)


def make_workload(preset: str, dtype: str, shapes: Shapes, repeats: int, *, has_adapters: bool = False) -> Workload:
    """A workload on a preset with random weights, computing in `dtype`; cases that follow share the weights."""
    model, params = _initialized(preset, dtype, has_adapters)
    return Workload(preset, jaxft.model_preset(preset), model, params, shapes, dtype, repeats)


def make_batch(tokens: np.ndarray, prompt_tokens: int, advantages: Any = None) -> jaxft.Batch:
    """Training rows `[B T]` whose completions begin after `prompt_tokens`; advantages 1 and -1 by turns unless given.

    >>> batch = make_batch(np.ones((3, 4), np.int32), prompt_tokens=2)
    >>> print(batch.advantages, batch.completion_mask[0])
    [ 1. -1.  1.] [False False  True  True]
    """
    rows, width = tokens.shape
    is_completion = np.broadcast_to(np.arange(width) >= prompt_tokens, tokens.shape)
    signs = 1.0 - 2.0 * (np.arange(rows) % 2)
    return jaxft.Batch(
        tokens=jnp.asarray(tokens, jnp.int32),
        completion_mask=jnp.asarray(is_completion),
        advantages=jnp.asarray(signs if advantages is None else advantages, jnp.float32),
    )


def make_requests(
    prompts: Sequence[Sequence[int]], answer_tokens: Sequence[int], number: int = 0, **sampling: Any
) -> list[Request]:
    """One request per prompt that only its length ends. Each `number` samples with noise of its own."""
    return [
        Request(prompt_ids=tuple(prompt), key_ids=(0, 0, 0, 0, number, index), max_tokens=tokens, **sampling)
        for index, (prompt, tokens) in enumerate(zip(prompts, answer_tokens, strict=True))
    ]


def serve(policy: jaxft.Policy, requests: Sequence[Request]) -> list[Completion]:
    """Completions of requests that are all submitted at once.

    Raises:
        RuntimeError: an answer has another length than was asked for; tokens per second would then be wrong.
    """

    async def submit() -> list[Completion]:
        return await asyncio.gather(*(policy.engine.submit(request) for request in requests))

    completions = asyncio.run(submit())
    for request, completion in zip(requests, completions, strict=True):
        if len(completion.token_ids) != request.max_tokens:
            raise RuntimeError(f"an answer of {request.max_tokens} tokens has {len(completion.token_ids)}")
    return completions
