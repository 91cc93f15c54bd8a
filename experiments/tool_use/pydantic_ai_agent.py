"""The agent with pydantic-ai."""

from pydantic_ai import Agent, RunContext

import jaxft


class PydanticAIAgentConfig(jaxft.WorkflowConfig, name="tool_use_pydantic_ai"):
    llm: jaxft.LLMRef


@jaxft.register_workflow(config_type=PydanticAIAgentConfig)
async def pydantic_ai_agent(config, builder):
    model = await builder.get_llm(config.llm, wrapper_type="pydantic_ai")
    agent = Agent(model, deps_type=dict[str, int])

    @agent.tool
    def get(context: RunContext[dict[str, int]], key: str) -> str:
        """Look up a fact."""
        return str(context.deps.get(key, "unknown"))

    async def answer(row):
        result = await agent.run(row["question"], deps=row["facts"])
        return result.output

    yield answer
