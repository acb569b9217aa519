"""Training tasks by what is known of them: in the order of a column, or by how often the policy solves them.

With `pass_rate` each task has a running pass rate: the share of right answers in its last groups, of which each counts
half of the ones before. Tasks are hard below the window, easy above it and normal inside. The order is that of any
taskset, one permutation per epoch, with two exceptions:

- A hard or an easy task rests: its turn in the order passes, except with a small probability (`retry_hard`,
  `retry_easy`), which keeps its rate from being final. If a whole epoch passes without a task, the next one is drawn.
- Tasks that were never drawn come first, or as a share of all draws (`unseen`). The others come from later epochs;
  until all were drawn these are tasks with a pass rate, so none is drawn again before its answers are scored.

No task comes twice in an epoch. A draw depends on the places in both orders and the pass rates, which are the taskset's
state, and on nothing else. `collect_batch` (rollout/collect.py) records the results of a batch before it draws the
next, in whatever thread it runs. So a resumed run draws the same tasks, also one that generates batches ahead.
"""

from __future__ import annotations

import random
import statistics
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, Literal

from octetrl.config.environment import CurriculumConfig
from octetrl.environments.tasks import EndlessOrder, EvalSet, Taskset, furthest_behind, tasks_at
from octetrl.records import RolloutGroup, Task
from octetrl.system.errors import UserError, nearest
from octetrl.system.json_file import kind_of

Pool = Literal["hard", "normal", "easy"]
ROW = "row"
FIELD = "environment.curriculum.order_by"


def order_by(tasks: Sequence[Task], column: str) -> list[int]:
    """The places of the tasks in ascending order of a value of their metadata; equal ones in their own order. A dot
    selects a key inside an object. `row`: their own order, if they have no such value. Raises UserError if a task has
    no such value, or values can't be compared."""
    if not len(tasks) or (column == ROW and ROW not in tasks_at(tasks, [0])[0].metadata):
        return [*range(len(tasks))]
    values = [_value_of(task, column) for task in tasks_at(tasks, range(len(tasks)))]
    kinds = {isinstance(value, str): place for place, value in enumerate(values)}
    if len(kinds) > 1:
        raise UserError(f"{FIELD}: '{column}' is a text in some tasks and a number in others; use one of the two")
    return sorted(range(len(tasks)), key=values.__getitem__)


def _value_of(task: Task, column: str) -> Any:
    value: Any = task.metadata
    for key in [column] if column in task.metadata else column.split("."):
        if not isinstance(value, Mapping) or key not in value:
            known = [str(name) for name in task.metadata]
            has = ", ".join(known) or "no columns besides prompt and answer"
            raise UserError(f"{FIELD}: task '{task.id}' has no '{column}'{nearest(column, known)}; it has {has}")
        value = value[key]
    if not isinstance(value, str | int | float) or value != value:
        kind = "NaN" if value != value else kind_of(value)
        raise UserError(f"{FIELD}: '{column}' of task '{task.id}' is {kind}; give a number or a text")
    return value


