"""Finds the model that `jaxft chat`, `serve` and `eval` are given: that of a run, of a folder, or of the hub."""

import argparse
import json
import pkgutil
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from jaxft.components.configs import LocalPolicyConfig
from jaxft.components.local_policy import resolve_dtypes
from jaxft.core.sharding import compute_platform
from jaxft.errors import ConfigError, did_you_mean
from jaxft.files import MANIFEST, home_path
from jaxft.harness.commands import check_secrets, evaluate, serve
from jaxft.harness.config import Config, load_models
from jaxft.harness.config_merge import ConfigErrors, expanded, literal, read_layers
from jaxft.harness.runtime import command_line_config, run_main, run_parsed
from jaxft.harness.session import MODEL_FOLDER
from jaxft.models.gguf import config_file
from jaxft.models.hf_config import load_config
from jaxft.models.hf_files import local_folder
from jaxft.models.load import base_place
from jaxft.models.peft import CONFIG as ADAPTER_CONFIG
from jaxft.models.peft import saved_ignored_keys
from jaxft.redaction import map_texts
from jaxft.runs.files import CONFIG_FILE

BASE = "base"
"""Value of `jaxft eval --against` for the model of the configuration: that of a run before it is trained."""

NO_TRAINING = [(section, "{}") for section in ("trajectory_builders", "trainer_adapters", "trainers")]
NO_TRAINING += [(f"finetuning.{name}", "null") for name in ("trajectory_builder", "trainer_adapter", "trainer")]
NO_TRAINING += [("finetuning.enabled", "false")]
"""Overrides for the evaluation of a run, which needs no loss, not even one that has changed since."""

CONTEXT_TOKENS = 4096
"""Default context of a model without a run."""


def run_serve(parsed: argparse.Namespace, given: Sequence[str]) -> int:
    """Serve the models that the command line names until a signal comes, and return the exit code."""

    async def main() -> None:
        source = parsed.source or parsed.config_file
        models = read_layers(source) if parsed.source is None else model_configuration(source)
        add_adapters(models, parsed.adapter, has_source=parsed.source is not None)
        make_app = None
        if parsed.tinker:
            serve_models = pkgutil.resolve_name("jaxft.tinker.app:serve_models")
            make_app = partial(serve_models, name=parsed.model_name)
        await serve(load_models(models, parsed.override, str(source)), parsed.port, make_app)

    return run_main(main, title=f"serve {parsed.source or parsed.config_file}", log_level=parsed.log_level)


def run_eval(parsed: argparse.Namespace, given: Sequence[str]) -> int:
    """Evaluate a configuration or the model of a run, against another model if one is given; return the exit code."""

    async def main(base: Config, parsed: argparse.Namespace) -> None:
        options = list(parsed.override)
        if parsed.run is not None:
            check_secrets(parsed.run, options)
        validation = base.eval.validation
        is_given = parsed.dataset is not None or any(path.startswith("eval.general.dataset") for path, _ in options)
        if parsed.run is not None and not is_given and validation is not None and validation.dataset is not None:
            held_out = validation.dataset.model_dump(mode="json")
            options.append(("eval.general.dataset", json.dumps(map_texts(held_out, literal))))

        def with_model(source: Path | None) -> Config:
            return command_line_config(parsed, [*options, *([] if source is None else _weights(source, base))])

        against = None if parsed.against in (None, BASE) else home_path(parsed.against)
        other = None if parsed.against is None else with_model(against)
        await evaluate(with_model(parsed.run), parsed, other)

    if parsed.run is not None:
        parsed.config_file = parsed.run / CONFIG_FILE
        parsed.override = [*parsed.override, *NO_TRAINING]
    return run_parsed(main, parsed, [sys.argv[0], "eval", *given])


def _weights(source: Path, config: Config) -> list[tuple[str, str]]:
    """Return the overrides that put a model in the place of the one that a configuration has under its name."""
    ((name, model),) = model_configuration(source)["llms"].items()
    if name not in config.llms:
        hint = did_you_mean(name, config.llms, what="llms of the configuration")
        raise ConfigError(f"{source}: its model is called '{name}'{hint}")
    given = map_texts({field: model[field] for field in ("path", "preset", "tokenizer", "lora")}, literal)
    return [(f"llms.{name}.{field}", json.dumps(value)) for field, value in given.items()]


