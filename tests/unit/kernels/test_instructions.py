"""The plain forms, as the interpreter runs them. What the GPU does instead is judged there (tests/gpu)."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl
from triton.runtime.interpreter import InterpretedFunction

from octetrl.fp8.format import E4M3
from octetrl.kernels.instructions import bf16_to_float, e4m3_code, e4m3_to_bf16, sigmoid, to_bf16


@triton.jit
def _each_kernel(x_ptr, narrow_ptr, sigmoid_ptr, wide_ptr, rounded_ptr, code_ptr, value_ptr, N: tl.constexpr):
    place = tl.arange(0, N)
    x = tl.load(x_ptr + place)
    tl.store(sigmoid_ptr + place, sigmoid(x, False))
    tl.store(wide_ptr + place, bf16_to_float(tl.load(narrow_ptr + place), False))
    tl.store(rounded_ptr + place, bf16_to_float(to_bf16(x, False), False))
    code = e4m3_code(x, False)
    tl.store(code_ptr + place, code)
    tl.store(value_ptr + place, e4m3_to_bf16(code.to(tl.float8e4nv, bitcast=True), False).to(tl.float32))


@pytest.fixture(autouse=True)
def own_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("bf16_to_float", "e4m3_code", "e4m3_to_bf16", "sigmoid", "to_bf16", "_each_kernel"):
        monkeypatch.setitem(globals(), name, InterpretedFunction(globals()[name].fn))


def test_plain_forms() -> None:
    x = torch.tensor(
        [0.0, -0.0, 1.0, -3.0, 88.0, -88.0, 1000.0, -1000.0, 448.0, -500.0, 0.5, 2.0, -2.0, 20.0, 7.0, 96.0]
    )
    narrow = x.bfloat16()
    got = [torch.empty(16) for _ in range(3)]
    codes, values = torch.empty(16, dtype=torch.uint8), torch.empty(16)
    _each_kernel[(1,)](x, narrow, *got, codes, values, N=16)
    torch.testing.assert_close(got[0].double(), torch.sigmoid(x.double()), rtol=1e-6, atol=1e-38)
    assert torch.equal(got[1], narrow.float()) and torch.equal(got[2], narrow.float())
    assert torch.equal(codes.view(E4M3).float(), x.clamp(-448, 448).to(E4M3).float())
    assert torch.equal(values, codes.view(E4M3).float())
