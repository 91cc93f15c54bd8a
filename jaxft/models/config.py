"""The shape of a decoder and of its adapters, and presets of shapes by name."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from functools import cache
from typing import Any, Literal, NamedTuple

import numpy as np

from jaxft.models.rope import LongRopeScaling, Rope

NormPlaces = Literal["before", "after", "both"]
QKNorm = Literal["heads", "projections"]
Activation = Literal["silu", "gelu", "gelu_pytorch_tanh"]
Router = Literal["softmax", "topk_softmax", "sigmoid"]
"""Function of a router's logits that gives scores: softmax of all experts or of those chosen, or sigmoid of each."""


class LayerKind(NamedTuple):
    """Properties that differ between the layers of one model.

    Attributes:
        window: a token sees itself and the `window - 1` tokens before it; None sees all.
        rope: rotary positions; None for a layer without positions (arXiv 2305.19466).
        has_experts: the feed-forward layer is a mixture of experts.
    """

    window: int | None = None
    rope: Rope | None = Rope()
    has_experts: bool = False

    def holds(self, path: Sequence[str]) -> bool:
        """True if such a layer has the array at a path: a mixture has its own in the place of the feed-forward layer's.

        >>> LayerKind().holds(("mlp", "up_proj", "kernel")), LayerKind().holds(("mlp", "experts", "up_proj", "kernel"))
        (True, False)
        """
        return path[0] != "mlp" or self.has_experts != (path[1] in ("gate_proj", "up_proj", "down_proj"))


class ExpertTable(NamedTuple):
    """The table of the experts that tokens are routed to: `chosen` of `experts` in each of `layers`, counted from 1."""

    layers: int
    chosen: int
    experts: int

    @property
    def dtype(self) -> np.dtype[Any]:
        """Narrowest dtype that holds the table."""
        return np.dtype(np.min_scalar_type(self.experts))


