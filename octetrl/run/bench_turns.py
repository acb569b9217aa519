"""The order in which a bench takes its arms: A B C in odd rounds, C B A in even ones, so that a device that slows down
as it heats up favours none of them. No torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TypeVar

Arm = TypeVar("Arm")


def in_turn(arms: Iterable[Arm], rounds: int) -> Iterator[tuple[int, Arm]]:
    """(round, arm) of every turn, rounds from 1: with arms A and B (1, A) (1, B) (2, B) (2, A) (3, A) ..."""
    forth = tuple(arms)
    for number in range(1, rounds + 1):
        for arm in forth if number % 2 else reversed(forth):
            yield number, arm
