"""Attention's fused form for rollout on a GPU.

    qkv                                                    one product
    QK-norm + RoPE + quantise + write to pages -> q        one kernel
    attention over pages (+ quantise)                      one kernel
    o_proj                                                 one product

T tokens, E hidden size, H query heads, D head size.
"""

from __future__ import annotations

from torch import Tensor

from octetrl.fp8.quantize import Quantized
from octetrl.kernels.attention.attention_paged import attention_paged
from octetrl.kernels.attention.qkv_store import qkv_store
from octetrl.models.blocks.attention.as_cached import read_back, saturated_of
from octetrl.models.blocks.attention.module import Attention
from octetrl.models.blocks.block import RolloutInputs
from octetrl.models.blocks.products import Operand, project, wants_codes


def rollout(attention: Attention, x: Operand, inputs: RolloutInputs) -> Tensor:
    qkv_T = project(attention.qkv_proj, x)
    quantize, power_of_two = wants_codes(attention.o_proj)
    qkv_TXD = qkv_T.view(qkv_T.shape[0], -1, attention.head_size)
    out = attend(attention, qkv_TXD, inputs, quantize_out=quantize, power_of_two=power_of_two)
    out_TE = project(attention.o_proj, out if isinstance(out, Quantized) else out.flatten(1))
    if attention.probe is not None:
        attention.probe(attention.layer, "qkv_proj", qkv_T)
        attention.probe(attention.layer, "o_proj", out_TE)
    return out_TE


def attend(
    attention: Attention,
    qkv_TXD: Tensor,
    inputs: RolloutInputs,
    *,
    quantize_out: bool = False,
    power_of_two: bool = False,
) -> Operand:
    """Attention's output [T, H, D], or its codes, from heads of q, k and v, contiguous."""
    context = inputs.context
    cache = context.layers[attention.layer]
    k, v = cache.tensors
    q_THD = qkv_store(
        qkv_TXD,
        attention.rotation(inputs.rotary.cos_SR, inputs.rotary.sin_SR, inputs.positions_T),
        k,
        v,
        context.slot_mapping_T,
        saturated_of(cache, attention.num_kv_heads),
    )
    out = attention_paged(
        q_THD,
        k,
        v,
        context.block_table_BP,
        context.cu_seqlens_q_B1,
        context.context_lens_B,
        attention.softmax_scale,
        max_query_len=context.max_query_len,
        quantize_out=quantize_out,
        power_of_two=power_of_two,
        window=attention.window,
        draft_offset_B=context.draft_offset_B,
        sinks_H=attention.sinks,
    )
    if attention.probe is not None:
        k_TKD, v_TKD = read_back(cache, context.slot_mapping_T)
        attention.probe(attention.layer, "rotated q", q_THD)
        attention.probe(attention.layer, "k as cached", k_TKD)
        attention.probe(attention.layer, "v as cached", v_TKD)
        attention.probe(attention.layer, "attention out", out)
    return out
