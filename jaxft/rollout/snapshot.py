"""Snapshots of a policy: its own earlier versions, opponents that it plays against while it is trained."""

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol, TypeVar, runtime_checkable

import jax

from jaxft.core.partition import combine, partition
from jaxft.core.types import Model, Params
from jaxft.rollout.chat import ChatTemplate
from jaxft.rollout.engine import Engine
from jaxft.rollout.relayout import Relayout, copy_trained

T = TypeVar("T")


@runtime_checkable
class Trained(Protocol):
    """The attributes and methods of a policy that a snapshot uses."""

    model: Model
    template: ChatTemplate
    version: int
    relayout: Relayout

    @property
    def sampled_version(self) -> int:
        """Version of the weights that requests are answered with."""
        ...

    def trained_params(self) -> Params:
        """Return the trained parameters, on the device thread."""
        ...

    def sampling_params(self) -> tuple[Params, int]:
        """Return the weights that requests are answered with, and their version, on the device thread."""
        ...

    async def read(self, job: Callable[[Params], T]) -> T:
        """Return `job(params)`."""
        ...


class Kept(NamedTuple):
    """The trained parameters of an earlier version, with None in place of a frozen base."""

    params: Params
    version: int


class Snapshot:
    """An earlier version of a policy, sampled from beside it on the same device thread; it is never trained.

    It is the version that training began with, and from then on the policy's latest one that is a multiple of `every`.
    Nothing is copied while the policy itself has that version. A training job, which donates the parameters, copies
    them first: in the dtype of products, or of adapters as they are, and without a frozen base, which is shared.

    All methods but `read` and `warm_up` are called on the device thread.

    Attributes:
        every: number of versions of the policy after which the snapshot is replaced.
        template: that of the policy.
        engine: samples for any number of requests at once.
    """

    def __init__(self, policy: Trained, every: int, make_engine: Callable[..., Engine]) -> None:
        """Make the engine.

        Args:
            policy: the policy that the snapshot is of.
            every: number of versions after which the snapshot is replaced.
            make_engine: returns an engine for a function that returns weights to decode with, and their version.
        """
        self.every, self.template = every, policy.template
        self._policy = policy
        self._dtype = policy.relayout.dtype(policy.trained_params())
        self._kept: Kept | None = None  # None: the parameters are the policy's own
        self._beside_held: Kept | None = None  # replaced since the policy's held weights were sampled from
        self._decode_params: Params | None = None
        self.engine = make_engine(self.sampling_params)

    @property
    def version(self) -> int:
        """Version of the policy that the parameters are."""
        return self._policy.sampled_version if self._kept is None else self._kept.version

    async def read(self, job: Callable[[Params], T]) -> T:
        """Return `job(params)`; the job must not donate the parameters."""
        return await self._policy.read(lambda params: job(self._whole(self._kept, params)))

    async def warm_up(self) -> None:
        """Compile every program that requests can need, and those that copy the parameters and lay them out."""

        def copy(params: Params) -> None:
            kept = Kept(self._copy(params), self._policy.version)
            jax.block_until_ready(self._policy.relayout(self._whole(kept, params)))

        await self._policy.read(copy)
        await self.engine.warm_up()

    def keep(self, params: Params) -> None:
        """Copy the policy's parameters if they are the snapshot's, and the next version would not replace them."""
        if self._kept is None and (self._policy.version + 1) % self.every:
            self._kept = Kept(self._copy(params), self._policy.version)

    def follow(self, version: int, *, is_release: bool = False) -> None:
        """Become the policy, which has a new version, if that is a multiple of `every`.

        If the policy only releases its held weights, the checkpoint from which a resumed run repeats what was sampled
        with them needs the replaced parameters, until the next call.
        """
        is_replaced = version % self.every == 0
        self._beside_held = self._kept if is_release and is_replaced else None
        if is_replaced:
            self._kept = None

    def drop_decode_params(self) -> None:
        """Drop the weights to decode with, which may share arrays with the policy's."""
        self._decode_params = None

    def close(self) -> None:
        """Free all arrays, once the device thread has ended."""
        self._kept = self._beside_held = self._decode_params = None
        self.engine.close()

    def saved(self, *, beside_held: bool) -> tuple[dict[str, Any] | None, Params | None]:
        """Return version and dtype of the kept parameters, for JSON, and these; None while the snapshot is the policy.

        Args:
            beside_held: True for the parameters as they were while the policy sampled with its held weights.
        """
        kept = self._beside_held if beside_held and self._kept is None else self._kept
        if kept is None:
            return None, None
        return {"version": kept.version, "dtype": str(jax.tree.leaves(kept.params)[0].dtype)}, kept.params

    def arrays_like(self, state: dict[str, Any], params: Params) -> Params:
        """Return new arrays of the shapes, dtypes and shardings that the saved arrays of a state have."""
        return copy_trained(self._policy.model, state["dtype"], params)

    def restore(self, state: dict[str, Any] | None, arrays: Params | None) -> None:
        """Restore what was `saved`; where products have another dtype now, the arrays are cast to it."""
        self._kept = self._beside_held = None
        if state is not None and arrays is not None:
            is_same = state["dtype"] == str(self._dtype)
            self._kept = Kept(arrays if is_same else self._copy(arrays), state["version"])

    def _copy(self, params: Params) -> Params:
        return copy_trained(self._policy.model, str(self._dtype), params)

    def _whole(self, kept: Kept | None, params: Params) -> Params:
        """Return all parameters of the snapshot, with the frozen base of `params`, the policy's."""
        return params if kept is None else combine(kept.params, partition(self._policy.model, params)[1])

    def sampling_params(self) -> tuple[Params, int]:
        """Return the weights that requests are answered with, and their version."""
        if self._kept is None or self._kept.version == self._policy.sampled_version:
            return self._policy.sampling_params()
        if self._decode_params is None:
            self._decode_params = self._policy.relayout(self._whole(self._kept, self._policy.trained_params()))
        return self._decode_params, self._kept.version
