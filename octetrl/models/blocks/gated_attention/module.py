"""Attention whose output is multiplied by the sigmoid of a gate before the output projection (Qwen3-Next, Qwen3.5).

    q, gate, k, v = x Wqkv;  result = (attention(q, k, v) * sigmoid(gate)) Wo

The gate of a head follows its query in the rows of q_proj. Everything else is `Attention`.

T tokens, E hidden size, H query heads, K kv heads, D head size.
"""

from __future__ import annotations

from torch import Tensor

from octetrl.kernels.rows.rope import rope
from octetrl.layers.context import Context
from octetrl.layers.rotary import Rotary
from octetrl.layers.sigmoid_gate import sigmoid_gate
from octetrl.models.blocks.attention.module import Attention


class GatedAttention(Attention):
    """qkv_proj: E -> (2 H + 2 K) * D."""

    def forward(self, x_TE: Tensor, rotary: Rotary, context: Context) -> Tensor:
        qkv_TX: Tensor = self.qkv_proj(x_TE)
        q_THD, gate_THD, k_TKD, v_TKD = self.split(qkv_TX)
        assert self.q_norm is not None and self.k_norm is not None, "gated attention has QK-norm"
        q_THD, k_TKD = self.q_norm(q_THD), self.k_norm(k_TKD)
        out_THD = self.attend(rope(q_THD, *rotary), rope(k_TKD, *rotary), v_TKD, context)
        gated_THD = sigmoid_gate(out_THD, gate_THD)
        out_TE: Tensor = self.o_proj(gated_THD.flatten(1))
        if self.probe is not None:
            self.probe(self.layer, "qkv_proj", qkv_TX)
            self.probe(self.layer, "gated attention", gated_THD)
            self.probe(self.layer, "o_proj", out_TE)
        return out_TE

    def split(self, qkv_TX: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Queries and gates [T, H, D], keys and values [T, K, D]: views."""
        heads = 2 * self.num_heads, self.num_kv_heads, self.num_kv_heads
        q_T2HD, k_TKD, v_TKD = qkv_TX.view(len(qkv_TX), -1, self.head_size).split(heads, 1)
        return q_T2HD[:, 0::2], q_T2HD[:, 1::2], k_TKD, v_TKD
