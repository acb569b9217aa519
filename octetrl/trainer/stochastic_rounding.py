"""float32 to BF16 by chance: up with the probability of the fraction that is cut off, so that the mean is exact.

A BF16 weight near 1 has steps of 1/128; an update of 1e-6 rounded to nearest is lost every time, here it lands once in
some thousand steps. A BF16 number is the upper half of a float32, so: add 16 random bits to the lower half, cut it off
(Gupta et al., arXiv 1502.02551). A value that BF16 holds exactly stays as it is; infinities and NaN stay what they are.

The bits are a function of (seed, step, name) alone. Nothing has to be saved, and a resumed run rounds as the one that
was never stopped. CPU and GPU draw different bits.
"""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor

UPPER_HALF = -(1 << 16)  # 0xFFFF0000 as int32


def round_stochastically(value: Tensor, *, seed: int, step: int, name: str) -> Tensor:
    """BF16 tensor of the same shape. value: float32; `name` tells tensors of one step apart."""
    assert value.dtype == torch.float32, f"stochastic rounding takes float32, got {value.dtype}"
    digest = hashlib.sha256(f"{seed}/{step}/{name}".encode()).digest()
    generator = torch.Generator(value.device).manual_seed(int.from_bytes(digest[:8], "little", signed=True))
    noise = torch.randint(0, 1 << 16, value.shape, dtype=torch.int32, device=value.device, generator=generator)
    rounded = ((value.contiguous().view(torch.int32) + noise) & UPPER_HALF).view(torch.float32)
    return torch.where(value.isfinite(), rounded, value).to(torch.bfloat16)
