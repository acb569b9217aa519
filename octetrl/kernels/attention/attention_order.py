"""The one order in which attention is summed, for rollout and training alike.

A completion's log-probs equal the trainer's bit for bit only if a query row processes its keys in the same order in all
three kernels: decode (one query), chunked prefill (some queries) and the packed training forward (whole sequences).
This file holds that order. `attention_decode.py` and `attention_rows.py` only load the operands.
`attention_reference.py` is the CPU form.

For one query row, with K and V codes as stored: keys in tiles of `KV_TILE`, tiles in chunks of `KV_CHUNK`, both
ascending from the sequence's first token. Every chunk starts with m = `FLOOR`, l_x = 0, o = 0. For each of its tiles:

    s     = dot(q, k) * (softmax_scale * log2(e) * k_scale)     float32, masked to -inf past the query's position
    m'    = max(m, max(s)),  alpha = exp2(m - m'),  p = exp2(s - m')
    l_x   = l_x * alpha + tree_x(p)                             float32; 16 sums, one for each class x of keys
    o     = dot(round(p * v_token_scale), v, o * alpha)         float32 accumulator

The chunks (m, l = tree(l_x), o) are merged one at a time, in ascending order, into M = `FLOOR`, L = 0, O = 0:

    M'    = max(M, m),  a = exp2(M - M'),  b = exp2(m - M')
    L     = fma(l, b, L * a),  O = fma(o, b, O * a)             float32
    out   = O * (v_scale / L),  lse2 = M + log2(L)              lse2 is in base 2, for the backward

A chunk does not depend on other chunks, so decode can compute chunks in parallel. No multiply and add is contracted
except these two fma: every launch sets `enable_fp_fusion=False`. A tile that is wholly past a row's position does not
change the row's m, l and o. A chunk wholly past it does not change M, L and O: its m is `FLOOR`, so b is 0. A row's
bits therefore do not depend on the other rows of its program. `FLOOR` is finite, so no difference of maxima is NaN.

**Sinks.** A head may have a sink, a score s without a key that only takes weight. Then its merge starts with
M = s * log2(e), L = 1, O = 0. There is no further step, and lse2 contains the sink, so the backward's P does too.

**Two accumulators in one program.** A kernel that goes through many chunks keeps (m, l, o) and (M, L, O). It merges a
chunk at the beginning of the next chunk's first tile. It sets m to `FLOOR` and does not clear o: the next alpha is 0,
so o becomes 0 or -0. Both give the same O, because O starts as +0. Clearing o would make the compiler serialise wgmma.

**Windows.** With a sliding window of w keys, the keys up to p - w are masked too, in the same tiles and chunks. A tile
or chunk that is wholly before a row's window leaves m at `FLOOR` and l and o at 0, and its merge multiplies zeros by 1.
So the kernels begin at the first tile that any of their rows reads, and a row's bits do not depend on where that is.

K and V each have their own scales (`mode_of`). K may stay BF16 beside codes of V, for models where FP8 would
ruin K, and V beside codes of K.

Operand dtypes (`operand_dtype`; K's for q and K, V's for P and V). A BF16 cache multiplies as BF16. E4M3 codes with
per-head scales multiply as float16, which holds every code exactly and gives P 11 bits; q must then stay below 65504.
With per-token scales, P contains the scale of V, whose range is unknown. These codes, E4M3 or integers up to 127,
multiply as bfloat16, which also holds every code exactly. float32 (CPU only, to compare with other implementations) is
not rounded in between.

There are two Triton forms. `update_rows` has the queries on the tensor core's long side (prefill, training).
`update_columns` has the keys there and a few queries on the short side (decode). `attention_rows_gluon.py` repeats
`update_rows` in Gluon. On a Hopper GPU all sum S and O in the same order. The row sum of P could depend on the layout,
so it is a tree written out in reshapes, two addends at a time. Of the seven bits of a key's place in its tile, the tree
adds over bit 6, then 3, then 0. The other four bits stay apart as 16 classes until the chunk ends. The three bits lie
in registers or neighbouring lanes in both forms; the other four lie in other lanes or warps in one form. Summing to one
number per tile cost decode 10% of its speed and the FP8 forward 7%.

R query rows, C query columns, N keys of a tile, X classes, K kv heads, D head size.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from octetrl.kernels.instructions import e4m3_to_bf16
from octetrl.shapes.blocks import KVMode

KV_TILE = 128
KV_CHUNK = 1024
FLOOR = -3.0e38  # below every score
CLASSES = tl.constexpr(16)  # of a tile's keys; the weights of each class are summed apart
LOG2E = 1.4426950408889634

MODE_NUMBER: dict[KVMode, int] = {"none": 0, "calibrated": 1, "dynamic": 2, "int8": 3}  # 3 for quantisers alone
TRITON_DTYPE = {torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}
LOWEST = tl.constexpr(FLOOR)
SINK_SCALE = tl.constexpr(LOG2E)
TMA_HEAD_SIZES = (64, 128)
ON_GPU = tl.constexpr(not triton.knobs.runtime.interpret)


def mode_of(scale: Tensor | None) -> KVMode:
    """How K or V is scaled, by the shape of its scales: [K] is calibrated; one for each token and head is dynamic.

    Attention treats integer codes like E4M3 ones with the same scales."""
    if scale is None:
        return "none"
    return "calibrated" if scale.dim() == 1 else "dynamic"


def operand_dtype(kv_dtype: torch.dtype, kv_mode: KVMode) -> torch.dtype:
    """The dtype in which K and Q, or V and P, are multiplied (explained in the module's docstring)."""
    if kv_mode == "none":
        return kv_dtype
    return torch.float16 if kv_mode == "calibrated" else torch.bfloat16


def head_scales(softmax_scale: float, k_scale_K: Tensor | None, num_kv_heads: int, device: torch.device) -> Tensor:
    """Multiplier of the raw scores of each kv head, base 2: float32(softmax_scale * log2 e) * k_scale."""
    base_K = torch.full((num_kv_heads,), softmax_scale * LOG2E, dtype=torch.float32, device=device)
    return base_K if k_scale_K is None else base_K * k_scale_K


def by_head_or_row(scale: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    """Scales as [K] for `calibrated`, or as one for each row of a table of tokens and heads for `dynamic`."""
    if scale is None:
        return None, None
    return (scale, None) if mode_of(scale) == "calibrated" else (None, scale.reshape(-1))


def block_of_head(head_size: int) -> int:
    """Length of a head in a tile: a power of two, at least wgmma's shortest long side. Kernels pad heads with zeros."""
    return max(64, triton.next_power_of_2(head_size))


def comes_by_tma(k_cache: Tensor, v_cache: Tensor) -> bool:
    """Whether pages load through TMA descriptors: a page is one tile and every row is addressable."""
    _, _, page_size, head_size = k_cache.shape
    fits = page_size == KV_TILE and head_size in TMA_HEAD_SIZES and k_cache.numel() // head_size < 2**31
    return fits and k_cache.is_contiguous() and v_cache.is_contiguous()


def rows_of_tiles(cache: Tensor) -> TensorDescriptor:
    """A cache as one long matrix, loaded in blocks of one page of one head."""
    rows, columns = cache.shape[2:]
    return TensorDescriptor(cache, [cache.numel() // columns, columns], [columns, 1], [rows, columns])


# ---------------------------------------------------------------- Triton: one KV tile


@triton.jit
def _classes_of_rows(p_RN, ROWS: tl.constexpr):
    """Sums of 128 columns over bits 6, 3 and 0 of the column number: [ROWS, 16]. No layout can change this order."""
    p = tl.sum(tl.reshape(p_RN, [ROWS, 2, 64]), 1)
    p = tl.sum(tl.reshape(p, [ROWS, 4, 2, 8]), 2)
    return tl.sum(tl.reshape(p, [ROWS, CLASSES, 2]), 2)


@triton.jit
def _classes_of_columns(p_NC, COLUMNS: tl.constexpr):
    """The same sums with the keys as rows: [16, COLUMNS]."""
    p = tl.sum(tl.reshape(p_NC, [2, 64, COLUMNS]), 0)
    p = tl.sum(tl.reshape(p, [4, 2, 8, COLUMNS]), 1)
    return tl.sum(tl.reshape(p, [CLASSES, 2, COLUMNS]), 1)


@triton.jit
def total_of_rows(l_RX, ROWS: tl.constexpr):
    """The sum of the classes: neighbours first, then pairs of pairs."""
    l_RX = tl.sum(tl.reshape(l_RX, [ROWS, 8, 2]), 2)
    l_RX = tl.sum(tl.reshape(l_RX, [ROWS, 4, 2]), 2)
    l_RX = tl.sum(tl.reshape(l_RX, [ROWS, 2, 2]), 2)
    return tl.sum(l_RX, 1)


@triton.jit
def total_of_columns(l_XC, COLUMNS: tl.constexpr):
    """The same tree with the classes as rows."""
    l_XC = tl.sum(tl.reshape(l_XC, [8, 2, COLUMNS]), 1)
    l_XC = tl.sum(tl.reshape(l_XC, [4, 2, COLUMNS]), 1)
    l_XC = tl.sum(tl.reshape(l_XC, [2, 2, COLUMNS]), 1)
    return tl.sum(l_XC, 0)


@triton.jit
def update_rows(s_RN, m_R, l_RX, o_RD, v_ND, v_scale_1N, ROWS: tl.constexpr, V_MODE: tl.constexpr):
    """One tile for `ROWS` queries. Takes scaled, masked scores, and V in its operand dtype; returns new m, l, o."""
    m_new_R = tl.maximum(m_R, tl.max(s_RN, 1))
    alpha_R = tl.exp2(m_R - m_new_R)
    p_RN = tl.exp2(s_RN - m_new_R[:, None])
    l_RX = l_RX * alpha_R[:, None] + _classes_of_rows(p_RN, ROWS)
    if V_MODE == 2:
        p_RN = p_RN * v_scale_1N
    o_RD = tl.dot(p_RN.to(v_ND.dtype), v_ND, o_RD * alpha_R[:, None])
    return m_new_R, l_RX, o_RD


@triton.jit
def merge_rows(m_R, l_R, o_RD, m_chunk_R, l_chunk_RX, o_chunk_RD, ROWS: tl.constexpr):
    """Merge a chunk, as `update_rows` left it, into the total of `ROWS` queries."""
    m_new_R = tl.maximum(m_R, m_chunk_R)
    before_R = tl.exp2(m_R - m_new_R)
    here_R = tl.exp2(m_chunk_R - m_new_R)
    l_R = tl.fma(total_of_rows(l_chunk_RX, ROWS), here_R, l_R * before_R)
    o_RD = tl.fma(o_chunk_RD, tl.broadcast_to(here_R[:, None], o_RD.shape), o_RD * before_R[:, None])
    return m_new_R, l_R, o_RD


@triton.jit
def merge_columns(m_C, l_C, o_DC, m_chunk_C, l_chunk_C, o_chunk_DC):
    """The same for query columns; `l_chunk_C` is the sum of the chunk's classes."""
    m_new_C = tl.maximum(m_C, m_chunk_C)
    before_C = tl.exp2(m_C - m_new_C)
    here_C = tl.exp2(m_chunk_C - m_new_C)
    l_C = tl.fma(l_chunk_C, here_C, l_C * before_C)
    o_DC = tl.fma(o_chunk_DC, tl.broadcast_to(here_C[None, :], o_DC.shape), o_DC * before_C[None, :])
    return m_new_C, l_C, o_DC


@triton.jit
def interleaved(x_RN, ROWS: tl.constexpr, N: tl.constexpr):
    """Columns 0 1 4 5 8 9 12 13 | 2 3 6 7 10 11 14 15 of every 16; `update_columns` explains it."""
    x = tl.permute(tl.reshape(x_RN, [ROWS, N // 16, 4, 2, 2]), (0, 1, 3, 2, 4))
    return tl.reshape(x, [ROWS, N])


@triton.jit
def interleaved_index(n_N):
    """The source index of each element of `interleaved`."""
    return n_N // 16 * 16 + n_N // 2 % 4 * 4 + n_N // 8 % 2 * 2 + n_N % 2


@triton.jit
def update_columns(
    s_NC, m_C, l_XC, o_DC, v_DN, v_scale_N, COLUMNS: tl.constexpr, N: tl.constexpr, V_MODE: tl.constexpr,
    INTERLEAVED: tl.constexpr,
):  # fmt: skip
    """`update_rows` transposed: keys are rows, queries columns.

    An MMA processes 16 elements of the summed axis at a time. A thread holds two pairs of them that are eight apart;
    for codes these are two separate pairs of bytes. If both operands are `interleaved` along that axis, the pairs are
    neighbours, and codes are loaded from shared memory in words. An MMA's sum does not depend on the order of its 16
    elements (tests/gpu), and each MMA has the same elements as before.
    """
    m_new_C = tl.maximum(m_C, tl.max(s_NC, 0))
    alpha_C = tl.exp2(m_C - m_new_C)
    p_NC = tl.exp2(s_NC - m_new_C[None, :])
    l_XC = l_XC * alpha_C[None, :] + _classes_of_columns(p_NC, COLUMNS)
    if V_MODE == 2:
        p_NC = p_NC * v_scale_N[:, None]
    p_NC = p_NC.to(v_DN.dtype)
    if INTERLEAVED:
        p_NC = tl.permute(tl.reshape(p_NC, [N // 16, 4, 2, 2, COLUMNS]), (0, 2, 1, 3, 4))
        p_NC = tl.reshape(p_NC, [N, COLUMNS])
    o_DC = tl.dot(v_DN, p_NC, o_DC * alpha_C[None, :])
    return m_new_C, l_XC, o_DC


@triton.jit
def as_operand(x, DTYPE: tl.constexpr):
    """K or V as stored, in the dtype in which they are multiplied. Exact for finite codes. As BF16 a NaN code becomes
    480 on a GPU; BF16 is for scales of tokens, and the scale of a token that is not finite is NaN."""
    if x.dtype == tl.int8:
        return x.to(tl.float32).to(DTYPE)
    elif x.dtype == tl.float8e4nv and tl.bfloat16 == DTYPE:
        return e4m3_to_bf16(x, ON_GPU)
    else:
        return x.to(DTYPE)


@triton.jit
def load_pages(table_ptr, start, context, PAGE_SIZE: tl.constexpr, N: tl.constexpr):
    """Page of each key of the tile at `start`: one number if a page holds the whole tile; past the context, page 0."""
    if PAGE_SIZE >= N:
        page = tl.load(table_ptr + start // PAGE_SIZE, mask=start < context, other=0)
    else:
        key_N = start + tl.arange(0, N)
        page = tl.load(table_ptr + key_N // PAGE_SIZE, mask=key_N < context, other=0)
    return page


@triton.jit
def skipped_chunks(num_keys, WINDOW: tl.constexpr, CHUNK: tl.constexpr):
    """Number of chunks before the window of a query at the last key."""
    if WINDOW > 0:
        return tl.maximum(num_keys - WINDOW, 0) // CHUNK
    return num_keys * 0
