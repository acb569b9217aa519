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
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from octetrl.config.errors import UserError
from octetrl.records import Task

Form = Literal["asserts", "calls", "programs"]
_KEYS: dict[Form, tuple[set[str], set[str]]] = {  # required and allowed keys
    "calls": ({"args", "expected"}, {"args", "kwargs", "expected"}),
    "programs": ({"stdin", "stdout"}, {"stdin", "stdout"}),
}
_FENCE, _BLANKS = "```", " \t\r"
_LONGEST_ECHO = 60  # letters of a test or a name, in a message


@dataclass(frozen=True, slots=True)
class TaskTests:
    form: Form
    cases: tuple[Any, ...]
    function: str | None = None  # the function to call; for asserts: a name of the code that is also a builtin's


def last_python_block(completion_text: str) -> str | None:
    """The code in the last ```python block, or None. A block that is not closed ends with the text."""
    code: str | None = None
    block: list[str] | None = None  # the lines of the one that is open; each line is looked at once, however long
    is_python = False
    *lines, rest = completion_text.split("\n")
    for line in lines:
        words = line.strip(_BLANKS)
        if block is not None and words != _FENCE:
            block.append(line + "\n")
        elif block is not None:
            code, block = "".join(block) if is_python else code, None
        elif words.startswith(_FENCE):
            block, is_python = [], _language(words) in ("python", "python3", "py")
    if block is not None and is_python:
        code = "".join(block) + (rest if rest.strip(_BLANKS) != _FENCE else "")
    return code


def _language(words: str) -> str:
    """The language named by a line that opens a block."""
    found = re.match(r"\w*", words.removeprefix(_FENCE).lstrip(_BLANKS))
    return "" if found is None else found[0].lower()


def read_tests(task: Task) -> TaskTests:
    """Raises UserError, naming the task, if the tests are missing or have none of the three forms."""
    where, given = f"task '{task.id}'", task.metadata.get("tests")
    given = [given] if isinstance(given, str) else given
    if not isinstance(given, list) or not given:
        raise UserError(f"{where}: 'tests' is missing or empty; it must be a list of asserts, calls or programs")
    given = [_without_padding(case) for case in given]
    forms = {_form(case, f"{where}, test {number}") for number, case in enumerate(given, 1)}
    if len(forms) > 1:
        raise UserError(f"{where}: its tests are {' and '.join(sorted(forms))}; they must be of one form")
    form, function = forms.pop(), task.metadata.get("function")
    is_needed = form == "calls" or function is not None
    if is_needed and (not isinstance(function, str) or _fault(function, "eval")):
        raise UserError(f"{where}: 'function' is {_echo(function)}; name what its tests call, such as \"add\"")
    return TaskTests(form, tuple(given), function)


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


def same_output(given: str, expected: str) -> bool:
    return _lines(given) == _lines(expected)


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.strip("\n").rstrip().split("\n")]
