"""Base class and field types of all config classes.

A path is relative to the folder of the YAML file that holds it or, from the command line, to the working directory. A
reference (`LLMRef`, ...) is the name of an entry of the same configuration.
"""

import functools
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from jsonpath_ng import parse
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    field_validator,
    model_validator,
)
from pydantic_core import InitErrorDetails, PydanticCustomError

from jaxft.errors import did_you_mean
from jaxft.files import home_path


class ConfigModel(BaseModel):
    """Base of all config classes: immutable, without unknown fields, and with errors that never show values."""

    model_config = ConfigDict(extra="forbid", frozen=True, hide_input_in_errors=True, use_attribute_docstrings=True)

    # Here and below `info` is pydantic's ValidationInfo, a protocol that no run-time check can test for.
    @field_validator("*", mode="before")
    @classmethod
    def _true_is_not_one(cls, value: Any, info: Any) -> Any:
        numbers = (int, float, int | None, float | None)
        is_number = info.field_name and cls.model_fields[info.field_name].annotation in numbers
        return no_bool(value) if is_number else value

    @model_validator(mode="wrap")
    @classmethod
    def _names_near_fields(cls, values: Any, handler: Any) -> Any:
        """Let the error of an unknown field name the fields that are there."""
        try:
            return handler(values)
        except ValidationError as error:
            faults = error.errors(include_url=False)
        lines = []
        for fault in faults:
            kind, message, place = fault["type"], fault["msg"], fault["loc"]
            if kind == "extra_forbidden" and len(place) == 1:
                near = did_you_mean(str(place[0]), cls.model_fields, what="fields here")
                kind, message = "fault", f"no such field{near}"
            shown = PydanticCustomError(kind, "{message}", {"message": message})
            lines.append(InitErrorDetails(type=shown, loc=place, input=fault["input"]))
        raise ValidationError.from_exception_data(cls.__name__, lines, hide_input=True)


def raise_faults(faults: Iterable[tuple[str, str]]) -> None:
    """Raise the validation error of a whole model that has faults in it, each with its dotted path and a message."""
    lines = [
        InitErrorDetails(type=config_error(message), loc=tuple(path.split(".")), input=None) for path, message in faults
    ]
    if lines:
        raise ValidationError.from_exception_data("configuration", lines)


class ConfigText(str):
    """A text of a configuration that knows the folder that paths in it are relative to."""

    folder: Path

    def __new__(cls, text: str, folder: Path) -> "ConfigText":
        self = super().__new__(cls, text)
        self.folder = folder
        return self

    def __getnewargs__(self) -> tuple[str, Path]:  # type: ignore[override]
        return str(self), self.folder


def config_error(message: str) -> PydanticCustomError:
    """Make a validator's error whose message is shown verbatim, braces included, after the path of the field."""
    return PydanticCustomError("fault", "{message}", {"message": message})


def no_bool(value: Any) -> Any:
    """Return a value for a number, for which pydantic would also take a bool; raise a field's error if it is one."""
    if isinstance(value, bool):
        raise config_error("must be a number (holds a bool)")
    return value


def kind_in_words(value: Any) -> str:
    """Return the kind of a configuration value in words, without the value."""
    if value is None or isinstance(value, bool):
        return "nothing" if value is None else "a bool"
    return {dict: "a mapping", list: "a list", int: "a number", float: "a number"}.get(type(value), "a text")


def _input_path(value: Any) -> Any:
    return value.folder / home_path(value) if isinstance(value, ConfigText) else _output_path(value)


def _output_path(value: Any) -> Any:
    return home_path(value) if isinstance(value, str | Path) else value


def _possible_path(path: Path) -> Path:
    try:
        name = os.fsencode(path)
    except UnicodeEncodeError:
        raise config_error("is not a path: it contains half of a character (a lone surrogate)") from None
    if b"\0" in name:
        raise config_error("is not a path: it contains a NUL character")
    return path


