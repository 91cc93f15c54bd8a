"""Random parameters of decoders, drawn by numpy, so that nothing is compiled for them."""

import jax
import numpy as np

from jaxft.models.decoder import parameter_shapes


def random_params(config, lora=None, seed=0):
    """Parameters of every kind at random; logits have a standard deviation of about 1, where fresh ones have 0.1."""
    draws = np.random.default_rng(seed)

    def draw(path, leaf):
        name, drawn = path[-1].key, draws.normal(size=leaf.shape)
        if name in ("embed", "lm_head"):
            drawn *= config.hidden_size**-0.5
        elif name in ("kernel", "lora_a"):
            drawn *= leaf.shape[-2] ** -0.5
        else:
            drawn *= 0.1
        return (drawn + (name == "scale" and not config.norm_offset)).astype(np.float32)

    return jax.tree_util.tree_map_with_path(draw, parameter_shapes(config, lora))


def narrowed(params, dtype):
    """The parameters in another dtype, on the host."""
    return jax.tree.map(lambda leaf: np.asarray(leaf).astype(dtype), params)
