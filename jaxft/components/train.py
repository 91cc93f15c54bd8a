"""`jaxft.train`: GRPO with a Python function as the reward, from a script or a notebook.

Each run has a folder of its own. Its `TrainResult` reads history, plot and model there, when it is asked for them.
"""

import contextlib
import inspect
import itertools
import json
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import optax

from jaxft.components.evaluators import check_functions, load_reward_functions
from jaxft.components.single_turn import InMemoryDatasetConfig, context_tokens, read_examples
from jaxft.core.types import Model, Params
from jaxft.errors import ConfigError, did_you_mean
from jaxft.files import home_path
from jaxft.harness.config import Config, config_from_mapping
from jaxft.harness.config_merge import literal
from jaxft.harness.functions import Function
from jaxft.harness.opening import open_session
from jaxft.harness.runtime import run_to_result
from jaxft.harness.session import MODEL_FOLDER, resume_command
from jaxft.harness.strict_yaml import parse_yaml
from jaxft.models.config import PRESETS
from jaxft.models.load import load_merged, load_model
from jaxft.models.peft import CONFIG as ADAPTER_CONFIG
from jaxft.redaction import map_texts
from jaxft.runs.files import CONFIG_FILE, PLOT_FILE
from jaxft.runs.records import RunRecords, read_run

DEFAULTS, LOGGED = (Path(__file__).with_name(name) for name in ("train.yml", "logged.yml"))
"""The runs of `train`, and of `sft` and `dpo`, before their arguments."""
CONTEXT, RATE = "llms.policy.max_context_tokens", "trainer_adapters.local.optimizer.learning_rate"
MOST_SLOTS = 128
"""Completions that are decoded at the same time."""
RUNS = "runs/train-{}"
"""Folder of a run that is given none."""


def train(
    model: str | Path,
    reward: Any,
    prompts: Any,
    *,
    num_epochs: int = 100,
    num_generations: int = 8,
    examples_per_update: int = 16,
    loss: str | Callable[..., Any] = "dapo",
    advantages: str | Callable[..., Any] | None = None,
    beta: float | None = None,
    reward_weights: Sequence[float] | Mapping[str, float] | None = None,
    optimizer: str | Callable[..., Any] | optax.GradientTransformation = "adamw",
    learning_rate: float | None = None,
    lora: int | Mapping[str, Any] | None = None,
    temperature: float = 1.0,
    max_completion_length: int = 256,
    validation: Any = None,
    on_trajectories: Callable[..., Any] | None = None,
    on_epoch_end: Callable[..., Any] | None = None,
    seed: int = 0,
    output_dir: str | Path | None = None,
    resume: bool = False,
    overrides: Mapping[str, Any] | None = None,
    **columns: Any,
) -> "TrainResult":
    """Train a model by GRPO to raise a reward, and return the run: its history, its plot and its model.

    It works in a script and in a notebook. Progress is shown as by `jaxft finetune`; Ctrl-C stops and saves the run.

    Args:
        model: folder, GGUF file or hub id of a checkpoint, or the name of a preset: random weights, a token per byte.
        reward: a function, or several whose sum is the reward; sync or async. As in TRL, it is called with the keywords
            `completions`, `prompts`, `completion_ids` and all columns, each a list, as far as its parameters take them,
            and returns a list of numbers; None for a completion that it does not score. A function whose first
            parameter is `completion` is called with one, its `prompt` and its columns' values, and returns a number.
        prompts: texts, which the model continues; chats (lists of messages), which go through the chat template and
            whose completions are lists of one message, as in TRL; rows with a column `prompt`; or a dataset of those.
        num_epochs: epochs, each a batch of prompts with their completions, and an update of the model.
        num_generations: completions of a prompt, which are compared with each other.
        examples_per_update: prompts of an epoch, in a new order for each pass over all of them.
        loss: name of a published loss, or a function in the form of `jaxft.losses.PolicyLoss`.
        advantages: name of an estimator, or a function in the form of `jaxft.advantages.Estimator`; None for that of
            the loss.
        beta: weight of the KL to the starting weights; None for 0.
        reward_weights: weight of each reward function, in their order or by name; None for 1 each.
        optimizer: name of an optimizer, a function that returns an optax transformation (it gets `learning_rate`), or
            an optax transformation, of which a resumed run checks the shapes of its state only.
        learning_rate: of the optimizer; None for 1e-6, with `lora` 1e-5 and, if weights are random, 3e-3.
        lora: rank of adapters that are trained in the place of the weights, or the fields of `llms.<name>.lora`.
        temperature: divisor of the logits that completions are sampled with.
        max_completion_length: most tokens of a completion.
        validation: held-out prompts, in the form of `prompts`, columns included; None for no validation.
        on_trajectories: called with `trajectories` (groups of them) and `epoch` before they are trained, by its
            parameters; numbers that it returns by name are metrics.
        on_epoch_end: called with `metrics` and `epoch` after each epoch, likewise.
        seed: seed of sampling, of the order of prompts, and of random weights.
        output_dir: the run directory; None for a new one, `runs/train-1` and so on.
        resume: True to continue the run in `output_dir`, with the same arguments; `num_epochs` may have grown.
        overrides: any other field of the configuration by path, as in `{"trainer_adapters.local.loss.name": "gspo"}`;
            the run's `config.yml` has them all, and `jaxft finetune --help` describes them.
        **columns: columns of the data, each a list as long as `prompts`.

    Raises:
        ConfigError, DatasetError, ModelFileError, RunDirectoryError: an argument is wrong; the message names it.
        NoLearningSignal, TooManyFailures, JobFailed: the rewards never differed, the reward failed, or an update did.
        Stopped: Ctrl-C ended the run; the message says how to continue it.
    """
    counts = {"num_generations": num_generations, "examples_per_update": examples_per_update}
    check_keywords(counts | {"max_completion_length": max_completion_length}, columns)
    if resume and output_dir is None:
        raise ConfigError("resume: needs output_dir, the folder of the run to continue, as in 'runs/train-1'")
    examples, policy = read_examples(prompts, columns), policy_fields(model)
    functions = load_reward_functions(reward, examples)
    fields = {
        **{f"llms.policy.{name}": value for name, value in policy.items()},
        "llms.policy.slots": min(num_generations * min(examples_per_update, len(examples)), MOST_SLOTS),
        "workflow.max_tokens": max_completion_length,
        "workflow.temperature": temperature,
        "trajectory_builders.rollouts.num_generations": num_generations,
        RATE: learning_rate,
        "trainers.loop.examples_per_update": examples_per_update,
        "finetuning.num_epochs": num_epochs,
        "finetuning.seed": seed,
    }
    mapping = parse_yaml(DEFAULTS.read_text("utf-8"), str(DEFAULTS))
    mapping["eval"]["general"]["dataset"] = InMemoryDatasetConfig(items=tuple(examples))
    mapping["eval"]["evaluators"]["reward"]["functions"] = functions
    held_out = [] if validation is None else read_examples(validation, {})
    if held_out:
        check_functions(functions, held_out)
        mapping["eval"]["validation"] = {"dataset": InMemoryDatasetConfig(items=tuple(held_out))}
    weights = weights_by_name(reward_weights, [function.metric for function in functions])
    formula = formula_field(loss) | {"advantages": advantages, "beta": beta, "reward_weights": weights}
    mapping["trainer_adapters"]["local"] |= {"loss": formula, "optimizer": formula_field(optimizer)}
    mapping["trainers"]["loop"] |= {"on_trajectories": on_trajectories, "on_epoch_end": on_epoch_end}
    if lora is not None:
        mapping["llms"]["policy"]["lora"] = dict(lora) if isinstance(lora, Mapping) else {"rank": lora}
    return run_folder(
        mapping,
        fields | dict(overrides or {}),
        output_dir,
        resume=resume,
        context=lambda config: context_tokens(config, examples, max_completion_length, held_out),
    )


