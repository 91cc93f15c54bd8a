"""Configuration of the components that come with jaxft. Nothing here imports jax."""

import warnings
from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field, SecretStr, field_validator, model_serializer, model_validator

from jaxft import training
from jaxft.errors import did_you_mean
from jaxft.harness.addresses import HTTPAddress, ServeConfig
from jaxft.harness.config_types import ConfigModel, LLMRef, PathOrName, config_error, entries
from jaxft.harness.functions import Function, NamedFunction, check_options
from jaxft.harness.registry import LLMConfig, TrainerAdapterConfig, TrainerConfig, TrajectoryBuilderConfig
from jaxft.models.config import LoraSpec
from jaxft.training.config import LossConfig
from jaxft.training.optimizer_config import OptimizerConfig, default_rate


class MeshConfig(ConfigModel):
    """The axes of a device mesh.

    The sizes multiply to the number of devices. One of them may be -1, which stands for all devices that are left. A
    parameter that does not divide is copied, with a warning.
    """

    data: int = -1
    """Devices that split rows and copy parameters; -1: all that are left."""
    fsdp: int = 1
    """Devices that split rows, parameters and optimizer state; -1: all that are left."""
    tensor: int = 1
    """Devices that split heads and feed-forward width; -1: all that are left."""
    expert: int = Field(default=1, ge=1)
    """Devices that split rows, and the experts of a mixture."""


class LoraConfig(ConfigModel):
    """Low-rank adapters (arXiv 2106.09685) beside the kernels of a frozen model."""

    rank: int = Field(default=8, ge=1)
    """Rank of each adapter."""
    alpha: float = Field(default=16.0, gt=0.0, allow_inf_nan=False)
    """Scale of an adapter's output, divided by rank."""
    targets: tuple[str, ...] = ("*_proj",)
    """Projections that get an adapter, by name or path: q_proj, self_attn/*."""
    use_rslora: bool = False
    """Divide alpha by the square root of rank instead (arXiv 2312.03732)."""
    path: PathOrName | None = None
    """Folder of adapters in PEFT's format, with their own settings; null: new adapters."""

    @model_validator(mode="after")
    def _has_targets(self) -> "LoraConfig":
        self.lora()  # raises for a target that matches no projection
        return self

    def lora(self) -> LoraSpec:
        """Return the settings that the model needs to know."""
        return LoraSpec(self.rank, self.alpha, self.targets, self.use_rslora)


SNAPSHOT_FIELDS = ("max_context_tokens", "slots", "cache_tokens", "long_prompts")
"""Fields of a policy that a snapshot of it may have of its own."""

SNAPSHOT_EVERY = 10
"""Versions of a policy after which a snapshot of it is replaced, unless the configuration says otherwise."""


