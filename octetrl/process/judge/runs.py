"""The tests in a text that the text itself does not run: as they stand, they would accept any code.

The judge runs functions `test_*`, methods `test_*` of classes `Test*`, cases of unittest, and `check(candidate)`. What
else holds asserts and is never named, such as a test that wants a fixture, makes `octetrl check` refuse the task."""

from __future__ import annotations

import ast
from collections.abc import Sequence
from typing import Any

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


def _definitions(tree: Any) -> list[Definition]:
    """The functions and classes outside of others, also in `if` and `try`; and the tests of classes for pytest."""
    found: list[Definition] = []
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, Definition):
            found.append(node)
        elif isinstance(node, ast.stmt | ast.ExceptHandler):
            found += _definitions(node)
    return found


def _is_of_pytest(node: ast.ClassDef) -> bool:
    return node.name.startswith("Test") and not node.bases


def _wanted(node: ast.FunctionDef) -> int:
    """How many arguments a call must give."""
    return len(node.args.posonlyargs) + len(node.args.args) - len(node.args.defaults)
