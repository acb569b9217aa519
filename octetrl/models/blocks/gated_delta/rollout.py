"""The gated delta rule's fused form for rollout on a GPU: its kernels between products of the norm's two forms.

T tokens, E hidden size, H heads of v, V their size.
"""

from __future__ import annotations

from torch import Tensor

from octetrl.kernels.delta_rule.decay_and_beta import decay_and_beta
from octetrl.kernels.delta_rule.gated_rms_norm import gated_rms_norm
from octetrl.models.blocks.block import RolloutInputs
from octetrl.models.blocks.gated_delta.module import GatedDelta
from octetrl.models.blocks.normed import Normed, operand_of, values_of
from octetrl.models.blocks.products import project


def rollout(delta: GatedDelta, x: Normed, inputs: RolloutInputs) -> Tensor:
    qkvz_TX = project(delta.in_proj_qkvz, operand_of(delta.in_proj_qkvz, x))
    projected = delta.split(qkvz_TX, *delta.small_products(values_of(x)))
    g_TH, beta_TH = decay_and_beta(projected.a_TH, projected.b_TH, delta.A_log, delta.dt_bias)
    heads, o_THV = delta.advance(projected.qkv_TC, g_TH, beta_TH, inputs.context)
    y_THV = gated_rms_norm(o_THV, projected.z_THV, delta.norm.weight, delta.norm.eps)
    out_TE = project(delta.out_proj, y_THV.flatten(1))
    if delta.probe is not None:
        delta.probe_all(projected, g_TH, beta_TH, heads, o_THV)
        delta.probe(delta.layer, "gated norm", y_THV)
        delta.probe(delta.layer, "out_proj", out_TE)
    return out_TE
