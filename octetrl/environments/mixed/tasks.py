"""The tasks of several environments in one order, by their weights.

The next task comes from the environment that is furthest below its share (environments/order.py), so the shares follow
the weights exactly; of equals the first by name. Within an environment the tasks come in its own order, with its own
seed, epochs and held-out tasks. A prompt that one environment holds out is skipped in all of them. The order depends on
nothing else: the number of workers, a resume, or batches that are drawn ahead change none of it.

The shares count from the first step, or from the resume that changed a weight. So a new weight holds at once, without
making up for the earlier one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from octetrl.config.several_environments import errors_named
from octetrl.environments.base import Taskset
from octetrl.environments.mixed.named_task import named
from octetrl.environments.order import furthest_behind, shares_of
from octetrl.records import Task
from octetrl.system.errors import UserError


class MixedTaskset(Taskset):
    """`members` by name, and their weights, each above 0."""

    def __init__(self, members: Mapping[str, Taskset], weights: Mapping[str, float]) -> None:
        assert members.keys() == weights.keys(), "each environment has a weight"
        self._members = dict(sorted(members.items()))  # so that a recipe may list them in any order
        self._weights = {name: weights[name] for name in self._members}
        self._shares = shares_of(list(self._weights.values()))
        self._taken = dict.fromkeys(self._members, 0)  # since the weights are these
        held_out = {task.prompt for member in members.values() for task in member.held_out()}
        for name, member in members.items():
            with errors_named(name):
                member.leave_out(held_out)

    def next_batch(self, n: int) -> list[Task]:
        """The next `n` training tasks, which name their environments."""
        batch: list[Task] = []
        names = list(self._members)
        for _ in range(n):
            name = names[furthest_behind(self._shares, list(self._taken.values()))]
            self._taken[name] += 1
            (task,) = self._members[name].next_batch(1)
            batch.append(named(task, name))
        return batch

    def held_out(self, n: int | None = None) -> list[Task]:
        """The held-out tasks of every environment, one environment after the other; the first `n` (None: all)."""
        tasks: list[Task] = [named(task, name) for name, member in self._members.items() for task in member.held_out()]
        if n is not None and n > len(tasks):
            raise UserError(f"{n} held-out tasks asked for, {len(tasks)} set aside; raise environments.NAME.eval_size")
        return tasks[:n]

    def all_tasks(self) -> list[Task]:
        """All tasks of every environment, held out or not."""
        return [named(task, name) for name, member in self._members.items() for task in member.all_tasks()]

    @property
    def metrics(self) -> Mapping[str, float]:
        """How often each environment's tasks have been used."""
        return {f"environments/{name}/epoch": member.epoch for name, member in self._members.items()}

    def state(self) -> dict[str, Any]:
        return {
            "environments": {name: member.state() for name, member in self._members.items()},
            "weights": dict(self._weights),
            "taken": dict(self._taken),
        }

    def restore(self, state: Mapping[str, Any], *, has_changed: bool = False) -> None:
        """Continue from a result of `state()`. Weights may differ from it. Raises UserError if the environments, their
        tasks or seeds were different then, as `Taskset.restore` does."""
        saved = state.get("environments", {})
        if saved.keys() != self._members.keys():
            raise UserError(
                f"environments: {', '.join(self._members)} differ from the checkpoint's ({', '.join(saved) or 'one'});"
                " resume with the same ones, or start a new run from its weights"
            )
        for name, member in self._members.items():
            with errors_named(name):
                member.restore(saved[name], has_changed=has_changed)
        has_same_weights = state["weights"] == self._weights
        self._taken = {name: state["taken"][name] if has_same_weights else 0 for name in self._members}
