"""Stop strings are found at the token that completes them, however the tokens come, without decoding all again."""

import random

import pytest

from jaxft.policy.stop_strings import StopFinder, cut_at_stop


class Counting:
    """A chat template that counts how many tokens it was asked to make a text of."""

    def __init__(self, template):
        self.template, self.tokens = template, 0

    def answer_text(self, token_ids):
        self.tokens += len(token_ids)
        return self.template.answer_text(token_ids)


def first_of_all(template, ids, stops):
    """The same by looking at every beginning."""
    return next(
        (n for n in range(1, len(ids) + 1) if any(stop in template.answer_text(ids[:n]) for stop in stops)), None
    )


def by_and_by(template, ids, stops, sizes):
    finder, seen = StopFinder(template.answer_text, stops), 0
    while seen < len(ids):
        seen += next(sizes)
        found = finder(ids[:seen])
        if found is not None:
            return found
    return None


@pytest.mark.parametrize("seed", range(30))
def test_found_where_a_search_of_everything_finds_it(policy, seed):
    rng = random.Random(seed)
    template = policy.template
    eos = policy.tokenizer.eos_token_id
    # Control tokens, which have no text, stand between the characters; two of them are longer than a byte.
    pieces = [[eos] * rng.choice([0, 0, 0, 1, 30]) + policy.tokenizer.encode(rng.choice("ab.é€")) for _ in range(120)]
    ids = [token for piece in pieces for token in piece]
    text = template.answer_text(ids)
    start = rng.randrange(len(text) - 6)
    for stops in ([text[start : start + rng.randint(1, 6)]], ["ab€a.", "€é€é", "b.b.b"], ["never"]):
        sizes = iter(lambda: rng.randint(1, 9), 0)
        assert by_and_by(template, ids, stops, sizes) == first_of_all(template, ids, stops)


def test_the_work_grows_with_the_answer_and_not_with_its_square(policy):
    template = Counting(policy.template)
    ids = policy.tokenizer.encode("a" * 4000)
    assert by_and_by(template, ids, ["\nObservation:"], iter(lambda: 8, 0)) is None
    assert template.tokens < 12 * len(ids)


def test_the_text_is_cut_before_the_stop_string(policy):
    ids = policy.tokenizer.encode("one. Two.")
    assert StopFinder(policy.template.answer_text, [". T", "wo"])(ids) == 6
    assert StopFinder(policy.template.answer_text, ["three"])(ids) is None
    assert cut_at_stop("one. Two.", ["wo", "."]) == "one"


@pytest.mark.parametrize(
    ("stops", "expected"),
    [(["wo", ". "], "one. "), ([". Two", "."], "one."), (["three"], "one. Two."), ([], "one. Two.")],
)
def test_the_text_may_end_with_the_stop_string(stops, expected):
    assert cut_at_stop("one. Two.", stops, include_stop=True) == expected
