"""The gradient of an embedding: for each token id the sum of its rows, in float32, in one order.

    dweight[v] = sum of dy[t] over all t with token_ids[t] = v          rounded once, to the weight's dtype

The tokens are first sorted, stably, so that the rows of one id are neighbours in the order of their positions. A
program then takes the rows of one id and `BLOCK_E` columns. It adds each tile of `TILE` rows in one tree, and the tiles
in order. There are no atomics and no sum depends on the order of programs, so the same batch always gives the same
bits. In BF16 sums, a token that occurs thousands of times would stop growing; here only the result is BF16.

The program of a token that occurs n times reads n rows one after another, sixteen in flight. A batch of one repeated
token is the slowest case, at some milliseconds. Ids that do not occur stay zero and are not read.

Bytes with a BF16 weight: 2 V E written as zeros, 2 T E read, 2 U E written for the U ids that occur. torch's own kernel
also sorts and repeats its bits. But it sums in float32 only for float32 input, and then returns float32: 4 T E for
copies and 8 V E, plus a rounding of everything. At V = 151,936 and E = 4,096 that is 2.5 GB more memory.

T tokens, V vocabulary, E hidden size, R rows of a tile.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

TILE = 16
LARGEST_BLOCK_E = 512


@triton.jit(do_not_specialize=["num_tokens"])
def _embedding_gradient_kernel(
    sorted_ptr,
    order_ptr,
    dy_ptr,
    dweight_ptr,
    num_tokens,
    SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    first = tl.program_id(0)
    token = tl.load(sorted_ptr + first)
    before = tl.load(sorted_ptr + first - 1, mask=first > 0, other=-1)
    more = (before != token).to(tl.int32)  # the program of an id's first row adds all rows of the id
    column_E = tl.program_id(1) * BLOCK_E + tl.arange(0, BLOCK_E)
    inside_E = column_E < SIZE
    sum_E = tl.zeros([BLOCK_E], tl.float32)
    start = first
    while more != 0:
        place_R = start + tl.arange(0, ROWS)
        mine_R = tl.load(sorted_ptr + place_R, mask=place_R < num_tokens, other=-1) == token
        row_R = tl.load(order_ptr + place_R, mask=mine_R, other=0)
        dy_ptrs = dy_ptr + row_R[:, None] * SIZE + column_E[None, :]
        dy_RE = tl.load(dy_ptrs, mask=mine_R[:, None] & inside_E[None, :], other=0.0)
        sum_E += tl.sum(dy_RE.to(tl.float32), axis=0)
        start += ROWS
        more = tl.min(mine_R.to(tl.int32), axis=0)
    dweight_ptrs = dweight_ptr + token * SIZE + column_E
    tl.store(dweight_ptrs, sum_E.to(dweight_ptr.dtype.element_ty), mask=inside_E & (before != token))


def embedding_gradient(dy_TE: Tensor, token_ids_T: Tensor, vocab_size: int, dtype: torch.dtype) -> Tensor:
    """dweight [V, E] in `dtype`. dy_TE: float32 or BF16. token_ids_T: int64 in [0, V)."""
    run = embedding_gradient_triton if dy_TE.is_cuda else embedding_gradient_reference
    return run(dy_TE.contiguous(), token_ids_T, vocab_size, dtype)


def embedding_gradient_triton(dy_TE: Tensor, token_ids_T: Tensor, vocab_size: int, dtype: torch.dtype) -> Tensor:
    """The kernel's launcher. dy_TE contiguous."""
    (num_tokens, size), block_e = dy_TE.shape, min(triton.next_power_of_2(dy_TE.shape[1]), LARGEST_BLOCK_E)
    assert token_ids_T.shape == (num_tokens,) and token_ids_T.dtype == torch.int64, "need one int64 id for each row"
    dweight_VE = torch.zeros(vocab_size, size, dtype=dtype, device=dy_TE.device)
    if num_tokens:
        sorted_T, order_T = token_ids_T.sort(stable=True)
        _embedding_gradient_kernel[(num_tokens, triton.cdiv(size, block_e))](
            sorted_T, order_T, dy_TE, dweight_VE, num_tokens, SIZE=size, ROWS=TILE, BLOCK_E=block_e, num_warps=4
        )
    return dweight_VE


def embedding_gradient_reference(dy_TE: Tensor, token_ids_T: Tensor, vocab_size: int, dtype: torch.dtype) -> Tensor:
    """The same in plain torch: float32 sums in the order of positions."""
    dweight_VE = torch.zeros(vocab_size, dy_TE.shape[1], dtype=torch.float32, device=dy_TE.device)
    return dweight_VE.index_add_(0, token_ids_T, dy_TE.float()).to(dtype)
