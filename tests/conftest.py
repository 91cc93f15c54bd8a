"""One tiny policy at one set of shapes, so that tests share what is compiled; made when it is first asked for."""

import pytest

SLOTS, CONTEXT = 8, 96


@pytest.fixture(scope="session")
def tokenizer():
    """The embedded tokenizer."""
    from jaxft.policy.chat import load_tokenizer

    return load_tokenizer()


@pytest.fixture(scope="session")
def make_policy(tokenizer):
    """Makes a policy of random weights; always the same weights. Closes all of them at the end."""
    import jax

    from jaxft.models.config import preset
    from jaxft.models.hf import init_model
    from jaxft.policy.policy import Policy

    model, params = init_model(preset("qwen3-50k"), jax.random.key(1, impl="threefry2x32"))
    made = []

    def make(**options):
        copied = jax.tree.map(lambda leaf: leaf.copy(), params)
        defaults = {"stop_ids": (tokenizer.eos_token_id,), "slots": SLOTS, "max_context_tokens": CONTEXT}
        made.append(Policy(options.pop("model", model), copied, tokenizer, **(defaults | options)))
        return made[-1]

    yield make
    for policy in made:
        policy.close()


@pytest.fixture(scope="session")
def policy(make_policy):
    """A policy that nobody updates."""
    return make_policy()
