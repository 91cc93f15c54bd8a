"""The shape of a decoder and of its adapters, and presets of shapes by name."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import Literal

Family = Literal["llama", "mistral", "qwen2", "qwen3"]


@dataclass(frozen=True)
class RopeScaling:
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


@dataclass(frozen=True)
class DecoderConfig:
    """A decoder-only transformer: RMSNorm, rotary positions, grouped-query attention, SwiGLU.

    Attributes:
        family: published architecture, which decides the defaults of its files.
        vocab_size: rows of the embedding.
        hidden_size: width `D` of the residual stream.
        intermediate_size: width `F` of the gated feed-forward layer.
        num_layers: number `L` of blocks.
        num_heads: query heads `H`.
        num_kv_heads: key and value heads `K`; divides `num_heads`.
        head_dim: width `h` of a head.
        max_position_embeddings: context length, in tokens, of the model's pretraining.
        rms_norm_eps: constant added to the mean square.
        rope_theta: base of the rotary wavelengths.
        rope_scaling: Llama 3.1's stretch of frequencies, or None.
        sliding_window: a token sees itself and the `sliding_window - 1` tokens before it; None sees all.
        qkv_bias: query, key and value projections add a bias (Qwen2).
        output_bias: the attention's output projection adds a bias (Llama with `attention_bias`).
        mlp_bias: the feed-forward projections add a bias.
        qk_norm: RMSNorm on each query and key head (Qwen3).
        tie_word_embeddings: the output projection is the embedding.
        source_json: JSON text of the other fields of the files that the model was loaded from, kept for the export:
            `{"config.json": {...}, "generation_config.json": {...}}`; empty without any.
    """

    family: Family
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int = 32768
    rms_norm_eps: float = 1e-6
    rope_theta: float = 1e6
    rope_scaling: RopeScaling | None = None
    sliding_window: int | None = None
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    tie_word_embeddings: bool = True
    source_json: str = field(default="", repr=False)

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"num_heads {self.num_heads} is not a multiple of num_kv_heads {self.num_kv_heads}")
        if self.head_dim % 2:
            raise ValueError(f"head_dim is {self.head_dim}; rotary positions need an even number")

    @property
    def architecture(self) -> "DecoderConfig":
        """The config without `source_json`: equal for models with interchangeable parameters.

        >>> model_preset("qwen3-50k") == replace(model_preset("qwen3-50k"), source_json="{}").architecture
        True
        """
        return replace(self, source_json="")


@dataclass(frozen=True)
class LoraSpec:
    """Low-rank adapters (arXiv 2106.09685): kernels `W` are used as `W + scale A B`; only `A` and `B` are trained.

    Attributes:
        rank: inner width `r` of the product.
        alpha: `scale = alpha / rank`, so that the rank can change while the learning rate stays.
        targets: projections that have an adapter, by name or path with `*`: `q_proj`, `mlp/*`.
        use_rslora: `scale = alpha / sqrt(rank)` (arXiv 2312.03732).
    """

    rank: int
    alpha: float
    targets: tuple[str, ...] = ("*_proj",)
    use_rslora: bool = False

    def __post_init__(self) -> None:
        if self.rank < 1:
            raise ValueError(f"rank is {self.rank}; wanted at least 1")
        if not 0 < self.alpha < float("inf"):
            raise ValueError(f"alpha is {self.alpha}; wanted a positive number")
        for target in self.targets or ("",):
            if not any(matches(target, path) for path in PROJECTIONS):
                raise ValueError(f"target {target!r} matches no projection; there are {', '.join(PROJECTIONS)}")

    @property
    def scale(self) -> float:
        """The factor of `A B`."""
        return self.alpha / (self.rank**0.5 if self.use_rslora else self.rank)

    def is_target(self, path: str) -> bool:
        """True if the projection at this path has an adapter.

        >>> [path for path in PROJECTIONS if LoraSpec(8, 16, ("q_proj", "mlp/*")).is_target(path)]
        ['self_attn/q_proj', 'mlp/gate_proj', 'mlp/up_proj', 'mlp/down_proj']
        """
        return any(matches(target, path) for target in self.targets)


PROJECTIONS = (
    *(f"self_attn/{name}_proj" for name in ("q", "k", "v", "o")),
    *(f"mlp/{name}_proj" for name in ("gate", "up", "down")),
)
"""Paths, within a layer, of the projections that may have an adapter."""


def matches(pattern: str, path: str) -> bool:
    """Return True if a path, or its end, matches a pattern.

    >>> matches("q_proj", "self_attn/q_proj"), matches("attn/q_proj", "self_attn/q_proj")
    (True, False)
    """
    return fnmatchcase(f"/{path}", f"*/{pattern}")


def _qwen3(vocab: int, hidden: int, ffn: int, layers: int, heads: int, kv_heads: int, head_dim: int) -> DecoderConfig:
    return DecoderConfig("qwen3", vocab, hidden, ffn, layers, heads, kv_heads, head_dim, qk_norm=True)


PRESETS: Mapping[str, DecoderConfig] = {
    "qwen3-50k": _qwen3(262, 32, 96, 2, 4, 2, 16),
    "qwen3-1m": _qwen3(262, 128, 384, 4, 4, 2, 32),
    "qwen3-2m": replace(_qwen3(512, 128, 1024, 4, 4, 2, 32), tie_word_embeddings=False),
    "qwen3-58m": replace(_qwen3(32000, 512, 1536, 8, 8, 4, 64), tie_word_embeddings=False),
    "qwen3-0.6b": _qwen3(151936, 1024, 3072, 28, 16, 8, 128),
    "qwen3-1.7b": _qwen3(151936, 2048, 6144, 28, 16, 8, 128),
    "qwen3-8b": replace(_qwen3(151936, 4096, 12288, 36, 32, 8, 128), tie_word_embeddings=False),
}
"""Shapes by name, for `init_model`. The two smallest have the vocabulary of the embedded character tokenizer."""


def model_preset(name: str, *, vocab_size: int | None = None) -> DecoderConfig:
    """Return the config of a preset, optionally with another vocabulary size.

    Raises:
        ValueError: no preset has this name; the message lists the presets.

    >>> model_preset("qwen3-1m", vocab_size=300).vocab_size
    300
    """
    if name not in PRESETS:
        raise ValueError(f"preset is {name!r}; wanted one of {', '.join(PRESETS)}")
    config = PRESETS[name]
    return config if vocab_size is None else replace(config, vocab_size=vocab_size)
