"""Triton's interpreter for kernels that were imported to be compiled: TRITON_INTERPRET would have to stand before the
first import, and for a whole process. Here it also does its work in half of the time, with the same values."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import triton.experimental.gluon  # noqa: F401  (the interpreter imports it, and must not find patched functions)
import triton.language as tl
from triton.runtime import interpreter
from triton.runtime.interpreter import InterpretedFunction
from triton.runtime.jit import JITFunction


def interpret(monkeypatch: pytest.MonkeyPatch, *modules: ModuleType) -> None:
    """Has the interpreter run all device functions of these modules, and Triton's own, until the test's end. A function
    is looked up in the module that calls it, so every file on the way to a kernel must be named."""
    quicken_interpreter()
    for module in (*modules, tl, tl.standard):
        for name, member in list(vars(module).items()):
            if isinstance(member, JITFunction):
                monkeypatch.setattr(module, name, InterpretedFunction(member.fn))


@functools.cache
def quicken_interpreter() -> None:
    """Leave out the interpreter's unnecessary work, for the rest of the process:

    - At each launch, and at each call of a function in a kernel, it searches all of `triton.language` for members to
      patch. Their names never change, and during a call they are patched already.
    - It computes whether integers overflow. It asserts the result only with `debug`, which it does not set.
    - It builds its table of NumPy's types for each value again.
    """
    builder = interpreter.interpreter_builder
    builder.options = dataclasses.replace(builder.options, sanitize_overflow=builder.options.debug)
    names: dict[Any, list[str]] = {}

    def patch_builtin(package: Any, builder: Any, scope: Any) -> None:
        if package not in names:
            names[package] = [name for name, member in inspect.getmembers(package) if tl.core.is_builtin(member)]
        for name in names[package]:
            if tl.core.is_builtin(member := getattr(package, name)):
                interpreter._patch_attr(package, name, member, builder, scope)

    interpreter._patch_builtin = patch_builtin
    interpreter._patch_lang = _patch_once(interpreter._patch_lang)
    interpreter._get_np_dtype = _by_element(interpreter._get_np_dtype)


def _patch_once(patch: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """`_patch_lang`, which does nothing if the launch that calls has patched the same modules already."""
    patched: set[str] = set()

    class Nothing:
        def restore(self) -> None:
            pass

    def patch_once(fn: Any) -> Any:
        modules = {value.__name__ for value in fn.__globals__.values() if value is tl or value is tl.core}
        if modules <= patched:
            return Nothing()
        scope = patch(fn)
        restore, before = scope.restore, set(patched)
        patched.update(modules)

        def restore_all() -> None:
            restore()
            patched.clear()
            patched.update(before)

        scope.restore = restore_all
        return scope

    return patch_once


def _by_element(find: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """`_get_np_dtype`, which keeps what it has found: it depends on the type of one element."""
    found: dict[Any, Any] = {}

    def np_dtype(tt_dtype: Any) -> Any:
        element = tt_dtype.element_ty if isinstance(tt_dtype, tl.block_type) else tt_dtype
        if isinstance(element, tl.pointer_type):
            return find(element)
        if element not in found:
            found[element] = find(element)
        return found[element]

    return np_dtype
