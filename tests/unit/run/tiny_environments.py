"""Environments in a module of their own, which a separate process imports fast."""

from __future__ import annotations

from typing import Any

from octetrl.environments.programs import Model
from octetrl.environments.tools.definition import tool
from octetrl.environments.turns import reward
from octetrl.records import Task

TASKS = [Task(f"{n}", f"{n} + 1 =", str(n + 1)) for n in range(8)]


@tool
def look_up(word: str) -> str:
    """Looks a word up."""
    return word


class Plain:
    tasks = TASKS

    def score(self, task: Task, completion_text: str) -> float:
        return 1.0


class Agent:
    tasks = TASKS
    tools = (look_up,)
    system_prompt = "You look words up."

    @reward
    def right(self, conversation: Any) -> float:
        return 1.0


class Kitchen(Plain):
    tasks = [Task("1", "?", environment="kitchen"), Task("2", "!")]  # noqa: RUF012


class Program(Plain):
    def agent(self, task: Task, model: Model) -> None: ...
