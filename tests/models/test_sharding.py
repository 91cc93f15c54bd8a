"""The sharding rules of the families, as tables and as errors."""

from dataclasses import replace

import jax
import pytest
from jax.sharding import AbstractMesh

from jaxft.core.mesh import AXES, device_bytes
from jaxft.models.config import preset
from jaxft.models.decoder import decoder
from jaxft.models.sharding import RULES, layout_of, parameters_table, rules_table

CONFIG = replace(preset("qwen3-50k"), num_kv_heads=4, vocab_size=264, qkv_bias=True, mlp_bias=True)


def mesh(data=1, fsdp=1, tensor=1):
    return AbstractMesh((data, fsdp, tensor), AXES)


def shapes(config):
    return jax.eval_shape(decoder(config).init, jax.random.key(0))


@pytest.mark.parametrize("family", RULES)
def test_all_but_norms_are_cut(family):
    """Of eight devices each holds an eighth, and the norms and output biases whole."""
    config = replace(CONFIG, family=family, qk_norm=family == "qwen3", tie_word_embeddings=False)
    layout = layout_of(config, mesh(fsdp=4, tensor=2), strict=True)
    kernels = {k: v for k, v in shapes(config)["layers"].items() if k in ("self_attn", "mlp")}
    for module in kernels.values():
        for name, leaves in module.items():
            if "kernel" in leaves:
                leaf = leaves["kernel"]
                shard = layout.sharding(f"layers/{name}/kernel", leaf.shape).shard_shape(leaf.shape)
                assert leaf.size == 8 * shard[0] * shard[1] * shard[2], name
    whole, each = device_bytes(None, shapes(config)), device_bytes(layout, shapes(config))
    assert whole / 8 < each < 1.1 * whole / 8


def test_decoding_has_kernels_the_other_way_round_and_whole_along_fsdp():
    layout = layout_of(CONFIG, mesh(fsdp=2, tensor=2)).gathered()
    trained, decoded = shapes(CONFIG), jax.eval_shape(decoder(CONFIG).decode_layout, shapes(CONFIG))
    stacked = trained["layers"]["self_attn"]["o_proj"]["kernel"].shape
    single = decoded["transposed_layers"][1]["self_attn"]["o_proj"]["kernel"].shape
    assert single == stacked[:0:-1]
    assert tuple(layout.spec("layers/self_attn/o_proj/kernel", stacked)) == (None, "tensor", None)
    assert tuple(layout.spec("transposed_layers/1/self_attn/o_proj/kernel", single)) == (None, "tensor")


def test_heads_that_do_not_divide():
    with pytest.raises(ValueError, match=r"num_kv_heads is 4, which does not divide over the 3 devices .*'tensor'"):
        layout_of(replace(CONFIG, num_heads=12, num_kv_heads=4), mesh(tensor=3))


def test_a_dimension_that_does_not_divide_is_whole_and_said_once():
    uneven = replace(CONFIG, vocab_size=262)
    with pytest.warns(UserWarning, match="ends/embedding: dimension 0 of 262 .* the 4 devices of mesh axis 'tensor'"):
        layout = layout_of(uneven, mesh(tensor=4))
    assert tuple(layout.spec("ends/embedding", (262, 32))) == (None, "fsdp")
    with pytest.raises(ValueError, match="ends/embedding: dimension 0 of 262"):
        layout_of(uneven, mesh(tensor=4), strict=True)


def test_tables():
    assert rules_table().startswith("llama, mistral, qwen2, qwen3\nembedding")
    lines = parameters_table(shapes(CONFIG), layout_of(CONFIG, mesh(2, 2, 2))).splitlines()
    assert lines[0] == "mesh: data 2, fsdp 2, tensor 2"
    (kernel,) = [line.split() for line in lines if line.startswith("layers/self_attn/o_proj/kernel")]
    assert kernel[1:] == ["(2,", "64,", "32)", "-,", "tensor,", "fsdp", f"{2 * 64 * 32 / 2**20:.3f}"]
