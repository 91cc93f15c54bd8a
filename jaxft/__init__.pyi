"""The public names for type checkers, which cannot follow names that are imported when first used."""

from jaxft.components.collecting import (
    EpisodeCollector as EpisodeCollector,
    episode_items as episode_items,
)
from jaxft.core.advantages import (
    batch_advantages as batch_advantages,
    estimate_advantages as estimate_advantages,
    group_advantages as group_advantages,
    group_mean_advantages as group_mean_advantages,
    leave_one_out_advantages as leave_one_out_advantages,
    normalize_then_sum as normalize_then_sum,
    step_advantages as step_advantages,
    weighted_sum as weighted_sum,
)
from jaxft.core.checks import (
    check_batch as check_batch,
)
from jaxft.core.correction import (
    sampler_correction as sampler_correction,
)
from jaxft.core.generate import (
    generate as generate,
)
from jaxft.core.kl import (
    k1_penalty as k1_penalty,
    kl_penalty as kl_penalty,
)
from jaxft.core.logprobs import (
    init_value_head as init_value_head,
    token_logprobs as token_logprobs,
)
from jaxft.core.losses import (
    policy_loss as policy_loss,
    value_loss as value_loss,
)
from jaxft.core.mesh import (
    Layout as Layout,
    make_mesh as make_mesh,
)
from jaxft.core.objectives import (
    dpo_loss as dpo_loss,
    grpo_loss as grpo_loss,
    ppo_loss as ppo_loss,
    score as score,
    score_in_microbatches as score_in_microbatches,
    sft_loss as sft_loss,
)
from jaxft.core.packing import (
    packed_layout as packed_layout,
    padded_layout as padded_layout,
)
from jaxft.core.preference import (
    preference_loss as preference_loss,
)
from jaxft.core.reductions import (
    count_trained as count_trained,
)
from jaxft.core.returns import (
    gae as gae,
    outcome_rewards as outcome_rewards,
    reward_to_go as reward_to_go,
    whiten as whiten,
)
from jaxft.core.rewards import (
    soft_length_penalty as soft_length_penalty,
)
from jaxft.core.types import (
    Batch as Batch,
    Denominators as Denominators,
    FinishReason as FinishReason,
    Model as Model,
    Rollout as Rollout,
    Scored as Scored,
)
from jaxft.core.update import (
    TrainState as TrainState,
    init_train_state as init_train_state,
    make_update as make_update,
)
from jaxft.harness.config import (
    Config as Config,
    config_from_mapping as config_from_mapping,
    load_config as load_config,
)
from jaxft.harness.data_models import (
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
from jaxft.harness.datasets import (
    load_jsonl as load_jsonl,
)
from jaxft.harness.errors import (
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
from jaxft.harness.evaluation import (
    EpisodeOutcome as EpisodeOutcome,
    Evaluation as Evaluation,
    failure_report as failure_report,
)
from jaxft.harness.fields import (
    ConfigModel as ConfigModel,
    InputPath as InputPath,
    LLMRef as LLMRef,
    PathOrName as PathOrName,
)
from jaxft.harness.interfaces import (
    Trainer as Trainer,
    TrainerAdapter as TrainerAdapter,
    TrajectoryBuilder as TrajectoryBuilder,
)
from jaxft.harness.registry import (
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
from jaxft.harness.runtime import (
    run_arguments as run_arguments,
    run_script as run_script,
)
from jaxft.harness.session import (
    Session as Session,
    open_session as open_session,
)
from jaxft.models.bridge import (
    from_function as from_function,
    from_linen as from_linen,
    from_nnx as from_nnx,
)
from jaxft.models.config import (
    DecoderConfig as DecoderConfig,
    Lora as Lora,
    preset as preset,
)
from jaxft.models.hf import (
    init_model as init_model,
    load_model as load_model,
    save_model as save_model,
)
from jaxft.models.lora import (
    base_model as base_model,
    init_adapter as init_adapter,
    lora_decoder as lora_decoder,
    merge as merge,
)
from jaxft.models.peft import (
    adapter_numbers as adapter_numbers,
    load_adapter as load_adapter,
    load_merged as load_merged,
    save_adapter as save_adapter,
)
from jaxft.models.sharding import (
    layout_of as layout_of,
)
from jaxft.policy.chat import (
    load_tokenizer as load_tokenizer,
)
from jaxft.policy.client import (
    ChatClient as ChatClient,
    Reply as Reply,
)
from jaxft.policy.policy import (
    Policy as Policy,
)
from jaxft.policy.recorder import (
    Call as Call,
    Episode as Episode,
    TRAINING as TRAINING,
    VALIDATION as VALIDATION,
    episode as episode,
    function as function,
    in_episode as in_episode,
)
from jaxft.policy.sequences import (
    TokenSequence as TokenSequence,
    episode_messages as episode_messages,
    is_targeted as is_targeted,
    token_sequences as token_sequences,
)

__version__: str
