"""Metrics of a step's rollouts: of all, of each environment in a run of several, and of those that failed.

**Failures.** A rollout failed if it was sampled and has no reward: the reward or the environment raised, or exceeded a
time limit. A prompt that is too long is no failure, because nothing was sampled. A wrong answer is no failure, because
it has a reward. Single failures are normal: they are left out of training and counted. If most rollouts fail, the run
would learn from the few others, so it stops (`environment.max_failure_share`). Failures with the same status and type
of error are of the same kind.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from octetrl.records import Rollout, RolloutGroup, RolloutStatus, differ
from octetrl.system.errors import RunFailed

_SHOWN_KINDS = 5
SHARES = {
    "rollout/truncated_share": RolloutStatus.TRUNCATED,
    "rollout/unfinished_share": RolloutStatus.UNFINISHED,
    "rollout/too_long_share": RolloutStatus.PROMPT_TOO_LONG,
}


def rollout_metrics(groups: Sequence[RolloutGroup]) -> dict[str, float]:
    """Compute rewards (over rollouts with a reward), lengths in tokens, and counts of statuses other than success.

    `reward/penalty` is the mean length penalty. `reward/mean` does not include it.
    `reward/mean_error` is the standard error of the mean with groups as independent: siblings have a prompt in common.
    `reward/zero_variance_fraction` is the share of groups whose siblings all got the same reward: they teach nothing.
    Rewards that differ by rounding alone are the same, and groups with a single reward do not count.
    `SHARES` are shares of all rollouts, each of one status. `reward/component/*` are the parts of the rewards,
    unweighted, with their spread and their share of zeros. `environment/*` are metrics of environments.
    """
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    rewards = [reward for group in groups for reward in group.rewards]
    lengths = [rollout.num_tokens for rollout in rollouts if rollout.turns]
    metrics: dict[str, float] = {"rollout/count": len(rollouts), "reward/count": len(rewards)}
    for status in RolloutStatus:
        if status is not RolloutStatus.SCORED:
            metrics[f"rollout/{status.value}"] = sum(rollout.status is status for rollout in rollouts)
    metrics["rollout/failure_share"] = Failures.among(groups).share
    if rollouts:
        for share, status in SHARES.items():
            metrics[share] = metrics[f"rollout/{status.value}"] / len(rollouts)
    if rewards:
        metrics["reward/mean"] = statistics.fmean(rewards)
        metrics["reward/std"] = statistics.pstdev(rewards)
        metrics["reward/penalty"] = statistics.fmean(rollout.penalty for group in groups for rollout in group.scored)
        metrics |= equal_rewards("reward", groups) | _mean_error(groups, metrics["reward/mean"])
    if lengths:
        metrics["rollout/mean_length"] = statistics.fmean(lengths)
        metrics["rollout/max_length"] = max(lengths)
    if any(turn.is_fork for rollout in rollouts for turn in rollout.turns):
        metrics["rollout/segments"] = statistics.fmean(len(rollout.segments) for rollout in rollouts if rollout.turns)
    metrics |= _component_metrics([rollout.components for rollout in rollouts])
    return metrics | _means("environment", [rollout.metrics for rollout in rollouts])


def _mean_error(groups: Sequence[RolloutGroup], mean: float) -> dict[str, float]:
    """From the sums of each group's deviations; nothing of a single group."""
    given = [group.rewards for group in groups if group.rewards]
    if len(given) < 2:
        return {}
    squares = math.fsum(math.fsum(reward - mean for reward in rewards) ** 2 for rewards in given)
    count = sum(map(len, given))
    return {"reward/mean_error": math.sqrt(squares * len(given) / (len(given) - 1)) / count}


def equal_rewards(family: str, groups: Sequence[RolloutGroup]) -> dict[str, float]:
    """`FAMILY/zero_variance_fraction`, if any group has two rewards."""
    several = [group.rewards for group in groups if len(group.rewards) > 1]
    if not several:
        return {}
    return {f"{family}/zero_variance_fraction": statistics.fmean(not differ(rewards) for rewards in several)}


