"""The grammar of a kernel file: `_x_kernel` in Triton, `x` that people call, `x_reference` in plain torch, and tests
that import its file. Shared files that are no op stand in `budget.toml` under [[shared]]."""

from __future__ import annotations

import ast
import tomllib
from collections.abc import Iterator
from pathlib import PurePath

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


def test_kernel_files_have_their_three_parts() -> None:
    """The Triton kernel may be imported from a file it is shared with."""
    for path in OPS:
        op, names = PurePath(path).stem, names_of(path)
        own = any(is_triton(function) and name.endswith("_kernel") for name, function in functions(path))
        shared = any("_triton" in name or name.endswith("_kernel") for name in names)
        assert own or shared, f"{path}: no Triton function named _..._kernel"
        assert op in names, f"{path}: no function {op}; a file that is no op belongs in budget.toml as [[shared]]"
        assert any(name.endswith("_reference") for name in names), f"{path}: no {op}_reference in plain torch"


def test_kernel_files_have_tests() -> None:
    imported = {
        name
        for path in python_files("tests/unit/kernels")
        for node in ast.walk(syntax(path))
        if isinstance(node, ast.ImportFrom)
        for name in (node.module, *(f"{node.module}.{alias.name}" for alias in node.names))
    }
    assert not {path.removesuffix(".py").replace("/", ".") for path in OPS} - imported


def test_launches_of_the_forward_do_not_contract() -> None:
    """A fused multiply-add where none is meant would round otherwise than the reference, and change a log-prob's bits.
    Backward kernels (`..._backward.py`, `_..._backward_kernel`, `_..._gradient_kernel`) owe nobody their bits."""
    found = [(path, *launch) for path in python_files("octetrl/kernels") for launch in launches(path)]
    assert found
    for path, name, launch in found:
        assert name.startswith("_") and name.endswith("_kernel"), f"{path}:{launch.lineno}: {name} is no _..._kernel"
        forward = not (name.endswith(("_backward_kernel", "_gradient_kernel")) or path.endswith("_backward.py"))
        keywords = {keyword.arg for keyword in launch.keywords}  # None is `**options`, made where the device is known
        assert not forward or keywords & {"enable_fp_fusion", None}, f"{path}:{launch.lineno}: {name} may contract"


COUNTS = {"num_tokens", "num_sequences", "num_rows", "num_slots", "max_chunks", "stride_row", "stride_table", "T", "M"}
OF_A_GRAPH = {"advance_rows", "gather_rows", "settle_drafts"}  # small kernels of decode graphs


def test_what_every_batch_changes_compiles_no_kernel_again() -> None:
    """Triton compiles a kernel once for a number that is a multiple of 16, once for 1, and once for any other: seconds
    in the middle of a step, for each kernel and combination of counts."""
    found = [(path, *one) for path in python_files("octetrl/kernels") for one in functions(path) if is_triton(one[1])]
    for path, name, kernel in found:
        if not name.endswith("_kernel") or PurePath(path).stem in OF_A_GRAPH:
            continue
        general = {text for mark in kernel.decorator_list for text in _strings(mark)}
        counts = {argument.arg for argument in kernel.args.args if argument.annotation is None} & COUNTS
        assert counts <= general, f"{path}: {name}: do_not_specialize lacks {sorted(counts - general)}"


def _strings(mark: ast.expr) -> Iterator[str]:
    """What `@triton.jit(do_not_specialize=[...])` lists."""
    for node in ast.walk(mark):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


def test_host_code_is_typed() -> None:
    """mypy lets untyped functions pass in kernels/, for the sake of device code alone."""
    of_host = [
        (path, name, function)
        for path in python_files("octetrl/kernels")
        for name, function in functions(path)
        if not is_triton(function)
    ]
    for path, name, function in of_host:
        arguments = [*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs]
        untyped = [argument.arg for argument in arguments if argument.annotation is None]
        bare = set(untyped) - {"self", "cls", "ctx"}
        assert not bare and function.returns is not None, f"{path}: {name} lacks types ({sorted(bare) or 'return'})"


def test_shared_files_exist() -> None:
    assert all((REPO / path).exists() for path in SHARED), "take files that are gone out of tests/house/budget.toml"
