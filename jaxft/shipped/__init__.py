"""The components that jaxft ships.

Importing this package registers their configurations. The modules of the components, and jax with them, are imported
when a component is first made.
"""

import lazy_loader

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
from jaxft.shipped.configs import (
    DPOTrainerConfig,
    DPOTrajectoryBuilderConfig,
    GRPOTrainerConfig,
    GRPOTrajectoryBuilderConfig,
    HTTPAgentConfig,
    LLMJudgeConfig,
    LocalPolicyConfig,
    LocalTrainerAdapterConfig,
    OpenAILLMConfig,
)
from jaxft.shipped.evaluators import RewardFunctionsConfig
from jaxft.shipped.single_turn import InMemoryDatasetConfig, SingleTurnConfig

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)

REGISTRY.add(LLMConfig, LocalPolicyConfig, "jaxft.shipped.local_policy:local_policy")
REGISTRY.add(LLMConfig, OpenAILLMConfig, "jaxft.rollout.remote:openai_llm", extra="openai")
REGISTRY.add(WorkflowConfig, HTTPAgentConfig, "jaxft.shipped.http_agent:http_agent")
REGISTRY.add(WorkflowConfig, SingleTurnConfig, "jaxft.shipped.single_turn:single_turn")
REGISTRY.add(DatasetConfig, InMemoryDatasetConfig, "jaxft.shipped.single_turn:in_memory")
REGISTRY.add(EvaluatorConfig, RewardFunctionsConfig, "jaxft.shipped.evaluators:reward_functions")
REGISTRY.add(EvaluatorConfig, LLMJudgeConfig, "jaxft.shipped.evaluators:llm_judge")
REGISTRY.add(TrainerAdapterConfig, LocalTrainerAdapterConfig, "jaxft.shipped.local_adapter:local_trainer_adapter")
REGISTRY.add(TrajectoryBuilderConfig, GRPOTrajectoryBuilderConfig, "jaxft.shipped.grpo:grpo_trajectory_builder")
REGISTRY.add(TrajectoryBuilderConfig, DPOTrajectoryBuilderConfig, "jaxft.shipped.dpo:dpo_trajectory_builder")
REGISTRY.add(TrainerConfig, GRPOTrainerConfig, "jaxft.shipped.grpo:grpo_trainer")
REGISTRY.add(TrainerConfig, DPOTrainerConfig, "jaxft.shipped.dpo:dpo_trainer")
