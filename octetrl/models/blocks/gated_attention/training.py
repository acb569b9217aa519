"""Gated attention's fused form for training on a GPU: attention's own (blocks/attention/training.py), and the gate.

    q, gate, k, v = n Wqkv;  out = attention(q, k, v);  result = (out * sigmoid(gate)) Wo

Saved: wgrad's operand of n, and q, gate, k, v. Costly: attention's output and its log-sum-exp.

T tokens, E hidden size, H query heads, D head size, Q = H * D, X = (2 H + 2 K) D.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from octetrl.kernels.profiler_parts import part
from octetrl.layers.sigmoid_gate import sigmoid_gate, sigmoid_gate_backward
from octetrl.models.blocks.attention.training import Attended, SavedAttention, attend, attend_backward
from octetrl.models.blocks.block import TrainingInputs
from octetrl.models.blocks.gated_attention.module import GatedAttention
from octetrl.models.blocks.products import Input, dgrad, gradient_of, input_of, product, wgrad, wgrad_input
from octetrl.models.blocks.saved import Gradients


@dataclass(slots=True)
class SavedGated(SavedAttention):
    """`qkv_TX` has the gates too."""


def begin(
    attention: GatedAttention, n: Input, inputs: TrainingInputs, *, costly: Attended | None, observe: bool
) -> SavedGated:
    qkv_TX = product(attention.qkv_proj, n)
    rotated = None
    if costly is None:
        costly, rotated = attend(attention, _without_gates(attention, qkv_TX), inputs, observe)
        if attention.probe is not None:
            attention.probe(attention.layer, "qkv_proj", qkv_TX)
    return SavedGated(n=n.for_backward, qkv_TX=qkv_TX, inputs=inputs, costly=costly, made_with_costly=rotated)


def finish(attention: GatedAttention, saved: SavedGated) -> Tensor:
    gated_TQ = _gated(attention, saved)
    with part("quantize"):
        out = input_of(attention.o_proj, gated_TQ, for_wgrad=False)
    out_TE = product(attention.o_proj, out)
    if attention.probe is not None:
        attention.probe(attention.layer, "gated attention", gated_TQ)
        attention.probe(attention.layer, "o_proj", out_TE)
    return out_TE


def backward(attention: GatedAttention, saved: SavedGated, dout_TE: Tensor, gradients: Gradients) -> Tensor:
    qkv_proj, o_proj = attention.qkv_proj, attention.o_proj
    with part("quantize"):
        dout = gradient_of(o_proj, dout_TE)
        out = wgrad_input(o_proj, _gated(attention, saved))
    dgated_TQ = dgrad(o_proj, dout)
    wgrad(gradients, "o_proj", o_proj, dout, out)
    del dout, out
    _, gate_THD, _, _ = attention.split(saved.qkv_TX)
    with part("rows"):
        dattended_TQ, dgate_TQ = sigmoid_gate_backward(dgated_TQ, saved.costly.out_TQ, gate_THD.flatten(1))
    del dgated_TQ
    qkv_TX = _without_gates(attention, saved.qkv_TX)
    own_TXD = attend_backward(attention, saved, qkv_TX, dattended_TQ, gradients)
    heads = attention.num_heads
    dq_TH2D = torch.stack((own_TXD[:, :heads], dgate_TQ.view(len(dgate_TQ), heads, -1)), 2)
    dqkv_TX = torch.cat((dq_TH2D.flatten(1), own_TXD[:, heads:].flatten(1)), 1)
    del own_TXD, dq_TH2D
    with part("quantize"):
        dqkv = gradient_of(qkv_proj, dqkv_TX)
    dn_TE = dgrad(qkv_proj, dqkv)
    wgrad(gradients, "qkv_proj", qkv_proj, dqkv, saved.n)
    return dn_TE


def _without_gates(attention: GatedAttention, qkv_TX: Tensor) -> Tensor:
    """A copy of q, k and v."""
    q_THD, _, k_TKD, v_TKD = attention.split(qkv_TX)
    return torch.cat((q_THD, k_TKD, v_TKD), 1).flatten(1)


def _gated(attention: GatedAttention, saved: SavedGated) -> Tensor:
    """Attention's output times the sigmoid of its gate, [T, Q]."""
    _, gate_THD, _, _ = attention.split(saved.qkv_TX)
    with part("rows"):
        return sigmoid_gate(saved.costly.out_TQ, gate_THD.flatten(1))
