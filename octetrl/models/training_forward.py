"""The decoder as a GPU trains it: each layer of `models/decoder.py` is one autograd node, its backward written out.

Forward, with the kernels of `rollout_forward` and so with its bits:

    n1 = norm(h0);  qkv = n1 Wqkv;  q, k, v = rotate(qkv);  out = attention(q, k, v);  h1 = h0 + out Wo
    n2 = norm(h1);  gate_up = n2 Wgu;  y = SiLU(gate) up;                              h2 = h1 + y Wdown

Backward, from dh2 and what was kept of the forward:

    dy = dh2 Wdown^T;         dgate_up = silu_mul'(dy);     dWdown = dh2^T y;      dWgu = dgate_up^T n2
    dh1 = dh2 + norm'(dgate_up Wgu^T);                      dWo = dh1^T out
    dq, dk, dv = attention'(dh1 Wo^T);  dqkv = rotate'(dq, dk, dv);                dWqkv = dqkv^T n1
    dh0 = dh1 + norm'(dqkv Wqkv^T)

Written out, because what autograd strings together from modules reads and writes memory between any two of them. Here
every FP8 operand is quantised once, in one read and where it can be in the kernel that makes it, into codes along its
rows (forward, dgrad) and along tokens (wgrad); gradients of the gated unit exist as codes alone; and the residual's
gradient is added where the norm's is made.

What is kept from forward to backward (`Keep`), per token and layer, in bytes:

    layer        h0                       2 E                           the layer runs again, down projection aside
    attention    h0, out, its lse         2 E + 2 H D + 4 H             and attention aside
    everything   h0, h1, qkv, out, lse, gate_up, and n1, n2 as wgrad reads them
                                          4 E + 2 X + 2 H D + 4 H + 4 F + 2 E (FP8, as codes) or + 4 E (BF16)

A layer that runs again has the same bits: nothing in it is random, no sum depends on what else runs. Codes kept for
wgrad are those that quantising again would give (tests/gpu/test_training_forward.py), at half the memory of the values.

With adapters (layers/lora.py) the weights are frozen: no product makes a gradient of theirs, their inputs stay in BF16
for the branch, which is added to the product in place, and its gradients are made beside dgrad and in wgrad's place.

T tokens, E hidden size, F intermediate size, H query heads, K kv heads, D head size, X = (H + 2 K) D.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from octetrl.fp8.gemm import fp8_gemm_dgrad, fp8_gemm_wgrad
from octetrl.fp8.quantize import Quantized
from octetrl.kernels.attention.attention_packed import attention_packed_backward, attention_packed_forward_triton
from octetrl.kernels.attention.kv_store import ReplayedKV
from octetrl.kernels.attention.qkv_rotate import qkv_rotate
from octetrl.kernels.attention.qkv_rotate_backward import qkv_rotate_backward
from octetrl.kernels.gemm.bf16_gemm import bf16_gemm
from octetrl.kernels.gemm.fp8_gemm import fp8_gemm
from octetrl.kernels.parts import part
from octetrl.kernels.quantize.quantize_activation import quantize_activation
from octetrl.kernels.quantize.quantize_both import quantize_both
from octetrl.kernels.quantize.quantize_tokens import quantize_tokens
from octetrl.kernels.rows.add_rms_norm import add_rms_norm
from octetrl.kernels.rows.rms_norm_backward import rms_norm_backward
from octetrl.kernels.rows.silu_mul import silu_mul_backward_triton, silu_mul_triton
from octetrl.kernels.rows.silu_mul_backward_quantize import silu_mul_backward_quantize
from octetrl.kernels.rows.silu_mul_quantize import silu_mul_quantize
from octetrl.layers.context import Context, PackedContext
from octetrl.layers.linear import Float8Linear, Projection
from octetrl.layers.lora import add_branch, lora_dgrad, lora_down, lora_dt, lora_wgrad
from octetrl.layers.norm import RMSNorm
from octetrl.layers.rotary import Rotary
from octetrl.models.blocks.attention.module import Attention
from octetrl.models.decoder import Decoder, DecoderLayer, RunLayer
from octetrl.models.rollout_forward import can_fuse

Keep = Literal["nothing", "layer", "attention", "everything"]
Operand = Tensor | Quantized


def fused_layer_runner(model: Decoder, keep: Keep) -> RunLayer | None:
    """What `Decoder.forward` takes as `run_layer`; None where the kernels here do not know the model, or its device."""
    if not model.lm_head_weight.is_cuda or not can_fuse(model):
        return None
    return partial(_run_layer, keep=keep)


def _run_layer(layer: nn.Module, hidden_TE: Tensor, rotary: Rotary, context: Context, *, keep: Keep) -> Tensor:
    assert isinstance(layer, DecoderLayer) and isinstance(context, PackedContext)
    if not torch.is_grad_enabled():
        keep = "nothing"
    out_TE: Tensor = _Layer.apply(hidden_TE, layer, rotary, context, keep, *layer.parameters())
    return out_TE


# ---------------------------------------------------------------- the layer


class _Input(NamedTuple):
    """What a linear multiplies: `rows` in forward (dgrad, if a gradient), `tokens` in wgrad; one tensor if BF16."""

    rows: Operand
    tokens: Operand | None


class _Attended(NamedTuple):
    out_TQ: Tensor  # Q = H * D
    lse2_TH: Tensor


@dataclass(slots=True)
class _Activations:
    """What a layer's backward reads, of a forward up to gate_up. Inputs of linears as wgrad reads them."""

    n1: Operand
    qkv_TX: Tensor
    attended: _Attended
    h1_TE: Tensor
    n2: Operand
    gate_up_T2F: Tensor
    rotated: tuple[Tensor, ReplayedKV] | None  # made for this backward, never kept for it


