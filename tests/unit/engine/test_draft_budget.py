"""Numbers of drafts by estimated chances and measured times, when drafts are made at all, what speculation measures,
and which sizes of decode batch are captured. The graphs are under test on a GPU (test_rollout_forward.py)."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from octetrl.config.schema import SpeculationConfig
from octetrl.engine import speculation
from octetrl.engine.draft_budget import (
    FIRST_PAUSE,
    REFERENCE_AGE,
    REFERENCES,
    TRIAL,
    WINDOW,
    DraftBudget,
    DraftLosses,
    DraftSwitch,
    ForwardTimes,
)
from octetrl.engine.forward_graphs import padded_batch, padded_drafts
from octetrl.engine.request import Step
from octetrl.engine.speculation import Speculator
from octetrl.engine.transcript import Batch

ROWS, EPOCHS = np.array([3, 1, 4]), np.array([0, 2, 0])


def budget(times: ForwardTimes, *, drafts: int = 4, rows: int = 64, padded: object = lambda rows: rows) -> DraftBudget:
    return DraftBudget(drafts, rows, padded, times)  # type: ignore[arg-type]


def noted(one: DraftBudget, chances: tuple[float, ...], forwards: int = 60) -> DraftBudget:
    """A budget that has seen sequences with these chances."""
    draw = random.Random(0)
    for _ in range(forwards):
        right = [next(n for n in range(5) if n == 4 or draw.random() >= chance) for chance in chances]
        one.note(ROWS, EPOCHS, np.array([4, 4, 4]), np.array(right))
    return one


def test_the_numbers_are_the_best_of_all() -> None:
    times = ForwardTimes()
    for rows, seconds in ((3, 4.0), (6, 4.4), (10, 4.9), (15, 8.0)):
        times.add(rows, seconds)
    one = noted(budget(times), (0.9, 0.5, 0.1))
    chance_B = one.chance(ROWS, EPOCHS)
    assert chance_B.tolist() == pytest.approx([0.9, 0.5, 0.1], abs=0.2)

    def rate(counts: tuple[int, ...]) -> float:
        tokens = sum(1 + sum(c**n for n in range(1, k + 1)) for c, k in zip(chance_B, counts, strict=True))
        return tokens / float(times.seconds(np.array([3 + sum(counts)]))[0])

    best = max(itertools.product(range(5), repeat=3), key=rate)
    assert tuple(one.drafts(ROWS, EPOCHS, 0)) == best
    assert best[0] == 4 > best[1] >= best[2] and sum(best) > 4


def test_drafts_that_are_never_right_are_not_made_but_in_a_trial() -> None:
    times = ForwardTimes()
    times.add(3, 1.0)
    times.add(6, 1.5)
    one = noted(budget(times), (0.0, 0.0, 0.0))
    assert one.drafts(ROWS, EPOCHS, 0) == [0, 0, 0]
    assert one.drafts(ROWS, EPOCHS, 1) == [1, 1, 1]
    assert noted(budget(times, rows=5), (0.0, 0.0, 0.0)).drafts(ROWS, EPOCHS, 1) == [0, 0, 0]


def test_a_row_of_another_sequence_begins_with_the_chance_of_all() -> None:
    one = noted(budget(ForwardTimes()), (0.9, 0.9, 0.0))
    earlier = one.chance(ROWS, EPOCHS)
    later = one.chance(ROWS, EPOCHS + np.array([0, 0, 1]))
    assert earlier[2] < 0.2 < 0.4 < later[2] < earlier[0] == later[0]


@pytest.mark.parametrize("chance", [0.3, 0.6, 0.95])
def test_the_rows_of_a_captured_size_are_all_used(chance: float) -> None:
    one = noted(budget(ForwardTimes(), drafts=8, padded=lambda rows: padded_drafts(rows, 64)), (chance,) * 3)
    used = 3 + sum(one.drafts(ROWS, EPOCHS, 0))
    assert used in {padded_drafts(rows, 64) for rows in range(3, 28)} | {27}
    assert budget(ForwardTimes(), rows=3).drafts(np.arange(3), EPOCHS, 1) == [0, 0, 0], "no place is free"


def test_times_between_and_beyond_what_was_measured() -> None:
    times = ForwardTimes()
    assert times.seconds(np.array([1]))[0] < times.seconds(np.array([2]))[0]
    for seconds in (4.0, 9.0, 4.0):
        times.add(8, seconds)
    times.add(16, 6.0)
    times.add(32, 5.0)  # noise: never less than with fewer rows
    assert times.seconds(np.array([2, 8, 12, 32])).tolist() == [4.0, 4.0, 5.0, 6.0]
    assert times.seconds(np.array([64]))[0] > 6.0


def losses(with_drafts: float, tokens: float, forwards: int, size: int = 1) -> tuple[float, int]:
    """Time for each token, relative to never drafting, and forwards with drafts. Plain ones take 1 s."""
    switch, spent, made, num_drafted = DraftSwitch(0.02, DraftLosses()), 0.0, 0.0, 0
    for _ in range(forwards):
        if switch.is_on(size):
            switch.count_drafted(size, with_drafts, tokens)
            spent, made, num_drafted = spent + with_drafts, made + tokens, num_drafted + 1
        else:
            switch.count_plain(size, 1.0)
            spent, made = spent + 1, made + 1
    return spent / made, num_drafted


def test_drafts_that_do_not_pay_cost_less_than_two_percent() -> None:
    slower, num_drafted = losses(1.25, 1.0, 1000)
    assert slower < 1.01 and 2 * TRIAL <= num_drafted <= 4 * TRIAL
    assert losses(1.25, 1.0, REFERENCES + TRIAL + FIRST_PAUSE)[0] < 1.02
    assert losses(1.5, 1.6, 5000)[0] < 0.95


@pytest.mark.parametrize(("size", "with_drafts", "trial"), [(1, 1.18, TRIAL), (8, 1.5, 2), (64, 3.0, 1)])
def test_a_trial_without_a_right_draft_ends_early(size: int, with_drafts: float, trial: int) -> None:
    """In a short answer, too, drafts cost less than two percent."""
    assert losses(with_drafts, 1.0, 256, size)[0] < 1 / 0.98
    assert losses(with_drafts, 1.0, REFERENCES + FIRST_PAUSE, size)[1] == trial
    assert losses(with_drafts, 1.01, REFERENCES + FIRST_PAUSE, size)[1] == TRIAL


def test_drafts_that_pay_are_made_and_compared_from_time_to_time() -> None:
    faster, num_drafted = losses(1.2, 2.0, 4000)
    assert faster < 0.62 and num_drafted > 0.97 * 4000
    assert 4000 - num_drafted >= REFERENCES * (4000 // (REFERENCE_AGE + REFERENCES))


def test_another_size_of_batch_is_measured_anew() -> None:
    switch = DraftSwitch(0.02, DraftLosses())
    for _ in range(REFERENCES):
        assert not switch.is_on(16)
        switch.count_plain(16, 2.0)
    assert switch.is_on(16) and switch.in_trial and not switch.is_on(8)
    for _ in range(TRIAL):
        switch.count_drafted(16, 3.0, 1.2)
    assert not switch.is_on(16)
    for _ in range(REFERENCES):
        switch.count_plain(8, 1.0)
    assert not switch.is_on(8), "a pause goes on"


def test_a_pause_is_short_again_after_drafts_that_paid() -> None:
    switch = DraftSwitch(0.02, DraftLosses())

    def pause() -> int:
        plain = 0
        while not switch.is_on(8):
            switch.count_plain(8, 1.0)
            plain += 1
        return plain

    def fail() -> None:
        while switch.is_on(8):
            switch.count_drafted(8, 1.05, 1.0)

    pause()
    fail()
    assert pause() == FIRST_PAUSE
    fail()
    assert pause() == 2 * FIRST_PAUSE
    for _ in range(WINDOW):
        switch.count_drafted(8, 1.0, 2.0)
    fail()
    assert pause() == FIRST_PAUSE


def ragged_step(losses: DraftLosses, trial_costs: float, tokens: float) -> float:
    """Speed of a rollout whose batch shrinks from 32 to 1, relative to never drafting. The first forward with drafts
    takes `trial_costs` s longer: graphs and tables. Plain forwards take 1 s, those with drafts 1.4 s."""
    switch, spent, made, costs = DraftSwitch(0.03, losses), 0.0, 0.0, trial_costs
    for size in (32, 16, 8, 4, 2, 1):
        for _ in range(30):
            if switch.is_on(size):
                switch.count_drafted(size, 1.4 + costs, tokens, captures=costs > 0)
                spent, made, costs = spent + 1.4 + costs, made + tokens, 0.0
            else:
                switch.count_plain(size, 1.0)
                spent, made = spent + 1, made + 1
    return made / spent


def test_drafts_that_do_not_pay_cost_one_percent_over_many_short_rollouts() -> None:
    losses = DraftLosses()
    speeds = [ragged_step(losses, 40.0, 1.0) for _ in range(100)]
    assert speeds[0] < 0.85 and speeds[1:11] == [1.0] * 10
    assert 0.985 < sum(speeds) / len(speeds) < 0.999, "sometimes another trial is made"


def test_a_costly_beginning_ends_no_trial_and_gains_pay_for_it() -> None:
    losses = DraftLosses()
    assert ragged_step(losses, 10.0, 2.8) > 1.4 and losses.allow_trial
    assert ragged_step(losses, 0.0, 2.8) > 1.5, "at every size"


def test_a_forward_with_a_capture_is_not_judged() -> None:
    switch = DraftSwitch(0.02, DraftLosses())
    for _ in range(REFERENCES):
        switch.count_plain(8, 1.0)
    for _ in range(TRIAL):
        switch.count_drafted(8, 30.0, 1.0, captures=True)
    assert switch.is_on(8)


def test_always() -> None:
    switch = DraftSwitch(0.0, DraftLosses())
    for _ in range(50):
        assert switch.is_on(8) and switch.in_trial
        switch.count_drafted(8, 5.0, 1.0)


# ---------------------------------------------------------------- captured sizes


@given(st.integers(1, 512), st.integers(0, 512))
def test_a_batch_fits_and_is_padded_by_less_than_a_step(num_sequences: int, more: int) -> None:
    size = padded_batch(num_sequences, max_batch=num_sequences + more)
    assert num_sequences <= size <= num_sequences + more
    assert size - num_sequences < max(16, num_sequences / 4 + 1)


def test_few_sizes_serve_all_batches() -> None:
    assert sorted({padded_batch(n, 256) for n in range(1, 257)}) == [
        1, 2, 4, 8, 16, 32, 48, 64, 80, 96, 112, 128, 160, 192, 224, 256,
    ]  # fmt: skip
    assert padded_batch(3, max_batch=3) == 3


# ---------------------------------------------------------------- what is measured


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
        runner: Any = SimpleNamespace(graphs=self.graphs, padded_rows=lambda rows: rows, draft_chunk=1 << 40)
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
