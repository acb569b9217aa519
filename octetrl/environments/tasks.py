"""The interface of an environment, its tasks and their order.

An environment has tasks, and a score for a completion of a task. Any object with the attributes `tasks` and `score` is
an environment (`examples/custom_environment.py` is one in ten lines). `TaskEnvironment` combines given tasks and a
given scorer.

A `Taskset` returns training tasks in an endless seeded order: one permutation per epoch, which depends only on (seed,
epoch). Any position can be computed directly, so a resumed run gets the same prompts as an uninterrupted one. Held-out
tasks are chosen first. A training task with the same prompt as a held-out task is skipped. Prompts are compared and not
ids, because a small generated dataset repeats prompts under many indices.

Among several sources nothing is random: the next task is taken from the source that is furthest below its share
(`furthest_behind`). After any number of turns each source is within about one of its share.

Tasks may be generated on access (`MadeTasks`), so nothing here iterates over all of them. A task of one of several
environments (`NamedTask`) names its environment, and has an id of its own among all tasks.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol, overload

from octetrl.environments.scoring import Scorer
from octetrl.records import RolloutGroup, Task
from octetrl.system.errors import UserError
from octetrl.system.text import to_utf8


@dataclass(frozen=True)
class MadeTasks(Sequence[Task]):
    """`size` tasks; `make(indices)` creates those at these places, each the same every time."""

    size: int
    make: Callable[[Sequence[int]], list[Task]]

    def __len__(self) -> int:
        return self.size

    @overload
    def __getitem__(self, index: int) -> Task: ...
    @overload
    def __getitem__(self, index: slice) -> list[Task]: ...
    def __getitem__(self, index: int | slice) -> Task | list[Task]:
        if isinstance(index, slice):
            return self.make(range(*index.indices(self.size)))
        if not 0 <= index < self.size:
            raise IndexError(f"task {index} of {self.size}")
        return self.make([index])[0]


def tasks_at(tasks: Sequence[Task], indices: Sequence[int]) -> list[Task]:
    """The tasks at these places, in this order. Those that are created on access are created together."""
    return tasks.make(indices) if isinstance(tasks, MadeTasks) else [tasks[index] for index in indices]


@dataclass(frozen=True, slots=True)
class NamedTask(Task):
    """`own` is the task as its environment made it. Scores and replies receive that one.

    Example: named(Task("17", "3 + 4 =", "7"), "sums") has the id "sums/17" and the environment "sums"
    """

    own: Task = field(kw_only=True)


def named(
    task: Task, environment: str, *, temperature: float | None = None, group_size: int | None = None
) -> NamedTask:
    """`task` of the environment with this name. temperature, group_size: of a task that has none of its own."""
    return NamedTask(
        f"{environment}/{task.id}",
        task.prompt,
        task.answer,
        task.metadata,
        own=task,
        environment=environment,
        tools=task.tools,
        chat_template_kwargs=task.chat_template_kwargs,
        temperature=temperature if task.temperature is None else task.temperature,
        group_size=group_size if task.group_size is None else task.group_size,
    )


def own_task(task: Task) -> Task:
    """The task as its environment made it."""
    return task.own if isinstance(task, NamedTask) else task


class Environment(Protocol):
    """Tasks and their score. Two tasks are the same problem when the policy sees the same of them (`Task.problem`)."""

    @property
    def tasks(self) -> Sequence[Task]: ...

    def score(self, task: Task, completion_text: str, /) -> float:
        """The reward of one completion: a number within ±LARGEST_REWARD; bool counts as 0 or 1.

        Runs in a reward worker (reward_workers.py), so it must be picklable: define it in a module. Raise an
        exception if there is no reward: the rollout is then counted and left out; it is not scored as 0.

        An environment may also have `answered(task, completion_text) -> str | None`: the completion's answer as a text;
        equal answers must give equal texts. It runs together with `score`, and maj@k counts its results.
        """
        ...


class IndexedTasks(Protocol):
    """Tasks by place: a list, a tuple, or a class of the user's that makes a task when it is read."""

    def __len__(self) -> int: ...

    def __getitem__(self, place: int, /) -> Task: ...


class HasTasks(Protocol):
    """What a type checker can say of every environment: its reward is `score`, methods with @reward, or both."""

    @property
    def tasks(self) -> IndexedTasks: ...


@dataclass(frozen=True)
class TaskEnvironment:
    """An environment that consists of given tasks and a given scorer. eval_tasks: held-out ones, or several sets of
    them by name; None: they are taken from `tasks`."""

    tasks: Sequence[Task]
    score: Scorer
    eval_tasks: Sequence[Task] | Mapping[str, Sequence[Task]] | None = None


