"""Registers jaxft's components with the toolkit, which imports this module by its entry point `nat.components`.

The components themselves are imported when the toolkit makes them: every `nat` command imports this module.
"""

import pkgutil
from collections.abc import AsyncIterator, Callable
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
    yield pkgutil.resolve_name("jaxft.nat.run:chat_model")(config)


def _part(name: str) -> Callable[[Any, Any], AsyncIterator[Any]]:
    """Return the factory of a class of `jaxft.nat.parts`."""

    async def make(config: Any, builder: Any) -> AsyncIterator[Any]:
        yield pkgutil.resolve_name(f"jaxft.nat.parts:{name}")(config)

    return make


register_trajectory_builder(config_type=BuilderConfig)(_part("JaxftTrajectoryBuilder"))
register_trainer_adapter(config_type=AdapterConfig)(_part("JaxftTrainerAdapter"))
register_trainer(config_type=GRPOConfig)(_part("JaxftTrainer"))
register_trainer(config_type=DPOConfig)(_part("JaxftTrainer"))
