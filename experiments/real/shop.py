"""An agent with one tool, in openai's client as one writes it for a model on a server: it looks up a price."""

import json
import random
from collections.abc import AsyncIterator
from typing import Any, Literal

from pydantic import Field

import jaxft

TOOL = {
    "type": "function",
    "function": {
        "name": "price",
        "description": "Look up what an item costs.",
        "parameters": {"type": "object", "properties": {"item": {"type": "string"}}, "required": ["item"]},
    },
}
COLOURS = ("red", "blue", "green", "black", "white", "yellow")
THINGS = (
    "lamp", "chair", "table", "shirt", "hat", "bag", "cup", "bike", "boat", "car", "clock", "book", "phone", "door",
    "coat", "shoe", "ball", "box", "pen", "desk", "bed", "bell", "ring", "knife", "spoon", "plate", "glass", "kite",
)  # fmt: skip
QUESTIONS = ("What does the {} cost?", "How much is the {}?", "What is the price of the {}?")
CALL = {"id": "0", "type": "function", "function": {"name": "price", "arguments": '{"item": "grey sofa"}'}}
EXAMPLE = (
    {"role": "system", "content": "You sell things. Look up each price with the tool."},
    {"role": "user", "content": "How much is the grey sofa?"},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "0", "content": "41"},
    {"role": "assistant", "content": "The grey sofa costs 41."},
)
"""The beginning of each conversation: without an example the model of 135 million parameters never calls the tool."""


class ShopConfig(jaxft.DatasetConfig, name="shop"):
    """Questions for prices."""

    split: Literal["train", "held_out"] = Field(default="train", description="Which items are asked for.")
    count: int = Field(default=400, ge=1, description="Number of questions.")


@jaxft.register_dataset_loader(config_type=ShopConfig)
async def shop(config: ShopConfig, builder: Any) -> AsyncIterator[list[jaxft.EvalInputItem]]:
    """The questions as examples: of the things one in four is asked for in held-out questions only."""
    draw = random.Random(config.split)
    things = [thing for index, thing in enumerate(THINGS) if (index % 4 == 0) == (config.split == "held_out")]
    items = []
    for index in range(config.count):
        item, price = f"{draw.choice(COLOURS)} {draw.choice(things)}", str(draw.randint(2, 99))
        question = draw.choice(QUESTIONS).format(item)
        row = {"question": question, "item": item, "price": price}
        items.append(
            jaxft.EvalInputItem(
                id=f"{config.split}-{index}", input_obj=question, expected_output_obj=price, full_dataset_entry=row
            )
        )
    yield items


class ClerkConfig(jaxft.WorkflowConfig, name="clerk"):
    """The agent."""

    llm: jaxft.LLMRef = Field(description="Entry of llms that answers.")


@jaxft.register_workflow(config_type=ClerkConfig)
async def clerk(config: ClerkConfig, builder: Any) -> AsyncIterator[Any]:
    """Asks the model, looks up what it asks for, and returns its answer with the items that were looked up."""
    client = await builder.get_llm(config.llm, wrapper_type="openai")

    async def serve(row: dict[str, Any]) -> dict[str, Any]:
        messages: list[Any] = [*EXAMPLE, {"role": "user", "content": row["question"]}]
        asked: list[str] = []
        while True:
            completion = await client.chat.completions.create(
                model=config.llm, messages=messages, tools=[TOOL], max_tokens=32, temperature=0.7
            )
            message = completion.choices[0].message
            messages.append(message)
            if not message.tool_calls or asked:
                return {"answer": message.content or "", "asked": asked}
            for call in message.tool_calls:
                item = json.loads(call.function.arguments).get("item")
                asked.append(item)
                result = row["price"] if item == row["item"] else "no such item"
                messages.append({"role": "tool", "tool_call_id": call.id, "content": result})

    yield serve


class ServedConfig(jaxft.EvaluatorConfig, name="served"):
    """Rewards of an episode: `answer` if the price is said, and of steps towards it `call` and `item`."""


@jaxft.register_evaluator(config_type=ServedConfig)
async def served(config: ServedConfig, builder: Any) -> AsyncIterator[Any]:
    """Three named rewards."""

    def score(item: jaxft.EvalInputItem) -> dict[str, float]:
        row, episode = item.full_dataset_entry, item.output_obj
        return {
            "call": 0.1 * bool(episode["asked"]),
            "item": 0.2 * (row["item"] in episode["asked"]),
            "answer": float(row["item"] in episode["asked"] and row["price"] in episode["answer"]),
        }

    yield score
