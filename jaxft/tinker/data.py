"""Tinker's types: what clients give to the verbs, and what these return, over HTTP and in process.

Arguments may also be objects of the package `tinker`, of which the attributes are read.
"""

import inspect
from collections.abc import Callable, Sequence
from functools import cache
from typing import Annotated, Any, Literal, NamedTuple

import numpy as np
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, create_model, model_validator

MAX_RANK = 256
"""Largest rank of adapters."""


class Given(BaseModel):
    """Base of the arguments of the verbs, which refuse unknown fields."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, allow_inf_nan=False, from_attributes=True, arbitrary_types_allowed=True
    )


class LoraConfig(Given):
    """Settings of fresh adapters."""

    rank: int = Field(default=32, ge=1, le=MAX_RANK)
    seed: int | None = None
    train_unembed: bool = True
    train_mlp: bool = True
    train_attn: bool = True


class AdamParams(Given):
    """Settings of one step of AdamW."""

    learning_rate: float = Field(default=1e-4, ge=0)
    beta1: float = Field(default=0.9, ge=0, lt=1)
    beta2: float = Field(default=0.95, ge=0, lt=1)
    eps: float = Field(default=1e-12, ge=0)
    weight_decay: float = Field(default=0.0, ge=0)
    grad_clip_norm: float = Field(default=0.0, ge=0)


class SamplingParams(Given):
    """Settings of sampling; `stop` is text or texts, token ids, an empty list for no stop, or None for the model's."""

    max_tokens: int | None = Field(default=None, ge=1)
    seed: int | None = None
    stop: str | list[str] | list[int] | None = None
    temperature: float = 1.0
    top_k: int = -1
    top_p: float = 1.0


class EncodedText(Given):
    """A part of a model's input; images and sound are not served."""

    type: Literal["encoded_text"] = "encoded_text"
    tokens: tuple[Annotated[int, Field(ge=0, lt=2**31)], ...]


class ModelInput(Given):
    """Token ids that a model reads."""

    chunks: tuple[EncodedText, ...]

    @classmethod
    def from_ints(cls, tokens: Sequence[int]) -> "ModelInput":
        """Return the input of these ids."""
        return cls(chunks=(EncodedText(tokens=(*map(int, tokens),)),))

    def to_ints(self) -> list[int]:
        """Return the ids."""
        return [token for chunk in self.chunks for token in chunk.tokens]


class TensorData(NamedTuple):
    """An array of a datum or of an output."""

    data: Any
    dtype: str = "float32"
    shape: Sequence[int] | None = None

    def to_numpy(self) -> np.ndarray:
        """Return the array."""
        return np.asarray(self.data, self.dtype).reshape(self.shape or -1)

    def tolist(self) -> list[Any]:
        """Return it as a list."""
        return self.to_numpy().tolist()


def _ids(value: Any) -> np.ndarray:
    return value if isinstance(value, np.ndarray) else np.array(value.to_ints(), np.int32)


def _numbers(value: Any) -> np.ndarray:
    return np.asarray(value if isinstance(value, list | np.ndarray) else value.to_numpy())


class Datum(Given):
    """A `ModelInput` or its ids, and the arrays of its loss, each a `TensorData`, an array or a list.

    They are kept as arrays, those of the loss with one number per token.
    """

    model_input: Annotated[np.ndarray, BeforeValidator(_ids)]
    loss_fn_inputs: dict[str, Annotated[np.ndarray, BeforeValidator(_numbers)]]


class Output(NamedTuple):
    """Sums over the tokens of a forward pass by name, and for each datum the array `logprobs` of its targets."""

    metrics: dict[str, float]
    loss_fn_outputs: list[dict[str, TensorData]]


class SampledSequence(NamedTuple):
    """A sampled answer; `stop_reason` is stop or length."""

    tokens: list[int]
    logprobs: list[float]
    stop_reason: str


class Samples(NamedTuple):
    """Answers to a prompt, and the log-probabilities of its tokens, None for the first, if they were asked for."""

    sequences: list[SampledSequence]
    prompt_logprobs: list[float | None] | None


IGNORED = (
    *("type", "sdk_version", "tags", "project_id", "display_name", "ttl_seconds", "kind", "access_scope"),
    *("allow_metadata_only", "events", "platform", "process_uuid", "session_id", "reason", "detail"),
    *("base_model", "user_metadata"),
)
"""Fields that change nothing where a verb does not take them: there are no projects, nobody reads telemetry, states are
kept until they are deleted, with base and metadata of their model, and a sampler that may follow later weights keeps
its own."""


class Fields(Given):
    """Fields of a request: those of a verb, `IGNORED`, and unknown ones that are null, 0 or empty.

    A newer client sends its defaults; what asks for more than is served is refused.
    """

    model_config = ConfigDict(protected_namespaces=())

    @model_validator(mode="before")
    @classmethod
    def _without_empty(cls, values: dict[str, Any]) -> Any:
        known = cls.model_fields
        return {name: value for name, value in values.items() if name in known or (value and name not in IGNORED)}


@cache
def fields_of(verb: Callable[..., Any]) -> type[Fields]:
    """Return the model of a verb's arguments."""
    given: dict[str, Any] = {
        each.name: (each.annotation, ... if each.default is each.empty else each.default)
        for each in inspect.signature(verb).parameters.values()
    }
    return create_model("Fields", __base__=Fields, **given)
