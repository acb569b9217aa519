"""The backward of `attention_packed` on a GPU: three kernels, no atomics, so a gradient's bits repeat.

    delta    sum over D of dO * O                                one program per token
    dK, dV   one program per block of keys and kv head; goes through the query heads of its group and their queries
    dQ       one program per block of queries and query head; goes through the keys

P is recomputed from the forward's lse2 with the forward's scales. All operands are BF16: codes are exact in it, and
its range holds small gradients that float16 would flush. Scales enter where the forward used them: the K scale on the
scores and on dQ, the V scale on dP; dK and dV are gradients of the dequantised values, which pass straight through.

Each sequence is walked in blocks from its own first token. Two GEMMs are done twice (S and dP, once a kernel); a fused
kernel would save them but needs atomics on dQ.

I query rows, J keys of a block, T tokens, H query heads, K kv heads, D head size.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from octetrl.kernels.attention_order import LOG2E, MODE_NUMBER, SUPPORTED_HEAD_SIZES, mode_of
from octetrl.kernels.kv_store import ReplayedKV


@triton.jit
def _delta_kernel(
    dout_ptr, out_ptr, delta_ptr, stride_dout_token, stride_dout_head,
    HEADS: tl.constexpr, BLOCK_H: tl.constexpr, HEAD_SIZE: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    head_H = tl.arange(0, BLOCK_H)
    d_D = tl.arange(0, BLOCK_D)
    mask_HD = (head_H < HEADS)[:, None] & (d_D < HEAD_SIZE)[None, :]
    dout_offset_HD = token * stride_dout_token + head_H[:, None] * stride_dout_head + d_D[None, :]
    out_offset_HD = (token * HEADS + head_H[:, None]) * HEAD_SIZE + d_D[None, :]
    dout_HD = tl.load(dout_ptr + dout_offset_HD, mask=mask_HD, other=0.0).to(tl.float32)
    out_HD = tl.load(out_ptr + out_offset_HD, mask=mask_HD, other=0.0).to(tl.float32)
    tl.store(delta_ptr + token * HEADS + head_H, tl.sum(dout_HD * out_HD, 1), mask=head_H < HEADS)


@triton.jit
def _load_block(ptr, token, stride_token, num_rows, ROWS: tl.constexpr, HEAD_SIZE: tl.constexpr, BLOCK_D: tl.constexpr):
    """`ROWS` tokens from `token` (int64) of the head at `ptr`; zeros past `num_rows` and past the head's end."""
    row = tl.arange(0, ROWS)
    d_D = tl.arange(0, BLOCK_D)
    mask = (row < num_rows)[:, None] & (d_D < HEAD_SIZE)[None, :]
    return tl.load(ptr + token * stride_token + (row[:, None] * stride_token + d_D[None, :]), mask=mask, other=0.0)


