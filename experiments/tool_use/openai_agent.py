"""The agent with openai's own client: a loop that answers tool calls until the model answers in text."""

import json

import jaxft

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get",
            "description": "Look up a fact.",
            "parameters": {"type": "object", "properties": {"key": {"type": "string"}}, "required": ["key"]},
        },
    }
]


class OpenAIAgentConfig(jaxft.WorkflowConfig, name="tool_use_openai"):
    llm: jaxft.LLMRef


@jaxft.register_workflow(config_type=OpenAIAgentConfig)
async def openai_agent(config, builder):
    client = await builder.get_llm(config.llm, wrapper_type="openai")

    async def answer(row):
        messages = [{"role": "user", "content": row["question"]}]
        while True:
            completion = await client.chat.completions.create(model=config.llm, messages=messages, tools=TOOLS)
            message = completion.choices[0].message
            messages.append(message)
            if not message.tool_calls:
                return message.content
            for call in message.tool_calls:
                arguments = json.loads(call.function.arguments)
                result = str(row["facts"].get(arguments["key"], "unknown"))
                messages.append({"role": "tool", "tool_call_id": call.id, "content": result})

    yield answer
