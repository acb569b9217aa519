"""One AdamW update of one tensor, in one pass over it: gradient, two moments and weight are read and written once.

    g = gradient * clip
    m = m + (g - m) (1 - beta1);    v = beta2 v + (1 - beta2) g^2
    w = w (1 - lr decay) - lr / (1 - beta1^t) * m / (sqrt(v) / sqrt(1 - beta2^t) + eps)

Each operation is rounded to float32 separately. Only the GPU's root and quotient may differ from the reference's, in
their last bit or two. `w` is the float32 master, which is then rounded to nearest into the BF16 weight. Without a
master it is the BF16 weight itself, with stochastic rounding (trainer/gradients.py says why). The clip factor
is on the device and is applied here, so gradients are not rewritten for clipping.

**Moments** are float32, BF16 or 8-bit. BF16 and 8-bit moments also use stochastic rounding. The mean of an EMA with
beta2 = 0.999 moves by a thousandth in a step, less than half a BF16 step, so rounding to nearest would never change it.
An 8-bit moment is a float32 cut off after three bits of mantissa, within a window of exponents that a block of 128
elements shares:

    exp_avg       sign, 4 bits of exponent, 3 of mantissa       values down to 2^-17 of the block's largest, then 0
    exp_avg_sq    5 bits of exponent, 3 of mantissa             down to 2^-33, and 0 only if v is 0: v = 0 beside
                                                                m > 0 would divide by eps
    exponents     uint8 a block, from 1 to 127. A code shifted to the place of a float32's upper bits, subnormal ones
                  included, times 2^(exponent - 1) is the value. Largest: 30,720 and 2e9, where they saturate

The window moves by powers of two, so a constant value keeps its code when its neighbours change. Stochastic rounding is
the only source of error, and it has no bias. A linear or a scaled E4M3 map would round again with each change of the
largest value. torchao and bitsandbytes round to the nearest of 256 values, which needs a search for each value and
stalls as described above.

Random bits are a hash of (key, element). There is no generator and nothing to save, and CPU and GPU use the same bits.

Bytes an element, with a BF16 weight: 8-bit 4 + 2 * 2 + 4 = 12 with stochastic rounding, 18 with a master (the weight is
then only written); BF16 16 and 22; float32 24 and 30. Elements are taken flat, in rows of 128.

R rows of a program, C the 128 columns.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

STATE_BLOCK = 128  # elements that share one exponent
BLOCK_R = 32
PIECE_ELEMENTS = 1 << 20  # elements that the CPU form processes at a time (int64 temporaries); multiple of STATE_BLOCK
AVG_EXPONENT_BITS = 4
SQ_EXPONENT_BITS = 5


class Moment(NamedTuple):
    """float32 or bfloat16 values; or uint8 codes, with a uint8 exponent for each 128 of them."""

    values: Tensor
    exponents: Tensor | None = None


class AdamScalars(NamedTuple):
    """The scalars that all updates of one step share. `step` counts from 1."""

    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    step: int

    def factors(self) -> tuple[float, float, float, float, float, float, float]:
        """1 - beta1, beta2, 1 - beta2, 1 / sqrt(1 - beta2^t), eps, 1 - lr decay, lr / (1 - beta1^t)."""
        root = 1.0 / (1.0 - self.beta2**self.step) ** 0.5
        rate = self.lr / (1.0 - self.beta1**self.step)
        return 1.0 - self.beta1, self.beta2, 1.0 - self.beta2, root, self.eps, 1.0 - self.lr * self.weight_decay, rate


@triton.jit
def _mixed(x):
    """A bijection of 32 bits in which each bit of x flips half of the result's bits (C. Wellons' lowbias32)."""
    x = x ^ (x >> 16)
    x = x * 0x7FEB352D
    x = x ^ (x >> 15)
    x = x * 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def _rounded_by_chance(x, noise):
    """BF16 from float32 by stochastic rounding. `noise` has 16 bits."""
    bits = x.to(tl.int32, bitcast=True) + noise.to(tl.int32)
    rounded = (bits & -65536).to(tl.float32, bitcast=True)
    return tl.where(x == x, rounded, x).to(tl.bfloat16)


@triton.jit
def _power(exponent_R):
    """2^exponent as a float32 column; exponent: int32 from -126 to 127."""
    return ((exponent_R + 127) << 23).to(tl.float32, bitcast=True)[:, None]


@triton.jit
def _encoded(value_RC, noise_RC, EXPONENT_BITS: tl.constexpr):
    """Codes without sign and the rows' exponents, int32. value_RC: float32, not negative; noise_RC: 20 bits."""
    peak_R = tl.max(value_RC, axis=1).to(tl.int32, bitcast=True)
    top_R = (peak_R + 0xFFFFF) >> 23  # exponent of the peak plus one code step, because it may round up
    exponent_R = tl.minimum(tl.maximum(top_R - (2**EXPONENT_BITS - 2), 1), 127)
    bits_RC = (value_RC * _power(1 - exponent_R)).to(tl.int32, bitcast=True)
    return tl.minimum((bits_RC + noise_RC.to(tl.int32)) >> 20, 8 * 2**EXPONENT_BITS - 1), exponent_R


