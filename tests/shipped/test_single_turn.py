import pytest

from jaxft.errors import ConfigError, DatasetError
from jaxft.shipped.single_turn import longest_prompt, read_examples

CHAT = [{"role": "user", "content": "say 7"}]


class Rows:
    """A dataset in the manner of Hugging Face's: rows by integer index."""

    def __init__(self, rows):
        self.rows = rows

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        return self.rows[index]


class Frame(Rows):
    """A table whose keys are columns, as in pandas."""

    def __getitem__(self, key):
        return {"prompt": self.rows}[key]


def test_texts_chats_rows_and_datasets_become_examples():
    texts = read_examples(["a", "b"], {"answer": ["1", 2]})
    assert [(each.id, each.input_obj, each.full_dataset_entry) for each in texts] == [
        ("0", "a", {"prompt": "a", "answer": "1"}),
        ("1", "b", {"prompt": "b", "answer": 2}),
    ]
    assert read_examples([CHAT], {})[0].input_obj == CHAT
    rows = [{"prompt": "a", "id": 3, "level": 1}, {"prompt": CHAT, "id": 3, "level": 2}]
    of_rows = read_examples(rows, {"answer": iter("12")})
    assert [each.full_dataset_entry for each in of_rows] == [rows[0] | {"answer": "1"}, rows[1] | {"answer": "2"}]
    assert read_examples(Rows(rows), {"answer": ("1", "2")}) == of_rows


@pytest.mark.parametrize(
    "prompts, columns, shown",
    [
        ([], {}, "empty"),
        ("say 7", {}, "prompts is one str"),
        ({"train": ["a"]}, {}, "dataset['train']"),
        (iter(["a"]), {}, "list_iterator"),
        (Frame(["a", "b"]), {}, "prompts is a Frame"),
        (["a", 3], {}, "prompts[1] is 3"),
        (["a", None], {}, "prompts[1] is None"),
        (["a", [{"role": "user"}]], {}, "prompts[1]"),
        (CHAT, {}, "[[message, ...]]"),
        ([{"question": "a"}], {}, "prompts[0] has no column 'prompt', but question"),
        ([{"prompt": "a", "b": 1}, {"prompt": "a"}], {}, "prompts[1] has no column 'b', which prompts[0] has"),
        (["a", "b"], {"answer": ["1"]}, "column 'answer' has 1 values for 2 prompts"),
        (["a", "b"], {"answer": "12"}, "column 'answer' is '12'"),
        (["a"], {"completions": ["1"]}, "column 'completions'"),
        ([{"prompt": "a", "completion_ids": 1}], {}, "column 'completion_ids'"),
        ([{"prompt": "a", "level": 1}], {"level": [1]}, "column 'level'"),
    ],
)
def test_what_is_no_prompt_or_column_is_named(prompts, columns, shown):
    with pytest.raises(DatasetError) as caught:
        read_examples(prompts, columns)
    assert shown in str(caught.value)


def test_the_longest_prompt_is_counted_in_tokens():
    assert longest_prompt(read_examples(["ab", "abcd"], {}), None) == 4
    assert longest_prompt(read_examples([CHAT], {}), None) == 8  # user, five characters, end, assistant
    with pytest.raises(DatasetError, match=r"prompts\[1\] is ''"):
        longest_prompt(read_examples(["a", ""], {}), None)
    with pytest.raises(ConfigError, match=r"model: .*no-such-folder"):
        longest_prompt(read_examples(["a"], {}), "./no-such-folder")