def _path_or_name(value: Any) -> Any:
    if isinstance(value, ConfigText) and (value.folder / home_path(value)).exists():
        return str(value.folder / home_path(value))
    return value


InputPath = Annotated[Path, BeforeValidator(_input_path), AfterValidator(_possible_path)]
"""A file or folder to read."""

OutputPath = Annotated[Path, BeforeValidator(_output_path), AfterValidator(_possible_path)]
"""A folder to write to, relative to the working directory."""

PathOrName = Annotated[str, BeforeValidator(_path_or_name)]
"""A path if it exists; otherwise a name, such as the id of a model on a hub, which stays unchanged."""

Seed = Annotated[int, Field(ge=0, lt=2**32)]
"""A seed of `jax.random.key`: a uint32."""


def entries(values: Any, section: str) -> dict[str, Any]:
    """Return the mapping at a dotted path of a mapping; an empty one if there is none.

    >>> entries({"eval": {"evaluators": {"match": 1}}}, "eval.evaluators"), entries({"eval": None}, "eval.general")
    ({'match': 1}, {})
    """
    for name in section.split("."):
        values = values.get(name) if isinstance(values, dict) else None
    return values if isinstance(values, dict) else {}


def walk(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield everything in a configuration, or in what is dumped of one, with its dotted path.

    >>> dict(walk({"a": {"b": [1]}}))
    {'': {'a': {'b': [1]}}, 'a': {'b': [1]}, 'a.b': [1], 'a.b.0': 1}
    """
    yield path, value
    is_list = isinstance(value, list | tuple | set | frozenset)
    inner = dict(value) if isinstance(value, BaseModel | Mapping) else dict(enumerate(value)) if is_list else {}
    for name, each in inner.items():
        yield from walk(each, f"{path}.{name}" if path else str(name))


def check_reference(section: str, name: str, info: Any) -> str:
    """Return `name` if a section of the configuration, the context of its validation, has it; else raise an error."""
    names = entries(info.context, section)
    if info.context is not None and name not in names:
        raise config_error(f"'{name}' is not in '{section}'{did_you_mean(name, names, what='there')}")
    return name


def _reference(section: str) -> AfterValidator:
    def check(name: str, info: Any) -> str:
        return check_reference(section, name, info)

    return AfterValidator(check)


LLMRef = Annotated[str, _reference("llms")]
EvaluatorRef = Annotated[str, _reference("eval.evaluators")]
TrajectoryBuilderRef = Annotated[str, _reference("trajectory_builders")]
TrainerAdapterRef = Annotated[str, _reference("trainer_adapters")]
TrainerRef = Annotated[str, _reference("trainers")]


class RewardFunctionConfig(ConfigModel):
    """The evaluator whose score is the reward, and the treatment of unusable scores."""

    name: EvaluatorRef
    """The evaluator whose score is the reward: an entry of eval.evaluators."""
    unusable: Literal["unscorable", "zero", "error"] = "unscorable"
    """Treatment of an episode whose reward is None, NaN or infinite: 'unscorable' leaves it out of training and of
    every baseline, 'zero' gives it the reward 0, 'error' ends the run."""


@functools.cache
def parse_json_path(text: str) -> Any:
    """Parse a JSON path; cached, because jsonpath-ng parses slowly."""
    return parse(text)


def at_json_path(value: Any, text: str) -> Any:
    """Return the value at a JSON path; a list if the path matches several.

    Raises:
        ValueError: the path matches nothing.

    >>> at_json_path({"answer": {"text": "four"}}, "$.answer.text")
    'four'
    >>> at_json_path({"steps": [{"n": 1}, {"n": 2}]}, "$.steps[*].n")
    [1, 2]
    """
    found = [match.value for match in parse_json_path(text).find(value)]
    if not found:
        raise ValueError(f"'{text}' matches nothing in the output, which is {repr(value)[:100]}")
    return found[0] if len(found) == 1 else found
