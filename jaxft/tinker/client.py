"""Tinker's clients without a socket: the same methods, on a service in this process.

Every call returns an `APIFuture`, which has `result()` and can be awaited; calls of one training client are run in
their order.
"""

import asyncio
import concurrent.futures
import itertools
import threading
from collections.abc import Callable, Coroutine, Generator, Mapping, Sequence
from functools import partialmethod
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from jaxft import Policy
from jaxft.tinker.data import fields_of
from jaxft.tinker.service import STATES, Service

Config = dict[str, Any] | None


class APIFuture:
    """The result of a call: `result()` waits for it, as does `await`. Only sampling ends when nobody waits any more."""

    def __init__(self, future: "concurrent.futures.Future[Any]", *, ends: bool = False) -> None:
        self.result, self._future, self._ends = future.result, future, ends

    def __await__(self) -> Generator[Any, None, Any]:
        waiting = asyncio.wrap_future(self._future)
        return (waiting if self._ends else asyncio.shield(waiting)).__await__()


def _with_attributes(found: Any) -> Any:
    return SimpleNamespace(**found) if isinstance(found, dict) else found


class ServiceClient:
    """Makes training and sampling clients on a service of this process.

    Attributes:
        service: the service; several clients may share it.
        model_name: name of the base.
    """

    def __init__(
        self, model: "Policy | ServiceClient", *, model_name: str = "policy", folder: str | Path = STATES
    ) -> None:
        """Begin a session.

        Args:
            model: the base, without adapters; or another client, whose service this one shares.
            model_name: name of a base.
            folder: folder of saved states.
        """
        self.service: Service
        self._loop: asyncio.AbstractEventLoop
        if isinstance(model, ServiceClient):
            self.service, self._loop = model.service, model._loop
        else:
            self._loop = asyncio.new_event_loop()
            threading.Thread(target=self._loop.run_forever, name="jaxft tinker", daemon=True).start()
            self.service = Service(model, model_name, folder, seconds=float("inf"))
        self.model_name = self.service.name
        self._session = {"session_id": self.call(self.service.create_session, {}).result().session_id}
        self._models, self._samplers = itertools.count(), itertools.count()

    def call(
        self,
        verb: Callable[..., Coroutine[Any, Any, Any]],
        given: Mapping[str, Any],
        then: Callable[[Any], Any] = _with_attributes,
    ) -> APIFuture:
        """Run a verb in the loop of the service, and return `then` of its result; verbs begin in the order of calls."""

        async def run() -> Any:
            return then(await verb(**dict(fields_of(verb).model_validate(given))))

        running = asyncio.run_coroutine_threadsafe(run(), self._loop)
        return APIFuture(running, ends=verb == self.service.sample)

    def create_lora_training_client(
        self,
        base_model: str | None = None,
        rank: int = 32,
        seed: int | None = None,
        train_mlp: bool = True,
        train_attn: bool = True,
        train_unembed: bool = True,
        user_metadata: dict[str, str] | None = None,
    ) -> APIFuture:
        """Return a client that trains fresh adapters."""
        config = {"rank": rank, "seed": seed, "train_mlp": train_mlp, "train_attn": train_attn}
        given = {"base_model": base_model or self.model_name, "lora_config": config, "user_metadata": user_metadata}
        return self._training_client(self.service.create_model, given)

    def create_training_client_from_state(
        self, path: str, user_metadata: dict[str, str] | None = None, *, optimizer: bool = False
    ) -> APIFuture:
        """Return a client that trains saved adapters, with a fresh optimizer or with the saved one."""
        given = {"path": path, "optimizer": optimizer, "user_metadata": user_metadata}
        return self._training_client(self.service.load_weights, given)

    create_training_client_from_state_with_optimizer = partialmethod(create_training_client_from_state, optimizer=True)

    def _training_client(self, verb: Callable[..., Any], given: dict[str, Any]) -> APIFuture:
        made = {**given, **self._session, "model_seq_id": next(self._models)}
        return self.call(verb, made, lambda found: TrainingClient(self, found["model_id"]))

    def create_sampling_client(self, model_path: str | None = None, base_model: str | None = None) -> APIFuture:
        """Return a client that samples from saved adapters, or from the base."""
        given = {**self._session, "base_model": base_model, "model_path": model_path}
        return self.sampling_client(self.service.create_sampling_session, given)

    def sampling_client(self, verb: Callable[..., Any], given: dict[str, Any]) -> APIFuture:
        """Return a client of the sampling session that a verb begins."""
        made = {**given, "sampling_session_seq_id": next(self._samplers)}
        return self.call(verb, made, lambda found: SamplingClient(self, found["sampling_session_id"]))

    def close(self) -> APIFuture:
        """End the session, and free its models and samplers."""
        return self.call(self.service.finish_session, self._session)