def means_by_name(measured: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Mean of each name's values, over the rollouts that have it."""
    names = dict.fromkeys(name for values in measured for name in values)
    return {name: statistics.fmean(values[name] for values in measured if name in values) for name in names}


def _means(family: str, measured: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """By the names of the step's metrics. A name with a family of its own keeps it."""
    return {name if "/" in name else f"{family}/{name}": mean for name, mean in means_by_name(measured).items()}


def _component_metrics(measured: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Mean, standard deviation and share of zeros of each term of the reward, over the rollouts that have it."""
    metrics = _means("reward/component", measured)
    for name in dict.fromkeys(name for values in measured for name in values):
        values = [one[name] for one in measured if name in one]
        metrics[f"reward/component_std/{name}"] = statistics.pstdev(values)
        metrics[f"reward/component_zeros/{name}"] = values.count(0.0) / len(values)
    return metrics


def by_environment(groups: Sequence[RolloutGroup], names: Collection[str] = ()) -> dict[str, list[RolloutGroup]]:
    """The groups of each environment, in the order of `names`. Empty for a run of a single environment."""
    found: dict[str, list[RolloutGroup]] = {name: [] for name in names}
    for group in groups:
        if group.task.environment:
            found.setdefault(group.task.environment, []).append(group)
    return found


def environment_metrics(groups: Sequence[RolloutGroup], names: Collection[str], right_from: float) -> dict[str, float]:
    """Means over the rollouts of each of `names`; an environment without rollouts has only its share, 0.

    right_from: lowest reward that counts as right (`evaluation.right_from`)."""
    metrics: dict[str, float] = {}
    for name, of_name in by_environment(groups, names).items():
        found = {"share": len(of_name) / len(groups)} if groups else {}
        rollouts = [rollout for group in of_name for rollout in group.rollouts]
        every = [reward for group in of_name for reward in group.rewards]
        if rollouts:
            for status in (RolloutStatus.TRUNCATED, RolloutStatus.UNFINISHED):
                found[f"{status.value}_share"] = statistics.fmean(rollout.status is status for rollout in rollouts)
            found["failure_share"] = Failures.among(of_name).share
        if every:
            found["reward"] = statistics.fmean(every)
            found["accuracy"] = statistics.fmean(reward >= right_from for reward in every)
        metrics |= {f"environments/{name}/{key}": value for key, value in found.items()}
        metrics |= equal_rewards(f"environments/{name}", of_name)
    return metrics


class FailureShareError(RunFailed):
    """More rollouts failed than `environment.max_failure_share` allows."""


@dataclass(frozen=True, slots=True)
class Kind:
    """Failures of one kind."""

    count: int
    first: Rollout


@dataclass(frozen=True, slots=True)
class Failures:
    """Failures among the rollouts of a step or an evaluation."""

    drawn: int  # number of sampled rollouts
    kinds: tuple[Kind, ...] = ()  # the most frequent first

    @classmethod
    def among(cls, groups: Sequence[RolloutGroup]) -> Failures:
        rollouts = [rollout for group in groups for rollout in group.rollouts]
        drawn = [rollout for rollout in rollouts if rollout.status is not RolloutStatus.PROMPT_TOO_LONG]
        first: dict[tuple[str, str], Rollout] = {}
        counts: Counter[tuple[str, str]] = Counter()
        for rollout in drawn:
            if rollout.reward is None:
                kind = (rollout.status.value, (rollout.detail or "").partition(":")[0])
                counts[kind] += 1
                first.setdefault(kind, rollout)
        return cls(len(drawn), tuple(Kind(count, first[kind]) for kind, count in counts.most_common()))

    @property
    def count(self) -> int:
        return sum(kind.count for kind in self.kinds)

    @property
    def share(self) -> float:
        return self.count / self.drawn if self.drawn else 0.0

    def check(self, max_share: float, where: str, field: str = "environment.max_failure_share") -> None:
        """Raise FailureShareError, with the first traceback of each kind, if more than `max_share` failed. field: the
        recipe's field with this limit."""
        if self.share <= max_share:
            return
        head = (
            f"{where}: {self.count} of {self.drawn} rollouts failed in the environment ({self.share:.0%};"
            f" {field} allows {max_share:.0%}); the first failure of each kind:"
        )
        shown = [_summary_of(kind) for kind in self.kinds[:_SHOWN_KINDS]]
        more = len(self.kinds) - len(shown)
        raise FailureShareError("\n\n".join([head, *shown, *([f"and {more} more kinds"] if more else [])]))


def _summary_of(kind: Kind) -> str:
    rollout = kind.first
    headline = f"{kind.count} x {rollout.status}, first in task {rollout.task.id}: {rollout.detail or 'no detail'}"
    lines = (rollout.trace or f"the completion was {rollout.text[:200]!r}").splitlines()
    return "\n".join([headline, *(f"    {line}" for line in lines)])
