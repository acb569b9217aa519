"""The decoder as a GPU runs it for rollout: the layers of `models/decoder.py`, fused where memory is what costs.

    add + RMSNorm (+ quantise)                 -> qkv
    QK-norm + RoPE + quantise + write to pages -> q
    attention over pages (+ quantise)          -> o_proj
    add + RMSNorm (+ quantise)                 -> gate_up
    SiLU * up (+ quantise)                     -> down

Each fused kernel gives the bits of the ops it replaces, so this is `Decoder.forward` to the bit (tests/gpu), without
gradients and without its modules' separate passes over memory. Where a linear has an adapter, its input is made in BF16
and quantised by itself: the branch reads it too (layers/lora.py). Nothing here reads the host: it is captured whole.

T tokens, E hidden size, D head size.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from octetrl.fp8.quantize import Quantized
from octetrl.kernels.attention.attention_paged import attention_paged
from octetrl.kernels.attention.qkv_store import qkv_store
from octetrl.kernels.gemm.bf16_gemm import bf16_gemm
from octetrl.kernels.gemm.fp8_gemm import fp8_gemm
from octetrl.kernels.quantize.quantize_activation import quantize_activation
from octetrl.kernels.rows.add_rms_norm import add_rms_norm
from octetrl.kernels.rows.silu_mul import silu_mul
from octetrl.kernels.rows.silu_mul_quantize import silu_mul_quantize
from octetrl.layers.context import PagedContext
from octetrl.layers.linear import Float8Linear, Projection
from octetrl.layers.lora import add_branch, lora_down
from octetrl.layers.norm import RMSNorm
from octetrl.layers.rotary import RotaryTable
from octetrl.models.blocks.attention.module import Attention
from octetrl.models.blocks.mlp.module import MLP
from octetrl.models.decoder import Decoder


def can_fuse(model: Decoder) -> bool:
    """Whether the kernels here know this model, on a GPU: in BF16, its FP8 linears not emulated."""
    if model.dtype != torch.bfloat16:
        return False
    return all(linear.backend == "scaled_mm" for _, linear in model.float8_linears())


@torch.no_grad()
def rollout_forward(model: Decoder, token_ids_T: Tensor, positions_T: Tensor, context: PagedContext) -> Tensor:
    """Hidden states [T, E] after the final norm. token_ids_T and positions_T: int64."""
    hidden_TE = model.embedding(token_ids_T)
    delta_TE = None
    for layer in model.decoder_layers():
        hidden_TE, x = _add_norm(delta_TE, hidden_TE, layer.attention_norm, layer.attention.qkv_proj)
        delta_TE = _attend(layer.attention, x, model.rotary, positions_T, context)
        hidden_TE, x = _add_norm(delta_TE, hidden_TE, layer.mlp_norm, layer.mlp.gate_up_proj)
        delta_TE = _mlp(layer.mlp, x)
    _, normed = _add_norm(delta_TE, hidden_TE, model.norm, None)
    assert isinstance(normed, Tensor)
    return normed


Operand = Tensor | Quantized


def _add_norm(
    delta_TE: Tensor | None, hidden_TE: Tensor, norm: RMSNorm, eater: Projection | None
) -> tuple[Tensor, Operand]:
    """The residual stream with `delta` added, and its norm as `eater` wants it."""
    quantize, power_of_two = _wants(eater)
    return add_rms_norm(delta_TE, hidden_TE, norm.weight, norm.eps, quantize=quantize, power_of_two=power_of_two)


def _attend(
    attention: Attention, x: Operand, rotary: RotaryTable, positions_T: Tensor, context: PagedContext
) -> Tensor:
    cache = context.layers[attention.layer]
    q_norm, k_norm = attention.q_norm, attention.k_norm
    qkv_T = _project(attention.qkv_proj, x)
    q_THD = qkv_store(
        qkv_T.view(qkv_T.shape[0], -1, attention.head_size),
        None if q_norm is None else q_norm.weight,
        None if k_norm is None else k_norm.weight,
        0.0 if q_norm is None else q_norm.eps,
        rotary.cos_SR,
        rotary.sin_SR,
        positions_T,
        cache.k,
        cache.v,
        context.slot_mapping_T,
        k_scale_K=cache.k_scale_K,
        v_scale_K=cache.v_scale_K,
        k_token_scale=cache.k_token_scale,
        v_token_scale=cache.v_token_scale,
        saturated_2K=cache.saturated_2K,
    )
    quantize_out, power_of_two = _wants(attention.o_proj)
    out = attention_paged(
        q_THD,
        cache.k,
        cache.v,
        context.block_table_BP,
        context.cu_seqlens_q_B1,
        context.context_lens_B,
        attention.softmax_scale,
        k_scale_K=cache.k_scale_K,
        v_scale_K=cache.v_scale_K,
        k_token_scale=cache.k_token_scale,
        v_token_scale=cache.v_token_scale,
        max_query_len=context.max_query_len,
        quantize_out=quantize_out,
        power_of_two=power_of_two,
    )
    return _project(attention.o_proj, out if isinstance(out, Quantized) else out.flatten(1))


def _mlp(mlp: MLP, x: Operand) -> Tensor:
    quantize, power_of_two = _wants(mlp.down_proj)
    gate_up_T2F = _project(mlp.gate_up_proj, x)
    return _project(mlp.down_proj, silu_mul_quantize(gate_up_T2F, power_of_two) if quantize else silu_mul(gate_up_T2F))


def _wants(linear: Projection | None) -> tuple[bool, bool]:
    """Whether its input comes quantised, and with power-of-two scales. An adapter wants it as it is."""
    quantize = isinstance(linear, Float8Linear) and linear.lora is None
    return quantize, isinstance(linear, Float8Linear) and linear.power_of_two


def _project(linear: Projection, x: Operand) -> Tensor:
    y_TN = _base_product(linear, x)
    if linear.lora is not None:
        assert isinstance(x, Tensor)
        add_branch(linear.lora, y_TN, lora_down(linear.lora, x))
    return y_TN


def _base_product(linear: Projection, x: Operand) -> Tensor:
    if isinstance(linear, Float8Linear):
        codes = x if isinstance(x, Quantized) else quantize_activation(x, linear.power_of_two)
        y_TN = fp8_gemm(codes, linear.quantized)
    else:
        assert isinstance(x, Tensor)
        if linear.fast:
            return F.linear(x, linear.weight, linear.bias)
        y_TN = bf16_gemm(x, linear.weight)
    return y_TN if linear.bias is None else y_TN + linear.bias
