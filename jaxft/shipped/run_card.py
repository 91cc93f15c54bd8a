"""The model card of a run: the model it began with, how it was trained, and its rewards, all from the run's records.

Cards get published: they have no path of this machine, no address, and no text of components that are not jaxft's own.
"""

import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from jaxft.harness.arrow_datasets import HuggingFaceDatasetConfig
from jaxft.harness.config import Config
from jaxft.harness.registry import DatasetConfig
from jaxft.harness.session import MODEL_FOLDER
from jaxft.models.model_card import ModelCard, hub_id, licence, metadata_of, reference
from jaxft.redaction import redacted
from jaxft.runs.directory import RunDirectory
from jaxft.runs.environment import is_secret_name
from jaxft.runs.files import ENVIRONMENT_FILE, METRICS_FILE, RESUMES_FILE, VALIDATION_HISTORY_FILE
from jaxft.shipped.configs import LocalPolicyConfig, LocalTrainerAdapterConfig

METHODS = {"dr_grpo": "Dr. GRPO", "sft": "supervised finetuning"}
"""Names of losses in prose, where they are not the upper-case form of their name in the configuration."""

NOT_SHOWN = ("llm", "reward", "loss.name", "show_episodes_every", "save_episodes")
"""Fields of components that do not change the training, or are shown elsewhere."""

OF_POLICY = ("lora", "max_context_tokens")
"""Fields of the policy that are settings of its training."""

NAME = re.compile(r"[\w.+*-]+(/[\w.+*-]+)?")
"""Pattern of the texts that a card shows: names, and ids on the hub."""


def run_card(config: Config, directory: RunDirectory, adapter: LocalTrainerAdapterConfig, version: int) -> ModelCard:
    """Return the card of the policy of a run; equal runs have equal cards.

    Args:
        config: configuration of the run.
        directory: directory of the run, with its records up to now.
        adapter: configuration of the trainer adapter.
        version: the policy's version, 0 if nothing has trained it.
    """
    policy, loss, data = config.llms[adapter.llm], adapter.loss, config.eval.general.dataset
    assert isinstance(policy, LocalPolicyConfig)
    if policy.path is None:
        base, name = None, str(policy.preset)
        about = f"This model has the shape of jaxft's preset `{name}` and began with random weights"
    else:
        base, folder = hub_id(policy.path), Path(policy.path)
        own = folder.parent.name if folder.name == MODEL_FOLDER else folder.name  # of a run: the name of the run
        name, about = base.split("/")[-1] if base else own, f"This model began as {reference(base, own)}"
    sentences = [f"{about}."] + ([] if policy.path is None else licence(policy.path))
    if not version:
        return ModelCard(redacted(name), redacted(" ".join(sentences)), metadata_of(base))
    method, kind = METHODS.get(loss.name, loss.name.upper()), "a method of reinforcement learning"
    trained = "it" if policy.lora is None else "LoRA adapters on it"
    sentences.insert(1, f"jaxft trained {trained} with {method}{f', {kind}' if loss.is_policy_loss else ''}.")
    paragraphs = [" ".join(sentences), "## Training", *_training(config, directory, adapter)]
    tags = [*(["reinforcement-learning"] if loss.is_policy_loss else []), loss.name]
    datasets = [data.path] if isinstance(data, HuggingFaceDatasetConfig) and hub_id(data.path) else []
    metadata = metadata_of(base, *tags, datasets=datasets)
    return ModelCard(redacted(f"{name} trained with {method}"), redacted("\n\n".join(paragraphs)), metadata)


