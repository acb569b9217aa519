"""The tests of a task, in one of three forms, and the code of a completion.

A row of the file is {"prompt": ..., "tests": [...]}, where each test is

    "assert add(1, 2) == 3"                        statements, as many as a text holds; they may import and define
    {"args": [1, 2], "expected": 3}                a call of the row's "function": an expression such as "add" or
                                                   "Solution().add"; "kwargs" if wanted
    {"stdin": "1 2\\n", "stdout": "3\\n"}            a whole program

all of one form in a row. Asserts of a function that is named like a builtin need "function" too; `names.py` says which
names are the code's. "entry_point" is another word for "function". Expected values are
compared as JSON has them: a tuple is a list, floats are equal to nine digits. Expected output is compared line by line,
without white space at the ends of lines and of the text.
"""

from __future__ import annotations

import ast
import re
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from octetrl.environments.code.names import NO_NAMES, CodeNames, names_of_code
from octetrl.process.judge.judging import never_run
from octetrl.records import Task
from octetrl.system.errors import UserError

Form = Literal["asserts", "calls", "programs"]
_KEYS: dict[Form, tuple[set[str], set[str]]] = {  # required and allowed keys
    "calls": ({"args", "expected"}, {"args", "kwargs", "expected"}),
    "programs": ({"stdin", "stdout"}, {"stdin", "stdout"}),
}
_BLANKS = " \t\r"
_OPENED = re.compile(r"[ \t]*(?:(?:[-*+]|\d{1,9}[.)])[ \t]+)*(?P<fence>`{3,}|~{3,})")  # in a list too
_THOUGHT_ENDS = re.compile(r"^[ \t]*</think>|</think>[ \t\r]*(?=$|```)", re.MULTILINE)
_LONGEST_ECHO = 60  # letters of a test or a name, in a message


@dataclass(frozen=True, slots=True)
class TaskTests:
    form: Form
    cases: tuple[Any, ...]
    function: str | None = None  # the function to call; for asserts: a name of the code that is also a builtin's
    names: CodeNames = NO_NAMES  # which names of the tests are the code's


def last_python_block(completion_text: str) -> str | None:
    """The code in the last closed ```python block after the thought, or None. If no block is closed, the last one ends
    with the text. In a list the code loses the indentation of its block."""
    answer = _after_thought(completion_text)
    closed: list[str] | None = None
    block: list[str] | None = None  # the lines of the one that is open; each line is looked at once, however long
    fence, indent, is_python = "", 0, False
    for line in answer.split("\n"):
        opened = _OPENED.match(line)
        marks = opened["fence"] if opened else ""
        rest = line[opened.end() :].strip(_BLANKS) if opened else ""
        if block is not None and marks[:1] == fence[:1] and len(marks) >= len(fence) and not rest:
            closed, block = (block if is_python else closed), None
        elif opened and "`" not in rest and (block is None or _is_python(rest)):  # the one before was left open
            block, fence, indent, is_python = [], marks, opened.start("fence"), _is_python(rest)
        elif block is not None:
            block.append(line[min(indent, len(line) - len(line.lstrip(" \t"))) :])
    if closed is not None:
        return "".join(line + "\n" for line in closed)
    return "\n".join(block) if block is not None and is_python else None


def _after_thought(text: str) -> str:
    """What follows the thought. A thought starts with the text or was opened by the prompt; one without an end leaves
    nothing. Code may name the tag in a line, so an end that no start belongs to must begin or end a line."""
    if text.lstrip().startswith("<think>"):
        return text.partition("</think>")[2]
    end = _THOUGHT_ENDS.search(text)
    return text if end is None else text[end.end() :]


def _is_python(rest: str) -> bool:
    """rest: of a line that opens a block."""
    found = re.match(r"\w*", rest)
    return found is not None and found[0].lower() in ("python", "python3", "py")


