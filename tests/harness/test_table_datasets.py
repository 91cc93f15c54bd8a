import asyncio
import csv
import datetime
import decimal
import io
import json
import sys

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxft.errors import ConfigError, DatasetError
from jaxft.harness.component_builder import ComponentBuilder
from jaxft.harness.config import config_from_mapping, load_config, resolved_yaml
from jaxft.harness.datasets import DatasetStructureConfig, checked_items, dataset_for_file, file_items, load_jsonl
from jaxft.harness.table_datasets import CsvDatasetConfig, ParquetDatasetConfig, read_csv, read_parquet
from jaxft.runs.console import Console
from jaxft.runs.directory import RunDirectory

HEAD = "question,answer\n"


def csv_items(path, content, **options):
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    config = CsvDatasetConfig(file_path=path, **options)
    return checked_items(file_items(config, read_csv(path, config.delimiter)), str(path))


def parquet_items(path, columns, **options):
    pyarrow.parquet.write_table(columns if isinstance(columns, pyarrow.Table) else pyarrow.table(columns), path)
    return checked_items(file_items(ParquetDatasetConfig(file_path=path, **options), read_parquet(path)), str(path))


def test_csv_rows_become_items_whose_values_are_texts(tmp_path):
    items = csv_items(tmp_path / "d", 'id,question,answer,level\nx,"a ""b"", c",1e3,\ny,é,true,2\n')
    assert [(i.id, i.input_obj, i.expected_output_obj) for i in items] == [("x", 'a "b", c', "1e3"), ("y", "é", "true")]
    assert items[0].full_dataset_entry == {"id": "x", "question": 'a "b", c', "answer": "1e3", "level": ""}


def test_csv_with_byte_order_mark_crlf_blank_lines_and_line_breaks_in_fields(tmp_path):
    content = b"\xef\xbb\xbf\r\n" + b'question,answer\r\n\r\n  \r\n"a\r\n\r\nb",1\r\n\n"c\nd","\xe2\x80\xa8"'
    assert [(i.id, i.input_obj, i.expected_output_obj) for i in csv_items(tmp_path / "d", content)] == [
        ("0", "a\r\n\r\nb", "1"),
        ("1", "c\nd", "\u2028"),
    ]


def test_csv_fields_are_mapped(tmp_path):
    structure = DatasetStructureConfig(question_key=None, answer_key=None)
    (item,) = csv_items(tmp_path / "d", "n;t\n1;x\n", id_key="n", structure=structure, delimiter=";")
    assert (item.id, item.input_obj, item.expected_output_obj) == ("1", {"n": "1", "t": "x"}, None)


def test_rows_of_empty_texts_are_no_blank_lines(tmp_path):
    (tmp_path / "one").write_text('a\n""\n\nx\n')
    (tmp_path / "tabs").write_text("a\tb\n\t\n \n")
    assert [row.fields for row in read_csv(tmp_path / "one")] == [{"a": ""}, {"a": "x"}]
    assert [row.fields for row in read_csv(tmp_path / "tabs", "\t")] == [{"a": "", "b": ""}]


def test_long_csv_fields_are_read_and_the_limit_of_the_csv_module_stays(tmp_path):
    limit = csv.field_size_limit()
    (item,) = csv_items(tmp_path / "d", HEAD + "q" * 300_000 + ",a")
    assert len(item.input_obj) == 300_000 and csv.field_size_limit() == limit


@given(st.lists(st.tuples(*[st.text(st.characters(codec="utf-8", exclude_characters="\0"))] * 2), min_size=1))
def test_what_the_csv_module_writes_is_read_back(tmp_path_factory, rows):
    text = io.StringIO(newline="")
    csv.writer(text, quoting=csv.QUOTE_ALL).writerows([("a", "b"), *rows])
    path = tmp_path_factory.mktemp("csv") / "d"
    path.write_bytes(text.getvalue().encode())
    assert [tuple(row.fields.values()) for row in read_csv(path)] == rows


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "d:1: wants a header"),
        ("\n\r\n", "d:1: wants a header"),
        (HEAD, "d: the dataset is empty"),
        ("\na,b,a\n", "d:2: the column 'a' is there twice"),
        ("a,,b\n", "d:1: column 2 of the header has no name"),
        ("a, \n", "d:1: column 2 of the header has no name"),
        (HEAD + '"q\nq",1\nx\n', "d:4: the row has 1 fields, the header 2"),
        (HEAD + "a,b,c\n", "d:2: the row has 3 fields, the header 2: a field that holds ',' or a line break needs"),
        (HEAD + "a,b,\n", "d:2: the row has 3 fields"),
        (HEAD + 'a,b\n"c,d\n\ne,f\n', "d:3: malformed CSV: the quote that opens a field of this row is not closed"),
        (HEAD + '"a"b,c\n', "d:2: malformed CSV: ',' expected after '\"' (a quote inside a quoted field is written"),
        ("question,answer\ra,b\rc,d", "d:1: malformed CSV: a carriage return outside quotes: end lines with LF"),
        (HEAD.encode() + b"a,b\n\xff,c\n", "d:3: not UTF-8"),
        (HEAD.encode("utf-16"), "d:1: not UTF-8"),
        (HEAD.encode("utf-16-le"), "d:1: holds zero bytes"),
        (HEAD + "a,b\nc\0,d\n", "d:3: holds zero bytes"),
        ("question;answer\n1;2\n", "d:2: no field 'question'; fields there: question;answer"),
        ("question,anser\n1,2\n", "d:2: no field 'answer'; fields there: question, anser"),
        ("id,question,answer\n7,a,b\n\n7,c,d\n", "d:4: the id '7' is at "),
        ("id,question,answer\n,a,b\n", "d:2: 'id' must be a text or an integer, holds \"\""),
    ],
)
def test_faults_of_csv_have_file_and_line(tmp_path, content, message):
    with pytest.raises(DatasetError) as caught:
        csv_items(tmp_path / "d", content)
    assert str(caught.value).startswith(str(tmp_path)) and message in str(caught.value)


