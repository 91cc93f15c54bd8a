"""Environments of other packages as datasets, workflows and evaluators of a configuration.

Importing this package registers their configurations. The modules that make them, and the packages of the
environments, are imported when a component is first made.
"""

from jaxft.environments.configs import (
    EnvironmentFactoryConfig,
    EnvironmentRewardConfig,
    ReasoningGymDatasetConfig,
    ReasoningGymScoreConfig,
    VerifiersDatasetConfig,
    VerifiersRewardConfig,
    VerifiersWorkflowConfig,
)
from jaxft.harness.registry import DatasetConfig, EvaluatorConfig, WorkflowConfig, registry

registry.add(DatasetConfig, ReasoningGymDatasetConfig, "jaxft.environments.reasoning_gym:dataset")
registry.add(EvaluatorConfig, ReasoningGymScoreConfig, "jaxft.environments.reasoning_gym:score")
registry.add(DatasetConfig, VerifiersDatasetConfig, "jaxft.environments.verifiers:dataset")
registry.add(WorkflowConfig, VerifiersWorkflowConfig, "jaxft.environments.verifiers:workflow")
registry.add(EvaluatorConfig, VerifiersRewardConfig, "jaxft.environments.verifiers:reward")
registry.add(WorkflowConfig, EnvironmentFactoryConfig, "jaxft.environments.factory:workflow")
registry.add(EvaluatorConfig, EnvironmentRewardConfig, "jaxft.environments.factory:reward")
