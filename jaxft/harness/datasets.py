"""Datasets in JSON files: `json` (a list of objects) and `jsonl` (one object per line); errors begin with file:line.

The configuration names the fields of a row with id, input and expected output; the workflow gets the whole row. If no
row has an id, rows are numbered from 0. `jaxft.harness.table_datasets` reads tables (`csv`, `parquet`).
"""

import hashlib
import json
from collections.abc import AsyncIterator, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import Field

from jaxft.errors import DatasetError
from jaxft.files import STRICT_JSON
from jaxft.harness.config_types import ConfigModel, InputPath
from jaxft.harness.data_models import EvalInputItem
from jaxft.harness.registry import DatasetConfig, register_dataset_loader


class DatasetStructureConfig(ConfigModel):
    """Names of the fields of a row with input and expected output."""

    question_key: str | None = Field(
        default="question",
        description="Field of a row with the input that evaluators see; the agent gets the whole row, and the input as "
        "`jaxft.episode().input_obj`; null: the whole row is the input.",
    )
    answer_key: str | None = Field(default="answer", description="Field of a row with the expected output; null: none.")


class RowDatasetConfig(DatasetConfig):
    """Settings of all datasets of rows with named fields."""

    id_key: str = Field(default="id", description="Field with a unique id; if no row has it, rows are numbered from 0.")
    structure: DatasetStructureConfig = Field(
        default=DatasetStructureConfig(), description="Names of the fields with input and expected output."
    )


class FileDatasetConfig(RowDatasetConfig):
    """Settings of all datasets that are read from a file."""

    file_path: InputPath = Field(description="File of examples, relative to the folder of the YAML file.")


class JsonlDatasetConfig(FileDatasetConfig, name="jsonl"):
    """One JSON object per line; blank lines are skipped."""


class JsonDatasetConfig(FileDatasetConfig, name="json"):
    """A file with one JSON list of objects."""


def dataset_for_file(path: str | Path) -> dict[str, str]:
    """Return the `dataset` section of a configuration for a file, chosen by its suffix.

    Raises:
        ValueError: the suffix is unknown.

    >>> dataset_for_file("data/train.tsv")
    {'_type': 'csv', 'file_path': 'data/train.tsv', 'delimiter': '\\t'}
    """
    types = {".jsonl": "jsonl", ".ndjson": "jsonl", ".json": "json"}
    types |= {".csv": "csv", ".tsv": "csv", ".parquet": "parquet"}
    suffix = Path(path).suffix.lower()
    if suffix not in types:
        raise ValueError(f"{path}: the name of a dataset must end in one of {', '.join(types)}")
    return {"_type": types[suffix], "file_path": str(path)} | ({"delimiter": "\t"} if suffix == ".tsv" else {})


class Row(NamedTuple):
    """A row of a dataset and its position, file:line."""

    place: str
    fields: dict[str, Any]


@register_dataset_loader(config_type=JsonlDatasetConfig)
async def jsonl(config: JsonlDatasetConfig, builder: Any) -> AsyncIterator[list[EvalInputItem]]:
    """Yield the examples of a JSONL file."""
    yield file_items(config, read_jsonl(config.file_path))


@register_dataset_loader(config_type=JsonDatasetConfig)
async def json_list(config: JsonDatasetConfig, builder: Any) -> AsyncIterator[list[EvalInputItem]]:
    """Yield the examples of a JSON file."""
    yield file_items(config, read_json(config.file_path))


def read_jsonl(path: Path) -> Iterator[Row]:
    """Read the rows of a JSONL file: UTF-8, with or without a byte order mark, lines ended by LF or CRLF.

    Raises:
        DatasetError: the file is missing or not UTF-8, or a row is malformed JSON, is not an object, repeats a key, or
            contains NaN or an infinity.
    """
    for number, text in enumerate(decoded_lines(path), start=1):
        place = f"{path}:{number}"
        if text.strip():
            yield Row(place, _object(_parsed(text, place), place))


def read_json(path: Path) -> Iterator[Row]:
    """Read the rows of a JSON file, one list of objects; encoding and errors are those of `read_jsonl`."""
    text = "\n".join(decoded_lines(path))
    end = _skip_space(text, 0)
    if text[end : end + 1] != "[":
        raise DatasetError(f"{path}:1: wants a list of objects: [{{...}}, ...]")
    if text[(first := _skip_space(text, end + 1)) : first + 1] == "]":
        return
    separator, line, counted = ",", 1, 0
    while separator == ",":
        start = _skip_space(text, end + 1)
        line, counted = line + text.count("\n", counted, start), start
        place = f"{path}:{line}"
        value, end = _parsed_at(text, start, place)
        yield Row(place, _object(value, place))
        end = _skip_space(text, end)
        separator = text[end : end + 1]
    if separator != "]" or text[end + 1 :].strip():
        line = text.count("\n", 0, end) + 1
        raise DatasetError(f"{path}:{line}: wants ',' or ']' after an object, and nothing after the list")


def file_bytes(path: Path) -> bytes:
    """Read the content of a file.

    Raises:
        DatasetError: it cannot be read.
    """
    try:
        return path.read_bytes()
    except OSError as error:
        raise DatasetError(f"{path}: cannot be read: {error.strerror}") from None


