"""Training on logged conversations and preferences: `jaxft.sft`, `jaxft.dpo`, and the run of `jaxft init --from`."""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxft import rollout
from jaxft.components.configs import LocalPolicyConfig, LoggedTrajectoryBuilderConfig
from jaxft.components.logged_builder import ReadRow, read_item, read_items
from jaxft.components.single_turn import InMemoryDatasetConfig
from jaxft.components.train import LOGGED, RATE, TrainResult, formula_field, policy_fields, run_folder
from jaxft.errors import ConfigError, DatasetError
from jaxft.files import disk_errors
from jaxft.harness.config import Config
from jaxft.harness.data_models import EvalInputItem
from jaxft.harness.datasets import dataset_for_file, read_csv, read_json, read_jsonl
from jaxft.harness.strict_yaml import parse_yaml
from jaxft.rollout.chat import ChatTemplate
from jaxft.training.logged import read_logged


def sft(
    model: str | Path,
    rows: Any,
    *,
    validation: Any = None,
    num_updates: int | None = None,
    rows_per_update: int = 16,
    optimizer: Any = "adamw",
    learning_rate: float | None = None,
    lora: int | Mapping[str, Any] | None = None,
    max_length: int | None = None,
    on_epoch_end: Callable[..., Any] | None = None,
    seed: int = 0,
    output_dir: str | Path | None = None,
    resume: bool = False,
    overrides: Mapping[str, Any] | None = None,
) -> TrainResult:
    """Train a model to say what logged answers say, and return the run; its `history` has the `loss` of each update.

    Args:
        model: folder or hub id of a checkpoint, or the name of a preset: random weights, a token per byte.
        rows: a list of dictionaries or a dataset, in a form of `jaxft.training.logged`: `messages`, `prompt` and
            `completion`, `text`, or ShareGPT's `conversations`. Answers and their end tokens are trained.
        validation: held-out rows, whose loss is measured before, between and after; None for none.
        num_updates: updates; None for one pass over the rows.
        rows_per_update: rows of an update, in a new order for each pass.
        optimizer: as in `jaxft.train`.
        learning_rate: of the optimizer; None for 1e-5, with `lora` 1e-4 and, if weights are random, 3e-3.
        lora: as in `jaxft.train`.
        max_length: tokens that a row may have, of which the rest is cut off; None for the longest row.
        on_epoch_end: as in `jaxft.train`; an epoch is an update.
        seed: seed of the order of rows, and of random weights.
        output_dir: as in `jaxft.train`.
        resume: as in `jaxft.train`.
        overrides: any other field of the configuration by path.

    Raises:
        ConfigError, DatasetError, ModelFileError, RunDirectoryError: an argument is wrong; the message names it.
        JobFailed: an update failed.
        Stopped: Ctrl-C ended the run; the message says how to continue it.
    """
    return _run({"name": "sft"}, locals())


def dpo(
    model: str | Path,
    rows: Any,
    *,
    beta: float = 0.1,
    kind: str = "sigmoid",
    validation: Any = None,
    num_updates: int | None = None,
    rows_per_update: int = 16,
    optimizer: Any = "adamw",
    learning_rate: float | None = None,
    lora: int | Mapping[str, Any] | None = None,
    max_length: int | None = None,
    on_epoch_end: Callable[..., Any] | None = None,
    seed: int = 0,
    output_dir: str | Path | None = None,
    resume: bool = False,
    overrides: Mapping[str, Any] | None = None,
) -> TrainResult:
    """Train a model to prefer chosen answers to rejected ones (DPO, arXiv 2305.18290), and return the run.

    Args:
        model: as in `sft`.
        rows: preferences, in a form of `jaxft.training.logged`: `prompt`, `chosen` and `rejected`, or OpenAI's.
        beta: strength of the pull to the starting weights.
        kind: `sigmoid` or `ipo`; other settings are `overrides` of `trainer_adapters.local.loss.preference`.
        validation: held-out preferences, of which loss and accuracy are measured; None for none.
        num_updates: as in `sft`; so are all others.
        rows_per_update: pairs of an update.
        optimizer: as in `jaxft.train`.
        learning_rate: as in `jaxft.train`.
        lora: as in `jaxft.train`.
        max_length: as in `sft`.
        on_epoch_end: as in `sft`.
        seed: as in `sft`.
        output_dir: as in `jaxft.train`.
        resume: as in `jaxft.train`.
        overrides: as in `sft`.

    Raises:
        ConfigError, DatasetError, ModelFileError, RunDirectoryError, JobFailed, Stopped: as `sft`.
    """
    return _run({"name": "dpo", "beta": beta, "preference": {"kind": kind}}, locals())