class CurriculumTaskset(Taskset):
    """settings: with a `pass_rate`. right_from: lowest reward of a right answer. Others as in `Taskset`."""

    def __init__(
        self,
        tasks: Sequence[Task],
        *,
        settings: CurriculumConfig,
        right_from: float,
        eval_size: int,
        seed: int,
        eval_sets: Mapping[str, EvalSet] | None = None,
        order: Sequence[int] | None = None,
    ) -> None:
        super().__init__(tasks, eval_size=eval_size, seed=seed, eval_sets=eval_sets, order=order)
        assert settings.pass_rate is not None, "without a window no task rests"
        self._settings, self._window, self._right_from = settings, settings.pass_rate, right_from
        self._later = EndlessOrder(len(tasks), seed, order)  # `_order` and `_position` are those of the first epoch
        self._passed = 0  # turns in the epochs after the first
        self._taken = [0, 0]  # draws of unseen tasks, and of others while there were unseen ones
        self._rates: dict[str, float] = {}  # by id
        self._unscored: set[str] = set()  # ids of tasks that were drawn since the last `record`
        self._ids: dict[int, str] = {}  # by place; of tasks that were made

    def next_batch(self, n: int) -> list[Task]:
        return [self._next() for _ in range(n)]

    def record(self, groups: Sequence[RolloutGroup]) -> None:
        self._unscored.clear()
        for group in groups:
            if group.rewards:
                rate = statistics.fmean(reward >= self._right_from for reward in group.rewards)
                self._rates[group.task.id] = (self._rates.get(group.task.id, rate) + rate) / 2

    @property
    def epoch(self) -> float:
        return (self._position + self._passed) / len(self._tasks)

    @property
    def metrics(self) -> Mapping[str, float]:
        """Sizes of the pools, the mean pass rate, and the share of tasks that rest."""
        pools = [self._pool(rate) for rate in self._rates.values()]
        sizes: dict[str, float] = {pool: float(pools.count(pool)) for pool in ("hard", "normal", "easy")}
        if pools:
            sizes["resting_share"] = 1 - sizes["normal"] / len(pools)
            sizes["pass_rate"] = statistics.fmean(self._rates.values())
        held_out = len(self._held_out_turns) - bisect_left(self._held_out_turns, self._position)
        sizes["unseen"] = float(len(self._tasks) - self._position - held_out)
        return {f"curriculum/{name}": value for name, value in sizes.items()}

    def state(self) -> dict[str, Any]:
        own = {"passed": self._passed, "taken": list(self._taken), "rates": dict(self._rates)}
        return {**super().state(), "curriculum": own}

    def restore(self, state: Mapping[str, Any], *, has_changed: bool = False) -> None:
        """A state of a run without a curriculum has the places in the order alone."""
        super().restore(state, has_changed=has_changed)
        own = state.get("curriculum", {})
        self._position = min(state["position"], len(self._tasks))
        self._passed = own.get("passed", state["position"] - self._position)
        self._taken = list(own.get("taken", [0, 0]))
        self._rates = dict(own.get("rates", {}))
        self._unscored.clear()

    # ------------------------------------------------------------ the next task

    def _next(self) -> Task:
        has_unseen = self._position < len(self._tasks)
        share = self._settings.unseen
        is_unseen = has_unseen and (share == 1 or furthest_behind([share, 1 - share], self._taken) == 0)
        for draw in (self._unseen, self._again) if is_unseen else (self._again, self._unseen, self._again):
            if (task := draw()) is not None:
                self._unscored.add(task.id)
                return task
        raise AssertionError("checked: there are training tasks")

    def _unseen(self) -> Task | None:
        """The next task of the first epoch. None: it is over."""
        while self._position < len(self._tasks):
            task = self._trained(self._order[self._position])
            self._position += 1
            if task is not None:
                self._taken[0] += 1
                return task
        return None

    def _again(self) -> Task | None:
        """The next task that was drawn before. None: there is none yet."""
        length = len(self._tasks)
        if self._position < length and len(self._rates) == sum(one in self._rates for one in self._unscored):
            return None
        for skipped in range(3 * length):  # the last 2 have every task, wherever an epoch begins
            turn = self._passed
            self._passed += 1
            index = self._later[length + turn]
            if self._may_repeat(index) and (skipped >= length or not self._rests(index, turn)):
                task = self._trained(index)
                if task is not None:
                    self._taken[1] += self._position < length
                    return task
        return None

    def _may_repeat(self, index: int) -> bool:
        if self._position >= len(self._tasks):
            return True
        was_drawn = self._places[index] < self._position
        return was_drawn and self._id(index) in self._rates and self._id(index) not in self._unscored

    def _rests(self, index: int, turn: int) -> bool:
        rate = self._rates.get(self._id(index))
        pool = "normal" if rate is None else self._pool(rate)
        if pool == "normal":
            return False
        chance = self._settings.retry_hard if pool == "hard" else self._settings.retry_easy
        return random.Random(f"retry/{self._seed}/{turn}").random() >= chance

    def _id(self, index: int) -> str:
        if index not in self._ids:
            self._ids[index] = self._tasks[index].id
        return self._ids[index]

    def _trained(self, index: int) -> Task | None:
        """The task at this place. None: it is held out."""
        (task,) = tasks_at(self._tasks, [index])
        self._ids[index] = task.id
        return None if task.problem in self._held_out_prompts else task

    def _pool(self, rate: float) -> Pool:
        low, high = self._window
        return "hard" if rate < low else "easy" if rate > high else "normal"

    @cached_property
    def _held_out_turns(self) -> list[int]:
        """The turns of the first epoch whose task is held out. Tasks that are made on access are not made for this."""
        if not isinstance(self._tasks, list | tuple):
            return []
        return [
            turn for turn in range(len(self._tasks)) if self._tasks[self._order[turn]].problem in self._held_out_prompts
        ]

    @cached_property
    def _places(self) -> list[int]:
        """The turn of each task in the first epoch."""
        places = [0] * len(self._tasks)
        for turn in range(len(places)):
            places[self._order[turn]] = turn
        return places
