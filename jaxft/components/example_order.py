"""Which examples an epoch has: of one task all in turn, of several their shares.

The order depends on the examples, the weights and the seed alone, so that a resumed run goes on with it bit for bit.
"""

import itertools
import math
import random
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from fractions import Fraction
from functools import partial

from jaxft.errors import ConfigError

NUM_KEPT = 8
"""Number of the latest epochs whose examples are kept; those of earlier ones are chosen again if they are asked for."""


class ExampleOrder:
    """The examples of each epoch: of each task its share, in passes that have each of its examples once.

    An epoch has each share rounded down or up: up for the tasks that are furthest behind theirs, so that shares hold
    over all epochs. One that begins in one pass over a task and ends in the next has no example twice: those that it
    has already are moved behind it in the next pass.

    >>> order = ExampleOrder({None: "abcd"}, {None: 1.0}, 3, seed=0)
    >>> ["".join(order.examples(epoch)) for epoch in range(4)]  # three passes: cadb, adbc, abcd
    ['cad', 'bad', 'bca', 'bcd']
    >>> order = ExampleOrder({"a": "abc", "z": "z"}, {"a": 3.0, "z": 1.0}, None, seed=0)
    >>> "".join(order.examples(0))
    'bazc'
    """

    def __init__(
        self, ids: Mapping[str | None, Sequence[str]], weights: Mapping[str | None, float], count: int | None, seed: int
    ) -> None:
        """Choose nothing yet.

        Args:
            ids: the examples of each task.
            weights: weight of each task.
            count: examples of an epoch; None: as many as the weights allow. Without tasks there are at most all.
            seed: seed of the order.

        Attributes:
            count: examples of an epoch.

        Raises:
            ConfigError: a task has fewer examples than its share of an epoch, or none.
        """
        whole = sum(Fraction(str(weights[task])) for task in ids)
        parts = {task: Fraction(str(weights[task])) / whole for task in ids}
        most = max(1, math.floor(min(len(ids[task]) / part for task, part in parts.items())))
        self.count = most if count is None else min(count, most) if None in ids else count
        shares = {task: self.count * part for task, part in parts.items()}
        for task, share in shares.items():
            if math.ceil(share) > len(ids[task]) and task is not None:
                fault = f"has {len(ids[task])} rows, but a share of {float(share):g} of the {self.count} examples"
                way = f"lower its weight, or examples_per_update to {most}" if ids[task] else "add some, or take it out"
                raise ConfigError(f"finetuning.per_task.{task}: {fault} of an epoch: {way}")
        self._choose = partial(_epochs, ids, shares, seed)
        self._kept, self._next = dict[int, list[str]](), enumerate(self._choose())

    def examples(self, epoch: int) -> list[str]:
        """Return the examples of an epoch."""
        if epoch < min(self._kept, default=0):
            self._kept, self._next = {}, enumerate(self._choose())
        while epoch not in self._kept:
            number, self._kept[number] = next(self._next)
            self._kept.pop(number - NUM_KEPT, None)
        return self._kept[epoch]


def _epochs(
    ids: Mapping[str | None, Sequence[str]], shares: Mapping[str | None, Fraction], seed: int
) -> Iterator[list[str]]:
    """Yield the examples of each epoch, which has so many of each task on average, spread evenly."""
    left, passes, taken = {task: list[str]() for task in ids}, Counter[str | None](), Counter[str | None]()
    for number in itertools.count(1):
        counts, chosen = {task: math.floor(share) for task, share in shares.items()}, []
        parted = [task for task, share in shares.items() if share > counts[task]]
        parted.sort(key=lambda task: taken[task] + counts[task] - number * shares[task])
        for task in parted[: int(sum(shares.values())) - sum(counts.values())]:
            counts[task] += 1
        for place, (task, count) in enumerate(counts.items()):
            if count > len(left[task]):
                order, has = list(ids[task]), set(left[task])
                name = f"order of examples {seed} {passes[task]}"  # of the only task as it always was
                random.Random(name if task is None else f"{name} {task}").shuffle(order)
                first = [each for each in order if each not in has][: count - len(has)]
                has = set(first)
                left[task] += [*first, *(each for each in order if each not in has)]
                passes[task] += 1
            chosen += [((index + 0.5) / count, place, each) for index, each in enumerate(left[task][:count])]
            left[task] = left[task][count:]
            taken[task] += count
        yield [each for *_, each in sorted(chosen)]
