"""Files of JSON lines, JSON lists and CSV as examples; the suffix chooses, and a fault has file and line."""

import csv
import io

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxft.errors import DatasetError
from jaxft.harness.data_models import EvalInputItem
from jaxft.harness.datasets import (
    CsvDatasetConfig,
    DatasetStructureConfig,
    JsonDatasetConfig,
    JsonlDatasetConfig,
    checked_items,
    dataset_for_file,
    file_items,
    load_jsonl,
    read_csv,
)

ROW = '{"question": "q", "answer": "a"}'
HEAD = "question,answer\n"
KINDS = {"jsonl": JsonlDatasetConfig, "json": JsonDatasetConfig, "csv": CsvDatasetConfig}


def read(kind, path, content, **options):
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return file_items(KINDS[kind](file_path=path, **options))


def parts(items):
    return [(item.id, item.input_obj, item.expected_output_obj) for item in items]


@pytest.mark.parametrize(
    ("kind", "content", "expected"),
    [
        (
            "jsonl",
            f'{{"id": 7, {ROW[1:]}\n{{"id": "x", "question": 3, "answer": [4]}}',
            [("7", "q", "a"), ("x", 3, [4])],
        ),
        (
            "jsonl",
            f'\ufeff{ROW}\r\n\r\n  \n{{"question": "a\u2028b", "answer": "é"}}\r\n',
            [("0", "q", "a"), ("1", "a\u2028b", "é")],
        ),
        ("json", f"\ufeff[\r\n {ROW},\r\n{ROW}]\r\n", [("0", "q", "a"), ("1", "q", "a")]),
        (
            "csv",
            'id,question,answer,level\nx,"a ""b"", c",1e3,\ny,é,true,2\n',
            [("x", 'a "b", c', "1e3"), ("y", "é", "true")],
        ),
        (
            "csv",
            '\ufeff\r\nquestion,answer\r\n\r\n  \r\n"a\r\n\r\nb",1\r\n\n"c\nd","\u2028"',
            [("0", "a\r\n\r\nb", "1"), ("1", "c\nd", "\u2028")],
        ),
    ],
)
def test_rows_become_items(tmp_path, kind, content, expected):
    """With a byte order mark or without, lines ended by LF or CRLF, between blank lines."""
    assert parts(read(kind, tmp_path / "d", content)) == expected


def test_fields_are_mapped_and_an_item_has_its_whole_row(tmp_path):
    structure = DatasetStructureConfig(question_key=None, answer_key=None)
    (item,) = read("jsonl", tmp_path / "d", '{"n": 1}', id_key="n", structure=structure)
    assert parts([item]) == [("1", {"n": 1}, None)] and item.full_dataset_entry == {"n": 1}
    (item,) = read("csv", tmp_path / "d.TSV", "n\tt\n1\tx\n", id_key="n", structure=structure)
    assert parts([item]) == [("1", {"n": "1", "t": "x"}, None)]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (ROW + "\n{bad", "d:2: malformed JSON: Expecting property name enclosed in double quotes (column 2)"),
        (ROW + ROW, "d:1: malformed JSON: Extra data (column 33)"),
        ("\n3", "d:2: wants an object, {...}, holds 3"),
        ('{"question": {"b": 1, "b": 2}}', "d:1: the key 'b' is there twice"),
        ('{"a": NaN}', "d:1: NaN is not a finite number"),
        ('{"a": 1e999}', "d:1: 1e999 is not a finite number"),
        ('{"question": 1, "anser": 2}', "d:1: no field 'answer'; fields there: question, anser: name the"),
        ('{"question": 1}', "structure.answer_key: null"),
        ("{}", "d:1: no field 'question'; fields there: none"),
        (ROW + '\n{"id": 1, "question": 1, "answer": 1}', "d:1: no field 'id'; fields there: question, answer"),
        ('{"id": 1.5, "question": 1, "answer": 1}', "d:1: 'id' must be a text or an integer, holds 1.5"),
        ('{"id": 1, "question": 1, "answer": 1}\n{"id": "1", "question": 1, "answer": 1}', "d:2: the id '1' is at "),
        (ROW + "\n\ufeff" + ROW, "d:2: malformed JSON: "),
        ((ROW + "\n").encode() + '{"question": "é"}'.encode("latin-1"), "d:2: not UTF-8"),
        (ROW.encode("utf-16"), "d:1: not UTF-8"),
        (ROW.encode("utf-16-le"), "d:1: holds zero bytes"),
        ("\n\r\n", "d: the dataset is empty"),
        ("[" * 100_000, "d:1: malformed JSON: nested too deeply"),
        ('{"a": ' + "9" * 5000 + "}", "d:1: "),
    ],
)
def test_faults_of_jsonl_have_file_and_line(tmp_path, content, message):
    with pytest.raises(DatasetError) as caught:
        read("jsonl", tmp_path / "d", content)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{}", "d:1: wants a list of objects"),
        ("", "d:1: malformed JSON"),
        ("[]", "d: the dataset is empty"),
        (f"[{ROW},\n3]", "d:row 2: wants an object, {...}, holds 3"),
        (f"[\n{ROW}\n{ROW}]", "d:3: malformed JSON: Expecting ',' delimiter"),
        ('[\n{"a": 1,\n "a": 2}]', "d: the key 'a' is there twice"),
        (f"[{ROW},\n{{}}]", "d:row 2: no field 'question'"),
        (b"[\n\xff]", "d:2: not UTF-8"),
    ],
)
def test_faults_of_json_have_file_and_line_or_row(tmp_path, content, message):
    with pytest.raises(DatasetError) as caught:
        read("json", tmp_path / "d", content)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("\n\r\n", "d:1: wants a header"),
        (HEAD, "d: the dataset is empty"),
        ("\na,b,a\n", "d:2: the column 'a' is there twice"),
        ("a, \n", "d:1: column 2 of the header has no name"),
        (HEAD + '"q\nq",1\nx\n', "d:4: 1 fields under a header of 2"),
        (HEAD + "a,b,\n", "d:2: 3 fields under a header of 2: put a field that holds ',' or a line break in"),
        (HEAD + 'a,b\n"c,d\n\ne,f\n', "d:5: malformed CSV: unexpected end of data"),
        (HEAD + '"a"b,c\n', "d:2: malformed CSV: "),
        (HEAD.encode() + b"a,b\n\xff,c\n", "d:3: not UTF-8"),
        ("question;answer\n1;2\n", "d:2: no field 'question'; fields there: question;answer"),
        ("id,question,answer\n7,a,b\n\n7,c,d\n", "d:4: the id '7' is at "),
        ("id,question,answer\n,a,b\n", "d:2: 'id' must be a text or an integer, holds \"\""),
    ],
)
def test_faults_of_csv_have_file_and_line(tmp_path, content, message):
    with pytest.raises(DatasetError) as caught:
        read("csv", tmp_path / "d", content)
    assert str(caught.value).startswith(str(tmp_path)) and message in str(caught.value)