class _Layer(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        h0_TE: Tensor,
        layer: DecoderLayer,
        rotary: Rotary,
        context: PackedContext,
        keep: Keep,
        *parameters: Tensor,
    ) -> Tensor:
        down = layer.mlp.down_proj
        activations = _up_to_gate_up(layer, h0_TE, rotary, context, for_wgrad=keep == "everything", observe=True)
        with part("rows"):
            y = _gated(down, activations.gate_up_T2F)
        h2_TE = _product(down, y)
        with part("rows"):
            h2_TE.add_(activations.h1_TE)
        ctx.save_for_backward(h0_TE, *parameters)  # parameters: so that autograd notices if one changes before backward
        activations.rotated = None
        ctx.layer, ctx.rotary, ctx.context = layer, rotary, context
        ctx.activations = activations if keep == "everything" else None
        ctx.attended = activations.attended if keep == "attention" else None
        return h2_TE

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        h0_TE = ctx.saved_tensors[0]
        layer: DecoderLayer = ctx.layer
        activations: _Activations | None = ctx.activations
        if activations is None:
            activations = _up_to_gate_up(layer, h0_TE, ctx.rotary, ctx.context, for_wgrad=True, attended=ctx.attended)
        ctx.activations = ctx.attended = None  # to be freed on the way
        dweight: dict[str, Tensor | None] = {}
        dh1_TE = _mlp_backward(layer, activations, grads[0], dweight)
        dh0_TE = _attention_backward(layer, activations, h0_TE, dh1_TE, ctx.rotary, ctx.context, dweight)
        return dh0_TE, None, None, None, None, *[dweight.get(name) for name, _ in layer.named_parameters()]


