"""A task of one of several environments: it names its environment, and has an id of its own among all tasks."""

from __future__ import annotations

from dataclasses import dataclass, field

from octetrl.records import Task


@dataclass(frozen=True, slots=True)
class NamedTask(Task):
    """`own` is the task as its environment made it. Scores and replies receive that one.

    Example: named(Task("17", "3 + 4 =", "7"), "sums") has the id "sums/17" and the environment "sums"
    """

    own: Task = field(kw_only=True)


def named(task: Task, environment: str) -> NamedTask:
    """`task` of the environment with this name."""
    return NamedTask(
        f"{environment}/{task.id}", task.prompt, task.answer, task.metadata, own=task, environment=environment
    )


def own_task(task: Task) -> Task:
    """The task as its environment made it."""
    return task.own if isinstance(task, NamedTask) else task
