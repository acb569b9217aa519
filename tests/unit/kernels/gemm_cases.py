"""A way to run the small GEMMs in Triton's interpreter, on CPU tensors.

Two faults of the interpreter are mended on the way: it multiplies the bit patterns of BF16 tensors as integers, and
with NumPy 2.4 it cannot take an argument as a loop's bound.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import triton.language as tl
import triton.runtime.interpreter as interpreter

import octetrl.kernels.gemm.bf16_gemm as bf16_gemm
import octetrl.kernels.gemm.fp8_gemm as fp8_gemm
import octetrl.kernels.gemm.grouped_bf16_gemm as grouped_bf16_gemm
import octetrl.kernels.gemm.grouped_fp8_gemm as grouped_fp8_gemm
import octetrl.kernels.gemm.head_gemm as head_gemm
import octetrl.kernels.gemm.lora_up as lora_up
import octetrl.kernels.quantize.quantize_activation as quantize_activation
from tests.unit.kernels.interpreting import interpret

create_dot = interpreter.InterpreterBuilder.create_dot
patch_tensor = interpreter._patch_lang_tensor


def values(x: Any) -> Any:
    if x.dtype.scalar != tl.bfloat16:
        return x
    return interpreter.TensorHandle((x.data.astype(np.uint32) << 16).view(np.float32), tl.float32)


def create_dot_of_values(self: Any, a: Any, b: Any, *rest: Any) -> Any:
    return create_dot(self, values(a), values(b), *rest)


def patch_tensor_with_index(tensor: Any, scope: Any) -> None:
    patch_tensor(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))


@pytest.fixture
def interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs the GEMMs, and the device functions of Triton that they call, in Triton's interpreter."""
    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", create_dot_of_values)
    monkeypatch.setattr(interpreter, "_patch_lang_tensor", patch_tensor_with_index)
    interpret(
        monkeypatch, bf16_gemm, fp8_gemm, lora_up, grouped_bf16_gemm, grouped_fp8_gemm, head_gemm, quantize_activation
    )
