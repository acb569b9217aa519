"""Decode: attention of one query per sequence over a paged KV cache.

A program works on the query heads of one kv head. 128 keys are on the tensor core's long side. The query heads, padded
to 8 or 16 columns, are on the short side. Codes use 16 columns, for which Triton emits wgmma with 4 warps. With 8
columns it would emit mma.sync and permute K, and the sums would have another order. `DecodeTile` holds the choice.

A decode is limited by loading pages. If a page is one tile (page size 128, head size 64 or 128), pages come by TMA,
several tiles ahead, from descriptors built at the launch. A register holds the id of the next page. A load of the id
inside the loop would be pipelined instead of K and V. Other shapes load through pointers, with the same sums.

TMA has no mask, so the last tile of a sequence is read whole. Scores past the context become -inf, and V there is
multiplied by a p of 0. This requires finite values: pages start as zeros, and an engine that meets a NaN fails and
drops its cache.

**Large batches.** One program per sequence and kv head goes through all keys and merges the chunks as it goes.

**Small batches.** The keys are split (`KeySplit`). A program computes whole chunks and writes the m, l and o of each in
float32. A second kernel merges them in ascending order. A captured grid does not know the lengths. Every program
therefore counts the chunks of all sequences and takes an equal share of that list. Both ways have the same bits,
because `attention_order` defines a sum by chunks.

**Draft rows.** With drafts, several rows are of one sequence (engine/draft_rows.py). One program serves up to `ROWS` of
them. Its columns are pairs of a row and a query head, each masked at its own row's last key, so keys are read once for
these rows. A row has a power of two of columns: divisions by other numbers spilled registers. The rows have the tiles,
the chunks and the merges that they would have alone, and `attention_order` says why tiles past a row's end change no
bit. Which rows belong together is read from their offsets on the device. `DraftLayout` decides where this is done.
Everywhere else, and without drafts, `ROWS` is 1.

The program that ends a head can quantise it. At head size 128 a head is one 1x128 block of o_proj's input, and
`quantize` writes codes and scale with the bytes of `quantize_activation`.

B sequences, P pages of the longest block table, H query heads, K kv heads, D head size, S chunks, N keys of a tile, C
query columns.
"""

from __future__ import annotations

from typing import Literal

import torch
import triton
import triton.language as tl
from torch import Tensor

from octetrl.fp8.format import BLOCK, E4M3, is_code
from octetrl.fp8.quantize import Quantized
from octetrl.kernels.attention.attention_order import (
    CLASSES,
    KV_CHUNK,
    KV_TILE,
    LOG2E,
    LOWEST,
    MODE_NUMBER,
    SINK_SCALE,
    TRITON_DTYPE,
    as_operand,
    block_of_head,
    comes_by_tma,
    interleaved,
    interleaved_index,
    load_pages,
    merge_columns,
    mode_of,
    operand_dtype,
    rows_of_tiles,
    skipped_chunks,
    update_columns,
)
from octetrl.kernels.attention.decode_chunks import (
    AHEAD,
    _attention_merge_kernel,
    chunk_results,
    store_chunk,
    store_out,
    whole_chunk,
)
from octetrl.kernels.attention.decode_layout import DecodeTile, DraftLayout, KeySplit
from octetrl.kernels.attention.kv_store import by_key
from octetrl.kernels.attention.records import CachedPages
from octetrl.kernels.programmatic_launch import lets_next_start
from octetrl.shapes.sizes import SUPPORTED_HEAD_SIZES

COUNTED = 64  # a program counts the chunks of at least so many sequences, so most batch sizes share one kernel


@triton.jit
def _rows_together(offset_ptr, first_B, num_rows, ROWS: tl.constexpr):
    """Number of rows that the program of each row `first_B` serves: 0 if the program of an earlier row serves it.

    A sequence's rows follow one another, with offsets from 0. Every `ROWS`-th of them begins a new program.
    """
    offset_B = tl.load(offset_ptr + first_B, mask=first_B < num_rows, other=0)
    begins_B = offset_B % ROWS == 0
    count_B = begins_B.to(tl.int32)
    for behind in tl.static_range(1, ROWS):
        other_B = tl.load(offset_ptr + first_B + behind, mask=first_B + behind < num_rows, other=0)
        count_B += (begins_B & (other_B == offset_B + behind)).to(tl.int32)
    return count_B


