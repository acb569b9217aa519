"""Compute attention's operands from the fused QKV output of a training forward: QK-norm, RoPE, KV replay in one kernel.

    q = rope(rms_norm(q));  k = rope(rms_norm(k))        kernels/rows/rms_norm.py (if the model has QK-norm), rope.py
    k, v through the quantiser of the rollout's cache    kernels/attention/kv_store.py, `kv_replay`
    amax_2K = max(amax_2K, max|k|, max|v|)               of each head, before quantisation: for the next step's scales

The bits equal those of these calls one after the other. The trainer's operands therefore equal the rollout's, whose
kernel is `qkv_store`. RoPE pairs element r with r + D/2. A tile is loaded as two halves [rows, D/2], and a thread holds
eight neighbouring elements of each. A pair is then in one thread, and nothing is read twice or exchanged. The order of
sums is that of `rms_norm`'s kernel: it holds a row as [D] with eight neighbouring elements a lane, adds these eight,
then lanes in pairs, those D/2 elements apart first. Here the eight of each half are added, then the two halves, then
lanes in pairs. This is the same tree; its first exchange needs no shuffle.

A row is one head of one token. A tile takes a block of heads of as many tokens as fit. Rows are independent, except for
the amax, which is first taken over the tokens of a tile. It is a maximum of bit patterns, in which NaN is above
infinity (`quantize_activation`). The order of the maxima and of the atomics therefore does not matter, and a NaN is
kept. A tile reads the cell first and skips the atomic if the cell is large enough, so after the first wave atomics are
rare. A negative NaN in the cell (possible from a CPU, not from these kernels) would be below any amax.

For each D elements of a head, 2 D bytes are read and 2 D written; for V only if it is quantised or observed. A V
that is not quantised stays a view of the QKV output. Not differentiable: `qkv_rotate_backward` is the backward.

T tokens, H query heads, K kv heads, X = H + 2K, D head size, R = D/2 planes, J rows of a tile, B heads of a tile.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from octetrl.fp8.format import E4M3
from octetrl.kernels.attention.attention_order import MODE_NUMBER, operand_dtype
from octetrl.kernels.attention.kv_codes import int8_code, int8_scale
from octetrl.kernels.attention.kv_store import ReplayedKV, kv_replay_reference
from octetrl.kernels.attention.qkv_separate import check_angles, check_norms, is_fused, qkv_rotate_separate, rotated
from octetrl.kernels.attention.qkv_store import _normed
from octetrl.kernels.attention.records import Replay, Rotation
from octetrl.kernels.quantize.quantize_activation import block_scale, held_inverse, magnitude_bits
from octetrl.kernels.rows.rms_norm import rms_norm_reference
from octetrl.kernels.rows.rope import rope_reference
from octetrl.shapes.blocks import SCALE_PER_TOKEN, KVMode
from octetrl.shapes.sizes import SUPPORTED_HEAD_SIZES

WARPS = 4
ROW_ELEMENTS = 16  # of a row in one thread: eight of each half


@triton.jit
def head_rows(tile, num_tokens, HEADS: tl.constexpr, HEAD_BLOCK: tl.constexpr, J: tl.constexpr):
    """Tokens (int64) and heads of a tile's rows, and which rows exist. The order is blocks of heads, then tokens."""
    HEAD_TILES: tl.constexpr = (HEADS + HEAD_BLOCK - 1) // HEAD_BLOCK
    row_J = tl.arange(0, J)
    token_J = (tile // HEAD_TILES * (J // HEAD_BLOCK) + row_J // HEAD_BLOCK).to(tl.int64)
    head_J = tile % HEAD_TILES * HEAD_BLOCK + row_J % HEAD_BLOCK
    return token_J, head_J, (token_J < num_tokens) & (head_J < HEADS)


@triton.jit
def load_halves(ptr, start_J, inside_J, J: tl.constexpr, PLANES: tl.constexpr):
    """Both halves of rows, float32; zero for a row that does not exist."""
    offset_JR = start_J[:, None] + tl.arange(0, PLANES)[None, :]
    first_JR = tl.load(ptr + offset_JR, mask=inside_J[:, None], other=0.0).to(tl.float32)
    second_JR = tl.load(ptr + offset_JR + PLANES, mask=inside_J[:, None], other=0.0).to(tl.float32)
    return first_JR, second_JR


@triton.jit
def _store_halves(ptr, first_JR, second_JR, start_J, inside_J, PLANES: tl.constexpr):
    target_JR = ptr + start_J[:, None] + tl.arange(0, PLANES)[None, :]
    tl.store(target_JR, first_JR.to(ptr.dtype.element_ty), mask=inside_J[:, None])
    tl.store(target_JR + PLANES, second_JR.to(ptr.dtype.element_ty), mask=inside_J[:, None])


@triton.jit
def _row_sum(first_JR, second_JR, J: tl.constexpr, PLANES: tl.constexpr):
    """The sum of both halves, in the order in which `rms_norm` adds a whole row."""
    first_JL = tl.sum(tl.reshape(first_JR, (J, PLANES // 8, 8)), 2)
    second_JL = tl.sum(tl.reshape(second_JR, (J, PLANES // 8, 8)), 2)
    return tl.sum(first_JL + second_JL, 1)


@triton.jit
def load_weight(ptr, J: tl.constexpr, PLANES: tl.constexpr):
    """A norm's weight for each row of a tile, from L1. A single copy would have to go through shared memory."""
    column_JR = tl.zeros((J, PLANES), tl.int32) + tl.arange(0, PLANES)[None, :]
    return tl.load(ptr + column_JR).to(tl.float32), tl.load(ptr + column_JR + PLANES).to(tl.float32)


@triton.jit
def _rotated_halves(
    qkv_ptr, start_J, weight_ptr, cos_ptr, sin_ptr, token_J, inside_J, eps,
    J: tl.constexpr, PLANES: tl.constexpr, NORM: tl.constexpr,
):  # fmt: skip
    """Rows after QK-norm and RoPE, in qkv's dtype."""
    dtype: tl.constexpr = qkv_ptr.dtype.element_ty
    first_JR, second_JR = load_halves(qkv_ptr, start_J, inside_J, J, PLANES)
    angle_JR = token_J[:, None] * PLANES + tl.arange(0, PLANES)[None, :]
    cos_JR = tl.load(cos_ptr + angle_JR, mask=inside_J[:, None], other=0.0)
    sin_JR = tl.load(sin_ptr + angle_JR, mask=inside_J[:, None], other=0.0)
    if NORM:
        first_weight_JR, second_weight_JR = load_weight(weight_ptr, J, PLANES)
        squares_J = _row_sum(first_JR * first_JR, second_JR * second_JR, J, PLANES)
        rstd_J = tl.rsqrt(squares_J * (1.0 / (2 * PLANES)) + eps)
        weight_dtype: tl.constexpr = weight_ptr.dtype.element_ty
        first_JR = _normed(first_JR, first_weight_JR, rstd_J, dtype, weight_dtype)
        second_JR = _normed(second_JR, second_weight_JR, rstd_J, dtype, weight_dtype)
    rotated_JR = (first_JR * cos_JR - second_JR * sin_JR).to(dtype)
    return rotated_JR, (second_JR * cos_JR + first_JR * sin_JR).to(dtype)


@triton.jit
def _amax_bits(first_JR, second_JR):
    return tl.max(tl.maximum(magnitude_bits(first_JR), magnitude_bits(second_JR)), 1)


@triton.jit
def _raise_amax(bits_J, amax_ptr, first_head, HEADS: tl.constexpr, HEAD_BLOCK: tl.constexpr, J: tl.constexpr):
    bits_B = tl.max(tl.reshape(bits_J, (J // HEAD_BLOCK, HEAD_BLOCK)), 0)
    head_B = first_head + tl.arange(0, HEAD_BLOCK)
    seen_B = tl.load(amax_ptr + head_B, mask=head_B < HEADS, other=0, cache_modifier=".cg")  # L1 may be out of date
    tl.atomic_max(amax_ptr + head_B, bits_B, mask=(head_B < HEADS) & (bits_B > seen_B), sem="relaxed")


@triton.jit
def _observe_and_replay(
    first_JR, second_JR, out_ptr, scale_ptr, amax_ptr, tile, token_J, head_J, inside_J,
    HEADS: tl.constexpr, HEAD_BLOCK: tl.constexpr, J: tl.constexpr, PLANES: tl.constexpr, MODE: tl.constexpr,
    OBSERVE: tl.constexpr, STORE: tl.constexpr,
):  # fmt: skip
    """K's or V's rows: updates their amax and writes attention's operand, by the rule of `kv_replay`."""
    if OBSERVE:
        HEAD_TILES: tl.constexpr = (HEADS + HEAD_BLOCK - 1) // HEAD_BLOCK
        bits_J = _amax_bits(first_JR.to(tl.float32), second_JR.to(tl.float32))
        _raise_amax(bits_J, amax_ptr, tile % HEAD_TILES * HEAD_BLOCK, HEADS, HEAD_BLOCK, J)
    if MODE != 0:
        first_JR, second_JR = first_JR.to(tl.bfloat16).to(tl.float32), second_JR.to(tl.bfloat16).to(tl.float32)
        if MODE == 1:
            inverse_J = held_inverse(tl.load(scale_ptr + head_J, mask=inside_J, other=1.0))
        else:
            bits_J = _amax_bits(first_JR, second_JR)
            scale_J, inverse_J = int8_scale(bits_J) if MODE == 3 else block_scale(bits_J, False)
            tl.store(scale_ptr + token_J * HEADS + head_J, scale_J, mask=inside_J)
        first_JR, second_JR = first_JR * inverse_J[:, None], second_JR * inverse_J[:, None]
        if MODE == 3:
            first_JR, second_JR = int8_code(first_JR), int8_code(second_JR)
        else:
            first_JR = tl.clamp(first_JR, -448.0, 448.0, propagate_nan=tl.PropagateNan.ALL).to(tl.float8e4nv)
            second_JR = tl.clamp(second_JR, -448.0, 448.0, propagate_nan=tl.PropagateNan.ALL).to(tl.float8e4nv)
    if STORE:
        start_J = (token_J * HEADS + head_J) * (2 * PLANES)
        _store_halves(out_ptr, first_JR, second_JR, start_J, inside_J, PLANES)


@triton.jit(do_not_specialize=["num_tokens", "q_tiles", "kv_tiles"])
def _qkv_rotate_kernel(
    qkv_ptr, q_weight_ptr, k_weight_ptr, cos_ptr, sin_ptr, q_ptr, k_ptr, v_ptr, k_scale_ptr, v_scale_ptr,
    k_amax_ptr, v_amax_ptr, num_tokens, q_tiles, kv_tiles, eps, stride_token,
    NUM_HEADS: tl.constexpr, KV_HEADS: tl.constexpr, SIZE: tl.constexpr, Q_BLOCK: tl.constexpr,
    KV_BLOCK: tl.constexpr, J: tl.constexpr, NORM: tl.constexpr, K_MODE: tl.constexpr, V_MODE: tl.constexpr,
    OBSERVE: tl.constexpr,
):  # fmt: skip
    PLANES: tl.constexpr = SIZE // 2
    program = tl.program_id(0)
    if program < q_tiles:
        token_J, head_J, inside_J = head_rows(program, num_tokens, NUM_HEADS, Q_BLOCK, J)
        first_q_JR, second_q_JR = _rotated_halves(
            qkv_ptr, token_J * stride_token + head_J * SIZE, q_weight_ptr, cos_ptr, sin_ptr, token_J, inside_J, eps,
            J, PLANES, NORM,
        )  # fmt: skip
        q_J = (token_J * NUM_HEADS + head_J) * SIZE
        _store_halves(q_ptr, first_q_JR, second_q_JR, q_J, inside_J, PLANES)
    elif program < q_tiles + kv_tiles:
        tile = program - q_tiles
        token_J, head_J, inside_J = head_rows(tile, num_tokens, KV_HEADS, KV_BLOCK, J)
        k_J = token_J * stride_token + (NUM_HEADS + head_J) * SIZE
        first_k_JR, second_k_JR = _rotated_halves(
            qkv_ptr, k_J, k_weight_ptr, cos_ptr, sin_ptr, token_J, inside_J, eps, J, PLANES, NORM
        )
        _observe_and_replay(
            first_k_JR, second_k_JR, k_ptr, k_scale_ptr, k_amax_ptr, tile, token_J, head_J, inside_J,
            KV_HEADS, KV_BLOCK, J, PLANES, K_MODE, OBSERVE, True,
        )  # fmt: skip
    else:
        tile = program - q_tiles - kv_tiles
        token_J, head_J, inside_J = head_rows(tile, num_tokens, KV_HEADS, KV_BLOCK, J)
        v_J = token_J * stride_token + (NUM_HEADS + KV_HEADS + head_J) * SIZE
        first_v_JR, second_v_JR = load_halves(qkv_ptr, v_J, inside_J, J, PLANES)
        _observe_and_replay(
            first_v_JR, second_v_JR, v_ptr, v_scale_ptr, v_amax_ptr, tile, token_J, head_J, inside_J,
            KV_HEADS, KV_BLOCK, J, PLANES, V_MODE, OBSERVE, V_MODE != 0,
        )  # fmt: skip


def tile_of(head_size: int, warps: int) -> int:
    """Number of rows of a tile in which a thread has eight elements of each half."""
    assert head_size in SUPPORTED_HEAD_SIZES and is_fused(head_size), f"head size {head_size} is not a power of two"
    return warps * 32 * ROW_ELEMENTS // head_size


def head_tiles(num_tokens: int, num_heads: int, rows: int) -> tuple[int, int]:
    """(heads of a tile, number of tiles) for `num_tokens` tokens."""
    block = min(triton.next_power_of_2(num_heads), rows)
    return block, triton.cdiv(num_tokens, rows // block) * triton.cdiv(num_heads, block)


def qkv_rotate_triton(
    qkv_TXD: Tensor, rotation: Rotation, num_kv_heads: int, replay: Replay, amax_2K: Tensor | None
) -> tuple[Tensor, ReplayedKV]:
    """The kernel's launcher."""
    (num_tokens, _, size), num_heads = qkv_TXD.shape, qkv_TXD.shape[1] - 2 * num_kv_heads
    q_norm_D, k_norm_D, eps, cos_TR, sin_TR, _ = rotation
    assert qkv_TXD.stride()[1:] == (size, 1), f"qkv_rotate: heads lie {qkv_TXD.stride()} apart"
    assert cos_TR.is_contiguous() and sin_TR.is_contiguous(), "qkv_rotate: cos and sin must be contiguous"
    k_mode, v_mode = replay.k_mode, replay.v_mode

    def output(heads: int, mode: KVMode, scale_K: Tensor | None) -> tuple[Tensor, Tensor | None]:
        dtype = qkv_TXD.dtype if mode == "none" else operand_dtype(E4M3, mode)
        out = torch.empty(num_tokens, heads, size, dtype=dtype, device=qkv_TXD.device)
        by_token = mode in SCALE_PER_TOKEN
        return out, torch.empty(num_tokens, heads, device=qkv_TXD.device) if by_token else scale_K

    q_THD, _ = output(num_heads, "none", None)
    k_TKD, k_scale = output(num_kv_heads, k_mode, replay.k_scale_K if k_mode != "none" else None)
    v_TKD, v_scale = qkv_TXD[:, num_heads + num_kv_heads :], None
    if v_mode != "none":
        v_TKD, v_scale = output(num_kv_heads, v_mode, replay.v_scale_K)
    rows = tile_of(size, WARPS)
    (q_block, q_tiles), (kv_block, kv_tiles) = (head_tiles(num_tokens, n, rows) for n in (num_heads, num_kv_heads))
    v_tiles = 0 if v_mode == "none" and amax_2K is None else kv_tiles
    amax = None if amax_2K is None else amax_2K.view(torch.int32)
    if num_tokens:
        _qkv_rotate_kernel[(q_tiles + kv_tiles + v_tiles,)](
            qkv_TXD, q_norm_D, k_norm_D, cos_TR, sin_TR, q_THD, k_TKD, v_TKD, k_scale, v_scale,
            None if amax is None else amax[0], None if amax is None else amax[1],
            num_tokens, q_tiles, kv_tiles, eps, qkv_TXD.stride(0),
            NUM_HEADS=num_heads, KV_HEADS=num_kv_heads, SIZE=size, Q_BLOCK=q_block, KV_BLOCK=kv_block, J=rows,
            NORM=q_norm_D is not None, K_MODE=MODE_NUMBER[k_mode], V_MODE=MODE_NUMBER[v_mode],
            OBSERVE=amax is not None, num_warps=WARPS, **({"enable_fp_fusion": False} if qkv_TXD.is_cuda else {}),
        )  # fmt: skip
    return q_THD, ReplayedKV(k_TKD, v_TKD, k_scale, v_scale)


def qkv_rotate_reference(
    qkv_TXD: Tensor, rotation: Rotation, num_kv_heads: int, replay: Replay, amax_2K: Tensor | None
) -> tuple[Tensor, ReplayedKV]:
    """The same in plain torch, from the references of its parts."""
    q_THD, k_TKD, v_TKD = rotated(qkv_TXD, rotation, num_kv_heads, rms_norm_reference, rope_reference)
    if amax_2K is not None and qkv_TXD.shape[0]:
        for amax_K, x_TKD in zip(amax_2K, (k_TKD, v_TKD), strict=True):
            torch.maximum(amax_K, x_TKD.abs().amax((0, 2)).float(), out=amax_K)
    if replay.mode == "none":
        return q_THD, ReplayedKV(k_TKD, v_TKD, None, None)
    return q_THD, kv_replay_reference(k_TKD, v_TKD, replay)


def qkv_rotate(
    qkv_TXD: Tensor,
    rotation: Rotation,
    num_kv_heads: int,
    replay: Replay,
    amax_2K: Tensor | None = None,
) -> tuple[Tensor, ReplayedKV]:
    """The rotated q [T, H, D], contiguous, and K and V as `kv_replay` returns them.

    qkv_TXD: the projection's output, q's heads first, contiguous except for the stride of a token. `rotation` has one
    row of angles per token. ValueError if `replay` lacks scales. amax_2K: float32, raised in place; it may start at any
    value below 0. A V that is not quantised is returned as a view of qkv_TXD.
    """
    num_tokens, heads, size = qkv_TXD.shape
    assert heads > 2 * num_kv_heads, f"qkv_rotate: {heads} heads with {num_kv_heads} of keys and as many of values"
    check_norms(rotation)
    check_angles(rotation, num_tokens, size)
    assert amax_2K is None or (amax_2K.shape == (2, num_kv_heads) and amax_2K.stride(1) == 1), "qkv_rotate: amax"
    on_gpu = qkv_rotate_triton if is_fused(size, rotation.planes) else qkv_rotate_separate
    rotate = on_gpu if qkv_TXD.is_cuda else qkv_rotate_reference
    return rotate(qkv_TXD, rotation, num_kv_heads, replay.checked(), amax_2K)
