"""Compares mathematical answers by value, with math-verify: 1/2, 0.5 and \\frac{1}{2} are one answer.

The reference answer is LaTeX or plain (`\\frac{3}{4}`, `12`, `$x^2$`, `\\boxed{7}`). With an answer marker
the text after it is read the same way; without one, math-verify looks for the answer in the whole completion
(a box, then the last formula or number). A completion without an answer that parses is wrong and
scores 0. A reference that does not parse is an error in the data and raises an exception.

math-verify can limit its own time by SIGALRM, but would then return a wrong answer after a timeout. This is switched
off; the reward worker is killed after the recipe's `reward_timeout_seconds` instead.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any

from octetrl.environments.answers import extract_answer
from octetrl.records import Task


@dataclass(frozen=True)
class MathScorer:
    """1.0 if the completion's answer is mathematically equal to `task.answer`, else 0.0."""

    answer_marker: str | None = None

    def __call__(self, task: Task, completion_text: str) -> float:
        math_verify = _math_verify()
        if task.answer is None:
            raise ValueError(f"task '{task.id}' has no answer to compare with")
        reference = _parse_reference(task.answer)
        if not reference:
            raise ValueError(f"task '{task.id}': the answer {task.answer[:40]!r} is not mathematics that parses")
        answer = self._parsed(completion_text)
        return float(bool(answer) and math_verify.verify(list(reference), list(answer), timeout_seconds=None))

    def answered(self, task: Task, completion_text: str) -> str | None:
        """The answer as sympy prints it: 0.5 and \\frac{1}{2} give one text, 2\\sqrt{2} and \\sqrt{8} give two."""
        answer = self._parsed(completion_text)
        return str(answer[0]) if answer else None

    def _parsed(self, completion_text: str) -> tuple[Any, ...]:
        answer = extract_answer(completion_text, self.answer_marker)
        if not answer:
            return ()
        return _parse(answer if self.answer_marker is None else _as_formula(answer))

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        _math_verify()  # in the reward worker: imported before the first call, whose time is limited


@cache
def _math_verify() -> Any:
    """The library: 0.4 s to import, and only reward workers need it."""
    import math_verify

    logging.getLogger("math_verify").setLevel(logging.CRITICAL)  # it warns that its time limits are off
    return math_verify


@lru_cache(maxsize=256)
def _parse_reference(answer: str) -> tuple[Any, ...]:
    return tuple(_math_verify().parse(_as_formula(answer), parsing_timeout=None))


@lru_cache(maxsize=16)
def _parse(text: str) -> tuple[Any, ...]:
    return tuple(_math_verify().parse(text, parsing_timeout=None))


def _as_formula(answer: str) -> str:
    """math-verify reads LaTeX only between dollars or in a box."""
    return answer if "$" in answer or "\\boxed" in answer else f"${answer}$"
