"""How much one token counts. The loss of an optimizer step is  sum over tokens (weight * loss) / denominator.

    token      weight 1,                      denominator = trained tokens    (DAPO, arXiv 2503.14476)
    sequence   weight 1 / tokens of rollout,  denominator = rollouts          (GRPO as published: each answer the same)
    L          weight 1 / L,                  denominator = rollouts          (Dr.GRPO, arXiv 2503.20783: L a constant,
                                                                              the length of an answer has no effect)

Counts are those of the whole optimizer step, over all micro-batches. The loss does not depend on how samples were
packed. Samples of one rollout (its segments) count as one, so a rollout weighs the same however often its history was
changed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Literal, NamedTuple

TokenWeighting = Literal["token", "sequence"] | int


class Weighting(NamedTuple):
    token_weights: list[float]  # for each sample: the weight of each of its trained tokens
    denominator: float


def weigh(trained_tokens: Sequence[int], weighting: TokenWeighting, rollouts: Sequence[int | None] = ()) -> Weighting:
    """Weights and denominator of one optimizer step.

    trained_tokens: the count of each sample, at least 1. rollouts: the number of each sample's rollout; None: it is one
    of its own. Empty: all are.
    """
    assert trained_tokens and min(trained_tokens) > 0, "samples without trained tokens must be left out before"
    if weighting == "token":
        return Weighting([1.0] * len(trained_tokens), float(sum(trained_tokens)))
    keys = [-place - 1 if one is None else one for place, one in enumerate(rollouts or [None] * len(trained_tokens))]
    of_rollout = Counter[int]()
    for key, count in zip(keys, trained_tokens, strict=True):
        of_rollout[key] += count
    if isinstance(weighting, int):
        return Weighting([1.0 / weighting] * len(trained_tokens), float(len(of_rollout)))
    return Weighting([1.0 / of_rollout[key] for key in keys], float(len(of_rollout)))