def add_adapters(models: dict[str, Any], given: Sequence[str], *, has_source: bool) -> None:
    """Add adapters, each as `NAME=FOLDER`, to the one model of a configuration, which is their base.

    Raises:
        ConfigError: one has another form, or a name that is taken; or the models are those of a configuration's file.
    """
    base = next(iter(models["llms"])) if has_source else ""
    for text in given:
        name, _, folder = text.partition("=")
        if not has_source:
            raise ConfigError("--adapter: in a file, give llms.NAME snapshot_of and adapter instead")
        if not name or not folder or name in models["llms"]:
            raise ConfigError(f"--adapter: is {text!r}; wanted NAME=FOLDER, with a name that is not taken")
        place = home_path(folder)
        place = place / MODEL_FOLDER if (place / MODEL_FOLDER).is_dir() else place
        models["llms"][name] = {"_type": "local_policy", "snapshot_of": base, "adapter": str(place)}


def model_configuration(source: Path, *, context_tokens: int | None = None) -> dict[str, Any]:
    """Return a configuration with one entry of `llms`: the model of a run with its settings, or another model.

    The run's address is not taken over, as its key is not stored.

    Args:
        source: a run directory, the folder of a model or of adapters, a GGUF file, or a model's id on the hub.
        context_tokens: replaces the context of the run, or the default one.

    Raises:
        ConfigError: the source holds no complete model.
    """
    folder = source / MODEL_FOLDER if (source / MODEL_FOLDER).is_dir() else source
    is_adapter = (folder / ADAPTER_CONFIG).is_file()
    is_on_hub = not source.exists() and not source.is_absolute() and len(source.parts) == 2
    if not is_adapter and not is_on_hub and not config_file(folder).is_file():
        raise ConfigError(f"{source}: {_why_no_model(source)}")
    name, settings = ("policy", None) if folder == source else settings_of_run(source)
    place = str(source) if is_on_hub else str(folder.absolute())
    try:
        base = str(base_place(Path(place))) if is_adapter else place
        shape = load_config(config_file(local_folder(base)), () if is_on_hub else saved_ignored_keys(folder))
        most = min(CONTEXT_TOKENS, shape.max_position_embeddings)
        if settings is None:
            settings = LocalPolicyConfig(path=base, max_context_tokens=most)
            dtype, compute_dtype = resolve_dtypes(settings, compute_platform(None))
            settings = settings.model_copy(update={"dtype": compute_dtype or dtype})  # nothing is trained
    except (ValueError, OSError) as error:
        raise ConfigError(f"{source}: {error}") from error
    weights = {"path": base, "preset": None, "tokenizer": place, "lora": {"path": place} if is_adapter else None}
    fields = settings.model_dump(mode="json") | weights | {"serve": None}
    return {"llms": {name: fields if context_tokens is None else fields | {"max_context_tokens": context_tokens}}}


def settings_of_run(folder: Path) -> tuple[str, LocalPolicyConfig | None]:
    """Return name and settings of the policy that a run trains; `policy` and None if it records no `local_policy`.

    The agent's modules and data of the run are not needed.
    """
    file = folder / CONFIG_FILE
    node: Any = read_layers(file) if file.is_file() else {}
    try:
        adapter = node["trainer_adapters"][node["finetuning"]["trainer_adapter"]]
        name, fields = adapter["llm"], dict(node["llms"][adapter["llm"]])
        if fields.pop("_type") != "local_policy":
            return "policy", None
    except (KeyError, TypeError):
        return "policy", None
    errors, path = ConfigErrors(), f"llms.{name}"
    values = expanded(fields, path, errors)
    try:
        config = LocalPolicyConfig.model_validate(values)
    except ValidationError as error:
        details = error.errors(include_url=False)[0]
        errors.add(".".join([path, *map(str, details["loc"])]), details["msg"])
    if errors:
        raise ConfigError(errors.lines(), str(file))
    return name, config


def _why_no_model(source: Path) -> str:
    steps = sorted(int(file.parent.name) for file in source.glob(f"checkpoints/*/{MANIFEST}"))
    no_model = "has no model yet, which a run writes at its end"
    if steps:
        end = f"jaxft resume {source} --set finetuning.num_epochs={steps[-1]}"
        return f"{no_model}; one that was stopped ends at checkpoint {steps[-1]} by {end}"
    if (source / CONFIG_FILE).is_file():
        return no_model
    return "holds no model: give a run directory with one, the folder of a model, a GGUF file, or its id on the hub"
