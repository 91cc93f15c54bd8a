"""`_type: deep_agent`: an agent of Deep Agents in the process of the run, without NeMo Fabric."""

from deepagents import create_deep_agent

import jaxft


class DeepAgentConfig(jaxft.WorkflowConfig, name="deep_agent"):
    """The agent."""

    llm: jaxft.LLMRef


@jaxft.register_workflow(config_type=DeepAgentConfig)
async def deep_agent(config, builder):
    model = await builder.get_llm(config.llm, wrapper_type="langchain")
    model.max_tokens = 8
    agent = create_deep_agent(model=model, tools=[], system_prompt="Answer in digits.")

    async def answer(example):
        state = await agent.ainvoke({"messages": [{"role": "user", "content": example["question"]}]})
        return state["messages"][-1].text

    yield answer