@triton.jit
def _places(rows, row_stride, GROUP: tl.constexpr, PITCH: tl.constexpr, KEPT: tl.constexpr, ROWS: tl.constexpr):
    """Where the results of each column of a chunk lie, relative to the first; and whether the column has any."""
    column_C = tl.arange(0, KEPT)
    if ROWS == 1:
        return column_C, column_C < GROUP
    row_C, head_C = column_C // PITCH, column_C % PITCH
    return row_C * row_stride + head_C, (row_C < rows) & (head_C < GROUP)


@triton.jit
def _attend(
    q_ptr, k_pages, v_pages, table_ptr, k_scale_ptr, v_scale_ptr, m_ptr, l_ptr, o_ptr, first_place, row_stride,
    sequence, rows, kv_head, first, end, num_keys,
    stride_q_token, stride_q_head, stride_k_page, stride_k_head, stride_k_token, stride_v_page, stride_v_head,
    stride_v_token, stride_v_d, stride_scale_page, stride_scale_head, stride_scale_token, stride_table, base_scale,
    HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_SIZE: tl.constexpr, BLOCK_D: tl.constexpr, PAGE_SIZE: tl.constexpr,
    COLUMNS: tl.constexpr, KEPT: tl.constexpr, N: tl.constexpr, CHUNK: tl.constexpr, K_MODE: tl.constexpr,
    V_MODE: tl.constexpr, K_OPERAND: tl.constexpr, V_OPERAND: tl.constexpr, TMA: tl.constexpr, V_TURNED: tl.constexpr,
    SPLIT: tl.constexpr, STAGES: tl.constexpr, WINDOW: tl.constexpr, ROWS: tl.constexpr, PITCH: tl.constexpr,
    sink_ptr,
):  # fmt: skip
    """Attention of `rows` rows from `sequence` on over the keys from `first` to `end`, in whole chunks.

    Returns their total: m, l [KEPT] and o [D, KEPT]. With `SPLIT` it stores every chunk instead, the first at
    `first_place`, and returns the last one. `num_keys`: of the last row; each row before it has one key less.
    """
    d_D = tl.arange(0, BLOCK_D)
    n_N = tl.arange(0, N)
    head_C = kv_head * GROUP + tl.arange(0, COLUMNS) % GROUP
    if ROWS > 1:
        head_C = kv_head * GROUP + tl.arange(0, COLUMNS) % PITCH % GROUP
    head_D = d_D < HEAD_SIZE
    K_INTERLEAVED: tl.constexpr = TMA and K_MODE > 0
    q_d_D = interleaved_index(d_D) if K_INTERLEAVED else d_D
    q_ptr_1C = q_ptr + sequence * stride_q_token + head_C[None, :] * stride_q_head
    fewest = num_keys
    if ROWS > 1:
        row_C = tl.minimum(tl.arange(0, COLUMNS) // PITCH, rows - 1)  # what is left over copies the last row
        q_ptr_1C += row_C[None, :] * stride_q_token
        fewest = num_keys - rows + 1
        keys_C = fewest + row_C
    q_DC = tl.load(q_ptr_1C + q_d_D[:, None], mask=head_D[:, None], other=0.0).to(K_OPERAND)
    score_scale = base_scale
    if K_MODE == 1:
        score_scale = base_scale * tl.load(k_scale_ptr + kv_head)
    table_ptr += sequence * stride_table

    m_C = tl.full([KEPT], LOWEST, tl.float32)
    l_C = tl.zeros([KEPT], tl.float32)
    if sink_ptr is not None and not SPLIT:
        m_C = tl.load(sink_ptr + kv_head * GROUP + tl.arange(0, KEPT) % GROUP).to(tl.float32) * SINK_SCALE
        l_C = tl.full([KEPT], 1.0, tl.float32)
    o_DC = tl.zeros([BLOCK_D, KEPT], tl.float32)
    m_chunk_C = tl.full([COLUMNS], LOWEST, tl.float32)
    l_chunk_XC = tl.zeros([CLASSES, COLUMNS], tl.float32)
    o_chunk_DC = tl.zeros([BLOCK_D, COLUMNS], tl.float32)
    begin = tl.maximum(first, (fewest - WINDOW) // N * N) if WINDOW > 0 else first  # the first tile that is read
    page = load_pages(table_ptr, begin, num_keys, PAGE_SIZE, N)
    for start in tl.range(begin, end, N, num_stages=STAGES):
        key_N = start + n_N
        present_N = key_N < num_keys
        here = page
        page = load_pages(table_ptr, start + N, num_keys, PAGE_SIZE, N)
        if TMA:
            matrix = here * (HEADS // GROUP) + kv_head  # one page of one head
            k_ND = k_pages.load([matrix * N, 0])
            k_ND = as_operand(interleaved(k_ND, N, HEAD_SIZE) if K_INTERLEAVED else k_ND, K_OPERAND)
        else:
            row_N = here.to(tl.int64) * stride_k_page + kv_head * stride_k_head + key_N % PAGE_SIZE * stride_k_token
            k_mask_ND = present_N[:, None] & head_D[None, :]
            k_ND = tl.load(k_pages + row_N[:, None] + d_D[None, :], mask=k_mask_ND, other=0.0)
            k_ND = as_operand(k_ND, K_OPERAND)
        scale_N = here.to(tl.int64) * stride_scale_page + kv_head * stride_scale_head
        scale_N += key_N % PAGE_SIZE * stride_scale_token
        v_scale_N = score_scale
        if K_MODE == 2:
            k_scale_N = tl.load(k_scale_ptr + scale_N, mask=present_N, other=0.0)
        if V_MODE == 2:
            v_scale_N = tl.load(v_scale_ptr + scale_N, mask=present_N, other=0.0)
        s_NC = tl.dot(k_ND, q_DC)
        s_NC = s_NC * (k_scale_N * score_scale)[:, None] if K_MODE == 2 else s_NC * score_scale
        if ROWS > 1:
            read_NC = key_N[:, None] < keys_C[None, :]
            read_NC = read_NC & (key_N[:, None] + WINDOW >= keys_C[None, :]) if WINDOW > 0 else read_NC
        else:
            read_N = present_N & (key_N + WINDOW >= num_keys) if WINDOW > 0 else present_N
            read_NC = read_N[:, None]
        s_NC = tl.where(read_NC, s_NC, float("-inf"))
        if start % CHUNK == 0 and start > first:  # the chunk before is whole
            whole = whole_chunk(m_chunk_C, l_chunk_XC, o_chunk_DC, BLOCK_D, COLUMNS, KEPT)
            if SPLIT:
                place = first_place + (start - first - 1) // CHUNK * HEADS
                places = _places(rows, row_stride, GROUP, PITCH, KEPT, ROWS)
                store_chunk(*whole, m_ptr, l_ptr, o_ptr, place, *places, HEAD_SIZE, BLOCK_D)
            else:
                m_C, l_C, o_DC = merge_columns(m_C, l_C, o_DC, *whole)
            m_chunk_C = tl.full([COLUMNS], LOWEST, tl.float32)
        if TMA:
            if V_TURNED:
                v_DN = as_operand(interleaved(v_pages.load([matrix * HEAD_SIZE, 0]), HEAD_SIZE, N), V_OPERAND)
            else:
                v_DN = tl.trans(v_pages.load([matrix * N, 0]).to(V_OPERAND))
        else:
            row_N = here.to(tl.int64) * stride_v_page + kv_head * stride_v_head
            if PAGE_SIZE < N:
                row_N = tl.max_constancy(row_N, PAGE_SIZE)  # so that transposed codes load in words
            row_N += key_N % PAGE_SIZE * stride_v_token
            v_ptr_DN = v_pages + row_N[None, :] + d_D[:, None] * stride_v_d
            v_mask_DN = head_D[:, None] if V_TURNED else head_D[:, None] & present_N[None, :]
            v_DN = as_operand(tl.load(v_ptr_DN, mask=v_mask_DN, other=0.0), V_OPERAND)
        m_chunk_C, l_chunk_XC, o_chunk_DC = update_columns(
            s_NC, m_chunk_C, l_chunk_XC, o_chunk_DC, v_DN, v_scale_N, COLUMNS, N, V_MODE, TMA and V_TURNED
        )
    whole = whole_chunk(m_chunk_C, l_chunk_XC, o_chunk_DC, BLOCK_D, COLUMNS, KEPT)
    if SPLIT:
        place = first_place + (end - first - 1) // CHUNK * HEADS
        places = _places(rows, row_stride, GROUP, PITCH, KEPT, ROWS)
        store_chunk(*whole, m_ptr, l_ptr, o_ptr, place, *places, HEAD_SIZE, BLOCK_D)
        return whole
    return merge_columns(m_C, l_C, o_DC, *whole)


@triton.jit(do_not_specialize=["stride_table", "num_sequences", "max_chunks"])
def _attention_decode_kernel(
    q_ptr, k_pages, v_pages, out_ptr, out_scale_ptr, table_ptr, contexts_ptr, offset_ptr, k_scale_ptr, v_scale_ptr,
    m_ptr, l_ptr, o_ptr, num_sequences, max_chunks,
    stride_q_token, stride_q_head, stride_k_page, stride_k_head, stride_k_token, stride_v_page, stride_v_head,
    stride_v_token, stride_v_d, stride_scale_page, stride_scale_head, stride_scale_token, stride_table, base_scale,
    HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_SIZE: tl.constexpr, BLOCK_D: tl.constexpr, PAGE_SIZE: tl.constexpr,
    COLUMNS: tl.constexpr, KEPT: tl.constexpr, N: tl.constexpr, CHUNK: tl.constexpr, K_MODE: tl.constexpr,
    V_MODE: tl.constexpr, K_OPERAND: tl.constexpr, V_OPERAND: tl.constexpr, TMA: tl.constexpr, V_TURNED: tl.constexpr,
    QUANTIZE: tl.constexpr, POWER_OF_TWO: tl.constexpr, SEQUENCES: tl.constexpr, STAGES: tl.constexpr,
    WINDOW: tl.constexpr, ROWS: tl.constexpr, PITCH: tl.constexpr, sink_ptr,
):  # fmt: skip
    """`SEQUENCES` 0: one sequence and kv head, to the output. Else at least B: a share of all chunks, to m, l and o.

    `ROWS` > 1, only where keys are split: so many draft rows of a sequence share a program, `PITCH` columns each.
    """
    kv_head = tl.program_id(0)  # all heads of a page are one piece of memory, so their programs are neighbours
    row_stride = max_chunks * HEADS
    rows = 1
    if SEQUENCES == 0:
        sequence = tl.program_id(1).to(tl.int64)
        num_keys = tl.load(contexts_ptr + sequence)
        _, l_C, o_DC = _attend(
            q_ptr, k_pages, v_pages, table_ptr, k_scale_ptr, v_scale_ptr, m_ptr, l_ptr, o_ptr, 0, row_stride,
            sequence, rows, kv_head, 0, num_keys, num_keys,
            stride_q_token, stride_q_head, stride_k_page, stride_k_head, stride_k_token, stride_v_page, stride_v_head,
            stride_v_token, stride_v_d, stride_scale_page, stride_scale_head, stride_scale_token, stride_table,
            base_scale, HEADS, GROUP, HEAD_SIZE, BLOCK_D, PAGE_SIZE, COLUMNS, KEPT, N, CHUNK, K_MODE, V_MODE, K_OPERAND,
            V_OPERAND, TMA, V_TURNED, False, STAGES, WINDOW, ROWS, PITCH, sink_ptr,
        )  # fmt: skip
        column_C = tl.arange(0, KEPT)
        store_out(
            l_C, o_DC, out_ptr, out_scale_ptr, v_scale_ptr, sequence, num_keys, kv_head,
            kv_head * GROUP + column_C % GROUP, column_C < GROUP,
            HEADS, HEAD_SIZE, BLOCK_D, V_MODE, QUANTIZE, POWER_OF_TWO,
        )  # fmt: skip
    else:
        sequence_B = tl.arange(0, SEQUENCES)
        keys_B = tl.load(contexts_ptr + sequence_B, mask=sequence_B < num_sequences, other=0)
        skipped_B = skipped_chunks(keys_B, WINDOW, CHUNK)
        if ROWS > 1:
            rows_B = _rows_together(offset_ptr, sequence_B, num_sequences, ROWS)
            keys_B = tl.where(rows_B > 0, keys_B + rows_B - 1, 0)
            skipped_B = tl.where(rows_B > 0, skipped_B, 0)
        chunks_B = (keys_B + CHUNK - 1) // CHUNK - skipped_B
        end_B = tl.cumsum(chunks_B, 0)
        total = tl.sum(chunks_B, 0)
        item = tl.program_id(1) * total // tl.num_programs(1)
        last = (tl.program_id(1) + 1) * total // tl.num_programs(1)
        while item < last:  # chunks of one sequence
            number = tl.sum((end_B <= item).to(tl.int32), 0)
            chunk = item - tl.sum(tl.where(sequence_B < number, chunks_B, 0), 0)
            sequence = number.to(tl.int64)
            num_keys = tl.load(contexts_ptr + sequence)
            chunk += skipped_chunks(num_keys, WINDOW, CHUNK)
            first = chunk * CHUNK
            if ROWS > 1:
                rows = _rows_together(offset_ptr, sequence, num_sequences, ROWS)
                num_keys += rows - 1
            end = tl.minimum(first + (last - item) * CHUNK, num_keys)
            _attend(
                q_ptr, k_pages, v_pages, table_ptr, k_scale_ptr, v_scale_ptr, m_ptr, l_ptr, o_ptr,
                (sequence * max_chunks + chunk) * HEADS + kv_head * GROUP, row_stride, sequence, rows, kv_head, first,
                end, num_keys,
                stride_q_token, stride_q_head, stride_k_page, stride_k_head, stride_k_token, stride_v_page,
                stride_v_head, stride_v_token, stride_v_d, stride_scale_page, stride_scale_head, stride_scale_token,
                stride_table, base_scale, HEADS, GROUP, HEAD_SIZE, BLOCK_D, PAGE_SIZE, COLUMNS, KEPT, N, CHUNK, K_MODE,
                V_MODE, K_OPERAND, V_OPERAND, TMA, V_TURNED, True, STAGES, WINDOW, ROWS, PITCH, sink_ptr,
            )  # fmt: skip
            item += (end - first + CHUNK - 1) // CHUNK


def _check(
    q_BHD: Tensor, k_cache: Tensor, context_lens_B: Tensor, draft_offset_B: Tensor | None, quantize: bool
) -> None:
    (num_sequences, _, head_size), contexts = q_BHD.shape, context_lens_B.shape
    assert (num_sequences,) == contexts, "decode takes exactly one query a sequence"
    assert head_size in SUPPORTED_HEAD_SIZES, f"head size {head_size} is not one of {SUPPORTED_HEAD_SIZES}"
    assert q_BHD.stride(2) == k_cache.stride(3) == 1, "attention_paged: the last axis must be contiguous"
    assert not quantize or head_size == BLOCK, f"a head of {head_size} is not one block of {BLOCK}"
    if draft_offset_B is not None:
        assert draft_offset_B.shape == contexts, f"{draft_offset_B.shape} offsets of drafts for {contexts} rows"
        assert draft_offset_B.is_contiguous(), "attention_paged: offsets of drafts must be contiguous"


def attention_decode_triton(
    q_BHD: Tensor,
    k: CachedPages,
    v: CachedPages,
    block_table_BP: Tensor,
    context_lens_B: Tensor,
    softmax_scale: float,
    quantize: bool = False,
    power_of_two: bool = False,
    tile: DecodeTile | None = None,
    split: KeySplit | Literal["chosen"] | None = "chosen",
    window: int | None = None,
    draft_offset_B: Tensor | None = None,
    sinks_H: Tensor | None = None,
) -> Tensor | Quantized:
    """One query per sequence, or draft rows. `quantize` only at head size 128.
    `tile` and `split` replace the chosen layout; no bit depends on them. `split=None`: one program per sequence.
    draft_offset_B: as in `attention_paged`; rows of one sequence share a program if there is a `DraftLayout`.
    """
    k_cache, v_cache, k_scale, v_scale = k.pages, v.pages, k.scale_in_use, v.scale_in_use
    (num_sequences, num_heads, head_size), (num_kv_heads, page_size) = q_BHD.shape, k_cache.shape[1:3]
    group, num_pages, rows = num_heads // num_kv_heads, block_table_BP.shape[1], 1
    _check(q_BHD, k_cache, context_lens_B, draft_offset_B, quantize)
    if draft_offset_B is not None:
        rows, tile, split = DraftLayout.chosen(q_BHD, k_cache, v_cache, num_pages, tile) or (1, tile, split)
    if split == "chosen":
        split = KeySplit.chosen(q_BHD, k_cache, v_cache, num_pages)
    max_chunks, programs = (0, num_sequences) if split is None else (split.max_chunks, split.programs)
    tile = tile or DecodeTile.chosen(k_cache, v_cache, programs * num_kv_heads)
    columns = max(tile.columns, triton.next_power_of_2(group))
    k_mode, v_mode = mode_of(k_scale), mode_of(v_scale)
    token_scales = [scale for scale in (k_scale, v_scale) if mode_of(scale) == "dynamic" and scale is not None]
    stride_scale = token_scales[0].stride() if token_scales else (0, 0, 0)
    tma = comes_by_tma(k_cache, v_cache)
    pages = (rows_of_tiles(k_cache), rows_of_tiles(v_cache)) if tma else (k_cache, v_cache)
    out_BHD = torch.empty(q_BHD.shape, dtype=torch.uint8 if quantize else q_BHD.dtype, device=q_BHD.device)
    out_scale_HB = torch.empty(num_heads, num_sequences, device=q_BHD.device) if quantize else None
    m_BSH, l_BSH, o_BSHD = chunk_results(q_BHD, max_chunks) if split else (None, None, None)
    shape = {
        "HEADS": num_heads, "GROUP": group, "HEAD_SIZE": head_size, "BLOCK_D": block_of_head(head_size),
        "CHUNK": KV_CHUNK, "V_MODE": MODE_NUMBER[v_mode], "POWER_OF_TWO": power_of_two, "WINDOW": window or 0,
        "sink_ptr": sinks_H, "num_warps": 4, **({"enable_fp_fusion": False} if q_BHD.is_cuda else {}),
    }  # fmt: skip
    if num_sequences > 0:
        _attention_decode_kernel[(num_kv_heads, programs)](
            q_BHD, *pages, out_BHD, out_scale_HB, block_table_BP, context_lens_B,
            draft_offset_B if rows > 1 else None, k_scale, v_scale, m_BSH, l_BSH, o_BSHD, num_sequences, max_chunks,
            q_BHD.stride(0), q_BHD.stride(1), *k_cache.stride()[:3], *by_key(v_cache).stride(), *stride_scale,
            block_table_BP.stride(0), softmax_scale * LOG2E, PAGE_SIZE=page_size, COLUMNS=columns,
            KEPT=columns if rows > 1 else min(columns, max(8, triton.next_power_of_2(group))), N=KV_TILE,
            K_MODE=MODE_NUMBER[k_mode], K_OPERAND=TRITON_DTYPE[operand_dtype(k_cache.dtype, k_mode)],
            V_OPERAND=TRITON_DTYPE[operand_dtype(v_cache.dtype, v_mode)],
            TMA=tma, V_TURNED=is_code(v_cache.dtype), QUANTIZE=quantize and split is None, STAGES=tile.stages,
            SEQUENCES=0 if split is None else max(COUNTED, triton.next_power_of_2(num_sequences)), ROWS=rows,
            PITCH=triton.next_power_of_2(group), **shape, **({"maxnreg": tile.registers} if q_BHD.is_cuda else {}),
        )  # fmt: skip
    if num_sequences > 0 and split is not None:
        _attention_merge_kernel[(num_heads, num_sequences)](
            m_BSH, l_BSH, o_BSHD, out_BHD, out_scale_HB, context_lens_B, v_scale, max_chunks, QUANTIZE=quantize,
            AHEAD=min(AHEAD, triton.next_power_of_2(max_chunks)), EARLY=lets_next_start(q_BHD), **shape,
        )  # fmt: skip
    if out_scale_HB is None:
        return out_BHD
    return Quantized(out_BHD.flatten(1).view(E4M3), out_scale_HB.t())
