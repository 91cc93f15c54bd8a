"""Functions of the toolkit that the tests run: with a secret, made anew for each user, and as a chain of LangChain."""

from langchain_core.runnables import RunnableLambda
from nat.builder.framework_enum import LLMFrameworkEnum
from nat.builder.function_info import FunctionInfo
from nat.cli.register_workflow import register_function, register_per_user_function
from nat.data_models.common import SerializableSecretStr
from nat.data_models.component_ref import LLMRef
from nat.data_models.function import FunctionBaseConfig


class VaultConfig(FunctionBaseConfig, name="vault"):
    code: SerializableSecretStr


@register_function(config_type=VaultConfig)
async def vault(config, builder):
    async def look(question: str) -> str:
        return question

    yield FunctionInfo.from_fn(look, description="Looks.")


class PerUserEchoConfig(FunctionBaseConfig, name="per_user_echo"):
    llm: LLMRef


@register_per_user_function(config_type=PerUserEchoConfig, input_type=str, single_output_type=str)
async def per_user_echo(config, builder):
    llm = await builder.get_llm(config.llm, wrapper_type=LLMFrameworkEnum.LANGCHAIN)

    async def ask(question: str) -> str:
        return (await llm.ainvoke(question)).content

    yield FunctionInfo.from_fn(ask, description="Asks once.")


class ChainConfig(FunctionBaseConfig, name="chain"):
    llm: LLMRef


@register_function(config_type=ChainConfig, framework_wrappers=[LLMFrameworkEnum.LANGCHAIN])
async def chain(config, builder):
    llm = await builder.get_llm(config.llm, wrapper_type=LLMFrameworkEnum.LANGCHAIN)
    asked = RunnableLambda(str.lower) | llm | (lambda answer: answer.content)

    async def ask(question: str) -> str:
        return await asked.ainvoke(question)

    yield FunctionInfo.from_fn(ask, description="Asks once.")
