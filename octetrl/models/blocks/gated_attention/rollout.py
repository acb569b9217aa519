"""Gated attention's fused form for rollout on a GPU: attention's own (blocks/attention/rollout.py), and then the gate.

T tokens, E hidden size, H query heads, D head size, X heads of q, k and v.
"""

from __future__ import annotations

import torch
from torch import Tensor

from octetrl.layers.sigmoid_gate import sigmoid_gate
from octetrl.models.blocks.attention.rollout import attend
from octetrl.models.blocks.block import RolloutInputs
from octetrl.models.blocks.gated_attention.module import GatedAttention
from octetrl.models.blocks.products import Operand, project


def rollout(attention: GatedAttention, x: Operand, inputs: RolloutInputs) -> Tensor:
    qkv_TX = project(attention.qkv_proj, x)
    q_THD, gate_THD, k_TKD, v_TKD = attention.split(qkv_TX)
    out_THD = attend(attention, torch.cat((q_THD, k_TKD, v_TKD), 1), inputs)
    assert isinstance(out_THD, Tensor), "the gate needs values"
    gated_THD = sigmoid_gate(out_THD, gate_THD)
    out_TE = project(attention.o_proj, gated_THD.flatten(1))
    if attention.probe is not None:
        attention.probe(attention.layer, "qkv_proj", qkv_TX)
        attention.probe(attention.layer, "gated attention", gated_THD)
        attention.probe(attention.layer, "o_proj", out_TE)
    return out_TE