@dataclass(frozen=True)
class DecoderConfig:
    """A decoder-only transformer: RMSNorm, grouped-query attention, and a gated feed-forward layer.

    Attributes:
        family: published architecture, by its name in `jaxft.models.families`, which decides the format of its files.
        vocab_size: rows of the embedding.
        hidden_size: width `D` of the residual stream.
        intermediate_size: width `F` of the gated feed-forward layer.
        num_layers: number `L` of blocks.
        num_heads: query heads `H`.
        num_kv_heads: key and value heads `K`; divides `num_heads`.
        head_dim: width `h` of a head.
        max_position_embeddings: context length, in tokens, of the model's pretraining.
        rms_norm_eps: constant added to the mean square.
        pattern: kinds of the layers in turn, repeated as often as there are layers; kept in its shortest form.
        qkv_bias: query, key and value projections add a bias.
        output_bias: the attention's output projection adds a bias.
        mlp_bias: the feed-forward projections add a bias.
        norm_places: RMSNorm of the input of attention and feed-forward (`before`), of their output (`after`), or of
            both.
        norm_offset: norms multiply by `1 + scale` instead of `scale`.
        qk_norm: RMSNorm of queries and keys: of each head, of all heads together (`projections`), or None.
        activation: function of the gate.
        num_experts: experts `E` of a mixture (arXiv 1701.06538); 0 for a model without.
        num_experts_per_tok: experts `k` that compute a token.
        moe_intermediate_size: width of an expert.
        router: how the scores of experts follow from the router's logits.
        norm_topk_prob: the weights of a token's experts are divided by their sum.
        routed_scaling_factor: factor of the weights.
        router_bias: the router adds a bias to its logits.
        selection_bias: experts are chosen by score plus a bias, which their weights do not have (arXiv 2408.15664).
        expert_bias: the projections of experts add a bias.
        swiglu_limit: experts compute `gate sigmoid(swiglu_alpha gate) (up + 1)` of a gate of at most this and an up
            within it; None for `activation(gate) up`.
        swiglu_alpha: the factor there.
        num_shared_experts: experts of every token, computed as one feed-forward layer of their width in sum.
        shared_expert_intermediate_size: width of a shared expert; None for that of the others.
        shared_expert_gate: the shared expert's output is multiplied by the sigmoid of a projection.
        attention_scale: factor of the products of queries and keys; None for `h**-0.5`.
        attention_sinks: each head has a score more, of nothing, that is learned (arXiv 2309.17453).
        attention_soft_cap: scores `x` become `cap tanh(x / cap)`; None leaves them.
        embedding_scale: factor of the embedding, which the tied output projection does not have.
        residual_scale: factor of what attention and feed-forward add to the residual stream.
        logit_scale: factor of the logits.
        logit_soft_cap: logits `x` become `cap tanh(x / cap)`; None leaves them.
        tie_word_embeddings: the output projection is the embedding.
        source_json: JSON text of the other fields of the files that the model was loaded from, kept for the export:
            `{"config.json": {...}, "generation_config.json": {...}, "wrapper": {...}}`; empty without any.
    """

    family: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int = 32768
    rms_norm_eps: float = 1e-6
    pattern: tuple[LayerKind, ...] = (LayerKind(),)
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    norm_places: NormPlaces = "before"
    norm_offset: bool = False
    qk_norm: QKNorm | None = None
    activation: Activation = "silu"
    num_experts: int = 0
    num_experts_per_tok: int = 0
    moe_intermediate_size: int = 0
    router: Router = "softmax"
    norm_topk_prob: bool = False
    routed_scaling_factor: float = 1.0
    router_bias: bool = False
    selection_bias: bool = False
    expert_bias: bool = False
    swiglu_limit: float | None = None
    swiglu_alpha: float = 1.702
    num_shared_experts: int = 0
    shared_expert_intermediate_size: int | None = None
    shared_expert_gate: bool = False
    attention_scale: float | None = None
    attention_sinks: bool = False
    attention_soft_cap: float | None = None
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    logit_scale: float = 1.0
    logit_soft_cap: float | None = None
    tie_word_embeddings: bool = True
    source_json: str = field(default="", repr=False)

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"num_heads {self.num_heads} is not a multiple of num_kv_heads {self.num_kv_heads}")
        object.__setattr__(self, "pattern", shortest_pattern(self.pattern, self.num_layers))
        chosen, has_experts = self.num_experts_per_tok, any(kind.has_experts for kind in self.pattern)
        if has_experts and not 1 <= chosen <= self.num_experts:
            raise ValueError(f"num_experts_per_tok is {chosen}; wanted 1 to {self.num_experts}, the num_experts")
        for rope in {kind.rope for kind in self.pattern} - {None}:
            assert rope is not None
            if (turned := int(self.head_dim * rope.share)) % 2:
                raise ValueError(f"{turned} of head_dim {self.head_dim} have rotary positions; wanted an even number")
            pairs = rope.num_pairs(self.head_dim)
            for name in ("short_factor", "long_factor") if isinstance(rope.scaling, LongRopeScaling) else ():
                if (count := len(getattr(rope.scaling, name))) != pairs:
                    raise ValueError(f"{name} has {count} numbers; wanted {pairs}")

    @property
    def kinds(self) -> tuple[LayerKind, ...]:
        """Kind of each layer."""
        repeats = -(-self.num_layers // len(self.pattern))
        return (self.pattern * repeats)[: self.num_layers]

    @property
    def expert_table(self) -> ExpertTable | None:
        """Shape of the table of the experts of tokens; None for a dense model."""
        layers = sum(kind.has_experts for kind in self.kinds)
        return ExpertTable(layers, self.num_experts_per_tok, self.num_experts) if layers else None

    @property
    def shared_width(self) -> int:
        """Width of the shared experts of a mixture in sum."""
        return self.num_shared_experts * (self.shared_expert_intermediate_size or self.moe_intermediate_size)

    @property
    def score_scale(self) -> float:
        """Factor of the products of queries and keys."""
        return self.head_dim**-0.5 if self.attention_scale is None else self.attention_scale

    def for_context(self, tokens: int) -> "DecoderConfig":
        """Return the config for contexts of so many tokens, on which the rotary positions of some models depend.

        Raises:
            ValueError: the model knows no positions as high.
        """
        ropes = {kind.rope for kind in self.pattern if kind.rope is not None}
        longest = min((rope.longest_context(self.max_position_embeddings) for rope in ropes), default=tokens)
        if tokens > longest:
            raise ValueError(
                f"max_context_tokens is {tokens}, but the model was trained on texts of at most {longest} tokens "
                f"(max_position_embeddings {self.max_position_embeddings}), and at later positions it writes nonsense: "
                "lower it, or extend the model's context by a rope_scaling in its config.json"
            )
        kinds = (
            kind if kind.rope is None else kind._replace(rope=kind.rope.for_context(tokens)) for kind in self.pattern
        )
        return replace(self, pattern=tuple(kinds))

    @property
    def architecture(self) -> "DecoderConfig":
        """The config without `source_json`: equal for models with interchangeable parameters.

        >>> model_preset("qwen3-50k") == replace(model_preset("qwen3-50k"), source_json="{}").architecture
        True
        """
        return replace(self, source_json="")


@cache
def layers_with(kinds: tuple[LayerKind, ...], path: tuple[str, ...]) -> tuple[int, ...]:
    """Return the layers that have the array at a path within a layer, which are those of its stack, in order."""
    return tuple(layer for layer, kind in enumerate(kinds) if kind.holds(path))


def shortest_pattern(kinds: Sequence[LayerKind], num_layers: int) -> tuple[LayerKind, ...]:
    """Return the shortest pattern that gives the same kinds to so many layers.

    >>> full, sliding = LayerKind(), LayerKind(window=8)
    >>> shortest_pattern([sliding, full, sliding], 4) == (sliding, full, sliding)
    True
    >>> shortest_pattern([sliding, full, sliding], 3) == (sliding, full)
    True
    """
    of_layers = [kinds[i % len(kinds)] for i in range(num_layers)]
    lengths = range(1, num_layers + 1)
    shortest = next(n for n in lengths if all(kind == of_layers[i % n] for i, kind in enumerate(of_layers)))
    return tuple(of_layers[:shortest])


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

        >>> [path for path in PROJECTIONS if LoraSpec(8, 16, ("q_proj", "mlp/up_proj", "experts/*")).is_target(path)]
        ['self_attn/q_proj', 'mlp/up_proj', 'mlp/experts/gate_proj', 'mlp/experts/up_proj', 'mlp/experts/down_proj']
        """
        return any(matches(target, path) for target in self.targets)


EXPERTS, SHARED_EXPERT = "mlp/experts", "mlp/shared_expert"
FEED_FORWARDS = ("mlp", EXPERTS, SHARED_EXPERT)
"""Paths, within a layer, of a feed-forward layer, of the stacked experts of a mixture, and of its shared expert."""

PROJECTIONS = (
    *(f"self_attn/{name}_proj" for name in ("q", "k", "v", "o")),
    *(f"{place}/{name}_proj" for place in FEED_FORWARDS for name in ("gate", "up", "down")),
)
"""Paths, within a layer, of the projections that may have an adapter."""


def matches(pattern: str, path: str) -> bool:
    """Return True if a path, or its end, matches a pattern.

    >>> matches("q_proj", "self_attn/q_proj"), matches("attn/q_proj", "self_attn/q_proj")
    (True, False)
    """
    return fnmatchcase(f"/{path}", f"*/{pattern}")


def is_quantizable(path: Sequence[str]) -> bool:
    """True for the path of a kernel that products in eight bits take: of no router or gate.

    >>> [is_quantizable(f"mlp/{name}/kernel".split("/")) for name in ("up_proj", "router", "experts/up_proj")]
    [True, False, True]
    """
    return path[-1] == "kernel" and not {*path} & {"router", "shared_expert_gate"}


def _qwen3(vocab: int, hidden: int, ffn: int, layers: int, heads: int, kv_heads: int, head_dim: int) -> DecoderConfig:
    return DecoderConfig("qwen3", vocab, hidden, ffn, layers, heads, kv_heads, head_dim, qk_norm="heads")


def _with_experts(dense: DecoderConfig, experts: int, chosen: int, width: int) -> DecoderConfig:
    sizes: dict[str, Any] = {"num_experts": experts, "num_experts_per_tok": chosen, "moe_intermediate_size": width}
    return replace(dense, family="qwen3_moe", pattern=(LayerKind(has_experts=True),), norm_topk_prob=True, **sizes)


PRESETS: Mapping[str, DecoderConfig] = {
    "qwen3-50k": _qwen3(262, 32, 96, 2, 4, 2, 16),
    "qwen3-176k-a47k": _with_experts(_qwen3(262, 32, 96, 3, 4, 2, 16), 16, 2, 32),
    "qwen3-200k": _qwen3(262, 64, 192, 4, 4, 2, 16),
    "qwen3-300k": _qwen3(262, 128, 256, 2, 4, 2, 32),
    "qwen3-1m": _qwen3(262, 128, 384, 4, 4, 2, 32),
    "qwen3-2m": replace(_qwen3(512, 128, 1024, 4, 4, 2, 32), tie_word_embeddings=False),
    "qwen3-5m": _qwen3(262, 256, 768, 6, 8, 4, 32),
    "qwen3-58m": replace(_qwen3(32000, 512, 1536, 8, 8, 4, 64), tie_word_embeddings=False),
    "qwen3-0.6b": _qwen3(151936, 1024, 3072, 28, 16, 8, 128),
    "qwen3-1.7b": _qwen3(151936, 2048, 6144, 28, 16, 8, 128),
    "qwen3-8b": replace(_qwen3(151936, 4096, 12288, 36, 32, 8, 128), tie_word_embeddings=False),
    "qwen3-30b-a3b": replace(
        _with_experts(_qwen3(151936, 2048, 6144, 48, 32, 4, 128), 128, 8, 768), tie_word_embeddings=False
    ),
}
"""Shapes by name, for `init_model`. Those with 262 tokens have the vocabulary of the embedded character tokenizer."""


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