@triton.jit(do_not_specialize=["key", "first"])
def _adamw_kernel(
    weight_ptr,
    master_ptr,
    gradient_ptr,
    avg_ptr,
    sq_ptr,
    avg_exponent_ptr,
    sq_exponent_ptr,
    clip_ptr,
    num_elements,
    num_blocks,
    key,
    first,
    one_less_beta1,
    beta2,
    one_less_beta2,
    root,
    eps,
    keep,
    rate,
    HAS_MASTER: tl.constexpr,
    BLOCK_R: tl.constexpr,
    SIZE: tl.constexpr,
    AVG_EXPONENT_BITS: tl.constexpr,
    SQ_EXPONENT_BITS: tl.constexpr,
):
    EIGHT_BIT: tl.constexpr = avg_ptr.dtype.element_ty == tl.uint8
    BF16_STATES: tl.constexpr = avg_ptr.dtype.element_ty == tl.bfloat16
    ROUNDS_WEIGHT: tl.constexpr = (not HAS_MASTER) and weight_ptr.dtype.element_ty == tl.bfloat16
    row_R = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    index_RC = row_R[:, None] * SIZE + tl.arange(0, SIZE)[None, :]
    inside_RC = index_RC < num_elements
    g_RC = tl.load(gradient_ptr + index_RC, mask=inside_RC, other=0.0).to(tl.float32) * tl.load(clip_ptr)
    if EIGHT_BIT:
        avg_code_RC = tl.load(avg_ptr + index_RC, mask=inside_RC, other=0).to(tl.int32)
        sq_code_RC = tl.load(sq_ptr + index_RC, mask=inside_RC, other=0).to(tl.int32)
        avg_exponent_R = tl.load(avg_exponent_ptr + row_R, mask=row_R < num_blocks, other=1).to(tl.int32)
        sq_exponent_R = tl.load(sq_exponent_ptr + row_R, mask=row_R < num_blocks, other=1).to(tl.int32)
        m_RC = (((avg_code_RC & 127) << 20) | ((avg_code_RC & 128) << 24)).to(tl.float32, bitcast=True)
        m_RC = m_RC * _power(avg_exponent_R - 1)
        v_RC = (sq_code_RC << 20).to(tl.float32, bitcast=True) * _power(sq_exponent_R - 1)
    else:
        m_RC = tl.load(avg_ptr + index_RC, mask=inside_RC, other=0.0).to(tl.float32)
        v_RC = tl.load(sq_ptr + index_RC, mask=inside_RC, other=0.0).to(tl.float32)
    m_RC = m_RC + (g_RC - m_RC) * one_less_beta1
    v_RC = v_RC * beta2 + (g_RC * g_RC) * one_less_beta2

    w_ptr = master_ptr if HAS_MASTER else weight_ptr
    w_RC = tl.load(w_ptr + index_RC, mask=inside_RC, other=0.0).to(tl.float32) * keep
    w_RC = w_RC - m_RC / (tl.sqrt(v_RC) * root + eps) * rate

    if EIGHT_BIT or BF16_STATES or ROUNDS_WEIGHT:
        noise_RC = _mixed((index_RC + first).to(tl.uint32) ^ key.to(tl.uint32))
        further_RC = noise_RC * 0x9E3779B1
        further_RC = (further_RC ^ (further_RC >> 15)) >> 12
    if HAS_MASTER:
        tl.store(master_ptr + index_RC, w_RC, mask=inside_RC)
    if ROUNDS_WEIGHT:
        tl.store(weight_ptr + index_RC, _rounded_by_chance(w_RC, noise_RC >> 16), mask=inside_RC)
    else:
        tl.store(weight_ptr + index_RC, w_RC.to(weight_ptr.dtype.element_ty), mask=inside_RC)

    if EIGHT_BIT:
        avg_code_RC, avg_exponent_R = _encoded(tl.abs(m_RC), (noise_RC & 0xFFFF) << 4, AVG_EXPONENT_BITS)
        avg_code_RC |= (m_RC.to(tl.int32, bitcast=True) >> 24) & 128
        sq_code_RC, sq_exponent_R = _encoded(v_RC, further_RC, SQ_EXPONENT_BITS)
        sq_code_RC = tl.maximum(sq_code_RC, tl.where(v_RC > 0.0, 1, 0))
        tl.store(avg_ptr + index_RC, avg_code_RC.to(tl.uint8), mask=inside_RC)
        tl.store(sq_ptr + index_RC, sq_code_RC.to(tl.uint8), mask=inside_RC)
        tl.store(avg_exponent_ptr + row_R, avg_exponent_R.to(tl.uint8), mask=row_R < num_blocks)
        tl.store(sq_exponent_ptr + row_R, sq_exponent_R.to(tl.uint8), mask=row_R < num_blocks)
    elif BF16_STATES:
        tl.store(avg_ptr + index_RC, _rounded_by_chance(m_RC, noise_RC & 0xFFFF), mask=inside_RC)
        tl.store(sq_ptr + index_RC, _rounded_by_chance(v_RC, further_RC >> 4), mask=inside_RC)
    else:
        tl.store(avg_ptr + index_RC, m_RC, mask=inside_RC)
        tl.store(sq_ptr + index_RC, v_RC, mask=inside_RC)


