"""A live policy: weights, tokenizer, engine and device thread, with one way to ask it and one way to change it."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import jax
import jax.numpy as jnp

from jaxft.core.partition import BASE
from jaxft.core.sharding import device_bytes
from jaxft.core.types import Model, Params
from jaxft.errors import NonFiniteError, PolicyLostError
from jaxft.rollout.chat import ChatTemplate
from jaxft.rollout.device import CompileCounter, DeviceThread
from jaxft.rollout.engine import Engine
from jaxft.rollout.requests import Request

HEALTH = 3
"""Stream of random numbers of the health check."""

T = TypeVar("T")


class Policy:
    """Owns the parameters. They are read and replaced on the device thread only.

    Attributes:
        model: the contract's tuple.
        tokenizer: a transformers tokenizer.
        template: conversations as token ids.
        engine: samples for any number of requests at once.
        compiles: counts what XLA compiles.
        version: of the parameters; goes up by one with every change.
    """

    def __init__(
        self,
        model: Model,
        params: Params,
        tokenizer: Any,
        *,
        stop_ids: tuple[int, ...],
        seed: int = 0,
        slots: int = 64,
        max_context_tokens: int = 512,
        prefix_cache_rows: int | None = None,
        base: str | None = None,
    ) -> None:
        """`prefix_cache_rows`: how many the engine keeps for further generations and turns; None for as many as slots.
        `base`: where the base of adapters came from; None where it has no such place."""
        if slots < 1 or max_context_tokens < 2:
            raise ValueError(f"slots is {slots} and max_context_tokens {max_context_tokens}; wanted at least 1 and 2")
        self.model = model
        self.tokenizer = tokenizer
        self.template = ChatTemplate(tokenizer, stop_ids)
        self.version = 0
        self.compiles = CompileCounter()
        self._base = base
        self._first_base = None if model.lora is None else self.base_of(params)
        self._params = params
        self._decode_params: Params | None = None
        self._lost: str | None = None
        self._relayout = Relayout(model)
        self._device = DeviceThread()
        self.engine = Engine(
            model,
            self._device,
            self._sampling_params,
            seed=seed,
            slots=slots,
            max_context_tokens=max_context_tokens,
            shapes=jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), params),
            prefix_cache_rows=prefix_cache_rows,
        )

    async def update(
        self, job: Callable[[Params], tuple[Params, T]], *, has_changed: Callable[[T], bool] = lambda result: True
    ) -> T:
        """Replaces the parameters by what `job` makes of them and returns its result.

        Requests that run already finish first, on the parameters they began with. The job may donate the parameters; if
        it raises, they count as lost and the policy refuses all further work.

        Args:
            job: `params -> (params, result)`. When it returns the very object it was given, the version stays.
            has_changed: tells from the result whether the new parameters hold other values; if not, the version stays.

        Raises:
            PolicyLostError: an earlier job failed.
        """

        def run() -> T:
            self._check()
            self.engine.drain()
            self.engine.clear_prefix_cache()
            given = self._params
            self._decode_params = None
            try:
                params, result = job(given)
            except BaseException as error:
                self._lost = f"{type(error).__name__}: {error}"
                raise
            self._params = params
            if params is not given and has_changed(result):
                self.version += 1
            return result

        return await self._device.run(run)

    async def restore(self, job: Callable[[Params], Params], version: int) -> None:
        """Replaces the parameters by those of a checkpoint, `job(params)`, which makes good what was lost; it may give
        up those that it gets, and if it raises, they count as lost."""

        def run() -> None:
            self.engine.drain()
            self.engine.clear_prefix_cache()
            self._decode_params = None
            self._lost = "a restore was cut off"
            self._params = job(self._params)
            self._lost, self.version = None, version

        await self._device.run(run)

    async def read(self, job: Callable[[Params], T]) -> T:
        """The result of `job(params)`, which must not donate them."""

        def run() -> T:
            self._check()
            return job(self._params)

        return await self._device.run(run)

    async def is_healthy(self) -> bool:
        """Whether all parameters are finite and a token can be sampled from them.

        Raises:
            PolicyLostError: an update failed.
        """

        def are_finite(params: Params) -> bool:
            return all(bool(jnp.isfinite(leaf).all()) for leaf in jax.tree.leaves(params))

        if not await self.read(are_finite):
            return False
        prompt = self.template.prompt([{"role": "user", "content": "?"}])
        key_ids = (HEALTH, 0, 0, 0, 0, 0)  # as many as those of a call, or the engine would compile for them
        request = Request(prompt_ids=prompt.ids, key_ids=key_ids, max_tokens=1, stop_ids=self.template.stop_ids)
        try:
            completion = await self.engine.submit(request)
        except NonFiniteError:
            return False
        return len(completion.token_ids) == 1

    async def save(self, folder: str | Path) -> Path:
        """Writes model and tokenizer in Hugging Face's file format; adapters in PEFT's, with their base if it is
        nowhere else."""
        from jaxft.models.hf import save_model
        from jaxft.models.peft import save_adapter

        path = Path(folder)

        def save(params: Params) -> None:
            if self.model.lora is None:
                save_model(path, self.model, params, tokenizer=self.tokenizer)
            else:
                base = self._base if self.has_own_base(params) else None
                save_adapter(path, self.model, params, base=base, tokenizer=self.tokenizer)

        await self.read(save)
        return path

    def base_of(self, params: Params) -> str:
        """Tells the base of adapters from another one."""
        from jaxft.models.peft import base_fingerprint

        return base_fingerprint(params[BASE])

    def has_own_base(self, params: Params) -> bool:
        """Whether the base of adapters is the one that the policy was made with: a warm start may have changed it."""
        return self._first_base == self.base_of(params)

    def devices(self) -> list[str]:
        """The devices that hold the parameters, in words."""
        found = {device for leaf in jax.tree.leaves(self._params) for device in leaf.sharding.device_set}
        ordered = sorted(found, key=lambda device: device.id)
        return [f"{device.device_kind} ({device.platform} {device.id})" for device in ordered]

    def sampling_bytes(self, params: Params) -> tuple[int, int]:
        """What decoding takes on each device: weights of its own, and keys and values."""
        return self._relayout.extra_bytes(params), self.engine.cache_bytes(self._relayout.dtype(params))

    def close(self) -> None:
        """Ends the device thread."""
        self._device.close()
        self.compiles.close()

    def _sampling_params(self) -> tuple[Params, int]:
        self._check()
        if self._decode_params is None:
            self._decode_params = self._relayout(self._params)
        return self._decode_params, self.version

    def _check(self) -> None:
        if self._lost is not None:
            raise PolicyLostError(
                f"the policy's parameters were lost when an update failed ({self._lost}); "
                "restore them from a checkpoint"
            )


class Relayout:
    """`Model.decode_layout`, jitted; what it leaves as it is, embeddings mostly, is shared and not copied."""

    def __init__(self, model: Model) -> None:
        self._model = model
        self._made = jax.jit(lambda params: self._split(params)[0])

    def __call__(self, params: Params) -> Params:
        """The weights to decode with; they hold arrays of `params`, which must not be donated meanwhile."""
        shared, structure = self._shared(params)
        given, made = jax.tree.leaves(params), self._made(params)
        leaves = [given[place] if place is not None else made[index] for index, place in enumerate(shared)]
        return jax.tree.unflatten(structure, leaves)

    def extra_bytes(self, params: Params) -> int:
        """What they take on each device beside the weights that are trained."""
        shared, structure = self._shared(params)
        shapes = jax.tree.leaves(jax.eval_shape(self._model.decode_layout, params))
        made = [shape if place is None else None for shape, place in zip(shapes, shared, strict=True)]
        sharding = None if self._model.sharding is None else self._model.sharding.gathered()
        return device_bytes(sharding, jax.tree.unflatten(structure, made))

    def dtype(self, params: Params) -> Any:
        """Of activations, and of keys and values."""
        from jaxft.core.cache import compute_dtype

        return compute_dtype(jax.eval_shape(self._model.decode_layout, params))

    def _split(self, params: Params) -> tuple[list[Any], Any]:
        """The decoded weights with None in the place of those that are given, and which these are."""
        shared, _ = self._shared(params)
        leaves = jax.tree.leaves(self._model.decode_layout(params))
        return [leaf if place is None else None for leaf, place in zip(leaves, shared, strict=True)], shared

    def _shared(self, params: Params) -> tuple[list[int | None], Any]:
        """Of each decoded leaf, which leaf of `params` it is; and the structure of all."""
        shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), params)
        traced, decoded = jax.make_jaxpr(self._model.decode_layout, return_shape=True)(shapes)
        places = {id(variable): place for place, variable in enumerate(traced.jaxpr.invars)}
        return [places.get(id(variable)) for variable in traced.jaxpr.outvars], jax.tree.structure(decoded)
