"""Weights that a policy is compared with and that are never trained: the reference of the KL, and a teacher."""

from typing import Any

from jaxft.components.configs import LocalTrainerAdapterConfig
from jaxft.errors import ComponentError
from jaxft.models.config import DecoderConfig
from jaxft.models.hf_config import accepted_keys
from jaxft.models.load import load_model
from jaxft.models.quantized import is_quantized
from jaxft.rollout.client import ChatClient
from jaxft.rollout.policy import Policy
from jaxft.rollout.weights import Weights


def load_reference(config: LocalTrainerAdapterConfig, policy: Policy) -> Weights:
    """Load the weights of the reference policy of the KL from its checkpoint.

    If the policy has adapters, the reference gets fresh ones, which have no effect.

    Raises:
        ComponentError: the checkpoint has another model than the policy, or should follow a policy with adapters.
    """
    path, own = config.loss.reference.path, policy.model.config
    lora: Any = policy.model.lora
    assert path is not None
    if lora is not None and config.loss.reference.update_every is not None:
        raise ComponentError(
            "loss.reference: with adapters, a reference of its own (path) has another base and cannot follow the "
            "policy; leave out update_every or path"
        )
    if not isinstance(own, DecoderConfig):
        raise ComponentError(f"loss.reference.path: {path} holds a decoder; the policy is {own}")
    options: dict[str, Any] = {"context_tokens": policy.engine.max_context_tokens, "ignored_keys": accepted_keys(own)}
    options |= {
        "dtype": "int8" if is_quantized(policy.weights.trained) else policy.dtype,
        "compute_dtype": policy.dtype,
    }
    reference, params = load_model(path, lora=lora, mesh=policy_mesh(policy), **options)
    other = reference.config
    assert isinstance(other, DecoderConfig)
    if own.architecture != other.architecture:
        raise ComponentError(f"loss.reference.path: {path} holds {other}; the policy is {own}")
    return Weights(policy.model, params)


async def load_teacher(name: str, policy: Policy, builder: Any) -> Weights:
    """Return the weights of the teacher of this name, another `local_policy` of `llms`.

    Raises:
        ComponentError: it is no policy of its own in this process, it has another tokenizer, another mesh or shorter
            contexts than the policy.
    """
    llm = await builder.get_llm(name)
    if not isinstance(llm, ChatClient):
        raise _unfit(name, f"a {type(llm).__name__} gives no probabilities of given tokens: name a local_policy")
    teacher = llm.policy
    if teacher is policy:
        raise _unfit(name, "it is the policy that is trained, which cannot teach itself")
    if not isinstance(teacher, Policy):
        raise _unfit(name, "a snapshot changes while it teaches: name a local_policy of its own")
    own, other = policy.tokenizer.get_vocab(), teacher.tokenizer.get_vocab()
    if own != other:
        differing = sorted(token for token in own.keys() | other.keys() if own.get(token) != other.get(token))
        raise _unfit(
            name,
            f"its tokenizer is another than the policy's: {len(differing)} tokens have other ids or are only in one of "
            f"both, such as {differing[0]!r}; the token ids that the policy samples would mean something else to it",
        )
    if policy_mesh(teacher) != policy_mesh(policy):
        raise _unfit(name, "its mesh is another than the policy's: give both the same llms.<name>.mesh")
    has, needs = teacher.engine.max_context_tokens, policy.engine.max_context_tokens
    if has < needs:
        raise _unfit(name, f"its max_context_tokens is {has}, and the policy's {needs}: give it as many")
    return Weights(teacher.model, await teacher.read(lambda params: params))


def policy_mesh(policy: Policy) -> Any:
    """Return the mesh of a policy's parameters; None on a single device."""
    return None if policy.model.sharding is None else policy.model.sharding.mesh


def _unfit(name: str, why: str) -> ComponentError:
    return ComponentError(f"loss.distillation.teacher: llms.{name} cannot teach: {why}")
