"""Gather the input of a decode forward from the rows of the batch, in one kernel instead of fifteen small ones.

    row                      = active[b]
    token, length, key ...   = the row's values                a length of 0 marks the idle row
    position                 = max(length - 1, 0)
    slot                     = table[row, position // page_size] * page_size + position % page_size;  -1 if idle
    counter                  = length - prompt                 tokens of the completion so far (for sampling)
    divisor                  = temperature, or 1 if greedy     of the logits whose log-prob is recorded

A row that verifies a draft is its sequence's row with another query: token = the draft, length + the draft's offset.

There is one program per sequence. Values are only copied and computed as integers, so no order of sums matters. At 128
sequences, the launches of the torch form alone took 3% of a small model's step.

B sequences, R rows, W pages of a block table. Integers of a row: token, length, prompt, key, top-k.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor


class DecodeRows(NamedTuple):
    """The inputs of a decode forward, as views of a few buffers."""

    token_B: Tensor  # int64
    position_B: Tensor  # int64
    slot_B: Tensor  # int64; -1 in idle rows
    key_B: Tensor  # int64
    counter_B: Tensor  # int64
    top_k_B: Tensor  # int64
    length_B: Tensor  # int32: number of tokens, of which the query is the last; 0 in idle rows
    temperature_B: Tensor  # float32
    top_p_B: Tensor  # float32
    min_p_B: Tensor  # float32
    divisor_B: Tensor  # float32
    table_BW: Tensor  # int32


@triton.jit
def _gather_rows_kernel(
    active_ptr, draft_ptr, integer_ptr, fraction_ptr, table_ptr, out_integer_ptr, out_length_ptr, out_fraction_ptr,
    out_table_ptr, num_rows, draft_stride, DRAFTS: tl.constexpr, PAGE_SIZE: tl.constexpr, WIDTH: tl.constexpr,
    BLOCK_W: tl.constexpr,
):  # fmt: skip
    b, B = tl.program_id(0), tl.num_programs(0)
    row = tl.load(active_ptr + b)
    token = tl.load(integer_ptr + row)
    length = tl.load(integer_ptr + num_rows + row)
    if DRAFTS:
        offset = tl.load(draft_ptr + draft_stride + b)
        token = tl.where(offset > 0, tl.load(draft_ptr + b), token)
        length += offset
    position = tl.maximum(length - 1, 0)
    page = tl.load(table_ptr + row * WIDTH + position // PAGE_SIZE).to(tl.int64)
    slot = tl.where(length > 0, page * PAGE_SIZE + position % PAGE_SIZE, -1)
    tl.store(out_integer_ptr + b, token)
    tl.store(out_integer_ptr + B + b, position)
    tl.store(out_integer_ptr + 2 * B + b, slot)
    tl.store(out_integer_ptr + 3 * B + b, tl.load(integer_ptr + 3 * num_rows + row))
    tl.store(out_integer_ptr + 4 * B + b, length - tl.load(integer_ptr + 2 * num_rows + row))
    tl.store(out_integer_ptr + 5 * B + b, tl.load(integer_ptr + 4 * num_rows + row))
    tl.store(out_length_ptr + b, length.to(tl.int32))
    for i in tl.static_range(3):
        tl.store(out_fraction_ptr + i * B + b, tl.load(fraction_ptr + i * num_rows + row))
    temperature = tl.load(fraction_ptr + row)
    tl.store(out_fraction_ptr + 3 * B + b, tl.where(temperature == 0.0, 1.0, temperature))
    for start in range(0, WIDTH, BLOCK_W):
        column_W = start + tl.arange(0, BLOCK_W)
        page_W = tl.load(table_ptr + row * WIDTH + column_W, mask=column_W < WIDTH, other=0)
        tl.store(out_table_ptr + b.to(tl.int64) * WIDTH + column_W, page_W, mask=column_W < WIDTH)


def gather_rows_triton(
    active_B: Tensor,
    integers_5R: Tensor,
    fractions_3R: Tensor,
    table_RW: Tensor,
    page_size: int,
    drafts_2B: Tensor | None = None,
) -> DecodeRows:
    """The kernel's launcher. All contiguous; of drafts_2B, each row."""
    batch, width = len(active_B), table_RW.shape[1]
    integers_6B = torch.empty(6, batch, dtype=torch.int64, device=active_B.device)
    length_B = torch.empty(batch, dtype=torch.int32, device=active_B.device)
    fractions_4B = torch.empty(4, batch, dtype=torch.float32, device=active_B.device)
    table_BW = torch.empty(batch, width, dtype=torch.int32, device=active_B.device)
    _gather_rows_kernel[(batch,)](
        active_B, active_B if drafts_2B is None else drafts_2B, integers_5R, fractions_3R, table_RW, integers_6B,
        length_B, fractions_4B, table_BW, integers_5R.shape[1], 0 if drafts_2B is None else drafts_2B.stride(0),
        DRAFTS=drafts_2B is not None, PAGE_SIZE=page_size, WIDTH=width,
        BLOCK_W=min(1024, triton.next_power_of_2(width)), num_warps=1,
        **({"enable_fp_fusion": False} if active_B.is_cuda else {}),
    )  # fmt: skip
    token_B, position_B, slot_B, key_B, counter_B, top_k_B = integers_6B.unbind()
    temperature_B, top_p_B, min_p_B, divisor_B = fractions_4B.unbind()
    return DecodeRows(
        token_B, position_B, slot_B, key_B, counter_B, top_k_B, length_B, temperature_B, top_p_B, min_p_B, divisor_B,
        table_BW,
    )  # fmt: skip


def gather_rows_reference(
    active_B: Tensor,
    integers_5R: Tensor,
    fractions_3R: Tensor,
    table_RW: Tensor,
    page_size: int,
    drafts_2B: Tensor | None = None,
) -> DecodeRows:
    """The same in plain torch."""
    token_B, length_B, prompt_B, key_B, top_k_B = integers_5R.index_select(1, active_B).unbind()
    if drafts_2B is not None:
        token_B, length_B = torch.where(drafts_2B[1] > 0, drafts_2B[0], token_B), length_B + drafts_2B[1]
    temperature_B, top_p_B, min_p_B = fractions_3R.index_select(1, active_B).unbind()
    position_B = (length_B - 1).clamp_min_(0)
    table_BW = table_RW.index_select(0, active_B)
    page_B = table_BW.gather(1, (position_B // page_size)[:, None])[:, 0].long()
    slot_B = (page_B * page_size + position_B % page_size).masked_fill_(length_B == 0, -1)
    divisor_B = temperature_B.masked_fill(temperature_B == 0, 1.0)
    return DecodeRows(
        token_B, position_B, slot_B, key_B, length_B - prompt_B, top_k_B, length_B.int(), temperature_B, top_p_B,
        min_p_B, divisor_B, table_BW,
    )  # fmt: skip


def gather_rows(
    active_B: Tensor,
    integers_5R: Tensor,
    fractions_3R: Tensor,
    table_RW: Tensor,
    page_size: int,
    drafts_2B: Tensor | None = None,
) -> DecodeRows:
    """active_B, integers_5R: int64; fractions_3R: float32 (temperature, top-p, min-p); table_RW: int32.

    drafts_2B: int64, each row's draft and how far it lies behind the sequence's query; 0 there: no draft. None: none.
    """
    gather = gather_rows_triton if active_B.is_cuda else gather_rows_reference
    return gather(active_B, integers_5R, fractions_3R, table_RW, page_size, drafts_2B)
