from collections import Counter

import pytest

from jaxft.components.example_order import ExampleOrder
from jaxft.errors import ConfigError


@pytest.mark.parametrize("count", [1, 3, 4, 5, 6, 9, 10])
def test_every_pass_has_each_example_once(count):
    ids = [f"example {number}" for number in range(11)]
    order = ExampleOrder({None: ids}, {None: 1.0}, count, seed=5)
    epochs = [order.examples(epoch) for epoch in range(44)]
    assert all(len(set(epoch)) == count for epoch in epochs)
    flat = [name for epoch in epochs for name in epoch]
    passes = [flat[start : start + 11] for start in range(0, len(flat) - 10, 11)]
    assert len(passes) == 4 * count and all(sorted(each) == sorted(ids) for each in passes)
    assert len({tuple(each) for each in passes}) == len(passes)  # in orders of their own
    resumed = ExampleOrder({None: ids}, {None: 1.0}, count, seed=5)
    assert [resumed.examples(epoch) for epoch in (41, 7)] == [epochs[41], epochs[7]]
    assert order.examples(0) == epochs[0] and order.examples(0) is not epochs[0]  # which is not kept for ever


TASKS = {"a": [f"a{n}" for n in range(40)], "b": [f"b{n}" for n in range(7)], "c": [f"c{n}" for n in range(12)]}
WEIGHTS = {"a": 2.5, "b": 1.0, "c": 0.3}


@pytest.mark.parametrize("count", [1, 2, 5, 8, 13])
def test_tasks_have_their_shares_in_every_epoch_and_over_epochs(count):
    order = ExampleOrder(TASKS, WEIGHTS, count, seed=1)
    epochs, total = [order.examples(epoch) for epoch in range(114)], Counter()
    for number, epoch in enumerate(epochs, 1):
        assert len(epoch) == len(set(epoch)) == count
        own = Counter(name[0] for name in epoch)
        total += own
        for task, weight in WEIGHTS.items():
            share = count * weight / 3.8
            assert share - 1 < own[task] < share + 1
            assert abs(total[task] - number * share) < 1.5
    for task, weight in WEIGHTS.items():  # the shares of 38 epochs are whole, and each pass has each example once
        assert total[task] == pytest.approx(114 * count * weight / 3.8)
        seen = [name for epoch in epochs for name in epoch if name[0] == task]
        size = len(TASKS[task])
        passes = [seen[start : start + size] for start in range(0, len(seen) - size + 1, size)]
        assert all(sorted(each) == sorted(TASKS[task]) for each in passes)
    assert ExampleOrder(TASKS, WEIGHTS, count, seed=1).examples(100) == epochs[100]


def test_an_epoch_has_as_many_examples_as_the_weights_allow():
    assert ExampleOrder({None: TASKS["a"]}, {None: 1.0}, None, seed=0).count == 40
    order = ExampleOrder(TASKS, {"a": 2.0, "b": 1.0, "c": 1.0}, None, seed=0)
    assert order.count == 28 and Counter(name[0] for name in order.examples(0)) == {"a": 14, "b": 7, "c": 7}
    first = order.examples(0)  # spread evenly
    assert {name[0] for name in first[:4]} == {"a", "b", "c"}


def test_a_share_that_a_task_does_not_have_is_refused():
    with pytest.raises(ConfigError, match=r"per_task\.b: .*7 rows.*7\.5 of the 30 .*to 28"):
        ExampleOrder(TASKS, {"a": 2.0, "b": 1.0, "c": 1.0}, 30, seed=0)
    with pytest.raises(ConfigError, match=r"per_task\.z: has 0 rows, .* take it out"):
        ExampleOrder({**TASKS, "z": []}, {**WEIGHTS, "z": 1.0}, None, seed=0)
