"""A live policy: the weights that an agent samples from while they are trained, with tokenizer, engine and thread."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import jax
import jax.numpy as jnp

from jaxft.core.cache import compute_dtype
from jaxft.core.partition import BASE
from jaxft.core.sharding import device_bytes
from jaxft.core.types import Model, Params
from jaxft.errors import NonFiniteError, PolicyLostError
from jaxft.models.hf import save_model
from jaxft.models.peft import base_fingerprint, save_adapter
from jaxft.rollout.chat import ChatTemplate
from jaxft.rollout.device import CompileCounter, DeviceThread
from jaxft.rollout.engine import Engine
from jaxft.rollout.requests import Request

HEALTH = 3
"""Stream of random numbers for the health check."""

T = TypeVar("T")


class Policy:
    """Owns the parameters, which only the device thread reads and replaces.

    Attributes:
        model: the model that the parameters belong to.
        tokenizer: a transformers tokenizer.
        template: turns conversations into token ids.
        engine: samples for any number of requests at once.
        compiles: counts the compilations of XLA.
        version: version of the parameters; each change adds 1.
        dtype: dtype of the parameters, of their base if there are adapters.
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
        cache_tokens: int | None = None,
        base: str | None = None,
    ) -> None:
        """Start the device thread and an engine.

        Args:
            model: the model of `params`.
            params: the first parameters; the policy owns them from now on.
            tokenizer: a transformers tokenizer with a chat template.
            stop_ids: token ids that end an answer.
            seed: seed of the run; all noise is drawn from it.
            slots: number of requests that decode together.
            max_context_tokens: maximum number of tokens of a prompt with its answer.
            cache_tokens: number of tokens whose keys and values fit in the cache; see `Engine`.
            base: folder or hub id that the base of adapters was loaded from; None if there is none.

        Raises:
            ValueError: `slots`, `max_context_tokens` or `cache_tokens` is too small.
        """
        if slots < 1 or max_context_tokens < 2:
            raise ValueError(f"slots is {slots} and max_context_tokens {max_context_tokens}; wanted at least 1 and 2")
        self.model = model
        self.tokenizer = tokenizer
        self.template = ChatTemplate(tokenizer, stop_ids)
        self.version = 0
        self.compiles = CompileCounter()
        self.dtype = jax.tree.leaves(params.get(BASE, params))[0].dtype
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
            cache_tokens=cache_tokens,
        )

    async def update(
        self, job: Callable[[Params], tuple[Params, T]], *, has_changed: Callable[[T], bool] = lambda result: True
    ) -> T:
        """Replace the parameters by those that `job` returns, and return the job's result.

        Running requests finish first, with the parameters that they began with. The job may donate the parameters; if
        it raises, they count as lost and the policy refuses all further work.

        Args:
            job: `params -> (params, result)`. If it returns the very object that it was given, the version stays.
            has_changed: `result -> bool`, False if the new parameters hold the old values; then the version stays.

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
        """Replace the parameters by `job(params)`, those of a checkpoint, even if they were lost.

        The job may donate the parameters that it gets; if it raises, they count as lost.
        """

        def run() -> None:
            self.engine.drain()
            self.engine.clear_prefix_cache()
            self._decode_params = None
            self._lost = "a restore was cut off"
            self._params = job(self._params)
            self._lost, self.version = None, version

        await self._device.run(run)

    async def read(self, job: Callable[[Params], T]) -> T:
        """Return `job(params)`; the job must not donate the parameters."""

        def run() -> T:
            self._check()
            return job(self._params)

        return await self._device.run(run)

    async def is_healthy(self) -> bool:
        """Return True if all parameters are finite and a token can be sampled with them.

        Raises:
            PolicyLostError: an earlier update failed.
        """

        def are_finite(params: Params) -> bool:
            return all(bool(jnp.isfinite(leaf).all()) for leaf in jax.tree.leaves(params))

        if not await self.read(are_finite):
            return False
        prompt = self.template.prompt([{"role": "user", "content": "?"}])
        key_ids = (HEALTH, 0, 0, 0, 0, 0)  # as many as those of a call, so that nothing is compiled
        request = Request(prompt_ids=prompt.ids, key_ids=key_ids, max_tokens=1, stop_ids=self.template.stop_ids)
        try:
            completion = await self.engine.submit(request)
        except NonFiniteError:
            return False
        return len(completion.token_ids) == 1

    async def save(self, folder: str | Path) -> Path:
        """Write model and tokenizer in Hugging Face's file format, or adapters in PEFT's.

        Adapters are written with their base if it was changed or was not loaded from a folder or the hub."""
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
        """Return the fingerprint of the base of adapters."""
        return base_fingerprint(params[BASE])

    def has_own_base(self, params: Params) -> bool:
        """True if the base of adapters is the one that the policy was made with; a warm start may have changed it."""
        return self._first_base == self.base_of(params)

    def devices(self) -> list[str]:
        """Names of the devices that hold the parameters."""
        found = {device for leaf in jax.tree.leaves(self._params) for device in leaf.sharding.device_set}
        ordered = sorted(found, key=lambda device: device.id)
        return [f"{device.device_kind} ({device.platform} {device.id})" for device in ordered]

    def sampling_bytes(self, params: Params) -> tuple[int, int]:
        """Bytes on each device of weights that only decoding uses, and of the key-value caches."""
        return self._relayout.extra_bytes(params), self.engine.cache_bytes(self._relayout.dtype(params))

    def sampling_temporary_bytes(self, params: Params) -> int:
        """Return the bytes per device of temporaries of the largest programs of sampling, which are compiled."""
        programs = self.engine.programs(self._relayout.shapes(params))
        compiled = [lower().compile().memory_analysis() for lower in programs.values()]
        return max(each.temp_size_in_bytes for each in compiled)

    def close(self) -> None:
        """Finish queued work and end the device thread."""
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
    """`Model.decode_layout`, jitted; arrays that it leaves as they are, mostly embeddings, are shared, not copied."""

    def __init__(self, model: Model) -> None:
        self._model = model
        self._new_leaves = jax.jit(self._make_new_leaves)

    def __call__(self, params: Params) -> Params:
        """Return the weights to decode with, which share arrays with `params`; do not donate these meanwhile."""
        shared, structure = self._shared(params)
        given, new = jax.tree.leaves(params), self._new_leaves(params)
        leaves = [new[index] if source is None else given[source] for index, source in enumerate(shared)]
        return jax.tree.unflatten(structure, leaves)

    def extra_bytes(self, params: Params) -> int:
        """Return the bytes per device of the decoding weights that are not shared with the trained ones."""
        shared, structure = self._shared(params)
        shapes = jax.tree.leaves(jax.eval_shape(self._model.decode_layout, params))
        new = [shape if source is None else None for shape, source in zip(shapes, shared, strict=True)]
        sharding = None if self._model.sharding is None else self._model.sharding.gathered()
        return device_bytes(sharding, jax.tree.unflatten(structure, new))

    def shapes(self, params: Params) -> Params:
        """Return the shapes, with shardings, of the weights to decode with."""
        shapes = jax.eval_shape(self._model.decode_layout, params)
        return shapes if self._model.sharding is None else self._model.sharding.gathered().place(shapes)

    def dtype(self, params: Params) -> Any:
        """The dtype of activations, keys and values."""
        return compute_dtype(jax.eval_shape(self._model.decode_layout, params))

    def _make_new_leaves(self, params: Params) -> list[Any]:
        """Make the leaves of the decoding weights, with None for shared ones."""
        shared, _ = self._shared(params)
        leaves = jax.tree.leaves(self._model.decode_layout(params))
        return [leaf if source is None else None for leaf, source in zip(leaves, shared, strict=True)]

    def _shared(self, params: Params) -> tuple[list[int | None], Any]:
        """Return, for each decoding leaf, the index of the same leaf in `params` or None; and the tree structure."""
        shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), params)
        traced, decoded = jax.make_jaxpr(self._model.decode_layout, return_shape=True)(shapes)
        sources = {id(variable): index for index, variable in enumerate(traced.jaxpr.invars)}
        return [sources.get(id(variable)) for variable in traced.jaxpr.outvars], jax.tree.structure(decoded)
