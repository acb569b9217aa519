"""Scores answers of mathematics by their value: 1/2, 0.5 and \\frac{1}{2} are one answer (docs/environment_tools.md).

The answer is found in the completion, read (`math_values.py`, with math-verify below it) and compared (`math_equal.py`,
with sympy). A completion without an answer that can be read is wrong and scores 0. A reference that can't be read is an
error in the data: the file is refused when it is read, and the scorer raises an exception. The answer is

    the last \\boxed{...}                       also nested, or not closed at the end
    the line after `environment.answer_marker`   if the recipe has one and there is no box after it
    the text after "the answer is"              in several languages
    the last formula or number                  otherwise

Boxes that only a comma, "and" or "or" separates are one list. Every search takes time linear in the text, so a policy
can't slow the scorer down by a long answer.

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
from functools import cache, lru_cache
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any, TypeVar

from octetrl.environments.math_values import LONGEST, Value, Words, is_plain, plain_characters, read_value, tidied
from octetrl.environments.rewards import extract_answer
from octetrl.environments.scoring import Explained
from octetrl.process.callable_process import CallableProcess
from octetrl.records import Task
from octetrl.system.host import num_cores

_TAIL = 4000  # characters at the end that are searched if there is neither box nor marker

_BOX = re.compile(r"\\(?:boxed|fbox)(?![A-Za-z])\s*")
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)  # \{ is no brace
_BETWEEN_BOXES = re.compile(
    r"[\s$.]*(?:[,;&]|\\q?quad|\\text\{|\b(?:and|or)\b)[\s$,;]*(?:and|or)?[\s$}]*(?:[A-Za-z]\s*=\s*)?"
)

_FORMULA = r"\$\$[^$]+\$\$|(?<!\\)\$[^$\n]+\$|\\\(.{1,400}?\\\)|\\\[.{1,400}?\\\]"
_FRACTION = r"[-−]?\\[dt]?frac\{[^{}]*\}\{[^{}]*\}"
_NUMBER = r"(?<![\w.])[-−+]?(?:\d[\d,]*(?:\.\d+)?|\.\d+)(?:[eE][-+]?\d+)?(?:\s?/\s?\d+)?(?:\s?\\?%)?"
_FORMULA_OR_NUMBER = re.compile(rf"{_FORMULA}|{_FRACTION}|{_NUMBER}", re.DOTALL)

_ANSWER_IS = re.compile(
    r"\b(?:answer|result)(?:\s+(?:is|equals|would be)\b|\**\s*[:=\n])"
    r"|答案\s*(?:是|为|為|:)|答え\s*(?:は|:)|답\s*(?:은|:)|ответ\b\s*(?::|-|—|равен)|\bantwort\s*(?:ist|lautet|:)"
    r"|\b(?:respuesta|réponse|risposta|resposta)(?:\s+final[ea]?)?\s*(?:es\b|est\b|è|é|:)|đáp án\s*(?:là|:)",
    re.IGNORECASE,
)
_END = re.compile(r"[.!?](?=\s|$)|;\s|,\s+(?!and\b|or\b)(?=[^\W\d_]{2})")  # the end of a sentence or clause


Result = TypeVar("Result")
_FORMULAS_PER_PROCESS = 300
_MEMORY = 2 << 30  # bytes that an answer may take
_AGAIN = 0.05  # seconds of processor time from one signal to the next, as libraries may catch the first exception
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
        answer = final_answer(completion_text, self.answer_marker)
        if answer is None or len(answer) > LONGEST:
            return 0.0
        try:
            return float(self._is_right(reference, task.answer, answer))
        except _TooHardError as error:
            _too_hard.append(answer)
            return Explained(0.0, f"the answer is too hard to evaluate ({error})")

    def answered(self, task: Task, completion_text: str) -> str | None:
        """The answer: the same text for equal ones, such as 5.4 and 27/5."""
        answer = final_answer(completion_text, self.answer_marker)
        if answer is None or len(answer) > LONGEST or answer in _too_hard:
            return None if answer is None else answer[:LONGEST]
        vote = _comparison().vote
        try:
            return _bounded(lambda: answer if (value := _read(answer)) is None else vote(value), self.cpu_seconds)
        except _TooHardError:
            return answer

    def _is_right(self, reference: Value, written: str, answer: str) -> bool:
        if isinstance(reference, Words) and len(reference.words) == 1 and (option := _OPTION.fullmatch(tidied(answer))):
            return option[1].lower() == reference.words
        if tidied(answer) == tidied(last_box(written) or written):
            return True
        equal, tolerance = _comparison().equal, Fraction(self.tolerance).limit_denominator(10**15)
        return _bounded(
            lambda: (value := _read(answer)) is not None and equal(reference, value, tolerance), self.cpu_seconds
        )

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        _comparison().vote(read_value("$\\frac{x}{2}+1$") or Words(""))  # imports before the calls with a limit


@cache
def _comparison() -> ModuleType:
    """`math_equal`, which takes 0.4 s to import with sympy: only processes that compare answers do."""
    from octetrl.environments import math_equal

    return math_equal


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


def final_answer(completion_text: str, marker: str | None) -> str | None:
    """The completion's answer as it stands there; None if there is none.

    marker: `environment.answer_marker`; only the text after it is searched."""
    if marker is not None and not marker.endswith(">"):
        completion_text = completion_text.rstrip().removesuffix(marker)  # nothing follows it
    answer = extract_answer(completion_text, marker)
    if not answer:
        return None
    if (box := last_box(answer)) is not None:
        return box
    if marker is not None:
        return _first_statement(plain_characters(answer[:_TAIL]))
    tail = plain_characters(answer[-_TAIL:]).strip()
    *_, stated = ["", *(match.end() for match in _ANSWER_IS.finditer(tail))]
    if isinstance(stated, int) and (statement := _first_statement(tail[stated:])):
        return statement
    if len(tail.split()) == 1 or not re.search(r"[^\W\d_]{2}", re.sub(r"\\[A-Za-z]+", "", tail)):
        return tail  # nothing but an answer
    *_, last = ["", *_FORMULA_OR_NUMBER.findall(tail)]
    return last or (tail if len(tail) <= 100 else None)


def last_box(text: str) -> str | None:
    """The content of the last box, or of several that form a list; None without a box. Of nested boxes, the outer one.
    A box that is not closed ends with its line."""
    closing: dict[int, int] = {}
    opened: list[int] = []
    for brace in _BRACE.finditer(text):
        if brace[0] == "{":
            opened.append(brace.start())
        elif brace[0] == "}" and opened:
            closing[opened.pop()] = brace.start()
    contents: list[str] = []
    end = 0
    for box in _BOX.finditer(text):
        if box.start() < end:
            continue  # it is inside of the last one
        if box.start() - end > 60 or not _BETWEEN_BOXES.fullmatch(text, end, box.start()):
            contents.clear()  # not in one list with this one
        start = box.end()
        if text[start : start + 1] != "{":  # \boxed 7
            content = re.split(r"\s", text[start : start + 40])[0].rstrip(".,$")
            end = start + len(content)
        elif start in closing:
            content, end = text[start + 1 : closing[start]], closing[start] + 1
        else:
            content, end = text[start + 1 : start + _TAIL].lstrip().partition("\n")[0], start + 1
        contents.append(content)
    return ", ".join(dict.fromkeys(_BOX.sub("", content).strip() for content in contents)) or None


def _first_statement(text: str) -> str | None:
    """The first line of `text` that says something, up to the end of its sentence. A formula may have several lines."""
    rest = text
    while rest := re.sub(r"^[\s*:=_]+", "", rest):
        for opening, closing in (("$$", "$$"), ("\\[", "\\]"), ("\\begin{", "\\end{")):
            if rest.startswith(opening) and (end := rest.find(closing, len(opening))) > 0:
                return rest[:end] + rest[end:].partition("\n")[0]
        line, _, rest = rest.partition("\n")
        if rest and line.rstrip().endswith((":", " is")) and not re.search(r"\d", line):
            continue  # the answer stands on the next line
        for clause in _END.finditer(line):
            statement = line[: clause.start()]
            if re.search(r"[\d$]", statement) and statement.count("$") % 2 == 0:
                return statement
        return line
    return None


@lru_cache(maxsize=256)
def _reference(answer: str) -> Value | None:
    """A value, or a solution that ends with one."""
    if (box := last_box(answer)) is not None:
        return read_value(box)
    value = read_value(answer)
    if value is None and len(answer) > 40 and (last := final_answer(answer, None)) is not None:
        return read_value(last)
    return value


@lru_cache(maxsize=64)
def _read(answer: str) -> Value | None:
    return read_value(answer)


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
    handler = signal.signal(signal.SIGPROF, _stop)
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    if sys.platform == "linux":
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        finite = [limit for limit in (soft, hard) if limit != resource.RLIM_INFINITY]
        resource.setrlimit(resource.RLIMIT_AS, (min([used + _MEMORY, *finite]), hard))
    try:
        signal.setitimer(signal.ITIMER_PROF, cpu_seconds, _AGAIN)
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0.0)
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0.0)  # the signal may have come just before the line above
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
        signal.signal(signal.SIGPROF, handler)


def _stop(number: int, frame: FrameType | None) -> None:
    raise _OutOfTime
