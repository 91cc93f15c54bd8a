"""The pages of one row shard: which are free, held by requests, or cached because they hold the beginning of a prompt.

A page is found by a digest of all tokens up to its end, so that equal beginnings of prompts are held once, whoever
holds them. Cached pages that nobody holds are the first to be evicted, the least recently held before others. This
module does not touch the device.
"""

import hashlib
from collections.abc import Sequence

import numpy as np

from jaxft.core.cache import PAGE_TOKENS


def page_keys(tokens: Sequence[int]) -> list[bytes]:
    """Return a key for each page that holds these tokens: a digest of all tokens up to the end of the page.

    >>> a, b = page_keys(range(100)), page_keys([*range(99), 7])
    >>> len(a), a[0] == b[0], a[1] == b[1]
    (2, True, False)
    """
    data, size = np.asarray(tokens, np.int32).tobytes(), 4 * PAGE_TOKENS
    keys, last = [], b""
    for start in range(0, len(data), size):
        last = hashlib.sha256(last + data[start : start + size]).digest()
        keys.append(last)
    return keys


class PagePool:
    """The allocator of one row shard.

    Attributes:
        num_pages: number of pages.
        pending: keys of pages that a request is computing now. A request that needs one of them waits for it.
    """

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self.pending: set[bytes] = set()
        self._num_used = 0  # pages from here on have never been taken
        self._free: list[int] = []  # the last one freed, whose bytes are the nearest, is the next taken
        self._holders: dict[int, int] = {}
        self._pages: dict[bytes, int] = {}
        self._keys: dict[int, bytes] = {}
        self._cached: dict[int, None] = {}  # pages with a key that nobody holds, the least recently held first

    @property
    def num_available(self) -> int:
        """Number of pages that can be taken: free ones, and cached ones that nobody holds."""
        return self.num_pages - self._num_used + len(self._free) + len(self._cached)

    @property
    def num_held(self) -> int:
        """Number of pages that requests hold."""
        return self.num_pages - self.num_available

    def find(self, keys: Sequence[bytes]) -> list[int]:
        """Return the cached pages of the longest beginning of a prompt, by the keys of its pages.

        >>> pool, keys = PagePool(4), page_keys(range(150))
        >>> pages = [pool.take() for _ in keys]
        >>> pool.record(keys[0], pages[0]), pool.record(keys[1], pages[1])
        (None, None)
        >>> pool.find(keys) == pages[:2], pool.find(page_keys(range(1, 150)))
        (True, [])
        """
        pages = []
        for key in keys:
            if key not in self._pages:
                break
            pages.append(self._pages[key])
        return pages

    def is_held(self, page: int) -> bool:
        """True if a request holds the page."""
        return self._holders.get(page, 0) > 0

    def hold(self, page: int) -> None:
        """Hold a page once more."""
        self._holders[page] = self._holders.get(page, 0) + 1
        self._cached.pop(page, None)

    def take(self) -> int:
        """Return a page that is held now and holds nothing; a cached one is evicted if no page is free.

        Raises:
            IndexError: no page is available.
        """
        if self._free:
            page = self._free.pop()
        elif self._num_used < self.num_pages:
            page, self._num_used = self._num_used, self._num_used + 1
        elif self._cached:
            page = next(iter(self._cached))
            self._forget(page)
        else:
            raise IndexError(f"all {self.num_pages} pages are held")
        self._holders[page] = 1
        return page

    def record(self, key: bytes, page: int) -> None:
        """Record that a page has been computed, under the key of its tokens."""
        self.pending.discard(key)
        if key not in self._pages and page not in self._keys:
            self._pages[key], self._keys[page] = page, key

    def release(self, pages: Sequence[int]) -> None:
        """Release pages of a row, in the order of its tokens: its beginning is the last to be evicted."""
        for page in reversed(pages):
            self._holders[page] -= 1
            if self._holders[page]:
                continue
            if page in self._keys:
                self._cached[page] = None
            else:
                self._free.append(page)

    def clear(self) -> None:
        """Forget what cached pages hold, as the weights change."""
        for page in list(self._keys):
            self._forget(page)
            if not self.is_held(page):
                self._free.append(page)

    def _forget(self, page: int) -> None:
        del self._pages[self._keys.pop(page)]
        self._cached.pop(page, None)
