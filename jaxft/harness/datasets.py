"""Datasets in files: `json` (a list of objects), `jsonl` (one object per line) and `csv`; the rows of all datasets.

The configuration names the fields of a row with id, input and expected output; the workflow gets the whole row. If no
row has an id, rows are numbered from 0. Errors begin with file:line, or file:row N where a row has no line of its own.
`jaxft.harness.arrow_datasets` reads `parquet` and `huggingface`.
"""

import csv
import io
import json
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from jaxft.errors import DatasetError
from jaxft.files import STRICT_JSON, read_utf8
from jaxft.harness.config_types import ConfigModel, InputPath
from jaxft.harness.data_models import EvalInputItem
from jaxft.harness.registry import DatasetConfig


class DatasetStructureConfig(ConfigModel):
    """Names of the fields of a row with input and expected output."""

    question_key: str | None = "question"
    """Field of a row with the input that evaluators see; the agent gets the whole row, and the input as
    `jaxft.episode().input_obj`; null: the whole row is the input."""
    answer_key: str | None = "answer"
    """Field of a row with the expected output; null: none."""


class RowDatasetConfig(DatasetConfig):
    """Settings of all datasets of rows with named fields."""

    id_key: str = "id"
    """Field with a unique id; if no row has it, rows are numbered from 0."""
    structure: DatasetStructureConfig = DatasetStructureConfig()
    """Names of the fields with input and expected output."""


class FileDatasetConfig(RowDatasetConfig):
    """Settings of all datasets that are read from a file."""

    file_path: InputPath
    """File of examples, relative to the folder of the YAML file."""


class JsonlDatasetConfig(FileDatasetConfig, name="jsonl", factory="jaxft.harness.datasets:file_dataset"):
    """One JSON object per line; blank lines are skipped."""


class JsonDatasetConfig(FileDatasetConfig, name="json", factory="jaxft.harness.datasets:file_dataset"):
    """A file with one JSON list of objects."""


class CsvDatasetConfig(FileDatasetConfig, name="csv", factory="jaxft.harness.datasets:file_dataset"):
    """Rows of texts under a header with the column names; CSV has no types, so `1` and `true` are texts as well.

    Fields end with a comma, or with a tab if the name of the file ends in .tsv.
    """


TYPES = {".jsonl": "jsonl", ".ndjson": "jsonl", ".json": "json", ".csv": "csv", ".tsv": "csv", ".parquet": "parquet"}
"""The `_type` of a dataset by the suffix of its file."""


def dataset_for_file(path: str | Path) -> dict[str, str]:
    """Return the `dataset` section of a configuration for a file, chosen by its suffix.

    Raises:
        ValueError: the suffix is unknown.

    >>> dataset_for_file("data/train.tsv")
    {'_type': 'csv', 'file_path': 'data/train.tsv'}
    """
    suffix = Path(path).suffix.lower()
    if suffix not in TYPES:
        raise ValueError(f"{path}: the name of a dataset must end in one of {', '.join(TYPES)}")
    return {"_type": TYPES[suffix], "file_path": str(path)}


class DatasetRow(NamedTuple):
    """A row of a dataset and its position, file:line."""

    place: str
    fields: dict[str, Any]


def read_jsonl(path: Path) -> Iterator[DatasetRow]:
    """Read the rows of a JSONL file: UTF-8, with or without a byte order mark, lines ended by LF or CRLF.

    Raises:
        DatasetError: the file is missing or not UTF-8, or a row is malformed JSON, is not an object, repeats a key, or
            contains NaN or an infinity.
    """
    for number, line in enumerate(_text(path).split("\n"), start=1):
        if line.strip():
            yield _row(f"{path}:{number}", _parse_json(line, path, number))


def read_json(path: Path) -> Iterator[DatasetRow]:
    """Read the rows of a JSON file, one list of objects; encoding and errors are those of `read_jsonl`."""
    values = _parse_json(_text(path), path)
    if not isinstance(values, list):
        raise DatasetError(f"{path}:1: wants a list of objects: [{{...}}, ...]")
    for number, value in enumerate(values, start=1):
        yield _row(f"{path}:row {number}", value)


def read_object(path: Path) -> Iterator[DatasetRow]:
    """Read the one row of a JSON file that holds an object; encoding and errors are those of `read_jsonl`."""
    yield _row(str(path), _parse_json(_text(path), path))


def read_csv(path: Path) -> Iterator[DatasetRow]:
    """Read the rows of a CSV file: UTF-8, with or without a byte order mark, lines ended by LF or CRLF.

    A field in double quotes may contain delimiters, line breaks and doubled quotes. Blank lines are skipped.

    Raises:
        DatasetError: the file is missing, is not UTF-8 or has no header; a column name is empty or repeated; a row has
            more or fewer fields than the header; or a quote is not closed.
    """
    delimiter = "\t" if path.suffix.lower() == ".tsv" else ","
    rows = _csv_rows(path, delimiter)
    if not rows:
        raise DatasetError(f"{path}:1: wants a header: a first line with the names of the columns")
    (first, header), *others = rows
    for number, name in enumerate(header, start=1):
        if not name.strip():
            raise DatasetError(f"{path}:{first}: column {number} of the header has no name")
        if name in header[: number - 1]:
            raise DatasetError(f"{path}:{first}: the column '{name}' is there twice")
    for line, fields in others:
        if len(fields) != len(header):
            raise DatasetError(
                f"{path}:{line}: {len(fields)} fields under a header of {len(header)}: "
                f"put a field that holds {delimiter!r} or a line break in double quotes"
            )
        yield DatasetRow(f"{path}:{line}", dict(zip(header, fields, strict=True)))


