"""jaxft finetunes the language model inside an agent, in the process the agent runs in.

Names are imported when they are first used (PEP 562): `import jaxft` alone loads neither jax nor transformers.
"""

import importlib
from typing import Any

_HOMES = {
    "jaxft.core.advantages": (
        "batch_advantages",
        "estimate_advantages",
        "group_advantages",
        "group_mean_advantages",
        "leave_one_out_advantages",
        "normalize_then_sum",
        "step_advantages",
        "weighted_sum",
    ),
    "jaxft.core.checks": ("check_batch",),
    "jaxft.core.correction": ("sampler_correction",),
    "jaxft.core.generate": ("generate",),
    "jaxft.core.kl": ("k1_penalty", "kl_penalty"),
    "jaxft.core.logprobs": ("init_value_head", "token_logprobs"),
    "jaxft.core.losses": ("policy_loss", "value_loss"),
    "jaxft.core.mesh": ("Layout", "make_mesh"),
    "jaxft.core.objectives": ("dpo_loss", "grpo_loss", "ppo_loss", "score", "score_in_microbatches", "sft_loss"),
    "jaxft.core.packing": ("packed_layout", "padded_layout"),
    "jaxft.core.preference": ("preference_loss",),
    "jaxft.core.reductions": ("count_trained",),
    "jaxft.core.returns": ("gae", "outcome_rewards", "reward_to_go", "whiten"),
    "jaxft.core.rewards": ("soft_length_penalty",),
    "jaxft.core.types": ("Batch", "Denominators", "FinishReason", "Model", "Rollout", "Scored"),
    "jaxft.core.update": ("TrainState", "init_train_state", "make_update"),
    "jaxft.models.bridge": ("from_function", "from_linen", "from_nnx"),
    "jaxft.models.config": ("DecoderConfig", "Lora", "preset"),
    "jaxft.models.sharding": ("layout_of",),
    "jaxft.models.lora": ("base_model", "init_adapter", "lora_decoder", "merge"),
    "jaxft.models.peft": ("adapter_numbers", "load_adapter", "load_merged", "save_adapter"),
    "jaxft.models.hf": ("init_model", "load_model", "save_model"),
    "jaxft.policy.chat": ("load_tokenizer",),
    "jaxft.policy.policy": ("Policy",),
    "jaxft.policy.client": ("ChatClient", "Reply"),
    "jaxft.policy.recorder": ("TRAINING", "VALIDATION", "Call", "Episode", "episode", "function", "in_episode"),
    "jaxft.policy.sequences": ("TokenSequence", "episode_messages", "is_targeted", "token_sequences"),
    "jaxft.harness.config": ("Config", "config_from_mapping", "load_config"),
    "jaxft.harness.data_models": (
        "CurriculumLearningConfig",
        "DPOItem",
        "EpisodeItem",
        "EpisodeItemRole",
        "EvalInputItem",
        "EvalOutputItem",
        "EvaluationRunOutput",
        "FinetuneConfig",
        "FinetuneRunConfig",
        "OpenAIMessage",
        "RewardFunctionConfig",
        "TrainingJobRef",
        "TrainingJobStatus",
        "TrainingStatusEnum",
        "Trajectory",
        "TrajectoryCollection",
    ),
    "jaxft.harness.datasets": ("load_jsonl",),
    "jaxft.components.collecting": ("EpisodeCollector", "episode_items"),
    "jaxft.harness.errors": (
        "ComponentError",
        "ConfigError",
        "DatasetError",
        "JaxftError",
        "JobFailed",
        "NoLearningSignal",
        "NothingToTrain",
        "TooManyFailures",
        "TrajectoryError",
    ),
    "jaxft.harness.evaluation": ("EpisodeOutcome", "Evaluation", "failure_report"),
    "jaxft.harness.fields": ("ConfigModel", "InputPath", "LLMRef", "PathOrName"),
    "jaxft.harness.interfaces": ("Trainer", "TrainerAdapter", "TrajectoryBuilder"),
    "jaxft.harness.registry": (
        "DatasetConfig",
        "EvaluatorConfig",
        "GroupEvaluatorConfig",
        "LLMConfig",
        "TrainerAdapterConfig",
        "TrainerConfig",
        "TrajectoryBuilderConfig",
        "WorkflowConfig",
        "register_dataset_loader",
        "register_evaluator",
        "register_llm",
        "register_trainer",
        "register_trainer_adapter",
        "register_trajectory_builder",
        "register_workflow",
    ),
    "jaxft.harness.runtime": ("run_arguments", "run_script"),
    "jaxft.harness.session": ("Session", "open_session"),
}
_HOME = {name: module for module, names in _HOMES.items() for name in names}

__all__ = sorted(_HOME)
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'jaxft' has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
