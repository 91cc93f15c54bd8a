"""Every family of models against what transformers computed from tiny checkpoints (`scripts/make_model_oracles.py`).

Logits, greedy text, the cache, the engine, packed rows, a mesh of 8 devices, and the export. The checkpoints
were made with transformers 5.23.0 and torch 2.13.0. `.ci/more models` draws further ones for a live comparison.
"""

import asyncio
import json
import os
import subprocess
import sys
from functools import cache, partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors import safe_open
from transformers import AutoConfig

import jaxft
from jaxft.core.cache import init_cache
from jaxft.core.logprobs import token_logprobs
from jaxft.models.families import FAMILIES
from jaxft.models.hf import save_model
from jaxft.models.hf_config import load_config
from jaxft.rollout.device import DeviceThread
from jaxft.rollout.engine import Engine
from jaxft.rollout.requests import Request

DATA = Path(__file__).parents[1] / "data" / "hf"
FAST = ("gemma2", "olmo3-v4", "phi3-longrope", "ministral3-window", "gpt_oss")
"""Cases whose rows also go through pages in the default tests: together they have all kinds of
attention but that of `test_paged.py`."""

MADE = sorted(file.parent.name for file in DATA.glob("*/expected.npz"))
CASES = tuple(name for name in MADE if "greedy_ids" in np.load(DATA / name / "expected.npz"))
"""All cases with a text; the older ones without are those of `test_hf.py`."""

VARIANTS = (
    "gemma2-untied",
    "gemma3",
    "gemma3-v5",
    "gemma3_text",
    "granite-tied",
    "mistral3",
    "mistral3-mistral",
    "olmo2-tied",
    "phi3",
    "smollm3",
)
"""Cases that compute nothing which no other case does; their files differ, and are compared in the default tests."""

COMPUTED = [pytest.param(name, marks=[pytest.mark.slow] * (name in VARIANTS)) for name in CASES]

SAMPLED = ("gemma2", "phi3-longrope")
"""Cases whose text the engine samples in the slow tests."""


def family_of(name):
    return load_config(DATA / name / "config.json").family


def divides(name):
    """Whether the heads of a case divide over two devices."""
    return load_config(DATA / name / "config.json").num_kv_heads % 2 == 0


ON_A_MESH = tuple({family_of(name): name for name in MADE if divides(name)}.values())
"""A case of each family."""


def test_every_family_has_a_case_for_each_comparison():
    assert set(FAST) <= set(CASES) - set(VARIANTS)
    assert {family_of(name) for name in CASES if name not in VARIANTS} == set(FAMILIES)
    assert {family_of(name) for name in CASES} == {family_of(name) for name in ON_A_MESH} == set(FAMILIES)


PREFIXES = ("model.language_model.", "language_model.model.", "language_model.")
"""Prefixes of the tensors of text in the files of models of text and images."""

CLOSE = 1e-5
"""Largest difference of log-probabilities, and of logits relative to the largest one, which is 3 to 10 here."""

CONTEXT_TOKENS = 75
"""Tokens of a prompt with its text: more than the original context of one case with LongRoPE, less than the other's."""


@cache
def loaded(name):
    return jaxft.load_model(DATA / name, context_tokens=CONTEXT_TOKENS)


@cache
def expected(name):
    return dict(np.load(DATA / name / "expected.npz"))


@partial(jax.jit, static_argnums=0)
def full_logits(model, params, tokens, positions, segment_ids):
    hidden, _ = model.apply(params, tokens, positions, segment_ids=segment_ids)
    return model.unembed(params, hidden)


@partial(jax.jit, static_argnums=(0, 3))
def cached_logits(model, params, tokens, prefilled):
    """Logits through pages: the first tokens at once, then token by token."""
    rows, length = tokens.shape
    params = model.decode_layout(params)
    positions = jnp.broadcast_to(jnp.arange(length), tokens.shape)
    cache, tables = init_cache(model, rows, length, jnp.float32)
    pieces = []
    if prefilled:
        at = positions[:, :prefilled]
        hidden, cache = model.apply(params, tokens[:, :prefilled], at, cache=cache, tables=tables)
        pieces.append(hidden)

    def step(cache, place):
        token, position = (jax.lax.dynamic_slice_in_dim(x, place, 1, axis=1) for x in (tokens, positions))
        hidden, cache = model.apply(params, token, position, cache=cache, tables=tables)
        return cache, hidden[:, 0]

    _, rest = jax.lax.scan(step, cache, jnp.arange(prefilled, length))
    return model.unembed(params, jnp.concatenate([*pieces, rest.transpose(1, 0, 2)], axis=1))