def adamw_triton(
    weight: Tensor, master: Tensor | None, gradient: Tensor, exp_avg: Moment, exp_avg_sq: Moment, clip: Tensor,
    scalars: AdamScalars, *, key: int, first: int = 0,
) -> None:  # fmt: skip
    """The kernel's launcher; arguments as `adamw` takes them."""
    num_elements = weight.numel()
    num_blocks = triton.cdiv(num_elements, STATE_BLOCK)
    if num_elements == 0:
        return
    avg_exponents = exp_avg.values if exp_avg.exponents is None else exp_avg.exponents
    sq_exponents = exp_avg_sq.values if exp_avg_sq.exponents is None else exp_avg_sq.exponents
    options = {"enable_fp_fusion": False} if weight.is_cuda else {}
    _adamw_kernel[(triton.cdiv(num_blocks, BLOCK_R),)](
        weight, weight if master is None else master, gradient, exp_avg.values, exp_avg_sq.values,
        avg_exponents, sq_exponents, clip, num_elements, num_blocks, key, first, *scalars.factors(),
        HAS_MASTER=master is not None, BLOCK_R=BLOCK_R, SIZE=STATE_BLOCK, AVG_EXPONENT_BITS=AVG_EXPONENT_BITS,
        SQ_EXPONENT_BITS=SQ_EXPONENT_BITS, num_warps=8, **options,
    )  # fmt: skip