def _run(loss: Mapping[str, Any], given: Mapping[str, Any]) -> TrainResult:
    """Run `sft` or `dpo` with its arguments by name."""
    policy, overrides = policy_fields(given["model"]), given["overrides"] or {}
    # Rewards make rows of one prompt one example.
    left_out = () if any(name.endswith("min_reward") for name in overrides) else ("reward",)
    datasets = {name: given[name] for name in ("rows", "validation") if name == "rows" or given[name] is not None}
    examples = {name: _items(name, rows, left_out) for name, rows in datasets.items()}
    sections = {name: {"dataset": InMemoryDatasetConfig(items=items)} for name, items in examples.items()}
    mapping = parse_yaml(LOGGED.read_text("utf-8"), str(LOGGED))
    mapping["eval"] |= {"general": sections["rows"], "validation": sections.get("validation")}
    optimizer, lora = given["optimizer"], given["lora"]
    mapping["trainer_adapters"]["local"] |= {"loss": dict(loss), "optimizer": formula_field(optimizer)}
    mapping["trainers"]["loop"] |= {"on_epoch_end": given["on_epoch_end"]}
    if given["max_length"] is not None:
        mapping["trajectory_builders"]["rows"] |= {"long_rows": "truncate"}
    if lora is not None:
        mapping["llms"]["policy"]["lora"] = dict(lora) if isinstance(lora, Mapping) else {"rank": lora}
    updates, size = given["num_updates"], given["rows_per_update"]
    fields: dict[str, Any] = {
        **{f"llms.policy.{name}": value for name, value in policy.items()},
        RATE: given["learning_rate"],
        "trainers.loop.examples_per_update": size,
        "finetuning.num_epochs": -(-len(examples["rows"]) // size) if updates is None else updates,
        "finetuning.seed": given["seed"],
        **overrides,
    }

    def context(config: Config) -> int:
        longest = _read(sections, config, loss["name"])
        rounded = -(-longest // 16) * 16  # equal shapes for nearly equal rows
        return rounded if given["max_length"] is None else given["max_length"]

    return run_folder(mapping, fields, given["output_dir"], resume=given["resume"], context=context)


def _items(name: str, rows: Any, left_out: Sequence[str]) -> tuple[EvalInputItem, ...]:
    """Return rows as examples, without some columns.

    Raises:
        DatasetError: they are no list of dictionaries, or there is none.
    """
    listed = list(rows) if isinstance(rows, Iterable) and not isinstance(rows, Mapping) else []
    for index, row in enumerate(listed):
        if not isinstance(row, Mapping):
            raise DatasetError(f"{name}[{index}] is {row!r:.50}; wanted a dictionary")
    if not listed:
        raise DatasetError(f"{name} is {rows!r:.50}; wanted a list of dictionaries")
    entries = [{column: value for column, value in row.items() if column not in left_out} for row in listed]
    return tuple(EvalInputItem(id=str(index), full_dataset_entry=entry) for index, entry in enumerate(entries))


def _read(sections: Mapping[str, dict[str, Any]], config: Config, loss: str) -> int:
    """Check the rows of the datasets, and return the tokens of the longest one.

    Raises:
        ConfigError: the tokenizer cannot be loaded.
        DatasetError: rows are of no form or not for the loss, or cannot be written by the chat template.
    """
    policy, builder = config.llms["policy"], config.trajectory_builders["rows"]
    assert isinstance(policy, LocalPolicyConfig) and isinstance(builder, LoggedTrajectoryBuilderConfig)
    try:
        template = ChatTemplate(rollout.load_tokenizer(policy.tokenizer or policy.path), ())
    except ValueError as error:
        raise ConfigError(f"model: {error}") from error

    def read_one(item: EvalInputItem) -> ReadRow:
        read = read_item(item, template, builder)
        kind, wanted = ("a preference", "dpo") if read.row.is_pair else ("no preference", "sft")
        if wanted != loss:
            raise ValueError(f"is {kind}: jaxft.{wanted} learns from it")
        return read

    longest = 1
    for name, section in sections.items():
        rows = read_items(name, section["dataset"].items or (), read_one)
        longest = max(longest, *(len(each.tokens) for row in rows for each in row.sequences))
    return longest


RUN = Path(__file__).with_name("logged_run.yml.template")
READERS = {"jsonl": read_jsonl, "json": read_json, "csv": read_csv}


def write_logged_run(logs: Path, folder: Path) -> Path:
    """Write the configuration of a run that trains on a file of logs, `run.yml` in a new folder, and return its path.

    Raises:
        ConfigError: the folder has a `run.yml`, or the file is of no kind that is read here.
        DatasetError: the first row is of no form.
    """
    try:
        kind = dataset_for_file(logs)["_type"]
    except ValueError as error:
        raise ConfigError(str(error)) from None
    if kind not in READERS:
        raise ConfigError(f"{logs}: `jaxft init` looks into jsonl, json and csv only")
    if (target := folder / "run.yml").exists():
        raise ConfigError(f"{folder}: has run.yml already, and nothing is overwritten: take another name")
    first = next(READERS[kind](logs), None)
    try:
        row = read_logged({} if first is None else first.fields)
    except ValueError as error:
        raise DatasetError(f"{logs if first is None else first.place}: {error}") from None
    loss = "dpo" if row.is_pair else "sft"
    text = RUN.read_text("utf-8").format(kind=kind, logs=json.dumps(str(logs.absolute())), loss=loss, name=folder.name)
    with disk_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
        target.write_text(text, "utf-8")
    return target
