"""Answers that are equal as mathematics: a table of answers, references and verdicts, and what no table holds."""

from __future__ import annotations

import json
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from octetrl.environments import math_answers
from octetrl.environments.math_answers import MathScorer, reference_problems
from octetrl.environments.reward_workers import RewardWorkers
from octetrl.records import RolloutStatus, Task

TABLE: list[dict[str, Any]] = [
    json.loads(line) for line in (Path(__file__).parent / "math_answers.jsonl").read_text().splitlines()
]
KINDS = sorted({row["kind"] for row in TABLE})


def task(reference: str | None) -> Task:
    return Task(id="t", prompt="?", answer=reference)


def score(reference: str | None, text: str, marker: str | None = None, **settings: float) -> float:
    return MathScorer(marker, **settings)(task(reference), text)


@pytest.mark.parametrize("kind", KINDS)
def test_the_table_of_verdicts(kind: str) -> None:
    """Each row with its own reference, marker and verdict; a `hard` answer would take hours to evaluate."""
    seconds = 0.2 if kind == "hard" else 10.0
    found = [
        (row["reference"], row["answer"], reward)
        for row in TABLE
        if row["kind"] == kind
        and (reward := score(row["reference"], row["answer"], row.get("marker"), cpu_seconds=seconds))
        != float(row["verdict"])
    ]
    assert not found


def test_the_table_has_near_misses_of_each_kind() -> None:
    counts = Counter((row["kind"], row["verdict"]) for row in TABLE)
    assert len(TABLE) >= 300 and counts["gsm8k", True] >= 68
    assert all(counts[kind, False] > 0 and (counts[kind, True] > 0 or kind == "hard") for kind in KINDS)


def test_references_are_read_here_or_in_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    references = [*sorted({row["reference"] for row in TABLE}), None, "???", "\\frac{1", "\\sqrt{2}"]
    expected = [reference in (None, "???", "\\frac{1") for reference in references]
    assert [problem is not None for problem in reference_problems(references)] == expected
    monkeypatch.setattr(math_answers, "_FORMULAS_PER_PROCESS", 10)
    monkeypatch.setattr(math_answers, "num_cores", lambda: 2)
    assert [problem is not None for problem in reference_problems(references)] == expected


@pytest.mark.parametrize(
    ("tolerance", "reference", "answer", "reward"),
    [
        (0.0, "0.333333", "1/3", 0.0),
        (1e-6, "0.333333", "1/3", 1.0),
        (1e-3, "3.14", "\\pi", 1.0),
        (1e-3, "314", "315", 0.0),  # both are exact
        (1e-3, "1e-30", "1.002e-30", 0.0),
        (1e-3, "1.0001x", "x", 1.0),
    ],
)
def test_the_tolerance_is_relative_and_only_for_decimals(
    tolerance: float, reference: str, answer: str, reward: float
) -> None:
    assert score(reference, f"\\boxed{{{answer}}}", tolerance=tolerance) == reward


@pytest.mark.parametrize("reference", [None, "", "  ", "???", "\\frac{1", "\\begin{array}", "$$"])
def test_a_reference_that_cannot_be_read(reference: str | None) -> None:
    assert reference_problems([reference]) != [None]
    with pytest.raises(ValueError, match="answer"):
        score(reference, "7")


@pytest.mark.parametrize(
    "answers",
    [
        ("5.4", "\\boxed{27/5}", "$5.40$", "\\frac{27}{5}"),
        ("x=5", "5", "\\boxed{5}", "5.0", "5 cm"),
        ("2\\sqrt{2}", "$\\sqrt{8}$"),
        ("\\boxed{(x+1)^2}", "$x^2+2x+1$"),
        ("\\{1,2\\}", "\\boxed{2,1}"),
        ("$2^{10}$", "1024"),
        ("\\text{Tuesday}", "\\boxed{tuesday}"),
    ],
)
def test_equal_answers_are_one_vote(answers: tuple[str, ...]) -> None:
    votes = {MathScorer().answered(task("7"), answer) for answer in answers}
    assert len(votes) == 1 and None not in votes


def test_different_answers_are_different_votes() -> None:
    answers = (
        "5",
        "-5",
        "5.5",
        "0.0000001",
        "0.0000002",
        "\\boxed{x}",
        "\\boxed{(1,2)}",
        "\\boxed{(2,1)}",
        "$\\sqrt{2}$",
    )
    assert len({MathScorer().answered(task("7"), answer) for answer in answers}) == len(answers)
    assert MathScorer().answered(task("7"), "") is None


HARD = ("9!!!!", "9^{9^{9^{9}}}", "2^{10^{11}} - 1", "\\tan(10^{10^{10}})", "(" * 300 + "8" + ")" * 300)


def test_an_answer_that_takes_hours_is_wrong_and_no_rollout_is_lost() -> None:
    with RewardWorkers(MathScorer(cpu_seconds=0.2), timeout_seconds=60.0, memory_mib=6000) as workers:
        found = workers.score([(task("7"), f"\\boxed{{{answer}}}") for answer in (*HARD, "7", "9!!!!")])
    assert [(one.status, one.reward) for one in found] == [
        *[(RolloutStatus.SCORED, 0.0)] * len(HARD),
        (RolloutStatus.SCORED, 1.0),
        (RolloutStatus.SCORED, 0.0),
    ]
    assert workers.restarts == 0
    assert found[0].detail is not None and found[len(HARD)].detail is None


def test_a_library_that_catches_the_limit_meets_it_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """As mpmath does, with a bare `except`: what follows would take hours."""

    def read(answer: str) -> None:
        with suppress(BaseException):
            spin()
        spin()

    def spin() -> None:
        end = time.process_time() + 20.0
        while time.process_time() < end:
            pass

    monkeypatch.setattr(math_answers, "_read", read)
    began = time.process_time()
    assert score("7", "\\boxed{8}", cpu_seconds=0.1) == 0.0
    assert time.process_time() - began < 10.0


def test_a_hard_reference_equals_itself() -> None:
    assert score("9!!!!", "\\boxed{9!!!!}") == 1.0


@pytest.mark.parametrize(
    "text",
    (
        *("\\boxed{" * 6000, "\\boxed{8}" * 6000, "$" * 40000, "the answer is " * 4000, "1," * 15000, "\\[" * 15000),
        *("\\boxed{" + "1" * 40000, "\n" * 40000, "(((" * 10000, "*" * 40000),
    ),
)
def test_a_long_answer_costs_little_time(text: str) -> None:
    began = time.process_time()
    assert score("7", text) == 0.0
    assert score("7", f"#### {text}", "####") == 0.0
    assert time.process_time() - began < 2.0
