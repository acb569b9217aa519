"""Who owns which page of the KV cache.

Pages are only numbers here; their bytes lie in `kv_cache.py`. A page may have several owners: the prompt of a group is
computed once and every sibling reads the same pages. A page with more than one owner is never written; who has to
write there takes a copy first (`scheduler.py`). A page without owners is free.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence


class BlockManager:
    """Counts the owners of each of `num_pages` pages of `page_size` tokens."""

    def __init__(self, num_pages: int, page_size: int) -> None:
        self.num_pages, self.page_size = num_pages, page_size
        self.peak_used = 0
        self._free = list(range(num_pages - 1, -1, -1))
        self._owners = [0] * num_pages

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_used(self) -> int:
        return self.num_pages - len(self._free)

    def pages_for(self, num_tokens: int) -> int:
        """Pages that hold `num_tokens` tokens."""
        return -(-num_tokens // self.page_size)

    def allocate(self) -> int:
        """A free page with one owner. The caller has made sure that there is one."""
        assert self._free, f"page accounting: none of {self.num_pages} pages is free"
        page = self._free.pop()
        assert self._owners[page] == 0, f"page accounting: free page {page} has {self._owners[page]} owners"
        self._owners[page] = 1
        self.peak_used = max(self.peak_used, self.num_used)
        return page

    def share(self, pages: Sequence[int]) -> list[int]:
        """One more owner for each page; returns the pages as the new owner's own list."""
        for page in pages:
            assert self._owners[page] > 0, f"page accounting: page {page} is free and cannot be shared"
            self._owners[page] += 1
        return list(pages)

    def is_shared(self, page: int) -> bool:
        return self._owners[page] > 1

    def release(self, pages: Iterable[int]) -> None:
        """One owner less for each page; those without owners are free again."""
        for page in pages:
            assert self._owners[page] > 0, f"page accounting: page {page} is released but has no owner"
            self._owners[page] -= 1
            if self._owners[page] == 0:
                self._free.append(page)

    def check(self, owners: Iterable[Sequence[int]]) -> None:
        """Asserts that `owners`, the page lists of everyone, explain every count, and that nothing leaked."""
        expected = [0] * self.num_pages
        for pages in owners:
            for page in pages:
                expected[page] += 1
        assert expected == self._owners, "page accounting: the owners' lists do not explain the counts"
        free = sorted(page for page, count in enumerate(expected) if count == 0)
        assert free == sorted(self._free), "page accounting: the free list is not the pages without owners"
