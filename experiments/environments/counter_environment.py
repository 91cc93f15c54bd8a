"""A class in the form of TRL's `environment_factory`; nothing here knows of jaxft."""


class CounterEnvironment:
    """A counter that the policy has to bring to a target."""

    def reset(self, target: int, **row: object) -> str:
        self.target, self.count = target, 0
        return f"{target}."

    def increment(self, step: int) -> str:
        """
        Increment the counter.

        Args:
            step: Number to add.

        Returns:
            The new count.
        """
        self.count += step
        return str(self.count)

    def get_reward(self) -> float:
        return 1.0 if self.count == self.target else 0.0
