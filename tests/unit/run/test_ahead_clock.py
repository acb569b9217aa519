"""`Ahead` by a simulated clock: its two threads really run, but time passes only where a batch is drawn or learnt.

Whenever no thread can go on, the clock jumps to the next end of a draw or an update. At equal times learning comes
first. So each run has one order of events, whatever the machine does.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from octetrl.records import Sample
from octetrl.run.ahead import Ahead, RunEnds

LEARNS, DRAWS = 0, 1  # the two threads


class SimulatedClock:
    """In place of `Ahead._changed`: a lock that lets one thread at a time go on."""

    def __init__(self) -> None:
        self.now = 0.0
        self._lock = threading.Condition(threading.RLock())
        self._waits: dict[int, tuple[float, Callable[[], Any]]] = {}  # until when at most, and for what
        self._goes_on = {LEARNS, DRAWS}
        self._is_stuck = False

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()

    def notify_all(self) -> None:
        """What changed is seen when the next thread is chosen."""

    def sleep(self, seconds: float) -> None:
        with self._lock:
            self._wait(self.now + seconds, lambda: False)

    def wait_for(self, predicate: Callable[[], Any]) -> None:
        with self._lock:
            self._wait(float("inf"), predicate)

    def leave(self) -> None:
        """The thread that draws has ended."""
        with self._lock:
            self._goes_on.discard(DRAWS)
            self._choose()

    def _wait(self, until: float, predicate: Callable[[], Any]) -> None:
        if predicate():
            return
        me = DRAWS if threading.current_thread().name == "produce" else LEARNS
        self._waits[me] = until, predicate
        self._goes_on.discard(me)
        self._choose()
        self._lock.wait_for(lambda: me in self._goes_on or self._is_stuck)
        assert not self._is_stuck, "both threads wait for one another"

    def _choose(self) -> None:
        if self._goes_on or not self._waits:
            return
        ready = [who for who, (_, predicate) in sorted(self._waits.items()) if predicate()]
        soonest = min(self._waits, key=lambda who: (self._waits[who][0], who))
        who = ready[0] if ready else soonest
        until, _ = self._waits.pop(who)
        self._is_stuck = not ready and until == float("inf")
        self.now = self.now if ready else until
        self._goes_on.add(who)
        self._lock.notify_all()


NO_ROLLOUTS: Any = SimpleNamespace(record=lambda *_: {})  # a journal of samples without groups


class Line:
    """A run whose step n takes `draws[n - 1]` and `learns[n - 1]` seconds, and new weights `adopts` to be taken.
    `in_place`: they have no second buffer."""

    def __init__(
        self,
        most: int,
        draws: Sequence[float],
        learns: Sequence[float],
        monkeypatch: pytest.MonkeyPatch,
        adopts: float = 0.0,
        in_place: bool = False,
    ) -> None:
        self.clock, self.drawn, self._in_place = SimulatedClock(), 0, in_place
        self._draws, self._learns, self._adopts = draws, learns, adopts
        self._published = self._engine = 0  # policy versions: sent, and drawn with
        no_place = SimpleNamespace(state=dict)
        cluster = SimpleNamespace(max_staleness=most, weights_in_flight="off")
        self.run: Any = SimpleNamespace(
            config=SimpleNamespace(cluster=cluster, steps=len(draws), checkpoint=SimpleNamespace(every=0)),
            algorithm=SimpleNamespace(keeps=None),
            taskset=no_place,
            rewards=None,
            lengths=no_place,
            collection=SimpleNamespace(at_step=lambda step: step, sampling=SimpleNamespace(temperature=1.0)),
            workers=SimpleNamespace(policy_version=0),
        )
        self._workers: Any = SimpleNamespace(adopt=self._adopt, pause_seconds=0.0)
        self.ahead = Ahead(self.run.config, self._workers)
        self.ahead._changed = self.clock  # type: ignore[assignment]
        produce = self.ahead._produce

        def produce_and_leave(run: Any, first: int) -> None:
            produce(run, first)
            self.clock.leave()

        self.ahead._produce = produce_and_leave  # type: ignore[method-assign]
        monkeypatch.setattr("octetrl.run.ahead.collect_batch", self._collect)
        monkeypatch.setattr("octetrl.run.ahead.trained_rollouts", lambda kept, *_: list(kept))
        monkeypatch.setattr("octetrl.run.ahead.samples_of", lambda trained, *_: list(trained))
        monkeypatch.setattr("octetrl.run.ahead.learn", self._learn)

    def _adopt(self) -> None:
        if self._engine != self._published:
            self.clock.sleep(self._adopts)
            self._engine = self._published

    def _collect(self, *given: Any, check: Any) -> Any:
        step, version = given[-2], self._engine
        self.clock.sleep(self._draws[step - 1])
        self.drawn += 1
        sample = Sample((1,), (True,), (-1.0,), 0.0, version)
        return SimpleNamespace(groups=[sample], kept=[sample], counts={}, measured={}, reward_times=None)

    def _learn(self, run: Any, _: list[Sample], step: int) -> dict[str, float]:
        self.clock.sleep(self._learns[step - 1])
        run.workers.policy_version = self._published = step
        if self._in_place:
            with self._workers.between_batches():
                self._adopt()
        return {}

    def steps(self) -> Iterator[float]:
        """The age of each step's batch."""
        for step in range(1, len(self._draws) + 1):
            yield self.ahead.step(self.run, step, NO_ROLLOUTS).metrics["rollout/staleness"]


