"""The one order in which attention is summed, for rollout and training alike.

A completion's log-probs are the trainer's log-probs bit for bit only if a query row meets its keys in the
same order in all three kernels: decode (one query), chunked prefill (some queries) and the packed training
forward (whole sequences). This file holds that order; `attention_paged.py` and `attention_packed.py` only
fetch operands for it.

For one query row, K and V codes as stored, keys in tiles of `KV_TILE` ascending from the sequence's first
token:

    s     = dot(q, k) * (softmax_scale * log2(e) * k_scale)     float32, masked to -inf past the query's position
    m'    = max(m, max(s)),  alpha = exp2(m - m'),  p = exp2(s - m')
    l_x   = l_x * alpha + tree_x(p)                             float32; 16 sums, one for each class x of keys
    o     = dot(round(p * v_token_scale), v, o * alpha)         float32 accumulator
    out   = o * (v_scale / l),  lse2 = m + log2(l)              l = tree(l_x), once; lse2 is in base 2, for the backward

Nothing is split, no multiply and add is contracted (every launch says `enable_fp_fusion=False`), and a tile
that lies wholly past a row's position leaves the row's m, l and o untouched, so who shares a program with it
does not matter.

K and V are scaled each in its own way (`mode_of`): K may stay BF16 beside an E4M3 V, where FP8 would ruin K.

Operands (`operand_dtype`), K's for q and K, V's for P and V: a BF16 cache multiplies as BF16. E4M3 codes with
per-head scales multiply as float16, which holds every code exactly and gives P 11 bits (q must then stay under
65504). With per-token scales P carries the scale of V, whose range is unknown, so these multiply as bfloat16,
which also holds every code exactly. float32 (CPU only, to compare with other implementations) rounds nowhere
between.

Two Triton forms: `update_rows` has queries on the tensor core's long side (prefill, training),
`update_columns` has keys there and a few queries on the short one (decode). On a Hopper GPU both sum S and O
in the same order; only the row sum of P could depend on a layout, which is why it is a tree written out in
reshapes, two addends at a time. Of the seven bits of a key's place in its tile it adds up over bit 6, then 3, then 0,
and keeps the other four apart as classes until the end: these three lie in registers or neighbouring lanes in both
forms, the other four in other lanes or warps in one of them. Summed to one number a tile, by neighbours first, the same
tree cost decode 10% of its speed and the FP8 forward 7%.

The torch form serves the CPU. It computes each sum in float64 and rounds where the kernels round, so
that order, batch, padding and threads do not matter there; sequences of like length share one padded batch,
cut into pieces that stay in cache. Its tiles are the kernels' tiles, cut to the longest context present.

T tokens, X classes, J sequences of one piece, M padded queries, S padded keys, K kv heads, G query heads per kv head, D
head size.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from octetrl.fp8.format import E4M3, decode_e4m3

KV_TILE = 128
CLASSES = tl.constexpr(16)  # of keys of a tile, whose weights are summed apart
LOG2E = 1.4426950408889634
KVMode = Literal["none", "calibrated", "dynamic"]

MODE_NUMBER: dict[KVMode, int] = {"none": 0, "calibrated": 1, "dynamic": 2}
TRITON_DTYPE = {torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}

QUERY_BLOCK = 128
PIECE_ELEMENTS = 1 << 18  # float64 scores or keys of one piece: about 2 MB, measured fastest on two cores


def mode_of(scale: Tensor | None) -> KVMode:
    """How K or V is scaled, told by its scales: float32 [K] is calibrated; one for each token and head is dynamic."""
    if scale is None:
        return "none"
    return "calibrated" if scale.dim() == 1 else "dynamic"


def operand_dtype(kv_dtype: torch.dtype, kv_mode: KVMode) -> torch.dtype:
    """The dtype in which K and Q, or V and P, are multiplied; see the module's text."""
    if kv_mode == "none":
        return kv_dtype
    return torch.float16 if kv_mode == "calibrated" else torch.bfloat16


