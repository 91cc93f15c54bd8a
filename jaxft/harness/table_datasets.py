"""Datasets in tables: `csv` (a header, then one row per example; all values are texts) and `parquet` (typed columns).

Errors begin with file:line, the line on which the row begins; for parquet files with file:row N, counted from 1.
"""

import csv
import importlib
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, Field

from jaxft.errors import DatasetError, one_line
from jaxft.files import finite_number, unique_keys
from jaxft.harness.config_types import config_error
from jaxft.harness.data_models import EvalInputItem
from jaxft.harness.datasets import (
    FileDatasetConfig,
    Row,
    decoded_lines,
    file_bytes,
    file_items,
)
from jaxft.harness.registry import register_dataset_loader


def _delimiter(text: str) -> str:
    if len(text) != 1 or text in '"\r\n\0':
        raise config_error('must be one character, and no quote or line break (a tab is "\\t", in double quotes)')
    return text


class CsvDatasetConfig(FileDatasetConfig, name="csv"):
    """Rows of texts under a header with the column names; CSV has no types, so `1` and `true` are texts as well."""

    delimiter: Annotated[str, AfterValidator(_delimiter)] = Field(
        default=",", description='The character between two fields; a tab is "\\t".'
    )


class ParquetDatasetConfig(FileDatasetConfig, name="parquet"):
    """Rows of a parquet file, with the types of JSON: texts, numbers, bools, nulls, lists and structs.

    A map with text keys becomes an object, and nulls inside of tools and tool calls are left out. Timestamps, decimals,
    bytes and other types without a JSON form are errors. Needs the extra `parquet`.
    """


@register_dataset_loader(config_type=CsvDatasetConfig)
async def csv_table(config: CsvDatasetConfig, builder: Any) -> AsyncIterator[list[EvalInputItem]]:
    """Yield the examples of a CSV file."""
    yield file_items(config, read_csv(config.file_path, config.delimiter))


@register_dataset_loader(config_type=ParquetDatasetConfig)
async def parquet_table(config: ParquetDatasetConfig, builder: Any) -> AsyncIterator[list[EvalInputItem]]:
    """Yield the examples of a parquet file."""
    yield file_items(config, read_parquet(config.file_path))


def read_csv(path: Path, delimiter: str = ",") -> Iterator[Row]:
    """Read the rows of a CSV file: UTF-8, with or without a byte order mark, lines ended by LF or CRLF.

    A field in double quotes may contain delimiters, line breaks and doubled quotes. Blank lines are skipped.

    Raises:
        DatasetError: the file is missing, is not UTF-8 or has no header; a column name is empty or repeated; a row has
            more or fewer fields than the header; or a quote is not closed.
    """
    header: list[str] = []
    for line, fields in _csv_rows(path, delimiter):
        place = f"{path}:{line}"
        if not header:
            header = _checked_header(fields, place)
        elif len(fields) != len(header):
            raise DatasetError(
                f"{place}: the row has {len(fields)} fields, the header {len(header)}: "
                f"a field that holds {delimiter!r} or a line break needs double quotes"
            )
        else:
            yield Row(place, dict(zip(header, fields, strict=True)))
    if not header:
        raise DatasetError(f"{path}:1: wants a header: a first line with the names of the columns")


def _csv_rows(path: Path, delimiter: str) -> Iterator[tuple[int, list[str]]]:
    """Yield every row that is not blank, with the number of its first line."""
    lines = list(decoded_lines(path))
    reader = csv.reader((f"{line}\n" for line in lines), delimiter=delimiter, strict=True)
    while (start := reader.line_num) < len(lines):
        # The csv module's limit on the length of a field (131072 by default) is global.
        limit = csv.field_size_limit(2**31 - 1)
        try:
            fields = next(reader)
        except csv.Error as error:
            raise DatasetError(f"{path}:{start + 1}: malformed CSV: {_in_words(error)}") from None
        finally:
            csv.field_size_limit(limit)
        # `""`, and a row of tabs between tabs, are rows of empty texts.
        if len(fields) > 1 or lines[start].strip():
            yield start + 1, fields


def _in_words(error: csv.Error) -> str:
    text = str(error)
    if "unexpected end of data" in text:
        return "the quote that opens a field of this row is not closed"
    if "new-line character" in text:
        return "a carriage return outside quotes: end lines with LF or CRLF"
    return f"{text} (a quote inside a quoted field is written twice)" if "expected after" in text else text


def _checked_header(names: list[str], place: str) -> list[str]:
    for number, name in enumerate(names, start=1):
        if not name.strip():
            raise DatasetError(f"{place}: column {number} of the header has no name")
        if name in names[: number - 1]:
            raise DatasetError(f"{place}: the column '{name}' is there twice")
    return names


