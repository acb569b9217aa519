"""Numbers of drafts by estimated chances and measured times, and when drafts are made at all."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest

from octetrl.engine.cuda_graphs import padded_drafts
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
