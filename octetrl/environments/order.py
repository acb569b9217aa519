"""A seeded order without end: one permutation an epoch, and a place in it is a single number.

Epoch `e` is a permutation drawn from (seed, e) alone, so any place can be found without walking there, and a
resumed run continues from the one number it saved.
"""

from __future__ import annotations

import random


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
