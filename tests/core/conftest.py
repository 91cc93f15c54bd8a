"""Models small enough to compute by hand, and one real decoder, shared by the tests of the core."""

import jax
import numpy as np
import pytest

from jaxft.core.types import Model
from jaxft.models.config import model_preset
from jaxft.models.decoder import decoder

VOCABULARY = 48


def make_bigram() -> Model:
    """Logits depend on the token before alone: `params["embedding"][token] @ params["head"]`."""

    def init(key):
        return {
            "embedding": jax.random.normal(key, (5, 3)),
            "head": jax.random.normal(jax.random.fold_in(key, 1), (3, 5)),
        }

    def apply(params, tokens, positions, cache=None, tables=None, segment_ids=None):
        return params["embedding"][tokens], cache

    def unembed(params, hidden):
        return hidden @ params["head"]

    def init_cache(pages, dtype):
        return {}

    return Model("bigram", init, apply, unembed, init_cache)


BIGRAM = make_bigram()


@pytest.fixture(scope="session")
def bigram():
    """A model of two matrices; its parameters may have any sizes."""
    return BIGRAM


@pytest.fixture(scope="session")
def tiny():
    """A decoder and its weights, with logits that have a standard deviation of about 1."""
    model = decoder(model_preset("qwen3-50k", vocab_size=VOCABULARY))
    params = jax.jit(model.init)(jax.random.key(0))
    embedding = np.asarray(params["embed"])
    params["embed"] = jax.device_put(embedding / embedding.std() * np.float32(model.config.hidden_size**-0.5))
    return model, params
