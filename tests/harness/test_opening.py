"""Objects of the start of a run, and those frozen later, are left out of garbage collections until the run ends."""

import gc

from jaxft.harness.opening import freeze_heap, frozen_heap


def test_a_heap_is_frozen_within_the_block_only(monkeypatch):
    monkeypatch.setattr(gc, "collect", lambda *_: 0)  # it would walk all tests
    gc.unfreeze()  # this process of tests has a frozen one
    try:
        with frozen_heap():
            assert gc.get_freeze_count() > 0
            kept = [[] for _ in range(100)]
            freeze_heap()  # what is frozen is not in the list, and its number falls when objects of others go
            assert {id(each) for each in kept}.isdisjoint(map(id, gc.get_objects()))
        assert gc.get_freeze_count() == 0
    finally:
        gc.freeze()
    with frozen_heap():
        pass
    assert gc.get_freeze_count() > 0, "a heap that was frozen before stays so"
