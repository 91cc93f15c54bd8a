"""The public names: what `jaxft/__init__.py` imports when it is first used, and what type checkers read."""

from .core.advantages import (
    batch_advantages as batch_advantages,
    estimate_advantages as estimate_advantages,
    gae as gae,
    group_advantages as group_advantages,
    group_mean_advantages as group_mean_advantages,
    leave_one_out_advantages as leave_one_out_advantages,
    normalize_then_sum as normalize_then_sum,
    outcome_rewards as outcome_rewards,
    reward_to_go as reward_to_go,
    soft_overlong_punishment as soft_overlong_punishment,
    step_advantages as step_advantages,
    weighted_sum as weighted_sum,
    whiten as whiten,
)
from .core.checks import (
    check_batch as check_batch,
)
from .core.correction import (
    sampler_correction as sampler_correction,
)
from .core.generate import (
    generate as generate,
)
from .core.logprobs import (
    init_value_head as init_value_head,
    token_logprobs as token_logprobs,
)
from .core.losses import (
    k1_penalty as k1_penalty,
    kl_penalty as kl_penalty,
    policy_loss as policy_loss,
    preference_loss as preference_loss,
    value_loss as value_loss,
)
from .core.objectives import (
    dpo_loss as dpo_loss,
    grpo_loss as grpo_loss,
    ppo_loss as ppo_loss,
    score_batch as score_batch,
    sft_loss as sft_loss,
)
from .core.packing import (
    plan_packing as plan_packing,
    plan_padding as plan_padding,
)
from .core.reductions import (
    count_tokens as count_tokens,
)
from .core.sharding import (
    Sharding as Sharding,
    make_mesh as make_mesh,
)
from .core.types import (
    Batch as Batch,
    Denominators as Denominators,
    FinishReason as FinishReason,
    Model as Model,
    Rollout as Rollout,
    Scored as Scored,
)
from .core.update import (
    TrainState as TrainState,
    init_train_state as init_train_state,
    make_update as make_update,
)
from .errors import (
    ComponentError as ComponentError,
    ConfigError as ConfigError,
    DatasetError as DatasetError,
    JaxftError as JaxftError,
    JobFailed as JobFailed,
    NoLearningSignal as NoLearningSignal,
    NothingToTrain as NothingToTrain,
    TooManyFailures as TooManyFailures,
    TrajectoryError as TrajectoryError,
)
from .harness.config import (
    Config as Config,
    config_from_mapping as config_from_mapping,
    load_config as load_config,
)
from .harness.config_types import (
    ConfigModel as ConfigModel,
    InputPath as InputPath,
    LLMRef as LLMRef,
    PathOrName as PathOrName,
)
from .harness.contracts import (
    Trainer as Trainer,
    TrainerAdapter as TrainerAdapter,
    TrajectoryBuilder as TrajectoryBuilder,
)
from .harness.data_models import (
    CurriculumLearningConfig as CurriculumLearningConfig,
    DPOItem as DPOItem,
    EpisodeItem as EpisodeItem,
    EpisodeItemRole as EpisodeItemRole,
    EvalInputItem as EvalInputItem,
    EvalOutputItem as EvalOutputItem,
    EvaluationRunOutput as EvaluationRunOutput,
    FinetuneConfig as FinetuneConfig,
    FinetuneRunConfig as FinetuneRunConfig,
    OpenAIMessage as OpenAIMessage,
    RewardFunctionConfig as RewardFunctionConfig,
    TrainingJobRef as TrainingJobRef,
    TrainingJobStatus as TrainingJobStatus,
    TrainingStatusEnum as TrainingStatusEnum,
    Trajectory as Trajectory,
    TrajectoryCollection as TrajectoryCollection,
)
from .harness.datasets import (
    load_jsonl as load_jsonl,
)
from .harness.evaluation import (
    EpisodeOutcome as EpisodeOutcome,
    Evaluation as Evaluation,
    failure_report as failure_report,
)
from .harness.registry import (
    DatasetConfig as DatasetConfig,
    EvaluatorConfig as EvaluatorConfig,
    GroupEvaluatorConfig as GroupEvaluatorConfig,
    LLMConfig as LLMConfig,
    TrainerAdapterConfig as TrainerAdapterConfig,
    TrainerConfig as TrainerConfig,
    TrajectoryBuilderConfig as TrajectoryBuilderConfig,
    WorkflowConfig as WorkflowConfig,
    register_dataset_loader as register_dataset_loader,
    register_evaluator as register_evaluator,
    register_llm as register_llm,
    register_trainer as register_trainer,
    register_trainer_adapter as register_trainer_adapter,
    register_trajectory_builder as register_trajectory_builder,
    register_workflow as register_workflow,
)
from .harness.runtime import (
    run_arguments as run_arguments,
    run_script as run_script,
)
from .harness.session import (
    Session as Session,
    open_session as open_session,
)
from .models.bridge import (
    from_function as from_function,
    from_linen as from_linen,
    from_nnx as from_nnx,
)
from .models.config import (
    DecoderConfig as DecoderConfig,
    LoraSpec as LoraSpec,
    model_preset as model_preset,
)
from .models.decoder import (
    sharding_for as sharding_for,
)
from .models.hf import (
    save_model as save_model,
)
from .models.load import (
    base_model as base_model,
    init_model as init_model,
    load_merged as load_merged,
    load_model as load_model,
)
from .models.lora import (
    merge_lora as merge_lora,
)
from .models.peft import (
    load_lora_config as load_lora_config,
    load_adapter as load_adapter,
    save_adapter as save_adapter,
)
from .rollout.chat import (
    load_tokenizer as load_tokenizer,
)
from .rollout.client import (
    ChatClient as ChatClient,
    Reply as Reply,
)
from .rollout.policy import (
    Policy as Policy,
)
from .rollout.recorder import (
    Call as Call,
    Episode as Episode,
    TRAINING as TRAINING,
    VALIDATION as VALIDATION,
    episode as episode,
    named_function as named_function,
    in_episode as in_episode,
)
from .rollout.sequences import (
    TokenSequence as TokenSequence,
    episode_messages as episode_messages,
    is_targeted as is_targeted,
    token_sequences as token_sequences,
)
from .shipped.rollout_builder import (
    RolloutBuilder as RolloutBuilder,
    to_messages as to_messages,
)

__version__: str