def _csv_rows(path: Path, delimiter: str) -> list[tuple[int, list[str]]]:
    """Return every row that is not blank, with the number of its last line."""
    reader = csv.reader(io.StringIO(_text(path), newline=""), delimiter=delimiter, strict=True)
    limit = csv.field_size_limit(2**31 - 1)  # that of the module, 131072 characters, is global
    try:
        return [
            (reader.line_num, fields) for fields in reader if fields and not (len(fields) == 1 and fields[0].isspace())
        ]
    except csv.Error as error:
        raise DatasetError(f"{path}:{reader.line_num}: malformed CSV: {error}") from None
    finally:
        csv.field_size_limit(limit)


READERS: dict[type[FileDatasetConfig], Callable[[Path], Iterator[DatasetRow]]] = {
    JsonlDatasetConfig: read_jsonl,
    JsonDatasetConfig: read_json,
    CsvDatasetConfig: read_csv,
}
"""The function that reads the rows of a file, by the class of its dataset."""


async def file_dataset(config: FileDatasetConfig, builder: Any) -> AsyncIterator[list[EvalInputItem]]:
    """Yield the examples of a file."""
    yield file_items(config)


def file_items(config: FileDatasetConfig) -> list[EvalInputItem]:
    """Read the examples of a file; errors are those of its reader and of `row_items`."""
    return row_items(config, READERS[type(config)](config.file_path), str(config.file_path))


def load_jsonl(path: Path) -> list[EvalInputItem]:
    """Load the examples of a JSONL file whose rows have `id`, `question` and `answer`, like the dataset `jsonl`."""
    return file_items(JsonlDatasetConfig(file_path=path))


def row_items(config: RowDatasetConfig, rows: Iterable[DatasetRow], source: str) -> list[EvalInputItem]:
    """Convert rows to examples.

    Args:
        config: names of the fields.
        rows: the rows.
        source: name of the dataset, for messages.

    Raises:
        DatasetError: there is no row, a field that the config names is missing, or an id is repeated or is neither a
            text nor an integer.
    """
    listed = list(rows)
    has_ids = any(config.id_key in row.fields for row in listed)
    question, answer = config.structure.question_key, config.structure.answer_key
    items, places = list[EvalInputItem](), dict[str, str]()
    for index, row in enumerate(listed):
        identity = _id(row, config.id_key) if has_ids else str(index)
        if identity in places:
            raise DatasetError(f"{row.place}: the {config.id_key} '{identity}' is at {places[identity]} already")
        places[identity] = row.place
        items.append(
            EvalInputItem(
                id=identity,
                input_obj=row.fields if question is None else _field(row, question),
                expected_output_obj=None if answer is None else _field(row, answer, NO_ANSWERS),
                full_dataset_entry=row.fields,
            )
        )
    return checked_items(items, source)


def checked_items(items: Any, source: str) -> list[EvalInputItem]:
    """Return the examples that a dataset loader yielded, checked: at least one, with unique ids.

    Raises:
        DatasetError: there is no example, an id is repeated, or an item is not an `EvalInputItem`.
    """
    if not isinstance(items, list) or not all(isinstance(item, EvalInputItem) for item in items):
        raise DatasetError(f"{source}: a dataset loader must yield a list of EvalInputItem")
    if not items:
        raise DatasetError(f"{source}: the dataset is empty")
    identity, count = Counter(item.id for item in items).most_common(1)[0]
    if count > 1:
        raise DatasetError(f"{source}: the id '{identity}' is there twice")
    return items


def _id(row: DatasetRow, key: str) -> str:
    value = _field(row, key)
    if isinstance(value, bool) or not isinstance(value, str | int) or value == "":
        raise DatasetError(f"{row.place}: '{key}' must be a text or an integer, holds {json.dumps(value)[:50]}")
    return str(value)


NO_ANSWERS = ": name the one with the answer in structure.answer_key, or set structure.answer_key: null for none"


def _field(row: DatasetRow, key: str, way_out: str = "") -> Any:
    if key not in row.fields:
        present = ", ".join(row.fields) or "none"
        raise DatasetError(f"{row.place}: no field '{key}'; fields there: {present}{way_out}")
    return row.fields[key]


def _row(place: str, value: Any) -> DatasetRow:
    if not isinstance(value, dict):
        raise DatasetError(f"{place}: wants an object, {{...}}, holds {json.dumps(value)[:50]}")
    return DatasetRow(place, value)


def _text(path: Path) -> str:
    try:
        return read_utf8(path)
    except ValueError as error:
        raise DatasetError(str(error)) from None


def _parse_json(text: str, path: Path, line: int | None = None) -> Any:
    """Return the value of strict JSON that begins at a line of a file, or that is the whole file."""
    place = str(path) if line is None else f"{path}:{line}"
    try:
        return STRICT_JSON.decode(text)
    except json.JSONDecodeError as error:
        place = f"{path}:{(line or 1) + error.lineno - 1}"
        raise DatasetError(f"{place}: malformed JSON: {error.msg} (column {error.colno})") from None
    except RecursionError:
        raise DatasetError(f"{place}: malformed JSON: nested too deeply") from None
    except ValueError as error:
        raise DatasetError(f"{place}: {error}") from None
