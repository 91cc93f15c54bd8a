import sys

import pytest

from jaxft.errors import ConfigError, DatasetError
from jaxft.harness.config import config_from_mapping
from jaxft.harness.datasets import row_items
from jaxft.harness.hub_datasets import HuggingFaceDatasetConfig, read_hub

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


def items(**options):
    config = HuggingFaceDatasetConfig(**options)
    return row_items(config, read_hub(config), config.path)


@pytest.mark.envs
@pytest.mark.parametrize("name", ["one", "several", "files"])
def test_rows_have_the_types_of_json(folders, name):
    found = items(path=str(folders / name), split="train")
    assert [item.full_dataset_entry for item in found] == ROWS
    assert (found[2].id, found[2].input_obj, found[2].expected_output_obj) == ("2", "2+1", "3")


@pytest.mark.envs
@pytest.mark.parametrize("name", ["table", "lines"])
def test_csv_and_json_files_are_datasets(folders, name):
    assert [item.input_obj for item in items(path=str(folders / name))] == [row["question"] for row in ROWS]


@pytest.mark.envs
@pytest.mark.parametrize("name", ["several", "files"])
def test_a_split_or_part_of_one_is_chosen(folders, name):
    assert [item.input_obj for item in items(path=str(folders / name), split="test")] == ["3+1"]
    assert [item.input_obj for item in items(path=str(folders / name), split="train[2:4]")] == ["2+1", "3+1"]
    assert [item.input_obj for item in items(path=str(folders / name), split="train[:20%]")] == ["0+1", "1+1"]


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
    ],
)
def test_what_is_missing_is_named(folders, name, options, told):
    with pytest.raises(DatasetError) as raised:
        items(path=str(folders / name), **options)
    assert told in str(raised.value) and name in str(raised.value)


@pytest.mark.envs
def test_a_missing_field_names_the_row_and_the_fields(folders):
    with pytest.raises(DatasetError, match=r"one\[train\]:row 1: .*'prompt'.*question, answer, about"):
        items(path=str(folders / "one"), structure={"question_key": "prompt"})


@pytest.mark.envs
def test_bytes_have_no_form_in_json(tmp_path):
    datasets = pytest.importorskip("datasets")
    datasets.Dataset.from_dict({"question": [b"\xff"]}).save_to_disk(str(tmp_path / "bytes"))
    with pytest.raises(DatasetError, match="question"):
        items(path=str(tmp_path / "bytes"), structure={"answer_key": None})


def test_streaming_is_refused_with_its_reason():
    dataset = {"_type": "huggingface", "path": "some/rows", "streaming": True}
    with pytest.raises(ConfigError, match=r"dataset\.streaming: .*read whole"):
        config_from_mapping({"workflow": {"_type": "nothing"}, "eval": {"general": {"dataset": dataset}}}, base_dir=".")


def test_without_the_library_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(DatasetError, match=r"jaxft\[huggingface\]"):
        read_hub(HuggingFaceDatasetConfig(path="some/rows"))