class TrainingClient:
    """Trains the adapters of `model_id`."""

    def __init__(self, client: ServiceClient, model_id: str) -> None:
        self._client, self._service, self.model_id = client, client.service, model_id

    def _call(self, verb: Callable[..., Any], given: dict[str, Any]) -> APIFuture:
        return self._client.call(verb, {"model_id": self.model_id, **given})

    def forward_backward(
        self, data: Sequence[Any], loss_fn: str, loss_fn_config: Config = None, *, forward_only: bool = False
    ) -> APIFuture:
        """Add the gradients of a loss to those since the last step; `forward` computes the loss alone."""
        given = {"data": data, "loss_fn": loss_fn, "loss_fn_config": loss_fn_config, "forward_only": forward_only}
        return self._call(self._service.forward_backward, given)

    forward = partialmethod(forward_backward, forward_only=True)

    def optim_step(self, adam_params: Any) -> APIFuture:
        """Make a step of AdamW with the gradients since the last one."""
        return self._call(self._service.optim_step, {"adam_params": adam_params})

    def save_state(self, name: str | None = None, overwrite: bool = False) -> APIFuture:
        """Save adapters and optimizer."""
        return self._call(self._service.save_weights, {"path": name, "overwrite": overwrite})

    def save_weights_for_sampler(self, name: str | None = None) -> APIFuture:
        """Save adapters to sample from."""
        return self._call(self._service.save_weights_for_sampler, {"path": name})

    def load_state(self, path: str, *, optimizer: bool = False) -> APIFuture:
        """Load saved adapters, with a fresh optimizer or with the saved one."""
        return self._call(self._service.load_weights, {"path": path, "optimizer": optimizer})

    load_state_with_optimizer = partialmethod(load_state, optimizer=True)

    def save_weights_and_get_sampling_client(self) -> APIFuture:
        """Return a client that samples from the present weights, whatever is trained later."""
        return self._client.sampling_client(self._service.save_weights_for_sampler, {"model_id": self.model_id})


class SamplingClient:
    """Samples from one snapshot."""

    def __init__(self, client: ServiceClient, sampling_session_id: str) -> None:
        self._client, self._id, self._numbers = client, sampling_session_id, itertools.count()

    def sample(
        self, prompt: Any, num_samples: int, sampling_params: Any, include_prompt_logprobs: bool = False
    ) -> APIFuture:
        """Sample answers to a prompt."""
        given = {"sampling_session_id": self._id, "seq_id": next(self._numbers), "prompt": prompt}
        given |= {"num_samples": num_samples, "sampling_params": sampling_params}
        return self._client.call(self._client.service.sample, {**given, "prompt_logprobs": include_prompt_logprobs})

    def compute_logprobs(self, prompt: Any) -> APIFuture:
        """Return the log-probability of each token of a prompt, None of the first."""
        given = {"sampling_session_id": self._id, "prompt": prompt, "sampling_params": {"max_tokens": 1}}
        verb = self._client.service.sample
        return self._client.call(verb, {**given, "prompt_logprobs": True}, lambda found: found.prompt_logprobs)
