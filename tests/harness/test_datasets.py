import json

import pytest

from jaxft.errors import DatasetError
from jaxft.harness.data_models import EvalInputItem
from jaxft.harness.datasets import (
    DatasetStructureConfig,
    JsonDatasetConfig,
    JsonlDatasetConfig,
    checked_items,
    dataset_for_file,
    file_items,
    load_jsonl,
    read_json,
    read_jsonl,
)

ROW = '{"question": "q", "answer": "a"}'


def jsonl_items(path, content, **options):
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    config = JsonlDatasetConfig(file_path=path, **options)
    return checked_items(file_items(config, read_jsonl(path)), str(path))


def json_items(path, content):
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return checked_items(file_items(JsonDatasetConfig(file_path=path), read_json(path)), str(path))


def test_rows_become_items(tmp_path):
    items = jsonl_items(
        tmp_path / "d", '{"id": 7, "question": 1, "answer": [2]}\n{"id": "x", "question": 3, "answer": 4}'
    )
    assert [(i.id, i.input_obj, i.expected_output_obj) for i in items] == [("7", 1, [2]), ("x", 3, 4)]
    assert items[0].full_dataset_entry == {"id": 7, "question": 1, "answer": [2]}


def test_byte_order_mark_crlf_blank_lines_and_line_separators_in_strings(tmp_path):
    content = b"\xef\xbb\xbf" + ROW.encode() + b"\r\n\r\n  \n" + '{"question": "a\u2028b", "answer": "é"}\r\n'.encode()
    items = jsonl_items(tmp_path / "d", content)
    assert [(i.id, i.input_obj) for i in items] == [("0", "q"), ("1", "a\u2028b")]


def test_fields_are_mapped(tmp_path):
    structure = DatasetStructureConfig(question_key=None, answer_key=None)
    (item,) = jsonl_items(tmp_path / "d", '{"n": 1}', id_key="n", structure=structure)
    assert (item.id, item.input_obj, item.expected_output_obj) == ("1", {"n": 1}, None)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (ROW + "\n{bad", "d:2: malformed JSON: Expecting property name enclosed in double quotes (column 2)"),
        (ROW + "\n{", "d:2: malformed JSON"),
        (ROW + ROW, "d:1: malformed JSON: more text after the object (column 33)"),
        ("[1]", "d:1: wants an object, {...}, holds [1]"),
        ("\n3", "d:2: wants an object, {...}, holds 3"),
        ('{"a": 1, "a": 2}', "d:1: the key 'a' is there twice"),
        ('{"question": {"b": 1, "b": 2}}', "d:1: the key 'b' is there twice"),
        ('{"a": NaN}', "d:1: NaN is not a finite number"),
        ('{"a": -Infinity}', "d:1: -Infinity is not a finite number"),
        ('{"a": 1e999}', "d:1: 1e999 is not a finite number"),
        ('{"question": 1, "anser": 2}', "d:1: no field 'answer'; fields there: question, anser: name the"),
        ('{"question": 1}', "structure.answer_key: null"),
        ("{}", "d:1: no field 'question'; fields there: none"),
        (ROW + '\n{"id": 1, "question": 1, "answer": 1}', "d:1: no field 'id'; fields there: question, answer"),
        ('{"id": 1.5, "question": 1, "answer": 1}', "d:1: 'id' must be a text or an integer, holds 1.5"),
        ('{"id": 1, "question": 1, "answer": 1}\n' * 2, "d:2: the id '1' is at "),
        ('{"id": 1, "question": 1, "answer": 1}\n{"id": "1", "question": 1, "answer": 1}', "d:2: the id '1' is at "),
        (b"\xef\xbb\xbf" + ROW.encode() + b"\r\n\r\n[]\r\n", "d:3: wants an object, {...}, holds []"),
        (ROW + "\n\ufeff" + ROW, "d:2: malformed JSON: "),
        ((ROW + "\n").encode() + '{"question": "é"}'.encode("latin-1"), "d:2: not UTF-8"),
        ("", "d: the dataset is empty"),
        (b'{"question": "\xff"}', "d:1: not UTF-8"),
        (ROW.encode("utf-16"), "d:1: not UTF-8"),
        (ROW.encode("utf-16-le"), "d:1: holds zero bytes"),
        ("\n\r\n", "d: the dataset is empty"),
        ("[" * 100_000, "d:1: malformed JSON: nested too deeply"),
        ('{"a": ' + "9" * 5000 + "}", "d:1: "),
    ],
)
def test_faults_of_jsonl_have_file_and_line(tmp_path, content, message):
    with pytest.raises(DatasetError) as caught:
        jsonl_items(tmp_path / "d", content)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{}", "d:1: wants a list of objects"),
        ("", "d:1: wants a list of objects"),
        ("[]", "d: the dataset is empty"),
        (f"[{ROW},\n3]", "d:2: wants an object, {...}, holds 3"),
        (f"[{ROW},\n{{bad}}]", "d:2: malformed JSON"),
        (f"[\n{ROW}\n{ROW}]", "d:3: wants ',' or ']' after an object"),
        (f"[\n{ROW},\n]", "d:3: malformed JSON"),
        (f"[{ROW}]\nx", "d:1: wants ',' or ']' after an object, and nothing after the list"),
        ('[\n{"a": 1,\n "a": 2}]', "d:2: the key 'a' is there twice"),
        ('[{"a": NaN}]', "d:1: NaN is not"),
        (f"[{ROW},\n{{}}]", "d:2: no field 'question'"),
        (b"[\n\xff]", "d:2: not UTF-8"),
        (f"[{ROW}]".encode("utf-16"), "d:1: not UTF-8"),
        (f"[\n{ROW}]".encode("utf-16-le"), "d:1: holds zero bytes"),
        ('\ufeff[\r\n{"id": 1, "question": 1, "answer": 1},\r\n\r\n{"id": 1}]', "d:4: the id '1' is at "),
        ('[\n{"id": 1, "question": 1, "answer": 1},\n\n' + ROW + "]", "d:4: no field 'id'; fields there: question"),
        ("[", "d:1: malformed JSON"),
    ],
)
def test_faults_of_json_have_file_and_line(tmp_path, content, message):
    with pytest.raises(DatasetError) as caught:
        json_items(tmp_path / "d", content)
    assert message in str(caught.value)


