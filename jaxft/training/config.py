"""Configuration of the loss."""

from typing import Annotated, Any, Literal, get_args

from pydantic import AfterValidator, Field, PlainSerializer, ValidationError, field_validator, model_validator

from jaxft.errors import did_you_mean
from jaxft.harness.config_types import ConfigModel, PathOrName, check_reference, config_error, entries, raise_faults
from jaxft.harness.functions import Function, NamedFunction, NamedOptions, name_or_function

AdvantageName = Literal[
    "group", "group_mean", "leave_one_out", "batch", "max_rl", "pass_at_k", "reinforce_pp", "optimal_token", "gae"
]
LossName = Literal[
    "grpo", "dapo", "bnpo", "dr_grpo", "gspo", "cispo", "ppo", "reinforce", "dppo_tv", "dppo_kl", "sapo", "gmpo",
    "clip_cov", "kl_cov", "dpo", "sft", "function",
]  # fmt: skip
CorrectionName = Literal[
    "token_truncate", "token_mask", "sequence_truncate", "sequence_mask", "sequence_geometric_mask", "ratio", "none"
]

OTHER_LOSSES = {"dpo": ("beta", "reference", "preference"), "sft": ("min_reward",)}
"""Fields that dpo and sft read."""

NOT_READ = {"cispo": ("clip_low",), **dict.fromkeys(("reinforce", "sapo", "kl_cov"), ("clip_low", "clip_high"))}
"""Fields that single policy losses do not read, by loss; those of the value function are read by ppo only."""

TRAJECTORY_MEANS = ("seq_mean_token_mean", "constant", "grpo", "gspo", "dr_grpo", "sapo", "gmpo")
"""Aggregations, and losses with one of them, that count trajectories and not tokens."""

GROUPED = ("group", "group_mean", "leave_one_out", "batch", "max_rl", "pass_at_k")
"""Advantage estimators that give groups of equal rewards exactly 0."""

UNSCALED = ("group_mean", "leave_one_out", "reinforce_pp", "optimal_token", "gae")
"""Advantage estimators that go with a KL in the reward: none divides rewards by a spread or a mean, which would rescale
it; `reinforce_pp` and `gae` whiten reward and KL together, as published."""


LOSS_KEYWORDS = (
    "importance_level",
    "aggregation",
    "clip_low",
    "clip_high",
    "delta",
    "beta",
    "kl",
    "max_completion_tokens",
)
"""Fields of `LossConfig` that a loss function of one's own gets as keywords, if it has parameters for them."""


def reads(estimator: str | Function, keyword: str) -> bool:
    """Return True if an estimator is a function of one's own that has a parameter of this name."""
    return isinstance(estimator, Function) and keyword in (estimator.keywords or ())


def named_function(values: Any) -> Any:
    """Return the fields of a loss or optimizer, with the name `function` if there is one and no name."""
    is_unnamed = isinstance(values, dict) and values.get("function") is not None and "name" not in values
    return {**values, "name": "function"} if is_unnamed else values


def check_named(name: str, function: Function | None) -> None:
    """Raise unless the name is `function` where there is one, and another where there is none."""
    if (name == "function") != (function is not None):
        has = "no function" if function is None else "a function, too: leave out the name"
        raise config_error(f"name is '{name}', but there is {has}")


class ReferenceConfig(ConfigModel):
    """The policy that the KL is measured from: the starting parameters, another checkpoint, or a moving average."""

    path: PathOrName | None = None
    """Folder, GGUF file or hub id of a checkpoint; null: the policy's first parameters."""
    update_every: int | None = Field(default=None, ge=1)
    """Jobs between moves of the reference towards the policy; null: it never moves."""
    mixing: float = Field(default=1.0, gt=0.0, le=1.0)
    """Weight of the policy in a move; the reference keeps the rest."""


class CorrectionConfig(ConfigModel):
    """Importance weights for a sampler whose probabilities differ from the trainer's."""

    name: CorrectionName
    """Ratio of trainer to sampler probability that weights the policy loss. token_*: one per token. sequence_*: one
    per sequence. *_truncate: capped at high. *_mask: 0 outside of [low, high]. sequence_geometric_mask: weight 1
    where the mean ratio of a token is within [low, high], 0 elsewhere. ratio: the ratio that the loss clips divides
    by the sampler's probability, and nothing is weighted besides. none: weight 1 everywhere, also for tokens that
    earlier weights sampled, whose loss is then biased."""
    low: float = Field(default=0.5, gt=0.0, le=1.0)
    """Smallest ratio that a mask keeps."""
    high: float = Field(default=2.0, ge=1.0)
    """Largest ratio that a mask keeps, or the cap of a truncated ratio."""