def _training(config: Config, directory: RunDirectory, adapter: LocalTrainerAdapterConfig) -> Iterator[str]:
    """Yield the paragraphs and tables about the training."""
    finetuning, validation = config.finetuning, config.eval.validation
    rows, resumes = _lines(directory, METRICS_FILE), _lines(directory, RESUMES_FILE)
    about = _json(directory, ENVIRONMENT_FILE) or {}
    trainer = config.trainers.get(str(finetuning.trainer))
    builder = config.trajectory_builders.get(str(finetuning.trajectory_builder))
    dtypes = (about.get("chosen", {}).get(f"llms.{adapter.llm}.{name}") for name in ("dtype", "compute_dtype"))
    rewards = {
        "training": [(f"epoch {row['epoch'] + 1}", row.get("reward_mean")) for row in rows],
        "validation": [
            (f"after epoch {row['epoch']}" if row["epoch"] else "before training", row["avg_reward"])
            for row in _json(directory, VALIDATION_HISTORY_FILE) or []
        ],
    }
    rewards = {name: [pair for pair in pairs if pair[1] is not None] for name, pairs in rewards.items()}
    facts = {
        "loss": f"`{adapter.loss.name}`",
        "trainer": ", ".join(f"`{each.type_name}`" for each in (trainer, builder, adapter) if each is not None),
        "agent": f"`{config.workflow.type_name}`",
        "reward": finetuning.reward_function and f"`{finetuning.reward_function.name}`",
        "training data": _described(config.eval.general.dataset),
        "validation data": validation and validation.dataset and _described(validation.dataset),
        "epochs": len(rows),
        "preference pairs": round(sum(row.get("pairs_trained", 0) for row in rows)),
        "episodes": round(sum(row.get("episodes", 0) for row in rows)),
        "updates": round(sum(row.get("applied_updates", 0) for row in rows)),
        "seed": str(finetuning.seed),
        "dtypes of weights and of products": ", ".join(filter(None, dtypes)),
        "devices": _devices([about, *resumes]),
        "software": _software([about, *resumes]),
    }
    facts |= {f"mean {name} reward": f"{pairs[0][1]:.4g}" for name, pairs in rewards.items() if len(pairs) == 1}
    yield _table("| | |\n|---|---|", [(name, value) for name, value in facts.items() if value])

    before = rows[0].get("policy_version", 0) - (rows[0].get("applied_updates", 0) > 0) if rows else 0
    if before > 0:
        yield f"Before the first epoch the weights were changed {before} times in other ways, as by a warm start."
    several = [(name, *_first_best_last(pairs)) for name, pairs in rewards.items() if len(pairs) > 1]
    if several:
        yield _table("| mean reward | first | best | last |\n|---|---|---|---|", several)
        yield "The weights are those after the last epoch."

    components = {
        f"trainer_adapters.{finetuning.trainer_adapter}.": adapter,
        f"trajectory_builders.{finetuning.trajectory_builder}.": builder,
        f"trainers.{finetuning.trainer}.": trainer,
    }
    present = {place: component for place, component in components.items() if component is not None}
    settings = [pair for component in present.values() for pair in _settings(component)]
    settings += _settings(finetuning.curriculum_learning, "curriculum_learning.")
    settings += _settings(config.llms[adapter.llm])
    if settings:
        yield "These settings differ from jaxft's defaults:"
        yield _table("| setting | value |\n|---|---|", [(f"`{path}`", f"`{value}`") for path, value in settings])
    for row in resumes:
        yield from _changed(row, present)


def _changed(resume: Mapping[str, Any], components: Mapping[str, BaseModel]) -> Iterator[str]:
    """Yield a sentence for each setting of some components, given by their paths, that a resume has changed."""
    for path, values in resume["changes"].items():
        place = next((place for place in components if path.startswith(place)), "")
        name = path.removeprefix(place)
        if place and _is_shown(name):
            old, new = (_shown(value, has_texts=_is_own(components[place])) for value in values)
            change = "" if old is None or new is None else f" from {old} to {new}"
            yield f"When the run was continued at checkpoint {resume['checkpoint']}, `{name}` was changed{change}."


def _lines(directory: RunDirectory, name: str) -> list[dict[str, Any]]:
    path = directory.path / name
    return [json.loads(line) for line in path.read_bytes().splitlines()] if path.is_file() else []


def _json(directory: RunDirectory, name: str) -> Any:
    return directory.read_json(name) if directory.holds(name) else None


def _table(head: str, rows: Any) -> str:
    cells = ([" ".join(str(cell).replace("|", "\\|").split()) for cell in row] for row in rows)
    return "\n".join([head, *(f"| {' | '.join(row)} |" for row in cells)])


