"""The learner of an adapter, made of its configuration."""

from typing import TYPE_CHECKING, Any

from jaxft.harness.errors import ComponentError

if TYPE_CHECKING:
    from jaxft.components.learner import Learner
    from jaxft.components.local_adapter import LocalTrainerAdapterConfig
    from jaxft.policy.policy import Policy


def make_learner(config: "LocalTrainerAdapterConfig", policy: "Policy", seed: int) -> "Learner":
    """The learner; a reference of its own is loaded here, before anything is trained.

    Raises:
        ComponentError: the reference is of another model than the policy.
    """
    from jaxft.components.learner import Learner

    own_reference = config.loss.needs_reference and config.loss.reference.path is not None
    return Learner(
        policy.model,
        config.loss,
        config.optimizer,
        microbatch_tokens=config.microbatch_tokens,
        minibatches=config.minibatches,
        updates_per_batch=config.updates_per_batch,
        packing=config.packing,
        max_sampler_diff=config.max_logprob_diff,
        max_disagreeing_share=config.max_disagreeing_share,
        seed=seed,
        ref_params=load_reference(config, policy) if own_reference else None,
    )


def load_reference(config: "LocalTrainerAdapterConfig", policy: "Policy") -> Any:
    """The parameters of the checkpoint that the KL is measured from; of a policy with adapters with fresh ones, which
    change nothing."""
    import jax

    from jaxft.core.frozen import ADAPTER, BASE
    from jaxft.models.config import DecoderConfig
    from jaxft.models.hf import load_model
    from jaxft.models.lora import init_adapter

    path = config.loss.reference.path
    assert path is not None
    layout = policy.model.layout
    mesh: Any = None if layout is None else layout.mesh
    reference, params = load_model(path, mesh=mesh)
    own, other = policy.model.config, reference.config
    assert isinstance(other, DecoderConfig)
    if not isinstance(own, DecoderConfig) or own.architecture != other.architecture:
        raise ComponentError(f"loss.reference.path: {path} holds {other}; the policy is {own}")
    if policy.model.lora is None:
        return params
    if config.loss.reference.update_every is not None:
        raise ComponentError(
            "loss.reference: with adapters, a reference of its own (path) has another base and cannot follow the "
            "policy; leave out update_every or path"
        )
    return {BASE: params, ADAPTER: init_adapter(policy.model, jax.random.key(0))}
