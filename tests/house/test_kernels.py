"""The grammar of a kernel file: `_x_kernel` in Triton, `x` that people call, `x_reference` in plain torch, and a test
of the same name. Shared files that are no op stand in `budget.toml` under [[shared]]."""

from __future__ import annotations

import ast
import tomllib
from collections.abc import Iterator
from pathlib import PurePath

import pytest

from tests.house.tree import REPO, functions, is_triton, python_files, syntax

BUDGET = tomllib.loads((REPO / "tests/house/budget.toml").read_text(encoding="utf-8"))
SHARED = {entry["where"] for entry in BUDGET["shared"]}
OPS = [path for path in python_files("octetrl/kernels") if not path.endswith("__init__.py") and path not in SHARED]


def names_of(path: str) -> set[str]:
    """Names that a file defines or imports at its top level."""
    names = set()
    for node in syntax(path).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.ImportFrom):
            names |= {alias.asname or alias.name for alias in node.names}
    return names


def launches(path: str) -> Iterator[tuple[str, ast.Call]]:
    """Every `name[grid](...)` of a file."""
    for node in ast.walk(syntax(path)):
        called = node.func.value if isinstance(node, ast.Call) and isinstance(node.func, ast.Subscript) else None
        if isinstance(node, ast.Call) and isinstance(called, ast.Name):
            yield called.id, node


@pytest.mark.parametrize("path", OPS)
def test_a_kernel_file_has_its_three_parts(path: str) -> None:
    """The Triton kernel may be imported from a file it is shared with."""
    op = PurePath(path).stem
    own = any(is_triton(function) and name.endswith("_kernel") for name, function in functions(path))
    shared = any("_triton" in name or name.endswith("_kernel") for name in names_of(path))
    assert own or shared, f"{path}: no Triton function named _..._kernel"
    assert op in names_of(path), f"{path}: no function {op}; a file that is no op belongs in budget.toml as [[shared]]"
    assert any(name.endswith("_reference") for name in names_of(path)), f"{path}: no {op}_reference in plain torch"


@pytest.mark.parametrize("path", OPS)
def test_a_kernel_file_has_a_test_of_its_name(path: str) -> None:
    op = PurePath(path).stem
    assert (REPO / f"tests/unit/kernels/test_{op}.py").exists(), f"{path}: tests/unit/kernels/test_{op}.py is missing"


@pytest.mark.parametrize("path", python_files("octetrl/kernels"))
def test_launches_of_the_forward_do_not_contract(path: str) -> None:
    """A fused multiply-add where none is meant would round otherwise than the reference, and change a log-prob's bits.
    Backward kernels (`..._backward.py`, `_..._backward_kernel`, `_..._gradient_kernel`) owe nobody their bits."""
    for name, launch in launches(path):
        assert name.startswith("_") and name.endswith("_kernel"), f"{path}:{launch.lineno}: {name} is no _..._kernel"
        forward = not (name.endswith(("_backward_kernel", "_gradient_kernel")) or path.endswith("_backward.py"))
        keywords = {keyword.arg for keyword in launch.keywords}  # None is `**options`, made where the device is known
        assert not forward or keywords & {"enable_fp_fusion", None}, f"{path}:{launch.lineno}: {name} may contract"


@pytest.mark.parametrize("path", python_files("octetrl/kernels"))
def test_host_code_is_typed(path: str) -> None:
    """mypy lets untyped functions pass in kernels/, for the sake of device code alone."""
    for name, function in functions(path):
        if not is_triton(function):
            arguments = [*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs]
            untyped = [argument.arg for argument in arguments if argument.annotation is None]
            bare = set(untyped) - {"self", "cls", "ctx"}
            assert not bare and function.returns is not None, f"{path}: {name} lacks types ({sorted(bare) or 'return'})"


def test_shared_files_exist() -> None:
    assert all((REPO / path).exists() for path in SHARED), "take files that are gone out of tests/house/budget.toml"