def own_eval_sets(environment: object) -> dict[str, Sequence[Task]]:
    """The held-out tasks that an environment has by itself, by the set's name; a single set has the name ""."""
    given: Any = getattr(environment, "eval_tasks", None)
    if given is None:
        return {}
    return dict(given) if isinstance(given, Mapping) else {"": given}


class EndlessOrder:
    """`order[position]` is the index, below `length`, at that position of the endless order. given: the order of every
    epoch; None: each has a permutation of its own."""

    def __init__(self, length: int, seed: int, given: Sequence[int] | None = None) -> None:
        self._length = length
        self._seed = seed
        self._given = given
        self._epoch = -1
        self._permutation: list[int] = []

    def __getitem__(self, position: int) -> int:
        epoch, place = divmod(position, self._length)
        if self._given is not None:
            return self._given[place]
        if epoch != self._epoch:
            self._permutation = list(range(self._length))
            random.Random(f"order/{self._seed}/{epoch}").shuffle(self._permutation)
            self._epoch = epoch
        return self._permutation[place]


def shares_of(weights: Sequence[float]) -> list[float]:
    """Weights, all above 0, as shares of 1."""
    total = sum(weights)
    return [weight / total for weight in weights]


def furthest_behind(shares: Sequence[float], taken: Sequence[int]) -> int:
    """Which source has the next turn; the first of equals.

        argmax_s  shares_s (n + 1) - taken_s          n turns so far, taken_s of them of source s

    Example: furthest_behind([0.5, 0.5], [1, 0]) is 1
    """
    due = sum(taken) + 1
    behind = [share * due - number for share, number in zip(shares, taken, strict=True)]
    return behind.index(max(behind))


@dataclass(frozen=True, slots=True)
class EvalSet:
    """A source of held-out tasks alone. `size`: number of them that are evaluated; None: all. `field`: of the size."""

    tasks: Sequence[Task]
    size: int | None = None
    field: str = "environment.eval_size"

    def chosen(self, seed: int) -> list[Task]:
        return _unique(self.tasks) if self.size is None else _choose_held_out(self.tasks, self.size, seed, self.field)