def ended(most: int, draws: list[float], learns: list[float], monkeypatch: pytest.MonkeyPatch) -> tuple[float, float]:
    """Seconds of a run, and the largest age of its batches."""
    line = Line(most, draws, learns, monkeypatch)
    ages = list(line.steps())
    line.ahead.close()
    assert line.drawn == len(draws), "a batch for each step, and none more"
    return line.clock.now, max(ages)


def test_steps_of_equal_length_keep_both_sides_busy(monkeypatch: pytest.MonkeyPatch) -> None:
    for most in (1, 2, 4):
        seconds, oldest = ended(most, [3.0] * 40, [3.0] * 40, monkeypatch)
        assert seconds == 3.0 * 41 and 1 <= oldest <= most


def test_a_longer_lead_evens_out_ragged_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    ragged = random.Random(5)
    draws, learns = ([ragged.choice((1.0, 5.0)) for _ in range(200)] for _ in range(2))
    least, in_turns, times = max(sum(draws), sum(learns)), sum(draws) + sum(learns), []
    for most in (1, 2, 4, 8):
        seconds, oldest = ended(most, draws, learns, monkeypatch)
        assert oldest <= most
        times.append(seconds / least)
    assert times == sorted(times, reverse=True) and in_turns / least > 1.8
    assert times[1] < times[0] < 1.45 and times[-1] < 1.15
    for slow in (draws, learns):  # the other side takes a tenth: the slow one never waits for it but once
        tenth = [seconds / 10 for seconds in slow]
        assert ended(2, slow, tenth, monkeypatch)[0] <= sum(slow) + max(tenth)
        assert ended(2, tenth, slow, monkeypatch)[0] <= sum(slow) + max(tenth)


@pytest.mark.parametrize("adopts", [0.0, 0.5, 20.0])
@pytest.mark.parametrize("learns", [0.1, 3.0, 30.0])
def test_with_one_version_ahead_the_clock_changes_no_version(
    adopts: float, learns: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    seconds = []
    for in_place in (False, True):
        line = Line(1, [3.0] * 8, [learns] * 8, monkeypatch, adopts, in_place)
        assert list(line.steps()) == [0.0, *[1.0] * 7]
        line.ahead.close()
        seconds.append(line.clock.now)
    assert 0.0 <= seconds[1] - seconds[0] <= 8 * adopts + 1e-6, "training waits in place for no more than the pauses"


def test_weights_in_place_wait_for_the_end_of_a_batch_and_none_begins_before(monkeypatch: pytest.MonkeyPatch) -> None:
    line = Line(4, [3.0] * 8, [1.0] * 8, monkeypatch, 0.5, in_place=True)
    steps = line.steps()
    assert [next(steps) for _ in range(2)] == [0.0, 1.0]
    assert (line.clock.now, line.drawn) == (3 * 3.0 + 2 * 0.5, 3), "each update waits for a batch, then for the pause"
    line.ahead._ends = True
    line.clock.sleep(100.0)
    line.ahead.close()


def test_a_run_that_ends_early_ends_the_batch_that_is_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    line = Line(2, [1.0, 9.0, 9.0], [1.0] * 3, monkeypatch)
    assert next(line.steps()) == 0.0
    line.ahead._check()
    line.ahead._ends = True
    with pytest.raises(RunEnds):
        line.ahead._check()
    line.clock.sleep(100.0)  # until the thread has seen it
    line.ahead.close()
    assert line.drawn < 3