class LocalPolicyConfig(LLMConfig, name="local_policy", factory="jaxft.components.local_policy:local_policy"):
    """A model in this process: a Hugging Face checkpoint, random weights in the shape of a preset, or a snapshot.

    A snapshot is an earlier version of another policy. It is never trained, and has all fields of that policy but those
    of `SNAPSHOT_FIELDS`, which may be its own.
    """

    module = "jaxft.components.local_policy"

    path: PathOrName | None = None
    """Folder, GGUF file or hub id of a model; null: random weights of preset's shape."""
    preset: str | None = None
    """Shape of random weights, such as qwen3-1m; null: path decides it."""
    tokenizer: PathOrName | None = None
    """Folder, GGUF file or hub id of a tokenizer; null: the model's, or a token per byte."""
    ignored_keys: tuple[str, ...] = ()
    """Keys of the checkpoint's config.json that change no arithmetic, though jaxft does not know them."""
    dtype: Literal["auto", "float32", "bfloat16", "int8"] = "auto"
    """Type of the parameters. auto: float32, but bfloat16 for the frozen base of adapters on GPUs and TPUs. int8,
    with lora: the kernels of the frozen base, to train and to sample with; its rest is as with auto."""
    compute_dtype: Literal["auto", "float32", "bfloat16"] | None = "auto"
    """Type of products, activations, keys and values, and of the weights to sample with. auto: bfloat16 on GPUs and
    TPUs, that of the parameters on CPUs. null: that of the parameters."""
    sampling_dtype: Literal["int8", "fp8"] | None = None
    """Type of the kernels to sample with, made of the parameters after each update, with a scale for each output
    channel; embedding, head, norms, routers, activations, keys and values stay in compute_dtype. null:
    compute_dtype."""
    quantize_head: bool = False
    """With sampling_dtype: the head to sample with is of that type, too. If it is tied to the embedding, it is a
    copy, and tokens are looked up in compute_dtype."""
    kv_cache_dtype: Literal["fp8"] | None = None
    """With sampling_dtype: type of keys and values, without a scale. null: compute_dtype."""
    remat: Literal["auto", "none", "dots", "projections", "attention", "full", "least"] = "auto"
    """Activations that the backward pass computes again to save memory. none: none. dots: all but products with
    weights and attention. projections: all but attention and its projections. attention: all but attention. full:
    whole layers. least: whole layers and logits, with the layers in a loop. auto: the first of these, on TPUs from
    dots on, whose compiled update fits the device's memory; dots on CPUs."""
    mesh: MeshConfig | None = None
    """Devices that share the model, rows and requests; null: the first device."""
    sampler_mesh: MeshConfig | None = None
    """Devices that sample alone: those behind the devices of mesh (or behind the first one), which then train alone.
    Each version of the weights is sent to them once. One of the two meshes may take all devices that are left. It
    pays with max_staleness above 0, as the others would wait. null: those of mesh do both."""
    lora: LoraConfig | None = None
    """Low-rank adapters, which alone are trained; null: all parameters are."""
    max_context_tokens: int = Field(default=512, ge=2)
    """Tokens of the longest conversation, answers included."""
    slots: int = Field(default=64, ge=1)
    """Requests that are decoded at the same time."""
    cache_tokens: int | None = Field(default=None, ge=1)
    """Tokens whose keys and values fit in the cache: those of all requests that are decoded, and of prompts kept for
    other generations and next turns. With fewer, requests wait for pages of 64 tokens; null: slots x
    max_context_tokens."""
    long_prompts: Literal["fail", "drop", "truncate_left"] = "fail"
    """Treatment of a prompt that leaves no room in max_context_tokens for an answer. fail: the call raises an error,
    and the episode fails unless it catches that. drop: the same, but a training episode counts in dropped_episodes
    and not as failed. truncate_left: the prompt loses its first tokens, until max_tokens or half of the context is
    left for the answer (truncated_prompts counts such calls)."""
    snapshot_of: LLMRef | None = None
    """Policy that this model is an earlier version of, as an opponent that is not trained: an entry of llms of type
    local_policy. Beside it there may be every, slots, max_context_tokens, cache_tokens and long_prompts, the last
    four of which are the policy's by default; all other fields are the policy's. null: a model of its own."""
    every: int | None = Field(
        default=None,
        ge=1,
        description="With snapshot_of: the snapshot becomes the policy whenever the policy's version, which grows by 1 "
        f"with each job that makes an update, is a multiple of this number; null: {SNAPSHOT_EVERY}.",
    )
    adapter: PathOrName | None = None
    """With snapshot_of: folder of LoRA adapters in PEFT's format. This model is then that one, which is not trained
    and on one device, with these adapters beside its weights, in one batch with its requests. Beside it there may be
    long_prompts. null: an earlier version of it."""
    serve: ServeConfig | None = None
    """Address under which the run serves its language models, by their names, as long as it runs; null: none."""

    @property
    def served_at(self) -> ServeConfig | None:
        """The address at which the run serves its language models."""
        return self.serve

    def with_higher_port(self, difference: int) -> "LocalPolicyConfig":
        """Return this policy for another process of the machine, whose port, if one is chosen, is higher."""
        if self.serve is None or not self.serve.port:
            return self
        return self.model_copy(update={"serve": self.serve.model_copy(update={"port": self.serve.port + difference})})

    @model_validator(mode="after")
    def _has_a_model(self) -> "LocalPolicyConfig":
        if self.snapshot_of is None:
            for name in ("every", "adapter"):
                if dict(self)[name] is not None:
                    raise config_error(f"has '{name}', but no 'snapshot_of': name the policy that it belongs to")
            if self.path is None and self.preset is None:
                raise config_error(
                    "needs 'path' (a checkpoint), 'preset' (the shape of a model of random weights) or 'snapshot_of'"
                )
            if self.dtype == "int8" and self.lora is None:
                raise config_error("has dtype int8, in which nothing can be trained: set lora, or dtype float32")
            for name in ("sampling_dtype", "quantize_head", "kv_cache_dtype"):
                if dict(self)[name] and self.dtype == "int8":
                    raise config_error(f"has {name}, but with dtype int8 the base is in eight bits: leave it out")
                if dict(self)[name] and self.sampling_dtype is None:
                    raise config_error(f"has {name}, but no sampling_dtype: set that to int8 or fp8, or leave it out")
            return self
        if self.adapter is not None and self.every is not None:
            raise config_error("has 'every' beside 'adapter': adapters stay as they are, leave it out")
        ignored = self.model_fields_set.intersection(SNAPSHOT_FIELDS) - {"long_prompts"}
        if self.adapter is not None and ignored:
            told = f"{', '.join(sorted(ignored))} beside 'adapter' change nothing: those of '{self.snapshot_of}' hold"
            warnings.warn(f"{told}; leave them out, as a later version refuses them", FutureWarning, stacklevel=2)
        allowed = ("snapshot_of", "every", "adapter", *SNAPSHOT_FIELDS)
        others = {name: field for name, field in type(self).model_fields.items() if name not in allowed}
        for name, field in others.items():
            if dict(self)[name] != field.default:
                raise config_error(
                    f"has '{name}' beside 'snapshot_of', but a snapshot has that of '{self.snapshot_of}': leave it out"
                )
        return self

    @model_serializer(mode="wrap")
    def _with_type(self, serialize: Any) -> dict[str, Any]:
        """Leave out the fields that a snapshot has from its policy, where alone a resumed run may then change them."""
        values = {"_type": self.type_name, **serialize(self)}
        if self.snapshot_of is None:
            return values
        kept = ("_type", "snapshot_of", *(name for name in SNAPSHOT_FIELDS if name in self.model_fields_set))
        own = {"every": self.snapshot_every} if self.adapter is None else {"adapter": self.adapter}
        return {name: values[name] for name in kept} | own

    @property
    def snapshot_every(self) -> int:
        """Number of versions after which a snapshot is replaced."""
        return SNAPSHOT_EVERY if self.every is None else self.every

    def with_sampling_settings(self, policy: "LocalPolicyConfig") -> "LocalPolicyConfig":
        """Return the configuration with the policy's `SNAPSHOT_FIELDS` in place of those that were left out."""
        return self.model_copy(
            update={name: dict(policy)[name] for name in SNAPSHOT_FIELDS if name not in self.model_fields_set}
        )

    def faults(self, name: str, config: Any) -> list[tuple[str, str]]:
        """Return the faults of a snapshot: it is of no policy, or something would train it."""
        if self.snapshot_of is None:
            return []
        of, path, found = self.snapshot_of, f"llms.{name}.snapshot_of", list[tuple[str, str]]()
        policy = config.llms.get(of)
        policies = [
            other
            for other, llm in config.llms.items()
            if isinstance(llm, LocalPolicyConfig) and llm.snapshot_of is None and other != name
        ]
        hint = did_you_mean(of, policies, what="policies")
        if of == name:
            found.append((path, f"'{of}' is this snapshot itself{hint}"))
        elif not isinstance(policy, LocalPolicyConfig):
            kind = "not in 'llms'" if policy is None else f"a model of type {policy.type_name}, not local_policy"
            found.append((path, f"'{of}' is {kind}{hint}"))
        elif policy.snapshot_of is not None:
            found.append((path, f"'{of}' is a snapshot, too: name the policy that it is of, '{policy.snapshot_of}'"))
        elif self.adapter is not None and (policy.lora, policy.mesh, policy.sampler_mesh) != (None, None, None):
            found.append((path, f"'{of}' has lora or a mesh: adapters need a base without any, on one device"))
        refusal = f"'{name}' is a snapshot, which is never trained: name the policy that it is of, '{of}'"
        for adapter, each in config.trainer_adapters.items():
            if isinstance(each, LocalTrainerAdapterConfig) and each.llm == name:
                found.append((f"trainer_adapters.{adapter}.llm", refusal))
            elif isinstance(each, LocalTrainerAdapterConfig) and each.llm == of and self.adapter is not None:
                found.append((path, f"'{of}' is trained, and adapters belong to their base as it was"))
        if config.finetuning.target_model == name:
            found.append(("finetuning.target_model", refusal))
        return found


