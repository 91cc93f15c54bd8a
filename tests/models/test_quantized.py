"""Kernels in eight bits: rounding by hand, and a decoder that samples or trains adapters with them."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxft
from jaxft.core.cache import compute_dtype, init_cache
from jaxft.models.config import LoraSpec, model_preset
from jaxft.models.decoder import decoder
from jaxft.models.load import load_model
from jaxft.models.peft import save_adapter
from jaxft.models.quantized import (
    Quantized,
    dequantized,
    is_quantized,
    map_kernels,
    quantize,
    with_quantized_kernels,
)
from tests.models.weights import random_params

CONFIG, MIXTURE = model_preset("qwen3-50k"), replace(model_preset("qwen3-176k-a47k"), num_layers=1)
UNTIED, LORA = replace(CONFIG, tie_word_embeddings=False), LoraSpec(4, 8.0)
PARAMS, EXPERTS = random_params(CONFIG, LORA), random_params(MIXTURE, LORA)
TOKENS = np.random.default_rng(9).integers(0, CONFIG.vocab_size, (2, 16), np.int32)
POSITIONS = np.tile(np.arange(16, dtype=np.int32), (2, 1))
KERNEL = np.random.default_rng(3).normal(size=(2, 12, 6)).astype(np.float32)
KERNEL[0, :, 1], KERNEL[1, 3, 2] = 0.0, np.nan


def sampled_logits(params, config=CONFIG, **options):
    """Logits through pages, as an engine computes them."""
    model = decoder(config, **options)
    params = model.decode_layout(params)
    cache, tables = init_cache(model, *TOKENS.shape, compute_dtype(params))
    hidden, _ = model.apply(params, jnp.asarray(TOKENS), jnp.asarray(POSITIONS), cache=cache, tables=tables)
    return model.unembed(params, hidden)


def adapter_gradient(params, config=CONFIG):
    """Gradient of the adapters of a sum of log-probabilities."""
    model = decoder(config, lora=LORA)

    def total(adapter):
        return jaxft.token_logprobs(model, {**params, "adapter": adapter}, jnp.asarray(TOKENS)).logprobs.sum()

    return jax.grad(total)(params["adapter"])


@pytest.fixture(scope="module")
def computed():
    """Quantised kernels, and a decoder with them beside one with the arrays that they stand for, by one program."""

    def rounded(params, kind):
        return map_kernels(dequantized, with_quantized_kernels(params, kind))

    @jax.jit
    def compute(params, mixture, kernel):
        narrow, base = kernel.astype(jnp.bfloat16), params["base"]
        experts, wide_experts = (
            {**mixture, "base": form(mixture["base"], "int8")} for form in (with_quantized_kernels, rounded)
        )
        int8 = {**params, "base": with_quantized_kernels(base, "int8")}
        wide = {**params, "base": rounded(base, "int8")}
        twice = {kind: quantize(dequantized(quantize(narrow, kind)), kind) for kind in ("int8", "fp8")}
        return {
            "kernels": {kind: quantize(kernel, kind) for kind in ("int8", "fp8")},
            "narrow": {kind: quantize(narrow, kind) for kind in ("int8", "fp8")},
            "twice": twice,
            "full": sampled_logits(base),
            "int8": (sampled_logits(base, sampling_dtype="int8"), sampled_logits(wide["base"])),
            "fp8": (sampled_logits(base, sampling_dtype="fp8"), sampled_logits(rounded(base, "fp8"))),
            "head": (
                sampled_logits(base, sampling_dtype="int8", quantize_head=True),
                sampled_logits(wide["base"] | {"lm_head": dequantized(quantize(base["embed"].T, "int8")).T}, UNTIED),
            ),
            "adapters": (sampled_logits(params, sampling_dtype="int8", lora=LORA), sampled_logits(wide, lora=LORA)),
            "base in int8": (sampled_logits(int8, lora=LORA), sampled_logits(wide, lora=LORA)),
            "experts": (
                sampled_logits(mixture, MIXTURE, sampling_dtype="int8", lora=LORA),
                sampled_logits(wide_experts, MIXTURE, lora=LORA),
            ),
            "params": int8,
            "gradient": (adapter_gradient(int8), adapter_gradient(wide)),
            "gradient with experts": (adapter_gradient(experts, MIXTURE), adapter_gradient(wide_experts, MIXTURE)),
        }

    return jax.device_get(compute(PARAMS, EXPERTS, KERNEL))


@pytest.mark.parametrize(("kind", "largest"), [("int8", 127), ("fp8", 448)])
def test_each_output_channel_is_rounded_to_steps_of_its_largest_weight(computed, kind, largest):
    values, scale = (np.asarray(part, np.float32) for part in jax.tree.leaves(computed["kernels"][kind]))
    np.testing.assert_allclose(scale, np.abs(KERNEL).max(axis=-2, keepdims=True) / largest, rtol=1e-6)
    assert not values[0, :, 1].any() and not scale[0, :, 1].any() and np.isnan(scale[1, 0, 2])
    finite = np.isfinite(KERNEL).all(axis=-2, keepdims=True) & (scale > 0)
    error = np.where(finite, np.abs(values * scale - KERNEL) / np.where(scale > 0, scale, 1), 0)
    assert (error <= (0.5001 if kind == "int8" else 16.001)).all()
    if kind == "int8":
        np.testing.assert_array_equal(values[0, :, 0], np.round(KERNEL[0, :, 0] / scale[0, 0, 0]))


@pytest.mark.parametrize("kind", ["int8", "fp8"])
def test_what_was_quantised_is_found_again(computed, kind):
    """An exported base that is loaded in eight bits again is the same base."""
    once, twice = computed["narrow"][kind], computed["twice"][kind]
    assert once.scale.dtype == jnp.bfloat16
    scales = [np.asarray(each.scale, np.float32) for each in (once, twice)]
    np.testing.assert_array_equal(*scales)
    is_finite = np.broadcast_to(np.isfinite(scales[0]), once.values.shape)
    np.testing.assert_array_equal(once.values[is_finite], twice.values[is_finite])


@pytest.mark.parametrize("case", ["int8", "fp8", "head", "adapters", "base in int8", "experts"])
def test_a_decoder_samples_as_with_the_rounded_kernels(computed, case):
    found, wanted = computed[case]
    np.testing.assert_allclose(found, wanted, rtol=0, atol=2e-5)
    if case in ("int8", "fp8", "head"):
        assert np.abs(found - computed["full"]).max() > 1e-3


@pytest.mark.parametrize("case", ["gradient", "gradient with experts"])
def test_adapters_beside_a_base_in_int8_have_the_gradient_of_the_rounded_base(computed, case):
    found, wanted = computed[case]
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=1e-5 * np.abs(b).max()), found, wanted)
    assert all(leaf.any() for leaf in jax.tree.leaves(found))


@pytest.mark.slow
def test_adapters_of_a_base_in_int8_are_written_and_read_with_it(computed, tmp_path):
    """The file of the base holds the numbers that the eight bits stand for, and these are found again."""
    params = computed["params"]
    save_adapter(tmp_path / "saved", decoder(CONFIG, lora=LORA), params)
    model, again = load_model(tmp_path / "saved" / "base", dtype="int8", lora=tmp_path / "saved")
    assert isinstance(model.lora, LoraSpec) and is_quantized(again["base"])
    scales = jax.tree.map(lambda leaf: leaf.dtype.itemsize > 1, params["base"])
    jax.tree.map(
        lambda a, b, is_wide: np.testing.assert_allclose(a, b, rtol=1e-6 if is_wide else 0),
        again["base"],
        params["base"],
        scales,
    )
    jax.tree.map(np.testing.assert_array_equal, again["adapter"], params["adapter"])
    with pytest.raises(ValueError, match="dtype is int8, in which nothing can be trained"):
        load_model(tmp_path / "saved" / "base", dtype="int8")


def test_only_kernels_of_layers_are_quantised():
    """A mixture's experts are; its routers are not."""
    shapes = jax.eval_shape(lambda params: with_quantized_kernels(params, "int8", jnp.bfloat16), EXPERTS["base"])
    assert not is_quantized(shapes["layers"]["mlp"]["router"])
    kernel = shapes["layers"]["mlp"]["experts"]["up_proj"]["kernel"]
    assert isinstance(kernel, Quantized) and kernel.scale.dtype == jnp.bfloat16
    assert not is_quantized({name: leaf for name, leaf in shapes.items() if name != "layers"})
    assert {str(leaf.dtype) for leaf in jax.tree.leaves(shapes) if leaf.dtype.itemsize == 1} == {"int8"}


def test_options_of_the_sampler_without_a_type_of_its_kernels_are_refused():
    pages = jax.eval_shape(
        lambda: decoder(CONFIG, sampling_dtype="int8", kv_cache_dtype="fp8").init_cache(2, "float32")
    )
    assert {leaf.dtype for leaf in jax.tree.leaves(pages)} == {jnp.dtype(jnp.float8_e4m3fn)}
    for options in ({"quantize_head": True}, {"kv_cache_dtype": "fp8"}):
        with pytest.raises(ValueError, match="without a sampling_dtype; wanted int8 or fp8"):
            decoder(CONFIG, **options)
