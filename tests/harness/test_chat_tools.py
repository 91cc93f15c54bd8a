"""Tools of a chat: which functions of a file are tools, and what a call of one gives."""

import asyncio
import json

import pytest

from jaxft.errors import ConfigError
from jaxft.harness.chat_tools import call_tool, load_tools
from jaxft.rollout.messages import ToolCall

FUNCTIONS = '''
import asyncio
import os.path
from json import dumps  # a function, which is no tool as the file only imports it

def add(a: int, b: int = 1) -> int:
    """Add two numbers.

    Args:
        a: the first number.
        b: the second number.
    """
    return _sum(a, b)

async def look_up(city: str) -> str:
    """Look up a city.

    Args:
        city: its name.
    """
    await asyncio.sleep(0)
    return city.upper()

def fail() -> None:
    """Fail."""
    raise KeyError("a\\nb")

def leave():
    """End the program."""
    raise SystemExit(3)

def strange(kind: str):
    """Return something strange.

    Args:
        kind: which.
    """
    return {"half": "\\ud800", "set": {1}, "nothing": None, "list": [1.5, "\\u00e9"]}[kind]

def area(sides: tuple[float, float]) -> float:
    """Return an area.

    Args:
        sides: the two sides.
    """
    assert isinstance(sides, tuple)
    return sides[0] * sides[1]

def _sum(a, b):
    return a + b

class Thing:
    """No function."""
'''


@pytest.fixture
def write(tmp_path):
    """Writes a file whose name no other test has, as modules are imported once."""

    def write(text, suffix=".py"):
        path = tmp_path / f"tools_{tmp_path.name}{suffix}"
        path.write_text(text)
        return path

    return write


@pytest.fixture
def tools(write):
    return load_tools(write(FUNCTIONS))


def result(tools, name, arguments):
    return asyncio.run(call_tool(tools, ToolCall("abcdefghi", name, arguments)))


def test_public_functions_of_a_file_are_tools(tools):
    assert tools.names == ["add", "look_up", "fail", "leave", "strange", "area"]
    function = tools.schemas[0]["function"]
    assert function["description"] == "Add two numbers."
    assert function["parameters"]["properties"]["b"] == {"type": "integer", "description": "the second number."}
    assert function["parameters"]["required"] == ["a"]


@pytest.mark.parametrize(
    ("name", "arguments", "expected"),
    [
        ("add", '{"a": 2, "b": 3}', "5"),
        ("add", '{"a": 2}', "3"),
        ("look_up", '{"city": "Oslo"}', "OSLO"),
        ("area", '{"sides": [2, 1.5]}', "3.0"),
        ("strange", '{"kind": "nothing"}', "null"),
        ("strange", '{"kind": "list"}', '[1.5, "é"]'),
        ("strange", '{"kind": "half"}', "?"),
    ],
)
def test_a_result_is_text_or_json(tools, name, arguments, expected):
    assert result(tools, name, arguments) == expected


@pytest.mark.parametrize(
    ("name", "arguments", "reason"),
    [
        ("fail", "{}", "KeyError: 'a\\nb'"),
        ("leave", "{}", "SystemExit: 3"),
        ("strange", '{"kind": "set"}', "TypeError: Object of type set is not JSON serializable"),
        ("adds", '{"a": 2}', "no function 'adds'; did you mean 'add'?"),
        ("add", "{}", "missing a required argument: 'a'"),
        ("add", '{"a": 1, "c": 2}', "unexpected keyword argument 'c'"),
        ("add", '{"a": "1"}', "the argument 'a' is \"1\": "),
        ("add", '{"a": true}', "the argument 'a' is true: "),
        ("area", '{"sides": [1]}', "the argument 'sides' is [1]: "),
    ],
)
def test_what_is_wrong_with_a_call_is_its_result(tools, name, arguments, reason):
    said = result(tools, name, arguments)
    assert said.startswith("error: ") and reason in said and "\n" not in said


WAY_OUT = "a tool needs a docstring that says what it does, and a type hint and a line under 'Args:' for each argument"


@pytest.mark.parametrize(
    ("text", "name", "reason"),
    [
        ("def add(a: int): return a", "add", "no docstring"),
        ('def add(a):\n    """Add.\n\n    Args:\n        a: it.\n    """', "add", "missing a type hint"),
        ('def add(a: int):\n    """Add."""', "add", "no description for the argument 'a'"),
        ('def add(a: "Nowhere"):\n    """Add.\n\n    Args:\n        a: it.\n    """', "add", "Nowhere"),
        ("half = lambda a: a / 2", "half", "no docstring"),
    ],
)
def test_a_function_that_cannot_be_a_tool_is_named(write, text, name, reason):
    path = write(f"\n\n{text}\n")
    with pytest.raises(ConfigError) as refused:
        load_tools(path)
    said = str(refused.value)
    assert said.startswith(f"{path}:3: ") and f"'{name}'" in said and reason in said and WAY_OUT in said
    assert "\n" not in said


SCHEMA = {"type": "function", "function": {"name": "look_up", "parameters": {"type": "object", "properties": {}}}}


def test_schemas_are_tools_without_functions(write):
    tools = load_tools(write(json.dumps([SCHEMA]), ".json"))
    assert tools.names == ["look_up"] and tools.schemas == [SCHEMA] and not tools.functions


@pytest.mark.parametrize(
    ("text", "suffix", "reason"),
    [
        ("", ".py", "holds no tool"),
        ("def add(:", ".py", "SyntaxError"),
        ("1 / 0", ".py", "ZeroDivisionError"),
        ("[", ".json", "no JSON"),
        ("{}", ".json", "holds a dict"),
        ("[]", ".json", "holds no tool"),
        ("[1]", ".json", "tools[0] is no function"),
        (json.dumps([SCHEMA, SCHEMA]), ".json", "repeats 'look_up'"),
        ("x", ".txt", ".py"),
        (None, ".py", "is no file"),
    ],
)
def test_a_file_without_tools_is_refused(tmp_path, write, text, suffix, reason):
    path = tmp_path / "nowhere.py" if text is None else write(text, suffix)
    with pytest.raises(ConfigError) as refused:
        load_tools(path)
    assert str(path) in str(refused.value) and reason in str(refused.value)
