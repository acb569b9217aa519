"""The time that a step waits for rewards, and a warning that names the slowest task."""

from __future__ import annotations

from collections.abc import Mapping

from octetrl.config.several_environments import section_name
from octetrl.environments.mixed.scorer import MixedTimes
from octetrl.environments.reward_times import RewardTimes
from octetrl.environments.scoring_round import TimedScorer
from octetrl.environments.turns.dialogue import Dialogues

SHARE, SECONDS = 0.5, 1.0  # of the step, and at least, that are worth a warning


class SlowRewards:
    """Warns once a run, if a step waits for rewards for more than half of its time."""

    def __init__(self, rewards: object) -> None:
        self._times = _times_of(rewards)
        self._has_warned = False

    def warning(self, step: int, metrics: Mapping[str, float]) -> str | None:
        """metrics: of the step, with `time/reward`."""
        waited, whole = metrics.get("time/reward", 0.0), metrics.get("time/step", 0.0)
        waited = min(waited, metrics.get("time/wait_for_batch", waited))  # a batch ahead: the step learnt meanwhile
        if self._has_warned or waited < SECONDS or waited < SHARE * whole:
            return None
        self._has_warned = True
        said = f"step {step}: {waited:.1f} of {whole:.1f} s were spent waiting for rewards"
        last = None if self._times is None else self._times.last
        slowest = 0.0 if last is None else last.slowest
        crashed, replaced = metrics.get("rollout/reward_crash", 0.0), metrics.get("rollout/reward_restarts", 0.0)
        if crashed and slowest < SHARE * waited:
            restarts = f", in which {replaced:.0f} reward processes were replaced" if replaced else ""
            return (
                f"{said}{restarts} ({crashed:.0f} reward_crash: the score ended its process);"
                f" rollouts/step_{step:06d}.jsonl says why"
            )
        section = "environment"
        if last is not None and last.slowest_task:
            said += f" (the slowest call, {slowest:.1f} s, was task '{last.slowest_task}')"
        if isinstance(self._times, MixedTimes):
            name = last.slowest_task.partition("/")[0] if last is not None else ""
            section = section_name(name or "NAME")
        return f"{said}; make the score faster, or raise {section}.reward_workers"


def _times_of(rewards: object) -> RewardTimes | None:
    scorer = rewards.scorer if isinstance(rewards, Dialogues) else rewards
    return scorer.times if isinstance(scorer, TimedScorer) else None