@triton.jit
def _dkdv_kernel(
    q_ptr, k_ptr, v_ptr, dout_ptr, lse2_ptr, delta_ptr, dk_ptr, dv_ptr, cu_seqlens_ptr, k_scale_ptr, v_scale_ptr,
    stride_q_token, stride_q_head, stride_k_token, stride_k_head, stride_v_token, stride_v_head,
    stride_dout_token, stride_dout_head, base_scale, softmax_scale,
    HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_SIZE: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_I: tl.constexpr,
    BLOCK_J: tl.constexpr, K_MODE: tl.constexpr, V_MODE: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0)  # the first keys have the most queries: longest first
    kv_head = tl.program_id(1)
    sequence = tl.program_id(2)
    first_token = tl.load(cu_seqlens_ptr + sequence).to(tl.int64)
    length = (tl.load(cu_seqlens_ptr + sequence + 1) - first_token).to(tl.int32)
    if block * BLOCK_J < length:
        KV_HEADS: tl.constexpr = HEADS // GROUP
        key_J = block * BLOCK_J + tl.arange(0, BLOCK_J)
        k_JD = _load_block(
            k_ptr + kv_head * stride_k_head,
            first_token + block * BLOCK_J,
            stride_k_token,
            length - block * BLOCK_J,
            BLOCK_J,
            HEAD_SIZE,
            BLOCK_D,
        )
        v_JD = _load_block(
            v_ptr + kv_head * stride_v_head,
            first_token + block * BLOCK_J,
            stride_v_token,
            length - block * BLOCK_J,
            BLOCK_J,
            HEAD_SIZE,
            BLOCK_D,
        )
        k_column_J = tl.full([BLOCK_J], base_scale, tl.float32)
        v_column_J = tl.full([BLOCK_J], 1.0, tl.float32)
        scale_J = (first_token + key_J) * KV_HEADS + kv_head
        if K_MODE == 1:
            k_column_J = k_column_J * tl.load(k_scale_ptr + kv_head)
        if V_MODE == 1:
            v_column_J = v_column_J * tl.load(v_scale_ptr + kv_head)
        if K_MODE == 2:
            k_column_J = tl.load(k_scale_ptr + scale_J, mask=key_J < length, other=0.0) * k_column_J
        if V_MODE == 2:
            v_column_J = tl.load(v_scale_ptr + scale_J, mask=key_J < length, other=0.0)
        dk_JD = tl.zeros([BLOCK_J, BLOCK_D], tl.float32)
        dv_JD = tl.zeros([BLOCK_J, BLOCK_D], tl.float32)
        for member in range(GROUP):
            head = kv_head * GROUP + member
            for start in tl.range(block * BLOCK_J // BLOCK_I * BLOCK_I, length, BLOCK_I, num_stages=STAGES):
                query_I = start + tl.arange(0, BLOCK_I)
                q_ID = _load_block(
                    q_ptr + head * stride_q_head,
                    first_token + start,
                    stride_q_token,
                    length - start,
                    BLOCK_I,
                    HEAD_SIZE,
                    BLOCK_D,
                )
                dout_ID = _load_block(
                    dout_ptr + head * stride_dout_head,
                    first_token + start,
                    stride_dout_token,
                    length - start,
                    BLOCK_I,
                    HEAD_SIZE,
                    BLOCK_D,
                )
                row_I = (first_token + query_I) * HEADS + head
                lse2_I = tl.load(lse2_ptr + row_I, mask=query_I < length, other=0.0)
                delta_I = tl.load(delta_ptr + row_I, mask=query_I < length, other=0.0)
                seen_JI = (query_I[None, :] >= key_J[:, None]) & (query_I < length)[None, :]
                s_JI = tl.dot(k_JD, tl.trans(q_ID)) * k_column_J[:, None]
                p_JI = tl.exp2(tl.where(seen_JI, s_JI - lse2_I[None, :], float("-inf")))
                dv_JD = tl.dot(p_JI.to(tl.bfloat16), dout_ID, dv_JD)
                dp_JI = tl.dot(v_JD, tl.trans(dout_ID)) * v_column_J[:, None]
                ds_JI = p_JI * (dp_JI - delta_I[None, :])
                dk_JD = tl.dot(ds_JI.to(tl.bfloat16), q_ID, dk_JD)
        d_D = tl.arange(0, BLOCK_D)
        offset_JD = ((first_token + key_J) * KV_HEADS + kv_head)[:, None] * HEAD_SIZE + d_D[None, :]
        mask_JD = (key_J < length)[:, None] & (d_D < HEAD_SIZE)[None, :]
        tl.store(dk_ptr + offset_JD, (dk_JD * softmax_scale).to(tl.bfloat16), mask=mask_JD)
        tl.store(dv_ptr + offset_JD, dv_JD.to(tl.bfloat16), mask=mask_JD)


@triton.jit
def _dq_kernel(
    q_ptr, k_ptr, v_ptr, dout_ptr, lse2_ptr, delta_ptr, dq_ptr, cu_seqlens_ptr, k_scale_ptr, v_scale_ptr,
    stride_q_token, stride_q_head, stride_k_token, stride_k_head, stride_v_token, stride_v_head,
    stride_dout_token, stride_dout_head, base_scale, softmax_scale,
    HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_SIZE: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_I: tl.constexpr,
    BLOCK_J: tl.constexpr, K_MODE: tl.constexpr, V_MODE: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    block = tl.num_programs(0) - 1 - tl.program_id(0)
    head = tl.program_id(1)
    sequence = tl.program_id(2)
    kv_head = head // GROUP
    first_token = tl.load(cu_seqlens_ptr + sequence).to(tl.int64)
    length = (tl.load(cu_seqlens_ptr + sequence + 1) - first_token).to(tl.int32)
    if block * BLOCK_I < length:
        KV_HEADS: tl.constexpr = HEADS // GROUP
        query_I = block * BLOCK_I + tl.arange(0, BLOCK_I)
        q_ID = _load_block(
            q_ptr + head * stride_q_head,
            first_token + block * BLOCK_I,
            stride_q_token,
            length - block * BLOCK_I,
            BLOCK_I,
            HEAD_SIZE,
            BLOCK_D,
        )
        dout_ID = _load_block(
            dout_ptr + head * stride_dout_head,
            first_token + block * BLOCK_I,
            stride_dout_token,
            length - block * BLOCK_I,
            BLOCK_I,
            HEAD_SIZE,
            BLOCK_D,
        )
        row_I = (first_token + query_I) * HEADS + head
        lse2_I = tl.load(lse2_ptr + row_I, mask=query_I < length, other=0.0)
        delta_I = tl.load(delta_ptr + row_I, mask=query_I < length, other=0.0)
        score_scale = base_scale
        v_scale = 1.0
        dq_scale = softmax_scale
        if K_MODE == 1:
            score_scale = base_scale * tl.load(k_scale_ptr + kv_head)
            dq_scale = softmax_scale * tl.load(k_scale_ptr + kv_head)
        if V_MODE == 1:
            v_scale = tl.load(v_scale_ptr + kv_head)
        dq_ID = tl.zeros([BLOCK_I, BLOCK_D], tl.float32)
        for start in tl.range(0, tl.minimum(length, (block + 1) * BLOCK_I), BLOCK_J, num_stages=STAGES):
            key_J = start + tl.arange(0, BLOCK_J)
            k_JD = _load_block(
                k_ptr + kv_head * stride_k_head,
                first_token + start,
                stride_k_token,
                length - start,
                BLOCK_J,
                HEAD_SIZE,
                BLOCK_D,
            )
            v_JD = _load_block(
                v_ptr + kv_head * stride_v_head,
                first_token + start,
                stride_v_token,
                length - start,
                BLOCK_J,
                HEAD_SIZE,
                BLOCK_D,
            )
            s_IJ = tl.dot(q_ID, tl.trans(k_JD))
            dp_IJ = tl.dot(dout_ID, tl.trans(v_JD))
            scale_J = (first_token + key_J) * KV_HEADS + kv_head
            if K_MODE == 2:
                k_scale_J = tl.load(k_scale_ptr + scale_J, mask=key_J < length, other=0.0)
                s_IJ = s_IJ * (k_scale_J * score_scale)[None, :]
            else:
                s_IJ = s_IJ * score_scale
            if V_MODE == 2:
                v_scale_J = tl.load(v_scale_ptr + scale_J, mask=key_J < length, other=0.0)
                dp_IJ = dp_IJ * v_scale_J[None, :]
            else:
                dp_IJ = dp_IJ * v_scale
            seen_IJ = query_I[:, None] >= key_J[None, :]
            p_IJ = tl.exp2(tl.where(seen_IJ, s_IJ - lse2_I[:, None], float("-inf")))
            ds_IJ = p_IJ * (dp_IJ - delta_I[:, None])
            if K_MODE == 2:
                ds_IJ = ds_IJ * k_scale_J[None, :]
            dq_ID = tl.dot(ds_IJ.to(tl.bfloat16), k_JD, dq_ID)
        d_D = tl.arange(0, BLOCK_D)
        mask_ID = (query_I < length)[:, None] & (d_D < HEAD_SIZE)[None, :]
        tl.store(dq_ptr + row_I[:, None] * HEAD_SIZE + d_D[None, :], (dq_ID * dq_scale).to(tl.bfloat16), mask=mask_ID)


def attention_packed_backward_triton(
    dout_THD: Tensor,
    q_THD: Tensor,
    kv: ReplayedKV,
    out_THD: Tensor,
    lse2_TH: Tensor,
    cu_seqlens_B1: Tensor,
    max_seqlen: int,
    softmax_scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """dQ [T, H, D], dK and dV [T, K, D] in BF16; zero where no sequence lies."""
    num_tokens, num_heads, head_size = q_THD.shape
    num_kv_heads = kv.k_TKD.shape[1]
    assert q_THD.dtype == torch.bfloat16, f"the attention backward takes BF16, not {q_THD.dtype}"
    assert head_size in SUPPORTED_HEAD_SIZES, f"head size {head_size} is not one of {SUPPORTED_HEAD_SIZES}"
    k_TKD, v_TKD = kv.k_TKD.to(torch.bfloat16), kv.v_TKD.to(torch.bfloat16)
    dout_THD = dout_THD if dout_THD.stride(2) == 1 else dout_THD.contiguous()
    device = q_THD.device
    dq_THD = torch.zeros(q_THD.shape, dtype=torch.bfloat16, device=device)
    dk_TKD, dv_TKD = (torch.zeros(k_TKD.shape, dtype=torch.bfloat16, device=device) for _ in range(2))
    delta_TH = torch.empty(num_tokens, num_heads, dtype=torch.float32, device=device)
    num_sequences = cu_seqlens_B1.shape[0] - 1
    if num_tokens == 0 or num_sequences == 0:
        return dq_THD, dk_TKD, dv_TKD
    block_d = max(32, triton.next_power_of_2(head_size))
    _delta_kernel[(num_tokens,)](
        dout_THD, out_THD, delta_TH, dout_THD.stride(0), dout_THD.stride(1), HEADS=num_heads,
        BLOCK_H=triton.next_power_of_2(num_heads), HEAD_SIZE=head_size, BLOCK_D=block_d, num_warps=4,
    )  # fmt: skip
    inputs = (q_THD, k_TKD, v_TKD, dout_THD, lse2_TH, delta_TH)
    strides = [stride for x in (q_THD, k_TKD, v_TKD, dout_THD) for stride in x.stride()[:2]]
    scales = (softmax_scale * LOG2E, softmax_scale)
    shape = {
        "HEADS": num_heads,
        "GROUP": num_heads // num_kv_heads,
        "HEAD_SIZE": head_size,
        "BLOCK_D": block_d,
        "K_MODE": MODE_NUMBER[mode_of(kv.k_scale)],
        "V_MODE": MODE_NUMBER[mode_of(kv.v_scale)],
    }
    wide = head_size == 256
    queries, keys, stages = (32, 64, 1) if wide else (32, 128, 2)
    _dkdv_kernel[(triton.cdiv(max_seqlen, keys), num_kv_heads, num_sequences)](
        *inputs, dk_TKD, dv_TKD, cu_seqlens_B1, kv.k_scale, kv.v_scale, *strides, *scales,
        **shape, BLOCK_I=queries, BLOCK_J=keys, STAGES=stages, num_warps=8,
    )  # fmt: skip
    queries, keys, stages = (64, 32, 1) if wide else (128, 64, 2)
    _dq_kernel[(triton.cdiv(max_seqlen, queries), num_heads, num_sequences)](
        *inputs, dq_THD, cu_seqlens_B1, kv.k_scale, kv.v_scale, *strides, *scales,
        **shape, BLOCK_I=queries, BLOCK_J=keys, STAGES=stages, num_warps=8,
    )  # fmt: skip
    return dq_THD, dk_TKD, dv_TKD