class OpenAILLMConfig(LLMConfig, name="openai", factory="jaxft.rollout.remote:openai_llm", install="openai"):
    """A model on a server that speaks OpenAI's API, for judges, simulated users and helpers.

    Its calls are recorded in the episode, but never trained.
    """

    model: str = Field(min_length=1)
    """Name of the model on the server."""
    base_url: HTTPAddress | None = None
    """Address that /chat/completions is added to, as in http://localhost:8000/v1; null: the environment variable
    OPENAI_BASE_URL, or else OpenAI's own."""
    api_key: SecretStr | None = None
    """Key of the server; servers without keys take any text. null: the environment variable OPENAI_API_KEY."""
    max_retries: int = Field(default=2, ge=0)
    """Times that a request is repeated, with growing pauses, after it could not be sent, timed out, or had the
    status 408, 409, 429 or 5xx."""
    timeout_seconds: float = Field(default=600.0, gt=0.0, allow_inf_nan=False)
    """Seconds that each attempt may wait for the server to accept a connection, or to send something."""


class LocalTrainerAdapterConfig(
    TrainerAdapterConfig, name="local_trainer_adapter", factory="jaxft.components.local_adapter:local_trainer_adapter"
):
    """Trains a local_policy in this process."""

    llm: LLMRef
    """Policy to train: an entry of llms of type local_policy."""
    loss: LossConfig = LossConfig()
    """Loss, advantage estimator, KL and penalties."""
    optimizer: OptimizerConfig = OptimizerConfig()
    """Optimizer, schedule and gradient clipping."""
    microbatch_tokens: int | None = Field(default=None, ge=1)
    """Maximum number of tokens, padding included, in one forward and backward pass. null: 8192, or 1024 on CPUs."""
    packing: bool | None = None
    """true: several short sequences share a row, and long prompts are computed once for all their answers. false:
    each sequence has a row, and rows of similar length share a microbatch. null: true, except where only rows of one
    sequence have a fused attention kernel: on GPUs with a sliding window."""
    routing_replay: bool = True
    """Scores and updates of a mixture of experts route each token to the experts that it had while it was sampled.
    false: they route anew."""
    num_minibatches: int = Field(default=1, ge=1)
    """Optimizer steps per pass over a job's trajectories."""
    num_iterations: int = Field(default=1, ge=1)
    """Passes over the trajectories of a job."""

    @property
    def has_own_reference(self) -> bool:
        """True if the reference of the KL is loaded from a checkpoint of its own."""
        return self.loss.needs_reference and self.loss.reference.path is not None

    def resolved(self, config: Any, recorded: Mapping[str, Any]) -> "LocalTrainerAdapterConfig":
        """Return the adapter with a learning rate, if something takes one: that of the weights that it trains.

        `microbatch_tokens` are those of `recorded`, or stay None: the platform is not known here.
        """
        given, policy = self.optimizer, config.llms.get(self.llm)
        optimizer = {"learning_rate": entries(recorded, "optimizer").get("learning_rate")}
        tokens = recorded.get("microbatch_tokens")
        before = self.model_validate({"llm": self.llm, "optimizer": optimizer, "microbatch_tokens": tokens})
        own = {"microbatch_tokens": before.microbatch_tokens} if self.microbatch_tokens is None else {}
        if "learning_rate" in given.model_fields_set and given.learning_rate is not None:
            return self.model_copy(update=own)
        rate = before.optimizer.learning_rate
        if rate is None and isinstance(policy, LocalPolicyConfig) and given.takes_rate:
            adapters, imitates = policy.lora is not None, self.loss.name == "sft"
            rate = default_rate(is_random=policy.path is None, has_adapters=adapters, imitates=imitates)
        return self.model_copy(update=own | ({} if rate is None else {"optimizer": given.with_rate(rate)}))

    def faults(self, name: str, config: Any) -> list[tuple[str, str]]:
        """Return the faults of own functions, as far as parameters and shapes tell, of tasks and of the builder."""
        tasks, faults = config.finetuning.per_task, list[tuple[str, str]]()
        for task in self.loss.per_task or ():
            if task not in tasks:
                near = did_you_mean(task, tasks, what="there")
                faults.append((f"loss.per_task.{task}", f"is not in 'finetuning.per_task'{near}"))
        if self.loss.is_own or self.optimizer.is_own:
            faults += training.check_signatures(self.loss.for_context(1), self.optimizer)
        found = [(f"trainer_adapters.{name}.{field}", message) for field, message in faults]
        return found + (self._combination_faults(name, config) if name == config.finetuning.trainer_adapter else [])

    def _combination_faults(self, name: str, config: Any) -> list[tuple[str, str]]:
        """Return the faults of the run's builder and trainer in combination with this loss."""
        run, loss = config.finetuning, self.loss
        builder, trainer = config.trajectory_builders.get(run.trajectory_builder), config.trainers.get(run.trainer)
        kinds = DPOTrajectoryBuilderConfig, GRPOTrajectoryBuilderConfig, LoggedTrajectoryBuilderConfig
        is_dpo, is_grpo, is_logged = (isinstance(builder, kind) for kind in kinds)
        has_rewards = config.eval.validation is not None and run.reward_function is not None
        stops_early = isinstance(trainer, GRPOTrainerConfig) and trainer.early_stop != EarlyStopConfig()
        is_apart = loss.multi_objective_aggregation == "normalize_then_sum"
        policy, reference = config.llms.get(self.llm), loss.reference
        dtype = policy.dtype if isinstance(policy, LocalPolicyConfig) and policy.lora is None else None
        is_coarse = dtype in ("bfloat16", "float16") and reference.update_every is not None and reference.mixing < 1
        from_episodes = {
            "distillation": (loss.distillation and loss.distillation.templates, "texts for the teacher alone"),
            "router_aux_loss_coef": (loss.router_aux_loss_coef, "recorded experts"),
            "router_bias_update_rate": (loss.router_bias_update_rate, "recorded experts"),
            "observation_coef": (loss.observation_coef, "marked results of tools"),
        }
        faults = [
            (is_dpo and loss.name != "dpo", "name", f"is '{loss.name}', which learns from no pairs: set it to dpo"),
            (is_grpo and loss.name == "dpo", "name", "is 'dpo', which needs pairs: take dpo_trajectory_builder"),
            (
                is_grpo and is_apart and builder.failed_reward is not None,
                "multi_objective_aggregation",
                "is normalize_then_sum, but failed_reward is a reward without a name: leave out one of the two",
            ),
            (
                is_coarse,
                "reference.mixing",
                f"is {reference.mixing}, which weights in {dtype} round away: set llms.{self.llm}.dtype to float32, "
                f"and its compute_dtype to {dtype}; or set mixing to 1",
            ),
        ]
        faults += [
            (is_logged and bool(value), field, f"logged rows have no {lack}, so it does nothing: leave it out")
            for field, (value, lack) in from_episodes.items()
        ]
        found = [(f"trainer_adapters.{name}.loss.{field}", message) for is_found, field, message in faults if is_found]
        if is_grpo and isinstance(trainer, DPOTrainerConfig):
            found.append(
                (f"trainers.{run.trainer}", "is a dpo_trainer, which needs pairs: take dpo_trajectory_builder")
            )
        if is_logged and stops_early and not has_rewards:
            way_out = "leave it out, or set eval.validation and finetuning.reward_function"
            found.append((f"trainers.{run.trainer}.early_stop", f"needs rewards of episodes: {way_out}"))
        return found

    def for_context(self, max_context_tokens: int) -> "LocalTrainerAdapterConfig":
        """Return the settings for a policy with this context, which the loss may take for its token budget."""
        return self.model_copy(update={"loss": self.loss.for_context(max_context_tokens)})

    @model_validator(mode="after")
    def _reinforce_updates_once(self) -> "LocalTrainerAdapterConfig":
        if self.loss.name == "reinforce" and self.num_minibatches * self.num_iterations > 1:
            raise config_error("loss 'reinforce' has no ratio: it allows num_minibatches 1 and num_iterations 1 only")
        return self


