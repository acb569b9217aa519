"""Scales of tokens, one for each token and kv head, as attention loads them: by TMA, a tile's scales as one row.

A thread multiplies 32 of the 128 columns of a tile of scores, which lie apart. Through pointers it took 32 loads with
their addresses for K and as many for V, more instructions than all else in the loop.

TMA reads rows whose start is a multiple of 16 bytes. A page of one head is such a row. Packed scales [T, K] are copied
first: the tokens of a head become neighbours, and sequence b begins at `first_column(cu_seqlens[b], b)`.

T tokens, K kv heads, B sequences, C columns.
"""

from __future__ import annotations

from typing import TypeAlias

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

ALIGN = tl.constexpr(4)  # float32 values in 16 bytes
TOKENS = 128  # that a program copies

ScaleTable: TypeAlias = Tensor | TensorDescriptor | None


@triton.jit
def first_column(first_token, sequence):
    """Where the scales of a sequence begin in the rows of `align_scales`."""
    return (first_token // ALIGN + sequence) * ALIGN


@triton.jit(do_not_specialize=["stride_row"])
def _attention_scales_kernel(
    k_scale_ptr, v_scale_ptr, k_out_ptr, v_out_ptr, cu_seqlens_ptr, stride_row,
    HEADS: tl.constexpr, BLOCK_K: tl.constexpr, TOKENS: tl.constexpr, HAS_K: tl.constexpr, HAS_V: tl.constexpr,
):  # fmt: skip
    sequence = tl.program_id(1)
    first = tl.load(cu_seqlens_ptr + sequence)
    t_T = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    head_K = tl.arange(0, BLOCK_K)
    inside_KT = (head_K < HEADS)[:, None] & (t_T < tl.load(cu_seqlens_ptr + sequence + 1) - first)[None, :]
    source_KT = (first + t_T).to(tl.int64)[None, :] * HEADS + head_K[:, None]
    target_KT = head_K.to(tl.int64)[:, None] * stride_row + (first_column(first, sequence) + t_T)[None, :]
    if HAS_K:
        tl.store(k_out_ptr + target_KT, tl.load(k_scale_ptr + source_KT, mask=inside_KT), mask=inside_KT)
    if HAS_V:
        tl.store(v_out_ptr + target_KT, tl.load(v_scale_ptr + source_KT, mask=inside_KT), mask=inside_KT)


def align_scales(
    k_scale: Tensor | None, v_scale: Tensor | None, cu_seqlens_B1: Tensor, max_seqlen: int
) -> tuple[Tensor | None, Tensor | None]:
    """Packed scales [T, K] of tokens as rows [K, C] for TMA, with gaps of undefined values. Others as they are."""
    present = v_scale if v_scale is not None else k_scale  # both have one form if there are two
    if present is None or present.dim() == 1:
        return k_scale, v_scale
    (T, K), B = present.shape, cu_seqlens_B1.shape[0] - 1
    assert all(x is None or x.is_contiguous() for x in (k_scale, v_scale)), "attention: scales must be contiguous"
    rows = torch.empty(2, K, (T // ALIGN.value + B) * ALIGN.value + ALIGN.value, device=present.device)
    k_rows, v_rows = rows.unbind()
    if T > 0 and B > 0:
        _attention_scales_kernel[(triton.cdiv(max_seqlen, TOKENS), B)](
            k_scale, v_scale, k_rows, v_rows, cu_seqlens_B1, rows.stride(1),
            HEADS=K, BLOCK_K=triton.next_power_of_2(K), TOKENS=TOKENS, HAS_K=k_scale is not None,
            HAS_V=v_scale is not None, num_warps=4, **({"enable_fp_fusion": False} if present.is_cuda else {}),
        )  # fmt: skip
    return None if k_scale is None else k_rows, None if v_scale is None else v_rows


def scale_table(scale: Tensor | None, keys: int) -> ScaleTable:
    """Rows of `align_scales`, or scales [num_pages, K, page_size], by tiles of `keys`. Scales [K] of heads as they are.

    A page has to be one tile.
    """
    if scale is None or scale.dim() == 1:
        return scale
    rows = scale.flatten(0, -2)
    assert rows.stride(0) % ALIGN.value == 0 and rows.stride(1) == 1, f"attention: scales lie {rows.stride()} apart"
    return TensorDescriptor(rows, list(rows.shape), [rows.stride(0), 1], [1, keys])
