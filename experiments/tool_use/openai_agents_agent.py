"""The agent with openai-agents, OpenAI's Agents SDK."""

from agents import Agent, RunContextWrapper, Runner, function_tool

import jaxft


@function_tool
def get(context: RunContextWrapper[dict[str, int]], key: str) -> str:
    """Look up a fact."""
    return str(context.context.get(key, "unknown"))


class OpenAIAgentsAgentConfig(jaxft.WorkflowConfig, name="tool_use_openai_agents"):
    llm: jaxft.LLMRef


@jaxft.register_workflow(config_type=OpenAIAgentsAgentConfig)
async def openai_agents_agent(config, builder):
    model = await builder.get_llm(config.llm, wrapper_type="openai_agents")
    agent = Agent(name="facts", model=model, tools=[get])

    async def answer(row):
        result = await Runner.run(agent, row["question"], context=row["facts"])
        return result.final_output

    yield answer
