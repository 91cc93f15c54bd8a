"""Tools of a chat in the terminal: Python functions of a file, or their schemas alone, whose results a person types.

Transformers makes the schema of a function from its type hints and its docstring, which has a line per argument.
"""

import asyncio
import inspect
import json
import sys
import typing
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from pydantic import TypeAdapter, ValidationError

from jaxft.errors import ConfigError, RequestError, UserCodeError, did_you_mean, user_code
from jaxft.harness.registry import import_module
from jaxft.rollout.messages import Tool, ToolCall, check_tools

WANTED = "a tool needs a docstring that says what it does, and a type hint and a line under 'Args:' for each argument"


class Tools(NamedTuple):
    """The functions that a model may call.

    Attributes:
        schemas: the functions in OpenAI's format.
        functions: the functions by name; empty if only their schemas are known.
    """

    schemas: Sequence[Tool] = ()
    functions: Mapping[str, Callable[..., Any]] = {}

    @property
    def names(self) -> list[str]:
        """Names of the functions."""
        return [schema["function"]["name"] for schema in self.schemas]


def load_tools(file: Path) -> Tools:
    """Load the public functions that a Python file defines, or a JSON list of schemas in OpenAI's format.

    Raises:
        ConfigError: the file cannot be read or imported, holds no tool, or one of them is incomplete.
    """
    if not file.is_file():
        raise ConfigError([f"{file}: is no file; give one of Python functions (.py) or of their schemas (.json)"])
    if file.suffix == ".json":
        tools = Tools(_read_schemas(file))
    elif file.suffix == ".py":
        import_module(str(file.absolute()))
        functions = _functions_of(sys.modules[file.stem])
        tools = Tools([_schema_of(file, name, function) for name, function in functions.items()], functions)
    else:
        raise ConfigError([f"{file}: is of no known kind; wanted Python functions (.py) or their schemas (.json)"])
    if not tools.schemas:
        raise ConfigError([f"{file}: holds no tool; write a function whose name does not begin with '_': {WANTED}"])
    try:
        check_tools(tools.schemas)
    except RequestError as error:
        raise ConfigError([f"{file}: {error}"]) from error
    return tools


async def call_tool(tools: Tools, call: ToolCall) -> str:
    """Call a function and return its result as text: a text itself, JSON of another value, or `error: ...`.

    A function that is not async runs in a thread, so that it can be left while it runs.
    """
    if call.name not in tools.functions:
        return f"error: there is no function '{call.name}'{did_you_mean(call.name, tools.names, what='functions')}"
    function = tools.functions[call.name]
    try:
        arguments = read_arguments_of(function, call.arguments)
    except ValueError as error:
        return f"error: {error}"
    try:
        with user_code():
            if inspect.iscoroutinefunction(function):
                result = await function(**arguments)
            else:
                result = await asyncio.to_thread(function, **arguments)
            text = result if isinstance(result, str) else json.dumps(result, ensure_ascii=False)
    except UserCodeError as failure:
        return f"error: {failure.summary}"
    return text.encode(errors="replace").decode()  # half of a character would be refused as a message


def read_arguments_of(function: Callable[..., Any], text: str) -> dict[str, Any]:
    """Return the arguments in a JSON object, of the types that a function's hints name.

    Raises:
        ValueError: an argument is missing, unknown or of another type.

    >>> def add(a: int, b: int = 0) -> int: ...
    >>> read_arguments_of(add, '{"a": 1}')
    {'a': 1}
    >>> read_arguments_of(add, '{"a": "1"}')
    Traceback (most recent call last):
    ValueError: the argument 'a' is "1": Input should be a valid integer
    """
    arguments, hints = json.loads(text), typing.get_type_hints(function)
    try:
        inspect.signature(function).bind(**arguments)
    except TypeError as error:
        raise ValueError(str(error)) from None
    for name, value in arguments.items():
        written = json.dumps(value, ensure_ascii=False)
        try:
            # As strictly as JSON can: 1 is a float and a list is a tuple, but "1" is no number.
            arguments[name] = TypeAdapter(hints.get(name, Any)).validate_json(written, strict=True)
        except ValidationError as error:
            reason = error.errors(include_url=False)[0]["msg"]
            raise ValueError(f"the argument {name!r} is {written[:100]}: {reason}") from None
    return arguments


def _read_schemas(file: Path) -> list[Any]:
    try:
        schemas = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError([f"{file}: holds no JSON: {error}"]) from error
    if not isinstance(schemas, list):
        raise ConfigError([f"{file}: holds a {type(schemas).__name__}; wanted a list of functions in OpenAI's format"])
    return schemas


def _functions_of(module: ModuleType) -> dict[str, Callable[..., Any]]:
    """Return the public functions that a module defines, without those that it imports."""
    return {
        name: value
        for name, value in vars(module).items()
        if inspect.isfunction(value) and value.__module__ == module.__name__ and not name.startswith("_")
    }


def _schema_of(file: Path, name: str, function: Callable[..., Any]) -> Tool:
    # Not above: it announces that PyTorch is missing, unless jaxft.rollout.chat was imported before.
    from transformers.utils import get_json_schema

    try:
        schema = get_json_schema(function)
    except Exception as error:  # of the hints and docstring of the user, in the classes of transformers
        line = inspect.unwrap(function).__code__.co_firstlineno
        raise ConfigError([f"{file}:{line}: the function '{name}' cannot be a tool: {error}; {WANTED}"]) from error
    return {**schema, "function": {**schema["function"], "name": name}}
