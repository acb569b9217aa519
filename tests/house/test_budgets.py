"""One sitting, one idea: a file of at most 600 lines, a function of 60, a Triton kernel of 120, and names that say what
a file is about. `budget.toml` holds the exceptions with their reasons."""

from __future__ import annotations

import ast
import tomllib
from pathlib import PurePath

from tests.house.tree import REPO, functions, is_triton, python_files

FILE, FUNCTION, KERNEL = 600, 60, 120
EXCEPTIONS = tomllib.loads((REPO / "tests/house/budget.toml").read_text(encoding="utf-8"))
NAMELESS = {"utils", "util", "common", "helpers", "helper", "misc"}


def length(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Lines from `def` to the end; the docstring is free, so that no one is tempted to say less."""
    end = function.end_lineno or function.lineno
    docstring = function.body[0] if ast.get_docstring(function, clean=False) is not None else None
    free = (docstring.end_lineno or docstring.lineno) - docstring.lineno + 1 if docstring else 0
    return end - function.lineno + 1 - free


def too_long() -> dict[str, int]:
    """Lines of each file and function that is past its budget."""
    found = {}
    for path in python_files():
        lines = len((REPO / path).read_text(encoding="utf-8").splitlines())
        if lines > FILE:
            found[path] = lines
        for name, function in functions(path):
            if length(function) > (KERNEL if is_triton(function) else FUNCTION):
                found[f"{path}:{name}"] = length(function)
    return found


def test_files_and_functions_keep_their_budget() -> None:
    allowed = {entry["where"]: entry["lines"] for entry in EXCEPTIONS.get("long", [])}
    found = too_long()
    excess = {where: lines for where, lines in found.items() if lines > allowed.get(where, 0)}
    assert not excess, f"past the budget (cut them, or give a reason in tests/house/budget.toml): {excess}"
    stale = sorted(set(allowed) - set(found))
    assert not stale, f"no longer past the budget; take them out of tests/house/budget.toml: {stale}"


def test_every_exception_has_a_reason() -> None:
    for kind, entries in EXCEPTIONS.items():
        for entry in entries:
            assert len(entry["why"]) > 20, f"[[{kind}]] {entry['where']}: say why"


def test_names_say_what_a_file_is_about() -> None:
    nameless = [path for path in python_files() if NAMELESS & {PurePath(part).stem for part in PurePath(path).parts}]
    assert not nameless, f"name these after what they do: {nameless}"
