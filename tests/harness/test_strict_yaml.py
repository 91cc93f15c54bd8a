import math

import pytest
import yaml

from jaxft.errors import ConfigError
from jaxft.harness.strict_yaml import dump_yaml, parse_yaml


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-5", 1e-5),
        ("1E5", 1e5),
        ("-.5", -0.5),
        ("010", 10),
        ("0x1F", 31),
        ("-.inf", -math.inf),
        ("no", "no"),
        ("1:30", "1:30"),
        ("2024-01-01", "2024-01-01"),
        ("'1'", "1"),
        ("", None),
        ("&x [1, 2]", [1, 2]),
        ("<<: {a: 1}", {"<<": {"a": 1}}),
        ("9" * 100, 10**100 - 1),
    ],
)
def test_scalars_are_those_of_yaml_1_2(text, value):
    assert parse_yaml(text, "f") == value


def test_aliases_become_copies():
    value = parse_yaml("{a: &x {k: 1}, b: *x}", "f")
    value["a"]["k"] = 2
    assert value["b"] == {"k": 1}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: 1\nb: 2\na: 3", "f:3: the key 'a' is there twice"),
        ("a: {b: 1,\n b: 2}", "f:2: the key 'b' is there twice"),
        ("a: 1\nb: !!python/object:os.system x", "f:2: the tag 'tag:yaml.org,2002:python/object:os.system'"),
        ("a: !!str 1", "f:1: the tag"),
        ("a: 1\n1: 2", "f:2: a key must be text"),
        ("a: [1\nb: 2", "f:2: "),
        ("a: 1\n---\nb: 2", "f:2: "),
        ("a: &x [*x]", "f:1: its aliases"),
        ("a: *nobody", "f:1: found undefined alias"),
        ("a: 1\nb: \x07", "f:2: the character"),
        ("[" * 5000, "f:1: nested deeper than 100 levels"),
        ("9" * 101, "f:1: a number of more than 100 digits"),
        ("a: 1e999", "f:1: a number too large"),
    ],
)
def test_faults_have_a_line(text, message):
    with pytest.raises(ConfigError) as caught:
        parse_yaml(text, "f")
    assert str(caught.value).startswith(message)


def test_a_text_that_is_too_large_is_named_as_such():
    """Before most of it is read: a quarter of a million keys took a minute, and then aliases were blamed."""
    keys = "".join(f"key_{number}: 1\n" for number in range(250_000))
    with pytest.raises(ConfigError, match=rf"f: {len(keys):,} characters; at most 1,000,000"):
        parse_yaml(keys, "f")
    with pytest.raises(ConfigError, match=r"f:5000: more than 10,000 keys and values"):
        parse_yaml("".join(keys.splitlines(keepends=True)[:50_000]), "f")


def test_aliases_that_explode_are_refused():
    lines = ["x0: &x0 [1, 1, 1, 1, 1, 1, 1, 1, 1, 1]"]
    lines += [f"x{i}: &x{i} [{', '.join([f'*x{i - 1}'] * 10)}]" for i in range(1, 12)]
    with pytest.raises(ConfigError, match="aliases"):
        parse_yaml("\n".join(lines), "f")


@pytest.mark.parametrize(
    "text", ["1e-5", "0o17", "no", "1:30", "2024-01-01", "~", "a: b", "1_000", "é\n\tx", "#", "", "="]
)
def test_dumped_texts_come_back(text):
    assert parse_yaml(dump_yaml({"a": [text]}), "f") == {"a": [text]}
    assert yaml.safe_load(dump_yaml({"a": [text]})) == {"a": [text]}


def test_dumped_numbers_come_back():
    value = {"a": [1e-5, -math.inf, 3, True, None, 1.0]}
    assert parse_yaml(dump_yaml(value), "f") == value
