"""No exception is swallowed: CONTRIBUTING.md says when an `except` may catch all of them, and what it then does."""

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
