"""Triton's interpreter for kernels that were imported to be compiled: TRITON_INTERPRET would have to stand before the
first import, and for a whole process. Here it also does its work in half of the time, with the same values.

Two faults of the interpreter are mended: it multiplies the bit patterns of BF16 tensors as integers, and with NumPy 2.4
it cannot take a loaded number as a loop's bound. It has no `tl.dot_scaled`; that of MXFP8 is added. Others remain. It
rounds about 3% of values to a neighbour of the right E4M3 code, truncates to BF16, flushes BF16's subnormals, and takes
sums in another order than a GPU. So codes and BF16 are compared by distance here, and by bytes on a GPU.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import inspect
import json
import math
import os
import pkgutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
import triton.experimental.gluon  # noqa: F401  (the interpreter imports it, and must not find patched functions)
import triton.language as tl
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter
from triton.runtime.interpreter import InterpretedFunction
from triton.runtime.jit import JITFunction

from octetrl import kernels

create_dot = interpreter.InterpreterBuilder.create_dot
E4M3_VALUES = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).double().numpy()
patch_tensor = interpreter._patch_lang_tensor


def _values(x: Any) -> Any:
    if x.dtype.scalar != tl.bfloat16:
        return x
    return interpreter.TensorHandle((x.data.astype(np.uint32) << 16).view(np.float32), tl.float32)


def _create_dot_of_values(self: Any, a: Any, b: Any, *rest: Any) -> Any:
    return create_dot(self, _values(a), _values(b), *rest)


def _create_dot_scaled(self: Any, a: Any, a_scale: Any, _a: Any, b: Any, b_scale: Any, *rest: Any) -> Any:
    """MXFP8's, which the interpreter has not: an exact sum over 32, then one fma, K ascending. E8M0's 255 is NaN."""
    scale_MB, scale_NB = (np.where(s == 255, np.nan, 2.0 ** (s - 127.0)) for s in (a_scale.data, b_scale.data))
    acc_MN = rest[-1].data
    for block in range(scale_MB.shape[1]):
        part = slice(32 * block, 32 * block + 32)
        sum_MN = (E4M3_VALUES[a.data[:, part]] @ E4M3_VALUES[b.data[part]]).astype(np.float32)
        scale_MN = scale_MB[:, block, None] * scale_NB[:, block]
        acc_MN = (acc_MN.astype(np.float64) + sum_MN.astype(np.float64) * scale_MN).astype(np.float32)
    return interpreter.TensorHandle(acc_MN, tl.float32)


def _patch_tensor_with_index(tensor: Any, scope: Any) -> None:
    patch_tensor(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))


@pytest.fixture
def interpreted(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Has the interpreter run all kernels in Triton, and Triton's own device functions, until the test's end."""
    quicken_interpreter()
    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", _create_dot_of_values)
    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot_scaled", _create_dot_scaled, raising=False)
    monkeypatch.setattr(interpreter, "_patch_lang_tensor", _patch_tensor_with_index)
    for module, name, function in _device_functions():
        monkeypatch.setattr(module, name, function)
    with np.errstate(all="ignore"):  # of infinities and NaN
        yield


@functools.cache
def _device_functions() -> list[tuple[ModuleType, str, InterpretedFunction]]:
    """A function is looked up in the module that calls it, so each module that imports one is named."""
    names = [found.name for found in pkgutil.walk_packages(kernels.__path__, "octetrl.kernels.")]
    modules = [importlib.import_module(name) for name in names if not name.endswith(("_gluon", "gluon_compat"))]
    return [
        (module, name, InterpretedFunction(member.fn))
        for module in (*modules, tl, tl.standard)
        for name, member in vars(module).items()
        if isinstance(member, JITFunction)
    ]


def run_interpreted(module: str) -> Any:
    """What a module prints as JSON, run with the interpreter in a process of its own."""
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    command = [sys.executable, "-m", module]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


def mend_interpreter() -> None:
    """As `interpreted`, for the rest of the process."""
    assert os.environ.get("TRITON_INTERPRET") == "1"
    torch.set_num_threads(1)
    quicken_interpreter()
    interpreter.InterpreterBuilder.create_dot = _create_dot_of_values
    interpreter._patch_lang_tensor = _patch_tensor_with_index


@functools.cache
def quicken_interpreter() -> None:
    """Leave out the interpreter's unnecessary work, for the rest of the process:

    - At each launch, and at each call of a function in a kernel, it searches all of `triton.language` for members to
      patch. Their names never change, and during a call they are patched already.
    - It computes whether integers overflow. It asserts the result only with `debug`, which it does not set.
    - It builds its table of NumPy's types for each value again.
    - It makes a type and a shape of `constexpr`s for each value again, and asks where two shapes that are equal differ.
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

    interpreter._patch_attr = _patch_member
    interpreter._patch_builtin = patch_builtin
    interpreter._patch_lang = _patch_once(interpreter._patch_lang)
    interpreter._get_np_dtype = _by_element(interpreter._get_np_dtype)
    _keep_types()
    broadcast = TritonSemantic.broadcast_impl_value

    def broadcast_if_needed(self: Any, lhs: Any, rhs: Any) -> Any:
        if lhs.type.is_block() and rhs.type.is_block() and lhs.type.shape.values == rhs.type.shape.values:
            return lhs, rhs
        return broadcast(self, lhs, rhs)

    TritonSemantic.broadcast_impl_value = broadcast_if_needed


def _patch_member(obj: Any, name: str, member: Any, builder: Any, scope: Any) -> None:
    """`_patch_attr`, without the wrapper that only asks for `_semantic`."""
    call = getattr(member, "__wrapped__", member)

    def new_member(*args: Any, **kwargs: Any) -> Any:
        kwargs["_semantic"] = interpreter.interpreter_semantic
        return call(*args, **kwargs)

    scope.set_attr(obj, name, new_member)


def _keep_types() -> None:
    """What a type and a tensor compute of their shape, once for each shape."""
    make_type, sizes_of = tl.block_type.__init__, dict[Any, Any]()
    types: dict[Any, dict[str, Any]] = {}

    def init_type(self: Any, element_ty: Any, shape: Any) -> None:
        if type(self) is not tl.block_type or type(element_ty) is not tl.dtype:  # a pointer's is made at each launch
            make_type(self, element_ty, shape)
            return
        key = (element_ty.name, *[getattr(size, "value", size) for size in shape])
        if key not in types:
            make_type(self, element_ty, shape)
            types[key] = dict(vars(self))
        vars(self).update(types[key])

    def init_tensor(self: Any, handle: Any, type: Any) -> None:
        key = tuple(type.shape.values) if type.is_block() else ()
        if key not in sizes_of:
            sizes_of[key] = tl.constexpr(math.prod(key)), tl.tuple([tl.constexpr(size) for size in key])
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.numel, self.shape = sizes_of[key]

    tl.block_type.__init__, tl.tensor.__init__ = init_type, init_tensor


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
