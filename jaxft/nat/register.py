"""Registers jaxft's components with the toolkit, which imports this module by its entry point `nat.components`.

The components themselves are imported when the toolkit makes them: every `nat` command imports this module.
"""

from collections.abc import AsyncIterator
from functools import partial
from typing import Any

from nat.builder.framework_enum import LLMFrameworkEnum
from nat.builder.llm import LLMProviderInfo
from nat.cli.register_workflow import (
    register_llm_client,
    register_llm_provider,
    register_trainer,
    register_trainer_adapter,
    register_trajectory_builder,
)

from jaxft.nat.configs import AdapterConfig, BuilderConfig, DPOConfig, GRPOConfig, PolicyConfig


@register_llm_provider(config_type=PolicyConfig)
async def jaxft_policy(config: Any, builder: Any) -> AsyncIterator[LLMProviderInfo]:
    """Yield the description of a policy that samples and is trained in this process."""
    yield LLMProviderInfo(config=config, description="A policy of jaxft, which samples and is trained in this process.")


@register_llm_client(config_type=PolicyConfig, wrapper_type=LLMFrameworkEnum.LANGCHAIN)
async def jaxft_policy_langchain(config: Any, builder: Any) -> AsyncIterator[Any]:
    """Yield LangChain's chat model of a policy. It is light, and leaves the policy open."""
    from jaxft.nat.chat_model import PolicyChatModel
    from jaxft.nat.run import find_policy

    names = ("temperature", "top_p", "top_k", "max_tokens", "chat_template_kwargs")
    defaults = {name: dict(config)[name] for name in names}
    yield PolicyChatModel(model_name=config.model_name, find_policy=partial(find_policy, config), defaults=defaults)


@register_trajectory_builder(config_type=BuilderConfig)
async def jaxft_trajectory_builder(config: Any, builder: Any) -> AsyncIterator[Any]:
    """Yield the builder that makes a group of episodes of each example."""
    from jaxft.nat.parts import JaxftTrajectoryBuilder

    yield JaxftTrajectoryBuilder(config)


@register_trainer(config_type=GRPOConfig)
async def jaxft_trainer(config: Any, builder: Any) -> AsyncIterator[Any]:
    """Yield the trainer of groups of episodes."""
    from jaxft.nat.parts import JaxftTrainer

    yield JaxftTrainer(config)


@register_trainer(config_type=DPOConfig)
async def jaxft_dpo_trainer(config: Any, builder: Any) -> AsyncIterator[Any]:
    """Yield the trainer of preference pairs."""
    from jaxft.nat.parts import JaxftTrainer

    yield JaxftTrainer(config)


@register_trainer_adapter(config_type=AdapterConfig)
async def jaxft_trainer_adapter(config: Any, builder: Any) -> AsyncIterator[Any]:
    """Yield the adapter that trains a policy in this process."""
    from jaxft.nat.parts import JaxftTrainerAdapter

    yield JaxftTrainerAdapter(config)
