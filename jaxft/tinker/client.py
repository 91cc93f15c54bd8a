"""Tinker's clients without a socket: the same methods, on a service in this process.

Arguments may be the types below or those of the package `tinker`: only their attributes are read. Every call returns an
`APIFuture`, which has `result()` and can be awaited; calls of one training client are run in their order.
"""

import asyncio
import concurrent.futures
import itertools
import threading
from collections.abc import Callable, Coroutine, Generator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np

from jaxft import Policy
from jaxft.tinker import losses
from jaxft.tinker.service import STATES, LoraConfig, SamplingParams, Service
from jaxft.tinker.training import AdamParams

Config = dict[str, Any] | None


class APIFuture:
    """The result of a call: `result()` waits for it, as does `await`."""

    def __init__(self, future: "concurrent.futures.Future[Any]") -> None:
        self.result, self._future = future.result, future

    def __await__(self) -> Generator[Any, None, Any]:
        return asyncio.wrap_future(self._future).__await__()


class TensorData(NamedTuple):
    """An array of a datum or of an output."""

    data: Sequence[float] | np.ndarray
    dtype: str = "float32"
    shape: Sequence[int] | None = None

    def to_numpy(self) -> np.ndarray:
        """Return the array."""
        return np.asarray(self.data, self.dtype).reshape(self.shape or -1)

    def tolist(self) -> list[Any]:
        """Return it as a list."""
        return self.to_numpy().tolist()


class ModelInput(NamedTuple):
    """Token ids that a model reads."""

    tokens: Sequence[int]

    @classmethod
    def from_ints(cls, tokens: Sequence[int]) -> "ModelInput":
        """Return the input of these ids."""
        return cls([*map(int, tokens)])

    def to_ints(self) -> list[int]:
        """Return the ids."""
        return [*self.tokens]


class Datum(NamedTuple):
    """A model input and the arrays of its loss, each a `TensorData`, an array or a list."""

    model_input: ModelInput
    loss_fn_inputs: Mapping[str, Any]


class Output:
    """Result of a forward pass: `metrics` and, for each datum, the array `logprobs`."""

    def __init__(self, found: Any) -> None:
        self.metrics, self.loss_fn_outputs = found.metrics, [{"logprobs": TensorData(each)} for each in found.logprobs]


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
        self._session = self.call(self.service.create_session()).result().session_id
        self._models, self.samplers = itertools.count(), itertools.count()

    def call(self, verb: Coroutine[Any, Any, Any], then: Callable[[Any], Any] | None = None) -> APIFuture:
        """Run a verb in the loop of the service; verbs begin in the order of their calls."""

        async def run() -> Any:
            found = await verb
            if then is not None:
                return then(found)
            return SimpleNamespace(**found) if isinstance(found, dict) else found

        return APIFuture(asyncio.run_coroutine_threadsafe(run(), self._loop))

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
        config = LoraConfig(rank=rank, seed=seed, train_mlp=train_mlp, train_attn=train_attn)
        given = base_model or self.model_name, config, None, user_metadata
        verb = self.service.create_model(self._session, next(self._models), *given)
        return self.call(verb, lambda found: TrainingClient(self, found["model_id"]))

    def create_training_client_from_state(
        self, path: str, user_metadata: dict[str, str] | None = None, *, optimizer: bool = False
    ) -> APIFuture:
        """Return a client that trains saved adapters, with a fresh optimizer."""
        given = {"session_id": self._session, "model_seq_id": next(self._models), "user_metadata": user_metadata}
        verb = self.service.load_weights(path, optimizer, **given)
        return self.call(verb, lambda found: TrainingClient(self, found["model_id"]))

    def create_training_client_from_state_with_optimizer(
        self, path: str, user_metadata: dict[str, str] | None = None
    ) -> APIFuture:
        """Return a client that continues from a saved state."""
        return self.create_training_client_from_state(path, user_metadata, optimizer=True)

    def create_sampling_client(self, model_path: str | None = None, base_model: str | None = None) -> APIFuture:
        """Return a client that samples from saved adapters, or from the base."""
        verb = self.service.create_sampling_session(self._session, next(self.samplers), base_model, model_path)
        return self.call(verb, lambda found: SamplingClient(self, found["sampling_session_id"]))

    def close(self) -> APIFuture:
        """End the session, and free its models and samplers."""
        return self.call(self.service.finish_session(self._session))


