"""SiLU(gate) * up and the E4M3 codes of the result, from the fused output [T, 2F], without a BF16 tensor in between.

    y     = round(gate * sigmoid(gate) * up)       kernels/rows/silu_mul.py, the same expression
    codes = quantize_activation(y)                 kernels/quantize/quantize_activation.py, blocks of 1 x 128

The bytes equal those of the two calls. Nothing is summed and a maximum has no order, so any tile and number of warps
give the same bytes. A tile is some of the blocks of all tokens, [N, 128], which are numbered one token after the other.
So tiles of 8 blocks have no empty part if a token has 11, as Moonlight's experts have. An incomplete last block counts
as padded with zeros. Each element of the result costs 4 bytes read and 1 + 4/128 written. Not differentiable: training
calls it inside a layer's own autograd node (models/training_forward.py).

T tokens, F intermediate size, N blocks of a tile, C columns of a block.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from octetrl.fp8.format import BLOCK, E4M3
from octetrl.fp8.quantize import Quantized, quantize_activation_reference
from octetrl.kernels.instructions import bf16_to_float, e4m3_code, sigmoid, to_bf16
from octetrl.kernels.programmatic_launch import let_next_start, lets_next_start
from octetrl.kernels.quantize.quantize_activation import block_scale, empty_rows, magnitude_bits, scale_rows
from octetrl.kernels.rows.silu_mul import silu_mul_reference

TILES = {4096: 8, 2048: 4, 1024: 4}  # columns of a program: warps; the widest that divides F, or else the narrowest


@triton.jit(do_not_specialize=["num_tokens"])
def _silu_mul_quantize_kernel(
    gate_up_ptr, code_ptr, scale_ptr, num_tokens,
    SIZE: tl.constexpr, OF_TOKEN: tl.constexpr, BLOCKS: tl.constexpr, BLOCK: tl.constexpr, POWER_OF_TWO: tl.constexpr,
    ON_GPU: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    let_next_start(EARLY)
    number_N = tl.program_id(0) * BLOCKS + tl.arange(0, BLOCKS)
    token_N, block_N = (number_N // OF_TOKEN).to(tl.int64), number_N % OF_TOKEN
    has_token_N = token_N < num_tokens
    column_NC = block_N[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    column_NC = tl.max_contiguous(column_NC, (1, 8))  # a thread: 16 bytes of gate, 16 of up, 8 of codes
    inside_NC = has_token_N[:, None] & (column_NC < SIZE)
    gate_ptr_NC = gate_up_ptr + token_N[:, None] * (2 * SIZE) + column_NC
    gate_NC = bf16_to_float(tl.load(gate_ptr_NC, mask=inside_NC, other=0.0), ON_GPU)
    up_NC = bf16_to_float(tl.load(gate_ptr_NC + SIZE, mask=inside_NC, other=0.0), ON_GPU)
    y_NC = bf16_to_float(to_bf16(gate_NC * sigmoid(gate_NC, ON_GPU) * up_NC, ON_GPU), ON_GPU)
    scale_N, inverse_N = block_scale(tl.max(magnitude_bits(y_NC), 1), POWER_OF_TWO)
    code_NC = e4m3_code(y_NC * inverse_N[:, None], ON_GPU)
    tl.store(code_ptr + token_N[:, None] * SIZE + column_NC, code_NC, mask=inside_NC)
    tl.store(scale_ptr + block_N.to(tl.int64) * scale_rows(num_tokens) + token_N, scale_N, mask=has_token_N)


def silu_mul_quantize_triton(gate_up_T2F: Tensor, power_of_two: bool = False) -> Quantized:
    """The kernel's launcher."""
    num_tokens, size = gate_up_T2F.shape[0], gate_up_T2F.shape[1] // 2
    codes, scale = empty_rows(num_tokens, size, gate_up_T2F.device)
    columns = next((columns for columns in TILES if size % columns == 0), min(TILES))
    of_token = triton.cdiv(size, BLOCK)
    if num_tokens:
        _silu_mul_quantize_kernel[(triton.cdiv(num_tokens * of_token, columns // BLOCK),)](
            gate_up_T2F, codes, scale, num_tokens, SIZE=size, OF_TOKEN=of_token, BLOCKS=columns // BLOCK, BLOCK=BLOCK,
            POWER_OF_TWO=power_of_two, ON_GPU=gate_up_T2F.is_cuda, EARLY=lets_next_start(gate_up_T2F),
            num_warps=TILES[columns],
            **({"enable_fp_fusion": False} if gate_up_T2F.is_cuda else {}),
        )  # fmt: skip
    return Quantized(codes.view(E4M3), scale)


def silu_mul_quantize_reference(gate_up_T2F: Tensor, power_of_two: bool = False) -> Quantized:
    """The same in plain torch, from the references of its parts."""
    return quantize_activation_reference(silu_mul_reference(gate_up_T2F), power_of_two)


def silu_mul_quantize(gate_up_T2F: Tensor, power_of_two: bool = False) -> Quantized:
    """[T, 2F] contiguous -> codes [T, F] E4M3, scale [T, ceil(F/128)] float32 (CUDA: strides (1, roundup(T, 4)))."""
    assert gate_up_T2F.is_contiguous() and gate_up_T2F.shape[1] % 2 == 0, f"silu_mul_quantize: {gate_up_T2F.shape}"
    run = silu_mul_quantize_triton if gate_up_T2F.is_cuda else silu_mul_quantize_reference
    return run(gate_up_T2F, power_of_two)
