"""The verb `chat`: talk to the model of a run, or to any other model, in the terminal; `serve` finds the same models.

Nothing is written to a run directory and no lock is taken, so that a chat may run beside the training of its model.
"""

import argparse
import os
import secrets
import sys
from pathlib import Path
from typing import Any

from jax.sharding import Mesh
from pydantic import ValidationError

from jaxft.core.cache import row_shards
from jaxft.core.sharding import Sharding, platform_of
from jaxft.errors import ConfigError, DeviceMemoryError
from jaxft.files import MANIFEST
from jaxft.harness.chat_tools import Tools, load_tools
from jaxft.harness.config_merge import ConfigErrors, expanded, read_layers
from jaxft.harness.conversation import Conversation
from jaxft.harness.session import MODEL_FOLDER
from jaxft.models.hf_config import load_config
from jaxft.models.hf_files import local_folder
from jaxft.models.load import base_place, load_model
from jaxft.models.peft import CONFIG as ADAPTER_CONFIG
from jaxft.models.peft import saved_ignored_keys
from jaxft.rollout.chat import find_stop_ids, load_tokenizer
from jaxft.rollout.client import ChatClient
from jaxft.rollout.device import first_line, is_out_of_memory
from jaxft.rollout.policy import Policy
from jaxft.runs.console import current_console
from jaxft.runs.directory import CONFIG_FILE
from jaxft.shipped.configs import LocalPolicyConfig
from jaxft.shipped.local_policy import check_vocabulary, dtypes_of, mesh_of

CONTEXT_TOKENS = 4096
"""Default context of a model without a run."""


async def chat(arguments: argparse.Namespace) -> None:
    """Talk to the model of `arguments.source` until the input ends.

    Raises:
        ConfigError: the source holds no model, or the tools cannot be used.
        RequestError: the chat template refuses an option; or the input was no terminal, and a message has no answer.
    """
    tools = Tools() if arguments.tools is None else load_tools(arguments.tools)
    console = current_console()
    console.status(f"loading {arguments.source}")
    seed = secrets.randbits(32) if arguments.seed is None else arguments.seed
    policy = load_policy(arguments.source, seed=seed, context_tokens=arguments.context_tokens)
    try:
        console.close()  # the live line stands between standard output and whoever looks for it
        policy.compiles.show = console.compiling
        conversation = Conversation(
            ChatClient(policy, "chat"),
            tools,
            console,
            temperature=arguments.temperature,
            max_tokens=arguments.max_tokens,
            system=arguments.system,
            template_kwargs=dict(arguments.template_kwargs),
            seed=seed,
        )
        question = conversation.request([{"role": "user", "content": "?"}])
        if question.may_call_tools:
            policy.template.responses.template(has_tools=True)
        policy.template.prompt(question.messages, tools=question.tools, template_kwargs=question.chat_template_kwargs)
        await conversation.run()
    except BrokenPipeError:
        # Whoever read the answers has gone; Python flushes standard output once more at its end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    finally:
        console.close()
        policy.close()


def load_policy(source: Path, *, seed: int, context_tokens: int | None = None) -> Policy:
    """Load the exported model of a run with the settings of the run, or a model of any other folder.

    Raises:
        ConfigError: the source holds no complete model, or the mesh of the run does not fit this machine.
        DeviceMemoryError: the device has too little memory for the model.
    """
    folder, is_adapter, found = _model_in(source)
    config = None if found is None else found[1]
    settings = LocalPolicyConfig(path=str(folder)) if config is None else config
    mesh, identity = _mesh_of(settings, folder), _identity(folder)
    try:
        dtype, compute_dtype = dtypes_of(settings, platform_of(None if mesh is None else Sharding(mesh)))
        if config is None:
            dtype = compute_dtype or dtype  # nothing is trained, so nothing needs more digits than products have
        base = local_folder(base_place(folder)) if is_adapter else folder
        lora = folder if is_adapter else None
        tokenizer, shape = load_tokenizer(folder), load_config(base / "config.json", saved_ignored_keys(folder))
        check_vocabulary(tokenizer, shape)
        if context_tokens is None:
            most = min(CONTEXT_TOKENS, shape.max_position_embeddings)
            context_tokens = most if config is None else config.max_context_tokens
        options: dict[str, Any] = {"dtype": dtype, "compute_dtype": compute_dtype, "lora": lora, "mesh": mesh}
        model, params = load_model(base, context_tokens=context_tokens, **options)
        stop_ids = find_stop_ids(tokenizer, base)
        slots = row_shards(model)
        return Policy(
            model, params, tokenizer, stop_ids=stop_ids, seed=seed, slots=slots, max_context_tokens=context_tokens
        )
    except (ValueError, OSError) as error:
        if _identity(folder) != identity:
            raise ConfigError([f"{folder}: was removed or replaced while it was read: start the chat again"]) from error
        raise ConfigError([f"{folder}: {error}"]) from error
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        raise DeviceMemoryError(
            f"the device has too little memory for {folder}: end what else uses it, such as the training of the model, "
            f"or put JAX_PLATFORMS=cpu before the command; it said: {first_line(error)}"
        ) from error


