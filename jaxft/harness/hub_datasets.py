"""Datasets of the Hugging Face library: a folder on this machine, or an id on the hub. Needs the extra `huggingface`.

A folder is one that `save_to_disk` wrote, or one of parquet, JSON or CSV files. Rows are read whole, with the types of
JSON; errors begin with path[split]:row N, counted from 1.
"""

import importlib
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

from pydantic import Field, field_validator

from jaxft.errors import DatasetError, did_you_mean, one_line
from jaxft.harness.config_types import PathOrName, config_error
from jaxft.harness.data_models import EvalInputItem
from jaxft.harness.datasets import Row, RowDatasetConfig, row_items
from jaxft.harness.registry import register_dataset_loader
from jaxft.harness.table_datasets import table_rows

SAVED = ("dataset_dict.json", "dataset_info.json")
"""Files of a folder that `save_to_disk` wrote: of several splits, and of one."""


class HuggingFaceDatasetConfig(RowDatasetConfig, name="huggingface"):
    """Rows of a dataset of the Hugging Face hub, or of a folder in one of its forms."""

    path: PathOrName = Field(description="Folder, relative to that of the YAML file, or id on the hub: openai/gsm8k.")
    name: str | None = Field(default=None, description="Configuration (subset) of the dataset; null: its only one.")
    split: str = Field(default="train", min_length=1, description="Split, or a part of one, such as train[:100].")
    revision: str | None = Field(
        default=None, description="Commit, tag or branch on the hub; null: the newest, which may change between runs."
    )
    streaming: bool = Field(default=False, description="Must be false: a run needs to know all of its examples.")

    @field_validator("streaming")
    @classmethod
    def _is_whole(cls, value: bool) -> bool:
        if value:
            raise config_error(
                "must be false: a run draws from all examples, and a resumed one checks that they are the same, so the "
                "dataset is read whole; take a part of a large one by split, as in 'train[:10000]'"
            )
        return value


@register_dataset_loader(config_type=HuggingFaceDatasetConfig)
async def huggingface(config: HuggingFaceDatasetConfig, builder: Any) -> AsyncIterator[list[EvalInputItem]]:
    """Yield the examples of a Hugging Face dataset."""
    yield row_items(config, read_hub(config), _source(config))


def read_hub(config: HuggingFaceDatasetConfig) -> Iterator[Row]:
    """Read the rows of a Hugging Face dataset.

    Raises:
        DatasetError: the library is missing, there is no such folder, id, configuration, split or revision, or a value
            has no form in JSON.
    """
    source = _source(config)
    try:
        datasets, types = importlib.import_module("datasets"), importlib.import_module("pyarrow.types")
    except ImportError as error:
        raise DatasetError(
            f'{source}: {one_line(error)}: Hugging Face datasets need: pip install "jaxft[huggingface]"'
        ) from None
    try:
        loaded = _saved(config, datasets) if _is_saved(config.path) else _load(config, datasets)
        table = loaded.with_format("arrow")[:]
    except DatasetError:
        raise
    except Exception as error:  # the library raises errors of many kinds for what it cannot find or read
        raise DatasetError(f"{source}: cannot be loaded: {one_line(error)}{_way_out(config)}") from error
    return table_rows(table, source, types)


def _load(config: HuggingFaceDatasetConfig, datasets: Any) -> Any:
    return datasets.load_dataset(config.path, config.name, split=config.split, revision=config.revision)


def _saved(config: HuggingFaceDatasetConfig, datasets: Any) -> Any:
    """Return the split of a folder that `save_to_disk` wrote."""
    for field in ("name", "revision"):
        if dict(config)[field] is not None:
            raise DatasetError(
                f"{config.path}: was written by save_to_disk, which keeps no {field}: leave '{field}' out"
            )
    loaded, (split, bracket, part) = datasets.load_from_disk(config.path), config.split.partition("[")
    splits = dict(loaded) if isinstance(loaded, datasets.DatasetDict) else {str(loaded.split or "train"): loaded}
    if split not in splits:
        raise DatasetError(f"{config.path}: has no split '{split}'{did_you_mean(split, splits, what='splits there')}")
    if not bracket:
        return splits[split]
    instruction = datasets.ReadInstruction.from_spec(f"{split}[{part}")
    (absolute,) = instruction.to_absolute({split: len(splits[split])})
    return splits[split].select(range(absolute.from_, absolute.to))


def _is_saved(path: str) -> bool:
    return any((Path(path) / name).is_file() for name in SAVED)


def _source(config: HuggingFaceDatasetConfig) -> str:
    return f"{config.path}[{config.split}]"


def _way_out(config: HuggingFaceDatasetConfig) -> str:
    """Return what to do about an id that cannot be loaded; nothing for a folder, whose error says it."""
    if Path(config.path).exists():
        return ""
    return (
        f"; there is no folder '{config.path}', so it was looked for on the hub: check path, name, split and revision; "
        "without a network, save the dataset with save_to_disk and give the folder"
    )
