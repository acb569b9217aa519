"""Metrics of each environment, in a run of several: `environments/NAME/*` of a step's rollouts."""

from __future__ import annotations

import statistics
from collections.abc import Collection, Sequence

from octetrl.records import RolloutGroup, RolloutStatus

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
        rewards = [group.rewards for group in of_name if group.rewards]
        every = [reward for of_group in rewards for reward in of_group]
        if rollouts:
            for share, status in SHARES.items():
                found[share] = statistics.fmean(rollout.status is status for rollout in rollouts)
            found["failure_share"] = statistics.fmean(
                rollout.reward is None and rollout.status is not RolloutStatus.PROMPT_TOO_LONG for rollout in rollouts
            )
        if every:
            found["reward"] = statistics.fmean(every)
            found["accuracy"] = statistics.fmean(reward >= right_from for reward in every)
            found["zero_variance_fraction"] = statistics.fmean(len(set(of_group)) == 1 for of_group in rewards)
        metrics |= {f"environments/{name}/{key}": value for key, value in found.items()}
    return metrics
