"""MLA's attention between the projections: the forward absorbs `kv_b` into the queries, the backward does not.

Rows of `kv_b` [H (N + V), C] are, head by head, the N of Wk and the V of Wv: a head's keys would be Wk latent, its
values Wv latent. The forward never computes them:

    q_latent = round(q_nope Wk)             a head's query in the latent's space
    o        = round(softmax(scale (q_latent . latent + q_rotary . key)) latent)
    out      = round(o Wv^T)

Decode, prefill and training have this one form, so they have one order of sums (docs/fp8.md §12). Both products with
`kv_b` add straight along their depth, head by head (kernels/gemm/head_gemm.py).

The backward uses the other form, because no gradient has to equal another one bit for bit. That form has a third of
the multiplications: it computes keys and values of every head, and the gradient of ordinary attention over them. Their
log-sum-exp is computed again, as P must be normalised in the form in which it is computed. The latents are those of the
cache, and their gradient passes the quantiser straight through.

T tokens, H heads, N nope size, R rotary size, V value size, C latent size, D the head size of ordinary attention.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from octetrl.fp8.format import BLOCK
from octetrl.fp8.quantize import Quantized
from octetrl.kernels.attention.latent_backward import latent_backward
from octetrl.kernels.attention.latent_packed import latent_packed
from octetrl.kernels.gemm.grouped_bf16_gemm import Part, grouped_bf16_gemm
from octetrl.kernels.gemm.head_gemm import can_run, head_gemm, head_gemm_codes
from octetrl.kernels.quantize.quantize_activation import quantize_activation
from octetrl.layers.context import PackedContext
from octetrl.layers.token_group import TokenGroup


class HeadSizes(NamedTuple):
    nope: int
    value: int


def absorb(q_THN: Tensor, kv_b: Tensor, sizes: HeadSizes) -> Tensor:
    """q_latent [T, H, C], its last axis contiguous. No gradient."""
    return _by_head(q_THN, kv_b, Part(0, sizes.nope), turned=True)


def expand(o_THC: Tensor, kv_b: Tensor, sizes: HeadSizes) -> Tensor:
    """out [T, H * V], contiguous. No gradient."""
    return _by_head(o_THC, kv_b, Part(sizes.nope), turned=False).reshape(len(o_THC), -1)


def expand_codes(o_THC: Tensor, kv_b: Tensor, sizes: HeadSizes, power_of_two: bool) -> Quantized:
    """The codes of `expand`, for an FP8 `o_proj`. In the product's kernel if a head's values are whole blocks."""
    if sizes.value % BLOCK == 0 and (not o_THC.is_cuda or can_run(o_THC, kv_b)):
        return head_gemm_codes(o_THC, kv_b, part=Part(sizes.nope), power_of_two=power_of_two)
    return quantize_activation(expand(o_THC, kv_b, sizes), power_of_two)


def _by_head(x_THK: Tensor, kv_b: Tensor, part: Part, *, turned: bool) -> Tensor:
    """[T, H, N]: each head's rows by its part of `kv_b`, which is read where it lies.

    Views that TMA cannot read are copied and multiplied as experts' rows are, with the same bits.
    """
    if not x_THK.is_cuda or can_run(x_THK, kv_b):
        return head_gemm(x_THK, kv_b, turned=turned, part=part)
    tokens, heads, depth = x_THK.shape
    first_H1 = torch.arange(0, heads * tokens + 1, max(1, tokens), dtype=torch.int32, device=x_THK.device)[: heads + 1]
    x_PK = x_THK.transpose(0, 1).reshape(heads * tokens, depth).contiguous()  # of one token it is a view
    return grouped_bf16_gemm(x_PK, kv_b, first_H1, turned=turned, part=part).view(heads, tokens, -1).transpose(0, 1)


class Attended(NamedTuple):
    """What the forward computes, also for the doctor."""

    q_latent_THC: Tensor
    o_THC: Tensor
    out_TV: Tensor


@torch.no_grad()
def attend_packed(
    q_THN: Tensor,
    q_THR: Tensor,
    value_TC: Tensor,
    key_TR: Tensor,
    kv_b: Tensor,
    sizes: HeadSizes,
    context: PackedContext,
    softmax_scale: float,
) -> Attended:
    """The forward over packed sequences. `value_TC`: the latents as the cache would give them."""
    group, num_heads = context.group, q_THN.shape[1]
    if group is not None:
        q_THN, q_THR, value_TC, key_TR, kv_b = _of_own_heads(group, q_THN, q_THR, value_TC, key_TR, kv_b)
    q_latent_THC = absorb(q_THN, kv_b, sizes)
    bounds = context.cu_seqlens_B1, context.max_seqlen
    o_THC = latent_packed(q_latent_THC, q_THR, value_TC, key_TR, *bounds, softmax_scale)
    out_TV = expand(o_THC, kv_b, sizes)
    if group is not None:
        out_TV = group.to_tokens(out_TV.unflatten(1, (-1, sizes.value)), num_heads).flatten(1)
    return Attended(q_latent_THC, o_THC, out_TV)


def _of_own_heads(
    group: TokenGroup, q_THN: Tensor, q_THR: Tensor, value_TC: Tensor, key_TR: Tensor, kv_b: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The operands for all tokens of the heads that this worker has, from those of own tokens."""
    num_heads = q_THN.shape[1]
    own = kv_b.view(num_heads, -1, kv_b.shape[1])[group.heads(num_heads)].flatten(0, 1)
    return group.to_heads(q_THN), group.to_heads(q_THR), group.join_rows(value_TC), group.join_rows(key_TR), own


