"""The judge's side of a judgement: runs the tests, in a sandbox of its own, and prints the verdict.

Tests run in a namespace that only they write. If they use a name that they do not define, the judge requests it from
the code at its first use. The answer becomes plain data or a stand-in (`remote.py`). A builtin is Python's own, unless
the task says that it is tested. Expected values, asserts and the verdict never leave this process.

stdout has a line when the code has run (`READY`), a line when its first answer is used (`TAKEN`), then the verdict. If
a judge ends between these two lines without a verdict, a test is broken. If it ends before or after them, the code may
be the cause.
"""

from __future__ import annotations

import ast
import builtins
import contextlib
import json
import math
import os
import socket
import sys
from collections.abc import Iterator
from typing import Any

from octetrl.environments.code.link import TEST_FILE, TESTS, BrokenTest, Link, LinkClosed

READY, TAKEN = "ready", "taken"
_NOTHING = object()
_STDOUT, _LINK = 1, 3


class Names(dict[str, Any]):
    """The tests' globals. function: a name that belongs to the code although it is also a builtin's."""

    def __init__(self, link: Link, function: str | None) -> None:
        super().__init__({"__name__": TESTS, "__builtins__": builtins})
        self._link, self._function = link, function

    def __missing__(self, name: str) -> Any:
        if name.startswith("__") or (hasattr(builtins, name) and name != self._function):
            raise KeyError(name)
        value = self[name] = self._link.name(name)
        return value

    def __contains__(self, name: object) -> bool:
        return self.get(name, _NOTHING) is not _NOTHING

    def get(self, name: Any, default: Any = None) -> Any:
        try:
            return self[name]
        except KeyError:
            return default


def judge(end: socket.socket, form: str, cases: list[Any], function: str | None) -> dict[str, Any]:
    """The verdict: passed tests as a text of 0 and 1, and why the first other one fails; or which test is `broken`."""
    texts = [case for case in cases if isinstance(case, str)]
    classes = named_classes([*texts, function or ""])
    # compiled before the code can use memory, so that the code is never the cause of a test that can't be compiled
    programs = [compile(text, f"{TEST_FILE}{number}", "exec") for number, text in enumerate(texts, 1)]
    link = Link(end, classes, lambda: _print(TAKEN))
    names = Names(link, function)
    passed, why = "", None
    try:
        link.wait_until_run()
        _print(READY)
    except LinkClosed:
        return {"passed": "0" * len(cases), "why": "the program ended"}
    except Exception as error:
        return {"passed": "0" * len(cases), "why": f"the code raises {_one_line(error)}"}
    for number, case in enumerate(cases, 1):
        reason = None
        try:
            if form == "asserts":
                exec(programs[number - 1], names)
            else:
                given = eval(str(function), names)(*case["args"], **case.get("kwargs", {}))
                reason = None if alike(given, case["expected"]) else "wrong"
        except BrokenTest as error:
            return {"broken": f"test {number}: {error}"}
        except BaseException as error:
            reason = _one_line(error)
        if link.is_closed:  # even if the test accepts any exception
            why = why or f"test {number}: the program ended"
            break
        passed += "1" if reason is None else "0"
        why = why if reason is None else why or f"test {number}: {reason}"
    return {"passed": passed.ljust(len(cases), "0"), "why": why}


def named_classes(sources: list[str]) -> frozenset[str]:
    """Capitalised names that the tests call or read attributes of and do not define, as in `Point(3)`, `Color.RED`."""
    used: set[str] = set()
    bound: set[str] = set()
    for source in sources:
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.Call | ast.Attribute):
                inner = node.func if isinstance(node, ast.Call) else node.value
                used |= {inner.id} if isinstance(inner, ast.Name) else set()
            bound |= set(_bound(node))
    return frozenset(name for name in used - bound if name.lstrip("_")[:1].isupper() and not hasattr(builtins, name))


def _bound(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
        yield node.id
    elif isinstance(node, ast.FunctionDef | ast.ClassDef | ast.AsyncFunctionDef):
        yield node.name
    elif isinstance(node, ast.alias):
        yield (node.asname or node.name).partition(".")[0]
    elif isinstance(node, ast.arg):
        yield node.arg


def _one_line(error: BaseException) -> str:
    text = " ".join(str(error).split())[:200]
    text = "".join(
        letter if letter.isprintable() else ascii(letter)[1:-1] for letter in text
    )  # it is shown on terminals
    return type(error).__name__ + (f": {text}" if text else "")


def alike(given: Any, expected: Any) -> bool:
    """`expected` is JSON: a tuple counts as a list, a float is equal to nine digits, a key of a dict is a text."""
    if isinstance(given, bool) or isinstance(expected, bool) or given is None or expected is None:
        return given is expected
    if isinstance(given, int | float) and isinstance(expected, int | float):
        if isinstance(given, int) and isinstance(expected, int):
            return given == expected
        return given == expected or math.isclose(given, expected, rel_tol=1e-9)
    if isinstance(expected, list):
        if not isinstance(given, list | tuple) or len(given) != len(expected):
            return False
        return all(alike(one, other) for one, other in zip(given, expected, strict=True))
    if isinstance(expected, dict):
        if not isinstance(given, dict) or len(given) != len(expected):
            return False
        texts = {str(key): value for key, value in given.items()}
        return texts.keys() == expected.keys() and all(alike(texts[key], expected[key]) for key in expected)
    return type(given) is type(expected) and bool(given == expected)


def _print(line: str) -> None:
    """Past whatever the tests make of `sys.stdout`."""
    data = line.encode() + b"\n"
    while data:
        data = data[os.write(_STDOUT, data) :]


def main() -> None:
    order = json.loads(sys.stdin.read())
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere), contextlib.redirect_stderr(nowhere):
        verdict = judge(socket.socket(fileno=_LINK), order["form"], order["cases"], order["function"])
    _print(json.dumps(verdict))
    os._exit(0)  # whatever the tests have left to do


if __name__ == "__main__":
    main()
