"""The time that a step waits for rewards, and a warning that names the slowest task."""

from __future__ import annotations

from collections.abc import Mapping

from octetrl.environments.reward_times import RewardTimes
from octetrl.environments.turns.dialogue import Dialogues

SHARE, SECONDS = 0.5, 1.0  # of the step, and at least, that are worth a warning


def reward_times(rewards: object) -> dict[str, float]:
    """`time/reward`: seconds that the step waited for rewards after sampling. `time/reward_slowest`: one call.

    Since the last call of this function. Empty for scorers that use the engine's device."""
    times = _times_of(rewards)
    if times is None:
        return {}
    taken = times.take()
    return {"time/reward": taken.waited} | ({"time/reward_slowest": taken.slowest} if taken.slowest else {})


class SlowRewards:
    """Warns once a run, if a step waits for rewards for more than half of its time."""

    def __init__(self, rewards: object) -> None:
        self._times = _times_of(rewards)
        self._has_warned = False

    def warning(self, step: int, metrics: Mapping[str, float]) -> str | None:
        """metrics: of the step, with `reward_times`."""
        waited, whole = metrics.get("time/reward", 0.0), metrics.get("time/step", 0.0)
        if self._has_warned or waited < SECONDS or waited < SHARE * whole:
            return None
        self._has_warned = True
        last = None if self._times is None else self._times.last
        slowest = ""
        if last is not None and last.slowest_task:
            slowest = f" (the slowest call, {last.slowest:.1f} s, was task '{last.slowest_task}')"
        return (
            f"step {step}: {waited:.1f} of {whole:.1f} s were spent waiting for rewards{slowest}; make the score"
            " faster, or raise environment.reward_workers"
        )


def _times_of(rewards: object) -> RewardTimes | None:
    scorer = rewards.scorer if isinstance(rewards, Dialogues) else rewards
    times = getattr(scorer, "times", None)
    return times if isinstance(times, RewardTimes) else None
