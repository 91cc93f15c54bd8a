"""Parquet files and datasets of Hugging Face as examples: plain values, nulls that arrow adds, and faults by row."""

import asyncio
import datetime
import decimal
import json
import sys

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from jaxft.errors import DatasetError
from jaxft.harness.arrow_datasets import HuggingFaceDatasetConfig, ParquetDatasetConfig, read_hub, read_parquet
from jaxft.harness.builder import Builder
from jaxft.harness.config import config_from_mapping
from jaxft.harness.datasets import dataset_for_file, file_items, load_jsonl, row_items
from jaxft.runs.console import Console
from jaxft.runs.directory import RunDirectory


def parquet_items(path, columns):
    pyarrow.parquet.write_table(columns if isinstance(columns, pyarrow.Table) else pyarrow.table(columns), path)
    return file_items(ParquetDatasetConfig(file_path=path))


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
        ({"at": [datetime.datetime(2020, 1, 1)]}, "d:row 1: column 'at': holds timestamp[us]"),
        ({"price": [decimal.Decimal("1.5")]}, "d:row 1: column 'price': holds decimal128(2, 1)"),
        ({"a": [{"b": [{"c": b"x"}]}]}, "d:row 1: column 'a': holds binary"),
        (
            {"m": pyarrow.array([[(1, 2)]], pyarrow.map_("int32", "int32"))},
            "d:row 1: column 'm': holds map<int32, int32",
        ),
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
    with pytest.raises(DatasetError, match=r'd: ModuleNotFoundError: .*pip install "jaxft\[parquet\]"'):
        list(read_parquet(tmp_path / "d"))


def test_a_configuration_chooses_them(toy_run, tmp_path):
    pyarrow.parquet.write_table(pyarrow.table({"question": ["a"], "answer": ["b"]}), tmp_path / "d.parquet")
    toy_run["eval"]["general"]["dataset"] = dataset_for_file("d.parquet")
    config = config_from_mapping(toy_run, base_dir=tmp_path)

    async def examples(directory):
        async with Builder(config, directory, Console()) as builder:
            return await builder.get_dataset()

    with RunDirectory.create(tmp_path / "run") as directory:
        (item,) = asyncio.run(examples(directory))
    assert (item.input_obj, item.expected_output_obj) == ("a", "b")
    (tmp_path / "d.parquet").unlink()
    with pytest.raises(DatasetError, match=r"d\.parquet: cannot be read: No such file"):
        list(read_parquet(tmp_path / "d.parquet"))


ROWS = [{"question": f"{n}+1", "answer": str(n + 1), "about": {"terms": [n, 1]}} for n in range(10)]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Folders of one split, of several, and of files."""
    datasets = pytest.importorskip("datasets")
    folder = tmp_path_factory.mktemp("hub")
    rows = datasets.Dataset.from_list(ROWS)
    rows.save_to_disk(str(folder / "one"))
    datasets.DatasetDict({"train": rows, "test": rows.select([3])}).save_to_disk(str(folder / "several"))
    (folder / "files").mkdir()
    rows.to_parquet(str(folder / "files" / "train.parquet"))
    rows.select([3]).to_parquet(str(folder / "files" / "test.parquet"))
    for name in ("table", "lines"):
        (folder / name).mkdir()
    rows.remove_columns("about").to_csv(str(folder / "table" / "train.csv"), index=False)
    rows.to_json(str(folder / "lines" / "train.jsonl"))
    return folder


def hub_items(**options):
    config = HuggingFaceDatasetConfig(**options)
    return row_items(config, read_hub(config), config.path)


@pytest.mark.envs
@pytest.mark.parametrize(
    ("name", "split", "rows"),
    [
        ("one", "train", ROWS),
        ("table", "train", [{"question": row["question"], "answer": int(row["answer"])} for row in ROWS]),
        ("lines", "train", ROWS),
        *(
            (name, *part)
            for name in ("several", "files")
            for part in (("train", ROWS), ("test", ROWS[3:4]), ("train[2:4]", ROWS[2:4]), ("train[:20%]", ROWS[:2]))
        ),
    ],
)
def test_rows_of_a_split_have_the_types_of_json(folders, name, split, rows):
    found = [item.full_dataset_entry for item in hub_items(path=str(folders / name), split=split)]
    assert found == rows


@pytest.mark.envs
@pytest.mark.parametrize(
    ("name", "options", "told"),
    [
        ("several", {"split": "tes"}, "test"),
        ("files", {"split": "dev"}, "'test'"),
        ("one", {"split": "test"}, "train"),
        ("one", {"name": "main"}, "'name'"),
        ("several", {"split": "train[2:"}, "train[2:"),
        ("files", {"name": "main"}, "main"),
        ("not_there", {}, "not_there"),
        (
            "one",
            {"structure": {"question_key": "prompt"}},
            "[train]:row 1: no field 'prompt'; fields there: question, answer",
        ),
    ],
)
def test_what_is_missing_is_named(folders, name, options, told):
    with pytest.raises(DatasetError) as raised:
        hub_items(path=str(folders / name), **options)
    assert told in str(raised.value) and name in str(raised.value)


@pytest.mark.envs
def test_bytes_have_no_form_in_json(tmp_path):
    datasets = pytest.importorskip("datasets")
    datasets.Dataset.from_dict({"question": [b"\xff"]}).save_to_disk(str(tmp_path / "bytes"))
    with pytest.raises(DatasetError, match="question"):
        hub_items(path=str(tmp_path / "bytes"), structure={"answer_key": None})


def test_without_the_library_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(DatasetError, match=r"jaxft\[huggingface\]"):
        read_hub(HuggingFaceDatasetConfig(path="some/rows"))
