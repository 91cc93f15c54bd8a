"""Shapes of decoders: presets, and refused shapes."""

from dataclasses import replace

import jax
import pytest

from jaxft.models.config import PRESETS, model_preset
from jaxft.models.decoder import decoder


def count_params(name):
    model = decoder(PRESETS[name])
    return sum(leaf.size for leaf in jax.tree.leaves(jax.eval_shape(model.init, jax.random.key(0))))


def test_presets_have_the_size_that_they_are_named_for():
    assert count_params("qwen3-50k") < 60_000
    assert 0.3e6 < count_params("qwen3-300k") < 0.35e6
    assert 0.8e6 < count_params("qwen3-1m") < 1.2e6
    # Embedding 151936 x 1024, 28 blocks of 15730944, and the last norm.
    assert count_params("qwen3-0.6b") == 151936 * 1024 + 28 * 15_730_944 + 1024


def test_unknown_preset_lists_those_there_are():
    with pytest.raises(ValueError, match="preset is 'qwen3-1b'; wanted one of qwen3-50k, qwen3-176k-a47k, qwen3-200k"):
        model_preset("qwen3-1b")


def test_impossible_heads_are_refused():
    with pytest.raises(ValueError, match="num_heads 4 is not a multiple of num_kv_heads 3"):
        replace(PRESETS["qwen3-50k"], num_kv_heads=3)
    with pytest.raises(ValueError, match="15 of head_dim 15 have rotary positions; wanted an even number"):
        replace(PRESETS["qwen3-50k"], head_dim=15)


def test_configs_are_hashable():
    assert len({replace(config) for config in PRESETS.values()} | set(PRESETS.values())) == len(PRESETS)