def chance_noise(key: int, first: int, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """Random bits of elements `first` and on, int64 [count]: 16 for the weight, 16 for exp_avg, 20 for exp_avg_sq."""
    whole = 0xFFFFFFFF
    x = torch.arange(first, first + count) ^ key
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
        x = ((x ^ (x >> shift)) * factor) & whole
    x = x ^ (x >> 16)
    further = (x * 0x9E3779B1) & whole
    return x >> 16, x & 0xFFFF, (further ^ (further >> 15)) >> 12


def round_by_chance(value: Tensor, noise: Tensor) -> Tensor:
    """Stochastic rounding to BF16: up with the probability of the cut-off part. value: float32; noise: 16 bits each."""
    bits = (value.view(torch.int32) + noise.to(torch.int32)) & -65536
    return torch.where(value == value, bits.view(torch.float32), value).to(torch.bfloat16)


def decode_moment(moment: Moment) -> Tensor:
    """float32 values in the shape of `moment.values`. exp_avg_sq has no sign; `decode_square` decodes its codes."""
    if moment.exponents is None:
        return moment.values.float()
    codes = moment.values.int()
    return torch.where(codes >= 128, -1.0, 1.0) * _decode(codes & 127, moment.exponents)


def decode_square(moment: Moment) -> Tensor:
    """As `decode_moment`, for exp_avg_sq."""
    return moment.values.float() if moment.exponents is None else _decode(moment.values.int(), moment.exponents)


def _power_reference(exponents: Tensor, count: int) -> Tensor:
    return ((exponents.int() + 127) << 23).view(torch.float32).repeat_interleave(STATE_BLOCK)[:count]


def _decode(codes: Tensor, exponents: Tensor) -> Tensor:
    powers = _power_reference(exponents.int() - 1, codes.numel())
    return (codes << 20).view(torch.float32) * powers.view(codes.shape)


def _encode(value: Tensor, noise: Tensor, exponent_bits: int) -> tuple[Tensor, Tensor]:
    padded = torch.nn.functional.pad(value, (0, -value.numel() % STATE_BLOCK)).view(-1, STATE_BLOCK)
    top = (padded.amax(1).view(torch.int32) + 0xFFFFF) >> 23
    exponents = (top - (2**exponent_bits - 2)).clamp(1, 127)
    bits = (value * _power_reference(1 - exponents, value.numel())).view(torch.int32)
    codes = ((bits + noise.to(torch.int32)) >> 20).clamp(max=8 * 2**exponent_bits - 1)
    return codes, exponents.to(torch.uint8)


def adamw_reference(
    weight: Tensor, master: Tensor | None, gradient: Tensor, exp_avg: Moment, exp_avg_sq: Moment, clip: Tensor,
    scalars: AdamScalars, *, key: int, first: int = 0,
) -> None:  # fmt: skip
    """The same in plain torch, a piece at a time."""
    for start in range(0, weight.numel(), PIECE_ELEMENTS):
        piece = slice(start, start + PIECE_ELEMENTS)
        blocks = slice(start // STATE_BLOCK, (start + PIECE_ELEMENTS) // STATE_BLOCK)
        moments = [
            Moment(values[piece], None if exponents is None else exponents[blocks])
            for values, exponents in (exp_avg, exp_avg_sq)
        ]
        own = None if master is None else master[piece]
        _update_piece(
            weight[piece], own, gradient[piece].float() * clip, moments[0], moments[1], scalars, key, first + start
        )


def _update_piece(
    weight: Tensor, master: Tensor | None, g: Tensor, exp_avg: Moment, exp_avg_sq: Moment,
    scalars: AdamScalars, key: int, first: int,
) -> None:  # fmt: skip
    one_less_beta1, beta2, one_less_beta2, root, eps, keep, rate = (
        torch.tensor(factor, dtype=torch.float32) for factor in scalars.factors()
    )
    m, v = decode_moment(exp_avg), decode_square(exp_avg_sq)
    m = m + (g - m) * one_less_beta1
    v = v * beta2 + (g * g) * one_less_beta2
    w = (weight if master is None else master).float() * keep - (m / (v.double().sqrt().float() * root + eps)) * rate
    weight_noise, avg_noise, sq_noise = chance_noise(key, first, g.numel())
    if master is not None:
        master.copy_(w)
    by_chance = master is None and weight.dtype == torch.bfloat16
    weight.copy_(round_by_chance(w, weight_noise) if by_chance else w)
    if exp_avg.exponents is not None and exp_avg_sq.exponents is not None:
        codes, exponents = _encode(m.abs(), avg_noise << 4, AVG_EXPONENT_BITS)
        exp_avg.values.copy_(codes + 128 * m.signbit())
        exp_avg.exponents.copy_(exponents)
        codes, exponents = _encode(v, sq_noise, SQ_EXPONENT_BITS)
        exp_avg_sq.values.copy_(torch.maximum(codes, (v > 0).int()))
        exp_avg_sq.exponents.copy_(exponents)
    else:
        narrow = exp_avg.values.dtype == torch.bfloat16
        exp_avg.values.copy_(round_by_chance(m, avg_noise) if narrow else m)
        exp_avg_sq.values.copy_(round_by_chance(v, sq_noise >> 4) if narrow else v)


def adamw(
    weight: Tensor, master: Tensor | None, gradient: Tensor, exp_avg: Moment, exp_avg_sq: Moment, clip: Tensor,
    scalars: AdamScalars, *, key: int, first: int = 0,
) -> None:  # fmt: skip
    """Update weight, master and moments in place. All have one size and are contiguous, of any shape.

    weight: BF16 or float32. master: float32, or None: a float32 weight is its own master, and a BF16 weight is rounded
    stochastically. gradient: float32 or BF16. clip: float32 scalar on the device. The random bits depend on `key` in
    [0, 2^31) and the element's number, counted from `first`. Two halves of a tensor, updated separately, have the bits
    of the whole.
    """
    assert 0 <= key < 1 << 31 and weight.numel() + first < 1 << 31, f"adamw: key {key}, {weight.numel()} elements"
    assert gradient.dtype in (torch.float32, torch.bfloat16), f"adamw: gradient is {gradient.dtype}"
    assert clip.dtype == torch.float32, f"adamw: clip is {clip.dtype}"
    for tensor in (master, gradient, exp_avg.values, exp_avg_sq.values):
        assert tensor is None or (tensor.numel() == weight.numel() and tensor.is_contiguous()), "adamw: sizes differ"
    launcher = adamw_triton if weight.is_cuda else adamw_reference
    flat = (
        weight.view(-1),
        None if master is None else master.view(-1),
        gradient.view(-1),
        Moment(exp_avg.values.view(-1), exp_avg.exponents),
        Moment(exp_avg_sq.values.view(-1), exp_avg_sq.exponents),
    )
    launcher(*flat, clip, scalars, key=key, first=first)
