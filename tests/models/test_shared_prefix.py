"""Attention to a shared prefix, joined from two calls of cuDNN: by the formulas of its kernels, which no CPU has."""

import os
import subprocess
import sys
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxft.models.segment_probe as probe_module
import jaxft.models.shared_prefix as prefix_module
from jaxft.models.attention import HeadRows, Scores, attend, visible_keys
from jaxft.models.config import PRESETS
from jaxft.models.flash import Choice, row_attention
from jaxft.models.segment_probe import can_share_prefixes, prefix_leak
from jaxft.models.shared_prefix import Part, takes_prefix

SMALL = PRESETS["qwen3-50k"]


def probabilities(scale, q, k, lengths, window, log_sums=None):
    """Probabilities `[B K G T S]` by a given log-sum-exp of each query, and that of these scores."""
    grouped = q.reshape(*q.shape[:2], k.shape[2], -1, q.shape[3])
    scores = scale * jnp.einsum("btkgh,bskh->bkgts", grouped, k)
    keys, queries = jnp.arange(k.shape[1]), jnp.arange(q.shape[1])
    distance = queries[:, None] - keys
    is_causal = (distance >= 0) & (distance < (window or len(keys)))
    is_seen = is_causal[None] if lengths is None else (keys < lengths[:, None])[:, None]
    scores = jnp.where(is_seen[:, None, None], scores, -jnp.inf)
    if log_sums is None:
        log_sums = jax.nn.logsumexp(scores, axis=-1).reshape(len(q), q.shape[2], -1)
    return jnp.exp(scores - log_sums.reshape(scores.shape[:-1])[..., None]), log_sums


def forward(scale, q, k, v, lengths, window=None):
    weights, log_sums = probabilities(scale, q, k, lengths, window)
    return Part(jnp.einsum("bkgts,bskh->btkgh", weights, v).reshape(q.shape), log_sums)


def backward(scale, q, k, v, lengths, result, gradient, window=None):
    """The backward pass of FlashAttention-2 (arXiv 2307.08691, section 3.1.2), from a result and its log-sum-exp."""
    weights, _ = probabilities(scale, q, k, lengths, window, result.log_sums)
    grouped = (*q.shape[:2], k.shape[2], -1, q.shape[3])
    d_out, out, q = (x.reshape(grouped) for x in (gradient, result.mixed, q))
    d_weights = jnp.einsum("btkgh,bskh->bkgts", d_out, v)
    d_scores = weights * (d_weights - (d_out * out).sum(axis=-1).transpose(0, 2, 3, 1)[..., None]) * scale
    dq = jnp.einsum("bkgts,bskh->btkgh", d_scores, k).reshape(gradient.shape)
    return dq, jnp.einsum("bkgts,btkgh->bskh", d_scores, q), jnp.einsum("bkgts,btkgh->bskh", weights, d_out)


@pytest.fixture
def by_formula(monkeypatch):
    monkeypatch.setattr(prefix_module, "_kernel_forward", forward)
    monkeypatch.setattr(prefix_module, "_kernel_backward", backward)
    monkeypatch.setattr(probe_module, "layer_kernels", lambda *_, **__: {Scores(0.25): Choice("cudnn")})


def test_values_and_gradients_are_those_of_one_softmax(by_formula):
    """Prefixes are whole, in part padding, or empty."""
    leak = jax.jit(partial(prefix_leak, Scores(0.25), (4, 2, 16), jnp.float32))()
    assert leak < 1e-5


def test_a_device_that_computes_something_else_shares_no_prefix(by_formula, monkeypatch, caplog):
    def without_rest(scale, q, k, v, lengths, result, gradient):
        own = forward(scale, q, k, v, lengths)  # not the joined result
        return backward(scale, q, k, v, lengths, own, gradient)

    monkeypatch.setattr(prefix_module, "_kernel_backward", without_rest)
    assert not can_share_prefixes(SMALL, jnp.float32, None)
    assert "shared prefix" in caplog.text


def test_windows_are_not_joined():
    assert takes_prefix("cudnn", Scores(1.0)) and not takes_prefix("cudnn", Scores(1.0, window=9))
    assert not takes_prefix("splash", Scores(1.0)) and not takes_prefix("xla", Scores(1.0))


@pytest.mark.parametrize("kernel", ["cudnn", "splash"])
def test_sinks_are_joined_to_the_softmax_of_a_kernel(by_formula, kernel):
    """Values and gradients are those of the reference, for cuDNN by its formula, for splash interpreted."""
    rng, scores = np.random.default_rng(0), Scores(0.25, 30, None, True)
    q, k, v, gradient = (rng.normal(size=(2, 149, heads, 16)).astype(np.float32) for heads in (4, 2, 2, 4))
    sinks, places = np.array([-9, 0, 1, 9], np.float32), jnp.arange(149)
    visible = visible_keys(places[None], places, 30)

    def reference(sinks, q, k, v):
        return attend(q, HeadRows(k.transpose(0, 2, 3, 1), v.transpose(0, 2, 1, 3)), visible, scores, sinks)

    def joined(sinks, q, k, v):
        return row_attention(q, k, v, kernel=kernel, scores=scores, sinks=sinks)

    @partial(jax.jit, static_argnums=0)
    def with_gradients(attention, *arrays):
        mixed, pull = jax.vjp(attention, *arrays)
        return mixed, *pull(gradient)

    expected, found = (with_gradients(each, sinks, q, k, v) for each in (reference, joined))
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize(("heads", "head_dim"), [((16, 8), 128), ((8, 8), 64)])
def test_the_kernels_of_the_device_are_joined(heads, head_dim):
    leak = jax.jit(partial(prefix_leak, Scores(head_dim**-0.5), (*heads, head_dim), jnp.bfloat16))()
    assert np.asarray(leak) < 0.1


ON_A_MESH = """
import jax
import numpy as np
from jaxft.core.objectives import score_batch
from jaxft.core.packing import Branches, Family, pack, plan_branches, segments
from jaxft.core.sharding import make_mesh
from jaxft.core.types import Batch
from jaxft.models.config import PRESETS
from jaxft.models.decoder import decoder
from jaxft.models.decoder_sharding import sharding_for
from tests.models.weights import random_params

config, draw = PRESETS["qwen3-50k"], np.random.default_rng(0)
sequences = [[3 + i // 2] * 9 + draw.integers(10, 20, 5).tolist() for i in range(16)]
families = [Family([i, i + 1], 9) for i in range(0, 16, 2)]
packing = plan_branches(families, [14] * 16, Branches(16, 2), 8)
ids, positions = segments(packing)
mask = pack(packing, [[False] * 9 + [True] * 5] * 16, bool)
tokens = pack(packing, sequences, np.int32)
batch = Batch(tokens, mask, positions=positions, segment_ids=ids, branches=packing.branches)

def gradients(model):
    return jax.jit(jax.grad(lambda params: score_batch(model, params, batch).logprobs.mean()))(random_params(config))

alone = gradients(decoder(config))
for sizes in ((2, 2, 2), (1, 4, 2)):
    spread = gradients(decoder(config, sharding=sharding_for(config, make_mesh(*sizes))))
    for one, other in zip(jax.tree.leaves(alone), jax.tree.leaves(spread), strict=True):
        np.testing.assert_allclose(np.asarray(other), np.asarray(one), rtol=0, atol=1e-5 * np.abs(one).max())
"""


@pytest.mark.slow
def test_rows_of_a_mesh_share_prefixes():
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8"
    subprocess.run([sys.executable, "-c", ON_A_MESH], env=os.environ | {"XLA_FLAGS": flags}, check=True)
