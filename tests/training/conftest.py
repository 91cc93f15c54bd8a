"""Groups of trajectories whose sequences have two turns."""

import pytest

from jaxft.harness.data_models import Trajectory


@pytest.fixture
def make_group(make_sequence):
    def make(*rewards, **fields):
        return [
            Trajectory(
                episode=[],
                reward=reward or 0.0,
                scorable=reward is not None,
                generation=place,
                sequences=[make_sequence(place, turns=[-1, -1, 0, 0, 1, 1])],
                **{name: values[place] for name, values in fields.items()},
            )
            for place, reward in enumerate(rewards)
        ]

    return make
