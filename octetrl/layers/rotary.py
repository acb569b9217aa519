"""The angles of rotary embedding: cos and sin of every position, computed once in float64 and rounded to float32.

Plane r of a head of size D turns by position * theta^(-2r/D). Llama 3.1 and later scale this (`RopeScaling`). Planes
with a wavelength above original context / low_freq_factor turn `factor` times slower. Planes with a wavelength below
original context / high_freq_factor do not change. Between them the two are blended linearly in 1/wavelength.

A forward gathers its rows of the table once (`Rotary`), and every layer reads them.

S positions of the table, T tokens, R = D/2 rotation planes.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor, nn

from octetrl.config.spec import RopeScaling


class Rotary(NamedTuple):
    """cos and sin of each token's angles, float32."""

    cos_TR: Tensor
    sin_TR: Tensor


class RotaryTable(nn.Module):
    """cos and sin of positions 0 .. max_positions - 1. They follow from the spec and are not part of the state."""

    cos_SR: Tensor
    sin_SR: Tensor

    def __init__(
        self,
        head_size: int,
        theta: float,
        scaling: RopeScaling | None,
        max_positions: int,
        *,
        device: torch.device | str,
    ) -> None:
        super().__init__()
        position_S = torch.arange(max_positions, dtype=torch.float64)
        angle_SR = torch.outer(position_S, frequencies(head_size, theta, scaling))
        self.register_buffer("cos_SR", angle_SR.cos().float().to(device), persistent=False)
        self.register_buffer("sin_SR", angle_SR.sin().float().to(device), persistent=False)

    def forward(self, positions_T: Tensor) -> Rotary:
        """positions_T: int64, each below max_positions (otherwise an IndexError, on a GPU a device assert)."""
        return Rotary(self.cos_SR.index_select(0, positions_T), self.sin_SR.index_select(0, positions_T))


def frequencies(head_size: int, theta: float, scaling: RopeScaling | None) -> Tensor:
    """Radians a position for each of the D/2 planes, float64."""
    frequency_R = theta ** (-torch.arange(0, head_size, 2, dtype=torch.float64) / head_size)
    if scaling is None:
        return frequency_R
    turns_R = scaling.original_max_positions * frequency_R / (2 * math.pi)  # in the original context
    blend_R = (turns_R - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    blend_R = blend_R.clamp(0.0, 1.0)
    return frequency_R * (blend_R + (1.0 - blend_R) / scaling.factor)
