"""Base class and field types of all config classes.

A path is relative to the folder of the YAML file that holds it or, from the command line, to the working directory. A
reference (`LLMRef`, ...) is the name of an entry of the same configuration.
"""

import functools
import os
from pathlib import Path
from typing import Annotated, Any, Literal, NoReturn
from urllib.parse import urlsplit

from jsonpath_ng import parse
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    SecretStr,
    ValidationError,
    field_validator,
    model_validator,
)
from pydantic_core import InitErrorDetails, PydanticCustomError

from jaxft.errors import did_you_mean
from jaxft.files import home_path
from jaxft.harness.addresses import is_loopback
from jaxft.rollout.recorder import is_episode_token


class ConfigModel(BaseModel):
    """Base of all config classes: immutable, without unknown fields, and with errors that never show values."""

    model_config = ConfigDict(extra="forbid", frozen=True, hide_input_in_errors=True)

    # Here and below `info` is pydantic's ValidationInfo, a protocol that no run-time check can test for.
    @field_validator("*", mode="before")
    @classmethod
    def _true_is_not_one(cls, value: Any, info: Any) -> Any:
        numbers = (int, float, int | None, float | None)
        if isinstance(value, bool) and info.field_name and cls.model_fields[info.field_name].annotation in numbers:
            raise config_error("must be a number (holds a bool)")
        return value

    @model_validator(mode="wrap")
    @classmethod
    def _names_near_fields(cls, values: Any, handler: Any) -> Any:
        """Let the error of an unknown field name the fields that are there."""
        try:
            return handler(values)
        except ValidationError as error:
            return _raise_with_near_names(error, cls)


def _raise_with_near_names(error: ValidationError, model: type[ConfigModel]) -> NoReturn:
    lines = []
    for details in error.errors(include_url=False):
        kind, message = details["type"], details["msg"]
        if kind == "extra_forbidden" and len(details["loc"]) == 1:
            near = did_you_mean(str(details["loc"][0]), model.model_fields, what="fields here")
            kind, message = "fault", f"no such field{near}"
        fault = PydanticCustomError(kind, "{message}", {"message": message})
        lines.append(InitErrorDetails(type=fault, loc=details["loc"], input=details["input"]))
    raise ValidationError.from_exception_data(error.title, lines, hide_input=True) from None


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


def kind_in_words(value: Any) -> str:
    """Return the kind of a configuration value in words, without the value."""
    if value is None or isinstance(value, bool):
        return "nothing" if value is None else "a bool"
    return {dict: "a mapping", list: "a list", int: "a number", float: "a number"}.get(type(value), "a text")


def _input_path(value: Any, info: Any) -> Any:
    # In a configuration every text has a folder, except one that `file://` read from a file.
    if info.context is not None and type(value) is str:
        raise config_error("must be a path, holds the text of a file: write the path without 'file://'")
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


def check_reference(section: str, name: str, info: Any) -> str:
    """Return `name` if the configuration being validated has such an entry in a section; else raise a config error."""
    names = None if info.context is None else info.context[section]
    if names is not None and name not in names:
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

REFERENCE_SECTIONS = ("llms", "eval.evaluators", "trajectory_builders", "trainer_adapters", "trainers")
"""Sections whose entries other fields refer to."""


class RewardFunctionConfig(ConfigModel):
    """The evaluator whose score is the reward, and the treatment of unusable scores."""

    name: EvaluatorRef = Field(description="The evaluator whose score is the reward: an entry of eval.evaluators.")
    unusable: Literal["unscorable", "zero", "error"] = Field(
        default="unscorable",
        description="Treatment of an episode whose reward is None, NaN or infinite: 'unscorable' leaves it out of "
        "training and of every baseline, 'zero' gives it the reward 0, 'error' ends the run.",
    )


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


def http_address(url: str) -> str:
    """Return `url` if it is an address of HTTP with a host; else raise a config error."""
    try:
        parsed = urlsplit(url)
        is_address = bool(parsed.hostname) and parsed.port != 0 and url.isprintable() and " " not in url
    except ValueError:  # of brackets or a port
        is_address = False
    if not is_address or parsed.scheme not in ("http", "https"):
        raise config_error("must begin with http:// or https://, and name a host, as in http://localhost:9000")
    return url


class ServeConfig(ConfigModel):
    """An address under which a run serves its language models, by their names, to OpenAI's and Anthropic's clients."""

    host: str = Field(
        default="127.0.0.1",
        min_length=1,
        description="Address or name to listen on. Only this machine reaches 127.0.0.1; 0.0.0.0 stands for all "
        "networks. Every address that others reach needs an api_key.",
    )
    port: int = Field(default=8000, ge=0, le=65535, description="Port to listen on; 0: a free one, which is shown.")
    api_key: SecretStr | None = Field(
        default=None,
        min_length=1,
        description="Key that clients must send. The base URL of an episode needs none, as it cannot be guessed. null: "
        "no key, on an address of this machine only.",
    )
    url: str | None = Field(
        default=None,
        description="Address by which agents reach the server, as in http://trainer.example:8000, for the base URLs of "
        "episodes; on an address of this machine alone, clients may call it by this name, too. null: the one that it "
        "listens on.",
    )

    def server_arguments(self) -> dict[str, Any]:
        """Return the arguments of `jaxft.serving.server.Server`.

        On an address of this machine, clients may also call the server by the name in `url`; elsewhere its key
        protects.
        """
        is_named = self.url is not None and is_loopback(self.host)
        return {
            "host": self.host,
            "port": self.port,
            "api_key": None if self.api_key is None else self.api_key.get_secret_value(),
            "allowed_hosts": [urlsplit(self.url).hostname or ""] if is_named else [],
        }

    @model_validator(mode="after")
    def _has_a_key(self) -> "ServeConfig":
        if self.api_key is None and not is_loopback(self.host):
            raise config_error(
                f"host {self.host} can be reached from other machines: set api_key, as in ${{SERVE_KEY}}"
            )
        return self

    @field_validator("api_key")
    @classmethod
    def _can_be_sent(cls, api_key: SecretStr | None) -> SecretStr | None:
        key = "" if api_key is None else api_key.get_secret_value()
        if not (key.isascii() and key == key.strip() and key.isprintable()):
            raise config_error("must be printable ASCII without spaces around it: no header carries anything else")
        if is_episode_token(key):
            raise config_error("begins as the keys of episodes do, and would be taken for one")
        return api_key

    @field_validator("url")
    @classmethod
    def _is_an_address(cls, url: str | None) -> str | None:
        return None if url is None else http_address(url).rstrip("/")
