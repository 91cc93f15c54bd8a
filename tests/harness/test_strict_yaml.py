import math

import pytest
import yaml

from jaxft.errors import ConfigError
from jaxft.harness.strict_yaml import dump_yaml, parse_yaml


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-5", 1e-5),
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
        ("9" * 101, 1e101),
    ],
)
def test_scalars_are_those_of_yaml_1_2(text, value):
    assert parse_yaml(text, "f") == value


def test_aliases_become_copies():
    value = parse_yaml("{a: &x {k: 1}, b: *x}", "f")
    value["a"]["k"] = 2
    assert value["b"] == {"k": 1}


EXPLODING = "\n".join(
    ["x0: &x0 [1, 1, 1, 1, 1, 1, 1, 1, 1, 1]"]
    + [f"x{i}: &x{i} [{', '.join([f'*x{i - 1}'] * 10)}]" for i in range(1, 12)]
)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: 1\nb: 2\na: 3", "f:3: the key 'a' is there twice"),
        ("a: {b: 1,\n b: 2}", "f:2: the key 'b' is there twice"),
        ("a: 1\nb: !!python/object:os.system x", "f:2: a tag is not allowed"),
        ("a: 1\n1: 2", "f:2: a key must be text"),
        ("a: [1\nb: 2", "f:2: "),
        ("a: 1\n---\nb: 2", "f:2: "),
        ("a: &x [*x]", "f:1: "),
        ("a: *nobody", "f:1: found undefined alias"),
        ("a: 1\nb: \x07", "f:2: the character"),
        ("[" * 5000, "f:1: nested too deeply"),
        (EXPLODING, "f:1: nested too deeply, or its aliases expand"),
        ("key: 1\n" * 100_000, "f: 700,000 characters; at most 300,000"),
    ],
)
def test_faults_have_a_line(text, message):
    with pytest.raises(ConfigError) as caught:
        parse_yaml(text, "f")
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize(
    "value",
    [
        "1e-5",
        "0o17",
        "no",
        "1:30",
        "2024-01-01",
        "~",
        "a: b",
        "1_000",
        "é\n\tx",
        "#",
        "",
        "=",
        -math.inf,
        3,
        True,
        None,
    ],
)
def test_what_is_dumped_comes_back(value):
    assert parse_yaml(dump_yaml({"a": [value]}), "f") == {"a": [value]}
    assert yaml.safe_load(dump_yaml({"a": [value]})) == {"a": [value]}
    assert parse_yaml(dump_yaml({"a": 1e-5}), "f") == {"a": 1e-5}