def prompt_and_text(name):
    return np.concatenate([expected(name)["prompt_ids"], expected(name)["greedy_ids"]]).astype(np.int32)


def parts_of_a_packed_row(name):
    """Two rows and a third that is a part of the first, one after the other, so that windows reach beyond borders."""
    tokens = expected(name)["input_ids"]
    return [tokens[0], tokens[1, :27], tokens[0, :5]]


@cache
def rows_of(name):
    """Tokens, positions and segments of all rows of a case: its two, the prompt with its text, and a packed one."""
    tokens, segment_ids = (np.zeros((4, CONTEXT_TOKENS), np.int32) for _ in range(2))
    tokens[:2, : expected(name)["input_ids"].shape[1]] = expected(name)["input_ids"]
    tokens[2] = prompt_and_text(name)
    segment_ids[:3] = 1  # 0 is padding, which no expert computes
    positions = np.tile(np.arange(CONTEXT_TOKENS, dtype=np.int32), (4, 1))
    first = 0
    for number, part in enumerate(parts_of_a_packed_row(name), 1):
        here = slice(first, first := first + len(part))
        tokens[3, here], positions[3, here], segment_ids[3, here] = part, np.arange(len(part)), number
    return tokens, positions, segment_ids


@cache
def whole(name):
    """The logits of all rows of a case in one pass."""
    return np.asarray(full_logits(*loaded(name), *rows_of(name)))


def assert_close(logits, wanted):
    np.testing.assert_allclose(logits, wanted, rtol=0, atol=CLOSE * np.abs(wanted).max())


@pytest.mark.parametrize("name", COMPUTED)
def test_logits_and_greedy_text_are_those_of_transformers(name):
    is_real = expected(name)["attention_mask"] == 1
    assert 0 < is_real.sum() < is_real.size
    assert whole(name).dtype == np.float32
    logits = whole(name)[:2, : is_real.shape[1]]
    np.testing.assert_allclose(logits[is_real], expected(name)["logits"][is_real], rtol=0, atol=1e-4)
    assert expected(name)["min_margin"] > 1e-3
    text = expected(name)["greedy_ids"]
    np.testing.assert_array_equal(whole(name)[2, -1 - len(text) : -1].argmax(axis=-1), text)


@pytest.mark.parametrize("name", FAST)
def test_rows_through_pages_have_the_logits_of_one_pass(name):
    """The prompt and its text need two pages."""
    assert_close(np.asarray(cached_logits(*loaded(name), rows_of(name)[0][:3], 0)), whole(name)[:3])


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if name in SAMPLED else pytest.mark.long) for name in CASES]
)
def test_greedy_text_of_the_engine_is_that_of_transformers(name):
    """Log-probabilities are those that a trainer computes in one pass."""
    model, params = loaded(name)
    prompt, text = (expected(name)[key].tolist() for key in ("prompt_ids", "greedy_ids"))
    layout = model.decode_layout(params)
    device = DeviceThread()
    length = len(prompt) + len(text)
    engine = Engine(model, device, lambda: (layout, 0), seed=0, slots=1, max_context_tokens=length, shapes=params)
    request = Request(tuple(prompt), (0,) * 6, len(text), temperature=0.0)
    try:
        completion = asyncio.run(asyncio.wait_for(engine.submit(request), timeout=60))
    finally:
        device.close()
    assert completion.token_ids == text

    scored = score(model, params, jnp.asarray(prompt_and_text(name))[None])[0, len(prompt) :]
    np.testing.assert_allclose(completion.sampler_logprobs, scored, rtol=0, atol=CLOSE)


@partial(jax.jit, static_argnums=0)
def score(model, params, tokens):
    return token_logprobs(model, params, tokens, temperature=jnp.ones(tokens.shape)).logprobs


@pytest.mark.long
@pytest.mark.parametrize("name", CASES)
def test_the_cache_gives_the_logits_of_one_pass(name):
    for prefilled in (1, 20):
        assert_close(np.asarray(cached_logits(*loaded(name), rows_of(name)[0][:3], prefilled)), whole(name)[:3])


