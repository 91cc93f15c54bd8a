"""The agent with LangChain."""

from langchain.agents import create_agent
from langchain.tools import ToolRuntime, tool

import jaxft


@tool
def get(key: str, runtime: ToolRuntime[dict[str, int]]) -> str:
    """Look up a fact."""
    return str(runtime.context.get(key, "unknown"))


class LangChainAgentConfig(jaxft.WorkflowConfig, name="tool_use_langchain"):
    llm: jaxft.LLMRef


@jaxft.register_workflow(config_type=LangChainAgentConfig)
async def langchain_agent(config, builder):
    model = await builder.get_llm(config.llm, wrapper_type="langchain")
    agent = create_agent(model, tools=[get], context_schema=dict[str, int])

    async def answer(row):
        messages = [{"role": "user", "content": row["question"]}]
        state = await agent.ainvoke({"messages": messages}, context=row["facts"])
        return state["messages"][-1].content

    yield answer