class GRPOTrajectoryBuilderConfig(
    TrajectoryBuilderConfig, name="grpo_trajectory_builder", factory="jaxft.components.grpo:grpo_trajectory_builder"
):
    """Groups of episodes, one group per example."""

    num_generations: int = Field(default=8, ge=1)
    """Episodes per example, which form its group."""
    failed_reward: float | None = Field(default=None, allow_inf_nan=False)
    """Reward of an episode whose agent raised an error after an answer of the policy, as agents do that cannot read
    an answer; such episodes are then trained, unless it was a time-out. null: they are left out."""


class LoggedTrajectoryBuilderConfig(
    TrajectoryBuilderConfig,
    name="logged_trajectory_builder",
    factory="jaxft.components.logged_builder:logged_trajectory_builder",
):
    """Rows of the data set as trajectories: logged conversations or preferences, for sft, dpo and offline losses."""

    needs_reward = False

    llm: LLMRef
    """Policy that is trained, whose chat template writes the rows."""
    trained: Literal["answers", "last_answer"] = "answers"
    """Messages that are trained. answers: all of the assistant, but those with a weight of 0. last_answer: the last
    one."""
    long_rows: Literal["error", "drop", "truncate"] = "error"
    """Rows longer than the context. error: they are refused. drop: they are left out, and counted. truncate: their
    ends are cut off."""


