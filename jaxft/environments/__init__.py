"""Environments of other packages as datasets, workflows and evaluators of a configuration.

Importing this package registers their configurations. The modules that make them, and the packages of the
environments, are imported when a component is first made.
"""

import importlib
import json
from types import ModuleType
from typing import Annotated, Any

from pydantic import AfterValidator, Field, ValidationInfo

from jaxft import ComponentError, ConfigModel, DatasetConfig, EvaluatorConfig, InputPath, LLMRef, WorkflowConfig

Seed = Annotated[int, Field(ge=0, lt=2**32)]
Options = Annotated[dict[str, Any], AfterValidator(lambda options: json.loads(json.dumps(options)))]
"""Settings of another package, as plain JSON values: texts of a configuration know their folder, others' do not."""


class QuestionsConfig(ConfigModel):
    """Questions of a task, by their seed and number."""

    seed: Seed = 0
    """Seed of the questions: another one gives other questions."""
    size: int = Field(default=500, ge=1)
    """Questions to generate; one that repeats is left out."""


class ReasoningGymDatasetConfig(
    QuestionsConfig, DatasetConfig, name="reasoning_gym", factory="jaxft.environments.reasoning_gym:dataset"
):
    """Questions of a task of reasoning-gym."""

    task: str
    """Name of the task, such as chain_sum or spell_backward."""
    options: Options = Field(default={})
    """Options of the task, such as max_terms: 3."""
    without: QuestionsConfig | None = None
    """Questions of the same task to leave out, such as those of training; null: none."""


class ReasoningGymScoreConfig(
    EvaluatorConfig, name="reasoning_gym_score", factory="jaxft.environments.reasoning_gym:score"
):
    """The task's own score of the workflow's output, by its `score_answer`."""


class VerifiersDatasetConfig(DatasetConfig, name="verifiers", factory="jaxft.environments.verifiers:dataset"):
    """Tasks of a taskset of verifiers."""

    taskset: Options
    """The taskset: its id, as in {id: reverse-text}, and its own settings."""
    select: Options = Field(default={})
    """Choice of tasks: include, exclude, shuffle, seed, skip and limit, as verifiers has them."""


class EnvironmentWorkflowConfig(WorkflowConfig):
    """Settings of all workflows of environments."""

    llm: LLMRef
    """Entry of llms that plays."""
    max_tokens: int | None = Field(default=None, ge=1)
    """Most tokens of an answer; null: no limit."""


def refuse_self_play(name: str, info: ValidationInfo) -> str:
    """Return `name`, unless it is the policy's, which would play the other side of its own episodes."""
    if name == info.data.get("llm"):
        known = f"another entry of llms, such as {{_type: local_policy, snapshot_of: {name}}} or one of type openai"
        raise ValueError(f"'{name}' is the policy, which learns one side alone: name {known}")
    return name


OtherSide = Annotated[LLMRef, AfterValidator(refuse_self_play)]


class VerifiersWorkflowConfig(
    EnvironmentWorkflowConfig, name="verifiers", factory="jaxft.environments.verifiers:workflow"
):
    """Episodes of an environment of verifiers, with the policy in its seat."""

    env: Options = Field(default={})
    """Settings of the environment: id, seats and time-outs, as in the section [env] of verifiers. Its taskset is
    that of eval.general.dataset, unless it has its own."""


class VerifiersRewardConfig(EvaluatorConfig, name="verifiers_reward", factory="jaxft.environments.verifiers:reward"):
    """The rewards that the environment gave to the episode, with their weights; its metrics are the reasoning."""


class EnvironmentFactoryConfig(
    EnvironmentWorkflowConfig, name="environment_factory", factory="jaxft.environments.factory:workflow"
):
    """Episodes in an environment that is written as a class, in the form of TRL's `environment_factory`."""

    factory: str | dict[str, str]
    """The class, as module:Class; or several by name, of which a row's field `environment` names one."""
    max_tool_calling_iterations: int | None = Field(default=None, ge=0)
    """Most answers with tool calls whose tools are called; null: no limit."""


class EnvironmentRewardConfig(EvaluatorConfig, name="environment_reward", factory="jaxft.environments.factory:reward"):
    """The reward that the environment gave: that of a class by its `get_reward`, that of textarena or tau2."""


class TextArenaDatasetConfig(
    QuestionsConfig, DatasetConfig, name="textarena", factory="jaxft.environments.textarena:dataset"
):
    """Games of textarena, one for each seed."""

    game: str
    """Id of the game, such as GuessTheNumber-v0."""
    options: Options = Field(default={})
    """Options of the game, such as max_number: 9."""


class TextArenaWorkflowConfig(
    EnvironmentWorkflowConfig, name="textarena", factory="jaxft.environments.textarena:workflow"
):
    """Episodes of a game of textarena, alone or against another model."""

    opponent: OtherSide | None = None
    """Entry of llms on the other side; null: a game of one."""


class BFCLDatasetConfig(DatasetConfig, name="bfcl", factory="jaxft.environments.bfcl:dataset"):
    """Questions of the Berkeley Function Calling Leaderboard, with their functions as tools."""

    path: InputPath
    """Wheel of bfcl-eval, or a folder that holds bfcl_eval, such as site-packages."""
    categories: tuple[str, ...]
    """Categories of a single turn, such as simple_python or multiple."""


class BFCLWorkflowConfig(EnvironmentWorkflowConfig, name="bfcl", factory="jaxft.environments.bfcl:workflow"):
    """One answer to a question of bfcl; it returns the calls, each as {function: arguments as JSON}."""


class BFCLScoreConfig(EvaluatorConfig, name="bfcl_score", factory="jaxft.environments.bfcl:score"):
    """1 if bfcl-eval's own checker accepts the calls, else 0; its verdict is the reasoning."""

    path: InputPath
    """Wheel of bfcl-eval or folder with bfcl_eval whose checker scores."""


class Tau2DatasetConfig(DatasetConfig, name="tau2", factory="jaxft.environments.tau2:dataset"):
    """Tasks of a domain of tau2."""

    domain: str
    """Name of the domain: airline, retail, telecom or mock."""
    split: str | None = "base"
    """Split of the tasks: base, train or test; null: all."""


class Tau2WorkflowConfig(EnvironmentWorkflowConfig, name="tau2", factory="jaxft.environments.tau2:workflow"):
    """Conversations of the policy with tau2's simulated user, who asks for what the task says."""

    user: OtherSide
    """Entry of llms that plays the user, such as one of type openai."""
    max_steps: int = Field(default=200, ge=1)
    """Most messages of an episode, results of tools included."""


def installed(name: str, extra: str = "envs") -> ModuleType:
    """Return a module of a package that an extra of jaxft installs.

    Raises:
        ComponentError: it cannot be imported.
    """
    try:
        return importlib.import_module(name)
    except ImportError as error:
        reason = str(error).partition("\n")[0]
        raise ComponentError(f'{name}: {reason}; install it by: pip install "jaxft[{extra}]"') from error
