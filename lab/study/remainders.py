"""The study's second family of tasks: calculate from left to right with +, - and *, and keep the last digit each time.

    Last digits: 7 * 5 - 6 + 3 =        7 * 5 = 5, 5 - 6 = 9, 9 + 3 = 2 #### 2

So 5 - 6 is 9, as with remainders of ten. A wrong step makes the answer wrong, except by chance. As in the demo, the
cold start sees worked answers, as above, and bare ones (`#### 2`), which can only be guessed. The reward is 1 or 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

from octetrl.environments.rewards import extract_answer
from octetrl.environments.tasks import MadeTasks
from octetrl.records import Task

MARKER = "####"
TERMS = (8, 9)  # fewest and most numbers of a task
SIZE = 32_000


@dataclass(frozen=True)
class Remainders:
    """A task's answer is its last digit, and its metadata has the steps."""

    @property
    def tasks(self) -> Sequence[Task]:
        return MadeTasks(SIZE, lambda indices: [make_task(index) for index in indices])

    def score(self, task: Task, completion_text: str, /) -> float:
        return float(extract_answer(completion_text, MARKER) == task.answer)


def make_task(index: int) -> Task:
    """Task `index`, the same each time. No factor is 5 or 0, which would make the digits before it useless."""
    chance = Random(f"remainders/{index}")
    value = chance.randint(1, 9)
    asked, steps = str(value), list[str]()
    for _ in range(chance.randint(*TERMS) - 1):
        sign = chance.choice("+-*")
        number = chance.choice((2, 3, 4, 6, 7, 8, 9) if sign == "*" else range(1, 10))
        result = last_digit(value, sign, number)
        asked += f" {sign} {number}"
        steps.append(f"{value} {sign} {number} = {result}")
        value = result
    return Task(f"remainders/{index}", f"Last digits: {asked} =", str(value), {"steps": steps})


def last_digit(value: int, sign: str, number: int) -> int:
    """The remainder of ten, which is never negative."""
    return (value + number if sign == "+" else value - number if sign == "-" else value * number) % 10


def bare_answer(task: Task) -> str:
    """Only the result: "#### 2"."""
    return f"{MARKER} {task.answer}"


def worked_answer(task: Task) -> str:
    """The steps and the result."""
    return f"{', '.join(task.metadata['steps'])} {MARKER} {task.answer}"
