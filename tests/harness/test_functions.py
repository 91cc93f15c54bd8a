"""Functions that a configuration names: how they are found, what tells that one has changed, and what is refused."""

import functools
from dataclasses import dataclass

import pytest
from pydantic import TypeAdapter, ValidationError

from jaxft.harness.functions import NamedFunction, Options, function_digest, load_function
from tests import own_functions

SOURCE = '''
def tuned(x, factor=2.0):
    """A docstring."""
    return factor * x  # a comment
'''


def digest(tmp_path, source):
    """Return the digest of the function `tuned` in a file of its own."""
    file = tmp_path / f"tuned_{len(list(tmp_path.iterdir()))}.py"
    file.write_text(source)
    names = {}
    exec(compile(source, str(file), "exec"), names)
    return function_digest(names["tuned"])


def test_a_digest_is_that_of_the_code_alone(tmp_path):
    first = digest(tmp_path, SOURCE)
    moved = "\n\n" + SOURCE.replace("A docstring.", "Another.").replace("  # a comment", "").replace(
        "factor * x", "(factor * x)"
    )
    assert digest(tmp_path, moved) == first
    assert digest(tmp_path, SOURCE.replace("factor * x", "factor + x")) != first
    assert digest(tmp_path, SOURCE.replace("2.0", "3.0")) != first


def test_a_function_without_source_and_a_partial_have_digests_too():
    names = {}
    exec("def typed(x):\n    return x + 1\ndef other(x):\n    return x + 2", names)
    found = {function_digest(each) for each in (names["typed"], names["other"])}
    found |= {function_digest(functools.partial(own_functions.pull, strength=s)) for s in (1.0, 2.0)}
    assert len(found) == 4


def test_a_name_and_its_digest_load_as_the_function():
    function = load_function("tests.own_functions:pull")
    assert function.call is own_functions.pull and not function.is_pinned
    again = TypeAdapter(NamedFunction).validate_python(str(function))
    assert again == function and again.is_pinned and str(again) == str(function)
    assert function.required == ("logprobs", "advantages", "completion_mask", "denominators")
    assert function.select_keywords({"strength": 2.0, "beta": 1.0}) == {"strength": 2.0}


@pytest.mark.parametrize(
    "given, message",
    [
        ("pull", "'pull' is no place of a function: wanted is module:name"),
        ("lambda logprobs: 0", "a lambda cannot be named"),
        ("tests.own_functions:pul", "has no 'pul'; did you mean 'pull'?"),
        ("tests.no_such_module:pull", "the module 'tests.no_such_module' cannot be imported"),
        ("tests.own_functions:nameless", "is a lambda, so that a resumed run could not tell"),
        ("tests.own_functions:closure", "holds factor, so that a resumed run could not tell"),
        ("tests.own_functions:np", "is no function"),
        ("tests.own_functions:pull@0123456789ab", "its digest was 0123456789ab and is"),
        (3, "3 is no function"),
    ],
)
def test_what_is_no_function_is_refused(given, message):
    with pytest.raises(ValidationError) as error:
        TypeAdapter(NamedFunction).validate_python(given)
    assert message in str(error.value)


def test_values_that_a_function_holds_are_in_its_digest():
    def made(factor, inner=own_functions.pull):
        return functools.partial(own_functions.pull, strength=factor, inner=inner)

    assert function_digest(made(1.0)) == function_digest(made(1.0)) != function_digest(made(2.0))
    assert function_digest(made(1.0, own_functions.alone)) != function_digest(made(1.0))
    assert function_digest(own_functions._made(1.0)) != function_digest(own_functions._made(2.0))
    assert function_digest(Scaled(1.0)) == function_digest(Scaled(1.0)) != function_digest(Scaled(2.0))
    with pytest.raises(ValueError, match="has no hash"):
        load_function(Scaled(1.0))


@dataclass
class Scaled:
    factor: float

    def __call__(self, logprobs):
        return self.factor * logprobs.sum(), {}


def test_equal_options_have_equal_hashes():
    assert hash(Options(a=1, b=[2])) == hash(Options(b=[2], a=1)) != hash(Options(a=2))
