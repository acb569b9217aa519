"""Pages and their owners."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octetrl.engine.block_manager import BlockManager


def test_a_page_is_free_when_its_last_owner_lets_go() -> None:
    blocks = BlockManager(num_pages=4, page_size=16)
    pages = [blocks.allocate(), blocks.allocate()]
    shared = blocks.share(pages)
    assert blocks.is_shared(pages[0]) and blocks.num_used == 2
    blocks.release(pages)
    assert not blocks.is_shared(shared[0]) and blocks.num_used == 2
    blocks.release(shared)
    assert blocks.num_free == 4 and blocks.peak_used == 2


def test_pages_for() -> None:
    blocks = BlockManager(num_pages=4, page_size=16)
    assert [blocks.pages_for(n) for n in (0, 1, 16, 17)] == [0, 1, 1, 2]


def test_misuse_is_an_error() -> None:
    blocks = BlockManager(num_pages=1, page_size=16)
    page = blocks.allocate()
    with pytest.raises(AssertionError, match="none of 1 pages is free"):
        blocks.allocate()
    with pytest.raises(AssertionError, match="do not explain"):
        blocks.check([])
    blocks.release([page])
    with pytest.raises(AssertionError, match="has no owner"):
        blocks.release([page])
    with pytest.raises(AssertionError, match="cannot be shared"):
        blocks.share([page])


@given(st.lists(st.tuples(st.sampled_from(["allocate", "share", "release"]), st.integers(0, 99)), max_size=60))
def test_counts_are_always_explained_by_the_owners(actions: list[tuple[str, int]]) -> None:
    blocks = BlockManager(num_pages=5, page_size=16)
    owners: list[list[int]] = []
    for action, choice in actions:
        if action == "allocate" and blocks.num_free:
            owners.append([blocks.allocate()])
        elif action == "share" and owners:
            owners.append(blocks.share(owners[choice % len(owners)]))
        elif action == "release" and owners:
            blocks.release(owners.pop(choice % len(owners)))
        blocks.check(owners)
