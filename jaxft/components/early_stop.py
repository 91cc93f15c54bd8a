"""When a run has learned what it can: a target is reached, or the reward stays on a plateau."""

from typing import Any

from pydantic import Field

from jaxft.harness.fields import ConfigModel


class EarlyStopConfig(ConfigModel):
    """What ends a run before its last epoch: of the validation reward when there is validation, else of the training
    reward."""

    target_reward: float | None = Field(
        default=None, allow_inf_nan=False, description="The run ends when the mean reward reaches it."
    )
    patience: int | None = Field(
        default=None, ge=1, description="The run ends after so many rewards in a row without a gain."
    )
    min_gain: float = Field(default=0.0, ge=0.0, allow_inf_nan=False, description="What counts as a gain is more.")


class EarlyStop:
    """Watches the rewards of one run.

    Attributes:
        is_target_reached: whether the last reason was the target, and not a plateau.

    >>> stop = EarlyStop(EarlyStopConfig(patience=2, min_gain=0.01))
    >>> [stop.reason(reward) for reward in (0.1, 0.5, 0.505)]
    [None, None, None]
    >>> stop.reason(0.5)
    'the mean reward has not risen by more than 0.01 above 0.5 for 2 times'
    """

    def __init__(self, config: EarlyStopConfig) -> None:
        self._config = config
        self._best: float | None = None
        self._without_gain = 0
        self.is_target_reached = False

    def state(self) -> dict[str, Any]:
        """For JSON."""
        return {"best": self._best, "without_gain": self._without_gain, "is_target_reached": self.is_target_reached}

    def restore(self, state: dict[str, Any]) -> None:
        """Goes on from a `state`."""
        self._best, self._without_gain = state["best"], state["without_gain"]
        self.is_target_reached = state["is_target_reached"]

    def reason(self, reward: float | None) -> str | None:
        """Why the run ends after this reward, in words; None when it goes on. A reward of None (nothing usable) is no
        gain."""
        target, patience, gain = self._config.target_reward, self._config.patience, self._config.min_gain
        if reward is not None and target is not None and reward >= target:
            self.is_target_reached = True
            return f"the mean reward {reward:.4g} has reached {target:g}"
        if reward is not None and (self._best is None or reward > self._best + gain):
            self._best, self._without_gain = reward, 0
        else:
            self._without_gain += 1
        if patience is not None and self._without_gain >= patience:
            best = "nothing" if self._best is None else f"{self._best:.4g}"
            return f"the mean reward has not risen by more than {gain:g} above {best} for {patience} times"
        return None
