"""Attention in plain torch: the CPU form of the order that `attention_order` defines.

Each sum is computed in float64 and rounded where the kernels round. Order, batch, padding and threads therefore do not
matter here. Sequences of like length share one padded batch, cut into pieces that stay in cache. Tiles and chunks are
the kernels', cut to the longest context present.

T tokens, J sequences of one piece, M padded queries, S padded keys, N pairs of a sequence and a kv head, R query rows
of one kv head, K kv heads, H query heads, G query heads per kv head, D head size.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from octetrl.fp8.format import E4M3, decode_e4m3
from octetrl.kernels.attention.attention_order import (
    FLOOR,
    KV_CHUNK,
    KV_TILE,
    LOG2E,
    by_head_or_row,
    head_scales,
    mode_of,
    operand_dtype,
)

QUERY_BLOCK = 128
PIECE_ELEMENTS = 1 << 18  # float64 scores or keys of one piece: about 2 MB, measured fastest on two cores
MOST_PADDING = 1 << 15  # elements that may be padded to save a piece, whose ops take as long


class QuerySpan(NamedTuple):
    """The queries of one sequence: `num_queries` rows of q from `first_query`; the last is at key `context - 1`."""

    sequence: int
    first_query: int
    num_queries: int
    context: int


@dataclass(frozen=True)
class KVRows:
    """K and V as tables of rows [N, D] in any stored dtype, each with its scales in any form of `mode_of`.

    V may have another width than K, and the order another tile (MLA's has both).
    """

    k_ND: Tensor
    v_ND: Tensor
    k_scale: Tensor | None = None
    v_scale: Tensor | None = None
    tile: int = KV_TILE

    @property
    def operands(self) -> tuple[torch.dtype, torch.dtype]:
        """The dtype in which q and K are multiplied, and the dtype for P and V."""
        k_operand = operand_dtype(self.k_ND.dtype, mode_of(self.k_scale))
        return k_operand, operand_dtype(self.v_ND.dtype, mode_of(self.v_scale))


class PieceKeys(NamedTuple):
    """The keys of one piece, in float64, and the scales of its columns: one for all (of a head), or one for each."""

    k_NSD: Tensor
    v_NSD: Tensor
    score_scale_N1S: Tensor
    v_scale_N1S: Tensor | None

    def part(self, keys: slice) -> PieceKeys:
        scale, v_scale = self.score_scale_N1S, self.v_scale_N1S
        return PieceKeys(
            self.k_NSD[:, keys],
            self.v_NSD[:, keys],
            scale if scale.shape[-1] == 1 else scale[..., keys],
            None if v_scale is None else v_scale[..., keys],
        )


@dataclass(frozen=True)
class PaddedGroup:
    """Sequences of similar length, padded to one length. Padding queries are at key 0 and are never written back."""

    sequence_J: Tensor
    query_JM: Tensor
    position_JM: Tensor
    valid_JM: Tensor
    key_JS: Tensor
    is_full: bool  # no query is padding

    def scatter(self, target: Tensor, value_JM: Tensor, first: int) -> None:
        """Write the padded query block that starts at `first` back to its token rows."""
        block = slice(first, first + value_JM.shape[1])
        if self.is_full:
            target.index_copy_(0, self.query_JM[:, block].reshape(-1), value_JM.flatten(0, 1))
            return
        valid = self.valid_JM[:, block]
        target[self.query_JM[:, block][valid]] = value_JM[valid]


def _round_up(length: int) -> int:
    """Padded length: steps of an eighth of the length's own power of two, so padding wastes at most an eighth."""
    step = max(8, 1 << max(0, length.bit_length() - 3))
    return -(-length // step) * step


@lru_cache(maxsize=16)
def pieces(
    cu_seqlens: tuple[int, ...], contexts: tuple[int, ...], heads: int, head_size: int, most_padding: int = 0
) -> tuple[PaddedGroup, ...]:
    """Group sequences of similar size into padded pieces of at most about `PIECE_ELEMENTS` scores or keys.

    `most_padding`: elements by which a piece may grow, beyond its sequences' own, when another size joins it. The
    backward has 0: the bits of its float32 sums follow the padded sizes.

    The result is cached, because every layer of a forward needs the same pieces. Sequences without queries or keys are
    left out.
    """
    spans = (
        QuerySpan(sequence, first, end - first, context)
        for sequence, (first, end, context) in enumerate(zip(cu_seqlens[:-1], cu_seqlens[1:], contexts, strict=True))
        if end > first and context > 0
    )

    def elements(context: int, queries: int) -> int:
        return heads * context * max(queries, head_size)

    groups: list[list[QuerySpan]] = []
    size = (0, 0)
    for span in sorted(spans, key=lambda s: (s.context, s.num_queries)):
        own = (_round_up(span.context), _round_up(span.num_queries))
        both = (max(size[0], own[0]), max(size[1], own[1]))
        count = len(groups[-1]) if groups else 0
        padding = (count + 1) * elements(*both) - count * elements(*size) - elements(*own)
        fits = (count + 1) * elements(both[0], min(both[1], QUERY_BLOCK)) <= PIECE_ELEMENTS
        if count and fits and padding <= most_padding:
            groups[-1].append(span)
            size = both
        else:
            groups.append([span])
            size = own
    return tuple(_piece(group) for group in groups)


def _piece(group: list[QuerySpan]) -> PaddedGroup:
    sequence_J, first_J, count_J, context_J = torch.tensor(group).unbind(1)
    row_1M = torch.arange(int(count_J.max()))[None]
    valid_JM = row_1M < count_J[:, None]
    return PaddedGroup(
        sequence_J=sequence_J,
        query_JM=first_J[:, None] + torch.minimum(row_1M, count_J[:, None] - 1),
        position_JM=torch.where(valid_JM, (context_J - count_J)[:, None] + row_1M, 0),
        valid_JM=valid_JM,
        key_JS=torch.minimum(torch.arange(int(context_J.max()))[None], context_J[:, None] - 1),
        is_full=bool(valid_JM.all()),
    )


def query_blocks(piece: PaddedGroup) -> Iterator[tuple[slice, int]]:
    """Blocks of padded queries, each with the number of keys that its last query may attend to."""
    for first in range(0, piece.query_JM.shape[1], QUERY_BLOCK):
        block = slice(first, first + QUERY_BLOCK)
        yield block, int(piece.position_JM[:, block].max()) + 1


def fetch(table_ND: Tensor, row: Tensor) -> Tensor:
    """Rows of a table as float64 [*row.shape, D]. E4M3 bytes become their values, NaN included."""
    is_codes = table_ND.dtype == E4M3
    rows = (table_ND.view(torch.uint8) if is_codes else table_ND).index_select(0, row.reshape(-1))
    values = decode_e4m3(rows.view(E4M3), torch.float64) if is_codes else rows.double()
    return values.view(*row.shape, table_ND.shape[-1])


def attend_reference(
    q_THD: Tensor,
    kv: KVRows,
    rows_of: Callable[[PaddedGroup], Tensor],
    cu_seqlens_q: tuple[int, ...],
    contexts: tuple[int, ...],
    softmax_scale: float,
    num_kv_heads: int,
    window: int | None = None,
    sinks_H: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Causal attention of every sequence over the table rows [J, K, S] that `rows_of(piece)` names.

    `window`: a query at position p reads the keys p - window + 1 to p. `sinks_H`: a score of each head without a key.
    Returns out [T, H, D] in q's dtype and lse2 [T, H] float32 (base 2). Rows of q outside every sequence are zero.
    """
    T, H, D = q_THD.shape
    K = num_kv_heads
    k_scale_K, k_scale_N = by_head_or_row(kv.k_scale)
    v_scale_K, v_scale_N = by_head_or_row(kv.v_scale)
    score_scale_K = head_scales(softmax_scale, k_scale_K, K, q_THD.device)
    q_rounded = q_THD.to(kv.operands[0])
    out_THD = torch.zeros(T, H, kv.v_ND.shape[-1], dtype=q_THD.dtype)
    lse2_TH = torch.zeros(T, H, dtype=torch.float32)
    for piece in pieces(cu_seqlens_q, contexts, H, D, MOST_PADDING):
        J = len(piece.sequence_J)
        row_JKS = rows_of(piece)
        k_NSD, v_NSD = (fetch(t, row_JKS).flatten(0, 1) for t in (kv.k_ND, kv.v_ND))
        column_N1S = score_scale_K.repeat(J)[:, None, None]
        if k_scale_N is not None:
            column_N1S = k_scale_N[row_JKS].flatten(0, 1)[:, None] * column_N1S
        v_scale_N1S = None if v_scale_N is None else v_scale_N[row_JKS].flatten(0, 1)[:, None]
        keys = PieceKeys(k_NSD, v_NSD, column_N1S, v_scale_N1S)
        for block, num_keys in query_blocks(piece):
            q_NRD = fold_heads(q_rounded[piece.query_JM[:, block]], K)
            position_NR = fold_positions(piece.position_JM[:, block], K, H // K)
            begin = (FLOOR, 0.0) if sinks_H is None else (_fold_sinks(sinks_H, position_NR, K), 1.0)
            o_NRD, m_NR, l_NR = _chunks(q_NRD, keys.part(slice(num_keys)), position_NR, kv, window, begin)
            inverse_NR = (1.0 if v_scale_K is None else v_scale_K.repeat(J)[:, None]) / l_NR
            num_queries = q_NRD.shape[1] * K // H
            out_JMHD = unfold_heads(o_NRD * inverse_NR[..., None], J, num_queries).to(q_THD.dtype)
            lse2_NR1 = (m_NR + l_NR.double().log2().float())[..., None]
            piece.scatter(out_THD, out_JMHD, block.start)
            piece.scatter(lse2_TH, unfold_heads(lse2_NR1, J, num_queries)[..., 0], block.start)
    return out_THD, lse2_TH


def _chunks(
    q_NRD: Tensor,
    keys: PieceKeys,
    position_NR: Tensor,
    kv: KVRows,
    window: int | None,
    begin: tuple[Tensor | float, float],
) -> tuple[Tensor, Tensor, Tensor]:
    """The chunks merged one after another: unnormalised o [N, R, D], m and l [N, R], all float32. `begin`: m and l
    before the first.

    Chunks that lie outside of all rows' windows are skipped; they would change nothing.
    """
    o_NRD = torch.zeros(*q_NRD.shape[:2], keys.v_NSD.shape[-1])
    m_NR, l_NR = (torch.zeros(q_NRD.shape[:2]) + first for first in begin)
    q_NRD = q_NRD.double()
    oldest = 0 if window is None else max(0, int(position_NR.min()) - window + 1)
    first = oldest // KV_CHUNK * KV_CHUNK
    for start in range(first, keys.k_NSD.shape[1], KV_CHUNK):
        chunk = keys.part(slice(start, start + KV_CHUNK))
        o_chunk, m_chunk, l_chunk = _tiles(q_NRD, chunk, position_NR - start, kv, window)
        if start == first and begin[1] == 0:  # merged with nothing; adding 0 makes -0 a 0, as the merge would
            o_NRD, m_NR, l_NR = o_chunk.add_(0.0), m_chunk, l_chunk
            continue
        m_new = torch.maximum(m_NR, m_chunk)
        before, here = (_exp2(m - m_new) for m in (m_NR, m_chunk))
        l_NR = _fma(l_chunk, here, l_NR * before)
        o_NRD = _fma(o_chunk, here[..., None], o_NRD * before[..., None])
        m_NR = m_new
    return o_NRD, m_NR, l_NR


def _tiles(
    q_NRD: Tensor, keys: PieceKeys, position_NR: Tensor, kv: KVRows, window: int | None
) -> tuple[Tensor, Tensor, Tensor]:
    """The online softmax over the ascending tiles of one chunk; `position_NR` counts from the chunk's first key."""
    o = torch.zeros(*q_NRD.shape[:2], keys.v_NSD.shape[-1])
    m = torch.full(q_NRD.shape[:2], FLOOR)
    l = torch.zeros(q_NRD.shape[:2])  # noqa: E741 (the letter every paper uses)
    _, v_operand = kv.operands
    for start in range(0, keys.k_NSD.shape[1], kv.tile):
        tile = keys.part(slice(start, start + kv.tile))
        s = torch.bmm(q_NRD, tile.k_NSD.mT).float()
        s.mul_(tile.score_scale_N1S)
        key_S = torch.arange(start, start + s.shape[-1])
        s.masked_fill_(hidden_keys(key_S, position_NR, window), -math.inf)
        m_new = torch.maximum(m, s.amax(-1))
        p = _exp2(s.sub_(m_new[..., None]))
        l_tile = p.sum(-1, dtype=torch.float64).float()
        if start == 0:  # nothing is carried
            l, carried = l_tile, o.double()  # noqa: E741
        else:
            alpha = _exp2(m - m_new)
            l = (l * alpha) + l_tile  # noqa: E741
            carried = (o * alpha[..., None]).double()
        if tile.v_scale_N1S is not None:
            p = p * tile.v_scale_N1S
        o = carried.baddbmm_(p.to(v_operand).double(), tile.v_NSD).float()
        m = m_new
    return o, m, l


def hidden_keys(key_S: Tensor, position_NR: Tensor, window: int | None) -> Tensor:
    """Which keys a query doesn't read: those after it, and those that its window doesn't reach."""
    position_NR1 = position_NR[..., None]
    hidden = key_S > position_NR1
    return hidden if window is None else hidden | (key_S <= position_NR1 - window)


def _exp2(x: Tensor) -> Tensor:
    return x.double().exp2().float()


def _fma(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """`a * b + c` in float32 of a product that is not rounded."""
    return torch.addcmul(c.double(), a.double(), b.double()).float()


def fold_heads(x_JMHD: Tensor, num_kv_heads: int) -> Tensor:
    """[J, M, H, D] -> [J * K, G * M, D]: the query heads of one kv head become rows of one matrix."""
    J, M, H, D = x_JMHD.shape
    split = x_JMHD.view(J, M, num_kv_heads, H // num_kv_heads, D)
    return split.permute(0, 2, 3, 1, 4).reshape(J * num_kv_heads, -1, D)


def unfold_heads(x_NRD: Tensor, J: int, num_queries: int) -> Tensor:
    """[J * K, G * M, D] -> [J, M, H, D], the inverse of `fold_heads`."""
    D = x_NRD.shape[-1]
    return x_NRD.view(J, -1, num_queries, D).transpose(1, 2)


def _fold_sinks(sinks_H: Tensor, position_NR: Tensor, num_kv_heads: int) -> Tensor:
    """The sink of each row, base 2."""
    sink2_KG = (sinks_H.float() * LOG2E).view(num_kv_heads, -1)
    sink2_KR = sink2_KG.repeat_interleave(position_NR.shape[1] // sink2_KG.shape[1], 1)
    return sink2_KR.repeat(len(position_NR) // num_kv_heads, 1)


def fold_positions(position_JM: Tensor, num_kv_heads: int, group: int) -> Tensor:
    J, M = position_JM.shape
    return position_JM[:, None, None].expand(J, num_kv_heads, group, M).reshape(J * num_kv_heads, group * M)
