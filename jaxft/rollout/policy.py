"""A live policy: the weights that an agent samples from while they are trained, with tokenizer, engine and thread.

An update of the weights waits for running requests, unless these are answered with pinned weights: then both take turns
on the device. A policy may have snapshots, which are its own earlier versions: opponents that it plays against while it
is trained.
"""

import asyncio
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from huggingface_hub import ModelCard
from jaxtyping import Array, Bool

from jaxft.core.partition import ADAPTER, BASE
from jaxft.core.sharding import commit_like, compute_devices, compute_platform
from jaxft.core.types import Model, Params
from jaxft.errors import NonFiniteError, PolicyLostError
from jaxft.files import home_path
from jaxft.models.config import PROJECTIONS, DecoderConfig, LoraSpec
from jaxft.models.decoder import lay_out_adapter
from jaxft.models.hf import save_model
from jaxft.models.model_card import SavedWeights, card_text
from jaxft.models.peft import base_fingerprint, save_adapter
from jaxft.rollout.adapters import Adapter
from jaxft.rollout.chat import ChatTemplate
from jaxft.rollout.device import CompileCounter, DeviceThread
from jaxft.rollout.engine import Engine
from jaxft.rollout.requests import Request
from jaxft.rollout.weights import POLICY, SamplingWeights

HEALTH = 3
"""Stream of random numbers for the health check."""

SAMPLING_SHARE = 0.75
"""Largest share of the device's time that sampling has while a job trains and both have work."""

T = TypeVar("T")


