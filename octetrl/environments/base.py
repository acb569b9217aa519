"""The interface of an environment, and the order of its tasks.

An environment is two things: tasks, and a score for a completion of one of them. Any object with these two
attributes is an environment (`examples/custom_environment.py` is one in ten lines). `TaskEnvironment` combines
them from parts.

A `Taskset` returns training tasks in an endless seeded order (`environments/order.py`), so a resumed run gets the same
prompts as an uninterrupted one. Held-out tasks are set aside first. A training task with the prompt of a held-out one
is skipped. Prompts are compared and not ids, because a small generated dataset repeats prompts under many indices.

Tasks may be generated on access (`environments/reasoning_gym.py`), so nothing here iterates over all of them.
"""

from __future__ import annotations

import hashlib
import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from numbers import Real
from typing import Any, Protocol

from octetrl.config.errors import UserError
from octetrl.config.text import to_utf8
from octetrl.environments.order import EndlessOrder
from octetrl.records import Task

Scorer = Callable[[Task, str], float]
LARGEST_REWARD = 1e18  # its square is still a finite float32


def finite_number(value: object, what: str) -> float:
    """A reward or metric as a number. Raises TypeError or ValueError for what is none, or is beyond LARGEST_REWARD."""
    if not isinstance(value, Real):
        raise TypeError(f"the {what} is {str(value)[:40]!r} of type {type(value).__name__}, not a number")
    try:
        number = float(value)
    except OverflowError:
        raise ValueError(f"the {what} is beyond ±{LARGEST_REWARD:g}; scale it down") from None
    if not math.isfinite(number):
        raise ValueError(f"the {what} is {number}, not a finite number")
    if abs(number) > LARGEST_REWARD:
        raise ValueError(f"the {what} is {number:g}, beyond ±{LARGEST_REWARD:g}; scale it down")
    return number


class Environment(Protocol):
    """Tasks and their score. Two tasks are the same problem when their prompts are equal."""

    @property
    def tasks(self) -> Sequence[Task]: ...

    def score(self, task: Task, completion_text: str, /) -> float:
        """The reward of one completion: a number within ±LARGEST_REWARD; bool counts as 0 or 1.

        Runs in a reward worker (`environments/scoring.py`), so it must be picklable: define it in a module. Raise
        when no reward can be given: the rollout is then left out, and counted, instead of being punished.

        An environment may also have `answered(task, completion_text) -> str | None`: what the completion answers, in a
        form in which equal answers are equal texts. It is what a majority is counted by, and runs with `score`.
        """
        ...


@dataclass(frozen=True)
class TaskEnvironment:
    """An environment put together from tasks and a scorer."""

    tasks: Sequence[Task]
    score: Scorer


class Taskset:
    """Training tasks in a seeded order without end, and held-out tasks that are never among them.

    tasks: all of them; seed: which are held out and the order of the rest; eval_size: how many are held out.
    Raises UserError when `tasks` has too few different prompts to hold out `eval_size` and train on another.
    """

    def __init__(self, tasks: Sequence[Task], *, eval_size: int, seed: int) -> None:
        self._tasks = tasks
        self._seed = seed
        self._held_out = _choose_held_out(tasks, eval_size, seed)
        self._held_out_prompts = frozenset(task.prompt for task in self._held_out)
        if all(task.prompt in self._held_out_prompts for task in tasks):
            raise UserError(
                f"environment.eval_size: {eval_size} held-out tasks leave none of the {len(tasks)} tasks for training"
                " (tasks with equal prompts count once); lower eval_size or give more tasks"
            )
        self._order = EndlessOrder(len(tasks), seed)
        self._position = 0

    def next_batch(self, n: int) -> list[Task]:
        """The next `n` training tasks; a new epoch begins wherever the last one ends."""
        batch: list[Task] = []
        while len(batch) < n:
            task = self._tasks[self._order[self._position]]
            self._position += 1
            if task.prompt not in self._held_out_prompts:
                batch.append(task)
        return batch

    def held_out(self, n: int | None = None) -> list[Task]:
        """The first `n` held-out tasks (None: all), all with different prompts and none ever in a training batch."""
        if n is not None and n > len(self._held_out):
            raise UserError(
                f"{n} held-out tasks asked for, {len(self._held_out)} set aside; raise environment.eval_size"
            )
        return self._held_out[:n]

    def all_tasks(self) -> list[Task]:
        """Every task, held out or not, in their own order; of those with equal prompts the first."""
        return list({task.prompt: task for task in reversed(self._tasks)}.values())[::-1]

    def state(self) -> dict[str, Any]:
        """Where the order stands, as JSON."""
        return {"position": self._position, "fingerprint": self._fingerprint}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from `state()`. Raises UserError when it was taken from other tasks or another seed."""
        if state["fingerprint"] != self._fingerprint:
            raise UserError(
                "environment: its tasks or seed differ from the checkpoint's;"
                " resume with the same data, or start a new run from its weights"
            )
        self._position = state["position"]

    @cached_property
    def _fingerprint(self) -> str:
        """Of what decides the order, and of a few tasks at fixed places: cheap, where tasks are generated on access."""
        probes = [self._tasks[len(self._tasks) * eighth // 8] for eighth in range(8)]
        words = [
            str(self._seed),
            str(len(self._tasks)),
            *(task.prompt for task in (*self._held_out, *probes)),
        ]
        return hashlib.sha256(to_utf8("\0".join(words))).hexdigest()


class NoTasks(Taskset):
    """Of a run that draws no rollouts and evaluates nothing."""

    def __init__(self) -> None:
        self._position = 0

    def next_batch(self, n: int) -> list[Task]:
        raise UserError("environment.dataset: none is given, so there are no tasks; give one")

    def held_out(self, n: int | None = None) -> list[Task]:
        raise UserError("environment.dataset: none is given, so there are no tasks to evaluate on; give one")

    def state(self) -> dict[str, Any]:
        return {}

    def restore(self, state: Mapping[str, Any]) -> None:
        """There is no order to continue."""


def _choose_held_out(tasks: Sequence[Task], eval_size: int, seed: int) -> list[Task]:
    """`eval_size` tasks with different prompts, drawn at random so that a sorted file is sampled evenly."""
    if not tasks:
        raise UserError("environment: there are no tasks; give a dataset or file that has some")
    order = list(range(len(tasks)))
    random.Random(f"held out/{seed}").shuffle(order)
    chosen: dict[str, Task] = {}
    for index in order:
        if len(chosen) == eval_size:
            break
        task = tasks[index]
        chosen.setdefault(task.prompt, task)
    if len(chosen) < eval_size:
        raise UserError(
            f"environment.eval_size: {eval_size} held-out tasks asked for, but there are only {len(chosen)} different"
            f" prompts among {len(tasks)} tasks; lower eval_size or give more tasks"
        )
    return list(chosen.values())
