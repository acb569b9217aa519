"""Scores completions by a function that only this process has: a notebook's function, a lambda, a closure.

The interface and the statuses are those of `RewardWorkers` (scoring.py), without processes. Each call has a thread of
its own and a time limit (turns/calls.py). Disadvantages, compared with a reward in a module:

- A call that hangs becomes `reward_timeout`, but it cannot be ended. Its thread continues, and if it computes, it slows
  the run down until the process ends.
- Memory has no limit of its own. Code that crashes the interpreter ends the run.
- The functions share Python's lock with the run, so long computations slow the run down.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence

from octetrl.environments.base import Scorer
from octetrl.environments.score import CheckedScorer, Score
from octetrl.environments.scoring_round import RewardTimes, TimeoutBudget
from octetrl.environments.turns.calls import CallResult, Calls
from octetrl.records import RolloutStatus, Task

_POLL_SECONDS = 1.0


class FunctionRewards:
    """Calls `scorer` in at most `at_once` threads of this process; `timeout_seconds` is the limit of one call.
    gives_up: if the first calls of a step all time out, the others are not called."""

    def __init__(self, scorer: Scorer, *, timeout_seconds: float, at_once: int = 1, gives_up: bool = True) -> None:
        self._scorer = CheckedScorer(scorer)
        self._timeout, self._at_once, self._gives_up = timeout_seconds, at_once, gives_up
        self.times = RewardTimes()
        self._calls = Calls()

    def score(self, completions: Sequence[tuple[Task, str]]) -> list[Score]:
        """The score of each (task, completion text), in their order."""
        scores: dict[int, Score] = {}
        queue = deque(enumerate(completions))
        places: dict[int, int] = {}  # by ticket
        budget, began = TimeoutBudget(self._at_once), time.monotonic()
        try:
            while queue or places:
                while queue and len(places) < self._at_once:
                    place, arguments = queue.popleft()
                    places[self._calls.start(self._scorer, arguments, seconds=self._timeout)] = place
                for ticket, called in self._calls.poll(_POLL_SECONDS):
                    scores[places.pop(ticket)] = self._score(called)
                    budget.ended(timed_out=called.timed_out)
                if self._gives_up and budget.is_over:
                    given_up = Score(RolloutStatus.REWARD_TIMEOUT, None, budget.reason)
                    scores |= {place: given_up for place, _ in queue}
                    queue.clear()
        finally:
            self._calls.forget()  # interrupted: the answers are no longer needed
            self.times.waited += time.monotonic() - began
        return [scores[place] for place in range(len(completions))]

    def close(self) -> None:
        """Stop waiting for calls. Threads of calls that hang continue; their results are dropped."""
        self._calls.close()

    def _score(self, called: CallResult) -> Score:
        if called.timed_out:
            text = (
                f"no reward after {self._timeout:g} s; its thread still runs; raise environment.reward_timeout_seconds"
            )
            return Score(RolloutStatus.REWARD_TIMEOUT, None, text)
        if called.error is not None:
            out_of_memory = called.error.startswith("MemoryError")
            status = RolloutStatus.REWARD_MEMORY if out_of_memory else RolloutStatus.REWARD_ERROR
            return Score(status, None, called.error, called.trace)
        reward, answered, detail = called.value
        return Score(RolloutStatus.SCORED, reward, detail, answered=answered)
