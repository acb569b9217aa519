"""RMSNorm that multiplies by 1 + weight, as Qwen3-Next and Qwen3.5 have it."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from octetrl.kernels.rows.rms_norm import rms_norm
from octetrl.layers.norm import RMSNorm


class OffsetRMSNorm(RMSNorm):
    """x / sqrt(mean(x^2) + eps) * (1 + weight). The sum is float32, since BF16 has few values near 1."""

    def __init__(self, size: int, eps: float, *, dtype: torch.dtype, device: torch.device | str) -> None:
        super().__init__(size, eps, dtype=dtype, device=device)
        self.weight = nn.Parameter(torch.zeros(size, dtype=dtype, device=device))

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.multiplier, self.eps)

    @property
    def multiplier(self) -> Tensor:
        return self.weight.float() + 1
