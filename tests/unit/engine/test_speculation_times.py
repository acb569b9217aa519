"""What speculation measures: the time between the results of two forwards, noted later, in their order."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from octetrl.config.schema import SpeculationConfig
from octetrl.engine import speculation
from octetrl.engine.draft_budget import DraftBudget, DraftLosses
from octetrl.engine.request import Step
from octetrl.engine.speculation import Speculator
from octetrl.engine.transcript import Batch


class Silent:
    """Proposes nothing, so no forward has drafts although they may be made."""

    def __init__(self) -> None:
        self.losses = DraftLosses()

    def extend(self, sequence: Any, token_ids: Sequence[int]) -> None: ...

    def propose(self, sequence: Any, most: int) -> Sequence[int]:
        return ()

    def index(self) -> None: ...

    def end(self, sequence: Any, *, keeps: bool = True) -> None: ...

    def reset(self) -> None: ...


class Switch:
    """Stands for DraftSwitch: is what `on` says, and lists what it is given."""

    in_trial = False

    def __init__(self) -> None:
        self.on, self.log = False, []

    def is_on(self, size: int) -> bool:
        return self.on

    def count_plain(self, size: int, seconds: float | None) -> None:
        self.log.append(("plain", seconds))

    def count_drafted(self, size: int, seconds: float | None, tokens: float, captures: bool) -> None:
        self.log.append(("drafted", seconds, captures))


class Running:
    """Stands for a sequence with one token."""

    row, prompt_length, limit, token_ids = 0, 1, 9, (1,)

    def length(self, clock: int) -> int:
        return 1


class OneSequence:
    """A speculator, the forwards of one sequence, and a clock. `seconds`: of captured graphs."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.switch, self.graphs = 0.0, Switch(), SimpleNamespace(seconds=0.0)
        monkeypatch.setattr(speculation, "time", SimpleNamespace(perf_counter=lambda: self.now))
        monkeypatch.setattr(speculation, "DraftSwitch", lambda *_: self.switch)
        choose = DraftBudget.drafts
        monkeypatch.setattr(DraftBudget, "drafts", lambda *how: self.switch.log.append("choose") or choose(*how))
        sequence: Any = Running()
        self.batch = Batch((sequence,), np.zeros(1, np.int64), np.zeros(1, np.int64), ())
        transcript: Any = SimpleNamespace(num_added=lambda batch: 1, num_new=lambda batch: [0])
        transcript.since = lambda sequence, first: ([],)
        scheduler: Any = SimpleNamespace(clock=0)
        runner: Any = SimpleNamespace(graphs=self.graphs, padded_rows=lambda rows: rows)
        tally: Any = SimpleNamespace(max_batch=4, count_results=lambda count: None)
        cache: Any = None
        self.drafts = Speculator(SpeculationConfig(name="ngram"), Silent(), transcript, scheduler, runner, cache, tally)

    def plan(self, decode: bool = True) -> None:
        self.drafts.plan(Step(decode=self.batch.sequences if decode else ()), self.batch, False)

    def read(self, now: float) -> None:
        self.now = now
        results: Any = SimpleNamespace(drafts=None, read=lambda: (np.zeros(1, np.int32), np.zeros(1, np.float32)))
        assert len(list(self.drafts.parts(self.batch, results))) == 1

    def noted(self) -> list[Any]:
        """What was noted since the last call, of the results read before now."""
        found, self.switch.log = self.switch.log, []
        return found


def test_times_are_those_of_reading_and_in_their_order(monkeypatch: pytest.MonkeyPatch) -> None:
    one = OneSequence(monkeypatch)
    one.read(1)
    one.read(3)
    one.now = 10
    one.drafts.prepare(one.batch)
    assert one.noted() == [("plain", None), ("plain", 2)]
    one.switch.on = True
    one.plan()
    one.read(12)
    one.plan(decode=False)  # drafts are no longer made when the time is noted
    assert one.noted() == ["choose", ("drafted", 9, False)]


def test_a_prefill_is_in_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was read before it is noted first, or it would be the next one's predecessor."""
    one = OneSequence(monkeypatch)
    one.read(1)
    one.plan(decode=False)
    assert one.noted() == [("plain", None)]
    one.read(5)
    one.read(6)
    one.drafts.prepare(one.batch)
    assert one.noted() == [("plain", None), ("plain", 1)]


def test_what_was_read_is_noted_before_drafts_are_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    one = OneSequence(monkeypatch)
    one.switch.on = True
    one.read(1)
    one.plan()
    assert one.noted() == [("plain", None), "choose"]


def test_time_with_a_capture_is_known_to_have_one(monkeypatch: pytest.MonkeyPatch) -> None:
    one = OneSequence(monkeypatch)
    one.read(1)
    one.graphs.seconds = 0.5
    one.read(3)
    one.read(4)
    one.graphs.seconds = 0.8  # after the results were read
    one.drafts.prepare(one.batch)
    assert one.noted() == [("plain", None), ("plain", None), ("plain", 1)]
    one.switch.on = True
    one.plan()
    one.read(6)
    one.read(7)
    one.drafts.prepare(one.batch)
    assert one.noted()[1:3] == [("drafted", 2, True), ("drafted", 1, False)]
