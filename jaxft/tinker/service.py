"""The verbs of Tinker: clients train adapters of their own on one shared base, and sample from snapshots of them.

A session is a client; its models, samplers and requests end with it. All state belongs to one event loop, and arrays to
the device thread of the policy. The verbs of one model are run in the order of their calls.
"""

import asyncio
import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import jax
import numpy as np
from pydantic import Field

from jaxft import LoraSpec, Model, Policy
from jaxft.core import ADAPTER, BASE
from jaxft.files import home_path
from jaxft.models import init_adapter, with_adapters
from jaxft.rollout import Request, StopFinder
from jaxft.tinker.data import (
    AdamParams,
    Datum,
    LoraConfig,
    ModelInput,
    Output,
    SampledSequence,
    Samples,
    SamplingParams,
    TensorData,
)
from jaxft.tinker.losses import check_datum, check_tokens, find_loss, make_parts
from jaxft.tinker.states import SavedStates
from jaxft.tinker.training import TrainedModel, fresh_state, make_programs, restored_adapter, restored_state

LORA_ALPHA = 32.0
"""Tinker's `alpha` of adapters of any rank."""

TARGETS = {"train_attn": "self_attn/*", "train_mlp": "mlp/*"}
"""Projections that have adapters, by the settings that ask for them."""

NO_UNEMBED = "the unembedding has no adapter here: train_unembed changes nothing"
"""Warning at the beginning of a session."""

STATES = "tinker"
"""Folder of saved states."""

MOST_SAMPLERS = 32
"""Most samplers of a session, as no client says when it needs one no more: the one that was used least lately goes."""

MOST_SAMPLES = 1024
"""Most samples of a request."""

Result = dict[str, Any]
Number = Annotated[int, Field(ge=0)]
Metadata = dict[str, Any] | None


class Gone(ValueError):
    """A session has ended, or the result of a request is here no more."""


@dataclass
class Sampler:
    """A snapshot to sample from: adapters of `model` if it has any, and the path that they were loaded from."""

    number: int
    model: Model
    params: Any = None
    adapter: Any = None
    path: str | None = None


@dataclass
class Session:
    """A client: when it was heard of last, and its models, samplers and requests by their ids."""

    id: str
    heard: float
    models: dict[str, TrainedModel] = field(default_factory=dict)
    samplers: dict[str, Sampler] = field(default_factory=dict)
    requests: dict[str, "asyncio.Task[Any]"] = field(default_factory=dict)


