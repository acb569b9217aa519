"""After sampling with drafts: move each sequence on by its right drafts, and pack the results for the host.

A sequence has its own row and behind it the rows of its drafts, in order. A draft is right if the row before it is
right and sampled just this token.

    accepted        = number of right drafts of the sequence
    token, length   = what its last right row sampled, length + 1 + accepted
    bits            = (sampled, the log-prob's float32 bits) as int32 [2, N]

If any row's logits were not finite (sampled -1), no sequence moves: the forward is repeated without drafts. One program
does it all, so the host needs only the results.

N rows of a forward, R rows of the batch. The plan's rows: row of the sequence, draft, its offset behind the sequence's
query; 0 in the sequence's own row and in idle ones.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _settle_drafts_kernel(
    drawn_ptr, logprob_ptr, plan_ptr, integer_ptr, bits_ptr, N, num_rows, plan_stride, BLOCK_N: tl.constexpr
):
    n_N = tl.arange(0, BLOCK_N)
    inside_N = n_N < N
    drawn_N = tl.load(drawn_ptr + n_N, mask=inside_N, other=0)
    logprob_N = tl.load(logprob_ptr + n_N, mask=inside_N, other=0.0)
    tl.store(bits_ptr + n_N, drawn_N.to(tl.int32), mask=inside_N)
    tl.store(bits_ptr + N + n_N, logprob_N.to(tl.int32, bitcast=True), mask=inside_N)
    row_N = tl.load(plan_ptr + n_N, mask=inside_N, other=0)
    offset_N = tl.load(plan_ptr + 2 * plan_stride + n_N, mask=inside_N, other=0)
    length_N = tl.load(integer_ptr + num_rows + row_N, mask=inside_N, other=0)
    poisoned = tl.max((inside_N & (length_N > 0) & (drawn_N < 0)).to(tl.int32), 0)
    moves_N = inside_N & (length_N > 0) & (offset_N == 0) & (poisoned == 0)
    right_N, last_N, step = moves_N, drawn_N, 0
    num_right = tl.max(right_N.to(tl.int32), 0)
    while num_right > 0:
        step += 1
        next_N = n_N + step
        right_N = right_N & (next_N < N)
        right_N = right_N & (tl.load(plan_ptr + 2 * plan_stride + next_N, mask=right_N, other=0) == step)
        right_N = right_N & (tl.load(plan_ptr + plan_stride + next_N, mask=right_N, other=-1) == last_N)
        last_N = tl.where(right_N, tl.load(drawn_ptr + next_N, mask=right_N, other=0), last_N)
        length_N += right_N.to(tl.int64)
        num_right = tl.max(right_N.to(tl.int32), 0)
    tl.store(integer_ptr + row_N, last_N, mask=moves_N)
    tl.store(integer_ptr + num_rows + row_N, length_N + 1, mask=moves_N)


def settle_drafts_triton(drawn_N: Tensor, logprob_N: Tensor, plan_3N: Tensor, integers_5R: Tensor) -> Tensor:
    """The kernel's launcher. All contiguous; of plan_3N, each row."""
    bits_2N = torch.empty(2, len(drawn_N), dtype=torch.int32, device=drawn_N.device)
    _settle_drafts_kernel[(1,)](
        drawn_N, logprob_N, plan_3N, integers_5R, bits_2N, len(drawn_N), integers_5R.shape[1], plan_3N.stride(0),
        BLOCK_N=triton.next_power_of_2(len(drawn_N)), **({"enable_fp_fusion": False} if drawn_N.is_cuda else {}),
    )  # fmt: skip
    return bits_2N


def settle_drafts_reference(drawn_N: Tensor, logprob_N: Tensor, plan_3N: Tensor, integers_5R: Tensor) -> Tensor:
    """The same in plain torch."""
    row_N, token_N, offset_N = plan_3N.unbind()
    in_use_N = integers_5R[1, row_N] > 0
    if not bool((drawn_N[in_use_N] < 0).any()):
        right_N = in_use_N & (offset_N == 0)
        right_N[1:] |= (offset_N[1:] > 0) & (token_N[1:] == drawn_N[:-1])
        wrong_N = (~right_N).cumsum(0)
        first_N = torch.arange(len(row_N)) - offset_N
        right_N &= wrong_N == wrong_N[first_N]  # nothing wrong since the sequence's own row
        for place, row in zip(right_N.nonzero()[:, 0].tolist(), row_N[right_N].tolist(), strict=True):
            integers_5R[0, row] = drawn_N[place]
            integers_5R[1, row] += 1
    return torch.stack((drawn_N.int(), logprob_N.view(torch.int32)))


def settle_drafts(drawn_N: Tensor, logprob_N: Tensor, plan_3N: Tensor, integers_5R: Tensor) -> Tensor:
    """Advance the rows in place and return int32 [2, N] for the host.

    drawn_N, plan_3N, integers_5R: int64; logprob_N: float32. `plan_3N` has each sequence's own row once, and the idle
    row as often as padding needs it.
    """
    settle = settle_drafts_triton if drawn_N.is_cuda else settle_drafts_reference
    return settle(drawn_N, logprob_N, plan_3N, integers_5R)