class EarlyStopConfig(ConfigModel):
    """Early stopping of a run by its mean reward: the validation reward, or without validation the training reward."""

    target_reward: float | None = Field(default=None, allow_inf_nan=False)
    """Mean reward at which the run ends; null: no target."""
    patience: int | None = Field(default=None, ge=1)
    """Number of mean rewards in a row without a gain after which the run ends; null: no limit."""


CALLBACK_KEYWORDS = {"on_trajectories": ("trajectories", "epoch"), "on_epoch_end": ("metrics", "epoch")}
"""Keywords of the callbacks of a trainer."""


class LoggedTrainerConfig(TrainerConfig):
    """Settings of both trainers, GRPO's and DPO's."""

    max_failed_fraction: float = Field(default=0.5, gt=0.0, le=1.0)
    """Maximum fraction of failed episodes in a collection."""
    max_bad_updates: int = Field(default=3, ge=1)
    """Number of non-finite updates in a row that ends the run."""
    on_trajectories: NamedFunction | None = None
    """Function as module:name that sees the trajectories of each epoch before they are trained, and must not change
    them. It gets trajectories (a list of groups) and epoch by its parameters; numbers that it returns by name are
    metrics of the epoch. null: none."""
    on_epoch_end: NamedFunction | None = None
    """Function as module:name that is called after each epoch, with epoch and metrics by its parameters; numbers
    that it returns by name are further metrics. null: none."""

    @field_validator("on_trajectories", "on_epoch_end")
    @classmethod
    def _takes_what_there_is(cls, function: Function | None, info: Any) -> Function | None:
        known = CALLBACK_KEYWORDS[info.field_name]
        if function is not None:
            if not any(map(function.takes, known)):
                raise config_error(f"{function.place} takes neither '{known[0]}' nor '{known[1]}'")
            check_options(function, {}, known)
        return function