class TrainingClient:
    """Trains the adapters of `model_id`."""

    def __init__(self, client: ServiceClient, model_id: str) -> None:
        self._client, self._service, self.model_id = client, client.service, model_id

    def forward_backward(self, data: Sequence[Any], loss_fn: str, loss_fn_config: Config = None) -> APIFuture:
        """Add the gradients of a loss to those since the last step."""
        return self._pass(data, loss_fn, loss_fn_config, forward_only=False)

    def forward(self, data: Sequence[Any], loss_fn: str, loss_fn_config: Config = None) -> APIFuture:
        """Compute a loss without its gradients."""
        return self._pass(data, loss_fn, loss_fn_config, forward_only=True)

    def _pass(self, data: Sequence[Any], loss_fn: str, config: Config, *, forward_only: bool) -> APIFuture:
        verb = self._service.forward_backward(self.model_id, [*map(_datum, data)], loss_fn, config, forward_only)
        return self._client.call(verb, Output)

    def optim_step(self, adam_params: Any) -> APIFuture:
        """Make a step of AdamW with the gradients since the last one."""
        given = AdamParams(**{name: vars(adam_params)[name] for name in AdamParams.model_fields})
        return self._client.call(self._service.optim_step(self.model_id, given))

    def save_state(self, name: str | None = None, overwrite: bool = False) -> APIFuture:
        """Save adapters and optimizer."""
        return self._client.call(self._service.save_weights(self.model_id, name, overwrite))

    def save_weights_for_sampler(self, name: str | None = None) -> APIFuture:
        """Save adapters to sample from."""
        return self._client.call(self._service.save_weights_for_sampler(self.model_id, name))

    def load_state(self, path: str) -> APIFuture:
        """Load saved adapters, with a fresh optimizer."""
        return self._client.call(self._service.load_weights(path, False, self.model_id))

    def load_state_with_optimizer(self, path: str) -> APIFuture:
        """Load saved adapters and their optimizer."""
        return self._client.call(self._service.load_weights(path, True, self.model_id))

    def save_weights_and_get_sampling_client(self) -> APIFuture:
        """Return a client that samples from the present weights, whatever is trained later."""
        verb = self._service.save_weights_for_sampler(self.model_id, None, next(self._client.samplers))
        return self._client.call(verb, lambda found: SamplingClient(self._client, found["sampling_session_id"]))


class SamplingClient:
    """Samples from one snapshot."""

    def __init__(self, client: ServiceClient, sampling_session_id: str) -> None:
        self._client, self._id, self._numbers = client, sampling_session_id, itertools.count()

    def sample(
        self,
        prompt: Any,
        num_samples: int,
        sampling_params: Any,
        include_prompt_logprobs: bool = False,
        topk_sample_logprobs: int = 0,
    ) -> APIFuture:
        """Sample answers to a prompt."""
        given = SamplingParams(**{name: vars(sampling_params)[name] for name in SamplingParams.model_fields})
        options = next(self._numbers), num_samples, include_prompt_logprobs, topk_sample_logprobs
        return self._client.call(
            self._client.service.sample(self._id, tuple(prompt.to_ints()), given, *options), lambda found: found
        )

    def compute_logprobs(self, prompt: Any) -> APIFuture:
        """Return the log-probability of each token of a prompt, None of the first."""
        verb = self._client.service.sample(self._id, tuple(prompt.to_ints()), SamplingParams(max_tokens=1), 0, 1, True)
        return self._client.call(verb, lambda found: found.prompt_logprobs)


def _datum(datum: Any) -> losses.Datum:
    inputs = {
        name: np.asarray(value if isinstance(value, list | np.ndarray) else value.to_numpy())
        for name, value in datum.loss_fn_inputs.items()
    }
    return losses.Datum(np.asarray(datum.model_input.to_ints(), np.int32), inputs)