def run_folder(
    mapping: Mapping[str, Any],
    fields: Mapping[str, Any],
    output_dir: str | Path | None,
    *,
    resume: bool,
    context: Callable[[Config], int],
) -> "TrainResult":
    """Run a configuration in a folder, a new one for None, which stays only if something has begun in it.

    Args:
        mapping: the configuration.
        fields: values by their paths, which replace those of the configuration.
        output_dir: the run directory; None for the next of `RUNS`.
        resume: True to continue the run there.
        context: returns the tokens of the context, unless `fields` has them.
    """
    folder = new_folder() if output_dir is None else home_path(output_dir)
    try:
        fields = {"finetuning.output_dir": str(folder), **fields}
        config = configured(mapping, fields)
        if CONTEXT not in fields:
            config = configured(mapping, {CONTEXT: context(config), **fields})
        return run_to_result(lambda: run(config, resume=resume))
    except BaseException:
        if output_dir is None and not (folder / CONFIG_FILE).exists():
            shutil.rmtree(folder, ignore_errors=True)  # nothing has begun in it
        raise


def formula_field(given: Any) -> dict[str, Any]:
    """Return the field `name` or `function` of a loss or an optimizer."""
    if isinstance(given, optax.GradientTransformation):
        return {"function": Function(lambda: given, "jaxft.train:optimizer", "in-memory", is_pinned=True)}
    return {"name" if isinstance(given, str) and ":" not in given else "function": given}


def weights_by_name(
    given: Sequence[float] | Mapping[str, float] | None, names: Sequence[str]
) -> dict[str, float] | None:
    """Return the weight of each reward function by its name; None for 1 each.

    Raises:
        ConfigError: there is not one weight per function.
    """
    if given is None or isinstance(given, Mapping):
        weights = None if given is None else dict(given)
    else:
        weights = dict(zip(names, given, strict=len(given) == len(names)))
    if weights is not None and (weights.keys() != set(names) or len(given or ()) != len(names)):
        raise ConfigError(f"reward_weights: is {given!r:.100}: wanted is a number for each of {', '.join(names)}")
    return weights


