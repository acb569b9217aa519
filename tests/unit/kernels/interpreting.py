"""Triton's interpreter for kernels that were imported to be compiled: TRITON_INTERPRET would have to stand before the
first import, and for a whole process."""

from __future__ import annotations

from types import ModuleType

import pytest
import triton.experimental.gluon  # noqa: F401  (the interpreter imports it, and must not find patched functions)
import triton.language as tl
from triton.runtime.interpreter import InterpretedFunction
from triton.runtime.jit import JITFunction


def interpret(monkeypatch: pytest.MonkeyPatch, *modules: ModuleType) -> None:
    """Has the interpreter run all device functions of these modules, and Triton's own, until the test's end. A function
    is looked up in the module that calls it, so every file on the way to a kernel must be named."""
    for module in (*modules, tl, tl.standard):
        for name, member in list(vars(module).items()):
            if isinstance(member, JITFunction):
                monkeypatch.setattr(module, name, InterpretedFunction(member.fn))
