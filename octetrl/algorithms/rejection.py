"""Rejection-sampling fine-tuning: SFT on the best answers that the policy sampled.

    of each group: the `best_of_group` siblings with the highest rewards, if their reward exceeds `reward_threshold`

With the best one of each group it is RAFT (arXiv 2304.06767); with all correct ones it is RFT (arXiv 2308.01825). There
is no baseline. The objective raises good answers and never lowers bad ones, so it needs no ratio, no clip and no
reference. It narrows the policy faster than a policy gradient does. Use it to warm up if rewards are rare, or as the
baseline that other objectives must beat.

A sibling that is not trained on has the advantage None and makes no sample. Compare `train/samples` with
`rollout/count`.
"""

from __future__ import annotations

from collections.abc import Sequence


def best_of_group(rewards: Sequence[float], best: int, threshold: float) -> list[float | None]:
    """1.0 for the siblings to train on, None for the others. Of equal rewards the first sampled has precedence."""
    order = sorted(range(len(rewards)), key=lambda place: -rewards[place])
    kept = {place for place in order[:best] if rewards[place] > threshold}
    return [1.0 if place in kept else None for place in range(len(rewards))]
