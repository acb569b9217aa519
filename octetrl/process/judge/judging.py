"""The judge's side of a judgement: runs the tests, in a sandbox of its own, and prints the verdict.

Tests run in a namespace that only they write. The names that `code_tests.py` found to be the code's are requested
from it at their first use. Each answer becomes plain data or a stand-in (`link.py`). All other names are the tests'
own, Python's own, or unknown. Expected values, asserts and the verdict never leave this process.

The code runs only when the first of its names is requested, so it can't disturb what the tests do before that. stdout
has a line at this moment (`ASKED`), then the verdict. If a judge ends without a verdict and before this line, a test is
broken; if it ends after it, the code may be the cause.
"""

from __future__ import annotations

import ast
import builtins
import contextlib
import importlib
import json
import math
import os
import socket
import sys
import time
import types
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

from octetrl.process.judge.link import TEST_FILE, TESTS, Link, same
from octetrl.process.judge.wire import CLASSES

Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


def added_calls(tree: ast.Module, function: str | None) -> str:
    """The statements that run the tests. function: what `check` gets."""
    called = {node.func.id for node in ast.walk(tree) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)}
    lines: list[str] = []
    for node in tree.body:
        if isinstance(node, ast.FunctionDef) and node.name not in called:
            if node.name == "check" and _wanted(node) == 1 and function:
                lines.append(f"check({function})")
            elif node.name.startswith("test") and _wanted(node) == 0:
                lines.append(f"{node.name}()")
        elif isinstance(node, ast.ClassDef) and node.name not in called and _is_of_pytest(node):
            methods = {method.name: method for method in node.body if isinstance(method, ast.FunctionDef)}
            for name, method in methods.items():
                if name.startswith("test") and _wanted(method) == 1:
                    around = [[of] if of in methods else [] for of in ("setup_method", "teardown_method")]
                    steps = [f"__made.{step}()" for step in (*around[0], name, *around[1])]
                    lines += [f"__made = {node.name}()", *steps]
    return "\n".join(lines)


def never_run(texts: Sequence[str], function: str | None, of_code: frozenset[str]) -> str | None:
    """The name of a definition in one of a task's tests that would test the code, and that nothing runs."""
    trees = [ast.parse(text) for text in texts]
    trees += [ast.parse(added_calls(tree, function)) for tree in trees]
    named = {node.id for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Name)}
    for node in (node for tree in trees for node in _definitions(tree)):
        inside = [*ast.walk(node)]
        asserts = any(isinstance(part, ast.Assert) for part in inside)
        used = {part.id for part in inside if isinstance(part, ast.Name)}
        is_case = isinstance(node, ast.ClassDef) and node.bases
        is_test = node.name.startswith(("test", "check")) or used & of_code
        for test in node.body if isinstance(node, ast.ClassDef) and _is_of_pytest(node) else ():
            is_run = isinstance(test, ast.FunctionDef) and _wanted(test) == 1
            if isinstance(test, ast.FunctionDef | ast.AsyncFunctionDef) and test.name.startswith("test") and not is_run:
                return f"{node.name}.{test.name}"
        if node.name not in named and asserts and is_test and not is_case:
            return node.name
    return None