@pytest.mark.parametrize("delimiter", ["", ",,", '"', "\n", "\r"])
def test_delimiters_that_cannot_be(toy_run, tmp_path, delimiter):
    toy_run["eval"]["general"]["dataset"] = {"_type": "csv", "file_path": "d", "delimiter": delimiter}
    with pytest.raises(ConfigError) as caught:
        config_from_mapping(toy_run, base_dir=tmp_path)
    (message,) = caught.value.faults
    assert message.startswith("eval.general.dataset.delimiter: must be one character, and no quote or line break")


NESTED = {
    "question": [{"role": "user", "turns": [1, None, 2.5]}, None],
    "answer": pyarrow.array([[("a", 1), ("b", None)], []], pyarrow.map_(pyarrow.string(), pyarrow.int32())),
    "half": pyarrow.array(np.array([0.5, 2], np.float16)),
    "vector": pyarrow.array([[1.0, 2.0], [3.0, 4.0]], pyarrow.list_(pyarrow.float32(), 2)),
    "label": pyarrow.array(["yes", "no"]).dictionary_encode(),
    "large": pyarrow.array([2**64 - 1, 0], pyarrow.uint64()),
    "flag": [True, None],
    "nothing": pyarrow.nulls(2),
    "text": pyarrow.array(["é", ""], pyarrow.large_string()),
}


def test_parquet_rows_become_items_of_plain_values(tmp_path):
    items = parquet_items(tmp_path / "d", NESTED)
    assert [item.id for item in items] == ["0", "1"]
    assert items[0].input_obj == {"role": "user", "turns": [1, None, 2.5]}
    assert items[0].full_dataset_entry == {
        "question": items[0].input_obj,
        "answer": {"a": 1, "b": None},
        "half": 0.5,
        "vector": [1.0, 2.0],
        "label": "yes",
        "large": 2**64 - 1,
        "flag": True,
        "nothing": None,
        "text": "é",
    }
    assert type(items[0].full_dataset_entry["half"]) is float
    assert (items[1].input_obj, items[1].expected_output_obj) == (None, {})


TOOLS = [
    {"type": "function", "function": {"name": "a", "parameters": {"properties": {"x": {"type": "string"}}}}},
    {"type": "function", "function": {"name": "b", "parameters": {"properties": {"y": {"type": "integer"}}}}},
]
CALLS = [
    {"role": "assistant", "calls": [{"function": {"name": "a", "arguments": {"x": "1"}}}]},
    {"role": "user", "calls": [{"function": {"name": "b", "arguments": {"y": 2, "z": [1, None]}}}]},
]


def test_nulls_that_arrow_adds_to_tools_and_their_calls_are_left_out(tmp_path):
    table = pyarrow.table({"question": [TOOLS, TOOLS], "answer": CALLS, "about": [{"a": 1}, {"b": 2}]})
    assert table["question"].to_pylist() != [TOOLS, TOOLS]  # each has the keys of both
    items = parquet_items(tmp_path / "d", table)
    assert [item.input_obj for item in items] == [TOOLS, TOOLS]
    assert [item.expected_output_obj for item in items] == CALLS
    assert items[0].full_dataset_entry["about"] == {"a": 1, "b": None}  # which is no tool
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps({"question": {"function": {"arguments": {"x": None}}}, "answer": ""}))
    assert load_jsonl(rows)[0].input_obj == {"function": {"arguments": {"x": None}}}  # the row has it


def test_parquet_fields_are_mapped(tmp_path):
    structure = DatasetStructureConfig(question_key="q", answer_key=None)
    (item,) = parquet_items(tmp_path / "d", {"n": [3], "q": ["x"]}, id_key="n", structure=structure)
    assert (item.id, item.input_obj, item.expected_output_obj) == ("3", "x", None)


