"""Messages and tools of a conversation in OpenAI's format."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class ToolCall:
    """A call of a tool, as the model wrote it.

    Attributes:
        id: name of the call, which the result refers to.
        name: name of the function.
        arguments: a JSON object, as text.
    """

    id: str
    name: str
    arguments: str

    def as_message(self) -> dict[str, Any]:
        """Return the call as an entry of a message's `tool_calls`."""
        return {"id": self.id, "type": "function", "function": {"name": self.name, "arguments": self.arguments}}
