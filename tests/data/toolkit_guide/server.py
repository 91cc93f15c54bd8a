"""A stand-in for a training server: it learns which answers to a prompt were rewarded."""

import asyncio


class TrainingServer:
    def __init__(self, learning_rate: float):
        self.learning_rate = learning_rate
        self.worth: dict[str, float] = {}
        self.num_tokens = 0

    async def train(self, groups: list[dict]) -> None:
        """Groups of one prompt each: `{"messages", "choices": [{"content", "logprobs"}], "reward"}` per trajectory."""
        for group in groups:
            await asyncio.sleep(0)
            baseline = sum(trajectory["reward"] for trajectory in group) / len(group)
            for trajectory in group:
                for choice in trajectory["choices"]:
                    self.num_tokens += len(choice["logprobs"]["content"])
                    advantage = trajectory["reward"] - baseline
                    known = self.worth.get(choice["content"], 0.0)
                    self.worth[choice["content"]] = known + self.learning_rate * advantage
