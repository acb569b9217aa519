"""No exception is swallowed: CONTRIBUTING.md says when an `except` may catch all of them, and what it then does. An
assert only looks: `python -O` leaves it out, and nothing may be missing then."""

from __future__ import annotations

import ast
from collections.abc import Iterator

import pytest

from tests.house.tree import python_files, syntax

BROAD = ("Exception", "BaseException")
SUPPRESSED_IN = {
    "octetrl/telemetry/console.py:leave_screen",  # while the command ends with an error of its own
    "octetrl/process/judge/contestant.py:_described",  # the text of a foreign exception, which may raise as well
}


def catches_all(handler: ast.ExceptHandler) -> bool:
    kinds = handler.type.elts if isinstance(handler.type, ast.Tuple) else [handler.type]
    return any(kind is None or (isinstance(kind, ast.Name) and kind.id in BROAD) for kind in kinds)


def keeps_it(handler: ast.ExceptHandler) -> bool:
    """Whether the handler ends by raising, or reads the exception by its name."""
    reads = (node for one in handler.body for node in ast.walk(one) if isinstance(node, ast.Name))
    return isinstance(handler.body[-1], ast.Raise) or any(
        node.id == handler.name and isinstance(node.ctx, ast.Load) for node in reads
    )


def broad(tree: ast.AST) -> Iterator[ast.ExceptHandler]:
    return (node for node in ast.walk(tree) if isinstance(node, ast.ExceptHandler) and catches_all(node))


def suppressions(path: str) -> Iterator[str]:
    """`suppress(Exception)`, by the function that has it."""
    for function in ast.walk(syntax(path)):
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
            for node in ast.walk(function):
                if isinstance(node, ast.Call) and ast.unparse(node.func) in ("suppress", "contextlib.suppress"):
                    named = {ast.unparse(one) for one in node.args}
                    yield from [f"{path}:{function.name}"] * bool(named & set(BROAD))


def test_an_except_that_catches_all_keeps_what_it_caught() -> None:
    for path in python_files("octetrl"):
        for handler in broad(syntax(path)):
            assert keeps_it(handler), f"{path}:{handler.lineno}: raise it again, or pass it on (CONTRIBUTING, except)"


def test_nothing_suppresses_all() -> None:
    found = {one for path in python_files("octetrl") for one in suppressions(path)}
    assert found == SUPPRESSED_IN, "name what is suppressed, or say here why it can't be named"


@pytest.mark.parametrize(
    ("body", "keeps"),
    [
        ("except Exception:\n close()\n raise", True),
        ("except BaseException as error:\n future.set_exception(error)", True),
        ("except Exception as error:\n raise ValueError('no') from error", True),
        ("except Exception:\n pass", False),
        ("except:\n return None", False),
        ("except (OSError, Exception) as error:\n log('failed')", False),
    ],
)
def test_the_rule_finds_what_is_swallowed(body: str, keeps: bool) -> None:
    (handler,) = broad(ast.parse(f"try:\n f()\n{body}"))
    assert keeps_it(handler) == keeps


# ---------------------------------------------------------------- asserts

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
