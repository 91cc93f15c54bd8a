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
        self._last: float | None = None
        self._without_gain = 0
        self._is_fresh = True  # no reward yet
        self.is_target_reached = False

    def state(self) -> dict[str, Any]:
        """For JSON."""
        return {"best": self._best, "without_gain": self._without_gain, "last": self._last, "is_fresh": self._is_fresh}

    def restore(self, state: dict[str, Any]) -> None:
        """Goes on from a `state`."""
        self._best, self._without_gain = state["best"], state["without_gain"]
        self._last, self._is_fresh = state["last"], state["is_fresh"]

    def reason(self, reward: float | None) -> str | None:
        """Why the run ends after this reward, in words; None when it goes on. A reward of None (nothing usable) is no
        gain."""
        self._last, self._is_fresh = reward, False
        if reward is not None and (self._best is None or reward > self._best + self._config.min_gain):
            self._best, self._without_gain = reward, 0
        else:
            self._without_gain += 1
        return self.verdict()

    def verdict(self) -> str | None:
        """The same for the last reward, when it has been heard already."""
        target, patience, gain = self._config.target_reward, self._config.patience, self._config.min_gain
        if self._is_fresh:
            return None
        self.is_target_reached = self._last is not None and target is not None and self._last >= target
        if self.is_target_reached:
            return f"the mean reward {self._last:.4g} has reached {target:g}"
        if patience is not None and self._without_gain >= patience:
            best = "nothing" if self._best is None else f"{self._best:.4g}"
            return f"the mean reward has not risen by more than {gain:g} above {best} for {patience} times"
        return None
