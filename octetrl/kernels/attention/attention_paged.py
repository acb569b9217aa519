"""Causal attention of new tokens over a paged KV cache: decode and chunked prefill, with one order of sums.

Sequence b has the queries `cu_seqlens_q[b] : cu_seqlens_q[b + 1]`; the last one sits at key `context_lens[b]
- 1`, and the keys of this very chunk are read from the cache too, so a prompt token meets the same quantised
K and V at prefill as at decode. Prefill is `attention_rows`; the rest of this text is about decode.

One program per sequence and kv head, with 128 keys on the tensor core's long side and that head's query heads, padded
to some columns, on the short one. For codes the columns are 16, which with 4 warps makes it wgmma: with 8 they would go
through mma.sync, for which Triton permutes K inside a pair of instructions, and the sums would come out in another
order. BF16 has no such trap; `DecodeTile` holds what was chosen.

A decode is as fast as its pages arrive, so where a page is one tile (page size 128, head size 64 or 128) they come by
TMA, several tiles ahead, from descriptors made at the launch. The id of the next page is carried in a register: were it
loaded inside the loop, the table would be pipelined instead of K and V. Other shapes load through pointers, with the
same sums.

TMA knows no mask, and a mask along the keys would break loads of turned codes into bytes. So the last tile of a
sequence is read whole: scores past the context become -inf, and whatever lies in V there is multiplied by a p of 0.
That is nothing as long as it is finite: pages begin as zeros, and an engine that met a NaN fails and drops its cache.

There is no split of long contexts: at rollout's batch sizes the programs fill the GPU without it (an H200, 128 x 2,560
FP8 keys: 159 us a layer, 160-162 with splits), and a split would be one more order to keep. It also lets the program
that ends a head quantise it: at head size 128 a head is one 1x128 block of o_proj's input, and `quantize_out` has the
kernel write the codes and the scale by the rule of `quantize_activation`, to the byte.

B sequences, P pages of the longest block table, T tokens, H query heads, K kv heads, D head size, S keys,
N keys of a tile, C query columns.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from octetrl.config.spec import SUPPORTED_HEAD_SIZES
from octetrl.fp8.format import BLOCK, E4M3
from octetrl.fp8.quantize import Quantized
from octetrl.kernels.attention.attention_order import (
    CLASSES,
    KV_TILE,
    LOG2E,
    MODE_NUMBER,
    TRITON_DTYPE,
    KVRows,
    Piece,
    attend_reference,
    interleaved,
    interleaved_index,
    load_pages,
    mode_of,
    operand_dtype,
    total_of_columns,
    update_columns,
)
from octetrl.kernels.attention.attention_rows import SMALLEST_BLOCK_D, attention_rows
from octetrl.kernels.attention.kv_store import by_key, scale_in_use
from octetrl.kernels.quantize.quantize_activation import block_scale, e4m3_byte, magnitude_bits, quantize_activation

TMA_HEAD_SIZES = (64, 128)
MULTIPROCESSORS = 132  # of an H100 or H200


@dataclass(frozen=True)
class DecodeTile:
    """How decode lays out a tile: query columns (8 or 16; 16 where codes are multiplied), tiles in flight, and the most
    registers a thread may take (None: as many as it likes)."""

    columns: int
    stages: int
    registers: int | None = None

    @classmethod
    def chosen(cls, k_cache: Tensor, v_cache: Tensor, num_programs: int) -> DecodeTile:
        """What was fastest on an H200 at head size 128 (docs/log.md).

        With 3 tiles of codes in flight three programs share a multiprocessor, with 4 two do: that is slower, but better
        than a last wave of programs that leaves most multiprocessors idle.
        """
        if k_cache.shape[3] == 256:
            return cls(columns=16, stages=2 if v_cache.dtype == E4M3 else 1)  # two BF16 tiles do not fit
        if k_cache.dtype == v_cache.dtype == E4M3:
            by_three, by_two = (_filled(num_programs, each * MULTIPROCESSORS) for each in (3, 2))
            return cls(columns=16, stages=4) if by_two > 1.25 * by_three else cls(columns=16, stages=3, registers=168)
        return cls(columns=16, stages=2) if v_cache.dtype == E4M3 else cls(columns=8, stages=3)


def _filled(num_programs: int, places: int) -> float:
    """Share of the places that are taken, over all waves of programs."""
    return num_programs / (places * -(-num_programs // places)) if num_programs else 0.0


def attention_paged(
    q_THD: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table_BP: Tensor,
    cu_seqlens_q_B1: Tensor,
    context_lens_B: Tensor,
    softmax_scale: float,
    k_scale_K: Tensor | None = None,
    v_scale_K: Tensor | None = None,
    k_token_scale: Tensor | None = None,
    v_token_scale: Tensor | None = None,
    max_query_len: int | None = None,
    quantize_out: bool = False,
    power_of_two: bool = False,
) -> Tensor | Quantized:
    """out [T, H, D] in q's dtype; with `quantize_out`, `quantize_activation(out.flatten(1), power_of_two)`.

    k_cache, v_cache: pages as in `kv_store`, each BF16, E4M3 or (CPU) float32. block_table_BP: int32, -1 padded.
    cu_seqlens_q_B1, context_lens_B: int32; a context of 0 marks a padding sequence, whose rows come back as
    zeros (codes 0, scale 1). Scales as in `kv_store`. max_query_len: longest query run, 1 for pure decode; without
    it T is assumed.
    """
    scales = (k_scale_K, v_scale_K, k_token_scale, v_token_scale)
    arguments = (
        q_THD,
        k_cache,
        v_cache,
        block_table_BP,
        cu_seqlens_q_B1,
        context_lens_B,
        softmax_scale,
        *scales,
    )
    if q_THD.is_cuda:
        return attention_paged_triton(*arguments, max_query_len, quantize_out, power_of_two)
    out_THD = attention_paged_reference(*arguments)
    return quantize_activation(out_THD.flatten(1), power_of_two) if quantize_out else out_THD


def attention_paged_reference(
    q_THD: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table_BP: Tensor,
    cu_seqlens_q_B1: Tensor,
    context_lens_B: Tensor,
    softmax_scale: float,
    k_scale_K: Tensor | None = None,
    v_scale_K: Tensor | None = None,
    k_token_scale: Tensor | None = None,
    v_token_scale: Tensor | None = None,
) -> Tensor:
    """`attention_paged` in plain torch, by the CPU form of the order."""
    _, num_kv_heads, page_size, head_size = k_cache.shape
    used_U, renamed_BP = block_table_BP.clamp_min(0).unique(return_inverse=True)

    def table(cache: Tensor) -> Tensor:  # codes have no indexing, bytes have
        codes = cache.dtype == E4M3
        rows = (cache.view(torch.uint8) if codes else cache)[used_U.long()].reshape(-1, head_size)
        return rows.view(E4M3) if codes else rows

    def table_scale(scale: Tensor | None) -> Tensor | None:
        return scale if scale is None or scale.dim() == 1 else scale[used_U.long()]

    kv = KVRows(
        table(k_cache),
        table(by_key(v_cache)),
        table_scale(scale_in_use(k_cache, k_scale_K, k_token_scale)),
        table_scale(scale_in_use(v_cache, v_scale_K, v_token_scale)),
    )

    def rows_of(piece: Piece) -> Tensor:
        page_JS = renamed_BP[piece.sequence_J[:, None], piece.key_JS // page_size]
        head_K = torch.arange(num_kv_heads)[:, None]
        return (page_JS[:, None] * num_kv_heads + head_K) * page_size + (piece.key_JS % page_size)[:, None]

    out_THD, _ = attend_reference(
        q_THD,
        kv,
        rows_of,
        tuple(cu_seqlens_q_B1.tolist()),
        tuple(context_lens_B.tolist()),
        softmax_scale,
        num_kv_heads,
    )
    return out_THD


# ---------------------------------------------------------------- Triton


@triton.jit
def _store_quantized(
    out_DC, code_ptr, scale_ptr, offset_DC, scale_offset_C, own_C, POWER_OF_TWO: tl.constexpr
):  # fmt: skip
    """Each column is one 1x128 block: its codes and its scale, from the BF16 rounding of the output."""
    x_DC = out_DC.to(tl.bfloat16).to(tl.float32)
    scale_C, inverse_C = block_scale(tl.max(magnitude_bits(x_DC), 0), POWER_OF_TWO)
    tl.store(code_ptr + offset_DC, e4m3_byte(x_DC * inverse_C[None, :]), mask=own_C[None, :])
    tl.store(scale_ptr + scale_offset_C, scale_C, mask=own_C)


@triton.jit(do_not_specialize=["stride_table"])
def _attention_decode_kernel(
    q_ptr, k_pages, v_pages, out_ptr, out_scale_ptr, table_ptr, contexts_ptr, k_scale_ptr, v_scale_ptr,
    stride_q_token, stride_q_head, stride_k_page, stride_k_head, stride_k_token, stride_v_page, stride_v_head,
    stride_v_token, stride_v_d, stride_scale_page, stride_scale_head, stride_scale_token, stride_table, base_scale,
    HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_SIZE: tl.constexpr, BLOCK_D: tl.constexpr, PAGE_SIZE: tl.constexpr,
    COLUMNS: tl.constexpr, N: tl.constexpr, K_MODE: tl.constexpr, V_MODE: tl.constexpr, K_OPERAND: tl.constexpr,
    V_OPERAND: tl.constexpr, TMA: tl.constexpr, V_TURNED: tl.constexpr, QUANTIZE: tl.constexpr,
    POWER_OF_TWO: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    sequence = tl.program_id(1).to(tl.int64)
    kv_head = tl.program_id(0)  # a page of all heads is one piece of memory: they run side by side
    num_keys = tl.load(contexts_ptr + sequence)
    d_D = tl.arange(0, BLOCK_D)
    n_N = tl.arange(0, N)
    column_C = tl.arange(0, COLUMNS)
    head_C = kv_head * GROUP + column_C % GROUP
    head_D = d_D < HEAD_SIZE
    K_INTERLEAVED: tl.constexpr = TMA and K_MODE > 0
    q_d_D = interleaved_index(d_D) if K_INTERLEAVED else d_D
    q_DC = tl.load(
        q_ptr + sequence * stride_q_token + head_C[None, :] * stride_q_head + q_d_D[:, None],
        mask=head_D[:, None], other=0.0,
    ).to(K_OPERAND)  # fmt: skip
    score_scale = base_scale
    out_scale = 1.0
    if K_MODE == 1:
        score_scale = base_scale * tl.load(k_scale_ptr + kv_head)
    if V_MODE == 1:
        out_scale = tl.load(v_scale_ptr + kv_head)
    table_ptr += sequence * stride_table

    m_C = tl.full([COLUMNS], float("-inf"), tl.float32)
    l_XC = tl.zeros([CLASSES, COLUMNS], tl.float32)
    o_DC = tl.zeros([BLOCK_D, COLUMNS], tl.float32)
    page = load_pages(table_ptr, 0, num_keys, PAGE_SIZE, N)
    for start in tl.range(0, num_keys, N, num_stages=STAGES):
        key_N = start + n_N
        present_N = key_N < num_keys
        here = page
        page = load_pages(table_ptr, start + N, num_keys, PAGE_SIZE, N)
        if TMA:
            matrix = here * (HEADS // GROUP) + kv_head  # one page of one head
            k_ND = k_pages.load([matrix * N, 0])
            k_ND = (interleaved(k_ND, N, HEAD_SIZE) if K_INTERLEAVED else k_ND).to(K_OPERAND)
        else:
            row_N = here.to(tl.int64) * stride_k_page + kv_head * stride_k_head + key_N % PAGE_SIZE * stride_k_token
            k_mask_ND = present_N[:, None] & head_D[None, :]
            k_ND = tl.load(k_pages + row_N[:, None] + d_D[None, :], mask=k_mask_ND, other=0.0).to(K_OPERAND)
        scale_N = here.to(tl.int64) * stride_scale_page + kv_head * stride_scale_head
        scale_N += key_N % PAGE_SIZE * stride_scale_token
        v_scale_N = score_scale
        if K_MODE == 2:
            k_scale_N = tl.load(k_scale_ptr + scale_N, mask=present_N, other=0.0)
        if V_MODE == 2:
            v_scale_N = tl.load(v_scale_ptr + scale_N, mask=present_N, other=0.0)
        s_NC = tl.dot(k_ND, q_DC)
        s_NC = s_NC * (k_scale_N * score_scale)[:, None] if K_MODE == 2 else s_NC * score_scale
        s_NC = tl.where(present_N[:, None], s_NC, float("-inf"))
        if TMA:
            if V_TURNED:
                v_DN = interleaved(v_pages.load([matrix * HEAD_SIZE, 0]), HEAD_SIZE, N).to(V_OPERAND)
            else:
                v_DN = tl.trans(v_pages.load([matrix * N, 0]).to(V_OPERAND))
        else:
            row_N = here.to(tl.int64) * stride_v_page + kv_head * stride_v_head
            if PAGE_SIZE < N:
                row_N = tl.max_constancy(row_N, PAGE_SIZE)  # so that turned codes load in words
            row_N += key_N % PAGE_SIZE * stride_v_token
            v_ptr_DN = v_pages + row_N[None, :] + d_D[:, None] * stride_v_d
            v_mask_DN = head_D[:, None] if V_TURNED else head_D[:, None] & present_N[None, :]
            v_DN = tl.load(v_ptr_DN, mask=v_mask_DN, other=0.0).to(V_OPERAND)
        m_C, l_XC, o_DC = update_columns(s_NC, m_C, l_XC, o_DC, v_DN, v_scale_N, COLUMNS, N, V_MODE, TMA and V_TURNED)

    l_C = total_of_columns(l_XC, COLUMNS)
    l_safe_C = tl.where(num_keys > 0, l_C, 1.0)  # a padding sequence gives zeros; NaN stays NaN
    out_DC = o_DC * tl.div_rn(tl.zeros_like(l_C) + out_scale, l_safe_C)[None, :]
    out_offset_DC = (sequence * HEADS + head_C)[None, :] * HEAD_SIZE + d_D[:, None]
    own_C = column_C < GROUP
    if QUANTIZE:
        scale_offset_C = head_C * tl.num_programs(1) + sequence
        _store_quantized(out_DC, out_ptr, out_scale_ptr, out_offset_DC, scale_offset_C, own_C, POWER_OF_TWO)
    else:
        own_DC = own_C[None, :] & head_D[:, None]
        tl.store(out_ptr + out_offset_DC, out_DC.to(out_ptr.dtype.element_ty), mask=own_DC)


def attention_paged_triton(
    q_THD: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table_BP: Tensor,
    cu_seqlens_q_B1: Tensor,
    context_lens_B: Tensor,
    softmax_scale: float,
    k_scale_K: Tensor | None = None,
    v_scale_K: Tensor | None = None,
    k_token_scale: Tensor | None = None,
    v_token_scale: Tensor | None = None,
    max_query_len: int | None = None,
    quantize_out: bool = False,
    power_of_two: bool = False,
) -> Tensor | Quantized:
    """`attention_paged` by the decode kernel where every sequence has one query, else by the rows kernel."""
    page_size, head_size = k_cache.shape[2:]
    assert KV_TILE % page_size == 0 or page_size % KV_TILE == 0, f"page size {page_size} does not fit the KV tile"
    assert by_key(v_cache).shape == k_cache.shape, f"pages of K {k_cache.shape} and V {v_cache.shape} do not match"
    assert block_table_BP.stride(1) == 1, "attention_paged: rows of the block table must be contiguous"
    k_scale = scale_in_use(k_cache, k_scale_K, k_token_scale)
    v_scale = scale_in_use(v_cache, v_scale_K, v_token_scale)
    if max_query_len == 1:
        tables = (q_THD, k_cache, v_cache, block_table_BP, context_lens_B, softmax_scale, k_scale, v_scale)
        out = attention_decode_triton(*tables, quantize_out and head_size == BLOCK, power_of_two)
        if isinstance(out, Quantized):
            return out
        out_THD = out
    else:
        longest = q_THD.shape[0] if max_query_len is None else max_query_len
        out_THD, _ = attention_rows(
            q_THD, k_cache, by_key(v_cache), cu_seqlens_q_B1, longest, softmax_scale, k_scale, v_scale,
            block_table_BP, context_lens_B,
        )  # fmt: skip
    return quantize_activation(out_THD.flatten(1), power_of_two) if quantize_out else out_THD


def attention_decode_triton(
    q_BHD: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table_BP: Tensor,
    context_lens_B: Tensor,
    softmax_scale: float,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    quantize: bool = False,
    power_of_two: bool = False,
    tile: DecodeTile | None = None,
) -> Tensor | Quantized:
    """One query a sequence. Scales in any form of `mode_of`; `quantize` only at head size 128."""
    num_sequences, num_heads, head_size = q_BHD.shape
    num_kv_heads, page_size = k_cache.shape[1:3]
    assert num_sequences == context_lens_B.shape[0], "decode takes exactly one query a sequence"
    assert head_size in SUPPORTED_HEAD_SIZES, f"head size {head_size} is not one of {SUPPORTED_HEAD_SIZES}"
    assert q_BHD.stride(2) == k_cache.stride(3) == 1, "attention_paged: the last axis must be contiguous"
    assert not quantize or head_size == BLOCK, f"a head of {head_size} is not one block of {BLOCK}"
    tile = tile or DecodeTile.chosen(k_cache, v_cache, num_sequences * num_kv_heads)
    group = num_heads // num_kv_heads
    k_mode, v_mode = mode_of(k_scale), mode_of(v_scale)
    token_scales = [scale for scale in (k_scale, v_scale) if mode_of(scale) == "dynamic" and scale is not None]
    stride_scale = token_scales[0].stride() if token_scales else (0, 0, 0)
    tma = comes_by_tma(k_cache, v_cache)
    pages = (_rows_of_tiles(k_cache), _rows_of_tiles(v_cache)) if tma else (k_cache, v_cache)
    out_dtype = torch.uint8 if quantize else q_BHD.dtype
    out_BHD = torch.empty(q_BHD.shape, dtype=out_dtype, device=q_BHD.device)
    out_scale_HB = torch.empty(num_heads, num_sequences, device=q_BHD.device) if quantize else None
    if num_sequences > 0:
        _attention_decode_kernel[(num_kv_heads, num_sequences)](
            q_BHD, *pages, out_BHD, out_scale_HB, block_table_BP, context_lens_B, k_scale, v_scale,
            q_BHD.stride(0), q_BHD.stride(1), *k_cache.stride()[:3], *by_key(v_cache).stride(), *stride_scale,
            block_table_BP.stride(0), softmax_scale * LOG2E, HEADS=num_heads, GROUP=group, HEAD_SIZE=head_size,
            BLOCK_D=max(SMALLEST_BLOCK_D, head_size), PAGE_SIZE=page_size,
            COLUMNS=max(tile.columns, triton.next_power_of_2(group)), N=KV_TILE,
            K_MODE=MODE_NUMBER[k_mode], V_MODE=MODE_NUMBER[v_mode],
            K_OPERAND=TRITON_DTYPE[operand_dtype(k_cache.dtype, k_mode)],
            V_OPERAND=TRITON_DTYPE[operand_dtype(v_cache.dtype, v_mode)],
            TMA=tma, V_TURNED=v_cache.dtype == E4M3, QUANTIZE=quantize, POWER_OF_TWO=power_of_two,
            STAGES=tile.stages, num_warps=4,
            **({"enable_fp_fusion": False, "maxnreg": tile.registers} if q_BHD.is_cuda else {}),
        )  # fmt: skip
    if out_scale_HB is None:
        return out_BHD
    return Quantized(out_BHD.flatten(1).view(E4M3), out_scale_HB.t())


def comes_by_tma(k_cache: Tensor, v_cache: Tensor) -> bool:
    """Whether decode loads these pages through TMA descriptors: one page is one tile, and every row is addressable."""
    _, _, page_size, head_size = k_cache.shape
    fits = page_size == KV_TILE and head_size in TMA_HEAD_SIZES and k_cache.numel() // head_size < 2**31
    return fits and k_cache.is_contiguous() and v_cache.is_contiguous()


def _rows_of_tiles(cache: Tensor) -> TensorDescriptor:
    """A cache as one long matrix, loaded by blocks of one page of one head."""
    rows, columns = cache.shape[2:]
    return TensorDescriptor(cache, [cache.numel() // columns, columns], [columns, 1], [rows, columns])
