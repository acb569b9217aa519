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


def test_what_a_free_page_holds_is_found_until_the_page_is_taken() -> None:
    blocks = BlockManager(num_pages=4, page_size=2)
    pages = [blocks.allocate() for _ in range(3)]
    blocks.remember((1, 2, 3, 4, 5), pages)  # two full pages and a half
    blocks.release(pages)
    assert blocks.num_free == 4
    assert blocks.find((1, 2, 3, 9)) == pages[:1]
    assert blocks.find((1, 2, 3, 4, 5, 6)) == pages[:2] and blocks.is_shared(pages[0])
    assert blocks.find((3, 4)) == []  # a page is its tokens and all before them
    for owner in (pages[:1], pages[:2]):
        blocks.release(owner)
    blank = [blocks.allocate(), blocks.allocate()]
    assert not set(blank) & set(pages[:2])  # blank pages go first,
    assert [blocks.allocate(), blocks.allocate()] == pages[:2]  # then the one released longest ago
    assert blocks.find((1, 2)) == []
    blocks.check([blank, pages[:2]])


def test_forgetting_frees_nothing_and_finds_nothing() -> None:
    blocks = BlockManager(num_pages=2, page_size=2)
    pages = [blocks.allocate(), blocks.allocate()]
    blocks.remember((1, 2, 3, 4), pages)
    blocks.release(pages[1:])
    blocks.forget()
    assert blocks.num_free == 1 and blocks.find((1, 2, 3, 4)) == []
    blocks.check([pages[:1]])
