"""Device functions that use fewer GPU instructions than Triton generates for the same operation.

A kernel that computes two codes of every element is limited by instructions, not by memory. A third of its instructions
were an exponential and a quotient that handle subnormal results, and conversions to BF16 one value at a time.

    function          instructions an element
    sigmoid           4 instead of 13
    to_bf16           1/2 instead of 1, in a unit that executes sixteen in a cycle
    bf16_to_float     1 instead of 1.5: a shift and a mask split a pair
    e4m3_code         1/2 instead of 5: the conversion itself clamps to ±448 and turns NaN into 0x7F
    e4m3_to_bf16      2 1/4 instead of 2, of which one is a slow conversion, from float16 to float32

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


# Four codes in a word become two words of two numbers, exactly.
# int8: 128 plus the low seven bits, minus 128 or 256 by the sign; $3 is INT8_BASE.
INT8_BASE = tl.constexpr(0xC343)  # the upper bytes of -128 or -256, and of 128, in BF16
INT8_TO_BF16 = tl.constexpr("""{
    .reg .b32 low, sign, x, y;
    and.b32 low, $2, 0x7F7F7F7F;
    and.b32 sign, $2, 0x80808080;
    prmt.b32 x, low, $3, 0x4140;
    prmt.b32 y, sign, $3, 0x5150;
    add.rn.bf16x2 $0, x, y;
    prmt.b32 x, low, $3, 0x4342;
    prmt.b32 y, sign, $3, 0x5352;
    add.rn.bf16x2 $1, x, y;
    }""")
E4M3_TO_FP16 = tl.constexpr("""{
    .reg .b16 low, high;
    mov.b32 {low, high}, $2;
    cvt.rn.f16x2.e4m3x2 $0, low;
    cvt.rn.f16x2.e4m3x2 $1, high;
    }""")
E4M3_TO_BF16 = tl.constexpr("""{
    .reg .b32 low, high, pair, up;
    shr.u32 high, $2, 4;
    and.b32 high, high, 0x07070707;
    lop3.b32 high, $2, 0x80808080, high, 0xEA;  // upper bytes: the sign, and three bits of the exponent
    shl.b32 low, $2, 4;
    and.b32 low, low, 0xF0F0F0F0;  // lower bytes: the exponent's last bit, and the mantissa
    mov.b32 up, 0x7B807B80;  // 2^120
    prmt.b32 pair, low, high, 0x5140;
    mul.rn.bf16x2 $0, pair, up;
    prmt.b32 pair, low, high, 0x7362;
    mul.rn.bf16x2 $1, pair, up;
    }""")


@triton.jit
def e4m3_to_bf16(codes, ON_GPU: tl.constexpr):
    """E4M3 codes as BF16, exact. On a GPU the codes of NaN become 480 and -480.

    A code's bits, moved to the places of BF16's last exponent bits and first mantissa bits, are its value times 2^-120.
    """
    if ON_GPU:
        return tl.inline_asm_elementwise(E4M3_TO_BF16, "=r,=r,r", [codes], dtype=tl.bfloat16, is_pure=True, pack=4)
    else:
        return codes.to(tl.bfloat16)