def head_scales(softmax_scale: float, k_scale_K: Tensor | None, num_kv_heads: int, device: torch.device) -> Tensor:
    """Multiplier of the raw scores of each kv head, base 2: float32(softmax_scale * log2 e) * k_scale."""
    base_K = torch.full((num_kv_heads,), softmax_scale * LOG2E, dtype=torch.float32, device=device)
    return base_K if k_scale_K is None else base_K * k_scale_K


def by_head_or_row(scale: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    """Scales as [K] of `calibrated`, and as one for each row of a table of tokens and heads, of `dynamic`."""
    if scale is None:
        return None, None
    return (scale, None) if mode_of(scale) == "calibrated" else (None, scale.reshape(-1))


class Span(NamedTuple):
    """The queries of one sequence: `num_queries` rows of q from `first_query`; the last sits at key `context - 1`."""

    sequence: int
    first_query: int
    num_queries: int
    context: int


# ---------------------------------------------------------------- Triton: one KV tile


@triton.jit
def _classes_of_rows(p_RN, ROWS: tl.constexpr):
    """Sums of 128 columns over bits 6, 3 and 0 of their number: [ROWS, 16]. No layout can change this order."""
    p = tl.sum(tl.reshape(p_RN, [ROWS, 2, 64]), 1)
    p = tl.sum(tl.reshape(p, [ROWS, 4, 2, 8]), 2)
    return tl.sum(tl.reshape(p, [ROWS, CLASSES, 2]), 2)


@triton.jit
def _classes_of_columns(p_NC, COLUMNS: tl.constexpr):
    """The same sums where the keys are the rows: [16, COLUMNS]."""
    p = tl.sum(tl.reshape(p_NC, [2, 64, COLUMNS]), 0)
    p = tl.sum(tl.reshape(p, [4, 2, 8, COLUMNS]), 1)
    return tl.sum(tl.reshape(p, [CLASSES, 2, COLUMNS]), 1)


@triton.jit
def total_of_rows(l_RX, ROWS: tl.constexpr):
    """The classes' sums added up: neighbours first, then pairs of pairs."""
    l_RX = tl.sum(tl.reshape(l_RX, [ROWS, 8, 2]), 2)
    l_RX = tl.sum(tl.reshape(l_RX, [ROWS, 4, 2]), 2)
    l_RX = tl.sum(tl.reshape(l_RX, [ROWS, 2, 2]), 2)
    return tl.sum(l_RX, 1)


@triton.jit
def total_of_columns(l_XC, COLUMNS: tl.constexpr):
    """The same tree where the classes are the rows."""
    l_XC = tl.sum(tl.reshape(l_XC, [8, 2, COLUMNS]), 1)
    l_XC = tl.sum(tl.reshape(l_XC, [4, 2, COLUMNS]), 1)
    l_XC = tl.sum(tl.reshape(l_XC, [2, 2, COLUMNS]), 1)
    return tl.sum(l_XC, 0)


@triton.jit
def update_rows(s_RN, m_R, l_RX, o_RD, v_ND, v_scale_N, ROWS: tl.constexpr, V_MODE: tl.constexpr):
    """One tile for `ROWS` queries: scaled, masked scores and V in its operand dtype; new m, l, o."""
    m_new_R = tl.maximum(m_R, tl.max(s_RN, 1))
    alpha_R = tl.exp2(m_R - m_new_R)
    p_RN = tl.exp2(s_RN - m_new_R[:, None])
    l_RX = l_RX * alpha_R[:, None] + _classes_of_rows(p_RN, ROWS)
    if V_MODE == 2:
        p_RN = p_RN * v_scale_N[None, :]
    o_RD = tl.dot(p_RN.to(v_ND.dtype), v_ND, o_RD * alpha_R[:, None])
    return m_new_R, l_RX, o_RD


@triton.jit
def interleaved(x_RN, ROWS: tl.constexpr, N: tl.constexpr):
    """Columns 0 1 4 5 8 9 12 13 | 2 3 6 7 10 11 14 15 of every 16: see `update_columns`."""
    x = tl.permute(tl.reshape(x_RN, [ROWS, N // 16, 4, 2, 2]), (0, 1, 3, 2, 4))
    return tl.reshape(x, [ROWS, N])


@triton.jit
def interleaved_index(n_N):
    """Where the elements of `interleaved` come from."""
    return n_N // 16 * 16 + n_N // 2 % 4 * 4 + n_N // 8 % 2 * 2 + n_N % 2


@triton.jit
def update_columns(
    s_NC, m_C, l_XC, o_DC, v_DN, v_scale_N, COLUMNS: tl.constexpr, N: tl.constexpr, V_MODE: tl.constexpr,
    INTERLEAVED: tl.constexpr,
):  # fmt: skip
    """`update_rows` turned on its side: keys are rows, queries columns.

    An MMA takes 16 of a contraction at a time, of which a thread holds two pairs that lie eight apart; of codes, two
    bytes here and two there. Where both operands are `interleaved` along the contraction the pairs are neighbours, and
    codes come from shared memory in words. An MMA's sum does not depend on the order of its 16 (tests/gpu), and who is
    in which MMA stays as it was.
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
def load_pages(table_ptr, start, context, PAGE_SIZE: tl.constexpr, N: tl.constexpr):
    """Page of each key of the tile at `start`: one number if a page holds the whole tile; past the context, page 0."""
    if PAGE_SIZE >= N:
        page = tl.load(table_ptr + start // PAGE_SIZE, mask=start < context, other=0)
    else:
        key_N = start + tl.arange(0, N)
        page = tl.load(table_ptr + key_N // PAGE_SIZE, mask=key_N < context, other=0)
    return page


# ---------------------------------------------------------------- plain torch


@dataclass(frozen=True)
class KVRows:
    """K and V as tables of rows [N, D] in any stored dtype, each with its scales in any form of `mode_of`."""

    k_ND: Tensor
    v_ND: Tensor
    k_scale: Tensor | None = None
    v_scale: Tensor | None = None

    @property
    def operands(self) -> tuple[torch.dtype, torch.dtype]:
        """In which dtype q and K, and in which P and V are multiplied."""
        k_operand = operand_dtype(self.k_ND.dtype, mode_of(self.k_scale))
        return k_operand, operand_dtype(self.v_ND.dtype, mode_of(self.v_scale))


@dataclass(frozen=True)
class Piece:
    """Sequences of like length, padded to one another. Padding queries sit at key 0 and are never written back."""

    sequence_J: Tensor
    query_JM: Tensor
    position_JM: Tensor
    valid_JM: Tensor
    key_JS: Tensor

    def scatter(self, target: Tensor, value_JM: Tensor, first: int) -> None:
        """Write the padded query block that begins at `first` back to its token rows."""
        block = slice(first, first + value_JM.shape[1])
        valid = self.valid_JM[:, block]
        target[self.query_JM[:, block][valid]] = value_JM[valid]


def _round_up(length: int) -> int:
    """Padded length: steps of an eighth of the length's own power of two, so padding wastes at most an eighth."""
    step = max(8, 1 << max(0, length.bit_length() - 3))
    return -(-length // step) * step


@lru_cache(maxsize=16)
def pieces(cu_seqlens: tuple[int, ...], contexts: tuple[int, ...], heads: int, head_size: int) -> tuple[Piece, ...]:
    """Group sequences of like size into padded pieces of about `PIECE_ELEMENTS` scores or keys.

    Cached, since every layer of a forward asks for the same ones. Sequences without queries or keys are left
    out.
    """
    spans = (
        Span(sequence, first, end - first, context)
        for sequence, (first, end, context) in enumerate(zip(cu_seqlens[:-1], cu_seqlens[1:], contexts, strict=True))
        if end > first and context > 0
    )
    groups: dict[tuple[int, int], list[list[Span]]] = {}
    for span in sorted(spans, key=lambda s: (s.context, s.num_queries)):
        size = (_round_up(span.context), _round_up(span.num_queries))
        members = groups.setdefault(size, [[]])
        room = PIECE_ELEMENTS // (heads * size[0] * max(min(size[1], QUERY_BLOCK), head_size))
        if len(members[-1]) >= max(1, room):
            members.append([])
        members[-1].append(span)
    return tuple(_piece(group) for members in groups.values() for group in members)


def _piece(group: list[Span]) -> Piece:
    sequence_J, first_J, count_J, context_J = torch.tensor(group).unbind(1)
    row_1M = torch.arange(int(count_J.max()))[None]
    valid_JM = row_1M < count_J[:, None]
    return Piece(
        sequence_J=sequence_J,
        query_JM=first_J[:, None] + torch.minimum(row_1M, count_J[:, None] - 1),
        position_JM=torch.where(valid_JM, (context_J - count_J)[:, None] + row_1M, 0),
        valid_JM=valid_JM,
        key_JS=torch.minimum(torch.arange(int(context_J.max()))[None], context_J[:, None] - 1),
    )


def query_blocks(piece: Piece) -> Iterator[tuple[slice, int]]:
    """Blocks of padded queries, each with the number of keys that its last query may see."""
    for first in range(0, piece.query_JM.shape[1], QUERY_BLOCK):
        block = slice(first, first + QUERY_BLOCK)
        yield block, int(piece.position_JM[:, block].max()) + 1


def fetch(table_ND: Tensor, row: Tensor) -> Tensor:
    """Rows of a table as float64 [*row.shape, D]; E4M3 bytes become their values, NaN included."""
    is_codes = table_ND.dtype == E4M3
    rows = (table_ND.view(torch.uint8) if is_codes else table_ND).index_select(0, row.reshape(-1))
    values = decode_e4m3(rows.view(E4M3), torch.float64) if is_codes else rows.double()
    return values.view(*row.shape, table_ND.shape[-1])


def attend_reference(
    q_THD: Tensor,
    kv: KVRows,
    rows_of: Callable[[Piece], Tensor],
    cu_seqlens_q: tuple[int, ...],
    contexts: tuple[int, ...],
    softmax_scale: float,
    num_kv_heads: int,
) -> tuple[Tensor, Tensor]:
    """Causal attention of every sequence over the table rows [J, K, S] that `rows_of(piece)` names.

    Returns out [T, H, D] in q's dtype and lse2 [T, H] float32 (base 2). Rows of q in no sequence give zeros.
    """
    T, H, D = q_THD.shape
    K = num_kv_heads
    k_operand, v_operand = kv.operands
    k_scale_K, k_scale_N = by_head_or_row(kv.k_scale)
    v_scale_K, v_scale_N = by_head_or_row(kv.v_scale)
    score_scale_K = head_scales(softmax_scale, k_scale_K, K, q_THD.device)
    q_rounded = q_THD.to(k_operand)
    out_THD = torch.zeros(T, H, D, dtype=q_THD.dtype)
    lse2_TH = torch.zeros(T, H, dtype=torch.float32)
    for piece in pieces(cu_seqlens_q, contexts, H, D):
        J = len(piece.sequence_J)
        row_JKS = rows_of(piece)
        k_NSD, v_NSD = (fetch(t, row_JKS).flatten(0, 1) for t in (kv.k_ND, kv.v_ND))
        column_N1S = score_scale_K.repeat(J)[:, None, None]
        if k_scale_N is not None:
            column_N1S = k_scale_N[row_JKS].flatten(0, 1)[:, None] * column_N1S
        v_scale_N1S = None if v_scale_N is None else v_scale_N[row_JKS].flatten(0, 1)[:, None]
        for block, num_keys in query_blocks(piece):
            q_NRD = fold_heads(q_rounded[piece.query_JM[:, block]], K)
            position_NR = fold_positions(piece.position_JM[:, block], K, H // K)
            o_NRD, m_NR, l_NR = _tiles(
                q_NRD, k_NSD[:, :num_keys], v_NSD[:, :num_keys], position_NR, column_N1S, v_scale_N1S, v_operand
            )
            inverse_NR = (1.0 if v_scale_K is None else v_scale_K.repeat(J)[:, None]) / l_NR
            num_queries = q_NRD.shape[1] * K // H
            out_JMHD = unfold_heads(o_NRD * inverse_NR[..., None], J, num_queries).to(q_THD.dtype)
            lse2_NR1 = (m_NR + l_NR.double().log2().float())[..., None]
            piece.scatter(out_THD, out_JMHD, block.start)
            piece.scatter(lse2_TH, unfold_heads(lse2_NR1, J, num_queries)[..., 0], block.start)
    return out_THD, lse2_TH


def _tiles(
    q_NRD: Tensor,
    k_NSD: Tensor,
    v_NSD: Tensor,
    position_NR: Tensor,
    column_N1S: Tensor,
    v_scale_N1S: Tensor | None,
    v_operand: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor]:
    """The online softmax over ascending tiles: unnormalised o [N, R, D], m and l [N, R], all float32."""
    o = torch.zeros(q_NRD.shape, dtype=torch.float32)
    m = torch.full(q_NRD.shape[:2], -math.inf)
    l = torch.zeros(q_NRD.shape[:2])  # noqa: E741 (the letter every paper uses)
    q_NRD = q_NRD.double()
    for start in range(0, k_NSD.shape[1], KV_TILE):
        tile = slice(start, start + KV_TILE)
        s = torch.bmm(q_NRD, k_NSD[:, tile].mT).float()
        s.mul_(column_N1S if column_N1S.shape[-1] == 1 else column_N1S[..., start : start + s.shape[-1]])
        key_S = torch.arange(start, start + s.shape[-1])
        s.masked_fill_(key_S > position_NR[..., None], -math.inf)
        m_new = torch.maximum(m, s.amax(-1))
        alpha = (m - m_new).double().exp2().float()
        p = s.sub_(m_new[..., None]).double().exp2().float()
        l = (l * alpha) + p.sum(-1, dtype=torch.float64).float()  # noqa: E741
        if v_scale_N1S is not None:
            p = p * v_scale_N1S[..., start : start + p.shape[-1]]
        carried = (o * alpha[..., None]).double()
        o = carried.baddbmm_(p.to(v_operand).double(), v_NSD[:, tile]).float()
        m = m_new
    return o, m, l


def fold_heads(x_JMHD: Tensor, num_kv_heads: int) -> Tensor:
    """[J, M, H, D] -> [J * K, G * M, D]: the query heads of one kv head become rows of one matrix."""
    J, M, H, D = x_JMHD.shape
    split = x_JMHD.view(J, M, num_kv_heads, H // num_kv_heads, D)
    return split.permute(0, 2, 3, 1, 4).reshape(J * num_kv_heads, -1, D)


def unfold_heads(x_NRD: Tensor, J: int, num_queries: int) -> Tensor:
    """[J * K, G * M, D] -> [J, M, H, D], the inverse of `fold_heads`."""
    D = x_NRD.shape[-1]
    return x_NRD.view(J, -1, num_queries, D).transpose(1, 2)


def fold_positions(position_JM: Tensor, num_kv_heads: int, group: int) -> Tensor:
    J, M = position_JM.shape
    return position_JM[:, None, None].expand(J, num_kv_heads, group, M).reshape(J * num_kv_heads, group * M)
