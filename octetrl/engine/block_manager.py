"""Counts the owners of each page of the KV cache, and finds cached pages by their content.

Pages are only numbers here; their bytes are in `kv_cache.py`. A page may have several owners: the prompt of a group is
computed once, and every sibling reads the same pages. A page with more than one owner is never written. A sequence that
must write there copies the page first (`scheduler.py`). A page without owners is free.

A full page can be found by its content: a hash of all tokens up to its end (`content_keys`). K and V of a position
follow from these tokens, the weights and the scales. A free page keeps its bytes until it is allocated again. Pages
without known content are allocated first, then those that were released longest ago, of a sequence from its end. Until
then a sequence with the same tokens can reuse the page. Call `forget` when weights or scales change.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence

import numpy as np


class BlockManager:
    """The owners of each of `num_pages` pages of `page_size` tokens. `unit`: how many have a hash; None: a page's."""

    def __init__(self, num_pages: int, page_size: int, unit: int | None = None) -> None:
        self.num_pages, self.page_size, self.unit = num_pages, page_size, unit or page_size
        self.peak_used = 0
        self._blank = list(range(num_pages - 1, -1, -1))
        self._kept: dict[int, None] = {}  # free pages with known content, the one released longest ago first
        self._owners = [0] * num_pages
        self._page_of: dict[bytes, int] = {}
        self._keys_of: dict[int, list[bytes]] = {}

    @property
    def num_free(self) -> int:
        return len(self._blank) + len(self._kept)

    @property
    def num_used(self) -> int:
        return self.num_pages - self.num_free

    def pages_for(self, num_tokens: int) -> int:
        """Number of pages for `num_tokens` tokens."""
        return -(-num_tokens // self.page_size)

    def allocate(self) -> int:
        """Allocates a page for one owner. The caller has made sure that a page is free."""
        assert self.num_free, f"page accounting: none of {self.num_pages} pages is free"
        page = self._blank.pop() if self._blank else self._oldest_kept()
        assert self._owners[page] == 0, f"page accounting: free page {page} has {self._owners[page]} owners"
        self._owners[page] = 1
        self.peak_used = max(self.peak_used, self.num_used)
        return page

    def share(self, pages: Sequence[int]) -> list[int]:
        """Adds an owner to each page. Returns the pages as a new list for this owner."""
        for page in pages:
            assert self._owners[page] > 0, f"page accounting: page {page} is free and cannot be shared"
            self._owners[page] += 1
        return list(pages)

    def is_shared(self, page: int) -> bool:
        return self._owners[page] > 1

    def release(self, pages: Sequence[int]) -> None:
        """Removes an owner from each page. Pages without owners are free again."""
        for page in reversed(pages):
            assert self._owners[page] > 0, f"page accounting: page {page} is released but has no owner"
            self._owners[page] -= 1
            if self._owners[page] == 0:
                if page in self._keys_of:
                    self._kept[page] = None
                else:
                    self._blank.append(page)

    # ------------------------------------------------------------ what pages hold

    def remember(self, token_ids: Sequence[int], pages: Sequence[int]) -> None:
        """Records that the first pages hold K and V of these tokens. `find` finds the full ones from now on."""
        for number, key in enumerate(content_keys(token_ids, self.unit)):
            if key not in self._page_of:
                page = self._page_of[key] = pages[number * self.unit // self.page_size]
                self._keys_of.setdefault(page, []).append(key)

    def find(self, token_ids: Sequence[int]) -> list[int]:
        """Finds the full pages that hold the beginning of these tokens, and adds an owner to each."""
        found: list[int] = []
        for key in content_keys(token_ids, self.page_size):
            page = self._page_of.get(key)
            if page is None:
                break
            self._kept.pop(page, None)
            self._owners[page] += 1
            found.append(page)
        self.peak_used = max(self.peak_used, self.num_used)
        return found

    def forget(self) -> None:
        """Drops the recorded content of all pages."""
        self._blank += self._kept
        self._kept.clear()
        self._page_of.clear()
        self._keys_of.clear()

    def _oldest_kept(self) -> int:
        page = next(iter(self._kept))
        del self._kept[page]
        for key in self._keys_of.pop(page):
            del self._page_of[key]
        return page

    def check(self, owners: Iterable[Sequence[int]]) -> None:
        """Asserts that `owners`, all page lists in use, match every count, and that no page leaked."""
        expected = [0] * self.num_pages
        for pages in owners:
            for page in pages:
                expected[page] += 1
        assert expected == self._owners, "page accounting: the owners' lists do not explain the counts"
        free = sorted(page for page, count in enumerate(expected) if count == 0)
        held = sorted((*self._blank, *self._kept))
        assert free == held, "page accounting: the free pages are not those without owners"
        assert all(self._page_of[key] == page for page, keys in self._keys_of.items() for key in keys), "keys differ"
        assert not set(self._blank) & set(self._keys_of), "page accounting: a blank page is remembered"


def content_keys(token_ids: Sequence[int], unit: int) -> Iterator[bytes]:
    """For each `unit` of these tokens, a hash of all tokens up to its end."""
    key = b""
    for start in range(0, len(token_ids) - unit + 1, unit):
        tokens = np.asarray(token_ids[start : start + unit], dtype=np.int64)
        key = hashlib.blake2b(key + tokens.tobytes(), digest_size=16).digest()
        yield key
