import asyncio
import copy
import io
from types import SimpleNamespace

import numpy as np
import pytest

from jaxft.components.single_turn import context_tokens, read_examples, single_turn
from jaxft.errors import ConfigError, DatasetError
from jaxft.harness.config import config_from_mapping
from jaxft.rollout.client import ChatClient
from jaxft.rollout.current import recording
from jaxft.rollout.recorder import Episode
from jaxft.runs.console import Console

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
        (["a"], {"completions": ["1"]}, "column 'completions'"),
        ([{"prompt": "a", "completion_ids": 1}], {}, "column 'completion_ids'"),
        ([{"prompt": "a", "level": 1}], {"level": [1]}, "column 'level'"),
    ],
)
def test_what_is_no_prompt_or_column_is_named(prompts, columns, shown):
    with pytest.raises(DatasetError) as caught:
        read_examples(prompts, columns)
    assert shown in str(caught.value)


def configured(**values):
    """The configuration of a run with these fields of the model or of `single_turn`."""
    workflow = {name: values.pop(name) for name in ("max_tokens", "chat_template_kwargs") if name in values}
    mapping = {
        "llms": {"policy": {"_type": "local_policy", **(values or {"preset": "qwen3-50k"})}},
        "workflow": {"_type": "single_turn", "llm": "policy", **workflow},
        "eval": {"general": {"dataset": {"_type": "in_memory"}}},
    }
    return config_from_mapping(mapping, base_dir=".")


def test_context_is_counted_by_what_is_rendered(tmp_path, tokenizer):
    of_texts = read_examples(["ab", "abcd"], {})
    assert [context_tokens(configured(), of_texts, answer) for answer in (12, 13)] == [16, 32]
    assert context_tokens(configured(max_tokens=45), of_texts, 12) == 64  # as the workflow asks, 4 + 45
    assert context_tokens(configured(), of_texts, 12, read_examples(["a" * 30], {})) == 48
    chat = read_examples([CHAT], {})
    assert context_tokens(configured(), chat, 8) == 16  # user, five characters, end, assistant: 8
    template = "{{ 'be brief' * times }}{% for m in messages %}{{ m.content }}{% endfor %}"
    longer = copy.deepcopy(tokenizer)
    longer.chat_template = template
    longer.save_pretrained(tmp_path)
    variables = {"times": 10}
    config = configured(preset="qwen3-50k", tokenizer=str(tmp_path), chat_template_kwargs=variables)
    rendered = tokenizer.encode("be brief" * 10 + "say 7", add_special_tokens=False)
    assert context_tokens(config, chat, 8) == -(-(len(rendered) + 8) // 16) * 16 == 96
    with pytest.raises(DatasetError, match=r"prompts\[1\] is ''"):
        context_tokens(configured(), read_examples(["a", ""], {}), 8)
    with pytest.raises(ConfigError, match=r"model: .*no-such-folder"):
        context_tokens(configured(path="./no-such-folder"), of_texts, 8)


CALL = {"type": "function", "function": {"name": "look_up", "arguments": {"city": "Oslo", "street": None}}}
CALLED = [*CHAT, {"role": "assistant", "content": "", "tool_calls": [CALL]}]


def arrays(value):
    """A value as pandas reads it from parquet: lists are arrays of objects."""
    if isinstance(value, dict):
        return {name: arrays(each) for name, each in value.items()}
    if not isinstance(value, list):
        return value
    array = np.empty(len(value), object)
    array[:] = [arrays(each) for each in value]
    return array


def test_arrays_of_pandas_are_lists_and_hold_no_nulls_that_arrow_added():
    rows = [{"prompt": CALLED, "tags": ["a", None], "vector": np.ones(2)}]
    (listed,) = read_examples(rows, {})
    (found,) = read_examples([arrays(row) for row in rows], {"more": arrays([["b"]])})
    given = found.full_dataset_entry
    assert given["tags"] == ["a", None] and given["more"] == ["b"] and given["vector"] is rows[0]["vector"]
    (table,) = read_examples(Rows(rows), {})  # a dataset that is no list is a table of Arrow's
    calls = [each.input_obj[1]["tool_calls"][0]["function"] for each in (listed, found, table)]
    assert [each["arguments"] for each in calls] == [{"city": "Oslo", "street": None}, *[{"city": "Oslo"}] * 2]
    assert read_examples(arrays([CALLED]), {})[0].input_obj == found.input_obj


def test_a_text_for_a_model_of_chats_is_said_once(policy, tmp_path):
    """Nothing is said of a rendered chat, and nothing where weights are random."""
    shown, client = io.StringIO(), ChatClient(policy)

    async def get_llm(name):
        return client

    async def answer(config, *prompts):
        builder = SimpleNamespace(get_llm=get_llm, config=config, console=Console(shown))
        async for workflow in single_turn(config.workflow, builder):
            for prompt in prompts:
                call = Episode(0, 0, 0, "a", 0, input_obj=prompt)
                with recording(call):
                    await workflow({})
                assert call.calls[0].prompt_ids == policy.template.text_ids(prompt)

    rendered = policy.template.prompt(CHAT).text
    loaded = configured(path=str(tmp_path), max_tokens=1)
    asyncio.run(answer(configured(max_tokens=1), "2+2="))
    asyncio.run(answer(loaded, rendered))
    assert shown.getvalue() == ""
    asyncio.run(answer(loaded, rendered, "2+2=", "3+3="))
    assert shown.getvalue().count("no chat template is applied") == shown.getvalue().count("2+2=") == 1
