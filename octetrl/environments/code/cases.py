"""The tests of a task, in one of three forms, and the code of a completion.

A row of the file is {"prompt": ..., "tests": [...]}, where each test is

    "assert add(1, 2) == 3"                        statements, as many as a text holds; they may import and define
    {"args": [1, 2], "expected": 3}                a call of the row's "function": an expression such as "add" or
                                                   "Solution().add"; "kwargs" if wanted
    {"stdin": "1 2\\n", "stdout": "3\\n"}            a whole program

all of one form in a row. Asserts of a function that is named like a builtin need "function" too. Expected values are
compared as JSON has them: a tuple is a list, floats are equal to nine digits. Expected output is compared line by line,
without white space at the ends of lines and of the text.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from octetrl.config.errors import UserError
from octetrl.records import Task

Form = Literal["asserts", "calls", "programs"]
_KEYS: dict[Form, tuple[set[str], set[str]]] = {  # required, allowed
    "calls": ({"args", "expected"}, {"args", "kwargs", "expected"}),
    "programs": ({"stdin", "stdout"}, {"stdin", "stdout"}),
}
_BLOCK = re.compile(r"^[ \t]*```[ \t]*(\w*)[^\n]*\n(.*?)(?:^[ \t]*```[ \t]*$|\Z)", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True, slots=True)
class TaskTests:
    form: Form
    cases: tuple[Any, ...]
    function: str | None = None  # what calls call; of asserts: what is the code's although a builtin has that name


def last_python_block(completion_text: str) -> str | None:
    """The code in the last ```python block; one that is not closed ends with the text. None: there is no such block."""
    code = None
    for block in _BLOCK.finditer(completion_text):
        if block[1].lower() in ("python", "python3", "py"):
            code = block[2]
    return code


def read_tests(task: Task) -> TaskTests:
    """Raises UserError, naming the task, for tests that are missing or in no form."""
    where, given = f"task '{task.id}'", task.metadata.get("tests")
    given = [given] if isinstance(given, str) else given
    if not isinstance(given, list) or not given:
        raise UserError(f"{where}: 'tests' is missing or empty; it must be a list of asserts, calls or programs")
    forms = {_form(case, f"{where}, test {number}") for number, case in enumerate(given, 1)}
    if len(forms) > 1:
        raise UserError(f"{where}: its tests are {' and '.join(sorted(forms))}; they must be of one form")
    form, function = forms.pop(), task.metadata.get("function")
    is_needed = form == "calls" or function is not None
    if is_needed and (not isinstance(function, str) or not _parses(function, "eval")):
        raise UserError(f"{where}: 'function' is {function!r}; name what its tests call, such as \"add\"")
    return TaskTests(form, tuple(given), function)


def _form(case: object, where: str) -> Form:
    if isinstance(case, str):
        if not _parses(case, "exec"):
            raise UserError(f"{where}: {case[:60]!r} is no Python")
        return "asserts"
    if isinstance(case, Mapping):
        for form, (required, allowed) in _KEYS.items():
            if required <= case.keys() <= allowed:
                if form == "programs" and not all(isinstance(text, str) for text in case.values()):
                    raise UserError(f"{where}: 'stdin' and 'stdout' must be texts")
                if form == "calls" and not isinstance(case["args"], list):
                    raise UserError(f"{where}: 'args' must be a list")
                return form
    raise UserError(
        f'{where}: {str(case)[:60]} is no test; it must be a text of asserts, {{"args", "expected"}} or'
        ' {"stdin", "stdout"}'
    )


def _parses(source: str, mode: str) -> bool:
    try:
        compile(source, "test", mode, ast.PyCF_ONLY_AST)
    except (SyntaxError, ValueError):
        return False
    return True


def same_output(given: str, expected: str) -> bool:
    return _lines(given) == _lines(expected)


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.strip("\n").rstrip().split("\n")]
