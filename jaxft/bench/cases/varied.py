"""Epochs of which no two are alike, on a live policy: what is compiled before them, and what in them."""

import asyncio
import random
from typing import NamedTuple

import numpy as np

from jaxft.bench.results import Check
from jaxft.bench.setting import Setting, requests_of, serve
from jaxft.rollout.policy import Policy
from jaxft.rollout.requests import Completion, Request
from jaxft.rollout.sequences import TokenSequence
from jaxft.training.advantages import CollectedRewards
from jaxft.training.batch import Row
from jaxft.training.config import LossConfig, OptimizerConfig
from jaxft.training.learner import Learner


class Found(NamedTuple):
    """Compilations as figures, and what should hold of them."""

    figures: dict[str, float]
    checks: list[Check]


def varied_epochs(setting: Setting) -> Found:
    """A warm-up, as `--strict-compile` makes it, and then epochs that must not compile anything.

    Temperature, top-p, prompt lengths, answer lengths and the number of requests change from epoch to epoch; updates go
    through the trainer adapter's own batching.
    """
    shapes = setting.shapes
    context = shapes.prompt_tokens + shapes.new_tokens
    learner = Learner(setting.model, LossConfig(), OptimizerConfig(), microbatch_tokens=shapes.microbatch_tokens)
    with setting.policy(slots=shapes.slots, max_context_tokens=context) as policy:
        asyncio.run(policy.engine.warm_up())
        of_engine = policy.compiles.count
        asyncio.run(policy.update(lambda params: (learner.warm_up(params, context), None)))
        compiled = {"warm-up": np.array([of_engine, policy.compiles.count - of_engine])}
        counts = [_epoch(setting, policy, learner, number) for number in range(shapes.varied_epochs)]
        compiled["afterwards"] = np.array(counts).sum(axis=0)
    figures = {
        f"{part}, {kind}: compilations": float(count)
        for kind, counts in compiled.items()
        for part, count in zip(("engine", "update"), counts, strict=True)
    }
    name = f"compilations in {shapes.varied_epochs} varied epochs after warm-up"
    checks = [
        Check(name=f"{name}, {part}", value=float(count), relation="exactly", wanted=0)
        for part, count in zip(("engine", "update"), compiled["afterwards"], strict=True)
    ]
    return Found(figures, checks)


def _epoch(setting: Setting, policy: Policy, learner: Learner, number: int) -> tuple[int, int]:
    """Compilations of the engine and of the update in one epoch."""
    requests = _requests(setting, random.Random(f"epoch {number}"), number)
    before = policy.compiles.count
    completions = serve(policy, requests)
    between = policy.compiles.count
    rows = [Row(_sequence(*pair), index) for index, pair in enumerate(zip(requests, completions, strict=True))]
    rewards = np.arange(len(rows), dtype=np.float64) % 2
    credit = CollectedRewards(rewards, np.arange(len(rows)) // 2, None, None, {})
    asyncio.run(policy.update(lambda params: learner.learn(rows, credit, params)))
    return between - before, policy.compiles.count - between


def _requests(setting: Setting, rng: random.Random, number: int) -> list[Request]:
    shapes = setting.shapes
    count = 2 * rng.randint(shapes.varied_requests // 4, shapes.varied_requests // 2)
    prompts = [
        setting.prompts(1, rng.randint(shapes.prompt_tokens // 2, shapes.prompt_tokens), (number, index))[0]
        for index in range(count)
    ]
    most = rng.randint(max(1, shapes.new_tokens // 4), shapes.new_tokens)
    answers = [rng.randint(max(1, most // 2), most) for _ in prompts]
    sampling = {"temperature": rng.uniform(0.7, 1.3), "top_p": rng.uniform(0.8, 1.0)}
    return requests_of(prompts, answers, number, **sampling)


def _sequence(request: Request, completion: Completion) -> TokenSequence:
    """A completion as a training row."""
    prompt, answer = len(request.prompt_ids), len(completion.token_ids)
    return TokenSequence(
        tokens=[*request.prompt_ids, *completion.token_ids],
        completion_mask=[False] * prompt + [True] * answer,
        sampler_logprobs=[0.0] * prompt + completion.sampler_logprobs,
        behavior_logprobs=[0.0] * prompt + completion.behavior_logprobs,
        temperatures=[0.0] * prompt + [request.temperature] * answer,
        policy_versions=[-1] * prompt + [completion.policy_version] * answer,
    )
