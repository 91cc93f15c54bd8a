"""The verb `export`: the model of a run, or any other one, in Hugging Face's file format."""

import argparse
import os
from collections.abc import Sequence
from pathlib import Path

import jax
import jax.numpy as jnp

from jaxft.errors import ConfigError
from jaxft.harness.atif import export_episodes
from jaxft.harness.runtime import run_main
from jaxft.harness.session import MODEL_FOLDER
from jaxft.models.gguf import config_file
from jaxft.models.hf import save_model
from jaxft.models.load import load_merged, load_model
from jaxft.models.model_card import SavedWeights, card_of_copy, card_text
from jaxft.models.peft import CONFIG as ADAPTER_CONFIG
from jaxft.rollout.tokenizer import load_tokenizer
from jaxft.runs.console import Console


def run(parsed: argparse.Namespace, given: Sequence[str]) -> int:
    """Export the model that the command line names, or episodes, and return the exit code."""

    async def main() -> None:
        if parsed.atif:
            if parsed.merge or parsed.dtype is not None:
                raise ConfigError("--atif writes episodes, and no weights: leave out --merge and --dtype")
            return export_episodes(parsed.source, parsed.folder)
        export(parsed.source, parsed.folder, parsed.dtype or "float32", merge=parsed.merge)

    return run_main(main, title="export")


def export(source: Path, folder: Path, dtype: str, *, merge: bool = False) -> None:
    """Write the model of a run directory, or of a folder in Hugging Face's file format or GGUF, in the dtype given.

    With `merge`, the LoRA adapters of the source are merged into their base, and the result is written. The model card
    says of the training what the source's card says.

    Raises:
        ConfigError: the source holds no complete model, or the folder is not empty or cannot be written.
    """
    model_folder = source / MODEL_FOLDER if (source / MODEL_FOLDER).is_dir() else source
    is_adapter = (model_folder / ADAPTER_CONFIG).is_file()
    if is_adapter and not merge:
        raise ConfigError(
            f"{source}: holds adapters, which need no export: copy {model_folder}, or merge them with --merge"
        )
    if merge and not is_adapter:
        raise ConfigError(f"{source}: holds no adapters to merge: leave out --merge")
    if not is_adapter and not config_file(model_folder).is_file():
        raise ConfigError(f"{source}: holds no model: give a run directory with one, or a model's folder or GGUF file")
    if folder.exists() and not (folder.is_dir() and os.access(folder, os.R_OK) and not any(folder.iterdir())):
        raise ConfigError(f"{folder}: is not an empty folder: choose another one")
    try:
        load = load_merged if merge else load_model
        model, params = load(model_folder, dtype=jnp.dtype(dtype))
        tokenizer = load_tokenizer(model_folder)
        card = card_of_copy(model_folder, source.resolve().name)
    except (ValueError, OSError) as error:
        raise ConfigError(f"{model_folder}: {error}") from error
    try:
        text = card_text(card, SavedWeights(dtype, is_merged=merge))
        save_model(folder, model, params, tokenizer=tokenizer, card=text)
    except OSError as error:
        raise ConfigError(f"{folder}: the model cannot be written: {error}") from error
    count = sum(leaf.size for leaf in jax.tree.leaves(params))
    Console().message(f"{count:,} parameters in {dtype} written to {folder}")
