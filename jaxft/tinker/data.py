"""Tinker's types: what clients give to the verbs, and what these return, over HTTP and in process.

Arguments may also be objects of the package `tinker`, of which the attributes are read.
"""

import inspect
from collections.abc import Callable, Sequence
from functools import cache, partial
from operator import methodcaller
from typing import Annotated, Any, Literal, NamedTuple, TypeVar

import numpy as np
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, create_model, model_validator

MAX_RANK = 256
"""Largest rank of adapters."""

Item = TypeVar("Item")
Many = Annotated[tuple[Item, ...], Field(fail_fast=True)]
"""Items of a request; its first wrong one is refused."""

Stops = Annotated[list[Item], Field(fail_fast=True, max_length=1024)]


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
    stop: str | Stops[str] | Stops[int] | None = None
    temperature: float = 1.0
    top_k: int = -1
    top_p: float = 1.0


class EncodedText(Given):
    """A part of a model's input; images and sound are not served."""

    type: Literal["encoded_text"] = "encoded_text"
    tokens: Many[Annotated[int, Field(ge=0, lt=2**31)]]


class ModelInput(Given):
    """Token ids that a model reads."""

    chunks: Many[EncodedText]

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


def _array(from_json: Callable[..., Any], read: Callable[[Any], Any], kinds: str, value: Any) -> np.ndarray:
    """Return a value as an array of these kinds of numbers; `read` reads objects, which `from_json` makes of a dict."""
    try:
        given = from_json(**value) if isinstance(value, dict) else value
        try:
            found = np.asarray(read(given))
        except AttributeError:
            found = np.asarray(given)
    except (TypeError, OverflowError) as error:
        raise ValueError(str(error)) from None
    if found.dtype.kind not in kinds:
        raise ValueError(f"it holds {found.dtype}; wanted {'numbers' if 'f' in kinds else 'integers'}")
    return found


class Datum(Given):
    """A `ModelInput` or its ids, and the arrays of its loss, each a `TensorData`, an array or a list; or JSON of them.

    They are kept as arrays, those of the loss with one number per token.
    """

    model_input: Annotated[np.ndarray, BeforeValidator(partial(_array, ModelInput, methodcaller("to_ints"), "iu"))]
    loss_fn_inputs: dict[
        str, Annotated[np.ndarray, BeforeValidator(partial(_array, TensorData, methodcaller("to_numpy"), "biuf"))]
    ]


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
        unknown = [name for name, value in values.items() if value and name not in known and name not in IGNORED]
        return {name: values[name] for name in (*known.keys() & values.keys(), *unknown[:1])}


def fields_of(verb: Callable[..., Any]) -> type[Fields]:
    """Return the model of a verb's arguments; those of methods are kept, without their objects."""
    return _fields_of_method(verb.__func__) if inspect.ismethod(verb) else _make_fields(inspect.signature(verb))


@cache
def _fields_of_method(function: Callable[..., Any]) -> type[Fields]:
    signature = inspect.signature(function)
    return _make_fields(signature.replace(parameters=[*signature.parameters.values()][1:]))


def _make_fields(signature: inspect.Signature) -> type[Fields]:
    given: dict[str, Any] = {
        each.name: (each.annotation, ... if each.default is each.empty else each.default)
        for each in signature.parameters.values()
    }
    return create_model("Fields", __base__=Fields, **given)
