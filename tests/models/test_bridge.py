"""A network of the user's own behind the model contract: sampled, scored and trained like the built-in decoder."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx

from jaxft.core.generate import generate
from jaxft.core.logprobs import token_logprobs
from jaxft.core.objectives import sft_loss
from jaxft.core.types import Batch
from jaxft.core.update import init_train_state, make_update
from jaxft.models.bridge import from_function, from_linen, from_nnx

VOCAB, WIDTH, PLACES = 11, 8, 64


def causal_mean(x):
    """The mean of a token and all tokens before it."""
    return jnp.cumsum(x, axis=1) / jnp.arange(1, x.shape[1] + 1)[None, :, None]


class NnxNetwork(nnx.Module):
    def __init__(self, rngs):
        self.embed = nnx.Embed(VOCAB, WIDTH, rngs=rngs)
        self.place = nnx.Embed(PLACES, WIDTH, rngs=rngs)
        self.layers = nnx.List([nnx.Linear(WIDTH, WIDTH, rngs=rngs) for _ in range(2)])
        self.head = nnx.Linear(WIDTH, VOCAB, rngs=rngs)

    def __call__(self, tokens, positions):
        x = self.embed(tokens) * 3 + self.place(positions)
        for layer in self.layers:
            x = x + nnx.gelu(layer(causal_mean(x)))
        return self.head(x)


class LinenNetwork(linen.Module):
    widths: tuple = (WIDTH, WIDTH)

    @linen.compact
    def __call__(self, tokens, positions):
        x = linen.Embed(VOCAB, WIDTH)(tokens) * 3 + linen.Embed(PLACES, WIDTH)(positions)
        for width in self.widths:
            x = x + linen.gelu(linen.Dense(width)(causal_mean(x)))
        return linen.Dense(VOCAB)(x)


def bigram(params, tokens, positions):
    return params["table"][tokens] + params["place"][positions]


def nnx_model():
    return from_nnx(NnxNetwork(nnx.Rngs(0)))


def linen_model():
    start = jnp.zeros((1, 1), jnp.int32)
    return from_linen(LinenNetwork(), LinenNetwork().init(jax.random.key(0), start, start)["params"])


def function_model():
    table, place = (jax.random.normal(jax.random.key(i), (n, VOCAB)) for i, n in enumerate((VOCAB, PLACES)))
    return from_function(bigram), {"table": table, "place": place}


score = jax.jit(token_logprobs, static_argnums=0)


@pytest.mark.parametrize("make", [nnx_model, linen_model])
def test_sampler_and_trainer_agree(make):
    model, params = make()
    prompts = [[3], [1, 2, 3, 4, 5], [0, 0]]
    rollout = generate(
        model, params, prompts, jax.random.key(5), num_generations=4, max_new_tokens=12, temperature=1.3, stop_ids=(9,)
    )
    mask = np.asarray(rollout.completion_mask)
    again = score(model, params, rollout.tokens, temperature=1.3).logprobs
    np.testing.assert_allclose(rollout.sampler_logprobs[mask], again[mask], rtol=0, atol=1e-5)
    assert (np.asarray(rollout.tokens)[mask] == 0).any()
    assert rollout.sampler_logprobs.min() < -2


@pytest.mark.parametrize("make", [nnx_model, linen_model])
def test_updates_lower_the_loss_and_leave_the_module_alone(make):
    model, params = make()
    update = make_update(model, sft_loss, optax.sgd(0.1))
    tokens = jax.random.randint(jax.random.key(1), (4, 10), 0, VOCAB)
    batch = Batch(tokens, jnp.ones_like(tokens, bool).at[:, 0].set(False))
    state, before = update(init_train_state(jax.tree.map(jnp.copy, params), optax.sgd(0.1)), batch)
    _, after = update(state, batch)
    assert after["loss"] < before["loss"]


def test_the_same_network_is_the_same_model():
    assert from_function(bigram) is from_function(bigram)
    assert nnx_model()[0] == nnx_model()[0]
    assert linen_model()[0] == linen_model()[0]
    assert from_linen(LinenNetwork(widths=(WIDTH,)), {})[0] != linen_model()[0]
    assert hash(nnx_model()[0]) == hash(nnx_model()[0])
    assert (nnx_model()[0].config.name, linen_model()[0].config.name) == ("NnxNetwork", "LinenNetwork")


def test_the_network_sees_the_module_it_came_from():
    module = NnxNetwork(nnx.Rngs(0))
    model, params = from_nnx(module)
    tokens = jnp.array([[1, 2, 3]])
    positions = jnp.array([[0, 1, 2]])
    hidden, _ = model.apply(params, tokens, positions)
    np.testing.assert_allclose(model.unembed(params, hidden), module(tokens, positions), rtol=0, atol=1e-6)
    # What is given back when training ends: the arrays go, the module stays.
    jax.tree.map(lambda leaf: leaf.delete(), params)
    assert np.isfinite(module(tokens, positions)).all()

    trained = jax.tree.map(jnp.zeros_like, from_nnx(module)[1])
    state = nnx.state(module, nnx.Param)
    nnx.replace_by_pure_dict(state, trained)
    nnx.update(module, state)
    assert not module(tokens, positions).any()


def test_the_cache_holds_the_tokens():
    """Two rows: two tokens at the start of the first, one on the second page of the other, between garbage."""
    model, params = function_model()
    cache, tables = model.init_cache(5, jnp.bfloat16), np.array([[3, 99], [1, 2]])
    assert (cache.shape, cache.dtype) == ((5, 64), jnp.int32)
    garbage = cache - 7
    tokens, positions = jnp.array([[4, 5, 9], [6, 9, 9]]), jnp.array([[0, 1, -1], [40, -1, -1]])
    hidden, cache = model.apply(params, tokens, positions, cache=garbage, tables=tables)
    np.testing.assert_array_equal(cache, garbage.at[3, :2].set(jnp.array([4, 5])).at[1, 40].set(6))
    expected = bigram(params, tokens, positions)
    np.testing.assert_allclose(hidden[positions >= 0], expected[positions >= 0], rtol=0, atol=1e-6)
    # An idle row writes nothing.
    _, again = model.apply(params, tokens[:, :1], jnp.array([[2], [-1]]), cache=cache, tables=tables)
    np.testing.assert_array_equal(again, cache.at[3, 2].set(4))


def test_a_network_sees_zeros_behind_the_last_token_of_a_row():
    """The contents of reused pages change no logits, and several tokens at once give those of one at a time."""
    seen = []

    def network(params, tokens, positions):
        seen.append((tokens, positions))
        return jax.nn.one_hot(tokens, VOCAB)

    model = from_function(network)
    tables = np.array([[2, 0]])
    tokens, positions = jnp.arange(1, 9)[None], jnp.arange(8)[None]
    _, cache = model.apply({}, tokens, positions, cache=jnp.full((3, 64), 77), tables=tables)
    _, cache = model.apply({}, tokens[:, :1], jnp.array([[8]]), cache=cache, tables=tables)
    for (history, places), held in zip(seen, ([*range(1, 9)], [*range(1, 9), 1]), strict=True):
        assert history[0].tolist() == held + [0] * (128 - len(held))
        assert places[0].tolist() == list(range(128))


def test_logits_of_a_narrow_network_are_widened():
    model, params = function_model()
    narrow = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), params)
    tokens = jnp.zeros((1, 2), jnp.int32)
    hidden, _ = model.apply(narrow, tokens, tokens)
    assert (hidden.dtype, model.unembed(narrow, hidden).dtype) == (jnp.bfloat16, jnp.float32)


def test_linen_can_initialise_and_others_say_that_they_cannot():
    model, params = linen_model()
    fresh = model.init(jax.random.key(0))
    assert jax.tree.all(jax.tree.map(np.array_equal, fresh, params))
    with pytest.raises(ValueError, match="this model has no init; make its parameters where the network was made"):
        nnx_model()[0].init(jax.random.key(0))


def test_what_cannot_be_bridged_is_refused():
    model, params = function_model()
    tokens = jnp.zeros((1, 2), jnp.int32)
    with pytest.raises(ValueError, match="segment_ids were given; a bridged network cannot keep packed"):
        model.apply(params, tokens, tokens, segment_ids=tokens)

    class Dropping(nnx.Module):
        def __init__(self, rngs):
            self.inner = nnx.Dropout(0.1, rngs=rngs)

    with pytest.raises(ValueError, match=r"module holds state besides nnx.Param: inner.rngs.count, inner.rngs.key"):
        from_nnx(Dropping(nnx.Rngs(0)))
    with pytest.raises(ValueError, match=r"pass variables\['params'\] itself"):
        from_linen(LinenNetwork(), {"params": {}})
    with pytest.raises(ValueError, match=r"the LinenNetwork has a field that cannot be hashed; make lists"):
        from_linen(LinenNetwork(widths=partial(np.array, [])()), {})