def read_parquet(path: Path) -> Iterator[Row]:
    """Read the rows of a parquet file.

    Raises:
        DatasetError: the file is missing or corrupt, pyarrow is not installed, a column has a type or a name without a
            JSON form, or a value is NaN or infinite.
    """
    content = file_bytes(path)
    try:
        pyarrow, parquet = importlib.import_module("pyarrow"), importlib.import_module("pyarrow.parquet")
    except ImportError:
        raise DatasetError(f'{path}: reading parquet files needs pyarrow: pip install "jaxft[parquet]"') from None
    try:
        source = pyarrow.BufferReader(content)
        table = parquet.ParquetFile(source, page_checksum_verification=True).read()
        rows = table_rows(table, str(path), pyarrow.types)
    except (OSError, UnicodeDecodeError, pyarrow.ArrowException) as error:
        raise DatasetError(f"{path}: not a parquet file that can be read: {one_line(error)}") from None
    yield from rows


def table_rows(table: Any, source: str, types: Any) -> Iterator[Row]:
    """Read the rows of an arrow table; their places are source:row N.

    Args:
        table: a `pyarrow.Table`.
        source: name of the table, for messages.
        types: the module `pyarrow.types`.

    Raises:
        DatasetError: a column, or a value, has a type that JSON lacks.
    """
    columns = _converters([(field.name, field.type) for field in table.schema], types, f"{source}: column")
    return _table_rows(table, source, columns)


def _table_rows(table: Any, source: str, columns: "dict[str, Convert]") -> Iterator[Row]:
    for number, scalars in enumerate(zip(*table.columns, strict=True), start=1):
        place = f"{source}:row {number}"
        values = zip(columns.items(), scalars, strict=True)
        yield Row(place, {name: _converted(convert, scalar, name, place) for (name, convert), scalar in values})


Convert = Callable[[Any], Any]
"""Function from a value of pyarrow to a JSON value."""


def _converted(convert: Convert, scalar: Any, name: str, place: str) -> Any:
    try:
        return without_added_nulls(convert(scalar.as_py()))
    except UnicodeDecodeError:
        raise DatasetError(f"{place}: column '{name}': not UTF-8") from None
    except ValueError as error:
        raise DatasetError(f"{place}: column '{name}': {error}") from None


def without_added_nulls(value: Any, *, in_tool: bool = False) -> Any:
    """Return a JSON value without the nulls in its tools and tool calls.

    Arrow gives each value of a column the fields of all others, as null, and a null in an argument or a schema would
    reach the prompt. All other nulls stay.

    >>> calls = [{"function": {"name": "look_up", "arguments": {"city": "Oslo", "street": None}}, "note": None}]
    >>> without_added_nulls({"tool_calls": calls, "name": None})
    {'tool_calls': [{'function': {'name': 'look_up', 'arguments': {'city': 'Oslo'}}}], 'name': None}
    """
    if isinstance(value, list):
        return [without_added_nulls(each, in_tool=in_tool) for each in value]
    if not isinstance(value, dict):
        return value
    is_named = "name" in value and not value.keys().isdisjoint(("arguments", "parameters", "input_schema"))
    in_tool = in_tool or is_named or isinstance(value.get("function"), dict)
    items = ((name, without_added_nulls(each, in_tool=in_tool)) for name, each in value.items())
    return {name: each for name, each in items if each is not None or not in_tool}


def _converters(fields: list[tuple[str, Any]], types: Any, place: str) -> dict[str, Convert]:
    converters: dict[str, Convert] = {}
    for name, kind in fields:
        if name in converters:
            raise DatasetError(f"{place} '{name}' is there twice")
        converters[name] = _converter(kind, types, f"{place} '{name}'")
    return converters


def _converter(kind: Any, types: Any, place: str) -> Convert:
    """Return the converter for an arrow type, that of a column or of the values inside it."""
    texts = (types.is_string, types.is_large_string, types.is_string_view)
    lists = (types.is_list, types.is_large_list, types.is_fixed_size_list, types.is_list_view, types.is_large_list_view)
    if _is(kind, types.is_null, types.is_boolean, types.is_integer, *texts):
        return lambda value: value
    if types.is_floating(kind):
        return _unless_none(finite_number)  # also of numpy's own half precision, which older pyarrow returns
    if types.is_dictionary(kind):
        return _converter(kind.value_type, types, place)
    if _is(kind, *lists):
        item = _converter(kind.value_type, types, place)
        return _unless_none(lambda values: [item(value) for value in values])
    if types.is_struct(kind):
        fields = [kind.field(index) for index in range(kind.num_fields)]
        members = _converters([(field.name, field.type) for field in fields], types, f"{place}: its field")
        return _unless_none(lambda value: {name: convert(value[name]) for name, convert in members.items()})
    if types.is_map(kind) and _is(kind.key_type, *texts):
        entry = _converter(kind.item_type, types, place)
        return _unless_none(lambda pairs: unique_keys([(key, entry(value)) for key, value in pairs]))
    raise DatasetError(f"{place} holds {kind}, which JSON lacks: convert it to texts or numbers, or leave it out")


def _is(kind: Any, *tests: Callable[[Any], bool]) -> bool:
    return any(test(kind) for test in tests)


def _unless_none(convert: Convert) -> Convert:
    return lambda value: None if value is None else convert(value)