def read_tests(task: Task) -> TaskTests:
    """Raises UserError, naming the task, if the tests are missing, have none of the three forms, or use names that are
    neither theirs nor the code's."""
    where, given = f"task '{task.id}'", task.metadata.get("tests")
    given = [given] if isinstance(given, str) else given
    if not isinstance(given, list) or not given:
        raise UserError(f"{where}: 'tests' is missing or empty; it must be a list of asserts, calls or programs")
    given = [_without_padding(case) for case in given]
    forms = {_form(case, f"{where}, test {number}") for number, case in enumerate(given, 1)}
    if len(forms) > 1:
        raise UserError(f"{where}: its tests are {' and '.join(sorted(forms))}; they must be of one form")
    form, function = forms.pop(), task.metadata.get("function") or task.metadata.get("entry_point")
    is_needed = form == "calls" or function is not None
    if is_needed and (not isinstance(function, str) or _fault(function, "eval")):
        raise UserError(f"{where}: 'function' is {_echo(function)}; name what its tests call, such as \"add\"")
    if form == "programs":
        return TaskTests(form, tuple(given))
    names = names_of_code([case for case in given if isinstance(case, str)], function, task.metadata, task.prompt)
    if names.unbound:
        unbound = ", ".join(sorted(names.unbound))
        remedy = "import or define it there; if the code must define it, say so in the prompt or in 'starter_code'"
        raise UserError(f"{where}: its tests use {_echo(unbound)}, which nothing binds; {remedy}")
    if not names.names:
        raise UserError(f"{where}: its tests use no name of the code, so any code would pass; name it in 'function'")
    if idle := never_run([case for case in given if isinstance(case, str)], function, names.names):
        remedy = (
            "call it there (fixtures and parameters of pytest do not exist); for 'check', name the row's 'function'"
        )
        raise UserError(f"{where}: nothing in its tests runs {_echo(idle)}, so any code would pass it; {remedy}")
    return TaskTests(form, tuple(given), function, names)


def _without_padding(case: object) -> object:
    """A test without the keys of other forms, which Parquet and `datasets` add with null. `expected` may be null."""
    if not isinstance(case, Mapping):
        return case
    kept = {"expected"} if case.get("args") is not None else set()
    return {key: value for key, value in case.items() if value is not None or key in kept}


def _form(case: object, where: str) -> Form:
    if isinstance(case, str):
        if fault := _fault(case, "exec"):
            raise UserError(f"{where}: {_echo(case)} {fault}")
        return "asserts"
    if isinstance(case, Mapping):
        for form, (required, allowed) in _KEYS.items():
            if required <= case.keys() <= allowed:
                if form == "programs" and not all(isinstance(text, str) for text in case.values()):
                    raise UserError(f"{where}: 'stdin' and 'stdout' must be texts")
                if form == "calls" and not isinstance(case["args"], list):
                    raise UserError(f"{where}: 'args' must be a list")
                if form == "calls" and not isinstance(case.get("kwargs", {}), Mapping):
                    raise UserError(f"{where}: 'kwargs' must be a mapping of names to values")
                return form
    raise UserError(
        f'{where}: {str(case)[:_LONGEST_ECHO]} is not a test; it must be a text of asserts, {{"args", "expected"}} or'
        ' {"stdin", "stdout"}'
    )


def _fault(source: str, mode: Literal["exec", "eval"]) -> str | None:
    """The reason why the judge can't compile `source` or read its names; None if it can."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of a comparison with `is`, say: no fault
            ast.parse(source, "test", mode)
            compile(source, "test", mode)
    except (SyntaxError, ValueError):
        return "is not valid Python"
    except (RecursionError, MemoryError):
        return "is nested too deeply for Python's compiler; split it"
    return None


def _echo(value: object) -> str:
    text = repr(value)
    return text if len(text) <= _LONGEST_ECHO else text[:_LONGEST_ECHO] + "..."


def output_bytes(expected: str) -> int:
    """Size of the shortest output that equals the expected one."""
    return len("\n".join(_lines(expected)).encode("utf-8", "surrogatepass"))


def same_output(given: str, expected: str) -> bool:
    return _lines(given) == _lines(expected)


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.strip("\n").rstrip().split("\n")]
