"""`sort_by_expert` and `gather_codes` in one launch, for the few slots of a decode step.

    rows    = sort_by_expert(experts)
    codes_P = gather_codes(codes, rows.token)

An expert has several programs. Each reads the experts of all slots, as a program of `sort_by_expert` does, and copies
its share of the expert's rows, some at a time. It writes their tokens first and reads them again behind a barrier: the
counts give each slot a row, and the copies need each row's token. Every number and byte is written once, and has one
possible value, so nothing depends on the launch.

T tokens, S experts a token, P = T S rows, X experts, K columns, B blocks of 128 columns, R rows of a step.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from octetrl.fp8.format import E4M3
from octetrl.fp8.quantize import Quantized
from octetrl.kernels.quantize.quantize_activation import empty_rows
from octetrl.kernels.rows.gather_codes import copy_rows, gather_codes, gather_codes_reference
from octetrl.kernels.rows.sort_by_expert import (
    SortedSlots,
    empty_slots,
    place_slots,
    rows_of_tiles,
    sort_by_expert,
    sort_by_expert_reference,
    tile_of_slots,
    write_expert,
)

MOST_SLOTS = 512  # all programs read all of them: with 1,536 slots two launches are faster (lab/log.md)
PROGRAMS = 256  # about two for each multiprocessor
STEP_BYTES = 16384  # of codes that a program copies at a time


@triton.jit(do_not_specialize=["num_slots"])
def _sort_and_gather_kernel(
    expert_ptr, token_ptr, row_ptr, first_ptr, owner_ptr, num_slots,
    code_ptr, scale_ptr, out_code_ptr, out_scale_ptr, scale_row, scale_block, out_block,
    SLOTS: tl.constexpr, BLOCK_P: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, BLOCKS: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_B: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    expert, num_experts = tl.program_id(0), tl.num_programs(0)
    share, shares = tl.program_id(1), tl.num_programs(1)
    slot_P, is_it_P, row_P, first, end = place_slots(expert_ptr, expert, num_experts, num_slots, BLOCK_P)
    is_own_P = is_it_P & ((row_P - first) // STEP % shares == share)
    tl.store(token_ptr + row_P, (slot_P // SLOTS).to(tl.int64), mask=is_own_P)
    if share == 0:
        tl.store(row_ptr + slot_P, row_P.to(tl.int64), mask=is_it_P)
        write_expert(first_ptr, owner_ptr, expert, num_experts, first, end, num_slots, ROWS)
    tl.debug_barrier()
    for start in range(first + share * STEP, end, shares * STEP):
        row_R = (start + tl.arange(0, STEP)).to(tl.int64)
        copy_rows(
            code_ptr, scale_ptr, token_ptr, out_code_ptr, out_scale_ptr, row_R, row_R < end, scale_row, scale_block,
            out_block, COLUMNS, BLOCKS, BLOCK_K, BLOCK_B,
        )  # fmt: skip


def sort_and_gather_triton(expert_TS: Tensor, num_experts: int, x: Quantized) -> tuple[SortedSlots, Quantized]:
    """The launcher, for any number of slots."""
    (rows, slots), (columns, blocks) = expert_TS.shape, (x.codes.shape[1], x.scale.shape[1])
    num_slots = rows * slots
    assert x.codes.is_contiguous(), "sort_and_gather: codes in pieces"
    found = empty_slots(expert_TS, num_experts)
    codes, scale = empty_rows(num_slots, columns, x.codes.device)
    block_k = triton.next_power_of_2(columns)
    options = {"enable_fp_fusion": False} if x.codes.is_cuda else {}
    _sort_and_gather_kernel[(num_experts, max(1, PROGRAMS // num_experts))](
        expert_TS, *found, num_slots, x.codes.view(torch.uint8), x.scale, codes, scale, *x.scale.stride(),
        scale.stride(1), SLOTS=slots, ROWS=rows_of_tiles(num_slots, num_experts), COLUMNS=columns, BLOCKS=blocks,
        BLOCK_K=block_k, BLOCK_B=triton.next_power_of_2(blocks), STEP=max(1, STEP_BYTES // block_k),
        **tile_of_slots(num_slots), **options,
    )  # fmt: skip
    return found, Quantized(codes.view(E4M3), scale)


def sort_and_gather_reference(expert_TS: Tensor, num_experts: int, x: Quantized) -> tuple[SortedSlots, Quantized]:
    """In plain torch. Of the emulation's values too."""
    found = sort_by_expert_reference(expert_TS, num_experts)
    return found, gather_codes_reference(x, found.token_P)


def sort_and_gather(expert_TS: Tensor, num_experts: int, x: Quantized) -> tuple[SortedSlots, Quantized]:
    """The rows of all experts (`sort_by_expert`), and x's codes and scales of each row (`gather_codes`)."""
    if not expert_TS.is_cuda:
        return sort_and_gather_reference(expert_TS, num_experts, x)
    if expert_TS.numel() <= MOST_SLOTS:
        return sort_and_gather_triton(expert_TS, num_experts, x)
    found = sort_by_expert(expert_TS, num_experts)
    return found, gather_codes(x, found.token_P)
