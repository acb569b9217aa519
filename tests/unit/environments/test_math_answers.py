"""Answers that are equal as mathematics."""

from __future__ import annotations

import signal

import pytest

from octetrl.environments.math_answers import MathScorer
from octetrl.environments.scoring import RewardWorkers
from octetrl.records import RolloutStatus, Task


def score(answer: str | None, text: str, marker: str | None = None) -> float:
    return MathScorer(marker)(Task(id="t", prompt="?", answer=answer), text)


@pytest.mark.parametrize(
    ("answer", "text", "reward"),
    [
        ("42", "so $42$", 1.0),
        ("1/2", "\\boxed{0.5}", 1.0),
        ("\\frac{1}{2}", "the answer is 0.5", 1.0),
        ("$x^2+1$", "\\boxed{1+x^2}", 1.0),
        ("\\sqrt{2}", "$2^{1/2}$", 1.0),
        ("12,345", "12345", 1.0),
        ("7", "it is 8", 0.0),
        ("7", "", 0.0),
        ("7", "???", 0.0),
    ],
)
def test_the_whole_completion_is_searched_without_a_marker(answer: str, text: str, reward: float) -> None:
    assert score(answer, text) == reward


@pytest.mark.parametrize(
    ("answer", "text", "reward"),
    [("1/2", "#### 0.5", 1.0), ("x^2+1", "#### 1+x^2", 1.0), ("7", "7", 0.0), ("7", "#### 7\n#### 8", 0.0)],
)
def test_with_a_marker_only_the_text_after_it_counts(answer: str, text: str, reward: float) -> None:
    assert score(answer, text, "####") == reward


def test_a_missing_reference_is_an_error() -> None:
    with pytest.raises(ValueError, match="no answer"):
        score(None, "7")


def test_its_own_alarm_is_off_so_that_a_time_out_is_told_from_a_wrong_answer() -> None:
    alarm_is_set = signal.getitimer(signal.ITIMER_REAL)[0] > 0  # by what limits the time of this test
    score("7", "7")
    assert (signal.getitimer(signal.ITIMER_REAL)[0] > 0) == alarm_is_set
    task = Task(id="t", prompt="?", answer="7")
    for seconds, answer, status, reward in (
        (1.0, "$9^{9^{9^{9}}}$", RolloutStatus.REWARD_TIMEOUT, None),
        (60.0, "$7$", RolloutStatus.SCORED, 1.0),
    ):
        with RewardWorkers(MathScorer(), timeout_seconds=seconds) as workers:
            (found,) = workers.score([(task, answer)])
        assert (found.status, found.reward) == (status, reward)
