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
from jaxft.harness.registry import REGISTRY, DatasetConfig, EvaluatorConfig, WorkflowConfig

REGISTRY.add(DatasetConfig, ReasoningGymDatasetConfig, "jaxft.environments.reasoning_gym:dataset")
REGISTRY.add(EvaluatorConfig, ReasoningGymScoreConfig, "jaxft.environments.reasoning_gym:score")
REGISTRY.add(DatasetConfig, VerifiersDatasetConfig, "jaxft.environments.verifiers:dataset")
REGISTRY.add(WorkflowConfig, VerifiersWorkflowConfig, "jaxft.environments.verifiers:workflow")
REGISTRY.add(EvaluatorConfig, VerifiersRewardConfig, "jaxft.environments.verifiers:reward")
REGISTRY.add(WorkflowConfig, EnvironmentFactoryConfig, "jaxft.environments.factory:workflow")
REGISTRY.add(EvaluatorConfig, EnvironmentRewardConfig, "jaxft.environments.factory:reward")
