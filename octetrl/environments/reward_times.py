"""How long rewards take, and how long they may: the time of each call, further processes, and when to give up.

A step waits for rewards if they are slower than sampling. `RewardTimes` measures the wait and keeps the slowest call,
so that a run can say which task is slow. `Growth` says when another process helps. `Patience` gives up when the first
calls of a step all time out: otherwise a score that always hangs would be waited for once per rollout.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from octetrl.system.threads import num_cores

GROW_SECONDS = 0.5  # that calls wait for a free process before the number of processes doubles
LEAST_TRIED = 4  # time-outs in a row, from the first call of a step on, before the others are given up


@dataclass(slots=True)
class RewardTimes:
    """Seconds since the last `take`."""

    waited: float = 0.0  # after sampling had ended
    slowest: float = 0.0  # call
    slowest_task: str = ""
    last: RewardTimes | None = None  # what the last `take` returned

    def called(self, task_id: str, seconds: float) -> None:
        if seconds > self.slowest:
            self.slowest, self.slowest_task = seconds, task_id

    def take(self) -> RewardTimes:
        """What was measured since the last call."""
        self.last = RewardTimes(self.waited, self.slowest, self.slowest_task)
        self.waited, self.slowest, self.slowest_task = 0.0, 0.0, ""
        return self.last


class Growth:
    """The number of processes: `processes` from the start, or None: one, and up to a core each while calls wait."""

    def __init__(self, processes: int | None) -> None:
        self.first = processes or 1
        self._most = processes or num_cores()
        self._waiting_since: float | None = None

    def grows_at(self) -> float | None:
        """When further processes would be started, by the monotonic clock. None: they would not."""
        return None if self._waiting_since is None else self._waiting_since + GROW_SECONDS

    def more(self, waiting: int, processes: int) -> int:
        """How many processes to start now. waiting: calls without a process."""
        if not waiting or processes >= self._most:
            self._waiting_since = None
            return 0
        now = time.monotonic()
        if self._waiting_since is None:
            self._waiting_since = now
        if now - self._waiting_since < GROW_SECONDS:
            return 0
        self._waiting_since = now
        return min(processes, waiting, self._most - processes)


class Patience:
    """Whether the calls of one step are worth waiting for. `tried`: time-outs, all of the first calls, that end it."""

    def __init__(self, tried: int) -> None:
        self._tried = max(tried, LEAST_TRIED)
        self._ended = self._timed_out = 0

    def ended(self, *, timed_out: bool) -> None:
        self._timed_out += timed_out
        self._ended += 1

    @property
    def is_over(self) -> bool:
        return self._ended == self._timed_out >= self._tried

    @property
    def reason(self) -> str:
        return f"not called, because the first {self._timed_out} calls of the step returned nothing in time"