def models_of(source: Path) -> dict[str, Any]:
    """Return a configuration that has the model of a run, with its name and settings there, or that of a folder.

    The run's address is not taken over, as its key is not stored.

    Raises:
        ConfigError: the source holds no complete model.
    """
    folder, is_adapter, found = _model_in(source)
    folder = folder.absolute()
    try:
        base = local_folder(base_place(folder)) if is_adapter else folder
        if found is None:
            context_tokens = min(CONTEXT_TOKENS, load_config(base / "config.json").max_position_embeddings)
            settings = LocalPolicyConfig(path=str(folder), max_context_tokens=context_tokens)
            dtype, compute_dtype = dtypes_of(settings, platform_of(None))
            found = "policy", settings.model_copy(update={"dtype": compute_dtype or dtype})
    except (ValueError, OSError) as error:
        raise ConfigError([f"{folder}: {error}"]) from error
    name, settings = found
    place = {"path": str(base), "tokenizer": str(folder), "lora": {"path": str(folder)} if is_adapter else None}
    fields = settings.model_dump(mode="json") | place | {"preset": None, "serve": None}
    return {"llms": {name: fields}}


def _model_in(source: Path) -> tuple[Path, bool, tuple[str, LocalPolicyConfig] | None]:
    """Return the folder of a model, whether it has adapters alone, and name and settings in the run that made it."""
    folder = source / MODEL_FOLDER if (source / MODEL_FOLDER).is_dir() else source
    is_adapter = (folder / ADAPTER_CONFIG).is_file()
    if not is_adapter and not (folder / "config.json").is_file():
        raise ConfigError([f"{source}: {_why_no_model(source)}"])
    return folder, is_adapter, None if folder == source else settings_of_run(source)


def settings_of_run(folder: Path) -> tuple[str, LocalPolicyConfig] | None:
    """Return name and settings of the policy that a run trains; None if the run records none of a `local_policy`.

    The agent's modules and data of the run are not needed.
    """
    file = folder / CONFIG_FILE
    if not file.is_file():
        return None
    node: Any = read_layers(file)
    try:
        adapter = node["trainer_adapters"][node["finetuning"]["trainer_adapter"]]
        name, fields = adapter["llm"], node["llms"][adapter["llm"]]
        if fields["_type"] != "local_policy":
            return None
    except (KeyError, TypeError):
        return None
    errors = ConfigErrors()
    path = f"llms.{name}"
    values = expanded({field: value for field, value in fields.items() if field != "_type"}, path, errors)
    try:
        config = LocalPolicyConfig.model_validate(values)
    except ValidationError as error:
        details = error.errors(include_url=False)[0]
        errors.add(".".join([path, *map(str, details["loc"])]), details["msg"])
    if errors:
        raise ConfigError(errors.lines(), str(file))
    return name, config


def _identity(folder: Path) -> int | None:
    """Return a number that another folder of the same path does not have; None if there is none."""
    try:
        return folder.stat().st_ino
    except OSError:
        return None


def _mesh_of(settings: LocalPolicyConfig, folder: Path) -> Mesh | None:
    try:
        return None if settings.mesh is None else mesh_of(settings.mesh)
    except ValueError as error:
        raise ConfigError(
            [f"the mesh of the run does not fit this machine ({error}); `jaxft chat {folder}` uses one device"]
        ) from error


def _why_no_model(source: Path) -> str:
    steps = sorted(int(file.parent.name) for file in source.glob(f"checkpoints/*/{MANIFEST}"))
    if steps:
        return (
            f"has no model yet, which a run writes at its end; one that was stopped ends at checkpoint {steps[-1]} by "
            f"jaxft resume {source} --set finetuning.num_epochs={steps[-1]}"
        )
    if (source / CONFIG_FILE).is_file():
        return "has no model yet, which a run writes at its end"
    return "holds no model: give a run directory with one, or the folder of a model"
