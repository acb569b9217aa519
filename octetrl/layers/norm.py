"""RMSNorm as a module: of the residual stream [T, E], or of each head [T, H, D] (Qwen3's QK-norm)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from octetrl.kernels.rows.rms_norm import rms_norm


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight over the last axis. Roundings: kernels/rows/rms_norm.py."""

    def __init__(self, size: int, eps: float, *, dtype: torch.dtype, device: torch.device | str) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size, dtype=dtype, device=device))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps)

    @property
    def multiplier(self) -> Tensor:
        """What normed values are multiplied by."""
        return self.weight
