"""The peak over the phases of a run."""

import pytest

from jaxft.training.memory import peak, phases

HELD = {"parameters": 4.0, "optimizer": 8.0, "reference": 0.0, "sampling": 3.0}


@pytest.mark.parametrize(
    ("update", "temporaries", "wanted"), [(9.0, 1.0, 15.0 + 4.0 + 9.0), (1.0, 9.0, 15.0 + 2.0 + 9.0)]
)
def test_update_and_rollout_take_turns(update, temporaries, wanted):
    memory = HELD | {"gradients": 4.0, "update": update, "sampling weights": 2.0, "sampling temporaries": temporaries}
    assert peak(memory) == wanted
    assert sum(map(sum, phases(memory).values())) == sum(memory.values()) + sum(HELD.values())
