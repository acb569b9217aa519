"""Scores answers of mathematics by their value: 1/2, 0.5 and \\frac{1}{2} are one answer (docs/environment_tools.md).

The answer is found in the completion (`math_text.py`), read (`math_values.py`, with math-verify below it) and compared
(`math_equal.py`; with sympy in `math_trees.py`). A completion without an answer that can be read is wrong and scores 0.
A reference that can't be read is an error in the data: the file is refused when it is read, and the scorer raises an
exception.

A policy may write an answer whose evaluation takes hours or terabytes, such as 9!!!!. It is an answer, and wrong: the
scorer gives up after `cpu_seconds` of computing or `_MEMORY` bytes. It counts processor time, because a right answer
must not become wrong on a busy machine. math-verify's own time limits are off: they count seconds of the clock, and
say "wrong" for them.
"""

from __future__ import annotations

import re
import resource
import signal
import sys
import threading
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

from octetrl.environments.math_equal import equal, vote
from octetrl.environments.math_text import final_answer, last_box
from octetrl.environments.math_values import LONGEST, Value, Words, is_plain, read_value, tidied
from octetrl.environments.score import Explained
from octetrl.process.callable_process import CallableProcess
from octetrl.records import Task
from octetrl.system.threads import num_cores

Result = TypeVar("Result")
_FORMULAS_PER_PROCESS = 300
_MEMORY = 2 << 30  # bytes that an answer may take
_EMPTY_CELLS = ("", "nan", "null", "<na>")
_OPTION = re.compile(
    r"(?i:(?:the )?(?:correct |right )?(?:option|choice|answer)(?: is)?:?)?\s*\(?([A-J]|[a-j])\)?"
    r"(?:[).:]\s+(?!or\b|and\b|\([A-J]\)|[B-J]\b).*|\s+is\b(?!.*\b(?:wrong|incorrect|false|not)\b).*)?",
    re.DOTALL,
)
_too_hard: deque[str] = deque(maxlen=16)  # answers that took too long, so that none does so twice


@dataclass(frozen=True)
class MathScorer:
    """1.0 if the completion's answer equals `task.answer`, else 0.0. tolerance: relative, where a side is a decimal."""

    answer_marker: str | None = None
    tolerance: float = 1e-6
    cpu_seconds: float = 1.0

    def __call__(self, task: Task, completion_text: str) -> float:
        if task.answer is None:
            raise ValueError(f"task '{task.id}' has no answer to compare with")
        reference = _reference(task.answer)
        if reference is None:
            raise ValueError(f"task '{task.id}': the answer {task.answer[:40]!r} can't be read")
        found = final_answer(completion_text, self.answer_marker)
        if found is None or len(found) > LONGEST:
            return 0.0
        try:
            return float(self._is_right(reference, task.answer, found))
        except _TooHardError as error:
            _too_hard.append(found)
            return Explained(0.0, f"the answer is too hard to evaluate ({error})")

    def answered(self, task: Task, completion_text: str) -> str | None:
        """The answer: the same text for equal ones, such as 5.4 and 27/5."""
        found = final_answer(completion_text, self.answer_marker)
        if found is None or len(found) > LONGEST or found in _too_hard:
            return None if found is None else found[:LONGEST]
        try:
            return _bounded(lambda: found if (value := _read(found)) is None else vote(value), self.cpu_seconds)
        except _TooHardError:
            return found

    def _is_right(self, reference: Value, written: str, found: str) -> bool:
        if isinstance(reference, Words) and len(reference.words) == 1 and (option := _OPTION.fullmatch(tidied(found))):
            return option[1].lower() == reference.words
        if tidied(found) == tidied(last_box(written) or written):
            return True
        tolerance = Fraction(self.tolerance).limit_denominator(10**15)
        return _bounded(
            lambda: (value := _read(found)) is not None and equal(reference, value, tolerance), self.cpu_seconds
        )

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        vote(read_value("$\\frac{x}{2}+1$") or Words(""))  # in the reward worker: imports before the limited calls


def reference_problems(answers: Sequence[str | None]) -> list[str | None]:
    """What is wrong with each reference answer; None if it can be compared with.

    Formulas take milliseconds each: if there are many, processes on all cores read them."""
    formulas = list({answer: None for answer in answers if answer is not None and not is_plain(answer)})
    num_parts = min(num_cores(), len(formulas) // _FORMULAS_PER_PROCESS)
    if num_parts > 1:
        with ThreadPoolExecutor(num_parts) as pool:
            parts = pool.map(_read_apart, (formulas[part::num_parts] for part in range(num_parts)))
            unread = {answer for part in parts for answer in part}
    else:
        unread = set(_unreadable(formulas))
    return [_problem(answer, unread) for answer in answers]


def _problem(answer: str | None, unread: Collection[str]) -> str | None:
    if answer is None or answer.strip().lower() in _EMPTY_CELLS:
        return "there is no 'answer' to compare with; give one, or leave the row out"
    if answer not in unread:
        return None
    return f"the 'answer' {answer[:60]!r} can't be read as an answer of mathematics; correct it, or leave the row out"


def _read_apart(answers: list[str]) -> list[str]:
    """`_unreadable`, in a process of its own."""
    process = CallableProcess(_unreadable)
    try:
        unread: list[str] = process.call(answers, seconds=60.0 + len(answers))
    finally:
        process.kill()
    return unread


def _unreadable(answers: Sequence[str]) -> list[str]:
    return [answer for answer in answers if _reference(answer) is None]


@lru_cache(maxsize=256)
def _reference(answer: str) -> Value | None:
    """A value, or a solution that ends with one."""
    if (box := last_box(answer)) is not None:
        return read_value(box)
    value = read_value(answer)
    if value is None and len(answer) > 40 and (found := final_answer(answer, None)) is not None:
        return read_value(found)
    return value


@lru_cache(maxsize=64)
def _read(found: str) -> Value | None:
    return read_value(found)


class _OutOfTime(BaseException):
    """No `Exception`, because math-verify catches those."""


class _TooHardError(Exception):
    """An answer whose evaluation was given up, and why."""


def _bounded(act: Callable[[], Result], cpu_seconds: float) -> Result:
    """The result of `act`. Raises `_TooHardError` if it takes `cpu_seconds` of processor time or `_MEMORY` bytes, or if
    sympy raises."""
    try:
        with _limits(cpu_seconds):
            return act()
    except _OutOfTime:
        raise _TooHardError(f"it takes more than {cpu_seconds:g} s of processor time") from None
    except Exception as error:  # sympy raises many kinds, MemoryError and RecursionError among them
        raise _TooHardError(f"{type(error).__name__}: {' '.join(str(error).split())[:100]}") from error


@contextmanager
def _limits(cpu_seconds: float) -> Iterator[None]:
    """Limits of time and memory. They work only in a process's main thread, where reward workers score."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handler = signal.signal(signal.SIGVTALRM, _stop)
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    if sys.platform == "linux":
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        finite = [one for one in (soft, hard) if one != resource.RLIM_INFINITY]
        resource.setrlimit(resource.RLIMIT_AS, (min([used + _MEMORY, *finite]), hard))
    try:
        signal.setitimer(signal.ITIMER_VIRTUAL, cpu_seconds)
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_VIRTUAL, 0.0)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
        signal.signal(signal.SIGVTALRM, handler)


def _stop(number: int, frame: FrameType | None) -> None:
    raise _OutOfTime
