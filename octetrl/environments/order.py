"""An endless seeded order: one permutation per epoch. A position in it is a single number.

The permutation of epoch `e` depends only on (seed, e). So any position can be computed directly, and a resumed run
continues from the position that it saved.
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
