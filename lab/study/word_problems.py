"""The study's third family of tasks: arithmetic told in words, for a pretrained model.

    Mia has 12 plums. She buys 7 plums. Then she gives 4 plums to Ben. How many plums does Mia have now?

A problem has one or two events after the first number; each adds, takes away, or doubles, and something is always left.
The answer is the last number of the text, and the reward is 1 or 0. With three or four events SmolLM2-135M-Instruct
solves 2% and learns nothing in 75 steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

from octetrl.environments.rewards import last_number
from octetrl.environments.tasks import MadeTasks
from octetrl.records import Task

EVENTS = (1, 2)  # fewest and most
SIZE = 32_000
NAMES = (("Mia", "She"), ("Ben", "He"), ("Nora", "She"), ("Omar", "He"), ("Lea", "She"), ("Ivan", "He"))
THINGS = ("plums", "coins", "books", "shells", "stamps", "marbles", "pencils", "cards")
GAINS = ("buys {n} {things}", "finds {n} {things}", "gets {n} {things} from {other}", "picks up {n} {things}")
LOSSES = ("gives {n} {things} to {other}", "loses {n} {things}", "sells {n} {things}", "breaks {n} {things}")
DOUBLES = ("doubles the number of {things}", "wins as many {things} as were there before")


@dataclass(frozen=True)
class WordProblems:
    @property
    def tasks(self) -> Sequence[Task]:
        return MadeTasks(SIZE, lambda indices: [make_task(index) for index in indices])

    def score(self, task: Task, completion_text: str, /) -> float:
        return float(last_number(task, completion_text))


def make_task(index: int) -> Task:
    """Problem `index`, the same each time."""
    chance = Random(f"words/{index}")
    (name, pronoun), (other, _) = chance.sample(NAMES, 2)
    things, value = chance.choice(THINGS), chance.randint(5, 40)
    said = [f"{name} has {value} {things}."]
    for number in range(chance.randint(*EVENTS)):
        value, event = _event(chance, value)
        text = event[1].format(n=event[0], things=things, other=other)
        said.append(f"{'Then ' + pronoun.lower() if number else pronoun} {text}.")
    said.append(f"How many {things} does {name} have now?")
    return Task(f"words/{index}", " ".join(said), str(value))


def _event(chance: Random, value: int) -> tuple[int, tuple[int, str]]:
    """The value after an event, with the event's number and text."""
    kind = chance.choice("++--*") if value < 40 else chance.choice("+---")
    if kind == "*":
        return 2 * value, (0, chance.choice(DOUBLES))
    if kind == "-" and value > 2:
        number = chance.randint(2, min(value - 1, 30))
        return value - number, (number, chance.choice(LOSSES))
    number = chance.randint(2, 30)
    return value + number, (number, chance.choice(GAINS))
