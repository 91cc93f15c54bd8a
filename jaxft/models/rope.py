"""Kinds of rotary positions (arXiv 2104.09864), and their frequencies; `jaxft.models.layers` computes with them.

Letters: `h` head width, `P` pairs of a head's components that a rotation turns.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
from jaxtyping import Float

Frequencies = Float[np.ndarray, "P"]


@dataclass(frozen=True)
class Llama3Scaling:
    """Llama 3.1's stretch of rotary frequencies: low ones divided by `factor`, high ones kept, the others blended.

    Attributes:
        factor: factor by which the context is extended.
        low_freq_factor: wavelengths above `original_max_position_embeddings / low_freq_factor` are stretched fully.
        high_freq_factor: wavelengths below `original_max_position_embeddings / high_freq_factor` are unchanged.
        original_max_position_embeddings: context length, in tokens, before stretching.
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int
    angle_factor: ClassVar[float] = 1.0

    def stretch(self, frequencies: Frequencies, theta: float) -> Frequencies:
        """Scale frequencies (arXiv 2407.21783)."""
        turns = self.original_max_position_embeddings * frequencies / (2 * np.pi)
        blend = np.clip((turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor), 0.0, 1.0)
        return frequencies * (blend + (1.0 - blend) / self.factor)


@dataclass(frozen=True)
class LinearScaling:
    """All frequencies divided by `factor` (arXiv 2306.15595)."""

    factor: float
    angle_factor: ClassVar[float] = 1.0

    def stretch(self, frequencies: Frequencies, theta: float) -> Frequencies:
        """Scale frequencies."""
        return frequencies / self.factor


@dataclass(frozen=True)
class YarnScaling:
    """YaRN (arXiv 2309.00071): low frequencies divided by `factor`, high ones kept, those between blended by index.

    Attributes:
        factor: factor by which the context is extended.
        original_max_position_embeddings: context length, in tokens, before stretching.
        beta_fast: frequencies that turn more often in the original context are unchanged.
        beta_slow: frequencies that turn less often are stretched fully.
        attention_factor: factor of cosines and sines; None computes it from the following two and `factor`.
        mscale, mscale_all_dim: coefficients of the logarithm of `factor` in the numerator and the denominator of
            `attention_factor`; None leaves both out.
        truncate: round the indices between which frequencies are blended.
    """

    factor: float
    original_max_position_embeddings: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True

    def stretch(self, frequencies: Frequencies, theta: float) -> Frequencies:
        """Scale frequencies."""
        pairs = len(frequencies)

        def frequency_index(turns: float) -> float:
            """Index, not rounded, of the frequency that turns so often in the original context."""
            wavelength = self.original_max_position_embeddings / (2 * math.pi * turns)
            return pairs * math.log(wavelength) / math.log(theta)

        first, last = frequency_index(self.beta_fast), frequency_index(self.beta_slow)
        if self.truncate:
            first, last = math.floor(first), math.ceil(last)
        first, last = max(first, 0), min(last, 2 * pairs - 1)
        blend = np.clip((np.arange(pairs) - first) / max(last - first, 0.001), 0.0, 1.0)
        return frequencies * (1.0 - blend + blend / self.factor)

    @property
    def angle_factor(self) -> float:
        """Factor of cosines and sines.

        >>> round(YarnScaling(8.0, 8192).angle_factor, 4)  # 0.1 ln 8 + 1
        1.2079
        """
        if self.attention_factor is not None:
            return self.attention_factor
        if self.factor <= 1:
            return 1.0
        if self.mscale and self.mscale_all_dim:
            above, below = (0.1 * scale * math.log(self.factor) + 1 for scale in (self.mscale, self.mscale_all_dim))
            return above / below
        return 0.1 * math.log(self.factor) + 1