def _definitions(tree: Any) -> Iterator[Definition]:
    """The functions and classes outside of others, also in `if` and `try`; and the tests of classes for pytest."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, Definition):
            yield node
        elif isinstance(node, ast.stmt | ast.ExceptHandler):
            yield from _definitions(node)


def _is_of_pytest(node: ast.ClassDef) -> bool:
    return node.name.startswith("Test") and not node.bases


def _wanted(node: ast.FunctionDef) -> int:
    """How many arguments a call must give."""
    return len(node.args.posonlyargs) + len(node.args.args) - len(node.args.defaults)


ASKED = "asked"
_SAME = "__same__"
_NOTHING = object()
_STDOUT, _LINK = 1, 3


class Names(dict[str, Any]):
    """The tests' globals. of_code: names that the code has, even those of builtins; classes: those among them that the
    tests build objects by."""

    def __init__(self, of_code: list[str], classes: list[str]) -> None:
        super().__init__({"__name__": TESTS, "__builtins__": builtins, _SAME: same})
        self._of_code, self._classes = set(of_code), set(classes)
        self.link: Link

    def __missing__(self, name: str) -> Any:
        value: Any
        if name in self.link.exceptions:
            value = self.link.exceptions[name]
        elif name in self._of_code:
            value = self.link.name(name, is_class=name in self._classes)
        elif name in CLASSES:
            value = CLASSES[name]
        elif name in sys.stdlib_module_names:
            value = importlib.import_module(name)  # the judge's own, whatever the code has by that name
        else:
            raise KeyError(name)
        self[name] = value
        return value

    def __contains__(self, name: object) -> bool:
        return self.get(name, _NOTHING) is not _NOTHING

    def get(self, name: Any, default: Any = None) -> Any:
        try:
            return self[name]
        except KeyError:
            return default


class _Module(types.ModuleType):
    """The tests as the module `__main__`, where unittest looks for them, or the code as the module `solution`."""

    def __init__(self, name: str, names: Names, find: Callable[[str], Any]) -> None:
        super().__init__(name)
        vars(self).update(_names=names, _find=find)

    def __getattr__(self, name: str) -> Any:
        try:
            return self._find(name)
        except KeyError:
            raise AttributeError(name) from None

    def __dir__(self) -> list[str]:
        return list(self._names)


def judge(end: socket.socket, order: dict[str, Any]) -> dict[str, Any]:
    """The verdict: passed tests as a text of 0 and 1, and why the first other one fails; or what is `broken`."""
    began = time.monotonic()

    def before_code() -> str | None:
        if time.monotonic() - began > order["test_seconds"]:
            return f"the tests take more than {order['test_seconds']:g} s before they use the code"
        _print(ASKED)
        return None

    # compiled before the code can use memory, so that the code is never the cause of a test that can't be compiled
    cases = order["cases"]
    texts = [case for case in cases if isinstance(case, str)]
    tests = [_Test(text, f"{TEST_FILE}{number}", order["function"]) for number, text in enumerate(texts, 1)]
    names = Names(order["names"], order["classes"])
    own_class = partial(dict.get, names)
    link = names.link = Link(end, order["seconds"], before_code, own_class, order["exceptions"])
    sys.modules[TESTS] = _Module(TESTS, names, names.__getitem__)
    sys.modules["solution"] = _Module("solution", names, names.__missing__)
    passed, why = "", None
    for number, case in enumerate(cases, 1):
        reason = None
        try:
            if tests:
                reason = tests[number - 1].run(names)
            else:
                given = eval(str(order["function"]), names)(*case["args"], **case.get("kwargs", {}))
                reason = None if alike(given, case["expected"]) else "wrong"
        except BaseException as error:
            reason = _one_line(error)
        if link.broken:  # even if the test accepts any exception
            return {"broken": f"test {number}: {link.broken}"}
        if link.code_error:
            return {"passed": "0" * len(cases), "why": f"the code raises {_one_line(link.code_error)}"}
        if link.is_closed:
            why = why or link.ended
            break
        passed += "1" if reason is None else "0"
        why = why if reason is None else why or f"test {number}: {reason}"
    if not link.has_run and "0" not in passed:
        return {"broken": "the tests do not use the code"}
    return {"passed": passed.ljust(len(cases), "0"), "why": why}


class _Test:
    """One text of tests, with the tests that it does not run itself."""

    def __init__(self, text: str, file: str, function: str | None) -> None:
        tree = ast.parse(text)
        tree.body += ast.parse(added_calls(tree, function)).body
        if " is " in text:
            _compares_objects(tree)
        self._program = compile(tree, file, "exec")
        self._uses_unittest = "unittest" in text or "TestCase" in text

    def run(self, names: Names) -> str | None:
        """Why the test fails, or None."""
        results = _unittest_results() if self._uses_unittest else []
        before = set(names)
        try:
            exec(self._program, names)
        except SystemExit as ended:  # of `unittest.main()`, or the tests' own `sys.exit`
            if ended.code not in (None, 0, False) and all(result.wasSuccessful() for result in results):
                return f"exit code {ended.code}"
        if self._uses_unittest and not results:
            _run_unittest([value for name, value in [*names.items()] if name not in before])
        failed = [kind for result in results for kind in (*result.failures, *result.errors)]
        if failed:
            return failed[0][1].strip().rpartition("\n")[2][:200]
        return None if all(result.wasSuccessful() for result in results) else "unexpected success"


def _unittest_results() -> list[Any]:
    """A list that gets the result of each run of unittest."""
    import unittest  # which takes longer than a verdict

    results: list[Any] = []
    unittest.TestResult.stopTestRun = lambda result: results.append(result)  # type: ignore[assignment,method-assign]
    return results


def _run_unittest(values: list[Any]) -> None:
    import unittest

    load = unittest.defaultTestLoader.loadTestsFromTestCase
    kinds = [value for value in values if isinstance(value, type) and issubclass(value, unittest.TestCase)]
    if kinds:
        unittest.TextTestRunner().run(unittest.TestSuite(map(load, kinds)))


def _compares_objects(tree: ast.Module) -> None:
    """`a is b` becomes a call of `link.same`."""

    def replaced(node: Any) -> Any:
        if not isinstance(node, ast.Compare) or len(node.ops) > 1 or not isinstance(node.ops[0], ast.Is | ast.IsNot):
            return node
        sides = [node.left, *node.comparators]
        if any(isinstance(side, ast.Constant) for side in sides):
            return node
        call = ast.Call(ast.Name(_SAME, ast.Load()), sides, [])
        return call if isinstance(node.ops[0], ast.Is) else ast.UnaryOp(ast.Not(), call)

    for parent in reversed([*ast.walk(tree)]):  # inner ones first, without recursion: a test may be nested deeply
        for name, value in ast.iter_fields(parent):
            setattr(parent, name, [replaced(item) for item in value] if isinstance(value, list) else replaced(value))
    ast.fix_missing_locations(tree)


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
        verdict = judge(socket.socket(fileno=_LINK), order)
    _print(json.dumps(verdict))
    os._exit(0)  # whatever the tests have left to do