class GRPOTrainerConfig(LoggedTrainerConfig, name="grpo_trainer", factory="jaxft.components.grpo:grpo_trainer"):
    """One collection and one training job per epoch."""

    examples_per_update: int | None = Field(default=None, ge=1)
    """Examples of an epoch; each pass over the data has all of them once, in a new order. null: all."""
    max_staleness: int = Field(default=0, ge=0)
    """Policy versions that episodes may be behind when they are trained. 0: a collection and its job take turns. 1:
    the next collection is sampled beside each job, with the weights from before it; equal runs stay equal, bit for
    bit. 2 or more: groups that take long are carried over to later jobs, up to so many; equal runs then differ."""
    in_flight: Literal["finish", "continue"] = "finish"
    """With max_staleness of 2 or more, requests that run when the weights change. finish: they end with the weights
    that they began with, and others wait. continue: they go on with the new weights, and each token has its version."""
    partial_rollout_tokens: int | None = Field(default=None, ge=1)
    """With max_staleness of 1 or more: tokens that an answer gets in a collection; its group is then carried over to
    the next one, at most max_staleness times. A collection and its job take turns, and equal runs stay equal if an
    agent's calls are one after another, or all at once. null: answers end in their collection."""
    early_stop: EarlyStopConfig = EarlyStopConfig()
    """Conditions that end the run before num_epochs."""
    show_episodes_every: int = Field(default=10, ge=0)
    """Epochs between sample episodes on the console; 0: none."""
    save_episodes: Literal["shown", "some", "all"] = "some"
    """Episodes that trajectories/samples.jsonl keeps; the entropies of their tokens take one more forward pass over
    them. shown: those on the console. some: of each epoch those of lowest, median and highest reward, and the first
    that failed. all: every episode, failed ones included."""

    @model_validator(mode="after")
    def _has_requests_in_flight(self) -> "GRPOTrainerConfig":
        if self.partial_rollout_tokens is not None and (self.max_staleness == 0 or self.in_flight == "continue"):
            given = f"{self.max_staleness} and '{self.in_flight}'"
            raise config_error(
                f"partial_rollout_tokens needs max_staleness above 0 and in_flight 'finish', not {given}"
            )
        if self.in_flight == "continue" and self.max_staleness < 2:
            raise config_error(
                f"in_flight 'continue' needs max_staleness 2 or more; with {self.max_staleness} no request runs when "
                "the weights change"
            )
        return self