class Taskset:
    """Training tasks in an endless seeded order, and held-out tasks that are never among them.

    tasks: all tasks; seed: decides which tasks are held out, and the order of the others; eval_size: number of held-out
    tasks. eval_sets: where these come from instead, by name, a single set under ""; training skips all their tasks.
    order: places of the tasks in the order of every epoch; None: shuffled. Raises UserError if there are too few
    different prompts for the held-out tasks and one more.
    """

    def __init__(
        self,
        tasks: Sequence[Task],
        *,
        eval_size: int,
        seed: int,
        eval_sets: Mapping[str, EvalSet] | None = None,
        order: Sequence[int] | None = None,
    ) -> None:
        self._tasks = tasks
        self._seed = seed
        self._eval_sets = dict(eval_sets or {})
        own = {} if eval_sets else {"": EvalSet(tasks, eval_size)}
        self._chosen = {name: one.chosen(seed) for name, one in (own or self._eval_sets).items()}
        self._held_out = [task for chosen in self._chosen.values() for task in chosen]
        sources = (one.tasks for one in self._eval_sets.values())
        kept = [task for source in sources for task in source] if eval_sets else self._held_out
        self._held_out_prompts = frozenset(task.problem for task in kept)
        if not self._has_training_tasks:
            raise UserError(
                f"environment.{'eval_dataset' if eval_sets else 'eval_size'}: {len(self._held_out)} held-out tasks"
                f" leave none of the {len(tasks)} tasks for training (tasks with equal prompts count once); hold out"
                " fewer or give more tasks"
            )
        self._order = EndlessOrder(len(tasks), seed, order)
        self._position = 0

    def next_batch(self, n: int) -> list[Task]:
        """The next `n` training tasks. A batch may span the end of an epoch."""
        drawn: list[Task] = []
        while missing := n - len(drawn):
            indices = [self._order[self._position + place] for place in range(missing)]
            tasks = tasks_at(self._tasks, indices)
            drawn += [task for task in tasks if task.problem not in self._held_out_prompts]
            self._position += missing
        return drawn

    def record(self, groups: Sequence[RolloutGroup]) -> None:
        """Learn from the scored groups of the tasks that were drawn last, before the next are drawn."""

    def leave_out(self, prompts: Collection[str]) -> None:
        """Skip these prompts in training too: other environments of the run hold them out. Raises UserError if no task
        is left."""
        self._held_out_prompts |= frozenset(prompts)
        if not self._has_training_tasks:
            raise UserError(
                f"environment.dataset: none of its {len(self._tasks)} tasks is left for training, because it or another"
                " environment holds out each prompt; lower eval_size or give more tasks"
            )

    @property
    def _has_training_tasks(self) -> bool:
        return not all(task.problem in self._held_out_prompts for task in self._tasks)

    @property
    def epoch(self) -> float:
        """How often the tasks have been used, held-out ones included."""
        return self._position / len(self._tasks)

    @property
    def metrics(self) -> Mapping[str, float]:
        """How the tasks are shared among several environments, by name. A single environment has no such metrics."""
        return {}

    def held_out(self) -> list[Task]:
        """The held-out tasks of all sets, none ever in a training batch."""
        return [task for tasks in self.evaluation_sets().values() for task in tasks]

    def evaluation_sets(self, *, all_tasks: bool = False) -> dict[str, list[Task]]:
        """The held-out tasks of each set by its name; a single set has the name "".

        all_tasks: all tasks, held out or not, in their original order; only the first of several tasks with equal
        prompts. If the held-out tasks have sources of their own: all tasks of these sources."""
        if not all_tasks:
            return self._chosen
        sources = {name: one.tasks for name, one in self._eval_sets.items()} or {"": self._tasks}
        return {name: _unique(tasks) for name, tasks in sources.items()}

    def state(self) -> dict[str, Any]:
        """The position in the order, as plain data for JSON."""
        return {"position": self._position, "fingerprint": self._fingerprint}

    def restore(self, state: Mapping[str, Any], *, has_changed: bool = False) -> None:
        """Continue from a result of `state()`. Raises UserError if the tasks or the seed were different then, unless
        `has_changed` says that this is meant."""
        if state["fingerprint"] != self._fingerprint and not has_changed:
            raise UserError(
                "environment: its tasks or seed differ from the checkpoint's;"
                " resume with the same data, or start a new run from its weights"
            )
        self._position = state["position"] + state.get("curriculum", {}).get("passed", 0)  # it may have had one

    @cached_property
    def _fingerprint(self) -> str:
        """Hash of seed, number of tasks, held-out prompts and eight other prompts. It reads only a few tasks, because
        tasks may be generated on access."""
        probes = [self._tasks[len(self._tasks) * eighth // 8] for eighth in range(8)]
        words = [str(self._seed), str(len(self._tasks)), *(task.problem for task in (*self._held_out, *probes))]
        return hashlib.sha256(to_utf8("\0".join(words))).hexdigest()


class NoTasks(Taskset):
    """The environment of a run that samples no rollouts and evaluates nothing."""

    def __init__(self) -> None:
        self._position = 0

    def next_batch(self, n: int) -> list[Task]:
        raise UserError("environment.dataset: none is given, so there are no tasks; give one")

    def evaluation_sets(self, *, all_tasks: bool = False) -> dict[str, list[Task]]:
        raise UserError("environment.dataset: none is given, so there are no tasks to evaluate on; give one")

    def state(self) -> dict[str, Any]:
        return {}

    def restore(self, state: Mapping[str, Any], *, has_changed: bool = False) -> None:
        """There is no order to continue."""


def _unique(tasks: Sequence[Task]) -> list[Task]:
    """Only the first of several tasks with equal prompts."""
    return list({task.problem: task for task in reversed(tasks)}.values())[::-1]


def _choose_held_out(
    tasks: Sequence[Task], eval_size: int, seed: int, field: str = "environment.eval_size"
) -> list[Task]:
    """Choose `eval_size` tasks with different prompts at random, so that a sorted file is sampled evenly."""
    if not tasks:
        raise UserError("environment: there are no tasks; give a dataset or file that has some")
    order = list(range(len(tasks)))
    random.Random(f"held out/{seed}").shuffle(order)
    chosen: dict[str, Task] = {}
    position = 0
    while (missing := eval_size - len(chosen)) and position < len(order):
        for task in tasks_at(tasks, order[position : position + missing]):
            chosen.setdefault(task.problem, task)
        position += missing
    if len(chosen) < eval_size:
        raise UserError(
            f"{field}: {eval_size} held-out tasks asked for, but there are only {len(chosen)} different prompts among"
            f" {len(tasks)} tasks; lower it or give more tasks"
        )
    return list(chosen.values())