SELF_TEACHERS = ("self", "reference")
"""Teachers that are the policy itself: as it is, or as its reference is."""

OWN_TEMPLATES = {
    "solution": "\n\nAn answer that is right:\n{solution}",
    "feedback": "\n\nAn earlier answer was judged:\n{feedback}\n\nAnswer again.",
}
"""Texts that a policy which teaches itself reads behind the last message of the user."""


def _check_teacher(name: str, info: Any) -> str:
    if name not in SELF_TEACHERS:
        return check_reference("llms", name, info)
    if name in entries(info.context, "llms"):
        raise config_error(f"'{name}' is the policy itself, and also an entry of llms: give that another name")
    return name


class DistillationConfig(ConfigModel):
    """On-policy distillation: the policy learns a teacher's probabilities on its own samples."""

    teacher: Annotated[str, AfterValidator(_check_teacher)]
    """self: the policy before the job. reference: the policy of loss.reference, such as its first version, or a
    moving average. Otherwise an entry of llms of type local_policy, with the tokenizer and the mesh of the policy."""
    feedback_template: str | None = None
    """Text that the teacher alone reads behind the last message of the user before the answer, with {feedback} for
    the reasoning of the evaluator. Empty: none. null: a text of its own for self and reference, none for others."""
    solution_template: str | None = None
    """The same before it, with {solution} for the answer of the best other episode of the group."""
    success_reward_threshold: float = Field(default=1.0, allow_inf_nan=False)
    """Smallest reward of an episode whose answer is a solution."""
    form: Literal["sampled_token", "reverse", "forward", "jensen_shannon"] = "sampled_token"
    """sampled_token: log teacher - log student of each sampled token is added to its advantage. Others are a term of
    the loss over the whole vocabulary: reverse, KL(student || teacher); forward, KL(teacher || student);
    jensen_shannon, both to their mixture (arXiv 2306.13649)."""
    reward_coef: float = Field(default=0.0, ge=0.0, allow_inf_nan=False)
    """Weight of the advantages that come from rewards, where that of the teacher is 1; 0: rewards are logged, and
    train nothing."""
    mixing: float = Field(default=0.5, gt=0.0, lt=1.0)
    """Share of the teacher in the mixture of jensen_shannon."""

    @property
    def is_sampled(self) -> bool:
        """True if only the probabilities of sampled tokens are compared."""
        return self.form == "sampled_token"

    @property
    def templates(self) -> dict[str, str]:
        """Texts that the teacher alone reads, by the word in braces; none if it reads what the policy does."""
        given = {"solution": self.solution_template, "feedback": self.feedback_template}
        texts = OWN_TEMPLATES if self.teacher in SELF_TEACHERS else {}
        texts = texts | {word: text for word, text in given.items() if text is not None}
        return {word: text for word, text in texts.items() if text}

    @field_validator("feedback_template", "solution_template")
    @classmethod
    def _has_its_word(cls, text: str | None, info: Any) -> str | None:
        word = "{" + info.field_name.removesuffix("_template") + "}"
        if text and word not in text:
            raise config_error(f"holds no {word}, so it says the same of every answer: put it in, or leave it empty")
        return text

    @model_validator(mode="after")
    def _reads_something_else(self) -> "DistillationConfig":
        if self.teacher in SELF_TEACHERS and not self.templates:
            raise config_error(f"'{self.teacher}' has nothing to teach without feedback_template and solution_template")
        if self.form != "jensen_shannon" and self.mixing != type(self).model_fields["mixing"].default:
            raise config_error(f"form '{self.form}' has no mixing: take it out")
        return self


class PreferenceConfig(ConfigModel):
    """Loss of dpo on the two answers of a pair."""

    kind: Literal["sigmoid", "ipo"] = "sigmoid"
    """Loss of a pair: that of DPO (arXiv 2305.18290) or IPO (arXiv 2310.12036)."""
    label_smoothing: float = Field(default=0.0, ge=0.0, lt=0.5)
    """Fraction of pairs assumed to have chosen and rejected answer swapped."""
    length_normalized: bool = False
    """Compare the mean log-probability per token of answers instead of the sum."""
    sft_coef: float = Field(default=0.0, ge=0.0)
    """Weight of the supervised loss on the chosen answers, which keeps them likely."""