def decoded_lines(path: Path) -> Iterator[str]:
    """Read the lines of a UTF-8 file, without line feeds and byte order mark.

    Raises:
        DatasetError: the file cannot be read, or is not UTF-8.
    """
    for number, line in enumerate(file_bytes(path).split(b"\n"), start=1):
        try:
            # After the first line a byte order mark is an ordinary character, which JSON refuses.
            text = line.decode("utf-8-sig" if number == 1 else "utf-8")
        except UnicodeDecodeError:
            raise DatasetError(f"{path}:{number}: not UTF-8: convert the file") from None
        if "\0" in text:
            raise DatasetError(f"{path}:{number}: holds zero bytes, as UTF-16 does: convert the file to UTF-8")
        yield text


def load_jsonl(path: Path) -> list[EvalInputItem]:
    """Load the examples of a JSONL file whose rows have `id`, `question` and `answer`, like the dataset `jsonl`."""
    config = JsonlDatasetConfig(file_path=path)
    return file_items(config, read_jsonl(config.file_path))


def file_items(config: FileDatasetConfig, rows: Iterable[Row]) -> list[EvalInputItem]:
    """Convert the rows of a file to examples; errors are those of `row_items`."""
    return row_items(config, rows, str(config.file_path))


def row_items(config: RowDatasetConfig, rows: Iterable[Row], source: str) -> list[EvalInputItem]:
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
    if not listed:
        raise DatasetError(f"{source}: the dataset is empty")
    has_ids = any(config.id_key in row.fields for row in listed)
    structure = config.structure
    return [
        EvalInputItem(
            id=_id(row, config.id_key) if has_ids else str(index),
            input_obj=row.fields if structure.question_key is None else _field(row, structure.question_key),
            expected_output_obj=None if structure.answer_key is None else _field(row, structure.answer_key, NO_ANSWERS),
            full_dataset_entry=row.fields,
        )
        for index, row in enumerate(_without_doubles(listed, config.id_key))
    ]


def checked_items(items: Any, source: str) -> list[EvalInputItem]:
    """Return the examples that a dataset loader yielded, checked: at least one, with unique ids.

    Raises:
        DatasetError: there is no example, an id is repeated, or an item is not an `EvalInputItem`.
    """
    if not isinstance(items, list) or not all(isinstance(item, EvalInputItem) for item in items):
        raise DatasetError(f"{source}: a dataset loader must yield a list of EvalInputItem")
    if not items:
        raise DatasetError(f"{source}: the dataset is empty")
    seen: set[str] = set()
    for item in items:
        if item.id in seen:
            raise DatasetError(f"{source}: the id '{item.id}' is there twice")
        seen.add(item.id)
    return items


def digest_of(items: Iterable[EvalInputItem]) -> str:
    """Return the sha256 of examples in order; of a value that JSON cannot hold, only the type counts.

    >>> item = EvalInputItem(id="0", input_obj="1+1", full_dataset_entry={"question": "1+1"})
    >>> digest_of([item])[:8], digest_of([item.model_copy(update={"id": "1"})])[:8]
    ('c72295e1', '597b8800')
    """
    digest = hashlib.sha256()
    for item in items:
        fields = [item.id, item.input_obj, item.expected_output_obj, item.full_dataset_entry]
        digest.update(json.dumps(fields, default=lambda value: type(value).__name__, skipkeys=True).encode() + b"\n")
    return digest.hexdigest()


def _without_doubles(rows: list[Row], id_key: str) -> Iterator[Row]:
    places: dict[str, str] = {}
    for row in rows:
        if id_key in row.fields:
            identity = _id(row, id_key)
            if identity in places:
                raise DatasetError(f"{row.place}: the {id_key} '{identity}' is at {places[identity]} already")
            places[identity] = row.place
        yield row


def _id(row: Row, key: str) -> str:
    value = _field(row, key)
    if isinstance(value, bool) or not isinstance(value, str | int) or value == "":
        raise DatasetError(f"{row.place}: '{key}' must be a text or an integer, holds {json.dumps(value)[:50]}")
    return str(value)


NO_ANSWERS = ": name the one with the answer in structure.answer_key, or set structure.answer_key: null for none"


def _field(row: Row, key: str, way_out: str = "") -> Any:
    if key not in row.fields:
        present = ", ".join(row.fields) or "none"
        raise DatasetError(f"{row.place}: no field '{key}'; fields there: {present}{way_out}")
    return row.fields[key]


def _object(value: Any, place: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise DatasetError(f"{place}: wants an object, {{...}}, holds {json.dumps(value)[:50]}")
    return value


def _parsed(text: str, place: str) -> Any:
    value, end = _parsed_at(text, _skip_space(text, 0), place)
    if text[end:].strip():
        raise DatasetError(f"{place}: malformed JSON: more text after the object (column {end + 1})")
    return value


def _parsed_at(text: str, start: int, place: str) -> tuple[Any, int]:
    try:
        return STRICT_JSON.raw_decode(text, start)
    except json.JSONDecodeError as error:
        file, _, first = place.rpartition(":")
        line = int(first) + text.count("\n", start, error.pos)
        raise DatasetError(f"{file}:{line}: malformed JSON: {error.msg} (column {error.colno})") from None
    except RecursionError:
        raise DatasetError(f"{place}: malformed JSON: nested too deeply") from None
    except ValueError as error:
        raise DatasetError(f"{place}: {error}") from None


def _skip_space(text: str, start: int) -> int:
    while text[start : start + 1] in (" ", "\t", "\r", "\n"):
        start += 1
    return start