class Policy:
    """Owns the parameters, which only the device thread reads and replaces.

    Attributes:
        model: the model that the parameters belong to.
        tokenizer: a transformers tokenizer.
        template: turns conversations into token ids.
        weights: the parameters, their version, and all that is kept beside them.
        engine: samples for any number of requests at once.
        snapshots: earlier versions that can be sampled from, by name.
        compiles: counts the compilations of XLA.
        has_own_sampler: True if other devices than those of the parameters sample.
        dtype: dtype of the parameters, of their base if there are adapters.
        base: folder or hub id that the base of adapters was loaded from; None if there is none.
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
        sampler: Model | None = None,
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
            base: becomes the attribute.
            sampler: the same model on a mesh of other devices, which then sample alone, or of those devices of the mesh
                that are of this process, where it has some of several; None to sample where the parameters are.

        Raises:
            ValueError: `slots`, `max_context_tokens` or `cache_tokens` is too small, or the model was loaded for
                contexts of another length.
        """
        check_context(model, slots, max_context_tokens)
        self.model = model
        self.tokenizer = tokenizer
        self.template = ChatTemplate(tokenizer, stop_ids)
        self.compiles = CompileCounter()
        self.dtype = jax.tree.leaves(params.get(BASE, params))[0].dtype
        self.base = base
        self._first_base = None if model.lora is None else base_fingerprint(params[BASE])
        self.weights = SamplingWeights(model, params, sampler)
        self.has_own_sampler = sampler is not None and not self.weights.spans_processes
        self._queued: Any = None  # computed by the microbatch before the latest
        self._lost: str | None = None
        self._sampler = model if sampler is None else sampler
        self._device = DeviceThread()
        shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), params)
        self._make_engine = partial(Engine, self._sampler, self._device, shapes=shapes)
        sizes: Any = {"slots": slots, "max_context_tokens": max_context_tokens, "cache_tokens": cache_tokens}
        self.engine = self._make_engine(self.sampling_params, seed=seed, **sizes)
        self.snapshots: dict[str, Snapshot] = {}
        self._first_layout = self._device.submit(self.weights.lay_out)

    async def ready(self) -> None:
        """Wait for the first weights to decode with, in which all processes of a mesh take part.

        Raises:
            JaxRuntimeError: the devices have too little memory for them.
        """
        await asyncio.wrap_future(self._first_layout)

    def add_snapshot(
        self,
        name: str,
        *,
        every: int,
        seed: int,
        slots: int = 64,
        max_context_tokens: int = 512,
        cache_tokens: int | None = None,
    ) -> "Snapshot":
        """Add a snapshot, which is the policy itself until the first training job.

        Args:
            name: name of the snapshot, under which checkpoints have it.
            every: number of versions after which the snapshot is replaced; see `SamplingWeights`.
            seed: seed of its own noise.
            slots, max_context_tokens, cache_tokens: sizes of its own engine.

        Raises:
            ValueError: `slots`, `max_context_tokens` or `cache_tokens` is too small, or the model was loaded for
                contexts of another length.
        """
        check_context(self.model, slots, max_context_tokens)
        self.weights.every[name] = every
        sizes: Any = {"slots": slots, "max_context_tokens": max_context_tokens, "cache_tokens": cache_tokens}
        engine = self._make_engine(partial(self.sampling_params, name), seed=seed, **sizes)
        self.snapshots[name] = Snapshot(self, name, engine)
        return self.snapshots[name]

    async def add_adapter(self, lora: LoraSpec, params: Params, *, seed: int = 0) -> Adapter:
        """Return an adapter that requests may have beside the policy's weights, in one batch with all others.

        Args:
            lora: its rank, scale and targets.
            params: its parameters, as `load_adapter` returns them.
            seed: becomes the attribute.

        Raises:
            ValueError: the policy is no decoder, has adapters of its own, or is on several devices; or it has experts,
                and the adapter changes more than attention.
        """
        config = self.check_adapter(lora)

        def lay_out(base: Params) -> Adapter:
            dtype, both = self.weights.transfer.dtype(base), {BASE: base, ADAPTER: commit_like(base, params)}
            return Adapter(lay_out_adapter(config, lora.scale, dtype, both), seed)

        return await self.read(lay_out)

    def check_adapter(self, lora: LoraSpec) -> DecoderConfig:
        """Return the config of the policy, or raise the ValueError of `add_adapter`."""
        config, is_whole = self.model.config, self.model.sharding is None and self._sampler.sharding is None
        if not isinstance(config, DecoderConfig) or self.model.lora is not None or not is_whole:
            raise ValueError("an adapter can only stand beside a decoder without adapters, on one device")
        if config.num_experts and any(lora.is_target(path) for path in PROJECTIONS if path.startswith("mlp/")):
            raise ValueError(
                f"targets of the adapter are {lora.targets}; beside a model with experts wanted self_attn/*"
            )
        return config

    async def update(
        self, job: Callable[[Params], tuple[Params, T]], *, has_changed: Callable[[T], bool] = lambda result: True
    ) -> T:
        """Replace the parameters by those that `job` returns, and return the job's result.

        Running requests finish first, with the parameters that they began with; if they are answered with pinned
        weights, they go on whenever the job calls `pause`. The job may donate the trained parameters; if it raises,
        they count as lost and the policy refuses all further work.

        Args:
            job: `params -> (params, result)`. If it returns the very object that it was given, the version stays.
            has_changed: `result -> bool`, False if the new parameters hold the old values; then the version stays.

        Raises:
            PolicyLostError: an earlier job failed.
        """

        def run() -> T:
            given = self.trained_params()
            if not self.weights.is_pinned:
                self._stop_sampling()
            self._queued = None
            try:
                params, result = job(given)
            except BaseException as error:
                self._lost = f"{type(error).__name__}: {error}"
                raise
            self.weights.replace_trained(params, has_changed=params is not given and has_changed(result))
            self.weights.lay_out()
            return result

        return await self._device.run(run, "training")

    def pause(self, ready: Any) -> None:
        """Sample for a while, in the job of an `update`; do nothing unless weights are pinned.

        Args:
            ready: an array of the work that was queued last. An accelerator computes it meanwhile, so that the device
                never waits for Python; on a CPU both would slow each other.
        """
        if not self.weights.is_pinned:
            return
        is_ahead = self.has_own_sampler or compute_platform(self.model.sharding) != "cpu"
        waits_for = self._queued if is_ahead else ready
        # A sum is donated to the next microbatch, which is queued before this one is waited for; its copy is not.
        self._queued = jnp.copy(ready) if is_ahead and not ready.ndim else ready
        if self.has_own_sampler:  # they do not share the device, only the thread
            self._device.pause_until(lambda: waits_for is None or waits_for.is_ready())
            return
        if waits_for is not None:
            jax.block_until_ready(waits_for)
        self._device.pause(SAMPLING_SHARE)

    async def pin_weights(self, *, finishes_requests: bool = True) -> None:
        """Sample with the present weights until the next call of this or of `release_weights`, whatever is trained.

        The weights are copied; those pinned before are dropped.

        Args:
            finishes_requests: True to finish running requests first, with the weights that they began with; False to
                go on with them, so that later tokens are of the new version.
        """

        def run() -> None:
            self.trained_params()
            self._stop_sampling(finishes_requests=finishes_requests)
            self.weights.pin()
            self.weights.lay_out()

        await self._device.run(run)

    async def release_weights(self) -> None:
        """Sample with the newest weights again, after the running requests."""

        def run() -> None:
            if self.weights.is_pinned:
                self._stop_sampling()
                self.weights.release()
                self.weights.lay_out()

        await self._device.run(run)

    @property
    def version(self) -> int:
        """Version of the parameters; each change adds 1."""
        return self.weights.version

    @property
    def engines(self) -> list[Engine]:
        """The engines of the policy and its snapshots."""
        return [self.engine, *(snapshot.engine for snapshot in self.snapshots.values())]

    @property
    def sampling_devices(self) -> list[Any]:
        """The devices that sample, of this process."""
        return compute_devices(self._sampler.sharding)

    def device_seconds(self) -> dict[str, float]:
        """Return the seconds that the device thread has spent so far: `sampling`, `training`, `other` and `idle`."""
        return self._device.seconds()

    async def restore(self, job: Callable[[Params], Params], version: int) -> None:
        """Replace the parameters by `job(params)`, those of a checkpoint, even if they were lost.

        The job may donate the parameters that it gets; if it raises, they count as lost. It also restores snapshots.
        """

        def run() -> None:
            self._stop_sampling()
            self.weights.unpin()
            self._lost = "a restore was cut off"
            self.weights.trained = job(self.weights.trained)
            self._lost, self.weights.version = None, version
            self.weights.lay_out()

        await self._device.run(run)

    def _stop_sampling(self, *, finishes_requests: bool = True) -> None:
        """Finish the running requests of the policy and its snapshots, and drop all that depends on the parameters.

        Snapshots that stay as they are drop it, too: on accelerators the bits of log-probabilities depend on what is
        cached, and a resumed run has nothing cached.
        """
        for engine in self.engines:
            if finishes_requests:
                engine.drain()
            engine.change_weights()
        self.weights.drop_layouts()

    def keep_snapshots(self, params: Params) -> None:
        """Copy the parameters for each snapshot that is the policy itself, before a training job donates them.

        Call it in the job of an `update`, on the device thread. Until the first call snapshots follow every update, so
        that training begins with snapshots of a policy that a script has warmed up.
        """
        self.weights.keep_snapshots(params)

    async def warm_up(self) -> None:
        """Compile every program that requests to the policy and its snapshots can need."""
        await self.engine.warm_up()
        for snapshot in self.snapshots.values():
            await self.read(self.weights.warm_up)
            await snapshot.engine.warm_up()

    async def read(self, job: Callable[[Params], T]) -> T:
        """Return `job(params)`; the job must not donate the parameters."""
        return await self._device.run(lambda: job(self.trained_params()))

    async def is_healthy(self) -> bool:
        """Return True if all parameters are finite and a token can be sampled with them.

        Raises:
            PolicyLostError: an earlier update failed.
        """

        if not await self.read(lambda params: bool(are_finite(params))):
            return False
        key_ids = (HEALTH, 0, 0, 0, 0, 0)  # as many as those of a call, so that nothing is compiled
        # One token, as the smallest context has no room for a chat.
        request = Request(prompt_ids=(0,), key_ids=key_ids, max_tokens=1, stop_ids=self.template.stop_ids)
        try:
            completion = await self.engine.submit(request)
        except NonFiniteError:
            return False
        return len(completion.token_ids) == 1

    async def save(self, folder: str | Path, card: ModelCard | None = None) -> Path:
        """Write model and tokenizer in Hugging Face's file format, or adapters in PEFT's, and the model card if given.

        Adapters are written with their base if it was changed or was not loaded from a folder or the hub. Of several
        processes, which all call this, the first one writes.
        """
        path, lora = home_path(folder), self.model.lora
        writes = not self.weights.spans_processes or jax.process_index() == 0
        assert lora is None or isinstance(lora, LoraSpec)

        def save(params: Params) -> None:
            base = self.base if lora is not None and self.has_own_base(params) else None
            weights = SavedWeights(str(self.dtype), lora, has_base=lora is not None and base is None)
            text = None if card is None else card_text(card, weights)
            if lora is None:
                save_model(path, self.model, params, tokenizer=self.tokenizer, card=text, writes=writes)
            else:
                parts = {"base": base, "tokenizer": self.tokenizer, "card": text}
                save_adapter(path, self.model, params, **parts, writes=writes)

        await self.read(save)
        return path

    def has_own_base(self, params: Params) -> bool:
        """True if the base of adapters is the one that the policy was made with; a warm start may have changed it."""
        return self._first_base == base_fingerprint(params[BASE])

    def devices(self) -> list[str]:
        """Names of the devices that hold the parameters."""
        found = {device for leaf in jax.tree.leaves(self.weights.trained) for device in leaf.sharding.device_set}
        found |= set(self.sampling_devices) if self.has_own_sampler else set()
        ordered = sorted(found, key=lambda device: device.id)
        return [f"{device.device_kind} ({device.platform} {device.id})" for device in ordered]

    def close(self) -> None:
        """Finish queued work, end the device thread, and free all arrays but the parameters."""
        self._device.close()
        self.weights.drop_layouts()
        self.weights.beside.clear()
        for engine in self.engines:
            engine.close()
        self.compiles.close()

    def trained_params(self) -> Params:
        """Return the parameters, on the device thread.

        Raises:
            PolicyLostError: an earlier update failed.
        """
        if self._lost is not None:
            raise PolicyLostError(
                f"the policy's parameters were lost when an update failed ({self._lost}); "
                "restore them from a checkpoint"
            )
        return self.weights.trained

    def sampling_params(self, name: str = POLICY) -> tuple[Params, int]:
        """Return the weights that requests are answered with, and their version, on the device thread.

        Raises:
            PolicyLostError: an earlier update failed.
        """
        self.trained_params()
        return self.weights.decode_params(name)


