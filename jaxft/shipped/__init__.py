"""The components that jaxft ships.

Importing this package registers their configurations. The modules of the components, and jax with them, are imported
when a component is first made.
"""

from jaxft.harness.registry import (
    DatasetConfig,
    EvaluatorConfig,
    LLMConfig,
    TrainerAdapterConfig,
    TrainerConfig,
    TrajectoryBuilderConfig,
    WorkflowConfig,
    registry,
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
from jaxft.shipped.reward_functions import RewardFunctionsConfig
from jaxft.shipped.single_turn import InMemoryDatasetConfig, SingleTurnConfig

registry.add(LLMConfig, LocalPolicyConfig, "jaxft.shipped.local_policy:local_policy")
registry.add(LLMConfig, OpenAILLMConfig, "jaxft.shipped.openai_llm:openai_llm")
registry.add(WorkflowConfig, HTTPAgentConfig, "jaxft.shipped.http_agent:http_agent")
registry.add(WorkflowConfig, SingleTurnConfig, "jaxft.shipped.single_turn:single_turn")
registry.add(DatasetConfig, InMemoryDatasetConfig, "jaxft.shipped.single_turn:in_memory")
registry.add(EvaluatorConfig, RewardFunctionsConfig, "jaxft.shipped.reward_functions:reward_functions")
registry.add(EvaluatorConfig, LLMJudgeConfig, "jaxft.shipped.llm_judge:llm_judge")
registry.add(TrainerAdapterConfig, LocalTrainerAdapterConfig, "jaxft.shipped.local_adapter:local_trainer_adapter")
registry.add(TrajectoryBuilderConfig, GRPOTrajectoryBuilderConfig, "jaxft.shipped.grpo:grpo_trajectory_builder")
registry.add(TrajectoryBuilderConfig, DPOTrajectoryBuilderConfig, "jaxft.shipped.dpo:dpo_trajectory_builder")
registry.add(TrainerConfig, GRPOTrainerConfig, "jaxft.shipped.grpo:grpo_trainer")
registry.add(TrainerConfig, DPOTrainerConfig, "jaxft.shipped.dpo:dpo_trainer")