class LossConfig(ConfigModel):
    """A published loss by name, and the settings that differ from it."""

    name: LossName = "grpo"
    """Published loss, which decides the fields below that are null; function, if there is one."""
    function: NamedFunction | None = None
    """Policy loss of your own as module:name, in the form of jaxft.losses.PolicyLoss: it gets the tables of a batch,
    and the fields importance_level to kl below, by its parameters. null: that of name."""
    options: NamedOptions = Field(default={}, validate_default=True)
    """More keywords of the function."""
    advantages: (
        Annotated[AdvantageName | Function, name_or_function(*get_args(AdvantageName)), PlainSerializer(str)] | None
    ) = None
    """Advantage estimator, or one of your own as module:name, in the form of jaxft.advantages.Estimator; null:
    group_mean for dr_grpo, gae for ppo, group for others."""
    aggregation: Literal["seq_mean_token_mean", "token_mean", "constant"] | None = None
    """Average of the tokens' losses. seq_mean_token_mean: the mean over trajectories (see weigh) of the mean over
    their tokens. token_mean: the mean over all tokens. constant: the sum divided by max_completion_tokens per
    trajectory. null: that of the published loss."""
    weigh: Literal["trajectory", "sequence"] = "trajectory"
    """Unit that counts once in the loss. trajectory: a trajectory, however many sequences it has. sequence: each of
    its sequences. Ratios of importance_level 'sequence' are those of sequences in both cases."""
    importance_level: Literal["token", "sequence"] | None = None
    """Level of the importance ratio, one per token or sequence; null: sequence for gspo and gmpo, else token."""
    clip_low: float | None = Field(default=None, gt=0.0, le=1.0)
    """Clips the ratio at 1 - clip_low, for gmpo its logarithm at -clip_low; for dppo bounds how far a probability
    falls. null: 3e-4 for gspo, 0.05 for dppo_kl, 0.4 for gmpo, else 0.2."""
    clip_high: float | None = Field(default=None, gt=0.0)
    """Clips the ratio at 1 + clip_high, for cispo at clip_high, for gmpo its logarithm at clip_high; for dppo bounds
    how far a probability rises. null: 0.28 for dapo and bnpo, 4e-4 for gspo, 5 for cispo, 0.05 for dppo_kl, 0.4 for
    gmpo, 0.2 for all others."""
    delta: float | None = Field(default=None, gt=1.0)
    """Dual clip: a token with advantage A < 0 loses at most -delta * A; null: any."""
    cov_fraction: float = Field(default=2e-4, gt=0.0, le=1.0)
    """Fraction of a job's tokens, at least one, that clip_cov and kl_cov select by their covariance."""
    cov_kl_coef: float = Field(default=0.1, ge=0.0, allow_inf_nan=False)
    """Weight of kl_cov's KL on the selected tokens."""
    beta: float | None = Field(default=None, ge=0.0, allow_inf_nan=False)
    """Weight of the KL to the reference, or dpo's temperature; null: 0.1 for dpo, 0 for all others, which keep no
    reference."""
    kl: Literal["k2", "k3", "k3_ratio", "k3_unweighted", "k3_trl", "k1_in_reward"] = "k3_ratio"
    """Estimator of the KL; k1_in_reward goes into the reward, others into the loss."""
    reference: ReferenceConfig = ReferenceConfig()
    """Policy that the KL is measured from."""
    correction: CorrectionConfig | None = None
    """Importance weights for a sampler whose probabilities differ from the trainer's; null: none, but with
    max_staleness above 0 ratio, or token_truncate for a loss without a ratio, and with sampling_dtype alone
    token_truncate."""
    observation_coef: float = Field(default=0.0, ge=0.0, allow_inf_nan=False)
    """Weight of the cross-entropy on the results of tools, which the policy then learns to foresee."""
    entropy_coef: float = Field(default=0.0, ge=0.0, allow_inf_nan=False)
    """Weight of the entropy bonus."""
    router_aux_loss_coef: float = Field(default=0.0, ge=0.0, allow_inf_nan=False)
    """Weight of the auxiliary loss that balances the load of a mixture's experts; 0: it is only logged, as
    router_balance."""
    router_bias_update_rate: float = Field(default=0.0, ge=0.0, le=1.0)
    """Amount by which each update moves the bias that an expert is chosen by, up below the mean load and down above
    it; for families whose files have one, such as glm4_moe."""
    distillation: DistillationConfig | None = None
    """Teacher that the policy learns from, instead of the reward or beside it; null: none."""
    gamma: float = Field(default=1.0, gt=0.0, le=1.0)
    """Discount per turn of shaped rewards, per token for gae, reinforce_pp and optimal_token."""
    gae_lambda: float = Field(default=0.95, ge=0.0, le=1.0)
    """Lambda of generalised advantage estimation."""
    bootstrap: Literal["value", "none"] = "value"
    """Value after the last token of an episode that a length limit cut. value: the value head's output there. none:
    0, as if the episode had ended."""
    value_coef: float = Field(default=0.5, gt=0.0)
    """Weight of ppo's value loss."""
    value_clip: float | None = Field(default=0.2, gt=0.0)
    """Largest change of a value that its loss rewards; null: any."""
    max_completion_tokens: int | None = Field(default=None, ge=1)
    """Token budget of a trajectory, which dr_grpo divides by; null: the context."""
    mask_truncated: bool = False
    """Do not train sequences that a length limit cut."""
    skip_zero_advantages: bool = False
    """Do not train trajectories whose advantages are all 0, such as those of groups with equal rewards; the loss is
    the mean over the others, and the job takes less time."""
    overlong_buffer_tokens: int | None = Field(default=None, ge=1)
    """Length of DAPO's overlong buffer: the last tokens of the budget, over which a penalty grows to 1; null: no
    penalty."""
    reward_weights: dict[str, Annotated[float, Field(allow_inf_nan=False)]] | None = Field(default=None, min_length=1)
    """Weights of named rewards in the reward; null: the evaluator's own reward."""
    multi_objective_aggregation: Literal["sum_then_normalize", "normalize_then_sum"] = "sum_then_normalize"
    """Sum the named rewards, or first normalise each within its group."""

    weight: float = Field(default=1.0, gt=0.0, allow_inf_nan=False)
    """Factor of advantages, for per_task."""
    per_task: dict[str, dict[str, Any]] | None = None
    """Other values of weight, clip_low, clip_high, beta, mask_truncated, max_completion_tokens (of the length
    penalty) and overlong_buffer_tokens by task, an entry of finetuning.per_task; null: none."""
    preference: PreferenceConfig = PreferenceConfig()
    """Settings of dpo."""
    min_reward: float | None = Field(default=None, allow_inf_nan=False)
    """Minimum reward of trajectories that sft imitates; null: all are."""

    @property
    def is_policy_loss(self) -> bool:
        """True if rewards become advantages; dpo learns from pairs and sft from examples."""
        return self.name not in OTHER_LOSSES

    @property
    def selects_tokens(self) -> bool:
        """True if the loss treats tokens of large covariance in another way."""
        return self.name in ("clip_cov", "kl_cov")

    @property
    def has_ratio(self) -> bool:
        """True if the loss divides by `old_logprobs`; reinforce does not, nor a function without that parameter."""
        return self.name != "reinforce" if self.function is None else self.function.takes("old_logprobs")

    @property
    def kl_weight(self) -> float:
        """Weight of the KL to the reference; 0 for dpo and sft, which have no KL term."""
        return (self.beta or 0.0) if self.is_policy_loss else 0.0

    @property
    def scores_reference(self) -> bool:
        """True if the loss reads the log-probabilities of the reference."""
        return self.kl_weight > 0 or self.name == "dpo"

    @property
    def needs_reference(self) -> bool:
        """True if the loss reads the log-probabilities of the reference, or it is the teacher."""
        return self.scores_reference or (self.distillation is not None and self.distillation.teacher == "reference")

    @property
    def estimator(self) -> str | Function:
        """Advantage estimator: the configured one, else the default of the published loss."""
        return self.advantages or {"dr_grpo": "group_mean", "ppo": "gae"}.get(self.name, "group")

    @property
    def task_tables(self) -> tuple[str, ...]:
        """Options that some task has otherwise and that an update reads by token."""
        names = ("clip_low", "clip_high", *(("beta",) if self.kl != "k1_in_reward" else ()))
        return tuple(name for name in names if any(name in own for own in (self.per_task or {}).values()))

    @property
    def is_own(self) -> bool:
        """True if the loss or the estimator is a function of one's own."""
        return self.function is not None or isinstance(self.estimator, Function)

    @property
    def is_per_token(self) -> bool:
        """True if the estimator gives each token an advantage from rewards per token, and discounts by the token."""
        return self.estimator in ("gae", "reinforce_pp", "optimal_token") or reads(self.estimator, "completion_mask")

    @property
    def _has_zero_advantages(self) -> bool:
        """True if equal rewards of a group have advantages of exactly 0, which no score of a model changes."""
        is_penalized = self.kl_weight > 0 and self.kl == "k1_in_reward"
        return self.estimator in GROUPED and self.distillation is None and not is_penalized

    @property
    def averaged_over(self) -> Literal["tokens", "pairs", "sequences", "trajectories"]:
        """Unit that the loss is averaged over: a count of `TrainingBatch.counts`."""
        if self.name == "dpo":
            return "pairs"
        if self.function is not None and self.aggregation is None:
            is_per_token = not self.function.takes("trajectory_tokens")
        else:
            is_per_token = (self.aggregation or self.name) not in TRAJECTORY_MEANS
        if is_per_token:
            return "tokens"
        return "trajectories" if self.weigh == "trajectory" else "sequences"

    def for_context(self, max_context_tokens: int) -> "LossConfig":
        """Return the loss with a token budget, which is the policy's context by default where the loss divides by it.

        >>> [LossConfig(name=name).for_context(512).max_completion_tokens for name in ("grpo", "dr_grpo")]
        [None, 512]
        """
        if self.max_completion_tokens is not None or (self.aggregation or self.name) not in ("constant", "dr_grpo"):
            return self
        return self.model_copy(update={"max_completion_tokens": max_context_tokens})

    def of_task(self, task: str | None) -> "LossConfig":
        """Return the loss of a task; the reference is that of all tasks, also of one with a beta of 0.

        >>> loss = LossConfig(name="dapo", clip_high=0.3, per_task={"long": {"clip_high": 0.4}})
        >>> [loss.of_task(task).clip_high for task in ("long", "short", None)]
        [0.4, 0.3, 0.3]
        """
        if not self.per_task:
            return self
        given = {name: dict(self)[name] for name in self.model_fields_set - {"per_task", "reference"}}
        own = LossConfig.model_validate(given | self.per_task.get(task or "", {}))
        return own.model_copy(update={"reference": self.reference})

    def for_sampler(self, max_staleness: int, *, is_quantized: bool = False) -> "LossConfig":
        """Return the loss with the correction that it has on the sampler's episodes.

        Args:
            max_staleness: number of versions that they may be behind.
            is_quantized: True if kernels in eight bits sample them.

        >>> loss = LossConfig(name="dapo")
        >>> loss.for_sampler(0).correction, loss.for_sampler(1).correction.name
        (None, 'ratio')
        >>> loss.for_sampler(0, is_quantized=True).correction.name
        'token_truncate'
        """
        correction = self.correction
        if not self.is_policy_loss or ((max_staleness or is_quantized) and correction is not None):
            return self
        if max_staleness or is_quantized:
            takes_weights = self.function is None or self.function.takes("policy_weights")
            takes_ratio = self.has_ratio and (max_staleness > 0 or not takes_weights)
            correction = CorrectionConfig(name="ratio" if takes_ratio else "token_truncate")
        elif correction is not None and correction.name == "none":
            correction = None
        return self.model_copy(update={"correction": correction})

    @model_validator(mode="before")
    @classmethod
    def _is_named_function(cls, values: Any) -> Any:
        return named_function(values)

    @model_validator(mode="after")
    def _has_what_it_reads(self) -> "LossConfig":
        check_named(self.name, self.function)
        own = set(OTHER_LOSSES.get(self.name, POLICY_FIELDS)) - set(NOT_READ.get(self.name, ()))
        if self.function is None:
            own -= {"function", "options"}
        else:
            elsewhere = {"beta", "kl"} if self.kl == "k1_in_reward" or self.function.takes("ref_logprobs") else set()
            elsewhere |= {"max_completion_tokens"} if self.overlong_buffer_tokens is not None else set()
            own -= {name for name in LOSS_KEYWORDS if not self.function.takes(name)} - elsewhere
        if self.is_policy_loss and self.name != "ppo":
            own -= {"gae_lambda", "bootstrap", "value_coef", "value_clip"}
        own -= {"cov_kl_coef"} if self.name != "kl_cov" else set()
        own -= {"cov_fraction"} if not self.selects_tokens else set()
        if self.name == "ppo":
            own -= {"distillation"}
        if not self.needs_reference:
            own -= {"reference"}
        if self.averaged_over == "tokens":
            own -= {"weigh"}
        changed = [name for name, field in type(self).model_fields.items() if dict(self)[name] != field.default]
        strange = sorted(set(changed) - {"name", *own})
        if strange:
            hint = " (a reference is for a beta above 0, or a teacher)" if "reference" in strange else ""
            which = self.name if self.function is None else self.function.place
            raise config_error(f"{which} has no {', '.join(strange)}: take them out{hint}")
        if self.name == "dpo" and self.beta == 0:
            raise config_error("dpo needs a beta above 0")
        if self.correction is not None and self.correction.name == "ratio" and not self.has_ratio:
            which = self.name if self.function is None else self.function.place
            raise config_error(f"{which} has no ratio: take correction token_truncate")
        return self

    @model_validator(mode="after")
    def _tasks_fit(self) -> "LossConfig":
        for task, own in (self.per_task or {}).items():
            for name, value in own.items():
                if name not in BY_TASK:
                    what = "is one for all tasks" if name in type(self).model_fields else "is no option"
                    near = did_you_mean(name, BY_TASK, what="by task there are")
                    raise config_error(f"per_task.{task}.{name} {what}{near}")
                if name in BY_TASK[:3] and not dict(self)[name]:
                    raise config_error(f"per_task.{task}.{name}: set {name} of the loss, too, for the other tasks")
                if name in BY_TASK[:3] and value is None:
                    raise config_error(f"per_task.{task}.{name} is null: give a number, or leave it out")
                if name in self.task_tables and self.function is not None and not self.function.takes(name):
                    raise config_error(f"per_task.{task}.{name}: {self.function.place} takes no {name}: leave it out")
            try:
                options = self.of_task(task)
            except ValidationError as error:
                places = [".".join(map(str, ("per_task", task, *each["loc"]))) for each in error.errors()]
                messages = [each["msg"].replace("Input should", "must") for each in error.errors()]
                raise_faults(zip(places, messages, strict=True))
            if "max_completion_tokens" in own and options.overlong_buffer_tokens is None:
                fault = "is for the length penalty alone: set overlong_buffer_tokens, or leave it out"
                raise config_error(f"per_task.{task}.max_completion_tokens {fault}")
            clip_high = options.clip_high or 0
            if self.function is None and self.delta is not None and self.delta <= 1 + clip_high:
                raise config_error(f"per_task.{task}.clip_high: delta is {self.delta}, wanted above 1 + {clip_high}")
        return self

    @model_validator(mode="after")
    def _fits_together(self) -> "LossConfig":
        if (self.name == "ppo") != (self.estimator == "gae"):
            raise config_error("ppo needs advantages 'gae', and 'gae' needs ppo: no other loss trains a value head")
        is_named = isinstance(self.estimator, str)
        if self.kl_weight and self.kl == "k1_in_reward" and is_named and self.estimator not in UNSCALED:
            raise config_error(
                f"kl 'k1_in_reward' with advantages {self.estimator!r} would divide beta by the spread or the mean of "
                f"the rewards; take one of {', '.join(UNSCALED)}"
            )
        if self.skip_zero_advantages and not self._has_zero_advantages:
            raise config_error(
                f"skip_zero_advantages is for advantages {', '.join(GROUPED)} without distillation or kl "
                "'k1_in_reward': others are hardly ever 0"
            )
        if (self.overlong_buffer_tokens or 0) > (self.max_completion_tokens or 0):
            raise config_error("overlong_buffer_tokens needs a max_completion_tokens that is at least as large")
        if self.multi_objective_aggregation == "normalize_then_sum" and (
            self.reward_weights is None or self.estimator != "group"
        ):
            raise config_error("normalize_then_sum needs reward_weights, and advantages 'group'")
        if self.multi_objective_aggregation == "normalize_then_sum" and self.overlong_buffer_tokens is not None:
            raise config_error(
                "overlong_buffer_tokens is a penalty on one reward, but normalize_then_sum normalises each reward by "
                "itself: leave out one of the two"
            )
        return self


BY_TASK = (
    "clip_low",
    "clip_high",
    "beta",
    "weight",
    "mask_truncated",
    "max_completion_tokens",
    "overlong_buffer_tokens",
)
"""Fields that a task may have otherwise; the first three enter an update as tables."""

POLICY_FIELDS = tuple(name for name in LossConfig.model_fields if name not in ("preference", "min_reward"))
"""Fields that policy losses read, and dpo and sft do not."""
