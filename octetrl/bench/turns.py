"""The order of turns, the rows that they become, and the ratios between arms, for all benches. No torch.

Arms run A B C in odd rounds and C B A in even rounds, so a device that slows down as it heats up favours none of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TypeVar

Row = dict[str, str | int | float]  # of a result's file and of its table: values by name
Arm = TypeVar("Arm")
Turn = TypeVar("Turn")


def in_turn(arms: Iterable[Arm], rounds: int) -> Iterator[tuple[int, Arm]]:
    """(round, arm) of every turn, rounds from 1: with arms A and B (1, A) (1, B) (2, B) (2, A) (3, A) ..."""
    forth = tuple(arms)
    for number in range(1, rounds + 1):
        for arm in forth if number % 2 else reversed(forth):
            yield number, arm


def take_in_turn(
    arms: Iterable[Arm],
    rounds: int,
    take: Callable[[int, Arm], Turn],
    on_turn: Callable[[int, Turn], None] | None,
) -> list[Turn]:
    """The results of `take(round, arm)`, in order. `on_turn(round, turn)` is called after each."""
    taken = []
    for number, arm in in_turn(arms, rounds):
        taken.append(take(number, arm))
        if on_turn is not None:
            on_turn(number, taken[-1])
    return taken


def compared(speeds: Mapping[str, float]) -> dict[str, dict[str, float]]:
    """For each precision: `speedup_over_bf16`, which is left out if BF16 was not measured."""
    plain = speeds.get("bf16")
    return {
        precision: {} if plain is None else {"speedup_over_bf16": here / plain} for precision, here in speeds.items()
    }
