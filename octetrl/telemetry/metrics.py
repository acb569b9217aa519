"""The metrics of a step: a flat mapping from metric name to number.

Names are `family/name` in lower case: `reward/mean`, `time/rollout`, `mismatch/gen_kl`. A few have no
family: `loss`, `grad_norm`, `entropy`. A name includes a unit that is not obvious: `_per_second`, `_gb`. Times are in
seconds.

A metric that was not measured in a step is left out; it is never 0 or NaN instead. A measured value that is not finite
is kept, so that it is visible.

Each source of metrics returns its own small mapping, and `records.joined` joins them. Times with the same name are
added, of peaks of memory the largest counts. Any other name that two sources have is an error, because one value would
be lost.
"""

from __future__ import annotations

from collections.abc import Mapping
from operator import itemgetter

from octetrl.records import RolloutStatus

MISMATCH = "mismatch/token_mult_prob_error"  # mean over tokens of exp(|log-prob of the engine - of the trainer|)
BETWEEN_STEPS = ("time/evaluate", "time/wait_to_evaluate", "time/checkpoint")  # not in time/step

# A person should look at what is above these, in the console's line, the report and docs/metrics.md. The limit of the
# mismatch is a field of the recipe, `mismatch.warn_above`.
TRUNCATED_LIMIT = 0.1  # share of the answers that reach their token limit
UNFINISHED_LIMIT = 0.1  # share of the conversations that run out of turns or context
EQUAL_REWARDS_LIMIT = 0.8  # share of the groups


# What every evaluation measures (telemetry/eval_report.py): of each environment and set, and over all tasks.
OF_A_PART = ("accuracy", "accuracy_low", "accuracy_high", "reward_mean", "tasks", "truncated_share")
OF_ALL = {
    "tokens_per_second",
    *(f"{name}_length" for name in ("mean", "p10", "p50", "p90", "p99", "max")),
    *(status.value for status in RolloutStatus if status is not RolloutStatus.SCORED),
}


def slowest_workers(metrics: Mapping[str, float]) -> dict[str, float]:
    """`time/PHASE/slowest` for each phase of a whole step that has `time/PHASE/worker_N`: the number of its worker."""
    seconds: dict[str, list[tuple[int, float]]] = {}
    for name, value in metrics.items():
        phase, worker, number = name.rpartition("/worker_")
        if worker and phase.startswith("time/"):
            seconds.setdefault(phase, []).append((int(number), value))
    return {f"{phase}/slowest": float(max(each, key=itemgetter(1))[0]) for phase, each in seconds.items()}


# Stale tokens: the trainer's weights are newer than those that sampled them (`cluster.max_staleness`). The change of
# the policy is part of the difference of their log-probs. Errors of engine and trainer may add to it.

STALE_IN_IT = "Earlier weights sampled some of the tokens, so it contains the change of the policy."


def stale_share(metrics: Mapping[str, float]) -> float:
    """The share of the sampled tokens that are stale. 0 where it is not measured."""
    return 1 - metrics.get("rollout/on_policy_share", 1.0)


def lower_staleness(max_staleness: int) -> str:
    """What makes a mismatch of stale tokens smaller. Below 1 there is only 0, which ends the overlap."""
    if max_staleness > 1:
        return "lower cluster.max_staleness or the learning rate"
    return "lower the learning rate, or set cluster.max_staleness=0 to train without stale tokens and without overlap"
