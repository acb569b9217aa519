"""Metrics of each environment, in a run of several: `environments/NAME/*` of a step's rollouts."""

from __future__ import annotations

import statistics
from collections.abc import Collection, Sequence

from octetrl.records import RolloutGroup, RolloutStatus
from octetrl.telemetry.failures import Failures
from octetrl.telemetry.rollouts import equal_rewards

SHARES = {"truncated_share": RolloutStatus.TRUNCATED, "unfinished_share": RolloutStatus.UNFINISHED}


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
            for share, status in SHARES.items():
                found[share] = statistics.fmean(rollout.status is status for rollout in rollouts)
            found["failure_share"] = Failures.among(of_name).share
        if every:
            found["reward"] = statistics.fmean(every)
            found["accuracy"] = statistics.fmean(reward >= right_from for reward in every)
        metrics |= {f"environments/{name}/{key}": value for key, value in found.items()}
        metrics |= equal_rewards(f"environments/{name}", of_name)
    return metrics
