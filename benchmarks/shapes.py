"""Size of the work of each case: reference, accelerator and tiny shapes, and the lengths of sampled answers."""

import math
import random
import statistics
from dataclasses import dataclass, replace

MODELS = {"m2": "qwen3-2m", "m60": "qwen3-58m", "tiny": "qwen3-50k"}
"""Presets by their short names: the two reference models, and one for tests."""


@dataclass(frozen=True)
class Shapes:
    """Counts of every case; a case reads its own.

    Attributes:
        prompts, generations, prompt_tokens, new_tokens: uniform rollout; every row samples all its new tokens.
        slots: slots of the engine, and rows at once of the lockstep loop that it is compared with.
        long_prompt_tokens, requests_per_prompt: prefill; the requests share one prompt or have one each.
        decode_batches, decode_prompt_tokens, decode_new_tokens: steady decoding, at several numbers of rows.
        requests, median_tokens, most_tokens: heavy-tailed rollout.
        served_requests, served_prompt_tokens, served_new_tokens: requests of one size, all at once.
        mixed_requests, mixed_tokens: requests whose prompts and answers have from the first number of tokens to the
            second, drawn as nano-vllm's benchmark draws them.
        growth_requests, growth_tokens: rollout that is then made four times as large; answers have half to one and a
            half times so many tokens.
        rows, row_prompt_tokens, row_tokens: update and scoring; `row_tokens` includes the prompt.
        microbatch_tokens: tokens of an update's microbatch, padding included.
        varied_epochs, varied_requests: epochs whose shapes change, with half of the requests to all of them.
        episodes, concurrency: harness.
    """

    prompts: int = 8
    generations: int = 8
    prompt_tokens: int = 64
    new_tokens: int = 128
    slots: int = 64
    long_prompt_tokens: int = 512
    requests_per_prompt: int = 16
    decode_batches: tuple[int, ...] = (1, 8, 64)
    decode_prompt_tokens: int = 64
    decode_new_tokens: int = 64
    requests: int = 256
    median_tokens: int = 64
    most_tokens: int = 1024
    served_requests: int = 64
    served_prompt_tokens: int = 64
    served_new_tokens: int = 32
    mixed_requests: int = 32
    mixed_tokens: tuple[int, int] = (16, 128)
    growth_requests: int = 256
    growth_tokens: int = 32
    rows: int = 64
    row_prompt_tokens: int = 64
    row_tokens: int = 192
    microbatch_tokens: int = 1536
    varied_epochs: int = 20
    varied_requests: int = 16
    episodes: int = 4096
    concurrency: int = 64


REFERENCE = Shapes()
"""Sized for two CPU cores."""

ACCELERATOR = replace(
    REFERENCE,
    prompts=16,
    prompt_tokens=512,
    new_tokens=512,
    slots=128,
    decode_batches=(128, 256),
    decode_prompt_tokens=512,
    decode_new_tokens=512,
    requests=1024,
    served_requests=500,
    served_prompt_tokens=512,
    served_new_tokens=128,
    mixed_requests=256,
    mixed_tokens=(100, 1024),
    growth_requests=1024,
    growth_tokens=128,
    rows=8,
    row_prompt_tokens=512,
    row_tokens=2048,
    microbatch_tokens=16384,
    varied_requests=64,
)
"""Sized for one accelerator with 80 GiB or more."""

TINY = Shapes(
    prompts=2,
    generations=2,
    prompt_tokens=8,
    new_tokens=16,
    slots=4,
    long_prompt_tokens=23,
    requests_per_prompt=4,
    decode_batches=(1, 4),
    decode_prompt_tokens=8,
    decode_new_tokens=16,
    requests=8,
    median_tokens=4,
    most_tokens=16,
    served_requests=6,
    served_prompt_tokens=8,
    served_new_tokens=4,
    mixed_requests=5,
    mixed_tokens=(2, 16),
    growth_requests=8,
    growth_tokens=8,
    rows=4,
    row_prompt_tokens=8,
    row_tokens=24,
    microbatch_tokens=48,
    varied_epochs=1,
    varied_requests=4,
    episodes=64,
    concurrency=16,
)
"""Sized for tests, which see that everything runs. Cases share shapes, and so compiled programs."""


def heavy_tailed_lengths(count: int, median: int, longest: int, seed: int = 0) -> list[int]:
    """Lengths of answers at even quantiles of a log-normal distribution, shuffled; the last quantile is `longest`.

    >>> lengths = heavy_tailed_lengths(256, median=64, longest=1024)
    >>> sorted(lengths)[127:129], max(lengths), min(lengths) >= 1, lengths == sorted(lengths)
    ([64, 64], 1024, True, False)
    """
    quantiles = [statistics.NormalDist().inv_cdf((rank + 0.5) / count) for rank in range(count)]
    spread = math.log(longest / median) / quantiles[-1]
    lengths = [max(1, round(median * math.exp(spread * quantile))) for quantile in quantiles]
    random.Random(seed).shuffle(lengths)
    return lengths


def mixed_requests(count: int, fewest: int, most: int, seed: int = 0) -> tuple[list[list[int]], list[int]]:
    """Prompts, and numbers of tokens to sample, as nano-vllm's `bench.py` draws them.

    Its table counts 133,966 sampled tokens for 256 requests of 100 to 1,024 tokens.

    >>> prompts, answers = mixed_requests(256, 100, 1024)
    >>> len(prompts), sum(map(len, prompts)), sum(answers)
    (256, 142827, 133966)
    """
    rng = random.Random(seed)
    prompts = [[rng.randint(0, 10000) for _ in range(rng.randint(fewest, most))] for _ in range(count)]
    return prompts, [rng.randint(fewest, most) for _ in range(count)]


def even_lengths(count: int, mean: int, seed: int = 0) -> list[int]:
    """Lengths drawn evenly from half of the mean to one and a half of it.

    >>> lengths = even_lengths(100, mean=32)
    >>> min(lengths) >= 16, max(lengths) <= 48
    (True, True)
    """
    rng = random.Random(f"even lengths {seed}")
    return [rng.randint(max(1, mean // 2), max(1, 3 * mean // 2)) for _ in range(count)]
