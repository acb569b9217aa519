"""Several environments in one run: the order of their tasks, their scores and their conversations.

The next task comes from the environment that is furthest below its share (environments/tasks.py), so the shares follow
the weights exactly; of equals the first by name. Within an environment the tasks come in its own order, with its own
seed, epochs and held-out tasks. A prompt that one environment holds out is skipped in all of them. The order depends on
nothing else: the number of workers, a resume, or batches that are drawn ahead change none of it. The shares count from
the first step, or from the resume that changed a weight. So a new weight holds at once, without making up for the
earlier one.

Each task is scored and answered by its own environment, with its own processes, tools, rewards and limits. If one has
several turns, a task of another one is a conversation that ends after the model's first answer.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from types import MappingProxyType, TracebackType
from typing import Any, Self

from octetrl.config.several_environments import errors_named, renamed
from octetrl.environments.calls import Calls
from octetrl.environments.dialogue import Dialogue, Dialogues
from octetrl.environments.scoring import (
    Key,
    OpenScorer,
    RestartingScorer,
    RewardTimes,
    Score,
    ScoringRound,
    begin_round,
    score_all,
)
from octetrl.environments.tasks import Taskset, furthest_behind, named, own_task, shares_of
from octetrl.records import RolloutGroup, Task
from octetrl.system.errors import UserError


class MixedTaskset(Taskset):
    """`members` by name, and their weights, each above 0. temperatures, group_sizes: of training's answers, where an
    environment has its own."""

    def __init__(
        self,
        members: Mapping[str, Taskset],
        weights: Mapping[str, float],
        *,
        temperatures: Mapping[str, float | None] = MappingProxyType({}),
        group_sizes: Mapping[str, int | None] = MappingProxyType({}),
    ) -> None:
        assert members.keys() == weights.keys(), "each environment has a weight"
        self._members = dict(sorted(members.items()))  # so that a recipe may list them in any order
        self._weights = {name: weights[name] for name in self._members}
        self._shares = shares_of(list(self._weights.values()))
        self._taken = dict.fromkeys(self._members, 0)  # since the weights are these
        self._temperatures, self._group_sizes = temperatures, group_sizes
        held_out = {task.problem for member in members.values() for task in member.held_out()}
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
            own, size = self._temperatures.get(name), self._group_sizes.get(name)
            batch.append(named(task, name, temperature=own, group_size=size))
        return batch

    def evaluation_sets(self, *, all_tasks: bool = False) -> dict[str, list[Task]]:
        """The sets of every environment; "" has those without a name, one environment after the other."""
        sets: dict[str, list[Task]] = {}
        for name, member in self._members.items():
            for set_name, tasks in member.evaluation_sets(all_tasks=all_tasks).items():
                sets.setdefault(set_name, []).extend(named(task, name) for task in tasks)
        return sets

    def record(self, groups: Sequence[RolloutGroup]) -> None:
        for name, member in self._members.items():
            own = [
                (group, group.task.id.removeprefix(f"{name}/")) for group in groups if group.task.environment == name
            ]
            member.record([replace(group, task=replace(group.task, id=own_id)) for group, own_id in own])

    @property
    def metrics(self) -> Mapping[str, float]:
        """How often each environment's tasks have been used, and what their own curricula measure."""
        metrics = {f"environments/{name}/epoch": member.epoch for name, member in self._members.items()}
        for name, member in self._members.items():
            metrics |= {f"environments/{name}/{metric}": value for metric, value in member.metrics.items()}
        return metrics

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


_POLL_SECONDS = 0.002


class MixedScorer:
    """`scorers` by environment. A completion of an environment without a scorer gets no score."""

    def __init__(self, scorers: Mapping[str, OpenScorer]) -> None:
        self._scorers = dict(scorers)

    def of(self, environment: str) -> OpenScorer | None:
        """The scorer of the environment with this name."""
        return self._scorers.get(environment)

    @property
    def restarts(self) -> int:
        """Reward processes of all environments that were replaced since the run began."""
        return sum(each.restarts for each in self._scorers.values() if isinstance(each, RestartingScorer))

    def score(self, completions: Sequence[tuple[Task, str]]) -> list[Score]:
        """The score of each (task, completion text), in their order."""
        return score_all(self.begin(), completions)

    def begin(self) -> MixedRound:
        """Completions that are scored as they end (scoring.py). One round at a time."""
        return MixedRound(self._scorers)

    def close(self) -> None:
        for scorer in self._scorers.values():
            scorer.close()


class MixedRound(ScoringRound):
    """One round of each scorer. All work at the same time. `times`: the seconds that they were waited for together, and
    the slowest call of all."""

    def __init__(self, scorers: Mapping[str, OpenScorer]) -> None:
        self._scorers = scorers
        self._rounds: dict[str, ScoringRound] = {}
        self._opened = ExitStack()

    def __enter__(self) -> Self:
        with ExitStack() as opened:
            self._rounds = {name: opened.enter_context(begin_round(each)) for name, each in self._scorers.items()}
            self._opened = opened.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._opened.__exit__(kind, error, trace)

    def submit(self, key: Key, task: Task, completion_text: str) -> None:
        if task.environment in self._rounds:
            self._rounds[task.environment].submit(key, own_task(task), completion_text)

    def advance(self) -> None:
        for each in self._rounds.values():
            each.advance()

    def so_far(self) -> dict[Key, Score]:
        return self._named({name: each.so_far() for name, each in self._rounds.items()})

    @property
    def is_done(self) -> bool:
        return all(each.is_done for each in self._rounds.values())

    def finish(self) -> dict[Key, Score]:
        """The scores of all completions whose environments have a scorer."""
        began = time.monotonic()
        while sum(not each.is_done for each in self._rounds.values()) > 1:
            self.advance()
            time.sleep(_POLL_SECONDS)
        scores = self._named({name: each.finish() for name, each in self._rounds.items()})  # at most one waits
        times = RewardTimes(waited=time.monotonic() - began)
        for name, each in self._rounds.items():
            if each.times is not None and each.times.slowest_task:
                own = replace(each.times, waited=0.0, slowest_task=f"{name}/{each.times.slowest_task}")
                times = times.followed_by(own)
        self.times = times
        return scores

    def _named(self, scores: Mapping[str, Mapping[Key, Score]]) -> dict[Key, Score]:
        """The scores of all environments. A failure's text names the section of its environment, if it names one."""
        named: dict[Key, Score] = {}
        for name, of_environment in scores.items():
            for key, score in of_environment.items():
                detail = score.detail or ""
                is_about = score.reward is None and "environment." in detail
                named[key] = replace(score, detail=renamed(detail, name)) if is_about else score
        return named


class MixedDialogues(Dialogues):
    """`members` by environment. It closes them."""

    def __init__(self, members: Mapping[str, Dialogue]) -> None:
        self._members, self.calls = dict(members), Calls()
        scorers = {name: member.scorer for name, member in members.items() if member.scorer is not None}
        self.scorer = MixedScorer(scorers) if scorers else None

    def of(self, task: Task) -> Dialogue:
        return self._members[task.environment]

    def close(self) -> None:
        self.calls.close()
        if self.closes is not None:
            self.closes()
        for member in self._members.values():
            member.close()
