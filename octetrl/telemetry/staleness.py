"""Words about stale tokens: the trainer's weights are newer than those that sampled them (`cluster.max_staleness`).

The change of the policy is part of the difference of their log-probs. Errors of engine and trainer may add to it.
"""

from __future__ import annotations

from collections.abc import Mapping

IN_IT = "Earlier weights sampled some of the tokens, so it contains the change of the policy."


def stale_share(metrics: Mapping[str, float]) -> float:
    """The share of the sampled tokens that are stale. 0 where it is not measured."""
    return 1 - metrics.get("rollout/on_policy_share", 1.0)


def lower_staleness(max_staleness: int) -> str:
    """What makes a mismatch of stale tokens smaller. Below 1 there is only 0, which ends the overlap."""
    if max_staleness > 1:
        return "lower cluster.max_staleness or the learning rate"
    return "lower the learning rate, or set cluster.max_staleness=0 to train without stale tokens and without overlap"
