"""Device functions that use fewer GPU instructions than Triton generates for the same operation.

A kernel that computes two codes of every element is limited by instructions, not by memory. A third of its instructions
were an exponential and a quotient that handle subnormal results, and conversions to BF16 one value at a time.

    function          instructions an element
    sigmoid           4 instead of 13
    to_bf16           1/2 instead of 1, in a unit that executes sixteen in a cycle
    bf16_to_float     1 instead of 1.5: a shift and a mask split a pair
    e4m3_code         1/2 instead of 5: the conversion itself clamps to ±448 and turns NaN into 0x7F

Each has a plain form for Triton's interpreter, which has no GPU instructions (ON_GPU False). The conversions have the
same bits in both forms; the sigmoid differs in the last bits.
"""

from __future__ import annotations

import triton
import triton.language as tl

from octetrl.kernels.quantize.quantize_activation import e4m3_byte


@triton.jit
def sigmoid(x, ON_GPU: tl.constexpr):
    """1 / (1 + exp(-x)) of float32 x. Relative error 2^-21, plus 1.25 |x| 2^-24 for x < 0. The result is 0 below
    -89."""
    if ON_GPU:
        return tl.inline_asm_elementwise(
            """{
            .reg .f32 t;
            mul.rn.f32 t, $1, 0fBFB8AA3B;  // -log2(e)
            ex2.approx.ftz.f32 t, t;
            add.rn.f32 t, t, 0f3F800000;  // 1
            rcp.approx.ftz.f32 $0, t;
            }""",
            "=f,f",
            [x],
            dtype=tl.float32,
            is_pure=True,
            pack=1,
        )
    else:
        return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def to_bf16(x, ON_GPU: tl.constexpr):
    """x (float32, or BF16 already) rounded to nearest even."""
    if x.dtype == tl.bfloat16:
        return x
    elif ON_GPU:
        return tl.inline_asm_elementwise(
            "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,f,f", [x], dtype=tl.bfloat16, is_pure=True, pack=2
        )
    else:
        return x.to(tl.bfloat16)


@triton.jit
def bf16_to_float(x, ON_GPU: tl.constexpr, ANEW: tl.constexpr = False):
    """float32 of x (BF16, or float32 already). ANEW converts again at every use: keeping the converted values would
    take twice the registers of x."""
    if x.dtype == tl.float32:
        return x
    elif ON_GPU:
        return tl.inline_asm_elementwise(
            "shl.b32 $0, $2, 16; and.b32 $1, $2, 0xffff0000;",
            "=r,=r,r",
            [x],
            dtype=tl.float32,
            is_pure=not ANEW,
            pack=2,
        )
    else:
        return x.to(tl.float32)


@triton.jit
def e4m3_code(scaled, ON_GPU: tl.constexpr):
    """`e4m3_byte` of float32 `scaled`."""
    if ON_GPU:
        return scaled.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    else:
        return e4m3_byte(scaled)
