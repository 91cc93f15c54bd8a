"""Make vectors of policy losses and advantages by verl's, TRL's and prime-rl's own code.

    python scripts/make_loss_oracles.py PRIME_RL    # a checkout of prime-rl at 559b447

It needs verl 0.9.1, trl 1.16.0 and torch 2.13.0, in an environment of their own, and takes seconds. It writes
`policy_losses_2026.json`, `advantages_2026.json` and `self_distillation.json` to `tests/data/oracles`: inputs, values
and gradients in float64. Names of losses and estimators are jaxft's. Of TRL's trainers `_compute_loss` is called
without a model, of prime-rl the lines of `score_group` that compute. No row is empty, which each of them counts in
another way.
"""

import json
import sys
import textwrap
from collections import defaultdict
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from trl import GRPOTrainer
from trl.experimental.gmpo import GMPOTrainer
from trl.experimental.sdpo import loss_utils as sdpo
from verl.trainer.config import AlgoConfig
from verl.trainer.ppo import core_algos
from verl.utils.torch_functional import calculate_sum_pi_squared_from_logits
from verl.workers.config import ActorConfig, PolicyLossConfig

FOLDER = Path(__file__).parents[1] / "tests" / "data" / "oracles"
VERL_NAMES = {"dppo_tv": "dppo_tv", "dppo_kl": "dppo_kl", "sapo": "sapo", "gmpo": "geo_mean"}
SELECTING = ("clip_cov", "kl_cov")
"""Losses that treat some tokens in another way; verl calls them so, too."""
CLIPS = {"dppo_tv": (0.2, 0.15), "dppo_kl": (0.05, 0.03), "sapo": (0.2, 0.2), "gmpo": (0.4, 0.3)}
SEED = 17


def make_batch(draw: np.random.Generator, scale: float) -> dict[str, Any]:
    """Return a batch whose probabilities are anything between rare and certain, with answers of one token."""
    lengths = np.array([6, 6, 4, 1, 5, 1])
    logprobs = -np.exp(draw.normal(-0.5, 1.5, size=(6, 6)))
    old = np.minimum(logprobs + scale * draw.normal(size=(6, 6)), -1e-3)
    old[0, 0], logprobs[0, 0] = -4.0, -0.1  # a ratio of 49
    return {
        "logprobs": logprobs.tolist(),
        "old_logprobs": old.tolist(),
        "ref_logprobs": np.minimum(logprobs + 0.5 * draw.normal(size=(6, 6)), -1e-3).tolist(),
        "advantages": [-1.1, *draw.normal(size=4).tolist(), 0.0],
        "completion_mask": (np.arange(6) < lengths[:, None]).astype(int).tolist(),
    }


def tensors(batch: dict[str, Any]) -> SimpleNamespace:
    """Return a batch as tensors of float64, of which `logprobs` take a gradient."""
    made = SimpleNamespace(**{name: torch.tensor(values, dtype=torch.float64) for name, values in batch.items()})
    made.logprobs.requires_grad_()
    return made


def of_verl(name: str, batch: SimpleNamespace, clips: tuple[float, float]) -> torch.Tensor:
    """Return a loss by verl's function."""
    config = ActorConfig(
        strategy="fsdp", rollout_n=1, ppo_micro_batch_size_per_gpu=1, clip_ratio_low=clips[0], clip_ratio_high=clips[1],
        clip_ratio_c=20.0,
    )  # fmt: skip
    advantages = batch.advantages[:, None].expand_as(batch.logprobs)
    given = batch.old_logprobs, batch.logprobs, advantages, batch.completion_mask
    return core_algos.get_policy_loss_fn(VERL_NAMES[name])(*given, loss_agg_mode="token-mean", config=config)[0]