@dataclass(frozen=True)
class LongRopeScaling:
    """LongRoPE (arXiv 2402.13753): each frequency divided by a factor of its own.

    The factors are the same for all tokens, as those of a text that grows longer were computed already. So the longest
    context decides, as in vLLM; transformers takes the longest text of a call.

    Attributes:
        short_factor: factor of each frequency for contexts up to `original_max_position_embeddings`.
        long_factor: factor of each frequency for longer contexts.
        original_max_position_embeddings: context length, in tokens, before stretching.
        factor: factor by which the context is extended.
        attention_factor: factor of cosines and sines; None computes it from `factor`.
        is_long: take `long_factor`. It is no part of files.
    """

    short_factor: tuple[float, ...]
    long_factor: tuple[float, ...]
    original_max_position_embeddings: int
    factor: float
    attention_factor: float | None = None
    is_long: bool = False

    def stretch(self, frequencies: Frequencies, theta: float) -> Frequencies:
        """Scale frequencies."""
        return frequencies / np.asarray(self.long_factor if self.is_long else self.short_factor)

    def for_context(self, tokens: int) -> "LongRopeScaling":
        """Return the scaling for contexts of so many tokens."""
        return replace(self, is_long=tokens > self.original_max_position_embeddings)

    @property
    def angle_factor(self) -> float:
        """Factor of cosines and sines.

        >>> round(LongRopeScaling((1.0,), (4.0,), 4096, 32.0).angle_factor, 4)
        1.1902
        """
        if self.attention_factor is not None:
            return self.attention_factor
        if self.factor <= 1:
            return 1.0
        return math.sqrt(1 + math.log(self.factor) / math.log(self.original_max_position_embeddings))


RopeScaling = Llama3Scaling | LinearScaling | YarnScaling | LongRopeScaling

SCALINGS: Mapping[str, type[RopeScaling]] = {
    "llama3": Llama3Scaling,
    "linear": LinearScaling,
    "yarn": YarnScaling,
    "longrope": LongRopeScaling,
}
"""Kinds of scaling by their `rope_type` in a `config.json`."""


@dataclass(frozen=True)
class Rope:
    """Rotary positions of a layer.

    Attributes:
        theta: base of the wavelengths.
        scaling: stretch of the frequencies, or None.
        share: part of a head's components that is rotated, from the first on.
        query_growth: queries are multiplied by `1 + query_growth log(1 + floor(position / C))`, where `C` is the
            `original_max_position_embeddings` of the scaling (Llama 4, Ministral 3).
    """

    theta: float = 1e6
    scaling: RopeScaling | None = None
    share: float = 1.0
    query_growth: float = 0.0

    def __post_init__(self) -> None:
        if self.query_growth and isinstance(self.scaling, LinearScaling | None):
            raise ValueError("query_growth needs a scaling with original_max_position_embeddings")

    def for_context(self, tokens: int) -> "Rope":
        """Return the rotary positions in contexts of so many tokens."""
        scaling = self.scaling
        return replace(self, scaling=scaling.for_context(tokens)) if isinstance(scaling, LongRopeScaling) else self

    def longest_context(self, trained_tokens: int) -> int:
        """Return the tokens of the longest context for which these positions are made, as vLLM has it.

        Files with linear scaling or YaRN may have the length before stretching as `max_position_embeddings`.

        >>> Rope(scaling=YarnScaling(4.0, 32768)).longest_context(32768), Rope().longest_context(32768)
        (131072, 32768)
        """
        if isinstance(self.scaling, LinearScaling):
            return int(trained_tokens * self.scaling.factor)
        if isinstance(self.scaling, YarnScaling):
            return max(trained_tokens, int(self.scaling.original_max_position_embeddings * self.scaling.factor))
        return trained_tokens

    def num_pairs(self, head_dim: int) -> int:
        """Number `P` of pairs that are rotated in heads of this width."""
        return int(head_dim * self.share) // 2

    def frequencies(self, head_dim: int) -> Frequencies:
        """Angle of each pair at position 1, in radians."""
        pairs = self.num_pairs(head_dim)
        frequencies = self.theta ** -(np.arange(pairs, dtype=np.float64) / pairs)
        return frequencies if self.scaling is None else self.scaling.stretch(frequencies, self.theta)
