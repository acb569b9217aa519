"""The order of a run's tasks or examples: endless and seeded within one source, and by weight among several.

Within a source there is one permutation per epoch, and a position is a single number. The permutation of epoch `e`
depends only on (seed, e). So any position can be computed directly, and a resumed run continues from the position that
it saved.

Among several sources nothing is random. The next one is taken from the source that is furthest below its share
(`furthest_behind`). After any number of turns each source is within about one of its share. The same holds for nearly
every batch. The numbers taken are the position.
"""

from __future__ import annotations

import random
from collections.abc import Sequence


class EndlessOrder:
    """`order[position]` is the index, below `length`, at that position of the endless order."""

    def __init__(self, length: int, seed: int) -> None:
        self._length = length
        self._seed = seed
        self._epoch = -1
        self._permutation: list[int] = []

    def __getitem__(self, position: int) -> int:
        epoch, place = divmod(position, self._length)
        if epoch != self._epoch:
            self._permutation = list(range(self._length))
            random.Random(f"order/{self._seed}/{epoch}").shuffle(self._permutation)
            self._epoch = epoch
        return self._permutation[place]


def shares_of(weights: Sequence[float]) -> list[float]:
    """Weights, all above 0, as shares of 1."""
    total = sum(weights)
    return [weight / total for weight in weights]


def furthest_behind(shares: Sequence[float], taken: Sequence[int]) -> int:
    """Which source has the next turn; the first of equals.

        argmax_s  shares_s (n + 1) - taken_s          n turns so far, taken_s of them of source s

    Example: furthest_behind([0.5, 0.5], [1, 0]) is 1
    """
    due = sum(taken) + 1
    behind = [share * due - number for share, number in zip(shares, taken, strict=True)]
    return behind.index(max(behind))
