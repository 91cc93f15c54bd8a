"""What Python's garbage collector may leave alone: modules and compiled programs live as long as a run."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def frozen_heap() -> Iterator[None]:
    """Leave all objects that exist now out of garbage collections until the end of the block.

    A full collection would walk them in the middle of an epoch and, with a large framework, hold the event loop for
    some 0.2 seconds. A heap of which a part was frozen before stays frozen.
    """
    was_frozen = gc.get_freeze_count() > 0
    freeze_heap()
    try:
        yield
    finally:
        if not was_frozen:
            gc.unfreeze()


def freeze_heap() -> None:
    """Leave all objects that exist now out of later garbage collections, until the end of `frozen_heap`."""
    gc.collect()
    gc.freeze()
