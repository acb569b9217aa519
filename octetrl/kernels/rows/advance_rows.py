"""After sampling: make each row's token its next query, and pack the results for the host.

    token[row], length[row]  =  max(drawn, 0), length + 1          the idle row (length 0) does not change
    bits                     =  (drawn, the log-prob's float32 bits) as int32 [2, B]

The host also receives a token of -1, which means that the logits were not finite. One kernel replaces ten small ones.

B sequences, R rows. Integers of a row: token, length, and three that do not change.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _advance_rows_kernel(
    drawn_ptr, logprob_ptr, active_ptr, integer_ptr, bits_ptr, num_sequences, num_rows, BLOCK_B: tl.constexpr
):
    b_B = tl.program_id(0) * BLOCK_B + tl.arange(0, BLOCK_B)
    inside_B = b_B < num_sequences
    drawn_B = tl.load(drawn_ptr + b_B, mask=inside_B, other=0)
    logprob_B = tl.load(logprob_ptr + b_B, mask=inside_B, other=0.0)
    tl.store(bits_ptr + b_B, drawn_B.to(tl.int32), mask=inside_B)
    tl.store(bits_ptr + num_sequences + b_B, logprob_B.to(tl.int32, bitcast=True), mask=inside_B)
    row_B = tl.load(active_ptr + b_B, mask=inside_B, other=0)
    length_B = tl.load(integer_ptr + num_rows + row_B, mask=inside_B, other=0)
    moves_B = inside_B & (length_B > 0)
    tl.store(integer_ptr + row_B, tl.maximum(drawn_B, 0), mask=moves_B)
    tl.store(integer_ptr + num_rows + row_B, length_B + 1, mask=moves_B)


def advance_rows_triton(drawn_B: Tensor, logprob_B: Tensor, active_B: Tensor, integers_5R: Tensor) -> Tensor:
    """The kernel's launcher. All contiguous."""
    bits_2B = torch.empty(2, len(drawn_B), dtype=torch.int32, device=drawn_B.device)
    _advance_rows_kernel[(triton.cdiv(len(drawn_B), 128),)](
        drawn_B, logprob_B, active_B, integers_5R, bits_2B, len(drawn_B), integers_5R.shape[1], BLOCK_B=128,
        **({"enable_fp_fusion": False} if drawn_B.is_cuda else {}),
    )  # fmt: skip
    return bits_2B


def advance_rows_reference(drawn_B: Tensor, logprob_B: Tensor, active_B: Tensor, integers_5R: Tensor) -> Tensor:
    """The same in plain torch."""
    moving_b = active_B[integers_5R[1, active_B] > 0]
    integers_5R[0, moving_b] = drawn_B[integers_5R[1, active_B] > 0].clamp_min(0)
    integers_5R[1, moving_b] += 1
    return torch.stack((drawn_B.int(), logprob_B.view(torch.int32)))


def advance_rows(drawn_B: Tensor, logprob_B: Tensor, active_B: Tensor, integers_5R: Tensor) -> Tensor:
    """Advance the rows in place and return int32 [2, B] for the host.

    drawn_B, active_B, integers_5R: int64; logprob_B: float32. `active_B` has each row once, and the idle row as often
    as padding needs it.
    """
    advance = advance_rows_triton if drawn_B.is_cuda else advance_rows_reference
    return advance(drawn_B, logprob_B, active_B, integers_5R)
