"""The result of an evaluation: estimates with their intervals, lengths, statuses, and the outcome of each task.

    accuracy      share of completions that are right: their reward is at least `evaluation.right_from`
    reward_mean   mean reward
    pass_at_k     one of k is right          (telemetry/sample_estimates.py)
    maj_at_k      the majority of k is right; only if the scorer reports the answers

All are means over tasks, and only completions with a reward count. A completion has no reward if the reward raised or
hung, or if the prompt was too long. It is neither right nor wrong, and is counted by its status. The estimates for k
leave out tasks with fewer than k completions. `Estimate.tasks` is the number of tasks that count.

With several environments or evaluation sets, these are means over all their tasks. Each environment and each set has a
report of its own, and `mean_of_environments` is the plain mean of the environments' accuracies.

Two models are compared task by task, on the tasks for which both have a value.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import Any

import numpy

from octetrl.records import Rollout, RolloutGroup, RolloutStatus
from octetrl.telemetry.rollout_metrics import Failures, by_environment, means_by_name
from octetrl.telemetry.sample_estimates import Estimate, Vote, estimate_mean, majority_at_k, pass_at_k, reward_range

REWARD = "reward_mean"  # the one estimate whose values may have any range
QUANTILES = {"p10": 0.1, "p50": 0.5, "p90": 0.9, "p99": 0.99}


@dataclass(frozen=True)
class Scoring:
    """Settings of the estimates, from the recipe's `evaluation` section."""

    ks: tuple[int, ...] = (1,)
    right_from: float = 1.0
    seed: int = 0