def _up_to_gate_up(
    layer: DecoderLayer,
    h0_TE: Tensor,
    rotary: Rotary,
    context: PackedContext,
    *,
    for_wgrad: bool,
    observe: bool = False,
    attended: _Attended | None = None,
) -> _Activations:
    """The layer's forward as far as gate_up. `observe`: collects K's and V's amax; `attended`: kept, not made again."""
    attention, mlp = layer.attention, layer.mlp
    n1 = _normed(h0_TE, layer.attention_norm, attention.qkv_proj, for_wgrad)
    qkv_TX = _product(attention.qkv_proj, n1)
    rotated = None
    if attended is None:
        rotated = q_THD, kv = _rotated(attention, qkv_TX, rotary, context, observe)
        with part("attention_forward"):
            out_THD, lse2_TH = attention_packed_forward_triton(
                q_THD, kv, context.cu_seqlens_B1, context.max_seqlen, attention.softmax_scale
            )
        attended = _Attended(out_THD.flatten(1), lse2_TH)
    with part("quantize"):
        out = _input(attention.o_proj, attended.out_TQ, for_wgrad=False)
    h1_TE = _product(attention.o_proj, out)  # less h0, which the norm adds
    n2 = _normed(h1_TE, layer.mlp_norm, mlp.gate_up_proj, for_wgrad, add_TE=h0_TE)
    gate_up_T2F = _product(mlp.gate_up_proj, n2)
    kept_n1, kept_n2 = (n.rows if n.tokens is None else n.tokens for n in (n1, n2))
    return _Activations(kept_n1, qkv_TX, attended, h1_TE, kept_n2, gate_up_T2F, rotated)


def _mlp_backward(
    layer: DecoderLayer, activations: _Activations, dh2_TE: Tensor, dweight: dict[str, Tensor | None]
) -> Tensor:
    """dh1 [T, E]; fills in the gradients of down, gate_up and the norm before them."""
    gate_up, down = layer.mlp.gate_up_proj, layer.mlp.down_proj
    with part("quantize"):
        dh2 = _input(down, dh2_TE.contiguous(), for_wgrad=True, is_gradient=True)
    dy_TF = _dgrad(down, dh2)
    with part("rows"):
        dgate_up, y = _gated_backward(layer, activations.gate_up_T2F, dy_TF)
    del dy_TF
    _wgrad(dweight, "mlp.down_proj", down, dh2, y)
    del y, dh2
    dn2_TE = _dgrad(gate_up, dgate_up)
    _wgrad(dweight, "mlp.gate_up_proj", gate_up, dgate_up, activations.n2)
    del dgate_up
    norm = layer.mlp_norm
    with part("rows"):
        dh1_TE, dnorm_E = rms_norm_backward(dn2_TE, activations.h1_TE, norm.weight, norm.eps, dh2_TE)
    dweight["mlp_norm.weight"] = dnorm_E
    return dh1_TE


def _attention_backward(
    layer: DecoderLayer,
    activations: _Activations,
    h0_TE: Tensor,
    dh1_TE: Tensor,
    rotary: Rotary,
    context: PackedContext,
    dweight: dict[str, Tensor | None],
) -> Tensor:
    """dh0 [T, E]; fills in the gradients of o, QK-norm, qkv and the norm before them."""
    attention = layer.attention
    qkv_proj, o_proj = attention.qkv_proj, attention.o_proj
    out_TQ, lse2_TH = activations.attended
    with part("quantize"):
        dh1 = _input(o_proj, dh1_TE, for_wgrad=True, is_gradient=True)
        out = _wgrad_input(o_proj, out_TQ)
    dout_TQ = _dgrad(o_proj, dh1)
    _wgrad(dweight, "attention.o_proj", o_proj, dh1, out)
    del dh1, out
    rotated, activations.rotated = activations.rotated, None
    q_THD, kv = rotated or _rotated(attention, activations.qkv_TX, rotary, context, observe=False)
    with part("attention_backward"):
        dq_THD, dk_TKD, dv_TKD = attention_packed_backward(
            dout_TQ.view(q_THD.shape),
            q_THD,
            kv,
            out_TQ.view(q_THD.shape),
            lse2_TH,
            context.cu_seqlens_B1,
            context.max_seqlen,
            attention.softmax_scale,
        )
    del rotated, q_THD, kv, dout_TQ
    weights, eps = _qk_norm(attention)
    qkv_TXD = activations.qkv_TX.view(h0_TE.shape[0], -1, attention.head_size)
    with part("rows"):
        dqkv_TXD, dq_norm_D, dk_norm_D = qkv_rotate_backward(dq_THD, dk_TKD, dv_TKD, qkv_TXD, *weights, eps, *rotary)
    del dq_THD, dk_TKD, dv_TKD
    dweight["attention.q_norm.weight"], dweight["attention.k_norm.weight"] = dq_norm_D, dk_norm_D
    with part("quantize"):
        dqkv = _input(qkv_proj, dqkv_TXD.flatten(1), for_wgrad=True, is_gradient=True)
    dn1_TE = _dgrad(qkv_proj, dqkv)
    _wgrad(dweight, "attention.qkv_proj", qkv_proj, dqkv, activations.n1)
    if qkv_proj.bias is not None and qkv_proj.bias.requires_grad:
        dweight["attention.qkv_proj.bias"] = dqkv_TXD.flatten(1).sum(0, dtype=torch.float32).to(qkv_proj.bias.dtype)
    norm = layer.attention_norm
    with part("rows"):
        dh0_TE, dnorm_E = rms_norm_backward(dn1_TE, h0_TE, norm.weight, norm.eps, dh1_TE)
    dweight["attention_norm.weight"] = dnorm_E
    return dh0_TE


