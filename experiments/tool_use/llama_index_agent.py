"""The agent with LlamaIndex."""

from llama_index.core.agent.workflow import FunctionAgent

import jaxft


class LlamaIndexAgentConfig(jaxft.WorkflowConfig, name="tool_use_llama_index"):
    llm: jaxft.LLMRef


@jaxft.register_workflow(config_type=LlamaIndexAgentConfig)
async def llama_index_agent(config, builder):
    llm = await builder.get_llm(config.llm, wrapper_type="llama_index")

    async def answer(row):
        def get(key: str) -> str:
            """Look up a fact."""
            return str(row["facts"].get(key, "unknown"))

        agent = FunctionAgent(tools=[get], llm=llm)
        response = await agent.run(row["question"])
        return str(response)

    yield answer
