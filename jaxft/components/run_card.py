"""The model card of a run: the model it began with, how it was trained, and its rewards, all from the run's records.

Cards get published: they have no path of this machine, no address, and no text of components that are not jaxft's own.
"""

import json
from operator import itemgetter
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCard
from jinja2 import Template

from jaxft.components.configs import LocalPolicyConfig, LocalTrainerAdapterConfig
from jaxft.harness.arrow_datasets import HuggingFaceDatasetConfig
from jaxft.harness.config import Config
from jaxft.harness.session import MODEL_FOLDER
from jaxft.harness.tasks import tasks_of
from jaxft.models.model_card import hub_id, licence, make_card, reference
from jaxft.redaction import redacted
from jaxft.runs.directory import RunDirectory
from jaxft.runs.files import METRICS_FILE, VALIDATION_HISTORY_FILE

TEMPLATE = Path(__file__).with_name("run_card.md")

METHODS = {"dr_grpo": "Dr. GRPO", "sft": "supervised finetuning"}
"""Names of losses in prose, where they are not the upper-case form of their name in the configuration."""


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
        return make_card(redacted(name), redacted(" ".join(sentences)), base)
    given = None if loss.function is None else f"the loss `{loss.function.name}`"
    method, kind = given or METHODS.get(loss.name, loss.name.upper()), "a method of reinforcement learning"
    trained = "it" if policy.lora is None else "LoRA adapters on it"
    sentences.insert(1, f"jaxft trained {trained} with {method}{f', {kind}' if loss.is_policy_loss else ''}.")
    text = Template(TEMPLATE.read_text(encoding="utf-8")).render(
        sentences=sentences, **_training(config, directory, adapter)
    )
    tags = [*(["reinforcement-learning"] if loss.is_policy_loss else []), *([loss.name] if given is None else [])]
    datasets = [data.path] if isinstance(data, HuggingFaceDatasetConfig) and hub_id(data.path) else None
    return make_card(redacted(f"{name} trained with {method}"), redacted(text), base, *tags, datasets=datasets)


def _training(config: Config, directory: RunDirectory, adapter: LocalTrainerAdapterConfig) -> dict[str, Any]:
    """Return the facts and rewards of the training."""
    finetuning, metrics = config.finetuning, directory.path / METRICS_FILE
    rows = [json.loads(line) for line in metrics.read_bytes().splitlines()] if metrics.is_file() else []
    scores = directory.read_json(VALIDATION_HISTORY_FILE) if directory.holds(VALIDATION_HISTORY_FILE) else []
    reward = finetuning.reward_function
    evaluators = tasks_of(finetuning).evaluators(None if reward is None else reward.name).values()
    facts = {
        "loss": f"`{adapter.loss.name if adapter.loss.function is None else adapter.loss.function.name}`",
        "agent": f"`{config.workflow.type_name}`",
        "reward": ", ".join(f"`{name}`" for name in dict.fromkeys(evaluators) if name),
        "training data": f"`{config.eval.general.dataset.type_name}`",
        "epochs": len(rows),
        "episodes": round(sum(row.get("episodes", 0) for row in rows)),
        "updates": round(sum(row.get("applied_updates", 0) for row in rows)),
        "seed": str(finetuning.seed),
    }
    pairs = {
        "training": [(row.get("reward_mean"), f"epoch {row['epoch'] + 1}") for row in rows],
        "validation": [(row["avg_reward"], f"after epoch {row['epoch']}") for row in scores],
    }
    rewards = {
        name: [f"{reward:.4g} ({when})" for reward, when in (known[0], max(known, key=itemgetter(0)), known[-1])]
        for name, each in pairs.items()
        if (known := [pair for pair in each if pair[0] is not None])
    }
    return {"facts": facts, "rewards": rewards}