# ---------------------------------------------------------------- between the GEMMs


def _normed(x_TE: Tensor, norm: RMSNorm, eater: Projection, for_wgrad: bool, add_TE: Tensor | None = None) -> _Input:
    """The norm of x + add, as `eater` multiplies it. The sum replaces x."""
    if not isinstance(eater, Float8Linear) or eater.lora is not None or for_wgrad:
        with part("rows"):
            _, n_TE = add_rms_norm(add_TE, x_TE, norm.weight, norm.eps, quantize=False)
        with part("quantize"):
            return _input(eater, n_TE, for_wgrad=for_wgrad)
    with part("rows"):
        _, n = add_rms_norm(add_TE, x_TE, norm.weight, norm.eps, quantize=True, power_of_two=eater.power_of_two)
    return _Input(n, None)


def _rotated(
    attention: Attention, qkv_TX: Tensor, rotary: Rotary, context: PackedContext, observe: bool
) -> tuple[Tensor, ReplayedKV]:
    """Q as attention multiplies it, K and V as the rollout's cache held them."""
    layer = attention.layer
    weights, eps = _qk_norm(attention)
    amax_2LK = context.kv_amax_2LK if observe else None
    with part("rows"):
        return qkv_rotate(
            qkv_TX.view(qkv_TX.shape[0], -1, attention.head_size),
            *weights,
            eps,
            *rotary,
            attention.num_heads,
            attention.num_kv_heads,
            kv_mode=context.kv_mode,
            quantize_k=attention.quantize_k,
            k_scale_K=None if context.k_scale_LK is None else context.k_scale_LK[layer],
            v_scale_K=None if context.v_scale_LK is None else context.v_scale_LK[layer],
            amax_2K=None if amax_2LK is None else amax_2LK[:, layer],
        )


def _qk_norm(attention: Attention) -> tuple[tuple[Tensor | None, Tensor | None], float]:
    q_norm, k_norm = attention.q_norm, attention.k_norm
    if q_norm is None or k_norm is None:
        return (None, None), 0.0
    return (q_norm.weight, k_norm.weight), q_norm.eps


def _gated(down: Projection, gate_up_T2F: Tensor) -> _Input:
    if isinstance(down, Float8Linear) and down.lora is None:
        return _Input(silu_mul_quantize(gate_up_T2F, down.power_of_two), None)
    return _input(down, silu_mul_triton(gate_up_T2F), for_wgrad=False)


def _gated_backward(layer: DecoderLayer, gate_up_T2F: Tensor, dy_TF: Tensor) -> tuple[_Input, Operand]:
    """The gradient of gate_up as its GEMMs read it, and y as wgrad of the down projection does."""
    gate_up, down = layer.mlp.gate_up_proj, layer.mlp.down_proj
    adapted = gate_up.lora is not None or down.lora is not None
    if isinstance(gate_up, Float8Linear) and isinstance(down, Float8Linear) and not adapted:
        both, codes = silu_mul_backward_quantize(gate_up_T2F, dy_TF, down.power_of_two, square=down.square_wgrad)
        return _Input(*both), codes
    y = _wgrad_input(down, silu_mul_triton(gate_up_T2F))
    dgate_up_T2F = silu_mul_backward_triton(gate_up_T2F, dy_TF)
    return _input(gate_up, dgate_up_T2F, for_wgrad=True, is_gradient=True), y