class Snapshot:
    """An earlier version of a policy, sampled from beside it on the same device thread; it is never trained.

    Attributes:
        name: name of the snapshot among the policy's weights.
        template: that of the policy.
        engine: samples for any number of requests at once.
    """

    def __init__(self, policy: Policy, name: str, engine: Engine) -> None:
        self.name, self.template, self.engine = name, policy.template, engine
        self._policy = policy

    @property
    def version(self) -> int:
        """Version of the policy that the parameters are."""
        return self._policy.weights.sampled_version(self.name)

    async def read(self, job: Callable[[Params], T]) -> T:
        """Return `job(params)`; the job must not donate the parameters."""
        return await self._policy.read(lambda params: job(self._policy.weights.snapshot_params(self.name)))


@jax.jit
def are_finite(params: Params) -> Bool[Array, ""]:
    """True if all parameters are finite."""
    return jnp.all(jnp.stack([jnp.isfinite(leaf).all() for leaf in jax.tree.leaves(params)]))


def check_context(model: Model, slots: int, max_context_tokens: int) -> None:
    """Raise unless an engine of these sizes can serve a request, and the model's positions are those of its contexts.

    Raises:
        ValueError: a size is too small, or the model was loaded for contexts of another length.
    """
    if slots < 1 or max_context_tokens < 2:
        raise ValueError(f"slots is {slots} and max_context_tokens {max_context_tokens}; wanted at least 1 and 2")
    config = model.config
    if isinstance(config, DecoderConfig) and config != config.for_context(max_context_tokens):
        raise ValueError(
            f"max_context_tokens is {max_context_tokens}, but the model was loaded for contexts of another length, on "
            "which its rotary positions depend; load it with context_tokens, the same for all that use it"
        )
