"""The public names, for type checkers and for `jaxft/__init__.py`, which imports each when it is first used.

The namespaces hold what only code of a loss, a builder or a sampler of its own needs; names of everyday use stand here,
some of them in both places, as in optax.
"""

from . import (
    advantages as advantages,
    episodes as episodes,
    losses as losses,
    packing as packing,
    sampling as sampling,
)
from .core.advantages import (
    gae as gae,
    group_advantages as group_advantages,
)
from .core.checks import (
    check_batch as check_batch,
)
from .core.fused_head import (
    fused_token_logprobs as fused_token_logprobs,
)
from .core.generate import (
    generate as generate,
)
from .core.logprobs import (
    init_value_head as init_value_head,
    token_logprobs as token_logprobs,
)
from .core.losses import (
    policy_loss as policy_loss,
)
from .core.objectives import (
    dpo_loss as dpo_loss,
    grpo_loss as grpo_loss,
    ppo_loss as ppo_loss,
    score_batch as score_batch,
    sft_loss as sft_loss,
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
from .harness.builder import (
    Builder as Builder,
)
from .harness.config import (
    Config as Config,
    config_from_mapping as config_from_mapping,
    load_config as load_config,
)
from .harness.config_builder import (
    ConfigBuilder as ConfigBuilder,
)
from .harness.config_types import (
    ConfigModel as ConfigModel,
    InputPath as InputPath,
    LLMRef as LLMRef,
    PathOrName as PathOrName,
    RewardFunctionConfig as RewardFunctionConfig,
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
    EvalInput as EvalInput,
    EvalInputItem as EvalInputItem,
    EvalOutput as EvalOutput,
    EvalOutputItem as EvalOutputItem,
    EvaluationRunOutput as EvaluationRunOutput,
    FinetuneConfig as FinetuneConfig,
    FinetuneRunConfig as FinetuneRunConfig,
    OpenAIMessage as OpenAIMessage,
    TensorBoardLoggerConfig as TensorBoardLoggerConfig,
    TrainingJobRef as TrainingJobRef,
    TrainingJobStatus as TrainingJobStatus,
    TrainingStatusEnum as TrainingStatusEnum,
    Trajectory as Trajectory,
    TrajectoryCollection as TrajectoryCollection,
    WandbLoggerConfig as WandbLoggerConfig,
)
from .harness.steps import (
    IntermediateStep as IntermediateStep,
    IntermediateStepCategory as IntermediateStepCategory,
    IntermediateStepPayload as IntermediateStepPayload,
    IntermediateStepState as IntermediateStepState,
    IntermediateStepType as IntermediateStepType,
    InvocationNode as InvocationNode,
    StreamEventData as StreamEventData,
    TTCEventData as TTCEventData,
    parse_to_openai_messages as parse_to_openai_messages,
)
from .harness.datasets import (
    load_jsonl as load_jsonl,
)
from .harness.evaluation import (
    EpisodeOutcome as EpisodeOutcome,
    Evaluation as Evaluation,
)
from .harness.evaluators import (
    BaseEvaluator as BaseEvaluator,
    EvaluatorInfo as EvaluatorInfo,
)
from .harness.registry import (
    DatasetConfig as DatasetConfig,
    EvaluatorConfig as EvaluatorConfig,
    GroupEvaluatorConfig as GroupEvaluatorConfig,
    LLMConfig as LLMConfig,
    LoggerConfig as LoggerConfig,
    TrainerAdapterConfig as TrainerAdapterConfig,
    TrainerConfig as TrainerConfig,
    TrajectoryBuilderConfig as TrajectoryBuilderConfig,
    WorkflowConfig as WorkflowConfig,
    register_dataset_loader as register_dataset_loader,
    register_evaluator as register_evaluator,
    register_llm as register_llm,
    register_logger as register_logger,
    register_trainer as register_trainer,
    register_trainer_adapter as register_trainer_adapter,
    register_trajectory_builder as register_trajectory_builder,
    register_workflow as register_workflow,
)
from .harness.runtime import (
    run_script as run_script,
)
from .harness.opening import (
    open_session as open_session,
)
from .harness.session import (
    Session as Session,
)
from .harness.verbs import (
    run_arguments as run_arguments,
)
from .models.bridge import (
    from_function as from_function,
    from_linen as from_linen,
    from_nnx as from_nnx,
)
from .models.config import (
    DecoderConfig as DecoderConfig,
    LayerKind as LayerKind,
    LoraSpec as LoraSpec,
    model_preset as model_preset,
)
from .models.decoder_sharding import (
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
    load_adapter as load_adapter,
    save_adapter as save_adapter,
)
from .models.rope import (
    Rope as Rope,
)
from .rollout.tokenizer import (
    load_tokenizer as load_tokenizer,
)
from .rollout.client import (
    ChatClient as ChatClient,
)
from .rollout.chat_request import (
    ChatRequest as ChatRequest,
    CompletionRequest as CompletionRequest,
    Delta as Delta,
)
from .rollout.language_model import (
    LanguageModel as LanguageModel,
)
from .rollout.messages import (
    ToolCall as ToolCall,
)
from .rollout.policy import (
    Policy as Policy,
)
from .rollout.calls import (
    Call as Call,
    Reply as Reply,
)
from .rollout.recorder import (
    Episode as Episode,
)
from .rollout.current import (
    episode as episode,
    named_function as named_function,
    in_episode as in_episode,
)
from .rollout.sequences import (
    TokenSequence as TokenSequence,
    token_sequences as token_sequences,
)
from .runs.loggers import (
    LoggedEpisode as LoggedEpisode,
    LoggedRun as LoggedRun,
    RunLogger as RunLogger,
)
from .components.configs import (
    DPOTrainerConfig as DPOTrainerConfig,
    DPOTrajectoryBuilderConfig as DPOTrajectoryBuilderConfig,
    GRPOTrainerConfig as GRPOTrainerConfig,
    GRPOTrajectoryBuilderConfig as GRPOTrajectoryBuilderConfig,
    LocalPolicyConfig as LocalPolicyConfig,
    LocalTrainerAdapterConfig as LocalTrainerAdapterConfig,
)
from .components.dpo import (
    DPOTrainer as DPOTrainer,
    DPOTrajectoryBuilder as DPOTrajectoryBuilder,
)
from .components.grpo import (
    GRPOTrainer as GRPOTrainer,
    GRPOTrajectoryBuilder as GRPOTrajectoryBuilder,
)
from .components.local_adapter import (
    LocalTrainerAdapter as LocalTrainerAdapter,
)
from .components.logged_runs import (
    dpo as dpo,
)
from .components.logged_runs import (
    sft as sft,
)
from .components.train import (
    TrainResult as TrainResult,
)
from .components.train import (
    train as train,
)

__version__: str
