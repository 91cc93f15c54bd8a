"""A live policy: the weights that an agent samples from while they are trained, with tokenizer, engine and thread.

An update of the weights waits for running requests, unless the sampler holds weights of its own: then both take turns
on the device. A policy may have snapshots, which are its own earlier versions: opponents that it plays against while it
is trained.
"""

import asyncio
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from huggingface_hub import ModelCard
from jaxtyping import Array, Bool

from jaxft.core.cache import compute_dtype
from jaxft.core.partition import BASE, combine, partition
from jaxft.core.sharding import device_bytes, devices_of, platform_of, spans_processes
from jaxft.core.types import Model, Params
from jaxft.errors import NonFiniteError, PolicyLostError
from jaxft.files import home_path
from jaxft.models.config import DecoderConfig, LoraSpec
from jaxft.models.hf import save_model
from jaxft.models.model_card import Weights, card_text
from jaxft.models.peft import base_fingerprint, save_adapter
from jaxft.rollout.chat import ChatTemplate
from jaxft.rollout.device import CompileCounter, DeviceThread
from jaxft.rollout.engine import Engine
from jaxft.rollout.relayout import GatheredRelayout, Relayout, SentRelayout, copy_trained
from jaxft.rollout.requests import Request
from jaxft.rollout.snapshot import Snapshot

HEALTH = 3
"""Stream of random numbers for the health check."""

SAMPLING_SHARE = 0.75
"""Largest share of the device's time that sampling has while a job trains and both have work."""

T = TypeVar("T")


class Held(NamedTuple):
    """Weights to decode with that share no array with the trained parameters.

    Attributes:
        params: the weights, in the layout for decoding.
        version: version of the policy that they are.
        trained: with adapters these, and on the devices of several processes the parameters, as they were trained, from
            which a checkpoint makes the weights again; None where a checkpoint has the weights themselves.
    """

    params: Params
    version: int
    trained: Params | None = None