KEYWORDS = [name for name, each in inspect.signature(train).parameters.items() if each.kind is each.KEYWORD_ONLY]


def configured(mapping: Mapping[str, Any], fields: Mapping[str, Any]) -> Config:
    """Return the configuration of a run; `fields` replaces values of `mapping` by their dotted paths."""
    texts = [(path, json.dumps(map_texts(value, literal), default=str)) for path, value in fields.items()]
    return config_from_mapping(mapping, base_dir=Path.cwd(), overrides=texts)


async def run(config: Config, *, resume: bool) -> "TrainResult":
    """Train, export the model and write the result."""
    folder = config.finetuning.output_dir
    resume_command.set(f"jaxft.train(..., output_dir={str(folder)!r}, resume=True)  # the dots: the same arguments")
    async with open_session(config, resume=resume) as session:
        await session.train_and_export()
    return TrainResult(folder)


def policy_fields(model: str | Path) -> dict[str, str]:
    """Return `preset` or `path` of the policy.

    Raises:
        ConfigError: the model is neither the name of a preset, nor a path, nor like a hub id.
    """
    name = str(model)
    if name in PRESETS:
        return {"preset": name}
    if isinstance(model, str | Path) and (home_path(name).exists() or name.count("/") == 1):
        return {"path": name}
    near = did_you_mean(name, PRESETS, what="presets")
    raise ConfigError(f"model: {model!r} is neither a path here, nor a hub id (owner/name), nor a preset{near}")


def check_keywords(counts: Mapping[str, Any], columns: Mapping[str, Any]) -> None:
    """Raise a ConfigError for a count that is none, and for a column that is none, such as a misspelt keyword."""
    for name, value in counts.items():
        least = 2 if name == "num_generations" else 1  # GRPO compares the completions of a prompt
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise ConfigError(f"{name}: is {value!r:.50}: wanted is a whole number, at least {least}")
    for name, values in columns.items():
        is_record = isinstance(values, tuple) and type(values) is not tuple
        if is_record or isinstance(values, str | bytes | Mapping) or not isinstance(values, Iterable):
            hint = did_you_mean(name, KEYWORDS, what="keywords")
            raise ConfigError(f"{name}: is no keyword, and {values!r:.50} is no column, a list{hint}")


def new_folder() -> Path:
    """Make the first of `runs/train-1`, `runs/train-2`, ... that is not there yet, and return it."""
    for folder in map(Path, map(RUNS.format, itertools.count(1))):
        with contextlib.suppress(FileExistsError):
            folder.mkdir(parents=True)  # two processes never get the same
            return folder
    raise AssertionError("there is always a next number")


@dataclass(frozen=True)
class RewardPlot:
    """The reward plot of a run, which a notebook shows.

    Attributes:
        path: the PNG file.
    """

    path: Path

    def _repr_png_(self) -> bytes:
        return self.path.read_bytes()


@dataclass(frozen=True, repr=False)
class TrainResult:
    """A run in its directory. `TrainResult("runs/train-1")` opens one of another process, too.

    Attributes:
        output_dir: the run directory.
    """

    output_dir: Path

    def __init__(self, output_dir: str | Path) -> None:
        object.__setattr__(self, "output_dir", home_path(output_dir))

    @cached_property
    def _records(self) -> RunRecords:
        return read_run(self.output_dir)

    @property
    def history(self) -> list[dict[str, Any]]:
        """A row of metrics per epoch, with `epoch` from 0, `reward_mean` and `reward/<name>` of each function."""
        return self._records.metrics

    @property
    def rewards(self) -> list[float | None]:
        """Mean reward of each epoch; None for an epoch without a usable one."""
        return [row.get("reward_mean") for row in self.history]

    @property
    def final(self) -> dict[str, Any]:
        """The figures in `result.json`: epochs, seconds, first, last and best rewards, versions."""
        return dict(self._records.result or {})

    @property
    def model(self) -> Path:
        """Folder of the trained model in Hugging Face's format, with its tokenizer."""
        return self.output_dir / MODEL_FOLDER

    def load(self) -> tuple[Model, Params]:
        """Return the trained model and its parameters; adapters are merged into their base.

        Raises:
            ModelFileError: the run has not written its model, or it is damaged.
        """
        is_adapter = (self.model / ADAPTER_CONFIG).is_file()
        return load_merged(self.model) if is_adapter else load_model(self.model)

    def plot(self) -> RewardPlot:
        """Return the plot of rewards over epochs, which a notebook shows; its file is in the run directory."""
        return RewardPlot(self.output_dir / PLOT_FILE)

    def __repr__(self) -> str:
        rewards = [reward for reward in self.rewards if reward is not None]
        learned = f"reward {rewards[0]:.3f} -> {rewards[-1]:.3f}" if rewards else "no reward"
        seconds = self.final.get("seconds")
        ended = "not ended" if seconds is None else f"{seconds:.0f} s"
        return f"TrainResult({str(self.output_dir)!r}: {len(self.history)} epochs, {learned}, {ended})"
