"""Linear attention by the gated delta rule (arXiv:2412.06464), as Qwen3-Next and Qwen3.5 have it.

    qkv, z = x Wqkvz;  a = x Wa, b = x Wb in float32
    q, k, v = SiLU(causal convolution of each channel of qkv), q and k with length 1, q times dk^-1/2
    g = -e^A_log softplus(a + dt_bias), beta = sigmoid(b)
    S <- e^g S;  S <- S + k (beta (v - S^T k))^T;  o = S^T q
    result = (norm(o) * SiLU(z)) Wo                                   head by head

The order of sums is that of kernels/delta_rule/: chunks of 64 tokens, from a sequence's first one. With a
`PackedContext` (training) the recurrence runs over each sequence of the forward. With a `PagedContext` (rollout) it
continues from the sequence's slot, and leaves what follows from this forward's tokens there.

T tokens, E hidden size, C channels of q, k and v, H heads of v, V their size.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from octetrl.kernels.delta_rule.conv_heads import Heads, conv_heads_packed, conv_heads_slots
from octetrl.kernels.delta_rule.decay_and_beta import decay_and_beta
from octetrl.kernels.delta_rule.delta_rule_packed import delta_rule_packed
from octetrl.kernels.delta_rule.delta_rule_slots import delta_rule_slots
from octetrl.kernels.delta_rule.gated_rms_norm import gated_rms_norm
from octetrl.layers.context import Context, PackedContext, PagedContext
from octetrl.layers.float32_product import Float32Product
from octetrl.layers.linear import Projection
from octetrl.layers.norm import RMSNorm
from octetrl.layers.rotary import Rotary
from octetrl.models.blocks.block import Block, BlockBuilder
from octetrl.models.blocks.gated_delta.layout import GatedDeltaLayout


class Taps(nn.Module):
    """weight [C, taps] of the causal convolution: the last tap reads the token itself."""

    def __init__(self, builder: BlockBuilder, channels: int, taps: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(channels, taps, dtype=builder.dtype, device=builder.device))


class Projected(NamedTuple):
    """What the projections of x give, in the order of the kernels."""

    qkv_TC: Tensor
    z_THV: Tensor
    b_TH: Tensor
    a_TH: Tensor


class GatedDelta(Block):
    """`A_log` and `dt_bias` are float32: in BF16 small updates would be lost."""

    def __init__(self, builder: BlockBuilder, layout: GatedDeltaLayout) -> None:
        super().__init__(builder)
        self.shape, self.grouped, self.dtype = layout.shape, layout.grouped, builder.dtype
        heads, size = self.shape.value_heads, self.shape.value_size
        common: dict[str, Any] = {"dtype": builder.dtype, "device": builder.device}
        self.dt_bias = nn.Parameter(torch.empty(heads, dtype=torch.float32, device=builder.device))
        self.A_log = nn.Parameter(torch.empty(heads, dtype=torch.float32, device=builder.device))
        self.conv1d = Taps(builder, self.shape.channels, self.shape.taps)
        self.in_proj_qkvz = builder.linear("in_proj_qkvz")
        if self.grouped:
            self.in_proj_ba = Float32Product(2 * heads, builder.spec.hidden_size, **common)
        else:
            self.in_proj_b = Float32Product(heads, builder.spec.hidden_size, **common)
            self.in_proj_a = Float32Product(heads, builder.spec.hidden_size, **common)
        self.norm = RMSNorm(size, builder.spec.rms_norm_eps, **common)
        self.out_proj = builder.linear("out_proj")

    @property
    def reader(self) -> Projection | None:
        return None

    @property
    def codes_reader(self) -> Projection | None:
        return self.in_proj_qkvz

    def forward(self, x_TE: Tensor, rotary: Rotary, context: Context) -> Tensor:
        projected = self.split(self.in_proj_qkvz(x_TE), *self.small_products(x_TE))
        g_TH, beta_TH = decay_and_beta(projected.a_TH, projected.b_TH, self.A_log, self.dt_bias)
        if isinstance(context, PackedContext):
            bounds = context.cu_seqlens_B1, context.max_seqlen
            heads = conv_heads_packed(projected.qkv_TC, self.conv1d.weight, *bounds, self.shape)
            o_THV = delta_rule_packed(*heads, g_TH, beta_TH, *bounds)
        else:
            heads, o_THV = self.advance(projected.qkv_TC, g_TH, beta_TH, context)
        y_THV = gated_rms_norm(o_THV, projected.z_THV, self.norm.weight, self.norm.eps)
        out_TE: Tensor = self.out_proj(y_THV.flatten(1))
        if self.probe is not None:
            self.probe_all(projected, g_TH, beta_TH, heads, o_THV)
            self.probe(self.layer, "gated norm", y_THV)
            self.probe(self.layer, "out_proj", out_TE)
        return out_TE

    def small_products(self, x_TE: Tensor) -> tuple[Tensor, ...]:
        """b and a before they are put in order, float32."""
        return tuple(self.get_submodule(name)(x_TE) for name in self.small_names)

    @property
    def small_names(self) -> tuple[str, ...]:
        return ("in_proj_ba",) if self.grouped else ("in_proj_b", "in_proj_a")

    def split(self, qkvz_TX: Tensor, *small: Tensor) -> Projected:
        """Differentiable. Views, unless the rows are grouped by key head."""
        key_heads, value_heads, key_size, value_size, _ = self.shape
        tokens, values = len(qkvz_TX), value_heads * value_size
        if not self.grouped:
            qkv_TC, z_TX = qkvz_TX.split((self.shape.channels, values), 1)
            return Projected(qkv_TC, z_TX.unflatten(1, (value_heads, value_size)), *small)
        sizes = key_size, key_size, values // key_heads, values // key_heads
        q, k, v, z = qkvz_TX.view(tokens, key_heads, -1).split(sizes, 2)
        qkv_TC = torch.cat([part.flatten(1) for part in (q, k, v)], 1)
        b_TH, a_TH = (part.flatten(1) for part in small[0].view(tokens, key_heads, 2, -1).unbind(2))
        return Projected(qkv_TC, z.reshape(tokens, value_heads, value_size), b_TH, a_TH)

    def joined(self, parts: Projected) -> tuple[Tensor, tuple[Tensor, ...]]:
        """The inverse of `split`, for gradients."""
        qkv_TC, z_THV, b_TH, a_TH = parts
        if not self.grouped:
            return torch.cat((qkv_TC, z_THV.flatten(1)), 1), (b_TH, a_TH)
        key_heads, _, key_size, _, _ = self.shape
        keys = key_heads * key_size
        ordered = (*qkv_TC.split((keys, keys, qkv_TC.shape[1] - 2 * keys), 1), z_THV.flatten(1))
        qkvz_TX = torch.cat([part.unflatten(1, (key_heads, -1)) for part in ordered], 2).flatten(1)
        return qkvz_TX, (torch.stack([part.unflatten(1, (key_heads, -1)) for part in (b_TH, a_TH)], 2).flatten(1),)

    def advance(self, qkv_TC: Tensor, g_TH: Tensor, beta_TH: Tensor, context: PagedContext) -> tuple[Heads, Tensor]:
        """The heads and the rule's output, with the sequences' slots advanced. No gradient."""
        assert context.states is not None, "a layer with linear attention has slots for its sequences"
        rows, state = context.states.rows, context.states.layers[self.layer]
        heads = conv_heads_slots(qkv_TC, self.conv1d.weight, rows, state, self.shape)
        return heads, delta_rule_slots(*heads, g_TH, beta_TH, rows, state)

    def probe_all(self, projected: Projected, g_TH: Tensor, beta_TH: Tensor, heads: Heads, o_THV: Tensor) -> None:
        """Passes the values up to the rule's output to the probe."""
        assert self.probe is not None
        self.probe(self.layer, "in_proj", torch.cat((projected.qkv_TC, projected.z_THV.flatten(1)), 1))
        self.probe(self.layer, "decay", g_TH)
        self.probe(self.layer, "update rate", beta_TH)
        for name, value in zip("qkv", heads, strict=True):
            self.probe(self.layer, f"{name} of the rule", value)
        self.probe(self.layer, "delta rule", o_THV)
