"""Processes share values by JAX's coordination service, and hear of each other's end; here each is a thread."""

import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from jaxft.errors import ProcessEndedError
from jaxft.hosts import store as store_module


def each(stores, work):
    with ThreadPoolExecutor(len(stores)) as pool:
        return list(pool.map(work, stores))


def test_each_gets_what_all_give_whoever_asks_first(stores, lost):
    def work(store):
        names = ["a", "b"] if store.process_id % 2 else ["b", "a"]
        with ThreadPoolExecutor(2) as threads:
            given = threads.map(lambda name: store.share(name, [name, store.process_id, "x" * 300_000]), names)
            return dict(zip(names, given, strict=True))

    for found in each(stores, work):
        assert {name: [(own[0], own[1]) for own in values] for name, values in found.items()} == {
            name: [(name, index) for index in range(3)] for name in ("a", "b")
        }
    assert lost == []


def test_a_name_is_good_for_many_values_and_none_is_left(stores):
    values = {"half": 0.1, "none": None, "infinite": float("inf"), "no Unicode": "\ud800"}
    for _ in range(3):
        assert each(stores, lambda store: store.share("again", values)) == [[values] * 3] * 3
    assert stores[0]._client.key_value_dir_get("again 0/") == stores[0]._client.key_value_dir_get("again 2/") == []


@pytest.mark.parametrize("gone", [1, 2])
def test_the_loss_of_a_process_is_heard_by_all_others(stores, lost, gone):
    def wait(store):
        if store.process_id == gone:
            store._client.shutdown()  # its heartbeats end
            return
        with pytest.raises(ProcessEndedError, match=f"process {gone} of 3 has ended before it sent 'never'"):
            store.share("never", None)

    each(stores, wait)
    assert sorted(heard for heard in lost if heard[0] != gone) == [(index, gone) for index in range(3) if index != gone]


def test_one_that_ended_before_it_gave_something_is_named(stores, lost):
    stores[1].close()
    for store in (stores[0], stores[2]):
        with pytest.raises(ProcessEndedError, match="process 1 of 3 has ended before it sent 'late'"):
            store.share("late", None)
    assert lost == []


def test_a_signal_is_passed_on_once(stores):
    heard = []
    for store in stores:
        store.on_stop = lambda number, mine=store.process_id: heard.append((mine, number))
    stores[1].stop(15)
    time.sleep(0.5)
    assert sorted(heard) == [(0, 15), (2, 15)]


def test_one_that_waits_for_a_failed_process_hears_of_a_loss(stores, lost, monkeypatch):
    monkeypatch.setattr(store_module, "FAILED_SECONDS", 0.3)
    stores[2].close(0.0, has_failed=True)
    stores[1].close(0.0)  # ends by itself in time
    time.sleep(1.0)
    assert lost == [(0, 2)]


def test_one_that_ends_with_an_error_has_time_to_show_it(stores, lost, monkeypatch):
    monkeypatch.setattr(store_module, "FAILED_SECONDS", 0.4)
    stores[0].expect_end()
    for process_id in (1, 0):
        stores[process_id]._lose(2)
    assert lost == [(1, 2)]
    time.sleep(0.8)
    assert lost == [(1, 2), (0, 2)]  # process 0 hangs, and so hears of it in the end


def test_what_json_does_not_have_is_refused(stores):
    with pytest.raises(TypeError):
        stores[0].share("a set", {1})