class AttentionGradients(NamedTuple):
    q_THN: Tensor
    q_THR: Tensor
    latent_TC: Tensor
    key_TR: Tensor
    kv_b: Tensor | None


@torch.no_grad()
def attention_gradients(
    dout_TV: Tensor,
    q_THN: Tensor,
    q_THR: Tensor,
    value_TC: Tensor,
    key_TR: Tensor,
    kv_b: Tensor,
    sizes: HeadSizes,
    context: PackedContext,
    softmax_scale: float,
) -> AttentionGradients:
    """Gradients of `attend_packed`'s result, by ordinary attention over the keys and values of every head."""
    group, num_heads, nope = context.group, q_THN.shape[1], q_THN.shape[2]
    dout_THV, operands = dout_TV.unflatten(1, (-1, sizes.value)), (q_THN, q_THR, value_TC, key_TR, kv_b)
    if group is not None:
        dout_THV, operands = group.to_heads(dout_THV), _of_own_heads(group, *operands)
    q_THN, q_THR, all_TC, key_of_all_TR, own_kv_b = operands
    kv_THX = F.linear(all_TC, own_kv_b).unflatten(1, (-1, sum(sizes)))
    bounds = context.cu_seqlens_B1, context.max_seqlen
    found = latent_backward(dout_THV, q_THN, q_THR, kv_THX, key_of_all_TR, *bounds, softmax_scale)
    dq_THX, dkv_THX, dkey_THR = found if group is None else (group.to_tokens(each, num_heads) for each in found)
    dkv_TX = dkv_THX.flatten(1)
    dkey_TR = dkey_THR.sum(1, dtype=torch.float32).to(key_TR.dtype)
    dkv_b = dkv_TX.t() @ value_TC if kv_b.requires_grad else None
    return AttentionGradients(dq_THX[..., :nope], dq_THX[..., nope:], dkv_TX @ kv_b, dkey_TR, dkv_b)


class PackedAttention(torch.autograd.Function):
    """`attend_packed` with `attention_gradients`. Its arguments after `kv_b` have no gradient."""

    @staticmethod
    def forward(
        ctx: Any,
        q_THN: Tensor,
        q_THR: Tensor,
        latent_TC: Tensor,
        key_TR: Tensor,
        kv_b: Tensor,
        value_TC: Tensor,
        sizes: HeadSizes,
        context: PackedContext,
        softmax_scale: float,
    ) -> tuple[Tensor, ...]:
        ctx.save_for_backward(q_THN, q_THR, value_TC, key_TR, kv_b)
        ctx.settings = sizes, context, softmax_scale
        attended = attend_packed(q_THN, q_THR, value_TC, key_TR, kv_b, sizes, context, softmax_scale)
        ctx.mark_non_differentiable(attended.q_latent_THC, attended.o_THC)
        return tuple(attended)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        found = attention_gradients(grads[2].contiguous(), *ctx.saved_tensors, *ctx.settings)
        return (*found, None, None, None, None)
