"""What the GPU does in fewer instructions than Triton writes for it.

Kernels that make two codes of every element they read are bound by instructions, not by memory. Of their instructions
an exponential and a quotient that scale for subnormal results, and BF16 converted one by one, were the half:

    sigmoid             4 instructions for 14; within two units of the last place of float32, 0 below -88
    bf16_to_float       1 an element for 1.5: a pair is split by a shift and a mask
    rounded_to_bf16     1.5 for 2, of which the one was of a unit that does four a cycle
    e4m3_code           1/2 for 5: the conversion itself clamps to ±448 and turns NaN into 0x7F

Each has a plain form, of the same value (the sigmoid's differs in its last bits), for Triton's interpreter, which knows
no instructions: ON_GPU False.
"""

from __future__ import annotations

import triton
import triton.language as tl

from octetrl.kernels.quantize_activation import e4m3_byte


@triton.jit
def sigmoid(x, ON_GPU: tl.constexpr):
    """1 / (1 + exp(-x)) of float32 x."""
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
def bf16_to_float(x, ON_GPU: tl.constexpr):
    """float32 of x, which may be float32 already."""
    if ON_GPU and x.dtype == tl.bfloat16:
        return tl.inline_asm_elementwise(
            "shl.b32 $0, $2, 16; and.b32 $1, $2, 0xffff0000;",
            "=r,=r,r",
            [x],
            dtype=tl.float32,
            is_pure=True,
            pack=2,
        )
    else:
        return x.to(tl.float32)


@triton.jit
def rounded_to_bf16(x, ON_GPU: tl.constexpr):
    """float32 of the nearest BF16 value, x being float32 or BF16."""
    if x.dtype == tl.bfloat16:
        return bf16_to_float(x, ON_GPU)
    elif ON_GPU:
        return tl.inline_asm_elementwise(
            """{
            .reg .b32 t;
            cvt.rn.bf16x2.f32 t, $3, $2;
            shl.b32 $0, t, 16;
            and.b32 $1, t, 0xffff0000;
            }""",
            "=r,=r,f,f",
            [x],
            dtype=tl.float32,
            is_pure=True,
            pack=2,
        )
    else:
        return x.to(tl.bfloat16).to(tl.float32)


@triton.jit
def e4m3_code(scaled, ON_GPU: tl.constexpr):
    """`e4m3_byte` of float32 `scaled`."""
    if ON_GPU:
        return scaled.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    else:
        return e4m3_byte(scaled)