def of_trl(name: str, batch: SimpleNamespace, clips: tuple[float, float], beta: float) -> torch.Tensor:
    """Return a loss by TRL's trainer, with its KL."""
    rows, width = batch.logprobs.shape
    scores = batch.logprobs, torch.zeros(rows, width, dtype=torch.float64), None
    config = SimpleNamespace(
        use_bias_correction_kl=True, delta=None, sapo_temperature_pos=1.0, sapo_temperature_neg=1.05
    )
    trainer = SimpleNamespace(
        _get_per_token_logps_and_entropies=lambda *_, **__: scores, aux_loss_enabled=False, top_entropy_quantile=1.0,
        off_policy_mask_threshold=None, importance_sampling_level="token", beta=beta, args=config, loss_type=name,
        epsilon_low=clips[0], epsilon_high=clips[1], use_vllm=False, vllm_importance_sampling_correction=False,
        model=SimpleNamespace(training=True), current_gradient_accumulation_steps=1, _entropy_bonus_enabled=False,
        _metrics={"train": defaultdict(list)},
        accelerator=SimpleNamespace(gather=lambda x: x, reduce=lambda x, reduction: x, num_processes=1),
    )  # fmt: skip
    inputs = {
        "prompt_ids": torch.zeros(rows, 1), "prompt_mask": torch.ones(rows, 1),
        "completion_ids": torch.zeros(rows, width), "completion_mask": batch.completion_mask,
        "advantages": batch.advantages, "old_per_token_logps": batch.old_logprobs,
        "ref_per_token_logps": batch.ref_logprobs,
    }  # fmt: skip
    return (GMPOTrainer if name == "gmpo" else GRPOTrainer)._compute_loss(trainer, None, inputs)


