"""What the kernels of latent attention's gradient read and write, for both of their forms (Triton and Gluon).

T tokens, B sequences, H heads; N, R and V sizes of one head.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from octetrl.kernels.attention.attention_order import LOG2E


class LatentGradients(NamedTuple):
    q_THX: Tensor  # [T, H, N + R]
    kv_THX: Tensor  # [T, H, N + V]
    key_THR: Tensor  # of the shared key, by every head


class LatentOperands(NamedTuple):
    """Views that TMA reads. `rows`: log-sum-exp in base 2, then delta, [2 H, T plus padding that aligns every
    sequence]."""

    q_THN: Tensor
    q_THR: Tensor
    dout_THV: Tensor
    k_THN: Tensor
    key_T1R: Tensor
    v_THV: Tensor
    rows: Tensor
    cu_seqlens_B1: Tensor

    @property
    def by_query(self) -> tuple[Tensor, ...]:
        return self.q_THN, self.q_THR, self.dout_THV

    @property
    def by_key(self) -> tuple[Tensor, ...]:
        return self.k_THN, self.key_T1R, self.v_THV

    def numbers(self, softmax_scale: float) -> tuple[float, ...]:
        """Arguments of all kernels; the last ones are the distances of neighbouring heads."""
        counts = self.cu_seqlens_B1.shape[0] - 1, self.q_THN.shape[0], self.rows.stride(0)
        heads = (x.stride(1) for x in (*self.by_query, self.k_THN, self.v_THV))
        return (softmax_scale * LOG2E, softmax_scale, *counts, *heads)

    @property
    def shape(self) -> dict[str, int]:
        sizes = {"NOPE": self.q_THN.shape[2], "ROTARY": self.q_THR.shape[2], "VALUE": self.v_THV.shape[2]}
        return {"HEADS": self.q_THN.shape[1], **sizes}

    def grid(self, block: int) -> tuple[int, int]:
        """Programs that suffice for blocks of this many rows, for any lengths."""
        return self.q_THN.shape[1], self.q_THN.shape[0] // block + self.cu_seqlens_B1.shape[0]


def for_tma(x_THD: Tensor) -> Tensor:
    """`x_THD`, or a copy if TMA cannot read it where it lies."""
    steps = (x_THD.stride(0), x_THD.stride(1), x_THD.data_ptr() // 2)
    return x_THD if x_THD.stride(2) == 1 and all(step % 8 == 0 for step in steps) else x_THD.contiguous()


def descriptor(x_THD: Tensor, rows: int) -> TensorDescriptor:
    """A TMA descriptor for `rows` tokens of one head of a view whose heads lie `stride(1)` elements apart."""
    T, H, D = x_THD.shape
    return TensorDescriptor(x_THD, [T, (H - 1) * x_THD.stride(1) + D], [x_THD.stride(0), 1], [rows, D])
