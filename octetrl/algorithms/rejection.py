"""Rejection-sampling fine-tuning: the best of what the policy drew is learnt as if it had been given (SFT).

    of each group: the `best_of_group` siblings of highest reward, those with a reward above `reward_threshold`

With one of a group it is RAFT (arXiv 2304.06767), with all that are right RFT (arXiv 2308.01825); with the reference
answers of a file instead of rollouts, SFT. There is no baseline: it says what was good and never what was bad, so it
needs no ratio, no clip and no reference, and narrows the policy faster than a policy gradient does. Take it to warm up
where rewards are rare, or as the baseline that others must beat.

A sibling that is not learnt from has no advantage (None), and makes no sample: `train/samples` of `rollout/count`.
"""

from __future__ import annotations

from collections.abc import Sequence


def best_of_group(rewards: Sequence[float], best: int, threshold: float) -> list[float | None]:
    """1.0 for the siblings that are learnt from, None for the others. Of equal rewards the first drawn goes first."""
    order = sorted(range(len(rewards)), key=lambda place: -rewards[place])
    kept = {place for place in order[:best] if rewards[place] > threshold}
    return [1.0 if place in kept else None for place in range(len(rewards))]