BAD_TEXT = pyarrow.StringArray.from_buffers(
    2, pyarrow.py_buffer(b"\0\0\0\0\1\0\0\0\2\0\0\0"), pyarrow.py_buffer(b"a\xff")
)


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"question": [], "answer": []}, "d: the dataset is empty"),
        ({"question": ["a"], "anser": ["b"]}, "d:row 1: no field 'answer'; fields there: question, anser"),
        ({"id": [1, 2, 1], "question": [1] * 3, "answer": [1] * 3}, "d:row 3: the id '1' is at "),
        ({"id": [1, None], "question": [1] * 2, "answer": [1] * 2}, "d:row 2: 'id' must be a text or an integer, hol"),
        ({"question": [1.0, float("nan")]}, "d:row 2: column 'question': nan is not a finite number"),
        ({"question": [{"x": [1.0, float("-inf")]}]}, "d:row 1: column 'question': -inf is not a finite number"),
        ({"question": BAD_TEXT}, "d:row 2: column 'question': not UTF-8"),
        ({"image": [b"x"]}, "d: column 'image' holds binary"),
        ({"at": [datetime.datetime(2020, 1, 1)]}, "d: column 'at' holds timestamp[us]"),
        ({"at": [datetime.date(2020, 1, 1)]}, "d: column 'at' holds date32[day]"),
        ({"at": [datetime.time(1)]}, "d: column 'at' holds time64[us]"),
        ({"price": [decimal.Decimal("1.5")]}, "d: column 'price' holds decimal128(2, 1)"),
        ({"a": [{"b": [{"c": b"x"}]}]}, "d: column 'a': its field 'b': its field 'c' holds binary"),
        ({"m": pyarrow.array([[(1, 2)]], pyarrow.map_("int32", "int32"))}, "d: column 'm' holds map<int32, int32"),
        (
            {"m": pyarrow.array([[("a", 2), ("a", 3)]], pyarrow.map_("string", "int32"))},
            "d:row 1: column 'm': the key 'a' is there twice",
        ),
        (
            pyarrow.Table.from_arrays([pyarrow.array([1]), pyarrow.array([2])], names=["a", "a"]),
            "d: column 'a' is there twice",
        ),
    ],
)
def test_faults_of_parquet_have_file_and_row(tmp_path, columns, message):
    with pytest.raises(DatasetError) as caught:
        parquet_items(tmp_path / "d", columns)
    assert str(caught.value).startswith(str(tmp_path)) and message in str(caught.value)


def test_corrupt_parquet_files(tmp_path):
    whole, path = tmp_path / "whole", tmp_path / "d"
    table = pyarrow.table({"question": ["abc"] * 100, "answer": list(range(100))})
    pyarrow.parquet.write_table(table, whole, write_page_checksum=True, compression="none")
    content = whole.read_bytes()
    flipped = content.replace(b"abc", b"abd", 1)
    assert flipped != content
    for broken in (b"", b"PAR1", b'{"question": 1}\n' * 10, content[:-10], content[: len(content) // 2], flipped):
        path.write_bytes(broken)
        with pytest.raises(DatasetError, match="d: not a parquet file that can be read: "):
            list(read_parquet(path))


def test_without_pyarrow_the_extra_is_named(tmp_path, monkeypatch):
    (tmp_path / "d").write_bytes(b"PAR1")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(DatasetError, match=r'd: reading parquet files needs pyarrow: pip install "jaxft\[parquet\]"'):
        list(read_parquet(tmp_path / "d"))


@pytest.mark.parametrize("read", [read_csv, read_parquet])
def test_a_missing_file_is_named(tmp_path, read):
    with pytest.raises(DatasetError, match=r"nowhere: cannot be read: No such file"):
        list(read(tmp_path / "nowhere"))


def test_a_configuration_chooses_them(toy_run, tmp_path):
    (tmp_path / "d.csv").write_text("question,answer\na,b\n")
    (tmp_path / "d.tsv").write_text("question\tanswer\na\tb\n")
    pyarrow.parquet.write_table(pyarrow.table({"question": ["a"], "answer": ["b"]}), tmp_path / "d.parquet")

    async def examples(config, directory):
        async with ComponentBuilder(config, directory, Console()) as builder:
            return await builder.get_dataset()

    for name in ("d.csv", "d.tsv", "d.parquet"):
        toy_run["eval"]["general"]["dataset"] = dataset_for_file(name)
        config = config_from_mapping(toy_run, base_dir=tmp_path)
        with RunDirectory.create(tmp_path / name.replace(".", "_")) as directory:
            (item,) = asyncio.run(examples(config, directory))
        assert (item.input_obj, item.expected_output_obj) == ("a", "b")
        (tmp_path / "copy.yml").write_text(resolved_yaml(config))
        assert load_config(tmp_path / "copy.yml") == config
