"""The components that come with jaxft.

Importing this package registers their configurations. The modules of the components, and jax with them, are imported
when a component is first made.
"""

import lazy_loader

from jaxft.components.configs import (
    DPOTrainerConfig,
    DPOTrajectoryBuilderConfig,
    GRPOTrainerConfig,
    GRPOTrajectoryBuilderConfig,
    LocalPolicyConfig,
    LocalTrainerAdapterConfig,
    LoggedTrajectoryBuilderConfig,
    OpenAILLMConfig,
)
from jaxft.components.evaluators import LLMJudgeConfig, RewardFunctionsConfig
from jaxft.components.http_agent import HTTPAgentConfig
from jaxft.components.single_turn import InMemoryDatasetConfig, SingleTurnConfig
from jaxft.harness.registry import (
    REGISTRY,
    DatasetConfig,
    EvaluatorConfig,
    LLMConfig,
    TrainerAdapterConfig,
    TrainerConfig,
    TrajectoryBuilderConfig,
    WorkflowConfig,
)

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)

REGISTRY.add(LLMConfig, LocalPolicyConfig, "jaxft.components.local_policy:local_policy")
REGISTRY.add(LLMConfig, OpenAILLMConfig, "jaxft.rollout.remote:openai_llm", extra="openai")
REGISTRY.add(WorkflowConfig, HTTPAgentConfig, "jaxft.components.http_agent:http_agent")
REGISTRY.add(WorkflowConfig, SingleTurnConfig, "jaxft.components.single_turn:single_turn")
REGISTRY.add(DatasetConfig, InMemoryDatasetConfig, "jaxft.components.single_turn:in_memory")
REGISTRY.add(EvaluatorConfig, RewardFunctionsConfig, "jaxft.components.evaluators:reward_functions")
REGISTRY.add(EvaluatorConfig, LLMJudgeConfig, "jaxft.components.evaluators:llm_judge")
REGISTRY.add(TrainerAdapterConfig, LocalTrainerAdapterConfig, "jaxft.components.local_adapter:local_trainer_adapter")
REGISTRY.add(TrajectoryBuilderConfig, GRPOTrajectoryBuilderConfig, "jaxft.components.grpo:grpo_trajectory_builder")
REGISTRY.add(
    TrajectoryBuilderConfig,
    LoggedTrajectoryBuilderConfig,
    "jaxft.components.logged_builder:logged_trajectory_builder",
)
REGISTRY.add(TrajectoryBuilderConfig, DPOTrajectoryBuilderConfig, "jaxft.components.dpo:dpo_trajectory_builder")
REGISTRY.add(TrainerConfig, GRPOTrainerConfig, "jaxft.components.grpo:grpo_trainer")
REGISTRY.add(TrainerConfig, DPOTrainerConfig, "jaxft.components.dpo:dpo_trainer")
