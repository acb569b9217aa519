"""The order of turns, the rows that they become, and the ratios between arms, for all benches. No torch.

Arms run A B C in odd rounds and C B A in even rounds, so a device that slows down as it heats up favours none of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TypeVar

from octetrl.config.schema import Numerics

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


def compared(speeds: Mapping[tuple[str, Numerics], float]) -> dict[tuple[str, Numerics], dict[str, float]]:
    """For each (precision, numerics): `speedup_over_bf16` with the same numerics, and `cost_of_parity`, by how much
    `fast` is faster than `parity`. A ratio is left out if its other side was not measured."""
    rows: dict[tuple[str, Numerics], dict[str, float]] = {}
    for (precision, numerics), here in speeds.items():
        plain, fast = speeds.get(("bf16", numerics)), speeds.get((precision, "fast"))
        rows[precision, numerics] = {} if plain is None else {"speedup_over_bf16": here / plain}
        if fast is not None and numerics == "parity":
            rows[precision, numerics]["cost_of_parity"] = fast / here - 1
    return rows
