"""The backward of `attention_packed` on a GPU: two kernels without atomics, so a gradient's bits repeat.

    dQ       one program per block of queries and query head; loops over the keys. It computes delta, the sum over D of
             dO * O, and stores it with lse2 as [H, T], so that the next kernel loads whole lines
    dK, dV   one program per block of keys and kv head; loops once over the queries of all query heads of its group, and
             prefetches across heads

attention_packed.py has the formulas. P is recomputed from the forward's lse2 with the forward's scales. All operands
are BF16: codes are exact in it, and it holds small gradients that float16 would flush. Scales apply as in the forward:
the K scale to the scores and dQ, the V scale to dP. dK and dV are gradients of the dequantised values. A V scale of a
whole head stays outside the loops: delta is divided by it, and dQ and dK are multiplied by it.

Each sequence is processed in blocks from its first token. Tiles without masked elements run in a loop without a mask.
Tiles on the diagonal or past the sequence's end run in a second loop. In the second kernel the scores are keys by
queries, so P^T and dS^T go from the accumulator into the next wgmma in registers.

All tiles come by TMA, so the heads of a token must be adjacent. A tile may reach into the next sequence. What it reads
there is masked before it is multiplied into a stored row, so no NaN crosses over.

The grid has T / block + B + 1 items a head for any lengths. Sequence b owns the items from `cu_seqlens[b] / block + b`,
at least as many as its blocks, and every program searches for its own sequence. The rows past `cu_seqlens[-1]` count as
one more sequence, whose programs write zeros, so nothing is filled beforehand.

S and dP are computed in both kernels: seven GEMMs instead of five. A fused kernel would avoid this, but needs atomics
on dQ or a lock that fixes their order. I query rows, J keys of a block, T tokens, B sequences, H query heads, K kv
heads, D head size.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from octetrl.kernels.attention.attention_order import LOG2E, MODE_NUMBER, mode_of
from octetrl.kernels.attention.kv_store import ReplayedKV
from octetrl.kernels.attention.token_scales import align_scales, first_column, scale_table
from octetrl.shapes.sizes import SUPPORTED_HEAD_SIZES

SEARCH = tl.constexpr(128)  # sequences that a program compares at a time when it searches for its own
ALIGN = tl.constexpr(4)  # float32 values in 16 bytes; TMA's tiles of lse2 and delta start at multiples of 16 bytes


class Tile(NamedTuple):
    """Number of queries (32 or more on a GPU, for TMA) and keys in a tile, and how a kernel is launched."""

    queries: int
    keys: int
    warps: int
    stages: int  # loads in flight in the loop without a mask
    masked_stages: int = 2

    @property
    def launch(self) -> dict[str, int]:
        blocks = {"BLOCK_I": self.queries, "BLOCK_J": self.keys, "num_warps": self.warps}
        return {**blocks, "STAGES": self.stages, "MASKED_STAGES": self.masked_stages}


class BackwardTiles(NamedTuple):
    dq: Tile
    dkdv: Tile


def backward_tiles(head_size: int) -> BackwardTiles:
    """The tiles in use."""
    if head_size == 256:
        return BackwardTiles(dq=Tile(64, 32, 8, 2), dkdv=Tile(32, 64, 8, 2))
    return BackwardTiles(dq=Tile(128, 64, 8, 3), dkdv=Tile(64, 128, 8, 3))


@triton.jit
def find_sequence(item, cu_seqlens_ptr, num_sequences, num_tokens, BLOCK: tl.constexpr):
    """The sequence that owns an item (B: the rows past all), its first token, its length, the item's number in it."""
    sequence = 0
    for start in range(1, num_sequences + 1, SEARCH):
        b = start + tl.arange(0, SEARCH)
        first_B = tl.load(cu_seqlens_ptr + b, mask=b <= num_sequences, other=0)
        sequence += tl.sum(((b <= num_sequences) & (first_B // BLOCK + b <= item)).to(tl.int32), 0)
    first = tl.load(cu_seqlens_ptr + sequence)
    following = tl.load(cu_seqlens_ptr + sequence + 1, mask=sequence < num_sequences, other=0)
    end = tl.where(sequence < num_sequences, following, num_tokens)
    return sequence, first, end - first, item - (first // BLOCK + sequence)


@triton.jit
def _store_block(ptr, x, start, length, ROWS: tl.constexpr, HEADS: tl.constexpr, HEAD_SIZE: tl.constexpr):
    """Store `x` as rows of [T, HEADS, D], for the sequence and head at `ptr`. Rows from `length` on are skipped."""
    row = start + tl.arange(0, ROWS)
    offset = row.to(tl.int64)[:, None] * (HEADS * HEAD_SIZE) + tl.arange(0, HEAD_SIZE)[None, :]
    tl.store(ptr + offset, x.to(ptr.dtype.element_ty), mask=(row < length)[:, None])


@triton.jit
def _dq_tile(
    dq_ID, q_ID, dout_ID, lse2_I, delta_I, k_desc, v_desc, kv_head, first, start, first_query, length,
    score_scale, k_rows_desc, v_rows_desc, first_scale,
    HEAD_SIZE: tl.constexpr, BLOCK_I: tl.constexpr,
    BLOCK_J: tl.constexpr, K_MODE: tl.constexpr, V_MODE: tl.constexpr, WINDOW: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """dQ, without its constant factor, plus the contribution of the keys from `start`."""
    k_JD = k_desc.load([first + start, kv_head * HEAD_SIZE])
    v_JD = v_desc.load([first + start, kv_head * HEAD_SIZE])
    key_J = start + tl.arange(0, BLOCK_J)
    if MASKED:
        k_JD = tl.where((key_J < length)[:, None], k_JD, 0.0)
    s_IJ = tl.dot(q_ID, tl.trans(k_JD))
    dp_IJ = tl.dot(dout_ID, tl.trans(v_JD))
    if K_MODE == 2:
        k_scale_1J = k_rows_desc.load([kv_head, first_scale + start])
        if MASKED:
            k_scale_1J = tl.where((key_J < length)[None, :], k_scale_1J, 0.0)
        s_IJ = s_IJ * (k_scale_1J * score_scale)
    else:
        s_IJ = s_IJ * score_scale
    p_IJ = tl.exp2(s_IJ - lse2_I[:, None])
    if V_MODE == 2:
        v_scale_1J = v_rows_desc.load([kv_head, first_scale + start])
        if MASKED:
            v_scale_1J = tl.where((key_J < length)[None, :], v_scale_1J, 0.0)
        dp_IJ = dp_IJ * v_scale_1J
    ds_IJ = p_IJ * (dp_IJ - delta_I[:, None])
    if K_MODE == 2:
        ds_IJ = ds_IJ * k_scale_1J
    if MASKED:  # for a row of the sequence, this also hides all keys past its end
        query_I = first_query + tl.arange(0, BLOCK_I)
        ds_IJ = tl.where(query_I[:, None] >= key_J[None, :], ds_IJ, 0.0)
        if WINDOW > 0:
            ds_IJ = tl.where(query_I[:, None] < key_J[None, :] + WINDOW, ds_IJ, 0.0)
    return tl.dot(ds_IJ.to(tl.bfloat16), k_JD, dq_ID)


@triton.jit(do_not_specialize=["num_sequences", "num_tokens", "stride_row"])
def _dq_kernel(
    q_desc, dout_desc, out_desc, k_desc, v_desc, lse2_ptr, rows_ptr, dq_ptr, cu_seqlens_ptr, k_scale_ptr, v_scale_ptr,
    base_scale, softmax_scale, num_sequences, num_tokens, stride_row,
    HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_SIZE: tl.constexpr, BLOCK_I: tl.constexpr,
    BLOCK_J: tl.constexpr, K_MODE: tl.constexpr, V_MODE: tl.constexpr, WINDOW: tl.constexpr,
    STAGES: tl.constexpr, MASKED_STAGES: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(0)
    sequence, first, length, number = find_sequence(
        tl.program_id(1), cu_seqlens_ptr, num_sequences, num_tokens, BLOCK_I
    )
    if number * BLOCK_I < length:
        first_query = (tl.cdiv(length, BLOCK_I) - 1 - number) * BLOCK_I  # the last rows have the most keys: first
        token = first.to(tl.int64)
        dq_ID = tl.zeros([BLOCK_I, HEAD_SIZE], tl.float32)
        if sequence < num_sequences:
            kv_head = head // GROUP
            score_scale = base_scale
            dq_scale = softmax_scale
            if K_MODE == 1:
                score_scale *= tl.load(k_scale_ptr + kv_head)
                dq_scale *= tl.load(k_scale_ptr + kv_head)

            q_ID = q_desc.load([first + first_query, head * HEAD_SIZE])
            dout_ID = dout_desc.load([first + first_query, head * HEAD_SIZE])
            out_ID = out_desc.load([first + first_query, head * HEAD_SIZE])
            delta_I = tl.sum(dout_ID.to(tl.float32) * out_ID.to(tl.float32), 1)
            if V_MODE == 1:
                v_scale = tl.load(v_scale_ptr + kv_head)
                delta_I = delta_I / v_scale
                dq_scale *= v_scale
            query_I = first_query + tl.arange(0, BLOCK_I)
            inside_I = query_I < length
            lse2_I = tl.load(lse2_ptr + (token + query_I) * HEADS + head, mask=inside_I, other=0.0)
            row_ptr_I = rows_ptr + head.to(tl.int64) * stride_row + (first // ALIGN + sequence) * ALIGN + query_I
            tl.store(row_ptr_I, lse2_I, mask=inside_I)
            tl.store(row_ptr_I + stride_row.to(tl.int64) * HEADS, delta_I, mask=inside_I)

            begin = 0
            whole = first_query // BLOCK_J * BLOCK_J
            if WINDOW > 0:  # tiles before the window are left out, all others are masked
                begin = tl.maximum(first_query + 1 - WINDOW, 0) // BLOCK_J * BLOCK_J
                whole = begin
            for start in tl.range(begin, whole, BLOCK_J, num_stages=STAGES):
                dq_ID = _dq_tile(
                    dq_ID, q_ID, dout_ID, lse2_I, delta_I, k_desc, v_desc, kv_head, first, start, first_query, length,
                    score_scale, k_scale_ptr, v_scale_ptr, first_column(first, sequence),
                    HEAD_SIZE, BLOCK_I, BLOCK_J, K_MODE, V_MODE, WINDOW, False,
                )  # fmt: skip
            for start in tl.range(whole, tl.minimum(length, first_query + BLOCK_I), BLOCK_J, num_stages=MASKED_STAGES):
                dq_ID = _dq_tile(
                    dq_ID, q_ID, dout_ID, lse2_I, delta_I, k_desc, v_desc, kv_head, first, start, first_query, length,
                    score_scale, k_scale_ptr, v_scale_ptr, first_column(first, sequence),
                    HEAD_SIZE, BLOCK_I, BLOCK_J, K_MODE, V_MODE, WINDOW, True,
                )  # fmt: skip
            dq_ID = dq_ID * dq_scale
        _store_block(dq_ptr + (token * HEADS + head) * HEAD_SIZE, dq_ID, first_query, length, BLOCK_I, HEADS, HEAD_SIZE)


@triton.jit
def _dkdv_tile(
    dk_JD, dv_JD, k_JD, v_JD, k_factor_J, v_factor_J, k_factor, q_desc, dout_desc, rows_desc,
    head, first, first_row, start, first_key, length,
    HEADS: tl.constexpr, HEAD_SIZE: tl.constexpr, BLOCK_I: tl.constexpr,
    BLOCK_J: tl.constexpr, K_MODE: tl.constexpr, V_MODE: tl.constexpr, WINDOW: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """dK, without its constant factor, and dV, plus the contribution of one head's queries from `start`."""
    q_ID = q_desc.load([first + start, head * HEAD_SIZE])
    dout_ID = dout_desc.load([first + start, head * HEAD_SIZE])
    lse2_I = tl.reshape(rows_desc.load([head, first_row + start]), [BLOCK_I])
    delta_I = tl.reshape(rows_desc.load([HEADS + head, first_row + start]), [BLOCK_I])
    query_I = start + tl.arange(0, BLOCK_I)
    if MASKED:
        inside_I = query_I < length
        q_ID = tl.where(inside_I[:, None], q_ID, 0.0)
        dout_ID = tl.where(inside_I[:, None], dout_ID, 0.0)
        delta_I = tl.where(inside_I, delta_I, 0.0)
    s_JI = tl.dot(k_JD, tl.trans(q_ID))
    dp_JI = tl.dot(v_JD, tl.trans(dout_ID))
    s_JI = s_JI * k_factor_J[:, None] if K_MODE == 2 else s_JI * k_factor
    p_JI = tl.exp2(s_JI - lse2_I[None, :])
    if MASKED:
        key_J = first_key + tl.arange(0, BLOCK_J)
        p_JI = tl.where((query_I[None, :] >= key_J[:, None]) & inside_I[None, :], p_JI, 0.0)
        if WINDOW > 0:
            p_JI = tl.where(query_I[None, :] < key_J[:, None] + WINDOW, p_JI, 0.0)
    dv_JD = tl.dot(p_JI.to(tl.bfloat16), dout_ID, dv_JD)
    if V_MODE == 2:
        dp_JI = dp_JI * v_factor_J[:, None]
    ds_JI = p_JI * (dp_JI - delta_I[None, :])
    dk_JD = tl.dot(ds_JI.to(tl.bfloat16), q_ID, dk_JD)
    return dk_JD, dv_JD


@triton.jit(do_not_specialize=["num_sequences", "num_tokens"])
def _dkdv_kernel(
    q_desc, dout_desc, rows_desc, k_desc, v_desc, dk_ptr, dv_ptr, cu_seqlens_ptr, k_scale_ptr, v_scale_ptr,
    base_scale, softmax_scale, num_sequences, num_tokens,
    HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_SIZE: tl.constexpr, BLOCK_I: tl.constexpr,
    BLOCK_J: tl.constexpr, K_MODE: tl.constexpr, V_MODE: tl.constexpr, WINDOW: tl.constexpr,
    STAGES: tl.constexpr, MASKED_STAGES: tl.constexpr,
):  # fmt: skip
    KV_HEADS: tl.constexpr = HEADS // GROUP
    kv_head = tl.program_id(0)
    sequence, first, length, number = find_sequence(
        tl.program_id(1), cu_seqlens_ptr, num_sequences, num_tokens, BLOCK_J
    )
    first_key = number * BLOCK_J  # the first keys have the most queries: first
    if first_key < length:
        token = first.to(tl.int64)
        dk_JD = tl.zeros([BLOCK_J, HEAD_SIZE], tl.float32)
        dv_JD = tl.zeros([BLOCK_J, HEAD_SIZE], tl.float32)
        if sequence < num_sequences:
            k_JD = k_desc.load([first + first_key, kv_head * HEAD_SIZE])
            v_JD = v_desc.load([first + first_key, kv_head * HEAD_SIZE])
            key_J = first_key + tl.arange(0, BLOCK_J)
            scale_J = (token + key_J) * KV_HEADS + kv_head
            k_factor = base_scale
            dk_scale = softmax_scale
            k_factor_J = key_J  # unused unless K_MODE == 2
            v_factor_J = key_J
            if K_MODE == 1:
                k_factor = base_scale * tl.load(k_scale_ptr + kv_head)
            if K_MODE == 2:
                k_factor_J = tl.load(k_scale_ptr + scale_J, mask=key_J < length, other=0.0) * base_scale
            if V_MODE == 1:
                dk_scale = softmax_scale * tl.load(v_scale_ptr + kv_head)
            if V_MODE == 2:
                v_factor_J = tl.load(v_scale_ptr + scale_J, mask=key_J < length, other=0.0)

            first_row = (first // ALIGN + sequence) * ALIGN
            # tiles of queries: those on the diagonal, then whole ones, then a last one if the sequence ends inside it
            num_tiles = (length - first_key + BLOCK_I - 1) // BLOCK_I
            diagonal = tl.minimum(BLOCK_J // BLOCK_I, num_tiles)
            whole = tl.maximum((length - first_key) // BLOCK_I - diagonal, 0)
            if WINDOW > 0:  # no tiles past the last query that reads one of these keys, and all masked
                num_tiles = tl.minimum(num_tiles, (BLOCK_J - 1 + WINDOW + BLOCK_I - 1) // BLOCK_I)
                diagonal = num_tiles
                whole = 0
            masked = num_tiles - whole
            head = kv_head * GROUP
            start = first_key + diagonal * BLOCK_I
            for _ in tl.range(0, GROUP * whole, num_stages=STAGES):
                dk_JD, dv_JD = _dkdv_tile(
                    dk_JD, dv_JD, k_JD, v_JD, k_factor_J, v_factor_J, k_factor, q_desc, dout_desc, rows_desc,
                    head, first, first_row, start, first_key, length,
                    HEADS, HEAD_SIZE, BLOCK_I, BLOCK_J, K_MODE, V_MODE, WINDOW, False,
                )  # fmt: skip
                start += BLOCK_I
                last = start == first_key + (diagonal + whole) * BLOCK_I
                head += last.to(tl.int32)
                start = tl.where(last, first_key + diagonal * BLOCK_I, start)
            for turn in tl.range(0, GROUP * masked, num_stages=MASKED_STAGES):
                member = turn // masked
                tile = turn - member * masked
                start = first_key + tl.where(tile < diagonal, tile, tile + whole) * BLOCK_I
                dk_JD, dv_JD = _dkdv_tile(
                    dk_JD, dv_JD, k_JD, v_JD, k_factor_J, v_factor_J, k_factor, q_desc, dout_desc, rows_desc,
                    kv_head * GROUP + member, first, first_row, start, first_key, length,
                    HEADS, HEAD_SIZE, BLOCK_I, BLOCK_J, K_MODE, V_MODE, WINDOW, True,
                )  # fmt: skip
            dk_JD = dk_JD * dk_scale
        offset = (token * KV_HEADS + kv_head) * HEAD_SIZE
        _store_block(dk_ptr + offset, dk_JD, first_key, length, BLOCK_J, KV_HEADS, HEAD_SIZE)
        _store_block(dv_ptr + offset, dv_JD, first_key, length, BLOCK_J, KV_HEADS, HEAD_SIZE)


def _side_by_side(x_THD: Tensor) -> Tensor:
    """BF16 with the heads of a token adjacent, as TMA needs them. A view if `x` already has this layout."""
    x_THD = x_THD.to(torch.bfloat16)
    aligned = x_THD.stride(0) * 2 % 16 == 0 and x_THD.data_ptr() % 16 == 0
    return x_THD if aligned and x_THD.stride()[1:] == (x_THD.shape[2], 1) else x_THD.contiguous()


def _descriptor(x_THD: Tensor, rows: int) -> TensorDescriptor:
    """A TMA descriptor for `rows` tokens of one head: x as [T, H * D]."""
    T, H, D = x_THD.shape
    return TensorDescriptor(x_THD, [T, H * D], [x_THD.stride(0), 1], [rows, D])


class Operands(NamedTuple):
    """The inputs of both kernels: tensors from `_side_by_side`, and the table that the first kernel fills."""

    q_THD: Tensor
    k_TKD: Tensor
    v_TKD: Tensor
    dout_THD: Tensor
    rows: Tensor  # lse2, then delta: [2 * H, T plus padding that aligns every sequence]
    cu_seqlens_B1: Tensor
    k_scale: Tensor | None
    v_scale: Tensor | None
    softmax_scale: float
    window: int | None = None

    @property
    def numbers(self) -> tuple[float, ...]:
        """Arguments of both kernels."""
        counts = (self.cu_seqlens_B1.shape[0] - 1, self.q_THD.shape[0])
        return (self.softmax_scale * LOG2E, self.softmax_scale, *counts)

    @property
    def shape(self) -> dict[str, int]:
        """The kernels' compile-time constants."""
        return {
            "HEADS": self.q_THD.shape[1],
            "GROUP": self.q_THD.shape[1] // self.k_TKD.shape[1],
            "HEAD_SIZE": self.q_THD.shape[2],
            "K_MODE": MODE_NUMBER[mode_of(self.k_scale)],
            "V_MODE": MODE_NUMBER[mode_of(self.v_scale)],
            "WINDOW": self.window or 0,
        }

    def items(self, block: int) -> int:
        """Number of programs per head that suffices for blocks of this many rows, for any lengths."""
        return self.q_THD.shape[0] // block + self.cu_seqlens_B1.shape[0]


def operands_of(
    dout_THD: Tensor,
    q_THD: Tensor,
    kv: ReplayedKV,
    cu_seqlens_B1: Tensor,
    softmax_scale: float,
    window: int | None = None,
) -> Operands:
    q, k, v, dout = (_side_by_side(x) for x in (q_THD, kv.k_TKD, kv.v_TKD, dout_THD))
    length = (q.shape[0] // ALIGN.value + cu_seqlens_B1.shape[0]) * ALIGN.value
    rows = torch.empty(2 * q.shape[1], length, dtype=torch.float32, device=q.device)
    return Operands(q, k, v, dout, rows, cu_seqlens_B1, kv.k_scale, kv.v_scale, softmax_scale, window)


def launch_dq(operands: Operands, out_THD: Tensor, lse2_TH: Tensor, tile: Tile, max_seqlen: int) -> Tensor:
    """dQ [T, H, D]. Fills `operands.rows`, so it runs first."""
    q = operands.q_THD
    dq_THD = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    by_query = (_descriptor(x, tile.queries) for x in (q, operands.dout_THD, _side_by_side(out_THD)))
    by_key = (_descriptor(x, tile.keys) for x in (operands.k_TKD, operands.v_TKD))
    by_row = align_scales(operands.k_scale, operands.v_scale, operands.cu_seqlens_B1, max_seqlen)
    scales = (scale_table(x, tile.keys) for x in by_row)
    _dq_kernel[(q.shape[1], operands.items(tile.queries))](
        *by_query, *by_key, lse2_TH, operands.rows, dq_THD, operands.cu_seqlens_B1, *scales, *operands.numbers,
        operands.rows.stride(0),
        **operands.shape, **tile.launch,
    )  # fmt: skip
    return dq_THD


def launch_dkdv(operands: Operands, tile: Tile, dtype: torch.dtype = torch.bfloat16) -> tuple[Tensor, Tensor]:
    """dK and dV [T, K, D] in `dtype`, after `launch_dq`."""
    assert tile.keys % tile.queries == 0, f"{tile.queries} queries don't divide {tile.keys} keys"
    k, rows = operands.k_TKD, operands.rows
    dk_TKD, dv_TKD = (torch.empty(k.shape, dtype=dtype, device=k.device) for _ in range(2))
    by_query = (_descriptor(x, tile.queries) for x in (operands.q_THD, operands.dout_THD))
    by_key = (_descriptor(x, tile.keys) for x in (k, operands.v_TKD))
    by_row = TensorDescriptor(rows, list(rows.shape), [rows.stride(0), 1], [1, tile.queries])
    _dkdv_kernel[(k.shape[1], operands.items(tile.keys))](
        *by_query, by_row, *by_key, dk_TKD, dv_TKD, operands.cu_seqlens_B1, operands.k_scale, operands.v_scale,
        *operands.numbers, **operands.shape, **tile.launch,
    )  # fmt: skip
    return dk_TKD, dv_TKD


def attention_packed_backward_triton(
    dout_THD: Tensor,
    q_THD: Tensor,
    kv: ReplayedKV,
    out_THD: Tensor,
    lse2_TH: Tensor,
    cu_seqlens_B1: Tensor,
    max_seqlen: int,
    softmax_scale: float,
    window: int | None = None,
    kv_dtype: torch.dtype | None = None,
    *,
    tiles: BackwardTiles | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """dQ [T, H, D] in BF16, dK and dV [T, K, D] in `kv_dtype` or BF16. Zero outside every sequence."""
    head_size = q_THD.shape[2]
    assert q_THD.dtype == torch.bfloat16, f"the attention backward takes BF16, not {q_THD.dtype}"
    assert head_size in SUPPORTED_HEAD_SIZES, f"head size {head_size} is not one of {SUPPORTED_HEAD_SIZES}"
    operands = operands_of(dout_THD, q_THD, kv, cu_seqlens_B1, softmax_scale, window)
    if q_THD.shape[0] == 0:
        return torch.empty_like(q_THD), torch.empty_like(operands.k_TKD), torch.empty_like(operands.v_TKD)
    tiles = tiles or backward_tiles(head_size)
    dq_THD = launch_dq(operands, out_THD, lse2_TH, tiles.dq, max_seqlen)
    return dq_THD, *launch_dkdv(operands, tiles.dkdv, kv_dtype or torch.bfloat16)


def padded_backward_triton(
    dout_THD: Tensor, q_THD: Tensor, kv: ReplayedKV, out_THD: Tensor, *rows_and_bounds: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """The backward by `attention_packed_backward_triton`, on copies with zeros if D is not a power of two.

    The added elements of dQ, dK and dV are zero and are dropped. The arguments are those of the kernels' launcher.
    """
    head_size = q_THD.shape[2]
    missing = (1 << (head_size - 1).bit_length()) - head_size
    if not missing:
        return attention_packed_backward_triton(dout_THD, q_THD, kv, out_THD, *rows_and_bounds)
    dout_THD, q_THD, k_TKD, v_TKD, out_THD = (
        F.pad(x_THD, (0, missing)) for x_THD in (dout_THD, q_THD, kv.k_TKD, kv.v_TKD, out_THD)
    )
    kv = ReplayedKV(k_TKD, v_TKD, kv.k_scale, kv.v_scale)
    padded = attention_packed_backward_triton(dout_THD, q_THD, kv, out_THD, *rows_and_bounds)
    dq_THD, dk_TKD, dv_TKD = (gradient_THD[..., :head_size] for gradient_THD in padded)
    return dq_THD, dk_TKD, dv_TKD
