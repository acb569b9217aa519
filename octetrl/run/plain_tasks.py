"""Groups whose tasks are plain records.

A task that a user wrote may compute, and draw from the global random generators, whenever one of its fields is read.
Here each field is read once, at a moment when that is repeatable. Reading the groups later draws nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from octetrl.records import RolloutGroup, Task


def with_plain_tasks(groups: Iterable[RolloutGroup]) -> list[RolloutGroup]:
    """The groups, without the tasks as their environment made them. Call it when they are scored."""
    return [_with_task(group, _plain(group.task)) for group in groups]


def _plain(task: Task) -> Task:
    return Task(task.id, task.prompt, task.answer, task.metadata, environment=task.environment)


def _with_task(group: RolloutGroup, task: Task) -> RolloutGroup:
    return RolloutGroup(task, tuple(replace(rollout, task=task) for rollout in group.rollouts))
