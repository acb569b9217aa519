"""The gated delta rule's fused form for training on a GPU: forward and backward.

    qkv, z = n Wqkvz;  b = n Wb, a = n Wa;  q, k, v = conv(qkv);  o = rule(q, k, v, g, beta);  result = norm(o, z) Wo
    do, dz = norm'(dresult Wo^T);  dq, dk, dv, dg, dbeta = rule'(do);  dqkv = conv'(dq, dk, dv);  db, da = ...
    dn = dqkvz Wqkvz^T + db Wb^T + da Wa^T

Saved: n, wgrad's operand of it, and what the projections give. Costly: o. If it is recomputed, the backward also has
q, k, v and the decays. Otherwise it computes them again.

T tokens, E hidden size, H heads of v, V their size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from octetrl.kernels.delta_rule.conv_heads import Heads, conv_heads_backward, conv_heads_packed
from octetrl.kernels.delta_rule.decay_and_beta import decay_and_beta, decay_and_beta_backward
from octetrl.kernels.delta_rule.delta_rule_packed import delta_rule_packed_backward, delta_rule_packed_forward
from octetrl.kernels.delta_rule.gated_rms_norm import gated_rms_norm, gated_rms_norm_backward
from octetrl.kernels.profiler_parts import part
from octetrl.layers.float32_product import product_backward
from octetrl.models.blocks.block import TrainingInputs
from octetrl.models.blocks.gated_delta.module import GatedDelta, Projected
from octetrl.models.blocks.products import Input, Operand, dgrad, gradient_of, input_of, product, wgrad, wgrad_input
from octetrl.models.blocks.saved import Gradients, Saved


class RuleInputs(NamedTuple):
    heads: Heads
    g_TH: Tensor
    beta_TH: Tensor


@dataclass(slots=True)
class SavedDelta(Saved):
    """`costly` is the rule's output [T, H, V]; `made_with_costly` its `RuleInputs`."""

    n_TE: Tensor
    for_wgrad: Operand  # of the first projection
    qkvz_TX: Tensor
    small: tuple[Tensor, ...]
    inputs: TrainingInputs

    def projected(self, delta: GatedDelta) -> Projected:
        return delta.split(self.qkvz_TX, *self.small)


def begin(delta: GatedDelta, n: Input, inputs: TrainingInputs, *, costly: Tensor | None, observe: bool) -> SavedDelta:
    assert isinstance(n.rows, Tensor), "several ops read the norm's result, so it comes as it is"
    with part("quantize"):
        own = input_of(delta.in_proj_qkvz, n.rows, for_wgrad=True)
    qkvz_TX = product(delta.in_proj_qkvz, own)
    small = delta.small_products(n.rows)
    saved = SavedDelta(n_TE=n.rows, for_wgrad=own.for_backward, qkvz_TX=qkvz_TX, small=small, inputs=inputs)
    saved.costly = costly
    if costly is None:
        made = _rule_inputs(delta, saved)
        with part("attention_forward"):
            saved.costly = delta_rule_packed_forward(*made.heads, made.g_TH, made.beta_TH, *_bounds(inputs))
        saved.made_with_costly = made
        if delta.probe is not None:
            delta.probe_all(saved.projected(delta), made.g_TH, made.beta_TH, made.heads, saved.costly)
    return saved


def finish(delta: GatedDelta, saved: SavedDelta) -> Tensor:
    y_THV = _gated(delta, saved)
    with part("quantize"):
        out = input_of(delta.out_proj, y_THV.flatten(1), for_wgrad=False)
    out_TE = product(delta.out_proj, out)
    if delta.probe is not None:
        delta.probe(delta.layer, "gated norm", y_THV)
        delta.probe(delta.layer, "out_proj", out_TE)
    return out_TE


def backward(delta: GatedDelta, saved: SavedDelta, dout_TE: Tensor, gradients: Gradients) -> Tensor:
    in_proj, out_proj, projected = delta.in_proj_qkvz, delta.out_proj, saved.projected(delta)
    with part("quantize"):
        dout = gradient_of(out_proj, dout_TE)
        out = wgrad_input(out_proj, _gated(delta, saved).flatten(1))
    dy_THV = dgrad(out_proj, dout).view(saved.costly.shape)
    wgrad(gradients, "out_proj", out_proj, dout, out)
    del dout, out
    with part("rows"):
        do_THV, dz_THV, gradients["norm.weight"] = gated_rms_norm_backward(
            dy_THV, saved.costly, projected.z_THV, delta.norm.weight, delta.norm.eps
        )
    dqkv_TC, db_TH, da_TH = _rule_backward(delta, saved, projected, do_THV, gradients)
    dqkvz_TX, dsmall = delta.joined(Projected(dqkv_TC, dz_THV, db_TH, da_TH))
    with part("quantize"):
        dqkvz = gradient_of(in_proj, dqkvz_TX)
    dn_TE = dgrad(in_proj, dqkvz)
    wgrad(gradients, "in_proj_qkvz", in_proj, dqkvz, saved.for_wgrad)
    for name, d_TX in zip(delta.small_names, dsmall, strict=True):
        dx_TE, gradients[f"{name}.weight"] = product_backward(d_TX, saved.n_TE, delta.get_parameter(f"{name}.weight"))
        assert dx_TE is not None
        dn_TE = dn_TE + dx_TE
    return dn_TE


def _rule_backward(
    delta: GatedDelta, saved: SavedDelta, projected: Projected, do_THV: Tensor, gradients: Gradients
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of qkv, b and a. Adds those of the convolution and the decay."""
    made: RuleInputs = saved.made_with_costly or _rule_inputs(delta, saved)
    saved.made_with_costly = None
    bounds = _bounds(saved.inputs)
    with part("attention_backward"):
        dq, dk, dv, dg_TH, dbeta_TH = delta_rule_packed_backward(do_THV, *made.heads, made.g_TH, made.beta_TH, *bounds)
    with part("rows"):
        da_TH, db_TH, gradients["A_log"], gradients["dt_bias"] = decay_and_beta_backward(
            dg_TH, dbeta_TH, projected.a_TH, projected.b_TH, delta.A_log, delta.dt_bias
        )
        dqkv_TC, gradients["conv1d.weight"] = conv_heads_backward(
            dq, dk, dv, projected.qkv_TC, delta.conv1d.weight, *bounds, delta.shape
        )
    return dqkv_TC, db_TH, da_TH


def _bounds(inputs: TrainingInputs) -> tuple[Tensor, int]:
    return inputs.context.cu_seqlens_B1, inputs.context.max_seqlen


@torch.no_grad()
def _rule_inputs(delta: GatedDelta, saved: SavedDelta) -> RuleInputs:
    projected = saved.projected(delta)
    with part("rows"):
        heads = conv_heads_packed(projected.qkv_TC, delta.conv1d.weight, *_bounds(saved.inputs), delta.shape)
        g_TH, beta_TH = decay_and_beta(projected.a_TH, projected.b_TH, delta.A_log, delta.dt_bias)
    return RuleInputs(heads, g_TH, beta_TH)


@torch.no_grad()
def _gated(delta: GatedDelta, saved: SavedDelta) -> Tensor:
    with part("rows"):
        return gated_rms_norm(saved.costly, saved.projected(delta).z_THV, delta.norm.weight, delta.norm.eps)