@pytest.mark.parametrize("name", COMPUTED)
def test_packed_rows_give_the_logits_of_rows_alone(name):
    lengths = [len(part) for part in parts_of_a_packed_row(name)]
    alone = [whole(name)[row, :length] for row, length in zip((0, 1, 0), lengths, strict=True)]
    assert_close(whole(name)[3, : sum(lengths)], np.concatenate(alone))


def stored(folder):
    """The tensors of text in a folder's files, named as in a model of text: `name -> (dtype, shape, bytes)`."""
    tensors = {}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, "np") as opened:
            for name in opened.keys():  # noqa: SIM118
                if "vision_tower" in name or "multi_modal" in name:
                    continue
                cut = opened.get_slice(name)
                prefix = next((prefix for prefix in PREFIXES if name.startswith(prefix)), None)
                # The last prefix stands before the head, the others before all else.
                own = name if prefix is None else name.replace(prefix, "" if prefix == PREFIXES[-1] else "model.", 1)
                tensors[own] = cut.get_dtype(), tuple(cut.get_shape()), opened.get_tensor(name).tobytes()
    return tensors


def text_config(folder):
    """What transformers reads from a folder's `config.json` about the model of text, with its rotary parameters."""
    values = AutoConfig.from_pretrained(folder).get_text_config().to_dict()
    ropes = values.pop("rope_parameters")
    nested = ropes if isinstance(next(iter(ropes.values())), dict) else {"all": ropes}
    return {key: value for key, value in values.items() if key not in OF_THE_FILE}, nested


OF_THE_FILE = (
    "architectures",
    "dtype",
    "transformers_version",
    "_name_or_path",
    "_sliding_window_pattern",  # only makes `layer_types`
    "sliding_window_pattern",
    "original_max_position_embeddings",  # of Phi-3, where it is also a rotary parameter if there is a scaling
)
"""Keys that say nothing about the model, or nothing that others do not say."""

UNUSED_IN_ROPES = ("type", "max_position_embeddings")
"""Rotary parameters that transformers does not read: an old name of `rope_type`, and a copy."""


@pytest.mark.parametrize("name", CASES)
def test_export_has_every_bit_and_the_config(name, tmp_path):
    dtypes = {"F32": jnp.float32, "BF16": jnp.bfloat16, "F16": jnp.float16}
    (dtype,) = {dtype for dtype, _, _ in stored(DATA / name).values()}
    model, params = jaxft.load_model(DATA / name, dtype=dtypes[dtype])
    save_model(tmp_path / "copy", model, params)
    assert stored(tmp_path / "copy") == stored(DATA / name)
    again, others = jaxft.load_model(tmp_path / "copy", dtype=dtypes[dtype])
    assert again.config.architecture == model.config.architecture
    assert jax.tree.structure(params) == jax.tree.structure(others)
    (values, ropes), (written, written_ropes) = text_config(DATA / name), text_config(tmp_path / "copy")
    assert {key: written[key] for key in values} == values  # what is added says a default
    assert ropes.keys() == written_ropes.keys()
    for kind, given in ropes.items():
        used = {key: value for key, value in given.items() if key not in UNUSED_IN_ROPES}
        assert {key: written_ropes[kind][key] for key in used} == used
    assert json.loads((tmp_path / "copy" / "config.json").read_text())["dtype"] == jnp.dtype(dtypes[dtype]).name


SPREAD = """
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

import jaxft

def logits(folder, mesh):
    model, params = jaxft.load_model(folder, mesh=mesh)
    tokens = jnp.asarray(np.load(folder / "expected.npz")["input_ids"])[:2]
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    apply = jax.jit(lambda params: model.unembed(params, model.apply(params, tokens, positions)[0]))
    return np.asarray(apply(params))

for name in sys.argv[1:]:
    alone = logits(Path(name), None)
    for sizes in ((2, 2, 2), (1, 4, 2)):
        limit = 1e-5 * np.abs(alone).max()
        np.testing.assert_allclose(logits(Path(name), jaxft.make_mesh(*sizes)), alone, rtol=0, atol=limit, err_msg=name)
"""


@pytest.mark.long
@pytest.mark.parametrize("name", ON_A_MESH)
def test_a_mesh_of_devices_gives_the_logits_of_one(name):
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8"
    command = [sys.executable, "-c", SPREAD, str(DATA / name)]
    subprocess.run(command, env=os.environ | {"XLA_FLAGS": flags}, check=True)