@dataclass(frozen=True, repr=False)
class EvalReport:
    """The result of `evaluate` (run/evaluate.py). `groups` has one group per task."""

    groups: Sequence[RolloutGroup]
    scoring: Scoring
    tokens_per_second: float = 0.0
    step: int = 0  # the checkpoint's; 0: a model that is no checkpoint, or the run's present weights
    sets: Mapping[str, EvalReport] = field(default_factory=dict)  # of each named evaluation set

    def __repr__(self) -> str:
        """The estimates with their intervals, without the groups, which hold every answer."""
        shown = [f"{name}={one.mean:.4g} [{one.low:.4g}, {one.high:.4g}]" for name, one in self.estimates.items()]
        return f"EvalReport({', '.join([f'tasks={self.tasks}', *shown])})"

    @property
    def tasks(self) -> int:
        return len(self.groups)

    @property
    def accuracy(self) -> float | None:
        """Share of right completions. None: no completion has a reward."""
        estimate = self.estimates.get("accuracy")
        return None if estimate is None else estimate.mean

    @cached_property
    def estimates(self) -> dict[str, Estimate]:
        """Estimates by name. One that cannot be computed is left out."""
        seed = self.scoring.seed
        found = {
            name: estimate_mean(
                list(values.values()), seed, reward_range(values.values()) if name == REWARD else (0.0, 1.0)
            )
            for name, values in self.values_by_task.items()
        }
        return {name: estimate for name, estimate in found.items() if estimate is not None}

    @cached_property
    def values_by_task(self) -> dict[str, dict[int, float]]:
        """Values of each estimate, by the position of the task."""
        values: dict[str, dict[int, float]] = {"accuracy": {}, REWARD: {}}
        says_answers = any(rollout.answered is not None for group in self.groups for rollout in group.rollouts)
        for place, group in enumerate(self.groups):
            if not group.rewards:
                continue
            votes = [Vote(rollout.answered, self._is_right(rollout)) for rollout in group.scored]
            right = sum(vote.is_right for vote in votes)
            values["accuracy"][place] = right / len(votes)
            values[REWARD][place] = statistics.fmean(group.rewards)
            for k in self.scoring.ks:
                if k <= len(votes):
                    values.setdefault(f"pass_at_{k}", {})[place] = pass_at_k(len(votes), right, k)
                    if says_answers and k > 1:
                        chance = random.Random(f"majority/{self.scoring.seed}/{place}")
                        values.setdefault(f"maj_at_{k}", {})[place] = majority_at_k(votes, k, chance)
        return values

    @cached_property
    def by_environment(self) -> dict[str, EvalReport]:
        """The report of each environment's tasks. Empty for a single environment."""
        of_each = by_environment(self.groups)
        return {name: EvalReport(groups, self.scoring) for name, groups in of_each.items()}

    @property
    def mean_of_environments(self) -> float | None:
        """The plain mean of the environments' accuracies. None: there is one environment, or no reward in one."""
        found = [report.accuracy for report in self.by_environment.values()]
        known = [accuracy for accuracy in found if accuracy is not None]
        return statistics.fmean(known) if found and len(known) == len(found) else None

    @cached_property
    def counts(self) -> dict[RolloutStatus, int]:
        """Number of completions of each status, zeros included."""
        statuses = [rollout.status for group in self.groups for rollout in group.rollouts]
        return {status: statuses.count(status) for status in RolloutStatus}

    @cached_property
    def lengths(self) -> dict[str, float]:
        """Lengths of rollouts in sampled tokens: mean, quantiles, maximum, and the share of truncated answers."""
        drawn = [rollout for group in self.groups for rollout in group.rollouts if rollout.turns]
        if not drawn:
            return {}
        lengths = numpy.array([rollout.num_tokens for rollout in drawn])
        truncated = sum(rollout.status is RolloutStatus.TRUNCATED for rollout in drawn)
        found = {"mean": float(lengths.mean())}
        found |= {name: float(numpy.quantile(lengths, level)) for name, level in QUANTILES.items()}
        return found | {"max": float(lengths.max()), "truncated_share": truncated / len(drawn)}

    @cached_property
    def failures(self) -> Failures:
        return Failures.among(self.groups)

    @cached_property
    def components(self) -> dict[str, float]:
        """Mean of each term of the reward by name, over the completions that have it."""
        return means_by_name([rollout.components for group in self.groups for rollout in group.rollouts])

    @property
    def parts(self) -> dict[str, EvalReport]:
        """The reports of environments and sets, by the names of their metrics."""
        return {**{f"environments/{name}": one for name, one in self.by_environment.items()}, **self.sets}

    @property
    def numbers(self) -> dict[str, float]:
        """What is measured of each part: estimates, the interval of the accuracy, the number of tasks, the share of
        truncated answers, and the terms of the reward."""
        numbers = {name: estimate.mean for name, estimate in self.estimates.items()} | {"tasks": float(self.tasks)}
        if (accuracy := self.estimates.get("accuracy")) is not None:
            numbers |= {"accuracy_low": accuracy.low, "accuracy_high": accuracy.high}
        numbers |= {name: share for name, share in self.lengths.items() if name == "truncated_share"}
        return numbers | {f"component/{name}": mean for name, mean in self.components.items()}

    @property
    def metrics(self) -> dict[str, float]:
        """Metrics of a step, `eval/*`: numbers, those of each environment, lengths and statuses."""
        numbers = {**self.numbers, "tokens_per_second": self.tokens_per_second}
        for name, report in self.parts.items():
            numbers |= {f"{name}/{key}": value for key, value in report.numbers.items()}
        if self.mean_of_environments is not None:
            numbers["mean_of_environments"] = self.mean_of_environments
        numbers |= {f"{name}_length": length for name, length in self.lengths.items() if name != "truncated_share"}
        numbers |= {status.value: float(count) for status, count in self.counts.items()}
        del numbers[RolloutStatus.SCORED.value]
        return {f"eval/{name}": number for name, number in numbers.items()}

    def as_json(self) -> dict[str, Any]:
        several = {name: report.numbers for name, report in self.by_environment.items()}
        return {
            **({"sets": {name: report.numbers for name, report in self.sets.items()}} if self.sets else {}),
            **({"components": self.components} if self.components else {}),
            **({"environments": several, "mean_of_environments": self.mean_of_environments} if several else {}),
            "step": self.step,
            "tasks": self.tasks,
            "estimates": {name: asdict(estimate) for name, estimate in self.estimates.items()},
            "lengths": self.lengths,
            "statuses": {status.value: count for status, count in self.counts.items()},
            "tokens_per_second": self.tokens_per_second,
            "by_task": [self._task_as_json(group) for group in self.groups],
        }

    def _is_right(self, rollout: Rollout) -> bool:
        return rollout.reward is not None and rollout.reward >= self.scoring.right_from

    def _task_as_json(self, group: RolloutGroup) -> dict[str, Any]:
        rollouts = group.rollouts
        return {
            "id": group.task.id,
            "right": sum(self._is_right(rollout) for rollout in rollouts),
            "rewards": [rollout.reward for rollout in rollouts],
            "answered": [rollout.answered for rollout in rollouts],
            "statuses": [rollout.status.value for rollout in rollouts],
            "lengths": [rollout.num_tokens for rollout in rollouts],
        }


def differences(report: EvalReport, baseline: EvalReport) -> Mapping[str, Estimate]:
    """Estimate `report` minus `baseline`, over the tasks for which both have a value. Both must have the same tasks."""
    prompts = [[group.task.problem for group in compared.groups] for compared in (report, baseline)]
    assert prompts[0] == prompts[1], "compared on different tasks"
    found: dict[str, Estimate] = {}
    for name, values in report.values_by_task.items():
        others = baseline.values_by_task.get(name, {})
        pairs = [value - others[place] for place, value in values.items() if place in others]
        low, high = reward_range(values.values(), others.values()) if name == REWARD else (0.0, 1.0)
        estimate = estimate_mean(pairs, report.scoring.seed, (low - high, high - low))
        if estimate is not None:
            found[name] = estimate
    return found
