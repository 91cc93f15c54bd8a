"""Whole rollouts: uniform lengths, heavy-tailed ones against the plain loop, and four times as many requests."""

from collections.abc import Callable
from functools import partial

import jax

import jaxft
from jaxft.bench import work
from jaxft.bench.cases.ragged import grown, heavy_tailed
from jaxft.bench.results import CaseResult, Check, Line
from jaxft.bench.setting import Setting, requests_of, serve
from jaxft.bench.structure import sorted_widths
from jaxft.bench.timing import in_turn


def run(setting: Setting) -> CaseResult:
    """Sampled tokens per second of all kinds of rollout; ratios, and a look at the traced program."""
    result = setting.result()
    result.lines += _uniform(setting)
    sorts = sum(width >= setting.config.vocab_size for width in _sorts(setting))
    result.checks.append(Check(name="sorts over the vocabulary", value=sorts, relation="exactly", wanted=0))
    for kind in (heavy_tailed, grown):
        lines, check = kind(setting)
        result.lines += lines
        result.checks.append(check)
    return result


def _uniform(setting: Setting) -> list[Line]:
    """Prompts times generations, nothing stops early; the engine is asked for all rows at once, and knows no prompt."""
    shapes = setting.shapes
    rows = shapes.prompts * shapes.generations
    with setting.policy(slots=rows, max_context_tokens=shapes.prompt_tokens + shapes.new_tokens) as policy:

        def serve_rows(number: int) -> int:
            prompts = setting.prompts(shapes.prompts, shapes.prompt_tokens, number)
            repeated = [prompt for prompt in prompts for _ in range(shapes.generations)]
            return len(serve(policy, requests_of(repeated, [shapes.new_tokens] * rows, number)))

        jobs: dict[str, Callable[[int], object]] = {
            "uniform, generate": partial(_generate, setting),
            "uniform, engine": serve_rows,
        }
        seconds = in_turn(jobs, setting.repeats)
    phases = uniform_phases(setting)
    shape = {"prompts": shapes.prompts, "generations": shapes.generations}
    shape |= {"prompt_tokens": shapes.prompt_tokens, "new_tokens": shapes.new_tokens}
    return [
        Line(name=name, amount=rows * shapes.new_tokens, seconds=taken, phases=phases, shape=shape)
        for name, taken in seconds.items()
    ]


def uniform_phases(setting: Setting) -> list[work.Phase]:
    """The work of a uniform rollout: every prompt once, and all new tokens."""
    shapes, itemsize = setting.shapes, setting.itemsize
    rows = shapes.prompts * shapes.generations
    return [
        work.prefill(setting.config, [shapes.prompt_tokens] * shapes.prompts, itemsize),
        work.decode(setting.config, shapes.prompt_tokens, [shapes.new_tokens] * rows, rows, itemsize),
    ]


def _generate(setting: Setting, number: int) -> jaxft.Rollout:
    return jaxft.generate(
        setting.model,
        setting.params,
        setting.prompts(setting.shapes.prompts, setting.shapes.prompt_tokens, number),
        jax.random.key(number),
        num_generations=setting.shapes.generations,
        max_new_tokens=setting.shapes.new_tokens,
    )


def _sorts(setting: Setting) -> list[int]:
    """Widths of all sorts of a rollout that filters by top-k, top-p and min-p, for which sorting is the common way."""
    prompts = setting.prompts(1, setting.shapes.prompt_tokens)

    def sample(params: dict, key: jax.Array) -> jaxft.Rollout:
        return jaxft.generate(setting.model, params, prompts, key, max_new_tokens=2, top_k=50, top_p=0.9, min_p=0.01)

    return sorted_widths(jax.make_jaxpr(sample)(setting.params, jax.random.key(0)).jaxpr)
