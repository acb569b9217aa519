"""A corridor with Gymnasium's methods, which owes nothing to Gymnasium."""

from __future__ import annotations

import random
from typing import Any


class Discrete:
    n = 2


class Corridor:
    """Left is 0 and right is 1; the door, at the right end, pays."""

    action_space = Discrete()
    open = 0  # that were not closed

    def __init__(self, length: int = 3, does: str = "") -> None:
        self.length, self.does = length, does
        Corridor.open += 1

    def reset(self, *, seed: int) -> tuple[Any, dict[str, Any]]:
        self.place = random.Random(seed).randrange(self.length) if self.does != "forget" else random.random()
        return self._seen(), {}

    def step(self, action: int) -> Any:
        if self.does == "raise":
            raise RuntimeError("the floor gave way")
        self.place = max(0, self.place + (1 if action == 1 else -1))
        at_door = self.place == self.length
        return (self._seen(), 1.0 if at_door else -0.1, at_door, False, {})[: 4 if self.does == "old" else 5]

    def close(self) -> None:
        Corridor.open -= 1

    def _seen(self) -> str:
        return f"You are at {self.place} of {self.length}."


class FromOne(Corridor):
    """Left is 1 and right is 2."""

    class Space(Discrete):
        start = 1

    action_space = Space()

    def step(self, action: int) -> Any:
        return super().step(action - 1)


class Words:
    """Takes any text that is short."""

    class Space:
        def contains(self, text: str) -> bool:
            return len(text) < 5

    action_space = Space()

    def reset(self, *, seed: int) -> tuple[str, dict[str, Any]]:
        return f"Say {seed}", {}

    def step(self, text: str) -> Any:
        return text.upper(), 0.5, False, text == "end", {}


def no_reset() -> object:
    return object()


MADE = Words()  # an environment, and not what makes one
