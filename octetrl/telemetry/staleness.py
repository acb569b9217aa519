"""What is said of tokens that earlier weights sampled than those that learn from them (`cluster.max_staleness`).

Their log-probs differ between engine and trainer by the change of the policy. That is no fault of either.
"""

from __future__ import annotations

from collections.abc import Mapping

IN_IT = "Tokens of earlier weights are among them, so the policy's change is in it; it is no fault of the engine."


def stale_share(metrics: Mapping[str, float]) -> float:
    """The share of the sampled tokens that earlier weights than the trainer's sampled. 0 where it is not measured."""
    return 1 - metrics.get("rollout/on_policy_share", 1.0)


def lower_staleness(max_staleness: int) -> str:
    """What makes a mismatch of stale tokens smaller. With 1 the only lower value is 0, which ends the overlap."""
    if max_staleness > 1:
        return "lower cluster.max_staleness or the learning rate"
    return "lower the learning rate; only cluster.max_staleness=0 has no stale tokens, and then nothing overlaps"