def test_rows_of_empty_texts_are_no_blank_lines(tmp_path):
    (tmp_path / "one").write_text('a\n""\n\nx\n')
    (tmp_path / "tabs.tsv").write_text("a\tb\n\t\n\n")
    assert [row.fields for row in read_csv(tmp_path / "one")] == [{"a": ""}, {"a": "x"}]
    assert [row.fields for row in read_csv(tmp_path / "tabs.tsv")] == [{"a": "", "b": ""}]


def test_long_csv_fields_are_read_and_the_limit_of_the_csv_module_stays(tmp_path):
    limit = csv.field_size_limit()
    (item,) = read("csv", tmp_path / "d", HEAD + "q" * 300_000 + ",a")
    assert len(item.input_obj) == 300_000 and csv.field_size_limit() == limit


@given(st.lists(st.tuples(*[st.text(st.characters(codec="utf-8", exclude_characters="\0"))] * 2), min_size=1))
def test_what_the_csv_module_writes_is_read_back(tmp_path_factory, rows):
    text = io.StringIO(newline="")
    csv.writer(text, quoting=csv.QUOTE_ALL).writerows([("a", "b"), *rows])
    path = tmp_path_factory.mktemp("csv") / "d"
    path.write_bytes(text.getvalue().encode())
    assert [tuple(row.fields.values()) for row in read_csv(path)] == rows


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("a.jsonl", "jsonl"),
        ("a.ndjson", "jsonl"),
        ("a.b.JSON", "json"),
        ("a.csv", "csv"),
        ("a.tsv", "csv"),
        ("a.parquet", "parquet"),
    ],
)
def test_the_suffix_chooses_the_loader(tmp_path, name, kind):
    path = tmp_path / name
    assert dataset_for_file(path) == dataset_for_file(str(path)) == {"file_path": str(path), "_type": kind}


@pytest.mark.parametrize("name", ["train", "train.jsonl.gz", "train.txt", ".csv"])
def test_other_suffixes_are_refused(name):
    with pytest.raises(ValueError, match=r"must end in one of \.jsonl, \.ndjson, \.json, \.csv, \.tsv, \.parquet"):
        dataset_for_file(name)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(DatasetError, match=r"nowhere\.jsonl: cannot be read: No such file"):
        load_jsonl(tmp_path / "nowhere.jsonl")


@pytest.mark.parametrize("items", [None, [], [1], [EvalInputItem(id="a", full_dataset_entry={})] * 2])
def test_what_a_loader_yields_is_checked(items):
    with pytest.raises(DatasetError, match="here: "):
        checked_items(items, "here")