class Policy:
    """Owns the parameters, which only the device thread reads and replaces.

    Attributes:
        model: the model that the parameters belong to.
        tokenizer: a transformers tokenizer.
        template: turns conversations into token ids.
        relayout: makes the weights to decode with.
        engine: samples for any number of requests at once.
        snapshots: earlier versions that can be sampled from, by name.
        compiles: counts the compilations of XLA.
        version: version of the parameters; each change adds 1.
        held: weights of an earlier version, which the sampler was made to hold; None without.
        is_sampler_held: True while requests are answered with `held`.
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
            base: folder or hub id that the base of adapters was loaded from; None if there is none.
            sampler: the same model on a mesh of other devices, which then sample alone, or of those devices of the mesh
                that are of this process, where it has some of several; None to sample where the parameters are.

        Raises:
            ValueError: `slots`, `max_context_tokens` or `cache_tokens` is too small, or the model was loaded for
                contexts of another length.
        """
        check_sizes(slots, max_context_tokens)
        check_context(model, max_context_tokens)
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
        self.held: Held | None = None
        self.is_sampler_held = False
        self._is_laying_out = False
        self._queued: Any = None  # computed by the microbatch before the latest
        self._lost: str | None = None
        self._sampler = model if sampler is None else sampler
        self._spans_processes = spans_processes(model.sharding)
        if sampler is None:
            self.relayout = Relayout(model)
        else:
            self.relayout = (GatheredRelayout if self._spans_processes else SentRelayout)(model, sampler)
        self._device = DeviceThread()
        self._make_engine = partial(
            Engine,
            self._sampler,
            self._device,
            shapes=jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), params),
        )
        self.engine = self._make_engine(
            self.sampling_params,
            seed=seed,
            slots=slots,
            max_context_tokens=max_context_tokens,
            cache_tokens=cache_tokens,
        )
        self.snapshots: dict[str, Snapshot] = {}
        self._first_layout = self._device.submit(self._lay_out) if self._spans_processes else None

    async def ready(self) -> None:
        """Wait for the first weights to decode with, in which all processes of a mesh take part.

        Raises:
            JaxRuntimeError: the devices have too little memory for them.
        """
        if self._first_layout is not None:
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
    ) -> Snapshot:
        """Add a snapshot, which is the policy itself until the first training job.

        Args:
            name: name of the snapshot, under which checkpoints have it.
            every: number of versions after which the snapshot is replaced; see `Snapshot`.
            seed: seed of its own noise.
            slots, max_context_tokens, cache_tokens: sizes of its own engine.

        Raises:
            ValueError: `slots`, `max_context_tokens` or `cache_tokens` is too small, or the model was loaded for
                contexts of another length.
        """
        check_sizes(slots, max_context_tokens)
        check_context(self.model, max_context_tokens)
        sizes = {"slots": slots, "max_context_tokens": max_context_tokens, "cache_tokens": cache_tokens}
        self.snapshots[name] = Snapshot(self, every, partial(self._make_engine, seed=seed, **sizes))
        return self.snapshots[name]

    async def update(
        self, job: Callable[[Params], tuple[Params, T]], *, has_changed: Callable[[T], bool] = lambda result: True
    ) -> T:
        """Replace the parameters by those that `job` returns, and return the job's result.

        Running requests finish first, with the parameters that they began with; if the sampler holds weights of its
        own, they go on whenever the job calls `pause`. The job may donate the trained parameters; if it raises, they
        count as lost and the policy refuses all further work.

        Args:
            job: `params -> (params, result)`. If it returns the very object that it was given, the version stays.
            has_changed: `result -> bool`, False if the new parameters hold the old values; then the version stays.

        Raises:
            PolicyLostError: an earlier job failed.
        """

        def run() -> T:
            self._check()
            if not self.is_sampler_held:
                self._stop_sampling()
            self._queued = None
            given = self._params
            try:
                params, result = job(given)
            except BaseException as error:
                self._lost = f"{type(error).__name__}: {error}"
                raise
            self._params = params
            if params is not given and has_changed(result):
                self.version += 1
                if not self.is_sampler_held:
                    self._follow()
            self._lay_out()
            return result

        return await self._device.run(run, "training")

    def pause(self, ready: Any) -> None:
        """Sample for a while, in the job of an `update`; do nothing unless the sampler holds weights.

        Args:
            ready: an array of the work that was queued last. An accelerator computes it meanwhile, so that the device
                never waits for Python; on a CPU both would slow each other.
        """
        if not self.is_sampler_held:
            return
        is_ahead = self.has_own_sampler or platform_of(self.model.sharding) != "cpu"
        waits_for = self._queued if is_ahead else ready
        # A sum is donated to the next microbatch, which is queued before this one is waited for; its copy is not.
        self._queued = jnp.copy(ready) if is_ahead and not ready.ndim else ready
        if self.has_own_sampler:  # they do not share the device, only the thread
            self._device.pause_until(lambda: waits_for is None or waits_for.is_ready())
            return
        if waits_for is not None:
            jax.block_until_ready(waits_for)
        self._device.pause(SAMPLING_SHARE)

    @property
    def has_own_sampler(self) -> bool:
        """True if other devices than those of the parameters sample."""
        return self._sampler is not self.model and not self._spans_processes

    async def hold_sampler(self, *, finishes_requests: bool = True) -> None:
        """Sample with the present weights until the next call of this or of `release_sampler`, whatever is trained.

        The weights are copied; those held before are dropped.

        Args:
            finishes_requests: True to finish running requests first, with the weights that they began with; False to
                go on with them, so that later tokens are of the new version.
        """

        def run() -> None:
            self._check()
            self._stop_sampling(finishes_requests=finishes_requests)
            self._hold()

        await self._device.run(run)

    def _hold(self) -> None:
        self.held, self.is_sampler_held = None, False
        self._follow()
        held = self.relayout(self._params, is_shared=False)
        trained = None
        if self.model.lora is not None or self._spans_processes:
            trained = copy_trained(self.model, str(compute_dtype(held)), self._params)
        self.held, self.is_sampler_held = Held(held, self.version, trained), True
        self._lay_out()

    async def release_sampler(self) -> None:
        """Sample with the newest weights again, after the running requests; weights that were held stay in `held`."""

        def run() -> None:
            if self.is_sampler_held:
                self._stop_sampling()
                self.is_sampler_held = False
                self._follow(is_release=True)
                self._lay_out()

        await self._device.run(run)

    def _follow(self, *, is_release: bool = False) -> None:
        for snapshot in self.snapshots.values():
            snapshot.follow(self.version, is_release=is_release)

    def _lay_out(self) -> None:
        """Make the weights to decode with, in which several processes take part; a single one does so on demand."""
        if self._spans_processes:
            self._is_laying_out = True
            try:
                self.sampling_params()
                for snapshot in self.snapshots.values():
                    snapshot.sampling_params()
            finally:
                self._is_laying_out = False

    @property
    def sampled_version(self) -> int:
        """Version of the weights that requests are answered with."""
        return self.held.version if self.is_sampler_held and self.held is not None else self.version

    def device_seconds(self) -> dict[str, float]:
        """Return the seconds that the device thread has spent so far: `sampling`, `training`, `other` and `idle`."""
        return self._device.seconds()

    async def restore(self, job: Callable[[Params], Params], version: int) -> None:
        """Replace the parameters by `job(params)`, those of a checkpoint, even if they were lost.

        The job may donate the parameters that it gets; if it raises, they count as lost. It also restores snapshots.
        """

        def run() -> None:
            self._stop_sampling()
            self.held, self.is_sampler_held = None, False
            self._lost = "a restore was cut off"
            self._params = job(self._params)
            self._lost, self.version = None, version
            self._lay_out()

        await self._device.run(run)

    def _stop_sampling(self, *, finishes_requests: bool = True) -> None:
        """Finish the running requests of the policy and its snapshots, and drop all that depends on the parameters.

        Snapshots that stay as they are drop it, too: on accelerators the bits of log-probabilities depend on what is
        cached, and a resumed run has nothing cached.
        """
        engines = [self.engine, *(snapshot.engine for snapshot in self.snapshots.values())]
        for engine in engines:
            if finishes_requests:
                engine.drain()
            engine.change_weights()
        self._decode_params = None
        for snapshot in self.snapshots.values():
            snapshot.drop_decode_params()

    def keep_snapshots(self, params: Params) -> None:
        """Copy the parameters for each snapshot that is the policy itself, before a training job donates them.

        Call it in the job of an `update`, on the device thread. Until the first call snapshots follow every update, so
        that training begins with snapshots of a policy that a script has warmed up.
        """
        for snapshot in self.snapshots.values():
            snapshot.keep(params)

    async def warm_up(self) -> None:
        """Compile every program that requests to the policy and its snapshots can need."""
        await self.engine.warm_up()
        for snapshot in self.snapshots.values():
            await snapshot.warm_up()

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
        writes = not self._spans_processes or jax.process_index() == 0
        assert lora is None or isinstance(lora, LoraSpec)

        def save(params: Params) -> None:
            base = self._base if lora is not None and self.has_own_base(params) else None
            weights = Weights(str(self.dtype), lora, has_base=lora is not None and base is None)
            text = None if card is None else card_text(card, weights)
            if lora is None:
                save_model(path, self.model, params, tokenizer=self.tokenizer, card=text, writes=writes)
            else:
                parts = {"base": base, "tokenizer": self.tokenizer, "card": text}
                save_adapter(path, self.model, params, **parts, writes=writes)

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
        found |= set(devices_of(self._sampler.sharding)) if self.has_own_sampler else set()
        ordered = sorted(found, key=lambda device: device.id)
        return [f"{device.device_kind} ({device.platform} {device.id})" for device in ordered]

    def sampling_bytes(self, params: Params) -> dict[str, int]:
        """Return the bytes on each device, by purpose, of arrays that only sampling uses.

        The purposes are `sampling weights`, `sampling` (keys and values) and, if there are any, `snapshots`: the
        parameters that they keep, while their weights and caches are counted with the policy's. With adapters in
        several processes also `gathered base`: the frozen base, which each process keeps whole.
        """
        dtype, snapshots = self.relayout.dtype(params), self.snapshots.values()
        caches = [engine.cache_bytes(dtype) for engine in (self.engine, *(each.engine for each in snapshots))]
        sizes = {"sampling": sum(caches), "sampling weights": self.relayout.extra_bytes(params)}
        if isinstance(self.relayout, GatheredRelayout) and self.model.lora is not None:
            sizes["gathered base"] = self.relayout.base_bytes(params)
        if snapshots:
            kept, weights = self.relayout.snapshot_bytes(params)
            sizes["snapshots"] = len(snapshots) * kept
            sizes["sampling weights"] += len(snapshots) * weights
        return sizes

    def held_bytes(self, params: Params) -> int:
        """Return the bytes on each device of weights that the sampler holds, and of what they are made again from."""
        held = self.relayout.extra_bytes(params, is_shared=False)
        if not self._spans_processes:
            return held
        copied = jax.eval_shape(partial(copy_trained, self.model, str(self.relayout.dtype(params))), params)
        return held + device_bytes(self.model.sharding, copied)

    def held_state(self) -> dict[str, Any]:
        """Return version, dtype and layout of the weights that the sampler holds, for JSON."""
        assert self.held is not None
        return {
            "version": self.held.version,
            "dtype": str(compute_dtype(self.held.params)),
            "tensor_shards": self._tensor_shards,
            "is_as_trained": self.held.trained is not None,
        }

    def held_arrays(self) -> Params:
        """Return the arrays of the weights that the sampler holds, or those from which they are made again."""
        assert self.held is not None
        return self.held.params if self.held.trained is None else self.held.trained

    def held_like(self, state: dict[str, Any], params: Params) -> Params:
        """Return new arrays of the shapes, dtypes and shardings that the `held_arrays` of a `held_state` have."""
        if self._is_as_trained(state):
            return copy_trained(self.model, state["dtype"], params)
        laid_out = self.relayout(params, is_shared=False)
        if isinstance(self.relayout, GatheredRelayout):
            laid_out = self.relayout.whole_like(laid_out)
        return jax.tree.map(lambda leaf: leaf.astype(state["dtype"]), laid_out)

    def _is_as_trained(self, state: dict[str, Any]) -> bool:
        """Return True if the arrays of a `held_state` are those of `Held.trained`; earlier versions do not say so."""
        return bool(state.get("is_as_trained", self.model.lora is not None))

    def restore_held(self, state: dict[str, Any], arrays: Params, params: Params) -> bool:
        """Hold the weights of a `held_state`, in the job of a `restore`; `params` are the restored ones.

        Returns:
            False if they are laid out for another mesh, or in another dtype of products: then nothing is held.
        """
        if self._is_as_trained(state):
            if self.model.lora is None and state["dtype"] != str(self.relayout.dtype(params)):
                return False
            laid_out = self.relayout(combine(arrays, partition(self.model, params)[1]), is_shared=False)
            self.held, self.is_sampler_held = Held(laid_out, state["version"], arrays), True
            return True
        is_same_layout = (state["dtype"], state["tensor_shards"]) == (
            str(self.relayout.dtype(params)),
            self._tensor_shards,
        )
        if not is_same_layout or self._spans_processes:
            return False
        self.held, self.is_sampler_held = Held(arrays, state["version"]), True
        return True

    @property
    def _tensor_shards(self) -> int:
        return 1 if self._sampler.sharding is None else self._sampler.sharding.mesh.shape["tensor"]

    def sampling_temporary_bytes(self, params: Params) -> int:
        """Return the bytes per device of temporaries of the largest programs of sampling, which are compiled."""
        engines = [self.engine, *(snapshot.engine for snapshot in self.snapshots.values())]
        distinct, shapes = {engine.sizes: engine for engine in engines}, self.relayout.shapes(params)
        programs = [lower for engine in distinct.values() for lower in engine.programs(shapes).values()]
        return max(lower().compile().memory_analysis().temp_size_in_bytes for lower in programs)

    def close(self) -> None:
        """Finish queued work, end the device thread, and free all arrays but the parameters."""
        self._device.close()
        self._decode_params = self.held = None
        self.engine.close()
        for snapshot in self.snapshots.values():
            snapshot.close()
        self.compiles.close()

    def trained_params(self) -> Params:
        """Return the parameters, on the device thread.

        Raises:
            PolicyLostError: an earlier update failed.
        """
        self._check()
        return self._params

    def sampling_params(self) -> tuple[Params, int]:
        """Return the weights that requests are answered with, and their version, on the device thread.

        Raises:
            PolicyLostError: an earlier update failed.
        """
        self._check()
        if self.is_sampler_held and self.held is not None:
            return self.held.params, self.held.version
        if self._decode_params is None:
            if self._spans_processes and not self._is_laying_out:
                raise PolicyLostError("the weights to decode with could not be made, and one process alone cannot")
            self._decode_params = self.relayout(self._params)
        return self._decode_params, self.version

    def _check(self) -> None:
        if self._lost is not None:
            raise PolicyLostError(
                f"the policy's parameters were lost when an update failed ({self._lost}); "
                "restore them from a checkpoint"
            )


@jax.jit
def are_finite(params: Params) -> Bool[Array, ""]:
    """True if all parameters are finite."""
    return jnp.all(jnp.stack([jnp.isfinite(leaf).all() for leaf in jax.tree.leaves(params)]))


def check_sizes(slots: int, max_context_tokens: int) -> None:
    """Raise unless an engine of these sizes can serve a request.

    Raises:
        ValueError: one of them is too small.
    """
    if slots < 1 or max_context_tokens < 2:
        raise ValueError(f"slots is {slots} and max_context_tokens {max_context_tokens}; wanted at least 1 and 2")


def check_context(model: Model, max_context_tokens: int) -> None:
    """Raise unless the positions of a model are those of contexts of this length.

    Raises:
        ValueError: they are not.
    """
    config = model.config
    if isinstance(config, DecoderConfig) and config != config.for_context(max_context_tokens):
        raise ValueError(
            f"max_context_tokens is {max_context_tokens}, but the model was loaded for contexts of another length, on "
            "which its rotary positions depend; load it with context_tokens, the same for all that use it"
        )