# ---------------------------------------------------------------- the GEMMs


def _input(linear: Projection, x_TC: Tensor, *, for_wgrad: bool, is_gradient: bool = False) -> _Input:
    """A BF16 tensor [T, C] as `linear`'s GEMMs multiply it."""
    if not isinstance(linear, Float8Linear):
        return _Input(x_TC, x_TC)
    if linear.lora is not None:  # the weight is frozen, the adapter reads BF16
        return _Input(quantize_activation(x_TC, linear.power_of_two), x_TC)
    if not for_wgrad:
        return _Input(quantize_activation(x_TC, linear.power_of_two), None)
    square = linear.square_wgrad and not is_gradient
    return _Input(*quantize_both(x_TC, linear.power_of_two, square=square))


def _wgrad_input(linear: Projection, x_TC: Tensor) -> Operand:
    """A BF16 tensor [T, C] as wgrad alone multiplies it, in the forward having been `linear`'s input."""
    if not isinstance(linear, Float8Linear) or linear.lora is not None:
        return x_TC
    return quantize_tokens(x_TC, linear.power_of_two, linear.square_wgrad)


def _product(linear: Projection, x: _Input) -> Tensor:
    with part("gemm_forward"):
        y_TN = _base_product(linear, x.rows)
        if linear.lora is not None:
            assert isinstance(x.tokens, Tensor)
            add_branch(linear.lora, y_TN, lora_down(linear.lora, x.tokens))
        return y_TN


def _base_product(linear: Projection, x: Operand) -> Tensor:
    if isinstance(linear, Float8Linear):
        assert isinstance(x, Quantized)
        linear.check_codes()
        y_TN = fp8_gemm(x, linear.forward_operand())
    else:
        assert isinstance(x, Tensor)
        if linear.fast:
            return F.linear(x, linear.weight, linear.bias)
        y_TN = bf16_gemm(x, linear.weight)
    return y_TN if linear.bias is None else y_TN + linear.bias


def _dgrad(linear: Projection, dy: _Input) -> Tensor:
    with part("gemm_dgrad"):
        if isinstance(linear, Float8Linear):
            assert isinstance(dy.rows, Quantized)
            dx_TK = fp8_gemm_dgrad(dy.rows, linear.dgrad_operand(), linear.backend)
        else:
            assert isinstance(dy.rows, Tensor)
            dx_TK = dy.rows @ linear.weight
        if linear.lora is not None:
            assert isinstance(dy.tokens, Tensor)
            dx_TK.add_(lora_dgrad(linear.lora, lora_dt(linear.lora, dy.tokens), dx_TK.dtype))
        return dx_TK


def _wgrad(dweight: dict[str, Tensor | None], name: str, linear: Projection, dy: _Input, x: Operand) -> None:
    """The gradient of what is trained: the weight, an adapter's A and B, or nothing."""
    with part("gemm_wgrad"):
        if linear.lora is not None:
            assert isinstance(dy.tokens, Tensor) and isinstance(x, Tensor)
            t_TPR, dt_TPR = lora_down(linear.lora, x), lora_dt(linear.lora, dy.tokens)
            gradients = lora_wgrad(linear.lora, dy.tokens, x, t_TPR, dt_TPR)
            dweight[f"{name}.lora.a"], dweight[f"{name}.lora.b"] = gradients
        elif linear.weight is None or not linear.weight.requires_grad:
            return
        elif isinstance(linear, Float8Linear):
            assert isinstance(dy.tokens, Quantized) and isinstance(x, Quantized)
            dweight[f"{name}.weight"] = fp8_gemm_wgrad(dy.tokens, x, linear.backend, linear.weight.dtype)
        else:
            assert isinstance(dy.tokens, Tensor) and isinstance(x, Tensor)
            dweight[f"{name}.weight"] = dy.tokens.t() @ x
