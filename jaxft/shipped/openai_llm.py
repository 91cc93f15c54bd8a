"""`_type: openai`: a model on a server, whose calls are recorded but never trained."""

from collections.abc import AsyncIterator
from typing import Any

from jaxft.errors import ComponentError
from jaxft.shipped.configs import OpenAILLMConfig


async def openai_llm(config: OpenAILLMConfig, builder: Any) -> AsyncIterator[Any]:
    """Yield the `RemoteClient` of a model.

    Raises:
        ComponentError: the package openai is not installed, or there is no key.
    """
    name = next(name for name, llm in builder.config.llms.items() if llm is config)
    # openai is an extra: imported here, so that who lacks it reads what to install.
    try:
        import openai

        from jaxft.rollout.remote import RemoteClient
    except ImportError as error:
        raise ComponentError(
            f'llms.{name} (openai): needs the package openai ({error}): pip install "jaxft[openai]"'
        ) from None

    try:
        client = RemoteClient(
            config.model,
            name,
            base_url=config.base_url,
            api_key=None if config.api_key is None else config.api_key.get_secret_value(),
            max_retries=config.max_retries,
            timeout_seconds=config.timeout_seconds,
        )
    except openai.OpenAIError:
        raise ComponentError(
            f"llms.{name} (openai): there is no key: set llms.{name}.api_key or the environment variable "
            "OPENAI_API_KEY; a server without keys takes any text"
        ) from None
    yield client
    await client.close()