def loss_cases(batches: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return values and gradients of every loss on every batch."""
    cases = []
    for index, batch in enumerate(batches):
        for name in VERL_NAMES:
            for by, beta in (("verl", 0.0), ("trl", 0.0), ("trl", 0.1)):
                if by == "trl" and name not in ("sapo", "gmpo"):
                    continue
                given = tensors(batch)
                loss = of_verl(name, given, CLIPS[name]) if by == "verl" else of_trl(name, given, CLIPS[name], beta)
                loss.backward()
                case = {"batch": index, "name": name, "by": by, "beta": beta, "clips": CLIPS[name]}
                cases.append(case | {"loss": loss.item(), "grad": given.logprobs.grad.tolist()})
    return cases


def by_covariance(
    name: str, batch: dict[str, Any], fraction: float, coef: float = 0.1
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return loss, gradient, and gradient by weights of tokens, which is the loss of each, of verl's covariance losses.

    Which tokens verl draws is decided by torch's seed.
    """
    torch.manual_seed(SEED)
    given = tensors(batch)
    weights = torch.ones_like(given.logprobs).requires_grad_()
    options = PolicyLossConfig(loss_mode=name, clip_cov_ratio=fraction, kl_cov_ratio=fraction, ppo_kl_coef=coef)
    config = ActorConfig(
        strategy="fsdp", rollout_n=1, ppo_micro_batch_size_per_gpu=1, clip_ratio_low=0.2, clip_ratio_high=0.3,
        policy_loss=options,
    )  # fmt: skip
    advantages = given.advantages[:, None].repeat(1, given.logprobs.shape[1])
    arrays = given.old_logprobs, given.logprobs, advantages, given.completion_mask
    loss = core_algos.get_policy_loss_fn(name)(
        *arrays, loss_agg_mode="token-mean", config=config, rollout_is_weights=weights
    )[0]
    loss.backward()
    return loss, given.logprobs.grad, weights.grad


def selected_by_verl(name: str, batch: dict[str, Any], fraction: float) -> list[list[int]]:
    """Return 1 for the tokens that verl selects: their loss is 0, or changes with the coefficient of their KL."""
    _, _, losses = by_covariance(name, batch, fraction)
    chosen = losses == 0 if name == "clip_cov" else losses != by_covariance(name, batch, fraction, coef=0.2)[2]
    return (chosen & (torch.tensor(batch["completion_mask"]) > 0)).int().tolist()


def covariance_cases(batches: list[dict[str, Any]], first: int) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return values and gradients of the covariance losses on batches that are numbered from `first`, and selections.

    `clip_cov` selects under the policy of the job, where no ratio is clipped; `kl_cov` shows its choice elsewhere only.
    """
    cases, selections = [], []
    for index, batch in enumerate(batches, first):
        for name in SELECTING:
            loss, grad, _ = by_covariance(name, batch, 0.15)
            batch[f"selected_{name}"] = selected_by_verl(name, batch, 0.15)
            case = {"batch": index, "name": name, "by": "verl", "beta": 0.0, "clips": (0.2, 0.3)}
            cases.append(case | {"loss": loss.item(), "grad": grad.tolist()})
            at_first = batch | ({"old_logprobs": batch["logprobs"]} if name == "clip_cov" else {})
            for fraction in (1e-3, 0.1, 0.25, 1.0)[: 4 if name == "clip_cov" else 3]:
                chosen = selected_by_verl(name, at_first, fraction)
                selections.append({"batch": index, "name": name, "fraction": fraction, "selected": chosen})
    return cases, selections


def echo_case(draw: np.random.Generator, prime_rl: Path) -> dict[str, Any]:
    """Return loss and gradient of the results of tools by prime-rl's function, for logits of a batch."""
    source = (prime_rl / "src/prime_rl/trainer/rl/loss.py").read_text()
    code = source[source.index("def ce_loss_fn") : source.index("def setup_rl_loss_fn")]
    names: dict[str, Any] = {
        "LossInputs": object, "LossOutputs": SimpleNamespace, "_safe_mean": lambda values, mask: values.mean()
    }  # fmt: skip
    exec(code, names)
    logits = torch.tensor(draw.normal(size=(3, 6, 4)), requires_grad=True)
    tokens, seen = draw.integers(4, size=(3, 6)), draw.random((3, 6)) < 0.5
    seen[:, 0] = seen[2] = False
    logprobs = logits.log_softmax(-1)[:, :-1].gather(-1, torch.tensor(tokens)[:, 1:, None])[..., 0]
    mask, weights = torch.tensor(seen[:, 1:]), torch.full((3, 5), 0.1)
    rows = [SimpleNamespace(trainer_logprobs=logprobs[i], loss_mask=mask[i], loss_weights=weights[i]) for i in range(3)]
    loss = sum(names["ce_loss_fn"](row).loss for row in rows) / mask.sum()
    loss.backward()
    given = {"logits": logits.tolist(), "tokens": tokens.tolist(), "observation_mask": seen.tolist()}
    return given | {"observation_coef": 0.1, "loss": loss.item(), "grad": logits.grad.tolist()}


def max_rl(rewards: list[float], prime_rl: Path) -> list[float]:
    """Return the advantages of a group by the lines of prime-rl, in float64."""
    source = (prime_rl / "src/prime_rl/orchestrator/algo/max_rl.py").read_text()
    lines = [line for line in source.splitlines() if line.strip().startswith(("rewards =", "mean =", "advantages ="))]
    assert len(lines) == 3, lines
    code = textwrap.dedent("\n".join(lines)).replace("float32", "float64")
    names: dict[str, Any] = {"torch": torch, "traces": [SimpleNamespace(reward=reward) for reward in rewards]}
    exec(code, names)
    return names["advantages"].tolist()


def advantage_case(draw: np.random.Generator, prime_rl: Path) -> dict[str, Any]:
    """Return rewards of groups, and their advantages."""
    group_ids = np.repeat([0, 1, 2, 3, 4], [4, 3, 5, 2, 2])
    rewards = draw.normal(0.3, 1.0, size=16)
    rewards[:4] = [1, 0, 0, 0]
    rewards[-4:-2] = [-1.0, 0.5]  # a mean below 0
    rewards[-2:] = 2.0
    order = draw.permutation(16)
    group_ids, rewards = group_ids[order], rewards[order]
    of_max_rl = np.zeros(16)
    for group in range(5):
        of_max_rl[group_ids == group] = max_rl(rewards[group_ids == group].tolist(), prime_rl)
    table = torch.tensor(rewards, dtype=torch.float64)[:, None]
    of_pass_at_k, _ = core_algos.compute_grpo_passk_outcome_advantage(
        table, torch.ones_like(table), group_ids, config=AlgoConfig()
    )
    expected = {"max_rl": of_max_rl.tolist(), "pass_at_k": of_pass_at_k[:, 0].tolist()}
    return {"rewards": rewards.tolist(), "group_ids": group_ids.tolist(), "expected": expected}


def optimal_token_case(draw: np.random.Generator) -> dict[str, Any]:
    """Return returns, scores and groups of rows, and their advantages by verl's function for episodes of several turns.

    Groups have three rows, whose returns differ.
    """
    mask = draw.random((9, 7)) < 0.7
    mask[:, 0], mask[0], mask[1, 1:] = True, True, False
    logits = torch.tensor(draw.normal(size=(9, 7, 5)))
    tokens, group_ids = torch.tensor(draw.integers(5, size=(9, 7, 1))), np.repeat([4, 1, 2], 3)[draw.permutation(9)]
    logprobs = logits.log_softmax(-1).gather(-1, tokens)[..., 0]
    squares, rewards = calculate_sum_pi_squared_from_logits(logits), torch.tensor(draw.normal(size=(9, 7)) * mask)
    given = rewards, torch.tensor(mask, dtype=torch.float64), group_ids, logprobs, squares
    advantages, returns = core_algos.compute_multi_turn_optimal_token_baseline_advantage(*given)
    tables = {"returns": returns, "logprobs": logprobs, "sum_pi_squared": squares, "advantages": advantages}
    made = {name: table.tolist() for name, table in tables.items()}
    return made | {"completion_mask": mask.tolist(), "group_ids": group_ids.tolist()}


def self_distillation(draw: np.random.Generator) -> dict[str, Any]:
    """Return the losses of SDPO by TRL: divergences of logits `[6 11]` by `alpha`, and that of sampled tokens."""
    student, teacher = (torch.tensor(3 * draw.normal(size=(6, 11)), requires_grad=True) for _ in range(2))
    ids, cases = torch.tensor(draw.integers(11, size=6)), []
    for alpha in (0.0, 0.1, 0.5, 1.0, None):
        if alpha is None:
            loss = sdpo.compute_sampled_token_self_distillation_loss(student, teacher, ids, distillation_alpha=1.0)
        else:
            loss = sdpo.compute_full_logit_self_distillation_loss(student, teacher, distillation_alpha=alpha)
        (gradient,) = torch.autograd.grad(loss.sum(), student)
        cases.append({"alpha": alpha, "loss": loss.tolist(), "grad": gradient.tolist()})
    return {"student": student.tolist(), "teacher": teacher.tolist(), "ids": ids.tolist(), "cases": cases}


def main() -> None:
    """Write all files."""
    torch.set_default_dtype(torch.float64)  # of the temperatures of SAPO in TRL
    prime_rl, draw = Path(sys.argv[1]), np.random.default_rng(SEED)
    versions = [f"{name} {version(name)}" for name in ("verl", "trl", "torch")]
    source = {"source": ", ".join([*versions, "prime-rl 559b447", "float64"]), "seed": SEED}
    batches = [make_batch(draw, scale) for scale in (0.3, 1.0)]
    losses = source | {"batches": batches, "cases": loss_cases(batches)}
    cases = source | {"cases": [advantage_case(draw, prime_rl) for _ in range(2)]}
    more = [make_batch(draw, scale) | {"advantages": draw.normal(size=6).tolist()} for scale in (0.3, 1.0)]
    of_covariance, losses["selections"] = covariance_cases(more, len(batches))
    losses |= {"batches": batches + more, "cases": losses["cases"] + of_covariance}
    losses["echo"] = echo_case(draw, prime_rl)
    (FOLDER / "policy_losses_2026.json").write_text(json.dumps(losses) + "\n")
    cases["optimal_token"] = optimal_token_case(draw)
    (FOLDER / "advantages_2026.json").write_text(json.dumps(cases) + "\n")
    taught = source | self_distillation(np.random.default_rng(SEED))
    (FOLDER / "self_distillation.json").write_text(json.dumps(taught) + "\n")


if __name__ == "__main__":
    main()