class DPOTrajectoryBuilderConfig(
    TrajectoryBuilderConfig, name="dpo_trajectory_builder", factory="jaxft.components.dpo:dpo_trajectory_builder"
):
    """Pairs of the candidates that the workflow gave to `jaxft.episode().record_candidates`."""

    num_generations: int = Field(default=1, ge=1)
    """Episodes of each example."""
    exhaustive_pairs: bool = True
    """Pair all candidates of a decision; false: only the best with the worst."""
    min_score_diff: float = Field(default=0.0, ge=0.0, allow_inf_nan=False)
    """Minimum difference of the scores of a pair."""
    max_pairs_per_turn: int | None = Field(default=None, ge=1)
    """Maximum number of pairs per decision, those of the largest difference; null: no limit."""
    reward_from_score_diff: bool = True
    """Reward a pair by the difference of its scores; otherwise by the higher score."""
    require_multiple_candidates: bool = True
    """Compare candidates of one decision only; otherwise also those of other decisions of the example with the same
    prompt."""


class DPOTrainerConfig(LoggedTrainerConfig, name="dpo_trainer", factory="jaxft.components.dpo:dpo_trainer"):
    """Some collections of episodes, then `finetuning.num_epochs` training jobs on all their pairs."""

    num_runs: int = Field(default=1, ge=1)
    """Number of collections of episodes before training."""
    deduplicate_pairs: bool = True
    """Train pairs that were collected several times only once."""
    max_pairs: int | None = Field(default=None, ge=1)
    """Maximum number of pairs to train, those of the highest reward; null: no limit."""
    continue_on_collection_error: bool = False
    """Leave out a collection that fails; false: it ends the run."""
