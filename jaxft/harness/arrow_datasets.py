"""Datasets in arrow tables: `parquet` files, and `huggingface`, a folder on this machine or an id on the hub.

Rows have typed columns, with the types of JSON: texts, numbers, bools, nulls, lists and structs. A map with text keys
becomes an object, and nulls inside of tools and tool calls are left out. Timestamps, decimals, bytes and other types
without a JSON form are errors, which begin with file:row N, counted from 1. The packages come with extras.
"""

import importlib
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

from pydantic import Field

from jaxft.errors import DatasetError, did_you_mean, one_line
from jaxft.files import finite_number, unique_keys
from jaxft.harness.config_types import PathOrName
from jaxft.harness.data_models import EvalInputItem
from jaxft.harness.datasets import READERS, DatasetRow, FileDatasetConfig, RowDatasetConfig, row_items
from jaxft.harness.registry import register_dataset_loader


class ParquetDatasetConfig(FileDatasetConfig, name="parquet", factory="jaxft.harness.datasets:file_dataset"):
    """Rows of a parquet file; needs the extra `parquet`."""


class HuggingFaceDatasetConfig(RowDatasetConfig, name="huggingface"):
    """Rows of a dataset of the Hugging Face hub, or of a folder in one of its forms; needs the extra `huggingface`.

    A folder is one that `save_to_disk` wrote, or one of parquet, JSON or CSV files. The dataset is read whole.
    """

    path: PathOrName
    """Folder, relative to that of the YAML file, or id on the hub: openai/gsm8k."""
    name: str | None = None
    """Configuration (subset) of the dataset; null: its only one."""
    split: str = Field(default="train", min_length=1)
    """Split, or a part of one, such as train[:100]."""
    revision: str | None = None
    """Commit, tag or branch on the hub; null: the newest, which may change between runs."""


def read_parquet(path: Path) -> Iterator[DatasetRow]:
    """Read the rows of a parquet file.

    Raises:
        DatasetError: the file is missing or corrupt, pyarrow is not installed, a column has a type or a name without a
            JSON form, or a value is NaN or infinite.
    """
    pyarrow, parquet = _import_packages("parquet", str(path), "pyarrow", "pyarrow.parquet")
    try:
        content = pyarrow.BufferReader(path.read_bytes())
        table = parquet.ParquetFile(content, page_checksum_verification=True).read()
    except FileNotFoundError as error:
        raise DatasetError(f"{path}: cannot be read: {error.strerror}") from None
    except (OSError, UnicodeDecodeError, pyarrow.ArrowException) as error:
        raise DatasetError(f"{path}: not a parquet file that can be read: {one_line(error)}") from None
    yield from table_rows(table, str(path), pyarrow.types)


READERS[ParquetDatasetConfig] = read_parquet


@register_dataset_loader(config_type=HuggingFaceDatasetConfig)
async def huggingface(config: HuggingFaceDatasetConfig, builder: Any) -> AsyncIterator[list[EvalInputItem]]:
    """Yield the examples of a Hugging Face dataset."""
    yield row_items(config, read_hub(config), _source(config))


def read_hub(config: HuggingFaceDatasetConfig) -> Iterator[DatasetRow]:
    """Read the rows of a Hugging Face dataset.

    Raises:
        DatasetError: the library is missing, there is no such folder, id, configuration, split or revision, or a value
            has no form in JSON.
    """
    datasets, types = _import_packages("huggingface", _source(config), "datasets", "pyarrow.types")
    try:
        table = _hub_dataset(config, datasets).with_format("arrow")[:]
    except Exception as error:  # the library raises errors of many kinds for what it cannot find or read
        why = one_line(error)
        if not Path(config.path).exists():
            why += (
                f"; there is no folder '{config.path}', so it was looked for on the hub: check path, name, split and "
                "revision; without a network, save the dataset with save_to_disk and give the folder"
            )
        raise DatasetError(f"{_source(config)}: cannot be loaded: {why}") from error
    return table_rows(table, _source(config), types)


def _hub_dataset(config: HuggingFaceDatasetConfig, datasets: Any) -> Any:
    """Return the split of a dataset; of a folder that `save_to_disk` wrote, the library does not choose it itself."""
    if not any((Path(config.path) / name).is_file() for name in ("dataset_dict.json", "dataset_info.json")):
        return datasets.load_dataset(config.path, config.name, split=config.split, revision=config.revision)
    for field in ("name", "revision"):
        if dict(config)[field] is not None:
            raise ValueError(f"it was written by save_to_disk, which keeps no {field}: leave '{field}' out")
    loaded, (split, bracket, part) = datasets.load_from_disk(config.path), config.split.partition("[")
    splits = dict(loaded) if isinstance(loaded, datasets.DatasetDict) else {str(loaded.split or "train"): loaded}
    if split not in splits:
        raise ValueError(f"it has no split '{split}'{did_you_mean(split, splits, what='splits there')}")
    if not bracket:
        return splits[split]
    instruction = datasets.ReadInstruction.from_spec(f"{split}[{part}")
    (absolute,) = instruction.to_absolute({split: len(splits[split])})
    return splits[split].select(range(absolute.from_, absolute.to))


def _import_packages(extra: str, source: str, *modules: str) -> list[Any]:
    try:
        return [importlib.import_module(name) for name in modules]
    except ImportError as error:
        raise DatasetError(f'{source}: {one_line(error)}: such datasets need: pip install "jaxft[{extra}]"') from None


def _source(config: HuggingFaceDatasetConfig) -> str:
    return f"{config.path}[{config.split}]"


def table_rows(table: Any, source: str, types: Any) -> Iterator[DatasetRow]:
    """Read the rows of an arrow table; their places are source:row N.

    Args:
        table: a `pyarrow.Table`.
        source: name of the table, for messages.
        types: the module `pyarrow.types`.

    Raises:
        DatasetError: a column is there twice, or a value has a type that JSON lacks.
    """
    columns = [(field.name, field.type) for field in table.schema]
    for name in table.column_names:
        if table.column_names.count(name) > 1:
            raise DatasetError(f"{source}: column '{name}' is there twice")
    for number, scalars in enumerate(zip(*table.columns, strict=True), start=1):
        fields = {}
        for (name, kind), scalar in zip(columns, scalars, strict=True):
            try:
                fields[name] = without_added_nulls(_plain(scalar.as_py(), kind, types))
            except UnicodeDecodeError:
                raise DatasetError(f"{source}:row {number}: column '{name}': not UTF-8") from None
            except ValueError as error:
                raise DatasetError(f"{source}:row {number}: column '{name}': {error}") from None
        yield DatasetRow(f"{source}:row {number}", fields)


def _plain(value: Any, kind: Any, types: Any) -> Any:
    """Return a value of an arrow type as JSON has it.

    Raises:
        ValueError: JSON has no such value.
    """
    if types.is_dictionary(kind):
        kind = kind.value_type
    if value is None or isinstance(value, bool | int | str):
        return value
    if types.is_floating(kind):
        return finite_number(value)  # also of numpy's own half precision, which older pyarrow returns
    if types.is_map(kind) and all(isinstance(key, str) for key, _ in value):
        return unique_keys([(key, _plain(each, kind.item_type, types)) for key, each in value])
    if isinstance(value, dict):
        return {name: _plain(each, kind.field(name).type, types) for name, each in value.items()}
    if isinstance(value, list) and not types.is_map(kind):
        return [_plain(each, kind.value_type, types) for each in value]
    raise ValueError(f"holds {kind}, which JSON lacks: convert it to texts or numbers, or leave it out")


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
