"""Estimates how many tokens a rollout of a task will take. The engine starts the longest first.

A task that came before: the mean of its group, the last time. A new task: the running mean of its class. A class is the
part of the task's id before its last slash, and the prompt's length in powers of two. If the class is new, too, the
estimate is the mean of all tasks with that beginning. If there are none, there is no estimate.

    ExpectedLengths().estimate(Task("chain_sum/17", ...), 23)   reads "chain_sum" with prompts of 16 to 31 tokens

An estimate decides the order of requests, never their tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from octetrl.records import Task

MEMORY = 64  # groups; the mean of a class forgets earlier ones


@dataclass(slots=True)
class ExpectedLengths:
    """Lengths in tokens. `of_task`: by id. `of_class`: by class, mean and number of groups, at most `MEMORY`."""

    of_task: dict[str, int] = field(default_factory=dict)
    of_class: dict[str, tuple[float, int]] = field(default_factory=dict)

    def estimate(self, task: Task, prompt_tokens: int) -> int | None:
        """Expected tokens of one rollout, or None."""
        if task.id in self.of_task:
            return self.of_task[task.id]
        narrow, wide = _classes(task, prompt_tokens)
        known = self.of_class.get(narrow) or self.of_class.get(wide)
        return None if known is None else round(known[0])

    def record(self, task: Task, prompt_tokens: int, mean_tokens: int) -> None:
        """Takes the mean length of a group of rollouts."""
        self.of_task[task.id] = mean_tokens
        for name in _classes(task, prompt_tokens):
            mean, groups = self.of_class.get(name, (0.0, 0))
            groups = min(groups + 1, MEMORY)
            self.of_class[name] = (mean + (mean_tokens - mean) / groups, groups)

    def state(self) -> dict[str, Any]:
        return {"of_task": dict(self.of_task), "of_class": {name: list(known) for name, known in self.of_class.items()}}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Takes a `state`."""
        self.of_task = dict(state["of_task"])
        self.of_class = {name: (float(mean), int(groups)) for name, (mean, groups) in state["of_class"].items()}


def _classes(task: Task, prompt_tokens: int) -> tuple[str, str]:
    """The task's class, and the wider class of any prompt length."""
    beginning = task.id.rpartition("/")[0]
    return f"{beginning}|{prompt_tokens.bit_length()}", f"{beginning}|"
