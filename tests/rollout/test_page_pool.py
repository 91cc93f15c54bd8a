"""The page pool against a simple model of it: which pages are free, held or cached, and which one is evicted."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from jaxft.core.cache import PAGE_TOKENS
from jaxft.rollout.scheduler import PagePool, page_keys

NUM_PAGES = 7


def prompt(*pages):
    """Tokens of whole pages, each of which holds one number only."""
    return [number for number in pages for _ in range(PAGE_TOKENS)]


class PoolMachine(RuleBasedStateMachine):
    """Rows take, share, record and release pages as an engine does; prompts are made of two kinds of pages.

    The model: `rows` has the pages of each row with the keys of its prompt, `contents` the key of each recorded page,
    `evictable` the recorded pages that no row holds, in the order in which they are to be evicted.
    """

    def __init__(self):
        super().__init__()
        self.pool = PagePool(NUM_PAGES)
        self.rows = []
        self.contents = {}
        self.evictable = []

    def held(self):
        return {page for pages, _ in self.rows for page in pages}

    def take(self):
        """Take a page, which is the first of the evictable ones if no other is left."""
        unheld = set(range(NUM_PAGES)) - self.held()
        if not unheld:
            with pytest.raises(IndexError, match=f"all {NUM_PAGES} pages are held"):
                self.pool.take()
            return None
        page = self.pool.take()
        if unheld == set(self.evictable):
            assert page == self.evictable.pop(0)
            del self.contents[page]
        assert page in unheld and page not in self.contents
        return page

    @rule(numbers=st.lists(st.integers(0, 1), min_size=1, max_size=4))
    def begin_a_row(self, numbers):
        """Hold the pages of a prompt that are found, and take one more page."""
        keys = page_keys(prompt(*numbers))
        found = self.pool.find(keys)
        assert [self.contents[page] for page in found] == keys[: len(found)]
        assert len(found) == len(keys) or keys[len(found)] not in self.contents.values()
        for page in found:
            assert self.pool.is_held(page) == (page in self.held())
            self.pool.hold(page)
            if page in self.evictable:
                self.evictable.remove(page)
        self.rows.append((found, keys))
        self.lengthen_a_row(len(self.rows) - 1)

    @precondition(lambda self: self.rows)
    @rule(index=st.integers(0, 99))
    def lengthen_a_row(self, index):
        """Take the next page of a row and record it if it is of the prompt; pages of an answer are not recorded."""
        pages, keys = self.rows[index % len(self.rows)]
        page = self.take()
        if page is None:
            return
        pages.append(page)
        if len(pages) > len(keys):
            return
        key = keys[len(pages) - 1]
        self.pool.pending.add(key)
        self.pool.record(key, page)
        assert key not in self.pool.pending
        if key not in self.contents.values():  # else another row has computed the same
            self.contents[page] = key

    @precondition(lambda self: self.rows)
    @rule(index=st.integers(0, 99))
    def end_a_row(self, index):
        pages, _ = self.rows.pop(index % len(self.rows))
        self.pool.release(pages)
        self.evictable += [page for page in reversed(pages) if page in self.contents and page not in self.held()]

    @rule()
    def clear(self):
        self.pool.clear()
        self.contents.clear()
        self.evictable.clear()

    @invariant()
    def every_page_is_free_cached_or_held(self):
        held = self.held()
        assert self.pool.num_held == len(held) and self.pool.num_available == NUM_PAGES - len(held)
        assert {page for page in range(NUM_PAGES) if self.pool.is_held(page)} == held
        assert set(self.evictable) == self.contents.keys() - held

    def teardown(self):
        """Every page can be taken once all rows have ended, the evictable ones in their order."""
        while self.rows:
            self.end_a_row(0)
        taken = [self.pool.take() for _ in range(NUM_PAGES)]
        assert sorted(taken) == list(range(NUM_PAGES))
        assert taken[NUM_PAGES - len(self.evictable) :] == self.evictable
        with pytest.raises(IndexError):
            self.pool.take()


TestPool = PoolMachine.TestCase
TestPool.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_the_prompt_held_least_recently_is_evicted_first_and_its_beginning_last():
    pool, prompts = PagePool(6), [page_keys(prompt(number, 9)) for number in range(3)]
    rows = []
    for keys in prompts:
        rows.append([pool.take() for _ in keys])
        for key, page in zip(keys, rows[-1], strict=True):
            pool.record(key, page)
    for index in (1, 0, 2):
        pool.release(rows[index])
    for page in pool.find(prompts[1]):  # held once more, and so the last to be evicted
        pool.hold(page)
    pool.release(rows[1])
    found = []
    while pool.num_held < 6:
        found.append([len(pool.find(keys)) for keys in prompts])
        pool.take()
    assert found == [[2, 2, 2], [1, 2, 2], [0, 2, 2], [0, 2, 1], [0, 2, 0], [0, 1, 0]]


def test_a_held_page_is_found_by_others_but_not_evicted():
    pool, keys = PagePool(2), page_keys(prompt(1))
    page = pool.take()
    pool.record(keys[0], page)
    assert pool.find(keys) == [page]
    pool.take()
    with pytest.raises(IndexError, match="all 2 pages are held"):
        pool.take()
    assert pool.find(keys) == [page] and pool.num_available == 0


def test_a_cleared_pool_finds_nothing_and_keeps_what_is_held():
    pool, keys = PagePool(3), page_keys(prompt(1, 2))
    pages = [pool.take(), pool.take()]
    for key, page in zip(keys, pages, strict=True):
        pool.record(key, page)
    pool.release(pages[1:])
    pool.clear()
    assert (pool.find(keys), pool.num_held, pool.is_held(pages[0])) == ([], 1, True)
    pool.release(pages[:1])
    assert (pool.num_held, pool.num_available) == (0, 3)


def test_keys_are_of_all_tokens_up_to_the_end_of_a_page():
    keys = page_keys(prompt(1, 2)[:100])
    assert len(keys) == 2 and len(page_keys(prompt(1, 2))) == 2 and page_keys([]) == []
    assert page_keys(prompt(1, 2))[0] == keys[0] and page_keys(prompt(1, 2))[1] != keys[1]
    assert page_keys(prompt(3, 2))[1] != page_keys(prompt(1, 2))[1]  # the same tokens after others
