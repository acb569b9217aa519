"""What the house tests look at: the repository's own files, as paths from its root and as syntax trees."""

from __future__ import annotations

import ast
import gc
from collections.abc import Iterator
from functools import cache
from pathlib import Path

REPO = Path(__file__).parents[2]
CODE = ("octetrl", "tests", "lab", "examples", "setup")
LAB_PAGES = (REPO / "lab/log.md", REPO / "lab/study/README.md")  # records of measurements, not on the site
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


def python_files(*folders: str) -> list[str]:
    """Paths of the Python files below `folders` (all code when none is given), sorted."""
    found = (path for folder in folders or CODE for path in (REPO / folder).rglob("*.py"))
    return sorted(str(path.relative_to(REPO)) for path in found)


def text_files() -> list[str]:
    """Paths of everything a person reads: code, documents, recipes, tooling."""
    folders = ("docs", "recipes", ".ci", *CODE)
    inside = (path for folder in folders for path in (REPO / folder).rglob("*") if path.is_file())
    kinds = {".py", ".md", ".toml", ".yaml", ".yml", ".txt", ".sh", ".json", ""}
    kept = [
        path for path in (*REPO.iterdir(), *inside) if path.is_file() and path.suffix in kinds and path.name != ".git"
    ]
    return sorted(str(path.relative_to(REPO)) for path in kept if "__pycache__" not in path.parts)


@cache
def syntax(path: str) -> ast.Module:
    """Kept, and left out of garbage collections, which would look through millions of nodes again and again."""
    gc.disable()
    tree = ast.parse((REPO / path).read_text(encoding="utf-8"), filename=path)
    gc.freeze()
    gc.enable()
    return tree


def functions(path: str) -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    """Every function of a file with its qualified name, methods and inner functions included."""

    def walk(node: ast.AST, prefix: str) -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, FUNCTIONS):
                yield f"{prefix}{child.name}", child
            if not isinstance(child, ast.expr):  # an expression holds no function
                inner = f"{prefix}{child.name}." if isinstance(child, (*FUNCTIONS, ast.ClassDef)) else prefix
                yield from walk(child, inner)

    yield from walk(syntax(path), "")


def is_triton(function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Whether a function is compiled for the device: decorated with `triton.jit` or `gluon.jit`, bare or with
    arguments."""
    return any(
        jit in ast.unparse(decorator) for decorator in function.decorator_list for jit in ("triton.jit", "gluon.jit")
    )
