"""An assert only looks: `python -O` leaves it out, and nothing may be missing then."""

from __future__ import annotations

import ast

import pytest

from tests.house.tree import python_files, syntax

CHANGES = {  # methods that change what they are called on
    "add", "append", "appendleft", "clear", "close", "discard", "extend", "insert", "move_to_end", "pop", "popitem",
    "popleft", "put", "read", "readline", "recv", "remove", "restore", "send", "setdefault", "take", "update", "write",
}  # fmt: skip
FUNCTIONS = {"next", "setattr", "delattr", "print", "exec", "eval"}


def works(test: ast.expr) -> bool:
    """Whether the condition assigns, waits, or calls something that changes an object."""
    for node in ast.walk(test):
        if isinstance(node, ast.NamedExpr | ast.Await | ast.Yield | ast.YieldFrom):
            return True
        if isinstance(node, ast.Call):
            called = node.func
            if isinstance(called, ast.Attribute) and (called.attr in CHANGES or called.attr.endswith("_")):
                return True
            if isinstance(called, ast.Name) and called.id in FUNCTIONS:
                return True
    return False


def test_no_assert_does_work() -> None:
    for path in python_files("octetrl"):
        for node in ast.walk(syntax(path)):
            if isinstance(node, ast.Assert):
                assert not works(node.test), f"{path}:{node.lineno}: python -O leaves this work out"


@pytest.mark.parametrize(
    ("condition", "does"),
    [
        ("isinstance(a, int)", False),
        ("all(map(isfinite, rows))", False),
        ("found.setdefault(name, stored) == stored", True),
        ("not waiting.pop(prefix)", True),
        ("(n := len(rows)) > 0", True),
        ("next(rows) == 1", True),
        ("x.add_(1) is x", True),
    ],
)
def test_what_counts_as_work(condition: str, does: bool) -> None:
    assert works(ast.parse(condition, mode="eval").body) == does