def test_json_lists_are_read(tmp_path):
    rows = [{"question": i, "answer": [{"x": i}]} for i in range(3)]
    for text in (
        json.dumps(rows),
        "\ufeff" + json.dumps(rows, indent=2),
        json.dumps(rows, indent=1).replace("\n", "\r\n"),
    ):
        assert [item.full_dataset_entry for item in json_items(tmp_path / "d", text)] == rows


@pytest.mark.parametrize(
    ("name", "section"),
    [
        ("a.jsonl", {"_type": "jsonl"}),
        ("a.ndjson", {"_type": "jsonl"}),
        ("a.b.JSON", {"_type": "json"}),
        ("a.csv", {"_type": "csv"}),
        ("a.tsv", {"_type": "csv", "delimiter": "\t"}),
        ("a.parquet", {"_type": "parquet"}),
    ],
)
def test_the_suffix_chooses_the_loader(tmp_path, name, section):
    path = tmp_path / name
    assert dataset_for_file(path) == dataset_for_file(str(path)) == {"file_path": str(path)} | section


@pytest.mark.parametrize("name", ["train", "train.jsonl.gz", "train.txt", ".csv"])
def test_other_suffixes_are_refused(name):
    with pytest.raises(ValueError, match=r"must end in one of \.jsonl, \.ndjson, \.json, \.csv, \.tsv, \.parquet"):
        dataset_for_file(name)


def test_load_jsonl_refuses_an_empty_file(tmp_path):
    (tmp_path / "d").touch()
    with pytest.raises(DatasetError, match="d: the dataset is empty"):
        load_jsonl(tmp_path / "d")


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(DatasetError, match=r"nowhere\.jsonl: cannot be read: No such file"):
        list(read_jsonl(tmp_path / "nowhere.jsonl"))


@pytest.mark.parametrize("items", [None, [], [1], [EvalInputItem(id="a", full_dataset_entry={})] * 2])
def test_what_a_loader_yields_is_checked(items):
    with pytest.raises(DatasetError, match="here: "):
        checked_items(items, "here")
