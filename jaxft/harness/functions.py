"""Functions that a configuration names as `module:function`: losses, estimators, optimizers, callbacks.

`function: my_module:my_loss` becomes a `Function`, which is written as `my_module:my_loss@DIGEST`. The digest is that
of the function's source without comments and docstrings, by which a resumed run tells whether the function is still
the one that it began with.
"""

import ast
import functools
import hashlib
import inspect
import itertools
import json
import pkgutil
import sys
import textwrap
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType
from typing import Annotated, Any

from pydantic import AfterValidator, PlainSerializer, PlainValidator

from jaxft.errors import did_you_mean
from jaxft.harness.config_types import ConfigText, config_error
from jaxft.harness.registry import import_module

DIGEST_LENGTH = 12
WANTED = "wanted is module:name, as in my_module:my_function"


@dataclass(frozen=True)
class Function:
    """A function, with what a run keeps of it.

    Attributes:
        call: the function.
        name: its `module:name`.
        digest: digest of its source.
        is_pinned: True if the configuration gives the digest, too, and so accepts that it has changed.
    """

    call: Callable[..., Any]
    name: str
    digest: str
    is_pinned: bool = field(default=False, compare=False)

    def __str__(self) -> str:
        return f"{self.name}@{self.digest}"

    @property
    def place(self) -> str:
        """Its name, file and line, for messages."""
        return function_place(self.call)

    @property
    def keywords(self) -> tuple[str, ...] | None:
        """Names of the parameters that can be given by name; None if it takes any."""
        parameters = inspect.signature(self.call).parameters.values()
        if any(each.kind is each.VAR_KEYWORD for each in parameters):
            return None
        return tuple(each.name for each in parameters if each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY))

    @property
    def required(self) -> tuple[str, ...]:
        """Names of the parameters without a default."""
        variable = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
        parameters = inspect.signature(self.call).parameters.values()
        return tuple(each.name for each in parameters if each.default is each.empty and each.kind not in variable)

    def takes(self, keyword: str) -> bool:
        """Return True if it has a parameter of this name, or takes any."""
        return self.keywords is None or keyword in self.keywords

    def select_keywords(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Return the keywords that it has parameters for."""
        known = self.keywords
        return {name: value for name, value in given.items() if known is None or name in known}


def unwrap(function: Callable[..., Any]) -> Any:
    """Return the function, or the callable object, inside of a partial and of decorators such as `jax.jit`."""
    return inspect.unwrap(function.func if isinstance(function, functools.partial) else function)


def _code(function: Callable[..., Any]) -> Any:
    """Return the function inside of partials and decorators; of a callable object, its `__call__`."""
    inner = unwrap(function)
    return inner if inspect.isroutine(inner) else inspect.unwrap(type(inner).__call__)


def function_name(function: Callable[..., Any]) -> str:
    """Return the `module:name` of a function or, for a callable object, of its class."""
    inner = unwrap(function)
    named = inner if inspect.isroutine(inner) else type(inner)
    return f"{named.__module__}:{named.__name__}"


def function_place(function: Callable[..., Any]) -> str:
    """Return name, file and line of a function, as far as it has them."""
    code = _code(function)
    where = f" ({inspect.getfile(code)}:{code.__code__.co_firstlineno})" if inspect.isfunction(code) else ""
    return f"'{function_name(function).partition(':')[2]}'{where}"


def function_digest(function: Callable[..., Any]) -> str:
    """Return the digest of a function's source without comments, docstrings and layout, and of the values it holds.

    Where no source can be read, as of a function typed at a prompt, the compiled code stands for it.
    """
    inner = _code(function)
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(inner)))
    except (OSError, TypeError, SyntaxError):
        text = _code_text(inner.__code__) if inspect.isfunction(inner) else f"{inner.__module__}:{inner.__qualname__}"
    else:
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and ast.get_docstring(node) is not None:
                node.body = node.body[1:] or [ast.Pass()]
        text = ast.unparse(tree)
    text += "".join(map(_value_text, _held_values(function)))
    return hashlib.sha256(text.encode()).hexdigest()[:DIGEST_LENGTH]


def _held_values(function: Callable[..., Any]) -> list[Any]:
    """Return the values that a partial, a closure or a callable object holds, in a fixed order."""
    held, inner, code = list[Any](), unwrap(function), _code(function)
    if isinstance(function, functools.partial):
        held += [*function.args, *itertools.chain(*sorted(function.keywords.items()))]
    if not inspect.isroutine(inner) and "__dict__" in dir(inner):
        held += itertools.chain(*sorted(vars(inner).items()))
    return held + [cell.cell_contents for cell in (inspect.isfunction(code) and code.__closure__) or ()]


def _value_text(value: Any) -> str:
    """Return a value as text; a function by its digest, and one that says where it lies in memory by its type."""
    if callable(value) and not isinstance(value, type):
        return function_digest(value)
    text = repr(value)
    return type(value).__qualname__ if " at 0x" in text else text


def _code_text(code: CodeType) -> str:
    constants = [_code_text(each) if isinstance(each, CodeType) else repr(each) for each in code.co_consts]
    return repr((code.co_code, code.co_names, constants))


def import_function(text: str) -> Any:
    """Return the function at `module:name`; the module is searched for like an entry of `imports`.

    Raises:
        ConfigError: the module cannot be imported.
        ValueError: the text is no such place, or the module has no such name.
    """
    module_name, colon, name = text.partition(":")
    if not (module_name and colon and name.isidentifier()) or " " in module_name:
        raise ValueError(f"'{text}' is no place of a function: {WANTED}")
    import_module(ConfigText(module_name, text.folder if isinstance(text, ConfigText) else Path.cwd()))
    try:
        return pkgutil.resolve_name(f"{module_name}:{name}")
    except AttributeError:
        own = [each for each, value in vars(sys.modules[module_name]).items() if inspect.isfunction(value)]
        near = did_you_mean(name, own, what="functions there")
        raise ValueError(f"the module '{module_name}' has no '{name}'{near}") from None


def load_function(given: Any) -> Function:
    """Return a `Function` from one, from a function, or from the text `module:name` or `module:name@digest`.

    Raises:
        ConfigError: the module cannot be imported.
        ValueError: it is no function, a resumed run could not tell whether it has changed, or it has another digest.
    """
    if isinstance(given, Function):
        return given
    is_named, text, digest = isinstance(given, str), given, ""
    if is_named:
        place, _, digest = given.partition("@")
        text = ConfigText(place, given.folder) if isinstance(given, ConfigText) else place
        if text.startswith("lambda"):
            raise ValueError(f"a lambda cannot be named: write a function into a module; {WANTED}")
    function = import_function(text) if is_named else given
    if not callable(function) or isinstance(function, type):
        raise ValueError(f"{repr(given)[:100]} is no function: {WANTED}")
    code = _code(function)
    if is_named and inspect.isfunction(code) and (code.__name__ == "<lambda>" or code.__closure__):
        what = "is a lambda" if code.__name__ == "<lambda>" else f"holds {', '.join(code.__code__.co_freevars)}"
        raise ValueError(
            f"{text} {what}, so that a resumed run could not tell whether it has changed: write it with `def` at the "
            "top of its module, and what it needs as parameters, for 'options'"
        )
    try:
        hash(function)
    except TypeError:
        raise ValueError(f"{repr(given)[:100]} has no hash: give its class __hash__, or take a function") from None
    name = str(text) if is_named else function_name(function)
    found = Function(function, name, function_digest(function), is_pinned=bool(digest))
    if digest and digest != found.digest:
        raise ValueError(
            f"{name} has changed: its digest was {digest} and is {found.digest}; to go on with it as it is now, "
            f"set this field to {found}"
        )
    return found


NamedFunction = Annotated[Function, PlainValidator(load_function), PlainSerializer(str)]
"""A field with a function: `module:name`, whose module is next to the file, in the working directory, or installed."""


def name_or_function(*names: str) -> Any:
    """Return the validator of a field with one of these names or, as `module:name`, a function."""

    def validate(given: Any) -> Any:
        if isinstance(given, str) and ":" not in given and given not in names:
            near = did_you_mean(given, names, what="names")
            raise config_error(f"'{given}' is none of the names, and no function as module:name{near}")
        return given if isinstance(given, str) and given in names else load_function(given)

    return PlainValidator(validate)


class Options(dict[str, Any]):
    """Keywords of a function, from a configuration; equal ones have equal hashes."""

    def __hash__(self) -> int:  # type: ignore[override]
        return hash(json.dumps(self, sort_keys=True, default=repr))


NamedOptions = Annotated[dict[str, Any], AfterValidator(Options)]
"""A field with keywords of a function."""


def check_options(function: Function, options: Mapping[str, Any], given: Iterable[str]) -> None:
    """Raise a ValueError unless a function takes all options, and all that it requires is given or among the options.

    Args:
        function: the function.
        options: keywords from the configuration.
        given: names of the keywords that the run can give it.
    """
    keywords = {**function.select_keywords(dict.fromkeys(given)), **options}
    try:
        inspect.signature(function.call).bind(**keywords)
    except TypeError as error:
        raise ValueError(f"{function.place} does not fit: {error}") from None