def _first_best_last(pairs: list[tuple[str, float]]) -> list[str]:
    """Return the first, the highest and the last of some rewards as text, each with its epoch.

    >>> _first_best_last([("epoch 1", 0.5), ("epoch 2", 0.75), ("epoch 3", 0.7)])
    ['0.5 (epoch 1)', '0.75 (epoch 2)', '0.7 (epoch 3)']
    """
    chosen = (pairs[0], max(pairs, key=lambda pair: pair[1]), pairs[-1])
    return [f"{reward:.4g} ({when})" for when, reward in chosen]


def _described(dataset: DatasetConfig) -> str:
    """Return type and settings of a dataset, such as `jsonl`: `train.jsonl`."""
    settings = ((name.removeprefix("file_path").removeprefix("path"), value) for name, value in _settings(dataset))
    return ": ".join(filter(None, [f"`{dataset.type_name}`", ", ".join(f"{n} `{v}`".strip() for n, v in settings)]))


def _devices(environments: list[dict[str, Any]]) -> str:
    """Return the devices of all sessions of the run, such as `8 x NVIDIA H200`."""
    names = dict.fromkeys(name for each in environments for name in each.get("devices", []))
    kinds = Counter(name.rsplit(" (", 1)[0] for name in names)
    return ", ".join(f"{count} x {kind}" for kind, count in kinds.items())


def _software(environments: list[dict[str, Any]]) -> str:
    """Return the versions of all sessions of the run, such as `python 3.12.3, jax 0.10.0 and 0.10.1`."""
    found: dict[str, dict[str, None]] = {}
    for each in environments:
        for name, version in each.get("versions", {}).items():
            found.setdefault(name, {}).update({} if version is None else {version: None})
    return ", ".join(f"{name} {' and '.join(versions)}" for name, versions in found.items() if versions)


def _settings(model: BaseModel, path: str = "", *, is_chosen: bool = False) -> Iterator[tuple[str, str]]:
    """Yield path and value of each field of a configuration that differs from its default and may be published.

    Of a section that is null by default, `is_chosen`, all fields that are neither null nor false are yielded.
    """
    for name, field in type(model).model_fields.items():
        value, inner = dict(model)[name], f"{path}{name}"
        if field.exclude or not _is_shown(inner) or (isinstance(model, LocalPolicyConfig) and name not in OF_POLICY):
            continue
        if isinstance(value, BaseModel):
            yield from _settings(value, f"{inner}.", is_chosen=field.default is None)
        elif value != field.default or (is_chosen and value not in (None, False)):
            shown = _shown(value, has_texts=_is_own(model))
            if shown is not None:
                yield inner, shown


def _is_shown(path: str) -> bool:
    """Return True if a field of a component says how it trained, and is not named like a secret."""
    return path not in NOT_SHOWN and not is_secret_name(path)


def _is_own(model: BaseModel | None) -> bool:
    """Return True if a configuration is one of jaxft's, whose texts are known to be names."""
    return model is not None and type(model).__module__.startswith("jaxft.")


def _shown(value: Any, *, has_texts: bool = True) -> str | None:
    """Return a value of a configuration as a card shows it: of a path the last name; None if it may be private.

    >>> _shown(1e-5), _shown(True), _shown("/home/me/train.jsonl"), _shown("http://10.0.0.1/v1"), _shown(["a", "b/c"])
    ('1e-05', 'true', 'train.jsonl', None, 'a, b/c')
    """
    if value is None or isinstance(value, bool | int | float):
        return json.dumps(value)
    if isinstance(value, Mapping):
        shown = {key: _shown(each, has_texts=has_texts) for key, each in value.items()}
        return ", ".join(f"{key}: {each}" for key, each in shown.items() if each is not None) or None
    if isinstance(value, list | tuple):
        return ", ".join(filter(None, (_shown(each, has_texts=has_texts) for each in value))) or None
    if not has_texts or not isinstance(value, str | Path):
        return None
    if Path(value).is_absolute():
        return Path(value).name
    return str(value) if NAME.fullmatch(str(value)) else None
