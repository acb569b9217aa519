"""Text games of several turns, ready-made: `environment: {kind: game, dataset: guess_number}`.

    guess_number    find a number in a range; the reply to each guess says whether it is too low or too high

A game uses the user's messages as replies, without tools, so any chat model can play it. A message that cannot be read
is reported to the model and costs a turn, like a wrong guess.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from random import Random
from typing import Any

from octetrl.environments.made_tasks import MadeTasks
from octetrl.environments.turns import Conversation, metric, reward
from octetrl.records import Task
from octetrl.system.errors import UserError, nearest

_NUMBER = re.compile(r"-?\d+")


@dataclass(frozen=True)
class GuessNumber:
    """Find a number. The reward is 1 for finding it, and up to 0.2 more for using few guesses."""

    size: int
    seed: int = 0
    numbers: int = 100  # in the range of possible values
    guesses: int = 10  # allowed in one game
    starts: int = 1000  # largest start of a range; tasks differ by their starts

    def __post_init__(self) -> None:
        for name in ("numbers", "guesses", "starts"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise UserError(f"environment.parameters.{name}: {value!r} is not a whole number of at least 1")

    @property
    def tasks(self) -> Sequence[Task]:
        return MadeTasks(self.size, self._task)

    def _task(self, index: int) -> Task:
        chance = Random(f"guess_number/{self.seed}/{index}")
        low = chance.randrange(self.starts + 1)
        high = low + self.numbers - 1
        prompt = (
            f"I think of a whole number from {low} to {high}. Find it in at most {self.guesses} guesses. Say one number"
            " each time; I tell you whether mine is higher or lower."
        )
        return Task(f"guess_number/{index}", prompt, str(chance.randint(low, high)), {"low": low, "high": high})

    def start(self, conversation: Conversation) -> None:
        conversation.state.found = False

    def reply(self, conversation: Conversation) -> str | None:
        said = _NUMBER.findall(conversation.text.rpartition("</think>")[2])
        conversation.answered = said[-1] if said else None
        number = int(conversation.task.answer or 0)
        conversation.state.found = bool(said) and _same(said[-1], number)
        left = self.guesses - conversation.turns
        if conversation.state.found or left <= 0:
            return None
        if not said:
            return f"That is no number. Say one. Guesses left: {left}."
        return f"{'Higher' if _is_below(said[-1], number) else 'Lower'}. Guesses left: {left}."

    @reward
    def found(self, conversation: Conversation) -> float:
        return float(conversation.state.found)

    @reward(weight=0.2)
    def quickness(self, conversation: Conversation) -> float:
        """Share of the allowed guesses that were not used."""
        return (1 - conversation.turns / self.guesses) if conversation.state.found else 0.0

    @metric
    def guesses_made(self, conversation: Conversation) -> float:
        return conversation.turns


GAMES: Mapping[str, Callable[..., Any]] = {"guess_number": GuessNumber}


def game_environment(name: str, parameters: Mapping[str, Any], *, size: int, seed: int) -> Any:
    """Create the game `name`. Raises UserError for an unknown game or parameter."""
    if name not in GAMES:
        raise UserError(
            f"environment.dataset: there is no game '{name}'{nearest(name, GAMES)}; give {', '.join(GAMES)}"
        )
    kind = GAMES[name]
    allowed = [field.name for field in fields(kind) if field.name not in ("size", "seed")]  # type: ignore[arg-type]
    for parameter in parameters:
        if parameter not in allowed:
            raise UserError(
                f"environment.parameters: game '{name}' has no parameter '{parameter}'{nearest(parameter, allowed)};"
                f" it takes {', '.join(allowed)}"
            )
    return kind(size=size, seed=seed, **parameters)


def _same(digits: str, number: int) -> bool:
    return len(digits) < 20 and int(digits) == number


def _is_below(digits: str, number: int) -> bool:
    """Compare a number of any length: Python's int() refuses more than a few thousand digits."""
    return digits.startswith("-") if len(digits) >= 20 else int(digits) < number