class Service:
    """Trains and samples for any number of clients; the verbs take the fields of Tinker's requests.

    Attributes:
        name: name of the base, which clients ask for.
        sessions: the clients by their ids.
        states: the saved states.
    """

    def __init__(
        self, policy: Policy, name: str, folder: str | Path = STATES, *, tokens: int = 8192, seconds: float = 300.0
    ) -> None:
        """Serve a base.

        Args:
            policy: the base, a decoder without adapters, on one device; it is not trained.
            name: name of the base.
            folder: folder of saved states.
            tokens: most tokens of a table whose gradients are computed at once.
            seconds: time without a heartbeat after which a session ends.

        Raises:
            ValueError: the policy has adapters, or is on a mesh.
        """
        if policy.model.lora is not None or policy.model.sharding is not None:
            raise ValueError("the base of a Tinker service is a model without adapters, on one device")
        self.name, self.states, self.sessions = name, SavedStates(home_path(folder)), dict[str, Session]()
        self._policy, self._microbatch_tokens, self._session_seconds = policy, tokens, seconds
        compute_dtype = policy.weights.transfer.dtype(policy.weights.trained)
        self._compute_dtype = None if compute_dtype == policy.dtype else compute_dtype

    # Sessions

    async def create_session(self) -> Result:
        """Begin a session, which lives as long as heartbeats come."""
        await self.finish_silent_sessions()
        session = Session(uuid.uuid4().hex, time.monotonic())
        self.sessions[session.id] = session
        return {"session_id": session.id, "warning_message": NO_UNEMBED}

    async def session_heartbeat(self, session_id: str) -> Result:
        """Keep a session alive, and end those of which nothing was heard for too long."""
        self.session(session_id).heard = time.monotonic()
        await self.finish_silent_sessions()
        return {}

    async def finish_session(self, session_id: str) -> None:
        """End a session: cancel its requests, and forget its models and samplers."""
        if (session := self.sessions.pop(session_id, None)) is not None:
            for task in session.requests.values():
                task.cancel()
            session.requests.clear()

    async def finish_silent_sessions(self) -> None:
        """End the sessions of which nothing was heard for too long."""
        silent = time.monotonic() - self._session_seconds
        for session in [each for each in self.sessions.values() if each.heard < silent]:
            await self.finish_session(session.id)

    async def get_server_capabilities(self) -> Result:
        """Return the models that are served."""
        context = self._policy.engine.max_context_tokens
        model = {"model_name": self.name, "max_context_length": context, "trainable": True, "sampleable": True}
        return {"supported_models": [model]}

    # Models

    async def create_model(
        self,
        session_id: str,
        model_seq_id: int,
        base_model: str,
        lora_config: LoraConfig,
        optimizer_config: dict[Literal["type"], Literal["adamw"]] | None = None,
        user_metadata: Metadata = None,
    ) -> Result:
        """Make fresh adapters, which change nothing yet, and the state of their optimizer."""
        session = self.session(session_id)
        self._check_base(base_model)
        targets = tuple(target for name, target in TARGETS.items() if lora_config.model_dump()[name])
        if not targets:
            raise ValueError("lora_config: train_attn and train_mlp are both false, and the unembedding has no adapter")
        model = self._with_adapters(lora_config.rank, targets)
        seed = model_seq_id if lora_config.seed is None else lora_config.seed
        key = jax.random.key(seed % 2**63, impl="threefry2x32")
        state = await self._policy.read(lambda base: fresh_state(model, base, init_adapter(model, key)))
        made = TrainedModel(f"{session_id}:train:{model_seq_id}", model, state, user_metadata or {})
        session.models[made.id] = made
        return {"model_id": made.id}

    async def get_info(self, model_id: str) -> Result:
        """Return base and rank of a model."""
        model = self.model(model_id)
        data = {"arch": model.model.config.family, "model_name": self.name, "tokenizer_id": self.name}  # type: ignore[attr-defined]
        about = {"is_lora": True, "lora_rank": model.lora.rank, "model_name": self.name}
        return {"model_id": model_id, "model_data": data, **about}

    async def forward_backward(
        self,
        model_id: str,
        data: list[Datum],
        loss_fn: str,
        loss_fn_config: dict[str, Annotated[float, Field(ge=0)]] | None = None,
        forward_only: bool = False,
    ) -> Output:
        """Add the gradients of a loss, which is a sum over tokens, to those since the last step."""
        loss, keywords = find_loss(loss_fn, loss_fn_config)
        vocabulary, context = self._policy.engine.vocabulary, self._policy.engine.max_context_tokens
        for number, datum in enumerate(data):
            check_datum(f"data[{number}]", datum, loss, vocabulary, context + 1)
        totals, logprobs = np.zeros(2), dict[int, np.ndarray]()
        model = self.model(model_id)
        async with model.lock:
            for numbers, batch in make_parts(data, loss, self._microbatch_tokens):
                add = partial(model.add, keywords, batch, forward_only=forward_only)
                sums, table = await self._policy.read(add)
                totals += sums
                for row, number in enumerate(numbers):
                    logprobs[number] = table[row, 1 : len(data[number].model_input) + 1]
        metrics = {"loss:sum": float(totals[0]), "entropy:sum": float(totals[1])}
        return Output(metrics, [{"logprobs": TensorData(logprobs[number])} for number in range(len(data))])

    async def optim_step(self, model_id: str, adam_params: AdamParams) -> Result:
        """Make one step of AdamW with the gradients since the last one; where all are zero, change nothing."""
        model = self.model(model_id)
        async with model.lock:
            return {"metrics": await self._policy.read(lambda _: model.step(adam_params))}

    # Saved states

    async def save_weights(self, model_id: str, path: str | None = None, overwrite: bool = False) -> Result:
        """Save adapters and optimizer; gradients that no step has taken yet are not part of it."""
        return await self._save(model_id, "weights", path, overwrite)

    async def load_weights(
        self,
        path: str,
        optimizer: bool,
        model_id: str | None = None,
        session_id: str = "",
        model_seq_id: int = 0,
        user_metadata: Metadata = None,
    ) -> Result:
        """Load saved adapters, with the state of their optimizer or without, into a model, or into a new one."""
        session = self.session(session_id if model_id is None else model_id.partition(":")[0])
        known = None if model_id is None else self.model(model_id)
        async with asyncio.Lock() if known is None else known.lock:
            model, arrays, about = await self._loaded(path)
            if known is not None and model != known.model:
                raise ValueError(f"{path} holds adapters of {model.lora}, and the model has {known.lora}")
            state = await self._policy.read(lambda base: restored_state(model, base, arrays, optimizer=optimizer))
            if known is None:
                made_id, metadata = f"{session_id}:train:{model_seq_id}", user_metadata or about["user_metadata"]
                known = session.models[made_id] = TrainedModel(made_id, model, state, metadata)
            else:
                known.use(state)
        return {"path": path, "model_id": known.id}

    async def save_weights_for_sampler(
        self, model_id: str, path: str | None = None, sampling_session_seq_id: int | None = None
    ) -> Result:
        """Save adapters under a name, or make a sampler of them at once."""
        if path is not None or sampling_session_seq_id is None:
            return await self._save(model_id, "sampler_weights", path, True)
        model, session_id = self.model(model_id), model_id.partition(":")[0]
        async with model.lock:
            params = await self._policy.read(lambda _: model.adapter())
        return await self._add_sampler(session_id, Sampler(sampling_session_seq_id, model.model, params))

    async def list_checkpoints(
        self, model_id: str | None = None, limit: Number | None = None, offset: Number = 0
    ) -> Result:
        """Return what is known of saved states, of one model or of all: at most `limit`, after the first `offset`."""
        listed = await asyncio.to_thread(self.states.listed, model_id)
        cursor = None if limit is None else {"offset": offset, "limit": limit, "total_count": len(listed)}
        return {"checkpoints": listed[offset:][:limit], "cursor": cursor}

    async def get_training_run(self, model_id: str) -> Result:
        """Return base, rank and metadata of a model with saved states."""
        listed = await asyncio.to_thread(self.states.listed, model_id)
        if not listed:
            raise ValueError(f"there is no saved state of a model {model_id!r:.100}")
        about = {"training_run_id": model_id, "base_model": self.name, "model_owner": "jaxft", "is_lora": True}
        about |= {"lora_rank": listed[-1]["rank"], "user_metadata": listed[-1]["user_metadata"]}
        trained = [each for each in listed if each["checkpoint_type"] == "training"]
        return {**about, "last_request_time": listed[-1]["time"], "last_checkpoint": trained[-1] if trained else None}

    async def weights_info(self, tinker_path: str) -> Result:
        """Return base and rank of a saved state."""
        about, _ = await asyncio.to_thread(self.states.load, tinker_path)
        trained = {name: target in about["targets"] for name, target in TARGETS.items()}
        return {"base_model": self.name, "is_lora": True, "lora_rank": about["rank"], "train_unembed": False, **trained}

    async def delete_checkpoint(self, model_id: str, kind: str, name: str) -> None:
        """Remove a saved state."""
        await asyncio.to_thread(self.states.delete, f"tinker://{model_id}/{kind}/{name}")

    # Samplers

    async def create_sampling_session(
        self,
        session_id: str,
        sampling_session_seq_id: int,
        base_model: str | None = None,
        model_path: str | None = None,
    ) -> Result:
        """Make a sampler of saved adapters, or of the base."""
        self._check_base(base_model or self.name)
        if model_path is None:
            return await self._add_sampler(session_id, Sampler(sampling_session_seq_id, self._policy.model))
        model, arrays, _ = await self._loaded(model_path)
        params = await self._policy.read(lambda _: restored_adapter(model, arrays))
        return await self._add_sampler(session_id, Sampler(sampling_session_seq_id, model, params, path=model_path))

    async def get_sampler(self, sampler_id: str) -> Result:
        """Return base and path of a sampler."""
        return {"sampler_id": sampler_id, "base_model": self.name, "model_path": self._sampler(sampler_id).path}

    async def sample(
        self,
        sampling_session_id: str,
        prompt: ModelInput,
        sampling_params: SamplingParams,
        seq_id: int = 0,
        num_samples: Annotated[int, Field(ge=1, le=MOST_SAMPLES)] = 1,
        prompt_logprobs: bool = False,
    ) -> Samples:
        """Sample answers to a prompt of token ids.

        Their noise depends on the number of the sampler in its session and on `seq_id`, or on the seed alone.
        """
        sampler, given, ids = self._sampler(sampling_session_id), sampling_params, tuple(prompt.to_ints())
        engine, template = self._policy.engine, self._policy.template
        room = engine.max_context_tokens - len(ids)
        stop: Any = [given.stop] if isinstance(given.stop, str) else given.stop
        texts = [each for each in stop or () if isinstance(each, str)]
        if "" in texts:
            raise ValueError("sampling_params.stop holds an empty text")
        # As many numbers as a call of an agent has, so that nothing is compiled.
        key = (0, sampler.number, *divmod(seq_id, 2**32)) if given.seed is None else (1, 0, *divmod(given.seed, 2**32))
        requests = [
            Request(
                prompt_ids=ids,
                key_ids=(*(each % 2**32 for each in key), 0, number),
                max_tokens=max(1, min(given.max_tokens or room, room)),
                temperature=given.temperature,
                top_k=max(0, given.top_k),
                top_p=given.top_p,
                stop_ids=template.stop_ids if stop is None or texts else tuple(stop),
                find_stop=StopFinder(template.text, texts, template.tokens.is_byte) if texts else None,
                adapter=sampler.adapter,
            )
            for number in range(num_samples if room else 0)
        ]
        tasks = [asyncio.create_task(engine.submit(each)) for each in requests]
        try:
            answers = await asyncio.gather(*tasks)
        finally:  # the others are of no use after one has failed
            for task in tasks:
                task.cancel()
        sequences = [
            SampledSequence(each.token_ids, each.sampler_logprobs, each.finish_reason) for each in answers
        ] or [SampledSequence([], [], "length")] * num_samples
        return Samples(sequences, await self._prompt_logprobs(sampler, ids) if prompt_logprobs else None)

    async def _prompt_logprobs(self, sampler: Sampler, ids: tuple[int, ...]) -> list[float | None]:
        tokens, (loss, keywords) = np.asarray(ids, np.int32), find_loss("cross_entropy")
        check_tokens("prompt", tokens, self._policy.engine.vocabulary)
        if len(ids) < 2:
            return [None] * len(ids)
        inputs: dict[str, np.ndarray] = {"target_tokens": tokens[1:], "weights": np.zeros(len(ids) - 1)}
        ((_, batch),) = make_parts([Datum(model_input=tokens[:-1], loss_fn_inputs=inputs)], loss, 1)
        forward, _ = make_programs(sampler.model, keywords)

        def score(base: Any) -> list[float]:
            params = base if sampler.params is None else {BASE: base, ADAPTER: sampler.params}
            return np.asarray(forward(params, batch)[1]["logprobs"])[0, 1 : len(ids)].tolist()

        return [None, *await self._policy.read(score)]

    # Helpers

    async def _add_sampler(self, session_id: str, sampler: Sampler) -> Result:
        if sampler.params is not None:
            assert isinstance(sampler.model.lora, LoraSpec)
            sampler.adapter = await self._policy.add_adapter(sampler.model.lora, sampler.params)
        samplers, sampler_id = self.session(session_id).samplers, f"{session_id}:sample:{sampler.number}"
        samplers.setdefault(sampler_id, sampler)
        for unused in [*samplers][:-MOST_SAMPLERS]:
            del samplers[unused]
        return {"sampling_session_id": sampler_id}

    async def _loaded(self, path: str) -> tuple[Model, Mapping[str, np.ndarray], dict[str, Any]]:
        """Return the model of a saved state, its arrays and what is known of it."""
        about, arrays = await asyncio.to_thread(self.states.load, path)
        self._check_base(about["base_model"])
        return self._with_adapters(about["rank"], tuple(about["targets"])), arrays, about

    async def _save(self, model_id: str, kind: str, name: str | None, overwrite: bool) -> Result:
        model, path = self.model(model_id), f"tinker://{model_id}/{kind}/{name or uuid.uuid4().hex[:12]}"
        async with model.lock:
            arrays = await self._policy.read(lambda _: model.arrays(optimizer=kind == "weights"))
            about = {"base_model": self.name, "rank": model.lora.rank, "targets": model.lora.targets}
            about["user_metadata"] = model.user_metadata
            return {"path": await asyncio.to_thread(self.states.save, path, about, arrays, overwrite=overwrite)}

    def _with_adapters(self, rank: int, targets: tuple[str, ...]) -> Model:
        spec = LoraSpec(rank, LORA_ALPHA, targets)
        self._policy.check_adapter(spec)
        return with_adapters(self._policy.model, spec, compute_dtype=self._compute_dtype)

    def _check_base(self, name: str) -> None:
        if self.name not in (name, name.partition(":")[0]):
            raise ValueError(f"base_model is {name!r:.100}; served is {self.name}")

    def session(self, session_id: str) -> Session:
        """Return a session; raise `Gone` if there is none."""
        if session_id not in self.sessions:
            raise Gone(f"there is no session {session_id!r:.100}, or it has ended: make a new client")
        return self.sessions[session_id]

    def model(self, model_id: str) -> TrainedModel:
        """Return a model in training; raise `Gone` if there is none."""
        models = self.session(model_id.partition(":")[0]).models
        if model_id not in models:
            raise Gone(f"there is no model {model_id!r:.100}")
        return models[model_id]

    def _sampler(self, sampler_id: str) -> Sampler:
        """Return a sampler, which is then the one that was used last."""
        samplers = self.session(sampler_id.partition(":")[0]).samplers
        if sampler_id not in samplers:
            told = f"or {MOST_SAMPLERS} others were used since: make it again"
            raise Gone(f"there is no sampling session {sampler_id!r:.100}, {told}")
        samplers[sampler_id] = samplers.pop(sampler_id)
        return samplers[sampler_id]
